"""Checksums: a difference is found on every way to load, and nothing is handed out."""

from __future__ import annotations

import builtins
import errno
import hashlib
import json
import os
import random
import re
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as reference_load_file, save_file

import gdsload
from command import answer, process, run
from devicetensors import BACKENDS, device_tensor, odd_tensors, raw
from gated import gated
from gdsload import warmup
from gdsload._native.memory import Region
from gdsload._native.pump import set_throttle
from gdsload.checkpoint import Checkpoint, Shard, manifest as manifest_module
from gdsload.cli import integrity as integrity_commands
from gdsload.errors import (
    CheckpointError,
    CheckpointNotFound,
    GdsloadError,
    IntegrityError,
    PartialLoad,
    ReadError,
    StallError,
)
from gdsload.loading import destinations, integrity, window_writer
from gdsload.loading.claims import Offer
from gdsload.loading.integrity import Verifier
from gdsload.planning.read_plan import FILE_ORDER
from gdsload.planning.tensor_slices import PartName, rows_of
from gdsload.readahead.prefetch import PrefetchCancelled
from gdsload.readahead.prefetch_batch import PrefetchBatch
from gdsload.report import LoadReport
from gpudoubles import Doubles
from waiting import wait_for
from windows import small_windows

NORM = "model.norm.weight"
ONE = "model-0.safetensors"
PATIENCE_SECONDS = 120.0
FLIPS = int(os.environ.get("GDSLOAD_FLIPS", "200"))


def record(source: Path, algorithm: str = "sha256", *words: str | Path) -> dict[str, Any]:
    """Writes a manifest. SHA-256 needs no library."""
    return dict(answer("manifest", source, "--algorithm", algorithm, *words))


