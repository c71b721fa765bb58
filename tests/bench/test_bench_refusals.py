"""What the benchmarks refuse of files, disks and kept results, and whether the reason helps.

No test looks at a time.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command import run
from gdsload.cli import measuring
from gdsload.memory import page_cache
from gdsload.synthetic import checkpoints

arms, fio, instructions, judge, places = (
    measuring.program(name) for name in ("arms", "fio", "instructions", "judge", "places")
)
records, truth = (measuring.program(name) for name in ("records", "truth"))


@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize("command", ["cold", "io", "start"])
def test_file_of_other_user_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(file: object, *_: int) -> int:
        raise PermissionError(errno.EPERM, "the kernel tells it only to its owner")

    checkpoints.write("tiny", tmp_path / "tiny")
    monkeypatch.setattr(page_cache, "resident_bytes", unknown)
    answer = run("bench", command, tmp_path / "tiny", "--output", tmp_path / "x.json")
    assert answer.exit_code == 1
    assert "model-00001-of-00002.safetensors: its residency in the page" in answer.stderr
    assert "only to its owner; take a copy of your own, or be root" in answer.stderr


def test_source_that_is_no_checkpoint_is_refused_before_the_first_arm(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    answer = run("bench", "cold", tmp_path / "notes.txt", "--output", tmp_path / "x.json")
    assert answer.exit_code == 1
    assert answer.stderr.count("notes.txt") == answer.stderr.count("\n") == 1


def test_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(1 << 14))

    def closed(*_: object, **__: object) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(records.Refused, match=r"model\.safetensors: Permission denied"):
        truth.Truth(path)


def test_sparse_file_refusal_names_holes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(8 << 20))
    short = {"resident_before_bytes": 0, "device_read_bytes": 4096, "touched_bytes": 8 << 20}
    one = judge.Judge(judge.Conditions(tmp_path))
    assert str(one.objection(short)).endswith("were touched")
    with path.open("wb") as sparse:
        sparse.truncate(8 << 20)
    assert str(one.objection(short)).endswith("the rest are holes, or it is compressed")


@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize(
    ("device", "own", "why"),
    [
        (900 << 20, 8 << 20, "the disk read 943,718,400 bytes for files of 8,388,608"),
        (4096, 4096, "the disk read 4,096 bytes, but 8,388,608 were touched"),
        (None, 4096, "the arm read 4,096 bytes"),
    ],
)
def test_fio_arm_is_judged(
    device: int | None, own: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(8 << 20))
    found = {
        "touched_bytes": 0,
        "read_bytes": 8 << 20,
        "own_read_bytes": own,
        "device_read_bytes": device,
    }
    monkeypatch.setattr(fio, "run", lambda *_: found)
    one = judge.Judge(judge.Conditions(tmp_path))
    with pytest.raises(judge.NotWhatItSays, match=f"fio, 3 times in a row: {why}"):
        one.run(arms.parse("fio"))
    monkeypatch.setattr(fio, "run", lambda *_: {**found, "device_read_bytes": 8 << 20})
    assert one.run(arms.parse("fio"))["resident_before_bytes"] == 0


@pytest.mark.parametrize(
    "arm", ["bare:pages=x", "bare:request_kib=0", "bare:request_kib=6", "bare:depth=0",
            "bare:depth=many", "bare:memory=", "bare:nonsense=1"],
)  # fmt: skip
def test_bare_arm_invalid_setting_is_refused(arm: str) -> None:
    """bare.c would take it for another, or read nothing without end."""
    answer = run("bench", "cold", "x", "--arms", arm)
    assert answer.exit_code == 2
    assert "it has request_kib=4, 8 ... 1048576, depth=1 ... 4096" in answer.stderr


@pytest.mark.parametrize(
    "settings, why",
    [("dtype=float32", "dtype=float32 needs threads="),
     ("cache=mapped,threads=2", "cache=mapped needs dtype=float32")],
)  # fmt: skip
def test_bare_arm_setting_without_the_one_that_it_needs_is_refused(settings: str, why: str) -> None:
    answer = run("bench", "cold", "x", "--arms", f"bare:{settings}")
    assert answer.exit_code == 2
    assert why in answer.stderr


@pytest.mark.parametrize("name", ["../elsewhere", "", "a/b"])
def test_result_name_with_slash_is_refused(name: str) -> None:
    answer = run("bench", "cold", "x", "--name", name)
    assert answer.exit_code == 2
    assert "is no name" in answer.stderr


@pytest.mark.usefixtures("disk")
def test_sweep_batch_above_queue_depth_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(20 << 20))
    monkeypatch.setattr(truth.Device, "measure", lambda self: self.limits.append(1e9) or 1e9)
    answer = run("bench", "io", path, "--block", "4K", "--batch", "4097", "--engine", "threads",
                 "--output", tmp_path / "x.json")  # fmt: skip
    assert answer.exit_code == 1
    assert "depth=4097 must be from 1 to 4096" in answer.stderr


def test_deps_missing_wheels_leave_installed_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "CACHE", tmp_path)
    (tmp_path / "peers").mkdir()
    answer = run("bench", "deps", "--wheels", tmp_path / "nowhere")
    assert answer.exit_code == 2
    assert "there is no such directory" in answer.stderr
    assert (tmp_path / "peers").is_dir()


def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((places.RESULTS / "warm-qwen3-0.6b-small.json").read_text())
    return found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no result that can be shown here"),
        ("[]", "no result that can be shown here"),
        (json.dumps(kept())[:2000], "no result that can be shown here"),
        (json.dumps({"kind": "loads"}), "no result that can be shown here"),
        (json.dumps({**kept(), "kind": "start"}), "no result that can be shown here"),
        (json.dumps({**kept(), "arms": [{"label": "nobody"}]}), "no result that can be shown here"),
        (json.dumps({**kept(), "kind": "soak"}), "of the kind 'soak' are not shown here; those of"),
        (json.dumps({**kept(), "format": 1}), "kept in format 1, and this gdsload reads 2"),
    ],
)
def test_report_invalid_result_is_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(text)
    answer = run("bench", "report", path)
    assert answer.exit_code == 1
    (line,) = answer.stderr.splitlines()
    assert line.startswith(f"bench report: {path}: ")
    assert why in line


def test_instructions_invalid_baseline_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "baseline.json").write_text("{")
    monkeypatch.setattr(instructions, "conditions", dict)
    monkeypatch.setattr(instructions, "measure", lambda steps: {})
    assert instructions.main(["--baseline", str(tmp_path / "baseline.json")]) == 2
    assert "is no baseline" in capsys.readouterr().err


def test_deps_empty_environment_is_recreated(tmp_path: Path) -> None:
    """As where there was no network: what failed then is no reason to leave it at that."""
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin/uv"
    uv.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        '  venv) mkdir -p "$5/bin" && ln -s "$4" "$5/bin/python";;\n'
        '  pip) echo "$@" >>"$UV_SAID"; exit 1;;\n'
        "esac\n"
    )
    uv.chmod(0o755)
    said = tmp_path / "said"
    command = ["sh", places.PACKAGE / "deps.sh", tmp_path / "made", sys.executable]
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "UV_SAID": f"{said}"}
    for _ in range(2):
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert "no torch: no loader can run in" in ran.stdout
    assert not (tmp_path / "made/peers/stamp").exists()
    assert said.read_text().count("fastsafetensors") == 2
