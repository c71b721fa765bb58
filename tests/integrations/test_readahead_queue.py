"""The readahead queue: any order, any thread, bounded memory, and a clean end."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gated import Gate, gated
from gdsload.checkpoint import Checkpoint
from gdsload.integrations.transformers.lazy_slices import MappedSlice, SeveralSlices
from gdsload.integrations.transformers.readahead_queue import (
    QueueClosed,
    ReadaheadQueue,
    ReadWindow,
)
from gdsload.loading.session import Session
from gdsload.loading.settings import ReadSettings
from gdsload.planning.tensor_slices import TensorSlice, slice_of, whole
from gdsload.report import LoadReport
from windows import small_windows


@pytest.fixture
def session(tiny_moe_checkpoint: Path) -> Iterator[Session]:
    with (
        Checkpoint.open(tiny_moe_checkpoint) as checkpoint,
        Session(checkpoint, LoadReport("tiny"), ReadSettings(cache="buffered")) as session,
    ):
        yield session


@contextmanager
def gated_session(source: Path) -> Iterator[tuple[Gate, Session]]:
    """A session whose reads complete when the gate lets them."""
    with (
        gated() as gate,
        Checkpoint.open(source) as checkpoint,
        Session(
            checkpoint, LoadReport("tiny"), ReadSettings(backend="gated", cache="buffered")
        ) as session,
    ):
        yield gate, session


@pytest.fixture(scope="module")
def expected(tiny_moe_checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in tiny_moe_checkpoint.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


def wholes(session: Session) -> list[TensorSlice]:
    return [whole(info) for info in session.checkpoint.tensors.values()]


@pytest.mark.parametrize("window_bytes", [1, 10_000, 1 << 30])
@pytest.mark.parametrize("seed", range(4))
def test_queue_any_order_by_many_threads_gives_every_tensor(
    session: Session, expected: dict[str, torch.Tensor], window_bytes: int, seed: int
) -> None:
    slices = wholes(session)
    asked = list(slices)
    random.Random(seed).shuffle(asked)
    with (
        small_windows(window_bytes, 20_000),
        ReadaheadQueue(session, slices) as feed,
        ThreadPoolExecutor(5) as pool,
    ):
        feed.start()
        found = dict(zip((c.key for c in asked), pool.map(feed.take, asked), strict=True))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert feed._window_of == {} and feed._posted == []
    assert feed.taken_tensors == len(slices)


def test_queue_windows_in_flight_stay_within_the_limit(session: Session) -> None:
    slices = wholes(session)
    with small_windows(10_000, 40_000), ReadaheadQueue(session, slices) as feed:
        feed.start()
        assert feed._posted and feed._planned
        for wanted in slices:
            feed.take(wanted)
            held = sum(window.ahead_bytes for window in feed._posted)
            assert held <= 40_000 or len(feed._posted) == 1
        assert feed._posted == []


def test_queue_unexpected_slices_are_read_anew(
    session: Session, expected: dict[str, torch.Tensor]
) -> None:
    """Each tensor owns its memory: changing one does not change what is read after it."""
    info = max(session.checkpoint.tensors.values(), key=lambda info: info.nbytes)
    with ReadaheadQueue(session, [whole(info)]) as feed:
        feed.start()
        first = feed.take(whole(info))
        first.zero_()
        second = feed.take(whole(info))
        rows = feed.take(slice_of(info, slice(1, 3)))
        columns = feed.take(slice_of(info, (slice(None), slice(0, 2))))
    wanted = expected[info.name]
    assert torch.equal(second, wanted)
    assert torch.equal(rows, wanted[1:3])
    assert torch.equal(columns, wanted[:, :2])
    assert columns.is_contiguous()
    assert feed.taken_tensors == 4
    del feed
    gc.collect()
    assert torch.equal(second, wanted)


def test_several_slices_of_the_same_bytes_are_read_once(
    session: Session, expected: dict[str, torch.Tensor]
) -> None:
    """Those bytes are not kept for later requests."""
    info = max(session.checkpoint.tensors.values(), key=lambda info: info.nbytes)
    indices = [(slice(None), slice(0, 2)), (slice(None), slice(4, 7))]
    slices = [slice_of(info, index) for index in indices]
    base = slice_of(info, (slice(None), slice(0, 7)))
    with ReadaheadQueue(session, [base]) as feed:
        feed.start()
        tensor = SeveralSlices(feed, info, base, {one.key: one.index for one in slices})
        for index in indices:
            found = tensor[index]
            assert torch.equal(found, expected[info.name][index])
            found.zero_()
        assert (feed.taken_tensors, feed.taken_bytes) == (1, info.nbytes)
        assert torch.equal(tensor[indices[0]], expected[info.name][indices[0]])
        assert feed.taken_tensors == 2


def test_queue_mapped_tensor_has_the_bytes_of_the_file(
    session: Session, expected: dict[str, torch.Tensor]
) -> None:
    info = next(iter(session.checkpoint.tensors.values()))
    with ReadaheadQueue(session) as feed:
        tensor = MappedSlice(feed, info)[...]
    assert torch.equal(tensor, expected[info.name])


def test_queue_in_a_stopped_process_does_not_report_a_stall(
    tiny_moe_checkpoint: Path, expected: dict[str, torch.Tensor]
) -> None:
    with (
        gated_session(tiny_moe_checkpoint) as (gate, session),
        ReadaheadQueue(session, wholes(session), kept={one.key for one in wholes(session)}) as feed,
    ):
        feed.start()
        gate.stopped = True
        wanted = wholes(session)[0]
        assert torch.equal(feed.take(wanted), expected[wanted.key])
        assert not gate.stopped


def test_queue_close_wakes_waiting_threads(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = wholes(session)
    with small_windows(1):
        feed = ReadaheadQueue(session, slices)
    waiting = threading.Event()
    monkeypatch.setattr(ReadWindow, "has", lambda *_: False)
    monkeypatch.setattr(ReadWindow, "poll", lambda *_: waiting.set())
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(feed.take, slices[0])
        assert waiting.wait(60)
        feed.close()
        with pytest.raises(QueueClosed, match="has ended"):
            taken.result(60)
    with pytest.raises(QueueClosed):
        feed.take(slices[1])
    feed.close()


@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_queue_slices_of_the_same_rows_have_bytes_of_their_own(tmp_path: Path, cache: str) -> None:
    """Two columns of a tensor, such as those of a packed projection: both are read as whole rows,
    and the first one that is freed takes its bytes with it."""
    tensor = torch.randn(1024, 64)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    with (
        Checkpoint.open(tmp_path) as checkpoint,
        Session(checkpoint, LoadReport("w"), ReadSettings(cache=cache)) as session,
    ):
        info = checkpoint.tensors["w"]
        columns = [(slice(None), slice(0, 8)), (slice(None), slice(32, 40))]
        slices = [slice_of(info, index) for index in columns]
        assert slices[0].parts[0][-3:] == slices[1].parts[0][-3:]
        with ReadaheadQueue(session, slices) as queue:
            queue.start()
            for one, index in zip(slices, columns, strict=True):
                assert torch.equal(queue.take(one), tensor[index])


def test_queue_does_not_wait_for_what_is_there(
    tiny_moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that is reused is complete before its first slice is given."""
    in_vain: list[bool] = []
    wait_for = ReadWindow.wait_for

    def noted(window: ReadWindow, first: int, last: int, seconds: float) -> None:
        in_vain.append(window.has_arrived(first, last))
        wait_for(window, first, last, seconds)

    monkeypatch.setattr(ReadWindow, "wait_for", noted)
    with gated_session(tiny_moe_checkpoint) as (gate, session):
        slices = {wanted.parts[0].shard: wanted for wanted in wholes(session)}
        with ReadaheadQueue(session, [*slices.values()]) as queue, ThreadPoolExecutor(1) as pool:
            queue.start()
            assert len(gate.request().transfers) == 2
            gate.open(count=1)
            taken = pool.submit(queue.take, slices[0])
            gate.wait_seen()
            assert not taken.done()
            gate.open()
            taken.result(60)
    assert in_vain and not any(in_vain)


def test_queue_that_was_closed_posts_nothing(session: Session) -> None:
    queue = ReadaheadQueue(session, wholes(session))
    queue.close()
    with pytest.raises(QueueClosed, match="has ended"):
        queue.start()
    assert not session.posted
