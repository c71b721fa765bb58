"""Invalid headers, one row each, and valid headers of unusual form."""

from __future__ import annotations

import json
import re
import sys
import tracemalloc
from pathlib import Path

import pytest
import safetensors

import gdsload
from gdsload.checkpoint import Checkpoint
from gdsload.checkpoint.header import Header, header_length, parse_header, read_weight_map
from gdsload.checkpoint.strict_json import parsed_bytes, strict_json
from gdsload.dtypes import DTYPES
from gdsload.errors import CheckpointError, PlacementError
from gdsload.system import available

U8 = '"dtype":"U8","shape":[4],"data_offsets":[0,4]'
ONE = "{" + U8 + "}"


def fill(template: str, *parts: str) -> str:
    for part in parts:
        template = template.replace("%s", part, 1)
    return template


def one(dtype: str, shape: str, offsets: str, more: str = "") -> str:
    return f'{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}{more}}}}}'


def extra(value: str) -> str:
    return fill('{"w":{%s,"note":%s}}', U8, value)


def parse(text: str | bytes, data: int) -> Header:
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return parse_header(raw, 8 + len(raw) + data, path="f.safetensors")


def theirs_accepts(text: str | bytes, data: int) -> bool:
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        safetensors.deserialize(len(raw).to_bytes(8, "little") + raw + bytes(data))
    except safetensors.SafetensorError:
        return False
    return True


