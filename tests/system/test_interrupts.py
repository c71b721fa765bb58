"""Ctrl-C while something is being cleaned up: it is cleaned up all the same.

A signal handler of Python may raise as a function is entered, or as one that was called returns.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import gdsload
from gdsload._native.cuda import CudaFailure
from gdsload.backends.pump_request import PumpBackend
from gdsload.checkpoint import Checkpoint, Shard, file_io
from gdsload.errors import ReadError
from gdsload.integrations.transformers import hooks
from gdsload.integrations.transformers.monkeypatch import Patcher
from gdsload.loading.batch import Batch
from gdsload.memory import DRAM, VRAM, host_pool, late_copies, staging_ring
from gdsload.memory.host_pool import HostPool
from gdsload.memory.staging_ring import ring_for
from gdsload.readahead.prefetch import Prefetch, prefetches
from gdsload.system import gc_control, gpu, parallel
from gdsload.system.lifecycle import fork_safe_lock, taken
from gpudoubles import Doubles
from threadends import await_threads
from waiting import wait_for


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the call of a function with this number raise KeyboardInterrupt: before it does
    anything, or as it returns. The next calls do what they do."""

    def change(owner: Any, name: str, *, number: int = 1, returning: bool = False) -> None:
        calls, real = iter(range(1, 1_000_000)), getattr(owner, name)

        def interrupted(*words: Any, **named: Any) -> Any:
            if next(calls) != number:
                return real(*words, **named)
            if returning:
                real(*words, **named)
            raise KeyboardInterrupt

        monkeypatch.setattr(owner, name, interrupted)

    return change


class Lock:
    """A lock whose owner gets a Ctrl-C as soon as he has it."""

    def __init__(self) -> None:
        self.lock = fork_safe_lock(self, "lock")

    def acquire(self, timeout: float) -> bool:
        if self.lock.acquire(timeout=timeout):
            raise KeyboardInterrupt
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lock, name)


