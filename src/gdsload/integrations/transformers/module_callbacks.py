"""Modules that are told of as soon as their weights are final, while the rest is still read.

    set_param_for_module ──► arrived(name) ──► a module's last tensor ──► callback(name, module)

A module is ready when every parameter and buffer of it, and of all modules in it, has the bytes it
will have in the finished model. What transformers only settles at its end (tied weights, buffers
that no checkpoint holds, weights that it lacks) is waited for until then, and so is everything
where something may still exchange what was loaded: a quantizer, an adapter, offloading.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from gdsload.report import LoadReport
from gdsload.system import cancellation

if TYPE_CHECKING:
    from torch.nn import Module

AS_THEY_CAME = "as they came"


class ModuleCallbacks:
    """Tells a callback of each module of one model, once, inner ones before outer ones."""

    def __init__(
        self, callback: Callable[[str, Any], object], source: str | os.PathLike[str],
        report: LoadReport,
    ) -> None:  # fmt: skip
        """Raises TypeError for what cannot be called."""
        if not callable(callback):
            raise TypeError(f"on_module_ready={callback!r} cannot be called")
        self._callback = callback
        # The callback sees the caller's variables, not those of the load it is called from: a load
        # that it starts is a load of its own.
        self._context = copy_context()
        self._source = os.fspath(source)
        self._report = report
        report.modules_ready = "at the end: no road that tells of each parameter was taken"
        self._model: Any = None
        self._names: dict[int, str] = {}
        self._waits: dict[int, set[str]] = {}  # of each module: its own tensors that are to come
        self._above: dict[int, list[Module]] = {}  # each module and what it is in
        self._left: dict[int, int] = {}  # tensors to come, in each module and below
        self._told: dict[int, Module] = {}

    def begin(self, model: Any, load_config: Any) -> None:
        """To be called before the first parameter is set."""
        held = self._held(load_config)
        self._report.modules_ready = f"at the end: {held}" if held else AS_THEY_CAME
        if held:
            return
        self._model = model
        _climb(model, (), self._above)
        for name, module in model.named_modules():
            own = (*module._parameters.items(), *module._buffers.items())
            self._names[id(module)] = name
            self._waits[id(module)] = {word for word, tensor in own if tensor is not None}
            for above in self._above[id(module)]:
                self._left[id(above)] = self._left.get(id(above), 0) + len(self._waits[id(module)])
        # A tied weight may be loaded, and replaced by the other one at the end: it is not final.
        for name in getattr(model, "all_tied_weights_keys", None) or ():
            path, _, own_name = name.rpartition(".")
            self._waits.get(id(model.get_submodule(path)), set()).discard(own_name)

    def _held(self, load_config: Any) -> str:
        """Why nothing is final before the end; empty where it is."""
        devices = {str(place) for place in (load_config.device_map or {}).values()}
        if load_config.hf_quantizer is not None:
            return "a quantizer may exchange modules"
        if len(devices) > 1 or "disk" in devices:
            return "weights are moved between devices"
        named = getattr(load_config, "pretrained_model_name_or_path", None)
        if named is not None and str(named) != self._source:
            return "an adapter may exchange modules"
        return ""

    def arrived(self, model: Any, name: str) -> None:
        """A parameter or buffer was set. Raises what the callback raises."""
        if model is not self._model:
            return
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        waits = self._waits.get(id(module), set())
        tensor = module._parameters.get(own, module._buffers.get(own))
        if own not in waits or tensor is None or tensor.is_meta:
            return  # of another shape than the model's: it will be made anew
        waits.discard(own)
        for above in self._above[id(module)]:
            self._left[id(above)] -= 1
            if not self._left[id(above)]:
                self._tell(above)

    def finish(self, model: Any) -> None:
        """Tells of all that is left of the finished model."""
        model = model[0] if isinstance(model, tuple) else model
        if not hasattr(model, "named_modules"):
            return
        self._names = {id(module): name for name, module in model.named_modules()}
        self._tell(model)

    def _tell(self, module: Module) -> None:
        if id(module) in self._told:
            return
        for child in module.children():
            self._tell(child)
        self._told[id(module)] = module
        cancellation.check()
        self._context.run(self._callback, self._names[id(module)], module)


def _climb(module: Module, above: tuple[Module, ...], known: dict[int, list[Module]]) -> None:
    chain = known.setdefault(id(module), [])
    chain += [one for one in (module, *above) if not any(one is other for other in chain)]
    for child in module.children():
        _climb(child, (module, *above), known)


_current: ContextVar[ModuleCallbacks | None] = ContextVar(
    "gdsload.integrations.transformers.module_callbacks", default=None
)


@contextmanager
def watching(watcher: ModuleCallbacks | None) -> Iterator[None]:
    """Within it, a model that is loaded in this context is told of by `watcher`."""
    token = _current.set(watcher)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> ModuleCallbacks | None:
    """Who is to be told in this context."""
    return _current.get()
