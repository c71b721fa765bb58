"""Ranges on their way over lanes: what is posted, what has landed, and what failed on one lane and
goes by the next. What has landed stays, and is not read again.

A lane that fails too often, or is silent, is left: what it has under way goes on by the next one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from gdsload.backends import cufile
from gdsload.backends.base import Failure, Progress, Registration
from gdsload.backends.lanes import Lane, Part, Share, path_of, refusal
from gdsload.backends.roster import LAST, Roster
from gdsload.errors import BackendUnavailable, PlacementError
from gdsload.plan import Transfer

# A lane that failed this many ranges is left, with all that it has under way.
MOST_FAILURES = 3
# A lane from which no byte has come for so long is left too: before the load gives up (60 s), and
# no sooner than cuFile's own events are given up.
SILENT_SECONDS = 35.0
_COMPAT = ("posix", cufile.COMPAT)  # cuFile's names for what is no native way


class AutoRequest:
    """Transfers on their way, whichever way: what is left of each, and the parts they became."""

    def __init__(
        self,
        transfers: Sequence[Transfer],
        files: Sequence[Registration],
        memory: Sequence[Registration],
        stream: int | None = None,
    ) -> None:
        """`stream` is the one that its copies come after, whichever lane makes them."""
        self.transfers = transfers
        self.stream = stream
        self.files, self.memory = files, memory
        self.parts: list[Part] = []
        self._ahead = False
        self.clear()

    def clear(self) -> None:
        """As it is before it is posted."""
        self.left = [1] * len(self.transfers)  # shares of each that have not settled
        self.undone = len(self.transfers)
        self.settled: list[int] = []  # that nobody was told of
        self.failures: list[Failure] = []
        self._failed: dict[int, Failure] = {}
        self.parts.clear()

    def landed(self, origin: int, failure: Failure | None) -> None:
        """One share of a transfer has settled."""
        if failure is not None:
            self._failed.setdefault(origin, failure)
        self.left[origin] -= 1
        if self.left[origin] == 0:
            self.undone -= 1
            self.settled.append(origin)
            if origin in self._failed:
                self.failures.append(self._failed[origin])

    def take(self, part: Part, sent: Sequence[Share]) -> None:
        """A part is under way in place of the shares that were sent."""
        for origin in part.origins:
            self.left[origin] += 1
        for share in sent:
            self.left[share.origin] -= 1
        self.parts.append(part)
        if self._ahead:
            part.backend.yield_to_loads(part.request, True)

    def yield_to_loads(self, ahead: bool) -> None:
        """Whether it yields to loads that somebody waits for, with all that it has become."""
        self._ahead = ahead
        for part in self.parts:
            if not part.ended:
                part.backend.yield_to_loads(part.request, ahead)


class Dispatch:
    """The requests of one load, over the lanes of a roster."""

    def __init__(
        self,
        device: str,
        roster: Roster,
        lost: Callable[[Lane], None],
        ended: Callable[[Part, bool], None],
    ) -> None:
        """`lost` is told of a lane that is left, `ended` of a part and whether it ended well."""
        self.requests: list[AutoRequest] = []
        self.rerouted: dict[str, int] = {}  # "from -> to": bytes
        self._device, self._roster = device, roster
        self._lost, self._ended = lost, ended

    def active(self) -> list[Part]:
        return [part for each in self.requests for part in each.parts if not part.ended]

    def send(self, request: AutoRequest, shares: Sequence[Share], lane: Lane) -> None:
        """Posts shares on a lane, or on the next where it cannot take them.

        Raises what the last lane raises.
        """
        left = sorted(shares)
        while left:
            lane = self._roster.lane(lane.name)
            try:
                part, refused = lane.start(
                    left, request.files, request.memory, self._device, request.stream
                )
            except (BackendUnavailable, PlacementError, OSError) as error:
                if lane.name == LAST:
                    raise
                self.leave(lane, refusal(error))
                continue
            if part is not None:
                gone = set(refused)
                request.take(part, [share for share in left if share not in gone])
            if refused:
                self._roster.note(lane, "files", lane.first_failure)
                if part is None:
                    self.leave(lane, lane.first_failure)
                lane = self._roster.after(lane)
            left = refused

    def look(self) -> None:
        """Notes what has become of everything under way, and moves on what failed."""
        for request in list(self.requests):
            for part in list(request.parts):
                if not part.ended:
                    self._look(request, part)

    def _look(self, request: AutoRequest, part: Part) -> None:
        lane, progress = part.lane, part.check()
        again = self._absorb(request, part, progress)
        if progress.finished:
            lane.end(part)
            if by_compat := _compat_bytes(part):
                self.leave(lane, f"cuFile took its compatibility mode for {by_compat:,} bytes")
            self._ended(part, not again and not progress.failures and not by_compat)
        self._again(request, lane, again)
        if lane.name == LAST:
            return
        if lane.failed >= MOST_FAILURES:
            self.leave(lane, f"{lane.failed} ranges failed, first {lane.first_failure}")
        elif not part.ended:
            # Parts of one lane wait for each other: the one that moves speaks for all.
            idle = min(each.idle_seconds for each in self.active() if each.lane is lane)
            if idle > SILENT_SECONDS:
                self.leave(lane, f"no byte has come for {idle:.0f} s")

    def _absorb(self, request: AutoRequest, part: Part, progress: Progress) -> list[Share]:
        """Notes what has settled: the shares that are to be tried on another lane."""
        bad = {failure.transfer: failure for failure in progress.failures}
        again: list[Share] = []
        for place in progress.settled:
            share, failure = part.shares[place], bad.get(place)
            if failure is not None:
                if part.lane.name != LAST and not failure.hopeless:
                    again.append(share)
                    self._blame(request, part.lane, share, failure)
                    continue
                before = share.transfer.offset - request.transfers[share.origin].offset
                failure = failure._replace(transfer=share.origin, got=before + failure.got)
            request.landed(share.origin, failure)
        return again

    def _blame(self, request: AutoRequest, lane: Lane, share: Share, failure: Failure) -> None:
        lane.failed += 1
        if not lane.first_failure:
            path = path_of(request.files[share.transfer.shard])
            why = failure.text or os.strerror(failure.errno)
            lane.first_failure = f"{path} at {share.transfer.offset}: {why}"
        self._roster.note(lane, "ranges", f"{lane.failed} failed, first {lane.first_failure}")

    def _again(self, request: AutoRequest, lane: Lane, shares: Sequence[Share]) -> None:
        """Tries ranges on the next lane."""
        if not shares:
            return
        to = self._roster.after(lane)
        way = f"{lane.name} -> {to.name}"
        moved = sum(share.transfer.wanted for share in shares)
        self.rerouted[way] = self.rerouted.get(way, 0) + moved
        self.send(request, shares, to)

    def leave(self, lane: Lane, why: str) -> None:
        """Takes a lane no more; what it has under way goes on by the next."""
        if lane.out:
            return
        self._roster.leave(lane, why)
        self._lost(lane)
        for request in list(self.requests):
            for part in list(request.parts):
                if part.lane is lane and not part.ended:
                    failed = self._absorb(request, part, part.check())
                    lane.end(part)
                    self._ended(part, False)
                    self._again(request, lane, failed + part.unsettled())


def _compat_bytes(part: Part) -> int:
    """What cuFile read by way of the host, though nobody allowed it to."""
    if part.lane.name == LAST:
        return 0
    return sum(size for road, size in part.roads.items() if road.rpartition("/")[2] in _COMPAT)
