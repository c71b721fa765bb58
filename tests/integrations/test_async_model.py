"""await from_pretrained: the loop goes on, a cancelled load ends, and nothing of it stays."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import gdsload
import tinymodels
from gated import gated
from gdsload import aio
from gdsload.errors import FileChanged, ReadError
from gdsload.integrations.transformers import hooks
from gdsload.readahead.prefetch import prefetches
from gdsload.system import async_call, cancellation
from threadends import await_threads

NEW = transformers.__version__[0] > "4"
FIRST = "hook" if NEW else "safe_open"
place: ContextVar[str] = ContextVar("place", default="nowhere")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tinymodels.build("llama").save_pretrained(tmp_path / "model", max_shard_size="30KB")
    return tmp_path / "model"


def state_of_process() -> tuple[int, list[str]]:
    gc.collect()
    names = sorted(t.name for t in threading.enumerate() if t.name.startswith("gdsload"))
    return len(os.listdir("/proc/self/fd")), names


def test_async_model_equals_the_synchronous_one(source: Path) -> None:
    stock = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    ours = asyncio.run(
        gdsload.afrom_pretrained(source, cls=transformers.AutoModelForCausalLM, dtype=torch.float16)
    )
    assert gdsload.last_report().integration == FIRST
    assert tinymodels.differences(stock, ours) == []


def test_async_load_passes_all_keywords_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(aio, "from_pretrained", lambda *args, **words: given.append((args, words)))
    words: dict[str, Any] = {
        "cls": int, "backend": "posix", "page_cache": "keep", "group": object(), "readers": "all",
        "stall_seconds": 1.0, "verify": "checksum", "on_module_ready": "wrong", "on_event": print,
        "dtype": "auto",
    }  # fmt: skip
    asyncio.run(gdsload.afrom_pretrained(tmp_path, 1, **words))
    assert given == [((tmp_path, 1), words)]


def test_event_loop_runs_while_reads_are_pending(source: Path) -> None:
    async def main() -> Any:
        loading = asyncio.create_task(gdsload.afrom_pretrained(source))
        await asyncio.to_thread(gate.request)
        for _ in range(100):  # nothing comes before the gate opens, and the loop turns
            await asyncio.sleep(0)
        assert not loading.done()
        while not loading.done():
            for number in range(len(gate.requests)):
                gate.open(number)
            await asyncio.wait([loading], timeout=0.01)
        return loading.result()

    with gated() as gate, gdsload.accelerated(cache="direct", backend="gated"):
        model = asyncio.run(main())
    assert (
        tinymodels.differences(transformers.AutoModelForCausalLM.from_pretrained(source), model)
        == []
    )


@pytest.mark.parametrize("landed", [0, 3])
def test_cancelled_load_releases_everything(source: Path, landed: int) -> None:
    gdsload.from_pretrained(source)  # what is opened once for a process is open now
    await_threads("gdsload-open")
    called: list[weakref.ref[Any]] = []

    async def main() -> tuple[Any, Any]:
        await asyncio.to_thread(int)  # the executor's thread is there before it is counted
        before = state_of_process()
        loading = asyncio.create_task(
            gdsload.afrom_pretrained(
                source, on_module_ready=lambda _, module: called.append(weakref.ref(module))
            )
        )
        await asyncio.to_thread(gate.request)
        gate.open(count=landed)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        del loading
        assert all(request.released for request in gate.requests)
        for name in ("gdsload-async", "gdsload-open"):
            await_threads(name)
        return before, state_of_process()

    with gated() as gate, gdsload.accelerated(cache="direct", backend="gated"):
        before, after = asyncio.run(main())
        gate.requests.clear()
    assert after[1] == before[1], "threads"
    assert after[0] == before[0], "descriptors"
    gc.collect()
    assert [module for module in called if module() is not None] == []
    assert prefetches() == [] and not hooks.patcher.in_place
    assert gdsload.last_report().failure, "it did not end by itself"


def test_load_that_is_cancelled_twice_logs_nothing(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio logs an exception that nobody has looked at."""

    async def main() -> None:
        loading = asyncio.create_task(gdsload.afrom_pretrained(source))
        await asyncio.to_thread(gate.request)
        loading.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        del loading
        await asyncio.to_thread(await_threads, "gdsload-async")
        await asyncio.sleep(0)
        gc.collect()

    with gated() as gate, gdsload.accelerated(cache="direct", backend="gated"):
        asyncio.run(main())
        gate.requests.clear()
    gc.collect()
    assert [one for one in caplog.records if one.name == "asyncio"] == []


