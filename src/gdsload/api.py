"""Load whole checkpoints without a model: `load_file` at once, `stream` tensor by tensor,
`load_into` to tensors that exist already.

`plan` shows the reads of a load without doing them. Not responsible for single tensors
(`safetensors_file`), for reading before the load (`readahead`), or for models (`integrations`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload._native.ranges import bytes_of
from gdsload.backends.registry import find
from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.checkpoint.checkpoint import Lookup
from gdsload.checkpoint.header import HEADER_LIMIT_BYTES
from gdsload.checkpoint.locate import title_of
from gdsload.checkpoint.selection import repeatable
from gdsload.errors import (
    GdsloadError,
    prefixed_with,
    safetensors_errors,
    without_traceback,
)
from gdsload.loading.batch import assembled
from gdsload.loading.session import (
    Session,
    remote_backend_of,
    require_room_to_plan,
    verifier_of,
)
from gdsload.loading.settings import ReadSettings
from gdsload.loading.whole_tensors import load, load_in_windows
from gdsload.planning.read_plan import (
    DEFAULT_BLOCK_BYTES,
    GAP_BYTES,
    REMOTE_GAP_BYTES,
    Limits,
    ReadPlan,
    plan_reads,
    ranges_of,
)
from gdsload.report import LoadReport
from gdsload.system import device_name, quiesce
from gdsload.system.progress_bar import progress_bar
from gdsload.system.stall import STALL_SECONDS

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from gdsload.checkpoint.selection import Names
    from gdsload.distribution.exchange import Shards
    from gdsload.distribution.shared_load import Sharing
    from gdsload.events import OnEvent
    from gdsload.loading.destinations import Rename, Targets
    from gdsload.loading.integrity import Verifier
    from gdsload.planning.tensor_slices import WantedTensor

# Size of a read window of `stream`. Two are in memory: one is handed out, the next one is read.
STREAM_WINDOW_BYTES = 256 << 20


def open_session(
    checkpoint: Checkpoint,
    report: LoadReport,
    settings: ReadSettings,
    device: str,
    nbytes: int,
    verifier: Verifier | None,
    *,
    copies: bool = False,
) -> Session:
    """A session for reads of about `nbytes` bytes in all, as near to the device as they get.
    `copies`: as for `Session`, of a load that stays on this device."""
    nearest = device
    if device != "cpu":
        from gdsload.loading.device_batch import read_device

        nearest = read_device(device, settings.backend)
    return Session(
        checkpoint,
        report,
        settings,
        device=nearest,
        copies=copies or nearest != device,
        expected_bytes=nbytes,
        verifier=verifier,
    )


@safetensors_errors()
def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device | None = "cpu",
    *,
    backend: str = "auto",
    names: Names = None,
    slices: Mapping[str, Any] | None = None,
    cache: str = "auto",
    page_cache: str = "auto",
    options: Mapping[str, Any] | None = None,
    group: ProcessGroup | None = None,
    shards: Shards | None = None,
    readers: str = "node",
    progress: bool | None = None,
    stall_seconds: float = STALL_SECONDS,
    verify: str | os.PathLike[str] = "size",
    on_event: OnEvent | None = None,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    strict: bool = True,
    header_limit: int = HEADER_LIMIT_BYTES,
) -> dict[str, torch.Tensor]:
    """Loads the tensors of a checkpoint into the memory of a device.

    Replaces `safetensors.torch.load_file`. On the CPU, a file that is in the page cache (98 %
    of it, on network storage all) is mapped privately and read lazily. Other files are read into
    the page cache and mapped if there is room for them in memory; otherwise they are read into
    place with direct I/O. Local files that have no room in memory at all are mapped, unless
    `cache`, `page_cache`, `verify`, a host pool or another engine than `threads` rules it out.

    Args:
        filename: A .safetensors file, a directory, an index file, or the id of a model in the
            local hub cache; or the URL of a file, an index or a directory in an object store or on
            a web server: s3://bucket/model, gs://, az://, https://, with the extra `remote`.
            Credentials are read by the client from its environment variables. Nothing is downloaded
            from a hub, and no copy is stored without `cache_dir`.
        device: Where the tensors are needed: "cpu", "cuda", "cuda:1", 1, or None for the CPU.
        backend: "auto" or the name of a backend. A named backend that cannot work is an error.
            The backends of safetensors are accepted: "mmap" is `cache` "mapped", "pread" is
            "buffered".
        names: The tensors to load: a name, a glob, a regular expression that is searched in the
            names, a function of a name, such as those of `layers` and `experts`, or a list of
            these. None loads all, in file order.
        slices: The index of each tensor of which only a part is wanted, by name: a number, a slice,
            an ellipsis, or a tuple of these. Only the byte ranges with this part are read; where
            the gaps are too small or too many, they are read as well, which `LoadReport.read_ratio`
            tells.
        cache: "auto" chooses for each byte range; "direct" bypasses the page cache; "buffered"
            reads through it; "mapped" maps the files. URLs have no page cache: "mapped" is an
            error, the others are the same.
        page_cache: What stays in the page cache, for later loads and other processes.
            "auto" reads into it and maps it, so that later loads read nothing, if the checkpoint
            has room in memory, is on local storage, is loaded into host memory with `cache` "auto",
            at least 0.9 of it is wanted, and `options` has neither "pages" nor "request_bytes".
            Otherwise it does not fill it, unless files cannot be opened for direct reads.
            "fill" is like "auto", but also for a smaller part and with these options.
            "keep" bypasses it where the filesystem supports direct I/O and `cache` is not
            "buffered". If it already holds parts of a file, the kernel may add pages next to them,
            and a load that maps the file adds the absent pages, at most 2 %.
            "drop" removes at the end of the load what was read through the page cache, except for
            bytes that were there before, and for mapped files. The kernel allows it only for files
            that the user owns or may write to; `report.refusals` names others.
            `report.page_cache` tells what was decided, and why.
        options: Options of the backend, such as `{"engine": "threads"}`.
        group: A group of torch.distributed whose ranks load this checkpoint together: each of them
            reads a share, and they exchange the bytes. All its ranks make the same call; `device`,
            `names` and `shards` may differ. None: this process reads alone.
        shards: With `group`: what this rank wants of each tensor. A mapping from names, or a
            function of a `TensorInfo`, to the dimension of which each rank gets its part (divided
            as `torch.chunk` divides it), to a slice or a tuple of slices, or to None for all of the
            tensor.
        readers: With `group`: "node" reads the checkpoint once for the ranks of each node; "group"
            reads it once for all ranks, so that bytes cross the network between nodes.
        progress: Whether a progress bar is shown. None: if stderr is a terminal, or in a notebook.
        stall_seconds: Seconds without a new byte, or without an answer of another rank, after which
            the load fails.
        verify: "size" checks the sizes of the files, and that they do not change during the load.
            "checksum" also compares each block of a tensor with the manifest that `gdsload
            manifest` has written next to the files; the Path of a manifest is another place.
            "sha256" is a manifest with SHA-256, or, in the hub cache, compares whole files before
            the load. A verified load maps no file.
        on_event: Called with what happens in the load: the types in `gdsload.events`.
        revision: Branch, tag or commit of a model in the hub cache. None is "main".
        subfolder: Folder inside the model.
        variant: Such as "fp16", for model.fp16.safetensors.
        cache_dir: For a model of the hub: the hub cache; None: as HF_HUB_CACHE or HF_HOME say. For
            a URL: a directory in which its files are kept for later loads; None: they are not.
        strict: Whether it is an error if an index contradicts its shards, or two shards have the
            same tensor. Otherwise the last of them counts, as for transformers.
        header_limit: Largest accepted header, in bytes.

    Returns:
        The tensors by name, in the order of `names`, bit for bit those of safetensors. Tensors
        that one entry of `names` selects are in file order. Each owns its memory or keeps it alive.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or inconsistent.
        PlacementError: The device does not exist, or its memory is too small.
        BackendUnavailable: No allowed backend works here.
        ReadError: A read failed.
        FileChanged: A file was modified during the load. Of a URL, all bytes are of one version.
        RankError: Another rank of `group` has failed, has ended, or does not answer.
        IntegrityError: Bytes differ from their checksum, or the manifest does not fit.
        ValueError: An argument has no such value.
        TypeError: An argument has the wrong type, or the backend has no such option.
        IndexError: An index in `slices` is outside its tensor.

        All errors of gdsload are `safetensors.SafetensorError` too. Files that cannot be opened
        raise an OSError instead, such as FileNotFoundError and PermissionError.

    Example:
        >>> tensors = gdsload.load_file("model", device="cuda:0")
        >>> print(gdsload.last_report().summary())
    """
    settings = ReadSettings(backend, cache, page_cache, options, stall_seconds, verify, on_event)
    device = device_name.require_target(device)
    lookup = Lookup(revision, subfolder, variant, cache_dir, strict, header_limit, stall_seconds)
    call = _LoadCall(filename, settings, device, lookup, names, slices, progress, "file")
    sharing = _sharing(group, shards, readers)
    if sharing is not None:
        found: list[str] = []
        shared = dict(call.shared(sharing, STREAM_WINDOW_BYTES, found=found))
        return {name: shared[name] for name in found}
    with call.opened() as (session, wanted, advance):
        infos = wanted.parts
        if session.device != device:  # torch moves the tensors there
            pairs = load_in_windows(session, infos, STREAM_WINDOW_BYTES, device, advance)
            return dict(wanted.assembled(session, pairs))
        tensors = load(session, infos, wanted.read_bytes, device, advance)
        if wanted.whole:
            return tensors
        pairs = ((info.name, tensors.pop(info.name)) for info in infos)
        return dict(wanted.assembled(session, pairs))


def load_into(
    tensors: Targets,
    source: str | os.PathLike[str],
    *,
    device: str | int | torch.device | None = None,
    names: Names = None,
    slices: Mapping[str, Any] | None = None,
    rename: Rename = None,
    strict: bool = True,
    backend: str = "auto",
    cache: str = "auto",
    page_cache: str = "auto",
    options: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    stall_seconds: float = STALL_SECONDS,
    verify: str | os.PathLike[str] = "size",
    on_event: OnEvent | None = None,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    header_limit: int = HEADER_LIMIT_BYTES,
) -> LoadReport:
    """Reads a checkpoint into tensors that exist already. Their addresses do not change.

    For weights that return after a sleep or a snapshot, for new weights of a running engine, and
    for models whose CUDA graphs were captured. In VRAM, contiguous tensors of the checkpoint's
    dtype are written as the bytes arrive; all others, and those in DRAM, are copied or cast from
    read windows, whose memory does not grow with the model. No gradient is recorded, and autograd
    sees the write, as with `copy_`.

    Everything is checked before the first byte is written: names, shapes, dtypes, devices, and
    that no two targets overlap.

    Args:
        tensors: The tensors to write to: by name, as (name, tensor) pairs, or a torch module, with
            its parameters and the buffers that it saves. They may be views and not contiguous. Of
            names that share one tensor, one is read.
        source: A file, a directory, an index file, or a model id, as for `load_file`.
        device: Where all tensors must be. None: anywhere, also on several devices.
        names: The tensors of the checkpoint to read, as for `load_file`. Other targets stay as they
            are, and are not missing.
        slices: The parts of these tensors to read, as for `load_file`.
        rename: Where a tensor of the checkpoint belongs: a mapping of its name, or a function of
            it, to the name of a target; to (name, index) for a part of a target, such as one with
            fused weights; or to None for a tensor to be left out. A name that the mapping lacks is
            that of the target.
        strict: Whether it is an error if a target is missing in the checkpoint, or a tensor is
            without a target; otherwise the report has their names. Also as for `load_file`.
        backend: As for `load_file`. For tensors in DRAM, a backend that cannot read there is
            "auto".
        cache: As for `load_file`.
        page_cache: As for `load_file`, but "auto" is "keep": the tensors have memory of their own.
        options: As for `load_file`.
        progress: As for `load_file`.
        stall_seconds: Seconds without a new byte after which the load fails.
        verify: As for `load_file`. With any value but "size", all bytes pass read windows, and each
            window is compared before any of it is copied.
        on_event: As for `load_file`.
        revision: As for `load_file`.
        subfolder: As for `load_file`.
        variant: As for `load_file`.
        cache_dir: As for `load_file`.
        header_limit: Largest accepted header, in bytes.

    Returns:
        The report of this load.

    Raises:
        PartialLoad: The load failed after it had begun to write. The error says which targets are
            complete, undefined or unchanged.
        CheckpointError: The checkpoint is missing or damaged, or a name, shape or dtype does not
            fit. Nothing was written.
        PlacementError: A target has no memory, is on another device or overlaps another one.
            Nothing was written.
        BackendUnavailable: No allowed backend works here. Nothing was written.
        ReadError: A read failed before anything was written.
        IntegrityError: A byte differed from `verify` before anything was written.
        TypeError, IndexError, ValueError: `rename` gives an index that its target does not have, or
            that would make a copy. Nothing was written.

    Example:
        >>> report = gdsload.load_into(model, "model")
        >>> rows = {"gate_proj": slice(0, 3072), "up_proj": slice(3072, 6144)}
        >>> def fused(name):
        ...     *module, part, _ = name.split(".")
        ...     target = ".".join([*module, "gate_up_proj.weight"])
        ...     return (target, rows[part]) if part in rows else name
        >>> report = gdsload.load_into(engine.named_parameters(), "model", rename=fused)
    """
    from gdsload.loading import destinations, into
    from gdsload.planning.tensor_slices import wanted_tensors

    if page_cache == "auto":
        page_cache = "keep"
    settings = ReadSettings(backend, cache, page_cache, options, stall_seconds, verify, on_event)
    only = None if device is None else device_name.require_target(device)
    lookup = Lookup(revision, subfolder, variant, cache_dir, strict, header_limit, stall_seconds)
    targets = destinations.named_tensors(tensors)
    report = LoadReport(title_of(source), device=only or "", on_event=on_event)
    with report.whole(), quiesce.loading(report.source), ExitStack() as stack:
        with report.phase("open"):
            checkpoint = stack.enter_context(lookup.open(source))
        verifier = verifier_of(checkpoint, verify, report)
        with report.phase("match"):
            with checkpoint.locating_errors():
                wanted = wanted_tensors(checkpoint.infos(names), slices)
            with prefixed_with(checkpoint.source):
                found = destinations.matched(wanted, targets, rename)
                report.missing = found.missing if names is None else []
                report.unexpected = found.unexpected
                if strict:
                    destinations.require_all(report.missing, report.unexpected)
                by_device = destinations.by_device(found.destinations, only)
        report.device = ",".join(by_device)
        report.fates = found.fates()
        report.tensors = len(found.destinations)
        report.wanted_bytes = sum(each.wanted.nbytes for each in found.destinations)
        advance = stack.enter_context(progress_bar(progress, report.wanted_bytes))
        state = into.WriteProgress(targets, found)
        # All are made before the first byte is written: a backend with a name or options opens.
        sessions = []
        for where, group in by_device.items():
            name = device_name.require_target(where)
            how = settings.for_host() if name == "cpu" else settings
            nbytes = sum(each.wanted.slice.nbytes for each in group)
            opened = open_session(checkpoint, report, how, name, nbytes, verifier)
            sessions.append((stack.enter_context(opened), group))
        with into.partial_errors(checkpoint.source, state):
            for session, group in sessions:
                into.write_all(session, group, state, advance)
                session.quiesce()  # the next one may need its descriptors
    return report


def stream(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    device: str | int | torch.device = "cpu",
    *,
    names: Names = None,
    slices: Mapping[str, Any] | None = None,
    order: str = "file",
    backend: str = "auto",
    cache: str = "auto",
    page_cache: str = "auto",
    options: Mapping[str, Any] | None = None,
    window_bytes: int = STREAM_WINDOW_BYTES,
    group: ProcessGroup | None = None,
    shards: Shards | None = None,
    readers: str = "node",
    progress: bool | None = None,
    stall_seconds: float = STALL_SECONDS,
    verify: str | os.PathLike[str] = "size",
    on_event: OnEvent | None = None,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    strict: bool = True,
    header_limit: int = HEADER_LIMIT_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors one by one while the next ones are read.

    Memory is bounded by two windows and the tensors that the caller keeps; into host memory by the
    page cache as well, which the kernel takes back if it needs memory. Arguments are checked by
    the call, but for `options`; files are opened with the first tensor. Closing the iterator ends
    the reads. After an error, each further `next` raises it again.

    Args:
        source: A file, a directory, an index file, or a model id, as for `load_file`; or a list of
            .safetensors files, which are read as one checkpoint.
        device: Where the tensors are needed, as for `load_file`.
        names: As for `load_file`. None yields all.
        slices: As for `load_file`.
        order: "file" for the order of `names` or the files; "layers" for the order in which a model
            uses the tensors: embeddings, layer after layer, norms, heads.
        backend: As for `load_file`.
        cache: As for `load_file`.
        page_cache: As for `load_file`.
        options: As for `load_file`.
        window_bytes: Bytes that are read together. A larger tensor is a window of its own; with
            `group` it is divided, and a window has 64 KiB or more.
        group: As for `load_file`. The ranks read window by window together: a rank that takes no
            tensors for `stall_seconds` ends the load of all. The order is that of `names` if all
            ranks want the same tensors, else of the files or layers.
        shards: As for `load_file`.
        readers: As for `load_file`.
        progress: As for `load_file`.
        stall_seconds: As for `load_file`.
        verify: As for `load_file`.
        on_event: As for `load_file`.
        revision: As for `load_file`.
        subfolder: As for `load_file`.
        variant: As for `load_file`.
        cache_dir: As for `load_file`.
        strict: As for `load_file`.
        header_limit: Largest accepted header, in bytes.

    Yields:
        (name, tensor). Each tensor owns its memory or keeps it alive.

    Raises:
        ValueError: `order`, `cache`, `page_cache`, `verify` or `window_bytes` has no such value.
        GdsloadError: As for `load_file`, but no SafetensorError. A changed file is detected at the
            end of each window, a dtype that torch lacks before the first tensor.

    Example:
        >>> for name, tensor in gdsload.stream("model", order="layers"):
        ...     print(name, tuple(tensor.shape))
    """
    if order not in ("file", "layers"):
        raise ValueError(f'order={order!r} must be "file" or "layers"')
    if not window_bytes >= 1:
        raise ValueError(f"window_bytes={window_bytes!r} must be at least 1")
    title_of(source)  # or TypeError
    settings = ReadSettings(backend, cache, page_cache, options, stall_seconds, verify, on_event)
    if settings.backend != "auto":
        find(settings.backend)  # or BackendUnavailable
    names = repeatable(names)  # or TypeError
    device = device_name.require_target(device)
    lookup = Lookup(revision, subfolder, variant, cache_dir, strict, header_limit, stall_seconds)
    call = _LoadCall(source, settings, device, lookup, names, slices, progress, order)
    sharing = _sharing(group, shards, readers)
    if sharing is not None:
        return _Stream(call.shared(sharing, window_bytes, held_bytes=window_bytes))

    def read() -> Generator[tuple[str, torch.Tensor], None, None]:
        with call.opened() as (session, wanted, advance):
            pairs = load_in_windows(session, wanted.parts, window_bytes, device, advance)
            with closing(pairs):
                yield from wanted.assembled(session, pairs)

    return _Stream(read())


