"""A load runs to its end while another thread holds the interpreter in one long C call."""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from gdsload.backends.posix.engines import ENGINES, try_engine

PATIENCE_SECONDS = 240
COUNT, SIZE, STEP = 8, 16 << 20, 1 << 20
MARK = b"it is here"

# Runs in a process of its own. `read` is called through PyDLL, which keeps the GIL: it comes back
# when the test writes to the pipe, and not before.
CHILD = """
import ctypes, json, sys
from gdsload import Checkpoint
from gdsload.loading.batch import Batch
from gdsload.loading.session import Session
from gdsload.loading.settings import ReadSettings
from gdsload.planning.read_plan import byte_ranges_of
from gdsload.report import LoadReport

source, engine, pipe = sys.argv[1], sys.argv[2], int(sys.argv[3])
hold = ctypes.PyDLL(None).read
byte = ctypes.create_string_buffer(1)
sys.setswitchinterval(1000.0)  # no other thread of this process gets a turn unless it is given one
report = LoadReport(source)
with Checkpoint.open(source) as checkpoint:
    settings = ReadSettings(cache="buffered", options={"engine": engine})
    with Session(checkpoint, report, settings) as session:
        ranges = byte_ranges_of(checkpoint)
        Batch(session, *session.arrange(ranges[:1])).release()  # opens the engine
        batch = Batch(session, *session.arrange(ranges))
        places = [batch.views[p.name].region.address + batch.views[p.name].offset for p in ranges]
        print(json.dumps(places), flush=True)
        hold(pipe, byte, 1)
        batch.wait()
        batch.release()
"""


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """A checkpoint of holes: it costs no disk, and its reads cost real copies."""
    header = json.dumps(
        {
            f"t{n}": {"dtype": "U8", "shape": [SIZE], "data_offsets": [n * SIZE, (n + 1) * SIZE]}
            for n in range(COUNT)
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        start = out.tell()
        for step in range(STEP, COUNT * SIZE + 1, STEP):
            out.seek(start + step - len(MARK))
            out.write(MARK)
    return path


def marks_in(memory: BinaryIO, places: list[int]) -> int:
    """How many of the file's marks another process has in its memory."""
    found = 0
    for place in places:
        for step in range(STEP, SIZE + 1, STEP):
            memory.seek(place + step - len(MARK))
            found += memory.read(len(MARK)) == MARK
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_load_while_the_gil_is_held_completes(sparse: Path, engine: str) -> None:
    support = try_engine(engine)
    if not support.usable:
        pytest.skip(str(support))
    theirs, ours = os.pipe()
    command = [sys.executable, "-c", CHILD, str(sparse), engine, str(theirs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[theirs]) as child:
        assert child.stdout is not None
        places = json.loads(child.stdout.readline())
        wanted = COUNT * SIZE // STEP
        never = select.poll()
        # Nobody in the child can run Python now: what comes to its memory is brought natively.
        with open(f"/proc/{child.pid}/mem", "rb", buffering=0) as memory:
            for _ in range(PATIENCE_SECONDS * 100):
                found = marks_in(memory, places)
                if found == wanted:
                    break
                never.poll(10)
        os.write(ours, b"x")
        assert child.wait(PATIENCE_SECONDS) == 0
    os.close(theirs)
    os.close(ours)
    assert found == wanted
