"""A fixed sample of loads under failing system calls; `make faults` runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import injector

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600  # the sample takes some twenty; a machine may be busy


@pytest.mark.slow
def test_loads_under_failing_calls_end_in_exact_bytes_or_one_error(tmp_path: Path) -> None:
    if why := injector.why_not():
        pytest.skip(f"system calls cannot be injected here: {why}")
    output = tmp_path / "faults.json"
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", "--sample", "--every", "8", "--output", output],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert output.exists(), ended.stderr[-3000:]
    result = json.loads(output.read_text())
    assert result["violations"] == []
    assert result["loads"] > 20 and result["cases"] > 50
    ends = " ".join(counts for rows in result["rows"].values() for counts in rows.values())
    assert "exact" in ends and "error" in ends
    assert ended.returncode == 0
