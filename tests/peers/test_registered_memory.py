"""Memory that NIXL serves, with a double of its agent."""

from __future__ import annotations

import ctypes
import gc
import shutil
import traceback
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import gdsload
from command import answer
from gdsload.errors import (
    BackendUnavailable,
    CheckpointError,
    CheckpointNotFound,
    GdsloadError,
    IntegrityError,
)
from gdsload.memory.host_pool import HostPool
from gdsload.peers import memory, receiving, server
from gdsload.remote.peer import PeerDirectory


class LateAgent:
    """Says that a read is done, and writes its bytes when it is told to."""

    def __init__(self) -> None:
        self.refused = ""
        self.registered: list[str] = []  # kinds of memory
        self.late: list[tuple[int, int, int]] = []  # target, source, bytes

    def register_memory(self, described: list[tuple[int, int, int, str]], kind: str) -> None:
        if kind == self.refused:
            raise RuntimeError("NIXL_ERR_BACKEND")
        self.registered.append(kind)

    def get_agent_metadata(self) -> bytes:
        return b""

    def deregister_memory(self, registered: None) -> None: ...

    def get_xfer_descs(self, described: list[tuple[int, int, int]], kind: str) -> Any:
        return described[0]

    def initialize_xfer(self, how: str, target: Any, source: Any, agent: str) -> LateAgent:
        self.late.append((target[0], source[0], source[1]))
        return self

    def transfer(self, handle: LateAgent) -> str:
        return "DONE"

    def release(self) -> None: ...

    def write(self) -> None:
        for target, source, nbytes in self.late:
            ctypes.memmove(target, source, nbytes)


class DeviceBytes:
    """A flat tensor of a device, over host memory."""

    def __init__(self, device: str) -> None:
        self.device, self.flat = torch.device(device), torch.zeros(8, dtype=torch.uint8)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.flat, name)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> LateAgent:
    made = LateAgent()
    monkeypatch.setattr(memory, "new_agent", lambda *_, **__: made)
    return made


def test_read_that_ends_late_writes_to_memory_that_is_still_there(agent: LateAgent) -> None:
    flat = torch.arange(100, dtype=torch.uint8)
    served = memory.RegisteredMemory({"a": flat}, "LIBFABRIC", {})
    gc.collect()
    others = [ctypes.create_string_buffer(100) for _ in range(5000)]  # in what was freed
    agent.write()
    assert not any(any(each.raw) for each in others)
    assert served.locations["a"].address == flat.data_ptr()


def test_memory_that_cannot_be_registered_is_an_error(agent: LateAgent) -> None:
    agent.refused = "DRAM"
    with pytest.raises(BackendUnavailable, match="NIXL cannot register host memory: NIXL_ERR"):
        memory.RegisteredMemory({"a": torch.zeros(8, dtype=torch.uint8)}, "UCX", {})


