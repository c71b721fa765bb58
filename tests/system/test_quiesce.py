"""A quiesced process holds nothing that a dump cannot carry, and continues afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as reference_load_file

import gdsload
from gated import Gate
from gdsload import api
from gdsload.backends import Memory
from gdsload.backends.posix.engines import ENGINES, try_engine
from gdsload.errors import CheckpointError, FileChanged, GdsloadError
from gdsload.events import LoadEnded
from gdsload.loading.batch import Batch
from gdsload.loading.session import Session
from gdsload.readahead import prefetch
from gdsload.system import quiesce
from waiting import wait_for

PATIENCE_SECONDS = 120.0
NAME = "model.norm.weight"


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint, tmp_path / "model")


def undumpable(checkpoint: Path) -> list[str]:
    """Rings, AIO contexts and descriptors of the checkpoint that this process holds."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the directory's own
        if "io_uring" in target or target.startswith(f"{checkpoint}/"):
            found.append(target)
    with open("/proc/self/maps") as lines:
        found += [line.split(maxsplit=5)[-1] for line in lines if "[aio]" in line]
    return found


def native_threads() -> set[str]:
    names = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            names[task] = Path("/proc/self/task", task, "comm").read_text()
    # The kernel's own workers for a ring end some time after it.
    return {task for task, name in names.items() if not name.startswith("iou-")}


