"""The backends that `auto` chooses between, and what each of them has under way.

A `Candidate` opens its backend when it is first used. A `Part` is one request of that backend, for
some transfers of a request of `auto`. Which candidate reads what is not decided here.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from gdsload.backends import registry
from gdsload.backends.base import NO_FILE, Backend, Progress, Registration
from gdsload.errors import BackendUnavailable
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, Transfer

LAST = "posix"  # it needs nothing but CUDA
ORDER = ("gds_mt", LAST, "gds")  # of preference, where they are equally fast
_NEXT = {"gds": "gds_mt", "gds_mt": LAST}  # where a failed transfer is read again


class Part:
    """Transfers that a candidate has under way. Their `tag` is the place in the request of `auto`
    of the transfer that they are, or were cut from."""

    def __init__(
        self, candidate: Candidate, transfers: Sequence[Transfer], request: Any, taken: ExitStack
    ) -> None:
        """`taken` gives back the request and the registrations that it needs."""
        self.candidate, self.transfers, self.request = candidate, transfers, request
        self.ended, self.failures, self.idle_seconds = False, 0, 0.0
        self.paths: dict[str, int] = {}  # when it has ended
        self._taken = taken
        self._places = [transfer.tag for transfer in transfers]
        self._settled = bytearray(len(transfers))
        self._posted_at = self._ended_at = time.monotonic()

    def check(self) -> Progress:
        progress = self.candidate.backend.check(self.request)
        for place in progress.settled:
            self._settled[place] = 1
        self.failures += len(progress.failures)
        self.idle_seconds = progress.idle_seconds
        return progress

    def unsettled(self) -> list[Transfer]:
        return [t for t, done in zip(self.transfers, self._settled, strict=True) if not done]

    def unsettled_range(self, first: int, last: int) -> tuple[int, int] | None:
        """Its own range of transfers for a range of the request's; None if all have settled."""
        low, high = bisect_left(self._places, first), bisect_right(self._places, last)
        low = self._settled.find(0, low, high)
        return (low, high - 1) if low >= 0 else None

    @property
    def is_direct(self) -> bool:
        """Whether nearly all of it came by direct reads: the page cache says nothing of storage."""
        native = getattr(self.request, "native", None)
        wanted = sum(transfer.wanted for transfer in self.transfers)
        return native is None or 10 * native.counts()[0] >= 9 * wanted

    def seconds(self) -> float:
        """From its first read to its last byte in place."""
        native = getattr(self.request, "native", None)
        times = [(posted, done) for posted, done, _ in native.trace() if done] if native else []
        if not times:
            return self._ended_at - self._posted_at
        return float(max(done for _, done in times) - min(posted for posted, _ in times)) * 1e-9

    def end(self) -> None:
        """Ends it, settled or not: nothing is written to its memory any more."""
        self.ended, self._ended_at = True, time.monotonic()
        self._taken.close()
        self.paths = self.candidate.backend.paths(self.request)


