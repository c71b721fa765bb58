"""Failover inside `auto`: what fails on one candidate is read once more by the next one in order.

A candidate that fails too often, is silent, or turns out to use cuFile's compatibility mode is
left, and what it has under way goes on by the next one. What has been read is not read again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from gdsload.backends.auto.candidates import LAST, Candidate, Candidates, Part
from gdsload.backends.base import Failure, OpenFile, Progress, Registration
from gdsload.backends.cufile import library
from gdsload.errors import BackendUnavailable, PlacementError
from gdsload.planning.read_plan import Transfer

# A candidate on which this many transfers failed is left.
MOST_FAILURES = 3
# So is one from which no byte has come for so long: before the load gives up (60 s), and no sooner
# than cuFile's own events are given up.
SILENT_SECONDS = 35.0
# cuFile reads the ragged end of a file, and what is not aligned, by POSIX in native mode too. More
# than both of these, over all of a load, is compatibility mode.
MOST_COMPAT_BYTES = 64 << 20
MOST_COMPAT_SHARE = 0.05
_COMPAT = ("posix", library.COMPAT)  # cuFile's names for what is not native


class AutoRequest:
    """Transfers on their way by one or more candidates, and what is left of each.

    `stream` is the CUstream that copies of all its parts come after, whenever they are posted.
    `error` is final: nobody could take what was left.
    """

    def __init__(
        self, transfers: Sequence[Transfer], files: Sequence[Registration],
        memory: Sequence[Registration], stream: int | None,
    ) -> None:  # fmt: skip
        self.transfers = [each._replace(tag=place) for place, each in enumerate(transfers)]
        self.files, self.memory, self.stream = files, memory, stream
        self._ahead = False
        self.parts: list[Part] = []
        self.reset()

    def reset(self) -> None:
        """As it is before it is posted."""
        self.undone = len(self.transfers)
        self.error: Exception | None = None
        self._left_bytes = [transfer.wanted for transfer in self.transfers]
        self._settled: list[int] = []  # not reported yet
        self._failures: list[Failure] = []
        self._failed: dict[int, Failure] = {}
        self.parts.clear()

    @property
    def active(self) -> list[Part]:
        return [part for part in self.parts if not part.ended]

    def settle(self, transfer: Transfer, failure: Failure | None) -> None:
        """A transfer, or a cut of one, has arrived or finally failed."""
        place = transfer.tag
        if failure is not None:
            before = transfer.offset - self.transfers[place].offset
            found = failure._replace(transfer=place, got=before + failure.got)
            self._failed.setdefault(place, found)
        self._left_bytes[place] -= transfer.wanted
        if self._left_bytes[place] == 0:
            self.undone -= 1
            self._settled.append(place)
            self._failures += [self._failed[place]] if place in self._failed else []

    def require_no_error(self) -> None:
        if self.error is not None:
            raise self.error

    def news(self) -> tuple[list[int], list[Failure]]:
        """What has settled since it was last asked, and what of that failed."""
        settled, self._settled = self._settled, []
        failures, self._failures = self._failures, []
        return settled, failures

    def add(self, part: Part) -> None:
        self.parts.append(part)
        if self._ahead:
            part.candidate.backend.yield_to_loads(part.request, True)

    def yield_to_loads(self, ahead: bool) -> None:
        """Whether it yields to loads that somebody waits for; holds for later parts too."""
        self._ahead = ahead
        for part in self.active:
            part.candidate.backend.yield_to_loads(part.request, ahead)


class Failover:
    """The requests of one load on their candidates. `failovers` counts bytes by "from -> to"."""

    def __init__(self, device: str, candidates: Candidates) -> None:
        self.requests: list[AutoRequest] = []
        self.failovers: Counter[str] = Counter()
        self._device, self._candidates = device, candidates

    @property
    def active(self) -> list[Part]:
        return [part for request in self.requests for part in request.active]

    def post(
        self, request: AutoRequest, transfers: Sequence[Transfer], candidate: Candidate
    ) -> Part | None:
        """Posts transfers on a candidate, or on the next one where it cannot be opened. None if
        the last one cannot either: the error is the request's then."""
        while request.error is None:
            try:
                part = candidate.post(
                    transfers, request.files, request.memory, self._device, request.stream
                )
            except (BackendUnavailable, PlacementError, OSError) as error:
                if candidate.name == LAST:
                    request.error = error
                else:
                    self._leave(candidate, _refusal(error))
                    candidate = self._candidates.after(candidate)
            else:
                request.add(part)
                return part
        return None

    def check(self) -> None:
        """Notes what has become of everything under way, and reads again what failed."""
        for request in self.requests:
            for part in request.active:
                if not part.ended:  # by what another part has led to
                    self._check(request, part)
        for candidate in self._candidates:
            if why := self._reason_to_leave(candidate):
                self._leave(candidate, why)

    def _check(self, request: AutoRequest, part: Part) -> None:
        progress = part.check()
        again = self._settle(request, part, progress)
        if progress.finished:
            part.end()
            for road, nbytes in part.paths.items():
                part.candidate.read_bytes += nbytes
                if road.rpartition("/")[2] in _COMPAT:
                    part.candidate.compat_bytes += nbytes
        self._read_again(request, part.candidate, again)

    def _settle(self, request: AutoRequest, part: Part, progress: Progress) -> list[Transfer]:
        """Notes what has settled; returns what another candidate may still be able to read."""
        candidate, again = part.candidate, list[Transfer]()
        failures = {failure.transfer: failure for failure in progress.failures}
        for place in progress.settled:
            transfer, failure = part.transfers[place], failures.get(place)
            if failure is None or failure.hopeless or candidate.name == LAST:
                request.settle(transfer, failure)
                continue
            again.append(transfer)
            candidate.failures += 1
            if not candidate.first_failure:
                path = path_of(request.files[transfer.shard])
                why = failure.text or os.strerror(failure.errno)
                candidate.first_failure = f"{path} at {transfer.offset}: {why}"
        return again

    def _read_again(
        self, request: AutoRequest, candidate: Candidate, transfers: list[Transfer]
    ) -> None:
        if not transfers:
            return
        to = self._candidates.after(candidate)
        self.failovers[f"{candidate.name} -> {to.name}"] += sum(t.wanted for t in transfers)
        self.post(request, sorted(transfers, key=lambda t: (t.tag, t.offset)), to)

    def _reason_to_leave(self, candidate: Candidate) -> str:
        """Why a candidate should not go on; "" if it should."""
        if candidate.name == LAST or candidate.left:
            return ""
        compat, total = candidate.compat_bytes, candidate.read_bytes
        if compat > MOST_COMPAT_BYTES and compat > MOST_COMPAT_SHARE * total:
            return f"cuFile took its compatibility mode for {compat:,} of {total:,} bytes"
        if candidate.failures >= MOST_FAILURES:
            return f"{candidate.failures} ranges failed, first {candidate.first_failure}"
        # Its parts wait for each other: progress of any of them proves that it is alive.
        mine = [part.idle_seconds for part in self.active if part.candidate is candidate]
        idle = min(mine, default=0.0)
        return f"no byte has come for {idle:.0f} s" if idle > SILENT_SECONDS else ""

    def _leave(self, candidate: Candidate, why: str) -> None:
        """Uses a candidate no more; what it has under way goes on by the next one."""
        candidate.left = why
        for request in self.requests:
            for part in request.active:
                if part.candidate is candidate:
                    failed = self._settle(request, part, part.check())
                    part.end()
                    self._read_again(request, candidate, failed + part.unsettled())


def _refusal(error: BaseException) -> str:
    """Why a candidate cannot be used, from what it raised."""
    if isinstance(error, BackendUnavailable) and error.reasons:
        return "; ".join(dict.fromkeys(error.reasons.values()))
    return str(error)


def path_of(registration: Registration) -> str:
    file = registration.what
    return file.path if isinstance(file, OpenFile) else ""
