"""Loads from a URL with a local cache: the second one reads local files."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import gdsload
from command import answer
from gdsload import Checkpoint, CheckpointError, events, warmup
from gdsload.checkpoint.manifest import MANIFEST_NAME
from gdsload.distribution.exchange import agreed_layouts
from gdsload.loading import claims
from gdsload.loading.batch import Batch
from gdsload.loading.session import Session
from gdsload.loading.settings import ReadSettings
from gdsload.planning.read_plan import byte_ranges_of
from gdsload.remote.cache import LocalCache
from gdsload.remote.cache_entry import Entry
from gdsload.report import LoadReport
from object_server import ObjectServer
from threadends import await_threads

pytest.importorskip("obstore")
pytest.importorskip("xxhash")


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the cache a size that does not depend on how full the disk is."""
    monkeypatch.setenv("GDSLOAD_CACHE_BYTES", "1000000000")


def read_all(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {shard.name: shard.read(0, shard.size) for shard in checkpoint.shards}


def test_second_opening_is_one_of_local_files(server: ObjectServer, tmp_path: Path) -> None:
    url, cache = server.url("s3", "model"), tmp_path / "cache"
    with Checkpoint.open(url, cache_dir=cache) as first:
        assert first.remote
        content = read_all(first)
    server.forget()
    await_threads("gdsload-cache")
    with Checkpoint.open(url, cache_dir=cache) as second:
        assert not second.remote
        assert read_all(second) == content
        assert (second.source, second.tensors) == (first.source, first.tensors)
        second.verify_unchanged()
    assert len(server.reads("*.safetensors")) == len(first.shards)  # for the ETag


def test_copy_whose_status_cannot_be_read_costs_the_cache_and_not_the_load(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, cache = server.url("s3", "model"), tmp_path / "cache"
    with Checkpoint.open(url, cache_dir=cache) as checkpoint:
        content = read_all(checkpoint)
    plain = os.fstat
    for failing in checkpoint.shards:
        copy = next(path for path in cache.rglob(failing.name)).stat().st_ino

        def fstat(fd: int, copy: int = copy) -> os.stat_result:
            status = plain(fd)
            if status.st_ino == copy and sys._getframe(1).f_code.co_name == "_local_copy":
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return status

        monkeypatch.setattr(os, "fstat", fstat)
        with Checkpoint.open(url, cache_dir=cache) as again:
            assert again.remote
            assert read_all(again) == content


def test_partly_filled_cache_is_not_taken_for_local_files(
    server: ObjectServer, tmp_path: Path
) -> None:
    url, cache = server.url("s3", "model"), tmp_path / "cache"
    with Checkpoint.open(url, cache_dir=cache) as checkpoint:
        checkpoint.shards[0].read(0, checkpoint.shards[0].size)
    with Checkpoint.open(url, cache_dir=cache) as checkpoint:
        assert checkpoint.remote


def test_replaced_object_is_fetched(server: ObjectServer, tmp_path: Path) -> None:
    url, cache = server.url("s3", "model"), tmp_path / "cache"
    with Checkpoint.open(url, cache_dir=cache) as checkpoint:
        read_all(checkpoint)
    name = checkpoint.shards[1].name
    path = server.root / "model" / name
    new = bytearray(path.read_bytes())
    new[-1] ^= 1
    path.write_bytes(new)
    with Checkpoint.open(url, cache_dir=cache) as checkpoint:
        assert checkpoint.remote
        assert read_all(checkpoint)[name] == new


def test_file_that_keeps_its_date_and_size_is_fetched_again(
    server: ObjectServer, tmp_path: Path
) -> None:
    server.etags = False
    path = server.root / "model" / "model-00001-of-00002.safetensors"
    url = server.url("http", f"model/{path.name}")
    gdsload.load_file(url, cache_dir=tmp_path / "cache")
    assert "no version" in gdsload.last_report().refusals["local cache"]
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = gdsload.load_file(url, cache_dir=tmp_path / "cache")
    wanted = load_file(path)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_files_that_differ_in_the_query_are_different_files(
    server: ObjectServer, tmp_path: Path
) -> None:
    path = "model/model-00001-of-00002.safetensors"
    cache = tmp_path / "cache"
    identities = set()
    for query in ("", "?rev=1", "?rev=2&token=secret", "?rev=2&token=other"):
        url = server.url("http", path) + query
        for source in (url, gdsload.replicas(url)):
            with Checkpoint.open(source) as checkpoint:
                identities.add(checkpoint.shards[0].identity)
        with Checkpoint.open(url, cache_dir=cache) as checkpoint:
            read_all(checkpoint)
    entries = LocalCache(cache).entries()
    assert len(entries) == 3
    assert server.url("http", path) in {entry.url for entry in entries}
    assert "secret" not in str(entries)
    assert len(identities) == 6


def test_local_files_are_kept_while_they_are_open(server: ObjectServer, tmp_path: Path) -> None:
    url, cache = server.url("s3", "model"), tmp_path / "cache"
    with Checkpoint.open(url, cache_dir=cache) as checkpoint:
        content = read_all(checkpoint)
    with Checkpoint.open(url, cache_dir=cache) as checkpoint:
        assert LocalCache(cache).clear() == []
        assert read_all(checkpoint) == content
        checkpoint.verify_unchanged()


def test_local_files_are_kept_after_quiesce_and_resume(
    server: ObjectServer, tmp_path: Path
) -> None:
    url, cache = server.url("s3", "model"), tmp_path / "cache"
    gdsload.load_file(url, cache_dir=cache)
    await_threads("gdsload-cache")
    with Checkpoint.open(url, cache_dir=cache) as checkpoint:
        assert not checkpoint.remote
        gdsload.quiesce()
        gdsload.resume()
        content = read_all(checkpoint)
        assert LocalCache(cache).clear() == []
        assert read_all(checkpoint) == content
        checkpoint.verify_unchanged()


# --- loads ---------------------------------------------------------------------------------------


def assert_same(found: dict[str, torch.Tensor], directory: Path) -> None:
    expected = gdsload.load_file(directory)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_second_load_reads_no_bytes_from_the_store(
    server: ObjectServer, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    url, cache = server.url("s3", "model"), tmp_path / "cache"
    assert_same(gdsload.load_file(url, cache_dir=cache), tiny_checkpoint)
    server.forget()
    await_threads("gdsload-cache")
    found = gdsload.load_file(url, cache_dir=cache)
    report = gdsload.last_report()
    assert_same(found, tiny_checkpoint)
    assert report.cached_bytes == report.wanted_bytes
    assert "local cache: " in report.summary()
    assert list(report.paths) == ["mapped"]
    assert len(server.reads("*.safetensors")) == 2  # the beginning of each file, for the ETag


def test_load_of_a_partly_filled_cache_is_exact_and_reported(
    object_server: ObjectServer, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    # One tensor beyond the first 128 KiB, which are fetched to open the file.
    tensors = {f"t{number}": torch.randn(300_000) for number in range(4)}
    (object_server.root / "model").mkdir()
    path = object_server.root / "model" / "model.safetensors"
    save_file(tensors, path)
    url, cache = object_server.url("s3", "model"), tmp_path / "cache"
    gdsload.load_file(url, names="t2", cache_dir=cache)
    seen: list[events.Event] = []
    found = gdsload.load_file(url, cache_dir=cache, on_event=seen.append)
    report = gdsload.last_report()
    assert_same(found, path)
    assert report.paths["local_cache"] == report.cached_bytes >= tensors["t2"].nbytes
    assert sum(report.paths.values()) == report.read_bytes
    assert {event.path for event in seen if isinstance(event, events.PathUsed)} == set(report.paths)


def test_bytes_of_batches_that_end_together_are_counted_once(url: str, tmp_path: Path) -> None:
    report = LoadReport(url)
    with (
        Checkpoint.open(url, cache_dir=tmp_path / "cache") as checkpoint,
        Session(checkpoint, report, ReadSettings()) as session,
    ):
        ranges = [each for each in byte_ranges_of(checkpoint) if not each.shard][:2]
        batches = [Batch(session, *session.arrange([each])) for each in ranges]
        for batch in batches:
            batch.wait()
        for batch in batches:
            batch.release()
        read_bytes = sum(batch.plan.read_bytes for batch in batches)
    assert report.read_bytes == sum(report.paths.values()) == read_bytes > 0


def test_cache_that_cannot_be_used_is_a_refusal_in_the_report(
    server: ObjectServer, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    (tmp_path / "file").touch()
    seen: list[events.Event] = []
    url = server.url("s3", "model")
    found = gdsload.load_file(url, cache_dir=tmp_path / "file", on_event=seen.append)
    assert "Not a directory" in gdsload.last_report().refusals["local cache"]
    assert_same(found, tiny_checkpoint)
    refused = [event.name for event in seen if isinstance(event, events.PathRefused)]
    assert refused == ["local cache"]


def test_flipped_byte_in_the_cache_is_fetched_again(
    server: ObjectServer, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    url, cache = server.url("s3", "model"), tmp_path / "cache"
    gdsload.load_file(url, cache_dir=cache)
    await_threads("gdsload-cache")
    for path in cache.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-7] ^= 16
        path.write_bytes(data)
    assert_same(gdsload.load_file(url, cache_dir=cache), tiny_checkpoint)
    await_threads("gdsload-cache")
    assert_same(gdsload.load_file(url, cache_dir=cache), tiny_checkpoint)
    assert list(gdsload.last_report().paths) == ["mapped"]


@pytest.mark.parametrize(
    ("scheme", "query", "verify"),
    [("s3", "", "checksum"), ("s3", "", "sha256"), ("http", "?a=/b/c", "checksum")],
)
def test_files_in_the_cache_are_compared_with_the_manifest_of_their_source(
    server: ObjectServer,
    tmp_path: Path,
    tiny_checkpoint: Path,
    scheme: str,
    query: str,
    verify: str,
) -> None:
    url, cache = server.url(scheme, "model") + query, tmp_path / "cache"
    made = server.root / "model" / MANIFEST_NAME
    answer("manifest", url, "--algorithm", "sha256", "--output", made)
    gdsload.load_file(url, cache_dir=cache)
    await_threads("gdsload-cache")
    found = gdsload.load_file(url, cache_dir=cache, verify=verify)
    report = gdsload.last_report()
    assert report.verified_bytes == report.cached_bytes == report.wanted_bytes > 0
    assert_same(found, tiny_checkpoint)


def test_every_face_uses_the_cache(
    server: ObjectServer, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    url, cache = server.url("s3", "model"), tmp_path / "cache"
    assert_same(dict(gdsload.stream(url, cache_dir=cache)), tiny_checkpoint)
    server.forget()
    targets = {name: torch.empty_like(t) for name, t in gdsload.load_file(tiny_checkpoint).items()}
    gdsload.load_into(targets, url, cache_dir=cache)
    assert_same(targets, tiny_checkpoint)
    with gdsload.safe_open(url, "pt", cache_dir=cache) as file:
        assert_same({name: file.get_tensor(name) for name in file.keys()}, tiny_checkpoint)  # noqa: SIM118
    with gdsload.prefetch(url, cache_dir=cache) as prefetch:
        prefetch.wait()
        assert_same(gdsload.load_file(url, cache_dir=cache), tiny_checkpoint)
    assert len(server.reads("*.safetensors")) == 8  # the beginning of each file


def test_load_from_the_cache_takes_over_what_the_prefetch_that_filled_it_has_read(
    url: str, tmp_path: Path
) -> None:
    where = {"cache_dir": tmp_path / "cache"}
    with gdsload.prefetch(url, **where) as prefetch:
        prefetch.wait()
        await_threads("gdsload-cache")
        with Checkpoint.open(url, **where) as checkpoint:
            assert not checkpoint.remote
        gdsload.load_file(url, **where)
    report = gdsload.last_report()
    assert report.paths == {"prefetched": report.wanted_bytes}


def test_load_from_the_cache_takes_over_what_the_host_pool_holds(url: str, tmp_path: Path) -> None:
    with warmup.HostPool(1 << 30):
        for path in ("object_store/s3", "pool"):
            gdsload.load_file(url, cache_dir=tmp_path / "cache")
            assert path in gdsload.last_report().paths
            await_threads("gdsload-cache")
    report = gdsload.last_report()
    assert report.paths == {"pool": report.wanted_bytes}


def test_backend_that_was_asked_for_by_name_leaves_the_rest_to_the_cache(
    url: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    asked = {"backend": "object_store", "cache_dir": tmp_path / "cache"}
    gdsload.load_file(url, **asked)
    await_threads("gdsload-cache")
    found = gdsload.load_file(url, cache="direct", **asked)
    assert gdsload.last_report().backend == "posix"
    assert_same(found, tiny_checkpoint)


def test_load_from_the_cache_waits_for_a_prefetch_of_the_same_url(url: str, tmp_path: Path) -> None:
    where = {"cache_dir": tmp_path / "cache"}
    gdsload.load_file(url, **where)
    await_threads("gdsload-cache")
    offer = claims.Offer(url)  # of a prefetch that opens the files
    claims.offer(offer)
    offer.note_progress(idle_seconds=100.0)
    try:
        gdsload.load_file(url, **where)
    finally:
        claims.withdraw(offer)
    assert "wait for the prefetch" in gdsload.last_report().phases


@pytest.mark.parametrize(
    ("mode", "path"), [("buffered", "prefetched"), ("auto", "object_store/s3")]
)
def test_load_without_the_cache_takes_over_memory_and_no_mapping_of_a_copy(
    url: str, tmp_path: Path, tiny_checkpoint: Path, mode: str, path: str
) -> None:
    gdsload.load_file(url, cache_dir=tmp_path / "cache")
    await_threads("gdsload-cache")
    with gdsload.prefetch(url, cache_dir=tmp_path / "cache", cache=mode) as prefetch:
        prefetch.wait()
        found = gdsload.load_file(url)
    assert list(gdsload.last_report().paths) == [path]
    assert_same(found, tiny_checkpoint)


def test_list_of_urls_is_loaded_from_the_cache(
    server: ObjectServer, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    cache = tmp_path / "cache"
    names = sorted(path.name for path in tiny_checkpoint.glob("*.safetensors"))
    urls = [server.url("s3", f"model/{name}") for name in names]
    assert_same(dict(gdsload.stream(urls, cache_dir=cache)), tiny_checkpoint)
    found = gdsload.load_file(urls, cache_dir=cache)
    report = gdsload.last_report()
    assert report.cached_bytes == report.wanted_bytes
    assert_same(found, tiny_checkpoint)


def test_model_is_loaded_from_the_cache(
    server: ObjectServer, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    url, cache = server.url("s3", "model"), tmp_path / "cache"
    expected = gdsload.from_pretrained(tiny_checkpoint).state_dict()
    for cached in (False, True):
        model = gdsload.from_pretrained(url, cache_dir=cache)
        report = gdsload.last_report()
        assert report.integration == "hook"
        assert (report.cached_bytes == report.wanted_bytes) == cached
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name])


def test_metrics_count_the_bytes_of_the_cache(server: ObjectServer, tmp_path: Path) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    url, cache = server.url("s3", "model"), tmp_path / "cache"
    gdsload.load_file(url, cache_dir=cache)
    registry = prometheus.CollectorRegistry()
    stop = gdsload.telemetry.record_metrics(registry)
    try:
        gdsload.load_file(url, cache_dir=cache)
        counted = registry.get_sample_value("gdsload_cached_bytes_total", {"kind": "load"})
    finally:
        stop()
    assert counted == gdsload.last_report().wanted_bytes


def test_files_of_several_sources_are_not_cached(
    server: ObjectServer, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    """A source with other bytes would be in the cache even after it was repaired."""
    source = gdsload.replicas(server.url("s3", "model"), tiny_checkpoint)
    found = gdsload.load_file(source, cache_dir=tmp_path / "cache")
    assert "several sources" in gdsload.last_report().refusals["local cache"]
    assert LocalCache(tmp_path / "cache").entries() == []
    assert_same(found, tiny_checkpoint)


def test_lock_that_cannot_be_released_does_not_end_the_load(
    server: ObjectServer, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(Entry, "unclaim", fail)
    tensors = gdsload.load_file(server.url("s3", "model"), cache_dir=tmp_path / "cache")
    expected = gdsload.load_file(tiny_checkpoint)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


class RanksInTurn:
    """Ranks that open a checkpoint one after the other: each hears those before it."""

    of_node = True

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def agree(self, answer: Any) -> list[Any]:
        self.answers.append(answer)
        return self.answers

    def open(self, url: str, cache: Path | None) -> bool:
        """Whether this rank has a copy."""
        with Checkpoint.open(url, cache_dir=cache) as checkpoint:
            with Session(checkpoint, LoadReport(url), ReadSettings(page_cache="keep")) as session:
                agreed_layouts(self, session, {}, 1)  # type: ignore[arg-type]
            return not checkpoint.remote


def test_ranks_with_a_copy_and_without_one_have_the_same_version(
    server: ObjectServer, url: str, tmp_path: Path
) -> None:
    gdsload.load_file(url, cache_dir=tmp_path / "cache")
    await_threads("gdsload-cache")
    ranks = RanksInTurn()
    assert ranks.open(url, tmp_path / "cache")
    assert not ranks.open(url, None)


def test_release_between_a_rank_with_a_copy_and_one_without_is_an_error(
    server: ObjectServer, url: str, tmp_path: Path
) -> None:
    gdsload.load_file(url, cache_dir=tmp_path / "cache")
    await_threads("gdsload-cache")
    ranks = RanksInTurn()
    assert ranks.open(url, tmp_path / "cache")
    for file in (server.root / "model").glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match="different versions"):
        ranks.open(url, tmp_path / "cache")
