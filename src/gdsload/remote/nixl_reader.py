"""Reads memory of other machines through NIXL, which runs in a child process.

    peer's memory ──► NIXL in the child ──► slot of a ring in shared memory ──► view in the parent

NIXL may crash its process after a peer has died. Here this is the end of a child process and an
error of the reads that it had; the next read starts another child. Not responsible for what is
read, nor for the agreement with the peer (`remote.peer`).
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from gdsload.remote.messages import MessageError, receive, send
from gdsload.system import lifecycle
from gdsload.system.child_process import python_command

SLOTS = 8
PEER_SLOTS = SLOTS // 2  # of one peer: one that hangs leaves slots for the others
SLOT_BYTES = 8 << 20
START_SECONDS = 60.0  # until the child has imported NIXL, on a busy machine
READ_SECONDS = 15.0  # for one slot; four share a peer: below 2.2 MB/s for them it counts as dead
_END_SECONDS = 5.0  # for the end of a process that was killed
_REASON_BYTES = 2000  # of what the child wrote to stderr, for messages

_PROGRAM = """
import json, sys
from gdsload.remote.nixl_child import main
main(**json.loads(sys.argv[1]))
"""


class RemoteBytes(NamedTuple):
    """Contiguous bytes of a peer: `nbytes` at `address`; `device` is the number of the GPU."""

    address: int
    nbytes: int
    device: int


class ReaderFailed(Exception):
    """A read through NIXL failed. Its child process is not used again."""


class PeerRefused(ReaderFailed):
    """NIXL does not accept a peer. Nothing was read; the process goes on with other peers."""


class _Slot:
    """One slot of the ring, and the socket on which its reads are asked for."""

    def __init__(self, view: memoryview, to: socket.socket) -> None:
        self.view = view
        self.socket = to
        self.ready = False  # the child has said so


class NixlReader:
    """A child process with a NIXL agent, and the ring in shared memory that it reads into.

    Threads may use it together: each takes a slot. The reads of one peer have PEER_SLOTS at most.

    Args:
        plugin: The backend of NIXL: "UCX" or "LIBFABRIC", the one of the peer.
        parameters: Its parameters, as NIXL names them.

    Raises:
        OSError: The system has no memory, descriptors or processes left.
    """

    def __init__(self, plugin: str, parameters: dict[str, str]) -> None:
        self.broken = False
        self._free: queue.LifoQueue[_Slot] = queue.LifoQueue()
        self._slots_of_peer: dict[str, threading.Semaphore] = {}  # by peer
        # Memory: where the root is read-only, there may be no directory for temporary files.
        log_fd = os.memfd_create("gdsload-nixl-log", os.MFD_CLOEXEC)
        self._stderr = open(log_fd, "w+b")  # noqa: SIM115 - closed with the object
        self._slots: list[_Slot] = []
        self._lifeline = -1
        ours: list[int] = []  # descriptors that only the child needs
        try:
            ring_fd = os.memfd_create("gdsload-nixl", os.MFD_CLOEXEC)
            ours.append(ring_fd)
            os.ftruncate(ring_fd, SLOTS * SLOT_BYTES)
            ring = memoryview(mmap.mmap(ring_fd, SLOTS * SLOT_BYTES, prot=mmap.PROT_READ))
            sockets = []
            for number in range(SLOTS):
                here, there = socket.socketpair()
                ours.append(there.detach())
                sockets.append(ours[-1])
                view = ring[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]
                self._slots.append(_Slot(view, here))
            lifeline, self._lifeline = os.pipe()
            ours.append(lifeline)
            words = {
                "ring_fd": ring_fd,
                "slot_bytes": SLOT_BYTES,
                "socket_fds": sockets,
                "lifeline_fd": lifeline,
                "plugin": plugin,
                "parameters": parameters,
            }
            self._process = subprocess.Popen(
                python_command(_PROGRAM, json.dumps(words)),
                pass_fds=ours,
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C in a terminal is for the parent
                env={"NIXL_LOG_LEVEL": "WARN", "UCX_HANDLE_ERRORS": "none", **os.environ},
            )
        except BaseException:
            self._close_descriptors()
            raise
        finally:
            for fd in ours:
                os.close(fd)
        for slot in self._slots:
            self._free.put(slot)
        _alive.add(self)

    @contextmanager
    def read(
        self, peer: str, metadata: bytes, kind: str, remote: Sequence[RemoteBytes]
    ) -> Iterator[memoryview]:
        """Reads bytes of a peer's memory into one slot, one after the other.

        Args:
            peer: The name of the peer's agent.
            metadata: What NIXL needs to reach it.
            kind: "DRAM" or "VRAM", of all bytes.
            remote: Where they are; up to SLOT_BYTES together.

        Yields:
            The bytes; valid inside the `with` block.

        Raises:
            ReaderFailed: The read failed, or the child process has ended.
        """
        with self._slot_for(peer) as slot:
            if self.broken:
                raise ReaderFailed("the process that runs NIXL was given up")
            fields: dict[str, object] = {"peer": peer, "kind": kind, "remote": remote}
            try:
                self._ask(slot, fields, metadata)
            except PeerRefused:
                raise
            except BaseException:
                # The read may still be under way: nothing may write to this slot any more.
                self.give_up()
                raise
            yield slot.view[: sum(part.nbytes for part in remote)]

    @contextmanager
    def _slot_for(self, peer: str) -> Iterator[_Slot]:
        with self._slots_of_peer.setdefault(peer, threading.Semaphore(PEER_SLOTS)):
            slot = self._free.get()
            try:
                yield slot
            finally:
                self._free.put(slot)

    def _ask(self, slot: _Slot, fields: dict[str, object], metadata: bytes) -> None:
        try:
            if not slot.ready:
                slot.socket.settimeout(START_SECONDS)
                receive(slot.socket)
                slot.ready = True
            slot.socket.settimeout(READ_SECONDS)
            send(slot.socket, fields)
            answer, _ = receive(slot.socket)
            if "unknown" in answer:
                send(slot.socket, fields, metadata)
                answer, _ = receive(slot.socket)
        except TimeoutError:
            seconds = slot.socket.gettimeout() or 0.0
            raise ReaderFailed(f"NIXL has not answered for {seconds:.0f} s") from None
        except (OSError, EOFError, MessageError) as error:
            raise ReaderFailed(f"the process that runs NIXL has ended{self._reason()}") from error
        if "refused" in answer:
            raise PeerRefused(f"NIXL: {answer['refused']}")
        if "done" not in answer:
            raise ReaderFailed(f"NIXL: {answer.get('error', 'it does not know the peer')}")

    def _reason(self) -> str:
        """The exit code of the child and the end of what it has written."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _REASON_BYTES))
        written = self._stderr.read().decode(errors="replace").strip()
        lines = written.splitlines()
        last = f": {lines[-1].strip()}" if lines else ""
        return f" (exit code {self._process.returncode}){last}"

    def give_up(self) -> None:
        """Ends the child process at once. Reads that it has fail. May be called again."""
        self.broken = True
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)

    def __del__(self) -> None:
        if hasattr(self, "_process"):  # or __init__ has failed, and has closed what it had opened
            self.give_up()
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._stderr.close()
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)
        for slot in self._slots:
            slot.socket.close()

    def forget(self) -> None:
        """In a child of fork(): closes what would keep the other process alive."""
        self.broken = True
        self._process.returncode = 0  # it is not ours
        self._close_descriptors()


