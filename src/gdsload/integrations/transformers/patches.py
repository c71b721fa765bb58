"""Replacements for functions of transformers' `core_model_loading` and `modeling_utils`.

They act only while gdsload reads the weights of a model (`running`); otherwise each calls the
original, but for `re.compile` and `_tied_params_are_equal`. The hooks that start such a load are in
`hooks`.

    _materialize_copy         a tensor that is cast or merged is copied straight into its parameter
    torch.stack, torch.cat    return the parameter if its parts are already merged in it
    set_param_for_module      calls module callbacks; ends a cancelled load; begins to compare tied
                              weights
    is_env_variable_true      no loading threads: the readahead queue is ahead of the consumer, and
                              threads would hold tensors that are not needed yet
    rename_source_key,        renamed once per key, one converter per parameter: for a model with
    deepcopy                  18,000 experts this halves the time that is not reading
    re.compile                compiles a pattern when it is used: those of each parameter, and most
                              of the thousand of all architectures, which the first load of a
                              process makes, never are
    caching_allocator_warmup  leaves out parameters that are already in memory of the device
    _tied_params_are_equal    waits for that comparison, or compares bytes
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from copy import copy
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gdsload.integrations.transformers import module_callbacks
from gdsload.integrations.transformers.model_reader import ModelReader
from gdsload.integrations.transformers.monkeypatch import (
    Misfit,
    Patch,
    Replacement,
    function_of,
)
from gdsload.integrations.transformers.parameter_buffers import CAT, STACK
from gdsload.integrations.transformers.tied_weights import TIED_EQUAL, tied_equal
from gdsload.system import cancellation
from gdsload.system.torch_thread import in_dispatch_mode, without_modes

if TYPE_CHECKING:
    import torch

# The model that is being loaded in this context.
running: ContextVar[ModelReader | None] = ContextVar(
    "gdsload.integrations.transformers.model_reader", default=None
)
SET_PARAM = "set_param_for_module"

# The only use of converter copies in transformers: only the first copy for a parameter is used.
_USES_OF_COPIES = (
    "deepcopy(",
    "deepcopy(pattern_to_converter[source_pattern])",
    "param_name_to_load.setdefault(renamed_key, new_converter)",
)


@functools.lru_cache(maxsize=1)
def _uses_first_copies(function: Any) -> bool:
    """Whether a function uses copies as `_USES_OF_COPIES`. To find its source takes 8 ms."""
    text = inspect.getsource(function)
    return all(text.count(use) == 1 for use in _USES_OF_COPIES)


def _renaming_function(module: ModuleType) -> Any:
    return function_of(
        module, "rename_source_key", "source_key", "weight_renamings", "weight_converters"
    )


def _patch_renaming(module: ModuleType) -> Iterator[Replacement]:
    rename = _renaming_function(module)

    @functools.wraps(rename)
    def rename_source_key(
        key: str, renamings: Any, converters: Any, *rest: Any, **named: Any
    ) -> Any:
        reader = running.get()
        if reader is None or named.get("reverse"):
            return rename(key, renamings, converters, *rest, **named)
        prefix = rest[0] if rest else named.get("base_model_prefix")
        found = reader.plan.names.get((key, len(renamings), len(converters), prefix))
        if found is None:
            found = rename(key, renamings, converters, *rest, **named)
        reader.renamed = found[0]
        return found

    yield Replacement(module, "rename_source_key", rename_source_key)


def _patch_deepcopy(module: ModuleType) -> Iterator[Replacement]:
    original = function_of(module, "deepcopy")
    try:
        _renaming_function(module)  # its replacement records the parameter's name
    except Misfit as misfit:
        raise Misfit(f"rename_source_key does not fit: {misfit}") from misfit
    if not _uses_first_copies(inspect.unwrap(module.convert_and_load_state_dict_in_model)):
        raise Misfit("copies of converters are used in another way")

    def deepcopy(value: Any, *rest: Any) -> Any:
        reader = running.get()
        if reader is not None and hasattr(value, "collected_tensors"):
            if reader.renamed in reader.converted:
                return value  # transformers discards it: the parameter has its converter
            reader.converted.add(reader.renamed)
        return original(value, *rest)

    yield Replacement(module, "deepcopy", deepcopy)


def _patch_threads(module: ModuleType) -> Iterator[Replacement]:
    is_true = function_of(module, "is_env_variable_true", "env_variable", exact=True)

    @functools.wraps(is_true)
    def is_env_variable_true(env_variable: str) -> Any:
        reader = running.get()
        stock = is_true(env_variable)
        if reader is not None and env_variable == "HF_DEACTIVATE_ASYNC_LOAD":
            reader.replaces_threads = reader.plan.deferred and not stock
            return reader.plan.deferred or stock
        return stock

    yield Replacement(module, "is_env_variable_true", is_env_variable_true)


def _patch_set_param(module: ModuleType) -> Iterator[Replacement]:
    original = function_of(module, SET_PARAM, "model", "target_name")

    @functools.wraps(original)
    def set_param_for_module(model: Any, target_name: str, *rest: Any, **named: Any) -> Any:
        result = original(model, target_name, *rest, **named)
        if (reader := running.get()) is not None:
            cancellation.check()
            if (callbacks := module_callbacks.in_effect.get()) is not None:
                callbacks.parameter_set(model, target_name)
            else:  # a callback may write to what is loaded
                reader.ties.parameter_set(target_name)
        return result

    yield Replacement(module, SET_PARAM, set_param_for_module)


def outside_modes() -> AbstractContextManager[Any]:
    """Threads of transformers are in no mode of the caller: what they make can be trained and
    written to, also in the inference mode, and has memory, also in a FakeTensorMode."""
    import torch

    return without_modes() if in_dispatch_mode() else torch.inference_mode(False)


def _patch_materialize(module: ModuleType) -> Iterator[Replacement]:
    original = function_of(module, "_materialize_copy", "tensor", "device", "dtype", exact=True)

    @functools.wraps(original)
    def materialize_copy(tensor: Any, device: Any = None, dtype: Any = None) -> Any:
        # Not by `running`: transformers may call this from threads of its own.
        written = getattr(tensor, "written", None)
        reader = running.get()
        with outside_modes() if reader and reader.replaces_threads else nullcontext():
            found = None if written is None else written(device, dtype)
            return original(tensor, device, dtype) if found is None else found

    yield Replacement(module, "_materialize_copy", materialize_copy)


class _MergingTorch:
    """torch, with a `stack` and a `cat` that find merged parameters in memory."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def stack(self, tensors: Any, dim: int = 0, **named: Any) -> torch.Tensor:
        found = _merged(STACK, tensors, dim)
        return self._torch.stack(tensors, dim, **named) if found is None else found

    def cat(self, tensors: Any, dim: int = 0, **named: Any) -> torch.Tensor:
        found = _merged(CAT, tensors, dim)
        return self._torch.cat(tensors, dim, **named) if found is None else found


