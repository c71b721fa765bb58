"""The end of threads, which may come a moment after that of the work they did."""

from __future__ import annotations

import threading

from waiting import PATIENCE_SECONDS, wait_for


def await_threads(name: str) -> None:
    """Waits until no thread of this name is left."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive(), f"{name} goes on"


def await_most(most: int) -> None:
    """Waits until this process has at most so many threads."""
    wait_for(
        lambda: threading.active_count() <= most,
        lambda: f"more than {most}: {threading.enumerate()}",
    )
