"""Locks in a child of fork(), and the order in which a process ends."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import gpudoubles
from gdsload._native.cufile import CuFile
from gdsload.errors import BackendUnavailable
from gdsload.system import gpu, lifecycle

PACKAGE = Path(lifecycle.__file__).parents[1]
LIMIT_SECONDS = 60.0


class Owner:
    def __init__(self) -> None:
        self._lock = lifecycle.fork_safe_lock(self)
        self.other = lifecycle.fork_safe_lock(self, "other")


@pytest.mark.parametrize("name", ["_lock", "other"])
def test_fork_while_thread_holds_lock_gives_child_new_lock(name: str) -> None:
    owner, held, let_go = Owner(), threading.Event(), threading.Event()

    def hold() -> None:
        with getattr(owner, name):
            held.set()
            let_go.wait(LIMIT_SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(LIMIT_SECONDS)
    child = os.fork()
    if child == 0:
        os._exit(0 if getattr(owner, name).acquire(blocking=False) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not getattr(owner, name).acquire(blocking=False), "the parent's lock was replaced"
    let_go.set()
    thread.join()


def test_fork_inside_with_leaves_lock_usable() -> None:
    owner = Owner()
    with owner._lock:
        child = os.fork()
    if child == 0:
        os._exit(0 if owner._lock.acquire(blocking=False) else 1)
    assert os.waitpid(child, 0)[1] == 0


def lasting_locks(path: Path) -> list[str]:
    """Where a module keeps a plain lock longer than one call: as an attribute or a global."""
    tree = ast.parse(path.read_text())
    globals_ = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    attributes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
    ]
    return [
        f"{path.name}:{node.lineno}"
        for node in [*globals_, *attributes]
        if node.value is not None
        and ast.unparse(node.value) in ("threading.Lock()", "threading.RLock()")
    ]


def locks_of_conditions(path: Path) -> list[str]:
    """Where a module has a condition, or an event, that is entered by Python code."""
    found = ast.walk(ast.parse(path.read_text()))
    calls = ("threading.Condition()", "threading.Event()")
    return [
        f"{path.name}:{node.lineno}"
        for node in found
        if isinstance(node, ast.Call) and ast.unparse(node) in calls
    ]


def test_every_lasting_lock_is_fork_safe(tmp_path: Path) -> None:
    event = PACKAGE / "system" / "threads.py"  # nobody waits without limit for the lock of an Event
    paths = [path for path in PACKAGE.rglob("*.py") if path != event]
    assert [place for path in paths for place in lasting_locks(path)] == []
    assert len(lasting_locks(event)) == 1
    plain = tmp_path / "plain.py"
    plain.write_text("import threading\n_lock = threading.Lock()\n")
    assert lasting_locks(plain) == ["plain.py:2"]


def test_ctrl_c_leaves_no_lock_of_a_condition_taken(tmp_path: Path) -> None:
    unawaited = PACKAGE / "system" / "lifecycle.py"  # nobody waits for the event there
    paths = [path for path in PACKAGE.rglob("*.py") if path != unawaited]
    assert [place for path in paths for place in locks_of_conditions(path)] == []
    plain = tmp_path / "plain.py"
    plain.write_text("import threading\nchanged = threading.Condition()\n")
    assert locks_of_conditions(plain) == ["plain.py:2"]


def test_end_runs_steps_in_order_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def fail() -> None:
        done.append("cufile")
        raise ValueError("on purpose")

    monkeypatch.setattr(lifecycle, "_steps", [])
    monkeypatch.setattr(lifecycle, "_ending", threading.Event())
    lifecycle.at_exit(lifecycle.CUDA, lambda: done.append("cuda"))
    lifecycle.at_exit(lifecycle.CUFILE, fail)
    lifecycle.at_exit(lifecycle.RINGS, lambda: done.append("rings"))
    lifecycle.at_exit(lifecycle.PREFETCHES, lambda: done.append("prefetches"))
    with pytest.raises(ValueError, match="on purpose"):
        lifecycle._end()
    assert done == ["prefetches", "rings", "cufile", "cuda"]
    assert lifecycle.is_ending()


# What the programs below share. What is registered before gdsload is imported runs after it.
PRELUDE = """
import atexit, ctypes, os, signal, sys, threading, time
cuda, cufile_library = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(sys.argv[2])
cuda.double_said.restype = cufile_library.double_said.restype = ctypes.c_char_p
here = os.getpid()
@atexit.register
def report():
    if os.getpid() == here:
        print((cuda.double_said() + cufile_library.double_said()).decode(), end="")
        print("hung:", cuda.double_hung() + cufile_library.double_hung())
