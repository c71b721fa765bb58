"""What became of the reads of a load: entries in the report, or one error that names the file, the
offset and the tensor. Backends report by transfer; the read plan knows whose bytes those are.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

from gdsload.backends import Backend, choose
from gdsload.backends.base import Failure, RequestFacts
from gdsload.checkpoint import Checkpoint
from gdsload.errors import (
    BackendUnavailable,
    CuFileError,
    FileChanged,
    ReadError,
    RemoteError,
    ShortRead,
    StallError,
)
from gdsload.planning.read_plan import ReadPlan, Transfer
from gdsload.remote.file import LOCAL_CACHE
from gdsload.report import LoadReport, Span


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
    if failure.errno == 0 and not failure.text:
        return ShortRead(
            f"{path}: the file ended at byte {offset + got}, while bytes up to {offset + wanted}"
            f" were read for tensor {tensor!r}",
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
    checkpoint: Checkpoint, shard: int, offset: int, wanted: int, idle_seconds: float, reader: str
) -> StallError:
    """The error for bytes of which none has been read for too long; `reader` ends the message."""
    path = checkpoint.shards[shard].path
    return StallError(
        f"{path}: no byte has come for {idle_seconds:.0f} s {reader}",
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


def open_backend(
    device: str,
    wanted: str,
    options: Mapping[str, Any],
    report: LoadReport,
    expected_bytes: int = 0,
    remote: str = "",
) -> Backend:
    """Opens the backend of a load.

    Args:
        device: The device to load into, such as "cpu" or "cuda:0".
        wanted: The name of a backend. "auto" is, into a CUDA device, the backend that measures and
            fails over; into DRAM, the first backend that works.
        options: The options of the backend.
        report: Gets the choice and the refusals.
        expected_bytes: The size of the load, 0 if unknown.
        remote: For files elsewhere the name of the backend that reads them; "" for files of this
            machine.

    Raises:
        BackendUnavailable: No backend works; it has all the reasons.
    """
    if remote:
        if wanted not in ("auto", remote):
            why = f"these files are not on this machine: backend {remote!r} reads them"
            raise BackendUnavailable(f"backend {wanted!r}: {report.source}: {why}", {wanted: why})
        return choose(device, remote, options).backend(**options)
    if device.partition(":")[0] == "cuda":
        from gdsload.backends.auto.backend import AutoBackend  # imports CUDA

        if wanted == "auto" and AutoBackend.probe(device).usable:
            return AutoBackend(device, expected_bytes, **options)
    choice = choose(device, wanted, options)
    report.refusals.update(choice.refusals)
    if wanted != "auto":
        report.choice = f"{wanted}: asked for by name"
    return choice.backend(**options)


def describe(report: LoadReport, backend: Backend) -> None:
    """Updates the report: the backend in use, how it was chosen, and why others were not. Observers
    of the load hear of it."""
    status = backend.status()
    report.backend, report.engine = status.backend, status.engine
    report.choice = status.choice or report.choice
    report.refusals.update(status.refusals)
    report.rates.update(status.rates)
    report.failovers.update(status.failovers)
    report.publish()


def note(
    report: LoadReport,
    backend: Backend,
    checkpoint: Checkpoint,
    plan: ReadPlan,
    request: Any,
    *,
    unread_bytes: int,
) -> None:
    """Adds a request that has ended to the report: bytes by I/O path, reads and pages. It ended
    without these bytes of the plan; a read that was cancelled may have brought some of them."""
    describe(report, backend)
    paths = backend.paths(request)
    for path, nbytes in paths.items():
        report.paths[path] = report.paths.get(path, 0) + nbytes
        report.cached_bytes += nbytes if path == LOCAL_CACHE else 0
    report.read_bytes += sum(paths.values()) or plan.read_bytes - unread_bytes
    for facts in backend.facts(request) or [RequestFacts(plan.transfers)]:
        report.requests += len(facts.transfers)
        report.short_reads += facts.short_reads
        report.retries += facts.retries
        for shard, why in facts.direct_refusals.items():
            report.refusals[f"direct I/O on {checkpoint.shards[shard].name}"] = why
        for transfer, (posted, done) in zip(facts.transfers, facts.times, strict=False):
            if done:
                name = f"read {transfer.length >> 10} KiB at {transfer.offset}"
                row = f"requests of {checkpoint.shards[transfer.shard].name}"
                report.spans.append(Span(name, row, posted * 1e-9, done * 1e-9))
        if facts.huge_pages or facts.small_pages:
            report.pages["huge"] = report.pages.get("huge", 0) + facts.huge_pages
            report.pages["small"] = report.pages.get("small", 0) + facts.small_pages
