"""What "auto" does into VRAM: several lanes behind one face. Warm bytes are copied from the page
cache; cold ones go by the lane that was found to be the fastest from their storage, measured on the
first of them where nobody has measured it before. A range that fails is tried again on the next
lane, and the report says so.

    request ─► warm ─────────────────────────────► posix
            └► cold ─► contest: a leg each ─► winner ─► (failed) ─► gds_mt ─► (failed) ─► posix

cuFile's compatibility mode is never a lane: where a part turns out to have gone by it, its lane is
left. Measuring is added up in `contest`, failing is dealt with in `retry`, posting in `lanes`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from gdsload import gpu, ring
from gdsload.backends import cufile, registry
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
from gdsload.backends.contest import Contest
from gdsload.backends.lanes import Lane, Part, Share, path_of
from gdsload.backends.retry import AutoRequest, Dispatch
from gdsload.backends.roster import LAST, Roster
from gdsload.errors import BackendUnavailable
from gdsload.plan import Limits, Transfer

# Opening cuFile takes 50 to 180 ms; what is smaller has been read by then.
WORTH_CUFILE_BYTES = 1 << 30


class AutoBackend(Backend):
    """The lanes of one load into one device."""

    name: ClassVar[str] = "auto"
    memory_kinds: ClassVar[frozenset[str]] = frozenset({VRAM})

    def __init__(self, device: str = "cuda:0", wanted_bytes: int = 0, **options: Any) -> None:
        """`wanted_bytes` is what the load will ask for, 0 where nobody knows yet; `options` are for
        those lanes that have them.

        Raises TypeError for an option that none has, ValueError for ``allow_compat``.
        """
        super().__init__()
        self._device, self._wanted, self._asked = device, wanted_bytes, 0
        self._roster = Roster(device, options)
        self._dispatch = Dispatch(device, self._roster, self._lost, self._ended)
        self._contest: Contest | None = None
        self._why = ""
        self._leg: Part | None = None
        self._queue: deque[tuple[AutoRequest, list[Share]]] = deque()
        self._numbers = 0
        self._lock = threading.RLock()
        self.pid = os.getpid()

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        return registry.built_in(LAST).probe(device)

    # What the report asks.

    def serving(self) -> Backend:
        return self._lead().describe()

    @property
    def choice(self) -> str:
        """Which lane cold bytes take, and how it was chosen."""
        why = self._contest.why if self._contest is not None else self._why
        return f"{self._lead().name}: {why}" if why else self._lead().name

    @property
    def rates(self) -> dict[str, float]:
        """Bytes per second by lane, as they were measured."""
        return dict(self._contest.rates) if self._contest is not None else {}

    @property
    def rerouted(self) -> dict[str, int]:
        return dict(self._dispatch.rerouted)

    @property
    def refusals(self) -> dict[str, str]:
        return self._roster.refusals

    def _lead(self) -> Lane:
        return self._roster.lane(self._contest.winner if self._contest is not None else LAST)

    # What a load asks.

    def limits(self, device: str = "cpu") -> Limits:
        """The largest request of the lanes that may be taken: others are handed cuts of it."""
        self._own()
        with self._lock:
            if self._worth():
                self._roster.search()
            found = [self._roster.lane(n).open().limits(device) for n in self._roster.standing()]
        return max(found, key=lambda each: each.max_request)

    def register(self, what: OpenFile | Memory) -> Registration:
        """Lanes are told of it when they first need it."""
        if isinstance(what, Memory) and what.kind != VRAM:
            raise BackendUnavailable(f"'auto' into {self._device} does not reach {what.kind}")
        with self._lock:
            self._numbers += 1
            return Registration(what, self._numbers)

    def deregister(self, registration: Registration) -> None:
        if self.pid == os.getpid():
            with self._lock:
                for lane in self._roster.lanes.values():
                    lane.forget(registration.handle)

    def prepare(
        self,
        transfers: Sequence[Transfer],
        files: Sequence[Registration],
        memory: Sequence[Registration],
    ) -> AutoRequest:
        self._own()
        return AutoRequest(transfers, files, memory)

    def follow(self, device: str, stream: int) -> bool:
        """Lanes are told when they start a part, also those that are opened later. While they are
        measured the caller waits: a lane is not to be blamed for what the device had to do first.
        """
        with self._lock:
            if device != self._device or (self._contest is not None and self._contest.next):
                return False
            self._dispatch.stream = stream
            return True

    def post(self, request: AutoRequest) -> None:
        """Warm ranges at once; cold ones too, but while lanes are measured one leg at a time."""
        self._own()
        with self._lock:
            if request in self._dispatch.requests:
                if request.undone:
                    raise RuntimeError("this request is under way already")
                self._dispatch.requests.remove(request)
            request.clear()
            self._dispatch.requests.append(request)
            shares = [Share(place, each) for place, each in enumerate(request.transfers)]
            cold = [share for share in shares if _is_cold(share.transfer, request.files)]
            self._asked += sum(share.transfer.wanted for share in cold)
            if cold and not self._worth():
                self._why = f"less than {WORTH_CUFILE_BYTES:,} bytes do not repay opening cuFile"
                cold = []
            elif not cold:
                self._why = self._why or "what was read was in the page cache, or is to pass by it"
            own = {share.origin for share in cold}
            if warm := [share for share in shares if share.origin not in own]:
                self._dispatch.send(request, warm, self._roster.lane(LAST))
            if cold:
                self._send_cold(request, cold)

    def _worth(self) -> bool:
        return max(self._wanted, self._asked) >= WORTH_CUFILE_BYTES or cufile.is_open()

    def _send_cold(self, request: AutoRequest, shares: list[Share]) -> None:
        self._roster.search()
        standing = self._roster.standing()
        if len(standing) == 1:
            self._why = f"no other road leads to {self._device}"
        elif self._contest is None:
            # Storage of the first file stands for all: checkpoints lie on one.
            path = path_of(request.files[shares[0].transfer.shard])
            self._contest = Contest(standing, path, self._device)
        self._queue.append((request, shares))
        self._advance()

    def _advance(self) -> None:
        """Moves everything on that can be: news of all parts, legs that ended, what waited."""
        self._dispatch.look()
        while self._queue and self._leg is None:
            request, shares = self._queue.popleft()
            turn = self._contest.next if self._contest is not None else ""
            if self._contest is None or not turn:
                self._dispatch.send(request, shares, self._lead())
                continue
            cut = _first(shares, self._contest.wanted_bytes)
            if shares[cut:]:
                self._queue.appendleft((request, shares[cut:]))
            before = len(request.parts)
            self._dispatch.send(request, shares[:cut], self._roster.lane(turn))
            # On another lane, where that one could not take it: then it is measured instead.
            self._leg = request.parts[-1] if len(request.parts) > before else None

    def _lost(self, lane: Lane) -> None:
        if self._contest is not None:
            self._contest.lost(lane.name)

    def _ended(self, part: Part, well: bool) -> None:
        """A leg shows what its lane can do."""
        if self._leg is not part:
            return
        self._leg = None
        if well and self._contest is not None:
            if part.direct:
                self._contest.moved(part.lane.name, part.nbytes, part.seconds())
            else:
                self._contest.unmeasured(part.lane.name)
            if not self._contest.next:
                self._stand_down(self._contest.winner)

    def _stand_down(self, winner: str) -> None:
        """Those that were slower give back their threads, and rings that nobody else reads by."""
        busy = {part.lane.name for part in self._dispatch.active()}
        for name, lane in self._roster.lanes.items():
            if name != winner and name not in busy:
                lane.close()
        kind = VRAM if winner == LAST else DRAM
        ring.release_rings(kind, gpu.ordinal_of(self._device))

    def yield_to_loads(self, request: AutoRequest, ahead: bool) -> None:
        with self._lock:
            request.yield_to_loads(ahead)

    def check(self, request: AutoRequest) -> Progress:
        self._own()
        with self._lock:
            self._advance()
            settled, request.settled = request.settled, []
            failures, request.failures = request.failures, []
            idle = min((part.idle_seconds for part in self._dispatch.active()), default=0.0)
            finished = request.undone == 0 or request not in self._dispatch.requests
            return Progress(settled, failures, finished, idle)

    def wait(self, request: AutoRequest, seconds: float, first: int = 0, last: int = -1) -> None:
        self._own()
        last = last if last >= 0 else len(request.transfers) - 1
        with self._lock:
            spots = [(part, part.places(first, last)) for part in request.parts if not part.ended]
            found = next(((part, at) for part, at in spots if at is not None), None)
            if found is None and self._leg is not None:  # it is not its turn yet
                found = self._leg, (0, len(self._leg.shares) - 1)
            if found is not None:
                part, (low, high) = found
                backend = part.backend
        if found is None:
            super().wait(request, seconds)
        else:
            backend.wait(part.request, seconds, low, high)

    def release(self, request: AutoRequest) -> None:
        if self.pid != os.getpid():
            return
        with self._lock:
            self._queue = deque(each for each in self._queue if each[0] is not request)
            for part in request.parts:
                part.lane.end(part)
                if self._leg is part:
                    self._leg = None
            if request in self._dispatch.requests:
                self._dispatch.requests.remove(request)

    def roads(self, request: AutoRequest) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in request.parts:
            for road, size in part.roads.items():
                found[road] = found.get(road, 0) + size
        return found

    def close(self) -> None:
        if self.pid != os.getpid():
            return
        with self._lock:
            for request in list(self._dispatch.requests):
                self.release(request)
            for lane in self._roster.lanes.values():
                lane.close()

    def _own(self) -> None:
        if self.pid != os.getpid():
            raise BackendUnavailable(
                "this backend was opened before a fork: its threads and its device stayed in the"
                " parent",
                {"auto": "used after fork; start processes that load with 'spawn'"},
            )


def _is_cold(transfer: Transfer, files: Sequence[Registration]) -> bool:
    """Whether it comes from storage: what is read through the page cache says nothing of that."""
    file = files[transfer.shard].what
    return transfer.road == "direct" and isinstance(file, OpenFile) and file.direct_fd >= 0


def _first(shares: Sequence[Share], nbytes: int) -> int:
    """How many shares bring so many bytes."""
    held = 0
    for count, share in enumerate(shares, start=1):
        held += share.transfer.wanted
        if held >= nbytes:
            return count
    return len(shares)
