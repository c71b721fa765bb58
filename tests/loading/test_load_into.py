"""load_into: exact bytes in tensors that exist already, checks before the first byte, faults."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
from devicetensors import BACKENDS, TorchCuda, device_tensor, odd_tensors, raw
from gated import gated
from gdsload import api
from gdsload.checkpoint import Checkpoint
from gdsload.errors import (
    BackendUnavailable,
    CheckpointError,
    FileChanged,
    GdsloadError,
    PartialLoad,
    PlacementError,
    ReadError,
    StallError,
)
from gdsload.loading import batch, destinations, into, torch_device
from gdsload.loading.batch import Batch
from gdsload.loading.into import TargetBatch
from gdsload.loading.window_writer import WindowWriter
from gdsload.memory import late_copies
from gpudoubles import ERRNO, Doubles
from waiting import wait_for
from windows import small_windows

Tensors = dict[str, torch.Tensor]
SMALL = 20_000  # bytes of a window: tensors are split, and several windows are in flight


@pytest.fixture(autouse=True)
def windows_of_this_file() -> Iterator[None]:
    with small_windows(SMALL, 2 * SMALL):
        yield


@pytest.fixture(scope="module")
def saved() -> Tensors:
    torch.manual_seed(0)
    return {
        "q": torch.randn(60, 64),
        "k": torch.randn(20, 64),
        "v": torch.randn(20, 64),
        "norm": torch.randn(64).bfloat16(),
        "large": torch.randn(3, 100, 100),
        "step": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }


@pytest.fixture(scope="module")
def path(saved: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("into") / "model.safetensors"
    safetensors.torch.save_file(saved, file)
    return file


def zeros(saved: Tensors, **dtypes: torch.dtype) -> Tensors:
    return {
        name: torch.zeros(tensor.shape, dtype=dtypes.get(name, tensor.dtype))
        for name, tensor in saved.items()
    }


def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors over the double's memory are those of cuda:0 from now on."""
    monkeypatch.setattr(destinations, "device_of", lambda tensor: "cuda:0")


def require_equal(got: Tensors, wanted: Tensors) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(raw(got[name]), raw(tensor)), name


# --- exact bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["auto", "direct", "buffered", "mapped"])
def test_tensors_get_the_bytes_of_the_file_at_their_addresses(
    cache: str, path: Path, saved: Tensors
) -> None:
    targets = zeros(saved)
    before = {name: tensor.data_ptr() for name, tensor in targets.items()}
    report = gdsload.load_into(targets, path, cache=cache)
    require_equal(targets, saved)
    assert {name: tensor.data_ptr() for name, tensor in targets.items()} == before
    assert report is gdsload.last_report()
    assert (report.device, report.tensors) == ("cpu", len(saved))
    assert report.fates == {"keep": len(saved), "convert": 0, "skip": 0}


def test_tensors_of_every_size_and_dtype_are_exact(tmp_path: Path) -> None:
    saved = odd_tensors() | {"n": torch.arange(3).to(torch.complex64)}
    file = tmp_path / "odd.safetensors"
    safetensors.torch.save_file(saved, file)
    targets = zeros(saved)
    gdsload.load_into(targets.items(), file)
    require_equal(targets, saved)


@pytest.mark.parametrize("cache", ["direct", "mapped"])
def test_other_dtype_is_cast(cache: str, path: Path, saved: Tensors) -> None:
    targets = zeros(saved, q=torch.float16, norm=torch.float32, step=torch.float64)
    report = gdsload.load_into(targets, path, cache=cache)
    for name, tensor in targets.items():
        assert torch.equal(tensor, saved[name].to(tensor.dtype)), name
    assert report.fates["convert"] == 3


def test_parts_of_fused_targets_are_written(path: Path, saved: Tensors) -> None:
    fused = torch.zeros(100, 64)
    rows = {"q": slice(0, 60), "k": slice(60, 80), "v": slice(80, None)}
    gdsload.load_into(
        {"layer.qkv": fused, "layer.norm": torch.zeros(64)},
        path,
        names=["q", "k", "v", "norm"],
        rename=lambda name: ("layer.qkv", rows[name]) if name in rows else f"layer.{name}",
    )
    assert torch.equal(fused, torch.cat([saved[name] for name in "qkv"]))


def test_views_that_are_not_contiguous_are_written(path: Path, saved: Tensors) -> None:
    columns = torch.zeros(60, 130)
    swapped = torch.zeros(100, 3, 100)
    views = {
        "q": columns[:, 1:65],
        "large": swapped.transpose(0, 1),
        "step": torch.zeros(3).long()[1],
    }
    gdsload.load_into(views, path, names=list(views))
    assert torch.equal(columns[:, 1:65], saved["q"])
    assert not columns[:, 0].any() and not columns[:, 65:].any()
    assert torch.equal(swapped, saved["large"].transpose(0, 1))


