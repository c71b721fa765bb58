"""Tied parameters that a checkpoint holds twice: compared quickly, and as transformers would."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from transformers import modeling_utils

import gdsload
import tinymodels
from gdsload.integrations.transformers import tied_weights
from gdsload.integrations.transformers.tied_weights import (
    ASKED,
    TiedWeights,
    surely_equal,
    tied_equal,
)

KNOWN = hasattr(modeling_utils, ASKED)
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_equal_bytes_are_surely_equal(dtype: torch.dtype) -> None:
    one = torch.randn(33, 8).to(dtype)
    assert surely_equal(one, one.clone())
    assert surely_equal(torch.nn.Parameter(one), one)
    assert surely_equal(one.flatten()[1:4], one.flatten()[1:4].clone())
    for place in ((0, 0), (32, 7)):
        other = one.clone()
        other[place] += 1
        assert not surely_equal(one, other)


@pytest.mark.parametrize(
    "one",
    [
        torch.tensor([1.0, float("nan")]),  # equal to nothing
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(4, 3).T,
        torch.ones(3, device="meta"),
    ],
    ids=["nan", "integers", "complex", "float8", "strided", "meta"],
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
def test_tied_weights_are_compared_as_bytes(twice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(name: str) -> Any:
        return lambda one, other: asked.append(name) or True

    monkeypatch.setattr(torch, "equal", noted("torch"))
    monkeypatch.setattr(tied_weights, "equal_bytes", noted("bytes"))
    assert tied(gdsload.from_pretrained(twice))
    assert asked == ["bytes"]
    transformers.AutoModelForCausalLM.from_pretrained(twice)
    assert asked == ["bytes", "torch"]


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


@pytest.fixture
def comparing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for each comparison, and one for each parameter that transformers sets."""
    from transformers import core_model_loading  # not in 4.57

    events: list[str] = []
    equal, set_parameter = tied_weights.equal_bytes, core_model_loading.set_param_for_module

    def noted_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        events.append("compared")
        return equal(one, other)

    def noted_set(model: Any, target_name: str, *rest: Any, **named: Any) -> Any:
        events.append("set")
        return set_parameter(model, target_name, *rest, **named)

    monkeypatch.setattr(tied_weights, "equal_bytes", noted_equal)
    monkeypatch.setattr(core_model_loading, "set_param_for_module", noted_set)
    return events


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_tied_weights_are_compared_once_while_the_rest_is_loaded(
    twice: Path, comparing: list[str]
) -> None:
    assert tied(gdsload.from_pretrained(twice))
    assert comparing.count("compared") == 1
    assert comparing[-1] == "set"


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_weights_that_callbacks_wrote_to_are_not_tied(twice: Path, comparing: list[str]) -> None:
    def write(name: str, module: torch.nn.Module) -> None:
        if name == "model.embed_tokens":
            module.weight.data[0, 0] += 1

    assert not tied(gdsload.from_pretrained(twice, on_module_ready=write))
    assert "compared" in comparing[comparing.index("set") :]


class Tied(torch.nn.Module):
    """Two equal parameters, which are to be tied."""

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.nn.Parameter(torch.ones(64))
        self.target = torch.nn.Parameter(torch.ones(64))
        self.all_tied_weights_keys = {"target": "source"}


def loaded(model: Tied) -> Tied:
    ties = TiedWeights(model)
    for name in ("other", "target", "source", "source"):
        ties.parameter_set(name)
    return model


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_loaded_parameters_are_compared_once(comparing: list[str]) -> None:
    model = loaded(Tied())
    assert comparing == ["compared"]
    assert tied_equal(model.source, model.target)
    assert comparing == ["compared"]
    assert tied_equal(model.source, model.target)
    assert comparing == ["compared"] * 2  # the answer is for one load


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_written_parameters_are_compared_again(comparing: list[str]) -> None:
    model = loaded(Tied())
    with torch.no_grad():
        model.target[0] = 2
    assert not tied_equal(model.source, model.target)
    assert comparing == ["compared"] * 2


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_replaced_parameters_are_compared_again(comparing: list[str]) -> None:
    model = loaded(Tied())
    model.source = torch.nn.Parameter(torch.zeros(64))
    assert not tied_equal(model.source, model.target)
    assert comparing == ["compared"] * 2


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_unequal_parameters_are_left_to_transformers(comparing: list[str]) -> None:
    model = Tied()
    model.target.data[0] = 2
    loaded(model)
    assert not tied_equal(model.source, model.target)


def test_parameters_that_nobody_asks_for_are_released() -> None:
    model = loaded(Tied())
    dead = [weakref.ref(model.source), weakref.ref(model.target)]
    del model
    gc.collect()
    assert [each() for each in dead] == [None, None]
