"""Staging rings: memory that is registered once per process, device and size of a slot, and that
loads pass through.

    file ──► slot of the ring ──► copy ──► device buffer
                 ▲── free again ──┘

A ring of DRAM is pinned and on the NUMA node of its device. It stays for the next load, and staging
pipelines that no load uses are parked at it, with everything they have registered. A ring of VRAM
is registered with cuFile. It is freed some seconds after its last load, or when a load needs the
memory. Native code lends the slots to reads. Not responsible for reading and copying
(`gdsload.backends.staging`).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from gdsload._native.cuda import CudaFailure
from gdsload._native.cufile import CuFileFailure
from gdsload._native.memory import Region
from gdsload._native.stage import Ring
from gdsload.errors import PlacementError
from gdsload.memory import DRAM, VRAM, late_copies
from gdsload.system import gpu, lifecycle, quiesce
from gdsload.system.available import available_bytes
from gdsload.system.threads import SafeEvent, start_thread

if TYPE_CHECKING:
    from gdsload.backends.staging import StagingPipeline

# How long a ring of VRAM outlives its last load, so that the loads of a start register it once. Not
# measured on a GPU.
IDLE_SECONDS = 10.0
_SLAB_ALIGN = 64 << 10  # cuFile needs 4 KiB; GPUs map memory in units of this

# Number of further checks whether reads that hang keep slots of a ring, and the time between them.
_LOOKS, _LOOK_SECONDS = 3, 0.002

# Registers a slab of VRAM (address, bytes), adds refusals to the notes of the ring, and returns the
# function that undoes it.
Register = Callable[[int, int, list[str]], Callable[[], None]]


class StagingRing(quiesce.Holder):
    """Slots in one slab of memory. `notes` lists what was refused."""

    def __init__(
        self, kind: str, ordinal: int, slot_bytes: int, count: int, register: Register | None = None
    ) -> None:
        """Allocates and registers the slab.

        If `register`, or the function that it returns, raises TimeoutError, or a signal ends
        `register`, the slab is never freed.

        Raises:
            PlacementError: no memory for the ring.
        """
        self.kind, self.ordinal = kind, ordinal
        self.notes: list[str] = []
        self.nbytes = slot_bytes * count
        self.pid = os.getpid()
        # Pipelines in use. They keep the ring even while none of its slots is lent.
        self.users: weakref.WeakSet[StagingPipeline] = weakref.WeakSet()
        # Calls inside `ring_for`, which are about to open a pipeline.
        self.visitors: weakref.WeakSet[_Visit] = weakref.WeakSet()
        self._undo: list[Callable[[], Any]] = []
        self._parked: list[tuple[object, StagingPipeline]] = []
        self._given_up = False
        self._idle_since = 0.0
        self._watcher: threading.Thread | None = None  # waits for the end of IDLE_SECONDS
        self._freed = SafeEvent()
        self._lock = lifecycle.fork_safe_lock(self)
        device = gpu.device(ordinal)
        registers = False
        try:
            if kind == DRAM:
                self._take_dram(slot_bytes, count)
            else:
                found: list[int] = []
                self._undo.append(partial(_release, device.release, found))
                address = device.allocate(self.nbytes + _SLAB_ALIGN, found)
                base = -(-address // _SLAB_ALIGN) * _SLAB_ALIGN
                self.native, self.address = Ring(base, slot_bytes, count), base
                if register is not None:
                    registers = True
                    self._undo.append(register(base, self.nbytes, self.notes))
        except (CudaFailure, MemoryError, OverflowError) as error:
            self.free()
            raise PlacementError(
                f"no staging ring of {self.nbytes:,} bytes of {kind.upper()} for cuda:{ordinal}:"
                f" {error}; ring_bytes makes it smaller"
            ) from error
        except TimeoutError as error:
            self._undo.clear()  # the call goes on, and may still use the memory
            raise PlacementError(f"no staging ring for cuda:{ordinal}: {error}") from error
        except OSError as error:  # no thread to register it
            self.free()
            raise PlacementError(f"no staging ring for cuda:{ordinal}: {error.strerror}") from error
        except BaseException:  # such as Ctrl-C
            if registers:
                self._undo.clear()  # the slab may be registered, or still become so
            with suppress(CudaFailure):  # if it was not pinned yet: it stays mapped
                self.free()
            raise
        quiesce.register(self, quiesce.RING)

    def _take_dram(self, slot_bytes: int, count: int) -> None:
        device = gpu.device(self.ordinal)
        room = available_bytes()
        if room is not None and self.nbytes > room:
            # Pinning takes all of it at once; the kernel would kill a process without a warning.
            raise MemoryError(f"the host has {room:,} bytes available")
        region = Region.anonymous(self.nbytes)
        self.native, self.address = Ring(region.address, slot_bytes, count), region.address
        node = gpu.numa_node(device.bus)
        if not self.native.advise(node) and node >= 0:
            self.notes.append(f"its memory could not be bound to NUMA node {node}")
        # Noted first: if Ctrl-C ends the call, it may be pinned, and must not be unmapped then.
        self._undo.append(lambda: region)  # keeps the mapping as long as the ring
        self._undo.append(lambda: device.unpin(region.address))
        try:
            device.pin(region.address, self.nbytes)
        except CudaFailure as error:
            self._undo.clear()
            # Sandboxes and confidential machines may refuse to pin memory that the process has
            # mapped, and still allocate pinned memory in the driver.
            found: list[int] = []
            self._undo.append(partial(_release, device.release_host, found))
            address = device.allocate_host(self.nbytes, found)
            self.native, self.address = Ring(address, slot_bytes, count), address
            self.notes.append(f"allocated by the driver: own memory cannot be pinned: {error}")

    def park(self, kind: object, pipeline: StagingPipeline) -> None:
        """Keeps an idle pipeline for the next load that needs one of this kind. It is closed
        instead if the ring was given up or the process ends."""
        with self._lock:
            self.users.discard(pipeline)
            parks = not self._given_up and not lifecycle.is_ending()
            if parks:
                self._parked.append((kind, pipeline))
        if not parks:
            pipeline.close()

    def unpark(self, kind: object) -> StagingPipeline | None:
        """An idle pipeline of this kind, which now belongs to the caller; None if absent."""
        with self._lock:
            for index, (known, pipeline) in enumerate(self._parked):
                if known == kind:
                    del self._parked[index]
                    self.users.add(pipeline)
                    return pipeline
        return None

    def free_when_idle(self) -> None:
        """Frees a ring of VRAM if no load uses it for IDLE_SECONDS, or now if no thread can wait:
        serving engines size their caches by the free memory of the device."""
        if self.kind != VRAM or self.pid != os.getpid():
            return
        with self._lock:
            if self.users or self.visitors or self.native.lent:  # a lost read may still write to it
                return
            self._idle_since = time.monotonic()
            if self._watcher is not None and self._watcher.is_alive():
                return
        self._watcher = start_thread(self._await_idle, "gdsload-idle-ring")
        if self._watcher is None:
            release_idle(self.ordinal, self)

    def _await_idle(self) -> None:
        while (left := self._idle_since + IDLE_SECONDS - time.monotonic()) > 0:
            if self._freed.wait(left):
                return
        self._watcher = None  # if a load uses it now, another thread waits after that load
        release_idle(self.ordinal, self)

    @property
    def usable(self) -> bool:
        """Whether half of its slots, or more, can be lent to a load. Slots that no pipeline in use
        has borrowed belong to reads that hang."""
        for _ in range(_LOOKS):
            # The larger count: a slot that is borrowed or returned meanwhile must not look lost.
            before, lent, after = self._borrowed(), self.native.lent, self._borrowed()
            if lent - max(before, after) <= self.native.count // 2:
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def _borrowed(self) -> int:
        """Slots that the pipelines in use have borrowed."""
        with self._lock:
            return sum(pipeline.stage.lent for pipeline in self.users)

    def enter(self, pipeline: StagingPipeline) -> None:
        """Notes that a pipeline is in use."""
        with self._lock:
            self.users.add(pipeline)

    def leave(self, pipeline: StagingPipeline) -> None:
        """Undoes `enter`."""
        with self._lock:
            self.users.discard(pipeline)

    def give_up(self) -> None:
        """Marks the ring unusable: its memory stays as long as a read may still write to it. The
        parked pipelines are closed."""
        with self._lock:
            self._given_up = True
        self._close_parked()

    def _close_parked(self) -> None:
        with self._lock:
            parked, self._parked = self._parked, []
        for _, pipeline in parked:
            pipeline.close()

    def end(self) -> None:
        """At the end of the process: stops all threads that read through the ring, and frees the
        memory unless a slot is still lent."""
        with self._lock:
            users = [*self.users]
        for pipeline in users:
            pipeline.close()
            self.leave(pipeline)
        if self.retire():
            self.free()

    def retire(self) -> bool:
        """Closes the parked pipelines and takes the slots out of use.

        Returns:
            False if a pipeline is in use and nothing was done, or if a slot is still lent.
        """
        with self._lock:
            if self.pid != os.getpid() or self.users or self.visitors:
                return False
        self._close_parked()
        return self.native.retire()

    def free(self) -> None:
        """Frees the memory of a retired ring."""
        quiesce.unregister(self)
        self._freed.set()
        try:
            while self._undo:
                self._undo.pop()()
        except TimeoutError:
            self._undo.clear()  # cuFile still has the memory: it is never freed
        except (CudaFailure, CuFileFailure):
            _refused.append(self._undo)
            raise

    def busy(self) -> str:
        """A slot that something may still write to keeps the ring pinned and registered."""
        lent = self.native.lent
        return f"{lent} slots of the staging ring of cuda:{self.ordinal} are in use" if lent else ""

    def quiesce(self) -> None:
        late_copies.forget_ended()  # each has gone through a ring
        release_rings(self.kind, self.ordinal)


def _release(release: Callable[[int], object], found: list[int]) -> None:
    for address in found:
        release(address)


class _Visit:
    """One call of `ring_for`. If Ctrl-C ends it at any step, nothing counts it any more."""


class _RingHolder:
    """The ring of one kind of memory and device, if there is one.

    The lock is held while the ring is made or freed, which may take seconds; other devices do not
    wait for it.
    """

    def __init__(self) -> None:
        self.ring: StagingRing | None = None
        self.lock = lifecycle.fork_safe_lock(self, "lock")


# By kind of memory, device and size of a slot, in which backends differ.
_holders: dict[tuple[str, int, int], _RingHolder] = {}
# Rings with slots that reads may still write to. They are freed if these reads complete after all.
_given_up: list[StagingRing] = []
# The memory of rings that a device refused to free: what is still pinned must stay mapped.
_refused: list[object] = []


@contextmanager
def ring_for(
    kind: str,
    ordinal: int,
    slot_bytes: int,
    ring_bytes: int,
    register: Register | None = None,
) -> Iterator[StagingRing]:
    """The ring of this kind, device and size of slots: the existing one if it is large enough, else
    a new one. A smaller one that is in use is not replaced. Those that are idle there, with slots
    of another size, are freed.

    The ring is not freed inside this context, in which the caller opens a pipeline through it.

    Args:
        kind: DRAM or VRAM.
        ordinal: the CUDA device.
        slot_bytes: size of a slot.
        ring_bytes: size of all slots, at least.
        register: see `StagingRing`.

    Raises:
        PlacementError: no memory for the ring, or the process ends.
    """
    holder = _holders.setdefault((kind, ordinal, slot_bytes), _RingHolder())
    for other in rings(kind, ordinal):
        if other.native.slot_bytes != slot_bytes:
            release_idle(ordinal, other)
    visit = _Visit()
    ring = None
    try:
        with holder.lock:
            _refuse_at_exit()
            ring = holder.ring = _fitting(holder, kind, ordinal, slot_bytes, ring_bytes, register)
            _refuse_at_exit()
            ring.visitors.add(visit)
        yield ring
    finally:
        if ring is not None:
            ring.visitors.discard(visit)
            ring.free_when_idle()  # the caller may have opened nothing


def _refuse_at_exit() -> None:
    if lifecycle.is_ending():
        raise PlacementError("no staging ring can be made: the process ends")


def _fitting(
    holder: _RingHolder,
    kind: str,
    ordinal: int,
    slot_bytes: int,
    ring_bytes: int,
    register: Register | None,
) -> StagingRing:
    count = ring_bytes // slot_bytes
    if count < 2:
        raise PlacementError(
            f"ring_bytes={ring_bytes}: a ring holds at least two slots of {slot_bytes} bytes"
        )
    known = holder.ring
    if known is not None:
        native, usable = known.native, known.usable
        if usable and native.count >= count:
            return known
        if known.retire():
            holder.ring = None  # also if the device refuses to free it
            try:
                known.free()
            except (CudaFailure, CuFileFailure) as error:
                raise PlacementError(
                    f"the staging ring of cuda:{ordinal} cannot be freed: {error}"
                ) from error
        else:
            if usable:
                return known  # smaller, but in use and good enough
            known.give_up()
            _given_up.append(known)
            holder.ring = None
    with suppress(CudaFailure, CuFileFailure):
        _release_given_up(kind, ordinal)
    return StagingRing(kind, ordinal, slot_bytes, count, register)


def release_rings(kind: str = "", ordinal: int = -1, only: StagingRing | None = None) -> int:
    """Frees the rings that no load uses: all of them, those of one kind and device, or one.

    Returns:
        The number of bytes that were freed.
    """
    freed = 0
    for key, holder in _holders.copy().items():
        if kind in ("", key[0]) and ordinal in (-1, key[1]):
            with holder.lock:
                ring = holder.ring
                if ring is not None and only in (None, ring) and ring.retire():
                    holder.ring = None  # also if the device refuses to free it
                    ring.free()
                    freed += ring.nbytes
    return freed + _release_given_up(kind, ordinal)


def _release_given_up(kind: str, ordinal: int) -> int:
    """The same for rings that were given up and whose reads have completed after all."""
    freed = 0
    for ring in _given_up.copy():
        if kind in ("", ring.kind) and ordinal in (-1, ring.ordinal) and ring.retire():
            _given_up.remove(ring)
            ring.free()
            freed += ring.nbytes
    return freed


def release_idle(ordinal: int, only: StagingRing | None = None) -> None:
    """Frees the rings of VRAM of a device that no load uses, or `only` this ring. Memory that the
    device refuses to free stays."""
    with suppress(CudaFailure, CuFileFailure):
        if not lifecycle.is_ending():  # then `_end` frees them, before CUDA ends
            release_rings(VRAM if only is None else only.kind, ordinal, only)


def _end() -> None:
    """Stops all threads that read through rings and frees the rings, before the CUDA driver ends:
    it must not be called any more then, and pinned memory must not be unmapped."""
    for holder in _holders.copy().values():
        if holder.lock.acquire(timeout=lifecycle.LOCK_SECONDS):
            try:
                if holder.ring is not None:
                    _end_ring(holder.ring)
            finally:
                holder.lock.release()
    for ring in _given_up.copy():
        _end_ring(ring)


def _end_ring(ring: StagingRing) -> None:
    # A device that does not answer any more has nothing to free, and what cuFile does not
    # deregister stays. The other rings are freed in any case.
    with suppress(CudaFailure, CuFileFailure):
        if ring.pid == os.getpid():
            ring.end()


lifecycle.at_exit(lifecycle.RINGS, _end)


def rings(kind: str = "", ordinal: int = -1) -> list[StagingRing]:
    """The rings of this process: all of them, or those of one kind and device."""
    found = (holder.ring for holder in _holders.copy().values())
    return [
        ring
        for ring in found
        if ring is not None
        and ring.pid == os.getpid()
        and kind in ("", ring.kind)
        and ordinal in (-1, ring.ordinal)
    ]
