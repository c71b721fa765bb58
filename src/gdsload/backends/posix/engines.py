"""The engines of the ``posix`` backend, and which of them work here.

Each engine is tried with one real read before it is used. If the kernel blocks io_uring, the
machine has no AIO contexts left or the build lacks liburing, the answer has the reason and a hint.
Not responsible for what the engines do: see `_native`.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Sequence
from typing import Any

from gdsload._native.memory import Region
from gdsload._native.pump import Pump
from gdsload._native.request import Request
from gdsload.backends.base import Support
from gdsload.backends.pump_request import DRAIN_SECONDS
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES
from gdsload.system.stall import CONFIRM_SECONDS

# The order in which `auto` tries them. Threads touch the fresh pages of host memory in parallel
# (benchmarks/engines.py), and into a staging ring they copy from the page cache faster than the
# workers of io_uring; past it both are as fast (benchmarks/results/gpu-h100.json). linuxaio copies
# from the page cache one read after the other.
ENGINES = ("threads", "uring", "linuxaio")


def engine_module(engine: str) -> Any:
    """The native module of an engine. Raises ImportError where this build has none."""
    return importlib.import_module(f"gdsload._native.{engine}")


def engine_capsule(engine: str, pages: str = "auto") -> object:
    """The engine, for a pump. `pages`: how `threads` touches fresh memory."""
    module = engine_module(engine)
    return module.engine(pages) if engine == "threads" else module.engine()


_tried: dict[tuple[str, int], Support] = {}
# Refusals that last as long as the process. ETIMEDOUT: what hangs when it is tried is tried once.
_PERMANENT = frozenset(
    {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ETIMEDOUT}
)
_HINTS = {
    errno.ENOSYS: "this kernel, or its sandbox, does not have it",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the limit on open files (ulimit -n)",
}
_HINTS_OF = {
    ("uring", errno.EPERM): "seccomp or kernel.io_uring_disabled blocks it: allow io_uring_setup,"
    " or set it to 0",
    ("uring", errno.ENOMEM): "raise the limit on locked memory (ulimit -l)",
    ("linuxaio", errno.EAGAIN): "raise fs.aio-max-nr",
}
_MORE_THREADS = "raise the limits on processes and address space (ulimit -u, ulimit -v, pids.max)"


def first_working(names: Sequence[str], refusals: dict[str, str]) -> str:
    """The first of these engines that works, or "". The reasons of those before it go into
    `refusals`, by "posix/engine"."""
    for name in names:
        answer = try_engine(name)
        if answer.usable:
            return name
        refusals[f"posix/{name}"] = str(answer)
    return ""


def try_engine(engine: str) -> Support:
    """Whether an engine works in this process: opened, and one byte read.

    The answer is cached per process if it cannot change: the engine works, or the system forbids
    it. Any other failure may be temporary, such as a lack of descriptors.
    """
    key = (engine, os.getpid())
    if key in _tried:
        return _tried[key]
    answer, code = _try_engine(engine)
    if code == 0 or code in _PERMANENT:
        _tried[key] = answer
    return answer


def _try_engine(engine: str) -> tuple[Support, int]:
    """The answer, and the errno of the refusal or 0."""
    if engine not in ENGINES:
        return Support(False, (f"unknown engine (available: {', '.join(ENGINES)})",)), 0
    try:
        module = engine_module(engine)
    except ModuleNotFoundError as error:
        if engine != "uring":
            return Support(False, (f"{error.name} is not built",), "build gdsload again"), 0
        why = "this build has no io_uring: it was made without liburing 2.3 or newer"
        return Support(False, (why,), "install liburing-dev and build again"), 0
    except ImportError as error:  # such as too many open files
        return Support(False, (f"{engine} cannot be opened: {error}",)), errno.EIO
    try:
        # Its own file exists, and its first page is in the page cache: it was loaded from there.
        fd = os.open(module.__file__, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:  # not the engine's fault
        return unopened(engine, error), errno.EIO
    try:
        return _read_one_byte(engine, module, fd)
    except OSError as error:
        return unopened(engine, error), error.errno or errno.EIO
    except MemoryError as error:
        why = f"{engine} cannot be opened: {str(error) or 'no memory'}"
        return Support(False, (why,)), errno.ENOMEM
    finally:
        os.close(fd)


def _read_one_byte(engine: str, module: Any, fd: int) -> tuple[Support, int]:
    pump = Pump(module.engine(), 2)
    try:
        region = Region.anonymous(1)
        request = Request(
            pump,
            [(fd, -1, DEFAULT_BLOCK_BYTES, 0, 1)],
            [(0, 0, 1, 1, 0, 0, "buffered")],
            [(region.address, 1, region.handle(), -1)],
        )
        request.post()
        # A second look: a process that was stopped finds that the time is over.
        if not request.wait(2.0) and not request.wait(CONFIRM_SECONDS):
            why = f"{engine} opens, but a read of one byte does not complete"
            return Support(False, (why,)), errno.ETIMEDOUT
        code = request.result(0)[2]
        if code < 0:  # an end of the file: it has a first byte
            return Support(False, (f"{engine} opens, but reads nothing",)), errno.EIO
        if code:
            return Support(False, (f"{engine} opens, but cannot read: {os.strerror(code)}",)), code
        return Support(True), 0
    finally:
        pump.close(DRAIN_SECONDS)


def unopened(engine: str, error: OSError) -> Support:
    """The answer for an engine that did not open."""
    why = f"{engine} cannot be opened: {error.strerror}"
    code = error.errno or 0
    hint = _HINTS_OF.get((engine, code)) or _HINTS.get(code, "")
    if code == errno.EAGAIN and (engine == "threads" or "no thread" in why):
        hint = _MORE_THREADS
    return Support(False, (why,), hint)
