"""The backends that `auto` chooses between, and the requests that each of them has in flight.

A `Candidate` opens its backend when it is first used. A `Part` is one request of that backend, for
some transfers of a request of `auto`. Not responsible for which candidate reads which transfers.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from gdsload.backends import registry
from gdsload.backends.base import (
    NO_FILE,
    Backend,
    Progress,
    Registration,
    Registrations,
    RequestFacts,
)
from gdsload.errors import BackendUnavailable
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, Transfer

LAST = "posix"  # it needs nothing but CUDA
ORDER = ("gds_mt", LAST, "gds")  # of preference, if they are equally fast
_NEXT = {"gds": "gds_mt", "gds_mt": LAST}  # the candidate that reads failed transfers again


class Part:
    """Transfers that a candidate has in flight. Their `tag` is the position of the whole transfer
    in the request of `auto`."""

    def __init__(
        self, candidate: Candidate, transfers: Sequence[Transfer], request: Any, taken: ExitStack
    ) -> None:
        """`taken` releases the request and its registrations."""
        self.candidate, self.transfers, self.request = candidate, transfers, request
        self.ended, self.failures, self.idle_seconds = False, 0, 0.0
        self.paths: dict[str, int] = {}  # known when it has ended
        self._taken = taken
        self._tags = [transfer.tag for transfer in transfers]
        self._settled = bytearray(len(transfers))
        self._posted_at = self._ended_at = time.monotonic()

    def check(self) -> Progress:
        progress = self.candidate.backend.check(self.request)
        for number in progress.settled:
            self._settled[number] = 1
        self.failures += len(progress.failures)
        self.idle_seconds = progress.idle_seconds
        return progress

    def unsettled(self) -> list[Transfer]:
        return [t for t, done in zip(self.transfers, self._settled, strict=True) if not done]

    def unsettled_range(self, first: int, last: int) -> tuple[int, int] | None:
        """The positions of its transfers that belong to a range of the request of `auto`; None if
        all of them have settled."""
        low, high = bisect_left(self._tags, first), bisect_right(self._tags, last)
        low = self._settled.find(0, low, high)
        return (low, high - 1) if low >= 0 else None

    @property
    def facts(self) -> Sequence[RequestFacts]:
        """Counts and times, once it has ended."""
        return self.candidate.backend.facts(self.request) or [RequestFacts(self.transfers)]

    @property
    def is_direct(self) -> bool:
        """Whether nearly all bytes were read directly, so that its rate is that of the storage."""
        wanted = sum(transfer.wanted for transfer in self.transfers)
        return all(not 0 <= 10 * each.direct_bytes < 9 * wanted for each in self.facts)

    def seconds(self) -> float:
        """From its first read to its last copied byte."""
        times = [times for each in self.facts for times in each.times if times[1]]
        if not times:
            return self._ended_at - self._posted_at
        return (max(done for _, done in times) - min(posted for posted, _ in times)) * 1e-9

    def end(self) -> None:
        """Ends it, settled or not: nothing is written to its memory afterwards."""
        self.ended, self._ended_at = True, time.monotonic()
        self._taken.close()
        self.paths = self.candidate.backend.paths(self.request)


class Candidate:
    """A backend that a load may use. `left` says why it is no longer used, or is ""."""

    def __init__(self, kind: type[Backend], options: Mapping[str, Any]) -> None:
        self.name = kind.name
        self.left = self.first_failure = ""
        self.failures = 0
        self.read_bytes = self.compat_bytes = 0  # of parts that have ended
        self.fixed_seconds = -1.0  # time to open it; -1: it was never opened
        self._kind, self._options = kind, options
        self._files: dict[int, Registration] = {}

    @cached_property
    def backend(self) -> Backend:
        """Made once. Raises BackendUnavailable, and TypeError or ValueError for its options."""
        return self._kind(**self._options)

    def post(
        self,
        transfers: Sequence[Transfer],
        files: Registrations,
        memory: Registrations,
        device: str,
        stream: int | None = None,
    ) -> Part:
        """Posts transfers, split to the largest read of the backend. Their copies come after the
        present work of `stream`, if one is given.

        Raises:
            BackendUnavailable: The backend does not open.
            CuFileError: The backend refuses a file.
            PlacementError: There is no room for its ring.
        """
        started, backend = time.monotonic(), self.backend
        needed = {transfer.shard for transfer in transfers}
        known = [self._file(f) if n in needed else NO_FILE for n, f in enumerate(files)]
        limit = backend.limits(device).max_request
        parts = [part for transfer in transfers for part in split(transfer, limit)]
        if stream is not None and not backend.follow(device, stream):
            why = f"{device} cannot order its streams"
            raise BackendUnavailable(f"backend {self.name!r}: {why}", {self.name: why})
        registered: list[Registration] = []
        with ExitStack() as taken:  # released in reverse order; here only if something fails
            for entry in memory:
                registered.append(backend.register(entry.what))
                taken.callback(backend.deregister, registered[-1])
            request = backend.prepare(parts, known, registered)
            taken.callback(backend.release, request)
            if self.fixed_seconds < 0:
                self.fixed_seconds = time.monotonic() - started
            backend.post(request)
            return Part(self, parts, request, taken.pop_all())

    def _file(self, registration: Registration) -> Registration:
        number = registration.handle
        if number not in self._files:
            self._files[number] = self.backend.register(registration.what)
        return self._files[number]

    def forget(self, number: int) -> None:
        """Deregisters a file before it is closed."""
        if number in self._files:
            self.backend.deregister(self._files.pop(number))

    @property
    def is_open(self) -> bool:
        """Whether its backend has files."""
        return bool(self._files)

    def close(self) -> None:
        """Closes the backend; the next use opens it again."""
        for number in list(self._files):
            self.forget(number)
        if "backend" in self.__dict__:
            self.backend.close()


class Candidates:
    """The candidates for one device."""

    def __init__(self, device: str, options: Mapping[str, Any]) -> None:
        """`options` go to the candidates that have them.

        Raises:
            TypeError: No candidate has such an option.
            ValueError: ``allow_compat`` is set.
        """
        if options.get("allow_compat"):
            raise ValueError(
                "allow_compat=True: 'auto' never uses cuFile's compatibility mode; ask for"
                " backend='gds_mt' or 'gds' by name"
            )
        self._device, self._options = device, options
        self._unprobed = [name for name in ORDER if name != LAST]
        self._refusals: dict[str, str] = {}
        self._known = {LAST: Candidate(registry.built_in(LAST), self._options_of(LAST))}
        unknown = options.keys() - {key for name in ORDER for key in self._options_of(name)}
        if unknown:
            registry.built_in(LAST)(**{key: options[key] for key in unknown})

    def _options_of(self, name: str) -> dict[str, Any]:
        known = {option.name for option in registry.built_in(name).options()}
        return {key: value for key, value in self._options.items() if key in known}

    def probe(self) -> None:
        """Probes the candidates besides the last one, once. None is opened."""
        names, self._unprobed = self._unprobed, []
        for name in names:
            options = self._options_of(name)
            if foreign := self._options.keys() - options.keys():
                self._refusals[name] = f"it has no option {', '.join(sorted(foreign))}"
                continue
            kind = registry.built_in(name)
            if registry.is_usable(kind, self._device, self._refusals):
                self._known[name] = Candidate(kind, options)

    def __iter__(self) -> Iterator[Candidate]:
        """Those that work here, in the order of preference."""
        return iter([self._known[name] for name in ORDER if name in self._known])

    def __getitem__(self, name: str) -> Candidate:
        """The candidate of that name, or the next one that works."""
        while name != LAST and (name not in self._known or self._known[name].left):
            name = _NEXT[name]
        return self._known[name]

    def after(self, candidate: Candidate) -> Candidate:
        """The candidate that reads again what failed on this one."""
        return self[_NEXT[candidate.name]]

    @property
    def refusals(self) -> dict[str, str]:
        """Why a candidate is not used, or not any more, and the limitations of the others."""
        found = dict(self._refusals)
        for each in self:
            if each.failures:
                found[f"{each.name}/ranges"] = f"{each.failures} failed, first {each.first_failure}"
            if each.left:
                found[each.name] = each.left
            if "backend" in each.__dict__:  # it was made
                found.update(each.backend.status().refusals)
        return found


def split(whole: Transfer, limit: int) -> list[Transfer]:
    """Splits a transfer into reads of at most `limit` bytes that start on blocks like the whole."""
    step = max(limit // DEFAULT_BLOCK_BYTES * DEFAULT_BLOCK_BYTES, DEFAULT_BLOCK_BYTES)
    if whole.length <= limit:
        step = max(whole.length, 1)
    return [
        whole._replace(
            offset=whole.offset + start,
            length=min(step, whole.length - start),
            wanted=min(step, whole.wanted - start),
            target_offset=whole.target_offset + start,
        )
        for start in range(0, max(whole.wanted, 1), step)
    ]
