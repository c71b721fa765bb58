"""Start `gdsload.prefetch` without changing the code that loads the weights.

`hook` is for servers and function platforms, `from_environment` is for scripts. `status` reports
all prefetches. torch is not imported here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload.checkpoint.header import HEADER_LIMIT_BYTES
from gdsload.checkpoint.selection import repeatable
from gdsload.errors import GdsloadError
from gdsload.memory.host_buffers import current_pool
from gdsload.memory.host_pool import HostPool
from gdsload.readahead.prefetch import CANCELLED, CLOSED, FAILED, Prefetch, prefetch, started
from gdsload.system.lifecycle import fork_safe_lock
from gdsload.system.stall import STALL_SECONDS

if TYPE_CHECKING:
    import torch

    from gdsload.checkpoint.selection import Names
    from gdsload.events import OnEvent

__all__ = [
    "Hook",
    "HostPool",
    "Status",
    "from_environment",
    "hook",
    "limit_bandwidth",
    "status",
]

VARIABLE = "GDSLOAD_PREFETCH"
_DEVICE = re.compile(r"(?P<source>.+)@(?P<device>[a-z]+(?::\d+)?)")


class Status(NamedTuple):
    """One prefetch of this process, or one checkpoint in the open `HostPool`.

    Attributes:
        source: The checkpoint.
        device: Where the load is expected, such as "cuda:0".
        tier: "memory", "pool" or "pagecache".
        state: "opening", "reading", "landed" (complete), "cancelled", "failed" or "closed"; for a
            checkpoint in the pool "kept".
        wanted_bytes: Bytes to read; 0 while opening. In the pool: bytes that it holds.
        landed_bytes: Bytes that were read.
        claimed_bytes: Bytes that loads took over. In the pool: bytes that tensors use.
        resident_bytes: Bytes in memory at the end of a prefetch into the page cache, else 0. In the
            pool: bytes in memory now.
        seconds: Seconds until the end, or until now. In the pool: seconds since the last load.
        error: The error, or "".
    """

    source: str
    device: str
    tier: str
    state: str
    wanted_bytes: int
    landed_bytes: int
    claimed_bytes: int
    resident_bytes: int
    seconds: float
    error: str


def status() -> list[Status]:
    """Reports the last prefetches of this process and the content of the open `HostPool`.

    Returns:
        The prefetches, oldest first, ended or not; then the checkpoints in the pool, least recently
        used first.

    Example:
        >>> for each in gdsload.warmup.status():
        ...     print(each.source, each.state, each.landed_bytes)
    """
    pool = current_pool()
    return [
        Status(one.source, one.report.device, one.tier, *one.progress(), one.report.failure)
        for one in started()
    ] + [
        Status(
            one.source,
            "cpu",
            "pool",
            "kept",
            one.held_bytes,
            one.held_bytes,
            one.lent_bytes,
            one.resident_bytes,
            one.idle_seconds,
            "",
        )
        for one in (() if pool is None else pool.held())
    ]


def limit_bandwidth(bytes_per_second: int | None, *, of: str = "ahead") -> None:
    """Limits the rate of reads in this process, from the next read on.

    Without a limit, too, prefetches have a low priority: during a load they read one at a time.

    Args:
        bytes_per_second: The limit. None removes it.
        of: "ahead" limits reads that no load waits for yet; "all" limits all reads.

    Raises:
        ValueError: The rate is below 1 or no 63-bit number, or `of` has no such value.

    Example:
        >>> gdsload.warmup.limit_bandwidth(500_000_000)
    """
    from gdsload._native.pump import set_throttle, throttle

    if bytes_per_second is not None and not 1 <= bytes_per_second < 1 << 63:
        raise ValueError(
            f"bytes_per_second={bytes_per_second} must be from 1 to 2**63 - 1, or None"
        )
    rates = dict(zip(("all", "ahead"), throttle(), strict=True))
    if of not in rates:
        raise ValueError(f"of={of!r} must be one of {', '.join(rates)}")
    rates[of] = bytes_per_second or 0
    set_throttle(rates["all"], rates["ahead"])


class Hook:
    """A prefetch that starts when it is called; made by `hook`.

    Called without an argument, it starts the prefetch, waits for it if `wait` was given, and
    returns it. Called with an application, it is the asynchronous context manager of the
    application's lifespan.
    """

    def __init__(self, start: Callable[[], Prefetch], wait: bool) -> None:
        self._prefetch_now = start
        self._wait = wait
        self._prefetch: Prefetch | None = None
        self._lock = fork_safe_lock(self)

    def start(self) -> Prefetch:
        """Starts the prefetch and returns it. If one is still running, or has read everything, that
        one is returned."""
        with self._lock:
            ahead = self._prefetch
            if ahead is None or ahead.progress().state in (CANCELLED, CLOSED, FAILED):
                ahead = self._prefetch = self._prefetch_now()
            return ahead

    def __call__(self, app: object = None) -> Any:
        if app is not None:
            return self
        ahead = self.start()
        if self._wait:
            ahead.wait()
        return ahead

    async def __aenter__(self) -> dict[str, Prefetch]:
        from gdsload.system.async_call import in_thread  # scripts do not need asyncio

        ahead = self.start()
        try:
            if self._wait:
                await in_thread(ahead.wait)
        except BaseException:  # `__aexit__` is not called, and a thread may still wait for reads
            await self.__aexit__()
            raise
        return {"gdsload": ahead}

    async def __aexit__(self, *_: object) -> None:
        from gdsload.system.async_call import in_thread

        ahead, self._prefetch = self._prefetch, None
        if ahead is None:
            return
        try:
            closing = in_thread(ahead.close)
        except GdsloadError:  # no thread: the reads are cancelled, and it waits for them shortly
            ahead.close()
        else:
            await closing


def hook(
    source: str | os.PathLike[str],
    *,
    wait: bool = False,
    device: str | int | torch.device = "cpu",
    tier: str = "memory",
    names: Names = None,
    limit_bytes: int | None = None,
    keep: bool = False,
    backend: str = "auto",
    cache: str = "auto",
    page_cache: str = "auto",
    options: Mapping[str, Any] | None = None,
    stall_seconds: float = STALL_SECONDS,
    verify: str | os.PathLike[str] = "size",
    on_event: OnEvent | None = None,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    strict: bool = True,
    header_limit: int = HEADER_LIMIT_BYTES,
) -> Hook:
    """Makes a prefetch for a server's lifespan, or for the top of a module on a function platform.

    As a lifespan it starts the prefetch with the application and closes it at the end; requests
    find it as `request.state.gdsload`.

    Args:
        source: A file, a directory, an index file, or a model id, as for `load_file`.
        wait: Whether the application, or the caller, waits for all bytes.
        device: Where the load is expected, as for `gdsload.prefetch`.
        tier: "memory", "pool" or "pagecache", as for `gdsload.prefetch`.
        names: As for `gdsload.prefetch`.
        limit_bytes: As for `gdsload.prefetch`.
        keep: As for `gdsload.prefetch`.
        backend: "auto" or the name of a backend.
        cache: As for `load_file`.
        page_cache: As for `load_file`; not for tier "pagecache".
        options: As for `load_file`.
        stall_seconds: Seconds without a new byte after which the prefetch fails.
        verify: As for `gdsload.prefetch`.
        on_event: As for `gdsload.prefetch`.
        revision: As for `load_file`.
        subfolder: As for `load_file`.
        variant: As for `load_file`.
        cache_dir: As for `load_file`.
        strict: As for `load_file`.
        header_limit: Largest accepted header, in bytes.

    Returns:
        The hook; nothing is read before it is called.

    Raises:
        GdsloadError: When it is called with `wait`: what `Prefetch.wait` raises.

    Example:
        >>> app = FastAPI(lifespan=gdsload.warmup.hook("model", device="cuda:0"))
        >>> gdsload.warmup.hook("model", wait=True)()
    """
    names = repeatable(names)
    words = {name: value for name, value in locals().items() if name != "wait"}
    return Hook(partial(prefetch, **words), wait)  # the other parameters are those of `prefetch`


def from_environment() -> Prefetch | None:
    """Starts the prefetch of the variable GDSLOAD_PREFETCH, which is `source` or `source@device`.

    A path that exists is a source, even if it has an "@". Without a device it is "cpu".

    Returns:
        The prefetch, or None if the variable is not set.

    Raises:
        PlacementError: The device is neither "cpu" nor a GPU such as "cuda:0".

    Example:
        >>> ahead = gdsload.warmup.from_environment()
    """
    text = os.environ.get(VARIABLE, "")
    return prefetch(*_source_and_device(text)) if text else None


def _source_and_device(text: str) -> tuple[str, str]:
    found = _DEVICE.fullmatch(text)
    if found is None or os.path.exists(text):
        return text, "cpu"
    return found["source"], found["device"]
