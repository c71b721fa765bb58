"""The keywords that say which checkpoint is meant, passed on as one value."""

from __future__ import annotations

import os
from typing import NamedTuple

from gdsload.checkpoint.checkpoint import Checkpoint
from gdsload.checkpoint.header import HEADER_LIMIT_BYTES


class Lookup(NamedTuple):
    """The keyword arguments of `Checkpoint.open`."""

    revision: str | None = None
    subfolder: str = ""
    variant: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    strict: bool = True
    header_limit: int = HEADER_LIMIT_BYTES

    def open(self, source: str | os.PathLike[str]) -> Checkpoint:
        """Opens the checkpoint. Raises what `Checkpoint.open` raises."""
        return Checkpoint.open(source, **self._asdict())
