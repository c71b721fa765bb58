"""Bytes read ahead: claimed once, never read twice, and never from another version of a file."""

from __future__ import annotations

import ctypes
import errno
import gc
import math
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as reference_load_file, save_file

import gdsload
from command import run
from gated import Gate, GatedBackend
from gdsload import events
from gdsload.checkpoint import Checkpoint, checkpoint as checkpoint_module
from gdsload.errors import CheckpointError, FileChanged, GdsloadError, PlacementError, ReadError
from gdsload.loading import claims, session as session_module
from gdsload.loading.batch import Batch
from gdsload.loading.session import Session
from gdsload.loading.settings import ReadSettings
from gdsload.loading.window_writer import WindowWriter
from gdsload.memory import page_cache
from gdsload.planning.read_plan import byte_ranges_of
from gdsload.readahead import prefetch, prefetch_batch
from gdsload.readahead.prefetch import PrefetchCancelled, prefetches
from gdsload.readahead.prefetch_batch import PrefetchBatch
from gdsload.report import LoadReport
from gdsload.system.cancellation import CancelToken, LoadCancelled
from gdsload.system.threads import SafeEvent
from storage import make_cold
from waiting import wait_for

PATIENCE_SECONDS = 120.0
# Through the page cache into memory: works on every filesystem, and never ends in a mapping.
READ = {"cache": "buffered"}


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint, tmp_path / "model")


def lose(ahead: gdsload.Prefetch, gate: Gate, end: str) -> None:
    """Ends a prefetch before it has read all: "cancel", "close" or "fail"."""
    if end == "fail":
        gate.open(count=1, error=errno.EIO)
        gate.open()  # the others go on
    else:
        getattr(ahead, end)()


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    left = prefetches()
    for one in left:
        one.close()
    assert left == [] and claims.offered() == []


def await_reading(ahead: gdsload.Prefetch) -> None:
    """Waits until it has posted its reads, or relies on those of others."""
    assert ahead._posted.wait(PATIENCE_SECONDS)