def test_callback_may_cancel_its_load(source: Path) -> None:
    seen: list[str] = []

    async def main() -> None:
        loop, loading = asyncio.get_running_loop(), asyncio.current_task()
        assert loading is not None
        asked = threading.Event()

        def cancel() -> None:
            loading.cancel()
            loop.call_soon(loop.call_soon, asked.set)  # after the task has seen it

        def ready(name: str, module: Any) -> None:
            seen.append(name)
            if len(seen) == 3:
                loop.call_soon_threadsafe(cancel)
                assert asked.wait(30)

        await gdsload.afrom_pretrained(source, on_module_ready=ready)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert len(seen) == 3, "no callback after the load was cancelled"
    assert not hooks.patcher.in_place


def test_timeout_cancels_the_load(source: Path) -> None:
    async def main() -> None:
        loading = asyncio.create_task(gdsload.afrom_pretrained(source))
        await asyncio.to_thread(gate.request)
        await asyncio.wait_for(loading, 0.01)

    with gated() as gate, gdsload.accelerated(cache="direct", backend="gated"):
        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            asyncio.run(main())
        assert gate.requests and all(request.released for request in gate.requests)
    assert not hooks.patcher.in_place


def test_load_runs_in_the_context_of_its_caller(source: Path) -> None:
    seen: set[str] = set()

    def ready(name: str, module: Any) -> None:
        seen.add(place.get())
        place.set("changed by the load")

    async def main() -> str:
        place.set("here")
        with gdsload.accelerated(cache="buffered", backend="posix"):
            loading = asyncio.create_task(gdsload.afrom_pretrained(source, on_module_ready=ready))
            place.set("later")
            await loading
        assert gdsload.last_report().backend == "posix"
        return place.get()

    assert asyncio.run(main()) == "later"
    assert "here" in seen and "later" not in seen and "nowhere" not in seen


def test_concurrent_loads_have_reports_of_their_own(source: Path, tmp_path: Path) -> None:
    tinymodels.build("gpt2").save_pretrained(tmp_path / "other")
    names: dict[str, set[str]] = {"model": set(), "other": set()}

    async def main() -> list[Any]:
        return await asyncio.gather(
            *(
                gdsload.afrom_pretrained(
                    tmp_path / kind,
                    on_module_ready=lambda name, _, kind=kind: names[kind].add(name),
                )
                for kind in names
            )
        )

    for kind, model in zip(names, asyncio.run(main()), strict=True):
        assert names[kind] == {name for name, _ in model.named_modules()}
        stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind)
        assert tinymodels.differences(stock, model) == []


