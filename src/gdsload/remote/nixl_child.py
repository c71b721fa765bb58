"""The child process that holds the NIXL agent of a reader, because NIXL may crash its process.

    parent ── slot's socket: {"peer", "kind", "remote": [[address, nbytes, device], ...]} ──► child
           ◄───── {"done": true}, {"unknown": true}, {"refused": text} or {"error": text} ───
                                     bytes: in the slot of the shared ring

`remote.nixl_reader` starts it. It serves one request of each slot at a time, and it ends with its
parent. It imports nothing of gdsload but the modules beside it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import selectors
import signal
import socket
import time
import uuid
from typing import Any

from gdsload.remote.messages import receive, send
from gdsload.remote.nixl_library import new_agent

_POLL_SECONDS = 0.00005  # between two looks at transfers that are under way
ENDED_WITH_PARENT = 0


def main(
    ring_fd: int,
    slot_bytes: int,
    socket_fds: list[int],
    lifeline_fd: int,
    plugin: str,
    parameters: dict[str, str],
) -> None:
    """Serves requests until the parent has ended or has closed a socket; never returns.

    Args:
        ring_fd: The shared memory: one slot after the other.
        slot_bytes: The size of a slot.
        socket_fds: One socket for each slot.
        lifeline_fd: The read end of a pipe whose write end only the parent has.
        plugin: The backend of NIXL.
        parameters: Its parameters.
    """
    _end_with_parent(lifeline_fd)
    agent = new_agent(f"gdsload-reader-{uuid.uuid4().hex}", plugin, parameters, progress=False)
    ring = mmap.mmap(ring_fd, slot_bytes * len(socket_fds))
    address = ctypes.addressof(ctypes.c_char.from_buffer(ring))
    agent.register_memory([(address, len(ring), 0, "")], "DRAM")
    sockets = [socket.socket(fileno=fd) for fd in socket_fds]
    for each in sockets:
        send(each, {"ready": True})
    try:
        _serve(agent, sockets, [address + number * slot_bytes for number in range(len(sockets))])
    except (EOFError, OSError):  # the parent has ended, or needs this process no longer
        os._exit(ENDED_WITH_PARENT)  # NIXL's own end may crash


def _end_with_parent(lifeline_fd: int) -> None:
    """Lets SIGIO, whose default is to end the process, come when the parent has ended.

    It works while this process is in a call of NIXL that hangs. PR_SET_PDEATHSIG would come as soon
    as the thread of the parent that started this process has ended.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    lifeline = select.poll()  # takes any descriptor; select() takes those below 1024
    lifeline.register(lifeline_fd)
    if lifeline.poll(0):  # it ended before
        os._exit(ENDED_WITH_PARENT)


def _serve(agent: Any, sockets: list[socket.socket], addresses: list[int]) -> None:
    ready = selectors.DefaultSelector()
    for number, each in enumerate(sockets):
        ready.register(each, selectors.EVENT_READ, number)
    peers: set[str] = set()
    active: dict[int, Any] = {}
    while True:
        requests = ready.select(0 if active else None)
        for key, _ in requests:
            number = key.data
            fields, metadata = receive(sockets[number])
            if metadata:
                try:
                    agent.add_remote_agent(metadata)
                except Exception as error:  # the classes of NIXL derive from Exception
                    send(sockets[number], {"refused": str(error) or type(error).__name__})
                    continue
                peers.add(fields["peer"])
            if fields["peer"] not in peers:
                send(sockets[number], {"unknown": True})
                continue
            try:
                active[number] = _begin(agent, addresses[number], fields)
            except Exception as error:
                send(sockets[number], {"error": str(error) or type(error).__name__})
        ended = [number for number in active if _has_ended(agent, active[number], sockets[number])]
        for number in ended:
            del active[number]
        if active and not ended and not requests:
            time.sleep(_POLL_SECONDS)


def _begin(agent: Any, address: int, fields: dict[str, Any]) -> Any:
    """Posts the read of one request; returns its handle."""
    local, at = [], address
    for _, nbytes, _ in fields["remote"]:
        local.append((at, nbytes, 0))
        at += nbytes
    handle = agent.initialize_xfer(
        "READ",
        agent.get_xfer_descs(local, "DRAM"),
        agent.get_xfer_descs([tuple(each) for each in fields["remote"]], fields["kind"]),
        fields["peer"],
    )
    agent.transfer(handle)
    return handle


def _has_ended(agent: Any, handle: Any, to: socket.socket) -> bool:
    """Whether a read has ended; then its result was sent."""
    try:
        state = agent.check_xfer_state(handle)
        if state == "PROC":
            return False
        if state == "DONE":
            handle.release()
            send(to, {"done": True})
            return True
        fault = f"the transfer ended as {state}"
    except (EOFError, OSError):
        raise
    except Exception as error:
        fault = str(error) or type(error).__name__
    send(to, {"error": fault})
    return True
