"""The backend for remote files, over files that are in memory and fail by script."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpudoubles
from contract import BackendContract, bytes_of
from gdsload._native.fetch import Fetch
from gdsload._native.pump import Pump
from gdsload.backends import VRAM, Backend, Memory, OpenFile, remote as remote_module
from gdsload.backends.remote import FetchThreads, RemoteBackend
from gdsload.errors import BackendUnavailable, ReadError
from gdsload.planning.read_plan import Transfer
from gdsload.system.storage import remote_storage
from gpucontract import DeviceMemory, GpuContract
from remotefiles import REFUSED, Fault, Load, MemoryFile, opened

PATIENCE_SECONDS = 120.0
DATA = random.Random(7).randbytes(3_000_000)


class RemoteFiles(BackendContract):
    """The contract, with remote files."""

    @pytest.fixture
    def files(self) -> list[OpenFile]:
        return [opened(MemoryFile(bytes_of(number))) for number in range(3)]

    test_one_bad_read_among_good_ones = None  # type: ignore[assignment]  # of a descriptor
    test_a_file_that_ends_early = None  # type: ignore[assignment]  # a version has one size
    test_a_file_that_has_grown = None  # type: ignore[assignment]


class TestDram(RemoteFiles):
    def make(self) -> Backend:
        return RemoteBackend(request_bytes=1 << 20)


class TestOneThread(RemoteFiles):
    def make(self) -> Backend:
        return RemoteBackend(request_bytes=1 << 20, depth=1)


class TestVram(RemoteFiles, GpuContract):
    kind = RemoteBackend
    options = {"ring_bytes": 1 << 20, "request_bytes": 64 << 10}  # noqa: RUF012


class TestVramFewSlots(RemoteFiles, GpuContract):
    kind = RemoteBackend
    options = {"ring_bytes": 128 << 10, "request_bytes": 64 << 10}  # noqa: RUF012


@pytest.fixture
def backend() -> Iterator[RemoteBackend]:
    before = threading.active_count()
    with RemoteBackend(depth=8) as made:
        yield made
    for thread in threading.enumerate():
        if thread.name == "gdsload-fetch":
            thread.join(60)
    assert threading.active_count() <= before, threading.enumerate()


@pytest.fixture
def gate(backend: RemoteBackend) -> Iterator[threading.Event]:
    """Open at the end of the test, before the threads of `backend` are awaited."""
    made = threading.Event()
    yield made
    made.set()


def test_bytes_arrive_exactly(backend: RemoteBackend) -> None:
    load = Load(backend, MemoryFile(DATA), step=70_001)
    assert load.run() == []
    assert load.bytes() == DATA
    assert backend.paths(load.request) == {"object_store/s3": len(DATA)}
    assert sorted(load.file.requests) == [(t.offset, t.wanted) for t in load.transfers]


def test_fresh_memory_is_touched_once_as_huge_or_small_pages(backend: RemoteBackend) -> None:
    unit = 2 << 20
    load = Load(backend, MemoryFile(bytes(8 * unit)), step=2 * unit)
    for units in (8, 0):
        assert load.run() == []
        facts = backend.facts(load.request)[0]
        assert facts.huge_pages + facts.small_pages == units


def test_requests_run_at_once_up_to_the_depth(
    backend: RemoteBackend, gate: threading.Event
) -> None:
    load = Load(backend, MemoryFile(DATA, always=Fault(hang=gate)), step=100_000)
    backend.post(load.request)
    load.file.wait_hung(8)
    gate.set()
    while not backend.check(load.request).finished:
        backend.wait(load.request, 0.05)
    assert load.file.most == 8
    assert load.bytes() == DATA


@pytest.mark.parametrize("sent", [1, 4096, 65_536, 99_999])
def test_body_that_ends_early_is_continued(backend: RemoteBackend, sent: int) -> None:
    faults = [Fault(bytes=sent), Fault(bytes=sent, error=errno.EIO)] * 5
    load = Load(backend, MemoryFile(DATA, faults), step=1 << 20)
    assert load.run() == []
    assert load.bytes() == DATA
    assert backend.facts(load.request)[0].short_reads >= 1


def test_random_faults_leave_no_wrong_byte(backend: RemoteBackend) -> None:
    rng = random.Random(11)
    for _ in range(20):
        always = Fault()
        faults = [
            Fault(
                bytes=rng.choice([-1, 0, 1, 5000, 70_000]),
                error=rng.choice([0, 0, errno.EIO, errno.ETIMEDOUT]),
                seconds=rng.choice([0, 0, 0.001]),
            )
            for _ in range(rng.randrange(20))
        ]
        load = Load(backend, MemoryFile(DATA, faults, always=always), step=1 << 18)
        failures = load.run()
        failed = {failure.transfer for failure in failures}
        for number, transfer in enumerate(load.transfers):
            if number not in failed:
                where = slice(transfer.offset, transfer.offset + transfer.wanted)
                assert load.bytes()[where] == DATA[where]
        backend.release(load.request)


def test_failed_request_is_tried_again_once(
    backend: RemoteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "REPORT_SECONDS", 240.0)  # a busy machine reports in between
    load = Load(backend, MemoryFile(DATA, [Fault(bytes=0, error=errno.EIO)]), step=1 << 22)
    assert load.run() == []
    assert load.bytes() == DATA
    assert len(load.file.requests) == 2


def test_failure_has_the_reason(backend: RemoteBackend) -> None:
    load = Load(backend, MemoryFile(DATA, always=Fault(bytes=0, error=errno.EIO)), step=1 << 22)
    (failure,) = load.run()
    assert failure.errno == errno.EIO and failure.got == 0 and not failure.final
    assert failure.text == "request 2 failed"


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ECANCELED])
def test_error_that_means_wait_to_the_pump_ends(backend: RemoteBackend, code: int) -> None:
    load = Load(backend, MemoryFile(DATA, always=Fault(bytes=0, error=code)), step=1 << 22)
    (failure,) = load.run()
    assert failure.errno == errno.EIO


def test_final_failure_is_asked_for_no_more(backend: RemoteBackend) -> None:
    load = Load(backend, MemoryFile(DATA, always=REFUSED), step=50_000)
    failures = load.run()
    assert len(failures) == len(load.transfers)
    assert all(failure.final and failure.errno == errno.EACCES for failure in failures)
    assert len(load.file.requests) <= 8


def test_empty_answer_is_an_error_and_no_end_of_file(backend: RemoteBackend) -> None:
    load = Load(backend, MemoryFile(DATA, always=Fault(bytes=0)), step=1 << 22)
    (failure,) = load.run()
    assert failure.errno == errno.EIO and "sent nothing" in failure.text


def test_more_bytes_than_asked_for_are_an_error(backend: RemoteBackend) -> None:
    file = MemoryFile(DATA, always=Fault(extra=1), chunk_bytes=1 << 22)
    file.always = Fault(bytes=5, extra=1 << 20)
    load = Load(backend, file, step=1 << 20)
    failures = load.run()
    assert failures and "leave a read" in failures[0].text


@pytest.mark.parametrize("crash", [ValueError("odd"), MemoryError(), TypeError("no")])
def test_exception_of_a_source_is_an_error_of_the_range(
    backend: RemoteBackend, crash: Exception
) -> None:
    load = Load(backend, MemoryFile(DATA, always=Fault(bytes=0, crash=crash)), step=1 << 22)
    (failure,) = load.run()
    assert type(crash).__name__ in failure.text


def test_chunk_that_is_no_buffer_is_an_error(backend: RemoteBackend) -> None:
    class Strange(MemoryFile):
        def chunks(self, offset: int, length: int) -> Iterator[Any]:
            yield "text"

    load = Load(backend, Strange(DATA), step=1 << 22)
    (failure,) = load.run()
    assert "TypeError" in failure.text


def test_finished_request_is_posted_again(backend: RemoteBackend) -> None:
    load = Load(backend, MemoryFile(DATA, [Fault(bytes=0, error=errno.EIO)] * 2), step=1 << 22)
    assert len(load.run()) == 1
    assert load.run() == []
    assert load.bytes() == DATA


def test_slow_source_shows_progress(
    backend: RemoteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "REPORT_SECONDS", 0.0)
    load = Load(backend, MemoryFile(DATA), step=1 << 20)
    assert load.run() == []
    assert load.bytes() == DATA
    assert len(load.file.requests) > len(load.transfers)


# Cancellation.


def test_nothing_is_written_after_a_release(backend: RemoteBackend, gate: threading.Event) -> None:
    load = Load(backend, MemoryFile(DATA, always=Fault(bytes=1000, hang=gate)), step=1 << 20)
    backend.post(load.request)
    load.file.wait_hung(3)
    backend.release(load.request)
    before = load.bytes()
    gate.set()
    load.file.wait_idle()
    assert load.bytes() == before
    assert before[:1000] == DATA[:1000] and before[1000:2000] == bytes(1000)


def test_memory_is_free_after_a_release_in_flight(
    backend: RemoteBackend, gate: threading.Event
) -> None:
    load = Load(backend, MemoryFile(DATA, always=Fault(hang=gate)), step=1 << 20)
    backend.post(load.request)
    load.file.wait_hung(3)
    backend.release(load.request)
    load.request = None
    assert load.region.references == 1
    gate.set()


def test_hung_calls_do_not_block_the_next_request(
    backend: RemoteBackend, gate: threading.Event
) -> None:
    first = Load(backend, MemoryFile(DATA, always=Fault(hang=gate)), step=100_000)
    backend.post(first.request)
    first.file.wait_hung(8)
    backend.release(first.request)
    second = Load(backend, MemoryFile(DATA), step=100_000)
    assert second.run() == []
    assert second.bytes() == DATA
    gate.set()


def test_request_beside_a_cancelled_one_is_read(
    backend: RemoteBackend, gate: threading.Event
) -> None:
    first = Load(backend, MemoryFile(DATA, always=Fault(hang=gate)), step=400_000)
    second = Load(backend, MemoryFile(DATA, [Fault(hang=gate)] * 3), step=100_000)
    backend.post(first.request)
    first.file.wait_hung(8)
    backend.post(second.request)
    backend.release(first.request)  # cancels everything in flight
    while not backend.check(second.request).finished:
        gate.set()
        backend.wait(second.request, 0.05)
    assert second.bytes() == DATA


def test_close_with_hung_calls_returns_and_threads_end_later() -> None:
    gate = threading.Event()
    backend = RemoteBackend(depth=4)
    load = Load(backend, MemoryFile(DATA, always=Fault(hang=gate)), step=100_000)
    backend.post(load.request)
    load.file.wait_hung(4)
    backend.release(load.request)
    backend.close()
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "gdsload-fetch":
            thread.join(60)
            assert not thread.is_alive()


def test_release_at_random_moments_writes_nothing_later(backend: RemoteBackend) -> None:
    rng = random.Random(3)
    always = Fault(seconds=0.001)
    for _ in range(30):
        load = Load(backend, MemoryFile(DATA, always=always, chunk_bytes=4096), step=1 << 18)
        backend.post(load.request)
        backend.wait(load.request, rng.random() * 0.02)
        backend.release(load.request)
        before = load.bytes()
        load.file.wait_idle()
        assert load.bytes() == before


def test_device_memory_is_not_written_after_a_release(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate = threading.Event()
    with gpudoubles.installed(monkeypatch, tmp_path / "root"):
        backend = RemoteBackend(ring_bytes=1 << 20, request_bytes=64 << 10, depth=4)
        device = DeviceMemory(len(DATA))
        file = MemoryFile(DATA, [Fault(), Fault()], always=Fault(bytes=1000, hang=gate))
        known = backend.register(opened(file))
        memory = backend.register(Memory(VRAM, device.address, len(DATA), device, device="cuda:0"))
        reads = [
            Transfer(0, at, 65536, 65536, 0, at, "buffered", at >> 16)
            for at in range(0, 1 << 20, 65536)
        ]
        request = backend.prepare(reads, [known], [memory])
        backend.post(request)
        file.wait_hung(4)
        backend.release(request)
        before = ctypes.string_at(device.address, len(DATA))
        gate.set()
        file.wait_idle()
        assert ctypes.string_at(device.address, len(DATA)) == before
        backend.close()
        del request, backend, device, memory


# Threads and processes.


def test_fewer_threads_do_the_work(backend: RemoteBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = remote_module.start_thread, []

    def start(*facts: Any) -> Any:
        if len(started) == 2:
            return None
        started.append(real(*facts))
        return started[-1]

    monkeypatch.setattr(remote_module, "start_thread", start)
    load = Load(backend, MemoryFile(DATA), step=100_000)
    assert load.run() == []
    assert load.bytes() == DATA
    assert load.file.most <= 2


def test_no_thread_at_all_is_an_error(
    backend: RemoteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "start_thread", lambda *_: None)
    load = Load(backend, MemoryFile(DATA))
    with pytest.raises(BackendUnavailable, match="no thread") as caught:
        load.run()
    assert caught.value.reasons == {"object_store": "no thread can be started"}
    backend.release(load.request)


def test_use_after_a_fork_is_refused(backend: RemoteBackend) -> None:
    load = Load(backend, MemoryFile(DATA))
    assert load.run() == []
    child = os.fork()
    if child == 0:
        try:
            load.run()
        except BackendUnavailable:
            backend.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert load.run() == []


@pytest.mark.parametrize("moment", ["calls outstanding", "idle", "closed"])
def test_interpreter_ends_with_threads_of_a_backend(moment: str) -> None:
    code = f"""
