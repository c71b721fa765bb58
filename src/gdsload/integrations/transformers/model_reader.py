"""The weights of one model on their way into it: files opened, forecast made, reads under way.

`ModelReader` is what transformers' loading is given in place of a state dict. It owns the files,
the
reads and their memory, and gives all of it back when it is closed. Each device that reads can go to
has a session and a feed of its own, so that all of them are filled at once.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from gdsload.backends import DRAM, choose, reaches
from gdsload.checkpoint import Checkpoint
from gdsload.integrations.transformers.lazy_slices import (
    LazySlice,
    MappedSlice,
    OpenedFile,
    PlacedSlice,
    StateDict,
)
from gdsload.integrations.transformers.load_plan import SKIP, LoadPlan, forecast
from gdsload.integrations.transformers.monkeypatch import Misfit
from gdsload.integrations.transformers.parameter_buffers import ParameterBuffers
from gdsload.integrations.transformers.parameter_writer import ParameterWriter
from gdsload.integrations.transformers.readahead_queue import (
    AHEAD_BYTES,
    WINDOW_BYTES,
    ReadaheadQueue,
    ReadWindow,
)
from gdsload.loading import device_batch
from gdsload.loading.claims import waiting_on
from gdsload.loading.session import STALL_SECONDS, Session
from gdsload.planning.tensor_slices import TensorSlice, runs_of, whole
from gdsload.report import LoadReport
from gdsload.system import cancellation
from gdsload.system.gc_control import collector_paused


@dataclass(frozen=True, slots=True)
class Options:
    """How weights are read: as for `load_file`, with the bytes of a window and of what is read
    ahead of transformers."""

    backend: str = "auto"
    cache: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    stall_seconds: float = STALL_SECONDS
    window_bytes: int = WINDOW_BYTES
    ahead_bytes: int = AHEAD_BYTES


class ModelReader:
    """An opened checkpoint whose tensors are asked for by somebody else."""

    def __init__(self, files: Sequence[str], options: Options, report: LoadReport) -> None:
        """Opens the files; nothing is read. Raises CheckpointError and its kinds."""
        self.report = report
        self.options = options
        self.forecast = LoadPlan()
        # Where transformers' loop is: the parameter of the last key, and those with a converter.
        self.named = ""
        self.converted: set[str] = set()
        self.destinations = ParameterBuffers([])
        self._stack = ExitStack()
        with ExitStack() as stack:
            with report.phase("open"):
                # As transformers: of two files that hold a tensor the last one's counts.
                self.checkpoint = stack.enter_context(Checkpoint.of(files, strict=False))
            # What leads to devices alone is not asked to bring anything here.
            lands = reaches(options.backend, DRAM)
            self.session = stack.enter_context(
                Session(
                    self.checkpoint,
                    report,
                    backend=options.backend if lands else "auto",
                    cache=options.cache,
                    options=options.options if lands else {},
                    stall_seconds=options.stall_seconds,
                )
            )
            self.feed = ReadaheadQueue(self.session)
            self.filling = ParameterWriter(self.session, self.destinations)
            self._stack = stack.pop_all()
        self._device_feeds: dict[str, ReadaheadQueue] = {}
        self._reached: dict[str, str] = {}  # where reads go for a device

    def foresee(self, model: Any, load_config: Any) -> None:
        """Labels every tensor and puts the first reads on their way.

        Raises Misfit where transformers' inner parts are not what was expected, BackendUnavailable,
        PlacementError, ReadError.
        """
        with self.report.phase("label"), collector_paused():
            try:
                found = forecast(model, load_config, self.checkpoint.tensors, self._reach)
            except (AttributeError, ImportError, KeyError, LookupError, TypeError) as error:
                raise Misfit(f"{type(error).__name__}: {error}") from error
        self.forecast = found
        self.report.fates = found.count()
        devices = sorted(set(found.devices.values()))
        if not devices and not reaches(self.options.backend, DRAM):
            choose("cpu", self.options.backend, self.options.options)  # raises, and says why
        for device in devices:
            self._device_feeds[device] = self._device_feed_of(device, found)
        if devices:
            here = ["cpu"] if len(found.devices) < len(found.labels) - found.count()[SKIP] else []
            self.report.device = ",".join(here + devices)
        self.feed = self._feed_of(self.session, found.slices_of("cpu"), found.kept)
        self._start(self.feed)
        with self.report.phase("prepare"):
            self.destinations = self._stack.enter_context(ParameterBuffers(found.targets))
        placed = [info for name, info in self.checkpoint.tensors.items() if name in found.placed]
        self.filling = self._stack.enter_context(
            ParameterWriter(
                self.session,
                self.destinations,
                placed,
                window_bytes=self.options.window_bytes,
                ahead_bytes=self.options.ahead_bytes,
            )
        )
        self._start(self.filling)
        self.destinations.start()

    def _reach(self, device: str) -> str:
        if device not in self._reached:
            self._reached[device] = device_batch.reached(device, self.options.backend)
        return self._reached[device]

    def _device_feed_of(self, device: str, found: LoadPlan) -> ReadaheadQueue:
        """A feed that has its backend, and begins when transformers has warmed up the allocator."""
        from gdsload.integrations.transformers.device_queue import DeviceReadWindow

        slices, options = found.slices_of(device), self.options
        session = self._stack.enter_context(
            Session(
                self.checkpoint,
                self.report,
                device=device,
                backend=options.backend,
                expected_bytes=sum(tensor_slice.nbytes for tensor_slice in slices),
                cache=options.cache,
                options=options.options,
                stall_seconds=options.stall_seconds,
            )
        )
        session.open()
        return self._feed_of(session, slices, found.kept, DeviceReadWindow)

    def _feed_of(
        self,
        session: Session,
        slices: Sequence[TensorSlice],
        kept: Container[str] = (),
        stages: type[ReadWindow] = ReadWindow,
    ) -> ReadaheadQueue:
        options = self.options
        return self._stack.enter_context(
            ReadaheadQueue(
                session,
                slices,
                kept=kept,
                window_bytes=options.window_bytes,
                ahead_bytes=options.ahead_bytes,
                stages=stages,
            )
        )

    def settled_parameters(self) -> set[str]:
        """Those that are on their device already, or on their way there, and need no memory of
        torch's."""
        found: set[str] = set()
        parameters, seconds = self.forecast.parameters, self.options.stall_seconds
        for device in self._device_feeds:
            infos = [self.checkpoint.tensors[key] for key in parameters
                     if self.forecast.devices.get(key) == device]  # fmt: skip
            pieces = runs_of(map(whole, infos))
            there = waiting_on(device, self.checkpoint, pieces, seconds)
            found |= {parameters[name] for name in there}
        return found

    def _start(self, giver: ReadaheadQueue | ParameterWriter) -> None:
        """Puts its first reads on their way; Ctrl-C ends them."""
        self._stack.enter_context(cancellation.ended_by(giver.close))
        giver.start()

    def begin(self) -> None:
        """Puts the first reads to devices on their way: their tensors are taken from what
        transformers has made torch's allocator hold. For the first use of `slices`. Raises
        PlacementError and ReadError."""
        for feed in self._device_feeds.values():
            feed.start()

    def expect(self, names: Sequence[str]) -> None:
        """Puts the first of these tensors on their way, in this order."""
        tensors = self.checkpoint.tensors
        labels = self.report.fates
        labels["materialised"] = labels.get("materialised", 0) + len(names)
        labels["skip"] = labels.get("skip", 0) + len(tensors) - len(names)
        self.feed = self._feed_of(self.session, [whole(tensors[name]) for name in names])
        self._start(self.feed)

    @collector_paused()
    def slices(self) -> StateDict:
        """A slice for every tensor, by its name in the checkpoint. Reads to devices `begin` when
        the first of them is looked at."""
        feed, filling = self.feed, self.filling
        placed, lazy = self.forecast.placed, self.forecast.lazy
        feeds = {name: self._device_feeds[to] for name, to in self.forecast.devices.items()}
        slices = {
            name: PlacedSlice(feed, info, filling) if name in placed
            else MappedSlice(feed, info) if name in lazy
            else LazySlice(feeds.get(name, feed), info)
            for name, info in self.checkpoint.tensors.items()
        }  # fmt: skip
        return StateDict(slices, self.begin)

    def opened(self, device: Any = "cpu", *, owned: bool = False) -> OpenedFile:
        """The checkpoint as an opened file; where it is `owned`, leaving it finishes and closes
        this."""
        leave = self._finish_and_close if owned else None
        return OpenedFile(self.checkpoint, self.feed, device, leave)

    def finish(self) -> None:
        """To be called when the model has all it asked for, before anybody gets it.

        Raises FileChanged when a file was touched meanwhile.
        """
        self.checkpoint.verify_unchanged()
        report = self.report
        givers: list[ReadaheadQueue | ParameterWriter] = [
            self.feed,
            self.filling,
            *self._device_feeds.values(),
        ]
        for giver in givers:
            report.tensors += giver.taken.tensors
            report.wanted_bytes += giver.taken.nbytes
            report.phases["wait"] = report.phases.get("wait", 0.0) + giver.waited_seconds

    def _finish_and_close(self) -> None:
        try:
            self.finish()
        finally:
            self.close()

    def close(self) -> None:
        """Ends all reads, and gives back memory and descriptors. May be called again."""
        self._stack.close()

    def __enter__(self) -> ModelReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
