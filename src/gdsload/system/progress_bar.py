"""A progress bar in bytes, on stderr or in a notebook. Not responsible for counting the bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

_DELAY_SECONDS = 0.5  # a load that is over sooner shows no bar


def stderr_is_terminal() -> bool:
    """Whether somebody looks at stderr. False if it is closed, or something else than a file."""
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError, OSError):
        return False


@contextmanager
def progress_bar(
    wanted: bool | None, total_bytes: int | Callable[[], int], title: str = "gdsload"
) -> Iterator[Callable[[int], None]]:
    """Shows a bar with rate and remaining time, and yields a function that advances it.

    The bar is created with the first bytes: no read waits for the import of tqdm. Where it cannot
    be written, the load goes on without it.

    Args:
        wanted: True shows the bar and leaves it on the screen, False shows none, None shows it
            while the load runs if stderr is a terminal or this is a notebook.
        total_bytes: Where the bar ends; a function if that is known only with the first bytes.
        title: Text in front of the bar.

    Yields:
        A function that takes the number of new bytes.
    """
    notebook = "ipykernel" in sys.modules
    shown = wanted or (wanted is None and (notebook or stderr_is_terminal()))
    bar: Any = None

    def advance(nbytes: int) -> None:
        nonlocal shown
        try:
            draw(nbytes)
        except Exception:  # stderr cannot be written: the load goes on
            shown = False

    def draw(nbytes: int) -> None:
        nonlocal bar
        if not shown:
            return
        if bar is None:
            total = total_bytes() if callable(total_bytes) else total_bytes
            if not wanted and (nbytes >= total or not nbytes):
                return  # all bytes are there at once
            # tqdm.auto has a bar for notebooks, and takes longer to import.
            bar = import_module("tqdm.auto" if notebook else "tqdm").tqdm(
                desc=title,
                total=total,
                unit="B",
                unit_scale=True,
                delay=0 if wanted else _DELAY_SECONDS,
                leave=bool(wanted),
            )
        bar.update(min(nbytes, bar.total - bar.n))

    try:
        yield advance
    finally:
        if bar is not None:
            with suppress(Exception):
                bar.close()
