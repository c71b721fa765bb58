"""Parses and validates headers of safetensors files and indexes of checkpoints, and makes headers.

    | N: u64, little endian | N bytes of JSON | tensor data, tiled without gap or overlap |

Pure functions over bytes and a file size; `checkpoint` opens and reads. Whatever safetensors
refuses is refused here. Also refused: a name or key given twice (safetensors takes the last one
silently), a dtype written as {"F32": null}, dimensions beside a zero that no tensor can have, and
in ignored extra fields lone surrogates, numbers of magnitude above 1e308 and integers too long for
Python to convert.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from gdsload.checkpoint.strict_json import FormatError, check_value, repeated, strict_json, unique
from gdsload.dtypes import DTYPES
from gdsload.errors import CheckpointError, shown

HEADER_LIMIT_BYTES = 100_000_000  # what safetensors accepts
LENGTH_BYTES = 8
_U64, _I64 = 2**64 - 1, 2**63 - 1
_BITS = {name: dtype.bits for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")


class TensorInfo(NamedTuple):
    """One tensor: `nbytes` bytes at byte `offset` of the file of shard `shard`."""

    name: str
    dtype: str  # a key of DTYPES, e.g. "BF16"
    shape: tuple[int, ...]  # in elements
    shard: int  # index into Checkpoint.shards
    offset: int  # bytes from the start of the file, not of the data
    nbytes: int


class Header(NamedTuple):
    """A parsed header. `tensors` is in the order of the data."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str] | None  # None: it has none


def header_length(head: bytes, size: int, *, path: str, limit: int = HEADER_LIMIT_BYTES) -> int:
    """The length of a header's JSON in bytes.

    Args:
        head: The first min(size, 8 or more) bytes of the file.
        size: The size of the file in bytes.
        path: The file, for messages.
        limit: The largest length that is accepted.

    Raises:
        CheckpointError: The length is above `limit` or beyond the end of the file. The message
            names the format of the file if it is another one.
    """
    if size == 0:
        raise CheckpointError(f"{path}: the file is empty", path=path)
    if size < LENGTH_BYTES:
        raise CheckpointError(
            f"{path}: the file has {size} bytes, too few for a safetensors header", path=path
        )
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    fault = ""
    if LENGTH_BYTES + length > size:
        fault = f"but the file has only {size}: it is truncated, or not a safetensors file"
    elif length > limit:
        fault = f"more than the limit of {limit} (header_limit raises it)"
    if fault:
        message = foreign(head, path) or f"{path}: its header claims {length} bytes, {fault}"
        raise CheckpointError(message, path=path)
    return length


_NOT_SAFETENSORS = "not a safetensors file"
_SIGNATURES = (
    (rb"version https://git-lfs", "a git-lfs pointer, not the file itself: `git lfs pull`"),
    (rb"\x1f\x8b", f"gzip data, {_NOT_SAFETENSORS}: unpack it first"),
    (rb"\x28\xb5\x2f\xfd", f"zstd data, {_NOT_SAFETENSORS}: unpack it first"),
    (rb"PK\x03\x04", f"a zip archive (as torch.save writes), {_NOT_SAFETENSORS}"),
    (rb"\x80[\x02-\x05]", f"a Python pickle, {_NOT_SAFETENSORS}"),
    (rb"GGUF", f"a GGUF file, {_NOT_SAFETENSORS}"),
    (rb"\x89HDF", f"an HDF5 file, {_NOT_SAFETENSORS}"),
    (rb"\x93NUMPY", f"a NumPy file, {_NOT_SAFETENSORS}"),
    (rb"\s*<(!doctype|html|head)", f"an HTML page, {_NOT_SAFETENSORS}: the download failed"),
    (rb"\s*<(\?xml|error)", f"an XML answer, {_NOT_SAFETENSORS}: the download failed"),
    (rb'\s*\{"|\{\s+"', f"bare JSON, {_NOT_SAFETENSORS}"),
    (rb"\0{8,}\Z", "a file that begins with zeros only: its download was not finished"),
)


def foreign(head: bytes, path: str) -> str | None:
    """A message that names the format of a file that is not safetensors; None if unknown.

    Only for files that failed: the length in a valid header may look like any of these formats.
    """
    for signature, meaning in _SIGNATURES:
        if re.match(signature, head, re.DOTALL | re.IGNORECASE):
            return f"{path}: this is {meaning}"
    return None


