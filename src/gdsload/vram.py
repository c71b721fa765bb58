"""Whole loads into the memory of a GPU: tensors are taken from torch's allocator, one by one, and
the bytes land in them by way of a ring; nothing but the ring passes through anybody else's memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gdsload import gpu
from gdsload.arena import packed_shape
from gdsload.backends import VRAM, Memory
from gdsload.checkpoint import TensorInfo
from gdsload.dtypes import torch_dtype
from gdsload.load import Batch, Session
from gdsload.plan import Piece, ReadPlan

if TYPE_CHECKING:
    import torch


def reached(target: str, backend: str) -> str:
    """The device that reads can go to for this target: itself, or "cpu" where what was read has to
    be moved on by torch."""
    if target.partition(":")[0] != "cuda":
        return "cpu"
    if backend == "auto" or backend == "posix":
        return "cpu" if gpu.why_not(target) else target
    return target  # it was asked for by name, and says itself what is in its way


def load(
    session: Session, infos: Sequence[TensorInfo], moved: Callable[[int], None] | None = None
) -> dict[str, torch.Tensor]:
    """Tensors on the session's device, by name. Raises what `load_file` raises."""
    pieces = [Piece(info.name, info.shard, info.offset, info.nbytes) for info in infos]
    with session.report.phase("plan"):
        plan = session.plan(pieces) if pieces else ReadPlan()
    batch = DeviceBatch(session, plan, infos)
    try:
        batch.wait(moved)
        session.checkpoint.verify_unchanged()
        return batch.tensors
    finally:
        batch.release()


class DeviceBatch(Batch):
    """Pieces on their way into tensors of a device."""

    def __init__(self, session: Session, plan: ReadPlan, infos: Sequence[TensorInfo]) -> None:
        """Raises PlacementError, before anything is read, where the device is too full."""
        self.tensors: dict[str, torch.Tensor] = {}
        self._infos = infos
        super().__init__(session, plan, {})
        if not plan.transfers:
            self._take_tensors()

    def _take_memory(self) -> list[Memory]:
        self._take_tensors()
        shares: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for info in self._infos:
            home = self.plan.homes[info.name]
            if home.target >= 0:
                address = self.tensors[info.name].data_ptr()
                shares[home.target].append((home.offset, info.nbytes, address))
        device = self.session.device
        return [
            # The tensors are kept by this batch and by the request, whichever ends last.
            Memory(VRAM, 0, target.length, self.tensors, device=device, shares=shares[number])
            for number, target in enumerate(self.plan.targets)
        ]

    def _take_tensors(self) -> None:
        device = self.session.device
        ordinal = gpu.ordinal_of(device)
        gpu.require_room(ordinal, sum(info.nbytes for info in self._infos), reusable_bytes(ordinal))
        for info in self._infos:
            shape = packed_shape(info) if info.dtype == "F4" else info.shape
            self.tensors[info.name] = empty(shape, torch_dtype(info.dtype), device)
        settle(device)


def empty(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory for a tensor from torch's allocator, aligned to 512 bytes."""
    import torch

    return torch.empty(tuple(shape), dtype=dtype, device=device)


def settle(device: str) -> None:
    """Waits for what torch has under way: memory from its allocator may still be in use by kernels
    of its last owner. Once for a load, before its first byte."""
    cuda = _torch_cuda()
    if cuda.is_initialized():
        cuda.current_stream(device).synchronize()


def reusable_bytes(ordinal: int) -> int:
    """Bytes that torch's allocator holds and does not use."""
    cuda = _torch_cuda()
    if not cuda.is_initialized():
        return 0
    return int(cuda.memory_reserved(ordinal) - cuda.memory_allocated(ordinal))


def _torch_cuda() -> Any:
    import torch

    return torch.cuda  # partly untyped
