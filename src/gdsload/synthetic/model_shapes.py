"""What published models are made of: their configuration and the names and shapes of their tensors.

Each comes from the config.json that its authors published; the tensors follow from it. Writing
them to files is the business of `synth`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gdsload.errors import CheckpointError

Shape = tuple[int, ...]
BF16_BYTES = 2


class Model(NamedTuple):
    """A published model: its config.json, its generation_config.json, its largest shard."""

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    shard_bytes: int


class Tensor(NamedTuple):
    """One tensor of a checkpoint: its safetensors name, dtype ("BF16") and shape."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BF16_BYTES


_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
_QWEN3_GENERATION = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}
# Small enough for a test, and otherwise the same: fewer layers, narrower ones, fewer words.
_TINY = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 192,
    "max_window_layers": 4,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
_TINY_MOE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
# As many tensors as Qwen3-30B-A3B has, small ones; and a mixture that any machine can hold.
_THIN_MOE = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
_SMALL_MOE = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 1024,
    "max_window_layers": 9,
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_experts": 64,
    "num_hidden_layers": 9,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
}
_TINY_GENERATION = {"bos_token_id": 1, "eos_token_id": 2}

MODELS: Mapping[str, Model] = {
    "qwen3-0.6b": Model(_QWEN3, _QWEN3_GENERATION, shard_bytes=4_000_000_000),
    "qwen2.5-7b": Model(
        _QWEN2,
        {"bos_token_id": 151643, "do_sample": False, "eos_token_id": 151643},
        shard_bytes=4_000_000_000,
    ),
    "llama-3.1-8b": Model(
        _LLAMA,
        {"bos_token_id": 128000, "do_sample": True, "eos_token_id": 128001, "top_p": 0.9},
        shard_bytes=5_000_000_000,
    ),
    "qwen3-30b-a3b": Model(_QWEN3_MOE, _QWEN3_GENERATION, shard_bytes=4_000_000_000),
    "thin-moe": Model(_QWEN3_MOE | _THIN_MOE, _TINY_GENERATION, shard_bytes=4_000_000_000),
    "small-moe": Model(_QWEN3_MOE | _SMALL_MOE, _TINY_GENERATION, shard_bytes=1_000_000_000),
    "tiny": Model(_QWEN3 | _TINY, _TINY_GENERATION, shard_bytes=400_000),
    "tiny-moe": Model(_QWEN3_MOE | _TINY | _TINY_MOE, _TINY_GENERATION, shard_bytes=400_000),
}


def shapes(model: str, layers: int | None = None) -> Iterator[Tensor]:
    """Every tensor of ``model``, in the order of its state dict.

    ``layers`` keeps the first so many decoder layers; None keeps all. Raises CheckpointError for
    a model that is not in MODELS and for a number of layers that the model does not have.
    """
    config = configured(model, layers)
    hidden, head = config["hidden_size"], config.get("head_dim")
    yield Tensor("model.embed_tokens.weight", "BF16", (config["vocab_size"], hidden))
    head = head or hidden // config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _decoder_layer(config, hidden, head):
            yield Tensor(f"model.layers.{layer}.{name}", "BF16", shape)
    yield Tensor("model.norm.weight", "BF16", (hidden,))
    # Qwen3-0.6B ties its head to its embedding, and was published with both all the same.
    yield Tensor("lm_head.weight", "BF16", (config["vocab_size"], hidden))


def configured(model: str, layers: int | None = None) -> dict[str, Any]:
    """The config.json of ``model``, cut down to ``layers`` decoder layers."""
    try:
        config = dict(MODELS[model].config)
    except KeyError:
        raise CheckpointError(f"no model {model!r}: there are {', '.join(MODELS)}") from None
    if layers is not None:
        if not 1 <= layers <= config["num_hidden_layers"]:
            raise CheckpointError(
                f"{model} has {config['num_hidden_layers']} layers: "
                f"1 to {config['num_hidden_layers']} can be kept, not {layers}"
            )
        config["num_hidden_layers"] = layers
    return config


def total_bytes(model: str, layers: int | None = None) -> int:
    """The bytes of all tensors of ``model``, headers not counted."""
    return sum(tensor.nbytes for tensor in shapes(model, layers))


def shards(model: str, layers: int | None = None) -> dict[str, list[Tensor]]:
    """File name → its tensors in file order, cut where the original was cut.

    Tensors fill a shard in the order of the state dict until the next would overflow it; inside
    a file they lie as safetensors sorts them, by name where all have one dtype.
    """
    groups: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in shapes(model, layers):
        if groups[-1] and filled + tensor.nbytes > MODELS[model].shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    if len(groups) == 1:
        return {"model.safetensors": sorted(groups[0])}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": sorted(group)
        for number, group in enumerate(groups, 1)
    }


def _decoder_layer(
    config: Mapping[str, Any], hidden: int, head: int
) -> Iterator[tuple[str, Shape]]:
    """In the order in which each family's authors saved it, which decides where shards are cut."""
    kind = config["model_type"]
    norms = [("input_layernorm.weight", (hidden,)), ("post_attention_layernorm.weight", (hidden,))]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    if kind == "qwen2":
        yield from norms
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{name}_proj.weight", (rows, hidden)
        if kind == "qwen2":
            yield f"self_attn.{name}_proj.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if kind in ("qwen3", "qwen3_moe"):
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)
    if kind == "qwen3_moe":
        for expert in range(config["num_experts"]):
            yield from _mlp(f"mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
        yield "mlp.gate.weight", (config["num_experts"], hidden)
    else:
        yield from _mlp("mlp", hidden, config["intermediate_size"])
    if kind != "qwen2":
        yield from norms


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)
