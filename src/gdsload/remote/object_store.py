"""Object stores: s3://, gs://, az:// and https:// URLs, read by the client `obstore`.

Credentials, endpoints and proxies are the client's business: it reads its environment variables,
such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL. It also repeats failed requests. Not responsible
for reads in parallel (`backends.remote`).
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from base64 import b64encode
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from gdsload.errors import (
    BackendUnavailable,
    CheckpointAccessError,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    FileChanged,
    extra_hint,
    shown,
    without_traceback,
)
from gdsload.remote.directory import RemoteDirectory, is_file_name
from gdsload.remote.file import HEAD_BYTES, RemoteFile
from gdsload.remote.urls import query_hash, split_url, text_without_secrets, without_secrets
from gdsload.system.lifecycle import fork_safe_lock

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta

# The extra leaves obstore out below Python 3.11.
INSTALL_HINT = extra_hint("remote") if sys.version_info >= (3, 11) else "use Python 3.11 or newer"
# A try ends after this time without a byte, and failed tries are repeated for this long. Together
# they are shorter than the default of `stall_seconds`.
SILENCE_SECONDS = 10.0
RETRY_SECONDS = 20.0
_TRY_SECONDS = 3600  # the client's own limit of 30 s would end a slow read of many bytes
# The client gives bytes when a chunk is complete. Each chunk costs time with the GIL; but those of
# a slow source must not come so late that it looks silent.
_CHUNK_BYTES = 1 << 20
_SLOW_CHUNK_BYTES = 64 << 10
_FAST_REQUEST = 4e6  # bytes per second of one request
# S3 keeps the second one with objects that were uploaded in signed chunks.
_PLAIN_ENCODINGS = ("", "aws-chunked", "identity")
_ERRNO_OF_STATUS = {"401": errno.EACCES, "403": errno.EACCES, "404": errno.ENOENT}
_MOST_TEXT = 500  # characters of a message of the client
_MOST_RETRIES = 1000  # more than there is time for: ten, the default, end after about 2 s
_PAUSE_SECONDS = 2.0  # the longest one between two tries
# The variables that the client reads begin like this. Those of its connections it only reads if it
# gets no settings of connections from us.
_VARIABLES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
# Those that say who the user is, or that it does not matter, begin like this.
_CREDENTIALS = {
    "s3": (
        "AWS_ACCESS_KEY", "AWS_CONTAINER", "AWS_METADATA", "AWS_PROFILE", "AWS_ROLE", "AWS_SECRET",
        "AWS_SESSION", "AWS_SHARED_CREDENTIALS", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY",
    ),
    "gs": ("GOOGLE_APPLICATION", "GOOGLE_SERVICE", "GOOGLE_SKIP_SIGNATURE"),
    "az": ("AZURE_",),
}  # fmt: skip
_CONNECTION_SETTINGS = (
    "allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only",
    "http2_only", "pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate",
    "proxy_excludes", "proxy_url", "randomize_addresses", "read_timeout", "timeout", "user_agent",
)  # fmt: skip
_HINTS = {
    "s3": "credentials are read from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role of"
    " the machine; a public bucket needs AWS_SKIP_SIGNATURE=true",
    "gs": "credentials are read from GOOGLE_APPLICATION_CREDENTIALS, or the machine; a public"
    " bucket needs GOOGLE_SKIP_SIGNATURE=true",
    "az": "credentials are read from AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or"
    " the machine; a public container needs AZURE_SKIP_SIGNATURE=true",
}


class _Client:
    """The process that uses the client first: its threads do not exist in a forked child."""

    pid = 0


def _kind_of(scheme: str) -> str:
    """ "s3", "gs", "az", "http" or "https"."""
    if scheme.startswith("http"):
        return scheme
    return {"s3": "s3", "s3a": "s3", "gs": "gs"}.get(scheme, "az")


def _opened_store(url: str, kind: str) -> Any:
    """The client's object for a URL. Raises BackendUnavailable and CheckpointError."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import HTTPStore, from_url
    except ImportError as error:
        raise BackendUnavailable(
            f"{without_secrets(url)}: object stores need obstore: {INSTALL_HINT}",
            {"object_store": "obstore is not installed"},
        ) from error
    _Client.pid = _Client.pid or os.getpid()
    variables = _VARIABLES.get(kind, "")
    connection: dict[str, Any] = {
        "read_timeout": timedelta(seconds=SILENCE_SECONDS),
        "timeout": timedelta(seconds=_TRY_SECONDS),
    }
    for name in _CONNECTION_SETTINGS if variables else ():
        if value := os.environ.get(f"{variables}_{name.upper()}"):
            connection[name] = value
    if kind == "http":
        connection["allow_http"] = True
    parts = split_url(url)
    if parts.username is not None and not variables:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        login = f"Basic {b64encode(pair.encode()).decode()}"
        connection["default_headers"] = {"authorization": login}
    retry: Any = {
        "retry_timeout": timedelta(seconds=RETRY_SECONDS),
        "max_retries": _MOST_RETRIES,
        "backoff": {"max_backoff": timedelta(seconds=_PAUSE_SECONDS)},
    }
    try:
        make: Any = from_url if variables else HTTPStore.from_url
        return make(url, client_options=connection, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise CheckpointError(f"{without_secrets(url)}: {_first_line(error)}") from None


def _was_repeated(started: float) -> bool:
    """Whether a failed request was repeated until the time was over. One that is refused is not."""
    return time.monotonic() - started >= RETRY_SECONDS


def _first_line(error: Exception) -> str:
    """The message of the client, without secrets, and without the body of an answer in XML or HTML.
    Other bodies are cut."""
    text = text_without_secrets(str(error).partition("\n")[0].partition("<")[0]).strip(" :")
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


class ObjectDirectory(RemoteDirectory):
    """The objects whose names begin with one prefix, or the files of a directory on a web server.

    Web servers cannot list: there, a file must have one of the usual names.
    """

    def __init__(self, url: str) -> None:
        """Reads nothing.

        Raises:
            CheckpointError: The client does not accept the URL.
            BackendUnavailable: The client is not installed.
        """
        self.path = without_secrets(url)
        self.kind = _kind_of(split_url(url).scheme.lower())
        self.query = query_hash(url)
        self._url = url
        self._opened: Any = _opened_store(url, self.kind)  # None after `quiesce`
        self._names: frozenset[str] | None = None
        # A copy: the traceback of an error refers to this object, and such a cycle would keep its
        # connections open until the garbage is collected.
        self._list_error: BaseException | None = None
        self._lock = fork_safe_lock(self)

    @property
    def _store(self) -> Any:
        if _Client.pid != os.getpid():
            raise CheckpointUnreadable(
                f"{self.path}: this process was forked from one that had used the client of object"
                " stores, whose threads stayed there; start processes with 'spawn'",
                path=self.path,
                errno=errno.ECHILD,
            )
        opened = self._opened
        if opened is None:
            opened = self._opened = _opened_store(self._url, self.kind)
        return opened

    def quiesce(self) -> None:
        """Closes the connections; the next request opens others."""
        self._opened = None

    def names(self) -> Collection[str]:
        with self._lock:
            if self._list_error is not None:
                raise without_traceback(self._list_error)
            if self._names is None:
                try:
                    self._names = self._list()
                except CheckpointError as error:
                    self._list_error = without_traceback(error)
                    raise
            return self._names

    def _list(self) -> frozenset[str]:
        if self.kind not in _VARIABLES:
            raise CheckpointError(
                f"{self.path}: a web server cannot list its files: give the URL of a file, or of"
                " an index",
                path=self.path,
            )
        import obstore

        try:
            listing = obstore.list_with_delimiter(self._store)
        except Exception as error:
            raise self.open_error(self.path, error) from None
        names = (each["path"] for each in listing["objects"])
        return frozenset(filter(is_file_name, names))

    def has(self, name: str) -> bool:
        started = time.monotonic()
        try:
            return name in self.names()
        except CheckpointError:
            if _was_repeated(started):  # the store is down
                raise
            # It may be allowed to read files and not to list them. Then a missing file may look
            # like a forbidden one.
            try:
                self.get(name, 0, 1)  # servers that refuse HEAD exist
            except Exception as failed:
                error = self.open_error(self.path_of(name), failed)
                if isinstance(error, CheckpointAccessError):
                    self._list_error = without_traceback(error)
                elif not isinstance(error, CheckpointNotFound):
                    # A range of an empty file is refused.
                    if not _was_repeated(started) and self._facts_of_empty(name) is not None:
                        return True
                    raise error from None
                return False
            return True

    def get(self, name: str, offset: int, length: int) -> GetResult:
        """Begins to read a range. Raises errors of the client."""
        import obstore

        return obstore.get(self._store, name, options={"range": (offset, offset + length)})

    def open(self, name: str) -> ObjectFile:
        path, started = self.path_of(name), time.monotonic()
        try:
            result = self.get(name, 0, HEAD_BYTES)
            if why := _why_not_plain(result):
                raise CheckpointUnreadable(f"{path}: {why}", path=path, errno=errno.EPROTO)
            meta, end, found = result.meta, result.range[1], bytearray()
            # The rest of a body that is too short is read when it is needed; one that is too long
            # may have no end.
            for chunk in result.stream(HEAD_BYTES):
                found += chunk
                if len(found) >= end:
                    break
            head = bytes(found[:end])
        except Exception as error:
            # A range of an empty file is refused.
            final = reason(error)[0] != errno.EIO or _was_repeated(started)
            empty = None if final else self._facts_of_empty(name)
            if empty is None:
                raise self.open_error(path, error) from None
            head, meta = b"", empty
        return ObjectFile(self, name, meta, head)

    def facts(self, name: str) -> ObjectMeta:
        """The facts about the version of a file that is there now. Raises errors of the client."""
        try:
            return self.get(name, 0, 1).meta
        except Exception:
            empty = self._facts_of_empty(name)  # a range of it is refused
            if empty is None:
                raise
            return empty

    def _facts_of_empty(self, name: str) -> ObjectMeta | None:
        """The facts about a file if it is empty."""
        import obstore

        try:
            meta = obstore.head(self._store, name)
        except Exception:  # then the failure of the read counts
            return None
        return None if meta["size"] else meta

    def open_error(self, path: str, error: Exception) -> CheckpointError:
        """The CheckpointError for a file or directory that could not be read."""
        if isinstance(error, CheckpointError):
            return error
        code, why = reason(error)
        kind: type[CheckpointUnreadable] = CheckpointUnreadable
        if code == errno.ENOENT:
            kind, text = CheckpointNotFound, f"No such file or directory: {path}"
        elif code == errno.EACCES:
            kind, text = CheckpointAccessError, f"{path}: {why}"
        else:
            text = f"{path}: it cannot be read: {why}"
        # Without variables the client asks the cloud's machines for a role, which fails elsewhere.
        asked = any(name.startswith(_CREDENTIALS.get(self.kind, ())) for name in os.environ)
        if code == errno.EACCES or not asked:
            text += f" ({_HINTS[self.kind]})" if self.kind in _HINTS else ""
        return kind(text, path=path, errno=code)


def reason(error: Exception) -> tuple[int, str]:
    """The errno and the text for an error of the client. EACCES and ENOENT are final."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    if isinstance(error, FileNotFoundError):
        return errno.ENOENT, "it does not exist"
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return errno.EACCES, "permission denied"
    if isinstance(error, CheckpointUnreadable):
        return error.errno or errno.EIO, str(error)
    text = _first_line(error)
    # The error of a listing has no other type for these.
    status = re.search(r"status code: (\d{3})", text)
    return _ERRNO_OF_STATUS.get(status[1] if status else "", errno.EIO), text


def _why_not_plain(result: GetResult) -> str:
    """Why the bytes of an answer are not those of the file; "" if they are."""
    encoding = result.attributes.get("Content-Encoding", "")
    if encoding.lower() in _PLAIN_ENCODINGS:
        return ""
    return f"it is compressed: its Content-Encoding is {shown(encoding)}"


class ObjectFile(RemoteFile):
    """One version of an object. Each answer of the server is compared with this version."""

    def __init__(
        self,
        directory: ObjectDirectory,
        name: str,
        meta: ObjectMeta,
        head: bytes,
    ) -> None:
        """`head`: the first bytes of the file."""
        self.url = directory.path_of(name)
        self.scheme = directory.kind
        self.query = directory.query
        self.size = meta["size"]
        self.version = _version_of(meta)
        self._directory, self._name, self._head = directory, name, head
        self._changed = ""
        self._chunk_bytes = _SLOW_CHUNK_BYTES

    def chunks(self, offset: int, length: int) -> Iterator[Any]:
        known = memoryview(self._head)[offset : offset + length]
        if known:
            yield known
            offset, length = offset + len(known), length - len(known)
        if not length:
            return
        got = 0
        why, final = "", False
        facts: dict[str, Any] = {"offset": offset, "wanted": length}
        started = time.monotonic()
        try:
            result = self._directory.get(self._name, offset, length)
            first, end = result.range
            self._compare(result.meta)
            if self._changed:
                why, final = self._changed, True
            elif why := _why_not_plain(result):
                final = True
            elif (first, end) != (offset, offset + length):
                why = f"the server sent bytes {first} to {end} instead"
            else:
                for chunk in result.stream(min(length, self._chunk_bytes)):
                    got += len(chunk)
                    fast = got > _FAST_REQUEST * (time.monotonic() - started)
                    self._chunk_bytes = _CHUNK_BYTES if fast else _SLOW_CHUNK_BYTES
                    if got > length:
                        why = f"the server sent more than the {length} bytes that were asked for"
                        break
                    yield chunk
        except Exception as error:
            if not got:  # else the caller asks for the rest
                code, why = reason(error)
                final = code != errno.EIO
                if not (final or self._changed or _was_repeated(started)):
                    self._look_again()
                if self._changed:
                    why, final = self._changed, True
                hint = _HINTS.get(self.scheme, "") if code == errno.EACCES else ""
                facts.update(errno=code, hint=hint)
        if why:
            raise self.error(why, final=final, **facts)

    def quiesce(self) -> None:
        self._directory.quiesce()

    def _look_again(self) -> None:
        """Compares the version that is there now: a range that begins behind its end is refused."""
        with suppress(Exception):  # then the failure of the read counts
            self._compare(self._directory.facts(self._name))

    def _compare(self, meta: ObjectMeta) -> None:
        if meta["size"] != self.size:
            self._changed = f"its size went from {self.size} to {meta['size']} bytes"
        elif _version_of(meta) != self.version:
            self._changed = "it was replaced by another version"

    def verify_unchanged(self) -> None:
        # All bytes are of one version, whatever is there now.
        if self._changed:
            raise FileChanged(
                f"{self.url}: the file changed while it was read: {self._changed}", path=self.url
            )


def _version_of(meta: ObjectMeta) -> str:
    """What tells one version of an object from another; "" if the server does not tell."""
    version = meta["version"]
    if version == "null":  # S3 without versioning: each version of an object has this name
        version = None
    known = version or meta["e_tag"]
    if known:
        return known
    modified = meta["last_modified"]
    # A date has no more than seconds, and stays when files are copied: like a weak ETag, it does
    # not stand for the bytes.
    return f"W/{modified.isoformat()}" if modified.timestamp() > 0 else ""
