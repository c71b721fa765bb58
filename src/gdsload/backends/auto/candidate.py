"""A backend that the backend `auto` may read with: opened on first use, or before in a thread.

Not responsible for when it is used, abandoned or closed (`backend`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from gdsload._native.cuda import CudaFailure
from gdsload.backends.auto.benchmark import FALLBACK
from gdsload.backends.auto.request import AutoRequest, Part
from gdsload.backends.auto.transfers import split
from gdsload.backends.base import NO_FILE, Backend, Registration, open_for
from gdsload.errors import BackendUnavailable
from gdsload.planning.read_plan import Transfer
from gdsload.system import gpu
from gdsload.system.stall import StallWatch
from gdsload.system.threads import SafeEvent, start_thread

_POLL_SECONDS = 0.1  # a forked child waits this long for a thread that it does not have


class Candidate:
    """A backend that a load may use.

    Attributes:
        files: The files that are registered with it, by their numbers.
        abandoned: Why it is no longer used, or "".
        failures: The transfers that failed, in words.
        read_bytes: All bytes that it has read, in parts that have ended.
        compat_bytes: Those that cuFile read in compatibility mode.
        fixed_seconds: The time to open it; -1 if it was never opened.
        watch: Notices that its reads have stalled.
        working: A thread that opens or closes the backend, or None.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self.name = backend, backend.name
        self.files: dict[int, Registration] = {}
        self.abandoned, self.failures = "", list[str]()
        self.read_bytes = self.compat_bytes = 0
        self.fixed_seconds = -1.0
        self.watch = StallWatch()
        self.working: threading.Thread | None = None
        self._idle = SafeEvent()  # `working` has ended

    def post(self, whole: AutoRequest, transfers: Sequence[Transfer], device: str) -> Part:
        """Posts transfers of a request, split to the largest read of the backend.

        Raises:
            BackendUnavailable: The backend does not open.
            CuFileError: The backend refuses a file.
            PlacementError: There is no room for its ring.
        """
        self.await_thread()
        started, backend = time.monotonic(), self.backend
        files = [NO_FILE] * len(whole.files)
        for shard in {transfer.shard for transfer in transfers}:
            files[shard] = self.register(whole.files[shard])
        limit = backend.limits(device).max_request
        reads = [read for transfer in transfers for read in split(transfer, limit)]
        if whole.stream is not None and not backend.follow(device, whole.stream):
            why = f"{device} cannot order its streams"
            if self.name != FALLBACK:
                raise BackendUnavailable(f"backend {self.name!r}: {why}", {self.name: why})
            try:
                gpu.device(gpu.ordinal_of(device)).synchronize(whole.stream)
            except CudaFailure as error:
                raise BackendUnavailable(f"{why}: {error}", {self.name: str(error)}) from error
        memory: list[Registration] = []
        with ExitStack() as taken:  # released in reverse order; here only if something fails
            for entry in whole.memory:
                memory.append(backend.register(entry.what))
                taken.callback(backend.deregister, memory[-1])
            request = backend.prepare(reads, files, memory)
            taken.callback(backend.release, request)
            if self.fixed_seconds < 0:
                self.fixed_seconds = time.monotonic() - started
            if whole.ahead:
                backend.yield_to_loads(request, True)
            backend.post(request)
            whole.parts.append(Part(self, reads, request, taken.pop_all()))
        return whole.parts[-1]

    def register(self, file: Registration) -> Registration:
        """The backend's own registration of a file, made at the first call."""
        if file.handle not in self.files:
            self.files[file.handle] = self.backend.register(file.what)
        return self.files[file.handle]

    @property
    def failed(self) -> str:
        """The failures in words."""
        return f"{len(self.failures)} ranges failed, first {self.failures[0]}"

    def start_opening(self, device: str) -> None:
        """Opens the backend in a thread, which the first `post` waits for."""
        self._start(partial(self._open, device), "gdsload-open")

    def start_closing(self) -> None:
        """Closes the backend in a thread: freeing its ring may take longer than a read."""
        self._start(self._close, "gdsload-close")
        if self.working is None:
            self._close()

    def _start(self, work: Callable[[], None], name: str) -> None:
        idle = self._idle = SafeEvent()

        def run() -> None:
            try:
                work()
            finally:
                idle.set()

        self.working = start_thread(run, name)

    def await_thread(self) -> None:
        """Waits for the thread that opens or closes the backend."""
        # Not `join`: after one that Ctrl-C has interrupted, the thread counts as ended.
        while self.working is not None and not self._idle.wait(_POLL_SECONDS):
            if not self.working.is_alive():  # in a forked child
                break
        self.working = None

    def close(self) -> None:
        """Closes the backend; the next use opens it again."""
        self.await_thread()
        self._close()

    def _open(self, device: str) -> None:
        started = time.monotonic()
        with suppress(Exception):  # `post` raises the same error
            open_for(self.backend, device)
            self.fixed_seconds = time.monotonic() - started

    def _close(self) -> None:
        while self.files:
            self.backend.deregister(self.files.popitem()[1])
        self.backend.close()
