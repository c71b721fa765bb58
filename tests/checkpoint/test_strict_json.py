"""JSON as objects of pairs: what is refused, where, and with which words."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from gdsload.checkpoint.strict_json import (
    FormatError,
    check_value,
    parsed_bytes,
    repeated,
    strict_json,
    unique,
)
from gdsload.errors import PlacementError
from gdsload.system import available

DEEP = "its JSON is nested deeper than 127 levels"
LONG = "its JSON holds an integer with thousands of digits"


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def test_objects_are_pairs_and_arrays_are_lists() -> None:
    raw = b'{"a": [1, -0, {"b": null}], "a": {}, "c": [-0.5, 12]}'
    value = strict_json(raw)
    assert value == (("a", [1, 0, (("b", None),)]), ("a", ()), ("c", [-0.5, 12]))
    assert type(value[0][1][0]) is int and type(value[2][1][1]) is int
    zero = value[0][1][1]
    assert type(zero) is float and math.copysign(1, zero) == -1


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", "its JSON is broken at character 0: Expecting value"),
        (b'{"a" 1}', "its JSON is broken at character 5: Expecting ':' delimiter"),
        ("ü[}".encode(), "its JSON is broken at character 0: Expecting value"),
        (b"[1]\xff", "its JSON is not UTF-8 (byte 3)"),
        (b'["\xed\xa0\x80"]', "its JSON is not UTF-8 (byte 2)"),
        (b"[NaN]", "its JSON holds NaN, which JSON does not have"),
        (b"[-Infinity]", "its JSON holds -Infinity, which JSON does not have"),
        (b"[" + b"9" * 4301 + b"]", LONG),
        (b"[-0," + b"9" * 4301 + b"]", LONG),
        (b"[" * 100_000, DEEP),
        (
            b'["' + b"a" * 30 + b"\\ud800" + b"b" * 30 + b'"]',
            "its JSON holds a lone surrogate in '" + "a" * 20 + "\\ud800" + "b" * 20 + "'",
        ),
        (b'["\\uDFFF"]', "its JSON holds a lone surrogate in '[\"\\udfff\"]'"),
    ],
    ids=range(12),
)
def test_invalid_json_raises_its_fault(raw: bytes, fault: str) -> None:
    with pytest.raises(FormatError) as caught:
        strict_json(raw)
    assert str(caught.value) == fault


@pytest.mark.parametrize(
    "raw",
    [
        b"[" + b"9" * 4300 + b"]",
        b"[-0," + b"9" * 4300 + b"]",
        b'["\\ud83d\\ude00 \\u00e9 \\\\ud800"]',
        b'{"\xf0\x9f\x98\x80": 1}',
        nested(127).encode(),
    ],
    ids=["4,300 digits", "4,300 digits beside -0", "pairs", "utf-8", "127 levels"],
)
def test_unusual_json_is_parsed_like_by_json(raw: bytes) -> None:
    import json

    assert strict_json(raw) == json.loads(raw, object_pairs_hook=tuple)


def test_depth_is_counted_without_recursion_if_the_limit_was_raised() -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10_001)
    try:
        for text in (nested(127), '{"a":' * 127 + "1" + "}" * 127, '["[[", "\\"[", {}]', '"]"'):
            strict_json(text.encode())
        wide = "[" + ",".join([nested(126)] * 3) + "]"
        assert len(strict_json(wide.encode())) == 3
        many = "[" + ",".join(['["[", "a", {"]": 1}, 2]'] * 200) + "]"
        assert len(strict_json(many.encode())) == 200
        for text in (nested(128), '{"a":' * 128 + "1" + "}" * 128, "[" * 128, '{"\\"":' * 128):
            with pytest.raises(FormatError) as caught:
                strict_json(text.encode())
            assert str(caught.value) == DEEP
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.skipif(not hasattr(sys, "set_int_max_str_digits"), reason="this Python has no limit")
@pytest.mark.parametrize("digits", [0, 4301, 100_000])
def test_digits_are_counted_if_the_limit_was_raised(digits: int) -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(digits)
    try:
        assert strict_json(b"[12]") == [12]
        assert strict_json(b"[" + b"9" * 4300 + b"]") == [10**4300 - 1]
        with pytest.raises(FormatError) as caught:
            strict_json(b"[" + b"9" * 4301 + b"]")
    finally:
        sys.set_int_max_str_digits(before)
    assert str(caught.value) == LONG


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ([[1e308, -1e308, 10**308, -(10**308), 0]], ""),
        ([1.01e308], "its JSON holds a number out of range"),
        (-1.01e308, "its JSON holds a number out of range"),
        ([[], (("a", 10**309),)], "its JSON holds a number out of range"),
        (-(10**309), "its JSON holds a number out of range"),
        ((("a", 1), ("b", (("c", 1), ("c", 2)))), "in its JSON an object has the key 'c' twice"),
        ((("a", 1), ("a", 2)), "in its JSON an object has the key 'a' twice"),
        ([True, None, "1e999", "x" * 5000], ""),
    ],
)
def test_ignored_value_is_checked(value: Any, fault: str) -> None:
    if not fault:
        check_value(value)
        return
    with pytest.raises(FormatError) as caught:
        check_value(value)
    assert str(caught.value) == fault


@pytest.mark.parametrize("kind", [list, tuple])
def test_ignored_value_is_checked_to_its_depth(kind: type) -> None:
    value: Any = kind()
    for _ in range(126):
        value = [value] if kind is list else (("a", value),)
    check_value(value)
    for deeper in ([value], (("a", value),)):
        with pytest.raises(FormatError) as caught:
            check_value(deeper)
        assert str(caught.value) == DEEP
    with pytest.raises(FormatError):
        check_value(value, depth=1)
    check_value([value[0] if kind is list else value[0][1]], depth=0)
    check_value(1, depth=1000)


def test_key_that_occurs_twice_first_is_named() -> None:
    assert repeated(["a", "b", "b", "a"]) == "b"
    assert repeated(["a", "b"]) == ""
    assert unique([("a", 1), ("b", 2)], "it has") == {"a": 1, "b": 2}
    with pytest.raises(FormatError) as caught:
        unique([("a", 1), ("b", 2), ("b", 3), ("a", 4)], "it has the key")
    assert str(caught.value) == "it has the key 'b' twice"


def test_estimate_counts_text_and_objects() -> None:
    assert parsed_bytes(b"12") == 2
    assert parsed_bytes("ü".encode()) == 4 * 2
    assert parsed_bytes(b'{"a":[1,2]}') == 11 + 64 + 2 * 30 + 80 + 88 + 44


def test_room_is_required_for_long_json_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "available_bytes", lambda *_: available.SPARE_BYTES)
    short = b" " * ((4 << 20) - 1) + b"1"
    assert strict_json(short) == 1
    with pytest.raises(PlacementError) as caught:
        strict_json(b" " + short, "f.json")
    assert str(caught.value).startswith("4,194,305 bytes of memory are needed to parse f.json and ")
    assert caught.value.missing_bytes == (4 << 20) + 1
