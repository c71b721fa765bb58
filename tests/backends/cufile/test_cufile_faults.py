"""Faults of CUDA, cuFile and the machine, injected by the doubles: each ends in bounded time.

After each test the doubles report violations of the interface: a slot used too early, memory
written after it was freed, a batch handle used after an error.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import descriptors
import gdsload
from contract import BLOCK, SIZE, bytes_of
from gdsload._native.cufile import CuFileFailure
from gdsload._native.pump import Pump
from gdsload.backends import VRAM, Backend, Memory, OpenFile, Registration
from gdsload.backends.cufile import library
from gdsload.backends.cufile.base import _registrar, own_descriptor
from gdsload.backends.cufile.gds import GdsBackend
from gdsload.backends.cufile.gds_mt import GdsMtBackend
from gdsload.backends.posix import PosixBackend
from gdsload.checkpoint.file_io import close_files
from gdsload.errors import BackendUnavailable, CuFileError, GdsloadError, PlacementError, ReadError
from gdsload.memory import late_copies, staging_ring
from gdsload.planning.read_plan import Transfer
from gdsload.system import gpu
from gdsload.system.storage import Storage
from gpucontract import DeviceMemory
from gpudoubles import (
    CODE,
    DELAY,
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
from gpuloads import KINDS, PATIENCE_SECONDS, SMALL, Load, direct
from storage import ENGINES
from waiting import wait_for

# Faults that are handled without an error.


@pytest.mark.parametrize("kind", KINDS)
def test_slow_copies_keep_their_slots(
    kind: type[Backend], doubles: Doubles, file: OpenFile
) -> None:
    """A slot used again before its copy is done would give wrong bytes."""
    doubles.set(patience=50)
    with kind(**{**SMALL, "ring_bytes": 64 << 10}) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        backend.release(load.request)


def test_batches_are_destroyed_side_by_side(doubles: Doubles, file: OpenFile) -> None:
    """cuFile takes 0.1 s for each."""
    doubles.fault("cuFileBatchIODestroy", DELAY, 200_000_000, times=-1)
    with GdsBackend(**SMALL) as backend:
        load = Load(backend, file)
        assert load.finish() == {} and doubles.cufile_log["batches"] == 4
        backend.release(load.request)
    assert doubles.cufile_log["batches"] == 0
    assert doubles.cufile_log["destroyed_together"] > 1


def test_load_to_another_gpu_opens_no_context_on_the_first(
    doubles: Doubles, file: OpenFile
) -> None:
    """Files are registered before the first read says where it goes."""
    gpu.device(1)
    with GdsMtBackend(**SMALL) as backend:
        backend.register(file)
        assert doubles.cufile_log["files"] == 1
    assert doubles.cuda_log["retained"] == 1


def test_end_of_file_that_is_none_is_an_error_of_cufile(doubles: Doubles, file: OpenFile) -> None:
    doubles.fault("cuFileRead", SHORT, 0, times=-1)
    with GdsMtBackend(**SMALL) as backend:
        load = Load(backend, file)
        failures = load.finish()
        assert failures and all("the file goes on" in each.text for each in failures.values())
        backend.release(load.request)


def test_end_of_file_of_unknown_size_is_a_short_read(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubles.fault("cuFileRead", SHORT, 0, times=-1)

    def refuse(fd: int) -> os.stat_result:
        raise OSError(errno.EIO, "Input/output error")

    with GdsMtBackend(**SMALL) as backend:
        load = Load(backend, file)
        with monkeypatch.context() as patch:
            patch.setattr("gdsload.backends.staging.os.fstat", refuse)
            failures = load.finish()
        assert failures and all(not each.text for each in failures.values())
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
def test_short_or_failed_read_is_continued(
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
        ("cuFileBatchIOSubmit", CODE, -5),  # cuFile answers errnos as negative codes
        ("cuFileBatchIOGetStatus", CODE, -5),
    ],
)
def test_batch_that_fails_once_is_retried(
    call: str, kind: int, value: int, doubles: Doubles, file: OpenFile
) -> None:
    doubles.fault(call, kind, value, skip=1)
    with GdsBackend(**SMALL, depth=8) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        assert doubles.struck == 1
        backend.release(load.request)


def test_silently_truncated_entries_are_continued(doubles: Doubles, file: OpenFile) -> None:
    doubles.size(7, 4)  # KiB a buffer; said to be more when it was opened
    with GdsBackend(ring_bytes=1 << 20) as backend:
        assert backend.limits("cuda:0").max_request == 1 << 20
        load = Load(backend, file)
        assert backend.limits("cuda:0").max_request == 4096
        doubles.size(7, 1)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        backend.release(load.request)


def test_lost_event_loses_a_slot_and_is_retried(doubles: Doubles, file: OpenFile) -> None:
    """Its slot is not used again, and the read is repeated."""
    doubles.fault("event", LOST, 1, skip=3)
    with GdsBackend(**SMALL, event_seconds=0.05) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        (only,) = staging_ring.rings()
        assert only.native.lost == 1
        backend.release(load.request)
    doubles.cufile.cufile_double_set(1170, 1, None)  # forget its pending events


@pytest.mark.parametrize(
    ("call", "kind", "value"),
    [
        ("event", LOST, 1),
        ("event", STATUS, 0x20),  # TIMEOUT
        ("event", TWICE, 0),
        ("cuFileBatchIOGetStatus", CODE, 5041),
        ("cuFileBatchIOSubmit", HALF, 5040),
    ],
)
def test_files_of_lost_reads_stay_registered_and_open(
    call: str, kind: int, value: int, doubles: Doubles, file: OpenFile
) -> None:
    """Nobody knows when such a read ends. cuFile stays open, also if the ring is not registered."""
    doubles.fault("cuFileBufRegister", CODE, 5036)
    doubles.fault(call, kind, value)
    with GdsBackend(**SMALL, depth=8, event_seconds=0.05) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        ((_, fd, _),) = backend._files
        backend.release(load.request)
    wait_for(lambda: not late_copies.owners(), "it is polled without end")
    assert doubles.cufile_log["files"] == 1 and os.fstat(fd)
    library._end()
    assert doubles.cufile_log["open"] == 1
    doubles.cufile.cufile_double_set(1170, 1, None)  # forget its pending reads
    os.close(fd)


@pytest.mark.parametrize(
    ("call", "kind", "value"),
    [
        ("event", CODE, 5044),
        ("event", STATUS, 0x40),  # FAILED
        ("cuFileBatchIOSubmit", CODE, 5040),
    ],
)
def test_files_of_reads_that_failed_are_closed(
    call: str, kind: int, value: int, doubles: Doubles, file: OpenFile
) -> None:
    doubles.fault(call, kind, value, skip=1)
    with descriptors.none_left(), GdsBackend(**SMALL, depth=4) as backend:  # one read an entry
        load = Load(backend, file)
        assert load.finish() == {}
        backend.release(load.request)
        del load  # it has the ring, which is freed
    assert doubles.cufile_log["files"] == 0
    gdsload.quiesce()


def test_refused_file_fails_only_its_entry(doubles: Doubles, tmp_path: Path) -> None:
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
        backend.wait(request, PATIENCE_SECONDS)
        failures = backend.check(request).failures
        assert [(each.transfer, each.errno) for each in failures] == [(3, 9)]
        backend.release(request)
    os.close(bad)
    os.close(good)


# Faults that are errors.


@pytest.mark.parametrize(
    ("kind", "value", "code"), [(NEGATIVE, 5008, 5008), (ERRNO, 5011, 5011), (ERRNO, 5, 0)]
)
def test_failing_read_reports_its_code(
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


@pytest.mark.parametrize(("kind", "value"), [(NEGATIVE, 5008), (ERRNO, 5), (ERRNO, 22)])
def test_read_that_fails_once_is_no_refusal_of_direct_reads(
    kind: int, value: int, doubles: Doubles, file: OpenFile
) -> None:
    """cuFile reads it again, and nothing comes through the page cache."""
    doubles.fault("cuFileRead", kind, value, times=1)
    with direct(file) as opened, GdsMtBackend(**SMALL) as backend:
        load = Load(backend, opened, io_mode="direct")
        assert load.finish() == {}
        (facts,) = backend.facts(load.request)
        assert facts.direct_refusals == {}
        backend.release(load.request)


def test_batches_that_are_refused_with_an_errno_have_read_nothing(
    doubles: Doubles, file: OpenFile
) -> None:
    doubles.fault("cuFileBatchIOSubmit", CODE, -5, times=-1)
    with GdsBackend(**SMALL) as backend:
        load = Load(backend, file)
        failures = load.finish()
        assert len(failures) == len(load.transfers)
        assert {(each.errno, each.got) for each in failures.values()} == {(5, 0)}
        backend.release(load.request)


@pytest.mark.parametrize("kind", KINDS)
def test_later_failure_is_not_that_of_a_retried_copy(
    kind: type[Backend], doubles: Doubles, file: OpenFile
) -> None:
    """The pipeline, which is used again, does not remember it."""
    doubles.fault("cuMemcpyAsync", CODE, 719)
    with kind(**SMALL) as backend:
        first = Load(backend, file)
        assert first.finish() == {} and first.bytes() == bytes_of(0)
        backend.release(first.request)
        closed = file._replace(fd=-1)
        doubles.fault("cuFileRead", ERRNO, 5, times=-1)
        doubles.fault("event", CODE, 5, times=-1)
        failures = Load(backend, closed if kind is PosixBackend else file)
        found = failures.finish()
        assert found and not any(each.final or "CUDA" in each.text for each in found.values())
        backend.release(failures.request)


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), 1e300])
def test_impossible_event_seconds_raise_value_error(seconds: float, doubles: Doubles) -> None:
    with pytest.raises(ValueError, match="event_seconds="):
        GdsBackend(event_seconds=seconds)


@pytest.mark.parametrize(
    "options", [{"allow_compat": "false"}, {"allow_compat": 0}, {"event_seconds": "2.5"}]
)
def test_options_of_another_type_raise_type_error(options: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"must be (True or False|a number)"):
        GdsBackend(**options)


def test_missing_descriptor_for_cufile_raises_read_error(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with GdsMtBackend(**SMALL) as backend:
        with monkeypatch.context() as patch:
            patch.setattr("gdsload.backends.cufile.base.own_descriptor", refuse)
            with pytest.raises(ReadError, match="Too many open files") as caught:
                backend.register(file)
        assert (caught.value.path, caught.value.errno) == (file.path, errno.EMFILE)
        with monkeypatch.context() as patch:
            patch.setattr(library.Driver, "register_file", refuse)
            with pytest.raises(BackendUnavailable, match="Too many open files"):
                backend.register(file)


def test_missing_thread_to_open_cufile_is_not_final(doubles: Doubles) -> None:
    class NoThread:
        def set_bool(self, *_: object) -> None: ...

        def set_size(self, *_: object) -> None: ...

        def open_driver(self, *_: object) -> None:
            raise OSError(errno.EAGAIN, "no thread to call cuFile")

    with pytest.raises(BackendUnavailable, match="no thread to call cuFile"):
        library._open(NoThread(), "cuda:0", False)  # type: ignore[arg-type]
    assert library.support("cuda:0", False).usable


def test_missing_thread_to_close_cufile_leaves_it_open(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[float] = []

    class NoThread:
        engines = 0

        def close_driver(self, *_: object) -> bool:
            raise OSError(errno.EAGAIN, "no thread to call cuFile")

        def end_statistics(self, seconds: float) -> None:
            ended.append(seconds)

    driver = library.opened("cuda:0", False)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "library", NoThread())
        with pytest.raises(GdsloadError, match="no thread to call cuFile"):
            driver.quiesce()
        driver.end()
        assert ended
    assert library.opened("cuda:0", False) is driver
    driver.quiesce()
    assert not library.is_open()


def test_engine_that_does_not_open_into_vram_is_replaced_by_the_next(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ENGINES[:2]
    opened: list[int] = []

    def pump(*facts: Any) -> Pump:
        opened.append(1)
        if len(opened) == 1:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return Pump(*facts)

    monkeypatch.setattr("gdsload.backends.staging.Pump", pump)
    with PosixBackend(**SMALL) as backend:
        load = Load(backend, file)
        assert load.finish() == {} and load.bytes() == bytes_of(0)
        assert "Cannot allocate memory" in backend.status().refusals[f"posix/{first}"]
        assert backend.status().engine == second
        backend.release(load.request)


def test_file_refused_by_cufile_raises(doubles: Doubles, file: OpenFile) -> None:
    doubles.fault("cuFileHandleRegister", CODE, 5027)
    with GdsMtBackend(**SMALL) as backend, pytest.raises(CuFileError, match="udev") as caught:
        backend.register(file)
    assert caught.value.code == 5027
    assert caught.value.path == file.path
    assert doubles.cufile_log["files"] == 0


def test_unregistered_ring_still_reads(doubles: Doubles, file: OpenFile) -> None:
    doubles.fault("cuFileBufRegister", CODE, 5036)
    with GdsMtBackend(**SMALL) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        assert "BAR1" in backend.refusals["gds_mt/registered ring"]
        backend.release(load.request)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord", "cuEventQuery"])
def test_failing_copy_fails_the_transfers(
    kind: type[Backend], call: str, doubles: Doubles, file: OpenFile
) -> None:
    doubles.fault(call, CODE, 719, times=-1)
    with kind(**SMALL) as backend:
        load = Load(backend, file)
        failures = load.finish()
        assert len(failures) == len(load.transfers)
        assert all("CUDA error 719" in each.text and each.final for each in failures.values())
        backend.release(load.request)


@pytest.mark.parametrize("kind", KINDS)
def test_device_that_refuses_what_copies_need_is_named(
    kind: type[Backend], doubles: Doubles, file: OpenFile
) -> None:
    doubles.fault("cuEventCreate", CODE, 201, skip=1, times=-1)  # not the stage's own event
    options = {**SMALL, **({"engine": "threads"} if kind is PosixBackend else {})}
    with kind(**options) as backend, pytest.raises(BackendUnavailable, match="CUDA error 201"):
        Load(backend, file)


def test_missing_memory_for_the_ring_raises(doubles: Doubles, file: OpenFile) -> None:
    before = doubles.cuda_log
    doubles.set(nbytes=before["used"] + (1 << 16))
    with GdsMtBackend(**SMALL) as backend:
        space = Registration(Memory(VRAM, 0, 0, device="cuda:0"), -1)
        with pytest.raises(PlacementError, match="ring_bytes makes it smaller"):
            backend.prepare([], [], [space])
    assert doubles.cuda_log["ranges"] == before["ranges"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", [1 << 45, 1 << 62, 10**30])
def test_oversized_ring_raises_placement_error(
    kind: type[Backend], nbytes: int, doubles: Doubles, file: OpenFile
) -> None:
    before = doubles.cuda_log
    with kind(**{**SMALL, "ring_bytes": nbytes}) as backend:
        space = Registration(Memory(VRAM, 0, 0, device="cuda:0"), -1)
        with pytest.raises(PlacementError, match="ring_bytes makes it smaller"):
            backend.prepare([], [], [space])
    after = doubles.cuda_log
    assert (after["ranges"], after["pins"]) == (before["ranges"], before["pins"])


def test_failing_pin_raises_placement_error(doubles: Doubles) -> None:
    doubles.fault("cuMemHostRegister_v2", CODE, 801)
    doubles.fault("cuMemHostAlloc", CODE, 2)
    with PosixBackend(**SMALL) as backend:
        space = Registration(Memory(VRAM, 0, 0, device="cuda:0"), -1)
        with pytest.raises(PlacementError, match="out of memory"):
            backend.prepare([], [], [space])
    assert doubles.cuda_log["pins"] == 0


@pytest.mark.parametrize(("code", "match"), [(5022, "5022"), (-5, "Input/output error")])
def test_batch_that_cannot_be_set_up_is_refused(
    code: int, match: str, doubles: Doubles, file: OpenFile
) -> None:
    doubles.fault("cuFileBatchIOSetUp", CODE, code, skip=2)
    with GdsBackend(**SMALL) as backend, pytest.raises(BackendUnavailable, match=match):
        Load(backend, file)
    assert doubles.cufile_log["batches"] == 0
    assert doubles.cuda_log["events"] == 0


# Calls that hang.


calls_of_reads = pytest.mark.parametrize(
    ("kind", "call"),
    [
        (GdsMtBackend, "cuFileRead"),
        (GdsBackend, "cuFileBatchIOSubmit"),
        (GdsBackend, "cuFileBatchIOGetStatus"),
    ],
)


def hanging(kind: type[Backend], call: str, doubles: Doubles, file: OpenFile) -> Load:
    """A load of which the second of these calls hangs."""
    doubles.fault(call, HANG, skip=1)
    load = Load(kind(**SMALL, **({"depth": 8} if kind is GdsBackend else {})), file)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not doubles.cufile.double_hung():
        assert time.monotonic() < deadline
        load.backend.wait(load.request, 0.01)
    return load


@calls_of_reads
def test_files_of_reads_that_end_late_are_closed_then(
    kind: type[Backend], call: str, doubles: Doubles, file: OpenFile
) -> None:
    with descriptors.none_left():
        load = hanging(kind, call, doubles, file)
        deadline = time.monotonic() + PATIENCE_SECONDS
        load.backend.release(load.request)
        load.backend.close()
        assert doubles.cufile_log["files"] == 1
        doubles.let_go()
        while doubles.cufile_log["files"]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        while late_copies.owners():
            assert time.monotonic() < deadline
            time.sleep(0.001)
    del load  # it has the ring, which is freed
    staging_ring.release_rings()
    gdsload.quiesce()


def test_descriptor_on_distant_storage_is_closed_by_a_thread(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing a file may wait for its filesystem."""
    closed: list[bool] = []

    def close(fds: list[int], *, may_hang: bool) -> None:
        closed.append(may_hang)
        close_files(fds, may_hang=may_hang)

    monkeypatch.setattr("gdsload.backends.cufile.base.close_files", close)
    for storage in (Storage(), Storage("nfs4", 1 << 20, 16)):
        with descriptors.none_left(), GdsMtBackend() as backend:
            backend.register(file._replace(storage=storage))
    assert closed == [False, True]


