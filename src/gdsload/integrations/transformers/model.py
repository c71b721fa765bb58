"""transformers models through gdsload.

`from_pretrained` replaces the call of a class's own `from_pretrained`; `accelerated` is for code
that cannot be changed, and `install` for whole processes. Not responsible for building models:
transformers does everything but the reading.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdsload.backends import registry
from gdsload.distribution.reader_group import require_readers
from gdsload.errors import CheckpointError, extra_hint, safetensors_errors
from gdsload.integrations import other_libraries
from gdsload.integrations.transformers import hooks
from gdsload.integrations.transformers.adapters import adapter_config_of
from gdsload.integrations.transformers.model_reader import Options
from gdsload.integrations.transformers.module_callbacks import ModuleCallbacks, in_effect
from gdsload.integrations.transformers.monkeypatch import held
from gdsload.integrations.transformers.speculative_prefetch import speculative_prefetch
from gdsload.integrations.transformers.stand_ins import rename, stand_in
from gdsload.loading.settings import ReadSettings
from gdsload.remote.urls import is_url, shown_source
from gdsload.report import LoadReport, enclosing
from gdsload.system import cancellation
from gdsload.system.lifecycle import fork_safe_lock
from gdsload.system.stall import STALL_SECONDS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from gdsload.events import OnEvent

# Keywords of from_pretrained by which a config is found; the others are for the model.
_CONFIG_WORDS = (
    "cache_dir", "code_revision", "force_download", "gguf_file", "local_files_only", "proxies",
    "revision", "subfolder", "token", "trust_remote_code",
)  # fmt: skip
_lock = fork_safe_lock(sys.modules[__name__])
hooks.patcher.add(other_libraries.PATCHES)


@safetensors_errors()
def from_pretrained(
    source: str | os.PathLike[str],
    *args: Any,
    cls: Any = None,
    backend: str = "auto",
    page_cache: str = "auto",
    group: ProcessGroup | None = None,
    readers: str = "node",
    stall_seconds: float = STALL_SECONDS,
    verify: str | os.PathLike[str] = "size",
    on_module_ready: Callable[[str, Any], object] | None = None,
    on_event: OnEvent | None = None,
    **kwargs: Any,
) -> Any:
    """`cls.from_pretrained(source, *args, **kwargs)`, with the weights read by gdsload.

    The result is the model that transformers would return: the same keys, bytes, buffers and ties.
    `gdsload.last_report().integration` says through which entry point of transformers it was read.

    Args:
        source: A directory or a hub id, as for transformers; or the URL of a directory in an object
            store, as for `load_file`. Its config and other small files are copied to a temporary
            directory, its weights are not.
        *args: Passed to `cls.from_pretrained`.
        cls: A class of transformers with a `from_pretrained`, such as an Auto class; None for the
            architecture that the config names, for an adapter that of its base model.
        backend: "auto" or the name of a backend. For a class of transformers without weights, such
            as a processor of images, also one of its own.
        page_cache: As for `load_file`; but with "auto", tensors that are cast or merged fill the
            page cache only while copying them waits for the storage.
        group: A group of torch.distributed whose ranks load this model together: each of them reads
            a share, and they exchange the bytes that each needs: all, or with tensor parallelism
            its parts. All its ranks make the same call. None: this process reads alone.
        readers: As for `load_file`.
        stall_seconds: As for `load_file`.
        verify: As for `load_file`. If transformers reads by itself, nothing is compared:
            `last_report().verified_bytes` is 0.
        on_module_ready: Called as `on_module_ready(name, module)` once for every module, as soon as
            all parameters and buffers in it are final: inner modules before outer ones, in the
            order in which transformers loads, by the calling thread, so that loading continues
            when it returns. Modules that are final only at the end follow then: those with tied
            weights or buffers that the checkpoint lacks, and all modules if there is a quantizer,
            an adapter or offloading, if the class has its own `tie_weights`, or if transformers
            reads by itself.
            `last_report().modules_ready` says which. An exception in it ends the load and is
            raised.
        on_event: As for `load_file`.
        **kwargs: Passed to `cls.from_pretrained`.

    Returns:
        What `cls.from_pretrained` returns: a model, or a tuple with `output_loading_info=True`.

    Raises:
        CheckpointError, ReadError, PlacementError, FileChanged: The weights cannot be loaded.
        IntegrityError: Weights differ from their checksums.
        BackendUnavailable: A backend that was asked for by name does not work here.
        RankError: Another rank of `group` has failed, has ended, or does not answer.
        ValueError: An unknown `readers`, `page_cache` or `verify`, or `group` with `verify`.
        Exception: Any exception of transformers.

    Example:
        model = gdsload.from_pretrained("model", dtype="bfloat16")
    """
    # With a state_dict= transformers needs no source. Else it would ask a hub for "None".
    if not isinstance(source, (str, os.PathLike)) and kwargs.get("state_dict") is None:
        raise TypeError(f"source must be a str or an os.PathLike, not {type(source).__name__}")
    require_readers(readers)
    if backend != "auto" and _means_its_own(backend, cls):
        kwargs["backend"], backend = backend, "auto"
    given = {
        "backend": backend, "page_cache": page_cache, "stall_seconds": stall_seconds,
        "verify": verify, "on_event": on_event,
    }  # fmt: skip
    defaults = ReadSettings().keywords()
    changes = {name: value for name, value in given.items() if value != defaults[name]}
    inherited = (hooks.active() or Options()).with_reading(**changes)
    if group is not None:
        inherited = replace(inherited, group=group, readers=readers)
    report = LoadReport(shown_source(str(source)), on_event=inherited.reading.on_event)
    callbacks = (
        None if on_module_ready is None else ModuleCallbacks(on_module_ready, report.source, report)
    )
    with (
        report.whole(),
        held(in_effect, callbacks),
        _entered(inherited),
        _path_of(source, report, kwargs, weights=_may_have_weights(cls)) as path,
        speculative_prefetch(path, cls, inherited, report, kwargs)
        if _is_of_models(cls)
        else nullcontext(),
    ):
        if callbacks is not None:
            callbacks.source = str(path)
            callbacks.words = kwargs
        if cls is None:
            with report.phase("import transformers"):  # which takes nearly all of it
                cls = architecture(path, **kwargs)
            if not hasattr(cls, "_model_mapping"):
                kwargs.pop("code_revision", None)  # only Auto classes know it
            cancellation.check()
        with (
            held(hooks.outer_report, report),
            held(enclosing, report),
            report.phase("from_pretrained"),
        ):
            try:
                model = cls.from_pretrained(path, *args, **kwargs)
            except TypeError as error:
                word = str(error).rpartition("unexpected keyword argument ")[2].strip("'")
                if word not in ("cache", "options") or word not in kwargs:
                    raise
                how = f"with gdsload.accelerated({word}=...): gdsload.from_pretrained(...)"
                raise TypeError(f"from_pretrained has no keyword {word!r}: {how}") from error
        if path is not source:
            rename(model, str(path), str(source))
        if not report.integration and report.tensors:
            hooks.note(report, hooks.LOAD_FILE)
        elif not report.integration and _is_of_models(cls):
            hooks.note(report, hooks.STOCK, "transformers did not call its function for weights")
        if callbacks is not None:
            callbacks.finish(model)
        return model


def _means_its_own(backend: str, cls: Any) -> bool:
    """Whether the backend is that of a class without weights, such as transformers' processors of
    images, and none of gdsload."""
    if _may_have_weights(cls):
        return False
    return backend not in registry.REMOTE and backend not in registry.discover()[0]


def _is_of_models(cls: Any) -> bool:
    """Whether a class has weights to load, unlike those of tokenizers and configurations."""
    names = "_load_pretrained_model", "_model_mapping"
    return cls is None or any(hasattr(cls, name) for name in names)


def _may_have_weights(cls: Any) -> bool:
    """Whether a class is not one of transformers' that have none, such as those of tokenizers."""
    return _is_of_models(cls) or not any(
        base.__module__.startswith("transformers.") for base in getattr(cls, "__mro__", ())
    )


