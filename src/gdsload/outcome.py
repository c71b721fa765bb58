"""What became of reads: entries in the report, or one error with the file, offset and tensor.

Backends tell in numbers, transfer by transfer; here they meet the plan, which knows whose bytes
they were.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from gdsload.backends.base import Backend, Failure
from gdsload.checkpoint import Checkpoint
from gdsload.errors import CuFileError, ReadError, ShortRead, StallError
from gdsload.plan import Piece, ReadPlan, Transfer
from gdsload.report import LoadReport, Span

_HINT = "stall_seconds sets the limit"


def read_error(checkpoint: Checkpoint, plan: ReadPlan, failure: Failure) -> ReadError:
    """The error for a transfer that failed."""
    transfer = plan.transfers[failure.transfer]
    path = checkpoint.shards[transfer.shard].path
    tensor = tensor_at(plan, transfer)
    facts: dict[str, Any] = {
        "path": path,
        "offset": transfer.offset,
        "wanted": transfer.wanted,
        "got": failure.got,
    }
    if failure.errno == 0 and not failure.text:
        return ShortRead(
            f"{path}: the file ended at byte {transfer.offset + failure.got}, while bytes up to"
            f" {transfer.offset + transfer.wanted} were read for tensor {tensor!r}",
            hint="it was truncated after it was opened",
            **facts,
        )
    if failure.code:
        return CuFileError(
            f"{path}: reading {transfer.wanted} bytes at {transfer.offset} failed after"
            f" {failure.got}: {failure.text} (tensor {tensor!r})",
            code=failure.code,
            **facts,
        )
    why = failure.text or os.strerror(failure.errno)
    return ReadError(
        f"{path}: reading {transfer.wanted} bytes at {transfer.offset} failed after"
        f" {failure.got}: {why} (tensor {tensor!r})",
        errno=failure.errno or None,
        **facts,
    )


def stall_error(
    checkpoint: Checkpoint, plan: ReadPlan, transfer: Transfer, idle_seconds: float
) -> StallError:
    """The error for a transfer for which no byte has come in so long."""
    path = checkpoint.shards[transfer.shard].path
    return StallError(
        f"{path}: no byte has come for {idle_seconds:.0f} s while {transfer.wanted} bytes at"
        f" {transfer.offset} were read for tensor {tensor_at(plan, transfer)!r}",
        path=path,
        offset=transfer.offset,
        wanted=transfer.wanted,
        errno=errno.ETIMEDOUT,
        hint=_HINT,
    )


def silence_error(checkpoint: Checkpoint, piece: Piece, idle_seconds: float) -> StallError:
    """The error for a piece that a prefetch reads, but does not bring."""
    path = checkpoint.shards[piece.shard].path
    return StallError(
        f"{path}: no byte has come for {idle_seconds:.0f} s to the prefetch that reads tensor"
        f" {piece.name!r}",
        path=path,
        offset=piece.offset,
        wanted=piece.nbytes,
        errno=errno.ETIMEDOUT,
        hint=_HINT,
    )


def tensor_at(plan: ReadPlan, transfer: Transfer) -> str:
    """A tensor that the transfer brings bytes of."""
    for name, home in plan.homes.items():
        if home.first <= transfer.tag <= home.last:
            return name
    return "?"


def note(
    report: LoadReport, backend: Backend, checkpoint: Checkpoint, plan: ReadPlan, request: Any
) -> None:
    """Adds to the report what a request did, after its end: bytes by road, requests, pages."""
    for road, size in backend.roads(request).items():
        report.roads[road] = report.roads.get(road, 0) + size
    report.requests += len(plan.transfers)
    report.read_bytes += plan.read_bytes
    native = getattr(request, "native", None)
    if native is not None:
        _, _, short_reads, retries = native.counts()
        report.short_reads += short_reads
        report.retries += retries
        report.spans += [
            Span(f"read {transfer.length >> 10} KiB at {transfer.offset}",
                 f"requests of {checkpoint.shards[transfer.shard].name}",
                 posted * 1e-9, done * 1e-9)
            for transfer, (posted, done, _) in zip(plan.transfers, native.trace(), strict=True)
            if done
        ]  # fmt: skip
    populator = getattr(request, "populator", None)
    if populator is not None:
        huge, small, _ = populator.counts()
        report.pages["huge"] = report.pages.get("huge", 0) + huge
        report.pages["small"] = report.pages.get("small", 0) + small
