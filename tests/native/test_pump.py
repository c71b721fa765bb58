"""The pump without a loader: requests, their results, cancellation and closing."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import struct
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import faulty
from faulty import ERRNO, FOR_EVER, HANG, Faults, rule
from gdsload._native.memory import Region
from gdsload._native.pump import Pump
from gdsload._native.request import Request
from gdsload.backends.posix import engines
from waiting import wait_for


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(100_000))
    return file


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    with faulty.installed(monkeypatch) as installed:
        yield installed


def whole(region: Region, fd: int, count: int) -> tuple[Any, Any, Any]:
    transfers = [(0, i * 4096, 4096, 4096, 0, i * 4096, "buffered") for i in range(count)]
    return [(fd, -1, 4096, 0, 1)], transfers, [target(region)]


def target(region: Region) -> tuple[int, int, object, int]:
    return region.address, region.length, region.handle(), -1


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


@pytest.fixture
def pump(faults: Faults) -> Pump:
    return Pump(faulty.capsule(), 4)


def hanging(fd: int, faults: Faults, pump: Pump) -> tuple[Region, Request]:
    """A request whose only read hangs, and its memory."""
    faults.script(rule(HANG))
    region = Region.anonymous(4096)
    request = Request(pump, *whole(region, fd, 1))
    request.post()
    faults.wait_hung()
    return region, request


@pytest.mark.parametrize(("answered", "in_flight"), [(0, 32), (1, 47), (100, 200)])
def test_reads_in_flight_grow_with_those_that_are_answered_soon(
    tmp_path: Path, faults: Faults, answered: int, in_flight: int
) -> None:
    """They share the rate of the storage: many of them could take longer than a stall."""
    file = tmp_path / "large"
    file.write_bytes(bytes(400 * 4096))
    faults.script(rule(HANG, times=FOR_EVER, skip=answered))
    pump, region = Pump(faulty.capsule(), 200), Region.anonymous(400 * 4096)
    with file.open("rb") as opened:
        request = Request(pump, *whole(region, opened.fileno(), 400))
        request.post()
        faults.wait_hung(in_flight)
        assert not request.wait(0.2)
        assert faults.log.hung == in_flight
        faults.let_go()
        assert request.wait(60.0)
    assert pump.close(60.0)


@pytest.mark.parametrize(("mib", "in_flight"), [(2, 32), (8, 8), (64, 4)])
def test_first_reads_in_flight_are_few_if_they_are_large(
    tmp_path: Path, faults: Faults, mib: int, in_flight: int
) -> None:
    """Slow storage answers none of them for a long time."""
    file = tmp_path / "large"
    nbytes = mib << 20
    with file.open("wb") as written:
        written.truncate(40 * nbytes)
    faults.script(rule(HANG, times=FOR_EVER))
    pump, region = Pump(faulty.capsule(), 40), Region.anonymous(nbytes)
    with file.open("rb") as opened:
        table = [(opened.fileno(), -1, 4096, 0, 1)]
        reads = [(0, i * nbytes, nbytes, nbytes, 0, 0, "buffered") for i in range(40)]
        request = Request(pump, table, reads, [target(region)])
        request.post()
        faults.wait_hung(in_flight)
        assert not request.wait(0.2)
        assert faults.log.hung == in_flight
        request.cancel()
        faults.let_go()
        assert request.wait_until_idle(60.0)
    assert pump.close(60.0)


def test_closed_engine_pins_nothing_that_a_forked_child_knows() -> None:
    if not (support := engines.try_engine("uring")).usable:
        pytest.skip(str(support))

    def pinned_kib() -> int:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if "VmPin" in line).split()[1])

    before, region = pinned_kib(), Region.anonymous(1 << 20)
    pump = Pump(engines.engine_capsule("uring", "auto"), 4, [(region.address, 1 << 20)])
    if pinned_kib() == before:
        pytest.skip("the limit of locked memory allows no registered buffer")
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        assert pump.close(60.0)
        assert pinned_kib() == before
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_reads_of_a_request_have_their_own_results(
    fd: int, faults: Faults, pump: Pump, path: Path
) -> None:
    faults.script(rule(ERRNO, errno.EIO, times=FOR_EVER, first=8192, last=8193))
    region = Region.anonymous(10 * 4096)
    request = Request(pump, *whole(region, fd, 10))
    request.post()
    assert request.wait(60.0)
    assert request.failed == 1 and request.result(2) == (True, 0, errno.EIO)
    assert sorted(request.take_settled()) == list(range(10)) and request.take_settled() == []
    data = path.read_bytes()
    for op in range(10):
        bytes_there = region.read(op * 4096, 4096)
        assert bytes_there == (data[op * 4096 :][:4096] if op != 2 else bytes(4096))
    pump.close(1.0)


def test_finished_request_posted_again_reads_again(fd: int, faults: Faults, pump: Pump) -> None:
    region = Region.anonymous(4 * 4096)
    request = Request(pump, *whole(region, fd, 4))
    for _ in range(5):
        faults.script(rule(ERRNO, errno.EIO, times=2, skip=1))
        request.post()
        assert request.wait(60.0) and request.wait_until_idle(60.0)
        assert request.settled == 4 and len(request.take_settled()) == 4
    pump.close(1.0)


def test_post_while_under_way_raises(fd: int, faults: Faults, pump: Pump) -> None:
    _, request = hanging(fd, faults, pump)
    with pytest.raises(RuntimeError, match="under way"):
        request.post()
    faults.let_go()
    assert request.wait(60.0) and request.wait_until_idle(60.0)
    request.post()
    assert request.wait(60.0)
    pump.close(1.0)


def test_post_to_a_closed_pump_raises(fd: int, pump: Pump) -> None:
    region = Region.anonymous(4096)
    request = Request(pump, *whole(region, fd, 1))
    assert pump.close(1.0) and pump.close(1.0)
    with pytest.raises(OSError, match="ended"):
        request.post()


def test_cancelled_request_keeps_completed_reads(fd: int, faults: Faults, pump: Pump) -> None:
    faults.script(rule(HANG, first=4096, last=4097))
    region = Region.anonymous(20 * 4096)
    request = Request(pump, *whole(region, fd, 20))
    request.post()
    assert request.wait(120.0, 0, 0)
    faults.wait_hung()
    request.cancel()
    assert not request.wait_until_idle(0.0)
    faults.let_go()
    assert request.wait_until_idle(60.0)
    assert request.result(1)[:2] == (True, 4096), "the read in flight completed"
    pump.close(1.0)


def test_cancel_while_the_engine_takes_nothing_drains(fd: int, faults: Faults, pump: Pump) -> None:
    faults.script(refuse_errno=errno.EAGAIN, refuse_times=FOR_EVER)
    region = Region.anonymous(20 * 4096)
    request = Request(pump, *whole(region, fd, 20))
    request.post()
    request.cancel()
    assert request.wait_until_idle(60.0)
    assert pump.close(120.0)


def test_memory_of_a_read_in_flight_outlives_the_request(
    fd: int, faults: Faults, pump: Pump
) -> None:
    region, request = hanging(fd, faults, pump)
    assert region.references == 2
    # Like a traceback that refers to its own exception: only the garbage collector frees it.
    cycle: list[object] = [request]
    cycle.append(cycle)
    del request, cycle
    gc.collect()
    assert region.references == 2, "the pump still holds it"
    faults.let_go()
    assert pump.close(120.0)
    assert region.references == 1


def test_close_with_a_hanging_read_returns_false(fd: int, faults: Faults, pump: Pump) -> None:
    region, request = hanging(fd, faults, pump)
    assert pump.close(0.0) is False
    assert pump.close(0.0) is False, "the read is still in flight"
    del request, pump
    assert region.references == 2
    faults.let_go()
    faults.wait_closed()


def test_engine_that_does_not_open_in_time_is_given_up(faults: Faults) -> None:
    faults.script(open_hangs=1)
    with pytest.raises(OSError, match=r"did not open within 0\.05 s") as caught:
        Pump(faulty.capsule(), 4, open_seconds=0.05)
    assert caught.value.errno == errno.ETIMEDOUT
    assert faults.log.opens == 0
    faults.let_go()
    wait_for(lambda: faults.log.closes)  # its thread opens it, and closes it at once


def test_ctrl_c_ends_the_wait_for_an_engine_that_does_not_open(faults: Faults) -> None:
    def press() -> None:
        faults.wait_hung()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    faults.script(open_hangs=1)
    key = threading.Thread(target=press)
    key.start()
    with pytest.raises(KeyboardInterrupt):
        Pump(faulty.capsule(), 4)
    key.join()
    faults.let_go()
    wait_for(lambda: faults.log.closes)  # its thread opens it, and closes it at once


def test_abandoned_pump_does_not_poll_often(fd: int, faults: Faults, pump: Pump) -> None:
    _hung = hanging(fd, faults, pump)
    assert pump.close(0.05) is False
    begun, before = time.monotonic(), faults.log.reaps
    time.sleep(0.4)
    # 50 a second; 2,000 at the pace of a busy pump.
    assert faults.log.reaps - before <= 100 * (time.monotonic() - begun)


def test_request_beside_a_hanging_one_completes(fd: int, faults: Faults, pump: Pump) -> None:
    faults.script(rule(HANG))
    region, other = Region.anonymous(4096), Region.anonymous(16 * 4096)
    stuck = Request(pump, *whole(region, fd, 1))
    stuck.post()
    faults.wait_hung()
    request = Request(pump, *whole(other, fd, 16))
    for _ in range(3):
        request.post()
        assert request.wait(60.0) and request.failed == 0 and request.wait_until_idle(60.0)
    stuck.cancel()
    faults.let_go()
    assert stuck.wait_until_idle(120.0)
    pump.close(1.0)


def test_request_that_waits_for_its_turn_is_not_silent(fd: int, faults: Faults) -> None:
    """Its clock is that of all reads, until its own first one begins."""
    faults.script(rule(HANG, times=3))
    pump = Pump(faulty.capsule(), 1)
    region, other = Region.anonymous(2 * 4096), Region.anonymous(4096)
    first, second = Request(pump, *whole(region, fd, 2)), Request(pump, *whole(other, fd, 1))
    first.post()
    faults.wait_hung(1)
    second.post()
    for hung in (2, 3):  # the second read of the first request, and that of the second one
        before = time.monotonic()
        faults.let_go(1)
        faults.wait_hung(hung)
        assert second.idle_seconds <= time.monotonic() - before
    faults.let_go()
    assert first.wait(60.0) and second.wait(60.0)
    pump.close(1.0)


def test_each_cancellation_is_sent(fd: int, faults: Faults, pump: Pump) -> None:
    """Also while reads of an earlier one do not end."""
    faults.script(rule(HANG, times=2))
    region = Region.anonymous(4096)
    requests = [Request(pump, *whole(region, fd, 1)) for _ in range(2)]
    for number, request in enumerate(requests, start=1):
        request.post()
        faults.wait_hung(number)
    for number, request in enumerate(requests, start=1):
        request.cancel()
        wait_for(lambda number=number: faults.log.cancels >= number)
        assert faults.log.cancels == number
    faults.let_go()
    assert all(request.wait_until_idle(60.0) for request in requests)
    pump.close(1.0)


def test_pump_without_waiters_waits_for_a_quarter_of_its_depth(fd: int, faults: Faults) -> None:
    """More completions than that leave the engine without enough work."""
    pump = Pump(faulty.capsule(), 16)
    faults.script(rule(HANG, times=FOR_EVER))
    region = Region.anonymous(20 * 4096)
    request = Request(pump, *whole(region, fd, 20))
    request.post()
    faults.wait_hung(16)
    faults.wait_wanted(4)
    faults.let_go()
    assert request.wait(60.0) and request.failed == 0
    pump.close(1.0)


@pytest.mark.parametrize(("first", "last", "wanted"), [(7, 7, 1), (2, 4, 3), (0, 11, 12)])
def test_pump_wakes_when_a_waiter_has_all_its_reads(
    fd: int, faults: Faults, first: int, last: int, wanted: int
) -> None:
    pump = Pump(faulty.capsule(), 16)
    faults.script(rule(HANG, times=FOR_EVER))
    region = Region.anonymous(12 * 4096)
    request = Request(pump, *whole(region, fd, 12))
    request.post()
    faults.wait_hung(12)
    with ThreadPoolExecutor(1) as others:
        waiting = others.submit(request.wait, 30.0, first, last)
        faults.wait_wanted(wanted)
        faults.let_go()
        assert waiting.result(120.0)
    assert request.wait(60.0) and request.failed == 0
    pump.close(1.0)


def test_many_waiters_all_return(fd: int, faults: Faults, pump: Pump) -> None:
    """Also for a request that is posted many times."""
    region = Region.anonymous(20 * 4096)
    request = Request(pump, *whole(region, fd, 20))
    with ThreadPoolExecutor(5) as others:
        for _ in range(20):
            faults.script(rule(HANG, first=8 * 4096, last=8 * 4096 + 1))
            request.post()
            faults.wait_hung()
            waits = [others.submit(request.wait, 30.0, first, 19) for first in range(5)]
            assert not request.wait(0.0) and request.wait(30.0, 0, 7)
            faults.let_go()
            assert all(wait.result(120.0) for wait in waits)
            assert request.wait_until_idle(60.0)
    pump.close(1.0)


@pytest.mark.parametrize(
    "transfer",
    [
        (1, 0, 4096, 4096, 0, 0, "buffered"),  # no such file
        (-1, 0, 4096, 4096, 0, 0, "buffered"),
        (0, 0, 4096, 4096, 1, 0, "buffered"),  # no such target
        (0, 0, 4096, 4096, -1, 0, "buffered"),
        (0, 0, 4096, 4097, 0, 0, "buffered"),  # wants more bytes than it reads
        (0, 0, 4096, 4096, 0, (1 << 21) - 1, "buffered"),  # exceeds its target
        (0, 0, 4096, 4096, 0, -4096, "buffered"),
        (0, 0, 4096, 1, 0, (1 << 21) - 1, "buffered"),  # exceeds its region
        (0, 0, 1 << 63, 1, 0, 0, "buffered"),
        (0, 0, 0, 4096, 0, (1 << 21) - 1, "mapped"),  # reads all that it wants
        (0, 0, 4096, 4096, 0, 0, "mapped"),  # into memory that is no mapping
        (0, 0, 4096, 4096, 0, 0, "odd"),
        (0, 0, 1 << 64, 1, 0, 0, "buffered"),
        (0, -1, 4096, 1, 0, 0, "buffered"),
        (0, 0, 4096, 4096, 0, 0),
        [0, 0, 4096, 4096, 0, 0, "buffered"],
    ],
)
def test_invalid_read_raises_and_leaves_its_region(fd: int, pump: Pump, transfer: Any) -> None:
    """Also that of a valid read before it."""
    region = Region.anonymous(1 << 21)
    reads = [(0, 0, 4096, 4096, 0, 0, "direct"), transfer]
    with pytest.raises((ValueError, LookupError, OverflowError, TypeError)):
        Request(pump, [(fd, -1, 4096, 0, 1)], reads, [target(region)])
    assert region.references == 1
    pump.close(1.0)


@pytest.mark.parametrize("engine", engines.ENGINES)
def test_file_without_a_slot_is_read_by_its_own_descriptor(
    path: Path, fd: int, engine: str
) -> None:
    try:
        pump = Pump(engines.engine_module(engine).engine(), 4)
    except (ImportError, OSError) as error:
        pytest.skip(f"{engine}: {error}")
    region = Region.anonymous(10 * 4096)
    request = Request(pump, [(fd, -1, 4096, -1, -1)], *whole(region, fd, 10)[1:])
    request.post()
    assert request.wait(60.0)
    assert request.failed == 0
    assert region.read(0, 10 * 4096) == path.read_bytes()[: 10 * 4096]
    pump.close(1.0)


def unread_bytes(fd: int) -> int:
    """Bytes that wait in a pipe."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0])


def test_buffered_read_that_blocks_linuxaio_is_followed_by_none_that_is_cancelled() -> None:
    """The descriptor of a later read may be closed by then, and its number belong to others."""
    try:
        pump = Pump(engines.engine_module("linuxaio").engine(), 4)
    except (ImportError, OSError) as error:
        pytest.skip(f"linuxaio: {error}")
    pipes = [os.pipe() for _ in range(3)]
    for number in (0, 2):  # the second has nothing to read
        os.write(pipes[number][1], b"a")
    region = Region.anonymous(4096)
    files = [(reader, -1, 4096, -1, -1) for reader, _ in pipes]
    reads = [(number, 0, 1, 1, 0, number, "buffered") for number in range(3)]
    request = Request(pump, files, reads, [target(region)])
    request.post()
    wait_for(lambda: not unread_bytes(pipes[0][0]))
    request.cancel()
    os.write(pipes[1][1], b"a")
    assert request.wait_until_idle(60.0)
    assert unread_bytes(pipes[2][0]) == 1
    pump.close(1.0)
    for fd in sum(pipes, ()):
        os.close(fd)
