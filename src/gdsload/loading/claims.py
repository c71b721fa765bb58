"""What is being read ahead of its asking, and who takes it.

    prefetch ── offers ──► Offer ── claim(file, bytes) ──► Claim ──► a load

A `Offer` is the bytes of one checkpoint, there or on their way, told apart from other versions
of the same files by their identity. A load claims what it needs before it plans any reads; what is
claimed is gone for others, because two tensors must never share memory. Nothing is read here.
"""

from __future__ import annotations

import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from gdsload.checkpoint import Checkpoint, Identity
from gdsload.memory.host_buffers import BufferView
from gdsload.planning.read_plan import ByteRange
from gdsload.system.gc_control import imports_done
from gdsload.system.lifecycle import fork_safe_lock, in_child

# What has become of bytes that somebody reads ahead.
COMING, LANDED, LOST = "coming", "landed", "lost"


class Flight(Protocol):
    """Reads under way, seen by whoever waits for some of them. Safe from any thread."""

    def state(self, first: int, last: int) -> str:
        """COMING, LANDED or LOST (cancelled or failed: to be read anew) for these transfers."""

    def pause(self, first: int, last: int, seconds: float) -> None:
        """Returns when they have settled, or after so many seconds."""

    def idle_seconds(self) -> float:
        """How long no byte has come."""

    def hurry(self) -> None:
        """Somebody waits for it now."""


class OfferedRange(NamedTuple):
    """Bytes `start` to `end` of a file: where they land, and the transfers that bring them. A
    stretch without a `spot` lands in the page cache, from where everybody may take it."""

    start: int
    end: int
    view: BufferView | None
    first: int
    last: int


class Claim(NamedTuple):
    """Bytes that a load has taken."""

    piece: ByteRange
    view: BufferView | None
    flight: Flight
    first: int
    last: int

    def state(self) -> str:
        """COMING, LANDED or LOST."""
        return self.flight.state(self.first, self.last)

    def pause(self, seconds: float) -> None:
        """Returns when the bytes have settled, or after so many seconds."""
        self.flight.pause(self.first, self.last, seconds)


class Offer:
    """What one prefetch has to give. It is offered before its files are open, filled once they
    are, and withdrawn when all of it was taken or nobody wants it any more. What lands on a GPU is
    for loads to that `device` alone; the host's memory is for all."""

    def __init__(self, source: str, *, keep: bool = False) -> None:
        self.source = source
        self.keep = keep
        self.pid = os.getpid()
        self.device = "cpu"
        self.claimed_bytes = 0
        self._lock = fork_safe_lock(self)
        self._known = threading.Event()
        self._flight: Flight | None = None
        self._free: dict[Identity, list[OfferedRange]] = {}

    def fill(
        self, flight: Flight, stretches: dict[Identity, list[OfferedRange]], device: str = "cpu"
    ) -> None:
        """Says what there is, and where: for each file its stretches, which do not overlap."""
        with self._lock:
            self._flight = flight
            self.device = device
            self._free = {file: sorted(rows, key=_start) for file, rows in stretches.items()}
        self._known.set()

    def clear(self) -> None:
        """Lets go of what nobody has claimed, for good."""
        with self._lock:
            self._free = {}
        self._known.set()

    def leave(self, files: Iterable[Identity]) -> None:
        """A load that claimed from these files has ended: what it left is let go, unless all is to
        be kept for the next."""
        if not self.keep:
            with self._lock:
                for file in files:
                    self._free.pop(file, None)

    @property
    def empty(self) -> bool:
        """Whether there is nothing (more) to claim."""
        with self._lock:
            return self._known.is_set() and not any(self._free.values())

    def await_opening(self, seconds: float) -> bool:
        """Waits until it is known which files it holds."""
        return self._known.wait(seconds)

    def may_hold(self, path: str) -> bool:
        """Whether a file may be among those it is about to open, going by names alone."""
        if self._known.is_set():
            return False
        if not os.path.exists(self.source):
            return True  # a model of the hub: where its files are is not known yet
        for root in (os.path.abspath(self.source), os.path.realpath(self.source)):
            if os.path.isfile(root):
                root = os.path.dirname(root)
            for file in (os.path.abspath(path), os.path.realpath(path)):
                if os.path.commonpath([root, file]) == root:
                    return True
        return False

    def claim(self, file: Identity, piece: ByteRange, *, mapped: bool = True) -> Claim | None:
        """Takes the piece's bytes, if they lie in one stretch and nobody has them yet. Without
        `mapped`, what lands in the page cache is left."""
        with self._lock:
            rows = self._free.get(file)
            if not rows or not piece.nbytes or self._flight is None:
                return None
            place = bisect_right(rows, piece.offset, key=_start) - 1
            end = piece.offset + piece.nbytes
            if place < 0 or rows[place].end < end:
                return None
            found = rows[place]
            if found.view is None and not mapped:
                return None
            self.claimed_bytes += piece.nbytes
            if found.view is None:
                return Claim(piece, None, self._flight, found.first, found.last)
            region, offset = found.view
            rest = []
            if found.start < piece.offset:
                rest.append(found._replace(end=piece.offset))
            if end < found.end:
                after = BufferView(region, offset + end - found.start)
                rest.append(found._replace(start=end, view=after))
            rows[place : place + 1] = rest
            view = BufferView(region, offset + piece.offset - found.start)
            return Claim(piece, view, self._flight, found.first, found.last)

    def has(self, file: Identity, piece: ByteRange) -> bool:
        """Whether `claim` would give it."""
        with self._lock:
            rows = self._free.get(file, [])
            place = bisect_right(rows, piece.offset, key=_start) - 1
            return place >= 0 and rows[place].end >= piece.offset + piece.nbytes


