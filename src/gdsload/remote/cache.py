"""The local cache of remote files: what a load fetches is kept for the next load.

    chunks(offset, length) ──► ranges that are there: read, compared with their checksum
                          └──► gaps: fetched, and written to the cache on their way

A file that is there as a whole is loaded as a local file (`CachedFile.local_copy`). Nothing that
fails in the cache ends a load: it goes on without it, and `CachedFile.refusal` says why. But a disk
that hangs while `chunks` reads or fills the cache blocks the thread that fetches, and the load ends
in StallError: the way out is a load without `cache_dir`. Not responsible for what is in an entry
(`cache_entry`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload.errors import GdsloadError, StallError, extra_hint, shown
from gdsload.remote.cache_entry import BLOCK_BYTES, Entry
from gdsload.remote.directory import RemoteDirectory
from gdsload.remote.file import LOCAL_CACHE, LocalCopy, RemoteFile, SourceFacts
from gdsload.system import lifecycle, quiesce
from gdsload.system.lifecycle import fork_safe_lock
from gdsload.system.threads import start_thread

if TYPE_CHECKING:
    from typing_extensions import Buffer

SIZE_VARIABLE = "GDSLOAD_CACHE_BYTES"
# Below `cache_dir`, which may hold other files. The number is that of the format.
_DIRECTORY = "gdsload-files-1"
_PIECES = "pieces"
_FACTS_BYTES = 1 << 20  # at most, of its first line
_FREE_SHARE = 10  # a tenth of the filesystem stays free by default
_LOCK_SECONDS = 10.0  # for making and removing entries; it is held for milliseconds
_ROOM_SECONDS = 2.0  # so long the files of one load are opened after one look at all entries
# Another process that fetches the same bytes is waited for so long. Then both fetch them.
CLAIM_SECONDS = 5.0
_POLL_SECONDS = 0.01
_SEAL_SECONDS = 5.0  # the end of a process waits for files that are being sealed
_seals: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class CachedFile(RemoteFile):
    """A remote file, with a cache in front of it.

    Attributes:
        refusal: Why the cache is not used, or not filled any more, or "".
    """

    def __init__(
        self, cache: LocalCache, file: RemoteFile, entry: Entry | None, refusal: str = ""
    ) -> None:
        """Owns `file` and `entry` from now on; without an entry, all bytes are fetched."""
        self._cache = cache
        self.url, self.size, self.version = file.url, file.size, file.version
        self.scheme, self.digest, self.query = file.scheme, file.digest, file.query
        self.head_bytes = file.head_bytes
        self.refusal = refusal
        self._file = file
        self._entry = entry
        self._writes = entry is not None and entry.writable
        self._lock = fork_safe_lock(self)
        self._cached_bytes = self._fetched_bytes = 0
        self._users = 0  # iterators of `chunks` that have not ended

    @property
    def backend(self) -> str:  # type: ignore[override]
        return self._file.backend

    @property
    def io_path(self) -> str:
        return self._file.io_path

    def local_copy(self) -> LocalCopy | None:
        """The file in the cache, if it is there as a whole.

        The bytes are compared with their checksums before, except if they were and the file was not
        written to since. It is not removed as long as the descriptor is open. Raises LoadCancelled.
        """
        entry = self._usable_entry()
        if entry is None:
            return None
        try:
            if entry.is_sealed() or (entry.is_whole() and entry.seal()):
                return LocalCopy(entry.path, entry.reader())
        except StallError as error:
            self._cache.hung = str(error)
        except OSError as error:
            self._refuse(error)
        return None

    def _usable_entry(self) -> Entry | None:
        if self._entry is not None and self._cache.hung:  # it would hang as well
            self._entry, self._writes = None, False
            self.refusal = self.refusal or self._cache.hung
        return self._entry

    def chunks(self, offset: int, length: int) -> Iterator[Buffer]:
        entry = self._usable_entry()
        if entry is None:
            for chunk in self._file.chunks(offset, length):
                self._count(memoryview(chunk).nbytes, 0)
                yield chunk
            return
        with self._lock:
            self._users += 1
        try:
            yield from self._through(entry, offset, offset + length)
        finally:
            with self._lock:
                self._users -= 1

    def _through(self, entry: Entry, offset: int, end: int) -> Iterator[Buffer]:
        patience = time.monotonic() + CLAIM_SECONDS
        while offset < end:
            cached = entry.range_at(offset)
            if cached is not None:
                data = entry.read(cached)
                if data is None:
                    continue  # it counts as not there now
                found = memoryview(data)[offset - cached.start : end - cached.start]
                self._count(0, len(found))
                yield found
                offset += len(found)
                patience = time.monotonic() + CLAIM_SECONDS
                continue
            stop = entry.gap_end(offset, end)
            claimed = self._claimed(entry, offset, stop)
            try:
                if self._writes and not claimed and time.monotonic() < patience:
                    time.sleep(_POLL_SECONDS)
                    continue
                if claimed and entry.range_at(offset) is not None:
                    continue  # another process fetched it just before
                fetched = 0
                for chunk in self._fetch(entry, offset, stop):
                    fetched += len(chunk)
                    yield chunk
            finally:
                if claimed:
                    self._attempt(entry.unclaim, offset, stop)
            offset += fetched
            patience = time.monotonic() + CLAIM_SECONDS
            if offset < stop:
                return  # the caller asks for the rest

    def _count(self, fetched: int, cached: int) -> None:
        with self._lock:
            self._fetched_bytes += fetched
            self._cached_bytes += cached

    def _claimed(self, entry: Entry, start: int, stop: int) -> bool:
        try:
            return self._writes and entry.claim(start, stop)
        except OSError as error:
            self._refuse(error)
            return False

    def _fetch(self, entry: Entry, start: int, stop: int) -> Iterator[memoryview]:
        """Reads a range of the remote file, and writes it to the cache, block by block."""
        first, digest = start, entry.hasher()

        def record(end: int) -> None:
            nonlocal first, digest
            if end > first and self._writes:
                self._attempt(entry.record, first, end, digest.hexdigest())
            first, digest = end, entry.hasher()

        at = start
        try:
            for chunk in self._file.chunks(start, stop - start):
                view = memoryview(chunk).cast("B")
                # Before the bytes are handed out: the caller does not come back after the last.
                while self._writes and at < start + len(view):
                    data = view[at - start : BLOCK_BYTES - at % BLOCK_BYTES + at - start]
                    if self._attempt(entry.write, at, data):
                        digest.update(data)
                        at += len(data)
                        if at % BLOCK_BYTES == 0 or at == stop:
                            record(at)
                start += len(view)
                self._count(len(view), 0)
                yield view
        finally:
            record(at)

    def _attempt(self, act: Callable[..., object], *arguments: Any) -> bool:
        """Whether the cache could be written to."""
        try:
            act(*arguments)
        except OSError as error:
            self._refuse(error)
            return False
        return True

    def _refuse(self, error: BaseException) -> None:
        self._writes = False
        if not self.refusal and (entry := self._entry) is not None:
            self.refusal = f"{entry.path}: {_reason(error)}"

    def verify_unchanged(self) -> None:
        self._file.verify_unchanged()

    def facts(self) -> SourceFacts:
        found = self._file.facts() or SourceFacts({self.io_path: self._fetched_bytes}, {}, {}, {})
        return found._replace(
            paths={**found.paths, LOCAL_CACHE: self._cached_bytes},
            refusals={**found.refusals, **({"local cache": self.refusal} if self.refusal else {})},
        )

    def quiesce(self) -> None:
        """Releases the files: from now on all bytes are fetched."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self.refusal = self.refusal or "its files were released by quiesce()"
        self._file.quiesce()

    def close(self) -> None:
        """Closes the files. In a thread, a file that is there as a whole is sealed."""
        entry, self._entry = self._entry, None
        if entry is not None and self._writes and not self._users and not entry.uncompared():
            thread = start_thread(lambda: _seal(entry), "gdsload-cache")
            if thread is not None:
                _seals.add(thread)
                quiesce.register(_seal_holder)  # here: a forked child has no holders of its parent
        self._file.close()


