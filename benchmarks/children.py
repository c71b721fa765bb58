"""A limit of time for the processes that a benchmark waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import Popen
from typing import Any

from .records import Refused

PATIENCE_SECONDS = 900.0


@contextmanager
def limited(process: Popen[Any], label: str) -> Iterator[None]:
    """Kills a process that still runs after PATIENCE_SECONDS: whoever reads its pipes gets their
    end. An exception of the block kills it as well, and is a Refused if the process was too slow.
    """
    late = threading.Event()

    def kill() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(PATIENCE_SECONDS, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    except BaseException as error:
        process.kill()
        if late.is_set() and isinstance(error, Exception):
            raise Refused(f"{label}: no end after {PATIENCE_SECONDS:g} s") from error
        raise
    finally:
        timer.cancel()
