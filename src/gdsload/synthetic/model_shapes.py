"""Published models: their configuration, and the names and shapes of their tensors.

The configurations are those that the authors published, without keys that equal the defaults of
transformers; the tensors follow from them. Writing the files is the task of `checkpoints`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gdsload.errors import CheckpointError
from gdsload.planning.read_plan import grouped

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
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
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
_TINY_GENERATION = {"bos_token_id": 1, "eos_token_id": 2}
# Small enough for a test: fewer and narrower layers, a smaller vocabulary.
_TINY = _TINY_GENERATION | {
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
_TINY_MOE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
# As many tensors as Qwen3-30B-A3B, but small; and a mixture of experts that fits any machine.
_THIN_MOE = _TINY_GENERATION | {
    "head_dim": 16,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
_SMALL_MOE = _TINY_GENERATION | {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_experts": 64,
    "num_hidden_layers": 9,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
}

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
    """Yields every tensor of ``model``, in the order of its state dict.

    Args:
        model: A key of MODELS.
        layers: The number of decoder layers; all if None.

    Raises:
        CheckpointError: There is no such model, or it has fewer layers.
    """
    config = configured(model, layers)
    hidden = config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    yield Tensor("model.embed_tokens.weight", "BF16", (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _decoder_layer(config, hidden, head):
            yield Tensor(f"model.layers.{layer}.{name}", "BF16", shape)
    yield Tensor("model.norm.weight", "BF16", (hidden,))
    # Qwen3-0.6B was published with both, although its head is tied to its embedding.
    yield Tensor("lm_head.weight", "BF16", (config["vocab_size"], hidden))


def configured(model: str, layers: int | None = None) -> dict[str, Any]:
    """The config.json of ``model``, with only ``layers`` decoder layers. Raises CheckpointError."""
    if model not in MODELS:
        raise CheckpointError(f"no model {model!r}: there are {', '.join(MODELS)}")
    config = MODELS[model].config
    count = config["num_hidden_layers"]
    if layers is None:
        layers = count
    if not 1 <= layers <= count:
        raise CheckpointError(f"{model} has {count} layers: layers={layers} is not possible")
    return {**config, "num_hidden_layers": layers}


def total_bytes(model: str, layers: int | None = None) -> int:
    """The size of all tensors of ``model`` in bytes, without headers."""
    return sum(tensor.nbytes for tensor in shapes(model, layers))


def shards(model: str, layers: int | None = None) -> dict[str, list[Tensor]]:
    """The tensors of each file in file order, by file name, split as in the original.

    Tensors fill a shard in the order of the state dict until the next would exceed its size. In a
    file they are sorted as by safetensors: by name, since all have one dtype.
    """
    tensors = list(shapes(model, layers))
    groups = list(grouped(tensors, MODELS[model].shard_bytes))
    if len(groups) == 1:
        return {"model.safetensors": sorted(groups[0])}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": sorted(group)
        for number, group in enumerate(groups, 1)
    }


def _decoder_layer(
    config: Mapping[str, Any], hidden: int, head: int
) -> Iterator[tuple[str, Shape]]:
    """In the order in which the authors of each family saved it; it decides the shards."""
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
