"""Pictures of stored results: bars with their spread, rates by block size, costs by number,
timelines. Small SVG files, the same for the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from . import engines, start, states, sweep, tables
from .scale import PLANS
from .svg import BLACK, GREY, LETTER_PX, Drawing, Plot, Scale, plots, whisker

OURS, OTHERS, LIMITS, READS = "#3a76af", "#a6a6a6", "#519e3e", "#ef8636"
COLOURS = (OURS, READS, LIMITS, "#c43932", "#8d69b8", "#84584e", "#d57dbe", "#7f7f7f")


def coloured(names: Iterable[Any]) -> dict[Any, str]:
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def colour(label: str) -> str:
    if label.startswith("gdsload"):
        return OURS
    return LIMITS if label.partition(":")[0] in tables.LIMITS else OTHERS


BAR_PX, ROW_PX, ROOM_PX, THIN_PX = 14, 20, 430, 7


def rows(
    title: str, labels: list[str], most: float, under: list[str], row_px: int = ROW_PX
) -> tuple[Drawing, Scale]:
    """A sheet with a row for each label over an axis of seconds."""
    left = 20 + LETTER_PX * max(map(len, labels))
    right, bottom = left + ROOM_PX, 30 + row_px * len(labels)
    width = max(
        right + 60, 20 + LETTER_PX * len(title), left + 10 + LETTER_PX * max(map(len, under))
    )
    drawing = Drawing(width, bottom + 25 + 15 * len(under))
    x = Scale(0, 1.02 * most, left, right)
    drawing.words(10, 16, title)
    for row, label in enumerate(labels):
        drawing.words(left - 6, 30 + row_px * row + row_px // 2 + 2, label, "end")
    drawing.lines(
        GREY,
        [(left, 28), (left, bottom), (right, bottom)],
        *([(x(tick), bottom), (x(tick), bottom + 4)] for tick in x.ticks()),
    )
    for tick in x.ticks():
        drawing.words(x(tick), bottom + 16, f"{tick:g}", "middle")
    for number, line in enumerate(under):
        drawing.words(left, bottom + 32 + 15 * number, line)
    return drawing, x


def bars(result: dict[str, Any]) -> Drawing:
    """Seconds of each arm, the fastest on top; whiskers from the fastest run to the slowest."""
    arms = tables.fastest_first(result)
    found = [tables.seconds_of(arm) for arm in arms]
    drawing, x = rows(
        tables.title(result),
        [arm["label"] for arm in arms],
        max(one.high for one in found),
        [
            "seconds until every byte was touched: median, fastest and slowest run",
            "blue: gdsload, grey: others, green: limits of disk and memory",
        ],
    )
    for row, (arm, one) in enumerate(zip(arms, found, strict=True)):
        y = 30 + ROW_PX * row
        drawing.rectangle(x(0), y, x(one.median) - x(0), BAR_PX, colour(arm["label"]))
        middle = y + BAR_PX // 2
        drawing.lines(BLACK, *whisker((x(one.low), middle), (x(one.high), middle)))
        drawing.words(x(one.high) + 8, middle + 4, f"{one.median:.2f} s")
    return drawing


def grouped(result: dict[str, Any]) -> Drawing:
    """A thin bar for each state of memory of each arm, the fastest arm on top."""
    names = result["conditions"]["states"]
    arms = states.fastest_first(result)
    found = [[tables.seconds_of(arm["states"][name]) for name in names] for arm in arms]
    row_px = 6 + THIN_PX * len(names)
    drawing, x = rows(
        tables.title(result),
        [arm["label"] for arm in arms],
        max(one.high for several in found for one in several),
        [
            "seconds until every byte was touched: median, fastest and slowest run; memory:",
            ", ".join(f"{name} ({states.TITLES[name]})" for name in names),
            "blue: gdsload, grey: others, green: limits of disk and memory",
        ],
        row_px,
    )
    for row, (arm, several) in enumerate(zip(arms, found, strict=True)):
        for place, one in enumerate(several):
            y = 30 + row_px * row + THIN_PX * place
            drawing.rectangle(x(0), y, x(one.median) - x(0), THIN_PX - 2, colour(arm["label"]))
            middle = y + THIN_PX // 2 - 1
            drawing.lines(BLACK, [(x(one.low), middle), (x(one.high), middle)])
        drawing.words(
            x(max(one.high for one in several)) + 8,
            30 + row_px * row + row_px // 2 + 2,
            ", ".join(f"{one.median:.2f}" for one in several),
        )
    return drawing


def short(value: float) -> str:
    """10, 41M, 1.6G."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{float(f'{value / factor:.2g}'):g}{unit}"
    return f"{value:g}"


def block_name(nbytes: float) -> str:
    """4K, 1M, as the command line takes them."""
    return f"{nbytes / 2**20:g}M" if nbytes >= 1 << 20 else f"{nbytes / 2**10:g}K"