def test_memory_of_a_device_is_registered_after_its_work(
    agent: LateAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that are still in flight may write to it."""
    waited = []

    def synchronize(device: torch.device) -> None:
        assert not agent.registered
        waited.append(str(device))

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    flats: dict[str, Any] = {
        name: DeviceBytes(f"cuda:{number}") for name, number in {"a": 0, "b": 1, "c": 0}.items()
    }
    memory.RegisteredMemory({**flats, "host": torch.zeros(8, dtype=torch.uint8)}, "UCX", {})
    assert sorted(waited) == ["cuda:0", "cuda:1"]
    assert agent.registered[0] == "VRAM"


def test_memory_of_each_device_is_read_before_it_is_served(
    agent: LateAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    flats: dict[str, Any] = {"a": DeviceBytes("cuda:0"), "b": DeviceBytes("cuda:1")}
    memory.RegisteredMemory(flats, "UCX", {})
    read = sorted(source for _, source, _ in agent.late)
    assert read == sorted(flat.data_ptr() for flat in flats.values())


def test_copies_of_tensors_that_are_not_contiguous_are_counted(agent: LateAgent) -> None:
    tensors = {"plain": torch.ones(8), "columns": torch.ones(4, 6)[:, :2]}
    with gdsload.serve(tensors, checksums=False) as server:
        status = server.status()
    assert (status.staged_bytes, status.nbytes) == (4 * 8, 4 * (8 + 8))
    assert status.staged_reason == "some tensors are not contiguous"
    with gdsload.serve({"plain": torch.ones(8)}, checksums=False) as server:
        assert server.status()[4:6] == (0, "")


def test_one_element_of_a_column_is_served_without_a_copy(agent: LateAgent) -> None:
    """For torch it is contiguous, with a stride."""
    with gdsload.serve({"scale": torch.ones(4, 8)[0:1, 3]}, checksums=False) as server:
        status = server.status()
    assert (status.nbytes, status.staged_bytes) == (4, 0)


def test_index_is_served_with_the_small_files_of_its_directory(
    agent: LateAgent, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    (folder / "model.safetensors.index.other.json").write_text("{}")
    with gdsload.serve(folder / "model.safetensors.index.json", checksums=False) as server:
        names = set(PeerDirectory(server.url).names())
    assert names == {path.name for path in tiny_checkpoint.iterdir()}
    assert "model.safetensors.index.json" in names


def test_small_files_have_a_limit_for_all_of_them(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    for name in ("vocab.json", "vocab.txt"):
        (folder / name).write_bytes(bytes(60_000))
    monkeypatch.setattr(receiving, "SMALL_FILE_BYTES", 100_000)
    with pytest.raises(CheckpointError, match=r"vocab\.txt: .*limit of 100000 for all of them"):
        gdsload.serve(folder)


def test_files_that_are_given_count_to_the_limit(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SMALL_FILE_BYTES", 100_000)
    with pytest.raises(GdsloadError, match="100,000 is the limit for all of them"):
        gdsload.serve(tiny_checkpoint, files={"notes.txt": bytes(110_000)})


def test_serve_that_fails_is_reported_as_failed(
    agent: LateAgent, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    agent.refused = "DRAM"
    for source, error in (
        (tmp_path / "none", CheckpointNotFound),
        (tiny_checkpoint, BackendUnavailable),
    ):
        with pytest.raises(error):
            gdsload.serve(source)
        assert gdsload.last_report().failure.startswith(error.__name__)


def test_failed_publish_is_an_error_until_the_next_one(
    agent: LateAgent, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    with gdsload.serve(folder, checksums=False) as server:
        folder.rename(tmp_path / "gone")
        with pytest.raises(CheckpointNotFound):
            server.publish()
        for asked in (server.wait, server.tensors):
            with pytest.raises(GdsloadError, match="has failed: CheckpointNotFound"):
                asked()
        assert "CheckpointNotFound" in server.status().failure
        (tmp_path / "gone").rename(folder)
        server.publish()
        server.wait()
        assert server.status().failure == ""


def test_process_that_serves_weights_cannot_quiesce(agent: LateAgent) -> None:
    with gdsload.serve({"a": torch.ones(8)}, checksums=False) as served:
        for _ in range(2):
            with pytest.raises(GdsloadError, match=f"cannot quiesce: {served.url} is being served"):
                gdsload.quiesce(0.0)
            served.withdraw()  # its port stays open
        served.publish()
        assert served.status().tensors == 1
    gdsload.quiesce(0.0)


@pytest.mark.parametrize("closed", [False, True])
def test_error_of_the_source_is_raised_anew_by_each_call(
    closed: bool, agent: LateAgent, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """A server may live as long as its process: it keeps no frames of those who have waited."""

    class Model:
        pass

    def wait() -> tuple[str, dict[str, Any], int, weakref.ref[Model]]:
        model = Model()
        with pytest.raises(IntegrityError) as caught:
            served.wait()
        depth = len(list(traceback.walk_tb(caught.tb)))
        return str(caught.value), vars(caught.value), depth, weakref.ref(model)

    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    answer("manifest", folder, "--algorithm", "sha256")
    file = next(folder.glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with gdsload.serve(folder) as served:
        if closed:
            wait()
            served.close()
        (*first, one), (*second, other) = wait(), wait()
        assert first == second
        gc.collect()
        assert one() is None and other() is None


@pytest.mark.parametrize("is_held", [False, True])
def test_served_memory_is_none_of_the_host_pool(
    is_held: bool, agent: LateAgent, tiny_checkpoint: Path
) -> None:
    """It is registered before its bytes arrive, and those in the pool arrive in another mapping.
    What the pool holds already, it could not free while it is served."""
    with HostPool(1 << 30) as pool:
        if is_held:
            gdsload.load_file(tiny_checkpoint, cache="direct")
        before = pool.held_bytes, pool.idle_bytes
        with gdsload.serve(tiny_checkpoint, checksums=False) as server:
            assert (pool.held_bytes, pool.idle_bytes) == before
            served = server.tensors()
    for name, tensor in gdsload.load_file(tiny_checkpoint).items():
        assert torch.equal(served[name], tensor)
