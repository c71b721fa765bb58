"""Where gdsload enters transformers, accelerate and diffusers, and how it leaves them.

    seam       `PreTrainedModel._load_pretrained_model` gets lazy slices in place of a state dict
    safe_open  `modeling_utils.safe_open` opens files whose tensors come from gdsload (4.57)
    stock      transformers reads by itself

The first that fits runs; which, and why, is in the report, and said once in the log where it is
not the first. The replaced names do nothing for callers outside of `accelerated`: other threads
and other loads go through them as if they were not there.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from gdsload.errors import BackendUnavailable, safetensors_errors
from gdsload.integrations.transformers import module_callbacks
from gdsload.integrations.transformers.lazy_slices import OpenedFile
from gdsload.integrations.transformers.model_reader import ModelReader, Options
from gdsload.integrations.transformers.monkeypatch import (
    Misfit,
    Patch,
    Patcher,
    Replacement,
    function_of,
    held,
)
from gdsload.integrations.transformers.patches import (
    PATCHES_OF_LOADING,
    SET_PARAM,
    replacements_of_warmup,
    running,
)
from gdsload.integrations.transformers.ties import COMPARE, replacements_of_ties
from gdsload.report import LoadReport
from gdsload.system.gc_control import collector_paused
from gdsload.system.lifecycle import fork_safe_lock

log = logging.getLogger("gdsload")

HOOK, SAFE_OPEN, STOCK = "hook", "safe_open", "stock"
_OLD_SHARD = "_load_state_dict_into_meta_model"
_DISTRIBUTED = "_load_and_finalize_distributed_pretrained_model"
_FRONT = ("model", "state_dict", "checkpoint_files")
Call = Callable[..., Any]
Opener = Callable[[str, Any], OpenedFile]

# What a `with accelerated()` around the caller says; the report that an enclosing from_pretrained
# wants filled; who opens files in place of safetensors.
chosen: ContextVar[Options | None] = ContextVar("gdsload.options", default=None)
outer_report: ContextVar[LoadReport | None] = ContextVar("gdsload.report", default=None)
_opener: ContextVar[Opener | None] = ContextVar("gdsload.opener", default=None)


class Installed:
    """What `install` chose for the whole process; None while it is not installed."""

    options: Options | None = None


installed = Installed()
_said: set[tuple[str, str]] = set()
_said_lock = fork_safe_lock(sys.modules[__name__], "_said_lock")
# Models of transformers 4.57 on their way, whose shards may be read in threads of its own.
_old_models: WeakKeyDictionary[Any, tuple[Options, LoadReport]] = WeakKeyDictionary()


def active() -> Options | None:
    """What the caller wants, or None where it wants none of this."""
    return chosen.get() or installed.options


def note(report: LoadReport, path: str, reason: str = "") -> None:
    """Writes into the report which way was taken, and what of transformers does not fit; the log
    hears of either once."""
    report.integration, report.integration_reason = path, reason
    report.refusals.update(
        (name, why) for name, why in swaps.misfits.items() if name.startswith("transformers.")
    )
    if path == HOOK:
        return
    with _said_lock:
        if (path, reason) in _said:
            return
        _said.add((path, reason))
    log.warning("%s: loaded by the path %r: %s", report.source, path, reason)


@contextmanager
def reported(source: str) -> Iterator[LoadReport]:
    """The report of the enclosing from_pretrained, or one for this load alone."""
    outer = outer_report.get()
    if outer is not None:
        yield outer
        return
    report = LoadReport(source)
    with report.whole():
        yield report


def refusal(state_dict: Any, files: Any, is_zero3: bool) -> str:
    """Why these weights are transformers' own business; empty where they are not."""
    if state_dict is not None:
        return "transformers had the weights already (gguf, an adapter, or state_dict=)"
    if not files:
        return "there are no checkpoint files"
    others = [str(file) for file in files if not str(file).endswith(".safetensors")]
    if others:
        return f"{others[0]} is not a .safetensors file: torch reads it"
    if is_zero3:
        return "DeepSpeed ZeRO-3 spreads the weights by itself"
    return ""


