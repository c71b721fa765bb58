"""The ends of a load into VRAM: the time to its first read, how long the bus waits for plans, and
the time after its last read.

    python -m benchmarks.first_read

`load_file(..., "cuda:0")` of checkpoints that the page cache holds, with the staging ring in place,
over the tests' double of CUDA and an engine that reads nothing (instant.c) at BUS_RATE. The bus is
idle when all reads that were posted would have ended at that rate, and the next ones are still
planned. No GPU is involved, and no figure is a GPU figure.

The checkpoints are sparse files, which no machine needs to hold. A question about their bytes in
the page cache is asked about as many bytes of a small file that is there, as often as it takes, so
that the kernel's time for it is measured. Tensors are blocks of the driver (before torch is
imported), or those of an allocator as fast as torch's on the CPU.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gdsload import last_report, load_file
from gdsload._native import system
from gdsload.backends.posix import engines
from gdsload.loading import device_batch, torch_device
from gdsload.loading.batch import Batch
from gdsload.memory import page_cache
from gdsload.memory.staging_ring import release_rings
from gdsload.system import device_name, gpu, shared_libraries

from . import records, tables, values
from .pipeline import built, capsule, met
from .places import ROOT
from .records import described
from .scale import sparse

BUS_RATE = 50_000_000_000  # bytes per second: a PCIe 5.0 GPU
# (tensors, bytes, shards) of qwen3-0.6b, qwen2.5-7b and llama-70b, and of very many tensors.
CHECKPOINTS = (
    (311, 1_500_000_000, 1),
    (339, 15_200_000_000, 4),
    (723, 141_000_000_000, 30),
    (100_000, 15_200_000_000, 4),
)
KINDS = ("blocks", "torch")
WARM_BYTES = 256 << 20
MOST_FIRST_MS, MOST_SHARE, MOST_END_MS = 5.0, 0.02, 15.0  # the targets


class Warm:
    """`_native.system` for files that are wholly in the page cache, at the kernel's price."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __getattr__(self, name: str) -> Any:
        return getattr(system, name)

    def cachestat(self, fd: int, offset: int, length: int) -> int:
        left, pages = length, 0
        while left > 0:
            pages += system.cachestat(self._fd, 0, min(left, WARM_BYTES))
            left -= WARM_BYTES
        return pages


