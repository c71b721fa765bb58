"""Loads from a URL with a local cache: the second one reads local files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gdsload import Checkpoint
from object_server import ObjectServer

pytest.importorskip("obstore")


@pytest.fixture
def server(object_server: ObjectServer, tiny_checkpoint: Path) -> ObjectServer:
    """A server with the tiny checkpoint as bucket/model."""
    shutil.copytree(tiny_checkpoint, object_server.root / "model")
    return object_server


def read_all(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {shard.name: shard.read(0, shard.size) for shard in checkpoint.shards}


def test_second_opening_is_one_of_local_files(server: ObjectServer, tmp_path: Path) -> None:
    url, cache = server.url("s3", "model"), tmp_path / "cache"
    with Checkpoint.open(url, cache_dir=cache) as first:
        assert first.remote
        content = read_all(first)
    server.forget()
    with Checkpoint.open(url, cache_dir=cache) as second:
        assert not second.remote
        assert read_all(second) == content
        assert (second.source, second.tensors) == (first.source, first.tensors)
        second.verify_unchanged()
    assert len(server.reads("*.safetensors")) == len(first.shards)  # for the ETag


def test_partly_filled_cache_is_not_taken_for_local_files(
    server: ObjectServer, tmp_path: Path
) -> None:
    url, cache = server.url("s3", "model"), tmp_path / "cache"
    with Checkpoint.open(url, cache_dir=cache) as checkpoint:
        checkpoint.shards[0].read(0, checkpoint.shards[0].size)
    with Checkpoint.open(url, cache_dir=cache) as checkpoint:
        assert checkpoint.remote


def test_replaced_object_is_fetched(server: ObjectServer, tmp_path: Path) -> None:
    url, cache = server.url("s3", "model"), tmp_path / "cache"
    with Checkpoint.open(url, cache_dir=cache) as checkpoint:
        read_all(checkpoint)
    name = checkpoint.shards[1].name
    path = server.root / "model" / name
    new = bytearray(path.read_bytes())
    new[-1] ^= 1
    path.write_bytes(new)
    with Checkpoint.open(url, cache_dir=cache) as checkpoint:
        assert checkpoint.remote
        assert read_all(checkpoint)[name] == new


def test_local_files_are_kept_while_they_are_open(server: ObjectServer, tmp_path: Path) -> None:
    from gdsload.remote.cache import LocalCache

    url, cache = server.url("s3", "model"), tmp_path / "cache"
    with Checkpoint.open(url, cache_dir=cache) as checkpoint:
        content = read_all(checkpoint)
    with Checkpoint.open(url, cache_dir=cache) as checkpoint:
        assert LocalCache(cache).clear() == []
        assert read_all(checkpoint) == content
        checkpoint.verify_unchanged()
