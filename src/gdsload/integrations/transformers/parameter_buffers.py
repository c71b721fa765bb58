"""Preallocated memory for parameters that the checkpoint does not hold in their final form.

    cast     one tensor of the checkpoint, in another dtype
    merged   the tensors of all experts, stacked; of several kinds, their rows side by side:
             [expert, rows of the gates + rows of the ups, columns]

Each tensor is copied once, from the read window to its part of the parameter, and cast on the way.
When transformers stacks and concatenates these parts afterwards, the result is there already. Not
responsible for reading and copying (`parameter_writer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload._native.memory import Region
from gdsload.errors import PlacementError
from gdsload.memory.available import require_room
from gdsload.memory.host_buffers import BufferView, bytes_at

if TYPE_CHECKING:
    import torch


class Kind(NamedTuple):
    """Tensors of one shape that become part of a parameter, in stacking order."""

    keys: tuple[str, ...]
    shape: tuple[int, ...]


class ParameterBuffer(NamedTuple):
    """A parameter to be written: from one tensor, or (`merged`) from kinds of tensors with one
    tensor per expert."""

    kinds: tuple[Kind, ...]
    dtype: torch.dtype
    merged: bool

    @property
    def keys(self) -> list[str]:
        """The names of all tensors that it is written from."""
        return [key for kind in self.kinds for key in kind.keys]

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's own shape."""
        first = self.kinds[0]
        if not self.merged:
            return first.shape
        rows = sum(kind.shape[0] for kind in self.kinds)
        return (len(first.keys), rows, *first.shape[1:])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def buffer_of(kinds: Sequence[Kind], dtype: torch.dtype, *, merged: bool) -> ParameterBuffer | None:
    """The parameter of these kinds; None if their shapes do not fit together, or if it is empty."""
    buffer = ParameterBuffer(tuple(kinds), dtype, merged)
    first = kinds[0]
    fit = all(
        kind.shape and len(kind.keys) == len(first.keys) and kind.shape[1:] == first.shape[1:]
        for kind in kinds
    )
    return buffer if (fit or not merged) and buffer.nbytes else None


def kinds_of(
    groups: Mapping[str, Sequence[str]], patterns: Sequence[str], infos: Mapping[str, Any]
) -> list[Kind] | None:
    """The kinds of a merged parameter, in the order of its converter's patterns; None if one is
    missing or its tensors have different shapes."""
    kinds = []
    for pattern in patterns:
        keys = tuple(groups.get(pattern, ()))
        shapes = {tuple(infos[key].shape) for key in keys}
        if len(shapes) != 1:
            return None
        kinds.append(Kind(keys, shapes.pop()))
    return kinds


class _Part(NamedTuple):
    """The stacked tensors of one kind: a view of `parameter`, its number, the number of kinds."""

    view: torch.Tensor
    parameter: torch.Tensor
    number: int
    kinds: int


class ParameterBuffers:
    """The memory of some parameters. Must be closed; parameters that were given out live on."""

    def __init__(self, buffers: Sequence[ParameterBuffer]) -> None:
        """Reserves address space for `buffers`, in the order in which they will be written.

        Raises PlacementError if the machine has less memory available than they take.
        """
        self._unwritten: dict[str, torch.Tensor] = {}  # where each tensor is to be copied
        self._parts: dict[int, _Part] = {}  # by address
        self._region: Region | None = None
        # No page holds two parameters: it is freed with its parameter.
        sizes = [-(-buffer.nbytes // PAGESIZE) * PAGESIZE for buffer in buffers]
        self._nbytes = sum(sizes)
        if not self._nbytes:
            return
        require_room(self._nbytes)
        try:
            self._region = region = Region.anonymous(self._nbytes)
        except MemoryError as error:
            raise PlacementError(str(error)) from error
        offset = 0
        for buffer, size in zip(buffers, sizes, strict=True):
            raw = bytes_at(BufferView(region, offset), buffer.nbytes)
            self._lay_out(buffer, raw.view(buffer.dtype).view(buffer.shape))
            offset += size

    def _lay_out(self, buffer: ParameterBuffer, parameter: torch.Tensor) -> None:
        if not buffer.merged:
            self._unwritten[buffer.kinds[0].keys[0]] = parameter
            return
        row = 0
        for number, (keys, shape) in enumerate(buffer.kinds):
            view = parameter[:, row : row + shape[0]]
            self._unwritten.update(zip(keys, view.unbind(0), strict=True))
            self._parts[view.data_ptr()] = _Part(view, parameter, number, len(buffer.kinds))
            row += shape[0]

    def expects(self, key: str, dtype: torch.dtype | None) -> bool:
        """Whether a tensor has a part in a parameter of this dtype that was not given out yet."""
        part = self._unwritten.get(key)
        return part is not None and part.dtype == dtype

    def part_of(self, key: str) -> torch.Tensor:
        """Where to copy a tensor."""
        return self._unwritten[key]

    def give(self, key: str) -> torch.Tensor | None:
        """The written part of a tensor, once."""
        return self._unwritten.pop(key, None)

    def stacked(self, tensors: Any) -> torch.Tensor | None:
        """The result of ``torch.stack(tensors)`` if it is in memory already, else None."""
        part = self._parts.get(tensors[0].data_ptr()) if _are_tensors(tensors) else None
        if part is None:
            return None
        view = part.view
        start, step = view.data_ptr(), view.stride(0) * view.element_size()
        if len(tensors) != view.shape[0] or any(
            tensor.data_ptr() != start + number * step
            or tensor.dtype != view.dtype
            or tensor.shape != view.shape[1:]
            for number, tensor in enumerate(tensors)
        ):
            return None
        # The whole parameter, or rows of each expert that are concatenated next.
        return part.parameter if part.kinds == 1 else view

    def concatenated(self, tensors: Any) -> torch.Tensor | None:
        """The result of ``torch.cat(tensors, dim=1)`` if it is in memory already: if they are all
        stacks of one parameter in their order. Else None."""
        if not _are_tensors(tensors):
            return None
        parts = [self._parts.get(tensor.data_ptr()) for tensor in tensors]
        first = parts[0]
        if first is None or first.kinds != len(parts):
            return None
        fit = all(
            part is not None
            and part.parameter is first.parameter
            and part.number == number
            and part.view.shape == tensor.shape
            for number, (part, tensor) in enumerate(zip(parts, tensors, strict=True))
        )
        return first.parameter if fit else None

    def close(self) -> None:
        """Frees the parameters that nobody took. May be called again."""
        self._region = None
        self._unwritten.clear()
        self._parts.clear()

    def __enter__(self) -> ParameterBuffers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _are_tensors(tensors: Any) -> bool:
    import torch

    return (
        isinstance(tensors, (list, tuple))
        and bool(tensors)
        and all(type(tensor) is torch.Tensor for tensor in tensors)
    )
