"""The order in which a model uses its tensors, as far as their names tell."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdsload.checkpoint import TensorInfo


# What comes before the first layer: embeddings of tokens and places, and what images begin with.
_FIRST = re.compile(r"(^|\.)(embed|wte|wpe|word_emb|position_emb|tok_emb|patch_emb|conv1)")
_DIGITS = re.compile(r"(\d+)")


def in_layers(infos: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Embeddings, then layer after layer, then the rest (norms and heads), each in natural order.

    Of several stacks of layers an encoder comes before a decoder. It is a guess from names: right
    for what a caller may do early, never needed for what it gets in the end.
    """
    return sorted(infos, key=lambda info: _place(info.name))


def _place(name: str) -> tuple[int, int, list[tuple[int, int, str]]]:
    parts = name.split(".")
    natural = [
        (0, int(word), "") if word.isdecimal() else (1, 0, word)
        for part in parts
        for word in _DIGITS.split(part)
        if word
    ]
    decoder = int("decoder" in parts)
    if any(part.isdecimal() for part in parts):
        return 1, decoder, natural
    return (0 if _FIRST.search(name) else 2), decoder, natural
