"""Prefetches the weights while transformers imports its classes and builds the empty model.

That takes 0.1 s, and in a process that loads its first model several seconds, before transformers
requests the first weight. The load claims these bytes; the rest is released at its end. Weights
that will be cast or merged are not prefetched: until they are converted, they would need memory
beside the model's. Nothing is prefetched if the weights may not be wanted at all.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from gdsload.checkpoint import Checkpoint
from gdsload.checkpoint.locate import CheckpointFiles, locate
from gdsload.dtypes import DTYPES
from gdsload.errors import GdsloadError, StallError
from gdsload.integrations.transformers.model_reader import Options
from gdsload.integrations.transformers.monkeypatch import held
from gdsload.integrations.transformers.stand_ins import open_checkpoint, opened_for
from gdsload.loading import claims
from gdsload.memory import page_cache
from gdsload.readahead.prefetch import Prefetch, prefetch
from gdsload.remote.file import LOCAL_CACHE
from gdsload.remote.urls import shown_source
from gdsload.report import LoadReport
from gdsload.system.cancellation import LoadCancelled
from gdsload.system.parallel import in_thread, note_progress

# At 2 GB/s a smaller model is read in 0.1 s, which is about the time to build it.
LEAST_PREFETCH_BYTES = 256 << 20
_LOCATION = ("cache_dir", "revision", "subfolder", "variant")
# Arguments by which weights come from elsewhere, go elsewhere, or are wanted in part.
_UNKNOWN = (
    "adapter_kwargs",
    "distributed_config",
    "gguf_file",
    "load_in_4bit",
    "load_in_8bit",
    "quantization_config",
    "state_dict",
    "tp_plan",
    "tp_size",
)
# What the report of a load takes over as it is from that of its prefetch.
_MERGED = (
    *("paths", "pages", "read_bytes", "requests", "short_reads", "retries", "failovers"),
    *("depth", "backend", "engine", "choice", "filesystem", "rates", "refusals"),
)
# If both are set, ranks other than the first of a node load nothing.
_FSDP = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")


@contextmanager
def speculative_prefetch(
    source: str | os.PathLike[str],
    cls: Any,
    options: Options,
    report: LoadReport,
    kwargs: Mapping[str, Any],
) -> Iterator[None]:
    """Prefetches inside the `with`, and adds the reads to `report`.

    The load inside, of `cls.from_pretrained` with these keywords, uses the headers that were parsed
    here. `cls` is None if the checkpoint decides.
    """
    checkpoint = _open(source, options, kwargs)
    if checkpoint is None:
        yield
        return
    own = checkpoint is not open_checkpoint.get()
    with checkpoint if own else nullcontext(), held(open_checkpoint, checkpoint):
        reading = options.reading
        if _is_unfit(source, cls, checkpoint, kwargs):
            yield
            return
        reads = prefetch(
            checkpoint,
            backend=reading.backend,
            cache=reading.cache,
            page_cache=reading.page_cache,
            options=reading.options,
            stall_seconds=reading.stall_seconds,
        )
        try:
            with reads:
                yield
        finally:
            _add(report, reads)


def _add(report: LoadReport, reads: Prefetch) -> None:
    """Counts the reads of the prefetch in the report of the load that claimed them."""
    theirs = reads.report
    # The I/O path of these bytes is the prefetch's own; "prefetched" would count them twice.
    others = report.paths.pop("prefetched", 0) - reads.progress().claimed_bytes
    if others > 0:
        report.paths["prefetched"] = others
    report.merge(theirs, _MERGED)
    # Not all of its bytes from the local cache: the load has counted files that are wholly there.
    report.cached_bytes += theirs.paths.get(LOCAL_CACHE, 0)
    if theirs.failure:
        report.refusals["prefetch"] = theirs.failure
    report.spans += [
        span._replace(track="head start") if span.track == "phases" else span
        for span in theirs.spans
    ]
    # The prefetch looked before anything was read.
    if not report.page_cache or report.page_cache.startswith("filled: "):
        report.page_cache = theirs.page_cache or report.page_cache


def _open(
    source: str | os.PathLike[str], options: Options, kwargs: Mapping[str, Any]
) -> Checkpoint | None:
    """The checkpoint, if a prefetch is probably right, else None. That of a URL is open already."""
    if (
        kwargs.get("device_map") not in (None, "cpu")
        or kwargs.get("use_safetensors") is False
        or kwargs.get("disable_mmap")  # a prefetch maps the files
        or any(kwargs.get(word) is not None for word in _UNKNOWN)
        or options.reading.cache not in ("auto", "direct")
        or options.reading.verify != "size"  # that load maps nothing, and compares what it reads
        or options.group is not None  # the ranks share the reads
        or claims.offered()  # the caller's own prefetch
        or _goes_elsewhere()
    ):
        return None
    known = opened_for(source)
    if known is not None:
        return known if known.total_bytes >= LEAST_PREFETCH_BYTES else None
    location = {word: kwargs[word] for word in _LOCATION if kwargs.get(word) is not None}
    stall_seconds = options.reading.stall_seconds
    look = partial(_unread_files, source, location, skip_warm=options.reading.cache == "auto")
    try:
        # In a thread: storage that hangs cannot block Ctrl-C.
        files = in_thread(look, shown_source(os.fsdecode(source)), stall_seconds=stall_seconds)
        return Checkpoint.of(files, strict=False, stall_seconds=stall_seconds) if files else None
    except (LoadCancelled, StallError):  # transformers would wait for the storage without end
        raise
    except (GdsloadError, OSError, TypeError):
        return None  # transformers raises the error, or finds other files


def _unread_files(
    source: str | os.PathLike[str], location: Mapping[str, Any], *, skip_warm: bool
) -> list[str]:
    """The shards that transformers will load; [] if they are too small for a prefetch, or if
    `skip_warm` and one is in the page cache."""
    found = locate(source, **location)
    files = [shard.path for shard in found.shards]
    if not _is_loaded(found):
        return []
    nbytes = 0
    for file in files:
        nbytes += os.path.getsize(file)
        note_progress()
    if nbytes < LEAST_PREFETCH_BYTES:
        return []
    for file in files if skip_warm else ():
        if _is_warm(file):
            return []
        note_progress()
    return files


def _is_loaded(found: CheckpointFiles) -> bool:
    """Whether these are the files that transformers will load: named as it names them, and not
    those of a model beside whose adapter they lie."""
    folder, name = os.path.split(found.index_path or found.shards[0].path)
    adapter = os.path.join(folder, "adapter_config.json")
    return name.partition(".")[0] == "model" and not os.path.lexists(adapter)


def _goes_elsewhere() -> bool:
    """Whether torch, DeepSpeed or FSDP are set to bring parameters to another device or process."""
    if all(
        os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y", "t") for name in _FSDP
    ):
        return True
    # Another thread may be importing these modules.
    device = getattr(sys.modules.get("torch"), "get_default_device", None)
    deepspeed = sys.modules.get("transformers.integrations.deepspeed")
    is_zero3 = getattr(deepspeed, "is_deepspeed_zero3_enabled", None)
    return (device is not None and device().type != "cpu") or (is_zero3 is not None and is_zero3())


def _wants_all(cls: Any, config: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a class probably uses all tensors of a checkpoint, unlike an encoder alone, or a
    model with fewer layers. `config` is that of the checkpoint, `wanted` that of the load."""
    numbers = {word: number for word, number in config.items() if type(number) is int}
    if any(type(n := wanted.get(word)) is int and n != numbers[word] for word in numbers):
        return False
    if cls is None or cls.__name__ == "AutoModel" or cls.__name__ in (config.get("auto_map") or ()):
        return True
    # The names of an automatic class by the type of the model, without the imports of the models.
    classes = getattr(getattr(cls, "_model_mapping", None), "_model_mapping", None)
    if classes is None:
        names: Any = [base.__name__ for base in cls.__mro__]
    else:
        names = classes.get(config.get("model_type"), ())
        names = [names] if isinstance(names, str) else names
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(name in architectures for name in names)


