"""The stage of a feed whose tensors live on a device: what is kept of a model lands where it will
stay, what is cast or converted in memory of the device that goes back to torch's allocator as soon
as transformers drops it. Casts and conversions then run on the device, as torch does them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gdsload.backends import Memory
from gdsload.cuts import Cut, runs_of
from gdsload.feed import WINDOW_BYTES, Stage
from gdsload.load import Session
from gdsload.plan import ReadPlan
from gdsload.vram import Shelf

if TYPE_CHECKING:
    import torch


class DeviceStage(Stage):
    """Cuts on their way into tensors of the session's device."""

    def __init__(self, session: Session, plan: ReadPlan, cuts: Sequence[Cut]) -> None:
        """Raises PlacementError where the device is too full."""
        self._shelf = Shelf(session, cuts)
        super().__init__(session, plan, {}, cuts)

    @classmethod
    def of(cls, session: Session, cuts: Sequence[Cut]) -> DeviceStage:
        """Puts them on their way and returns at once. Their memory is torch's."""
        plan, _ = session.arrange(runs_of(cuts), window_bytes=WINDOW_BYTES)
        return cls(session, plan, cuts)

    def _take_memory(self) -> list[Memory]:
        return self._shelf.memory(self.plan)

    def _settle(self) -> None:
        """Ends the request. There is nothing between the tensors that could be given back."""
        self.release()
        self.arrived = True

    def has(self, cut: Cut) -> bool:
        """Whether all bytes of it are there."""
        return all(self._is_there(part) for part in cut.parts)

    def give(self, cut: Cut) -> list[torch.Tensor]:
        """The tensor that its runs make up, once."""
        self.left -= 1
        return [self._shelf.tensors.pop(cut.key)]

    def joined(self, cut: Cut, parts: list[torch.Tensor]) -> torch.Tensor:
        """What is left of it; the runs lie one behind the other already."""
        tensor = parts[0]
        return tensor if cut.index is None else tensor[cut.index].clone()

    def end(self) -> None:
        """Releases what nobody took, and the request."""
        self.release()
        self._shelf.tensors.clear()