def flip(path: Path, offset: int, bit: int = 1) -> None:
    """Flips a bit and keeps the size."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bit]))


def flip_in(source: Path, name: str, byte: int = 0) -> Path:
    """Flips a bit of a tensor; returns the file."""
    with Checkpoint.open(source) as checkpoint:
        info = checkpoint.info(name)
        path = Path(checkpoint.shards[info.shard].path)
    flip(path, info.offset + byte)
    return path


@pytest.fixture
def source(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint with a manifest, to be damaged."""
    copied = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    record(copied)
    return copied


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 1000 bytes, so that small tensors have several."""
    from gdsload.loading import integrity

    monkeypatch.setattr(manifest_module, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(integrity, "BLOCK_BYTES", 1000)


def by_load_file(source: Path) -> Any:
    return gdsload.load_file(source, verify="checksum")


def by_names(source: Path) -> Any:
    return gdsload.load_file(source, verify="checksum", names=[NORM])


def by_stream(source: Path) -> Any:
    return dict(gdsload.stream(source, verify="checksum", window_bytes=50_000))


def by_safe_open(source: Path) -> Any:
    with gdsload.safe_open(source, verify="checksum") as opened:
        return opened.get_tensors()


def by_direct_reads(source: Path) -> Any:
    return gdsload.load_file(source, verify="checksum", cache="direct")


def by_pool(source: Path) -> Any:
    with warmup.HostPool(8 << 20):
        return gdsload.load_file(source, verify="checksum")


def after_prefetch(source: Path) -> Any:
    with gdsload.prefetch(source):
        return gdsload.load_file(source, verify="checksum")


def by_prefetch(source: Path) -> Any:
    with gdsload.prefetch(source, verify="checksum", cache="buffered") as ahead:
        ahead.wait()
        return gdsload.load_file(source)


def by_load_into(source: Path) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    for shard in source.glob("*.safetensors"):
        tensors |= reference_load_file(shard)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    gdsload.load_into(targets, source, verify="checksum")
    return targets


def by_model(source: Path) -> Any:
    return gdsload.from_pretrained(source, verify="checksum", dtype="bfloat16").state_dict()


def by_converted_model(source: Path) -> Any:
    return gdsload.from_pretrained(source, verify="checksum", dtype="float32").state_dict()


def by_accelerated(source: Path) -> Any:
    with small_windows(10_000, 20_000), gdsload.accelerated(verify="checksum"):
        return gdsload.from_pretrained(source, dtype="float32").state_dict()


WAYS = [
    by_load_file, by_names, by_stream, by_safe_open, by_direct_reads, by_pool, after_prefetch,
    by_prefetch, by_load_into, by_model, by_converted_model, by_accelerated,
]  # fmt: skip


@pytest.mark.parametrize("load", WAYS)
def test_verified_load_of_intact_files_returns_exact_tensors(
    load: Callable[[Path], Any], source: Path
) -> None:
    tensors = load(source)
    expected: dict[str, torch.Tensor] = {}
    for shard in source.glob("*.safetensors"):
        expected |= reference_load_file(shard)
    assert NORM in tensors
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    if load is not by_prefetch:  # the prefetch has compared
        report = gdsload.last_report()
        assert report.verify == "checksum"
        assert report.verified_bytes == report.wanted_bytes > 0
        assert "not verified: 0 B" in report.summary()


@pytest.mark.parametrize("load", WAYS)
def test_flipped_bit_ends_every_load_in_integrity_error(
    load: Callable[[Path], Any], source: Path
) -> None:
    path = flip_in(source, NORM, 3)
    with pytest.raises(IntegrityError, match=NORM) as caught:
        load(source)
    error = caught.value
    assert error.tensor == NORM and os.path.samefile(error.path, path)
    with Checkpoint.open(source) as checkpoint:
        info = checkpoint.info(NORM)
    assert (error.offset, error.nbytes) == (info.offset, info.nbytes)


def test_load_into_has_written_only_windows_without_a_difference(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_writer, "WINDOW_BYTES", 20_000)
    with Checkpoint.open(source) as checkpoint:
        last = max(checkpoint.tensors.values(), key=FILE_ORDER)
    expected = {name: tensor.clone() for name, tensor in gdsload.load_file(source).items()}
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    flip_in(source, last.name)
    with pytest.raises(PartialLoad) as caught:
        gdsload.load_into(targets, source, verify="checksum")
    assert isinstance(caught.value.__cause__, IntegrityError)
    assert caught.value.complete and last.name not in caught.value.complete
    assert not targets[last.name].any()
    for name in caught.value.complete:
        assert torch.equal(targets[name], expected[name])


def test_error_of_drop_in_functions_is_a_safetensors_error(source: Path) -> None:
    from safetensors import SafetensorError

    flip_in(source, NORM)
    with pytest.raises(SafetensorError) as caught:
        by_load_file(source)
    assert isinstance(caught.value, IntegrityError) and isinstance(caught.value, ValueError)


def test_prefetch_that_is_cancelled_while_it_compares_has_not_succeeded(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_in(source, NORM)
    compares, go = threading.Event(), threading.Event()
    check = Verifier.check_in_memory

    def slow(*given: Any) -> None:
        compares.set()
        assert go.wait(PATIENCE_SECONDS)
        check(*given)

    monkeypatch.setattr(Verifier, "check_in_memory", slow)
    ahead = gdsload.prefetch(source, verify="checksum", cache="buffered")
    assert compares.wait(PATIENCE_SECONDS)
    ahead.cancel()
    go.set()
    with pytest.raises(PrefetchCancelled):
        ahead.wait(PATIENCE_SECONDS)
    ahead.close()


def test_load_waits_for_a_prefetch_as_long_as_it_compares(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compares, waits = threading.Event(), threading.Event()
    check, wait = Verifier.check_in_memory, Offer.await_filled

    def slow(*given: Any) -> None:
        compares.set()
        assert waits.wait(PATIENCE_SECONDS)
        check(*given)

    monkeypatch.setattr(Verifier, "check_in_memory", slow)
    monkeypatch.setattr(Offer, "await_filled", lambda *given: (waits.set(), wait(*given))[1])
    with gdsload.prefetch(source, verify="checksum", cache="buffered"):
        assert compares.wait(PATIENCE_SECONDS)
        gdsload.load_file(source)
    assert set(gdsload.last_report().paths) == {"prefetched"}


def test_load_without_verify_does_not_read_the_manifest(source: Path) -> None:
    (source / manifest_module.MANIFEST_NAME).write_text("not a manifest")
    assert gdsload.load_file(source)
    assert gdsload.last_report().verified_bytes == 0
    with pytest.raises(CheckpointError, match="not a valid manifest"):
        by_load_file(source)


def test_any_flipped_bit_is_found(source: Path) -> None:
    draw = random.Random(9)
    files = sorted(source.glob("*.safetensors"))
    found = 0
    for _ in range(FLIPS):
        path = draw.choice(files)
        offset, bit = draw.randrange(path.stat().st_size), 1 << draw.randrange(8)
        flip(path, offset, bit)
        with pytest.raises((IntegrityError, CheckpointError)):  # the latter for an invalid header
            by_load_file(source)
        flip(path, offset, bit)
        found += 1
    assert found == FLIPS
    by_load_file(source)


def test_flipped_bit_of_a_header_names_the_file(source: Path) -> None:
    path = sorted(source.glob("*.safetensors"))[0]
    raw_bytes = path.read_bytes()
    flip(path, raw_bytes.index(b"weight") + 1, 2)  # another name: still a valid header
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(IntegrityError, match="its header") as caught:
        by_load_file(source)
    assert caught.value.tensor is None


@pytest.mark.usefixtures("small_blocks")
def test_report_counts_the_bytes_of_blocks_that_are_not_compared(tmp_path: Path) -> None:
    """Whole rows are read for their columns: more bytes are compared than are wanted."""
    save_file(
        {"w": torch.arange(1000, dtype=torch.int32).reshape(10, 100)}, tmp_path / "m.safetensors"
    )
    record(tmp_path)
    columns = {"w": (slice(5, None), slice(0, 50))}  # blocks 2 and 3 wholly; bytes 2000 to 4000
    gdsload.load_file(tmp_path, verify="checksum", slices=columns)
    report = gdsload.last_report()
    assert (report.wanted_bytes, report.unverified_bytes) == (1000, 0)
    columns = {"w": (slice(4, None), slice(0, 50))}  # from byte 1600, in block 1
    gdsload.load_file(tmp_path, verify="checksum", slices=columns)
    report = gdsload.last_report()
    assert (report.wanted_bytes, report.verified_bytes, report.unverified_bytes) == (
        1200,
        2000,
        400,
    )
    assert "not verified: 400 B" in report.summary()


@pytest.mark.usefixtures("small_blocks")
def test_slice_is_compared_in_the_blocks_that_it_contains(tmp_path: Path) -> None:
    save_file(
        {"w": torch.arange(1000, dtype=torch.int32).reshape(10, 100)}, tmp_path / "m.safetensors"
    )
    record(tmp_path)
    with gdsload.safe_open(tmp_path, verify="checksum") as opened:
        rows = opened.get_slice("w")
        assert rows[2:9].shape == (7, 100)  # bytes 800 to 3600: blocks 1 and 2
        report = gdsload.last_report()
        assert (report.wanted_bytes, report.verified_bytes) == (2800, 2000)
        assert rows[9:].shape == (1, 100)
        assert gdsload.last_report().verified_bytes == 0
    flip_in(tmp_path, "w", 2999)
    with gdsload.safe_open(tmp_path, verify="checksum") as opened:
        rows = opened.get_slice("w")
        assert rows[:5].shape == (5, 100)
        with pytest.raises(IntegrityError) as caught:
            rows[2:9]
    assert caught.value.nbytes == 1000


def test_differing_bytes_do_not_enter_the_pool(source: Path) -> None:
    flip_in(source, NORM)
    with warmup.HostPool(32 << 20):
        for load in (by_load_file, by_model, by_stream):
            with pytest.raises(IntegrityError):
                load(source)
        ahead = gdsload.prefetch(source, tier="pool", verify="checksum")
        with ahead, pytest.raises(IntegrityError):
            ahead.wait()
        gdsload.load_file(source, names=[NORM])
        assert gdsload.last_report().paths.get("pool", 0) == 0


def test_bytes_of_a_pool_are_compared(source: Path) -> None:
    with warmup.HostPool(8 << 20):
        gdsload.load_file(source, cache="buffered")
        by_load_file(source)
        report = gdsload.last_report()
    assert report.paths["pool"] == report.verified_bytes == report.wanted_bytes


@pytest.fixture
def doubles(loading: Doubles) -> Doubles:
    return loading


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_bytes_on_a_device_are_compared(
    backend: str, options: dict[str, Any], doubles: Doubles, tmp_path: Path
) -> None:
    saved = odd_tensors()
    save_file(saved, tmp_path / "odd.safetensors")
    record(tmp_path)

    def load() -> dict[str, torch.Tensor]:
        words: dict[str, Any] = {"backend": backend, "options": options, "verify": "checksum"}
        return gdsload.load_file(tmp_path, "cuda:0", **words)

    got = load()
    assert all(torch.equal(raw(got[name]), raw(tensor)) for name, tensor in saved.items())
    report = gdsload.last_report()
    assert report.backend == backend and report.verified_bytes == report.wanted_bytes
    flip_in(tmp_path, "e", 150_000)
    with pytest.raises(IntegrityError, match="tensor 'e'"):
        load()


@pytest.fixture
def device_targets(
    doubles: Doubles, source: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    """Tensors of cuda:0, for those of the checkpoint."""
    monkeypatch.setattr(destinations, "device_of", lambda tensor: "cuda:0")
    return {
        name: device_tensor(tensor.shape, tensor.dtype, "cuda:0").fill_(0)
        for name, tensor in gdsload.load_file(source).items()
    }


def test_difference_before_anything_was_written_to_a_device_is_no_partial_load(
    device_targets: dict[str, torch.Tensor], source: Path
) -> None:
    flip_in(source, NORM)
    with pytest.raises(IntegrityError, match=NORM):
        gdsload.load_into(device_targets, source, verify="checksum", backend="posix")
    assert not any(tensor.any() for tensor in device_targets.values())


def test_difference_in_the_last_window_of_a_device_leaves_nothing_undefined(
    device_targets: dict[str, torch.Tensor], source: Path
) -> None:
    with Checkpoint.open(source) as checkpoint:
        last = max(checkpoint.tensors.values(), key=FILE_ORDER)
    flip_in(source, last.name)
    with small_windows(20_000), pytest.raises(PartialLoad) as caught:
        gdsload.load_into(device_targets, source, verify="checksum", backend="posix")
    assert caught.value.complete and caught.value.undefined == ()
    assert last.name in caught.value.unchanged and not device_targets[last.name].any()


def test_prefetch_compares_what_another_one_has_read_without_comparing(source: Path) -> None:
    with (
        gdsload.prefetch(source, cache="direct") as plain,
        gdsload.prefetch(source, cache="direct", verify="checksum") as compared,
    ):
        plain.wait()
        compared.wait()
        nbytes = compared.progress().wanted_bytes
        assert compared.report.verified_bytes == nbytes > 0
        gdsload.load_file(source)
        assert compared.progress().claimed_bytes == nbytes
        assert plain.progress().claimed_bytes == 0


@pytest.mark.usefixtures("no_collector")
def test_failed_prefetch_that_compares_frees_its_memory_before_it_ends(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions: list[weakref.ref[Region]] = []
    real = PrefetchBatch.of

    def of(*words: Any) -> PrefetchBatch:
        batch = real(*words)
        regions.extend(weakref.ref(view.region) for view in batch.views.values())
        return batch

    monkeypatch.setattr(PrefetchBatch, "of", of)
    words: dict[str, Any] = {"verify": "checksum", "backend": "gated", "cache": "direct"}
    with gated() as gate, gdsload.prefetch(source, **words) as ahead:
        gate.open(error=errno.EIO)
        gate.requests.clear()
        with pytest.raises(ReadError):
            ahead.wait(PATIENCE_SECONDS)
        assert regions and not [region for region in regions if region() is not None]


def test_second_prefetch_that_compares_waits_for_the_first(source: Path) -> None:
    options: dict[str, Any] = {"verify": "checksum", "cache": "buffered"}
    with gated() as gate, gdsload.prefetch(source, backend="gated", **options) as first:
        gate.request(0)
        with gdsload.prefetch(source, backend="gated", **options) as second:
            assert second.wait(0.1) is False
            gate.open(0)
            assert first.wait(60) and second.wait(60)
            assert len(gate.requests) == 1
            assert second.report.read_bytes == 0 < first.report.verified_bytes


def test_prefetch_that_compares_does_not_wait_for_one_of_other_tensors(source: Path) -> None:
    with Checkpoint.open(source) as checkpoint:
        one, other, *_ = checkpoint.tensors
    options: dict[str, Any] = {"verify": "checksum", "cache": "buffered"}
    with (
        gated() as gate,
        gdsload.prefetch(source, names=[one], backend="gated", **options) as first,
        gdsload.prefetch(source, names=[other], backend="gated", **options) as second,
    ):
        gate.request(1)  # while nothing of the first one has been read
        gate.open(0)
        gate.open(1)
        assert first.wait(60) and second.wait(60)


def test_prefetch_without_checksums_yields_to_loads_that_want_other_files(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[PrefetchBatch] = []
    hurried: list[PrefetchBatch] = []
    look = PrefetchBatch.look

    def noted(batch: PrefetchBatch) -> bool:
        looks.append(batch)
        return look(batch)

    monkeypatch.setattr(PrefetchBatch, "look", noted)
    monkeypatch.setattr(PrefetchBatch, "hurry", lambda batch: hurried.append(batch))
    set_throttle(0, 1)
    try:
        with gdsload.prefetch(source, cache="buffered", options={"engine": "threads"}) as ahead:
            wait_for(lambda: ahead.progress().wanted_bytes > 0)
            ahead._offer.awaited = True  # by a load of a file beside it
            looks.clear()
            wait_for(lambda: len(looks) > 1)  # the prefetch has seen it
            assert not hurried
            assert ahead.progress().landed_bytes < ahead.progress().wanted_bytes
    finally:
        set_throttle(0, 0)


def test_prefetch_that_compares_hurries_once_a_load_waits(source: Path) -> None:
    set_throttle(0, 1)  # reads ahead would never end
    try:
        options: dict[str, Any] = {"verify": "checksum", "cache": "buffered"}
        with gdsload.prefetch(source, options={"engine": "threads"}, **options) as ahead:
            gdsload.load_file(source)
            assert set(gdsload.last_report().paths) == {"prefetched"}
            assert ahead.wait()
    finally:
        set_throttle(0, 0)


def test_manifest_is_of_the_files_of_one_directory(tmp_path: Path) -> None:
    files = [tmp_path / name / "model.safetensors" for name in "ab"]
    for number, file in enumerate(files, 1):
        file.parent.mkdir()
        save_file({file.parent.name: torch.zeros(number)}, file)
        record(file.parent)
    assert set(gdsload.load_file(files)) == {"a", "b"}
    with pytest.raises(CheckpointError, match="several directories"):
        gdsload.load_file(files, verify="checksum")


def test_prefetch_to_a_device_compares_in_host_memory(doubles: Doubles, source: Path) -> None:
    before = doubles.cuda_log["copies"]
    with gdsload.prefetch(source, "cuda:0", verify="checksum") as ahead:
        ahead.wait()
        assert ahead.report.verified_bytes == ahead.report.wanted_bytes > 0
        assert doubles.cuda_log["copies"] == before
        got = gdsload.load_file(source, "cuda:0", backend="posix", options=BACKENDS[0][1])
        assert gdsload.last_report().read_bytes == 0
    expected = gdsload.load_file(source)
    assert got.keys() == expected.keys()
    assert all(torch.equal(raw(got[name]), raw(tensor)) for name, tensor in expected.items())


# --- manifests ----------------------------------------------------------------------------------


def test_missing_manifest_names_the_command(tiny_checkpoint: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=f"gdsload manifest {tiny_checkpoint}"):
        by_load_file(tiny_checkpoint)


def test_manifest_elsewhere_is_found_by_its_path(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "sums.json"
    record(tiny_checkpoint, "sha256", "--output", path)
    gdsload.load_file(tiny_checkpoint, verify=path)
    assert gdsload.last_report().verify == str(path)
    assert run("verify", tiny_checkpoint, "--manifest", path).exit_code == 0


def test_manifest_has_the_checksums_that_other_programs_compute(tmp_path: Path) -> None:
    path, manifest = tmp_path / "model.safetensors", tmp_path / "sums.json"
    save_file({"w": torch.arange(7, dtype=torch.int16)}, path)
    record(path, "sha256", "--output", manifest)
    raw_bytes = path.read_bytes()
    entry = json.loads(manifest.read_text())["files"][path.name]
    assert entry == {
        "size": len(raw_bytes),
        "header": hashlib.sha256(raw_bytes[:-14]).hexdigest(),
        "tensors": {"w": hashlib.sha256(raw_bytes[-14:]).hexdigest()},
    }


def test_manifest_keeps_entries_of_other_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: torch.ones(3)}, tmp_path / f"{name}.safetensors")
        record(tmp_path / f"{name}.safetensors")
    for name in ("a", "b"):
        gdsload.load_file(tmp_path / f"{name}.safetensors", verify="checksum")
    assert os.listdir(tmp_path).count(manifest_module.MANIFEST_NAME) == 1
    assert len(os.listdir(tmp_path)) == 3  # and no scratch file


def test_file_of_another_size_or_without_entry_is_refused(source: Path) -> None:
    path = source / manifest_module.MANIFEST_NAME
    top = json.loads(path.read_text())
    entry = next(iter(top["files"].values()))
    entry["size"] += 1
    path.write_text(json.dumps(top))
    with pytest.raises(IntegrityError, match="according to the manifest"):
        by_load_file(source)
    top["files"] = {}
    path.write_text(json.dumps(top))
    with pytest.raises(IntegrityError, match="has no checksums of it"):
        by_load_file(source)


def test_tensor_without_checksum_is_refused(source: Path) -> None:
    path = source / manifest_module.MANIFEST_NAME
    top = json.loads(path.read_text())
    for entry in top["files"].values():
        entry["tensors"].pop(NORM, None)
    path.write_text(json.dumps(top))
    with pytest.raises(IntegrityError, match="have no checksum"):
        by_load_file(source)


def test_manifest_of_tiny_blocks_is_refused_before_they_are_listed(source: Path) -> None:
    path = source / manifest_module.MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "block_bytes": 1}))
    with pytest.raises(IntegrityError, match="have no checksum"):
        by_load_file(source)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"}, {"algorithm": "md5"}, {"algorithm": []}, {"block_bytes": 0},
        {"block_bytes": True}, {"files": []}, {"files": {"a": 1}},
        {"files": {"a": {"size": 1, "header": "xyz", "tensors": {}}}},
        {"files": {"a": {"size": 1, "header": "", "tensors": {"w": "abc"}}}},
        {"files": {"a": {"size": 1, "header": "", "tensors": {"w": 5}}}},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_manifest_is_a_checkpoint_error(change: dict[str, Any], source: Path) -> None:
    path = source / manifest_module.MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match="not a valid manifest"):
        by_load_file(source)
    path.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not a valid manifest"):
        by_load_file(source)


def test_fast_checksums_find_a_flipped_bit(source: Path) -> None:
    pytest.importorskip("xxhash")
    record(source, "xxh3_128")
    by_load_file(source)
    flip_in(source, NORM)
    with pytest.raises(IntegrityError):
        by_load_file(source)
    with pytest.raises(IntegrityError, match="its checksums are of xxh3_128"):
        gdsload.load_file(source, verify="sha256")


def test_missing_library_is_named(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "xxhash":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(GdsloadError, match=r"pip install '\.\[verify\]'"):
        manifest_module.hash_function("xxh3_128")
    result = run("manifest", tiny_checkpoint)
    assert result.exit_code == 1 and "pip install '.[verify]'" in result.stderr


def maps_a_file_of(folder: Path) -> bool:
    with open("/proc/self/maps") as lines:
        return any(str(folder) in line for line in lines)


@pytest.mark.parametrize("how", [{"verify": "checksum"}, {"cache": "direct"}], ids=str)
def test_load_after_a_prefetch_that_maps_files_owns_its_bytes(
    how: dict[str, Any], source: Path
) -> None:
    for shard in source.glob("*.safetensors"):
        shard.read_bytes()
    with gdsload.prefetch(source) as ahead:
        ahead.wait()
        assert maps_a_file_of(source)
        tensors = gdsload.load_file(source, **how)
    assert tensors and not maps_a_file_of(source)


@pytest.fixture
def unsorted(tmp_path: Path, small_blocks: None) -> Path:
    """A checkpoint whose tensors are in another order than their names, with a manifest."""
    folder = tmp_path / "unsorted"
    folder.mkdir()
    for number, (first, second) in enumerate((("z", "b"), ("y", "a"))):
        tensors = {
            first: torch.arange(4000.0).reshape(40, 100) + number,
            second: torch.arange(9000).reshape(90, 100).to(torch.uint8) + number,
            f"empty{number}": torch.zeros(0),
        }
        save_file(tensors, folder / f"model-{number}.safetensors")
    record(folder)
    return folder


def test_blocks_of_rows_are_those_of_their_tensor(unsorted: Path) -> None:
    with Checkpoint.open(unsorted) as checkpoint:
        verifier = integrity.open_verifier(checkpoint, "checksum", LoadReport(""))
        assert verifier is not None
        for info in checkpoint.tensors.values():
            if not info.nbytes:
                assert not [*verifier.blocks_of(info)]
                continue
            shard = checkpoint.shards[info.shard]
            assert sum(block.nbytes for block in verifier.blocks_of(info)) == info.nbytes
            rows = rows_of(info, 11, 40)._replace(name=PartName(info.name, "[11:40]"))
            blocks = [*verifier.blocks_of(rows)]
            assert {block.tensor for block in blocks} == {info} and len(blocks) >= 2
            for block in blocks:
                assert rows.offset <= block.offset
                assert block.offset + block.nbytes <= rows.offset + rows.nbytes
                data = shard.read(block.offset, block.nbytes)
                verifier.check_block(block, data)
                with pytest.raises(IntegrityError, match="differ from their checksum"):
                    verifier.check_block(block, bytes([data[0] ^ 1]) + data[1:])


def test_blocks_are_recorded_in_any_order(unsorted: Path) -> None:
    with Checkpoint.open(unsorted) as checkpoint:
        recorder = integrity.Recorder(checkpoint, "sha256")
        for info in checkpoint.tensors.values():
            for block in reversed([*recorder.blocks_of(info)]):
                recorder.check_block(block, checkpoint.shards[info.shard].read(*block[2:]))
        found = recorder.files()
        for info in checkpoint.tensors.values():
            shard = checkpoint.shards[info.shard]
            data = shard.read(info.offset, info.nbytes)
            parts = [data[at : at + 1000] for at in range(0, len(data), 1000)]
            sums = "".join(hashlib.sha256(part).hexdigest() for part in parts)
            assert found[shard.name].tensors.get(info.name, "") == sums
            assert found[shard.name].size == shard.size


@pytest.mark.parametrize(
    "change,text",
    [
        (lambda facts: facts.clear(), "has no checksums of it"),
        (lambda facts: facts[ONE].update(size=7), "but 7 according to the manifest"),
        (lambda facts: facts[ONE].update(header="0" * 64), "its header, bytes 0 to "),
    ],
)
def test_header_that_differs_is_named(
    change: Callable[[dict[str, Any]], object], text: str, unsorted: Path
) -> None:
    path = unsorted / manifest_module.MANIFEST_NAME
    facts = json.loads(path.read_text())
    change(facts["files"])
    path.write_text(json.dumps(facts))
    with Checkpoint.open(unsorted) as checkpoint:
        with pytest.raises(IntegrityError, match=text) as caught:
            integrity.open_verifier(checkpoint, "checksum", LoadReport(""))
        shard = checkpoint.shards[0]
        assert caught.value.path == shard.path == str(unsorted / ONE)
        assert caught.value.nbytes == shard.data_start


# --- the hub cache ------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A hub cache with the model "org/model", whose blob is named by its SHA-256."""
    repo = tmp_path / "models--org--model"
    save_file({"w": torch.arange(5000.0)}, tmp_path / "new")
    digest = hashlib.sha256((tmp_path / "new").read_bytes()).hexdigest()
    (repo / "blobs").mkdir(parents=True)
    (tmp_path / "new").rename(repo / "blobs" / digest)
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{digest}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    return tmp_path


