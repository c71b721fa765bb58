"""What torch keeps for each thread, taken over by a thread that loads for another one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gdsload import aio
from gdsload.system import torch_thread


class Cuda:
    """`torch.cuda` with two GPUs: each thread has a current one, and a current stream of each."""

    def __init__(self) -> None:
        self._kept = threading.local()
        self.entered: list[object] = []

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def default_stream(self, device: int) -> tuple[int, str]:
        return device, "default"

    def current_device(self) -> int:
        return getattr(self._kept, "device", 0)

    def current_stream(self, device: int) -> tuple[int, str]:
        return getattr(self._kept, f"stream{device}", self.default_stream(device))

    @contextmanager
    def device(self, number: int) -> Iterator[None]:
        self.entered.append(number)
        with self._holding("device", number):
            yield

    @contextmanager
    def stream(self, stream: tuple[int, str]) -> Iterator[None]:
        self.entered.append(stream)
        with self._holding(f"stream{stream[0]}", stream), self._holding("device", stream[0]):
            yield

    @contextmanager
    def _holding(self, name: str, value: object) -> Iterator[None]:
        before = dict(vars(self._kept))
        setattr(self._kept, name, value)
        yield
        vars(self._kept).clear()
        vars(self._kept).update(before)

    def state(self) -> tuple[int, tuple[int, str], tuple[int, str]]:
        return self.current_device(), self.current_stream(0), self.current_stream(1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    double = Cuda()
    monkeypatch.setattr(torch, "cuda", double)
    return double


def in_a_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_thread_takes_over_streams_device_and_default_device(cuda: Cuda) -> None:
    with torch.device("meta"), cuda.device(1), cuda.stream((0, "side")), cuda.device(1):
        same = torch_thread.of_this_thread()
        streams = torch_thread.streams_of_this_thread()
        wanted = cuda.state()
    assert wanted == (1, (0, "side"), (1, "default"))
    cuda.entered.clear()

    def entered() -> tuple[Any, Any, Any]:
        with same():
            inside = cuda.state(), torch.empty(1).device.type
        with streams():
            without = cuda.state(), torch.empty(1).device.type
        return inside, without, cuda.state()

    inside, without, after = in_a_thread(entered)
    assert inside == (wanted, "meta") and without == (wanted, "cpu")
    assert after == (0, (0, "default"), (1, "default"))
    assert (1, "default") not in cuda.entered, "it would take memory of a GPU that nobody uses"


def test_steps_of_astream_run_in_the_stream_that_is_current(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tensors(**_: Any) -> Iterator[tuple[str, Any]]:
        yield "a", cuda.state()
        yield "b", cuda.state()

    monkeypatch.setattr(aio, "stream", tensors)

    async def main() -> list[Any]:
        found = aio.astream("model", "cuda:1")
        with cuda.stream((1, "first")):
            first = await anext(found)
        with cuda.stream((1, "second")):
            second = await anext(found)
        await found.aclose()  # type: ignore[attr-defined]
        return [first, second]

    assert asyncio.run(main()) == [
        ("a", (1, (0, "default"), (1, "first"))),
        ("b", (1, (0, "default"), (1, "second"))),
    ]


def test_afrom_pretrained_loads_on_the_current_gpu(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio, "from_pretrained", lambda *_, **__: cuda.state())
    with cuda.device(1):
        assert asyncio.run(aio.afrom_pretrained("model"))[0] == 1
