"""Prefetches the first layers while transformers finds its classes and builds the empty model.

That takes 0.1 to 0.3 s before transformers requests the first weight. The load claims these
bytes; the rest is released at its end. Nothing is prefetched if the weights may not be wanted as
they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.checkpoint.locate import locate
from gdsload.dtypes import DTYPES
from gdsload.errors import GdsloadError
from gdsload.integrations.transformers.model_reader import Options
from gdsload.integrations.transformers.monkeypatch import held
from gdsload.integrations.transformers.stand_ins import opened_before
from gdsload.loading.page_cache_fill import ONLY_WAITING
from gdsload.memory import page_cache
from gdsload.memory.host_buffers import current_pool
from gdsload.planning.layer_order import in_layers
from gdsload.readahead.prefetch import Prefetch, prefetch
from gdsload.report import LoadReport

# 0.2 s at 2.5 GB/s. Bounds the bytes that are read in vain.
LIMIT_BYTES = 512 << 20
# For tensors that are cast or merged: they need memory beside the model's, whose page faults cost
# as much time as the prefetch saves.
CONVERTED_LIMIT_BYTES = 128 << 20
# A smaller model is read in the time that a thread takes to start.
SMALL_BYTES = 256 << 20
_LOCATION = ("cache_dir", "revision", "subfolder", "variant")
# Arguments by which weights come from elsewhere, go elsewhere, or are wanted in part.
_UNKNOWN = (
    "adapter_kwargs",
    "distributed_config",
    "gguf_file",
    "quantization_config",
    "state_dict",
    "tp_plan",
    "tp_size",
)


@contextmanager
def speculative_prefetch(
    source: str | os.PathLike[str], options: Options, report: LoadReport, kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Prefetches inside the `with`, and adds the reads to `report`.

    The load inside uses the headers that were parsed here.
    """
    checkpoint = _open(source, options, kwargs)
    if checkpoint is None:
        yield
        return
    own = checkpoint is not opened_before.get()
    with checkpoint if own else nullcontext(), held(opened_before, checkpoint):
        reading = options.reading
        if reading.verify != "size" and current_pool() is not None:
            yield  # no byte enters the pool before it was compared
            return
        with prefetch(
            checkpoint,
            names=_first_names(checkpoint, kwargs),
            backend=reading.backend,
            cache=reading.cache,
            page_cache=reading.page_cache,
            options=reading.options,
            stall_seconds=reading.stall_seconds,
        ) as reads:
            yield
        _add(report, reads)


def _add(report: LoadReport, reads: Prefetch) -> None:
    """Counts the reads of the prefetch in the report of the load that claimed them."""
    # The I/O path of these bytes is the prefetch's own; "prefetched" would count them twice.
    others = report.paths.pop("prefetched", 0) - reads.progress().claimed_bytes
    if others > 0:
        report.paths["prefetched"] = others
    for path, nbytes in reads.report.paths.items():
        report.paths[path] = report.paths.get(path, 0) + nbytes
    report.read_bytes += reads.report.read_bytes
    report.requests += reads.report.requests
    report.spans += [
        span._replace(track="head start") if span.track == "phases" else span
        for span in reads.report.spans
    ]
    # The prefetch looked before anything was read.
    if not report.page_cache.startswith(("not ", ONLY_WAITING)):
        report.page_cache = reads.report.page_cache or report.page_cache
    report.backend = report.backend or reads.report.backend
    report.engine = report.engine or reads.report.engine


def _open(
    source: str | os.PathLike[str], options: Options, kwargs: Mapping[str, Any]
) -> Checkpoint | None:
    """The checkpoint, if a prefetch of its first layers is probably right, else None. That of a
    URL is open already."""
    if (
        kwargs.get("device_map") not in (None, "cpu")
        or kwargs.get("use_safetensors") is False
        or any(kwargs.get(word) is not None for word in _UNKNOWN)
        or options.reading.cache not in ("auto", "direct")
        or options.group is not None  # the ranks share the reads
    ):
        return None
    known = opened_before.get()
    if known is not None:
        return known if known.total_bytes >= SMALL_BYTES else None
    location = {word: kwargs[word] for word in _LOCATION if kwargs.get(word) is not None}
    try:
        files = [shard.path for shard in locate(source, **location).shards]
        if sum(map(os.path.getsize, files)) < SMALL_BYTES or (
            options.reading.cache == "auto" and any(map(_is_warm, files))
        ):
            return None
        return Checkpoint.of(files, strict=False, stall_seconds=options.reading.stall_seconds)
    except (GdsloadError, OSError, TypeError):
        return None  # transformers raises the error, or finds other files


def _first_names(checkpoint: Checkpoint, kwargs: Mapping[str, Any]) -> list[str]:
    """The tensors of the first layers, up to the limit."""
    infos = in_layers(checkpoint.tensors.values())
    converted = any(".experts." in info.name for info in infos) or _casts(infos, kwargs)
    left = CONVERTED_LIMIT_BYTES if converted else LIMIT_BYTES
    names: list[str] = []
    for info in infos:
        if info.nbytes > left:
            break
        names.append(info.name)
        left -= info.nbytes
    return names


def _casts(infos: Sequence[TensorInfo], kwargs: Mapping[str, Any]) -> bool:
    """Whether the caller wants another dtype than the largest tensor has."""
    wanted = kwargs.get("dtype", kwargs.get("torch_dtype"))
    largest = max(infos, key=lambda info: info.nbytes, default=None)
    if wanted is None or wanted == "auto" or largest is None:
        return False
    return str(wanted).removeprefix("torch.") != DTYPES[largest.dtype].torch_name


def _is_warm(file: str) -> bool:
    """Whether most of a file is in the page cache: it will be mapped, or copied from there."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return page_cache.mostly_resident(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)
