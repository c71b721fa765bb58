"""What the roads into VRAM do when CUDA, cuFile or the machine fail: by script, in bounded time.

Each test ends with what the doubles say of broken promises: a slot used too early, memory written
after it was given back, a batch handle used after an error.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import gpudoubles
from contract import BLOCK, SIZE, bytes_of
from gdsload import gpu, ring
from gdsload.backends import (
    VRAM,
    Backend,
    Memory,
    OpenFile,
    Registration,
    cufile,
    registry,
    truth,
)
from gdsload.backends.base import Failure
from gdsload.backends.gds import GdsBackend
from gdsload.backends.gds_mt import GdsMtBackend
from gdsload.backends.posix import PosixBackend
from gdsload.errors import BackendUnavailable, CuFileError, PlacementError
from gdsload.plan import Transfer
from gpudoubles import (
    CODE,
    ERRNO,
    HALF,
    HANG,
    LATE,
    LOST,
    NEGATIVE,
    SHORT,
    STATUS,
    STRANGE,
    TWICE,
    Doubles,
)
from test_gpu_contract import DeviceMemory

SMALL: dict[str, Any] = {"ring_bytes": 1 << 20, "request_bytes": 16 << 10}
KINDS = [PosixBackend, GdsBackend, GdsMtBackend]
_PATIENCE_SECONDS = 20.0


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Doubles]:
    with gpudoubles.installed(monkeypatch, tmp_path / "root") as doubles:
        yield doubles


@pytest.fixture
def file(tmp_path: Path) -> Iterator[OpenFile]:
    path = tmp_path / "0.bin"
    path.write_bytes(bytes_of(0))
    fd = os.open(path, os.O_RDONLY)
    yield OpenFile(str(path), fd, SIZE, -1, BLOCK)
    os.close(fd)


class Load:
    """One file read to device memory, request by request."""

    def __init__(self, backend: Backend, file: OpenFile, device: str = "cuda:0") -> None:
        self.backend = backend
        self.memory = DeviceMemory(SIZE + BLOCK)
        self.file = backend.register(file)
        self.space = backend.register(
            Memory(VRAM, self.memory.address, SIZE + BLOCK, self.memory, device=device)
        )
        step = min(16 << 10, backend.limits(device).max_request)
        self.transfers = [
            Transfer(0, at, step, min(step, SIZE - at), 0, at, "buffered", tag)
            for tag, at in enumerate(range(0, SIZE, step))
        ]
        self.request = backend.prepare(self.transfers, [self.file], [self.space])
        backend.post(self.request)

    def finish(self) -> dict[int, Failure]:
        failures: dict[int, Failure] = {}
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            progress = self.backend.check(self.request)
            failures.update({failure.transfer: failure for failure in progress.failures})
            if progress.finished:
                return failures
            assert time.monotonic() < deadline, "the load did not end"
            self.backend.wait(self.request, 0.05)

    def bytes(self) -> bytes:
        return ctypes.string_at(self.memory.address, SIZE)


def settle(backend: Backend, load: Load) -> None:
    backend.release(load.request)
    backend.close()


# What is mended without a word.


@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_take_their_time(kind: type[Backend], doubles: Doubles, file: OpenFile) -> None:
    """A slot that was used again before its copy was done would show as wrong bytes."""
    doubles.set(patience=50)
    with kind(**{**SMALL, "ring_bytes": 64 << 10}) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        backend.release(load.request)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (SHORT, 1),
        (SHORT, 4096),
        (SHORT, 5000),
        (ERRNO, 4),
        (ERRNO, 11),
        (ERRNO, 5),
        (NEGATIVE, 5044),
    ],
)
def test_a_read_that_is_short_or_fails_once(
    kind: int, value: int, doubles: Doubles, file: OpenFile
) -> None:
    doubles.fault("cuFileRead", kind, value, skip=2)
    with GdsMtBackend(**SMALL) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        assert doubles.struck == 1
        backend.release(load.request)


@pytest.mark.parametrize(
    ("call", "kind", "value"),
    [
        ("event", SHORT, 1),
        ("event", SHORT, 4096),
        ("event", CODE, 5),  # a negative count in an unsigned field
        ("event", CODE, 5044),
        ("event", STATUS, 0x40),  # FAILED
        ("event", STATUS, 0x04),  # INVALID
        ("event", STATUS, 0x08),  # CANCELED
        ("event", STATUS, 0x20),  # TIMEOUT: its slot is not used again
        ("event", TWICE, 0),
        ("event", STRANGE, 8),
        ("cuFileBatchIOSubmit", LATE, 30),
        ("cuFileBatchIOSubmit", CODE, 5040),
        ("cuFileBatchIOSubmit", CODE, 5037),
        ("cuFileBatchIOSubmit", HALF, 5040),
        ("cuFileBatchIOGetStatus", CODE, 5041),
    ],
)
def test_a_batch_that_goes_wrong_once(
    call: str, kind: int, value: int, doubles: Doubles, file: OpenFile
) -> None:
    doubles.fault(call, kind, value, skip=1)
    with GdsBackend(**SMALL, depth=8) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        assert doubles.struck == 1
        backend.release(load.request)


def test_entries_that_are_cut_short_in_silence(doubles: Doubles, file: OpenFile) -> None:
    doubles.size(7, 4)  # KiB a buffer; said to be more when it was opened
    with GdsBackend(ring_bytes=1 << 20) as backend:
        assert backend.limits("cuda:0").max_request == 1 << 20
        load = Load(backend, file)
        assert backend.limits("cuda:0").max_request == 4096
        doubles.size(7, 1)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        backend.release(load.request)


def test_an_event_that_never_comes(doubles: Doubles, file: OpenFile) -> None:
    """Its slot is lost, and what is written to it later harms nobody; the read is asked again."""
    doubles.fault("event", LOST, 1, skip=3)
    with GdsBackend(**SMALL, event_seconds=0.05) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        (only,) = ring.rings()
        assert only.native.lost == 1
        backend.release(load.request)
    doubles.cufile.cufile_double_set(1170, 1, None)  # what it still had is forgotten


def test_one_file_that_is_refused_spoils_no_other_entry(doubles: Doubles, tmp_path: Path) -> None:
    bad = os.open(tmp_path / "bad", os.O_WRONLY | os.O_CREAT)
    good = os.open(tmp_path / "good", os.O_RDWR | os.O_CREAT)
    os.write(good, bytes_of(0))
    doubles.fault("cuFileBatchIOSubmit", CODE, 5040)
    with GdsBackend(**SMALL) as backend:
        files = [
            backend.register(OpenFile("good", good, SIZE)),
            backend.register(OpenFile("bad", bad, SIZE)),
        ]
        memory = DeviceMemory(SIZE)
        space = backend.register(Memory(VRAM, memory.address, SIZE, memory, device="cuda:0"))
        transfers = [
            Transfer(place == 3, place * BLOCK, BLOCK, BLOCK, 0, place * BLOCK, "buffered", place)
            for place in range(8)
        ]
        request = backend.prepare(transfers, files, [space])
        backend.post(request)
        backend.wait(request, _PATIENCE_SECONDS)
        failures = backend.check(request).failures
        assert [(each.transfer, each.errno) for each in failures] == [(3, 9)]
        backend.release(request)
    os.close(bad)
    os.close(good)


# What is an error, and says which.


@pytest.mark.parametrize(
    ("kind", "value", "code"), [(NEGATIVE, 5008, 5008), (ERRNO, 5011, 5011), (ERRNO, 5, 0)]
)
def test_a_read_that_fails_for_good(
    kind: int, value: int, code: int, doubles: Doubles, file: OpenFile
) -> None:
    doubles.fault("cuFileRead", kind, value, times=-1)
    with GdsMtBackend(**SMALL) as backend:
        load = Load(backend, file)
        failures = load.finish()
        assert len(failures) == len(load.transfers)
        assert {each.code for each in failures.values()} == {code}
        if code:
            assert f"cuFile error {code}: " in failures[0].text
        else:
            assert failures[0].errno == 5
        backend.release(load.request)


def test_a_file_that_cufile_does_not_take(doubles: Doubles, file: OpenFile) -> None:
    doubles.fault("cuFileHandleRegister", CODE, 5027)
    with GdsMtBackend(**SMALL) as backend, pytest.raises(CuFileError, match="udev") as caught:
        backend.register(file)
    assert caught.value.code == 5027
    assert caught.value.path == file.path
    assert doubles.cufile_log["files"] == 0


def test_a_ring_that_cannot_be_registered(doubles: Doubles, file: OpenFile) -> None:
    doubles.fault("cuFileBufRegister", CODE, 5036)
    with GdsMtBackend(**SMALL) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        assert "BAR1" in backend.refusals["gds_mt/registered ring"]
        backend.release(load.request)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord", "cuEventQuery"])
def test_a_copy_that_fails(
    kind: type[Backend], call: str, doubles: Doubles, file: OpenFile
) -> None:
    doubles.fault(call, CODE, 719, times=-1)
    with kind(**SMALL) as backend:
        load = Load(backend, file)
        failures = load.finish()
        assert len(failures) == len(load.transfers)
        assert "CUDA error 719" in failures[0].text or failures[0].code
        backend.release(load.request)


def test_no_memory_for_the_ring(doubles: Doubles, file: OpenFile) -> None:
    before = doubles.cuda_log
    doubles.set(nbytes=before["used"] + (1 << 16))
    with GdsMtBackend(**SMALL) as backend:
        space = Registration(Memory(VRAM, 0, 0, device="cuda:0"), -1)
        with pytest.raises(PlacementError, match="ring_bytes makes it smaller"):
            backend.prepare([], [], [space])
    assert doubles.cuda_log["ranges"] == before["ranges"]


def test_pinning_that_fails(doubles: Doubles) -> None:
    doubles.fault("cuMemHostRegister_v2", CODE, 2)
    with PosixBackend(**SMALL) as backend:
        space = Registration(Memory(VRAM, 0, 0, device="cuda:0"), -1)
        with pytest.raises(PlacementError, match="out of memory"):
            backend.prepare([], [], [space])
    assert doubles.cuda_log["pins"] == 0


def test_a_batch_that_cannot_be_set_up(doubles: Doubles, file: OpenFile) -> None:
    doubles.fault("cuFileBatchIOSetUp", CODE, 5022, skip=2)
    with GdsBackend(**SMALL) as backend, pytest.raises(BackendUnavailable, match="5022"):
        Load(backend, file)
    assert doubles.cufile_log["batches"] == 0
    assert doubles.cuda_log["events"] == 0


# What hangs.


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (GdsMtBackend, "cuFileRead"),
        (GdsBackend, "cuFileBatchIOSubmit"),
        (GdsBackend, "cuFileBatchIOGetStatus"),
    ],
)
def test_a_call_that_hangs_holds_nobody(
    kind: type[Backend], call: str, doubles: Doubles, file: OpenFile
) -> None:
    """It is left behind; the memory it was for is not written to when it comes back."""
    doubles.fault(call, HANG, skip=1)
    backend = kind(**SMALL, **({"depth": 8} if kind is GdsBackend else {}))
    load = Load(backend, file)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not doubles.cufile.double_hung():
        assert time.monotonic() < deadline
        backend.wait(load.request, 0.01)
    started = time.monotonic()
    backend.release(load.request)
    ctypes.memset(load.memory.address, 0x5A, SIZE)
    backend.close()
    assert time.monotonic() - started < _PATIENCE_SECONDS / 2
    pump = load.request.road.pump
    doubles.let_go()
    assert pump.close(0.0) is True  # it was detached: there is nothing left to wait for
    while doubles.cufile.double_hung():
        assert time.monotonic() < deadline
    (only,) = ring.rings()
    while not only.close():
        assert time.monotonic() < deadline, "its slots did not come back"
    assert load.bytes() == b"\x5a" * SIZE


def test_an_open_that_hangs(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cufile, "OPEN_SECONDS", 0.05)
    doubles.fault("cuFileDriverOpen", HANG)
    with pytest.raises(BackendUnavailable, match="has not come back"):
        cufile.opened("cuda:0", False)
    calls = doubles.cufile.double_calls()
    with pytest.raises(BackendUnavailable, match="has not come back"):
        cufile.opened("cuda:0", True)
    assert doubles.cufile.double_calls() == calls, "it was called again"


@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_never_end(
    kind: type[Backend], doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Release comes back, and what they are for is kept for good."""
    from gdsload.backends import staged

    monkeypatch.setattr(staged, "_kept", [])
    doubles.hold_copies(True)
    before = doubles.cuda_log["copies"]
    backend = kind(**SMALL)
    load = Load(backend, file)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while doubles.cuda_log["copies"] == before:
        assert time.monotonic() < deadline
        backend.wait(load.request, 0.01)
    backend.release(load.request)
    assert staged._kept == [load.request]
    doubles.hold_copies(False)
    assert load.request.native.quiet(_PATIENCE_SECONDS)
    backend.close()
    staged._kept.clear()  # its copies have ended after all


