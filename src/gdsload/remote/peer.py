"""Files in the memory of another process: `nixl://host:port/name`, served by `gdsload.serve`.

    metadata service ◄── TCP: files, versions, segments, tickets ── PeerDirectory, PeerFile
    memory of the peer ── NIXL ──► ring of `remote.nixl_reader` ──► chunks

Bytes are handed out only after the source has confirmed that they are still of the version that
was opened. Not responsible for serving (`gdsload.peers`).
"""

from __future__ import annotations

import errno
import os
import socket
import time
import uuid
from bisect import bisect_right
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from gdsload.errors import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    FileChanged,
    RemoteError,
)
from gdsload.remote.directory import RemoteDirectory, is_file_name
from gdsload.remote.file import RemoteFile
from gdsload.remote.messages import MessageError, receive, send
from gdsload.remote.nixl_reader import (
    SLOT_BYTES,
    ReaderFailed,
    RemoteBytes,
    SharedReader,
    shared_reader,
)
from gdsload.remote.urls import without_secrets
from gdsload.system.lifecycle import fork_safe_lock
from gdsload.system.parallel import note_progress

if TYPE_CHECKING:
    from typing_extensions import Buffer

DEFAULT_PORT = 7700
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 10.0  # of the metadata service, which answers at once or asks to wait
# For a ticket of a source that many read, and for bytes that the source does not have yet: without
# any bytes arriving there.
TURN_SECONDS = 120.0
# A read is tried again if another thread has given up the child process, if a connection was
# closed, or if the source has started again with the same version.
_ATTEMPTS = 3


class PeerSegment(NamedTuple):
    """Contiguous bytes of a file in a peer's memory.

    Attributes:
        offset: The first byte in the file.
        nbytes: The length.
        kind: "DRAM" or "VRAM".
        device: The number of the GPU, 0 for DRAM.
        address: Where the first byte is, in the address space of the peer.
    """

    offset: int
    nbytes: int
    kind: str
    device: int
    address: int


class _Source(NamedTuple):
    """What the peer answers when a model is opened."""

    version: str
    agent: str
    plugin: str
    metadata: bytes
    sizes: dict[str, int]
    digests: dict[str, str]


class _Contents(NamedTuple):
    """The first bytes of a file, and where the data lies in the memory of an agent."""

    agent: str
    head: bytes
    segments: list[PeerSegment]
    starts: list[int]  # of the segments, in the file


class _Refused(Exception):
    """The source has refused a request. The arguments are the reason, one word, and a text."""


