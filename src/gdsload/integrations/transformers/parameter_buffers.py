"""Preallocated memory for parameters that the checkpoint does not hold in their final form.

    cast     one tensor of the checkpoint, in another dtype
    experts  the tensors of all experts, stacked; of several kinds, their rows side by side:
             [expert, rows of the gates + rows of the ups, columns]
    rows     the rows of several tensors, one after the other

Each tensor is copied once, from the read window to its part of the parameter, and cast on the way.
When transformers stacks and concatenates these parts afterwards, the result is there already. A
tied parameter shares the memory of an earlier one, its twin, as long as both are equal. Not
responsible for reading and copying (`parameter_writer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from mmap import PAGESIZE
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload._native.memory import Region
from gdsload.errors import PlacementError
from gdsload.memory.host_buffers import BufferView, current_pool
from gdsload.memory.tensors import bytes_at
from gdsload.system.available import require_room
from gdsload.system.torch_thread import copying, in_dispatch_mode

if TYPE_CHECKING:
    import torch


CAST, EXPERTS, ROWS = "cast", "experts", "rows"
STACK, CAT = "stack", "cat"  # functions of torch


class Kind(NamedTuple):
    """Tensors of one shape that become part of a parameter, in stacking order."""

    keys: tuple[str, ...]
    shape: tuple[int, ...]


class ParameterBuffer(NamedTuple):
    """A parameter to be written: from one tensor (CAST), from kinds of tensors with one tensor per
    expert (EXPERTS), or from kinds of one tensor each (ROWS)."""

    kinds: tuple[Kind, ...]
    dtype: torch.dtype
    layout: str

    @property
    def keys(self) -> list[str]:
        """The names of all tensors that it is written from."""
        return [key for kind in self.kinds for key in kind.keys]

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's own shape."""
        first = self.kinds[0]
        if self.layout == CAST:
            return first.shape
        rows = sum(kind.shape[0] for kind in self.kinds)
        experts = (len(first.keys),) if self.layout == EXPERTS else ()
        return (*experts, rows, *first.shape[1:])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def buffer_of(kinds: Sequence[Kind], dtype: torch.dtype, layout: str) -> ParameterBuffer | None:
    """The parameter of these kinds; None if their shapes do not fit together, or one is empty."""
    buffer = ParameterBuffer(tuple(kinds), dtype, layout)
    first = kinds[0]
    fit = layout == CAST or all(
        kind.shape and len(kind.keys) == len(first.keys) and kind.shape[1:] == first.shape[1:]
        for kind in kinds
    )
    return buffer if fit and all(prod(kind.shape) for kind in kinds) else None


def kinds_of(
    groups: Mapping[str, Sequence[str]],
    patterns: Sequence[str],
    infos: Mapping[str, Any],
    layout: str,
) -> list[Kind] | None:
    """The kinds of a merged parameter, in the order of its converter's patterns; None if one is
    missing or, of experts, its tensors have different shapes."""
    kinds: list[Kind] = []
    for pattern in patterns:
        keys = tuple(groups.get(pattern, ()))
        if layout == ROWS and keys:
            kinds += [Kind((key,), tuple(infos[key].shape)) for key in keys]
            continue
        shapes = {tuple(infos[key].shape) for key in keys}
        if len(shapes) != 1:
            return None
        kinds.append(Kind(keys, shapes.pop()))
    return kinds


