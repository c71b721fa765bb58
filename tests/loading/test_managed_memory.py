"""Reading in place, where a GPU's memory is the host's: over a double of such a machine, with
neither a ring nor a copy."""

from __future__ import annotations

import gc
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

import gdsload
import gpudoubles
import tinymodels
from devicetensors import device_tensor, odd_tensors, raw
from gdsload import api
from gdsload.backends import DRAM, OpenFile, Registration
from gdsload.errors import BackendUnavailable, PlacementError, ShortRead
from gdsload.integrations.transformers import load_plan
from gdsload.integrations.transformers.model_reader import ModelReader, Options
from gdsload.loading import device_batch, io_mode
from gdsload.loading import managed as managed_module
from gdsload.memory import (
    device_buffers,
    host_buffers,
    page_cache,
    staging_ring,
)
from gdsload.planning.read_plan import ByteRange, Limits, plan_reads
from gpudoubles import CODE, DISCRETE, GB10, GH200, JETSON, Doubles

PATIENCE_SECONDS = 120.0
IN_PLACE: dict[str, Any] = {"in_place": True}
SMALL = {"request_bytes": 16 << 10}


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Doubles]:
    """A machine like GB10. In the end nothing was pinned or copied, and all memory is back."""
    monkeypatch.setattr(sys.modules["gdsload.planning.read_plan"], "LITTLE_BYTES", 1)
    monkeypatch.setattr(device_batch, "empty", device_tensor)
    monkeypatch.setattr(api, "require_device", str)
    gc.collect()
    with gpudoubles.installed(monkeypatch, tmp_path / "root", unified=GB10) as doubles:
        before = doubles.cuda_log
        yield doubles
        gc.collect()
        after = doubles.cuda_log
        assert staging_ring.rings() == []
        for what in ("pins", "streams", "events", "copies", "used"):
            assert (what, after[what]) == (what, before[what])


def managed(doubles: Doubles, tensor: torch.Tensor) -> bool:
    return bool(doubles.cuda.cuda_double_is_managed(tensor.data_ptr(), tensor.nbytes))


