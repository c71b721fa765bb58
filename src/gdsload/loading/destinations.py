"""Tensors that exist already, and what a load writes to them: matched and checked before the first
byte is written, because a load in place cannot be undone.

    checkpoint tensors ── rename ──► (name, index of a part) ──► Destination
    targets that share memory ─────► one of them is written, the others are its aliases

Not responsible for reading (`into`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from gdsload.errors import CheckpointError, PlacementError, listed, shown
from gdsload.loading.torch_memory import taking
from gdsload.memory.tensors import torch_dtype_of, torch_shape
from gdsload.planning.tensor_slices import WantedTensor
from gdsload.system.torch_thread import copying

if TYPE_CHECKING:
    import torch

# The tensors to write to: by name, of a module, or (name, tensor) pairs.
Targets: TypeAlias = (
    "Mapping[str, torch.Tensor] | torch.nn.Module | Iterable[tuple[str, torch.Tensor]]"
)
# Where a tensor of the checkpoint belongs: a name, (name, index of a part of it), or None: nowhere.
Place: TypeAlias = "str | tuple[str, Any] | None"
Rename: TypeAlias = "Mapping[str, Place] | Callable[[str], Place] | None"

MOST_NAMED = 5  # problems in one message


class Destination(NamedTuple):
    """A tensor of the checkpoint and the memory that it is written to.

    Attributes:
        wanted: The tensor, or the slice of it.
        name: The target that it is a part of.
        tensor: The part, without a gradient, in the shape of `wanted.kept`.
        device: Where it is, such as "cuda:0".
    """

    wanted: WantedTensor
    name: str
    tensor: torch.Tensor
    device: str

    @property
    def in_place(self) -> bool:
        """Whether bytes of the file can be read to it as they are."""
        tensor = self.tensor
        return (
            self.wanted.slice.index is None
            and tensor.dtype == torch_dtype_of(self.wanted.info)
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
        )


class Matched(NamedTuple):
    """The result of `matched`.

    Attributes:
        destinations: What is written.
        aliases: The names of targets that share their memory with a written one: its name.
        missing: Names of targets that nothing, or not all of it, is written to.
        unexpected: Names in the checkpoint that belong to no target.
        skipped: Number of tensors that `rename` says belong nowhere, or whose target shares its
            memory with another one.
    """

    destinations: list[Destination]
    aliases: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    skipped: int

    def fates(self) -> dict[str, int]:
        """The number of tensors by fate, as in the report."""
        cast = sum(
            each.tensor.dtype != torch_dtype_of(each.wanted.info) for each in self.destinations
        )
        return {
            "keep": len(self.destinations) - cast,
            "convert": cast,
            "skip": self.skipped + len(self.unexpected),
        }


def device_of(tensor: torch.Tensor) -> str:
    """The device of a tensor, such as "cuda:0"."""
    return str(tensor.device)


def named_tensors(targets: Targets) -> dict[str, torch.Tensor]:
    """The tensors by name. Of a module: its parameters, and the buffers that it saves.

    Raises:
        TypeError: A value is no tensor.
        ValueError: Two pairs have the same name.
    """
    import torch

    if isinstance(targets, torch.nn.Module):
        saved = targets.state_dict(keep_vars=True)
        found: dict[str, torch.Tensor] = dict(targets.named_parameters(remove_duplicate=False))
        buffers = targets.named_buffers(remove_duplicate=False)
        found |= {name: buffer for name, buffer in buffers if name in saved}
        return found
    if isinstance(targets, Mapping):
        found = dict(targets)
    else:
        found = {}
        for name, tensor in targets:
            if name in found:
                raise ValueError(f"two of the tensors to load into have the name {shown(name)}")
            found[name] = tensor
    for name, tensor in found.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{shown(name)} must be a tensor, not {type(tensor).__name__}")
    return found


def matched(
    wanted: Sequence[WantedTensor], targets: Mapping[str, torch.Tensor], rename: Rename
) -> Matched:
    """Finds the target of each tensor and checks that all can be written.

    Raises:
        CheckpointError: A shape or a dtype does not fit, or two tensors belong to one place.
        PlacementError: A target cannot be written, or two of them overlap.
    """
    found: list[Destination] = []
    unexpected: list[str] = []
    skipped = 0
    wrong: dict[str, str] = {}
    for each in wanted:
        place = _place_of(each.info.name, rename)
        if place is None:
            skipped += 1
            continue
        name, index = place
        target = targets.get(name)
        if target is None:
            unexpected.append(each.info.name)
            continue
        if why := _unwritable(target):
            raise PlacementError(f"the target {shown(name)} {why}")
        part = _part_of(target.detach(), name, index)
        if why := _misfit(each, part):
            wrong[each.info.name] = f"{shown(each.info.name)} {why}"
            continue
        for dimension in each.removed:
            part = part.unsqueeze(dimension)
        found.append(Destination(each, name, part, device_of(target)))
    if wrong:
        text = listed([*wrong.values()], MOST_NAMED, "; ")
        raise CheckpointError(text, tensor=next(iter(wrong)))
    kept, aliases = _without_aliases(found)
    _require_apart([each for each in kept if each.tensor.numel()])
    missing = _missing(found, aliases, targets)
    return Matched(kept, aliases, missing, unexpected, skipped + len(found) - len(kept))


def require_all(missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raises CheckpointError if a name is on one side only."""
    facts = []
    for names, text in ((missing, "has nothing for"), (unexpected, "has no target for")):
        if names:
            facts.append(f"{text} {listed([*map(shown, names)], MOST_NAMED)}")
    if facts:
        raise CheckpointError(
            f"the checkpoint {'; it '.join(facts)} (strict=False allows it)",
            tensor=[*missing, *unexpected][0],
        )


