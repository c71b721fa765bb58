"""transformers models through gdsload: one line swapped, or none.

`from_pretrained` stands where a class's own does; `accelerated` is for code that cannot be
changed, and `install` for whole processes. Everything but the reading stays with transformers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gdsload.errors import CheckpointError
from gdsload.integrations.transformers import hooks
from gdsload.integrations.transformers.model_reader import Options
from gdsload.integrations.transformers.module_callbacks import ModuleCallbacks, current
from gdsload.integrations.transformers.monkeypatch import held
from gdsload.integrations.transformers.readahead_queue import AHEAD_BYTES, WINDOW_BYTES
from gdsload.integrations.transformers.speculative_prefetch import speculative_prefetch
from gdsload.loading.session import CACHES, STALL_SECONDS
from gdsload.report import LoadReport
from gdsload.system import cancellation
from gdsload.system.lifecycle import fork_safe_lock

# What a config is found by; the rest of from_pretrained's keywords is for the model.
_CONFIG_WORDS = (
    "cache_dir", "code_revision", "force_download", "gguf_file", "local_files_only", "proxies",
    "revision", "subfolder", "token", "trust_remote_code",
)  # fmt: skip
_lock = fork_safe_lock(sys.modules[__name__])


def from_pretrained(
    source: str | os.PathLike[str],
    *args: Any,
    cls: Any = None,
    backend: str = "auto",
    on_module_ready: Callable[[str, Any], object] | None = None,
    **kwargs: Any,
) -> Any:
    """`cls.from_pretrained(source, *args, **kwargs)`, with the weights read by gdsload.

    `cls` is any class of transformers with a `from_pretrained`, an Auto class included; None takes
    the architecture that the config names. What comes back is what transformers gives: the same
    keys, bytes, buffers and ties. `gdsload.last_report()` says which way was taken (`path`).

    `on_module_ready(name, module)` is called for every module, once, as soon as all parameters and
    buffers in it have their final bytes, inner modules before outer ones, in transformers' order of
    loading; by the thread that called this, so that loading goes on when it returns. What is not
    final before the end (tied weights, buffers that no checkpoint holds; everything where there is
    a quantizer, an adapter or offloading, or where transformers reads by itself) is told of then:
    `last_report().modules_ready` says so. An exception in it ends the load and comes out of here.

    Raises what transformers raises; CheckpointError, ReadError, PlacementError and FileChanged for
    the weights, BackendUnavailable for a `backend` that was asked for by name. No model escapes.
    """
    inherited = hooks.active() or Options()
    if backend != "auto":
        inherited = replace(inherited, backend=backend)
    report = LoadReport(str(source))
    callbacks = (
        None if on_module_ready is None else ModuleCallbacks(on_module_ready, source, report)
    )
    with (
        report.whole(),
        held(current, callbacks),
        _entered(inherited),
        speculative_prefetch(source, inherited, report, kwargs),
    ):
        if cls is None:
            with report.phase("architecture"):
                cls = architecture(source, **kwargs)
            cancellation.check()
        with held(hooks.outer_report, report), report.phase("from_pretrained"):
            model = cls.from_pretrained(source, *args, **kwargs)
        if not report.integration:
            hooks.note(report, hooks.STOCK, "transformers did not come to where weights are loaded")
        if callbacks is not None:
            callbacks.finish(model)
        return model


def architecture(source: str | os.PathLike[str], **kwargs: Any) -> Any:
    """The class that a checkpoint's config names; an Auto class where it names none of
    transformers' own.

    Raises CheckpointError where it names none at all, and what transformers raises for a config
    that cannot be found.
    """
    import transformers

    config = kwargs.get("config")
    if not isinstance(config, transformers.PretrainedConfig):
        words = {name: kwargs[name] for name in _CONFIG_WORDS if name in kwargs}
        try:
            config = transformers.AutoConfig.from_pretrained(config or source, **words)
        except (OSError, ValueError):
            # An adapter has no config of its own: the Auto classes find its base model.
            if not os.path.exists(os.path.join(str(source), "adapter_config.json")):
                raise
            return transformers.AutoModelForCausalLM
    mapped = getattr(config, "auto_map", None) or {}
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
        for auto, home in mapped.items():
            where = home[0] if isinstance(home, (list, tuple)) else home
            if str(where).rpartition(".")[2] == name and hasattr(transformers, auto):
                return getattr(transformers, auto)
    for auto in ("AutoModelForCausalLM", "AutoModel"):
        if auto in mapped:
            return getattr(transformers, auto)
    if kwargs.get("gguf_file") is not None:  # names its kind of model, and no class
        return transformers.AutoModelForCausalLM
    raise CheckpointError(
        f"{source}: its config names no architecture of transformers"
        f" ({getattr(config, 'architectures', None)}); pass cls="
    )


@contextmanager
def accelerated(
    *,
    backend: str = "auto",
    cache: str = "auto",
    options: Mapping[str, Any] | None = None,
    stall_seconds: float = STALL_SECONDS,
    window_bytes: int = WINDOW_BYTES,
    ahead_bytes: int = AHEAD_BYTES,
) -> Iterator[None]:
    """Within it, this thread's `from_pretrained` calls (and accelerate's and diffusers' loading of
    safetensors files) read by gdsload. Others are not touched; nothing stays behind.

    `backend`, `cache`, `options` and `stall_seconds` are those of `gdsload.load_file`. Tensors that
    are converted or cast are read `ahead_bytes` ahead of transformers at most, in windows of
    `window_bytes`.
    """
    wanted = _options(backend, cache, options, stall_seconds, window_bytes, ahead_bytes)
    with _entered(wanted):
        yield


def install(
    *,
    backend: str = "auto",
    cache: str = "auto",
    options: Mapping[str, Any] | None = None,
    stall_seconds: float = STALL_SECONDS,
    window_bytes: int = WINDOW_BYTES,
    ahead_bytes: int = AHEAD_BYTES,
) -> None:
    """`accelerated` for the whole process, all threads, until `uninstall`. A second call changes
    the options. Imports neither torch nor transformers."""
    wanted = _options(backend, cache, options, stall_seconds, window_bytes, ahead_bytes)
    with _lock:
        try:
            hooks.patcher.enter("install")
            hooks.installed.options = wanted
        except BaseException:
            hooks.installed.options = None
            hooks.patcher.leave("install")
            raise


def uninstall() -> None:
    """Undoes `install`; without one it does nothing."""
    with _lock:
        hooks.installed.options = None
        hooks.patcher.leave("install")


def _options(
    backend: str, cache: str, options: Mapping[str, Any] | None, stall_seconds: float,
    window_bytes: int, ahead_bytes: int,
) -> Options:  # fmt: skip
    if cache not in CACHES:
        raise ValueError(f"cache={cache!r} is none of {', '.join(CACHES)}")
    if window_bytes < 1 or ahead_bytes < 1:
        raise ValueError("window_bytes and ahead_bytes are at least 1")
    return Options(
        backend, cache, dict(options or {}), stall_seconds, window_bytes, ahead_bytes
    )  # fmt: skip


@contextmanager
def _entered(options: Options) -> Iterator[None]:
    user = object()
    try:
        hooks.patcher.enter(user)
        with held(hooks.chosen, options):
            yield
    finally:
        hooks.patcher.leave(user)
