"""Slices of tensors: the bytes that are read, and the tensor they give."""

from __future__ import annotations

import operator
import pickle
import random
from itertools import product
from typing import Any

import numpy
import pytest
import torch

from gdsload.checkpoint import TensorInfo
from gdsload.errors import CheckpointError
from gdsload.planning.read_plan import GAP_BYTES, ByteRange
from gdsload.planning.tensor_slices import (
    MAX_RANGES,
    PartName,
    TensorSlice,
    part_ranges,
    read_the_same,
    rows_of,
    slice_of,
    wanted_tensors,
    whole,
)


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
    numpy.int64(2), numpy.array([1, 3]), (slice(1, 3), numpy.array([0, 2])),
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
    rows = MAX_RANGES + 1
    many = TensorInfo("w", "U8", (rows, 2 * GAP_BYTES), 0, 0, rows * 2 * GAP_BYTES)
    assert len(slice_of(many, (slice(None), slice(0, 8))).parts) == 1


def test_columns_of_the_same_rows_are_read_from_the_same_bytes() -> None:
    info, rows = info_of(torch.empty(4, 12)), slice(1, 3)
    assert read_the_same([slice_of(info, (rows, slice(start, start + 2))) for start in (0, 6)])


def test_slices_of_other_bytes_are_not_read_from_the_same() -> None:
    near = info_of(torch.empty(4, 12))
    columns = slice_of(near, (slice(None), slice(0, 2)))
    far = TensorInfo("w", "U8", (2, 4 * GAP_BYTES), 0, 8, 8 * GAP_BYTES)
    ranges = [slice_of(far, (slice(None), slice(start, start + 8))) for start in (0, 8)]
    for slices in (
        [columns, slice_of(near, (slice(0, 2), slice(0, 2)))],
        [columns, whole(near)],
        ranges,
    ):
        assert not read_the_same(slices)


def test_equal_slices_have_equal_keys() -> None:
    info = info_of(torch.empty(4, 6))
    assert slice_of(info, slice(0, 4)) == whole(info) == slice_of(info, ...)
    assert slice_of(info, slice(0, 2)).key == slice_of(info, (slice(0, 2), slice(None))).key
    assert slice_of(info, slice(0, 2)).key != slice_of(info, slice(1, 3)).key


def test_different_slices_have_keys_and_names_of_their_own() -> None:
    wide = TensorInfo("w", "U8", (2, 4 * GAP_BYTES), 0, 8, 8 * GAP_BYTES)
    found = [
        slice_of(wide, slice(0, 1)),
        slice_of(wide, slice(1, 1)),
        slice_of(wide, slice(0, 2, 2)),
        slice_of(wide, (slice(0, 1), 5)),
        slice_of(wide, (slice(None), slice(0, 8))),
        slice_of(wide, (slice(None), slice(8, 8))),
    ]
    assert len({each.key for each in found}) == len(found)
    assert all(isinstance(each.key, PartName) for each in found)
    for each in found:
        names = [part.name for part in each.parts]
        assert names == [each.key] if len(names) == 1 else each.key not in names
    assert [str(each.key) for each in found[:2]] == ["w[0:1, 0:262144]", "w[1:1, 0:262144]"]


def test_name_of_a_part_is_that_of_no_tensor() -> None:
    name = PartName("w", "[0:2]")
    assert str(name) == f"{name}" == "w[0:2]" and repr(name) == "'w[0:2]'"
    assert name != "w[0:2]" and operator.ne("w[0:2]", name) and "w[0:2]" not in {name: 1}
    same = PartName("w", "[0:2]")
    assert name == same and not operator.ne(name, same) and {name: 1}[same] == 1
    assert PartName(PartName("w", "[0:8]"), "[0:2]") != PartName("w[0:8]", "[0:2]")
    assert pickle.loads(pickle.dumps(name)) == name


def test_packed_dtype_is_read_whole() -> None:
    packed = TensorInfo("w", "F4", (4, 8), 0, 0, 16)
    assert slice_of(packed, slice(0, 2)).nbytes == 16


CUBE = TensorInfo("w", "I16", (4, 6, 5), 3, 128, 240)


