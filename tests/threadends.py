"""The end of threads, which may come a moment after that of the work they did."""

from __future__ import annotations

import threading
import time

PATIENCE_SECONDS = 240.0


def await_threads(name: str) -> None:
    """Waits until no thread of this name is left."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive(), f"{name} goes on"


def await_most(most: int) -> None:
    """Waits until this process has at most so many threads."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while threading.active_count() > most:
        assert time.monotonic() < deadline, f"more than {most}: {threading.enumerate()}"
        time.sleep(0.01)
