"""Events and starts of threads that Ctrl-C cannot break."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

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
