"""Comparison with safetensors: equal results for valid files, and never more permissive."""

from __future__ import annotations

import json
from typing import Any

import numpy
import safetensors
from hypothesis import HealthCheck, example, given, settings, strategies as st
from safetensors.numpy import save

from gdsload.checkpoint.header import LENGTH_BYTES, Header, header_length, parse_header
from gdsload.checkpoint.strict_json import FormatError, check_value, strict_json
from gdsload.dtypes import DTYPES
from gdsload.errors import CheckpointError

QUICK = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def ours(file: bytes) -> Header | None:
    """The header as parsed by gdsload, None if it is refused. Other exceptions fail the test."""
    try:
        length = header_length(file, len(file), path="f")
        return parse_header(file[LENGTH_BYTES : LENGTH_BYTES + length], len(file), path="f")
    except CheckpointError:
        return None


def theirs(file: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    try:
        found = safetensors.deserialize(file)
    except safetensors.SafetensorError:
        return None
    return {name: (it["dtype"], it["shape"], bytes(it["data"])) for name, it in found}


def file_of(header: str, data: bytes) -> bytes:
    raw = header.encode("utf-8", "surrogatepass")
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw + data


def assert_same(
    file: bytes, header: Header, expected: dict[str, tuple[str, list[int], bytes]]
) -> None:
    assert header.tensors.keys() == expected.keys()
    for name, info in header.tensors.items():
        data = file[info.offset : info.offset + info.nbytes]
        assert (info.dtype, list(info.shape), data) == expected[name]


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """An honest header without offsets, in any order."""
    found: dict[str, dict[str, Any]] = {}
    for name in draw(st.lists(names, max_size=6, unique=True)):
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        shape = draw(st.lists(st.integers(0, 5), max_size=4))
        if dtype.bits % 8:
            shape.append(8)
        found[name] = {"dtype": dtype.name, "shape": shape}
    return found


def laid_out(draw: st.DrawFn, found: dict[str, dict[str, Any]]) -> int:
    """Gives each tensor its offsets, in an order of its own; the bytes that all take."""
    position = 0
    for name in draw(st.permutations(sorted(found))):
        bits = DTYPES[found[name]["dtype"]].bits
        for extent in found[name]["shape"]:
            bits *= extent
        found[name]["data_offsets"] = [position, position + bits // 8]
        position += bits // 8
    return position


@st.composite
def honest_files(draw: st.DrawFn) -> tuple[bytes, dict[str, str] | None]:
    found = draw(tensors())
    size = laid_out(draw, found)
    metadata = draw(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), names))
    header: dict[str, Any] = dict(found)
    if metadata or draw(st.booleans()):
        header["__metadata__"] = metadata
    text = json.dumps(
        header, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1]))
    )
    padding = draw(st.text(" \n\t\r", max_size=9))
    data = bytes(number % 251 for number in range(size))
    return file_of(padding + text + padding, data), header.get("__metadata__")


@QUICK
@given(honest_files())
def test_honest_files_are_read_as_safetensors_reads_them(
    case: tuple[bytes, dict[str, str]],
) -> None:
    file, metadata = case
    header, expected = ours(file), theirs(file)
    assert header is not None
    assert expected is not None
    assert_same(file, header, expected)
    assert header.metadata == metadata
    ends = [(info.offset, info.offset + info.nbytes) for info in header.tensors.values()]
    assert ends == sorted(ends)


@QUICK
@given(tensors(), st.dictionaries(names, names, max_size=3))
def test_files_that_safetensors_writes(
    found: dict[str, dict[str, Any]], metadata: dict[str, str]
) -> None:
    plain = {
        name: {
            "dtype": "uint8",
            "shape": it["shape"],
            "data": bytes(1 if not it["shape"] else _product(it["shape"])),
        }
        for name, it in found.items()
    }
    if not found:  # safetensors 0.8 writes no tensors and metadata as '{},"__metadata__":...'
        metadata = {}
    file = _serialized(plain, metadata or None)
    header, expected = ours(file), theirs(file)
    assert header is not None
    assert expected is not None
    assert_same(file, header, expected)
    assert header.metadata == (metadata or None)


