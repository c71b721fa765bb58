"""Python's cycle collector, held back while very many small objects are made.

Parsing, planning and handing over 100,000 tensors makes a million tuples and no cycle. Each pass
of the collector over them finds nothing and takes as long as the work itself. Importing torch and
transformers is alike: 400,000 objects that stay, and a thousand passes over them.

The collector is the process's, and so are the effects: while a load parses, plans or hands over, no
thread's cycles are looked for; after many objects were made, all objects
of the process count as old, and wait for a full collection; while a prefetch is open the threshold
of the youngest generation is 10,000. Whoever has turned the collector off, frozen objects or set a
higher threshold finds that as it was. It stays since 100,000 tensors cost 3 us each and not 8, and
the imports beside a prefetch 3.0 s and not 3.5.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# In place of 700 or 2,000 objects between two passes: 70 passes in place of a thousand, which takes
# a seventh off the imports. Garbage is found a little later, and found all the same.
IMPORTING = 10_000
# New objects after which a pass over them is worth leaving out.
MANY = 10_000
_before: list[tuple[int, int, int]] = []


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection inside; a collector that was off already stays off."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > MANY:
            _take_for_old()
        gc.enable()


def _take_for_old() -> None:
    """Counts what is there as old, without a look at it: of 100,000 tensors the looks that would
    come now take as long as opening their file. A full collection finds what of it is garbage."""
    if not gc.get_freeze_count():  # else it would thaw what somebody has frozen
        gc.freeze()
        gc.unfreeze()


def ease_imports() -> None:
    """Fewer passes of the collector until `imports_done`, where it comes as often as usual."""
    thresholds = gc.get_threshold()
    if not _before and gc.isenabled() and 0 < thresholds[0] < IMPORTING:
        _before.append(thresholds)
        gc.set_threshold(IMPORTING, *thresholds[1:])


def imports_done() -> None:
    """Sets the collector back to what it was, unless somebody else has set it meanwhile."""
    if _before:
        thresholds = _before.pop()
        if gc.get_threshold() == (IMPORTING, *thresholds[1:]):
            gc.set_threshold(*thresholds)
