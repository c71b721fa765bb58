"""No benchmark waits without end for a process that it has started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from gdsload.cli import measuring

children, load_into, records, remote, restarts, serve_process, trees = (
    measuring.program(name)
    for name in (
        "children", "load_into", "records", "remote", "restarts", "serve_process", "trees",
    )
)  # fmt: skip


def wait_for_server(file: Path) -> None:
    with serve_process.serving(file):
        pass


def wait_for_replica(file: Path) -> None:
    with ExitStack() as stack:
        trees.Replica(stack).answer()


def load_from_store(file: Path) -> None:
    store = SimpleNamespace(environment={"AWS_ENDPOINT_URL": ""}, url=lambda *_: "s3://bucket")
    remote.loaded("gdsload", store, [file.name])


@pytest.mark.parametrize(
    "wait",
    [
        lambda file: restarts.started("gdsload", file, 2),
        lambda file: load_into.child("gdsload.load_into", file, "warm"),
        load_from_store,
        wait_for_replica,
        wait_for_server,
    ],
    ids=["restarts", "load_into", "remote", "trees", "serve_process"],
)
def test_process_that_hangs_is_killed_and_refused(
    wait: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 3600\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(children, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(records.Refused, match=r"no end after 0\.1 s"):
        wait(tmp_path / "model.safetensors")


def test_processes_at_once_begin_after_the_preparation(tmp_path: Path) -> None:
    program = (
        "import os, sys; print('said by a library'); print('ready', flush=True)\n"
        "sys.stdin.readline(); print(os.listdir(sys.argv[1]) != [] and 1 or 0)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    found = children.at_once("it", command, [{}, {}], (tmp_path / "made").touch)
    assert found == [1, 1]


def test_process_of_a_block_that_fails_is_killed() -> None:
    refused = pytest.raises(ValueError, match="mine")
    with subprocess.Popen(["sleep", "3600"]) as process, refused, children.limited(process, "it"):
        raise ValueError("mine")
    assert process.returncode == -9


def test_restart_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says is more than a pipe holds, which nobody reads meanwhile."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nhead -c 200000 /dev/zero >&2; echo no memory >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(records.Refused, match=r"gdsload: .*no memory"):
        restarts.started("gdsload", tmp_path, 1)
