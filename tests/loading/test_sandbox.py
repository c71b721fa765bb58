"""A sandbox that forbids io_uring, like Docker's: the doctor reports it, and loads work."""

from __future__ import annotations

import errno
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from command import process
from seccomp import REFUSE, skip_if_allowed

# Blocks io_uring_setup, _enter and _register for this process, as Docker's default profile does,
# then runs the command line. The numbers are the same on all newer architectures.
BLOCKED = f"""{REFUSE}
refuse([425, 426, 427], {errno.EPERM})
from gdsload.cli import main
main()
"""


def in_the_sandbox(*words: str | Path) -> Any:
    if find_spec("gdsload._native.uring") is None:
        pytest.skip("this build has no io_uring to block")
    ended = process(BLOCKED, *words, "--json")
    skip_if_allowed(ended.stdout)
    return ended.returncode, json.loads(ended.stdout)


def test_doctor_in_a_sandbox_without_io_uring_reports_it() -> None:
    code, facts = in_the_sandbox("doctor")
    found = {each["name"]: each for each in facts["findings"]}
    assert found["engine uring"]["verdict"] == "no"
    assert "Operation not permitted" in found["engine uring"]["detail"]
    assert "seccomp" in found["engine uring"]["hint"]
    assert found["engine threads"]["verdict"] == "yes"
    assert code == facts["exit_code"] == 0, "threads read into DRAM"


def test_load_in_a_sandbox_without_io_uring_works(tiny_checkpoint: Path) -> None:
    code, facts = in_the_sandbox("load", tiny_checkpoint, "--cache", "direct", "--verify")
    assert code == 0
    (done,) = facts["runs"]
    assert done["engine"] == "threads" and not done["refusals"]


def test_engine_asked_for_in_a_sandbox_without_it_is_refused(tiny_checkpoint: Path) -> None:
    if find_spec("gdsload._native.uring") is None:
        pytest.skip("this build has no io_uring to block")
    words = ("load", tiny_checkpoint, "--cache", "direct", "--option", "engine=uring")
    ended = process(BLOCKED, *words)
    skip_if_allowed(ended.stdout)
    assert ended.returncode == 1
    assert "Operation not permitted" in ended.stderr and "seccomp" in ended.stderr
