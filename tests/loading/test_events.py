"""`on_event`: what a load reports while it runs, and that this cannot break it."""

from __future__ import annotations

import asyncio
import errno
import logging
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import faulty
import gdsload
from faulty import ERRNO, rule
from gdsload import events, telemetry, warmup
from gdsload.checkpoint.selection import Selection
from gdsload.errors import CheckpointError, ReadError
from gdsload.events import (
    BackendChosen,
    Event,
    FailedOver,
    LoadEnded,
    LoadStarted,
    PathRefused,
    PathUsed,
    PhaseEnded,
    Retried,
)
from gdsload.integrations.transformers.monkeypatch import held
from gdsload.readahead import prefetch as prefetch_module
from gdsload.report import LoadReport, Span, enclosing
from gpuauto import MIB, SMALL, rates_are
from gpudoubles import ERRNO as GPU_ERRNO, Doubles

THREADS: dict[str, Any] = {"engine": "threads", "request_bytes": 64 << 10}


def of(kind: type[Event], seen: list[Event]) -> list[Any]:
    return [event for event in seen if isinstance(event, kind)]


def by_load_file(source: Path, on_event: events.OnEvent) -> None:
    gdsload.load_file(source, cache="direct", options=THREADS, on_event=on_event)


def by_stream(source: Path, on_event: events.OnEvent) -> None:
    words: dict[str, Any] = {"cache": "direct", "options": THREADS, "window_bytes": 100_000}
    for _ in gdsload.stream(source, on_event=on_event, **words):
        pass


def by_astream(source: Path, on_event: events.OnEvent) -> None:
    async def run() -> None:
        async for _ in gdsload.astream(source, cache="direct", options=THREADS, on_event=on_event):
            pass

    asyncio.run(run())


def by_load_into(source: Path, on_event: events.OnEvent) -> None:
    targets = {name: torch.empty_like(one) for name, one in gdsload.load_file(source).items()}
    gdsload.load_into(targets, source, cache="direct", options=THREADS, on_event=on_event)


def by_safe_open(source: Path, on_event: events.OnEvent) -> None:
    with gdsload.safe_open(source, cache="direct", options=THREADS, on_event=on_event) as opened:
        opened.get_tensors()


def by_prefetch(source: Path, on_event: events.OnEvent) -> None:
    words: dict[str, Any] = {"cache": "direct", "options": THREADS}
    with gdsload.prefetch(source, on_event=on_event, **words) as ahead:
        assert ahead.wait()


def by_hook(source: Path, on_event: events.OnEvent) -> None:
    words: dict[str, Any] = {"cache": "direct", "options": THREADS}
    warmup.hook(source, wait=True, on_event=on_event, **words)().close()


LOADS = [by_load_file, by_stream, by_astream, by_load_into, by_safe_open]


def test_load_into_tells_no_device_before_it_has_found_the_targets(tmp_path: Path) -> None:
    seen: list[Event] = []
    with pytest.raises(gdsload.CheckpointError):
        gdsload.load_into({}, tmp_path / "gone", on_event=seen.append)
    assert isinstance(seen[0], LoadStarted) and seen[0].device == ""


@pytest.mark.parametrize("load", [*LOADS, by_prefetch, by_hook])
def test_load_reports_its_start_its_path_its_phases_and_its_end(
    load: Callable[[Path, events.OnEvent], None], checkpoint: Path
) -> None:
    seen: list[Event] = []
    load(checkpoint, seen.append)
    first, last = seen[0], seen[-1]
    assert isinstance(first, LoadStarted) and isinstance(last, LoadEnded)
    assert len(of(LoadStarted, seen)) == len(of(LoadEnded, seen)) == 1
    assert first.kind == last.kind == ("load" if load in LOADS else "prefetch")
    assert {event.source for event in seen} == {str(checkpoint)}
    report = last.report
    if load in LOADS:
        assert report is gdsload.last_report()
    assert report.failure == "" and report.read_bytes > 0
    (chosen,) = of(BackendChosen, seen)
    assert (chosen.backend, chosen.engine) == (report.backend, report.engine) != ("", "")
    used = [path for path, nbytes in report.paths.items() if nbytes]
    assert [event.path for event in of(PathUsed, seen)] == used != []
    assert {event.name: event.reason for event in of(PathRefused, seen)} == report.refusals
    seconds: dict[str, float] = {}
    for event in of(PhaseEnded, seen):
        seconds[event.phase] = seconds.get(event.phase, 0.0) + event.seconds
    assert seconds == pytest.approx(report.phases)


