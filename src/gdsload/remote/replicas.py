"""One file that several sources have: peers, object stores, directories of this machine.

    chunks(range) ─► the fastest source that has a free place ─► its chunks ─► caller
                          ▲ rates, requests                       │
                          └── another one, if it fails or stalls ◄┘

Several sources work at the same time, and each byte is asked of one. A source that fails, stalls or
has another version is abandoned, and the reason is in the report. Not responsible for finding the
files of a checkpoint.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from gdsload.errors import GdsloadError, ReadError, RemoteError
from gdsload.remote.file import RemoteFile, SourceFacts
from gdsload.system.lifecycle import fork_safe_lock
from gdsload.system.threads import condition, start_thread

# A source that has sent nothing for so long is abandoned if another one is left. A request of an
# object store that is repeated after a time limit of the client may take longer: then another
# source is faster anyway.
SILENT_SECONDS = 10.0
# Ranges that a source has at the same time until its rate is known.
_TRIALS = 2
# A source whose requests take this many times longer than those of the fastest one is not asked, so
# that nobody waits for its last request.
_TOO_SLOW = 4.0
_QUIET_SECONDS = 0.5  # a silence is no sign of a slow source before
_WAKE_SECONDS = 0.1  # a source that has fallen silent is noticed after this time
_LENGTH_BYTES = 8  # of a header, in front of it
_MOST_HEADER_BYTES = 256 << 20


class Source:
    """One place that has the files.

    Attributes:
        name: For messages and the report: a URL without credentials, or a directory.
        most_requests: Requests at the same time, at most.
        used: Requests under way.
        rate: Bytes per second of one request; 0.0 if unknown.
        abandoned: Why it is not used any more, or "".
    """

    def __init__(self, name: str, most_requests: int = 16) -> None:
        self.name, self.most_requests = name, most_requests
        self.used, self.rate, self.abandoned = 0, 0.0, ""
        self.heard = time.monotonic()  # when the last bytes came
        self.started = 0.0  # when the first bytes came; 0.0: never

    def seconds_for(self, nbytes: int) -> float:
        """The expected time of a request; 0.0 if unknown."""
        expected = nbytes / self.rate if self.rate else 0.0
        silent = time.monotonic() - self.heard - _QUIET_SECONDS if self.used else 0.0
        return max(expected, silent)


class Sources:
    """The sources of one checkpoint: the rate and the requests of each, and why some are abandoned.

    The files of a checkpoint share them.
    """

    def __init__(self, sources: Sequence[Source], silent_seconds: float = SILENT_SECONDS) -> None:
        self.all = list(sources)
        self.silent_seconds = silent_seconds
        self._lock, self._changed = condition()

    def abandon(self, source: Source, why: str) -> None:
        """Uses it no more. The first reason counts."""
        with self._lock:
            source.abandoned = source.abandoned or why
            self._changed.notify_all()

    @property
    def refusals(self) -> dict[str, str]:
        """Why sources were abandoned, by name."""
        return {source.name: source.abandoned for source in self.all if source.abandoned}

    @property
    def rates(self) -> dict[str, float]:
        """Bytes per second of one request, by name."""
        return {source.name: source.rate for source in self.all if source.rate}

    def take(self, candidates: Sequence[Source], nbytes: int) -> Source | None:
        """Takes a place of the best of these sources, and waits for one if it must. None if all of
        them were abandoned."""
        with self._lock:
            while True:
                usable = [source for source in candidates if not source.abandoned]
                if not usable:
                    return None
                seconds = {source: source.seconds_for(nbytes) for source in usable}
                known = [took for took in seconds.values() if took]
                most = _TOO_SLOW * min(known, default=0.0)
                free = [
                    source
                    for source in usable
                    if source.used < (source.most_requests if source.rate else _TRIALS)
                    and seconds[source] <= most
                ]
                if free:
                    best = min(free, key=seconds.__getitem__)
                    if not best.used:
                        best.heard = time.monotonic()
                    best.used += 1
                    return best
                self._changed.wait(_WAKE_SECONDS)

    def give_back(self, source: Source, nbytes: int, asked: float) -> None:
        """Gives a place back, after a request that began at `asked` and brought `nbytes`.

        Requests that began before the first bytes of the source do not count for its rate: they
        have waited for connections, or for the process of NIXL.
        """
        seconds = time.monotonic() - asked
        with self._lock:
            source.used -= 1
            if nbytes and seconds > 0 and 0 < source.started <= asked:
                rate = nbytes / seconds
                source.rate = (source.rate + rate) / 2 if source.rate else rate
            self._changed.notify_all()


class Opened(NamedTuple):
    """A file of one source, and its header with the length in front of it. Of a file that is no
    safetensors file, these are the first bytes."""

    file: RemoteFile
    header: bytes

    @staticmethod
    def of(file: RemoteFile) -> Opened:
        """Reads the header. Raises RemoteError."""
        head = file.read(0, min(_LENGTH_BYTES, file.size)) if file.size else b""
        nbytes = int.from_bytes(head, "little")
        if 0 < nbytes <= min(file.size - len(head), _MOST_HEADER_BYTES):
            head += file.read(len(head), nbytes)
        return Opened(file, head)


class ReplicaFile(RemoteFile):
    """One file of several sources. All of them have the same size and header, and the same digest
    if they tell one of the same algorithm."""

    backend = "replicas"
    scheme = "replicas"

    def __init__(self, url: str, sources: Sources, files: Mapping[Source, Opened]) -> None:
        """Compares the files with the first of them, and abandons sources that differ.

        Args:
            url: For messages.
            sources: The sources of the checkpoint.
            files: The file of each source, in the order in which the user named the sources.
        """
        self.url = url
        self._sources = sources
        self._files = {source: each.file for source, each in files.items()}
        self.head_bytes = min(file.head_bytes for file in self._files.values())
        self._paths: Counter[str] = Counter()
        self._failovers: Counter[str] = Counter()
        self._lock = fork_safe_lock(self)
        self._closed = False
        first, self._header = next(iter(files.values()))
        self.size, self.version, self.query = first.size, first.version, first.query
        self._digests: dict[str, str] = {}  # by algorithm
        for source, (file, header) in files.items():
            if why := self._difference(file, header):
                del self._files[source]
                sources.abandon(source, f"{file.url}: it differs from {first.url}: {why}")

    def _difference(self, file: RemoteFile, header: bytes) -> str:
        if file.size != self.size:
            return f"{file.size} bytes instead of {self.size}"
        if header != self._header:
            return "another header"
        algorithm = file.digest.partition(":")[0]
        if self._digests.setdefault(algorithm, file.digest) != file.digest:
            return "another digest"
        self.digest = self.digest or file.digest
        return ""

    def _is_last(self, source: Source) -> bool:
        """Whether somebody still waits for this file, and no other source of it is left."""
        return not self._closed and all(
            other.abandoned for other in self._files if other is not source
        )

    def _nobody(self) -> RemoteError:
        reasons = "; ".join(f"{name}: {why}" for name, why in self._sources.refusals.items())
        return self.error(f"all sources failed: {reasons}", errno=errno.EIO, final=True)

    def chunks(self, offset: int, length: int) -> Iterator[Any]:
        done, failed = 0, ""  # the source whose bytes another one has to send
        while done < length:
            source = self._sources.take(list(self._files), length - done)
            if source is None:
                raise self._nobody()
            ended, file, got, asked = False, self._files[source], 0, time.monotonic()
            stream = Stream(file, offset + done, length - done, partial(self._is_last, source))
            try:
                while done < length:
                    chunk = stream.next(self._sources.silent_seconds)
                    if chunk is None:
                        break
                    nbytes = memoryview(chunk).nbytes
                    if nbytes > length - done:
                        raise file.error("it sent more bytes than were asked for")
                    source.heard = time.monotonic()
                    source.started = source.started or source.heard
                    got, done = got + nbytes, done + nbytes
                    yield chunk
                if not got:
                    raise file.error("it sent nothing")
                ended = True
            except Exception as error:
                self._sources.abandon(source, _text_of(error))
            finally:
                stream.close()
                self._sources.give_back(source, got, asked)
                with self._lock:
                    self._paths[file.io_path] += got
                    if got and failed not in ("", source.name):
                        self._failovers[f"{failed} -> {source.name}"] += got
            if got or not failed:  # one that has sent nothing has taken nothing over
                failed = "" if ended else source.name

    def facts(self) -> SourceFacts:
        with self._lock:
            paths, failovers = dict(self._paths), dict(self._failovers)
        return SourceFacts(paths, failovers, self._sources.refusals, self._sources.rates)

    def verify_unchanged(self) -> None:
        for source, file in self._files.items():
            if not (source.abandoned and file.pinned):
                file.verify_unchanged()

    def quiesce(self) -> None:
        for file in self._files.values():
            file.quiesce()

    def close(self) -> None:
        self._closed = True
        for file in self._files.values():
            file.close()


def _text_of(error: BaseException) -> str:
    known = isinstance(error, (GdsloadError, OSError))
    return str(error) if known else f"{type(error).__name__}: {error}"


class Stream:
    """The chunks of a range, read in a thread, so that a source that stalls can be abandoned."""

    def __init__(
        self, file: RemoteFile, offset: int, length: int, is_last: Callable[[], bool]
    ) -> None:
        """`is_last`: whether no other source is left. Then the limits are those of the load."""
        self._file, self._range, self._is_last = file, (offset, length), is_last
        self._lock, self._changed = condition()
        self._chunk: Any = None
        self._wanted = self._ended = self._closed = False
        self._error: BaseException | None = None
        # If no thread can be started, the caller reads, and waits as long as the source does.
        self._own: Iterator[Any] | None = None
        if start_thread(self._run, "gdsload-source") is None:
            self._own = file.chunks(offset, length)

    def next(self, seconds: float) -> Any:
        """The next chunk, None at the end. It is valid until the next call.

        Raises:
            ReadError: Nothing came for so many seconds, and another source is left.
            BaseException: The error of the source.
        """
        if self._own is not None:
            return next(self._own, None)
        with self._lock:
            self._chunk, self._wanted = None, True
            self._changed.notify_all()
            while not self._changed.wait_for(self._is_answered, seconds):
                if self._is_last():
                    continue
                url = self._file.url
                raise ReadError(
                    f"{url}: it has sent nothing for {seconds:g} s",
                    path=url,
                    errno=errno.ETIMEDOUT,
                )
            if self._chunk is None and self._error is not None:
                raise self._error
            return self._chunk

    def _is_answered(self) -> bool:
        return self._chunk is not None or self._ended

    def close(self) -> None:
        """Ends the thread, at its next chunk."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            for chunk in self._file.chunks(*self._range):
                with self._lock:
                    self._changed.wait_for(self._is_asked)
                    if self._closed:
                        return
                    self._chunk, self._wanted = chunk, False
                    self._changed.notify_all()
                    # The source may reuse the memory of the chunk when it is asked for the next.
                    self._changed.wait_for(self._is_asked)
                    if self._closed:
                        return
        except Exception as error:
            self._error = error
        except BaseException as error:  # a panic of native code: another source may work
            self._error = self._file.error(_text_of(error))
        finally:
            with self._lock:
                self._ended = True
                self._changed.notify_all()

    def _is_asked(self) -> bool:
        return self._wanted or self._closed
