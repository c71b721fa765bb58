"""Weights that a prefetch reads into the memory of a simulated GPU, and the loads that claim them:
exact bytes, nothing read twice, few allocations, and all of them freed."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
import gpudoubles
from devicetensors import TorchCuda, odd_tensors, raw
from gdsload.backends import Progress, host_copies
from gdsload.backends.auto import benchmark
from gdsload.backends.host_copies import HostCopy, shares_and_reads
from gdsload.errors import FileChanged, GdsloadError, PlacementError, ReadError
from gdsload.loading import claims, session as session_module, torch_device
from gdsload.loading.settings import ReadSettings
from gdsload.memory import DRAM, device_buffers, late_copies, staging_ring
from gdsload.readahead.prefetch import PrefetchCancelled, prefetches
from gdsload.system import gpu
from gpudoubles import CODE, NEGATIVE, Doubles
from waiting import wait_for

PATIENCE_SECONDS = 120.0
SMALL: dict[str, Any] = {"ring_bytes": 1 << 20, "request_bytes": 64 << 10}
BACKENDS = ["posix", "gds_mt", "gds", "auto"]
MEMORY = ("ranges", "used")
Loaded = dict[str, torch.Tensor]


@pytest.fixture
def doubles(measuring: Doubles, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doubles]:
    monkeypatch.setattr(benchmark, "SAMPLE_BYTES", 128 << 10)
    yield measuring
    for one in prefetches():
        one.close()
    assert claims.offered() == []
    # A ring whose slots are still on their way home when it is forgotten stays pinned.
    measuring.hold_copies(False)
    wait_for(
        lambda: not (staging_ring.release_rings() or staging_ring.rings()), "somebody has a slot"
    )


@pytest.fixture
def source(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


@pytest.fixture
def expected(source: Path) -> Loaded:
    found: Loaded = {}
    for shard in sorted(source.glob("*.safetensors")):
        found |= safetensors.torch.load_file(shard)
    return found


def test_prefetch_to_cuda_goes_to_the_gpu_that_torch_uses(
    doubles: Doubles, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_open, name in ((False, "cuda:0"), (True, "cuda:1")):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda is_open=is_open: is_open)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        with gdsload.prefetch(source, "cuda", options=SMALL) as ahead:
            ahead.wait()
            assert ahead.report.device == name


def by_load_file(source: Path) -> Loaded:
    return gdsload.load_file(source, "cuda:0", options=SMALL)


def by_stream(source: Path) -> Loaded:
    return dict(gdsload.stream(source, "cuda:0", window_bytes=1 << 16, options=SMALL))


def by_safe_open(source: Path) -> Loaded:
    with gdsload.safe_open(source, device="cuda:0", options=SMALL) as opened:
        return dict(opened.get_tensors())


FACES: list[Callable[[Path], Loaded]] = [by_load_file, by_stream, by_safe_open]


def ahead_of(
    source: Path, backend: str = "posix", **words: Any
) -> gdsload.readahead.prefetch.Prefetch:
    words = {"cache": "direct", "options": SMALL, **words}
    return gdsload.prefetch(source, "cuda:0", backend=backend, **words)


def assert_same(got: Loaded, wanted: Loaded) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(raw(got[name]), raw(tensor)), name


def on_device(doubles: Doubles, tensor: torch.Tensor) -> bool:
    return bool(doubles.cuda.cuda_double_is_device(tensor.data_ptr(), tensor.nbytes))


def require_memory(doubles: Doubles, before: dict[str, int]) -> None:
    """What a device has lent is back, the rings left aside; nobody waits for the collector."""
    staging_ring.release_rings()
    after = doubles.cuda_log
    assert [after[what] for what in MEMORY] == [before[what] for what in MEMORY]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_landed_is_claimed(
    backend: str, face: Callable[[Path], Loaded], doubles: Doubles, source: Path, expected: Loaded
) -> None:
    gc.collect()
    before = doubles.cuda_log
    with ahead_of(source, backend) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        assert ahead.report.refusals.get("cuda:0") is None
        progress = ahead.progress()
        assert (
            progress.landed_bytes
            == progress.wanted_bytes
            == sum(tensor.nbytes for tensor in expected.values())
        )
        staging_ring.release_rings()
        landed = doubles.cuda_log
        assert landed["ranges"] == before["ranges"] + 1, "one block holds all of it"
        got = face(source)
        report = gdsload.last_report()
        if face is not by_safe_open:
            assert report.paths == {"prefetched": progress.wanted_bytes}
            assert report.read_bytes == report.requests == 0
        assert ahead.progress().claimed_bytes == progress.wanted_bytes
        assert prefetches() == []
    log = doubles.cuda_log
    assert (log["allocations"], log["copies"]) == (landed["allocations"], landed["copies"])
    assert staging_ring.rings() == [], "nothing was read: nothing was pinned"
    assert_same(got, expected)
    assert all(t.data_ptr() % device_buffers.ALIGN_BYTES == 0 for t in got.values())
    assert all(on_device(doubles, t) for t in got.values())
    one = got.popitem()[1]
    del got
    assert doubles.cuda_log["used"] == log["used"], "a tensor lives in it"
    del one
    require_memory(doubles, before)
    assert doubles.cuda_log["allocations"] - before["allocations"] == (
        doubles.cuda_log["frees"] - before["frees"]
    )


def test_slices_of_prefetched_tensors_keep_their_names(doubles: Doubles, tmp_path: Path) -> None:
    """A slice that is not aligned in memory is copied; the tensors around it stay."""
    saved = {
        "a": torch.arange(9, dtype=torch.int32),
        "b": torch.arange(21, dtype=torch.int32).view(3, 7),
        "c": torch.arange(100, 109, dtype=torch.int32),
        "d": torch.empty(0, dtype=torch.int32),
        "e": torch.arange(200, 209, dtype=torch.int32),
    }
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    wanted = saved | {"b": saved["b"][1:3]}
    with ahead_of(tmp_path) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        got = gdsload.load_file(
            tmp_path, "cuda:0", slices={"b": slice(1, 3)}, backend="posix", options=SMALL
        )
        assert "prefetched" in gdsload.last_report().paths
    assert list(got) == list(wanted)
    assert_same(got, wanted)


def test_whole_tensors_of_a_device_are_in_the_order_of_their_names(
    doubles: Doubles, tmp_path: Path
) -> None:
    saved = {name: torch.arange(5, dtype=torch.int32) for name in "abc"}
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    with ahead_of(tmp_path, names=["b"]) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        got = gdsload.load_file(
            tmp_path, "cuda:0", names=["c", "b", "a"], backend="posix", options=SMALL
        )
    assert list(got) == ["c", "b", "a"]
    assert_same(got, saved)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_on_its_way_is_waited_for(
    backend: str, doubles: Doubles, source: Path, expected: Loaded, claimed: threading.Event
) -> None:
    """And yields no more to what somebody waits for."""
    loaded: list[Loaded] = []
    doubles.hold_copies(True)
    with ahead_of(source, backend) as ahead:
        loader = threading.Thread(target=lambda: loaded.append(by_load_file(source)))
        loader.start()
        assert claimed.wait(PATIENCE_SECONDS)
        flight = ahead._batch
        assert flight is not None
        request = flight._request
        under_way = [part.request for part in getattr(request, "parts", [])] or [request]
        assert not any(each.native.ahead for each in under_way)
        assert ahead.progress().landed_bytes == 0 and loaded == []
        doubles.hold_copies(False)
        loader.join(PATIENCE_SECONDS)
        assert ahead.wait(PATIENCE_SECONDS)
    assert_same(loaded[0], expected)


def test_it_yields_to_loads_before_somebody_wants_it(doubles: Doubles, source: Path) -> None:
    doubles.hold_copies(True)
    with ahead_of(source, "auto") as ahead:
        assert ahead._posted.wait(PATIENCE_SECONDS)
        assert ahead._batch is not None
        parts = ahead._batch._request.parts
        assert parts and all(part.request.native.ahead for part in parts)
        doubles.hold_copies(False)


@pytest.mark.parametrize("face", FACES)
def test_what_it_does_not_hold_is_read_to_the_device(
    face: Callable[[Path], Loaded], doubles: Doubles, source: Path, expected: Loaded
) -> None:
    names = list(expected)[::2]
    with ahead_of(source, names=names) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        assert_same(face(source), expected)
        assert ahead.progress().claimed_bytes == sum(expected[name].nbytes for name in names)


@pytest.mark.parametrize("backend", ["posix", "gds_mt"])
def test_what_the_host_holds_is_copied_and_the_rest_read_to_the_device(
    backend: str, doubles: Doubles, source: Path, expected: Loaded
) -> None:
    names = list(expected)[: len(expected) // 2]
    half = sum(expected[name].nbytes for name in names)
    with gdsload.prefetch(source, names=names, cache="direct") as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        got = gdsload.load_file(source, "cuda:0", backend=backend, cache="direct", options=SMALL)
    report = gdsload.last_report()
    assert report.paths.pop("prefetched") == half
    assert report.paths and all(path.startswith(backend) for path in report.paths)
    assert report.read_bytes < sum(tensor.nbytes for tensor in expected.values())
    assert_same(got, expected)
    assert all(on_device(doubles, tensor) for tensor in got.values())


@pytest.mark.parametrize("pinned", [True, False])
def test_what_a_pool_holds_is_copied_from_there(
    pinned: bool, doubles: Doubles, source: Path, expected: Loaded
) -> None:
    names = list(expected)[: len(expected) // 2]
    with gdsload.warmup.HostPool(1 << 30, pinned=pinned):
        assert gdsload.prefetch(source, tier="pool", names=names, cache="direct").wait()
        got = gdsload.load_file(source, "cuda:0", backend="posix", cache="direct", options=SMALL)
        report = gdsload.last_report()
        held = report.paths.pop("pool")  # and what it read to fill a gap
        assert sum(expected[name].nbytes for name in names) <= held < report.wanted_bytes
        assert report.paths and report.read_bytes > 0
        assert_same(got, expected)


@pytest.fixture
def ring_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of 16 slots is made for any number of bytes in host memory."""
    for name, value in (
        ("LEAST_BYTES", 1),
        ("LEAST_BYTES_WITHOUT_RING", 1),
        ("RING_BYTES", 1 << 20),
        ("SLOT_BYTES", 64 << 10),
    ):
        monkeypatch.setattr(host_copies, name, value)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("tier", ["host", "pool"])
