"""Whole checkpoints into GPU memory, over a double: exact bytes, errors, memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
import gpudoubles
from contract import BLOCK
from devicetensors import BACKENDS, TorchCuda, device_tensor, odd_tensors, raw
from gdsload.backends.auto import backend as backend_module
from gdsload.errors import (
    BackendUnavailable,
    CuFileError,
    PlacementError,
    ReadError,
    ShortRead,
    StallError,
)
from gdsload.loading import device_batch, io_mode, torch_device
from gdsload.loading.batch import Batch
from gdsload.loading.session import Session
from gdsload.memory import staging_ring
from gdsload.system import device_name, gpu, shared_libraries
from gpuauto import keep
from gpudoubles import CODE, ERRNO, NEGATIVE, Doubles
from storage import kept_warm


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Doubles]:
    monkeypatch.setattr(torch_device, "empty", device_tensor)
    # torch knows nothing of the double.
    monkeypatch.setattr(
        device_name, "require_target", lambda device: f"cuda:{device}" if device == 0 else device
    )
    with gpudoubles.installed(monkeypatch, tmp_path / "root") as doubles:
        yield doubles


def assert_exact(got: dict[str, torch.Tensor], source: Path) -> None:
    expected: dict[str, torch.Tensor] = {}
    for shard in source.glob("*.safetensors"):
        expected |= safetensors.torch.load_file(shard)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
        assert torch.equal(raw(got[name]), raw(tensor)), name


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_load_file_to_device_returns_exact_bytes(
    backend: str,
    options: dict[str, Any],
    doubles: Doubles,
    tiny_checkpoint: Path,
    tiny_moe_checkpoint: Path,
) -> None:
    before = doubles.cuda_log["used"]
    for source in (tiny_checkpoint, tiny_moe_checkpoint):
        got = gdsload.load_file(source, "cuda:0", backend=backend, options=options)
        assert_exact(got, source)
        assert all(tensor.data_ptr() % 256 == 0 for tensor in got.values())
        report = gdsload.last_report()
        assert report.backend == backend
        used = {path.partition("/")[0] for path, size in report.paths.items() if size}
        assert used == {backend}
        assert sum(report.paths.values()) == report.read_bytes
        del got
    assert staging_ring.release_rings() == 1 << 20
    assert doubles.cuda_log["used"] == before


def test_file_whose_direct_reads_are_larger_than_a_slot_is_read_through_the_page_cache(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as on ZFS with records of 16 MiB."""
    monkeypatch.setattr(io_mode.system, "direct_alignment", lambda fd: (1 << 24, 1 << 24))
    got = gdsload.load_file(tiny_checkpoint, "cuda:0", backend="posix")
    assert_exact(got, tiny_checkpoint)
    refused = [why for what, why in gdsload.last_report().refusals.items() if "direct" in what]
    assert len(refused) == 2 and all("at most 2,097,152" in why for why in refused)
    with pytest.raises(ReadError, match="a direct read has 16,777,216 bytes"):
        gdsload.load_file(tiny_checkpoint, "cuda:0", backend="posix", cache="direct")


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_load_file_to_device_reads_odd_shapes_and_dtypes(
    backend: str, options: dict[str, Any], doubles: Doubles, tmp_path: Path
) -> None:
    saved = odd_tensors()
    path = tmp_path / "odd.safetensors"
    safetensors.torch.save_file(saved, path)
    got = gdsload.load_file(path, "cuda:0", backend=backend, options=options)
    for name, tensor in saved.items():
        assert got[name].shape == tensor.shape and got[name].dtype == tensor.dtype
        assert torch.equal(raw(got[name]), raw(tensor))
    some = gdsload.load_file(path, 0, backend=backend, options=options, names=["d", "a"])
    assert list(some) == ["d", "a"]
    assert some["d"].item() == 2.5