class Candidate:
    """A backend that a load may use. `left` says why it is not used any more."""

    def __init__(self, kind: type[Backend], options: Mapping[str, Any]) -> None:
        self.name = kind.name
        self.left = self.first_failure = ""
        self.failures = 0
        self.read_bytes = self.compat_bytes = 0  # of parts that have ended
        self.fixed_seconds = -1.0  # what opening it took; -1: it was never opened
        self._kind, self._options = kind, options
        self._files: dict[int, Registration] = {}

    @cached_property
    def backend(self) -> Backend:
        """Made once. Raises BackendUnavailable, and TypeError or ValueError for its options."""
        return self._kind(**self._options)

    def post(
        self, transfers: Sequence[Transfer], files: Sequence[Registration],
        memory: Sequence[Registration], device: str, stream: int | None = None,
    ) -> Part:  # fmt: skip
        """Posts transfers, cut to the backend's largest request. Their copies come after what the
        device has to do on `stream`, if there is one.

        Raises BackendUnavailable, CuFileError for a file that the backend does not take,
        PlacementError without room for its ring.
        """
        started, backend = time.monotonic(), self.backend
        needed = {transfer.shard for transfer in transfers}
        known = [self._file(f) if n in needed else NO_FILE for n, f in enumerate(files)]
        limit = backend.limits(device).max_request
        cuts = [cut for transfer in transfers for cut in cut_to(transfer, limit)]
        if stream is not None and not backend.follow(device, stream):
            why = f"{device} takes no order between its streams"
            raise BackendUnavailable(f"backend {self.name!r}: {why}", {self.name: why})
        registered: list[Registration] = []
        with ExitStack() as taken:  # given back in reverse order, here if anything fails
            for entry in memory:
                registered.append(backend.register(entry.what))
                taken.callback(backend.deregister, registered[-1])
            request = backend.prepare(cuts, known, registered)
            taken.callback(backend.release, request)
            if self.fixed_seconds < 0:
                self.fixed_seconds = time.monotonic() - started
            backend.post(request)
            return Part(self, cuts, request, taken.pop_all())

    def _file(self, registration: Registration) -> Registration:
        number = registration.handle
        if number not in self._files:
            self._files[number] = self.backend.register(registration.what)
        return self._files[number]

    def forget(self, number: int) -> None:
        """A file is about to be closed."""
        if number in self._files:
            self.backend.deregister(self._files.pop(number))

    @property
    def is_open(self) -> bool:
        return bool(self._files)

    def close(self) -> None:
        """Gives back what the backend holds; the next use opens it again."""
        for number in list(self._files):
            self.forget(number)
        if "backend" in self.__dict__:
            self.backend.close()


class Candidates:
    """The candidates for one device."""

    def __init__(self, device: str, options: Mapping[str, Any]) -> None:
        """`options` are for those candidates that have them.

        Raises TypeError for an option that none has, ValueError for ``allow_compat``.
        """
        if options.get("allow_compat"):
            raise ValueError(
                "allow_compat=True: 'auto' never takes cuFile's compatibility mode; ask for"
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
        """Asks the backends besides the last one whether they work here, once. None is opened."""
        names, self._unprobed = self._unprobed, []
        for name in names:
            options = self._options_of(name)
            if foreign := self._options.keys() - options.keys():
                self._refusals[name] = f"it has no option {', '.join(sorted(foreign))}"
                continue
            found, refusals = registry.usable([name], self._device)
            self._refusals.update(refusals)
            self._known.update({kind.name: Candidate(kind, options) for kind in found})

    def __iter__(self) -> Iterator[Candidate]:
        """All that were found to work, in the order of preference."""
        return iter([self._known[name] for name in ORDER if name in self._known])

    def __getitem__(self, name: str) -> Candidate:
        """The candidate of that name, or the next one that works."""
        while name != LAST and (name not in self._known or self._known[name].left):
            name = _NEXT[name]
        return self._known[name]

    def after(self, candidate: Candidate) -> Candidate:
        """Where transfers that failed on this one are read again."""
        return self[_NEXT[candidate.name]]

    @property
    def refusals(self) -> dict[str, str]:
        """Why others are not among them, or were left, and what those that are do without."""
        found = dict(self._refusals)
        for each in self:
            if each.failures:
                found[f"{each.name}/ranges"] = f"{each.failures} failed, first {each.first_failure}"
            if each.left:
                found[each.name] = each.left
            found.update(getattr(each.__dict__.get("backend"), "refusals", {}))
        return found


def cut_to(whole: Transfer, limit: int) -> list[Transfer]:
    """A transfer in parts of `limit` bytes at most, each on the blocks that it was aligned to."""
    if whole.length <= limit:
        return [whole]
    _, offset, length, wanted, _, target_offset, _, _ = whole
    step = max(limit // DEFAULT_BLOCK_BYTES * DEFAULT_BLOCK_BYTES, DEFAULT_BLOCK_BYTES)
    return [
        whole._replace(
            offset=offset + at, length=min(step, length - at), wanted=min(step, wanted - at),
            target_offset=target_offset + at,
        )
        for at in range(0, wanted, step)
    ]  # fmt: skip
