"""The progress bar of long loads, on a pseudo-terminal and elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from command import process
from gdsload.memory import page_cache

SLOW = "import sys, torch, gdsload; gdsload.warmup.limit_bandwidth(2_000_000, of='all');"
HOW = "cache='direct', options={'engine': 'threads', 'request_bytes': 65536}"
LONG = {
    "load_file": f"{SLOW} gdsload.load_file(sys.argv[1], {HOW})",
    "stream": f"{SLOW} list(gdsload.stream(sys.argv[1], window_bytes=1 << 20, {HOW}))",
    "warmup": f"{SLOW} from gdsload.cli import main; main(['warmup', sys.argv[1], '--wait'])",
}
# Of `warmup`: another process has dropped the page cache meanwhile.
COLD = 3
# Such as "50%|#####     | 2.00M/4.00M [00:01<00:01, 2.00MB/s]".
BAR = re.compile(r"gdsload: +[1-9]\d?%.+[\d.]+M/[\d.]+M \[\d\d:\d\d<\d\d:\d\d, +[\d.]+[kM]B/s\]")


@pytest.fixture
def cold(checkpoint: Path) -> Path:
    """4 MB, for 2 seconds."""
    if any(page_cache.evict(file) for file in checkpoint.glob("*.safetensors")):
        pytest.skip("this filesystem keeps its pages")
    return checkpoint


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
    assert child.returncode in (0, COLD), said
    return said.decode()


@pytest.mark.parametrize("load", LONG)
def test_bar_of_a_long_load_shows_rate_and_time_left_and_is_removed(load: str, cold: Path) -> None:
    said = said_to_a_terminal(LONG[load], cold)
    assert BAR.search(said), said
    assert said.rpartition("\r")[0].endswith(" "), "the bar was not removed"


@pytest.mark.parametrize("load", LONG)
def test_load_is_quiet_where_output_is_no_terminal(load: str, cold: Path) -> None:
    ran = process(LONG[load], cold)
    assert ran.returncode in (0, COLD) and ran.stderr == ""