@contextmanager
def _path_of(
    source: str | os.PathLike[str], report: LoadReport, words: Mapping[str, Any], *, weights: bool
) -> Iterator[str | os.PathLike[str]]:
    """The source, or for a URL the directory that stands for it."""
    with ExitStack() as stack:
        if is_url(source):
            with report.phase("open"):
                source = stack.enter_context(stand_in(str(source), words, weights=weights))
        yield source


def architecture(source: str | os.PathLike[str], **kwargs: Any) -> Any:
    """The class that a checkpoint's config names; an Auto class if transformers has no such class.

    For an adapter without a config, the class that the config of its base model names.

    Args:
        source: A directory or a hub id.
        **kwargs: The keywords of `from_pretrained`; those that find a config are used.

    Raises:
        CheckpointError: The config names no class, or `source` is a single file.
        OSError, ValueError: transformers finds no config.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        hint = f"from_pretrained needs transformers: {extra_hint('transformers')}"
        raise ImportError(hint, name=error.name) from error

    config = kwargs.get("config")
    if not isinstance(config, transformers.PretrainedConfig):
        source, config = _config_of(source, config, kwargs)
    if config is None:
        return transformers.AutoModelForCausalLM
    cls = _class_named_by(config, kwargs)
    if cls is None:
        raise CheckpointError(
            f"{source}: its config names no architecture of transformers"
            f" ({getattr(config, 'architectures', None)}); pass cls="
        )
    return cls


def _config_of(
    source: str | os.PathLike[str], config: Any, kwargs: Mapping[str, Any]
) -> tuple[str | os.PathLike[str], Any]:
    """The config of a source, or the one at the path `config`, and whose it is. For an adapter
    those of its base model; None if it names none."""
    from transformers import AutoConfig

    words = {name: kwargs[name] for name in _CONFIG_WORDS if name in kwargs}
    try:
        return source, AutoConfig.from_pretrained(config or source, **words)
    except (OSError, ValueError):
        if os.path.isfile(source) and config is None:
            raise CheckpointError(
                f"{source}: this is a file, and from_pretrained needs the directory with its"
                " config.json (load_file takes one file)",
                path=str(source),
            ) from None
        # An adapter has no config of its own. transformers finds that of its base model by the
        # same keywords.
        found = adapter_config_of(source, kwargs)
        if found is None:
            raise
        try:
            base = json.loads(Path(found).read_bytes()).get("base_model_name_or_path")
        except (AttributeError, ValueError) as error:
            reason = f"{found}: this is no JSON object"
            raise CheckpointError(reason, path=found) from error
        if base is None:
            return source, None
        return base, AutoConfig.from_pretrained(base, **words)


def _class_named_by(config: Any, kwargs: Mapping[str, Any]) -> Any:
    """The class of transformers that a config names, or the Auto class that finds it; None if it
    names none."""
    import transformers

    mapped = getattr(config, "auto_map", None) or {}
    names = getattr(config, "architectures", None) or ()
    for name in (names,) if isinstance(names, str) else names:
        found = getattr(transformers, name, None)
        for auto, home in mapped.items():
            where = home[0] if isinstance(home, (list, tuple)) else home
            named = str(where).rpartition(".")[2] == name and hasattr(transformers, auto)
            # With trust_remote_code the checkpoint's own code comes first, as for Auto classes.
            if named and (found is None or kwargs.get("trust_remote_code")):
                return getattr(transformers, auto)
        if found is not None:
            return found
    for auto in ("AutoModelForCausalLM", "AutoModel"):
        if auto in mapped:
            return getattr(transformers, auto)
    if kwargs.get("gguf_file") is not None:  # names its kind of model, and no class
        return transformers.AutoModelForCausalLM
    return None


@contextmanager
def accelerated(
    *,
    backend: str = "auto",
    cache: str = "auto",
    page_cache: str = "auto",
    options: Mapping[str, Any] | None = None,
    stall_seconds: float = STALL_SECONDS,
    verify: str | os.PathLike[str] = "size",
    on_event: OnEvent | None = None,
) -> Iterator[LoadReport]:
    """Inside the `with`, `from_pretrained` calls of this thread read by gdsload.

    So do the functions of accelerate, diffusers and peft that read safetensors files. Classes of
    models, and their Auto classes, take URLs as well, as for `from_pretrained`. Other threads are
    not affected, and nothing stays replaced afterwards. Yields a report with the sums of all loads
    inside it; `last_report` is that of the last one.

    Args:
        backend: "auto" or the name of a backend. Where other libraries than transformers load to
            the CPU, one that cannot read there is "auto".
        cache: "auto", "direct", "buffered" or "mapped", as for `gdsload.load_file`.
        page_cache: "auto", "keep", "drop" or "fill", as for `gdsload.load_file`.
        options: Options of the backend, by name.
        stall_seconds: A load ends in StallError if no byte arrives for this many seconds.
        verify: As for `gdsload.load_file`.
        on_event: As for `gdsload.load_file`, for each load inside.

    Raises:
        ValueError: An unknown `cache`, `page_cache` or `verify`.
        BackendUnavailable: No backend has this name.

    Example:
        with gdsload.accelerated() as report:
            model = AutoModelForCausalLM.from_pretrained("model")
        print(report.summary())
    """
    reading = ReadSettings(backend, cache, page_cache, options, stall_seconds, verify, on_event)
    wanted = Options(reading)
    report = LoadReport("accelerated")
    with _entered(wanted), held(enclosing, report):
        yield report


def install(
    *,
    backend: str = "auto",
    cache: str = "auto",
    page_cache: str = "auto",
    options: Mapping[str, Any] | None = None,
    stall_seconds: float = STALL_SECONDS,
    verify: str | os.PathLike[str] = "size",
    on_event: OnEvent | None = None,
) -> None:
    """`accelerated` for all threads of the process, until `uninstall`.

    A second call changes the options. Imports neither torch nor transformers.

    Args:
        backend: "auto" or the name of a backend. Where other libraries than transformers load to
            the CPU, one that cannot read there is "auto".
        cache: "auto", "direct", "buffered" or "mapped", as for `gdsload.load_file`.
        page_cache: As for `gdsload.load_file`.
        options: Options of the backend, by name.
        stall_seconds: A load ends in StallError if no byte arrives for this many seconds.
        verify: As for `gdsload.load_file`.
        on_event: As for `gdsload.load_file`, for each load.

    Raises:
        ValueError: An unknown `cache`, `page_cache` or `verify`.
        BackendUnavailable: No backend has this name.

    Example:
        gdsload.install()
        model = AutoModelForCausalLM.from_pretrained("model")
        gdsload.uninstall()
    """
    reading = ReadSettings(backend, cache, page_cache, options, stall_seconds, verify, on_event)
    wanted = Options(reading)
    with _lock:
        try:
            hooks.patcher.enter("install")
            hooks.installed.options = wanted
        except BaseException:
            hooks.installed.options = None
            hooks.patcher.leave("install")
            raise


def uninstall() -> None:
    """Undoes `install`. Does nothing if gdsload is not installed."""
    with _lock:
        hooks.installed.options = None
        try:
            hooks.patcher.leave("install")
        except BaseException:  # Ctrl-C, perhaps before its first step
            hooks.patcher.leave("install")
            raise


@contextmanager
def _entered(options: Options) -> Iterator[None]:
    with hooks.patcher.used(), held(hooks.chosen, options):
        yield
