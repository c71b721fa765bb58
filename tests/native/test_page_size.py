"""Pages that are not of 4 KiB: whatever works on pages, under a preloaded library that follows
the rules of a kernel with 64 KiB pages (`doubles/pages_shim.c`)."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from gpudoubles import built

# No torch: a capsule of its own stands for a tensor, and dies like one.
PROGRAM = """
import errno, json, mmap, os, sys
from gdsload.memory import page_cache as residency
from gdsload._native import system
from gdsload._native.memory import Region

K = 1 << 10
said = {"page": mmap.PAGESIZE}

def dies(start, length):
    '''What the neighbours hold after a tensor in the middle of them has died.'''
    region = Region.anonymous(1 << 20)
    with open("/proc/self/mem", "wb", 0) as memory:
        memory.seek(region.address)
        memory.write(b"7" * (1 << 20))
    region.view(start, length, (length,), 1, 8)
    held = region.read(0, 1 << 20)
    return [held[:start].count(b"7"), held[start:start + length].count(b"7"),
            held[start + length:].count(b"7")]

said["begins on a page"] = dies(128 * K, 68 * K)
said["ends on a page"] = dies(124 * K, 68 * K)
said["inside a page"] = dies(132 * K, 80 * K)
said["whole pages"] = dies(128 * K, 128 * K)

fd = os.open(sys.argv[1], os.O_RDWR)
size = os.fstat(fd).st_size
said["size"] = size
os.pread(fd, size, 0)

def asked(call, *args):
    try:
        return call(*args)
    except OSError as error:
        return os.strerror(error.errno)

said["cachestat"] = asked(residency.resident_bytes, fd)

def refused(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

system.cachestat = refused
said["mincore"] = asked(residency.resident_bytes, fd)
said["mincore of a part"] = asked(residency.resident_bytes, fd, 68 * K, 4 * K)
said["mincore pages"] = asked(system.mincore_pages, fd, 0, size)
said["warm"] = residency.wholly_resident(fd, 68 * K, 4 * K)
said["left"] = asked(residency.evict, sys.argv[1])
said["cold"] = asked(residency.resident_bytes, fd)
print(json.dumps(said))
"""
SIZE = (1 << 20) + 100


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program found, with 64 KiB pages and memory from malloc that is full of ones."""
    path = tmp_path_factory.mktemp("pages") / "file"
    path.write_bytes(os.urandom(SIZE))
    environment = {**os.environ, "LD_PRELOAD": str(built("pages_shim")), "MALLOC_PERTURB_": "2"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, path],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    assert found["page"] == 65536, "the library was not preloaded"
    return found


@pytest.mark.parametrize(
    ("tensor", "start", "length", "kept"),
    [
        ("begins on a page", 128, 68, 4),
        ("ends on a page", 124, 68, 4),
        ("inside a page", 132, 80, 80),
        ("whole pages", 128, 128, 0),
    ],
)
def test_freed_tensor_keeps_the_bytes_of_its_neighbours(
    seen: dict[str, Any], tensor: str, start: int, length: int, kept: int
) -> None:
    before, inside, behind = seen[tensor]
    assert before == start << 10
    assert behind == (1 << 20) - ((start + length) << 10)
    assert inside == kept << 10, "pages that are its own go back, and no others"


@pytest.mark.parametrize("call", ["cachestat", "mincore"])
def test_warm_file_counts_as_warm(seen: dict[str, Any], call: str) -> None:
    if call == "cachestat" and seen[call] == os.strerror(errno.ENOSYS):
        pytest.skip("this kernel has no cachestat")
    assert seen[call] == SIZE


def test_warm_range_inside_a_page_counts_as_warm(seen: dict[str, Any]) -> None:
    assert seen["mincore of a part"] == 4 << 10
    assert seen["warm"]


def test_mincore_counts_no_entry_that_the_kernel_did_not_write(seen: dict[str, Any]) -> None:
    assert seen["mincore pages"] == 17


def test_cold_file_counts_as_cold(seen: dict[str, Any]) -> None:
    if seen["left"]:
        pytest.skip("its pages cannot be evicted (a file system in memory)")
    assert seen["cold"] == 0
