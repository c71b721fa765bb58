"""An event that fails while its copies are pending: their memory is not given to others."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from gdsload._native import threads
from gdsload._native.cuda import Block
from gdsload._native.memory import Region
from gdsload._native.pump import Pump
from gdsload._native.request import Request
from gdsload._native.stage import AddressMap, Ring, Stage
from gdsload.system import gpu
from gpudoubles import CODE, Doubles

BLOCK, COUNT = 4096, 8
OUT_OF_MEMORY = 2  # an error after which the device goes on


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventQuery"])
def test_memory_is_not_given_back_before_its_copies_have_run(
    call: str, doubles: Doubles, tmp_path: Path
) -> None:
    length = COUNT * BLOCK
    path = tmp_path / "file"
    path.write_bytes(b"x" * length)
    device, memory = gpu.device(0), Region.anonymous(length)
    device.pin(memory.address, length)
    ring = Ring(memory.address, BLOCK, COUNT)
    stage, block = Stage(ring, device, threads.engine()), Block(device, length)
    places = AddressMap(stage, [(0, length, [(0, length, block.address)])])
    pump = Pump(stage.capsule(), COUNT)
    doubles.hold_copies(True)
    doubles.fault(call, CODE, OUT_OF_MEMORY, times=-1)  # reads that are repeated fail as well
    with path.open("rb") as file:
        reads = [(0, i * BLOCK, BLOCK, BLOCK, 0, i * BLOCK, "buffered") for i in range(COUNT)]
        files = [(file.fileno(), -1, BLOCK, -1, -1)]
        request = Request(pump, files, reads, [(places.base, length, None, -1)])
        request.post()
        request.wait(1.0)
        request.cancel()
        request.wait_until_idle(5.0)
        assert places.end(5.0)
        ctypes.memset(block.address, 0x55, length)  # by the next owner
        doubles.hold_copies(False)
        doubles.end_work()
        pump.close(5.0)
    assert request.failed
    assert ctypes.string_at(block.address, length) == b"\x55" * length
    assert ring.retire()
    device.unpin(memory.address)