import sys, threading
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from remotefiles import Fault, Load, MemoryFile
from gdsload.backends.remote import RemoteBackend
DATA = bytes(3_000_000)
gate = threading.Event()
hangs = {moment == "calls outstanding"}
backend = RemoteBackend(depth=8)
load = Load(backend, MemoryFile(DATA, always=Fault(hang=gate) if hangs else Fault()), step=100_000)
if hangs:
    backend.post(load.request)
    load.file.wait_hung(8)
else:
    assert load.run() == []
if {moment == "closed"}:
    backend.close()
print("done")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr
    assert ran.stderr == ""


# Settings.


def test_files_of_this_machine_are_refused(backend: RemoteBackend) -> None:
    with pytest.raises(ReadError, match="only remote files"):
        backend.register(OpenFile("a.bin", 3, 10))


@pytest.mark.parametrize(
    "options",
    [
        {"request_bytes": 0},
        {"request_bytes": 5000},
        {"depth": 0},
        {"ring_bytes": -1},
        {"depth": 1 << 20},
    ],
)
def test_impossible_settings_raise_value_error(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"request_bytes|depth|ring_bytes"):
        RemoteBackend(**options)


def test_latency_decides_the_depth_unless_it_was_set() -> None:
    file = MemoryFile(DATA)
    for latency, options, depth in (
        (0.0, {}, 16),
        (0.05, {}, 40),
        (1.0, {}, 64),
        (1.0, {"depth": 5}, 5),
    ):
        with RemoteBackend(**options) as backend:
            backend.register(opened(file)._replace(storage=remote_storage("s3", latency)))
            assert backend.limits().depth == depth


