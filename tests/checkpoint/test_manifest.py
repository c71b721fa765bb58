"""Manifests as files: what is written, what is kept, and what is refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import descriptors
from gdsload.checkpoint import Checkpoint, manifest
from gdsload.checkpoint.manifest import (
    ALGORITHMS,
    BLOCK_BYTES,
    FORMAT,
    MANIFEST_NAME,
    SHA256,
    XXH3,
    FileChecksums,
    Manifest,
    hash_function,
    manifest_of,
    manifest_path,
    read_manifest,
    write_manifest,
)
from gdsload.errors import CheckpointError, CheckpointNotFound, CheckpointUnreadable, GdsloadError

FILES = {
    "a.safetensors": FileChecksums(80, "0" * 64, {"w": "1" * 128, "empty": ""}),
    "b.safetensors": FileChecksums(0, "f" * 64, {}),
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "sums.json")


def valid() -> dict[str, Any]:
    files = {name: entry._asdict() for name, entry in FILES.items()}
    return {"format": FORMAT, "algorithm": SHA256, "block_bytes": 1, "files": files}


def test_written_manifest_is_read_back(path: str) -> None:
    write_manifest(path, SHA256, FILES)
    assert read_manifest(path) == Manifest(path, SHA256, BLOCK_BYTES, FILES)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o644
    assert os.listdir(os.path.dirname(path)) == ["sums.json"]


def test_manifest_is_written_to_the_working_directory(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(os.path.dirname(path))
    write_manifest("sums.json", SHA256, FILES)
    assert read_manifest(path).files == FILES


def test_manifest_needs_no_directory_for_temporary_files(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")  # it may be another file system
    write_manifest(path, SHA256, FILES)
    assert read_manifest(path).files == FILES


def test_entries_of_other_files_are_kept_and_of_the_same_file_replaced(path: str) -> None:
    write_manifest(path, SHA256, FILES)
    newer = FileChecksums(81, "2" * 64, {})
    write_manifest(path, SHA256, {"a.safetensors": newer})
    assert read_manifest(path).files == {**FILES, "a.safetensors": newer}


@pytest.mark.parametrize("before", [{**valid(), "algorithm": XXH3, "files": {}}, "?"])
def test_manifest_without_entries_is_replaced(before: Any, path: str) -> None:
    Path(path).write_text(json.dumps(before))
    write_manifest(path, SHA256, {"c.safetensors": FileChecksums(1, "", {})})
    assert list(read_manifest(path).files) == ["c.safetensors"]


def test_entries_of_another_algorithm_are_not_lost(path: str) -> None:
    x = {"x.safetensors": FileChecksums(1, "0" * 32, {})}
    write_manifest(path, XXH3, x)
    with pytest.raises(GdsloadError, match=r"x\.safetensors.* would be lost"):
        write_manifest(path, SHA256, FILES)
    assert read_manifest(path).files == x
    write_manifest(path, SHA256, {"x.safetensors": FileChecksums(1, "0" * 64, {})})
    assert read_manifest(path).algorithm == SHA256


def test_manifest_that_cannot_be_opened_is_not_replaced(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(path, SHA256, FILES)
    real = os.open

    def refuse(name: str, *how: Any) -> int:
        if name == path:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(name, *how)

    with monkeypatch.context() as failing:
        failing.setattr(os, "open", refuse)
        with pytest.raises(CheckpointUnreadable, match="may open no more"):
            write_manifest(path, SHA256, {"c.safetensors": FILES["b.safetensors"]})
    assert read_manifest(path).files == FILES


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failed_write_leaves_the_manifest_as_it_was(
    call: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(path, SHA256, FILES)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as failing:
        failing.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space left"):
            write_manifest(path, SHA256, {})
    assert read_manifest(path).files == FILES
    assert os.listdir(os.path.dirname(path)) == ["sums.json"]


def test_manifest_reaches_the_disk_before_it_gets_its_name(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    real = os.fsync

    def note(fd: int) -> None:
        synced.append(os.pread(fd, 1 << 20, 0))
        assert not os.path.exists(path)
        real(fd)

    monkeypatch.setattr(os, "fsync", note)
    write_manifest(path, SHA256, FILES)
    assert synced == [Path(path).read_bytes()]


def test_missing_manifest_names_the_command_and_the_source(path: str) -> None:
    with pytest.raises(CheckpointNotFound) as caught:
        read_manifest(path, "org/model")
    assert str(caught.value).endswith(
        f"there is no manifest; `gdsload manifest org/model --output {path}` writes it"
    )
    assert (caught.value.path, caught.value.errno) == (path, errno.ENOENT)
    with pytest.raises(
        CheckpointNotFound, match=r"`gdsload manifest SOURCE --output .*` writes it"
    ):
        read_manifest(path)


def entry(**fields: Any) -> dict[str, Any]:
    return {"files": {"a": {"size": 1, "header": "0" * 64, "tensors": {}} | fields}}


NO_FIELDS = "its entry of 'a' has no size, header and tensors"
NO_CHECKSUM = "its entry of 'a' has something that is no checksum"


@pytest.mark.parametrize(
    "change,fault",
    [
        ({"format": "gdsload-manifest-2"}, f"its format is not '{FORMAT}'"),
        ({"algorithm": "md5"}, "its algorithm must be one of xxh3_128, sha256"),
        ({"algorithm": None}, "its algorithm must be one of xxh3_128, sha256"),
        ({"algorithm": [SHA256]}, "its algorithm must be one of xxh3_128, sha256"),
        ({"block_bytes": 0}, "its block_bytes is not a positive integer"),
        ({"block_bytes": 1.0}, "its block_bytes is not a positive integer"),
        ({"block_bytes": True}, "its block_bytes is not a positive integer"),
        ({"files": []}, "it has no files"),
        ({"files": {"a": []}}, NO_FIELDS),
        (entry(size="1"), NO_FIELDS),
        (entry(size=True), NO_FIELDS),
        (entry(size=-1), "its entry of 'a' has a negative size"),
        (entry(header=None), NO_FIELDS),
        (entry(tensors=[]), NO_FIELDS),
        (entry(header="0" * 63), NO_CHECKSUM),
        (entry(header="F" * 64), NO_CHECKSUM),
        (entry(header="0" * 64 + "\n"), NO_CHECKSUM),
        (entry(tensors={"w": "0" * 65}), NO_CHECKSUM),
        (entry(tensors={"v": "", "w": 5}), NO_CHECKSUM),
    ],
)
def test_invalid_manifest_is_refused_with_its_fault(
    change: dict[str, Any], fault: str, path: str
) -> None:
    Path(path).write_text(json.dumps(valid() | change))
    with pytest.raises(CheckpointError) as caught:
        read_manifest(path)
    assert str(caught.value) == f"{path}: this is not a valid manifest: {fault}"
    assert caught.value.path == path


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000])
def test_text_that_is_no_manifest_is_refused(text: str, path: str) -> None:
    Path(path).write_text(text)
    with (
        descriptors.none_left(),
        pytest.raises(CheckpointError, match=r"not a valid manifest: it.* is not ") as caught,
    ):
        read_manifest(path)
    assert caught.value.path == path


def test_manifest_above_the_limit_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(path, SHA256, FILES)
    size = os.path.getsize(path)
    monkeypatch.setattr(manifest, "LIMIT_BYTES", size)
    assert read_manifest(path).files == FILES
    monkeypatch.setattr(manifest, "LIMIT_BYTES", size - 1)
    with pytest.raises(CheckpointError, match=f"it has {size} bytes, more than") as caught:
        read_manifest(path)
    assert str(caught.value).endswith(f" more than the limit of {size - 1}")
    assert caught.value.path == path


def test_manifest_that_ends_early_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(path, SHA256, FILES)
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    with pytest.raises(CheckpointError) as caught:
        read_manifest(path)
    assert str(caught.value).startswith(f"{path}: the file ended at byte 0 ")
    assert caught.value.path == path


def test_checksums_are_those_of_their_libraries() -> None:
    assert hash_function(SHA256)(memoryview(b"abc")) == hashlib.sha256(b"abc").hexdigest()
    xxhash = pytest.importorskip("xxhash")
    assert hash_function(XXH3)(memoryview(b"abc")) == xxhash.xxh3_128_hexdigest(b"abc")
    for algorithm, digits in ALGORITHMS.items():
        assert len(hash_function(algorithm)(b"")) == digits


def test_missing_library_of_a_checksum_raises_with_both_ways_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(GdsloadError) as caught:
        hash_function(XXH3)
    assert str(caught.value) == (
        "checksums of xxh3_128 need xxhash: pip install '.[verify]' in a checkout of gdsload"
        " (manifests of `gdsload manifest --algorithm sha256` need nothing)"
    )


def test_manifest_is_beside_the_first_shard(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes((2).to_bytes(8, "little") + b"{}")
    with Checkpoint.open(tmp_path) as checkpoint:
        path = manifest_path(checkpoint)
        assert path == str(tmp_path / MANIFEST_NAME)
        with pytest.raises(CheckpointNotFound, match=f"`gdsload manifest {tmp_path}` writes it"):
            manifest_of(checkpoint)
        write_manifest(path, SHA256, FILES)
        assert manifest_of(checkpoint) == read_manifest(path)
