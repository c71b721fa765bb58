"""Programs in which loaders take turns on one cold checkpoint: arguments, rounds and result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import cache, places, records, values
from .loaded import files_of
from .records import Refused


def require_installed(arms: Iterable[str], environments: Mapping[str, str]) -> None:
    """Raises Refused for an arm whose environment was not made: before the first round."""
    for arm in arms:
        if not places.python_of(environments[arm]).exists():
            raise Refused(f"{arm}: not installed: make bench-deps, or gdsload bench deps")


def program(
    kind: str,
    doc: str | None,
    words: Sequence[str] | None,
    measured: Callable[[str, Path, Sequence[int], dict[str, Any]], None],
    *,
    arms: Mapping[str, str],
    repeats: int,
    counts: tuple[str, Sequence[int]],
    fact: str,
) -> int:
    """Measures, prints and stores: the exit status of a program.

    Args:
        kind: Of the result, and the name of the program.
        doc: The docstring of the program.
        words: The arguments; None for those of the process.
        measured: Called with an arm, the checkpoint, the numbers of processes, and what was
            measured of this arm before, to which it adds one round. May raise Refused.
        arms: The loaders, with their environments.
        repeats: The default number of rounds.
        counts: The option for numbers of processes, and its default.
        fact: The name of what was measured of an arm, in the result.
    """
    option, default = counts
    parser = records.parser_of(f"python -m benchmarks.{kind}", doc)
    records.add_source(parser)
    parser.add_argument("--repeats", dest="rounds", type=values.whole, default=repeats, metavar="N")
    parser.add_argument("--arms", nargs="+", choices=[*arms], default=[*arms])
    parser.add_argument(
        option, dest="counts", nargs="+", type=values.whole, default=[*default], metavar="N"
    )
    options = parser.parse_args(words)

    def result() -> tuple[dict[str, Any], str]:
        with records.source_of(options) as source:
            records.require_room(options)
            require_installed(options.arms, arms)
            files = files_of(source)
            cache.require_cold_can_be(files)
            found: dict[str, dict[str, Any]] = {arm: {} for arm in options.arms}
            for turn in range(options.rounds):
                for arm in records.in_turn(options.arms, turn):
                    measured(arm, source, options.counts, found[arm])
                    records.say(f"round {turn + 1}, {arm}: done")
            name = records.name_of(options, source)
            nbytes = sum(file.stat().st_size for file in files)
            rows = [{"label": arm, fact: kept} for arm, kept in found.items()]
            return records.record(
                kind, source, name=name, bytes=nbytes, rounds=options.rounds, arms=rows
            ), f"{kind}-{name}"

    return records.publish(kind, options, result)
