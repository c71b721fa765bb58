"""Writes the tables and pictures of stored results into docs/benchmarks.md.

    gdsload bench report                 the page of a checkout, and its pictures
    gdsload bench report --check         changes nothing, and fails if the page is outdated
    gdsload bench report RESULT.json...  the tables of these results, their pictures beside them

Between `<!-- result: FILE -->` and `<!-- end -->` the page has the tables of that file of
benchmarks/results/. The text below the tables is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from . import (
    compare,
    costs,
    engines,
    first_call,
    first_read,
    gpu,
    load_into,
    parse,
    pictures,
    pipeline,
    pool,
    ranks,
    records,
    remote,
    restarts,
    start,
    states,
    sweep,
    tables,
    targets,
    trees,
    tune,
)
from .places import CHECKOUT, RESULTS, ROOT
from .records import Refused

PAGE = ROOT / "docs/benchmarks.md"
PICTURES = ROOT / "docs/pictures"
TARGETS = re.compile(r"(<!-- targets -->\n).*?(<!-- end -->)", re.DOTALL)
BLOCK = re.compile(r"(<!-- result: (?P<file>[\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Shown(NamedTuple):
    """The text of a kind of result."""

    title: Callable[[dict[str, Any]], str]
    table: Callable[[dict[str, Any]], str]
    notes: Callable[[dict[str, Any]], str]

    def text(self, result: dict[str, Any]) -> str:
        return f"{self.title(result)}\n\n{self.table(result)}\n\n{self.notes(result)}"


KINDS = {
    "loads": Shown(tables.title, tables.table, tables.notes),
    "states": Shown(tables.title, states.table, states.notes),
    "engines": Shown(tables.title, engines.pivot, tables.notes),
    "best": Shown(tables.title, tables.table, tune.notes),
    "compare": Shown(tables.title, compare.table, compare.notes),
    "io": Shown(sweep.title, sweep.table, sweep.notes),
    "scale": Shown(lambda result: "The cost of a load without the disk", costs.table, costs.notes),
    "start": Shown(start.title, start.table, start.notes),
    "pipeline": Shown(pipeline.title, pipeline.table, pipeline.notes),
    "first-call": Shown(first_call.title, first_call.table, first_call.notes),
    "first-read": Shown(first_read.title, first_read.table, first_read.notes),
    "gpu": Shown(gpu.title, gpu.table, gpu.notes),
    "load-into": Shown(load_into.title, load_into.table, load_into.notes),
    "parse": Shown(parse.title, parse.table, parse.notes),
    "pool": Shown(pool.title, pool.table, pool.notes),
    "ranks": Shown(ranks.title, ranks.table, ranks.notes),
    "remote": Shown(remote.title, remote.table, remote.notes),
    "restarts": Shown(restarts.title, restarts.table, restarts.notes),
    "trees": Shown(trees.title, trees.table, trees.notes),
}


class Words(NamedTuple):
    """A result, and what is said of it."""

    result: dict[str, Any]
    title: str
    table: str
    notes: str


def words_of(path: Path) -> Words:
    """The text of a stored result. Raises Refused for an invalid or incomplete file."""
    try:
        result = json.loads(path.read_text())
        known = result.get("format", records.FORMAT)
        if known != records.FORMAT:
            raise Refused(
                f"{path}: kept in format {known}, and this gdsload reads {records.FORMAT}"
            )
        shown = KINDS.get(kind := result["kind"])
        if shown is None:
            raise Refused(
                f"{path}: results of the kind {kind!r} are not shown here; those of"
                f" {', '.join(sorted(KINDS))} are"
            )
        return Words(result, shown.title(result), shown.table(result), shown.notes(result))
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from error
    except (ValueError, LookupError, AttributeError, TypeError, StopIteration) as error:
        raise Refused(f"{path}: this is no result that can be shown here") from error


def rendered(file: str, directory: Path = RESULTS) -> str:
    """A result as the page shows it, or a line that it is not there yet."""
    path = directory / file
    if not path.exists():
        return f"Not measured yet: `benchmarks/results/{file}` is missing.\n"
    said = words_of(path)
    text = f"\n**{said.title}**\n\n{said.table}\n\n{said.notes}\n\n"
    if pictures.drawing(said.result):
        text += f"![{said.title}](pictures/{path.stem}.svg)\n\n"
    return text


def filled(page: str) -> str:
    """The page with every block of it renewed."""
    page = BLOCK.sub(lambda found: found[1] + rendered(found["file"]) + found[3], page)
    return TARGETS.sub(lambda found: f"{found[1]}\n{targets.table()}\n\n{found[2]}", page)


def drawn(page: str, directory: Path = RESULTS) -> dict[str, str]:
    """The pictures of every result that the page shows, by their names."""
    found = {}
    for block in BLOCK.finditer(page):
        path = directory / block["file"]
        if path.exists() and (picture := pictures.drawing(words_of(path).result)):
            found[f"{path.stem}.svg"] = picture.text()
    return found


def behind(page: str) -> list[Path]:
    """Outdated files: the page, pictures that differ, and pictures without a result."""
    kept = {picture.name: picture.read_text() for picture in PICTURES.glob("*.svg")}
    wanted = drawn(page)
    changed = sorted(name for name in {*kept, *wanted} if kept.get(name) != wanted.get(name))
    return [*([] if filled(page) == page else [PAGE]), *(PICTURES / name for name in changed)]


def show(files: list[Path]) -> None:
    """Prints results, and draws them beside their files."""
    for file in files:
        said = words_of(file)
        records.say(f"{said.title}\n\n{said.table}\n\n{said.notes}\n")
        if picture := pictures.drawing(said.result):
            file.with_suffix(".svg").write_text(picture.text())
            print(f"picture: {file.with_suffix('.svg')}", file=sys.stderr)


def main(words: list[str] | None = None) -> int:
    parser = records.parser_of("gdsload bench report", __doc__)
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        metavar="RESULT.json",
        help="results to show and to draw; without any, docs/benchmarks.md is updated",
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if the page is not up to date"
    )
    options = parser.parse_args(words)
    if options.results:
        try:
            show(options.results)
        except Refused as error:
            print(f"bench report: {error}", file=sys.stderr)
            return 1
        return 0
    if not CHECKOUT:
        parser.error("name results: there is no page here, as in a checkout")
    page = PAGE.read_text()
    try:
        old = behind(page)
        renewed, new = filled(page), drawn(page)
    except Refused as error:
        print(f"bench report: {error}", file=sys.stderr)
        return 1
    if options.check:
        for path in old:
            print(f"{path} is behind the results: run gdsload bench report", file=sys.stderr)
        return int(bool(old))
    PAGE.write_text(renewed)
    PICTURES.mkdir(exist_ok=True)
    for name, picture in new.items():
        (PICTURES / name).write_text(picture)
    for path in old:
        if path != PAGE and path.name not in new:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
