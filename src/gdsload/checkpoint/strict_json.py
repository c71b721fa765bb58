"""JSON read as strictly as safetensors' own parser reads it, and no slower than Python can.

An object arrives as a tuple of (key, value) pairs, an array as a list. So the two cannot be
mistaken for each other, a key given twice is still seen, and no Python runs while C parses.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from typing import Any

from gdsload.errors import shown

_DEPTH_LIMIT = 127  # arrays and objects inside each other; the 128th is refused, as by safetensors
_DIGITS_LIMIT = 4300  # of an integer: Python's own limit, where nobody has lifted it
_NUMBER_LIMIT = 1e308  # parsers disagree about what overflows just above it


class Lie(Exception):
    """What is wrong, said without the file and the tensor that its catcher knows."""


def twice_in(keys: Iterable[str]) -> str | None:
    """The first key that comes a second time, or None."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return None


def check_value(value: Any, *, depth: int = 0) -> None:
    """Holds what nobody reads to the same rules: depth, keys given once, numbers in range.

    `depth` is the number of arrays and objects around `value`. Raises Lie.
    """
    waiting = [(value, depth)]
    while waiting:
        found, around = waiting.pop()
        kind = type(found)
        if kind is list or kind is tuple:
            if around >= _DEPTH_LIMIT:
                raise Lie("its JSON is nested deeper than 127 levels")
            if kind is tuple:
                if (twice := twice_in(key for key, _ in found)) is not None:
                    raise Lie(f"its JSON has the key {shown(twice)} twice in one object")
                waiting.extend((inner, around + 1) for _, inner in found)
            else:
                waiting.extend((inner, around + 1) for inner in found)
        elif (kind is int or kind is float) and not -_NUMBER_LIMIT <= found <= _NUMBER_LIMIT:
            raise Lie("its JSON holds a number out of range")


def _no_constant(text: str) -> Any:
    raise Lie(f"its JSON holds {text}, which is no JSON")


def _exact_int(text: str) -> int | float:
    if len(text) > _DIGITS_LIMIT:
        raise ValueError
    return -0.0 if text == "-0" else int(text)  # -0 is no integer: safetensors reads it as a float


# strict=True is what refuses raw control characters in strings.
_DECODER = json.JSONDecoder(object_pairs_hook=tuple, parse_constant=_no_constant, strict=True)
_SLOW_DECODER = json.JSONDecoder(
    object_pairs_hook=tuple, parse_constant=_no_constant, strict=True, parse_int=_exact_int
)
_MAYBE_MINUS_ZERO = re.compile(rb"[\[,:\s]-0")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NO_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))
_SAFE_RECURSION = 10_000  # levels of the C parser that fit the smallest usual stack
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def strict_json(raw: bytes) -> Any:
    """`raw` as JSON in strict UTF-8, objects as tuples of pairs. Raises Lie.

    Depth, double keys and ranges inside values that nobody reads are left to `check_value`.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Lie(f"its JSON is not UTF-8 (byte {error.start})") from None
    # By plain substring first, here and below: that costs next to nothing where nothing is found.
    slow = b"-0" in raw and _MAYBE_MINUS_ZERO.search(raw) is not None
    # The host program may have lifted the two limits of the interpreter that guard the C parser.
    slow = slow or not 0 < getattr(sys, "get_int_max_str_digits", int)() <= _DIGITS_LIMIT
    if sys.getrecursionlimit() > _SAFE_RECURSION and _is_deep(raw):
        raise Lie("its JSON is nested deeper than 127 levels")
    try:
        value = (_SLOW_DECODER if slow else _DECODER).decode(text)
    except json.JSONDecodeError as error:
        raise Lie(f"its JSON is broken at character {error.pos}: {error.msg}") from None
    except RecursionError:
        raise Lie("its JSON is nested deeper than 127 levels") from None
    except ValueError:  # Python converts no integer of more than 4,300 digits
        raise Lie("its JSON holds an integer with thousands of digits") from None
    if b"\\u" in raw and _SURROGATE_ESCAPE.search(raw):
        _check_surrogates(value)
    return value


def _is_deep(raw: bytes) -> bool:
    """Whether brackets nest too deep, found without recursion: each round peels the innermost."""
    rest = _STRING.sub(b"", raw) if b"\\" in raw else raw
    rest = rest.translate(None, _NO_STRUCTURE).replace(b'""', b"")
    rest = _STRING.sub(b"", rest)
    for _ in range(_DEPTH_LIMIT):
        before, rest = len(rest), rest.replace(b"[]", b"").replace(b"{}", b"")
        if len(rest) == before:
            break
    return rest.count(b"[") + rest.count(b"{") > _DEPTH_LIMIT or b"[]" in rest or b"{}" in rest


def _check_surrogates(value: Any) -> None:
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if type(found) is str:
            try:
                found.encode()
            except UnicodeEncodeError:
                raise Lie(f"its JSON holds a lone surrogate in {shown(found)}") from None
        elif type(found) is list or type(found) is tuple:
            waiting.extend(found)
