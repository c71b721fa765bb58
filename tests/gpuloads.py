"""Reads of one file into device memory over the doubles, for the tests of backends."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from contract import BLOCK, SIZE
from gdsload.backends import VRAM, Backend, Memory, OpenFile
from gdsload.backends.base import Failure
from gdsload.backends.cufile.gds import GdsBackend
from gdsload.backends.cufile.gds_mt import GdsMtBackend
from gdsload.backends.posix import PosixBackend
from gdsload.planning.read_plan import Transfer
from gpucontract import DeviceMemory

SMALL: dict[str, Any] = {"ring_bytes": 1 << 20, "request_bytes": 16 << 10}
KINDS = [PosixBackend, GdsBackend, GdsMtBackend]
PATIENCE_SECONDS = 120.0


@contextmanager
def direct(file: OpenFile) -> Iterator[OpenFile]:
    """The file with a descriptor for direct I/O: its reads are cold."""
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"{file.path} takes no O_DIRECT: {error.strerror}")
    yield file._replace(direct_fd=fd)
    os.close(fd)


class Load:
    """One file read to device memory, request by request."""

    def __init__(
        self, backend: Backend, file: OpenFile, device: str = "cuda:0", io_mode: str = "buffered"
    ) -> None:
        self.backend = backend
        self.memory = DeviceMemory(SIZE + BLOCK)
        self.file = backend.register(file)
        self.space = backend.register(
            Memory(VRAM, self.memory.address, SIZE + BLOCK, self.memory, device=device)
        )
        step = min(16 << 10, backend.limits(device).max_request)
        self.transfers = [
            Transfer(0, at, step, min(step, SIZE - at), 0, at, io_mode, tag)
            for tag, at in enumerate(range(0, SIZE, step))
        ]
        self.request = backend.prepare(self.transfers, [self.file], [self.space])
        backend.post(self.request)

    def finish(self) -> dict[int, Failure]:
        failures: dict[int, Failure] = {}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            progress = self.backend.check(self.request)
            failures.update({failure.transfer: failure for failure in progress.failures})
            if progress.finished:
                return failures
            assert time.monotonic() < deadline, "the load did not end"
            self.backend.wait(self.request, 0.05)

    def bytes(self) -> bytes:
        return ctypes.string_at(self.memory.address, SIZE)


def settle(backend: Backend, load: Load) -> None:
    backend.release(load.request)
    backend.close()
