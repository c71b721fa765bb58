"""Checks gdsload on a GPU: exact bytes, hazards, exits, rates, other loaders; within a time budget.

    python scripts/gpu_check.py --budget 560 --out DIR [CHECKPOINT ...]

    facts ─► exact ─► first ─► allocators ─► streams ─► capture ─► exits ─► fork ─► model ─► cufile
      ─► micro ─► tables, until the budget ends

Each section is a child process with a time limit: a crash or a hang ends only its section. Each
result is appended to DIR/results.jsonl at once, stderr of all goes to DIR/log.txt, and
DIR/summary.md has a verdict for each claim: met, missed or not measured. The exit status is 1 if a
claim was missed or the exactness of posix was not measured; and, before any section, if gdsload or
torch cannot be imported or torch has no GPU.

Needs torch, and gdsload: from the directory `wheels` beside this file (`make gpu-bundle`),
installed, or a checkout.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import ctypes
import faulthandler
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import mmap
import os
import pkgutil
import platform
import re
import resource
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
MIB = 1 << 20
POISON = 0xA5
# Modules of the driver and of libraries are loaded lazily, and cuFile has caches: device memory
# that is used after the first load is no leak up to this.
FIRST_USE_BYTES = 32 << 20
BUSY_SECONDS = 0.5
# A load that takes as long has waited for that work, of which at least half was left.
WAITED_SECONDS = 0.2
WRONG, FAILED, LEFT = "WRONG", "FAILED", "LEFT"
# With these codes cuFile refuses a file of this machine: see docs/gds-setup.md.
FILE_REFUSALS = (5008, 5027, 5030)


class Refused(Exception):
    """This machine cannot run a check."""


# ---- the device ----------------------------------------------------------------------------------


class Gpu:
    """The calls of torch that this script makes. `--gpu` replaces them without a GPU."""

    is_real = True

    def __init__(self, device: str) -> None:
        self.device = device
        self.host_device = device  # for model and tables: a device that torch itself knows

    @functools.cached_property
    def torch(self) -> Any:
        return importlib.import_module("torch")

    def empty(self, nbytes: int) -> Any:
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device=self.device)

    def upload(self, tensor: Any) -> Any:
        return tensor.to(self.device)

    def synchronize(self) -> None:
        self.torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        self.torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Free memory of the device, without what torch's allocator caches."""
        self.synchronize()
        self.empty_cache()
        return int(self.torch.cuda.mem_get_info(self.device)[0])

    def keep_busy(self, seconds: float) -> None:
        """Queues work on the current stream that takes this long."""
        clock_hz = 1.6e9  # of no importance: between 0.5 and 1 times as long as asked for
        self.torch.cuda._sleep(int(seconds * clock_hz))

    def stream(self) -> Any:
        """A context manager: another current stream."""
        stream = self.torch.cuda.Stream(self.device)
        stream.wait_stream(self.torch.cuda.current_stream(self.device))
        return self.torch.cuda.stream(stream)

    @contextmanager
    def capture(self, mode: str, *, here: bool = False) -> Iterator[Callable[[], None]]:
        """Captures a graph in this thread; yields the function that replays it.

        `here` says that the load is in this thread too.
        """
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, capture_error_mode=mode):
            yield graph.replay

    def fill_memory(self, leave_bytes: int) -> Any:
        """Memory of the device that leaves only so much free."""
        self.empty_cache()
        free, _ = self.torch.cuda.mem_get_info(self.device)
        return self.empty(free - leave_bytes)


class Context(NamedTuple):
    """What a section gets: the device, a directory for checkpoints, and its time."""

    gpu: Gpu
    work: Path
    out: Path
    small: bool
    bare: bool
    ends: float  # by time.monotonic()
    checkpoints: list[Path]
    arguments: list[str]  # that start this script again in the same setting

    @property
    def device(self) -> str:
        return self.gpu.device

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def checkpoint(self, name: str, layers: int | None = None) -> Path:
        """A synthetic checkpoint; written by the first section that asks for it. Raises Refused if
        the time of the section is too short for that."""
        from gdsload.synthetic import checkpoints

        path = self.work / (name if layers is None else f"{name}-{layers}")
        refused = path.with_name(f"{path.name}.refused")  # another section has tried

        def require_time(_: int) -> None:
            if self.left < LEAST_SECONDS or refused.exists():
                refused.touch()
                raise Refused(f"the disk is too slow to write {path.name} in time")

        if not path.exists():
            require_time(0)
            checkpoints.write(name, path, layers=layers, progress=require_time)
        return path

    @property
    def main_checkpoint(self) -> Path:
        """A few hundred MB: more than the slots of a staging ring hold."""
        return self.checkpoint("tiny") if self.small else self.checkpoint("qwen3-0.6b", 6)


# ---- loads, compared on the device ---------------------------------------------------------------


def files_of(source: Path) -> list[Path]:
    return sorted(source.glob("*.safetensors")) if source.is_dir() else [source]


def raw(tensor: Any) -> Any:
    """The bytes of a tensor, on its device."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def expected(gpu: Gpu, source: Path) -> dict[str, Any]:
    """The tensors of a checkpoint by safetensors, on the device: nothing of gdsload is in them."""
    import safetensors.torch

    found: dict[str, Any] = {}
    for file in files_of(source):
        found |= safetensors.torch.load_file(file)
    return {name: gpu.upload(tensor) for name, tensor in found.items()}


def differs(got: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first tensor that differs, and how; "" if none does."""
    import torch

    if got.keys() != wanted.keys():
        return f"other names: {sorted(got.keys() ^ wanted.keys())[:3]}"
    for name, tensor in wanted.items():
        if got[name].dtype != tensor.dtype or got[name].shape != tensor.shape:
            return f"{name}: {got[name].dtype} {tuple(got[name].shape)}"
        if got[name].device != tensor.device:
            return f"{name}: on {got[name].device}"
        if not torch.equal(raw(got[name]), raw(tensor)):
            return f"{name}: other bytes"
    return ""


def poison(gpu: Gpu, wanted: dict[str, Any]) -> None:
    """Fills free memory of the device, in blocks as large as the tensors, with bytes of no tensor.

    Otherwise the bytes of the load before would pass for those of a copy that never ran. torch's
    allocator keeps its blocks; a prefetch takes memory from the driver, which is filled too.
    """
    import torch

    from gdsload._native.cuda import Block
    from gdsload.memory.tensors import tensor_of
    from gdsload.system import gpu as gpus

    blocks = [gpu.empty(tensor.nbytes) for tensor in wanted.values() if tensor.nbytes]
    for block in blocks:
        block.fill_(POISON)
    driver_block = Block(
        gpus.device(gpus.ordinal_of(gpu.device)), sum(block.nbytes for block in blocks)
    )
    whole = tensor_of(driver_block.view(0, driver_block.length, (driver_block.length,), 1, 8))
    whole.view(torch.uint8).fill_(POISON)
    gpu.synchronize()


def used_bytes(gpu: Gpu) -> int:
    """Bytes of the device in use, without the reserve of torch's allocator."""
    from gdsload.system import gpu as gpus

    gpu.synchronize()
    gpu.empty_cache()
    free, total = gpus.device(gpus.ordinal_of(gpu.device)).memory()
    return total - free


class Check(NamedTuple):
    """A check of a section, which `rows_of` makes if there is time."""

    name: str
    make_row: Callable[[], Row]


def leaked_bytes(used: Sequence[int]) -> int:
    """Bytes of the device that loads left, from those in use before and after each; 0 if they may
    be the driver's. It takes 2 MiB more now and then, for channels and page tables."""
    grew = [after - before for before, after in itertools.pairwise(used)]
    return sum(grew) if min(grew) > 0 or sum(grew) > FIRST_USE_BYTES else 0


def tried(name: str, make_row: Callable[[], Row]) -> Row:
    """The row of one check in any case: an error is a verdict too."""
    import gdsload

    began = time.monotonic()
    row: Row = {"name": name, "verdict": "ok"}
    try:
        row |= make_row()
    except (Refused, gdsload.BackendUnavailable) as error:
        row["verdict"] = f"refused: {error}"
    except gdsload.CuFileError as error:  # without bytes that were wanted: of no read, but a file
        refused = error.code in FILE_REFUSALS and not error.wanted
        row["verdict"] = f"{'refused' if refused else FAILED}: {error}"
    except gdsload.GdsloadError as error:
        row["verdict"] = f"{FAILED}: {error}"
    except Exception as error:
        row["verdict"] = f"{FAILED}: {type(error).__name__}: {error}"
        row["traceback"] = traceback.format_exc()
    return row | {"row_seconds": round(time.monotonic() - began, 3)}


def loading(gpu: Gpu, source: Path, **words: Any) -> Callable[[], dict[str, Any]]:
    """`load_file` with these arguments. Raises Refused if the files do not support direct I/O and
    it is asked for."""
    import gdsload

    def load() -> dict[str, Any]:
        if words.get("cache") == "direct" and (why := no_direct_io(files_of(source)[0])):
            raise Refused(f"no direct I/O: {why}")
        return gdsload.load_file(source, gpu.device, **words)

    return load


