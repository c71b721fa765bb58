"""Small windows, of which even a tiny model has several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gdsload.loading import window_writer


@contextmanager
def small_windows(window_bytes: int = 8192, ahead_bytes: int = 16384) -> Iterator[None]:
    """Loads that begin in the block convert and copy in windows of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_writer, "WINDOW_BYTES", window_bytes)
        patch.setattr(window_writer, "AHEAD_BYTES", ahead_bytes)
        yield
