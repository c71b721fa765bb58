"""Where transformers finds the adapter of a model. Not responsible for loading it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_WORDS = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
)  # fmt: skip


def adapter_config_of(source: str | os.PathLike[str], words: Mapping[str, Any]) -> str | None:
    """The path of the `adapter_config.json` that transformers finds; None if there is none.

    Args:
        source: A directory or a hub id.
        words: The keywords of from_pretrained. Those of `adapter_kwargs` come first.
    """
    from transformers.utils import find_adapter_config_file

    where = {name: words[name] for name in _WORDS if name in words}
    where |= words.get("adapter_kwargs") or {}
    with suppress(OSError, ValueError):
        found: str | None = find_adapter_config_file(str(source), **where)
        return found
    return None


def is_loaded_with(source: str | os.PathLike[str], words: Mapping[str, Any]) -> bool:
    """Whether transformers loads an adapter into the model of this source. It has looked for one
    already: nothing is downloaded."""
    from transformers.utils import is_peft_available

    if not is_peft_available():
        return False
    # An Auto class looks by these keywords, a class of models by all of them.
    own = {"adapter_kwargs": words.get("adapter_kwargs")}
    here = {"local_files_only": True, "force_download": False}
    return any(adapter_config_of(source, {**each, **here}) for each in (words, own))
