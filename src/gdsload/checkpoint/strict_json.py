"""Parses JSON as strictly as the parser of safetensors, at the speed of Python's C parser.

An object is returned as a tuple of (key, value) pairs, an array as a list. So the two cannot be
confused, a key given twice is noticed, and no Python code runs while C parses.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from gdsload.errors import shown
from gdsload.system.available import require_room

_DEPTH_LIMIT = 127  # nested arrays and objects; safetensors refuses the 128th
_DIGITS_LIMIT = 4300  # of an integer: the default limit of Python
_NUMBER_LIMIT = 1e308  # parsers disagree about overflow just above it


class FormatError(Exception):
    """A fault in a file. The caller adds the names of the file and the tensor."""


def repeated(keys: Iterable[str]) -> str:
    """The first key that occurs a second time; "" if none does."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return ""


def unique(pairs: Sequence[tuple[str, Any]], fault: str) -> dict[str, Any]:
    """A dict of the pairs. Raises FormatError, which begins with `fault`, for a repeated key."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise FormatError(f"{fault} {shown(repeated(key for key, _ in pairs))} twice")
    return found


def check_value(value: Any, *, depth: int = 0) -> None:
    """Checks depth, keys and number ranges of a value that is otherwise ignored.

    `depth` is the number of arrays and objects around `value`. Raises FormatError.
    """
    pending = [(value, depth)]
    while pending:
        found, around = pending.pop()
        kind = type(found)
        if kind is list or kind is tuple:
            if around >= _DEPTH_LIMIT:
                raise FormatError("its JSON is nested deeper than 127 levels")
            if kind is tuple:
                found = unique(found, "in its JSON an object has the key").values()
            pending.extend((inner, around + 1) for inner in found)
        elif (kind is int or kind is float) and not -_NUMBER_LIMIT <= found <= _NUMBER_LIMIT:
            raise FormatError("its JSON holds a number out of range")


def _no_constant(text: str) -> Any:
    raise FormatError(f"its JSON holds {text}, which JSON does not have")


def _exact_int(text: str) -> int | float:
    if len(text) > _DIGITS_LIMIT:
        raise ValueError
    return -0.0 if text == "-0" else int(text)  # safetensors reads -0 as a float


# strict=True refuses raw control characters in strings.
_decoder = partial(
    json.JSONDecoder, object_pairs_hook=tuple, parse_constant=_no_constant, strict=True
)
_DECODER = _decoder()
_SLOW_DECODER = _decoder(parse_int=_exact_int)
# Compiled at their first use: it takes up to 1 ms each, which the first load would pay for.
_MAYBE_MINUS_ZERO = rb"[\[,:\s]-0"
_STRING = rb'(?s)"(?:[^"\\]|\\.)*"'
_NO_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))
_SAFE_RECURSION = 10_000  # levels of the C parser that fit into the smallest usual stack
_CHECKED_BYTES = 4 << 20  # parsing shorter JSON takes 150 MB at most
# Bytes of the objects that a parser makes for each of these characters, at most; of a header with a
# million tensors 1.3 times what it takes.
_OBJECT_BYTES = {b"[": 88, b"{": 64, b",": 44, b":": 80, b'"': 30}
_SURROGATE_ESCAPE = rb"\\u[dD][89a-fA-F]"


def strict_json(raw: bytes, path: str = "it") -> Any:
    """Parses JSON in strict UTF-8; `path` is for messages.

    Raises FormatError, or PlacementError if the machine has too little memory to parse it.

    Depth, repeated keys and number ranges of ignored values are checked by `check_value`.
    """
    require_room_to_parse(raw, path)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"its JSON is not UTF-8 (byte {error.start})") from None
    # A substring search first, here and below: it costs almost nothing.
    slow = b"-0" in raw and re.search(_MAYBE_MINUS_ZERO, raw) is not None
    # The host program may have raised the two limits of the interpreter that guard the C parser.
    slow = slow or not 0 < getattr(sys, "get_int_max_str_digits", int)() <= _DIGITS_LIMIT
    if sys.getrecursionlimit() > _SAFE_RECURSION and _is_deep(raw):
        raise FormatError("its JSON is nested deeper than 127 levels")
    try:
        value = (_SLOW_DECODER if slow else _DECODER).decode(text)
        if b"\\u" in raw and re.search(_SURROGATE_ESCAPE, raw):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise FormatError(f"its JSON is broken at character {error.pos}: {error.msg}") from None
    except UnicodeEncodeError as error:
        context = error.object[max(error.start - 20, 0) : error.end + 20]
        raise FormatError(f"its JSON holds a lone surrogate in {shown(context)}") from None
    except RecursionError:
        raise FormatError("its JSON is nested deeper than 127 levels") from None
    except ValueError:  # Python converts no integer of more than 4,300 digits
        raise FormatError("its JSON holds an integer with thousands of digits") from None
    return value


def require_room_to_parse(raw: bytes, path: str) -> None:
    """Raises PlacementError if the machine has too little memory to parse this JSON."""
    if len(raw) > _CHECKED_BYTES:
        require_room(parsed_bytes(raw), f"bytes of memory are needed to parse {path}")


def parsed_bytes(raw: bytes) -> int:
    """The bytes of memory that `strict_json` takes at most; for hostile JSON 40 times its size."""
    text = len(raw) if raw.isascii() else 4 * len(raw)
    return text + sum(raw.count(char) * size for char, size in _OBJECT_BYTES.items())


def _is_deep(raw: bytes) -> bool:
    """Whether brackets nest too deep. Without recursion: each round removes the innermost."""
    rest = re.sub(_STRING, b"", raw) if b"\\" in raw else raw
    rest = rest.translate(None, _NO_STRUCTURE).replace(b'""', b"")
    rest = re.sub(_STRING, b"", rest)
    for _ in range(_DEPTH_LIMIT):
        before, rest = len(rest), rest.replace(b"[]", b"").replace(b"{}", b"")
        if len(rest) == before:
            break
    return rest.count(b"[") + rest.count(b"{") > _DEPTH_LIMIT or b"[]" in rest or b"{}" in rest
