"""Loads into the memory of a GPU: tensors are taken from torch's allocator, one by one and in the
order of the file, and the bytes land in them by way of a ring. Nothing but the ring passes through
anybody else's memory. What was read ahead into blocks of the device becomes tensors where it lies.

torch carves tensors that are asked for one after the other out of one block where it has one, as it
has after transformers' warm-up, or when a load has asked for it: what lies side by side in the file
then lies side by side on the device, and goes there in one copy. Each still goes back on its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gdsload._native.block import Block
from gdsload.backends import VRAM, Memory, reaches
from gdsload.checkpoint import TensorInfo
from gdsload.dtypes import torch_dtype
from gdsload.errors import PlacementError
from gdsload.loading.session import Batch, Session
from gdsload.memory import device_buffers
from gdsload.memory.host_buffers import (
    BufferView,
    bytes_at,
    hand_over,
    packed_shape,
    torch_dtype_of,
)
from gdsload.planning.read_plan import ByteRange, ReadPlan
from gdsload.planning.tensor_slices import TensorSlice, runs_of, whole
from gdsload.system import gpu
from gdsload.system.gc_control import collector_paused

if TYPE_CHECKING:
    import torch

    from gdsload.checkpoint import Checkpoint

# A load of so much asks for one block first. Each tensor of more than 10 MiB would be a cudaMalloc
# otherwise; for models of 16 GB these were reported to take several times as long as all the rest
# (transformers' caching_allocator_warmup was made for that). Not measured by us.
WHOLE_BYTES = 256 << 20
# Of torch's allocator: what a tensor's memory is rounded to, and what comes from other blocks.
_ROUND_BYTES, _SMALL_BYTES = 512, 1 << 20


def reached(target: str, backend: str) -> str:
    """The device that reads can go to for this target: itself, or "cpu" where what was read has to
    be moved on by torch. Raises BackendUnavailable after a fork."""
    if target.partition(":")[0] != "cuda" or not reaches(backend, VRAM):
        return "cpu"
    gpu.refuse_after_fork()  # torch could not move anything there either
    if backend in ("auto", "posix"):
        return "cpu" if gpu.why_not(target) else target
    return target  # it was asked for by name, and says itself what is in its way


def session_for(
    checkpoint: Checkpoint, report: Any, target: str, backend: str, nbytes: int, **how: Any
) -> Session:
    """A session whose reads go as near to the target as they can; `nbytes` are expected of it."""
    device = reached(target, backend)
    return Session(
        checkpoint, report, device=device, backend=backend, expected_bytes=nbytes, **how
    )  # fmt: skip


@collector_paused()
def start(session: Session, infos: Sequence[TensorInfo]) -> Batch:
    """Puts whole tensors on their way to the session's device, and returns at once."""
    if session.device == "cpu":
        return session.start(runs_of(map(whole, infos)))
    return DeviceBatch.of(session, [whole(info) for info in infos])


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

    def __init__(
        self,
        session: Session,
        plan: ReadPlan,
        views: dict[str, BufferView],
        slices: Sequence[TensorSlice],
    ) -> None:
        """Raises PlacementError, before anything is read, where the device is too full."""
        self._shelf = DeviceTensors(session, slices, views)
        super().__init__(session, plan, views)

    @classmethod
    def of(cls, session: Session, slices: Sequence[TensorSlice]) -> DeviceBatch:
        """Puts them on their way and returns at once."""
        return cls(session, *session.arrange(runs_of(slices)), slices)

    def _take_memory(self) -> list[Memory]:
        return self._shelf.memory(self.plan)

    def _start_anew(self, pieces: Sequence[ByteRange]) -> Batch:
        return read_to_blocks(self.session, pieces)

    def tensors_of(self, infos: Sequence[TensorInfo]) -> dict[str, torch.Tensor]:
        tensors = self._shelf.give([whole(info) for info in infos], self.views)
        self.views.clear()
        return tensors


def read_to_blocks(session: Session, pieces: Sequence[ByteRange]) -> Batch:
    """Puts pieces on their way into memory of the session's device that is no tensor's yet. Raises
    PlacementError where the device is too full."""
    plan = session.plan(pieces)
    return Batch(session, plan, *in_blocks(session, plan, pieces))


