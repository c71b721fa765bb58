"""Loads beside forks, signals, threads and the end of the process.

No test sleeps to let something happen: it waits for the event itself.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import gdsload
from command import PATIENCE_SECONDS, process
from gdsload._native.first_touch import MODES
from gdsload.backends import Progress
from gdsload.backends.posix import backend
from gdsload.errors import GdsloadError
from gdsload.loading import session
from storage import ENGINES, SMALL, is_full_of, python, save


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "model.safetensors", 1)


def test_child_forked_after_a_load_can_load(path: Path) -> None:
    """The child reads with threads of its own, also from what its parent has opened, and frees its
    copies without harm to the parent."""
    program = """
        import gc, os, sys, gdsload
        def right(got):
            return all(bool((tensor == 1).all()) for tensor in got.values())
        opened = gdsload.safe_open(sys.argv[1], cache="direct")
        mine = {"t1": opened.get_tensor("t1")}
        for _ in range(3):
            child = os.fork()
            if child == 0:
                assert right(mine)
                assert right(gdsload.load_file(sys.argv[1], cache="direct"))
                assert right({"t2": opened.get_tensor("t2")})
                mine["t1"].fill_(9)
                mine.clear()
                opened.close()
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        assert right(mine)
        assert right({"t2": opened.get_tensor("t2")})
        opened.close()
    """
    python(program, path)


def test_file_that_was_truncated_since_the_last_tensor_is_an_error(
    tmp_path: Path,
) -> None:
    """The next tensors are copies of its mapping: parts, and tensors at odd addresses."""
    program = """
        import os, struct, sys, torch, gdsload
        header = (
            b'{"t1": {"dtype": "F32", "shape": [512, 512], "data_offsets": [0, 1048576]},'
            b' "t2": {"dtype": "F32", "shape": [512, 512], "data_offsets": [1048576, 2097152]}}'
        )
        part = (slice(None), slice(0, 100))
        def opened(path, **words):
            with gdsload.safe_open(path, **words) as file:
                yield from ((name, file.get_tensor(name)) for name in ("t1", "t2"))
        for length, read, words in (
            (256, gdsload.stream, {"window_bytes": 1, "progress": False}),
            (257, gdsload.stream, {"window_bytes": 1, "progress": False}),
            (256, gdsload.stream, {"slices": {"t1": part, "t2": part}, "progress": False}),
            (257, opened, {"cache": "mapped"}),
        ):
            padded = header.ljust(length)
            with open(sys.argv[1], "wb") as file:
                file.write(struct.pack("<Q", len(padded)) + padded + bytes(2 << 20))
            tensors = read(sys.argv[1], **words)
            next(tensors)
            os.truncate(sys.argv[1], 8192)
            try:
                list(tensors)
            except gdsload.FileChanged as error:
                assert sys.argv[1] in str(error)
            else:
                raise AssertionError(f"{length}, {words}: no error")
    """
    python(program, tmp_path / "model.safetensors")


def test_child_copies_without_the_threads_of_torch_that_its_parent_has(path: Path) -> None:
    """torch would wait for them without end."""
    program = """
        import os, signal, sys, torch, gdsload
        torch.set_num_threads(2)
        torch.zeros(8 << 20, dtype=torch.uint8).clone()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            got = gdsload.load_file(sys.argv[1], slices={"t1": slice(None, None, 2)})
            assert got["t1"].shape == (37_500,) and bool((got["t1"].numpy() == 1).all())
            targets = {"t2": torch.empty(75_000, dtype=torch.float64)}
            gdsload.load_into(targets, sys.argv[1], names=["t2"])
            assert bool((targets["t2"].numpy() == 1).all())
            assert torch.get_num_threads() == 2
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    python(program, path)


