"""Regions and the tensors that view them: who owns which page, and when it goes back."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import pickle
import signal
import threading
import weakref
from pathlib import Path

import pytest
import torch

from gdsload._native.memory import Pool, Region
from pagemap import PAGE, resident_pages

UNIT = 2 << 20
U8 = (1, 8)
TOO_MUCH = 1 << 60


def tensor_of(region: Region, offset: int, nbytes: int) -> torch.Tensor:
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(
        region.view(offset, nbytes, (nbytes,), *U8)
    )
    return tensor


@pytest.mark.parametrize("length", [1, PAGE, UNIT - 1, UNIT, UNIT + 1, 5 * UNIT])
def test_fresh_memory(length: int) -> None:
    region = Region.anonymous(length)
    assert region.address % UNIT == 0
    assert length <= region.length < length + UNIT
    assert region.references == 1
    assert region.read(length - 1, 1) == b"\0"
    assert resident_pages(region.address, region.length) <= 1, "address space, not memory"


def test_regions_do_not_use_up_the_mappings_of_a_process() -> None:
    """The kernel allows 65,530, and merges those that it treats alike."""

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    regions = [Region.anonymous(PAGE) for _ in range(200)]
    assert mappings() < before + len(regions) // 2


@pytest.mark.parametrize("length", [0, (1 << 64) - 1, -1])
def test_lengths_that_cannot_be(length: int) -> None:
    with pytest.raises((ValueError, OverflowError, MemoryError)):
        Region.anonymous(length)


def test_no_address_space() -> None:
    with pytest.raises(MemoryError, match=str(TOO_MUCH)):
        Region.anonymous(TOO_MUCH)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(UNIT + 1, 0), (0, UNIT + 1), (UNIT, 1), (1, UNIT), ((1 << 64) - 1, 2), (2, (1 << 64) - 1)],
)
def test_a_view_that_leaves_its_region(offset: int, nbytes: int) -> None:
    region = Region.anonymous(UNIT)
    with pytest.raises(ValueError, match="exceed"):
        region.view(offset, nbytes, (nbytes & 0xFF,), *U8)
    with pytest.raises(ValueError, match="exceed"):
        region.read(offset, nbytes)
    assert region.references == 1


def test_a_view_with_a_shape_that_is_none() -> None:
    region = Region.anonymous(UNIT)
    with pytest.raises((TypeError, OverflowError)):
        region.view(0, 4, (2, "x"), *U8)  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        region.view(0, 4, (1 << 63,), *U8)
    assert region.references == 1


def test_a_tensor_outlives_its_region() -> None:
    region = Region.anonymous(UNIT)
    tensor = tensor_of(region, 8, 100)
    assert tensor.data_ptr() == region.address + 8
    assert region.references == 2
    tensor.fill_(7)
    del region
    gc.collect()
    assert tensor.sum() == 700
    part = tensor[10:20]
    del tensor
    assert part.sum() == 70


def test_a_capsule_that_nobody_takes() -> None:
    region = Region.anonymous(UNIT)
    capsule = region.view(0, 100, (100,), *U8)
    assert region.references == 2
    del capsule
    assert region.references == 1


def test_a_capsule_is_taken_once() -> None:
    region = Region.anonymous(UNIT)
    capsule = region.view(0, 100, (100,), *U8)
    tensor = torch.utils.dlpack.from_dlpack(capsule)
    with pytest.raises(RuntimeError):
        torch.utils.dlpack.from_dlpack(capsule)
    del capsule
    assert region.references == 2
    assert tensor.sum() == 0
    del tensor
    assert region.references == 1


def test_pages_go_back_when_a_tensor_dies() -> None:
    """Its own whole pages, at once, and not one of its neighbours'."""
    region = Region.anonymous(UNIT)
    edges = [0, 100, 200_001, 400_000, 400_007, UNIT]
    tensors = [
        tensor_of(region, start, end - start).fill_(number + 1)
        for number, (start, end) in enumerate(itertools.pairwise(edges))
    ]
    assert resident_pages(region.address, UNIT) == UNIT // PAGE
    del tensors[1]  # 100 to 200_001
    assert resident_pages(region.address, UNIT) == UNIT // PAGE - 47
    assert resident_pages(region.address + PAGE, 47 * PAGE) == 0
    for number, tensor in zip((1, 3, 4, 5), tensors, strict=True):
        assert bool((tensor == number).all())
    del tensors[-1], tensor
    assert resident_pages(region.address, UNIT) < 60
    assert region.references == 4


