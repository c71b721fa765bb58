"""Bounce buffers: direct reads into host memory through a few huge pages, where that is faster.

On a virtual disk it is twice as fast (docs/benchmarks.md), because the host of the machine maps
each page of a read separately. The first large load from a mount measures both ways, and the tuning
cache stores the faster. This module decides when to measure, and takes the memory. Not responsible
for the reads: see `_native.bounce`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gdsload._native.bounce import Bounce
from gdsload._native.memory import Region
from gdsload.backends.base import OpenFile, Registration, Registrations
from gdsload.planning.read_plan import Transfer
from gdsload.system.mountinfo import mount_of

CHOICES = ("auto", "always", "never")
# Each has room for one read: the engine reads to some while others are copied from.
SLOTS = 4
# Larger reads go directly to their memory: a load must not need much memory besides its tensors.
MOST_SLOT_BYTES = 16 << 20
# A smaller load would end before both ways are measured.
LEAST_BYTES = 384 << 20
# With a cached choice, the memory is worth it from this size on.
LEAST_KNOWN_BYTES = 64 << 20
WAYS = ("in place", "bounced")
# A copy costs processor time: reads through slots must be faster by this factor.
WORTH_RATIO = 1.1


class BounceBuffers:
    """The bounce buffers of one pump, and the rates that were measured with and without them."""

    def __init__(self, engine: object, settings: Mapping[str, Any]) -> None:
        """`engine` is the capsule of the engine that reads."""
        self._always = settings["bounce"] == "always"
        self._slot_bytes = settings["request_bytes"]
        self._reported_bytes = self._direct_bytes = 0
        self._mount: str | None = None
        self._cached = -1  # the cached choice, as its position in WAYS
        wanted = settings["bounce"] != "never" and self._slot_bytes <= MOST_SLOT_BYTES
        self._bounce = Bounce(engine) if wanted else None
        self.engine = engine if self._bounce is None else self._bounce.capsule()
        self.buffers = [] if self._bounce is None else self._bounce.buffers()

    def arm(self, transfers: Sequence[Transfer], files: Registrations) -> None:
        """Takes the memory, if these transfers and those before them are large enough."""
        bounce, bounced = self._bounce, WAYS.index("bounced")
        if bounce is None or bounce.armed or not transfers:
            return
        if not self._always:
            self._direct_bytes += sum(t.length for t in transfers if t.io_mode == "direct")
            if self._direct_bytes < LEAST_KNOWN_BYTES:
                return
            if self._mount is None:
                self._mount, self._cached = _cached_choice(files[transfers[0].shard])
            if self._direct_bytes < LEAST_BYTES and self._cached != bounced:
                return
        try:
            region = Region.anonymous(SLOTS * self._slot_bytes)
        except MemoryError:
            return  # reads go directly to their memory
        only = bounced if self._always else -1
        bounce.arm(region.handle(), self._slot_bytes, SLOTS, self._cached, only)

    def news(self, most: int) -> int:
        """Bytes that went through bounce buffers since the last call, `most` at most."""
        if self._bounce is None:
            return 0
        found = min(self._bounce.copied_bytes - self._reported_bytes, most)
        self._reported_bytes += found
        return found

    def close(self, ended: bool) -> None:
        """Stores the choice, if it is another one than before. `ended`: the thread of the pump has
        ended; otherwise its figures still change."""
        if self._bounce is None or not self._mount or not ended:
            return
        rates = dict(zip(WAYS, map(float, self._bounce.rates()), strict=True))
        best = faster(rates)
        if best and WAYS.index(best) != self._cached:
            from gdsload.backends.tuning_cache import DRAM_DEVICE, TunedChoice, store, versions

            store(TunedChoice(self._mount, DRAM_DEVICE, best, rates, versions(DRAM_DEVICE)))


def _cached_choice(file: Registration) -> tuple[str, int]:
    """The mount of a file, "" if unknown, and the cached choice for it, -1 if there is none."""
    from gdsload.backends.tuning_cache import DRAM_DEVICE, find, versions  # for large loads only

    mount = mount_of(file.what.path) if isinstance(file.what, OpenFile) else None
    if mount is None:
        return "", -1
    cached = find(mount.key, DRAM_DEVICE, versions(DRAM_DEVICE))
    choice = cached.choice if cached is not None else ""
    return mount.key, WAYS.index(choice) if choice in WAYS else -1


def faster(rates: Mapping[str, float]) -> str:
    """The faster way; "" if one was not measured, or if bounce buffers gain less than they cost."""
    direct, bounced = (rates[way] for way in WAYS)
    if not direct or not bounced:
        return ""
    if bounced > WORTH_RATIO * direct:
        return "bounced"
    return "in place" if direct >= bounced else ""
