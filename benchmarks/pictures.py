"""Pictures of kept results: bars with their spread, disk throughput over time, rates by block size,
costs by number, timelines. matplotlib draws them; where it is missing there are tables and no
pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import costs, engines, start, sweep, tables
from .records import Refused
from .scale import PLANS

OURS, OTHERS, LIMITS = "tab:blue", "0.65", "tab:green"
MOST_LINES = 6


def axes(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """A figure and its axes. Raises Refused where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise Refused(f"no pictures: {error}; install gdsload[bench]") from error
    matplotlib.use("svg")
    # The same picture from the same result: it is kept under version control.
    matplotlib.rcParams["svg.hashsalt"] = "gdsload"
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters, not outlines: a third of the size
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, height), squeeze=False)


def save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def colour(label: str) -> str:
    if label.startswith("gdsload"):
        return OURS
    return LIMITS if label.partition(":")[0] in ("bare", "fio", "pinned") else OTHERS


def bars(result: dict[str, Any], path: Path) -> Path:
    """Seconds of each arm, the fastest on top; whiskers from the fastest run to the slowest."""
    runs = tables.grouped(result)
    order = sorted(runs, key=lambda label: tables.seconds_of(runs[label]).median, reverse=True)
    found = [tables.seconds_of(runs[label]) for label in order]
    figure, ((plot,),) = axes(9, 0.9 + 0.3 * len(order))
    plot.barh(order, [one.median for one in found], color=[colour(label) for label in order],
              xerr=[[one.median - one.low for one in found],
                    [one.high - one.median for one in found]], capsize=3)  # fmt: skip
    plot.set_xlabel("seconds until every byte was touched: median, fastest and slowest run\n"
                    "blue: gdsload, grey: others, green: limits of disk and memory")  # fmt: skip
    plot.set_title(tables.title(result), fontsize=9)
    return save(figure, path)


def throughput(result: dict[str, Any], path: Path) -> Path:
    """What the disk read while the median run of each of the fastest arms went on."""
    if result["conditions"]["warm"]:
        raise Refused("a warm load reads nothing from the disk")
    runs = tables.grouped(result)
    order = sorted(runs, key=lambda label: tables.seconds_of(runs[label]).median)
    figure, ((plot,),) = axes(9, 3.5)
    drawn = 0
    for label in order:
        samples: list[Any] = next(
            (run["disk_samples"] for run in runs[label] if run.get("disk_samples")), []
        )
        if len(samples) < 3 or drawn == MOST_LINES:
            continue
        drawn += 1
        times = [(one[0] + other[0]) / 2 for one, other in pairwise(samples)]
        rates = [(other[1] - one[1]) / (other[0] - one[0]) / 1e9
                 for one, other in pairwise(samples)]  # fmt: skip
        plot.plot(times, rates, label=label)
    if not drawn:
        raise Refused("no run of this result has samples of the disk's counter")
    plot.set_xlabel("seconds since the load began")
    plot.set_ylabel("GB/s read from the disk")
    plot.set_title(tables.title(result), fontsize=9)
    plot.legend(fontsize=7)
    return save(figure, path)


