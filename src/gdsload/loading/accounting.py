"""Records in the report of a load which backend reads, and what each request has read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gdsload.backends import Backend
from gdsload.backends.base import MAPPED_PATH, RequestFacts
from gdsload.planning.read_plan import ReadPlan, Transfer
from gdsload.remote.file import LOCAL_CACHE
from gdsload.report import LoadReport, Span
from gdsload.system.gc_control import collector_paused

if TYPE_CHECKING:
    from gdsload.loading.session import Session


def record_backend(session: Session, backend: Backend) -> None:
    """Updates the report of a session: the backend in use, how it was chosen, and why others were
    not. Observers of the load hear of it."""
    report, counted, status = session.report, session.failovers, backend.status()
    report.backend, report.engine = status.backend, status.engine
    report.choice = status.choice or report.choice
    report.refusals.update(status.refusals)
    report.rates.update(status.rates)
    for backends, nbytes in (Counter(status.failovers) - Counter(counted)).items():
        report.failovers[backends] = report.failovers.get(backends, 0) + nbytes
    counted.update(status.failovers)
    report.publish()


def record_request(
    session: Session, backend: Backend, plan: ReadPlan, request: Any, *, landed_bytes: int
) -> None:
    """Adds a request that has ended to the report: bytes by I/O path, reads and pages.
    `landed_bytes`: of the transfers that have arrived, for a backend that names no paths."""
    record_backend(session, backend)
    report, shards = session.report, session.checkpoint.shards
    paths = backend.paths(request)
    for path, nbytes in paths.items():
        if nbytes:
            report.paths[path] = report.paths.get(path, 0) + nbytes
        report.cached_bytes += nbytes if path == LOCAL_CACHE else 0
    read_bytes = sum(paths.values()) - paths.get(MAPPED_PATH, 0)
    report.read_bytes += read_bytes if paths else landed_bytes
    with collector_paused():
        found = backend.facts(request) or [RequestFacts(plan.transfers)]
    for facts in found:
        report.requests += len(facts.transfers)
        report.short_reads += facts.short_reads
        report.retries += facts.retries
        for shard, why in facts.direct_refusals.items():
            report.refusals[f"direct I/O on {shards[shard].name}"] = why
        if facts.times:
            names = [shard.name for shard in shards]
            spans = partial(_spans_of, facts.transfers, facts.times, names)
            report.add_reads(facts.times, spans)
        count_pages(report, facts.huge_pages, facts.small_pages)


def _spans_of(
    transfers: Sequence[Transfer], times: Sequence[tuple[int, int]], files: Sequence[str]
) -> Iterator[Span]:
    """The reads of a request, on a track for each file; `times` are as in `RequestFacts`."""
    for transfer, (posted, done) in zip(transfers, times, strict=False):
        if posted and done:
            name = f"read {transfer.length >> 10} KiB at {transfer.offset}"
            track = f"reads of {files[transfer.shard]}"
            yield Span(name, track, posted * 1e-9, done * 1e-9)


def count_pages(report: LoadReport, huge: int, small: int) -> None:
    """Adds units of fresh memory that were touched as a huge page, and as small pages."""
    if huge or small:
        report.pages["huge"] = report.pages.get("huge", 0) + huge
        report.pages["small"] = report.pages.get("small", 0) + small
