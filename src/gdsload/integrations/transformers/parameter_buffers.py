"""The memory of parameters that are not in the file as the model wants them.

    cast     one tensor of the checkpoint, in another dtype
    merged   the tensors of all experts, stacked; of several kinds, their rows side by side:
             [expert, rows of the gates + rows of the ups, columns]

Each tensor is copied once, from where it was read to its place in the parameter, and cast on the
way. Whoever stacks and concatenates these places afterwards finds the result in memory already.
The memory is made ready by threads of its own, ahead of the copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload._native.memory import Region
from gdsload._native.populate import Populator
from gdsload.errors import PlacementError
from gdsload.memory.available import require_room
from gdsload.memory.host_buffers import (
    POPULATE_THREADS,
    POPULATED_AHEAD_BYTES,
    BufferView,
    bytes_at,
)

if TYPE_CHECKING:
    import torch


class Kind(NamedTuple):
    """Tensors of one shape that a parameter is made of, in the order in which they are stacked."""

    keys: tuple[str, ...]
    shape: tuple[int, ...]


class ParameterBuffer(NamedTuple):
    """A parameter that is going to be made: of one tensor, or (`merged`) of kinds of tensors with
    one for each expert."""

    kinds: tuple[Kind, ...]
    dtype: torch.dtype
    merged: bool

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


def target_of(kinds: Sequence[Kind], dtype: torch.dtype, *, merged: bool) -> ParameterBuffer | None:
    """The parameter that these make; None where they do not fit together, or have no bytes."""
    target = ParameterBuffer(tuple(kinds), dtype, merged)
    first = kinds[0]
    fit = all(
        kind.shape and len(kind.keys) == len(first.keys) and kind.shape[1:] == first.shape[1:]
        for kind in kinds
    )
    return target if (fit or not merged) and target.nbytes else None


class _Part(NamedTuple):
    """The places of one kind, as one tensor; the parameter, and which of its `kinds` this is."""

    view: torch.Tensor
    parameter: torch.Tensor
    number: int
    kinds: int


class ParameterBuffers:
    """Memory for some targets, and the way of each of their tensors into it. Close it at the end:
    what was handed out lives on."""

    def __init__(self, targets: Sequence[ParameterBuffer]) -> None:
        """In the order in which they will be filled.

        Raises PlacementError where the machine has less memory than they take.
        """
        self._waiting: dict[str, torch.Tensor] = {}
        self._parts: dict[int, _Part] = {}  # by the address of their first place
        self._region: Region | None = None
        self._populator: Populator | None = None
        # A parameter's pages are its own, and go back with it.
        sizes = [-(-target.nbytes // PAGESIZE) * PAGESIZE for target in targets]
        total = sum(sizes)
        if not total:
            return
        require_room(total)
        try:
            region = Region.anonymous(total)
        except MemoryError as error:
            raise PlacementError(str(error)) from error
        offset = 0
        for target, size in zip(targets, sizes, strict=True):
            self._lay_out(target, _tensor(region, offset, target))
            offset += size
        self._region, self._nbytes = region, total

    def start(self) -> None:
        """Has the memory made ready from now on. Best after other memory was taken: that waits for
        what is being made ready."""
        if self._region is not None:
            all_of_it = [(self._region.handle(), 0, self._nbytes)]
            self._populator = Populator(all_of_it, POPULATE_THREADS, POPULATED_AHEAD_BYTES, True)

    def _lay_out(self, target: ParameterBuffer, parameter: torch.Tensor) -> None:
        if not target.merged:
            self._waiting[target.kinds[0].keys[0]] = parameter
            return
        row = 0
        for number, (keys, shape) in enumerate(target.kinds):
            view = parameter[:, row : row + shape[0]]
            self._waiting.update(zip(keys, view.unbind(0), strict=True))
            self._parts[view.data_ptr()] = _Part(view, parameter, number, len(target.kinds))
            row += shape[0]

    def expects(self, key: str, dtype: torch.dtype | None) -> bool:
        """Whether this tensor has a place, of this dtype, that was not given yet."""
        place = self._waiting.get(key)
        return place is not None and place.dtype == dtype

    def place_of(self, key: str) -> torch.Tensor:
        """Where to copy a tensor to."""
        return self._waiting[key]

    def filled(self, nbytes: int) -> None:
        """So many bytes were copied to their places."""
        if self._populator is not None:
            self._populator.advance(nbytes)

    def give(self, key: str) -> torch.Tensor | None:
        """The place of a tensor, once."""
        return self._waiting.pop(key, None)

    def stacked(self, tensors: Any) -> torch.Tensor | None:
        """What ``torch.stack(tensors)`` would be, where they lie so already; else None."""
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
        # The whole parameter, or rows of each expert that are to be concatenated next.
        return part.parameter if part.kinds == 1 else view

    def joined(self, tensors: Any) -> torch.Tensor | None:
        """What ``torch.cat(tensors, dim=1)`` would be, where they are all the stacks of one
        parameter in their order; else None."""
        if not _are_tensors(tensors):
            return None
        parts = [self._parts.get(tensor.data_ptr()) for tensor in tensors]
        first = parts[0]
        if first is None or first.kinds != len(parts):
            return None
        for number, (part, tensor) in enumerate(zip(parts, tensors, strict=True)):
            if (
                part is None
                or part.parameter is not first.parameter
                or part.number != number
                or part.view.shape != tensor.shape
            ):
                return None
        return first.parameter

    def close(self) -> None:
        """Ends the threads; what nobody took goes back to the system. May be called again."""
        if self._populator is not None:
            self._populator.stop()
            self._populator = None
        self._region = None
        self._waiting.clear()
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


def _tensor(region: Region, offset: int, target: ParameterBuffer) -> torch.Tensor:
    return bytes_at(BufferView(region, offset), target.nbytes).view(target.dtype).view(target.shape)


def kinds_of(
    groups: Mapping[str, Sequence[str]], patterns: Sequence[str], shapes: Mapping[str, Any]
) -> list[Kind] | None:
    """The kinds of a merged parameter, by the patterns of its converter, in their order; None where
    one is missing or its tensors have different shapes."""
    kinds = []
    for pattern in patterns:
        keys = tuple(groups.get(pattern, ()))
        found = {tuple(shapes[key].shape) for key in keys}
        if len(found) != 1:
            return None
        kinds.append(Kind(keys, found.pop()))
    return kinds
