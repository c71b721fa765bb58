"""What the benchmarks refuse to print of files and disks, and whether the reason helps. No test looks
at a time.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from command import run
from gdsload import residency, synth
from gdsload.cli import measuring

arms, cache, fio, judge, records, truth = (
    measuring.program(name) for name in ("arms", "cache", "fio", "judge", "records", "truth")
)


@pytest.fixture(autouse=True)
def no_dropping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "drop_caches", lambda: False)


@pytest.mark.parametrize("command", ["cold", "io", "start"])
def test_somebody_elses_file_is_refused_by_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untold(file: object, *_: int) -> int:
        raise PermissionError(errno.EPERM, "the kernel tells it only to its owner")

    synth.write("tiny", tmp_path / "tiny")
    monkeypatch.setattr(residency, "resident_bytes", untold)
    answer = run("bench", command, tmp_path / "tiny", "--output", tmp_path / "x.json")
    assert answer.exit_code == 1
    assert "model-00001-of-00002.safetensors: what the page cache holds" in answer.stderr
    assert "only to its owner; take a copy of your own, or be root" in answer.stderr


def test_a_file_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(1 << 14))

    def closed(*_: object, **__: object) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(records.Refused, match=r"model\.safetensors: Permission denied"):
        truth.Truth(path)


def test_holes_are_named_where_the_disk_read_too_little(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(8 << 20))
    short = {"resident_before_bytes": 0, "device_read_bytes": 4096, "touched_bytes": 8 << 20}
    one = judge.Judge(judge.Conditions(tmp_path))
    assert str(one.objection(short)).endswith("were touched")
    with path.open("wb") as sparse:
        sparse.truncate(8 << 20)
    assert str(one.objection(short)).endswith("the rest are holes, or it is compressed")


@pytest.mark.parametrize(
    ("device", "own", "why"),
    [
        (900 << 20, 8 << 20, "the disk read 943,718,400 bytes for files of 8,388,608"),
        (4096, 4096, "the disk read 4,096 bytes, but 8,388,608 were touched"),
        (None, 4096, "the arm read 4,096 bytes"),
    ],
)
def test_fio_is_judged_as_every_arm(
    device: int | None, own: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(8 << 20))
    found = {"touched_bytes": 0, "read_bytes": 8 << 20, "own_read_bytes": own,
             "device_read_bytes": device}  # fmt: skip
    monkeypatch.setattr(fio, "run", lambda *_: found)
    one = judge.Judge(judge.Conditions(tmp_path))
    with pytest.raises(judge.NotWhatItSays, match=f"fio, 3 times in a row: {why}"):
        one.run(arms.parse("fio"))
    monkeypatch.setattr(fio, "run", lambda *_: {**found, "device_read_bytes": 8 << 20})
    assert one.run(arms.parse("fio"))["resident_before_bytes"] == 0
