"""The benchmark of `auto`: which candidate reads the fastest from this storage to this device.

    nothing cached ─► each candidate reads SAMPLE_BYTES of the load in turn ─► fastest, cached
    cached ─────────► the cheapest for a load of this size, without measuring

This is arithmetic over the tuning cache. It reads nothing: `auto` posts the samples.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping, Sequence

from gdsload.backends import tuning_cache
from gdsload.backends.cufile import library
from gdsload.errors import BackendUnavailable
from gdsload.system import gpu
from gdsload.system.mountinfo import mount_of
from gdsload.version import __version__

# Long enough that ramping up and draining are little of it, short enough that three of them fit
# into the smallest load that is measured. Not measured on a GPU yet.
SAMPLE_BYTES = 256 << 20


class Benchmark:
    """The comparison for one load. `choice` is the candidate that reads the rest, "" until it is
    known, and `why` explains it. `rates` are bytes per second; 0.0 is a candidate that failed."""

    def __init__(
        self, names: Sequence[str], path: str, device: str, nbytes: int, ready: Collection[str] = ()
    ) -> None:
        """`names` are candidates in the order of preference, `path` is a file that the load reads
        and `nbytes` its size. `ready` candidates are open in this process already."""
        self._names = names
        self._bytes = dict.fromkeys(names, 0)
        self._seconds = dict.fromkeys(names, 0.0)
        self._fixed_seconds: dict[str, float] = {}
        self.rates: dict[str, float] = {}
        self.choice = self.why = ""
        self._decide()
        if self.choice:
            return
        mount, facts = mount_of(path), gpu.facts(gpu.ordinal_of(device))
        # The same for all files on one storage, and for one GPU whatever its number is.
        self._mount = mount.key if mount is not None else ""
        self._device, self._versions = f"{facts.name} {facts.bus}", versions()
        cached = tuning_cache.verdict_on(self._mount, self._device, self._versions)
        # A candidate that could not be measured then might be faster.
        if cached is not None and cached.rates.keys() >= set(names):
            rates = {name: cached.rates[name] for name in names}
            fixed = {name: s for name, s in cached.fixed_seconds.items() if name not in ready}
            if choice := cheapest(rates, nbytes, fixed):
                day = time.strftime("%Y-%m-%d", time.localtime(cached.at))
                self.rates, self.choice = rates, choice
                self.why = f"measured on {day}, kept in {tuning_cache.directory()}"
                if (fastest := cheapest(rates)) != choice:
                    self.why += f"; opening {fastest} would take longer than it saves"

    @property
    def reader(self) -> str:
        """The candidate that reads next: the one to measure, or the choice."""
        return self.choice or next(name for name in self._names if name not in self.rates)

    @property
    def missing_bytes(self) -> int:
        """Bytes left to read in the sample of the reader; no limit when the choice is made."""
        return sys.maxsize if self.choice else SAMPLE_BYTES - self._bytes[self.reader]

    @property
    def best(self) -> str:
        """The choice, or the best that is known before it is made."""
        return self.choice or cheapest(self.rates) or self.reader

    def add(self, name: str, nbytes: int, seconds: float, fixed_seconds: float) -> None:
        """A candidate has read `nbytes` of its sample; opening it took `fixed_seconds`."""
        self._bytes[name] += nbytes
        self._seconds[name] += seconds
        self._fixed_seconds[name] = fixed_seconds
        if self._bytes[name] >= SAMPLE_BYTES:
            self.rates[name] = self._bytes[name] / max(self._seconds[name], 1e-9)
            self._decide()

    def drop(self, name: str) -> None:
        """A candidate does not work after all. If it was the choice, its result is forgotten."""
        self.rates[name] = 0.0
        if name == self.choice:
            tuning_cache.drop(self._mount, self._device)
            self.choice = cheapest(self.rates) or next(n for n in self._names if n != name)
            self.why = f"what was chosen first ({name}) failed"
        self._decide()

    def _decide(self) -> None:
        """Chooses, once all are measured. All of them are open by then: rates alone decide."""
        working = [name for name in self._names if self.rates.get(name) != 0.0]
        if self.choice:
            return
        if len(working) == 1:
            self.choice, self.why = working[0], "no other backend works"
        elif self.rates.keys() >= set(self._names):
            self.rates = {name: self.rates[name] for name in self._names}
            self.choice, self.why = cheapest(self.rates), "measured in this load"
            result = tuning_cache.TunedChoice(
                self._mount, self._device, self.choice, self.rates, self._versions, time.time(),
                self._fixed_seconds,
            )  # fmt: skip
            why_not = (
                tuning_cache.keep(result) if self._mount else "the mount of the file is unknown"
            )
            self.why += f", and not kept: {why_not}" if why_not else ""


def cheapest(
    rates: Mapping[str, float], nbytes: int = 1, fixed_seconds: Mapping[str, float] | None = None
) -> str:
    """The candidate that reads `nbytes` in the least time, opening included; "" if there is none.

    Of those that take about as long the first is taken. Without `fixed_seconds` it is the fastest.
    """
    fixed = fixed_seconds or {}
    seconds = {name: nbytes / rate + fixed.get(name, 0.0) for name, rate in rates.items() if rate}
    best = min(seconds.values(), default=0.0)
    return next(
        (name for name, took in seconds.items() if took * tuning_cache.CLOSE_SHARE <= best), ""
    )


def versions() -> Mapping[str, str]:
    """Everything that has a part in what is measured."""
    try:
        others = library.versions()
    except BackendUnavailable:
        others = {}
    return {"gdsload": __version__, **others}
