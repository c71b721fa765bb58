"""Load whole checkpoints without a model: `load_file` at once, `stream` tensor by tensor.

`plan` shows the reads of a load without doing them. Not responsible for single tensors
(`safetensors_file`), for reading before the load (`readahead`), or for models (`integrations`).
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from gdsload.backends.registry import names as registered
from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.checkpoint.checkpoint import Lookup
from gdsload.checkpoint.header import HEADER_LIMIT_BYTES
from gdsload.errors import safetensors_errors
from gdsload.loading.batch import Batch
from gdsload.loading.integrity import open_verifier, require_verify
from gdsload.loading.session import STALL_SECONDS, Session, require_cache
from gdsload.planning.read_plan import (
    DEFAULT_BLOCK_BYTES,
    GAP_BYTES,
    Limits,
    ReadPlan,
    byte_ranges_of,
    grouped,
    plan_reads,
    ranges_of,
)
from gdsload.report import LoadReport
from gdsload.system.device_name import require_device
from gdsload.system.progress_bar import progress_bar

if TYPE_CHECKING:
    import torch

# Size of a read window of `stream`. Two are in memory: one is handed out, the next one is read.
WINDOW_BYTES = 256 << 20
# The backends of safetensors, and the I/O mode that reads in the same way.
_SAFETENSORS_MODES = {"mmap": "mapped", "pread": "buffered"}


class ReadSettings:
    """The checked keywords that all loads share: where the bytes go and how they are read."""

    def __init__(
        self,
        device: str | int | torch.device | None,
        backend: str,
        cache: str,
        page_cache: str,
        options: Mapping[str, Any] | None,
        stall_seconds: float,
        verify: str | os.PathLike[str] = "size",
    ) -> None:
        """Checks the values. A backend of safetensors becomes the `cache` that reads like it.

        Raises:
            PlacementError: The device does not exist.
            ValueError: `cache`, `page_cache` or `verify` is unknown, or `cache` contradicts
                `verify` or the backend of safetensors.
        """
        mode = _SAFETENSORS_MODES.get(backend)
        if mode is not None and backend not in registered():  # a plugin may have this name
            if cache not in ("auto", mode):
                raise ValueError(f"backend={backend!r} reads by cache={mode!r}, not {cache!r}")
            backend, cache = "auto", mode
        require_cache(cache, page_cache)
        require_verify(verify, cache)
        self.verify = verify
        self.device, self.backend, self.cache = _target_of(device), backend, cache
        self.page_cache, self.options, self.stall_seconds = page_cache, options, stall_seconds

    def session(self, checkpoint: Checkpoint, report: LoadReport, nbytes: int) -> Session:
        """A session for reads of about `nbytes` bytes in all, as near to the device as they get."""
        device = self.device
        if device != "cpu":
            from gdsload.loading.device_batch import reached

            device = reached(device, self.backend)
        return Session(
            checkpoint,
            report,
            device=device,
            backend=self.backend,
            cache=self.cache,
            page_cache=self.page_cache,
            options=self.options,
            stall_seconds=self.stall_seconds,
            expected_bytes=nbytes,
            verifier=open_verifier(checkpoint, self.verify, report),
        )


def _target_of(device: object) -> str:
    """The name of a device. It is checked here only if torch is imported: otherwise after the
    first read is posted, because the import takes seconds. Raises PlacementError."""
    if "torch" not in sys.modules:
        text = f"cuda:{device}" if type(device) is int else str(device)
        if re.fullmatch(r"cuda(:\d+)?", text):
            return "cuda:0" if text == "cuda" else text  # torch begins with device 0
    return require_device(device)


def post(session: Session, infos: Sequence[TensorInfo]) -> Batch:
    """Posts the reads of whole tensors to the session's device and returns without waiting."""
    if session.device == "cpu":
        return Batch(session, *session.arrange(ranges_of(infos)))
    from gdsload.loading.device_batch import start

    return start(session, infos)


