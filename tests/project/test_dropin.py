"""load_file and safe_open as replacements of safetensors: arguments, errors, the opened file.

If safetensors has the same feature, its result is the expected one."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError

import gdsload
from gdsload import errors, safetensors_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    tensors = {
        "a": torch.arange(50.0).reshape(10, 5),
        "b": torch.arange(6, dtype=torch.int16),
        "empty": torch.zeros(0, 5),
        "half": torch.arange(4, dtype=torch.bfloat16),
    }
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return file


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_backend_of_safetensors_chooses_the_io_mode(path: Path, backend: str) -> None:
    want = safetensors.torch.load_file(path)
    by_load_file = gdsload.load_file(path, backend=backend)
    mapped = {"mapped": gdsload.last_report().wanted_bytes}
    assert (gdsload.last_report().paths == mapped) is (backend == "mmap")
    paths = gdsload.last_report().paths
    assert not any(size for name, size in paths.items() if name.endswith("direct"))
    with gdsload.safe_open(path, framework="pt", backend=backend) as opened:
        by_safe_open = opened.get_tensors()
    targets = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    gdsload.load_into(targets, path, backend=backend)
    for got in (by_load_file, by_safe_open, targets):
        assert sorted(got) == sorted(want)
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_every_entry_point_knows_the_backends_of_safetensors(path: Path, backend: str) -> None:
    want = safetensors.torch.load_file(path)
    with gdsload.prefetch(path, backend=backend) as prefetch:
        assert prefetch.wait()
        got = gdsload.load_file(path, backend=backend)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    with gdsload.accelerated(backend=backend):
        got = safetensors.torch.load_file(path)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert ("mapped" in gdsload.last_report().paths) is (backend == "mmap")
    gdsload.install(backend=backend)
    gdsload.uninstall()
    got = dict(gdsload.stream(path, backend=backend))
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert asyncio.run(names_of(gdsload.astream(path, backend=backend))) == sorted(want)


async def names_of(tensors: AsyncIterator[tuple[str, torch.Tensor]]) -> list[str]:
    return sorted([name async for name, _ in tensors])


def test_backend_of_safetensors_contradicting_the_cache_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="backend='pread' reads by cache='buffered'"):
        gdsload.load_file(path, backend="pread", cache="direct")
    assert gdsload.load_file(path, backend="pread", cache="buffered")


def test_arguments_of_safetensors_are_accepted_by_name(path: Path) -> None:
    assert sorted(gdsload.load_file(filename=path, device="cpu")) == ["a", "b", "empty", "half"]
    with gdsload.safe_open(filename=path, framework="pt", device=None) as opened:
        assert opened.get_tensor("a").device == torch.device("cpu")
    assert "a" in gdsload.load_file(path, None)


@pytest.mark.parametrize("framework", ["tf", "jax", "flax", "mlx", "paddle", "nonsense"])
def test_framework_without_support_is_refused(path: Path, framework: str) -> None:
    for kind in (ValueError, SafetensorError):
        with pytest.raises(kind, match="gdsload gives torch or numpy tensors"):
            gdsload.safe_open(path, framework=framework)


# --- errors --------------------------------------------------------------------------------------

WRONG: dict[str, Callable[[Path], Any]] = {
    "tensor is not there": lambda path: gdsload.safe_open(path).get_tensor("gone"),
    "slice is not there": lambda path: gdsload.safe_open(path).get_slice("gone"),
    "name is not there": lambda path: gdsload.load_file(path, names=["gone"]),
    "backend is not there": lambda path: gdsload.load_file(path, backend="gone"),
    "device is not there": lambda path: gdsload.load_file(path, device="gone"),
    "file is truncated": lambda path: gdsload.load_file(cut_short(path)),
    "header is broken": lambda path: gdsload.safe_open(overwritten(path)),
}


def cut_short(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-1])
    return path


def overwritten(path: Path) -> Path:
    path.write_bytes(b"\x10" + bytes(7) + b"no JSON at all..")
    return path


@pytest.mark.parametrize("what", WRONG)
def test_error_is_also_a_safetensor_error(path: Path, what: str) -> None:
    with pytest.raises(SafetensorError) as caught:
        WRONG[what](path)
    error: Any = caught.value
    assert isinstance(error, gdsload.GdsloadError)
    assert type(error).__name__ in gdsload.__all__
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert (str(twin), vars(twin)) == (str(error), vars(error))


def test_error_after_the_handle_is_closed_is_a_safetensor_error(path: Path) -> None:
    with gdsload.safe_open(path) as opened:
        pass
    for use in (opened.keys, opened.offset_keys, opened.metadata, opened.get_tensors):
        with pytest.raises(SafetensorError, match="closed"):
            use()
    assert opened.__enter__() is opened


def test_missing_file_is_a_file_not_found_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("notafile", str(tmp_path / "gone.safetensors"), "./gone", ""):
        for use in (gdsload.safe_open, gdsload.load_file):
            with pytest.raises(FileNotFoundError) as caught:
                use(name)
            assert not isinstance(caught.value, SafetensorError)
            if name:
                with pytest.raises(FileNotFoundError) as theirs:
                    safetensors.safe_open(name, "pt")
                assert str(caught.value) == str(theirs.value)
    with pytest.raises(FileNotFoundError, match=r"^No such file or directory: adapters/gone, and "):
        gdsload.load_file("adapters/gone")


def test_error_imports_safetensors_only_when_raised() -> None:
    """safetensors is imported where an error is raised, not by gdsload."""
    code = (
        "import sys, gdsload\n"
        "try: gdsload.load_file(sys.argv[1])\n"
        "except gdsload.CheckpointError as error: caught = error\n"
        "from safetensors import SafetensorError\n"
        "print('torch' in sys.modules, isinstance(caught, SafetensorError))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, __file__], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["False", "True"]


def test_error_without_safetensors_keeps_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(gdsload.CheckpointError):
        pass

    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(Odd) as caught, errors.safetensors_errors():
        raise Odd("a file is broken")
    assert type(caught.value) is Odd


# --- slices of arrays ----------------------------------------------------------------------------

INDEXES: list[Any] = [
    slice(None), (), ..., 0, -1, slice(None, 2), (slice(None), slice(None, 2)), (0, slice(None, 2)),
    (slice(2, None), -5), [], slice(None, None, 2), slice(1, 9, 3), (..., 0), (0, ...), (0, 0),
    np.int64(3),
    # Refused
    10, -11, (slice(2, None), -6), [0, 1], (slice(2, None), 20), slice(None, 20), slice(20, None),
    slice(10, None), (slice(None), slice(None, 20)), (slice(8, 12), slice(1, 3)), slice(2, 30, 4),
    (slice(None), slice(5, None)), (0, 0, 0), (..., ...), None, "a", 1.5, (slice(0, 2), [0, 1]),
    slice(None, None, -1), slice(None, None, 0),
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_slice_of_an_array_equals_that_of_safetensors(path: Path, index: Any) -> None:
    with safetensors.safe_open(path, "np") as theirs, gdsload.safe_open(path, "np") as ours:
        try:
            want = theirs.get_slice("a")[index]
        except SafetensorError as error:
            with pytest.raises(SafetensorError) as caught:
                _ = ours.get_slice("a")[index]
            assert str(caught.value) == str(error)
            assert isinstance(caught.value, IndexError)
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(error)
        else:
            got = ours.get_slice("a")[index]
            assert type(got) is type(want)
            assert got.dtype == want.dtype
            assert np.array_equal(got, want)


def test_bfloat16_array_equals_that_of_safetensors(path: Path) -> None:
    """numpy has the dtype where ml_dtypes is imported."""
    with safetensors.safe_open(path, "np") as theirs, gdsload.safe_open(path, "np") as ours:
        try:
            want = theirs.get_tensor("half")
        except TypeError as error:
            with pytest.raises(TypeError) as caught:
                ours.get_tensor("half")
            assert str(caught.value) == f"{error} (tensor 'half')"
        else:
            got = ours.get_tensor("half")
            assert (got.dtype, got.tobytes()) == (want.dtype, want.tobytes())


# --- the handle ----------------------------------------------------------------------------------


def test_handle_cannot_be_copied_or_pickled(path: Path) -> None:
    with gdsload.safe_open(path) as opened:
        for item in (opened, opened.get_slice("a")):
            for use in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="cannot be copied or pickled"):
                    use(item)
        assert opened.get_tensor("b").tolist() == list(range(6))


def test_handle_is_true_and_not_iterable(tmp_path: Path) -> None:
    safetensors.torch.save_file({}, tmp_path / "none.safetensors")
    with gdsload.safe_open(tmp_path / "none.safetensors") as opened:
        assert opened
        with pytest.raises(TypeError):
            iter(opened)  # type: ignore[call-overload]


def test_slice_outlives_the_with_block(path: Path) -> None:
    def is_open() -> bool:
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return any(os.path.exists(link) and os.path.samefile(link, path) for link in links)

    with gdsload.safe_open(path, cache="buffered") as opened:
        first, second = opened.get_slice("a"), opened.get_slice("b")
    assert first[1:3].tolist() == torch.arange(5.0, 15.0).reshape(2, 5).tolist()
    del first
    assert second[:].tolist() == list(range(6))
    assert is_open()
    del second
    assert not is_open()
    with gdsload.safe_open(path, cache="buffered"):
        assert is_open()
    assert not is_open()


@pytest.mark.parametrize("cache", ["auto", "direct", "buffered", "mapped"])
def test_handle_used_by_several_threads_reads_right_bytes(tmp_path: Path, cache: str) -> None:
    file = tmp_path / "model.safetensors"
    want = {f"t{i}": torch.full((3000 + i,), i, dtype=torch.int32) for i in range(16)}
    safetensors.torch.save_file(want, file)
    wrong: list[str] = []
    together = threading.Barrier(4)
    interval = sys.getswitchinterval()

    def use(opened: gdsload.safe_open, first: int) -> None:
        try:
            together.wait(60)
            for turn in range(32):
                name = f"t{(first + turn) % 16}"
                part = opened.get_slice(name)[10:20]
                if not torch.equal(opened.get_tensor(name), want[name]):
                    wrong.append(name)
                if not torch.equal(part, want[name][10:20]):
                    wrong.append(f"{name}[10:20]")
        except BaseException as error:
            wrong.append(repr(error))

    sys.setswitchinterval(1e-6)
    try:
        with gdsload.safe_open(file, cache=cache) as opened:
            threads = [
                threading.Thread(target=use, args=(opened, first)) for first in (0, 0, 5, 10)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_handle_closed_during_a_read_waits_for_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing waits for a read of another thread, or comes before it."""
    opened = gdsload.safe_open(path)
    reading, closing = threading.Event(), threading.Event()
    load = safetensors_file.load

    def slow(*args: Any, **kwargs: Any) -> Any:
        reading.set()
        assert closing.wait(60)
        return load(*args, **kwargs)

    monkeypatch.setattr(safetensors_file, "load", slow)
    got: list[torch.Tensor] = []
    reader = threading.Thread(target=lambda: got.append(opened.get_tensor("b")))
    reader.start()
    assert reading.wait(60)
    closer = threading.Thread(target=opened.close)
    closer.start()
    closing.set()
    reader.join()
    closer.join()
    assert got[0].tolist() == list(range(6))
    with pytest.raises(gdsload.CheckpointError, match="closed"):
        opened.keys()


# --- replaced in safetensors and accelerate ------------------------------------------------------


def test_load_model_of_safetensors_reads_by_gdsload_when_accelerated(tmp_path: Path) -> None:
    """It passes its `backend` to load_file."""
    model, same = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    safetensors.torch.save_model(model, str(tmp_path / "linear.safetensors"))
    for backend in ("mmap", "pread"):
        with gdsload.accelerated():
            safetensors.torch.load_model(same, tmp_path / "linear.safetensors", backend=backend)
        report = gdsload.last_report()
        assert report.source == str(tmp_path / "linear.safetensors")
        assert backend == "mmap" or "mapped" not in report.paths
        assert torch.equal(same.weight, model.weight)
        same.reset_parameters()


def test_broken_model_is_a_safetensor_error(tmp_path: Path) -> None:
    import tinymodels

    tinymodels.build("qwen3").save_pretrained(tmp_path)
    cut_short(tmp_path / "model.safetensors")
    with pytest.raises(SafetensorError):
        gdsload.from_pretrained(tmp_path)
