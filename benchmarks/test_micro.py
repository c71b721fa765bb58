"""The small steps of a load, one by one: `python -m pytest benchmarks --benchmark-only`.

Not part of the tests: they say how long a step takes, never whether it is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gdsload import load_file
from gdsload.backends.posix.engines import ENGINES, try_engine
from gdsload.checkpoint import Checkpoint
from gdsload.memory.host_buffers import HostBuffers
from gdsload.memory.page_cache import evict
from gdsload.memory.tensors import make_tensors
from gdsload.planning.read_plan import Limits, byte_ranges_of, merged_ranges_of, plan_reads

from .parse import TENSOR_BYTES, write

pytest.importorskip("pytest_benchmark")

TENSORS, SHARDS = 10_000, 20
FILE_TENSORS = 16_384  # 64 MiB, for the engines


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("many"), TENSORS, SHARDS)


@pytest.fixture(scope="module")
def checkpoint(source: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(source) as opened:
        yield opened


def test_open(benchmark: Any, source: Path) -> None:
    def opened() -> int:
        with Checkpoint.open(source) as checkpoint:
            return len(checkpoint.tensors)

    assert benchmark(opened) == TENSORS


def test_extents(benchmark: Any, checkpoint: Checkpoint) -> None:
    assert len(benchmark(merged_ranges_of, byte_ranges_of(checkpoint))) == SHARDS


@pytest.mark.parametrize("window_bytes", [0, 1 << 20])
def test_plan(benchmark: Any, checkpoint: Checkpoint, window_bytes: int) -> None:
    ranges, sizes = byte_ranges_of(checkpoint), [shard.size for shard in checkpoint.shards]
    planned = benchmark(plan_reads, ranges, sizes, Limits(), window_bytes=window_bytes)
    assert planned.wanted_bytes == TENSORS * TENSOR_BYTES


def test_scatter(benchmark: Any, checkpoint: Checkpoint) -> None:
    """Memory for a plan, and the place of each tensor in it."""
    planned = plan_reads(
        byte_ranges_of(checkpoint), [shard.size for shard in checkpoint.shards], Limits()
    )
    assert len(benchmark(lambda: HostBuffers(planned).views(planned))) == TENSORS


def test_make_tensors(benchmark: Any, checkpoint: Checkpoint) -> None:
    planned = plan_reads(
        byte_ranges_of(checkpoint), [shard.size for shard in checkpoint.shards], Limits()
    )
    infos = list(checkpoint.tensors.values())
    views = HostBuffers(planned).views(planned)
    assert len(benchmark(make_tensors, infos, views)) == TENSORS


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 MiB of zeros, written out: a hole would be read without a disk."""
    directory = write(tmp_path_factory.mktemp("one"), FILE_TENSORS, 1)
    (written,) = directory.glob("*.safetensors")
    size = written.stat().st_size
    with written.open("r+b") as out:
        start = 8 + int.from_bytes(out.read(8), "little")
        out.seek(start)
        out.write(bytes(size - start))
    return written


@pytest.mark.parametrize("cache", ["direct", "buffered"])
@pytest.mark.parametrize("engine", ENGINES)
def test_engine(benchmark: Any, file: Path, engine: str, cache: str) -> None:
    answer = try_engine(engine)
    if not answer.usable:
        pytest.skip(str(answer))
    loaded = benchmark(load_file, file, backend="posix", cache=cache, options={"engine": engine})
    assert len(loaded) == FILE_TENSORS


@pytest.mark.parametrize("mib", [1, 2, 4])
@pytest.mark.parametrize("cache", ["auto", "direct"])
def test_small_cold_file(benchmark: Any, tmp_path: Path, cache: str, mib: int) -> None:
    """`auto` reads a small file into the page cache, `direct` opens a backend for it."""
    path = tmp_path / "small.safetensors"
    save_file({str(n): torch.ones(mib << 14) for n in range(16)}, path)
    evict(path)
    rounds = {"setup": lambda: evict(path) and None, "rounds": 20}
    loaded = benchmark.pedantic(load_file, (path,), {"cache": cache}, **rounds)
    assert len(loaded) == 16
