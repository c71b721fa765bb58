"""Copies tensors into parameter buffers, in the order of the files.

A thread that requests a tensor copies all windows up to the tensor's own. So no order of calls can
block. Not responsible for the memory of the parameters (`parameter_buffers`), nor for the windows
(`loading.window_writer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gdsload._native.compare import Comparison
from gdsload.checkpoint import TensorInfo
from gdsload.integrations.transformers.parameter_buffers import ParameterBuffers
from gdsload.integrations.transformers.readahead_queue import QueueClosed
from gdsload.loading.session import Session
from gdsload.loading.window_writer import Copy, CopyPart, WindowWriter
from gdsload.system import cancellation
from gdsload.system.lifecycle import fork_safe_lock

if TYPE_CHECKING:
    import torch


class ParameterWriter(WindowWriter):
    """Writes parameters. Any number of threads may take tensors; must be closed."""

    def __init__(
        self,
        session: Session,
        buffers: ParameterBuffers,
        infos: Sequence[TensorInfo] = (),
    ) -> None:
        """Reads nothing before `start`.

        Args:
            session: Reads the tensors to the host.
            buffers: The memory of the parameters.
            infos: The tensors, all of them part of `buffers`.
        """
        parts = [CopyPart(info, info.name) for info in infos]
        super().__init__(session, parts, buffers.part_of, fresh=buffers.region)
        self.buffers = buffers
        self.taken_tensors = 0
        self._lock = fork_safe_lock(self)
        self._closed = False
        self._cancellation = cancellation.current()  # other threads take the tensors

    def start(self) -> None:
        """Posts the first windows. Raises LoadCancelled."""
        with self._lock:
            self._require_open()
            self._advance()

    def take(self, name: str, dtype: Any) -> torch.Tensor | None:
        """Waits for a tensor and returns its part of the parameter; None if it has none, or if the
        parameter has another dtype.

        Raises:
            ReadError: A read up to this tensor failed.
            LoadCancelled: The load was cancelled.
            QueueClosed: The load ended meanwhile.
        """
        if not self.buffers.expects(name, dtype):
            return None
        with self._lock:
            while self.copied <= self.window_of[name]:
                self._require_open()
                self.copy_next(watch=self._require_open)
            part = self.buffers.give(name)
            if part is not None:
                self.taken_tensors += 1
            return part

    def _shares_twin(self, part: CopyPart, copy: Copy | None) -> bool:
        import torch

        twin = self.buffers.twin_of(part.key)
        if twin is None:
            return False
        name, memory = twin
        if copy is not None and self.window_of[name] < self.copied:
            target = memory[part.at] if part.at else memory
            written = Comparison(target.data_ptr(), copy.source, copy.nbytes, "F32", widens=True)
            written.work(torch.get_num_threads())
            if written.equal:
                return True
        first = part.at[0] if part.at else slice(0, 0)
        # Of a row that is split, all: the rest of it is written after this.
        self.buffers.separate(part.key, first.start if isinstance(first, slice) else first + 1)
        return False

    def _require_open(self) -> None:
        self._cancellation.check()
        if self._closed:
            raise QueueClosed(f"{self.session.checkpoint.source}: this load has ended")

    def close(self) -> None:
        """Ends all reads and releases their memory; waiting and later calls raise QueueClosed."""
        self._closed = True  # seen by waiting threads, which then release the lock
        with self._lock:
            super().close()

    def __enter__(self) -> ParameterWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
