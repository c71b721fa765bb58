"""Checkpoints that several sources have: object stores, and directories of this machine."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
from descriptors import none_left
from gdsload.checkpoint.manifest import MANIFEST_NAME
from gdsload.errors import (
    CheckpointAccessError,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    FileChanged,
    RemoteError,
    StallError,
)
from gdsload.events import Event, FailedOver
from gdsload.integrations.transformers import stand_ins
from gdsload.remote import object_store, replica_directory
from gdsload.remote.directory import RemoteDirectory
from gdsload.remote.file import RemoteFile
from gdsload.remote.object_store import INSTALL_HINT
from gdsload.remote.replica_directory import LocalFile, ReplicaDirectory
from gdsload.remote.urls import is_url, joined, sources_of, split_file, without_secrets
from object_server import ObjectServer
from remotefiles import REFUSED, Fault, MemoryDirectory, MemoryFile

PATIENCE_SECONDS = 240.0
TENSORS = {f"layer.{i}": torch.arange(i * 1000, i * 1000 + 60_000) for i in range(6)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two shards and an index."""
    folder = tmp_path_factory.mktemp("model")
    names = sorted(TENSORS)
    weight_map = {}
    for number, part in enumerate((names[:3], names[3:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        safetensors.torch.save_file({name: TENSORS[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(str(index).replace("'", '"'))
    return folder


Directories = Callable[[str], MemoryDirectory]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, model: Path) -> Directories:
    """The directory in memory of a URL mem://..., which the library then opens."""
    made: dict[str, MemoryDirectory] = {}
    real = replica_directory.open_directory

    def of(url: str) -> MemoryDirectory:
        if url not in made:
            made[url] = MemoryDirectory(url, model)
        return made[url]

    def open_any(url: str) -> RemoteDirectory:
        return of(url) if url.startswith("mem://") else real(url)

    monkeypatch.setattr(replica_directory, "open_directory", open_any)
    return of


def assert_exact(tensors: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor), name


def load(*sources: Any, **how: Any) -> gdsload.LoadReport:
    """Loads from these sources: the report."""
    assert_exact(gdsload.load_file(gdsload.replicas(*sources), **how))
    return gdsload.last_report()


# Names.


def test_url_names_all_sources_in_order(tmp_path: Path) -> None:
    url = gdsload.replicas("s3://u:p@b/m?x=1", tmp_path)
    assert sources_of(url) == ["s3://u:p@b/m?x=1", str(tmp_path)]
    assert without_secrets(url) == f"replicas://s3://b/m|{tmp_path}"
    assert sources_of(joined(url, "sub")) == ["s3://u:p@b/m/sub?x=1", f"{tmp_path}/sub"]
    assert gdsload.replicas(url, "gs://c") == f"{url}|gs://c"
    assert sources_of("s3://b/m") == []


def test_files_of_one_name_are_split() -> None:
    folder, name = split_file(gdsload.replicas("s3://b/m/a.safetensors", "/x/a.safetensors"))
    assert (folder, name) == ("replicas://s3://b/m|/x", "a.safetensors")
    with pytest.raises(CheckpointError, match="different names"):
        split_file(gdsload.replicas("s3://b/m/a.safetensors", "/x/b.safetensors"))


@pytest.mark.parametrize("sources", [(), ("",), ("a|b",)])
def test_impossible_sources_are_refused(sources: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError, match="sources are not empty"):
        gdsload.replicas(*sources)


# Loads.


def test_object_store_and_directory_load_together(
    object_server: ObjectServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    shutil.copytree(model, object_server.root / "model")
    report = load(object_server.url("s3", "model"), model)
    assert report.backend == "replicas"
    assert set(report.paths) <= {"object_store/s3", "replicas/file"}
    assert sum(report.paths.values()) == report.read_bytes
    assert report.refusals == {} and report.failovers == {}


def test_object_store_that_dies_is_replaced(
    object_server: ObjectServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 0.2)
    shutil.copytree(model, object_server.root / "model")
    url = object_server.url("s3", "model")
    with gdsload.Checkpoint.open(gdsload.replicas(url, model)) as checkpoint:
        assert len(checkpoint.shards) == 2
    object_server.script("503", path="*.safetensors", first=4, count=None)
    report = load(url, model, options={"request_bytes": 1 << 16})
    assert sum(report.paths.values()) == report.read_bytes
    assert any(request.fault for request in object_server.requests)
    assert report.failovers


def test_failover_is_in_the_report_of_one_read(memory: Directories, model: Path) -> None:
    name = sorted(each.name for each in model.glob("*.safetensors"))[0]
    events: list[FailedOver] = []

    def note(event: Event) -> None:
        if isinstance(event, FailedOver):
            events.append(event)

    source = gdsload.replicas(f"mem://a/{name}", model / name)
    with gdsload.safe_open(source, on_event=note) as opened:
        memory("mem://a").files[name].always = REFUSED
        found = []
        for tensor in opened.offset_keys():
            opened.get_tensor(tensor)
            found.append(sum(gdsload.last_report().failovers.values()))
    assert found[0] > 0 and not any(found[1:])
    assert sum(event.nbytes for event in events) == found[0]


@pytest.mark.parametrize("missing", ["directory", "model", "shard"])
def test_source_without_the_files_is_left(model: Path, tmp_path: Path, missing: str) -> None:
    other = tmp_path / "other"
    if missing != "directory":
        other.mkdir()
    if missing == "shard":
        for each in sorted(model.iterdir())[1:]:
            shutil.copy(each, other)
    for sources in ((other, model), (model, other)):
        report = load(*sources)
        assert list(report.refusals) == [str(other)]


def test_source_whose_header_cannot_be_read_is_left(memory: Directories, model: Path) -> None:
    def refuse(file: MemoryFile) -> None:
        file.always = REFUSED

    memory("mem://refuses").prepare = refuse
    report = load("mem://refuses", model)
    assert "failed" in report.refusals["mem://refuses"]
    with pytest.raises(CheckpointError, match="no source"):
        gdsload.load_file(gdsload.replicas("mem://refuses"))


def test_other_files_may_differ_and_be_missing(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "config.json").write_text('{"a": 1}')
    directory = ReplicaDirectory(gdsload.replicas(model, other))
    assert directory.read("config.json", 100) == b'{"a": 1}'
    assert directory.open("config.json").read(0, 8) == b'{"a": 1}'
    facts = directory.open(sorted(other.glob("*.safetensors"))[0].name).facts()
    assert facts is not None and facts.refusals == {}


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.ENOTDIR])
def test_directory_with_another_file_that_may_not_be_read_is_used(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refusing, other = tmp_path / "refusing", tmp_path / "other"
    for each in (refusing, other):
        shutil.copytree(model, each)
        (each / "config.json").write_text("{}")
    plain = os.stat

    def stat(path: Any, **how: Any) -> os.stat_result:
        if path == str(refusing / "config.json"):
            raise OSError(code, os.strerror(code))
        return plain(path, **how)

    monkeypatch.setattr(os, "stat", stat)
    directory = ReplicaDirectory(gdsload.replicas(refusing, other))
    assert directory.read("config.json", 100) == b"{}"
    facts = directory.open(sorted(model.glob("*.safetensors"))[0].name).facts()
    assert facts is not None and facts.refusals == {}


def test_one_file_of_several_sources_loads(model: Path, tmp_path: Path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "all.safetensors")
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(tmp_path / "all.safetensors", other)
    load(tmp_path / "all.safetensors", other / "all.safetensors")


def test_all_sources_missing_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no source"):
        gdsload.load_file(gdsload.replicas(tmp_path / "a", tmp_path / "b"))


def test_source_that_does_not_answer_is_left(
    memory: Directories, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_directory, "PATIENCE_SECONDS", 0.2)
    gate = threading.Event()
    memory("mem://hangs").ask = lambda: bool(gate.wait())
    report = load("mem://hangs", model)
    assert "not answered" in report.refusals["mem://hangs"]
    gate.set()


def test_source_that_hangs_is_left_if_the_other_cannot_be_listed(
    memory: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a web server beside a directory of a mount that hangs."""
    monkeypatch.setattr(replica_directory, "PATIENCE_SECONDS", 0.1)
    gate = threading.Event()

    def cannot_list(self: MemoryDirectory) -> list[str]:
        raise CheckpointError(f"{self.path} cannot list its files")

    def hang() -> None:
        gate.wait(PATIENCE_SECONDS)

    hanging, web = memory("mem://hangs"), memory("mem://web")
    hanging.ask = hang
    monkeypatch.setattr(web, "names", partial(cannot_list, web))
    try:
        assert_exact(gdsload.load_file(gdsload.replicas("mem://hangs", "mem://web")))
    finally:
        gate.set()
    assert "mem://hangs" in str(gdsload.last_report().refusals)
    assert web.files


def test_manifest_that_no_source_sends_is_a_stall(
    memory: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, opened = threading.Event(), MemoryDirectory.open

    def hangs(self: MemoryDirectory, name: str) -> RemoteFile:
        if name == MANIFEST_NAME:
            gate.wait(PATIENCE_SECONDS)
        return opened(self, name)

    monkeypatch.setattr(MemoryDirectory, "open", hangs)
    source = gdsload.replicas("mem://a", "mem://b")
    try:
        with pytest.raises(StallError, match="mem://a"):
            gdsload.load_file(source, verify="checksum", stall_seconds=0.2)
    finally:
        gate.set()


@pytest.mark.parametrize("call", ["names", "open"])
def test_sources_of_a_model_that_never_answer_are_a_stall(
    call: str, memory: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), getattr(MemoryDirectory, call)

    def hangs(self: MemoryDirectory, *words: str) -> Any:
        gate.wait(PATIENCE_SECONDS)
        return real(self, *words)

    in_time = {"stall_seconds": 0.2}
    for name in ("in_thread", "parallel_map"):
        monkeypatch.setattr(stand_ins, name, partial(getattr(stand_ins, name), **in_time))
    monkeypatch.setattr(MemoryDirectory, call, hangs)
    source = gdsload.replicas("mem://a", "mem://b")
    try:
        with pytest.raises(StallError), stand_ins.stand_in(source, {}):
            pass
    finally:
        gate.set()


class Panic(BaseException):
    """As of native code."""


def test_panic_of_the_only_source_is_its_reason(memory: Directories) -> None:
    def panic() -> None:
        raise Panic("it panicked")

    for url in ("mem://a", "mem://b"):
        memory(url).ask = panic
    with pytest.raises(CheckpointUnreadable, match="it panicked"):
        gdsload.load_file(gdsload.replicas("mem://a", "mem://b"))


def test_source_that_panics_while_it_sends_is_replaced(memory: Directories, model: Path) -> None:
    name = sorted(each.name for each in model.glob("*.safetensors"))[0]
    source = gdsload.replicas(f"mem://a/{name}", model / name)
    with gdsload.safe_open(source) as opened:
        memory("mem://a").files[name].always = Fault(bytes=0, crash=Panic("it panicked"))
        reasons = []
        for tensor in opened.offset_keys():
            assert torch.equal(opened.get_tensor(tensor), TENSORS[tensor])
            reasons += gdsload.last_report().refusals.values()
    assert any("it panicked" in reason for reason in reasons)


@pytest.mark.parametrize("kind", [CheckpointUnreadable, CheckpointAccessError])
def test_source_that_is_down_is_asked_once(
    memory: Directories, model: Path, kind: type[CheckpointUnreadable]
) -> None:
    asked = []

    def fail() -> None:
        asked.append(1)
        raise kind("it is down, or forbidden")

    memory("mem://down").ask = fail
    load("mem://down", model)
    down = kind is CheckpointUnreadable
    assert len(asked) == 1 if down else len(asked) > 1  # what is forbidden may be the list alone


def test_source_that_works_tells_what_is_missing(memory: Directories, model: Path) -> None:
    def fail() -> None:
        raise CheckpointUnreadable("it is down")

    memory("mem://down").ask = fail
    directory = ReplicaDirectory(gdsload.replicas("mem://down", model))
    for _ in range(2):  # while the other is asked, and when it was left
        with pytest.raises(CheckpointNotFound, match="it is down"):
            directory.read("missing.json", 100)


def test_other_files_of_each_source_are_found(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "unused.safetensors"):
        (other / name).write_text("{}")
    directory = ReplicaDirectory(gdsload.replicas(model, other))
    assert set(directory.names()) == {*(each.name for each in model.iterdir()), "config.json"}
    assert directory.read("config.json", 100) == b"{}"


def test_client_that_is_not_installed_is_a_reason(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    report = load("s3://bucket/model", model)
    assert INSTALL_HINT in report.refusals["s3://bucket/model"]


def test_sources_killed_at_random_points_load_exactly(memory: Directories, model: Path) -> None:
    rng = random.Random(41)
    for number in range(40):
        names = [f"mem://{number}-{each}" for each in range(3)]
        alive = rng.choice(names)
        for name in names:
            if name != alive:
                until, fault = (
                    rng.randrange(1, 12),
                    rng.choice([REFUSED, Fault(bytes=100, error=5)]),
                )

                def prepare(file: MemoryFile, until: int = until, fault: Fault = fault) -> None:
                    file._faults = [Fault(seconds=0.0005)] * until
                    file.always = fault

                memory(name).prepare = prepare
        report = load(*names, options={"request_bytes": 1 << 16, "depth": 6})
        assert sum(report.paths.values()) == report.read_bytes
        assert alive not in report.refusals


def test_wrong_version_of_a_source_is_left(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    shard = sorted(other.glob("*.safetensors"))[1]
    safetensors.torch.save_file({"layer.9": torch.ones(3)}, shard)
    report = load(model, other)
    assert "differs" in report.refusals[str(other)]


def test_changed_local_file_ends_the_load(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    with gdsload.Checkpoint.open(gdsload.replicas(other)) as checkpoint:
        shard = sorted(other.glob("*.safetensors"))[0]
        os.utime(shard, ns=(time.time_ns(), 1))
        with pytest.raises(FileChanged):
            checkpoint.verify_unchanged()


def test_local_file_written_in_place_ends_the_load_whatever_its_mtime_says(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(200))
    before = path.stat()
    file = LocalFile(str(path))
    path.write_bytes(bytes(range(200)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(FileChanged):
        file.verify_unchanged()
    file.close()


def test_every_face_takes_several_sources(model: Path, memory: Directories) -> None:
    source = gdsload.replicas("mem://a", model)
    assert_exact(dict(gdsload.stream(source)))
    targets = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    gdsload.load_into(targets, source)
    assert_exact(targets)
    assert gdsload.plan(source).wanted_bytes == sum(t.nbytes for t in TENSORS.values())
    with gdsload.prefetch(source) as prefetch:
        prefetch.wait()
        assert_exact(gdsload.load_file(source))


# Files of this machine.


def test_local_file_that_is_truncated_is_a_final_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    file = LocalFile(str(path))
    assert file.read(3, 100) == bytes(range(3, 103))
    os.truncate(path, 50)
    with pytest.raises(RemoteError, match="ended at byte 50") as caught:
        file.read(0, 200)
    assert caught.value.final
    with pytest.raises(FileChanged):
        file.verify_unchanged()
    file.close()
    file.close()


def test_local_file_that_cannot_be_examined_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"data")
    file = LocalFile(str(tmp_path / "file"))

    def fail(_: int) -> os.stat_result:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        with pytest.raises(RemoteError, match="not permitted"):
            file.verify_unchanged()
    file.verify_unchanged()


@pytest.mark.parametrize("changed", [False, True])
def test_quiesced_local_file_is_opened_again_if_it_is_the_same(
    tmp_path: Path, changed: bool
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"before")
    with none_left():
        file = LocalFile(str(path))
        file.quiesce()
        assert str(path) not in map(os.path.realpath, Path("/proc/self/fd").iterdir())
        if changed:
            path.with_suffix(".new").write_bytes(b"behind")
            path.with_suffix(".new").rename(path)
            file.verify_unchanged()  # nothing was read since
            for _ in range(2):
                with pytest.raises(RemoteError, match="it was replaced by another file"):
                    file.read(0, 6)
        else:
            assert file.read(0, 6) == b"before"
            file.verify_unchanged()
        file.close()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a regular file"):
        ReplicaDirectory(gdsload.replicas(tmp_path.parent)).open(tmp_path.name)
    assert is_url(gdsload.replicas(tmp_path))
