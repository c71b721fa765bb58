"""Results as text: numbers with their nouns, and wide tables on narrow terminals."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def several(number: int, noun: str) -> str:
    """ "1 file", "2 files"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(nbytes: float) -> str:
    """Bytes for people, in powers of 1000: "1.50 GB", "0.66 MB"."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB"


def fitted(text: str, width: int) -> str:
    """The same text for a terminal: a table that is too wide comes in parts, side by side no more,
    each with the first column; a line that is too long is broken between words."""
    found: list[str] = []
    table: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            table.append(line[2:-2].split(" | "))
            continue
        found += _parts(table, width)
        table = []
        found.append(
            textwrap.fill(
                line,
                width,
                subsequent_indent="  " * line.startswith("- "),
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(found[:-1])


def _parts(table: list[list[str]], width: int) -> list[str]:
    lines: list[str] = []
    first = 1
    while table and first < max(len(table[0]), 2):
        last = first + 1
        while last < len(table[0]) and _wide(table[0][:1] + table[0][first : last + 1]) <= width:
            last += 1
        lines += [""] if lines else []
        lines += ["| " + " | ".join(row[:1] + row[first:last]) + " |" for row in table]
        first = last
    return lines


def _wide(cells: Sequence[str]) -> int:
    return sum(len(cell) + 3 for cell in cells) + 1
