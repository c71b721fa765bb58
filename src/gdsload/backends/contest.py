"""Which of several lanes is the fastest to this device from this storage: measured on real ranges
of a load, or known from an earlier one. It says who reads next, and adds up; it reads nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from gdsload import gpu, verdicts
from gdsload.backends import cufile
from gdsload.errors import BackendUnavailable
from gdsload.mounts import mount_of
from gdsload.version import __version__

# Long enough that ramping up and draining are little of it, short enough that three of them fit
# into the smallest model that gets here. Not measured on a GPU yet.
LEG_BYTES = 256 << 20


class Contest:
    """The lanes of one load, by name in the order of the house, and what is known of them."""

    def __init__(self, lanes: Sequence[str], path: str, device: str) -> None:
        """`path` is a file that is about to be read, to `device`."""
        self._left = list(lanes)  # to be measured
        self._bytes: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._order = list(lanes)
        self._failed: set[str] = set()
        self._chosen, self._from_before = "", False
        self._mount, self._device = storage_of(path), device_of(device)
        self._versions = versions()
        self.rates: dict[str, float] = {}
        self.why = ""
        known = verdicts.verdict_on(self._mount, self._device, self._versions)
        # What stands now and was not there to be measured then might be faster.
        if known is not None and known.road in lanes and known.rates.keys() >= set(lanes):
            # Its first leg still shows whether it is what it was.
            self._left, self._chosen, self._from_before = [known.road], known.road, True
            self.rates = {lane: rate for lane, rate in known.rates.items() if rate > 0}
            day = time.strftime("%Y-%m-%d", time.localtime(known.at))
            self.why = f"measured on {day}, kept in {verdicts.directory()}"

    @property
    def next(self) -> str:
        """Whose turn it is; empty when it is decided."""
        return self._left[0] if self._left else ""

    @property
    def wanted_bytes(self) -> int:
        """What the next leg is long of."""
        return LEG_BYTES - self._bytes.get(self.next, 0)

    def moved(self, lane: str, nbytes: int, seconds: float) -> None:
        """A leg ended well."""
        self._bytes[lane] = self._bytes.get(lane, 0) + nbytes
        self._seconds[lane] = self._seconds.get(lane, 0.0) + seconds
        if self._bytes[lane] >= LEG_BYTES and lane in self._left:
            self._left.remove(lane)
            if self._seconds[lane] > 0:
                self._measured(lane, self._bytes[lane] / self._seconds[lane])
            self._decide()

    def _measured(self, lane: str, rate: float) -> None:
        if not self._from_before:
            self.rates[lane] = rate
            return
        # Rates of a verdict were measured together: none of them is replaced by one of today.
        others = max((known for name, known in self.rates.items() if name != lane), default=0.0)
        if rate < verdicts.CLOSE_SHARE * others:
            verdicts.drop(self._mount, self._device)
            self.why += "; it is slower now, and the next load measures again"

    def unmeasured(self, lane: str) -> None:
        """A leg ended well, but its bytes did not come directly from storage: no rate of it."""
        if lane in self._left:
            self._left.remove(lane)
        self._decide()

    def lost(self, lane: str) -> None:
        """It turned out not to work: also what was kept of it is forgotten."""
        self._failed.add(lane)
        if lane in self._order:
            self._order.remove(lane)
        if lane in self._left:
            self._left.remove(lane)
        if lane == self._chosen:
            verdicts.drop(self._mount, self._device)
            self._chosen, self.why = "", f"what was chosen first ({lane}) failed"
            if self._from_before:
                self.rates.clear()
        self.rates.pop(lane, None)
        self._decide()

    def _decide(self) -> None:
        if self._left or self._chosen:
            return
        measured = [lane for lane in self._order if lane in self.rates]
        if self.why or len(measured) < 2:
            return
        rates = {**self.rates, **dict.fromkeys(self._failed, 0.0)}  # not tried again each time
        kept = verdicts.Verdict(
            self._mount, self._device, self.winner, rates, self._versions, time.time()
        )
        self._chosen, self.why = self.winner, "measured in this load"
        why_not = verdicts.keep(kept) if self._mount else "the system does not say what it was"
        if why_not:
            self.why += f", and not kept: {why_not}"

    @property
    def winner(self) -> str:
        """The fastest by what is known now; where nothing is, the first of the house."""
        if self._chosen:
            return self._chosen
        measured = [lane for lane in self._order if lane in self.rates]
        best = max((self.rates[lane] for lane in measured), default=0.0)
        fast = [lane for lane in measured if self.rates[lane] >= verdicts.CLOSE_SHARE * best]
        return fast[0] if fast else self._order[0]


def storage_of(path: str) -> str:
    """What stays the same for files on the same storage; empty where nobody knows."""
    mount = mount_of(path)
    return mount.key if mount is not None else ""


def device_of(device: str) -> str:
    """What stays the same for the same device, whatever its number is in this process."""
    found = gpu.facts(gpu.ordinal_of(device))
    return f"{found.name} {found.bus}"


def versions() -> Mapping[str, str]:
    """Everything that has a part in what is measured."""
    try:
        others = cufile.versions()
    except BackendUnavailable:
        others = {}
    return {"gdsload": __version__, **others}
