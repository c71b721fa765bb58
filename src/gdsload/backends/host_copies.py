"""Copies from host memory, which need not be pinned, into the memory of a device.

    host memory ─ several threads ─► slot of the pinned ring ─ copy by the device ─► device memory

The driver copies memory that is not pinned with one thread, and the caller waits for each copy.
Here the device is kept busy: while it copies from some slots, threads fill others. Not responsible
for memory that is pinned: the device copies from it directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gdsload._native import threads
from gdsload._native.pump import throttle
from gdsload.backends.base import NO_NUMBERS, Memory, OpenFile, Registration
from gdsload.backends.posix.backend import DEPTH, RING_BYTES, SLOT_BYTES
from gdsload.backends.staging import StagedRequest, StagingPipeline
from gdsload.errors import BackendUnavailable, PlacementError, ReadError, StallError
from gdsload.memory import DRAM, VRAM, late_copies, staging_ring
from gdsload.planning.read_plan import Transfer
from gdsload.system import gpu
from gdsload.system.cancellation import WAKE_SECONDS
from gdsload.system.stall import STALL_SECONDS, StallWatch

# Fewer bytes are copied by the driver, at 9 GB/s, before threads have been woken up. If there is no
# ring yet, pinning one takes longer than the driver needs for fewer bytes than the second
# (benchmarks/results/gpu-h100.json).
LEAST_BYTES = 4 << 20
LEAST_BYTES_WITHOUT_RING = 128 << 20
_KIND = "host memory"  # of parked pipelines


class HostCopy(NamedTuple):
    """Bytes to copy: the address in host memory, their number, the address on the device."""

    source: int
    nbytes: int
    target: int


def copy_to_device(
    device: str,
    copies: Sequence[HostCopy],
    owners: object,
    order: Callable[[Callable[[int], bool]], None],
) -> bool:
    """Copies and waits for the end of it.

    Args:
        device: The device, such as "cuda:0".
        copies: What to copy; sources that are neighbours should follow one another.
        owners: What keeps the memory of both sides alive.
        order: Gets the pipeline's `follow`, to order the copies after other work on the device.

    Returns:
        False if nothing was copied, because there are too few bytes, no memory can be pinned, or
        the process limits the rate of its reads, which these copies would count against.

    Raises:
        ReadError: The device refused a copy.
        StallError: Nothing was copied for a minute.
    """
    ordinal, nbytes = gpu.ordinal_of(device), sum(each.nbytes for each in copies)
    slot_bytes, ring_bytes, least = SLOT_BYTES, RING_BYTES, LEAST_BYTES_WITHOUT_RING
    if known := staging_ring.rings(DRAM, ordinal):
        largest = max(known, key=lambda ring: ring.nbytes)
        slot_bytes, ring_bytes, least = largest.native.slot_bytes, largest.nbytes, LEAST_BYTES
    if nbytes < least or any(throttle()):
        return False
    try:
        with staging_ring.ring_for(DRAM, ordinal, slot_bytes, ring_bytes) as ring:
            pipeline = ring.unpark(_KIND) or StagingPipeline(
                "posix", ring, threads.engine(), 2 * DEPTH, kind=_KIND
            )
    except (BackendUnavailable, PlacementError):
        return False
    try:
        order(pipeline.follow)
        _copy(pipeline, device, copies, owners)
    finally:
        left = False
        try:
            left = pipeline.park_or_close()
        finally:  # also if Ctrl-C ends it
            # A read that was given up counts as ended, although a thread is still in it.
            if not left:
                late_copies.keep((pipeline, owners), lambda: pipeline.pump.finished)
            late_copies.forget_ended()
    return True


def _copy(
    pipeline: StagingPipeline, device: str, copies: Sequence[HostCopy], owners: object
) -> None:
    file = Registration(OpenFile("host memory", threads.HOST_MEMORY, 0), NO_NUMBERS)
    shares, transfers = shares_and_reads(copies, pipeline.ring.native.slot_bytes)
    start, nbytes, _ = shares[-1]
    memory = Memory(VRAM, 0, start + nbytes, device=device, shares=shares)
    request = pipeline.prepare(transfers, [file], [Registration(memory, owners)])
    try:
        request.post()
        _finish(request, device)
    finally:
        request.end()


def _finish(request: StagedRequest, device: str) -> None:
    watch = StallWatch()
    while True:
        progress = request.check()
        for failure in progress.failures:
            raise ReadError(
                f"{device}: {failure.text or 'copies from host memory failed'}",
                path="host memory",
                errno=failure.errno,
            )
        if progress.finished:
            return
        if watch.stalled(progress.idle_seconds, STALL_SECONDS):
            raise StallError(
                f"{device}: nothing was copied from host memory for {STALL_SECONDS:.0f} s",
                path="host memory",
            )
        request.wait(WAKE_SECONDS, 0, len(request.transfers) - 1)


def shares_and_reads(
    copies: Sequence[HostCopy], slot_bytes: int
) -> tuple[list[tuple[int, int, int]], list[Transfer]]:
    """The shares of a memory that holds all copies one after the other, and the reads into it.

    The offset of a read is an address. Sources that are neighbours are read together.
    """
    shares: list[tuple[int, int, int]] = []
    runs: list[tuple[int, int, int]] = []  # source, offset in the memory, bytes
    end = 0
    for source, nbytes, target in copies:
        shares.append((end, nbytes, target))
        if runs and runs[-1][0] + runs[-1][2] == source:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + nbytes)
        else:
            runs.append((source, end, nbytes))
        end += nbytes
    transfers: list[Transfer] = []
    for source, offset, nbytes in runs:
        for done in range(0, nbytes, slot_bytes):
            size = min(slot_bytes, nbytes - done)
            tag = len(transfers)
            transfers.append(
                Transfer(0, source + done, size, size, 0, offset + done, "buffered", tag)
            )
    return shares, transfers
