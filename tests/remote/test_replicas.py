"""Several sources of one file: each byte from one of them, whatever happens to the others."""

from __future__ import annotations

import errno
import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from gdsload._native.memory import Region
from gdsload.backends import DRAM, Memory, OpenFile
from gdsload.backends.base import Failure
from gdsload.backends.remote import ReplicaBackend
from gdsload.errors import FileChanged, GdsloadError
from gdsload.planning.read_plan import Transfer
from gdsload.remote import replicas
from gdsload.remote.file import RemoteFile
from gdsload.remote.replicas import Opened, ReplicaFile, Source, Sources
from remotefiles import REFUSED, Fault, MemoryFile

STEP = 1 << 16


def shard_of(nbytes: int, name: str = "a", seed: int = 5) -> bytes:
    header = json.dumps({name: {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    data = random.Random(seed).randbytes(nbytes)
    return len(header).to_bytes(8, "little") + header.encode() + data


DATA = shard_of(2_000_000)


def replica(
    *files: MemoryFile, most_requests: int = 4, silent_seconds: float = 60.0
) -> ReplicaFile:
    for number, file in enumerate(files):
        file.url = f"s3://bucket-{number}/file"
    sources = [Source(file.url.removesuffix("/file"), most_requests) for file in files]
    files_of = {source: Opened.of(file) for source, file in zip(sources, files, strict=True)}
    return ReplicaFile("replicas://file", Sources(sources, silent_seconds), files_of)


class Loaded:
    """A load of a whole file by the backend."""

    def __init__(self, file: RemoteFile, depth: int = 8, step: int = STEP) -> None:
        with ReplicaBackend(depth=depth) as backend:
            known = backend.register(OpenFile(file.url, -1, file.size, remote=file))
            region = Region.anonymous(file.size)
            memory = backend.register(Memory(DRAM, region.address, file.size, region))
            transfers = [
                Transfer(0, at, size, size, 0, at, "buffered", number)
                for number, at in enumerate(range(0, file.size, step))
                for size in (min(step, file.size - at),)
            ]
            request = backend.prepare(transfers, [known], [memory])
            backend.post(request)
            self.failures: list[Failure] = []
            while not (progress := backend.check(request)).finished:
                self.failures += progress.failures
                backend.wait(request, 0.05)
            self.failures += progress.failures
            self.paths, self.status = backend.paths(request), backend.status()
            backend.release(request)
            self.bytes = region.read(0, file.size)


def test_all_sources_work_at_once() -> None:
    gate = threading.Event()
    files = [MemoryFile(DATA) for _ in range(3)]
    file = replica(*files)
    for each in files:
        each.always = Fault(hang=gate)
    loading: list[Loaded] = []
    thread = threading.Thread(target=lambda: loading.append(Loaded(file, depth=12)))
    thread.start()
    for each in files:
        each.wait_hung(2)
    # Later, a request counts until its thread has noticed the end of it.
    assert all(each.most <= 8 for each in files)
    gate.set()
    thread.join()
    assert loading[0].failures == [] and loading[0].bytes == DATA


def test_requests_before_the_first_bytes_do_not_count_for_the_rate() -> None:
    file = replica(MemoryFile(DATA))
    rates = []
    for _ in range(2):
        assert b"".join(map(bytes, file.chunks(0, 1000))) == DATA[:1000]
        rates.append(list(file.facts().rates))
    assert rates == [[], ["s3://bucket-0"]]


def test_each_byte_is_asked_of_one_source() -> None:
    files = [MemoryFile(DATA) for _ in range(3)]
    file = replica(*files)
    headers = [len(each.requests) for each in files]
    loaded = Loaded(file)
    assert loaded.bytes == DATA
    asked = [r for each, n in zip(files, headers, strict=True) for r in each.requests[n:]]
    assert sum(length for _, length in asked) == len(DATA)
    assert sum(loaded.paths.values()) == len(DATA)
    assert loaded.status.failovers == {} and loaded.status.refusals == {}


def test_slow_source_reads_less() -> None:
    fast, slow = MemoryFile(DATA), MemoryFile(DATA, always=Fault(seconds=1.0))
    file = replica(fast, slow)
    assert Loaded(file).bytes == DATA
    assert len(slow.requests) < len(fast.requests)


@pytest.mark.parametrize("fault", [REFUSED, Fault(bytes=1000, error=errno.EIO), Fault(bytes=0)])
def test_source_that_fails_is_left_with_the_reason(fault: Fault) -> None:
    good, bad = MemoryFile(DATA), MemoryFile(DATA)
    file = replica(bad, good)
    bad.always = fault
    loaded = Loaded(file)
    assert loaded.failures == [] and loaded.bytes == DATA
    assert list(loaded.status.refusals) == ["s3://bucket-0"]
    assert loaded.status.failovers["s3://bucket-0 -> s3://bucket-1"] > 0
    assert len(bad.requests) <= 2 + 2  # those of the header, and the trials


def test_source_that_stalls_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    good, bad = MemoryFile(DATA), MemoryFile(DATA)
    file = replica(bad, good, silent_seconds=0.2)
    plain = replicas.Stream.next

    def next_of(stream: replicas.Stream, seconds: float) -> Any:  # a busy machine stalls the other
        return plain(stream, seconds if stream._file is bad else 60.0)

    monkeypatch.setattr(replicas.Stream, "next", next_of)
    bad.always = Fault(bytes=1000, hang=gate)
    loaded = Loaded(file)
    assert loaded.bytes == DATA
    assert "sent nothing for 0.2 s" in loaded.status.refusals["s3://bucket-0"]
    gate.set()


def test_silent_source_is_not_left_if_it_is_the_last_one() -> None:
    down, slow = MemoryFile(DATA), MemoryFile(DATA)
    file = replica(down, slow, silent_seconds=0.02)
    file._sources.abandon(file._sources.all[0], "it is down")
    slow.always = Fault(seconds=0.3)
    loaded = Loaded(file, step=1 << 20)
    assert loaded.failures == [] and loaded.bytes == DATA
    assert list(loaded.status.refusals) == ["s3://bucket-0"]


def test_wait_for_the_last_source_ends_with_the_file() -> None:
    gate = threading.Event()
    hung = MemoryFile(DATA)
    file = replica(hung, silent_seconds=0.02)
    hung.always = Fault(hang=gate)
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(file.read, 0, 100)
        assert wait([reading], 0.2).not_done
        file.close()
        with pytest.raises(GdsloadError, match="all sources failed"):
            reading.result(60)
        gate.set()


def test_sources_killed_at_random_points_leave_exact_bytes() -> None:
    rng = random.Random(23)
    gate = threading.Event()
    gate.set()
    for _ in range(60):
        files = [MemoryFile(DATA, chunk_bytes=5000) for _ in range(3)]
        file = replica(*files)
        alive = rng.randrange(3)
        for number, each in enumerate(files):
            if number != alive:
                die = rng.choice([REFUSED, Fault(bytes=rng.randrange(STEP), error=errno.EIO)])
                each._faults = [Fault(seconds=0.0005)] * rng.randrange(8)
                each.always = die
            else:
                each.always = Fault(seconds=0.0005)
        loaded = Loaded(file)
        assert loaded.failures == []
        assert loaded.bytes == DATA
        assert sum(loaded.paths.values()) == len(DATA)


def test_no_source_left_is_a_final_error_with_all_reasons() -> None:
    files = [MemoryFile(DATA), MemoryFile(DATA)]
    file = replica(*files)
    for each in files:
        each.always = REFUSED
    loaded = Loaded(file)
    assert loaded.failures and all(failure.final for failure in loaded.failures)
    assert "bucket-0" in loaded.failures[0].text and "bucket-1" in loaded.failures[0].text


@pytest.mark.parametrize(
    "other,why",
    [
        (shard_of(2_000_001), "bytes instead of"),
        (shard_of(2_000_000, "b"), "another header"),
        (DATA[:4], "bytes instead of"),
    ],
)
def test_source_with_another_version_is_left(other: bytes, why: str) -> None:
    files = [MemoryFile(DATA), MemoryFile(other)]
    file = replica(*files)
    loaded = Loaded(file)
    assert loaded.bytes == DATA
    assert why in loaded.status.refusals["s3://bucket-1"]


def test_source_with_another_digest_is_left() -> None:
    other = bytearray(DATA)
    other[-1] ^= 1
    files = [MemoryFile(DATA), MemoryFile(DATA), MemoryFile(bytes(other))]
    files[1].digest, files[2].digest = "xxh3:1", "xxh3:2"
    file = replica(*files)
    assert file.digest == "xxh3:1"
    assert Loaded(file).bytes == DATA
    assert len(files[2].requests) == 2


def test_digests_of_other_algorithms_are_not_compared() -> None:
    files = [MemoryFile(DATA) for _ in range(4)]
    for file, digest in zip(files, ("xxh3:1", "sha256:2", "sha256:3", ""), strict=True):
        file.digest = digest
    assert list(Loaded(replica(*files)).status.refusals) == ["s3://bucket-2"]


def test_changed_source_is_noticed_at_the_end() -> None:
    files = [MemoryFile(DATA), MemoryFile(DATA)]
    file = replica(*files)
    file.verify_unchanged()
    files[1].changed = True
    with pytest.raises(FileChanged):
        file.verify_unchanged()
    file.close()
    assert all(each.closed for each in files)


def test_exception_of_a_source_is_a_reason() -> None:
    class Odd(MemoryFile):
        def chunks(self, offset: int, length: int) -> Iterator[memoryview]:
            if offset > 1000:
                raise KeyError("odd")
            yield from super().chunks(offset, length)

    file = replica(Odd(DATA), MemoryFile(DATA))
    assert Loaded(file).bytes == DATA
    assert file.facts().refusals["s3://bucket-0"] == "KeyError: 'odd'"


def test_no_thread_for_a_source_reads_in_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "start_thread", lambda *_: None)
    assert Loaded(replica(MemoryFile(DATA), MemoryFile(DATA))).bytes == DATA


def test_caller_that_stops_early_gives_the_place_back() -> None:
    file = replica(MemoryFile(DATA, chunk_bytes=1000), most_requests=1)
    for _ in range(5):
        chunks = file.chunks(0, 100_000)
        assert bytes(next(chunks)) == DATA[:1000]
        chunks.close()  # type: ignore[attr-defined]
    assert file.read(0, len(DATA)) == DATA


def test_only_what_another_source_sent_counts_as_taken_over() -> None:
    files = [MemoryFile(DATA) for _ in range(3)]
    file = replica(*files)
    size = len(DATA)
    for each, fault in zip(files, (REFUSED, REFUSED, Fault()), strict=True):
        each.always = fault
    assert b"".join(map(bytes, file.chunks(0, size))) == DATA
    assert file.facts().failovers == {"s3://bucket-0 -> s3://bucket-2": size}


def test_failover_to_sources_that_fail_counts_nothing() -> None:
    files = [MemoryFile(DATA) for _ in range(2)]
    file = replica(*files)
    for each in files:
        each.always = REFUSED
    with pytest.raises(GdsloadError, match="all sources failed"):
        file.read(0, len(DATA))
    assert file.facts().failovers == {}


def test_second_load_reports_its_own_bytes() -> None:
    bad, good = MemoryFile(DATA), MemoryFile(DATA)
    file = replica(bad, good)
    bad.always = REFUSED
    assert Loaded(file).status.failovers
    second = Loaded(file)
    assert second.status.failovers == {} and second.status.refusals
    assert second.paths == {"object_store/s3": len(DATA)}
