"""What is replaced in transformers' `core_model_loading` while our weights are on their way: work
that was done already, or whose result is thrown away. And in its `modeling_utils` what takes memory
of a GPU for weights that have some there.

    rename_source_key     the forecast has asked it about every key; its answers are given again
    dot_natural_key       likewise
    get_device            a map with one device for all is not searched for every tensor
    deepcopy              a converter is copied for every tensor, but only the first copy for each
                          parameter is used: the others are not made
    set_param_for_module  says which parameter is in its place now (readiness), and ends a load that
                          was cancelled
    is_env_variable_true  no threads: our reads are ahead of whoever asks for a tensor, and worker
                          threads would hold tensors that nobody needs yet
    _materialize_copy     a tensor that is cast, or merged with others, goes straight to its place
                          in the parameter
    MergeModulelist       what lies in its place already is not stacked,
    Concatenate           nor concatenated

    caching_allocator_warmup   leaves out what a prefetch has brought to its device

Outside of a load of ours, each does what it did.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from gdsload.integrations.transformers import module_callbacks
from gdsload.integrations.transformers.model_reader import ModelReader
from gdsload.integrations.transformers.monkeypatch import (
    Misfit,
    Patch,
    Replacement,
    function_of,
    takes,
)
from gdsload.system import cancellation

# The load whose inner parts run in this context.
running: ContextVar[ModelReader | None] = ContextVar(
    "gdsload.integrations.transformers.model_reader", default=None
)

# How transformers uses the copies of converters, in the text of its function. Where it does so in
# another way, all of them are made.
_USE_OF_COPIES = (
    "deepcopy(pattern_to_converter[source_pattern])",
    "param_name_to_load.setdefault(renamed_key, new_converter)",
)


def _renaming(module: ModuleType) -> Any:
    return function_of(
        module, "rename_source_key", "source_key", "weight_renamings", "weight_converters"
    )


def _swap_of_renaming(module: ModuleType) -> Iterator[Replacement]:
    rename = _renaming(module)

    @functools.wraps(rename)
    def renamed(key: str, renamings: Any, converters: Any, *rest: Any, **named: Any) -> Any:
        weights = running.get()
        if weights is None or named.get("reverse"):
            return rename(key, renamings, converters, *rest, **named)
        found = weights.forecast.names.get((key, len(renamings), len(converters)))
        if found is None:
            found = rename(key, renamings, converters, *rest, **named)
        weights.named = found[0]
        return found

    yield Replacement(module, "rename_source_key", renamed)


def _swap_of_copying(module: ModuleType) -> Iterator[Replacement]:
    deepcopy = function_of(module, "deepcopy")
    try:
        _renaming(module)  # notes the parameter
    except Misfit as misfit:
        raise Misfit(f"rename_source_key does not fit: {misfit}") from misfit
    if not _uses_first_copies(module):
        raise Misfit("copies of converters are used in another way")

    def copied(value: Any, *rest: Any) -> Any:
        weights = running.get()
        if weights is None or not hasattr(value, "collected_tensors"):
            return deepcopy(value, *rest)
        # The parameter that the key just renamed belongs to has its converter: `setdefault` will
        # throw this one away.
        if weights.named in weights.converted:
            return value
        weights.converted.add(weights.named)
        return deepcopy(value, *rest)

    yield Replacement(module, "deepcopy", copied)


def _swap_of_sorting(module: ModuleType) -> Iterator[Replacement]:
    natural = function_of(module, "dot_natural_key", "s")

    def natural_key(s: str) -> Any:
        weights = running.get()
        known = None if weights is None else weights.forecast.sort_keys.get(s)
        return natural(s) if known is None else known

    yield Replacement(module, "dot_natural_key", natural_key)


def _swap_of_threads(module: ModuleType) -> Iterator[Replacement]:
    is_true = function_of(module, "is_env_variable_true", "env_variable")

    @functools.wraps(is_true)
    def env_is_true(env_variable: str) -> Any:
        weights = running.get()
        if weights is not None and env_variable == "HF_DEACTIVATE_ASYNC_LOAD":
            return weights.forecast.deferred or is_true(env_variable)
        return is_true(env_variable)

    yield Replacement(module, "is_env_variable_true", env_is_true)


SET_PARAM = "set_param_for_module"


def _swap_of_setting(module: ModuleType) -> Iterator[Replacement]:
    set_param = function_of(module, SET_PARAM, "model", "target_name")

    @functools.wraps(set_param)
    def param_set(model: Any, target_name: str, *rest: Any, **named: Any) -> Any:
        result = set_param(model, target_name, *rest, **named)
        if running.get() is not None:
            cancellation.check()
            if (watcher := module_callbacks.current()) is not None:
                watcher.arrived(model, target_name)
        return result

    yield Replacement(module, SET_PARAM, param_set)


def _swap_of_devices(module: ModuleType) -> Iterator[Replacement]:
    find_device = function_of(module, "get_device", "device_map", "param_name")

    @functools.wraps(find_device)
    def device_of(device_map: Any, param_name: str, *rest: Any, **named: Any) -> Any:
        weights = running.get()
        simple = device_map is not None and len(device_map) == 1 and "" in device_map
        if weights is None or not simple or device_map[""] == "disk":
            return find_device(device_map, param_name, *rest, **named)
        return device_map[""]

    yield Replacement(module, "get_device", device_of)


def _swap_of_materializing(module: ModuleType) -> Iterator[Replacement]:
    materialize = function_of(module, "_materialize_copy")
    if not takes(materialize, "tensor", "device", "dtype"):
        raise Misfit("it does not take (tensor, device, dtype)")

    @functools.wraps(materialize)
    def materialized(tensor: Any, device: Any = None, dtype: Any = None) -> Any:
        # No context variable: transformers may ask from threads of its own.
        placed = getattr(tensor, "placed", None)
        found = None if placed is None else placed(device, dtype)
        return materialize(tensor, device, dtype) if found is None else found

    yield Replacement(module, "_materialize_copy", materialized)


def replacements_of_warmup(module: ModuleType) -> Iterator[Replacement]:
    """What is replaced in `transformers.modeling_utils` of what is taken for the weights."""
    warm_up = function_of(module, "caching_allocator_warmup")
    if not takes(warm_up, "model", "expanded_device_map", "hf_quantizer"):
        raise Misfit("it does not take (model, expanded_device_map, hf_quantizer)")

    @functools.wraps(warm_up)
    def warmed_up(model: Any, expanded_device_map: Any, hf_quantizer: Any) -> Any:
        weights = running.get()
        if weights is not None and (there := weights.settled_parameters()):
            expanded_device_map = {
                name: device for name, device in expanded_device_map.items() if name not in there
            }
        return warm_up(model, expanded_device_map, hf_quantizer)

    yield Replacement(module, "caching_allocator_warmup", warmed_up)


_CONVERT = ("self", "input_dict", "source_patterns", "target_patterns", "kwargs")
_PATTERNS = ("source_pattern", "target_patterns")


def _swap_of_stacking(module: ModuleType) -> Iterator[Replacement]:
    stack = function_of(module, "MergeModulelist")
    for asked in ("input_size", "input_dict"):  # the latter before 5.9
        if takes(stack.convert, *_CONVERT) and takes(
            stack.get_target_pattern, "self", asked, *_PATTERNS
        ):
            yield Replacement(stack, "convert", _swapped_stack(stack.convert, asked))
            return
    raise Misfit("its methods take other parameters")


def _swap_of_joining(module: ModuleType) -> Iterator[Replacement]:
    join = function_of(module, "Concatenate")
    if not (
        takes(join.convert, *_CONVERT) and takes(join.get_target_pattern, "self", "target_patterns")
    ):
        raise Misfit("its methods take other parameters")
    yield Replacement(join, "convert", _swapped_join(join.convert))


def _swapped_stack(original: Any, asked: str) -> Any:
    @functools.wraps(original)
    def convert(
        self: Any, input_dict: Any, source_patterns: Any, target_patterns: Any, **named: Any
    ) -> Any:
        weights = running.get()
        if weights is not None and self.dim == 0:
            stacks = {p: weights.destinations.stacked(t) for p, t in input_dict.items()}
            if stacks and all(stack is not None for stack in stacks.values()):
                about = len(input_dict) if asked == "input_size" else input_dict
                merged = {
                    self.get_target_pattern(about, pattern, target_patterns): stack
                    for pattern, stack in stacks.items()
                }
                input_dict.clear()
                return merged
        return original(self, input_dict, source_patterns, target_patterns, **named)

    return convert


def _swapped_join(original: Any) -> Any:
    @functools.wraps(original)
    def convert(
        self: Any, input_dict: Any, source_patterns: Any, target_patterns: Any, **named: Any
    ) -> Any:
        weights = running.get()
        if weights is not None and self.dim == 1:
            tensors = [input_dict[p] for p in source_patterns if p in input_dict]
            whole = weights.destinations.joined(tensors)
            if whole is not None:
                target = self.get_target_pattern(target_patterns)
                input_dict.clear()
                return {target: whole}
        return original(self, input_dict, source_patterns, target_patterns, **named)

    return convert


def _uses_first_copies(module: ModuleType) -> bool:
    try:
        text = inspect.getsource(module.convert_and_load_state_dict_in_model)
    except (OSError, TypeError):
        return False
    return all(text.count(use) == 1 for use in _USE_OF_COPIES) and text.count("deepcopy(") == 1


PATCHES_OF_LOADING = (
    Patch("get_device", _swap_of_devices),
    Patch("deepcopy", _swap_of_copying),
    Patch("rename_source_key", _swap_of_renaming),
    Patch("dot_natural_key", _swap_of_sorting),
    Patch("_materialize_copy", _swap_of_materializing),
    Patch(SET_PARAM, _swap_of_setting),
    Patch("is_env_variable_true", _swap_of_threads),
    Patch("MergeModulelist", _swap_of_stacking),
    Patch("Concatenate", _swap_of_joining),
)
