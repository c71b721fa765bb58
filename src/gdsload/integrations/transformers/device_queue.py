"""The stage of a feed whose tensors live on a device: what is kept of a model lands where it will
stay, what is cast or converted in memory of the device that goes back to torch's allocator as soon
as transformers drops it. Casts and conversions then run on the device, as torch does them. What was
read ahead to the device is given from where it lies, be it to stay or to be cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gdsload.backends import Memory
from gdsload.integrations.transformers.readahead_queue import WINDOW_BYTES, ReadWindow
from gdsload.loading.batch import Batch
from gdsload.loading.device_batch import DeviceTensors, read_to_blocks
from gdsload.loading.session import Session
from gdsload.memory.host_buffers import BufferView
from gdsload.planning.read_plan import ByteRange, ReadPlan
from gdsload.planning.tensor_slices import TensorSlice, runs_of

if TYPE_CHECKING:
    import torch


class DeviceReadWindow(ReadWindow):
    """Cuts on their way into tensors of the session's device."""

    def __init__(
        self,
        session: Session,
        plan: ReadPlan,
        views: dict[str, BufferView],
        slices: Sequence[TensorSlice],
    ) -> None:
        """Raises PlacementError where the device is too full."""
        self._shelf = DeviceTensors(session, slices, views)
        super().__init__(session, plan, views, slices)

    @classmethod
    def of(cls, session: Session, slices: Sequence[TensorSlice]) -> DeviceReadWindow:
        """Puts them on their way and returns at once. Their memory is torch's, but for what a
        prefetch brings."""
        found = session.arrange(runs_of(slices), window_bytes=WINDOW_BYTES)
        return cls(session, *found, slices)

    def _take_memory(self) -> list[Memory]:
        return self._shelf.memory(self.plan)

    def _start_anew(self, pieces: Sequence[ByteRange]) -> Batch:
        return read_to_blocks(self.session, pieces)

    def _settle(self) -> None:
        """Ends the request. There is nothing between the tensors that could be given back."""
        self.release()
        self.arrived = True

    def has(self, tensor_slice: TensorSlice) -> bool:
        """Whether all bytes of it are there."""
        return all(self._is_there(part) for part in tensor_slice.parts)

    def give(self, tensor_slice: TensorSlice) -> list[torch.Tensor]:
        """The tensor that its runs make up, once."""
        given = [*self._shelf.give([tensor_slice], self.views).values()]
        self.left -= 1
        return given

    def joined(self, tensor_slice: TensorSlice, parts: list[torch.Tensor]) -> torch.Tensor:
        """What is left of it; the runs lie one behind the other already."""
        tensor = parts[0]
        return tensor if tensor_slice.index is None else tensor[tensor_slice.index].clone()

    def end(self) -> None:
        """Releases what nobody took, and the request."""
        self.release()
        self.views.clear()
        # The dict stays whole: a request with copies on their way holds it, and torch's allocator
        # must not lend the memory before they have ended.
        self._shelf.tensors = {}
