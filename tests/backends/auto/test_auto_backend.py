"""What "auto" does on the way into VRAM: it measures, chooses, remembers, falls back, and tells."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gdsload
from contract import BLOCK, BackendContract
from gdsload.backends import VRAM, Memory, OpenFile, tuning_cache
from gdsload.backends.auto import backend as backend_module
from gdsload.backends.auto import benchmark
from gdsload.backends.auto.backend import AutoBackend, Part
from gdsload.backends.staging import StagingPipeline
from gdsload.errors import BackendUnavailable
from gdsload.loading import device_batch
from gdsload.memory import staging_ring
from gdsload.planning.read_plan import Transfer
from gpuauto import MIB, SMALL, load, rates_are
from gpucontract import DeviceMemory, suite
from gpudoubles import CODE, STRANGE, Doubles


@pytest.fixture
def doubles(measuring: Doubles) -> Doubles:
    return measuring


@pytest.mark.parametrize("fastest", ["gds_mt", "posix", "gds"])
def test_the_fastest_is_measured_taken_and_kept(
    fastest: str, doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"gds_mt": 0.2, "posix": 0.2, "gds": 0.2, fastest: 0.1}
    rates_are(monkeypatch, **seconds)
    report = load(checkpoint)
    assert report.backend == fastest
    assert report.choice == f"{fastest}: measured in this load"
    assert set(report.rates) == {"gds_mt", "posix", "gds"}
    assert max(report.rates, key=lambda name: report.rates[name]) == fastest
    by_backend: dict[str, int] = {}
    for road, size in report.paths.items():
        name = road.partition("/")[0]
        by_backend[name] = by_backend.get(name, 0) + size
    assert sum(by_backend.values()) == report.read_bytes, "something was read twice"
    assert by_backend.pop(fastest) > 2 * MIB
    assert set(by_backend.values()) == {benchmark.SAMPLE_BYTES}
    (kept,) = tuning_cache.entries()
    assert (kept.choice, kept.rates) == (fastest, report.rates)
    assert kept.device == "Double 0 0000:01:00.0"

    again = load(checkpoint)
    assert again.backend == fastest
    assert "cached in" in again.choice
    assert {road.partition("/")[0] for road, size in again.paths.items() if size} == {fastest}
    assert len(tuning_cache.entries()) == 1


def test_close_rates_keep_the_order_of_the_house(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.1, posix=0.099, gds=0.098)
    assert load(checkpoint).backend == "gds_mt"


def test_what_is_in_the_page_cache_is_not_measured(doubles: Doubles, checkpoint: Path) -> None:
    report = load(checkpoint, cache="buffered")
    assert {road.partition("/")[0] for road in report.paths} == {"posix"}
    assert report.rates == {} and tuning_cache.entries() == []
    assert doubles.cufile_log["opens"] == 0


def test_versions_that_changed_are_measured_again(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    load(checkpoint)
    rates_are(monkeypatch, gds_mt=0.2, posix=0.1, gds=0.2)
    monkeypatch.setattr(tuning_cache, "__version__", "another")
    report = load(checkpoint)
    assert (report.backend, report.choice) == ("posix", "posix: measured in this load")


def test_sample_that_came_through_the_page_cache_is_no_measurement(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct reads may be refused when they are made."""
    rates_are(monkeypatch, gds_mt=0.2, posix=0.1, gds=0.3)
    monkeypatch.setattr(Part, "is_direct", property(lambda part: part.candidate.name != "posix"))
    assert "posix" not in load(checkpoint).rates
    assert tuning_cache.entries() == []


