"""Reads into tensors that exist already, without a second copy of the model.

    destinations ──► VRAM, same dtype, contiguous ──► the backend writes there  (`TargetBatch`)
                 ──► all others, and with `verify=`
                         ──► windows, copied or cast from there  (`WindowWriter`)

A read that hangs may write to its memory at any later time. On the host, the caller's memory is
therefore written by copies from windows, never by reads that cannot be cancelled; on the way to
VRAM all bytes pass a staging ring anyway. Not responsible for checking destinations
(`destinations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set as AbstractSet
from contextlib import contextmanager
from itertools import product

from gdsload.backends.base import Memory
from gdsload.errors import FileChanged, GdsloadError, PartialLoad, StallError, listed, shown
from gdsload.loading.batch import Batch
from gdsload.loading.claims import Claim
from gdsload.loading.destinations import MOST_NAMED, Destination, Matched
from gdsload.loading.session import Session
from gdsload.loading.window_writer import CopyPart, WindowWriter
from gdsload.memory import late_copies
from gdsload.memory.host_buffers import BufferView
from gdsload.planning.read_plan import ReadPlan
from gdsload.planning.tensor_slices import part_ranges

COMPLETE, UNDEFINED, UNCHANGED = "complete", "undefined", "unchanged"


class TargetBatch(Batch):
    """Destinations in the memory of a device that bytes of files are being read to as they are."""

    def __init__(
        self,
        session: Session,
        plan: ReadPlan,
        views: dict[str, BufferView],
        claims: dict[str, Claim],
        destinations: Sequence[Destination],
        begin: Callable[[], None],
    ) -> None:
        """Posts the reads, and calls `begin` just before."""
        self._destinations, self._begin = destinations, begin
        super().__init__(session, plan, views, claims)

    def _before_reads(self) -> None:
        self._begin()

    def _take_memory(self) -> list[Memory]:
        from gdsload.loading.device_batch import memory_in

        pairs = ((each.wanted.slice, each.tensor) for each in self._destinations)
        return memory_in(self.session, self.plan, pairs, self._destinations)

    def copy_views(self) -> None:
        """Copies what a prefetch or the host pool had in memory already."""
        from gdsload.loading.device_batch import copy_parts

        for each in self._destinations:
            copy_parts(each.tensor, each.wanted.slice, self.views)

    def has(self, destination: Destination) -> bool:
        """Whether all bytes of a destination have arrived by reads."""
        for part in destination.wanted.slice.parts:
            location = self.plan.locations.get(part.name)
            if location is None and part.nbytes:
                return False
            if location and not self.has_arrived(location.first, location.last):
                return False
        return True


@contextmanager
def partial_errors(source: str, progress: WriteProgress) -> Iterator[None]:
    """Around a load. An error of it is raised as a `PartialLoad` if anything was written before."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, FileChanged):
            progress.file_changed()
        partial = _partial_load(source, error, progress)
        if partial is None:
            raise
        if isinstance(error, Exception):
            try:
                raise partial from error
            finally:
                del partial  # it refers to this frame
        if hasattr(error, "add_note"):  # Python 3.11; Ctrl-C stays what it is
            error.add_note(str(partial))
        raise


def _partial_load(source: str, error: BaseException, progress: WriteProgress) -> PartialLoad | None:
    """The error for a load that failed in the middle; None if nothing was written before."""
    states = progress.by_target()
    names = {
        state: tuple(name for name in states if states[name] == state)
        for state in (COMPLETE, UNDEFINED, UNCHANGED)
    }
    if len(names[UNCHANGED]) == len(states):
        return None
    undefined = listed([*map(shown, names[UNDEFINED])], MOST_NAMED)
    return PartialLoad(
        f"{source}: the load into existing tensors failed: {error}. {len(names[COMPLETE])} tensors"
        f" are complete, {len(names[UNCHANGED])} are unchanged, and {len(names[UNDEFINED])} hold"
        f" undefined bytes{': ' if undefined else ''}{undefined}",
        **names,
    )


class WriteProgress:
    """Which destinations of a load are complete, undefined or unchanged."""

    def __init__(self, targets: Iterable[str], matched: Matched) -> None:
        """`targets`: the names of all, also of those that nothing is written to."""
        self._state = {each.wanted.info.name: UNCHANGED for each in matched.destinations}
        self._targets, self._matched = tuple(targets), matched
        self._missing = frozenset(matched.missing)

    def set(self, destination: Destination, state: str) -> None:
        self._state[destination.wanted.info.name] = state

    def file_changed(self) -> None:
        """All that was written may be a mixture."""
        for name, state in self._state.items():
            if state != UNCHANGED:
                self._state[name] = UNDEFINED

    def by_target(self) -> dict[str, str]:
        """The state of each target. One that is written in parts is undefined between them, and one
        of which only parts are loaded is never complete."""
        found: dict[str, set[str]] = {name: set() for name in self._targets}
        for each in self._matched.destinations:
            found.setdefault(each.name, set()).add(self._state[each.wanted.info.name])
        for name, other in self._matched.aliases.items():
            found.setdefault(name, set()).update(found.get(other, ()))
        return {name: self._of_parts(name, states) for name, states in found.items()}

    def _of_parts(self, name: str, states: AbstractSet[str]) -> str:
        if states <= {UNCHANGED}:
            return UNCHANGED
        return COMPLETE if states == {COMPLETE} and name not in self._missing else UNDEFINED


