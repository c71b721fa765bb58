"""Processes that a benchmark starts: a limit of time for them, and a common start."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from subprocess import PIPE, Popen
from typing import Any

from .records import Refused

PATIENCE_SECONDS = 900.0


@contextmanager
def limited(process: Popen[Any], label: str) -> Iterator[None]:
    """Kills a process that still runs after PATIENCE_SECONDS, which ends all reads of its pipes. An
    exception of the block kills it as well, and is a Refused if the process was too slow.
    """
    late = threading.Event()

    def kill() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(PATIENCE_SECONDS, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    except BaseException as error:
        process.kill()
        if late.is_set() and isinstance(error, Exception):
            raise Refused(f"{label}: no end after {PATIENCE_SECONDS:g} s") from error
        raise
    finally:
        timer.cancel()


def at_once(
    label: str,
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    prepare: Callable[[], None],
) -> list[dict[str, Any]]:
    """Results of processes that begin at the same time, one for each environment.

    Each says "ready", waits for a line, and then says its result, a line of JSON. `prepare` is
    called when all are ready: what it makes of the page cache is what they find.

    Raises:
        Refused: One of them failed, or takes too long.
    """
    with ExitStack() as stack:
        # Nobody reads what they say while they load: a pipe could fill up.
        words = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        pipes: Any = {"stdin": PIPE, "stdout": PIPE, "stderr": words, "text": True}
        running = []
        for environment in environments:
            process = stack.enter_context(Popen(command, env=environment, **pipes))
            stack.enter_context(limited(process, label))
            running.append(process)
        lines: list[str] = []
        for process in running:
            said = iter(process.stdout or ())  # libraries may say something before
            lines.append(next((line for line in said if line == "ready\n"), ""))
        if all(lines):
            prepare()
            for process in running:
                if process.stdin is not None:
                    process.stdin.write("\n")
                    process.stdin.flush()
            lines = [process.communicate()[0] for process in running]
        if not all(lines) or any(process.returncode for process in running):
            words.seek(0)
            raise Refused(f"{label}: {words.read().strip()[-200:]}")
        return [json.loads(line.splitlines()[-1]) for line in lines]
