"""Tensors of a `safe_open`: what they share, what they keep in memory, what stays open."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import threading
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import descriptors
import gdsload
from gdsload import safetensors_file, warmup
from gdsload.errors import FileChanged, ShortRead
from waiting import wait_for

ROWS, COLUMNS = 64, 1000


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


@pytest.fixture
def path(tmp_path: Path, expected: torch.Tensor) -> Path:
    file = tmp_path / "model.safetensors"
    save_file({"w": expected}, file)
    return file


@pytest.fixture(params=["mapped", "buffered", "pool"])
def arrays(request: pytest.FixtureRequest, path: Path) -> Any:
    """A `safe_open` for numpy, by I/O mode."""
    if request.param != "pool":
        with gdsload.safe_open(path, "np", cache=request.param) as opened:
            yield opened
        return
    with warmup.HostPool(8 << 20):
        gdsload.load_file(path, cache="buffered")  # the pool holds it now
        with gdsload.safe_open(path, "np", cache="buffered") as opened:
            yield opened


def test_change_of_an_array_changes_no_later_one(arrays: Any, expected: torch.Tensor) -> None:
    first, rows = arrays.get_tensor("w"), arrays.get_slice("w")[1:3]
    first[...] = 7
    rows[...] = 8
    assert np.array_equal(arrays.get_tensor("w"), expected.numpy())
    assert np.array_equal(arrays.get_slice("w")[:, 2:4], expected[:, 2:4].numpy())
    assert np.array_equal(arrays.get_tensors()["w"], expected.numpy())


INDEXES = [3, -1, (slice(None), slice(0, 4)), (5, slice(2, 9)), (slice(2, 4), 7), (slice(0, 9, 3),)]


@pytest.mark.parametrize("index", INDEXES, ids=str)
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_slice_keeps_only_its_own_elements_in_memory(
    path: Path, expected: torch.Tensor, index: Any, framework: str
) -> None:
    with gdsload.safe_open(path, framework, cache="buffered") as opened:
        part = torch.as_tensor(opened.get_slice("w")[index])
    assert torch.equal(part, expected[index])
    assert part.untyped_storage().nbytes() == part.nbytes
    assert part.is_contiguous()


def test_slice_that_is_dropped_does_not_wait_for_the_read_of_another_thread(path: Path) -> None:
    with gdsload.safe_open(path) as opened:
        first, last = (opened.get_slice(next(iter(opened.keys()))) for _ in range(2))
        with opened._lock:  # as a read has it
            dropped = threading.Thread(target=first.__del__)
            dropped.start()
            wait_for(lambda: not dropped.is_alive())
    assert not opened._checkpoint.closed
    del first, last
    assert opened._checkpoint.closed


def test_slice_of_a_mapped_file_is_not_copied(path: Path, expected: torch.Tensor) -> None:
    with gdsload.safe_open(path, cache="mapped") as opened:
        whole, part = opened.get_tensor("w"), opened.get_slice("w")[:, 2:4]
    assert part.data_ptr() == whole[:, 2:4].data_ptr()
    assert torch.equal(part, expected[:, 2:4])


@pytest.mark.parametrize("index", [3, -1, (3, slice(2, 9))], ids=str)
def test_number_as_first_index_reads_one_row(path: Path, index: Any) -> None:
    with gdsload.safe_open(path, cache="buffered") as opened:
        opened.get_slice("w")[index]
    assert gdsload.last_report().wanted_bytes == 4 * COLUMNS


BOUNDS = [None, 0, 1, 40, ROWS - 1, ROWS, -1, -30, -ROWS]


@pytest.mark.parametrize("step", [2, 3, 7, ROWS - 1, ROWS, 1000, 1 << 70])
@pytest.mark.parametrize(
    "rest", [(), (3,), (slice(2, 9),), (slice(None, None, 5),), (..., 0)], ids=str
)
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_rows_with_a_step_are_read_from_the_first_to_the_last(
    path: Path, expected: torch.Tensor, step: int, rest: tuple[Any, ...], framework: str
) -> None:
    with gdsload.safe_open(path, framework, cache="buffered") as opened:
        whole = opened.get_slice("w")
        for start, stop in product(BOUNDS, BOUNDS):
            if framework == "np" and start == ROWS:  # refused, as by safetensors
                continue
            index = (slice(start, stop, step), *rest)
            same = (slice(start, stop, min(step, ROWS)), *rest)  # torch computes with the step
            assert torch.equal(torch.as_tensor(whole[index]), expected[same]), index
            rows = range(ROWS)[index[0]]
            wanted = 4 * COLUMNS * (rows[-1] + 1 - rows[0]) if rows else 0
            report = gdsload.last_report()
            assert report.wanted_bytes == wanted <= report.read_bytes <= wanted + 2 * 4096, index


@pytest.mark.parametrize("index", [ROWS, -ROWS - 1, (ROWS, 0)], ids=str)
def test_number_out_of_range_is_an_index_error(path: Path, index: Any) -> None:
    with gdsload.safe_open(path) as opened, pytest.raises(IndexError):
        opened.get_slice("w")[index]


@pytest.mark.parametrize("words", [{"cache": "direct"}, {"page_cache": "drop"}], ids=str)
def test_object_that_is_dropped_leaves_no_descriptor(path: Path, words: dict[str, str]) -> None:
    with descriptors.none_left():
        gdsload.safe_open(path, **words).get_tensor("w")
        gc.collect()


def test_each_read_reports_the_choice_of_the_backend(path: Path) -> None:
    with gdsload.safe_open(path, backend="posix", cache="buffered") as opened:
        opened.get_tensor("w")
    assert gdsload.last_report().choice == "posix: asked for by name"


def test_read_of_a_file_that_was_verified_as_a_whole_reports_it(path: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    shutil.move(path, blobs / checksum)
    (snapshot / "model.safetensors").symlink_to(blobs / checksum)
    with gdsload.safe_open(snapshot, verify="sha256") as opened:
        opened.get_slice("w")[:2]
    report = gdsload.last_report()
    assert report.verified_bytes == report.wanted_bytes == 8 * COLUMNS


def test_index_that_copies_is_not_copied_again(
    path: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("copied")

    monkeypatch.setattr(safetensors_file, "copied", never)
    with gdsload.safe_open(path, cache="buffered") as opened:
        assert torch.equal(opened.get_slice("w")[torch.tensor([1, 5])], expected[[1, 5]])


@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_read_behind_the_end_of_a_file_does_not_say_where_it_is(tmp_path: Path, cache: str) -> None:
    path = tmp_path / "m.safetensors"
    save_file({name: torch.zeros(8 << 20, dtype=torch.uint8) for name in "ab"}, path)
    with gdsload.safe_open(path, "pt", cache=cache) as opened:
        opened.get_tensor("a")
        os.truncate(path, 1 << 20)
        with pytest.raises(ShortRead, match=r"ended at byte \d+ or before, while") as caught:
            opened.get_tensor("b")
    assert caught.value.got == 0


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("read", ["tensor", "tensors", "rows", "index"])
@pytest.mark.parametrize("prefetched", [False, True])
def test_file_that_changes_while_it_is_copied_from_a_mapping_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, framework: str, read: str, prefetched: bool
) -> None:
    reads = safetensors_file.safe_open._read
    columns = [0, 5] if framework == "pt" else slice(0, 5)

    def written_after(self: Any, *args: Any, **words: Any) -> Any:
        tensors = reads(self, *args, **words)
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"abcd")
        return tensors

    with ExitStack() as stack:
        if prefetched:  # to a mapping, which the read takes over
            stack.enter_context(gdsload.prefetch(path, cache="mapped")).wait()
        cache = "auto" if prefetched else "mapped"
        opened = stack.enter_context(gdsload.safe_open(path, framework, cache=cache))
        monkeypatch.setattr(safetensors_file.safe_open, "_read", written_after)
        calls: dict[str, Any] = {
            "tensor": lambda: opened.get_tensor("w"),
            "tensors": lambda: opened.get_tensors(["w"]),
            "rows": lambda: opened.get_slice("w")[-2:],
            "index": lambda: opened.get_slice("w")[:, columns],
        }
        if framework == "pt" and read != "index":  # a view of the file: nothing is copied
            calls[read]()
        else:
            with pytest.raises(FileChanged, match="it was written to"):
                calls[read]()
    assert ("prefetched" in gdsload.last_report().paths) == prefetched


@pytest.mark.parametrize("cache", ["direct", "buffered", "mapped"])
def test_close_within_a_read_closes_after_it(
    cache: str, path: Path, expected: torch.Tensor
) -> None:
    """As by a signal handler. The read ends well, and opens nothing again."""
    before = descriptors.count()
    opened: Any = None
    opened = gdsload.safe_open(path, cache=cache, on_event=lambda _: opened.close())
    assert torch.equal(opened.get_tensor("w"), expected)
    with pytest.raises(gdsload.CheckpointError, match="the file is closed"):
        opened.get_tensor("w")
    gc.collect()
    assert descriptors.count() <= before + (cache == "mapped")
