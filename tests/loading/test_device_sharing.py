"""What loads to a GPU share, where their bytes arrive, and what they give back."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import gdsload
from contract import BLOCK, SIZE, bytes_of
from gdsload._native.cuda import Device
from gdsload.backends import (
    DRAM,
    VRAM,
    Backend,
    Memory,
    OpenFile,
)
from gdsload.backends.cufile.gds import MOST_IN_FLIGHT, GdsBackend
from gdsload.backends.cufile.gds_mt import THREADS, GdsMtBackend
from gdsload.backends.posix import PosixBackend
from gdsload.backends.posix.backend import DEPTH, MOST_RING_BYTES, SLOT_BYTES
from gdsload.errors import BackendUnavailable, PlacementError
from gdsload.memory import device_buffers, staging_ring
from gdsload.planning.read_plan import Transfer
from gdsload.system import gpu
from gdsload.system.storage import Storage
from gpucontract import DeviceMemory
from gpudoubles import CODE, HANG, Doubles
from gpuloads import KINDS, PATIENCE_SECONDS, SMALL, Load
from storage import ENGINES
from waiting import wait_for


def test_second_load_pins_nothing(doubles: Doubles, file: OpenFile) -> None:
    before = doubles.cuda_log
    for round_ in range(3):
        with PosixBackend(**SMALL) as backend:
            load = Load(backend, file)
            assert load.finish() == {}
            assert load.bytes() == bytes_of(0)
            backend.release(load.request)
        del load
        log = doubles.cuda_log
        if round_ == 0:
            first = log
    counts = ("pins", "ranges", "streams", "events")  # the pipeline waits at its ring
    assert [log[what] for what in counts] == [first[what] for what in counts]
    assert staging_ring.release_rings() == 1 << 20
    after = doubles.cuda_log
    for what in (*counts, "used"):
        assert after[what] == before[what]


@pytest.mark.parametrize("kind", [GdsBackend, GdsMtBackend])
def test_ring_of_vram_is_idle_when_its_last_load_ends(
    kind: type[Backend], doubles: Doubles, file: OpenFile
) -> None:
    before = doubles.cuda_log
    with kind(**SMALL) as first:
        load = Load(first, file)
        with kind(**SMALL) as second:
            other = Load(second, file)
            assert other.finish() == {}
            second.release(other.request)
        (ring,) = staging_ring.rings()
        staging_ring.release_idle(0)
        assert staging_ring.rings() == [ring], "a load uses it"
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        first.release(load.request)
    del load, other
    assert staging_ring.rings() == [ring]
    staging_ring.release_idle(0)
    assert staging_ring.rings() == []
    after, log = doubles.cuda_log, doubles.cufile_log
    for what in ("ranges", "streams", "events", "used"):
        assert after[what] == before[what]
    assert (log["files"], log["buffers"], log["batches"]) == (0, 0, 0)


def read(file: OpenFile, backend: type[Backend] = GdsMtBackend, **options: int) -> None:
    """One load through a ring of VRAM."""
    with backend(**{**SMALL, **options}) as opened:
        load = Load(opened, file)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        opened.release(load.request)


def test_idle_ring_of_vram_serves_the_next_load(doubles: Doubles, file: OpenFile) -> None:
    read(file)
    (ring,) = staging_ring.rings()
    read(file)
    assert staging_ring.rings() == [ring]
    assert doubles.cufile_log["buffers"] == 1
    gdsload.quiesce()
    assert staging_ring.rings() == []
    assert doubles.cufile_log["buffers"] == 0


def test_new_ring_of_vram_replaces_an_idle_one(doubles: Doubles, file: OpenFile) -> None:
    read(file)
    (ring,) = staging_ring.rings()
    read(file, request_bytes=32 << 10)
    (other,) = staging_ring.rings()
    assert other is not ring
    assert doubles.cufile_log["buffers"] == 1


def test_ring_of_vram_is_freed_after_its_idle_time(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_ring, "IDLE_SECONDS", 0.02)
    before = doubles.cuda_log["used"]
    with GdsMtBackend(**SMALL) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        (ring,) = staging_ring.rings()
        read(file)
        assert not ring._freed.wait(0.1), "another load uses it"
        assert staging_ring.rings() == [ring]
        backend.release(load.request)
    del load
    wait_for(lambda: not (doubles.cuda_log["used"] > before or doubles.cufile_log["buffers"]))
    assert staging_ring.rings() == []


def test_ring_of_vram_is_freed_at_once_without_a_thread(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_ring, "start_thread", lambda *_: None)
    read(file)
    assert staging_ring.rings() == []


def test_load_that_needs_the_memory_of_an_idle_ring_gets_it(
    doubles: Doubles, file: OpenFile
) -> None:
    read(file)
    free_bytes, _ = gpu.device(0).memory()
    device_buffers.require_room(0, free_bytes - gpu.SPARE_BYTES)
    assert len(staging_ring.rings()) == 1, "there is room beside it"
    device_buffers.require_room(0, free_bytes - gpu.SPARE_BYTES + 1)
    assert staging_ring.rings() == []


def test_ring_of_vram_that_cannot_be_freed_fails_no_load(doubles: Doubles, file: OpenFile) -> None:
    for _ in range(2):
        read(file)
        doubles.fault("cuFileBufDeregister", CODE, 5026)
        staging_ring.release_idle(0)
        assert staging_ring.rings() == [], "its slots are out of use"


def test_ring_that_cufile_keeps_leaves_no_other_ring_at_the_end_of_the_process(
    doubles: Doubles, file: OpenFile
) -> None:
    before = doubles.cuda_log["pins"]
    read(file, GdsMtBackend)
    read(file, PosixBackend)
    assert [ring.kind for ring in staging_ring.rings()] == [VRAM, DRAM]
    doubles.fault("cuFileBufDeregister", CODE, 5026)
    staging_ring._end()
    assert doubles.struck == 1 and doubles.cuda_log["pins"] == before


def test_load_after_reads_that_hang_gets_a_new_ring(doubles: Doubles, file: OpenFile) -> None:
    """They keep 6 of the 9 slots of the old one, which is freed when they have returned."""
    doubles.fault("cuFileRead", HANG, times=6)
    options = {"request_bytes": 16 << 10, "ring_bytes": 9 * (16 << 10)}
    with GdsMtBackend(**options) as backend:
        load = Load(backend, file)
        wait_for(lambda: doubles.hung >= 6)
        backend.release(load.request)
    (ring,) = staging_ring.rings()
    with GdsMtBackend(**options) as backend:
        other = Load(backend, file)
        assert staging_ring.rings() != [ring]
        assert other.finish() == {} and other.bytes() == bytes_of(0)
        backend.release(other.request)
    doubles.let_go()

    def freed() -> bool:
        staging_ring.release_rings()
        return not doubles.cufile_log["buffers"]

    wait_for(freed)


def test_load_after_reads_that_hang_gets_a_new_ring_while_another_load_reads(
    doubles: Doubles, file: OpenFile
) -> None:
    """Slots of a load that has ended do not come back because somebody else reads."""
    doubles.fault("cuFileRead", HANG, times=6)
    options = {"request_bytes": 16 << 10, "ring_bytes": 9 * (16 << 10)}
    with GdsMtBackend(**options) as beside, GdsMtBackend(**options) as third:
        with GdsMtBackend(**options) as backend:
            load = Load(backend, file)
            wait_for(lambda: doubles.hung >= 6)
            other = Load(beside, file)
            (ring,) = staging_ring.rings()
            assert ring.usable, "a load that reads is no reason for another ring"
            backend.release(load.request)
        after = Load(third, file)
        assert staging_ring.rings() != [ring]
        assert after.finish() == {} and after.bytes() == bytes_of(0)
        doubles.let_go()
        assert other.finish() == {} and other.bytes() == bytes_of(0)
        third.release(after.request)
        beside.release(other.request)


@pytest.mark.parametrize("kind", [PosixBackend, GdsMtBackend])
def test_ring_that_cannot_be_freed_for_another_shape_raises_placement_error_once(
    kind: type[Backend], doubles: Doubles, file: OpenFile
) -> None:
    read(file, kind)
    (ring,) = staging_ring.rings()
    doubles.fault("cuMemHostUnregister", CODE, 719)
    doubles.fault("cuFileBufDeregister", CODE, 5026)
    larger = kind(**{**SMALL, "ring_bytes": 2 << 20})
    with larger, pytest.raises(PlacementError, match="cannot be freed"):
        Load(larger, file)
    read(file, kind, ring_bytes=2 << 20)
    if kind is PosixBackend:
        gpu.device(0).unpin(ring.address)  # other tests count pins


def test_refused_registration_of_the_ring_is_reported_by_each_load(
    doubles: Doubles, file: OpenFile
) -> None:
    doubles.fault("cuFileBufRegister", CODE, 5036)
    for _ in range(2):
        with GdsMtBackend(**SMALL) as backend:
            load = Load(backend, file)
            assert load.finish() == {}
            backend.release(load.request)
            assert "BAR1" in backend.status().refusals["gds_mt/registered ring"]
    assert len(staging_ring.rings()) == 1


def test_ring_of_vram_is_freed_if_no_engine_opens(doubles: Doubles, file: OpenFile) -> None:
    before = doubles.cuda_log["used"]
    doubles.fault("cuFileBatchIOSetUp", CODE, 5035)
    with GdsBackend(**SMALL) as backend:
        with pytest.raises(BackendUnavailable):
            Load(backend, file)
        gc.collect()
        staging_ring.release_idle(0)
        assert staging_ring.rings() == []
    assert doubles.cuda_log["used"] == before


def test_ring_stays_while_a_pipeline_through_it_is_opened(doubles: Doubles) -> None:
    """Another thread may release unused rings at any time."""
    with staging_ring.ring_for(DRAM, 0, 64 << 10, 1 << 20) as made:
        assert staging_ring.release_rings() == 0
        assert staging_ring.rings() == [made]
    assert staging_ring.release_rings() == 1 << 20


class Interrupted:
    """A device. Ctrl-C arrives while it pins memory."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def pin(self, address: int, nbytes: int) -> None:
        self.device.pin(address, nbytes)
        raise KeyboardInterrupt


