"""Slices of tensors: the bytes that are read, and the tensor they give."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from gdsload.checkpoint import TensorInfo
from gdsload.planning.read_plan import GAP_BYTES
from gdsload.planning.tensor_slices import MAX_RUNS, TensorSlice, slice_of, whole


def info_of(tensor: torch.Tensor) -> TensorInfo:
    names = {torch.float32: "F32", torch.uint8: "U8", torch.int16: "I16"}
    nbytes = tensor.numel() * tensor.element_size()
    return TensorInfo("w", names[tensor.dtype], tuple(tensor.shape), 0, 128, nbytes)


def assembled(tensor: torch.Tensor, wanted: TensorSlice) -> torch.Tensor:
    """The result of a slice of a file that holds the tensor at offset 128."""
    raw = bytes(128) + tensor.contiguous().numpy().tobytes()
    parts = []
    for part in wanted.parts:
        data = bytearray(raw[part.offset : part.offset + part.nbytes])
        assert len(data) == part.nbytes
        flat = torch.frombuffer(data, dtype=tensor.dtype) if data else torch.empty(0)
        parts.append(flat.to(tensor.dtype).reshape(part.shape))
    found = parts[0] if wanted.shape is None else torch.stack(parts).view(wanted.shape)
    return found if wanted.index is None else found[wanted.index]


INDEXES: list[Any] = [
    ..., (), slice(None), slice(1, 3), slice(3, 1), slice(-2, None), slice(None, None, 2), 0, -1,
    (slice(1, 3), 2), (slice(1, 3), slice(0, 4, 2)), (slice(0, 2), ..., 0), (0, slice(1, 2)),
    (slice(None), slice(2, 5)), (slice(1, 2), slice(2, 5), slice(0, 1)), (slice(0, 99),),
    (..., slice(1, 2)), None,
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_slice_equals_that_of_torch(index: Any) -> None:
    tensor = torch.arange(4 * 6 * 5, dtype=torch.float32).reshape(4, 6, 5)
    expected = tensor[index]
    found = assembled(tensor, slice_of(info_of(tensor), index))
    assert torch.equal(found, expected)
    assert found.shape == expected.shape


@pytest.mark.parametrize("seed", range(60))
def test_random_ranges_equal_those_of_torch(seed: int) -> None:
    """With large rows, so that each row of a column slice is a range of its own."""
    dice = random.Random(seed)
    shape = [dice.randint(1, 4), dice.randint(1, 6), dice.choice([1, 7, GAP_BYTES])]
    dice.shuffle(shape)
    tensor = torch.randint(0, 255, shape, dtype=torch.uint8)
    index = []
    for size in shape:
        ends = sorted((dice.randint(0, size), dice.randint(0, size)))
        index.append(slice(*ends) if dice.random() < 0.7 else slice(None))
    expected = tensor[tuple(index)]
    wanted = slice_of(info_of(tensor), tuple(index))
    assert torch.equal(assembled(tensor, wanted), expected)
    assert wanted.nbytes <= tensor.numel()
    assert len({part.name for part in wanted.parts}) == len(wanted.parts)


def test_row_slice_reads_only_its_rows() -> None:
    info = info_of(torch.empty(100, 7, dtype=torch.int16))
    assert slice_of(info, slice(10, 20)).parts[0].nbytes == 10 * 7 * 2
    assert slice_of(info, (slice(10, 20), slice(0, 3))).parts[0].nbytes == 10 * 7 * 2
    assert slice_of(info, slice(5, 5)).nbytes == 0


def test_column_slice_skips_only_large_gaps() -> None:
    near = info_of(torch.empty(8, 100, dtype=torch.uint8))
    assert slice_of(near, (slice(None), slice(0, 50))).nbytes == near.nbytes
    far = info_of(torch.empty(8, 4 * GAP_BYTES, dtype=torch.uint8))
    half = slice_of(far, (slice(None), slice(0, 2 * GAP_BYTES)))
    assert half.nbytes == far.nbytes // 2
    assert len(half.parts) == 8
    inner = info_of(torch.empty(3, 4, GAP_BYTES, dtype=torch.uint8))
    assert slice_of(inner, (slice(None), slice(0, 2))).nbytes == inner.nbytes // 2
    rows = MAX_RUNS + 1
    many = TensorInfo("w", "U8", (rows, 2 * GAP_BYTES), 0, 0, rows * 2 * GAP_BYTES)
    assert len(slice_of(many, (slice(None), slice(0, 8))).parts) == 1


def test_equal_slices_have_equal_keys() -> None:
    info = info_of(torch.empty(4, 6))
    assert slice_of(info, slice(0, 4)) == whole(info) == slice_of(info, ...)
    assert slice_of(info, slice(0, 2)).key == slice_of(info, (slice(0, 2), slice(None))).key
    assert slice_of(info, slice(0, 2)).key != slice_of(info, slice(1, 3)).key


def test_packed_dtype_is_read_whole() -> None:
    packed = TensorInfo("w", "F4", (4, 8), 0, 0, 16)
    assert slice_of(packed, slice(0, 2)).nbytes == 16
