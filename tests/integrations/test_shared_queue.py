"""The queue of slices that ranks read together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gdsload
import tinymodels
from equal import NEW
from gdsload.errors import GdsloadError, PlacementError
from gdsload.integrations.transformers.model_reader import ModelReader
from gdsload.system import available


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.skipif(not NEW, reason="transformers 4.57 asks for each tensor by itself")
@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_exchange_without_a_thread_is_an_error(
    one_rank: dist.ProcessGroup,
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "gdsload-exchange":
            raise error
        start(thread)

    tinymodels.build("llama").save_pretrained(tmp_path)
    wanted = gdsload.from_pretrained(tmp_path, group=one_rank).state_dict()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(GdsloadError, match="no thread can be started to exchange tensors"):
        gdsload.from_pretrained(tmp_path, group=one_rank)
    monkeypatch.undo()
    found = gdsload.from_pretrained(tmp_path, group=one_rank).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.skipif(not NEW, reason="transformers 4.57 asks for each tensor by itself")
def test_first_tensor_that_is_taken_starts_the_exchange(
    one_rank: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tinymodels.build("llama").save_pretrained(tmp_path)
    wanted = gdsload.from_pretrained(tmp_path)
    monkeypatch.setattr(ModelReader, "_begin", lambda self, reads: None)
    found = gdsload.from_pretrained(tmp_path, group=one_rank)
    assert tinymodels.differences(wanted, found) == []
    assert gdsload.last_report().ranks == 1


@pytest.mark.skipif(not NEW, reason="transformers 4.57 asks for each tensor by itself")
def test_model_that_has_no_room_is_refused_before_a_byte_is_read(
    one_rank: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tinymodels.build("llama").save_pretrained(tmp_path)
    with gdsload.Checkpoint.open(tmp_path) as checkpoint:
        nbytes = checkpoint.total_bytes
    room = nbytes + available.SPARE_BYTES - 1
    monkeypatch.setattr(available, "available_bytes", lambda: room)
    with pytest.raises(PlacementError, match=f"^{nbytes:,} bytes are to be loaded") as caught:
        gdsload.from_pretrained(tmp_path, group=one_rank)
    assert caught.value.missing_bytes == 1 and not gdsload.last_report().read_bytes