import gdsload
# As in a process whose first use of gdsload is a prefetch.
from gdsload.readahead import prefetch as early
from gdsload.system import shared_libraries as libraries
from gdsload.memory import staging_ring as ring
from gdsload.backends.cufile import library as cufile
libraries.candidates = lambda name: [sys.argv[1 if name == libraries.CUDA else 2]]
cufile.ROOT = sys.argv[3]
reaches = ctypes.cast(cuda.cuda_double_reaches, ctypes.c_void_p)
cufile_library.cufile_double_set(1170, 1, reaches)
cuda.cuda_double_report()
cufile_library.cufile_double_report()
def until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)
def hang(library, call):
    library.double_fault(call, 2, ctypes.c_int64(0), 0, 1)
options = {"ring_bytes": 1 << 20, "request_bytes": 16 << 10}
"""


def ended(program: str, root: Path, *arguments: object) -> tuple[int, str, str]:
    """Exit status, output and errors of a process that finds the doubles in place of NVIDIA's."""
    for name in ("proc/driver/nvidia-fs/version", "dev/nvidia-fs0", "proc/modules"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("2.26\n")
    (root / "run/udev").mkdir(parents=True)
    libraries = [gpudoubles.built("cuda_double"), gpudoubles.built("cufile_double")]
    ran = subprocess.run(
        [sys.executable, "-c", PRELUDE + program, *libraries, root, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    return ran.returncode, ran.stdout, ran.stderr


NOTHING_LEFT = "left: 0 streams, 0 events, 0 pins"

FORKED_WHILE_PINNING = """
def pin():
    with ring.ring_for(ring.DRAM, 0, 64 << 10, 1 << 20):
        pass
hang(cuda, b"cuMemHostRegister_v2")
pinning = threading.Thread(target=pin)
pinning.start()
until(cuda.double_hung)
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends it where it hangs
    sys.exit(0)
assert cuda.double_hung()
status = os.waitpid(child, 0)[1]
cuda.double_let_go()
pinning.join()
assert status == 0, status
"""


def test_child_forked_while_ring_is_pinned_exits(tmp_path: Path) -> None:
    code, out, errors = ended(FORKED_WHILE_PINNING, tmp_path)
    assert (code, out) == (0, "hung: 0\n"), errors
    assert errors.startswith(NOTHING_LEFT)


PREFETCH_STILL_READS = """
from gdsload._native.pump import set_throttle
set_throttle(1024, 0)  # the second read waits for a quarter of a minute
ahead = gdsload.prefetch(sys.argv[4], "cuda:0", backend=sys.argv[5], options=options)
until(lambda: ahead.progress().state == "reading" and ahead.progress().landed_bytes)
"""


@pytest.mark.parametrize("backend", ["posix", "gds_mt"])
def test_exit_while_prefetch_reads_to_device_leaves_nothing(
    backend: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The prefetch ends before its ring is given back, and that before the driver is closed."""
    code, out, errors = ended(PREFETCH_STILL_READS, tmp_path, tiny_checkpoint, backend)
    assert (code, out) == (0, "hung: 0\n"), errors
    assert errors.startswith(NOTHING_LEFT)
    assert "cuFile open" not in errors


BACKEND_STAYS_OPEN = """
from gdsload.backends import VRAM, Memory, OpenFile, Registration
from gdsload.backends.posix import PosixBackend
from gdsload.planning.read_plan import Transfer
from gdsload.system import gpu
path = sys.argv[4]
fd = os.open(path, os.O_RDONLY)
backend = PosixBackend(**options)
memory = Memory(VRAM, gpu.device(0).allocate(4096), 4096, None, device="cuda:0")
read = Transfer(0, 0, 4096, 4096, 0, 0, "buffered", 0)
request = backend.prepare(
    [read], [backend.register(OpenFile(path, fd, 4096, -1, 4096))], [backend.register(memory)]
)
backend.post(request)
backend.wait(request, 60.0)  # one that is under way would be left alone
"""


def test_exit_with_open_backend_ends_its_thread(tmp_path: Path) -> None:
    """Nobody closes it: no native thread may call CUDA while the driver goes down."""
    (tmp_path / "file").write_bytes(bytes(4096))
    code, out, errors = ended(BACKEND_STAYS_OPEN, tmp_path, tmp_path / "file")
    assert (code, out) == (0, "hung: 0\n"), errors
    assert "0 pins" in errors


DRIVER_HANGS = """
cufile.CLOSE_SECONDS = 0.05
cufile.opened("cuda:0", False)
hang(cufile_library, b"cuFileDriverClose_v2")
"""


def test_exit_while_closing_cufile_hangs_does_not_wait(tmp_path: Path) -> None:
    code, out, errors = ended(DRIVER_HANGS, tmp_path)
    assert (code, out) == (0, "hung: 1\n"), errors


CUDA_STARTS = """
from gdsload.system import gpu
refused = []
def start():
    try:
        gpu.device(0)
    except gdsload.BackendUnavailable as error:
        refused.append(str(error))
hang(cuda, b"cuInit")
threading.Thread(target=start, daemon=True).start()
until(cuda.double_hung)
class LetsGo:  # the lock of that thread, which goes on when somebody waits for the lock
    lock = gpu._lock
    def acquire(self, timeout):
        cuda.double_let_go()
        return self.lock.acquire(timeout=timeout)
    def release(self):
        self.lock.release()
gpu._lock = LetsGo()
"""


def test_exit_waits_for_a_thread_that_starts_cuda(tmp_path: Path) -> None:
    """The driver would shut down while that thread is in it."""
    code, out, errors = ended(CUDA_STARTS, tmp_path)
    assert (code, out) == (0, "hung: 0\n"), errors


def test_device_is_not_opened_while_the_process_ends(
    doubles: gpudoubles.Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.device(0)
    ending = threading.Event()
    ending.set()
    monkeypatch.setattr(lifecycle, "_ending", ending)
    with pytest.raises(BackendUnavailable, match="the process ends"):
        gpu.device(1)
    assert gpu.device(0)
    monkeypatch.setattr(gpu, "_cuda", [])
    with pytest.raises(BackendUnavailable, match="the process ends"):
        gpu.cuda()


ENGINE_ENDS_LATE = """
DELAY = 13  # as of a thread that waits for a processor
cufile_library.double_fault(b"cuFileBatchIODestroy", DELAY, ctypes.c_int64(100_000_000), 0, 4)
ahead = gdsload.prefetch(sys.argv[4], "cuda:0", backend="gds", options=options)
ahead.wait()
ahead.close()
"""


def test_exit_waits_for_engines_that_end_before_cufile_is_closed(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Batches that a thread destroys while libcufile is closed crash the process."""
    code, out, errors = ended(ENGINE_ENDS_LATE, tmp_path, tiny_checkpoint)
    assert (code, out) == (0, "hung: 0\n"), errors
    assert errors.startswith(NOTHING_LEFT) and errors.count("left:") == 1


SOMETHING_REGISTERED = """
driver = cufile.opened("cuda:0", False)
file = os.open("/dev/null", os.O_RDONLY)
driver.register_file(file)
"""


def test_exit_with_registered_file_leaves_cufile_open(tmp_path: Path) -> None:
    """To close it would pull away what a read may still use. libcufile 1.15 crashes in its exit
    handlers if one of its threads writes statistics then."""
    code, out, errors = ended(SOMETHING_REGISTERED, tmp_path)
    assert (code, out) == (0, "hung: 0\n"), errors
    assert "left: cuFile open, 1 files, 0 buffers" in errors
    assert "cuFile counts" not in errors


def test_exit_while_ending_the_statistics_hangs_does_not_wait(tmp_path: Path) -> None:
    hangs = 'cufile.END_STATISTICS_SECONDS = 0.05\nhang(cufile_library, b"cuFileSetStatsLevel")\n'
    code, out, errors = ended(SOMETHING_REGISTERED + hangs, tmp_path)
    assert (code, out) == (0, "hung: 1\n"), errors


def test_library_without_needed_function_stays_mapped(tmp_path: Path) -> None:
    """Its exit handlers and threads would run code that is gone."""
    path = tmp_path / "libother.so"
    path.write_bytes(gpudoubles.built("cuda_double").read_bytes())
    with pytest.raises(OSError, match="has no cuFileDriverOpen"):
        CuFile(str(path))
    assert str(path) in Path("/proc/self/maps").read_text()