@pytest.mark.usefixtures("ring_worthwhile")
def test_bytes_in_host_memory_pass_through_the_pinned_ring(
    tier: str, face: Callable[[Path], Loaded], doubles: Doubles, source: Path, expected: Loaded
) -> None:
    """Several threads fill it while the device copies."""
    with contextlib.ExitStack() as stack:
        if tier == "pool":
            stack.enter_context(gdsload.warmup.HostPool(1 << 30, pinned=False))
            assert gdsload.prefetch(source, tier="pool").wait(PATIENCE_SECONDS)
        else:
            assert stack.enter_context(gdsload.prefetch(source)).wait(PATIENCE_SECONDS)
        before = doubles.cuda_log
        got = face(source)
        after = doubles.cuda_log
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    assert after["copied"] - before["copied"] == nbytes
    assert_same(got, expected)
    assert [ring.kind for ring in staging_ring.rings()] == [DRAM]


@pytest.mark.usefixtures("ring_worthwhile")
def test_copies_from_host_memory_that_fail_raise_read_error(doubles: Doubles, source: Path) -> None:
    with gdsload.prefetch(source) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        doubles.fault("cuMemcpyAsync", CODE, 719, skip=3, times=-1)
        with pytest.raises(ReadError, match=r"cuda:0: the device refused a copy: CUDA error 719"):
            by_load_file(source)
    doubles.set()
    assert late_copies.owners() == []


