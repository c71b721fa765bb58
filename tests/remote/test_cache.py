"""The local cache: remote files are fetched once, and no fault of the cache changes a byte."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest

import forked
from descriptors import none_left
from gdsload.errors import GdsloadError, RemoteError, StallError
from gdsload.remote import cache_entry
from gdsload.remote.cache import SIZE_VARIABLE, CachedFile, LocalCache
from gdsload.remote.cache_entry import BLOCK_BYTES, Entry
from gdsload.remote.file import LocalCopy, RemoteFile
from gdsload.system import quiesce
from gdsload.system.cancellation import CancelToken, LoadCancelled
from threadends import await_threads
from waiting import wait_for

SIZE = 3 * BLOCK_BYTES + 12_345
PATIENCE_SECONDS = 240.0


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, str(1 << 40))


@cache
def random_bytes(seed: str, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


class MemoryFile(RemoteFile):
    """A remote file, of bytes that its seed determines. It notes what it is asked for."""

    scheme = "s3"

    def __init__(
        self, name: str = "model.safetensors", size: int = SIZE, version: str = '"1"'
    ) -> None:
        self.url, self.size, self.version = f"s3://bucket/{name}", size, version
        self.content = random_bytes(f"{name} {version}", size)
        self.asked: list[tuple[int, int]] = []
        self.fetched = 0
        self.chunk_bytes = 1 << 20
        self.before_chunk: Callable[[int], None] = lambda offset: None

    def chunks(self, offset: int, length: int) -> Iterator[memoryview]:
        self.asked.append((offset, length))
        for start in range(offset, offset + length, self.chunk_bytes):
            self.before_chunk(start)
            part = self.content[start : min(start + self.chunk_bytes, offset + length)]
            self.fetched += len(part)
            yield memoryview(part)

    def verify_unchanged(self) -> None: ...


def opened(directory: Path, file: MemoryFile) -> CachedFile:
    return LocalCache(directory).open(file)


def load(directory: Path, file: MemoryFile) -> bytes:
    """All bytes by ranges that do not fit to the blocks, as a load asks for them."""
    with_cache = opened(directory, file)
    step = BLOCK_BYTES - 1000
    data = b"".join(
        with_cache.read(start, min(step, file.size - start)) for start in range(0, file.size, step)
    )
    with_cache.close()
    return data


def content_of(copy: LocalCopy | None) -> bytes:
    assert copy is not None
    with open(copy.fd, "rb") as file:
        return file.read()


def sealed_files(directory: Path) -> int:
    return sum(b"\nsealed " in path.read_bytes() for path in directory.rglob("pieces"))


def filled_and_killed(directory: Path) -> MemoryFile:
    """A file that a load has read, whose process was killed before it sealed its copy."""
    file = MemoryFile()
    first = opened(directory, file)
    first.read(0, file.size)
    del first
    return file


def data_of(directory: Path) -> Path:
    (path,) = directory.rglob("model.safetensors")
    return path


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 64]))


def test_second_load_fetches_nothing(tmp_path: Path) -> None:
    file = MemoryFile()
    assert load(tmp_path, file) == file.content
    assert file.fetched == file.size
    again = MemoryFile()
    assert load(tmp_path, again) == file.content
    assert again.asked == []


def test_whole_file_is_a_local_file(tmp_path: Path) -> None:
    file = MemoryFile()
    load(tmp_path, file)
    wait_for(lambda: sealed_files(tmp_path) == 1)
    cached = opened(tmp_path, MemoryFile())
    copy = cached.local_copy()
    assert copy is not None and Path(copy.path).name == "model.safetensors"
    cached.close()
    assert content_of(copy) == file.content


def test_quiesce_waits_for_files_that_are_being_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealing, goes_on = held_seal(monkeypatch)
    load(tmp_path, MemoryFile())
    assert sealing.wait(PATIENCE_SECONDS)
    with pytest.raises(GdsloadError, match="files of the local cache are being flushed"):
        quiesce.quiesce(0.0)
    with ThreadPoolExecutor(1) as pool:
        quiesced = pool.submit(quiesce.quiesce, PATIENCE_SECONDS)
        goes_on.set()
        quiesced.result()
    assert sealed_files(tmp_path) == 1


def test_quiesce_in_a_forked_child_waits_for_files_that_are_being_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealing, goes_on = held_seal(monkeypatch)

    def child() -> None:
        load(tmp_path, MemoryFile())
        assert sealing.wait(PATIENCE_SECONDS)
        with pytest.raises(GdsloadError, match="are being flushed"):
            quiesce.quiesce(0.0)
        goes_on.set()
        quiesce.quiesce(PATIENCE_SECONDS)

    pid = forked.fork()
    if pid == 0:
        forked.end_with(child)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_child_of_a_fork_uses_no_entry_of_its_parent(tmp_path: Path) -> None:
    """It may live for long, and its parent's entries can be removed meanwhile."""
    file = MemoryFile()
    cached = opened(tmp_path, file)
    cached.read(0, 1000)
    waits, goes_on = os.pipe()
    pid = forked.fork()
    if pid == 0:
        os.close(goes_on)
        forked.end_with(lambda: os.read(waits, 1))
    os.close(waits)
    assert LocalCache(tmp_path).clear() == []
    assert cached.read(1000, 1000) == file.content[1000:2000]
    del cached
    wait_for(lambda: len(LocalCache(tmp_path).clear()) == 1)
    os.close(goes_on)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def held_seal(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Lets files be sealed only when the second event is set; the first one is set then before."""
    sealing, goes_on, seal = threading.Event(), threading.Event(), Entry.seal

    def held(entry: Entry) -> bool:
        sealing.set()
        assert goes_on.wait(PATIENCE_SECONDS)
        return seal(entry)

    monkeypatch.setattr(Entry, "seal", held)
    return sealing, goes_on


def test_whole_file_that_is_not_sealed_is_compared_and_sealed(tmp_path: Path) -> None:
    file = filled_and_killed(tmp_path)
    assert sealed_files(tmp_path) == 0
    assert content_of(opened(tmp_path, MemoryFile()).local_copy()) == file.content
    assert sealed_files(tmp_path) == 1


def test_comparing_a_whole_file_ends_when_the_load_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled_and_killed(tmp_path)
    hangs, token = threading.Event(), CancelToken()

    def read(entry: Entry, cached: object) -> None:
        token.ask()
        hangs.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(Entry, "read", read)
    cached = opened(tmp_path, MemoryFile())
    try:
        with pytest.raises(LoadCancelled):
            token.run(cached.local_copy)
    finally:
        hangs.set()
        cached.close()


def test_whole_file_on_a_disk_that_hangs_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = filled_and_killed(tmp_path)

    def seal(entry: Entry) -> bool:
        raise StallError("the cache has not answered", path=entry.path)

    monkeypatch.setattr(Entry, "seal", seal)
    again, other = MemoryFile(), MemoryFile()
    cache = LocalCache(tmp_path)
    cached, same_disk = cache.open(again), cache.open(other)
    assert cached.local_copy() is None
    monkeypatch.setattr(Entry, "read", lambda *_: pytest.fail("the disk that hangs was read"))
    for each, fetched in ((cached, again), (same_disk, other)):
        assert each.read(0, file.size) == file.content
        assert fetched.fetched == file.size
        assert "has not answered" in each.facts().refusals["local cache"]
        each.close()


def fail_first_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells of bytes that were not written by one error, and never again."""
    outcomes = [OSError(errno.EIO, os.strerror(errno.EIO))]

    def flush(fd: int) -> None:
        if outcomes:
            raise outcomes.pop()

    monkeypatch.setattr(os, "fdatasync", flush)


def test_whole_file_that_cannot_be_flushed_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = filled_and_killed(tmp_path)
    fail_first_flush(monkeypatch)
    again, later = MemoryFile(), MemoryFile()
    cached = opened(tmp_path, again)
    assert cached.local_copy() is None
    assert cached.local_copy() is None  # the second flush does not fail
    assert cached.read(0, again.size) == file.content
    assert os.strerror(errno.EIO) in cached.facts().refusals["local cache"]
    cached.close()
    assert sealed_files(tmp_path) == 0
    assert load(tmp_path, later) == file.content
    assert again.fetched == later.fetched == file.size
    await_threads("gdsload-cache")
    assert content_of(opened(tmp_path, MemoryFile()).local_copy()) == file.content


def test_flush_that_fails_after_the_load_leaves_nothing_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_first_flush(monkeypatch)
    file = MemoryFile()
    load(tmp_path, file)
    await_threads("gdsload-cache")
    again = MemoryFile()
    assert opened(tmp_path, again).local_copy() is None
    assert load(tmp_path, again) == file.content
    assert again.fetched == file.size


@contextmanager
def hanging_flush(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Flushes hang, and then fail. Yields their descriptors."""
    goes_on = threading.Event()
    begun: list[int] = []
    ended: list[int] = []

    def flush(fd: int) -> None:
        begun.append(fd)
        goes_on.wait(PATIENCE_SECONDS)
        os.fstat(fd)  # it is still open
        ended.append(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", flush)
    try:
        yield begun
    finally:
        goes_on.set()
        await_threads("gdsload-open")
    assert ended == begun


def test_whole_file_whose_flush_hangs_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, again = filled_and_killed(tmp_path), MemoryFile()
    monkeypatch.setattr(cache_entry, "STALL_SECONDS", 0.2)
    with hanging_flush(monkeypatch) as fds:
        cached = opened(tmp_path, again)
        assert cached.local_copy() is None
        assert len(fds) == 1
        assert cached.read(0, file.size) == file.content
        assert "has not answered" in cached.facts().refusals["local cache"]
        cached.close()
        del cached
    assert again.fetched == file.size
    assert load(tmp_path, later := MemoryFile()) == file.content
    assert later.fetched == file.size  # the flush has failed in the end


def test_slow_flush_of_a_large_file_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = filled_and_killed(tmp_path)
    monkeypatch.setattr(cache_entry, "STALL_SECONDS", 0.0)
    monkeypatch.setattr(cache_entry, "_SLOWEST_FLUSH", file.size // 30)
    monkeypatch.setattr(os, "fdatasync", lambda fd: time.sleep(0.5))
    assert content_of(opened(tmp_path, MemoryFile()).local_copy()) == file.content


def test_file_that_cannot_be_sealed_at_the_end_of_the_interpreter_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    refused = threading.Event()

    def refuse(entry: Entry) -> bool:
        refused.set()
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(Entry, "seal", refuse)
    monkeypatch.setattr(threading, "excepthook", raised.append)
    load(tmp_path, MemoryFile(size=1000))
    assert refused.wait(PATIENCE_SECONDS)
    await_threads("gdsload-cache")
    assert not raised


def test_partly_filled_file_is_no_local_file_and_fetches_the_rest(tmp_path: Path) -> None:
    file = MemoryFile()
    cached = opened(tmp_path, file)
    cached.read(5_000_000, 3_000_000)
    cached.close()
    again = MemoryFile()
    cached = opened(tmp_path, again)
    assert cached.local_copy() is None
    assert cached.read(0, again.size) == file.content
    assert again.asked == [(0, 5_000_000), (8_000_000, again.size - 8_000_000)]
    assert cached.facts().paths == {
        "object_store/s3": again.size - 3_000_000,
        "local_cache": 3_000_000,
    }


@pytest.mark.parametrize("seed", range(5))
def test_random_ranges_are_exact_and_each_byte_is_fetched_once(tmp_path: Path, seed: int) -> None:
    numbers = random.Random(seed)
    file = MemoryFile(size=numbers.randrange(1, SIZE))
    file.chunk_bytes = numbers.choice([70_001, 1 << 20, 5 << 20])
    wanted: set[tuple[int, int]] = set()
    for _ in range(4):
        cached = opened(tmp_path, file)
        for _ in range(6):
            start = numbers.randrange(file.size)
            length = numbers.randrange(1, file.size - start + 1)
            assert cached.read(start, length) == file.content[start : start + length]
            wanted.add((start, length))
        cached.close()
    covered, end = 0, 0
    for start, length in sorted(wanted):
        covered += max(start + length - max(start, end), 0)
        end = max(end, start + length)
    assert file.fetched == covered


def test_flipped_byte_of_a_whole_file_is_fetched_again(tmp_path: Path) -> None:
    file = MemoryFile()
    load(tmp_path, file)
    await_threads("gdsload-cache")
    assert sealed_files(tmp_path) == 1
    flip(data_of(tmp_path), BLOCK_BYTES + 77)
    again = MemoryFile()
    cached = opened(tmp_path, again)
    assert cached.local_copy() is None
    assert cached.read(0, again.size) == file.content
    assert 0 < again.fetched <= BLOCK_BYTES
    assert content_of(cached.local_copy()) == file.content


def test_flipped_byte_of_a_partly_filled_file_is_fetched_again(tmp_path: Path) -> None:
    file = MemoryFile()
    opened(tmp_path, file).read(100, 50_000)
    flip(data_of(tmp_path), 777)
    again = MemoryFile()
    assert opened(tmp_path, again).read(0, 60_000) == file.content[:60_000]
    assert opened(tmp_path, again).read(100, 50_000) == file.content[100:50_100]
    assert again.fetched == 60_000


@pytest.mark.parametrize("seed", range(20))
def test_damaged_list_of_pieces_changes_no_byte(tmp_path: Path, seed: int) -> None:
    file = MemoryFile()
    cached = opened(tmp_path, file)
    cached.read(1_000_000, 9_000_000)
    cached.close()
    (pieces,) = tmp_path.rglob("pieces")
    numbers, raw = random.Random(seed), bytearray(pieces.read_bytes())
    for _ in range(8):
        raw[numbers.randrange(len(raw))] = numbers.choice(b"0123456789 -\n{")
    pieces.write_bytes(raw[: numbers.randrange(len(raw))] if seed % 2 else raw)
    assert load(tmp_path, MemoryFile()) == file.content


def test_seal_with_endless_numbers_changes_no_byte(tmp_path: Path) -> None:
    file = MemoryFile()
    load(tmp_path, file)
    (pieces,) = tmp_path.rglob("pieces")
    with pieces.open("ab") as out:
        out.write(b"\nsealed 1 1 1 " + b"9" * 5000 + b"\n")  # int() refuses so many
    assert load(tmp_path, MemoryFile()) == file.content


AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
import gdsload, xxhash  # while this user may read them
sys.path[:0] = sys.argv[2:]
from test_cache import MemoryFile, load, opened
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
folder = Path(sys.argv[1])
again = MemoryFile()
found = opened(folder, again)
assert "Permission denied" in found.refusal and found.refusal.startswith(str(folder)), found.refusal
assert found.read(0, again.size) == again.content and again.fetched == 0, again.fetched
found.close()
other = MemoryFile("other")
refusal = opened(folder, other).refusal
assert "other users leave no room" in refusal, refusal
os.environ["GDSLOAD_CACHE_BYTES"] = str(1 << 40)
assert load(folder, other) == other.content and load(folder, other) == other.content
assert other.fetched == other.size, "the second one reads the cache"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files that others may not write")
def test_files_of_another_user_in_a_shared_cache_are_read() -> None:
    """As of root in a container: they cannot be written, nor removed to make room."""
    with tempfile.TemporaryDirectory() as name:  # others may not enter the directories of pytest
        shared = Path(name)
        shared.chmod(0o755)
        load(shared, MemoryFile())
        await_threads("gdsload-cache")
        entries = shared / "gdsload-files-1"
        entries.chmod(0o777)
        (entries / ("0" * 32)).mkdir(mode=0o700)
        places = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
        environment = {**os.environ, SIZE_VARIABLE: str(SIZE + 1_000_000)}
        command = [sys.executable, "-c", AS_ANOTHER_USER, name, *places]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr


def test_truncated_bytes_are_fetched_again(tmp_path: Path) -> None:
    file = MemoryFile()
    load(tmp_path, file)
    os.truncate(data_of(tmp_path), 10_000_000)
    assert load(tmp_path, MemoryFile()) == file.content


def test_other_version_is_another_file(tmp_path: Path) -> None:
    old, new = MemoryFile(version='"1"'), MemoryFile(version='"2"')
    load(tmp_path, old)
    assert load(tmp_path, new) == new.content != old.content


@pytest.mark.parametrize("version", ["", 'W/"1"'])
def test_file_without_a_version_is_not_cached(tmp_path: Path, version: str) -> None:
    file = MemoryFile(version=version)
    cached = opened(tmp_path, file)
    assert "no version" in cached.refusal
    assert cached.read(0, 100) == file.content[:100]
    assert list(tmp_path.iterdir()) == []


def test_stopped_reader_keeps_what_came(tmp_path: Path) -> None:
    file = MemoryFile()
    chunks = opened(tmp_path, file).chunks(10, 6_000_000)
    next(chunks), next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    again = MemoryFile()
    assert opened(tmp_path, again).read(10, 6_000_000) == file.content[10:6_000_010]
    assert again.asked == [(10 + 2 * file.chunk_bytes, 6_000_000 - 2 * file.chunk_bytes)]


def test_failure_in_the_middle_keeps_what_came(tmp_path: Path) -> None:
    file = MemoryFile()

    def fail(offset: int) -> None:
        if offset >= 3_000_000:
            raise file.error("the connection was reset")

    file.before_chunk = fail
    cached = opened(tmp_path, file)
    with pytest.raises(RemoteError, match="reset"):
        cached.read(0, file.size)
    file.before_chunk = lambda offset: None
    file.asked.clear()
    assert cached.read(0, file.size) == file.content
    assert file.asked == [(3 << 20, file.size - (3 << 20))]


def test_two_loads_of_one_process_fetch_each_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gdsload.remote.cache.CLAIM_SECONDS", PATIENCE_SECONDS)
    file = MemoryFile()
    file.before_chunk = lambda offset: time.sleep(0.01)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(load(tmp_path, file))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [file.content] * 3
    assert file.fetched == file.size


def test_process_that_hangs_is_waited_for_and_then_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gdsload.remote.cache.CLAIM_SECONDS", 0.1)
    hanging, other = MemoryFile(), MemoryFile()
    hangs = opened(tmp_path, hanging).chunks(0, hanging.size)
    next(hangs)
    assert opened(tmp_path, other).read(0, other.size) == other.content
    assert b"".join(hangs) == hanging.content[hanging.chunk_bytes :]
    assert load(tmp_path, MemoryFile()) == hanging.content


# --- processes -----------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/remote"]
from test_cache import *
directory = Path(sys.argv[2])
"""


def start(directory: Path, code: str) -> subprocess.Popen[str]:
    script = SCRIPT + textwrap.dedent(code)
    arguments = [sys.executable, "-c", script, str(Path(__file__).parents[1]), str(directory)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_process_that_ends_after_its_load_seals_first(tmp_path: Path) -> None:
    code = """
    from gdsload.remote.cache_entry import Entry
    seal = Entry.seal
    def seal_late(entry):
        time.sleep(0.5)
        return seal(entry)
    Entry.seal = seal_late
    load(directory, MemoryFile())
    """
    assert start(tmp_path, code).wait(PATIENCE_SECONDS) == 0
    assert sealed_files(tmp_path) == 1


def test_two_processes_at_once_fetch_each_byte_once(tmp_path: Path) -> None:
    code = """
    import gdsload.remote.cache
    gdsload.remote.cache.CLAIM_SECONDS = PATIENCE_SECONDS
    file = MemoryFile()
    file.before_chunk = lambda offset: time.sleep(0.02)
    print("ready", flush=True)
    while not (directory / "go").exists(): time.sleep(0.001)
    assert load(directory, file) == file.content
    print(file.fetched)
    """
    processes = [start(tmp_path, code) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    fetched = [int(process.communicate(timeout=PATIENCE_SECONDS)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum(fetched) == SIZE


def test_process_killed_at_any_write_leaves_nothing_wrong(tmp_path: Path) -> None:
    """A child is killed before its k-th write, or in the middle of it, for every k."""
    code = """
    def file():
        return MemoryFile(size=BLOCK_BYTES + 12_345)
    def killed_at(k, half):
        count = 0
        def counted(real):
            def write(fd, data, *offset):
                nonlocal count
                count += 1
                if count == k:
                    if half: real(fd, data[: len(data) // 2], *offset)
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(fd, data, *offset)
            return write
        os.pwrite, os.write = counted(os.pwrite), counted(os.write)
        load(directory / f"{k} {half}", file())
    for half in (False, True):
        killed, k = True, 0
        while killed:
            k += 1
            if not (pid := os.fork()):
                try: killed_at(k, half)
                finally: os._exit(0)
            killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
            again = file()
            assert load(directory / f"{k} {half}", again) == again.content, (k, half)
            assert killed or again.fetched == 0
    print(k)
    """
    process = start(tmp_path, code)
    assert int(process.communicate(timeout=PATIENCE_SECONDS)[0]) > 8
    assert process.returncode == 0


# --- disks ---------------------------------------------------------------------------------------


@contextmanager
def mounted(directory: Path, *options: str) -> Iterator[None]:
    directory.mkdir(exist_ok=True)
    mount = subprocess.run(["mount", *options, str(directory)], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip(f"cannot mount: {mount.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def test_full_disk_ends_the_caching_and_not_the_load(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=6m", "tmpfs"):
        file = MemoryFile()
        cached = opened(tmp_path / "disk", file)
        assert cached.read(0, file.size) == file.content
        assert "No space left on device" in cached.refusal
        cached.close()
        again = MemoryFile()
        assert load(tmp_path / "disk", again) == file.content
        assert again.fetched < file.size  # what fitted is used


def test_cache_leaves_a_tenth_of_the_disk_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SIZE_VARIABLE)
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=20m", "tmpfs"):
        for name in ("a", "b"):
            file = MemoryFile(name)
            cached = LocalCache(tmp_path / "disk").open(file)
            assert (cached.refusal, cached.read(0, file.size)) == ("", file.content)
            cached.close()
            await_threads("gdsload-cache")  # until it has ended, the file is in use
        refused = LocalCache(tmp_path / "disk").open(MemoryFile("large", 19_000_000))
        assert "19,000,000 bytes" in refused.refusal
        assert [Path(each.url).name for each in LocalCache(tmp_path / "disk").entries()] == ["b"]


def test_read_only_cache_serves_what_it_has(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    file = MemoryFile()
    load(directory, file)
    with mounted(directory, "--bind", "-o", "ro", str(directory)):
        again, other = MemoryFile(), MemoryFile("other")
        assert content_of(opened(directory, again).local_copy()) == file.content
        assert load(directory, again) == file.content
        assert again.asked == []
        cached = opened(directory, other)
        assert "read-only" in cached.refusal
        assert cached.read(0, other.size) == other.content


def test_read_only_cache_serves_no_copy_of_what_others_may_still_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that hung goes on, and writes the same bytes again."""
    monkeypatch.setattr("gdsload.remote.cache.CLAIM_SECONDS", 0.1)
    directory, hanging, other = tmp_path / "cache", MemoryFile(), MemoryFile()
    hangs = opened(directory, hanging).chunks(0, hanging.size)
    next(hangs)
    assert opened(directory, other).read(0, other.size) == other.content
    with mounted(directory, "--bind", "-o", "ro", str(directory)):
        cached = opened(directory, MemoryFile())
        assert cached.local_copy() is None
        assert cached.read(0, other.size) == other.content
        assert b"".join(hangs) == hanging.content[hanging.chunk_bytes :]
        hangs.close()
        await_threads("gdsload-cache")


def test_cache_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = MemoryFile()
    cached = opened(tmp_path / "file", file)
    assert "Not a directory" in cached.refusal
    assert cached.read(5, 100) == file.content[5:105]


def test_status_that_cannot_be_read_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tmp_path, MemoryFile("other"))
    plain, failing, calls = os.fstat, 0, 0

    def fstat(fd: int) -> os.stat_result:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return plain(fd)

    monkeypatch.setattr(os, "fstat", fstat)
    opened(tmp_path, MemoryFile()).close()
    last = calls
    assert last > 3
    with none_left():
        for number in range(1, last + 1):
            calls, failing = 0, number
            opened(tmp_path, MemoryFile()).close()


def test_lock_that_another_process_holds_is_waited_for_and_then_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gdsload.remote.cache._LOCK_SECONDS", 0.1)
    file = MemoryFile()
    load(tmp_path, file)
    (path,) = tmp_path.rglob("lock")
    with path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cached = opened(tmp_path, file)
        assert "another process holds its lock" in cached.refusal
        assert cached.read(5, 100) == file.content[5:105]
        for act in (LocalCache(tmp_path).entries, LocalCache(tmp_path).clear):
            with pytest.raises(OSError, match="another process holds its lock"):
                act()


@pytest.mark.parametrize("name", ["model.safetensors", "pieces", "lock"])
def test_fifo_in_place_of_a_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    file, other = MemoryFile(), MemoryFile("other")
    load(tmp_path, file)
    (path,) = tmp_path.rglob(name)
    path.unlink()
    os.mkfifo(path)

    def use() -> None:
        cached = opened(tmp_path, file)
        assert f"{path} is not a regular file" in cached.refusal
        assert cached.read(5, 100) == file.content[5:105]
        assert load(tmp_path, other) == other.content
        if name != "lock":
            assert len(LocalCache(tmp_path).entries()) == 2

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(use)
        try:
            future.result(PATIENCE_SECONDS)
        finally:
            while not future.done():  # a thread that waits for the other end of the FIFO
                with suppress(OSError):
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                time.sleep(0.01)


# --- size ----------------------------------------------------------------------------------------


def names_in(directory: Path) -> set[str]:
    return {Path(each.url).name for each in LocalCache(directory).entries()}


def test_least_recently_used_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, "2500000")
    for name in ("a", "b", "a", "c"):
        file = MemoryFile(name, 1_000_000)
        cached = opened(tmp_path, file)
        assert (cached.refusal, cached.read(0, file.size)) == ("", file.content)
        cached.close()
        await_threads("gdsload-cache")  # until it has ended, the file is in use
        time.sleep(0.02)  # the clock of the filesystem ticks
    assert names_in(tmp_path) == {"a", "c"}


def test_file_that_is_open_is_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MemoryFile("a", 1_000_000)
    cached = opened(tmp_path, file)
    cached.read(0, file.size)
    copy = cached.local_copy()
    cached.close()
    monkeypatch.setenv(SIZE_VARIABLE, "1500000")
    refused = opened(tmp_path, MemoryFile("b", 1_000_000))
    assert "1,000,000 are in use" in refused.refusal
    assert LocalCache(tmp_path).clear() == []
    assert content_of(copy) == file.content
    wait_for(lambda: len(LocalCache(tmp_path).clear()) == 1)
    assert names_in(tmp_path) == set()


def test_file_is_removed_where_an_exclusive_lock_needs_write_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, which makes a lock on the range of all bytes of it."""
    real = fcntl.flock

    def flock(fd: int, kind: int) -> None:
        writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        if kind & fcntl.LOCK_EX and not writable:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(fd, kind)

    load(tmp_path, MemoryFile("a", 1_000_000))
    await_threads("gdsload-cache")
    monkeypatch.setattr(fcntl, "flock", flock)
    assert not LocalCache(tmp_path).entries()[0].busy
    assert len(LocalCache(tmp_path).clear()) == 1


def test_file_being_filled_counts_with_its_whole_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, "1500000")
    filling = opened(tmp_path, MemoryFile("a", 1_000_000))
    assert filling.refusal == ""
    assert "in use" in opened(tmp_path, MemoryFile("b", 1_000_000)).refusal


def test_files_of_one_load_are_opened_after_one_look_at_all_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until there is no room left, or another process has made an entry."""
    monkeypatch.setenv(SIZE_VARIABLE, "2500")
    monkeypatch.setattr("gdsload.remote.cache._ROOM_SECONDS", 1e9)
    shared, looks, real = LocalCache(tmp_path), [], LocalCache._entries
    monkeypatch.setattr(LocalCache, "_entries", lambda self: looks.append(self) or real(self))
    files = [shared.open(MemoryFile(str(number), 500)) for number in range(3)]
    assert looks == [shared]
    time.sleep(0.02)  # the clock of the filesystem ticks
    files.append(LocalCache(tmp_path).open(MemoryFile("of another process", 1000)))
    files.append(shared.open(MemoryFile("one more", 500)))
    assert [looks.count(shared), len(looks)] == [2, 3]
    assert "2,500 are in use" in files.pop().refusal
    assert [file.refusal for file in files] == [""] * 4


def test_part_of_a_file_is_used_without_room_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MemoryFile()
    cached = opened(tmp_path, file)
    cached.read(0, 2 * BLOCK_BYTES)
    cached.close()
    again = MemoryFile()
    monkeypatch.setenv(SIZE_VARIABLE, str(SIZE - 1))
    cached = opened(tmp_path, again)
    assert cached.read(0, SIZE) == file.content
    assert again.fetched == SIZE - 2 * BLOCK_BYTES
    assert f"may have {SIZE - 1:,}" in cached.refusal


def test_environment_sets_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, "1000")
    assert "may have 1,000" in LocalCache(tmp_path).open(MemoryFile()).refusal
    monkeypatch.setenv(SIZE_VARIABLE, "many")
    with pytest.raises(GdsloadError, match="not a number of bytes"):
        LocalCache(tmp_path)


def test_entries_tell_what_is_there(tmp_path: Path) -> None:
    file = MemoryFile()
    cached = opened(tmp_path, file)
    cached.read(0, 2 * BLOCK_BYTES)
    (entry,) = LocalCache(tmp_path).entries()
    assert (entry.url, entry.version, entry.size, entry.busy) == (file.url, '"1"', SIZE, True)
    assert 2 * BLOCK_BYTES <= entry.cached_bytes < SIZE
    (pieces,) = tmp_path.rglob("pieces")
    os.utime(pieces, (1000, 1000))
    assert [each.used for each in LocalCache(tmp_path).entries()] == [1000]
    opened(tmp_path, file).close()
    assert LocalCache(tmp_path).entries()[0].used > 1000


# --- the command line ----------------------------------------------------------------------------


def test_command_lists_and_removes_files(tmp_path: Path) -> None:
    from command import answer, run  # the processes above do not import it

    file = MemoryFile()
    load(tmp_path, file)
    (entry,) = answer("cache", "list", tmp_path)
    assert (entry["url"], entry["size"]) == (file.url, file.size)
    assert file.url in run("cache", "list", tmp_path).output
    wait_for(lambda: not answer("cache", "list", tmp_path)[0]["busy"])
    assert "removed 1 file" in run("cache", "clear", tmp_path).output
    assert answer("cache", "list", tmp_path) == answer("cache", "clear", tmp_path) == []
    for command in ("list", "clear"):
        refused = run("cache", command, tmp_path / "typo")
        assert refused.exit_code == 1
        assert refused.stderr == f"gdsload: No such file or directory: {tmp_path}/typo\n"


@pytest.mark.parametrize("size", ["1e999", "-5", '"x"', "[" * 2000])
def test_entry_that_somebody_has_damaged_can_be_removed(tmp_path: Path, size: str) -> None:
    from command import answer, run  # the processes above do not import it

    load(tmp_path, MemoryFile())
    wait_for(lambda: not answer("cache", "list", tmp_path)[0]["busy"])
    (pieces,) = tmp_path.rglob("pieces")
    pieces.write_text('{"url": "x", "version": "y", "size": ' + size + "}\n")
    assert answer("cache", "list", tmp_path)[0]["size"] == 0
    assert "removed 1 file" in run("cache", "clear", tmp_path).output


def test_command_without_a_cache_lists_nothing(tmp_path: Path) -> None:
    from command import run

    assert "0 files" in run("cache", "list", tmp_path).output
