"""The backend `auto` into VRAM: it chooses between the candidates posix, gds_mt and gds.

    request ─┬─ cached by the kernel, or too small ─► posix
             └─ cold ─► benchmark: a sample each ─► the fastest reads the rest ─► failover

Cold transfers are read by the candidate that is the fastest from their storage: measured on the
first of them (`benchmark`), or by an earlier load (tuning cache).

Failover: the next candidate reads what failed on one. A candidate is abandoned if it fails too
often, reads nothing for too long, or turns out to use cuFile's compatibility mode; then the next
one also reads what it had in flight.
"""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate, count
from typing import Any, ClassVar

from gdsload._native.pump import throttle
from gdsload.backends import registry
from gdsload.backends.auto.benchmark import FALLBACK, Benchmark
from gdsload.backends.auto.candidate import Candidate
from gdsload.backends.auto.request import AutoRequest, Part, path_of
from gdsload.backends.auto.transfers import ragged_ends_apart, wanted_bytes_of
from gdsload.backends.base import (
    Backend,
    BackendStatus,
    Failure,
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
from gdsload.errors import BackendUnavailable, PlacementError, without_traceback
from gdsload.memory import DRAM, VRAM, staging_ring
from gdsload.planning.read_plan import Limits, Transfer
from gdsload.system import gpu
from gdsload.system.lifecycle import fork_safe_lock

FAILOVER = ("gds", "gds_mt", FALLBACK)  # the order in which candidates read failed transfers again
# Opening cuFile takes 50 to 180 ms; a smaller load has been read by then.
WORTH_CUFILE_BYTES = 1 << 30
# A candidate is abandoned after this many failed transfers.
MOST_FAILURES = 3
# It is also abandoned if it reads nothing for this long: before the load fails (60 s), and after
# cuFile's events have timed out.
SILENT_SECONDS = 35.0
# In native mode too, cuFile reads by POSIX what is not aligned, such as the end of a file. More
# than both of these limits in a load is compatibility mode.
MOST_COMPAT_BYTES = 64 << 20
MOST_COMPAT_SHARE = 0.05
_SHORTAGES = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_COMPAT = ("posix", library.COMPAT)  # cuFile's names for paths that are not native


class _Followed(threading.local):
    stream: int | None = None  # that this thread's requests come after


class AutoBackend(Backend):
    """The candidates of one load into one device."""

    name: ClassVar[str] = "auto"

    def __init__(self, device: str = "cuda:0", wanted_bytes: int = 0, **options: Any) -> None:
        """Makes the fallback; it is not opened yet.

        Args:
            device: The device to load into.
            wanted_bytes: The size of the load, 0 if unknown.
            **options: Options, for those candidates that have them.

        Raises:
            BackendUnavailable: The fallback cannot work with its options.
            TypeError: No candidate has such an option.
            ValueError: ``allow_compat`` is set.
        """
        super().__init__()
        if (compat := options.get("allow_compat", False)) is not False:
            raise ValueError(
                f"allow_compat={compat!r}: 'auto' never uses cuFile's compatibility mode; ask for"
                " backend='gds_mt' or 'gds' by name"
            )
        self._device, self._wanted, self._cold_bytes = device, wanted_bytes, 0
        self._options, self._refusals = options, dict[str, str]()
        kinds = {name: registry.built_in(name) for name in registry.BUILT_IN}
        others = {name: kind for name, kind in kinds.items() if name != FALLBACK}
        fallback = kinds[FALLBACK]
        foreign = registry.options_for_vram_alone()
        own = {key: value for key, value in options.items() if key not in foreign}
        self._candidates, self._unprobed = {FALLBACK: Candidate(fallback(**own))}, others
        self._requests: list[AutoRequest] = []
        self._failovers: Counter[str] = Counter()  # bytes, by "from -> to"
        self._benchmark: Benchmark | None = None
        self._sample: Part | None = None
        self._waiting: deque[tuple[AutoRequest, list[Transfer]]] = deque()  # for the sample
        self._why = ""
        self._numbers = count()  # of registrations
        self._followed = _Followed()
        self._lock = fork_safe_lock(self)
        self.pid = os.getpid()

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        return registry.built_in(FALLBACK).probe(device)

    @property
    def fallback(self) -> Backend:
        """The backend of the fallback. It reads what is in the page cache."""
        return self._candidates[FALLBACK].backend

    def _probe_others(self) -> None:
        """Probes the candidates besides the fallback, once. None is opened."""
        kinds, self._unprobed = self._unprobed, {}
        for name, kind in kinds.items():
            if foreign := self._options.keys() - registry.names_of_options(kind):
                self._refusals[name] = f"it has no option {', '.join(sorted(foreign))}"
            elif registry.is_usable(kind, self._device, self._refusals):
                try:
                    self._candidates[name] = Candidate(kind(**self._options))
                except ValueError as error:  # others take this value of an option
                    self._refusals[name] = str(error)

    @property
    def _is_worth_cufile(self) -> bool:
        return max(self._wanted, self._cold_bytes) >= WORTH_CUFILE_BYTES or library.is_open()

    def status(self) -> BackendStatus:
        name, why, rates = FALLBACK, self._why, dict[str, float]()
        if (benchmark := self._benchmark) is not None:
            name, why, rates = benchmark.best, benchmark.why, benchmark.rates
        refusals = self._refusals.copy()
        for each in self._candidates.values():
            if each.abandoned:
                refusals[each.name] = each.abandoned
            elif each.failures:
                refusals[f"{each.name}/ranges"] = each.failed
            refusals.update(each.backend.status().refusals)
        return BackendStatus(
            name,
            self._candidates[name].backend.status().engine,
            f"{name}: {why}" if why else name,
            refusals,
            {name: rate for name, rate in rates.items() if rate},
            dict(self._failovers),
        )

    def limits(self, device: str = "cpu") -> Limits:
        """The largest read of any candidate, split for the others, and the largest depth."""
        with self._lock:
            if self._is_worth_cufile:
                self._probe_others()
            candidates = self._candidates.values()
            found = [each.backend.limits(device) for each in candidates if not each.abandoned]
            largest = max(found, key=lambda each: each.max_request)
            depth = max(each.depth for each in found)
            return Limits(largest.max_request, largest.block, depth, largest.io_modes)

    def register(self, what: OpenFile | Memory) -> Registration:
        """Candidates register it on first use, but the fallback registers files at once: the
        storage of a file sets its depth."""
        if isinstance(what, Memory) and what.kind != VRAM:
            raise BackendUnavailable(f"'auto' into {self._device} does not reach {what.kind}")
        registration = Registration(what, next(self._numbers))
        if isinstance(what, OpenFile):
            self._candidates[FALLBACK].register(registration)
        return registration

    def deregister(self, registration: Registration) -> None:
        """Nothing to do: candidates deregister it when they are closed."""

    def follow(self, device: str, stream: int) -> bool:
        """Applies to requests that this thread prepares from now on, whenever they are posted. The
        fallback waits for the stream if it cannot order its copies."""
        if device != self._device:
            return False
        self._followed.stream = stream
        return True

    def prepare(
        self, transfers: Sequence[Transfer], files: Registrations, memory: Registrations
    ) -> AutoRequest:
        require_own_process(self.pid, "auto")
        numbered = [
            each if each.tag == number else each._replace(tag=number)
            for number, each in enumerate(transfers)
        ]
        return AutoRequest(numbered, files, memory, self._followed.stream)

    def post(self, request: AutoRequest) -> None:
        """Posts it. While candidates are measured, cold transfers wait."""
        require_own_process(self.pid, "auto")
        with self._lock:
            if request in self._requests:
                if request.undone and request.error is None:
                    raise RuntimeError("this request is in flight already")
                self.release(request)
            request.reset()
            self._requests.append(request)
            cold = [each for each in request.transfers if each.io_mode == "direct"]
            warm = [each for each in request.transfers if each.io_mode != "direct"]
            self._cold_bytes += wanted_bytes_of(cold)
            if not cold:
                self._why = self._why or "all bytes come through the page cache"
            elif not self._is_worth_cufile:
                self._why = f"less than {WORTH_CUFILE_BYTES:,} bytes: opening cuFile takes too long"
                warm, cold = request.transfers, []
            if warm:
                self._post(request, warm, self._candidates[FALLBACK])
            if cold:
                if self._benchmark is None:
                    # A checkpoint is on one storage: that of its first file.
                    self._benchmark = self._new_benchmark(path_of(request, cold[0]))
                ends: list[Transfer] = []
                if self._benchmark.choice != FALLBACK:
                    # cuFile may read them by POSIX, also in native mode: its counts of such reads
                    # would tell nothing about its mode.
                    cold, ends = ragged_ends_apart(cold, request.files)
                if cold:
                    self._waiting.append((request, cold))
                    self._advance()
                if ends:
                    self._post_ends(request, ends)
            if request.error is not None:
                raise without_traceback(request.error)

    def _new_benchmark(self, path: str) -> Benchmark:
        self._probe_others()
        names = [name for name in registry.BUILT_IN if name in self._candidates]
        ordinal, nbytes = gpu.ordinal_of(self._device), max(self._wanted, self._cold_bytes)
        rings = {each.kind for each in staging_ring.rings(ordinal=ordinal)}
        ready = [name for name in names if (DRAM if name == FALLBACK else VRAM) in rings]
        found = Benchmark(names, path, self._device, nbytes, ready, self._options)
        for name in names:
            if found.rates.get(name) == 0.0:
                self._refusals[name] = f"it failed when it was {found.why}"
        if not found.choice:  # all will be measured, the fallback first
            for name in names:
                if name != FALLBACK:
                    self._candidates[name].start_opening(self._device)
        return found

    def _advance(self) -> None:
        """Posts waiting transfers, up to the end of the next sample."""
        benchmark = self._benchmark
        while benchmark is not None and (self._sample is None or self._sample.ended):
            sample, self._sample = self._sample, None
            sound = sample is not None and not sample.failures and not sample.candidate.abandoned
            if sample is not None and sound and sample.is_direct:
                benchmark.not_cached = benchmark.not_cached or self._distorted(sample)
                name, fixed_seconds = sample.candidate.name, sample.candidate.fixed_seconds
                benchmark.add(
                    name, wanted_bytes_of(sample.transfers), sample.seconds(), fixed_seconds
                )
            if not self._waiting:
                return self._close_losers(benchmark.choice)
            request, transfers = self._waiting.popleft()
            reader, measures = self._candidates[benchmark.reader], not benchmark.choice
            ends = list(accumulate(transfer.wanted for transfer in transfers))
            end = bisect_left(ends, benchmark.missing_bytes) + 1
            if transfers[end:]:
                self._waiting.appendleft((request, transfers[end:]))
            part = self._post(request, transfers[:end], reader)
            self._sample = part if measures else None

    def _distorted(self, sample: Part) -> str:
        """Why the rate of a sample is not that of its storage, or ""."""
        all_rate, _ = throttle()
        if all_rate:
            return "a bandwidth limit was set"
        if sample.was_held_up:
            return "the device was busy with other work"
        ahead = any(each.ahead for each in self._requests if sample in each.parts)
        return "a prefetch gives way to loads" if ahead else ""

    def _close_losers(self, choice: str) -> None:
        """Closes candidates that the load does not need, after its last transfers were posted and
        while they are read. The fallback stays, for transfers from the page cache and for
        failover."""
        needed = {FALLBACK, choice, *(part.candidate.name for _, part in self._active())}
        for name, candidate in self._candidates.items():
            if choice and candidate.files and candidate.working is None and name not in needed:
                candidate.start_closing()

    def _active(self) -> list[tuple[AutoRequest, Part]]:
        return [(request, part) for request in self._requests for part in request.active]

    def _post(
        self, request: AutoRequest, transfers: Sequence[Transfer], candidate: Candidate
    ) -> Part | None:
        """Posts transfers on a candidate, or on the next one if it cannot be opened.

        Returns:
            The part; None if the fallback cannot be opened either. The request then has the
            error.
        """
        while request.error is None:
            try:
                return candidate.post(request, transfers, self._device)
            except (BackendUnavailable, PlacementError, OSError) as error:
                if candidate.name == FALLBACK:
                    request.error = without_traceback(error)
                else:
                    self._abandon(candidate, str(error), is_temporary(error))
                    candidate = self._after(candidate)
        return None

    def _post_ends(self, request: AutoRequest, ends: list[Transfer]) -> None:
        """Posts ends of files on the fallback; if it does not open, on that of the rest."""
        try:
            self._candidates[FALLBACK].post(request, ends, self._device)
        except (BackendUnavailable, PlacementError, OSError) as error:
            self._refusals[f"{FALLBACK}/ends of files"] = str(error)
            self._waiting.append((request, ends))
            self._advance()

    def check(self, request: AutoRequest) -> Progress:
        """Raises the error of the fallback, if it could not be opened."""
        require_own_process(self.pid, "auto")
        with self._lock:
            for each, part in self._active():
                if not part.ended:  # a failure of another part may have ended it
                    self._collect(each, part)
            for each in self._requests:
                for part, transfers in each.take_released():
                    self._pass_on(each, transfers, part.candidate)
            for candidate in self._candidates.values():
                if why := self._reason_to_abandon(candidate):
                    self._abandon(candidate, why)
            self._advance()
            settled, failures = request.take_settled()
            active = [part for _, part in self._active()]
            held = [part for each in self._requests for part, _ in each.held]
            silences = [part.idle_seconds for part in active]
            silences += [part.ended_seconds for part in held]
            idle = min(silences, default=0.0)
            finished = request.undone == 0 or request not in self._requests
            busy = bool(held) or any(part.device_busy for part in active)
            return Progress(settled, failures, finished, idle, busy)

    def _collect(self, request: AutoRequest, part: Part) -> None:
        """Notes what a part has read, and ends it if all of it has settled or its candidate was
        abandoned. The next candidate reads what failed."""
        candidate, again = part.candidate, list[Transfer]()
        progress = part.check()
        failures = {failure.transfer: failure for failure in progress.failures}
        for number in progress.settled:
            transfer, failure = part.transfers[number], failures.get(number)
            if failure is None or failure.permanent or candidate.name == FALLBACK:
                request.settle(transfer, failure)
                continue
            again.append(transfer)
            why = f"{path_of(request, transfer)} at {transfer.offset}:"
            candidate.failures.append(f"{why} {failure.text or os.strerror(failure.errno)}")
        if progress.finished or candidate.abandoned:
            part.end()
            lost = part.unsettled()
            if candidate.name == FALLBACK:  # no candidate is left to read them
                for transfer in lost:
                    request.settle(transfer, Failure(0, 0, errno.ECANCELED))
            else:
                again += lost
            for path, nbytes in part.paths.items():
                candidate.read_bytes += nbytes
                if path.rpartition("/")[2] in _COMPAT:
                    candidate.compat_bytes += nbytes
        if again and part.ended and not part.is_idle:
            request.held.append((part, again))
        elif again:
            self._pass_on(request, again, candidate)

    def _pass_on(
        self, request: AutoRequest, transfers: Sequence[Transfer], candidate: Candidate
    ) -> None:
        """Posts transfers that a candidate has not read on the next one."""
        ordered = sorted(transfers, key=lambda each: (each.tag, each.offset))
        part = self._post(request, ordered, self._after(candidate))
        if part is not None:
            to = part.candidate.name
            self._failovers[f"{candidate.name} -> {to}"] += wanted_bytes_of(transfers)

    def _after(self, candidate: Candidate) -> Candidate:
        """The candidate that reads what failed on this one."""
        names = FAILOVER[FAILOVER.index(candidate.name) + 1 :]
        found = (self._candidates[name] for name in names if name in self._candidates)
        return next(each for each in found if not each.abandoned)

    def _reason_to_abandon(self, candidate: Candidate) -> str:
        """Why a candidate must be abandoned, or ""."""
        if candidate.name == FALLBACK or candidate.abandoned:
            return ""
        compat, total = candidate.compat_bytes, candidate.read_bytes
        if compat > MOST_COMPAT_BYTES and compat > MOST_COMPAT_SHARE * total:
            return f"cuFile used its compatibility mode for {compat:,} of {total:,} bytes"
        if len(candidate.failures) >= MOST_FAILURES:
            return candidate.failed
        # Its parts share a queue: progress of any of them proves that it is alive.
        mine = [part for _, part in self._active() if part.candidate is candidate]
        if any(part.device_busy for part in mine):  # no other candidate would copy sooner
            return ""
        idle = min((part.idle_seconds for part in mine), default=0.0)
        stalled = candidate.watch.stalled(idle, SILENT_SECONDS)
        return f"no byte has arrived for {idle:.0f} s" if stalled else ""

    def _abandon(self, candidate: Candidate, why: str, temporary: bool = False) -> None:
        """Abandons a candidate: the next one reads what it has in flight. `temporary`: it may work
        in a later load."""
        candidate.abandoned = why
        if self._benchmark is not None:
            self._benchmark.drop(candidate.name, temporary)
        for request, part in self._active():
            if part.candidate is candidate and not part.ended:
                self._collect(request, part)

    def wait(self, request: AutoRequest, seconds: float, first: int = 0, last: int = -1) -> None:
        last = last if last >= 0 else len(request.transfers) - 1
        found = [(part, part.unsettled_range(first, last)) for part in request.active]
        if (sample := self._sample) is not None:  # others are posted after it
            found.append((sample, (0, len(sample.transfers) - 1)))
        for part, numbers in found:
            if numbers is not None:
                return part.candidate.backend.wait(part.request, seconds, *numbers)
        super().wait(request, seconds)

    def yield_to_loads(self, request: AutoRequest, ahead: bool) -> None:
        with self._lock:
            request.ahead = ahead
            for part in request.active:
                part.candidate.backend.yield_to_loads(part.request, ahead)

    def release(self, request: AutoRequest) -> None:
        if self.pid != os.getpid():
            return
        with self._lock:
            self._waiting = deque(each for each in self._waiting if each[0] is not request)
            if self._sample in request.parts:
                self._sample = None
            for part in request.active:
                part.end()
            request.held.clear()
            if request in self._requests:
                self._requests.remove(request)

    def paths(self, request: AutoRequest) -> dict[str, int]:
        found: Counter[str] = Counter()
        for part in request.parts:
            found.update(part.paths)
        return dict(found)

    def facts(self, request: AutoRequest) -> Sequence[RequestFacts]:
        return [facts for part in request.parts for facts in part.facts]

    def close(self) -> None:
        for request in list(self._requests):
            self.release(request)
        for candidate in self._candidates.values():
            candidate.close()


def is_temporary(error: Exception) -> bool:
    """Whether a backend could not be opened because memory, descriptors or threads were short."""
    cause = error.__cause__ if isinstance(error, BackendUnavailable) else error
    short = isinstance(cause, OSError) and cause.errno in _SHORTAGES
    return short or isinstance(error, PlacementError)
