"""Loads a checkpoint with gdsload, safetensors and transformers, and compares times and bytes.

    make demo

The checkpoint has the names and shapes of Qwen3-0.6B (1.5 GB) and made-up weights; it is written
once, below build/demo. Each figure is the median of three rounds, in which the loaders take turns;
every byte of every tensor is touched before the clock stops. Exits with 1 if a bit differs.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import gdsload
from gdsload.errors import GdsloadError
from gdsload.memory import page_cache
from gdsload.synthetic import checkpoints
from gdsload.system.progress_bar import progress_bar

MODEL = "qwen3-0.6b"
DIRECTORY = Path(__file__).resolve().parents[1] / "build" / "demo" / MODEL
ROUNDS = 3
DISK_BYTES = 1_600_000_000
# Two models at once for the comparison, and the memory of Python and torch.
MEMORY_BYTES = 5_000_000_000


class Arm(NamedTuple):
    name: str
    load: Callable[[], Iterable[object]]  # returns the tensors


class Timing(NamedTuple):
    seconds: float
    resident_bytes: int  # of the checkpoint, in the page cache, just before


def say(text: str = "") -> None:
    print(text, flush=True)


def status(text: str) -> None:
    """Replaces the last line of a terminal; elsewhere nothing is shown."""
    if sys.stderr.isatty():
        print(f"\r{text:<79}", end="" if text else "\r", file=sys.stderr, flush=True)


def files() -> list[Path]:
    return sorted(DIRECTORY.glob("*.safetensors"))


def make_checkpoint() -> None:
    DIRECTORY.parent.mkdir(parents=True, exist_ok=True)
    with (DIRECTORY.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another `make demo` may be writing it
        write_checkpoint()


def write_checkpoint() -> None:
    if checkpoints.holds(DIRECTORY, MODEL):
        return
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    free = shutil.disk_usage(DIRECTORY.parent).free
    if free < DISK_BYTES:
        sys.exit(
            f"demo: needs {DISK_BYTES / 1e9:.1f} GB below {DIRECTORY.parent} for its checkpoint, "
            f"and the disk has {free / 1e9:.1f} GB free"
        )
    say(f"writing {DIRECTORY} (once)")
    with progress_bar(None, checkpoints.total_bytes(MODEL), title=MODEL) as advance:
        checkpoints.write(MODEL, DIRECTORY, progress=advance)


def touch(tensors: Iterable[object]) -> None:
    """Reads every byte: lazily mapped tensors are not loaded before that."""
    import torch

    for tensor in tensors:
        assert isinstance(tensor, torch.Tensor)
        # Sums of 64-bit words run at 30 GB/s, so that they do not hide the time of the load.
        raw = tensor.detach().reshape(-1).view(torch.uint8)
        words = raw.numel() // 8 * 8
        raw[:words].view(torch.int64).sum()
        raw[words:].sum()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def resident() -> int:
    return sum(page_cache.resident_bytes(file) for file in files())


def make_cold() -> None:
    for file in files():
        page_cache.evict(file)
    # Pages that are left are mapped by another process; root can drop the whole page cache.
    if resident():
        page_cache.drop_caches()


def make_warm() -> None:
    buffer = bytearray(1 << 20)
    for file in files():
        with file.open("rb", buffering=0) as source:
            while source.readinto(buffer):
                pass


def back_memory() -> None:
    """Touches as much memory as a load needs and gives it back.

    On a virtual machine the host must first provide a page that was never touched, which can
    take longer than the read, and would hit the arms at random.
    """
    import torch

    torch.full((checkpoints.total_bytes(MODEL),), 1, dtype=torch.uint8)


def timed(arm: Arm, make_ready: Callable[[], None]) -> Timing:
    gc.collect()
    back_memory()
    make_ready()
    before = resident()
    begin = time.perf_counter()
    tensors = arm.load()
    touch(tensors)
    return Timing(time.perf_counter() - begin, before)


def compare(title: str, arms: list[Arm]) -> None:
    """Prints one table: the medians of the arms, cold and warm, and their ratio."""
    states = {"cold": make_cold, "warm": make_warm}
    found: dict[tuple[str, str], list[Timing]] = {}
    say(f"\n{title}")
    for turn in range(ROUNDS):
        for state, make_ready in states.items():
            for arm in arms if turn % 2 == 0 else reversed(arms):
                status(f"round {turn + 1} of {ROUNDS}, {state}: {arm.name}")
                found.setdefault((arm.name, state), []).append(timed(arm, make_ready))
    status("")
    size = checkpoints.total_bytes(MODEL)
    medians = {
        key: statistics.median(timing.seconds for timing in timings)
        for key, timings in found.items()
    }
    width = max(len(arm.name) for arm in arms) + 2
    say(" " * width + "".join(f"{state:<20}" for state in states))
    for arm in arms:
        cells = (medians[arm.name, state] for state in states)
        line = "".join(f"{f'{s:.2f} s  {size / s / 1e9:.1f} GB/s':<20}" for s in cells)
        say(f"{arm.name:<{width}}{line}")
    ours, theirs = (arm.name for arm in arms)
    ratios = {state: medians[theirs, state] / medians[ours, state] for state in states}
    texts = (f"{ratio:.2f} times as fast {state}" for state, ratio in ratios.items())
    say(f"gdsload is {' and '.join(texts)}")
    left = max(t.resident_bytes for arm in arms for t in found[arm.name, "cold"])
    if left * 100 > size:
        say(f"NOT really cold: up to {left / 1e6:.0f} MB were still in the page cache")


def same_bits(ours: object, theirs: object) -> bool:
    import torch

    assert isinstance(ours, torch.Tensor)
    assert isinstance(theirs, torch.Tensor)
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    # As integers: as floating point, NaN differs from itself and -0 equals 0.
    a, b = (x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (ours, theirs))
    return torch.equal(a, b)


def differences(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    odd = sorted(ours.keys() ^ theirs.keys())
    return odd + [
        name for name in ours.keys() & theirs.keys() if not same_bits(ours[name], theirs[name])
    ]


def verdict(what: str, ours: dict[str, object], theirs: dict[str, object]) -> bool:
    wrong = differences(ours, theirs)
    if wrong:
        say(f"{what}: {len(wrong)} DIFFER: {', '.join(wrong[:5])}")
    else:
        say(f"{what}: {len(ours)} tensors, equal bit for bit")
    return not wrong


def io_paths() -> str:
    report = gdsload.last_report()
    paths = (f"{name} {size / 1e6:.0f} MB" for name, size in report.paths.items())
    return f"I/O paths of a cold load: {', '.join(paths)}"


def dictionaries(device: str) -> bool:
    from safetensors.torch import load_file

    def theirs() -> dict[str, object]:
        loaded: dict[str, object] = {}
        for file in files():
            loaded.update(load_file(file, device=device))
        return loaded

    def ours() -> dict[str, object]:
        return dict(gdsload.load_file(DIRECTORY, device=device))

    compare(
        f"[1/2] state dict to {device}: every byte touched, median of {ROUNDS} rounds",
        [
            Arm("gdsload.load_file", lambda: ours().values()),
            Arm("safetensors load_file", lambda: theirs().values()),
        ],
    )
    make_cold()
    equal = verdict("state dict", ours(), theirs())
    say(io_paths())
    return equal


def models(device: str) -> bool:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    settings = {"dtype": "auto"} | ({"device_map": device} if device != "cpu" else {})
    ours = functools.partial(gdsload.from_pretrained, str(DIRECTORY), **settings)
    theirs = functools.partial(AutoModelForCausalLM.from_pretrained, str(DIRECTORY), **settings)

    compare(
        f"[2/2] transformers model on {device}: every byte touched, median of {ROUNDS} rounds",
        [
            Arm("gdsload.from_pretrained", lambda: ours().state_dict().values()),
            Arm("AutoModelForCausalLM.from_pretrained", lambda: theirs().state_dict().values()),
        ],
    )
    make_cold()
    equal = verdict("model", dict(ours().state_dict()), dict(theirs().state_dict()))
    say(io_paths())
    return equal


def main() -> int:
    import psutil
    import torch

    make_checkpoint()
    memory = psutil.virtual_memory()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    say(
        f"gdsload {gdsload.__version__}, torch {torch.__version__}, Linux {platform.release()}, "
        f"{os.cpu_count()} cores, {memory.total / 1e9:.0f} GB, {gpu}"
    )
    size = checkpoints.total_bytes(MODEL)
    count = len(list(checkpoints.shapes(MODEL)))
    say(f"{MODEL}: {count} tensors, {size / 1e9:.2f} GB; made-up weights")
    if memory.available < MEMORY_BYTES:
        sys.exit(
            f"demo: needs {MEMORY_BYTES / 1e9:.0f} GB of free memory to compare two loads, "
            f"and {memory.available / 1e9:.1f} GB are free"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    equal = dictionaries(device)
    if hasattr(gdsload, "from_pretrained"):
        equal &= models(device)
    return 0 if equal else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GdsloadError as error:
        sys.exit(f"demo: {error}")
    except OSError as error:  # such as a checkpoint whose pages only its owner may ask for
        sys.exit(f"demo: {error.filename or DIRECTORY}: {error.strerror}")
