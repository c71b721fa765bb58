"""Calls a function for many items in daemon threads, and yields the results in the items' order.

Slow storage is queried in parallel, a hung mount is reported, and Ctrl-C is handled at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from gdsload.errors import StallError
from gdsload.system.cancellation import LoadCancelled, check
from gdsload.system.stall import STALL_SECONDS, StallWatch
from gdsload.system.threads import start_thread

Item = TypeVar("Item")
Result = TypeVar("Result")

_THREADS = 16  # requests in flight hide the latency of network storage; more gain nothing
_AHEAD = 32  # finished results that wait for the consumer: bounds the memory of headers
_WAKE_SECONDS = 0.1  # a Ctrl-C just before a wait begins is seen only when the wait ends


def parallel_map(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    path_of: Callable[[Item], str],
    discard: Callable[[Result], None] = lambda _: None,
    stall_seconds: float = STALL_SECONDS,
) -> Generator[Result, None, None]:
    """Calls `work` for each item in parallel threads and yields the results in the items' order.

    It is not an Executor: that one waits for hung threads when the interpreter exits. If no thread
    can be started, the caller does the work and waits as long as the storage does.

    Args:
        work: Called once for each item.
        items: The items.
        path_of: The path of an item, for messages.
        discard: Called for each result that is not yielded because the caller stopped early.
        stall_seconds: The longest time in which no item is finished.

    Raises:
        StallError: No item was finished for `stall_seconds`. The hung thread is left behind and
            discards its result.
        LoadCancelled: The load was cancelled. Threads at work are left behind as well.
        BaseException: The first error of `work`, in the order of the items.
    """
    changed = threading.Condition()
    jobs = iter(enumerate(items))
    outcomes: dict[int, tuple[Result | None, BaseException | None]] = {}
    crashes: list[BaseException] = []  # of threads, outside `work`
    finished = 0
    stopped = False

    def run() -> None:
        nonlocal finished
        try:
            while True:
                # An error refers to this frame. If the frame went on to refer to it, what the work
                # held, such as connections, would stay until the garbage is collected.
                result: Result | None = None
                error: BaseException | None = None
                with changed:
                    changed.wait_for(lambda: stopped or len(outcomes) < _AHEAD)
                    job = None if stopped else next(jobs, None)
                if job is None:
                    return
                try:
                    result = work(job[1])
                except BaseException as caught:
                    error = caught
                with changed:
                    if not stopped:
                        outcomes[job[0]] = result, error
                        finished += 1
                        changed.notify_all()
                        continue
                if error is None:
                    discard(result)  # type: ignore[arg-type]
        except BaseException as crash:  # for example no memory: the caller must not wait
            crashes.append(crash)

    threads: list[threading.Thread] = []
    join_seconds = 1.0  # for threads still at work when the caller stops
    try:
        for _ in range(min(_THREADS, len(items))):
            thread = start_thread(run, "gdsload-open")
            if thread is None:  # the process may start no more threads
                break
            threads.append(thread)
        if not threads:
            for item in items:
                yield work(item)
            return
        for number, item in enumerate(items):
            with changed:
                before, start, watch = finished, time.monotonic(), StallWatch()
                while number not in outcomes:
                    changed.wait(min(_WAKE_SECONDS, stall_seconds))
                    if crashes:
                        raise crashes[0]
                    check()
                    if finished != before:
                        before, start = finished, time.monotonic()
                    if watch.stalled(time.monotonic() - start, stall_seconds):
                        join_seconds = 0.0
                        path = path_of(item)
                        raise StallError(
                            f"{path}: the storage has not answered for {stall_seconds:g} s",
                            path=path,
                        )
                result, error = outcomes.pop(number)
                changed.notify_all()
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # as in `run`
            yield result  # type: ignore[misc]
    except (KeyboardInterrupt, LoadCancelled):
        join_seconds = 0.2  # somebody waits for the end
        raise
    finally:
        with changed:
            stopped = True
            changed.notify_all()
        deadline = time.monotonic() + join_seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for result, error in outcomes.values():
            if error is None:
                discard(result)  # type: ignore[arg-type]
        outcomes.clear()