def test_ctrl_c_while_a_ring_is_pinned_leaves_nothing_pinned(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA would take other memory at the same address for it."""
    before, device = doubles.cuda_log["pins"], Interrupted(gpu.device(0))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gpu, "device", lambda ordinal: device)
        staging_ring.StagingRing(DRAM, 0, 64 << 10, 16)
    assert doubles.cuda_log["pins"] == before


def test_two_devices_have_one_ring_each(doubles: Doubles, file: OpenFile) -> None:
    with GdsMtBackend(**SMALL) as backend:
        loads = [Load(backend, file, f"cuda:{number}") for number in range(2)]
        for load in loads:
            assert load.finish() == {}
            assert load.bytes() == bytes_of(0)
            backend.release(load.request)
        assert sorted(each.ordinal for each in staging_ring.rings()) == [0, 1]


def test_two_backends_share_one_ring_and_its_limit(doubles: Doubles, file: OpenFile) -> None:
    doubles.set(patience=20)
    with GdsMtBackend(**SMALL) as one, GdsMtBackend(**SMALL) as other:
        loads = [Load(backend, file) for backend in (one, other)]
        for load in loads:
            assert load.finish() == {}
            assert load.bytes() == bytes_of(0)
        for load in loads:
            load.backend.release(load.request)
        assert len(staging_ring.rings()) == 1


def test_rings_of_cufile_have_one_slot_for_each_read_in_flight(
    doubles: Doubles, file: OpenFile
) -> None:
    """Each has a ring of its own: none is measured with the slots of another."""
    with GdsMtBackend(request_bytes=64 << 10) as first, GdsBackend(request_bytes=16 << 10) as other:
        loads = [Load(backend, file) for backend in (first, other)]
        for load in loads:
            assert load.finish() == {} and load.bytes() == bytes_of(0)
            load.backend.release(load.request)
        shapes = {(each.native.slot_bytes, each.native.count) for each in staging_ring.rings()}
        assert shapes == {(64 << 10, 3 * THREADS // 2), (16 << 10, MOST_IN_FLIGHT)}


@pytest.mark.parametrize(
    ("storage", "in_flight"),
    [(Storage(), 2 * DEPTH), (Storage("nfs4", 1 << 20, 256), SIZE // BLOCK)],
)
def test_distant_storage_has_more_reads_in_flight_within_the_ring(
    storage: Storage, in_flight: int, doubles: Doubles, file: OpenFile
) -> None:
    """Each read takes a round trip; the ring of 64 slots bounds the memory."""
    with PosixBackend(ring_bytes=64 * BLOCK, request_bytes=BLOCK) as backend:
        # Its reads are answered soon. It stays: to free its memory would run the copies of others.
        first = Load(backend, file._replace(storage=storage))
        assert first.finish() == {}
        backend.release(first.request)
        doubles.hold_copies(True)
        load = Load(backend, file._replace(storage=storage))
        assert backend.limits("cuda:0").depth == min(2 * (storage.depth or DEPTH), 64)
        (ring,) = staging_ring.rings()
        wait_for(
            lambda: ring.native.lent >= in_flight, lambda: f"{ring.native.lent} reads in flight"
        )
        doubles.hold_copies(False)
        assert load.finish() == {} and load.bytes() == bytes_of(0)
        backend.release(load.request)


@pytest.mark.parametrize(
    ("storage", "options", "slots"),
    [
        (Storage(), {}, 2 * DEPTH),
        (Storage("nfs4", 1 << 20, 4 * DEPTH), {}, MOST_RING_BYTES // SLOT_BYTES),
        (Storage(), {"request_bytes": 64 << 10}, 2 * DEPTH),
        (Storage(), {"ring_bytes": 8 * SLOT_BYTES}, 8),
    ],
)
def test_ring_has_a_slot_for_each_read_in_flight(
    storage: Storage, options: dict[str, Any], slots: int, doubles: Doubles, file: OpenFile
) -> None:
    with PosixBackend(**options) as backend:
        load = Load(backend, file._replace(storage=storage))
        assert load.finish() == {} and load.bytes() == bytes_of(0)
        backend.release(load.request)
        (ring,) = staging_ring.rings()
        slot_bytes = options.get("request_bytes", SLOT_BYTES)
        assert (ring.native.slot_bytes, ring.native.count) == (slot_bytes, slots)
        limits = backend.limits("cuda:0")
        assert (limits.max_request, limits.depth) == (slot_bytes, slots)


def test_larger_ring_serves_a_load_that_needs_less(doubles: Doubles, file: OpenFile) -> None:
    read(file, PosixBackend, ring_bytes=2 << 20)
    (large,) = staging_ring.rings()
    read(file, PosixBackend, ring_bytes=1 << 20)
    assert staging_ring.rings() == [large]
    read(file, PosixBackend, ring_bytes=4 << 20)
    (larger,) = staging_ring.rings()
    assert larger is not large and larger.nbytes == 4 << 20


def test_shares_receive_the_bytes_of_their_ranges(doubles: Doubles, file: OpenFile) -> None:
    """Each tensor of a shard has memory of its own; bytes between tensors are dropped."""
    doubles.set(patience=7)
    places = [(8, 100), (300, 5000), (8192, 1), (8193, 40000), (SIZE - 77, 77)]
    with PosixBackend(**SMALL) as backend:
        known = backend.register(file)
        memory = [DeviceMemory(nbytes) for _, nbytes in places]
        shares = [
            (start, nbytes, each.address)
            for (start, nbytes), each in zip(places, memory, strict=True)
        ]
        space = backend.register(
            Memory(VRAM, 0, SIZE + BLOCK, memory, device="cuda:0", shares=shares)
        )
        step = 16 << 10
        transfers = [
            Transfer(0, at, step, min(step, SIZE - at), 0, at, "buffered", tag)
            for tag, at in enumerate(range(0, SIZE, step))
        ]
        request = backend.prepare(transfers, [known], [space])
        backend.post(request)
        backend.wait(request, PATIENCE_SECONDS)
        assert not backend.check(request).failures
        backend.release(request)
        for (start, nbytes), each in zip(places, memory, strict=True):
            got = ctypes.string_at(each.address, nbytes)
            assert got == bytes_of(0)[start : start + nbytes]


@pytest.mark.parametrize(
    "shares", [[(0, 10, 4096), (5, 10, 8192)], [(0, SIZE * 9, 4096)], [(-1, 5, 4096)]]
)
def test_invalid_shares_raise_value_error(
    shares: Sequence[tuple[int, int, int]], doubles: Doubles, file: OpenFile
) -> None:
    with PosixBackend(**SMALL) as backend:
        space = backend.register(Memory(VRAM, 0, SIZE, device="cuda:0", shares=shares))
        with pytest.raises(ValueError, match="share"):
            backend.prepare([], [backend.register(file)], [space])


@pytest.mark.parametrize("kind", KINDS)
def test_backend_after_a_fork_raises_backend_unavailable(
    kind: type[Backend], doubles: Doubles, file: OpenFile
) -> None:
    with kind(**SMALL) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for act in (
                    lambda: backend.check(load.request),
                    lambda: backend.post(load.request),
                    lambda: gpu.device(0),
                ):
                    with pytest.raises(BackendUnavailable, match="fork"):
                        act()
                backend.release(load.request)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        backend.release(load.request)


@pytest.mark.parametrize("backend", ["auto", "posix", "gds", "gds_mt"])
def test_load_after_a_fork_raises_backend_unavailable(
    backend: str, measuring: Doubles, checkpoint: Path
) -> None:
    """The error is gdsload's, with a hint, and not torch's."""
    options = {"ring_bytes": 1 << 20, "request_bytes": 64 << 10}
    gdsload.load_file(checkpoint, "cuda:0", backend=backend, options=options)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "it loaded"
        try:
            gdsload.load_file(checkpoint, "cuda:0", backend=backend, options=options)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert said.startswith("BackendUnavailable: ") and "'spawn'" in said, said
    assert "pip install" not in said


@pytest.mark.parametrize("engine", ENGINES)
def test_fork_wipes_ring_in_child_and_leaves_it_in_parent(
    engine: str, doubles: Doubles, file: OpenFile
) -> None:
    """A pinned page must not be shared with a child: after the next write the parent would have
    another page than the device."""
    first, held = os.pipe(), os.pipe()
    with PosixBackend(engine=engine, **SMALL) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        (only,) = staging_ring.rings()
        assert any(ctypes.string_at(only.address, only.nbytes))
        child = os.fork()
        if child == 0:
            os.close(held[1])
            wiped = not any(ctypes.string_at(only.address, only.nbytes))
            os.write(first[1], b"1" if wiped else b"0")
            os.read(held[0], 1)  # until the parent has loaded again
            os._exit(0)
        try:
            assert os.read(first[0], 1) == b"1"
            again = Load(backend, file)
            assert again.finish() == {}
            assert again.bytes() == bytes_of(0)
        finally:
            for end in (*first, *held):
                os.close(end)
            os.waitpid(child, 0)
        for one in (load, again):
            backend.release(one.request)


def test_pinning_that_hangs_does_not_block_other_devices(doubles: Doubles) -> None:
    def pin() -> None:
        with staging_ring.ring_for(DRAM, 0, 64 << 10, 1 << 20):
            pass

    doubles.fault("cuMemHostRegister_v2", HANG)
    pinning = threading.Thread(target=pin)
    pinning.start()
    wait_for(lambda: doubles.hung)
    with staging_ring.ring_for(DRAM, 1, 64 << 10, 1 << 20) as other:
        assert doubles.hung == 1
        assert staging_ring.rings() == [other]
    assert staging_ring.release_rings(DRAM, 1) == 1 << 20
    assert doubles.hung == 1
    doubles.let_go()
    pinning.join()
    assert staging_ring.release_rings() == 1 << 20
