"""Replays the inputs of the fuzzer: its corpus, and those that once failed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_CORPUS_BYTES = 30_000
_spec = importlib.util.spec_from_file_location("fuzz", ROOT / "scripts/fuzz.py")
assert _spec is not None and _spec.loader is not None
fuzz = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fuzz)
INPUTS = sorted(fuzz.CORPUS.glob("*/*"))


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_kept_inputs_keep_the_properties(path: Path) -> None:
    fuzz.TARGETS[path.parent.name](path.read_bytes())


def test_corpus_covers_every_target_and_is_small() -> None:
    assert {path.parent.name for path in INPUTS} == set(fuzz.TARGETS)
    assert sum(path.stat().st_size for path in INPUTS) < MOST_CORPUS_BYTES


def test_target_reports_a_parser_that_is_too_permissive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "read_weight_map", lambda raw, path: {"a": "other"})
    with pytest.raises(fuzz.Failed):
        fuzz.index((fuzz.CORPUS / "index/two").read_bytes())
