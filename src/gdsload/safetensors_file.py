"""`safe_open` and its slices: single tensors of a checkpoint, read when they are asked for.

Replaces the class of the same name in safetensors. The module has another name than the class, so
that importing it never hides `gdsload.safe_open`. Not responsible for planning and reading.
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gdsload._native.ranges import bytes_of
from gdsload.api import open_session
from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.checkpoint.checkpoint import Lookup
from gdsload.checkpoint.header import HEADER_LIMIT_BYTES
from gdsload.checkpoint.locate import title_of
from gdsload.errors import CheckpointError, also_safetensors, safetensors_errors, shown
from gdsload.loading.session import verifier_of
from gdsload.loading.settings import ReadSettings
from gdsload.loading.torch_memory import copied, making, moved
from gdsload.loading.whole_tensors import load
from gdsload.memory.host_buffers import current_pool
from gdsload.planning.tensor_slices import rows_of
from gdsload.report import LoadReport
from gdsload.system import device_name, quiesce
from gdsload.system.lifecycle import fork_safe_lock
from gdsload.system.stall import STALL_SECONDS

if TYPE_CHECKING:
    import torch

    from gdsload.checkpoint.selection import Names
    from gdsload.events import OnEvent


class safe_open:
    """Opens a checkpoint and reads single tensors from it, like `safetensors.safe_open`.

    A tensor outlives the file, and a slice outlives the `with` block. Several threads may use one
    object; their reads are done one after the other. It cannot be pickled or copied. Torch tensors
    of mapped files and of a host pool view the same memory if they are read again: what was written
    to one is seen in the next.

    Args:
        filename: A file, a directory, an index file, or a model id, as for `load_file`.
        framework: "pt" ("torch", "pytorch") for torch tensors, "np" ("numpy") for arrays.
        device: Where the tensors are needed, as for `load_file`.
        backend: As for `load_file`.
        cache: As for `load_file`.
        page_cache: As for `load_file`; the load ends when the file is closed.
        options: As for `load_file`.
        stall_seconds: Seconds without a new byte after which a read fails.
        verify: As for `load_file`. A slice is compared in the blocks that it contains wholly.
        on_event: As for `load_file`; each read is a load.
        revision: As for `load_file`.
        subfolder: As for `load_file`.
        variant: As for `load_file`.
        cache_dir: As for `load_file`.
        strict: As for `load_file`.
        header_limit: Largest accepted header, in bytes.

    Raises:
        ValueError: The framework is unknown, or numpy is combined with a GPU.
        GdsloadError: As for `load_file`.

    Example:
        >>> with gdsload.safe_open("model", framework="pt", device="cuda:0") as opened:
        ...     rows = opened.get_slice("lm_head.weight")[:1000]
    """

    @safetensors_errors()
    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str = "pt",
        device: str | int | torch.device | None = "cpu",
        *,
        backend: str = "auto",
        cache: str = "auto",
        page_cache: str = "auto",
        options: Mapping[str, Any] | None = None,
        stall_seconds: float = STALL_SECONDS,
        verify: str | os.PathLike[str] = "size",
        on_event: OnEvent | None = None,
        revision: str | None = None,
        subfolder: str = "",
        variant: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        strict: bool = True,
        header_limit: int = HEADER_LIMIT_BYTES,
    ) -> None:
        if framework not in ("pt", "torch", "pytorch", "np", "numpy"):
            raise also_safetensors(ValueError)(
                f"framework={framework!r} must be pt or np: gdsload gives torch or numpy tensors"
            )
        self._numpy = framework in ("np", "numpy")
        settings = ReadSettings(
            backend, cache, page_cache, options, stall_seconds, verify, on_event
        )
        self._device, self._on_event = device_name.require_target(device), on_event
        if self._numpy and self._device != "cpu":
            raise also_safetensors(ValueError)(f"numpy has no tensors on {self._device}")
        # A session serves one reader at a time. Reentrant, so that a signal handler may close it.
        self._lock = fork_safe_lock(self)
        # Those that exist; they may be read after the `with` block. No lock guards them:
        # a slice that is dropped must not wait for the read of another thread.
        self._slices: weakref.WeakSet[Slice] = weakref.WeakSet()
        self._left = False
        self._reader = 0  # the process that reads now, 0: none. A forked child has no reader.
        self._closes_later = False
        lookup = Lookup(
            revision, subfolder, variant, cache_dir, strict, header_limit, stall_seconds
        )
        with quiesce.loading(title_of(filename)):
            self._checkpoint = lookup.open(filename)
            try:
                report = LoadReport(self._checkpoint.source, device=self._device)
                verifier = verifier_of(self._checkpoint, verify, report)
                nbytes = self._checkpoint.total_bytes
                self._session = open_session(
                    self._checkpoint,
                    report,
                    settings,
                    self._device,
                    nbytes,
                    verifier,
                    copies=self._numpy,
                )
            except BaseException:
                self._checkpoint.close()
                raise

    @safetensors_errors()
    def keys(self) -> list[str]:
        """The tensor names, sorted."""
        return sorted(self._open().tensors)

    @safetensors_errors()
    def offset_keys(self) -> list[str]:
        """The tensor names, in file order."""
        return list(self._open().tensors)

    @safetensors_errors()
    def metadata(self) -> dict[str, str] | None:
        """The `__metadata__` of the headers; None if there is none."""
        return self._open().header_metadata()

    @safetensors_errors()
    def get_tensor(self, name: str) -> Any:
        """Reads one tensor.

        Args:
            name: The name of the tensor.

        Returns:
            A torch tensor on the device, or an array.

        Raises:
            CheckpointError: There is no tensor of this name.
            ReadError: The read failed.
        """
        info = self._open().info(name)
        tensor = self._read([info])[name]
        return self._checked([info], {name: tensor})[name]

    @safetensors_errors()
    def get_tensors(self, names: Names = None) -> dict[str, Any]:
        """Reads several tensors together.

        Args:
            names: The tensors to read, as for `load_file`. None reads all, in file order.

        Returns:
            Torch tensors on the device, or arrays, by name.

        Raises:
            CheckpointError: No tensor has a name or matches a pattern.
            ReadError: A read failed.
        """
        infos = self._open().infos(names)
        return self._checked(infos, self._read(infos))

    @safetensors_errors()
    def get_slice(self, name: str) -> Slice:
        """A tensor that is read when it is indexed.

        Args:
            name: The name of the tensor.

        Returns:
            The slice. It keeps the files open, also after the `with` block.

        Raises:
            CheckpointError: There is no tensor of this name.

        Example:
            >>> rows = opened.get_slice("lm_head.weight")[:1000]
        """
        return Slice(self, self._open().info(name))

    def _open(self) -> Checkpoint:
        if self._left:
            raise self._closed_error()
        return self._checkpoint

    def _closed_error(self) -> CheckpointError:
        source = self._checkpoint.source
        return CheckpointError(f"{source}: the file is closed", path=source)

    def _close_if_left(self) -> None:
        if self._left and not self._slices:
            self.close()

    def _read(
        self, infos: list[TensorInfo], *, parts: bool = False, copies: bool = False
    ) -> dict[str, torch.Tensor]:
        with self._lock:
            if self._checkpoint.closed:
                raise self._closed_error()
            outer, self._reader = self._reader, os.getpid()
            try:
                return self._read_open(infos, parts, copies)
            finally:
                self._reader = outer
                if self._closes_later and outer != os.getpid():
                    self.close()

    def _read_open(
        self, infos: list[TensorInfo], parts: bool, copies: bool
    ) -> dict[str, torch.Tensor]:
        if copies:  # later reads, too: their tensors may be of the same mapping
            self._session.will_copy()
        if self._session.cache == "mapped":  # it may be shorter than its mapping
            self._checkpoint.verify_unchanged({info.shard for info in infos})
        report = LoadReport(self._checkpoint.source, device=self._device, on_event=self._on_event)
        report.tensors, report.wanted_bytes = len(infos), bytes_of(infos)
        with (
            self._session.reporting_to(report),
            report.whole(),
            quiesce.loading(report.source),
            self._checkpoint.locating_errors(),
        ):
            tensors = load(
                self._session,
                infos,
                report.wanted_bytes,
                self._device,
                past_cache="read-ahead would read bytes outside the slice" if parts else "",
            )
            if self._session.verifier is None and report.verify != "size":
                report.verified_bytes = report.wanted_bytes  # whole files, when it was opened
            return tensors

    def _checked(
        self, infos: Sequence[TensorInfo], tensors: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Tensors as the caller wants them. No file may have changed while some were copied from
        its mapping."""
        copied_from: set[int] = set()
        found: dict[str, Any] = {}
        for info in infos:
            tensor = tensors.pop(info.name)
            mapped = self._session.maps(tensor, info.shard)
            found[info.name] = self._converted(info.name, tensor, mapped)
            if mapped and found[info.name] is not tensor:
                copied_from.add(info.shard)
        self._verify_unchanged(copied_from)
        return found

    def _converted(self, name: str, tensor: torch.Tensor, mapped: bool) -> Any:
        if self._numpy:
            # Reads share mappings and pools, but a change of one array must not change a later one.
            array = _as_numpy(name, tensor)
            return array.copy() if mapped or current_pool() is not None else array
        return tensor if self._device == self._session.device else moved(tensor, self._device)

    def _verify_unchanged(self, shards: Collection[int]) -> None:
        if not shards:
            return
        with self._lock, quiesce.loading(self._checkpoint.source):
            if self._checkpoint.closed:
                raise self._closed_error()
            self._checkpoint.verify_unchanged(shards)

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        self._close_if_left()

    def close(self) -> None:
        """Closes the files after the read of another thread, if any, has ended.

        Tensors stay valid, slices do not. Leaving the `with` block closes the files as well, but
        only when the last slice is gone. May be called again. Called inside a read, by its
        `on_event` or by a signal handler, it closes them after the read.
        """
        with self._lock:
            self._left = True
            if self._reader == os.getpid():  # the read of this thread, which holds the lock as well
                self._closes_later = True
                return
            self._session.close()
            self._checkpoint.close()

    def __contains__(self, name: object) -> bool:
        return name in self._open().tensors

    def __reduce__(self) -> str:
        raise TypeError("a safe_open owns file descriptors and cannot be copied or pickled")


