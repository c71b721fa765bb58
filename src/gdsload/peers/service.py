"""The metadata service of a source: what it serves, how NIXL reaches it, and tickets for reads.

    open     ──► version, agent, sizes of the files; payload: metadata of the agent
    file     ──► segments of one file; payload: its first bytes, or all of a small file
    acquire  ──► a ticket for reads of a range of a file   renew, release ──► whether it was valid

The answer of `file` and `acquire` is "wait" if the bytes have not arrived here yet, or if it is not
this reader's turn; its value is the number of bytes that have arrived. One connection holds at most
one ticket, and a closed one gives it back. All connections are served by one thread with an event
loop. Weights do not pass through here.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple

from gdsload.errors import GdsloadError
from gdsload.peers.arrivals import Arrivals
from gdsload.peers.publication import Publication
from gdsload.peers.tickets import Ticket, Tickets
from gdsload.remote.file import HEAD_BYTES
from gdsload.remote.messages import LENGTHS, MessageError, lengths, packed, parsed
from gdsload.system import lifecycle
from gdsload.system.threads import start_thread

REQUEST_LIMIT_BYTES = 16 << 10
CONNECTIONS = 4096  # at the same time; further ones are closed at once
TURN_SECONDS = 2.0  # a reader that gets no ticket in this time is told to ask again
ANSWER_SECONDS = 30.0  # for a reader to take an answer
_RUN_SECONDS = 30.0  # on a busy machine
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, probes


class Served(NamedTuple):
    """One publication, and how NIXL reaches its memory. `arrivals` is None if all bytes of it are
    there."""

    publication: Publication
    agent: str
    metadata: bytes
    plugin: str
    arrivals: Arrivals | None


class Service:
    """Answers readers, in a thread of its own.

    Args:
        name: The name of the model.
        host: The address to listen on.
        port: The port; 0 for any that is free.
        tickets: The bound on reads in flight.

    Raises:
        GdsloadError: It cannot listen there, or `host` is empty.
    """

    def __init__(self, name: str, host: str, port: int, tickets: Tickets) -> None:
        if not host:  # all interfaces, by one port for IPv4 and another one for IPv6
            raise GdsloadError('the host to listen on is empty: "0.0.0.0" is all interfaces')
        self.name, self.tickets = name, tickets
        self.readers: dict[asyncio.Task[None], str] = {}  # the connections
        self._writers: set[asyncio.StreamWriter] = set()  # of the connections
        self._served: Served | None = None
        try:
            self._loop = asyncio.new_event_loop()
            self._thread = start_thread(self._loop.run_forever, "gdsload-serve")
            try:
                if self._thread is None:
                    raise RuntimeError("no thread can be started")
                self._server = self.run(asyncio.start_server(self._connection, host, port))
            except BaseException:
                self._end_loop()
                raise
        except (OSError, OverflowError, RuntimeError, UnicodeError) as error:
            # OverflowError: no port has this number. RuntimeError: the system has no thread left.
            # UnicodeError: no host has this name.
            why = getattr(error, "strerror", None) or str(error)
            raise GdsloadError(f"cannot listen on {host}:{port}: {why}") from error
        self.port: int = self._server.sockets[0].getsockname()[1]
        _alive.add(self)

    def run(self, coroutine: Any, seconds: float = _RUN_SECONDS) -> Any:
        """Runs a coroutine in the event loop; returns its result.

        Raises:
            GdsloadError: It has not ended in time.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            if futures.wait([future], seconds).not_done:
                raise GdsloadError(f"the metadata service has not answered for {seconds:.0f} s")
            return future.result()
        finally:
            future.cancel()  # if it has not ended

    def connected_readers(self) -> int:
        """The number of readers that are connected. For other threads than that of the loop."""
        return len(set(self.readers.copy().values()) - {""})

    def publish(self, served: Served) -> None:
        """Serves this from now on."""
        self._served = served

    def tell(self, function: Callable[..., object], *values: Any) -> None:
        """Calls a function in the event loop, some time from now."""
        self._loop.call_soon_threadsafe(function, *values)

    def withdraw(self) -> None:
        """Serves nothing from now on, and waits until no ticket is valid: a lease at most."""
        self._served = None
        self.run(self.tickets.drained(), self.tickets.lease_seconds + _RUN_SECONDS)

    def close(self) -> None:
        """Closes all connections and ends the thread. Raises GdsloadError if it hangs."""
        _alive.discard(self)
        try:
            self.run(self._close())
        finally:
            self._end_loop()

    def forget(self) -> None:
        """In a child of fork(): closes what would keep the port and the connections open."""
        writers = [writer for writer in self._writers if not writer.is_closing()]
        connected = [writer.get_extra_info("socket") for writer in writers]
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for each in (*self._server.sockets, *connected):
            # Not closed: asyncio, which ends later, would close another file of the same number.
            os.dup2(null, each.fileno(), inheritable=False)
        os.close(null)

    async def _close(self) -> None:
        self._server.close()
        connections = list(self.readers)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _end_loop(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_RUN_SECONDS)
            if self._thread.is_alive():
                return
        self._loop.close()

    # --- in the event loop ---------------------------------------------------------------------

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self.readers) >= CONNECTIONS:
            writer.close()
            return
        self.readers[task] = ""
        self._writers.add(writer)
        connection = _ReaderConnection(self, task)
        try:
            _keep_alive(writer.get_extra_info("socket"))
            while True:
                head = await reader.readexactly(LENGTHS.size)
                text_bytes, _ = lengths(head, REQUEST_LIMIT_BYTES, 0)
                fields, payload = await connection.answer(
                    parsed(await reader.readexactly(text_bytes))
                )
                writer.write(packed(fields, payload))
                await _taken(writer)
        except (OSError, EOFError, MessageError, asyncio.CancelledError):
            pass  # the reader has gone, sends no messages, or this is the end
        finally:
            del self.readers[task]
            connection.give_back()
            self._writers.discard(writer)
            writer.close()

    def current(self, version: object) -> Served | None:
        """What is served, if it is that version."""
        served = self._served
        return served if served is not None and served.publication.version == version else None


