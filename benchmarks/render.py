"""Puts the kept results into docs/benchmarks.md: no figure there is typed by hand.

    python -m benchmarks.render [--check]

Between `<!-- result: FILE -->` and `<!-- end -->` the page has the table of that file of
benchmarks/results/. What is read out of the tables is written by people, below them. `--check`
changes nothing and fails where the page is behind its results.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from . import engines, tables
from .places import RESULTS, ROOT

PAGE = ROOT / "docs/benchmarks.md"
BLOCK = re.compile(r"(<!-- result: (?P<file>[\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(file: str) -> str:
    """A result as the page shows it, or a line that it is not there yet."""
    path = RESULTS / file
    if not path.exists():
        return f"Not measured yet: `benchmarks/results/{file}` is missing.\n"
    result = json.loads(path.read_text())
    table = engines.pivot(result) if file.startswith("engines") else tables.table(result)
    return f"\n**{tables.title(result)}**\n\n{table}\n\n{tables.notes(result)}\n\n"


def filled(page: str) -> str:
    """The page with every block of it renewed."""
    return BLOCK.sub(lambda found: found[1] + rendered(found["file"]) + found[3], page)


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    page = Path(PAGE).read_text()
    new = filled(page)
    if "--check" in words:
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
