"""Direct reads into host memory through a few huge pages, where that is faster than in place: when
it is tried, with how much memory, and what is kept of the answer. The reads are `_native.bounce`'s.

On a virtual disk that is twice as fast (docs/benchmarks.md): its host maps each page of a read
apart. It is asked for each mount, on the first large load from it, and kept like the roads to GPUs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gdsload._native.bounce import Bounce
from gdsload._native.memory import Region
from gdsload.backends.base import OpenFile, Registration
from gdsload.planning.read_plan import Transfer
from gdsload.system.mountinfo import mount_of
from gdsload.version import __version__

CHOICES = ("auto", "always", "never")
# Of one request each: while one is emptied, the others are read to.
SLOTS = 4
# Larger requests are read in place: what a load needs beside its tensors stays small.
MOST_SLOT_BYTES = 16 << 20
# Four stretches are measured, two are not: what is smaller has come before anything is known.
LEAST_BYTES = 384 << 20
# What an earlier load has found is worth the memory from here on.
LEAST_KNOWN_BYTES = 64 << 20
DEVICE = "cpu"
WAYS = ("in place", "bounced")
# A copy costs the processor: reads through slots have to be so much faster.
WORTH_RATIO = 1.1


class BounceBuffers:
    """The way of one pump's direct reads, and what was measured of it."""

    def __init__(self, engine: object, settings: Mapping[str, Any]) -> None:
        """`engine` is the capsule of the engine that reads."""
        self._choice = settings["bounce"]
        self._slot_bytes = settings["request_bytes"]
        self._told = self._asked = 0
        self._mount: str | None = None
        self._known = -1
        wanted = self._choice != "never" and self._slot_bytes <= MOST_SLOT_BYTES
        self._bounce = Bounce(engine) if wanted else None
        self.engine = engine if self._bounce is None else self._bounce.capsule()

    def arm(self, transfers: Sequence[Transfer], files: Sequence[Registration]) -> None:
        """Takes the memory for it, where these transfers and those before them are enough."""
        bounce = self._bounce
        if bounce is None or bounce.armed or not transfers:
            return
        only = WAYS.index("bounced") if self._choice == "always" else -1
        if only < 0:
            self._asked += sum(t.length for t in transfers if t.io_mode == "direct")
            if self._asked < LEAST_KNOWN_BYTES:
                return
            if self._mount is None:
                self._ask(files[transfers[0].shard])
            if self._asked < LEAST_BYTES and self._known != WAYS.index("bounced"):
                return
        try:
            region = Region.anonymous(SLOTS * self._slot_bytes)
        except MemoryError:
            return  # reads in place need none
        bounce.arm(region.handle(), self._slot_bytes, SLOTS, self._known, only)

    def _ask(self, registration: Registration) -> None:
        """What is kept of the storage that this file is on."""
        from gdsload.backends import tuning_cache  # small loads need none

        self._mount = ""
        if isinstance(registration.what, OpenFile):
            mount = mount_of(registration.what.path)
            self._mount = mount.key if mount is not None else ""
        kept = tuning_cache.verdict_on(self._mount, DEVICE, versions()) if self._mount else None
        if kept is not None and kept.choice in WAYS:
            self._known = WAYS.index(kept.choice)

    def news(self, most: int) -> int:
        """Bytes that went through the huge pages since it was last asked, `most` at most."""
        if self._bounce is None:
            return 0
        found = min(self._bounce.copied_bytes - self._told, most)
        self._told += found
        return found

    def close(self, ended: bool) -> None:
        """Keeps what was measured, where that is another answer than before. `ended`: the pump's
        thread has; while it reads on, its figures change."""
        if self._bounce is None or not self._mount or not ended:
            return
        rates = dict(zip(WAYS, map(float, self._bounce.rates()), strict=True))
        best = faster(rates)
        if not best or WAYS.index(best) == self._known:
            return
        from gdsload.backends import tuning_cache

        # A load is no worse for a place where nothing can be kept.
        tuning_cache.keep(
            tuning_cache.TunedChoice(self._mount, DEVICE, best, rates, versions(), time.time())
        )


def faster(rates: Mapping[str, float]) -> str:
    """The way that these rates speak for; empty where one was not measured, or where bounce buffers
    are faster by less than their copy is worth."""
    in_place, through = (rates[way] for way in WAYS)
    if not in_place or not through:
        return ""
    if through > WORTH_RATIO * in_place:
        return "bounced"
    return "in place" if in_place >= through else ""


def versions() -> dict[str, str]:
    """Everything that has a part in what is measured."""
    return {"gdsload": __version__, "kernel": os.uname().release}