def test_full_device_raises_placement_error(doubles: Doubles, tiny_checkpoint: Path) -> None:
    doubles.set(nbytes=gpu.SPARE_BYTES + 4096)
    before = doubles.cuda_log["copies"]
    with pytest.raises(PlacementError, match="cuda:0") as caught:
        gdsload.load_file(tiny_checkpoint, "cuda:0", backend="posix")
    assert caught.value.missing_bytes
    assert doubles.cuda_log["copies"] == before


@pytest.mark.parametrize(
    ("kind", "value", "error"), [(NEGATIVE, 5008, CuFileError), (ERRNO, 5, ReadError)]
)
def test_cufile_failure_raises_read_error(
    kind: int, value: int, error: type[ReadError], doubles: Doubles, tiny_checkpoint: Path
) -> None:
    before = doubles.cuda_log["used"]
    doubles.fault("cuFileRead", kind, value, times=-1)
    with pytest.raises(error, match=r"model-0000\d") as caught:
        gdsload.load_file(tiny_checkpoint, "cuda:0", backend="gds_mt", options=BACKENDS[2][1])
    assert getattr(caught.value, "code", value) == value
    assert caught.value.path.endswith(".safetensors")
    del caught
    staging_ring.release_rings()
    assert doubles.cuda_log["used"] == before


def test_failed_copy_raises_read_error(doubles: Doubles, tiny_checkpoint: Path) -> None:
    doubles.fault("cuMemcpyAsync", CODE, 719, times=-1)
    with pytest.raises(ReadError, match="CUDA error 719"):
        gdsload.load_file(tiny_checkpoint, "cuda:0", backend="posix", options=BACKENDS[0][1])


SMALL_READS = {"request_bytes": 64 << 10, "ring_bytes": 4 << 20}


def test_copies_of_several_slots_are_started_by_one_call(
    doubles: Doubles, tiny_checkpoint: Path
) -> None:
    before = doubles.cuda_log
    got = gdsload.load_file(tiny_checkpoint, "cuda:0", backend="posix", options=SMALL_READS)
    assert_exact(got, tiny_checkpoint)
    made = {kind: doubles.cuda_log[kind] - before[kind] for kind in ("copies", "batches")}
    assert 0 < made["batches"] < made["copies"] // 2


def test_driver_that_refuses_copies_by_one_call_gets_one_call_for_each(
    doubles: Doubles, tiny_checkpoint: Path
) -> None:
    doubles.fault("cuMemcpyBatchAsync", CODE, 801, times=-1)
    got = gdsload.load_file(tiny_checkpoint, "cuda:0", backend="posix", options=SMALL_READS)
    assert_exact(got, tiny_checkpoint)
    assert doubles.struck == 1  # it is not asked again


def test_older_driver_gets_one_call_for_each_copy(
    doubles: Doubles,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = str(gpudoubles.built("cuda_double", "OLD_DRIVER"))
    monkeypatch.setattr(shared_libraries, "candidates", lambda soname: [older])
    got = gdsload.load_file(tiny_checkpoint, "cuda:0", backend="posix", options=SMALL_READS)
    assert_exact(got, tiny_checkpoint)
    assert not hasattr(ctypes.CDLL(older), "cuMemcpyBatchAsync")


def test_only_the_read_whose_copy_is_refused_is_repeated(
    doubles: Doubles, tiny_checkpoint: Path
) -> None:
    """Copies that one call refuses are started one by one: that tells which it is."""
    doubles.fault("cuMemcpyBatchAsync", CODE, 1, times=-1)
    doubles.fault("cuMemcpyAsync", CODE, 1, skip=3, times=1)
    got = gdsload.load_file(tiny_checkpoint, "cuda:0", backend="posix", options=SMALL_READS)
    assert_exact(got, tiny_checkpoint)
    assert gdsload.last_report().retries == 1


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_device_that_is_busy_is_not_taken_for_storage_that_hangs(
    backend: str,
    options: dict[str, Any],
    doubles: Doubles,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_device, "_torch_cuda", TorchCuda)
    doubles.keep_busy()
    words: dict[str, Any] = {"backend": backend, "options": options}
    with pytest.raises(StallError, match="it was read, and cuda:0 is busy with other work"):
        gdsload.load_file(tiny_checkpoint, "cuda:0", stall_seconds=0.5, **words)


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_truncated_file_raises_short_read(
    backend: str,
    options: dict[str, Any],
    doubles: Doubles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"a": torch.arange(100_000)}, path)
    real = torch_device.follow

    def cut(session: Session) -> None:
        os.truncate(path, 300_000)
        real(session)

    monkeypatch.setattr(torch_device, "follow", cut)
    with pytest.raises(ShortRead, match="the file ended at byte"):
        gdsload.load_file(path, "cuda:0", backend=backend, options=options)