def test_workers_of_a_fetch_end_when_it_was_never_opened() -> None:
    fetch = Fetch()
    assert fetch.reserve(5) == 0
    assert fetch.unreserve(0) == 0


def test_engine_of_a_fetch_may_be_opened_when_its_object_is_gone() -> None:
    """If a driver hangs, the thread of a pump opens it late. Only a sanitizer is sure to notice."""
    capsule = Fetch().capsule()
    gc.collect()
    assert Pump(capsule, 4).close(PATIENCE_SECONDS)


def test_threads_that_an_interruption_has_prevented_are_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[object] = []

    def start(work: object, _: str) -> object:
        if len(started) == 2:
            started.append("")
            raise KeyboardInterrupt
        started.append(work)
        return work

    threads = FetchThreads("object_store", {}, {})
    pump = Pump(threads.fetch.capsule(), 4)
    monkeypatch.setattr(remote_module, "start_thread", start)
    with pytest.raises(KeyboardInterrupt):
        threads.start(4)
    threads.start(4)
    assert len(started) == 3 + 2
    assert pump.close(PATIENCE_SECONDS)


def test_registration_of_other_memory_is_refused(backend: RemoteBackend) -> None:
    with pytest.raises(BackendUnavailable, match="does not reach"):
        backend.register(Memory("tape", 0, 1))
