"""Entry points of gdsload in transformers, and the options and the report of their loads.

    hook       `PreTrainedModel._load_pretrained_model` gets lazy slices instead of a state dict
    safe_open  `modeling_utils.safe_open` opens files read by gdsload (transformers 4.57)
    stock      transformers reads by itself
    load_file  other libraries call functions of safetensors (`other_libraries`)

The first one that fits is used. The report says which; for `safe_open` and `stock` it says why,
and so does the log, once. Callers that did not ask for gdsload (other threads, other loads) get the
originals. Not responsible for the replacements inside a load (`patches`).

What one load tells the functions of transformers that it calls is in context variables:

    variable                     has                              set by
    `chosen`                     the options                      `accelerated`, `from_pretrained`
    `outer_report`               the report that a load writes to `from_pretrained`
    `report.enclosing`           the report that it is added to   `accelerated`, `from_pretrained`
    `_opener`                    what opens files                 the entry point safe_open
    `_old_load`                  options and report               the load of transformers 4.57
    `_failures`                  errors of loads inside           `transformers.pipeline`
    `patches.running`            the `ModelReader`                the entry point hook
    `module_callbacks.in_effect` the callbacks for modules        `from_pretrained`
    `stand_ins._in_effect`       URLs by stand-in                 `stand_in`
    `stand_ins.open_checkpoint`  a checkpoint that is open        `stand_in`, `speculative_prefetch`
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from types import ModuleType
from typing import Any

from gdsload.errors import BackendUnavailable, GdsloadError, safetensors_errors
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
    LOADING_PATCHES,
    MODELING_PATCHES,
    SET_PARAM,
    compile_patterns,
    outside_modes,
    running,
)
from gdsload.integrations.transformers.stand_ins import (
    original as original_of,
    rename,
    require_no_extra_files,
    stand_in,
)
from gdsload.remote.urls import is_url, shown_source
from gdsload.report import LoadReport
from gdsload.system.gc_control import collector_eased
from gdsload.system.lifecycle import fork_safe_lock

log = logging.getLogger("gdsload")

HOOK, SAFE_OPEN, STOCK, LOAD_FILE = "hook", "safe_open", "stock", "load_file"
_MODELING, _LOADING = "transformers.modeling_utils", "transformers.core_model_loading"
_LOAD = "_load_pretrained_model"
_LOAD_PARAMETERS = ("model", "state_dict", "checkpoint_files")
_SOURCE = "pretrained_model_name_or_path"
_OLD_SHARD = "_load_state_dict_into_meta_model"
_DISTRIBUTED = "_load_and_finalize_distributed_pretrained_model"
Call = Callable[..., Any]

chosen: ContextVar[Options | None] = ContextVar("gdsload.options", default=None)
outer_report: ContextVar[LoadReport | None] = ContextVar("gdsload.report", default=None)
_opener: ContextVar[Callable[[str, Any], OpenedFile] | None] = ContextVar(
    "gdsload.opener", default=None
)
_old_load: ContextVar[tuple[Options, LoadReport] | None] = ContextVar(
    "gdsload.old_load", default=None
)
_failures: ContextVar[list[GdsloadError] | None] = ContextVar("gdsload.failures", default=None)


class Installed:
    """The options that `install` set for the whole process; None if not installed."""

    options: Options | None = None


installed = Installed()
_logged: set[tuple[str, str]] = set()
_logged_lock = fork_safe_lock(sys.modules[__name__], "_logged_lock")


def active() -> Options | None:
    """The options of the caller's context; None if it did not ask for gdsload."""
    return chosen.get() or installed.options


def note(report: LoadReport, path: str, reason: str = "") -> None:
    """Writes the entry point and all misfits to the report; logs each once.

    Of several models in one report, such as a model and its adapter, one that has a reason counts.
    """
    if path not in (HOOK, LOAD_FILE) or report.integration not in (STOCK, SAFE_OPEN):
        report.integration, report.integration_reason = path, reason
    report.refusals.update(patcher.misfits)
    with _logged_lock:
        if path in (HOOK, LOAD_FILE) or (path, reason) in _logged:
            return
        _logged.add((path, reason))
    reader = "gdsload does not read the weights" if path == STOCK else f"entry point {path!r}"
    log.warning("%s: %s: %s", report.source, reader, reason)


def unmapped(options: Options) -> Options:
    """The options for a caller that wants no file mapped."""
    maps = options.reading.cache in ("auto", "mapped")
    return options.with_reading(cache="buffered") if maps else options


