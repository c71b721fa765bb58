"""Ranks of one machine that load a checkpoint into CPU memory: seconds, and bytes from the disk.

    python -m benchmarks.ranks MODEL [--ranks 1,2,4] [--arms gdsload,...] [--rounds 3]
                                     [--python PYTHON] [--out results/ranks-MODEL.json]

gdsload shares the reads over gloo, as fastsafetensors and the streamer of Run:ai do; in the arms
"...-each" every rank reads all. Cold: the files are evicted before each load. A load ends when each
rank has all tensors and has touched each of their pages. `amplification` is the bytes that all
ranks together read from the disk (/proc/self/io) over the bytes of the tensors: 1.0 is ideal.
PYTHON is that of an environment with the other loaders; arms that it lacks are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 300
Loaded = dict[str, Any]


def shared(files: list[str]) -> Loaded:
    import torch.distributed as dist

    import gdsload

    return gdsload.load_file(Path(files[0]).parent, group=dist.group.WORLD)


def each(files: list[str]) -> Loaded:
    import gdsload

    return gdsload.load_file(Path(files[0]).parent)


def fastsafetensors(files: list[str]) -> Loaded:
    import torch.distributed as dist
    from fastsafetensors import ParallelLoader

    loader = ParallelLoader(
        dist.group.WORLD, files, device="cpu", nogds=True, max_threads=2, use_tqdm_on_load=False
    )
    with contextlib.closing(loader.iterate_weights()) as tensors:
        found = dict(tensors)
    loader.close()
    return found


def runai(files: list[str]) -> Loaded:
    from runai_model_streamer import SafetensorsStreamer

    os.environ["RUNAI_STREAMER_DIST"] = "1"  # without it, gloo does not share
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device="cpu", is_distributed=True)
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def safetensors_each(files: list[str]) -> Loaded:
    from safetensors.torch import load_file

    return {name: tensor for file in files for name, tensor in load_file(file).items()}


ARMS: dict[str, Callable[[list[str]], Loaded]] = {
    "gdsload": shared,
    "gdsload-each": each,
    "fastsafetensors": fastsafetensors,
    "runai": runai,
    "safetensors-each": safetensors_each,
}


def disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def rank(arm: str, files: list[str]) -> None:
    """One process: loads, and prints what it measured."""
    import torch
    import torch.distributed as dist

    import gdsload

    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['GROUP']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    for package in (arm, "runai_model_streamer" if arm == "runai" else "gdsload.api"):
        with contextlib.suppress(ImportError):
            __import__(package)
    dist.barrier()
    before, start = disk_bytes(), time.monotonic()
    tensors = ARMS[arm](files)
    returned = time.monotonic() - start
    page = os.sysconf("SC_PAGE_SIZE")
    for tensor in tensors.values():
        tensor.reshape(-1).view(torch.uint8)[::page].sum()
    touched = time.monotonic() - start
    facts = {
        "load_seconds": returned,
        "seconds": touched,
        "disk_bytes": disk_bytes() - before,
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "phases": gdsload.last_report().phases if arm.startswith("gdsload") else {},
    }
    print(json.dumps(facts), flush=True)
    # One rank must not close its sockets while another one still loads.
    dist.barrier()
    os._exit(0)


def measure(arm: str, count: int, files: list[str], python: str) -> dict[str, Any]:
    """One load by `count` ranks, cold."""
    from . import cache

    left = cache.evict([Path(file) for file in files])
    places = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    with tempfile.TemporaryDirectory() as meet:
        running = [
            subprocess.Popen(
                [python, "-m", "benchmarks.ranks", "--rank", arm, *files],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": places, "RANK": str(number),
                     "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(count),
                     "WORLD_SIZE": str(count), "GROUP": f"{meet}/group", "OMP_NUM_THREADS": "1"},
            )
            for number in range(count)
        ]  # fmt: skip
        try:
            told = [each.communicate(timeout=PATIENCE_SECONDS) for each in running]
        finally:
            for each in running:
                each.kill()
    if any(each.returncode for each in running):
        why = next(
            errors for (_, errors), each in zip(told, running, strict=True) if each.returncode
        )
        return {"error": why.strip().splitlines()[-1] if why.strip() else "it was killed"}
    found = [json.loads(out.splitlines()[-1]) for out, _ in told]
    return {
        "seconds": max(one["seconds"] for one in found),
        "load_seconds": max(one["load_seconds"] for one in found),
        "amplification": sum(one["disk_bytes"] for one in found) / found[0]["bytes"],
        "bytes": found[0]["bytes"],
        "resident_before": left,
        "phases": found[0]["phases"],
    }


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("model", nargs="*")
    words.add_argument("--rank", default="", help=argparse.SUPPRESS)
    words.add_argument("--ranks", default="1,2,4")
    words.add_argument("--arms", default=",".join(ARMS))
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--python", default=sys.executable)
    words.add_argument("--out", type=Path)
    options = words.parse_args()
    if options.rank:
        rank(options.rank, options.model)
    files = sorted(str(file) for file in Path(options.model[0]).glob("*.safetensors"))
    rows = []
    for count in map(int, options.ranks.split(",")):
        rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in options.arms.split(",")}
        for _ in range(options.rounds):
            for arm, measured in rounds.items():
                measured.append(measure(arm, count, files, options.python))
        for arm, measured in rounds.items():
            errors = [one["error"] for one in measured if "error" in one]
            if errors:
                print(f"{count} ranks {arm:18} failed: {errors[0]}", flush=True)
                continue
            row = {"ranks": count, "arm": arm, "rounds": measured}
            for name in ("seconds", "amplification"):
                row[name] = median(one[name] for one in measured)
            rows.append(row)
            if options.out is not None:
                facts = {"model": Path(options.model[0]).name, "rows": rows}
                options.out.write_text(json.dumps(facts, indent=1) + "\n")
            print(
                f"{count} ranks {arm:18} {row['seconds']:6.2f} s,"
                f" disk bytes over tensor bytes {row['amplification']:.2f}",
                flush=True,
            )
    if options.out is not None:
        options.out.write_text(
            json.dumps({"model": options.model[0], "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
