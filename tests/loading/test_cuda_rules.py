"""Rules of a real CUDA driver that the double enforces: which memory it pins, which calls it allows
while a graph is captured, and what must be freed before it shuts down.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import gdsload
import gpudoubles
from contract import bytes_of
from devicetensors import TorchCuda, device_tensor
from gdsload._native.cuda import Block
from gdsload.backends import DRAM, Backend, OpenFile
from gdsload.backends.posix import PosixBackend
from gdsload.errors import PlacementError
from gdsload.integrations.transformers.model_reader import ModelReader, Options
from gdsload.loading import device_batch, torch_device
from gdsload.loading.batch import assembled
from gdsload.loading.torch_memory import copied, moved
from gdsload.memory import staging_ring
from gdsload.planning.tensor_slices import TensorSlice
from gdsload.report import LoadReport
from gdsload.system import gpu
from gpudoubles import CODE, Doubles
from gpuloads import KINDS, SMALL, Load, settle
from storage import ENGINES

NOT_PERMITTED = 800


@pytest.mark.parametrize("engine", ENGINES)
def test_ring_whose_memory_cannot_be_pinned_is_allocated_by_the_driver(
    doubles: Doubles, file: OpenFile, engine: str
) -> None:
    """As in a sandbox, or on a confidential machine."""
    before = doubles.cuda_log["pins"]
    doubles.fault("cuMemHostRegister_v2", CODE, NOT_PERMITTED, times=-1)
    with PosixBackend(engine=engine, **SMALL) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        assert "cannot be pinned" in backend.refusals["posix/ring"]
        settle(backend, load)
    assert doubles.cuda_log["pins"] == before + 1
    assert staging_ring.release_rings() == 1 << 20
    assert doubles.cuda_log["pins"] == before


@pytest.mark.parametrize("kind", KINDS)
def test_load_while_another_thread_captures_a_graph_does_not_break_it(
    kind: type[Backend], doubles: Doubles, file: OpenFile
) -> None:
    """Allocating memory or querying an event breaks the capture, unless the calling thread has
    relaxed its capture mode. The double reports it."""
    doubles.capture_graphs(True)
    with kind(**SMALL) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert load.bytes() == bytes_of(0)
        settle(backend, load)
    staging_ring.release_rings()
    assert doubles.complaints() == ""
    doubles.capture_graphs(False)


@pytest.mark.parametrize("is_large", [False, True])
def test_allocations_of_torch_do_not_break_a_graph_of_another_thread(
    is_large: bool, loading: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch relaxes its allocations only while the thread that loads captures a graph itself."""
    if is_large:  # one block for all tensors first
        monkeypatch.setattr(torch_device, "WHOLE_BYTES", 1)
        monkeypatch.setattr(torch_device, "_SMALL_BYTES", 1)
    gpu.device(0)
    loading.capture_graphs(True)
    tensors = gdsload.load_file(tiny_checkpoint, "cuda:0", options=SMALL)
    assert loading.complaints() == ""
    with pytest.raises(RuntimeError, match="900"):
        device_tensor((1,), torch.uint8, "cuda:0")
    loading.capture_graphs(False)
    loading.cuda.double_clear()
    assert tensors


def test_copies_of_tensors_do_not_break_a_graph_of_another_thread(
    loading: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tensor:
        is_cpu, device, nbytes = False, "cuda:0", 16

        def clone(self) -> torch.Tensor:
            return device_tensor((16,), torch.uint8, self.device)

        def to(self, device: str) -> torch.Tensor:
            return device_tensor((16,), torch.uint8, device)

    tensor = cast(torch.Tensor, Tensor())
    # The backend cannot read to a device. Another one reads to the host if CUDA cannot be used.
    monkeypatch.setattr(device_batch, "reaches", lambda backend, kind: kind == DRAM)
    assert device_batch.read_device("cuda:0", "plugin") == "cpu"
    loading.capture_graphs(True)
    copied(tensor)
    moved(tensor, "cuda:0")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "stack", lambda parts: device_tensor((32,), torch.uint8, "cuda:0"))
        assembled(TensorSlice("w[:, :4]", ()), [tensor, tensor])
    assert loading.complaints() == ""
    loading.capture_graphs(False)


