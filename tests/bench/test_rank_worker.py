"""The loads of a rank in benchmarks/rank_worker.py add no work of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace, TracebackType

import pytest
import torch

from gdsload.cli import measuring

rank_worker = measuring.program("rank_worker")


def test_tensors_of_the_streamer_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"a": torch.ones(3), "b": torch.zeros(2)}

    class Streamer:
        def __enter__(self) -> Streamer:
            return self

        def __exit__(
            self, kind: type | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            pass

        def stream_files(self, files: list[str], device: str, is_distributed: bool) -> None:
            assert (files, device, is_distributed) == (["one"], "cpu", True)

        def get_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(given.items())

    module = SimpleNamespace(SafetensorsStreamer=Streamer)
    monkeypatch.setitem(sys.modules, "runai_model_streamer", module)
    monkeypatch.setenv("RUNAI_STREAMER_DIST", "")
    found = rank_worker.by_runai(["one"])
    assert {name: id(tensor) for name, tensor in found.items()} == {
        name: id(tensor) for name, tensor in given.items()
    }