def by_device(found: Sequence[Destination], only: str | None) -> dict[str, list[Destination]]:
    """The destinations on each device. Raises PlacementError if one is not on the device `only`."""
    groups: dict[str, list[Destination]] = {}
    for each in found:
        if only is not None and each.device != only:
            raise PlacementError(f"the target {shown(each.name)} is on {each.device}, not {only}")
        groups.setdefault(each.device, []).append(each)
    return groups


def _place_of(name: str, rename: Rename) -> tuple[str, Any] | None:
    place: Place = name
    if callable(rename):
        place = rename(name)
    elif rename is not None:
        place = rename.get(name, name)
    if place is None:
        return None
    parts: Sequence[Any] = place if isinstance(place, (tuple, list)) else (place, ...)
    if len(parts) != 2 or not isinstance(parts[0], str):
        raise TypeError(
            f"rename must give a name, (name, index) or None, not {place!r} for {shown(name)}"
        )
    return parts[0], parts[1]


def _part_of(target: torch.Tensor, name: str, index: Any) -> torch.Tensor:
    items = index if isinstance(index, tuple) else (index,)
    for item in items:  # any other index would make a copy
        if type(item) is not int and item is not Ellipsis and not isinstance(item, slice):
            raise TypeError(
                f"the index of a part of {shown(name)} has {item!r}: numbers and ranges are allowed"
            )
    try:
        return target[index]
    except (IndexError, ValueError) as error:
        shape = list(target.shape)
        raise type(error)(
            f"{shown(name)} of the shape {shape} has no part {index!r}: {error}"
        ) from error


