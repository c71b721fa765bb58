"""One road among several that a load may take: a backend that is opened when it is first needed,
and the parts of the load that it has under way, cut to what one of its requests may be.

Which lane a range takes, and what becomes of one that failed, is decided in `auto`.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gdsload.backends.base import NO_FILE, Backend, OpenFile, Progress, Registration
from gdsload.errors import BackendUnavailable, CuFileError
from gdsload.plan import DEFAULT_BLOCK_BYTES, Transfer


class Share(NamedTuple):
    """A transfer, or a cut of one, and the place in its request of the transfer that it is of."""

    origin: int
    transfer: Transfer


class Part:
    """Shares that a lane has under way."""

    def __init__(self, lane: Lane, backend: Backend, shares: Sequence[Share], request: Any) -> None:
        """`backend` is the lane's, which made the request."""
        self.lane, self.backend, self.shares, self.request = lane, backend, shares, request
        self.origins = [share.origin for share in shares]
        self.settled = bytearray(len(shares))
        self.posted_at = self.ended_at = time.monotonic()
        self.roads: dict[str, int] = {}  # when it has ended
        self.idle_seconds = 0.0
        self.ended = False
        self.memory: list[Registration] = []

    @property
    def transfers(self) -> list[Transfer]:
        return [share.transfer for share in self.shares]

    @property
    def nbytes(self) -> int:
        return sum(share.transfer.wanted for share in self.shares)

    def unsettled(self) -> list[Share]:
        return [share for share, here in zip(self.shares, self.settled, strict=True) if not here]

    def places(self, first: int, last: int) -> tuple[int, int] | None:
        """Where the shares of these transfers stand, if one of them has not settled."""
        low, high = bisect_left(self.origins, first), bisect_right(self.origins, last)
        low = self.settled.find(0, low, high)
        return (low, high - 1) if low >= 0 else None

    def check(self) -> Progress:
        progress: Progress = self.backend.check(self.request)
        for place in progress.settled:
            self.settled[place] = 1
        self.idle_seconds = progress.idle_seconds
        return progress

    @property
    def direct(self) -> bool:
        """Whether nearly all of it came by direct reads, and not through the page cache after
        all."""
        native = getattr(self.request, "native", None)
        return native is None or 10 * native.counts()[0] >= 9 * self.nbytes

    def seconds(self) -> float:
        """From its first read to its last byte in place."""
        native = getattr(self.request, "native", None)
        times = [(posted, done) for posted, done, _ in native.trace() if done] if native else []
        if not times:
            return self.ended_at - self.posted_at
        return float(max(done for _, done in times) - min(posted for posted, _ in times)) * 1e-9


class Lane:
    """A backend and what it knows of a load. `out` says why it is not taken any more."""

    def __init__(self, kind: type[Backend], options: Mapping[str, Any]) -> None:
        self.name = kind.name
        self.out = ""
        self.failed = 0
        self.first_failure = ""
        self._kind, self._options = kind, dict(options)
        self._backend: Backend | None = None
        self._last: Backend | None = None  # also when it is closed
        self._files: dict[int, Registration | None] = {}  # None: it does not take this file

    def open(self) -> Backend:
        """The backend, made by the first call. Raises BackendUnavailable, and TypeError or
        ValueError for options that cannot be."""
        if self._backend is None:
            self._backend = self._last = self._kind(**self._options)
        return self._backend

    def describe(self) -> Backend:
        """The backend, for reports: after `close` the closed one."""
        return self._last or self.open()

    @property
    def refusals(self) -> dict[str, str]:
        return dict(getattr(self._last, "refusals", {}))

    def start(
        self,
        shares: Iterable[Share],
        files: Sequence[Registration],
        memory: Sequence[Registration],
        device: str,
        stream: int | None = None,
    ) -> tuple[Part | None, list[Share]]:
        """Posts shares: the part that they make up, and those of files that it does not take. They
        are copied when the device has done what it was given on `stream`, where there is one.

        Raises what a backend raises that cannot be opened, or finds no room for its ring.
        """
        backend, refused = self.open(), []
        known = [NO_FILE] * len(files)
        taken: list[Share] = []
        for share in shares:
            number = share.transfer.shard
            if known[number] is NO_FILE:
                found = self._file(files[number])
                if found is None:
                    refused.append(share)
                    continue
                known[number] = found
            taken.append(share)
        if not taken:
            return None, refused
        limit = backend.limits(device).max_request
        cuts = [cut for share in taken for cut in cut_to(share, limit)]
        if stream is not None and not backend.follow(device, stream):
            why = f"{device} takes no order between its streams"
            raise BackendUnavailable(f"backend {self.name!r}: {why}", {self.name: why})
        registered: list[Registration] = []
        request = None
        try:
            for entry in memory:
                registered.append(backend.register(entry.what))
            request = backend.prepare([cut.transfer for cut in cuts], known, registered)
            part = Part(self, backend, cuts, request)
            part.memory = registered
            backend.post(request)
        except BaseException:
            if request is not None:
                backend.release(request)
            for registration in registered:
                backend.deregister(registration)
            raise
        return part, refused

    def _file(self, registration: Registration) -> Registration | None:
        file, number = registration.what, registration.handle
        if number not in self._files:
            try:
                self._files[number] = self.open().register(file)
            except CuFileError as error:
                self._files[number] = None
                self.first_failure = self.first_failure or str(error)
        return self._files[number]

    def end(self, part: Part) -> None:
        """Ends a part, settled or not: nothing is written to its memory any more."""
        if part.ended:
            return
        part.ended, part.ended_at = True, time.monotonic()
        part.backend.release(part.request)
        part.roads = part.backend.roads(part.request)
        for registration in part.memory:
            part.backend.deregister(registration)

    def forget(self, number: int) -> None:
        """A file is about to be closed."""
        known = self._files.pop(number, None)
        if known is not None and self._backend is not None:
            self._backend.deregister(known)

    def close(self) -> None:
        """Gives back what the backend holds; the next use makes another."""
        backend, self._backend = self._backend, None
        files, self._files = list(self._files.values()), {}
        if backend is not None:
            for registration in files:
                if registration is not None:
                    backend.deregister(registration)
            backend.close()


def cut_to(share: Share, limit: int) -> list[Share]:
    """A share in parts of `limit` bytes at most, each on the blocks that it was aligned to."""
    whole = share.transfer
    if whole.length <= limit:
        return [share]
    step = max(limit // DEFAULT_BLOCK_BYTES * DEFAULT_BLOCK_BYTES, DEFAULT_BLOCK_BYTES)
    return [
        Share(
            share.origin,
            whole._replace(
                offset=whole.offset + at,
                length=min(step, whole.length - at),
                wanted=min(step, whole.wanted - at),
                target_offset=whole.target_offset + at,
            ),
        )
        for at in range(0, whole.wanted, step)
    ]


def refusal(error: BaseException) -> str:
    """Why a lane cannot be taken, from what it raised."""
    if isinstance(error, BackendUnavailable) and error.reasons:
        return "; ".join(dict.fromkeys(error.reasons.values()))
    return str(error)


def path_of(registration: Registration) -> str:
    file = registration.what
    return file.path if isinstance(file, OpenFile) else ""