@calls_of_reads
def test_hanging_call_does_not_block_release(
    kind: type[Backend], call: str, doubles: Doubles, file: OpenFile
) -> None:
    """The thread of the call is abandoned, and its late return writes to no tensor."""
    load = hanging(kind, call, doubles, file)
    load.backend.release(load.request)
    ctypes.memset(load.memory.address, 0x5A, SIZE)
    load.backend.close()
    assert doubles.cufile.double_hung(), "both have returned before the call"
    pump = load.request.pipeline.pump
    doubles.let_go()
    wait_for(lambda: pump.close(0.0))  # it was detached: there is no thread to join
    wait_for(lambda: not doubles.cufile.double_hung())
    (only,) = staging_ring.rings()
    wait_for(only.retire, "its slots were not given back")
    only.free()
    assert load.bytes() == b"\x5a" * SIZE


def test_hanging_open_is_final(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "OPEN_SECONDS", 0.05)
    doubles.fault("cuFileDriverOpen", HANG)
    with pytest.raises(BackendUnavailable, match="has not returned"):
        library.opened("cuda:0", False)
    calls = doubles.cufile.double_calls()
    with pytest.raises(BackendUnavailable, match="has not returned"):
        library.opened("cuda:0", True)
    assert doubles.cufile.double_calls() == calls, "it was called again"


