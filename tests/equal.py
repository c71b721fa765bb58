"""A model by transformers alone and the same through gdsload, and whether the two are one.

transformers before 5.15 cannot do all that is tested here, with or without gdsload: it leaves
buffers uninitialised, cannot build some architectures, and some of its forward passes fail on a
newer torch. Where it fails alone, ours has to fail alike; newer ones have to succeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers

import gdsload
import tinymodels

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
NEW = VERSION >= (5, 0)
FIRST = "seam" if NEW else "safe_open"
IS_SURE = VERSION >= (5, 15)


@contextmanager
def nothing_uninitialised() -> Iterator[None]:
    """Inside, whatever transformers leaves uninitialised is NaN, and equal in two models."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def by_transformers_alone() -> Iterator[None]:
    """Skips the test, in its own words, where an old transformers cannot do what stands inside."""
    try:
        yield
    except Exception as error:
        if IS_SURE:
            raise
        words = str(error).strip().splitlines() or [""]
        pytest.skip(f"transformers {transformers.__version__} alone: {words[-1].strip()}")


def both(source: Any, *, auto: Any = None, **words: Any) -> tuple[Any, Any]:
    """A model by transformers alone, and the same through gdsload."""
    auto = auto or transformers.AutoModelForCausalLM
    with nothing_uninitialised():
        torch.manual_seed(0)  # what a checkpoint lacks is initialised at random
        stock = auto.from_pretrained(source, **words)
        torch.manual_seed(0)
        with gdsload.accelerated(cache="buffered", window_bytes=8192, ahead_bytes=16384):
            ours = gdsload.from_pretrained(source, cls=auto, **words)
    return stock, ours


def require_same_answers(stock: Any, ours: Any) -> None:
    """A forward pass gives the same bits."""
    try:
        wanted = tinymodels.answers(stock)
    except (RuntimeError, ValueError) as error:
        if IS_SURE:
            raise
        with pytest.raises(type(error)):
            tinymodels.answers(ours)
        return
    for one, other in zip(wanted, tinymodels.answers(ours), strict=True):
        assert tinymodels.same_bytes(one, other)


def require_same(stock: Any, ours: Any, path: str = FIRST) -> None:
    """The two are equal, and ours came by `path`."""
    assert gdsload.last_report().path == path
    assert tinymodels.differences(stock, ours) == []
    require_same_answers(stock, ours)