def test_broken_device_does_not_raise_placement_error(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "CUDA error: an illegal memory access was encountered"

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError(said)

    monkeypatch.setattr(torch_device, "empty", broken)
    with pytest.raises(RuntimeError, match=said):
        gdsload.load_file(tiny_checkpoint, "cuda:0", backend="posix")


@pytest.mark.parametrize(
    ("asked", "spare", "held", "configured"),
    [
        (True, 1 << 30, 0, "expandable_segments:True"),
        (False, 5 << 20, 1 << 20, ""),  # it would not leave what is spared
        (False, 1 << 30, 6 << 20, ""),  # torch has so much
        (False, 1 << 30, 0, "max_split_size_mb:128"),  # torch could not carve it
    ],
)
def test_load_of_many_tensors_asks_torch_for_one_block(
    doubles: Doubles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: bool,
    spare: int,
    held: int,
    configured: str,
) -> None:
    """Without room each tensor is allocated on its own."""
    saved = {
        name: torch.randint(0, 255, (size,), dtype=torch.uint8)
        for name, size in (("a", (2 << 20) + 5), ("b", 1000), ("c", 3 << 20))
    }
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(saved, path)
    wanted: list[int] = []

    def empty(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
        wanted.append(shape[0])
        if shape[0] > 4 << 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return device_tensor(shape, dtype, device)

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", configured)
    monkeypatch.setattr(torch_device, "WHOLE_BYTES", 4 << 20)
    monkeypatch.setattr(torch_device, "empty", empty)
    monkeypatch.setattr(torch_device, "reusable_bytes", lambda ordinal: held)
    doubles.set(nbytes=doubles.cuda_log["used"] + gpu.SPARE_BYTES + spare)
    options = {"engine": "threads", "ring_bytes": 1 << 20, "request_bytes": 64 << 10}
    got = gdsload.load_file(path, "cuda:0", backend="posix", options=options)
    assert wanted == [(5 << 20) + 512] * asked + [saved[name].numel() for name in got]
    assert all(torch.equal(got[name], saved[name]) for name in saved)


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_setAllocatorSettings"), reason="needs a newer torch"
)
def test_allocator_that_was_told_not_to_split_is_not_asked_for_one_block() -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    assert torch_device._splits_blocks({})
    try:
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")  # as vLLM does
        assert not torch_device._splits_blocks({})
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize("imported", [True, False])
def test_first_tensors_are_posted_before_the_others_are_planned(
    imported: bool, doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sorted(gdsload.plan(tiny_checkpoint).locations, reverse=True)
    events: list[str] = []
    plan, post = Session.plan, Batch._post

    def planned(self: Session, *words: Any, **named: Any) -> Any:
        events.append("plan")
        return plan(self, *words, **named)

    def posted(self: Batch, memory: Any) -> None:
        post(self, memory)
        events.append("post")

    monkeypatch.setattr(device_batch, "FIRST_BYTES", 32 << 10)
    monkeypatch.setattr(device_batch, "LEAST_BYTES", 1)
    monkeypatch.setattr(torch_device, "torch_imported", lambda: imported)
    monkeypatch.setattr(Session, "plan", planned)
    monkeypatch.setattr(Batch, "_post", posted)
    options = {"ring_bytes": 1 << 20, "request_bytes": 64 << 10}
    got = gdsload.load_file(tiny_checkpoint, "cuda:0", names=names, options=options)
    assert len(events) > 4
    assert events == ["plan", "post"] * (len(events) // 2)
    assert list(got) == names
    assert_exact(got, tiny_checkpoint)


def test_device_too_full_for_all_tensors_reads_none(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_batch, "FIRST_BYTES", 32 << 10)
    doubles.set(nbytes=doubles.cuda_log["used"] + gpu.SPARE_BYTES + (64 << 10))
    with pytest.raises(gdsload.PlacementError, match="are missing"):
        gdsload.load_file(tiny_checkpoint, "cuda:0")
    assert gdsload.last_report().requests == 0


def test_small_model_does_not_open_cufile(doubles: Doubles, tiny_checkpoint: Path) -> None:
    with kept_warm(*tiny_checkpoint.glob("*.safetensors")):
        gdsload.load_file(tiny_checkpoint, "cuda:0", options={"ring_bytes": 16 << 20})
    report = gdsload.last_report()
    assert report.backend == "posix"
    assert "page cache" in report.choice
    gdsload.load_file(tiny_checkpoint, "cuda:0", cache="direct")
    assert "opening cuFile takes too long" in gdsload.last_report().choice
    assert doubles.cufile_log["opens"] == 0


def test_large_model_is_read_by_cufile(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "WORTH_CUFILE_BYTES", 1)
    options = {"ring_bytes": 64 << 20}
    keep(tiny_checkpoint, {"gds_mt": 3e9, "posix": 1e9, "gds": 1e9}, {}, options)
    gdsload.load_file(tiny_checkpoint, "cuda:0", cache="direct", options=options)
    report = gdsload.last_report()
    assert (report.backend, report.engine) == ("gds_mt", "nvfs")
    by_cufile = report.paths.pop("gds_mt/nvfs")
    ends = sum(report.paths.values())  # of two files, which are no whole blocks
    assert 0 < ends < 2 * BLOCK and by_cufile + ends == report.read_bytes
    assert {path.partition("/")[0] for path in report.paths} == {"posix"}


def test_compatibility_mode_is_used_only_if_asked_for(
    doubles: Doubles, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    doubles.set(native=gpudoubles.COMPAT)
    (tmp_path / "root/proc/driver/nvidia-fs/version").unlink()
    options = BACKENDS[2][1]
    with pytest.raises(
        BackendUnavailable,
        match=r'backend="gds_mt", options=\{"allow_compat": True\} uses its compatibility mode',
    ):
        gdsload.load_file(tiny_checkpoint, "cuda:0", backend="gds_mt", options=options)
    gdsload.load_file(
        tiny_checkpoint, "cuda:0", backend="gds_mt", options={**options, "allow_compat": True}
    )
    report = gdsload.last_report()
    assert report.engine == "compat"
    assert "compatibility mode was allowed" in report.refusals["gds_mt/native"]


def test_load_whose_first_tensors_are_empty_goes_on(doubles: Doubles, tmp_path: Path) -> None:
    """More of them than the first group has."""
    tensors = {f"a{number:03}": torch.empty(0) for number in range(device_batch.FIRST_TENSORS + 9)}
    size = device_batch.FIRST_BYTES + (1 << 20)
    tensors["b"] = torch.arange(size // 8, dtype=torch.int64)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path)
    doubles.set(nbytes=1 << 30)
    got = gdsload.load_file(path, "cuda:0")
    assert got.keys() == tensors.keys()
    assert torch.equal(raw(got["b"]), raw(tensors["b"]))


def test_allocator_that_counts_nothing_tells_itself_what_it_lacks(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As RMM's in place of torch's own."""

    class Uncounted(TorchCuda):
        def memory_stats_as_nested_dict(self, ordinal: int) -> dict[str, Any]:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch_device, "_torch_cuda", Uncounted)
    doubles.set(nbytes=gpu.SPARE_BYTES)  # the rest is this allocator's
    monkeypatch.setattr(device_batch, "FIRST_BYTES", 1)
    assert gdsload.load_file(tiny_checkpoint, "cuda:0")