def test_a_view_keeps_its_pages() -> None:
    region = Region.anonymous(UNIT)
    tensor = tensor_of(region, 0, UNIT).fill_(3)
    part = tensor[UNIT // 2 :].view(torch.int32)
    array = tensor.numpy()
    del tensor, part
    gc.collect()
    assert int(array.sum()) == 3 * UNIT
    del array
    assert resident_pages(region.address, UNIT) == 0


def test_dying_in_other_threads() -> None:
    region = Region.anonymous(64 * UNIT)
    for _ in range(5):
        tensors = [tensor_of(region, i * UNIT // 4, UNIT // 4) for i in range(256)]
        for tensor in tensors:
            tensor[0] = 1
        del tensor
        gate = threading.Barrier(4)

        def drop(mine: list[torch.Tensor], gate: threading.Barrier = gate) -> None:
            gate.wait()
            mine.clear()

        shares = [tensors[i::4] for i in range(4)]
        tensors.clear()
        threads = [threading.Thread(target=drop, args=(share,)) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert region.references == 1
        assert resident_pages(region.address, region.length) == 0


def test_a_tensor_in_a_cycle() -> None:
    region = Region.anonymous(UNIT)

    class Holder:
        def __init__(self) -> None:
            self.me = self
            self.tensor = tensor_of(region, 0, 100)

    gone = weakref.ref(Holder())
    gc.collect()
    assert gone() is None and region.references == 1


def test_only_its_bytes_are_saved() -> None:
    """Not the region: a storage is as large as its tensor."""
    region = Region.anonymous(8 * UNIT)
    tensor = tensor_of(region, 100, 1000).fill_(9)
    assert tensor.untyped_storage().nbytes() == 1000
    assert len(pickle.dumps(tensor)) < 3000
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    assert buffer.tell() < 5000
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), tensor)
    for twin in (copy.copy(tensor), copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert torch.equal(twin, tensor)
    deep = copy.deepcopy(tensor)
    deep.zero_()
    assert tensor.sum() == 9000
    shared = tensor.clone().share_memory_()
    assert torch.equal(shared, tensor)


def test_a_mapped_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 1024)
    fd = os.open(path, os.O_RDONLY)
    region = Region.file(fd, os.fstat(fd).st_size)
    os.close(fd)
    tensor, other = tensor_of(region, 0, 1 << 17), tensor_of(region, 1 << 17, 1 << 17)
    tensor.fill_(1)
    assert path.read_bytes() == bytes(range(256)) * 1024, "the file is never written to"
    assert other[:256].tolist() == list(range(256))
    assert region.references == 3
    del tensor
    again = tensor_of(region, 0, 1 << 17)
    assert bool((again == 1).all()), "a mapping keeps what was written; it is not given back"


def test_a_file_that_cannot_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    fd = os.open(tmp_path / "empty", os.O_RDONLY)
    with pytest.raises(OSError):
        Region.file(fd, 0)
    os.close(fd)
    with pytest.raises(OSError):
        Region.file(fd, 10)


def test_child_frees_pooled_memory_while_a_thread_of_the_parent_holds_the_pool() -> None:
    pool = Pool(1 << 40)
    idle = [pool.take(((number % 50) + 2) << 21) for number in range(16)]
    del idle
    kept: list[Region] = [pool.take(1 << 21)]
    ended = threading.Event()

    def churn() -> None:
        while not ended.is_set():
            pool.take(1 << 21)

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            child = os.fork()
            if child == 0:
                signal.alarm(60)  # ends it where it hangs
                kept.clear()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        ended.set()
        for thread in threads:
            thread.join()
