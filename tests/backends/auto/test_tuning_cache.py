"""The tuning cache: storing and finding entries, and files that are damaged."""

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


def entry_of(**changed: Any) -> TunedChoice:
    facts: dict[str, Any] = {
        "mount": "xfs /dev/md0 9:0",
        "device": "H200 0000:01:00.0",
        "choice": "gds_mt",
        "rates": {"gds_mt": 2e10, "posix": 1e10},
        "versions": VERSIONS,
        "at": NOW,
    }
    facts.update(changed)
    if "rates" not in changed:  # the choice is the fastest
        facts["rates"] = {name: 1e10 for name in facts["rates"]} | {facts["choice"]: 2e10}
    return TunedChoice(**facts)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gdsload" / tuning_cache.FILE


def asked(versions: dict[str, str] = VERSIONS, now: float = NOW) -> TunedChoice | None:
    return tuning_cache.find("xfs /dev/md0 9:0", "H200 0000:01:00.0", versions, now)


def test_stored_entry_is_found_until_forgotten(cache: Path) -> None:
    assert asked() is None
    for each in (entry_of(), entry_of(mount="nfs4 there:/it 0:52"), entry_of(choice="posix")):
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
        (VERSIONS, -3600, "30 days"),  # measured in the future: a wrong clock
    ],
)
def test_stale_entry_is_not_found(versions: dict[str, str], later: float, why: str) -> None:
    tuning_cache.store(entry_of())
    assert asked() is not None
    assert asked(versions, NOW + later) is None
    assert why in entry_of().stale(versions, NOW + later)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "{}",
        '{"format": 2, "choices": []}',
        "[" * 100_000,
        "\udcff",
        '{"format": 1, "choices": {}}',
        '{"format": 1, "choices": [1, null, {}, []]}',
        '{"format": 1, "choices": [{"mount": "m", "device": "d", "choice": "x", "rates": {},'
        ' "versions": {}, "at": 1}]}',
        '{"format": 1, "choices": [{"mount": "m", "device": "d", "choice": "x",'
        ' "rates": {"x": "fast"}, "versions": {}, "at": 1}]}',
    ],
)
def test_damaged_file_is_ignored_and_replaced(text: str, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_bytes(text.encode(errors="surrogateescape"))
    assert tuning_cache.entries() == []
    assert tuning_cache.store(entry_of()) == ""
    assert asked() == entry_of()
    json.loads(cache.read_text())


def test_fixed_seconds_are_stored_and_optional(cache: Path) -> None:
    tuning_cache.store(entry_of(fixed_seconds={"gds_mt": 0.25}))
    assert asked() == entry_of(fixed_seconds={"gds_mt": 0.25})
    row = json.loads(cache.read_text())
    del row["choices"][0]["fixed_seconds"]
    cache.write_text(json.dumps(row))
    assert asked() == entry_of()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), "long"])
def test_impossible_fixed_seconds_are_ignored(seconds: object, cache: Path) -> None:
    tuning_cache.store(entry_of(fixed_seconds={"gds_mt": seconds}))
    assert tuning_cache.entries() == []


@pytest.mark.parametrize("at", [-1.0, float("nan"), float("inf"), 1e300, "now"])
def test_impossible_times_are_ignored(at: object, cache: Path) -> None:
    tuning_cache.store(entry_of(at=at))
    assert tuning_cache.entries() == []


@pytest.mark.parametrize("rate", ["NaN", "Infinity", "-1", "0"])
def test_impossible_rates_are_ignored(rate: str, cache: Path) -> None:
    tuning_cache.store(entry_of())
    text = json.dumps({**json.loads(cache.read_text())})
    for measured in entry_of().rates.values():
        text = text.replace(f": {measured}", f": {rate}")
    cache.write_text(text)
    assert tuning_cache.entries() == []


@pytest.mark.parametrize(
    ("choice", "rates"),
    [
        ("posix", {"posix": 1e10, "gds": 1.1e10, "gds_mt": 0.0}),
        ("posix", {"posix": 0.0}),
        ("posix", {}),
    ],
)
def test_entry_contradicted_by_its_rates_is_ignored(
    choice: str, rates: dict[str, float], cache: Path
) -> None:
    tuning_cache.store(entry_of(choice=choice, rates=rates))
    assert asked() is None
    assert tuning_cache.store(entry_of()) == ""
    assert asked() == entry_of()


def test_entry_of_unknown_mount_is_not_stored(cache: Path) -> None:
    assert tuning_cache.store(entry_of(mount="")) == "the mount of the file is unknown"
    assert not cache.exists()


def test_choice_within_the_tolerance_is_stored() -> None:
    assert tuning_cache.store(entry_of(rates={"gds_mt": 0.96e10, "posix": 1e10})) == ""


def test_missing_home_directory_reads_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning_cache.store(entry_of())
    monkeypatch.chdir(cache.parent)  # it has a file of that name
    monkeypatch.setattr(tuning_cache, "directory", str)
    assert tuning_cache.entries() == []


def test_damaged_row_leaves_the_others_valid(cache: Path) -> None:
    tuning_cache.store(entry_of())
    found = json.loads(cache.read_text())
    found["choices"].insert(0, {"mount": 1})
    cache.write_text(json.dumps(found))
    assert tuning_cache.entries() == [entry_of()]


def test_unwritable_directory_is_reported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.write_text("a file in its place")
    assert "File exists" in tuning_cache.store(entry_of())
    assert tuning_cache.entries() == []
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(cache.parent.parent / "home"))
    assert tuning_cache.directory() == f"{cache.parent.parent}/home/.cache/gdsload"
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert tuning_cache.directory() == ""
    assert "no home" in tuning_cache.store(entry_of())


def test_failed_write_leaves_the_old_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning_cache.store(entry_of())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tuning_cache.os, "replace", full)
        assert "No space left" in tuning_cache.store(entry_of(choice="posix"))
    assert asked() == entry_of()
    assert [each.name for each in cache.parent.iterdir()] == [cache.name]


@pytest.mark.parametrize(
    "name", ["m\u3000x", "m\u00a0x", "m\u2028x", "m\x85x", "m\x0cx", "m\udcff"]
)
def test_mount_is_found_by_any_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    line = f"2 1 0:9 / {tmp_path.resolve()}/{name} rw shared:1 - fuse.test daemon rw\n"
    (tmp_path / "proc/self/mountinfo").write_bytes(os.fsencode(line))
    found = mountinfo.mount_of(tmp_path / name / "x", str(tmp_path))
    assert found is not None and found.kind == "fuse.test"


def test_mount_of_path_is_the_innermost(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\nnonsense\n"
        f"2 1 9:0 / {tmp_path.resolve()} rw shared:1 - xfs /dev/md0 rw\n"
    )
    found = mountinfo.mount_of(tmp_path / "x", str(tmp_path))
    assert found is not None and found.key == "xfs /dev/md0 9:0"
    assert mountinfo.mount_of(tmp_path, str(tmp_path / "nowhere")) is None
