"""Whether a load reads into the page cache and maps it, or reads past it.

page_cache   fills the page cache
"fill"       if the files are on local storage except fuseblk, and leave room in memory
"auto"       also only if most of the checkpoint is wanted, the read-ahead of the disk is long
             enough, and no option is of reads past the page cache
others       never

Loads that copy or cast from read windows fill it only while the copies wait for storage. Otherwise
reads into reused buffers are faster (`window_writer`).

A load that fills it leaves the bytes to processes that load them later, or at the same time. It
takes no more memory than one into buffers, and hardly longer than direct reads (`_native.mapped`).

Not responsible for: the I/O modes of reads that do not fill it (`io_mode`).
"""

from __future__ import annotations

from functools import cached_property, partial

from gdsload.checkpoint import Checkpoint
from gdsload.loading.settings import ReadSettings
from gdsload.memory import page_cache
from gdsload.report import LoadReport
from gdsload.system.available import available_bytes
from gdsload.system.mountinfo import kind_of_device
from gdsload.system.storage import (
    OVERLAY,
    fill_request_bytes,
    read_ahead_bytes,
    reads_ahead_by_huge_pages,
)

# Room in memory that is wanted, as a multiple of the bytes to load: the page cache of others should
# not be evicted for it.
ROOM_SHARE = 1.25
# A load of less than this share of a checkpoint does not fill the page cache unless it is asked to:
# ranks and filters read their share, and no byte beside it.
FILL_SHARE = 0.9
# Up to this size a cold checkpoint is read into the page cache without a backend: opening one and
# its threads takes longer (benchmarks/test_micro.py: equal at 2 MB).
WITHOUT_BACKEND_BYTES = 2 << 20
# With a read-ahead of less than Linux's default the disk is asked for so little at a time that
# direct reads are faster: twice with 16 KiB.
LEAST_READ_AHEAD = 128 << 10
# Without read-ahead by huge pages, each of eight threads waits for one window at a time: with
# 128 KiB, a disk that takes 2 ms for each gives them 0.5 GB/s.
LEAST_READ_AHEAD_OF_SMALL_PAGES = 1 << 20
# If less of the files was in the page cache before, the report does not tell it.
REPORTED_SHARE = 0.01
# The report of a load some of whose reads fill it, and others do not.
ONLY_SOME = "filled by some reads only"
# The report of a load that had to read through it.
THROUGH = "filled: direct reads are refused"
# With one of these options, page_cache="auto" bypasses the page cache; "fill" still fills it.
PAST_OPTIONS = frozenset({"pages", "request_bytes"})


def least_read_ahead() -> int:
    """Bytes that the kernel must read ahead, at least, for filling the page cache to pay."""
    return LEAST_READ_AHEAD if reads_ahead_by_huge_pages() else LEAST_READ_AHEAD_OF_SMALL_PAGES


