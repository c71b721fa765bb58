"""Loads into the memory of a GPU: tensors are taken from torch's allocator, one by one and in the
order of the file, and the bytes land in them by way of a ring. Nothing but the ring passes through
anybody else's memory.

torch carves tensors that are asked for one after the other out of one block where it has one, as it
has after transformers' warm-up: what lies side by side in the file then lies side by side on the
device, and goes there in one copy. Each is still an allocation of its own, given back on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gdsload import gpu, hostpool
from gdsload.arena import packed_shape, torch_dtype_of
from gdsload.backends import DRAM, VRAM, Memory, reaches
from gdsload.checkpoint import TensorInfo
from gdsload.claims import held
from gdsload.collector import collector_paused
from gdsload.cuts import Cut, runs_of, whole
from gdsload.errors import PlacementError
from gdsload.load import Batch, Session
from gdsload.plan import ReadPlan

if TYPE_CHECKING:
    import torch

    from gdsload.checkpoint import Checkpoint


def device_name(device: Any) -> str:
    """A device as we write it: "cuda:1" for 1, and the current one for "cuda"."""
    if isinstance(device, int) and not isinstance(device, bool):
        return f"cuda:{device}"
    text = str(device)
    return f"cuda:{_torch_cuda().current_device()}" if text == "cuda" else text


def reached(target: str, backend: str) -> str:
    """The device that reads can go to for this target: itself, or "cpu" where what was read has to
    be moved on by torch."""
    if target.partition(":")[0] != "cuda" or not reaches(backend, VRAM):
        return "cpu"
    if backend == "auto" or backend == "posix":
        return "cpu" if gpu.why_not(target) else target
    return target  # it was asked for by name, and says itself what is in its way


def prefetched(checkpoint: Checkpoint, backend: str, seconds: float) -> bool:
    """Whether a prefetch or a pool has some of it in host memory, from where torch moves it on:
    what is there is not read once more."""
    return reaches(backend, DRAM) and (hostpool.holds(checkpoint) or held(checkpoint, seconds))


def session_for(
    checkpoint: Checkpoint, report: Any, target: str, backend: str, nbytes: int, **how: Any
) -> Session:
    """A session whose reads go as near to the target as they can; `nbytes` are expected of it."""
    device = reached(target, backend)
    if device != "cpu" and prefetched(checkpoint, backend, how["stall_seconds"]):
        device = "cpu"
    return Session(
        checkpoint, report, device=device, backend=backend, expected_bytes=nbytes, **how
    )  # fmt: skip


def start(session: Session, infos: Sequence[TensorInfo]) -> Batch:
    """Puts whole tensors on their way to the session's device, and returns at once."""
    cuts = [whole(info) for info in infos]
    if session.device == "cpu":
        return session.start(runs_of(cuts))
    return DeviceBatch.of(session, cuts)


def load(
    session: Session, infos: Sequence[TensorInfo], moved: Callable[[int], None] | None = None
) -> dict[str, torch.Tensor]:
    """Tensors on the session's device, by name. Raises what `load_file` raises."""
    batch = start(session, infos)
    try:
        batch.wait(moved)
        session.checkpoint.verify_unchanged()
        return batch.tensors_of(infos)
    finally:
        batch.release()


class DeviceBatch(Batch):
    """Cuts on their way into tensors of a device."""

    def __init__(self, session: Session, plan: ReadPlan, cuts: Sequence[Cut]) -> None:
        """Raises PlacementError, before anything is read, where the device is too full."""
        self._shelf = Shelf(session, cuts)
        super().__init__(session, plan, {})

    @classmethod
    def of(cls, session: Session, cuts: Sequence[Cut]) -> DeviceBatch:
        """Puts them on their way and returns at once."""
        plan, _ = session.arrange(runs_of(cuts))
        return cls(session, plan, cuts)

    def _take_memory(self) -> list[Memory]:
        return self._shelf.memory(self.plan)

    def tensors_of(self, infos: Sequence[TensorInfo]) -> dict[str, torch.Tensor]:
        tensors = self._shelf.tensors
        return {info.name: tensors.pop(info.name) for info in infos}


