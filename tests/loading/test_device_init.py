"""A prefetch for a GPU, or the beginning of a load, prepares the context, the staging ring and the
backend."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
from devicetensors import raw
from gdsload._native.cuda import Device
from gdsload.checkpoint.checkpoint import Lookup
from gdsload.errors import BackendUnavailable, CheckpointError, GdsloadError
from gdsload.loading import device_init
from gdsload.memory import staging_ring
from gdsload.system import gpu
from gdsload.system.cancellation import LoadCancelled
from gpuauto import SMALL
from gpudoubles import CODE, Doubles

PATIENCE_SECONDS = 120.0
KEPT = ("pins", "streams", "events")


@pytest.fixture
def doubles(loading: Doubles) -> Doubles:
    return loading


@pytest.mark.parametrize("backend", ["auto", "posix"])
def test_the_first_load_finds_its_road(
    backend: str, doubles: Doubles, tiny_checkpoint: Path
) -> None:
    before = doubles.cuda_log
    how: dict[str, Any] = {"backend": backend, "options": SMALL}
    with gdsload.prefetch(tiny_checkpoint, "cuda:0", tier="pagecache", **how) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        assert ahead.report.refusals.get("cuda:0") is None
    (made,) = staging_ring.rings()
    assert (made.kind, made.nbytes) == (staging_ring.DRAM, SMALL["ring_bytes"])
    ready = doubles.cuda_log
    assert ready["pins"] == before["pins"] + 1 and ready["streams"] > before["streams"]
    got = gdsload.load_file(tiny_checkpoint, "cuda:0", **how)
    assert staging_ring.rings() == [made]
    loaded = doubles.cuda_log
    assert [loaded[what] for what in KEPT] == [ready[what] for what in KEPT], "it opened another"
    expected: dict[str, torch.Tensor] = {}
    for shard in sorted(tiny_checkpoint.glob("*.safetensors")):
        expected |= safetensors.torch.load_file(shard)
    assert all(torch.equal(raw(got[name]), raw(tensor)) for name, tensor in expected.items())
    gdsload.quiesce(1.0)
    after = doubles.cuda_log
    assert [after[what] for what in KEPT] == [before[what] for what in KEPT]


def test_what_waits_in_host_memory_needs_no_ring(doubles: Doubles, tiny_checkpoint: Path) -> None:
    with (
        gdsload.warmup.HostPool(1 << 30, pinned=False),
        gdsload.prefetch(tiny_checkpoint, "cuda:1", tier="pool", cache="buffered") as ahead,
    ):
        assert ahead.wait(PATIENCE_SECONDS)
    assert list(gpu._devices) == [1]
    assert staging_ring.rings() == []


def test_nobody_waits_for_it_but_who_asks(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`prefetch`, and reads that go elsewhere, go on while a device is opened; `wait` and `quiesce`
    see to both."""
    asked, go, real = threading.Event(), threading.Event(), gpu.device

    def slow(ordinal: int) -> Device:
        asked.set()
        assert go.wait(PATIENCE_SECONDS)
        return real(ordinal)

    monkeypatch.setattr(gpu, "device", slow)
    ahead = gdsload.prefetch(tiny_checkpoint, "cuda:0", tier="pagecache", options=SMALL)
    assert asked.wait(PATIENCE_SECONDS)
    while ahead.progress().landed_bytes < ahead.progress().wanted_bytes or not ahead._batch:
        assert not ahead.wait(0.01)
    with pytest.raises(GdsloadError, match="being prefetched"):
        gdsload.quiesce(0.0)
    go.set()
    assert ahead.wait(PATIENCE_SECONDS)
    gdsload.quiesce(1.0)
    ahead.close()


