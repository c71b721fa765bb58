"""Comparisons of floats by several threads: every bit counts, and NaN equals nothing."""

from __future__ import annotations

import threading

import pytest
import torch

from gdsload._native.compare import FORMATS, Comparison
from gdsload.dtypes import known_dtype

PIECE = 1 << 20
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def floats(dtype: str, count: int) -> torch.Tensor:
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(6))
    return numbers.to(known_dtype(dtype))


def compared(one: torch.Tensor, other: torch.Tensor, dtype: str, threads: int = 2) -> bool:
    comparison = Comparison(
        one.data_ptr(), other.data_ptr(), one.nbytes, dtype, one.dtype != other.dtype
    )
    assert not comparison.equal, "nothing was compared yet"
    comparison.work(threads)
    return comparison.equal


@pytest.fixture(params=[*FORMATS, "widened"])
def pair(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Equal floats, of three pieces and a part of one."""
    if request.param == "widened":
        other = floats("BF16", 3 * PIECE // 4 + 77)
        return other.float(), other, "F32"
    count = 3 * PIECE // FORMATS[request.param][0] + 77
    return floats(request.param, count), floats(request.param, count), request.param


@pytest.mark.parametrize("threads", [-1, 1, 3, 1000])
def test_every_bit_counts(pair: tuple[torch.Tensor, torch.Tensor, str], threads: int) -> None:
    one, other, dtype = pair
    words = one.view(INTEGERS[one.itemsize])
    assert compared(one, other, dtype, threads)
    for place in (0, 1, 5, 70_000, PIECE // one.itemsize, one.numel() - 1):
        for bit in (1, torch.iinfo(words.dtype).min):  # the last one, and the sign
            words[place] ^= bit
            assert not compared(one, other, dtype, threads), (place, bit)
            words[place] ^= bit
    assert compared(one, other, dtype, threads)


@pytest.mark.parametrize("sign", [0, 1])
def test_nan_equals_nothing(pair: tuple[torch.Tensor, torch.Tensor, str], sign: int) -> None:
    one, other, dtype = pair
    words = other.view(INTEGERS[other.itemsize])
    infinity = torch.full((1,), torch.inf, dtype=other.dtype).view(words.dtype).item()
    for place in (0, 4321, other.numel() - 1):
        for pattern in (infinity, infinity + 1, torch.iinfo(words.dtype).max):
            before = words[place].item()
            words[place] = pattern | torch.iinfo(words.dtype).min * sign
            one[place] = other[place]
            if one.itemsize == other.itemsize:  # torch may change the bits of NaN
                one.view(words.dtype)[place] = words[place]
            assert compared(one, other, dtype) == (pattern == infinity)
            words[place] = before
            one[place] = other[place]


@pytest.mark.parametrize("dtype", FORMATS)
def test_zeros_of_other_signs_differ(dtype: str) -> None:
    zeros = torch.zeros(9, dtype=known_dtype(dtype))
    assert compared(zeros, zeros.clone(), dtype)
    assert not compared(zeros, -zeros, dtype)


def test_no_bytes_are_equal() -> None:
    comparison = Comparison(4096, 8192, 0, "F32")
    comparison.work()
    assert comparison.equal


@pytest.mark.parametrize(
    ("shift", "dtype", "widens"),
    [
        ((1, 0, 0), "BF16", False),
        ((0, 1, 0), "F16", False),
        ((0, 2, 0), "F32", False),
        ((0, 0, 4), "F64", False),
        ((0, 1, 0), "F32", True),
        ((0, 0, 0), "F64", True),
    ],
)
def test_what_is_not_aligned_or_cast_is_refused(
    shift: tuple[int, int, int], dtype: str, widens: bool
) -> None:
    one, other, nbytes = (sum(each) for each in zip(shift, (4096, 8192, 64), strict=True))
    with pytest.raises(ValueError, match=f"no floats of {dtype}"):
        Comparison(one, other, nbytes, dtype, widens)


def test_a_format_that_is_no_float_is_unknown() -> None:
    with pytest.raises(KeyError):
        Comparison(4096, 8192, 64, "I32")


def test_threads_share_one_comparison() -> None:
    one = floats("BF16", 16 * PIECE)
    other = one.clone()
    for differs in (False, True):
        other[-1] += differs
        comparison = Comparison(one.data_ptr(), other.data_ptr(), one.nbytes, "BF16")
        workers = [threading.Thread(target=comparison.work) for _ in range(4)]
        for worker in workers:
            worker.start()
        comparison.work()
        for worker in workers:
            worker.join()
        assert comparison.equal is not differs
