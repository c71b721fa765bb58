"""Tied parameters that a checkpoint holds twice: transformers ties them only if they are equal.

It compares them after the load. Here a thread compares them as soon as both are loaded, while other
tensors are being loaded, and when transformers asks, its own thread helps. They are compared as
bytes, several times as fast as floats. Only equality is taken from it; about any other pair
transformers decides by itself.

    pair   a target and its source, by the names of the model's parameters
    twins  a pair that is cast from bfloat16 to float32: the later one in the file is compared with
           the earlier one while it is read, and takes no memory if it is equal (`parameter_writer`)
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from gdsload._native.compare import FORMATS, Comparison
from gdsload.dtypes import known_dtype
from gdsload.integrations.transformers import module_callbacks
from gdsload.system.threads import start_thread

if TYPE_CHECKING:
    import torch
    from torch.utils.weak import WeakTensorKeyDictionary

# transformers asks it, since version 5.23.
TIED_EQUAL = "_tied_params_are_equal"


@cache
def _formats() -> dict[torch.dtype | None, str]:
    return {known_dtype(name): name for name in FORMATS}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes in host memory are all there is to know of it."""
    import torch

    is_own = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_neg()
    return is_own and tensor.device.type == "cpu" and tensor.is_contiguous()


def _comparison(one: torch.Tensor, other: torch.Tensor) -> Comparison | None:
    """A comparison that has not begun; None if only torch can compare them."""
    if not (_is_plain(one) and _is_plain(other)):
        return None
    dtype = _formats().get(one.dtype)
    if dtype is None or one.dtype != other.dtype or one.shape != other.shape:
        return None
    addresses = one.data_ptr(), other.data_ptr()
    if any(address % one.itemsize for address in addresses):
        return None
    return Comparison(*addresses, one.nbytes, dtype)


def _is_unloaded(model: Any, name: str) -> bool:
    try:
        return bool(model.get_parameter(name).is_meta)
    except AttributeError:
        return False


def asked_pairs(model: Any) -> list[tuple[str, str]]:
    """The pairs whose equality transformers will ask for if the checkpoint holds both: none of a
    model that is complete, which an adapter is loaded to. The code of others may write to one of
    them before that."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if not (hasattr(modeling, TIED_EQUAL) and type(model).__module__.startswith("transformers.")):
        return []
    pairs = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    return [pair for pair in pairs if all(_is_unloaded(model, name) for name in pair)]


def twin_pairs(model: Any) -> list[tuple[str, str]]:
    """The pairs that transformers will surely tie if they are equal, and of which nobody writes to
    one alone before that."""
    if module_callbacks.has_own_ties(model) or module_callbacks.in_effect.get() is not None:
        return []
    pairs = asked_pairs(model)
    uses = Counter(name for pair in pairs for name in pair)
    return [pair for pair in pairs if all(uses[name] == 1 for name in pair)]


def _compare(comparison: Comparison, *_storages: torch.UntypedStorage) -> None:
    """What the thread does. It holds the memory that is compared: a tensor may get other memory."""
    comparison.work()


class _Work:
    """The comparison of two tensors. It begins at once, in a thread."""

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self._comparison = _comparison(one, other)
        self._thread = None
        if self._comparison is not None:
            storages = one.untyped_storage(), other.untyped_storage()
            compare = partial(_compare, self._comparison, *storages)
            self._thread = start_thread(compare, "gdsload-compare")

    def equal(self) -> bool:
        """True if both, which are still there, have the same bytes and no NaN. False proves
        nothing."""
        if self._comparison is None:
            return False
        self._comparison.work()
        if self._thread is not None:
            self._thread.join()
        return self._comparison.equal


class _Pair:
    """A target and its source, two plain tensors, which are being compared."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        from torch.utils.weak import TensorWeakRef

        self._source = TensorWeakRef(source)
        self._state = _state(source, target)
        # No other memory gets their addresses.
        self._storages = source.untyped_storage(), target.untyped_storage()
        # Twins have one memory, and no NaN.
        are_twins = source.nbytes > 0 and source.data_ptr() == target.data_ptr()
        self._work = None if are_twins else _Work(source, target)

    def is_of(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Whether these are the tensors that are compared, and nobody has written to them."""
        return self._source() is source and self._state == _state(source, target)

    def equal(self) -> bool:
        """As of `_Work`."""
        return self._work is None or self._work.equal()


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
            _pairs()[target] = _Pair(source, target)


@cache
def _pairs() -> WeakTensorKeyDictionary:
    """By target, until transformers asks for it."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def tied_equal(source: torch.Tensor, target: torch.Tensor) -> bool:
    """True if two parameters have the same bytes and no NaN; False proves nothing."""
    pair: _Pair | None = _pairs().pop(target, None)  # type: ignore[no-untyped-call]
    if pair is not None and pair.is_of(source, target):
        return pair.equal()
    return _Work(source, target).equal()


def _state(source: torch.Tensor, target: torch.Tensor) -> tuple[int, ...]:
    """What changes with each write to the tensors, and if they get other memory."""
    return source._version, target._version, source.data_ptr(), target.data_ptr()
