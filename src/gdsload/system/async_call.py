"""Calls in threads that an event loop waits for.

Not by the executor of the loop: that has few threads, and waits without end for one that dies as it
starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
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
    future: Future[Any] = Future()
    context, same_as_here = copy_context(), torch_thread.of_this_thread()

    def there() -> Any:
        with same_as_here():
            return context.run(call, *args, **named)

    return partial(_settle, future, there), asyncio.wrap_future(future)


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    """Sets the result of a call, unless its future was cancelled before."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
        del future  # the error refers to this frame
    else:
        future.set_result(result)