class OnDevice(torch.Tensor):
    """A tensor of the double that torch knows as one of a GPU. A copy to it takes memory there."""

    is_cuda, is_cpu, device = True, False, torch.device("cuda:0")  # type: ignore[assignment]

    def copy_(self, *source: Any) -> torch.Tensor:
        device_tensor((1,), torch.uint8, "cuda:0")
        return super().copy_(*source)


@pytest.fixture
def on_device(
    loading: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    """Targets for a checkpoint, by way of the host: the backend reads nowhere else."""
    monkeypatch.setattr(device_batch, "reaches", lambda backend, kind: kind == DRAM)
    monkeypatch.setattr(torch_device, "_torch_cuda", TorchCuda)
    return {
        name: device_tensor(tensor.shape, tensor.dtype, "cuda:0").fill_(0).as_subclass(OnDevice)
        for name, tensor in gdsload.load_file(tiny_checkpoint).items()
    }


def test_load_into_a_gpu_by_way_of_the_host_reads_nothing_while_a_graph_is_captured(
    on_device: dict[str, torch.Tensor], loading: Doubles, tiny_checkpoint: Path
) -> None:
    loading.capture_stream(True)
    with pytest.raises(PlacementError, match="a CUDA graph is being captured"):
        gdsload.load_into(on_device, tiny_checkpoint, backend="posix")
    loading.capture_stream(False)
    assert not gdsload.last_report().paths, "something was read"
    assert not any(tensor.any() for tensor in on_device.values())


def test_load_into_a_gpu_by_way_of_the_host_does_not_break_a_graph_of_another_thread(
    on_device: dict[str, torch.Tensor], loading: Doubles, tiny_checkpoint: Path
) -> None:
    loading.capture_graphs(True)
    gdsload.load_into(on_device, tiny_checkpoint, backend="posix")
    assert loading.complaints() == ""
    loading.capture_graphs(False)
    for name, tensor in gdsload.load_file(tiny_checkpoint).items():
        assert torch.equal(on_device[name], tensor)


def test_file_that_transformers_opens_for_a_gpu_does_not_break_a_graph_of_another_thread(
    loading: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to(tensor: torch.Tensor, device: object) -> torch.Tensor:
        return device_tensor(tensor.shape, tensor.dtype, f"cuda:{device}")

    report = LoadReport("tiny")
    files = [str(path) for path in tiny_checkpoint.glob("*.safetensors")]
    with ModelReader(files, Options(), report) as reader:
        opened = reader.opened(0)
        loading.capture_graphs(True)
        monkeypatch.setattr(torch.Tensor, "to", to)
        assert opened.get_tensor(opened.keys()[0]).is_contiguous()
    assert loading.complaints() == ""
    loading.capture_graphs(False)


def test_driver_that_only_torch_can_use_is_not_asked_about_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_device, "_torch_cuda", TorchCuda)
    monkeypatch.setattr(gpu, "why_not", lambda device: "this CUDA driver is too old")
    monkeypatch.setattr(gpu, "device", lambda ordinal: pytest.fail("it was asked"))
    torch_device.require_no_capture("cuda:0")


def test_freed_tensor_while_a_graph_is_captured_does_not_break_it(doubles: Doubles) -> None:
    device = gpu.device(0)
    free = device.memory()[0]
    doubles.capture_graphs(True)
    block = Block(device, 1 << 20)
    assert device.memory()[0] < free
    del block
    assert device.memory()[0] == free
    assert doubles.complaints() == ""
    doubles.capture_graphs(False)


AT_THE_END = """
import ctypes, sys, gdsload
from gdsload.system import shared_libraries as libraries
libraries.candidates = lambda name: [sys.argv[2]]
ctypes.CDLL(sys.argv[2]).cuda_double_report()
options = {"ring_bytes": 16 << 20}
with gdsload.prefetch(sys.argv[1], "cuda:0", backend="posix", options=options) as ahead:
    assert ahead.wait(120)
    assert ahead.report.refusals.get("cuda:0") is None
assert gdsload.memory.staging_ring.rings()
"""


def test_process_exit_leaves_no_thread_and_no_pinned_memory(tiny_checkpoint: Path) -> None:
    """No thread calls the driver while it shuts down, and no pinned memory is unmapped."""
    driver = gpudoubles.built("cuda_double")
    ran = subprocess.run(
        [sys.executable, "-c", AT_THE_END, tiny_checkpoint, driver],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0
    assert ran.stderr.startswith("left: 0 streams, 0 events, 0 pins"), ran.stderr