def _merged(function: str, tensors: Any, dim: int) -> torch.Tensor | None:
    reader = running.get()
    return None if reader is None else reader.buffers.merged(function, tensors, dim)


def _patch_torch(module: ModuleType) -> Iterator[Replacement]:
    yield Replacement(module, "torch", _MergingTorch(function_of(module, "torch")))


class _Pattern:
    """A regular expression that is compiled when it is first used."""

    __slots__ = ("_compiled", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._compiled: re.Pattern[str] | None = None

    def __getattr__(self, name: str) -> Any:
        if self._compiled is None:  # the cache of re has 512, and a load may use more in turn
            self._compiled = re.compile(self._text)
        return getattr(self._compiled, name)

    def __reduce__(self) -> Any:  # a copy is a plain one
        return re.compile, (self._text,)


def compile_patterns(model: Any) -> None:
    """Leaves plain patterns in what transformers keeps of a load in its model, for saving it."""
    for conversion in getattr(model, "_weight_conversions", None) or ():
        pattern = getattr(conversion, "compiled_sources", None)
        if isinstance(pattern, _Pattern):
            conversion.compiled_sources = copy(pattern)


class _CompilingRe:
    """re, with a `compile` that leaves the work to the use of the pattern."""

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)

    def compile(self, pattern: Any, flags: Any = 0) -> Any:
        later = isinstance(pattern, str) and not flags
        return _Pattern(pattern) if later else re.compile(pattern, flags)


def _patch_re(module: ModuleType) -> Iterator[Replacement]:
    if function_of(module, "re") is not re:
        raise Misfit("it is another module")
    yield Replacement(module, "re", _CompilingRe())


def _patch_warmup(module: ModuleType) -> Iterator[Replacement]:
    parameters = ("model", "expanded_device_map", "hf_quantizer")
    original = function_of(module, "caching_allocator_warmup", *parameters, exact=True)

    @functools.wraps(original)
    def caching_allocator_warmup(model: Any, expanded_device_map: Any, hf_quantizer: Any) -> Any:
        reader = running.get()
        if reader is not None and (in_memory := reader.parameters_in_memory()):
            expanded_device_map = {
                n: device for n, device in expanded_device_map.items() if n not in in_memory
            }
        return original(model, expanded_device_map, hf_quantizer)

    yield Replacement(module, "caching_allocator_warmup", caching_allocator_warmup)


def _patch_ties(module: ModuleType) -> Iterator[Replacement]:
    original = function_of(module, TIED_EQUAL, "source", "target", exact=True)

    @functools.wraps(original)
    def tied_params_are_equal(source: Any, target: Any) -> Any:
        return tied_equal(source, target) or original(source, target)

    yield Replacement(module, TIED_EQUAL, tied_params_are_equal)


LOADING_PATCHES = (
    Patch("deepcopy", _patch_deepcopy),
    Patch("rename_source_key", _patch_renaming),
    Patch("_materialize_copy", _patch_materialize),
    Patch(SET_PARAM, _patch_set_param),
    Patch("is_env_variable_true", _patch_threads),
    Patch("torch", _patch_torch),
    Patch("re", _patch_re),
)
MODELING_PATCHES = (
    Patch("caching_allocator_warmup", _patch_warmup),
    Patch(TIED_EQUAL, _patch_ties, optional=True),
)
