"""Predicts what transformers will do with each tensor of a checkpoint, before it does.

    skip      nothing is read: it will not be requested, or only its shape or a view nobody reads
    keep      it becomes the parameter as it is, on its device: its memory becomes the model's
    convert   it is cast, converted, sliced or moved: its memory is released at once

The rules are transformers' own functions (`rename_source_key`, `DtensorShardOperation`, the device
map); only their order is repeated here. A wrong prediction costs time and never gives a wrong
tensor: a tensor that was not predicted is read when it is requested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gdsload.checkpoint import TensorInfo
from gdsload.distribution.exchange import box_of
from gdsload.distribution.shares import Box
from gdsload.dtypes import known_dtype
from gdsload.integrations.transformers.parameter_buffers import (
    CAST,
    EXPERTS,
    ROWS,
    Kind,
    ParameterBuffer,
    buffer_of,
    kinds_of,
)
from gdsload.integrations.transformers.tied_weights import twin_pairs
from gdsload.planning.read_plan import FILE_ORDER
from gdsload.planning.tensor_slices import PartName, TensorSlice, read_the_same, slice_of, whole
from gdsload.system.device_name import device_name

SKIP, KEEP, CONVERT = "skip", "keep", "convert"
_Patterns = dict[str, list[str]]  # keys by the converter's pattern, or a key by itself


@dataclass(slots=True)
class LoadPlan:
    """What transformers will request. Keys are names in the checkpoint, or keys of slices."""

    fates: dict[str, str] = field(default_factory=dict)  # of all tensors, in transformers' order
    slices: dict[str, list[TensorSlice]] = field(default_factory=dict)  # by device, in order
    boxes: dict[str, tuple[str, Box]] = field(default_factory=dict)  # tensor and box, by slice
    # Tensors of which several slices are read as one: what is read, and the index of each slice.
    bases: dict[str, tuple[TensorSlice, dict[str, Any]]] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)  # of tensors that are read to a device
    kept: set[str] = field(default_factory=set)  # keys of slices
    parameters: dict[str, str] = field(default_factory=dict)  # of kept tensors
    lazy: set[str] = field(default_factory=set)  # wanted as views that nobody reads
    shapes: set[str] = field(default_factory=set)  # wanted without their bytes
    buffers: list[ParameterBuffer] = field(default_factory=list)  # in file order
    written: set[str] = field(default_factory=set)  # the tensors of `buffers`
    # Of two tied ones that may be equal when they are cast, the later in the file and the earlier.
    twins: dict[str, str] = field(default_factory=dict)
    deferred: bool = True  # tensors are requested one by one, by the thread that sets them
    # Answers of rename_source_key: (key, number of renamings, number of converters, prefix).
    names: dict[tuple[str, int, int, str | None], tuple[str, str | None]] = field(
        default_factory=dict
    )

    def count(self) -> dict[str, int]:
        """The number of tensors with each fate."""
        found = Counter(self.fates.values())
        return {fate: found[fate] for fate in (KEEP, CONVERT, SKIP)}


class _Naming:
    """transformers' renaming of checkpoint keys. Stores each answer in the load plan."""

    def __init__(self, model: Any, load_config: Any, plan: LoadPlan) -> None:
        from transformers import core_model_loading as loading

        mapping = load_config.weight_mapping or []
        self._renamings = [e for e in mapping if isinstance(e, loading.WeightRenaming)]
        self._converters = [e for e in mapping if isinstance(e, loading.WeightConverter)]
        self._rename = loading.rename_source_key
        self._prefix = model.base_model_prefix
        self._answers = plan.names
        self.parameters: Mapping[str, Any] = model.state_dict()
        self.buffers = {name for name, _ in model.named_buffers()}
        # Patterns of tensors that are too large to be converted on a device.
        self.on_cpu = {
            pattern
            for converter in self._converters
            if getattr(converter, "force_cpu", False)
            for pattern in converter.source_patterns
        }

    def __call__(self, key: str) -> tuple[str, str | None]:
        """The name of the parameter, and the pattern of its converter, if any."""
        found = self._ask(key, self._renamings, self._converters)
        if found[0] not in self.parameters and key in self.parameters:
            found = self._ask(key, [], [])
        return found

    def _ask(self, key: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
        found: tuple[str, str | None] = self._rename(
            key, renamings, converters, self._prefix, self.parameters
        )
        self._answers[key, len(renamings), len(converters), self._prefix] = found
        return found


def load_plan_of(
    model: Any,
    load_config: Any,
    infos: Mapping[str, TensorInfo],
    read_device_of: Callable[[str], str] = lambda device: "cpu",
    *,
    shared: bool = False,
) -> LoadPlan:
    """Predicts what `convert_and_load_state_dict_in_model` will request of these tensors.

    Marks the transforms of `load_config` as used, as the load itself will.

    Args:
        model: The empty model.
        load_config: transformers' LoadStateDictConfig.
        infos: All tensors of the checkpoint, by name.
        read_device_of: The device that reads for a parameter on a device can go to: that device,
            or "cpu".
        shared: Whether several ranks read together: no parameter is read into a buffer then.

    Raises:
        AttributeError, ImportError, LookupError, TypeError: transformers' internals have changed.
    """
    from transformers import core_model_loading as loading

    planner = _Planner(loading, model, load_config, infos, read_device_of, shared)
    for key in sorted(infos, key=loading.dot_natural_key):
        planner.add(key)
    if load_config.device_mesh is not None and planner.shard_operation is None:
        planner.forget_slices()
    elif load_config.hf_quantizer is None and not shared:
        planner.add_buffers()
    planner.order_slices()
    return planner.plan


class _Planner:
    """The load plan of one model, tensor by tensor, in transformers' order.

    Attributes:
        plan: What is known up to now.
        shard_operation: transformers' class for the part of one rank; None if it has none.
    """

    def __init__(
        self,
        loading: Any,
        model: Any,
        load_config: Any,
        infos: Mapping[str, TensorInfo],
        read_device_of: Callable[[str], str],
        shared: bool,
    ) -> None:
        self.plan = LoadPlan()
        self.shard_operation: Any = getattr(loading, "DtensorShardOperation", None)
        self._loading, self._model, self._config = loading, model, load_config
        self._infos, self._shared = infos, shared
        self._read_device_of = read_device_of
        self._naming = _Naming(model, load_config, self.plan)
        self._place_of = _places(load_config)
        self._dtype_of = _dtypes(loading, load_config)
        self._dtypes: dict[str, Any] = {}  # in the model
        self._patterns_of: dict[str, _Patterns] = {}  # by parameter
        self._slices: dict[str, list[TensorSlice]] = {}  # by key
        self._members: Counter[tuple[str, str]] = Counter()  # by parameter and pattern

    def add(self, key: str) -> None:
        """Predicts the fate of one tensor."""
        plan, naming = self.plan, self._naming
        name, pattern = naming(key)
        plan.fates[key] = SKIP
        if name not in naming.parameters:
            return
        param, place = naming.parameters[name], self._place_of(name)
        if place == "disk" and pattern is None:
            if self._stays_on_disk(name):
                plan.lazy.add(key)
                return
            place = "cpu"  # the model keeps its buffers
        on_cpu = pattern in naming.on_cpu
        if place == "meta" and not on_cpu and not _is_dtensor(param):
            plan.shapes.add(key)
            return
        self._patterns_of.setdefault(name, {}).setdefault(pattern or key, []).append(key)
        self._dtypes[key] = self._dtype_of(name, param)
        if self.shard_operation is not None and _is_dtensor(param):
            slices = self._slices_of_rank(key, name, pattern)
        else:
            slices = [whole(self._infos[key])]
            plan.boxes[key] = key, box_of(self._infos[key], None)
            place = "cpu" if on_cpu else place
        device = self._read_device_of(place)
        plan.deferred = plan.deferred and (place == device or place in ("disk", "meta"))
        if device != "cpu":
            plan.devices[key] = device
        self._slices[key] = slices
        if slices and pattern is None and place == device and self._is_kept(key, slices):
            plan.fates[key] = KEEP
            plan.parameters[key] = name
            plan.kept.update(one.key for one in slices)
        elif slices:
            plan.fates[key] = CONVERT

    def _stays_on_disk(self, name: str) -> bool:
        """Whether transformers discards what it reads of a parameter on disk: accelerate reads the
        file itself, when it is needed."""
        is_buffer = name in self._naming.buffers
        return not is_buffer or getattr(self._config, "offload_buffers", False)

    def _slices_of_rank(self, key: str, name: str, pattern: str | None) -> list[TensorSlice]:
        """The slices of a tensor that this rank will request."""
        number = None
        if pattern is not None:
            number = self._members[name, pattern]
            self._members[name, pattern] += 1
        operation = self.shard_operation(self._naming.parameters[name])
        slices, boxes = _rank_slices(operation, self._infos[key], number)
        self.plan.boxes.update(boxes)
        return slices

    def _is_kept(self, key: str, slices: Sequence[TensorSlice]) -> bool:
        """Whether slices become a parameter as they are."""
        dtype = self._dtypes[key]
        is_whole = all(one.shape is None and one.index is None for one in slices)
        return is_whole and dtype is not None and dtype == known_dtype(self._infos[key].dtype)

    def forget_slices(self) -> None:
        """The parts that a rank needs are known only when it asks for them."""
        self.plan.deferred = False
        self.plan.kept.clear()
        self._slices.clear()

    def add_buffers(self) -> None:
        """Plans memory for parameters that the checkpoint does not hold in their final form."""
        plan, infos = self.plan, self._infos
        parameters = self._naming.parameters
        merged_by = _merged_patterns(self._loading, self._config)
        buffers = (
            _buffer(patterns, merged_by, self._dtypes, plan.fates, infos)
            for name, patterns in self._patterns_of.items()
            if self._place_of(name) == "cpu" and not _is_dtensor(parameters[name])
        )
        plan.buffers = [buffer for buffer in buffers if buffer is not None]
        plan.buffers.sort(key=lambda b: min(FILE_ORDER(infos[kind.keys[0]]) for kind in b.kinds))
        plan.written = {key for buffer in plan.buffers for key in buffer.keys}
        plan.twins = _twins(self._model, self._patterns_of, plan.buffers, infos)

    def order_slices(self) -> None:
        """Groups the slices that are read by themselves by device, in the order of requests."""
        plan = self.plan
        order = list(self._slices)
        if plan.deferred:  # parameter by parameter
            order = [
                key
                for patterns in self._patterns_of.values()
                for keys in patterns.values()
                for key in keys
            ]
        for key in order:
            if key not in plan.written and key in self._slices:
                device = plan.devices.get(key, "cpu")
                plan.slices.setdefault(device, []).extend(self._read_slices(key))

    def _read_slices(self, key: str) -> list[TensorSlice]:
        """The slices of a tensor that are read by themselves. Bytes of several are read once; if
        ranks share the reads, also what lies between them: each would read the others alone."""
        slices, info, boxes = self._slices[key], self._infos[key], self.plan.boxes
        found = {one.key: boxes[one.key][1] for one in slices if one.key in boxes}
        if len(found) < max(len(slices), 2) or not (self._shared or read_the_same(slices)):
            return slices
        hull = tuple(
            (min(low for low, _ in ends), max(high for _, high in ends))
            for ends in zip(*found.values(), strict=True)
        )
        base = slice_of(info, tuple(slice(*ends) for ends in hull))
        base = base._replace(key=PartName(base.key, " and others"))
        boxes[base.key] = key, hull
        self.plan.bases[key] = base, {name: _within(hull, box) for name, box in found.items()}
        return [base]


def _within(hull: Box, box: Box) -> tuple[slice, ...]:
    """The index of a box in another one that contains it."""
    return tuple(
        slice(start - first, stop - first)
        for (first, _), (start, stop) in zip(hull, box, strict=True)
    )


def _buffer(
    patterns: _Patterns,
    merged_by: Mapping[str, tuple[str, list[str]]],
    dtypes: Mapping[str, Any],
    fates: Mapping[str, str],
    infos: Mapping[str, TensorInfo],
) -> ParameterBuffer | None:
    """The buffer of one parameter; None if its tensor is kept, or converted in an unknown way."""
    first, *others = patterns
    if first in infos:  # a key by itself
        if others or fates[first] != CONVERT:
            return None
        return buffer_of([Kind((first,), infos[first].shape)], dtypes[first], CAST)
    layout, sources = merged_by.get(first, ("", []))
    if not patterns.keys() <= set(sources):
        return None
    kinds = kinds_of(patterns, sources, infos, layout)
    return None if kinds is None else buffer_of(kinds, dtypes[patterns[first][0]], layout)


def _twins(
    model: Any,
    patterns_of: Mapping[str, _Patterns],
    buffers: Sequence[ParameterBuffer],
    infos: Mapping[str, TensorInfo],
) -> dict[str, str]:
    import torch

    casts = {
        buffer.keys[0]: buffer.shape
        for buffer in buffers
        if buffer.layout == CAST
        and buffer.dtype == torch.float32
        and infos[buffer.keys[0]].dtype == "BF16"
    }
    twins = {}
    for pair in twin_pairs(model):
        keys_of = [keys for name in pair for keys in patterns_of.get(name, {}).values()]
        found = [key for keys in keys_of for key in keys]
        if len(found) != 2 or not casts.keys() >= set(found):
            continue
        first, second = sorted(found, key=lambda key: FILE_ORDER(infos[key]))
        if casts[first] == casts[second]:
            twins[second] = first
    return twins


def _merged_patterns(loading: Any, load_config: Any) -> dict[str, tuple[str, list[str]]]:
    """The layout and all patterns of a converter by each of its patterns, for converters that stack
    experts and may then concatenate their rows, and those that only concatenate rows."""
    stack = getattr(loading, "MergeModulelist", None)
    concatenate = getattr(loading, "Concatenate", None)
    found: dict[str, tuple[str, list[str]]] = {}
    for entry in load_config.weight_mapping or ():
        operations = [(type(o), getattr(o, "dim", None)) for o in getattr(entry, "operations", ())]
        sources = list(entry.source_patterns)
        if len(entry.target_patterns) != 1:
            continue
        if operations == [(concatenate, 0)]:
            found.update(dict.fromkeys(sources, (ROWS, sources)))
        elif operations == [(stack, 0), (concatenate, 1)] or (
            operations == [(stack, 0)] and len(sources) == 1
        ):
            found.update(dict.fromkeys(sources, (EXPERTS, sources)))
    return found


def _places(load_config: Any) -> Callable[[str], str]:
    """The place of a parameter: "cpu", "cuda:1", "disk" or "meta"."""
    device_map = load_config.device_map or {"": "cpu"}
    if len(set(map(str, device_map.values()))) == 1 and "" in device_map:
        only = device_name(device_map[""])
        return lambda name: only
    from transformers.integrations.accelerate import expand_device_map

    known: dict[str, str] = {}

    def place_of(name: str) -> str:
        if name not in known:
            known[name] = device_name(expand_device_map(device_map, [name])[name])
        return known[name]

    return place_of


def _dtypes(loading: Any, load_config: Any) -> Callable[[str, Any], Any]:
    """The dtype of a parameter in the model; None if a quantizer decides."""
    dtype_plan = getattr(load_config, "dtype_plan", None) or {}
    if dtype_plan:
        alternation, group_of, _ = loading.build_glob_alternation(list(dtype_plan))
    quantizer = load_config.hf_quantizer

    def dtype_of(name: str, param: Any) -> Any:
        if quantizer is not None and not quantizer.pre_quantized:
            return None
        match = alternation.search(name) if dtype_plan else None
        if match is not None:
            return dtype_plan[group_of[match.lastgroup]]
        return param.dtype

    return dtype_of


def _is_dtensor(param: Any) -> bool:
    return hasattr(param, "placements") and hasattr(param, "device_mesh")


class _Probe:
    """A slice without data that records how it is indexed."""

    def __init__(self, info: TensorInfo) -> None:
        self._info = info
        self.slices: list[TensorSlice] = []
        self.boxes: dict[str, tuple[str, Box]] = {}  # of indices that have one, by slice

    def get_shape(self) -> list[int]:
        return list(self._info.shape)

    def __getitem__(self, index: Any) -> Any:
        import torch

        self.slices.append(slice_of(self._info, index))
        items = () if index is Ellipsis else index
        if isinstance(items, tuple) and all(
            isinstance(item, slice) and item.step in (None, 1) for item in items
        ):
            self.boxes[self.slices[-1].key] = self._info.name, box_of(self._info, items)
        return torch.empty(self._info.shape, device="meta")[index]


def _rank_slices(
    operation: Any, info: TensorInfo, number: int | None
) -> tuple[list[TensorSlice], dict[str, tuple[str, Box]]]:
    """The slices that this rank will request of a sharded tensor, and their boxes."""
    probe = _Probe(info)
    operation.shard_tensor(probe, tensor_idx=number, device="meta")
    return probe.slices, probe.boxes
