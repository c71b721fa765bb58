"""The keywords that all loads share: how the bytes of a checkpoint are read. Checked when they are
given. Not responsible for: which bytes are read, and the device that they are for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any

from gdsload.backends import DRAM, reaches
from gdsload.backends.registry import names as registered, options_for_vram_alone
from gdsload.remote.urls import shown_source
from gdsload.system.stall import STALL_SECONDS

if TYPE_CHECKING:
    from gdsload.events import OnEvent

CACHES = ("auto", "direct", "buffered", "mapped")
PAGE_CACHES = ("auto", "keep", "drop", "fill")
# The backends of safetensors, and the I/O mode that reads in the same way.
_SAFETENSORS_MODES = {"mmap": "mapped", "pread": "buffered"}
VERIFY_METHODS = ("size", "checksum", "sha256")
# Timeouts of Python's threads and of torch.distributed overflow above 9e9 seconds.
MOST_STALL_SECONDS = 1e9


class ReadSettings:
    """Checked values of these keywords, as for `load_file`. Never modified: `changed` makes others.

    Not a NamedTuple: the constructor checks. Not a dataclass: to define one takes 2 ms at the first
    load of a process.
    """

    __slots__ = (
        "backend", "cache", "on_event", "options", "page_cache", "stall_seconds", "verify",
    )  # fmt: skip

    def __init__(
        self,
        backend: str = "auto",
        cache: str = "auto",
        page_cache: str = "auto",
        options: Mapping[str, Any] | None = None,
        stall_seconds: float = STALL_SECONDS,
        verify: str | os.PathLike[str] = "size",
        on_event: OnEvent | None = None,
    ) -> None:
        """A backend of safetensors is replaced by the `cache` that reads in the same way.

        Raises ValueError if one of them has no such value, or `cache` contradicts another one;
        TypeError for options that are no mapping, and for an `on_event` that cannot be called.
        """
        backend, cache = _replaced(backend, cache)
        _require_one_of("cache", cache, CACHES)
        _require_one_of("page_cache", page_cache, PAGE_CACHES)
        _require_stall_seconds(stall_seconds)
        _require_verify(verify, cache)
        if not isinstance(options, (Mapping, NoneType)):
            raise TypeError(f"options={options!r} must be a mapping of names to values")
        if on_event is not None and not callable(on_event):
            raise TypeError(f"on_event={on_event!r} must be a function of an event")
        self.backend, self.cache, self.page_cache = backend, cache, page_cache
        self.options, self.stall_seconds = dict(options or {}), stall_seconds
        self.verify, self.on_event = verify, on_event

    def keywords(self) -> dict[str, Any]:
        """The settings by name, as the functions that load take them."""
        return {name: getattr(self, name) for name in self.__slots__}

    def changed(self, **changes: Any) -> ReadSettings:
        """The same settings but for these. Raises ValueError."""
        return ReadSettings(**self.keywords() | changes)

    def for_host(self) -> ReadSettings:
        """The settings for reads to host memory: a backend that cannot read there is "auto", and
        "auto" has no options of such backends. Raises BackendUnavailable for an unknown one."""
        if not reaches(self.backend, DRAM):
            return self.changed(backend="auto", options=None)
        if self.backend != "auto" or not self.options:
            return self
        foreign = options_for_vram_alone()
        own = {name: value for name, value in self.options.items() if name not in foreign}
        return self.changed(options=own)


def _replaced(backend: str, cache: str) -> tuple[str, str]:
    """The backend and the `cache` that read like a backend of safetensors; others as they are.
    Raises ValueError if `cache` contradicts that backend."""
    mode = _SAFETENSORS_MODES.get(backend)
    if mode is None or backend in registered():  # a plugin may have this name
        return backend, cache
    if cache not in ("auto", mode):
        raise ValueError(f"backend={backend!r} reads by cache={mode!r}, not {cache!r}")
    return "auto", mode


def _require_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={shown_source(value)!r} must be one of {', '.join(known)}")


def _require_stall_seconds(stall_seconds: float) -> None:
    """Raises ValueError for a limit that every load exceeds, or none."""
    if not 0 < stall_seconds <= MOST_STALL_SECONDS:
        most = f"{MOST_STALL_SECONDS:.0e}"
        raise ValueError(f"stall_seconds={stall_seconds!r} must be greater than 0, at most {most}")


def _require_verify(verify: str | os.PathLike[str], cache: str) -> None:
    """Raises ValueError if `verify` has no such value, or contradicts `cache`."""
    if isinstance(verify, str) and verify not in VERIFY_METHODS:
        raise ValueError(
            f"verify={shown_source(verify)!r} must be one of {', '.join(VERIFY_METHODS)}, or the"
            " Path of a manifest"
        )
    if verify != "size" and cache == "mapped":
        raise ValueError(
            f"cache='mapped' cannot be combined with verify={verify!r}: a mapped file may change"
            " after it was compared"
        )
