"""A model of transformers takes over what was read ahead of it."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import gdsload
from gated import gated
from gdsload.checkpoint import Checkpoint
from gdsload.integrations.transformers.readahead_queue import ReadaheadQueue
from gdsload.loading.session import Session
from gdsload.planning.tensor_slices import whole
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


@pytest.mark.parametrize("window_bytes", [0, 1 << 30])
def test_model_waits_for_a_prefetch_in_progress(
    window_bytes: int, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Also when all that the load itself has read is there."""
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    expected = gdsload.load_file(source)
    names = list(expected)[::2]
    with (
        gated() as gate,
        gdsload.prefetch(source, names=names, backend="gated", cache="direct"),
        Checkpoint.open(source) as checkpoint,
        Session(checkpoint, LoadReport("model"), backend="posix", cache="buffered") as session,
    ):
        gate.request()
        slices = {name: whole(info) for name, info in checkpoint.tensors.items()}
        with ReadaheadQueue(session, list(slices.values()), window_bytes=window_bytes) as feed:
            feed.start()
            for name in expected.keys() - set(names):
                assert torch.equal(feed.take(slices[name]), expected[name])
            with ThreadPoolExecutor() as pool:
                taking = pool.map(feed.take, (slices[name] for name in names))
                gate.open()
                for name, tensor in zip(names, taking, strict=True):
                    assert torch.equal(tensor, expected[name])