class _Connection:
    """A connection to the metadata service. One thread uses it at a time.

    Attributes:
        source: What its peer answered, if that was asked for. Behind one address there may be
            several peers with the same files, each with its own memory.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self.source: _Source | None = None
        self._owes_answer = False
        self._holds_ticket = False
        try:
            self._socket = socket.create_connection(address, CONNECT_SECONDS)
        except UnicodeError as error:  # of the codec for names of hosts
            why = f"{address[0]} is no name of a host: {error}"
            raise socket.gaierror(socket.EAI_NONAME, why) from None
        self._socket.settimeout(ANSWER_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def idle(self) -> bool:
        """Whether the next user can have it: it owes no answer and holds no ticket."""
        return not self._owes_answer and not self._holds_ticket

    def ask(self, op: str, **fields: Any) -> tuple[dict[str, Any], bytes]:
        """Sends a request; returns the answer. Raises OSError, EOFError, MessageError, _Refused."""
        self._owes_answer = True
        self._holds_ticket = self._holds_ticket or op == "acquire"
        send(self._socket, {"op": op, **fields})
        answer, payload = receive(self._socket)
        self._owes_answer = False
        self._holds_ticket = self._holds_ticket and op != "release"
        if "error" in answer:
            raise _Refused(str(answer["error"]), str(answer.get("reason", "")))
        return answer, payload

    def close(self) -> None:
        self._socket.close()


class PeerDirectory(RemoteDirectory):
    """The files that a peer serves under one name, all of the version of the first request.

    Args:
        url: nixl://host:port/name. A query has parameters of NIXL's backend for this reader.

    Raises:
        CheckpointError: The URL is incomplete.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.path = without_secrets(url)
        self._name = unquote(parts.path.strip("/"))
        try:
            self._address = parts.hostname or "", parts.port or DEFAULT_PORT
        except ValueError:  # its text has what may be a part of a password
            raise CheckpointError(
                f"{self.path}: its port is no number up to 65535", path=self.path
            ) from None
        if not self._name:
            raise CheckpointError(
                f"{self.path}: the name is missing: nixl://host:port/name", path=self.path
            )
        self._parameters = dict(parse_qsl(parts.query))
        self._reader_name = uuid.uuid4().hex
        self._lock = fork_safe_lock(self)
        self._pid = os.getpid()
        self._idle: list[_Connection] = []
        self._open_files = 0
        self._source: _Source | None = None
        self._contents: dict[tuple[str, str], _Contents] = {}  # by agent and name
        self._shared: SharedReader | None = None

    # --- files ---------------------------------------------------------------------------------

    def names(self) -> Collection[str]:
        return frozenset(filter(is_file_name, self._opened().sizes))

    def has(self, name: str) -> bool:
        return name in self.names()

    def open(self, name: str) -> PeerFile:
        path = self.path_of(name)
        source = self._opened()
        if name not in source.sizes:
            raise CheckpointNotFound(
                f"No such file or directory: {path}", path=path, errno=errno.ENOENT
            )
        with self._checkpoint_errors(), self.lent() as connection:
            contents = self.contents(connection, connection.source or source, name)
        file = PeerFile(self, name, contents.head)
        if contents.segments:
            # NIXL is imported while the caller plans its reads. The first read tells of failures.
            with suppress(ReaderFailed):
                self.reader().current()
        return file

    def _opened(self) -> _Source:
        """What the peer answered first."""
        with self._lock:
            if self._source is None:
                with self._checkpoint_errors(), self.lent() as connection:
                    self._source = connection.source = self._opened_model(connection)
            return self._source

    @contextmanager
    def _checkpoint_errors(self) -> Iterator[None]:
        facts: dict[str, Any] = {"path": self.path}
        try:
            yield
        except _Refused as refusal:
            if refusal.args[0] == "failed":
                raise CheckpointUnreadable(
                    f"{self.path}: {_meaning(refusal)}", errno=errno.EIO, **facts
                ) from None
            if refusal.args[0] == "name":
                raise CheckpointNotFound(
                    f"No such file or directory: {self.path}: the peer serves another name",
                    errno=errno.ENOENT,
                    **facts,
                ) from None
            raise FileChanged(f"{self.path}: {_meaning(refusal)}", **facts) from None
        except (OSError, EOFError, MessageError) as error:
            code = getattr(error, "errno", None) or errno.EIO
            raise CheckpointUnreadable(
                f"{self.path}: the peer does not answer: {str(error) or type(error).__name__}",
                errno=code,
                **facts,
            ) from error

    # --- requests ------------------------------------------------------------------------------

    @contextmanager
    def lent(self) -> Iterator[_Connection]:
        """A connection. It is closed if it still holds a ticket then, which gives this back."""
        with self._lock:
            if self._pid != os.getpid():  # a connection belongs to the process that made it
                self._pid, self._idle = os.getpid(), []
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = _Connection(self._address)
        try:
            yield connection
        finally:
            with self._lock:
                kept = connection.idle and self._open_files and self._pid == os.getpid()
                if kept:
                    self._idle.append(connection)
            if not kept:
                connection.close()

    def drop_idle(self) -> None:
        """Closes connections that are not in use: the peer may have gone."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _opened_model(self, connection: _Connection) -> _Source:
        answer, metadata = connection.ask("open", name=self._name, reader=self._reader_name)
        try:
            sizes = {str(name): int(size) for name, size in answer["files"].items()}
            known = answer.get("digests", {}).items()  # older sources have none
            digests = {str(name): str(digest) for name, digest in known}
            version, agent, plugin = (str(answer[key]) for key in ("version", "agent", "plugin"))
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise MessageError(f"the peer sent something else: {error}") from None
        return _Source(version, agent, plugin, metadata, sizes, digests)

    def _patient(
        self, connection: _Connection, op: str, **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        """Asks again for as long as the answer is to wait. Raises as `_Connection.ask`, and
        RemoteError if the source has got no bytes for TURN_SECONDS."""
        arrived, deadline = 0, time.monotonic() + TURN_SECONDS
        while time.monotonic() < deadline:
            answer, payload = connection.ask(op, reader=self._reader_name, **fields)
            if "wait" not in answer:
                return answer, payload
            note_progress()
            if answer["wait"] != arrived:
                arrived, deadline = answer["wait"], time.monotonic() + TURN_SECONDS
        raise RemoteError(
            f"{self.path}: the peer is busy: it admitted no read within {TURN_SECONDS:.0f} s",
            path=self.path,
        )

    def acquire(self, connection: _Connection, name: str, offset: int, nbytes: int) -> _Source:
        """Takes a ticket for reads of a range, of the version that was opened first.

        Raises:
            _Refused: "changed", or "failed".
            RemoteError: No turn came in time.
        """
        version = self._opened().version
        source = connection.source or self._opened()
        wanted = {"version": version, "name": name, "offset": offset, "nbytes": nbytes}
        for _ in range(_ATTEMPTS):
            answer, _ = self._patient(connection, "acquire", **wanted)
            if answer.get("agent") == source.agent:
                connection.source = source
                return source
            # Another peer, or one that has started again: the same bytes at other places.
            connection.ask("release")
            source = self._opened_model(connection)
            # Of another peer behind the same address, other connections read.
            replaced = connection.source and connection.source.agent
            with self._lock:
                for key in [key for key in self._contents if key[0] == replaced]:
                    del self._contents[key]
            if source.version != version:
                raise _Refused("changed")
            connection.source = source
        raise RemoteError(f"{self.path}: the peer starts again and again", path=self.path)

    def contents(self, connection: _Connection, source: _Source, name: str) -> _Contents:
        """The head and the segments of a file of this source. If its peer is another one by now,
        they are those of that one, as `_Contents.agent` tells. Raises as `_patient`."""
        with self._lock:
            found = self._contents.get((source.agent, name))
        if found is None:
            wanted = {"version": source.version, "name": name}
            answer, head = self._patient(connection, "file", **wanted)
            segments = _segments(answer.get("segments"), head, source.sizes[name])
            agent = str(answer.get("agent", source.agent))  # older sources do not tell
            found = _Contents(agent, head, segments, [segment.offset for segment in segments])
            with self._lock:
                self._contents[agent, name] = found
        return found

    # --- open files ----------------------------------------------------------------------------

    @property
    def source(self) -> _Source:
        return self._opened()

    def reader(self) -> SharedReader:
        """The reader of this process, while a file is open. Raises ReaderFailed after that: nobody
        would end the process that a late read starts."""
        with self._lock:
            if not self._open_files:
                raise ReaderFailed("the file was closed")
            if self._shared is None:
                self._shared = shared_reader(self._opened().plugin, self._parameters)
                self._shared.enter()
            return self._shared

    def enter(self) -> None:
        with self._lock:
            self._open_files += 1

    def quiesce(self) -> None:
        """Closes the connections and ends the process with NIXL. Later reads start them again."""
        self.drop_idle()
        with self._lock:
            shared = self._shared
        if shared is not None:
            shared.quiesce()

    def leave(self) -> None:
        with self._lock:
            self._open_files -= 1
            last = not self._open_files
            shared, self._shared = self._shared, None if last else self._shared
        if last:
            self.drop_idle()
            if shared is not None:
                shared.leave()


class PeerFile(RemoteFile):
    """One file of a `PeerDirectory`. A small file is held whole, of others the first bytes."""

    scheme = "nixl"

    def __init__(self, directory: PeerDirectory, name: str, head: bytes) -> None:
        source = directory.source
        self.url = directory.path_of(name)
        self.size, self.version = source.sizes[name], source.version
        self.digest = source.digests.get(name, "")
        self._directory, self._name, self._head = directory, name, head
        self.head_bytes = len(head)
        self._changed = ""
        self._closed = False
        directory.enter()

    @property
    def io_path(self) -> str:
        return f"nixl/{self._directory.source.plugin.lower()}"

    def chunks(self, offset: int, length: int) -> Iterator[Buffer]:
        known = memoryview(self._head)[offset : offset + length]
        if known:
            yield known
            offset, length = offset + len(known), length - len(known)
        if not length:
            return
        facts: dict[str, Any] = {"offset": offset, "wanted": length}
        why = ""
        got = 0
        for _ in range(_ATTEMPTS):
            try:
                for chunk in self._read_once(offset, length):
                    got += len(chunk)
                    yield chunk
                return
            except _Refused as refusal:
                why = _meaning(refusal)
                if refusal.args[0] == "failed":
                    raise self.error(why, errno=errno.EIO, final=True, **facts) from None
                if refusal.args[0] != "expired":
                    self._changed = why
                    break
            except RemoteError:
                raise
            except TimeoutError:
                why = f"the peer has not answered for {ANSWER_SECONDS:.0f} s"
                break
            except ReaderFailed as error:
                why = str(error)
            except (OSError, EOFError, MessageError) as error:
                why = f"the connection failed: {str(error) or type(error).__name__}"
                self._directory.drop_idle()
            if got:
                return  # the caller asks for the rest
        raise self.error(why, final=bool(self._changed), **facts)

    def _read_once(self, offset: int, length: int) -> Iterator[memoryview]:
        """Reads a range once. A chunk is handed out when the source has confirmed its version."""
        directory = self._directory
        with directory.lent() as connection:
            source = directory.acquire(connection, self._name, offset, length)
            contents = directory.contents(connection, source, self._name)
            if contents.agent != source.agent:  # it published again after the ticket had expired
                raise _Refused("expired")
            reads = list(_split(contents, offset, length))
            for number, (kind, remote) in enumerate(reads):
                reader = directory.reader().current()
                with reader.read(source.agent, source.metadata, kind, remote) as view:
                    connection.ask("renew" if number + 1 < len(reads) else "release")
                    yield view

    def verify_unchanged(self) -> None:
        # All bytes that were handed out are of one version, whatever the peer has now.
        if self._changed:
            raise FileChanged(f"{self.url}: {self._changed}", path=self.url)

    def quiesce(self) -> None:
        self._directory.quiesce()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._directory.leave()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()


def _meaning(refusal: _Refused) -> str:
    """The text for a refusal of the source."""
    known = {
        "changed": "the source serves another version now, or none",
        "withdrawn": "the source serves nothing at present",
        "expired": "the source's ticket for this read has expired",
    }
    why, *texts = refusal.args
    if why == "failed":
        return f"the source did not get these bytes itself: {''.join(texts)}"
    return known.get(why, f"the source refused: {why!r}")


def _segments(found: Any, head: bytes, size: int) -> list[PeerSegment]:
    """The segments of a file, which follow each other up to its end. Raises MessageError."""
    segments: list[PeerSegment] = []
    try:
        end = found[0][0] if found else len(head)
        if not 0 <= end <= len(head):
            raise ValueError("they begin after the bytes that came with them")
        for offset, nbytes, kind, device, address in found:
            if offset != end or nbytes <= 0 or kind not in ("DRAM", "VRAM"):
                raise ValueError("they do not follow each other")
            segments.append(PeerSegment(offset, nbytes, kind, int(device), int(address)))
            end += nbytes
        if end != size:
            raise ValueError(f"they end at byte {end} of {size}")
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise MessageError(f"the segments that the peer sent are invalid: {error}") from None
    return segments


def _split(
    contents: _Contents, offset: int, length: int
) -> Iterator[tuple[str, list[RemoteBytes]]]:
    """The reads of a range: each fits into a slot, and is from one kind of memory."""
    number = bisect_right(contents.starts, offset) - 1
    kind, remote, room = "", list[RemoteBytes](), SLOT_BYTES
    while length:
        segment = contents.segments[number]
        skipped = offset - segment.offset
        nbytes = min(segment.nbytes - skipped, length, room)
        if segment.kind != kind or not nbytes:
            if remote:
                yield kind, remote
            kind, remote, room = segment.kind, [], SLOT_BYTES
            nbytes = min(segment.nbytes - skipped, length, room)
        remote.append(RemoteBytes(segment.address + skipped, nbytes, segment.device))
        offset, length, room = offset + nbytes, length - nbytes, room - nbytes
        number += skipped + nbytes == segment.nbytes
    if remote:
        yield kind, remote