@functools.cache
def no_direct_io(file: Path) -> str:
    """Why a file cannot be read by direct I/O; "" if it can."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        return str(error)
    try:
        with mmap.mmap(-1, 64 << 10) as memory:
            os.preadv(fd, [memory], 0)
    except OSError as error:
        return str(error)
    finally:
        os.close(fd)
    return ""


def twice(gpu: Gpu, wanted: dict[str, Any], load: Callable[[], dict[str, Any]]) -> Row:
    """Loads three times over poisoned memory: exact bytes, and no memory of the device left.

    The first load has what a driver allocates once; one of the others must leave nothing. If the
    third does not, there are two more.
    """
    import gdsload
    from gdsload.memory import staging_ring

    row: Row = {"verdict": "exact"}
    used: list[int] = []
    staging_ring.release_rings()
    for turn in ("settling", "first", "again", "fourth", "fifth"):
        poison(gpu, wanted)
        got = load()
        row[turn] = {**gdsload.last_report().to_dict(), "source": ""}
        if wrong := differs(got, wanted):
            return row | {"verdict": f"{WRONG}: {wrong}"}
        del got
        staging_ring.release_rings()
        used.append(used_bytes(gpu))
        if len(used) > 2 and used[-1] <= used[-2]:
            break
    row["left_bytes"] = used[-1] - used[1]
    if left := leaked_bytes(used[1:]):
        row["verdict"] = f"{LEFT}: {left:,} bytes of the device by {len(used) - 2} loads"
    elif used[1] - used[0] > FIRST_USE_BYTES:
        row["verdict"] = f"{LEFT}: {used[1] - used[0]:,} bytes of the device by the second load"
    return row


def by_native_path(row: Row) -> Row:
    """The row of loads by cuFile: FAILED if there is a native path, and a load took another one for
    more than the ends of files."""
    from gdsload.backends.auto.backend import MOST_COMPAT_BYTES, MOST_COMPAT_SHARE
    from gdsload.backends.cufile import library

    if row["verdict"] != "exact" or not library.native_path()[0]:
        return row
    for report in (each for each in row.values() if isinstance(each, dict)):
        paths = report["paths"]
        total = sum(paths.values())
        native = (library.NVFS, library.P2P)
        other = sum(n for path, n in paths.items() if path.rpartition("/")[2] not in native)
        # Of a small file, the end may be half of its reads.
        if other > min(max(MOST_COMPAT_BYTES, MOST_COMPAT_SHARE * total), total / 2):
            return row | {"verdict": f"{FAILED}: not by the native path: {paths}"}
    return row


def posix_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of load_file) of every engine, I/O mode and kind of buffer."""
    from gdsload.backends.posix.engines import ENGINES

    for engine in ENGINES:
        for cache in ("direct", "buffered"):
            for fixed in ("auto", "never") if engine == "uring" else ("auto",):
                options: dict[str, Any] = {"engine": engine, "fixed_buffers": fixed}
                name = f"posix/{engine}/{cache}" + ("" if fixed == "auto" else "/not-fixed")
                yield name, {"backend": "posix", "cache": cache, "options": options}
    options = {"ring_bytes": 16 * MIB, "request_bytes": MIB}  # each slot is used many times
    yield "posix/small-ring", {"backend": "posix", "cache": "buffered", "options": options}


def odd_file(context: Context) -> Path:
    """Tensors that are not aligned, have no bytes, or have dtypes that need care. In the order of
    safetensors, whose own writer needs numpy."""
    import torch

    from gdsload.checkpoint.header import header_bytes

    path = context.work / "odd.safetensors"
    if not path.exists():
        tensors = [
            ("scalar", "F64", torch.tensor(2.5, dtype=torch.float64)),
            ("none", "F32", torch.empty(0, 5)),
            ("large", "I32", torch.arange(3_000_001, dtype=torch.int32)),
            ("short", "I16", torch.arange(333, dtype=torch.int16)),
            (
                "float8",
                "F8_E4M3",
                torch.arange(200_000, dtype=torch.float32).to(torch.float8_e4m3fn),
            ),
            ("bytes", "U8", torch.arange(7, dtype=torch.uint8)),
            ("bool", "BOOL", torch.ones(3, 1, dtype=torch.bool)),
        ]
        header = header_bytes(
            (name, dtype, each.shape, each.nbytes) for name, dtype, each in tensors
        )
        data = (ctypes.string_at(each.data_ptr(), each.nbytes) for _, _, each in tensors)
        path.write_bytes(header + b"".join(data))
    return path


def exact(context: Context) -> Iterator[Row | Check]:
    """Every way of reading, over poisoned memory."""
    import gdsload

    gpu, source = context.gpu, context.main_checkpoint
    wanted = expected(gpu, source)

    for name, words in posix_cases():
        yield Check(name, lambda words=words: twice(gpu, wanted, loading(gpu, source, **words)))
    yield Check("auto", lambda: twice(gpu, wanted, loading(gpu, source, backend="auto")))
    for backend in ("gds_mt", "gds"):
        yield Check(
            backend,
            lambda name=backend: by_native_path(
                twice(gpu, wanted, loading(gpu, source, backend=name))
            ),
        )
    yield Check(
        "stream",
        lambda: twice(
            gpu, wanted, lambda: dict(gdsload.stream(source, gpu.device, window_bytes=16 * MIB))
        ),
    )
    yield Check("prefetch", lambda: prefetched(context, source, wanted))
    yield Check("prefetch to the host", lambda: prefetched_to_host(context, source, wanted))
    yield Check(
        "prefetch to a pinned pool",
        lambda: prefetched_to_host(context, source, wanted, pinned=True),
    )
    yield Check("slices", lambda: slices(context, source, wanted))
    yield Check("slices after a prefetch", lambda: sliced_load(context, source, wanted))
    del wanted
    others = [odd_file(context), *([] if context.small else [context.checkpoint("tiny-moe")])]
    for other in others:
        wanted = expected(gpu, other)
        for cache in ("direct", "buffered"):
            yield Check(
                f"{other.stem}/{cache}",
                lambda wanted=wanted, other=other, cache=cache: twice(
                    gpu, wanted, loading(gpu, other, backend="posix", cache=cache)
                ),
            )


def prefetched(context: Context, source: Path, wanted: dict[str, Any]) -> Row:
    """A prefetch to the device is taken over by a load, and nothing is read again."""
    import gdsload

    device, found = context.device, {}

    def load() -> dict[str, Any]:
        with gdsload.prefetch(source, device) as prefetch:
            prefetch.wait()
            found["prefetch"] = prefetch.report.to_dict()
            got = gdsload.load_file(source, device)
        report = gdsload.last_report()
        if refusal := found["prefetch"]["refusals"].get(device):
            raise gdsload.GdsloadError(f"it went to host memory: {refusal}")
        if report.read_bytes or set(report.paths) != {"prefetched"}:
            raise gdsload.GdsloadError(f"the load read {report.read_bytes:,} bytes again")
        if any(tensor.data_ptr() % 256 for tensor in got.values()):
            raise gdsload.GdsloadError("a tensor is not aligned")
        return got

    return {**twice(context.gpu, wanted, load), **found}


def prefetched_to_host(
    context: Context, source: Path, wanted: dict[str, Any], *, pinned: bool = False
) -> Row:
    """A load copies bytes from host memory: the device those that are pinned, threads the others,
    through the ring."""
    import gdsload
    from gdsload.backends import host_copies

    def load() -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            if pinned:
                stack.enter_context(gdsload.warmup.HostPool(1 << 36, pinned=True))
            tier = "pool" if pinned else "memory"
            stack.enter_context(gdsload.prefetch(source, tier=tier)).wait()
            got = gdsload.load_file(source, context.device)
        if read_bytes := gdsload.last_report().read_bytes:
            raise gdsload.GdsloadError(f"the load read {read_bytes:,} bytes again")
        return got

    with mock.patch.object(host_copies, "LEAST_BYTES_WITHOUT_RING", 0):
        return twice(context.gpu, wanted, load)


