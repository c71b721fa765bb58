"""Parameters that are cast or merged: each tensor is copied once, and merging copies nothing."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import equal
import gdsload
import tinymodels
from gdsload import warmup
from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.integrations.transformers.model_reader import MOSTLY_WRITTEN
from gdsload.integrations.transformers.parameter_buffers import (
    CAST,
    CAT,
    EXPERTS,
    ROWS,
    STACK,
    Kind,
    ParameterBuffers,
    buffer_of,
    kinds_of,
)
from gdsload.integrations.transformers.parameter_writer import ParameterWriter
from gdsload.integrations.transformers.readahead_queue import QueueClosed
from gdsload.loading import page_cache_fill
from gdsload.loading.session import Session
from gdsload.loading.settings import ReadSettings
from gdsload.loading.window_writer import NO_WAITING
from gdsload.report import LoadReport
from gdsload.system import available
from pagemap import resident_pages
from storage import make_cold
from windows import small_windows

# Rows of two experts' kinds that are merged into one parameter.
PAIR = (Kind(("g0", "g1", "g2"), (4, 6)), Kind(("u0", "u1", "u2"), (2, 6)))


def put(places: ParameterBuffers, key: str, dtype: torch.dtype, tensor: torch.Tensor) -> Any:
    """What a filling does with a tensor that has arrived, and with somebody who asks for it."""
    if not places.expects(key, dtype):
        return None
    places.part_of(key).copy_(tensor)
    return places.give(key)


def tensors(kind: Kind, first: int) -> dict[str, torch.Tensor]:
    count = torch.Size(kind.shape).numel()
    return {
        key: torch.arange(first + n, first + n + count, dtype=torch.bfloat16).view(kind.shape)
        for n, key in enumerate(kind.keys)
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backwards", [False, True])
def test_experts_are_written_to_their_merged_parameter(dtype: torch.dtype, backwards: bool) -> None:
    target = buffer_of(PAIR, dtype, EXPERTS)
    assert target is not None
    assert target.shape == (3, 6, 6)
    gates, ups = tensors(PAIR[0], 0), tensors(PAIR[1], 100)
    with ParameterBuffers([target]) as places:
        loaded = gates | ups
        order = reversed(loaded) if backwards else iter(loaded)
        placed = {key: put(places, key, dtype, loaded[key]) for key in order}
        stacks = [places.merged(STACK, [placed[key] for key in kind.keys], 0) for kind in PAIR]
        merged = places.merged(CAT, stacks, 1)
    assert merged is not None
    assert merged.data_ptr() == placed["g0"].data_ptr()
    wanted = torch.cat(
        [torch.stack([t.to(dtype) for t in part.values()]) for part in (gates, ups)], dim=1
    )
    assert torch.equal(merged, wanted)
    assert merged.is_contiguous()
    assert merged.untyped_storage().nbytes() == merged.nbytes


def test_merged_needs_the_right_parts_in_order() -> None:
    target = buffer_of(PAIR, torch.bfloat16, EXPERTS)
    assert target is not None
    with ParameterBuffers([target]) as places:
        loaded = tensors(PAIR[0], 0) | tensors(PAIR[1], 9)
        placed = {key: put(places, key, torch.bfloat16, tensor) for key, tensor in loaded.items()}
        gates = [placed[key] for key in PAIR[0].keys]
        ups = [placed[key] for key in PAIR[1].keys]
        assert places.merged(STACK, gates[::-1], 0) is None
        assert places.merged(STACK, gates[:2], 0) is None
        assert places.merged(STACK, [*gates[:2], ups[2]], 0) is None
        assert places.merged(STACK, list(loaded.values())[:3], 0) is None
        assert places.merged(STACK, [], 0) is None
        first, second = places.merged(STACK, gates, 0), places.merged(STACK, ups, 0)
        assert first is not None
        assert second is not None
        assert places.merged(CAT, [second, first], 1) is None
        assert places.merged(CAT, [first], 1) is None
        assert places.merged(CAT, [first, second.clone()], 1) is None
        assert places.merged(CAT, [first, second], 1) is not None


def test_rows_are_written_to_their_concatenated_parameter() -> None:
    infos = {name: torch.empty(rows, 3) for name, rows in (("a", 2), ("b", 4), ("c", 1))}
    kinds = kinds_of({"p": ["a", "b"], "q": ["c"]}, ["p", "q"], infos, ROWS)
    assert kinds is not None
    target = buffer_of(kinds, torch.float32, ROWS)
    assert target is not None
    assert target.shape == (7, 3)
    loaded = {name: torch.rand(info.shape) for name, info in infos.items()}
    with ParameterBuffers([target]) as places:
        placed = [put(places, key, torch.float32, loaded[key]) for key in loaded]
        assert places.merged(STACK, placed, 0) is None
        assert places.merged(CAT, placed[:2], 0) is None
        assert places.merged(CAT, placed, 1) is None
        merged = places.merged(CAT, placed, 0)
    assert merged is not None
    assert torch.equal(merged, torch.cat(list(loaded.values())))
    assert merged.untyped_storage().nbytes() == merged.nbytes


def test_part_is_given_once_and_only_in_its_dtype() -> None:
    target = buffer_of([Kind(("a",), (3,))], torch.float32, CAST)
    assert target is not None
    with ParameterBuffers([target]) as places:
        source = torch.tensor([1.5, 2.5, -0.0], dtype=torch.bfloat16)
        assert put(places, "a", torch.float16, source) is None
        assert put(places, "b", torch.float32, source) is None
        first = put(places, "a", torch.float32, source)
        assert first is not None
        assert first.dtype == torch.float32
        assert torch.equal(first, source.float())
        assert put(places, "a", torch.float32, source) is None


def test_kinds_that_do_not_fit_have_no_buffer() -> None:
    shapes = {"a": torch.empty(2, 3), "b": torch.empty(2, 3), "c": torch.empty(4, 3)}
    assert kinds_of({"p": ["a", "b"], "q": ["c"]}, ["p", "q"], shapes, EXPERTS) is not None
    assert kinds_of({"p": ["a", "c"]}, ["p"], shapes, EXPERTS) is None
    assert kinds_of({"p": ["a", "b"]}, ["p", "q"], shapes, EXPERTS) is None
    assert kinds_of({"p": ["a", "b"]}, ["p", "q"], shapes, ROWS) is None
    assert buffer_of([Kind(("a",), (2, 3)), Kind(("b",), (2, 4))], torch.float32, ROWS) is None
    assert buffer_of([Kind(("a",), (2, 3)), Kind(("b",), (0, 3))], torch.float32, ROWS) is None
    uneven = [Kind(("a", "b"), (2, 3)), Kind(("c",), (4, 3))]
    assert buffer_of(uneven, torch.float32, EXPERTS) is None
    assert buffer_of([Kind(("a",), (0, 3))], torch.float32, CAST) is None


def test_freed_parameter_returns_its_memory() -> None:
    size = 8 << 20
    targets = [buffer_of([Kind((name,), (size,))], torch.uint8, CAST) for name in "ab"]
    with ParameterBuffers([target for target in targets if target is not None]) as places:
        source = torch.ones(size, dtype=torch.int8)
        kept = put(places, "a", torch.uint8, source)
        gone = put(places, "b", torch.uint8, source)
    assert kept is not None
    assert gone is not None
    address = gone.data_ptr()
    assert resident_pages(address, size) == size // 4096
    del gone
    assert resident_pages(address, size) == 0
    assert int(kept.sum()) == size


@pytest.mark.parametrize("window_bytes", [1 << 12, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_writer_copies_each_tensor_to_its_parameter(
    tiny_moe_checkpoint: Path, window_bytes: int, dtype: torch.dtype
) -> None:
    """Whatever is asked for first, by tensors larger and smaller than a window, and each kind of
    cast: the copier's, none, and torch's."""
    with (
        Checkpoint.open(tiny_moe_checkpoint) as checkpoint,
        Session(checkpoint, LoadReport("tiny"), ReadSettings(cache="buffered")) as session,
    ):
        expected = safetensors_of(tiny_moe_checkpoint)
        infos = list(checkpoint.tensors.values())
        targets = [buffer_of([Kind((info.name,), info.shape)], dtype, CAST) for info in infos]
        places = ParameterBuffers([target for target in targets if target is not None])
        with (
            small_windows(window_bytes, 2 * window_bytes),
            places,
            ParameterWriter(session, places, infos) as filling,
        ):
            filling.start()
            assert filling.take("nobody", dtype) is None
            assert filling.take(infos[0].name, torch.float64) is None
            for info in reversed(infos):
                found = filling.take(info.name, dtype)
                assert found is not None
                assert torch.equal(found, expected[info.name].to(dtype))
                assert filling.take(info.name, dtype) is None
        assert (filling.taken_tensors, filling.taken_bytes) == (len(infos), checkpoint.total_bytes)
        with pytest.raises(QueueClosed, match="has ended"):
            ended(session, infos).take(infos[0].name, torch.float32)


@pytest.mark.parametrize(
    ("asked", "waited_seconds", "fills"),
    [("auto", 0.0, False), ("auto", 60.0, True), ("fill", 0.0, True)],
)
def test_writer_fills_the_page_cache_only_while_copies_wait(
    tmp_path: Path, asked: str, waited_seconds: float, fills: bool
) -> None:
    file = tmp_path / "model.safetensors"
    saved = {f"t{n}": torch.full((500_000,), n, dtype=torch.bfloat16) for n in range(10)}
    save_file(saved, file)
    make_cold(file)
    report = LoadReport("cold")
    with (
        Checkpoint.open(file) as checkpoint,
        Session(checkpoint, report, ReadSettings(page_cache=asked)) as session,
    ):
        infos = list(checkpoint.tensors.values())
        session.expect(checkpoint.total_bytes)
        targets = [
            buffer_of([Kind((info.name,), info.shape)], torch.float32, CAST) for info in infos
        ]
        places = ParameterBuffers([target for target in targets if target is not None])
        windows = small_windows(1 << 20, 128 << 20)
        with windows, places, ParameterWriter(session, places, infos) as filling:
            filling.waited_seconds = waited_seconds
            filling.start()
            for name, tensor in saved.items():
                written = filling.take(name, torch.float32)
                assert written is not None and torch.equal(written, tensor.float())
    # A window is only mapped if the read-ahead of one before it has reached it.
    io_modes = [path.rpartition("/")[2] for path, nbytes in report.paths.items() if nbytes]
    assert {mode == "mapped" for mode in io_modes} == {fills}
    assert report.page_cache.startswith("filled: " if fills else f"not filled: {NO_WAITING}")
    assert sum(report.pages.values()) >= 2 * checkpoint.total_bytes >> 21


def test_writer_close_wakes_waiting_threads(
    tiny_moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()
    with (
        Checkpoint.open(tiny_moe_checkpoint) as checkpoint,
        Session(checkpoint, LoadReport("tiny"), ReadSettings(cache="buffered")) as session,
    ):
        info = next(iter(checkpoint.tensors.values()))
        target = buffer_of([Kind((info.name,), info.shape)], torch.float32, CAST)
        assert target is not None
        filling = ParameterWriter(session, ParameterBuffers([target]), [info])
        filling.start()
        real = session.open().check

        def never(request: Any) -> Any:
            waiting.set()
            return real(request)._replace(settled=[], finished=False)

        monkeypatch.setattr(session.open(), "check", never)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(filling.take, info.name, torch.float32)
            assert waiting.wait(60)
            filling.close()
            with pytest.raises(QueueClosed, match="has ended"):
                asked.result(60)


def ended(session: Session, infos: list[TensorInfo]) -> ParameterWriter:
    """A filling that was closed before it had begun."""
    target = buffer_of([Kind((infos[0].name,), infos[0].shape)], torch.float32, CAST)
    assert target is not None
    filling = ParameterWriter(session, ParameterBuffers([target]), infos[:1])
    filling.close()
    return filling


def safetensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found.update(load_file(path))
    return found


@pytest.mark.skipif(not equal.NEW, reason="transformers 4.57 merges nothing: it has experts apart")
def test_transformers_merges_without_copying(
    tiny_moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither stacked nor concatenated: with both forbidden, the model is the same."""
    stock = transformers.AutoModelForCausalLM.from_pretrained(tiny_moe_checkpoint, dtype="auto")

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a copy was made")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "stack", forbidden)
        patch.setattr(torch, "cat", forbidden)
        with small_windows(1 << 14, 1 << 15), gdsload.accelerated(cache="buffered"):
            ours = transformers.AutoModelForCausalLM.from_pretrained(
                tiny_moe_checkpoint, dtype="auto"
            )
    assert gdsload.last_report().integration == "hook"
    wanted, found = stock.state_dict(), ours.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], tensor) for name, tensor in found.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_concatenates_rows_without_copying(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that is stored in parts, as it is too large for one tensor."""
    if not hasattr(transformers, "Qwen4ExpForCausalLM"):
        pytest.skip("this transformers has no model with such a table")
    config = transformers.AutoConfig.for_model(
        "qwen4_exp_text",
        **{**tinymodels.MOE, "layer_types": ["linear_attention", "indexed_attention"]},
        **{f"linear_{kind}_head_dim": 8 for kind in ("key", "value")},
        **{f"linear_num_{kind}_heads": 2 for kind in ("key", "value")},
        **{"ple_layer_ids": [1], "ple_embed_dim": 64, "heads_per_ngram": 1},
        **{"ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8},
        **{"split_ngram_parts": 8, "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2},
        **{"indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
        indexer_compress_ratio=2,
    )
    torch.manual_seed(0)
    transformers.Qwen4ExpForCausalLM(config).save_pretrained(tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    concatenated: list[int] = []
    cat = torch.cat

    def noted(tensors: Any, *rest: Any, **named: Any) -> torch.Tensor:
        concatenated.append(len(tensors))
        return cat(tensors, *rest, **named)

    with monkeypatch.context() as patch, gdsload.accelerated(cache="buffered"):
        patch.setattr(torch, "cat", noted)
        ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert gdsload.last_report().integration == "hook"
    assert 8 not in concatenated
    assert tinymodels.differences(stock, ours) == []


def save_wide(directory: Path) -> None:
    """A model in bfloat16 of several MB."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=6000, num_hidden_layers=1, **sizes)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(directory)


@pytest.mark.skipif(not equal.NEW, reason="transformers 4.57 casts by itself, after a read of ours")
def test_page_cache_is_not_filled_where_casts_leave_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_wide(tmp_path)
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    monkeypatch.setattr(page_cache_fill, "available_bytes", lambda: 2 * size)
    decisions = []
    for dtype in (torch.bfloat16, torch.float32):
        make_cold(file)
        model = gdsload.from_pretrained(tmp_path, dtype=dtype)
        decisions.append(gdsload.last_report().page_cache)
        del model
    assert decisions[0].startswith("filled: ")
    assert re.search("^not filled: .* bytes and .* for parameters leave too", decisions[1])


@pytest.mark.skipif(not equal.NEW, reason="transformers 4.57 casts by itself, after a read of ours")
def test_memory_for_casts_is_taken_from_the_idle_part_of_a_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_wide(tmp_path)
    other = tmp_path / "other.safetensors"
    save_file({"w": torch.zeros(64 << 20, dtype=torch.uint8)}, other)
    with warmup.HostPool(1 << 30) as pool:
        gdsload.load_file(other, cache="buffered")
        held = pool.held_bytes

        def left() -> Iterator[tuple[int, str]]:
            yield available.SPARE_BYTES + held + (1 << 20) - pool.held_bytes, ""

        monkeypatch.setattr(available, "_limits", left)
        model = gdsload.from_pretrained(tmp_path, dtype=torch.float32)
        assert model.dtype == torch.float32 and pool.held_bytes < held


def test_writer_that_was_closed_posts_nothing(tiny_moe_checkpoint: Path) -> None:
    with (
        Checkpoint.open(tiny_moe_checkpoint) as checkpoint,
        Session(checkpoint, LoadReport("tiny"), ReadSettings(cache="buffered")) as session,
    ):
        writer = ended(session, [*checkpoint.tensors.values()])
        with pytest.raises(QueueClosed, match="has ended"):
            writer.start()
        assert not session.posted


@pytest.mark.parametrize("asked", ["auto", "fill"])
def test_kept_part_of_a_model_fills_the_page_cache_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Between its tensors are those that windows read."""
    monkeypatch.setattr(page_cache_fill, "WITHOUT_BACKEND_BYTES", 0)
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8, "head_dim": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.Qwen3MoeConfig(vocab_size=4000, **sizes, **layers)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(tmp_path)
    make_cold(tmp_path / "model.safetensors")
    ours = gdsload.from_pretrained(tmp_path, dtype="auto", page_cache=asked)
    report = gdsload.last_report()
    if equal.NEW:  # 4.57 merges nothing
        assert report.integration == "hook"
        assert report.fates["keep"] and report.fates["convert"]
        wanted = "filled: " if asked == "fill" else f"not filled: {MOSTLY_WRITTEN}"
        assert report.page_cache.startswith(wanted)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert tinymodels.differences(stock, ours) == []
