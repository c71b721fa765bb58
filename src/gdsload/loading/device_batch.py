"""Loads into the memory of a GPU. Tensors come from torch's allocator, in file order; a staging
ring fills them. Ranges that a prefetch has read into blocks of the device become tensors without
a copy.

    slices ──► DeviceTensors: a torch tensor each ──► targets of the plan as shares ──► DeviceBatch

torch's allocator carves tensors that are asked for one after the other out of one block, if it has
one. Tensors that are neighbours in the file are then neighbours on the device, and one copy fills
several of them. Each is still freed on its own.

Not responsible for: the staging ring (`backends`), blocks of the device (`memory.device_buffers`),
torch's allocator and streams (`torch_device`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gdsload._native import ranges as native
from gdsload._native.cuda import Block
from gdsload.backends import VRAM, Memory, reaches
from gdsload.checkpoint import TensorInfo
from gdsload.errors import GdsloadError, PlacementError
from gdsload.loading import torch_device
from gdsload.loading.batch import Batch
from gdsload.loading.claims import offered
from gdsload.loading.device_blocks import memory_of
from gdsload.loading.session import Session
from gdsload.loading.torch_memory import raise_if_refused
from gdsload.memory import device_buffers, late_copies
from gdsload.memory.host_buffers import BufferView
from gdsload.memory.tensors import bytes_at, flat_bytes, make_tensors, torch_dtype_of, torch_shape
from gdsload.planning.read_plan import FILE_ORDER, ReadPlan, ranges_of
from gdsload.planning.tensor_slices import TensorSlice, whole
from gdsload.system import gpu
from gdsload.system.device_name import device_kind

if TYPE_CHECKING:
    import torch


# The first reads of a load are posted when so many bytes are planned, a read for each slot of the
# ring, or so many tensors.
FIRST_BYTES = 64 << 20
FIRST_TENSORS = 128
# With its first read a backend may take this much of a device: rings of VRAM, and cuFile itself.
BACKEND_BYTES = 512 << 20
LEAST_BYTES = 1 << 20  # limit of the second group if the first one has only empty tensors
# When one slice is copied from host memory, up to this many slices after it are copied as well.
COPIED_AT_ONCE = 256


def read_device(target: str, backend: str) -> str:
    """The device that reads for this target go to: the target itself, or "cpu" if torch has to move
    the tensors there. Opens a GPU. Raises BackendUnavailable after a fork."""
    if device_kind(target) != "cuda":
        return "cpu"
    gpu.refuse_after_fork()  # torch could not move tensors there either
    # Opened also if torch has to move the tensors: see `gpu.capture_relaxed`.
    reason = gpu.why_not(target)
    if not reaches(backend, VRAM):
        return "cpu"
    # Any other backend was asked for by name, and reports itself why it cannot work.
    return "cpu" if reason and backend in ("auto", "posix") else target


def start(session: Session, infos: Sequence[TensorInfo]) -> Batch:
    """Posts the reads of whole tensors to the session's device and returns without waiting."""
    ranges = ranges_of(infos)
    if not torch_device.torch_imported():
        return BlockBatch(session, *session.arrange(ranges))
    slices = [whole(info) for info in infos]
    return DeviceBatch(session, *session.arrange(ranges), slices=slices)


def starting_windows(
    session: Session, infos: list[TensorInfo], nbytes: int
) -> Iterator[list[TensorInfo]]:
    """Groups of tensors, of `nbytes` bytes in all, to post one after the other, so that the first
    is read while the others are planned. Each is about as large as all before it.

    Raises PlacementError, before the first group, if the device is too full for all.
    """
    if nbytes <= FIRST_BYTES or offered():  # prefetched tensors may need no memory
        yield infos
        return
    ordinal = gpu.ordinal_of(session.device)
    late_copies.forget_ended()  # their memory becomes reusable
    reusable = torch_device.reusable_bytes(ordinal) if torch_device.torch_imported() else 0
    room = device_buffers.require_room(ordinal, nbytes, reusable)
    if room + reusable < nbytes + BACKEND_BYTES:  # the tensors come first: a ring can be refused
        yield infos
        return
    end = min(native.end_of(infos, 0, FIRST_BYTES), FIRST_TENSORS)
    yield infos[:end]
    # The reads of the first group do not wait for the order of the rest, or for its memory.
    rest = native.in_file_order(infos[end:])
    if torch_device.torch_imported():
        torch_device.reserve_block(session.device, rest)
    first, limit = 0, max(native.bytes_of(infos[:end]), LEAST_BYTES)
    while first < len(rest):
        end = native.end_of(rest, first, limit)
        yield rest[first:end]
        first, limit = end, limit + native.bytes_of(rest[first:end])


class BlockBatch(Batch):
    """Whole tensors that are being read into blocks of the device, before torch is imported."""

    def tensors_of(self, infos: Sequence[TensorInfo]) -> dict[str, torch.Tensor]:
        # Empty tensors, and those of the host pool or a prefetch to the host, need other memory.
        slices = [whole(info) for info in infos]
        tensors = DeviceTensors(self.session, slices, self.views).give(slices, self.views)
        self.views.clear()
        _check(self.session, infos, tensors)
        return tensors