@pytest.mark.parametrize(
    "index",
    [1, slice(1, 3), (slice(None), slice(10, 90)), (0, slice(5, 50)), (..., slice(0, 100, 7)),
     (slice(None), 3), (1, 2, 3)],
)  # fmt: skip
@pytest.mark.parametrize("transposed", [False, True])
def test_slices_of_the_checkpoint_are_written(
    index: Any, transposed: bool, path: Path, saved: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gdsload.planning.tensor_slices.GAP_BYTES", 1000)  # several byte ranges
    wanted = saved["large"][index]
    target = torch.zeros(wanted.shape[::-1]).permute(tuple(reversed(range(wanted.dim()))))
    target = target if transposed else target.contiguous()
    gdsload.load_into({"large": target}, path, names="large", slices={"large": index})
    assert torch.equal(target, wanted)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Parameter(torch.zeros(60, 64))
        self.head = torch.nn.Linear(64, 60, bias=False)
        self.head.weight = self.q
        self.register_buffer("norm", torch.zeros(64, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.ones(3), persistent=False)


def test_module_with_tied_parameters_reads_them_once(path: Path, saved: Tensors) -> None:
    model = Model()
    version = model.q._version
    report = gdsload.load_into(model, path, names=["q", "norm"], cache="direct")
    assert torch.equal(model.head.weight, saved["q"]) and torch.equal(model.norm, saved["norm"])
    assert model.q.requires_grad and model.q.is_leaf and model.q._version > version
    assert bool((model.cache == 1).all())
    assert report.missing == []


def test_tied_names_that_are_both_in_the_checkpoint_are_read_once(
    tmp_path: Path, saved: Tensors
) -> None:
    file = tmp_path / "tied.safetensors"
    safetensors.torch.save_file({"q": saved["q"], "head.weight": saved["q"].clone()}, file)
    model = Model()
    report = gdsload.load_into(model.named_parameters(remove_duplicate=False), file)
    assert torch.equal(model.head.weight, saved["q"])
    assert report.tensors == 1 and report.wanted_bytes == saved["q"].nbytes


@pytest.mark.parametrize("rows", [0, 2])
def test_names_of_one_target_need_one_of_the_checkpoint(rows: int, tmp_path: Path) -> None:
    safetensors.torch.save_file({"q": torch.ones(rows, 3)}, tmp_path / "m.safetensors")
    target = torch.zeros(rows, 3)
    report = gdsload.load_into({"q": target, "tied": target}, tmp_path / "m.safetensors")
    assert report.missing == [] and bool((target == 1).all())


def test_saved_value_that_backward_needs_is_seen_to_change(path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    loss = (weight * weight).sum()
    gdsload.load_into({"norm": weight}, path, names="norm")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_of_inference_mode_are_written(path: Path, saved: Tensors) -> None:
    with torch.inference_mode():
        targets = zeros(saved)
    gdsload.load_into(targets, path)
    require_equal(targets, saved)


# --- checks before the first byte ---------------------------------------------------------------


def test_names_on_one_side_only_raise_or_are_reported(path: Path, saved: Tensors) -> None:
    targets = zeros(saved) | {"extra": torch.ones(2)}
    del targets["q"]
    with pytest.raises(CheckpointError, match=r"nothing for 'extra'.*no target for 'q'"):
        gdsload.load_into(targets, path)
    assert not any(tensor.any() for name, tensor in targets.items() if name != "extra")
    report = gdsload.load_into(targets, path, strict=False)
    assert (report.missing, report.unexpected) == (["extra"], ["q"])
    assert "missing: extra" in report.summary() and report.to_dict()["unexpected"] == ["q"]
    require_equal(targets, {name: saved[name] for name in targets.keys() - {"extra"}})


def test_target_of_which_another_one_is_a_written_part_is_missing(tmp_path: Path) -> None:
    safetensors.torch.save_file(
        {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}, tmp_path / "m.safetensors"
    )
    base = torch.zeros(8, 4)
    targets, rename = {"A": base[:4], "B": base}, {"a": "A", "b": ("B", slice(0, 4))}
    with pytest.raises(CheckpointError, match="nothing for 'B'"):
        gdsload.load_into(targets, tmp_path, rename=rename)
    report = gdsload.load_into(targets, tmp_path, rename=rename, strict=False)
    assert report.missing == ["B"]


def test_interleaved_targets_are_written_whatever_the_default_device_is(tmp_path: Path) -> None:
    safetensors.torch.save_file(
        {"a": torch.ones(4, 2), "b": torch.ones(4, 2)}, tmp_path / "m.safetensors"
    )
    base = torch.zeros(4, 4)
    with torch.device("meta"):
        gdsload.load_into({"a": base[:, ::2], "b": base[:, 1::2]}, tmp_path)
    assert base.all()


def test_fused_target_with_a_part_left_out_is_missing(path: Path) -> None:
    rows: dict[str, Any] = {"q": ("qkv", slice(0, 60)), "k": ("qkv", slice(60, 80))}
    rename = dict.fromkeys(["v", "norm", "large", "step", "empty"]) | rows
    with pytest.raises(CheckpointError, match="nothing for 'qkv'"):
        gdsload.load_into({"qkv": torch.zeros(100, 64)}, path, rename=rename)


fused = torch.zeros(100, 64)


def freed(*shape: int, left: int = 0) -> torch.Tensor:
    """A tensor of which only `left` bytes of memory are left, as in engines that sleep."""
    tensor = torch.zeros(shape)
    tensor.untyped_storage().resize_(left)
    return tensor


@pytest.mark.parametrize(
    "other",
    [
        torch.nn.LazyLinear(60).weight,
        torch.zeros(4, 4).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(2, 3)]),
        torch.zeros(2, 2, device="meta"),
    ],
)
@pytest.mark.parametrize("words", [{"strict": False}, {"names": "q"}])
def test_target_that_nothing_belongs_to_may_be_of_any_kind(
    other: torch.Tensor, words: dict[str, Any], path: Path, saved: Tensors
) -> None:
    target = torch.zeros_like(saved["q"])
    report = gdsload.load_into({"q": target, "other": other}, path, **words)
    assert torch.equal(target, saved["q"])
    assert report.missing == ([] if "names" in words else ["other"])
    with pytest.raises(CheckpointError, match="has nothing for"):
        gdsload.load_into({"q": target, "other": other}, path)


def test_of_names_that_share_a_target_the_first_one_is_read(tmp_path: Path) -> None:
    saved = {"a": torch.full((4,), 1.0), "b": torch.full((4,), 2.0)}
    safetensors.torch.save_file(saved, tmp_path / "m.safetensors")
    target = torch.zeros(4)
    for names, value in ((None, 1.0), (["b", "a"], 2.0)):
        report = gdsload.load_into({"a": target, "b": target}, tmp_path, names=names)
        assert target.tolist() == [value] * 4
        assert report.fates == {"keep": 1, "convert": 0, "skip": 1}


@pytest.mark.parametrize(
    ("targets", "error", "text"),
    [
        ({"q": torch.zeros(60, 63)}, CheckpointError, r"shape \[60, 64\]"),
        ({"q": torch.zeros(60, 64, dtype=torch.int32)}, CheckpointError, "not cast"),
        ({"q": torch.zeros(60, 64, device="meta")}, PlacementError, "no memory"),
        ({"q": torch.zeros(1, 64).expand(60, 64)}, PlacementError, "overlaps itself"),
        ({"q": freed(60, 64)}, PlacementError, "its storage was freed"),
        ({"q": freed(60, 64, left=1000)}, PlacementError, "its storage was freed"),
        ({"q": torch.nested.nested_tensor([torch.zeros(60, 64)])}, PlacementError, "nested"),
        ({"q": torch.nn.LazyLinear(60).weight}, PlacementError, "no shape yet"),
        ({"q": torch.zeros(60, 64).to_sparse()}, PlacementError, "layout"),
        ({"q": torch._efficientzerotensor((60, 64))}, PlacementError, "ZeroTensor"),
        ({"q": fused[:60], "k": fused[59:79]}, PlacementError, "shares memory"),
        ({"q": fused[:60], "norm": fused.view(torch.bfloat16)[0, :64]}, PlacementError, "shares"),
        ({"q": 5}, TypeError, "'q' must be a tensor, not int"),
        ([("q", fused[:60]), ("q", fused[:60])], ValueError, "have the name 'q'"),
    ],
)
def test_unfit_target_raises_before_anything_is_written(
    targets: Any, error: type[Exception], text: str, path: Path
) -> None:
    names = list(targets) if isinstance(targets, dict) else ["q"]
    good = torch.zeros(3, 100, 100)
    if isinstance(targets, dict):
        targets = {"large": good} | targets
    with pytest.raises(error, match=text) as caught:
        gdsload.load_into(targets, path, names=["large", *names])
    assert not good.any()
    if issubclass(error, GdsloadError):
        assert str(caught.value).startswith(f"{path}: ")
    if error is CheckpointError:
        assert (caught.value.path, caught.value.tensor) == (str(path), "q")


def test_target_without_elements_is_loaded_whatever_its_strides(path: Path) -> None:
    targets = {"empty": torch.zeros(0, 1).expand(0, 3), "q": torch.zeros(60, 64)}
    assert gdsload.load_into(targets, path, names=["q", "empty"]).tensors == 2


@pytest.mark.parametrize("place", [("q", slice(None), slice(0, 1)), 5, (5, slice(None))])
def test_place_that_is_none_raises_type_error(path: Path, place: Any) -> None:
    target = torch.zeros(60, 64)
    with pytest.raises(TypeError, match=r"rename must give a name, .*, not .* for 'q'"):
        gdsload.load_into({"q": target}, path, names=["q"], rename=lambda _: place)
    assert not target.any()


def test_columns_of_one_matrix_do_not_overlap(path: Path, saved: Tensors) -> None:
    matrix = torch.zeros(20, 128)
    gdsload.load_into({"k": matrix[:, :64], "v": matrix[:, 64:]}, path, names=["k", "v"])
    assert torch.equal(matrix, torch.cat([saved["k"], saved["v"]], dim=1))
    with pytest.raises(PlacementError, match="shares memory"):
        gdsload.load_into({"k": matrix[:, :64], "v": matrix[:, 63:127]}, path, names=["k", "v"])


def test_columns_of_two_dtypes_are_told_apart(path: Path, saved: Tensors) -> None:
    rows = torch.zeros(64, 2 * 64 + 2, dtype=torch.bfloat16)
    norm, fused = rows[:, 0], rows.view(torch.float32)[:60, 1:]
    gdsload.load_into({"q": fused, "norm": norm}, path, names=["q", "norm"])
    assert torch.equal(fused, saved["q"]) and torch.equal(norm, saved["norm"])
    with pytest.raises(PlacementError, match="shares memory"):
        targets = {"q": fused, "norm": rows[:, 2]}
        gdsload.load_into(targets, path, names=["q", "norm"])


def test_map_of_columns_has_an_entry_for_each_column_of_a_row(
    path: Path, saved: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, zeros, made = torch.zeros(20, 128), torch.zeros, []

    def noted(*shape: Any, **words: Any) -> torch.Tensor:
        made.append(zeros(*shape, **words))
        return made[-1]

    monkeypatch.setattr(torch, "zeros", noted)
    gdsload.load_into({"k": matrix[:, :64], "v": matrix[:, 64:]}, path, names=["k", "v"])
    assert [tensor.numel() for tensor in made] == [40]
    assert torch.equal(matrix, torch.cat([saved["k"], saved["v"]], dim=1))

    def refused(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate ...")

    monkeypatch.setattr(torch, "zeros", refused)
    with pytest.raises(PlacementError, match="comparing the places of the targets"):
        gdsload.load_into({"k": matrix[:, :64], "v": matrix[:, 64:]}, path, names=["k", "v"])


def test_two_tensors_for_one_place_raise(path: Path) -> None:
    with pytest.raises(CheckpointError, match="belong to the same place"):
        gdsload.load_into({"k": torch.zeros(20, 64)}, path, names=["k", "v"], rename={"v": "k"})


def test_target_on_another_device_than_asked_raises(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(monkeypatch)
    with pytest.raises(PlacementError, match="is on cuda:0, not cpu"):
        gdsload.load_into({"q": torch.zeros(60, 64)}, path, device="cpu", names="q")


def test_index_that_would_copy_raises_type_error(path: Path) -> None:
    target = torch.zeros(100, 64)
    with pytest.raises(TypeError, match="numbers and ranges"):
        gdsload.load_into({"f": target}, path, names="k", rename=lambda name: ("f", [1, 2]))


@pytest.mark.parametrize(
    ("index", "error"),
    [((0, 0, 0), IndexError), (100, IndexError), (slice(None, None, -1), ValueError)],
)
def test_index_outside_of_its_target_names_the_target(
    path: Path, index: Any, error: type[Exception]
) -> None:
    target = torch.zeros(100, 64)
    with pytest.raises(error, match=r"'fused' of the shape \[100, 64\] has no part"):
        gdsload.load_into({"fused": target}, path, names="k", rename=lambda name: ("fused", index))
    assert not target.any()


# --- faults in the middle -----------------------------------------------------------------------


def same_length(count: int, folder: Path) -> tuple[Path, Tensors]:
    """A file of tensors of one length, and targets for them."""
    tensors = {f"t{n}": torch.full((5000,), n + 1, dtype=torch.int32) for n in range(count)}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors", zeros(tensors)


@pytest.mark.parametrize("good", range(4))
def test_failed_read_tells_which_tensors_are_complete(good: int, tmp_path: Path) -> None:
    file, targets = same_length(4, tmp_path)
    calls = []
    with gated() as gate, pytest.MonkeyPatch.context() as patch:
        real = Batch.wait

        def wait(self: Batch, *words: Any, **named: Any) -> None:
            number = len(calls)
            calls.append(self)
            gate.open(number, error=0 if number < good else 5)
            real(self, *words, **named)

        patch.setattr(Batch, "wait", wait)
        text = rf"Input/output error \(tensor 't{good}'\)"
        with pytest.raises(ReadError if good == 0 else PartialLoad, match=text) as caught:
            gdsload.load_into(targets, file, backend="gated", cache="buffered")
    for n in range(good):
        assert bool((targets[f"t{n}"] == n + 1).all())
    assert not any(targets[f"t{n}"].any() for n in range(good, 4))
    if good:
        error = caught.value
        assert isinstance(error, PartialLoad) and isinstance(error.__cause__, ReadError)
        assert error.complete == tuple(f"t{n}" for n in range(good))
        assert error.undefined == ()
        assert error.unchanged == tuple(f"t{n}" for n in range(good, 4))
        assert pickle.loads(pickle.dumps(error)).complete == error.complete
    assert "failed: " in gdsload.last_report().summary()


def test_failed_copy_leaves_its_window_undefined(
    path: Path, saved: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = WindowWriter._write

    def write(self: WindowWriter, window: Any, batch: Batch) -> None:
        real(self, window, batch)
        if any(part.key == "large" for part in window):
            raise RuntimeError("the copy broke")

    monkeypatch.setattr(WindowWriter, "_write", write)
    rows: dict[str, Any] = {"q": ("fused", slice(0, 60)), "k": ("fused", slice(60, 80))}
    targets = zeros(saved) | {"fused": torch.zeros(80, 64)}
    del targets["q"], targets["k"]
    with pytest.raises(PartialLoad, match="the copy broke") as caught:
        gdsload.load_into(targets, path, rename=rows)
    error = caught.value
    assert "large" in error.undefined
    assert sorted(error.complete + error.undefined + error.unchanged) == sorted(targets)
    for name in error.complete:
        require_equal(targets, {name: saved[name]})
    for name in error.unchanged:
        assert not targets[name].any()


def failing_copy_of(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load fails when the windows up to that of this tensor have been written."""
    real = WindowWriter._write

    def write(self: WindowWriter, window: Any, batch: Batch) -> None:
        real(self, window, batch)
        if any(part.key == key for part in window):
            raise RuntimeError("the copy broke")

    monkeypatch.setattr(WindowWriter, "_write", write)


@pytest.mark.parametrize("words", [{"names": ["a", "z"]}, {"strict": False}])
def test_target_of_which_a_part_is_loaded_is_never_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: dict[str, Any]
) -> None:
    saved = {"a": torch.ones(8, 4), "z": torch.ones(3)}
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(saved, file)
    fused = torch.zeros(16, 4)
    targets = {"fused": fused, "rest": fused[:8], "z": torch.zeros(3), "other": torch.zeros(2)}
    failing_copy_of("z", monkeypatch)
    with small_windows(128), pytest.raises(PartialLoad, match="the copy broke") as caught:
        gdsload.load_into(targets, file, rename={"a": ("fused", slice(0, 8))}, **words)
    error = caught.value
    assert "fused" in error.undefined and "z" in error.undefined
    assert "other" in error.unchanged
    assert sorted(error.complete + error.undefined + error.unchanged) == sorted(targets)


def test_alias_of_a_part_counts_for_the_state_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"a": torch.ones(8, 4), "b": torch.ones(8, 4), "c": torch.ones(8, 4)}
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(saved, file)
    whole = torch.zeros(16, 4)
    targets = {"first": whole[:8], "whole": whole}
    places: dict[str, Any] = {
        "a": "first", "b": ("whole", slice(0, 8)), "c": ("whole", slice(8, 16)),
    }  # fmt: skip
    failing_copy_of("a", monkeypatch)
    with small_windows(128), pytest.raises(PartialLoad, match="the copy broke") as caught:
        gdsload.load_into(targets, file, rename=places)
    assert "whole" in caught.value.undefined


@pytest.mark.parametrize(
    "index",
    [None, slice(0, None, 3), slice(1, 9, 2), (slice(None), slice(3, 40)), (2,), (slice(None), 5)],
)
@pytest.mark.parametrize("shape", [(10, 50, 30), (1, 60, 70), (1, 1, 3000), (500,)])
def test_windows_have_their_size_however_large_a_row_is(
    index: Any, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": saved}, file)
    slices = {} if index is None else {"w": index}
    try:
        wanted = saved if index is None else saved[index]
    except IndexError:
        pytest.skip("the index has more dimensions than the tensor")
    sizes: list[int] = []
    post = WindowWriter._post

    def noted(self: WindowWriter, window: Any) -> Batch:
        sizes.append(sum(part.info.nbytes for part in window))
        return post(self, window)

    monkeypatch.setattr(WindowWriter, "_post", noted)
    target = {"w": torch.zeros_like(wanted)}
    with small_windows(512):
        gdsload.load_into(target, file, slices=slices, cache="direct")
    assert torch.equal(target["w"], wanted)
    assert max(sizes) <= 512


def test_interrupt_is_raised_as_it_is(path: Path, saved: Tensors, monkeypatch: Any) -> None:
    real = WindowWriter._write

    def interrupted(self: WindowWriter, *words: Any) -> None:
        real(self, *words)
        raise KeyboardInterrupt

    monkeypatch.setattr(WindowWriter, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        gdsload.load_into(zeros(saved), path)
    if sys.version_info >= (3, 11):
        assert any("undefined bytes: " in note for note in caught.value.__notes__)


def require_all_undefined(targets: Tensors, file: Path) -> None:
    """The file changes while its four tensors are loaded: all of them may be mixtures."""
    with pytest.raises(PartialLoad) as caught:
        gdsload.load_into(targets, file, cache="direct")
    assert isinstance(caught.value.__cause__, FileChanged)
    assert caught.value.complete == ()
    assert sorted(caught.value.undefined) == ["t0", "t1", "t2", "t3"]


def test_file_that_changes_leaves_all_undefined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, targets = same_length(4, tmp_path)
    real = WindowWriter._release_first

    def touch(self: WindowWriter) -> None:
        real(self)
        os.utime(file, ns=(1, 1))

    monkeypatch.setattr(WindowWriter, "_release_first", touch)
    require_all_undefined(targets, file)


def test_file_that_changes_in_a_later_group_leaves_earlier_ones_undefined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, targets = same_length(4, tmp_path)
    with torch.inference_mode():  # these are written after the others
        targets["t3"] = torch.zeros_like(targets["t3"])
    real = WindowWriter.copy_next

    def touch(self: WindowWriter, *words: Any) -> None:
        real(self, *words)
        if len(self.windows) == 1 and self.windows[0][0].key == "t3":
            os.utime(file, ns=(1, 1))

    monkeypatch.setattr(WindowWriter, "copy_next", touch)
    require_all_undefined(targets, file)


def test_failed_load_into_vram_returns_when_no_copy_is_under_way(
    loading: Doubles, device_targets: Callable[..., Tensors], path: Path, saved: Tensors
) -> None:
    """The caller may restore its tensors then."""
    targets = device_targets(saved)
    loading.hold_copies(True)
    before = loading.cuda_log["copies"]

    def fail(*words: Any, **named: Any) -> None:
        wait_for(lambda: loading.cuda_log["copies"] != before)
        threading.Timer(0.5, loading.hold_copies, [False]).start()
        raise ReadError("on purpose")

    options = {"ring_bytes": 64 << 10, "request_bytes": 4096}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "wait", fail)
        with pytest.raises(PartialLoad):
            gdsload.load_into(targets, path, device="cuda:0", backend="posix", options=options)
    assert late_copies.owners() == []


def unanswered(monkeypatch: pytest.MonkeyPatch) -> list[Checkpoint]:
    """Storage does not say whether files changed. Returns the checkpoints that ask."""
    asked: list[Checkpoint] = []

    def verify_unchanged(self: Checkpoint) -> None:
        asked.append(self)
        raise StallError("the storage has not answered")

    monkeypatch.setattr(Checkpoint, "verify_unchanged", verify_unchanged)
    return asked


def test_stalled_read_is_the_error_if_the_storage_answers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, targets = same_length(4, tmp_path)
    real = WindowWriter.copy_next

    def copy_next(self: WindowWriter, *words: Any) -> None:
        if self.copied == 1:
            raise StallError("no byte has come", offset=7)
        real(self, *words)

    monkeypatch.setattr(WindowWriter, "copy_next", copy_next)
    asked = unanswered(monkeypatch)
    with pytest.raises(PartialLoad, match="no byte has come") as caught:
        gdsload.load_into(targets, file, cache="direct")
    cause = caught.value.__cause__
    assert isinstance(cause, StallError) and cause.offset == 7
    assert caught.value.complete == ()
    assert caught.value.undefined == ("t0",)
    assert len(asked) == 1


def test_storage_that_answers_nothing_after_the_reads_is_asked_once(
    path: Path, saved: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = unanswered(monkeypatch)
    with pytest.raises(PartialLoad, match="not answered") as caught:
        gdsload.load_into(zeros(saved), path, cache="direct")
    assert caught.value.complete == ()
    assert len(asked) == 1


# --- devices ------------------------------------------------------------------------------------


@pytest.fixture
def device_targets(
    loading: Doubles, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Tensors], Tensors]]:
    on_device(monkeypatch)

    def made(saved: Tensors, **dtypes: torch.dtype) -> Tensors:
        return {
            name: device_tensor(tensor.shape, dtypes.get(name, tensor.dtype), "cuda:0").fill_(0)
            for name, tensor in saved.items()
        }

    yield made


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_tensors_in_vram_are_written_in_place(
    backend: str,
    options: dict[str, Any],
    device_targets: Callable[..., Tensors],
    loading: Doubles,
    path: Path,
    saved: Tensors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*_: object) -> torch.Tensor:
        raise AssertionError("memory of the device was allocated for a tensor")

    targets = device_targets(saved)
    monkeypatch.setattr(torch_device, "empty", none)
    versions = {name: tensor._version for name, tensor in targets.items()}
    report = gdsload.load_into(targets, path, device="cuda:0", backend=backend, options=options)
    require_equal(targets, saved)
    assert report.device == "cuda:0" and report.backend == backend
    assert all(tensor._version > versions[name] for name, tensor in targets.items())


def test_bar_counts_bytes_that_come_from_the_host_pool_to_vram(
    device_targets: Callable[..., Tensors],
    path: Path,
    saved: Tensors,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with gdsload.warmup.HostPool(8 << 20):
        gdsload.load_file(path, cache="buffered")
        gdsload.load_into(device_targets(saved), path, backend="posix", progress=True)
    assert "100%" in capsys.readouterr().err
    assert [*gdsload.last_report().paths] == ["pool"]


@pytest.mark.parametrize(("backend", "options"), BACKENDS[1:3])
def test_casts_and_views_in_vram_are_exact(
    backend: str,
    options: dict[str, Any],
    device_targets: Callable[..., Tensors],
    path: Path,
    saved: Tensors,
) -> None:
    targets = device_targets(saved, q=torch.bfloat16, norm=torch.float32)
    wide = device_tensor((3, 100, 120), torch.float32, "cuda:0").fill_(0)
    targets["large"] = wide[:, :, 10:110]
    gdsload.load_into(targets, path, backend=backend, options=options)
    for name, tensor in targets.items():
        assert torch.equal(tensor, saved[name].to(tensor.dtype)), name
    assert not wide[:, :, :10].any() and not wide[:, :, 110:].any()


def test_fused_parts_and_column_slices_go_to_vram_in_place(
    device_targets: Callable[..., Tensors], path: Path, saved: Tensors, monkeypatch: Any
) -> None:
    monkeypatch.setattr("gdsload.planning.tensor_slices.GAP_BYTES", 1000)
    fused = device_tensor((100, 64), torch.float32, "cuda:0")
    part = device_tensor((3, 40, 100), torch.float32, "cuda:0")
    rows: dict[str, Any] = {
        "q": ("fused", slice(0, 60)),
        "k": ("fused", slice(60, 80)),
        "v": ("fused", slice(80, 100)),
    }
    gdsload.load_into(
        {"fused": fused, "large": part},
        path,
        names=["q", "k", "v", "large"],
        slices={"large": (slice(None), slice(10, 50))},
        rename=rows,
        options=BACKENDS[1][1],
    )
    assert torch.equal(fused, torch.cat([saved[name] for name in "qkv"]))
    assert torch.equal(part, saved["large"][:, 10:50])


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_prefetched_bytes_are_written(
    device: str, device_targets: Callable[..., Tensors], path: Path, saved: Tensors
) -> None:
    targets = device_targets(saved)
    with gdsload.prefetch(path, device, options=BACKENDS[1][1]) as ahead:
        ahead.wait()
        report = gdsload.load_into(targets, path, options=BACKENDS[1][1])
    require_equal(targets, saved)
    assert report.paths["prefetched"] and not report.read_bytes


def test_prefetched_bytes_are_written_to_one_element_of_a_column(
    device_targets: Callable[..., Tensors], tmp_path: Path
) -> None:
    """For torch it is contiguous, with a stride."""
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"scale": torch.ones(1)}, file)
    scales = device_tensor((4, 8), torch.float32, "cuda:0").fill_(0)
    with gdsload.prefetch(file, "cpu") as ahead:
        ahead.wait()
        gdsload.load_into({"scale": scales[0:1, 3]}, file, options=BACKENDS[1][1])
    assert scales[0, 3] == 1 and scales.sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefetched_bytes_are_not_written_while_graph_is_captured(
    dtype: torch.dtype,
    device_targets: Callable[..., Tensors],
    loading: Doubles,
    path: Path,
    saved: Tensors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_device, "_torch_cuda", TorchCuda)
    targets = device_targets({"q": saved["q"]}, q=dtype)
    with gdsload.prefetch(path) as ahead:
        ahead.wait()
        loading.capture_stream(True)
        with pytest.raises(PlacementError, match="a CUDA graph is being captured"):
            gdsload.load_into(targets, path, names="q")
        loading.capture_stream(False)
    assert not targets["q"].any()


def test_failed_copy_to_vram_tells_what_is_undefined(
    device_targets: Callable[..., Tensors], loading: Doubles, tmp_path: Path
) -> None:
    file, _ = same_length(4, tmp_path)
    saved = safetensors.torch.load_file(file)
    targets = device_targets(saved)
    loading.fault("cuFileRead", ERRNO, 5, skip=6, times=-1)
    options = {"threads": 1, "ring_bytes": 1 << 20, "request_bytes": 4096}
    with pytest.raises(PartialLoad) as caught:
        gdsload.load_into(targets, file, backend="gds_mt", options=options)
    error = caught.value
    assert isinstance(error.__cause__, ReadError)
    assert error.undefined
    for name in error.complete:
        require_equal(targets, {name: saved[name]})
    assert copy.copy(error).undefined == error.undefined


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("where", ["host", "device"])
def test_failed_load_keeps_nothing_of_its_callers(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    class Model:
        pass

    def broken(*_: object, **__: object) -> None:
        raise ReadError("the read broke")

    file, _ = same_length(4, tmp_path)
    saved = safetensors.torch.load_file(file)
    made = zeros if where == "host" else request.getfixturevalue("device_targets")
    monkeypatch.setattr(TargetBatch, "wait", broken)
    monkeypatch.setattr(WindowWriter, "_release_first", broken)

    def failed() -> list[weakref.ref[Any]]:
        model, targets = Model(), made(saved)
        with pytest.raises(PartialLoad, match="the read broke"):
            gdsload.load_into(targets, file, cache="direct")
        return [weakref.ref(each) for each in (model, *targets.values())]

    assert [each() for each in failed()] == [None] * 5


def test_stalled_read_to_vram_is_the_error_if_the_storage_answers_nothing(
    device_targets: Callable[..., Tensors],
    path: Path,
    saved: Tensors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wait(*_: object, **__: object) -> None:
        raise StallError("no byte has come", offset=7)

    monkeypatch.setattr(TargetBatch, "wait", wait)
    asked = unanswered(monkeypatch)
    with pytest.raises(PartialLoad, match="no byte has come") as caught:
        gdsload.load_into(device_targets(saved), path, cache="direct")
    assert isinstance(caught.value.__cause__, StallError)
    assert caught.value.complete == ()
    assert len(asked) == 1


@pytest.mark.parametrize("after", [False, True])
def test_interrupt_while_reads_are_posted_tells_what_is_undefined(
    after: bool,
    device_targets: Callable[..., Tensors],
    path: Path,
    saved: Tensors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They write to the targets from then on, and not before."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    if after:  # the report is updated when the reads are posted
        monkeypatch.setattr(batch, "record_backend", interrupted)
    else:
        monkeypatch.setattr(TargetBatch, "_take_memory", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        gdsload.load_into(device_targets(saved), path, options=BACKENDS[1][1], cache="direct")
    notes = "".join(getattr(caught.value, "__notes__", [""]))
    assert ("hold undefined bytes: " in notes) == after or sys.version_info < (3, 11)


def test_backend_for_devices_alone_reads_host_memory_as_auto(path: Path, saved: Tensors) -> None:
    targets = zeros(saved)
    report = gdsload.load_into(targets, path, backend="gds_mt", cache="buffered")
    require_equal(targets, saved)
    assert report.backend == "posix"


def test_targets_on_host_and_device_are_read_by_one_call(
    loading: Doubles, path: Path, saved: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = zeros(saved)
    targets["large"] = device_tensor((3, 100, 100), torch.float32, "cuda:0")
    on = {targets["large"].data_ptr()}
    monkeypatch.setattr(
        destinations, "device_of", lambda tensor: "cuda:0" if tensor.data_ptr() in on else "cpu"
    )
    report = gdsload.load_into(targets, path, backend="gds_mt", options=BACKENDS[2][1])
    require_equal(targets, saved)
    assert set(report.device.split(",")) == {"cpu", "cuda:0"}


def test_copies_to_a_gpu_by_way_of_the_host_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a backend that only reads to the host, and has a session of the CPU."""
    waited: list[str] = []
    monkeypatch.setattr(torch_device, "synchronize", waited.append)
    on_gpu: Any = SimpleNamespace(tensor=SimpleNamespace(is_cuda=True, device="cuda:1"))
    on_host: Any = SimpleNamespace(tensor=torch.empty(1))
    for device, destination in (("cpu", on_gpu), ("cuda:0", on_gpu), ("cpu", on_host)):
        session: Any = SimpleNamespace(device=device)
        into._finish_copies(session, [destination])
    assert waited == ["cuda:1", "cuda:0"]


def test_no_byte_is_written_if_the_backend_of_one_device_cannot_work(
    device_targets: Callable[..., Tensors], path: Path, saved: Tensors, monkeypatch: Any
) -> None:
    """Options without a backend are for the device: host memory is read without them."""
    targets = zeros(saved)
    on_gpu = device_targets(saved)
    targets["q"] = on_gpu["q"]
    where = {id(targets["q"]): "cuda:0"}
    monkeypatch.setattr(destinations, "device_of", lambda tensor: where.get(id(tensor), "cpu"))
    with pytest.raises(ValueError, match="allow_compat"):
        gdsload.load_into(targets, path, options={"allow_compat": True})
    assert not any(bool(raw(targets[name]).any()) for name in targets if name != "q")


def test_backend_that_one_device_lacks_leaves_all_as_it_was(
    device_targets: Callable[..., Tensors], path: Path, saved: Tensors, monkeypatch: Any
) -> None:
    targets = zeros(saved)
    targets["q"] = device_targets(saved)["q"]
    where = {id(targets["q"]): "cuda:0"}
    monkeypatch.setattr(destinations, "device_of", lambda tensor: where.get(id(tensor), "cpu"))
    opened = api.open_session

    def refusing(*words: Any) -> Any:
        if words[3] != "cpu":
            raise BackendUnavailable("no such path", {})
        return opened(*words)

    monkeypatch.setattr(api, "open_session", refusing)
    with pytest.raises(BackendUnavailable, match="no such path"):
        gdsload.load_into(targets, path)
    assert not any(bool(raw(targets[name]).any()) for name in targets if name != "q")