def test_events_are_frozen_and_in_order_of_time(checkpoint: Path) -> None:
    seen: list[Event] = []
    by_load_file(checkpoint, seen.append)
    times = [event.time for event in seen if not isinstance(event, PhaseEnded)]
    assert times == sorted(times)  # a phase may have ended a while ago
    with pytest.raises(AttributeError):
        seen[0].source = "another"  # type: ignore[misc]


def test_load_calls_in_its_own_thread(checkpoint: Path) -> None:
    threads = set()
    by_load_file(checkpoint, lambda event: threads.add(threading.get_ident()))
    assert threads == {threading.get_ident()}


def test_refused_path_is_reported_before_the_end(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Event] = []
    with faulty.installed(monkeypatch) as faults:
        faults.script(rule(ERRNO, errno.EINVAL))
        by_load_file(checkpoint, seen.append)
    refused = of(PathRefused, seen)
    assert [event.name for event in refused] == ["direct I/O on model-0.safetensors"]
    assert refused[0].reason
    assert len(of(PathUsed, seen)) == 2, "one range goes through the page cache"


def test_retry_is_reported(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Event] = []
    with faulty.installed(monkeypatch) as faults:
        faults.script(rule(ERRNO, errno.EIO))
        by_load_file(checkpoint, seen.append)
    assert [event.count for event in of(Retried, seen)] == [1]