class DeviceBatch(Batch):
    """Tensor slices that are being read into tensors of a device."""

    def _make_tensors(self, slices: Sequence[TensorSlice]) -> None:
        """Raises PlacementError, before anything is read, if the device is too full."""
        self._tensors = DeviceTensors(self.session, slices, self.views)

    def _take_memory(self) -> list[Memory]:
        return self._tensors.memory(self.plan)

    def tensors_of(self, infos: Sequence[TensorInfo]) -> dict[str, torch.Tensor]:
        tensors = self._tensors.give([whole(info) for info in infos], self.views)
        self.views.clear()
        _check(self.session, infos, tensors)
        return tensors


def _check(
    session: Session, infos: Sequence[TensorInfo], tensors: Mapping[str, torch.Tensor]
) -> None:
    if session.verifier is not None:
        with session.report.phase("verify"):
            for info in infos:
                compare(session, [info], tensors[info.name])


def compare(session: Session, parts: Sequence[TensorInfo], tensor: torch.Tensor) -> None:
    """Compares a tensor of the device, whose bytes are those of `parts`, with their checksums if
    the load does so. Raises IntegrityError."""
    if session.verifier is not None:
        with gpu.capture_relaxed(session.device):
            compared = session.verifier.check_tensor(parts, tensor)
        session.report.verified_bytes += compared
        session.report.unverified_bytes += sum(part.nbytes for part in parts) - compared


def memory_in(
    session: Session,
    plan: ReadPlan,
    pairs: Iterable[tuple[TensorSlice, torch.Tensor]],
    owners: object,
) -> list[Memory]:
    """The memory, in the tensors of these slices, of each target of a plan about to be posted."""
    torch_device.follow(session)
    addresses = {}
    for tensor_slice, tensor in pairs:
        address = tensor.data_ptr()
        for part in tensor_slice.parts:
            addresses[part.name] = address
            address += part.nbytes
    return memory_of(session.device, plan, addresses, owners)


class DeviceTensors:
    """Tensors of a device for some slices, by key, and the addresses of their byte ranges.

    The parts of a slice are neighbours in one tensor, so that nothing has to be stacked. A slice of
    one part that a prefetch has read to the device, at an aligned address, becomes a tensor where
    it is. Other parts that are in memory already are copied into their tensor.
    """

    def __init__(
        self, session: Session, slices: Sequence[TensorSlice], views: Mapping[str, BufferView]
    ) -> None:
        """Takes memory for all slices that cannot stay where `views` has them.

        Raises:
            PlacementError: The device is too full, or a CUDA graph is captured. Nothing was taken.
            CheckpointError: This torch lacks a dtype.
        """
        self.device = session.device
        self._session = session
        taken = [each for each in slices if not _stays(each, views)] if views else [*slices]
        # The beginning of each slice, with the bytes of all of it.
        starts = [
            parts[0] if len(parts) == 1 else parts[0]._replace(nbytes=sum(p.nbytes for p in parts))
            for _, parts, _, _ in taken
        ]
        if native.in_file_order(starts) is not starts:
            taken.sort(key=lambda each: FILE_ORDER(each.parts[0]))
        self._slices = taken
        self._position_of = {each.key: position for position, each in enumerate(taken)}
        if native.bytes_of(starts):
            torch_device.require_no_capture(self.device)
            torch_device.reserve_block(self.device, starts)
        with gpu.capture_relaxed(self.device):
            self.tensors: dict[str, torch.Tensor] = {each.key: self._empty(each) for each in taken}

    def _empty(self, tensor_slice: TensorSlice) -> torch.Tensor:
        first = tensor_slice.parts[0]
        shape = torch_shape(first) if tensor_slice.shape is None else tensor_slice.shape
        try:
            return torch_device.empty(shape, torch_dtype_of(first), self.device)
        except RuntimeError as error:  # not by `taking`, which 100,000 tensors would notice
            raise_if_refused(error, tensor_slice.nbytes, self.device, f"tensor {first.name!r}")
            raise

    def memory(self, plan: ReadPlan) -> list[Memory]:
        """The memory of each target of a plan whose reads are about to be posted."""
        pairs = ((each, self.tensors[each.key]) for each in self._slices)
        return memory_in(self._session, plan, pairs, self.tensors)

    def give(
        self,
        slices: Sequence[TensorSlice],
        views: dict[str, BufferView],
        is_there: Callable[[str], bool] = lambda name: True,
    ) -> dict[str, torch.Tensor]:
        """The tensors of these slices by key, in their order, when all bytes are there. Each is
        returned once.

        `is_there`: whether the bytes of a range, by its name, have arrived in its view.
        """
        self._copy_from_host(slices, views, is_there)
        tensors: dict[str, torch.Tensor] = {}
        staying: list[TensorSlice] = []
        for tensor_slice in slices:
            tensor = self.tensors.pop(tensor_slice.key, None)
            if tensor is None and tensor_slice.key in self._position_of:
                raise GdsloadError(
                    f"tensor {tensor_slice.key!r} was lost: its copy was interrupted"
                )
            if tensor is None:
                staying.append(tensor_slice)
            else:
                copy_parts(tensor, tensor_slice, views)
                tensors[tensor_slice.key] = tensor
        infos = [tensor_slice.parts[0] for tensor_slice in staying]
        tensors |= make_tensors(infos, {info.name: views.pop(info.name) for info in infos})
        for tensor_slice in staying:
            if tensor_slice.shape is not None:
                tensor = tensors.pop(tensor_slice.parts[0].name)
                tensors[tensor_slice.key] = tensor.view(tensor_slice.shape)
        return {tensor_slice.key: tensors[tensor_slice.key] for tensor_slice in slices}

    def _copy_from_host(
        self,
        slices: Sequence[TensorSlice],
        views: dict[str, BufferView],
        is_there: Callable[[str], bool],
    ) -> None:
        """Copies ranges in host memory to their tensors: those of these slices, and of slices that
        follow a single one."""
        asked = {each.key for each in slices}
        if len(slices) == 1:
            position = self._position_of.get(slices[0].key, len(self._slices))
            slices = self._slices[position : position + COPIED_AT_ONCE]
        found: list[HostBytes] = []
        for tensor_slice in slices:
            if tensor_slice.key not in asked and not (
                found and all(is_there(part.name) for part in tensor_slice.parts)
            ):
                break
            offset, tensor = 0, self.tensors.get(tensor_slice.key)
            if tensor is None:
                continue
            for part in tensor_slice.parts:
                view = views.get(part.name)
                if view is not None and part.nbytes and not isinstance(view.region, Block):
                    key = tensor_slice.key
                    found.append(HostBytes(key, part.name, view, part.nbytes, tensor, offset))
                offset += part.nbytes
        if found:
            try:
                with gpu.capture_relaxed(self.device):
                    copy_from_host(self.device, found)
                for each in found:
                    del views[each.name]
            except PlacementError:  # nothing was copied
                raise
            except BaseException:  # the memory that they were in has been freed
                for each in found:
                    self.tensors.pop(each.key, None)
                raise


