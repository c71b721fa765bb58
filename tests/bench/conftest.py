"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdsload.cli import measuring
from gdsload.memory import page_cache

cache, machine = measuring.program("cache"), measuring.program("machine")


@pytest.fixture(autouse=True)
def no_dropping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page cache belongs to everybody on this machine: here it is never dropped."""
    monkeypatch.setattr(page_cache, "drop_caches", lambda: False)


@pytest.fixture
def disk(tmp_path: Path) -> None:
    """Skips the test if its files are in memory, which no benchmark of cold files takes."""
    kind = machine.mount_of(tmp_path).get("filesystem")
    if kind in cache.IN_MEMORY:
        pytest.skip(f"{tmp_path} is on {kind}, which is memory: nothing there is ever cold")