def test_copies_from_host_memory_in_a_stopped_process_do_not_report_a_stall() -> None:
    looks = iter([Progress([], [], False, 1e6), Progress([0], [], True)])
    request = SimpleNamespace(check=lambda: next(looks), wait=lambda *_: None, transfers=[None])
    host_copies._finish(request, "cuda:0")  # type: ignore[arg-type]


@pytest.mark.parametrize("why", ["few bytes", "nothing can be pinned", "limited rate"])
@pytest.mark.usefixtures("ring_worthwhile")
def test_bytes_in_host_memory_that_a_ring_does_not_suit_are_copied_by_torch(
    why: str, doubles: Doubles, source: Path, expected: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "few bytes":
        monkeypatch.setattr(host_copies, "LEAST_BYTES_WITHOUT_RING", 1 << 20)
    elif why == "limited rate":
        monkeypatch.setattr(host_copies, "throttle", lambda: (1, 0))
    else:
        doubles.fault("cuMemHostRegister_v2", CODE, 801, times=-1)
        doubles.fault("cuMemHostAlloc", CODE, 2, times=-1)
    before = doubles.cuda_log["copies"]
    with gdsload.prefetch(source) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        assert_same(by_load_file(source), expected)
    assert doubles.cuda_log["copies"] == before


def test_pinned_bytes_are_copied_without_a_ring_and_waited_for_once(
    doubles: Doubles, source: Path, expected: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = TorchCuda()
    monkeypatch.setattr(torch_device, "_torch_cuda", lambda: cuda)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    with gdsload.prefetch(source) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        assert_same(by_load_file(source), expected)
    assert cuda.stream.waited == 1 and staging_ring.rings() == []


@pytest.mark.usefixtures("ring_worthwhile")
def test_bytes_that_are_not_pinned_go_through_the_ring_although_others_are(
    doubles: Doubles, source: Path, expected: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = itertools.cycle([True, False])
    monkeypatch.setattr(torch_device, "_torch_cuda", TorchCuda)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: next(turns))
    with gdsload.prefetch(source) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        assert_same(by_load_file(source), expected)
    assert len(staging_ring.rings()) == 1


def test_neighbours_in_host_memory_are_read_together() -> None:
    copies = [
        HostCopy(1000, 100, 5000),
        HostCopy(1100, 60, 9000),
        HostCopy(4000, 10, 7000),
    ]
    shares, reads = shares_and_reads(copies, 128)
    assert shares == [(0, 100, 5000), (100, 60, 9000), (160, 10, 7000)]
    assert [(r.offset, r.length, r.target_offset, r.tag) for r in reads] == [
        (1000, 128, 0, 0),
        (1128, 32, 128, 1),
        (4000, 10, 160, 2),
    ]


def test_the_device_comes_before_the_host(doubles: Doubles, source: Path, expected: Loaded) -> None:
    with gdsload.prefetch(source, cache="direct") as host, ahead_of(source) as there:
        assert host.wait(PATIENCE_SECONDS) and there.wait(PATIENCE_SECONDS)
        got = by_load_file(source)
        assert host.progress().claimed_bytes == 0
        assert there.progress().claimed_bytes == there.progress().wanted_bytes > 0
    assert_same(got, expected)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_other_devices_read_for_themselves(
    device: str, doubles: Doubles, source: Path, expected: Loaded
) -> None:
    with ahead_of(source) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        got = gdsload.load_file(source, device, cache="direct")
        assert "prefetched" not in gdsload.last_report().paths
        assert_same(got, expected)
        assert ahead.progress().claimed_bytes == 0
        assert_same(by_load_file(source), expected)
        assert gdsload.last_report().read_bytes == 0


def test_rows_and_columns(doubles: Doubles, tmp_path: Path) -> None:
    """Rows are a view of where they lie; columns are runs, which are copied side by side."""
    from gdsload.integrations.transformers.readahead_queue import ReadaheadQueue
    from gdsload.planning.tensor_slices import slice_of
    from gdsload.report import LoadReport

    values = torch.arange(8 * 40_000, dtype=torch.float32).reshape(8, 40_000)
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"a": values, "b": values[:1] * 2}, path)
    with ahead_of(path) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        with gdsload.safe_open(path, device="cuda:0", options=SMALL) as opened:
            assert torch.equal(opened.get_slice("a")[6:], values[6:])
            assert ahead.progress().claimed_bytes == values[6:].nbytes
    index = (slice(None), slice(64, 192))
    for held in (None, ["a"]):
        with (
            ahead_of(path, names=held) as ahead,
            gdsload.Checkpoint.open(path) as checkpoint,
            session_module.Session(
                checkpoint,
                LoadReport("m"),
                ReadSettings(options=SMALL, page_cache="keep"),
                device="cuda:0",
            ) as session,
        ):
            assert ahead.wait(PATIENCE_SECONDS)
            wanted = slice_of(checkpoint.tensors["a"], index)
            assert len(wanted.parts) == 8
            with ReadaheadQueue(session, [wanted]) as feed:
                feed.start()
                tensor = feed.take(wanted)
            assert torch.equal(tensor, values[index]) and on_device(doubles, tensor)
            assert session.report.read_bytes == 0


