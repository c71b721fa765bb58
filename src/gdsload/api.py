"""Whole checkpoints, single tensors and streams of them: the face for callers without a model.

`load_file` and `safe_open` stand where safetensors' own do; `stream` hands tensors out while the
next ones are read, in memory that does not grow with the model.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gdsload._native import system
from gdsload.backends import registry
from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.errors import CheckpointError, also_safetensors, safetensors_errors
from gdsload.loading import device_batch
from gdsload.loading.batch import Batch
from gdsload.loading.session import CACHES, STALL_SECONDS, Session
from gdsload.planning.grouping import grouped
from gdsload.planning.layer_order import in_layers
from gdsload.planning.read_plan import (
    DEFAULT_BLOCK_BYTES,
    GAP_BYTES,
    Limits,
    ReadPlan,
    byte_ranges_of,
    plan_reads,
)
from gdsload.planning.tensor_slices import rows_of
from gdsload.report import LoadReport
from gdsload.system.device_name import require_device
from gdsload.system.lifecycle import fork_safe_lock

if TYPE_CHECKING:
    import torch

Source = str | os.PathLike[str]

# What a stream reads ahead, twice: one window is handed out while the next is on its way.
WINDOW_BYTES = 256 << 20
_BAR_DELAY_SECONDS = 0.5


@safetensors_errors()
def load_file(
    filename: Source,
    device: str | int | torch.device | None = "cpu",
    *,
    backend: str = "auto",
    names: Iterable[str] | None = None,
    cache: str = "auto",
    options: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    stall_seconds: float = STALL_SECONDS,
    **where: Any,
) -> dict[str, torch.Tensor]:
    """Loads a .safetensors file, a directory, or a model in the local hub cache.

    Returns the tensors by name, in the order of the files or of `names`, bit for bit what
    `safetensors.torch.load_file` gives. They share no memory with each other; they keep their own
    alive. On the CPU a file that is wholly in the page cache is mapped, privately and lazily; what
    is not is read into place by direct I/O.

    `backend` is "auto" or a name (with `options` for it, such as {"engine": "threads"}); `cache`
    is "auto", "direct" (never through the page cache), "buffered" (always) or "mapped".
    safetensors' own backends are taken for the latter two: "mmap" for "mapped", "pread" for
    "buffered".
    `progress` shows a bar on stderr (None: if that is a terminal). `where` is passed to
    `Checkpoint.open`: revision, subfolder, variant, cache_dir, strict, header_limit.

    Raises CheckpointError for a source that is not what it should be, PlacementError where memory
    is too small, BackendUnavailable, ReadError (with path, offset, wanted, got), FileChanged when
    a file was touched meanwhile. No tensor is handed out in any of these cases. All of them are
    safetensors.SafetensorError as well, but for files that are not there or may not be read, which
    are FileNotFoundError and PermissionError.
    """
    backend, cache = _without_safetensors_backend(backend, cache)
    target = require_device(device)
    report = LoadReport(os.fspath(filename), device=target)
    with report.whole(), ExitStack() as stack:
        with report.phase("open"):
            checkpoint = stack.enter_context(Checkpoint.open(filename, **where))
            infos = checkpoint.infos(names)
        _count(report, infos)
        session = stack.enter_context(
            device_batch.session_for(
                checkpoint,
                report,
                target,
                backend,
                report.wanted_bytes,
                cache=cache,
                options=options,
                stall_seconds=stall_seconds,
            )
        )
        bar = stack.enter_context(_Bar(progress, report.wanted_bytes))
        if session.device != "cpu":
            return device_batch.load(session, infos, bar.moved)
        if target != "cpu":
            return dict(_windows(session, infos, WINDOW_BYTES, target, bar))
        batch = device_batch.start(session, infos)
        stack.callback(batch.release)
        with report.phase("import torch"):  # while the reads are on their way
            import torch  # noqa: F401
        batch.wait(bar.moved)
        with report.phase("hand over"):
            checkpoint.verify_unchanged()
            return batch.tensors_of(infos)


def stream(
    source: Source,
    device: str | int | torch.device = "cpu",
    *,
    names: Iterable[str] | None = None,
    order: str = "file",
    backend: str = "auto",
    cache: str = "auto",
    options: Mapping[str, Any] | None = None,
    window_bytes: int = WINDOW_BYTES,
    progress: bool | None = None,
    stall_seconds: float = STALL_SECONDS,
    **where: Any,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) while the next tensors are read, in the order of `names` or the files.

    With `order` "layers" it is the order in which a model uses them, as far as names tell:
    embeddings, layer after layer, then norms and heads.

    Memory is bounded by two windows of `window_bytes` (or the largest tensor, where that is more)
    and the tensors that the caller keeps. Closing the iterator early ends the reads. Arguments and
    errors are those of `load_file`; a file that changed is noticed at the end of each window.
    `order`, `cache` and `device` are checked by the call itself; files are opened with the first
    tensor.
    """
    if order not in ("file", "layers"):
        raise ValueError(f'order={order!r} is none of "file", "layers"')
    if cache not in CACHES:
        raise ValueError(f"cache={cache!r} is none of {', '.join(CACHES)}")
    return _stream(
        source,
        require_device(device),
        names=names,
        order=order,
        backend=backend,
        cache=cache,
        options=options,
        window_bytes=window_bytes,
        progress=progress,
        stall_seconds=stall_seconds,
        **where,
    )


