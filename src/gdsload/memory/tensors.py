"""Tensors that view host or device buffers.

Every tensor holds a reference to its buffer and outlives the loader. When it is freed, its host
pages return to the system, unless it is small; those of a mapped file or of a host pool return with
the last tensor of that memory. torch is imported when the first tensor is made. Not responsible
for the memory (`memory.host_buffers`, `memory.device_buffers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gdsload.checkpoint import TensorInfo
from gdsload.dtypes import DTYPES, torch_dtype
from gdsload.errors import CheckpointError, shown
from gdsload.system.gc_control import collector_paused
from gdsload.system.torch_thread import copying

if TYPE_CHECKING:
    import torch

    from gdsload.memory.host_buffers import BufferView

# DLPack type codes and bits of the dtypes that every torch accepts from DLPack. The others are
# exported as unsigned or signed integers of their size, and viewed as their dtype afterwards.
_DLPACK_TYPES = {
    "I8": (0, 8), "I16": (0, 16), "I32": (0, 32), "I64": (0, 64), "U8": (1, 8),
    "F16": (2, 16), "F32": (2, 32), "F64": (2, 64), "BF16": (4, 16), "C64": (5, 64),
}  # fmt: skip


@collector_paused()
def make_tensors(
    infos: Iterable[TensorInfo], views: Mapping[str, BufferView]
) -> dict[str, torch.Tensor]:
    """Makes a tensor over the bytes of each info.

    A tensor whose address is not a multiple of its dtype's alignment is copied. An empty tensor
    gets memory of its own.

    Args:
        infos: the tensors to make.
        views: the memory of each tensor, by name; not needed for empty tensors.

    Returns:
        The tensors, by name.

    Raises:
        CheckpointError: this torch lacks a dtype. No tensor was made, and no memory was released.
    """
    import torch

    infos = list(infos)
    formats = {
        dtype: (*_dlpack_format(dtype), DTYPES[dtype].align) for dtype in require_possible(infos)
    }
    tensors: dict[str, torch.Tensor] = {}
    for info in infos:
        name, dtype, shape, _, _, nbytes = info
        if dtype == "F4":
            shape = torch_shape(info)
        if nbytes == 0:
            tensors[name] = torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")
            continue
        region, offset = view = views[name]
        code, bits, viewed_as, align = formats[dtype]
        if (region.address + offset) % align:
            with copying():
                raw = bytes_at(view, nbytes).clone()
            tensors[name] = raw.view(torch_dtype(dtype)).reshape(shape)
            continue
        tensor = tensor_of(region.view(offset, nbytes, shape, code, bits))
        tensors[name] = tensor if viewed_as is None else tensor.view(viewed_as)
    return tensors


def require_possible(infos: Sequence[TensorInfo]) -> list[str]:
    """The dtypes of these tensors. Raises CheckpointError for one that this torch cannot have."""
    one_of = {info.dtype: info for info in infos}
    for info in one_of.values():
        torch_dtype_of(info)
    if "F4" in one_of:
        for info in infos:
            torch_shape(info)
    return list(one_of)


def tensor_of(capsule: object) -> torch.Tensor:
    """The tensor described by a DLPack capsule. torch initialises the device of its memory."""
    import torch

    found: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return found


def bytes_at(view: BufferView, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over `nbytes` of memory."""
    return tensor_of(view.region.view(view.offset, nbytes, (nbytes,), *_DLPACK_TYPES["U8"]))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a flat tensor of uint8.

    Not `reshape(-1)`: of one element, which may have any stride, it keeps the stride, and such a
    tensor cannot be viewed as bytes.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch_dtype("U8"))


def _dlpack_format(dtype: str) -> tuple[int, int, torch.dtype | None]:
    """DLPack's type code and bits, and the dtype to view the result as."""
    if dtype in _DLPACK_TYPES:
        return *_DLPACK_TYPES[dtype], None
    # BOOL, unsigned integers and 8-bit floats: their DLPack codes differ between torch versions.
    bits = max(DTYPES[dtype].bits, 8)
    return int(bits == 8), bits, torch_dtype(dtype)


def torch_dtype_of(info: TensorInfo) -> torch.dtype:
    """The torch dtype of a tensor. Raises CheckpointError, naming it, if this torch has none."""
    try:
        return torch_dtype(info.dtype)
    except CheckpointError as error:
        raise CheckpointError(f"tensor {shown(info.name)}: {error}", tensor=info.name) from None


def torch_shape(info: TensorInfo) -> tuple[int, ...]:
    """The shape of a tensor in torch. Of F4, one byte of the last dimension holds two elements.

    Raises CheckpointError if that dimension of F4 is odd.
    """
    shape = info.shape
    if info.dtype != "F4":
        return shape
    if not shape or shape[-1] % 2:
        raise CheckpointError(
            f"tensor {shown(info.name)} is F4 with shape {list(shape)}: torch packs two elements"
            " into a byte and needs an even last dimension",
            tensor=info.name,
        )
    return (*shape[:-1], shape[-1] // 2)
