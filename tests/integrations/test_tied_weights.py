"""Tied parameters that a checkpoint holds twice: compared quickly, and as transformers would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from transformers import modeling_utils

import gdsload
import tinymodels
from gdsload.integrations.transformers.patches import surely_equal

KNOWN = hasattr(modeling_utils, "_tied_params_are_equal")
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_equal_bytes_are_surely_equal(dtype: torch.dtype) -> None:
    one = torch.randn(33, 8).to(dtype)
    assert surely_equal(one, one.clone())
    assert surely_equal(torch.nn.Parameter(one), one)
    other = one.clone()
    other[32, 7] += 1
    assert not surely_equal(one, other)


@pytest.mark.parametrize(
    "one",
    [
        torch.tensor([1.0, float("nan")]),  # equal to nothing
        torch.ones(3),
        torch.ones(3)[1:],
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(4, 3).T,
        torch.ones(3, device="meta"),
    ],
    ids=["nan", "12 bytes", "at byte 4", "integers", "complex", "float8", "strided", "meta"],
)
def test_unusual_tensors_are_left_to_torch(one: torch.Tensor) -> None:
    assert not surely_equal(one, one)


def test_different_bytes_are_not_surely_equal() -> None:
    zeros = torch.zeros(4)
    assert not surely_equal(zeros, -zeros)  # equal, but not by their bytes
    assert not surely_equal(zeros, zeros.view(2, 2))
    assert not surely_equal(zeros, torch.zeros(4, dtype=torch.float64))


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    """A checkpoint with the embeddings, and a head that is the same."""
    tinymodels.build("llama_tied").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors[HEAD] = tensors[EMBEDDINGS].clone()
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return tmp_path


def tied(model: Any) -> bool:
    return bool(model.lm_head.weight is model.model.embed_tokens.weight)


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_tied_weights_are_compared_as_integers(
    twice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.dtype] = []

    def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        asked.append(one.dtype)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(torch, "equal", equal)
        model = gdsload.from_pretrained(twice)
    assert tied(model)
    assert asked == [torch.int64]
    asked.clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "equal", equal)
        transformers.AutoModelForCausalLM.from_pretrained(twice)
    assert asked == [model.lm_head.weight.dtype]


@pytest.mark.parametrize("change", [1.0, float("nan")])
def test_different_head_is_loaded_as_by_transformers(twice: Path, change: float) -> None:
    file = twice / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors[HEAD][1, 1] += change
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    stock = transformers.AutoModelForCausalLM.from_pretrained(twice)
    model = gdsload.from_pretrained(twice)
    assert tied(model) == tied(stock)
    found, wanted = model.state_dict(), stock.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
