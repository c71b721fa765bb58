"""Loads from the memory of other processes, with the real NIXL over shared memory and TCP."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from benchmarks.serve_process import serving
from safetensors.torch import load_file as stock, save_file

import gdsload
from gdsload.errors import (
    CheckpointNotFound,
    CheckpointUnreadable,
    FileChanged,
    GdsloadError,
    RemoteError,
)
from gdsload.peers.service import Service
from gdsload.remote import peer
from gdsload.remote.nixl_reader import ReaderFailed, RemoteBytes, shared_reader
from gdsload.remote.peer import PeerDirectory
from threadends import await_most

pytest.importorskip("nixl_cu13")
PATIENCE_SECONDS = 120
READ = """
import sys, hashlib
from gdsload.remote.peer import PeerDirectory
file = PeerDirectory(sys.argv[1]).open("model.safetensors")
print(hashlib.sha256(file.read(0, file.size)).hexdigest(), flush=True)
file.close()
"""
ENDLESS = """
import sys
from gdsload.remote.peer import PeerDirectory
file = PeerDirectory(sys.argv[1]).open("model.safetensors")
while True:
    file.read(0, file.size)
    print("once", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 24 MB: three slots of a reader."""
    folder = tmp_path_factory.mktemp("served")
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"layer.{number}.weight": torch.randn(1000, 1001 + number, generator=generator)
        for number in range(6)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "none"}')
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """Where this process serves it."""
    with gdsload.serve(folder) as server:
        yield server.url


def require_children(count: int) -> list[psutil.Process]:
    """The processes with NIXL that this process has started. It waits until there are `count`: one
    that begins has no command line yet, and one that was killed may take seconds on a busy
    machine."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = [child for child in psutil.Process().children() if _has_nixl(child)]
        if len(found) == count:
            return found
        assert time.monotonic() < deadline, f"{found} instead of {count} processes"
        time.sleep(0.01)


def _has_nixl(process: psutil.Process) -> bool:
    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return alive and "nixl_child" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended since
        return False


def all_bytes(url: str) -> bytes:
    file = PeerDirectory(url).open("model.safetensors")
    try:
        return file.read(0, file.size)
    finally:
        file.close()


def test_peer_serves_the_files_of_a_directory(folder: Path, url: str) -> None:
    assert all_bytes(url) == (folder / "model.safetensors").read_bytes()
    require_children(0)
    directory = PeerDirectory(url)
    assert set(directory.names()) == {"config.json", "gdsload-manifest.json", "model.safetensors"}
    assert directory.read("config.json", 100) == b'{"model_type": "none"}'
    with pytest.raises(CheckpointNotFound):
        directory.open("other.safetensors")
    with pytest.raises(CheckpointNotFound, match="another name"):
        PeerDirectory(f"{url}-2").names()


def test_load_file_of_a_peer_equals_that_of_the_file(folder: Path, url: str) -> None:
    expected = stock(folder / "model.safetensors")
    found = gdsload.load_file(url, verify="checksum")
    report = gdsload.last_report()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert report is not None
    assert report.paths["nixl/ucx"] > 0.9 * sum(each.nbytes for each in expected.values())
    require_children(0)


def test_model_of_a_peer_equals_that_of_the_directory(tiny_checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint).state_dict()
    with gdsload.serve(tiny_checkpoint) as server:
        model = gdsload.from_pretrained(server.url)
        assert len(PeerDirectory(server.url).names()) > 3  # shards, index, configuration
    with gdsload.serve(model) as server:
        again = gdsload.from_pretrained(server.url)
        assert type(again) is type(model)
    for found in (model.state_dict(), again.state_dict()):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_four_readers_get_equal_bytes(folder: Path, url: str) -> None:
    readers = [
        subprocess.Popen([sys.executable, "-c", READ, url], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    answers = {reader.communicate(timeout=PATIENCE_SECONDS)[0] for reader in readers}
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert answers == {f"{digest}\n"}


def test_reads_that_are_complete_leave_their_connection_to_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Counted(peer._Connection):
        def __init__(self, address: tuple[str, int]) -> None:
            super().__init__(address)
            made.append(self)

    def read(length: int) -> None:
        chunks = file.chunks(file.size - length, length)
        next(chunks)
        chunks.close()

    with gdsload.serve(folder) as server:
        file = PeerDirectory(server.url).open("model.safetensors")
        monkeypatch.setattr(peer, "_Connection", Counted)
        for _ in range(3):
            read(1000)
        assert len(made) == 1
        read(12 << 20)  # left in the middle: its ticket is given back
        deadline = time.monotonic() + PATIENCE_SECONDS
        while server.status().in_flight and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.status().in_flight == 0
        file.close()


def test_process_with_nixl_starts_when_a_file_with_tensors_is_opened(url: str) -> None:
    directory = PeerDirectory(url)
    config = directory.open("config.json")
    require_children(0)
    file = directory.open("model.safetensors")
    require_children(1)
    config.close()
    file.close()
    require_children(0)


def test_crash_of_the_process_with_nixl_is_no_crash_of_the_reader(url: str) -> None:
    file = PeerDirectory(url).open("model.safetensors")
    before = file.read(0, file.size)
    (child,) = require_children(1)
    child.kill()
    child.wait(PATIENCE_SECONDS)
    assert file.read(0, file.size) == before
    file.quiesce()
    require_children(0)
    assert file.read(0, file.size) == before
    file.close()
    require_children(0)


def test_peer_that_nixl_refuses_does_not_end_the_reads_of_others(folder: Path, url: str) -> None:
    file = PeerDirectory(url).open("model.safetensors")
    reader = shared_reader("UCX", {}).current()
    with (
        pytest.raises(ReaderFailed, match="NIXL: "),
        reader.read("other", b"no metadata", "DRAM", [RemoteBytes(0, 8, 0)]),
    ):
        pass
    assert file.read(0, file.size) == (folder / "model.safetensors").read_bytes()
    assert shared_reader("UCX", {}).current() is reader
    file.close()


def test_read_after_the_end_of_a_file_starts_no_process(url: str) -> None:
    file = PeerDirectory(url).open("model.safetensors")
    file.read(0, file.size)
    file.close()
    with pytest.raises(RemoteError, match="was closed"):
        file.read(0, file.size)
    with pytest.raises(ReaderFailed, match="was closed"):
        shared_reader("UCX", {}).current()
    require_children(0)


def test_killed_reader_leaves_no_process_and_a_source_that_serves(folder: Path) -> None:
    with serving(folder) as (process, url):
        reader = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, url], stdout=subprocess.PIPE, text=True
        )
        assert reader.stdout is not None
        assert reader.stdout.readline() == "once\n"
        (child,) = psutil.Process(reader.pid).children()
        reader.kill()
        reader.communicate(timeout=PATIENCE_SECONDS)
        _, alive = psutil.wait_procs([child], timeout=PATIENCE_SECONDS)
        assert alive == []
        assert all_bytes(url) == (folder / "model.safetensors").read_bytes()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0


def test_source_without_readers_sleeps(folder: Path) -> None:
    """Each of its threads: that of NIXL would use a core."""
    with serving(folder) as (process, _):
        threads = {thread.id for thread in psutil.Process(process.pid).threads()}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while threads and time.monotonic() < deadline:
            for thread in list(threads):
                try:
                    status = Path(f"/proc/{process.pid}/task/{thread}/stat").read_text()
                except (FileNotFoundError, ProcessLookupError):  # it has ended
                    assert process.poll() is None
                    threads.remove(thread)
                    continue
                if status.rpartition(")")[2].split()[0] == "S":
                    threads.remove(thread)
            time.sleep(0.001)
        assert not threads


def test_stopped_and_killed_sources_are_errors_and_the_reader_ends_well(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folder) as (process, url):
        file = PeerDirectory(url).open("model.safetensors")
        before = file.read(0, file.size)
        file.quiesce()
        monkeypatch.setattr(peer, "ANSWER_SECONDS", 0.5)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(RemoteError, match="has not answered"):
            file.read(0, file.size)
        monkeypatch.undo()
        file.quiesce()
        process.send_signal(signal.SIGCONT)
        assert file.read(0, file.size) == before
        file.close()

        reader = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert reader.stdout is not None
        assert reader.stdout.readline() == "once\n"
        (child,) = psutil.Process(reader.pid).children()
        process.kill()
        _, errors = reader.communicate(timeout=PATIENCE_SECONDS)
    assert reader.returncode == 1  # an exception, and no signal
    assert "RemoteError" in errors
    _, alive = psutil.wait_procs([child], timeout=PATIENCE_SECONDS)
    assert alive == []


def test_withdrawn_weights_are_another_version_for_their_readers() -> None:
    tensors = {"a": torch.arange(5_000_000), "b": torch.ones(3)}
    with gdsload.serve(tensors, name="m") as server:
        file = PeerDirectory(server.url).open("model.safetensors")
        before = file.read(0, file.size)
        server.withdraw()
        with pytest.raises(RemoteError, match="another version") as caught:
            file.read(0, file.size)
        assert caught.value.final
        with pytest.raises(FileChanged):
            file.verify_unchanged()
        with pytest.raises(FileChanged, match="nothing at present"):
            PeerDirectory(server.url).names()
        server.publish()
        again = PeerDirectory(server.url).open("model.safetensors")
        assert again.version == file.version
        assert again.read(0, again.size) == before
        server.withdraw()
        tensors["a"] += 1
        server.publish()
        changed = PeerDirectory(server.url).open("model.safetensors")
        assert changed.version != file.version
        with pytest.raises(RemoteError, match="another version"):
            again.read(0, again.size)
        for each in (file, again, changed):
            each.close()
        url = server.url
    with pytest.raises(CheckpointUnreadable):
        PeerDirectory(url).names()


def test_source_that_starts_again_with_the_same_bytes_is_the_same_version() -> None:
    tensors = {"a": torch.arange(5_000_000)}
    with gdsload.serve(tensors, name="m") as server:
        file = PeerDirectory(server.url).open("model.safetensors")
        before = file.read(0, file.size)
        port = int(server.url.split(":")[2].split("/")[0])
    with gdsload.serve({"a": tensors["a"].clone()}, name="m", port=port) as server:
        assert file.read(0, file.size) == before
    file.close()


def test_peers_with_other_bytes_under_equal_headers_are_not_mixed() -> None:
    tensors = {"a": torch.arange(5_000_000)}
    other = {"a": tensors["a"] + 1}
    with gdsload.serve(tensors) as first, gdsload.serve(other) as second:
        got = gdsload.load_file(gdsload.replicas(first.url, second.url))
        assert torch.equal(got["a"], tensors["a"])
        assert "another digest" in gdsload.last_report().refusals[second.url]


def test_peers_with_the_same_weights_are_used_together(folder: Path, url: str) -> None:
    """Whatever other files they have, with checksums or without, and beside a directory."""
    with (
        gdsload.serve(folder, files={"notes": b"of this one"}) as noted,
        gdsload.serve(folder, checksums=False) as unchecked,
    ):
        got = gdsload.load_file(gdsload.replicas(url, noted.url, unchecked.url, folder))
        assert not gdsload.last_report().refusals
    assert all(map(torch.equal, got.values(), stock(folder / "model.safetensors").values()))


def test_interrupted_close_ends_the_service_and_releases_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(service: Service) -> None:
        raise KeyboardInterrupt

    server = gdsload.serve({"a": torch.arange(1000)})
    threads = threading.active_count()
    monkeypatch.setattr(Service, "withdraw", interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.close()
    await_most(threads - 1)
    with pytest.raises(CheckpointUnreadable):
        PeerDirectory(server.url).names()
    with pytest.raises(GdsloadError, match="closed"):
        server.publish()
    server.close()
    assert server.status().nbytes == 0
