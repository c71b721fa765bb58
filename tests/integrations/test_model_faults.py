"""A load that is broken off anywhere leaves nothing behind, and the next one is as if it had not
been: in our own code, in transformers', by an error or by Ctrl-C, with files of any kind.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import equal
import faulty
import gdsload
import tinymodels
from gdsload.integrations.transformers import hooks
from gdsload.integrations.transformers.lazy_slices import LazySlice, WrittenSlice
from gdsload.integrations.transformers.model_reader import ModelReader
from gdsload.integrations.transformers.parameter_buffers import ParameterBuffers
from gdsload.integrations.transformers.parameter_writer import ParameterWriter
from gdsload.integrations.transformers.readahead_queue import ReadaheadQueue
from gdsload.loading.batch import Batch
from storage import make_cold
from threadends import await_most
from windows import small_windows

PATIENCE_SECONDS = 120.0


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.saved("mixtral", tmp_path_factory)


def mapped(under: Path) -> list[str]:
    """The mappings of files below a directory."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(under) in line]


@pytest.fixture(autouse=True)
def nothing_stays(mixture: Path, tmp_path: Path) -> Iterator[None]:
    before, threads = equal.names_replaced(), threading.active_count()
    yield
    gc.collect()
    assert equal.names_replaced() == before
    assert not hooks.patcher.in_place
    assert gc.isenabled()
    assert hooks.active() is None
    assert hooks.outer_report.get() is None
    await_most(threads)
    for path in (mixture, tmp_path):
        assert equal.open_files(path) == []
        assert mapped(path) == []


# Ours, and transformers' on the way: before the weights, among them, and after them.
PLACES: dict[str, tuple[Any, str]] = {
    "opened": (ModelReader, "__init__"),
    "foreseen": (ModelReader, "start"),
    "posted": (ParameterWriter, "_advance") if equal.NEW else (ReadaheadQueue, "_post"),
    "asked": (WrittenSlice, "written") if equal.NEW else (LazySlice, "__getitem__"),
    "taken": (ParameterWriter, "take") if equal.NEW else (ReadaheadQueue, "take"),
    "finished": (ModelReader, "finish"),
    "config": (transformers.MixtralConfig, "__init__"),
    "model": (transformers.MixtralModel, "__init__"),
    "cast": (ParameterBuffers, "part_of") if equal.NEW else (torch.Tensor, "to"),
    "initialised": (transformers.PreTrainedModel, "_initialize_missing_keys"),
    "tied": (transformers.PreTrainedModel, "tie_weights"),
}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_interrupted_load_releases_everything(
    place: str, error: type[BaseException], mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = PLACES[place]
    raw = vars(owner).get(name) or getattr(owner, name)
    original = raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw
    calls = []

    def broken(*args: Any, **named: Any) -> Any:
        calls.append(name)
        # In the middle, where there is more than one.
        if len(calls) == (7 if name in ("__getitem__", "written", "take", "to", "part_of") else 1):
            raise error("broken off here")
        return original(*args, **named)

    kind = type(raw) if isinstance(raw, (classmethod, staticmethod)) else lambda function: function
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, kind(broken))
        with small_windows(4096, 8192), gdsload.accelerated(cache="buffered"):
            try:
                gdsload.from_pretrained(mixture, dtype=torch.bfloat16)
            except error as caught:
                assert "broken off here" in str(caught)
                assert gdsload.last_report().failure == f"{error.__name__}: broken off here"
            else:
                assert not equal.NEW, f"{name} was called {len(calls)} times"
    stock, ours = equal.both(mixture)
    equal.require_same(stock, ours)


@pytest.mark.parametrize("page_cache", ["auto", "keep"])
def test_ctrl_c_while_storage_hangs_ends_the_load(
    page_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, waits = Batch.wait_for, threading.Event()

    def pause(*facts: Any) -> None:
        waits.set()
        real(*facts)

    def press() -> None:
        faults.wait_hung()
        if waits.wait(PATIENCE_SECONDS):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 256}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    make_cold(tmp_path / "model.safetensors")
    with monkeypatch.context() as patch, faulty.installed(patch) as faults:
        faults.script(faulty.rule(faulty.HANG, times=faulty.FOR_EVER))
        patch.setattr(Batch, "wait_for", pause)
        key = threading.Thread(target=press)
        key.start()
        with pytest.raises(KeyboardInterrupt):
            gdsload.from_pretrained(tmp_path, page_cache=page_cache)
        key.join()
    assert gdsload.last_report().read_bytes == 0
    stock, ours = equal.both(tmp_path)
    equal.require_same(stock, ours)


def _cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


BROKEN: dict[str, Callable[[Path], Any]] = {
    "cut short": _cut_short,
    "empty": lambda path: os.truncate(path, 0),
    "no header": lambda path: path.write_bytes(struct.pack("<Q", 20) + b"{not json at all!!!!"),
    "a header larger than the file": lambda path: path.write_bytes(struct.pack("<Q", 2**60)),
    "a pointer": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
    "a pipe": _fifo,
    "gone": _dangling,
}


@pytest.mark.skipif(not equal.NEW, reason="transformers 4.57 opens each file itself first")
@pytest.mark.parametrize("cache", ["auto", "buffered"])
@pytest.mark.parametrize("how", BROKEN)
def test_broken_shard_raises(how: str, cache: str, mixture: Path, tmp_path: Path) -> None:
    """Found before the first byte of a tensor is read, in whichever shard it is."""
    shutil.copytree(mixture, tmp_path / "model")
    shard = sorted((tmp_path / "model").glob("*.safetensors"))[-1]
    BROKEN[how](shard)
    with pytest.raises(gdsload.CheckpointError, match=shard.name), gdsload.accelerated(cache=cache):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert gdsload.last_report().read_bytes == 0


@pytest.mark.parametrize("source", [None, 5, b"model"])
def test_source_of_another_type_raises_before_a_hub_is_asked(source: Any) -> None:
    with pytest.raises(TypeError, match=f"str or an os.PathLike, not {type(source).__name__}"):
        gdsload.from_pretrained(source)


def test_accelerated_entered_and_left_in_any_order_restores_transformers(mixture: Path) -> None:
    outer = gdsload.accelerated(cache="buffered")
    with outer:
        with gdsload.accelerated(cache="direct"):
            assert hooks.active().reading.cache == "direct"
        assert hooks.active().reading.cache == "buffered"
        gdsload.install(cache="auto")
    assert hooks.active().reading.cache == "auto"
    assert hooks.patcher.in_place
    with gdsload.accelerated(cache="buffered"):
        gdsload.uninstall()
        gdsload.uninstall()
        transformers.AutoModelForCausalLM.from_pretrained(mixture)
        assert gdsload.last_report().integration == equal.FIRST
