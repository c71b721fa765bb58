"""The bytes of served files that have arrived, while the source of the server sends the rest.

    source ──► memory that is served ──► arrivals: file, start, end ──► readers that wait for them

Everything here runs in one event loop. Not responsible for reading (`peers.receiving`).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from operator import itemgetter

_first, _end = itemgetter(0), itemgetter(1)


class Arrivals:
    """The parts of files that have arrived.

    Attributes:
        nbytes: Their bytes.
        failure: Why no more will arrive, or "".
    """

    def __init__(self) -> None:
        self.nbytes, self.failure = 0, ""
        self._spans: dict[str, list[tuple[int, int]]] = {}  # sorted; no two touch each other
        self._changed = asyncio.Event()
        self._waiting = 0

    def add(self, file: str, start: int, end: int) -> None:
        """Notes that the bytes from `start` to `end` of a file have arrived."""
        self.nbytes += end - start
        spans = self._spans.setdefault(file, [])
        low, high = bisect_left(spans, start, key=_end), bisect_right(spans, end, key=_first)
        for span in spans[low:high]:
            start, end = min(start, span[0]), max(end, span[1])
        spans[low:high] = [(start, end)]
        self._wake()

    async def end(self, failure: str = "") -> None:
        """Notes that no more bytes will arrive, and waits until all who wait for some know it."""
        self.failure = failure
        self._wake()
        while self._waiting:
            await asyncio.sleep(0)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def has(self, file: str, offset: int, nbytes: int) -> bool:
        """Whether all of a range has arrived."""
        spans = self._spans.get(file, [])
        number = bisect_right(spans, offset, key=_first) - 1
        return number >= 0 and offset + nbytes <= spans[number][1]

    async def wait_for(self, file: str, offset: int, nbytes: int, seconds: float) -> bool:
        """Whether a range has arrived, after up to `seconds`, or once it is sure that it never
        will."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not self.has(file, offset, nbytes):
            left = deadline - loop.time()
            if self.failure or left <= 0:
                return False
            self._waiting += 1
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                # Not by asyncio.wait_for: before Python 3.12 it may swallow a cancellation.
                await asyncio.wait([changed], timeout=left)
            finally:
                changed.cancel()
                self._waiting -= 1
        return True