BIG = str(2**32)
INVALID: list[tuple[str, str | bytes, int, str]] = [
    # JSON
    ("nothing", b"", 0, "begins with zeros only"),
    ("no object", "[]", 0, "not a JSON object"),
    ("null", "null", 0, "not a JSON object"),
    ("a string", '"x"', 0, "not a JSON object"),
    ("cut", '{"w":', 0, "broken at character 5"),
    ("not utf-8", b'{"\xff":' + ONE.encode() + b"}", 4, "not UTF-8 (byte 2)"),
    ("raw surrogate", fill('{"\ud800":%s}', ONE), 4, "not UTF-8"),
    ("escaped surrogate", fill('{"\\ud800":%s}', ONE), 4, "lone surrogate"),
    (
        "surrogate in metadata",
        fill('{"__metadata__":{"a":"\\uDfff"},"w":%s}', ONE),
        4,
        "lone surrogate",
    ),
    ("bom", "\ufeff{}", 0, "broken at character 0"),
    ("trailing NUL", "{}\0", 0, "broken at character 2"),
    ("trailing text", "{}x", 0, "broken at character 2"),
    ("vertical tab", "\v{}", 0, "broken at character 0"),
    ("no-break space", "{}\u00a0", 0, "broken at character 2"),
    ("control character", fill('{"a\x01":%s}', ONE), 4, "control character"),
    ("comma at the end", fill('{"w":%s,}', ONE), 4, "broken at character"),
    ("NaN", extra("NaN"), 4, "NaN"),
    ("Infinity", extra("-Infinity"), 4, "-Infinity"),
    ("overflowing float", extra("1e999"), 4, "number out of range"),
    ("400 digits", extra("9" * 400), 4, "number out of range"),
    ("5,000 digits", extra("9" * 5000), 4, "thousands of digits"),
    ("5,000 digits in the shape", one("U8", f"[{'9' * 5000}]", "[0,4]"), 4, "thousands of digits"),
    ("128 levels", extra("[" * 126 + "]" * 126), 4, "deeper than 127"),
    ("100,000 levels", extra("[" * 100_000 + "]" * 100_000), 4, "deeper than 127"),
    ("100,000 levels as dtype", fill('{"w":{"dtype":%s', "[" * 100_000), 4, "deeper than 127"),
    # names and fields
    ("name twice", fill('{"w":%s,"w":%s}', ONE, ONE), 4, "'w': the header names it twice"),
    ("name twice, once escaped", fill('{"w":%s,"\\u0077":%s}', ONE, ONE), 4, "names it twice"),
    ("field twice", fill('{"w":{%s,"dtype":"U8"}}', U8), 4, "'w': it has the field 'dtype' twice"),
    ("three fields, one twice", '{"w":{"dtype":"U8","dtype":"U8","shape":[4]}}', 4, "twice"),
    ("extra field twice", fill('{"w":{%s,"x":1,"x":2}}', U8), 4, "the field 'x' twice"),
    ("key twice inside an extra field", extra('{"x":1,"x":2}'), 4, "the key 'x' twice"),
    ("no dtype", '{"w":{"shape":[4],"data_offsets":[0,4]}}', 4, "'w': it has no dtype"),
    ("no shape", '{"w":{"dtype":"U8","data_offsets":[0,4]}}', 4, "it has no shape"),
    ("no offsets", '{"w":{"dtype":"U8","shape":[4]}}', 4, "it has no data_offsets"),
    (
        "another field than dtype",
        fill('{"w":{%s}}', U8.replace("dtype", "type")),
        4,
        "has no dtype",
    ),
    (
        "another field than shape",
        fill('{"w":{%s}}', U8.replace("shape", "dims")),
        4,
        "has no shape",
    ),
    (
        "another field than offsets",
        fill('{"w":{%s}}', U8.replace("data_", "")),
        4,
        "has no data_of",
    ),
    ("tensor is null", '{"w":null}', 0, "'w': its entry in the header is not a JSON object"),
    ("tensor is a string", '{"w":"abc"}', 0, "not a JSON object"),
    ("tensor is empty", '{"w":{}}', 0, "it has no dtype"),
    ("array of two", '{"w":["U8",[4]]}', 4, "it is an array of 2"),
    ("array of four", '{"w":["U8",[4],[0,4],0]}', 4, "it is an array of 4"),
    (
        "array of pairs",
        '{"w":[["dtype","U8"],["shape",[4]],["data_offsets",[0,4]]]}',
        4,
        "its dtype an array is not one",
    ),
    # __metadata__
    ("metadata is a list", '{"__metadata__":[]}', 0, "__metadata__ is not a JSON object"),
    ("metadata of a number", '{"__metadata__":{"a":1}}', 0, "'a' to something that is not a str"),
    ("metadata of null", '{"__metadata__":{"a":null}}', 0, "'a' to something that is not a str"),
    ("metadata key twice", '{"__metadata__":{"a":"","a":""}}', 0, "the key 'a' twice"),
    ("metadata twice", '{"__metadata__":{},"__metadata__":{}}', 0, "__metadata__ twice"),
    # dtype
    ("unknown dtype", one("F33", "[1]", "[0,4]"), 4, "its dtype 'F33' is not one"),
    ("lower-case dtype", one("u8", "[4]", "[0,4]"), 4, "its dtype 'u8' is not one"),
    ("dtype null", '{"w":{"dtype":null,"shape":[4],"data_offsets":[0,4]}}', 4, "dtype null"),
    ("dtype number", '{"w":{"dtype":1,"shape":[4],"data_offsets":[0,4]}}', 4, "dtype 1 is"),
    (
        "dtype map",
        '{"w":{"dtype":{"U8":null},"shape":[4],"data_offsets":[0,4]}}',
        4,
        "dtype an object is",
    ),
    # shape
    ("shape null", one("U8", "null", "[0,0]"), 0, "its shape is not an array"),
    ("shape object", one("U8", "{}", "[0,1]"), 1, "its shape is not an array"),
    ("shape string", one("U8", '""', "[0,1]"), 1, "its shape is not an array"),
    ("negative", one("U8", "[-1]", "[0,4]"), 4, "its shape holds -1"),
    ("two negatives", one("U8", "[-2,-2]", "[0,4]"), 4, "its shape holds -2"),
    ("minus zero", one("U8", "[-0]", "[0,0]"), 0, "its shape holds -0.0"),
    ("spaced minus zero", one("U8", "[ 0,\n-0]", "[0,0]"), 0, "its shape holds -0.0"),
    ("float", one("U8", "[4.0]", "[0,4]"), 4, "its shape holds 4.0"),
    ("exponent", one("U8", "[4e0]", "[0,4]"), 4, "its shape holds 4.0"),
    ("true", one("U8", "[true]", "[0,1]"), 1, "its shape holds true"),
    ("string", one("U8", '["4"]', "[0,4]"), 4, "its shape holds '4'"),
    ("nested", one("U8", "[[4]]", "[0,4]"), 4, "its shape holds an array"),
    ("2**64", one("U8", f"[0,{2**64}]", "[0,0]"), 0, f"its shape holds {2**64}"),
    ("4,000 digits", one("U8", f"[{'9' * 4000}]", "[0,4]"), 4, "not an unsigned 64-bit integer"),
    ("overflow", one("U8", f"[{BIG},{BIG}]", "[0,0]"), 0, "overflows 64 bits"),
    ("overflow before a zero", one("U8", f"[{BIG},{BIG},0]", "[0,0]"), 0, "overflows 64 bits"),
    ("overflow in bits", one("F64", f"[{2**58}]", f"[0,{2**61}]"), 0, "bits overflows 64 bits"),
    ("largest product", one("U8", f"[{2**64 - 1}]", "[0,0]"), 0, "number of its bits overflows"),
    ("many twos", one("U8", f"[{','.join(['2'] * 100_000)}]", "[0,0]"), 0, "overflows 64 bits"),
    (
        "dimension of 64 bits beside a zero",
        one("U8", f"[0,{2**64 - 1}]", "[0,0]"),
        0,
        "beyond 63 bits",
    ),
    ("2**63 before a zero", one("U8", f"[{2**63},0]", "[0,0]"), 0, "beyond 63 bits"),
    ("product beside a zero", one("F32", f"[0,{BIG},{BIG}]", "[0,0]"), 0, "beyond 63 bits"),
    ("half a byte", one("F4", "[3]", "[0,2]"), 2, "do not end at a whole byte"),
    ("six bits", one("F6_E2M3", "[3]", "[0,3]"), 3, "do not end at a whole byte"),
    # offsets
    ("offsets null", one("U8", "[0]", "null"), 0, "not an array of two"),
    ("offsets object", one("U8", "[0]", '{"a":0,"b":0}'), 0, "not an array of two"),
    ("one offset", one("U8", "[0]", "[0]"), 0, "not an array of two"),
    ("three offsets", one("U8", "[0]", "[0,0,0]"), 0, "not an array of two"),
    ("negative offset", one("U8", "[4]", "[-4,0]"), 0, "data_offsets hold -4 and 0"),
    ("minus zero offset", one("U8", "[4]", "[-0,4]"), 4, "data_offsets hold -0.0 and 4"),
    ("float offset", one("U8", "[4]", "[0,4.0]"), 4, "data_offsets hold 0 and 4.0"),
    ("false offset", one("U8", "[4]", "[false,4]"), 4, "data_offsets hold false and 4"),
    ("huge offset", one("U8", "[4]", f"[{2**64},{2**64 + 4}]"), 4, "unsigned 64-bit"),
    (
        "largest offsets",
        one("U8", "[0]", f"[{2**64 - 1},{2**64 - 1}]"),
        0,
        f"at byte {2**64 - 1} of the data, {2**64 - 1} bytes after the end of the header: a gap",
    ),
    ("4,299 digits", one("U8", "[4]", f"[{'9' * 4299},{'9' * 4299}]"), 4, "unsigned 64-bit"),
    ("end before begin", one("U8", "[0]", "[4,0]"), 4, "end at 0, before they begin at 4"),
    ("no bytes", one("U8", "[4]", "[4,4]"), 4, "[4, 4] hold 0 bytes, but its shape and dtype (U8)"),
    ("too few bytes", one("F32", "[4]", "[0,4]"), 4, "hold 4 bytes, but its shape and dtype (F32)"),
    ("too many bytes", one("U8", "[2]", "[0,4]"), 4, "hold 4 bytes, but its shape and dtype (U8)"),
    ("a gap at the start", one("U8", "[4]", "[4,8]"), 8, "4 bytes after the end of the header"),
    (
        "a gap",
        fill('{"a":%s,"b":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}}', ONE),
        6,
        "'b': its data begins at byte 5 of the data, 1 bytes after the end of tensor 'a': a gap",
    ),
    (
        "an overlap",
        fill('{"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]},"a":%s}', ONE),
        7,
        "'b': its data begins at byte 3 of the data, 1 bytes before the end of tensor 'a'",
    ),
    ("the same bytes twice", fill('{"a":%s,"b":%s}', ONE, ONE), 4, "an overlap"),
    (
        "nothing, amid a tensor",
        fill('{"a":%s,"z":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}}', ONE),
        4,
        "'z': its data begins at byte 2",
    ),
    ("truncated", fill('{"w":%s}', ONE), 3, "truncated: its header promises"),
    ("trailing", fill('{"w":%s}', ONE), 5, "1 trailing bytes"),
    ("trailing, no tensor", "{}", 1, "1 trailing bytes"),
]


