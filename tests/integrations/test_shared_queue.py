"""The queue of slices that ranks read together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gdsload
import tinymodels
from equal import NEW
from gdsload.checkpoint import Checkpoint
from gdsload.distribution.exchange import Exchange, box_of
from gdsload.distribution.reader_group import ReaderGroup
from gdsload.errors import GdsloadError, PlacementError
from gdsload.integrations.transformers.shared_queue import SharedQueue
from gdsload.loading.session import Session
from gdsload.loading.settings import ReadSettings
from gdsload.planning.tensor_slices import TensorSlice
from gdsload.report import LoadReport
from gdsload.system import available, torch_thread
from gdsload.system.cancellation import CancelToken, LoadCancelled
from waiting import wait_for
from windows import small_windows

PATIENCE_SECONDS = 120.0


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.skipif(not NEW, reason="transformers 4.57 asks for each tensor by itself")
@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_exchange_without_a_thread_is_an_error(
    one_rank: dist.ProcessGroup,
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "gdsload-exchange":
            raise error
        start(thread)

    tinymodels.build("llama").save_pretrained(tmp_path)
    wanted = gdsload.from_pretrained(tmp_path, group=one_rank).state_dict()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(GdsloadError, match="no thread can be started to exchange tensors"):
        gdsload.from_pretrained(tmp_path, group=one_rank)
    monkeypatch.undo()
    found = gdsload.from_pretrained(tmp_path, group=one_rank).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.skipif(not NEW, reason="transformers 4.57 asks for each tensor by itself")
def test_first_tensor_that_is_taken_starts_the_exchange(
    one_rank: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tinymodels.build("llama").save_pretrained(tmp_path)
    wanted = gdsload.from_pretrained(tmp_path)
    calls: list[SharedQueue] = []
    real = SharedQueue.start

    def start(queue: SharedQueue) -> None:
        calls.append(queue)
        if len(calls) > 1:
            real(queue)

    monkeypatch.setattr(SharedQueue, "start", start)
    found = gdsload.from_pretrained(tmp_path, group=one_rank)
    assert tinymodels.differences(wanted, found) == []
    assert gdsload.last_report().ranks == 1


@pytest.mark.skipif(not NEW, reason="transformers 4.57 asks for each tensor by itself")
def test_model_that_has_no_room_is_refused_before_a_byte_is_read(
    one_rank: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tinymodels.build("llama").save_pretrained(tmp_path)
    with gdsload.Checkpoint.open(tmp_path) as checkpoint:
        nbytes = checkpoint.total_bytes
    room = nbytes + available.SPARE_BYTES - 1
    monkeypatch.setattr(available, "available_bytes", lambda *_: room)
    with pytest.raises(PlacementError, match=f"^{nbytes:,} bytes are to be loaded") as caught:
        gdsload.from_pretrained(tmp_path, group=one_rank)
    assert caught.value.missing_bytes == 1 and not gdsload.last_report().read_bytes


@pytest.mark.skipif(not NEW, reason="transformers 4.57 asks for each tensor by itself")
def test_exchange_runs_in_the_streams_of_the_thread_that_loads(
    one_rank: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors are used there, and torch keeps the current stream for each thread."""
    inside: list[str] = []
    noted, windows = [], []

    @contextmanager
    def streams() -> Iterator[None]:
        inside.append(threading.current_thread().name)
        yield
        inside.clear()

    def note() -> Callable[[], AbstractContextManager[None]]:
        noted.append(threading.current_thread())
        return streams

    real = Exchange.windows

    def recorded(exchange: Exchange) -> Iterator[Any]:
        for complete in real(exchange):
            windows.append([*inside])
            yield complete

    monkeypatch.setattr(torch_thread, "streams_of_this_thread", note)
    monkeypatch.setattr(Exchange, "windows", recorded)
    tinymodels.build("llama").save_pretrained(tmp_path)
    gdsload.from_pretrained(tmp_path, group=one_rank)
    assert noted == [threading.main_thread()]
    assert windows and all(names == ["gdsload-exchange"] for names in windows)


