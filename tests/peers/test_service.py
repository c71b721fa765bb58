"""The metadata service of a source, and what its readers make of its answers."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

import gdsload
from forked import end_with, fork
from gdsload.errors import CheckpointUnreadable, GdsloadError
from gdsload.peers import service as service_module
from gdsload.peers.publication import MemoryLocation, Publication, PublishedTensor, file_of
from gdsload.peers.service import Served, Service
from gdsload.peers.tickets import Tickets
from gdsload.remote import peer
from gdsload.remote.messages import MessageError, receive, send
from gdsload.remote.nixl_reader import (
    SLOTS,
    NixlReader,
    ReaderFailed,
    RemoteBytes,
    SharedReader,
    shared_reader,
)
from gdsload.remote.peer import PeerDirectory, _segments
from threadends import await_most
from waiting import wait_for

FILES = {"config.json": b"{}", "../outside": b"x", "/absolute": b"x", "a/b": b"x", "..": b"x"}


@pytest.fixture
def service() -> Iterator[Service]:
    """A service of small files as version "v"."""
    service = Service("m", "127.0.0.1", 0, Tickets(1, 1, 1.0))
    service.publish(Served(Publication("v", {}, FILES), "agent", b"", "UCX", None))
    yield service
    service.close()


def test_names_that_lead_elsewhere_are_left_out(service: Service) -> None:
    directory = PeerDirectory(f"nixl://127.0.0.1:{service.port}/m")
    assert list(directory.names()) == ["config.json"]
    assert directory.read("config.json", 100) == b"{}"


@pytest.mark.parametrize("name", [[], {}, None, 3])
def test_name_that_is_no_text_is_no_file(
    service: Service, caplog: pytest.LogCaptureFixture, name: Any
) -> None:
    with (
        caplog.at_level(logging.ERROR),
        socket.create_connection(("127.0.0.1", service.port), 60) as to,
    ):
        send(to, {"op": "file", "version": "v", "name": name})
        assert receive(to)[0] == {"error": "name"}
    assert not caplog.records


@pytest.mark.parametrize("size", [float("inf"), float("nan"), "many", None])
def test_size_that_is_no_number_is_no_message(size: Any) -> None:
    class Connection:
        def ask(self, op: str, **fields: Any) -> tuple[dict[str, Any], bytes]:
            return {"version": "v", "agent": "a", "plugin": "UCX", "files": {"m": size}}, b""

    connection: Any = Connection()
    with pytest.raises(MessageError):
        PeerDirectory("nixl://host/m")._opened_model(connection)
    with pytest.raises(MessageError):
        _segments([[8, 92, "DRAM", 0, size]], bytes(8), 100)


def test_late_thread_of_a_closed_file_starts_no_process(service: Service) -> None:
    directory = PeerDirectory(f"nixl://127.0.0.1:{service.port}/m")
    file = directory.open("config.json")
    shared = directory.reader()
    file.close()
    with pytest.raises(ReaderFailed, match="closed"):
        directory.reader()
    with pytest.raises(ReaderFailed, match="closed"):
        shared.current()
    assert shared is shared_reader("UCX", {})


def test_search_path_may_have_entries_that_are_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/elsewhere")])
    NixlReader("UCX", {}).give_up()


def test_process_with_nixl_imports_nothing_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "path/gdsload/remote"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "nixl_child.py").write_text("def main(**words): raise SystemExit('started')")
    (tmp_path / "json.py").write_text("raise SystemExit('of the current directory')")
    monkeypatch.chdir(tmp_path)
    path = [entry for entry in sys.path if entry]
    monkeypatch.setattr(sys, "path", [str(tmp_path / "path"), *path])
    reader = NixlReader("UCX", {})
    with pytest.raises(ReaderFailed, match=r"started$"), reader.read("peer", b"", "DRAM", []):
        pass


def test_peer_that_hangs_leaves_slots_to_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, hang = threading.Event(), threading.Semaphore(0)

    def ask(_: NixlReader, slot: object, fields: dict[str, Any], metadata: bytes) -> None:
        if fields["peer"] == "hangs":
            hang.release()
            assert answers.wait(60)

    def read(peer: str) -> None:
        with reader.read(peer, b"", "DRAM", []):
            pass

    monkeypatch.setattr(NixlReader, "_ask", ask)
    reader = NixlReader("UCX", {})
    try:
        with ThreadPoolExecutor(SLOTS + 1) as pool:
            reads = [pool.submit(read, "hangs") for _ in range(SLOTS)]
            while hang.acquire(timeout=0.5):  # until no further one gets a slot
                pass
            try:
                pool.submit(read, "another").result(30)
            finally:
                answers.set()
            for each in reads:
                each.result(60)
    finally:
        reader.give_up()


def test_ticket_is_given_back_when_the_process_with_nixl_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source has started again: segments are asked for while the ticket is held."""

    def interrupt(shared: SharedReader) -> None:
        raise KeyboardInterrupt

    flat = torch.zeros(1 << 20, dtype=torch.uint8)
    location = MemoryLocation("DRAM", 0, flat.data_ptr(), flat.numel(), 0)
    served = file_of([PublishedTensor("a", "U8", (flat.numel(),), flat, location)])
    publication = Publication("v", {"m.safetensors": served}, {})
    service = Service("m", "127.0.0.1", 0, Tickets(1, 1, 600.0))
    try:
        service.publish(Served(publication, "before", b"", "UCX", None))
        monkeypatch.setattr(SharedReader, "current", lambda shared: None)
        file = PeerDirectory(f"nixl://127.0.0.1:{service.port}/m").open("m.safetensors")
        service.publish(Served(publication, "after", b"", "UCX", None))
        monkeypatch.setattr(SharedReader, "current", interrupt)
        with pytest.raises(KeyboardInterrupt):
            file.read(0, file.size)
        service.run(service.tickets.drained(), 60)
        file.close()
    finally:
        service.close()


