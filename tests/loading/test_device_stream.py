"""`stream` and `safe_open` to a GPU, over a double: exact bytes, bounded memory, joined copies."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
import gpudoubles
from devicetensors import (
    BACKENDS,
    Allocator,
    Block,
    TorchCuda,
    device_tensor,
    memory_stats,
    raw,
)
from gdsload import safetensors_file
from gdsload._native.cuda import Cuda, Device
from gdsload.backends import host_copies
from gdsload.backends.cufile.gds import GdsBackend
from gdsload.backends.cufile.gds_mt import GdsMtBackend
from gdsload.backends.posix import PosixBackend
from gdsload.errors import PlacementError
from gdsload.integrations.transformers.readahead_queue import ReadaheadQueue
from gdsload.loading import device_batch, torch_device
from gdsload.loading.session import Session
from gdsload.loading.settings import ReadSettings
from gdsload.memory import late_copies, staging_ring
from gdsload.planning.tensor_slices import whole
from gdsload.report import LoadReport
from gdsload.system import gpu
from gpudoubles import CODE, Doubles
from gpuloads import PATIENCE_SECONDS
from waiting import wait_for


@pytest.fixture
def doubles(loading: Doubles) -> Doubles:
    return loading


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for shard in sorted(tiny_checkpoint.glob("*.safetensors")):
        found |= safetensors.torch.load_file(shard)
    return found


Backends = {"posix": PosixBackend, "gds": GdsBackend, "gds_mt": GdsMtBackend}


def on_device(doubles: Doubles, tensor: torch.Tensor) -> bool:
    return bool(doubles.cuda.cuda_double_is_device(tensor.data_ptr(), tensor.nbytes))


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_stream_to_device_returns_exact_bytes_in_bounded_memory(
    backend: str,
    options: dict[str, Any],
    doubles: Doubles,
    tiny_checkpoint: Path,
    expected: dict[str, torch.Tensor],
) -> None:
    """The device never holds more than two windows and the ring."""
    names: list[str] = []
    before = doubles.cuda_log["used"]  # by other tests' tensors, that nothing has collected yet
    list(gdsload.stream(tiny_checkpoint, "cuda:0", backend=backend, options=options, names=[]))
    window = max(tensor.nbytes for tensor in expected.values())
    for name, tensor in gdsload.stream(
        tiny_checkpoint,
        "cuda:0",
        backend=backend,
        options=options,
        window_bytes=window,
        order="layers",
    ):
        assert on_device(doubles, tensor)
        assert torch.equal(raw(tensor), raw(expected[name]))
        assert doubles.cuda_log["used"] - before <= (2 << 20) + 2 * window
        names.append(name)
        del tensor
    assert set(names) == expected.keys()
    report = gdsload.last_report()
    used = {path.partition("/")[0] for path, size in report.paths.items() if size}
    assert used == {backend}
    assert [made.nbytes for made in staging_ring.rings()] == [1 << 20]


def test_stream_closed_early_frees_device_memory(doubles: Doubles, tiny_checkpoint: Path) -> None:
    before = doubles.cuda_log["used"]
    for _ in range(3):
        stream = gdsload.stream(
            tiny_checkpoint,
            "cuda:0",
            backend="gds_mt",
            options=BACKENDS[2][1],
            window_bytes=1 << 16,
        )
        next(stream)
        stream.close()

    def freed() -> bool:
        staging_ring.release_rings()
        gc.collect()
        return doubles.cuda_log["used"] <= before

    wait_for(freed)  # reads that were under way may end later


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_safe_open_on_device_returns_exact_tensors_and_slices(
    backend: str,
    options: dict[str, Any],
    doubles: Doubles,
    tiny_checkpoint: Path,
    expected: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch's own copy of a tensor of the double would be on the CPU.
    monkeypatch.setattr(safetensors_file, "copied", lambda tensor: tensor)
    how: dict[str, Any] = {"backend": backend, "options": options}
    with gdsload.safe_open(tiny_checkpoint, device="cuda:0", **how) as opened:
        for name in list(expected)[:4]:
            tensor = opened.get_tensor(name)
            assert on_device(doubles, tensor)
            assert torch.equal(raw(tensor), raw(expected[name]))
        assert opened.get_tensors().keys() == expected.keys()
        name = max(expected, key=lambda name: expected[name].nbytes)
        for index in (slice(3, 7), (slice(2, 5), slice(1, 3)), 4, ..., (slice(None), slice(0, 2))):
            part = opened.get_slice(name)[index]
            assert on_device(doubles, part)
            assert torch.equal(part, expected[name][index])
        opened.get_slice(name)[3:7]
        report = gdsload.last_report()
        assert report.wanted_bytes == expected[name][3:7].nbytes
    assert torch.equal(raw(tensor), raw(expected[list(expected)[3]]))


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_neighbouring_tensors_are_copied_together(
    backend: str,
    options: dict[str, Any],
    doubles: Doubles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 neighbouring tensors of 1 KiB need one copy for each slot. In separate memory, or with a
    gap after each tensor, they need one copy each."""
    saved = {f"t{n:03}": torch.full((256,), float(n)) for n in range(256)}
    saved_odd = {name: tensor[:255].clone() for name, tensor in saved.items()}
    slots = 256 * 1024 // options["request_bytes"] + 2  # it begins and ends within a slot
    for tensors_saved, shared, most in (
        (saved, True, slots),
        (saved, False, 256 + slots),
        (saved_odd, True, 256 + slots),
    ):
        path = tmp_path / f"{len(tensors_saved['t000'])}.safetensors"
        safetensors.torch.save_file(tensors_saved, path)
        block = Block(1 << 20)
        monkeypatch.setattr(torch_device, "empty", block.empty if shared else device_tensor)
        before = doubles.cuda_log["copies"]
        got = gdsload.load_file(path, "cuda:0", backend=backend, options=options)
        made = doubles.cuda_log["copies"] - before
        assert made <= most and (made >= 256 or most == slots)
        for name, tensor in tensors_saved.items():
            assert torch.equal(got[name], tensor)
        del got
        block.device.release(block.address)


