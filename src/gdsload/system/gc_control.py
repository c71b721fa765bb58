"""Pauses Python's cycle collector while very many small objects are created.

Parsing, planning and handing out 100,000 tensors creates a million tuples and no cycle. Each pass
of the collector over them finds nothing and takes as long as the work itself: a tensor costs 8 us
with these passes and 3 us without. Importing torch and transformers creates 400,000 objects that
stay, with a thousand passes over them: 3.5 s beside a prefetch, and 3.0 s with fewer passes.

The collector belongs to the process. While a load parses, plans or hands out tensors, garbage of
other threads is not collected; if it created many objects, all objects of the process move to the
oldest generation; while a checkpoint is opened, a prefetch is open or transformers loads, the
threshold of the youngest generation is 10,000. A collector that is off, frozen objects and a higher
threshold are left as they are.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from gdsload.system.lifecycle import in_child

# Instead of 700 or 2,000 objects between two passes: 70 passes instead of a thousand.
IMPORT_THRESHOLD = 10_000
# New objects from which on skipping the pass over them pays.
MANY = 10_000
_before: list[tuple[int, int, int]] = []
_pausing: list[bool] = []  # one for each thread that has disabled the collector


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disables automatic collection. If the collector is off already, it stays off."""
    if not gc.isenabled():
        yield
        return
    _pausing.append(True)
    try:
        gc.disable()  # Ctrl-C may be raised as it returns
        yield
    finally:
        # The passes over 100,000 new tensors would take as long as opening their file: count them
        # as old. A full collection finds garbage among them. Unfreezing would thaw objects that
        # the application has frozen.
        try:
            if gc.get_count()[0] > MANY and not gc.get_freeze_count():
                try:
                    gc.freeze()
                finally:
                    gc.unfreeze()
        finally:  # Ctrl-C may be raised as one of these returns
            gc.enable()
            if _pausing:  # not in a child that was forked meanwhile
                _pausing.pop()


@contextmanager
def collector_eased() -> Iterator[None]:
    """Makes the collector run less often. For steps that take long: garbage of other threads is
    still collected."""
    before = gc.get_threshold()
    try:
        if before[0] < IMPORT_THRESHOLD:  # else another thread has eased it, and undoes that
            _ease()
        yield
    finally:
        try:
            _restore(before)
        except BaseException:  # Ctrl-C
            _restore(before)
            raise


def ease_imports() -> None:
    """Makes the collector run less often until `imports_done`."""
    if not _before and (before := _ease()):
        _before.append(before)


def imports_done() -> None:
    """Undoes `ease_imports`."""
    for before in _before[:]:
        _restore(before)
    _before.clear()


def _ease() -> tuple[int, int, int] | None:
    """The thresholds before; None if they stay as they are."""
    thresholds = gc.get_threshold()
    if not gc.isenabled() or not 0 < thresholds[0] < IMPORT_THRESHOLD:
        return None
    gc.set_threshold(IMPORT_THRESHOLD, *thresholds[1:])
    return thresholds


def _restore(thresholds: tuple[int, int, int]) -> None:
    """Undoes `_ease`, unless the application has set other thresholds meanwhile."""
    if gc.get_threshold() == (IMPORT_THRESHOLD, *thresholds[1:]):
        gc.set_threshold(*thresholds)


def _resume_in_child() -> None:
    """The threads that would enable the collector are not in a forked child."""
    if _pausing:
        _pausing.clear()
        gc.enable()


in_child(_resume_in_child)
