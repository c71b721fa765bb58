"""Loads from object stores through every entry point: exact bytes, one version, honest reports."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as reference_load_file, save_file

import gdsload
from command import answer, run
from gdsload import warmup
from gdsload.checkpoint import Shard
from gdsload.checkpoint.manifest import MANIFEST_NAME
from gdsload.errors import BackendUnavailable, CheckpointError, FileChanged, IntegrityError
from gdsload.remote import object_store
from gdsload.system.storage import REMOTE_DEPTH
from gpudoubles import Doubles
from object_server import ObjectServer

pytest.importorskip("obstore")

SCHEMES = ("s3", "gs", "az", "http")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def wanted(tiny_checkpoint: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(tiny_checkpoint.glob("*.safetensors")):
        tensors |= reference_load_file(file)
    return tensors


@pytest.fixture
def large(object_server: ObjectServer) -> str:
    """The URL of 24 MB in one file, which take several requests."""
    folder = object_server.root / "large"
    folder.mkdir()
    tensors = {f"{number}": torch.randint(2**60, (1_000_000,)) for number in range(3)}
    save_file(tensors, folder / "model.safetensors")
    return object_server.url("s3", "large")


def raw(tensor: Any) -> torch.Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def require_same(got: Tensors, wanted: Tensors) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(raw(got[name]), raw(tensor)), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_load_file_is_exact_and_reports_its_path(
    server: ObjectServer, wanted: Tensors, scheme: str
) -> None:
    require_same(gdsload.load_file(server.url(scheme, "model")), wanted)
    report = gdsload.last_report()
    assert report.source == server.url(scheme, "model")
    assert report.backend == "object_store"
    assert report.paths == {f"object_store/{scheme}": report.read_bytes}
    assert (report.filesystem, report.choice) == (scheme, "")


def test_large_file_is_read_by_several_requests_at_once(
    object_server: ObjectServer, large: str
) -> None:
    object_server.latency_seconds = 0.5
    got = gdsload.load_file(large, options={"request_bytes": 1 << 20, "depth": 8})
    require_same(got, reference_load_file(object_server.root / "large" / "model.safetensors"))
    assert 2 < object_server.most_at_once <= 8
    # Nothing is read twice but the header.
    size = (object_server.root / "large" / "model.safetensors").stat().st_size
    assert object_server.sent_bytes < size + (1 << 20)


def test_file_is_loaded_by_its_url(url: str, wanted: Tensors) -> None:
    name = "model-00001-of-00002.safetensors"
    got = gdsload.load_file(f"{url}/{name}")
    require_same(got, {key: wanted[key] for key in got})


def test_names_and_slices_read_a_part(object_server: ObjectServer, large: str) -> None:
    whole = reference_load_file(object_server.root / "large" / "model.safetensors")
    object_server.forget()
    got = gdsload.load_file(large, names=["1"], slices={"1": slice(10, 20)})
    require_same(got, {"1": whole["1"][10:20]})
    assert object_server.sent_bytes < 1 << 20


@pytest.mark.parametrize("order", ["file", "layers"])
def test_stream_yields_all_in_windows(url: str, wanted: Tensors, order: str) -> None:
    require_same(dict(gdsload.stream(url, order=order, window_bytes=100_000)), wanted)


def test_stream_takes_a_list_of_urls(url: str, wanted: Tensors) -> None:
    files = [f"{url}/model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    require_same(dict(gdsload.stream(files)), wanted)


def test_load_into_writes_all(url: str, wanted: Tensors) -> None:
    targets = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    report = gdsload.load_into(targets, url)
    require_same(targets, wanted)
    assert report.source == url


def test_safe_open_reads_tensors_and_slices(url: str, wanted: Tensors) -> None:
    name = max(wanted, key=lambda name: wanted[name].nbytes)
    with gdsload.safe_open(url, framework="pt") as opened:
        assert sorted(opened.keys()) == sorted(wanted)
        assert torch.equal(opened.get_tensor(name), wanted[name])
        assert torch.equal(opened.get_slice(name)[3:5], wanted[name][3:5])


def test_plan_has_larger_requests_and_gaps_than_for_disks(url: str, large: str) -> None:
    planned = gdsload.plan(large)
    assert max(read.length for read in planned.transfers) > 4 << 20
    assert planned.wanted_bytes == 24_000_000
    assert len(gdsload.plan(url).merged_ranges) == 2  # one for each file


def sockets() -> int:
    """Open sockets of this process."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(
            OSError
        ):  # the descriptor of the listing, and those that are closed meanwhile
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


