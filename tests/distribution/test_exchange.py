"""One rank of an exchange, mostly over the doubles of a GPU; the other rank sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from devicetensors import device_tensor
from gdsload.checkpoint import Checkpoint
from gdsload.distribution.exchange import Exchange, box_of
from gdsload.distribution.reader_group import ReaderGroup
from gdsload.distribution.shares import layout_of
from gdsload.loading.session import Session
from gdsload.loading.settings import ReadSettings
from gdsload.report import LoadReport
from gdsload.system import gpu
from gdsload.system.cancellation import CancelToken, LoadCancelled
from gpudoubles import Doubles
from gpuloads import SMALL


class Readers:
    """The first of two ranks."""

    size, rank, patience_seconds = 2, 0, 15.0

    def agree(self) -> list[None]:
        return [None, None]

    def exchanging(self) -> AbstractContextManager[None]:
        return nullcontext()

    def exchange(self, *_: Any) -> None:
        pass

    def finish(self) -> None:
        pass


def test_exchange_does_not_break_a_graph_of_another_thread(
    loading: Doubles, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host, waited = torch.empty, list[bool]()

    def empty(shape: Any, **how: Any) -> torch.Tensor:
        if how["device"] != "cuda:0":
            return on_host(shape, **how)
        return device_tensor([shape] if isinstance(shape, int) else shape, **how)

    def cat(pieces: list[torch.Tensor]) -> torch.Tensor:
        return device_tensor((sum(map(len, pieces)),), torch.uint8, "cuda:0")

    gpu.device(0)
    with (
        Checkpoint.open(tiny_checkpoint) as checkpoint,
        Session(
            checkpoint,
            LoadReport(checkpoint.source),
            ReadSettings(backend="posix", options=SMALL),
            device="cuda:0",
        ) as session,
    ):
        infos = list(checkpoint.tensors.values())
        layouts = [layout_of(info, [box_of(info, None)] * 2) for info in infos]
        exchange = Exchange(cast(ReaderGroup, Readers()), session, layouts, 1 << 20)
        loading.capture_graphs(True)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", empty)
            patch.setattr(torch, "cat", cat)
            # Whether or not a message was received: a rank copies what it keeps.
            stream = SimpleNamespace(synchronize=lambda: waited.append(True))
            patch.setattr(torch.cuda, "current_stream", lambda device: stream)
            tensors = [tensor for window in exchange.windows() for _, tensor in window]
            exchange.close()
        assert waited and loading.complaints() == ""
        loading.capture_graphs(False)
        assert len(tensors) == len(infos)


@contextmanager
def exchange_of(folder: Path, readers: Readers, window_bytes: int) -> Iterator[Exchange]:
    """An exchange of all tensors between two ranks, on the host; it is closed if all went well."""
    with (
        Checkpoint.open(folder) as checkpoint,
        Session(checkpoint, LoadReport(checkpoint.source), ReadSettings()) as session,
    ):
        infos = list(checkpoint.tensors.values())
        layouts = [layout_of(info, [box_of(info, None)] * 2) for info in infos]
        exchange = Exchange(cast(ReaderGroup, readers), session, layouts, window_bytes)
        yield exchange
        exchange.close()


def test_rank_that_pauses_answers_until_the_last_window_and_not_after_it(
    tiny_checkpoint: Path,
) -> None:
    """The others have left then."""
    said: list[Any] = []

    class Patient(Readers):
        patience_seconds = 0.0

        def agree(self, state: Any = None) -> list[None]:
            said.append(state)
            return [None, None]

        def finish(self) -> None:
            said.append("finished")

    with exchange_of(tiny_checkpoint, Patient(), 1 << 12) as exchange:
        for number, _ in enumerate(exchange.windows()):
            before = len(said)
            exchange.stay_in_touch()
            if number == 0:
                assert said[before:] == ["reading"]
    assert said[-1] == "finished"


@pytest.mark.parametrize("states", [["reading", None], [None, "reading"]])
def test_rank_whose_load_is_cancelled_does_not_wait_on_for_a_slow_rank(
    tiny_checkpoint: Path, states: list[str | None]
) -> None:
    load = CancelToken()
    asked: list[Any] = []

    class Slow(Readers):
        def agree(self, state: Any = None) -> list[Any]:
            asked.append(state)
            load.ask()
            return states if len(asked) == 1 else [None, None]

    with (
        exchange_of(tiny_checkpoint, Slow(), 1 << 20) as exchange,
        pytest.raises(LoadCancelled),
    ):
        load.run(list, exchange.windows())
    assert asked == [None]


def test_rank_ends_between_two_answers_if_its_load_ends(tiny_checkpoint: Path) -> None:
    def check() -> None:
        if ended:
            raise RuntimeError("the load has ended")

    ended = False
    with (
        Checkpoint.open(tiny_checkpoint) as checkpoint,
        Session(checkpoint, LoadReport(checkpoint.source), ReadSettings()) as session,
    ):
        infos = list(checkpoint.tensors.values())
        layouts = [layout_of(info, [box_of(info, None)] * 2) for info in infos]
        exchange = Exchange(cast(ReaderGroup, Readers()), session, layouts, 1 << 12, check)
        next(exchange.windows())
        exchange.stay_in_touch()
        ended = True
        with pytest.raises(RuntimeError, match="the load has ended"):
            exchange.stay_in_touch()
        exchange.close()
