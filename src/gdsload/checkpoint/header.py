"""What the header of a safetensors file may say, and every lie it can tell.

    | N: u64, little endian | N bytes of JSON | tensor data, tiled without gap or overlap |

Pure functions over bytes and a file size; opening and reading is left to `checkpoint`. Whatever
safetensors refuses is refused here. Refused beyond that: a name or key given twice (there the last
one wins in silence), a dtype written as {"F32": null}, dimensions beside a zero that no tensor can
have, and in ignored extra fields lone surrogates, numbers of magnitude above 1e308 and integers too
long for Python to convert.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, NamedTuple

from gdsload.checkpoint.strict_json import Lie, check_value, strict_json, twice_in
from gdsload.dtypes import DTYPES
from gdsload.errors import CheckpointError, shown

HEADER_LIMIT_BYTES = 100_000_000  # what safetensors accepts
LENGTH_BYTES = 8
_U64, _I64 = 2**64 - 1, 2**63 - 1
_BITS = {name: dtype.bits for name, dtype in DTYPES.items()}
_FIELDS = ("dtype", "shape", "data_offsets")


class TensorInfo(NamedTuple):
    """Where one tensor lies: `nbytes` bytes at byte `offset` of the file of shard `shard`."""

    name: str
    dtype: str  # a key of DTYPES, e.g. "BF16"
    shape: tuple[int, ...]  # in elements
    shard: int  # index into Checkpoint.shards
    offset: int  # bytes from the start of the file, not of the data
    nbytes: int

    @property
    def place(self) -> tuple[int, int]:
        """What puts tensors in the order of the files: shard and offset."""
        return self.shard, self.offset


class Header(NamedTuple):
    """One parsed header. `tensors` is in the order of the data."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def header_length(head: bytes, size: int, *, path: str, limit: int = HEADER_LIMIT_BYTES) -> int:
    """N, the bytes of JSON after the first eight, from the first bytes of a file of `size` bytes.

    `head` is the file's first min(size, 8 or more) bytes. Raises CheckpointError when N is above
    `limit` or reaches past the end of the file, and says so when the file is something else.
    """
    if size == 0:
        raise CheckpointError(f"{path}: the file is empty", path=path)
    if size < LENGTH_BYTES:
        raise CheckpointError(
            f"{path}: the file has {size} bytes, too few for a safetensors header", path=path
        )
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if LENGTH_BYTES + length > size:
        raise CheckpointError(
            foreign(head, path)
            or f"{path}: its header claims {length} bytes, but the file has only {size}:"
            " it is truncated, or not a safetensors file",
            path=path,
        )
    if length > limit:
        raise CheckpointError(
            foreign(head, path)
            or f"{path}: its header claims {length} bytes, more than the limit of {limit}"
            " (header_limit raises it)",
            path=path,
        )
    return length


_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file it points to: `git lfs pull`"),
    (b"\x1f\x8b", "gzip data, not a safetensors file: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd data, not a safetensors file: unpack it first"),
    (b"PK\x03\x04", "a zip archive (as torch.save writes), not a safetensors file"),
    (b"\x80\x02", "a Python pickle, not a safetensors file"),
    (b"\x80\x03", "a Python pickle, not a safetensors file"),
    (b"\x80\x04", "a Python pickle, not a safetensors file"),
    (b"\x80\x05", "a Python pickle, not a safetensors file"),
    (b"GGUF", "a GGUF file, not a safetensors file"),
    (b"\x89HDF", "an HDF5 file, not a safetensors file"),
    (b"\x93NUMPY", "a NumPy file, not a safetensors file"),
)


def foreign(head: bytes, path: str) -> str | None:
    """What a file that failed as safetensors is instead, by its first bytes; None if unknown.

    Only for files that failed: the length of an honest header may look like any of these.
    """
    for signature, meaning in _SIGNATURES:
        if head.startswith(signature):
            return f"{path}: this is {meaning}"
    text = head.lstrip()[:15].lower()
    if text.startswith((b"<!doctype", b"<html", b"<head")):
        return f"{path}: this is an HTML page, not a safetensors file: the download went wrong"
    if text.startswith((b"<?xml", b"<error")):
        return f"{path}: this is an XML answer, not a safetensors file: the download went wrong"
    if text.startswith(b'{"') or re.match(rb"\{\s+\"", head):
        return f"{path}: this is bare JSON, not a safetensors file"
    if len(head) >= LENGTH_BYTES and not any(head):
        return f"{path}: it begins with zeros only: its download was never finished"
    return None


