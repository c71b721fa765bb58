"""The backend `auto` into VRAM: it chooses between posix, gds_mt and gds, the candidates.

    request ─┬─ warm, or too small ─► posix
             └─ cold ─► benchmark: a sample each ─► the fastest reads the rest ─► failover

What the page cache holds is copied by posix. Cold transfers are read by the candidate that was the
fastest from their storage: measured on the first of them (`contest`), or before (tuning cache).
What fails is read by the next candidate (`retry`). DeviceInit and posting is done in `lanes`.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, ClassVar

from gdsload.backends import registry
from gdsload.backends.auto.benchmark import Benchmark
from gdsload.backends.auto.candidates import LAST, Candidate, Candidates, Part
from gdsload.backends.auto.failover import AutoRequest, Failover, path_of
from gdsload.backends.base import (
    DRAM,
    VRAM,
    Backend,
    Memory,
    OpenFile,
    Progress,
    Registration,
    Support,
)
from gdsload.backends.cufile import library
from gdsload.errors import BackendUnavailable
from gdsload.memory import staging_ring
from gdsload.planning.read_plan import Limits, Transfer
from gdsload.system import gpu
from gdsload.system.lifecycle import fork_safe_lock

# DeviceInit cuFile takes 50 to 180 ms; a smaller load has been read by then.
WORTH_CUFILE_BYTES = 1 << 30


class AutoBackend(Backend):
    """The candidates of one load into one device."""

    name: ClassVar[str] = "auto"
    memory_kinds: ClassVar[frozenset[str]] = frozenset({VRAM})

    def __init__(self, device: str = "cuda:0", wanted_bytes: int = 0, **options: Any) -> None:
        """`wanted_bytes` is the size of the load, 0 if it is not known; `options` are for those
        candidates that have them.

        Raises TypeError for an option that none has, ValueError for ``allow_compat``.
        """
        super().__init__()
        self._device, self._wanted, self._asked = device, wanted_bytes, 0
        self._candidates = Candidates(device, options)
        self._failover = Failover(device, self._candidates)
        self._benchmark: Benchmark | None = None
        self._sample: Part | None = None
        self._waiting: deque[tuple[AutoRequest, list[Transfer]]] = deque()  # for the sample
        self._why = ""
        self._registrations = 0
        self._followed = threading.local()
        self._lock = fork_safe_lock(self)
        self.pid = os.getpid()

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        return registry.built_in(LAST).probe(device)

    # For the report.

    @property
    def _best(self) -> Candidate:
        return self._candidates[self._benchmark.best if self._benchmark is not None else LAST]

    def serving(self) -> Backend:
        return self._best.backend

    @property
    def choice(self) -> str:
        """Which candidate reads cold transfers, and how it was chosen."""
        why = self._benchmark.why if self._benchmark is not None else self._why
        return f"{self._best.name}: {why}" if why else self._best.name

    @property
    def rates(self) -> dict[str, float]:
        """Bytes per second, by candidate, that the choice was made by."""
        found = self._benchmark.rates if self._benchmark is not None else {}
        return {name: rate for name, rate in found.items() if rate}

    @property
    def failovers(self) -> dict[str, int]:
        return dict(self._failover.failovers)

    @property
    def refusals(self) -> dict[str, str]:
        return self._candidates.refusals

    # The interface of a backend.

    def limits(self, device: str = "cpu") -> Limits:
        """The largest request of any candidate: for the others requests are cut."""
        with self._locked():
            if self._is_worth_cufile:
                self._candidates.probe()
            found = [each.backend.limits(device) for each in self._candidates if not each.left]
            return max(found, key=lambda each: each.max_request)

    def register(self, what: OpenFile | Memory) -> Registration:
        """Candidates register it when they first need it."""
        if isinstance(what, Memory) and what.kind != VRAM:
            raise BackendUnavailable(f"'auto' into {self._device} does not reach {what.kind}")
        with self._locked():
            self._registrations += 1
            return Registration(what, self._registrations)

    def deregister(self, registration: Registration) -> None:
        if self.pid == os.getpid():
            with self._lock:
                for candidate in self._candidates:
                    candidate.forget(registration.handle)

    def follow(self, device: str, stream: int) -> bool:
        """Holds for what this thread prepares from now on, whenever parts of it are posted."""
        if device != self._device:
            return False
        self._followed.stream = stream
        return True

    def prepare(
        self, transfers: Sequence[Transfer], files: Sequence[Registration],
        memory: Sequence[Registration],
    ) -> AutoRequest:  # fmt: skip
        with self._locked():
            return AutoRequest(transfers, files, memory, getattr(self._followed, "stream", None))

    def post(self, request: AutoRequest) -> None:
        """Posts it; while candidates are measured, cold transfers wait for their turn."""
        with self._locked():
            if request in self._failover.requests:
                if request.undone and request.error is None:
                    raise RuntimeError("this request is under way already")
                self.release(request)
            request.reset()
            self._failover.requests.append(request)
            cold = [each for each in request.transfers if _is_cold(each, request.files)]
            warm = [each for each in request.transfers if not _is_cold(each, request.files)]
            self._asked += sum(transfer.wanted for transfer in cold)
            if not cold:
                self._why = self._why or "what was read was in the page cache, or is to pass by it"
            elif not self._is_worth_cufile:
                self._why = f"less than {WORTH_CUFILE_BYTES:,} bytes do not repay opening cuFile"
                warm, cold = request.transfers, []
            if warm:
                self._failover.post(request, warm, self._candidates[LAST])
            if cold:
                # The storage of the first file stands for all: a checkpoint lies on one.
                path = path_of(request.files[cold[0].shard])
                self._benchmark = self._benchmark or self._new_benchmark(path)
                self._waiting.append((request, cold))
                self._advance(self._benchmark)
            request.require_no_error()

    @property
    def _is_worth_cufile(self) -> bool:
        return max(self._wanted, self._asked) >= WORTH_CUFILE_BYTES or library.is_open()

    def _new_benchmark(self, path: str) -> Benchmark:
        self._candidates.probe()
        names = [candidate.name for candidate in self._candidates if not candidate.left]
        ordinal, nbytes = gpu.ordinal_of(self._device), max(self._wanted, self._asked)
        rings = {each.kind for each in staging_ring.rings() if each.ordinal == ordinal}
        ready = [name for name in names if (DRAM if name == LAST else VRAM) in rings]
        return Benchmark(names, path, self._device, nbytes, ready)

    def _advance(self, benchmark: Benchmark) -> None:
        """Posts what waited, up to the end of the next sample."""
        while self._sample is None or self._sample.ended:
            sample, self._sample = self._sample, None
            sound = sample is not None and not sample.failures and not sample.candidate.left
            if sample is not None and sound and sample.is_direct:
                nbytes = sum(transfer.wanted for transfer in sample.transfers)
                fixed_seconds = sample.candidate.fixed_seconds
                benchmark.add(sample.candidate.name, nbytes, sample.seconds(), fixed_seconds)
            for candidate in self._candidates:
                if candidate.left:
                    benchmark.drop(candidate.name)
            if not self._waiting:
                return
            request, transfers = self._waiting.popleft()
            reader, measures = self._candidates[benchmark.reader], not benchmark.choice
            ends = list(accumulate(transfer.wanted for transfer in transfers))
            count = bisect_left(ends, benchmark.missing_bytes) + 1
            if transfers[count:]:
                self._waiting.appendleft((request, transfers[count:]))
            part = self._failover.post(request, transfers[:count], reader)
            self._sample = part if measures else None

    def _close_losers(self, benchmark: Benchmark) -> None:
        """Closes what the rest of the load does not need, after the rest was posted: it is read
        meanwhile. The last candidate stays, for warm transfers and failover."""
        if self._waiting or not benchmark.choice:
            return
        needed = {LAST, benchmark.choice, *(p.candidate.name for p in self._failover.active)}
        for candidate in self._candidates:
            if candidate.is_open and candidate.name not in needed:
                candidate.close()
                if benchmark.choice == LAST:
                    staging_ring.release_rings(VRAM, gpu.ordinal_of(self._device))

    def check(self, request: AutoRequest) -> Progress:
        """Raises what the last candidate raised, where it could not be opened."""
        with self._locked():
            self._failover.check()
            if self._benchmark is not None:
                self._advance(self._benchmark)
                self._close_losers(self._benchmark)
            request.require_no_error()
            settled, failures = request.news()
            idle = min((part.idle_seconds for part in self._failover.active), default=0.0)
            finished = request.undone == 0 or request not in self._failover.requests
            return Progress(settled, failures, finished, idle)

    def wait(self, request: AutoRequest, seconds: float, first: int = 0, last: int = -1) -> None:
        last = last if last >= 0 else len(request.transfers) - 1
        with self._locked():
            found = [(p, at) for p in request.active if (at := p.unsettled_range(first, last))]
            if not found and self._sample is not None:  # its turn comes after the sample
                found = [(self._sample, (0, len(self._sample.transfers) - 1))]
        if found:
            part, (low, high) = found[0]
            part.candidate.backend.wait(part.request, seconds, low, high)
        else:
            super().wait(request, seconds)

    def yield_to_loads(self, request: AutoRequest, ahead: bool) -> None:
        with self._locked():
            request.yield_to_loads(ahead)

    def release(self, request: AutoRequest) -> None:
        if self.pid != os.getpid():
            return
        with self._lock:
            self._waiting = deque(each for each in self._waiting if each[0] is not request)
            if self._sample in request.parts:
                self._sample = None
            for part in request.active:
                part.end()
            if request in self._failover.requests:
                self._failover.requests.remove(request)

    def paths(self, request: AutoRequest) -> dict[str, int]:
        found: Counter[str] = Counter()
        for part in request.parts:
            found.update(part.paths)
        return dict(found)

    def close(self) -> None:
        if self.pid != os.getpid():
            return
        with self._lock:
            for request in list(self._failover.requests):
                self.release(request)
            for candidate in self._candidates:
                candidate.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self.pid != os.getpid():
            raise BackendUnavailable(
                "this backend was opened before a fork: its threads and its device stayed in the"
                " parent",
                {"auto": "used after fork; start processes that load with 'spawn'"},
            )
        with self._lock:
            yield


def _is_cold(transfer: Transfer, files: Sequence[Registration]) -> bool:
    """Whether it comes from storage: a read through the page cache says nothing about that."""
    file = files[transfer.shard].what
    return transfer.io_mode == "direct" and isinstance(file, OpenFile) and file.direct_fd >= 0