def reference(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors.update(reference_load_file(file))
    return tensors


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_what_has_landed_is_claimed_and_not_read_again(checkpoint: Path) -> None:
    with gdsload.prefetch(checkpoint, **READ) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        wanted = ahead.progress().wanted_bytes
        assert ahead.progress()[:3] == ("landed", wanted, wanted)
        got = gdsload.load_file(checkpoint)
        report = gdsload.last_report()
        assert report.paths == {"prefetched": wanted} and report.requests == 0
        assert ahead.progress().claimed_bytes == wanted
        assert prefetches() == []  # all is taken: nothing is held any more
    assert_same(got, reference(checkpoint))


def test_what_is_on_its_way_is_waited_for(
    checkpoint: Path, gate: Gate, claimed: threading.Event
) -> None:
    loaded: list[dict[str, torch.Tensor]] = []
    with gdsload.prefetch(checkpoint, backend="gated", **READ) as ahead:
        gate.open(count=1)
        loader = threading.Thread(target=lambda: loaded.append(gdsload.load_file(checkpoint)))
        loader.start()
        assert claimed.wait(PATIENCE_SECONDS)
        assert ahead.progress().state == "reading" and loaded == []
        gate.open()
        loader.join(PATIENCE_SECONDS)
    assert len(gate.requests) == 1, "somebody read again"
    assert_same(loaded[0], reference(checkpoint))


def test_a_load_waits_for_a_prefetch_that_still_opens_the_files(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go = threading.Event(), threading.Event()
    real = gdsload.Checkpoint.open

    def slow(source: str, **where: object) -> object:
        if threading.current_thread().name == "gdsload-prefetch":
            opening.set()
            assert go.wait(PATIENCE_SECONDS)
        return real(source, **where)  # type: ignore[arg-type]

    monkeypatch.setattr(gdsload.Checkpoint, "open", slow)
    with gdsload.prefetch(checkpoint, **READ) as ahead:
        assert opening.wait(PATIENCE_SECONDS) and ahead.progress().state == "opening"
        wait = claims.Offer.await_filled
        monkeypatch.setattr(
            claims.Offer, "await_filled", lambda *given: (go.set(), wait(*given))[1]
        )
        gdsload.load_file(checkpoint)
    assert set(gdsload.last_report().paths) == {"prefetched"}


def test_each_step_of_opening_is_progress_of_a_prefetch(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []

    def step(call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **named: Any) -> Any:
            (offer,) = claims.offered()
            found.append(offer._progress_time > -math.inf)
            offer.note_progress(idle_seconds=math.inf)
            return call(*args, **named)

        return slow

    monkeypatch.setattr(gdsload.Checkpoint, "open", step(gdsload.Checkpoint.open))
    monkeypatch.setattr(prefetch, "Session", step(Session))
    without_others = step(prefetch.Prefetch._without_others)
    monkeypatch.setattr(prefetch.Prefetch, "_without_others", without_others)
    with gdsload.prefetch(checkpoint, **READ) as ahead:
        ahead.wait()
    assert found == [True, True, True]


def test_load_does_not_wait_again_for_a_prefetch_without_progress(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Known(SafeEvent):
        def wait(self, seconds: float) -> bool:
            raise AssertionError("the load waited")

    waits: list[bool] = []
    wait = claims.Offer.await_filled
    monkeypatch.setattr(
        claims.Offer, "await_filled", lambda *given: (waits.append(wait(*given)), waits[-1])[1]
    )
    offer = claims.Offer(str(checkpoint))  # of a prefetch that hangs while it opens the files
    claims.offer(offer)
    offer.note_progress(idle_seconds=7.0)
    monkeypatch.setattr(offer, "_known", Known())
    try:
        assert len(list(gdsload.stream(checkpoint, window_bytes=50_000, stall_seconds=6.0))) > 1
    finally:
        claims.withdraw(offer)
    assert len(waits) > 1 and not any(waits)


def test_load_does_not_wait_for_a_prefetch_whose_mount_hangs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    asked: list[str] = []
    offer = claims.Offer("/hangs")  # of a prefetch that opens the files
    real = claims.Offer.may_hold

    def may_hold(self: claims.Offer, path: str) -> bool:
        if self is not offer:
            return real(self, path)
        asked.append(path)
        return answers.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(claims.Offer, "may_hold", may_hold)
    monkeypatch.setattr(claims, "_LOOK_SECONDS", 0.5)
    claims.offer(offer)
    try:
        assert len(list(gdsload.stream(checkpoint, window_bytes=50_000))) > 1
        assert len(asked) == 1 and not answers.is_set()
    finally:
        answers.set()
        claims.withdraw(offer)


def test_offer_keeps_no_memory_that_was_claimed(checkpoint: Path) -> None:
    with gdsload.Checkpoint.open(checkpoint) as opened, gdsload.prefetch(checkpoint, **READ) as own:
        assert own.wait(PATIENCE_SECONDS)
        (offer,) = claims.offered()
        ranges = [each for each in byte_ranges_of(opened) if each.nbytes]
        found, _ = claims.claim_ranges(opened, ranges, PATIENCE_SECONDS, LoadReport("m"))
        assert len(found) == len(ranges) and offer.empty
        for shard, each in ((opened.shards[each.shard], each) for each in ranges):
            assert not offer.has(shard.original, each._replace(nbytes=0))
        assert not any(row.view for rows in offer._free.values() for row in rows)


def test_claims_of_all_tensors_leave_nothing(checkpoint: Path) -> None:
    with gdsload.prefetch(checkpoint, keep=True, **READ) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        assert not ahead._offer.empty
        gdsload.load_file(checkpoint)
        assert ahead._offer.empty and claims.offered() == []
        gdsload.load_file(checkpoint)
        assert "prefetched" not in gdsload.last_report().paths


def test_load_that_waits_for_a_prefetch_can_be_cancelled(checkpoint: Path) -> None:
    offer = claims.Offer(str(checkpoint))
    claims.offer(offer)
    token, waits = CancelToken(), threading.Event()
    failures: list[BaseException] = []

    def load() -> None:
        try:
            token.run(gdsload.load_file, checkpoint, on_event=lambda _: waits.set())
        except LoadCancelled as error:
            failures.append(error)

    loader = threading.Thread(target=load)
    loader.start()
    assert waits.wait(PATIENCE_SECONDS)
    token.ask()
    loader.join(PATIENCE_SECONDS)
    claims.withdraw(offer)
    assert len(failures) == 1


@pytest.mark.parametrize(
    ("source", "shard"),
    [
        ("s3://b/m/model.safetensors.index.json", "s3://b/m/model-00001-of-00002.safetensors"),
        ("s3://b/m", "s3://b/m/model-00001-of-00002.safetensors"),
        ("replicas:///a/x.safetensors|/b/x.safetensors", "replicas:///a|/b/x.safetensors"),
    ],
)
def test_load_of_a_url_waits_for_a_prefetch_of_it(source: str, shard: str) -> None:
    offer = claims.Offer(source)
    assert offer.may_hold(shard)
    assert not offer.may_hold(shard.replace("/m/", "/m2/").replace("/a|", "/c|"))


def test_offer_that_a_signal_handler_clears_while_it_is_cleared_ends(checkpoint: Path) -> None:
    offer = claims.Offer(str(checkpoint))
    with offer._lock:  # a handler interrupts its holder
        offer.clear()
    assert offer.await_filled(PATIENCE_SECONDS)


def test_prefetch_that_opens_a_hub_model_holds_only_files_of_this_model(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name/snapshots/abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "link").symlink_to(snapshot)
    offer = claims.Offer("org/name")
    assert offer.may_hold(str(snapshot / "model.safetensors"))
    assert offer.may_hold(str(tmp_path / "link/model.safetensors"))
    assert not offer.may_hold(str(tmp_path / "model.safetensors"))
    assert not offer.may_hold("/cache/models--org--name-2/snapshots/abc/model.safetensors")
    assert claims.Offer("/a/x.safetensors and 2 more").may_hold("/a/y.safetensors")


def test_a_second_load_reads_for_itself_and_shares_nothing(checkpoint: Path) -> None:
    with gdsload.prefetch(checkpoint, **READ):
        first = gdsload.load_file(checkpoint)
        second = gdsload.load_file(checkpoint, **READ)
    assert "prefetched" not in gdsload.last_report().paths
    for name in first:
        first[name].view(torch.uint8).zero_()
    assert_same(second, reference(checkpoint))


@pytest.mark.parametrize("names", [None, []])
def test_prefetch_that_nobody_closes_is_withdrawn_when_all_is_claimed(
    checkpoint: Path, names: list[str] | None
) -> None:
    ahead = gdsload.prefetch(checkpoint, names=names, **READ)
    assert ahead.wait(PATIENCE_SECONDS)
    batches = weakref.WeakSet(each._batch for each in claims.offered() if each._batch is not None)
    tensors = gdsload.load_file(checkpoint)
    gc.collect()
    assert claims.offered() == [] and not batches
    assert_same(tensors, reference(checkpoint))


def test_stream_and_safe_open_claim(checkpoint: Path) -> None:
    wanted = reference(checkpoint)
    with gdsload.prefetch(checkpoint, **READ):
        assert_same(dict(gdsload.stream(checkpoint, window_bytes=100_000)), wanted)
        assert set(gdsload.last_report().paths) == {"prefetched"}
    with gdsload.prefetch(checkpoint, **READ), gdsload.safe_open(checkpoint) as opened:
        assert_same(opened.get_tensors(), wanted)
    assert set(gdsload.last_report().paths) == {"prefetched"}


def test_safe_open_that_nobody_closes_drops_the_rest(checkpoint: Path) -> None:
    with gdsload.prefetch(checkpoint, **READ) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        opened = gdsload.safe_open(checkpoint)
        name = "model.embed_tokens.weight"
        assert torch.equal(opened.get_tensor(name), reference(checkpoint)[name])
        assert [each.empty for each in claims.offered()] == [False]
        del opened
        gc.collect()
        assert claims.offered() == []


def test_rows_are_claimed_one_by_one(checkpoint: Path) -> None:
    name = "model.embed_tokens.weight"
    wanted = reference(checkpoint)[name]
    ahead = gdsload.prefetch(checkpoint, names=[name], **READ)
    with ahead, gdsload.safe_open(checkpoint) as opened:
        rows = opened.get_slice(name)
        assert torch.equal(rows[2:5], wanted[2:5]) and torch.equal(rows[5:7], wanted[5:7])
        assert torch.equal(rows[0:2], wanted[0:2])
        taken = ahead.progress().claimed_bytes
        assert taken == 7 * wanted[0].nbytes
        assert torch.equal(rows[4:6], wanted[4:6])  # they are somebody's: read again
        assert ahead.progress().claimed_bytes == taken


def test_what_the_first_load_leaves_is_let_go_unless_kept(checkpoint: Path) -> None:
    name = "model.norm.weight"
    with gdsload.prefetch(checkpoint, **READ):
        gdsload.load_file(checkpoint, names=[name])
        gdsload.load_file(checkpoint, names=["model.embed_tokens.weight"], **READ)
        assert "prefetched" not in gdsload.last_report().paths
    with gdsload.prefetch(checkpoint, keep=True, **READ):
        gdsload.load_file(checkpoint, names=[name])
        gdsload.load_file(checkpoint, names=["model.embed_tokens.weight"], **READ)
        assert set(gdsload.last_report().paths) == {"prefetched"}


def test_interrupted_load_leaves_no_claim_behind(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stand for a later slice of the same name, whose bytes begin elsewhere."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with (
        gdsload.prefetch(checkpoint, **READ) as ahead,
        Checkpoint.open(checkpoint) as opened,
        Session(opened, LoadReport(""), ReadSettings(page_cache="keep")) as session,
    ):
        ahead.wait()
        ranges = byte_ranges_of(opened)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Session, "_in_page_cache", interrupt)
            session.arrange(ranges)
        assert ahead.progress().claimed_bytes > 0
        _, _, claimed = session.arrange(ranges)
        assert claimed == {}


def test_read_in_an_observer_that_fails_leaves_the_claim_of_the_outer_read(
    checkpoint: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.norm.weight"
    planned: list[events.Event] = []
    failures: list[BaseException] = []

    def refuse(*_: object) -> None:
        raise PlacementError("no room")

    def read_again(event: events.Event) -> None:
        if isinstance(event, events.PhaseEnded) and event.phase == "plan":
            planned.append(event)
            if len(planned) > 1:  # that of the read below
                return
            with monkeypatch.context() as patch, pytest.raises(PlacementError) as caught:
                patch.setattr(session_module, "require_room_to_plan", refuse)
                opened.get_tensor(name)
            failures.append(caught.value)

    with (
        gdsload.prefetch(checkpoint, names=[name], backend="gated", **READ),
        gdsload.safe_open(checkpoint, on_event=read_again, **READ) as opened,
    ):
        gate.request()
        monkeypatch.setattr(
            claims.Claim, "wait_for", lambda *_: gate.open()
        )  # once it is waited for
        got = opened.get_tensor(name)
    assert len(failures) == 1
    assert torch.equal(got, reference(checkpoint)[name])


def test_another_version_of_the_file_is_not_claimed(checkpoint: Path) -> None:
    with gdsload.prefetch(checkpoint, **READ) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        changed = []
        for file in checkpoint.glob("*.safetensors"):
            with open(file, "r+b") as out:
                out.seek(-64, os.SEEK_END)
                out.write(bytes(range(64)))
            changed.append(file)
        assert changed
        got = gdsload.load_file(checkpoint)
        assert "prefetched" not in gdsload.last_report().paths
        assert ahead.progress().claimed_bytes == 0
    assert_same(got, reference(checkpoint))


def test_a_change_under_the_reads_is_noticed(checkpoint: Path, gate: Gate) -> None:
    with gdsload.prefetch(checkpoint, backend="gated", **READ) as ahead:
        gate.request()
        for file in checkpoint.glob("*.safetensors"):
            os.utime(file, ns=(0, 0))
        gate.open()
        with pytest.raises(FileChanged):
            ahead.wait(PATIENCE_SECONDS)
    assert ahead.progress().state == "failed"


def test_a_load_that_claimed_from_a_file_that_changes_gives_nothing(
    checkpoint: Path, gate: Gate, claimed: threading.Event
) -> None:
    errors: list[BaseException] = []

    def load() -> None:
        try:
            gdsload.load_file(checkpoint)
        except BaseException as error:
            errors.append(error)

    with gdsload.prefetch(checkpoint, backend="gated", **READ):
        gate.request()
        loader = threading.Thread(target=load)
        loader.start()
        assert claimed.wait(PATIENCE_SECONDS)
        for file in checkpoint.glob("*.safetensors"):
            os.utime(file, ns=(0, 0))
        gate.open()
        loader.join(PATIENCE_SECONDS)
    (error,) = errors
    assert isinstance(error, FileChanged)


@pytest.mark.parametrize("end", ["cancel", "close", "fail"])
def test_what_a_prefetch_loses_the_load_reads_itself(
    checkpoint: Path, gate: Gate, claimed: threading.Event, end: str
) -> None:
    loaded: list[dict[str, torch.Tensor]] = []
    ahead = gdsload.prefetch(checkpoint, backend="gated", **READ)
    gate.open(count=2)
    loader = threading.Thread(target=lambda: loaded.append(gdsload.load_file(checkpoint, **READ)))
    loader.start()
    assert claimed.wait(PATIENCE_SECONDS)
    lose(ahead, gate, end)
    loader.join(PATIENCE_SECONDS)
    assert_same(loaded[0], reference(checkpoint))
    with pytest.raises(ReadError if end == "fail" else PrefetchCancelled):
        ahead.wait(PATIENCE_SECONDS)
    ahead.close()


def test_reads_into_the_page_cache_have_the_size_that_the_backend_accepts(
    checkpoint: Path, gate: Gate
) -> None:
    for file in checkpoint.glob("*.safetensors"):
        make_cold(file)
    with gdsload.prefetch(checkpoint, tier="pagecache", backend="gated"):
        sizes = [transfer.length for transfer in gate.request().transfers]
        gate.open()
    assert max(sizes) == GatedBackend().limits().max_request


def test_gaps_that_were_read_do_not_count_as_wanted_bytes(tmp_path: Path, gate: Gate) -> None:
    """Every second tensor: half of what is read."""
    path = tmp_path / "model.safetensors"
    whole = {f"t{i:03}": torch.full((32 << 10,), i, dtype=torch.uint8) for i in range(128)}
    save_file(whole, path)
    ahead = gdsload.prefetch(path, backend="gated", names=sorted(whole)[::2], **READ)
    count = len(gate.request().transfers)
    await_reading(ahead)
    gate.open(count=count - 4)
    wait_for(lambda: ahead.progress().landed_bytes > ahead.progress().wanted_bytes // 2)
    progress = ahead.progress()
    assert progress.landed_bytes < progress.wanted_bytes == 64 * (32 << 10)
    ahead.cancel()
    with pytest.raises(PrefetchCancelled):
        ahead.wait(PATIENCE_SECONDS)


def test_cancelling_one_leaves_the_others_alone(checkpoint: Path, gate: Gate) -> None:
    other = shutil.copytree(checkpoint, checkpoint.with_name("other"))
    with gdsload.prefetch(checkpoint, backend="gated", **READ) as first:
        gate.request(0)
        with gdsload.prefetch(other, backend="gated", **READ) as second:
            gate.request(1)
            first.cancel()
            first.cancel()
            assert first.progress().state == "cancelled"
            gate.open(1)
            assert second.wait(PATIENCE_SECONDS) and prefetches() == [second]


def test_prefetch_of_a_stopped_process_does_not_report_a_stall(
    checkpoint: Path, gate: Gate
) -> None:
    gate.stopped = True
    with gdsload.prefetch(checkpoint, backend="gated", **READ) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
    assert not gate.stopped


def test_claim_in_a_stopped_process_does_not_report_a_stall(checkpoint: Path, gate: Gate) -> None:
    with (
        Checkpoint.open(checkpoint) as opened,
        Session(
            opened, LoadReport("ahead"), ReadSettings(backend="gated", **READ), claim=False
        ) as first,
        Session(opened, LoadReport("load"), ReadSettings(**READ)) as second,
    ):
        ranges = byte_ranges_of(opened, None)
        ahead = PrefetchBatch.of(first, ranges)
        offer = claims.Offer("ahead")
        claims.offer(offer)
        offer.fill(ahead, ahead.offered_ranges(ranges))
        batch = Batch(second, *second.arrange(ranges))
        gate.stopped = True
        batch.wait()
        assert not gate.stopped and second.report.paths["prefetched"] > 0
        batch.release()
        ahead.release()


def test_look_that_another_thread_prevents_tells_no_silence(checkpoint: Path, gate: Gate) -> None:
    with (
        Checkpoint.open(checkpoint) as opened,
        Session(
            opened, LoadReport("ahead"), ReadSettings(backend="gated", **READ), claim=False
        ) as session,
    ):
        ahead = PrefetchBatch.of(session, byte_ranges_of(opened, None))
        gate.stopped = True
        assert not ahead.look() and ahead.idle_seconds() > 1e5
        with ahead._lock, ThreadPoolExecutor(1) as pool:
            assert pool.submit(ahead.look).result() is False
        assert ahead.idle_seconds() == 0.0
        ahead.release()


def test_two_prefetches_of_the_same_read_it_once(checkpoint: Path, gate: Gate) -> None:
    with gdsload.prefetch(checkpoint, backend="gated", **READ):
        gate.request(0)
        with gdsload.prefetch(checkpoint, backend="gated", **READ) as again:
            assert again.wait(0.1) is False  # the first one still reads it
            gate.open(0)
            assert again.wait(PATIENCE_SECONDS) and len(gate.requests) == 1
            gdsload.load_file(checkpoint)
            assert set(gdsload.last_report().paths) == {"prefetched"}


@pytest.fixture
def slow_opening(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The first prefetch of a test opens its files only after this event."""
    go, real, calls = threading.Event(), gdsload.Checkpoint.open, iter(range(9))
    begun, prefetch = threading.Event(), gdsload.prefetch

    def slow(source: str, **where: object) -> object:
        if threading.current_thread().name == "gdsload-prefetch" and next(calls) == 0:
            begun.set()
            assert go.wait(PATIENCE_SECONDS)
        return real(source, **where)  # type: ignore[arg-type]

    def in_order(*words: Any, **named: Any) -> gdsload.Prefetch:
        made = prefetch(*words, **named)
        assert begun.wait(PATIENCE_SECONDS)
        return made

    monkeypatch.setattr(gdsload, "prefetch", in_order)
    monkeypatch.setattr(gdsload.Checkpoint, "open", slow)
    yield go
    go.set()


def test_prefetch_waits_for_an_older_one_that_still_opens_the_files(
    checkpoint: Path, gate: Gate, slow_opening: threading.Event
) -> None:
    with (
        gdsload.prefetch(checkpoint, backend="gated", **READ) as first,
        gdsload.prefetch(checkpoint, backend="gated", **READ) as again,
    ):
        assert again.wait(0.1) is False and gate.requests == []
        slow_opening.set()
        gate.open(0)
        assert first.wait(PATIENCE_SECONDS) and again.wait(PATIENCE_SECONDS)
        assert len(gate.requests) == 1


def test_prefetch_that_waits_for_an_older_one_may_be_closed_and_reads_nothing(
    checkpoint: Path, gate: Gate, slow_opening: threading.Event
) -> None:
    with gdsload.prefetch(checkpoint, **READ) as first:
        with gdsload.prefetch(checkpoint, backend="gated", **READ) as again:
            assert again.wait(0.1) is False
        with pytest.raises(PrefetchCancelled):
            again.wait(PATIENCE_SECONDS)
        assert gate.requests == []
        slow_opening.set()
        assert first.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_one_that_relied_on_another_tells_what_became_of_it(
    checkpoint: Path, gate: Gate, end: str
) -> None:
    with gdsload.prefetch(checkpoint, backend="gated", **READ) as first:
        gate.request(0)
        with gdsload.prefetch(checkpoint, backend="gated", **READ) as again:
            await_reading(again)  # before, it may not have seen the first one
            assert again.wait(0.1) is False
            getattr(first, end)()
            with pytest.raises(PrefetchCancelled, match="another"):
                again.wait(PATIENCE_SECONDS)


def test_one_that_is_closed_while_another_reads_for_it_is_not_complete(
    checkpoint: Path, gate: Gate
) -> None:
    with gdsload.prefetch(checkpoint, backend="gated", **READ):
        gate.request(0)
        again = gdsload.prefetch(checkpoint, backend="gated", **READ)
        assert again.wait(0.1) is False
        again.close()
        with pytest.raises(PrefetchCancelled, match="closed"):
            again.wait(PATIENCE_SECONDS)


def test_waiting_ends_when_it_was_told_to(checkpoint: Path, gate: Gate) -> None:
    with gdsload.prefetch(checkpoint, backend="gated", **READ) as ahead:
        gate.request()
        await_reading(ahead)
        assert ahead.wait(0.0) is False
        assert "reading" in repr(ahead)


def test_who_waits_in_the_main_thread_imports_nothing(
    checkpoint: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    monkeypatch.setattr(
        PrefetchBatch, "hurry", lambda self: waits.append(threading.current_thread().name)
    )
    with gdsload.prefetch(checkpoint, backend="gated", **READ) as ahead:
        gate.request()
        await_reading(ahead)
        ahead.wait(0.0)
        thread = threading.Thread(target=ahead.wait, args=(0.01,))
        thread.start()
        thread.join()
        assert waits == []
        # It may take longer than that to get there.
        wait_for(lambda: ahead.wait(0.01) or waits)
        assert set(waits) == {threading.main_thread().name}


def test_errors_come_where_somebody_waits(tmp_path: Path, checkpoint: Path) -> None:
    with gdsload.prefetch(tmp_path / "nowhere") as ahead, pytest.raises(CheckpointError):
        ahead.wait(PATIENCE_SECONDS)
    with (
        gdsload.prefetch(checkpoint, names=["nobody"]) as ahead,
        pytest.raises(CheckpointError, match="nobody"),
    ):
        ahead.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    "arguments",
    [{"tier": "tape"}, {"cache": "x"}, {"limit_bytes": 1}, {"limit_bytes": 0, "tier": "pagecache"}],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        gdsload.prefetch("model", **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cuda0", "cuda:", "cuda:01", "gpu", "cuda:-1", "mps", -1, True])
def test_device_that_no_prefetch_reaches_is_refused_at_once(device: object) -> None:
    with pytest.raises(PlacementError, match="neither cpu nor a GPU"):
        gdsload.prefetch("model", device)  # type: ignore[arg-type]


@pytest.mark.parametrize("cache", ["auto", "direct"])
@pytest.mark.parametrize("btrfs", [False, True])
def test_page_cache_is_filled_and_counted(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, btrfs: bool, cache: str
) -> None:
    """On btrfs, sessions drop what direct reads leave in the page cache."""
    fstype = "btrfs" if btrfs else ""
    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: fstype)
    files = sorted(checkpoint.glob("*.safetensors"))
    make_cold(*files)
    with gdsload.prefetch(checkpoint, tier="pagecache", cache=cache) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        progress = ahead.progress()
        assert progress.resident_bytes == progress.landed_bytes == progress.wanted_bytes > 0
        assert claims.offered() == []
    assert sum(page_cache.resident_bytes(file) for file in files) >= progress.wanted_bytes
    gdsload.load_file(checkpoint)
    assert set(gdsload.last_report().paths) == {"mapped"}


def test_page_cache_is_not_filled_past_the_limit(checkpoint: Path) -> None:
    with gdsload.prefetch(checkpoint, tier="pagecache", limit_bytes=70_000) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
    assert ahead.progress().wanted_bytes == ahead.progress().resident_bytes == 70_000


@pytest.mark.parametrize("available", [0, 70_000])
def test_page_cache_that_memory_is_too_small_for_is_not_complete(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    monkeypatch.setattr(prefetch_batch, "available_bytes", lambda: available)
    with gdsload.prefetch(checkpoint, tier="pagecache") as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
    progress = ahead.progress()
    assert progress.resident_bytes == available
    assert progress.wanted_bytes == sum(each.nbytes for each in reference(checkpoint).values())
    assert run("warmup", checkpoint, "--wait").exit_code == 3


def test_page_cache_is_filled_where_the_kernel_does_not_tell_its_pages(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache.system, "cachestat", refused)
    monkeypatch.setattr(page_cache.system, "mincore_pages", refused)
    with gdsload.prefetch(checkpoint, tier="pagecache") as ahead:
        assert ahead.wait(PATIENCE_SECONDS)


def refused(*_: object) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_what_is_on_its_way_into_the_page_cache_is_mapped_when_it_is_there(
    checkpoint: Path, gate: Gate, claimed: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "wholly_resident", lambda *place: False)
    loaded: list[dict[str, torch.Tensor]] = []
    with gdsload.prefetch(checkpoint, tier="pagecache", backend="gated"):
        gate.open(count=1)
        loader = threading.Thread(target=lambda: loaded.append(gdsload.load_file(checkpoint)))
        loader.start()
        assert claimed.wait(PATIENCE_SECONDS)
        assert loaded == []
        gate.open()
        loader.join(PATIENCE_SECONDS)
    assert len(gate.requests) == 1
    assert_same(loaded[0], reference(checkpoint))


def test_what_has_left_the_page_cache_again_is_not_mapped_from_distant_storage(
    checkpoint: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "nfs4")
    monkeypatch.setattr(page_cache, "wholly_resident", lambda *place: False)
    with (
        gdsload.prefetch(checkpoint, tier="pagecache", backend="gated") as ahead,
        Checkpoint.open(checkpoint) as opened,
        Session(opened, LoadReport(""), ReadSettings()) as session,
    ):
        gate.open(count=4)
        wait_for(lambda: ahead.progress().landed_bytes > 0)
        ranges = byte_ranges_of(opened)
        plan, views, on_their_way = session.arrange(ranges)
        assert views.keys() == on_their_way.keys()
        assert {claim.state() for claim in on_their_way.values()} == {claims.READING}
        assert plan.locations.keys() == {each.name for each in ranges} - views.keys() != set()
        gate.open()


def test_a_child_finds_nothing_of_its_parents(checkpoint: Path) -> None:
    with gdsload.prefetch(checkpoint, **READ) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        child = os.fork()
        if child == 0:
            gone = ahead.progress().state == "cancelled" and not ahead.progress().claimed_bytes
            os._exit(0 if gone and prefetches() == [] == claims.offered() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert prefetches() == [ahead]
        assert ahead.progress().state == "landed"


def test_a_child_is_told_that_the_reads_stayed_in_the_parent(checkpoint: Path, gate: Gate) -> None:
    with gdsload.prefetch(checkpoint, backend="gated", **READ) as ahead:
        gate.request(0)
        await_reading(ahead)
        with ahead._lock, ahead._batch._lock:  # type: ignore[union-attr]
            child = os.fork()
        if child == 0:
            try:
                ahead.wait(PATIENCE_SECONDS)
            except PrefetchCancelled:
                ahead.close()
                os._exit(0 if ahead.progress().state == "cancelled" else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        gate.open(0)
        assert ahead.wait(PATIENCE_SECONDS)


# The signal comes while its own thread is asking, with the locks that this takes.
IN_A_HANDLER = """
import signal, sys, threading, gdsload
from gdsload.readahead.prefetch_batch import PrefetchBatch

gdsload.warmup.limit_bandwidth(1000)
ahead, hurry = gdsload.prefetch(sys.argv[1], cache="buffered"), PrefetchBatch.hurry
raised, seen = [], []

def handler(*_):
    seen.append(ahead.progress().state)
    gdsload.warmup.status(), gdsload.resume()
    ahead.close()
    seen.append(ahead.progress().state)

def hurried(self):
    with self._lock:
        if not raised:
            raised.append(True)
            signal.raise_signal(signal.SIGUSR1)
    return hurry(self)

signal.signal(signal.SIGUSR1, handler)
PrefetchBatch.hurry = hurried
while ahead.progress().state == "opening":
    pass
try:
    ahead.wait()
except gdsload.GdsloadError as error:
    seen.append(str(error).rpartition(" ")[2])
ahead._thread.join(30)
print(seen, ahead._thread.is_alive(), ahead.progress().state)
"""


def test_a_signal_handler_may_close_what_is_being_asked(checkpoint: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IN_A_HANDLER, checkpoint],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (ran.stdout, ran.stderr) == ("['reading', 'closed', 'closed'] False closed\n", "")


def test_ctrl_c_leaves_no_prefetch_that_nobody_has(
    checkpoint: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    # Whatever still refers to the one that was interrupted: it has ended, and is busy no more.
    monkeypatch.setattr(prefetch.Prefetch, "_run", lambda self: self._end("closed"))
    monkeypatch.setattr(prefetch.SafeEvent, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gdsload.prefetch(checkpoint, backend="gated", **READ)
    assert prefetches() == [] and claims.offered() == []


def test_callback_of_a_prefetch_waits_for_another_one_and_not_for_its_own(
    checkpoint: Path,
) -> None:
    said: list[object] = []
    started: list[prefetch.Prefetch] = []
    known = threading.Event()

    def seen(event: object) -> None:
        ended = isinstance(event, events.PhaseEnded) and event.phase
        if ended == "read" and known.wait(60) and not said:
            said.append(None)
            with pytest.raises(GdsloadError, match="a callback of its prefetch cannot wait"):
                started[0].wait()
            with gdsload.prefetch(checkpoint, **READ, on_event=deeper) as other:
                said.append(other.wait(PATIENCE_SECONDS))

    def deeper(event: object) -> None:
        if isinstance(event, events.PhaseEnded) and event.phase == "read":
            with gdsload.prefetch(checkpoint, **READ) as third:
                said.append(third.wait(PATIENCE_SECONDS))

    with gdsload.prefetch(checkpoint, **READ, on_event=seen) as ahead:
        started.append(ahead)
        known.set()
        assert ahead.wait(PATIENCE_SECONDS)
    assert said == [None, True, True]


def test_source_is_that_of_the_directory_of_the_call(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may change it before the thread of the prefetch opens the source."""
    other = tmp_path / "other" / checkpoint.name
    other.mkdir(parents=True)
    monkeypatch.chdir(checkpoint.parent)

    def seen(event: object) -> None:
        if isinstance(event, events.LoadStarted):
            os.chdir(other.parent)

    with gdsload.prefetch(checkpoint.name, **READ, on_event=seen) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        assert Path.cwd() == other.parent
        assert len(gdsload.load_file(checkpoint)) == 47
    assert "prefetched" in gdsload.last_report().paths


def test_callback_of_a_prefetch_cannot_wait_for_one_that_relies_on_it(
    checkpoint: Path, gate: Gate
) -> None:
    relying: list[prefetch.Prefetch] = []
    refused_in: list[str] = []  # the states of those that it cannot wait for

    def seen(event: object) -> None:
        if isinstance(event, events.PhaseEnded) and event.phase == "read":
            for one in relying:
                with pytest.raises(GdsloadError, match="a callback of its prefetch cannot wait"):
                    one.wait(PATIENCE_SECONDS)
                refused_in.append(one.progress().state)

    names = ["model.norm.weight"]
    with (
        gdsload.prefetch(checkpoint, names=names, backend="gated", on_event=seen, **READ) as ahead,
        gdsload.prefetch(checkpoint, backend="gated", **READ) as whole,
    ):
        gate.request(1)  # of the rest
        with gdsload.prefetch(checkpoint, **READ) as again:
            await_reading(again)
            relying += whole, again
            gate.open()
            assert ahead.wait(PATIENCE_SECONDS)
            gate.open(1)
            assert whole.wait(PATIENCE_SECONDS) and again.wait(PATIENCE_SECONDS)
    assert refused_in == ["reading", "reading"]


# Ctrl-C while the first of our native modules is imported, and then once more without it.
INTERRUPTED_IMPORT = """
import sys
sys.modules.pop("inspect", None)

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "inspect":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
try:
    import gdsload._native.memory
except KeyboardInterrupt:
    import gdsload._native.memory
    print("imported")
"""


def test_ctrl_c_may_come_while_it_is_imported() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, timeout=240
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "imported\n", "")


def test_it_needs_no_torch_and_ends_with_its_process(checkpoint: Path) -> None:
    code = (
        "import sys, gdsload; p = gdsload.prefetch(sys.argv[1], cache='buffered');"
        "gdsload.prefetch(sys.argv[1], tier='pagecache'); p.wait(120); print(p.progress().state,"
        " 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, checkpoint], capture_output=True, text=True, timeout=240
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "landed False False\n", "")


@pytest.mark.parametrize(
    ("before", "then", "eased", "after"),
    [
        ("", "gdsload.load_file(source)", True, "as before"),
        ("", "gdsload.load_file(source, cache='mapped')", True, "as before"),
        ("", "ahead.close()", True, "as before"),
        ("", "gc.set_threshold(5, 6, 0); gdsload.load_file(source)", True, (5, 6, 0)),
        ("gc.set_threshold(20_000)", "ahead.close()", False, "as before"),
        ("gc.disable()", "ahead.close()", False, "as before"),
        ("import torch", "ahead.close()", False, "as before"),
    ],
)
def test_the_collector_comes_less_often_until_the_imports_are_done(
    checkpoint: Path, before: str, then: str, eased: bool, after: object
) -> None:
    code = (
        f"import gc, sys\n{before}\nimport gdsload; source = sys.argv[1]\n"
        "thresholds = gc.get_threshold()\n"
        "ahead = gdsload.prefetch(source, cache='buffered'); again = gdsload.prefetch(source)\n"
        "ahead.wait(), again.wait()  # opening a checkpoint eases it, too\n"
        f"eased = gc.get_threshold() == (10_000, *thresholds[1:])\n{then}\n"
        "print([eased, 'as before' if gc.get_threshold() == thresholds else gc.get_threshold()])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, checkpoint], capture_output=True, text=True, timeout=240
    )
    assert (ran.returncode, ran.stdout) == (0, f"{[eased, after]}\n"), ran.stderr


def test_memory_of_a_closed_prefetch_goes_back(checkpoint: Path) -> None:
    ahead = gdsload.prefetch(checkpoint, **READ)
    assert ahead.wait(PATIENCE_SECONDS)
    (landing,) = claims.offered()
    region = next(iter(landing._free.values()))[0].view.region  # type: ignore[union-attr]
    held = sys.getrefcount(region)
    ahead.close()
    alone = object()  # a name, and getrefcount's own argument
    assert held > sys.getrefcount(region) == sys.getrefcount(alone), "somebody keeps the mapping"


def test_failed_prefetch_holds_no_reference_to_frames_that_waited(tmp_path: Path) -> None:
    class Model:
        pass

    ahead = gdsload.prefetch(tmp_path / "missing")

    def wait() -> weakref.ref[Model]:
        model = Model()
        with suppress(CheckpointError):
            ahead.wait(60)
        return weakref.ref(model)

    assert wait()() is None
    with pytest.raises(CheckpointError, match="missing"):
        ahead.wait(60)


EACH = 8 << 20  # bytes of the tensors below


def has_memory(address: int) -> bool:
    """Whether the system has given memory to most of the EACH bytes at this address."""
    pages = EACH // PAGESIZE - 1  # whole ones
    resident = (ctypes.c_ubyte * pages)()
    start = ctypes.c_void_p(-(-address // PAGESIZE) * PAGESIZE)
    if ctypes.CDLL(None).mincore(start, ctypes.c_size_t(pages * PAGESIZE), resident):
        return False  # they are not mapped
    return sum(resident) > pages // 2


@pytest.fixture
def six(tmp_path: Path) -> Path:
    """Six tensors, not in the page cache."""
    tensors = {f"t{n}": torch.full((EACH,), n, dtype=torch.uint8) for n in range(6)}
    save_file(tensors, tmp_path / "model.safetensors")
    page_cache.evict(tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("keep", [False, True])
def test_bytes_that_no_load_takes_are_given_back(keep: bool, six: Path) -> None:
    """Also if a tensor that a load took lies in the same memory."""
    with gdsload.prefetch(six, cache="direct", keep=keep) as ahead:
        ahead.wait()
        tensors = gdsload.load_file(six, names=["t3"])
        taken = tensors["t3"].data_ptr()
        others = [taken + n * EACH for n in (-3, -2, -1, 1, 2)]
        assert [has_memory(address) for address in others] == [keep] * len(others)
    assert not any(has_memory(address) for address in others)
    assert has_memory(taken)
    assert bool((tensors["t3"] == 3).all())


def test_bytes_that_arrive_after_the_load_that_left_them_are_given_back(
    six: Path, gate: Gate
) -> None:
    requests = EACH // GatedBackend().limits().max_request
    with gdsload.prefetch(six, backend="gated", **READ) as ahead:
        gate.open(count=2 * requests)
        tensors = gdsload.load_file(six, names=["t0"])
        taken = tensors["t0"].data_ptr()
        others = [taken + n * EACH for n in (1, 2, 3, 4, 5)]
        gate.open()
        assert ahead.wait(PATIENCE_SECONDS)
        assert [has_memory(address) for address in others] == [False] * len(others)
    assert has_memory(taken)
    assert bool((tensors["t0"] == 0).all())


@pytest.mark.parametrize("end", ["cancel", "close"])
@pytest.mark.parametrize("dropped", [False, True])
def test_bytes_of_a_range_that_was_read_in_part_are_given_back(
    end: str, dropped: bool, six: Path, gate: Gate
) -> None:
    requests = EACH // GatedBackend().limits().max_request
    with gdsload.prefetch(six, backend="gated", keep=not dropped, **READ) as ahead:
        gate.open(count=2 * requests - 8)
        tensors = gdsload.load_file(six, names=["t0"])
        taken = tensors["t0"].data_ptr()
        assert has_memory(taken + EACH)
        getattr(ahead, end)()
        assert not has_memory(taken + EACH)
    assert has_memory(taken)


@pytest.mark.parametrize("end", ["cancel", "close", "fail"])
def test_bytes_that_a_prefetch_has_lost_are_given_back_by_the_load_that_claimed_them(
    end: str, six: Path, gate: Gate, claimed: threading.Event
) -> None:
    requests = EACH // GatedBackend().limits().max_request
    loaded: dict[str, torch.Tensor] = {}
    ahead = gdsload.prefetch(six, backend="gated", **READ)
    gate.open(count=2 * requests - 8)
    loader = threading.Thread(
        target=lambda: loaded.update(gdsload.load_file(six, names=["t0", "t1"], **READ))
    )
    loader.start()
    assert claimed.wait(PATIENCE_SECONDS)
    lose(ahead, gate, end)
    loader.join(PATIENCE_SECONDS)
    ahead.close()
    taken = loaded["t0"].data_ptr()
    assert loaded["t1"].data_ptr() != taken + EACH, "it was read anew"
    assert has_memory(taken) and not has_memory(taken + EACH)
    assert [bool((loaded[f"t{n}"] == n).all()) for n in (0, 1)] == [True, True]


@pytest.mark.parametrize("arrived", [False, True])
def test_bytes_that_a_closed_stream_has_claimed_are_given_back(
    arrived: bool, six: Path, gate: Gate
) -> None:
    requests = EACH // GatedBackend().limits().max_request
    with gdsload.prefetch(six, backend="gated", **READ) as ahead:
        gate.open(count=None if arrived else 2 * requests - 8)
        stream = gdsload.stream(six, window_bytes=EACH)
        _, first = next(stream)
        taken = first.data_ptr()
        assert has_memory(taken + EACH), "the next window"
        stream.close()  # type: ignore[attr-defined]
        if not arrived:
            gate.open()
        assert ahead.wait(PATIENCE_SECONDS)
        assert has_memory(taken) and not has_memory(taken + EACH)
    assert bool((first == 0).all())


@pytest.mark.parametrize("into", [False, True])
def test_bytes_that_a_failed_load_has_claimed_are_given_back(
    into: bool, six: Path, gate: Gate
) -> None:
    names = ["t1", "t2"]
    targets = {name: torch.empty(EACH, dtype=torch.uint8) for name in names}
    load_them = partial(gdsload.load_into, targets) if into else gdsload.load_file
    with gdsload.prefetch(six, names=["t0", "t1"], backend="gated", keep=True, **READ) as ahead:
        gate.open()
        assert ahead.wait(PATIENCE_SECONDS)
        tensors = gdsload.load_file(six, names=["t0"])
        taken = tensors["t0"].data_ptr()
        assert has_memory(taken + EACH)
        errors: list[BaseException] = []

        def load() -> None:
            try:
                load_them(six, names=names, backend="gated", **READ)
            except ReadError as error:
                errors.append(error)

        loader = threading.Thread(target=load)
        loader.start()
        gate.request(1)
        gate.open(1, error=errno.EIO)
        loader.join(PATIENCE_SECONDS)
        assert len(errors) == 1
        assert has_memory(taken) and not has_memory(taken + EACH)


def test_bytes_that_were_cast_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Window by window: otherwise the whole checkpoint would stay beside its copy."""
    count = EACH // 2
    tensors = {f"t{n}": torch.full((count,), n, dtype=torch.bfloat16) for n in range(6)}
    save_file(tensors, tmp_path / "model.safetensors")
    page_cache.evict(tmp_path / "model.safetensors")
    left: list[bool] = []
    write = WindowWriter._write

    def noted(writer: WindowWriter, window: Any, batch: Batch) -> None:
        views = dict(batch.views)
        write(writer, window, batch)
        left.extend(has_memory(view.region.address + view.offset) for view in views.values())

    monkeypatch.setattr(WindowWriter, "_write", noted)
    targets = {name: torch.full((count,), -1.0) for name in tensors}
    with gdsload.prefetch(tmp_path, cache="direct") as ahead:
        ahead.wait()
        gdsload.load_into(targets, tmp_path)
    assert left == [False] * 6
    for n in range(6):
        assert bool((targets[f"t{n}"] == n).all())


def test_buffered_load_maps_nothing_that_was_prefetched(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, source)
    for file in source.glob("*.safetensors"):
        page_cache.evict(file)
    with gdsload.prefetch(source, page_cache="fill") as ahead:
        ahead.wait(PATIENCE_SECONDS)
        tensors = gdsload.load_file(source, cache="buffered")
    maps = Path("/proc/self/maps").read_text()
    assert tensors and str(source) not in maps


def test_wrong_option_of_the_backend_is_an_error_of_the_prefetch_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    ahead = gdsload.prefetch(checkpoint, page_cache="keep", options={"depth": 0})
    with ahead, pytest.raises(gdsload.GdsloadError, match="depth=0"):
        ahead.wait()
    assert not shown


def test_load_in_a_callback_of_a_prefetch_does_not_wait_for_it(checkpoint: Path) -> None:
    loaded: list[dict[str, torch.Tensor]] = []

    def load(event: object) -> None:
        if not loaded:
            loaded.append({})
            loaded.append(gdsload.load_file(checkpoint, stall_seconds=10 * PATIENCE_SECONDS))

    with gdsload.prefetch(checkpoint, on_event=load, **READ) as ahead:
        assert ahead.wait(PATIENCE_SECONDS), "the load waits"
    assert_same(loaded[1], reference(checkpoint))
