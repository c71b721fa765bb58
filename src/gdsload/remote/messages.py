"""Messages between the processes of a peer load: a JSON object, and bytes that belong to it.

    | J: u32 | P: u64 | J bytes of JSON | P bytes of payload |        little endian

Both lengths are bounded by the receiver before it allocates. Nothing is unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTHS = struct.Struct("<IQ")
JSON_LIMIT_BYTES = 64 << 20  # a file of a million tensors has some 40 MB of segments
PAYLOAD_LIMIT_BYTES = 128 << 20  # a header of safetensors has up to 100 MB


class MessageError(ValueError):
    """What was received is not a message."""


def packed(fields: dict[str, Any], payload: bytes = b"") -> bytes:
    """One message as bytes."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    return LENGTHS.pack(len(text), len(payload)) + text + payload


def lengths(head: bytes, json_limit: int, payload_limit: int) -> tuple[int, int]:
    """The two lengths at the start of a message. Raises MessageError if one is above its limit."""
    text_bytes, payload_bytes = LENGTHS.unpack(head)
    if text_bytes > json_limit or payload_bytes > payload_limit:
        raise MessageError(f"a message of {text_bytes} and {payload_bytes} bytes is too long")
    return text_bytes, payload_bytes


def parsed(text: bytes) -> dict[str, Any]:
    """The fields of a message. Raises MessageError."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a message is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise MessageError("a message is not a JSON object")
    return fields


def send(to: socket.socket, fields: dict[str, Any], payload: bytes = b"") -> None:
    """Sends one message. Raises OSError, TimeoutError as well."""
    to.sendall(packed(fields, payload))


def receive(source: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Receives one message: its fields and its payload.

    Raises:
        OSError: The connection failed or timed out (TimeoutError).
        EOFError: The other side has closed the connection.
        MessageError: What came is not a message.
    """
    head = _exactly(source, LENGTHS.size)
    text_bytes, payload_bytes = lengths(head, JSON_LIMIT_BYTES, PAYLOAD_LIMIT_BYTES)
    return parsed(_exactly(source, text_bytes)), _exactly(source, payload_bytes)


def _exactly(source: socket.socket, nbytes: int) -> bytes:
    found = bytearray()
    while len(found) < nbytes:
        part = source.recv(min(nbytes - len(found), 1 << 20))
        if not part:
            raise EOFError("the other side has closed the connection")
        found += part
    return bytes(found)
