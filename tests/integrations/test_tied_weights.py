"""Tied parameters that a checkpoint holds twice: compared quickly, and as transformers would."""

from __future__ import annotations

import gc
import threading
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
from gdsload._native.compare import Comparison
from gdsload.integrations.transformers import tied_weights
from gdsload.integrations.transformers.parameter_buffers import (
    CAST,
    Kind,
    ParameterBuffers,
    buffer_of,
)
from gdsload.integrations.transformers.tied_weights import (
    TIED_EQUAL,
    TiedWeights,
    tied_equal,
    twin_pairs,
)
from windows import small_windows

KNOWN = hasattr(modeling_utils, TIED_EQUAL)
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_equal_bytes_are_equal(dtype: torch.dtype) -> None:
    one = torch.randn(33, 8).to(dtype)
    assert tied_equal(one, one.clone())
    assert tied_equal(torch.nn.Parameter(one), one)
    assert tied_equal(one.flatten()[1:4], one.flatten()[1:4].clone())
    for place in ((0, 0), (32, 7)):
        other = one.clone()
        other[place] += 1
        assert not tied_equal(one, other)


@pytest.mark.parametrize(
    "one",
    [
        torch.tensor([1.0, float("nan")]),  # equal to nothing
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(4, 3).T,
        torch.ones(3, device="meta"),
        torch.frombuffer(bytearray(9), dtype=torch.float32, offset=1),
    ],
    ids=["nan", "integers", "complex", "float8", "strided", "meta", "unaligned"],
)
def test_unusual_tensors_are_left_to_torch(one: torch.Tensor) -> None:
    assert not tied_equal(one, one)