def test_quiesce_closes_connections_and_files_are_read_afterwards(
    url: str, wanted: Tensors
) -> None:
    before = sockets()
    with gdsload.safe_open(url, framework="pt") as opened:
        opened.get_tensor(next(iter(wanted)))
        assert sockets() > before
        gdsload.quiesce()
        deadline = time.monotonic() + 20
        while sockets() > before and time.monotonic() < deadline:  # both ends are in this process
            time.sleep(0.01)
        assert sockets() <= before
        gdsload.resume()
        require_same(opened.get_tensors(), wanted)


@pytest.mark.parametrize("keep", [False, True])
def test_load_takes_over_what_was_prefetched(
    server: ObjectServer, url: str, wanted: Tensors, keep: bool
) -> None:
    with gdsload.prefetch(url, keep=keep) as ahead:
        ahead.wait()
        server.forget()
        require_same(gdsload.load_file(url), wanted)
    assert set(gdsload.last_report().paths) == {"prefetched"}
    assert len(server.reads("model/model-*")) == 2  # headers


def test_load_does_not_take_over_another_version(
    server: ObjectServer, url: str, wanted: Tensors
) -> None:
    with gdsload.prefetch(url) as ahead:
        ahead.wait()
        path = server.root / "model" / "model-00001-of-00002.safetensors"
        tensors = {name: tensor + 1 for name, tensor in reference_load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
        require_same(gdsload.load_file(url), {**wanted, **tensors})


def test_page_cache_tier_is_refused(url: str) -> None:
    with (
        gdsload.prefetch(url, tier="pagecache") as ahead,
        pytest.raises(CheckpointError, match="local files only"),
    ):
        ahead.wait()


def test_host_pool_serves_the_second_load(server: ObjectServer, url: str, wanted: Tensors) -> None:
    with warmup.HostPool(64 << 20):
        require_same(gdsload.load_file(url), wanted)
        server.forget()
        require_same(gdsload.load_file(url), wanted)
    assert set(gdsload.last_report().paths) == {"pool"}
    assert len(server.reads("model/model-*")) == 2  # headers


def test_device_gets_exact_bytes(loading: Doubles, url: str, wanted: Tensors) -> None:
    got = gdsload.load_file(url, "cuda:0")
    require_same({name: tensor for name, tensor in got.items()}, wanted)
    report = gdsload.last_report()
    assert (report.backend, report.device) == ("object_store", "cuda:0")
    assert set(report.paths) == {"object_store/s3"}


def test_object_replaced_before_the_data_is_a_changed_file(
    object_server: ObjectServer, large: str
) -> None:
    object_server.script("replaced", path="large/*", first=2)
    with pytest.raises(FileChanged, match=r"s3://bucket/large/model.safetensors"):
        gdsload.load_file(large)
    object_server.restore()
    gdsload.load_file(large)


@pytest.mark.parametrize(("cache_dir", "why"), [("", "it is empty"), ("s3://b/c", "is a URL")])
def test_wrong_directory_of_the_cache_is_named(large: str, cache_dir: str, why: str) -> None:
    with pytest.raises(CheckpointError, match=f"^cache_dir: .*{why}") as raised:
        gdsload.load_file(large, cache_dir=cache_dir)
    assert not isinstance(raised.value, FileNotFoundError)


def test_failure_names_file_and_tensor(
    object_server: ObjectServer, large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 0.3)
    object_server.script("500", path="large/*", first=2, count=None)
    with pytest.raises(
        gdsload.ReadError, match=r"s3://bucket/large/model.safetensors.*tensor '[012]'"
    ):
        gdsload.load_file(large)


def test_depth_follows_the_fastest_first_request(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = property(lambda shard: 0.06 if "00001" in shard.name else 0.04, lambda *_: None)
    monkeypatch.setattr(Shard, "first_read_seconds", seconds, raising=False)
    gdsload.load_file(url)
    assert gdsload.last_report().depth == 2 * REMOTE_DEPTH


@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_cache_has_no_effect(url: str, wanted: Tensors, cache: str) -> None:
    require_same(gdsload.load_file(url, cache=cache, page_cache="drop"), wanted)


def test_mapping_is_refused(url: str) -> None:
    with pytest.raises(CheckpointError, match="only local files can be mapped"):
        gdsload.load_file(url, cache="mapped")


def test_backend_of_files_is_refused(url: str) -> None:
    with pytest.raises(BackendUnavailable, match="'object_store' reads them"):
        gdsload.load_file(url, backend="posix")


@pytest.mark.parametrize("cache", ["auto", "direct"])
@pytest.mark.parametrize("backend", ["object_store", "nixl", "replicas"])
def test_backend_of_remote_files_refuses_files(
    backend: str, cache: str, tiny_checkpoint: Path
) -> None:
    with pytest.raises(BackendUnavailable, match="reads only remote files"):
        gdsload.load_file(tiny_checkpoint, backend=backend, cache=cache)


# --- checksums, command line ----------------------------------------------------------------------


@pytest.fixture
def with_manifest(server: ObjectServer, url: str) -> str:
    """The URL, with a manifest that was made by reading from it."""
    path = server.root / "model" / MANIFEST_NAME
    answer("manifest", url, "--algorithm", "sha256", "--output", path)
    return url


def test_manifest_beside_the_objects_is_compared(
    server: ObjectServer, with_manifest: str, wanted: Tensors
) -> None:
    require_same(gdsload.load_file(with_manifest, verify="checksum"), wanted)
    assert gdsload.last_report().verified_bytes == sum(t.nbytes for t in wanted.values())
    path = server.root / "model" / "model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"s3://bucket/model/model-00002"):
        gdsload.load_file(with_manifest, verify="checksum")


def test_missing_manifest_names_the_command(url: str) -> None:
    with pytest.raises(CheckpointError, match="gdsload manifest s3://bucket/model --output"):
        gdsload.load_file(url, verify="checksum")


def test_commands_take_urls(with_manifest: str, tiny_checkpoint: Path) -> None:
    local = answer("inspect", tiny_checkpoint)
    remote = answer("inspect", with_manifest)
    assert remote["total_bytes"] == local["total_bytes"]
    assert answer("plan", with_manifest)["wanted_bytes"] == local["total_bytes"]
    assert answer("verify", with_manifest)["bytes"] == local["total_bytes"]
    loaded = answer("load", with_manifest, "--verify")
    assert loaded["verified"]
    assert set(loaded["runs"][0]["paths"]) == {"object_store/s3"}


@pytest.mark.parametrize(
    "words,text",
    [
        (("manifest",), "SOURCE is a URL: --output names the file to write"),
        (("load", "--cold"), "--cold is for local files"),
        (("warmup",), "SOURCE is a URL: the page cache is for files"),
        (("warmup", "--wait"), "SOURCE is a URL: the page cache is for files"),
    ],
)
def test_commands_for_files_refuse_urls(url: str, words: tuple[str, ...], text: str) -> None:
    command, *options = words
    refused = run(command, url, *options)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert text in refused.stderr


def test_report_has_no_secrets(server: ObjectServer) -> None:
    signed = f"{server.url('http', 'model')}?X-Signature=hidden".replace("127", "a:b@127", 1)
    gdsload.load_file(signed)
    assert "hidden" not in gdsload.last_report().to_json()
    assert "a:b" not in gdsload.last_report().to_json()
