"""A backend whose reads complete only when the test lets them: the others stay in flight."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from gdsload.backends import Backend, Memory, OpenFile, Progress, Registration, Support
from gdsload.backends.base import Failure
from gdsload.backends.registry import _registered, register_backend
from gdsload.planning.read_plan import Limits, Transfer

PATIENCE_SECONDS = 120.0


class GatedRequest:
    def __init__(
        self,
        transfers: Sequence[Transfer],
        files: Sequence[Registration],
        memory: Sequence[Registration],
    ) -> None:
        self.transfers, self.files, self.memory = transfers, files, memory
        self.settled = 0
        self.reported = 0
        self.failed: dict[int, int] = {}
        self.released = False

    def read(self, number: int) -> None:
        transfer = self.transfers[number]
        file, target = self.files[transfer.shard].what, self.memory[transfer.target].what
        assert isinstance(file, OpenFile) and isinstance(target, Memory)
        data = os.pread(file.fd, transfer.wanted, transfer.offset)
        ctypes.memmove(target.address + transfer.target_offset, data, len(data))


class Gate:
    """Completes reads, or fails them, in the order of the request."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.requests: list[GatedRequest] = []
        # The next look finds the long silence of a process that was stopped (SIGSTOP), whose bytes
        # arrive after it.
        self.stopped = False
        self.waiting = False  # a load waits, and has seen what was completed

    def request(self, number: int = 0) -> GatedRequest:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.requests) > number, PATIENCE_SECONDS), (
                "nothing was posted"
            )
            return self.requests[number]

    def wait_seen(self) -> None:
        """Waits until a load has seen all that was completed, and waits for more."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.waiting, PATIENCE_SECONDS), "none waits"

    def open(self, number: int = 0, count: int | None = None, error: int = 0) -> None:
        request = self.request(number)
        with self.changed:
            left = len(request.transfers) - request.settled
            for _ in range(left if count is None else count):
                if error:
                    request.failed[request.settled] = error
                else:
                    request.read(request.settled)
                request.settled += 1
            self.waiting = False
            self.changed.notify_all()


class GatedBackend(Backend):
    name: ClassVar[str] = "gated"
    gate: ClassVar[Gate]

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        return Support(True)

    def limits(self, device: str = "cpu") -> Limits:
        return Limits(max_request=64 << 10)

    def register(self, what: OpenFile | Memory) -> Registration:
        return Registration(what)

    def deregister(self, registration: Registration) -> None:
        pass

    def prepare(
        self,
        transfers: Sequence[Transfer],
        files: Sequence[Registration],
        memory: Sequence[Registration],
    ) -> GatedRequest:
        return GatedRequest(transfers, files, memory)

    def post(self, request: GatedRequest) -> None:
        with self.gate.changed:
            self.gate.requests.append(request)
            self.gate.changed.notify_all()

    def check(self, request: GatedRequest) -> Progress:
        if self.gate.stopped:
            self.gate.stopped = False
            self.gate.open(self.gate.requests.index(request))
            return Progress([], [], False, 1e6)
        with self.gate.changed:
            settled = range(request.reported, request.settled)
            request.reported = request.settled
            failures = [Failure(n, 0, request.failed[n]) for n in settled if n in request.failed]
            done = request.released or request.settled == len(request.transfers)
            return Progress(list(settled), failures, done)

    def wait(self, request: Any, seconds: float, first: int = 0, last: int = -1) -> None:
        with self.gate.changed:
            reported = request.reported
            self.gate.waiting = reported == request.settled
            self.gate.changed.notify_all()
            self.gate.changed.wait_for(
                lambda: request.settled > reported or request.released, seconds
            )

    def release(self, request: GatedRequest) -> None:
        with self.gate.changed:
            request.released = True
            self.gate.changed.notify_all()


@contextmanager
def gated() -> Iterator[Gate]:
    """Registers backend "gated" for the length of the block and yields its gate."""
    GatedBackend.gate = Gate()
    register_backend(GatedBackend)
    try:
        yield GatedBackend.gate
    finally:
        del _registered["gated"]