@pytest.mark.skipif(not NEW, reason="transformers 4.57 asks for each tensor by itself")
def test_consumer_slower_than_the_limit_of_an_answer_does_not_silence_its_rank(
    one_rank: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tensors wait for it than may: the exchange pauses, and the other ranks wait as well."""
    answered, heard = threading.Event(), list[bool]()
    real = ReaderGroup.agree

    def agree(readers: ReaderGroup, state: Any = None) -> list[Any]:
        if state == "reading":
            answered.set()
        return real(readers, state)

    def slow(*_: object) -> None:
        heard.append(answered.wait(60))

    monkeypatch.setattr(ReaderGroup, "agree", agree)
    tinymodels.build("llama").save_pretrained(tmp_path)
    wanted = gdsload.from_pretrained(tmp_path, dtype="float16")
    with small_windows():
        found = gdsload.from_pretrained(
            tmp_path, dtype="float16", group=one_rank, stall_seconds=1, on_module_ready=slow
        )
    assert heard[0]
    assert tinymodels.differences(wanted, found) == []


@pytest.mark.skipif(not NEW, reason="transformers 4.57 asks for each tensor by itself")
@pytest.mark.parametrize(
    "error,reason",
    [
        (GdsloadError("no room for it"), "GdsloadError: no room for it"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_other_ranks_get_the_reason_why_the_model_of_a_rank_fails(
    one_rank: dist.ProcessGroup,
    error: BaseException,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = list[str]()
    real = ReaderGroup._gathered

    def gathered(readers: ReaderGroup, state: Any) -> list[Any]:
        if state[0]:
            said.append(state[0])
        return real(readers, state)

    def fail(*_: object) -> None:
        raise error

    tinymodels.build("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(ReaderGroup, "_gathered", gathered)
    monkeypatch.setattr(SharedQueue, "start", fail)
    with pytest.raises(type(error)):
        gdsload.from_pretrained(tmp_path, group=one_rank, readers="group")
    assert said == [reason]


@pytest.mark.skipif(not NEW, reason="transformers 4.57 asks for each tensor by itself")
def test_ranks_that_want_different_tensors_read_them_in_the_order_of_the_requests(
    one_rank: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with expert parallelism: else those that are requested first would come last."""
    read, requested = list[str](), list[str]()
    windows, take, agree = Exchange.windows, SharedQueue.take, ReaderGroup.agree

    def also_another(readers: ReaderGroup, state: Any = None) -> list[Any]:
        answers = agree(readers, state)
        return [*answers, state._replace(wants={})] if hasattr(state, "wants") else answers

    def noted(exchange: Exchange) -> Iterator[Any]:
        for complete in windows(exchange):
            read.extend(layout.info.name for layout, _ in complete)
            yield complete

    def taken(queue: SharedQueue, wanted: TensorSlice) -> torch.Tensor:
        requested.append(str(wanted.key))
        return take(queue, wanted)

    tinymodels.build("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(ReaderGroup, "agree", also_another)
    monkeypatch.setattr(Exchange, "windows", noted)
    monkeypatch.setattr(SharedQueue, "take", taken)
    gdsload.from_pretrained(tmp_path, group=one_rank)
    assert read == requested and read[0] == "lm_head.weight"


@pytest.mark.parametrize("cancelled", [True, False])
def test_rank_whose_load_ends_does_not_wait_on_for_a_slow_rank(
    one_rank: dist.ProcessGroup,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    cancelled: bool,
) -> None:
    load, asked, said = CancelToken(), list[SharedQueue](), list[str]()
    real = ReaderGroup.agree

    def agree(readers: ReaderGroup, state: Any = None) -> list[Any]:
        if threading.current_thread().name != "gdsload-exchange":
            return real(readers, state)
        asked.append(queue)
        if len(asked) > 1:
            return real(readers, state)
        if cancelled:
            load.ask()
        else:
            wait_for(lambda: queue._ending == "closed")
        return ["reading"]

    monkeypatch.setattr(ReaderGroup, "agree", agree)
    monkeypatch.setattr(ReaderGroup, "tell", lambda _, reason: said.append(reason))
    with (
        Checkpoint.open(tiny_checkpoint) as checkpoint,
        Session(checkpoint, LoadReport("t"), ReadSettings()) as shared,
        Session(checkpoint, LoadReport("t"), ReadSettings()) as alone,
    ):
        wanted = {name: (name, box_of(info, None)) for name, info in checkpoint.tensors.items()}
        readers = ReaderGroup(one_rank, "group", PATIENCE_SECONDS)
        queue = load.run(SharedQueue, shared, alone, readers, wanted, kept=(), order=wanted)
        queue.reason = "no room for it"
        queue.start()
        if cancelled:
            with pytest.raises(LoadCancelled):
                queue.finish()
        else:
            wait_for(lambda: asked)
        queue.close()
    assert len(asked) == 1
    assert said[0] == ("LoadCancelled: the load was cancelled" if cancelled else "no room for it")


def test_ctrl_c_while_other_ranks_get_their_tensors_ends_the_exchange(
    one_rank: dist.ProcessGroup, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, windows, joined = threading.Event(), list[int](), list[threading.Thread]()
    real, join = Exchange.windows, threading.Thread.join

    def held(exchange: Exchange) -> Iterator[Any]:
        for complete in real(exchange):
            windows.append(len(complete))
            assert closing.wait(PATIENCE_SECONDS)
            yield complete

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "gdsload-exchange":
            joined.append(thread)
            if len(joined) == 1:
                raise KeyboardInterrupt
            closing.set()
        join(thread, timeout)

    monkeypatch.setattr(Exchange, "windows", held)
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with (
        small_windows(),
        Checkpoint.open(tiny_checkpoint) as checkpoint,
        Session(checkpoint, LoadReport("t"), ReadSettings()) as shared,
        Session(checkpoint, LoadReport("t"), ReadSettings()) as alone,
    ):
        wanted = {name: (name, box_of(info, None)) for name, info in checkpoint.tensors.items()}
        readers = ReaderGroup(one_rank, "group", PATIENCE_SECONDS)
        queue = SharedQueue(shared, alone, readers, wanted, kept=(), order=wanted)
        with pytest.raises(KeyboardInterrupt):
            queue.finish()
        queue.close()
    assert len(windows) == 1 and not joined[0].is_alive()