@pytest.mark.parametrize(
    "text,data,fragment", [row[1:] for row in INVALID], ids=[r[0] for r in INVALID]
)
def test_invalid_header_raises(text: str | bytes, data: int, fragment: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(text, data)
    message = str(caught.value)
    assert fragment in message
    assert message.startswith("f.safetensors: ")
    assert len(message) < 600
    assert "\n" not in message
    assert caught.value.path == "f.safetensors"
    named = re.match(r"f\.safetensors: tensor '(.*?)': ", message)
    assert caught.value.tensor == (named[1] if named else None)


@pytest.mark.parametrize(
    ("text", "data", "message"),
    [
        ("null", 0, "its header is not a JSON object"),
        ('{"__metadata__":{},"__metadata__":{}}', 0, "its header has __metadata__ twice"),
        ('{"__metadata__":[]}', 0, "its __metadata__ is not a JSON object"),
        (
            '{"__metadata__":{"a":1}}',
            0,
            "its __metadata__ maps 'a' to something that is not a string",
        ),
        ('{"w":%s,"w":%s}', 4, "tensor 'w': the header names it twice"),
        ('{"w":null}', 0, "tensor 'w': its entry in the header is not a JSON object"),
        (
            '{"w":["U8",[4]]}',
            4,
            "tensor 'w': it is an array of 2, not of dtype, shape and data_offsets",
        ),
        (one("u8", "[4]", "[0,4]"), 4,
         "tensor 'w': its dtype 'u8' is not one that safetensors knows"),
        ('{"w":{"dtype":[],"shape":[4],"data_offsets":[0,4]}}', 4,
         "tensor 'w': its dtype an array is not one that safetensors knows"),
        ('{"w":{"dtype":{},"shape":[4],"data_offsets":[0,4]}}', 4,
         "tensor 'w': its dtype an object is not one that safetensors knows"),
        ('{"w":{"dtype":false,"shape":[4],"data_offsets":[0,4]}}', 4,
         "tensor 'w': its dtype false is not one that safetensors knows"),
        (one("U8", "{}", "[0,1]"), 1, "tensor 'w': its shape is not an array"),
        (one("U8", "[-1]", "[0,4]"), 4,
         "tensor 'w': its shape holds -1, not an unsigned 64-bit integer"),
        (one("U8", f"[{BIG},{BIG}]", "[0,0]"), 0,
         "tensor 'w': the product of its shape overflows 64 bits"),
        (one("U8", f"[{2**63},0]", "[0,0]"), 0,
         "tensor 'w': its shape has a zero and, without it, a product beyond 63 bits"),
        (one("U16", f"[{2**60}]", f"[0,{2**61}]"), 0,
         "tensor 'w': the number of its bits overflows 64 bits"),
        (one("F4", "[3]", "[0,2]"), 2, "tensor 'w': its 12 bits (F4) do not end at a whole byte"),
        (one("U8", "[0]", "[0]"), 0, "tensor 'w': its data_offsets is not an array of two"),
        (one("U8", "[4]", f"[0,{2**64}]"), 4,
         f"tensor 'w': its data_offsets hold 0 and {2**64}, not two unsigned 64-bit integers"),
        (one("U8", "[4]", "[4,0]"), 4,
         "tensor 'w': its data_offsets end at 0, before they begin at 4"),
        (one("F32", "[4]", "[0,4]"), 4,
         "tensor 'w': its data_offsets [0, 4] hold 4 bytes, but its shape and dtype (F32) need 16"),
        (one("U8", "[4]", "[4,8]"), 8,
         "tensor 'w': its data begins at byte 4 of the data, 4 bytes after the end of the header:"
         " a gap"),
        ('{"a":%s,"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}}', 7,
         "tensor 'b': its data begins at byte 3 of the data, 1 bytes before the end of tensor 'a':"
         " an overlap"),
    ],
    ids=range(23),
)  # fmt: skip
def test_fault_of_a_header_is_one_sentence(text: str, data: int, message: str) -> None:
    text = fill(text, ONE, ONE)
    with pytest.raises(CheckpointError) as caught:
        parse(text, data)
    assert str(caught.value) == f"f.safetensors: {message}"


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (3, "1 bytes are missing, the file is truncated"),
        (6, "the file has 2 trailing bytes that belong to no tensor"),
    ],
)
def test_file_of_another_size_than_its_header_promises_raises(data: int, fault: str) -> None:
    size = 8 + len(one("U8", "[4]", "[0,4]"))
    with pytest.raises(CheckpointError) as caught:
        parse(one("U8", "[4]", "[0,4]"), data)
    assert str(caught.value) == (
        f"f.safetensors: {fault}: its header promises {size + 4} bytes, it has {size + data}"
    )
    assert caught.value.tensor is None