def _seal(entry: Entry) -> None:
    # Then the next load compares the bytes. RuntimeError: no thread, as when the interpreter ends.
    with suppress(OSError, RuntimeError):
        if not entry.is_sealed() and entry.is_whole():
            entry.seal()


def _finish_seals() -> None:
    """A process that ends right after its load would leave the comparison to the next one."""
    deadline = time.monotonic() + _SEAL_SECONDS
    for thread in list(_seals):
        thread.join(max(0.0, deadline - time.monotonic()))


lifecycle.at_exit(lifecycle.RINGS, _finish_seals)  # after prefetches: their end begins some


class _SealHolder(quiesce.Holder):
    """The threads that seal files, which `quiesce` waits for."""

    def busy(self) -> str:
        sealing = any(thread.is_alive() for thread in list(_seals))
        return "files of the local cache are being flushed to the disk" if sealing else ""


_seal_holder = _SealHolder()


class CachedDirectory(RemoteDirectory):
    """A remote directory, with a cache in front of its files. `read` does not use it."""

    def __init__(self, directory: RemoteDirectory, cache: LocalCache) -> None:
        """Reads nothing."""
        self.path = directory.path
        self._directory, self._cache = directory, cache

    def path_of(self, name: str) -> str:
        return self._directory.path_of(name)

    def names(self) -> Collection[str]:
        return self._directory.names()

    def has(self, name: str) -> bool:
        return self._directory.has(name)

    def open(self, name: str) -> CachedFile:
        return self._cache.open(self._directory.open(name))

    def read(self, name: str, limit: int) -> bytes:
        return self._directory.read(name, limit)


