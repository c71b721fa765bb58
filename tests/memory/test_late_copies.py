"""Memory of copies that end after their load: who waits for it, and who does not."""

from __future__ import annotations

import threading

from gdsload.memory import late_copies
from waiting import wait_for

PATIENCE_SECONDS = 60.0


def test_call_that_hangs_blocks_nobody_else() -> None:
    """Whether copies have ended may be a call of cuFile."""
    asked, answers = threading.Event(), threading.Event()

    def hang() -> bool:
        asked.set()
        return answers.wait(PATIENCE_SECONDS)

    late_copies.keep(object(), hang)
    try:
        assert asked.wait(PATIENCE_SECONDS)  # by the thread that frees memory
        other = object()
        late_copies.keep(other, lambda: True)
        late_copies.forget_ended()
        assert other in late_copies.owners()
    finally:
        answers.set()
    wait_for(lambda: not late_copies.owners())


def test_load_waits_for_the_copies_that_it_has_left() -> None:
    has_ended = threading.Event()
    with late_copies.awaited(PATIENCE_SECONDS):
        late_copies.keep(object(), has_ended.is_set)
        threading.Timer(0.05, has_ended.set).start()
    assert has_ended.is_set() and late_copies.owners() == []


def test_load_that_an_observer_makes_in_it_changes_nothing() -> None:
    has_ended = threading.Event()
    with late_copies.awaited(PATIENCE_SECONDS):
        with late_copies.awaited(PATIENCE_SECONDS):
            pass
        late_copies.keep(object(), has_ended.is_set)
        threading.Timer(0.05, has_ended.set).start()
    assert has_ended.is_set()


def test_load_does_not_wait_for_the_copies_of_others() -> None:
    has_ended = threading.Event()
    asked: set[threading.Thread] = set()

    def ended() -> bool:
        asked.add(threading.current_thread())
        return has_ended.is_set()

    with late_copies.awaited(PATIENCE_SECONDS):
        keeper = threading.Thread(target=late_copies.keep, args=(object(), ended))
        keeper.start()
        keeper.join()
    try:
        assert threading.current_thread() not in asked
        assert len(late_copies.owners()) == 1
    finally:
        has_ended.set()
        late_copies.forget_ended()