def parse_header(raw: bytes, size: int, *, path: str, shard: int = 0) -> Header:
    """The tensors and the metadata of a file of `size` bytes whose header's JSON is `raw`.

    Raises CheckpointError, naming the file and the tensor, for everything the format forbids.
    """
    data_start = LENGTH_BYTES + len(raw)
    prefix = len(raw).to_bytes(LENGTH_BYTES, "little")
    try:
        top = strict_json(raw)
        if type(top) is not tuple:
            raise Lie("its header is not a JSON object")
    except Lie as lie:
        message = foreign(prefix + raw[:512], path) or f"{path}: {lie}"
        raise CheckpointError(message, path=path) from None

    metadata: dict[str, str] | None = None
    tensors: dict[str, TensorInfo] = {}
    count = 0
    expected = 0  # where the next tensor begins if the header is in the order of the data
    in_order = True
    bits_of, make, kind, top_limit = _BITS, tuple.__new__, TensorInfo, _U64
    name = ""
    try:
        for name, fields in top:
            if name == "__metadata__":
                if metadata is not None:
                    raise Lie("its header has __metadata__ twice")
                metadata = _metadata(fields)
                continue
            count += 1
            # The writer's own form is unpacked in line; all others are the business of _fields.
            if type(fields) is tuple and len(fields) == 3:
                (first, dtype), (second, shape), (third, offsets) = fields
                if first != "dtype" or second != "shape" or third != "data_offsets":
                    dtype, shape, offsets = _fields(fields)
            else:
                dtype, shape, offsets = _fields(fields)
            if type(dtype) is not str or dtype not in bits_of:
                raise Lie(f"its dtype {_said(dtype)} is not one that safetensors knows")
            if type(shape) is not list:
                raise Lie("its shape is not an array")
            total = 1
            for extent in shape:
                if type(extent) is not int or not 0 <= extent <= top_limit:
                    raise Lie(f"its shape holds {_said(extent)}, not an unsigned 64-bit integer")
                total *= extent
                if total > top_limit:
                    raise Lie("the product of its shape overflows 64 bits")
            if not total:
                _require_possible(shape)
            total *= bits_of[dtype]
            if total > top_limit:
                raise Lie("the number of its bits overflows 64 bits")
            if total & 7:
                raise Lie(f"its {total} bits ({dtype}) do not end at a whole byte")
            total >>= 3
            if type(offsets) is not list or len(offsets) != 2:
                raise Lie("its data_offsets is not an array of two")
            begin, end = offsets
            if (
                type(begin) is not int
                or type(end) is not int
                or not (0 <= begin <= top_limit and 0 <= end <= top_limit)
            ):
                raise Lie(
                    f"its data_offsets hold {_said(begin)} and {_said(end)}, not two unsigned"
                    " 64-bit integers"
                )
            if end - begin != total:
                if end < begin:
                    raise Lie(f"its data_offsets end at {end}, before they begin at {begin}")
                raise Lie(
                    f"its data_offsets [{begin}, {end}] hold {end - begin} bytes, but its shape"
                    f" and dtype ({dtype}) need {total}"
                )
            if begin != expected:
                in_order = False
            expected = end
            tensors[name] = make(
                kind, (name, dtype, tuple(shape), shard, data_start + begin, total)
            )
    except Lie as lie:
        if name == "__metadata__":
            raise CheckpointError(f"{path}: {lie}", path=path) from None
        raise CheckpointError(
            f"{path}: tensor {shown(name)}: {lie}", path=path, tensor=name
        ) from None

    if len(tensors) != count:
        name = twice_in(key for key, _ in top) or ""
        raise CheckpointError(
            f"{path}: tensor {shown(name)}: the header names it twice", path=path, tensor=name
        )
    if not in_order:
        tensors, expected = _tiled(tensors.values(), data_start, path)
    _check_end(data_start + expected, size, path)
    return Header(tensors, metadata or {})


def _require_possible(shape: list[int]) -> None:
    """Raises Lie for the shape of an empty tensor that no tensor can have: torch counts dimensions
    and distances between elements in 63 bits. With bytes in it, no file would be large enough."""
    total = 1
    for extent in shape:
        total *= extent or 1
        if total > _I64:
            raise Lie(
                "its shape has a zero, and beside it dimensions beyond 63 bits, alone or multiplied"
            )


