"""An engine that fails by script: `fault_engine.c`, compiled once, used instead of a real one.

A test chooses the reads that fail, and how. Its `Faults` reports afterwards the reads that were
struck, so that a swallowed fault shows.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compiled import compiled
from gdsload.backends.posix import engines

SOURCE = Path(__file__).with_name("fault_engine.c")
SHORT, ERRNO, ZERO, HANG = 1, 2, 3, 4
ANY, DIRECT, BUFFERED = 0, 1, 2
FOR_EVER = -1
_WAIT_NS = 120_000_000_000  # generous: it ends a test that would otherwise hang
_NAME = b"gdsload.engine"  # a capsule keeps only the pointer to its name


def _fields(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


class Rule(ctypes.Structure):
    _fields_ = _fields("kind", "io_mode", "value", "times", "first", "last", "skip")


class Script(ctypes.Structure):
    _fields_ = _fields(
        "open_errno",
        "accept",
        "refuse_errno",
        "refuse_times",
        "reap_errno",
        "reap_after",
        "reversed",
        "one_by_one",
        "open_hangs",
    )


class Log(ctypes.Structure):
    _fields_ = _fields(
        "opens",
        "closes",
        "reads",
        "struck",
        "cancels",
        "hung",
        "in_flight_at_close",
        "wanted",
        "reaps",
    )


def rule(
    kind: int,
    value: int = 0,
    *,
    times: int = 1,
    io_mode: int = ANY,
    first: int = 0,
    last: int = 1 << 62,
    skip: int = 0,
) -> Rule:
    """Strikes `times` reads of bytes `first` to `last` (excluded), after letting `skip` pass."""
    return Rule(kind, io_mode, value, times, first, last, skip)


@functools.cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(compiled(SOURCE, "-O1")))
    lib.fault_set.argtypes = [ctypes.POINTER(Script), ctypes.POINTER(Rule), ctypes.c_int]
    lib.fault_log.argtypes = [ctypes.POINTER(Log)]
    lib.fault_wait.argtypes = [ctypes.c_int64, ctypes.c_int64]
    lib.fault_wait_wanted.argtypes = [ctypes.c_int64, ctypes.c_int64]
    return lib


def capsule() -> Any:
    """The engine, as the native modules hand theirs over."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    return make(ctypes.addressof(ctypes.c_char.in_dll(library(), "fault_ops")), _NAME, None)


class Faults:
    """What a test does to the faulty engine."""

    def script(self, *rules: Rule, **script: int) -> None:
        """Sets the rules and starts a new log."""
        library().fault_set(Script(**script), (Rule * max(len(rules), 1))(*rules), len(rules))

    @property
    def log(self) -> Log:
        log = Log()
        library().fault_log(ctypes.byref(log))
        return log

    def wait_hung(self, count: int = 1) -> None:
        assert library().fault_wait(count, _WAIT_NS), f"only {self.log.hung} reads came to hang"

    def wait_wanted(self, count: int) -> None:
        """Until the pump sleeps through so many completions."""
        assert library().fault_wait_wanted(count, _WAIT_NS), f"it wants {self.log.wanted}"

    def let_go(self, count: int = -1) -> None:
        library().fault_let_go(count)

    def wait_closed(self) -> None:
        assert library().fault_wait(-1, _WAIT_NS), "an engine was never closed"


@contextmanager
def installed(patch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Every engine of the posix backend is the faulty one; in the end all must have been closed,
    with nothing in flight."""
    for engine in engines.ENGINES:  # remembered: the script is not for the probes
        engines.try_engine(engine)
    faults = Faults()
    faults.script()
    patch.setattr(engines, "engine_module", lambda _: SimpleNamespace(engine=lambda *_: capsule()))
    yield faults
    faults.let_go()
    faults.wait_closed()
    assert faults.log.in_flight_at_close == 0
