"""The memory that a load may take, and what other loads have not touched yet."""

from __future__ import annotations

import ctypes
import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import gdsload
from gated import gated
from gdsload._native.memory import Region
from gdsload.errors import PlacementError
from gdsload.system import available
from storage import is_full_of, save

MIB = 1 << 20
LIMIT = 1 << 30


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with so much memory left, whatever is taken of it."""
    gc.collect()
    monkeypatch.setattr(available, "_filling", [])
    monkeypatch.setattr(available, "_limits", lambda: iter([(LIMIT, "")]))


def test_memory_that_a_load_has_not_touched_is_not_available() -> None:
    region = Region.anonymous(600 * MIB)
    available.take_room({region: 600 * MIB}, 600 * MIB)
    assert available.available_bytes() == LIMIT - 600 * MIB
    with pytest.raises(PlacementError) as caught:
        available.require_room(500 * MIB)
    assert caught.value.missing_bytes == 140 * MIB
    ctypes.memset(region.address, 1, 200 * MIB)
    assert available.available_bytes() == LIMIT - 400 * MIB
    available.require_room(500 * MIB)
    available.filled([region])
    assert available.available_bytes() == LIMIT


def test_memory_that_nobody_has_is_available() -> None:
    region = Region.anonymous(600 * MIB)
    available.take_room({region: 600 * MIB}, 600 * MIB)
    del region
    assert available.available_bytes() == LIMIT


def test_memory_between_what_is_read_stays_available() -> None:
    region = Region.anonymous(600 * MIB)
    available.take_room({region: 600 * MIB}, 100 * MIB)
    assert available.available_bytes() == LIMIT - 100 * MIB
    ctypes.memset(region.address + 300 * MIB, 1, 40 * MIB)
    assert available.available_bytes() == LIMIT - 60 * MIB


def test_memory_is_not_looked_at_if_there_is_enough() -> None:
    region = Region.anonymous(600 * MIB)
    available.take_room({region: 600 * MIB}, 600 * MIB)
    ctypes.memset(region.address, 1, 600 * MIB)
    assert available.available_bytes(400 * MIB) == LIMIT - 600 * MIB
    assert available.available_bytes(500 * MIB) == LIMIT


def test_two_loads_do_not_find_the_same_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "m.safetensors", 7)
    room = available.SPARE_BYTES + 4_000_000  # of one load, and not of two
    monkeypatch.setattr(available, "_limits", lambda: iter([(room, "")]))
    words: dict[str, Any] = {"backend": "gated", "cache": "buffered"}
    with gated() as gate, ThreadPoolExecutor(1) as pool:
        first = pool.submit(gdsload.load_file, path, **words)
        gate.request()
        with pytest.raises(PlacementError, match="bytes are missing"):
            gdsload.load_file(path, **words)
        gate.open()
        assert is_full_of(first.result(), 7)
    del first
    assert gate.requests[0].memory, "the memory is known to somebody"
    assert available.available_bytes() == room


@pytest.mark.parametrize("path", ["/../other", "/a/../..", "", "/"])
def test_cgroup_above_the_root_has_the_limits_of_the_root(path: str) -> None:
    assert list(available._with_parents(path, "/sys/fs/cgroup"))[-1] == "/sys/fs/cgroup"
