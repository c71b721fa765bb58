"""What transformers is going to do with each tensor of a checkpoint, said before it does.

    skip       it will not be asked for, or only a view of it is wanted: nothing is read
    keep       it becomes the parameter as it is, where that shall live: its memory is the model's
    transient  it is cast, converted, cut or moved: its memory goes back at once

The rules are transformers' own (`rename_source_key`, `DtensorShardOperation`, the device map);
only their order is repeated here. A wrong forecast costs time and never a wrong tensor: what was
not foreseen is read when it is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gdsload.checkpoint import TensorInfo
from gdsload.dtypes import known_dtype
from gdsload.integrations.transformers.parameter_buffers import (
    Kind,
    ParameterBuffer,
    kinds_of,
    target_of,
)
from gdsload.planning.read_plan import FILE_ORDER
from gdsload.planning.tensor_slices import TensorSlice, slice_of, whole
from gdsload.system.device_name import device_name

SKIP, KEEP, CONVERT = "skip", "keep", "convert"


@dataclass(slots=True)
class LoadPlan:
    """What will be asked for, in order. `lazy` tensors are wanted as views that nobody reads;
    `targets` are parameters that will be made from transient ones; `devices` are where tensors are
    read to, for those that are not read to the CPU."""

    slices: list[TensorSlice] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    names: dict[tuple[str, int, int], tuple[str, str | None]] = field(default_factory=dict)
    sort_keys: dict[str, list[Any]] = field(default_factory=dict)
    lazy: set[str] = field(default_factory=set)
    targets: list[ParameterBuffer] = field(default_factory=list)
    placed: set[str] = field(default_factory=set)  # the keys of what they are made of
    kept: set[str] = field(default_factory=set)  # the keys of slices
    parameters: dict[str, str] = field(default_factory=dict)  # what kept tensors become, by key
    deferred: bool = True  # tensors are asked for by the thread that sets them, one by one
    devices: dict[str, str] = field(default_factory=dict)
    device_of: dict[str, str] = field(default_factory=dict)  # the same for slices, by their keys

    def slices_of(self, device: str) -> list[TensorSlice]:
        """Those that are read to a device, in order."""
        return [
            tensor_slice
            for tensor_slice in self.slices
            if self.device_of.get(tensor_slice.key, "cpu") == device
        ]

    def count(self) -> dict[str, int]:
        """How many tensors have each label."""
        found = Counter(self.labels.values())
        return {label: found[label] for label in (KEEP, CONVERT, SKIP)}


class _Naming:
    """transformers' renaming of checkpoint keys; each answer is noted, to be given once more."""

    def __init__(self, model: Any, load_config: Any, forecast: LoadPlan) -> None:
        from transformers import core_model_loading as loading

        mapping = load_config.weight_mapping or []
        self._renamings = [e for e in mapping if isinstance(e, loading.WeightRenaming)]
        self._converters = [e for e in mapping if isinstance(e, loading.WeightConverter)]
        self._on_cpu = {
            pattern
            for converter in self._converters
            if getattr(converter, "force_cpu", False)
            for pattern in converter.source_patterns
        }
        self._rename = loading.rename_source_key
        self._prefix = model.base_model_prefix
        self._noted = forecast.names
        self.meta: Mapping[str, Any] = model.state_dict()

    def __call__(self, key: str) -> tuple[str, str | None]:
        found = self._ask(key, self._renamings, self._converters)
        if found[0] not in self.meta and key in self.meta:
            found = self._ask(key, [], [])
        return found

    def _ask(self, key: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
        found: tuple[str, str | None] = self._rename(
            key, renamings, converters, self._prefix, self.meta
        )
        self._noted[key, len(renamings), len(converters)] = found
        return found

    def stays_on_cpu(self, pattern: str) -> bool:
        """Whether what is converted by this pattern is too large to be converted elsewhere."""
        return pattern in self._on_cpu

    def marks(self) -> list[tuple[Any, bool]]:
        """The marks that renaming leaves on the transforms, to be put back."""
        return [(e, e._was_used) for e in (*self._renamings, *self._converters)
                if hasattr(e, "_was_used")]  # fmt: skip


def forecast(
    model: Any,
    load_config: Any,
    infos: Mapping[str, TensorInfo],
    reach: Callable[[str], str] = lambda device: "cpu",
) -> LoadPlan:
    """What `convert_and_load_state_dict_in_model` will ask for, given these tensors.

    `reach` says where reads can go for a device that a tensor shall live on: there, or "cpu".

    Leaves the transforms of `load_config` marked as used, as the load itself will. When it raises
    (AttributeError, TypeError: these are transformers' inner parts) the marks are put back.
    """
    found = LoadPlan()
    naming = _Naming(model, load_config, found)
    marks = naming.marks()
    try:
        _label(found, naming, load_config, infos, reach)
    except BaseException:
        for transform, mark in marks:
            transform._was_used = mark
        raise
    return found


def _label(
    found: LoadPlan,
    naming: _Naming,
    load_config: Any,
    infos: Mapping[str, TensorInfo],
    reach: Callable[[str], str],
) -> None:
    from transformers import core_model_loading as loading

    place_of = _places(load_config)
    shares_of = _shares(loading)
    unforeseen = load_config.device_mesh is not None and shares_of is None
    dtype_of = _dtypes(loading, load_config)
    merged_by = _merging(loading, load_config)
    dtypes: dict[str, Any] = {}
    groups: dict[str, dict[str, list[str]]] = {}
    wishes: dict[str, list[TensorSlice]] = {}
    members: Counter[tuple[str, str]] = Counter()
    meta = naming.meta
    found.sort_keys = _natural_keys(loading.dot_natural_key, infos)
    for key in sorted(infos, key=found.sort_keys.__getitem__):
        name, pattern = naming(key)
        if name not in meta:
            found.labels[key] = SKIP
            continue
        param, info, place = meta[name], infos[key], place_of(name)
        if place == "disk" and pattern is None:
            # Its tensor is made and thrown away: accelerate reads the file itself, when needed.
            found.labels[key] = SKIP
            found.lazy.add(key)
            continue
        groups.setdefault(name, {}).setdefault(pattern or key, []).append(key)
        dtype = dtypes[key] = dtype_of(name, param)
        share = [whole(info)]
        simple = True
        if shares_of is not None and _is_dtensor(param):
            number = members[name, pattern] if pattern is not None else None
            if pattern is not None:
                members[name, pattern] += 1
            share = shares_of(param, info, number)
            simple = all(c.shape is None and c.index is None for c in share)
        elif pattern is not None and naming.stays_on_cpu(pattern):
            place = "cpu"
        device = reach(place)
        same = dtype is not None and dtype == known_dtype(info.dtype)
        kept = pattern is None and place == device and simple and same
        found.labels[key] = (KEEP if kept else CONVERT) if share else SKIP
        if kept and share:
            found.parameters[key] = name
        found.deferred = found.deferred and (place == device or place in ("disk", "meta"))
        if device != "cpu":
            found.devices[key] = device
            found.device_of.update((c.key, device) for c in share)
        wishes[key] = share
    if unforeseen:
        # Which parts of which tensors a rank needs is not known here before it asks.
        found.deferred = False
        wishes.clear()
    if found.deferred:
        order = [key for patterns in groups.values() for keys in patterns.values() for key in keys]
    else:
        order = list(wishes)
    if load_config.hf_quantizer is None and not unforeseen:
        found.targets = [
            target
            for name, patterns in groups.items()
            if place_of(name) == "cpu" and not _is_dtensor(naming.meta.get(name))
            for target in [_target(patterns, merged_by, dtypes, found.labels, infos)]
            if target is not None
        ]
    # In the order of the file, as they will be filled.
    found.targets.sort(key=lambda t: min(FILE_ORDER(infos[kind.keys[0]]) for kind in t.kinds))
    found.placed = {key for target in found.targets for kind in target.kinds for key in kind.keys}
    found.kept = {
        tensor_slice.key
        for key, wish in wishes.items()
        if found.labels[key] == KEEP
        for tensor_slice in wish
    }
    # What has a place is read in that order, whatever is asked for first.
    found.slices = [
        wish for key in order if key not in found.placed for wish in wishes.get(key, ())
    ]


def _target(
    patterns: dict[str, list[str]],
    merged_by: Mapping[str, Any],
    dtypes: Mapping[str, Any],
    labels: Mapping[str, str],
    infos: Mapping[str, TensorInfo],
) -> ParameterBuffer | None:
    """What to make of the tensors of one parameter, by the patterns that led to it; None where they
    become it as they are, or in a way that is not known here."""
    first, *others = patterns
    keys = patterns[first]
    if first in infos:  # not a pattern: its own name
        if others or labels[first] != CONVERT:
            return None
        return target_of([Kind((first,), infos[first].shape)], dtypes[first], merged=False)
    if first not in merged_by or not patterns.keys() <= set(merged_by[first]):
        return None
    kinds = kinds_of(patterns, merged_by[first], infos)
    return None if kinds is None else target_of(kinds, dtypes[keys[0]], merged=True)


def _merging(loading: Any, load_config: Any) -> dict[str, list[str]]:
    """For each pattern of a converter that stacks experts, and may then concatenate their rows, all
    of its patterns in their order."""
    stack = getattr(loading, "MergeModulelist", None)
    concatenate = getattr(loading, "Concatenate", None)
    found: dict[str, list[str]] = {}
    for entry in load_config.weight_mapping or ():
        operations = [(type(o), getattr(o, "dim", None)) for o in getattr(entry, "operations", ())]
        sources = list(entry.source_patterns)
        if len(entry.target_patterns) == 1 and (
            operations == [(stack, 0), (concatenate, 1)]
            or (operations == [(stack, 0)] and len(sources) == 1)
        ):
            found.update(dict.fromkeys(sources, sources))
    return found


_SAMPLES = 64


def _natural_keys(natural: Callable[[str], Any], names: Iterable[str]) -> dict[str, Any]:
    """``natural(name)`` for each, asked once for every word between dots: names share theirs.

    Where that is not how this transformers makes its keys, each name is asked about.
    """
    names = list(names)
    words: dict[str, Any] = {}

    def key_of(name: str) -> list[Any]:
        parts = name.split(".")
        for part in parts:
            if part not in words:
                words[part] = natural(part)[0]
        return [words[part] for part in parts]

    if all(key_of(name) == natural(name) for name in names[:: len(names) // _SAMPLES + 1]):
        return {name: key_of(name) for name in names}
    return {name: natural(name) for name in names}


def _places(load_config: Any) -> Callable[[str], str]:
    """Where a parameter shall live: "cpu", "cuda:1", "disk", "meta"."""
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
    """The dtype that a parameter has in the model; None where its quantizer makes it."""
    plan = getattr(load_config, "dtype_plan", None) or {}
    search: Callable[[str], Any] | None = None
    group_of: dict[str, str] = {}
    if plan:
        alternation, group_of, _ = loading.build_glob_alternation(list(plan))
        search = alternation.search
    quantizer = load_config.hf_quantizer

    def dtype_of(name: str, param: Any) -> Any:
        if quantizer is not None and not quantizer.pre_quantized:
            return None
        match = search(name) if search is not None else None
        if match is not None:
            return plan[group_of[match.lastgroup]]
        return param.dtype if param is not None else load_config.dtype

    return dtype_of


def _is_dtensor(param: Any) -> bool:
    return param is not None and hasattr(param, "placements") and hasattr(param, "device_mesh")


class _Probe:
    """Stands where a slice will, and notes which parts of it are asked for."""

    def __init__(self, info: TensorInfo) -> None:
        self._info = info
        self.slices: list[TensorSlice] = []

    def get_shape(self) -> list[int]:
        return list(self._info.shape)

    def __getitem__(self, index: Any) -> Any:
        import torch

        self.slices.append(slice_of(self._info, index))
        return torch.empty(self._info.shape, device="meta")[index]


def _shares(loading: Any) -> Callable[[Any, TensorInfo, int | None], list[TensorSlice]] | None:
    """What a rank will ask of a tensor that is sharded; None where transformers has no such
    operation, and the answer is known only when it asks."""
    operation = getattr(loading, "DtensorShardOperation", None)
    if operation is None:
        return None

    def shares_of(param: Any, info: TensorInfo, number: int | None) -> list[TensorSlice]:
        probe = _Probe(info)
        operation(param).shard_tensor(probe, tensor_idx=number, device="meta")
        return probe.slices

    return shares_of