def _stream(
    source: Source,
    target: str,
    *,
    names: Iterable[str] | None,
    order: str,
    backend: str,
    cache: str,
    options: Mapping[str, Any] | None,
    window_bytes: int,
    progress: bool | None,
    stall_seconds: float,
    **where: Any,
) -> Iterator[tuple[str, torch.Tensor]]:
    report = LoadReport(os.fspath(source), device=target)
    with report.whole(), ExitStack() as stack:
        with report.phase("open"):
            checkpoint = stack.enter_context(Checkpoint.open(source, **where))
            infos = checkpoint.infos(names)
            if order == "layers":
                infos = in_layers(infos)
        _count(report, infos)
        session = stack.enter_context(
            device_batch.session_for(
                checkpoint,
                report,
                target,
                backend,
                report.wanted_bytes,
                cache=cache,
                options=options,
                stall_seconds=stall_seconds,
            )
        )
        bar = stack.enter_context(_Bar(progress, report.wanted_bytes))
        yield from _windows(session, infos, window_bytes, target, bar)


def _windows(
    session: Session, infos: list[TensorInfo], window_bytes: int, device: str, bar: _Bar
) -> Iterator[tuple[str, torch.Tensor]]:
    """Reads window by window, one ahead of what is handed out."""
    groups = list(grouped(infos, window_bytes))
    if not groups:
        return
    ahead: list[tuple[list[TensorInfo], Batch]] = []
    try:
        for number in range(len(groups) + 1):
            if number < len(groups):
                ahead.append((groups[number], device_batch.start(session, groups[number])))
                if number == 0:
                    continue
            members, batch = ahead[0]
            batch.wait(bar.moved)
            with session.report.phase("hand over"):
                session.checkpoint.verify_unchanged()
                tensors = batch.tensors_of(members)
                batch.release()
            del ahead[0], batch
            for info in members:
                tensor = tensors.pop(info.name)
                yield info.name, tensor if device == session.device else tensor.to(device)
                del tensor
    finally:
        for _, batch in ahead:
            batch.release()


# The backends of safetensors, by the I/O mode that reads in the same way.
_CACHE_OF = {"mmap": "mapped", "pread": "buffered"}


def _without_safetensors_backend(backend: str, cache: str) -> tuple[str, str]:
    """Backend and cache where `backend` may be one of safetensors'; a plugin of that name wins."""
    wanted = _CACHE_OF.get(backend)
    if wanted is None or backend in registry.names():
        return backend, cache
    if cache not in ("auto", wanted):
        raise ValueError(f"backend={backend!r} reads by cache={wanted!r}, not by cache={cache!r}")
    return "auto", wanted


def _count(report: LoadReport, infos: list[TensorInfo]) -> None:
    report.tensors = len(infos)
    report.wanted_bytes = sum(info.nbytes for info in infos)


class _Bar:
    """A progress bar with rate and remaining time on a terminal, nothing elsewhere.

    It is made with the first bytes: no read waits until tqdm is imported.
    """

    def __init__(self, wanted: bool | None, total: int) -> None:
        self._wanted, self._total = wanted, total
        self._shown = wanted or (wanted is None and sys.stderr is not None and sys.stderr.isatty())
        self._bar: Any = None

    def moved(self, nbytes: int) -> None:
        if not self._shown:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total,
                unit="B",
                unit_scale=True,
                desc="gdsload",
                delay=0 if self._wanted else _BAR_DELAY_SECONDS,
                leave=bool(self._wanted),
            )
        self._bar.update(min(nbytes, self._bar.total - self._bar.n))

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