def _product(shape: list[int]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def _serialized(plain: dict[str, dict[str, Any]], metadata: dict[str, str] | None) -> bytes:
    arrays = {
        name: numpy.frombuffer(it["data"], dtype=numpy.uint8).reshape(it["shape"])
        for name, it in plain.items()
    }
    return bytes(save(arrays, metadata))


NUMBERS = "0 1 -0 -1 4 4.0 1e0 true null [4] {} NaN 01 1e999"
STRINGS = (
    """"U8" "F32" "F4" "F6_E3M2" "F64" "X" "u8" "" 1 null [] {} {"U8":null} "\\u00558" "\\ud800\""""
)
EDGES = [str(2**63), str(2**64 - 1), str(2**64), str(2**32), "9" * 30, "9" * 400, '"4"']
numbers = st.sampled_from(NUMBERS.split() + EDGES) | st.integers(0, 9).map(str)
strings = st.sampled_from(STRINGS.split())
arrays = st.lists(numbers, max_size=4).map(lambda items: "[" + ",".join(items) + "]")
keys = st.sampled_from(
    ["dtype", "shape", "data_offsets", "note", "__metadata__", "a", "b", "\\u0061", "\\ud800", ""]
)
shapes = arrays | numbers
values = st.recursive(
    numbers | strings | arrays,
    lambda inner: st.lists(st.tuples(keys, inner), max_size=3).map(
        lambda pairs: "{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}"
    ),
    max_leaves=5,
)


@st.composite
def liars(draw: st.DrawFn) -> bytes:
    """A header that is mostly in order, with a few things swapped for worse ones."""
    found = draw(tensors())
    size = laid_out(draw, found)
    entries = []
    for name, it in found.items():
        fields = {key: json.dumps(value) for key, value in it.items()}
        if draw(st.booleans()):
            field = draw(st.sampled_from(["dtype", "shape", "data_offsets", "note"]))
            fields[field] = draw({"dtype": strings, "note": values}.get(field, shapes))
        pairs = list(fields.items())
        if draw(st.integers(0, 9)) == 0:
            pairs.append((draw(keys), draw(values)))
        if draw(st.integers(0, 9)) == 0:
            del pairs[draw(st.integers(0, len(pairs) - 1))]
        entry = "{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}"
        if draw(st.integers(0, 9)) == 0:
            entry = "[" + ",".join(value for _, value in pairs) + "]"
        entries.append(f"{json.dumps(name)}:{entry}")
    if draw(st.integers(0, 4)) == 0:
        entries.append(f'"{draw(keys)}":{draw(values)}')
    text = "{" + ",".join(entries) + "}"
    size += draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
    return file_of(text, bytes(max(0, size)))


@settings(QUICK, max_examples=700)
@given(liars())
def test_never_accepts_what_safetensors_refuses(file: bytes) -> None:
    header = ours(file)
    if header is not None:
        expected = theirs(file)
        assert expected is not None
        assert_same(file, header, expected)


@settings(QUICK, max_examples=700)
@given(honest_files(), st.data())
def test_bytes_changed_at_random(case: tuple[bytes, dict[str, str]], data: st.DataObject) -> None:
    file = bytearray(case[0])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(file) - 1)))
        action = data.draw(st.sampled_from(["set", "insert", "delete"]))
        byte = data.draw(
            st.sampled_from(list(b'0123456789-+.eE[]{},:"\\ ud\x00\x01\x1f\x7f\x80\xff'))
        )
        if action == "insert":
            file.insert(at, byte)
        elif action == "set" and file:
            file[at] = byte
        elif file:
            del file[at]
    length = data.draw(st.booleans())
    if length and len(file) >= LENGTH_BYTES:  # so that more than the length itself is judged
        end = bytes(file).rfind(b"}") + 1
        file[:LENGTH_BYTES] = max(0, end - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    header = ours(bytes(file))
    if header is not None:
        expected = theirs(bytes(file))
        assert expected is not None
        assert_same(bytes(file), header, expected)


@QUICK
@given(st.binary(max_size=40))
@example(b"\x00" * 8)
@example(b"\x02" + b"\x00" * 7 + b"{}")
def test_any_bytes(file: bytes) -> None:
    if ours(file) is not None:
        assert theirs(file) is not None


@QUICK
@given(st.text(alphabet='{}[]",:0123456789-.eEtrufalsn \\d8', max_size=30))
def test_json_is_never_looser_than_json(text: str) -> None:
    try:
        value = strict_json(text.encode())
        check_value(value)
    except FormatError:
        return
    json.loads(text)
    header = '{"w":{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":' + text + "}}"
    assert theirs(file_of(header, b"1")) is not None
