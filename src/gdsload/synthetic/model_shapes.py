"""Published models: their configuration, and the names and shapes of their tensors.

models.json has the configurations that the authors published, without keys that equal the defaults
of transformers, and smaller ones: "tiny" and "tiny-moe" for tests, "thin-moe" with as many tensors
as Qwen3-30B-A3B, "small-moe" with 2 GB. The tensors follow from the configuration. Writing the
files is the task of `checkpoints`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
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


MODELS: Mapping[str, Model] = {
    name: Model(**facts)
    for name, facts in json.loads(Path(__file__).with_name("models.json").read_bytes()).items()
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
