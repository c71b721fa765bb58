"""Which loads of benchmarks/killed_sources.py count as disturbed."""

from __future__ import annotations

import threading

import pytest

from gdsload.cli import measuring

pytest.importorskip("psutil")  # the program needs it
killed_sources = measuring.program("killed_sources")
LIMIT_SECONDS = 60


def test_load_that_ends_before_its_signal_is_not_disturbed() -> None:
    calls: list[str] = []
    result, _, sent = killed_sources.struck(lambda: 1, lambda: calls.append("sent"), 3600.0)
    assert (result, sent, calls) == (1, False, [])


def test_load_that_ends_after_its_signal_is_disturbed() -> None:
    strikers: list[threading.Thread] = []
    begun = threading.Event()

    def strike() -> None:
        strikers.append(threading.current_thread())
        begun.set()

    def load() -> int:
        begun.wait(LIMIT_SECONDS)
        strikers[0].join(LIMIT_SECONDS)
        return 1

    result, _, sent = killed_sources.struck(load, strike, 0.0)
    assert (result, sent) == (1, True)