def _unwritable(target: torch.Tensor) -> str:
    """Why a target cannot be written to, or ""."""
    import torch

    if torch.nn.parameter.is_lazy(target):
        return "has no shape yet: run the model once, or give it its sizes"
    if target.is_meta:
        return "has no memory (device 'meta'): allocate it first, for example by to_empty()"
    if target.layout != torch.strided or target.is_nested:
        return f"has the layout {'nested' if target.is_nested else target.layout}"
    if type(target).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {type(target).__name__}, whose bytes are in other tensors: load into these"
    if target.is_quantized:
        return "is a quantized tensor"
    if not target.numel():
        return ""
    if target._is_zerotensor():  # of derivatives; its storage tells a size, and has no address
        return "is a ZeroTensor, which has no memory"
    extent = 1  # in an order of growing strides, each must step over all before it
    for stride, size in sorted(zip(target.stride(), target.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return "overlaps itself: it was expanded"
            extent += stride * (size - 1)
    # As sleeping engines free it. torch itself would write beyond it.
    if target.untyped_storage().nbytes() < (target.storage_offset() + extent) * target.itemsize:
        return "has no memory: its storage was freed, or is too small for it"
    return ""


def _misfit(wanted: WantedTensor, part: torch.Tensor) -> str:
    """Why a tensor of the checkpoint does not fit its place, or ""."""
    info = wanted.info
    shape = wanted.shape
    if info.dtype == "F4":
        shape = (*shape[:-1], torch_shape(info)[-1])
    if tuple(part.shape) != shape:
        return f"has the shape {list(shape)}, its target {list(part.shape)}"
    dtype = torch_dtype_of(info)
    if dtype != part.dtype and (info.dtype == "F4" or not _is_cast(dtype, part.dtype)):
        return f"is {info.dtype}, which is not cast to its target's {part.dtype}"
    return ""


@cache
def _is_cast(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Whether torch casts between these dtypes, and keeps their kind: no float becomes an int."""
    import torch

    if not torch.can_cast(dtype, to):
        return False
    try:
        torch.empty(1, dtype=dtype, device="cpu").to(to)
    except RuntimeError:  # some pairs of small floats are not implemented
        return False
    return True


def _place_in_memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _without_aliases(found: list[Destination]) -> tuple[list[Destination], dict[str, str]]:
    """One destination for each place in memory, and the names of targets that share it."""
    first: dict[Any, Destination] = {}
    kept, aliases = [], {}
    for each in found:
        other = each
        if each.tensor.numel():
            other = first.setdefault((each.device, *_place_in_memory(each.tensor)), each)
        if other is each:
            kept.append(each)
        elif other.name == each.name:
            names = f"{shown(other.wanted.info.name)} and {shown(each.wanted.info.name)}"
            text = f"{names} belong to the same place in {shown(each.name)}"
            raise CheckpointError(text, tensor=each.wanted.info.name)
        else:
            aliases[each.name] = other.name
    return kept, aliases


def _require_apart(found: Sequence[Destination]) -> None:
    """Raises PlacementError if two destinations share a byte."""
    extents = sorted(((each.device, *_extent(each.tensor)), n) for n, each in enumerate(found))
    cluster: list[Destination] = []
    device, end = "", 0
    for (where, start, stop), number in extents:
        if where != device or start >= end:
            _require_disjoint(cluster)
            cluster, end = [], 0
        cluster.append(found[number])
        device, end = where, max(end, stop)
    _require_disjoint(cluster)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte of a tensor, and the one after its last."""
    steps = sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    start = tensor.data_ptr()
    return start, start + (steps + 1) * tensor.element_size()


def _runs_of(tensor: torch.Tensor) -> tuple[int, list[int], list[int]]:
    """The runs of bytes that a tensor consists of: bytes of each, and for each dimension the number
    of runs and the bytes from one to the next."""
    run, counts, steps = tensor.element_size(), [], []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        step = stride * tensor.element_size()
        if step == run:
            run *= size
        elif size > 1:
            counts.append(size)
            steps.append(step)
    return run, counts, steps


def _require_disjoint(cluster: Sequence[Destination]) -> None:
    """For destinations whose extents overlap: such as columns of one matrix, which are apart."""
    import torch

    if len(cluster) < 2:
        return
    base = min(_extent(each.tensor)[0] for each in cluster)
    end = max(_extent(each.tensor)[1] for each in cluster)
    offsets = [each.tensor.data_ptr() - base for each in cluster]
    runs = [_runs_of(each.tensor) for each in cluster]
    # All of them begin and end at a multiple of so many bytes.
    unit = gcd(*offsets, *(n for run, _, steps in runs for n in (run, *steps)))
    count = (end - base) // unit
    with copying():
        with taking(count, "cpu", "comparing the places of the targets"):
            taken = torch.zeros(count, dtype=torch.bool, device="cpu")
        for each, offset, (run, counts, steps) in zip(cluster, offsets, runs, strict=True):
            strides = [*(step // unit for step in steps), 1]
            mask = taken.as_strided([*counts, run // unit], strides, offset // unit)
            if bool(mask.any()):
                others = ", ".join(shown(other.name) for other in cluster if other is not each)
                raise PlacementError(
                    f"the target {shown(each.name)} shares memory with another one ({others})"
                )
            mask.fill_(True)


def _missing(
    found: Iterable[Destination], aliases: dict[str, str], targets: Mapping[str, torch.Tensor]
) -> list[str]:
    """Targets of which not all is written, which are no `aliases` either. Adds to these the targets
    that share a place that is written wholly."""
    written: dict[str, int] = {}
    seen: set[str] = set()
    for each in found:
        written[each.name] = written.get(each.name, 0) + prod(each.tensor.shape)
        seen.add(each.name)
    complete = {
        (device_of(target), *_place_in_memory(target)): name
        for name, target in targets.items()
        if name in seen and written[name] == target.numel()
    }
    missing = []
    for name, target in targets.items():
        if name in seen and written[name] == target.numel():
            continue
        if name not in seen and _unwritable(target):  # it has no place that another one may share
            missing.append(name)
            continue
        other = complete.get((device_of(target), *_place_in_memory(target)))
        if other is not None and (target.numel() or targets[other] is target):
            aliases[name] = other
        else:
            aliases.pop(name, None)  # of a part of it
            missing.append(name)
    return missing
