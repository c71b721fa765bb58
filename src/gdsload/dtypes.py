"""The element types of safetensors, and their names in torch.

Sizes are in bits, because some types are smaller than a byte. torch is imported only for a torch
dtype: parsing and planning do not need it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from gdsload.errors import CheckpointError, shown

if TYPE_CHECKING:
    import torch


class DType(NamedTuple):
    """One element type. `torch_name` is None if torch has no such type."""

    name: str  # as in the header, e.g. "BF16"
    bits: int  # of one element
    torch_name: str | None  # an attribute of torch; that of F4 has two elements
    align: int  # bytes; a tensor can be viewed at an address that is a multiple of it


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("BOOL", 8, "bool", 1),
        DType("F4", 4, "float4_e2m1fn_x2", 1),
        DType("F6_E2M3", 6, None, 1),
        DType("F6_E3M2", 6, None, 1),
        DType("U8", 8, "uint8", 1),
        DType("I8", 8, "int8", 1),
        DType("F8_E5M2", 8, "float8_e5m2", 1),
        DType("F8_E4M3", 8, "float8_e4m3fn", 1),
        DType("F8_E8M0", 8, "float8_e8m0fnu", 1),
        DType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz", 1),
        DType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz", 1),
        DType("I16", 16, "int16", 2),
        DType("U16", 16, "uint16", 2),
        DType("F16", 16, "float16", 2),
        DType("BF16", 16, "bfloat16", 2),
        DType("I32", 32, "int32", 4),
        DType("U32", 32, "uint32", 4),
        DType("F32", 32, "float32", 4),
        DType("C64", 64, "complex64", 8),
        DType("F64", 64, "float64", 8),
        DType("I64", 64, "int64", 8),
        DType("U64", 64, "uint64", 8),
    )
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype for a name in a header; imports torch.

    Raises CheckpointError if safetensors or this version of torch has no such type.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise CheckpointError(f"{shown(name)} is not a safetensors dtype")
    if dtype.torch_name is None:
        raise CheckpointError(f"torch has no dtype for safetensors' {name}")
    import torch

    found = getattr(torch, dtype.torch_name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"torch {torch.__version__} has no dtype torch.{dtype.torch_name} for safetensors'"
            f" {name}: a newer torch has it"
        )
    return found


@cache
def known_dtype(name: str) -> torch.dtype | None:
    """Like `torch_dtype`, but None if there is none; for equality tests."""
    try:
        return torch_dtype(name)
    except CheckpointError:
        return None
