"""What torch keeps for each thread: default device, current GPU, current streams, and modes.

A thread that loads for another one takes them over. Its tensors are then where the caller's would
be, and what it does with them on a GPU comes in the order of the caller's work. And in a child of
fork(), torch copies without threads of its own, which are in the parent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import gdsload

_Contexts = list[Callable[[], AbstractContextManager[Any]]]


def of_this_thread() -> Callable[[], AbstractContextManager[None]]:
    """Notes what torch keeps for the calling thread.

    Returns:
        Makes a context manager, in which another thread has the same.

    Example:
        >>> same_as_here = of_this_thread()
        >>> def load():
        ...     with same_as_here():  # in another thread
        ...         return torch.empty(3)
    """
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "get_default_device"):  # not imported, or another thread is at it
        return partial(_entered, [])
    makes = _streams()
    default = torch.get_default_device()
    if default.type != "cpu":
        makes.append(lambda: default)
    return partial(_entered, makes)


def streams_of_this_thread() -> Callable[[], AbstractContextManager[None]]:
    """As `of_this_thread`, without the default device."""
    return partial(_entered, _streams())


def _streams() -> _Contexts:
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
        return []
    makes: _Contexts = []
    for each in range(cuda.device_count()):
        stream = cuda.current_stream(each)
        # Entering the default stream of a GPU that nobody uses would take memory of it.
        if stream != cuda.default_stream(each):
            makes.append(partial(cuda.stream, stream))
    return [*makes, partial(cuda.device, cuda.current_device())]  # last: a stream sets it as well


@contextmanager
def _entered(makes: _Contexts) -> Iterator[None]:
    with ExitStack() as stack:
        for make in makes:
            stack.enter_context(make())
        yield


def in_dispatch_mode() -> bool:
    """Whether this thread is in a TorchDispatchMode, such as a FakeTensorMode."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode() is not None


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, tensors are made as in another thread: without the dispatch modes and the inference
    mode of this one."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.inference_mode(False):
        yield


def copying() -> AbstractContextManager[None]:
    """For copies that torch may divide between its threads: in a child of fork() they run in the
    calling thread alone. torch would wait for the threads of the parent, without end."""
    return nullcontext() if os.getpid() == gdsload._pid else _alone()


@contextmanager
def _alone() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