@contextmanager
def reported(source: str) -> Iterator[LoadReport]:
    """The report of the enclosing gdsload.from_pretrained, or a new one for this load alone."""
    outer = outer_report.get()
    if outer is not None:
        yield outer
        return
    options = active()
    report = LoadReport(source, on_event=None if options is None else options.reading.on_event)
    with report.whole():
        yield report


def refusal(state_dict: Any, files: Any, is_zero3: bool) -> str:
    """Why transformers has to load these weights by itself; "" if gdsload can."""
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
    load: Call, model: Any, files: list[str], config: Any, options: Options, report: LoadReport
) -> Any:
    """`_load_pretrained_model` of transformers 5; `load(state_dict)` calls the original."""
    # transformers maps no file of hf-mount, which may hang in page faults.
    on_hf_mount = getattr(sys.modules[_MODELING], "_is_on_hf_mount", lambda _: False)
    folders = {os.path.dirname(os.path.realpath(file)) for file in files}  # it reads all mounts
    if getattr(config, "disable_mmap", False) or any(map(on_hf_mount, folders)):
        options = unmapped(options)
    try:
        with ExitStack() as stack:
            # transformers looks for files that a class has beside its checkpoint; not at a URL.
            extra_files = getattr(type(model.config), "extra_files", ())
            reader = stack.enter_context(ModelReader(files, options, report, extra_files))
            with outside_modes():  # what it makes is written to outside of them
                reader.start(model, config)
            stack.pop_all()
    except BackendUnavailable as error:
        if options.reading.backend != "auto" or original_of(files[0]) != files[0]:
            raise
        note(report, STOCK, str(error))
        return load(None)
    except Misfit as misfit:
        # transformers would not find them.
        require_no_extra_files(files, extra_files, options.reading.stall_seconds)
        note(report, SAFE_OPEN, f"transformers' inner parts are not as expected: {misfit}")
        with _opening(options, report):
            return load(None)
    with reader, reader.checkpoint.locating_errors():
        note(report, HOOK)
        callbacks = module_callbacks.in_effect.get()
        if callbacks is not None and f"{_LOADING}.{SET_PARAM}" not in patcher.misfits:
            callbacks.begin(model, config)
        with held(running, reader), report.phase("transformers"), collector_eased():
            result = load(reader.slices())
        compile_patterns(model)
        reader.finish()
        return result


@contextmanager
def _opening(options: Options, report: LoadReport) -> Iterator[None]:
    """Inside, gdsload opens the files of this context; they are closed at the end."""
    with ExitStack() as stack:
        readers: list[ModelReader] = []

        def open_file(path: str, device: Any) -> OpenedFile:
            reader = stack.enter_context(ModelReader([path], options, report))
            stack.enter_context(reader.checkpoint.locating_errors())
            readers.append(reader)
            return reader.opened(device)

        with held(_opener, open_file):
            yield
        for reader in readers:
            reader.finish()


def _load_old(
    load: Call, model: Any, files: list[str], config: Any, options: Options, report: LoadReport
) -> Any:
    """`_load_pretrained_model` of transformers 4.57, which opens one shard after the other."""
    note(report, SAFE_OPEN, "transformers before 5.0 has no state dict of slices")
    with held(_old_load, (options, report)), report.phase("transformers"):
        return load(None)


def _patch_load(module: ModuleType) -> Iterator[Replacement]:
    base = module.PreTrainedModel
    function_of(base, _LOAD)
    function_of(module, "is_deepspeed_zero3_enabled")
    raw = vars(base)[_LOAD]
    kind = classmethod if isinstance(raw, classmethod) else staticmethod
    plain = getattr(raw, "__func__", raw)
    signature = inspect.signature(plain)
    parameters = tuple(signature.parameters)
    first_four = parameters[kind is classmethod :][:4]
    loads = {"load_config": _load, _SOURCE: _load_old}
    if first_four[:3] != _LOAD_PARAMETERS or not loads.keys() & set(first_four[3:]):
        raise Misfit(f"it takes ({', '.join(parameters)})")
    load = loads[first_four[3]]

    @functools.wraps(plain)
    def wrapper(*args: Any, **named: Any) -> Any:
        options = active()
        if options is None or running.get() is not None or _old_load.get() is not None:
            return plain(*args, **named)
        call = signature.bind(*args, **named)

        def original(state_dict: Any) -> Any:
            call.arguments["state_dict"] = state_dict
            return plain(*call.args, **call.kwargs)

        model, state_dict, files, config = (call.arguments[name] for name in first_four)
        # transformers 4.57 has a name and a quantizer where later ones have them in a config.
        title, quantizer = config, call.arguments.get("hf_quantizer")
        if load is _load:
            title = getattr(config, _SOURCE, None)
            quantizer = getattr(config, "hf_quantizer", None)
        title = shown_source(original_of(title or (files or ["?"])[0]))
        with _remembered(), safetensors_errors(), reported(str(title)) as report:
            is_zero3 = module.is_deepspeed_zero3_enabled() and quantizer is None
            reason = refusal(state_dict, files, is_zero3)
            if reason:
                note(report, STOCK, reason)
                return original(state_dict)
            paths = [str(file) for file in files]
            with patcher.used():  # to its end, also if the user of gdsload leaves meanwhile
                return load(original, model, paths, config, options, report)

    yield Replacement(base, _LOAD, kind(wrapper))