def load(
    session: Session,
    infos: Sequence[TensorInfo],
    device: str,
    advance: Callable[[int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Tensors by name, on the session's device, which is `device` or the CPU on the way to it."""
    groups: Iterable[Sequence[TensorInfo]] = (infos,)
    if session.device != "cpu":
        from gdsload.loading.device_batch import starting_windows

        groups = starting_windows(session, infos)
    posted: list[tuple[Sequence[TensorInfo], Batch]] = []
    try:
        for group in groups:
            posted.append((group, post(session, group)))
        _import_torch(session, device)
        for group, batch in posted:
            batch.wait(advance, parts=group)
        with session.report.phase("hand over"):
            session.checkpoint.verify_unchanged()
            tensors: dict[str, torch.Tensor] = {}
            for group, batch in posted:
                tensors |= batch.tensors_of(group)
            return {info.name: tensors[info.name] for info in infos}
    finally:
        for _, batch in posted:
            batch.release()


def _import_torch(session: Session, device: str) -> None:
    """Imports torch while native threads read. Raises PlacementError if it cannot use `device`."""
    with session.report.phase("import torch"):
        import torch  # noqa: F401
    if session.device != device:
        require_device(device)


@safetensors_errors()
def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device | None = "cpu",
    *,
    backend: str = "auto",
    names: Iterable[str] | None = None,
    cache: str = "auto",
    page_cache: str = "keep",
    options: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    stall_seconds: float = STALL_SECONDS,
    verify: str | os.PathLike[str] = "size",
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    strict: bool = True,
    header_limit: int = HEADER_LIMIT_BYTES,
) -> dict[str, torch.Tensor]:
    """Loads the tensors of a checkpoint into the memory of a device.

    Replaces `safetensors.torch.load_file`. On the CPU, a file that is completely in the page cache
    is mapped privately and read lazily; other files are read into place with direct I/O.

    Args:
        filename: A .safetensors file, a directory, an index file, or the id of a model in the
            local hub cache. Nothing is downloaded.
        device: Where the tensors are needed: "cpu", "cuda", "cuda:1", 1, or None for the CPU.
        backend: "auto" or the name of a backend. A named backend that cannot work is an error.
            The backends of safetensors are accepted: "mmap" is `cache` "mapped", "pread" is
            "buffered".
        names: The tensors to load, in this order. None loads all, in file order.
        cache: "auto" chooses for each byte range; "direct" bypasses the page cache; "buffered"
            reads through it; "mapped" maps the files.
        page_cache: "keep" leaves in the page cache what was read through it. "drop" removes it at
            the end of the load, except for bytes that were there before, and for mapped files.
            The kernel allows it only for files that the user owns or may write to;
            `report.refusals` names others.
        options: Options of the backend, such as `{"engine": "threads"}`.
        progress: Whether a progress bar is shown on stderr. None: if stderr is a terminal.
        stall_seconds: Seconds without a new byte after which the load fails.
        verify: "size" checks the sizes of the files, and that they do not change during the load.
            "checksum" also compares each block of a tensor with the manifest that `gdsload
            manifest` has written beside the files; the Path of a manifest is another place.
            "sha256" is a manifest with SHA-256, or, in the hub cache, compares whole files before
            the load. A verified load maps no file.
        revision: Branch, tag or commit of a model in the hub cache. None is "main".
        subfolder: Folder inside the model.
        variant: Such as "fp16", for model.fp16.safetensors.
        cache_dir: The hub cache. None: as HF_HUB_CACHE or HF_HOME say.
        strict: Whether an index that contradicts its shards is an error.
        header_limit: Largest accepted header, in bytes.

    Returns:
        The tensors by name, in the order of `names`, bit for bit those of safetensors. Each owns
        its memory or keeps it alive.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or inconsistent.
        PlacementError: The device does not exist, or its memory is too small.
        BackendUnavailable: No allowed backend works here.
        ReadError: A read failed.
        FileChanged: A file was modified during the load.
        IntegrityError: Bytes differ from their checksum, or the manifest does not fit.
        ValueError: An argument has no such value.

        All errors of gdsload are `safetensors.SafetensorError` too, except for files that do not
        exist or are not readable: these are FileNotFoundError and PermissionError.

    Example:
        >>> tensors = gdsload.load_file("model", device="cuda:0")
        >>> print(gdsload.last_report().summary())
    """
    settings = ReadSettings(device, backend, cache, page_cache, options, stall_seconds, verify)
    lookup = Lookup(revision, subfolder, variant, cache_dir, strict, header_limit)
    with _opened(filename, settings, lookup, names, progress) as (session, infos, advance):
        if session.device != settings.device:  # torch moves the tensors there
            return dict(_windows(session, infos, WINDOW_BYTES, settings.device, advance))
        return load(session, infos, settings.device, advance)


def stream(
    source: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    names: Iterable[str] | None = None,
    order: str = "file",
    backend: str = "auto",
    cache: str = "auto",
    page_cache: str = "keep",
    options: Mapping[str, Any] | None = None,
    window_bytes: int = WINDOW_BYTES,
    progress: bool | None = None,
    stall_seconds: float = STALL_SECONDS,
    verify: str | os.PathLike[str] = "size",
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    strict: bool = True,
    header_limit: int = HEADER_LIMIT_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors one by one while the next ones are read.

    Memory is bounded by two windows and the tensors that the caller keeps. Arguments are checked by
    the call; files are opened with the first tensor. Closing the iterator ends the reads.

    Args:
        source: A file, a directory, an index file, or a model id, as for `load_file`.
        device: Where the tensors are needed, as for `load_file`.
        names: The tensors to load, in this order. None yields all.
        order: "file" for the order of `names` or the files; "layers" for the order in which a model
            uses the tensors: embeddings, layer after layer, norms, heads.
        backend: As for `load_file`.
        cache: As for `load_file`.
        page_cache: As for `load_file`.
        options: As for `load_file`.
        window_bytes: Bytes that are read together. A larger tensor is a window of its own.
        progress: As for `load_file`.
        stall_seconds: Seconds without a new byte after which the load fails.
        verify: As for `load_file`.
        revision: As for `load_file`.
        subfolder: As for `load_file`.
        variant: As for `load_file`.
        cache_dir: As for `load_file`.
        strict: As for `load_file`.
        header_limit: Largest accepted header, in bytes.

    Yields:
        (name, tensor). Each tensor owns its memory or keeps it alive.

    Raises:
        ValueError: `order`, `cache`, `page_cache` or `verify` has no such value.
        GdsloadError: As for `load_file`. A changed file is detected at the end of each window.

    Example:
        >>> for name, tensor in gdsload.stream("model", order="layers"):
        ...     print(name, tuple(tensor.shape))
    """
    if order not in ("file", "layers"):
        raise ValueError(f'order={order!r} is none of "file", "layers"')
    settings = ReadSettings(device, backend, cache, page_cache, options, stall_seconds, verify)
    lookup = Lookup(revision, subfolder, variant, cache_dir, strict, header_limit)

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        with _opened(source, settings, lookup, names, progress, order) as (session, infos, advance):
            yield from _windows(session, infos, window_bytes, settings.device, advance)

    return read()


@contextmanager
def _opened(
    source: str | os.PathLike[str],
    settings: ReadSettings,
    lookup: Lookup,
    names: Iterable[str] | None,
    progress: bool | None,
    order: str = "file",
) -> Iterator[tuple[Session, list[TensorInfo], Callable[[int], None]]]:
    """A session for one load, the tensors to read, and the function for its progress bar."""
    report = LoadReport(os.fspath(source), device=settings.device)
    with report.whole(), ExitStack() as stack:
        with report.phase("open"):
            checkpoint = stack.enter_context(lookup.open(source))
            infos = checkpoint.infos(names)
            if order == "layers":
                from gdsload.planning.layer_order import in_layers

                infos = in_layers(infos)
        report.count(infos)
        session = stack.enter_context(settings.session(checkpoint, report, report.wanted_bytes))
        advance = stack.enter_context(progress_bar(progress, report.wanted_bytes))
        yield session, infos, advance


def _windows(
    session: Session,
    infos: list[TensorInfo],
    window_bytes: int,
    device: str,
    advance: Callable[[int], None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Reads window by window, one ahead of the window that is handed out."""
    windows = ((group, post(session, group)) for group in grouped(infos, window_bytes))
    posted = deque(islice(windows, 1))
    try:
        _import_torch(session, device)
        while posted:
            posted.extend(islice(windows, 1))
            group, batch = posted[0]
            batch.wait(advance, parts=group)
            with session.report.phase("hand over"):
                session.checkpoint.verify_unchanged()
                tensors = batch.tensors_of(group)
                batch.release()
            del posted[0], batch
            for info in group:
                tensor = tensors.pop(info.name)
                yield info.name, tensor if device == session.device else tensor.to(device)
                del tensor
    finally:
        for _, batch in posted:
            batch.release()


def plan(
    source: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    *,
    limits: Limits | None = None,
    window_bytes: int = 0,
    gap_bytes: int = GAP_BYTES,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    strict: bool = True,
    header_limit: int = HEADER_LIMIT_BYTES,
) -> ReadPlan:
    """Plans the reads of a load with an empty page cache. Only headers are read.

    Args:
        source: A file, a directory, an index file, or a model id, as for `load_file`.
        names: The wanted tensors, in the order of use. None plans all, in file order.
        limits: What the backend allows. None: the limits of the posix backend.
        window_bytes: Size of a read window in bytes; 0 plans one window.
        gap_bytes: Largest gap in bytes that is read to merge two ranges.
        revision: As for `load_file`.
        subfolder: As for `load_file`.
        variant: As for `load_file`.
        cache_dir: As for `load_file`.
        strict: As for `load_file`.
        header_limit: Largest accepted header, in bytes.

    Returns:
        The ordered reads, with offsets and sizes in bytes.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or inconsistent, or has no tensor of
            that name.

    Example:
        >>> print(gdsload.plan("model").summary())
    """
    from gdsload._native.system import direct_alignment

    lookup = Lookup(revision, subfolder, variant, cache_dir, strict, header_limit)
    with lookup.open(source) as checkpoint:
        alignments = [direct_alignment(shard.fd) for shard in checkpoint.shards]
        return plan_reads(
            byte_ranges_of(checkpoint, names),
            [shard.size for shard in checkpoint.shards],
            limits or Limits(),
            blocks=[max(pair or (0,)) or DEFAULT_BLOCK_BYTES for pair in alignments],
            window_bytes=window_bytes,
            gap_bytes=gap_bytes,
        )
