"""The commands `manifest` and `verify`: write the checksums of a checkpoint, and compare them.

The bytes are read as by a load, in windows of bounded memory; torch is not imported.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from gdsload.checkpoint import Checkpoint
from gdsload.checkpoint.manifest import (
    ALGORITHMS,
    BLOCK_BYTES,
    SHA256,
    XXH3,
    manifest_path,
    other_entries,
    write_manifest,
)
from gdsload.cli import terminal
from gdsload.errors import GdsloadError, IntegrityError, one_line
from gdsload.loading.batch import Batch
from gdsload.loading.integrity import Recorder, Verifier, open_verifier
from gdsload.loading.session import Session
from gdsload.loading.settings import ReadSettings
from gdsload.planning.read_plan import ByteRange, grouped
from gdsload.planning.tensor_slices import PartName
from gdsload.report import LoadReport, count, size
from gdsload.system.progress_bar import progress_bar, stderr_is_terminal

# Bytes that are in memory together. Longer tensors are read in parts of this size.
_WINDOW_BYTES = 8 * BLOCK_BYTES


@click.command(short_help="Write the checksums of a checkpoint.")
@terminal.source_of
@click.option(
    "--algorithm",
    type=click.Choice(list(ALGORITHMS)),
    default=XXH3,
    show_default=True,
    help="xxh3_128 is fast; sha256 also withstands an attacker.",
)
@click.option("--output", type=terminal.FILE, help="The manifest, if not next to SOURCE.")
@terminal.json_of
@terminal.common
def manifest(source: str, algorithm: str, output: str | None, as_json: bool, **where: Any) -> None:
    """Writes a checksum of each header and of each 8 MiB of a tensor into gdsload-manifest.json.

    Loads with verify="checksum", and `gdsload verify`, compare the bytes with it. An existing
    manifest keeps its entries of other files, which must be of the same algorithm.
    """
    with Checkpoint.open(source, **where) as checkpoint:
        if checkpoint.shards[0].directory is not None and not output:
            raise click.UsageError("SOURCE is a URL: --output names the file to write")
        path = output or manifest_path(checkpoint)
        if output and os.path.islink(output):
            path = os.path.realpath(output)  # the link stays
        other_entries(path, algorithm, [shard.name for shard in checkpoint.shards])  # or an error
        hint = "" if output else " (--output names another file)"
        with _writing_errors(path, hint), tempfile.TemporaryFile(dir=os.path.dirname(path) or "."):
            pass  # before everything is read, which may take minutes
        recorder = Recorder(checkpoint, algorithm)
        with _bar(checkpoint, "manifest") as advance:
            _read(checkpoint, recorder, advance)
        checkpoint.verify_unchanged()
        with _writing_errors(path, hint):
            write_manifest(path, algorithm, recorder.files())
        _show(checkpoint, path, algorithm, "written", as_json)


@contextmanager
def _writing_errors(path: str, hint: str) -> Iterator[None]:
    """Raises GdsloadError for an OSError."""
    try:
        yield
    except OSError as error:
        why = f"cannot be written: {error.strerror}{hint}"
        raise GdsloadError(f"{one_line(path)}: {why}") from error


@click.command(short_help="Compare a checkpoint with its checksums.")
@terminal.source_of
@click.option("--manifest", type=terminal.FILE, help="The manifest, if not next to SOURCE.")
@click.option(
    "--method",
    type=click.Choice(["checksum", "sha256"]),
    default="checksum",
    show_default=True,
    help="sha256: a manifest of that algorithm, or the names of the files in the hub's cache.",
)
@terminal.json_of
@terminal.common
def verify(source: str, manifest: str | None, method: str, as_json: bool, **where: Any) -> None:
    """Compares every byte of a checkpoint with its checksums.

    The exit code is 1 if bytes differ; the message names the file, the bytes and the tensor.
    """
    with Checkpoint.open(source, **where) as checkpoint:
        report = LoadReport(checkpoint.source)
        with _bar(checkpoint, "verify") as advance:
            how = Path(manifest) if manifest else method
            verifier = open_verifier(checkpoint, how, report, advance)
            algorithm = SHA256 if verifier is None else verifier.algorithm
            if method == SHA256 != algorithm:  # an explicit manifest may be of any algorithm
                raise IntegrityError(
                    f"{how}: --method sha256, but its checksums are of {algorithm};"
                    f" `gdsload manifest {checkpoint.source} --algorithm sha256 --output {how}`"
                    " replaces them",
                    path=str(how),
                )
            if verifier is not None:
                _read(checkpoint, verifier, advance)
        checkpoint.verify_unchanged()
        path = None if verifier is None else manifest or manifest_path(checkpoint)
        _show(checkpoint, path, algorithm, "verified", as_json)


def _bar(checkpoint: Checkpoint, title: str) -> Any:
    return progress_bar(stderr_is_terminal(), checkpoint.total_bytes, title=title)


def _read(checkpoint: Checkpoint, verifier: Verifier, advance: Callable[[int], None]) -> None:
    """Reads all tensors, window by window, and lets the verifier check them."""
    report = LoadReport(checkpoint.source)
    settings = ReadSettings(page_cache="keep")
    with Session(checkpoint, report, settings, claim=False, verifier=verifier) as session:
        for window in grouped(_parts(checkpoint, verifier.block_bytes), _WINDOW_BYTES):
            batch = Batch(session, *session.arrange(window))
            try:
                batch.wait(advance, parts=window)
            finally:
                batch.release()


def _parts(checkpoint: Checkpoint, block_bytes: int) -> Iterator[ByteRange]:
    """Parts of tensors that consist of whole blocks."""
    part_bytes = max(_WINDOW_BYTES // block_bytes, 1) * block_bytes
    for info in checkpoint.tensors.values():
        for start in range(0, info.nbytes, part_bytes):
            nbytes = min(part_bytes, info.nbytes - start)
            name = info.name
            if nbytes < info.nbytes:
                name = PartName(info.name, f"[byte {start}]")
            yield ByteRange(name, info.shard, info.offset + start, nbytes)


def _show(
    checkpoint: Checkpoint, path: str | None, algorithm: str, what: str, as_json: bool
) -> None:
    """`path`: of the manifest; None if the names of the hub's cache are the checksums."""
    if as_json:
        terminal.show_json(
            {
                "source": checkpoint.source,
                "manifest": path,
                "method": algorithm,
                "tensors": len(checkpoint.tensors),
                "bytes": checkpoint.total_bytes,
            }
        )
        return
    tensors = count(len(checkpoint.tensors), "tensor")
    title = one_line(path or checkpoint.source)
    click.echo(f"{title}: {what}: {tensors}, {size(checkpoint.total_bytes)}, {algorithm}")