def come_back(doubles: Doubles) -> None:
    """Lets hanging calls of cuFile go, and waits for them."""
    doubles.let_go()
    wait_for(lambda: not doubles.hung)


@pytest.mark.parametrize("kind", [GdsMtBackend, GdsBackend])
def test_hanging_ring_registration_is_abandoned(
    kind: type[Backend], doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuFile is not used any more, and the memory stays: the call may still return."""
    register = library.Driver.register_buffer

    def impatient(*what: Any) -> None:  # the file's registration gets its usual time
        with monkeypatch.context() as patch:
            patch.setattr(library, "REGISTER_SECONDS", 0.05)
            register(*what)

    monkeypatch.setattr(library.Driver, "register_buffer", impatient)
    doubles.fault("cuFileBufRegister", HANG)
    with kind(**SMALL) as backend, pytest.raises(PlacementError, match="has not returned"):
        Load(backend, file)
    assert "cuFileBufRegister has not returned" in str(library.support("cuda:0", True))
    calls = doubles.cufile.double_calls()
    with kind(**SMALL) as backend, pytest.raises(BackendUnavailable, match="has not returned"):
        Load(backend, file)
    assert doubles.cufile.double_calls() == calls, "cuFile was called again"
    with pytest.raises(GdsloadError, match="cannot be closed"):
        gdsload.quiesce(0.05)
    come_back(doubles)
    # Its memory is there, or the double complains.
    wait_for(lambda: doubles.cufile_log["buffers"])


@pytest.mark.parametrize("kind", [GdsMtBackend, GdsBackend])
def test_hanging_file_registration_is_abandoned(
    kind: type[Backend], doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "REGISTER_SECONDS", 0.05)
    doubles.fault("cuFileHandleRegister", HANG)
    with (
        kind(**SMALL) as backend,
        pytest.raises(BackendUnavailable, match="cuFileHandleRegister has not returned"),
    ):
        backend.register(file)
    assert not library.support("cuda:0", False).usable
    come_back(doubles)
    # Its descriptor is still open, or the double complains.
    wait_for(lambda: doubles.cufile_log["files"])


@pytest.mark.parametrize("call", ["cuFileDriverOpen", "cuFileHandleRegister"])
def test_ctrl_c_ends_the_wait_for_a_call_that_hangs(
    call: str, doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press() -> None:
        wait_for(lambda: doubles.hung)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    for seconds in ("OPEN_SECONDS", "REGISTER_SECONDS"):
        monkeypatch.setattr(library, seconds, PATIENCE_SECONDS)
    doubles.fault(call, HANG)
    key = threading.Thread(target=press)
    key.start()
    with GdsMtBackend(**SMALL) as backend, pytest.raises(KeyboardInterrupt):
        backend.register(file)
    key.join()
    assert doubles.hung
    come_back(doubles)
    done = "opens" if call == "cuFileDriverOpen" else "files"
    wait_for(lambda: doubles.cufile_log[done])


class Interrupted:
    """An object with calls during which Ctrl-C arrives."""

    def __init__(self, of: object, *calls: str) -> None:
        self.of, self.calls = of, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.of, name)
        if name not in self.calls:
            return found

        def interrupted(*arguments: object) -> None:
            found(*arguments)
            raise KeyboardInterrupt

        return interrupted


def test_file_that_ctrl_c_may_have_registered_keeps_its_descriptor(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuFile accepts each number only once, and is not closed any more."""
    driver, opened = library.opened("cuda:0", False), []

    def noted(file: OpenFile) -> int:
        opened.append(own_descriptor(file))
        return opened[0]

    monkeypatch.setattr("gdsload.backends.cufile.base.own_descriptor", noted)
    monkeypatch.setattr(driver, "library", Interrupted(driver.library, "register_file"))
    with GdsMtBackend(**SMALL) as backend, pytest.raises(KeyboardInterrupt):
        backend.register(file)
    os.close(opened[0])  # it was open
    with pytest.raises(GdsloadError, match="1 files and buffers are registered"):
        gdsload.quiesce(0.05)


def test_ring_that_ctrl_c_may_have_registered_is_not_freed(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = library.opened("cuda:0", False)
    register, before = _registrar(driver, gpu.device(0)), doubles.cuda_log["ranges"]
    monkeypatch.setattr(driver, "library", Interrupted(driver.library, "register_buffer"))
    with pytest.raises(KeyboardInterrupt):
        staging_ring.StagingRing(staging_ring.VRAM, 0, 64 << 10, 2, register)
    assert (doubles.cufile_log["buffers"], doubles.cuda_log["ranges"]) == (1, before + 1)


def test_buffer_that_cufile_refuses_to_deregister_leaves_it_open(doubles: Doubles) -> None:
    driver, device = library.opened("cuda:0", False), gpu.device(0)
    ring = staging_ring.StagingRing(staging_ring.VRAM, 0, 64 << 10, 2, _registrar(driver, device))
    doubles.fault("cuFileBufDeregister", CODE, 5026)
    assert ring.retire()
    with pytest.raises(CuFileFailure, match="5026"):
        ring.free()
    with pytest.raises(GdsloadError, match="1 files and buffers are registered"):
        gdsload.quiesce(0.05)
    library._end()
    assert doubles.cufile_log["open"] == 1


def test_open_that_ctrl_c_ended_is_final(doubles: Doubles) -> None:
    """The driver may be open, and must not be opened again."""
    found: Any = Interrupted(library.library(), "open_driver")
    with pytest.raises(KeyboardInterrupt):
        library._open(found, "cuda:0", False)
    with pytest.raises(BackendUnavailable, match="was interrupted"):
        library.opened("cuda:0", False)
    assert doubles.cufile_log["opens"] == 1


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_unfinished_copies_keep_their_memory(
    kind: type[Backend],
    interrupted: bool,
    doubles: Doubles,
    file: OpenFile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Release returns, and the memory of the copies stays allocated."""
    doubles.hold_copies(True)
    before = doubles.cuda_log["copies"]
    backend = kind(**SMALL)
    load = Load(backend, file)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while doubles.cuda_log["copies"] == before:
        assert time.monotonic() < deadline
        backend.wait(load.request, 0.01)
    with monkeypatch.context() as patch:
        if interrupted:
            patch.setattr(
                load.request, "native", Interrupted(load.request.native, "wait_until_idle")
            )
        with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
            backend.release(load.request)
    assert late_copies.owners() == [load.request]
    doubles.hold_copies(False)
    assert load.request.native.wait_until_idle(PATIENCE_SECONDS)
    backend.close()
    late_copies.forget_ended()
    assert late_copies.owners() == []
