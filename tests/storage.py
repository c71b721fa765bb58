"""Helpers of tests with real faults: files filled with one value, and a process of its own."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import safetensors.torch
import torch

import forked
from gdsload.backends.posix import engines
from gdsload.memory import page_cache
from gdsload.system.mountinfo import mount_of
from waiting import wait_for

ENGINES = [engine for engine in engines.ENGINES if engines.try_engine(engine).usable]
SMALL = {"request_bytes": 16384, "depth": 2}
MAP_LOCKED = 0x2000


def save(path: Path, value: int) -> Path:
    """Writes 2.4 MB: eight tensors filled with one value."""
    tensors = {f"t{i}": torch.full((75_000,), value, dtype=torch.int32) for i in range(8)}
    safetensors.torch.save_file(tensors, path)
    return path


def is_full_of(tensors: dict[str, torch.Tensor], value: int) -> bool:
    return len(tensors) == 8 and all(bool((tensor == value).all()) for tensor in tensors.values())


def make_cold(*files: Path) -> None:
    """Evicts files from the page cache. Skips the test on a filesystem in memory."""
    for file in files:
        left, mount = page_cache.evict(file), mount_of(file)
        if left and mount is not None and mount.kind in ("tmpfs", "ramfs", "overlay"):
            pytest.skip(f"{file}: its pages cannot be evicted from a filesystem in memory")
        wait_for(lambda file=file: not page_cache.evict(file), f"{file}: its pages stay")  # type: ignore[misc]


def pass_a_tick(path: Path) -> None:
    """Waits until a change is visible: some kernels use a clock of 4 ms for files."""
    scratch = path.with_name("scratch")
    opened = path.stat().st_ctime_ns
    scratch.touch()
    while scratch.stat().st_ctime_ns <= opened:
        scratch.touch()


@contextmanager
def kept_warm(*files: Path, offset: int = 0, length: int = 0) -> Iterator[None]:
    """Keeps these files, or a range of them, in the page cache, also while the machine is short of
    memory."""
    with ExitStack() as stack:
        for file in files:
            with open(file, "rb") as opened:
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                with suppress(OSError):  # above the limit of locked memory: read at least
                    stack.enter_context(
                        mmap.mmap(
                            opened.fileno(),
                            length,
                            flags | MAP_LOCKED,
                            mmap.PROT_READ,
                            offset=offset,
                        )
                    )
                os.pread(opened.fileno(), length or file.stat().st_size, offset)
        yield


def python(program: str, *args: object) -> str:
    """Runs a program in a new process and returns its output."""
    ran = forked.run(program, *args)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()
