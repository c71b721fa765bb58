"""`quiesce` after loads to a GPU: no ring, pin, registration, handle or open driver is left."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import gdsload
import gpudoubles
from devicetensors import BACKENDS
from gdsload.backends import VRAM, Memory, Registration
from gdsload.backends.cufile import library
from gdsload.backends.posix import PosixBackend
from gdsload.errors import GdsloadError
from gdsload.memory import late_copies, staging_ring
from gdsload.system import quiesce
from gpudoubles import Doubles
from waiting import wait_for

NOTHING = {"open": 0, "files": 0, "buffers": 0, "batches": 0, "in_flight": 0}


@pytest.fixture
def doubles(loading: Doubles) -> Doubles:
    return loading


def held(doubles: Doubles) -> dict[str, int]:
    log = doubles.cufile_log
    return {name: log[name] for name in NOTHING}


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_quiesce_releases_everything_and_next_load_reopens(
    backend: str, options: dict[str, Any], doubles: Doubles, tiny_checkpoint: Path
) -> None:
    before = doubles.cuda_log
    for round_ in range(2):
        got = gdsload.load_file(tiny_checkpoint, "cuda:0", backend=backend, options=options)
        if backend == "posix":
            assert staging_ring.rings()
        else:
            assert held(doubles)["open"] == 1
            assert doubles.cufile_log["opens"] == round_ + 1
        del got
        gdsload.quiesce(1.0)
        assert staging_ring.rings() == []
        assert held(doubles) == NOTHING
        after = doubles.cuda_log
        for what in ("ranges", "pins", "streams", "events", "used"):
            assert after[what] == before[what], what


def test_memory_of_late_copies_is_freed_without_another_load() -> None:
    has_ended = threading.Event()
    for _ in range(2):
        has_ended.clear()
        late_copies.keep(object(), has_ended.is_set)
        time.sleep(0.05)
        assert len(late_copies.owners()) == 1
        has_ended.set()
        wait_for(lambda: not late_copies.owners())


def test_quiesce_frees_memory_of_late_copies(doubles: Doubles, tiny_checkpoint: Path) -> None:
    gdsload.load_file(tiny_checkpoint, "cuda:0", backend="posix", options=BACKENDS[0][1])
    late_copies.keep(object(), lambda: True)
    gdsload.quiesce(1.0)
    assert late_copies.owners() == []


def test_holders_quiesce_by_depth_then_age() -> None:
    class Thing:
        def busy(self) -> str:
            return ""

        quiesce = resume = lambda self: None

    deep, load, middle, other = Thing(), Thing(), Thing(), Thing()
    quiesce.register(deep, quiesce.DRIVER)
    quiesce.register(load)
    quiesce.register(middle, quiesce.RING)
    quiesce.register(other)
    mine = [each for each in quiesce.holders() if isinstance(each, Thing)]
    assert mine == [load, other, middle, deep]


def test_quiesce_with_lost_slot_raises(doubles: Doubles, tiny_checkpoint: Path) -> None:
    """Its ring stays pinned and registered: such a process cannot be dumped."""
    doubles.fault("event", gpudoubles.LOST, 0, skip=3)
    options = {**BACKENDS[3][1], "event_seconds": 0.05}
    gdsload.load_file(tiny_checkpoint, "cuda:0", backend="gds", options=options)
    with pytest.raises(GdsloadError, match="1 slots of the staging ring of cuda:0"):
        gdsload.quiesce(0.05)
    assert held(doubles)["open"] == 1, "it was closed under a registered ring"
    doubles.cufile.cufile_double_set(1170, 1, None)  # what it still had is forgotten


def test_quiesce_with_hanging_driver_close_raises(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "CLOSE_SECONDS", 0.05)
    gdsload.load_file(tiny_checkpoint, "cuda:0", backend="gds_mt", options=BACKENDS[2][1])
    doubles.fault("cuFileDriverClose_v2", gpudoubles.HANG)
    with pytest.raises(GdsloadError, match="cuFileDriverClose has not returned"):
        gdsload.quiesce(1.0)
    with pytest.raises(gdsload.BackendUnavailable, match="has not returned"):
        gdsload.load_file(tiny_checkpoint, "cuda:0", backend="gds_mt", options=BACKENDS[2][1])


def test_release_rings_keeps_ring_of_open_backend(doubles: Doubles) -> None:
    """Also while none of its slots is lent: its reader would never get a slot."""
    with PosixBackend(ring_bytes=1 << 20, request_bytes=64 << 10) as first:
        first.prepare([], [], [Registration(Memory(VRAM, 0, 0, device="cuda:0"), -1)])
        (only,) = staging_ring.rings()
        assert staging_ring.release_rings() == 0
        with PosixBackend(ring_bytes=1 << 20, request_bytes=128 << 10) as second:
            second.prepare([], [], [Registration(Memory(VRAM, 0, 0, device="cuda:0"), -1)])
            (_, other) = staging_ring.rings()
        assert other.native.slot_bytes == 128 << 10 and staging_ring.release_rings() == 1 << 20
        assert staging_ring.rings() == [only]
    assert staging_ring.release_rings() == 1 << 20
