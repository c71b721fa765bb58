"""Servers that still receive serve what has arrived: source, middle and leaf are processes with the
real NIXL. The source holds bytes back until a test lets them arrive."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from benchmarks.serve_process import serving
from safetensors.torch import load

import gdsload
from command import process
from gdsload.checkpoint import Checkpoint
from gdsload.errors import CheckpointUnreadable, GdsloadError, IntegrityError, RemoteError
from gdsload.peers.arrivals import Arrivals
from gdsload.peers.memory import RegisteredMemory
from gdsload.peers.publication import (
    SINGLE_FILE,
    PublishedTensor,
    file_of,
    manifest_bytes,
    published,
)
from gdsload.peers.service import Served, Service
from gdsload.peers.tickets import Tickets
from gdsload.remote.directory import open_directory
from gdsload.remote.peer import PeerDirectory
from object_server import ObjectServer

pytest.importorskip("nixl_cu13")
PATIENCE_SECONDS = 120
BLOCK = 8 << 20
LEAF = """
import hashlib, sys
from gdsload.remote.peer import PeerDirectory
url, early = sys.stdin.readline().split()
early = int(early)
file = PeerDirectory(url).open("model.safetensors")
data = file.read(0, early)
print("early", flush=True)
data += file.read(early, file.size - early)
print(hashlib.sha256(data).hexdigest(), flush=True)
file.close()
"""


class Source:
    """A source whose bytes arrive when a test says so; the first half of them at once."""

    def __init__(self, *, arrived: bool = True) -> None:
        generator = torch.Generator().manual_seed(2)
        flats = {
            f"layer.{number}": torch.randint(256, (BLOCK,), dtype=torch.uint8, generator=generator)
            for number in range(4)
        }
        self._memory = RegisteredMemory(flats, "UCX", {})
        locations = self._memory.locations
        file = file_of(
            [
                PublishedTensor(name, "U8", (BLOCK,), flat, locations[name])
                for name, flat in flats.items()
            ]
        )
        self.content = file.header + b"".join(flat.numpy().tobytes() for flat in flats.values())
        self.half = len(file.header) + 2 * BLOCK
        # Readers of the middle get this much of it: its last read goes beyond the half.
        self.early = len(file.header) + BLOCK
        small = {"config.json": b"{}", "notes": b"of a peer, all small files are served"}
        publication = published({SINGLE_FILE: file}, small, manifest_bytes({SINGLE_FILE: file}))
        self.version = publication.version
        self.arrivals = Arrivals()
        service = Service("m", "127.0.0.1", 0, Tickets(32, 8, 30.0))
        self._service: Service | None = service
        self.url = f"nixl://127.0.0.1:{service.port}/m"
        facts = self._memory.agent_name, self._memory.metadata(), "UCX"
        service.publish(Served(publication, *facts, self.arrivals))
        if arrived:
            self.arrive(0, self.half)

    def arrive(self, start: int, end: int) -> None:
        assert self._service is not None
        self._service.tell(self.arrivals.add, SINGLE_FILE, start, end)

    def arrive_all(self) -> None:
        self.arrive(self.half, len(self.content))

    def fail(self, reason: str) -> None:
        assert self._service is not None
        self._service.run(self.arrivals.end(reason))

    def close(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            service.close()


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.close()


def test_leaf_reads_from_the_middle_before_the_middle_has_all(source: Source) -> None:
    # It starts first: the middle does not wait without a limit.
    leaf = subprocess.Popen(
        [sys.executable, "-c", LEAF], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with serving(source.url) as (middle, url):
        assert leaf.stdin is not None
        assert leaf.stdout is not None
        leaf.stdin.write(f"{url} {source.early}\n")
        leaf.stdin.flush()
        assert leaf.stdout.readline() == "early\n"
        source.arrive_all()  # only now can the middle receive the second half
        answer, _ = leaf.communicate(timeout=PATIENCE_SECONDS)
        assert answer == f"{hashlib.sha256(source.content).hexdigest()}\n"

        directory = PeerDirectory(url)
        assert directory.open(SINGLE_FILE).version == source.version
        assert directory.read("notes", 100).startswith(b"of a peer")
        found = gdsload.load_file(url, verify="checksum")
        assert found.keys() == load(source.content).keys()
        middle.send_signal(signal.SIGTERM)
        assert middle.wait(PATIENCE_SECONDS) == 0


def test_tensors_of_a_server_view_the_memory_that_it_serves(source: Source) -> None:
    with gdsload.serve(source.url) as server:
        status = server.status()
        assert status.version == source.version
        assert status.received_bytes < len(source.content)
        source.arrive_all()
        tensors = server.tensors()
        assert server.status().received_bytes == len(source.content)
        expected = load(source.content)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        addresses = {name: tensor.data_ptr() for name, tensor in server.tensors().items()}
        assert addresses == {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert torch.equal(tensors["layer.3"], expected["layer.3"])


def test_failure_of_the_source_is_an_error_of_the_missing_ranges(source: Source) -> None:
    with gdsload.serve(source.url) as server:
        file = PeerDirectory(server.url).open(SINGLE_FILE)
        assert file.read(0, source.early) == source.content[: source.early]
        source.fail("the disk is gone")
        with pytest.raises(RemoteError, match="the disk is gone"):
            server.wait()
        assert "the disk is gone" in server.status().failure
        with pytest.raises(RemoteError, match="the disk is gone") as caught:
            file.read(source.half, BLOCK)
        assert caught.value.final
        assert file.read(0, source.early) == source.content[: source.early]
        with pytest.raises(RemoteError, match="the disk is gone"):
            server.tensors()
        file.close()


def test_failure_before_the_first_bytes_is_an_error_of_opening() -> None:
    source = Source(arrived=False)
    source.fail("the disk is gone")
    try:
        with pytest.raises(CheckpointUnreadable, match="the disk is gone"):
            gdsload.serve(source.url)
    finally:
        source.close()


def test_checkpoint_of_a_server_is_opened_when_its_headers_have_arrived() -> None:
    source = Source(arrived=False)
    source.arrive(0, source.early - BLOCK)
    try:
        with Checkpoint.open(source.url, stall_seconds=PATIENCE_SECONDS) as opened:
            assert list(opened.tensors) == [f"layer.{number}" for number in range(4)]
            source.arrive(source.early - BLOCK, len(source.content))
            assert opened.shards[0].read(0, source.half) == source.content[: source.half]
    finally:
        source.close()


def test_dead_source_is_an_error_of_the_leaf_which_goes_on_with_another_source(
    source: Source, tmp_path: Path
) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(source.content)
    with gdsload.serve(source.url) as server:
        alone = PeerDirectory(server.url).open(SINGLE_FILE)
        replicated = open_directory(gdsload.replicas(server.url, tmp_path)).open(SINGLE_FILE)
        for leaf in (alone, replicated):
            assert leaf.read(0, source.early) == source.content[: source.early]
        source.close()
        with pytest.raises(RemoteError, match=source.url):
            alone.read(source.half, BLOCK)
        assert replicated.read(source.half, BLOCK) == source.content[source.half :][:BLOCK]
        with pytest.raises(RemoteError, match=source.url):
            server.wait()
        for leaf in (alone, replicated):
            leaf.close()


def test_command_ends_with_the_reason_when_its_source_fails(source: Source) -> None:
    source.fail("the disk is gone")
    ended = process("from gdsload.cli import main; main()", "serve", source.url, "--port", "0")
    assert ended.returncode == 1
    assert source.version in ended.stdout
    assert "the disk is gone" in ended.stderr


def test_killed_middle_is_an_error_and_another_source_takes_over(
    source: Source, tmp_path: Path
) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(source.content)
    with serving(source.url) as (middle, url):
        alone = PeerDirectory(url).open(SINGLE_FILE)
        replicated = open_directory(gdsload.replicas(url, tmp_path)).open(SINGLE_FILE)
        for leaf in (alone, replicated):
            assert leaf.read(0, source.early) == source.content[: source.early]
        children = psutil.Process(middle.pid).children()
        assert len(children) == 1  # it is still receiving
        middle.kill()
        with pytest.raises(RemoteError):
            alone.read(source.half, BLOCK)
        assert replicated.read(source.half, BLOCK) == source.content[source.half :][:BLOCK]
        for leaf in (alone, replicated):
            leaf.close()
    assert psutil.wait_procs(children, timeout=PATIENCE_SECONDS)[1] == []


def test_withdrawn_server_stops_receiving_and_publishes_again(source: Source) -> None:
    with gdsload.serve(source.url) as server:
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(server.tensors)
            server.withdraw()
            stopped = r"before all bytes had arrived|no path and no URL"
            with pytest.raises(GdsloadError, match=stopped):
                waiting.result()
        source.arrive_all()
        server.publish()
        server.wait()
        assert server.status().received_bytes == len(source.content)


def test_wait_for_a_closed_server_is_an_error_if_bytes_are_missing(source: Source) -> None:
    closed, failed = gdsload.serve(source.url), gdsload.serve(source.url)
    closed.close()
    with pytest.raises(GdsloadError, match="before all bytes had arrived"):
        closed.wait()
    source.fail("the disk is gone")
    with pytest.raises(RemoteError, match="the disk is gone"):
        failed.wait()
    failed.close()
    with pytest.raises(RemoteError, match="the disk is gone"):
        failed.wait()


def test_bytes_that_differ_from_the_manifest_are_not_served(source: Source, tmp_path: Path) -> None:
    path = tmp_path / SINGLE_FILE
    path.write_bytes(source.content)
    manifest = PeerDirectory(source.url).read("gdsload-manifest.json", BLOCK)
    (tmp_path / "gdsload-manifest.json").write_bytes(manifest)
    wrong = bytearray(source.content)
    wrong[source.half + 5] ^= 1
    path.write_bytes(wrong)
    with gdsload.serve(tmp_path) as server:
        with pytest.raises(IntegrityError):
            server.wait()
        file = PeerDirectory(server.url).open(SINGLE_FILE)
        assert file.read(0, source.early) == source.content[: source.early]
        with pytest.raises(RemoteError, match="checksum"):
            file.read(source.half, BLOCK)
        file.close()


@pytest.mark.parametrize(
    "scheme,path", [("s3", "m"), ("http", "m"), ("http", f"m/{SINGLE_FILE}?revision=1")]
)
def test_object_store_is_served_by_its_url(
    source: Source, object_server: ObjectServer, scheme: str, path: str
) -> None:
    folder = object_server.root / "m"
    folder.mkdir(parents=True)
    (folder / SINGLE_FILE).write_bytes(source.content)
    (folder / "config.json").write_bytes(b"{}")
    manifest = PeerDirectory(source.url).read("gdsload-manifest.json", BLOCK)
    (folder / "gdsload-manifest.json").write_bytes(manifest)
    with gdsload.serve(object_server.url(scheme, path)) as server:
        names = set(PeerDirectory(server.url).names())
        assert names - {"config.json"} == {SINGLE_FILE, "gdsload-manifest.json"}
        assert ("config.json" in names) == (path == "m")
        expected, found = load(source.content), gdsload.load_file(server.url, verify="checksum")
        assert all(torch.equal(found[name], expected[name]) for name in expected)
