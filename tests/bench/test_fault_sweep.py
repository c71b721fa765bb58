"""A sweep of benchmarks/faults.py has a result only if all of its cases ran."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gdsload.cli import measuring

faults, records = (measuring.program(name) for name in ("faults", "records"))

CASES = [faults.Case("load", call, "EIO", k) for call in ("read", "mmap") for k in (1, 2, 3)]


class Fake:
    """Runs no load, and ends in one of the cases."""

    def __init__(self, end: str) -> None:
        self.end = end

    def run(self, cases: Sequence[Any]) -> Iterator[Any]:
        for case in cases:
            if case.call == "mmap" and case.k == 2 and self.end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if case.call == "mmap" and case.k == 2 and self.end == "raises":
                raise BlockingIOError(errno.EAGAIN, "fork")
            yield faults.Outcome("exact")


def quiet(_: str) -> None:
    pass


def test_sweep_with_all_cases_returns_them() -> None:
    found = faults.swept(Fake("well"), CASES, 2, quiet)
    assert sorted(case for case, _ in found) == sorted(CASES)


@pytest.mark.parametrize(("end", "status"), [("killed", "-9"), ("raises", "1")])
def test_sweep_that_loses_cases_is_refused(end: str, status: str) -> None:
    ended = []

    @contextmanager
    def owner() -> Iterator[None]:
        """As a temporary directory, which the process that made it must remove, and no other."""
        try:
            yield
        finally:
            ended.append(os.getpid())
            if len(ended) > 1 or os.getpid() != parent:
                os._exit(9)

    parent = os.getpid()
    refused = pytest.raises(records.Refused, match=f"4 of 6 cases ended; .* with {status}")
    with refused, owner():
        faults.swept(Fake(end), CASES, 1, quiet)
    assert ended == [parent]


def test_sweep_that_is_refused_ends_without_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: object) -> dict[str, Any]:
        raise records.Refused("4 of 6 cases ended")

    monkeypatch.setattr(faults.injector, "why_not", lambda: "")
    monkeypatch.setattr(faults, "measured", measured)
    monkeypatch.setattr(faults.ctypes, "CDLL", lambda _: FakeC())
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert faults.main(["--output", str(tmp_path / "x.json")]) == 2
    assert "faults: no result: 4 of 6 cases ended" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


class FakeC:
    def mallopt(self, name: int, value: int) -> None:
        """The settings of malloc of this process stay."""