def test_parsed_header_has_tensors_in_the_order_of_the_data_and_metadata() -> None:
    text = fill('{"b":{"data_offsets":[4,6],"dtype":"I16","shape":[1],"x":0},"a":%s,', ONE)
    text += '"__metadata__":{"format":"pt"}}'
    raw = text.encode()
    header = parse_header(raw, 14 + len(raw), path="f", shard=3)
    start = 8 + len(raw)
    assert list(header.tensors.values()) == [
        ("a", "U8", (4,), 3, start, 4),
        ("b", "I16", (1,), 3, start + 4, 2),
    ]
    assert header.metadata == {"format": "pt"}
    assert parse("{}", 0) == ({}, None)


def test_largest_numbers_of_a_header_are_accepted_up_to_the_size_of_the_file() -> None:
    text = one("U8", f"[{2**61 - 1}]", f"[0,{2**61 - 1}]").encode()
    (info,) = parse_header(text, 8 + len(text) + 2**61 - 1, path="f").tensors.values()
    assert info.nbytes == 2**61 - 1


# Refused by gdsload but not by safetensors: listed in the docstring of the module.
STRICTER = {
    "name twice",
    "name twice, once escaped",
    "extra field twice",
    "key twice inside an extra field",
    "metadata key twice",
    "dtype map",
    "dimension of 64 bits beside a zero",
    "2**63 before a zero",
    "product beside a zero",
}


