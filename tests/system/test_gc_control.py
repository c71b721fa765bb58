"""The cycle collector does not run over the objects of loads with very many tensors."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import gdsload
from gdsload.system import gc_control
from gdsload.system.gc_control import MANY, collector_eased, collector_paused

TENSORS = 20_000


@pytest.fixture
def passes() -> Iterator[list[int]]:
    """The generations of the collector's passes since the fixture was made."""
    gc.collect()
    seen: list[int] = []

    def record(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(record)
    try:
        yield seen
    finally:
        gc.callbacks.remove(record)


@pytest.mark.parametrize("cache", ["direct", "mapped"])
def test_load_of_many_tensors_causes_few_passes(
    tmp_path: Path, passes: list[int], cache: str
) -> None:
    path = tmp_path / "many.safetensors"
    save_file({str(number): torch.tensor([number]) for number in range(TENSORS)}, path)
    gc.collect()
    passes.clear()
    loaded = gdsload.load_file(path, cache=cache)
    # One pass per 700 new objects would be a hundred passes, some of them over all objects.
    assert len(passes) < 10 and 2 not in passes
    assert len(loaded) == TENSORS and int(loaded["17"]) == 17


def test_collector_works_after_pause(passes: list[int]) -> None:
    with collector_paused():
        assert not gc.isenabled()
        kept = [[] for _ in range(2 * MANY)]  # type: ignore[var-annotated]
        assert not passes
    assert gc.isenabled() and len(kept) == 2 * MANY
    cycle: list[Any] = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() >= 1


def test_frozen_objects_stay_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector_paused():
            kept = [[] for _ in range(2 * MANY)]  # type: ignore[var-annotated]
        # Some frozen objects may have been freed meanwhile; after unfreeze the count would be 0.
        assert frozen - 1000 < gc.get_freeze_count() <= frozen and kept
    finally:
        gc.unfreeze()


def test_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_child_forked_during_a_pause_collects() -> None:
    pausing, ended = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            pausing.set()
            ended.wait()

    thread = threading.Thread(target=pause)
    thread.start()
    pausing.wait()
    child = os.fork()
    if child == 0:
        with collector_paused():
            inside = gc.isenabled()
        os._exit(inside or not gc.isenabled())
    ended.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()


def test_thresholds_are_restored_if_another_thread_ends_as_one_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, other, ended = gc.get_threshold(), collector_eased(), []

    def get_threshold() -> tuple[int, int, int]:
        found = gc.get_threshold()
        if not ended:
            ended.append(True)
            other.__exit__(None, None, None)
        return found

    try:
        other.__enter__()
        with monkeypatch.context() as patch:
            module = SimpleNamespace(**vars(gc) | {"get_threshold": get_threshold})
            patch.setattr(gc_control, "gc", module)
            with collector_eased():
                pass
        assert ended
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*before)
