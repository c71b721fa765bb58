"""Lazy replacements for what transformers gets from safetensors: slices that are read when they
are indexed, a state dict of them, and an opened file. Any number of threads may use them. Not
responsible for reading (`readahead_queue`, `parameter_writer`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, ItemsView, Mapping
from typing import TYPE_CHECKING, Any

from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.dtypes import torch_dtype
from gdsload.integrations.transformers.parameter_writer import ParameterWriter
from gdsload.integrations.transformers.readahead_queue import ReadaheadQueue
from gdsload.loading.torch_memory import copied, moved
from gdsload.memory.host_buffers import BufferView, map_shard
from gdsload.memory.tensors import make_tensors, torch_shape
from gdsload.planning.tensor_slices import TensorSlice, slice_of

if TYPE_CHECKING:
    import torch


class LazySlice:
    """A tensor of a checkpoint that is read when it is indexed."""

    __slots__ = ("_device", "_info", "_queue")

    def __init__(self, queue: ReadaheadQueue, info: TensorInfo, device: Any = None) -> None:
        self._queue = queue
        self._info = info
        self._device = device

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The same values as indexing the whole tensor, in memory of its own. Raises ReadError."""
        tensor = self._queue.take(slice_of(self._info, index))
        return tensor if self._device is None else moved(tensor, self._device)

    def get_shape(self) -> list[int]:
        """The shape in elements, as in the header."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """The dtype by safetensors' name, such as "BF16"."""
        return self._info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._info.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self._info.dtype)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


class SeveralSlices(LazySlice):
    """A tensor of which several slices are read as one, by the first that is requested. Kept until
    the last one is taken. `indices`: of each slice in what is read, by key."""

    __slots__ = ("_base", "_bytes", "_left")

    def __init__(
        self, queue: ReadaheadQueue, info: TensorInfo, base: TensorSlice, indices: Mapping[str, Any]
    ) -> None:
        super().__init__(queue, info)
        self._base = base
        self._left = dict(indices)
        self._bytes: torch.Tensor | None = None

    def __getitem__(self, index: Any) -> torch.Tensor:
        wanted = slice_of(self._info, index)
        place = self._left.get(wanted.key)
        if place is None:
            return super().__getitem__(index)
        read = self._bytes
        if read is None:
            read = self._bytes = self._queue.take(self._base)
        tensor = copied(read[place])
        self._left.pop(wanted.key, None)
        if not self._left:
            self._bytes = None
        return tensor


class MappedSlice(LazySlice):
    """A tensor that stays on disk: a view of a mapping of its file, which nobody reads."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> torch.Tensor:
        info, checkpoint = self._info, self._queue.session.checkpoint
        view = BufferView(map_shard(checkpoint, info.shard), info.offset)
        return make_tensors([info], {info.name: view})[info.name][index]


class ShapeSlice(LazySlice):
    """A tensor of the meta device: it has a shape and a dtype, and nothing is read."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> torch.Tensor:
        import torch

        return torch.empty(torch_shape(self._info), dtype=self.dtype, device="meta")[index]


class WrittenSlice(LazySlice):
    """A tensor that the parameter writer copies straight into its parameter."""

    __slots__ = ("_writer",)

    def __init__(self, queue: ReadaheadQueue, info: TensorInfo, writer: ParameterWriter) -> None:
        super().__init__(queue, info)
        self._writer = writer

    def written(self, device: Any, dtype: torch.dtype | None) -> torch.Tensor | None:
        """``self[...].to(device, dtype)`` in the memory of its parameter; None if the parameter has
        another device or dtype."""
        if device is not None and str(device) != "cpu":
            return None
        return self._writer.take(self._info.name, dtype)


class StateDict(dict[str, LazySlice]):
    """Slices by name. `begin` is called once, by the first access to a slice: transformers has
    warmed up torch's allocator by then."""

    def __init__(self, slices: Mapping[str, LazySlice], begin: Callable[[], None]) -> None:
        super().__init__(slices)
        self._begin: Callable[[], None] | None = begin

    def _begin_once(self) -> None:
        begin, self._begin = self._begin, None
        if begin is not None:
            begin()

    def items(self) -> ItemsView[str, LazySlice]:  # type: ignore[override]
        self._begin_once()
        return super().items()

    def __getitem__(self, name: str) -> LazySlice:
        self._begin_once()
        return super().__getitem__(name)


class OpenedFile:
    """A checkpoint of one file, with the members of `safetensors.safe_open`. `leave`, if any, is
    called at the end of its `with` block; `on_disk` names tensors that are not read."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        queue: ReadaheadQueue,
        device: Any,
        leave: Callable[[], None] | None,
        on_disk: Container[str],
    ) -> None:
        self._checkpoint = checkpoint
        self._queue = queue
        self._device = None if str(device) == "cpu" else device
        self._leave = leave
        self._on_disk = on_disk

    def keys(self) -> list[str]:
        """The names, sorted."""
        return sorted(self._checkpoint.tensors)

    def offset_keys(self) -> list[str]:
        """The names, in the order of the data."""
        return list(self._checkpoint.tensors)

    def metadata(self) -> dict[str, str] | None:
        """The header's ``__metadata__``; None if there is none."""
        return self._checkpoint.header_metadata()

    def get_slice(self, name: str) -> LazySlice:
        """A tensor to be indexed. Raises CheckpointError for an unknown name."""
        kind = MappedSlice if name in self._on_disk else LazySlice
        return kind(self._queue, self._checkpoint.info(name), self._device)

    def get_tensor(self, name: str) -> torch.Tensor:
        """The whole tensor."""
        return self.get_slice(name)[...]

    def __enter__(self) -> OpenedFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._leave is not None:
            self._leave()
