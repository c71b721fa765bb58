"""The contract of a backend, for all built-in backends and engines and that of the guide."""

from __future__ import annotations

import errno
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
from contract import BackendContract
from gdsload._native.first_touch import MODES
from gdsload._native.memory import Region
from gdsload.backends import DRAM, Backend, Memory, OpenFile, registry
from gdsload.backends.posix import PosixBackend, backend as backend_module, engines
from gdsload.backends.pump_request import PumpedRequest
from gdsload.planning.read_plan import Transfer

GUIDE = Path(__file__).parents[2] / "docs" / "writing-a-backend.md"


class PosixContract(BackendContract):
    engine = ""
    options: dict[str, Any] = {}  # noqa: RUF012

    def make(self) -> Backend:
        support = engines.try_engine(self.engine)
        if not support.usable:
            pytest.skip(f"engine {self.engine}: {support}")
        return PosixBackend(engine=self.engine, **self.options)


def suite(name: str, base: type, **facts: Any) -> type:
    return type(name, (base,), {**facts, "__module__": __name__})


for _engine in engines.ENGINES:
    for _direct in (True, False):
        _name = f"Test{_engine.title()}{'Direct' if _direct else 'Buffered'}"
        globals()[_name] = suite(_name, PosixContract, engine=_engine, direct=_direct)

TestDepthOfOne = suite("TestDepthOfOne", PosixContract, engine="threads", options={"depth": 1})
TestDeep = suite("TestDeep", PosixContract, engine="linuxaio", options={"depth": 200}, direct=True)
TestFixedBuffers = suite(
    "TestFixedBuffers",
    PosixContract,
    engine="uring",
    options={"fixed_buffers": "always"},
    direct=True,
)
for _pages in MODES:
    _name = f"TestPages{_pages.title()}"
    globals()[_name] = suite(
        _name, PosixContract, engine="threads", direct=True, options={"pages": _pages}
    )


def guide_backend() -> type[Backend]:
    """The backend of the guide, as a reader would copy it."""
    block = re.search(r"```python\n(import ctypes.*?)```", GUIDE.read_text(), re.DOTALL)
    assert block is not None
    found: dict[str, Any] = {"__name__": "guide"}
    exec(compile(block[1], str(GUIDE), "exec"), found)
    backend: type[Backend] = found["PlainBackend"]
    return backend


class TestGuide(BackendContract):
    def make(self) -> Backend:
        return guide_backend()()


def test_backend_of_the_guide_loads_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    registry.register_backend(guide_backend())
    tensors = {"a": torch.arange(3_000_000, dtype=torch.int32), "b": torch.ones(3)}
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(tensors, path)
    got = gdsload.load_file(path, backend="plain", cache="buffered")
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)
    report = gdsload.last_report()
    assert report.backend == "plain"
    assert report.paths == {"plain/buffered": report.read_bytes} and report.read_bytes > 12_000_000
    assert "plain" in registry.names()


def test_backend_without_direct_reads_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    registry.register_backend(guide_backend())
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"a": torch.arange(3_000_000, dtype=torch.int32)}, path)
    with pytest.raises(gdsload.BackendUnavailable, match=r"'plain': .*does no direct reads"):
        gdsload.load_file(path, backend="plain", cache="direct")
    monkeypatch.setattr("gdsload.loading.io_mode.page_cache.mostly_resident", lambda *_: False)
    got = gdsload.load_file(path, backend="plain")
    assert torch.equal(got["a"], torch.arange(3_000_000, dtype=torch.int32))
    report = gdsload.last_report()
    assert report.paths == {"plain/buffered": report.read_bytes} and report.read_bytes > 12_000_000
    assert report.refusals["direct I/O"] == "backend 'plain': it does no direct reads"


# The posix backend.


def test_last_settled_transfer_is_reported() -> None:
    """A read that settles during a check is reported before the request counts as finished."""

    class Native:
        settled, count, failed, posted, idle_seconds = 1, 2, 0, True, 0.0
        pump = backend_module.Pump(engines.engine_module("threads").engine(), 1)

        def take_settled(self) -> list[int]:
            found, self.settled = [0], 2
            return found

    request = object.__new__(PumpedRequest)
    request.backend, request.native = "posix", Native()  # type: ignore[assignment]
    assert not request.check().finished
    assert request.check().finished
    Native.pump.close(1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"request_bytes": 0},
        {"request_bytes": -4096},
        {"request_bytes": 5000},
        {"request_bytes": 1 << 32},
        {"depth": 0},
        {"ring_bytes": -1},
        {"depth": -1},
        {"depth": 1 << 20},
    ],
)
def test_impossible_settings_raise_value_error(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"request_bytes|depth|ring_bytes"):
        PosixBackend(**options)


@pytest.mark.parametrize("value", ["1M", 1.5e6, None])
def test_fractional_settings_raise_type_error(value: object) -> None:
    with pytest.raises(TypeError, match=r"ring_bytes=.* must be an integer"):
        PosixBackend(ring_bytes=value)


@pytest.mark.parametrize("value", ["Never", False, 0, None])
def test_unknown_fixed_buffers_raise_value_error(value: object) -> None:
    with pytest.raises(ValueError, match=r"fixed_buffers=.* must be one of auto, always, never"):
        PosixBackend(fixed_buffers=value)