def test_different_bytes_are_not_equal() -> None:
    zeros = torch.zeros(4)
    assert not tied_equal(zeros, -zeros)  # equal, but not by their bytes
    assert not tied_equal(zeros, zeros.view(2, 2))
    assert not tied_equal(zeros, torch.zeros(4, dtype=torch.float64))


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
def test_tied_weights_are_compared_as_bytes(
    twice: Path, comparing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: comparing.append("torch") or True)
    assert tied(gdsload.from_pretrained(twice))
    assert [event for event in comparing if event != "set"] == ["compared"]
    transformers.AutoModelForCausalLM.from_pretrained(twice)
    assert comparing[-1] == "torch"


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
    set_parameter = core_model_loading.set_param_for_module

    def noted(*words: Any) -> Comparison:
        events.append("compared")
        return Comparison(*words)

    def noted_set(model: Any, target_name: str, *rest: Any, **named: Any) -> Any:
        events.append("set")
        return set_parameter(model, target_name, *rest, **named)

    monkeypatch.setattr(tied_weights, "Comparison", noted)
    monkeypatch.setattr(core_model_loading, "set_param_for_module", noted_set)
    return events


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_tied_weights_are_compared_once_while_the_rest_is_loaded(
    twice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import core_model_loading

    set_parameter = core_model_loading.set_param_for_module
    last_set = threading.Event()
    waited: list[tuple[str, bool]] = []

    class AfterAll:
        """Compares when all parameters are set."""

        def __init__(self, *words: Any) -> None:
            self._comparison = Comparison(*words)

        def work(self) -> None:
            waited.append((threading.current_thread().name, last_set.wait(10)))
            self._comparison.work()

        @property
        def equal(self) -> bool:
            return self._comparison.equal

    def noted_set(model: Any, target_name: str, *rest: Any, **named: Any) -> Any:
        result = set_parameter(model, target_name, *rest, **named)
        if target_name == "model.norm.weight":
            last_set.set()
        return result

    monkeypatch.setattr(tied_weights, "Comparison", AfterAll)
    monkeypatch.setattr(core_model_loading, "set_param_for_module", noted_set)
    assert tied(gdsload.from_pretrained(twice))
    names = {name for name, all_were_set in waited if all_were_set}
    assert names == {"gdsload-compare", threading.current_thread().name}
    assert len(waited) == 2


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_weights_that_callbacks_wrote_to_are_not_tied(twice: Path, comparing: list[str]) -> None:
    def write(name: str, module: torch.nn.Module) -> None:
        if name == "model.embed_tokens":
            module.weight.data[0, 0] += 1

    assert not tied(gdsload.from_pretrained(twice, on_module_ready=write))
    assert "compared" in comparing[comparing.index("set") :]


class Tied(torch.nn.Module):
    """Two equal parameters, which are to be tied, in a class of transformers."""

    __module__ = "transformers.models.tied"

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.nn.Parameter(torch.ones(64))
        self.target = torch.nn.Parameter(torch.ones(64))
        self.all_tied_weights_keys = {"target": "source"}


def loaded(model: Tied) -> Tied:
    ready = dict(model.named_parameters())
    model.source, model.target = (torch.nn.Parameter(torch.empty(64, device="meta")) for _ in ready)
    ties = TiedWeights(model)
    model.source, model.target = ready.values()  # as transformers sets them
    for name in ("other", "target", "source", "source"):
        ties.parameter_set(name)
    for thread in threading.enumerate():
        if thread.name == "gdsload-compare":
            thread.join()
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
def test_weights_of_a_class_with_code_of_its_own_are_compared_at_the_end(
    comparing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write to one of them before that."""
    monkeypatch.setattr(Tied, "__module__", "remote_code")
    model = loaded(Tied())
    assert comparing == []
    assert tied_equal(model.source, model.target)


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
@pytest.mark.parametrize("name", ["source", "target"])
def test_parameters_that_got_other_memory_are_compared_again(
    comparing: list[str], name: str
) -> None:
    model = loaded(Tied())
    getattr(model, name).data = torch.zeros(64)  # as by `to`: it counts as no write
    assert not tied_equal(model.source, model.target)
    assert comparing == ["compared"] * 2


def test_tensors_of_inference_are_compared() -> None:
    with torch.inference_mode():
        one, other = torch.ones(3), torch.ones(3)
    assert tied_equal(one, other)


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_unequal_parameters_are_left_to_transformers(comparing: list[str]) -> None:
    model = Tied()
    model.target.data[0] = 2
    loaded(model)
    assert not tied_equal(model.source, model.target)


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_whoever_asks_compares_parameters_if_no_thread_starts(
    comparing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tied_weights, "start_thread", lambda run, name: None)
    model = loaded(Tied())
    assert tied_equal(model.source, model.target)
    assert comparing == ["compared"]
    model = loaded(Tied())
    model.target.data[0] = 2  # `data` counts no writes
    assert not tied_equal(model.source, model.target)


def test_parameters_that_nobody_asks_for_are_released() -> None:
    model = loaded(Tied())
    dead = [weakref.ref(model.source), weakref.ref(model.target)]
    del model
    gc.collect()
    assert [each() for each in dead] == [None, None]


class Twins:
    """A checkpoint in bfloat16 with a head of many windows, loaded as float32."""

    def __init__(self, path: Path, words: int = 96) -> None:
        sizes = {**tinymodels.TEXT, "vocab_size": words}
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.to(torch.bfloat16).save_pretrained(path)
        self.path, self.file = path, path / "model.safetensors"
        self.tensors = safetensors.torch.load_file(self.file)
        self.tensors[HEAD] = self.tensors[EMBEDDINGS].clone()

    def load(self, window_bytes: int = 2048) -> Any:
        """Loads what `tensors` are now, and compares it with the model of transformers."""
        safetensors.torch.save_file(self.tensors, self.file, metadata={"format": "pt"})
        stock = transformers.AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        with small_windows(window_bytes, 4096), gdsload.accelerated():
            model = gdsload.from_pretrained(self.path, dtype=torch.float32)
        assert tied(model) == tied(stock)
        found, wanted = model.state_dict(), stock.state_dict()
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
        return model


@pytest.fixture
def twins(tmp_path: Path) -> Twins:
    return Twins(tmp_path)


@pytest.fixture
def separated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each twin that got memory of its own, how many rows were equal until then."""
    rows: list[int] = []
    separate = ParameterBuffers.separate

    def noted(places: ParameterBuffers, key: str, equal: int) -> None:
        rows.append(equal)
        separate(places, key, equal)

    monkeypatch.setattr(ParameterBuffers, "separate", noted)
    return rows


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_equal_twin_takes_no_memory_and_is_not_compared_again(
    twins: Twins, separated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tied_weights, "Comparison", lambda *_: pytest.fail("compared again"))
    assert tied(twins.load())
    assert separated == []


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
@pytest.mark.parametrize("row", [0, 50, -1])
@pytest.mark.parametrize("value", [7.0, float("nan")])
@pytest.mark.parametrize("name", [EMBEDDINGS, HEAD])
def test_twin_that_differs_has_memory_of_its_own(
    twins: Twins, separated: list[int], row: int, value: float, name: str
) -> None:
    twins.tensors[name][row, -1] = value
    model = twins.load()
    assert not tied(model)
    [rows] = separated
    assert 0 <= rows <= row % len(twins.tensors[name])
    assert rows > 0 or row == 0
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 9
    assert model.model.embed_tokens.weight[0, 0] != 9


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
@pytest.mark.parametrize("row", [20_000, 40_000])
def test_twin_of_many_units_differs_in_the_middle_of_one(
    tmp_path: Path, separated: list[int], row: int
) -> None:
    """Units of 2 MiB have 16,384 rows."""
    twins = Twins(tmp_path, words=50_000)
    twins.tensors[EMBEDDINGS][row, 0] = 7.0
    assert not tied(twins.load(window_bytes=200_000))
    assert len(separated) == 1


@pytest.mark.parametrize("equal", [True, False])
def test_twins_without_dimensions(equal: bool) -> None:
    buffers = [buffer_of([Kind((name,), ())], torch.float32, CAST) for name in ("one", "other")]
    with ParameterBuffers([each for each in buffers if each], {"other": "one"}) as places:
        places.part_of("one").fill_(5)
        if not equal:
            places.separate("other", 0)
            places.part_of("other").fill_(7)
        assert places.give("one") == 5
        assert places.give("other") == (5 if equal else 7)


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_casts_have_no_twins(twins: Twins, separated: list[int], dtype: torch.dtype) -> None:
    twins.tensors = {name: each.to(torch.float32) for name, each in twins.tensors.items()}
    safetensors.torch.save_file(twins.tensors, twins.file, metadata={"format": "pt"})
    assert tied(gdsload.from_pretrained(twins.path, dtype=dtype))
    assert separated == []


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_twins_with_nan_are_not_tied(twins: Twins, separated: list[int]) -> None:
    for name in (EMBEDDINGS, HEAD):
        twins.tensors[name][9, 9] = float("nan")
    assert not tied(twins.load())
    assert len(separated) == 1


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_zeros_of_other_signs_are_tied_as_by_transformers(
    twins: Twins, separated: list[int]
) -> None:
    twins.tensors[EMBEDDINGS][9, 9] = -0.0
    twins.tensors[HEAD][9, 9] = 0.0
    assert tied(twins.load())
    assert len(separated) == 1


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
@pytest.mark.parametrize("name", [EMBEDDINGS, HEAD])
def test_zeros_are_not_compared_with_memory_that_is_not_written_yet(
    twins: Twins, name: str
) -> None:
    twins.tensors[name].zero_()
    assert not tied(twins.load(window_bytes=1 << 20))  # both in one window


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_twins_that_are_not_surely_tied_are_two(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_tying(model: Any, **words: Any) -> None:
        """As in a class whose author knows better."""

    monkeypatch.setattr(transformers.LlamaForCausalLM, "tie_weights", no_tying)
    model = twins.load()
    assert not tied(model)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_twins_of_an_adapter_are_two(twins: Twins, tmp_path: Path) -> None:
    """transformers ties the weights of a model, and not again those that an adapter brings."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    del twins.tensors[HEAD]
    base = twins.load()
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    folder = tmp_path / "adapter"
    adapted.save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    prefix, embeddings = "base_model.model.", twins.tensors[EMBEDDINGS]
    tensors |= {prefix + name: embeddings.clone() for name in (EMBEDDINGS, HEAD)}
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    words: Any = {"dtype": torch.float32}
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, **words)
    model = gdsload.from_pretrained(folder, **words)
    assert tinymodels.differences(stock, model) == []
    pointers = [
        {each.get_input_embeddings().weight.data_ptr(), each.lm_head.weight.data_ptr()}
        for each in (stock, model)
    ]
    assert len(pointers[0]) == len(pointers[1])


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_adapter_with_both_embeddings_leaves_no_comparison(twins: Twins, tmp_path: Path) -> None:
    """transformers does not ask, and a comparison would hold the memory that the model had."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = twins.load()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    folder = tmp_path / "adapter"
    peft.get_peft_model(base, config).save_pretrained(folder, save_embedding_layers=True)
    tied_weights._pairs().clear()
    with gdsload.accelerated():
        model = transformers.AutoModelForCausalLM.from_pretrained(twins.path)
        model.load_adapter(folder)
    assert not tied_weights._pairs()


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_callbacks_write_to_one_of_two_twins(twins: Twins) -> None:
    before = twins.tensors[HEAD][0, 0].item()

    def write(name: str, module: torch.nn.Module) -> None:
        if name == "model.embed_tokens":
            module.weight.data[0, 0] = 9

    safetensors.torch.save_file(twins.tensors, twins.file, metadata={"format": "pt"})
    with small_windows(2048, 4096), gdsload.accelerated():
        model = gdsload.from_pretrained(twins.path, dtype=torch.float32, on_module_ready=write)
    assert model.lm_head.weight[0, 0] == before


def test_pairs_that_share_a_weight_are_no_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_utils, TIED_EQUAL, torch.equal, raising=False)

    class Model(transformers.PreTrainedModel):
        def __init__(self) -> None:
            """Has only what is asked for."""

        def get_parameter(self, target: str) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(1, **memory))

    memory: dict[str, Any] = {"device": "meta"}
    model: Any = object.__new__(Model)
    object.__setattr__(model, "all_tied_weights_keys", {"a": "b"})
    assert twin_pairs(model) == [], "it has code of its own"
    monkeypatch.setattr(Model, "__module__", "transformers.models.another")
    for pairs, twins in (
        ({"a": "b"}, [("a", "b")]),
        ({"a": "b", "c": "b", "d": "e"}, [("d", "e")]),
        ({"a": "b", "b": "c"}, []),
    ):
        object.__setattr__(model, "all_tied_weights_keys", pairs)
        assert twin_pairs(model) == twins
    memory["device"] = "cpu"
    assert twin_pairs(model) == [], "it is complete"


class Wrapped(torch.Tensor):
    """Two tensors inside, and no memory of its own, as tensors of many devices."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return Wrapped(args[0].inner)
        raise AssertionError(f"{function} looked at it")


@pytest.mark.skipif(not KNOWN, reason="this transformers asks torch itself")
def test_tensors_without_memory_are_left_to_transformers(comparing: list[str]) -> None:
    model = Tied()
    model.source = torch.nn.Parameter(Wrapped(torch.zeros(64)), requires_grad=False)
    model.target = torch.nn.Parameter(Wrapped(torch.ones(64)), requires_grad=False)
    loaded(model)
    assert not tied_equal(model.source, model.target)
    assert comparing == []
