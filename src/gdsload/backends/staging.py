"""Staging pipelines: files to the memory of a device, by way of a staging ring.

    file ─ engine ─► slot of the ring ─ copy by the device ─► memory

A `StagingPipeline` belongs to one device, and to one backend at a time. It is opened and registered
once, and a later load uses it again if it has a `kind`. A `StagedRequest` maps memory of a device
to addresses that the pump, which knows no devices, can use. Not responsible for the ring, which
belongs to the process.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Any

from gdsload._native.cufile import Files
from gdsload._native.pump import Pump
from gdsload._native.stage import REFUSED_COPY, AddressMap, Stage
from gdsload.backends.base import (
    Failure,
    Memory,
    OpenFile,
    Progress,
    Registrations,
    RequestFacts,
    require_own_process,
)
from gdsload.backends.cufile.library import explain
from gdsload.backends.pump_request import DRAIN_SECONDS, PumpedRequest
from gdsload.errors import BackendUnavailable
from gdsload.memory import DRAM, VRAM, late_copies
from gdsload.memory.staging_ring import StagingRing, ring_for
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, Transfer
from gdsload.system import gpu
from gdsload.system.device_name import device_kind


class StagingPipeline:
    """The way from files through a ring into the memory of one device.

    Close it after its requests.
    """

    def __init__(
        self,
        name: str,
        ring: StagingRing,
        engine: object,
        depth: int,
        *,
        register: bool = False,
        files: Files | None = None,
        kind: object = None,
    ) -> None:
        """Opens the engine and starts the pump.

        Args:
            name: The name of the backend, for errors.
            ring: The ring to read into.
            engine: The capsule of the engine that reads.
            depth: Reads in flight.
            register: Whether to register the ring with the engine.
            files: The handles of cuFile, for its engines.
            kind: A later load may use a pipeline of an equal kind again; None: never.

        Raises:
            BackendUnavailable: The engine does not open.
        """
        self.name, self.ring = name, ring
        self.files, self.kind = files, kind
        self._requests = 0  # that have not ended
        self._sound = True
        device = gpu.device(ring.ordinal)
        try:
            self.stage = Stage(ring.native, device, engine, int(register), files)
            self.pump = Pump(self.stage.capsule(), min(depth, ring.native.count))
        except OSError as error:
            why = _explain(error.errno or 0) or str(error.strerror)
            text = f"backend {name!r} cannot be opened for cuda:{ring.ordinal}: {why}"
            raise BackendUnavailable(text, {name: why}) from error
        ring.enter(self)

    def prepare(
        self, transfers: Sequence[Transfer], files: Registrations, memory: Registrations
    ) -> StagedRequest:
        require_own_process(self.pump.pid, self.name)
        request = StagedRequest(self, transfers, files, memory)
        self._requests += 1
        return request

    def ended(self, sound: bool) -> None:
        """Notes the end of a request; `sound`: all of its bytes have arrived."""
        self._requests -= 1
        self._sound = self._sound and sound

    def follow(self, stream: int) -> bool:
        """Starts copies from now on after the present work of `stream`. False if the device cannot
        order them, and the caller must wait for the stream."""
        require_own_process(self.pump.pid, self.name)
        return self.stage.follow(stream)

    def park_or_close(self) -> bool:
        """Leaves it to the next load, or closes it if a request has not ended or has failed.

        Returns:
            The result of `close`, or True.
        """
        if self.kind is None or self._requests or not self._sound:
            ended = self.close()
            self.ring.free_when_idle()
            return ended
        self.ring.park(self.kind, self)
        return True

    def close(self) -> bool:
        """Ends the thread. False if a read hangs: then the thread ends after that read."""
        ended = self.pump.close(DRAIN_SECONDS)
        # Not before: the ring would take slots that are still lent for those of reads that hang.
        self.ring.leave(self)
        return ended


def why_not(device: str) -> str:
    """Why a pipeline through DRAM cannot reach this device, or ""."""
    if device_kind(device) != "cuda":
        return f"it reaches DRAM and CUDA devices, not {device}"
    return gpu.why_not(device)


def pipeline_through_dram(
    name: str,
    device: str,
    engine: object,
    settings: Mapping[str, Any],
    notes: dict[str, str],
    *,
    register: bool = False,
    kind: object = None,
) -> StagingPipeline:
    """A pipeline to a device through the pinned ring of DRAM: a parked one, or a new one.

    Args:
        name: The name of the backend.
        device: The device, such as "cuda:0".
        engine: As for `StagingPipeline`.
        settings: Its `depth`; `request_bytes` is the size of a slot, `ring_bytes` that of the ring.
        notes: Gets an entry if the ring is limited.
        register: As for `StagingPipeline`.
        kind: As for `StagingPipeline`.

    Raises:
        BackendUnavailable: The engine does not open.
        PlacementError: There is no room for the ring.
    """
    slot_bytes, ring_bytes = settings["request_bytes"], settings["ring_bytes"]
    with ring_for(DRAM, gpu.ordinal_of(device), slot_bytes, ring_bytes) as ring:
        if ring.notes:
            notes[f"{name}/ring"] = "; ".join(ring.notes)
        return ring.unpark(kind) or StagingPipeline(
            name, ring, engine, settings["depth"], register=register, kind=kind
        )


def _explain(code: int) -> str:
    """The meaning of a code of cuFile or of the device, "" for an errno."""
    if code > REFUSED_COPY:
        return f"the device refused a copy: CUDA error {code - REFUSED_COPY}"
    return explain(code)


class StagedRequest(PumpedRequest):
    """A list of transfers in a staging pipeline."""

    _may_be_copied = False  # whether nobody but this object keeps memory that is copied into

    def __init__(
        self,
        pipeline: StagingPipeline,
        transfers: Sequence[Transfer],
        files: Registrations,
        memory: Registrations,
    ) -> None:
        self.pipeline = pipeline
        self._memory = list(memory)  # alive as long as something may be copied into it
        # One address space for all memory of the request, in which the pump reads.
        spaces: list[tuple[int, int, Sequence[tuple[int, int, int]]]] = []
        end = 0
        for entry in memory:
            what = entry.what
            if not isinstance(what, Memory) or what.kind != VRAM:
                raise TypeError(f"{what!r} is no memory of a device")
            spaces.append((end, what.length, what.shares or ((0, what.length, what.address),)))
            end += -(-what.length // DEFAULT_BLOCK_BYTES) * DEFAULT_BLOCK_BYTES
        self._addresses = AddressMap(pipeline.stage, spaces)
        self._ended = False
        base = self._addresses.base
        targets = [(base + start, length, None, -1) for start, length, _ in spaces]
        super().__init__(pipeline.name, pipeline.pump, transfers, files, targets)
        self._may_be_copied = True

    def __del__(self) -> None:
        """Ctrl-C may have ended the cleanup of a load before `end`, or in it."""
        if self._may_be_copied and self.pipeline.pump.pid == os.getpid():
            self.native.cancel()
            self._keep_memory()

    def check(self) -> Progress:
        busy = self.pipeline.stage.only_copies  # before: later, reads may have begun
        return super().check()._replace(device_busy=busy)

    def failure(self, number: int) -> Failure:
        _, got, code = self.native.result(number)
        pipeline = self.pipeline
        if code > REFUSED_COPY:
            return Failure(number, got, errno.EIO, _explain(code), final=True)
        if code < 0 and pipeline.files is not None and self._is_in_file(self.transfers[number]):
            text = "cuFile read nothing, though the file goes on"
            return Failure(number, got, errno.EIO, text)
        if code > 0 and pipeline.files is not None and (text := explain(code)):
            return Failure(number, got, 0, text, code)
        return super().failure(number)

    def facts(self) -> RequestFacts:
        facts = super().facts()
        # cuFile also reads again by its own handle: nothing comes through the page cache.
        return facts if self.pipeline.files is None else facts._replace(direct_refusals={})

    def _is_in_file(self, transfer: Transfer) -> bool:
        """Whether the file has the bytes of a transfer: cuFile may report an end that is none."""
        file = self.files[transfer.shard].what
        if not isinstance(file, OpenFile):
            return False
        try:
            size = os.fstat(file.fd).st_size
        except OSError:  # nobody knows better than cuFile
            return False
        return size >= transfer.offset + transfer.wanted

    def end(self) -> None:
        if self.pipeline.pump.pid != os.getpid() or self._ended:
            return
        self._ended = True
        native = self.native
        complete = native.settled == native.count and not native.failed
        landed = False
        try:
            native.cancel()
            native.wait_until_idle(DRAIN_SECONDS)
            landed = self._addresses.end(DRAIN_SECONDS)
        finally:  # also if Ctrl-C ends one of the waits
            self.pipeline.ended(complete and landed)
            if landed:
                self._may_be_copied = False
            else:
                self._keep_memory()
            late_copies.forget_ended()

    def _keep_memory(self) -> None:
        """Keeps the memory until the device, which is busy with other work, has ended the copies:
        it must not be used for anything else before."""
        if not self.is_idle:
            late_copies.keep(self, lambda: self.is_idle)
        self._may_be_copied = False

    @property
    def is_idle(self) -> bool:
        """Whether no copy into its memory is under way; to be asked after `end`."""
        return self._addresses.end(0.0)
