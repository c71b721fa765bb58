"""Loads whose source is killed or stopped at a random point: each ends with the right bytes.

    python -m benchmarks.killed_sources DIRECTORY --loads 200

Each load reads `replicas(peer, DIRECTORY)`. A process serves the checkpoint, and gets SIGKILL or
SIGSTOP at a random time of the load; two loads before, without a signal, tell how long one takes.
Loads that end before the signal is sent are counted apart. The bytes of every load are compared
with the files. At the end no process with NIXL is left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from safetensors.torch import load_file as stock

import gdsload

from . import records, values

T = TypeVar("T")


def started(directory: Path) -> tuple[int, str]:
    """A forked process that serves the checkpoint, and its URL."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with os.fdopen(write, "w") as out:
            server = gdsload.serve(directory, checksums=False)
            out.write(server.url)
        time.sleep(3600)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        return pid, answer.read()


def struck(
    load: Callable[[], T], strike: Callable[[], object], after: float
) -> tuple[T, float, bool]:
    """The result of `load`, its seconds, and whether `strike` had been called when it ended.

    Another thread calls `strike` after so many seconds, unless the load has ended.
    """
    done = threading.Event()

    def act() -> None:
        strike()
        done.set()

    timer = threading.Timer(after, act)
    begun = time.monotonic()
    timer.start()
    try:
        result = load()
        return result, time.monotonic() - begun, done.is_set()
    finally:
        timer.cancel()
        timer.join()


def loaded(
    directory: Path, expected: dict[str, Any], end: int, after: float
) -> tuple[list[str], float, bool]:
    """How one load ended: its words, its seconds, and whether the signal was sent before."""
    pid, url = started(directory)

    def load() -> dict[str, Any] | gdsload.GdsloadError:
        try:
            return gdsload.load_file(gdsload.replicas(url, str(directory)))
        except gdsload.GdsloadError as error:
            return error

    try:
        result, seconds, sent = struck(load, lambda: os.kill(pid, end), after)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if isinstance(result, gdsload.GdsloadError):
        print(f"signal {end}: {result}")
        return [f"error: {type(result).__name__}"], seconds, sent
    same = result.keys() == expected.keys() and all(
        torch.equal(result[name], expected[name]) for name in expected
    )
    words, paths = ["right" if same else "WRONG"], gdsload.last_report().paths
    if not paths.get("nixl/ucx"):
        words.append("without a byte of the peer")
    elif len(paths) > 1:
        words.append("bytes of both")
    return words, seconds, sent


def main(words: list[str] | None = None) -> int:
    parser = records.parser_of("python -m benchmarks.killed_sources", __doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--loads", type=values.whole, default=200)
    parser.add_argument("--seed", type=int, default=1)
    records.add_output(parser)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    expected = {
        name: tensor
        for path in sorted(options.directory.glob("*.safetensors"))
        for name, tensor in stock(path).items()
    }
    chance = random.Random(options.seed)
    undisturbed: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for _ in range(2):  # the first one imports, and takes longer
        said, usual, _ = loaded(options.directory, expected, 0, 0.0)
        if said[0] != "right":
            print(f"benchmarks.killed_sources: no result: without a signal: {said[0]}")
            return 1
    longest = usual
    for _ in range(options.loads):
        end = chance.choice((signal.SIGKILL, signal.SIGSTOP))
        after = chance.random() * usual
        said, seconds, sent = loaded(options.directory, expected, end, after)
        (ends if sent else undisturbed).update(said)
        longest = max(longest, seconds)
    time.sleep(1)
    left = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    result = records.record(
        "killed-sources", options.directory, loads=options.loads, seed=options.seed,
        ends=dict(ends), undisturbed=dict(undisturbed), longest_seconds=longest,
        usual_seconds=usual, processes_left=len(left),
    )  # fmt: skip
    print(f"source killed or stopped: {dict(ends)}; load ended before: {dict(undisturbed)}")
    print(f"longest {longest:.1f} s, usual {usual:.2f} s, processes left: {len(left)}")
    print(records.keep(result, options, "killed-sources"))
    return 0 if ends["right"] + undisturbed["right"] == options.loads and not left else 1


if __name__ == "__main__":
    sys.exit(main())
