"""The weights of one model while transformers loads it: open files, load plan, reads in flight.

`ModelReader` gives transformers a dict of lazy slices instead of a state dict. It owns the files,
the reads and their memory. Each device that reads can go to has its own session and readahead
queue, so that all devices are filled at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gdsload._native.ranges import bytes_of
from gdsload.backends import DRAM, choose, reaches
from gdsload.checkpoint import Checkpoint, Identity
from gdsload.distribution.reader_group import ReaderGroup, reason_of, require_readers
from gdsload.distribution.shared_load import NOT_COMPARED
from gdsload.distribution.shares import Box
from gdsload.errors import CheckpointError
from gdsload.integrations.transformers.lazy_slices import (
    LazySlice,
    MappedSlice,
    OpenedFile,
    SeveralSlices,
    ShapeSlice,
    StateDict,
    WrittenSlice,
)
from gdsload.integrations.transformers.load_plan import SKIP, LoadPlan, load_plan_of
from gdsload.integrations.transformers.monkeypatch import Misfit
from gdsload.integrations.transformers.parameter_buffers import ParameterBuffers
from gdsload.integrations.transformers.parameter_writer import ParameterWriter
from gdsload.integrations.transformers.readahead_queue import ReadaheadQueue
from gdsload.integrations.transformers.shared_queue import SharedQueue
from gdsload.integrations.transformers.stand_ins import (
    open_checkpoint,
    opened_as,
    original,
    with_extra_files,
)
from gdsload.integrations.transformers.tied_weights import TiedWeights
from gdsload.loading import device_batch
from gdsload.loading.claims import prefetched_to
from gdsload.loading.page_cache_fill import FILL_SHARE
from gdsload.loading.session import Session, verifier_of
from gdsload.loading.settings import ReadSettings
from gdsload.planning.tensor_slices import TensorSlice, part_ranges, whole
from gdsload.report import LoadReport
from gdsload.system import gpu, quiesce
from gdsload.system.device_name import plain_name
from gdsload.system.gc_control import collector_paused

MOSTLY_WRITTEN = "tensors that are cast or merged bypass it"


@dataclass(frozen=True, slots=True)
class Options:
    """How weights are read: the arguments of `accelerated`, and the group of `from_pretrained`.
    Raises ValueError, and BackendUnavailable for an unknown backend."""

    reading: ReadSettings = field(default_factory=ReadSettings)
    group: Any = None  # of torch.distributed: its ranks share the reads
    readers: str = "node"

    def __post_init__(self) -> None:
        require_readers(self.readers)
        reaches(self.reading.backend, DRAM)  # raises for an unknown name
        if self.group is not None and self.reading.verify != "size":
            raise ValueError(NOT_COMPARED)

    def with_reading(self, **changes: Any) -> Options:
        """The same options but for these settings. Raises ValueError."""
        return replace(self, reading=self.reading.changed(**changes))


@contextmanager
def _checkpoint_of(
    files: Sequence[str], extra_files: Sequence[str], stall_seconds: float
) -> Iterator[Checkpoint]:
    """These files as one checkpoint. Of two files that hold a tensor the last one counts, as in
    transformers. A checkpoint that is open before is left open."""
    known, before = opened_as(files), open_checkpoint.get()
    if known is not None and (found := with_extra_files(known, extra_files, stall_seconds)):
        with Checkpoint.located(found, strict=False, stall_seconds=stall_seconds) as checkpoint:
            yield checkpoint
        return
    if known is None and before is not None and _are_of(before, files):
        known = before
    if known is not None:
        yield known
        return
    paths = [original(file) for file in files]
    with Checkpoint.of(paths, strict=False, stall_seconds=stall_seconds) as checkpoint:
        yield checkpoint


def _are_of(known: Checkpoint, files: Sequence[str]) -> bool:
    """Whether these files are the shards of an open checkpoint."""
    try:
        found = [Identity.of(os.stat(file)) for file in files]
    except OSError:
        return False
    return found == [shard.identity for shard in known.shards]


class ModelReader:
    """An open checkpoint whose tensors are requested by transformers. Must be closed."""

    def __init__(
        self,
        files: Sequence[str],
        options: Options,
        report: LoadReport,
        extra_files: Sequence[str] = (),
    ) -> None:
        """Opens the files; reads nothing.

        Args:
            files: Their paths. Those of a URL are stand-ins.
            options: How they are read.
            report: The report of the load.
            extra_files: Names of files that a URL may have in addition.

        Raises CheckpointError.
        """
        self.report = report
        self.options = options
        self.plan = LoadPlan()
        # State of transformers' loop: the parameter of the last key, and those with a converter.
        self.renamed = ""
        self.replaces_threads = False  # transformers would have made the tensors in others
        self.converted: set[str] = set()
        self.buffers = ParameterBuffers([])
        self.ties = TiedWeights()
        self._device_queues: dict[str, ReadaheadQueue] = {}
        self._shared: SharedQueue | None = None  # one of these queues
        self._devices: dict[str, str] = {}  # the device that reads go to, by wanted device
        with ExitStack() as stack:
            with report.phase("open"):
                seconds = options.reading.stall_seconds
                stack.enter_context(quiesce.loading(report.source))
                self.checkpoint = stack.enter_context(_checkpoint_of(files, extra_files, seconds))
            self.verifier = verifier_of(self.checkpoint, options.reading.verify, report)
            self.session = stack.enter_context(self._session("cpu"))
            self.queue = ReadaheadQueue(self.session)
            self.writer = ParameterWriter(self.session, self.buffers)
            self._stack = stack.pop_all()

    def start(self, model: Any, load_config: Any) -> None:
        """Makes the load plan and posts the first reads to the host.

        Raises:
            Misfit: transformers' internals are not as expected.
            BackendUnavailable, PlacementError, ReadError
        """
        with self.report.phase("load plan"), collector_paused():
            try:
                plan = load_plan_of(
                    model,
                    load_config,
                    self.checkpoint.tensors,
                    self._read_device_of,
                    shared=self.options.group is not None,
                )
            except (AttributeError, ImportError, LookupError, TypeError) as error:
                raise Misfit(f"{type(error).__name__}: {error}") from error
        self._use(plan)
        options = self.options
        self.ties = TiedWeights(model)
        reading = options.reading
        written = [info for name, info in self.checkpoint.tensors.items() if name in plan.written]
        to_host = plan.slices.get("cpu", [])
        read_bytes, written_bytes = sum(one.nbytes for one in to_host), bytes_of(written)
        buffer_bytes = sum(buffer.nbytes for buffer in plan.buffers)
        self.session.expect(read_bytes + written_bytes, buffer_bytes)
        # Reads of a part into the page cache read bytes beside it, which windows read as well.
        in_part = read_bytes < FILL_SHARE * (read_bytes + written_bytes)
        devices = sorted(set(plan.devices.values()))
        shared = self._shared_device()
        if not devices and not reaches(reading.backend, DRAM):
            choose("cpu", reading.backend, reading.options)  # raises with the reasons
        for device in devices:
            slices = plan.slices.get(device, [])
            session = self._stack.enter_context(self._session(device, slices))
            session.open()  # its reads begin after transformers has warmed up the allocator
            self._device_queues[device] = (
                self._shared_queue(session) if device == shared else self._queue(session, slices)
            )
        if devices:
            read = len(plan.fates) - plan.count()[SKIP]
            self.report.device = ",".join(["cpu"] * (len(plan.devices) < read) + devices)
        self.queue = (
            self._shared_queue(self.session)
            if shared == "cpu"
            else self._queue(self.session, to_host, MOSTLY_WRITTEN if in_part else "")
        )
        self.queue.start()
        with self.report.phase("prepare"):
            self.buffers = self._stack.enter_context(ParameterBuffers(plan.buffers, plan.twins))
        self.writer = self._stack.enter_context(
            ParameterWriter(self.session, self.buffers, written)
        )
        self.writer.start()
        self._count(plan.count())

    def _use(self, plan: LoadPlan) -> None:
        """Takes a plan. Raises CheckpointError if it maps remote files."""
        # Also if the local cache has them: transformers knows the stand-ins, which are removed.
        if plan.lazy and any(shard.directory is not None for shard in self.checkpoint.shards):
            raise CheckpointError(
                f"{self.checkpoint.source}: device_map leaves tensors on disk, but these are"
                " remote files"
            )
        self.plan = plan

    def _read_device_of(self, device: str) -> str:
        if device not in self._devices:
            self._devices[device] = device_batch.read_device(device, self.options.reading.backend)
        return self._devices[device]

    def _session(self, device: str, slices: Sequence[TensorSlice] = ()) -> Session:
        """A session for reads to a device, and for these slices if they are known."""
        reading = self.options.reading
        return Session(
            self.checkpoint,
            self.report,
            reading.for_host() if device == "cpu" else reading,
            device=device,
            copies=any(wanted != read == device for wanted, read in self._devices.items()),
            expected_bytes=sum(one.nbytes for one in slices),
            verifier=self.verifier,
        )

    def _queue(
        self, session: Session, slices: Sequence[TensorSlice], past_cache: str = ""
    ) -> ReadaheadQueue:
        return self._stack.enter_context(
            ReadaheadQueue(session, slices, kept=self.plan.kept, past_cache=past_cache)
        )

    def _shared_device(self) -> str | None:
        """The device of the slices that the ranks read together: that of most bytes. None if this
        rank reads alone."""
        if self.options.group is None:
            return None
        sizes = {
            device: sum(one.nbytes for one in slices) for device, slices in self.plan.slices.items()
        }
        return max(sizes, key=lambda device: sizes[device], default="cpu")

    def _shared_queue(self, alone: Session) -> SharedQueue:
        """The queue of slices that the ranks read together; `alone` reads the unpredicted ones."""
        plan, options = self.plan, self.options
        wanted: dict[str, tuple[str, Box]] = {}
        names: set[str] = set()
        slices = plan.slices.get(alone.device, ())
        for one in slices:
            name, box = plan.boxes.get(one.key, ("", ()))
            if name and name not in names:  # of another box of it this rank reads its own bytes
                names.add(name)
                wanted[one.key] = name, box
        session = self._stack.enter_context(self._session(alone.device, slices))
        readers = ReaderGroup(options.group, options.readers, options.reading.stall_seconds)
        try:
            queue = SharedQueue(session, alone, readers, wanted, kept=plan.kept, order=plan.fates)
        except BaseException:
            readers.close()
            raise
        self._stack.enter_context(queue)
        self._shared = queue
        return queue

    def begin_device_reads(self) -> None:
        """Posts the first reads to devices. To be called after transformers has warmed up torch's
        allocator, which provides their memory. Raises PlacementError and ReadError."""
        for queue in self._device_queues.values():
            queue.start()

    def parameters_in_memory(self) -> set[str]:
        """Parameters that need no memory of torch's allocator: they are prefetched to their
        device."""
        found: set[str] = set()
        plan, seconds = self.plan, self.options.reading.stall_seconds
        for device in self._device_queues:
            keys = [key for key in plan.parameters if plan.devices.get(key) == device]
            ranges = part_ranges(whole(self.checkpoint.tensors[key]) for key in keys)
            names = prefetched_to(device, self.checkpoint, ranges, seconds, self.report)
            found.update(plan.parameters[name] for name in names)
        return found

    def start_in_order(self, names: Sequence[str], on_disk: set[str]) -> None:
        """Posts the first reads of these tensors, in this order. Those `on_disk` are not read.
        Raises CheckpointError for one that there is none of."""
        self._use(LoadPlan(lazy=on_disk))
        self._count({"materialised": len(names), SKIP: len(self.checkpoint.tensors) - len(names)})
        slices = [whole(self.checkpoint.info(name)) for name in names]
        self.queue = self._queue(self.session, slices)
        self.queue.start()

    def _count(self, fates: Mapping[str, int]) -> None:
        """Adds to the report, which may be of several shards, or of a model and its adapter."""
        found = self.report.fates
        for fate, number in fates.items():
            found[fate] = found.get(fate, 0) + number

    @collector_paused()
    def slices(self) -> StateDict:
        """A slice for every tensor, by its name in the checkpoint. The first access to one begins
        the reads to devices."""
        plan = self.plan
        slices: dict[str, LazySlice] = {}
        for name, info in self.checkpoint.tensors.items():
            if name in plan.written:
                slices[name] = WrittenSlice(self.queue, info, self.writer)
            elif name in plan.lazy:
                slices[name] = MappedSlice(self.queue, info)
            elif name in plan.shapes:
                slices[name] = ShapeSlice(self.queue, info)
            else:
                queue = self._device_queues.get(plan.devices.get(name, ""), self.queue)
                base = plan.bases.get(name)
                slices[name] = SeveralSlices(queue, info, *base) if base else LazySlice(queue, info)
        return StateDict(slices, self.begin_device_reads)

    def opened(self, device: Any = "cpu", leave: Callable[[], None] | None = None) -> OpenedFile:
        """The checkpoint as an opened file. `leave` is called at the end of its `with` block."""
        gpu.why_not(plain_name(device))  # opens a GPU: see `gpu.capture_relaxed`
        return OpenedFile(self.checkpoint, self.queue, device, leave, self.plan.lazy)

    def finish(self) -> None:
        """Completes the report. To be called after the last tensor was taken, before the model is
        returned. Raises FileChanged if a file was modified meanwhile."""
        for queue in (self.queue, *self._device_queues.values()):
            queue.finish()
        self.checkpoint.verify_unchanged()
        report = self.report
        reads: list[ReadaheadQueue | ParameterWriter] = [self.queue, self.writer]
        for one in (*reads, *self._device_queues.values()):
            report.tensors += one.taken_tensors
            report.wanted_bytes += one.taken_bytes
            report.phases["wait"] = report.phases.get("wait", 0.0) + one.waited_seconds

    def close(self) -> None:
        """Ends all reads and releases memory and descriptors. May be called again."""
        self._stack.close()

    def __enter__(self) -> ModelReader:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and self._shared is not None:
            self._shared.reason = reason_of(error)
        self.close()
