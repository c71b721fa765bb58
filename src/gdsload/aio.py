"""Loads for asyncio: `astream` and `afrom_pretrained`.

Native threads read, and a thread of each load waits for them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, finalize

from gdsload.api import STREAM_WINDOW_BYTES, stream
from gdsload.checkpoint.header import HEADER_LIMIT_BYTES
from gdsload.integrations.transformers.model import from_pretrained
from gdsload.integrations.transformers.monkeypatch import held
from gdsload.system import async_call
from gdsload.system.cancellation import WAKE_SECONDS, CancelToken, check
from gdsload.system.lifecycle import fork_safe_lock
from gdsload.system.stall import STALL_SECONDS

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from gdsload.checkpoint.selection import Names
    from gdsload.distribution.exchange import Shards
    from gdsload.events import OnEvent

_END = ("", None)
_LOOK_SECONDS = 0.05  # between two looks whether a thread has ended


class _CallThread:
    """A thread for calls, one after the other. It ends with this object: also if its event loop is
    closed and forgets an iterator."""

    def __init__(self) -> None:
        """Raises GdsloadError if no thread can be started."""
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon: an iterator that somebody keeps would keep the interpreter from ending.
        async_call.start(partial(_run_all, self._calls), daemon=True)
        finalize(self, self._calls.put, None).atexit = False

    def call(self, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        run, future = async_call.prepared(call, *args)
        self._calls.put(run)
        return future


def _run_all(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (run := calls.get()) is not None:
        run()
        del run  # it keeps a tensor


async def astream(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    device: str | int | torch.device = "cpu",
    *,
    names: Names = None,
    slices: Mapping[str, Any] | None = None,
    order: str = "file",
    backend: str = "auto",
    cache: str = "auto",
    page_cache: str = "auto",
    options: Mapping[str, Any] | None = None,
    window_bytes: int = STREAM_WINDOW_BYTES,
    group: ProcessGroup | None = None,
    shards: Shards | None = None,
    readers: str = "node",
    progress: bool | None = None,
    stall_seconds: float = STALL_SECONDS,
    verify: str | os.PathLike[str] = "size",
    on_event: OnEvent | None = None,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    strict: bool = True,
    header_limit: int = HEADER_LIMIT_BYTES,
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """`gdsload.stream` for `async for`: the event loop runs while this waits for bytes.

    An error ends it: a later step finds its end, as of each asynchronous generator.
    Leaving the loop early ends the reads when the iterator is closed; `contextlib.aclosing` closes
    it at once. Cancelling the task ends a wait for bytes within a tenth of a second. On a GPU, the
    tensors are made in the order of the stream that is current when the next one is awaited.

    Args:
        source: As for `stream`.
        device: Where the tensors are needed, as for `load_file`.
        names: As for `load_file`.
        slices: As for `load_file`.
        order: "file" or "layers", as for `stream`.
        backend: As for `load_file`.
        cache: As for `load_file`.
        page_cache: As for `load_file`.
        options: As for `load_file`.
        window_bytes: Bytes that are read together, as for `stream`.
        group: As for `stream`.
        shards: As for `load_file`.
        readers: As for `load_file`.
        progress: As for `load_file`.
        stall_seconds: As for `load_file`.
        verify: As for `load_file`.
        on_event: As for `load_file`; called in a thread of the load.
        revision: As for `load_file`.
        subfolder: As for `load_file`.
        variant: As for `load_file`.
        cache_dir: As for `load_file`.
        strict: As for `load_file`.
        header_limit: Largest accepted header, in bytes.

    Yields:
        (name, tensor), as `stream` does.

    Raises:
        ValueError: `order`, `cache`, `page_cache` or `verify` has no such value.
        GdsloadError: As for `stream`, or no thread can be started.

    Example:
        >>> async for name, tensor in gdsload.astream("model"):
        ...     print(name)
    """
    tensors = stream(**locals())  # the parameters are those of `stream`
    stop = CancelToken()
    step: asyncio.Future[Any] | None = None
    thread = _CallThread()
    try:
        while True:
            stop.over = False
            step = thread.call(stop.run, next, tensors, _END)
            name, tensor = await asyncio.shield(step)
            step = None  # it has the tensor
            if tensor is None:
                return
            yield name, tensor
            del tensor
    finally:
        try:
            if step is not None and not step.done():
                await _end(stop, step)
        finally:
            step = None  # its error refers to this frame
            await thread.call(tensors.close)  # type: ignore[attr-defined]


_turn = fork_safe_lock(sys.modules[__name__], "_turn")
# Whether this is the context of a callback. Loads in it do not wait for the loop's turn: the load
# that has the turn waits for the callback.
_in_callback: ContextVar[bool] = ContextVar("gdsload.in_callback", default=False)
# By event loop: others do not overtake a load that pauses. A loop without loads has no entry.
_loop_turns: WeakValueDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakValueDictionary()


def _in_turn(
    source: str | os.PathLike[str], /, *args: Any, on_module_ready: Any, **kwargs: Any
) -> Any:
    turn = _turn

    def in_a_pause(name: str, module: Any) -> None:
        turn.release()
        try:
            with held(_in_callback, True):
                on_module_ready(name, module)
        finally:
            turn.acquire()

    callback = in_a_pause if callable(on_module_ready) else on_module_ready
    while not turn.acquire(timeout=WAKE_SECONDS):
        check()  # raises if this load was cancelled
    try:
        return from_pretrained(source, *args, on_module_ready=callback, **kwargs)
    finally:
        turn.release()


async def afrom_pretrained(
    source: str | os.PathLike[str],
    *args: Any,
    cls: Any = None,
    backend: str = "auto",
    page_cache: str = "auto",
    group: ProcessGroup | None = None,
    readers: str = "node",
    stall_seconds: float = STALL_SECONDS,
    verify: str | os.PathLike[str] = "size",
    on_module_ready: Callable[[str, Any], object] | None = None,
    on_event: OnEvent | None = None,
    **kwargs: Any,
) -> Any:
    """`gdsload.from_pretrained` for `await`: the event loop runs while the model loads.

    The load runs in a thread of its own, with the caller's context variables, default device of
    torch, current GPU and current streams. Loads run one after the other, because transformers
    changes state of the whole process while it builds a model; during an `on_module_ready`, those
    that it starts may run, and those of other event loops.

    Cancelling the awaiting task ends the reads and frees what was loaded before CancelledError is
    raised here: at the next tensor, or, while Python imports or transformers reads by itself, when
    that is done. A second cancellation raises at once.

    Args:
        source: As for `from_pretrained`.
        *args: As for `from_pretrained`.
        cls: As for `from_pretrained`.
        backend: As for `from_pretrained`.
        page_cache: As for `from_pretrained`.
        group: As for `from_pretrained`.
        readers: As for `from_pretrained`.
        stall_seconds: As for `from_pretrained`.
        verify: As for `from_pretrained`.
        on_module_ready: As for `from_pretrained`; called in the thread of the load.
        on_event: As for `from_pretrained`; called in threads of the load.
        **kwargs: As for `from_pretrained`.

    Returns:
        The model.

    Raises:
        GdsloadError: As for `from_pretrained`, or no thread can be started.

    Example:
        >>> model = await gdsload.afrom_pretrained("model", device_map="cuda:0")
    """
    stop = CancelToken()
    lock: AbstractAsyncContextManager[Any] = nullcontext()
    if not _in_callback.get():
        lock = _loop_turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    async with lock:
        # A future, not a task: cancelling all tasks of the loop must not abandon the thread.
        loading = async_call.in_thread(
            stop.run, _in_turn, source, *args, cls=cls, backend=backend, page_cache=page_cache,
            group=group, readers=readers, stall_seconds=stall_seconds, verify=verify,
            on_module_ready=on_module_ready, on_event=on_event, **kwargs,
        )  # fmt: skip
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            await _end(stop, loading)
            raise
        finally:
            del loading  # its error refers to this frame, and to those with the model


async def _end(stop: CancelToken, load: asyncio.Future[Any]) -> None:
    """Cancels what a thread loads, and waits for its end."""
    stop.ask()
    # Retrieved, so that asyncio does not log it: also if this wait is cancelled as well.
    load.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    was_over = False
    while not (load.done() or was_over):
        was_over = stop.over  # what tells the loop so is lost if a signal handler raises in it
        await asyncio.wait([load], timeout=_LOOK_SECONDS)
