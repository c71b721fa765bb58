"""Loads from real servers of object stores, face by face; `test-remote.sh` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import object_stores
from benchmarks.object_stores import ObjectStore

import gdsload
from gdsload.synthetic import checkpoints


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model in two shards; it is what the stores hold."""
    root = tmp_path_factory.mktemp("local")
    checkpoints.write("tiny", root / "model")
    return root


@pytest.fixture(scope="session", params=list(object_stores.SERVERS))
def store(request: pytest.FixtureRequest, local: Path) -> Iterator[ObjectStore]:
    with pytest.MonkeyPatch.context() as patch, object_stores.serving(request.param, local) as one:
        for name, value in one.environment.items():
            patch.setenv(name, value)
        yield one


@pytest.fixture
def url(store: ObjectStore) -> str:
    return store.url("model")


@pytest.fixture(scope="session")
def wanted(local: Path) -> dict[str, torch.Tensor]:
    return gdsload.load_file(local / "model")


def require_equal(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def command(*words: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "gdsload", *words], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_load_file(url: str, store: ObjectStore, wanted: dict[str, torch.Tensor]) -> None:
    require_equal(gdsload.load_file(url), wanted)
    assert set(gdsload.last_report().paths) == {f"object_store/{store.scheme}"}


def test_load_file_of_one_shard(url: str, local: Path) -> None:
    for shard in sorted((local / "model").glob("*.safetensors")):
        require_equal(gdsload.load_file(f"{url}/{shard.name}"), gdsload.load_file(shard))


def test_safe_open(url: str, local: Path) -> None:
    for shard in sorted((local / "model").glob("*.safetensors")):
        with gdsload.safe_open(f"{url}/{shard.name}", framework="pt") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        require_equal(found, gdsload.load_file(shard))


def test_stream(url: str, wanted: dict[str, torch.Tensor]) -> None:
    require_equal({name: one.clone() for name, one in gdsload.stream(url)}, wanted)


def test_load_into(url: str, wanted: dict[str, torch.Tensor]) -> None:
    targets = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    gdsload.load_into(targets, url)
    require_equal(targets, wanted)


def test_plan(url: str, local: Path) -> None:
    assert gdsload.plan(url).wanted_bytes == gdsload.plan(local / "model").wanted_bytes


def test_prefetch(url: str, wanted: dict[str, torch.Tensor]) -> None:
    with gdsload.prefetch(url):
        require_equal(gdsload.load_file(url), wanted)


def test_from_pretrained(url: str, local: Path) -> None:
    model = gdsload.from_pretrained(url, dtype="auto")
    require_equal(
        dict(model.state_dict()),
        dict(gdsload.from_pretrained(local / "model", dtype="auto").state_dict()),
    )


def test_command_line(url: str, local: Path) -> None:
    command("load", url, "--verify")
    command("plan", url)
    there, here = (
        json.loads(command("inspect", where, "--tensors", "--json"))
        for where in (url, str(local / "model"))
    )
    assert there["tensors"] == here["tensors"]


def test_missing_object_is_reported(url: str) -> None:
    with pytest.raises(gdsload.GdsloadError):
        gdsload.load_file(f"{url}/missing.safetensors")


def test_wrong_key_is_an_error_without_the_key(
    url: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.scheme != "s3":
        pytest.skip("only versitygw checks signatures here")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    with pytest.raises(gdsload.GdsloadError) as caught:
        gdsload.load_file(url)
    assert "not-the-secret" not in str(caught.value)
    assert os.environ["AWS_ACCESS_KEY_ID"] not in str(caught.value)
