"""Which road was the fastest, kept from load to load: for each mount and device, in a small JSON
file in the user's cache directory. What cannot be read, is old, or was measured with other versions
is as good as not there, and a file that cannot be written is written another time.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

FILE = "tuning.json"
# Drives fill up, arrays are rebuilt, kernels are updated: what was measured is asked again.
KEPT_SECONDS = 30 * 24 * 3600.0
_FORMAT = 1
# Closer than this is no difference: what is chosen may be slower by so much.
CLOSE_SHARE = 0.95
# More is not ours: a file of a hundred mounts and devices has some 50 kB.
_LARGEST_BYTES = 1 << 20
_MOST = 200


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """What was measured from `mount` to `device`, and the road that was chosen.

    `rates` are bytes per second by road (0.0: it failed), `versions` those of everything that had a
    part in it, `at` seconds since 1970, `fixed_seconds` what opening a road took before it read.
    """

    mount: str
    device: str
    choice: str
    rates: Mapping[str, float]
    versions: Mapping[str, str]
    at: float
    fixed_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def consistent(self) -> bool:
        """Whether the road that was chosen is the fastest by these rates."""
        fastest = max(self.rates.values(), default=0.0)
        return self.rates.get(self.choice, 0.0) >= max(CLOSE_SHARE * fastest, 1.0)

    def stale(self, versions: Mapping[str, str], now: float) -> str:
        """Why it says nothing any more; empty where it does."""
        if not 0 <= now - self.at <= KEPT_SECONDS:
            return f"it was measured more than {KEPT_SECONDS / 86400:.0f} days ago"
        changed = [name for name, value in versions.items() if self.versions.get(name) != value]
        return f"{', '.join(changed)} changed since" if changed else ""


def directory() -> str:
    """Where it is kept; empty where this user has no such place."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the standard has it ignored, then
        base = os.path.expanduser("~/.cache")
    return os.path.join(base, "gdsload") if os.path.isabs(base) else ""


def kept() -> list[TunedChoice]:
    """All that can be read, the newest first."""
    where = directory()
    if not where:
        return []
    try:
        with open(os.path.join(where, FILE), encoding="utf-8", opener=_at_once) as file:
            found = json.loads(file.read(_LARGEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        return []
    rows = found.get("verdicts")
    verdicts = [_verdict(row) for row in rows] if isinstance(rows, list) else []
    return sorted((each for each in verdicts if each), key=lambda each: -each.at)


def _at_once(path: str, flags: int) -> int:
    # A FIFO of that name would keep the load until somebody writes to it.
    return os.open(path, flags | os.O_NONBLOCK)


def _verdict(row: Any) -> TunedChoice | None:
    try:
        rates = {str(road): float(rate) for road, rate in row["rates"].items()}
        versions = {str(name): str(value) for name, value in row["versions"].items()}
        fixed = {str(road): float(each) for road, each in row.get("fixed_seconds", {}).items()}
        made = TunedChoice(
            str(row["mount"]), str(row["device"]), str(row["choice"]), rates, versions,
            float(row["at"]), fixed,
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
    sound = (
        all(0 <= each < math.inf for each in (*rates.values(), *fixed.values())) and made.consistent
    )
    return made if sound else None


def verdict_on(
    mount: str, device: str, versions: Mapping[str, str], now: float | None = None
) -> TunedChoice | None:
    """The verdict that still holds; None where there is none."""
    now = time.time() if now is None else now
    for each in kept():
        if (each.mount, each.device) == (mount, device):
            return None if each.stale(versions, now) else each
    return None


def keep(verdict: TunedChoice) -> str:
    """Keeps it in place of what there was: "" or why it could not be."""
    if not verdict.consistent:
        return "its rates say that another road is faster"
    return _write([verdict, *_others(verdict.mount, verdict.device)])


def drop(mount: str, device: str) -> str:
    """Forgets what there was, because it has not held: "" or why it could not be."""
    others = _others(mount, device)
    return _write(others) if len(others) < len(kept()) else ""


def _others(mount: str, device: str) -> list[TunedChoice]:
    return [each for each in kept() if (each.mount, each.device) != (mount, device)]


def _write(verdicts: list[TunedChoice]) -> str:
    import tempfile  # every load looks into this module, and few write

    # Two processes that write at the same time lose one verdict, which is measured again.
    where = directory()
    if not where:
        return "this user has no home directory"
    text = json.dumps(
        {"format": _FORMAT, "verdicts": [asdict(each) for each in verdicts[:_MOST]]}, indent=1
    )
    try:
        os.makedirs(where, mode=0o700, exist_ok=True)
        fd, draft = tempfile.mkstemp(prefix=f".{FILE}.", dir=where)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(draft, os.path.join(where, FILE))
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
    except OSError as error:
        return f"{where}: {error.strerror}"
    return ""
