"""Ctrl-C while something is being cleaned up: it is cleaned up all the same.

A signal handler of Python may raise as a function is entered, or as one that was called returns.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import gdsload
from gdsload.checkpoint import file_io
from gdsload.integrations.transformers import hooks
from gdsload.integrations.transformers.monkeypatch import Patcher
from gdsload.memory import host_pool
from gdsload.memory.host_pool import HostPool
from gdsload.readahead.prefetch import Prefetch, prefetches
from gdsload.system import gc_control
from gdsload.system.lifecycle import fork_safe_lock, taken


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the call of a function with this number raise KeyboardInterrupt: before it does
    anything, or as it returns. The next calls do what they do."""

    def change(owner: Any, name: str, *, number: int = 1, returning: bool = False) -> None:
        calls, real = iter(range(1, 1_000_000)), getattr(owner, name)

        def interrupted(*words: Any, **named: Any) -> Any:
            if next(calls) != number:
                return real(*words, **named)
            if returning:
                real(*words, **named)
            raise KeyboardInterrupt

        monkeypatch.setattr(owner, name, interrupted)

    return change


class Lock:
    """A lock whose owner gets a Ctrl-C as soon as he has it."""

    def __init__(self) -> None:
        self.lock = fork_safe_lock(self, "lock")

    def acquire(self, timeout: float) -> bool:
        if self.lock.acquire(timeout=timeout):
            raise KeyboardInterrupt
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lock, name)


def is_free(lock: threading.RLock) -> bool:
    """Whether another thread gets it."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    return found == [True]


def test_lock_that_is_taken_with_a_limit_is_released() -> None:
    lock = Lock()
    with pytest.raises(KeyboardInterrupt), taken(lock):  # type: ignore[arg-type]
        raise AssertionError
    assert is_free(lock.lock)


def test_lock_that_is_taken_with_a_limit_belongs_to_one_thread() -> None:
    lock = Lock().lock
    with taken(lock) as mine, taken(lock) as again:
        assert mine and again
        found: list[bool] = []

        def other() -> None:
            with taken(lock, 0.01) as taken_there:
                found.append(taken_there)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert found == [False]
        with taken(lock):
            pass
        assert not is_free(lock)
    assert is_free(lock)


@pytest.mark.parametrize("name", ["get_count", "get_freeze_count", "freeze", "unfreeze"])
def test_cycle_collector_runs_again(
    name: str, interrupt: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc_control, "MANY", -1)
    gc.unfreeze()  # objects that other tests have frozen
    interrupt(gc, name, returning=True)
    with pytest.raises(KeyboardInterrupt), gc_control.collector_paused():
        pass
    monkeypatch.undo()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_threshold_of_the_cycle_collector_is_restored(interrupt: Callable[..., None]) -> None:
    before = gc.get_threshold()
    interrupt(gc_control, "_restore")
    with pytest.raises(KeyboardInterrupt), gc_control.collector_eased():
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before


@pytest.mark.parametrize("number", [1, 2])
def test_functions_of_transformers_are_its_own_again(
    number: int, interrupt: Callable[..., None], tiny_checkpoint: Path
) -> None:
    """The replacements are left at the end of the weights, and at the end of the call."""
    interrupt(Patcher, "leave", number=number)
    with pytest.raises(KeyboardInterrupt):
        gdsload.from_pretrained(tiny_checkpoint)
    assert not hooks.patcher.in_place


def opened_pool(path: Path) -> AbstractContextManager[object]:
    return HostPool(1 << 20)


def opened_prefetch(path: Path) -> AbstractContextManager[object]:
    return gdsload.prefetch(path)


@pytest.mark.parametrize(
    ("opened", "of"), [(opened_pool, HostPool), (opened_prefetch, Prefetch)], ids=["pool", "ahead"]
)
def test_end_of_a_block_closes(
    opened: Callable[[Path], AbstractContextManager[object]],
    of: type,
    interrupt: Callable[..., None],
    tiny_checkpoint: Path,
) -> None:
    with pytest.raises(KeyboardInterrupt), opened(tiny_checkpoint):
        interrupt(of, "close")
    assert host_pool.pools == [] and prefetches() == []


def test_all_files_are_closed(
    interrupt: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    fds = [os.open(tmp_path / "file", os.O_RDONLY) for _ in range(3)]
    interrupt(file_io.os, "close", returning=True)
    with pytest.raises(KeyboardInterrupt):
        file_io.close_files(fds)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