class _Stream:
    """The tensors of a generator. The error that ends it is raised by each later `next`, too: an
    end without an error would be that of a complete checkpoint."""

    def __init__(self, tensors: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        self._tensors = tensors
        self._error: BaseException | None = None

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._error is not None:
            raise without_traceback(self._error)
        try:
            return next(self._tensors)
        except StopIteration:
            raise
        except BaseException as error:  # also Ctrl-C
            # Otherwise the generator still runs: `next` was called by another thread, or by an
            # observer of this stream.
            if self._tensors.gi_frame is None:  # type: ignore[attr-defined]
                self._keep(error)
            raise

    def _keep(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            self._error = GdsloadError(f"this stream was ended by {type(error).__name__}")
            return
        self._error = without_traceback(error)

    def close(self) -> None:
        self._tensors.close()


class _Wanted:
    """The tensors that a load returns, and `parts`: what it reads, in that order. `whole`: the same
    ones, not parts of them. `nbytes` is their size, `read_bytes` that of the parts."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Names,
        slices: Mapping[str, Any] | None,
        order: str = "file",
    ) -> None:
        self.whole = not slices
        self._tensors: list[WantedTensor] = []
        infos = _arranged(order, checkpoint.infos(names))
        self.number, self.parts = len(infos), infos
        if slices:
            from gdsload.planning.tensor_slices import wanted_tensors

            self._tensors = wanted_tensors(infos, slices)
            self.parts = [part for each in self._tensors for part in each.slice.parts]
        # The first read waits for these figures.
        all_of_it = self.whole and len(infos) == len(checkpoint.tensors)
        self.read_bytes = checkpoint.total_bytes if all_of_it else bytes_of(self.parts)
        self.nbytes = sum(each.nbytes for each in self._tensors) if slices else self.read_bytes

    def assembled(
        self, session: Session, pairs: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of what is wanted, from (name, tensor) of the parts in their order.

        Raises FileChanged.
        """
        if self.whole:
            yield from pairs
            return
        pairs = iter(pairs)
        for wanted in self._tensors:
            parts = [tensor for _, tensor in islice(pairs, len(wanted.slice.parts))]
            shard = wanted.info.shard
            # Copied from a file that may have changed since the last tensor was handed out, and may
            # change now.
            copied = (len(parts) > 1 or wanted.slice.index is not None) and any(
                session.maps(part, shard) for part in parts
            )
            if copied:
                session.checkpoint.verify_unchanged({shard})
            tensor = assembled(wanted.slice, parts)
            if copied:
                session.checkpoint.verify_unchanged({shard})
            del parts
            yield wanted.info.name, tensor.squeeze(wanted.removed) if wanted.removed else tensor
            del tensor


class _LoadCall(NamedTuple):
    """What one call of `load_file` or `stream` was asked for. `device` is the name of a device."""

    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    settings: ReadSettings
    device: str
    lookup: Lookup
    names: Names
    slices: Mapping[str, Any] | None
    progress: bool | None
    order: str

    @contextmanager
    def opened(
        self, *, shared: bool = False
    ) -> Iterator[tuple[Session, _Wanted, Callable[[int], None]]]:
        """A session for the load, what it reads, and the function for its progress bar. `shared`:
        whether other ranks get copies of what it reads."""
        source, settings, device = self.source, self.settings, self.device
        report = LoadReport(title_of(source), device=device, on_event=settings.on_event)
        with report.whole(), quiesce.loading(report.source), ExitStack() as stack:
            device_init = None
            if device_name.device_kind(device) == "cuda":
                from gdsload.loading.device_init import begin

                paths: Any = source if isinstance(source, (list, tuple)) else [source]
                first = next(iter(paths), "")
                if device_init := begin(device, settings.backend, settings.options, first):
                    stack.callback(device_init.join_briefly)
            with report.phase("open"):
                checkpoint = stack.enter_context(self.lookup.open(source))
                stack.enter_context(checkpoint.locating_errors())
                wanted = _Wanted(checkpoint, self.names, self.slices, self.order)
            if device_init is not None:
                with report.phase("wait for the device"):
                    device_init.finish()
            report.tensors, report.wanted_bytes = wanted.number, wanted.nbytes
            verifier = verifier_of(checkpoint, settings.verify, report)
            session = stack.enter_context(
                open_session(
                    checkpoint,
                    report,
                    settings,
                    device,
                    report.wanted_bytes,
                    verifier,
                    copies=shared or not wanted.whole,
                )
            )
            # What a rank wants is known when all ranks have met.
            advance = stack.enter_context(progress_bar(self.progress, lambda: report.wanted_bytes))
            yield session, wanted, advance

    def shared(
        self,
        sharing: Sharing,
        window_bytes: int,
        *,
        found: list[str] | None = None,
        held_bytes: int | None = None,
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The tensors of a load that the ranks of a group share. `found` gets the names that this
        rank wants, in its order; `held_bytes` limits the tensors at a time. Raises ValueError."""
        from gdsload.distribution.shared_load import NOT_COMPARED, shared_tensors

        if self.slices:
            raise ValueError("slices= and group= cannot be combined: shards= divides tensors")
        if self.settings.verify != "size":
            raise ValueError(NOT_COMPARED)

        @contextmanager
        def whole() -> Iterator[tuple[Session, list[TensorInfo], Callable[[int], None]]]:
            with self.opened(shared=True) as (session, wanted, advance):
                if found is not None:
                    found.extend(info.name for info in wanted.parts)
                yield session, wanted.parts, advance

        return shared_tensors(
            sharing,
            whole,
            partial(_arranged, self.order),
            window_bytes,
            self.device,
            self.settings.stall_seconds,
            held_bytes,
        )


def _arranged(order: str, infos: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Tensors in the order that `order` of `stream` names; "file" leaves them as they are."""
    if order == "layers":
        from gdsload.planning.layer_order import in_layers

        return in_layers(infos)
    return list(infos)


def _sharing(group: ProcessGroup | None, shards: Shards | None, readers: str) -> Sharing | None:
    """How ranks share this load; None if this process reads alone. Raises ValueError."""
    if group is None and shards is None and readers == "node":
        return None
    from gdsload.distribution.shared_load import Sharing

    return Sharing.of(group, shards, readers)


def plan(
    source: str | os.PathLike[str],
    names: Names = None,
    *,
    slices: Mapping[str, Any] | None = None,
    window_bytes: int = 0,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    strict: bool = True,
    header_limit: int = HEADER_LIMIT_BYTES,
) -> ReadPlan:
    """Plans the reads of a cold load past the page cache. Only headers are read.

    Args:
        source: A file, a directory, an index file, or a model id, as for `load_file`.
        names: As for `load_file`, in the order of use. None plans all, in file order.
        slices: As for `load_file`.
        window_bytes: Size of a read window in bytes; 0 plans one window.
        revision: As for `load_file`.
        subfolder: As for `load_file`.
        variant: As for `load_file`.
        cache_dir: As for `load_file`.
        strict: As for `load_file`.
        header_limit: Largest accepted header, in bytes.

    Returns:
        The ordered reads, with offsets and sizes in bytes.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or inconsistent, or no tensor has a name
            or matches a pattern.
        IndexError: An index in `slices` is outside its tensor.
        ValueError: `window_bytes` is negative.
        PlacementError: The plan of so many bytes does not fit into memory.

    Example:
        >>> print(gdsload.plan("model").summary())
    """
    from gdsload._native.system import direct_alignment

    if not window_bytes >= 0:
        raise ValueError(f"window_bytes={window_bytes!r} must be at least 0")
    lookup = Lookup(revision, subfolder, variant, cache_dir, strict, header_limit)
    with lookup.open(source) as checkpoint:
        alignments = [
            None if shard.remote is not None else direct_alignment(shard.fd)
            for shard in checkpoint.shards
        ]
        remote = remote_backend_of(checkpoint)
        limits = find(remote)().limits() if remote else Limits()
        with checkpoint.locating_errors():
            ranges = ranges_of(_Wanted(checkpoint, names, slices).parts)
        require_room_to_plan(bytes_of(ranges), limits)
        return plan_reads(
            ranges,
            [shard.size for shard in checkpoint.shards],
            limits,
            blocks=[max(pair or (0,)) or DEFAULT_BLOCK_BYTES for pair in alignments],
            window_bytes=window_bytes,
            gap_bytes=REMOTE_GAP_BYTES if remote else GAP_BYTES,
        )
