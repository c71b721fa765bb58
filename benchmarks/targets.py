"""The targets of gdsload beside the measured values: one table, from the stored results.

A target whose result is not there says so. What is compared is always of one result: the arms of
one table, in turn on one machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from . import arms, first_read, gpu, parse, pipeline, pool, start, states, tables
from .layout import several
from .places import RESULTS

Result = dict[str, Any]
OURS, MODEL, STOCK, CAST = "gdsload", "gdsload-model", "transformers", ":dtype=float32"
# Two processes that hold the same tensors differ by some pages; and what a load takes beside them
# is bounded, and no part of the model: four slots of 4 MiB.
MEMORY_SLACK, SLOT_BYTES = 1.01, 16 << 20
GROWTH_BYTES = 1 << 20


class Found(NamedTuple):
    """What a result says of a target."""

    measured: str
    met: bool


class Target(NamedTuple):
    """One line: what is measured, what is wanted of it, and the results that can say it."""

    what: str
    wanted: str
    files: tuple[str, ...]
    measure: Callable[[Result], Found]


def seconds(result: Result, label: str) -> float:
    return tables.seconds_of(tables.by_label(result)[label]).median


def by_rounds(result: Result, label: str, other: str) -> float:
    """How many times as long as `other` an arm takes: the median over the rounds."""
    found = tables.by_label(result)
    return states.by_rounds(found[label], found[other])


def loaders(result: Result) -> list[str]:
    """The labels of what loads the very same files in place of gdsload."""
    return [
        arm["label"]
        for arm in result["arms"]
        if arm["kind"] in arms.KINDS
        and arm["kind"] not in (OURS, *tables.LIMITS)
        and arms.KINDS[arm["kind"]].gives == "tensors"
        and arms.KINDS[arm["kind"]].convert is None
    ]


def among(result: Result) -> str:
    """How many libraries `loaders` are of: a table has those that could run, or were asked for."""
    kinds = {arm["kind"] for arm in result["arms"] if arm["label"] in loaders(result)}
    return several(len(kinds), "other loader")


def beside(result: Result, other: str, most: float) -> Found:
    """At most a multiple of the seconds of another arm."""
    ratio = seconds(result, OURS) / seconds(result, other)
    rounds = by_rounds(result, OURS, other)
    return Found(f"{ratio:.2f} of {other}'s time ({rounds:.2f} by rounds)", ratio <= most)


def bare_rate(result: Result) -> Found:
    limit = tables.yardstick(result)
    if limit is None:
        raise KeyError("no bare reader")
    ratio = seconds(result, limit) / seconds(result, OURS)
    rounds = 1 / by_rounds(result, OURS, limit)
    return Found(f"{ratio:.2f} of {limit} ({rounds:.2f} by rounds)", ratio >= 0.95)


def fastest(result: Result) -> Found:
    found = beside(result, min(loaders(result), key=lambda label: seconds(result, label)), 1.0)
    return found._replace(measured=f"{found.measured}; {among(result)}")


def warm(result: Result) -> Found:
    return beside(result, "safetensors-mmap", 1.05)


def least(
    fact: str, form: Callable[[float], str], slack: float = 1.0, more: float = 0.0
) -> Callable[[Result], Found]:
    """No more of something than the loader that takes the least of it, but for some slack."""

    def measure(result: Result) -> Found:
        medians = {
            arm["label"]: arm["medians"][fact] for arm in result["arms"] if fact in arm["medians"]
        }
        best = min(loaders(result), key=medians.__getitem__)
        return Found(
            f"{form(medians[OURS])}, {best} {form(medians[best])}; {among(result)}",
            medians[OURS] <= slack * medians[best] + more,
        )

    return measure


def adds_little(result: Result) -> Found:
    most = seconds(result, OURS) * 1.05 + 0.05
    took = seconds(result, MODEL)
    return Found(f"{took:.2f} s of {most:.2f}", took <= most)


def times_stock(times: float, dtype: str = "") -> Callable[[Result], Found]:
    """`times` times as fast as transformers."""

    def measure(result: Result) -> Found:
        ratio = seconds(result, STOCK + dtype) / seconds(result, MODEL + dtype)
        rounds = by_rounds(result, STOCK + dtype, MODEL + dtype)
        return Found(f"{ratio:.2f} times ({rounds:.2f} by rounds)", min(ratio, rounds) >= times)

    return measure


def model_memory(result: Result) -> Found:
    found = tables.by_label(result)
    ours, stock = (found[label]["medians"]["peak_rss_bytes"] for label in (MODEL, STOCK))
    return Found(f"{ours / 1e9:.2f} GB, transformers {stock / 1e9:.2f}", ours <= stock)


def process_start(result: Result) -> Found:
    if why := start.too_few(result):
        raise ValueError(why)
    return Found(*start.beside_limit(result))


def require(result: Result, **stated: Any) -> None:
    """Raises ValueError if a result is not of what its target states."""
    for name, value in stated.items():
        if result[name] != value:
            raise ValueError(f"the result is a trial: {name} {result[name]:,} instead of {value:,}")


def require_rounds(number: int, least: int) -> None:
    if number < least:
        raise ValueError(TRIAL)


def require_parsed(result: Result) -> None:
    require(result, tensors=100_000, shards=200)
    require_rounds(len(result["together"]["seconds"]), LEAST_ROUNDS)


def of_tensors(result: Result) -> Found:
    require_parsed(result)
    each = parse.together(result)
    return Found(f"{each:.2f} us", each < parse.MOST_US)


def of_headers(result: Result) -> Found:
    require_parsed(result)
    took = parse.opening(result)
    return Found(f"{took:.2f} s", took < 1.0)


def grown(result: Result) -> Found:
    require(result, models=20, limit_bytes=4 << 30)
    require_rounds(result["turns"], 2)
    more = pool.growth(result)
    within = [
        each < (GROWTH_BYTES if name.endswith("_bytes") else 1) for name, each in more.items()
    ]
    return Found(
        f"{more['anonymous_bytes'] / 1e6:.1f} MB, {more['mappings']} mappings,"
        f" {more['descriptors']} descriptors",
        all(within),
    )


def flat(result: Result) -> Found:
    entries = result["sections"]["bytes"]
    require(entries[-1], bytes=40 * entries[1]["bytes"])
    require_rounds(min(len(entry["seconds"]) for entry in entries), LEAST_ROUNDS)
    few, many = (entry["beside_s"] for entry in (entries[1], entries[-1]))
    return Found(f"{many / few:.2f} times", many / few < 2)


def pinned_rate(share: float) -> Callable[[Result], Found]:
    """That share of the rate of the limit, the slower of the bus and the disk."""

    def measure(result: Result) -> Found:
        limit = tables.yardstick(result)
        if limit is None:
            raise KeyError("no limit")
        ratio = seconds(result, limit) / seconds(result, OURS)
        return Found(f"{ratio:.2f} of {limit}", ratio >= share)

    return measure


SMALL, LARGE = "qwen3-0.6b", "qwen2.5-7b"
# After the colon, the state of memory.
COLD = tuple(
    f"cold-{model}-states{host}:{state}"
    for host in ("", "-intel")
    for model in (SMALL, LARGE)
    for state in ("huge", "small", "idle")
)
TARGETS = (
    Target("cold: the bare reader's rate", "0.95 of it", COLD, bare_rate),
    Target("cold: the fastest loader", "no slower than any other", COLD, fastest),
    Target("cold: CPU", "no more than any other", COLD,
           least("cpu_s", lambda value: f"{value:.2f} s")),
    Target("cold: peak memory", "no more than any other, to 1 % and 16 MiB", COLD,
           least("peak_rss_bytes", lambda value: f"{value / 1e9:.3f} GB", MEMORY_SLACK,
                 SLOT_BYTES)),
    Target("warm", "1.05 of safetensors' time", (f"warm-{SMALL}-small", f"warm-{LARGE}-none"),
           warm),
    Target("plan and hand over, 100,000 tensors", "under 5 us a tensor", ("parse",), of_tensors),
    Target("open 200 shards of 100,000 tensors", "under 1 s", ("parse",), of_headers),
    Target("cost beside reading, 40 times the bytes", "flat: under 2 times", ("scale",), flat),
    Target("model, cold", "load_file's time + 5 % + 50 ms",
           (f"models-{SMALL}-cold", f"models-{LARGE}-cold"), adds_little),
    Target("model, cold", "1.3 times as fast as transformers",
           (f"models-{SMALL}-cold", f"models-{LARGE}-cold"), times_stock(1.3)),
    Target("model, warm", "1.3 times as fast as transformers", (f"models-{SMALL}-warm",),
           times_stock(1.3)),
    Target("model, cold, cast to float32", "twice as fast as transformers",
           (f"models-{SMALL}-cold",), times_stock(2.0, CAST)),
    Target("model, warm, cast to float32", "1.5 times as fast as transformers",
           (f"models-{SMALL}-warm",), times_stock(1.5, CAST)),
    Target("model of 18,867 tensors, warm", "3 times as fast as transformers",
           ("models-thin-moe-warm",), times_stock(3.0)),
    Target("model of 2 GB, mixture of experts: peak memory", "no more than transformers",
           ("models-small-moe-cold",), model_memory),
    Target("process start with prefetch", "10 % over the longer half",
           (f"start-{SMALL}", f"start-{LARGE}"), process_start),
    Target("20 models through a 4 GiB pool: growth", "none", ("pool",), grown),
    # Its other targets, which gpu-check measures, are those of `gpu.aims`.
    Target("GPU, cold", "0.95 of fio or of pinned memory",
           (f"cold-{SMALL}-small-cuda", f"cold-{LARGE}-small-cuda"), pinned_rate(0.95)),
    Target("GPU, cold", "no slower than any other", (f"cold-{LARGE}-small-cuda",), fastest),
)  # fmt: skip
NOT_THERE, TRIAL = "not measured", "the result is a trial of few rounds"
LEAST_ROUNDS = 3


def lines(directory: Path = RESULTS) -> Iterable[list[str]]:
    """The rows: target, result, wanted, measured, and whether that is enough."""
    for target in TARGETS:
        for name in target.files:
            stem, _, state = name.partition(":")
            path = directory / f"{stem}.json"
            if not path.exists():
                yield [target.what, name, target.wanted, NOT_THERE, ""]
                continue
            try:
                result = json.loads(path.read_text())
                require_rounds(
                    result.get("conditions", {}).get("repeats", LEAST_ROUNDS), LEAST_ROUNDS
                )
                found = target.measure(states.of_state(result, state) if state else result)
            except (KeyError, ValueError) as error:
                yield [target.what, name, target.wanted, f"{NOT_THERE}: {error}", ""]
                continue
            said = "met" if found.met else "missed"
            yield [target.what, name, target.wanted, found.measured, said]
    for name, entries, aims, what in (
        ("pipeline", "pipeline", pipeline.aims, "staging pipeline, "),
        ("first-read", "loads", first_read.aims, ""),
    ):
        path = directory / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        trial = min(entry["loads"] for entry in result[entries]) < LEAST_ROUNDS
        for target, wanted, *found in aims(result):
            found = [f"{NOT_THERE}: {TRIAL}", ""] if trial else found
            yield [f"{what}{target}", name, wanted, *found]
    for path in sorted(directory.glob("gpu-*.json")):
        for what, wanted, measured, said in gpu.aims(json.loads(path.read_text())):
            yield [f"GPU, {what}", path.stem, wanted, measured, said]


def table(directory: Path = RESULTS) -> str:
    """All targets."""
    return tables.markdown(["target", "result", "wanted", "measured", ""], lines(directory))