def in_blocks(
    session: Session, plan: ReadPlan, pieces: Sequence[ByteRange]
) -> tuple[dict[str, BufferView], list[Memory]]:
    """Memory of the session's device for what a plan reads: where each piece will lie, and what is
    behind each target. Raises PlacementError where the
    device is too full."""
    device = session.device
    views = device_buffers.take(gpu.ordinal_of(device), pieces)
    runs = [
        (piece.name, piece.nbytes, view.region.address + view.offset)
        for piece in pieces
        if (view := views.get(piece.name)) is not None
    ]
    memory = memory_of(device, plan, runs, {view.region for view in views.values()})
    return views, memory


@collector_paused()
def memory_of(
    device: str, plan: ReadPlan, runs: Iterable[tuple[str, int, int]], owners: object
) -> list[Memory]:
    """The memory behind each target of the plan, in shares that are as long as they can be.

    `runs` are (name, bytes, address) for pieces of it; `owners` keep all of that alive.
    """
    owner = gpu.device(gpu.ordinal_of(device))
    rows = []
    for name, nbytes, address in runs:
        location = plan.locations.get(name)
        if location is not None and location.target >= 0:
            rows.append((location.target, location.offset, nbytes, address))
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
        # They are kept by their batch and by the request, whichever ends last.
        Memory(VRAM, 0, target.length, owners, device=device, shares=shares[number])
        for number, target in enumerate(plan.targets)
    ]


