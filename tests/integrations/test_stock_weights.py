"""ModelReader that transformers reads by itself: the report says so and why; the model is the
same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import equal
import gdsload
import tinymodels
from ranks import ranks


def test_bin_weights_are_left_to_transformers(tmp_path: Path) -> None:
    """Beside safetensors files they count only when they are asked for."""
    model = tinymodels.build("qwen2")
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    equal.require_same(*equal.both(tmp_path))
    equal.require_same(*equal.both(tmp_path, use_safetensors=True))
    for words in ({"use_safetensors": False}, {"use_safetensors": False, "weights_only": False}):
        equal.require_same(*equal.both(tmp_path, **words), "stock")
        assert "pytorch_model.bin is not a .safetensors" in gdsload.last_report().integration_reason
    (tmp_path / "model.safetensors").unlink()
    equal.require_same(*equal.both(tmp_path, dtype="bfloat16"), "stock")


def test_layers_that_predict_more_tokens_are_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if equal.VERSION < (5, 24):
        pytest.skip("older ones have no such layers, or know them by other names")
    from transformers.modeling_layers import MtpModel

    cls = transformers.LlamaForCausalLM  # any kind of model can have them
    monkeypatch.setattr(cls, "_keys_to_ignore_on_load_unexpected", [r"^mtp\."])
    config = tinymodels.build("llama").config
    config.num_mtp_layers = 1
    model = cls(config)
    model.save_pretrained(tmp_path)
    wanted = tinymodels.perturbed(MtpModel(model, 1)).layers.state_dict()
    saved = {**model.state_dict(), **{f"mtp.layers.{name}": wanted[name] for name in wanted}}
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with gdsload.accelerated():
        model = cls.from_pretrained(tmp_path)
        assert gdsload.last_report().integration == "hook"
        got = MtpModel.from_pretrained(model).layers.state_dict()
    report = gdsload.last_report()
    assert (report.source, report.integration) == (str(tmp_path), "stock")
    assert "MtpModel opens" in report.integration_reason
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


LLAMA_IN_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Any, path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in model.state_dict().items():
        owner, _, kind = name.rpartition(".")
        if owner not in LLAMA_IN_GGUF:
            _, _, layer, part = owner.split(".", 3)
            renamed = f"blk.{layer}.{LLAMA_IN_GGUF[part]}"
        else:
            renamed = LLAMA_IN_GGUF[owner]
        writer.add_tensor(f"{renamed}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_weights_are_left_to_transformers(tmp_path: Path) -> None:
    write_gguf(tinymodels.build("llama"), tmp_path / "model.gguf")
    with equal.by_transformers_alone():
        stock, ours = equal.both(tmp_path, gguf_file="model.gguf")
    equal.require_same(stock, ours, "stock")
    assert "gguf" in gdsload.last_report().integration_reason
    by_config = gdsload.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert tinymodels.differences(stock, by_config) == []


def test_state_dict_of_the_caller_is_left_to_transformers() -> None:
    model = tinymodels.build("qwen2")
    words = {"config": model.config, "state_dict": model.state_dict(), "auto": type(model)}
    equal.require_same(*equal.both(None, **words), "stock")
    assert "state_dict=" in gdsload.last_report().integration_reason


ZERO3 = """
import json, sys
import deepspeed, torch, transformers
from transformers.integrations import HfDeepSpeedConfig
import gdsload

def main():
    deepspeed.init_distributed(dist_backend="gloo")
    held = HfDeepSpeedConfig({
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": False},
    })
    auto = transformers.AutoModelForCausalLM
    stock, ours = auto.from_pretrained(sys.argv[1]), gdsload.from_pretrained(sys.argv[1])
    report = gdsload.last_report()
    pairs = list(zip(stock.parameters(), ours.parameters(), strict=True))
    with deepspeed.zero.GatheredParameters([p for pair in pairs for p in pair]):
        same = all(torch.equal(one, other) for one, other in pairs)
    print(json.dumps({
        "path": report.integration, "reason": report.integration_reason,
        "same": same, "count": len(pairs),
        "spread": all(hasattr(p, "ds_id") for p in ours.parameters()),
    }))
"""


def test_zero3_is_left_to_transformers(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    (tmp_path / "zero3.py").write_text(ZERO3)
    tinymodels.build("qwen2").save_pretrained(tmp_path / "model")
    (found,) = ranks(1, tmp_path / "zero3.py", tmp_path / "model", meet=tmp_path)
    assert found["path"] == "stock"
    assert "ZeRO-3" in found["reason"]
    assert found["same"]
    assert found["spread"]
    assert found["count"] > 20


@pytest.mark.skipif(not equal.NEW, reason="transformers 4.57 imports deepspeed for this")
def test_zero3_without_deepspeed_is_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own question is asked, each time; its answer decides."""
    model = tinymodels.build("qwen2")
    model.save_pretrained(tmp_path)
    seen = []

    def spread(*_: Any, **__: Any) -> Any:
        seen.append(True)
        raise RuntimeError("handed to deepspeed")

    from transformers import modeling_utils

    monkeypatch.setattr(modeling_utils, "is_deepspeed_zero3_enabled", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(type(model), "get_init_context", classmethod(lambda *_, **__: []))
    loader = "_load_state_dict_into_zero3_model"
    if not hasattr(modeling_utils, loader):
        pytest.skip(f"this transformers has no {loader}")
    monkeypatch.setattr(modeling_utils, loader, spread)
    with pytest.raises(RuntimeError, match="handed to deepspeed"):
        gdsload.from_pretrained(tmp_path)
    assert seen
    assert gdsload.last_report().integration == "stock"
    assert "ZeRO-3" in gdsload.last_report().integration_reason