def test_hub_blobs_are_compared_with_their_names(hub: Path) -> None:
    where: dict[str, Any] = {"cache_dir": hub, "verify": "sha256"}
    tensors = gdsload.load_file("org/model", **where)
    assert tensors and not maps_a_file_of(hub), "a mapped file may change after it was compared"
    blob = next((hub / "models--org--model" / "blobs").iterdir())
    assert gdsload.last_report().verified_bytes == blob.stat().st_size
    verify = ("verify", "org/model", "--method", "sha256", "--cache-dir", hub)
    assert run(*verify).output.startswith("org/model: verified")  # there is no manifest
    assert answer(*verify)["manifest"] is None
    flip(blob, blob.stat().st_size - 1)
    with pytest.raises(IntegrityError, match="SHA-256"):
        gdsload.load_file("org/model", **where)
    with pytest.raises(IntegrityError):
        next(gdsload.stream("org/model", **where))
    assert run(*verify).exit_code == 1


def test_hub_blobs_are_compared_to_their_last_byte(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In reads of a limited size, each file of several with its own name."""
    snapshot = hub / "models--org--model" / "snapshots" / "abc"
    blobs = [(snapshot / "model.safetensors").resolve()]
    (snapshot / "model.safetensors").rename(snapshot / "model-1.safetensors")
    save_file({"v": torch.arange(3000.0)}, hub / "new")
    blobs.append(blobs[0].with_name(hashlib.sha256((hub / "new").read_bytes()).hexdigest()))
    (hub / "new").rename(blobs[1])
    (snapshot / "model-2.safetensors").symlink_to(f"../../blobs/{blobs[1].name}")
    total = sum(blob.stat().st_size for blob in blobs)
    monkeypatch.setattr(integrity, "_READ_BYTES", 1000)
    reads, moved, report = [], [], LoadReport("")
    read = Shard.read
    monkeypatch.setattr(Shard, "read", lambda *it: reads.append(it[2]) or read(*it))
    with Checkpoint.open(snapshot) as checkpoint:
        reads.clear()
        assert integrity.open_verifier(checkpoint, "sha256", report, moved.append) is None
    assert sum(reads) == sum(moved) == report.verified_bytes == total
    assert max(reads) <= 1000
    assert {span.name for span in report.spans if span.track == "phases"} == {"verify"}
    for blob in blobs:
        flip(blob, blob.stat().st_size - 1)
        with pytest.raises(IntegrityError, match="SHA-256") as caught:
            gdsload.load_file(snapshot, verify="sha256")
        assert os.path.realpath(caught.value.path) == str(blob)
        assert caught.value.nbytes == blob.stat().st_size
        flip(blob, blob.stat().st_size - 1)


def test_hub_blobs_count_beside_a_manifest_of_other_checksums(hub: Path) -> None:
    pytest.importorskip("xxhash")
    snapshot = hub / "models--org--model" / "snapshots" / "abc"
    record(snapshot, "xxh3_128")
    assert gdsload.load_file("org/model", cache_dir=hub, verify="sha256")
    size = (snapshot / "model.safetensors").stat().st_size
    assert gdsload.last_report().verified_bytes == size


def test_verified_load_into_existing_tensors_maps_no_file(hub: Path) -> None:
    target = {"w": torch.zeros(5000)}
    gdsload.load_into(target, "org/model", cache_dir=hub)
    assert "mapped" in gdsload.last_report().paths  # it is warm
    gdsload.load_into(target, "org/model", cache_dir=hub, verify="sha256")
    assert "mapped" not in gdsload.last_report().paths


def test_manifest_of_other_checksums_is_no_sha256(source: Path) -> None:
    pytest.importorskip("xxhash")
    record(source, "xxh3_128")
    command = f"`gdsload manifest {source} --algorithm sha256`"
    complaint = f"its checksums are of xxh3_128; {re.escape(command)} replaces them"
    with pytest.raises(IntegrityError, match=complaint) as caught:
        gdsload.load_file(source, verify="sha256")
    assert caught.value.path == str(source / manifest_module.MANIFEST_NAME)


def test_sha256_without_hub_or_manifest_is_refused(tiny_checkpoint: Path) -> None:
    command = f"`gdsload manifest {tiny_checkpoint} --algorithm sha256` writes it"
    with pytest.raises(CheckpointNotFound, match=re.escape(command)):
        gdsload.load_file(tiny_checkpoint, verify="sha256")


# --- storage that hangs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "owner", "call"),
    [
        ("checksum", manifest_module, "read_small"),
        (manifest_module.MANIFEST_NAME, manifest_module, "read_small"),
        ("checksum", Verifier, "header_checksum"),
        ("sha256", Shard, "read"),
    ],
)
def test_storage_that_hangs_while_checksums_are_read_is_a_stall(
    source: Path, hub: Path, monkeypatch: pytest.MonkeyPatch, method: str, owner: Any, call: str
) -> None:
    answers, real = threading.Event(), getattr(owner, call)

    def hangs(*given: Any, **words: Any) -> Any:
        answers.wait(10.0)
        return real(*given, **words)

    model = hub / "models--org--model" / "snapshots" / "abc" if method == "sha256" else source
    verify = source / method if method == manifest_module.MANIFEST_NAME else method
    with Checkpoint.open(model, stall_seconds=1.0) as checkpoint:
        monkeypatch.setattr(owner, call, hangs)
        try:
            with pytest.raises(StallError, match="1 s"):
                integrity.open_verifier(checkpoint, verify, LoadReport(""))
        finally:
            answers.set()


# --- arguments and commands ---------------------------------------------------------------------


def test_unknown_or_contradicting_verify_is_refused_by_the_call(tiny_checkpoint: Path) -> None:
    for load in (gdsload.load_file, gdsload.stream, gdsload.safe_open, gdsload.prefetch):
        with pytest.raises(ValueError, match="must be one of size, checksum, sha256"):
            load(tiny_checkpoint, verify="md5")
        with pytest.raises(ValueError, match="mapped file may change"):
            load(tiny_checkpoint, verify="checksum", cache="mapped")
    with pytest.raises(ValueError, match="must be one of"):
        gdsload.from_pretrained(tiny_checkpoint, verify="md5")
    with pytest.raises(ValueError, match="tier='pagecache'"):
        gdsload.prefetch(tiny_checkpoint, tier="pagecache", verify="checksum")


def test_url_of_a_manifest_is_refused_and_its_secrets_are_not_shown(tiny_checkpoint: Path) -> None:
    url = "https://user:secret@host.example/sums.json?signature=secret"
    for load in (gdsload.load_file, gdsload.stream, gdsload.from_pretrained):
        with pytest.raises(
            ValueError, match=r"verify='https://host\.example/sums\.json'"
        ) as caught:
            load(tiny_checkpoint, verify=url)
        assert "secret" not in str(caught.value)


def test_verify_command_names_the_tensor_and_fails(source: Path) -> None:
    assert run("verify", source).exit_code == 0
    path = flip_in(source, NORM)
    result = run("verify", source)
    assert result.exit_code == 1
    assert NORM in result.stderr and path.name in result.stderr


def test_verify_command_refuses_a_manifest_of_another_algorithm(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    pytest.importorskip("xxhash")
    words = ("verify", tiny_checkpoint, "--manifest", tmp_path / "sums.json")
    record(tiny_checkpoint, "xxh3_128", "--output", tmp_path / "sums.json")
    result = run(*words, "--method", "sha256")
    assert result.exit_code == 1 and "its checksums are of xxh3_128" in result.stderr
    command = f"--algorithm sha256 --output {tmp_path / 'sums.json'}` replaces them"
    assert command in result.stderr
    assert answer(*words)["method"] == "xxh3_128"
    record(tiny_checkpoint, "sha256", "--output", tmp_path / "sums.json")
    assert answer(*words)["method"] == "sha256"
    assert run(*words, "--method", "sha256").exit_code == 0


def test_commands_read_tensors_larger_than_a_window_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    from gdsload.cli import integrity

    monkeypatch.setattr(integrity, "_WINDOW_BYTES", 3000)
    save_file({"w": torch.arange(2500, dtype=torch.int32)}, tmp_path / "m.safetensors")
    record(tmp_path)
    assert run("verify", tmp_path).exit_code == 0
    by_load_file(tmp_path)
    flip_in(tmp_path, "w", 9999)
    assert run("verify", tmp_path).exit_code == 1


def test_tensor_that_is_named_as_a_part_of_another_has_its_own_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    from gdsload.cli import integrity

    monkeypatch.setattr(integrity, "_WINDOW_BYTES", 3000)
    saved = {"w": torch.arange(2500, dtype=torch.int32)}
    save_file(saved, tmp_path / "m.safetensors")
    with gdsload.Checkpoint.open(tmp_path) as checkpoint:
        *_, last = integrity._parts(checkpoint, 1000)
    assert last.nbytes < 3000 and last.name != "w"
    save_file(saved | {str(last.name): saved["w"][:5].clone()}, tmp_path / "m.safetensors")
    record(tmp_path)
    assert run("verify", tmp_path).exit_code == 0
    by_load_file(tmp_path)


@pytest.mark.parametrize("block_bytes", [700, 2100, 5000])
def test_verify_command_compares_every_block_whatever_its_size(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gdsload.cli import integrity
    from gdsload.loading import integrity as comparing

    monkeypatch.setattr(integrity, "_WINDOW_BYTES", 3000)
    for module in (manifest_module, comparing):
        monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    save_file({"w": torch.arange(2500, dtype=torch.int32)}, tmp_path / "m.safetensors")
    record(tmp_path)
    assert run("verify", tmp_path).exit_code == 0
    for place in range(0, 10_000, 900):
        flip_in(tmp_path, "w", place)
        assert run("verify", tmp_path).exit_code == 1
        flip_in(tmp_path, "w", place)


def test_manifest_in_a_read_only_place_names_output(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(manifest_module.tempfile, "mkstemp", refuse)
    result = run("manifest", tiny_checkpoint, "--algorithm", "sha256")
    assert result.exit_code == 1 and "--output" in result.stderr


def test_manifest_in_a_missing_directory_reads_nothing(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity_commands, "_read", None)
    path = tmp_path / "nowhere" / "manifest.json"
    result = run("manifest", tiny_checkpoint, "--algorithm", "sha256", "--output", path)
    assert result.exit_code == 1
    assert f"{path}: cannot be written: No such file or directory" in result.stderr


def test_manifest_replaces_neither_a_pipe_nor_a_link(tiny_checkpoint: Path, tmp_path: Path) -> None:
    pipe, file, link = (tmp_path / name for name in ("pipe", "file.json", "link.json"))
    os.mkfifo(pipe)
    link.symlink_to(file.name)
    words = "manifest", tiny_checkpoint, "--algorithm", "sha256", "--output"
    result = run(*words, pipe)
    assert result.exit_code == 1 and "this is no regular file" in result.stderr
    assert pipe.is_fifo()
    assert run(*words, link).exit_code == 0
    assert link.is_symlink() and "files" in json.loads(file.read_text())


def test_error_of_a_path_with_control_characters_is_one_line(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "no\x1b[2J\nwhere" / "manifest.json"
    result = run("manifest", tiny_checkpoint, "--algorithm", "sha256", "--output", path)
    assert result.exit_code == 1
    assert "no\\x1b[2J\\nwhere" in result.stderr and result.stderr.count("\n") == 1


def test_argument_types_of_other_libraries_are_left_alone() -> None:
    """All users of `ctypes.pythonapi` share them."""
    code = "import ctypes; import gdsload.loading.integrity; "
    code += "print(ctypes.pythonapi.PyMemoryView_FromMemory.argtypes)"
    assert process(code).stdout == "None\n"


def test_manifest_is_that_of_the_directory_where_the_checkpoint_was_opened(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    with Checkpoint.open(source.name) as checkpoint:
        monkeypatch.chdir("/")
        with gdsload.prefetch(checkpoint, verify="checksum") as ahead:
            assert ahead.wait()


def test_path_of_a_manifest_may_be_of_bytes_and_has_no_nul(source: Path) -> None:
    path = source / manifest_module.MANIFEST_NAME
    gdsload.load_file(source, verify=os.fsencode(path))  # type: ignore[arg-type]
    assert json.loads(gdsload.last_report().to_json())["verify"] == str(path)
    with pytest.raises(CheckpointError, match="NUL"):
        gdsload.load_file(source, verify=Path("a\0b"))