def test_loads_that_wait_for_their_turn_end_when_they_are_cancelled(source: Path) -> None:
    async def main() -> None:
        loads = [asyncio.create_task(gdsload.afrom_pretrained(source)) for _ in range(3)]
        await asyncio.sleep(0)  # all have begun
        await asyncio.wait_for(asyncio.to_thread(gate.request), 30)
        for load in loads:
            load.cancel()
        assert [type(end) for end in await asyncio.gather(*loads, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 3

    with gated() as gate, gdsload.accelerated(cache="direct", backend="gated"):
        asyncio.run(main())
        assert len(gate.requests) == 1, "a load that had no turn has read"


def test_load_needs_no_thread_of_the_executor(source: Path) -> None:
    busy = threading.Event()

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        other = loop.run_in_executor(None, busy.wait, 600)
        try:
            names = [name async for name, _ in gdsload.astream(source)]
            model = await gdsload.afrom_pretrained(source)
            assert not other.done()
        finally:
            busy.set()
        assert await other
        return names, model

    names, model = asyncio.run(main())
    assert set(names) <= model.state_dict().keys()


def test_load_waits_for_one_of_another_event_loop(source: Path) -> None:
    def first() -> None:
        with gdsload.accelerated(cache="direct", backend="gated"):
            asyncio.run(gdsload.afrom_pretrained(source))

    async def second() -> None:
        loading = asyncio.create_task(gdsload.afrom_pretrained(source))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not loading.done()
        for number in range(len(gate.requests)):
            gate.open(number)
        await loading

    with gated() as gate, ThreadPoolExecutor(1) as pool:
        other = pool.submit(first)
        gate.request()
        asyncio.run(second())
        other.result()


def test_default_device_of_the_caller_is_that_of_the_load(source: Path) -> None:
    """torch keeps it for each thread. transformers refuses "meta", and nothing else here differs
    from the CPU."""
    refused: Any = pytest.raises((RuntimeError, ValueError), match="meta device")
    with torch.device("meta"):
        with refused:
            gdsload.from_pretrained(source)
        with refused:
            asyncio.run(gdsload.afrom_pretrained(source))
    assert asyncio.run(gdsload.afrom_pretrained(source)).device.type == "cpu"


def test_error_of_a_load_is_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        asyncio.run(gdsload.afrom_pretrained(str(tmp_path / "nothing")))


def test_cancellation_before_or_during_a_load_gives_no_model() -> None:
    stop = cancellation.CancelToken()

    def load() -> str:
        stop.ask()
        return "a model"

    with pytest.raises(cancellation.LoadCancelled):
        stop.run(load)
    with pytest.raises(cancellation.LoadCancelled):
        stop.run(str)
    cancellation.check()  # and nobody else is stopped


@pytest.mark.parametrize("same_loop", [False, True])
def test_callback_waits_for_another_load(source: Path, same_loop: bool) -> None:
    inner: list[Any] = []

    async def main() -> Any:
        loop = asyncio.get_running_loop()

        def ready(name: str, module: Any) -> None:
            if inner:
                return
            other = gdsload.afrom_pretrained(source)
            if same_loop:
                inner.append(asyncio.run_coroutine_threadsafe(other, loop).result(60))
            else:
                inner.append(asyncio.run(asyncio.wait_for(other, 60)))

        return await gdsload.afrom_pretrained(source, on_module_ready=ready)

    outer = asyncio.run(main())
    assert tinymodels.differences(outer, inner[0]) == []
    assert asyncio.run(gdsload.afrom_pretrained(source)) is not outer  # the turn was given back


def test_load_that_a_callback_starts_waits_until_it_pauses(source: Path) -> None:
    """Not only nested loads may run during a callback; after it they run one after the other."""
    building: list[str] = []

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        other: list[asyncio.Future[Any]] = []
        started = threading.Event()

        def begin() -> None:
            other.append(asyncio.ensure_future(gdsload.afrom_pretrained(source)))
            started.set()

        def ready(name: str, module: Any) -> None:
            building.append(name)
            if not other:
                loop.call_soon_threadsafe(begin)
                assert started.wait(60)

        model = await gdsload.afrom_pretrained(source, on_module_ready=ready)
        return model, await other[0]

    first, second = asyncio.run(main())
    assert tinymodels.differences(first, second) == []
    assert len(building) == len(set(building)) > 3


def test_end_of_a_load_whose_callback_was_lost_is_noticed() -> None:
    """As when a signal handler raises in the loop, which then forgets what a thread told it."""

    async def ended() -> None:
        stop = cancellation.CancelToken()
        stop.run(int)
        await aio._end(stop, asyncio.get_running_loop().create_future())

    asyncio.run(asyncio.wait_for(ended(), 240))


def test_iterator_that_a_closed_loop_forgets_leaves_no_thread(source: Path) -> None:
    async def first() -> str:
        async for name, _ in gdsload.astream(source):
            return name
        return ""

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(first())
    loop.close()
    gc.collect()
    await_threads("gdsload-async")


@pytest.mark.usefixtures("no_collector")
def test_model_of_a_cancelled_load_is_freed_before_the_error_is_raised(source: Path) -> None:
    seen: list[weakref.ref[Any]] = []

    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        cancelled = threading.Event()

        def cancel() -> None:
            loading.cancel()
            loop.call_soon(loop.call_soon, cancelled.set)  # after the load has seen it

        def ready(name: str, module: Any) -> None:
            seen.append(weakref.ref(module))
            if len(seen) == 3:
                loop.call_soon_threadsafe(cancel)
                assert cancelled.wait(60)

        loading = asyncio.create_task(gdsload.afrom_pretrained(source, on_module_ready=ready))
        try:
            await loading
        except asyncio.CancelledError:
            return [module() for module in seen]
        return ["a model"]

    assert asyncio.run(main()) == [None] * 3


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("error", [ReadError, FileChanged])
def test_model_of_a_failed_load_is_freed_without_the_collector(
    source: Path, error: type[Exception]
) -> None:
    seen: list[weakref.ref[Any]] = []

    def ready(name: str, module: Any) -> None:
        seen.append(weakref.ref(module))
        if len(seen) == 3:
            if error is ReadError:
                raise ReadError("broken")
            with next(source.glob("*.safetensors")).open("ab") as file:
                file.write(b"more")

    async def main() -> list[Any]:
        try:
            await gdsload.afrom_pretrained(source, on_module_ready=ready)
        except error:
            pass
        else:
            pytest.fail("the load succeeded")
        await asyncio.sleep(0)  # asyncio refers to the error until the task waits again
        return [module() for module in seen]

    left = asyncio.run(main())
    assert left == [None] * len(seen) and len(seen) >= 3


@pytest.mark.usefixtures("no_collector")
def test_iterator_that_waits_for_a_tensor_keeps_no_other_one(source: Path) -> None:
    async def main() -> None:
        tensors = gdsload.astream(source, window_bytes=1, backend="gated", cache="direct")
        first = asyncio.ensure_future(anext(tensors))
        await asyncio.to_thread(gate.open)
        gone = weakref.ref((await first)[1])
        del first
        second = asyncio.ensure_future(anext(tensors))
        await asyncio.to_thread(gate.request, 2)  # read ahead, before it waits for the one before
        assert gone() is None
        second.cancel()
        with suppress(asyncio.CancelledError):
            await second

    with gated() as gate:
        asyncio.run(main())


@pytest.mark.usefixtures("no_collector")
def test_error_of_an_iterator_is_in_no_cycle(source: Path) -> None:
    gone: list[weakref.ref[Any]] = []

    async def main() -> None:
        try:
            async for _ in gdsload.astream(source, backend="gated", cache="direct"):
                pass
        except ReadError as error:
            gone.append(weakref.ref(error))
        assert [error() for error in gone] == [None]

    with gated() as gate, ThreadPoolExecutor(1) as pool:
        pool.submit(gate.open, error=errno.EIO)
        asyncio.run(main())


def test_call_that_outlives_its_loop_ends_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    begun, released = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        released.wait()

    async def begin() -> None:
        async_call.in_thread(call)
        await asyncio.to_thread(begun.wait)

    asyncio.run(begin())
    released.set()
    await_threads("gdsload-async")
    assert errors == []


def test_callback_that_raises_stop_iteration_ends_the_load(source: Path) -> None:
    """asyncio takes no such error for a future, and the caller would wait for ever."""

    def ready(name: str, module: torch.nn.Module) -> None:
        next(iter(()))

    async def main() -> None:
        with pytest.raises(RuntimeError, match="StopIteration") as caught:
            await asyncio.wait_for(gdsload.afrom_pretrained(source, on_module_ready=ready), 60)
        assert isinstance(caught.value.__cause__, StopIteration)
        await gdsload.afrom_pretrained(source)

    asyncio.run(main())