def _load(
    module: ModuleType, original: Call, model: Any, state_dict: Any, files: Any, config: Any,
    rest: tuple[Any, ...], named: dict[str, Any],
) -> Any:  # fmt: skip
    """`_load_pretrained_model` of transformers 5 for somebody who asked for gdsload."""

    def stock() -> Any:
        return original(model, state_dict, files, config, *rest, **named)

    options = active()
    if options is None or running.get() is not None:
        return stock()
    with (
        safetensors_errors(),
        reported(_title(config, files)) as report,
        ExitStack() as stack,
    ):
        is_zero3 = module.is_deepspeed_zero3_enabled() and not config.is_quantized
        reason = refusal(state_dict, files, is_zero3)
        if reason:
            note(report, STOCK, reason)
            return stock()
        if getattr(config, "disable_mmap", False) and options.cache == "auto":
            options = _unmapped(options)
        try:
            weights = stack.enter_context(ModelReader([str(f) for f in files], options, report))
            weights.foresee(model, config)
        except BackendUnavailable as error:
            if options.backend != "auto":
                raise
            note(report, STOCK, str(error))
            return stock()
        except Misfit as misfit:
            note(report, SAFE_OPEN, f"transformers' inner parts are not as expected: {misfit}")
            with _opening(options, report):
                return stock()
        note(report, HOOK)
        watcher = module_callbacks.current()
        if watcher is not None and f"{_LOADING}.{SET_PARAM}" not in swaps.misfits:
            watcher.begin(model, config)
        with held(running, weights), report.phase("transformers"), collector_paused():
            result = original(model, weights.slices(), files, config, *rest, **named)
        weights.finish()
        return result


def _title(config: Any, files: Any) -> str:
    name = getattr(config, "pretrained_model_name_or_path", None)
    return str(name or (files or ["?"])[0])


def _unmapped(options: Options) -> Options:
    from dataclasses import replace

    return replace(options, cache="buffered")


@contextmanager
def _opening(options: Options, report: LoadReport) -> Iterator[None]:
    """Files that are opened meanwhile in this context come from gdsload, and end with it."""
    with ExitStack() as stack:
        opened: list[ModelReader] = []

        def open_file(path: str, device: Any) -> OpenedFile:
            opened.append(stack.enter_context(ModelReader([path], options, report)))
            return opened[-1].opened(device)

        with held(_opener, open_file):
            yield
        for weights in opened:
            weights.finish()


def _load_old(
    module: ModuleType, original: Call, model: Any, state_dict: Any, files: Any, source: Any,
    rest: tuple[Any, ...], named: dict[str, Any],
) -> Any:  # fmt: skip
    """`_load_pretrained_model` of transformers 4.57: its shards are opened one after the other."""

    def stock() -> Any:
        return original(model, state_dict, files, source, *rest, **named)

    options = active()
    if options is None or model in _old_models:
        return stock()
    with safetensors_errors(), reported(str(source or (files or ["?"])[0])) as report:
        is_zero3 = module.is_deepspeed_zero3_enabled() and named.get("hf_quantizer") is None
        reason = refusal(state_dict, files, is_zero3)
        if reason:
            note(report, STOCK, reason)
            return stock()
        note(report, SAFE_OPEN, "transformers before 5.0 has no state dict of slices")
        _old_models[model] = options, report
        try:
            with report.phase("transformers"):
                return stock()
        finally:
            del _old_models[model]


def _load_old_shard(original: Call, model: Any, state_dict: Any, path: str, names: Any,
                    rest: tuple[Any, ...], named: dict[str, Any]) -> Any:  # fmt: skip
    """`_load_state_dict_into_meta_model` of 4.57: it knows what is wanted of a shard, in order."""
    known = _old_models.get(model)
    if known is None or not str(path).endswith(".safetensors"):
        return original(model, state_dict, path, names, *rest, **named)
    options, report = known
    with ModelReader([str(path)], options, report) as weights:
        mesh = named.get("device_mesh", rest[5] if len(rest) > 5 else None)
        # A rank of a mesh wants parts that are known only when it asks for them.
        weights.expect([] if mesh is not None else [names[key] for key in state_dict])
        with held(_opener, lambda _, device: weights.opened(device)):
            result = original(model, state_dict, path, names, *rest, **named)
        weights.finish()
        return result


_LOAD = "_load_pretrained_model"


def _swap_of_seam(module: ModuleType) -> Iterator[Replacement]:
    base = module.PreTrainedModel
    if _LOAD not in vars(base):
        raise Misfit("there is no such function")
    raw = vars(base)[_LOAD]
    plain = raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw
    front = tuple(inspect.signature(plain).parameters)
    bound = isinstance(raw, classmethod)
    front = front[1:] if bound else front
    roads = {"load_config": _load, "pretrained_model_name_or_path": _load_old}
    if front[:3] != _FRONT or len(front) < 4 or front[3] not in roads:
        raise Misfit(f"it takes ({', '.join(front)})")
    road, fourth = roads[front[3]], front[3]

    @functools.wraps(plain)
    def wrapper(*args: Any, **named: Any) -> Any:
        call = plain
        if bound:
            call, args = functools.partial(plain, args[0]), args[1:]
        model, state_dict, files, last = (
            args[place] if place < len(args) else named.pop(name)
            for place, name in enumerate((*_FRONT, fourth))
        )
        return road(module, call, model, state_dict, files, last, args[4:], named)

    replacement: Any = classmethod(wrapper) if bound else staticmethod(wrapper)
    yield Replacement(base, _LOAD, replacement)