def write_all(
    session: Session,
    destinations: Sequence[Destination],
    progress: WriteProgress,
    advance: Callable[[int], None],
) -> None:
    """Reads all destinations of one device.

    Args:
        session: Reads to this device, or to the host on the way to it.
        destinations: What to write.
        progress: Is kept up to date, also if this raises.
        advance: Called with the number of bytes that have arrived.

    Raises:
        PlacementError: The device captures a CUDA graph on the current stream. Nothing was read.
        GdsloadError: A read failed, or a file changed.
    """
    import torch

    device = _device_of(session, destinations)
    if device != "cpu":
        from gdsload.loading.torch_device import require_no_capture

        require_no_capture(device)
    in_place = session.device != "cpu" and session.verifier is None
    places = [each for each in destinations if in_place and each.in_place]
    kept = {id(each) for each in places}
    others = [each for each in destinations if id(each) not in kept]
    # Tensors of inference mode can be written to only inside of it, and count no versions.
    for inference in (False, True):
        with torch.inference_mode() if inference else torch.no_grad():
            # The caller may write to its tensors as soon as this returns.
            with late_copies.awaited(session.stall_seconds):
                _read_in_place(
                    session,
                    [each for each in places if each.tensor.is_inference() == inference],
                    progress,
                    advance,
                )
            _write_windows(
                session,
                [each for each in others if each.tensor.is_inference() == inference],
                progress,
                advance,
            )


def _read_in_place(
    session: Session,
    destinations: Sequence[Destination],
    progress: WriteProgress,
    advance: Callable[[int], None],
) -> None:
    if not destinations:
        return
    ranges = part_ranges(each.wanted.slice for each in destinations)
    arranged = session.arrange(ranges)
    batch: TargetBatch | None = None

    def begin() -> None:
        for each in destinations:
            progress.set(each, UNDEFINED)

    try:
        batch = TargetBatch(session, *arranged, destinations, begin)
        begin()  # if nothing is read, prefetched bytes are copied
        batch.wait(advance, parts=ranges)
        batch.copy_views()
        _finish_copies(session, destinations)
    except GdsloadError:
        if _unchanged(session):
            for each in destinations:
                if batch is not None and batch.has(each):
                    progress.set(each, COMPLETE)
        raise
    else:
        session.checkpoint.verify_unchanged()
        for each in destinations:
            progress.set(each, COMPLETE)
    finally:
        if batch is not None:
            batch.views.clear()
            batch.release()
        for each in destinations:
            _count_version(each)


def _write_windows(
    session: Session,
    destinations: Sequence[Destination],
    progress: WriteProgress,
    advance: Callable[[int], None],
) -> None:
    if not destinations:
        return
    by_key = {each.wanted.info.name: each for each in destinations}
    parts = [part for each in destinations for part in _parts_of(each)]
    writer = WindowWriter(session, parts, lambda key: by_key[key].tensor)
    verified = False
    try:
        while writer.copied < len(writer.windows):
            writer.copy_next(advance)
        _finish_copies(session, destinations)
    except GdsloadError:
        verified = _unchanged(session)
        raise
    else:
        session.checkpoint.verify_unchanged()
        verified = True
    finally:
        begun = writer.windows[: writer.copied + writer.writing]
        for key in {part.key for window in begun for part in window}:
            whole = verified and writer.window_of[key] < writer.copied
            progress.set(by_key[key], COMPLETE if whole else UNDEFINED)
            _count_version(by_key[key])
        writer.close()


def _unchanged(session: Session) -> bool:
    """Whether the files are unchanged, for a load that has failed; False if their storage does not
    answer. Raises FileChanged."""
    try:
        session.checkpoint.verify_unchanged()
    except StallError:  # the error of the load says more: the file, the tensor and the offset
        return False
    return True


def _count_version(destination: Destination) -> None:
    """Tells autograd of a write that it has not seen, as `copy_` does."""
    import torch

    if not destination.tensor.is_inference():
        torch.autograd.graph.increment_version(destination.tensor)


def _device_of(session: Session, destinations: Sequence[Destination]) -> str:
    """The device of the tensors. A backend may read only to the host, on the way to it."""
    if session.device == "cpu" and destinations and destinations[0].tensor.is_cuda:
        return str(destinations[0].tensor.device)
    return session.device


def _finish_copies(session: Session, destinations: Sequence[Destination]) -> None:
    """Waits for torch's copies to the device: others may use the tensors on any stream."""
    device = _device_of(session, destinations)
    if device != "cpu":
        from gdsload.loading.torch_device import synchronize

        synchronize(device)


def _parts_of(destination: Destination) -> Iterator[CopyPart]:
    """The parts that a destination is copied from."""
    found = destination.wanted.slice
    key = destination.wanted.info.name
    if found.shape is None:
        yield CopyPart(found.parts[0], key, index=found.index)
        return
    # Parts are stacked along the outer dimensions; the index begins with all of these.
    depth = len(found.shape) - len(found.parts[0].shape)
    index = None if found.index is None else found.index[depth:]
    outer = product(*(range(count) for count in found.shape[:depth]))
    for info, at in zip(found.parts, outer, strict=True):
        yield CopyPart(info, key, at, index)