def parse_header(raw: bytes, size: int, *, path: str, shard: int = 0) -> Header:
    """Parses the header of one file.

    Args:
        raw: The JSON of the header.
        size: The size of the file in bytes.
        path: The file, for messages.
        shard: The `shard` of the tensors.

    Raises:
        CheckpointError: The header is invalid. The message names the file and the tensor.
    """
    data_start = LENGTH_BYTES + len(raw)
    try:
        top = strict_json(raw, path)
        if type(top) is not tuple:
            raise FormatError("its header is not a JSON object")
    except FormatError as error:
        head = len(raw).to_bytes(LENGTH_BYTES, "little") + raw[:512]
        raise CheckpointError(foreign(head, path) or f"{path}: {error}", path=path) from None

    metadata: dict[str, str] | None = None
    has_metadata = False
    tensors: dict[str, TensorInfo] = {}
    length = 0  # of the data up to here
    in_order = True  # the header is in the order of the data
    make, kind = tuple.__new__, TensorInfo  # calling TensorInfo takes twice as long
    name = ""
    try:
        for name, value in top:
            if name == _METADATA:
                if has_metadata:
                    raise FormatError("its header has __metadata__ twice")
                has_metadata = True
                metadata = None if value is None else _string_map(value, name)
                continue
            dtype, shape, begin, nbytes = _entry(value)
            in_order = in_order and begin == length
            length = begin + nbytes
            tensors[name] = make(kind, (name, dtype, shape, shard, data_start + begin, nbytes))
        if len(tensors) + has_metadata != len(top):
            name = repeated(key for key, _ in top)
            raise FormatError("the header names it twice")
    except FormatError as error:
        tensor = None if name == _METADATA else name
        subject = path if tensor is None else f"{path}: tensor {shown(tensor)}"
        raise CheckpointError(f"{subject}: {error}", path=path, tensor=tensor) from None
    if not in_order:
        tensors, length = _tiled(tensors.values(), data_start, path)
    end = data_start + length
    if end != size:
        fault = f"the file has {size - end} trailing bytes that belong to no tensor"
        if end > size:
            fault = f"{end - size} bytes are missing, the file is truncated"
        raise CheckpointError(
            f"{path}: {fault}: its header promises {end} bytes, it has {size}", path=path
        )
    return Header(tensors, metadata)


