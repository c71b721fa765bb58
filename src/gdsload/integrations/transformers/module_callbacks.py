"""Calls `on_module_ready` for each module whose weights are final, while the rest is still read.

    set_param_for_module ──► parameter_set(name) ──► last tensor of a module ──► callback

A module is ready when every parameter and buffer in it and below it has the bytes that it will have
in the finished model. Tensors that transformers settles only at the end (tied weights, buffers and
weights that the checkpoint lacks) delay their modules until then. So does everything that may
replace loaded modules or write to them: a quantizer, an adapter, offloading, a `tie_weights` of the
model's own class.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from gdsload.integrations.transformers.adapters import is_loaded_with
from gdsload.report import LoadReport
from gdsload.system import cancellation

if TYPE_CHECKING:
    from torch.nn import Module

AS_THEY_CAME = "as they came"


def has_own_ties(model: Any) -> bool:
    """Whether code of its class runs when transformers ties weights, at the end of a load. It may
    write to any of them: speech models read the adapter of their `target_lang` there."""
    from transformers import PreTrainedModel

    return type(model).tie_weights is not PreTrainedModel.tie_weights


class ModuleCallbacks:
    """Calls a callback once for each module of one model, inner modules before outer ones."""

    def __init__(
        self, callback: Callable[[str, Any], object], source: Any, report: LoadReport
    ) -> None:
        """Raises TypeError if `callback` is not callable."""
        if not callable(callback):
            raise TypeError(
                f"on_module_ready={callback!r} must be a function of a name and a module"
            )
        self._callback = callback
        # The callback sees the context variables of the caller: a load that it starts is
        # independent of this one.
        self._context = copy_context()
        self.source = os.fspath(source)  # what transformers is given
        self.words: Mapping[str, Any] = {}  # and its keywords
        self._report = report
        report.modules_ready = (
            "at the end: transformers does not report each parameter on this path"
        )
        self._model: Any = None
        self._names: dict[Module, str] = {}
        # By module and its own tensor: all modules that contain the tensor, until it is final.
        self._waiting: dict[tuple[Module, str], list[Module]] = {}
        self._left: Counter[Module] = Counter()  # by module: tensors in it that are not final
        self._called: set[Module] = set()

    def begin(self, model: Any, load_config: Any) -> None:
        """To be called before the first parameter is set."""
        reason = self._why_at_the_end(model, load_config)
        self._report.modules_ready = f"at the end: {reason}" if reason else AS_THEY_CAME
        if reason:
            return
        self._model = model
        self._names = {module: name for name, module in model.named_modules()}
        for outer in model.modules():
            for inner in outer.modules():
                for own, tensor in (*inner._parameters.items(), *inner._buffers.items()):
                    if tensor is not None:
                        self._waiting.setdefault((inner, own), []).append(outer)
                        self._left[outer] += 1
        # A tied weight may be loaded, and replaced by the other one at the end.
        for name in getattr(model, "all_tied_weights_keys", None) or ():
            path, _, own = name.rpartition(".")
            self._waiting.pop((model.get_submodule(path), own), None)

    def _why_at_the_end(self, model: Any, load_config: Any) -> str:
        """Why nothing is final before the end; "" if parameters are."""
        devices = {str(device) for device in (load_config.device_map or {}).values()}
        if load_config.hf_quantizer is not None:
            return "a quantizer may exchange modules"
        if len(devices) > 1 or "disk" in devices:
            return "weights are moved between devices"
        named = getattr(load_config, "pretrained_model_name_or_path", None)
        is_base = named is not None and str(named) != self.source
        is_adapter = getattr(model, "_hf_peft_config_loaded", False)
        if is_base or is_adapter or is_loaded_with(self.source, self.words):
            return "an adapter may exchange modules"
        if has_own_ties(model):
            return f"{type(model).__name__}.tie_weights may write to modules"
        return ""

    def parameter_set(self, model: Any, name: str) -> None:
        """Notes a parameter or buffer as final. Raises any exception of the callback."""
        if model is not self._model:
            return
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        tensor = module._parameters.get(own, module._buffers.get(own))
        if tensor is None or tensor.is_meta:
            return  # its shape differs from the model's: transformers will initialise it
        for outer in self._waiting.pop((module, own), ()):
            self._left[outer] -= 1
            if not self._left[outer]:
                outer.eval()  # as transformers does with the finished model
                self._call(outer)

    def finish(self, model: Any) -> None:
        """Calls the callback for all remaining modules of the finished model."""
        model = model[0] if isinstance(model, tuple) else model
        if not hasattr(model, "named_modules"):
            return
        self._names = {module: name for name, module in model.named_modules()}
        self._call(model)

    def _call(self, module: Module) -> None:
        if module in self._called:
            return
        for child in module.children():
            self._call(child)
        self._called.add(module)
        cancellation.check()
        self._context.run(self._callback, self._names[module], module)


# The callbacks for a model that is loaded in this context.
in_effect: ContextVar[ModuleCallbacks | None] = ContextVar(
    "gdsload.integrations.transformers.module_callbacks", default=None
)
