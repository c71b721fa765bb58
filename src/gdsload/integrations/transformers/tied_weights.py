"""Tied parameters that a checkpoint holds twice: transformers ties them only if they are equal.

It compares them after the load. Here they are compared as soon as both are loaded: the rest is read
meanwhile. They are compared as bytes, several times as fast as floats. Only equality is taken from
it; about any other pair transformers decides by itself.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

# transformers asks it, since version 5.23.
ASKED = "_tied_params_are_equal"

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors of one size have the same bytes: in half the time of
    torch.equal, also if it compares integers."""
    return not _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)


def surely_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors have the same bytes and no NaN; False proves nothing."""
    import torch

    for tensor in (one, other):
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_neg()
        if not plain or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return False
    floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if one.dtype != other.dtype or one.dtype not in floats or one.shape != other.shape:
        return False
    # A sum takes a small part of the time of a search for NaN.
    return equal_bytes(one, other) and not one.detach().sum().isnan()


class _Equality(NamedTuple):
    """What a target was equal to, and when."""

    source: TensorWeakRef
    versions: tuple[int, int]


class TiedWeights:
    """The tied parameters of one model that is being loaded."""

    def __init__(self, model: Any = None) -> None:
        """Compares nothing yet, and never if transformers would not ask."""
        self._model = model
        self._pairs: dict[str, list[tuple[str, str]]] = {}  # source and target, by both names
        if not hasattr(sys.modules.get("transformers.modeling_utils"), ASKED):
            return
        for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
            for name in (source, target):
                self._pairs.setdefault(name, []).append((source, target))

    def parameter_set(self, name: str) -> None:
        """Compares a parameter that was loaded with those that were loaded before."""
        for pair in self._pairs.pop(name, ()):
            if pair[0] in self._pairs or pair[1] in self._pairs:
                continue  # the other one is not loaded yet
            try:
                source, target = map(self._model.get_parameter, pair)
            except AttributeError:  # transformers deals with it
                continue
            if source.is_inference() or target.is_inference():  # nobody counts their writes
                continue
            if surely_equal(source, target):
                _note_equal(source, target)


@cache
def _equalities() -> WeakTensorKeyDictionary:
    """Of targets, until transformers asks for them."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def _note_equal(source: torch.Tensor, target: torch.Tensor) -> None:
    from torch.utils.weak import TensorWeakRef

    _equalities()[target] = _Equality(TensorWeakRef(source), _versions(source, target))


def tied_equal(source: torch.Tensor, target: torch.Tensor) -> bool:
    """True if two parameters have the same bytes and no NaN; False proves nothing."""
    known: _Equality | None = _equalities().pop(target, None)  # type: ignore[no-untyped-call]
    if known is None or known.source() is not source:
        return surely_equal(source, target)
    return known.versions == _versions(source, target) or surely_equal(source, target)


def _versions(source: torch.Tensor, target: torch.Tensor) -> tuple[int, int]:
    """They change with each write to the tensors."""
    return source._version, target._version
