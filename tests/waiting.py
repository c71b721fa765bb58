"""Waiting for what another thread or process does. A test that would hang fails instead."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 240.0


def wait_for(
    condition: Callable[[], object],
    what: str | Callable[[], str] = "the condition did not become true",
) -> None:
    """Returns when `condition` is true; fails with `what`, or its result, if it takes too long."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.001)
