"""The engines of the ``posix`` backend: which there are, and which work here.

Each is tried before it is used, with one real read: a kernel that blocks io_uring, a machine out of
AIO contexts and a build without liburing all end in an answer with the reason and the hint. What
the engines do is in `_native`.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Any

from gdsload._native.memory import Region
from gdsload._native.pump import Pump
from gdsload._native.request import Request
from gdsload.backends.base import Support
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES

# The order in which `auto` tries them (benchmarks/engines.py).
ENGINES = ("uring", "linuxaio", "threads", "aio")
_MODULES = {"uring": "uring", "linuxaio": "linuxaio", "aio": "posixaio", "threads": "threads"}
_DRAIN_SECONDS = 0.15


def engine_module(engine: str) -> Any:
    """The native module of an engine. Raises ImportError where this build has none."""
    return importlib.import_module(f"gdsload._native.{_MODULES[engine]}")


_tried: dict[tuple[str, int], Support] = {}
# Refusals that are the same for as long as the process lives. ETIMEDOUT: a trial read that does not
# come back is waited for once.
_LASTING = (
    errno.EPERM,
    errno.EACCES,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ETIMEDOUT,
)


def try_engine(engine: str) -> Support:
    """Whether an engine works in this process: opened, and one byte read.

    An engine that works, or that the system forbids, is remembered. Any other failure may pass:
    something is used up, and there again the next time.
    """
    key = (engine, os.getpid())
    if key in _tried:
        return _tried[key]
    answer, code = _try_engine(engine)
    if code == 0 or code in _LASTING:
        _tried[key] = answer
    return answer


def _try_engine(engine: str) -> tuple[Support, int]:
    """The answer, and the errno of a refusal of the system's."""
    if engine not in _MODULES:
        return Support(False, (f"there is no such engine; there are {', '.join(ENGINES)}",)), 0
    try:
        module = engine_module(engine)
    except ImportError:
        return (
            Support(
                False,
                ("this build has no io_uring: liburing's headers were missing",),
                "install liburing-dev and build again" if engine == "uring" else "build again",
            ),
            0,
        )
    try:
        fd = os.open(_readable_file(), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:  # which says nothing of the engine
        return unopened(engine, error), errno.EIO
    try:
        return _read_one_byte(engine, module, fd)
    except OSError as error:
        return unopened(engine, error), error.errno or errno.EIO
    except MemoryError as error:
        return unopened(engine, OSError(errno.ENOMEM, str(error) or "no memory")), errno.ENOMEM
    finally:
        os.close(fd)


def _read_one_byte(engine: str, module: Any, fd: int) -> tuple[Support, int]:
    pump = Pump(module.engine(), 2)
    try:
        region = Region.anonymous(1)
        request = Request(
            pump,
            [(fd, -1, DEFAULT_BLOCK_BYTES, 0, 1)],
            [(0, 0, 1, 1, region.address, region.handle(), -1)],
        )
        request.post()
        if not request.wait(2.0):
            why = f"{engine} opens, but a read of one byte does not come back"
            return Support(False, (why,)), errno.ETIMEDOUT
        code = abs(request.result(0)[2])
        if code:
            return Support(False, (f"{engine} opens, but cannot read: {os.strerror(code)}",)), code
        return Support(True), 0
    finally:
        pump.close(_DRAIN_SECONDS)


def unopened(engine: str, error: OSError) -> Support:
    """The answer of an engine that did not open."""
    return Support(False, (f"{engine} cannot be opened: {error.strerror}",), _mend(error))


def _readable_file() -> str:
    """A small regular file that is surely there and warm: this module, or the interpreter."""
    return __file__ if os.path.isfile(__file__) else sys.executable


def _mend(error: OSError) -> str:
    if error.errno == errno.EPERM:
        return "seccomp or kernel.io_uring_disabled blocks it: allow io_uring_setup, or set it to 0"
    if error.errno == errno.ENOSYS:
        return "this kernel, or its sandbox, does not have it"
    if error.errno == errno.EAGAIN:
        return "raise fs.aio-max-nr"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit on open files (ulimit -n)"
    if error.errno == errno.ENOMEM:
        return "raise the limit on locked memory (ulimit -l)"
    return ""
