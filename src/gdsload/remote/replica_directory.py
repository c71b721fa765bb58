"""Directories that have the same files, as one directory.

    replicas("nixl://host/model", "s3://bucket/model", "/models/model")
      ─► "replicas://nixl://host/model|s3://bucket/model|/models/model" ─► ReplicaDirectory

All sources are asked at once. Those that do not answer soon after the first one are abandoned. Not
responsible for reading (`remote.replicas`).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TypeVar

from gdsload.errors import (
    CheckpointAccessError,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    FileChanged,
    GdsloadError,
    RemoteError,
)
from gdsload.remote.directory import RemoteDirectory, open_directory
from gdsload.remote.file import RemoteFile
from gdsload.remote.replicas import Opened, ReplicaFile, Source, Sources
from gdsload.remote.urls import is_url, shown_source, sources_of, without_secrets
from gdsload.system.lifecycle import fork_safe_lock
from gdsload.system.threads import condition, start_thread

Answer = TypeVar("Answer")

# How long sources are waited for after the first of them has answered. A server that is starved of
# connections may take seconds; one that is down takes much longer.
PATIENCE_SECONDS = 5.0
_SUFFIX = ".safetensors"
_CHUNK_BYTES = 1 << 20


class ReplicaDirectory(RemoteDirectory):
    """The files that several directories have in common."""

    def __init__(self, url: str) -> None:
        """Reads nothing. `url` is a result of `replicas`."""
        self.path = without_secrets(url)
        self._directories: dict[Source, RemoteDirectory] = {}
        sources: list[Source] = []
        for each in sources_of(url):
            source = Source(shown_source(each))
            sources.append(source)
            try:
                self._directories[source] = (
                    open_directory(each) if is_url(each) else LocalReplicaDirectory(each)
                )
            except GdsloadError as error:  # its client is not installed
                source.abandoned = str(error)
        self._sources = Sources(sources)
        self._names: Collection[str] | None = None

    def names(self) -> Collection[str]:
        """The shards of the first source that has any, and the other files of all sources."""
        if self._names is None:
            listings = self._answers(lambda directory: directory.names()).values()
            first = next((names for names in listings if any(map(_is_shard, names))), ())
            others = {name for names in listings for name in names if not _is_shard(name)}
            self._names = others.union(first)
        return self._names

    def has(self, name: str) -> bool:
        try:
            return name in self.names()
        except CheckpointError:  # web servers cannot list their files
            return any(self._answers(lambda directory: directory.has(name)).values())

    def open(self, name: str) -> RemoteFile:
        """Opens a shard at all sources. Other files may differ: the first source counts."""
        shard = _is_shard(name)
        files = self._answers(lambda directory: Opened.of(directory.open(name)), abandon=shard)
        if shard:
            return ReplicaFile(self.path_of(name), self._sources, files)
        (first, _), *others = files.values()
        for other in others:
            other.file.close()
        return first

    def read(self, name: str, limit: int) -> bytes:
        """Asks all sources for the whole file, and returns that of the first."""
        return next(iter(self._answers(lambda directory: directory.read(name, limit)).values()))

    def _answers(
        self, ask: Callable[[RemoteDirectory], Answer], *, abandon: bool = False
    ) -> dict[Source, Answer]:
        """The answers of the sources that are in use, in the user's order.

        Args:
            ask: Asks one of them.
            abandon: Whether a source that does not have the file is abandoned. One that is down
                always is: each further question would take seconds.

        Raises:
            CheckpointError: No source has an answer.
        """
        asked = {s: each for s, each in self._directories.items() if not s.abandoned}
        answers: dict[Source, Answer] = {}
        errors: dict[Source, BaseException] = {}
        lock, changed = condition()

        def run(source: Source) -> None:
            try:
                answer = ask(asked[source])
            except BaseException as error:  # a panic of native code is no Exception
                with lock:
                    errors[source] = error
                    changed.notify_all()
            else:
                with lock:
                    answers[source] = answer
                    changed.notify_all()

        def replied() -> bool:
            """Whether all sources have, or one that works: with an answer, or with an error of
            which the others may know better, such as that a web server cannot list."""
            return (
                bool(answers)
                or len(errors) == len(asked)
                or any(
                    not (_is_down(error) or isinstance(error, CheckpointNotFound))
                    for error in errors.values()
                )
            )

        for source in asked:
            if start_thread(partial(run, source), "gdsload-source") is None:
                run(source)
        with lock:
            changed.wait_for(replied)  # its callers limit this wait
            changed.wait_for(lambda: len(answers) + len(errors) == len(asked), PATIENCE_SECONDS)
            found = {source: answers[source] for source in asked if source in answers}
            failed = dict(errors)
        for source in asked:
            if source not in found and source not in failed:
                why = f"it had not answered {PATIENCE_SECONDS:g} s after another source"
                self._sources.abandon(source, why)
            elif source in failed and (abandon or (found and _is_down(failed[source]))):
                self._sources.abandon(source, str(failed[source]))
        if not found:
            raise self._no_answer(list(failed.values()))
        return found

    def _no_answer(self, errors: Sequence[BaseException]) -> CheckpointError:
        reasons = [source.abandoned for source in self._sources.all if source.abandoned]
        texts = dict.fromkeys([*reasons, *map(str, errors)])
        # What a source that works does not have is missing, whatever others cannot tell.
        told = [error for error in errors if not _is_down(error)]
        missing = told and all(isinstance(error, CheckpointNotFound) for error in told)
        kind = CheckpointNotFound if missing else CheckpointUnreadable
        code = errno.ENOENT if kind is CheckpointNotFound else errno.EIO
        return kind(f"{self.path}: no source: {'; '.join(texts)}", path=self.path, errno=code)


def _is_down(error: BaseException) -> bool:
    """Whether a source could not be reached, and is not only without the file or the right."""
    unreadable = isinstance(error, (CheckpointUnreadable, RemoteError))
    return unreadable and not isinstance(error, (CheckpointNotFound, CheckpointAccessError))


def _is_shard(name: str) -> bool:
    return name.endswith(_SUFFIX)


class LocalReplicaDirectory(RemoteDirectory):
    """A directory of this machine, as one of several sources."""

    def __init__(self, path: str) -> None:
        self.path = path

    def names(self) -> Collection[str]:
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if not entry.is_dir()]
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def has(self, name: str) -> bool:
        return os.path.lexists(os.path.join(self.path, name))

    def open(self, name: str) -> RemoteFile:
        path = os.path.join(self.path, name)
        try:
            return LocalFile(path)
        except OSError as error:
            raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> CheckpointUnreadable:
    kind: type[CheckpointUnreadable] = CheckpointUnreadable
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        kind = CheckpointNotFound
    elif error.errno in (errno.EACCES, errno.EPERM):
        kind = CheckpointAccessError
    return kind(f"{path}: it cannot be read: {error.strerror}", path=path, errno=error.errno)


class LocalFile(RemoteFile):
    """A file of this machine, as one of several sources."""

    backend = "replicas"
    pinned = False
    scheme = "file"

    def __init__(self, path: str) -> None:
        """Opens it. Raises OSError."""
        self.url, self._fd, self._closed = path, -1, False
        self._opening = fork_safe_lock(self, "_opening")
        self._open()
        self._status = os.fstat(self._fd)
        self.size = self._status.st_size
        self.version = "-".join(map(str, (*_content_of(self._status), self._status.st_ctime_ns)))

    def _open(self) -> None:
        if not stat.S_ISREG(os.stat(self.url).st_mode):
            raise OSError(errno.EINVAL, "this is not a regular file")
        self._fd = os.open(self.url, os.O_RDONLY | os.O_CLOEXEC)

    def _opened(self) -> int:
        """The descriptor. After `quiesce` it is opened again. Raises RemoteError."""
        with self._opening:
            if self._closed:
                raise self.error("it is closed", errno=errno.EBADF, final=True)
            if self._fd < 0:
                try:
                    self._open()
                    changed = self._was_changed()
                except OSError as error:
                    raise self.error(str(error.strerror), errno=error.errno) from error
                if changed:
                    self.quiesce()
                    raise self.error("it was replaced by another file", final=True)
            return self._fd

    def _was_changed(self) -> bool:
        status = os.fstat(self._fd)
        # Deleting the file moves its ctime as well, and changes no byte.
        rewritten = status.st_nlink > 0 and status.st_ctime_ns != self._status.st_ctime_ns
        return rewritten or _content_of(status) != _content_of(self._status)

    @property
    def io_path(self) -> str:
        return "replicas/file"

    def chunks(self, offset: int, length: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(length, _CHUNK_BYTES)))
        end = offset + length
        while offset < end:
            fd = self._opened()  # it may be closed meanwhile
            try:
                got = os.preadv(fd, [buffer[: end - offset]], offset)
            except OSError as error:
                raise self.error(str(error.strerror), errno=error.errno) from error
            if not got:
                raise self.error(f"it ended at byte {offset}", errno=errno.EIO, final=True)
            yield buffer[:got]
            offset += got

    def verify_unchanged(self) -> None:
        if self._fd < 0 and not self._closed:
            return  # nothing was read since `quiesce`; the next read compares
        try:
            changed = self._was_changed()
        except OSError as error:
            raise self.error(str(error.strerror), errno=error.errno) from error
        if changed:
            raise FileChanged(f"{self.url}: the file changed while it was read", path=self.url)

    def quiesce(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        self._closed = True
        self.quiesce()

    def __del__(self) -> None:
        self.close()


def _content_of(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
