"""The benchmark of `auto`: its choice, what it caches, and when it does not measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract import BLOCK, bytes_of
from gdsload.backends import OpenFile, tuning_cache
from gdsload.backends.auto import benchmark
from gdsload.backends.auto.backend import AutoBackend
from gdsload.backends.auto.benchmark import Benchmark, cheapest
from gdsload.backends.cufile.gds import GdsBackend
from gdsload.backends.cufile.gds_mt import GdsMtBackend
from gdsload.backends.posix import PosixBackend
from gdsload.loading import device_init
from gdsload.memory import staging_ring
from gpuauto import SMALL, keep, load, rates_are
from gpudoubles import CODE, DELAY, HANG, Doubles
from gpuloads import Load, direct
from waiting import wait_for

GB = 10**9


@pytest.fixture
def doubles(measuring: Doubles) -> Doubles:
    return measuring


@pytest.mark.parametrize(
    ("rates", "nbytes", "fixed", "expected"),
    [
        ({}, 1, {}, ""),
        ({"gds_mt": 0.0}, 1, {}, ""),
        ({"gds_mt": 1.0, "posix": 2.0}, 1, {}, "posix"),
        ({"gds_mt": 0.96, "posix": 1.0}, 1, {}, "gds_mt"),
        ({"gds_mt": 0.94, "posix": 1.0}, 1, {}, "posix"),
        ({"gds_mt": 2e9, "posix": 1e9}, GB, {"gds_mt": 1.0}, "posix"),
        ({"gds_mt": 2e9, "posix": 1e9}, 4 * GB, {"gds_mt": 1.0}, "gds_mt"),
        ({"gds_mt": 0.0, "posix": 1e9, "gds": 3e9}, GB, {"gds": 0.1, "posix": 0.1}, "gds"),
    ],
)
def test_cheapest_counts_bytes_by_rate_and_fixed_seconds(
    rates: dict[str, float], nbytes: int, fixed: dict[str, float], expected: str
) -> None:
    assert cheapest(rates, nbytes, fixed) == expected


def test_cached_result_is_chosen_by_the_size_of_the_load(doubles: Doubles, tmp_path: Path) -> None:
    keep(tmp_path, {"gds_mt": 2e9, "posix": 1e9}, {"gds_mt": 1.0, "posix": 0.1}, {})
    names = ["gds_mt", "posix"]
    small = Benchmark(names, str(tmp_path), "cuda:0", GB)
    assert small.choice == "posix"
    assert small.why.endswith("; opening gds_mt would take longer than it saves")
    assert Benchmark(names, str(tmp_path), "cuda:0", 4 * GB).choice == "gds_mt"
    open_already = Benchmark(names, str(tmp_path), "cuda:0", GB, ready=["gds_mt"])
    assert open_already.choice == "gds_mt" and "longer" not in open_already.why


def test_cached_result_without_fixed_seconds_is_chosen_by_rates(
    doubles: Doubles, tmp_path: Path
) -> None:
    keep(tmp_path, {"gds_mt": 2e9, "posix": 1e9}, {}, {})
    assert Benchmark(["gds_mt", "posix"], str(tmp_path), "cuda:0", 1).choice == "gds_mt"


def test_single_candidate_is_chosen_without_measuring(doubles: Doubles, tmp_path: Path) -> None:
    only = Benchmark(["posix"], str(tmp_path), "cuda:0", GB)
    assert (only.choice, only.why) == ("posix", "no other backend works")


def test_dropped_choice_leaves_the_next_best_and_no_cached_result(
    doubles: Doubles, tmp_path: Path
) -> None:
    keep(tmp_path, {"gds_mt": 3e9, "posix": 1e9, "gds": 2e9}, {}, {})
    found = Benchmark(["gds_mt", "posix", "gds"], str(tmp_path), "cuda:0", GB)
    found.drop("gds_mt")
    assert (found.choice, tuning_cache.entries()) == ("gds", [])
    found.drop("gds")
    found.drop("gds")
    assert found.choice == "posix"


def test_cached_choice_is_the_fastest_of_the_cached_rates(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later load uses it unchanged: nothing is measured."""
    rates_are(monkeypatch, gds_mt=0.2, posix=0.1, gds=0.2)
    first = load(checkpoint)
    (cached,) = tuning_cache.entries()
    assert cached.choice == cheapest(cached.rates) == "posix"
    assert cached.fixed_seconds.keys() == cached.rates.keys()
    assert all(seconds > 0 for seconds in cached.fixed_seconds.values())
    rates_are(monkeypatch, gds_mt=0.1, posix=5.0, gds=0.1)
    again = load(checkpoint)
    assert (again.backend, again.rates) == ("posix", first.rates)
    assert tuning_cache.entries() == [cached]


