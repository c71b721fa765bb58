"""Callbacks of modules run when their bytes are final: not before, once, and in a known order."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import gdsload
import tinymodels
from gated import Gate, gated
from gdsload.integrations.transformers.module_callbacks import AS_THEY_CAME
from threadends import await_most
from windows import small_windows

NEW = transformers.__version__[0] > "4"
needs_new = pytest.mark.skipif(not NEW, reason="transformers 4.57 tells of all modules at the end")
# Tied, merged and chunked weights, buffers that are stored and that are not, shared layers.
KINDS = [
    kind
    for kind in (
        "llama",
        "qwen2",
        "gpt2",
        "gpt_neox",
        "mixtral",
        "qwen3_moe",
        "hrm_text",
        "bert",
        "albert",
        "t5",
        "bart",
        "resnet",
        "llava",
        "qwen3_vl_moe",
        "wav2vec2",
    )
    if hasattr(transformers, tinymodels.ARCHITECTURES[kind][0])
]


def saved(kind: str, tmp_path: Path) -> Path:
    tinymodels.build(kind).save_pretrained(tmp_path / kind, max_shard_size="30KB")
    return tmp_path / kind


def bytes_of(module: Any) -> dict[str, torch.Tensor]:
    """Copies of all tensors in a module, buffers that are not stored as well."""
    own = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {name: tensor.detach().clone() for name, tensor in own}


class Calls:
    """A callback that keeps its arguments, with the bytes at that time."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.modules: list[Any] = []
        self.bytes: list[dict[str, torch.Tensor]] = []
        self.training: list[bool] = []

    def __call__(self, name: str, module: Any) -> None:
        self.names.append(name)
        self.modules.append(module)
        self.bytes.append(bytes_of(module))
        self.training.append(any(inner.training for inner in module.modules()))

    def require_true(self, model: Any) -> None:
        """Each module of the model once, inner ones first, with the bytes that it has now."""
        assert sorted(self.names) == sorted(name for name, _ in model.named_modules())
        for name, module, then in zip(self.names, self.modules, self.bytes, strict=True):
            assert model.get_submodule(name) is module
            now = bytes_of(module)
            assert now.keys() == then.keys()
            wrong = [word for word in now if not tinymodels.same_bytes(now[word], then[word])]
            assert wrong == [], name
        assert not any(self.training), "the finished model is in evaluation mode"
        place = {name: number for number, name in enumerate(self.names)}
        for name in self.names:
            outer = name.rpartition(".")[0]
            assert not name or outer not in place or place[outer] > place[name], name
        assert self.names[-1] == ""


@pytest.mark.parametrize("kind", KINDS)
def test_callback_sees_final_weights(kind: str, tmp_path: Path) -> None:
    source = saved(kind, tmp_path)
    calls = Calls()
    with small_windows(), gdsload.accelerated(cache="buffered"):
        model = gdsload.from_pretrained(source, on_module_ready=calls)
    calls.require_true(model)
    report = gdsload.last_report()
    own_ties = type(model).tie_weights is not transformers.PreTrainedModel.tie_weights
    assert own_ties == (kind == "wav2vec2")
    expected = report.integration == "hook" and not own_ties
    assert (report.modules_ready == AS_THEY_CAME) == expected, report.modules_ready


def test_cast_parameters_trigger_callbacks_when_set(tmp_path: Path) -> None:
    calls = Calls()
    source = saved("mixtral", tmp_path)
    model = gdsload.from_pretrained(source, dtype=torch.float16, on_module_ready=calls)
    calls.require_true(model)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float16}


@needs_new
def test_layer_callbacks_follow_the_order_of_the_load(tmp_path: Path) -> None:
    calls = Calls()
    gdsload.from_pretrained(saved("qwen2", tmp_path), on_module_ready=calls)
    layers = [name for name in calls.names if name.startswith("model.layers.")]
    tops = [name for name in layers if name.count(".") == 2]
    assert tops == ["model.layers.0", "model.layers.1"]
    end = calls.names.index("model.layers.1")
    assert calls.names.index("model.embed_tokens") < calls.names.index("model.layers.0") < end
    # The head is tied, and the frequencies are in no checkpoint: both are final at the end alone.
    assert end < min(calls.names.index("model.rotary_emb"), calls.names.index("lm_head"))


@needs_new
def test_layer_callback_runs_before_the_rest_is_read(tmp_path: Path) -> None:
    source = saved("qwen2", tmp_path)
    calls = Calls()
    first = threading.Event()

    def called(name: str, module: Any) -> None:
        calls(name, module)
        if name == "model.layers.0":
            first.set()

    found: list[Any] = []

    def load(gate: Gate) -> None:
        with gdsload.accelerated(cache="direct", backend="gated"):
            found.append(gdsload.from_pretrained(source, on_module_ready=called))

    with gated() as gate:
        thread = threading.Thread(target=load, args=(gate,))
        thread.start()
        held = len(gate.request().transfers)
        assert held > 2
        opened = 0
        while not first.is_set():
            assert opened < held - 1, "no callback before everything had been read"
            gate.open(count=1)
            opened += 1
            gate.wait_seen()
        assert "model.layers.1" not in calls.names and found == []
        gate.open()
        thread.join()
    calls.require_true(found[0])


def state_of_process() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


class Refused(Exception):
    pass


