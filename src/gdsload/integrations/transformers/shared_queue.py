"""A readahead queue whose windows are read by several ranks together.

A thread reads and exchanges window after window, because all ranks have to take part at the same
time, whenever each of them needs its tensors. It pauses while many tensors wait to be taken, except
when one is requested that has not arrived: so ranks that request in different orders do not block
each other. Slices that were not predicted are read by this rank alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gdsload.distribution.exchange import Exchange, agreed_layouts
from gdsload.distribution.reader_group import ReaderGroup
from gdsload.distribution.shared_load import require_room_of_ranks
from gdsload.distribution.shares import Box, Layout
from gdsload.errors import GdsloadError
from gdsload.integrations.transformers.readahead_queue import QueueClosed, ReadaheadQueue
from gdsload.loading import window_writer
from gdsload.loading.session import Session
from gdsload.planning.tensor_slices import TensorSlice
from gdsload.system import torch_thread
from gdsload.system.cancellation import WAKE_SECONDS
from gdsload.system.threads import condition, start_thread

if TYPE_CHECKING:
    import torch


class SharedQueue(ReadaheadQueue):
    """Hands out slices to any number of threads of this rank. Must be closed.

    Attributes:
        reason: Why the load fails, for the other ranks; set before `close`.
    """

    def __init__(
        self,
        session: Session,
        alone: Session,
        readers: ReaderGroup,
        wanted: Mapping[str, tuple[str, Box]],
        *,
        kept: Container[str],
        order: Iterable[str],
    ) -> None:
        """Agrees with the other ranks on who reads what; reads nothing before `start`.

        Args:
            session: For the shared reads. Closed by the caller, after the queue.
            alone: For slices that were not predicted, on the same device.
            readers: The ranks. The queue closes it.
            wanted: By key of a slice: the tensor and its box, one box of each tensor.
            kept: Keys of the slices whose memory becomes the model's. They do not count as ahead.
            order: The names of all tensors, as transformers requests them. Ranks that want
                different ones read in this order: another one would fill the memory with tensors
                that are requested later.

        Raises:
            RankError, CheckpointError, ValueError: As `agreed_layouts` does.
            PlacementError: The machine has too little memory for what the ranks hold.
        """
        super().__init__(alone)
        self.reason = "this load has ended early"
        self._readers, self._kept = readers, kept
        self._key_of = {name: key for key, (name, _) in wanted.items()}
        self._expected = set(wanted)
        self._arrived: dict[str, torch.Tensor] = {}
        self._held_bytes = 0  # arrived and not kept
        self._waiting = 0  # threads
        self._ending = ""  # "": reading; else why not: "ended", "finished" or "closed"
        self._failure: BaseException | None = None
        self._arrivals, self._changed = condition()
        self._thread: threading.Thread | None = None
        self._in_streams = torch_thread.streams_of_this_thread()
        boxes = dict(wanted.values())
        number_of = {name: number for number, name in enumerate(order)}
        arrange = partial(sorted, key=lambda info: number_of[info.name])
        with readers.together():
            plan = agreed_layouts(readers, session, boxes, window_writer.AHEAD_BYTES, arrange)
            if session.device == "cpu":
                require_room_of_ranks(readers, self._most_held_bytes(plan[0]))
            self._exchange = Exchange(readers, session, *plan, self._require_unfinished)

    def _most_held_bytes(self, layouts: Sequence[Layout]) -> int:
        """The bytes of the kept tensors, and of the others that wait to be taken."""
        sizes = {True: 0, False: 0}
        for layout in layouts:
            kept = self._key_of.get(layout.info.name) in self._kept
            sizes[kept] += layout.wanted_bytes(self._readers.rank)
        return sizes[True] + min(sizes[False], window_writer.AHEAD_BYTES)

    def start(self) -> None:
        """Starts the thread that reads. Raises GdsloadError if no thread can be started,
        LoadCancelled, and QueueClosed after `close`."""
        with self._arrivals:
            self._require_unfinished()
            if self._thread is None:
                self._thread = start_thread(self._read, "gdsload-exchange")
            if self._thread is None:
                raise GdsloadError("no thread can be started to exchange tensors")

    def _read(self) -> None:
        try:
            # In the streams in which the tensors are used.
            with self._in_streams(), self._readers, self._readers.together():
                try:
                    self._require_unfinished()
                    self._exchange_windows()
                except QueueClosed:
                    self._readers.tell(self.reason)
                    raise
                finally:
                    self._exchange.close()
        except BaseException as error:
            self._failure = error
        finally:
            with self._arrivals:
                self._ending = self._ending or "ended"
                self._changed.notify_all()

    def _exchange_windows(self) -> None:
        device = self.session.device
        if device != "cpu":
            import torch

            torch.cuda.set_device(device)  # of this thread
        for complete in self._exchange.windows():
            with self._arrivals:
                while complete:
                    self._arrive(*complete.pop())
                self._changed.notify_all()
            while self._paused():
                self._exchange.stay_in_touch()
            self._require_unfinished()

    def _arrive(self, layout: Layout, tensor: torch.Tensor) -> None:
        key = self._key_of[layout.info.name]
        self._arrived[key] = tensor
        self._held_bytes += 0 if key in self._kept else tensor.nbytes

    def _paused(self) -> bool:
        """Waits a moment if too many tensors are not taken yet. False if there is no need to."""
        with self._arrivals:
            paused = (
                self._held_bytes > window_writer.AHEAD_BYTES
                and not self._waiting
                and not self._ending
            )
            if paused:
                self._changed.wait(WAKE_SECONDS)
            return paused

    def _require_unfinished(self) -> None:
        self._cancellation.check()
        if self._ending == "closed":
            raise QueueClosed(f"{self.session.checkpoint.source}: this load has ended early")

    def take(self, tensor_slice: TensorSlice) -> torch.Tensor:
        """Waits for a slice and returns its tensor, which owns its memory.

        Raises:
            GdsloadError: This rank or another one has failed. Later calls fail in the same way.
            LoadCancelled: The load was cancelled.
            QueueClosed: The load ended meanwhile.
        """
        key = tensor_slice.key
        start = time.monotonic()
        with self._arrivals:
            if key in self._expected:
                if not self._ending:
                    self.start()  # a copy of the state dict does not begin the reads
                self._waiting += 1
                try:
                    while key not in self._arrived and not self._ending:
                        self._cancellation.check()
                        self._changed.notify_all()
                        self._changed.wait(WAKE_SECONDS)
                finally:
                    self._waiting -= 1
                self.waited_seconds += time.monotonic() - start
                tensor = self._arrived.pop(key, None)
                if tensor is not None:
                    self._expected.discard(key)
                    self._held_bytes -= 0 if key in self._kept else tensor.nbytes
                    self.taken_tensors += 1
                    self.taken_bytes += tensor.nbytes
                    self._changed.notify_all()
                    return tensor
                failure = self._failure  # `close` in another thread forgets it
                if failure is not None and self._ending != "closed":
                    raise failure
                raise QueueClosed(f"{self.session.checkpoint.source}: this load has ended")
        return super().take(tensor_slice)

    def finish(self) -> None:
        """Takes part until the last window, so that the other ranks get theirs. Raises the error
        that ended the exchange, if any."""
        self.start()
        self._stop("finished")
        failure = self._failure
        if failure is not None:
            raise failure

    def _stop(self, how: str) -> None:
        with self._arrivals:
            if not self._ending or (self._ending, how) == ("finished", "closed"):  # by Ctrl-C
                self._ending = how
            self._changed.notify_all()
        if self._thread is None:
            self._read()  # tells the other ranks
        else:
            self._thread.join()

    def close(self) -> None:
        """Ends the reads on all ranks, if they have not finished."""
        if not self._closed:
            self._stop("closed")
            self._arrived.clear()
            # Its frames have windows of this load, and refer to this object.
            self._failure = None
        super().close()
