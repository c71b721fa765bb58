"""The throttle of all pumps: prefetches yield to loads, and both respect their limits."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import faulty
import gdsload
from faulty import FOR_EVER, HANG, Faults, rule
from gated import Gate, gated
from gdsload import warmup
from gdsload._native import threads
from gdsload._native.memory import Region
from gdsload._native.pump import Pump, loads_under_way, set_throttle, throttle
from gdsload._native.request import Request
from gdsload.readahead.prefetch import prefetches
from waiting import wait_for

PATIENCE_SECONDS = 120.0
COUNT = 8


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(COUNT * 4096))
    opened = os.open(file, os.O_RDONLY)
    yield opened
    os.close(opened)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    with faulty.installed(monkeypatch) as installed:
        yield installed


@pytest.fixture(autouse=True)
def no_limits() -> Iterator[None]:
    assert throttle() == (0, 0) and loads_under_way() == 0
    yield
    set_throttle(0, 0)
    assert throttle() == (0, 0)
    assert loads_under_way() == 0, "a load is still counted"


def reads(pump: Pump, fd: int, *, ahead: bool, first: int = 0, count: int = COUNT) -> Request:
    region = Region.anonymous(COUNT * 4096)
    transfers = [
        (0, place * 4096, 4096, 4096, 0, place * 4096, "buffered")
        for place in range(first, first + count)
    ]
    target = region.address, region.length, region.handle(), -1
    request = Request(pump, [(fd, -1, 4096, 0, 1)], transfers, [target])
    request.ahead = ahead
    return request


def overlaps(request: Request) -> int:
    """Number of reads submitted before the previous one completed."""
    spans = sorted(request.trace())
    return sum(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))


def test_prefetch_during_a_load_has_one_read_in_flight(fd: int, faults: Faults) -> None:
    load_pump, ahead_pump = Pump(faulty.capsule(), 4), Pump(threads.engine(), 4)
    faults.script(rule(HANG, last=1, times=FOR_EVER))
    load = reads(load_pump, fd, ahead=False, count=1)
    load.post()
    faults.wait_hung()
    assert loads_under_way() == 1
    ahead = reads(ahead_pump, fd, ahead=True)
    ahead.post()
    assert ahead.wait(PATIENCE_SECONDS), "a prefetch must still end"
    assert overlaps(ahead) == 0
    faults.let_go()
    assert load.wait(PATIENCE_SECONDS) and load.wait_until_idle(PATIENCE_SECONDS)
    again = reads(ahead_pump, fd, ahead=True)
    again.post()
    assert again.wait(PATIENCE_SECONDS)
    assert overlaps(again) > 0, "without a load it uses the whole depth"
    load_pump.close(1.0)
    ahead_pump.close(1.0)


@pytest.mark.parametrize("end", ["cancel", "dies", "pump"])
def test_cancelled_load_in_the_kernel_does_not_count(fd: int, faults: Faults, end: str) -> None:
    pump = Pump(faulty.capsule(), 4)
    faults.script(rule(HANG, last=1, times=FOR_EVER))
    request = reads(pump, fd, ahead=False, count=1)
    request.post()
    faults.wait_hung()
    assert loads_under_way() == 1
    if end == "cancel":
        request.cancel()
        assert not request.wait_until_idle(0.0)
    elif end == "pump":
        assert not pump.close(0.0)
    else:
        del request
    assert loads_under_way() == 0
    faults.let_go()
    pump.close(PATIENCE_SECONDS)
    faults.wait_closed()


def test_prefetch_with_a_waiter_counts_as_a_load(fd: int, faults: Faults) -> None:
    pump = Pump(faulty.capsule(), 4)
    faults.script(rule(HANG, last=1, times=FOR_EVER))
    request = reads(pump, fd, ahead=True)
    request.post()
    faults.wait_hung()
    assert loads_under_way() == 0
    request.ahead = False
    assert (request.ahead, loads_under_way()) == (False, 1)
    request.ahead = True
    assert (request.ahead, loads_under_way()) == (True, 0)
    request.ahead = False
    faults.let_go()
    assert request.wait(PATIENCE_SECONDS) and request.wait_until_idle(PATIENCE_SECONDS)
    pump.close(1.0)


@pytest.mark.parametrize("ahead", [True, False])
def test_hung_read_is_silence_while_other_reads_of_its_request_are_delayed(
    fd: int, faults: Faults, ahead: bool
) -> None:
    pump = Pump(faulty.capsule(), 4)
    faults.script(rule(HANG, last=1, times=FOR_EVER))
    set_throttle(1, 0)  # the second read may start after an hour
    request = reads(pump, fd, ahead=ahead)
    request.post()
    faults.wait_hung()
    wait_for(lambda: request.idle_seconds > 0.2, "no silence is seen")
    set_throttle(0, 0)
    faults.let_go()
    assert request.wait(PATIENCE_SECONDS) and request.wait_until_idle(PATIENCE_SECONDS)
    pump.close(1.0)


@pytest.mark.parametrize("of", ["ahead", "all"])
def test_limit_delays_reads_until_it_is_removed(fd: int, of: str) -> None:
    pump, other = Pump(threads.engine(), 4), Pump(threads.engine(), 4)
    warmup.limit_bandwidth(1, of=of)  # the second read may go in an hour
    request = reads(pump, fd, ahead=True)
    request.post()
    assert request.wait(PATIENCE_SECONDS, 0, 0)
    load = reads(other, fd, ahead=False)
    if of == "ahead":
        load.post()
        assert load.wait(PATIENCE_SECONDS), "the limit of prefetches does not apply to loads"
    assert request.settled == 1 and request.idle_seconds < PATIENCE_SECONDS
    warmup.limit_bandwidth(None, of=of)
    assert request.wait(PATIENCE_SECONDS)
    pump.close(1.0)
    other.close(1.0)


def test_pump_sleeps_until_a_limit_opens(fd: int) -> None:
    before = set(os.listdir("/proc/self/task"))
    pump = Pump(threads.engine(), 4)
    new = set(os.listdir("/proc/self/task")) - before
    set_throttle(0, 8192)  # half a second for each read
    request = reads(pump, fd, ahead=True, count=3)
    request.post()
    assert request.wait(PATIENCE_SECONDS)
    waits = [waits_of(thread) for thread in new]
    assert pump.close(PATIENCE_SECONDS)
    assert 0 < max(waits) < 500


def waits_of(thread: str) -> int:
    """How often a thread of this process has waited."""
    lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))


def test_limits_of_all_reads_and_of_prefetches_are_separate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warmup.limit_bandwidth(1 << 30)
    warmup.limit_bandwidth(2 << 30, of="all")
    assert throttle() == (2 << 30, 1 << 30)
    warmup.limit_bandwidth(None)
    assert throttle() == (2 << 30, 0)
    for rate in (0, 1 << 63, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be from 1 to"):
            warmup.limit_bandwidth(rate)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of='me'"):
        warmup.limit_bandwidth(1, of="me")
    assert throttle() == (2 << 30, 0)


def test_forked_child_has_no_loads_under_way(fd: int, faults: Faults) -> None:
    pump = Pump(faulty.capsule(), 4)
    faults.script(rule(HANG, last=1, times=FOR_EVER))
    request = reads(pump, fd, ahead=False, count=1)
    request.post()
    faults.wait_hung()
    child = os.fork()
    if child == 0:
        os._exit(loads_under_way())
    assert os.waitpid(child, 0)[1] == 0 and loads_under_way() == 1
    request.cancel()
    faults.let_go()
    assert request.wait_until_idle(PATIENCE_SECONDS)
    pump.close(1.0)


def test_prefetch_yields_until_a_load_claims_it(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    set_throttle(0, 1)
    with gdsload.prefetch(checkpoint, cache="buffered", options={"engine": "threads"}) as ahead:
        got = gdsload.load_file(checkpoint)  # as a load it is out of that lane: or it would hang
        assert set(gdsload.last_report().paths) == {"prefetched"}
        assert got.keys() and ahead.wait(PATIENCE_SECONDS)
    assert prefetches() == []


def test_backend_without_priorities_still_prefetches(tiny_checkpoint: Path) -> None:
    with gated() as gate:
        assert isinstance(gate, Gate)
        with gdsload.prefetch(tiny_checkpoint, backend="gated", cache="buffered") as ahead:
            gate.open()
            assert ahead.wait(PATIENCE_SECONDS)