def _swap_of_opening(module: ModuleType) -> Iterator[Replacement]:
    yield Replacement(module, "safe_open", _swapped_open(function_of(module, "safe_open")))


def _swap_of_old_shards(module: ModuleType) -> Iterator[Replacement]:
    front = ("model", "state_dict", "shard_file", "reverse_renaming_mapping")
    shard = function_of(module, _OLD_SHARD, *front)

    @functools.wraps(shard)
    def load_shard(model: Any, state_dict: Any, path: Any, names: Any, *rest: Any,
                   **named: Any) -> Any:  # fmt: skip
        return _load_old_shard(shard, model, state_dict, path, names, rest, named)

    yield Replacement(module, _OLD_SHARD, load_shard)


def _swap_of_distributed(module: ModuleType) -> Iterator[Replacement]:
    original = function_of(module.PreTrainedModel, _DISTRIBUTED)
    for home in module.PreTrainedModel.__mro__:
        if _DISTRIBUTED in vars(home):
            original = vars(home)[_DISTRIBUTED]
            yield Replacement(home, _DISTRIBUTED, _told(original))


def _told(original: Call) -> Call:
    """transformers' reading of a directory that torch.distributed.checkpoint wrote."""

    @functools.wraps(original)
    def load(model: Any, directory: Any, *rest: Any, **named: Any) -> Any:
        if active() is not None:
            with reported(str(directory)) as report:
                note(report, STOCK, "torch.distributed.checkpoint wrote it (DCP): torch reads it")
        return original(model, directory, *rest, **named)

    return load


def _swapped_open(original: Call) -> Call:
    @functools.wraps(original)
    def safe_open(filename: Any, framework: str = "pt", device: Any = "cpu", **rest: Any) -> Any:
        opener = _opener.get()
        options = active()
        if opener is not None:
            return opener(str(filename), device)
        misfit = swaps.misfits.get(f"{_MODELING}.{_LOAD}")
        if options is None or misfit is None:
            return original(filename, framework=framework, device=device, **rest)
        # No known way into this transformers but the files that it opens.
        with reported(str(filename)) as report:
            note(report, SAFE_OPEN, f"transformers' {_LOAD} is {misfit}")
            return ModelReader([str(filename)], options, report).opened(device, owned=True)

    return safe_open


def _dropped_in(name: str, drop_in: Callable[[Call], Call]) -> Patch:
    """A function of safetensors, or one that another package takes from there."""
    return Patch(
        name, lambda module: [Replacement(module, name, drop_in(function_of(module, name)))]
    )


def _drop_in_open(original: Call) -> Call:
    @functools.wraps(original)
    def safe_open(filename: Any, framework: str = "pt", device: Any = "cpu", **rest: Any) -> Any:
        reading = _reading(**rest)
        if reading is None or framework != "pt":
            return original(filename, framework=framework, device=device, **rest)
        from gdsload.api import safe_open as ours

        return ours(filename, framework, device, **reading)

    return safe_open


def _drop_in_load(original: Call) -> Call:
    @functools.wraps(original)
    def load_file(filename: Any, device: Any = "cpu", **rest: Any) -> Any:
        reading = _reading(**rest)
        if reading is None:
            return original(filename, device=device, **rest)
        from gdsload.api import load_file as ours

        return ours(filename, device, progress=False, **reading)

    return load_file


def _reading(backend: Any = "mmap", **unknown: Any) -> dict[str, Any] | None:
    """How our functions read for a caller of safetensors with this `backend` of safetensors; None
    where it is not for us. "mmap", its default, says nothing: its own functions pass it on."""
    options = active()
    if options is None or unknown or backend not in ("mmap", "pread"):
        return None
    cache = "buffered" if backend == "pread" and options.cache == "auto" else options.cache
    return {
        "backend": options.backend, "cache": cache, "options": options.options,
        "stall_seconds": options.stall_seconds,
    }  # fmt: skip


_MODELING, _LOADING = "transformers.modeling_utils", "transformers.core_model_loading"
swaps = Patcher(
    {
        _MODELING: (
            Patch(_LOAD, _swap_of_seam),
            Patch("safe_open", _swap_of_opening),
            Patch("caching_allocator_warmup", replacements_of_warmup),
            Patch(COMPARE, lambda module: replacements_of_ties(module, active), since=(5, 23)),
            Patch(_OLD_SHARD, _swap_of_old_shards, until=(5,)),
            Patch(_DISTRIBUTED, _swap_of_distributed, since=(5, 23)),
        ),
        _LOADING: PATCHES_OF_LOADING,
        "accelerate.utils.modeling": (
            _dropped_in("safe_open", _drop_in_open),
            _dropped_in("safe_load_file", _drop_in_load),
        ),
        # diffusers calls it by that name.
        "safetensors.torch": (_dropped_in("load_file", _drop_in_load),),
    }
)