def stored(source: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for shard in [source] if source.is_file() else sorted(source.glob("*.safetensors")):
        found |= safetensors.torch.load_file(shard)
    return found


def assert_there(doubles: Doubles, got: dict[str, torch.Tensor], source: Path) -> None:
    """All of them, to the bit, in shared memory, on a border."""
    expected = stored(source)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
        assert torch.equal(raw(got[name]), raw(tensor)), name
        assert managed(doubles, got[name]), name
        assert got[name].data_ptr() % device_buffers.ALIGN_BYTES == 0, name


def begins_at(path: Path, place: int) -> None:
    """Pads a file's header until its data begins at `place` modulo a block of 256 bytes."""
    text = path.read_bytes()
    (length,) = struct.unpack("<Q", text[:8])
    header, data = text[8 : 8 + length].rstrip(), text[8 + length :]
    header += b" " * ((place - 8 - len(header)) % device_buffers.ALIGN_BYTES)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def ways() -> dict[str, int]:
    """The roads of the last load that brought bytes, without their backend and engine."""
    report = gdsload.last_report()
    assert report.backend == "posix" and "staged" not in report.summary()
    return {
        road.removeprefix(f"posix/{report.engine}/"): n for road, n in report.paths.items() if n
    }


@pytest.mark.parametrize("engine", ["uring", "linuxaio", "aio", "threads"])
@pytest.mark.parametrize("cache", ["auto", "buffered"])
def test_whole_checkpoints(
    engine: str, cache: str, doubles: Doubles, tiny_checkpoint: Path, tiny_moe_checkpoint: Path
) -> None:
    options = {**IN_PLACE, **SMALL, "engine": engine}
    for backend, source in (("auto", tiny_checkpoint), ("posix", tiny_moe_checkpoint)):
        got = gdsload.load_file(source, "cuda:0", backend=backend, options=options, cache=cache)
        assert_there(doubles, got, source)
        report = gdsload.last_report()
        assert set(ways()) <= {"direct in place", "buffered in place"}
        assert sum(report.paths.values()) == report.read_bytes >= report.wanted_bytes
        assert report.choice == "posix: in_place was asked for"
        assert "in place" not in report.refusals


@pytest.mark.parametrize("cache", ["auto", "direct"])
def test_what_direct_reads_reach_takes_them(cache: str, doubles: Doubles, checkpoint: Path) -> None:
    for shard in checkpoint.glob("*.safetensors"):
        begins_at(shard, 0)
        page_cache.evict(shard)
    got = gdsload.load_file(checkpoint, "cuda:0", options=IN_PLACE, cache=cache)
    assert_there(doubles, got, checkpoint)
    if cache == "direct":
        assert set(ways()) == {"direct in place"}
    assert "direct I/O in place" not in gdsload.last_report().refusals


def test_what_they_do_not_reach_goes_through_the_page_cache(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 bytes off a border, on a disk that takes addresses of 512 alone; with `cache` "direct" that
    is no way, and it is copied to a border by the device."""
    real = io_mode.open_direct
    monkeypatch.setattr(io_mode, "open_direct", lambda s: real(s)._replace(address_block=512))
    monkeypatch.setattr(io_mode.ShardAccess, "io_mode_of", lambda *_: "direct")
    for shard in checkpoint.glob("*.safetensors"):
        begins_at(shard, 8)
    got = gdsload.load_file(checkpoint, "cuda:0", options=IN_PLACE)
    assert_there(doubles, got, checkpoint)
    assert set(ways()) == {"buffered in place"}
    assert "page cache" in gdsload.last_report().refusals["direct I/O in place"]
    got = gdsload.load_file(checkpoint, "cuda:0", options=IN_PLACE, cache="direct")
    wanted = gdsload.last_report().wanted_bytes
    assert ways().keys() == {"direct in place", "copied on cuda:0"}
    assert ways()["copied on cuda:0"] == wanted
    for name, tensor in stored(checkpoint).items():
        assert torch.equal(got[name], tensor) and not managed(doubles, got[name])


def test_a_disk_that_takes_any_address(doubles: Doubles) -> None:
    """As NVMe does, of 4 bytes: reads stay direct, and what is off by 8 is slid to a border."""
    pieces = [
        ByteRange("a", 0, 3080, 8192),
        ByteRange("b", 0, 11272, 4),
        ByteRange("c", 0, 11276, 100),
    ]
    plan = plan_reads(pieces, [1 << 20], Limits())
    file = Registration(OpenFile("", -1, 1 << 20, -1, 512, 4))
    for reroute in (True, False):
        laid = managed_module.lay_out("cuda:0", plan, pieces, [file], reroute=reroute)
        assert laid.plan is plan and laid.buffered_bytes == 0
        (memory,) = laid.memory
        assert (memory.kind, memory.device, memory.address % 512) == (DRAM, "cuda:0", 248)
        off = {name: (view.region.address + view.offset) % 256 for name, view in laid.views.items()}
        assert off == {"a": 0, "b": 0, "c": 4}
    refused = Registration(OpenFile("", -1, 1 << 20, -1, 512, 512))
    laid = managed_module.lay_out("cuda:0", plan, pieces, [refused], reroute=True)
    assert {transfer.io_mode for transfer in laid.plan.transfers} == {"buffered"}
    assert laid.buffered_bytes == plan.read_bytes
    laid = managed_module.lay_out("cuda:0", plan, pieces, [refused], reroute=False)
    assert laid.plan is plan and laid.memory[0].address % 4096 == 0


def test_odd_tensors(doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little tensors that are off the border of most are put on one by the device, and said."""
    monkeypatch.setattr(sys.modules["gdsload.planning.read_plan"], "LITTLE_BYTES", 64 << 10)
    path = tmp_path / "odd.safetensors"
    saved = odd_tensors()
    safetensors.torch.save_file(saved, path)
    got = gdsload.load_file(path, "cuda:0", options=IN_PLACE)
    copied = 0
    for name, tensor in saved.items():
        assert got[name].shape == tensor.shape and got[name].dtype == tensor.dtype
        assert torch.equal(raw(got[name]), raw(tensor))
        assert got[name].data_ptr() % device_buffers.ALIGN_BYTES == 0 or not tensor.nbytes
        copied += 0 if managed(doubles, got[name]) else tensor.nbytes
    assert managed(doubles, got["e"]) and copied > 0
    assert ways()["copied on cuda:0"] == copied
    assert "does not lie on 256 bytes" in gdsload.last_report().refusals["in place"]


def test_streams_and_single_tensors(doubles: Doubles, tiny_checkpoint: Path) -> None:
    how: dict[str, Any] = {"options": IN_PLACE}
    got = dict(gdsload.stream(tiny_checkpoint, "cuda:0", window_bytes=1 << 16, **how))
    assert_there(doubles, got, tiny_checkpoint)
    with gdsload.safe_open(tiny_checkpoint, device="cuda:0", **how) as opened:
        assert_there(doubles, opened.get_tensors(), tiny_checkpoint)
        name = max(got, key=lambda name: got[name].nbytes)
        assert torch.equal(opened.get_slice(name)[1:3, :2], got[name][1:3, :2])


def test_what_a_prefetch_brings_is_adopted(doubles: Doubles, tiny_checkpoint: Path) -> None:
    for options in (IN_PLACE, {}):
        with gdsload.prefetch(tiny_checkpoint, "cuda:0", options=IN_PLACE) as ahead:
            assert ahead.wait(PATIENCE_SECONDS)
            taken = doubles.cuda_log["allocations"]
            got = gdsload.load_file(tiny_checkpoint, "cuda:0", options=options)
        assert all(road.endswith(" in place") for road in ahead.report.paths)
        assert gdsload.last_report().paths == {"prefetched": ahead.progress().wanted_bytes}
        assert doubles.cuda_log["allocations"] == taken
        assert_there(doubles, got, tiny_checkpoint)
    with gdsload.prefetch(tiny_checkpoint, "cuda:0", tier="pagecache", options=IN_PLACE) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)  # and no ring, which its load will not need


def test_each_window_goes_back_by_itself(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_buffers, "LEAST_BYTES", 1 << 16)
    before = doubles.cuda_log
    got = gdsload.load_file(tiny_checkpoint, "cuda:0", options=IN_PLACE)
    assert_there(doubles, got, tiny_checkpoint)
    assert doubles.cuda_log["allocations"] - before["allocations"] >= 4
    while got:
        got.popitem()
        if doubles.cuda_log["frees"] > before["frees"]:
            break
    assert got


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
@pytest.mark.skipif(transformers.__version__[0] < "5", reason="4.57 moves what was read by torch")
def test_models(
    name: str, dtype: str, doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept stays where it was read; what is cast or merged is cast and merged by torch. Of
    what stays, no memory is warmed up in torch's allocator."""
    monkeypatch.setattr(load_plan, "_places", lambda _: lambda name: "cuda:0")
    model = tinymodels.build(name)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    stock = type(model).from_pretrained(tmp_path, dtype=dtype)
    begin, settled = ModelReader.begin_device_reads, set[str]()

    def noted(self: ModelReader) -> None:
        settled.update(self.parameters_in_memory())
        begin(self)

    monkeypatch.setattr(ModelReader, "begin_device_reads", noted)
    with gdsload.accelerated(options={**IN_PLACE, **SMALL}, window_bytes=1 << 14):
        ours = gdsload.from_pretrained(tmp_path, dtype=dtype)
    report = gdsload.last_report()
    assert (report.integration, report.device) == ("hook", "cuda:0")
    assert "buffered in place" in ways()
    assert tinymodels.differences(stock, ours) == []
    kept = [t for key, t in ours.state_dict().items() if key in settled]
    assert len(kept) == report.fates["keep"] and (kept or dtype == "bfloat16")
    copied = ways().get("copied on cuda:0", 0)
    assert sum(t.nbytes for t in kept if not managed(doubles, t)) <= copied < report.wanted_bytes


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (DISCRETE, "cuda:0 has memory of its own"),
        (JETSON, "no concurrent managed access"),
        (GH200, "has a faster one of its own"),
    ],
)
def test_where_it_is_not_right_it_is_refused(
    machine: int, why: str, doubles: Doubles, tiny_checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    doubles.set(unified=machine)
    for backend in ("auto", "posix"):
        with pytest.raises(BackendUnavailable, match="in_place was asked for") as caught:
            gdsload.load_file(tiny_checkpoint, "cuda:0", backend=backend, options=IN_PLACE)
        assert why in str(caught.value) and why in caught.value.reasons["posix"]
    with (
        gdsload.prefetch(tiny_checkpoint, "cuda:0", options=IN_PLACE) as ahead,
        pytest.raises(BackendUnavailable, match="in_place was asked for"),
    ):
        ahead.wait(PATIENCE_SECONDS)
    if transformers.__version__[0] >= "5":
        monkeypatch.setattr(load_plan, "_places", lambda _: lambda name: "cuda:0")
        tinymodels.build("llama").save_pretrained(tmp_path / "model")
        with (
            gdsload.accelerated(options=IN_PLACE),
            pytest.raises(BackendUnavailable, match="in_place was asked for"),
        ):
            gdsload.from_pretrained(tmp_path / "model")


def test_what_it_cannot_be(doubles: Doubles, tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="in_place='no' is neither True nor False"):
        gdsload.load_file(tiny_checkpoint, "cuda:0", options={"in_place": "no"})
    files = [str(path) for path in sorted(tiny_checkpoint.glob("*.safetensors"))]
    report = gdsload.LoadReport("tiny")
    with (
        ModelReader(files[:1], Options(options=IN_PLACE), report) as weights,
        weights.opened() as file,
    ):
        assert file.get_tensor(file.keys()[0]).nbytes
    assert "moved by torch" in report.refusals["in place"]


def test_a_pool_makes_room(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody uses of it gives way; what it has is copied by the device."""
    with gdsload.warmup.HostPool(1 << 30, pinned=False):
        assert gdsload.prefetch(tiny_checkpoint, tier="pool", cache="buffered").wait()
        asked: list[int] = []
        keeper = host_buffers.current_pool()
        monkeypatch.setattr(keeper, "make_room", asked.append)
        some = list(stored(tiny_checkpoint))[:1]
        gdsload.load_file(tiny_checkpoint, "cuda:0", options=IN_PLACE, names=some)
        assert ways().keys() == {"pool", "copied on cuda:0"} and not asked
        monkeypatch.setattr("gdsload.memory.host_pool.find", lambda *_, **__: {})
        got = gdsload.load_file(tiny_checkpoint, "cuda:0", options=IN_PLACE)
        assert asked == [gdsload.last_report().read_bytes]
        assert_there(doubles, got, tiny_checkpoint)


def test_what_cufile_reads_is_never_in_place(doubles: Doubles, tiny_checkpoint: Path) -> None:
    with pytest.raises(TypeError, match="'gds_mt' has no option 'in_place'"):
        gdsload.load_file(tiny_checkpoint, "cuda:0", backend="gds_mt", options=IN_PLACE)


def test_on_the_host_it_says_nothing_new(doubles: Doubles, tiny_checkpoint: Path) -> None:
    got = gdsload.load_file(tiny_checkpoint, options=IN_PLACE, cache="buffered")
    assert all(torch.equal(raw(got[n]), raw(t)) for n, t in stored(tiny_checkpoint).items())
    assert set(ways()) == {"buffered"}


def test_memory_that_cannot_be_had(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubles.fault("cuMemAllocManaged", CODE, 2, skip=1)
    monkeypatch.setattr(device_buffers, "LEAST_BYTES", 1 << 16)
    with pytest.raises(PlacementError, match="cuMemAllocManaged: CUDA_ERROR_OUT_OF_MEMORY"):
        gdsload.load_file(tiny_checkpoint, "cuda:0", options=IN_PLACE)
    monkeypatch.setattr("gdsload.memory.host_buffers.available_bytes", lambda: 1 << 10)
    with pytest.raises(PlacementError, match="bytes are missing"):
        gdsload.load_file(tiny_checkpoint, "cuda:0", options=IN_PLACE)


def test_a_file_that_was_cut(
    doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"a": torch.arange(100_000)}, path)
    real = managed_module.lay_out

    def cut(*args: Any, **named: Any) -> managed_module.Layout:
        os.truncate(path, 300_000)
        return real(*args, **named)

    monkeypatch.setattr(managed_module, "lay_out", cut)
    with pytest.raises(ShortRead, match="the file ended at byte") as caught:
        gdsload.load_file(path, "cuda:0", options=IN_PLACE)
    del caught


def test_it_can_be_told_to_programs(doubles: Doubles, tiny_checkpoint: Path) -> None:
    gdsload.load_file(tiny_checkpoint, "cuda:0", options=IN_PLACE)
    told = json.loads(gdsload.last_report().to_json())
    assert told["device"] == "cuda:0" and any("in place" in road for road in told["paths"])