def _is_unfit(
    source: str | os.PathLike[str], cls: Any, checkpoint: Checkpoint, kwargs: Mapping[str, Any]
) -> bool:
    """Whether experts will probably be merged, tensors cast, quantized ones moved to a GPU, other
    files read, or a part left out."""
    infos = checkpoint.tensors.values()
    if any(".experts." in info.name for info in infos):
        return True
    in_file = _config_in_file(source, checkpoint, kwargs)
    given: Any = kwargs.get("config")
    config = given.to_dict() if hasattr(given, "to_dict") else in_file
    if not _wants_all(cls, in_file, {**config, **kwargs}):
        return True
    if config.get("transformers_weights"):  # their name
        return True
    if any(
        each.get("quantization_config")
        for each in (config, config.get("text_config"))
        if isinstance(each, dict)
    ):
        return True
    largest = max(infos, key=lambda info: info.nbytes, default=None)
    wanted = _wanted_dtype(config, kwargs)
    return largest is not None and wanted not in (None, DTYPES[largest.dtype].torch_name)


def _config_in_file(
    source: str | os.PathLike[str], checkpoint: Checkpoint, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The config in the directory of the checkpoint; {} if it cannot be read."""
    if os.path.isdir(source):  # also one that stands for a URL
        directory = os.path.join(source, kwargs.get("subfolder") or "")
    else:
        directory = os.path.dirname(checkpoint.shards[0].path)
    try:
        with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}  # transformers raises the error
    return found if isinstance(found, dict) else {}


def _wanted_dtype(config: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str | None:
    """The dtype of the model, by torch's name; None: as the checkpoint has it."""
    given = _dtype_in(kwargs)
    if given is None and not _keeps_dtypes():
        return "float32"
    wanted = _dtype_in(config) if given in (None, "auto") else given
    return None if wanted is None else str(wanted).removeprefix("torch.")


def _dtype_in(words: Mapping[str, Any]) -> Any:
    """The dtype in keywords or in a config, by its new name or its old one."""
    dtype = words.get("dtype")
    return words.get("torch_dtype") if dtype is None else dtype


def _keeps_dtypes() -> bool:
    """Whether transformers keeps the dtypes of a checkpoint unless it is told otherwise: from 5.0
    on. Before, models are float32."""
    module = sys.modules.get("transformers")
    version = getattr(module, "__version__", "")
    if not version:
        from importlib import metadata  # which transformers imports as well

        try:
            version = metadata.version("transformers")
        except metadata.PackageNotFoundError:
            return True  # the import fails
    return int(version.partition(".")[0]) >= 5


def _is_warm(file: str) -> bool:
    """Whether most of a file is in the page cache: it will be mapped, or copied from there."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return page_cache.mostly_resident(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)