class Cached(NamedTuple):
    """One file in the cache.

    Attributes:
        directory: Where it is.
        url: Where it is from, `RemoteFile.key`; "" if that cannot be read.
        version: The version.
        size: Its size in bytes.
        cached_bytes: The size of what is there, on the disk.
        used: When it was last opened, in seconds since the epoch.
        busy: Whether a process has it open.
    """

    directory: str
    url: str
    version: str
    size: int
    cached_bytes: int
    used: float
    busy: bool


class LocalCache:
    """A directory with remote files, shared by the processes of a machine."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Nothing is created yet. GDSLOAD_CACHE_BYTES is its size, else it leaves a tenth of the
        filesystem free.

        Args:
            directory: Where the cache is. It may hold other files.

        Raises:
            GdsloadError: GDSLOAD_CACHE_BYTES is not a number of bytes.
        """
        self.directory = os.path.join(
            os.path.expandvars(os.path.expanduser(os.fspath(directory))), _DIRECTORY
        )
        text = os.environ.get(SIZE_VARIABLE, "")
        if text and not re.fullmatch(r"\d{1,18}", text, re.ASCII):
            raise GdsloadError(f"{SIZE_VARIABLE}={shown(text)} is not a number of bytes")
        self._limit_bytes = int(text) if text else None
        self._room_bytes, self._room_until = 0, 0.0  # what is left of the limit, and how long
        self._changed_ns = 0  # when the last entry was made or removed
        self.hung = ""  # why its disk is not waited for again

    def open(self, file: RemoteFile) -> CachedFile:
        """The file with this cache in front of it. Never fails: see `CachedFile.refusal`."""
        try:
            return CachedFile(self, file, *self._entry_of(file))
        except (OSError, ImportError) as error:
            return CachedFile(self, file, None, f"{self.directory}: {_reason(error)}")

    def _entry_of(self, file: RemoteFile) -> tuple[Entry, str]:
        """The entry, and why it is not filled any further, or ""."""
        if not file.version_is_exact:
            raise _NotCached("the server names no version of the file that stands for its bytes")
        if file.backend == "replicas":  # a source that is wrong would stay wrong in the cache
            raise _NotCached("files of several sources are not cached")
        try:
            from xxhash import xxh3_128
        except ImportError:
            raise _NotCached(f"it needs xxhash: {extra_hint('verify')}") from None
        version = file.digest or file.version
        facts = json.dumps({"url": file.key, "version": version, "size": file.size})
        directory = os.path.join(self.directory, hashlib.sha256(facts.encode()).hexdigest()[:32])
        os.makedirs(self.directory, exist_ok=True)
        writable, refusal = os.access(self.directory, os.W_OK), ""
        try:
            with self._locked(writable):
                if writable:
                    try:
                        self._make_room(directory, file.size)
                        os.makedirs(directory, exist_ok=True)
                        self._changed_ns = os.stat(self.directory).st_mtime_ns
                    except _NotCached as error:  # what is there is used
                        writable, refusal = False, _reason(error)
                try:
                    return _open_entry(directory, facts, file, writable, xxh3_128), refusal
                except PermissionError as error:
                    if not writable:
                        raise
                    # It is another user's: what is there is used.
                    writable, refusal = False, f"{directory}: {_reason(error)}"
                    return _open_entry(directory, facts, file, False, xxh3_128), refusal
        except FileNotFoundError:
            if writable:
                raise
            why = refusal or "it is read-only, and does not have this file"
            raise _NotCached(why) from None

    @contextmanager
    def _locked(self, writable: bool = True) -> Iterator[None]:
        """Keeps other processes from making and removing entries."""
        path = os.path.join(self.directory, "lock")
        try:
            fd = _opened(path, os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY)
        except PermissionError:  # another user has made it: to lock it, it suffices to read it
            fd = _opened(path, os.O_RDONLY)
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise _NotCached("another process holds its lock") from None
                    time.sleep(_POLL_SECONDS)
            yield
        finally:
            os.close(fd)

    def _make_room(self, directory: str, nbytes: int) -> None:
        """Removes entries until the file in `directory` may have `nbytes`."""
        with suppress(FileNotFoundError):
            if _allocated(directory) >= nbytes:
                return  # all of it is there
        # A load opens many files: without this, the time would grow with their number squared.
        unchanged = os.stat(self.directory).st_mtime_ns == self._changed_ns
        if nbytes <= self._room_bytes and unchanged and time.monotonic() < self._room_until:
            self._room_bytes -= nbytes
            return
        found = self._entries()
        limit = self._limit_bytes
        if limit is None:
            disk = os.statvfs(self.directory)
            spare = disk.f_bavail - disk.f_blocks // _FREE_SHARE
            limit = sum(each.cached_bytes for each in found) + max(spare * disk.f_frsize, 0)
        others = [each for each in found if each.directory != directory]
        # What is open will be filled.
        total = nbytes + sum(each.size if each.busy else each.cached_bytes for each in others)
        idle = sorted((each for each in others if not each.busy), key=lambda each: each.used)
        if total - sum(each.cached_bytes for each in idle) > limit:
            raise _NotCached(
                f"the file has {nbytes:,} bytes and the cache may have {limit:,}, of which"
                f" {total - nbytes - sum(each.cached_bytes for each in idle):,} are in use"
                f" ({SIZE_VARIABLE} sets the limit)"
            )
        idle = [each for each in idle if os.access(each.directory, os.W_OK)]
        if total - sum(each.cached_bytes for each in idle) > limit:
            raise _NotCached(f"the files of other users leave no room for its {nbytes:,} bytes")
        for each in idle:
            if total <= limit:
                break
            shutil.rmtree(each.directory)
            total -= each.cached_bytes
        self._room_bytes, self._room_until = limit - total, time.monotonic() + _ROOM_SECONDS

    def entries(self) -> list[Cached]:
        """The files in the cache. Raises OSError."""
        try:
            with self._locked(os.access(self.directory, os.W_OK)):
                return self._entries()
        except FileNotFoundError:
            return []

    def clear(self) -> list[Cached]:
        """Removes all files that no process has open, and returns them. Those of other users stay.
        Raises OSError."""
        removed = []
        try:
            with self._locked():
                for each in self._entries():
                    if not each.busy:
                        with suppress(PermissionError):
                            shutil.rmtree(each.directory)
                            removed.append(each)
        except FileNotFoundError:
            pass
        return removed

    def _entries(self) -> list[Cached]:
        """Those that this user may read."""
        entries = []
        with os.scandir(self.directory) as found:
            for each in found:
                if each.is_dir(follow_symlinks=False):
                    with suppress(PermissionError):
                        entries.append(_cached(each.path))
        return entries


