"""The loads of malformed.py: a process that forks a child for each case and reports how it ended.

    malformed.py ── case ──►  server: torch imported, in the environment of the loader
                 ◄─ Ended ──    └─ fork ─► open the loader ─► load ─► digests of the tensors

Where a system call is to fail, or a file to change at one, the child first loads without that:
threads and engines of the loader exist then. The server is the supervisor of its system calls
(injector.py).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import injector, loaders
from .arms import KINDS, parse, versions
from .loaded import Load, Wanted

LIMIT_SECONDS = 20.0  # of a case, the import of the loader included
SPARE_BYTES = 6 << 30  # of address space that a load may use: no case fills the machine's memory
TEXT_CHARACTERS = 600
MESSAGE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1


class Ended(NamedTuple):
    """How a load ended.

    `how` is "loaded", "raised", the name of a signal, "hang", or "exit N" for a child that ended
    itself. `tensors` has the bytes and the digest of each tensor.
    """

    how: str
    error: str = ""  # type of the exception
    text: str = ""  # its message
    code: int = 0  # its errno
    tensors: Mapping[str, Any] = {}


def digests(load: Load, source: Path) -> dict[str, list[Any]]:
    loaded = load(source)
    return {
        name: [nbytes, hashlib.sha1(ctypes.string_at(address, nbytes)).hexdigest()]
        for name, (address, nbytes) in loaded.places.items()
    }


def attempt(load: Load, source: Path) -> Ended:
    try:
        return Ended("loaded", tensors=digests(load, source))
    except BaseException as raised:
        code = getattr(raised, "errno", None)
        text = str(raised)
        if len(text) > TEXT_CHARACTERS:
            half = TEXT_CHARACTERS // 2
            text = f"{text[:half]} ... {text[-half:]}"
        return Ended("raised", type(raised).__name__, text, code if isinstance(code, int) else 0)


def child(job: Mapping[str, Any], label: str, control: socket.socket) -> None:
    """Runs a case and reports it: the load, and with a failing call the loads before and after."""

    def report(outcome: Ended) -> None:
        control.send(json.dumps(outcome).encode())

    def tell(word: bytes) -> None:
        control.send(word)
        control.recv(1)

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, -1))
    arm = parse(label)
    source = Path(job["source"])
    load = KINDS[arm.kind].open(Wanted(source, arm.options)).load
    # The list of files is an argument of these loaders: finding them is not what is tested.
    loaders.files_of = functools.cache(loaders.files_of)
    report(attempt(load, source))
    if job["calls"]:
        listener = injector.confine(job["calls"])
        socket.send_fds(control, [b"listener"], [listener])
        os.close(listener)
        tell(b"begin")
        outcome = attempt(load, source)
        tell(b"end")
        report(outcome)
        report(attempt(load, source))


def change(job: Mapping[str, Any]) -> None:
    """Truncates a shard to half of its size, or replaces it by the file beside it."""
    shard = Path(job["source"], job["shard"])
    if job["change"] == "truncated":
        os.truncate(shard, shard.stat().st_size // 2)
    else:
        shard.with_suffix(".new").replace(shard)


def supervise(job: Mapping[str, Any], pid: int, control: socket.socket) -> dict[str, Any]:
    """Answers the child's calls until it ends or is out of time; returns what it reported."""
    deadline = time.monotonic() + LIMIT_SECONDS
    poll = select.poll()
    poll.register(control, select.POLLIN)
    calls: injector.Calls | None = None
    outcomes: list[Any] = []
    running = True
    while running and (left := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            if calls is not None and fd == calls.listener:
                calls.answer()
                continue
            said, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
            if descriptors:
                calls = injector.Calls(descriptors[0], pid)
                poll.register(calls.listener, select.POLLIN)
            elif said == b"begin" and calls is not None:
                act = functools.partial(change, job) if job["change"] else None
                calls.arm(job["code"], job["k"], job["k"], act)
                control.send(b"!")
            elif said == b"end" and calls is not None:
                calls.armed = False
                control.send(b"!")
            elif said:
                outcomes.append(json.loads(said))
            else:
                running = False
    if running:
        os.kill(pid, signal.SIGKILL)
    if calls is not None:
        os.close(calls.listener)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if running or status != 0:
        ended = signal.Signals(-status).name if status < 0 else f"exit {status}"
        outcomes.append(Ended("hang" if running else ended))
    return {
        "outcomes": outcomes,
        "struck": calls.failed if calls is not None else 0,
        "seen": dict(calls.seen) if calls is not None else {},
    }


def run(job: Mapping[str, Any], label: str) -> dict[str, Any]:
    """One case, in a child of its own."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, its:
        pid = os.fork()
        if pid == 0:
            mine.close()
            try:
                child(job, label, its)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        its.close()
        return supervise(job, pid, mine)


def main() -> None:
    """Answers on the descriptor that was stdout; what libraries print goes to stderr."""
    label = sys.argv[1]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)  # OpenMP does not survive a fork

    def say(facts: Any) -> None:
        print(json.dumps(facts), file=out, flush=True)

    say(versions(KINDS[parse(label).kind]))
    for line in sys.stdin:
        say(run(json.loads(line), label))


if __name__ == "__main__":
    main()