def rates(result: dict[str, Any]) -> Drawing:
    """GB/s against block size: a line for each backend, a plot for each batch size."""
    groups, shades = sweep.grouped(result), coloured(sweep.grouped(result))
    batches = sorted({line["batch"] for line in result["lines"]})
    limit = max(result["limits"]) / 1e9
    names = {
        f"{name}, {threads} threads" if threads > 1 else name: shades[name, threads]
        for name, threads in groups
    }
    legend = [*names.items(), ("plain reader", GREY)]
    most = max(limit, *(line["bytes_per_second"] / 1e9 for line in result["lines"]))
    drawing = plots(len(batches), legend, "GB/s")
    for number, batch in enumerate(batches):
        blocks = sorted({line["block"] for line in result["lines"] if line["batch"] == batch})
        named = {block: block_name(block) for block in blocks[::4]}
        plot = Plot(
            drawing,
            number * Plot.WIDTH,
            f"batch size {batch}",
            "block size, bytes",
            {block: named.get(block, "") for block in blocks},
            (0, most),
        )
        for group, lines in groups.items():
            plot.line(
                [
                    (line["block"], line["bytes_per_second"] / 1e9)
                    for line in lines
                    if line["batch"] == batch
                ],
                shades[group],
            )
        plot.level(limit, GREY)
    return drawing


def depths(result: dict[str, Any]) -> Drawing:
    """GB/s against reads in flight: a plot for each engine, a line for each request size."""
    found = engines.groups(result)
    rate = result["checkpoint"]["bytes"] / 1e9
    most = 1.05 * rate / min(one.low for shapes in found.values() for one in shapes.values())
    sizes = coloured(sorted({size for shapes in found.values() for size, _ in shapes}))
    legend = [(f"requests of {block_name(size)}", shade) for size, shade in sizes.items()]
    drawing = plots(len(found), legend, "GB/s: median, fastest and slowest")
    for place, (engine, shapes) in enumerate(found.items()):
        numbers = sorted({number for _, number in shapes})
        plot = Plot(
            drawing,
            place * Plot.WIDTH,
            engine.partition(",")[0],
            "reads in flight",
            {number: f"{number}" for number in numbers},
            (0, most),
        )
        for size, shade in sizes.items():
            took = {number: shapes[size, number] for number in numbers if (size, number) in shapes}
            plot.ranges(
                {
                    number: (rate / one.median, rate / one.high, rate / one.low)
                    for number, one in took.items()
                },
                shade,
            )
    return drawing


def curves(result: dict[str, Any]) -> Drawing | None:
    """Seconds against what varied, both on logarithmic scales. Plans alone make no curve."""
    sections = {
        name: entries for name, entries in result["sections"].items() if entries and name != PLANS
    }
    if not sections:
        return None
    drawing = plots(len(sections), [("whole", OURS), ("beside reading", READS)], "seconds")
    for place, (name, entries) in enumerate(sections.items()):
        found = {entry[name]: tables.seconds_of(entry) for entry in entries}
        # A logarithm has no place for what is lost among the reads of a few bytes.
        beside = [
            (entry[name], entry["beside_s"]) for entry in entries if entry.get("beside_s", 0) > 0
        ]
        least = min([one.low for one in found.values()] + [rest for _, rest in beside])
        most = max(one.high for one in found.values())
        plot = Plot(
            drawing,
            place * Plot.WIDTH,
            name,
            "",
            {x: short(x) for x in found},
            (least, most),
            log=True,
        )
        plot.ranges({x: (one.median, one.low, one.high) for x, one in found.items()}, OURS)
        if beside:
            plot.line(beside, READS, dashed=True)
    return drawing


PHASES = {"imports": OTHERS, "loaded": OURS, "ready": LIMITS}


def timeline(result: dict[str, Any]) -> Drawing:
    """From process start: imports, loading and touching, and below each what was read ahead."""
    found = tables.by_label(result)
    limit = start.floor(result)
    drawing, x = rows(
        start.title(result),
        list(start.MODELS),
        max(limit, *(found[arm]["marks"]["ready"] for arm in start.MODELS)),
        [
            "seconds since the process started; grey: imports, blue: load, green: touch,",
            "orange: reads ahead; dashed: max(imports alone, reading alone)",
        ],
    )
    for row, arm in enumerate(start.MODELS):
        y, last = 30 + ROW_PX * row, 0.0
        marks, reads = found[arm]["marks"], found[arm]["reads"]
        for name, shade in PHASES.items():
            drawing.rectangle(x(last), y, x(marks[name]) - x(last), BAR_PX - 4 * bool(reads), shade)
            last = marks[name]
        for begin, end in reads:
            drawing.rectangle(x(begin), y + BAR_PX - 3, x(end) - x(begin), 4, READS)
        drawing.words(x(last) + 4, y + 11, f"{last:.2f} s")
    drawing.lines(BLACK, [(x(limit), 28), (x(limit), 30 + ROW_PX * len(start.MODELS))], dashed=True)
    return drawing


# What is drawn of each kind of result.
KINDS: dict[str, Callable[[dict[str, Any]], Drawing | None]] = {
    "loads": bars,
    "states": grouped,
    "best": bars,
    "engines": depths,
    "io": rates,
    "scale": curves,
    "start": timeline,
}


def drawing(result: dict[str, Any]) -> Drawing | None:
    """The picture of a result, None where there is nothing to draw."""
    draw = KINDS.get(result["kind"])
    if result["kind"] == "loads" and len(result["arms"]) < 3:
        return None  # two bars say no more than the table
    return draw(result) if draw else None
