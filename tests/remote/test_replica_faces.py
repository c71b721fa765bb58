"""Several sources on every face: sources that fail in the middle, that differ, and that are odd."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
from command import answer, run
from gdsload.errors import CheckpointError, GdsloadError, IntegrityError
from gdsload.remote import object_store, replica_directory
from object_server import ObjectServer

pytest.importorskip("obstore")

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(replica_directory, "PATIENCE_SECONDS", 60.0)  # of a busy machine


@pytest.fixture(scope="module")
def wanted(tiny_checkpoint: Path) -> Tensors:
    return gdsload.load_file(tiny_checkpoint)


@pytest.fixture(scope="module")
def whole_model(tiny_checkpoint: Path) -> Tensors:
    """What from_pretrained makes of the directory."""
    return from_pretrained(str(tiny_checkpoint), {})


def require_equal(found: dict[str, Any], wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def flipped(folder: Path, target: Path) -> Path:
    """A copy whose tensors have other bytes, under the same headers."""
    shutil.copytree(folder, target)
    for path in target.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[start:] = bytes(byte ^ 1 for byte in data[start:])
        path.write_bytes(data)
    return target


# Faces.


def load_file(source: str, _: Tensors) -> dict[str, Any]:
    return gdsload.load_file(source, options={"request_bytes": 1 << 16})


def stream(source: str, _: Tensors) -> dict[str, Any]:
    return dict(gdsload.stream(source, window_bytes=1 << 18))


def load_into(source: str, wanted: Tensors) -> dict[str, Any]:
    targets = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    gdsload.load_into(targets, source)
    return targets


def safe_open(source: str, _: Tensors) -> dict[str, Any]:
    with gdsload.safe_open(source) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def prefetch(source: str, _: Tensors) -> dict[str, Any]:
    with gdsload.prefetch(source):
        return gdsload.load_file(source)


def from_pretrained(source: str, _: Tensors) -> dict[str, Any]:
    state: dict[str, Any] = gdsload.from_pretrained(source, dtype="auto").state_dict()
    return state


FACES = {
    face.__name__: face
    for face in (load_file, stream, load_into, safe_open, prefetch, from_pretrained)
}


@pytest.mark.parametrize("face", FACES)
def test_source_that_fails_from_any_request_on_is_replaced(
    server: ObjectServer, url: str, tiny_checkpoint: Path, wanted: Tensors, whole_model: Tensors,
    face: str,
) -> None:  # fmt: skip
    source = gdsload.replicas(url, tiny_checkpoint)
    expected = whole_model if face == "from_pretrained" else wanted
    for first, fault in ((1, "503"), (4, "reset"), (8, "403")):
        server.restore()
        server.script(fault, first=first, count=None)
        require_equal(FACES[face](source, wanted), expected)


def test_failure_inside_safe_open_is_survived(
    server: ObjectServer, url: str, tiny_checkpoint: Path, wanted: Tensors
) -> None:
    with gdsload.safe_open(gdsload.replicas(url, tiny_checkpoint)) as file:
        names = file.keys()
        found = {name: file.get_tensor(name) for name in names[:3]}
        server.script("reset", count=None)
        found |= {name: file.get_tensor(name) for name in names[3:]}
    require_equal(found, wanted)


@pytest.mark.parametrize("face", ["load_file", "from_pretrained"])
def test_failure_of_all_sources_is_one_error_with_each_reason(
    server: ObjectServer, url: str, wanted: Tensors, face: str
) -> None:
    source = gdsload.replicas(url, server.url("http", "model"))
    server.script("503", path="*.safetensors", count=None)
    with pytest.raises(GdsloadError) as caught:
        FACES[face](source, wanted)
    assert url in str(caught.value) and server.url("http", "model") in str(caught.value)


def test_several_sources_load_from_the_command_line(url: str, tiny_checkpoint: Path) -> None:
    source = gdsload.replicas(url, tiny_checkpoint)
    (loaded,) = answer("load", source)["runs"]
    assert loaded["backend"] == "replicas" and not loaded["refusals"]
    assert run("inspect", source).exit_code == run("plan", source).exit_code == 0


def test_peer_object_store_and_directory_load_together(
    url: str, tiny_checkpoint: Path, wanted: Tensors, whole_model: Tensors
) -> None:
    pytest.importorskip("nixl_cu13")
    with gdsload.serve(tiny_checkpoint) as peer:
        source = gdsload.replicas(peer.url, url, tiny_checkpoint)
        require_equal(from_pretrained(source, wanted), whole_model)
        assert not gdsload.last_report().refusals
        with gdsload.safe_open(source) as file:
            names = file.keys()
            found = {name: file.get_tensor(name) for name in names[:3]}
            peer.close()
            found |= {name: file.get_tensor(name) for name in names[3:]}
    require_equal(found, wanted)
    require_equal(gdsload.load_file(source), wanted)
    assert "does not answer" in gdsload.last_report().refusals[peer.url]


# Sources that differ.


def one_shard(folder: Path, target: Path) -> Path:
    """The same tensors in one file."""
    target.mkdir()
    safetensors.torch.save_file(
        gdsload.load_file(folder), target / "model.safetensors", metadata={"format": "pt"}
    )
    return target


def other_order(folder: Path, target: Path) -> Path:
    """The same tensors, with the same size of header and file, in the reverse order."""
    shutil.copytree(folder, target)
    for path in target.glob("*.safetensors"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        text = json.dumps(dict(reversed(header.items())), separators=(",", ":")).encode()
        path.write_bytes(data[:8] + text.ljust(start - 8) + data[start:])
    return target


def without_config(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*config.json"))
    return target


def without_index(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.index.json"))
    return target


def with_extra_shard(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    safetensors.torch.save_file({"extra": torch.ones(3)}, target / "extra.safetensors")
    return target


def empty(_: Path, target: Path) -> Path:
    target.mkdir()
    return target


def missing(_: Path, target: Path) -> Path:
    return target


@pytest.mark.parametrize("own_first", [True, False])
@pytest.mark.parametrize(
    ("make", "left"),
    [
        (one_shard, True), (other_order, True), (without_config, False), (without_index, False),
        (with_extra_shard, False), (empty, True), (missing, True),
    ],
)  # fmt: skip
def test_source_that_differs_is_used_or_left_and_the_model_is_exact(
    url: str, tiny_checkpoint: Path, tmp_path: Path, whole_model: Tensors, own_first: bool,
    make: Callable[[Path, Path], Path], left: bool,
) -> None:  # fmt: skip
    own = make(tiny_checkpoint, tmp_path / "own")
    source = gdsload.replicas(*((own, url) if own_first else (url, own)))
    require_equal(from_pretrained(source, {}), whole_model)
    refused = gdsload.last_report().refusals
    # The first source with shards has the names and headers that count.
    first = own_first and make in (one_shard, other_order)
    assert set(refused) == ({url if first else str(own)} if left else set())


def test_configuration_is_that_of_the_first_source_that_has_one(
    url: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    bare, other = without_config(tiny_checkpoint, tmp_path / "bare"), tmp_path / "other"
    shutil.copytree(tiny_checkpoint, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "bos_token_id": 7}))
    for sources, wanted in (
        ((bare, url, other), config.get("bos_token_id")),
        ((bare, other, url), 7),
    ):
        model = gdsload.from_pretrained(gdsload.replicas(*sources))
        assert model.config.bos_token_id == wanted


def test_other_bytes_under_equal_headers_are_found_with_verify(
    url: str, server: ObjectServer, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    other = flipped(tiny_checkpoint, tmp_path / "other")
    written = run("manifest", url, "--output", server.root / "model" / "gdsload-manifest.json")
    assert written.exit_code == 0
    server.script("503", path="*.safetensors", first=3, count=None)  # after the headers
    with pytest.raises(IntegrityError):
        gdsload.load_file(gdsload.replicas(url, other), verify="checksum")


def test_source_that_is_named_twice_loads(url: str, tiny_checkpoint: Path, wanted: Tensors) -> None:
    for same in (url, tiny_checkpoint):
        require_equal(gdsload.load_file(gdsload.replicas(same, same)), wanted)
        assert not gdsload.last_report().refusals


def test_relative_path_is_a_source(
    url: str, tiny_checkpoint: Path, wanted: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_checkpoint.parent)
    for path in (Path(tiny_checkpoint.name), f"./{tiny_checkpoint.name}/"):
        require_equal(gdsload.load_file(gdsload.replicas(path, url)), wanted)
        assert not gdsload.last_report().refusals


def test_sources_without_a_scheme_that_is_read_are_left(
    tiny_checkpoint: Path, wanted: Tensors
) -> None:
    source = gdsload.replicas("ftp://host/model", tiny_checkpoint)
    require_equal(gdsload.load_file(source), wanted)
    assert "not this one" in gdsload.last_report().refusals["ftp://host/model"]
    with pytest.raises(CheckpointError, match="not this one"):
        gdsload.load_file(gdsload.replicas("ftp://host/model"))


def test_files_without_a_directory_and_names_in_bytes_are_sources(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sorted(tiny_checkpoint.glob("*.safetensors"))[0]
    other = tmp_path / "other" / file.name
    other.parent.mkdir()
    shutil.copy(file, other)
    monkeypatch.chdir(tiny_checkpoint)
    wanted = gdsload.load_file(file)
    require_equal(gdsload.load_file(gdsload.replicas(file.name, other)), wanted)
    require_equal(gdsload.load_file(gdsload.replicas(bytes(file), bytes(other))), wanted)
