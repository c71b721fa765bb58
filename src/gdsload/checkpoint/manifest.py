"""The manifest of a checkpoint: checksums of its headers and of the blocks of its tensors.

    file ──► header: one checksum
         └─► tensor: one checksum for each block of `block_bytes`, counted from its first byte

A manifest is a JSON file beside the shards. It has the checksums of a tensor one after the other,
as one hexadecimal string. Not responsible for reading and comparing bytes (`loading.integrity`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload.checkpoint.file_io import read_small
from gdsload.checkpoint.locate import path_text
from gdsload.checkpoint.strict_json import require_room_to_parse
from gdsload.errors import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    GdsloadError,
    extra_hint,
    one_line,
    shown,
)
from gdsload.system.parallel import in_thread
from gdsload.system.stall import STALL_SECONDS

if TYPE_CHECKING:
    from gdsload.checkpoint.checkpoint import Checkpoint

MANIFEST_NAME = "gdsload-manifest.json"
FORMAT = "gdsload-manifest-1"
# A difference is reported for a block of this size. The checksum of a smaller part of a tensor is
# not known, so that a slice is checked only in blocks that it contains wholly.
BLOCK_BYTES = 8 << 20
# The algorithms, and the characters of their checksums. xxh3_128 hashes four times as fast as
# zlib.crc32 and five times as fast as blake3; sha256 also withstands an attacker.
XXH3, SHA256 = "xxh3_128", "sha256"
ALGORITHMS = {XXH3: 32, SHA256: 64}
LIMIT_BYTES = 1 << 30  # of a manifest; one of a million tensors has some 80 MB


class FileChecksums(NamedTuple):
    """The checksums of one shard, and its size in bytes."""

    size: int
    header: str
    tensors: dict[str, str]


class Manifest(NamedTuple):
    """Checksums by the names of the shards."""

    path: str
    algorithm: str
    block_bytes: int
    files: dict[str, FileChecksums]


def hash_function(algorithm: str) -> Callable[[Any], str]:
    """The function from bytes to a checksum. It releases the GIL.

    Raises GdsloadError if its library is not installed.
    """
    if algorithm == SHA256:
        return lambda data: hashlib.sha256(data).hexdigest()
    try:
        from xxhash import xxh3_128_hexdigest
    except ImportError as error:
        raise GdsloadError(
            f"checksums of {algorithm} need xxhash: {extra_hint('verify')} (manifests of"
            " `gdsload manifest --algorithm sha256` need nothing)"
        ) from error
    found: Callable[[Any], str] = xxh3_128_hexdigest
    return found


def manifest_path(checkpoint: Checkpoint) -> str:
    """Where the manifest of a checkpoint is by default: beside its first shard."""
    first = checkpoint.shards[0]
    if first.directory is not None:
        return first.directory.path_of(MANIFEST_NAME)
    return os.path.join(os.path.dirname(first.path), MANIFEST_NAME)


def command_for(checkpoint: Checkpoint, algorithm: str) -> str:
    """The command that writes the manifest beside the first shard, for messages."""
    option = "" if algorithm == XXH3 else f" --algorithm {algorithm}"
    output = "" if checkpoint.shards[0].directory is None else " --output FILE"
    return f"gdsload manifest {checkpoint.source}{option}{output}"


def manifest_of(checkpoint: Checkpoint, algorithm: str = XXH3) -> Manifest:
    """The manifest beside the first shard, of any algorithm; a message asks for one of
    `algorithm`. Raises as `read_manifest`, and CheckpointError for shards of several
    directories."""
    path, first = manifest_path(checkpoint), checkpoint.shards[0]
    folders = {os.path.abspath(os.path.dirname(shard.original_path)) for shard in checkpoint.shards}
    if len(folders) > 1:
        raise CheckpointError(
            f"{checkpoint.source}: its files are in several directories, and a manifest is of the"
            " files of one: load those of each directory by themselves",
            path=checkpoint.source,
        )
    try:
        if first.directory is None:
            # The process may have changed its directory since the checkpoint was opened.
            there = os.path.join(os.path.dirname(first.absolute_path), MANIFEST_NAME)
            raw = _read(there, checkpoint.stall_seconds)
        else:
            read = partial(first.directory.read, MANIFEST_NAME, LIMIT_BYTES)
            raw = in_thread(read, path, stall_seconds=checkpoint.stall_seconds)
    except CheckpointNotFound as error:
        raise _absent(path, command_for(checkpoint, algorithm), error) from None
    return parse_manifest(raw, path)


def read_manifest(
    path: str, source: str = "SOURCE", stall_seconds: float = STALL_SECONDS
) -> Manifest:
    """Reads and validates a manifest. `source` is the checkpoint, for messages.

    Raises:
        CheckpointNotFound: There is none.
        CheckpointError: It cannot be read or is invalid.
        StallError: The storage did not answer for `stall_seconds`.
    """
    path = path_text(path)
    try:
        raw = _read(path, stall_seconds)
    except CheckpointNotFound as error:
        raise _absent(path, f"gdsload manifest {source} --output {path}", error) from None
    return parse_manifest(raw, path)


def _read(path: str, stall_seconds: float) -> bytes:
    return in_thread(partial(read_small, path, LIMIT_BYTES), path, stall_seconds=stall_seconds)


def _absent(path: str, command: str, error: CheckpointNotFound) -> CheckpointNotFound:
    return CheckpointNotFound(
        f"{path}: there is no manifest; `{command}` writes it",
        path=path,
        errno=error.errno,
    )


def parse_manifest(raw: bytes, path: str) -> Manifest:
    """The manifest with these bytes.

    Raises CheckpointError if they are invalid, PlacementError if parsing takes too much memory.
    """
    require_room_to_parse(raw, path)
    try:
        top = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"it is not JSON: {error}") from None
    if not isinstance(top, dict) or top.get("format") != FORMAT:
        raise _invalid(path, f"its format is not {FORMAT!r}")
    algorithm, block_bytes = top.get("algorithm"), top.get("block_bytes")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise _invalid(path, f"its algorithm must be one of {', '.join(ALGORITHMS)}")
    if type(block_bytes) is not int or block_bytes < 1:
        raise _invalid(path, "its block_bytes is not a positive integer")
    files = top.get("files")
    if not isinstance(files, dict):
        raise _invalid(path, "it has no files")
    checksum = re.compile(f"([0-9a-f]{{{ALGORITHMS[algorithm]}}})*")
    return Manifest(
        path,
        algorithm,
        block_bytes,
        {name: _file_checksums(path, name, entry, checksum) for name, entry in files.items()},
    )


def _file_checksums(path: str, name: str, entry: Any, checksum: re.Pattern[str]) -> FileChecksums:
    fields = entry if isinstance(entry, dict) else {}
    size, header, tensors = fields.get("size"), fields.get("header"), fields.get("tensors")
    if type(size) is not int or not isinstance(header, str) or not isinstance(tensors, dict):
        raise _invalid(path, f"its entry of {name!r} has no size, header and tensors")
    if size < 0:
        raise _invalid(path, f"its entry of {name!r} has a negative size")
    for text in (header, *tensors.values()):
        if not isinstance(text, str) or not checksum.fullmatch(text):
            raise _invalid(path, f"its entry of {name!r} has something that is no checksum")
    return FileChecksums(size, header, tensors)


def _invalid(path: str, fault: str) -> CheckpointError:
    return CheckpointError(f"{path}: this is not a valid manifest: {fault}", path=path)


def manifest_json(algorithm: str, files: Mapping[str, FileChecksums]) -> bytes:
    """The text of a manifest, of blocks of `BLOCK_BYTES`."""
    top = {
        "format": FORMAT,
        "algorithm": algorithm,
        "block_bytes": BLOCK_BYTES,
        "files": {name: entry._asdict() for name, entry in files.items()},
    }
    return json.dumps(top, indent=0).encode()


def other_entries(path: str, algorithm: str, names: Container[str]) -> dict[str, FileChecksums]:
    """The entries of files that are not among `names`, in the manifest at `path`; none if there is
    no valid one.

    Raises GdsloadError if they are by another algorithm: one manifest cannot have both; and if it
    is a device or a pipe, which a file would replace. Raises CheckpointUnreadable if it cannot be
    opened: its entries would be lost.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise GdsloadError(f"{one_line(path)}: this is no regular file, and is not replaced")
    try:
        before = read_manifest(path)
    except CheckpointError as error:
        if isinstance(error, CheckpointUnreadable) and not isinstance(error, CheckpointNotFound):
            raise
        return {}
    others = {name: entry for name, entry in before.files.items() if name not in names}
    if others and (before.algorithm, before.block_bytes) != (algorithm, BLOCK_BYTES):
        raise GdsloadError(
            f"{one_line(path)}: it has {before.algorithm} checksums of"
            f" {shown(next(iter(others)))}, which would be lost: write those of {algorithm} to"
            " another file, or remove this one"
        )
    return others


def write_manifest(path: str, algorithm: str, files: Mapping[str, FileChecksums]) -> None:
    """Writes a manifest: the whole file appears at once, or nothing does.

    Entries of other files stay.

    Raises:
        GdsloadError: The manifest at `path` has entries of other files by another algorithm, or
            cannot be opened.
        OSError: It cannot be written.
    """
    text = manifest_json(algorithm, {**other_entries(path, algorithm, files), **files})
    directory = os.path.dirname(path) or "."
    fd, scratch = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=directory)
    try:
        with open(fd, "wb") as out:
            out.write(text)
            out.flush()
            os.fchmod(out.fileno(), 0o644)
            os.fsync(out.fileno())
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