async def _taken(writer: asyncio.StreamWriter) -> None:
    """Waits until the reader has taken an answer. If it takes nothing of it for too long, the
    connection ends."""
    # Not by asyncio.wait_for: before Python 3.12 it may swallow a cancellation.
    loop, transport = asyncio.get_running_loop(), writer.transport
    left = transport.get_write_buffer_size()
    late = loop.call_later(ANSWER_SECONDS, lambda: look())

    def look() -> None:
        nonlocal left, late
        before, left = left, transport.get_write_buffer_size()
        if left < before:
            late = loop.call_later(ANSWER_SECONDS, look)
        else:
            transport.abort()

    try:
        await writer.drain()
    finally:
        late.cancel()


def _keep_alive(connected: socket.socket) -> None:
    """Lets the connection end when the machine of the reader has gone."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class _ReaderConnection:
    """The requests of one connection, and its ticket."""

    def __init__(self, service: Service, task: asyncio.Task[None]) -> None:
        self._service, self._task = service, task
        self._ticket: Ticket | None = None
        self._version: object = None  # of the ticket

    def give_back(self) -> bool:
        ticket, self._ticket = self._ticket, None
        return ticket is not None and self._service.tickets.give_back(ticket)

    async def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """The answer to one request: its fields and its payload."""
        operation = request.get("op")
        if operation == "open":
            return self._open(request)
        if operation == "file":
            return await self._file(request)
        if operation == "acquire":
            return await self._acquire(request), b""
        if operation == "renew":
            held = self._ticket is not None and self._service.tickets.renew(self._ticket)
            return self._confirmed(held), b""
        if operation == "release":
            return self._confirmed(self.give_back()), b""
        raise MessageError(f"no such operation: {operation!r}")

    def _open(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        if request.get("name") != self._service.name:
            return {"error": "name", "name": self._service.name}, b""
        served = self._service._served
        if served is None:
            return {"error": "withdrawn"}, b""
        facts = {
            "version": served.publication.version,
            "agent": served.agent,
            "plugin": served.plugin,
            "files": served.publication.sizes,
            "digests": dict(served.publication.digests),
        }
        return facts, served.metadata

    async def _file(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        served, name = self._service.current(request.get("version")), str(request.get("name"))
        if served is None:
            return {"error": "changed"}, b""
        publication = served.publication
        if name in publication.small_files:
            return {"segments": [], "agent": served.agent}, publication.small_files[name]
        file = publication.tensor_files.get(name)
        if file is None:
            return {"error": "name"}, b""
        missing = await _missing(served, name, 0, len(file.header))
        if missing:
            return missing, b""
        first = max(len(file.header), min(HEAD_BYTES, file.size))
        has_more = served.arrivals is None or served.arrivals.has(name, 0, first)
        head = file.head() if has_more else file.header
        return {"segments": file.segments(), "agent": served.agent}, head

    async def _acquire(self, request: dict[str, Any]) -> dict[str, Any]:
        self.give_back()
        self._version = request.get("version")
        served = self._service.current(self._version)
        if served is None:
            return {"error": "changed"}
        name, offset, nbytes = (request.get(key) for key in ("name", "offset", "nbytes"))
        file = served.publication.tensor_files.get(str(name))
        if file is None or not (
            isinstance(offset, int)
            and isinstance(nbytes, int)
            and 0 <= offset < offset + nbytes <= file.size
        ):
            raise MessageError(f"no such range: {nbytes!r} bytes at {offset!r} of {name!r}")
        if missing := await _missing(served, str(name), offset, nbytes):
            return missing
        reader = self._service.readers[self._task] = str(request.get("reader"))[:64]
        ticket = await self._service.tickets.take(reader, TURN_SECONDS)
        if ticket is None:
            return _wait(served)
        self._ticket = ticket
        served = self._service.current(self._version)
        if served is None:
            self.give_back()
            return {"error": "changed"}
        return {"agent": served.agent}

    def _confirmed(self, held: bool) -> dict[str, Any]:
        """Whether bytes that were read with the ticket are of its version."""
        if self._service.current(self._version) is None:
            return {"error": "changed"}
        return {} if held else {"error": "expired"}


def _wait(served: Served) -> dict[str, Any]:
    return {"wait": 0 if served.arrivals is None else served.arrivals.nbytes}


async def _missing(served: Served, file: str, offset: int, nbytes: int) -> dict[str, Any]:
    """Waits until a range has arrived. The answer to the reader if it has not; else {}."""
    arrivals = served.arrivals
    if arrivals is None or await arrivals.wait_for(file, offset, nbytes, TURN_SECONDS):
        return {}
    if arrivals.failure:
        return {"error": "failed", "reason": arrivals.failure}
    return _wait(served)


def _forget_all() -> None:
    for service in list(_alive):
        service.forget()


_alive: weakref.WeakSet[Service] = weakref.WeakSet()
lifecycle.in_child(_forget_all)
