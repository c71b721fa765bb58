"""The direct twin of an open file: a second descriptor whose reads bypass the page cache."""

from __future__ import annotations

from typing import NamedTuple

from gdsload._native import system
from gdsload.checkpoint import Shard
from gdsload.plan import DEFAULT_BLOCK_BYTES


class Twin(NamedTuple):
    """A descriptor that its taker closes, or None and the reason; direct reads start and end on
    multiples of `block` bytes."""

    fd: int | None
    block: int
    refusal: str


def open_direct(shard: Shard) -> Twin:
    """Opens a shard's twin; where there can be none, it says why."""
    alignment = system.direct_alignment(shard.fd)
    if alignment is not None and alignment[1] == 0:
        refusal = "its filesystem says that it does no direct I/O"
        return Twin(None, DEFAULT_BLOCK_BYTES, refusal)
    block = max(alignment) if alignment is not None else DEFAULT_BLOCK_BYTES
    try:
        return Twin(shard.reopen_direct(), block, "its filesystem does no direct I/O")
    except OSError as error:
        return Twin(None, block, f"it cannot be opened for direct I/O: {error.strerror}")