class DeviceTensors:
    """Tensors of a device for some slices, by their keys, and where in them each run of bytes goes.

    The runs of a cut lie one behind the other in one tensor, so that nothing has to be stacked.
    What a prefetch brings to the device is a tensor where it lies, if that is
    on a border; what is not, or a run among others, or in the memory of the host, is copied.
    """

    def __init__(
        self, session: Session, slices: Sequence[TensorSlice], views: Mapping[str, BufferView]
    ) -> None:
        """Takes memory for what is not on the device: it is first asked whether there is room for
        all of it. `spots` are where others have runs of these slices.

        Raises PlacementError where the device is too full, CheckpointError for a dtype that this
        torch lacks.
        """
        self.device = session.device
        self.tensors: dict[str, torch.Tensor] = {}
        self._session = session
        self._cuts = [
            tensor_slice for tensor_slice in slices if not _lies_there(tensor_slice, views)
        ]
        ordinal = gpu.ordinal_of(self.device)
        nbytes = sum(tensor_slice.nbytes for tensor_slice in self._cuts)
        if nbytes:
            reusable = reusable_bytes(ordinal)
            free = gpu.require_room(ordinal, nbytes, reusable)
            have_whole(
                self.device, [tensor_slice.nbytes for tensor_slice in self._cuts], free, reusable
            )
        for tensor_slice in sorted(
            self._cuts, key=lambda tensor_slice: tensor_slice.parts[0].place
        ):
            self.tensors[tensor_slice.key] = self._take(tensor_slice)

    def _take(self, tensor_slice: TensorSlice) -> torch.Tensor:
        first = tensor_slice.parts[0]
        shape = first.shape if tensor_slice.shape is None else tensor_slice.shape
        if first.dtype == "F4":
            shape = packed_shape(first)
        try:
            return empty(shape, torch_dtype_of(first), self.device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one, under several names
            if "out of memory" not in str(error):  # and not "an illegal memory access"
                raise
            why = str(error).partition("\n")[0]
            raise PlacementError(
                f"no {tensor_slice.nbytes:,} bytes on {self.device} for tensor"
                f" {first.name!r}: {why}",
                missing_bytes=tensor_slice.nbytes,
            ) from error

    def memory(self, plan: ReadPlan) -> list[Memory]:
        """The memory behind each target of the plan, whose reads are about to be posted."""
        follow(self._session)
        runs = []
        for tensor_slice in self._cuts:
            address = self.tensors[tensor_slice.key].data_ptr()
            for part in tensor_slice.parts:
                runs.append((part.name, part.nbytes, address))
                address += part.nbytes
        return memory_of(self.device, plan, runs, self.tensors)

    def give(
        self, slices: Sequence[TensorSlice], views: dict[str, BufferView]
    ) -> dict[str, torch.Tensor]:
        """The tensors of these slices, by their keys, when all bytes are there; each once."""
        tensors: dict[str, torch.Tensor] = {}
        lying: list[TensorSlice] = []
        for tensor_slice in slices:
            tensor = self.tensors.pop(tensor_slice.key, None)
            if tensor is None:
                lying.append(tensor_slice)
            else:
                self._complete(tensor, tensor_slice, views)
                tensors[tensor_slice.key] = tensor
        mine = {
            tensor_slice.parts[0].name: views.pop(tensor_slice.parts[0].name)
            for tensor_slice in lying
        }
        tensors.update(hand_over([tensor_slice.parts[0] for tensor_slice in lying], mine))
        for tensor_slice in lying:
            if tensor_slice.shape is not None:
                tensors[tensor_slice.key] = tensors.pop(tensor_slice.parts[0].name).view(
                    tensor_slice.shape
                )
        return tensors

    def _complete(
        self, tensor: torch.Tensor, tensor_slice: TensorSlice, views: dict[str, BufferView]
    ) -> None:
        """Copies the runs that were not read to where they belong."""
        place = 0
        for part in tensor_slice.parts:
            view = views.pop(part.name, None)
            if view is not None and part.nbytes:
                raw = tensor.reshape(-1).view(torch_dtype("U8"))[place : place + part.nbytes]
                raw.copy_(bytes_at(view, part.nbytes))
            place += part.nbytes


def _lies_there(tensor_slice: TensorSlice, views: Mapping[str, BufferView]) -> bool:
    """Whether a cut is one run that comes to the device by itself, to where a tensor may lie."""
    view = views.get(tensor_slice.parts[0].name) if len(tensor_slice.parts) == 1 else None
    return (
        view is not None
        and isinstance(view.region, Block)
        and (view.region.address + view.offset) % device_buffers.ALIGN_BYTES == 0
    )


def follow(session: Session) -> None:
    """Memory from torch's allocator may still be in use by what its last owner gave the device to
    do: nothing is copied there before that is done. The device is told so, and nobody waits.

    Raises PlacementError while a graph is captured: copies would become a part of it.
    """
    cuda = _torch_cuda()
    if not cuda.is_initialized():
        return
    stream = cuda.current_stream(session.device)
    if gpu.device(gpu.ordinal_of(session.device)).captures(stream.cuda_stream):
        raise PlacementError(
            f"a CUDA graph is being captured on the current stream of {session.device}: load before"
            " the capture, or in a thread with another current stream"
        )
    if not session.open().follow(session.device, stream.cuda_stream):
        stream.synchronize()


def empty(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory for a tensor from torch's allocator, aligned to 512 bytes."""
    import torch

    return torch.empty(tuple(shape), dtype=dtype, device=device)


def have_whole(device: str, sizes: Sequence[int], free_bytes: int, reusable: int) -> None:
    """Lets torch's allocator take memory for many tensors at once, where there is so much: it keeps
    that, and they are carved out of it. Where it cannot, each is asked for alone."""
    large = [size for size in sizes if size > _SMALL_BYTES]
    total = sum(-(-size // _ROUND_BYTES) * _ROUND_BYTES for size in large)
    fits = WHOLE_BYTES <= total <= free_bytes and total > reusable
    if len(large) > 1 and fits and _carves(os.environ):
        with suppress(RuntimeError):
            empty((total,), torch_dtype("U8"), device)


def _carves(environ: Mapping[str, str]) -> bool:
    """Whether torch's allocator keeps memory, and splits blocks of any size: else it would hold a
    whole one that it gives no tensor of."""
    told = environ.get("PYTORCH_ALLOC_CONF", "") + environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "max_split_size" not in told and "PYTORCH_NO_CUDA_MEMORY_CACHING" not in environ


def reusable_bytes(ordinal: int) -> int:
    """Bytes that torch's allocator holds and does not use."""
    cuda = _torch_cuda()
    if not cuda.is_initialized():
        return 0
    return int(cuda.memory_reserved(ordinal) - cuda.memory_allocated(ordinal))


def _torch_cuda() -> Any:
    import torch

    return torch.cuda  # partly untyped
