"""The ``gds`` backend: cuFile's batch API, within limits that hold in every release.

An entry is no larger than cuFile's buffer for one, because larger ones were seen to be truncated
without an error. No more entries are in flight than its smallest pool holds, because more were seen
to hang. The read plan splits larger reads.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gdsload._native import cufilebatch
from gdsload.backends.base import Option
from gdsload.backends.cufile.base import EVENT_SECONDS, CuFileBackend
from gdsload.errors import BackendUnavailable
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, Limits

# In compatibility mode cuFile hangs inside a submission with more than its pool of 64 in flight.
MOST_IN_FLIGHT = 64
MOST_EVENT_SECONDS = 1e9  # nanoseconds are counted in 64 bits
# The engine spreads entries over this many batch handles (_native/cufilebatch.pyx).
_HANDLES = 4
_DEFAULT_CACHE = 1 << 20  # per_buffer_cache_size_kb, by default


class GdsBackend(CuFileBackend):
    """Reads files into VRAM by cuFile's batches."""

    name: ClassVar[str] = "gds"
    counted: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._require("request_bytes", least=0, multiple_of=DEFAULT_BLOCK_BYTES)
        self._require("depth", least=1, most=MOST_IN_FLIGHT)
        if not 0 < (seconds := self.settings["event_seconds"]) <= MOST_EVENT_SECONDS:
            raise ValueError(
                f"event_seconds={seconds!r} must be greater than 0, at most {MOST_EVENT_SECONDS:g}"
            )

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        return (
            *super().options(),
            Option("request_bytes", 0, "bytes of one entry, at most; 0: cuFile's buffer for one"),
            Option("depth", MOST_IN_FLIGHT, "entries in flight"),
            Option(
                "event_seconds", EVENT_SECONDS, "an entry without an answer for this long is lost"
            ),
        )

    def limits(self, device: str = "cpu") -> Limits:
        """The limits of cuFile's own configuration, once it is open."""
        driver = self._driver  # another thread may close it
        # Some releases before 1.14 do not report it.
        largest = (driver.limits.buffer_cache if driver is not None else 0) or _DEFAULT_CACHE
        wanted = self.settings["request_bytes"] or largest
        return Limits(max_request=min(wanted, largest), depth=self._depth())

    def _depth(self) -> int:
        depth, driver = int(self.settings["depth"]), self._driver
        if driver is None:
            return depth
        found = driver.limits
        if complaint := found.complaint():
            self.refusals["gds/limits"] = complaint
            depth = min(depth, found.device_cache // found.buffer_cache)
        return max(min(depth, _HANDLES * found.batch) if found.batch else depth, 1)

    def _new_engine(self) -> object:
        if "cuFileBatchIOSubmit" not in self._open(self._device).library.functions:
            why = "this libcufile has no batches"
            raise BackendUnavailable(f"backend 'gds' cannot work: {why}", {"gds": why})
        return cufilebatch.engine()
