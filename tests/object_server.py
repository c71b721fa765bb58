"""A small object store on loopback that fails by script.

It serves one directory as the bucket `BUCKET`, to clients of S3 (path style), Google Cloud Storage
(XML), Azure (emulator) and plain HTTP: GET and HEAD with Range and If-Match, and listings. Requests
are counted. Faults are chosen by path and number of the request.

It does not check signatures, and it cannot be written to: tests change the files of the directory.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
AZURE_ACCOUNT = "devstoreaccount1"  # of the emulator, as obstore knows it
MOST_CONNECTIONS = 64
IDLE_SECONDS = 60.0
CHUNK_BYTES = 256 << 10
OTHER_BYTES = bytes(byte ^ 0xFF for byte in range(256))  # what a replaced object has
Query = dict[str, list[str]]
# What a client needs beside the endpoint. No client looks for credentials elsewhere.
ANONYMOUS = {
    "s3": {"AWS_SKIP_SIGNATURE": "true", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"},
    "gs": {"GOOGLE_SKIP_SIGNATURE": "true", "GOOGLE_ALLOW_HTTP": "true"},
    "az": {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT},
    "http": {},
}


@dataclass(frozen=True)
class Fault:
    """One way to answer wrongly.

    Attributes:
        kind: One of

            status              `status` instead of the object
            slow                `seconds` pass before the answer
            silent              no answer
            reset               the connection is reset before the answer
            truncated           the connection is closed after half of the body
            reset_in_body       the connection is reset after half of the body
            silent_in_body      nothing comes after half of the body
            short               a well-formed answer whose body has half of the bytes
            long                a well-formed answer whose body has more bytes
            endless             the same, with 256 MiB more
            wrong_range         the bytes of another range, with its true Content-Range
            range_ignored       200 and the whole object
            compressed          as many other bytes as were asked for, with a Content-Encoding
            replaced            the object is another one from now on: other bytes, other ETag
        status: The HTTP status of "status".
        seconds: The delay of "slow".
        headers: Further headers of "status".
    """

    kind: str
    status: int = 0
    seconds: float = 0.0
    headers: tuple[tuple[str, str], ...] = ()


FAULTS = {
    "403": Fault("status", 403),
    "404": Fault("status", 404),
    "416": Fault("status", 416),
    "429": Fault("status", 429, headers=(("Retry-After", "1"),)),
    "500": Fault("status", 500),
    "503": Fault("status", 503),
    "slow": Fault("slow", seconds=0.3),
    **{
        kind: Fault(kind)
        for kind in (
            "silent", "reset", "truncated", "reset_in_body", "silent_in_body", "short", "long",
            "endless", "wrong_range", "range_ignored", "compressed", "replaced",
        )
    },
}  # fmt: skip


@dataclass
class Request:
    """One request, as it was answered.

    Attributes:
        method: "GET" or "HEAD".
        key: The object, or "" for a listing.
        first, end: The wanted bytes; `end` is -1 if there was no Range.
        if_match: The ETag that the client insists on; "" if none.
        status: Of the answer; 0 if there was none.
        sent: Bytes of the body of an object.
        fault: The kind of the fault; "" if none.
    """

    method: str
    key: str
    first: int = 0
    end: int = -1
    if_match: str = ""
    status: int = 0
    sent: int = 0
    fault: str = ""


@dataclass
class _Rule:
    fault: Fault
    pattern: str
    first: int
    count: int | None
    seen: int = 0

    def strikes(self, key: str) -> bool:
        if not fnmatchcase(key, self.pattern):
            return False
        self.seen += 1
        number = self.seen - self.first
        return number >= 0 and (self.count is None or number < self.count)


@dataclass
class ObjectServer:
    """A server of one directory. Use `serving`.

    Attributes:
        root: The directory.
        latency_seconds: The delay before each answer.
        bytes_per_second: The bandwidth of each connection; 0 for no limit.
        page: The most objects in one page of a listing.
        pins: False for a server that ignores If-Match.
        etags: False for a server that tells the date of a file and no ETag.
        version_id: The `x-amz-version-id` of each object; "" for none.
        heads: False for a server that refuses HEAD.
        login: What the header Authorization must be; "" for anything.
        requests: All requests, in the order in which they were read.
        most_at_once: The largest number of requests that were in progress at the same time.
    """

    root: Path
    latency_seconds: float = 0.0
    bytes_per_second: int = 0
    page: int = 1000
    pins: bool = True
    etags: bool = True
    version_id: str = ""
    heads: bool = True
    login: str = ""
    requests: list[Request] = field(default_factory=list)
    most_at_once: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._replaced: dict[str, int] = {}
        self._at_once = 0
        self.closing = threading.Event()

    def url(self, scheme: str, path: str = "") -> str:
        """The URL of a file or directory for the clients of a scheme: s3, gs, az or http."""
        host = f"127.0.0.1:{self.port}/" if scheme == "http" else ""
        return f"{scheme}://{host}{BUCKET}/{path}".rstrip("/")

    def environment(self, scheme: str) -> dict[str, str]:
        """The environment variables that lead the clients of a scheme to this server."""
        origin = f"http://127.0.0.1:{self.port}"
        names = {
            "s3": "AWS_ENDPOINT_URL",
            "gs": "GOOGLE_BASE_URL",
            "az": "AZURITE_BLOB_STORAGE_URL",
        }
        return {**ANONYMOUS[scheme], **({names[scheme]: origin} if scheme in names else {})}

    def script(
        self, fault: Fault | str, *, path: str = "*", first: int = 1, count: int | None = 1
    ) -> None:
        """Adds a fault, of the requests `first` to `first + count - 1` from now on.

        Args:
            fault: The fault, or its name in `FAULTS`.
            path: A pattern of keys; only their requests are counted. A listing has the key "".
            first: The number of the first request, counted from 1.
            count: How many requests fail; None for all that follow.
        """
        chosen = FAULTS[fault] if isinstance(fault, str) else fault
        with self._lock:
            self._rules.append(_Rule(chosen, path, first, count))

    def restore(self) -> None:
        """Removes all faults; replaced objects are again what they were."""
        with self._lock:
            self._rules.clear()
            self._replaced.clear()

    def forget(self) -> None:
        """Forgets the requests that were counted."""
        with self._lock:
            self.requests.clear()
            self.most_at_once = self._at_once

    @property
    def sent_bytes(self) -> int:
        """Bytes of objects that were sent."""
        with self._lock:
            return sum(request.sent for request in self.requests)

    def reads(self, pattern: str = "*") -> list[Request]:
        """The GET requests of objects whose key matches."""
        with self._lock:
            return [
                request
                for request in self.requests
                if request.method == "GET" and request.key and fnmatchcase(request.key, pattern)
            ]

    # For the handler.

    def file_of(self, key: str) -> Path | None:
        path = self.root / key
        inside = key and ".." not in Path(key).parts and path.is_file()
        return path if inside else None

    def keys(self, prefix: str) -> list[str]:
        found = (path.relative_to(self.root).as_posix() for path in self.root.rglob("*"))
        return sorted(key for key in found if key.startswith(prefix) and self.file_of(key))

    def version(self, key: str, path: Path) -> str:
        facts = path.stat()
        text = f"{facts.st_ino} {facts.st_size} {facts.st_mtime_ns} {self._replaced.get(key, 0)}"
        return f'"{hashlib.md5(text.encode()).hexdigest()}"'

    def inverted(self, key: str) -> bool:
        """Whether the object has the other bytes."""
        return self._replaced.get(key, 0) % 2 == 1

    @contextmanager
    def counted(self, request: Request) -> Iterator[Fault | None]:
        with self._lock:
            self.requests.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            struck = [rule.fault for rule in self._rules if rule.strikes(request.key)]
            fault = struck[0] if struck else None
            request.fault = fault.kind if fault else ""
            if fault and fault.kind == "replaced":
                self._replaced[request.key] = self._replaced.get(request.key, 0) + 1
        try:
            yield fault
        finally:
            with self._lock:
                self._at_once -= 1


class _Dropped(Exception):
    """The connection ends here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        owner = self.server.owner
        key, query = self._target()
        request = Request(self.command, key, if_match=self.headers.get("If-Match", ""))
        begin, end = self.headers.get("Range", "").removeprefix("bytes=").partition("-")[::2]
        if begin:
            request.first, request.end = int(begin), int(end) + 1 if end else 1 << 62
        try:
            with owner.counted(request) as fault:
                owner.closing.wait(owner.latency_seconds)
                self._answer(owner, request, query, fault)
        except (_Dropped, OSError):
            self.close_connection = True

    do_HEAD = do_GET

    def do_PROPFIND(self) -> None:
        self._whole(Request(self.command, ""), 405, b"")

    def log_message(self, *_: Any) -> None:
        pass

    def _target(self) -> tuple[str, Query]:
        parts = urlsplit(self.path)
        path = unquote(parts.path).strip("/").removeprefix(f"{AZURE_ACCOUNT}/")
        bucket, _, key = path.partition("/")
        return key if bucket == BUCKET else f"../{path}", parse_qs(parts.query)

    def _answer(
        self,
        owner: ObjectServer,
        request: Request,
        query: dict[str, list[str]],
        fault: Fault | None,
    ) -> None:
        kind = fault.kind if fault else ""
        if request.method == "HEAD" and not owner.heads:
            return self._whole(request, 405, b"")
        if owner.login and self.headers.get("Authorization") != owner.login:
            return self._whole(request, 401, b"")
        if fault and kind == "slow":
            owner.closing.wait(fault.seconds)
        elif fault and kind == "status":
            return self._whole(request, fault.status, b"<Error/>", dict(fault.headers))
        elif kind == "silent":
            self._keep_silent(owner)
        elif kind == "reset":
            self._reset()
        if "list-type" in query or query.get("comp") == ["list"]:
            return self._whole(request, 200, self._listing(owner, query))
        path = owner.file_of(request.key)
        if path is None:
            return self._whole(request, 404, b"<Error><Code>NoSuchKey</Code></Error>")
        self._object(owner, request, path, kind)

    def _object(self, owner: ObjectServer, request: Request, path: Path, kind: str) -> None:
        size, version = path.stat().st_size, owner.version(request.key, path)
        if owner.pins and request.if_match not in ("", "*", version):
            return self._whole(request, 412, b"<Error/>", {"ETag": version})
        ranged = request.end >= 0 and kind != "range_ignored"
        first, end = (request.first, min(request.end, size)) if ranged else (0, size)
        if ranged and first >= size:
            return self._whole(request, 416, b"<Error/>", {"Content-Range": f"bytes */{size}"})
        length = end - first
        stated, body = (first, end), (first, length)
        if kind == "wrong_range":
            # As long as the wanted one where the object has as many bytes elsewhere.
            begin = first - 1 if first else min(1, size - 1)
            stated, body = (begin, min(begin + length, size)), (begin, min(length, size - begin))
        elif kind == "short":
            body = first, length // 2
        elif kind == "long":
            body = first, length + 1000
        elif kind == "endless":
            body = first, length + (256 << 20)
        headers = {
            "ETag": version,
            "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True),
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            "Content-Length": str(body[1]),
        }
        if not owner.etags:
            del headers["ETag"]
        if owner.version_id:
            headers["x-amz-version-id"] = owner.version_id
        if kind == "compressed":
            headers["Content-Encoding"] = "gzip"
        if ranged:
            headers["Content-Range"] = f"bytes {stated[0]}-{stated[1] - 1}/{size}"
        self._head(request, 206 if ranged else 200, headers)
        if request.method == "HEAD":
            return
        halved = kind in ("truncated", "reset_in_body", "silent_in_body")
        inverted = owner.inverted(request.key) or kind == "compressed"
        self._send(request, path, body[0], body[1] // 2 if halved else body[1], inverted)
        if kind == "silent_in_body":
            self._keep_silent(owner)
        if kind == "reset_in_body":
            self._reset()
        if halved:
            raise _Dropped

    def _send(self, request: Request, path: Path, first: int, length: int, inverted: bool) -> None:
        owner = self.server.owner
        begin = time.monotonic()
        with path.open("rb") as file:
            done = 0
            while done < length and not owner.closing.is_set():
                data = os.pread(file.fileno(), min(CHUNK_BYTES, length - done), first + done)
                data = data or b"\0" * min(CHUNK_BYTES, length - done)  # behind the end: "long"
                if inverted:
                    data = data.translate(OTHER_BYTES)
                done += len(data)
                if owner.bytes_per_second:
                    due = begin + done / owner.bytes_per_second
                    owner.closing.wait(max(0.0, due - time.monotonic()))
                request.sent += len(data)  # before the client can know
                self.wfile.write(data)

    def _listing(self, owner: ObjectServer, query: Query) -> bytes:
        def one(name: str) -> str:
            return query.get(name, [""])[0]

        prefix, delimiter = one("prefix"), one("delimiter")
        entries = []  # files and common prefixes, in the order of their names
        for key in owner.keys(prefix):
            inner, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            entry = prefix + inner + delimiter if found else key
            if entry not in entries:
                entries.append(entry)
        after = one("continuation-token") or one("marker") or one("start-after")
        entries = [entry for entry in entries if entry > after]
        entries, rest = entries[: owner.page], entries[owner.page :]
        azure = one("comp") == "list"
        described = [self._entry(owner, entry, azure) for entry in entries]
        token = escape(entries[-1]) if rest else ""
        if azure:
            text = (
                f"<EnumerationResults><Blobs>{''.join(described)}</Blobs>"
                f"<NextMarker>{token}</NextMarker></EnumerationResults>"
            )
        else:
            text = (
                f"<ListBucketResult><Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix>"
                f"<KeyCount>{len(entries)}</KeyCount>"
                f"<IsTruncated>{'true' if rest else 'false'}</IsTruncated>{''.join(described)}"
                + (f"<NextContinuationToken>{token}</NextContinuationToken>" if rest else "")
                + "</ListBucketResult>"
            )
        return f'<?xml version="1.0" encoding="utf-8"?>{text}'.encode()

    def _entry(self, owner: ObjectServer, entry: str, azure: bool) -> str:
        name = escape(entry)
        path = owner.file_of(entry)
        if path is None:  # a common prefix
            return (
                f"<BlobPrefix><Name>{name}</Name></BlobPrefix>"
                if azure
                else f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
            )
        facts, version = path.stat(), escape(owner.version(entry, path))
        if azure:
            return (
                f"<Blob><Name>{name}</Name><Properties>"
                f"<Last-Modified>{formatdate(facts.st_mtime, usegmt=True)}</Last-Modified>"
                f"<Etag>{version}</Etag><Content-Length>{facts.st_size}</Content-Length>"
                "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            )
        changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(facts.st_mtime))
        return (
            f"<Contents><Key>{name}</Key><LastModified>{changed}</LastModified>"
            f"<ETag>{version}</ETag><Size>{facts.st_size}</Size></Contents>"
        )

    def _head(self, request: Request, status: int, headers: dict[str, str]) -> None:
        request.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _whole(
        self, request: Request, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        stated = {"Content-Type": "application/xml", "Content-Length": str(len(body))}
        self._head(request, status, {**stated, **(headers or {})})
        if request.method != "HEAD":
            self.wfile.write(body)

    def _keep_silent(self, owner: ObjectServer) -> None:
        """Says nothing until the client closes the connection, or the server ends."""
        while not owner.closing.is_set():
            readable, _, _ = select.select([self.connection], [], [], 0.05)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                break
        raise _Dropped

    def _reset(self) -> None:
        """Closes the connection with RST."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        raise _Dropped


class _Server(ThreadingHTTPServer):
    """One thread for each connection, `MOST_CONNECTIONS` at most; further ones wait."""

    daemon_threads = True
    block_on_close = False  # its list of threads is kept without a lock; see `end`
    request_queue_size = 128

    def __init__(self, owner: ObjectServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.owner = owner
        self.room = threading.Semaphore(MOST_CONNECTIONS)
        self.guard = threading.Lock()
        self.open: dict[socket.socket, threading.Thread] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self.room.acquire(timeout=0.1):
            if self.owner.closing.is_set():
                self.shutdown_request(request)
                return
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), daemon=True
        )
        with self.guard:
            self.open[request] = thread
        thread.start()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.guard:
                self.open.pop(request, None)
            self.room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that went away

    def end(self) -> None:
        """Ends all connections and waits for their threads."""
        self.owner.closing.set()
        self.shutdown()
        with self.guard:
            left = dict(self.open)
        for connection, thread in left.items():
            with suppress(OSError):  # closed meanwhile
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(10.0)
        self.server_close()


@contextmanager
def serving(root: Path, **settings: Any) -> Iterator[ObjectServer]:
    """A server of the directory `root`, on a free port of loopback.

    Args:
        root: The directory; its files may change.
        settings: Attributes of `ObjectServer`.
    """
    owner = ObjectServer(root, **settings)
    server = _Server(owner)
    owner.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield owner
    finally:
        server.end()
        thread.join(10.0)
