"""Backends whose reads run in a native pump: the posix, the cuFile and the remote backends.

A `PumpedRequest` is a list of transfers in a pump. A `PumpBackend` passes the calls of the loader
to it. Not responsible for engines, and not for memory of devices: see `staging`.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gdsload._native.pump import Pump
from gdsload._native.request import Request
from gdsload.backends.base import (
    Backend,
    BackendStatus,
    Failure,
    Memory,
    OpenFile,
    Progress,
    Registrations,
    RequestFacts,
    require_own_process,
)
from gdsload.errors import BackendUnavailable
from gdsload.memory import DRAM, VRAM
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, Transfer

if TYPE_CHECKING:
    from gdsload.backends.staging import StagingPipeline


# How long a release, and then a close, waits for reads that cannot be cancelled, and for copies to
# a device, which end in microseconds. After that the pump keeps the reads, and the memory that they
# write to. Ctrl-C waits for both, half a second at most.
DRAIN_SECONDS = 0.15
# The longest read that the kernel does not shorten.
MOST_REQUEST_BYTES = 1 << 30


class PumpedRequest:
    """A list of transfers in a pump. `native` is the pump's request."""

    def __init__(
        self,
        backend: str,
        pump: Pump,
        transfers: Sequence[Transfer],
        files: Registrations,
        targets: Sequence[tuple[int, int, object | None, int]],
    ) -> None:
        """Makes the native request.

        Args:
            backend: The name of the backend, for errors.
            pump: The pump that reads.
            transfers: The reads.
            files: The files of the transfers, registered.
            targets: For each memory its address, its size in bytes, the handle that keeps it alive
                or None, and the number of the registered buffer or -1.
        """
        self.backend, self.transfers, self.files = backend, transfers, files
        table: list[tuple[int, int, int, int, int]] = []
        for number, registration in enumerate(files):
            file = registration.what
            if not isinstance(file, OpenFile):
                raise TypeError(f"file {number} of the request is {file!r}")
            table.append((file.fd, file.direct_fd, file.block, *registration.handle))
        self.native = Request(pump, table, transfers, list(targets))

    def post(self) -> None:
        """Starts it. Raises BackendUnavailable after a fork, or if the pump has ended."""
        require_own_process(self.native.pump.pid, self.backend)
        try:
            self.native.post()
        except OSError as error:
            raise BackendUnavailable(
                f"backend {self.backend!r} can read no more: {error.strerror}",
                {self.backend: str(error)},
            ) from error

    def check(self) -> Progress:
        """The progress since the last check."""
        require_own_process(self.native.pump.pid, self.backend)
        native = self.native
        # Asked first: a transfer that settles in between is reported by the next check.
        finished = native.settled == native.count or not native.posted
        settled = native.take_settled()
        bad = [number for number in settled if native.failed and native.result(number)[2]]
        return Progress(settled, [*map(self.failure, bad)], finished, native.idle_seconds)

    def failure(self, number: int) -> Failure:
        """Why a transfer failed."""
        _, got, code = self.native.result(number)
        return Failure(number, got, max(code, 0))

    def wait(self, seconds: float, first: int, last: int) -> None:
        """Returns when these transfers have settled, after `seconds` at the latest."""
        require_own_process(self.native.pump.pid, self.backend)
        self.native.wait(seconds, first, last)

    def yield_to_loads(self, ahead: bool) -> None:
        """Sets whether it is a prefetch, which gives way to loads."""
        self.native.ahead = ahead

    def facts(self) -> RequestFacts:
        """Counts and times, for the report."""
        native = self.native
        direct, _, short_reads, retries = native.counts()
        huge, small, _, _ = native.touched()
        refusals = {
            number: f"the kernel refused direct reads of it ({os.strerror(code)}):"
            f" {'the rest' if whole else 'these bytes'} came through the page cache"
            for number, code, whole in self.native.refused_direct()
        }
        times = native.trace()
        return RequestFacts(
            self.transfers, direct, short_reads, retries, refusals, times, huge, small
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing writes to its memory any more; to be asked after `end`."""
        return True

    def end(self) -> None:
        """Ends it: nothing is written to memory that can be freed any more."""
        self.native.cancel()
        self.native.wait_until_idle(DRAIN_SECONDS)


class PumpBackend(Backend):
    """A backend whose requests are `PumpedRequest`s, with one staging pipeline for each device."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._set_by_user = frozenset(options)  # the others suit the storage
        self.engine = ""
        self.refusals: dict[str, str] = {}
        self._pump: Pump | None = None
        self._pipelines: dict[str, StagingPipeline] = {}
        self._file_numbers = 0  # an engine knows descriptors by these; none is used twice

    def _require(
        self, name: str, *, least: int, most: int | None = None, multiple_of: int = 1
    ) -> None:
        """Raises ValueError for the value of an option that cannot work."""
        value = self.settings[name]
        if value >= least and (most is None or value <= most) and value % multiple_of == 0:
            return
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        multiple = f"a multiple of {multiple_of}, " if multiple_of > 1 else ""
        raise ValueError(f"{name}={value!r} must be {multiple}{limits}")

    def _require_request_options(self, most_depth: int) -> None:
        """Raises ValueError for values of `request_bytes`, `depth` and `ring_bytes` that cannot
        work."""
        block = DEFAULT_BLOCK_BYTES
        self._require("request_bytes", least=block, most=MOST_REQUEST_BYTES, multiple_of=block)
        self._require("depth", least=1, most=most_depth)
        self._require("ring_bytes", least=0)

    def _new_file_numbers(self) -> tuple[int, int]:
        """Numbers for the direct and the other descriptor of a file."""
        self._file_numbers += 2
        return self._file_numbers - 2, self._file_numbers - 1

    def prepare(
        self, transfers: Sequence[Transfer], files: Registrations, memory: Registrations
    ) -> PumpedRequest:
        if memory and isinstance(memory[0].what, Memory) and memory[0].what.kind == VRAM:
            return self._pipeline(memory[0].what.device).prepare(transfers, files, memory)
        targets = [
            (
                what.address,
                what.length,
                None if what.region is None else what.region.handle(),
                entry.handle,
            )
            for entry in memory
            if isinstance(what := entry.what, Memory)
        ]
        return PumpedRequest(self.name, self.pump, transfers, files, targets)

    @property
    def pump(self) -> Pump:
        """The pump of loads to DRAM, opened when it is first used."""
        if self._pump is None:
            self._pump = self._open_pump()
        require_own_process(self._pump.pid, self.name)
        return self._pump

    def _open_pump(self) -> Pump:
        raise BackendUnavailable(f"backend {self.name!r} does not reach {DRAM}")

    @abstractmethod
    def _open_pipeline(self, device: str) -> StagingPipeline:
        """A pipeline to a device."""

    def _pipeline(self, device: str) -> StagingPipeline:
        if device not in self._pipelines:
            self._pipelines[device] = self._open_pipeline(device)
        return self._pipelines[device]

    def post(self, request: PumpedRequest) -> None:
        request.post()

    def check(self, request: PumpedRequest) -> Progress:
        return request.check()

    def wait(self, request: PumpedRequest, seconds: float, first: int = 0, last: int = -1) -> None:
        request.wait(seconds, first, last)

    def release(self, request: PumpedRequest) -> None:
        request.end()

    def is_idle(self, request: PumpedRequest) -> bool:
        return request.is_idle

    def yield_to_loads(self, request: PumpedRequest, ahead: bool) -> None:
        request.yield_to_loads(ahead)

    def follow(self, device: str, stream: int) -> bool:
        return self._pipeline(device).follow(stream)

    def status(self) -> BackendStatus:
        return BackendStatus(self.name, self.engine, refusals=self.refusals)

    def facts(self, request: PumpedRequest) -> Sequence[RequestFacts]:
        return [request.facts()]

    def close(self) -> None:
        """Closes the pump. Pipelines of kinds that are kept are left to the next load."""
        for pipeline in self._pipelines.values():
            pipeline.park_or_close()
        self._pipelines.clear()
        if self._pump is not None:
            self._pump.close(DRAIN_SECONDS)
            self._pump = None
