"""A model of transformers takes over what was read ahead of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import gdsload
from gdsload.early import prefetches

pytest.importorskip("gdsload.model")
PATIENCE_SECONDS = 60


def test_a_model_adopts_what_was_read_ahead(tiny_checkpoint: Path, tmp_path: Path) -> None:
    import transformers

    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    with gdsload.prefetch(checkpoint, cache="buffered") as ahead:
        model = gdsload.from_pretrained(checkpoint, dtype="auto")
        report = gdsload.last_report()
        assert report.roads == {"prefetched": ahead.progress().wanted_bytes}
        assert prefetches() == []
    stock = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    got, wanted = model.state_dict(), stock.state_dict()
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


def test_a_model_reads_itself_what_a_prefetch_lost(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    with gdsload.prefetch(checkpoint, cache="buffered") as ahead:
        ahead.cancel()
        model = gdsload.from_pretrained(checkpoint, dtype="auto")
    expected = gdsload.load_file(checkpoint)
    for name, tensor in model.state_dict().items():
        if name in expected:
            assert torch.equal(tensor, expected[name]), name
