"""Loads into VRAM by `auto`: measuring, choosing, the tuning cache, the report."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
from contract import BLOCK, BackendContract
from devicetensors import memory_stats
from gdsload.backends import VRAM, Memory, OpenFile, Registration, tuning_cache
from gdsload.backends.auto import backend as backend_module, benchmark
from gdsload.backends.auto.backend import AutoBackend
from gdsload.backends.auto.request import Part
from gdsload.backends.auto.transfers import ragged_ends_apart
from gdsload.backends.cufile.gds import GdsBackend
from gdsload.backends.posix import PosixBackend
from gdsload.backends.staging import StagingPipeline
from gdsload.errors import BackendUnavailable, PlacementError, ReadError
from gdsload.loading import device_batch, torch_device
from gdsload.memory import staging_ring
from gdsload.planning.read_plan import Transfer
from gdsload.system import gpu
from gdsload.system.storage import Storage
from gpuauto import MIB, SMALL, keep, load, rates_are
from gpucontract import DeviceMemory, suite
from gpudoubles import CODE, STRANGE, Doubles
from gpuloads import Load, direct
from waiting import wait_for


@pytest.fixture
def doubles(measuring: Doubles) -> Doubles:
    return measuring


@pytest.mark.parametrize("fastest", ["gds_mt", "posix", "gds"])
def test_fastest_backend_is_chosen_and_cached(
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
    for path, size in report.paths.items():
        name = path.partition("/")[0]
        by_backend[name] = by_backend.get(name, 0) + size
    assert sum(by_backend.values()) == report.read_bytes, "bytes were read twice"
    assert by_backend.pop(fastest) > 2 * MIB
    assert set(by_backend.values()) == {benchmark.SAMPLE_BYTES}
    (cached,) = tuning_cache.entries()
    assert (cached.choice, cached.rates) == (fastest, report.rates)
    assert cached.device == "Double 0 0000:01:00.0"

    again = load(checkpoint)
    assert again.backend == fastest
    assert "cached in" in again.choice
    assert {path.partition("/")[0] for path, size in again.paths.items() if size} == {fastest}
    assert len(tuning_cache.entries()) == 1


def test_close_rates_choose_the_preferred_backend(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.1, posix=0.099, gds=0.098)
    assert load(checkpoint).backend == "gds_mt"


def test_warm_files_are_not_measured(doubles: Doubles, checkpoint: Path) -> None:
    report = load(checkpoint, cache="buffered")
    assert {path.partition("/")[0] for path in report.paths} == {"posix"}
    assert report.rates == {} and tuning_cache.entries() == []
    assert doubles.cufile_log["opens"] == 0


def test_mapped_files_are_read_through_the_page_cache(doubles: Doubles, checkpoint: Path) -> None:
    report = load(checkpoint, cache="mapped")
    assert {path.rpartition("/")[2] for path in report.paths} == {"buffered"}
    assert report.choice == "posix: all bytes come through the page cache"
    assert report.rates == {} and doubles.cufile_log["opens"] == 0


def test_depth_is_the_largest_of_the_candidates(doubles: Doubles, checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.safetensors"))
    distant = OpenFile(str(file), -1, file.stat().st_size, storage=Storage("nfs4", 1 << 20, 256))
    options = {**SMALL, "ring_bytes": 16 * MIB}
    with PosixBackend(**options) as posix, AutoBackend("cuda:0", 1 << 30, **options) as auto:
        before = posix.limits("cuda:0").depth
        posix.register(distant)
        auto.deregister(auto.register(distant))
        assert auto.limits("cuda:0").depth == posix.limits("cuda:0").depth != before


def test_changed_versions_are_measured_again(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    load(checkpoint)
    rates_are(monkeypatch, gds_mt=0.2, posix=0.1, gds=0.2)
    monkeypatch.setattr(tuning_cache, "__version__", "another")
    report = load(checkpoint)
    assert (report.backend, report.choice) == ("posix", "posix: measured in this load")


def test_sample_through_the_page_cache_is_not_counted(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct reads may be refused when they are made."""
    rates_are(monkeypatch, gds_mt=0.2, posix=0.1, gds=0.3)
    monkeypatch.setattr(Part, "is_direct", property(lambda part: part.candidate.name != "posix"))
    assert "posix" not in load(checkpoint).rates
    assert tuning_cache.entries() == []


