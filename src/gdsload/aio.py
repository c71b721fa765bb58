"""The asyncio face: reads go on in native threads anyway, and waiting for them in a thread pool."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from gdsload.api import stream
from gdsload.errors import GdsloadError
from gdsload.integrations.transformers.model import from_pretrained
from gdsload.system.cancellation import CancelToken, check
from gdsload.system.lifecycle import fork_safe_lock

if TYPE_CHECKING:
    import torch

_END = ("", None)


def _in_executor(call: Callable[..., Any], *args: Any, **named: Any) -> asyncio.Future[Any]:
    """The call in a thread of the loop's executor, with the context variables of the caller.

    Raises GdsloadError where no thread can be started; the call is then never made.
    """
    wanted = True
    context = copy_context()

    def run() -> Any:  # the executor keeps a call that it found no thread for
        return context.run(call, *args, **named) if wanted else None

    try:
        return asyncio.get_running_loop().run_in_executor(None, run)
    except (RuntimeError, MemoryError) as error:
        wanted = False
        raise GdsloadError(f"no thread can be started to load in: {error}") from error


async def astream(
    source: str | os.PathLike[str], device: str | int | torch.device = "cpu", **words: Any
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """`gdsload.stream` for ``async for``: the event loop goes on while it waits for bytes.

    Arguments and errors are those of `stream`. Breaking out of the loop ends the reads when the
    iterator is closed: ``contextlib.aclosing`` closes it at once.
    """
    tensors = stream(source, device, **words)
    step: asyncio.Future[Any] | None = None
    try:
        while True:
            step = _in_executor(next, tensors, _END)
            name, tensor = await asyncio.shield(step)
            if tensor is None:
                return
            yield name, tensor
    finally:
        # A generator cannot be closed while a thread is in it: a cancelled step is waited for.
        if step is not None and not step.done():
            await asyncio.wait([step])
        close: Callable[[], None] = tensors.close  # type: ignore[attr-defined]
        try:
            closing = _in_executor(close)
        except GdsloadError:
            close()
        else:
            await closing


_turn = fork_safe_lock(sys.modules[__name__], "_turn")


def _in_turn(source: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    turn = _turn
    while not turn.acquire(timeout=0.1):
        check()  # cancelled while it waited
    try:
        return from_pretrained(source, *args, **kwargs)
    finally:
        turn.release()


async def afrom_pretrained(source: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """`gdsload.from_pretrained` for ``await``: the event loop goes on while the model loads.

    Arguments, result and errors are those of `from_pretrained`. The load runs in a thread of the
    loop's executor, one such load after the other (transformers builds models by changing what the
    whole process sees), with the context variables of whoever awaits, as they are now; it is there
    that `on_module_ready` is called. Cancelling the task that awaits ends the reads and frees what
    was loaded before CancelledError comes out of here: at the next tensor, or, while Python still
    imports or transformers reads by itself, when that is done. Cancelled again, it leaves at once.
    """
    stop = CancelToken()
    # A future, not a task: whoever cancels all tasks of a loop must not lose the thread.
    loading = _in_executor(stop.run, _in_turn, source, *args, **kwargs)
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        stop.ask()
        await asyncio.wait([loading])
        if not loading.cancelled():
            loading.exception()  # nobody is to be told of it
        raise