def test_a_road_that_was_not_there_before_is_measured(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that failed is not tried again each time."""
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.05)
    doubles.fault("cuFileBatchIOSetUp", CODE, 5030, times=-1)
    assert load(checkpoint).choice == "gds_mt: measured in this load"
    (kept,) = tuning_cache.entries()
    assert kept.rates["gds"] == 0.0
    gdsload.quiesce(1.0)
    doubles.set()
    again = load(checkpoint)
    assert "cached in" in again.choice and "gds" not in again.rates
    tuning_cache.store(dataclasses.replace(kept, rates={"gds_mt": 2.0, "posix": 1.0}))
    report = load(checkpoint)
    assert report.choice == "gds: measured in this load"


def test_a_cache_that_cannot_be_written_is_said(
    doubles: Doubles, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "root/cache").write_text("")
    assert ", and not cached: " in load(checkpoint).choice


def test_legs_go_on_from_request_to_request(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of several smaller than a leg, and posted before the one before it has ended: never are
    two lanes measured at a time."""
    monkeypatch.setattr(benchmark, "SAMPLE_BYTES", MIB)
    rates_are(monkeypatch, gds_mt=0.2, posix=0.1, gds=0.2)
    source = next(iter(checkpoint.iterdir()))
    fds = os.open(source, os.O_RDONLY), os.open(source, os.O_RDONLY | os.O_DIRECT)
    size = os.fstat(fds[0]).st_size // BLOCK * BLOCK
    memory = DeviceMemory(size)
    legs: list[str] = []
    real = benchmark.Benchmark.add

    def moved(self: benchmark.Benchmark, lane: str, *rest: Any) -> None:
        legs.append(lane)
        real(self, lane, *rest)

    monkeypatch.setattr(benchmark.Benchmark, "add", moved)
    step = 64 << 10
    with AutoBackend("cuda:0", 1 << 30, **SMALL) as backend:
        file = backend.register(OpenFile(str(source), fds[0], size, fds[1], BLOCK))
        space = backend.register(Memory(VRAM, memory.address, size, memory, device="cuda:0"))
        transfers = [
            Transfer(0, at, min(step, size - at), min(step, size - at), 0, at, "direct", tag)
            for tag, at in enumerate(range(0, size, step))
        ]
        requests = [
            backend.prepare(transfers[first : first + 8], [file], [space])
            for first in range(0, len(transfers), 8)
        ]
        for request in requests:
            backend.post(request)
        assert len([r for r in requests if r.parts]) == 1, "two legs at a time"
        for request in reversed(requests):
            assert BackendContract().finish(backend, request, len(request.transfers)) == {}
        for request in requests:
            backend.release(request)
    assert ctypes.string_at(memory.address, size) == source.read_bytes()[:size]
    assert legs == ["gds_mt", "gds_mt", "posix", "posix"]  # 2 MB: the third has no turn
    for fd in fds:
        os.close(fd)


# The truth.


def test_compatibility_mode_that_shows_itself_late_is_left(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuFile says that it is native, and its own counters say otherwise."""
    monkeypatch.setattr(backend_module, "MOST_COMPAT_BYTES", 128 << 10)
    doubles.fault("cuFileRead", STRANGE, times=-1)
    report = load(checkpoint)
    assert report.backend != "gds_mt"
    assert "compatibility mode for" in report.refusals["gds_mt"]
    assert report.paths["gds_mt/posix"] <= benchmark.SAMPLE_BYTES


@pytest.mark.parametrize(("most_bytes", "reads"), [(0, 1), (256 << 10, 4)])
def test_a_few_reads_by_posix_do_not_condemn_cufile(
    most_bytes: int, reads: int, doubles: Doubles, checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A small share, as of the ends of files; or a large share of little."""
    monkeypatch.setattr(backend_module, "MOST_COMPAT_BYTES", most_bytes)
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    doubles.fault("cuFileRead", STRANGE, skip=10 if reads == 1 else 0, times=reads)
    report = load(checkpoint)
    assert report.backend == "gds_mt" and "gds_mt" not in report.refusals
    assert 0 < report.paths["gds_mt/posix"] <= reads * (64 << 10)


def test_compatibility_mode_is_never_asked_for(doubles: Doubles, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="by name"):
        load(checkpoint, allow_compat=True)


def test_options_that_one_road_alone_has(doubles: Doubles, checkpoint: Path) -> None:
    report = load(checkpoint, engine="threads")
    assert report.backend == "posix"
    assert "it has no option engine" in report.refusals["gds_mt"]
    with pytest.raises(TypeError, match="has no option 'nonsense'"):
        load(checkpoint, nonsense=1)


def test_a_fork_is_refused(doubles: Doubles, checkpoint: Path) -> None:
    backend = AutoBackend("cuda:0", 1 << 30, **SMALL)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(BackendUnavailable, match="fork"):
                backend.prepare([], [], [])
            backend.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    backend.close()


def test_quiesce_leaves_nothing_of_it(doubles: Doubles, checkpoint: Path) -> None:
    before = doubles.cuda_log
    for _ in range(2):
        load(checkpoint)
        gdsload.quiesce(1.0)
        assert staging_ring.rings() == []
        log = doubles.cufile_log
        assert not any(log[name] for name in ("open", "files", "buffers", "batches"))
        after = doubles.cuda_log
        assert all(after[n] == before[n] for n in ("ranges", "pins", "streams", "events", "used"))


class Stream:
    """One of torch's, for which somebody may wait."""

    cuda_stream = 1  # CU_STREAM_LEGACY
    waited = 0

    def synchronize(self) -> None:
        self.waited += 1


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    found = Stream()
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_stream=lambda device: found,
        memory_reserved=lambda ordinal: 0,
        memory_allocated=lambda ordinal: 0,
    )
    monkeypatch.setattr(device_batch, "_torch_cuda", lambda: cuda)
    return found


def test_every_road_copies_after_the_stream_of_its_caller(
    stream: Stream, doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is opened in the middle, and while roads are measured."""
    rates_are(monkeypatch, gds_mt=0.2, posix=0.2, gds=0.1)
    told: set[tuple[str, int]] = set()
    answers: list[bool] = []
    real_road, real_auto = StagingPipeline.follow, AutoBackend.follow

    def road_follows(self: StagingPipeline, handle: int) -> bool:
        told.add((self.name, handle))
        return real_road(self, 0)

    def auto_follows(self: AutoBackend, device: str, handle: int) -> bool:
        answers.append(real_auto(self, device, handle))
        return answers[-1]

    monkeypatch.setattr(StagingPipeline, "follow", road_follows)
    monkeypatch.setattr(AutoBackend, "follow", auto_follows)
    for _ in gdsload.stream(checkpoint, "cuda:0", cache="direct", options=SMALL, window_bytes=MIB):
        pass
    assert told == {("gds_mt", 1), ("posix", 1), ("gds", 1)}
    assert all(answers) and stream.waited == 0
    told.clear()
    load(checkpoint, cache="buffered")
    assert told == {("posix", 1)} and answers[-1]


def test_a_road_whose_device_takes_no_order_is_left(
    stream: Stream, doubles: Doubles, checkpoint: Path
) -> None:
    doubles.fault("cuStreamWaitEvent", CODE, 1)
    report = load(checkpoint)
    assert "cannot order its streams" in report.refusals["gds_mt"]
    assert "gds_mt" not in {road.partition("/")[0] for road, size in report.paths.items() if size}


class Measuring(AutoBackend):
    """With every request measured: what a contract test sends is a leg, or a few."""

    def __init__(self, **options: Any) -> None:
        super().__init__("cuda:0", 1 << 30, **{"ring_bytes": MIB, **options})


TestAutoDirect = suite("TestAutoDirect", Measuring, direct=True)
TestAutoBuffered = suite("TestAutoBuffered", Measuring)