@pytest.mark.parametrize("row", INVALID, ids=[row[0] for row in INVALID])
def test_invalid_header_is_refused_by_safetensors_too(
    row: tuple[str, str | bytes, int, str],
) -> None:
    assert theirs_accepts(row[1], row[2]) == (row[0] in STRICTER)


VALID: list[tuple[str, str, int]] = [
    ("no tensor", "{}", 0),
    ("white space", " \t\r\n{}\r\n ", 0),
    ("metadata null", '{"__metadata__":null}', 0),
    ("metadata", fill('{"w":%s,"__metadata__":{"format":"pt","":""}}', ONE), 4),
    ("as an array", '{"w":["U8",[4],[0,4]]}', 4),
    ("other order", '{"w":{"data_offsets":[0,4],"shape":[4],"dtype":"U8"}}', 4),
    ("escaped field", '{"w":{"\\u0064type":"U8","shape":[4],"data_offsets":[0,4]}}', 4),
    ("extra fields", extra('[1,-0,2.5e3,null,true,{"y":{}},"\\ud83d\\ude00"]'), 4),
    ("127 levels", extra("[" * 125 + "]" * 125), 4),
    ("empty name", fill('{"":%s}', ONE), 4),
    ("NUL in the name", fill('{"\\u0000":%s}', ONE), 4),
    ("a pair of surrogates", fill('{"\\ud83d\\ude00":%s}', ONE), 4),
    ("escaped backslash", fill('{"\\\\ud800":%s}', ONE), 4),
    ("-0 in a name", fill('{"a,-0":%s}', ONE), 4),
    ("a scalar", one("F64", "[]", "[0,8]"), 8),
    ("zero before a large product", one("U8", f"[0,{BIG},{2**30}]", "[0,0]"), 0),
    ("largest extent", one("U8", f"[0,{2**63 - 1}]", "[0,0]"), 0),
    ("100,000 dimensions", one("U8", f"[{','.join(['1'] * 100_000)}]", "[0,1]"), 1),
    ("half bytes in pairs", one("F4", "[3,2]", "[0,3]"), 3),
    (
        "any order, empty ones between",
        '{"a":' + ONE + ',"c":{"dtype":"U8","shape":[2],"data_offsets":[4,6]},'
        '"z":{"dtype":"U8","shape":[0],"data_offsets":[4,4]},'
        '"y":{"dtype":"F32","shape":[0,9],"data_offsets":[6,6]}}',
        6,
    ),
]


