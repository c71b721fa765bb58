"""Results and refusals of `gdsload bench start`, with fixed times in place of measured ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from gdsload.cli import measuring
from gdsload.synthetic import checkpoints

start, render, records, pictures, tables = (
    measuring.program(name) for name in ("start", "render", "records", "pictures", "tables")
)
READY = {
    "imports": 3.0,
    "read": 1.0,
    "stock": 5.0,
    "gdsload": 4.5,
    "one call": 3.6,
    "prefetch": 3.2,
}


@pytest.fixture(autouse=True)
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "SETTLE_SECONDS", 0.0)


@pytest.fixture
def source(tmp_path: Path, disk: None) -> Path:
    checkpoints.write("tiny", tmp_path / "tiny")
    return tmp_path / "tiny"


def fake_child(arm: str, source: Path, bytecode: Path) -> dict[str, Any]:
    """The result of a child that took the time of its arm in READY."""
    marks = {"imports": min(READY["imports"], READY[arm]), "loaded": READY[arm] - 0.1}
    return {
        "marks": {**marks, "ready": READY[arm]},
        "checksum": 7 if arm in start.MODELS else None,
        "reads": [["read", 0.1, 0.9]] if arm == "prefetch" else [],
    }


@pytest.mark.usefixtures("disk")
def test_start_child_reports_its_marks(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(1 << 20)}  # smaller ones are mapped without a read
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    found = start.run("read", tmp_path, tmp_path / "bytecode")
    assert found["arm"] == "read"
    assert 0 < found["marks"]["imports"] <= found["seconds"] == found["marks"]["ready"]
    assert found["reads"]


def test_start_failing_child_is_refused(tmp_path: Path) -> None:
    with pytest.raises(start.Refused, match="CheckpointNotFound"):
        start.child("read", tmp_path, tmp_path)


def test_start_overlapping_reads_are_merged() -> None:
    spans = [("b", 3.0, 4.0), ("a", 0.0, 1.0), ("c", 0.5, 2.0), ("d", 1.5, 1.7)]
    assert start.joined(spans, 0.0) == [[0.0, 2.0], [3.0, 4.0]]
    assert start.joined(spans, 0.9) == [[0.0, 2.0], [3.0, 4.0]]
    assert start.joined(spans, 1.0) == [[0.0, 4.0]]


def test_start_runs_alternate(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "child", fake_child)
    first = [run["arm"] for run in start.measured(source, 3)[:: len(start.ARMS)]]
    assert first == ["imports", "prefetch", "read"]


def test_start_result_has_table_and_picture(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(start, "child", fake_child)
    path = tmp_path / "start-tiny.json"
    assert start.main([str(source), "--rounds", "5", "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    found = tables.by_label(result)
    assert {arm: kept["seconds"] for arm, kept in found.items()} == {
        arm: [seconds] * 5 for arm, seconds in READY.items()
    }
    assert start.floor(result) == READY["imports"]
    assert {arm: kept["reads"] for arm, kept in found.items() if kept["reads"]} == {
        "prefetch": [[0.1, 0.9]]
    }
    shown = render.rendered(path.name, tmp_path)
    assert "| prefetch |" in shown
    assert "+7%" in shown
    assert "within 10% was wanted: met" in shown
    printed = capsys.readouterr()
    assert shown.splitlines()[3] in printed.out
    assert printed.err.splitlines()[0] == "  1/5 imports: 3.000 s"
    assert "  5/5 prefetch: 3.200 s" in printed.err.splitlines()
    assert pictures.drawing(result).text().count("3.20 s") == 1
    assert re.search(r"versions: torch \d\S+, transformers \d", start.notes(result))
    found["prefetch"]["seconds"] = [3.4] * 5
    assert "missed" in start.notes(result)
    found["imports"]["seconds"] = [2.0, 2.0, 3.0, 4.0, 4.0]
    found["prefetch"]["seconds"] = [2.4, 2.4, 3.6, 2.5, 2.5]  # slower than most of its own rounds
    assert "-17% (+20% by rounds), within 10% was wanted: missed" in start.notes(result)
    found["prefetch"]["seconds"] = [3.4] * 2
    assert "within 10% was wanted: 2 repeats cannot tell" in start.notes(result)


def test_start_warm_weights_are_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: float) -> None:
        for file in source.glob("*.safetensors"):
            file.read_bytes()

    monkeypatch.setattr(start, "child", fake_child)
    assert start.run("stock", source, source)["seconds"] == READY["stock"]
    monkeypatch.setattr(start.time, "sleep", read)
    with pytest.raises(
        records.Refused, match=r"another process read [\d,]+ bytes of it before stock"
    ):
        start.run("stock", source, source)


def test_start_different_models_are_refused(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        start, "child", lambda arm, *where: {**fake_child(arm, *where), "checksum": len(arm)}
    )
    path = tmp_path / "start.json"
    assert start.main([str(source), "--rounds", "1", "--output", str(path)]) == 1
    assert "do not agree" in capsys.readouterr().err
    assert not path.exists()