# Opening cuFile.


def test_a_failed_open_is_final(doubles: Doubles) -> None:
    doubles.fault("cuFileDriverOpen", CODE, 5011)
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="5011"):
            cufile.opened("cuda:0", False)
    assert doubles.cufile_log["opens"] == 0
    assert not cufile.support("cuda:0", True).usable


def test_compatibility_mode_is_refused(doubles: Doubles) -> None:
    doubles.set(native=gpudoubles.COMPAT)
    with pytest.raises(BackendUnavailable, match="5001"):
        cufile.opened("cuda:0", False)


def test_compatibility_mode_is_refused_where_it_cannot_be_forbidden(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 1.14 only the properties of an open driver tell."""
    doubles.set(native=gpudoubles.COMPAT, version=1110)
    doubles.fault("cuFileSetParameterBool", CODE, 5030, times=-1)
    with pytest.raises(BackendUnavailable, match="compatibility mode only"):
        cufile.opened("cuda:0", False)
    assert doubles.cufile_log["open"] == 0


@pytest.mark.parametrize(
    ("machine", "mode"),
    [({"native": 1}, "nvfs"), ({"native": 2}, "p2p"), ({"native": 0}, "compat")],
)
def test_the_mode_is_told(
    machine: dict[str, int], mode: str, doubles: Doubles, file: OpenFile
) -> None:
    doubles.set(**machine)
    with GdsMtBackend(**SMALL, allow_compat=True) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert backend.engine == mode
        road = "posix" if mode == "compat" else mode
        assert backend.roads(load.request) == {f"gds_mt/{road}": SIZE}
        assert ("gds_mt/native" in backend.refusals) == (mode == "compat")
        backend.release(load.request)


@pytest.mark.parametrize(
    ("gone", "why"),
    [
        ("proc/modules", "/proc/modules cannot be read"),
        ("run/udev", "no /run/udev"),
        ("dev/nvidia-fs0", "not in this container"),
        ("proc/driver/nvidia-fs/version", "nvidia-fs is not loaded"),
    ],
)
def test_what_the_machine_lacks(gone: str, why: str, doubles: Doubles, tmp_path: Path) -> None:
    path = tmp_path / "root" / gone
    path.rmdir() if path.is_dir() else path.unlink()
    before = doubles.cufile.double_calls()
    support = GdsMtBackend.probe("cuda:0")
    assert not support.usable
    assert why in str(support)
    assert doubles.cufile.double_calls() - before <= 1  # its version at most: nothing was opened
    with pytest.raises(BackendUnavailable, match="cannot load"):
        registry.choose("cuda:0", "gds_mt")
    allowed = registry.choose("cuda:0", "gds_mt", {"allow_compat": True}) if "nvidia" in gone else 0
    assert allowed == 0 or allowed.backend is GdsMtBackend


def test_auto_takes_the_native_way_or_our_own(doubles: Doubles, tmp_path: Path) -> None:
    assert registry.choose("cuda:0").backend is GdsMtBackend
    (tmp_path / "root/dev/nvidia-fs0").unlink()
    choice = registry.choose("cuda:0")
    assert choice.backend is PosixBackend
    assert "gds_mt" in choice.refusals


def test_the_log_is_not_dropped_where_the_process_stands(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cufile, "own_configuration", lambda: "")
    cufile.opened("cuda:0", False)
    assert os.path.isabs(doubles.log_dir)


def test_a_configuration_of_ones_own_is_respected(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", "/somewhere/cufile.json")
    cufile.opened("cuda:0", False)
    assert doubles.log_dir == ""


def test_limits_that_stall_batches_are_explained(doubles: Doubles, file: OpenFile) -> None:
    doubles.size(7, 16384)  # per_buffer_cache_size_kb, with max_device_cache_size_kb at 131072
    with GdsBackend(ring_bytes=64 << 20) as backend:
        load = Load(backend, file)
        assert "max_device_cache_size_kb to 2097152" in backend.refusals["gds/limits"]
        assert backend.limits("cuda:0").depth == 8
        assert load.finish() == {}
        backend.release(load.request)


# What is shared, and what comes back.


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_load_registers_nothing(
    kind: type[Backend], doubles: Doubles, file: OpenFile
) -> None:
    before = doubles.cuda_log
    for round_ in range(3):
        with kind(**SMALL) as backend:
            load = Load(backend, file)
            assert load.finish() == {}
            assert load.bytes() == bytes_of(0)
            backend.release(load.request)
        del load
        log = doubles.cuda_log
        if round_ == 0:
            first, registered = log, doubles.cufile_log
    kept = ("pins", "ranges", "streams", "events")  # the road waits at its ring
    assert [log[what] for what in kept] == [first[what] for what in kept]
    for what in ("buffers", "batches"):
        assert doubles.cufile_log[what] == registered[what]
    assert doubles.cufile_log["files"] == 0
    assert ring.release_rings() == 1 << 20
    after = doubles.cuda_log
    for what in (*kept, "used"):
        assert after[what] == before[what]
    assert doubles.cufile_log["batches"] == 0


def test_two_devices_have_a_ring_each(doubles: Doubles, file: OpenFile) -> None:
    with GdsMtBackend(**SMALL) as backend:
        loads = [Load(backend, file, f"cuda:{number}") for number in range(2)]
        for load in loads:
            assert load.finish() == {}
            assert load.bytes() == bytes_of(0)
            backend.release(load.request)
        assert sorted(each.ordinal for each in ring.rings()) == [0, 1]


def test_two_backends_share_a_ring_and_its_bound(doubles: Doubles, file: OpenFile) -> None:
    doubles.set(patience=20)
    with GdsMtBackend(**SMALL) as one, GdsMtBackend(**SMALL) as other:
        loads = [Load(backend, file) for backend in (one, other)]
        for load in loads:
            assert load.finish() == {}
            assert load.bytes() == bytes_of(0)
        for load in loads:
            load.backend.release(load.request)
        assert len(ring.rings()) == 1


def test_pieces_land_where_they_belong(doubles: Doubles, file: OpenFile) -> None:
    """Tensors of a shard, each in memory of its own; what lies between them goes nowhere."""
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
        backend.wait(request, _PATIENCE_SECONDS)
        assert not backend.check(request).failures
        backend.release(request)
        for (start, nbytes), each in zip(places, memory, strict=True):
            got = ctypes.string_at(each.address, nbytes)
            assert got == bytes_of(0)[start : start + nbytes]


@pytest.mark.parametrize(
    "shares", [[(0, 10, 4096), (5, 10, 8192)], [(0, SIZE * 9, 4096)], [(-1, 5, 4096)]]
)
def test_shares_that_cannot_be(
    shares: Sequence[tuple[int, int, int]], doubles: Doubles, file: OpenFile
) -> None:
    with PosixBackend(**SMALL) as backend:
        space = backend.register(Memory(VRAM, 0, SIZE, device="cuda:0", shares=shares))
        with pytest.raises(ValueError, match="share"):
            backend.prepare([], [backend.register(file)], [space])


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_is_refused(kind: type[Backend], doubles: Doubles, file: OpenFile) -> None:
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


def test_there_is_no_such_device(doubles: Doubles) -> None:
    with pytest.raises(PlacementError, match="CUDA sees 2"):
        gpu.device(7)
    assert not PosixBackend.probe("cuda:7").usable
    assert not PosixBackend.probe("mps").usable


def test_what_is_known_of_a_device(doubles: Doubles, tmp_path: Path) -> None:
    doubles.set(unified=True)
    facts = gpu.facts(1)
    assert (facts.name, facts.bus) == ("Double 1", "0000:02:00.0")
    assert facts.unified
    folder = tmp_path / "root/sys/bus/pci/devices/0000:02:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    assert gpu.numa_node("00000000:02:00.0", str(tmp_path / "root")) == 1
    assert gpu.numa_node("0000:99:00.0", str(tmp_path / "root")) == -1


def test_room_is_asked_for_first(doubles: Doubles) -> None:
    doubles.set(nbytes=(1 << 30) + doubles.cuda_log["used"])
    gpu.require_room(0, 1 << 29)
    with pytest.raises(PlacementError) as caught:
        gpu.require_room(0, 1 << 30)
    assert caught.value.missing_bytes == gpu.SPARE_BYTES


def test_the_facts_for_the_doctor(doubles: Doubles, file: OpenFile, tmp_path: Path) -> None:
    opens = doubles.cufile_log["opens"]
    facts = {each.name: each for each in truth.facts()}
    assert {each.verdict for each in facts.values()} == {"yes"}
    assert facts["libcufile"].detail.startswith("1.17 at ")
    assert "Double 0 at 0000:01:00.0" in facts["cuda:0"].detail
    assert doubles.cufile_log["opens"] == opens
    (tmp_path / "root/dev/nvidia-fs0").unlink()
    (tmp_path / "root/run/udev").rmdir()
    facts = {each.name: each for each in truth.facts("cuda:9")}
    assert "not in this container" in facts["native path"].detail
    assert "/run/udev" in facts["opening cuFile"].mend
    assert "CUDA sees 2" in facts["cuda:9"].detail
    assert {facts[name].verdict for name in ("native path", "opening cuFile", "cuda:9")} == {"no"}
    with PosixBackend(**SMALL) as backend:
        load = Load(backend, file)
        load.finish()
        backend.release(load.request)
        ringed = truth.facts()[-1]
    assert (ringed.name, ringed.detail[:13]) == ("ring of cuda:0", "1 MiB of DRAM")
