"""Copies by several threads: the bytes, the cast, and the pages of fresh memory."""

from __future__ import annotations

import errno
import platform
import random
from itertools import pairwise

import pytest
import torch

from command import process
from gdsload._native.copies import Copier
from gdsload._native.memory import Region
from pagemap import resident_pages
from seccomp import REFUSE, skip_if_allowed

UNIT = 2 << 20
Copy = tuple[int, int, int, bool]


def bytes_of(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)


@pytest.fixture
def fresh() -> Region:
    return Region.anonymous(8 * UNIT)


@pytest.mark.parametrize("threads", [-1, 1, 2, 7, 1000])
@pytest.mark.parametrize("owned", [False, True])
def test_ranges_of_any_length_and_order_are_copied(
    fresh: Region, threads: int, owned: bool
) -> None:
    source = bytes_of(8 * UNIT, 1)
    cut = random.Random(threads)
    edges = [0, *sorted(cut.sample(range(8 * UNIT), 40)), 8 * UNIT]
    ranges = list(pairwise(edges))
    cut.shuffle(ranges)
    left_out = ranges.pop()
    copier, units = Copier(threads), 0
    for part in (ranges[:7], ranges[7:]):
        copies = [
            (fresh.address + first, source.data_ptr() + first, end - first, False)
            for first, end in part
        ]
        units += sum(copier.copy(copies, fresh.handle() if owned else None))
    expected = source.clone()
    expected[left_out[0] : left_out[1]] = 0
    assert fresh.read(0, 8 * UNIT) == expected.numpy().tobytes()
    assert units == (8 if owned else 0)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("offset", [0, 4, UNIT - 4, UNIT + 2044])
def test_every_bfloat16_becomes_the_float32_of_torch(
    fresh: Region, threads: int, offset: int
) -> None:
    # All bit patterns, among them each NaN and each subnormal number.
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).repeat(21)
    source = patterns.view(torch.bfloat16)
    nbytes = 4 * source.numel()
    copy = fresh.address + offset, source.data_ptr(), nbytes, True
    Copier(threads).copy([copy], fresh.handle())
    written = torch.frombuffer(bytearray(fresh.read(offset, nbytes)), dtype=torch.int32)
    assert torch.equal(written, source.float().view(torch.int32))
    assert fresh.read(0, offset) == bytes(offset)
    assert fresh.read(offset + nbytes, 4096) == bytes(4096)


def test_source_of_zero_touches_its_pages_and_changes_nothing(fresh: Region) -> None:
    base = fresh.address
    source = bytes_of(UNIT, 2)
    copier = Copier(2)
    copier.copy([(base + 3 * UNIT, source.data_ptr(), UNIT, False)], fresh.handle())
    copier.copy([(base + 2 * UNIT + 1, 0, 2 * UNIT, False)], fresh.handle())
    touched = [resident_pages(base + unit * UNIT, UNIT) > 0 for unit in range(8)]
    assert touched == [False, False, True, True, True, False, False, False]
    assert fresh.read(0, 8 * UNIT) == bytes(3 * UNIT) + source.numpy().tobytes() + bytes(4 * UNIT)


def test_pages_are_touched_only_where_bytes_go_unless_they_are_huge(fresh: Region) -> None:
    source = bytes_of(8192, 3)
    copy = fresh.address, source.data_ptr(), 8192, False
    huge, small = Copier(1).copy([copy], fresh.handle())
    # A huge page that the kernel did not have is a small one.
    assert resident_pages(fresh.address, UNIT) in ((2,) if small else (2, UNIT >> 12))
    assert huge + small == 1


def test_targets_outside_of_the_region_are_written_as_well(fresh: Region) -> None:
    source, target = bytes_of(3 * UNIT, 4), torch.zeros(3 * UNIT, dtype=torch.uint8)
    copies = [
        (target.data_ptr(), source.data_ptr(), 3 * UNIT, False),
        (fresh.address, source.data_ptr(), 3 * UNIT, False),
    ]
    assert sum(Copier(2).copy(copies, fresh.handle())) == 3
    assert torch.equal(target, source)
    assert fresh.read(0, 3 * UNIT) == source.numpy().tobytes()


# Every madvise of this process fails with EINVAL, as those of an old kernel that it does not know.
WITHOUT_ADVICE = f"""{REFUSE}
refuse([int(sys.argv[1])], {errno.EINVAL})
from gdsload._native.copies import Copier
from gdsload._native.memory import Region
UNIT = 2 << 20
source = bytes(range(256)) * (5 * UNIT // 256)
fresh = Region.anonymous(6 * UNIT)
held = bytearray(source)
copy = fresh.address + 1000, ctypes.addressof(ctypes.c_char.from_buffer(held)), 5 * UNIT, False
assert sum(Copier(2).copy([copy], fresh.handle())) == 6
assert fresh.read(0, 6 * UNIT) == bytes(1000) + source + bytes(UNIT - 1000)
"""


def test_memory_is_touched_without_the_advice_of_newer_kernels() -> None:
    number = {"x86_64": "28", "aarch64": "233"}.get(platform.machine())
    if number is None:
        pytest.skip("the number of madvise is not known here")
    ended = process(WITHOUT_ADVICE, number)
    skip_if_allowed(ended.stdout)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("copies", [[], [(4096, 0, 0, False)]])
def test_nothing_to_copy_is_nothing_done(fresh: Region, copies: list[Copy]) -> None:
    assert Copier(2).copy(copies, fresh.handle()) == (0, 0)


@pytest.mark.parametrize("shift", [(1, 0, 0), (0, 1, 0), (0, 0, 2)])
def test_floats_that_are_not_aligned_are_refused(
    fresh: Region, shift: tuple[int, int, int]
) -> None:
    source = bytes_of(4096, 5)
    target, start, nbytes = fresh.address, source.data_ptr(), 1024
    odd = target + shift[0], start + shift[1], nbytes + shift[2], True
    with pytest.raises(ValueError, match="not aligned as float32"):
        Copier(2).copy([(target, start, nbytes, False), odd], fresh.handle())
    assert fresh.read(0, 4096) == bytes(4096)