@pytest.mark.parametrize(
    ("index", "kept", "removed", "nbytes"),
    [
        (..., (4, 6, 5), (), 240),
        (2, (1, 6, 5), (0,), 60),
        (-4, (1, 6, 5), (0,), 60),
        ((slice(1, 3), 5), (2, 1, 5), (1,), 20),
        ((slice(0, 4, 2), slice(None, None, 4)), (2, 2, 5), (), 40),
        ((1, ..., 2), (1, 6, 1), (0, 2), 12),
        ((..., slice(1, 3)), (4, 6, 2), (), 96),
        ((1, 2, 3), (1, 1, 1), (0, 1, 2), 2),
        ((1, ..., 2, 3), (1, 1, 1), (0, 1, 2), 2),
        (torch.tensor(3), (1, 6, 5), (0,), 60),
        (numpy.int64(2), (1, 6, 5), (0,), 60),
        ((..., numpy.int64(2)), (4, 6, 1), (2,), 48),
    ],
    ids=str,
)
def test_wanted_tensor_has_the_shape_of_the_index(
    index: Any, kept: tuple[int, ...], removed: tuple[int, ...], nbytes: int
) -> None:
    (wanted,) = wanted_tensors([CUBE], {"w": index})
    assert (wanted.info, wanted.kept, wanted.removed) == (CUBE, kept, removed)
    assert wanted.nbytes == nbytes <= wanted.slice.nbytes
    if not isinstance(index, torch.Tensor):
        assert wanted.shape == tuple(torch.empty(CUBE.shape)[index].shape)


@pytest.mark.parametrize(
    ("index", "error", "fault"),
    [
        (4, IndexError, "is outside it"),
        (-5, IndexError, "is outside it"),
        ((0, 6), IndexError, "is outside it"),
        ((0, 0, 0, 0), IndexError, "has too many dimensions"),
        ((0, 0, ..., 0, 0), IndexError, "has too many dimensions"),
        (slice(None, None, -1), IndexError, "goes backwards"),
        (slice(None, None, 0), IndexError, "goes backwards"),
        (True, TypeError, "has True: numbers, slices and one ellipsis are allowed"),
        (None, TypeError, "has None: numbers, slices and one ellipsis are allowed"),
        ((..., 0, ...), TypeError, "has Ellipsis: numbers, slices and one ellipsis are allowed"),
        (1.0, TypeError, "has 1.0: numbers, slices and one ellipsis are allowed"),
    ],
    ids=str,
)
def test_wrong_index_names_the_tensor_and_its_shape(
    index: Any, error: type[Exception], fault: str
) -> None:
    with pytest.raises(error) as caught:
        wanted_tensors([CUBE], {"w": index})
    assert str(caught.value) == f"the index {index!r} of tensor 'w', of shape [4, 6, 5], {fault}"


@pytest.mark.parametrize("index", [numpy.array([1, 2]), (..., torch.tensor([1, 2]))])
def test_array_as_index_raises_type_error(index: Any) -> None:
    with pytest.raises(TypeError, match="only integer"):
        wanted_tensors([CUBE], {"w": index})


def test_index_of_a_tensor_that_is_not_loaded_raises() -> None:
    with pytest.raises(CheckpointError) as caught:
        wanted_tensors([CUBE], {"w": 1, "v": 2})
    assert str(caught.value) == (
        "slices has an index for 'v', which is not among the tensors to load"
    )
    assert caught.value.tensor == "v"


def test_tensors_without_an_index_are_wanted_whole() -> None:
    other = CUBE._replace(name="v")
    first, second = wanted_tensors([CUBE, other], {"v": 1})
    assert first == (CUBE, whole(CUBE), (4, 6, 5), ())
    assert second.removed == (0,)
    assert wanted_tensors([CUBE]) == [first]
    (part,) = second.slice.parts
    assert (part.offset, part.nbytes) == (188, 60)


def test_step_of_one_is_no_step() -> None:
    (wanted,) = wanted_tensors([CUBE], {"w": slice(1, 3, 1)})
    assert wanted.slice == slice_of(CUBE, slice(1, 3))


