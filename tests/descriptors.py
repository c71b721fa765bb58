"""Descriptors that a test leaves open."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 240.0


@contextmanager
def none_left() -> Iterator[None]:
    """The block leaves no descriptor open. A thread that closes one may take a moment."""
    gc.collect()  # what earlier tests left in tracebacks
    before = count()
    yield
    deadline = time.monotonic() + PATIENCE_SECONDS
    while count() > before:
        assert time.monotonic() < deadline, f"{count()} descriptors are open, {before} were"
        time.sleep(0.01)


def count() -> int:
    """The descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