def short(value: float) -> str:
    """10, 41M, 1.6G."""
    for factor, unit in ((1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{float(f'{value / factor:.2g}'):g}{unit}"
    return f"{value:,.0f}"


def block_name(nbytes: float) -> str:
    """4K, 1M, as the command line takes them."""
    return f"{nbytes / 2**20:g}M" if nbytes >= 1 << 20 else f"{nbytes / 2**10:g}K"


def rates(result: dict[str, Any], path: Path) -> Path:
    """GB/s against block size: a line for each road, a plot for each batch size."""
    groups = sweep.grouped(result)
    batches = sorted({line["batch"] for line in result["lines"]})
    figure, (plots,) = axes(4.5 * len(batches), 3.5, len(batches))
    for plot, batch in zip(plots, batches, strict=True):
        for (road, threads), lines in groups.items():
            points = [line for line in lines if line["batch"] == batch]
            blocks = [line["block"] for line in points]
            found = [line["bytes_per_second"] / 1e9 for line in points]
            name = f"{road}, {threads} threads" if threads > 1 else road
            plot.plot(blocks, found, marker=".", label=name)
        plot.axhline(max(result["limits"]) / 1e9, color="0.5", linestyle=":", label="plain reader")
        plot.set_xscale("log", base=2)
        plot.set_ylim(bottom=0)
        plot.xaxis.set_major_formatter(lambda value, _: block_name(value))
        plot.set_xlabel("block size, bytes (powers of 1024)")
        plot.set_title(f"batch size {batch}", fontsize=9)
    plots[0].set_ylabel("GB/s")
    plots[0].legend(fontsize=7)
    return save(figure, path)


def depths(result: dict[str, Any], path: Path) -> Path:
    """GB/s against reads in flight: a plot for each road, a line for each request size."""
    found = engines.groups(result)
    rate = result["checkpoint"]["bytes"] / 1e9
    most = 1.05 * rate / min(one.low for shapes in found.values() for one in shapes.values())
    figure, (plots,) = axes(3.4 * len(found), 3.5, len(found))
    for plot, (road, shapes) in zip(plots, found.items(), strict=True):
        for size in sorted({size for size, _ in shapes}):
            numbers = sorted(number for other, number in shapes if other == size)
            took = [shapes[size, number] for number in numbers]
            middles = [rate / one.median for one in took]
            plot.errorbar(
                numbers, middles, label=f"requests of {block_name(size)}", marker=".", capsize=3,
                yerr=[[mid - rate / one.high for mid, one in zip(middles, took, strict=True)],
                      [rate / one.low - mid for mid, one in zip(middles, took, strict=True)]],
            )  # fmt: skip
        plot.set_xscale("log", base=2)
        plot.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        plot.set_ylim(0, most)
        plot.set_xlabel("reads in flight")
        plot.set_title(road.replace(", ", "\n", 1), fontsize=8)
    plots[0].set_ylabel("GB/s: median, fastest and slowest")
    plots[0].legend(fontsize=7)
    return save(figure, path)


def curves(result: dict[str, Any], path: Path) -> Path:
    """Seconds against what varied, both on logarithmic scales."""
    sections = {
        name: entries for name, entries in result["sections"].items() if entries and name != PLANS
    }
    if not sections:
        raise Refused("plans alone make no curve")
    figure, (plots,) = axes(3.2 * len(sections), 3.2, len(sections))
    for plot, (name, entries) in zip(plots, sections.items(), strict=True):
        found = [tables.seconds_of(entry["runs"]) for entry in entries]
        where = [entry[name] for entry in entries]
        plot.errorbar(where, [one.median for one in found], capsize=3, marker=".", label="whole",
                      yerr=[[one.median - one.low for one in found],
                            [one.high - one.median for one in found]])  # fmt: skip
        if name != "loads":
            # A logarithm has no place for what is lost among the reads of a few bytes.
            beside = [rest if rest > 0 else None for rest in map(costs.beside, entries)]
            plot.plot(where, beside, marker=".", linestyle="--", label="beside reading")
        plot.set_xscale("log")
        plot.set_yscale("log")
        # Numbers as people write them, and none between those that were measured.
        plot.set_xticks(where, [short(value) for value in where])
        plot.minorticks_off()
        plot.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        plot.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        plot.tick_params(labelsize=7)
        plot.set_xlabel(name)
    plots[0].set_ylabel("seconds")
    plots[0].legend(fontsize=7)
    return save(figure, path)


PHASES = {"imports": "0.75", "loaded": OURS, "ready": LIMITS}


def timeline(result: dict[str, Any], path: Path) -> Path:
    """From process start: imports, loading and touching, and below each what was read ahead."""
    found = tables.grouped(result)
    figure, ((plot,),) = axes(9, 2.8)
    for row, arm in enumerate(start.MODELS):
        median = start.median_run(found[arm])
        last = 0.0
        for name, shade in PHASES.items():
            plot.barh(row, median["marks"][name] - last, left=last, height=0.4, color=shade)
            last = median["marks"][name]
        plot.text(last, row, f" {last:.2f} s", va="center")
        reads = [(begin, end - begin) for _, begin, end in median["reads"]]
        plot.broken_barh(reads, (row + 0.22, 0.15), color="tab:orange")
    plot.axvline(start.floor(result), color="0.3", linestyle=":", linewidth=1)
    plot.set_yticks(range(len(start.MODELS)), start.MODELS)
    plot.margins(x=0.1)
    plot.set_xlabel("seconds since the process started; grey: imports, blue: load, green: touch,\n"
                    "orange: reads ahead; dotted: max(imports alone, reading alone)")  # fmt: skip
    plot.set_title(start.title(result), fontsize=9)
    return save(figure, path)


# What is drawn of each kind of result, by the ending of its file.
KINDS: dict[str, dict[str, Callable[[dict[str, Any], Path], Path]]] = {
    "loads": {"": bars, "-throughput": throughput},
    "compare": {"": bars},
    "best": {"": bars},
    "engines": {"": depths},
    "io": {"": rates},
    "scale": {"": curves},
    "start": {"": timeline},
}


def draw(result: dict[str, Any], stem: Path) -> list[Path]:
    """All pictures of a result, as `stem`.svg and so on. Raises Refused without matplotlib."""
    drawn = []
    kind = result.get("kind") or ("loads" if "checkpoint" in result else "")
    for ending, picture in KINDS.get(kind, {}).items():
        path = stem.with_name(f"{stem.name}{ending}.svg")
        if ending:
            try:
                drawn.append(picture(result, path))
            except Refused:
                continue  # older results have no samples
        else:
            drawn.append(picture(result, path))
    return drawn
