"""Loads of parts of tensors: the values, and the bytes that are read for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import gdsload
from devicetensors import BACKENDS, raw
from gdsload.errors import CheckpointError, FileChanged, PlacementError
from gdsload.loading import batch, window_writer
from gdsload.planning import tensor_slices
from gpudoubles import Doubles

Load = Callable[..., dict[str, torch.Tensor]]
SHAPE = (6, 40, 1500)


def streamed(*words: Any, **named: Any) -> dict[str, torch.Tensor]:
    return dict(gdsload.stream(*words, window_bytes=50_000, **named))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    count = torch.Size(SHAPE).numel()
    tensors = {
        "a": torch.arange(count, dtype=torch.int32).view(SHAPE),
        "b": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
        "c": torch.tensor(3),
    }
    file = tmp_path_factory.mktemp("slices") / "model.safetensors"
    save_file(tensors, file)
    return file


INDEXES: list[Any] = [
    2, -1, slice(1, 3), slice(None), slice(4, 2), ..., (..., 7), (2, slice(3, 5)),
    (slice(None), slice(20, 40)), (slice(2, 4), slice(0, 20), slice(10, 20)),
    (slice(None), 3), (slice(None), slice(None), slice(0, 1400, 7)), (slice(0, 6, 2), 1),
    (1, 2, 3), (slice(1, 3), ..., slice(1, 2)),
]  # fmt: skip


@pytest.mark.parametrize("load", [gdsload.load_file, streamed])
@pytest.mark.parametrize("index", INDEXES)
def test_slice_is_the_index_of_the_whole(path: Path, load: Load, index: Any) -> None:
    whole = gdsload.load_file(path)
    got = load(path, slices={"a": index}, cache="direct")
    assert list(got) == list(whole)
    assert torch.equal(got["a"], whole["a"][index]) and torch.equal(got["b"], whole["b"])
    report = gdsload.last_report()
    assert report.wanted_bytes == sum(tensor.nbytes for tensor in got.values())
    assert report.read_ratio == report.read_bytes / report.wanted_bytes
    assert report.to_dict()["read_ratio"] == report.read_ratio


@pytest.mark.parametrize(
    ("index", "most"), [(2, 1 / 6), (slice(0, 3), 3 / 6), ((slice(None), slice(0, 10)), 1 / 4)]
)
def test_slice_reads_only_its_own_byte_ranges(path: Path, index: Any, most: float) -> None:
    gdsload.load_file(path, names="a", slices={"a": index}, cache="direct")
    report = gdsload.last_report()
    nbytes = 4 * torch.Size(SHAPE).numel()
    assert report.read_bytes <= most * nbytes + 6 * 8192
    planned = gdsload.plan(path, "a", slices={"a": index})
    assert planned.read_bytes == report.read_bytes


def into(file: Path, slices: dict[str, Any], **named: Any) -> dict[str, torch.Tensor]:
    whole = gdsload.load_file(file)
    targets = {name: torch.empty_like(whole[name][index]) for name, index in slices.items()}
    gdsload.load_into(targets, file, slices=slices, **named)
    return targets


STEPS: list[Any] = [
    slice(1, 5, 3), slice(None, None, 4), slice(-5, -1, 2), slice(2, 6, 100), slice(4, 2, 2),
    slice(6, None, 2), (slice(1, 5, 2), 7), (slice(1, 4, 2), ..., 0),
    (slice(0, 5, 3), slice(0, 40, 3), slice(5, 9)),
]  # fmt: skip


@pytest.mark.parametrize("load", [gdsload.load_file, streamed, into])
@pytest.mark.parametrize("index", STEPS)
def test_rows_with_a_step_are_read_from_the_first_to_the_last(
    path: Path, load: Load, index: Any
) -> None:
    expected = gdsload.load_file(path)["a"]
    got = load(path, names="a", slices={"a": index}, cache="direct")
    read_bytes = gdsload.last_report().read_bytes
    assert torch.equal(got["a"], expected[index])
    rows = range(SHAPE[0])[index[0] if isinstance(index, tuple) else index]
    nbytes = expected[rows[0] : rows[-1] + 1].nbytes if rows else 0
    assert nbytes <= read_bytes <= nbytes + 2 * 4096
    assert gdsload.plan(path, "a", slices={"a": index}).read_bytes == read_bytes


@pytest.mark.parametrize(("backend", "options"), BACKENDS[1:3])
def test_slice_to_a_device_is_exact(
    path: Path, backend: str, options: dict[str, Any], loading: Doubles
) -> None:
    whole = gdsload.load_file(path)["a"]
    for index in INDEXES:
        got = gdsload.load_file(
            path, "cuda:0", names="a", slices={"a": index}, backend=backend, options=options
        )
        assert torch.equal(raw(got["a"]), raw(whole[index].contiguous())), index
        assert got["a"].shape == whole[index].shape


@pytest.mark.parametrize(
    ("slices", "error", "text"),
    [
        ({"a": 6}, IndexError, "outside"),
        ({"b": (0, 0, 0)}, IndexError, "too many dimensions"),
        ({"a": slice(None, None, -1)}, IndexError, "backwards"),
        ({"a": [1, 2]}, TypeError, "numbers, slices"),
        ({"a": (True,)}, TypeError, "numbers, slices"),
        ({"gone": 1}, CheckpointError, "'gone'"),
    ],
)
def test_wrong_index_raises_before_anything_is_read(
    path: Path, slices: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        gdsload.load_file(path, slices=slices)
    assert gdsload.last_report().requests == 0


@pytest.mark.parametrize("made_by", ["torch.stack", "torch.Tensor.clone"])
def test_slice_without_memory_for_its_tensor_is_a_placement_error(
    path: Path, made_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more")

    monkeypatch.setattr(tensor_slices, "GAP_BYTES", 0)
    monkeypatch.setattr(made_by, full)
    index = (slice(None), slice(20, 40)) if made_by == "torch.stack" else (..., slice(0, 1400, 7))
    with pytest.raises(PlacementError, match="CUDA out of memory"):
        gdsload.load_file(path, slices={"a": index}, cache="buffered")


def test_slice_of_a_tensor_that_is_not_there_names_the_checkpoint(path: Path) -> None:
    for use in (
        lambda: gdsload.plan(path, slices={"gone": 0}),
        lambda: gdsload.load_file(path, slices={"gone": 0}),
        lambda: gdsload.load_into({}, path, slices={"gone": 0}),
    ):
        with pytest.raises(CheckpointError, match=r"slices has an index for 'gone'") as caught:
            use()
        assert str(caught.value).startswith(f"{caught.value.path}: ")


def test_stream_in_layer_order_assembles_slices(path: Path) -> None:
    index = (slice(None), slice(0, 10))
    got = dict(gdsload.stream(path, slices={"a": index}, order="layers", window_bytes=1))
    assert torch.equal(got["a"], gdsload.load_file(path)["a"][index])


def test_tensor_that_is_named_as_a_part_of_another_one_is_its_own(tmp_path: Path) -> None:
    saved = {"w": torch.arange(40.0).reshape(8, 5), "w[0:2]": -torch.ones(2, 5)}
    save_file(saved, tmp_path / "model.safetensors")
    expected = {"w": saved["w"][:2], "w[0:2]": saved["w[0:2]"]}
    slices = {"w": slice(0, 2)}
    target = {name: torch.zeros(2, 5) for name in expected}
    gdsload.load_into(target, tmp_path, slices=slices)
    for found in (
        target,
        gdsload.load_file(tmp_path, slices=slices),
        dict(gdsload.stream(tmp_path, slices=slices)),
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no F4")
def test_large_row_of_values_of_half_a_byte_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_writer, "WINDOW_BYTES", 1000)
    raw = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    save_file({"w": raw.view(torch.float4_e2m1fn_x2)}, tmp_path / "model.safetensors")
    target = {"w": torch.zeros_like(raw).view(torch.float4_e2m1fn_x2)}
    gdsload.load_into(target, tmp_path, cache="direct")
    assert torch.equal(target["w"].view(torch.uint8), raw)


def test_tensor_that_is_named_as_rows_of_a_large_one_is_its_own(tmp_path: Path) -> None:
    """Of one that is larger than a window, the rows are read one window after another."""
    rows = window_writer.WINDOW_BYTES // (1 << 20)
    saved = {
        "w": torch.randint(0, 256, (rows + 8, 1 << 20), dtype=torch.uint8),
        f"w[{rows}:{rows + 8}]": torch.zeros(8, 1 << 20, dtype=torch.uint8),
    }
    save_file(saved, tmp_path / "model.safetensors")
    target = {name: torch.full_like(tensor, 7) for name, tensor in saved.items()}
    gdsload.load_into(target, tmp_path)
    assert all(torch.equal(target[name], saved[name]) for name in saved)


@pytest.mark.parametrize("load", [gdsload.load_file, streamed])
@pytest.mark.parametrize("index", [slice(0, 6, 2), (slice(None), 3)])
@pytest.mark.parametrize("prefetched", [False, True])
def test_file_that_changes_while_a_slice_is_copied_from_it_is_an_error(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load: Load,
    index: Any,
    prefetched: bool,
) -> None:
    file = tmp_path / "model.safetensors"
    shutil.copyfile(path, file)

    def written_before(*args: Any) -> torch.Tensor:
        with file.open("r+b") as opened:
            opened.seek(-4, os.SEEK_END)
            opened.write(b"abcd")
        return batch.assembled(*args)

    monkeypatch.setattr("gdsload.api.assembled", written_before)
    with ExitStack() as stack:
        if prefetched:  # to a mapping, which the load takes over
            stack.enter_context(gdsload.prefetch(file, cache="mapped")).wait()
        with pytest.raises(FileChanged, match="it was written to"):
            cache = "auto" if prefetched else "mapped"
            load(file, slices={"a": index}, names=["a"], cache=cache)
    assert ("prefetched" in gdsload.last_report().paths) == prefetched
