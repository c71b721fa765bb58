"""Threads that cannot start: nobody waits for them, and loads go on without them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

import descriptors
import gdsload
from gdsload.errors import GdsloadError
from gdsload.peers.service import Service
from gdsload.peers.tickets import Tickets
from gdsload.system import threads
from gdsload.system.parallel import parallel_map
from gdsload.system.threads import start_thread

REFUSALS = (RuntimeError("can't start new thread"), MemoryError())


@pytest.fixture(params=["refused", "no memory", "dies"])
def no_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's threads are refused by the system, or die before their first line."""
    if request.param == "dies":

        def die(thread: threading.Thread) -> None:
            raise SystemExit  # as quiet as a MemoryError is loud

        monkeypatch.setattr(threading.Thread, "_bootstrap", die)
        return

    def refuse(thread: threading.Thread) -> None:
        raise REFUSALS[request.param == "no memory"]

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.arange(9000)}, file)
    return file


def test_started_thread_runs_with_its_name() -> None:
    names: list[str] = []
    thread = start_thread(lambda: names.append(threading.current_thread().name), "gdsload-test")
    assert thread is not None
    thread.join(60)
    assert names == ["gdsload-test"]
    assert not thread.is_alive()


@pytest.mark.usefixtures("no_threads")
def test_thread_that_cannot_start_is_none_and_leaves_nothing() -> None:
    before = threading.enumerate()
    assert start_thread(lambda: None, "gdsload-test") is None
    assert threading.enumerate() == before


def test_thread_that_dies_after_its_starter_looked_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(thread: threading.Thread, alive: object) -> None:
        time.sleep(0.3)  # the starter looks several times

    monkeypatch.setattr(threads, "_bootstrap", die)
    found: list[object] = []
    starter = threading.Thread(
        target=lambda: found.append(start_thread(lambda: None, "gdsload-test")), daemon=True
    )
    starter.start()
    starter.join(60)
    assert found == [None]


def test_thread_at_the_end_of_the_interpreter_is_none() -> None:
    code = """
from gdsload.system.threads import start_thread

class Late:
    def __del__(self):
        print(start_thread(print, "gdsload-test"))

late = Late()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (ran.stdout, ran.stderr) == ("None\n", "")


@pytest.mark.usefixtures("no_threads")
def test_parallel_map_without_threads_works_in_the_caller() -> None:
    callers: list[threading.Thread] = []

    def work(item: int) -> int:
        callers.append(threading.current_thread())
        return item * 2

    assert list(parallel_map(work, range(40), path_of=str)) == [item * 2 for item in range(40)]
    assert set(callers) == {threading.current_thread()}


@pytest.mark.usefixtures("no_threads")
def test_load_without_python_threads_is_exact(path: Path) -> None:
    assert torch.equal(gdsload.load_file(path)["a"], torch.arange(9000))


@pytest.mark.usefixtures("no_threads")
def test_prefetch_without_a_thread_fails_and_the_load_reads(path: Path) -> None:
    with gdsload.prefetch(path) as ahead:
        with pytest.raises(GdsloadError, match="no thread could be started"):
            ahead.wait(60)
        assert torch.equal(gdsload.load_file(path)["a"], torch.arange(9000))


@pytest.mark.usefixtures("no_threads")
def test_service_of_peers_without_a_thread_is_an_error_and_leaves_nothing() -> None:
    with (
        descriptors.none_left(),
        pytest.raises(GdsloadError, match="no thread can be started"),
    ):
        Service("m", "127.0.0.1", 0, Tickets(1, 1, 1.0))


def test_parallel_map_thread_out_of_memory_raises() -> None:
    class Items(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield self[0]
            if threading.current_thread() is not threading.main_thread():
                raise MemoryError("between two items")
            yield self[1]

    results = parallel_map(lambda item: item, Items([1, 2]), path_of=str, stall_seconds=20)
    with pytest.raises(MemoryError, match="between two items"):
        list(results)


@pytest.mark.usefixtures("no_threads")
def test_async_loads_without_a_thread_end_in_an_error(path: Path) -> None:
    async def streamed() -> None:
        async for _ in gdsload.astream(path):
            pass

    for load in (streamed(), gdsload.afrom_pretrained(path.parent)):
        with pytest.raises(GdsloadError, match="no thread can be started"):
            asyncio.run(load)


def test_hook_without_a_thread_closes_its_prefetch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise REFUSALS[0]

    async def served() -> gdsload.Prefetch:
        async with gdsload.warmup.hook(path, wait=True)(object()) as state:
            monkeypatch.setattr(threading.Thread, "start", refuse)
        return state["gdsload"]

    assert asyncio.run(served()).progress().state == "closed"


@pytest.mark.usefixtures("no_threads")
def test_hook_that_waits_without_a_thread_is_an_error(path: Path) -> None:
    async def served() -> None:
        async with gdsload.warmup.hook(path, wait=True)(object()):
            pass

    with pytest.raises(GdsloadError, match="no thread can be started"):
        asyncio.run(served())
