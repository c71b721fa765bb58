"""What gpu-check found on a machine with a GPU, as a kept result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpu, render

MACHINE = {
    "kernel": "6.18",
    "cpu": "A CPU",
    "cores": 16,
    "memory_bytes": 128 << 30,
    "filesystem": "ext4",
    "mount_options": "rw",
    "disk": {"name": "vda"},
    "versions": {"torch": "2.11.0"},
    "gpus": ["NVIDIA H100 80GB HBM3, 81559 MiB, 580"],
}


def loads(arm: str, seconds: list[float], table: str = "warm m") -> list[dict[str, Any]]:
    return [
        {
            "section": "tables",
            "name": arm,
            "table": table,
            "arm": arm,
            "round": number,
            "verdict": "ok",
            "seconds": took,
            "cpu_s": took / 2,
            "bytes": 1_000_000_000,
        }
        for number, took in enumerate(seconds)
    ]


def checked(directory: Path, *loads: list[dict[str, Any]]) -> Path:
    rows: list[dict[str, Any]] = [
        {"section": "facts", "name": "machine", "verdict": "ok", "machine": MACHINE},
        {"section": "facts", "name": "versions", "verdict": "ok", "cuda": 13000},
        {
            "section": "micro",
            "name": "host to device: allocated",
            "verdict": "ok",
            "1024 KiB, 1 streams, GB/s": 40.0,
            "2048 KiB, 1 streams, GB/s": 50.0,
            "2048 KiB, 4 together, 1 streams, GB/s": 54.0,
        },
        {
            "section": "model",
            "name": "from_pretrained, dtype=auto",
            "verdict": "exact",
            "gdsload_seconds": [0.1, 0.2],
            "transformers_seconds": [0.4, 0.5],
        },
    ]
    rows += [row for table in loads for row in table]
    lines = "\n".join(map(json.dumps, rows))
    (directory / "results.jsonl").write_text(lines + '\n{"section": "cut sho')
    return directory


def test_result_has_each_load_and_its_page_the_medians_without_the_first(tmp_path: Path) -> None:
    found = checked(
        tmp_path,
        loads("pinned", [0.05, 0.02, 0.02, 0.02]),
        loads("gdsload", [0.9, 0.04, 0.02, 0.04]),
        loads("runai", [0.5, 0.08, 0.06, 0.08]),
        [dict(loads("runai", [9.0])[0], verdict="refused: no memory")],
    )
    kept = tmp_path / "kept.json"
    assert gpu.main([str(found), "--commit", "abc", "--output", str(kept)]) == 0
    result = json.loads(kept.read_text())
    assert (result["kind"], result["commit"], result["machine"]) == ("gpu", "abc", MACHINE)
    (table,) = result["tables"]
    assert {arm["label"]: arm["seconds"] for arm in table["arms"]}["runai"] == [
        0.5,
        0.08,
        0.06,
        0.08,
    ]
    text = render.words_of(kept).table
    assert "| gdsload |    0.040 | 0.020 to 0.040 | 25.0 |  0.02 |         0.900 |     3 |" in text
    assert "from_pretrained, dtype=auto | 0.10, 0.20 |   0.40, 0.50 |" in text
    assert "|  40.0 |  50.0 |" in text
    assert {each["verdict"] for each in result["claims"]} <= {"met", "missed", "not measured"}


@pytest.mark.parametrize(
    ("ours", "share", "fastest"),
    [([0.9, 0.021, 0.021, 0.021], "met", "met"), ([0.9, 0.05, 0.05, 0.05], "missed", "missed")],
)
def test_targets_are_the_bus_and_the_fastest_other_loader(
    ours: list[float], share: str, fastest: str, tmp_path: Path
) -> None:
    source = checked(
        tmp_path,
        loads("pinned", [0.02, 0.02, 0.02, 0.02]),
        loads("gdsload", ours),
        loads("gdsload:engine=uring", [0.01, 0.01, 0.01, 0.01]),  # is no other loader
        loads("runai", [0.04, 0.04, 0.04, 0.04]),
        loads("safetensors-mmap", [0.01, 0.01, 0.01]),  # too few
    )
    aims = gpu.aims(gpu.result_of(source, "abc"))
    assert [each[3] for each in aims] == [share, fastest]
    assert "runai 0.040 s" in aims[1][2]


def test_few_loads_are_no_measurement(tmp_path: Path) -> None:
    ours, others = loads("gdsload", [0.9, 0.02, 0.02]), loads("runai", [0.04] * 9)
    aims = gpu.aims(gpu.result_of(checked(tmp_path, ours, others), "abc"))
    assert [each[2:] for each in aims] == [["not measured: 2 loads of gdsload", ""]]
    aims = gpu.aims(gpu.result_of(checked(tmp_path, others, loads("pinned", [0.02] * 9)), "abc"))
    assert [each[2] for each in aims] == ["not measured: 0 loads of gdsload"] * 2
    ours = loads("gdsload", [0.02] * 9)
    aims = gpu.aims(gpu.result_of(checked(tmp_path, ours, loads("pinned", [0.02] * 2)), "abc"))
    assert [each[2] for each in aims] == [
        "not measured: 1 loads of pinned",
        "not measured: 0 loads of another loader",
    ]


def test_directory_without_a_check_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path), "--commit", "abc", "--output", str(tmp_path / "kept.json")]
    assert gpu.main(words) == 1
    assert "there is no results.jsonl of gpu-check" in capsys.readouterr().err
    assert not (tmp_path / "kept.json").exists()