def _check_end(end: int, size: int, path: str) -> None:
    if end > size:
        raise CheckpointError(
            f"{path}: the file is truncated: its header promises {end} bytes, it has {size},"
            f" {end - size} are missing (an unfinished download or copy?)",
            path=path,
        )
    if end < size:
        raise CheckpointError(
            f"{path}: the file has {size - end} trailing bytes after its last tensor, which no"
            f" tensor owns: its header promises {end} bytes, it has {size}",
            path=path,
        )


def _tiled(
    infos: Iterable[TensorInfo], data_start: int, path: str
) -> tuple[dict[str, TensorInfo], int]:
    """The tensors in the order of their data, which they must tile, and the bytes they fill."""
    position, before = data_start, "the header"
    ordered = sorted(infos, key=itemgetter(4, 5))
    for info in ordered:
        if info.offset != position:
            distance = info.offset - position
            what = (
                f"{distance} bytes after the end of {before}: a gap"
                if distance > 0
                else f"{-distance} bytes before the end of {before}: an overlap"
            )
            raise CheckpointError(
                f"{path}: tensor {shown(info.name)}: its data begins at byte"
                f" {info.offset - data_start} of the data, {what}",
                path=path,
                tensor=info.name,
            )
        position, before = info.offset + info.nbytes, f"tensor {shown(info.name)}"
    return {info.name: info for info in ordered}, position - data_start


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if type(value) is not tuple:
        raise Lie("its __metadata__ is not a JSON object")
    for key, text in value:
        if type(text) is not str:
            raise Lie(f"its __metadata__ maps {shown(key)} to something that is not a string")
    metadata: dict[str, str] = dict(value)
    if len(metadata) != len(value):
        raise Lie(f"its __metadata__ has the key {shown(twice_in(k for k, _ in value))} twice")
    return metadata


def _fields(value: Any) -> tuple[Any, Any, Any]:
    """dtype, shape and data_offsets, of an object in any order and with others, or of an array."""
    if type(value) is list:
        if len(value) != 3:
            raise Lie(f"it is an array of {len(value)}, not of dtype, shape and data_offsets")
        return value[0], value[1], value[2]
    if type(value) is not tuple:
        raise Lie("what the header says of it is not a JSON object")
    known = dict(value)
    if len(known) != len(value):
        raise Lie(f"it has the field {shown(twice_in(key for key, _ in value))} twice")
    for field in _FIELDS:
        if field not in known:
            raise Lie(f"it has no {field}")
    check_value([extra for key, extra in value if key not in _FIELDS], depth=1)
    return known["dtype"], known["shape"], known["data_offsets"]


def _said(value: Any) -> str:
    """A JSON value in a message. Arrays and objects by kind: their repr may be deep or huge."""
    if type(value) is list or type(value) is tuple:
        return "an array" if type(value) is list else "an object"
    if value is None or type(value) is bool:
        return json.dumps(value)
    return shown(value)


def read_weight_map(raw: bytes, *, path: str) -> dict[str, str]:
    """The `weight_map` of an index file: tensor name -> shard name, as written, in its order.

    Raises CheckpointError when `raw` is not strict JSON or has no such map from str to str. The
    shard names are not judged here.
    """
    try:
        top = strict_json(raw)
        if type(top) is not tuple:
            raise Lie("it is not a JSON object")
        check_value([value for key, value in top if key != "weight_map"], depth=0)
        if (twice := twice_in(key for key, _ in top)) is not None:
            raise Lie(f"it has the key {shown(twice)} twice")
        pairs = dict(top).get("weight_map")
        if type(pairs) is not tuple:
            raise Lie("it has no weight_map object, so it is no index of a checkpoint")
        for name, shard in pairs:
            if type(shard) is not str:
                raise Lie(f"its weight_map maps {shown(name)} to something that is not a string")
        if not pairs:
            raise Lie("its weight_map is empty")
        weight_map: dict[str, str] = dict(pairs)
        if len(weight_map) != len(pairs):
            raise Lie(f"its weight_map names tensor {shown(twice_in(n for n, _ in pairs))} twice")
    except Lie as lie:
        raise CheckpointError(f"{path}: {lie}", path=path) from None
    return weight_map
