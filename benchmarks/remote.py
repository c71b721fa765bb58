"""A checkpoint of an object store: gdsload, runai-model-streamer and the plain client.

    python -m benchmarks.remote DIRECTORY [--repeats 5] [--latency-ms 0 20] [--output RESULT.json]

versitygw serves a copy of the checkpoint by S3 on loopback (`make test-remote` builds it); with a
latency, a proxy in a process of its own delays each request. The loaders take turns, each in a
fresh process whose imports are not counted; every byte is read inside the clock. The server and
its disk cache share the machine with the loader. The sums of all tensors must be equal. An arm of
gdsload may have options of its backend:

    python -m benchmarks.remote DIRECTORY --arms gdsload gdsload:depth=64,request_bytes=4194304
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import children, object_stores, places, records, rounds, tables, values
from .layout import several, size
from .loaded import OURS, PEERS
from .object_stores import ObjectStore
from .records import Refused

ARMS = {
    "gdsload": OURS,
    "gdsload.stream": OURS,
    "runai": PEERS,
    "obstore.get": OURS,
    "obstore.get_range, 16 threads": OURS,
}
DIRECTORY_URL = {"gdsload", "gdsload.stream"}  # the others want the shards
LATENCIES_MS = (0, 20)


def loaded(arm: str, store: ObjectStore, shards: Sequence[str]) -> dict[str, Any]:
    """The result of one fresh process. Raises Refused if it fails."""
    kind = arm.partition(":")[0]
    python = places.python_of(ARMS[kind])
    environment = places.environment_of(
        python,
        **store.environment,
        RUNAI_STREAMER_S3_ENDPOINT=store.environment["AWS_ENDPOINT_URL"],
        RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING="0",
    )
    urls = [store.url()] if kind in DIRECTORY_URL else [store.url(shard) for shard in shards]
    command = [*places.command(python, "remote_worker"), arm, *urls]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with (
        subprocess.Popen(command, env=environment, text=True, **pipes) as process,
        children.limited(process, arm),
    ):
        out, errors = process.communicate("\n")
        lines = out.splitlines()
        if process.returncode or not lines:
            raise Refused(f"{arm}: {errors.strip()[-300:]}")
        return dict(json.loads(lines[-1]))


def measured(
    arms: Sequence[str], source: Path, latencies_ms: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """The runs of each arm behind each latency. Raises Refused where two differ in the bytes."""
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    runs: dict[tuple[int, str], list[dict[str, Any]]] = {}
    with object_stores.serving("s3", source, beside=places.CACHE) as server, ExitStack() as stack:
        for latency in latencies_ms:
            delayed = object_stores.slowed(server, latency / 1e3)
            store = stack.enter_context(delayed) if latency else server
            for turn in range(repeats):
                for arm in records.in_turn(arms, turn):
                    runs.setdefault((latency, arm), []).append(loaded(arm, store, shards))
                    records.say(f"{latency} ms, round {turn + 1}, {arm}: done")
    if len({run["sum"] for found in runs.values() for run in found}) != 1:
        raise Refused("the loaders do not agree on the weights")
    return [
        {
            "label": arm,
            "latency_ms": latency,
            "seconds": [run["seconds"] for run in found],
            "first_s": [run["first_s"] for run in found if run["first_s"] is not None],
            "cpu_s": [run["cpu_s"] for run in found],
            "peak_bytes": max(run["peak_rss_bytes"] or 0 for run in found),
        }
        for (latency, arm), found in runs.items()
    ]


def title(result: dict[str, Any]) -> str:
    repeats = several(result["rounds"], "repeat")
    return f"{result['name']}, {size(result['bytes'])}, from S3 on loopback; {repeats}"


def table(result: dict[str, Any]) -> str:
    """Medians of each arm behind each latency."""
    rows = []
    for arm in result["arms"]:
        took = tables.seconds_of(arm)
        first = f"{tables.spread(arm['first_s']).median:.2f}" if arm["first_s"] else ""
        rows.append([
            arm["label"], f"{arm['latency_ms']} ms",
            f"{took.median:.2f} ({took.low:.2f}-{took.high:.2f})",
            f"{result['bytes'] / took.median / 1e9:.2f}", first,
            f"{tables.spread(arm['cpu_s']).median:.2f}", size(arm["peak_bytes"]),
        ])  # fmt: skip
    head = ["loader", "latency", "s", "GB/s", "first tensor, s", "CPU s", "peak memory"]
    return tables.markdown(head, rows)


def notes(result: dict[str, Any]) -> str:
    return (
        f"- {records.described(result)}\n- median (least-most) of fresh processes in turns; server,"
        " proxy and loader share the cores; CPU seconds are the loader's"
    )


def arm_of(text: str) -> str:
    """An arm of the command line. Raises ArgumentTypeError."""
    kind, _, settings = text.partition(":")
    if kind not in ARMS or (settings and kind not in DIRECTORY_URL):
        raise argparse.ArgumentTypeError(f"{text!r}: the arms are {', '.join(ARMS)}")
    return text


def main(words: Sequence[str] | None = None) -> int:
    parser = records.parser_of("python -m benchmarks.remote", __doc__)
    records.add_source(parser)
    parser.add_argument("--repeats", type=values.whole, default=5, metavar="N")
    parser.add_argument("--arms", nargs="+", type=arm_of, default=[*ARMS])
    parser.add_argument(
        "--latency-ms", nargs="+", type=int, default=[*LATENCIES_MS], metavar="MILLISECONDS"
    )
    options = parser.parse_args(words)

    def result() -> tuple[dict[str, Any], str]:
        with records.source_of(options) as source:
            records.require_room(options)
            rounds.require_installed({arm.partition(":")[0] for arm in options.arms}, ARMS)
            arms = measured(options.arms, source, options.latency_ms, options.repeats)
            name = records.name_of(options, source)
            nbytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
            return records.record(
                "remote", source, name=name, bytes=nbytes, rounds=options.repeats, arms=arms
            ), f"remote-{name}"

    return records.publish("remote", options, result)


if __name__ == "__main__":
    sys.exit(main())
