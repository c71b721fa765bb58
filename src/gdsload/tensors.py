"""Whole checkpoints, single tensors and streams of them: the face for callers without a model.

`load_file` and `safe_open` stand where safetensors' own do; `stream` hands tensors out while the
next ones are read, in memory that does not grow with the model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gdsload import vram
from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.cuts import rows_of
from gdsload.device import require_device
from gdsload.errors import CheckpointError
from gdsload.load import CACHES, STALL_SECONDS, Batch, Session
from gdsload.order import in_layers
from gdsload.plan import wanted_info, wanted_infos
from gdsload.report import LoadReport

if TYPE_CHECKING:
    import torch

Source = str | os.PathLike[str]

# What a stream reads ahead, twice: one window is handed out while the next is on its way.
WINDOW_BYTES = 256 << 20
_BAR_DELAY_SECONDS = 0.5


def load_file(
    source: Source,
    device: str | int | torch.device = "cpu",
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
    `progress` shows a bar on stderr (None: if that is a terminal). `where` is passed to
    `Checkpoint.open`: revision, subfolder, variant, cache_dir, strict, header_limit.

    Raises CheckpointError for a source that is not what it should be, PlacementError where memory
    is too small, BackendUnavailable, ReadError (with path, offset, wanted, got), FileChanged when
    a file was touched meanwhile. No tensor is handed out in any of these cases.
    """
    target = require_device(device)
    report = LoadReport(os.fspath(source), device=target)
    with report.whole(), ExitStack() as stack:
        with report.phase("open"):
            checkpoint = stack.enter_context(Checkpoint.open(source, **where))
            infos = wanted_infos(checkpoint, names)
        _count(report, infos)
        session = stack.enter_context(
            vram.session_for(
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
            return vram.load(session, infos, bar.moved)
        if target != "cpu":
            return dict(_windows(session, infos, WINDOW_BYTES, target, bar))
        batch = vram.start(session, infos)
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
            infos = wanted_infos(checkpoint, names)
            if order == "layers":
                infos = in_layers(infos)
        _count(report, infos)
        session = stack.enter_context(
            vram.session_for(
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
    groups = list(_grouped(infos, window_bytes))
    if not groups:
        return
    ahead: list[tuple[list[TensorInfo], Batch]] = []
    try:
        for number in range(len(groups) + 1):
            if number < len(groups):
                ahead.append((groups[number], vram.start(session, groups[number])))
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


def _grouped(infos: list[TensorInfo], window_bytes: int) -> Iterator[list[TensorInfo]]:
    group: list[TensorInfo] = []
    held = 0
    for info in infos:
        if group and held + info.nbytes > window_bytes:
            yield group
            group, held = [], 0
        group.append(info)
        held += info.nbytes
    if group:
        yield group


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

    ``framework`` is "pt" (or "torch", "pytorch") or "np" ("numpy"); ``source`` may be anything
    that `load_file` takes. Each tensor is read (or mapped, where it is warm) when it is asked for;
    a slice of rows reads only those rows. A tensor outlives the file. Use it from one thread.
    """

    def __init__(
        self,
        source: Source,
        framework: str = "pt",
        device: str | int | torch.device = "cpu",
        *,
        backend: str = "auto",
        cache: str = "auto",
        options: Mapping[str, Any] | None = None,
        stall_seconds: float = STALL_SECONDS,
        **where: Any,
    ) -> None:
        if framework not in ("pt", "torch", "pytorch", "np", "numpy"):
            raise ValueError(f"framework {framework!r}: gdsload gives torch or numpy tensors")
        self._numpy = framework in ("np", "numpy")
        self._device = require_device(device)
        if self._numpy and self._device != "cpu":
            raise ValueError(f"numpy has no tensors on {self._device}")
        self._checkpoint = Checkpoint.open(source, **where)
        try:
            self._session = vram.session_for(
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

    def keys(self) -> list[str]:
        """The names, sorted."""
        return sorted(self._open().tensors)

    def offset_keys(self) -> list[str]:
        """The names, in the order of the data."""
        return list(self._open().tensors)

    def metadata(self) -> dict[str, str] | None:
        """What the header says under ``__metadata__``; None where it says nothing."""
        return dict(self._open().metadata) or None

    def get_tensor(self, name: str) -> Any:
        """The whole tensor. Raises CheckpointError where there is none of that name."""
        return self.get_tensors([name])[name]

    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Several tensors, read together; all of them without `names`."""
        infos = wanted_infos(self._open(), names)
        return {name: self._give(tensor) for name, tensor in self._read(infos).items()}

    def get_slice(self, name: str) -> Slice:
        """A tensor to be sliced before it is read."""
        return Slice(self, wanted_info(self._open(), name))

    def _open(self) -> Checkpoint:
        if self._checkpoint.closed and self._checkpoint.shards:
            raise CheckpointError(f"{self._checkpoint.source}: the file is closed")
        return self._checkpoint

    def _read(self, infos: list[TensorInfo]) -> dict[str, torch.Tensor]:
        self._open()
        report = self._session.report = LoadReport(self._checkpoint.source, device=self._device)
        _count(report, infos)
        with report.whole():
            return vram.load(self._session, infos)

    def _give(self, tensor: torch.Tensor) -> Any:
        if self._numpy:
            return tensor.numpy()
        return tensor if self._device == self._session.device else tensor.to(self._device)

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files. Tensors that were handed out stay. May be called again."""
        self._session.close()
        self._checkpoint.close()

    def __len__(self) -> int:
        return len(self._open().tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._open().tensors


class Slice:
    """One tensor of a `safe_open`, to be indexed like a torch tensor before it is read."""

    def __init__(self, opened: safe_open, info: TensorInfo) -> None:
        self._opened = opened
        self._info = info

    def get_shape(self) -> list[int]:
        """The shape in elements, as in the header."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """The dtype by safetensors' name, such as "BF16"."""
        return self._info.dtype

    def __getitem__(self, index: Any) -> Any:
        """What indexing the whole tensor gives; a leading range of rows reads only those rows."""
        info, rest = self._info, index
        first = index[0] if isinstance(index, tuple) and index else index
        if info.shape and isinstance(first, slice) and info.dtype != "F4":
            start, stop, step = first.indices(info.shape[0])
            if step == 1:
                info = rows_of(info, start, max(stop, start))
                rest = (slice(None), *index[1:]) if isinstance(index, tuple) else slice(None)
        tensor = self._opened._read([info])[info.name]
        return self._opened._give(tensor[rest])
