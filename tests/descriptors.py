"""Descriptors that a test leaves open."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from waiting import wait_for


@contextmanager
def none_left() -> Iterator[None]:
    """The block leaves no descriptor open. A thread that closes one may take a moment."""
    gc.collect()  # what earlier tests left in tracebacks
    before = count()
    yield
    wait_for(lambda: count() <= before, lambda: f"{count()} descriptors are open, {before} were")


def count() -> int:
    """The descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
