"""A short run of `make soak`, and its judgement of what grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import soak


@pytest.mark.slow
def test_loads_in_two_processes_are_exact_and_leave_nothing(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    status = soak.main(
        ["--loads", "120", "--processes", "2", "--dir", str(tmp_path), "--output", str(output)]
    )
    (row,) = json.loads(output.read_text())["rows"]
    assert row["loads"] >= 120 and row["samples"] > 25 and len(row["kinds"]) > 30
    # After so few loads, allocators have not reached their size.
    assert [text for text in row["violations"] if not text.startswith("memory")] == []
    assert status == bool(row["violations"])


def samples(**growing: int) -> list[soak.Sample]:
    """Hundred samples of a process in which these measures grow with each of them."""
    return [
        {name: 1000 + (number * growing.get(name, 0)) for name in soak.BOUNDS}
        for number in range(100)
    ]


@pytest.mark.parametrize("measure", soak.BOUNDS)
def test_measure_that_grows_with_each_sample_is_reported(measure: str) -> None:
    assert soak.faults_of(soak.growth_of(samples())) == []
    step = soak.BOUNDS[measure] // 99 + 1
    (fault,) = soak.faults_of(soak.growth_of(samples(**{measure: step})))
    assert fault.startswith(measure)