class _NotCached(OSError):
    """Why a file is not cached."""


def _reason(error: BaseException) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _opened(path: str, flags: int) -> int:
    """A descriptor of a regular file. Raises OSError, and does not wait for the end of a FIFO."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _NotCached(f"{path} is not a regular file")
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _data_path(directory: str, url: str) -> str:
    """The path of the bytes: readable, because messages name it."""
    name = re.sub(r"[^\w.-]", "_", url.rstrip("/").rpartition("/")[2], flags=re.ASCII)[-100:]
    return os.path.join(directory, "file" if name in ("", ".", "..", _PIECES) else name)


def _open_entry(
    directory: str, facts: str, file: RemoteFile, writable: bool, hasher: Callable[[], Any]
) -> Entry:
    path = _data_path(directory, file.url)
    flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
    fds: list[int] = []
    try:
        fds.append(_opened(path, flags))
        fcntl.flock(fds[0], fcntl.LOCK_SH | fcntl.LOCK_NB)
        fds.append(_opened(os.path.join(directory, _PIECES), flags | os.O_APPEND))
        line = f"{facts}\n".encode()
        if os.pread(fds[1], len(line), 0) != line:
            if not writable:
                raise FileNotFoundError(path)
            os.ftruncate(fds[1], 0)
            os.write(fds[1], line)
        if writable:
            if os.fstat(fds[0]).st_size != file.size:
                os.ftruncate(fds[0], file.size)
            os.utime(fds[1])
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return Entry(path, file.size, fds[0], fds[1], hasher)


def _allocated(directory: str) -> int:
    """Bytes on the disk, of all files in a directory."""
    with os.scandir(directory) as files:
        return sum(each.stat(follow_symlinks=False).st_blocks * 512 for each in files)


def _cached(directory: str) -> Cached:
    url, version, size, used = "", "", 0, 0.0
    # Whatever somebody has written there.
    with suppress(OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        fd = _opened(os.path.join(directory, _PIECES), os.O_RDONLY)
        try:
            facts = json.loads(os.pread(fd, _FACTS_BYTES, 0).partition(b"\n")[0])
            used = os.fstat(fd).st_mtime
        finally:
            os.close(fd)
        url, version, size = str(facts["url"]), str(facts["version"]), max(int(facts["size"]), 0)
    with os.scandir(directory) as files:
        busy = any(_is_locked(each.path) for each in files)
    return Cached(directory, url, version, size, _allocated(directory), used, busy)


def _is_locked(path: str) -> bool:
    try:
        # NFS gives an exclusive lock only to those who may write.
        fd = _opened(path, os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)
