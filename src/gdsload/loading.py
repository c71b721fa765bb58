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

from gdsload import readiness, stopping
from gdsload.swaps import Swap, takes
from gdsload.weights import Weights

# The load whose inner parts run in this context.
running: ContextVar[Weights | None] = ContextVar("gdsload.weights", default=None)

# How transformers uses the copies of converters, in the text of its function. Where it does so in
# another way, all of them are made.
_USE_OF_COPIES = (
    "deepcopy(pattern_to_converter[source_pattern])",
    "param_name_to_load.setdefault(renamed_key, new_converter)",
)


def swaps_of_loading(module: ModuleType) -> Iterator[Swap]:
    """What is replaced in `transformers.core_model_loading`."""
    deepcopy, rename, natural, is_true = (
        module.deepcopy, module.rename_source_key, module.dot_natural_key,
        module.is_env_variable_true,
    )  # fmt: skip
    spares_copies = _uses_first_copies(module)

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

    def copied(value: Any, *rest: Any) -> Any:
        weights = running.get()
        if weights is None or not spares_copies or not hasattr(value, "collected_tensors"):
            return deepcopy(value, *rest)
        # The parameter that the key just renamed belongs to has its converter: `setdefault` will
        # throw this one away.
        if weights.named in weights.converted:
            return value
        weights.converted.add(weights.named)
        return deepcopy(value, *rest)

    def natural_key(name: str) -> Any:
        weights = running.get()
        known = None if weights is None else weights.forecast.sort_keys.get(name)
        return natural(name) if known is None else known

    @functools.wraps(is_true)
    def env_is_true(name: str) -> Any:
        weights = running.get()
        if weights is not None and name == "HF_DEACTIVATE_ASYNC_LOAD":
            weights.begin()  # this is asked first, when the allocator has been warmed up
            if weights.forecast.deferred:
                return True
        return is_true(name)

    set_param: Any = getattr(module, "set_param_for_module", None)

    def param_set(model: Any, name: str, *rest: Any, **named: Any) -> Any:
        result = set_param(model, name, *rest, **named)
        if running.get() is not None:
            stopping.check()
            if (watcher := readiness.current()) is not None:
                watcher.arrived(model, name)
        return result

    find_device = module.get_device

    @functools.wraps(find_device)
    def device_of(device_map: Any, name: str, *rest: Any, **named: Any) -> Any:
        weights = running.get()
        simple = device_map is not None and len(device_map) == 1 and "" in device_map
        if weights is None or not simple or device_map[""] == "disk":
            return find_device(device_map, name, *rest, **named)
        return device_map[""]

    yield Swap(module, "get_device", device_of)
    yield Swap(module, "rename_source_key", renamed)
    yield Swap(module, "deepcopy", copied)
    yield Swap(module, "dot_natural_key", natural_key)
    materialize = getattr(module, "_materialize_copy", None)
    if materialize is not None and takes(materialize, "tensor", "device", "dtype"):

        @functools.wraps(materialize)
        def materialized(tensor: Any, device: Any = None, dtype: Any = None) -> Any:
            # No context variable: transformers may ask from threads of its own.
            placed = getattr(tensor, "placed", None)
            found = None if placed is None else placed(device, dtype)
            return materialize(tensor, device, dtype) if found is None else found

        yield Swap(module, "_materialize_copy", materialized)
    if set_param is not None:
        yield Swap(module, "set_param_for_module", functools.wraps(set_param)(param_set))
    yield Swap(module, "is_env_variable_true", env_is_true)
    yield from _swaps_of_merging(module)


def swaps_of_warmup(module: ModuleType) -> Iterator[Swap]:
    """What is replaced in `transformers.modeling_utils` of what is taken for the weights."""
    warm_up = getattr(module, "caching_allocator_warmup", None)
    if warm_up is None or not takes(warm_up, "model", "expanded_device_map", "hf_quantizer"):
        return

    @functools.wraps(warm_up)
    def warmed_up(model: Any, expanded_device_map: Any, hf_quantizer: Any) -> Any:
        weights = running.get()
        if weights is not None and (there := weights.settled_parameters()):
            expanded_device_map = {
                name: device for name, device in expanded_device_map.items() if name not in there
            }
        return warm_up(model, expanded_device_map, hf_quantizer)

    yield Swap(module, "caching_allocator_warmup", warmed_up)


_CONVERT = ("self", "input_dict", "source_patterns", "target_patterns", "kwargs")
_PATTERNS = ("source_pattern", "target_patterns")


def _swaps_of_merging(module: ModuleType) -> Iterator[Swap]:
    stack = getattr(module, "MergeModulelist", None)
    if stack is not None and takes(stack.convert, *_CONVERT):
        for asked in ("input_size", "input_dict"):  # the latter before 5.9
            if takes(stack.get_target_pattern, "self", asked, *_PATTERNS):
                yield Swap(stack, "convert", _swapped_stack(stack.convert, asked))
    join = getattr(module, "Concatenate", None)
    if (
        join is not None
        and takes(join.convert, *_CONVERT)
        and takes(join.get_target_pattern, "self", "target_patterns")
    ):
        yield Swap(join, "convert", _swapped_join(join.convert))


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
