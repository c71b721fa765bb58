"""The staging rings: memory that is registered once per process and device, and that every load
passes through. A ring of DRAM is pinned and lies near its device; one of VRAM is registered with
cuFile. Slots are lent to reads by native code and come back when their copies are done.
ShardAccess that
nobody uses wait at their ring for the next load, with all that they have registered.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from gdsload._native.cuda import CudaFailure
from gdsload._native.memory import Region
from gdsload._native.stage import Ring
from gdsload.errors import PlacementError
from gdsload.memory.host_buffers import available_bytes
from gdsload.system import gpu, lifecycle, quiesce

DRAM, VRAM = "dram", "vram"
# What all rings of one device take at most, unless somebody says otherwise.
RING_BYTES = 512 << 20
_SLAB_ALIGN = 64 << 10  # cuFile wants 4 KiB; this is what GPUs map at a time


class Road(Protocol):
    """A way through a ring, with what was opened and registered for it."""

    def close(self) -> bool:
        """Gives all of that back."""


class StagingRing:
    """Slots in one slab of memory. `notes` says what it has to do without."""

    def __init__(
        self,
        kind: str,
        ordinal: int,
        slot_bytes: int,
        count: int,
        register: Callable[[int, int], Callable[[], None]] | None = None,
    ) -> None:
        """`register` makes a slab of VRAM (address, bytes) known, and returns what undoes it. If
        either raises TimeoutError, the slab is never freed.

        Raises PlacementError where the memory is not to be had.
        """
        self.kind, self.ordinal = kind, ordinal
        self.notes: list[str] = []
        self.nbytes = slot_bytes * count
        self.pid = os.getpid()
        # Who reads through it, also while none of its slots is lent: it stays as long as they do.
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo: list[Callable[[], Any]] = []
        self._parked: list[tuple[object, Road]] = []
        self._given_up = False
        self._lock = lifecycle.fork_safe_lock(self)
        device = gpu.device(ordinal)
        try:
            if kind == DRAM:
                self._take_dram(slot_bytes, count)
            else:
                address = device.allocate(self.nbytes + _SLAB_ALIGN)
                self._undo.append(lambda: device.release(address))
                base = -(-address // _SLAB_ALIGN) * _SLAB_ALIGN
                self.native = Ring(base, slot_bytes, count)
                if register is not None:
                    self._undo.append(register(base, self.nbytes))
        except (CudaFailure, MemoryError, OverflowError) as error:
            self._free()
            raise PlacementError(
                f"no staging ring of {self.nbytes:,} bytes of {kind.upper()} for cuda:{ordinal}:"
                f" {error}; ring_bytes makes it smaller"
            ) from error
        except TimeoutError as error:
            self._undo.clear()  # the call goes on, and may still use the memory
            raise PlacementError(f"no staging ring for cuda:{ordinal}: {error}") from error
        except BaseException:
            self._free()
            raise

    def _take_dram(self, slot_bytes: int, count: int) -> None:
        device = gpu.device(self.ordinal)
        room = available_bytes()
        if room is not None and self.nbytes > room:
            # Pinning takes all of it at once, and whoever is killed for it is not asked.
            raise MemoryError(f"the host has {room:,} bytes available")
        region = Region.anonymous(self.nbytes)
        self.native = Ring(region.address, slot_bytes, count)
        node = gpu.facts(self.ordinal).node
        if not self.native.settle(node) and node >= 0:
            self.notes.append(f"its memory could not be asked for on NUMA node {node}")
        try:
            device.pin(region.address, self.nbytes)
        except CudaFailure as error:
            # Sandboxes and confidential machines may refuse to pin what the process has mapped, and
            # still give pinned memory of the driver's own.
            address = device.allocate_host(self.nbytes)
            self._undo.append(lambda: device.release_host(address))
            self.native = Ring(address, slot_bytes, count)
            self.notes.append(f"its memory is the driver's own, as ours cannot be pinned: {error}")
            return
        self._undo.append(lambda: region)  # what keeps the mapping alive as long as the ring
        self._undo.append(lambda: device.unpin(region.address))

    def park(self, kind: object, road: Road) -> None:
        """Keeps a road that is still and sound for whoever needs one of its kind next; nobody will
        come to a ring that was given up, and there it is closed."""
        with self._lock:
            self.users.discard(road)
            kept = not self._given_up and not lifecycle.is_ending()
            if kept:
                self._parked.append((kind, road))
        if not kept:
            road.close()

    def give_up(self) -> None:
        """Its memory stays, since something may still write to it. Nobody reads through it again,
        and roads that wait here do so in vain."""
        with self._lock:
            self._given_up = True
            parked, self._parked = self._parked, []
        for _, road in parked:
            road.close()

    def unpark(self, kind: object) -> Road | None:
        """A road of that kind that nobody uses, if there is one. It is the caller's now."""
        with self._lock:
            for place, (known, road) in enumerate(self._parked):
                if known == kind:
                    del self._parked[place]
                    self.users.add(road)
                    return road
        return None

    def end(self) -> None:
        """The process ends: no native thread may read through it any more. Gives the memory back,
        unless a slot is still lent."""
        for user in [*self.users]:
            if not isinstance(user, _Visit):
                user.close()
                self.users.discard(user)
        self.close()

    def close(self) -> bool:
        """Gives the memory back, and the roads that wait here; False where somebody reads through
        it, and nothing was done, or where a slot is still lent, and the memory was kept."""
        with self._lock:
            if self.pid != os.getpid() or self.users:
                return False
            parked, self._parked = self._parked, []
        for _, road in parked:
            road.close()
        if not self.native.retire():
            return False
        self._free()
        return True

    def _free(self) -> None:
        try:
            while self._undo:
                self._undo.pop()()
        except TimeoutError:
            self._undo.clear()  # cuFile still has the memory: it is never freed