def test_what_is_in_the_way_is_noted_and_left_to_the_load(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("cuMemHostRegister_v2", "cuMemHostAlloc"):
        doubles.fault(call, CODE, 2)
    with gdsload.prefetch(tiny_checkpoint, "cuda:0", tier="pagecache", options=SMALL) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        assert "no staging ring" in ahead.report.refusals["cuda:0"]

    def none(ordinal: int) -> Device:
        raise BackendUnavailable("there is no CUDA here", {"cuda": "none"})

    monkeypatch.setattr(gpu, "device", none)
    with gdsload.prefetch(tiny_checkpoint, "cuda:0", cache="buffered") as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        assert ahead.report.refusals["cuda:0"] == "there is no CUDA here"


def test_a_driver_that_hangs(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def hangs(ordinal: int) -> None:
        go.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(device_init, "OPEN_SECONDS", 0.05)
    monkeypatch.setattr(gpu, "device", hangs)
    with gdsload.prefetch(tiny_checkpoint, "cuda:0", cache="buffered") as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        assert "was not opened" in ahead.report.refusals["cuda:0"]
    go.set()


def test_first_load_pins_the_ring_while_the_checkpoint_is_opened(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, began = threading.Event(), threading.Event()
    places: list[str] = []
    real_open, real_device = Lookup.open, gpu.device

    def open_late(lookup: Lookup, source: Any) -> Any:
        assert began.wait(PATIENCE_SECONDS), "nothing was begun before"
        opened.set()
        return real_open(lookup, source)

    def device(ordinal: int) -> Device:
        if threading.current_thread().name == "gdsload-device":
            began.set()
            assert opened.wait(PATIENCE_SECONDS)
        return real_device(ordinal)

    real_init = staging_ring.StagingRing.__init__

    def made(ring: staging_ring.StagingRing, *words: Any, **more: Any) -> None:
        places.append(threading.current_thread().name)
        real_init(ring, *words, **more)

    monkeypatch.setattr(Lookup, "open", open_late)
    monkeypatch.setattr(gpu, "device", device)
    monkeypatch.setattr(staging_ring.StagingRing, "__init__", made)
    for _ in range(2):
        gdsload.load_file(tiny_checkpoint, "cuda:0", options=SMALL)
    assert places == ["gdsload-device"]
    assert gdsload.last_report().refusals.keys() <= {"gds", "gds_mt"}


def test_load_that_fails_early_waits_little_and_leaves_no_thread_that_goes_on(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go, real = threading.Event(), threading.Event(), gpu.device

    def slow(ordinal: int) -> Device:
        began.set()
        assert go.wait(PATIENCE_SECONDS)
        return real(ordinal)

    monkeypatch.setattr(device_init, "LEAVE_SECONDS", 0.01)
    monkeypatch.setattr(gpu, "device", slow)
    with pytest.raises(CheckpointError):
        gdsload.load_file(tiny_checkpoint, "cuda:0", names="no such tensor", options=SMALL)
    assert began.wait(PATIENCE_SECONDS)
    go.set()
    for thread in threading.enumerate():
        if thread.name == "gdsload-device":
            thread.join(PATIENCE_SECONDS)
    assert [ring.nbytes for ring in staging_ring.rings()] == [SMALL["ring_bytes"]]


def test_missing_file_starts_no_cuda(doubles: Doubles, tiny_checkpoint: Path) -> None:
    with pytest.raises(FileNotFoundError):
        gdsload.load_file(tiny_checkpoint / "missing", "cuda:0", options=SMALL)
    assert not gpu._devices and staging_ring.rings() == []


def test_load_that_waits_for_the_device_can_be_cancelled(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def hangs(ordinal: int, real: Any = gpu.device) -> Device:
        go.wait(PATIENCE_SECONDS)
        return real(ordinal)  # type: ignore[no-any-return]

    def cancelled() -> None:
        raise LoadCancelled("enough")

    monkeypatch.setattr(device_init, "LEAVE_SECONDS", 0.01)
    monkeypatch.setattr(device_init, "check", cancelled)
    monkeypatch.setattr(gpu, "device", hangs)
    with pytest.raises(LoadCancelled):
        gdsload.load_file(tiny_checkpoint, "cuda:0", options=SMALL)
    with pytest.raises(GdsloadError, match="cuda:0 is being initialised"):
        gdsload.quiesce(0.0)
    go.set()
    gdsload.quiesce(PATIENCE_SECONDS)
    assert staging_ring.rings() == []


def test_device_that_is_no_gpu_needs_none(tiny_checkpoint: Path) -> None:
    got = gdsload.load_file(tiny_checkpoint, "meta")
    assert got and all(tensor.device.type == "meta" for tensor in got.values())
