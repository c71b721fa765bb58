"""Backends for remote files: object stores and peers.

    RemoteFile.chunks ─ worker threads ─┬─► host memory
                                        └─► slot of the staging ring ─► device memory

Many reads are in flight, each in a thread that waits for its source and copies what arrives. The
threads are started when they are needed. Not responsible for retries and time limits of single
requests: those are the source's own (`gdsload.remote`).
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from gdsload._native.fetch import Fetch
from gdsload._native.pump import Pump
from gdsload.backends.base import (
    NO_NUMBERS,
    BackendStatus,
    Failure,
    Memory,
    OpenFile,
    Option,
    Progress,
    Registration,
    Support,
)
from gdsload.backends.posix.backend import MOST_RING_BYTES, REQUEST_BYTES
from gdsload.backends.pump_request import PumpBackend, PumpedRequest
from gdsload.errors import BackendUnavailable, ReadError, RemoteError
from gdsload.memory import DRAM, VRAM
from gdsload.planning.read_plan import Limits
from gdsload.remote.file import RemoteFile
from gdsload.system.device_name import device_kind
from gdsload.system.storage import REMOTE_DEPTH, REMOTE_REQUEST_BYTES, Storage
from gdsload.system.threads import start_thread

if TYPE_CHECKING:
    from gdsload.backends.staging import StagingPipeline

MOST_DEPTH = 1024  # each is a thread
# A slow source shows progress by reads that end after this time, and are continued: long before any
# sensible `stall_seconds`, and longer than a read takes to start.
REPORT_SECONDS = 2.0
# The pump repeats reads that fail with these errors, without a limit.
_TEMPORARY = frozenset({errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ECANCELED})


class RemoteBackend(PumpBackend):
    """Reads files of object stores into DRAM and, through a pinned staging ring, into VRAM."""

    name: ClassVar[str] = "object_store"
    memory_kinds: ClassVar[frozenset[str]] = frozenset({DRAM, VRAM})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._require_request_options(MOST_DEPTH)
        self._fetchers: list[FetchThreads] = []
        self._files: dict[int, RemoteFile] = {}  # by the number that stands for a descriptor
        self._failures: dict[tuple[int, int], RemoteError] = {}  # by file and end of the read
        # Of files that count their own bytes: what was reported, or counted by an earlier load.
        self._counted: dict[int, Counter[str]] = {}  # bytes by path
        self._before: dict[int, Counter[str]] = {}  # failovers

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        return (
            Option("request_bytes", REMOTE_REQUEST_BYTES, "bytes of one read, at most"),
            Option("depth", REMOTE_DEPTH, "reads in flight"),
            Option("ring_bytes", MOST_RING_BYTES, "bytes of pinned DRAM on the way to a device"),
        )

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        """Whether it reaches the device. Sources answer for themselves when they are opened."""
        if device_kind(device) != "cpu":
            from gdsload.backends.staging import why_not  # imports CUDA

            if why := why_not(device):
                return Support(False, (why,))
        return Support(True)

    @property
    def _slot_bytes(self) -> int:
        """The size of a slot: smaller than reads to DRAM, as all of a ring is pinned."""
        asked = "request_bytes" in self._set_by_user
        return int(self.settings["request_bytes"]) if asked else REQUEST_BYTES

    def limits(self, device: str = "cpu") -> Limits:
        return Limits(
            self.settings["request_bytes"] if device == "cpu" else self._slot_bytes,
            depth=self.settings["depth"],
            io_modes=("buffered",),
        )

    def register(self, what: OpenFile | Memory) -> Registration:
        if isinstance(what, Memory):
            if what.kind not in self.memory_kinds:
                raise BackendUnavailable(f"backend {self.name!r} does not reach {what.kind}")
            return Registration(what, -1)
        if what.remote is None:
            raise ReadError(
                f"{what.path}: backend {self.name!r} reads only remote files", path=what.path
            )
        self._adapt(what.storage)
        number, _ = self._new_file_numbers()
        self._files[number] = what.remote
        if (facts := what.remote.facts()) is not None:
            self._counted[number] = Counter(facts.paths)
            self._before[number] = Counter(facts.failovers)
        return Registration(what._replace(fd=number), NO_NUMBERS)

    def _adapt(self, storage: Storage) -> None:
        """Suits the reads to the storage, as far as the user did not and none was made."""
        if storage.has_round_trips and not self._fetchers:
            suited = {"request_bytes": storage.request_bytes, "depth": storage.depth}
            self.settings.update((k, v) for k, v in suited.items() if k not in self._set_by_user)

    def deregister(self, registration: Registration) -> None:
        if isinstance(registration.what, OpenFile):
            number = registration.what.fd
            self._before.pop(number, None)
            self._counted.pop(number, None)
            self._files.pop(number, None)
            for key in [key for key in self._failures.copy() if key[0] == number]:
                self._failures.pop(key, None)

    def _open_pump(self) -> Pump:
        try:
            return Pump(self._new_fetcher().fetch.capsule(), self.settings["depth"])
        except OSError as error:
            raise BackendUnavailable(
                f"backend {self.name!r} cannot be opened: {error.strerror}",
                {self.name: str(error)},
            ) from error

    def _new_fetcher(self) -> FetchThreads:
        threads = FetchThreads(self.name, self._files, self._failures)
        self._fetchers.append(threads)
        return threads

    def _open_pipeline(self, device: str) -> StagingPipeline:
        from gdsload.backends.staging import pipeline_through_dram

        engine = self._new_fetcher().fetch.capsule()
        settings = {**self.settings, "request_bytes": self._slot_bytes}
        return pipeline_through_dram(self.name, device, engine, settings, self.refusals)

    def post(self, request: PumpedRequest) -> None:
        request.post()
        self._start_threads(len(request.transfers))

    def _start_threads(self, wanted: int = 0) -> None:
        """Starts the threads that are missing. Some may be in calls for cancelled reads."""
        for threads in self._fetchers:
            threads.start(wanted)

    def check(self, request: PumpedRequest) -> Progress:
        progress = request.check()
        if not progress.finished:
            self._start_threads()
        if not progress.failures:
            return progress
        return progress._replace(failures=[self._explained(request, f) for f in progress.failures])

    def _explained(self, request: PumpedRequest, failure: Failure) -> Failure:
        transfer = request.transfers[failure.transfer]
        file = request.files[transfer.shard].what
        if not isinstance(file, OpenFile) or file.remote is None or failure.text:
            return failure
        error = self._failures.get((file.fd, transfer.offset + transfer.wanted))
        if error is None:
            return failure
        why = str(error).removeprefix(f"{file.remote.url}: ")  # the loader names the file
        return failure._replace(text=why, final=error.final)

    def status(self) -> BackendStatus:
        refusals, failovers = dict(self.refusals), Counter[str]()
        rates: dict[str, float] = {}
        for number, before in self._before.copy().items():
            facts = self._files[number].facts()
            if facts is not None:
                refusals.update(facts.refusals)
                failovers += Counter(facts.failovers) - before
                rates.update(facts.rates)
        return BackendStatus(self.name, "", "", refusals, rates, failovers)

    def paths(self, request: PumpedRequest) -> dict[str, int]:
        found: Counter[str] = Counter()
        for registration in request.files:
            file = registration.what
            if not isinstance(file, OpenFile) or not file.remote or file.fd not in self._counted:
                continue
            if (facts := file.remote.facts()) is not None:
                now = +Counter(facts.paths)
                # 0, and not absent, for bytes that another request has reported already.
                for path, nbytes in now.items():
                    found[path] += nbytes - self._counted[file.fd][path]
                self._counted[file.fd] = now
        for number, transfer in enumerate(request.transfers):
            file = request.files[transfer.shard].what
            if isinstance(file, OpenFile) and file.remote and file.fd not in self._counted:
                found[file.remote.io_path] += request.native.result(number)[1]
        return dict(found)

    def close(self) -> None:
        super().close()
        self._fetchers.clear()


class PeerBackend(RemoteBackend):
    """Reads the memory of peers."""

    name: ClassVar[str] = "nixl"


class ReplicaBackend(RemoteBackend):
    """Reads files that have several sources."""

    name: ClassVar[str] = "replicas"


class FetchThreads:
    """The threads of one engine. They end when the engine is closed."""

    def __init__(
        self,
        name: str,
        files: Mapping[int, RemoteFile],
        failures: dict[tuple[int, int], RemoteError],
    ) -> None:
        """`name` is that of the backend."""
        self.fetch = Fetch()
        self._name, self._files, self._failures = name, files, failures

    def start(self, wanted: int) -> None:
        """Starts threads, so that `wanted` reads, and all in flight, can be made at once. If the
        system has no threads left, fewer do the work.

        Raises:
            BackendUnavailable: Not a single thread can be started.
        """
        missing = self.fetch.reserve(wanted)
        if not missing:  # as at nearly every look at a request
            return
        try:
            while missing and start_thread(self._work, "gdsload-fetch") is not None:
                missing -= 1
        finally:  # also after Ctrl-C; one too many may start later then
            workers = self.fetch.unreserve(missing)
        if missing and not workers:
            why = "no thread can be started"
            raise BackendUnavailable(f"remote files cannot be read: {why}", {self._name: why})

    def _work(self) -> None:
        while (read := self.fetch.take()) is not None:
            job, turn, number, offset, length = read
            result = -errno.ENOMEM
            try:
                result = self._read(job, turn, number, offset, length)
            except MemoryError:  # for the error itself: the thread stays
                pass
            finally:
                self.fetch.finish(job, turn, result)

    def _read(self, job: int, turn: int, number: int, offset: int, length: int) -> int:
        """The number of bytes that were copied, or -errno and the error in `_failures`."""
        file, key = self._files.get(number), (number, offset + length)
        if file is None:  # deregistered; the read was cancelled
            return -errno.EBADF
        known = self._failures.get((number, -1))
        if known is not None:  # nothing can help this file: it is not asked again
            self._failures[key] = known
            return -_code(known)
        got, until = 0, 0.0
        try:
            chunks = file.chunks(offset, length)
            try:
                for chunk in chunks:
                    if not self.fetch.put(job, turn, got, chunk):
                        return -errno.ECANCELED
                    until = until or time.monotonic() + REPORT_SECONDS
                    got += memoryview(chunk).nbytes
                    if got == length or time.monotonic() > until:
                        break
            finally:
                with suppress(AttributeError):
                    chunks.close()  # type: ignore[attr-defined]
            if got:
                return got
            error = file.error("the source sent nothing", errno=errno.EIO)
        except RemoteError as caught:
            if got and not caught.final:
                return got  # the pump asks for the rest
            error = caught
        except BaseException as caught:  # a panic of a client's native code is no Exception
            error = file.error(f"{type(caught).__name__}: {caught}", errno=errno.EIO)
        if error.final:
            self._failures[number, -1] = error
        self._failures[key] = error
        return -_code(error)


def _code(error: RemoteError) -> int:
    code = error.errno or errno.EIO
    return errno.EIO if code in _TEMPORARY else code
