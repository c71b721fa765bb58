"""A publication: tensors in memory, shown as the safetensors files of a model's directory.

    model.safetensors  = header, made from names, dtypes and shapes
                         data    ──► (address in memory, bytes), one after the other
    config.json, ...   = bytes
    gdsload-manifest.json = checksums of the headers and of the blocks of the tensors

Pure over addresses: which memory that is, and how NIXL reaches it, is known to `peers.server`. The
version of a publication is a digest of all its bytes: two sources with the same files have the same
version.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from gdsload.checkpoint.header import header_bytes
from gdsload.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    XXH3,
    FileChecksums,
    Manifest,
    hash_function,
    manifest_json,
    parse_manifest,
)
from gdsload.dtypes import DTYPES
from gdsload.errors import GdsloadError, shown
from gdsload.remote.file import HEAD_BYTES
from gdsload.remote.peer import PeerSegment
from gdsload.system.parallel import parallel_map

SINGLE_FILE = "model.safetensors"


class MemoryLocation(NamedTuple):
    """Memory: `nbytes` at `address`.

    `kind` is "DRAM" or "VRAM", `device` the number of the GPU, 0 for DRAM, and `region` the number
    of the registered region that contains it.
    """

    kind: str
    device: int
    address: int
    nbytes: int
    region: int


class PublishedTensor(NamedTuple):
    """A tensor of a file, in memory."""

    name: str
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    flat: Any  # its bytes, for checksums: a torch tensor of uint8 with one dimension
    location: MemoryLocation


class PublishedFile(NamedTuple):
    """A virtual safetensors file: the header, then the tensors without gaps, in their order."""

    header: bytes
    tensors: list[PublishedTensor]

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.location.nbytes for tensor in self.tensors)

    def head(self) -> bytes:
        """The first bytes: the header, and of a short one more, which readers ask for with it."""
        parts, missing = [self.header], HEAD_BYTES - len(self.header)
        for tensor in self.tensors:
            if missing <= 0:
                break
            parts.append(tensor.flat[:missing].cpu().numpy().tobytes())
            missing -= len(parts[-1])
        return b"".join(parts)

    def segments(self) -> list[PeerSegment]:
        """Where the data lies, in as few segments as possible; none crosses two regions."""
        found: list[PeerSegment] = []
        offset, region = len(self.header), -1
        for tensor in self.tensors:
            kind, device, address, nbytes, number = tensor.location
            if not nbytes:
                continue
            if number == region and found[-1].address + found[-1].nbytes == address:
                found[-1] = found[-1]._replace(nbytes=found[-1].nbytes + nbytes)
            else:
                found.append(PeerSegment(offset, nbytes, kind, device, address))
            offset, region = offset + nbytes, number
        return found


class Publication(NamedTuple):
    """What a source serves under one version. `digests` are of tensor files that have checksums."""

    version: str
    tensor_files: dict[str, PublishedFile]
    small_files: dict[str, bytes]
    digests: Mapping[str, str] = MappingProxyType({})

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each file in bytes."""
        sizes = {name: file.size for name, file in self.tensor_files.items()}
        return sizes | {name: len(content) for name, content in self.small_files.items()}


def file_of(tensors: Sequence[PublishedTensor]) -> PublishedFile:
    """A file of these tensors, with a header as safetensors writes it.

    Those of larger elements come first, so that all are aligned; otherwise their order stays.
    """
    ordered = sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype].align)
    taken = {"__metadata__"}
    for tensor in ordered:
        if tensor.name in taken:
            raise GdsloadError(f"cannot serve a tensor of the name {shown(tensor.name)}")
        taken.add(tensor.name)
    header = header_bytes(
        (tensor.name, tensor.dtype, tensor.shape, tensor.location.nbytes) for tensor in ordered
    )
    return PublishedFile(header, ordered)


def manifest_bytes(files: Mapping[str, PublishedFile]) -> bytes:
    """The manifest of files, with checksums that are computed in threads.

    Raises GdsloadError if the library for checksums is not installed.
    """
    digest = hash_function(XXH3)
    entries: dict[str, FileChecksums] = {}
    for name, file in files.items():
        checksums = {tensor.name: "" for tensor in file.tensors}
        blocks = [
            (tensor.name, block)
            for tensor in file.tensors
            if tensor.location.nbytes
            for block in tensor.flat.split(BLOCK_BYTES)
        ]
        found = parallel_map(
            lambda block: digest(block[1].cpu().numpy()), blocks, path_of=lambda block: block[0]
        )
        for (tensor, _), checksum in zip(blocks, found, strict=True):
            checksums[tensor] += checksum
        entries[name] = FileChecksums(file.size, digest(file.header), checksums)
    return manifest_json(XXH3, entries)


def published(
    tensor_files: Mapping[str, PublishedFile], small_files: Mapping[str, bytes], manifest: bytes
) -> Publication:
    """Puts a publication together.

    Args:
        tensor_files: The virtual files by name.
        small_files: Other files by name.
        manifest: The manifest of the virtual files; b"" for none: the version is random then.
    """
    files, small = dict(tensor_files), dict(small_files)
    if not manifest:
        return Publication(uuid.uuid4().hex, files, small)
    small[MANIFEST_NAME] = manifest
    whole = hashlib.sha256()
    for name, content in sorted(small.items()):
        whole.update(json.dumps([name, len(content)]).encode() + content)
    checksums = parse_manifest(manifest, MANIFEST_NAME)
    digests = {name: _digest_of(checksums, name) for name in files if name in checksums.files}
    return Publication(whole.hexdigest()[:32], files, small, digests)


def _digest_of(manifest: Manifest, name: str) -> str:
    """A digest of the checksums of one file, whatever else is in the manifest."""
    _, header, tensors = manifest.files[name]
    facts = json.dumps([header, sorted(pair for pair in tensors.items() if pair[1])])
    kind = f"{manifest.algorithm}/{manifest.block_bytes}"
    return f"{kind}:{hashlib.sha256(facts.encode()).hexdigest()}"
