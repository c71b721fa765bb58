"""Fixtures of all tests: small checkpoints, doubles of CUDA and cuFile, the check for a GPU."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import compiled
import gpudoubles
from contract import BLOCK, SIZE, bytes_of
from gated import Gate, gated
from gdsload.backends import OpenFile
from gdsload.loading import page_cache_fill, session
from gdsload.readahead import prefetch
from gdsload.synthetic import checkpoints
from gpudoubles import Doubles
from object_server import ANONYMOUS, ObjectServer, serving

# A process that a shell starts in the background ignores Ctrl-C, and so would these tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine takes longer than any limit for one example.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_configure() -> None:
    """Before other processes of pytest start, so that they share what is compiled."""
    folder = tempfile.gettempdir()
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise pytest.UsageError(f"{folder} is mounted noexec: set TMPDIR to another directory")
    compiled.folder()


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache directory of this process and its children, in place of the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def no_proxy() -> Iterator[None]:
    """The servers of the tests are on loopback, where no proxy leads."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ]:
            if name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
                patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def nothing_measured(cache_home: Path) -> None:
    """Clears the tuning cache: no test depends on the measurements of another one."""
    shutil.rmtree(cache_home / "gdsload", ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def prefetches_end() -> Iterator[None]:
    """A prefetch that was closed has ended, also on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "_CLOSE_SECONDS", 120.0)
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of 0.66 MB in two shards; for reading only."""
    return checkpoints.write("tiny", tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def tiny_moe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts of 0.76 MB in two shards; for reading only."""
    return checkpoints.write("tiny-moe", tmp_path_factory.mktemp("checkpoints") / "tiny-moe")


@pytest.fixture
def object_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """A stand-in for object stores that serves `tmp_path / "bucket"`; the clients of s3, gs and az
    find it by environment variables."""
    root = tmp_path / "bucket"
    root.mkdir()
    with serving(root) as server:
        for scheme in ANONYMOUS:
            for name, value in server.environment(scheme).items():
                monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Registers the backend "gated", whose reads complete when the test lets them."""
    with gated() as gate:
        yield gate


@pytest.fixture(autouse=True, scope="session")
def long_read_ahead() -> Iterator[None]:
    """Loads fill the page cache also where this kernel, or this disk, reads too little ahead."""
    real, least = page_cache_fill.read_ahead_bytes, page_cache_fill.least_read_ahead()

    def read_ahead_bytes(*where: Any) -> int | None:
        found = real(*where)
        return found if found is None else max(found, least)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_cache_fill, "read_ahead_bytes", read_ahead_bytes)
        yield


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Doubles]:
    """Doubles of a GPU and of libcufile. Tests of whole loads use `loading`."""
    with gpudoubles.installed(monkeypatch, tmp_path / "root") as doubles:
        yield doubles


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Doubles]:
    """The doubles for whole loads, with device tensors that are not torch's."""
    from devicetensors import device_tensor
    from gdsload.loading import torch_device
    from gdsload.system import device_name

    monkeypatch.setattr(torch_device, "empty", device_tensor)
    monkeypatch.setattr(device_name, "require_target", str)
    with gpudoubles.installed(monkeypatch, tmp_path / "root") as doubles:
        yield doubles


@pytest.fixture
def measuring(loading: Doubles, monkeypatch: pytest.MonkeyPatch) -> Doubles:
    """The same for loads that run the benchmark of `auto`, with samples of 256 KiB."""
    from gdsload.backends.auto import backend, benchmark

    monkeypatch.setattr(backend, "WORTH_CUFILE_BYTES", 1)
    monkeypatch.setattr(benchmark, "SAMPLE_BYTES", 256 << 10)
    return loading


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """4 MB in two files of whole blocks, on a filesystem with direct I/O."""
    import safetensors.torch
    import torch

    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(2):
        values = torch.arange((488 * BLOCK - 80) // 4, dtype=torch.int32)  # after 80 of the header
        path = folder / f"model-{number}.safetensors"
        safetensors.torch.save_file({f"{number}.a": values * (number + 1)}, path)
        assert path.stat().st_size == 488 * BLOCK
    try:
        os.close(os.open(folder / "model-0.safetensors", os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"{tmp_path} does not support O_DIRECT: {error.strerror}")
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Iterator[OpenFile]:
    """A file whose bytes encode their offsets."""
    path = tmp_path / "0.bin"
    path.write_bytes(bytes_of(0))
    fd = os.open(path, os.O_RDONLY)
    yield OpenFile(str(path), fd, SIZE, -1, BLOCK)
    os.close(fd)


@functools.cache
def why_no_gpu() -> str | None:
    """Why torch cannot use CUDA here; None if it can."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests run first, so that none of them is left for one process at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Freezes imported objects: with torch and transformers, each collection that a test asks for
    would take a third of a second."""
    freeze_imports()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freezes the imports of a test, and again after a file, whose tests may have unfrozen them."""
    if nextitem is None or nextitem.path != item.path or len(sys.modules) > _modules + 100:
        freeze_imports()


_modules = 0


def freeze_imports() -> None:
    global _modules
    gc.collect()
    gc.freeze()
    _modules = len(sys.modules)


def pytest_unconfigure() -> None:
    """Compiled modules report objects that still exist when the interpreter exits."""
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


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The cycle collector does not run: what is freed was in no cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