def test_segments_of_a_peer_are_read_by_its_agent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind one address are two peers with the same files, and each connection is to another."""
    asked: list[tuple[str, int]] = []

    class Reader:
        @contextmanager
        def read(self, agent: str, _: bytes, kind: str, remote: list[RemoteBytes]) -> Any:
            asked.append((agent, remote[0].address))
            yield memoryview(bytes(sum(each.nbytes for each in remote)))

    flats = {name: torch.zeros(1 << 20, dtype=torch.uint8) for name in ("first", "second")}
    connect, ports = peer._Connection, list[int]()
    with ExitStack() as stack:
        for name, flat in flats.items():
            service = Service("m", "127.0.0.1", 0, Tickets(1, 1, 600.0))
            stack.callback(service.close)
            location = MemoryLocation("DRAM", 0, flat.data_ptr(), flat.numel(), 0)
            served = file_of([PublishedTensor("a", "U8", (flat.numel(),), flat, location)])
            publication = Publication("v", {"m.safetensors": served}, {})
            service.publish(Served(publication, name, b"", "UCX", None))
            ports.append(service.port)
        turns = cycle(ports)
        monkeypatch.setattr(peer, "_Connection", lambda _: connect(("127.0.0.1", next(turns))))
        monkeypatch.setattr(SharedReader, "current", lambda shared: Reader())
        directory = PeerDirectory("nixl://host/m")
        file = directory.open("m.safetensors")
        for _ in range(4):
            file.read(file.size - 100, 100)
            directory.drop_idle()
        file.close()
    end = (1 << 20) - 100
    expected = {(name, flat.data_ptr() + end) for name, flat in flats.items()}
    assert (len(asked), set(asked)) == (4, expected)


def test_source_that_tells_no_agent_with_a_file_is_read(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of an older version."""
    directory = PeerDirectory(f"nixl://127.0.0.1:{service.port}/m")
    asked = peer._Connection.ask

    def ask(connection: Any, op: str, **fields: Any) -> tuple[dict[str, Any], bytes]:
        answer, payload = asked(connection, op, **fields)
        if op == "file":
            del answer["agent"]
        return answer, payload

    monkeypatch.setattr(peer._Connection, "ask", ask)
    with directory.lent() as connection:
        assert directory.contents(connection, directory.source, "config.json").agent == "agent"


def publish_file(service: Service, agent: str) -> None:
    """Publishes version "v", with a file of which not all is in its head."""
    flat = torch.zeros(100, dtype=torch.uint8)
    location = MemoryLocation("DRAM", 0, flat.data_ptr(), flat.numel(), 0)
    served = file_of([PublishedTensor("a", "U8", (flat.numel(),), flat, location)])
    publication = Publication("v", {"m.safetensors": served}, {})
    service.publish(Served(publication, agent, b"", "UCX", None))


def read_contents(directory: PeerDirectory, connection: Any) -> None:
    source = directory.acquire(connection, "m.safetensors", 0, 2)
    connection.ask("release")
    directory.contents(connection, source, "m.safetensors")


def test_contents_of_a_source_that_has_started_again_are_dropped(service: Service) -> None:
    publish_file(service, "before")
    directory = PeerDirectory(f"nixl://127.0.0.1:{service.port}/m")
    with directory.lent() as connection:
        read_contents(directory, connection)
        publish_file(service, "after")
        read_contents(directory, connection)
    assert {agent for agent, _ in directory._contents} == {"after"}


def test_contents_of_another_peer_behind_the_same_address_are_kept(service: Service) -> None:
    other = Service("m", "127.0.0.1", 0, Tickets(1, 1, 1.0))
    try:
        publish_file(service, "one")
        publish_file(other, "two")
        directory = PeerDirectory(f"nixl://127.0.0.1:{service.port}/m")
        with directory.lent() as first:
            read_contents(directory, first)
            directory._address = "127.0.0.1", other.port
            with directory.lent() as second:
                read_contents(directory, second)
    finally:
        other.close()
    assert {agent for agent, _ in directory._contents} == {"one", "two"}


