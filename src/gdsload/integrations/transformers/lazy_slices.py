"""Stand-ins for what safetensors gives out: slices that are read when they are indexed, and an
opened file of such slices. Both may be used from any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Mapping
from typing import TYPE_CHECKING, Any

from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.dtypes import torch_dtype
from gdsload.errors import CheckpointError
from gdsload.integrations.transformers.parameter_writer import ParameterWriter
from gdsload.integrations.transformers.readahead_queue import ReadaheadQueue
from gdsload.planning.tensor_slices import slice_of, whole

if TYPE_CHECKING:
    import torch


class LazySlice:
    """A tensor of a checkpoint that is read when it is indexed."""

    __slots__ = ("_device", "_feed", "_info")

    def __init__(self, feed: ReadaheadQueue, info: TensorInfo, device: Any = None) -> None:
        self._feed = feed
        self._info = info
        self._device = device

    def __getitem__(self, index: Any) -> torch.Tensor:
        """What indexing the whole tensor gives, in memory of its own. Raises ReadError."""
        wanted = whole(self._info) if index is Ellipsis else slice_of(self._info, index)
        tensor = self._feed.take(wanted)
        return tensor if self._device is None else tensor.to(self._device)

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


class MappedSlice(LazySlice):
    """A tensor that is wanted as a view nobody reads: a mapping of its file."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._feed.mapped(self._info)[index]


class PlacedSlice(LazySlice):
    """A tensor that has a place in a parameter: whoever wants it there gets it there."""

    __slots__ = ("_filling",)

    def __init__(self, feed: ReadaheadQueue, info: TensorInfo, filling: ParameterWriter) -> None:
        super().__init__(feed, info)
        self._filling = filling

    def placed(self, device: Any, dtype: torch.dtype | None) -> torch.Tensor | None:
        """``self[...].to(device, dtype)`` in its place; None where that is not what it is for."""
        if device is not None and str(device) != "cpu":
            return None
        return self._filling.take(self._info.name, dtype)


class StateDict(dict[str, LazySlice]):
    """Slices by name, in place of a state dict. `begin` is called once, when one is first looked
    at: transformers does so after it has warmed up torch's allocator."""

    def __init__(self, slices: Mapping[str, LazySlice], begin: Callable[[], None]) -> None:
        super().__init__(slices)
        self._begin: Callable[[], None] | None = begin

    def _look(self) -> None:
        begin, self._begin = self._begin, None
        if begin is not None:
            begin()

    def items(self) -> ItemsView[str, LazySlice]:  # type: ignore[override]
        self._look()
        return super().items()

    def __getitem__(self, name: str) -> LazySlice:
        self._look()
        return super().__getitem__(name)


class OpenedFile:
    """A checkpoint of one file, with the members of `safetensors.safe_open`. Whoever owns the feed
    closes it; `leave`, if any, is called when the file is left."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        feed: ReadaheadQueue,
        device: Any = "cpu",
        leave: Callable[[], None] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._tensors: Mapping[str, TensorInfo] = checkpoint.tensors
        self._feed = feed
        self._device = None if str(device) == "cpu" else device
        self._leave = leave

    def keys(self) -> list[str]:
        """The names, sorted."""
        return sorted(self._tensors)

    def offset_keys(self) -> list[str]:
        """The names, in the order of the data."""
        return list(self._tensors)

    def metadata(self) -> dict[str, str] | None:
        """What the header says under ``__metadata__``; None where it says nothing."""
        return dict(self._checkpoint.metadata) or None

    def get_slice(self, name: str) -> LazySlice:
        """A tensor to be indexed. Raises CheckpointError where there is none of that name."""
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"{self._checkpoint.source}: there is no tensor {name!r} in it", tensor=name
            )
        return LazySlice(self._feed, info, self._device)

    def get_tensor(self, name: str) -> torch.Tensor:
        """The whole tensor."""
        return self.get_slice(name)[...]

    def __enter__(self) -> OpenedFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._leave is not None:
            self._leave()
