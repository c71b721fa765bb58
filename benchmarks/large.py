"""Checkpoints that are too large to write, as sparse files: real headers, holes for data.

Names, shapes and dtypes are as published by the authors: Llama 3.1 70B and 405B in BF16,
DeepSeek V3 (671B, without its multi-token head) in FP8 with a scale for each block of 128 by 128.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SHARD_BYTES = 5_000_000_000
DTYPE_BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
SCALE_BLOCK = 128


class Shape(NamedTuple):
    """A tensor that is only described."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """0 for a scale: it belongs to a weight."""
        return 0 if self.name.endswith("_scale_inv") else math.prod(self.shape)


def llama(*, layers: int, hidden: int, inner: int, keys: int, vocabulary: int) -> Iterator[Shape]:
    """`keys` is the width of keys and values: heads of them times the size of a head."""
    yield Shape("model.embed_tokens.weight", "BF16", (vocabulary, hidden))
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, shape in (
            ("input_layernorm", (hidden,)),
            ("mlp.down_proj", (hidden, inner)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("post_attention_layernorm", (hidden,)),
            ("self_attn.k_proj", (keys, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.v_proj", (keys, hidden)),
        ):
            yield Shape(f"{prefix}{name}.weight", "BF16", shape)
    yield Shape("model.norm.weight", "BF16", (hidden,))
    yield Shape("lm_head.weight", "BF16", (vocabulary, hidden))


def deepseek() -> Iterator[Shape]:
    hidden, vocabulary, experts = 7168, 129280, 256
    yield Shape("model.embed_tokens.weight", "BF16", (vocabulary, hidden))
    for layer in range(61):
        prefix = f"model.layers.{layer}."
        yield Shape(f"{prefix}input_layernorm.weight", "BF16", (hidden,))
        yield from _scaled(f"{prefix}self_attn.q_a_proj", (1536, hidden))
        yield Shape(f"{prefix}self_attn.q_a_layernorm.weight", "BF16", (1536,))
        yield from _scaled(f"{prefix}self_attn.q_b_proj", (128 * 192, 1536))
        yield from _scaled(f"{prefix}self_attn.kv_a_proj_with_mqa", (576, hidden))
        yield Shape(f"{prefix}self_attn.kv_a_layernorm.weight", "BF16", (512,))
        yield from _scaled(f"{prefix}self_attn.kv_b_proj", (128 * 256, 512))
        yield from _scaled(f"{prefix}self_attn.o_proj", (hidden, 128 * 128))
        yield Shape(f"{prefix}post_attention_layernorm.weight", "BF16", (hidden,))
        if layer < 3:
            yield from _mlp(f"{prefix}mlp", hidden, 18432)
            continue
        yield Shape(f"{prefix}mlp.gate.weight", "BF16", (experts, hidden))
        yield Shape(f"{prefix}mlp.gate.e_score_correction_bias", "F32", (experts,))
        for expert in range(experts):
            yield from _mlp(f"{prefix}mlp.experts.{expert}", hidden, 2048)
        yield from _mlp(f"{prefix}mlp.shared_experts", hidden, 2048)
    yield Shape("model.norm.weight", "BF16", (hidden,))
    yield Shape("lm_head.weight", "BF16", (vocabulary, hidden))


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[Shape]:
    yield from _scaled(f"{prefix}.gate_proj", (inner, hidden))
    yield from _scaled(f"{prefix}.up_proj", (inner, hidden))
    yield from _scaled(f"{prefix}.down_proj", (hidden, inner))


def _scaled(name: str, shape: tuple[int, int]) -> Iterator[Shape]:
    yield Shape(f"{name}.weight", "F8_E4M3", shape)
    blocks = tuple(-(-side // SCALE_BLOCK) for side in shape)
    yield Shape(f"{name}.weight_scale_inv", "F32", blocks)


MODELS: Mapping[str, Callable[[], Iterator[Shape]]] = {
    "llama-3.1-70b": lambda: llama(
        layers=80, hidden=8192, inner=28672, keys=1024, vocabulary=128256
    ),
    "llama-3.1-405b": lambda: llama(
        layers=126, hidden=16384, inner=53248, keys=1024, vocabulary=128256
    ),
    "deepseek-v3-671b": deepseek,
}


def sharded(shapes: Iterable[Shape], most: int = SHARD_BYTES) -> list[list[Shape]]:
    """The tensors in files of limited size, in their order."""
    groups: list[list[Shape]] = [[]]
    held = 0
    for shape in shapes:
        if groups[-1] and held + shape.nbytes > most:
            groups.append([])
            held = 0
        groups[-1].append(shape)
        held += shape.nbytes
    return groups


def write(directory: Path, groups: list[list[Shape]]) -> Path:
    """A sparse checkpoint with these shards. Replaces an existing one."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    where: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for shape in group:
            begin, end = end, end + shape.nbytes
            header[shape.name] = {
                "dtype": shape.dtype,
                "shape": list(shape.shape),
                "data_offsets": [begin, end],
            }
            where[shape.name] = file
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (directory / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
    total = sum(shape.nbytes for group in groups for shape in group)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