@contextmanager
def _remembered() -> Iterator[None]:
    """Remembers an error for `transformers.pipeline`, and raises an earlier one again."""
    failures = _failures.get()
    if failures:
        raise failures[0]
    try:
        yield
    except GdsloadError as error:
        if failures is not None:
            failures.append(error)
        raise


def _in_pipeline(function: str) -> Patch:
    """Ends a pipeline with the first error of a load. transformers would try the load again in
    float32, and other classes after that, as if the model were the reason."""

    def replacements(module: ModuleType) -> Iterator[Replacement]:
        original = function_of(module, function)

        @functools.wraps(original)
        def load_model(*args: Any, **named: Any) -> Any:
            failures: list[GdsloadError] = []
            try:
                with held(_failures, failures):
                    return original(*args, **named)
            except ValueError:
                if failures:
                    raise failures.pop() from None  # a list with it would keep its frames alive
                raise

        yield Replacement(module, function, load_model)

    return Patch(function, replacements, optional=True)


def _patch_old_shard(module: ModuleType) -> Iterator[Replacement]:
    parameters = ("model", "state_dict", "shard_file", "reverse_renaming_mapping")
    original = function_of(module, _OLD_SHARD, *parameters)
    expanded = function_of(module, "expand_device_map", "device_map", "param_names", exact=True)

    @functools.wraps(original)
    def load_shard(
        model: Any, state_dict: Any, path: Any, names: Any, *rest: Any, **named: Any
    ) -> Any:
        known = _old_load.get()
        if known is None or not str(path).endswith(".safetensors"):
            return original(model, state_dict, path, names, *rest, **named)
        options, report = known
        with (
            ModelReader([str(path)], options, report) as reader,
            reader.checkpoint.locating_errors(),
        ):
            device_map = named.get("device_map", rest[0] if rest else None) or {}
            mesh = named.get("device_mesh", rest[5] if len(rest) > 5 else None)
            # It takes what it leaves on disk, too, and drops it.
            placed = expanded(device_map, state_dict)
            on_disk = {names[key] for key, device in placed.items() if device == "disk"}
            # A rank of a mesh needs parts that are known only when it asks for them.
            wanted = [] if mesh is not None else [names[key] for key in state_dict]
            reader.start_in_order([name for name in wanted if name not in on_disk], on_disk)
            with held(_opener, lambda _, device: reader.opened(device)):
                result = original(model, state_dict, path, names, *rest, **named)
            reader.finish()
            return result

    yield Replacement(module, _OLD_SHARD, load_shard)


def _patch_distributed(module: ModuleType) -> Iterator[Replacement]:
    """Reports that torch.distributed.checkpoint reads the directories that it wrote."""
    original = function_of(module.PreTrainedModel, _DISTRIBUTED)
    owner = next(cls for cls in module.PreTrainedModel.__mro__ if _DISTRIBUTED in vars(cls))

    @functools.wraps(original)
    def load(model: Any, directory: Any, *rest: Any, **named: Any) -> Any:
        if active() is not None:
            with reported(str(directory)) as report:
                note(report, STOCK, "torch.distributed.checkpoint wrote it (DCP): torch reads it")
        return original(model, directory, *rest, **named)

    yield Replacement(owner, _DISTRIBUTED, load)


def _patch_mtp(module: ModuleType) -> Iterator[Replacement]:
    """Reports that the layers for `generate(use_mtp=True)` are read by transformers."""
    cls = function_of(module, "MtpModel")
    plain = function_of(cls, "from_pretrained", "main_model").__func__

    @functools.wraps(plain)
    def from_pretrained(cls: Any, main_model: Any, *rest: Any, **named: Any) -> Any:
        if active() is not None:
            with reported(shown_source(main_model.config.name_or_path)) as report:
                note(report, STOCK, "MtpModel opens the files of its main model by itself")
        return plain(cls, main_model, *rest, **named)

    yield Replacement(cls, "from_pretrained", classmethod(from_pretrained))


