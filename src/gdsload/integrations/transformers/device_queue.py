"""The stage of a feed whose tensors live on a device: what is kept of a model lands where it will
stay, what is cast or converted in memory of the device that goes back to torch's allocator as soon
as transformers drops it. Casts and conversions then run on the device, as torch does them. What was
read ahead to the device is given from where it lies, be it to stay or to be cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gdsload.backends import Memory
from gdsload.integrations.transformers.readahead_queue import WINDOW_BYTES, Stage
from gdsload.loading.device_batch import Shelf, arranged, read_to_blocks
from gdsload.loading.session import Batch, Session
from gdsload.memory.host_buffers import Spot
from gdsload.planning.read_plan import Piece, ReadPlan
from gdsload.planning.tensor_slices import Cut, runs_of

if TYPE_CHECKING:
    import torch


class DeviceStage(Stage):
    """Cuts on their way into tensors of the session's device."""

    def __init__(
        self,
        session: Session,
        plan: ReadPlan,
        spots: dict[str, Spot],
        memory: list[Memory] | None,
        cuts: Sequence[Cut],
    ) -> None:
        """Raises PlacementError where the device is too full."""
        self._shelf = Shelf(session, cuts, spots)
        self._shared = memory
        super().__init__(session, plan, spots, cuts)

    @classmethod
    def of(cls, session: Session, cuts: Sequence[Cut]) -> DeviceStage:
        """Puts them on their way and returns at once. Their memory is torch's, but for what a
        prefetch brings, or is read in place."""
        found = arranged(session, runs_of(cuts), window_bytes=WINDOW_BYTES)
        return cls(session, *found, cuts)

    def _take_memory(self) -> list[Memory]:
        return self._shelf.memory(self.plan) if self._shared is None else self._shared

    def _start_anew(self, pieces: Sequence[Piece]) -> Batch:
        return read_to_blocks(self.session, pieces)

    def _settle(self) -> None:
        """Ends the request. There is nothing between the tensors that could be given back."""
        self.release()
        self.arrived = True

    def has(self, cut: Cut) -> bool:
        """Whether all bytes of it are there."""
        return all(self._is_there(part) for part in cut.parts)

    def give(self, cut: Cut) -> list[torch.Tensor]:
        """The tensor that its runs make up, once."""
        given = [*self._shelf.give([cut], self.spots).values()]
        self.left -= 1
        return given

    def joined(self, cut: Cut, parts: list[torch.Tensor]) -> torch.Tensor:
        """What is left of it; the runs lie one behind the other already."""
        tensor = parts[0]
        return tensor if cut.index is None else tensor[cut.index].clone()

    def end(self) -> None:
        """Releases what nobody took, and the request."""
        self.release()
        self.spots.clear()
        # The dict stays whole: a request with copies on their way holds it, and torch's allocator
        # must not lend the memory before they have ended.
        self._shelf.tensors = {}
