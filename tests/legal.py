"""Valid safetensors files of every kind, written byte by byte, for the property tests."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from gdsload.dtypes import DTYPES

# Dtypes that torch has; safetensors for torch refuses F6 as well.
TORCH_DTYPES = sorted(
    name
    for name, dtype in DTYPES.items()
    if dtype.torch_name is not None and hasattr(torch, dtype.torch_name)
)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=0, max_size=8).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def shapes(draw: st.DrawFn, dtype: str) -> list[int]:
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    if draw(st.integers(0, 9)) == 0:
        shape = [draw(st.integers(1000, 20_000))]
    if dtype == "F4":  # two per byte, along the last dimension
        shape = [*shape[:-1], 2 * (shape[-1] if shape else 1)]
    return shape


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """One file: any dtypes and shapes, in any order, at any alignment."""
    entries: dict[str, Any] = {}
    at = 0
    tensors = draw(st.lists(st.tuples(names, st.sampled_from(TORCH_DTYPES)), max_size=8))
    for name, dtype in {name: (name, dtype) for name, dtype in tensors}.values():
        shape = draw(shapes(dtype))
        nbytes = math.prod(shape) * DTYPES[dtype].bits // 8
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    header: dict[str, Any] = dict(draw(st.permutations(list(entries.items()))))
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text("ab", max_size=2), names, max_size=2))
    text = json.dumps(header, ensure_ascii=draw(st.booleans())).encode()
    text += b" " * draw(st.integers(0, 16))
    data = random.Random(draw(st.integers(0, 1 << 32))).randbytes(at)
    # A bool is a byte 0 or 1; torch cannot compare others.
    patched = bytearray(data)
    for entry in entries.values():
        if entry["dtype"] == "BOOL":
            first, end = entry["data_offsets"]
            patched[first:end] = bytes(byte & 1 for byte in patched[first:end])
    return len(text).to_bytes(8, "little") + text + bytes(patched)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, whatever its dtype."""
    if tensor.numel() == 0:
        return b""
    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors have equal bits, dtype and shape; NaNs and signed zeros included."""
    return one.dtype == two.dtype and one.shape == two.shape and raw(one) == raw(two)


def write(path: Path, dtype: str, shape: list[int], data: bytes, pad: int = 0) -> Path:
    """A file of one tensor, "t", whose data start `pad` bytes after a multiple of 8 bytes."""
    nbytes = math.prod(shape) * DTYPES[dtype].bits // 8
    text = json.dumps({"t": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    text += b" " * ((pad - len(text)) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[:nbytes])
    return path
