"""The tuning cache: measured rates and the choice that was made by them, by mount and device.

It is a small JSON file in the user's cache directory. An entry that cannot be read, is old, or was
measured with other versions is ignored. Not responsible for measuring.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from gdsload.errors import BackendUnavailable
from gdsload.version import __version__

FILE = "tuning.json"
# Drives fill up and arrays are rebuilt: an entry is measured again after this time.
VALID_SECONDS = 30 * 24 * 3600.0
_FORMAT = 1
# Rates that differ by less count as equal.
CLOSE_SHARE = 0.95
_MOST_ENTRIES = 200
_LATEST_SECONDS = 1 << 37  # the year 6325; `time.localtime` fails much later


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """The rates from a mount to a device, and the candidate that was chosen.

    Attributes:
        mount: The key of the mount.
        device: The name of the device and its PCI address.
        choice: The candidate that was chosen.
        rates: Bytes per second, by candidate; 0.0 if it failed.
        versions: The versions of all software that influences the rates.
        at: When it was measured, in seconds since 1970.
        fixed_seconds: The time to open each candidate.
    """

    mount: str
    device: str
    choice: str
    rates: Mapping[str, float]
    versions: Mapping[str, str]
    at: float = field(default_factory=time.time)
    fixed_seconds: Mapping[str, float] = field(default_factory=dict)

    def stale(self, versions: Mapping[str, str], now: float) -> str:
        """Why the entry is no longer valid, or ""."""
        if not 0 <= now - self.at <= VALID_SECONDS:
            days = VALID_SECONDS / 86400
            return f"it was measured more than {days:.0f} days ago, or while the clock was ahead"
        changed = [name for name, value in versions.items() if self.versions.get(name) != value]
        return f"{', '.join(changed)} changed since" if changed else ""


def versions() -> dict[str, str]:
    """The versions of all software that influences the rates."""
    from gdsload.backends.cufile import library  # imports CUDA

    with suppress(BackendUnavailable):
        return {"gdsload": __version__, **library.versions()}
    return {"gdsload": __version__}


def directory() -> str:
    """The directory of the cache, "" if the user has no home directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG standard says to ignore it
        base = os.path.expanduser("~/.cache")
    return os.path.join(base, "gdsload") if os.path.isabs(base) else ""


def entries() -> list[TunedChoice]:
    """All valid entries, the newest first."""
    cache = directory()
    if not cache:
        return []
    try:
        with open(os.path.join(cache, FILE), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        return []
    rows = found.get("choices")
    parsed = [_entry(row) for row in rows] if isinstance(rows, list) else []
    return sorted((each for each in parsed if each), key=lambda each: -each.at)


def _entry(row: Any) -> TunedChoice | None:
    try:
        found = TunedChoice(**row)
        numbers = [found.at, *found.rates.values(), *found.fixed_seconds.values()]
        sound = all(0 <= each < math.inf for each in numbers) and isinstance(found.versions, dict)
        sound &= found.at < _LATEST_SECONDS
        rate, fastest = found.rates[found.choice], max(found.rates.values())
        sound &= 0 < CLOSE_SHARE * fastest <= rate
    except (AttributeError, KeyError, OverflowError, TypeError):
        return None
    return found if sound else None


def find(
    mount: str, device: str, versions: Mapping[str, str], now: float | None = None
) -> TunedChoice | None:
    """The entry for a mount and a device, None if there is none that is still valid."""
    now = time.time() if now is None else now
    for each in entries():
        if (each.mount, each.device) == (mount, device):
            return None if each.stale(versions, now) else each
    return None


def store(entry: TunedChoice) -> str:
    """Replaces the entry for a mount and a device; returns why it could not, or ""."""
    if not entry.mount:
        return "the mount of the file is unknown"
    return _write([entry, *_others(entry.mount, entry.device)])


def forget(mount: str, device: str) -> None:
    """Removes the entry for a mount and a device, because its choice has failed."""
    _write(_others(mount, device))


def _others(mount: str, device: str) -> list[TunedChoice]:
    return [each for each in entries() if (each.mount, each.device) != (mount, device)]


def _write(choices: list[TunedChoice]) -> str:
    # If two processes write at the same time, one entry is lost, and measured again.
    cache = directory()
    if not cache:
        return "this user has no home directory"
    rows = [asdict(each) for each in choices[:_MOST_ENTRIES]]
    draft = os.path.join(cache, f".{FILE}.{os.getpid()}.{threading.get_ident()}")
    try:
        os.makedirs(cache, mode=0o700, exist_ok=True)
        with open(draft, "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "choices": rows}, file, indent=1)
        os.replace(draft, os.path.join(cache, FILE))
    except OSError as error:
        with suppress(OSError):
            os.unlink(draft)
        return f"{cache}: {error.strerror}"
    return ""
