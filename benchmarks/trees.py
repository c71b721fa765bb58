"""Replicas that serve while they receive: a tree of processes, and a model of up to 1,000 replicas.

    gdsload manifest DIRECTORY
    python -m benchmarks.trees DIRECTORY --fanout 2 --replicas 6 --source-rate 32M

One process, 0, reads the checkpoint from disk, at a limited rate, so that the others can start
meanwhile, and serves it. Replica i serves what it receives from (i - 1) // fanout. All of them are
on this machine, and share its cores. The model is arithmetic, with measured rates where there are
some and stated ones elsewhere; no network of several machines was measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from . import children, large, places, records, tables, values
from .layout import several, size
from .records import Refused

REPLICAS = (1, 10, 100, 1_000)
FANOUTS = (1, 2, 4, 8)
MODEL = "llama-3.1-70b"
LINK = 12.5e9  # bytes per second of a network card in each direction: 100 Gbit/s, stated
STORE = 12.5e9  # of an object store, for all replicas together, stated
LATENCY = 0.001  # seconds until a replica knows that bytes have arrived at its parent, stated
PIECE_BYTES = 8 << 20  # of one request, and of a block with a checksum
IN_FLIGHT = 8  # requests of one reader
SAMPLE_SECONDS = 0.01


class Rates(NamedTuple):
    """Bytes per second of one node: all that it receives, all that it sends."""

    receive: float
    send: float


def levels(replicas: int, fanout: int) -> int:
    """The levels below the source that hold so many replicas."""
    level = held = 0
    while held < replicas:
        level += 1
        held += fanout**level
    return level


def edge(rates: Rates, fanout: int) -> float:
    """Bytes per second from a parent to one of its children, if all children read."""
    return min(rates.receive, rates.send / fanout)


def tree_seconds(nbytes: float, replicas: int, fanout: int, rates: Rates) -> float:
    """The time until all replicas of a tree have all bytes, each serving while it receives.

    A level begins when the first block has arrived above it and was compared: its requests share
    the rate, and a block ends in the next request.
    """
    fanout = min(fanout, replicas)
    rate = edge(rates, fanout)
    later = (IN_FLIGHT + 1) * PIECE_BYTES / rate + LATENCY
    return nbytes / rate + (levels(replicas, fanout) - 1) * later


def whole_seconds(nbytes: float, replicas: int, fanout: int, rates: Rates) -> float:
    """The same if a replica serves only what it has as a whole."""
    fanout = min(fanout, replicas)
    return levels(replicas, fanout) * nbytes / edge(rates, fanout)


def shared_seconds(nbytes: float, replicas: int, receive: float, total: float) -> float:
    """The time until all replicas have read all bytes of one place that sends `total`."""
    return nbytes / min(receive, total / replicas)


def measured_rates() -> Rates:
    """One reader of a peer, and bare NIXL from one source, as `benchmarks.peers` has measured."""
    path = places.RESULTS / "peers.json"
    try:
        ways = {each["way"]: each for each in json.loads(path.read_text())["ways"]}
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}: `python -m benchmarks.peers` first") from error
    receive, send = (
        ways[way]["bytes"] / tables.spread(ways[way]["seconds"]).median
        for way in ("peer", "bare NIXL")
    )
    return Rates(receive, min(send, LINK))


# --- processes ---------------------------------------------------------------------------------


def replica() -> None:
    """A process of the tree: gets the URL of its parent, serves, and tells when bytes came."""
    import torch  # noqa: F401 - its import is not part of the times

    import gdsload
    from gdsload.remote.nixl_library import nixl_api

    nixl_api()
    _say({"ready": True})
    source, rate = json.loads(sys.stdin.readline())
    gdsload.warmup.limit_bandwidth(rate, of="all")
    with gdsload.serve(source) as server:
        status = server.status()
        _say({"url": server.url, "version": status.version})
        first = 0.0
        while status.received_bytes < status.nbytes and not status.failure:
            time.sleep(SAMPLE_SECONDS)
            status = server.status()
            if not first and status.received_bytes > PIECE_BYTES:
                first = time.monotonic()
        server.wait()
        done = time.monotonic()
        _say({"first": first or done, "all": done, "bytes": server.status().received_bytes})
        sys.stdin.readline()


def _say(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


class Replica:
    """A process of the tree, seen from the one that measures."""

    def __init__(self, stack: ExitStack) -> None:
        command = [sys.executable, "-m", "benchmarks.trees", "--replica"]
        self._process = stack.enter_context(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
        )
        stack.callback(self._process.kill)
        stack.enter_context(children.limited(self._process, "a replica"))

    def tell(self, *words: Any) -> None:
        """Sends a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")

    def answer(self) -> dict[str, Any]:
        """The next line. Raises Refused if the process has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # NIXL writes to stdout, too
                found: dict[str, Any] = json.loads(line)
                return found
        raise Refused("a replica has ended before it had all bytes")


def grown(directory: Path, replicas: int, fanout: int, rate: int) -> list[dict[str, Any]]:
    """Runs a tree: the parent and the times of each process, from the start of the first one."""
    with ExitStack() as stack:
        nodes = [Replica(stack) for _ in range(replicas + 1)]
        for node in nodes:
            node.answer()
        started = time.monotonic()
        urls, versions = [], []
        for number, node in enumerate(nodes):
            if number:
                node.tell(urls[(number - 1) // fanout], None)
            else:
                node.tell(str(directory), rate)
            facts = node.answer()
            urls.append(facts["url"])
            versions.append(facts["version"])
        if len(set(versions)) != 1:
            raise Refused(f"they serve different versions; has {directory} a manifest?")
        found = []
        for number, node in enumerate(nodes):
            facts = node.answer()
            found.append(
                {
                    "replica": number,
                    "parent": (number - 1) // fanout,
                    "bytes": facts["bytes"],
                    "first_s": facts["first"] - started,
                    "all_s": facts["all"] - started,
                }
            )
        for node in nodes:
            node.tell("end")
        return found


# --- text --------------------------------------------------------------------------------------


def title(result: dict[str, Any]) -> str:
    return f"A tree of replicas, fan-out {result['fanout']}, and a model of up to 1,000 replicas"


def early(nodes: list[dict[str, Any]]) -> int:
    """The number of replicas that had bytes of a parent which had not yet got all."""
    return sum(each["first_s"] < nodes[each["parent"]]["all_s"] for each in nodes[1:])


def table(result: dict[str, Any]) -> str:
    """The tree of processes, and the model for measured rates and for links at their full rate."""
    nodes = result["replicas"]
    rows = [
        [
            f"{each['replica']}" if number else "source",
            (f"{each['parent']}" if each["parent"] else "source") if number else "disk",
            f"{each['first_s']:.2f}",
            f"{each['all_s']:.2f}",
            f"{each['all_s'] - nodes[each['parent']]['all_s']:.2f}" if number else "",
        ]
        for number, each in enumerate(nodes)
    ]
    head = ["replica", "parent", "first bytes at s", "all bytes at s", "after its parent s"]
    parts = [tables.markdown(head, rows)]
    for rates in (Rates(*result["rates"]), Rates(LINK, LINK)):
        parts.append(
            f"MODEL, not measured: seconds until all have {size(result['model_bytes'])};"
            f" a node receives {rates.receive / 1e9:.2f} and sends {rates.send / 1e9:.2f} GB/s\n\n"
            + modelled(result["model_bytes"], rates)
        )
    return "\n\n".join(parts)


def modelled(nbytes: float, rates: Rates) -> str:
    rows = []
    for replicas in REPLICAS:
        seconds = [
            shared_seconds(nbytes, replicas, rates.receive, STORE),
            shared_seconds(nbytes, replicas, rates.receive, rates.send),
            *(tree_seconds(nbytes, replicas, fanout, rates) for fanout in FANOUTS),
            whole_seconds(nbytes, replicas, 2, rates),
        ]
        rows.append([f"{replicas:,}", *(f"{each:,.1f}" for each in seconds)])
    head = ["replicas", "all read the store", "all read one source", "chain",
            *(f"tree of {fanout}" for fanout in FANOUTS[1:]), "tree of 2, whole"]  # fmt: skip
    return tables.markdown(head, rows)


def notes(result: dict[str, Any]) -> str:
    nodes = result["replicas"]
    replicas = several(len(nodes) - 1, "replica")
    last, rate = max(each["all_s"] for each in nodes), result["source_rate"]
    lines = [
        records.described(result),
        f"{replicas} and their source, {size(result['bytes'])}, a process each on one machine; the"
        f" source reads {size(rate)}/s; all compare all bytes with the same checksums",
        f"{early(nodes)} of {replicas} had bytes before their parent had all; the last one had all"
        f" {last - nodes[0]['all_s']:.2f} s after the source, which took {nodes[0]['all_s']:.0f} s",
        "all bytes: when the load has ended, which includes the end of its process with NIXL; a"
        " replica may end before its parent",
        "the model: a node receives as fast as one load of a peer and sends as fast as bare NIXL,"
        " both measured between two processes before (peers.json), or at the full rate of its link;"
        f" link {LINK / 1e9:g} GB/s in each direction, the store {STORE / 1e9:g} GB/s for all"
        f" together, {LATENCY * 1e3:g} ms for the news of a block, requests and blocks of 8 MiB,"
        f" {IN_FLIGHT} requests in flight: stated, not measured",
        "tree of 2, whole: a replica serves when it has all bytes",
        "no network of several machines was measured",
    ]
    return "\n".join(f"- {line}" for line in lines)


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if words == ["--replica"]:
        replica()
        import os

        os._exit(0)  # NIXL's own end may crash
    parser = records.parser_of("python -m benchmarks.trees", __doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--replicas", type=values.whole, default=6)
    parser.add_argument("--fanout", type=values.whole, default=2)
    parser.add_argument("--source-rate", type=values.size, default=32 << 20, metavar="BYTES",
                        help="bytes per second that the source reads (32M)")  # fmt: skip
    records.add_output(parser)
    options = parser.parse_args(words)

    def measured() -> tuple[dict[str, Any], str]:
        records.require_room(options)
        rates = measured_rates()
        rate = options.source_rate
        found = grown(options.directory, options.replicas, options.fanout, rate)
        facts = {
            "fanout": options.fanout,
            "source_rate": rate,
            "bytes": found[0]["bytes"],
            "rates": list(rates),
            "model_bytes": sum(shape.nbytes for shape in large.MODELS[MODEL]()),
        }
        return records.record("trees", options.directory, **facts, replicas=found), "trees"

    return records.publish("trees", options, measured)


if __name__ == "__main__":
    sys.exit(main())