def test_packed_elements_are_not_sliced_in_their_last_dimension() -> None:
    packed = TensorInfo("w", "F4", (4, 8), 0, 0, 16)
    (rows,) = wanted_tensors([packed], {"w": (slice(1, 3), slice(None))})
    assert (rows.shape, rows.nbytes) == ((2, 8), 8)
    cube = TensorInfo("w", "F4", (2, 4, 8), 0, 0, 32)
    assert wanted_tensors([cube], {"w": 1})[0].shape == (4, 8)
    assert rows.slice.index == (slice(1, 3, 1), slice(0, 8, 1))
    with pytest.raises(CheckpointError) as caught:
        wanted_tensors([packed], {"w": (..., slice(0, 2))})
    assert str(caught.value) == (
        "the index (Ellipsis, slice(0, 2, None)) of tensor 'w', of shape [4, 8]: its elements"
        " share bytes in the last dimension"
    )
    assert caught.value.tensor == "w"


def test_rows_of_a_tensor_are_a_tensor() -> None:
    assert rows_of(CUBE, 1, 3) == ("w", "I16", (2, 6, 5), 3, 188, 120)
    empty = TensorInfo("w", "I16", (0, 5), 0, 128, 0)
    assert rows_of(empty, 0, 0) == empty


def test_runs_have_the_places_and_names_of_their_parts() -> None:
    assert part_ranges([whole(CUBE)]) == [ByteRange("w", 3, 128, 240)]
    wide = TensorInfo("w", "U8", (2, 4 * GAP_BYTES), 0, 8, 8 * GAP_BYTES)
    half = slice_of(wide, (slice(None), slice(1, 2 * GAP_BYTES)))
    first, second = part_ranges([half])
    assert (first.offset, first.nbytes) == (9, 2 * GAP_BYTES - 1)
    assert (second.offset, second.nbytes) == (9 + 4 * GAP_BYTES, 2 * GAP_BYTES - 1)
    assert len({half.key, first.name, second.name}) == 3


@pytest.mark.parametrize(("more", "parts"), [(0, 1), (1, 2)])
def test_gap_of_the_limit_is_read_and_a_larger_one_skipped(more: int, parts: int) -> None:
    wide = TensorInfo("w", "U8", (2, 8 + GAP_BYTES + more), 0, 8, 2 * (8 + GAP_BYTES + more))
    assert len(slice_of(wide, (slice(None), slice(0, 8))).parts) == parts


def test_as_many_ranges_as_the_limit_are_read_one_by_one() -> None:
    many = TensorInfo("w", "U8", (MAX_RANGES, 2 * GAP_BYTES), 0, 0, MAX_RANGES * 2 * GAP_BYTES)
    assert len(slice_of(many, (slice(None), slice(0, 8))).parts) == MAX_RANGES


def test_rows_with_an_inner_index_read_only_the_rows() -> None:
    found = slice_of(CUBE, (slice(1, 3), 2, slice(0, 2)))
    (part,) = found.parts
    assert (part.offset, part.nbytes, part.shape) == (188, 120, (2, 6, 5))
    assert found.key == part.name != "w"
    assert found.index == (slice(None), 2, slice(0, 2))


@pytest.mark.parametrize("step", [2, 3, 5, 6, 7, 100])
@pytest.mark.parametrize(
    "rest", [(), (1,), (slice(1, 3),), (slice(None, None, 2),), (..., 0)], ids=str
)
def test_rows_with_a_step_are_read_from_the_first_to_the_last(
    step: int, rest: tuple[Any, ...]
) -> None:
    bounds = [None, 0, 1, 4, 6, 7, 9, -1, -3, -7, -9]
    for count, start, stop in product([7, 0], bounds, bounds):
        tensor = torch.arange(count * 3 * 2, dtype=torch.int16).view(count, 3, 2)
        index, rows = (slice(start, stop, step), *rest), range(count)[start:stop:step]
        found = slice_of(info_of(tensor), index)
        assert torch.equal(assembled(tensor, found), tensor[index]), index
        assert found.nbytes == (12 * (rows[-1] + 1 - rows[0]) if rows else 0), index
