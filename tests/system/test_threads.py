"""Events and starts of threads that Ctrl-C cannot break."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import gdsload
from gdsload.system import parallel
from gdsload.system.threads import SafeEvent, start_thread
from waiting import wait_for


def test_event_is_set_for_all_waiters() -> None:
    event, found = SafeEvent(), list[bool]()
    waiters = [threading.Thread(target=lambda: found.append(event.wait(60))) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    assert not event.is_set() and not event.wait(0)
    event.set()
    event.set()
    for waiter in waiters:
        waiter.join(60)
    assert found == [True] * 4
    assert event.is_set() and event.wait(0)


class Interrupted:
    """The lock of an event that is set while somebody waits, who gets a Ctrl-C as soon as he has
    the lock."""

    def __init__(self, event: SafeEvent) -> None:
        self.lock, self._set = event._open, event.set

    def acquire(self, timeout: float) -> NoReturn:
        self._set()
        assert self.lock.acquire(timeout=timeout)
        raise KeyboardInterrupt

    def release(self) -> None:
        self.lock.release()


def test_event_can_be_set_and_awaited_after_a_waiter_was_interrupted() -> None:
    event = SafeEvent()
    event._open = interrupted = Interrupted(event)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        event.wait(60)
    event._open = interrupted.lock
    assert event._open.locked() and event.wait(60)
    setter = threading.Thread(target=event.set)
    setter.start()
    wait_for(lambda: not setter.is_alive())


def test_thread_whose_start_was_interrupted_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*words: object, **named: object) -> NoReturn:
        del words, named  # or the traceback has what the thread would run
        raise KeyboardInterrupt

    for name in ("_start_new_thread", "_start_joinable_thread"):  # up to Python 3.12, and later
        monkeypatch.setattr(threading, name, interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        start_thread(lambda: None, "interrupted")
    assert "interrupted" not in [thread.name for thread in threading.enumerate()]


class NoMemoryOnce(dict[int, threading.Thread]):
    """The threads of Python, without memory for the next one of gdsload."""

    def __init__(self, threads: dict[int, threading.Thread]) -> None:
        super().__init__(threads)
        self.left = 1

    def __setitem__(self, number: int, thread: threading.Thread) -> None:
        if thread.name.startswith("gdsload") and self.left:
            self.left -= 1
            raise MemoryError
        super().__setitem__(number, thread)


@pytest.fixture
def no_memory_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[NoMemoryOnce]:
    """A thread dies when it has told that it has started, and runs nothing."""
    before = threading._active  # type: ignore[attr-defined]
    threads = NoMemoryOnce(before)
    monkeypatch.setattr(threading, "_active", threads)
    yield threads
    before.clear()
    before.update(threads)  # those that are alive remove themselves


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_thread_that_dies_before_it_runs_is_no_thread(no_memory_once: NoMemoryOnce) -> None:
    assert start_thread(lambda: None, "gdsload-test") is None
    assert no_memory_once.left == 0
    thread = start_thread(lambda: None, "gdsload-test")
    assert thread is not None
    thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_loads_whose_first_thread_dies_end(
    no_memory_once: NoMemoryOnce, tiny_checkpoint: Path
) -> None:
    assert gdsload.load_file(tiny_checkpoint, stall_seconds=5)
    no_memory_once.left = 1
    ahead = gdsload.prefetch(tiny_checkpoint)
    with pytest.raises(gdsload.GdsloadError, match="no thread"):
        ahead.wait()
    no_memory_once.left = 1

    async def names() -> list[str]:
        return [name async for name, _ in gdsload.astream(tiny_checkpoint)]

    with pytest.raises(gdsload.GdsloadError, match="no thread"):
        asyncio.run(names())
    gdsload.quiesce()


def test_prefetch_whose_thread_has_no_memory_for_a_frame_fails(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gdsload.Prefetch, "_run", lambda _: None)
    ahead = gdsload.prefetch(tiny_checkpoint)
    with pytest.raises(gdsload.GdsloadError, match="no memory for the thread"):
        ahead.wait()
    gdsload.quiesce()


def test_threads_without_memory_for_a_frame_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel._Threads, "_run", lambda _: None)
    with pytest.raises(MemoryError, match="no memory for the threads"):
        parallel.in_thread(lambda: None, "model", stall_seconds=60)
