"""The verdicts of benchmarks/malformed.py, and a few of its cases with gdsload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors

from gdsload.cli import measuring

faults, injector, malformed = (
    measuring.program(name) for name in ("faults", "injector", "malformed")
)

TRUTH = {"a": [1, "x"], "b": [0, "y"]}


def outcome(how: str, error: str = "", text: str = "", code: int = 0, **tensors: Any) -> Any:
    return {"how": how, "error": error, "text": text, "code": code, "tensors": tensors}


@pytest.mark.parametrize(
    "ended,truth,expected",
    [
        (outcome("loaded", **TRUTH), TRUTH, "exact"),
        (outcome("loaded", **TRUTH), None, "accepted"),
        (outcome("loaded", a=[1, "x"]), TRUTH, "partial"),
        (outcome("loaded", a=[1, "x"], b=[0, "z"]), TRUTH, "wrong"),
        (outcome("SIGBUS"), TRUTH, "crash"),
        (outcome("exit 1"), None, "crash"),
        (outcome("hang"), None, "hang"),
        (outcome("raised", "ValueError", "it has no dtype"), None, "clear"),
        (outcome("raised", "KeyError", "'dtype'"), None, "unclear"),
        (
            outcome("raised", "ValueError", "too many values to unpack (expected 2)"),
            None,
            "unclear",
        ),
        (outcome("raised", "RuntimeError", ""), None, "unclear"),
    ],
)
def test_verdict_of_an_outcome(ended: Any, truth: Any, expected: str) -> None:
    assert malformed.verdict(ended, truth, malformed.names_cause(ended)) == expected


@pytest.mark.parametrize(
    "ended,error,expected",
    [
        (outcome("raised", "OSError", "Input/output error"), "EIO", True),
        (outcome("raised", "ReadError", "it failed", 5), "EIO", True),
        (outcome("raised", "ValueError", "File access error"), "EIO", False),
        (outcome("raised", "MemoryError"), "ENOMEM", True),
        (outcome("raised", "CheckpointError", "the file was truncated"), "END", True),
        (outcome("raised", "OSError", "reading failed"), "END", False),
    ],
)
def test_error_names_its_errno(ended: Any, error: str, expected: bool) -> None:
    assert malformed.names_errno(ended, error) == expected


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([outcome("SIGBUS")], ("crash", "exact")),
        ([outcome("loaded", **TRUTH), outcome("loaded", a=[1, "x"])], ("exact", "partial")),
        ([outcome("loaded", **TRUTH), outcome("loaded", **TRUTH), outcome("hang")],
         ("exact", "hang")),
    ],
)  # fmt: skip
def test_process_that_hangs_after_its_loads_is_counted(
    outcomes: list[Any], expected: tuple[str, str]
) -> None:
    class Fake:
        label = "fake"

        def run(self, *_: object, **__: object) -> dict[str, Any]:
            return {"outcomes": [outcome("loaded", **TRUTH), *outcomes], "struck": 1}

    struck = next(malformed.with_faults(Fake(), Path("model"), TRUTH, {"openat": 1}, 1))
    assert (struck.ended, struck.after) == expected


def test_replaced_shard_has_the_same_size_and_other_tensors(tmp_path: Path) -> None:
    faults.write_checkpoint(tmp_path / "model", faults.SHARDS)
    shard = tmp_path / "model" / malformed.SHARD
    new = malformed.turned(shard)
    replacement = shard.with_suffix(".new")
    assert replacement.stat().st_size == shard.stat().st_size
    versions = [
        {each: malformed.digest(entry["data"]) for each, entry in safetensors.deserialize(data)}
        for data in (shard.read_bytes(), replacement.read_bytes())
    ]
    assert versions[1] == new
    assert all(found != new[name] for name, found in versions[0].items() if found[0])


def test_gdsload_ends_in_exact_bytes_or_clear_errors(tmp_path: Path) -> None:
    if why := injector.why_not():
        pytest.skip(f"system calls cannot be injected here: {why}")
    (tmp_path / "files").mkdir()
    good = tmp_path / "good"
    wanted = faults.write_checkpoint(good, faults.SHARDS)
    truth = {name: malformed.digest(data) for name, data in wanted.items()}
    few = [case for case in malformed.files(tmp_path / "files") if case.kind in ("cut", "no file")]
    loader = malformed.Loader("gdsload", tmp_path / "log")
    try:
        found = {case.name: ended for case, ended, _ in malformed.with_files(loader, few)}
        assert set(found.values()) == {"clear"} and len(found) == len(few) > 8
        failed = list(malformed.with_faults(loader, good, truth, {"pread64": 3}, 2))
        assert len(failed) == 10 and {each.ended for each in failed} == {"clear", "exact"}
        assert {each.after for each in failed} == {"exact"}
        changed = list(malformed.with_changes(loader, tmp_path, truth, {"pread64": 3}, 3))
        assert len(changed) == 6
        assert {each.ended for each in changed} <= {"clear", "exact"}
    finally:
        loader.close()