class Slice:
    """One tensor of a file that is read when it is indexed; made by `safe_open.get_slice`.

    It takes the indexes of a torch tensor; with numpy, the ranges and numbers that safetensors
    takes.
    """

    def __init__(self, opened: safe_open, info: TensorInfo) -> None:
        self._opened = opened
        self._info = info
        opened._slices.add(self)

    def __del__(self) -> None:
        self._opened._slices.discard(self)
        self._opened._close_if_left()

    def get_shape(self) -> list[int]:
        """The shape in elements, as in the header."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """The dtype by safetensors' name, such as "BF16"."""
        return self._info.dtype

    @safetensors_errors()
    def __getitem__(self, index: Any) -> Any:
        """Indexes the tensor. If the first index is a row or a range of rows, only these are read.

        The result does not keep the rest of them in memory.
        """
        if self._opened._numpy:
            index = _parsed(index, self._info.shape)
        info, rest = self._info, index
        first, *others = index if isinstance(index, tuple) and index else (index,)
        count = info.shape[0] if info.shape and info.dtype != "F4" else 0
        if count and isinstance(first, slice):
            rows = range(*first.indices(count))
            if rows.step > 0:
                end = rows[-1] + 1 if rows else rows.start
                step = min(rows.step, count)  # torch computes with it
                info, rest = rows_of(info, rows.start, end), (slice(None, None, step), *others)
        elif type(first) is int and -count <= first < count:
            row = first % count
            info, rest = rows_of(info, row, row + 1), (0, *others)
        parts = info.nbytes < self._info.nbytes
        copies = not all(_keeps_view(each) for each in (first, *others))
        tensor = self._opened._read([info], parts=parts, copies=copies)[info.name]
        with making(tensor.nbytes, tensor, f"a part of tensor {shown(info.name)}"):
            part = tensor[rest]
        mapped = self._opened._session.maps(tensor, info.shard)
        views = part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        if views and part.numel() < tensor.numel() and not mapped:
            part = copied(part)  # the view would keep all of the tensor
        if mapped and not views:
            self._opened._verify_unchanged({info.shard})
        return self._opened._checked([info], {info.name: part})[info.name]

    def __reduce__(self) -> str:
        raise TypeError("a slice of a safe_open cannot be copied or pickled")


