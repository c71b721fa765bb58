"""Remote files that are in the memory of the test, and fail by script."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gdsload._native.memory import Region
from gdsload.backends import DRAM, Backend, Memory, OpenFile, Transfer
from gdsload.errors import CheckpointNotFound, FileChanged
from gdsload.remote.directory import RemoteDirectory
from gdsload.remote.file import RemoteFile


class Fault(NamedTuple):
    """What one request does.

    Attributes:
        bytes: Bytes that are sent before anything else happens; -1: all, or none before a hang.
        error: What is raised then: an errno, 0 for nothing.
        final: Whether this error is final.
        hang: An event to wait for then, before the rest is sent.
        extra: Bytes that are sent besides those that were asked for.
        seconds: Latency of the request.
        crash: Raised then, if not None.
    """

    bytes: int = -1
    error: int = 0
    final: bool = False
    hang: threading.Event | None = None
    extra: int = 0
    seconds: float = 0.0
    crash: BaseException | None = None


class MemoryFile(RemoteFile):
    """`faults` are those of the first requests; later requests are those of `always`.

    Attributes:
        requests: (offset, length) of each request.
        hung: The number of requests that wait, or have waited, for an event.
        most: The largest number of requests at the same time.
        changed: Whether it is another version now.
    """

    scheme = "s3"

    def __init__(
        self,
        data: bytes,
        faults: Sequence[Fault] = (),
        *,
        always: Fault | None = None,
        url: str = "s3://bucket/file",
        version: str = "v1",
        chunk_bytes: int = 1 << 16,
    ) -> None:
        self.url, self.size, self.version = url, len(data), version
        self.data, self.chunk_bytes = data, chunk_bytes
        self.requests: list[tuple[int, int]] = []
        self.hung = self.running = self.most = 0
        self.changed = self.closed = False
        self.always = always or Fault()
        self._faults = list(faults)
        self._changed = threading.Condition()

    def chunks(self, offset: int, length: int) -> Iterator[memoryview]:
        with self._changed:
            fault = self._faults.pop(0) if self._faults else self.always
            self.requests.append((offset, length))
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            yield from self._sent(fault, offset, length)
        finally:
            with self._changed:
                self.running -= 1
                self._changed.notify_all()

    def _sent(self, fault: Fault, offset: int, length: int) -> Iterator[memoryview]:
        assert 0 <= offset < offset + length <= self.size, "a range that is not in the file"
        if fault.seconds:
            time.sleep(fault.seconds)
        data = self.data[offset : offset + length]
        most = 0 if fault.hang is not None else length
        first = most if fault.bytes < 0 else min(fault.bytes, length)
        yield from self._parts(data[:first])
        if fault.hang is not None:
            with self._changed:
                self.hung += 1
                self._changed.notify_all()
            fault.hang.wait()
            yield from self._parts(data[first:])
            return
        if fault.crash is not None:
            raise fault.crash
        if fault.error:
            why = f"request {len(self.requests)} failed"
            raise self.error(why, errno=fault.error, final=fault.final)
        yield from self._parts(bytes(fault.extra))

    def _parts(self, data: bytes) -> Iterator[memoryview]:
        buffer = bytearray(self.chunk_bytes)
        for start in range(0, len(data), self.chunk_bytes):
            part = data[start : start + self.chunk_bytes]
            buffer[: len(part)] = part
            yield memoryview(buffer)[: len(part)]
            buffer[:] = bytes(len(buffer))  # valid until the next one is asked for

    def wait_hung(self, count: int = 1) -> None:
        """Until so many requests have come to hang."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.hung >= count, 60), f"{self.hung} hang"

    def wait_idle(self) -> None:
        """Until no request is under way."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self.running, 60), f"{self.running} run"

    def verify_unchanged(self) -> None:
        if self.changed:
            raise FileChanged(f"{self.url}: another version", path=self.url)

    def close(self) -> None:
        self.closed = True


class MemoryDirectory(RemoteDirectory):
    """A remote directory with copies, in memory, of the files in `folder`.

    Attributes:
        files: The last file that was opened, by its name.
        ask: Called before each answer.
        prepare: Called with each file that is opened.
    """

    def __init__(self, path: str, folder: Path) -> None:
        self.path = path
        self.files: dict[str, MemoryFile] = {}
        self._data = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
        self.ask: Callable[[], None] = lambda: None
        self.prepare: Callable[[MemoryFile], None] = lambda _: None

    def names(self) -> Collection[str]:
        self.ask()
        return list(self._data)

    def has(self, name: str) -> bool:
        self.ask()
        return name in self._data

    def open(self, name: str) -> RemoteFile:
        self.ask()
        if name not in self._data:
            raise CheckpointNotFound(f"{self.path_of(name)}: it does not exist")
        file = MemoryFile(self._data[name], url=self.path_of(name), chunk_bytes=4096)
        self.files[name] = file
        self.prepare(file)
        return file


REFUSED = Fault(bytes=0, error=errno.EACCES, final=True)


def opened(file: RemoteFile) -> OpenFile:
    return OpenFile(file.url, -1, file.size, remote=file)


class Load:
    """Reads of one file into one region, by one request."""

    def __init__(self, backend: Backend, file: MemoryFile, step: int = 1 << 20) -> None:
        self.backend, self.file = backend, file
        self.region = Region.anonymous(file.size)
        self.registered = backend.register(opened(file))
        memory = Memory(DRAM, self.region.address, file.size, self.region)
        self.transfers = [
            Transfer(
                0, at, min(step, file.size - at), min(step, file.size - at), 0, at, "buffered", n
            )
            for n, at in enumerate(range(0, file.size, step))
        ]
        self.memory = backend.register(memory)
        self.request = backend.prepare(self.transfers, [self.registered], [self.memory])

    def run(self) -> list[Any]:
        """Posts it and waits: the failures."""
        self.backend.post(self.request)
        failures = []
        while True:
            progress = self.backend.check(self.request)
            failures += progress.failures
            if progress.finished:
                return failures
            self.backend.wait(self.request, 0.05)

    def bytes(self) -> bytes:
        return self.region.read(0, self.file.size)