_Key = tuple[str, int]  # kind of memory, device


class _Turn:
    """One thread at a time makes or frees the ring of a device, and holds up no other device."""

    def __init__(self) -> None:
        self._lock = lifecycle.fork_safe_lock(self)

    @contextmanager
    def taken(self, seconds: float = -1) -> Iterator[bool]:
        """Whether it was taken within so many seconds."""
        lock = self._lock
        got = lock.acquire(timeout=seconds)
        try:
            yield got
        finally:
            if got:
                lock.release()


_lock = lifecycle.fork_safe_lock(sys.modules[__name__])  # of the tables; never held for long
_rings: dict[_Key, StagingRing] = {}
_turns: dict[_Key, _Turn] = {}


def _turn_of(key: _Key) -> _Turn:
    with _lock:
        return _turns.setdefault(key, _Turn())


class _Visit:
    """Stands among the users of a ring for a road that is about to be."""


@contextmanager
def ring_for(
    kind: str,
    ordinal: int,
    slot_bytes: int,
    ring_bytes: int = RING_BYTES,
    register: Callable[[int, int], Callable[[], None]] | None = None,
) -> Iterator[StagingRing]:
    """The ring of that kind for that device: the one that is there, where its slots are as large
    and it is as large as was asked, else a new one in its place. Nobody gives it back inside this
    context, in which a road through it is opened.

    Raises PlacementError where it cannot be made, while loads still use one that does not fit, or
    when the process ends.
    """
    visit = _Visit()
    with _turn_of((kind, ordinal)).taken():
        _refuse_at_exit()
        ring = _fitting(kind, ordinal, slot_bytes, ring_bytes, register)
        _refuse_at_exit()
        ring.users.add(visit)
    try:
        yield ring
    finally:
        ring.users.discard(visit)


def _refuse_at_exit() -> None:
    if lifecycle.is_ending():
        raise PlacementError("no staging ring is made any more: the process ends")


def _fitting(
    kind: str,
    ordinal: int,
    slot_bytes: int,
    ring_bytes: int,
    register: Callable[[int, int], Callable[[], None]] | None,
) -> StagingRing:
    count = ring_bytes // slot_bytes
    if count < 2:
        raise PlacementError(
            f"ring_bytes={ring_bytes}: a ring holds at least two slots of {slot_bytes} bytes"
        )
    known = _rings.get((kind, ordinal))
    if known is not None:
        fits = (known.native.slot_bytes, known.native.count) == (slot_bytes, count)
        if fits and known.native.lost <= count // 2:
            return known
        if not known.close():
            if known.native.slot_bytes >= slot_bytes and known.native.lost <= count // 2:
                return known  # of another shape, but busy and good enough
            if known.native.lost == 0:
                raise PlacementError(
                    f"the staging ring of cuda:{ordinal} has slots of"
                    f" {known.native.slot_bytes} bytes and is in use; slots of {slot_bytes}"
                    " were asked for"
                )
            # Reads were lost in it: it is never freed, and never used again.
            known.give_up()
            _given_up.append(known)
        with _lock:
            del _rings[kind, ordinal]
    ring = StagingRing(kind, ordinal, slot_bytes, count, register)
    with _lock:
        if not _rings:
            quiesce.unregister(_still)
            quiesce.register(_still, quiesce.RING)
        _rings[kind, ordinal] = ring
    return ring


# Rings with slots that something may still write to: their memory must stay.
_given_up: list[StagingRing] = []


def release_rings(kind: str = "", ordinal: int = -1) -> int:
    """Gives back the memory of the rings that no load is using: how many bytes that were. All of
    them, or those of a kind and of a device."""
    freed = 0
    for key in _keys():
        if kind not in ("", key[0]) or ordinal not in (-1, key[1]):
            continue
        with _turn_of(key).taken():
            ring = _rings.get(key)
            if ring is not None and ring.close():
                with _lock:
                    del _rings[key]
                freed += ring.nbytes
    return freed


def _keys() -> list[_Key]:
    """The rings that are there, or being made."""
    with _lock:
        return list({**_rings, **_turns})


def _end() -> None:
    """When the process ends, the driver goes down in an order that nobody promises: no thread of
    ours may be calling it then, and no memory may go while it is pinned."""
    for key in _keys():
        # A device that does not answer any more has nothing to be given back.
        with suppress(CudaFailure), _turn_of(key).taken(lifecycle.LOCK_SECONDS) as taken:
            ring = _rings.get(key)
            if taken and ring is not None and ring.pid == os.getpid():
                ring.end()


lifecycle.at_exit(lifecycle.RINGS, _end)


def rings() -> list[StagingRing]:
    """The rings of this process that are there."""
    with _lock:
        return [ring for ring in _rings.values() if ring.pid == os.getpid()]


class _Rings:
    """All of them, for `quiesce`: after the loads that read through them, before cuFile's driver
    that they are registered with."""

    def busy(self) -> str:
        """A slot that something may still write to keeps its ring, and what it is pinned by."""
        own = [*rings(), *(ring for ring in _given_up if ring.pid == os.getpid())]
        lent = [ring for ring in own if ring.native.lent]
        return "; ".join(
            f"{ring.native.lent} slots of the staging ring of cuda:{ring.ordinal} are still read to"
            for ring in lent
        )

    def quiesce(self) -> None:
        release_rings()

    def resume(self) -> None:
        """The next load makes the rings that it needs."""


_still = _Rings()