def test_feed_to_a_device_after_a_failed_read_raises_the_same_for_every_taker(
    doubles: Doubles, tmp_path: Path
) -> None:
    from gdsload.integrations.transformers.readahead_queue import ReadaheadQueue
    from gdsload.planning.tensor_slices import whole
    from gdsload.report import LoadReport

    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({name: torch.ones(100_000) for name in "abc"}, path)
    doubles.fault("cuFileRead", CODE, 5011, times=2)  # a failed read is tried once more
    with (
        gdsload.Checkpoint.open(path) as checkpoint,
        session_module.Session(
            checkpoint,
            LoadReport("m"),
            ReadSettings(backend="gds_mt", cache="direct"),
            device="cuda:0",
        ) as session,
    ):
        slices = [whole(info) for info in checkpoint.tensors.values()]
        with ReadaheadQueue(session, slices) as feed:
            feed.start()
            errors = []
            for tensor_slice in (*slices, *slices):
                with pytest.raises(ReadError) as caught:
                    feed.take(tensor_slice)
                errors.append(str(caught.value))
    assert len(set(errors)) == 1 and "5011" in errors[0]


@pytest.mark.usefixtures("ring_worthwhile")
def test_tensor_is_lost_if_its_copy_from_host_memory_fails(
    doubles: Doubles, tmp_path: Path
) -> None:
    """The memory that was copied from has been freed, and would be read as zeros."""
    from gdsload.integrations.transformers.readahead_queue import ReadaheadQueue
    from gdsload.planning.tensor_slices import whole
    from gdsload.report import LoadReport

    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({name: torch.ones(100_000) for name in "abc"}, path)
    with (
        gdsload.prefetch(path) as ahead,
        gdsload.Checkpoint.open(path) as checkpoint,
        session_module.Session(
            checkpoint, LoadReport("m"), ReadSettings(), device="cuda:0"
        ) as session,
    ):
        assert ahead.wait(PATIENCE_SECONDS)
        slices = [whole(info) for info in checkpoint.tensors.values()]
        with ReadaheadQueue(session, slices) as feed:
            feed.start()
            doubles.fault("cuMemcpyAsync", CODE, 719, times=-1)
            with pytest.raises(ReadError, match="CUDA error 719"):
                feed.take(slices[0])
            for tensor_slice in slices:
                with pytest.raises(GdsloadError, match="was lost"):
                    feed.take(tensor_slice)


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_what_nobody_claimed_goes_back(end: str, doubles: Doubles, source: Path) -> None:
    gc.collect()
    before = doubles.cuda_log
    ahead = ahead_of(source)
    assert ahead.wait(PATIENCE_SECONDS)
    assert doubles.cuda_log["used"] > before["used"]
    getattr(ahead, end)()
    require_memory(doubles, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_closed_while_copies_are_on_their_way(
    backend: str, doubles: Doubles, source: Path
) -> None:
    """Their memory stays until they have ended: the double tells of a copy to memory that went."""
    gc.collect()
    before = doubles.cuda_log
    doubles.hold_copies(True)
    ahead = ahead_of(source, backend)
    wait_for(lambda: doubles.cuda_log["copies"] != before["copies"])
    assert not ahead.wait(0.01)
    ahead.close()
    assert doubles.cuda_log["used"] > before["used"]
    doubles.hold_copies(False)
    with pytest.raises(PrefetchCancelled):
        ahead.wait(PATIENCE_SECONDS)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while doubles.cuda_log["used"] > before["used"]:
        late_copies.forget_ended()
        staging_ring.release_rings()
        gc.collect()
        assert time.monotonic() < deadline


@pytest.mark.parametrize("backend", ["posix", "gds_mt"])
def test_what_is_lost_the_load_reads_itself(
    backend: str, doubles: Doubles, source: Path, expected: Loaded, claimed: threading.Event
) -> None:
    loaded: list[Loaded] = []
    doubles.hold_copies(True)
    ahead = ahead_of(source, backend, names=list(expected)[::2])
    loader = threading.Thread(target=lambda: loaded.append(by_load_file(source)))
    loader.start()
    assert claimed.wait(PATIENCE_SECONDS)
    ahead.cancel()
    doubles.hold_copies(False)
    loader.join(PATIENCE_SECONDS)
    assert_same(loaded[0], expected)
    ahead.close()


def test_a_fault_in_the_middle(doubles: Doubles, source: Path, expected: Loaded) -> None:
    """Its bytes are lost, and all that came with them; what the load needs it reads itself."""
    gc.collect()
    before = doubles.cuda_log
    doubles.fault("cuFileRead", NEGATIVE, 5008, skip=2, times=-1)
    ahead = ahead_of(source, "gds_mt")
    with pytest.raises(ReadError):
        ahead.wait(PATIENCE_SECONDS)
    assert ahead.progress().state == "failed" and doubles.struck > 0
    got = by_load_file(source)
    assert gdsload.last_report().read_bytes > 0
    assert_same(got, expected)
    del got
    require_memory(doubles, before)
    with ahead_of(source, "auto") as other:
        assert other.wait(PATIENCE_SECONDS), "auto reads it by the next backend"
        assert other.report.failovers
        assert_same(by_load_file(source), expected)
        assert gdsload.last_report().read_bytes == 0


def test_a_device_that_is_too_full(doubles: Doubles, source: Path, expected: Loaded) -> None:
    """It is asked before anything is read; the load, which has more room, reads for itself."""
    gc.collect()
    doubles.set(nbytes=doubles.cuda_log["used"] + gpu.SPARE_BYTES + 4096)
    before = doubles.cuda_log
    with ahead_of(source) as ahead:
        with pytest.raises(PlacementError, match="cuda:0") as caught:
            ahead.wait(PATIENCE_SECONDS)
        total = sum(tensor.nbytes for tensor in expected.values())
        assert total - 4096 <= (caught.value.missing_bytes or 0) < total + (1 << 16)
        assert (doubles.cuda_log["copies"], staging_ring.rings()) == (before["copies"], [])
        doubles.set()
        assert_same(by_load_file(source), expected)
        assert gdsload.last_report().read_bytes > 0


def test_a_device_that_says_no_half_way(
    doubles: Doubles, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had given before goes back, though the error is kept."""
    gc.collect()
    monkeypatch.setattr(device_buffers, "LEAST_BYTES", 1 << 10)
    before = doubles.cuda_log
    doubles.fault("cuMemAlloc_v2", CODE, 2, skip=2)
    ahead = ahead_of(source)
    with pytest.raises(PlacementError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        ahead.wait(PATIENCE_SECONDS)
    assert doubles.cuda_log["allocations"] - before["allocations"] == 2
    require_memory(doubles, before)
    ahead.close()


def test_a_few_blocks_for_any_number_of_tensors(
    doubles: Doubles, source: Path, expected: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each goes back with its last tensor, whatever the others do."""
    gc.collect()
    monkeypatch.setattr(device_buffers, "LEAST_BYTES", 1 << 10)
    before = doubles.cuda_log
    with ahead_of(source) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        staging_ring.release_rings()
        made = doubles.cuda_log["allocations"] - before["allocations"]
        assert 4 < made <= device_buffers.MOST_BLOCKS + 2 < len(expected)
        got = by_load_file(source)
    assert_same(got, expected)
    used = [doubles.cuda_log["used"]]
    while got:
        got.popitem()
        if doubles.cuda_log["used"] != used[-1]:
            used.append(doubles.cuda_log["used"])
    assert len(used) == made + 1
    require_memory(doubles, before)


def test_a_file_that_changed(
    doubles: Doubles, source: Path, expected: Loaded, claimed: threading.Event
) -> None:
    files = sorted(source.glob("*.safetensors"))
    with ahead_of(source) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        for file in files:
            os.utime(file, ns=(0, 0))
        assert_same(by_load_file(source), expected)
        assert "prefetched" not in gdsload.last_report().paths and not claimed.is_set()
    errors: list[BaseException] = []

    def loading() -> None:
        try:
            by_load_file(source)
        except BaseException as error:
            errors.append(error)

    doubles.hold_copies(True)
    with ahead_of(source):
        loader = threading.Thread(target=loading)
        loader.start()
        assert claimed.wait(PATIENCE_SECONDS)
        for file in files:
            os.utime(file, ns=(1, 1))
        doubles.hold_copies(False)
        loader.join(PATIENCE_SECONDS)
    assert len(errors) == 1 and isinstance(errors[0], FileChanged)


def test_a_still_process_keeps_what_landed(
    doubles: Doubles, source: Path, expected: Loaded
) -> None:
    gc.collect()
    before = doubles.cuda_log
    with ahead_of(source) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        gdsload.quiesce(1.0)
        still = doubles.cuda_log
        assert staging_ring.rings() == [] and still["used"] > before["used"]
        for what in ("pins", "streams", "events"):
            assert still[what] == before[what]
        assert_same(by_load_file(source), expected)
        assert gdsload.last_report().read_bytes == 0
    require_memory(doubles, before)


def test_what_the_next_load_may_have(doubles: Doubles, source: Path, expected: Loaded) -> None:
    """A load that ended lets go of what it left, unless all is kept."""
    names = list(expected)[:4]
    for keep in (False, True):
        gc.collect()
        before = doubles.cuda_log
        with ahead_of(source, keep=keep) as ahead:
            assert ahead.wait(PATIENCE_SECONDS)
            gdsload.load_file(source, "cuda:0", names=names)
            staging_ring.release_rings()
            assert (doubles.cuda_log["used"] > before["used"]) == keep
            rest = list(expected)[4:]
            got = gdsload.load_file(source, "cuda:0", names=rest, options=SMALL)
            assert (gdsload.last_report().read_bytes == 0) == keep
        assert_same(got, {name: expected[name] for name in rest})
        del got
        require_memory(doubles, before)


def test_two_prefetches_of_the_same_read_it_once(doubles: Doubles, source: Path) -> None:
    gc.collect()
    before = doubles.cuda_log
    with ahead_of(source) as first:
        assert first.wait(PATIENCE_SECONDS)
        staging_ring.release_rings()
        used = doubles.cuda_log["used"]
        with ahead_of(source) as again:
            assert again.wait(PATIENCE_SECONDS)
            assert again.progress().wanted_bytes == 0
            staging_ring.release_rings()
            assert doubles.cuda_log["used"] == used
    require_memory(doubles, before)


def test_odd_tensors(doubles: Doubles, tmp_path: Path) -> None:
    saved = odd_tensors()
    path = tmp_path / "odd.safetensors"
    safetensors.torch.save_file(saved, path)
    with ahead_of(path) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        got = by_load_file(path)
        assert gdsload.last_report().read_bytes == 0
    assert_same(got, saved)
    assert all(tensor.data_ptr() % device_buffers.ALIGN_BYTES == 0 for tensor in got.values())


WITHOUT_TORCH = """
import sys, gdsload
from gdsload.loading import claims
from gdsload.system import shared_libraries as libraries
libraries.candidates = lambda name: [sys.argv[2]]
ahead = gdsload.prefetch(sys.argv[1], "cuda:0", backend="posix", options={"ring_bytes": 64 << 20})
assert ahead.wait(120)
(landing,) = claims.offered()
print(ahead.progress().state, landing.device, ahead.report.refusals.get("cuda:0"),
      ahead.report.requests > 0, "torch" in sys.modules, "numpy" in sys.modules)
gdsload.quiesce()
"""


def test_it_needs_no_torch_and_ends_with_its_process(source: Path) -> None:
    driver = gpudoubles.built("cuda_double")
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, source, driver],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "landed cuda:0 None True False False\n"


AT_THE_END = """
import atexit, ctypes, sys
from gdsload._native.cuda import Block, Cuda, Device
double = ctypes.CDLL(sys.argv[1])
def frees():
    values = (ctypes.c_int64 * 11)()
    double.cuda_double_log(values)
    return values[9]
made = [Block(Device(Cuda(sys.argv[1]), 0), 4096) for _ in range(2)]
held = made[0].view(0, 4096, (4096,), 1, 8)
del made[0]
assert frees() == 0
del held
assert frees() == 1
import gdsload._native.cuda as last
last.end()
made.clear()
assert frees() == 1
"""


def test_nothing_is_freed_when_the_process_ends() -> None:
    driver = gpudoubles.built("cuda_double")
    ran = subprocess.run(
        [sys.executable, "-c", AT_THE_END, driver], capture_output=True, text=True, timeout=240
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_child_leaves_the_device_alone(doubles: Doubles, source: Path, expected: Loaded) -> None:
    """It has nothing of its parent's to claim, its copies of tensors free nothing (the double ends
    a child that calls it), and what it prefetches waits in host memory."""
    with ahead_of(source) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        got = gdsload.load_file(source, "cuda:0", names=list(expected)[:3])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                del got
                gc.collect()
                assert claims.offered() == []
                with gdsload.prefetch(source, "cuda:0", cache="buffered") as own:
                    assert own.wait(PATIENCE_SECONDS)
                    assert "fork" in own.report.refusals["cuda:0"]
                    assert claims.offered()[0].device == "cpu"
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert_same(got, {name: expected[name] for name in got})


def test_a_device_that_is_not_there(doubles: Doubles, source: Path, expected: Loaded) -> None:
    with gdsload.prefetch(source, "cuda:7", cache="direct") as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        assert "CUDA sees 2" in ahead.report.refusals["cuda:7"]
        got = gdsload.load_file(source)
        assert set(gdsload.last_report().paths) == {"prefetched"}
    assert_same(got, expected)
    with (
        gdsload.prefetch(source, "cuda:7", backend="gds_mt") as ahead,
        pytest.raises(GdsloadError, match="CUDA sees 2"),  # it leads nowhere else
    ):
        ahead.wait(PATIENCE_SECONDS)
