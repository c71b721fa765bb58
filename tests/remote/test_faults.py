"""Object stores that fail: each fault, at each of the first requests, on each face. A load gives
the exact bytes or one error, and the next load is exact."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import gdsload
from gdsload.remote import object_store
from gdsload.synthetic import checkpoints
from object_server import FAULTS, ObjectServer

pytest.importorskip("obstore")

STALL_SECONDS = 20.0
RETRY_SECONDS = 15.0
PATIENCE_SECONDS = 90.0  # a load that takes longer hangs
# A listing, the index, two headers, then the rest of two shards. The first four are those of all.
REQUESTS = {"load_file": (1, 2, 3, 4, 5, 6), "stream": (5, 7, 8), "load_into": (5, 6)}
# Nothing is wrong with the objects: asking again helps.
PASSING = ("429", "500", "503", "slow", "silent", "reset", "truncated", "reset_in_body",
           "silent_in_body", "short")  # fmt: skip
# Not "long": the first bytes of each answer are the wanted ones. "500" is as "503", and the other
# ends in the middle of a body are as "truncated".
LASTING = (
    "403", "404", "416", "429", "503", "silent", "reset", "wrong_range", "range_ignored", "short",
    "truncated",
)  # fmt: skip

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("tiny", tmp_path_factory.mktemp("faults") / "model")


@pytest.fixture(scope="module")
def wanted(model: Path) -> Tensors:
    return gdsload.load_file(model)


@pytest.fixture
def server(object_server: ObjectServer, model: Path) -> ObjectServer:
    object_server.root = model.parent
    return object_server


def load_file(url: str, _: Tensors) -> Tensors:
    return gdsload.load_file(url, stall_seconds=STALL_SECONDS, progress=False)


def stream(url: str, _: Tensors) -> Tensors:
    pairs = gdsload.stream(url, window_bytes=1 << 18, stall_seconds=STALL_SECONDS, progress=False)
    return dict(pairs)


def load_into(url: str, wanted: Tensors) -> Tensors:
    targets = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    gdsload.load_into(targets, url, stall_seconds=STALL_SECONDS, progress=False)
    return targets


FACES = {function.__name__: function for function in (load_file, stream, load_into)}


def bounded(call: Callable[[], Any]) -> Any:
    """The result of a call, or its error; fails if it hangs."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(PATIENCE_SECONDS)


def exact(found: Tensors, wanted: Tensors) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in wanted.items()
    )


def resources() -> tuple[list[str], list[str]]:
    """Names of the threads, and descriptors, of this process."""
    threads, files = [], []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ended meanwhile
            threads.append((task / "comm").read_text().strip())
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            files.append(os.readlink(file))
    return threads, files


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits less for a server than it would for a real one."""
    monkeypatch.setattr(object_store, "SILENCE_SECONDS", 0.4)
    monkeypatch.setattr(object_store, "RETRY_SECONDS", RETRY_SECONDS)


@pytest.fixture(scope="module")
def started() -> set[str]:
    """The faces that have been used: they start what a library starts once."""
    return set()


@pytest.fixture(autouse=True)
def nothing_left(
    server: ObjectServer, wanted: Tensors, started: set[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """After the test the next load is exact, and threads and descriptors are what they were."""
    url = server.url("s3", "model")
    for name in FACES.keys() - started:
        server.forget()
        FACES[name](url, wanted)
        assert len(server.requests) >= REQUESTS[name][-1]  # more where a busy machine is slow
        started.add(name)
    load_file(url, wanted)
    before = resources()
    server.forget()
    yield
    server.restore()
    monkeypatch.setattr(object_store, "RETRY_SECONDS", RETRY_SECONDS)  # a busy machine is slow
    assert exact(bounded(lambda: load_file(url, wanted)), wanted)
    limit = time.monotonic() + PATIENCE_SECONDS
    while True:
        gc.collect()
        now = resources()
        if all(len(one) <= len(other) for one, other in zip(now, before, strict=True)):
            break
        assert time.monotonic() < limit, f"{before} became {now}"
        time.sleep(0.05)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("fault", PASSING)
def test_passing_fault_of_any_request_is_survived(
    server: ObjectServer, wanted: Tensors, face: str, fault: str
) -> None:
    for number in REQUESTS[face]:
        server.restore()
        server.forget()
        server.script(fault, first=number)
        found = bounded(lambda: FACES[face](server.url("s3", "model"), wanted))
        assert exact(found, wanted), f"{fault} at request {number}"
        assert any(request.fault for request in server.requests)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - set(PASSING)))
def test_other_fault_of_any_request_gives_exact_bytes_or_an_error(
    server: ObjectServer, wanted: Tensors, face: str, fault: str
) -> None:
    for number in REQUESTS[face]:
        server.restore()
        server.script(fault, first=number)
        try:
            found = bounded(lambda: FACES[face](server.url("s3", "model"), wanted))
        except gdsload.GdsloadError:
            continue
        assert exact(found, wanted), f"{fault} at request {number}"


@pytest.mark.parametrize("fault", LASTING)
@pytest.mark.parametrize("first", [1, 4])
def test_lasting_fault_is_one_error(
    server: ObjectServer,
    wanted: Tensors,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    first: int,
) -> None:
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 0.4)
    server.script(fault, first=first, count=None)
    with pytest.raises(gdsload.GdsloadError) as caught:
        bounded(lambda: load_file(server.url("s3", "model"), wanted))
    assert "s3://bucket/model" in str(caught.value)


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("face", FACES)
def test_object_that_is_replaced_between_requests_is_reported(
    server: ObjectServer,
    wanted: Tensors,
    monkeypatch: pytest.MonkeyPatch,
    face: str,
    pins: bool,
) -> None:
    monkeypatch.setattr(object_store, "SILENCE_SECONDS", 60.0)  # a busy server is no silent one
    server.pins = pins
    server.script("replaced", path="*.safetensors", first=3)  # after the two headers
    with pytest.raises(gdsload.FileChanged):
        bounded(lambda: FACES[face](server.url("s3", "model"), wanted))


@pytest.mark.parametrize("status", ["403", "404"])
def test_final_answer_is_not_asked_for_again(
    server: ObjectServer, wanted: Tensors, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setattr(object_store, "SILENCE_SECONDS", 60.0)  # a busy server is no silent one
    server.script(status, path="*.safetensors", count=None)
    with pytest.raises(gdsload.GdsloadError):
        bounded(lambda: load_file(server.url("s3", "model"), wanted))
    struck = [request.key for request in server.requests if request.fault]
    assert len(struck) == len(set(struck))
