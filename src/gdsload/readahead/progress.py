"""What a prefetch tells of itself: the state it is in, how far it is, and that it was ended."""

from __future__ import annotations

from typing import NamedTuple

from gdsload.errors import GdsloadError

# In this order; the last four are ends.
OPENING, READING, LANDED, CANCELLED, FAILED, CLOSED = (
    "opening", "reading", "landed", "cancelled", "failed", "closed",
)  # fmt: skip


class PrefetchCancelled(GdsloadError, RuntimeError):
    """Somebody waited for a prefetch that was cancelled or closed before it had landed."""


class PrefetchProgress(NamedTuple):
    """How far a prefetch is. `state` is "opening", "reading", "landed", "cancelled", "failed" or
    "closed". `wanted_bytes` is 0 while opening; `claimed_bytes` is what loads have taken;
    `resident_bytes` is what the page cache held at the end of a prefetch into it, else 0."""

    state: str
    wanted_bytes: int
    landed_bytes: int
    claimed_bytes: int
    resident_bytes: int
    seconds: float
