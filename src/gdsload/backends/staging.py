"""The staged road, which every backend that reaches VRAM takes: a pump over a stage over an engine.

A `StagingPipeline` belongs to one device and to one backend at a time: it is opened and registered
once,
and used again by the next load. The ring that it passes through belongs to the process. A
`StagedRequest` turns memory of a device into landings, so that the pump, which knows
nothing of devices, reads to addresses as it always does.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from gdsload._native.cufile import Files
from gdsload._native.pump import Pump
from gdsload._native.request import Request
from gdsload._native.stage import AddressMap, Stage
from gdsload.backends.base import (
    VRAM,
    Failure,
    Memory,
    OpenFile,
    Registration,
)
from gdsload.backends.pump_request import PumpedRequest, file_table
from gdsload.errors import BackendUnavailable
from gdsload.memory.staging_ring import StagingRing
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, Transfer

# How long a release waits for what is under way. Reads need not be waited for, they go no further
# than their slots; copies that were started end by themselves, in microseconds.
DRAIN_SECONDS = 0.15

Explain = Callable[[int], str]


class StagingPipeline:
    """One device's way from files through a ring into memory. Close it when its requests are."""

    def __init__(
        self,
        name: str,
        ring: StagingRing,
        engine: object,
        depth: int,
        *,
        register: bool = False,
        files: Files | None = None,
        explain: Explain | None = None,
        kind: object = None,
    ) -> None:
        """`engine` is the capsule of what reads into the slots; `register` hands it the
        ring; `explain` says in words what its codes mean. Pipelines of the same `kind` stand for
        each other; one of None is not used again. Raises OSError where it does not open."""
        from gdsload.system import gpu

        self.name, self.ring, self.explain = name, ring, explain
        self.files, self.kind = files, kind
        self._under_way = 0
        self._sound = True
        device = gpu.device(ring.ordinal)
        self.stage = Stage(ring.native, device, engine, int(register), files)
        self.pump = Pump(self.stage.capsule(), min(depth, ring.native.count))
        ring.users.add(self)

    def require_own_process(self) -> None:
        """Raises BackendUnavailable after a fork."""
        if self.pump.pid != os.getpid():
            raise BackendUnavailable(
                "this backend was opened before a fork: its threads and its device stayed in the"
                " parent",
                {self.name: "used after fork; start processes that load with 'spawn'"},
            )

    def prepare(
        self,
        transfers: Sequence[Transfer],
        files: Sequence[Registration],
        memory: Sequence[Registration],
    ) -> StagedRequest:
        """A request for these transfers."""
        self.require_own_process()
        request = StagedRequest(self, transfers, files, memory)
        self._under_way += 1
        return request

    def ended(self, sound: bool) -> None:
        """A request has ended; `sound` says that all of it had come."""
        self._under_way -= 1
        self._sound = self._sound and sound

    def follow(self, stream: int) -> bool:
        """Copies that are started from now on come after what `stream` has to do; False where the
        device does not take that, and it has to be waited for."""
        self.require_own_process()
        return self.stage.follow(stream)

    def leave(self) -> bool:
        """To the next load that needs such a road, where nothing is under way and nothing went
        wrong; else it is closed, and the answer is that of `close`."""
        if self.kind is None or self._under_way or not self._sound:
            return self.close()
        self.ring.park(self.kind, self)
        return True

    def close(self) -> bool:
        """Ends the thread; False where reads are stuck, and it goes when they come back."""
        self.ring.users.discard(self)
        return self.pump.close(DRAIN_SECONDS)


class StagedRequest(PumpedRequest):
    """Transfers bound to a road, and the landings of the memory that they are for."""

    def __init__(
        self,
        road: StagingPipeline,
        transfers: Sequence[Transfer],
        files: Sequence[Registration],
        memory: Sequence[Registration],
    ) -> None:
        self.io_mode = road
        self.populator = None
        self._transfers, self._files = transfers, files
        # Kept as long as something may be copied into it.
        self._memory: list[Registration] = list(memory)
        shares: list[tuple[int, int, int]] = []
        places: list[int] = []
        place = 0
        for entry in memory:
            what = entry.what
            if not isinstance(what, Memory) or what.kind != VRAM:
                raise TypeError(f"{what!r} is no memory of a device")
            places.append(place)
            for start, nbytes, address in what.shares or ((0, what.length, what.address),):
                if start < 0 or nbytes < 0 or start + nbytes > what.length:
                    raise ValueError(f"a share of {nbytes} bytes at {start} leaves its memory")
                if nbytes:
                    shares.append((place + start, nbytes, address))
            place += -(-what.length // DEFAULT_BLOCK_BYTES) * DEFAULT_BLOCK_BYTES
        self._addresses = AddressMap(road.stage, shares)
        self._ended = False
        base = self._addresses.base
        # A ring's table of files would keep those of loads that have ended; cuFile needs its own.
        by_slot = road.kind is None or road.files is not None
        table, direct, buffered = file_table(files, by_slot=by_slot)
        ops: list[tuple[int, int, int, int, int, object | None, int]] = []
        for transfer in transfers:
            what = memory[transfer.target].what
            if transfer.target_offset + transfer.wanted > getattr(what, "length", 0):
                raise ValueError(f"transfer {transfer.tag} leaves its memory")
            lane = direct if transfer.io_mode == "direct" else buffered
            ops.append(
                (
                    lane[transfer.shard],
                    transfer.offset,
                    transfer.length,
                    transfer.wanted,
                    base + places[transfer.target] + transfer.target_offset,
                    None,
                    -1,
                )
            )
        super().__init__(road.name, Request(road.pump, table, ops))

    def failure(self, place: int) -> Failure:
        _, got, code = self.native.result(place)
        if code < 0 and self.io_mode.files is not None and self._goes_on(place):
            return Failure(place, got, errno.EIO, "cuFile brought nothing, though the file goes on")
        if self.io_mode.explain is not None and code > 0:
            text = self.io_mode.explain(code)
            if text:
                return Failure(place, got, 0, text, code)
        cuda_error = self.io_mode.stage.cuda_error
        if cuda_error and code > 0:
            text = f"the device refused a copy: CUDA error {cuda_error}"
            return Failure(place, got, code, text, final=True)
        return super().failure(place)

    def _goes_on(self, place: int) -> bool:
        """Whether its bytes are in the file: an end that cuFile tells of may be none."""
        transfer = self._transfers[place]
        file = self._files[transfer.shard].what
        return (
            isinstance(file, OpenFile)
            and os.fstat(file.fd).st_size >= transfer.offset + transfer.wanted
        )

    def end(self) -> None:
        """After this nothing is copied into its memory any more."""
        if self.io_mode.pump.pid != os.getpid() or self._ended:
            return
        self._ended = True
        native = self.native
        whole = native.settled == native.count and not native.failed
        native.cancel()
        native.quiet(DRAIN_SECONDS)
        landed = self._addresses.end(DRAIN_SECONDS)
        self.io_mode.ended(whole and landed)
        _kept[:] = [each for each in _kept if not each.landed]
        if not landed:
            # A device that is busy with other work: until it has ended the copies, their memory
            # must not be used for anything else.
            _kept.append(self)

    @property
    def landed(self) -> bool:
        """Whether no copy into its memory is on its way."""
        return self._addresses.end(0.0)


# Requests that have ended before their copies had.
_kept: list[StagedRequest] = []
