"""What is kept of measurements, and what is made of a file that others have been at."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gdsload.backends import tuning_cache
from gdsload.backends.tuning_cache import TunedChoice
from gdsload.system import mountinfo

VERSIONS = {"gdsload": "1", "cuFile": "1170"}
NOW = time.time()


def verdict(**changed: Any) -> TunedChoice:
    facts: dict[str, Any] = {
        "mount": "xfs /dev/md0 9:0", "device": "H200 0000:01:00.0", "choice": "gds_mt",
        "rates": {"gds_mt": 2e10, "posix": 1e10}, "versions": VERSIONS, "at": NOW,
    }  # fmt: skip
    facts.update(changed)
    if "rates" not in changed:  # what is chosen is the fastest
        facts["rates"] = {road: 1e10 for road in facts["rates"]} | {facts["choice"]: 2e10}
    return TunedChoice(**facts)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gdsload" / tuning_cache.FILE


def asked(versions: dict[str, str] = VERSIONS, now: float = NOW) -> TunedChoice | None:
    return tuning_cache.find("xfs /dev/md0 9:0", "H200 0000:01:00.0", versions, now)


def test_what_was_kept_is_found_again(cache: Path) -> None:
    assert asked() is None
    for each in (verdict(), verdict(mount="nfs4 there:/it 0:52"), verdict(choice="posix")):
        assert tuning_cache.store(each) == ""
    assert len(tuning_cache.entries()) == 2
    found = asked()
    assert found is not None and found.choice == "posix"
    assert [each.name for each in cache.parent.iterdir()] == [cache.name]
    tuning_cache.forget(found.mount, found.device)
    assert asked() is None and len(tuning_cache.entries()) == 1


@pytest.mark.parametrize(
    ("versions", "later", "why"),
    [
        ({**VERSIONS, "cuFile": "1180"}, 0, "cuFile changed"),
        ({**VERSIONS, "driver": "580"}, 0, "driver changed"),
        (VERSIONS, tuning_cache.VALID_SECONDS + 1, "30 days"),
        (VERSIONS, -3600, "30 days"),  # measured in the future: some clock was wrong
    ],
)
def test_what_is_old_or_of_other_versions_says_nothing(
    versions: dict[str, str], later: float, why: str
) -> None:
    tuning_cache.store(verdict())
    assert asked() is not None
    assert asked(versions, NOW + later) is None
    assert why in verdict().stale(versions, NOW + later)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "[]", "{}", '{"format": 2, "choices": []}', "[" * 100_000, "\udcff",
        '{"format": 1, "choices": {}}', '{"format": 1, "choices": [1, null, {}, []]}',
        '{"format": 1, "choices": [{"mount": "m", "device": "d", "choice": "x", "rates": {},'
        ' "versions": {}, "at": 1}]}',
        '{"format": 1, "choices": [{"mount": "m", "device": "d", "choice": "x",'
        ' "rates": {"x": "fast"}, "versions": {}, "at": 1}]}',
    ],
)  # fmt: skip
def test_a_file_that_others_have_been_at(text: str, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_bytes(text.encode(errors="surrogateescape"))
    assert tuning_cache.entries() == []
    assert tuning_cache.store(verdict()) == ""
    assert asked() == verdict()
    json.loads(cache.read_text())


def test_fixed_seconds_are_kept_and_optional(cache: Path) -> None:
    tuning_cache.store(verdict(fixed_seconds={"gds_mt": 0.25}))
    assert asked() == verdict(fixed_seconds={"gds_mt": 0.25})
    row = json.loads(cache.read_text())
    del row["choices"][0]["fixed_seconds"]
    cache.write_text(json.dumps(row))
    assert asked() == verdict()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), "long"])
def test_fixed_seconds_that_cannot_be_are_not_used(seconds: object, cache: Path) -> None:
    tuning_cache.store(verdict(fixed_seconds={"gds_mt": seconds}))
    assert tuning_cache.entries() == []


@pytest.mark.parametrize("rate", ["NaN", "Infinity", "-1", "0"])
def test_rates_that_nobody_measured(rate: str, cache: Path) -> None:
    tuning_cache.store(verdict())
    text = json.dumps({**json.loads(cache.read_text())})
    for measured in verdict().rates.values():
        text = text.replace(f": {measured}", f": {rate}")
    cache.write_text(text)
    assert tuning_cache.entries() == []


@pytest.mark.parametrize(
    ("choice", "rates"),
    [
        ("bounced", {"in place": 4.2e9, "bounced": 1.3e9}),
        ("posix", {"posix": 1e10, "gds": 1.1e10, "gds_mt": 0.0}),
        ("posix", {"posix": 0.0}),
        ("posix", {}),
    ],
)
def test_entry_contradicted_by_its_rates_is_ignored(
    choice: str, rates: dict[str, float], cache: Path
) -> None:
    tuning_cache.store(verdict(choice=choice, rates=rates))
    assert asked() is None
    assert tuning_cache.store(verdict()) == ""
    assert asked() == verdict()


def test_entry_of_unknown_mount_is_not_stored(cache: Path) -> None:
    assert tuning_cache.store(verdict(mount="")) == "the mount of the file is unknown"
    assert not cache.exists()


def test_verdict_within_what_is_no_difference_is_kept() -> None:
    assert tuning_cache.store(verdict(rates={"gds_mt": 0.96e10, "posix": 1e10})) == ""


def test_without_a_home_nothing_is_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning_cache.store(verdict())
    monkeypatch.chdir(cache.parent)  # where a file of that name is
    monkeypatch.setattr(tuning_cache, "directory", str)
    assert tuning_cache.entries() == []


def test_one_bad_row_spoils_no_other(cache: Path) -> None:
    tuning_cache.store(verdict())
    found = json.loads(cache.read_text())
    found["choices"].insert(0, {"mount": 1})
    cache.write_text(json.dumps(found))
    assert tuning_cache.entries() == [verdict()]


def test_a_directory_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.write_text("a file in its place")
    assert "File exists" in tuning_cache.store(verdict())
    assert tuning_cache.entries() == []
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(cache.parent.parent / "home"))
    assert tuning_cache.directory() == f"{cache.parent.parent}/home/.cache/gdsload"
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert tuning_cache.directory() == ""
    assert "no home" in tuning_cache.store(verdict())


def test_a_write_that_fails_leaves_what_there_was(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning_cache.store(verdict())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tuning_cache.os, "replace", full)
        assert "No space left" in tuning_cache.store(verdict(choice="posix"))
    assert asked() == verdict()
    assert [each.name for each in cache.parent.iterdir()] == [cache.name]


def test_the_mount_of_a_path(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\nnonsense\n"
        f"2 1 9:0 / {tmp_path.resolve()} rw shared:1 - xfs /dev/md0 rw\n"
    )
    found = mountinfo.mount_of(tmp_path / "x", str(tmp_path))
    assert found is not None and found.key == "xfs /dev/md0 9:0"
    assert mountinfo.mount_of(tmp_path, str(tmp_path / "nowhere")) is None