def slices(context: Context, source: Path, wanted: dict[str, Any]) -> Row:
    """Slices of safe_open are those of the whole tensors."""
    import torch

    import gdsload

    for file in files_of(source):
        poison(context.gpu, wanted)
        with gdsload.safe_open(file, "pt", context.device) as opened:
            for name in list(opened.keys())[:20]:
                if not wanted[name].ndim or not wanted[name].numel():
                    continue
                rows = wanted[name].shape[0]
                part = opened.get_slice(name)[rows // 3 : rows // 3 + max(rows // 2, 1)]
                there = wanted[name][rows // 3 : rows // 3 + max(rows // 2, 1)]
                if not torch.equal(raw(part), raw(there)):
                    return {"verdict": f"{WRONG}: a slice of {name}"}
    return {"verdict": "exact"}


def sliced_load(context: Context, source: Path, wanted: dict[str, Any]) -> Row:
    """Rows of some tensors and all of others, read and taken over from a prefetch to the device."""
    import torch

    import gdsload

    rows = {name: slice(1, None) for name, each in wanted.items() if each.ndim and len(each) > 2}
    parts = {name: each[1:] if name in rows else each for name, each in wanted.items()}
    for ahead in (False, True):
        poison(context.gpu, wanted)
        with contextlib.ExitStack() as stack:
            if ahead:
                stack.enter_context(gdsload.prefetch(source, context.device)).wait()
            got = gdsload.load_file(source, context.device, slices=rows)
        if got.keys() != parts.keys():
            return {"verdict": f"{WRONG}: {len(got)} names of {len(parts)}"}
        for name, there in parts.items():
            if got[name].shape != there.shape or not torch.equal(raw(got[name]), raw(there)):
                return {"verdict": f"{WRONG}: {name}, {'prefetched' if ahead else 'read'}"}
    return {"verdict": "exact"}


def first_load(context: Context, *, prefetched: bool) -> None:
    """A load before torch is imported reads into memory of the driver, which then becomes tensors
    of torch."""
    import gdsload

    source = context.main_checkpoint
    with contextlib.ExitStack() as stack:
        if prefetched:
            stack.enter_context(gdsload.prefetch(source, context.device))
        if context.gpu.is_real and "torch" in sys.modules:
            sys.exit("torch was imported before the load")
        got = gdsload.load_file(source, context.device)
    if wrong := differs(got, expected(context.gpu, source)):
        sys.exit(f"{WRONG}: {wrong}")


# Each in a process of its own.
FIRST_LOADS = {
    "load before torch": functools.partial(first_load, prefetched=False),
    "prefetch before torch": functools.partial(first_load, prefetched=True),
}


def first(context: Context) -> Iterator[Row | Check]:
    """Loads before torch is imported."""
    _ = context.main_checkpoint
    for name in FIRST_LOADS:
        yield Check(name, lambda name=name: ended(context, name))


def allocator(context: Context) -> Iterator[Row | Check]:
    """Three ways of reading with another mode of torch's allocator, set in the environment."""
    gpu, source = context.gpu, context.main_checkpoint
    wanted = expected(gpu, source)
    mode = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    for cache, engine in (("direct", "auto"), ("buffered", "auto"), ("buffered", "threads")):
        words = {"backend": "posix", "cache": cache, "options": {"engine": engine}}
        yield Check(
            f"{mode}: posix/{engine}/{cache}",
            lambda words=words: twice(gpu, wanted, loading(gpu, source, **words)),
        )


# ---- streams, graphs, ends of a process ----------------------------------------------------------


def streams(context: Context) -> Iterator[Row | Check]:
    """Loads into memory that work still queued on the device is using."""
    gpu, source = context.gpu, context.main_checkpoint
    wanted = expected(gpu, source)
    yield Check("older work of the current stream", lambda: older_work(gpu, source, wanted))

    def on_side_stream() -> Row:
        with gpu.stream():
            return older_work(gpu, source, wanted)

    yield Check("older work of another stream", on_side_stream)
    yield Check("interrupted with copies queued", lambda: closed_early(gpu, source, wanted))
    yield Check("two threads with two streams", lambda: two_threads(gpu, source, wanted))


def older_work(gpu: Gpu, source: Path, wanted: dict[str, Any]) -> Row:
    """Queued work reads blocks that were freed, and that the load gets from torch's allocator."""
    import gdsload

    gdsload.load_file(source, gpu.device, backend="posix", cache="buffered")  # pins the ring
    poison(gpu, wanted)
    before = [gpu.empty(tensor.nbytes) for tensor in wanted.values() if tensor.nbytes]
    for block in before:
        block.fill_(7)
    places = {block.data_ptr() for block in before}
    after = [block * 2 for block in before]  # loads its kernel, which may wait for the device
    del after
    gpu.synchronize()
    gpu.keep_busy(BUSY_SECONDS)
    after = [block * 2 for block in before]
    del before
    began = time.monotonic()
    got = gdsload.load_file(source, gpu.device, backend="posix", cache="buffered")
    seconds = time.monotonic() - began
    gpu.synchronize()
    row = {
        "verdict": "exact",
        "seconds": seconds,
        "reused": sum(tensor.data_ptr() in places for tensor in got.values()),
    }
    if not all(bool((block == 14).all()) for block in after):
        row["verdict"] = f"{WRONG}: the load overwrote memory that older work was reading"
    elif wrong := differs(got, wanted):
        row["verdict"] = f"{WRONG}: {wrong}"
    return row


def closed_early(gpu: Gpu, source: Path, wanted: dict[str, Any]) -> Row:
    """A load is interrupted while its copies wait for the device: no copy may be written to memory
    that has been given to others since."""
    import gdsload

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    poison(gpu, wanted)
    gpu.keep_busy(2 * BUSY_SECONDS)
    row: Row = {"interrupted": False}
    handler = signal.signal(signal.SIGALRM, interrupt)
    began = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, BUSY_SECONDS / 2)
        gdsload.load_file(source, gpu.device, backend="posix", cache="buffered")
    except Interrupted:
        row["interrupted"] = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    row["seconds"] = time.monotonic() - began
    others = [gpu.empty(tensor.nbytes).fill_(0x5A) for tensor in wanted.values() if tensor.nbytes]
    gpu.synchronize()
    time.sleep(0.2)
    gpu.synchronize()
    if not all(bool((block == 0x5A).all()) for block in others):
        return row | {"verdict": f"{WRONG}: a copy arrived after the load was interrupted"}
    if gpu.is_real and not row["interrupted"]:
        return row | {"verdict": "refused: the load ended before it could be interrupted"}
    return row | {"verdict": "exact"}


def two_threads(gpu: Gpu, source: Path, wanted: dict[str, Any]) -> Row:
    import gdsload

    verdicts: list[str] = []
    poison(gpu, wanted)

    def work() -> None:
        try:
            with gpu.stream():
                gpu.keep_busy(BUSY_SECONDS / 2)
                got = gdsload.load_file(source, gpu.device, backend="posix", cache="buffered")
                verdicts.append(differs(got, wanted))
        except Exception as error:
            verdicts.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = "; ".join(filter(None, verdicts))
    return {"verdict": f"{WRONG}: {wrong}" if wrong else "exact"}


def capture(context: Context) -> Iterator[Row | Check]:
    """Loads while a CUDA graph is captured, by another thread and by the same."""
    import gdsload

    gpu, source = context.gpu, context.main_checkpoint
    wanted = expected(gpu, source)

    def load() -> dict[str, Any]:
        return gdsload.load_file(source, gpu.device, backend="posix", cache="buffered")

    def beside(mode: str) -> Row:
        poison(gpu, wanted)
        got: list[dict[str, Any]] = []
        value = gpu.empty(1024).fill_(1)
        with gpu.capture(mode) as replay:
            value.add_(1)
            thread = threading.Thread(target=lambda: got.append(load()))
            thread.start()
            thread.join(60)
        before = int(value[0])
        replay()
        gpu.synchronize()
        if not got:
            return {"verdict": f"{FAILED}: the load failed during a capture; see the log"}
        wrong = differs(got[0], wanted)
        if gpu.is_real and int(value[0]) != before + 1:
            wrong = "the graph does not replay"
        return {"verdict": f"{WRONG}: {wrong}" if wrong else "exact"}

    def inside() -> Row:
        row = {"verdict": f"{FAILED}: a load into a captured stream was not refused"}
        try:
            with gpu.capture("thread_local", here=True):
                try:
                    load()
                except gdsload.PlacementError as error:
                    row = {"verdict": "ok", "error": str(error)}
        except RuntimeError as error:
            row["verdict"] = f"{FAILED}: the capture is broken: {error}"
        return row

    # torch cannot capture in this process again after a capture has failed: the default mode, which
    # a call of another thread can break, is the last one.
    yield Check("capture in another thread, thread_local", lambda: beside("thread_local"))
    yield Check("capture in the loading thread", inside)
    yield Check("capture in another thread, global", lambda: beside("global"))


def exit_with_prefetch(context: Context) -> None:
    import gdsload

    gdsload.prefetch(context.main_checkpoint, context.device)
    sys.exit(0)


def exit_with_tensors(context: Context) -> None:
    import gdsload

    globals()["kept_until_exit"] = gdsload.load_file(context.main_checkpoint, context.device)


# Tries of the end with a thread that loads. If that thread is inside torch, without the GIL, and
# asks for it while Python ends, it aborts the process, whatever torch did there: before 3.14.
ABORTS = 4 if sys.version_info < (3, 14) else 1


def exit_with_daemon(context: Context) -> None:
    """The tensors stay, because torch frees a tensor without the GIL: see `ABORTS`. Those of a load
    that is refused, since the process ends, are in the frames of its error."""
    import gdsload

    source = context.main_checkpoint
    # Here, since the end of the process is not to meet the start of CUDA in the thread.
    kept: list[object] = [gdsload.load_file(source, context.device)]

    def loads() -> None:
        try:
            while True:
                kept.append(gdsload.load_file(source, context.device))
        except gdsload.PlacementError as error:
            kept.append(error)

    threading.Thread(target=loads, daemon=True).start()
    time.sleep(0.3)


def exit_by_interrupt(context: Context) -> None:
    import gdsload

    source = context.main_checkpoint
    gdsload.load_file(source, context.device)
    over = threading.Event()

    def interrupt() -> None:  # again and again: Python ignores an exception in a finalizer
        while not over.wait(0.2):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        for _ in range(2000):
            gdsload.load_file(source, context.device)
    except KeyboardInterrupt:
        over.set()
        sys.exit(130)


def exit_at_once(context: Context) -> None:
    import gdsload

    gdsload.prefetch(context.main_checkpoint, context.device)
    os._exit(7)


def exit_after_quiesce(context: Context) -> None:
    import gdsload

    gdsload.load_file(context.main_checkpoint, context.device)
    gdsload.quiesce()
    gdsload.resume()
    gdsload.load_file(context.main_checkpoint, context.device)


# (function, expected exit status)
ENDS: dict[str, tuple[Callable[[Context], None], int]] = {
    "exit-with-prefetch": (exit_with_prefetch, 0),
    "exit-with-tensors": (exit_with_tensors, 0),
    "exit-with-daemon": (exit_with_daemon, 0),
    "exit-by-interrupt": (exit_by_interrupt, 130),
    "exit-at-once": (exit_at_once, 7),
    "exit-after-quiesce": (exit_after_quiesce, 0),
}


def exits(context: Context) -> Iterator[Row | Check]:
    """Ends of a process in each state, by exit status; and a device that is full."""
    _ = context.main_checkpoint
    for name, (_function, status) in ENDS.items():
        yield Check(name, lambda name=name, status=status: ended(context, name, status))
    if context.gpu.is_real:
        yield Check("full device", lambda: full_device(context))


def ended(context: Context, name: str, status: int = 0) -> Row:
    """A process of its own, judged by its exit status."""
    command = [sys.executable, str(Path(__file__).resolve()), *context.arguments]
    for _ in range(ABORTS if name == "exit-with-daemon" else 1):
        ran = subprocess.run(
            [*command, "--section", name, "--seconds", "40"],
            capture_output=True,
            text=True,
            timeout=45,
        )
        if ran.returncode != -signal.SIGABRT:
            break
    trouble = re.search(r"Fatal|terminate called|Segmentation|left: [^0]", ran.stderr)
    good = ran.returncode == status and not trouble
    why = f"status {ran.returncode}, expected {status}: {ran.stderr.strip()[-300:]}"
    return {"verdict": "ok" if good else f"{FAILED}: {why}", "status": ran.returncode}


def full_device(context: Context) -> Row:
    """A load to a full device is refused with PlacementError, and works when there is room."""
    import gdsload

    gpu, source = context.gpu, context.main_checkpoint
    wanted = expected(gpu, source)
    gdsload.load_file(source, gpu.device)
    used = [used_bytes(gpu)]
    for _ in range(3):
        block = gpu.fill_memory(128 * MIB)
        try:
            gdsload.load_file(source, gpu.device)
            return {"verdict": f"{FAILED}: a load to a full device was not refused"}
        except gdsload.PlacementError as error:
            words = str(error)
        del block
        used.append(used_bytes(gpu))
        if used[-1] <= used[-2]:
            break
    left = leaked_bytes(used)
    wrong = differs(gdsload.load_file(source, gpu.device), wanted)
    verdict = f"{WRONG}: {wrong}" if wrong else f"{LEFT}: {left:,} bytes" if left else "ok"
    return {"verdict": verdict, "error": words}


def fork(context: Context) -> Iterator[Row | Check]:
    """A fork with a pinned ring: its time, the child's memory, and loads while the child lives."""
    import gdsload
    from gdsload.memory import staging_ring

    gpu, source = context.gpu, context.main_checkpoint
    wanted = expected(gpu, source)

    def forked() -> Row:
        gdsload.load_file(source, gpu.device, backend="posix", cache="buffered")
        rings = sum(getattr(ring, "nbytes", 0) for ring in staging_ring.rings())
        reading, writing = os.pipe()
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            status = Path("/proc/self/status").read_text()
            os.write(writing, re.findall(r"RssAnon:\s+(\d+)", status)[0].encode())
            time.sleep(2)
            os._exit(0)
        seconds = time.monotonic() - began
        try:
            anonymous = int(os.read(reading, 100)) << 10
            poison(gpu, wanted)
            got = gdsload.load_file(source, gpu.device, backend="posix", cache="buffered")
            wrong = differs(got, wanted)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return {
            "verdict": f"{WRONG}: {wrong}" if wrong else "exact",
            "fork_ms": seconds * 1e3,
            "child_anonymous_bytes": anonymous,
            "ring_bytes": rings,
        }

    yield Check("fork with a pinned ring", forked)


# ---- micro-benchmarks ----------------------------------------------------------------------------


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def touched(memory: mmap.mmap, threads: int) -> float:
    """Seconds until all pages were touched, by so many threads."""
    address, share = address_of(memory), len(memory) // threads
    began = time.monotonic()
    workers = [
        threading.Thread(target=ctypes.memset, args=(address + number * share, 1, share))
        for number in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.monotonic() - began


@contextmanager
def pinned(gpu: Gpu, nbytes: int, kind: str) -> Iterator[Any]:
    """Host memory as a tensor of bytes: registered with huge or small pages, or the driver's."""
    import torch

    from gdsload.system import gpu as gpus

    device = gpus.device(gpus.ordinal_of(gpu.device))
    if kind == "allocated":
        address = device.allocate_host(nbytes)
        try:
            yield torch.frombuffer(
                (ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8
            )
        finally:
            gpu.synchronize()
            device.release_host(address)
        return
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE if kind == "registered-huge" else mmap.MADV_NOHUGEPAGE)
    touched(memory, 4)
    if kind != "pageable":
        device.pin(address_of(memory), nbytes)
    try:
        yield torch.frombuffer(memory, dtype=torch.uint8)
    finally:
        gpu.synchronize()
        if kind != "pageable":
            device.unpin(address_of(memory))


def micro(context: Context) -> Iterator[Row | Check]:
    """Rates of each step between storage and device, on their own."""
    gpu = context.gpu
    total = 4 * MIB if context.small else 1 << 30
    ring = 2 * MIB if context.small else 256 * MIB
    sizes = (64 << 10, MIB) if context.small else tuple(each * MIB for each in (1, 2, 4, 8, 16))
    for kind in ("registered-huge", "registered-small", "allocated", "pageable"):
        yield Check(
            f"host to device: {kind}", lambda kind=kind: copies(gpu, kind, ring, total, sizes)
        )
    for nbytes in (MIB, 2 * MIB) if context.small else (64 * MIB, 256 * MIB, 512 * MIB):
        for threads in (1, 4, 8):
            yield Check(
                f"touch and register {nbytes // MIB} MiB by {threads} threads",
                lambda nbytes=nbytes, threads=threads: registering(gpu, nbytes, threads),
            )
    yield Check("device to device", lambda: device_copies(gpu, ring, total))
    source = context.main_checkpoint
    for threads in (1, 2, 4, 8, 16):
        yield Check(
            f"page cache to pinned memory by {threads} threads",
            lambda threads=threads: cached_reads(gpu, source, ring, threads),
        )


def copies(gpu: Gpu, kind: str, ring: int, total: int, sizes: Iterable[int]) -> Row:
    """GB/s by size of a copy and number of streams, and us that the host needs for one; the best of
    three runs. `slot` is the size that posix copies, `together` how many by one call."""
    from gdsload._native.stage import SLOTS_TOGETHER
    from gdsload.backends.posix.backend import SLOT_BYTES

    row: Row = {"slot": f"{SLOT_BYTES >> 10} KiB", "together": SLOTS_TOGETHER}
    target = gpu.empty(ring)
    with pinned(gpu, ring, kind) as source:
        target.copy_(source)
        for size in sizes:
            for count in (1, 2) if kind != "pageable" else (1,):
                streams = [gpu.stream() for _ in range(count)] if count > 1 else []
                queue = copying(target, source, size, streams)
                seconds, queued = best_run(gpu, queue, total // size)
                row[f"{size >> 10} KiB, {count} streams, GB/s"] = total / seconds / 1e9
                row[f"{size >> 10} KiB, {count} streams, us to queue"] = (
                    queued / (total // size) * 1e6
                )
        calls = total // (SLOT_BYTES * SLOTS_TOGETHER)
        together = None
        if kind != "pageable" and gpu.is_real and calls:
            together = copying_together(gpu, target, source, SLOT_BYTES, SLOTS_TOGETHER)
        if together is not None:
            seconds, _ = best_run(gpu, together, calls)
            label = f"{SLOT_BYTES >> 10} KiB, {SLOTS_TOGETHER} together"
            row[f"{label}, 1 streams, GB/s"] = total / seconds / 1e9
        del source
    return row


def best_run(gpu: Gpu, queue: Callable[[int], None], calls: int) -> tuple[float, float]:
    """Seconds until copies have ended, and until they were queued, by so many calls of `queue`."""
    runs = []
    for _ in range(3):
        gpu.synchronize()
        began = time.monotonic()
        for number in range(calls):
            queue(number)
        queued = time.monotonic() - began
        gpu.synchronize()
        runs.append((time.monotonic() - began, queued))
    return min(runs)


def copying(target: Any, source: Any, size: int, streams: Sequence[Any]) -> Callable[[int], None]:
    """A function that queues one copy, on these streams in turn."""

    def queue(number: int) -> None:
        at = number * size % source.nbytes
        with streams[number % len(streams)] if streams else contextlib.nullcontext():
            target[at : at + size].copy_(source[at : at + size], non_blocking=True)

    return queue


def copying_together(
    gpu: Gpu, target: Any, source: Any, size: int, count: int
) -> Callable[[int], None] | None:
    """A function that queues `count` copies of `size` bytes by one call of the driver, as a load
    does. None if this driver has no such call."""
    from gdsload.system import gpu as gpus

    copy = getattr(ctypes.CDLL(gpus.cuda().path), "cuMemcpyBatchAsync", None)
    if copy is None:
        return None
    stream = gpu.torch.cuda.Stream(gpu.device)
    addresses, sizes = ctypes.c_uint64 * count, (ctypes.c_size_t * count)(*[size] * count)
    in_stream_order, first, failed = (ctypes.c_int * 6)(1), ctypes.c_size_t(), ctypes.c_size_t()
    one, many, ring = ctypes.c_size_t(1), ctypes.c_size_t(count), source.nbytes

    def queue(number: int) -> None:
        places = [(number * count + each) * size % ring for each in range(count)]
        code = copy(
            addresses(*[target.data_ptr() + place for place in places]),
            addresses(*[source.data_ptr() + place for place in places]),
            sizes, many, in_stream_order, ctypes.byref(first), one, ctypes.byref(failed),
            ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip
        if code:
            raise RuntimeError(f"cuMemcpyBatchAsync: CUDA error {code}")

    return queue


def registering(gpu: Gpu, nbytes: int, threads: int) -> Row:
    from gdsload.system import gpu as gpus

    device = gpus.device(gpus.ordinal_of(gpu.device))
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    touch = touched(memory, threads)
    times = [time.monotonic()]
    device.pin(address_of(memory), nbytes)
    times.append(time.monotonic())
    device.unpin(address_of(memory))
    times.append(time.monotonic())
    return {
        "touch_ms": touch * 1e3,
        "register_ms": (times[1] - times[0]) * 1e3,
        "unregister_ms": (times[2] - times[1]) * 1e3,
    }


def device_copies(gpu: Gpu, ring: int, total: int) -> Row:
    source, target = gpu.empty(ring), gpu.empty(ring)
    target.copy_(source)
    gpu.synchronize()
    began = time.monotonic()
    for _ in range(total // ring):
        target.copy_(source, non_blocking=True)
    gpu.synchronize()
    return {"GB/s": total / (time.monotonic() - began) / 1e9}


def cached_reads(gpu: Gpu, source: Path, ring: int, threads: int) -> Row:
    """Reads of warm files into registered memory by threads, 4 MiB each."""
    files = files_of(source)
    for file in files:
        file.read_bytes()
    step = min(4 * MIB, ring // threads)
    reads = [(file, at) for file in files for at in range(0, file.stat().st_size, step)]
    with pinned(gpu, ring, "registered-huge") as memory:
        view = memoryview((ctypes.c_char * ring).from_address(memory.data_ptr()))
        lock, left = threading.Lock(), list(reads)

        def work(slot: memoryview) -> None:
            opened = {file: os.open(file, os.O_RDONLY) for file in files}
            while True:
                with lock:
                    if not left:
                        break
                    file, at = left.pop()
                os.preadv(opened[file], [slot], at)
            for fd in opened.values():
                os.close(fd)

        began = time.monotonic()
        workers = [
            threading.Thread(target=work, args=(view[number * step : (number + 1) * step],))
            for number in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.monotonic() - began
        del workers, view, memory
    return {"GB/s": sum(file.stat().st_size for file in files) / seconds / 1e9}


# ---- models --------------------------------------------------------------------------------------


def model(context: Context) -> Iterator[Row | Check]:
    """from_pretrained of gdsload beside transformers' own, as stored and cast."""
    for needed in ("transformers", "accelerate"):  # device_map needs the second
        if importlib.util.find_spec(needed) is None:
            yield {"name": "from_pretrained", "verdict": f"refused: {needed} is not installed"}
            return
    version = importlib.metadata.version("transformers")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (4, 57):
        why = f"transformers {version}, 4.57 is needed"
        yield {"name": "from_pretrained", "verdict": f"refused: {why}"}
        return
    source = context.checkpoint("tiny" if context.small else "qwen3-0.6b")
    for dtype in ("auto", "float32"):
        yield Check(
            f"from_pretrained, dtype={dtype}", lambda dtype=dtype: models(context, source, dtype)
        )


def models(context: Context, source: Path, dtype: str) -> Row:
    from transformers import AutoModelForCausalLM

    import gdsload

    gpu, row = context.gpu, {"verdict": "exact"}
    words = {"dtype": dtype, "device_map": {"": gpu.host_device}}

    def timed(load: Callable[..., Any]) -> tuple[Any, list[float]]:
        seconds = []
        for _ in range(3):
            found = None
            began = time.monotonic()
            found = load(str(source), **words)
            gpu.synchronize()
            seconds.append(time.monotonic() - began)
        return found, seconds

    stock, row["transformers_seconds"] = timed(AutoModelForCausalLM.from_pretrained)
    wanted = dict(stock.state_dict())
    ours, row["gdsload_seconds"] = timed(gdsload.from_pretrained)
    row["report"] = {**gdsload.last_report().to_dict(), "source": ""}
    if wrong := differs(dict(ours.state_dict()), wanted):
        row["verdict"] = f"{WRONG}: {wrong}"
    gdsload.quiesce()
    gdsload.resume()
    again = gdsload.from_pretrained(str(source), **words)
    if wrong := differs(dict(again.state_dict()), wanted):
        row["verdict"] = f"{WRONG}: after quiesce: {wrong}"
    return row


# ---- cuFile --------------------------------------------------------------------------------------


def make_udev(path: Path) -> str:
    """Creates the entry of a disk that cuFile looks for in /run/udev; returns what was done."""
    if os.path.isdir("/run/udev/data"):
        return "/run/udev is there"
    number = os.stat(path).st_dev
    entry = Path(f"/run/udev/data/b{os.major(number)}:{os.minor(number)}")
    try:
        entry.parent.mkdir(parents=True)
        entry.write_text("E:ID_FS_TYPE=ext4\nE:ID_FS_USAGE=filesystem\nG:systemd\n")
    except OSError as error:
        return f"/run/udev is missing: {error}"
    return f"created {entry}"


def by_mode(row: Row, size: str) -> Row:
    """The row of loads by cuFile, named by the mode that the first one reported."""
    report = row["settling"]
    return row | {"name": f"{report['backend']}, {report['engine']}, {size}"}


def cufile(context: Context) -> Iterator[Row | Check]:
    """cuFile with its compatibility mode allowed: time to open and to register, and exact bytes."""
    from gdsload.backends.cufile import library

    gpu, source = context.gpu, context.main_checkpoint
    yield {"name": "udev", "verdict": make_udev(context.work) if context.bare else "not changed"}
    yield Check(
        "library",
        lambda: {
            "path": library.library().path,
            "version": library.library().version,
            "native_path": " ".join(library.native_path()).strip(),
            "obstacle": library.obstacle(),
        },
    )
    wanted = expected(gpu, source)
    for backend in ("gds_mt", "gds"):
        for ring in (32 * MIB,) if context.small else (128 * MIB, 512 * MIB):
            options = {"allow_compat": True, "ring_bytes": ring}
            words = {"backend": backend, "cache": "direct", "options": options}
            size = f"ring of {ring // MIB} MiB"
            yield Check(
                f"{backend}, {size}",
                lambda words=words, size=size: by_mode(
                    twice(gpu, wanted, loading(gpu, source, **words)), size
                ),
            )
        odd = odd_file(context)
        words = {"backend": backend, "options": {"allow_compat": True}}
        yield Check(
            f"{backend}, odd sizes",
            lambda words=words, odd=odd: twice(gpu, expected(gpu, odd), loading(gpu, odd, **words)),
        )


# ---- tables --------------------------------------------------------------------------------------

OURS = "gdsload"
# Of a checkpoint of which each load takes seconds.
WARM_LARGE = (
    OURS, "pinned", "safetensors-mmap", "safetensors-prefetch",
    "fastsafetensors:nogds=1,FASTSAFETENSORS_ODIRECT=0",
    "instanttensor:INSTANTTENSOR_BACKEND=BUFFERED", "gdsload:request_bytes=4194304",
)  # fmt: skip
WARM = (*WARM_LARGE, "runai", "gdsload:engine=uring", "gdsload:request_bytes=1048576")
COLD = (
    OURS, "safetensors-mmap", "safetensors-prefetch", "runai", "fastsafetensors:nogds=1",
    "instanttensor", "gdsload:engine=uring",
)  # fmt: skip
# Bytes that a GPU clears in a second, at least, when they were freed. Meanwhile copies to it have
# half their rate: on an H200 for more than 50 ms after 15 GB.
CLEARED_PER_SECOND = 1e11
LARGE_BYTES = 4 << 30
LARGE_SECONDS = 150.0  # to write and load 15 GB
# Until a loader is imported, or has loaded; then it counts as hanging.
ARM_SECONDS, LARGE_ARM_SECONDS = 20.0, 60.0


def bench(name: str) -> Any:
    """A module of gdsload's benchmarks."""
    from gdsload.cli.measuring import program

    return program(name)


class ArmProcess:
    """One loader in a process of its own that loads as often as it is asked to. The first question
    is answered when the loader is imported, and not a load."""

    def __init__(self, context: Context, label: str) -> None:
        arm = bench("arms").parse(label)
        kind = bench("arms").KINDS[arm.kind]
        site = f"{context.work}/site-{kind.environment}"
        path = [site, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        job = {"kind": arm.kind, "settings": arm.options, "device": context.gpu.host_device}
        self.label, self.log = label, tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).resolve()),
                *context.arguments,
                "--section",
                "arm",
                "--job",
                json.dumps(job),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **arm.environment},
        )

    def begin(self, source: Path, seconds: float, loads: int = 0) -> None:
        """Waits until the loader is imported, and has loaded so often. If that fails, its next load
        tells why."""
        with suppress(OSError):
            for _ in range(1 + loads):
                self.ask(source, seconds)

    def ask(self, source: Path, seconds: float) -> Row:
        """One answer. Raises OSError with the reason why it failed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        timer = threading.Timer(max(seconds, 1.0), self.process.kill)
        timer.start()
        try:
            with suppress(BrokenPipeError):
                self.process.stdin.write(f"{source}\n".encode())
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if line:
            found: Row = json.loads(line)
            if "failed" not in found:
                return found
            raise OSError(found["failed"])
        self.log.seek(0)
        words = self.log.read().decode(errors="replace").strip().splitlines()
        raise OSError(f"exit {self.process.wait()}: {words[-1] if words else 'without a word'}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def wait_until_cleared(nbytes: int) -> None:
    """After so many bytes of the device were freed."""
    time.sleep(max(nbytes, 0) / CLEARED_PER_SECOND)


def arm(job: Row, gpu: Gpu) -> None:
    """The other end of ArmProcess: answers each line of stdin with the facts of a load."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker, arms, loaded = bench("worker"), bench("arms"), bench("loaded")
    opened = None
    for line in sys.stdin:
        source = Path(line.strip())
        try:
            if opened is None:
                wanted = loaded.Wanted(source, job["settings"], job["device"])
                opened = arms.KINDS[job["kind"]].open(wanted)
                facts = {}
            else:
                before = gpu.free_bytes()
                facts, found = worker.measured(opened.load, source, job["device"])
                del found
                gc.collect()
                facts["left_bytes"] = before - gpu.free_bytes()
                wait_until_cleared(facts.get("vram_bytes", 0))
                text = json.dumps(sorted(facts.pop("sums").items()))
                facts["digest"] = hashlib.sha256(text.encode()).hexdigest()[:16]
            print(json.dumps(facts), file=out, flush=True)
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), file=out, flush=True)
            break
    os._exit(0)


def tables(context: Context) -> Iterator[Row]:
    """Warm and cold loads by all loaders, in turn until the time is up."""
    if context.small:
        plans = [(context.checkpoint("tiny"), 0.5, 0.5)]
    elif context.checkpoints:
        share = 1 / len(context.checkpoints)
        plans = [(path, 0.6 * share, 0.4 * share) for path in context.checkpoints]
    else:
        why = no_room(context, 16 << 30)
        if why:
            yield {"name": "qwen2.5-7b", "verdict": f"refused: {why}"}
        plans = [(context.checkpoint("qwen3-0.6b"), *((0.6, 0.4) if why else (0.3, 0.3)))]
        if not why:
            plans.append((context.work / "qwen2.5-7b", 0.4, 0.0))
    with cudart_on_path(context):
        began, budget, used = time.monotonic(), context.left - 5, 0.0
        for source, *shares in plans:
            if not source.exists():
                context.checkpoint(source.name)
            for warm, share in zip((True, False), shares, strict=True):
                used += share
                if share:
                    yield from rounds(context, source, warm, began + budget * min(used, 1.0))


def no_room(context: Context, nbytes: int) -> str:
    """Why the time, the disk, memory or the device have no room for a checkpoint and its page
    cache; "" if they have."""
    from gdsload.system import gpu as gpus
    from gdsload.system.available import available_bytes

    if context.left < LARGE_SECONDS:
        return f"{context.left:.0f} s left, {LARGE_SECONDS:.0f} s needed"
    room = {
        "the device": gpus.device(gpus.ordinal_of(context.device)).memory()[0],
        "the disk": shutil.disk_usage(context.work).free,
        "half of memory": (available_bytes() or 0) // 2,
    }
    least = min(room, key=room.__getitem__)
    return (
        "" if room[least] > nbytes else f"{room[least]:,} bytes of {least} free, {nbytes:,} needed"
    )


@contextmanager
def cudart_on_path(context: Context) -> Iterator[None]:
    """fastsafetensors opens libcudart.so without a version: torch's own gets that name."""
    with suppress(OSError, StopIteration):
        maps = Path("/proc/self/maps").read_text().splitlines()
        library = next(line.split()[-1] for line in maps if "libcudart" in line)
        folder = context.work / "lib"
        folder.mkdir(exist_ok=True)
        (folder / "libcudart.so").unlink(missing_ok=True)
        (folder / "libcudart.so").symlink_to(library)
        known = os.environ.get("LD_LIBRARY_PATH", "")
        os.environ["LD_LIBRARY_PATH"] = f"{folder}{os.pathsep}{known}"
    yield


def rounds(context: Context, source: Path, warm: bool, ends: float) -> Iterator[Row]:
    """Loads in turn until `ends`; a loader that fails is left out of the rest of a table. Its
    processes hold memory of the device, and end with the table."""
    conditions = bench("judge").Conditions(source, warm, device=context.gpu.host_device)
    large = conditions.file_bytes > LARGE_BYTES
    labels: Sequence[str] = (WARM_LARGE if large else WARM) if warm else COLD
    if context.small:
        labels = (OURS, "safetensors-mmap", "pinned")
    arm_seconds = LARGE_ARM_SECONDS if large else ARM_SECONDS
    table, digests = f"{'warm' if warm else 'cold'} {source.name}", set()
    longest: dict[str, float] = {}
    known, number = {label: ArmProcess(context, label) for label in labels}, 0
    ended: set[str] = set()

    def limit() -> float:
        return min(arm_seconds, context.left - 2)

    for process in known.values():  # all are ready before the first load
        process.begin(source, limit())
    while known and time.monotonic() < ends:
        for label in turned(list(known), number):
            # The first round runs in any case, while there is time for the summary.
            last = ends if number else context.ends - 3
            if time.monotonic() + longest.get(label, 0) > last:
                continue
            row: Row = {
                "name": f"{table}: {label}",
                "table": table,
                "arm": label,
                "round": number,
                "verdict": "ok",
            }
            if label in ended:  # the loads after its first one count
                known[label] = ArmProcess(context, label)
                known[label].begin(source, limit(), loads=1)
                ended.discard(label)
            began = time.monotonic()
            try:
                if context.small and not warm:  # the page cache of others stays
                    bench("cache").evict(conditions.files)
                else:
                    row["cache"] = conditions.make_cache()
                row["resident_before_bytes"] = conditions.settled_bytes()
                row |= known[label].ask(source, limit())
            except OSError as error:
                row["verdict"] = f"refused: {error}"
                known.pop(label).close()
            if row["verdict"] == "ok" and row["resident_before_bytes"] != (
                conditions.file_bytes if warm else 0
            ):
                row["verdict"] = f"refused: {row['resident_before_bytes']:,} bytes resident"
            if row.get("touched_bytes"):
                digests.add(row["digest"])
                if len(digests) > 1:
                    row["verdict"] = f"{WRONG}: other bytes than another loader"
            if number:
                took = time.monotonic() - began
                longest[label] = max(longest.get(label, 0), took)
            row["bytes"] = conditions.file_bytes
            yield row
            if row.get("left_bytes", 0) > conditions.file_bytes // 2:
                # It does not give memory back, which the others need.
                known[label].close()
                ended.add(label)
                wait_until_cleared(row["left_bytes"])
        number += 1
        if number > 1 and all(time.monotonic() + longest.get(label, 0) > ends for label in known):
            break
        if context.small and number == 2:
            break
    for label in known.keys() - ended:
        known[label].close()


def turned(labels: list[str], number: int) -> list[str]:
    """The loaders in the order of a round, each of which begins with another one."""
    first = number % len(labels)
    return labels[first:] + labels[:first]


# ---- facts ---------------------------------------------------------------------------------------


def output_of(*command: str) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return ran.stdout + ran.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def text_of(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()[:2000]
    except OSError as error:
        return str(error.strerror)


def facts(context: Context) -> Iterator[Row | Check]:
    """The machine, versions and supported backends."""
    import torch

    import gdsload
    from gdsload.backends import registry
    from gdsload.backends.cufile import library
    from gdsload.system import gpu as gpus

    found = gpus.device(gpus.ordinal_of(context.device))
    yield Check(
        "versions",
        lambda: {
            "gdsload": gdsload.__version__,
            "torch": torch.__version__,
            "python": sys.version,
            "cuda": gpus.cuda().version,
            "kernel": platform.release(),
            "gpu": {
                "name": found.name,
                "bus": found.bus,
                "node": gpus.numa_node(found.bus),
                "total_bytes": found.memory()[1],
            },
        },
    )
    yield Check("machine", lambda: {"machine": bench("machine").describe(context.work)})
    yield Check(
        "backends",
        lambda: {
            "support": {
                name: str(each) for name, each in registry.probe_all(context.device).items()
            },
            "native_path": " ".join(library.native_path()).strip(),
        },
    )
    lines = output_of("nvidia-smi", "-q").splitlines()
    chosen = re.compile(r"BAR1|Link|Gen|Width|Total +:|(Driver|CUDA|.MD) Version|Persistence|MIG")
    yield {
        "name": "nvidia-smi",
        "verdict": "ok",
        "lines": [line.strip() for line in lines if chosen.search(line)][:60],
    }
    yield {
        "name": "limits",
        "verdict": "ok",
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "io_uring_disabled": text_of("/proc/sys/kernel/io_uring_disabled"),
        "run_udev": os.path.isdir("/run/udev"),
        "root": os.geteuid() == 0,
        "modules": [
            line.split()[0] for line in text_of("/proc/modules").splitlines() if "nv" in line
        ],
    }
    doctor = output_of(sys.executable, "-m", "gdsload", "doctor", "--json")
    yield {"name": "doctor", "verdict": "ok", "doctor": doctor[:8000]}


# ---- claims and the summary ----------------------------------------------------------------------

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
ALLOCATOR_MODES = ("expandable_segments:True", "backend:cudaMallocAsync", "max_split_size_mb:64")


class Claim(NamedTuple):
    """What gdsload promises, and how rows decide it."""

    text: str
    decide: Callable[[list[Row]], tuple[str, str]]


def bad(row: Row) -> bool:
    return str(row["verdict"]).startswith((WRONG, FAILED, LEFT))


def all_good(*sections: str, least: int = 1, names: str = "") -> Callable[..., tuple[str, str]]:
    """No bad row in these sections, at least some good ones, and time for all."""

    def decide(rows: list[Row]) -> tuple[str, str]:
        mine = [
            row
            for row in rows
            if row["section"].partition(" ")[0] in sections and re.search(names, row["name"])
        ]
        wrong = [f"{row['name']}: {row['verdict'][:200]}" for row in mine if bad(row)]
        good = [row for row in mine if row["verdict"] in ("exact", "ok") and row["name"] != "end"]
        if wrong:
            return MISSED, "; ".join(wrong)
        if any(row["name"] == REST for row in mine):
            return NOT_MEASURED, f"{len(good)} checks, and no time for the rest"
        if len(good) < least:
            why = "; ".join(f"{row['name']}: {row['verdict'][:100]}" for row in mine)
            return NOT_MEASURED, why or "the section did not run"
        return MET, f"{len(good)} checks"

    return decide


def every_allocator(rows: list[Row]) -> tuple[str, str]:
    """No bad row in any mode, and two good ones in each: one way of reading may be refused."""
    found = []
    for mode in ALLOCATOR_MODES:
        mine = [row for row in rows if row["section"] == f"allocator {mode}"]
        verdict, words = all_good("allocator", least=2)(mine)
        found.append((verdict, f"{mode}: {words}"))
    worst = next((each for each in (MISSED, NOT_MEASURED) if each in dict(found)), MET)
    return worst, "; ".join(words for verdict, words in found if verdict == worst)


# Seconds within 5 % of each other count as equal, as rates do when a backend is chosen.
EQUAL_SHARE = 0.95
LEAST_ROUNDS = 3  # after the first, for a comparison


def medians(rows: list[Row], kind: str, least: int = 1) -> dict[str, dict[str, float]]:
    """By table and arm, the median seconds of the rounds after the first, of which there must be
    `least`."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.get("table", "").startswith(kind) and row["verdict"] == "ok" and row["round"]:
            seconds.setdefault(row["table"], {}).setdefault(row["arm"], []).append(row["seconds"])
    return {
        table: {arm: statistics.median(found) for arm, found in arms.items() if len(found) >= least}
        for table, arms in seconds.items()
    }


def share_of_pinned(rows: list[Row]) -> tuple[str, str]:
    shares = {
        table: arms["pinned"] / arms[OURS]
        for table, arms in medians(rows, "warm").items()
        if "pinned" in arms and OURS in arms
    }
    if not shares:
        return NOT_MEASURED, "no warm table with pinned memory"
    words = ", ".join(f"{table}: {share:.2f}" for table, share in shares.items())
    return MET if min(shares.values()) >= 0.9 else MISSED, words


def fastest(kind: str) -> Callable[[list[Row]], tuple[str, str]]:
    """No other loader is faster in a table."""

    def decide(rows: list[Row]) -> tuple[str, str]:
        verdict, words = NOT_MEASURED, []
        for table, arms in medians(rows, kind, LEAST_ROUNDS).items():
            others = {
                arm: value for arm, value in arms.items() if not arm.startswith((OURS, "pinned"))
            }
            if OURS not in arms or not others:
                continue
            best = min(others, key=others.__getitem__)
            words.append(f"{table}: {arms[OURS]:.3f} s, {best} {others[best]:.3f} s")
            slower = arms[OURS] * EQUAL_SHARE > others[best]
            verdict = MISSED if slower or verdict == MISSED else MET
        return verdict, "; ".join(words) or f"no {kind} table of enough rounds with another loader"

    return decide


def faster_models(rows: list[Row]) -> tuple[str, str]:
    found = [
        (row["name"], min(row["gdsload_seconds"]), min(row["transformers_seconds"]))
        for row in rows
        if "gdsload_seconds" in row
    ]
    words = "; ".join(
        f"{name}: {ours:.2f} s, transformers {stock:.2f} s" for name, ours, stock in found
    )
    if not found:
        return NOT_MEASURED, "the section did not run"
    return MET if all(ours <= stock for _, ours, stock in found) else MISSED, words


def small_fork(rows: list[Row]) -> tuple[str, str]:
    for row in rows:
        if "fork_ms" in row:
            share = f"{row['child_anonymous_bytes'] / 1e6:.0f} MB private in the child"
            return (MET if row["fork_ms"] < 100 else MISSED), f"{row['fork_ms']:.0f} ms, {share}"
    return NOT_MEASURED, "the section did not run"


def reused_memory(rows: list[Row]) -> tuple[str, str]:
    """The hazard was real only if each load got blocks that the queued work was reading, and had to
    wait for that work."""
    verdict, words = all_good("streams", least=2, names="older")(rows)
    found = [row for row in rows if "reused" in row]
    if verdict == MET and not all(row["reused"] for row in found):
        return NOT_MEASURED, "a load got other memory than the queued work was reading"
    if verdict == MET and not all(row["seconds"] >= WAITED_SECONDS for row in found):
        return NOT_MEASURED, "the queued work had ended before a load"
    return verdict, words


def one_copy_thread(rows: list[Row]) -> tuple[str, str]:
    for row in rows:
        slot, together = row.get("slot"), row.get("together")
        rate = row.get(f"{slot}, {together} together, 1 streams, GB/s")
        rate = rate or row.get(f"{slot}, 1 streams, GB/s")
        if row["name"] == "host to device: registered-huge" and rate is not None:
            best = max(value for name, value in row.items() if name.endswith("1 streams, GB/s"))
            words = f"{rate:.1f} of {best:.1f} GB/s"
            return (MET if rate >= 0.95 * best else MISSED), words
    return NOT_MEASURED, "no copies of the size of a slot"


CLAIMS = (
    Claim("posix loads exact bytes with every engine, I/O mode and kind of buffer",
          all_good("exact", least=7, names="posix|odd|tiny|checkpoint|end|rest")),
    Claim("`auto`, `stream`, slices, prefetch to the device and loads before torch is imported give"
          " exact bytes",
          all_good("exact", "first", least=6,
                   names="auto|stream|prefetch|slices|torch|checkpoint|end|rest")),
    Claim("exact bytes in each mode of torch's allocator", every_allocator),
    Claim("a load waits for older work that uses its memory", reused_memory),
    Claim("no copy arrives after a load was interrupted; threads do not disturb each other",
          all_good("streams", least=2, names="interrupted|threads|end")),
    Claim("loads and captures of CUDA graphs do not disturb each other",
          all_good("capture", least=3)),
    Claim("a process ends cleanly in every state, and a full device is an error",
          all_good("exits", least=6)),
    Claim("loads are exact while a forked child lives", all_good("fork")),
    Claim("a fork with a pinned ring takes less than 100 ms", small_fork),
    Claim("from_pretrained gives the model of transformers", all_good("model", least=2)),
    Claim("from_pretrained is no slower than transformers, warm", faster_models),
    Claim("cuFile is refused with a reason or exact, and its process ends cleanly",
          all_good("cufile", "exact", names="gds|library|udev|end|rest")),
    Claim("cuFile reads by its native path", all_good("exact", names="^gds")),
    Claim("copies of slots, as a load starts them, reach 0.95 of the rate of the best size",
          one_copy_thread),
    Claim("warm: 0.9 of the rate of pinned memory", share_of_pinned),
    Claim("warm: no other loader is 5 % faster after the first load", fastest("warm")),
    Claim("cold: no other loader is 5 % faster after the first load", fastest("cold")),
    Claim("all loaders of a table give the same bytes",
          all_good("tables", least=2, names="^(warm|cold) ")),
)  # fmt: skip


def read_rows(out: Path) -> list[Row]:
    """The rows of results.jsonl; a line that a kill cut short is left out."""
    rows = []
    with suppress(OSError):
        for line in (out / "results.jsonl").read_text().splitlines():
            with suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def summary(out: Path) -> tuple[str, bool]:
    """The text of summary.md, and whether every measured claim is met."""
    rows = read_rows(out)
    decided = [(claim.text, *claim.decide(rows)) for claim in CLAIMS]
    counts = {
        verdict: sum(each[1] == verdict for each in decided)
        for verdict in (MET, MISSED, NOT_MEASURED)
    }
    versions = next((row for row in rows if row["name"] == "versions"), {})
    names = ("gdsload", "torch", "cuda", "kernel")
    machine = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    lines = ["# gdsload on a GPU", ""]
    lines += [f"{versions.get('gpu', {}).get('name', '?')}; {machine}.", ""]
    lines += [", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".", ""]
    lines += ["| claim | verdict | evidence |", "|---|---|---|"]
    for text, verdict, words in decided:
        words = words.replace("|", "/").replace("\n", " ")[:600]
        lines.append(f"| {text} | {verdict} | {words} |")
    for kind in ("warm", "cold"):
        for table, arms in medians(rows, kind).items():
            mine = [row for row in rows if row.get("table") == table and row["verdict"] == "ok"]
            lines += [
                "",
                f"## {table}, seconds",
                "",
                "| loader | first | median | rounds | GB/s |",
                "|---|---|---|---|---|",
            ]
            for label, median in sorted(arms.items(), key=lambda each: each[1]):
                of = [row for row in mine if row["arm"] == label]
                first = next((f"{row['seconds']:.3f}" for row in of if not row["round"]), "")
                rate = of[0]["bytes"] / median / 1e9
                lines.append(f"| {label} | {first} | {median:.3f} | {len(of)} | {rate:.2f} |")
            phases = [
                row["notes"]["report"]["phases"]
                for row in mine
                if row["arm"] == OURS and row["round"]
            ]
            if phases:
                median_ms = {
                    name: 1e3 * statistics.median(each.get(name, 0) for each in phases)
                    for name in phases[-1]
                }
                words = ", ".join(f"{name} {value:.1f}" for name, value in median_ms.items())
                lines += ["", f"Phases of gdsload, ms: {words}."]
    refused = [row for row in rows if str(row["verdict"]).startswith("refused")]
    if refused:
        lines += ["", "## Refused", ""]
        lines += sorted(
            {f"- {row['name']}: {row['verdict'][9:309]}".replace("\n", " ") for row in refused}
        )
    lines += ["", "## Sections", ""]
    lines += [
        f"- {row['section']}: {row['verdict']}, {row.get('seconds', 0):.0f} s"
        for row in rows
        if row["name"] == "end"
    ]
    return "\n".join(lines) + "\n", counts[MISSED] == 0 and decided[0][1] == MET


# ---- sections, and the process that runs them ----------------------------------------------------


class Section(NamedTuple):
    """A part of the check: a child process with a time limit."""

    name: str
    run: Callable[[Context], Iterator[Row | Check]]
    seconds: float
    environment: dict[str, str]


def allocator_section(mode: str) -> Section:
    return Section(
        f"allocator {mode}",
        allocator,
        40.0,
        {"PYTORCH_CUDA_ALLOC_CONF": mode, "PYTORCH_ALLOC_CONF": mode},
    )


# In order of worth. The last one takes all time that is left.
SECTIONS = (
    Section("facts", facts, 40.0, {}),
    Section("exact", exact, 160.0, {}),
    Section("first", first, 40.0, {}),
    *map(allocator_section, ALLOCATOR_MODES),
    Section("streams", streams, 45.0, {}),
    Section("capture", capture, 30.0, {}),
    Section("exits", exits, 90.0, {}),
    Section("fork", fork, 25.0, {}),
    Section("model", model, 60.0, {}),
    Section("cufile", cufile, 80.0, {}),  # to open it and to lose an event may take 30 s each
    Section("micro", micro, 45.0, {}),
    Section("tables", tables, 1e9, {}),
)
LEAST_SECONDS = 4.0  # a section with less time is skipped
SUMMARY_SECONDS = 2.0
END_SECONDS = 2.0  # of a section: it counts as hanging 1 s before its limit
REST = "rest"  # the row of a section that had no time for its other checks


def append(out: Path, section: str, row: Row) -> None:
    """Adds a row to results.jsonl in one write."""
    line = json.dumps({"section": section, **row}, default=str) + "\n"
    fd = os.open(out / "results.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def run_section(name: str, context: Context) -> None:
    """What a child does."""
    if name in FIRST_LOADS:
        FIRST_LOADS[name](context)
        return
    if name in ENDS:
        ENDS[name][0](context)
        return
    (section,) = [each for each in SECTIONS if each.name == name]
    for row in rows_of(section, context):
        append(context.out, name, row)
        print(f"{name}: {row['name']}: {row['verdict'][:150]}", flush=True)


def rows_of(section: Section, context: Context) -> Iterator[Row]:
    """The rows of a section, until one as long as the longest would not end in time: a slow machine
    is no hang. One more if checks are left out, or if its checkpoint cannot be written in time."""
    longest = 0.0
    try:
        for found in section.run(context):
            if not isinstance(found, Check):
                yield found
                continue
            if context.left < longest + END_SECONDS:
                yield {"name": REST, "verdict": "refused: no time left"}
                return
            row = tried(*found)
            longest = max(longest, row["row_seconds"])
            yield row
    except Refused as error:
        yield {"name": "checkpoint", "verdict": f"refused: {error}"}


def start_section(section: Section, seconds: float, wanted: argparse.Namespace, log: Any) -> str:
    """Runs a section in a child process group; returns how it ended."""
    command = [sys.executable, str(Path(__file__).resolve()), *again(wanted)]
    child = subprocess.Popen(
        [*command, "--section", section.name, "--seconds", str(seconds)],
        env={**os.environ, **section.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
    )
    killer = threading.Timer(seconds + 1.0, os.killpg, (child.pid, signal.SIGKILL))
    killer.start()
    began = time.monotonic()
    try:
        assert child.stdout is not None
        for line in child.stdout:
            print(line.decode(errors="replace"), end="", flush=True)
        status = child.wait()
    finally:
        killer.cancel()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # what it started and left
        child.wait()
    if time.monotonic() - began >= seconds - 1.5 and status:
        return f"{FAILED}: it did not end in {seconds:.0f} s; the log has its stacks"
    return "ok" if status == 0 else f"{FAILED}: exit status {status}"


def again(wanted: argparse.Namespace) -> list[str]:
    """The arguments of a child."""
    words = ["--out", str(wanted.out), "--device", wanted.device, "--work", str(wanted.work)]
    words += ["--small"] * wanted.small + ["--bare"] * wanted.bare
    words += ["--gpu", str(wanted.gpu)] if wanted.gpu else []
    return [*words, *map(str, wanted.checkpoints)]


def unpack_wheels(out: Path) -> None:
    """Unpacks the wheels of a bundle that fit this Python, without pip: each is a zip file.

    Into `site-ours` what gdsload needs and is missing here, `site-peers` the other loaders, and
    `site-prefetch` the release of safetensors that only one loader needs.
    """
    number = sys.version_info.minor
    tags = {f"cp3{number}", "py3", "py2.py3"}
    for wheel in sorted((HERE / "wheels").glob("*/*.whl")):
        python, abi = wheel.stem.split("-")[-3:-1]
        stable = abi == "abi3" and int(python.split(".")[0][3:]) <= number
        module = wheel.name.split("-")[0]
        if not (python in tags or stable) or (
            wheel.parent.name == "ours" and module != "gdsload" and importlib.util.find_spec(module)
        ):
            continue
        site = out / f"site-{wheel.parent.name}"
        with zipfile.ZipFile(wheel) as opened:
            opened.extractall(site)
        for library in (*site.glob("*.data/purelib"), *site.glob("*.data/platlib")):
            shutil.copytree(library, site, dirs_exist_ok=True)
    for site in out.glob("site-*"):  # as an installation does
        compileall.compile_dir(site, quiet=2, workers=0)


def child_environment(out: Path) -> None:
    """Sets up what children find: gdsload of the bundle before any other."""
    if (HERE / "wheels").is_dir():
        unpack_wheels(out)
        path = [str(out / "site-ours"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile what it imports
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["PYTHONUNBUFFERED"] = "1"


PREFLIGHT_SECONDS = 150  # a machine reads torch for the first time, which may take 40 s


def preflight(make_gpu: Callable[[], Gpu]) -> None:
    """Imports what the sections need and uses the device. Ends the process with the reason if that
    fails, such as a glibc that is too old for gdsload, or a driver that is for torch."""
    try:
        native = importlib.import_module("gdsload._native")
        for each in pkgutil.iter_modules(native.__path__):
            importlib.import_module(f"{native.__name__}.{each.name}")
        gpu = make_gpu()
        gpu.empty(1)
        gpu.synchronize()
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}".partition("\n")[0])


def obstacle(wanted: argparse.Namespace) -> str:
    """Why no section can run here; "" if they can. Makes the first, slow import of torch."""
    command = [sys.executable, str(Path(__file__).resolve()), *again(wanted)]
    command += ["--section", "preflight"]
    seconds = min(PREFLIGHT_SECONDS, wanted.budget)
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"gdsload, torch and the GPU were not ready within {seconds:g} s"
    error = ran.stderr.strip().rpartition("\n")[2] or f"exit status {ran.returncode}"
    return error if ran.returncode else ""


@contextmanager
def held_devices(folder: Path = Path("/dev")) -> Iterator[None]:
    """Keeps all GPUs open, where that is allowed. Without persistence mode the driver otherwise
    initialises a GPU again for each child, which takes 1 to 3 s."""
    with contextlib.ExitStack() as stack:
        for path in folder.glob("nvidia[0-9]*"):
            with suppress(OSError):
                stack.callback(os.close, os.open(path, os.O_RDWR))
        yield


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoints", nargs="*", type=Path, help="of the tables")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for all: 300")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="directory of results")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="names, or their first words")
    parser.add_argument("--data", type=Path, help="directory on the disk to measure")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to check the check")
    parser.add_argument(
        "--bare",
        action="store_true",
        help="the machine is disposable: /run/udev is made for cuFile",
    )
    for name in ("--section", "--seconds", "--job", "--work", "--gpu"):  # for children and tests
        parser.add_argument(name, help=argparse.SUPPRESS)
    wanted = parser.parse_args(arguments)
    if wanted.data and not wanted.data.is_dir():
        parser.error(f"--data {wanted.data}: there is no such directory")
    for name in wanted.only or ():
        if not any(section.name.startswith(name) for section in SECTIONS):
            known = ", ".join(section.name for section in SECTIONS)
            parser.error(f"--only {name}: it must be the beginning of one of {known}")
    wanted.out = wanted.out.absolute()
    wanted.gpu = wanted.gpu and os.path.abspath(wanted.gpu)
    wanted.checkpoints = [path.absolute() for path in wanted.checkpoints]
    return child(wanted) if wanted.section else check(wanted)


def child(wanted: argparse.Namespace) -> int:
    """A section, an end of a process, or a loader of a table."""
    faulthandler.enable(sys.__stderr__)
    ends = time.monotonic() + float(wanted.seconds or 1e9)
    if wanted.seconds:
        limit = max(float(wanted.seconds) - 1.0, 0.5)
        faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)
    make = runpy.run_path(wanted.gpu)["gpu"] if wanted.gpu else lambda kind, device: kind(device)
    if wanted.section == "preflight":
        preflight(lambda: make(Gpu, wanted.device))
        return 0
    gpu: Gpu = make(Gpu, wanted.device)
    if wanted.section not in FIRST_LOADS:
        importlib.import_module("torch")
    if wanted.section == "arm":
        arm(json.loads(wanted.job), gpu)
    context = Context(
        gpu,
        Path(wanted.work),
        wanted.out,
        wanted.small,
        wanted.bare,
        ends,
        wanted.checkpoints,
        again(wanted),
    )
    run_section(wanted.section, context)
    faulthandler.cancel_dump_traceback_later()
    return 0


def check(wanted: argparse.Namespace) -> int:
    """Runs the sections until the budget ends, and writes the summary after each."""
    ends = time.monotonic() + wanted.budget - SUMMARY_SECONDS
    wanted.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    text, good = "no section was run", False
    site = Path(tempfile.mkdtemp(prefix="gdsload-gpu-check-", dir=wanted.data))
    wanted.work = site
    try:
        child_environment(site)
        if why := obstacle(wanted):
            sys.exit(f"gpu-check: {why}")
        for name in ("results.jsonl", "log.txt", "summary.md"):  # of an earlier check
            (wanted.out / name).unlink(missing_ok=True)
        held = contextlib.nullcontext() if wanted.gpu else held_devices()
        with held, (wanted.out / "log.txt").open("wb") as log:
            for section in SECTIONS:
                if wanted.only and not section.name.startswith(tuple(wanted.only)):
                    continue
                left = ends - time.monotonic()
                if left < LEAST_SECONDS:
                    row = {"name": "end", "verdict": "skipped: the budget is spent"}
                else:
                    log.write(f"\n==== {section.name}\n".encode())
                    log.flush()
                    began = time.monotonic()
                    # A busy machine without a GPU is no hang.
                    seconds = left if wanted.gpu else min(section.seconds, left)
                    verdict = start_section(section, seconds, wanted, log)
                    row = {"name": "end", "verdict": verdict, "seconds": time.monotonic() - began}
                print(f"---- {section.name}: {row['verdict']}", flush=True)
                append(wanted.out, section.name, row)
                text, good = summary(wanted.out)
                (wanted.out / "summary.md").write_text(text)
    finally:
        shutil.rmtree(site, ignore_errors=True)
    print("\n" + text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