class PageCacheFill:
    """The decision for one checkpoint.

    Attributes:
        small: Whether the checkpoint is so small that it is filled without a backend.
        lacks_room: Whether it was decided against because memory has too little room.
    """

    def __init__(self, checkpoint: Checkpoint, settings: ReadSettings) -> None:
        """Decides nothing yet."""
        cache, page_cache = settings.cache, settings.page_cache
        self._checkpoint = checkpoint
        self._cache = cache
        self._fills_anyway = page_cache == "fill"
        self._past = sorted(PAST_OPTIONS.intersection(settings.options))
        self._total_bytes = sum(shard.size for shard in checkpoint.shards)
        may_fill = cache == "auto" and page_cache in ("auto", "fill") and not checkpoint.remote
        # A backend that was asked for by name, or by its options, is opened in any case.
        named = settings.backend != "auto" or settings.options
        self.small = may_fill and not named and self._total_bytes <= WITHOUT_BACKEND_BYTES
        self._decided: bool | None = None  # None: not yet
        self.lacks_room = False
        self._text = ""  # for the report
        self._through = ""  # the same, if direct reads of a file are refused

    def active(self, past_cache: str = "") -> bool:
        """Whether reads fill the page cache. `past_cache`: why they should bypass it; ignored if
        the caller passed page_cache="fill"."""
        return bool(self._decided) and (self._fills_anyway or not past_cache)

    def note(self, report: LoadReport, past_cache: str = "") -> None:
        """Notes in the report what `active` decides, and why."""
        passes = self._decided and not self.active(past_cache)
        text = self._corrected(f"not filled: {past_cache}" if passes else self._text)
        before = report.page_cache.partition(":")[0]
        if not before:
            report.page_cache = text
        elif before != text.partition(":")[0]:  # the sizes may differ
            report.page_cache = ONLY_SOME

    def refuse_direct(self, report: LoadReport, *, some: bool) -> None:
        """Notes that direct reads of files are refused, of all or of some: the bytes of these stay
        in the page cache."""
        self._through = ONLY_SOME if some else THROUGH
        report.page_cache = self._corrected(report.page_cache)

    def _corrected(self, text: str) -> str:
        return self._through if self._through and text.startswith("not filled") else text

    def decide(self, nbytes: int, beside_bytes: int = 0) -> None:
        """Decides, once, for all later reads.

        Args:
            nbytes: Bytes to load, for which memory must have room; 0: all of the checkpoint.
            beside_bytes: Bytes of memory that the load also fills with copies, such as parameters
                that are cast or merged.
        """
        if self._decided is not None:
            return
        if self._cache == "buffered":
            self._decided, self._text = False, "filled: cache='buffered' reads through it"
            return
        nbytes = nbytes or self._total_bytes
        refusal = self._why_not(nbytes, beside_bytes)
        if not refusal and not self._fills_anyway:
            refusal = self._why_only_if_asked(nbytes)
        if refusal:
            self.refuse(refusal)
            return
        self._decided = True
        self._text = f"filled: it has room for {nbytes:,} bytes"
        shards = self._checkpoint.shards
        share = partial(page_cache.resident_share, [(each.fd, each.size) for each in shards])
        found = self._checkpoint.answer_to(share, range(len(shards)))
        if found >= REPORTED_SHARE:
            self._text += f", about {found:.0%} of the files were in it"

    def refuse(self, reason: str) -> None:
        """Decides that later reads go to memory of the load."""
        self._decided = False
        self._text = f"not filled: {reason}"

    def request_bytes(self, nbytes: int, depth: int) -> int:
        """Bytes of one read, if `nbytes` are read, `depth` reads at a time."""
        return fill_request_bytes(self._read_ahead, nbytes, depth)

    @cached_property
    def _read_ahead(self) -> int | None:
        shard = self._checkpoint.shards[0]
        return read_ahead_bytes(shard.identity.dev, shard.fstype == OVERLAY)

    def _why_not(self, nbytes: int, beside_bytes: int) -> str:
        shards = self._checkpoint.shards
        if self._cache != "auto":
            return f"cache={self._cache!r}"
        if distant := next((each.filesystem for each in shards if each.distant), ""):
            return f"the files are on {distant}"
        available = available_bytes()
        if available is not None and nbytes * ROOM_SHARE + beside_bytes > available:
            self.lacks_room = True
            beside = f" and {beside_bytes:,} for parameters" if beside_bytes else ""
            return f"{nbytes:,} bytes{beside} leave too little of the {available:,} available bytes"
        if "fuseblk" in map(kind_of_device, {shard.identity.dev for shard in shards}):
            return "fuseblk may drop the pages of a file that is opened again"
        return ""

    def _why_only_if_asked(self, nbytes: int) -> str:
        if self._read_ahead is not None and self._read_ahead < least_read_ahead():
            return f"a read-ahead of {self._read_ahead:,} bytes is too short for the disk"
        if nbytes < FILL_SHARE * self._total_bytes:
            return f"{nbytes:,} of {self._total_bytes:,} bytes are loaded"
        if self._past:
            return f"options has {', '.join(self._past)}: only page_cache='fill' fills it then"
        return ""