class ParameterBuffers:
    """The memory of some parameters. Must be closed; parameters that were given out live on.

    Attributes:
        region: All of it, which nobody has touched; None if there are no parameters.
    """

    def __init__(
        self, buffers: Sequence[ParameterBuffer], twins: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Reserves address space for `buffers`, in the order in which they will be written. `twins`
        are later tensors and the earlier ones that they may be equal to.

        Raises PlacementError if the machine has less memory available than they take.
        """
        self._unwritten: dict[str, torch.Tensor] = {}  # where each tensor is to be copied
        # Results by the function of torch, its dimension, and the identity of its operands.
        self._merged: dict[tuple[str, int, Any], torch.Tensor] = {}
        self._twins: dict[str, tuple[str, torch.Tensor]] = {}
        self.region: Region | None = None
        # No page holds two parameters: it is freed with its parameter.
        sizes = [-(-buffer.nbytes // PAGESIZE) * PAGESIZE for buffer in buffers]
        if not sizes:
            return
        if (pool := current_pool()) is not None:
            pool.make_room(sum(sizes))
        require_room(sum(sizes))
        try:
            self.region = region = Region.anonymous(sum(sizes))
        except MemoryError as error:
            raise PlacementError(str(error) or "no memory") from error
        offset = 0
        for buffer, size in zip(buffers, sizes, strict=True):
            raw = bytes_at(BufferView(region, offset), buffer.nbytes)
            self._lay_out(buffer, raw.view(buffer.dtype).view(buffer.shape))
            offset += size
        self._twins = {later: (name, self._unwritten[name]) for later, name in twins.items()}

    def _lay_out(self, buffer: ParameterBuffer, parameter: torch.Tensor) -> None:
        if buffer.layout == CAST:
            self._unwritten[buffer.kinds[0].keys[0]] = parameter
            return
        if buffer.layout == ROWS:
            rows = parameter.split_with_sizes([kind.shape[0] for kind in buffer.kinds])
            self._unwritten.update(zip(buffer.keys, rows, strict=True))
            self._merged[CAT, 0, _identity(rows)] = parameter
            return
        row, stacks = 0, []
        for keys, shape in buffer.kinds:
            stack = parameter[:, row : row + shape[0]]
            parts = stack.unbind(0)
            self._unwritten.update(zip(keys, parts, strict=True))
            self._merged[STACK, 0, _identity(parts)] = (
                parameter if len(buffer.kinds) == 1 else stack
            )
            stacks.append(stack)
            row += shape[0]
        self._merged[CAT, 1, _identity(stacks)] = parameter

    def expects(self, key: str, dtype: torch.dtype | None) -> bool:
        """Whether a tensor has a part in a parameter of this dtype that was not given out yet."""
        part = self._unwritten.get(key)
        return part is not None and part.dtype == dtype

    def part_of(self, key: str) -> torch.Tensor:
        """Where to copy a tensor."""
        return self._unwritten[key]

    def twin_of(self, key: str) -> tuple[str, torch.Tensor] | None:
        """The name and the memory of the earlier tensor that stands for this one, if any."""
        return self._twins.get(key)

    def separate(self, key: str, rows: int) -> None:
        """Gives a tensor memory of its own, and copies so many first rows of its twin to it."""
        _, twin = self._twins.pop(key)
        if rows:  # else it may have no dimension
            with copying():
                self._unwritten[key][:rows].copy_(twin[:rows])

    def give(self, key: str) -> torch.Tensor | None:
        """The written part of a tensor, or its twin's memory, once."""
        part = self._unwritten.pop(key, None)
        _, twin = self._twins.pop(key, ("", None))
        return part if twin is None else twin

    def merged(self, function: str, tensors: Any, dim: int) -> torch.Tensor | None:
        """The result of STACK or CAT of these tensors in dimension `dim`, if they are parts of one
        parameter and adjacent in this order. Else None."""
        if not self._merged or in_dispatch_mode():  # there the result is of another kind
            return None
        return self._merged.get((function, dim, _identity(tensors)))

    def close(self) -> None:
        """Frees the parameters that were not taken. May be called again."""
        self._unwritten.clear()
        self._twins.clear()
        self._merged.clear()

    def __enter__(self) -> ParameterBuffers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _identity(tensors: Any) -> Any:
    """A key for these tensors in their order; None if they are of another kind."""
    import torch

    if not isinstance(tensors, (list, tuple)) or any(type(t) is not torch.Tensor for t in tensors):
        return None
    return tuple((each.data_ptr(), each.shape, each.stride(), each.dtype) for each in tensors)
