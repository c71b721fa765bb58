"""The contract of backends, as tests: derive from `BackendContract` and define `make`.

The suite uses the interface alone: files, memory, transfers. It works for backends that reach DRAM;
a backend that reaches other memory overrides `take`, `fill` and `look`.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import descriptors
from gdsload._native.memory import Region
from gdsload.backends import DRAM, Backend, Memory, OpenFile, Registration, Support
from gdsload.backends.base import NO_FILE, Failure
from gdsload.planning.read_plan import Limits, Transfer

BLOCK = 4096
BLOCKS = 40
TAIL = 1234
SIZE = BLOCKS * BLOCK + TAIL
_PATIENCE_SECONDS = 120.0  # ends a test that would otherwise hang


def bytes_of(file: int) -> bytes:
    """Self-describing: each 8 bytes say which file they are of and where."""
    words = b"".join((file << 56 | place).to_bytes(8, "little") for place in range(SIZE // 8 + 1))
    return words[:SIZE]


class BackendContract:
    """The contract. `make` returns a new backend; `direct`: whether it takes direct descriptors."""

    direct = False

    def make(self) -> Backend:
        raise pytest.UsageError("a contract suite needs a backend")

    # What a backend for other memory overrides.

    def take(self, length: int) -> Memory:
        region = Region.anonymous(length)
        return Memory(DRAM, region.address, region.length, region)

    def look(self, memory: Memory, offset: int, length: int) -> bytes:
        read: bytes = memory.region.read(offset, length)
        return read

    # What the tests are made of.

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        with self.make() as made:
            yield made

    @pytest.fixture
    def files(self, tmp_path: Path) -> Iterator[list[OpenFile]]:
        opened = []
        for number in range(3):
            path = tmp_path / f"{number}.bin"
            path.write_bytes(bytes_of(number))
            fd = os.open(path, os.O_RDONLY)
            direct = -1
            if self.direct:
                try:
                    direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
                except OSError as error:
                    pytest.skip(f"{tmp_path} takes no O_DIRECT: {error.strerror}")
            opened.append(OpenFile(str(path), fd, SIZE, direct, BLOCK))
        yield opened
        for file in opened:
            os.close(file.fd)
            if file.direct_fd >= 0:
                os.close(file.direct_fd)

    def reads(self, shard: int, step: int = BLOCK, start: int = 0) -> list[Transfer]:
        """Transfers that bring a whole file to target `shard`, in order."""
        io_mode = "direct" if self.direct else "buffered"
        return [
            Transfer(shard, at, step, min(step, SIZE - at), shard, at, io_mode, tag)
            for tag, at in enumerate(range(start, SIZE, step))
        ]

    def finish(self, backend: Backend, request: Any, count: int) -> dict[int, Failure]:
        """Waits for all of a request: each transfer is reported exactly once."""
        settled: list[int] = []
        failures: dict[int, Failure] = {}
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            progress = backend.check(request)
            settled += progress.settled
            assert {failure.transfer for failure in progress.failures} <= set(progress.settled)
            failures.update({failure.transfer: failure for failure in progress.failures})
            if progress.finished:
                break
            assert time.monotonic() < deadline, f"{len(settled)} of {count} reads settled"
            backend.wait(request, 0.05)
        settled += backend.check(request).settled
        assert sorted(settled) == list(range(count))
        assert not backend.check(request).settled
        return failures

    def ready(
        self, backend: Backend, files: Sequence[OpenFile]
    ) -> tuple[list[Registration], list[Memory], list[Registration]]:
        memory = [self.take(SIZE + BLOCK) for _ in files]
        return (
            [backend.register(file) for file in files],
            memory,
            [backend.register(entry) for entry in memory],
        )

    # Asked before it is used.

    def test_it_says_what_it_is(self, backend: Backend) -> None:
        kind = type(backend)
        assert kind.name and kind.memory_kinds
        assert len(kind.api_version) == 2
        assert isinstance(backend.limits(), Limits)
        for option in kind.options():
            assert option.name and option.meaning
        support = kind.probe()
        assert isinstance(support, Support)
        assert support.usable or support.reasons

    def test_an_option_that_it_does_not_have(self, backend: Backend) -> None:
        with pytest.raises(TypeError, match="has no option 'nonsense'"):
            type(backend)(nonsense=1)

    # Bytes.

    def test_whole_files(self, backend: Backend, files: list[OpenFile]) -> None:
        known, memory, spaces = self.ready(backend, files)
        limit = backend.limits().max_request
        for step in {BLOCK, min(limit, 5 * BLOCK), min(limit, SIZE // BLOCK * BLOCK + BLOCK)}:
            transfers = [t for shard in range(3) for t in self.reads(shard, step)]
            request = backend.prepare(transfers, known, spaces)
            backend.post(request)
            assert self.finish(backend, request, len(transfers)) == {}
            backend.release(request)
            for shard in range(3):
                assert self.look(memory[shard], 0, SIZE) == bytes_of(shard)

    def test_direct_reads_use_the_direct_descriptor(
        self, backend: Backend, files: list[OpenFile]
    ) -> None:
        if "direct" not in backend.limits().io_modes:
            pytest.skip("it says that it does no direct reads")
        right, other = files[0], files[1]
        wanted = right.direct_fd if self.direct else right.fd
        known, memory, spaces = self.ready(backend, [right._replace(fd=other.fd, direct_fd=wanted)])
        transfers = [each._replace(io_mode="direct") for each in self.reads(0)]
        request = backend.prepare(transfers, known, spaces)
        backend.post(request)
        assert not self.finish(backend, request, len(transfers))
        backend.release(request)
        blocks = BLOCKS * BLOCK  # the end of the file, less than a block, may be read buffered
        assert self.look(memory[0], 0, blocks) == bytes_of(0)[:blocks]

    def test_nothing_else_is_written(self, backend: Backend, files: list[OpenFile]) -> None:
        known, memory, spaces = self.ready(backend, files)
        transfers = self.reads(0)[5:9:2] + self.reads(1)[-1:]
        request = backend.prepare(transfers, known, spaces)
        backend.post(request)
        assert self.finish(backend, request, 3) == {}
        backend.release(request)
        data = bytes_of(0)
        expected = bytearray(SIZE)
        for at in (5 * BLOCK, 7 * BLOCK):
            expected[at : at + BLOCK] = data[at : at + BLOCK]
        assert self.look(memory[0], 0, SIZE) == bytes(expected)
        assert self.look(memory[1], BLOCKS * BLOCK, TAIL) == bytes_of(1)[BLOCKS * BLOCK :]
        assert self.look(memory[1], 0, BLOCKS * BLOCK) == bytes(BLOCKS * BLOCK)
        assert self.look(memory[2], 0, SIZE) == bytes(SIZE)

    def test_to_other_places_and_odd_offsets(self, backend: Backend, files: list[OpenFile]) -> None:
        """Buffered reads have no alignment."""
        known, memory, spaces = self.ready(backend, files)
        transfers = [
            Transfer(2, 17, 1001, 1001, 0, 4099, "buffered", 0),
            Transfer(1, SIZE - 1, 1, 1, 0, 3, "buffered", 1),
            Transfer(0, 5, 1 << 13, 1 << 13, 2, 1, "buffered", 2),
        ]
        request = backend.prepare(transfers, known, spaces)
        backend.post(request)
        assert self.finish(backend, request, 3) == {}
        backend.release(request)
        assert self.look(memory[0], 4099, 1001) == bytes_of(2)[17:1018]
        assert self.look(memory[0], 0, 5) == bytes(3) + bytes_of(1)[-1:] + bytes(1)
        assert self.look(memory[2], 0, 8194) == bytes(1) + bytes_of(0)[5:8197] + bytes(1)

    def test_an_empty_request(self, backend: Backend, files: list[OpenFile]) -> None:
        known, _, spaces = self.ready(backend, files)
        request = backend.prepare([], known, spaces)
        backend.post(request)
        assert self.finish(backend, request, 0) == {}
        backend.release(request)

    # Life.

    def test_posting_again(self, backend: Backend, files: list[OpenFile]) -> None:
        known, memory, spaces = self.ready(backend, files)
        transfers = self.reads(0)
        request = backend.prepare(transfers, known, spaces)
        for round_ in range(4):
            backend.post(request)
            assert self.finish(backend, request, len(transfers)) == {}, f"round {round_}"
        backend.release(request)
        assert self.look(memory[0], 0, SIZE) == bytes_of(0)

    def test_several_requests_at_once(self, backend: Backend, files: list[OpenFile]) -> None:
        known, memory, spaces = self.ready(backend, files)
        requests = [backend.prepare(self.reads(shard), known, spaces) for shard in range(3)]
        for request in requests:
            backend.post(request)
        for request in reversed(requests):
            assert self.finish(backend, request, len(self.reads(0))) == {}
        for shard, request in enumerate(requests):
            backend.release(request)
            assert self.look(memory[shard], 0, SIZE) == bytes_of(shard)

    def test_release_in_flight(self, backend: Backend, files: list[OpenFile]) -> None:
        known, _, spaces = self.ready(backend, files)
        for _ in range(20):
            memory = self.take(SIZE + BLOCK)
            space = backend.register(memory)
            request = backend.prepare(self.reads(0), known, [space, *spaces[1:]])
            backend.post(request)
            backend.release(request)
            backend.deregister(space)
            del request, memory, space

    def test_release_while_another_thread_waits(
        self, backend: Backend, files: list[OpenFile]
    ) -> None:
        known, _, spaces = self.ready(backend, files)
        errors: list[BaseException] = []
        for _ in range(20):
            request = backend.prepare(self.reads(0), known, spaces)
            backend.post(request)
            waits = threading.Event()

            def wait(request: Any = request, waits: threading.Event = waits) -> None:
                try:
                    for _ in range(100):
                        backend.wait(request, _PATIENCE_SECONDS)
                        waits.set()
                except BaseException as error:
                    errors.append(error)

            waiting = threading.Thread(target=wait)
            waiting.start()
            assert waits.wait(_PATIENCE_SECONDS)
            backend.release(request)
            waiting.join(_PATIENCE_SECONDS)
            assert not waiting.is_alive() and not errors

    def test_release_of_what_was_never_posted(
        self, backend: Backend, files: list[OpenFile]
    ) -> None:
        """The loader asks for its facts, as those of each request: `post` may have failed."""
        known, memory, spaces = self.ready(backend, files)
        request = backend.prepare(self.reads(0), known, spaces)
        backend.release(request)
        assert self.look(memory[0], 0, SIZE) == bytes(SIZE)
        assert backend.is_idle(request)
        assert not any(backend.paths(request).values())
        assert not any(facts.direct_bytes > 0 for facts in backend.facts(request))

    def test_closing_twice(self, files: list[OpenFile]) -> None:
        backend = self.make()
        known, _, spaces = self.ready(backend, files)
        request = backend.prepare(self.reads(0), known, spaces)
        backend.post(request)
        self.finish(backend, request, len(self.reads(0)))
        backend.release(request)
        for registration in [*known, *spaces]:
            backend.deregister(registration)
        backend.close()
        backend.close()

    def test_descriptors_come_back(self, files: list[OpenFile]) -> None:
        self.test_closing_twice(files)  # what is opened once per process is open now
        with descriptors.none_left():
            for _ in range(5):
                self.test_closing_twice(files)

    def test_paths_count_all_bytes(self, backend: Backend, files: list[OpenFile]) -> None:
        known, _, spaces = self.ready(backend, files)
        request = backend.prepare(self.reads(0), known, spaces)
        backend.post(request)
        self.finish(backend, request, len(self.reads(0)))
        backend.release(request)
        paths = backend.paths(request)
        assert not paths or sum(paths.values()) == SIZE

    def test_file_that_no_transfer_reads_may_be_none_of_register(
        self, backend: Backend, files: list[OpenFile]
    ) -> None:
        known, memory, spaces = self.ready(backend, files)
        request = backend.prepare(self.reads(1), [NO_FILE, known[1], NO_FILE], spaces)
        backend.post(request)
        self.finish(backend, request, len(self.reads(1)))
        backend.release(request)
        assert self.look(memory[1], 0, SIZE) == bytes_of(1)

    # Failures.

    def test_one_bad_read_among_good_ones(
        self, backend: Backend, files: list[OpenFile], tmp_path: Path
    ) -> None:
        """A descriptor that may not be read from: EBADF for its reads, the others go on."""
        bad = os.open(tmp_path / "bad.bin", os.O_WRONLY | os.O_CREAT)
        try:
            broken = OpenFile(str(tmp_path / "bad.bin"), bad, SIZE)
            known, memory, spaces = self.ready(backend, [files[0], broken, files[2]])
            transfers = [*self.reads(0)[:7], *self.reads(1)[3:4], *self.reads(2)[:7]]
            request = backend.prepare(transfers, known, spaces)
            backend.post(request)
            failures = self.finish(backend, request, 15)
            backend.release(request)
        finally:
            os.close(bad)
        assert list(failures) == [7]
        assert failures[7].got == 0 and failures[7].errno == errno.EBADF
        for shard in (0, 2):
            assert self.look(memory[shard], 0, 7 * BLOCK) == bytes_of(shard)[: 7 * BLOCK]

    def test_a_file_that_ends_early(self, backend: Backend, files: list[OpenFile]) -> None:
        known, memory, spaces = self.ready(backend, files)
        cut = 10 * BLOCK + 100
        os.truncate(files[1].path, cut)
        transfers = self.reads(1)
        request = backend.prepare(transfers, known, spaces)
        for _ in range(2):
            backend.post(request)
            failures = self.finish(backend, request, len(transfers))
            assert sorted(failures) == list(range(10, len(transfers)))
            assert failures[10].got == 100 and failures[11].got == 0
            assert all(failure.errno == 0 and not failure.text for failure in failures.values())
        backend.release(request)
        assert self.look(memory[1], 0, cut) == bytes_of(1)[:cut]

    def test_a_file_that_has_grown(self, backend: Backend, files: list[OpenFile]) -> None:
        """The transfer is read exactly; bytes that were added stay outside its length."""
        known, memory, spaces = self.ready(backend, files)
        with open(files[0].path, "ab") as file:
            file.write(b"\xff" * 3 * BLOCK)
        request = backend.prepare(self.reads(0), known, spaces)
        backend.post(request)
        assert self.finish(backend, request, len(self.reads(0))) == {}
        backend.release(request)
        assert self.look(memory[0], 0, SIZE) == bytes_of(0)
        assert self.look(memory[0], (BLOCKS + 1) * BLOCK, TAIL) == bytes(TAIL)