def test_candidate_that_is_not_worth_opening_is_not_opened(
    doubles: Doubles, checkpoint: Path
) -> None:
    keep(checkpoint, {"gds_mt": 2e9, "posix": 1e9, "gds": 1e9}, {"gds_mt": 9.0, "gds": 9.0})
    report = load(checkpoint)
    assert report.backend == "posix"
    assert "opening gds_mt would take longer than it saves" in report.choice
    assert doubles.cufile_log["opens"] == 0


def test_posix_is_measured_while_cufile_is_opened(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening hangs here until posix has read its sample."""
    monkeypatch.setattr(benchmark, "SAMPLE_BYTES", 2 * BLOCK)
    doubles.fault("cuFileDriverOpen", HANG)
    added: list[str] = []
    real = Benchmark.add

    def add(self: Benchmark, name: str, *rest: Any) -> None:
        added.append(f"{name} with {doubles.hung} calls hanging")
        doubles.let_go()
        real(self, name, *rest)

    monkeypatch.setattr(Benchmark, "add", add)
    with direct(file) as opened, AutoBackend("cuda:0", 1 << 30, **SMALL) as backend:
        load = Load(backend, opened, io_mode="direct")
        wait_for(lambda: doubles.struck, "cuFile was not opened")
        assert load.finish() == {} and load.bytes() == bytes_of(0)
        backend.release(load.request)
    assert added[0] == "posix with 1 calls hanging" and len(added) == 3


def test_load_goes_on_while_losers_are_closed(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeing a ring of VRAM waits for the device. It hangs here until all bytes have arrived."""
    monkeypatch.setattr(benchmark, "SAMPLE_BYTES", 2 * BLOCK)
    monkeypatch.setattr(staging_ring, "IDLE_SECONDS", 0.02)
    rates_are(monkeypatch, gds_mt=0.2, posix=0.1, gds=0.2)
    doubles.fault("cuFileBufDeregister", HANG)
    with direct(file) as opened, AutoBackend("cuda:0", 1 << 30, **SMALL) as backend:
        first = Load(backend, opened, io_mode="direct")
        assert first.finish() == {}
        wait_for(lambda: doubles.struck, "nothing was closed")
        assert doubles.hung == 1
        later = Load(backend, opened, io_mode="direct")
        assert later.finish() == {} and later.bytes() == bytes_of(0)
        assert doubles.hung == 1
        doubles.let_go()
        for each in (first, later):
            backend.release(each.request)
    assert {ring.kind for ring in staging_ring.rings()} == {"dram"}


def test_loser_that_is_being_closed_reads_what_the_choice_cannot(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "SAMPLE_BYTES", 2 * BLOCK)
    rates_are(monkeypatch, gds_mt=0.2, posix=0.3, gds=0.1)
    doubles.fault("cuFileBufDeregister", DELAY, 100_000_000)
    with direct(file) as opened, AutoBackend("cuda:0", 1 << 30, **SMALL) as backend:
        first = Load(backend, opened, io_mode="direct")
        assert first.finish() == {} and backend.status().backend == "gds"
        doubles.fault("event", CODE, 5044, times=-1)
        later = Load(backend, opened, io_mode="direct")
        assert later.finish() == {} and later.bytes() == bytes_of(0)
        assert backend.status().failovers["gds -> gds_mt"] > 0
        for each in (first, later):
            backend.release(each.request)


def test_losers_are_closed_after_the_rest_is_posted(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.2, posix=0.1, gds=0.2)
    posted: list[int] = []
    at_close: dict[str, int] = {}
    for kind in (GdsMtBackend, PosixBackend, GdsBackend):
        real_prepare, real_close = kind.prepare, kind.close

        def prepare(self: Any, transfers: Any, *rest: Any, real: Any = real_prepare) -> Any:
            posted.append(sum(transfer.wanted for transfer in transfers))
            return real(self, transfers, *rest)

        def close(self: Any, real: Any = real_close) -> None:
            at_close.setdefault(self.name, sum(posted))
            real(self)

        monkeypatch.setattr(kind, "prepare", prepare)
        monkeypatch.setattr(kind, "close", close)
    monkeypatch.setattr(device_init, "begin", lambda *_: None)  # it closes a posix backend, too
    report = load(checkpoint)
    assert report.backend == "posix"
    assert at_close == dict.fromkeys(("gds_mt", "gds", "posix"), report.read_bytes)
