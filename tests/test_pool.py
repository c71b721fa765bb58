"""Host memory kept between models: reused, bounded, and given back."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as reference_load_file

import gdsload
from gdsload import arena, synth, warmup
from gdsload._native.memory import Pool
from gdsload.arena import current_pool
from gdsload.errors import PlacementError

UNIT = 2 << 20
READ = {"cache": "buffered"}


@pytest.fixture(autouse=True)
def no_pool_stays() -> Iterator[None]:
    yield
    assert current_pool() is None


def test_a_region_is_taken_again() -> None:
    pool = Pool(4 * UNIT)
    region = pool.take(UNIT + 1)
    address = region.address
    assert (region.length, pool.held, pool.idle) == (2 * UNIT, 2 * UNIT, 0)
    del region
    assert (pool.held, pool.idle) == (2 * UNIT, 2 * UNIT)
    assert pool.take(2 * UNIT).address == address and pool.held == 2 * UNIT


def test_the_smallest_that_fits_is_taken_and_nothing_much_too_large() -> None:
    pool = Pool(32 * UNIT)
    large, fitting, small = pool.take(10 * UNIT), pool.take(5 * UNIT), pool.take(4 * UNIT)
    addresses = {region.length: region.address for region in (large, fitting, small)}
    del large, fitting, small
    assert pool.take(4 * UNIT).address == addresses[4 * UNIT]
    again = pool.take(4 * UNIT), pool.take(4 * UNIT)
    assert {region.address for region in again} == {addresses[4 * UNIT], addresses[5 * UNIT]}
    assert pool.take(UNIT).length == UNIT, "ten units for one would waste nine"


def test_the_least_recently_used_makes_room() -> None:
    pool = Pool(6 * UNIT)
    first, second = pool.take(2 * UNIT), pool.take(3 * UNIT)
    kept = second.address
    del first
    del second
    third = pool.take(UNIT)
    fourth = pool.take(2 * UNIT)  # the idle one of 3 is too large for it; that of 2 fits
    assert pool.held == 6 * UNIT
    fifth = pool.take(3 * UNIT)
    assert fifth.address == kept
    assert third.length + fourth.length + fifth.length == pool.held


def test_what_does_not_fit_is_not_the_pools() -> None:
    pool = Pool(2 * UNIT)
    held, beyond = pool.take(2 * UNIT), pool.take(UNIT)
    assert pool.held == held.length
    del beyond
    assert (pool.held, pool.idle) == (2 * UNIT, 0)
    assert pool.take(100 * UNIT).length == 100 * UNIT and pool.held == 2 * UNIT


def test_a_closed_pool_keeps_nothing() -> None:
    pool = Pool(4 * UNIT)
    used, idle = pool.take(UNIT), pool.take(UNIT)
    del idle
    pool.close()
    pool.close()
    assert (pool.held, pool.idle, pool.limit) == (UNIT, 0, 0)
    del used
    assert (pool.held, pool.idle) == (0, 0)


def test_a_tensor_outlives_its_pool(tiny_checkpoint: Path) -> None:
    with warmup.HostPool(64 * UNIT):
        got = gdsload.load_file(tiny_checkpoint, **READ)
    gc.collect()
    for file in tiny_checkpoint.glob("*.safetensors"):
        for name, tensor in reference_load_file(file).items():
            assert torch.equal(got[name], tensor)


def test_old_bytes_are_never_seen(tiny_checkpoint: Path, tmp_path: Path) -> None:
    other = synth.write("tiny", tmp_path / "other", seed=7)
    with warmup.HostPool(64 * UNIT) as pool:
        for directory in (tiny_checkpoint, other, tiny_checkpoint, other):
            with gdsload.prefetch(directory, **READ):
                got = gdsload.load_file(directory, **READ)
            for file in directory.glob("*.safetensors"):
                for name, tensor in reference_load_file(file).items():
                    assert torch.equal(got[name], tensor)
            del got
            gc.collect()
            assert pool.idle_bytes == pool.held_bytes > 0
        pool.trim()
        assert pool.held_bytes == 0


def region_bytes() -> int:
    """Bytes of this process's mappings that look like regions: private memory in whole units."""
    total = 0
    with open("/proc/self/maps") as lines:
        for line in lines:
            places, mode, _, _, inode, *_ = line.split()
            start, end = (int(place, 16) for place in places.split("-"))
            if mode == "rw-p" and inode == "0" and start % UNIT == end % UNIT == 0:
                total += end - start
    return total


def test_twenty_models_in_turn_grow_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    limit = 6 * UNIT
    names = list(gdsload.Checkpoint.open(tiny_checkpoint).tensors)
    seen: list[tuple[int, int, int]] = []
    with warmup.HostPool(limit) as pool:
        for number in range(20):
            directory = shutil.copytree(tiny_checkpoint, tmp_path / str(number))
            with gdsload.prefetch(directory, names=names[number % 3 :], **READ):
                model = gdsload.load_file(directory, **READ)
                assert pool.held_bytes <= limit
            del model
            gc.collect()
            seen.append((pool.held_bytes, len(os.listdir("/proc/self/fd")), region_bytes()))
    held, descriptors, mapped = zip(*seen[3:], strict=True)
    assert max(held) <= limit and len(set(descriptors)) == 1
    assert max(mapped) <= mapped[0] + limit, "twenty models would show"


def test_idle_memory_goes_when_the_machine_runs_short(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warmup.HostPool(64 * UNIT) as pool:
        gdsload.load_file(tiny_checkpoint, **READ).clear()
        gc.collect()
        assert pool.idle_bytes > 0
        monkeypatch.setattr(arena, "available_bytes", lambda: 0)
        with pytest.raises(PlacementError):
            gdsload.load_file(tiny_checkpoint, **READ)
        assert pool.held_bytes == 0


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError):
        warmup.HostPool(0)


def test_a_child_takes_nothing_from_its_parents_pool() -> None:
    with warmup.HostPool(UNIT):
        child = os.fork()
        if child == 0:
            os._exit(0 if current_pool() is None else 1)
        assert os.waitpid(child, 0)[1] == 0