def test_failover_is_reported_with_its_bytes(
    measuring: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    measuring.fault(f"cuFileRead at {MIB}", GPU_ERRNO, 5, times=-1)
    seen: list[Event] = []
    gdsload.load_file(checkpoint, "cuda:0", cache="direct", options=SMALL, on_event=seen.append)
    moved = of(FailedOver, seen)
    assert {event.backends for event in moved} == {"gds_mt -> posix"}
    assert sum(event.nbytes for event in moved) == 2 * (64 << 10)


def test_failed_load_reports_its_error_and_ends(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Event] = []
    with faulty.installed(monkeypatch) as faults:
        faults.script(rule(ERRNO, errno.EBADF, times=faulty.FOR_EVER))
        with pytest.raises(ReadError):
            by_load_file(checkpoint, seen.append)
    assert of(LoadEnded, seen)[-1].report.failure.startswith("ReadError: ")
    assert isinstance(seen[-1], LoadEnded)


def test_prefetch_that_fails_reports_its_error(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source, why in ((tmp_path / "nowhere", "nowhere"), (checkpoint, "no thread")):
        seen: list[Event] = []
        if why == "no thread":
            monkeypatch.setattr(prefetch_module, "start_thread", lambda *_: None)
        with (
            gdsload.prefetch(source, on_event=seen.append) as ahead,
            pytest.raises(gdsload.GdsloadError),
        ):
            ahead.wait()
        assert isinstance(seen[0], LoadStarted) and isinstance(seen[-1], LoadEnded)
        assert why in seen[-1].report.failure


def test_exception_of_the_callable_is_logged_once_and_breaks_nothing(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Event] = []

    def broken(event: Event) -> None:
        calls.append(event)
        raise RuntimeError("no thank you")

    with caplog.at_level(logging.WARNING, "gdsload"):
        for load in LOADS:
            load(checkpoint, broken)
    assert len(calls) > 10
    (record,) = [one for one in caplog.records if "on_event" in one.message]
    assert "broken" in record.message and record.exc_info is not None


class Broken:
    """Without a hash, as a dataclass."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self, event: Event) -> None:
        raise RuntimeError("no thank you")


class Observer:
    def on_event(self, event: Event) -> None:
        raise RuntimeError("no thank you")


@pytest.mark.parametrize(("observer", "records"), [(Broken(), 3), (Observer(), 1)])
def test_failing_object_is_logged_once_in_a_load_or_in_the_process(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, observer: Any, records: int
) -> None:
    with caplog.at_level(logging.WARNING, "gdsload"):
        for _ in range(3):  # a method is another object each time
            gdsload.load_file(checkpoint, on_event=getattr(observer, "on_event", observer))
    assert len([one for one in caplog.records if "on_event" in one.message]) == records


def test_each_callable_that_fails_is_logged(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if they have one name."""

    def made() -> Callable[[Event], None]:
        def broken(event: Event) -> None:
            raise RuntimeError("no thank you")

        return broken

    with caplog.at_level(logging.WARNING, "gdsload"):
        for _ in range(2):
            gdsload.load_file(checkpoint, on_event=made())
    assert len([one for one in caplog.records if "on_event" in one.message]) == 2


def test_interrupt_in_the_callable_ends_the_load(checkpoint: Path) -> None:
    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gdsload.load_file(checkpoint, on_event=interrupted)
    assert gdsload.load_file(checkpoint)


def test_observer_that_reads_from_the_same_file_has_a_report_of_its_own(checkpoint: Path) -> None:
    reports: list[LoadReport] = []

    def read(event: Event) -> None:
        if isinstance(event, LoadStarted) and len(names) > 1:
            opened.get_tensor(names.pop())
        if isinstance(event, LoadEnded):
            reports.append(event.report)

    with gdsload.safe_open(checkpoint, cache="buffered", on_event=read) as opened:
        names = opened.keys()[:2]
        opened.get_tensor(names[0])
    assert len(reports) == 2
    for report in reports:
        assert sum(report.paths.values()) >= report.wanted_bytes > 0
        assert "read" in report.phases


def test_observer_that_cannot_be_called_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="on_event='print' must be a function"):
        telemetry.observe("print")  # type: ignore[arg-type]


def test_observer_gets_the_events_of_all_loads_until_it_is_stopped(checkpoint: Path) -> None:
    seen: list[Event] = []
    stop = telemetry.observe(seen.append)
    try:
        gdsload.load_file(checkpoint)
        with pytest.raises(CheckpointError):
            gdsload.load_file(checkpoint / "nowhere")
        with gdsload.prefetch(checkpoint) as ahead:
            ahead.wait()
    finally:
        stop()
    stop()
    gdsload.load_file(checkpoint)
    assert [event.kind for event in of(LoadEnded, seen)] == ["load", "load", "prefetch"]


def test_observer_that_is_registered_twice_is_stopped_once_by_each_function(
    checkpoint: Path,
) -> None:
    seen: list[Event] = []
    stops = [telemetry.observe(seen.append) for _ in range(2)]
    try:
        stops[0]()
        stops[0]()
        gdsload.load_file(checkpoint)
    finally:
        stops[1]()
    gdsload.load_file(checkpoint)
    assert len(of(LoadStarted, seen)) == 1


def test_phases_of_another_thread_are_reported_by_the_next_call() -> None:
    """While one thread is in the callable, another one records and does not wait."""
    seen: list[Event] = []
    inside, recorded = threading.Event(), threading.Event()

    def slow(event: Event) -> None:
        seen.append(event)
        if isinstance(event, PhaseEnded) and event.phase == "first":
            inside.set()
            assert recorded.wait(60)

    report = LoadReport("model", on_event=slow)

    def record() -> None:
        assert inside.wait(60)
        with report.phase("second"):
            pass
        recorded.set()

    other = threading.Thread(target=record)
    with report.whole():
        other.start()
        with report.phase("first"):
            pass
        other.join()
    assert [event.phase for event in of(PhaseEnded, seen)] == ["first", "second"]


def test_only_what_was_added_is_reported() -> None:
    seen: list[Event] = []
    report = LoadReport("model", on_event=seen.append)
    with report.whole():
        report.retries, report.failovers["a -> b"] = 2, 10
        report.publish()
        report.retries, report.failovers["a -> b"] = 5, 30
        report.refusals["gds"] = "no driver"
        report.publish()
        report.refusals["gds"] = "no GPU"
        report.spans.append(Span("read 4 KiB at 0", "reads of a", 1.0, 2.0))
        report.publish()
        report.publish()
    assert [event.count for event in of(Retried, seen)] == [2, 3]
    assert [event.nbytes for event in of(FailedOver, seen)] == [10, 20]
    assert [event.reason for event in of(PathRefused, seen)] == ["no driver", "no GPU"]
    assert not of(PhaseEnded, seen) and not of(BackendChosen, seen)


def test_report_of_an_observed_load_can_be_sent_to_another_process(checkpoint: Path) -> None:
    events: list[Any] = []
    gdsload.load_file(checkpoint, on_event=lambda event: events.append(event))
    report = gdsload.last_report()
    copied = pickle.loads(pickle.dumps(report))
    assert copied.to_dict() == report.to_dict() and events


class Observer:
    def __call__(self, event: Event) -> None: ...


def failing(source: Path, on_event: events.OnEvent) -> None:
    with pytest.raises(CheckpointError):
        gdsload.load_file(source / "nowhere", on_event=on_event)


def by_failing_prefetch(source: Path, on_event: events.OnEvent) -> None:
    with (
        gdsload.prefetch(source / "nowhere", on_event=on_event) as ahead,
        pytest.raises(CheckpointError),
    ):
        ahead.wait()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("load", [*LOADS, failing, by_prefetch, by_hook, by_failing_prefetch])
def test_load_that_has_ended_does_not_keep_its_observer(
    load: Callable[[Path, events.OnEvent], None], checkpoint: Path
) -> None:
    """Its report stays: as the last one, or that of a prefetch that `started` returns."""
    observer = Observer()
    load(checkpoint, observer)
    gone = weakref.ref(observer)
    del observer
    assert gone() is None


@pytest.mark.usefixtures("no_collector")
def test_prefetch_that_has_ended_does_not_keep_the_function_that_selects_names(
    checkpoint: Path,
) -> None:
    names = Selection(lambda name: name.startswith("0"), "those of the first file")
    with gdsload.prefetch(checkpoint, names=names) as ahead:
        assert ahead.wait()
    gone = weakref.ref(names)
    del names
    assert gone() is None
    assert ahead.report.tensors == 1 and ahead in prefetch_module.started()


def test_load_without_observers_imports_no_events(checkpoint: Path) -> None:
    code = (
        "import sys, gdsload; gdsload.load_file(sys.argv[1]);"
        " print(sorted({'gdsload.events', 'gdsload.telemetry'} & set(sys.modules)));"
        " print('on_event' in str(gdsload.last_report().to_dict()))"
    )
    ran = subprocess.run([sys.executable, "-c", code, checkpoint], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "[]\nFalse\n"), ran.stderr


def test_load_inside_another_one_is_counted_once() -> None:
    seen: list[Event] = []
    own: list[Event] = []
    stop = telemetry.observe(seen.append)
    try:
        outer = LoadReport("model", on_event=own.append)
        with outer.whole(), held(enclosing, outer):
            inner = LoadReport("part", on_event=own.append)
            with suppress(ValueError), inner.whole():
                inner.paths["posix/threads/direct"] = 10
                raise ValueError("a library handles it")
    finally:
        stop()
    for events_of in (seen, own):
        assert len(of(LoadStarted, events_of)) == 1
        (ended,) = of(LoadEnded, events_of)
        assert ended.report is outer
        assert [event.nbytes for event in of(PathUsed, events_of)] == [10]
    assert outer.failure == "" and outer.paths == inner.paths


def test_observer_that_comes_during_a_load_hears_of_those_inside_it() -> None:
    seen: list[Event] = []
    own: list[Event] = []
    outer = LoadReport("model", on_event=own.append)
    with outer.whole(), held(enclosing, outer):
        stop = telemetry.observe(seen.append)
        with LoadReport("part", on_event=own.append).whole():
            pass
        stop()
    assert [event.report.source for event in of(LoadEnded, seen)] == ["part"]
    assert [event.report.source for event in of(LoadEnded, own)] == ["model"]


def test_load_inside_a_report_without_events_has_its_own() -> None:
    seen: list[Event] = []
    outer = LoadReport("accelerated")  # which is no load
    with held(enclosing, outer), LoadReport("model", on_event=seen.append).whole():
        pass
    assert [event.report.source for event in of(LoadEnded, seen)] == ["model"]
