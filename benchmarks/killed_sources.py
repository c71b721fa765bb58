"""Loads whose source is killed or stopped at a random point: each ends with the right bytes.

    python -m benchmarks.killed_sources DIRECTORY --loads 200

Each load reads `replicas(peer, DIRECTORY)`. A process serves the checkpoint, and gets SIGKILL or
SIGSTOP at a random time of the load. The bytes of every load are compared with the files. At the
end no process with NIXL is left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file as stock

import gdsload

from . import records, values


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
    found: Counter[str] = Counter()
    longest = usual = 0.0
    for number in range(options.loads):
        pid, url = started(options.directory)
        end = chance.choice((signal.SIGKILL, signal.SIGSTOP))
        # The first load is undisturbed: it tells how long one takes.
        after = chance.random() * 1.5 * usual if usual else 3600.0
        killer = threading.Timer(after, os.kill, (pid, end))
        killer.daemon = True
        killer.start()
        begun = time.monotonic()
        try:
            tensors = gdsload.load_file(gdsload.replicas(url, str(options.directory)))
            same = tensors.keys() == expected.keys() and all(
                torch.equal(tensors[name], expected[name]) for name in expected
            )
            found["right" if same else "WRONG"] += 1
        except gdsload.GdsloadError as error:
            found[f"error: {type(error).__name__}"] += 1
            print(number, end.name, error)
        finally:
            killer.cancel()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        seconds = time.monotonic() - begun
        report = gdsload.last_report()
        if report is not None and not report.paths.get("nixl/ucx"):
            found["without a byte of the peer"] += 1
        elif report is not None and len(report.paths) > 1:
            found["bytes of both"] += 1
        usual, longest = usual or seconds, max(longest, seconds)
    time.sleep(1)
    left = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    result = records.record(
        "killed-sources", options.directory, loads=options.loads, seed=options.seed,
        ends=dict(found), longest_seconds=longest, usual_seconds=usual, processes_left=len(left),
    )  # fmt: skip
    print(dict(found), f"longest {longest:.1f} s, usual {usual:.2f} s, processes left: {len(left)}")
    print(records.keep(result, options, "killed-sources"))
    return 0 if found["right"] == options.loads and not left else 1


if __name__ == "__main__":
    sys.exit(main())
