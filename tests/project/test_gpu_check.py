"""`make gpu-check` over doubles: verdicts of its rows, and its exit status."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gdsload
import gpudoubles
from devicetensors import device_tensor
from gdsload import api
from gdsload._native.cuda import Block
from gdsload.loading import device_batch
from gdsload.readahead import device_init
from gdsload.system import gpu
from gpudoubles import NEGATIVE, Doubles

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Doubles]:
    monkeypatch.setattr(device_batch, "empty", device_tensor)
    monkeypatch.setattr(api, "require_device", str)
    with gpudoubles.installed(monkeypatch, tmp_path / "root", patience=0) as doubles:
        yield doubles


def run(script: ModuleType, tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out.json"
    code = script.main([*more, "--json", str(out)])
    return code, json.loads(out.read_text())


def test_gpu_check_all_backends_are_exact(
    script: ModuleType,
    doubles: Doubles,
    tmp_path: Path,
    tiny_checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, facts = run(script, tmp_path, str(tiny_checkpoint))
    shown = capsys.readouterr().out
    assert code == 0, shown
    exact = [row["backend"] for row in facts["rows"] if row["verdict"] == "exact"]
    assert {"posix/threads", "gds_mt", "gds", "prefetch"} <= set(exact)
    assert all(row["left_bytes"] == 0 for row in facts["rows"] if row["verdict"] == "exact")
    refused = [row["backend"] for row in facts["rows"] if row["verdict"].startswith("refused")]
    assert refused == []
    assert facts["machine"]["gpu"]["name"] == "Double 0"
    assert "gds_mt/nvfs" in shown


def test_gpu_check_failing_backend_has_failed_row_and_exit_status(
    script: ModuleType, doubles: Doubles, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    doubles.fault("cuFileRead", NEGATIVE, 5044, times=-1)
    code, facts = run(script, tmp_path, str(tiny_checkpoint))
    assert code == 1
    (row,) = [row for row in facts["rows"] if row["backend"] == "gds_mt"]
    assert row["verdict"].startswith("FAILED: ") and "5044" in row["verdict"]


def test_gpu_check_unexpected_error_is_a_row_and_exit_keeps_earlier_rows(
    script: ModuleType,
    doubles: Doubles,
    tmp_path: Path,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unexpected error is a row; SystemExit loses only the rows after it."""
    real = script.check

    def check(label: str, *more: Any) -> dict[str, Any]:
        if label == "posix/linuxaio":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if label == "gds_mt":
            raise SystemExit(9)
        return dict(real(label, *more))

    monkeypatch.setattr(script, "check", check)
    with pytest.raises(SystemExit):
        run(script, tmp_path, str(tiny_checkpoint))
    facts = json.loads((tmp_path / "out.json").read_text())
    verdicts = {row["backend"]: row["verdict"] for row in facts["rows"]}
    assert verdicts["posix/threads"] == "exact" and "gds_mt" not in verdicts
    assert verdicts["posix/linuxaio"].startswith("FAILED: RuntimeError: CUDA error")
    assert facts["machine"]["gpu"]["name"] == "Double 0"


def test_gpu_check_hanging_row_ends_with_stacks(script: ModuleType, tiny_checkpoint: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import threading, gpu_check;"
        " from pathlib import Path;"
        " gpu_check.tried('gds', Path('x'), threading.Event().wait, 0.1)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 1
    assert "Timeout" in ran.stderr and "in wait" in ran.stderr


def test_gpu_check_leaked_memory_is_reported_but_not_driver_memory(
    script: ModuleType, doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that a driver allocates once is no leak; memory that every load leaves is one."""
    backend = ("posix/threads", "posix", {"engine": "threads"}, tiny_checkpoint, "cuda:0")
    doubles.cuda.cuda_double_residue(4 << 20)
    row = script.check(*backend)
    assert (row["verdict"], row["left_bytes"]) == ("exact", 0)
    doubles.cuda.cuda_double_residue(4 << 20)
    row = script.check_prefetch(tiny_checkpoint, "cuda:0")
    assert (row["verdict"], row["left_bytes"]) == ("exact", 0)

    left: list[Block] = []
    load_file = gdsload.load_file

    def careless(*words: Any, **more: Any) -> dict[str, torch.Tensor]:
        left.append(Block(gpu.device(0), 1 << 20))
        return load_file(*words, **more)

    monkeypatch.setattr(gdsload, "load_file", careless)
    row = script.check(*backend)
    assert row["verdict"].startswith("LEFT: ") and row["left_bytes"] >= 2 << 20


def test_gpu_check_unused_prefetch_is_a_failed_row(
    script: ModuleType, doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load did not take over its bytes, or they were read to host memory."""
    with monkeypatch.context() as patch:
        patch.setattr(device_init.DeviceInit, "reached", lambda *_: "cuda:1")
        row = script.check_prefetch(tiny_checkpoint, "cuda:0")
    assert row["verdict"].startswith("FAILED: the load read "), row["verdict"]

    def refused(self: device_init.DeviceInit) -> None:
        self.refusal = "the device is in use"

    monkeypatch.setattr(device_init.DeviceInit, "_run", refused)
    row = script.check_prefetch(tiny_checkpoint, "cuda:0")
    assert row["verdict"] == "FAILED: it went to host memory: the device is in use"


def test_gpu_check_differs_names_the_difference(script: ModuleType) -> None:
    one = {"a": torch.arange(4)}
    assert script.differs(one, {"a": torch.arange(4)}) == ""
    assert script.differs(one, {"a": torch.tensor([0, 1, 2, 4])}) == "a: other bytes"
    assert script.differs(one, {"a": torch.arange(4).int()}) == "a: torch.int64 (4,)"
    assert "other names" in script.differs(one, {})


def test_gpu_check_without_gpu_fails_with_reason(
    script: ModuleType, doubles: Doubles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--device", "cuda:9", "--json", str(tmp_path / "x")]) == 1
    assert "CUDA sees 2" in capsys.readouterr().err
