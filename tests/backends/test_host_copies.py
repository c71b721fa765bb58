"""Copies from host memory to a device, without a device: the rest is in `readahead`."""

from __future__ import annotations

import gc
import mmap
import time
import weakref

import pytest

import faulty
from faulty import HANG, Faults, rule
from gdsload._native.memory import Region
from gdsload.backends import host_copies
from gdsload.backends.host_copies import HostCopy, copy_to_device
from gdsload.backends.staging import StagingPipeline
from gdsload.errors import GdsloadError, StallError
from gdsload.system import gpu
from gpudoubles import Doubles


class Owner:
    """Memory that is copied from."""


@pytest.mark.parametrize("error", [StallError, KeyboardInterrupt])
def test_memory_of_a_hanging_copy_is_kept_until_it_has_ended(
    error: type[BaseException], doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    faults.script(rule(HANG))
    monkeypatch.setattr(host_copies.threads, "engine", faulty.capsule)
    monkeypatch.setattr(host_copies, "LEAST_BYTES_WITHOUT_RING", 1)
    monkeypatch.setattr(host_copies, "LEAST_BYTES", 1)
    monkeypatch.setattr(host_copies, "STALL_SECONDS", 0.05)
    memory = Region.anonymous(mmap.PAGESIZE)
    target = gpu.device(0).allocate(mmap.PAGESIZE)
    copies = [HostCopy(memory.address, mmap.PAGESIZE, target)]

    def copy(error: type[BaseException]) -> weakref.ref[Owner]:
        owner = Owner()
        with pytest.raises(error):
            copy_to_device("cuda:0", copies, owner, lambda follow: None)
        return weakref.ref(owner)

    def interrupted(pipeline: StagingPipeline) -> bool:
        park_or_close(pipeline)
        raise KeyboardInterrupt

    park_or_close = StagingPipeline.park_or_close
    with monkeypatch.context() as patch:
        if error is KeyboardInterrupt:
            patch.setattr(StagingPipeline, "park_or_close", interrupted)
        first = copy(error)
    gc.collect()
    assert first() is not None
    faults.let_go()
    faults.wait_closed()
    deadline = time.monotonic() + 60.0
    while first() is not None and time.monotonic() < deadline:
        copy(GdsloadError)  # the engine of this test cannot read memory
        gc.collect()
    assert first() is None
