"""Programs of several processes that make one group of torch.distributed.

    python ranks.py COUNT FOLDER PROGRAM WORDS ...

As a program it forks the processes after the imports of theirs, which take seconds in each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import forked

HERE = Path(__file__).parent
PATIENCE_SECONDS = 240


def spawned(
    count: int, program: Path, *arguments: str | Path, meet: Path
) -> list[tuple[int, str, str]]:
    """The exit status, the output and the errors of each process of a program: its `main`.

    The processes meet by the file GROUP, which does not exist yet: another program may have taken a
    port that was free a moment ago. MASTER_PORT is for a single process.
    """
    places = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    parent = subprocess.Popen(
        [sys.executable, __file__, str(count), meet, program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": places,
            "WORLD_SIZE": str(count),
            "GROUP": str(meet / "group"),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        },
        start_new_session=True,
    )
    try:
        answer, _ = parent.communicate(timeout=PATIENCE_SECONDS)
    finally:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(parent.pid, signal.SIGKILL)
    codes = json.loads(answer)
    return [
        (code, *((meet / f"{rank}.{kind}").read_text() for kind in ("out", "err")))
        for rank, code in enumerate(codes)
    ]


def ranks(count: int, program: Path, *arguments: str | Path, meet: Path) -> list[Any]:
    """What each process of a program printed last, as JSON. None of them may fail."""
    outputs = spawned(count, program, *arguments, meet=meet)
    ended = [code for code, _, _ in outputs]
    # When one dies the others complain of it.
    assert not any(ended), f"{ended}: " + "\n".join(errors[-2000:] for _, _, errors in outputs)
    return [json.loads(out.splitlines()[-1]) for _, out, _ in outputs]


def main(count: int, folder: str, program: str, *arguments: str) -> None:
    spec = importlib.util.spec_from_file_location("program", program)
    assert spec is not None and spec.loader is not None
    module = sys.modules["program"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv = [program, *arguments]
    children = []
    for rank in range(count):
        if child := forked.fork():
            children.append(child)
            continue
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        for descriptor, kind in ((1, "out"), (2, "err")):
            with open(f"{folder}/{rank}.{kind}", "wb") as file:
                os.dup2(file.fileno(), descriptor)
        forked.end_with(module.main)
    ended = [os.waitpid(child, 0)[1] for child in children]
    print(json.dumps([os.waitstatus_to_exitcode(status) for status in ended]))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
