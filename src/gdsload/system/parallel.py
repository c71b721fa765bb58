"""Calls a function for many items in daemon threads, and yields the results in the items' order.

Slow storage is queried in parallel, a hung mount is reported, and Ctrl-C is handled at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from gdsload.errors import StallError
from gdsload.system.cancellation import WAKE_SECONDS, LoadCancelled, check
from gdsload.system.stall import STALL_SECONDS, StallWatch
from gdsload.system.threads import condition, start_thread

Item = TypeVar("Item")
Result = TypeVar("Result")

_THREADS = 16  # requests in flight hide the latency of network storage; more gain nothing
_AHEAD = 32  # finished results that wait for the consumer: bounds the memory of headers


class _Own(threading.local):
    """Of this thread: what it works for."""

    threads: _Threads[Any, Any] | None = None


_own = _Own()


def note_progress() -> None:
    """Notes that bytes have come for an item of a `parallel_map`: in its `work`, if that may take
    longer than a stall."""
    if _own.threads is not None:
        _own.threads.steps += 1


class _Threads(Generic[Item, Result]):
    """The threads of one `parallel_map`, and the results that they leave for its caller."""

    def __init__(
        self,
        work: Callable[[Item], Result],
        items: Sequence[Item],
        discard: Callable[[Result], None],
    ) -> None:
        self._work = work
        self._discard = discard
        self._jobs = iter(enumerate(items))
        self._lock, self._changed = condition()
        self._outcomes: dict[int, tuple[Result | None, BaseException | None]] = {}
        self._crashes: list[BaseException] = []  # of threads, outside `work`
        self.steps = 0  # of progress: items that were finished, and bytes that came for others
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self.join_seconds = 1.0  # for threads still at work when the caller stops

    def start(self, number: int) -> bool:
        """Starts up to so many threads. False if the process may start none."""
        for _ in range(number):
            thread = start_thread(self._run, "gdsload-open")
            if thread is None:
                break
            self._threads.append(thread)
        return bool(self._threads)

    def _run(self) -> None:
        try:
            _own.threads = self
            while (job := self._next_job()) is not None:
                self._finish(job[0], *self._outcome_of(job[1]))
        except BaseException as crash:  # for example no memory: the caller must not wait
            self._crashes.append(crash)

    def _next_job(self) -> tuple[int, Item] | None:
        """The next item and its number, when there is room for its result; None at the end."""
        with self._lock:
            self._changed.wait_for(lambda: self._stopped or len(self._outcomes) < _AHEAD)
            return None if self._stopped else next(self._jobs, None)

    def _outcome_of(self, item: Item) -> tuple[Result | None, BaseException | None]:
        # An error refers to this frame and to its callers. If one of them went on to refer to it,
        # what the work held, such as connections, would stay until the garbage is collected.
        try:
            return self._work(item), None
        except BaseException as error:
            return None, error

    def _finish(self, number: int, result: Result | None, error: BaseException | None) -> None:
        with self._lock:
            if not self._stopped:
                self._outcomes[number] = result, error
                self.steps += 1
                self._changed.notify_all()
                return
        if error is None:
            self._discard(result)  # type: ignore[arg-type]

    def result_of(self, number: int, path_of: Callable[[], str], stall_seconds: float) -> Result:
        """Waits for the result of an item. Errors are as those of `parallel_map`."""
        with self._lock:
            before, start, watch = self.steps, time.monotonic(), StallWatch()
            while number not in self._outcomes:
                self._changed.wait(min(WAKE_SECONDS, stall_seconds))
                alive = any(thread.is_alive() for thread in self._threads)
                if self._crashes:
                    raise self._crashes[0]
                if not alive and number not in self._outcomes:
                    raise MemoryError(f"{path_of()}: no memory for the threads that open it")
                check()
                if self.steps != before:
                    before, start = self.steps, time.monotonic()
                if watch.stalled(time.monotonic() - start, stall_seconds):
                    self.join_seconds = 0.0
                    path = path_of()
                    raise StallError(
                        f"{path}: the storage has not answered for {stall_seconds:g} s", path=path
                    )
            result, error = self._outcomes.pop(number)
            self._changed.notify_all()
        if error is not None:
            try:
                raise error
            finally:
                del error  # as in `_outcome_of`
        return result  # type: ignore[return-value]

    def stop(self) -> None:
        """Lets the threads end, waits for them up to `join_seconds`, and discards the results that
        were not taken. A thread that is still at work then discards its own."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()
        deadline = time.monotonic() + self.join_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for result, error in self._outcomes.values():
            if error is None:
                self._discard(result)  # type: ignore[arg-type]
        self._outcomes.clear()


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
        stall_seconds: The longest time in which no item is finished, and no progress is noted.

    Raises:
        StallError: Nothing has happened for `stall_seconds`. The hung thread is left behind and
            discards its result.
        LoadCancelled: The load was cancelled. Threads at work are left behind as well.
        BaseException: The first error of `work`, in the order of the items.
    """
    threads = _Threads(work, items, discard)
    try:
        if threads.start(min(_THREADS, len(items))):
            for number, item in enumerate(items):
                yield threads.result_of(number, partial(path_of, item), stall_seconds)
        else:
            for item in items:
                yield work(item)
    except (KeyboardInterrupt, LoadCancelled):
        threads.join_seconds = 0.2  # somebody waits for the end
        raise
    finally:
        try:
            threads.stop()
        except BaseException:  # Ctrl-C, perhaps before its first step: they would wait for ever
            threads.stop()
            raise


def in_thread(
    work: Callable[[], Result],
    path: str,
    *,
    discard: Callable[[Result], None] = lambda _: None,
    stall_seconds: float = STALL_SECONDS,
) -> Result:
    """`work()`, in a thread: storage that hangs cannot block Ctrl-C. `path` is for messages. Raises
    as `parallel_map`."""
    (result,) = parallel_map(
        lambda _: work(),
        [None],
        path_of=lambda _: path,
        discard=discard,
        stall_seconds=stall_seconds,
    )
    return result
