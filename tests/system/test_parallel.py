"""Work in parallel threads: the order of results, errors, hung storage and Ctrl-C."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from types import SimpleNamespace

import pytest

from gdsload.errors import CheckpointError, StallError
from gdsload.system import parallel
from gdsload.system.cancellation import CancelToken, LoadCancelled
from gdsload.system.parallel import note_progress, parallel_map
from threadends import await_threads

PATIENCE_SECONDS = 240.0


def test_parallel_map_keeps_order_and_raises_the_first_error() -> None:
    assert list(parallel_map(lambda n: n * n, range(200), path_of=str)) == [
        n * n for n in range(200)
    ]
    finished: list[int] = []

    def work(number: int) -> int:
        if number >= 50:
            raise CheckpointError(f"item {number}")
        finished.append(number)
        return number

    taken, discarded = [], []
    with pytest.raises(CheckpointError, match="item 50"):
        for result in parallel_map(work, range(200), path_of=str, discard=discarded.append):
            taken.append(result)
    await_threads("gdsload-open")
    assert taken == list(range(50))
    assert sorted(taken + discarded) == sorted(finished)


def test_parallel_map_closed_early_discards_results() -> None:
    done: list[int] = []
    discarded: list[int] = []
    results = parallel_map(
        lambda n: done.append(n) or n, range(100), path_of=str, discard=discarded.append
    )
    assert next(results) == 0
    results.close()
    await_threads("gdsload-open")
    assert sorted(discarded) == sorted(done)[1:]
    assert len(done) < 100


def test_parallel_map_leaves_no_cycles_of_errors() -> None:
    """What the work held, such as connections, goes when its errors have been handled."""
    begun, release = threading.Event(), threading.Event()
    errors: list[weakref.ref[BaseException]] = []

    def work(number: int) -> int:
        if number:  # it fails when the caller has gone
            begun.set()
            release.wait()
        else:
            assert begun.wait(PATIENCE_SECONDS)
        error = CheckpointError(f"item {number}")
        errors.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(CheckpointError, match="item 0") as caught:
            list(parallel_map(work, range(2), path_of=str))
        del caught
        release.set()
        await_threads("gdsload-open")
        assert [error() for error in errors] == [None, None]
    finally:
        gc.enable()


def test_parallel_map_with_hung_item_raises_stall_error() -> None:
    release = threading.Event()
    discarded: list[str] = []

    def hang(item: str) -> str:
        release.wait()
        return item

    with pytest.raises(StallError, match=r"a\.bin: the storage has not answered for 2 s"):
        list(
            parallel_map(hang, ["a.bin"], path_of=str, discard=discarded.append, stall_seconds=2.0)
        )
    release.set()
    await_threads("gdsload-open")
    assert discarded == ["a.bin"]


def test_item_that_makes_progress_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    looked = threading.Event()

    def monotonic() -> float:
        looked.set()
        return now[0]

    def work(_: int) -> str:
        for _ in range(10):
            now[0] += 50.0
            note_progress()
            looked.clear()
            assert looked.wait(PATIENCE_SECONDS)
        return "read"

    monkeypatch.setattr(parallel, "time", SimpleNamespace(monotonic=monotonic))
    assert list(parallel_map(work, [0], path_of=str, stall_seconds=60.0)) == ["read"]
    note_progress()  # of no map


def test_parallel_map_in_a_stopped_process_does_not_report_a_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock jumps, and the item is finished after the caller has looked at it."""
    release = threading.Event()
    looks: list[int] = []

    def monotonic() -> float:
        looks.append(1)
        if len(looks) == 2:
            release.set()
        return 0.0 if len(looks) == 1 else 1e6

    monkeypatch.setattr(parallel, "time", SimpleNamespace(monotonic=monotonic))
    found = parallel_map(lambda item: (release.wait(60), item)[1], ["a"], path_of=str)
    assert list(found) == ["a"]


def test_parallel_map_with_hung_item_is_interrupted_by_ctrl_c() -> None:
    release, hanging = threading.Event(), threading.Event()

    def hang(item: str) -> str:
        hanging.set()
        release.wait()
        return item

    def interrupt() -> None:
        hanging.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    pressing = threading.Thread(target=interrupt)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        list(parallel_map(hang, ["a.bin"], path_of=str))
    release.set()
    pressing.join(60)
    for thread in threading.enumerate():
        if thread.name == "gdsload-open":
            thread.join(60)


def test_wait_for_the_storage_ends_with_the_load() -> None:
    """At its limit, or when it is cancelled."""
    end, token = threading.Event(), CancelToken()

    def hang(_: str) -> None:
        end.wait(PATIENCE_SECONDS)

    def mapped(stall_seconds: float) -> list[None]:
        return list(
            parallel_map(hang, ["f"], path_of=lambda path: path, stall_seconds=stall_seconds)
        )

    try:
        with pytest.raises(StallError, match=r"f: the storage has not answered for 0\.2 s") as e:
            mapped(0.2)
        assert e.value.path == "f"
        timer = threading.Timer(0.2, token.ask)
        timer.start()
        with pytest.raises(LoadCancelled):
            token.run(mapped, PATIENCE_SECONDS)
        timer.join()
    finally:
        end.set()
