"""One line of the storage sweep: requests of one shape, one after the other, each step timed.

A thread has a backend, memory and a share of the file of its own. Between two requests, outside the
clock, the bytes are compared with the file and the memory is overwritten, so that old bytes are
never taken for bytes that were read.
"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy

from gdsload._native.memory import Region
from gdsload.backends import DRAM, VRAM, Backend, Memory, OpenFile, find
from gdsload.errors import BackendUnavailable
from gdsload.planning.read_plan import Transfer

from .loaded import CPU
from .records import Refused
from .truth import Device, Truth

SPOILED = 0xA5
LEAST_REQUESTS = 4
PATIENCE_SECONDS = 60.0


class Cell(NamedTuple):
    """The parameters of one line."""

    backend: str
    settings: dict[str, Any]
    device: str
    block: int
    batch: int
    threads: int
    random: bool = False
    seconds: float = 0.3

    @property
    def request_bytes(self) -> int:
        return self.block * self.batch

    def open(self) -> Backend:
        """The backend with a queue that takes the batch, and memory that is ready as it is, and
        registered: each request reads into it."""
        settings = dict(self.settings)
        if self.backend == "posix":
            settings |= {"depth": self.batch, "pages": "small", "fixed_buffers": "always"}
        return find(self.backend)(**settings)


class Steps(NamedTuple):
    """Seconds of one request."""

    prepare: float
    post: float
    transfer: float


class Room:
    """The memory that a thread reads into: DRAM that was touched, or a tensor on a GPU."""

    def __init__(self, device: str, length: int) -> None:
        self.device, self.length = device, length
        if device == CPU:
            region = Region.anonymous(length)
            self.memory = Memory(DRAM, region.address, length, region)
            buffer = (ctypes.c_char * length).from_address(region.address)
            self._bytes: Any = numpy.frombuffer(buffer, numpy.uint8)
        else:
            import torch

            self._bytes = torch.empty(length, dtype=torch.uint8, device=device)
            self.memory = Memory(VRAM, self._bytes.data_ptr(), length, self._bytes, device=device)
        self.spoil()

    def spoil(self) -> None:
        self._bytes[:] = SPOILED
        if self.device != CPU:
            import torch

            torch.cuda.synchronize(self.device)

    def content(self) -> Any:
        """The bytes that were read, in memory of the CPU."""
        return self._bytes if self.device == CPU else self._bytes.cpu().numpy()


def run_cell(cell: Cell, truth: Truth, device: Device) -> dict[str, Any]:
    """The line. Raises Refused for bytes that are wrong, were not read, or came too fast."""
    what = f"{cell.backend}{cell.settings or ''}, blocks of {cell.block}, {cell.batch} at once"
    share = truth.size // cell.threads // cell.block * cell.block
    found: list[list[Steps]] = [[] for _ in range(cell.threads)]
    errors: list[Exception] = []
    together = threading.Barrier(cell.threads)

    def work(number: int) -> None:
        try:
            found[number] = requests(cell, truth, number * share, share, together)
        except Exception as error:
            errors.append(error)
        finally:
            together.abort()  # the others end, too

    before = device.counted()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(cell.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    steps = [entry for entries in found for entry in entries]
    did = device.require_read(before, len(steps) * cell.request_bytes, what)
    # Threads begin a request at the same time, and the slowest ends it: while one compares bytes,
    # no other has the device to itself.
    each = [*zip(*found, strict=False)]
    seconds = sum(max(entry.post + entry.transfer for entry in entries) for entries in each)
    rate = len(each) * cell.threads * cell.request_bytes / seconds
    device.require_possible(rate, did, what)
    return {
        "requests": len(steps),
        "bytes_per_second": rate,
        "latency": statistics.fmean(entry.post + entry.transfer for entry in steps),
        "prepare": spread([entry.prepare for entry in steps]),
        "post": spread([entry.post for entry in steps]),
        "transfer": spread([entry.transfer for entry in steps]),
    }


def spread(seconds: list[float]) -> dict[str, float]:
    """Mean and the 99th of a hundred; of few, the largest."""
    ordered = sorted(seconds)
    return {
        "mean": statistics.fmean(ordered),
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
    }


def places(cell: Cell, first: int, share: int) -> Iterator[int]:
    """Where each request begins, without end: one after the other, or anywhere, on a block."""
    last = (share - cell.request_bytes) // cell.block
    draw = random.Random(first)
    step = 0
    while True:
        if cell.random:
            yield first + draw.randint(0, last) * cell.block
        else:
            yield first + step * cell.block
            step = step + cell.batch if step + 2 * cell.batch <= last + cell.batch else 0


def requests(
    cell: Cell, truth: Truth, first: int, share: int, together: threading.Barrier
) -> list[Steps]:
    """Requests of this shape until their own time is up, each begun together with other threads,
    and all of them held against the file."""
    room = Room(cell.device, cell.request_bytes)
    fd = os.open(truth.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        direct = os.open(truth.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        os.close(fd)
        raise Refused(f"{truth.path}: no direct I/O: {error.strerror}") from error
    try:
        with cell.open() as backend:
            files = [backend.register(OpenFile(str(truth.path), fd, truth.size, direct))]
            memory = [backend.register(room.memory)]
            steps: list[Steps] = []
            spent = 0.0
            for offset in places(cell, first, share):
                try:
                    together.wait()
                except threading.BrokenBarrierError:
                    break
                steps.append(one(cell, backend, offset, files, memory))
                spent += steps[-1].post + steps[-1].transfer
                truth.check(offset, room.content())
                room.spoil()
                if spent >= cell.seconds and len(steps) > LEAST_REQUESTS:
                    break
            for entry in memory + files:
                backend.deregister(entry)
    finally:
        os.close(fd)
        os.close(direct)
    return steps[1:]  # the first opened the engine


def one(cell: Cell, backend: Backend, offset: int, files: list[Any], memory: list[Any]) -> Steps:
    """One request: made, started, waited for, given back."""
    transfers = [
        Transfer(
            0,
            offset + number * cell.block,
            cell.block,
            cell.block,
            0,
            number * cell.block,
            "direct",
            number,
        )
        for number in range(cell.batch)
    ]
    began = time.perf_counter()
    request = backend.prepare(transfers, files, memory)
    prepared = time.perf_counter()
    backend.post(request)
    posted = time.perf_counter()
    progress = backend.check(request)
    failures = list(progress.failures)
    while not progress.finished:
        backend.wait(request, PATIENCE_SECONDS)
        progress = backend.check(request)
        failures += progress.failures
        if progress.idle_seconds > PATIENCE_SECONDS:
            raise Refused(f"no byte came for {PATIENCE_SECONDS:.0f} s")
    ended = time.perf_counter()
    backend.release(request)
    if failures:
        raise BackendUnavailable(f"a read failed: {failures[0]}", {cell.backend: str(failures[0])})
    return Steps(prepared - began, posted - prepared, ended - posted)
