"""The first load of a process: the modules that it imports, and torch only after the first read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

import gdsload
from devicetensors import raw
from gdsload.loading import device_batch, torch_device
from gdsload.report import last_report
from gpudoubles import Doubles

SMALL = {"ring_bytes": 1 << 20, "request_bytes": 64 << 10}
# Modules, or beginnings of their names, that a load of a warm file to the CPU does without.
UNUSED = (
    "dataclasses", "importlib.metadata", "psutil", "torch", "transformers",
    "gdsload._native.cuda", "gdsload._native.cufile",
    "gdsload._native.pump", "gdsload._native.stage", "gdsload.backends.auto",
    "gdsload.backends.cufile", "gdsload.backends.posix", "gdsload.backends.staging",
    "gdsload.loading.device_batch", "gdsload.loading.device_blocks",
    "gdsload.loading.torch_device",
    "gdsload.memory.device_buffers", "gdsload.memory.host_pool", "gdsload.memory.staging_ring",
    "gdsload.planning.layer_order",
    "gdsload.planning.tensor_slices", "gdsload.readahead", "gdsload.system.gpu",
)  # fmt: skip


def run(code: str, *words: str, tests: bool = False) -> list[str]:
    """The lines that a fresh interpreter prints; `tests`: it finds the modules of the tests."""
    path = str(Path(__file__).parents[1]) if tests else ""
    environment = {**os.environ, "PYTHONPATH": path} if tests else None
    ran = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_warm_load_to_the_cpu_imports_no_module_that_it_does_not_need(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.arange(4096)}, path)
    code = """
import sys
import gdsload.api
from gdsload.loading import batch
found = set(sys.modules)
import torch
before = set(sys.modules)
assert gdsload.load_file(sys.argv[1], cache="mapped")["a"][-1] == 4095
print(*sorted(found | (set(sys.modules) - before)), sep="\\n")
"""
    imported = run(code, str(path))
    assert "gdsload.api" in imported
    assert [name for name in imported if name.startswith(UNUSED)] == []


def test_after_torch_the_import_brings_what_a_load_needs(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.arange(4096)}, path)
    code = """
import sys
import torch
import gdsload
before = set(sys.modules)
assert gdsload.load_file(sys.argv[1], cache="buffered")["a"][-1] == 4095
assert gdsload.last_report().backend == "posix"
with gdsload.safe_open(sys.argv[1], "pt") as file:
    assert file.get_tensor("a")[-1] == 4095
print(*sorted(name for name in set(sys.modules) - before if name.startswith("gdsload")))
"""
    assert run(code, str(path)) == [""]


@pytest.mark.parametrize("driver", ["/dev/nvidiactl", "/dev/dxg", ""])
def test_after_torch_and_beside_a_driver_the_import_brings_what_a_load_to_a_gpu_needs(
    driver: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    code = """
import os, sys
from pathlib import Path
import pytest
import torch
exists = os.path.exists
os.path.exists = lambda path: path == sys.argv[1] if str(path).startswith("/dev/") else exists(path)
import gdsload
import gpudoubles
from devicetensors import device_tensor
from gdsload.loading import device_batch, torch_device
from gdsload.system import device_name
patch = pytest.MonkeyPatch()
patch.setattr(torch_device, "empty", device_tensor)
patch.setattr(device_name, "require_target", str)
before = set(sys.modules)
with gpudoubles.installed(patch, Path(sys.argv[2])):
    gdsload.load_file(sys.argv[3], "cuda:0")
new = sorted(name for name in set(sys.modules) - before if name.startswith("gdsload"))
print(len(new) if sys.argv[1] == "" else new)
"""
    (imported,) = run(code, driver, str(tmp_path / "root"), str(tiny_checkpoint), tests=True)
    assert imported == "[]" if driver else int(imported) > 5, imported


def test_after_torch_the_import_survives_a_module_that_fails() -> None:
    code = """
import sys
import torch
sys.modules["gdsload._native.ranges"] = None
import gdsload
try:
    gdsload.load_file
except ImportError as error:
    print(error.name)
"""
    assert run(code) == ["gdsload._native.ranges"]


def test_wrong_device_fails_after_the_first_read_was_posted(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.arange(4096)}, path)
    code = """
import sys
import gdsload
from gdsload.loading import whole_tensors
post = whole_tensors.post
def noted(*words, **named):
    batch = post(*words, **named)
    print("torch" in sys.modules)
    return batch
whole_tensors.post = noted
for device in ("cuda:7", "cuda", 0):
    try:
        gdsload.load_file(sys.argv[1], device)
    except gdsload.PlacementError as error:
        print(error)
"""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    posted, *errors = run(code, str(path))
    assert (posted, len(errors)) == ("False", 3)  # with torch, it is known before the first read
    for error in errors:
        assert "cannot be used" in error and "cuda" in error


def test_load_before_torch_reads_into_blocks(
    loading: Doubles, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    expected: dict[str, torch.Tensor] = {}
    for shard in sorted(tiny_checkpoint.glob("*.safetensors")):
        expected |= safetensors.torch.load_file(shard)
    monkeypatch.setattr(torch_device, "torch_imported", lambda: False)
    batches: list[type] = []
    real = device_batch.start

    def noted(*words: object) -> object:
        batches.append(type(batch := real(*words)))  # type: ignore[arg-type]
        return batch

    monkeypatch.setattr(device_batch, "start", noted)
    got = gdsload.load_file(tiny_checkpoint, "cuda:0", options=SMALL)
    assert batches == [device_batch.BlockBatch]
    assert last_report().wanted_bytes == sum(tensor.nbytes for tensor in expected.values())
    assert got.keys() == expected.keys()
    assert all(torch.equal(raw(got[name]), raw(tensor)) for name, tensor in expected.items())


def test_slices_read_into_blocks_keep_their_names(
    loading: Doubles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = {
        "a": torch.arange(9, dtype=torch.int32),
        "b": torch.empty(0, dtype=torch.int32),
        "c": torch.arange(20, 26, dtype=torch.int32),
    }
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    monkeypatch.setattr(torch_device, "torch_imported", lambda: False)
    got = gdsload.load_file(tmp_path, "cuda:0", slices={"a": slice(1, 3)}, options=SMALL)
    assert list(got) == ["a", "b", "c"]
    wanted = saved | {"a": saved["a"][1:3]}
    assert all(torch.equal(raw(got[name]), raw(tensor)) for name, tensor in wanted.items())


def test_single_file_is_opened_by_one_thread(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gdsload.system import parallel

    names: list[str] = []
    start = parallel.start_thread
    monkeypatch.setattr(parallel, "start_thread", lambda *w: names.append(w[1]) or start(*w))
    file = min(tiny_checkpoint.glob("*.safetensors"))
    with gdsload.Checkpoint.open(file) as checkpoint:
        assert len(checkpoint.shards) == len(names) == 1