def _entry(value: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype and shape of a tensor, the offset of its bytes in the data, and their number."""
    dtype, shape, offsets = _fields(value)
    nbytes = _nbytes_of(dtype, shape)
    if type(offsets) is not list or len(offsets) != 2:
        raise FormatError("its data_offsets is not an array of two")
    begin, end = offsets
    if not (type(begin) is type(end) is int and 0 <= begin <= _U64 and 0 <= end <= _U64):
        raise FormatError(
            f"its data_offsets hold {_json_text(begin)} and {_json_text(end)}, not two"
            " unsigned 64-bit integers"
        )
    if end < begin:
        raise FormatError(f"its data_offsets end at {end}, before they begin at {begin}")
    if end - begin != nbytes:
        raise FormatError(
            f"its data_offsets [{begin}, {end}] hold {end - begin} bytes, but its shape"
            f" and dtype ({dtype}) need {nbytes}"
        )
    return dtype, tuple(shape), begin, nbytes


def _fields(value: Any) -> tuple[Any, Any, Any]:
    """dtype, shape and data_offsets from an array, or from an object with fields in any order."""
    if type(value) is tuple and len(value) == 3:
        (first, dtype), (second, shape), (third, offsets) = value
        if (first, second, third) == _FIELDS:  # as safetensors writes them
            return dtype, shape, offsets
    if type(value) is list:
        if len(value) != 3:
            raise FormatError(
                f"it is an array of {len(value)}, not of dtype, shape and data_offsets"
            )
        return value[0], value[1], value[2]
    if type(value) is not tuple:
        raise FormatError("its entry in the header is not a JSON object")
    fields = unique(value, "it has the field")
    for field in _FIELDS:
        if field not in fields:
            raise FormatError(f"it has no {field}")
    check_value([extra for key, extra in value if key not in _FIELDS], depth=1)
    return fields["dtype"], fields["shape"], fields["data_offsets"]


def _nbytes_of(dtype: Any, shape: Any) -> int:
    """The bytes of a tensor. Raises FormatError for a dtype or a shape that none can have."""
    bits = _BITS.get(dtype) if type(dtype) is str else None
    if bits is None:
        raise FormatError(f"its dtype {_json_text(dtype)} is not one that safetensors knows")
    if type(shape) is not list:
        raise FormatError("its shape is not an array")
    values = 1
    for dimension in shape:
        if type(dimension) is not int or not 0 <= dimension <= _U64:
            raise FormatError(
                f"its shape holds {_json_text(dimension)}, not an unsigned 64-bit integer"
            )
        values *= dimension
        if values > _U64:
            raise FormatError("the product of its shape overflows 64 bits")
    if not values:
        _require_possible(shape)
    bits *= values
    if bits > _U64:
        raise FormatError("the number of its bits overflows 64 bits")
    if bits % 8:
        raise FormatError(f"its {bits} bits ({dtype}) do not end at a whole byte")
    return bits // 8


def _require_possible(shape: list[int]) -> None:
    """Raises FormatError for the shape of an empty tensor if no tensor can have it.

    torch counts dimensions and strides in 63 bits. A tensor that is not empty would need a file of
    impossible size.
    """
    total = 1
    for dimension in shape:
        total *= dimension or 1
        if total > _I64:
            raise FormatError("its shape has a zero and, without it, a product beyond 63 bits")


def header_bytes(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """The beginning of a safetensors file: the length, and the JSON as safetensors writes it.

    Args:
        tensors: Name, dtype, shape and bytes of each tensor, in the order of the data.
    """
    top: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        begin, end = end, end + nbytes
        top[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(top, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # the data is aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _tiled(
    infos: Iterable[TensorInfo], data_start: int, path: str
) -> tuple[dict[str, TensorInfo], int]:
    """Sorts tensors by offset and checks that they tile the data. Also returns its length."""
    position, previous = data_start, "the header"
    ordered = sorted(infos, key=itemgetter(4, 5))
    for info in ordered:
        if info.offset != position:
            distance = info.offset - position
            fault = f"{distance} bytes after the end of {previous}: a gap"
            if distance < 0:
                fault = f"{-distance} bytes before the end of {previous}: an overlap"
            raise CheckpointError(
                f"{path}: tensor {shown(info.name)}: its data begins at byte"
                f" {info.offset - data_start} of the data, {fault}",
                path=path,
                tensor=info.name,
            )
        position, previous = info.offset + info.nbytes, f"tensor {shown(info.name)}"
    return {info.name: info for info in ordered}, position - data_start


def _string_map(value: Any, field: str) -> dict[str, str]:
    if type(value) is not tuple:
        raise FormatError(f"its {field} is not a JSON object")
    for key, text in value:
        if type(text) is not str:
            raise FormatError(f"its {field} maps {shown(key)} to something that is not a string")
    return unique(value, f"its {field} has the key")


def _json_text(value: Any) -> str:
    """A JSON value for a message; arrays and objects only by kind, since they may be huge."""
    if type(value) is list or type(value) is tuple:
        return "an array" if type(value) is list else "an object"
    if value is None or type(value) is bool:
        return json.dumps(value)
    return shown(value)


def read_weight_map(raw: bytes, *, path: str) -> dict[str, str]:
    """The `weight_map` of an index: tensor name -> shard name, in the order of the file.

    Raises CheckpointError if `raw` is not strict JSON or has no such map from str to str. The shard
    names are not checked here.
    """
    try:
        top = strict_json(raw, path)
        if type(top) is not tuple:
            raise FormatError("it is not a JSON object")
        check_value([value for key, value in top if key != "weight_map"], depth=0)
        pairs = unique(top, "it has the key").get("weight_map")
        if type(pairs) is not tuple:
            raise FormatError("it has no weight_map object, so it is not an index of a checkpoint")
        if not pairs:
            raise FormatError("its weight_map is empty")
        return _string_map(pairs, "weight_map")
    except FormatError as error:
        raise CheckpointError(f"{path}: {error}", path=path) from None
