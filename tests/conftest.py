"""What the tests share: small checkpoints, and the answer to whether there is a GPU."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from gdsload import synth


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of 0.66 MB in two shards; for reading only."""
    return synth.write("tiny", tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def tiny_moe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts of 0.76 MB in two shards; for reading only."""
    return synth.write("tiny-moe", tmp_path_factory.mktemp("checkpoints") / "tiny-moe")


@functools.cache
def why_no_gpu() -> str | None:
    """torch's own words on why CUDA cannot be used here; None where it can."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)
