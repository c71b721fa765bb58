"""Tied parameters that a checkpoint holds twice: transformers ties them only if they are equal.

It compares them after the load. Here a thread compares them as soon as both are loaded, while other
tensors are being loaded. They are compared as bytes, several times as fast as floats. Only equality
is taken from it; about any other pair transformers decides by itself.

    pair   a target and its source, by the names of the model's parameters
    twins  a pair that is cast from bfloat16 to float32: the later one in the file is compared with
           the earlier one while it is read, and takes no memory if it is equal (`parameter_writer`)
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from gdsload.integrations.transformers import module_callbacks
from gdsload.system.threads import start_thread

if TYPE_CHECKING:
    import torch
    from torch.utils.weak import WeakTensorKeyDictionary

# transformers asks it, since version 5.23.
TIED_EQUAL = "_tied_params_are_equal"

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors of one size have the same bytes: in half the time of
    torch.equal, also if it compares integers."""
    return not _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes in host memory are all there is to know of it."""
    import torch

    is_own = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_neg()
    return is_own and tensor.device.type == "cpu" and tensor.is_contiguous()


def surely_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors have the same bytes and no NaN; False proves nothing."""
    import torch

    if not (_is_plain(one) and _is_plain(other)):
        return False
    floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if one.dtype != other.dtype or one.dtype not in floats or one.shape != other.shape:
        return False
    # A sum takes a small part of the time of a search for NaN.
    return equal_bytes(one, other) and not one.detach().sum().isnan()


def asked_pairs(model: Any) -> list[tuple[str, str]]:
    """The pairs whose equality transformers will ask for if the checkpoint holds both. The code of
    others may write to one of them before that."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if not (hasattr(modeling, TIED_EQUAL) and type(model).__module__.startswith("transformers.")):
        return []
    return list((getattr(model, "all_tied_weights_keys", None) or {}).items())


def twin_pairs(model: Any) -> list[tuple[str, str]]:
    """The pairs that transformers will surely tie if they are equal, and of which nobody writes to
    one alone before that."""
    from transformers import PreTrainedModel

    others_tie = type(model).tie_weights is not PreTrainedModel.tie_weights
    if others_tie or module_callbacks.in_effect.get() is not None:
        return []
    pairs = asked_pairs(model)
    uses = Counter(name for pair in pairs for name in pair)
    return [pair for pair in pairs if all(uses[name] == 1 for name in pair)]


class _Comparison:
    """Whether a target and its source, two plain tensors, are equal. It takes a thread."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        from torch.utils.weak import TensorWeakRef

        self._source = TensorWeakRef(source)
        self._versions = _versions(source, target)
        self._equal: bool | None = None
        self._thread = None
        if source.nbytes and source.data_ptr() == target.data_ptr():  # twins, which have no NaN
            self._equal = True
        else:
            compare = partial(self._compare, source, target)
            self._thread = start_thread(compare, "gdsload-compare")

    def _compare(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._equal = surely_equal(source, target)

    def holds(self, source: torch.Tensor, target: torch.Tensor) -> bool | None:
        """Whether both are surely equal; None if they are other tensors than those that were
        compared, or were written to since then."""
        if self._source() is not source or self._versions != _versions(source, target):
            return None
        if self._thread is not None:
            self._thread.join()
        return self._equal


class TiedWeights:
    """The tied parameters of one model that is being loaded."""

    def __init__(self, model: Any = None) -> None:
        """Compares nothing yet, and never if transformers would not ask."""
        self._model = model
        self._pairs: dict[str, list[tuple[str, str]]] = {}  # source and target, by both names
        for target, source in asked_pairs(model):
            for name in (source, target):
                self._pairs.setdefault(name, []).append((source, target))

    def parameter_set(self, name: str) -> None:
        """Begins to compare a parameter that was loaded with those that were loaded before."""
        for pair in self._pairs.pop(name, ()):
            if pair[0] in self._pairs or pair[1] in self._pairs:
                continue  # the other one is not loaded yet
            try:
                source, target = map(self._model.get_parameter, pair)
            except AttributeError:  # transformers deals with it
                continue
            if source.is_inference() or target.is_inference():  # nobody counts their writes
                continue
            if not (_is_plain(source) and _is_plain(target)):
                continue
            _comparisons()[target] = _Comparison(source, target)


@cache
def _comparisons() -> WeakTensorKeyDictionary:
    """Of targets, until transformers asks for them."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def tied_equal(source: torch.Tensor, target: torch.Tensor) -> bool:
    """True if two parameters have the same bytes and no NaN; False proves nothing."""
    known: _Comparison | None = _comparisons().pop(target, None)  # type: ignore[no-untyped-call]
    equal = None if known is None else known.holds(source, target)
    return surely_equal(source, target) if equal is None else equal


def _versions(source: torch.Tensor, target: torch.Tensor) -> tuple[int, int]:
    """They change with each write to the tensors."""
    return source._version, target._version
