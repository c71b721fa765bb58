"""The interface of a remote file: in an object store, or in the memory of a peer.

    url ──► RemoteFile (one version) ── chunks(offset, length) ──► memory

Not responsible for: the memory that the bytes go to, and reads in parallel (`backends.remote`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from gdsload.errors import RemoteError
from gdsload.system.parallel import note_progress

if TYPE_CHECKING:
    from typing_extensions import Buffer


# The beginning of a file, with the header of most shards: `RemoteDirectory.open` may read it.
HEAD_BYTES = 128 << 10
LOCAL_CACHE = "local_cache"  # the I/O path of bytes that the local cache had


class LocalCopy(NamedTuple):
    """A copy of a remote file on this machine.

    Attributes:
        path: Its path.
        fd: An open descriptor, which the caller closes.
    """

    path: str
    fd: int


class SourceFacts(NamedTuple):
    """The facts about the sources of a file that counts its own bytes, for the report.

    Attributes:
        paths: Bytes by I/O path.
        failovers: Bytes that one source failed to send and another one sent, by "from -> to".
        refusals: Why sources are not used any more, by name.
        rates: Bytes per second of one request, by name.
    """

    paths: Mapping[str, int]
    failovers: Mapping[str, int]
    refusals: Mapping[str, str]
    rates: Mapping[str, float]


class RemoteFile(ABC):
    """One immutable version of a remote file.

    Its methods may be called from several threads at once.

    Attributes:
        url: The address, without credentials, for messages.
        size: The size in bytes.
        version: The ETag, generation or digest of this version, "" if unknown. It is the same for
            the life of the object.
        scheme: The kind of source, such as "s3", "gs", "az", "https" or "nixl".
        digest: A checksum of all bytes, "algorithm:hex", if the source tells one; else "". Those
            of one algorithm are equal if the bytes are.
        query: A hash of the part of the query that chooses the file, "" if there is none.
        head_bytes: The header is in this many bytes, or reads of it begin with so many. A peer that
            still receives the file may not have more yet.
    """

    backend: ClassVar[str] = "object_store"  # the name of the backend that reads it
    # Whether each answer is compared with the version: bytes from before a change are right then.
    pinned: ClassVar[bool] = True

    url: str
    size: int
    version: str
    scheme: str
    digest: str = ""
    query: str = ""
    head_bytes: int = HEAD_BYTES

    @property
    def key(self) -> str:
        """Tells files of the same version from each other: `url`, and `query` if there is one."""
        return f"{self.url}?{self.query}" if self.query else self.url

    @property
    def io_path(self) -> str:
        """The I/O path of its bytes, for the report."""
        return f"object_store/{self.scheme}"

    @property
    def version_is_exact(self) -> bool:
        """Whether files of this version have the same bytes: not of a weak ETag, or of a date."""
        return bool(self.version) and not self.version.startswith("W/")

    @abstractmethod
    def chunks(self, offset: int, length: int) -> Iterator[Buffer]:
        """Reads a range.

        Failed requests are repeated inside, with growing pauses and for a limited time. The caller
        may stop early, and then closes the iterator if it has `close`.

        Args:
            offset: The first byte.
            length: The number of bytes. The range is in the file, and not empty.

        Yields:
            The bytes in order, in C-contiguous buffers that are valid until the next one. They may
            end early after a failure in the middle: the caller asks for the rest.

        Raises:
            RemoteError: No bytes could be read. `final` if the file is not there any more, may not
                be read, or is another version.
        """

    @abstractmethod
    def verify_unchanged(self) -> None:
        """Raises FileChanged if the file is no longer this version."""

    def facts(self) -> SourceFacts | None:
        """The facts about the sources of this file so far; None if its backend counts the bytes."""
        return None

    def local_copy(self) -> LocalCopy | None:
        """A copy of the whole file on this machine, None if there is none."""
        return None

    def quiesce(self) -> None:  # noqa: B027 - a file may hold nothing
        """Releases what a snapshot of the process cannot carry, until it is needed again."""

    def close(self) -> None:  # noqa: B027 - a file may hold nothing
        """Releases what it holds. May be called again."""

    def read(self, offset: int, length: int) -> bytes:
        """Reads a small range as a whole, such as a header.

        Args:
            offset: The first byte.
            length: The number of bytes.

        Raises:
            RemoteError: As `chunks`.
        """
        parts: list[bytes] = []
        got = 0
        while got < length:
            before = got
            for chunk in self.chunks(offset + got, length - got):
                parts.append(bytes(chunk))
                got += len(parts[-1])
                note_progress()
            if not before < got <= length:
                raise self.error(
                    f"{got - before} bytes arrived instead of {length - before}",
                    offset=offset,
                    wanted=length,
                    got=before,
                )
        return b"".join(parts)

    def error(self, why: str, **facts: Any) -> RemoteError:
        """A RemoteError about this file; `facts` are arguments of RemoteError."""
        return RemoteError(f"{self.url}: {why}", path=self.url, **facts)
