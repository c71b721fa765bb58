"""Failover inside `auto`: the next candidate reads again what failed on one.

A candidate is left if it fails too often, reads nothing for too long, or turns out to use cuFile's
compatibility mode. The next one then reads what it had in flight. What was read stays.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from gdsload.backends.auto.candidates import LAST, Candidate, Candidates, Part
from gdsload.backends.base import Failure, OpenFile, Progress, Registration, Registrations
from gdsload.backends.cufile import library
from gdsload.errors import BackendUnavailable, PlacementError
from gdsload.planning.read_plan import Transfer

# A candidate is left after this many failed transfers.
MOST_FAILURES = 3
# It is also left if it reads nothing for this long: before the load fails (60 s), and after
# cuFile's events have timed out.
SILENT_SECONDS = 35.0
# In native mode too, cuFile reads by POSIX what is not aligned, such as the end of a file. More
# than both of these limits in a load is compatibility mode.
MOST_COMPAT_BYTES = 64 << 20
MOST_COMPAT_SHARE = 0.05
_COMPAT = ("posix", library.COMPAT)  # cuFile's names for paths that are not native


class AutoRequest:
    """Transfers that one or more candidates read, and the bytes that are left of each.

    Copies of all its parts come after the work on `stream`, a CUstream, whenever they are posted.
    `error` is set if no candidate could be opened, and is final.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        files: Registrations,
        memory: Registrations,
        stream: int | None,
    ) -> None:
        self.transfers = [each._replace(tag=number) for number, each in enumerate(transfers)]
        self.files, self.memory, self.stream = files, memory, stream
        self._ahead = False
        self.parts: list[Part] = []
        self.reset()

    def reset(self) -> None:
        """Back to the state before it was posted."""
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
        """Notes that a transfer, or a part of one, was read or has finally failed."""
        tag = transfer.tag
        if failure is not None:
            before = transfer.offset - self.transfers[tag].offset
            failure = failure._replace(transfer=tag, got=before + failure.got)
            self._failed.setdefault(tag, failure)
        self._left_bytes[tag] -= transfer.wanted
        if self._left_bytes[tag] == 0:
            self.undone -= 1
            self._settled.append(tag)
            self._failures += [self._failed[tag]] if tag in self._failed else []

    def require_no_error(self) -> None:
        if self.error is not None:
            raise self.error

    def news(self) -> tuple[list[int], list[Failure]]:
        """The transfers that settled since the last call, and the failures among them."""
        settled, self._settled = self._settled, []
        failures, self._failures = self._failures, []
        return settled, failures

    def add(self, part: Part) -> None:
        self.parts.append(part)
        if self._ahead:
            part.candidate.backend.yield_to_loads(part.request, True)

    def yield_to_loads(self, ahead: bool) -> None:
        """Sets whether it gives way to loads; this applies to later parts too."""
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
        """Posts transfers on a candidate, or on the next one if it cannot be opened.

        Returns:
            The part; None if the last candidate cannot be opened either. The request then has the
            error.
        """
        while request.error is None:
            try:
                part = candidate.post(
                    transfers, request.files, request.memory, self._device, request.stream
                )
            except (BackendUnavailable, PlacementError, OSError) as error:
                if candidate.name == LAST:
                    request.error = error
                else:
                    reasons = error.reasons if isinstance(error, BackendUnavailable) else {}
                    self._leave(candidate, "; ".join(dict.fromkeys(reasons.values())) or str(error))
                    candidate = self._candidates.after(candidate)
            else:
                request.add(part)
                return part
        return None

    def check(self) -> None:
        """Checks everything in flight, and reads again what failed."""
        for request in self.requests:
            for part in request.active:
                if not part.ended:  # a failure of another part may have ended it
                    self._check(request, part)
        for candidate in self._candidates:
            if why := self._reason_to_leave(candidate):
                self._leave(candidate, why)

    def _check(self, request: AutoRequest, part: Part) -> None:
        progress = part.check()
        again = self._settle(request, part, progress)
        if progress.finished:
            part.end()
            for path, nbytes in part.paths.items():
                part.candidate.read_bytes += nbytes
                if path.rpartition("/")[2] in _COMPAT:
                    part.candidate.compat_bytes += nbytes
        self._read_again(request, part.candidate, again)

    def _settle(self, request: AutoRequest, part: Part, progress: Progress) -> list[Transfer]:
        """Notes what has settled; returns the failed transfers that another candidate may read."""
        candidate, again = part.candidate, list[Transfer]()
        failures = {failure.transfer: failure for failure in progress.failures}
        for number in progress.settled:
            transfer, failure = part.transfers[number], failures.get(number)
            if failure is None or failure.permanent or candidate.name == LAST:
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
        """Why a candidate must be left, or ""."""
        if candidate.name == LAST or candidate.left:
            return ""
        compat, total = candidate.compat_bytes, candidate.read_bytes
        if compat > MOST_COMPAT_BYTES and compat > MOST_COMPAT_SHARE * total:
            return f"cuFile used its compatibility mode for {compat:,} of {total:,} bytes"
        if candidate.failures >= MOST_FAILURES:
            return f"{candidate.failures} ranges failed, first {candidate.first_failure}"
        # Its parts share a queue: progress of any of them proves that it is alive.
        mine = [part.idle_seconds for part in self.active if part.candidate is candidate]
        idle = min(mine, default=0.0)
        return f"no byte has come for {idle:.0f} s" if idle > SILENT_SECONDS else ""

    def _leave(self, candidate: Candidate, why: str) -> None:
        """Leaves a candidate: the next one reads what it has in flight."""
        candidate.left = why
        for request in self.requests:
            for part in request.active:
                if part.candidate is candidate:
                    failed = self._settle(request, part, part.check())
                    part.end()
                    self._read_again(request, candidate, failed + part.unsettled())


def path_of(registration: Registration) -> str:
    file = registration.what
    return file.path if isinstance(file, OpenFile) else ""
