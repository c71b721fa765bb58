"""What the tests share: small checkpoints, and the answer to whether there is a GPU."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpudoubles
from contract import BLOCK, SIZE, bytes_of
from gdsload.backends import OpenFile
from gdsload.loading import session
from gdsload.synthetic import checkpoints
from gpudoubles import Doubles

# A shell lets what it starts in the background ignore Ctrl-C, and so would these tests.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where this process and its children keep what they have measured, instead of the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def nothing_measured(cache_home: Path) -> None:
    """A test does not depend on the answers that another one has kept."""
    shutil.rmtree(cache_home / "gdsload", ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of 0.66 MB in two shards; for reading only."""
    return checkpoints.write("tiny", tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def tiny_moe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts of 0.76 MB in two shards; for reading only."""
    return checkpoints.write("tiny-moe", tmp_path_factory.mktemp("checkpoints") / "tiny-moe")


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Doubles]:
    """A GPU and a libcufile that are none. Tests of whole loads have one of their own."""
    with gpudoubles.installed(monkeypatch, tmp_path / "root") as doubles:
        yield doubles


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Doubles]:
    """The doubles for whole loads: torch knows nothing of them."""
    from devicetensors import device_tensor
    from gdsload import api
    from gdsload.loading import device_batch

    monkeypatch.setattr(device_batch, "empty", device_tensor)
    monkeypatch.setattr(api, "require_device", str)
    with gpudoubles.installed(monkeypatch, tmp_path / "root") as doubles:
        yield doubles


@pytest.fixture
def measuring(loading: Doubles, monkeypatch: pytest.MonkeyPatch) -> Doubles:
    """The same for loads that measure: as little as 256 KiB on each lane."""
    from gdsload.backends.auto import backend, benchmark

    monkeypatch.setattr(backend, "WORTH_CUFILE_BYTES", 1)
    monkeypatch.setattr(benchmark, "SAMPLE_BYTES", 256 << 10)
    return loading


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """4 MB in two files, in a place that does direct I/O."""
    import safetensors.torch
    import torch

    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(2):
        values = torch.arange(500_000, dtype=torch.int32) * (number + 1)
        safetensors.torch.save_file({f"{number}.a": values}, folder / f"model-{number}.safetensors")
    try:
        os.close(os.open(folder / "model-0.safetensors", os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"{tmp_path} takes no O_DIRECT: {error.strerror}")
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Iterator[OpenFile]:
    """A file whose bytes say where they are."""
    path = tmp_path / "0.bin"
    path.write_bytes(bytes_of(0))
    fd = os.open(path, os.O_RDONLY)
    yield OpenFile(str(path), fd, SIZE, -1, BLOCK)
    os.close(fd)


@functools.cache
def why_no_gpu() -> str | None:
    """torch's own words on why CUDA cannot be used here; None where it can."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return None


def pytest_collection_finish() -> None:
    """What was imported stays: where a test asks for what is garbage, that is not looked through
    again. With torch and transformers each time took a third of a second."""
    take_imports_for_old()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for what a test has imported, and at the end of a file, whose tests may thaw all."""
    if nextitem is None or nextitem.path != item.path or len(sys.modules) > _modules + 100:
        take_imports_for_old()


_modules = 0


def take_imports_for_old() -> None:
    global _modules
    gc.collect()
    gc.freeze()
    _modules = len(sys.modules)


def pytest_unconfigure() -> None:
    """Compiled modules complain of what is still there when the interpreter ends."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)


@pytest.fixture
def claimed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a load has claimed something."""
    event, real = threading.Event(), session.claim_ranges

    def claim(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        if found[0]:
            event.set()
        return found

    monkeypatch.setattr(session, "claim_ranges", claim)
    return event