def _start(row: OfferedRange) -> int:
    return row.start


_lock = fork_safe_lock(sys.modules[__name__])
_offered: list[Offer] = []


def offer(landing: Offer) -> None:
    """Lets loads find it, from now on."""
    with _lock:
        _offered.append(landing)


def withdraw(landing: Offer) -> None:
    """Undoes `offer`; also where it was withdrawn before."""
    with _lock:
        if landing in _offered:
            _offered.remove(landing)
    landing.clear()


def offered() -> list[Offer]:
    """What is offered in this process, oldest first. What a fork has copied is not."""
    pid = os.getpid()
    with _lock:
        return [landing for landing in _offered if landing.pid == pid]


def _opened(checkpoint: Checkpoint, seconds: float) -> list[Offer]:
    """What is offered, once it is known of each what it holds that may be of these files."""
    found = offered()
    for landing in found:
        if any(landing.may_hold(shard.path) for shard in checkpoint.shards):
            landing.await_opening(seconds)
    return found


def claim_pieces(
    checkpoint: Checkpoint, pieces: Sequence[ByteRange], seconds: float, *, mapped: bool = True,
    device: str = "cpu",
) -> tuple[dict[str, Claim], list[Offer]]:  # fmt: skip
    """What others have read ahead of these pieces, by the pieces' names, and whose it was: into the
    memory of this device, or of the host.

    Waits up to `seconds` for a prefetch that is still opening what may be the same files. Without
    `mapped`, what lands in the page cache is left.
    """
    imports_done()
    claims: dict[str, Claim] = {}
    givers: list[Offer] = []
    shards = checkpoint.shards
    landings = [found for found in _opened(checkpoint, seconds) if found.device in ("cpu", device)]
    # What is on the device itself comes before what would have to be copied there.
    for landing in sorted(landings, key=lambda found: found.device != device):
        before = len(claims)
        for piece in pieces:
            if piece.name in claims:
                continue
            claim = landing.claim(shards[piece.shard].identity, piece, mapped=mapped)
            if claim is not None:
                claims[piece.name] = claim
        if len(claims) > before:
            givers.append(landing)
    for flight in {id(claim.flight): claim.flight for claim in claims.values()}.values():
        flight.hurry()
    return claims, givers


def waiting_on(
    device: str, checkpoint: Checkpoint, pieces: Iterable[ByteRange], seconds: float
) -> set[str]:
    """The names of those pieces that are in the memory of this device, or on their way there.

    Waits as `claim_pieces` does, and takes nothing.
    """
    landings = [found for found in _opened(checkpoint, seconds) if found.device == device]
    shards = checkpoint.shards
    return {
        piece.name
        for piece in pieces
        if any(landing.has(shards[piece.shard].identity, piece) for landing in landings)
    }


in_child(_offered.clear)  # the reads stayed in the parent
