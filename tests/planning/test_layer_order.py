"""Tensors in the order in which a model uses them, and streams in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch

import gdsload
from gated import gated
from gdsload.checkpoint import TensorInfo
from gdsload.errors import CheckpointNotFound
from gdsload.planning.layer_order import in_layers
from gdsload.system import quiesce


def ordered(*names: str) -> list[str]:
    shuffled = list(names)
    random.Random(3).shuffle(shuffled)
    return [i.name for i in in_layers(TensorInfo(name, "U8", (), 0, 0, 1) for name in shuffled)]


@pytest.mark.parametrize(
    "names",
    [
        (
            "model.embed_tokens.weight",
            "model.layers.0.a",
            "model.layers.2.a",
            "model.layers.10.a",
            "lm_head.weight",
            "model.norm.weight",
        ),
        ("wpe.weight", "wte.weight", "h.0.attn", "h.1.attn", "ln_f.weight"),
        ("model.encoder.layers.0.a", "model.encoder.layers.11.a", "model.decoder.layers.0.a"),
        ("model.layers.0.mlp.experts.2.w", "model.layers.0.mlp.experts.10.w", "model.layers.1.a"),
        ("model.layers.5.a", "model.layers.last.0.a"),
    ],
)
def test_names_are_sorted_in_layer_order(names: tuple[str, ...]) -> None:
    assert ordered(*names) == list(names)


def test_stream_in_layer_order_yields_layers_in_order(tiny_checkpoint: Path) -> None:
    got = [name for name, _ in gdsload.stream(tiny_checkpoint, order="layers", window_bytes=1)]
    assert got[0] == "model.embed_tokens.weight" and sorted(got) == sorted(
        gdsload.load_file(tiny_checkpoint)
    )
    layers = [int(name.split(".")[2]) for name in got if ".layers." in name]
    assert layers == sorted(layers)
    with pytest.raises(ValueError, match="order"):
        gdsload.stream(tiny_checkpoint, order="size")
    with pytest.raises(ValueError, match="must be"):
        gdsload.stream(tiny_checkpoint, cache="size")
    with pytest.raises(gdsload.PlacementError):
        gdsload.stream(tiny_checkpoint, device="nowhere")


def test_astream_does_not_block_the_event_loop(tiny_checkpoint: Path) -> None:
    """The reads are blocked until another task of the same loop opens the gate."""

    async def both() -> dict[str, torch.Tensor]:
        with gated() as gate:
            tensors = gdsload.astream(tiny_checkpoint, backend="gated", cache="buffered")
            first = asyncio.ensure_future(anext(tensors))
            gate_opener = asyncio.ensure_future(asyncio.to_thread(gate.open))
            name, tensor = await first
            await gate_opener
            return {name: tensor} | {name: tensor async for name, tensor in tensors}

    got = asyncio.run(both())
    for name, tensor in gdsload.load_file(tiny_checkpoint).items():
        assert torch.equal(got[name], tensor)


def test_astream_closed_early_ends_its_reads(tiny_checkpoint: Path) -> None:
    async def some() -> None:
        words = {"cache": "buffered", "window_bytes": 1000}
        async with contextlib.aclosing(gdsload.astream(tiny_checkpoint, **words)) as tensors:
            async for _ in tensors:
                break

    asyncio.run(some())
    assert [holder.busy() for holder in quiesce.holders() if holder.busy()] == []


def test_cancelling_ends_the_wait_for_bytes(tiny_checkpoint: Path) -> None:
    """Nobody opens the gate."""

    async def cancelled() -> None:
        with gated() as gate:
            tensors = gdsload.astream(tiny_checkpoint, backend="gated", cache="buffered")
            first = asyncio.ensure_future(anext(tensors))
            await asyncio.to_thread(gate.request)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first

    asyncio.run(cancelled())
    assert [holder.busy() for holder in quiesce.holders() if holder.busy()] == []


def test_errors_come_out_of_it(tmp_path: Path) -> None:
    async def none() -> None:
        async for _ in gdsload.astream(tmp_path / "nowhere"):
            pytest.fail("there is nothing")

    with pytest.raises(CheckpointNotFound):
        asyncio.run(none())


def test_number_of_thousands_of_digits_is_no_number(tmp_path: Path) -> None:
    name = "model.layers." + "9" * 5000
    safetensors.torch.save_file({name: torch.ones(2)}, tmp_path / "model.safetensors")
    assert [one for one, _ in gdsload.stream(tmp_path, order="layers")] == [name]
    for names in (~gdsload.layers(0, 4), ~gdsload.experts()):
        assert list(gdsload.load_file(tmp_path, names=names)) == [name]
