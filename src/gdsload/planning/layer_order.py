"""The order in which a model uses its tensors, derived from their names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdsload.checkpoint import TensorInfo

# What precedes the first layer: embeddings of tokens and positions, and the first layer for images.
_FIRST = re.compile(r"(^|\.)(embed|wte|wpe|word_emb|position_emb|tok_emb|patch_emb|conv1)")
_DIGITS = re.compile(r"(\d+)")
_MOST_DIGITS = 18  # of a number


def in_layers(infos: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Sorts tensors: embeddings, then layer after layer, then the rest (norms and heads).

    An encoder precedes a decoder. The order is a guess from names: use it for what may be done
    early, never for what must be correct.
    """
    return sorted(infos, key=lambda info: _sort_key(info.name))


def _sort_key(name: str) -> tuple[int, bool, list[tuple[int, int, str]]]:
    parts = name.split(".")
    # Numbers are compared as numbers and precede words.
    natural = [
        # Python refuses to convert thousands of digits.
        (0, int(word), "") if word.isdecimal() and len(word) < _MOST_DIGITS else (1, 0, word)
        for part in parts
        for word in _DIGITS.split(part)
        if word
    ]
    group = 0 if _FIRST.search(name) else 2
    if any(part.isdecimal() for part in parts):
        group = 1
    return group, "decoder" in parts, natural