def test_backend_missing_in_the_cache_is_measured(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that failed when it was measured is not tried again."""
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.05)
    doubles.fault("cuFileBatchIOSetUp", CODE, 5030, times=-1)
    assert load(checkpoint).choice == "gds_mt: measured in this load"
    (cached,) = tuning_cache.entries()
    assert cached.rates["gds"] == 0.0
    gdsload.quiesce(1.0)
    doubles.set()
    again = load(checkpoint)
    assert "cached in" in again.choice and "gds" not in again.rates
    assert again.refusals["gds"].startswith("it failed when it was measured on ")
    tuning_cache.store(dataclasses.replace(cached, rates={"gds_mt": 2.0, "posix": 1.0}))
    report = load(checkpoint)
    assert report.choice == "gds: measured in this load"


@pytest.mark.parametrize("kind", [PlacementError, BackendUnavailable, ReadError])
def test_backend_that_fails_for_lack_of_resources_is_measured_by_the_next_load(
    kind: type[Exception], doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: GdsBackend, device: str) -> StagingPipeline:
        if kind is ReadError:
            raise ReadError("too many open files", errno=errno.EMFILE)
        raise kind("no thread") from OSError(errno.EAGAIN, "")

    with monkeypatch.context() as patch:
        patch.setattr(GdsBackend, "_open_pipeline", refuse)
        report = load(checkpoint)
    assert report.choice.endswith(
        "measured in this load, and not cached: gds could not be opened this time"
    )
    assert "gds" not in report.rates and tuning_cache.entries() == []
    assert "gds" in load(checkpoint).rates


def test_rates_under_a_bandwidth_limit_are_not_cached(doubles: Doubles, checkpoint: Path) -> None:
    gdsload.warmup.limit_bandwidth(1 << 40, of="all")
    try:
        report = load(checkpoint)
    finally:
        gdsload.warmup.limit_bandwidth(None, of="all")
    assert report.choice.endswith("and not cached: a bandwidth limit was set")
    assert len(report.rates) == 3 and tuning_cache.entries() == []


def test_rates_of_a_prefetch_are_not_cached(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "SAMPLE_BYTES", 2 * BLOCK)
    with direct(file) as opened, AutoBackend("cuda:0", 1 << 30, **SMALL) as backend:
        load = Load(backend, opened, io_mode="direct")
        backend.yield_to_loads(load.request, True)
        assert load.finish() == {}
        assert "not cached: a prefetch gives way" in backend.status().choice
        backend.release(load.request)
    assert tuning_cache.entries() == []


def test_rates_of_many_small_reads_are_not_cached(doubles: Doubles, tmp_path: Path) -> None:
    """A backend that has one small read at a time shows nothing of what it can do."""
    path = tmp_path / "model.safetensors"
    tensors = {f"{n:03}": torch.full((4096,), n, dtype=torch.int32) for n in range(200)}
    safetensors.torch.save_file(tensors, path)
    choices = set()
    with gdsload.safe_open(path, device="cuda:0", cache="direct", options=SMALL) as opened:
        for name in tensors:
            opened.get_tensor(name)
            choices.add(gdsload.last_report().choice)
    assert any(
        each.endswith("not cached: the reads were too small for a fair comparison")
        for each in choices
    ), choices
    assert tuning_cache.entries() == []


def test_rates_beside_other_work_of_the_device_are_not_cached(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "SAMPLE_BYTES", 2 * BLOCK)
    with direct(file) as opened, AutoBackend("cuda:0", 1 << 30, **SMALL) as backend:
        doubles.keep_busy()
        backend.follow("cuda:0", 0)
        load = Load(backend, opened, io_mode="direct")
        wait_for(lambda: backend.check(load.request).idle_seconds > 0.1)
        doubles.end_work()
        assert load.finish() == {}
        assert "not cached: the device was busy with other work" in backend.status().choice
        backend.release(load.request)
    assert tuning_cache.entries() == []


def test_model_that_fits_is_loaded_if_the_ring_of_the_choice_does_not_fit_beside_it(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring would take memory of the tensors if these were not made before the first read."""
    monkeypatch.setattr(device_batch, "FIRST_BYTES", 1 << 20)
    monkeypatch.setattr(device_batch, "LEAST_BYTES", 1)
    keep(checkpoint, {"gds_mt": 2e9, "posix": 1e9, "gds": 1e9}, {})
    total = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    doubles.set(nbytes=doubles.cuda_log["used"] + total + gpu.SPARE_BYTES + MIB // 2)
    load(checkpoint)


def test_rates_measured_with_other_options_are_not_used(doubles: Doubles, checkpoint: Path) -> None:
    load(checkpoint)
    assert "cached in" in load(checkpoint).choice
    assert "measured in this load" in load(checkpoint, ring_bytes=2 * MIB).choice


def test_cache_that_cannot_be_written_is_reported(
    doubles: Doubles, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "root/cache").write_text("")
    assert ", and not cached: " in load(checkpoint).choice


def test_sample_spans_several_requests(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is smaller than a sample and posted before the previous one has ended; never
    are two backends measured at the same time."""
    monkeypatch.setattr(benchmark, "SAMPLE_BYTES", MIB)
    rates_are(monkeypatch, gds_mt=0.2, posix=0.1, gds=0.2)
    source = next(iter(checkpoint.iterdir()))
    fds = os.open(source, os.O_RDONLY), os.open(source, os.O_RDONLY | os.O_DIRECT)
    size = os.fstat(fds[0]).st_size // BLOCK * BLOCK
    memory = DeviceMemory(size)
    samples: list[str] = []
    real = benchmark.Benchmark.add

    def add(self: benchmark.Benchmark, name: str, *rest: Any) -> None:
        samples.append(name)
        real(self, name, *rest)

    monkeypatch.setattr(benchmark.Benchmark, "add", add)
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
        assert len([r for r in requests if r.parts]) == 1, "two samples at a time"
        for request in reversed(requests):
            assert BackendContract().finish(backend, request, len(request.transfers)) == {}
        for request in requests:
            backend.release(request)
    assert ctypes.string_at(memory.address, size) == source.read_bytes()[:size]
    assert samples == ["posix", "posix", "gds_mt", "gds_mt"]  # 2 MB: nothing is left for the third
    for fd in fds:
        os.close(fd)


# Compatibility mode.


def test_compatibility_mode_seen_in_counters_is_left(
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
def test_few_compatibility_reads_keep_the_backend(
    most_bytes: int,
    reads: int,
    doubles: Doubles,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small share, as of the ends of files; or a large share of few bytes."""
    monkeypatch.setattr(backend_module, "MOST_COMPAT_BYTES", most_bytes)
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    doubles.fault("cuFileRead", STRANGE, skip=10 if reads == 1 else 0, times=reads)
    report = load(checkpoint)
    assert report.backend == "gds_mt" and "gds_mt" not in report.refusals
    assert 0 < report.paths["gds_mt/posix"] <= reads * (64 << 10)


def test_ragged_ends_of_many_files_do_not_condemn_cufile(
    doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuFile counts a read of each file as POSIX, if it reads the last bytes of the file."""
    folder = tmp_path / "ragged"
    folder.mkdir()
    for number in range(12):
        values = torch.arange(30_000 + number, dtype=torch.int32)
        path = folder / f"model-{number:02}.safetensors"
        safetensors.torch.save_file({f"{number}.a": values}, path)
        assert path.stat().st_size % BLOCK
    monkeypatch.setattr(backend_module, "MOST_COMPAT_BYTES", 0)
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    for _ in range(2):  # measured, and by the cached result
        report = load(folder)
        assert report.backend == "gds_mt" and report.refusals.keys().isdisjoint(("gds_mt", "gds"))
        assert "gds_mt/posix" not in report.paths and doubles.cufile_log["unaligned"] == 0


def test_reads_of_ragged_ends_cover_each_byte_once() -> None:
    size = 5 * BLOCK + 77
    files = [Registration(OpenFile("a", -1, size)), Registration(OpenFile("b", -1, 2 * BLOCK))]
    transfers = [
        Transfer(0, 0, 2 * BLOCK, 2 * BLOCK, 0, 0, "direct", 0),
        Transfer(0, 2 * BLOCK, 4 * BLOCK, 3 * BLOCK + 70, 0, 2 * BLOCK, "direct", 1),
        Transfer(0, 5 * BLOCK, BLOCK, 77, 1, 8, "direct", 2),
        Transfer(0, 4 * BLOCK, 2 * BLOCK, BLOCK - 5, 1, BLOCK, "direct", 3),
        Transfer(1, 0, 2 * BLOCK, 2 * BLOCK, 1, 0, "direct", 4),
    ]
    blocks, ends = ragged_ends_apart(transfers, files)
    assert blocks == [
        transfers[0],
        transfers[1]._replace(length=3 * BLOCK, wanted=3 * BLOCK),
        transfers[3],
        transfers[4],
    ]
    assert ends == [
        Transfer(0, 5 * BLOCK, 70, 70, 0, 5 * BLOCK, "buffered", 1),
        Transfer(0, 5 * BLOCK, 77, 77, 1, 8, "buffered", 2),
    ]


def test_allow_compat_raises_value_error(doubles: Doubles, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="by name"):
        load(checkpoint, allow_compat=True)


def test_option_of_one_backend_refuses_the_others(doubles: Doubles, checkpoint: Path) -> None:
    report = load(checkpoint, engine="threads")
    assert report.backend == "posix"
    assert "it has no option engine" in report.refusals["gds_mt"]
    with pytest.raises(TypeError, match="has no option 'nonsense'"):
        load(checkpoint, nonsense=1)


def test_value_that_one_backend_refuses_leaves_the_others(
    doubles: Doubles, checkpoint: Path
) -> None:
    report = load(checkpoint, depth=128)
    assert "depth=128" in report.refusals["gds"]
    assert report.backend != "gds"


def test_backend_after_fork_is_refused(doubles: Doubles, checkpoint: Path) -> None:
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


def test_quiesce_releases_all_device_resources(doubles: Doubles, checkpoint: Path) -> None:
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
    """A stream of torch that counts how often it was waited for."""

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
        memory_stats_as_nested_dict=lambda ordinal: memory_stats(0, 0),
    )
    monkeypatch.setattr(torch_device, "_torch_cuda", lambda: cuda)
    return found


def test_every_backend_copies_after_the_stream_of_its_caller(
    stream: Stream, doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a backend that is opened during the load, and while backends are measured."""
    rates_are(monkeypatch, gds_mt=0.2, posix=0.2, gds=0.1)
    followed: set[tuple[str, int]] = set()
    answers: list[bool] = []
    real_pipeline, real_auto = StagingPipeline.follow, AutoBackend.follow

    def pipeline_follows(self: StagingPipeline, handle: int) -> bool:
        followed.add((self.name, handle))
        return real_pipeline(self, 0)

    def auto_follows(self: AutoBackend, device: str, handle: int) -> bool:
        answers.append(real_auto(self, device, handle))
        return answers[-1]

    monkeypatch.setattr(StagingPipeline, "follow", pipeline_follows)
    monkeypatch.setattr(AutoBackend, "follow", auto_follows)
    for _ in gdsload.stream(checkpoint, "cuda:0", cache="direct", options=SMALL, window_bytes=MIB):
        pass
    assert followed == {("gds_mt", 1), ("posix", 1), ("gds", 1)}
    assert all(answers) and stream.waited == 0
    followed.clear()
    load(checkpoint, cache="buffered")
    assert followed == {("posix", 1)} and answers[-1]


def test_backend_that_cannot_order_streams_is_left(
    stream: Stream, doubles: Doubles, checkpoint: Path
) -> None:
    doubles.fault("cuStreamWaitEvent", CODE, 1, skip=1)  # posix is measured first
    report = load(checkpoint)
    assert "cannot order its streams" in report.refusals["gds_mt"]
    assert "gds_mt" not in {path.partition("/")[0] for path, size in report.paths.items() if size}


def test_last_backend_waits_for_a_stream_that_it_cannot_follow(
    doubles: Doubles, file: OpenFile
) -> None:
    doubles.fault("cuStreamWaitEvent", CODE, 1, times=2)
    doubles.fault("cuStreamSynchronize", CODE, 719)
    with AutoBackend("cuda:0", **SMALL) as backend:
        assert backend.follow("cuda:0", 0)
        with pytest.raises(BackendUnavailable, match="cuStreamSynchronize"):
            Load(backend, file)
        load = Load(backend, file)
        assert load.finish() == {} and doubles.struck == 3
        backend.release(load.request)


class Measuring(AutoBackend):
    """Measures every request: those of a contract test are samples."""

    def __init__(self, **options: Any) -> None:
        super().__init__("cuda:0", 1 << 30, **{"ring_bytes": MIB, **options})


TestAutoDirect = suite("TestAutoDirect", Measuring, direct=True)
TestAutoBuffered = suite("TestAutoBuffered", Measuring)
