"""Engines side by side, and each loader at its best: what is tried, kept and shown.

No test looks at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command import run
from gdsload.backends.posix.engines import ENGINES
from gdsload.cli import measuring

choice, cold, engines, judge, render, tune = (
    measuring.program(name) for name in ("choice", "cold", "engines", "judge", "render", "tune")
)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are made up, the faster the longer an arm's label is."""

    def made_up(self: Any, arm: Any, memory: Any, *, checked: bool) -> dict[str, Any]:
        return {
            "seconds": 1 / len(arm.label),
            "touched_bytes": 656768,
            "versions": {},
            "cache": "evicted",
        }

    monkeypatch.setattr(judge.Judge, "run", made_up)


def test_engines_arms_have_only_applicable_settings() -> None:
    options = engines.arguments(["x", "--request", "1M", "--in-flight", "4", "8"])
    assert list(engines.grid(options)) == [
        *(
            f"gdsload:engine=threads,request_bytes=1048576,depth={depth},pages=auto"
            for depth in (4, 8)
        ),
        *(
            f"gdsload:engine={engine},request_bytes=1048576,depth={depth}"
            for engine in ENGINES[1:]
            for depth in (4, 8)
        ),
        *(f"gdsload:backend=gds,request_bytes=1048576,depth={depth}" for depth in (4, 8)),
        *(f"gdsload:backend=gds_mt,request_bytes=1048576,threads={count}" for count in (4, 8)),
    ]


@pytest.mark.usefixtures("no_processes", "disk")
def test_engines_table_has_each_combination(tiny_checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "engines.json"
    answer = run(
        "bench", "engines", tiny_checkpoint, "--engine", "threads", "gds", "gds_mt", "--request",
        "4K", "1M", "--in-flight", "1", "4", "--repeats", "1", "--state", "none", "--neighbours",
        "--output", output,
    )  # fmt: skip
    assert answer.exit_code == 0, answer.output
    kept = json.loads(output.read_text())
    assert kept["kind"] == "engines"
    assert kept["left_out"] == dict.fromkeys(("gds", "gds_mt"), "it reaches CUDA devices, not cpu")
    assert len(kept["arms"]) == 4
    assert "posix/threads, pages=auto" in answer.stdout
    assert "| request, GB/s | 1 in flight | 4 in flight |" in answer.stdout
    assert "left out: gds, gds_mt: it reaches CUDA devices, not cpu" in answer.stdout
    assert "posix/threads" in render.rendered(output.name, tmp_path)
    assert run("bench", "report", output).exit_code == 0
    assert "requests of 1M" in output.with_suffix(".svg").read_text()


def test_engines_partly_failed_backend_names_missing_combinations() -> None:
    made, missing = (f"gdsload:engine=uring,request_bytes=4096,depth={depth}" for depth in (1, 2))
    parse = measuring.program("arms").parse
    result = {
        "arms": [parse(made)._asdict()],
        "left_out": {missing: "why", "gdsload:backend=gds,depth=1": "no"},
    }
    assert engines.shortened(result) == {missing: "why", "gds": "no"}


def test_engines_unusable_backend_is_left_out_with_reason(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    options = cold.arguments([str(tiny_checkpoint)])
    arms, left_out = choice.chosen(options, tiny_checkpoint, 1 << 40)
    there = {arm.label for arm in arms}
    for engine in ("uring", "linuxaio", "threads"):
        assert f"gdsload:engine={engine}" in there
    for backend in ("gds", "gds_mt"):
        assert left_out[f"gdsload:backend={backend}"] == "it reaches CUDA devices, not cpu"
    options.warm = True
    arms, left_out = choice.chosen(options, tiny_checkpoint, 1 << 40)
    assert "gdsload" in {arm.label for arm in arms}
    for engine in ("uring", "linuxaio", "threads"):
        assert "are mapped: no engine reads" in left_out[f"gdsload:engine={engine}"]
    options.device = "cuda:0"  # what cuFile can do there is asked in the arm's own process
    arms, left_out = choice.chosen(options, tiny_checkpoint, 1 << 40)
    assert {"gdsload:backend=gds", "gdsload:backend=gds_mt"} <= {arm.label for arm in arms}


@pytest.mark.usefixtures("no_processes", "disk")
def test_tune_result_is_used_by_cold(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tune,
        "CANDIDATES",
        {
            "gdsload": ("gdsload", "gdsload:engine=threads"),
            "runai": ("runai",),
        },
    )
    output = tmp_path / "best.json"
    words = ["--repeats", "1", "--state", "none", "--neighbours"]
    answer = run("bench", "tune", tiny_checkpoint, *words, "--arms", "gdsload", "--output", output)
    assert answer.exit_code == 0, answer.output
    kept = json.loads(output.read_text())
    assert [arm["label"] for arm in kept["arms"]] == ["gdsload", "gdsload:engine=threads"]
    assert kept["best"] == {"gdsload": "gdsload:engine=threads"}
    assert "the lowest median of each kind: gdsload:engine=threads" in answer.stdout
    assert "of each kind: gdsload:engine=threads" in run("bench", "report", output).stdout
    options = cold.arguments([str(tiny_checkpoint), "--arms", "gdsload", "--best", str(output)])
    arms, _ = choice.chosen(options, tiny_checkpoint, 1 << 40)
    assert {arm.label for arm in arms} == {"gdsload", kept["best"]["gdsload"]}


@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize("kept", ["", "[]", '{"best": 3}', '{"best": {"gdsload": "nonsense"}}'])
def test_tune_invalid_settings_are_refused(
    kept: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (path := tmp_path / "best.json").write_text(kept)
    answer = run("bench", "cold", tiny_checkpoint, "--best", path, "--output", tmp_path / "x.json")
    assert answer.exit_code == 1
    assert f"no result: --best {path}: this is no" in answer.stderr


def test_tune_unknown_kind_is_refused(tiny_checkpoint: Path) -> None:
    answer: Any = run("bench", "tune", tiny_checkpoint, "--arms", "gdsload:depth=4")
    assert answer.exit_code == 2
    assert "tune has no settings of gdsload to compare; it takes: bare, " in answer.stderr