@pytest.mark.parametrize(
    "copy",
    [
        "from gdsload.peers.server import _tensor; _tensor('a', far)",
        "from gdsload.peers.memory import _staged; _staged({'a': flat})",
        "from gdsload.peers.receiving import _typed\n"
        "_typed(TensorInfo('a', 'F16', (2000, 2000), 0, 0, 8_000_000), flat[1:8_000_001])",
        "from gdsload.distribution.exchange import Exchange\n"
        "Exchange._copy(SimpleNamespace(_rows=lambda rows: torch.empty(9_000_000)), far, None)",
        "from gdsload.integrations.transformers.parameter_buffers import ParameterBuffers\n"
        "ParameterBuffers.separate("
        "SimpleNamespace(_twins={'a': ('b', far)}, _unwritten={'a': torch.empty(3000, 3000)}),"
        " 'a', 3000)",
        "from gdsload.loading.destinations import _require_disjoint\n"
        "matrix = flat[:3_003_000].view(3000, 1001)\n"
        "parts = {'a': matrix[:, :500], 'b': matrix[:, 500:]}\n"
        "_require_disjoint([SimpleNamespace(name=n, tensor=t) for n, t in parts.items()])",
    ],
)
def test_child_copies_tensors_of_others_without_the_threads_of_its_parent(copy: str) -> None:
    program = """
        import os, signal, sys, torch, gdsload
        from types import SimpleNamespace
        from gdsload import TensorInfo
        torch.set_num_threads(2)
        far = torch.zeros(3000, 6000)[:, ::2]
        far.contiguous()
        flat = torch.zeros(36_000_000, dtype=torch.uint8)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            exec(sys.argv[1])
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    python(program, copy)


@pytest.mark.parametrize(
    "options",
    [
        *({"engine": engine, "request_bytes": 4096, "depth": 2} for engine in ENGINES),
        *({"pages": pages, "request_bytes": 2 << 20, "depth": 2} for pages in MODES),
    ],
    ids=str,
)
def test_child_forked_during_a_load_cannot_wait_for_it(
    path: Path, options: dict[str, object]
) -> None:
    program = """
        import gc, json, os, sys, gdsload
        from gdsload.loading.batch import Batch
        from gdsload.loading.session import Session
        from gdsload.loading.settings import ReadSettings
        from gdsload.planning.read_plan import byte_ranges_of
        from gdsload.report import LoadReport
        options = json.loads(sys.argv[2])
        for _ in range(10):
            with gdsload.Checkpoint.open(sys.argv[1]) as checkpoint:
                settings = ReadSettings(cache="direct", options=options)
                session = Session(checkpoint, LoadReport(""), settings)
                ranges = byte_ranges_of(checkpoint)
                batch = Batch(session, *session.arrange(ranges))
                child = os.fork()
                if child == 0:
                    try:
                        batch.wait()
                    except gdsload.BackendUnavailable as error:
                        assert "fork" in str(error)
                    else:
                        raise AssertionError("it waited for another process's reads")
                    batch.release()
                    session.close()
                    del batch, session
                    gc.collect()
                    os._exit(0)
                batch.wait()
                for each in ranges:
                    region, offset = batch.views[each.name]
                    assert region.read(offset, each.nbytes) == b"\\1\\0\\0\\0" * 75_000
                batch.release()
                session.close()
                assert os.waitpid(child, 0)[1] == 0
    """
    python(program, path, json.dumps(options))


def test_process_exit_during_a_load_is_clean(path: Path) -> None:
    program = """
        import sys, gdsload
        from gdsload.loading.batch import Batch
        from gdsload.loading.session import Session
        from gdsload.loading.settings import ReadSettings
        from gdsload.planning.read_plan import byte_ranges_of
        from gdsload.report import LoadReport
        checkpoint = gdsload.Checkpoint.open(sys.argv[1])
        options = {"engine": sys.argv[2], "request_bytes": 4096}
        settings = ReadSettings(cache="direct", options=options)
        session = Session(checkpoint, LoadReport(""), settings)
        batch = Batch(session, *session.arrange(byte_ranges_of(checkpoint)))
        sys.exit(7)
    """
    for engine in ENGINES:
        ran = process(dedent(program), path, engine)
        assert (ran.returncode, ran.stderr) == (7, "")


def test_eight_threads_load_exact_bytes(path: Path) -> None:
    other = save(path.with_suffix(".2"), 2)
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(6):
            file, value = ((path, 1), (other, 2))[(number + turn) % 2]
            cache = ("direct", "buffered", "mapped")[turn % 3]
            options = {"engine": ENGINES[(number + turn) % len(ENGINES)]}
            if not is_full_of(gdsload.load_file(file, cache=cache, options=options), value):
                wrong.append(f"{cache} by {options}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """SIGALRM a thousand times a second, as a profiler does it."""
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    yield heard
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("engine", ENGINES)
def test_load_under_many_signals_returns_exact_bytes(
    path: Path, alarms: list[int], engine: str
) -> None:
    options = {"engine": engine, **SMALL}
    while len(alarms) < 50:
        for cache in ("direct", "buffered"):
            assert is_full_of(gdsload.load_file(path, cache=cache, options=options), 1)


def facts_of_process() -> tuple[int, int, int]:
    """Open descriptors, threads, mappings."""
    with open("/proc/self/maps") as maps:
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            len(list(maps)),
        )


def test_loads_leak_no_descriptor_thread_or_mapping(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 loads that work and 100 that do not: descriptors, threads and mappings as before."""
    bad = path.with_suffix(".bad")
    shutil.copy(path, bad)
    real = session.Session.arrange

    def arrange(self: session.Session, ranges: Any, **more: Any) -> Any:
        if self.checkpoint.source == str(bad):
            os.truncate(bad, 2_000_000)
        return real(self, ranges, **more)

    monkeypatch.setattr(session.Session, "arrange", arrange)

    def both(turn: int) -> None:
        options = {"engine": ENGINES[turn % len(ENGINES)]}
        cache = ("direct", "buffered", "mapped")[turn % 3]
        assert len(gdsload.load_file(path, cache=cache, options=options)) == 8
        os.truncate(bad, path.stat().st_size)
        with pytest.raises(GdsloadError):
            gdsload.load_file(bad, cache=("direct", "buffered")[turn % 2], options=options)

    for turn in range(24):
        both(turn)
    gc.collect()
    before = facts_of_process()
    for turn in range(76):
        both(turn)
    gc.collect()
    deadline = time.monotonic() + 30
    # A thread that has been joined may still be seen for a moment, before as after.
    while (after := facts_of_process())[1] > before[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after[0] == before[0]
    assert after[1] <= before[1]
    assert after[2] <= before[2] + 4


CTRL_C = """
import gc, os, signal, sys, threading
import pytest, faulty, gdsload, torch
path, patch, options = sys.argv[1], pytest.MonkeyPatch(), {"engine": "threads"}
gdsload.load_file(path, cache="buffered", options=options)
before = len(os.listdir("/proc/self/fd"))
with faulty.installed(patch) as faults:
    faults.script(faulty.rule(faulty.HANG, times=faulty.FOR_EVER))
    interrupted = False

    def interrupt():
        faults.wait_hung()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        if sys.argv[2] == "load_file":
            gdsload.load_file(path, cache="direct", options=options)
        else:
            list(gdsload.stream(path, cache="direct", options=options, window_bytes=1))
    except KeyboardInterrupt:
        interrupted = True
    thread.join()
    faults.let_go()
    faults.wait_closed()
patch.undo()
got = gdsload.load_file(path, cache="direct", options=options)
assert all(bool((tensor == 1).all()) for tensor in got.values())
gc.collect()
assert len(os.listdir("/proc/self/fd")) == before
print(interrupted)
"""


@pytest.mark.parametrize("use", ["load_file", "stream"])
def test_ctrl_c_while_storage_hangs_ends_the_load(path: Path, use: str) -> None:
    """The exception is raised while the reads hang; they are released after it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", CTRL_C, str(path), use],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "True"


def test_stopped_process_does_not_report_a_stall(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long silence is no stall: bytes may be about to be counted."""
    real = backend.PosixBackend.check
    looks: list[int] = []

    def check(self: backend.PosixBackend, request: Any) -> Any:
        looks.append(1)
        if len(looks) == 1:
            return Progress([], [], False, 1e6)
        return real(self, request)

    monkeypatch.setattr(backend.PosixBackend, "check", check)
    assert is_full_of(gdsload.load_file(path, cache="direct"), 1)
    assert len(looks) > 1
