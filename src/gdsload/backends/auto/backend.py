"""The backend `auto` into VRAM: it chooses between the candidates posix, gds_mt and gds.

    request ─┬─ cached by the kernel, or too small ─► posix
             └─ cold ─► benchmark: a sample each ─► the fastest reads the rest ─► failover

Cold transfers are read by the candidate that is the fastest from their storage: measured on the
first of them (`benchmark`), or by an earlier load (tuning cache). What fails is read by the next
candidate (`failover`). Not responsible for opening backends and posting reads: see `candidates`.
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
from gdsload.backends.auto.candidates import LAST, Candidates, Part
from gdsload.backends.auto.failover import AutoRequest, Failover, path_of
from gdsload.backends.base import (
    DRAM,
    VRAM,
    Backend,
    BackendStatus,
    Memory,
    OpenFile,
    Progress,
    Registration,
    Registrations,
    RequestFacts,
    Support,
    require_own_process,
)
from gdsload.backends.cufile import library
from gdsload.errors import BackendUnavailable
from gdsload.memory import staging_ring
from gdsload.planning.read_plan import Limits, Transfer
from gdsload.system import gpu
from gdsload.system.lifecycle import fork_safe_lock

# Opening cuFile takes 50 to 180 ms; a smaller load has been read by then.
WORTH_CUFILE_BYTES = 1 << 30


class _Followed(threading.local):
    stream: int | None = None  # that this thread's requests come after


class AutoBackend(Backend):
    """The candidates of one load into one device."""

    name: ClassVar[str] = "auto"
    memory_kinds: ClassVar[frozenset[str]] = frozenset({VRAM})

    def __init__(self, device: str = "cuda:0", wanted_bytes: int = 0, **options: Any) -> None:
        """Makes the candidates; none is opened yet.

        Args:
            device: The device to load into.
            wanted_bytes: The size of the load, 0 if unknown.
            **options: Options, for those candidates that have them.

        Raises:
            TypeError: No candidate has such an option.
            ValueError: ``allow_compat`` is set.
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
        self._followed = _Followed()
        self._lock = fork_safe_lock(self)
        self.pid = os.getpid()

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        return registry.built_in(LAST).probe(device)

    def status(self) -> BackendStatus:
        benchmark = self._benchmark
        best = self._candidates[benchmark.best if benchmark is not None else LAST]
        why = benchmark.why if benchmark is not None else self._why
        rates = benchmark.rates if benchmark is not None else {}
        return BackendStatus(
            best.name,
            best.backend.status().engine,
            f"{best.name}: {why}" if why else best.name,
            self._candidates.refusals,
            {name: rate for name, rate in rates.items() if rate},
            dict(self._failover.failovers),
        )

    def limits(self, device: str = "cpu") -> Limits:
        """The largest read of any candidate; for the others it is split."""
        with self._locked():
            if self._is_worth_cufile:
                self._candidates.probe()
            found = [each.backend.limits(device) for each in self._candidates if not each.left]
            return max(found, key=lambda each: each.max_request)

    def register(self, what: OpenFile | Memory) -> Registration:
        """Candidates register it on first use."""
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
        """Applies to requests that this thread prepares from now on, whenever they are posted."""
        if device != self._device:
            return False
        self._followed.stream = stream
        return True

    def prepare(
        self, transfers: Sequence[Transfer], files: Registrations, memory: Registrations
    ) -> AutoRequest:
        with self._locked():
            return AutoRequest(transfers, files, memory, self._followed.stream)

    def post(self, request: AutoRequest) -> None:
        """Posts it. While candidates are measured, cold transfers wait."""
        with self._locked():
            if request in self._failover.requests:
                if request.undone and request.error is None:
                    raise RuntimeError("this request is in flight already")
                self.release(request)
            request.reset()
            self._failover.requests.append(request)
            cold = [each for each in request.transfers if _is_cold(each, request.files)]
            warm = [each for each in request.transfers if not _is_cold(each, request.files)]
            self._asked += sum(transfer.wanted for transfer in cold)
            if not cold:
                self._why = self._why or "all bytes come through the page cache"
            elif not self._is_worth_cufile:
                self._why = f"less than {WORTH_CUFILE_BYTES:,} bytes do not repay opening cuFile"
                warm, cold = request.transfers, []
            if warm:
                self._failover.post(request, warm, self._candidates[LAST])
            if cold:
                # A checkpoint is on one storage: that of its first file.
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
        """Posts waiting transfers, up to the end of the next sample."""
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
        """Closes candidates that the load does not need, after its last transfers were posted. The
        last candidate stays, for transfers from the page cache and for failover."""
        if self._waiting or not benchmark.choice:
            return
        needed = {LAST, benchmark.choice, *(p.candidate.name for p in self._failover.active)}
        for candidate in self._candidates:
            if candidate.is_open and candidate.name not in needed:
                candidate.close()

    def check(self, request: AutoRequest) -> Progress:
        """Raises the error of the last candidate, if it could not be opened."""
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
            if not found and self._sample is not None:  # it is posted after the sample
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

    def facts(self, request: AutoRequest) -> Sequence[RequestFacts]:
        return [facts for part in request.parts for facts in part.facts]

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
        require_own_process(self.pid, "auto")
        with self._lock:
            yield


def _is_cold(transfer: Transfer, files: Registrations) -> bool:
    """Whether it is read from storage, not through the page cache."""
    file = files[transfer.shard].what
    return transfer.io_mode == "direct" and isinstance(file, OpenFile) and file.direct_fd >= 0
