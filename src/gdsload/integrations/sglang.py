"""A plugin of SGLang: its default loader, with safetensors files read by gdsload.

SGLang calls `register`, an entry point, in each of its processes. Without the environment variable
GDSLOAD_SGLANG nothing happens: "1" turns the reading on, a JSON object gives its options as well.
Which files are read, prefixes, filters, quantization and reloading stay SGLang's.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gdsload.integrations.engine_weights import WeightsReader, is_first_rank, with_reader

if TYPE_CHECKING:
    import torch

VARIABLE = "GDSLOAD_SGLANG"
_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator"
# SGLang's functions that read safetensors files: with several threads, and without.
_ITERATORS = (
    "buffered_multi_thread_safetensors_weights_iterator",
    "multi_thread_safetensors_weights_iterator",
    "safetensors_weights_iterator",
)
log = logging.getLogger("sglang.gdsload")  # SGLang shows what is logged below its own name


def register() -> None:
    """Adds the hook to SGLang's registry, if GDSLOAD_SGLANG asks for it.

    The hook raises ValueError if the variable has no such value or an option in it is unknown:
    SGLang logs errors that are raised here, and would read by itself.
    """
    if (text := os.environ.get(VARIABLE, "").strip()) in ("", "0"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Hooks of other plugins run around one that replaces the function, in whatever order they are
    # registered.
    HookRegistry.register(_LOADER, _Hook(text), HookType.REPLACE)


def options_of(text: str) -> dict[str, Any]:
    """The options in a value of the environment variable."""
    if text == "1":
        return {}
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text!r} is neither 0, 1 nor JSON: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f"{VARIABLE}={text!r} is neither 0, 1 nor a JSON object")
    return options


class _Hook:
    """Instead of `DefaultModelLoader._get_weights_iterator`. `text`: the value of the variable."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __call__(self, loader: Any, source: Any, *arguments: Any, **keywords: Any) -> Any:
        from sglang.srt.model_loader.loader import DefaultModelLoader

        reader = WeightsReader(options_of(self._text))
        stock = inspect.unwrap(DefaultModelLoader._get_weights_iterator)
        called = False

        def read(files: Sequence[str], *_: Any, **__: Any) -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal called
            called = True
            return reader.read(files, _device(), log, progress=is_first_rank())

        format_ = getattr(loader.load_config.load_format, "value", loader.load_config.load_format)
        if format_ not in ("auto", "safetensors", "mistral"):
            return stock(loader, source, *arguments, **keywords)  # asked for another reader
        weights = with_reader(stock, _ITERATORS, read)(loader, source, *arguments, **keywords)
        if not called:
            log.warning(
                "gdsload: %s has no safetensors files: SGLang reads it itself", source.model_or_path
            )
        return weights


def _device() -> str:
    """The current GPU; "cpu" where there is none of NVIDIA."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}"
