"""The ``gds_mt`` backend: ``cuFileRead`` from several native threads, with large reads.

It is the most reliable way into cuFile: a call returns how much it read, and an error code. The
pump continues short reads, as for every backend.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gdsload._native import threads
from gdsload.backends.base import Option
from gdsload.backends.cufile.base import CuFileBackend
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, Limits

# cuFile's guide asks for reads of more than 16 MiB from a few threads. Measured on a GPU in
# cuFile's compatibility mode only.
REQUEST_BYTES = 16 << 20
THREADS = 8
MOST_THREADS = 64


class GdsMtBackend(CuFileBackend):
    """Reads files into VRAM by cuFileRead."""

    name: ClassVar[str] = "gds_mt"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        block = DEFAULT_BLOCK_BYTES
        self._require("request_bytes", least=block, multiple_of=block)
        self._require("threads", least=1, most=MOST_THREADS)

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        return (
            *super().options(),
            Option("request_bytes", REQUEST_BYTES, "bytes of one read, at most"),
            Option("threads", THREADS, "threads that call cuFileRead"),
        )

    def limits(self, device: str = "cpu") -> Limits:
        return Limits(max_request=self.settings["request_bytes"], depth=self._depth())

    def _depth(self) -> int:
        # A read for each thread, and half as many that wait for a thread or are being copied: the
        # device copies a slot in a hundredth of the time that reading it takes.
        return -(-3 * int(self.settings["threads"]) // 2)

    def _new_engine(self) -> object:
        return threads.cufile_engine()
