"""The errors for reads that failed or stalled. A backend reports a transfer; the errors name its
file, its offset and a tensor.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from gdsload.backends.base import Failure
from gdsload.checkpoint import Checkpoint
from gdsload.errors import CuFileError, FileChanged, ReadError, RemoteError, ShortRead, StallError
from gdsload.planning.read_plan import ReadPlan, Transfer


def read_error(checkpoint: Checkpoint, plan: ReadPlan, failure: Failure) -> ReadError | FileChanged:
    """The error for a transfer that failed."""
    transfer = plan.transfers[failure.transfer]
    shard = checkpoint.shards[transfer.shard]
    path, offset, wanted = shard.path, transfer.offset, transfer.wanted
    if shard.remote is not None:
        try:
            shard.verify_unchanged()
        except FileChanged as changed:
            return changed
    tensor, got = tensor_at(plan, transfer), failure.got
    facts: dict[str, Any] = {"path": path, "offset": offset, "wanted": wanted, "got": got}
    if failure.ended_early:
        before = "" if got else " or before"  # a read that begins behind the end gets nothing
        return ShortRead(
            f"{path}: the file ended at byte {offset + got}{before}, while bytes up to"
            f" {offset + wanted} were read for tensor {tensor!r}",
            hint="it was truncated after it was opened",
            **facts,
        )
    why = failure.text or os.strerror(failure.errno)
    text = f"{path}: reading {wanted} bytes at {offset} failed after {got}: {why}"
    text += f" (tensor {tensor!r})"
    if shard.remote is not None:
        return RemoteError(text, errno=failure.errno or None, final=failure.final, **facts)
    if failure.code:
        return CuFileError(text, code=failure.code, **facts)
    return ReadError(text, errno=failure.errno or None, **facts)


def stall_error(
    checkpoint: Checkpoint, shard: int, offset: int, wanted: int, idle_seconds: float, context: str
) -> StallError:
    """The error for bytes of which none has been read for too long; `context` ends the message."""
    path = checkpoint.shards[shard].path
    return StallError(
        f"{path}: no byte has arrived for {idle_seconds:.0f} s {context}",
        path=path,
        offset=offset,
        wanted=wanted,
        errno=errno.ETIMEDOUT,
        hint="stall_seconds sets the limit",
    )


def tensor_at(plan: ReadPlan, transfer: Transfer) -> str:
    """The name of a tensor that the transfer reads bytes of."""
    for name, location in plan.locations.items():
        if location.first <= transfer.tag <= location.last:
            return str(name)
    return "?"
