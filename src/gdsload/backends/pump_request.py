"""What every request of a pump has in common: it belongs to the process that made it, is posted,
and tells what has settled. Which memory it reads to, and what ends with it, is what they differ in.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from gdsload._native.request import Request
from gdsload.backends.base import Failure, OpenFile, Progress, Registration
from gdsload.errors import BackendUnavailable


class PumpedRequest:
    """Transfers bound to a pump; `native` is what the pump has of them."""

    def __init__(self, backend: str, native: Request) -> None:
        self.backend, self.native = backend, native

    def start(self) -> None:
        """Posts it. Raises BackendUnavailable after a fork, or where the pump has ended."""
        self.require_own_process()
        try:
            self.native.post()
        except OSError as error:
            raise BackendUnavailable(
                f"backend {self.backend!r} can read no more: {error.strerror}",
                {self.backend: str(error)},
            ) from error

    def require_own_process(self) -> None:
        """Raises BackendUnavailable after a fork."""
        if self.native.pump.pid != os.getpid():
            raise BackendUnavailable(
                "this request was made before a fork: its reads stayed in the parent",
                {self.backend: "used after fork; open a new one in the child"},
            )

    def progress(self) -> Progress:
        """What has settled since it was last asked."""
        self.require_own_process()
        native = self.native
        # Asked before the news: what settles in between is then told the next time, not lost.
        finished = native.settled == native.count or not native.posted
        settled = native.news()
        failures = []
        if native.failed:
            failures = [self.failure(place) for place in settled if native.result(place)[2]]
        return Progress(settled, failures, finished, native.idle_seconds)

    def yield_to_loads(self, ahead: bool) -> None:
        """Whether nobody waits for it yet."""
        self.native.ahead = ahead

    def failure(self, place: int) -> Failure:
        """What the pump noted of a failed transfer."""
        _, got, code = self.native.result(place)
        return Failure(place, got, max(code, 0))

    def refused_direct(self) -> dict[int, str]:
        """By the place of the file, in words: direct reads that were refused when made."""
        found: dict[int, str] = {}
        for place, code, whole in self.native.refused_direct():
            found[place // 2] = (  # of file_table
                f"the kernel refused direct reads of it ({os.strerror(code)}):"
                f" {'the rest' if whole else 'these bytes'} came through the page cache"
            )
        return found

    def wait(self, seconds: float, first: int, last: int) -> None:
        """Returns when these transfers have settled, after `seconds` at the latest."""
        self.require_own_process()
        self.native.wait(seconds, first, last)


def file_table(
    files: Sequence[Registration], *, by_slot: bool = True
) -> tuple[list[tuple[int, int, int, int, int]], dict[int, int], dict[int, int]]:
    """The pump's table of files: each once with its direct descriptor, and once without. Without
    `by_slot` they are known by their descriptors alone, and an engine keeps none of them."""
    table: list[tuple[int, int, int, int, int]] = []
    direct: dict[int, int] = {}
    buffered: dict[int, int] = {}
    for place, registration in enumerate(files):
        file = registration.what
        if not isinstance(file, OpenFile):
            raise TypeError(f"file {place} of the request is {file!r}")
        direct_slot, buffered_slot = registration.handle if by_slot else (-1, -1)
        direct[place] = len(table)
        table.append((file.fd, file.direct_fd, file.block, direct_slot, buffered_slot))
        buffered[place] = len(table)
        table.append((file.fd, -1, file.block, direct_slot, buffered_slot))
    return table, direct, buffered