class SharedReader:
    """The reader that all users of one backend of NIXL in this process share.

    It starts when it is first asked for, and ends when its last user has left.
    """

    def __init__(self, plugin: str, parameters: dict[str, str]) -> None:
        self._plugin, self._parameters = plugin, parameters
        self._lock = lifecycle.fork_safe_lock(self)
        self._reader: NixlReader | None = None
        self._users = 0

    def enter(self) -> None:
        """Adds a user."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Removes a user. After the last one the child process ends; its reads fail."""
        with self._lock:
            self._users -= 1
            reader, self._reader = self._reader, None if not self._users else self._reader
            if not self._users and reader is not None:
                reader.give_up()

    def quiesce(self) -> None:
        """Ends the child process. It starts again when it is asked for."""
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.give_up()

    def current(self) -> NixlReader:
        """A reader that is not broken. Raises ReaderFailed if no process can be started, or if the
        last user has left."""
        with self._lock:
            if not self._users:
                raise ReaderFailed("the file was closed")
            if self._reader is None or self._reader.broken:
                try:
                    self._reader = NixlReader(self._plugin, self._parameters)
                except OSError as error:
                    raise ReaderFailed(
                        f"cannot start the process that runs NIXL: {error.strerror}"
                    ) from error
            return self._reader


def shared_reader(plugin: str, parameters: dict[str, str]) -> SharedReader:
    """The shared reader of one backend of NIXL with these parameters."""
    key = (plugin, *sorted(parameters.items()))
    with _lock:
        if key not in _shared:
            _shared[key] = SharedReader(plugin, parameters)
        return _shared[key]


def _forget_all() -> None:
    _shared.clear()
    for reader in list(_alive):
        reader.forget()


_lock = lifecycle.fork_safe_lock(sys.modules[__name__])
_shared: dict[tuple[object, ...], SharedReader] = {}
_alive: weakref.WeakSet[NixlReader] = weakref.WeakSet()
lifecycle.in_child(_forget_all)