@pytest.mark.parametrize("text,data", [row[1:] for row in VALID], ids=[row[0] for row in VALID])
def test_unusual_valid_header_is_parsed(text: str, data: int) -> None:
    header = parse(text, data)
    assert theirs_accepts(text, data)
    start = 8 + len(text.encode())
    position = start
    for name, info in header.tensors.items():
        assert info.name == name
        assert info.offset == position
        position += info.nbytes
    assert position == start + data


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_each_dtype_is_parsed(dtype: object) -> None:
    name, bits = dtype[:2]  # type: ignore[index]
    text = one(name, "[2,4]", f"[0,{bits}]")
    (info,) = parse(text, bits).tensors.values()
    assert info == ("w", name, (2, 4), 0, 8 + len(text), bits)
    assert theirs_accepts(text, bits)


def test_raised_interpreter_limits_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)
    try:
        for text in (extra("[" * 200_000 + "]" * 200_000), extra('[{"[]":' * 200_000), "[" * 128):
            with pytest.raises(CheckpointError, match="deeper than 127"):
                parse(text, 4)
        for _, text, data in VALID:
            assert parse(text, data) is not None
    finally:
        sys.setrecursionlimit(before)
    monkeypatch.setattr(sys, "get_int_max_str_digits", lambda: 0, raising=False)
    with pytest.raises(CheckpointError, match="thousands of digits"):
        parse(extra("9" * 4301), 4)


