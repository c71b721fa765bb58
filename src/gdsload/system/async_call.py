"""Calls in threads that an event loop waits for.

Not by the executor of the loop: that has few threads, and waits without end for one that dies as it
starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

from gdsload.errors import GdsloadError
from gdsload.system import torch_thread
from gdsload.system.threads import start_thread


def in_thread(call: Callable[..., Any], *args: Any, **named: Any) -> asyncio.Future[Any]:
    """Makes a call in a thread of its own, with the context variables of the caller.

    Raises GdsloadError if no thread can be started.
    """
    run, future = prepared(call, *args, **named)
    start(run, daemon=False)
    return future


def start(run: Callable[[], None], *, daemon: bool) -> None:
    """Starts a thread. Raises GdsloadError if none can be started."""
    if start_thread(run, "gdsload-async", daemon=daemon) is None:
        raise GdsloadError("no thread can be started to load in")


def prepared(
    call: Callable[..., Any], *args: Any, **named: Any
) -> tuple[Callable[[], None], asyncio.Future[Any]]:
    """A function for a thread, which makes a call with the context variables of this one, and what
    torch keeps for it; and the future of the call."""
    future = asyncio.get_running_loop().create_future()
    context, same_as_here = copy_context(), torch_thread.of_this_thread()

    def there() -> Any:
        with same_as_here():
            return context.run(call, *args, **named)

    return partial(_run, [future], there), future


def _run(outcome: list[Any], call: Callable[[], Any]) -> None:
    """Makes a call, unless its future was cancelled before, and hands its outcome over.

    `_settle` empties `outcome` in the thread of the loop. So this thread keeps no reference to the
    result, nor to an error, whose traceback would keep the model alive.
    """
    (future,) = outcome
    if future.cancelled():
        return
    loop = future.get_loop()
    del future
    try:
        outcome += None, call()
    except BaseException as error:
        outcome += error, None
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(_settle, outcome)


def _settle(outcome: list[Any]) -> None:
    future, error, result = outcome
    outcome.clear()
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # no future takes it, and its caller would wait for ever
        raised = RuntimeError(f"the call raised {error!r}")
        raised.__cause__ = error
        future.set_exception(raised)
    else:
        future.set_exception(error)