class safe_open:
    """Opens a checkpoint lazily and returns tensors as asked: safetensors' class of that name.

    ``framework`` is "pt" (or "torch", "pytorch") or "np" ("numpy"); ``filename`` may be anything
    that `load_file` takes, and so may ``backend``. Each tensor is read (or mapped, where it is
    warm) when it is asked for; a slice of rows reads only those rows. A tensor outlives the file,
    and a slice the `with` block. Several threads may use it; they read one after the other. It
    cannot be pickled or copied.

    Errors are those of `load_file`, with SafetensorError among their bases as there.
    """

    @safetensors_errors()
    def __init__(
        self,
        filename: Source,
        framework: str = "pt",
        device: str | int | torch.device | None = "cpu",
        *,
        backend: str = "auto",
        cache: str = "auto",
        options: Mapping[str, Any] | None = None,
        stall_seconds: float = STALL_SECONDS,
        **where: Any,
    ) -> None:
        if framework not in ("pt", "torch", "pytorch", "np", "numpy"):
            raise also_safetensors(ValueError)(
                f"framework {framework!r}: gdsload gives torch or numpy tensors"
            )
        backend, cache = _without_safetensors_backend(backend, cache)
        self._numpy = framework in ("np", "numpy")
        self._device = require_device(device)
        if self._numpy and self._device != "cpu":
            raise also_safetensors(ValueError)(f"numpy has no tensors on {self._device}")
        # A session serves one reader at a time. Reentrant, so that a signal handler may close it.
        self._lock = fork_safe_lock(self)
        self._slices = 0  # that may still be read after the `with` block, as with safetensors
        self._left = False
        self._checkpoint = Checkpoint.open(filename, **where)
        try:
            self._session = device_batch.session_for(
                self._checkpoint,
                LoadReport(self._checkpoint.source, device=self._device),
                self._device,
                backend,
                self._checkpoint.total_bytes,
                cache=cache,
                options=options,
                stall_seconds=stall_seconds,
            )
        except BaseException:
            self._checkpoint.close()
            raise

    @safetensors_errors()
    def keys(self) -> list[str]:
        """The names, sorted."""
        return sorted(self._open().tensors)

    @safetensors_errors()
    def offset_keys(self) -> list[str]:
        """The names, in the order of the data."""
        return list(self._open().tensors)

    @safetensors_errors()
    def metadata(self) -> dict[str, str] | None:
        """What the header says under ``__metadata__``; None where it says nothing."""
        return dict(self._open().metadata) or None

    def get_tensor(self, name: str) -> Any:
        """The whole tensor. Raises CheckpointError where there is none of that name."""
        return self.get_tensors([name])[name]

    @safetensors_errors()
    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Several tensors, read together; all of them without `names`."""
        infos = self._open().infos(names)
        return {name: self._give(tensor) for name, tensor in self._read(infos).items()}

    @safetensors_errors()
    def get_slice(self, name: str) -> Slice:
        """A tensor to be sliced before it is read."""
        return Slice(self, self._open().info(name))

    def _open(self) -> Checkpoint:
        if self._left:
            raise CheckpointError(f"{self._checkpoint.source}: the file is closed")
        return self._checkpoint

    def _count_slices(self, change: int) -> None:
        with self._lock:
            self._slices += change
            if self._left and not self._slices:
                self.close()

    def _read(self, infos: list[TensorInfo]) -> dict[str, torch.Tensor]:
        with self._lock:
            if self._checkpoint.closed and self._checkpoint.shards:
                raise CheckpointError(f"{self._checkpoint.source}: the file is closed")
            report = self._session.report = LoadReport(self._checkpoint.source, device=self._device)
            _count(report, infos)
            with report.whole():
                return device_batch.load(self._session, infos)

    def _give(self, tensor: torch.Tensor) -> Any:
        if self._numpy:
            return _as_numpy(tensor)
        return tensor if self._device == self._session.device else tensor.to(self._device)

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left = True
        self._count_slices(0)

    def close(self) -> None:
        """Closes the files, when no thread reads from them. Tensors that were handed out stay,
        slices are closed. May be called again.

        Leaving the `with` block does the same, once there are no slices any more.
        """
        with self._lock:
            self._left = True
            self._session.close()
            self._checkpoint.close()

    def __contains__(self, name: object) -> bool:
        return name in self._open().tensors

    def __reduce__(self) -> str:
        raise TypeError("a safe_open owns file descriptors and cannot be copied or pickled")


class Slice:
    """One tensor of a `safe_open`, to be indexed before it is read: like a torch tensor, or with
    numpy as safetensors does, which takes ranges and numbers within the shape."""

    def __init__(self, opened: safe_open, info: TensorInfo) -> None:
        self._opened = opened
        self._info = info
        opened._count_slices(+1)

    def __del__(self) -> None:
        self._opened._count_slices(-1)

    def get_shape(self) -> list[int]:
        """The shape in elements, as in the header."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """The dtype by safetensors' name, such as "BF16"."""
        return self._info.dtype

    @safetensors_errors()
    def __getitem__(self, index: Any) -> Any:
        """What indexing the whole tensor gives; a leading range of rows reads only those rows."""
        if self._opened._numpy:
            _require_within(index, self._info.shape)
        info, rest = self._info, index
        first = index[0] if isinstance(index, tuple) and index else index
        if info.shape and isinstance(first, slice) and info.dtype != "F4":
            start, stop, step = first.indices(info.shape[0])
            if step == 1:
                info = rows_of(info, start, max(stop, start))
                rest = (slice(None), *index[1:]) if isinstance(index, tuple) else slice(None)
        tensor = self._opened._read([info])[info.name]
        return self._opened._give(tensor[rest])

    def __reduce__(self) -> str:
        raise TypeError("a slice of a safe_open cannot be copied or pickled")


