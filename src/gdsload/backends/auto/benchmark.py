"""The benchmark of `auto`: which candidate reads fastest from this storage to this device.

    nothing cached ─► each candidate reads SAMPLE_BYTES of the load in turn ─► the fastest is cached
    cached ─────────► the fastest for a load of this size, without measuring

This is arithmetic on top of the tuning cache. Not responsible for reading: `auto` posts the
samples.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from gdsload.backends import tuning_cache
from gdsload.system import gpu
from gdsload.system.mountinfo import mount_of

FALLBACK = "posix"  # needs nothing but CUDA, and reads what the other candidates do not
# Long enough that starting and draining matter little; three of them fit into the smallest load
# that is measured. Not measured on a GPU yet.
SAMPLE_BYTES = 256 << 20
# A sample of which more than a quarter came in pieces that are smaller than this share of it says
# little about the storage: each piece is read alone, and is too small to keep a backend busy.
SMALL_SHARE = 1 / 8


class Benchmark:
    """The comparison for one load.

    Attributes:
        choice: The candidate that reads the rest of the load, "" until it is known.
        why: The reason for the choice.
        not_cached: Why the result must not be cached, or "".
        rates: Bytes per second, by candidate; 0.0 if it failed.
    """

    def __init__(
        self,
        names: Sequence[str],
        path: str,
        device: str,
        nbytes: int,
        ready: Collection[str] = (),
        options: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Looks into the tuning cache.

        Args:
            names: The candidates, the preferred one first.
            path: A file that the load reads.
            device: The device that it loads into.
            nbytes: The size of the load.
            ready: Candidates that are open in this process already.
            options: The options of the load. Rates of other options do not count.
        """
        self._names = names
        self._bytes, self._small_bytes = Counter[str](), Counter[str]()
        self._seconds = defaultdict[str, float](float)
        self._fixed_seconds: dict[str, float] = {}
        self.rates: dict[str, float] = {}
        self.choice = self.why = self.not_cached = ""
        mount, facts = mount_of(path), gpu.device(gpu.ordinal_of(device))
        # Keys that are equal for all files of one storage, and independent of the GPU's number.
        self._mount = mount.key if mount is not None else ""
        self._device = f"{facts.name} {facts.bus}"
        set_by_user = ", ".join(f"{name}={value}" for name, value in sorted(options.items()))
        self._versions = {**tuning_cache.versions(), "options": set_by_user}
        cached = tuning_cache.find(self._mount, self._device, self._versions)
        # If a candidate was not measured then, it may be the fastest now.
        if len(names) > 1 and cached is not None and cached.rates.keys() >= set(names):
            self.rates = {name: cached.rates[name] for name in names}
            fixed = {name: s for name, s in cached.fixed_seconds.items() if name not in ready}
            self.choice = cheapest(self.rates, nbytes, fixed)
            day = time.strftime("%Y-%m-%d", time.localtime(cached.at))
            self.why = f"measured on {day}, cached in {tuning_cache.directory()}"
            if (fastest := cheapest(self.rates)) != self.choice:
                self.why += f"; opening {fastest} would take longer than it saves"
        self._decide()

    @property
    def reader(self) -> str:
        """The candidate that reads the next transfers: one to measure, or the choice. The
        fallback is measured first: the others, which take longer to open, are opened meanwhile."""
        order = sorted(self._names, key=lambda name: name != FALLBACK)
        return self.choice or next(name for name in order if name not in self.rates)

    @property
    def missing_bytes(self) -> int:
        """Bytes left to read in the sample of the reader; no limit when the choice is made."""
        return sys.maxsize if self.choice else SAMPLE_BYTES - self._bytes[self.reader]

    @property
    def best(self) -> str:
        """The choice; before it is made, the best candidate so far."""
        return self.choice or cheapest(self.rates) or self.reader

    def add(self, name: str, nbytes: int, seconds: float, fixed_seconds: float) -> None:
        """Adds a part of the sample of a candidate that took `fixed_seconds` to open."""
        self._bytes[name] += nbytes
        self._small_bytes[name] += nbytes if nbytes < SMALL_SHARE * SAMPLE_BYTES else 0
        self._seconds[name] += seconds
        self._fixed_seconds[name] = fixed_seconds
        if self._bytes[name] >= SAMPLE_BYTES:
            self.rates[name] = self._bytes[name] / max(self._seconds[name], 1e-9)
            if self._small_bytes[name] > SAMPLE_BYTES / 4:
                self.not_cached = (
                    self.not_cached or "the reads were too small for a fair comparison"
                )
            self._decide()

    def drop(self, name: str, temporary: bool = False) -> None:
        """Excludes a candidate that does not work. If it was the choice, the cache drops it.

        Args:
            name: The candidate.
            temporary: Whether it lacked a resource that a later load may have.
        """
        self.rates[name] = 0.0
        if temporary:
            self.not_cached = f"{name} could not be opened this time"
        if name == self.choice:
            tuning_cache.forget(self._mount, self._device)
            self.choice = cheapest(self.rates) or FALLBACK
            self.why = f"the first choice ({name}) failed"
        self._decide()

    def _decide(self) -> None:
        """Chooses, once all are measured. All are open by then, so that only rates count."""
        working = [name for name in self._names if self.rates.get(name) != 0.0]
        if self.choice:
            return
        if len(working) == 1:
            self.choice, self.why = working[0], "no other backend works"
        elif self.rates.keys() >= set(self._names):
            self.rates = {name: self.rates[name] for name in self._names}
            self.choice, self.why = cheapest(self.rates), "measured in this load"
            entry = tuning_cache.TunedChoice(
                self._mount,
                self._device,
                self.choice,
                self.rates,
                self._versions,
                fixed_seconds=self._fixed_seconds,
            )
            why_not = self.not_cached or tuning_cache.store(entry)
            self.why += f", and not cached: {why_not}" if why_not else ""


def cheapest(
    rates: Mapping[str, float], nbytes: int = 1, fixed_seconds: Mapping[str, float] | None = None
) -> str:
    """The candidate that reads `nbytes` in the least time, or "" if none works.

    `fixed_seconds` are the times to open candidates. The first of those that are about equal wins.
    """
    fixed = fixed_seconds or {}
    seconds = {name: nbytes / rate + fixed.get(name, 0.0) for name, rate in rates.items() if rate}
    limit = min(seconds.values(), default=0.0) / tuning_cache.CLOSE_SHARE
    return next((name for name, took in seconds.items() if took <= limit), "")
