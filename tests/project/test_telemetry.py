"""Spans and metrics of loads, with the SDK of OpenTelemetry and the client of Prometheus."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import gdsload
from gdsload import telemetry
from gdsload.errors import CheckpointError
from gdsload.report import LoadReport


@pytest.fixture
def spans() -> Iterator[Any]:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    stop = telemetry.record_spans(provider)
    exporter.tracer = provider.get_tracer("service")  # type: ignore[attr-defined]
    yield exporter
    stop()


@pytest.fixture
def registry() -> Iterator[Any]:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    stop = telemetry.record_metrics(registry)
    yield registry
    stop()
    assert list(registry.collect()) == []


def test_load_is_a_span_with_its_phases_below_the_current_span(
    spans: Any, checkpoint: Path
) -> None:
    with spans.tracer.start_as_current_span("startup") as startup:
        gdsload.load_file(checkpoint, cache="direct")
    report = gdsload.last_report()
    by_name = {span.name: span for span in spans.get_finished_spans()}
    load = by_name.pop("gdsload.load")
    outer = by_name.pop("startup")
    assert load.parent.span_id == startup.get_span_context().span_id
    assert outer.start_time <= load.start_time <= load.end_time <= outer.end_time
    assert load.end_time - load.start_time == pytest.approx(report.seconds * 1e9, rel=0.01)
    assert load.attributes["gdsload.source"] == str(checkpoint)
    assert load.attributes["gdsload.read_bytes"] == report.read_bytes
    for path, nbytes in report.paths.items():
        assert load.attributes.get(f"gdsload.path.{path}", 0) == nbytes
    assert load.status.is_ok
    assert by_name.keys() == report.phases.keys()
    for name, phase in by_name.items():
        assert phase.parent.span_id == load.context.span_id
        assert phase.attributes["gdsload.seconds"] == pytest.approx(report.phases[name])


def test_phase_that_repeats_is_one_span(spans: Any, checkpoint: Path) -> None:
    assert len(list(gdsload.stream(checkpoint, cache="direct", window_bytes=1))) == 2
    (phase,) = [span for span in spans.get_finished_spans() if span.name == "hand over"]
    assert phase.attributes["gdsload.count"] == 2
    assert phase.attributes["gdsload.seconds"] * 1e9 <= phase.end_time - phase.start_time


def test_failed_load_is_a_span_with_an_error(spans: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        gdsload.load_file(tmp_path / "nowhere.safetensors")
    (load,) = [span for span in spans.get_finished_spans() if span.name == "gdsload.load"]
    assert not load.status.is_ok and "nowhere" in load.status.description


def test_refusals_are_events_of_the_span(spans: Any) -> None:
    report = LoadReport("model")
    with report.whole():
        report.refusals["gds"] = "no driver"
    (load,) = spans.get_finished_spans()
    (event,) = load.events
    assert dict(event.attributes) == {"gdsload.name": "gds", "gdsload.reason": "no driver"}


def test_failovers_are_events_of_the_span(spans: Any) -> None:
    report = LoadReport("model")
    with report.whole():
        report.failovers["gds -> posix"] = 4096
    (load,) = spans.get_finished_spans()
    (event,) = load.events
    assert event.name == "failed over"
    assert dict(event.attributes) == {"gdsload.backends": "gds -> posix", "gdsload.bytes": 4096}


def test_metrics_count_loads_bytes_and_seconds(registry: Any, checkpoint: Path) -> None:
    reports = []
    for _ in range(2):
        gdsload.load_file(checkpoint, cache="direct")
        reports.append(gdsload.last_report())
    value = registry.get_sample_value
    load = {"kind": "load"}
    assert value("gdsload_loads_total", load) == 2
    for path in reports[0].paths:
        counted = value("gdsload_bytes_total", load | {"path": path})
        assert counted == sum(report.paths[path] for report in reports)
    seconds = sum(
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "gdsload_phase_seconds_total"
    )
    total = sum(report.seconds for report in reports)
    assert seconds == pytest.approx(total)
    assert value("gdsload_load_seconds_sum", load) == pytest.approx(total)
    assert value("gdsload_read_bytes_per_second_count", load) == 2
    rates = sum(report.rate for report in reports)
    assert value("gdsload_read_bytes_per_second_sum", load) == pytest.approx(rates)
    assert value("gdsload_retries_total", load) == 0


def test_metrics_count_prefetches_apart(registry: Any, checkpoint: Path) -> None:
    with gdsload.prefetch(checkpoint, cache="direct") as ahead:
        ahead.wait()
        gdsload.load_file(checkpoint)
    value = registry.get_sample_value
    path = {"kind": "load", "path": "prefetched"}
    assert value("gdsload_bytes_total", path) == ahead.report.wanted_bytes
    for path_of_reads, nbytes in ahead.report.paths.items():
        labels = {"kind": "prefetch", "path": path_of_reads}
        assert value("gdsload_bytes_total", labels) == nbytes


def test_metrics_count_failures_refusals_failovers_and_retries(registry: Any) -> None:
    with suppress(ValueError), LoadReport("model").whole():
        raise ValueError("it is broken: badly")
    report = LoadReport("model")
    with report.whole():
        report.retries = 3
        report.failovers["gds -> posix"] = 4096
        report.refusals = {
            "direct I/O on model-1.safetensors": "no",
            "direct I/O on model-2.safetensors": "no",
            "gds": "no driver",
        }
    value, load = registry.get_sample_value, {"kind": "load"}
    assert value("gdsload_loads_total", load) == 2
    assert value("gdsload_failed_loads_total", load | {"error": "ValueError"}) == 1
    assert value("gdsload_retries_total", load) == 3
    assert value("gdsload_failover_bytes_total", load | {"backends": "gds -> posix"}) == 4096
    assert value("gdsload_refusals_total", load | {"name": "direct I/O"}) == 1
    assert value("gdsload_refusals_total", load | {"name": "gds"}) == 1


def test_labels_of_metrics_do_not_grow_with_the_sources(registry: Any) -> None:
    report = LoadReport("model")
    with report.whole():
        for number in range(3):
            peer = f"nixl://10.0.0.{number}:7700/m"
            report.failovers[f"{peer} -> s3://bucket/m"] = 1
            report.failovers[f"/models/{number} -> {peer}"] = 10
            report.refusals[peer] = "it does not answer"
    value, load = registry.get_sample_value, {"kind": "load"}
    assert value("gdsload_failover_bytes_total", load | {"backends": "nixl -> s3"}) == 3
    assert value("gdsload_failover_bytes_total", load | {"backends": "directory -> nixl"}) == 30
    assert value("gdsload_refusals_total", load | {"name": "nixl"}) == 1


def test_metrics_are_registered_once(registry: Any) -> None:
    with pytest.raises(ValueError, match="Duplicated"):
        telemetry.record_metrics(registry)


def test_metrics_of_a_failed_call_are_removed_and_stop_may_be_called_again() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    taken = client.Counter("gdsload_retries", "Of the application", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        telemetry.record_metrics(registry)
    assert [metric.name for metric in registry.collect()] == ["gdsload_retries"]
    registry.unregister(taken)
    stop = telemetry.record_metrics(registry)
    stop()
    stop()
    assert list(registry.collect()) == []


@pytest.mark.parametrize("function", ["record_spans", "record_metrics"])
def test_missing_package_names_the_extra(function: str) -> None:
    code = f"""
import sys
sys.modules["opentelemetry"] = sys.modules["prometheus_client"] = None
from gdsload import telemetry
try:
    telemetry.{function}()
except ImportError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install '.[telemetry]'" in ran.stdout, ran.stderr


def test_import_of_telemetry_imports_neither_package() -> None:
    code = (
        "import gdsload.telemetry, sys;"
        " print(*{'opentelemetry', 'prometheus_client', 'torch'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stderr
