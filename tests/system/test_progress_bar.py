"""The progress bar of long loads, on a pseudo-terminal and elsewhere."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as reference_load_file

import gdsload
from command import process
from gdsload.system import progress_bar
from storage import make_cold

END = "the end of a load"
# Each load is of 4 MB: two for 3 seconds, and two reads with 3 seconds between them. In one
# process, because the imports take longer than that.
LOADS = f"""
import sys
from contextlib import suppress
from pathlib import Path
import torch
import tqdm
import gdsload
from gdsload.cli import main
from gdsload.memory import page_cache

gdsload.warmup.limit_bandwidth(1_300_000, of="all")
def warmup(path):
    gdsload.warmup.limit_bandwidth(600_000, of="all")
    main(["warmup", path, "--wait"])
how = dict(cache="direct", options=dict(engine="threads", request_bytes=65536))
for load in (
    lambda path: gdsload.load_file(path, **how),
    lambda path: list(gdsload.stream(path, window_bytes=1 << 20, **how)),
    warmup,
):
    for file in Path(sys.argv[1]).glob("*.safetensors"):
        page_cache.evict(file)
    with suppress(SystemExit):  # of the command line
        load(sys.argv[1])
    print({END!r}, end="", file=sys.stderr, flush=True)
"""
# Such as "50%|#####     | 2.00M/4.00M [00:01<00:01, 2.00MB/s]".
BAR = re.compile(r"gdsload: +[1-9]\d?%.+[\d.]+M/[\d.]+M \[\d\d:\d\d<\d\d:\d\d, +[\d.]+[kM]B/s\]")


@pytest.fixture
def sources(checkpoint: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two, for two processes at once: each of them fills and clears the page cache."""
    make_cold(*checkpoint.glob("*.safetensors"))
    return checkpoint, Path(shutil.copytree(checkpoint, tmp_path / "other"))


def said_to_a_terminal(code: str, source: Path) -> str:
    """What a process writes to stderr, which is a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-c", code, str(source)]
    said = b""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as child:
        os.close(theirs)
        try:
            while more := os.read(ours, 1 << 16):
                said += more
        except OSError:  # EIO: the child has closed the terminal
            pass
        finally:
            os.close(ours)
    assert child.returncode == 0, said
    return said.decode()


def test_bar_of_a_long_load_shows_rate_and_time_left_on_terminals_only(
    sources: tuple[Path, Path],
) -> None:
    """It is removed in the end."""
    with ThreadPoolExecutor(1) as other:
        quiet = other.submit(process, LOADS, sources[1])
        *loads, rest = said_to_a_terminal(LOADS, sources[0]).split(END)
    assert (len(loads), rest) == (3, "")
    for said in loads:
        assert BAR.search(said), said
        assert said.rpartition("\r")[0].endswith(" "), "the bar was not removed"
    assert (quiet.result().returncode, quiet.result().stderr) == (0, 3 * END)


def by_load_file(source: Path, **how: Any) -> None:
    gdsload.load_file(source, **how)


def by_stream(source: Path, **how: Any) -> None:
    for _ in gdsload.stream(source, window_bytes=1 << 20, **how):
        pass


def by_load_into(source: Path, **how: Any) -> None:
    targets: dict[str, torch.Tensor] = {}
    for shard in source.glob("*.safetensors"):
        targets |= reference_load_file(shard)
    gdsload.load_into(targets, source, **how)


@pytest.mark.parametrize("load", [by_load_file, by_stream, by_load_into])
def test_bar_that_is_asked_for_counts_bytes_that_are_in_memory(
    load: Callable[..., None], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(checkpoint, progress=True, cache="mapped")
    assert "100%" in capsys.readouterr().err
    assert [*gdsload.last_report().paths] == ["mapped"]
    with gdsload.warmup.HostPool(8 << 20):
        gdsload.load_file(checkpoint, names="0.a", cache="direct")
        load(checkpoint, progress=True, cache="direct")
    assert "100%" in capsys.readouterr().err
    assert len(gdsload.last_report().paths) == 2  # half of the bytes came from the pool


def test_bar_of_bytes_that_are_there_at_once_does_not_begin_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bar, "stderr_is_terminal", lambda: True)
    monkeypatch.setattr(progress_bar, "_DELAY_SECONDS", 0.0)
    with progress_bar.progress_bar(None, 1000) as advance:
        advance(1000)
        advance(0)
    assert capsys.readouterr().err == ""


class Gone(io.StringIO):
    """A pipe whose reader has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")


@pytest.mark.parametrize("stderr", [Gone(), None])
@pytest.mark.parametrize("load", [by_load_file, by_stream, by_load_into])
def test_load_goes_on_without_a_bar_that_cannot_be_written(
    load: Callable[..., None],
    stderr: io.StringIO | None,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    load(checkpoint, progress=True, cache="direct")
