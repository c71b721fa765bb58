"""Opening remote checkpoints, in memory: which files are opened, as what, and when closed."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gdsload.checkpoint import Checkpoint, Identity, checkpoint as checkpoint_module, locate
from gdsload.checkpoint.manifest import (
    MANIFEST_NAME,
    SHA256,
    FileChecksums,
    manifest_of,
    manifest_path,
    write_manifest,
)
from gdsload.errors import CheckpointError, CheckpointNotFound, FileChanged
from gdsload.loading.integrity import open_verifier
from gdsload.remote.file import LocalCopy
from gdsload.report import LoadReport
from remotefiles import MemoryDirectory, MemoryFile

FIRST, SECOND = "1111.safetensors", "2222.safetensors"
INDEX = "model.safetensors.index.json"
URL = "s3://bucket/model"


class Opened(dict[str, MemoryDirectory]):
    """The directories that were opened, by their URLs. `prepare` is called with each file."""

    prepare: Callable[[MemoryFile], None] = staticmethod(lambda _: None)


def write(path: Path, *names: str) -> None:
    """A file of tensors of four bytes, those of its name."""
    header = {
        name: {"dtype": "U8", "shape": [4], "data_offsets": [4 * at, 4 * at + 4]}
        for at, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + path.name[:4].encode() * len(names))


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """The directory of s3://bucket. It has model/, of two shards and an index."""
    model = tmp_path / "bucket/model"
    write(model / FIRST, "a", "b")
    write(model / SECOND, "c")
    weight_map = {"a": FIRST, "b": FIRST, "c": SECOND}
    (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return model.parent


@pytest.fixture
def opened(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    made = Opened()

    def open_directory(url: str) -> MemoryDirectory:
        assert url not in made, "the same directory twice"
        made[url] = MemoryDirectory(url, bucket / url.removeprefix("s3://bucket/"))
        made[url].prepare = made.prepare
        return made[url]

    monkeypatch.setattr(locate, "open_directory", open_directory)
    return made


def names_of(checkpoint: Checkpoint) -> list[str]:
    return list(checkpoint.tensors)


def test_url_of_a_directory_an_index_or_a_shard_opens_what_it_names(opened: Opened) -> None:
    for url, names in ((URL, "abc"), (f"{URL}/{INDEX}", "abc"), (f"{URL}/{SECOND}", "c")):
        opened.clear()
        with Checkpoint.open(url) as checkpoint:
            assert names_of(checkpoint) == list(names)
            assert checkpoint.source == url
            assert checkpoint.remote and not checkpoint.closed
            for shard in checkpoint.shards:
                assert shard.path == f"{URL}/{shard.name}"
                assert shard.directory is opened[URL]
                assert shard.remote is opened[URL].files[shard.name]
                assert shard.size == opened[URL].files[shard.name].size
            for info in checkpoint.tensors.values():
                shard = checkpoint.shards[info.shard]
                assert shard.read(info.offset, info.nbytes) == shard.name[:4].encode()
        assert all(file.closed for file in opened[URL].files.values())


def test_sha256_of_remote_files_needs_a_manifest(opened: Opened) -> None:
    with Checkpoint.open(URL) as checkpoint, pytest.raises(CheckpointNotFound):
        open_verifier(checkpoint, "sha256", LoadReport(""))


def test_subfolder_and_variant_of_a_url_choose_its_files(opened: Opened, bucket: Path) -> None:
    write(bucket / "model/unet/model.fp16.safetensors", "half")
    write(bucket / "model/unet/model.safetensors", "whole")
    with Checkpoint.open(URL, subfolder="unet", variant="fp16") as checkpoint:
        assert names_of(checkpoint) == ["half"]
        assert checkpoint.source == URL
    assert list(opened) == [f"{URL}/unet"]
    for more in ({"subfolder": "unet"}, {"variant": "fp16"}):
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(f"{URL}/{FIRST}", **more)  # type: ignore[arg-type]
        assert str(caught.value) == (
            f"{URL}/{FIRST}: this is one file and has no subfolder or variant"
        )
        assert caught.value.path == f"{URL}/{FIRST}"


def test_index_remote_above_the_limit_is_refused(opened: Opened) -> None:
    for url in (URL, f"{URL}/{INDEX}"):
        opened.clear()
        with pytest.raises(CheckpointError, match="more than the limit of 20"):
            Checkpoint.open(url, header_limit=20)


def test_list_of_urls_opens_each_directory_once(opened: Opened, bucket: Path) -> None:
    write(bucket / "other/3333.safetensors", "d")
    urls = [f"{URL}/{FIRST}", "s3://bucket/other/3333.safetensors", f"{URL}/{SECOND}"]
    with Checkpoint.of(urls) as checkpoint:
        assert names_of(checkpoint) == ["a", "b", "d", "c"]
        assert [shard.path for shard in checkpoint.shards] == urls
        assert list(opened) == [URL, "s3://bucket/other"]
    opened.clear()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.of([urls[0], str(bucket / "model" / SECOND)])
    assert str(caught.value) == (
        f"{urls[0]} and 1 more: some of these files are URLs, and some are not"
    )


def test_shard_remote_has_no_descriptor(opened: Opened) -> None:
    with Checkpoint.open(f"{URL}/{FIRST}") as checkpoint:
        (shard,) = checkpoint.shards
        assert not shard.on_disk and not shard.cached
        assert shard.reopen_direct() is None
        with pytest.raises(CheckpointError) as caught:
            _ = shard.fd
        assert str(caught.value) == f"{URL}/{FIRST}: this is not a file of this machine"
        assert caught.value.path == f"{URL}/{FIRST}"
        for action in (copy.copy, pickle.dumps):
            with pytest.raises(TypeError) as refused:
                action(shard)
            assert str(refused.value) == "a Shard owns a connection and cannot be copied or pickled"


def test_dropped_checkpoint_remote_closes_no_descriptor(opened: Opened) -> None:
    gc.collect()
    before = os.listdir("/proc/self/fd")
    for _ in range(2):
        checkpoint = Checkpoint.open(f"{URL}/{FIRST}")
        del checkpoint
        gc.collect()
        opened.clear()
    assert os.listdir("/proc/self/fd") == before


def test_closed_shard_remote_refuses_use(opened: Opened) -> None:
    checkpoint = Checkpoint.open(f"{URL}/{FIRST}")
    (shard,) = checkpoint.shards
    file = opened[URL].files[FIRST]
    file.changed = True
    with pytest.raises(FileChanged, match="another version"):
        checkpoint.verify_unchanged()
    checkpoint.close()
    checkpoint.close()
    assert file.closed and shard.closed and checkpoint.closed
    for use in (checkpoint.verify_unchanged, checkpoint.__enter__, lambda: shard.read(0, 8)):
        with pytest.raises(CheckpointError) as caught:
            use()
        assert str(caught.value) == f"{URL}/{FIRST}: the checkpoint is closed"
        assert caught.value.path == f"{URL}/{FIRST}"


def test_identity_remote_is_url_size_and_version(opened: Opened) -> None:
    path = f"{URL}/{FIRST}"
    with Checkpoint.open(path) as checkpoint:
        first = checkpoint.shards[0].identity
    opened.clear()
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.shards[0].identity == first
        assert first == Identity(-1, 0, checkpoint.shards[0].size, 0, 0, (path, "v1"))


def test_files_of_unknown_version_are_never_the_same(opened: Opened) -> None:
    opened.prepare = lambda file: setattr(file, "version", "")
    found = set()
    for _ in range(2):
        opened.clear()
        with Checkpoint.open(f"{URL}/{FIRST}") as checkpoint:
            found.add(checkpoint.shards[0].identity)
    assert len(found) == 2


def test_first_answer_of_the_storage_is_the_latency_of_a_shard(
    opened: Opened, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, read = [100.0], os.pread

    def opening(file: MemoryFile) -> None:
        now[0] += 0.25

    def reading(fd: int, nbytes: int, offset: int) -> bytes:
        now[0] += 0.5
        return read(fd, nbytes, offset)

    opened.prepare = opening
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "pread", reading)
    for source, seconds in ((f"{URL}/{FIRST}", 0.25), (bucket / "model" / FIRST, 0.5)):
        with Checkpoint.open(source) as checkpoint:
            assert checkpoint.shards[0].first_read_seconds == seconds


def with_copies(opened: Opened, folder: Path, *names: str) -> dict[str, int]:
    """Remote files of these names have a copy in `folder`: its descriptors, by name."""
    descriptors = {}

    def prepare(file: MemoryFile) -> None:
        name = os.path.basename(file.url)
        if name in names:
            fd = os.open(folder / name, os.O_RDONLY)
            descriptors[name] = fd
            file.local_copy = lambda: LocalCopy(str(folder / name), fd)  # type: ignore[method-assign]

    opened.prepare = prepare
    return descriptors


def test_local_copies_of_all_shards_are_opened_in_their_place(opened: Opened, bucket: Path) -> None:
    folder = bucket / "model"
    descriptors = with_copies(opened, folder, FIRST, SECOND)
    with Checkpoint.open(URL) as checkpoint:
        assert not checkpoint.remote
        assert all(file.closed for file in opened[URL].files.values())
        for shard, name in zip(checkpoint.shards, (FIRST, SECOND), strict=True):
            assert (shard.name, shard.path) == (name, str(folder / name))
            assert shard.fd == descriptors[name]
            assert shard.identity == Identity.of(os.stat(folder / name))
            assert shard.remote is None and shard.directory is opened[URL] and shard.cached
        assert manifest_path(checkpoint) == f"{URL}/{MANIFEST_NAME}"
        checkpoint.verify_unchanged()


def test_copy_on_network_storage_is_one_of_network_storage(
    opened: Opened, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bucket / "model"
    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "nfs4")
    with_copies(opened, folder, FIRST, SECOND)
    with Checkpoint.open(URL) as copies, Checkpoint.open(folder) as plain:
        for copy, shard in zip(copies.shards, plain.shards, strict=True):
            assert copy.cached and copy.distant and copy.filesystem == "nfs4"
            assert copy.preferred_bytes == shard.preferred_bytes


def test_copy_of_one_shard_only_is_closed_and_not_used(opened: Opened, bucket: Path) -> None:
    descriptors = with_copies(opened, bucket / "model", FIRST)
    with Checkpoint.open(URL) as checkpoint:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptors[FIRST])
        for shard in checkpoint.shards:
            assert shard.remote is opened[URL].files[shard.name]
            assert not opened[URL].files[shard.name].closed


def test_manifest_remote_is_read_from_the_directory_of_the_shards(
    opened: Opened, bucket: Path
) -> None:
    files = {FIRST: FileChecksums(1, "0" * 64, {}), SECOND: FileChecksums(2, "1" * 64, {})}
    path = f"{URL}/{MANIFEST_NAME}"
    with Checkpoint.open(URL) as checkpoint:
        assert manifest_path(checkpoint) == path
        with pytest.raises(CheckpointNotFound) as caught:
            manifest_of(checkpoint)
        assert str(caught.value) == (
            f"{path}: there is no manifest; `gdsload manifest {URL} --output FILE` writes it"
        )
        assert caught.value.path == path
    opened.clear()
    write_manifest(str(bucket / "model" / MANIFEST_NAME), SHA256, files)
    with Checkpoint.open(URL) as checkpoint:
        found = manifest_of(checkpoint)
        assert (found.path, found.files) == (path, files)
