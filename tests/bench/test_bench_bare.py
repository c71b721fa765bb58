"""Benchmarks on a machine that has little: no network, no disk statistics, no compiler, a
cuFile that would not come back from being opened."""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gdsload.backends.cufile import library
from gdsload.cli import measuring

arms, choice, judge, machine, places, prepare = (
    measuring.program(name) for name in ("arms", "choice", "judge", "machine", "places", "prepare")
)


def test_machine_without_diskstats_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a sandbox: there is no account of the disk then, and no crash."""
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    assert machine.disk_reads() == machine.disk_busy_seconds() == {}
    assert machine.busy_seconds() == 0.0


def test_judge_without_environment_uses_own_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "CACHE", tmp_path)
    assert judge.python_of(arms.parse("gdsload")) == Path(sys.executable)
    assert judge.python_of(arms.parse("safetensors-mmap")) == Path(sys.executable)
    with pytest.raises(judge.ArmFailed, match="not installed"):
        judge.python_of(arms.parse("instanttensor"))
    with pytest.raises(judge.ArmFailed, match="not installed"):  # it wants another safetensors
        judge.python_of(arms.parse("safetensors-prefetch"))
    own = tmp_path / "peers/bin/python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert judge.python_of(arms.parse("safetensors-mmap")) == own


def test_arm_with_hanging_cufile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = argparse.Namespace(device="cuda:0"), argparse.Namespace(device="cpu")
    monkeypatch.setattr(library, "obstacle", lambda: "it would spin")
    for name in ("fastsafetensors", "nixl-gds-mt"):
        assert choice.hangs(arms.parse(name), gpu) == "it would spin"
        assert choice.hangs(arms.parse(name), cpu) == ""
    assert choice.hangs(arms.parse("fastsafetensors:nogds=1"), gpu) == ""
    assert choice.hangs(arms.parse("gdsload"), gpu) == ""


def test_cold_without_compiler_has_no_bare_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "BARE", tmp_path / "bare.so")
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    with pytest.raises(judge.ArmFailed, match="No such file or directory"):
        prepare.build_bare()


def test_deps_installs_from_local_wheels(tmp_path: Path) -> None:
    """What is not among them comes from the environment that makes them."""
    wheel = tmp_path / "wheels/fastsafetensors-0.5.0-py3-none-any.whl"
    wheel.parent.mkdir()
    info = "fastsafetensors-0.5.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("fastsafetensors.py", "here = True\n")
        made.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: fastsafetensors\nVersion: 0.5.0\n"
        )
        made.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        made.writestr(f"{info}/RECORD", "")
    script = places.PACKAGE / "deps.sh"
    ran = subprocess.run(
        ["sh", script, tmp_path / "made", sys.executable, wheel.parent],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "no wheel: instanttensor" in ran.stdout
    python = tmp_path / "made/peers/bin/python"
    found = subprocess.run(
        [python, "-c", "import fastsafetensors, numpy; print(fastsafetensors.here)"],
        capture_output=True,
        text=True,
        check=True,
        env=places.environment(),
    )
    assert found.stdout == "True\n"
    assert (tmp_path / "made/prefetch/bin/python").exists()
