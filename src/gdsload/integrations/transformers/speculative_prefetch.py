"""The first layers, read while transformers still finds its classes and builds the empty model.

It takes 0.1 to 0.3 s before transformers comes to where weights are loaded. A prefetch of what is
almost certainly wanted first uses that time; the load adopts it, and what it does not is let go.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.checkpoint.locate import locate
from gdsload.dtypes import DTYPES
from gdsload.errors import GdsloadError
from gdsload.integrations.transformers.model_reader import Options
from gdsload.memory import page_cache
from gdsload.planning.layer_order import in_layers
from gdsload.readahead.prefetch import prefetch
from gdsload.report import LoadReport

# 0.2 s at 2.5 GB/s. It bounds what is read in vain where the guess is wrong.
HEAD_START_BYTES = 512 << 20
# Of what is cast or merged: memory that is not the model's costs as much as what it hides.
COPIED_BYTES = 128 << 20
# Below this the whole model is read in the time that a thread takes to start.
SMALL_BYTES = 256 << 20
_WHERE = ("cache_dir", "revision", "subfolder", "variant")
# With these the weights come from elsewhere, go elsewhere, or only parts of them are wanted.
_OTHERWISE = (
    "adapter_kwargs", "distributed_config", "gguf_file", "quantization_config", "state_dict",
    "tp_plan", "tp_size",
)  # fmt: skip


@contextmanager
def head_start(
    source: str | os.PathLike[str], options: Options, report: LoadReport, kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Reads ahead inside it, where that is likely to be right; the report counts it as read."""
    where = {word: kwargs[word] for word in _WHERE if kwargs.get(word) is not None}
    names = _first_names(source, options, kwargs, where)
    if not names:
        yield
        return
    with prefetch(
        source,
        names=names,
        backend=options.backend,
        cache=options.cache,
        options=options.options,
        stall_seconds=options.stall_seconds,
        strict=False,
        **where,
    ) as ahead:
        yield
    # The bytes took a road of their own; that they came early is not one.
    adopted = report.paths.pop("prefetched", 0) - ahead.progress().claimed_bytes
    if adopted > 0:
        report.paths["prefetched"] = adopted
    for road, size in ahead.report.paths.items():
        report.paths[road] = report.paths.get(road, 0) + size
    report.read_bytes += ahead.report.read_bytes
    report.requests += ahead.report.requests
    report.spans += [
        span._replace(track="head start") if span.track == "phases" else span
        for span in ahead.report.spans
    ]
    report.backend = report.backend or ahead.report.backend
    report.engine = report.engine or ahead.report.engine


def _first_names(
    source: str | os.PathLike[str],
    options: Options,
    kwargs: Mapping[str, Any],
    where: Mapping[str, Any],
) -> list[str]:
    """The tensors to begin with; none where transformers had better not be overtaken."""
    if (
        kwargs.get("device_map") not in (None, "cpu")
        or kwargs.get("use_safetensors") is False
        or any(kwargs.get(word) is not None for word in _OTHERWISE)
        or options.cache not in ("auto", "direct")
    ):
        return []
    try:
        # Headers are parsed only for files that there is something to read of.
        files = [shard.path for shard in locate(source, **where).shards]
        if sum(map(os.path.getsize, files)) < SMALL_BYTES or (
            options.cache == "auto" and any(map(_is_warm, files))
        ):
            return []
        with Checkpoint.of(files, strict=False) as checkpoint:
            infos = in_layers(checkpoint.tensors.values())
            copied = any(".experts." in info.name for info in infos) or _casts(infos, kwargs)
            left = COPIED_BYTES if copied else HEAD_START_BYTES
            names: list[str] = []
            for info in infos:
                if info.nbytes > left:
                    break
                names.append(info.name)
                left -= info.nbytes
            return names
    except (GdsloadError, OSError, TypeError):
        return []  # transformers will say what is wrong, or find other files


def _casts(infos: Sequence[TensorInfo], kwargs: Mapping[str, Any]) -> bool:
    """Whether the caller wants another dtype than most of these bytes have."""
    wanted = kwargs.get("dtype", kwargs.get("torch_dtype"))
    largest = max(infos, key=lambda info: info.nbytes, default=None)
    if wanted is None or wanted == "auto" or largest is None:
        return False
    return str(wanted).removeprefix("torch.") != DTYPES[largest.dtype].torch_name


def _is_warm(file: str) -> bool:
    """Whether a file is in the page cache: it will be mapped, or copied from there."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return page_cache.mostly_resident(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)