def test_copy_does_not_cross_from_one_allocation_to_the_next(
    doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses a copy that crosses the end of an allocation."""
    saved = {f"t{n}": torch.full((256,), float(n)) for n in range(8)}
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(saved, path)
    block = Block(8192)
    monkeypatch.setattr(torch_device, "empty", block.empty)

    class Halves:
        """The device, had the block been two of 4 KiB."""

        def range_of(self, address: int) -> tuple[int, int]:
            return block.address + (address - block.address) // 4096 * 4096, 4096

    shares: list[int] = []
    memory = device_batch.DeviceTensors.memory

    def noted(self: device_batch.DeviceTensors, plan: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu, "device", lambda _: Halves())
            found = memory(self, plan)
        shares.extend(nbytes for entry in found for _, nbytes, _ in entry.shares)
        return found

    monkeypatch.setattr(device_batch.DeviceTensors, "memory", noted)
    got = gdsload.load_file(path, "cuda:0", backend="gds_mt", options=BACKENDS[2][1])
    assert shares == [4096, 4096]
    assert all(torch.equal(got[name], tensor) for name, tensor in saved.items())
    del got
    block.device.release(block.address)


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_copies_are_ordered_after_torch_stream_without_waiting(
    backend: str,
    options: dict[str, Any],
    doubles: Doubles,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host waits for torch's stream only if the device refuses to order the copies."""

    cuda = TorchCuda()
    monkeypatch.setattr(torch_device, "_torch_cuda", lambda: cuda)
    followed: list[int] = []
    follow = Backends[backend].follow

    def noted(self: Any, device: str, stream: int) -> bool:
        followed.append(stream)
        return follow(self, device, stream)

    monkeypatch.setattr(Backends[backend], "follow", noted)
    gdsload.load_file(tiny_checkpoint, "cuda:0", backend=backend, options=options)
    assert followed == [0] and cuda.stream.waited == 0
    doubles.fault("cuStreamWaitEvent", CODE, 1)
    gdsload.load_file(tiny_checkpoint, "cuda:0", backend=backend, options=options)
    assert cuda.stream.waited == 1


def test_torch_out_of_memory_raises_placement_error(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more")

    monkeypatch.setattr(torch_device, "empty", full)
    for read in (
        lambda: gdsload.load_file(tiny_checkpoint, "cuda:0"),
        lambda: list(gdsload.stream(tiny_checkpoint, "cuda:0")),
        lambda: gdsload.safe_open(tiny_checkpoint, device="cuda:0").get_tensors(),
    ):
        with pytest.raises(PlacementError, match="CUDA out of memory"):
            read()


@pytest.mark.parametrize("does", ["writes", "reads"])
@pytest.mark.parametrize(("backend", "options"), [*BACKENDS, ("host", {})])
def test_memory_of_an_earlier_owner_is_written_after_its_work(
    backend: str,
    options: dict[str, Any],
    does: str,
    doubles: Doubles,
    tiny_checkpoint: Path,
    expected: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's allocator lends memory again at once; queued work may still use it."""
    allocator, loaded = Allocator(2 << 20), dict[str, torch.Tensor]()
    monkeypatch.setattr(torch_device, "empty", allocator.empty)
    monkeypatch.setattr(torch_device, "_torch_cuda", TorchCuda)
    monkeypatch.setattr(host_copies, "LEAST_BYTES_WITHOUT_RING", 1)
    ctypes.memset(allocator.address, 0x5A, 2 << 20)
    copies = doubles.cuda_log["copies"]
    how = {"options": options, "backend": backend} if backend != "host" else {}
    with contextlib.ExitStack() as stack:
        if backend == "host":
            ahead = stack.enter_context(gdsload.prefetch(tiny_checkpoint))
            assert ahead.wait(PATIENCE_SECONDS)
        doubles.keep_busy(does, allocator.address, 2 << 20, 0x5A)
        loader = threading.Thread(
            target=lambda: loaded.update(gdsload.load_file(tiny_checkpoint, "cuda:0", **how))
        )
        loader.start()
        wait_for(lambda: doubles.cuda_log["copies"] != copies)
        doubles.end_work()
        loader.join()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(raw(loaded[name]), raw(tensor)) for name, tensor in expected.items())
    loaded.clear()
    gc.collect()
    allocator.device.release(allocator.address)


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_queue_closed_while_device_is_busy_holds_memory_until_copies_end(
    backend: str,
    options: dict[str, Any],
    doubles: Doubles,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies wait for the work of torch's stream, and run long after the load has ended."""
    allocator, copies = Allocator(2 << 20), doubles.cuda_log["copies"]
    monkeypatch.setattr(torch_device, "empty", allocator.empty)
    monkeypatch.setattr(torch_device, "_torch_cuda", TorchCuda)
    doubles.keep_busy()
    with (
        gdsload.Checkpoint.open(tiny_checkpoint) as checkpoint,
        Session(
            checkpoint,
            LoadReport("m"),
            ReadSettings(backend=backend, options=options, page_cache="keep"),
            device="cuda:0",
        ) as session,
    ):
        slices = [whole(info) for info in checkpoint.tensors.values()]
        with ReadaheadQueue(session, slices, kept={one.key for one in slices}) as queue:
            queue.start()
            wait_for(lambda: doubles.cuda_log["copies"] != copies)
    gc.collect()
    for address, nbytes in allocator.returned:
        ctypes.memset(address, 0x5A, nbytes)  # its next owner
    doubles.end_work()
    for address, nbytes in allocator.returned:
        assert ctypes.string_at(address, nbytes) == b"\x5a" * nbytes

    gdsload.load_file(tiny_checkpoint, "cuda:0", backend=backend, options=options)
    wait_for(lambda: not late_copies.owners())
    gc.collect()
    assert len(allocator.returned) == allocator.lent
    allocator.device.release(allocator.address)


def test_memory_that_late_copies_used_makes_room_for_a_load(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of an interrupted load is the one that its repetition needs."""

    class FullCuda(TorchCuda):
        def memory_stats_as_nested_dict(self, ordinal: int) -> dict[str, Any]:
            return memory_stats(1 << 30, 1 << 30 if late_copies.owners() else 0)

    monkeypatch.setattr(torch_device, "_torch_cuda", FullCuda)
    monkeypatch.setattr(device_batch, "FIRST_BYTES", 1)
    doubles.set(nbytes=gpu.SPARE_BYTES)
    has_ended = False
    late_copies.keep(object(), lambda: has_ended)
    with gdsload.Checkpoint.open(tiny_checkpoint) as checkpoint:
        infos = list(checkpoint.tensors.values())
        nbytes = sum(info.nbytes for info in infos)
        with Session(
            checkpoint, LoadReport("m"), ReadSettings(page_cache="keep"), device="cuda:0"
        ) as session:
            for has_ended in (False, True):
                with contextlib.nullcontext() if has_ended else pytest.raises(PlacementError):
                    next(device_batch.starting_windows(session, infos, nbytes))
        has_ended = False
        late_copies.keep(object(), lambda: has_ended)
        for has_ended in (False, True):
            with contextlib.nullcontext() if has_ended else pytest.raises(PlacementError):
                torch_device.reserve_block("cuda:0", infos)


@pytest.mark.parametrize(("backend", "options"), [*BACKENDS, ("auto", BACKENDS[0][1])])
def test_load_while_graph_is_captured_is_refused(
    backend: str,
    options: dict[str, Any],
    doubles: Doubles,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copies would become a part of the graph, and run with each launch of it."""
    cuda = TorchCuda()
    monkeypatch.setattr(torch_device, "_torch_cuda", lambda: cuda)
    doubles.capture_stream(True)
    with pytest.raises(PlacementError, match="a CUDA graph is being captured"):
        gdsload.load_file(tiny_checkpoint, "cuda:0", backend=backend, options=options)
    assert gdsload.last_report().requests == 0
    assert cuda.stream.waited == 0
    doubles.capture_stream(False)
    gdsload.load_file(tiny_checkpoint, "cuda:0", backend=backend, options=options)


@pytest.mark.parametrize("tier", ["memory", "pool"])
def test_load_from_host_memory_while_graph_is_captured_is_refused(
    tier: str, doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_device, "_torch_cuda", TorchCuda)
    with gdsload.warmup.HostPool(1 << 30), gdsload.prefetch(tiny_checkpoint, tier=tier) as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        doubles.capture_stream(True)
        with pytest.raises(PlacementError, match="a CUDA graph is being captured"):
            gdsload.load_file(tiny_checkpoint, "cuda:0")
    doubles.capture_stream(False)
    gdsload.load_file(tiny_checkpoint, "cuda:0")


def test_capture_that_begins_during_a_load_gets_no_copy_from_host_memory(
    doubles: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_device, "_torch_cuda", TorchCuda)
    with (
        gdsload.prefetch(tiny_checkpoint) as ahead,
        gdsload.Checkpoint.open(tiny_checkpoint) as checkpoint,
        Session(checkpoint, LoadReport("m"), ReadSettings(), device="cuda:0") as session,
    ):
        assert ahead.wait(PATIENCE_SECONDS)
        infos = list(checkpoint.tensors.values())
        batch = device_batch.start(session, infos)
        batch.wait()
        doubles.capture_stream(True)
        with pytest.raises(PlacementError, match="a CUDA graph is being captured"):
            batch.tensors_of(infos)
        doubles.capture_stream(False)
        batch.release()


def test_driver_without_capture_query_reports_no_capture() -> None:
    device = Device(Cuda(str(gpudoubles.built("cuda_double", "OLD_DRIVER"))), 0)
    assert device.captures(0) is False