FOREIGN: list[tuple[bytes, str]] = [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git-lfs pointer"),
    (b"<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
    (b"\n  <html lang=en><head></head></html>", "HTML page"),
    (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML answer"),
    (b"PK\x03\x04" + bytes(60), "zip archive"),
    (b"\x1f\x8b\x08\x00" + b"\x01" * 60, "gzip"),
    (b"\x80\x02}q\x00" + b"\x01" * 60, "pickle"),
    (b"GGUF\x03\x00\x00\x00" + b"\x01" * 60, "GGUF"),
    (b"\x28\xb5\x2f\xfd" + b"\x01" * 60, "zstd"),
    (b"\x89HDF\r\n\x1a\n" + b"\x01" * 60, "HDF5 file"),
    (b"\x93NUMPY\x01\x00" + b"\x01" * 60, "NumPy file"),
    (b"<Error><Code>NoSuchKey</Code></Error>", "XML answer"),
    (b'{"weight_map": {}}', "bare JSON"),
    (b'{\n  "weight_map": {}}', "bare JSON"),
    (bytes(64), "begins with zeros only"),
    (b"", "the file is empty"),
    (b"\x02\x00\x00", "3 bytes, too few"),
    (b"\xff" * 8, "claims 18446744073709551615 bytes, but the file has only 8"),
    (b"\x09" + bytes(7) + b"{}", "claims 9 bytes, but the file has only 10"),
]


@pytest.mark.parametrize("data,fragment", FOREIGN, ids=[row[1] for row in FOREIGN])
def test_file_of_another_format_is_named(data: bytes, fragment: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        length = header_length(data, len(data), path="f.safetensors")
        parse_header(data[8 : 8 + length], len(data), path="f.safetensors")
    assert fragment in str(caught.value)
    assert str(caught.value).startswith("f.safetensors: ")
    assert caught.value.path == "f.safetensors"


@pytest.mark.parametrize(
    ("size", "limit", "fault"),
    [
        (0, 100, "the file is empty"),
        (7, 100, "the file has 7 bytes, too few for a safetensors header"),
        (
            107,
            100,
            "its header claims 100 bytes, but the file has only 107: it is truncated, or not a"
            " safetensors file",
        ),
        (
            108,
            99,
            "its header claims 100 bytes, more than the limit of 99 (header_limit raises it)",
        ),
    ],
)
def test_header_that_cannot_be_read_has_its_fault(size: int, limit: int, fault: str) -> None:
    head = (100).to_bytes(8, "little") + b"[]"
    assert header_length(head, 108, path="f", limit=100) == 100
    assert header_length(head[:8], 108, path="f", limit=100) == 100
    with pytest.raises(CheckpointError) as caught:
        header_length(head[:size], size, path="f", limit=limit)
    assert str(caught.value) == f"f: {fault}"
    assert caught.value.path == "f"


def test_smallest_file_has_an_empty_header() -> None:
    assert header_length(bytes(8), 8, path="f") == 0
    assert header_length((100_000_000).to_bytes(8, "little"), 1 << 40, path="f") == 100_000_000
    with pytest.raises(CheckpointError, match="more than the limit of 100000000 "):
        header_length((100_000_001).to_bytes(8, "little"), 1 << 40, path="f")


def test_length_that_looks_like_another_format_is_accepted() -> None:
    text = b"{}" + b" " * (0x8B1F - 2)
    head = len(text).to_bytes(8, "little")
    assert head.startswith(b"\x1f\x8b")
    assert header_length(head + text, 8 + len(text), path="f") == len(text)
    assert parse_header(text, 8 + len(text), path="f").tensors == {}


NO_MAP = "it has no weight_map object, so it is not an index of a checkpoint"
DEEP = "its JSON is nested deeper than 127 levels"
INDEX_INVALID: list[tuple[bytes, str]] = [
    (b"", "its JSON is broken at character 0: Expecting value"),
    (b"[]", "it is not a JSON object"),
    (b"{}", NO_MAP),
    (b'{"weight_map":null}', NO_MAP),
    (b'{"weight_map":["a"]}', NO_MAP),
    (b'{"weight_map":{}}', "its weight_map is empty"),
    (b'{"weight_map":{"w":1}}', "its weight_map maps 'w' to something that is not a string"),
    (b'{"weight_map":{"w":null}}', "its weight_map maps 'w' to something that is not a string"),
    (b'{"weight_map":{"w":"a","w":"a"}}', "its weight_map has the key 'w' twice"),
    (b'{"weight_map":{"w":"a"},"weight_map":{"w":"a"}}', "it has the key 'weight_map' twice"),
    (
        b'{"metadata":{"a":1,"a":2},"weight_map":{"w":"a"}}',
        "in its JSON an object has the key 'a' twice",
    ),
    (
        b'{"metadata":{"a":NaN},"weight_map":{"w":"a"}}',
        "its JSON holds NaN, which JSON does not have",
    ),
    (
        b'{"weight_map":{"w":"\\ud800"}}',
        'its JSON holds a lone surrogate in \'eight_map", [["w", "\\ud800"]]]]\'',
    ),
    (b'{"weight_map":{"\xff":"a"}}', "its JSON is not UTF-8 (byte 16)"),
    (b'{"weight_map":{"w":"a"}}x', "its JSON is broken at character 24: Extra data"),
    (b'{"metadata":' + b"[" * 100_000, DEEP),
    (b'{"metadata":' + b"[" * 127 + b"]" * 127 + b',"weight_map":{"w":"a"}}', DEEP),
]


@pytest.mark.parametrize("raw,fault", INDEX_INVALID, ids=range(len(INDEX_INVALID)))
def test_invalid_index_raises(raw: bytes, fault: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_weight_map(raw, path="i.json")
    assert str(caught.value) == f"i.json: {fault}"
    assert caught.value.path == "i.json"


def test_index_with_metadata_of_any_depth_up_to_the_limit_is_read() -> None:
    raw = b'{"metadata":' + b"[" * 126 + b"]" * 126 + b',"weight_map":{"w":"a"}}'
    assert read_weight_map(raw, path="i") == {"w": "a"}


def test_index_that_needs_more_memory_than_there_is_names_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(available, "available_bytes", lambda *_: available.SPARE_BYTES)
    with pytest.raises(PlacementError, match=r"needed to parse i\.json and "):
        read_weight_map(b'{"weight_map":{"w":"' + b"a" * (4 << 20) + b'"}}', path="i.json")


def test_index_without_metadata_is_read() -> None:
    raw = b'{"weight_map":{"b":"x.safetensors","a":"x.safetensors"}}'
    assert list(read_weight_map(raw, path="i")) == ["b", "a"]


@pytest.mark.parametrize("shape", [f"[0,{2**63 - 1}]", f"[0,{BIG},{2**30}]", f"[{2**63 - 1},0]"])
def test_largest_shapes_of_empty_tensors_are_loaded(tmp_path: Path, shape: str) -> None:
    text = one("F32", shape, "[0,0]").encode()
    path = tmp_path / "empty.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    assert list(gdsload.load_file(path)["w"].shape) == json.loads(shape)


HOSTILE = {
    "nested lists": b"[[[0]]],",
    "lists": b"[0],",
    "empty lists": b"[],",
    "objects": b'{"":0},',
    "strings": b'[""],',
    "wide characters": b'"ab",' * 50 + '"\U0001f600",'.encode(),
    "numbers": b"999,",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_memory_of_hostile_json_is_below_its_estimate(kind: str) -> None:
    raw = b'{"a":[' + HOSTILE[kind] * (20_000 // len(HOSTILE[kind])) + b"0]}"
    tracemalloc.start()
    try:
        strict_json(raw)
        assert tracemalloc.get_traced_memory()[1] < parsed_bytes(raw)
    finally:
        tracemalloc.stop()


def test_header_that_needs_more_memory_than_there_is_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(available, "available_bytes", lambda *_: 100 << 20)
    raw = b'{"w":[' + b"0," * (3 << 20) + b"0]}"
    with pytest.raises(PlacementError, match=r"needed to parse f and [0-9,]+ are kept") as caught:
        parse_header(raw, 8 + len(raw), path="f")
    assert caught.value.missing_bytes > 0


def test_many_tensors_open_in_memory_bounded_by_the_header(tmp_path: Path) -> None:
    count = 20_000
    entries = (
        f'"model.layers.{i // 1000}.mlp.experts.{i % 1000}.w.weight":'
        f'{{"dtype":"BF16","shape":[1,2],"data_offsets":[{4 * i},{4 * i + 4}]}}'
        for i in range(count)
    )
    text = "{" + ",".join(entries) + "}"
    path = tmp_path / "many.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(4 * count))
    tracemalloc.start()
    try:
        with Checkpoint.open(path) as checkpoint:
            assert len(checkpoint.tensors) == count
        assert tracemalloc.get_traced_memory()[1] < 13 * len(text)
    finally:
        tracemalloc.stop()


def test_metadata_of_null_is_none_as_for_safetensors(tmp_path: Path) -> None:
    text = b'{"__metadata__":null,"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    with safetensors.safe_open(path, "np") as expected, gdsload.safe_open(path, "np") as opened:
        assert opened.metadata() is None is expected.metadata()
    with pytest.raises(CheckpointError, match="__metadata__ twice"):
        parse_header(b'{"__metadata__":null,"__metadata__":{}}', 100, path="f", shard=0)
