"""Ways to have weights read ahead without touching the code that loads them.

`hook` is for servers and function platforms, `from_words` and `from_environment` for whoever
starts a script; all of them only call `gdsload.prefetch`. `status` tells what became of it. torch
is never imported here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gdsload.memory import host_pool
from gdsload.memory.host_pool import HostPool
from gdsload.readahead.prefetch import CANCELLED, CLOSED, TIERS, Prefetch, prefetch, started
from gdsload.system.lifecycle import fork_safe_lock

__all__ = [
    "Hook",
    "HostPool",
    "Status",
    "from_environment",
    "from_words",
    "hook",
    "limit_bandwidth",
    "source_and_device",
    "status",
]  # fmt: skip

VARIABLE = "GDSLOAD_PREFETCH"
_DEVICE = re.compile(r"(?P<source>.+)@(?P<device>[a-z]+(?::\d+)?)")


class Status(NamedTuple):
    """One prefetch of this process: bytes, and seconds until it ended (or so far); `error` is empty
    where nothing went wrong. Or, with the tier "pool" and the state "kept", what an open pool holds
    of a checkpoint: `claimed_bytes` are in segments that tensors live in, `resident_bytes` is what
    the kernel says, and the seconds are since a load last took from it."""

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
    """The last prefetches of this process, oldest first, also those that have ended; then what the
    open pool holds, the least recently used first."""
    pool = host_pool.current()
    return [
        Status(one.source, one.report.device, one.tier, *one.progress(), one.report.failure)
        for one in started()
    ] + [
        Status(
            one.source, "cpu", "pool", "kept", one.held_bytes, one.held_bytes, one.lent_bytes,
            one.resident_bytes, one.idle_seconds, "",
        )
        for one in (() if pool is None else pool.held())
    ]  # fmt: skip


def limit_bandwidth(bytes_per_second: int | None, *, of: str = "ahead") -> None:
    """Holds the reads of this process to a rate: all of them, or (`of` "ahead") only what is read
    before somebody waits for it. None lifts the limit. It holds from the next read on.

    Without a limit, too, reads ahead yield: while a load is under way they go on one by one.
    Raises ValueError for a rate below 1, or for another `of` than "ahead" and "all".
    """
    from gdsload._native.pump import limit_traffic, traffic

    if bytes_per_second is not None and bytes_per_second < 1:
        raise ValueError(f"{bytes_per_second} bytes per second is no rate; None lifts the limit")
    rates = dict(zip(("all", "ahead"), traffic()[:2], strict=True))
    if of not in rates:
        raise ValueError(f"of={of!r} is none of {', '.join(rates)}")
    rates[of] = bytes_per_second or 0
    limit_traffic(rates["all"], rates["ahead"])


class Hook:
    """A prefetch that begins when it is called: by a server as its lifespan, or by anybody.

    Called without an argument it starts the prefetch, waits for it if it shall, and returns it.
    Called with an application it is the asynchronous context of that application's life.
    """

    def __init__(self, source: str | os.PathLike[str], wait: bool, words: Mapping[str, Any]):
        self._source = source
        self._wait = wait
        self._words = dict(words)
        self._prefetch: Prefetch | None = None
        self._lock = fork_safe_lock(self)

    def start(self) -> Prefetch:
        """Starts it; what was started before and not closed is returned as it is."""
        with self._lock:
            ahead = self._prefetch
            if ahead is None or ahead.progress().state in (CANCELLED, CLOSED):
                ahead = self._prefetch = prefetch(self._source, **self._words)
            return ahead

    def __call__(self, app: object = None) -> Any:
        if app is not None:
            return self
        ahead = self.start()
        if self._wait:
            ahead.wait()
        return ahead

    async def __aenter__(self) -> dict[str, Prefetch]:
        import asyncio  # it takes longer than all of this, and a script that is run needs none

        ahead = self.start()
        if self._wait:
            await asyncio.to_thread(ahead.wait)
        return {"gdsload": ahead}

    async def __aexit__(self, *_: object) -> None:
        import asyncio

        ahead, self._prefetch = self._prefetch, None
        if ahead is not None:
            await asyncio.to_thread(ahead.close)


def hook(source: str | os.PathLike[str], *, wait: bool = False, **words: Any) -> Hook:
    """A warm-up for servers: ``FastAPI(lifespan=gdsload.warmup.hook("model"))``, or, on a platform
    that calls functions, ``gdsload.warmup.hook("model", wait=True)()`` at the top of the module.

    As a lifespan it starts the prefetch when the application starts and closes it when that ends;
    requests find it as ``request.state.gdsload``. With `wait` the application (or the caller) waits
    for the bytes, and gets what `Prefetch.wait` raises. `words` are those of `gdsload.prefetch`.
    """
    return Hook(source, wait, words)


def from_environment(environment: Mapping[str, str] | None = None) -> Prefetch | None:
    """Starts what GDSLOAD_PREFETCH asks for: ``source`` or ``source@device``. None without it."""
    text = (os.environ if environment is None else environment).get(VARIABLE, "")
    if not text:
        return None
    source, device = source_and_device(text)
    return prefetch(source, device)


def source_and_device(text: str) -> tuple[str, str]:
    """("model", "cuda:0") of "model@cuda:0"; the device is "cpu" where none is named."""
    found = _DEVICE.fullmatch(text)
    if found is None or os.path.exists(text):
        return text, "cpu"
    return found["source"], found["device"]


def from_words(words: Sequence[str]) -> tuple[Prefetch | None, list[str]]:
    """Starts what ``--model SOURCE [--device DEVICE] [--tier TIER]`` at the front of a command line
    asks for, else what the environment does; and returns the words that follow.

    Raises SystemExit, with the reason, for an option that lacks its value or has a wrong one.
    """
    wanted: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].partition("=")[0] in ("--model", "--device", "--tier"):
        name, equals, value = rest.pop(0).partition("=")
        if not equals:
            if not rest:
                raise SystemExit(f"gdsload: {name} needs a value")
            value = rest.pop(0)
        wanted[name[2:]] = value
    if not wanted:
        return from_environment(), rest
    if "model" not in wanted:
        raise SystemExit(f"gdsload: --{next(iter(wanted))} is for --model, which is missing")
    tier = wanted.get("tier", "memory")
    if tier not in TIERS:
        raise SystemExit(f"gdsload: --tier {tier} is none of {', '.join(TIERS)}")
    return prefetch(wanted["model"], wanted.get("device", "cpu"), tier=tier), rest
