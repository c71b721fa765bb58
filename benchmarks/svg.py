"""Small drawings: rectangles, lines and words in whole pixels, and plots with axes, as SVG.

Not responsible for what is drawn: pictures.py reads results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

LETTER_PX = 7  # width of a letter, at most on average
GREY, BLACK = "#999", "#222"
STEPS = (1, 2, 5)
Point = tuple[float, float]
Range = tuple[float, float, float]  # middle, low, high


class Drawing:
    """A white sheet that is drawn on, and saved. Lines are above all else."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts: list[tuple[str, str]] = []  # with the attribute that neighbours share
        self._paths: dict[str, str] = {}  # by their style

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        size = f'width="{max(width, 1):.0f}" height="{height:.0f}"'
        self._parts.append((f'fill="{fill}"', f'<rect x="{x:.0f}" y="{y:.0f}" {size}/>'))

    def lines(self, stroke: str, *parts: Iterable[Point], dashed: bool = False) -> None:
        """Lines of one colour, each through its points."""
        path = "".join("M" + "L".join(f"{x:.0f} {y:.0f}" for x, y in part) for part in parts)
        style = f'stroke="{stroke}"' + (' stroke-dasharray="4 3"' if dashed else "")
        self._paths[style] = self._paths.get(style, "") + path

    def words(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Text whose baseline is at `y`."""
        where = "" if anchor == "start" else f'text-anchor="{anchor}"'
        self._parts.append((where, f'<text x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'))

    def text(self) -> str:
        """The drawing as a file holds it."""
        size = f'width="{self.width}" height="{self.height}"'
        parts = [f'<rect {size} fill="#fff"/>']
        for shared, found in groupby(self._parts, key=itemgetter(0)):
            text = "\n".join(part for _, part in found)
            parts.append(f"<g {shared}>\n{text}\n</g>" if shared else text)
        for style, path in self._paths.items():
            parts.append(f'<path d="{path}" fill="none" {style}/>')
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}'
            f' viewBox="0 0 {self.width} {self.height}" font-family="sans-serif" font-size="11">\n'
            + "\n".join(parts)
            + "\n</svg>\n"
        )


class Scale(NamedTuple):
    """Values from `low` to `high` between two pixels, linear or logarithmic."""

    low: float
    high: float
    first: float
    last: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Round numbers between the ends, seven at most."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = STEPS if self.high < 1000 * self.low else (1,)
            found = [step * 10.0**power for power in decades for step in steps]
        else:
            span = self.high - self.low
            power = 10.0 ** math.floor(math.log10(span / 3))
            each = next(power * step for step in (*STEPS, 10) if span <= 6.5 * power * step)
            first = math.ceil(self.low / each)
            found = [each * number for number in range(first, first + 8)]
        return [value for value in found if self.low <= value <= self.high]


class Plot:
    """Lines over numbers, in a box of a drawing; `xs` are the numbers with a tick, by name."""

    WIDTH, HEIGHT, LEFT, TOP = 210, 200, 45, 40

    def __init__(
        self,
        drawing: Drawing,
        left: int,
        title: str,
        under: str,
        xs: Mapping[float, str],
        y: tuple[float, float],
        *,
        log: bool = False,
    ) -> None:
        self._drawing = drawing
        first, last = left + self.LEFT, left + self.WIDTH - 10
        bottom = self.TOP + self.HEIGHT
        self._x = Scale(min(xs), max(xs), first + 10, last - 10, log=True)
        self._y = Scale(*y, bottom, self.TOP, log=log)
        drawing.words((first + last) / 2, self.TOP - 8, title, "middle")
        drawing.words((first + last) / 2, bottom + 32, under, "middle")
        drawing.lines(
            GREY,
            [(first, self.TOP), (first, bottom), (last, bottom)],
            *([(self._x(x), bottom), (self._x(x), bottom + 4)] for x in xs),
            *([(first - 4, self._y(y)), (first, self._y(y))] for y in self._y.ticks()),
        )
        for x, name in xs.items():
            if name:
                drawing.words(self._x(x), bottom + 15, name, "middle")
        for value in self._y.ticks():
            drawing.words(first - 6, self._y(value) + 4, f"{value:g}", "end")
        self._ends = first, last

    def line(self, points: Iterable[Point], colour: str, *, dashed: bool = False) -> None:
        self._drawing.lines(colour, [(self._x(x), self._y(y)) for x, y in points], dashed=dashed)

    def level(self, value: float, colour: str) -> None:
        """A dashed line across the plot."""
        height = self._y(value)
        self._drawing.lines(colour, [(end, height) for end in self._ends], dashed=True)

    def ranges(self, points: dict[float, Range], colour: str) -> None:
        """A line through the middles, and whiskers from low to high."""
        self.line([(x, middle) for x, (middle, _, _) in points.items()], colour)
        whiskers = []
        for x, (_, low, high) in points.items():
            whiskers += whisker((self._x(x), self._y(low)), (self._x(x), self._y(high)))
        self._drawing.lines(colour, *whiskers)


def whisker(begin: Point, end: Point) -> list[list[Point]]:
    """A line, level or upright, with a short bar across each end."""
    dx, dy = (0, 3) if begin[1] == end[1] else (3, 0)
    bars = [[(x - dx, y - dy), (x + dx, y + dy)] for x, y in (begin, end)]
    return [[begin, end], *bars]


def plots(count: int, legend: Iterable[tuple[str, str]], unit: str) -> Drawing:
    """A sheet for plots side by side, with the names of the colours at the right."""
    names = dict(legend)
    left = count * Plot.WIDTH + 5
    width = left + 30 + LETTER_PX * max((len(name) for name in names), default=0)
    drawing = Drawing(width, Plot.TOP + Plot.HEIGHT + 42)
    drawing.words(5, 14, unit)
    for row, (name, colour) in enumerate(names.items()):
        y = Plot.TOP + 15 * row
        drawing.rectangle(left, y, 16, 3, colour)
        drawing.words(left + 21, y + 6, name)
    return drawing
