"""New weights for tensors that exist already: seconds, and the memory beside them.

    python -m benchmarks.load_into DIRECTORY [--repeats 5] [--output RESULT.json]

Every run is a fresh process that makes zeroed tensors of the checkpoint's shapes, touches them, and
then fills them from the file, cold (evicted from the page cache) or warm. The parent samples the
process's anonymous memory during the load; mapped pages of the file are the page cache's and do not
count. After the clock has stopped, each tensor is compared with the file.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gdsload.memory import page_cache

from . import children, machine, places, records, tables
from .layout import several, size
from .records import Refused

ARMS = {
    "gdsload.load_into": "gdsload.load_into(targets, path, progress=False)",
    "gdsload.load_into, cast": "gdsload.load_into(targets, path, progress=False)",
    "gdsload.load_file, copy_": "copied(gdsload.load_file(path, progress=False))",
    "safetensors load_model": "safetensors.torch.load_model(module, path)",
}
STATES = ("cold", "warm")
SAMPLE_SECONDS = 0.002
# Wanted: less memory beside the targets than a staging ring has.
MOST_BYTES = 256 << 20

CHILD = """
import sys, time
import torch, safetensors, safetensors.torch, gdsload
arm, path = sys.argv[1:]
with safetensors.safe_open(path, "pt") as opened:
    shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}
    dtype = opened.get_tensor(min(shapes)).dtype
dtype = torch.float32 if "cast" in arm else dtype
targets = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
for tensor in targets.values():
    tensor.fill_(1)
class Holder(torch.nn.Module):
    def state_dict(self, **_):
        return targets
    def load_state_dict(self, state, strict=True):
        copied(state)
        return [], []
module = Holder()
def copied(state):
    with torch.no_grad():
        for name, tensor in state.items():
            targets[name].copy_(tensor)
print("ready", flush=True)
sys.stdin.readline()
begin = time.perf_counter()
CALL
took = time.perf_counter() - begin
print(took, flush=True)
sys.stdin.readline()
with safetensors.safe_open(path, "pt") as opened:
    same = all(torch.equal(opened.get_tensor(n).to(t.dtype), t) for n, t in targets.items())
print(same, flush=True)
"""


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a process, without what it maps from files."""
    return int(machine.fields(f"/proc/{pid}/status")["RssAnon"].split()[0]) << 10


def child(arm: str, file: Path, state: str) -> dict[str, Any]:
    """One fresh process. Raises Refused if it fails, or if a tensor is not that of the file."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", CHILD.replace("CALL", ARMS[arm]), arm, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=places.own_environment(),
        ) as process,
        children.limited(process, arm),
    ):
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise Refused(f"{arm}: it ended before its load")
        if state == "cold" and page_cache.evict(file):
            raise Refused(f"{file} stays in the page cache")
        if state == "warm":
            file.read_bytes()
        before = anonymous_bytes(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        took = _line_while(process, lambda: anonymous_bytes(process.pid))
        most = max([before, *took[1]])
        process.stdin.write("\n")
        process.stdin.flush()
        if process.stdout.readline().strip() != "True":
            raise Refused(f"{arm}: a tensor is not that of the file")
    return {"seconds": float(took[0]), "peak_bytes": most - before}


def _line_while(process: Any, sample: Any) -> tuple[str, list[int]]:
    """The next line of a process, and samples until it came."""
    import selectors

    seen: list[int] = []
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not selector.select(0):
            seen.append(sample())
            time.sleep(SAMPLE_SECONDS)
    line = process.stdout.readline().strip()
    if not line:
        raise Refused("the load failed")
    return line, seen


def measured(file: Path, repeats: int) -> list[dict[str, Any]]:
    """The runs of each arm in each state."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for turn in range(repeats):
        for state in STATES:
            for arm in records.in_turn(tuple(ARMS), turn):
                runs.setdefault((arm, state), []).append(child(arm, file, state))
    return [
        {
            "arm": arm,
            "state": state,
            "seconds": [run["seconds"] for run in found],
            "peak_bytes": max(run["peak_bytes"] for run in found),
        }
        for (arm, state), found in sorted(runs.items(), key=lambda item: item[0][1])
    ]


def title(result: dict[str, Any]) -> str:
    return f"New weights for existing tensors in DRAM, {result['bytes'] / 1e9:.1f} GB"


def table(result: dict[str, Any]) -> str:
    rows = []
    for row in result["loads"]:
        took = tables.seconds_of(row)
        rows.append([
            row["arm"], row["state"], f"{took.median:.2f}", f"{took.low:.2f} to {took.high:.2f}",
            size(row["peak_bytes"]),
        ])  # fmt: skip
    return tables.markdown(
        ["load", "file", "median s", "min to max", "most memory beside the targets"], rows
    )


def notes(result: dict[str, Any]) -> str:
    ours = [row["peak_bytes"] for row in result["loads"] if "load_into" in row["arm"]]
    said = "met" if max(ours) <= MOST_BYTES else "missed"
    return "\n".join(
        [
            f"- {records.described(result)}",
            f"- {several(len(result['loads'][0]['seconds']), 'repeat')} of each load in fresh"
            " processes; every tensor is compared with the file afterwards",
            f"- load_into: at most {size(max(ours))} beside the targets; {size(MOST_BYTES)} are"
            f" allowed: {said}",
        ]
    )


def main(words: Sequence[str] | None = None) -> int:
    return records.loads_program("load-into", __doc__, measured, words, repeats=5)


if __name__ == "__main__":
    sys.exit(main())
