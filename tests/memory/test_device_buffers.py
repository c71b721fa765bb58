"""Memory of a device that tensors live in: laid out in few blocks, each given back with its last
tensor, on whichever thread that dies."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import gpudoubles
from gdsload._native.cuda import Block, CudaFailure
from gdsload.errors import PlacementError
from gdsload.memory import device_buffers, late_copies
from gdsload.planning.read_plan import ByteRange
from gdsload.system import gpu
from gpudoubles import CODE, Doubles


def ranges_of_sizes(*sizes: int) -> list[ByteRange]:
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [ByteRange(f"t{n}", 0, ends[n] - size, size) for n, size in enumerate(sizes)]


def test_a_block_for_what_fits() -> None:
    """In file order, each on a border, what is empty left out."""
    wanted = ranges_of_sizes(256, 10, 0, 300, 512)
    assert device_buffers.block_layout(wanted[::-1]) == [
        (256 + 256 + 512 + 512, {"t0": 0, "t1": 256, "t3": 512, "t4": 1024})
    ]
    assert device_buffers.block_layout([]) == device_buffers.block_layout(ranges_of_sizes(0)) == []


def test_a_few_blocks_for_what_is_large() -> None:
    many = ranges_of_sizes(*[1 << 20] * 20_000)
    groups = device_buffers.block_layout(many)
    assert device_buffers.MOST_BLOCKS <= len(groups) <= device_buffers.MOST_BLOCKS + 1
    assert [name for _, members in groups for name in members] == [p.name for p in many]
    assert sum(length for length, _ in groups) == sum(each.nbytes for each in many)
    small = device_buffers.block_layout(ranges_of_sizes(*[1 << 20] * 600))
    assert len(small) == 3 and max(length for length, _ in small) <= device_buffers.LEAST_BYTES
    large = device_buffers.block_layout(ranges_of_sizes(1 << 20, 1 << 30, 1 << 20, 1 << 20))
    assert [length for length, _ in large] == [1 << 20, 1 << 30, 2 << 20], "no tensor is parted"


def test_it_goes_back_with_the_last_that_looks_at_it(doubles: Doubles) -> None:
    gc.collect()
    before = doubles.cuda_log
    block = Block(gpu.device(1), 1 << 20)
    assert (block.length, block.ordinal, block.references) == (1 << 20, 1, 1)
    assert block.address % 256 == 0
    made = [gpudoubles.tensor_of(block.view(256 * n, 64, (8, 4), 1, 16)) for n in range(3)]
    assert made[1].shape == (8, 4) and made[1].dtype == torch.uint16
    assert made[1].data_ptr() == block.address + 256
    block.view(0, 1, (1,), 1, 8)  # nobody takes this one
    assert block.references == 4
    log = doubles.cuda_log
    assert log["used"] - before["used"] == 1 << 20
    assert log["retained"] == before["retained"] + 2, "the device's share of the context, and its"
    del block
    made.pop()
    last = made.pop()
    made.clear()
    assert doubles.cuda_log["used"] == log["used"]
    holder = [last]
    del last
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    after = doubles.cuda_log
    assert after["used"] == before["used"] and after["frees"] == before["frees"] + 1
    assert after["retained"] == before["retained"] + 1


def test_blocks_that_late_copies_used_make_room(doubles: Doubles) -> None:
    doubles.set(nbytes=doubles.cuda_log["used"] + gpu.SPARE_BYTES + (1 << 20))
    block = Block(gpu.device(0), 1 << 20)
    has_ended = False
    late_copies.keep(block, lambda: has_ended)
    del block
    with pytest.raises(PlacementError, match="bytes are missing"):
        device_buffers.take(0, ranges_of_sizes(1))
    has_ended = True
    assert device_buffers.take(0, ranges_of_sizes(1))


def test_what_it_refuses(doubles: Doubles) -> None:
    device = gpu.device(0)
    before = doubles.cuda_log
    with pytest.raises(ValueError, match="no bytes"):
        Block(device, 0)
    doubles.fault("cuMemAlloc_v2", CODE, 2)
    with pytest.raises(CudaFailure, match="cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"):
        Block(device, 4096)
    doubles.fault("cuDevicePrimaryCtxRetain", CODE, 101)
    with pytest.raises(CudaFailure, match="cuDevicePrimaryCtxRetain"):
        Block(device, 4096)
    block = Block(device, 4096)
    for offset, nbytes in ((4096, 1), (0, 4097), (1 << 63, 1)):
        with pytest.raises(ValueError, match="leaves a block of 4096"):
            block.view(offset, nbytes, (nbytes,), 1, 8)
    with pytest.raises(TypeError):
        block.view(0, 4, ("four",), 1, 8)  # type: ignore[arg-type]
    assert block.references == 1
    del block
    after = doubles.cuda_log
    assert (after["used"], after["retained"]) == (before["used"], before["retained"])
