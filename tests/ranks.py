"""Programs of several processes that make one group of torch.distributed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATIENCE_SECONDS = 240


def spawned(
    count: int, program: Path, *arguments: str | Path, meet: Path
) -> list[tuple[int, str, str]]:
    """The exit status, the output and the errors of each process of a program.

    The processes meet by the file GROUP, which does not exist yet: another program may have taken a
    port that was free a moment ago. MASTER_PORT is for a single process.
    """
    places = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    running = [
        subprocess.Popen(
            [sys.executable, program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": places,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "GROUP": str(meet / "group"),
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "0",
            },
        )
        for rank in range(count)
    ]
    try:
        outputs = [rank.communicate(timeout=PATIENCE_SECONDS) for rank in running]
    finally:
        for rank in running:
            rank.kill()
    return [(rank.returncode, *texts) for rank, texts in zip(running, outputs, strict=True)]


def ranks(count: int, program: Path, *arguments: str | Path, meet: Path) -> list[Any]:
    """What each process of a program printed last, as JSON. None of them may fail."""
    outputs = spawned(count, program, *arguments, meet=meet)
    ended = [code for code, _, _ in outputs]
    # When one dies the others complain of it.
    assert not any(ended), f"{ended}: " + "\n".join(errors[-2000:] for _, _, errors in outputs)
    return [json.loads(out.splitlines()[-1]) for _, out, _ in outputs]
