"""What "auto" does on the way into VRAM: it measures, chooses, remembers, falls back, and tells."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
import gpudoubles
from contract import BLOCK, BackendContract
from gdsload import gpu, ring, tensors, verdicts, vram
from gdsload.backends import VRAM, Memory, OpenFile, auto, contest, staged
from gdsload.backends.auto import AutoBackend
from gdsload.errors import BackendUnavailable, PlacementError, ReadError, ShortRead
from gdsload.plan import Transfer
from gdsload.report import LoadReport
from gpudoubles import CODE, ERRNO, HANG, NEGATIVE, STRANGE, Doubles
from test_gpu_contract import DeviceMemory, suite
from test_vram import device_tensor, raw

MIB = 1 << 20
SMALL: dict[str, Any] = {"ring_bytes": MIB, "request_bytes": 64 << 10}


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Doubles]:
    monkeypatch.setattr(vram, "empty", device_tensor)
    monkeypatch.setattr(tensors, "require_device", str)
    monkeypatch.setattr(auto, "WORTH_CUFILE_BYTES", 1)
    monkeypatch.setattr(contest, "LEG_BYTES", 256 << 10)
    with gpudoubles.installed(monkeypatch, tmp_path / "root") as doubles:
        yield doubles


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """4 MB in two files, in a place that does direct I/O."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(2):
        saved = {
            f"{number}.{name}": torch.arange(500_000, dtype=torch.int32) * (number + place + 1)
            for place, name in enumerate("a")
        }
        safetensors.torch.save_file(saved, folder / f"model-{number}.safetensors")
    try:
        os.close(os.open(folder / "model-0.safetensors", os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"{tmp_path} takes no O_DIRECT: {error.strerror}")
    return folder


def load(checkpoint: Path, cache: str = "direct", **changed: Any) -> LoadReport:
    """One load in "auto", byte for byte."""
    got = gdsload.load_file(checkpoint, "cuda:0", cache=cache, options={**SMALL, **changed})
    for shard in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in safetensors.torch.load_file(shard).items():
            assert torch.equal(raw(got[name]), raw(tensor)), name
    report = gdsload.last_report()
    assert sum(report.roads.values()) >= report.read_bytes
    return report


def rates_are(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Scripts how long a leg takes on each lane."""
    from gdsload.backends.lanes import Part

    monkeypatch.setattr(Part, "seconds", lambda part: seconds[part.lane.name])


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
    for road, size in report.roads.items():
        name = road.partition("/")[0]
        by_backend[name] = by_backend.get(name, 0) + size
    assert sum(by_backend.values()) == report.read_bytes, "something was read twice"
    assert by_backend.pop(fastest) > 2 * MIB
    assert set(by_backend.values()) == {contest.LEG_BYTES}
    (kept,) = verdicts.kept()
    assert (kept.road, kept.rates) == (fastest, report.rates)
    assert kept.device == "Double 0 0000:01:00.0"

    again = load(checkpoint)
    assert again.backend == fastest
    assert "kept in" in again.choice
    assert {road.partition("/")[0] for road, size in again.roads.items() if size} == {fastest}
    assert len(verdicts.kept()) == 1


def test_close_rates_keep_the_order_of_the_house(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.1, posix=0.099, gds=0.098)
    assert load(checkpoint).backend == "gds_mt"


def test_what_is_in_the_page_cache_is_not_measured(doubles: Doubles, checkpoint: Path) -> None:
    report = load(checkpoint, cache="buffered")
    assert {road.partition("/")[0] for road in report.roads} == {"posix"}
    assert report.rates == {} and verdicts.kept() == []
    assert doubles.cufile_log["opens"] == 0


def test_versions_that_changed_are_measured_again(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    load(checkpoint)
    rates_are(monkeypatch, gds_mt=0.2, posix=0.1, gds=0.2)
    monkeypatch.setattr(contest, "__version__", "another")
    report = load(checkpoint)
    assert (report.backend, report.choice) == ("posix", "posix: measured in this load")


def test_a_cache_that_cannot_be_written_is_said(
    doubles: Doubles, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "root/cache").write_text("")
    assert ", and not kept: " in load(checkpoint).choice


def test_legs_go_on_from_request_to_request(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of several smaller than a leg, and posted before the one before it has ended: never are
    two lanes measured at a time."""
    monkeypatch.setattr(contest, "LEG_BYTES", MIB)
    rates_are(monkeypatch, gds_mt=0.2, posix=0.1, gds=0.2)
    source = next(iter(checkpoint.iterdir()))
    fds = os.open(source, os.O_RDONLY), os.open(source, os.O_RDONLY | os.O_DIRECT)
    size = os.fstat(fds[0]).st_size // BLOCK * BLOCK
    memory = DeviceMemory(size)
    legs: list[str] = []
    real = contest.Contest.moved

    def moved(self: contest.Contest, lane: str, nbytes: int, seconds: float) -> None:
        legs.append(lane)
        real(self, lane, nbytes, seconds)

    monkeypatch.setattr(contest.Contest, "moved", moved)
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


# In the middle.


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [(NEGATIVE, 5008, "cuFile error 5008"), (ERRNO, 5011, "5011"), (ERRNO, 5, "Input/output")],
)
def test_a_failed_range_goes_by_the_next_road(
    kind: int, value: int, why: str, doubles: Doubles, checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    doubles.fault(f"cuFileRead at {MIB}", kind, value, times=-1)
    report = load(checkpoint)
    assert report.backend == "gds_mt"
    assert report.rerouted == {"gds_mt -> posix": 2 * (64 << 10)}  # one of each file
    assert report.refusals["gds_mt/ranges"].startswith("2 failed, first ")
    assert f".safetensors at {MIB}: " in report.refusals["gds_mt/ranges"]
    assert why in report.refusals["gds_mt/ranges"]
    assert "failed, and read again: gds_mt -> posix, 131,072 bytes" in report.summary()
    assert sum(report.roads.values()) == report.read_bytes


def test_a_road_that_fails_for_good_is_left(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.1, posix=0.15, gds=0.2)
    doubles.fault("cuFileRead", NEGATIVE, 5008, skip=12, times=-1)
    report = load(checkpoint)
    assert report.backend == "posix"
    assert "ranges failed, first" in report.refusals["gds_mt"]
    assert "cuFile error 5008" in report.refusals["gds_mt"]
    assert report.rerouted["gds_mt -> posix"] >= 3 * (64 << 10)
    assert "gds_mt" not in report.rates


def test_a_kept_verdict_that_fails_is_forgotten(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    load(checkpoint)
    doubles.fault("cuFileRead", NEGATIVE, 5008, times=-1)
    report = load(checkpoint)
    assert report.backend == "posix"
    assert verdicts.kept() == []


def test_batches_fall_back_on_single_reads(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.2, posix=0.2, gds=0.1)
    load(checkpoint)
    doubles.fault("event", CODE, 5044, skip=10, times=-1)
    report = load(checkpoint)
    assert report.rerouted["gds -> gds_mt"] >= 3 * (64 << 10)
    assert report.backend == "gds_mt"


def test_a_read_that_hangs_goes_by_the_next_road(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it brings in the end harms nobody."""
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    monkeypatch.setattr(auto, "SILENT_SECONDS", 0.2)
    doubles.fault("cuFileRead", HANG, skip=9)
    report = load(checkpoint)
    assert "no byte has come for" in report.refusals["gds_mt"]
    assert report.rerouted["gds_mt -> posix"] > 0


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("cuFileDriverOpen", "5011"),
        ("cuFileHandleRegister", "does not take it"),
        ("cuFileBatchIOSetUp", ""),
    ],
)
def test_what_does_not_open_is_refused_and_the_load_goes_on(
    call: str, why: str, doubles: Doubles, checkpoint: Path
) -> None:
    doubles.fault(call, CODE, 5011, times=-1)
    report = load(checkpoint)
    if why:
        assert report.backend == "posix"
        assert why in report.refusals["gds_mt"]
        assert verdicts.kept() == []
    else:
        assert "gds" not in report.rates and "gds_mt" in report.rates


def test_no_room_for_a_ring_of_vram(doubles: Doubles, checkpoint: Path) -> None:
    taken = doubles.cuda_log["used"]
    doubles.set(nbytes=taken + 4_000_000 + gpu.SPARE_BYTES)
    report = load(checkpoint, ring_bytes=128 * MIB, request_bytes=4 * MIB)
    assert report.backend == "posix"
    assert "no staging ring" in report.refusals["gds_mt"]


# What no other road would mend.


def test_a_file_that_was_cut_is_an_error_at_once(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = vram.settle

    def cut(device: str) -> None:
        os.truncate(checkpoint / "model-1.safetensors", 1_000_000)
        real(device)

    monkeypatch.setattr(vram, "settle", cut)
    with pytest.raises(ShortRead, match="the file ended at byte 1") as caught:
        gdsload.load_file(checkpoint, "cuda:0", cache="direct", options=SMALL)
    assert caught.value.path.endswith("model-1.safetensors")
    assert gdsload.last_report().rerouted == {}


def test_a_device_that_breaks_down_is_an_error_at_once(doubles: Doubles, checkpoint: Path) -> None:
    before = doubles.cuda_log
    doubles.fault("cuMemcpyAsync", CODE, 719, skip=8, times=-1)
    with pytest.raises(ReadError, match="CUDA error 719"):
        gdsload.load_file(checkpoint, "cuda:0", cache="direct", options=SMALL)
    assert gdsload.last_report().rerouted == {}
    assert staged._kept == []
    gdsload.quiesce(5.0)
    after = doubles.cuda_log
    assert {name: after[name] for name in ("ranges", "pins", "used", "streams", "events")} == {
        name: before[name] for name in ("ranges", "pins", "used", "streams", "events")
    }


def test_the_last_road_fails_too(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the usual one: file, tensor and reason."""
    from gdsload.backends.posix import PosixBackend

    real = PosixBackend.check

    def check(self: PosixBackend, request: Any) -> Any:
        progress = real(self, request)
        bad = [auto.Failure(place, 0, 5) for place in progress.settled]
        return progress._replace(failures=bad)

    monkeypatch.setattr(PosixBackend, "check", check)
    doubles.fault("cuFileRead", NEGATIVE, 5008, skip=6, times=-1)
    with pytest.raises(ReadError, match=r"model-\d.*Input/output error \(tensor '\d.a'\)"):
        gdsload.load_file(checkpoint, "cuda:0", cache="direct", options=SMALL)


def test_named_backends_do_not_fall_back(doubles: Doubles, checkpoint: Path) -> None:
    doubles.fault("cuFileRead", NEGATIVE, 5008, skip=6, times=-1)
    with pytest.raises(ReadError, match="cuFile error 5008"):
        gdsload.load_file(checkpoint, "cuda:0", backend="gds_mt", cache="direct", options=SMALL)
    report = gdsload.last_report()
    assert report.choice == "gds_mt: asked for by name"
    assert report.rerouted == {}


def test_a_device_that_is_too_full_is_known_before_a_byte_is_read(
    doubles: Doubles, checkpoint: Path
) -> None:
    doubles.set(nbytes=gpu.SPARE_BYTES + 4096)
    reads = doubles.cufile_log["reads"]
    with pytest.raises(PlacementError) as caught:
        gdsload.load_file(checkpoint, "cuda:0", cache="direct", options=SMALL)
    assert caught.value.missing_bytes
    assert doubles.cufile_log["reads"] == reads and ring.rings() == []


# The truth.


def test_compatibility_mode_that_shows_itself_late_is_left(
    doubles: Doubles, checkpoint: Path
) -> None:
    """cuFile says that it is native, and its own counters say otherwise."""
    doubles.fault("cuFileRead", STRANGE, times=-1)
    report = load(checkpoint)
    assert report.backend != "gds_mt"
    assert "compatibility mode for" in report.refusals["gds_mt"]
    assert report.roads["gds_mt/posix"] <= contest.LEG_BYTES


def test_compatibility_mode_is_never_asked_for(doubles: Doubles, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="by name"):
        load(checkpoint, allow_compat=True)


def test_a_device_that_shares_the_hosts_memory(doubles: Doubles, checkpoint: Path) -> None:
    doubles.set(unified=True)
    report = load(checkpoint)
    assert "shares the host's memory" in report.refusals["in place"]


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
        assert ring.rings() == []
        log = doubles.cufile_log
        assert not any(log[name] for name in ("open", "files", "buffers", "batches"))
        after = doubles.cuda_log
        assert all(after[n] == before[n] for n in ("ranges", "pins", "streams", "events", "used"))


class Measuring(AutoBackend):
    """With every request measured: what a contract test sends is a leg, or a few."""

    def __init__(self, **options: Any) -> None:
        super().__init__("cuda:0", 1 << 30, **{"ring_bytes": MIB, **options})


TestAutoDirect = suite("TestAutoDirect", Measuring, direct=True)
TestAutoBuffered = suite("TestAutoBuffered", Measuring)
