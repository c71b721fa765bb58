"""Every architecture, loaded by transformers alone and through gdsload, is the same to the bit.

Reads are direct and in windows of a few kilobytes, so that each model takes many of them, some
asked for before they were posted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import equal
import gdsload
import tinymodels
from windows import small_windows

NAMES = [
    name
    for name, (class_name, _) in tinymodels.ARCHITECTURES.items()
    if hasattr(transformers, class_name)
]


@contextmanager
def accelerated(path: Path) -> Iterator[None]:
    """In small windows, read directly where this filesystem can."""
    probe = path / "probe"
    probe.touch()
    cache = "direct"
    try:
        os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        cache = "buffered"
    with small_windows(1 << 14, 1 << 15), gdsload.accelerated(cache=cache):
        yield


def test_matrix_has_enough_architectures() -> None:
    assert len(NAMES) >= 60


@pytest.mark.parametrize("name", NAMES)
def test_architecture_equals_transformers(name: str, tmp_path: Path) -> None:
    with equal.nothing_uninitialised():
        with equal.by_transformers_alone():
            model = tinymodels.build(name)
            model.save_pretrained(tmp_path / "a", max_shard_size="60KB")
            stock, stock_info = type(model).from_pretrained(
                tmp_path / "a", output_loading_info=True
            )
        with accelerated(tmp_path):
            ours, our_info = gdsload.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert gdsload.last_report().paths.get("mapped", 0) == 0
    equal.require_same(stock, ours)
    assert stock_info == our_info
    stock.save_pretrained(tmp_path / "b", max_shard_size="60KB")
    ours.save_pretrained(tmp_path / "c", max_shard_size="60KB")
    assert tinymodels.files_of(tmp_path / "b") == tinymodels.files_of(tmp_path / "c")


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "t5", "mamba2", "wav2vec2"])
@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_cast_architecture_equals_transformers(name: str, dtype: Any, tmp_path: Path) -> None:
    """T5 keeps some modules in float32."""
    model = tinymodels.build(name)
    model.save_pretrained(tmp_path)
    stock = type(model).from_pretrained(tmp_path, dtype=dtype)
    with accelerated(tmp_path):
        ours = gdsload.from_pretrained(tmp_path, dtype=dtype)
    assert tinymodels.differences(stock, ours) == []
    labels = gdsload.last_report().fates
    assert labels.get("convert", labels.get("materialised")) > 0


def test_comparison_finds_a_difference(tmp_path: Path) -> None:
    tinymodels.build("llama").save_pretrained(tmp_path)
    one, other = (gdsload.from_pretrained(tmp_path) for _ in range(2))
    assert tinymodels.differences(one, other) == []
    with torch.no_grad():
        other.model.norm.weight[0] += 1e-3
    other.model.rotary_emb.inv_freq[0] = 2.0
    other.train()
    found = " ".join(tinymodels.differences(one, other))
    assert "tensor model.norm.weight" in found
    assert "buffer model.rotary_emb.inv_freq" in found
    assert "training" in found
