"""A model by transformers alone and the same through gdsload, and whether the two are one.

transformers before 5.15 cannot do all that is tested here, with or without gdsload: it leaves
buffers uninitialised, cannot build some architectures, and some of its forward passes fail on a
newer torch. Where it fails alone, ours has to fail alike; newer ones have to succeed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import gdsload
import tinymodels
from windows import small_windows

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
NEW = VERSION >= (5, 0)
FIRST = "hook" if NEW else "safe_open"
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
    """Skips the test, with the error as the reason, if an old transformers fails in the block."""
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
        with small_windows(), gdsload.accelerated(cache="buffered"):
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
    assert gdsload.last_report().integration == path
    assert tinymodels.differences(stock, ours) == []
    require_same_answers(stock, ours)


def names_replaced() -> list[Any]:
    """Whatever gdsload may replace, as it is now."""
    import accelerate.utils.modeling
    import safetensors.torch
    from transformers import modeling_utils

    found = [
        transformers.PreTrainedModel.__dict__["_load_pretrained_model"],
        modeling_utils.safe_open,
        accelerate.utils.modeling.safe_open,
        accelerate.utils.modeling.safe_load_file,
        safetensors.torch.load_file,
    ]
    if NEW:
        from transformers import core_model_loading as loading

        found += [
            loading.deepcopy,
            loading.rename_source_key,
            loading.dot_natural_key,
            loading.is_env_variable_true,
        ]
    return found


def open_files(under: Path) -> list[str]:
    """The files below a directory that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [name for name in found if name.startswith(str(under))]
