"""Python's cycle collector, held back while very many small objects are made.

Parsing, planning and handing over 100,000 tensors makes a million tuples and no cycle. Each pass
of the collector over them finds nothing and takes as long as the work itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
        gc.enable()
