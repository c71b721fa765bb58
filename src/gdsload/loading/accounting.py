"""What became of reads: entries in the report, or one error with the file, offset and tensor.

Backends tell in numbers, transfer by transfer; here they meet the plan, which knows whose bytes
they were.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Any

from gdsload.backends import Backend, choose
from gdsload.backends.base import Failure
from gdsload.checkpoint import Checkpoint
from gdsload.errors import CuFileError, ReadError, ShortRead, StallError
from gdsload.planning.read_plan import ByteRange, ReadPlan, Transfer
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


def silence_error(checkpoint: Checkpoint, piece: ByteRange, idle_seconds: float) -> StallError:
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
    for name, location in plan.locations.items():
        if location.first <= transfer.tag <= location.last:
            return name
    return "?"


def open_backend(
    device: str,
    wanted: str,
    options: Mapping[str, Any],
    report: LoadReport,
    expected_bytes: int = 0,
) -> Backend:
    """The backend of a load: the one that was named, or for "auto" what measures and falls back on
    the way into a device, and the first that works into DRAM.

    Raises BackendUnavailable with all reasons where there is none.
    """
    if device.partition(":")[0] == "cuda":
        from gdsload.backends.auto.backend import AutoBackend  # not before a device is asked for

        if wanted == "auto" and AutoBackend.probe(device).usable:
            return AutoBackend(device, expected_bytes, **options)
    choice = choose(device, wanted, options)
    report.refusals.update(choice.refusals)
    if wanted != "auto":
        report.choice = f"{wanted}: asked for by name"
    return choice.backend(**options)


def describe(report: LoadReport, backend: Backend) -> None:
    """Writes down which backend serves, how it was chosen and why others were not, as of now."""
    serving = backend.serving()
    report.backend = serving.name
    report.engine = getattr(serving, "engine", "")
    report.refusals.update(getattr(backend, "refusals", {}))
    report.choice = getattr(backend, "choice", report.choice)
    report.rates.update(getattr(backend, "rates", {}))
    report.failovers.update(getattr(backend, "failovers", {}))


def note(
    report: LoadReport, backend: Backend, checkpoint: Checkpoint, plan: ReadPlan, request: Any
) -> None:
    """Adds to the report what a request did, after its end: bytes by road, requests, pages."""
    describe(report, backend)
    for road, size in backend.paths(request).items():
        report.paths[road] = report.paths.get(road, 0) + size
    report.read_bytes += plan.read_bytes
    parts = getattr(request, "parts", None)
    if parts is None:
        _note_part(report, checkpoint, plan.transfers, request)
    else:
        for part in parts:
            _note_part(report, checkpoint, part.transfers, part.request)


def _note_part(
    report: LoadReport, checkpoint: Checkpoint, transfers: Sequence[Transfer], request: Any
) -> None:
    report.requests += len(transfers)
    native = getattr(request, "native", None)
    if native is not None:
        _, _, short_reads, retries = native.counts()
        report.short_reads += short_reads
        report.retries += retries
        for shard, why in request.refused_direct().items():
            report.refusals[f"direct I/O on {checkpoint.shards[shard].name}"] = why
        report.spans += [
            Span(f"read {transfer.length >> 10} KiB at {transfer.offset}",
                 f"requests of {checkpoint.shards[transfer.shard].name}",
                 posted * 1e-9, done * 1e-9)
            for transfer, (posted, done, _) in zip(transfers, native.trace(), strict=True)
            if done
        ]  # fmt: skip
    populator = getattr(request, "populator", None)
    if populator is not None:
        huge, small, _ = populator.counts()
        report.pages["huge"] = report.pages.get("huge", 0) + huge
        report.pages["small"] = report.pages.get("small", 0) + small
