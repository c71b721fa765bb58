"""One rank of `ranks`: joins the others, loads, and reads a byte of each page. It runs in the
environment of its loader, which may be without gdsload."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from . import loaded, worker

Tensors = dict[str, Any]


class Loader(NamedTuple):
    """How the ranks load, and what they import before the clock."""

    load: Callable[[list[str]], Tensors]
    module: str


def by_gdsload(files: list[str]) -> Tensors:
    import torch.distributed as dist

    import gdsload

    return gdsload.load_file(Path(files[0]).parent, group=dist.group.WORLD)


def by_gdsload_each(files: list[str]) -> Tensors:
    import gdsload

    return gdsload.load_file(Path(files[0]).parent)


def by_fastsafetensors(files: list[str]) -> Tensors:
    import torch.distributed as dist
    from fastsafetensors import ParallelLoader

    loader = ParallelLoader(
        dist.group.WORLD, files, device="cpu", nogds=True, max_threads=2, use_tqdm_on_load=False
    )
    with contextlib.closing(loader.iterate_weights()) as tensors:
        found = dict(tensors)
    loader.close()
    return found


def by_runai(files: list[str]) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer

    os.environ["RUNAI_STREAMER_DIST"] = "1"  # without it, gloo does not share
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device="cpu", is_distributed=True)
        return dict(streamer.get_tensors())  # by default each is the caller's own


def by_safetensors_each(files: list[str]) -> Tensors:
    from safetensors.torch import load_file

    return {name: tensor for file in files for name, tensor in load_file(file).items()}


LOADERS = {
    "gdsload": Loader(by_gdsload, "gdsload.api"),
    "gdsload-each": Loader(by_gdsload_each, "gdsload.api"),
    "fastsafetensors": Loader(by_fastsafetensors, "fastsafetensors"),
    "runai": Loader(by_runai, "runai_model_streamer"),
    "safetensors-each": Loader(by_safetensors_each, "safetensors.torch"),
}


def disk_bytes() -> int:
    """Bytes that this process has read from the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def main() -> None:
    import torch.distributed as dist

    arm, *files = sys.argv[1:]
    loader = LOADERS[arm]
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{os.environ['GROUP']}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    import_module(loader.module)
    print("ready", flush=True)
    sys.stdin.readline()
    dist.barrier()
    before, start = disk_bytes(), time.monotonic()
    tensors = loader.load(files)
    places = loaded.tensors(tensors).places
    worker.touch_pages(places)
    facts = {
        "seconds": time.monotonic() - start,
        "disk_bytes": disk_bytes() - before,
        "bytes": sum(nbytes for _, nbytes in places.values()),
    }
    facts["sum"] = worker.total(places)
    print(json.dumps(facts), flush=True)
    # One rank must not close its sockets while another one still loads.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