def is_free(lock: threading.RLock) -> bool:
    """Whether another thread gets it."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    return found == [True]


def test_lock_that_is_taken_with_a_limit_is_released() -> None:
    lock = Lock()
    with pytest.raises(KeyboardInterrupt), taken(lock):  # type: ignore[arg-type]
        raise AssertionError
    assert is_free(lock.lock)


def test_lock_that_is_taken_with_a_limit_belongs_to_one_thread() -> None:
    lock = Lock().lock
    with taken(lock) as mine, taken(lock) as again:
        assert mine and again
        found: list[bool] = []

        def other() -> None:
            with taken(lock, 0.01) as taken_there:
                found.append(taken_there)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert found == [False]
        with taken(lock):
            pass
        assert not is_free(lock)
    assert is_free(lock)


@pytest.mark.parametrize("name", ["get_count", "get_freeze_count", "freeze", "unfreeze"])
def test_cycle_collector_runs_again(
    name: str, interrupt: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc_control, "MANY", -1)
    gc.unfreeze()  # objects that other tests have frozen
    interrupt(gc, name, returning=True)
    with pytest.raises(KeyboardInterrupt), gc_control.collector_paused():
        pass
    monkeypatch.undo()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_threshold_of_the_cycle_collector_is_restored(interrupt: Callable[..., None]) -> None:
    before = gc.get_threshold()
    interrupt(gc_control, "_restore")
    with pytest.raises(KeyboardInterrupt), gc_control.collector_eased():
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before


@pytest.mark.parametrize("number", [1, 2])
def test_functions_of_transformers_are_its_own_again(
    number: int, interrupt: Callable[..., None], tiny_checkpoint: Path
) -> None:
    """The replacements are left at the end of the weights, and at the end of the call."""
    interrupt(Patcher, "leave", number=number)
    with pytest.raises(KeyboardInterrupt):
        gdsload.from_pretrained(tiny_checkpoint)
    assert not hooks.patcher.in_place


def opened_pool(path: Path) -> AbstractContextManager[object]:
    return HostPool(1 << 20)


def opened_prefetch(path: Path) -> AbstractContextManager[object]:
    return gdsload.prefetch(path)


@pytest.mark.parametrize(
    ("opened", "of"), [(opened_pool, HostPool), (opened_prefetch, Prefetch)], ids=["pool", "ahead"]
)
def test_end_of_a_block_closes(
    opened: Callable[[Path], AbstractContextManager[object]],
    of: type,
    interrupt: Callable[..., None],
    tiny_checkpoint: Path,
) -> None:
    with pytest.raises(KeyboardInterrupt), opened(tiny_checkpoint):
        interrupt(of, "close")
    assert host_pool.pools == [] and prefetches() == []


def test_all_files_are_closed(
    interrupt: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    fds = [os.open(tmp_path / "file", os.O_RDONLY) for _ in range(3)]
    interrupt(file_io.os, "close", returning=True)
    with pytest.raises(KeyboardInterrupt):
        file_io.close_files(fds)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_shards_are_closed(interrupt: Callable[..., None], tiny_checkpoint: Path) -> None:
    """As the first of them has left its descriptor to be closed with those of the others."""
    opened = Checkpoint.open(tiny_checkpoint)
    fds = [shard.fd for shard in opened.shards]
    interrupt(Shard, "_leave_fd", number=2)
    for _ in range(2):
        with suppress(KeyboardInterrupt):
            opened.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_threads_that_open_files_end(interrupt: Callable[..., None]) -> None:
    """They would wait for room for their results."""
    interrupt(parallel._Threads, "stop")
    results = parallel.parallel_map(str, range(1000), path_of=str)
    assert next(results) == "0"
    with pytest.raises(KeyboardInterrupt):
        results.close()
    await_threads("gdsload-open")


def test_uninstall_restores_functions(interrupt: Callable[..., None]) -> None:
    gdsload.install()
    interrupt(Patcher, "leave")
    with pytest.raises(KeyboardInterrupt):
        gdsload.uninstall()
    assert not hooks.patcher.in_place


def test_cleanup_of_a_load_leaves_no_memory_to_copies(
    loading: Doubles, interrupt: Callable[..., None], tmp_path: Path
) -> None:
    """It may end at any step before the request is ended: the device still writes to the memory."""
    tensors = {str(number): torch.rand(64, 257) for number in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    loading.hold_copies(True)
    before = loading.cuda_log["copies"]

    def fail(*words: Any, **named: Any) -> None:
        wait_for(lambda: loading.cuda_log["copies"] != before)
        interrupt(PumpBackend, "release")
        raise ReadError("on purpose")

    options = {"ring_bytes": 1 << 20, "request_bytes": 64 << 10}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "wait_for", fail)
        with pytest.raises(KeyboardInterrupt):
            gdsload.load_file(tmp_path, "cuda:0", backend="posix", options=options)
    gc.collect()
    assert late_copies.owners()
    loading.hold_copies(False)
    wait_for(lambda: not late_copies.owners())


@pytest.mark.parametrize("kind", [DRAM, VRAM])
def test_memory_of_a_ring_is_freed(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Ctrl-C as the driver returns it."""
    really = gpu.device(0)
    before = doubles.cuda_log

    class Device:
        def pin(self, *_: int) -> None:
            raise CudaFailure("cuMemHostRegister", 801, "refused on purpose")

        def allocate(self, *words: Any) -> int:
            really.allocate(*words)
            raise KeyboardInterrupt

        def allocate_host(self, *words: Any) -> int:
            really.allocate_host(*words)
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(really, name)

    monkeypatch.setattr(gpu, "device", lambda _: Device())
    with pytest.raises(KeyboardInterrupt), ring_for(kind, 0, 64 << 10, 1 << 20):
        raise AssertionError
    after = doubles.cuda_log
    assert (after["used"], after["pins"]) == (before["used"], before["pins"])


class Left:
    """A lock whose owner gets a Ctrl-C as soon as he has released it."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        raise KeyboardInterrupt


def test_ring_is_not_taken_for_one_in_use(doubles: Doubles) -> None:
    with ring_for(DRAM, 0, 64 << 10, 1 << 20) as ring:
        place = next(each for each in staging_ring._holders.values() if each.ring is ring)
    lock = place.lock
    place.lock = Left(lock)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), ring_for(DRAM, 0, 64 << 10, 1 << 20):
        raise AssertionError
    place.lock = lock
    assert ring.retire()
    place.ring = None
    ring.free()


def test_memory_of_late_copies_is_freed(interrupt: Callable[..., None]) -> None:
    has_ended = threading.Event()
    interrupt(late_copies, "start_thread")
    with pytest.raises(KeyboardInterrupt):
        late_copies.keep(object(), has_ended.is_set)
    late_copies.keep(object(), has_ended.is_set)
    assert len(late_copies.owners()) == 2
    has_ended.set()
    wait_for(lambda: not late_copies.owners())


def test_ring_of_a_device_is_freed_when_it_is_idle(
    doubles: Doubles, interrupt: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_ring, "IDLE_SECONDS", 0.05)
    interrupt(staging_ring, "start_thread")
    with pytest.raises(KeyboardInterrupt), ring_for(VRAM, 0, 64 << 10, 1 << 20):
        pass
    with ring_for(VRAM, 0, 64 << 10, 1 << 20):
        pass
    wait_for(lambda: not staging_ring.rings())