def test_mapped_reads_without_threads_raise_backend_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine would fill a private copy of the mapping."""
    others = [name for name in engines.ENGINES[1:] if engines.try_engine(name).usable]
    if not others:
        pytest.skip("threads are the only engine here")
    opened: list[str] = []
    real = backend_module.Pump

    def pump(*facts: Any) -> Any:
        opened.append("")
        if len(opened) == 1:
            raise OSError(11, "Resource temporarily unavailable")
        return real(*facts)

    monkeypatch.setattr(backend_module, "Pump", pump)
    read = Transfer(0, 0, 4096, 4096, 0, 0, "mapped", 0)
    region = Region.anonymous(4096)
    with PosixBackend() as backend:
        assert "mapped" in backend.limits().io_modes
        file = backend.register(OpenFile(__file__, -1, 4096))
        memory = backend.register(Memory(DRAM, region.address, 4096, region))
        with pytest.raises(gdsload.BackendUnavailable, match="cannot fill mapped memory"):
            backend.prepare([read], [file], [memory])


def test_engine_whose_module_cannot_be_opened_now_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(engine: str) -> Any:
        raise ImportError("threads.so: cannot open shared object file: Too many open files")

    monkeypatch.setattr(engines, "_tried", {})
    with monkeypatch.context() as short:
        short.setattr(engines, "engine_module", refuse)
        assert "Too many open files" in str(engines.try_engine("threads"))
    assert engines.try_engine("threads").usable


@pytest.mark.parametrize("engine", ["warp", "aio"])
def test_unknown_engine_is_refused_and_the_others_are_named(engine: str) -> None:
    with pytest.raises(gdsload.BackendUnavailable, match="available: threads, uring, linuxaio"):
        PosixBackend(engine=engine)


def test_unopenable_engine_falls_back_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It worked when it was tried, and cannot be opened now."""
    for engine in engines.ENGINES:
        engines.try_engine(engine)
    with PosixBackend() as backend:
        first = backend.engine
        real = backend_module.Pump
        opened: list[str] = []

        def pump(capsule: object, *more: Any) -> Any:
            opened.append(backend.engine)
            if backend.engine == first:
                raise OSError(11, "Resource temporarily unavailable")
            return real(capsule, *more)

        monkeypatch.setattr(backend_module, "Pump", pump)
        assert backend.pump is not None
        assert opened[0] == first and backend.engine == opened[-1] != first
        assert "Resource temporarily" in backend.refusals[f"posix/{first}"]


@pytest.mark.parametrize(
    "engine,code,text,hint",
    [
        ("uring", errno.EPERM, "Operation not permitted", "io_uring_setup"),
        ("linuxaio", errno.EPERM, "Operation not permitted", ""),
        ("linuxaio", errno.EAGAIN, "Resource temporarily unavailable", "fs.aio-max-nr"),
        ("linuxaio", errno.EAGAIN, "no thread for the pump: Resource", "pids.max"),
        ("threads", errno.EAGAIN, "Resource temporarily unavailable", "pids.max"),
        ("uring", errno.EMFILE, "Too many open files", "ulimit -n"),
    ],
)
def test_hint_is_about_the_engine_that_did_not_open(
    engine: str, code: int, text: str, hint: str
) -> None:
    found = engines.unopened(engine, OSError(code, text)).hint
    assert hint in found if hint else not found


def test_temporary_refusal_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_tried", {})
    real = backend_module.Pump
    failing = [OSError(24, "Too many open files")]

    def pump(*facts: Any) -> Any:
        if failing:
            raise failing.pop()
        return real(*facts)

    monkeypatch.setattr(engines, "Pump", pump)
    assert "ulimit -n" in str(engines.try_engine("threads"))
    assert engines.try_engine("threads").usable


def test_engine_whose_trial_reads_nothing_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engines, "_tried", {})
    empty = tmp_path / "empty"
    empty.touch()
    module = SimpleNamespace(engine=engines.engine_module("threads").engine, __file__=str(empty))
    with monkeypatch.context() as patch:
        patch.setattr(engines, "engine_module", lambda _: module)
        assert "reads nothing" in str(engines.try_engine("threads"))
    assert engines.try_engine("threads").usable


def test_engine_without_memory_for_its_trial_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoMemory:
        @staticmethod
        def anonymous(nbytes: int) -> None:
            raise MemoryError("no address space (ulimit -v)")

    monkeypatch.setattr(engines, "_tried", {})
    with monkeypatch.context() as short:
        short.setattr(engines, "Region", NoMemory)
        assert "no address space" in str(engines.try_engine("threads"))
        for engine in ("threads", "linuxaio"):
            assert "ulimit -l" not in str(engines.try_engine(engine))
        with pytest.raises(gdsload.BackendUnavailable, match="cannot be opened: no address space"):
            PosixBackend()._first_engine(engines.ENGINES)
    assert engines.try_engine("threads").usable


def test_close_from_many_threads_returns() -> None:
    for _ in range(20):
        pump = backend_module.Pump(engines.engine_module("threads").engine(), 4)
        gate = threading.Barrier(4)

        def close(pump: Any = pump, gate: Any = gate) -> None:
            gate.wait()
            pump.close(5.0)

        threads = [threading.Thread(target=close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