def _from_url(owner: str) -> Patch:
    """Accepts URLs in the `from_pretrained` of a class, and in copies of it in its subclasses."""
    function = "from_pretrained"

    def replacements(module: ModuleType) -> Iterator[Replacement]:
        cls = function_of(module, owner)
        raw = vars(cls).get(function)
        if not isinstance(raw, classmethod):
            raise Misfit("it is no class method")
        code = raw.__func__.__code__
        yield Replacement(cls, function, taking_urls(raw))
        for each in cls.__subclasses__():
            own = vars(each).get(function)
            if isinstance(own, classmethod) and own.__func__.__code__ is code:
                yield Replacement(each, function, taking_urls(own))

    def taking_urls(raw: Any) -> Any:
        plain = raw.__func__

        @functools.wraps(plain)
        def from_pretrained(cls: Any, *args: Any, **words: Any) -> Any:
            url: Any = args[0] if args else words.get(_SOURCE)
            if active() is None or not is_url(url):
                return plain(cls, *args, **words)
            with safetensors_errors(), stand_in(url, words) as top:
                words.pop(_SOURCE, None)
                loaded = plain(cls, top, *args[1:], **words)
                rename(loaded, top, url)
                return loaded

        return classmethod(from_pretrained)

    return Patch(f"{owner}.{function}", replacements)


def _patch_open(module: ModuleType) -> Iterator[Replacement]:
    original = function_of(module, "safe_open")

    @functools.wraps(original)
    def safe_open(filename: Any, framework: str = "pt", device: Any = "cpu", **rest: Any) -> Any:
        opener = _opener.get()
        options = active()
        if opener is not None:
            return opener(str(filename), device)
        misfit = patcher.misfits.get(f"{_MODELING}.{_LOAD}")
        stands_in = original_of(filename) != filename
        if options is None or (misfit is None and not stands_in):
            return original(filename, framework=framework, device=device, **rest)
        # The files that it opens are the only entry point left in this transformers.
        with ExitStack() as stack:
            report = stack.enter_context(reported(str(shown_source(original_of(filename)))))
            if misfit is not None:
                note(report, SAFE_OPEN, f"transformers' {_LOAD} is {misfit}")
            reader = stack.enter_context(ModelReader([str(filename)], options, report))
            leave = stack.pop_all()
            leave.callback(reader.finish)
            return reader.opened(device, leave.close)

    yield Replacement(module, "safe_open", safe_open)


class _ThreadPool(ThreadPoolExecutor):
    """Its threads have the context variables of the caller: `accelerated` applies to them."""

    def submit(self, *call: Any, **named: Any) -> Any:
        return super().submit(copy_context().run, *call, **named)


def _patch_thread_pool(module: ModuleType) -> Iterator[Replacement]:
    name = "ThreadPoolExecutor"
    if function_of(module, name) is not ThreadPoolExecutor:
        raise Misfit("it is not the one of the standard library")
    yield Replacement(module, name, _ThreadPool)


THREAD_POOL = Patch("ThreadPoolExecutor", _patch_thread_pool, optional=True)
patcher = Patcher(
    {
        _MODELING: (
            Patch(_LOAD, _patch_load),
            _from_url("PreTrainedModel"),
            Patch("safe_open", _patch_open),
            *MODELING_PATCHES,
            Patch(_OLD_SHARD, _patch_old_shard, optional=True),  # before transformers 5
            THREAD_POOL,  # before transformers 5
            Patch(_DISTRIBUTED, _patch_distributed, optional=True),  # since transformers 5.23
        ),
        _LOADING: LOADING_PATCHES,
        "transformers.pipelines": (
            _in_pipeline("load_model"),
            _in_pipeline("infer_framework_load_model"),  # before transformers 5
        ),
        # Not auto_factory: the classes that modeling_auto defines copy the functions of their base.
        "transformers.models.auto.modeling_auto": (_from_url("_BaseAutoModelClass"),),
        "transformers.modeling_layers": (
            Patch("MtpModel", _patch_mtp, optional=True),  # since transformers 5.14
        ),
        # It reads the metadata of files, also of stand-ins.
        "transformers.quantizers.quantizer_torchao": (
            Patch("safe_open", _patch_open, optional=True),
        ),
    }
)