@pytest.mark.parametrize("port", [65536, -1])
def test_impossible_port_is_an_error_and_leaves_no_thread(port: int) -> None:
    before = threading.active_count()
    with pytest.raises(GdsloadError, match=f"cannot listen on 127.0.0.1:{port}"):
        Service("m", "127.0.0.1", port, Tickets(1, 1, 1.0))
    await_most(before)


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_impossible_host_is_an_error(host: str) -> None:
    with pytest.raises(GdsloadError, match=f"cannot listen on {host}:0"):
        Service("m", host, 0, Tickets(1, 1, 1.0))
    with pytest.raises(CheckpointUnreadable, match=f"{host} is no name of a host"):
        PeerDirectory(f"nixl://{host}:7700/m").names()


def test_child_of_fork_keeps_neither_the_port_nor_connections() -> None:
    service = Service("m", "127.0.0.1", 0, Tickets(1, 1, 1.0))
    with socket.create_connection(("127.0.0.1", service.port), 60) as to:
        send(to, {"op": "open", "name": "other"})
        receive(to)
        child = fork()
        if not child:
            end_with(signal.pause)
        try:
            service.close()
            with pytest.raises(EOFError):
                receive(to)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_close_ends_a_connection_whose_answer_is_taken_at_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service("m", "127.0.0.1", 0, Tickets(1, 1, 1.0))
    taken = service._loop.create_future()

    async def drain(_: asyncio.StreamWriter) -> None:
        await taken

    async def close() -> None:
        taken.set_result(None)
        await asyncio.sleep(0)  # `drain` has returned, which its caller may not know yet
        await service._close()

    monkeypatch.setattr(asyncio.StreamWriter, "drain", drain)
    with socket.create_connection(("127.0.0.1", service.port), 60) as to:
        send(to, {"op": "open", "name": "other"})
        receive(to)
        try:
            service.run(close(), 60.0)  # what it looks for has no end
        finally:
            monkeypatch.undo()
            to.close()
            service.close()


def test_connection_of_a_reader_that_does_not_take_its_answer_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "ANSWER_SECONDS", 0.2)
    answers, plain = threading.Event(), service_module._taken

    async def taken(writer: asyncio.StreamWriter) -> None:
        answers.set()
        await plain(writer)

    monkeypatch.setattr(service_module, "_taken", taken)
    service = Service("m", "127.0.0.1", 0, Tickets(1, 1, 1.0))
    large = {"large": bytes(64 << 20)}  # more than the system buffers
    service.publish(Served(Publication("v", {}, large), "agent", b"", "UCX", None))
    try:
        with socket.create_connection(("127.0.0.1", service.port), 60) as to:
            send(to, {"op": "file", "version": "v", "name": "large"})
            assert answers.wait(60)
            wait_for(lambda: not service.readers, "its connection goes on")
    finally:
        service.close()


def test_connection_of_a_reader_that_takes_its_answer_slowly_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look finds fewer bytes than the last one, though all of them take longer than one."""
    now = [64 << 20]

    class Transport:
        aborted = False

        def get_write_buffer_size(self) -> int:
            return now[0]

        def abort(self) -> None:
            self.aborted = True

    class Writer:
        transport = Transport()

        async def drain(self) -> None:
            for _ in range(40):
                now[0] -= 1
                await asyncio.sleep(0.05)
            now.append(0)  # from here on the reader takes nothing
            while not self.transport.aborted:
                await asyncio.sleep(0.01)

    monkeypatch.setattr(service_module, "ANSWER_SECONDS", 1.0)
    writer = Writer()
    asyncio.run(service_module._taken(writer))  # type: ignore[arg-type]
    assert len(now) == 2, "it was ended while the reader took bytes"


def test_service_without_descriptors_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "new_event_loop", refuse)
    with pytest.raises(GdsloadError, match="Too many open files"):
        Service("m", "127.0.0.1", 0, Tickets(1, 1, 1.0))


def test_readers_are_counted_while_one_connects(service: Service) -> None:
    class Name(str):
        """Another reader connects while this one is counted."""

        def __hash__(self) -> int:
            connections[len(connections)] = "late"
            return 1

    connections: Any = service.readers
    connections.update(a=Name("reader"), b="", c=Name("reader"))
    assert service.connected_readers() == 1
    connections.clear()


def test_call_that_does_not_end_in_time_is_an_error_and_is_cancelled(service: Service) -> None:
    ended = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    with pytest.raises(GdsloadError, match="has not answered for 1 s"):
        service.run(hang(), 0.9)
    assert ended.wait(60)


def test_empty_host_is_refused() -> None:
    with pytest.raises(GdsloadError, match="the host to listen on is empty"):
        gdsload.serve({}, host="")


@pytest.mark.parametrize("name", ["", "a/b", "a\n", "..", "a.json", "m.safetensors"])
def test_names_that_no_url_can_have_are_refused(name: str) -> None:
    with pytest.raises(GdsloadError, match="is not a name to serve a model by"):
        gdsload.serve({}, name=name)


@pytest.mark.parametrize("name", ["", "../a", "model.safetensors"])
def test_files_that_no_reader_takes_are_refused(name: str) -> None:
    with pytest.raises(GdsloadError, match="cannot serve a file of the name"):
        gdsload.serve({}, files={name: b""})
