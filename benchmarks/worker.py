"""Runs one arm once, in a fresh process, under the control of the judge.

    judge                          worker
      starts it with a job   ->      imports, rehearses on a small file      says "imported"
      drops the page cache   ->      touches and frees memory, waits idle    says "prepared"
      checks that it is gone ->      loads, touches every byte               says what it cost

The worker knows neither the state of the page cache nor what the other arms have found.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import device as gpu
from .arms import KINDS, versions
from .device import Watch
from .loaded import CPU, Loaded, Wanted
from .pages import Memory

with contextlib.suppress(ModuleNotFoundError):  # only `view` needs it, for tensors on the CPU
    import numpy  # noqa: F401 - its import is not what is measured

PR_SET_PDEATHSIG = 1
PAGE_BYTES = 4096
STATUS_FIELDS = ("VmRSS", "VmHWM", "RssAnon", "RssFile", "RssShmem")


def status() -> dict[str, int]:
    """Bytes of memory of this process, by the kernel's names."""
    found = {}
    with open("/proc/self/status") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name in STATUS_FIELDS:
                found[name] = int(value.split()[0]) << 10
    return found


def forget_peak() -> bool:
    """Resets VmHWM to the resident bytes; False if the kernel does not allow it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def view(address: int, nbytes: int, dtype: str) -> Any:
    """An array over memory that somebody else keeps alive."""
    import numpy

    return numpy.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype)


def touch(places: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """The sum of each tensor's bytes, taken as 64-bit integers: each is read once, by one thread.

    The same few instructions for every arm, whatever made the memory.
    """
    sums = {}
    for name, (address, nbytes) in places.items():
        words = nbytes // 8
        total = int(view(address, 8 * words, "int64").sum()) if words else 0
        if tail := nbytes - 8 * words:
            total += int.from_bytes(ctypes.string_at(address + 8 * words, tail), "little")
        sums[name] = total & 0xFFFFFFFFFFFFFFFF
    return sums


def total(places: Mapping[str, tuple[int, int]]) -> int:
    """The sum of all of them, of every byte."""
    return sum(touch(places).values()) & 0xFFFFFFFFFFFFFFFF


def touch_pages(places: Mapping[str, tuple[int, int]]) -> None:
    """Reads a byte of each page."""
    for address, nbytes in places.values():
        if nbytes:
            view(address, nbytes, "uint8")[::PAGE_BYTES].sum()


def checksums(places: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """CRC-32 of each tensor: unlike the sum, it knows the order of the bytes. Outside the clock."""
    return {
        name: zlib.crc32(view(address, nbytes, "uint8")) if nbytes else 0
        for name, (address, nbytes) in places.items()
    }


def usage() -> dict[str, float]:
    """CPU seconds of all threads of this process, and its faults."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "user_s": used.ru_utime,
        "system_s": used.ru_stime,
        "minor_faults": used.ru_minflt,
        "major_faults": used.ru_majflt,
    }


def read_bytes() -> int:
    """What this process made storage read, by the kernel's account of it."""
    with contextlib.suppress(OSError), open("/proc/self/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
    return -1


def settle(device: str) -> None:
    """Waits for what a GPU still has to do: tensors may be handed out before they are there."""
    if device != CPU:
        import torch

        torch.cuda.synchronize(device)


def measured(load: Any, source: Path, device: str) -> tuple[dict[str, Any], Loaded]:
    """Loads and touches, with everything on the scales.

    On the CPU the clock runs until every byte was touched, for some are read only then. A GPU has
    them all when it has done what it was given: touching them there would be a measurement of
    reductions, each with a wait of its own, and of the kernels that CUDA loads for them.
    """
    gc.collect()
    peak_known = forget_peak()
    before, io, memory = usage(), read_bytes(), status()
    with Watch(device) as watch:
        began = time.monotonic()
        loaded: Loaded = load(source)
        settle(device)
        there = time.monotonic()
        half = usage()
        sums = touch(loaded.places) if loaded.tensors is None else gpu.touch(loaded.tensors)
        ended = time.monotonic()
    after, memory_after = usage(), status()
    cost = {name: after[name] - before[name] for name in after}
    load_cpu = sum(half[name] - before[name] for name in ("user_s", "system_s"))
    facts = {
        "seconds": (ended if loaded.tensors is None else there) - began,
        "load_s": there - began,
        "touch_s": ended - there,
        **watch.facts(),
        **cost,
        "cpu_s": cost["user_s"] + cost["system_s"] if loaded.tensors is None else load_cpu,
        "load_cpu_s": load_cpu,
        "peak_rss_bytes": memory_after["VmHWM"] - memory["VmRSS"] if peak_known else None,
        "anon_bytes": memory_after["RssAnon"] - memory["RssAnon"],
        "file_bytes": memory_after["RssFile"] - memory["RssFile"],
        "own_read_bytes": read_bytes() - io if io >= 0 else None,
        "touched_bytes": sum(nbytes for _, nbytes in loaded.places.values()),
        "sums": sums,
        "notes": loaded.notes,
    }
    return facts, loaded


def said(file: Any, **facts: Any) -> None:
    print(json.dumps(facts), file=file, flush=True)


def steps(job: Mapping[str, Any], out: Any) -> Iterator[str]:
    """The worker's part of the conversation: yields what it has just done."""
    kind = KINDS[job["kind"]]
    source = Path(job["source"])
    found = versions(kind)
    opened = kind.open(Wanted(source, job["settings"], job["device"]))
    if job["rehearsal"]:
        opened.load(Path(job["rehearsal"]))
    gc.collect()
    yield "imported"
    memory = Memory(*job["memory"])
    memory.touch()
    opened.prepare()
    memory.wait()
    yield "prepared"
    facts, loaded = measured(opened.load, source, job["device"])
    said(out, step="measured", versions=found, **facts)
    if job["checksums"]:
        known = loaded.tensors
        crcs = checksums(loaded.places) if known is None else gpu.checksums(known)
        said(out, step="checked", crcs=crcs)


def die_with_the_judge() -> None:
    """A worker whose judge was killed would go on and hold the disk and the memory."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Answers on the descriptor that was stdout; what libraries print goes to stderr."""
    die_with_the_judge()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())
    try:
        for step in steps(job, out):
            said(out, step=step)
            if sys.stdin.readline().strip() != "go":
                break
    except BaseException as error:
        traceback.print_exc()
        said(out, step="failed", why=f"{type(error).__name__}: {error}")
    out.flush()
    # Threads that a library left behind are not waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
