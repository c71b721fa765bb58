"""A model of transformers takes over what was read ahead of it."""

from __future__ import annotations

import errno
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import gdsload
from gated import gated
from gdsload.checkpoint import Checkpoint
from gdsload.integrations.transformers.readahead_queue import QueueClosed, ReadaheadQueue
from gdsload.loading.session import Session
from gdsload.loading.settings import ReadSettings
from gdsload.planning.tensor_slices import TensorSlice, whole
from gdsload.readahead.prefetch import prefetches
from gdsload.report import LoadReport

pytest.importorskip("gdsload.integrations.transformers.model")
PATIENCE_SECONDS = 240


def test_model_claims_a_prefetch(tiny_checkpoint: Path, tmp_path: Path) -> None:
    import transformers

    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    with gdsload.prefetch(checkpoint, cache="buffered") as ahead:
        model = gdsload.from_pretrained(checkpoint, dtype="auto")
        report = gdsload.last_report()
        assert report.paths == {"prefetched": ahead.progress().wanted_bytes}
        assert ahead.wait(PATIENCE_SECONDS)  # its thread ends after its last byte was read
        assert prefetches() == []
    stock = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    got, wanted = model.state_dict(), stock.state_dict()
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


def test_model_reads_what_a_prefetch_lost(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    with gdsload.prefetch(checkpoint, cache="buffered") as ahead:
        ahead.cancel()
        model = gdsload.from_pretrained(checkpoint, dtype="auto")
    expected = gdsload.load_file(checkpoint)
    for name, tensor in model.state_dict().items():
        if name in expected:
            assert torch.equal(tensor, expected[name]), name


def test_queue_goes_on_while_bytes_that_a_prefetch_lost_are_read_anew(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Other tensors are handed out, and closing it does not wait."""
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    expected = gdsload.load_file(source)
    lost, *others = expected
    with (
        gated() as gate,
        gdsload.prefetch(source, names=[lost], backend="gated", cache="buffered") as ahead,
        Checkpoint.open(source) as checkpoint,
        Session(
            checkpoint, LoadReport("model"), ReadSettings(backend="gated", cache="buffered")
        ) as session,
        ThreadPoolExecutor() as pool,
    ):
        slices = {name: whole(info) for name, info in checkpoint.tensors.items()}
        gate.request(0)
        feed = ReadaheadQueue(session, [*slices.values()], kept=slices)
        try:
            feed.start()
            ahead.cancel()
            waiting = pool.submit(feed.take, slices[lost])
            anew = gate.request(2)
            gate.open(1)
            for name in others:
                taken = pool.submit(feed.take, slices[name]).result(PATIENCE_SECONDS)
                assert torch.equal(taken, expected[name])
            pool.submit(feed.close).result(PATIENCE_SECONDS)
            assert anew.settled == 0
            with pytest.raises(QueueClosed):
                waiting.result(PATIENCE_SECONDS)
        finally:
            gate.open(2)
            feed.close()


@pytest.mark.parametrize("ends", ["well", "failed"])
def test_queue_hands_out_what_a_prefetch_lost(
    ends: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """A range that cannot be read fails again and again, and only that range."""
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    expected = gdsload.load_file(source)
    with (
        gated() as gate,
        gdsload.prefetch(source, backend="gated", cache="buffered") as ahead,
        Checkpoint.open(source) as checkpoint,
        Session(
            checkpoint, LoadReport("model"), ReadSettings(backend="gated", cache="buffered")
        ) as session,
        ThreadPoolExecutor() as pool,
    ):
        slices = {name: whole(info) for name, info in checkpoint.tensors.items()}
        gate.request(0)
        with ReadaheadQueue(session, [*slices.values()], kept=slices) as feed:
            feed.start()
            ahead.cancel()
            names = list(expected)
            waiting = pool.submit(feed.take, slices[names[0]])
            gate.request(1)
            gate.open(1, count=1, error=errno.EIO if ends == "failed" else 0)
            gate.open(1)
            if ends == "failed":
                error = waiting.exception(PATIENCE_SECONDS)
                failed = [] if error is None else [names[0]]
                failed += [name for name in names[1:] if fails(feed, slices[name])]
                assert len(failed) == 1 and fails(feed, slices[failed[0]])
            else:
                assert torch.equal(waiting.result(PATIENCE_SECONDS), expected[names[0]])
                for name in names[1:]:
                    assert torch.equal(feed.take(slices[name]), expected[name])
                assert not session.posted, "the reads were not released"


def fails(feed: ReadaheadQueue, wanted: TensorSlice) -> bool:
    try:
        feed.take(wanted)
    except gdsload.ReadError as error:
        assert error.errno == errno.EIO
        return True
    return False


@pytest.mark.parametrize("kept", [True, False])
def test_model_waits_for_a_prefetch_in_progress(
    kept: bool, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Also when all that the load itself has read is there."""
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    expected = gdsload.load_file(source)
    names = list(expected)[::2]
    with (
        gated() as gate,
        gdsload.prefetch(source, names=names, backend="gated", cache="direct"),
        Checkpoint.open(source) as checkpoint,
        Session(
            checkpoint, LoadReport("model"), ReadSettings(backend="posix", cache="buffered")
        ) as session,
    ):
        gate.request()
        slices = {name: whole(info) for name, info in checkpoint.tensors.items()}
        keys = slices if kept else ()
        with ReadaheadQueue(session, [*slices.values()], kept=keys) as feed:
            feed.start()
            for name in expected.keys() - set(names):
                assert torch.equal(feed.take(slices[name]), expected[name])
            with ThreadPoolExecutor() as pool:
                taking = pool.map(feed.take, (slices[name] for name in names))
                gate.open()
                for name, tensor in zip(names, taking, strict=True):
                    assert torch.equal(tensor, expected[name])
