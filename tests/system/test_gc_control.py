"""Loads of very many tensors do not set Python's cycle collector to work on them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import gdsload
from gdsload.system.gc_control import MANY, collector_paused

TENSORS = 20_000


@pytest.fixture
def passes() -> Iterator[list[int]]:
    """The generations that the collector has looked at since."""
    gc.collect()
    seen: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


@pytest.mark.parametrize("cache", ["direct", "mapped"])
def test_a_load_of_many_tensors(tmp_path: Path, passes: list[int], cache: str) -> None:
    path = tmp_path / "many.safetensors"
    save_file({str(number): torch.tensor([number]) for number in range(TENSORS)}, path)
    gc.collect()
    passes.clear()
    loaded = gdsload.load_file(path, cache=cache)
    # What was made, looked at 700 at a time, would be a hundred passes, some of them over all.
    assert len(passes) < 10 and 2 not in passes
    assert len(loaded) == TENSORS and int(loaded["17"]) == 17


def test_the_collector_works_on_as_it_did(passes: list[int]) -> None:
    with collector_paused():
        assert not gc.isenabled()
        kept = [[] for _ in range(2 * MANY)]  # type: ignore[var-annotated]
        assert not passes
    assert gc.isenabled() and len(kept) == 2 * MANY
    cycle: list[Any] = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() >= 1


def test_what_was_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector_paused():
            kept = [[] for _ in range(2 * MANY)]  # type: ignore[var-annotated]
        # Some of what was frozen may have ended meanwhile; thawed, there would be none.
        assert frozen - 1000 < gc.get_freeze_count() <= frozen and kept
    finally:
        gc.unfreeze()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
