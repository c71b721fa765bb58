"""A failed read raises the same error for every caller, and a request that cannot be made gives
back everything that was taken for it."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch

import descriptors
import gdsload
from gated import Gate, GatedBackend, GatedRequest
from gdsload import warmup
from gdsload._native.memory import Region
from gdsload.backends import Memory, OpenFile, Registration
from gdsload.backends.base import BackendStatus
from gdsload.backends.registry import _registered, register_backend
from gdsload.checkpoint import Checkpoint, Shard, TensorInfo, checkpoint as checkpoint_module
from gdsload.errors import CheckpointError, GdsloadError, PlacementError, ReadError, StallError
from gdsload.integrations.transformers.parameter_buffers import (
    CAST,
    Kind,
    ParameterBuffers,
    buffer_of,
)
from gdsload.integrations.transformers.parameter_writer import ParameterWriter
from gdsload.integrations.transformers.readahead_queue import ReadaheadQueue
from gdsload.loading import io_mode
from gdsload.loading.accounting import record_backend
from gdsload.loading.batch import Batch, release_all
from gdsload.loading.claims import LOST, READ
from gdsload.loading.session import Session
from gdsload.loading.settings import ReadSettings
from gdsload.memory import host_buffers, page_cache
from gdsload.memory.host_buffers import BufferView
from gdsload.memory.tensors import make_tensors
from gdsload.planning.read_plan import Transfer, byte_ranges_of
from gdsload.planning.tensor_slices import whole
from gdsload.readahead import prefetch as prefetch_module
from gdsload.readahead.prefetch_batch import PrefetchBatch
from gdsload.report import LoadReport
from storage import make_cold
from windows import small_windows

POOL_BYTES = 64 << 20
PATIENCE_SECONDS = 120.0
PAGE = os.sysconf("SC_PAGESIZE")
COUNT = 4
# Longer than a request of the gated backend: a tensor is at least one transfer.
LENGTH = 32 << 10


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {f"t{n}": torch.full((LENGTH,), n + 1, dtype=torch.int32) for n in range(COUNT)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def session(path: Path, gate: Gate) -> Iterator[Session]:
    with (
        Checkpoint.open(path) as checkpoint,
        Session(
            checkpoint, LoadReport("t"), ReadSettings(backend="gated", cache="buffered")
        ) as session,
    ):
        yield session


def require_true(path: Path) -> None:
    """A load by an ordinary backend has the bytes of the file."""
    for name, tensor in gdsload.load_file(path, cache="buffered").items():
        assert torch.equal(tensor, torch.full((LENGTH,), int(name[1:]) + 1, dtype=torch.int32))


def fail(gate: Gate, number: int = 0) -> None:
    """One read fails, all the others arrive."""
    gate.open(number, count=1, error=errno.EIO)
    gate.open(number)


def same_error(calls: Sequence[Callable[[], Any]]) -> None:
    """All of them raise, here and in another thread, and name the same read."""
    texts = []
    with ThreadPoolExecutor(1) as other:
        for call in calls:
            with pytest.raises(ReadError, match="Input/output error") as caught:
                call()
            texts.append(str(caught.value))
            with pytest.raises(ReadError) as caught:
                other.submit(call).result(30)
            texts.append(str(caught.value))
    assert len(set(texts)) == 1


@pytest.mark.parametrize("kept", [True, False])
def test_queue_after_a_failed_read_raises_the_same_error_for_every_taker(
    session: Session, gate: Gate, kept: bool
) -> None:
    slices = [whole(info) for info in session.checkpoint.tensors.values()]
    keys = [each.key for each in slices if kept]
    with ReadaheadQueue(session, slices, kept=keys) as queue:
        queue.start()
        fail(gate)
        with pytest.raises(ReadError, match="Input/output error"):
            queue.take(slices[0])
        if not kept:  # one window, given when all of it is there
            same_error(
                [
                    lambda tensor_slice=tensor_slice: queue.take(tensor_slice)
                    for tensor_slice in slices[::-1]
                ]
            )  # type: ignore[misc]
        else:
            assert int(queue.take(slices[1])[0]) == 2
            same_error([lambda: queue.take(slices[0])])
            assert slices[0].key in queue._window_of
    assert len(gate.requests) == 1


def test_queue_after_a_failed_unexpected_read_reads_anew(session: Session, gate: Gate) -> None:
    info = next(iter(session.checkpoint.tensors.values()))
    with ReadaheadQueue(session) as queue, ThreadPoolExecutor(1) as other:
        taken = other.submit(queue.take, whole(info))
        fail(gate)
        with pytest.raises(ReadError):
            taken.result(30)
        assert gate.request().released
        taken = other.submit(queue.take, whole(info))
        gate.open(1)
        assert int(taken.result(30)[0]) == 1


def test_pool_after_a_failed_read_stores_nothing_of_it(
    session: Session, gate: Gate, path: Path
) -> None:
    slices = [whole(info) for info in session.checkpoint.tensors.values()]
    with warmup.HostPool(POOL_BYTES) as pool:
        with ReadaheadQueue(session, slices) as queue:
            queue.start()
            fail(gate)
            same_error(
                [
                    lambda tensor_slice=tensor_slice: queue.take(tensor_slice)
                    for tensor_slice in slices
                ]
            )  # type: ignore[misc]
        gc.collect()
        assert pool.held_bytes == 0
        require_true(path)
        assert "pool" not in gdsload.last_report().paths


def test_parameter_writer_after_a_failed_read_raises_the_same_error_for_every_taker(
    session: Session, gate: Gate
) -> None:
    infos = list(session.checkpoint.tensors.values())
    found = [buffer_of([Kind((i.name,), i.shape)], torch.int32, CAST) for i in infos]
    targets = ParameterBuffers([target for target in found if target is not None])
    with targets, ParameterWriter(session, targets, infos) as writer:
        writer.start()
        fail(gate)
        same_error([lambda i=i: writer.take(i.name, torch.int32) for i in infos])  # type: ignore[misc]


def test_parameter_writer_after_an_interrupted_copy_copies_no_more(
    session: Session, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that view the window have freed its bytes by then."""
    infos = list(session.checkpoint.tensors.values())
    found = [buffer_of([Kind((i.name,), i.shape)], torch.float32, CAST) for i in infos]
    targets = ParameterBuffers([target for target in found if target is not None])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with targets, ParameterWriter(session, targets, infos) as writer:
        writer.start()
        gate.open()
        with monkeypatch.context() as patch:
            patch.setattr(ParameterWriter, "_write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.take(infos[0].name, torch.float32)
        with pytest.raises(GdsloadError, match="was interrupted"):
            writer.take(infos[0].name, torch.float32)


@pytest.mark.parametrize("released", [False, True])
def test_batch_after_a_failed_read_raises_at_every_wait(
    session: Session, gate: Gate, released: bool
) -> None:
    batch = Batch(session, *session.arrange(byte_ranges_of(session.checkpoint, None)))
    fail(gate)
    try:
        same_error([batch.wait])
        if released:
            batch.release()
        same_error([batch.wait])
    finally:
        batch.release()


def test_batch_released_before_its_end_does_not_count_as_arrived(
    session: Session, gate: Gate
) -> None:
    batch = Batch(session, *session.arrange(byte_ranges_of(session.checkpoint, None)))
    batch.release()
    with pytest.raises(ReadError, match="reads unfinished"):
        batch.wait()


def test_ctrl_c_while_a_batch_is_released_releases_the_others(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = byte_ranges_of(session.checkpoint, None)
    batches = [Batch(session, *session.arrange([each])) for each in ranges[:3]]
    released: list[Batch] = []

    def release(batch: Batch) -> None:
        released.append(batch)
        if batch is batches[1]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Batch, "release", release)
        release_all(batches)
    assert set(released) == set(batches)
    release_all(batches)
    assert not session.busy()


def test_prefetch_after_a_failed_read_reports_it_lost_to_every_claim(
    session: Session, gate: Gate
) -> None:
    ahead = PrefetchBatch.of(session, byte_ranges_of(session.checkpoint, None))
    fail(gate)
    last = len(ahead.plan.transfers) - 1
    for _ in range(2):
        assert ahead.look()
        assert [ahead.state(0, 0), ahead.state(0, last), ahead.state(1, last)] == [
            LOST,
            LOST,
            READ,
        ]
        ahead.release()
    assert isinstance(ahead.error, ReadError)


def test_make_tensors_that_fails_leaves_the_other_bytes_alone() -> None:
    """A tensor gives its pages back when it is freed."""
    region = Region.anonymous(4 * PAGE)
    ctypes.memset(region.address, 7, region.length)
    infos = [
        TensorInfo("a", "U8", (2 * PAGE,), 0, 0, 2 * PAGE),
        TensorInfo("odd", "F4", (2, 1), 0, 2 * PAGE, 1),
    ]
    views = {"a": BufferView(region, 0), "odd": BufferView(region, 2 * PAGE)}
    with pytest.raises(CheckpointError, match="F4"):
        make_tensors(infos, views)
    gc.collect()
    assert region.read(0, 2 * PAGE) == bytes([7]) * (2 * PAGE)


class Refusing(GatedBackend):
    """Raises in one of its steps, and counts what is not given back."""

    name: ClassVar[str] = "refusing"
    step: ClassVar[str] = ""
    error: ClassVar[type[BaseException]] = KeyboardInterrupt
    registered: ClassVar[int] = 0
    prepared: ClassVar[int] = 0

    def _refuse(self, step: str) -> None:
        if Refusing.step == step:
            raise Refusing.error("refused")

    def register(self, what: OpenFile | Memory) -> Registration:
        if isinstance(what, Memory):
            self._refuse("register")
        Refusing.registered += 1
        return super().register(what)

    def deregister(self, registration: Registration) -> None:
        Refusing.registered -= 1

    def prepare(
        self,
        transfers: Sequence[Transfer],
        files: Sequence[Registration],
        memory: Sequence[Registration],
    ) -> GatedRequest:
        self._refuse("prepare")
        Refusing.prepared += 1
        return super().prepare(transfers, files, memory)

    def yield_to_loads(self, request: Any, ahead: bool) -> None:
        self._refuse("yield_to_loads")

    def post(self, request: GatedRequest) -> None:
        self._refuse("post")
        super().post(request)

    def release(self, request: GatedRequest) -> None:
        Refusing.prepared -= 1
        super().release(request)


@pytest.fixture
def refusing(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Refusing]]:
    monkeypatch.setattr(Refusing, "registered", 0)
    monkeypatch.setattr(Refusing, "prepared", 0)
    monkeypatch.setattr(Refusing, "step", "")
    register_backend(Refusing)
    yield Refusing
    del _registered["refusing"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", [Batch, PrefetchBatch])
@pytest.mark.parametrize("step", ["register", "prepare", "yield_to_loads", "post"])
def test_batch_that_cannot_be_posted_gives_back_all_it_took(
    step: str,
    kind: type[Batch],
    error: type[BaseException],
    path: Path,
    refusing: type[Refusing],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusing, "error", error)
    with warmup.HostPool(POOL_BYTES) as pool, Checkpoint.open(path) as checkpoint:
        ranges = byte_ranges_of(checkpoint, None)
        with Session(
            checkpoint, LoadReport("t"), ReadSettings(backend="refusing", cache="buffered")
        ) as session:
            files = 0
            for _ in range(3):
                monkeypatch.setattr(refusing, "step", step)
                if step == "yield_to_loads" and kind is Batch:
                    break  # a load does not yield
                with pytest.raises(error):
                    kind(session, *session.arrange(ranges))
                monkeypatch.setattr(refusing, "step", "")
                files = 1
                assert session.busy() == ""
                assert (refusing.registered, refusing.prepared) == (files, 0)
                gc.collect()
                pool.trim(0)
                assert pool.held_bytes == 0
            gdsload.quiesce(0.0)
        assert refusing.registered == 0


def test_batch_whose_report_cannot_be_written_is_released(
    path: Path, refusing: type[Refusing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step of posting: the reads are under way by then."""

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    with (
        Checkpoint.open(path) as checkpoint,
        Session(
            checkpoint, LoadReport("t"), ReadSettings(backend="refusing", cache="buffered")
        ) as session,
    ):
        arranged = session.arrange(byte_ranges_of(checkpoint, None))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("gdsload.loading.batch.record_backend", broken)
            Batch(session, *arranged)
        assert refusing.gate.request().released and refusing.prepared == 0
        assert session.busy() == ""


def test_queue_whose_next_window_cannot_be_posted_raises_again(
    path: Path, refusing: type[Refusing], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Checkpoint.open(path) as checkpoint,
        Session(
            checkpoint, LoadReport("t"), ReadSettings(backend="refusing", cache="buffered")
        ) as session,
    ):
        infos = list(checkpoint.tensors.values())
        monkeypatch.setattr(refusing, "error", PlacementError)
        monkeypatch.setattr(refusing, "step", "prepare")
        slices = [whole(info) for info in infos]
        with small_windows(1), ReadaheadQueue(session, slices) as queue:
            for _ in range(2):
                with pytest.raises(PlacementError):
                    queue.take(whole(infos[0]))
        found = [buffer_of([Kind((i.name,), i.shape)], torch.int32, CAST) for i in infos]
        targets = ParameterBuffers([target for target in found if target is not None])
        with small_windows(1), targets, ParameterWriter(session, targets, infos) as writer:
            for _ in range(2):
                with pytest.raises(PlacementError):
                    writer.take(infos[0].name, torch.int32)
        assert session.busy() == ""


def test_session_that_cannot_record_its_backend_closes_it(
    path: Path, refusing: type[Refusing], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(refusing, "close", lambda _: closed.append(1))
    monkeypatch.setattr("gdsload.loading.session.record_backend", broken)
    with Checkpoint.open(path) as checkpoint, pytest.raises(KeyboardInterrupt):
        Session(checkpoint, LoadReport("t"), ReadSettings(backend="refusing", page_cache="keep"))
    assert len(closed) == 1


def test_session_closed_before_its_batch_opens_no_second_backend(
    session: Session, gate: Gate
) -> None:
    batch = PrefetchBatch.of(session, byte_ranges_of(session.checkpoint, None))
    session.close()
    batch.wait_for(0, -1, 0.0)
    batch.release()
    assert session.backend is None
    assert gate.request().released


def test_register_that_fails_closes_the_direct_descriptor(
    path: Path, refusing: type[Refusing], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(refusing, "register", broken)
    with (
        Checkpoint.open(path) as checkpoint,
        Session(
            checkpoint, LoadReport("t"), ReadSettings(backend="refusing", page_cache="keep")
        ) as session,
        descriptors.none_left(),
    ):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                session.register(0)


def test_prefetch_without_a_thread_has_failed_and_its_load_reads(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch_module, "start_thread", lambda *_: None)
    with gdsload.prefetch(path) as prefetch:
        with pytest.raises(gdsload.GdsloadError, match="no thread"):
            prefetch.wait()
        assert gdsload.load_file(path).keys() == safetensors.torch.load_file(path).keys()
    assert prefetch_module.prefetches() == []
    gdsload.quiesce(0.0)


def test_prefetch_whose_device_cannot_be_opened_ends(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(prefetch_module.Prefetch, "_open_device", none)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with gdsload.prefetch(path) as ahead, pytest.raises(GdsloadError, match="new thread"):
        ahead.wait(30)


def test_prefetch_does_not_call_every_key_error_a_missing_tensor(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("an error of ours")

    with gdsload.prefetch(path, names=["no such"]) as ahead, pytest.raises(CheckpointError):
        ahead.wait(30)
    monkeypatch.setattr(prefetch_module.Prefetch, "_read", broken)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with (
        gdsload.prefetch(path) as ahead,
        pytest.raises(GdsloadError, match=r"prefetch failed: KeyError") as caught,
    ):
        ahead.wait(30)
    assert not isinstance(caught.value, CheckpointError)


@pytest.mark.parametrize("call", ["reopen_direct", "verify_unchanged"])
def test_storage_that_hangs_before_or_after_the_reads_is_a_stall(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    answers = threading.Event()
    real = getattr(Shard, call)

    def hangs(shard: Shard) -> Any:
        assert answers.wait(120.0)
        return real(shard)

    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "fuse.test")
    monkeypatch.setattr(Shard, call, hangs)
    try:
        with pytest.raises(StallError):
            gdsload.load_file(tiny_checkpoint, cache="direct", stall_seconds=0.2)
    finally:
        answers.set()


def loaded(path: Path, **words: Any) -> Any:
    return gdsload.load_file(path, **words)


def streamed(path: Path, **words: Any) -> Any:
    return dict(gdsload.stream(path, **words))


def got(path: Path, **words: Any) -> Any:
    with gdsload.safe_open(path, framework="pt", **words) as opened:
        return opened.get_tensor(next(iter(opened.keys())))


@pytest.mark.parametrize("load", [loaded, streamed, got])
@pytest.mark.parametrize(
    ("call", "answers", "words"),
    [
        ("resident_bytes", {}, {}),
        ("wholly_resident", {}, {}),
        ("has_arrived", {"wholly_resident": True}, {}),
        ("residency", {"wholly_resident": False}, {}),
        ("absent_ranges", {"wholly_resident": False}, {"page_cache": "drop"}),
        ("Region.file", {"wholly_resident": True, "has_arrived": True}, {}),
        ("Region.file", {}, {"cache": "mapped"}),
    ],
)
def test_storage_that_hangs_in_a_question_about_the_page_cache_is_a_stall(
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    answers: dict[str, bool],
    words: dict[str, Any],
    load: Callable[..., Any],
) -> None:
    answered = threading.Event()

    def hangs(*_: object) -> Any:
        assert answered.wait(PATIENCE_SECONDS)
        raise OSError(errno.EIO, "the server is gone")

    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "fuse.test")
    for name, answer in answers.items():
        monkeypatch.setattr(page_cache, name, lambda *_, answer=answer: answer)
    if call == "Region.file":
        monkeypatch.setattr(host_buffers, "Region", SimpleNamespace(file=hangs))
    else:
        monkeypatch.setattr(page_cache, call, hangs)
    try:
        with pytest.raises(StallError, match="the storage has not answered"):
            load(tiny_checkpoint, stall_seconds=0.2, **words)
        assert gc.isenabled()
    finally:
        answered.set()


def test_storage_that_hangs_in_the_question_about_a_read_is_a_stall(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files that are in the page cache in part, each read is asked about."""
    answered, plan = threading.Event(), Session.plan

    def hangs(*_: object) -> bool:
        return answered.wait(PATIENCE_SECONDS)

    def planned(*args: Any, **words: Any) -> Any:
        monkeypatch.setattr(page_cache, "wholly_resident", hangs)
        return plan(*args, **words)

    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "fuse.test")
    monkeypatch.setattr(page_cache, "wholly_resident", lambda *_: False)
    monkeypatch.setattr(page_cache, "residency", lambda *_: "some")
    monkeypatch.setattr(Session, "plan", planned)
    try:
        with pytest.raises(StallError, match="the storage has not answered"):
            gdsload.load_file(tiny_checkpoint, stall_seconds=0.2)
        assert gc.isenabled()
    finally:
        answered.set()


@pytest.mark.parametrize("call", ["wholly_resident", "estimated_bytes"])
def test_storage_that_hangs_while_the_page_cache_is_filled_is_a_stall(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    answered = threading.Event()

    def hangs(*_: object) -> bool:
        return answered.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "fuse.test")
    monkeypatch.setattr(page_cache, call, hangs)
    try:
        with (
            gdsload.prefetch(tiny_checkpoint, tier="pagecache", stall_seconds=0.2) as ahead,
            pytest.raises(StallError, match="the storage has not answered"),
        ):
            assert ahead.wait(PATIENCE_SECONDS)
    finally:
        answered.set()


def test_overlay_that_hangs_when_its_share_in_the_page_cache_is_asked_for_is_a_stall(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def hangs(*_: object) -> float:
        return float(answered.wait(PATIENCE_SECONDS))

    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "overlay")
    monkeypatch.setattr(page_cache, "mostly_resident", lambda *_: False)
    monkeypatch.setattr(page_cache, "resident_share", hangs)
    words: Any = {"backend": "posix", "page_cache": "fill", "options": {"engine": "threads"}}
    try:
        with pytest.raises(StallError, match="the storage has not answered"):
            gdsload.load_file(path, stall_seconds=0.2, **words)
    finally:
        answered.set()


def test_each_range_of_an_overlay_that_is_completed_is_progress(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them may take longer than a stall."""
    progress: list[str] = []
    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "overlay")
    monkeypatch.setattr(page_cache, "mostly_resident", lambda *_: True)
    monkeypatch.setattr(page_cache, "wholly_resident", lambda *_: False)
    monkeypatch.setattr(
        io_mode, "note_progress", lambda: progress.append(threading.current_thread().name)
    )
    with Checkpoint.open(path) as checkpoint:
        access = io_mode.ShardAccess(checkpoint, LoadReport("t"), ReadSettings())
        assert access.mapped(0, byte_ranges_of(checkpoint, ["t0", "t2"]))
    assert progress == ["gdsload-open"] * 2


def rows_by(index: Any) -> Callable[[Path], object]:
    """Reads a part of a tensor by a slice of `safe_open`."""

    def read(path: Path) -> object:
        with gdsload.safe_open(path) as opened:
            return opened.get_slice("t1")[index]

    return read


@pytest.mark.parametrize(
    ("read", "copies"),
    [
        (gdsload.load_file, False),
        (lambda path: gdsload.load_file(path, slices={"t1": (..., slice(1, 9))}), True),
        (rows_by((..., slice(1, 9))), False),
        (rows_by([0, 2]), True),
    ],
)
def test_large_ranges_are_completed_before_bytes_of_them_are_copied(
    path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object], copies: bool
) -> None:
    """In a mapping, a page that cannot be read would end the process."""
    populated: list[int] = []
    monkeypatch.setattr(io_mode, "_ALIGN_BYTES", 1)  # no tensor is misaligned
    monkeypatch.setattr(page_cache, "is_large", lambda _: True)
    monkeypatch.setattr(page_cache, "mostly_resident", lambda *_: True)
    monkeypatch.setattr(page_cache, "wholly_resident", lambda *_: False)
    monkeypatch.setattr(io_mode.system, "populate", lambda *where: populated.append(where[1]))
    read(path)
    assert bool(populated) == copies


def test_each_read_of_a_small_checkpoint_of_an_overlay_is_progress(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them may take longer than a stall."""
    progress: list[str] = []
    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "overlay")
    monkeypatch.setattr(page_cache, "mostly_resident", lambda *_: False)
    monkeypatch.setattr(io_mode, "_COPY_BYTES", 4096)
    monkeypatch.setattr(
        io_mode, "note_progress", lambda: progress.append(threading.current_thread().name)
    )
    with Checkpoint.open(path) as checkpoint:
        access = io_mode.ShardAccess(checkpoint, LoadReport("t"), ReadSettings())
        assert access.fill.small
        access.fill_if_small({0: byte_ranges_of(checkpoint)})
        least = checkpoint.total_bytes // 4096
    assert least > 1 and len(progress) >= least and set(progress) == {"gdsload-open"}


def test_all_reads_of_a_plan_are_asked_about_in_one_thread(
    path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[threading.Thread] = []

    def noted(*_: object) -> bool:
        asked.append(threading.current_thread())
        return True

    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "fuse.test")
    monkeypatch.setattr(page_cache, "residency", lambda *_: "some")
    monkeypatch.setattr(page_cache, "wholly_resident", noted)
    with (
        Checkpoint.open(path) as checkpoint,
        Session(checkpoint, LoadReport("t"), ReadSettings(backend="gated")) as session,
    ):
        plan = session.plan(byte_ranges_of(checkpoint, None))
    assert len(asked) == len(plan.transfers) > 1
    assert len(set(asked)) == 1 and threading.current_thread() not in asked


@pytest.fixture
def distant_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of COUNT shards with one tensor each, which seem to be on distant storage."""
    for number in range(COUNT):
        tensors = {f"t{number}": torch.full((LENGTH,), number, dtype=torch.int32)}
        safetensors.torch.save_file(tensors, tmp_path / f"model-{number}.safetensors")
    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "fuse.test")
    return tmp_path


@pytest.mark.parametrize("call", ["reopen_direct", "verify_unchanged"])
def test_distant_shards_are_opened_and_checked_at_the_same_time(
    distant_shards: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    all_of_them = threading.Barrier(COUNT)
    real = getattr(Shard, call)

    def waits(shard: Shard) -> Any:
        all_of_them.wait(60.0)
        return real(shard)

    monkeypatch.setattr(Shard, call, waits)
    assert len(gdsload.load_file(distant_shards, cache="direct")) == COUNT


def test_only_shards_that_were_read_are_checked(
    distant_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    real = Shard.verify_unchanged
    monkeypatch.setattr(
        Shard, "verify_unchanged", lambda shard: (checked.append(shard.name), real(shard))
    )
    names = [f"model-{number}.safetensors" for number in range(COUNT)]
    for _ in gdsload.stream(distant_shards, window_bytes=1, page_cache="keep"):
        pass
    assert checked[: COUNT - 1] == names[:-1]
    assert sorted(checked[COUNT - 1 :]) == names, "all of them at the end"
    checked.clear()
    with gdsload.safe_open(distant_shards, framework="pt") as file:
        file.get_tensor("t2")
    assert checked == ["model-2.safetensors"]


def test_process_that_may_open_few_files_keeps_some_for_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_mode, "_DESCRIPTOR_PERCENT", 0)
    make_cold(path)
    assert len(gdsload.load_file(path, page_cache="keep")) == COUNT
    refusals = gdsload.last_report().refusals
    assert "ulimit -n" in refusals["direct I/O on model.safetensors"]


def test_failovers_of_several_backends_are_added() -> None:
    report = LoadReport("m")
    for nbytes in (5, 2):
        session: Any = SimpleNamespace(report=report, failovers={})
        for so_far in (1, nbytes):
            status = BackendStatus("auto", failovers={"gds -> posix": so_far})
            backend: Any = SimpleNamespace(status=lambda status=status: status)
            record_backend(session, backend)
    assert report.failovers == {"gds -> posix": 7}


def test_direct_descriptor_that_a_backend_refuses_is_closed_like_others_of_its_storage(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusal(GatedBackend):
        def register(self, what: OpenFile | Memory) -> Registration:
            raise OSError("refused")

    closed: list[bool] = []

    def close_files(fds: list[int], *, may_hang: bool, **_: float) -> None:
        closed.extend(may_hang for _ in fds)
        list(map(os.close, fds))

    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "fuse.test")
    monkeypatch.setattr(io_mode, "close_files", close_files)
    with Checkpoint.open(tiny_checkpoint) as checkpoint:
        access = io_mode.ShardAccess(checkpoint, LoadReport("t"), ReadSettings(cache="direct"))
        with pytest.raises(OSError, match="refused"):
            access.register(Refusal(), 0)
    assert closed == [True]


def test_backend_is_closed_before_the_descriptors_that_it_reads_from(tiny_checkpoint: Path) -> None:
    class Reading(GatedBackend):
        def register(self, what: OpenFile | Memory) -> Registration:
            assert isinstance(what, OpenFile)
            self.fd = what.direct_fd
            return super().register(what)

        def close(self) -> None:
            sizes.append(os.fstat(self.fd).st_size)
            super().close()

    sizes: list[int] = []
    with Checkpoint.open(tiny_checkpoint) as checkpoint:
        access = io_mode.ShardAccess(checkpoint, LoadReport("t"), ReadSettings(cache="direct"))
        backend = Reading()
        access.register(backend, 0)
        access.close(backend)
        assert sizes == [checkpoint.shards[0].size]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(backend.fd)