class Shelf:
    """Tensors of a device for some cuts, by their keys, and where in them each run of bytes goes.

    The runs of a cut lie one behind the other in one tensor, so that nothing has to be stacked.
    """

    def __init__(self, session: Session, cuts: Sequence[Cut], *, whole_load: bool = True) -> None:
        """Takes the memory. For a `whole_load` it is first asked whether there is room for all.

        Raises PlacementError where the device is too full, CheckpointError for a dtype that this
        torch lacks.
        """
        self.device = session.device
        self.tensors: dict[str, torch.Tensor] = {}
        self._cuts = cuts
        ordinal = gpu.ordinal_of(self.device)
        if whole_load:
            nbytes = sum(cut.nbytes for cut in cuts)
            gpu.require_room(ordinal, nbytes, reusable_bytes(ordinal))
        for cut in sorted(cuts, key=lambda cut: cut.parts[0].place):
            self.tensors[cut.key] = self._take(cut)
        follow(session)

    def _take(self, cut: Cut) -> torch.Tensor:
        first = cut.parts[0]
        shape = first.shape if cut.shape is None else cut.shape
        if first.dtype == "F4":
            shape = packed_shape(first)
        try:
            return empty(shape, torch_dtype_of(first), self.device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one, under several names
            if "memory" not in str(error):
                raise
            why = str(error).partition("\n")[0]
            raise PlacementError(
                f"no {cut.nbytes:,} bytes on {self.device} for tensor {first.name!r}: {why}",
                missing_bytes=cut.nbytes,
            ) from error

    @collector_paused()
    def memory(self, plan: ReadPlan) -> list[Memory]:
        """The memory behind each target of the plan, in shares that are as long as they can be."""
        owner = gpu.device(gpu.ordinal_of(self.device))
        rows = []
        for cut in self._cuts:
            address = self.tensors[cut.key].data_ptr()
            for part in cut.parts:
                home = plan.homes[part.name]
                if home.target >= 0:
                    rows.append((home.target, home.offset, part.nbytes, address))
                address += part.nbytes
        rows.sort()
        shares: list[list[tuple[int, int, int]]] = [[] for _ in plan.targets]
        at = held = to = limit = 0
        last = -1
        for target, offset, nbytes, address in rows:
            # Two allocations may touch each other, and no copy may cross from one to the next.
            if (target, offset, address) == (last, at + held, to + held):
                if address + nbytes > limit:
                    limit = sum(owner.range_of(to))
                if address + nbytes <= limit:
                    held += nbytes
                    shares[target][-1] = (at, held, to)
                    continue
            last, at, held, to = target, offset, nbytes, address
            shares[target].append((at, held, to))
        return [
            # The tensors are kept by their batch and by the request, whichever ends last.
            Memory(VRAM, 0, target.length, self.tensors, device=self.device, shares=shares[number])
            for number, target in enumerate(plan.targets)
        ]


def follow(session: Session) -> None:
    """Memory from torch's allocator may still be in use by what its last owner gave the device to
    do: nothing is copied there before that is done. The device is told so, and nobody waits."""
    cuda = _torch_cuda()
    if not cuda.is_initialized():
        return
    stream = cuda.current_stream(session.device)
    if not session.backend.follow(session.device, stream.cuda_stream):
        stream.synchronize()


def empty(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory for a tensor from torch's allocator, aligned to 512 bytes."""
    import torch

    return torch.empty(tuple(shape), dtype=dtype, device=device)


def reusable_bytes(ordinal: int) -> int:
    """Bytes that torch's allocator holds and does not use."""
    cuda = _torch_cuda()
    if not cuda.is_initialized():
        return 0
    return int(cuda.memory_reserved(ordinal) - cuda.memory_allocated(ordinal))


def _torch_cuda() -> Any:
    import torch

    return torch.cuda  # partly untyped