class Allocator:
    """Tensors side by side in one block of the double, as by torch's allocator. A tensor is
    one call of torch, as `torch.empty` is."""

    def __init__(self, nbytes: int) -> None:
        self._address = gpu.device(0).allocate(nbytes)
        view = (ctypes.c_char * nbytes).from_address(self._address)
        self._whole = torch.frombuffer(view, dtype=torch.bfloat16)
        self.used = 0

    def empty(self, shape: Sequence[int]) -> torch.Tensor:
        strides, length = [], 1
        for size in reversed(shape):
            strides.insert(0, length)
            length *= size
        made = self._whole.as_strided(shape, strides, self.used // 2)
        self.used += -(-2 * length // 512) * 512
        return made

    def close(self) -> None:
        gpu.device(0).release(self._address)


@contextmanager
def doubles(folder: Path) -> Iterator[Any]:
    """CUDA's double without a weight, and the engine; a load before the first has made the ring."""
    cuda = built(folder, ROOT / "tests/doubles/cuda_double.c")
    instant = built(folder, ROOT / "benchmarks/instant.c")
    with ExitStack() as stack:
        path, fd = f"{folder}/libcuda_double.so", os.memfd_create("warm")
        stack.callback(os.close, fd)
        os.write(fd, bytes(WARM_BYTES))  # in memory whatever other programs do
        patched = stack.enter_context
        patched(mock.patch.object(shared_libraries, "candidates", lambda soname: [path]))
        patched(mock.patch.object(page_cache, "system", Warm(fd)))
        patched(mock.patch.object(device_name, "require_target", str))  # torch sees no device here
        engine = capsule(instant)
        patched(mock.patch.object(engines, "engine_capsule", lambda *words: engine))
        gpu.device(0)
        cuda.cuda_double_set(1, ctypes.c_size_t(1 << 40), 0)
        cuda.cuda_double_weightless(1)
        instant.instant_rate(ctypes.c_int64(BUS_RATE))
        yield
        release_rings()


def names(batch: Any, infos: Sequence[Any]) -> dict[str, None]:
    """In place of `Batch.tensors_of`: this process has no CUDA device for a tensor."""
    return dict.fromkeys(info.name for info in infos)


def run(source: Path, kind: str, nbytes: int, shards: int) -> dict[str, float]:
    """One load, without the handing over of its tensors."""
    with ExitStack() as stack:
        patched = stack.enter_context
        patched(mock.patch.object(torch_device, "torch_imported", lambda: kind == "torch"))
        for batch in (device_batch.BlockBatch, device_batch.DeviceBatch):
            patched(mock.patch.object(batch, "tensors_of", names))
        if kind == "torch":
            # One block a shard: a machine that refuses to overcommit takes no larger ones.
            allocators = [Allocator(2 * nbytes // shards) for _ in range(shards)]
            for allocator in allocators:
                stack.callback(allocator.close)

            def empty(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
                if allocators[0].used > nbytes // shards and len(allocators) > 1:
                    del allocators[0]
                return allocators[0].empty(shape)

            patched(mock.patch.object(torch_device, "empty", empty))
            patched(mock.patch.object(torch_device, "reserve_block", lambda *words: None))
        posts: list[tuple[float, int]] = []  # the seconds after each post, and its bytes
        post = Batch._post

        def noted(batch: Batch, memory: Any) -> None:
            post(batch, memory)
            posts.append((time.monotonic(), batch.plan.read_bytes))

        patched(mock.patch.object(Batch, "_post", noted))
        began = time.monotonic()
        load_file(source, "cuda:0", progress=False)
        ended, report = time.monotonic(), last_report()
        reads = [span for span in report.spans if span.track.startswith("reads of ")]
        first = min(span.start for span in reads)
        idle, busy_until = 0.0, first + posts[0][1] / BUS_RATE
        for at, nbytes in posts[1:]:
            idle += max(at - busy_until, 0.0)
            busy_until = max(at, busy_until) + nbytes / BUS_RATE
        return {
            "open_ms": report.phases["open"] * 1e3,
            "first_ms": (first - began) * 1e3,
            "plan_ms": report.phases["plan"] * 1e3,
            "idle_ms": idle * 1e3,
            "end_ms": (ended - max(span.end for span in reads)) * 1e3,
        }


def measured(repeats: int) -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory(prefix="gdsload-first-") as name, doubles(Path(name)):
        for tensors, nbytes, shards in CHECKPOINTS:
            with sparse(Path(name), tensors, nbytes, shards) as source:
                for kind in KINDS:
                    runs = [run(source, kind, nbytes, shards) for _ in range(repeats + 1)][1:]
                    medians = {
                        key: round(statistics.median(r[key] for r in runs), 2) for key in runs[0]
                    }
                    found.append(
                        {
                            "tensors": tensors,
                            "bytes": nbytes,
                            "shards": shards,
                            "memory": kind,
                            "loads": repeats,
                            **medians,
                        }
                    )
    return found


def title(result: dict[str, Any]) -> str:
    return "From the call to the first read into VRAM"


def table(result: dict[str, Any]) -> str:
    """Each checkpoint, and the targets."""
    rows = []
    for entry in result["loads"]:
        bus_ms = entry["bytes"] / BUS_RATE * 1e3
        rows.append([
            f"{entry['bytes'] / 1e9:.1f} GB", f"{entry['tensors']:,}", str(entry["shards"]),
            entry["memory"], f"{entry['open_ms']:.1f}", f"{entry['first_ms']:.1f}",
            f"{entry['plan_ms']:.1f}", f"{bus_ms:.0f}", f"{entry['idle_ms']:.1f}",
            f"{entry['idle_ms'] / bus_ms:.1%}", f"{entry['end_ms']:.1f}",
        ])  # fmt: skip
    head = ["bytes", "tensors", "shards", "memory", "headers, ms", "to the first read, ms",
            "planning, ms", "bus at 50 GB/s, ms", "bus idle, ms", "share",
            "after the last read, ms"]  # fmt: skip
    aimed = tables.markdown(["target", "wanted", "measured", ""], aims(result))
    return tables.markdown(head, rows) + "\n\n" + aimed


def aims(result: dict[str, Any]) -> list[list[str]]:
    """The targets, beside the worst of all checkpoints; of usual models for the idle bus."""
    usual = [entry for entry in result["loads"] if entry["tensors"] < 10_000]
    first = max(entry["first_ms"] - entry["open_ms"] for entry in result["loads"])
    share = max(entry["idle_ms"] / entry["bytes"] * BUS_RATE / 1e3 for entry in usual)
    end = max(entry["end_ms"] for entry in usual if entry["bytes"] < 100_000_000_000)
    return [
        ["headers read to the first read into VRAM, ms", f"under {MOST_FIRST_MS:.0f}",
         f"{first:.1f}", met(first < MOST_FIRST_MS)],
        ["bus into VRAM idle while reads are planned", f"under {MOST_SHARE:.0%}",
         f"{share:.1%}", met(share < MOST_SHARE)],
        ["the last read to the end of a load of up to 15 GB, ms", f"under {MOST_END_MS:.0f}",
         f"{end:.1f}", met(end < MOST_END_MS)],
    ]  # fmt: skip


def notes(result: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"- {described(result)}",
            f"- medians of {result['loads'][0]['loads']} loads each, after one; the staging ring is"
            " there already, all pages are in the page cache, no byte is read or copied",
            "- blocks: memory of the driver, before torch is imported; torch: a tensor each",
            "- bus idle: after the first read, while all posted bytes would have arrived at 50"
            " GB/s",
        ]
    )


def main(words: list[str] | None = None) -> int:
    parser = records.parser_of("python -m benchmarks.first_read", __doc__)
    parser.add_argument("--repeats", type=values.whole, default=5)
    records.add_output(parser)
    options = parser.parse_args(words)

    def result() -> tuple[dict[str, Any], str]:
        return records.record("first-read", ROOT, loads=measured(options.repeats)), "first-read"

    return records.publish("first_read", options, result)


if __name__ == "__main__":
    sys.exit(main())