def _keeps_view(item: Any) -> bool:
    """Whether a part of a torch tensor with this index is a view of it. A list, a mask and an array
    copy."""
    return item is None or item is Ellipsis or type(item) is int or isinstance(item, slice)


def _as_numpy(name: str, tensor: torch.Tensor) -> Any:
    """An array on the same memory. Raises TypeError for a dtype that numpy does not know."""
    import torch

    try:
        if tensor.dtype == torch.bfloat16:  # numpy knows it if ml_dtypes is imported
            import numpy

            return tensor.view(torch.int16).numpy().view(numpy.dtype("bfloat16"))
        return tensor.numpy()
    except TypeError as error:
        raise TypeError(f"{error} (tensor {shown(name)})") from error


def _parsed(index: Any, shape: Sequence[int]) -> Any:
    """An index of arrays as safetensors takes it: True is 1, which it is not for torch.

    Refuses what safetensors refuses, with its type of error and message. Ranges with negative
    bounds are accepted in addition.
    """
    refused = also_safetensors(IndexError)
    if isinstance(index, list):
        if index:
            raise refused("Non empty lists are not implemented")
        return index
    items = index if isinstance(index, tuple) else (index,)
    if sum(item is Ellipsis for item in items) > 1:
        raise refused("Only one ellipsis (...) is allowed in slice index")
    parsed: list[int | slice] = []
    for item in items:
        if item is Ellipsis:
            parsed += [slice(None)] * (len(shape) - len(items) + 1)
        elif not isinstance(item, slice):
            parsed.append(_number_within(item, len(parsed), shape))
        elif item.step is not None and operator.index(item.step) < 1:
            raise refused(f"Slice step must be a positive integer, got {item.step}")
        else:
            parsed.append(item)
    shown = f"Error during slicing [{', '.join(map(_as_written, parsed))}] with shape {list(shape)}"
    if len(parsed) > len(shape):
        raise refused(f"{shown}: more slicing indexes than dimensions in tensor")
    # safetensors checks from the last dimension to the first.
    for dimension, item in reversed(list(enumerate(parsed))):
        size = shape[dimension]
        start, stop = (item, item + 1) if isinstance(item, int) else (item.start or 0, item.stop)
        stop = size if stop is None else stop
        if start >= size > 0 or (isinstance(item, int) and not size):
            asked = start
        elif stop > size:
            asked = stop - 1
        else:
            continue
        raise refused(
            f"{shown}: index {asked} out of bounds for tensor dimension #{dimension} of size {size}"
        )
    return tuple(parsed)


def _number_within(item: Any, dimension: int, shape: Sequence[int]) -> int:
    try:
        number = operator.index(item)
    except TypeError:
        raise also_safetensors(IndexError)(
            f"Unsupported slice index at position {dimension}: expected slice, int, or ellipsis"
        ) from None
    size = shape[dimension] if dimension < len(shape) else 0
    if number < -size:
        raise also_safetensors(IndexError)(
            f"Invalid index {number} for dimension {dimension} of size {size}"
        )
    return number + size if number < 0 else number


def _as_written(item: int | slice) -> str:
    if isinstance(item, int):
        return str(item)
    bounds = [item.start, item.stop] + ([item.step] if item.step not in (None, 1) else [])
    return ":".join("" if bound is None else str(bound) for bound in bounds)