def _as_numpy(tensor: torch.Tensor) -> Any:
    """The same memory as an array. Raises TypeError for a dtype that numpy does not know."""
    import torch

    if tensor.dtype == torch.bfloat16:  # of numpy once ml_dtypes is imported, unknown to torch
        import numpy

        return tensor.view(torch.int16).numpy().view(numpy.dtype("bfloat16"))
    return tensor.numpy()


def _require_within(index: Any, shape: Sequence[int]) -> None:
    """Raises an IndexError that is a SafetensorError, in the words of safetensors, for an index
    that it does not take of arrays. Ranges with negative bounds are taken in addition."""
    refused = also_safetensors(IndexError)
    if isinstance(index, list):
        if index:
            raise refused("Non empty lists are not implemented")
        return
    items = index if isinstance(index, tuple) else (index,)
    if sum(item is Ellipsis for item in items) > 1:
        raise refused("Only one ellipsis (...) is allowed in slice index")
    parsed: list[int | slice] = []
    for item in items:
        if item is Ellipsis:
            parsed += [slice(None)] * (len(shape) - len(items) + 1)
        elif isinstance(item, slice):
            if item.step is not None and operator.index(item.step) < 1:
                raise refused(f"Slice step must be a positive integer, got {item.step}")
            parsed.append(item)
        else:
            parsed.append(_number_within(item, len(parsed), shape))
    shown = f"Error during slicing [{', '.join(map(_as_written, parsed))}] with shape {list(shape)}"
    if len(parsed) > len(shape):
        raise refused(f"{shown}: more slicing indexes than dimensions in tensor")
    # From the last dimension to the first, as safetensors looks at them.
    for dimension, item in reversed(list(enumerate(parsed))):
        size = shape[dimension]
        start, stop = (item, item + 1) if isinstance(item, int) else (item.start or 0, item.stop)
        stop = size if stop is None else stop
        if start >= size > 0 or (isinstance(item, int) and not size):
            asked = start
        elif stop > size:
            asked = stop - 1
        else:
            continue
        raise refused(
            f"{shown}: index {asked} out of bounds for tensor dimension #{dimension} of size {size}"
        )


def _number_within(item: Any, dimension: int, shape: Sequence[int]) -> int:
    try:
        number = operator.index(item)
    except TypeError:
        raise also_safetensors(IndexError)(
            f"Unsupported slice index at position {dimension}: expected slice, int, or ellipsis"
        ) from None
    size = shape[dimension] if dimension < len(shape) else 0
    if number < -size:
        raise also_safetensors(IndexError)(
            f"Invalid index {number} for dimension {dimension} of size {size}"
        )
    return number + size if number < 0 else number


def _as_written(item: int | slice) -> str:
    if isinstance(item, int):
        return str(item)
    bounds = [item.start, item.stop] + ([item.step] if item.step not in (None, 1) else [])
    return ":".join("" if bound is None else str(bound) for bound in bounds)


def plan(
    source: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    *,
    limits: Limits | None = None,
    window_bytes: int = 0,
    gap_bytes: int = GAP_BYTES,
    **where: Any,
) -> ReadPlan:
    """How a checkpoint would be read if none of it were in the page cache; nothing is read yet.

    `names` are the tensors wanted, in the order in which they are; all, in file order, where None.
    `limits` default to those of the posix backend. `where` is passed to `Checkpoint.open`, whose
    errors are raised, also for a name that the checkpoint does not have.
    """
    with Checkpoint.open(source, **where) as checkpoint:
        alignments = [system.direct_alignment(shard.fd) for shard in checkpoint.shards]
        return plan_reads(
            byte_ranges_of(checkpoint, names),
            [shard.size for shard in checkpoint.shards],
            limits or Limits(),
            blocks=[max(pair) or DEFAULT_BLOCK_BYTES if pair else DEFAULT_BLOCK_BYTES
                    for pair in alignments],
            window_bytes=window_bytes,
            gap_bytes=gap_bytes,
        )  # fmt: skip