@pytest.mark.parametrize("at", ["model.layers.0", "lm_head", ""])
def test_callback_error_ends_the_load(at: str, tmp_path: Path) -> None:
    source = saved("llama", tmp_path)
    gdsload.from_pretrained(source)  # what is opened once for a process is open now
    before = state_of_process()
    seen: list[Any] = []

    def refuse(name: str, module: Any) -> None:
        seen.append(name)
        if name == at:
            raise Refused(name)

    with pytest.raises(Refused, match=f"^{at}$"):
        gdsload.from_pretrained(source, on_module_ready=refuse)
    assert seen[-1] == at, "no callback afterwards"
    assert "Refused" in gdsload.last_report().failure
    await_most(before[1])
    assert state_of_process()[0] == before[0]
    expected = {}
    for file in source.glob("*.safetensors"):
        expected.update(load_file(file))
    again = gdsload.from_pretrained(source).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("word", ["options", "cache"])
def test_wrong_word_in_a_callback_is_an_error_of_the_callback(word: str, tmp_path: Path) -> None:
    def takes_nothing() -> None: ...

    def ready(name: str, module: Any) -> None:
        takes_nothing(**{word: 1})

    with pytest.raises(TypeError, match="takes_nothing"):
        gdsload.from_pretrained(saved("llama", tmp_path), on_module_ready=ready)


def test_callback_runs_in_the_loading_thread(tmp_path: Path) -> None:
    threads = set()
    gdsload.from_pretrained(
        saved("llama", tmp_path), on_module_ready=lambda *_: threads.add(threading.get_ident())
    )
    assert threads == {threading.get_ident()}


def test_callback_may_load_another_model(tmp_path: Path) -> None:
    outer, inner = saved("llama", tmp_path), saved("gpt2", tmp_path)
    made: list[Any] = []

    def load(name: str, module: Any) -> None:
        if name.endswith("layers.0"):
            made.append(gdsload.from_pretrained(inner))
            assert gdsload.last_report().integration == ("hook" if NEW else "safe_open")

    gdsload.from_pretrained(outer, on_module_ready=load)
    stock = transformers.AutoModelForCausalLM.from_pretrained(inner)
    assert tinymodels.differences(stock, made[0]) == []


def test_stock_load_calls_back_at_the_end(tmp_path: Path) -> None:
    model = tinymodels.build("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    calls = Calls()
    model = gdsload.from_pretrained(
        tmp_path, cls=transformers.LlamaForCausalLM, on_module_ready=calls
    )
    report = gdsload.last_report()
    assert report.integration == "stock" and report.modules_ready.startswith("at the end")
    calls.require_true(model)


@needs_new
@pytest.mark.parametrize("place", ["disk"])
def test_offloaded_load_calls_back_at_the_end(place: str, tmp_path: Path) -> None:
    calls = Calls()
    parts = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": place,
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    model = gdsload.from_pretrained(
        saved("llama", tmp_path),
        device_map=parts,
        offload_folder=tmp_path / "off",
        on_module_ready=calls,
    )
    assert "moved between devices" in gdsload.last_report().modules_ready
    calls.require_true(model)


@needs_new
@pytest.mark.parametrize("base", ["safetensors", "pickled"])
def test_adapter_calls_back_at_the_end(base: str, tmp_path: Path) -> None:
    """Both load parameters, of the model and of the adapter that was put into it."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = tinymodels.build("llama")
    model.save_pretrained(tmp_path / "base")
    if base == "pickled":
        (tmp_path / "base" / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "base" / "pytorch_model.bin")
    model.name_or_path = str(tmp_path / "base")
    wanted = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    peft.get_peft_model(model, wanted).save_pretrained(tmp_path / "adapter")
    calls = Calls()
    made = gdsload.from_pretrained(tmp_path / "adapter", on_module_ready=calls)
    assert gdsload.last_report().modules_ready == "at the end: an adapter may exchange modules"
    calls.require_true(made)


@needs_new
@pytest.mark.parametrize("cls", [None, transformers.LlamaForCausalLM])
@pytest.mark.parametrize("inside", ["", "adapter"])
def test_adapter_in_the_directory_of_its_base_model_calls_back_at_the_end(
    inside: str, cls: Any, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = tinymodels.build("llama")
    model.save_pretrained(tmp_path)
    model.name_or_path = str(tmp_path)
    wanted = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    peft.get_peft_model(model, wanted).save_pretrained(tmp_path / inside)
    words: dict[str, Any] = {"adapter_kwargs": {"subfolder": inside}} if inside else {}
    calls = Calls()
    made = gdsload.from_pretrained(tmp_path, cls=cls, on_module_ready=calls, **words)
    assert any("lora" in name for name in calls.names)
    assert gdsload.last_report().modules_ready == "at the end: an adapter may exchange modules"
    calls.require_true(made)


@needs_new
def test_class_that_writes_when_it_ties_calls_back_at_the_end(tmp_path: Path) -> None:
    source = tinymodels.saved_speech(tmp_path)
    calls = Calls()
    model = gdsload.from_pretrained(source, target_lang="eng", on_module_ready=calls)
    calls.require_true(model)
    reason = "Wav2Vec2ForCTC.tie_weights may write to modules"
    assert gdsload.last_report().modules_ready == f"at the end: {reason}"
    adapter = load_file(source / "adapter.eng.safetensors")
    assert torch.equal(model.lm_head.weight, adapter["lm_head.weight"])


@needs_new
def test_missing_weights_call_back_at_the_end(tmp_path: Path) -> None:
    source = saved("llama", tmp_path)
    calls = Calls()
    model = gdsload.from_pretrained(
        source, cls=transformers.LlamaForSequenceClassification, num_labels=3, on_module_ready=calls
    )
    calls.require_true(model)
    assert calls.names.index("score") > calls.names.index("model.layers.1")


def test_callback_that_is_not_callable_raises_at_once(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="on_module_ready"):
        gdsload.from_pretrained(tmp_path / "nothing", on_module_ready="print")
