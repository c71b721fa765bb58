"""Compares the bytes of a load with checksums, in the memory where tensors will view them.

verify="size"        sizes and stability of the files (`Checkpoint.verify_unchanged`)
verify="checksum"    each block of a tensor with its checksum in a manifest; or a manifest's path
verify="sha256"      the same with SHA-256; or whole files with their names in the hub cache

A thread that waits for reads checks the blocks that have arrived. In the memory of a GPU, bytes
are copied back by torch. Not responsible for the format of a manifest (`checkpoint.manifest`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload.checkpoint import Checkpoint, Shard, TensorInfo
from gdsload.checkpoint.manifest import (
    ALGORITHMS,
    BLOCK_BYTES,
    SHA256,
    XXH3,
    FileChecksums,
    Manifest,
    command_for,
    hash_function,
    manifest_of,
    manifest_path,
    read_manifest,
)
from gdsload.errors import CheckpointNotFound, IntegrityError, shown
from gdsload.memory.tensors import flat_bytes
from gdsload.planning.read_plan import FILE_ORDER, ByteRange
from gdsload.report import LoadReport
from gdsload.system.parallel import parallel_map

if TYPE_CHECKING:
    import torch

    from gdsload.memory.host_buffers import BufferView

# Size of a read of a file that is hashed as a whole; up to 48 of them are in memory.
_READ_BYTES = 2 << 20
_HUB_BLOB = re.compile(r"[0-9a-f]{64}")

# Of its own: all libraries of a process share the argument types of `ctypes.pythonapi`.
_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_READ_ONLY = 0x100  # PyBUF_READ


class ChecksumBlock(NamedTuple):
    """Bytes of a tensor with a checksum of their own: `nbytes` at byte `offset` of the file."""

    tensor: TensorInfo
    number: int
    offset: int
    nbytes: int


class Verifier:
    """The checksums of the wanted files, and the comparison of bytes with them."""

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        """Compares the headers.

        Raises:
            IntegrityError: A header differs, or the manifest lacks a file.
            GdsloadError: The library for these checksums is not installed.
            StallError: The storage did not answer.
        """
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._hash = hash_function(manifest.algorithm)
        self._digits = ALGORITHMS[manifest.algorithm]
        self._in_order: list[TensorInfo] = []
        list(
            parallel_map(
                self._check_header,
                checkpoint.shards,
                path_of=lambda shard: shard.path,
                stall_seconds=checkpoint.stall_seconds,
            )
        )

    def _check_header(self, shard: Shard) -> None:
        entry = self._manifest.files.get(shard.name)
        facts: dict[str, Any] = {"path": shard.path, "nbytes": shard.data_start}
        if entry is None:
            raise IntegrityError(
                f"{shard.path}: the manifest {self._manifest.path} has no checksums of it", **facts
            )
        if entry.size != shard.size:
            raise IntegrityError(
                f"{shard.path}: it has {shard.size} bytes, but {entry.size} according to the"
                f" manifest {self._manifest.path}",
                **facts,
            )
        if self.header_checksum(shard) != entry.header:
            raise IntegrityError(
                f"{shard.path}: its header, bytes 0 to {shard.data_start}, differs from its"
                f" checksum in {self._manifest.path}",
                **facts,
            )

    @property
    def algorithm(self) -> str:
        return self._manifest.algorithm

    @property
    def block_bytes(self) -> int:
        """The size of the blocks that have a checksum each."""
        return self._manifest.block_bytes

    def header_checksum(self, shard: Shard) -> str:
        """The checksum of a header, with the length in front of it."""
        return self._hash(shard.read(0, shard.data_start))

    def blocks_of(self, part: ByteRange | TensorInfo) -> Iterator[ChecksumBlock]:
        """The blocks that a tensor, or a part of one, contains wholly."""
        if not part.nbytes:
            return
        tensor = self._tensor_of(part)
        self._require_checksums(tensor)
        step, end = self._manifest.block_bytes, part.offset + part.nbytes
        number = -(-(part.offset - tensor.offset) // step)
        while (first := number * step) < tensor.nbytes:
            nbytes = min(step, tensor.nbytes - first)
            if tensor.offset + first + nbytes > end:
                return
            yield ChecksumBlock(tensor, number, tensor.offset + first, nbytes)
            number += 1

    def _tensor_of(self, part: ByteRange | TensorInfo) -> TensorInfo:
        tensor = self._checkpoint.tensors.get(part.name)
        if tensor is not None and (tensor.shard, tensor.offset) == (part.shard, part.offset):
            return tensor
        if not self._in_order:
            filled = [info for info in self._checkpoint.tensors.values() if info.nbytes]
            self._in_order = sorted(filled, key=FILE_ORDER)
        found = bisect_right(self._in_order, (part.shard, part.offset), key=FILE_ORDER)
        return self._in_order[found - 1]

    def check_block(self, block: ChecksumBlock, data: object) -> None:
        """Raises IntegrityError if the bytes of a block differ from its checksum."""
        tensor, number, _, _ = block
        shard = self._checkpoint.shards[tensor.shard]
        checksums = self._manifest.files[shard.name].tensors.get(tensor.name, "")
        expected = checksums[number * self._digits : (number + 1) * self._digits]
        if self._hash(data) != expected:
            raise self._fault(block, "differ from their checksum")

    def _require_checksums(self, tensor: TensorInfo) -> None:
        """Before its blocks are listed: a manifest may declare blocks of any size."""
        shard, step = self._checkpoint.shards[tensor.shard], self._manifest.block_bytes
        checksums = self._manifest.files[shard.name].tensors.get(tensor.name, "")
        number = len(checksums) // self._digits
        first = number * step
        if first < tensor.nbytes:
            nbytes = min(step, tensor.nbytes - first)
            raise self._fault(
                ChecksumBlock(tensor, number, tensor.offset + first, nbytes), "have no checksum"
            )

    def _fault(self, block: ChecksumBlock, fault: str) -> IntegrityError:
        tensor, _, offset, nbytes = block
        path = self._checkpoint.shards[tensor.shard].path
        return IntegrityError(
            f"{path}: bytes {offset} to {offset + nbytes}, in tensor {shown(tensor.name)},"
            f" {fault} in {self._manifest.path}",
            path=path,
            tensor=tensor.name,
            offset=offset,
            nbytes=nbytes,
        )

    def check_in_memory(
        self, block: ChecksumBlock, part: ByteRange | TensorInfo, view: BufferView
    ) -> None:
        """`check_block` of bytes in host memory: `view` has the bytes of `part`."""
        address = view.region.address + view.offset + block.offset - part.offset
        self.check_block(block, _memory(address, block.nbytes, _READ_ONLY))

    def check_tensor(self, parts: Sequence[TensorInfo], tensor: torch.Tensor) -> int:
        """Copies a tensor of a device back, and compares it. `parts` are its bytes in order.

        Returns the number of bytes that were compared. Raises IntegrityError.
        """
        compared = 0
        raw = flat_bytes(tensor)
        start = 0
        for part in parts:
            for block in self.blocks_of(part):
                first = start + block.offset - part.offset
                host = raw[first : first + block.nbytes].cpu()
                self.check_block(block, _memory(host.data_ptr(), block.nbytes, _READ_ONLY))
                compared += block.nbytes
            start += part.nbytes
        return compared


class Recorder(Verifier):
    """Notes the checksums of a checkpoint instead of comparing them."""

    def __init__(self, checkpoint: Checkpoint, algorithm: str) -> None:
        super().__init__(checkpoint, Manifest("", algorithm, BLOCK_BYTES, {}))
        self._found: list[dict[str, list[str]]] = [{} for _ in checkpoint.shards]

    def _check_header(self, shard: Shard) -> None:
        pass  # there is nothing to compare it with

    def _require_checksums(self, tensor: TensorInfo) -> None:
        pass  # there are none yet

    def check_block(self, block: ChecksumBlock, data: object) -> None:
        checksums = self._found[block.tensor.shard].setdefault(block.tensor.name, [])
        checksums += [""] * (block.number + 1 - len(checksums))
        checksums[block.number] = self._hash(data)

    def files(self) -> dict[str, FileChecksums]:
        """The checksums of each shard, by its name."""
        return {
            shard.name: FileChecksums(
                shard.size,
                self.header_checksum(shard),
                {name: "".join(parts) for name, parts in found.items()},
            )
            for shard, found in zip(self._checkpoint.shards, self._found, strict=True)
        }


def open_verifier(
    checkpoint: Checkpoint,
    verify: str | os.PathLike[str],
    report: LoadReport,
    advance: Callable[[int], None] = lambda _: None,
) -> Verifier | None:
    """The verifier of a load with another `verify` than "size"; None if nothing is compared in
    memory. For loads, see `session.verifier_of`.

    With "sha256" and without a manifest, files in the hub cache are read and compared here;
    `advance` gets the number of bytes that were.

    Raises:
        IntegrityError: A header or a file differs.
        CheckpointError: There is no manifest, or it is invalid.
        StallError: The storage did not answer.
    """
    report.verify = os.fsdecode(verify)
    with report.phase("verify"):
        by_default = isinstance(verify, str)
        path = manifest_path(checkpoint) if by_default else report.verify
        try:
            manifest = (
                manifest_of(checkpoint, SHA256 if verify == "sha256" else XXH3)
                if by_default
                else read_manifest(path, checkpoint.source, checkpoint.stall_seconds)
            )
        except CheckpointNotFound:
            if verify != "sha256" or not _compare_blobs(checkpoint, report, advance):
                raise
            return None
        if verify == "sha256" and manifest.algorithm != SHA256:
            if _compare_blobs(checkpoint, report, advance):
                return None
            raise IntegrityError(
                f"{path}: verify='sha256', but its checksums are of {manifest.algorithm};"
                f" `{command_for(checkpoint, SHA256)}` replaces them",
                path=path,
            )
        return Verifier(checkpoint, manifest)


def _compare_blobs(
    checkpoint: Checkpoint, report: LoadReport, advance: Callable[[int], None]
) -> bool:
    """Compares files in the hub cache with their SHA-256, which is their name there. False if a
    file is not in the hub cache. Raises IntegrityError."""
    if checkpoint.remote:
        return False
    names = [os.path.basename(os.path.realpath(shard.absolute_path)) for shard in checkpoint.shards]
    if not all(map(_HUB_BLOB.fullmatch, names)):
        return False
    for shard, expected in zip(checkpoint.shards, names, strict=True):
        digest = hashlib.sha256()

        def read(offset: int, shard: Shard = shard) -> bytes:
            nbytes = min(_READ_BYTES, shard.size - offset)
            return shard.read(offset, nbytes)

        offsets = range(0, shard.size, _READ_BYTES)
        with closing(
            parallel_map(
                read,
                offsets,
                path_of=lambda _: checkpoint.source,
                stall_seconds=checkpoint.stall_seconds,
            )
        ) as parts:
            for part in parts:
                digest.update(part)
                advance(len(part))
        if digest.hexdigest() != expected:
            raise IntegrityError(
                f"{shard.path}: its SHA-256 is {digest.hexdigest()}, but the hub cache names it"
                f" {expected}",
                path=shard.path,
                nbytes=shard.size,
            )
        report.verified_bytes += shard.size
    return True
