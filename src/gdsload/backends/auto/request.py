"""A request of the backend `auto`, and the parts of it that candidates read.

Not responsible for which candidate reads a part (`backend`).
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gdsload.backends.auto.transfers import wanted_bytes_of
from gdsload.backends.base import Failure, OpenFile, Progress, Registrations, RequestFacts
from gdsload.errors import without_traceback
from gdsload.planning.read_plan import Transfer

if TYPE_CHECKING:
    from gdsload.backends.auto.candidate import Candidate


HELD_UP_SECONDS = 0.05  # a longer wait of copies is caused by other work of the device


@dataclass(eq=False)
class AutoRequest:
    """Transfers that one or more candidates read.

    Attributes:
        transfers: The transfers. Their `tag` is their position.
        stream: A CUstream: copies of all parts come after the work on it. None if there is none.
        ahead: Whether it gives way to loads.
        undone: The number of transfers that have not settled.
        error: Why no candidate could be opened; final.
        parts: The parts that were posted.
        held: Transfers of parts that have ended, whose copies may be under way: the next candidate
            would write to the same memory.
    """

    transfers: list[Transfer]
    files: Registrations
    memory: Registrations
    stream: int | None = None
    ahead: bool = False
    undone: int = 0
    error: BaseException | None = None
    parts: list[Part] = field(default_factory=list)
    held: list[tuple[Part, list[Transfer]]] = field(default_factory=list)

    def reset(self) -> None:
        """Back to the state before it was posted."""
        self.undone, self.error = len(self.transfers), None
        self._left_bytes = [transfer.wanted for transfer in self.transfers]
        self._settled: list[int] = []  # not reported yet
        self._failed: dict[int, Failure] = {}
        self.parts.clear()
        self.held.clear()

    @property
    def active(self) -> list[Part]:
        return [part for part in self.parts if not part.ended]

    def take_released(self) -> list[tuple[Part, list[Transfer]]]:
        """Removes what was held for copies that have ended meanwhile."""
        found = self.held
        self.held = [each for each in found if not each[0].is_idle]
        return [each for each in found if each not in self.held]

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

    def take_settled(self) -> tuple[list[int], list[Failure]]:
        """The transfers that settled since the last call, and the failures among them."""
        if self.error is not None:
            raise without_traceback(self.error)
        settled, self._settled = self._settled, []
        return settled, [self._failed[tag] for tag in settled if tag in self._failed]


class Part:
    """Transfers of a request that a candidate has in flight.

    Attributes:
        request: The request to the backend of the candidate.
        ended: Whether it has been ended.
        failures: The number of transfers that failed.
        idle_seconds: Time since the last byte was read.
        device_busy: As in `Progress`.
        was_held_up: Whether its copies have waited for other work of the device.
        paths: Bytes by I/O path, once it has ended.
    """

    def __init__(
        self, candidate: Candidate, transfers: Sequence[Transfer], request: Any, taken: ExitStack
    ) -> None:
        """`taken` releases the request and its registrations."""
        self.candidate, self.request = candidate, request
        self.transfers, self._tags = transfers, [transfer.tag for transfer in transfers]
        self.ended, self.failures, self.idle_seconds = False, 0, 0.0
        self.device_busy = self.was_held_up = False
        self.paths: dict[str, int] = {}
        self._taken, self._settled = taken, bytearray(len(transfers))
        self._posted_at = self._ended_at = time.monotonic()

    def check(self) -> Progress:
        progress = self.candidate.backend.check(self.request)
        for number in progress.settled:
            self._settled[number] = 1
        self.failures += len(progress.failures)
        self.idle_seconds, self.device_busy = progress.idle_seconds, progress.device_busy
        self.was_held_up |= self.device_busy and self.idle_seconds > HELD_UP_SECONDS
        return progress

    def unsettled(self) -> list[Transfer]:
        return [t for t, done in zip(self.transfers, self._settled, strict=True) if not done]

    def unsettled_range(self, first: int, last: int) -> tuple[int, int] | None:
        """The positions of its transfers that belong to a range of the whole request; None if all
        of them have settled."""
        low, high = bisect_left(self._tags, first), bisect_right(self._tags, last)
        return (low, high - 1) if 0 in self._settled[low:high] else None

    @property
    def is_idle(self) -> bool:
        """Whether no copy of it is under way any more; to be asked once it has ended."""
        return self.candidate.backend.is_idle(self.request)

    @property
    def ended_seconds(self) -> float:
        """Time since it has ended."""
        return time.monotonic() - self._ended_at

    @property
    def facts(self) -> Sequence[RequestFacts]:
        """Counts and times, once it has ended."""
        return self.candidate.backend.facts(self.request) or [RequestFacts(self.transfers)]

    @property
    def is_direct(self) -> bool:
        """Whether nearly all bytes were read directly, so that its rate is that of the storage."""
        wanted = wanted_bytes_of(self.transfers)
        return all(not 0 <= 10 * each.direct_bytes < 9 * wanted for each in self.facts)

    def seconds(self) -> float:
        """From its first read to its last copied byte."""
        times = [times for each in self.facts for times in each.times if all(times)]
        if not times:
            return self._ended_at - self._posted_at
        return (max(done for _, done in times) - min(posted for posted, _ in times)) * 1e-9

    def end(self) -> None:
        """Ends it, settled or not: nothing is written to its memory afterwards."""
        self.ended, self._ended_at = True, time.monotonic()
        self._taken.close()
        self.paths = self.candidate.backend.paths(self.request)


def path_of(request: AutoRequest, transfer: Transfer) -> str:
    file = request.files[transfer.shard].what
    return file.path if isinstance(file, OpenFile) else ""
