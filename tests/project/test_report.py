"""The report of a load: its times and its text."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from gdsload.report import LoadReport, Span, size


def report_of(*spans: Span, seconds: float = 10.0) -> LoadReport:
    report = LoadReport("model")
    report.seconds = seconds
    report.spans = list(spans)
    for name, track, start, end in spans:
        if track == "phases":
            report.phases[name] = report.phases.get(name, 0.0) + end - start
    return report


def test_exclusive_phases_add_up_to_the_seconds_of_the_load() -> None:
    report = report_of(
        Span("open", "phases", 1.0, 2.0),
        Span("wait", "phases", 4.0, 7.0),
        Span("wait", "phases", 8.0, 8.5),
        Span("transformers", "phases", 3.0, 9.0),
    )
    found = report.exclusive_phases()
    assert found == {"open": 1.0, "transformers": 2.5, "wait": 3.5, "other": 3.0}
    assert sum(found.values()) == report.seconds


def test_rate_is_that_of_the_reads_without_imports() -> None:
    report = report_of(
        Span("import torch", "phases", 0.0, 8.0),
        Span("read 4096 KiB at 0", "reads of a", 1.0, 2.0),
        Span("read 4096 KiB at 4194304", "reads of a", 1.5, 3.0),
    )
    report.tensors, report.wanted_bytes, report.read_bytes = 1, 3_000_000_000, 4_000_000_000
    assert (report.reading_seconds, report.rate) == (2.0, 2e9)
    first, *others = report.summary().splitlines()
    assert (
        first == "model -> cpu: 1 tensor, 3.00 GB in 10.000 s, imports 8.000 s of them; 0.00 s CPU"
    )
    assert "read: 4.00 GB in 2.000 s, 2.00 GB/s" in others


def test_seconds_of_reading_are_those_with_a_read_in_flight() -> None:
    report = report_of(
        Span("read 1 KiB at 2048", "reads of b", 8.0, 9.0),  # of the next window
        Span("read 1 KiB at 0", "reads of a", 1.0, 4.0),
        Span("read 1 KiB at 1024", "reads of a", 2.0, 3.0),
        Span("open", "head start", 0.0, 7.0),  # a phase of a prefetch
    )
    assert report.reading_seconds == 4.0


def test_spans_that_are_made_later_are_there_for_whoever_asks() -> None:
    asked: list[int] = []

    def reads() -> Iterator[Span]:
        asked.append(1)
        yield Span("read 1 KiB at 0", "reads of a", 1.0, 4.0)

    report = report_of(Span("open", "phases", 0.0, 1.0))
    times = [(1_000_000_000, 4_000_000_000), (5_000_000_000, 0), (0, 6_000_000_000)]
    report.add_reads(times, reads)
    with report.phase("read"):
        pass
    report.read_bytes = 1024
    assert report.reading_seconds == 3.0
    assert report.to_dict()["bytes_per_second"] == 1024 / 3
    assert "read: 1.02 kB in 3.000 s" in report.summary()
    assert asked == []
    names = ["open", "read", "read 1 KiB at 0"]
    assert [span.name for span in report.spans] == names and asked == [1]
    assert report.reading_seconds == 3.0
    later = [Span("read 1 KiB at 1024", "reads of a", 4.0, 6.0)]
    report.add_reads([(4_000_000_000, 6_000_000_000)], lambda: later)
    copy = pickle.loads(pickle.dumps(report))
    total = LoadReport("all")
    total.add(report)
    assert copy.reading_seconds == total.reading_seconds == 5.0


def test_summary_escapes_names_from_files() -> None:
    report = report_of()
    report.refusals["direct I/O on a\x1b[2J\nb.safetensors"] = "refused"
    assert report.summary().splitlines()[-1] == (
        r"refused: direct I/O on a\x1b[2J\nb.safetensors: refused"
    )


def test_sum_of_reports_has_all_counts_and_texts() -> None:
    first, second = report_of(seconds=1.0), report_of(seconds=2.0)
    first.tensors, first.paths, first.depth, first.device = 2, {"mapped": 10}, 16, "cpu"
    second.tensors, second.paths, second.depth, second.device = 3, {"mapped": 5}, 4, "cuda:0"
    second.backend, second.failure = "posix", "ReadError: x"
    total = LoadReport("both")
    total.add(first)
    total.add(second)
    assert (total.tensors, total.paths, total.depth, total.seconds) == (5, {"mapped": 15}, 16, 3.0)
    assert (total.source, total.device) == ("both", "cpu,cuda:0")
    assert (total.backend, total.failure) == ("posix", "ReadError: x")
    assert (first.tensors, first.paths) == (2, {"mapped": 10})


def test_summary_says_if_a_backend_names_no_path() -> None:
    report = LoadReport("model")
    assert "I/O paths: no bytes were read" in report.summary()
    report.read_bytes = 5
    assert "I/O paths: not reported by the backend" in report.summary()


def test_load_without_reads_has_no_rate() -> None:
    report = report_of()
    assert report.rate == 0.0
    assert "read:" not in report.summary()


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (656_768, "656.77 kB"), (1.5e9, "1.50 GB")]
)
def test_size_has_a_fitting_unit(nbytes: float, text: str) -> None:
    assert size(nbytes) == text
