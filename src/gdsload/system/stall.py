"""Deciding that reads have stalled, and not this process.

Not responsible for measuring the silence (the backends), or for the error (the callers).
"""

from __future__ import annotations

import time

# A read without a single byte for this long has failed. Longer than an NFS server usually needs to
# restart.
STALL_SECONDS = 60.0
# Time that native threads and the kernel get to report bytes after a process continues.
CONFIRM_SECONDS = 0.05


class StallWatch:
    """Notices a silence that lasts. One for each observer of some reads.

    It takes two looks: a process that was stopped (SIGSTOP) sees a long silence when it continues,
    although bytes are about to be counted.
    """

    def __init__(self) -> None:
        self._since: float | None = None  # the first look at this silence

    def stalled(self, idle_seconds: float, limit_seconds: float) -> bool:
        """Whether this look and an earlier one, `CONFIRM_SECONDS` ago, found more than
        `limit_seconds` without a byte. Called at every look."""
        if idle_seconds <= limit_seconds:
            self._since = None
            return False
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now - self._since >= CONFIRM_SECONDS
