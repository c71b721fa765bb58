"""Loads of one file learn of one another."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gdsload.system import load_locks


@pytest.fixture
def descriptors(tmp_path: Path) -> Iterator[list[int]]:
    """Three of one file, each opened on its own."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    path.chmod(0o444)
    with ExitStack() as stack:
        found = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for _ in range(3)]
        for fd in found:
            stack.callback(os.close, fd)
        yield found


def test_load_alone_sees_no_other(descriptors: list[int]) -> None:
    assert not load_locks.announce(descriptors[0])
    assert not load_locks.others(descriptors[0])  # itself is no other
    assert load_locks.others(descriptors[1])  # which is no load


def test_loads_at_the_same_time_see_each_other(descriptors: list[int]) -> None:
    first, second, third = descriptors
    load_locks.announce(first)
    assert load_locks.announce(second)
    assert load_locks.announce(third)
    assert load_locks.others(first)


def test_load_that_ended_is_not_seen(descriptors: list[int]) -> None:
    first, second, _ = descriptors
    load_locks.announce(first)
    os.close(os.dup(first))
    assert load_locks.others(second)
    os.dup2(second, first)  # closes it
    assert not load_locks.announce(second)


def test_mapping_is_seen_as_long_as_it_lives(tmp_path: Path, descriptors: list[int]) -> None:
    with (tmp_path / "model.safetensors").open("rb") as file:
        load_locks.announce(file.fileno())
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with mapping:
        assert load_locks.others(descriptors[0])
    assert not load_locks.others(descriptors[0])


def test_load_of_a_process_that_died_is_not_seen(descriptors: list[int], tmp_path: Path) -> None:
    ends = (
        "import os, sys; from gdsload.system import load_locks;"
        " print(load_locks.announce(os.open(sys.argv[1], os.O_RDONLY)), flush=True); os._exit(0)"
    )
    load_locks.announce(descriptors[1])
    command = [sys.executable, "-c", ends, str(tmp_path / "model.safetensors")]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b"True\n"
    assert not load_locks.announce(descriptors[1])


def test_file_without_locks_is_read_alone(tmp_path: Path) -> None:
    with (tmp_path / "closed").open("wb") as file:
        fd = file.fileno()
    assert not load_locks.announce(fd)
    assert not load_locks.others(fd)