class HostBytes(NamedTuple):
    """Bytes of a range in host memory, and the tensor, with an offset in it, that they are for. The
    tensor is that of the slice with this key."""

    key: str
    name: str
    view: BufferView
    nbytes: int
    tensor: torch.Tensor
    offset: int


def copy_from_host(device: str, found: Sequence[HostBytes]) -> None:
    """Copies bytes of host memory to their tensors, waits for the end of it, and frees the memory
    that they were in. Raises PlacementError if a CUDA graph is captured, and copies nothing."""
    from gdsload.backends.host_copies import HostCopy, copy_to_device  # only if there is something

    torch_device.require_no_capture(device)
    # A pool may hold both.
    pinned: list[tuple[torch.Tensor, HostBytes]] = []
    pageable: list[tuple[torch.Tensor, HostBytes]] = []
    for each in found:
        source = bytes_at(each.view, each.nbytes)
        (pinned if source.is_pinned() else pageable).append((source, each))
    if pageable:
        copies = [
            HostCopy(source.data_ptr(), each.nbytes, each.tensor.data_ptr() + each.offset)
            for source, each in pageable
        ]
        owners = pageable, found
        after_torch = partial(torch_device.after_torch, device)
        if copy_to_device(device, copies, owners, after_torch):
            pageable = []
    for source, each in [*pageable, *pinned]:
        into = byte_view(each.tensor, each.offset, each.nbytes)
        into.copy_(source, non_blocking=bool(pinned))
    if pinned:
        torch_device.synchronize(device)


def byte_view(tensor: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """Bytes of a contiguous tensor."""
    return flat_bytes(tensor)[offset : offset + nbytes]


def copy_parts(
    tensor: torch.Tensor, tensor_slice: TensorSlice, views: dict[str, BufferView]
) -> None:
    """Copies the parts that are in memory already into their tensor, and frees that memory."""
    offset = 0
    for part in tensor_slice.parts:
        view = views.pop(part.name, None)
        if view is not None and part.nbytes:
            with gpu.capture_relaxed(str(tensor.device)):
                byte_view(tensor, offset, part.nbytes).copy_(bytes_at(view, part.nbytes))
        offset += part.nbytes


def _stays(tensor_slice: TensorSlice, views: Mapping[str, BufferView]) -> bool:
    """Whether a slice is one range in a block of the device, at an address that suits a tensor."""
    view = views.get(tensor_slice.parts[0].name) if len(tensor_slice.parts) == 1 else None
    return (
        view is not None
        and isinstance(view.region, Block)
        and (view.region.address + view.offset) % device_buffers.ALIGN_BYTES == 0
    )