def wanted(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors.update(reference_load_file(file))
    return tensors


@pytest.mark.parametrize("engine", ENGINES)
def test_quiesce_releases_rings_contexts_and_descriptors(checkpoint: Path, engine: str) -> None:
    support = try_engine(engine)
    if not support.usable:
        pytest.skip(str(support))
    threads = native_threads()
    with gdsload.safe_open(checkpoint, cache="buffered", options={"engine": engine}) as opened:
        first = opened.get_tensor(NAME)
        held = undumpable(checkpoint)
        assert [target for target in held if str(checkpoint) in target]
        if engine == "uring":
            assert [target for target in held if "io_uring" in target]
        if engine == "linuxaio":
            assert [target for target in held if "aio" in target]
        gdsload.quiesce(PATIENCE_SECONDS)
        assert undumpable(checkpoint) == []
        # A thread that was joined is listed for a moment.
        wait_for(lambda: native_threads() <= threads, "a native thread is left")
        again = opened.get_tensor("model.embed_tokens.weight")
        assert undumpable(checkpoint)
    expected = wanted(checkpoint)
    assert torch.equal(first, expected[NAME])
    assert torch.equal(again, expected["model.embed_tokens.weight"])
    assert undumpable(checkpoint) == []


def test_prefetched_bytes_survive_quiesce(checkpoint: Path) -> None:
    with gdsload.prefetch(checkpoint, cache="buffered"):
        gdsload.quiesce(PATIENCE_SECONDS)
        assert undumpable(checkpoint) == []
        gdsload.resume()
        got = gdsload.load_file(checkpoint)
    assert set(gdsload.last_report().paths) == {"prefetched"}
    for name, tensor in wanted(checkpoint).items():
        assert torch.equal(got[name], tensor)


def test_quiesce_during_prefetch_raises_with_reason(checkpoint: Path, gate: Gate) -> None:
    with gdsload.prefetch(checkpoint, backend="gated", cache="buffered"):
        gate.request()
        with pytest.raises(GdsloadError, match="is being prefetched"):
            gdsload.quiesce(0.0)
        gate.open()
        gdsload.quiesce(PATIENCE_SECONDS)


def test_quiesce_during_stream_raises_and_closes_nothing(checkpoint: Path) -> None:
    stream = gdsload.stream(checkpoint, cache="buffered", window_bytes=100_000)
    next(stream)
    with pytest.raises(GdsloadError) as caught:
        gdsload.quiesce(0.0)
    assert str(caught.value) == f"cannot quiesce: {checkpoint} is being read"
    assert undumpable(checkpoint), "it closed a part"
    stream.close()
    gdsload.quiesce(0.0)
    assert undumpable(checkpoint) == []


def test_resume_with_changed_file_raises(checkpoint: Path) -> None:
    with gdsload.Checkpoint.open(checkpoint) as opened, gdsload.safe_open(checkpoint) as lazy:
        gdsload.quiesce()
        for file in checkpoint.glob("*.safetensors"):
            os.utime(file, ns=(0, 0))
        for _ in range(2):  # it stays an error
            with pytest.raises(FileChanged):
                gdsload.resume()
            with pytest.raises(FileChanged):
                lazy.get_tensor(NAME)
            with pytest.raises(FileChanged):
                _ = opened.shards[0].fd
    gdsload.resume()
    assert undumpable(checkpoint) == []


def test_resume_after_chdir_finds_relative_path(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    with gdsload.Checkpoint.open(checkpoint.name) as opened:
        gdsload.quiesce()
        gdsload.quiesce()
        monkeypatch.chdir("/")
        assert not opened.closed and opened.shards[0].fd >= 0
        gdsload.quiesce()
    assert opened.closed
    with pytest.raises(CheckpointError, match="closed"):
        _ = opened.shards[0].fd


def test_closed_checkpoint_is_not_a_holder(checkpoint: Path) -> None:
    gdsload.Checkpoint.open(checkpoint)
    with gdsload.Checkpoint.open(checkpoint) as opened:
        assert opened in quiesce.holders()
    assert opened not in quiesce.holders()


def test_quiesce_after_closed_prefetch_succeeds(checkpoint: Path, gate: Gate) -> None:
    gdsload.prefetch(checkpoint, backend="gated", cache="buffered").close()
    gdsload.quiesce(PATIENCE_SECONDS)
    assert prefetch.prefetches() == []


@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_quiesce_waits_for_a_load_that_has_planned_its_reads(
    checkpoint: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reads are of descriptors that another file could get."""
    expected = reference_load_file(next(iter(checkpoint.glob("*.safetensors"))))
    arranged, goes_on = threading.Event(), threading.Event()
    take_memory = Batch._take_memory

    def waiting(self: Batch) -> list[Memory]:
        arranged.set()
        assert goes_on.wait(PATIENCE_SECONDS)
        return take_memory(self)

    monkeypatch.setattr(Batch, "_take_memory", waiting)
    with ThreadPoolExecutor(2) as pool:
        load = pool.submit(gdsload.load_file, checkpoint, cache=cache)
        assert arranged.wait(PATIENCE_SECONDS)
        with pytest.raises(GdsloadError, match="is being read"):
            gdsload.quiesce(0.01)
        quiesced = pool.submit(gdsload.quiesce, PATIENCE_SECONDS)
        goes_on.set()
        got = load.result()
        quiesced.result()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_load_waits_while_holders_are_quiesced(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gdsload.load_file(checkpoint, names=[NAME])[NAME]
    closing, goes_on, opened = threading.Event(), threading.Event(), threading.Event()
    real = Session.quiesce

    def waiting(self: Session) -> None:
        closing.set()
        assert goes_on.wait(PATIENCE_SECONDS)
        real(self)

    with gdsload.safe_open(checkpoint, cache="direct") as file, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(Session, "quiesce", waiting)
        quiesced = pool.submit(gdsload.quiesce)
        assert closing.wait(PATIENCE_SECONDS)
        register = Session.register
        monkeypatch.setattr(Session, "register", lambda *words: opened.set() or register(*words))
        read = pool.submit(file.get_tensor, NAME)
        assert not opened.wait(0.05)
        goes_on.set()
        quiesced.result()
        assert torch.equal(read.result(), expected)


def test_quiesce_waits_for_a_load_that_has_opened_its_files(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, goes_on, real = threading.Event(), threading.Event(), api.open_session

    def waiting(*words: Any, **more: Any) -> Session:
        opened.set()
        assert goes_on.wait(PATIENCE_SECONDS)
        return real(*words, **more)

    monkeypatch.setattr(api, "open_session", waiting)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(gdsload.load_file, checkpoint)
        assert opened.wait(PATIENCE_SECONDS)
        with pytest.raises(GdsloadError, match="model is being read"):
            gdsload.quiesce(0.01)
        goes_on.set()
        assert NAME in load.result()
    gdsload.quiesce()


def test_quiesce_waits_for_the_load_of_a_model(checkpoint: Path) -> None:
    refused: list[str] = []

    def ready(name: str, module: object) -> None:  # the last calls come when all is read
        try:
            gdsload.quiesce(0.01)
        except GdsloadError as error:
            refused.append(str(error))

    gdsload.from_pretrained(checkpoint, on_module_ready=ready)
    assert refused and all("is being read" in why for why in refused)
    gdsload.quiesce()


def test_callback_of_a_prefetch_may_load_while_the_process_is_quiesced(checkpoint: Path) -> None:
    inside, loaded = threading.Event(), threading.Event()

    def load(event: object) -> None:
        if isinstance(event, LoadEnded) and event.kind == "prefetch":
            inside.set()
            time.sleep(0.2)  # meanwhile `quiesce` waits for this callback
            gdsload.load_file(checkpoint)
            loaded.set()

    with gdsload.prefetch(checkpoint, cache="buffered", on_event=load):
        assert inside.wait(PATIENCE_SECONDS)
        gdsload.quiesce(PATIENCE_SECONDS)
        assert loaded.is_set()


def test_callback_of_a_prefetch_that_does_not_return_is_named(checkpoint: Path) -> None:
    inside, go = threading.Event(), threading.Event()

    def wait(event: object) -> None:
        if isinstance(event, LoadEnded):
            inside.set()
            go.wait(PATIENCE_SECONDS)

    with gdsload.prefetch(checkpoint, cache="buffered", on_event=wait):
        assert inside.wait(PATIENCE_SECONDS)
        with pytest.raises(GdsloadError, match="a callback has not returned"):
            gdsload.quiesce(0.0)
        go.set()
        gdsload.quiesce(PATIENCE_SECONDS)
