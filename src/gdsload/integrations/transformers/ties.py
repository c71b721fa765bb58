"""Whether two parameters that a model ties are the same, asked at the speed of memory.

Of a checkpoint that holds both, transformers compares them with `torch.equal` after the last byte
has come: one number after the other, a tenth of a second for the embeddings of a small model. The
same bytes without a NaN among them are equal, which takes a quarter of that; whatever else they
are, `torch.equal` says.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gdsload.integrations.transformers.monkeypatch import Replacement, function_of

if TYPE_CHECKING:
    import torch

COMPARE = "_tied_params_are_equal"
_memcmp = ctypes.CDLL(None).memcmp  # without the GIL
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def surely_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether these are found equal by their bytes; False says nothing. Reads both once, and one of
    them again."""
    import torch

    for tensor in (one, other):
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not plain or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return False
    floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if one.dtype != other.dtype or one.dtype not in floats or one.shape != other.shape:
        return False
    if not one.numel() or _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes):
        return False
    least = one.detach().aminmax().min  # a NaN, if there is one
    return bool(least == least)


def replacements_of_ties(module: ModuleType, wanted: Callable[[], object]) -> Iterator[Replacement]:
    """What is replaced in `transformers.modeling_utils`, for callers for whom `wanted()` is not
    None. A transformers before 5.23 may have no such function, and calls torch itself."""
    compare = function_of(module, COMPARE, "source", "target")

    @functools.wraps(compare)
    def compared(source: Any, target: Any) -> Any:
        if wanted() is not None and surely_equal(source, target):
            return True
        return compare(source, target)

    yield Replacement(module, COMPARE, compared)
