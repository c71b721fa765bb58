"""Small cold files, by pytest-benchmark: `python -m pytest benchmarks --benchmark-only`.

Not part of the tests: it says how long a load takes, never whether it is right. The steps of a load
are measured by parse.py and instructions.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gdsload import load_file
from gdsload.memory.page_cache import evict

pytest.importorskip("pytest_benchmark")


@pytest.mark.parametrize("mib", [1, 2, 4])
@pytest.mark.parametrize("cache", ["auto", "direct"])
def test_small_cold_file(benchmark: Any, tmp_path: Path, cache: str, mib: int) -> None:
    """`auto` reads a small file into the page cache, `direct` opens a backend for it."""
    path = tmp_path / "small.safetensors"
    save_file({str(n): torch.ones(mib << 14) for n in range(16)}, path)

    def make_cold() -> None:
        if evict(path):
            pytest.skip(f"{path}: its pages cannot be evicted (a file system in memory)")

    make_cold()
    rounds = {"setup": make_cold, "rounds": 20}
    loaded = benchmark.pedantic(load_file, (path,), {"cache": cache}, **rounds)
    assert len(loaded) == 16
