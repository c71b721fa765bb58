"""What can go wrong, as types.

    GdsloadError
    ├── CheckpointError(ValueError)             what is wrong, in which file, at which tensor
    │   ├── FileChanged                         the file was written or replaced while it was read
    │   └── CheckpointUnreadable(OSError)       the file system said no (errno is kept)
    │       ├── CheckpointNotFound(FileNotFoundError)
    │       └── CheckpointAccessError(PermissionError)
    ├── PlacementError(ValueError)              it cannot fit, and by how many bytes
    ├── BackendUnavailable(RuntimeError)        .reasons: backend -> why, and the hint
    └── ReadError(OSError)                      path, offset, wanted, got, errno, hint
        ├── ShortRead
        ├── StallError
        └── CuFileError                         .code: what cuFile answered

Each is raised once, near its cause, and its text is one sentence that names the file. All of them
can be pickled, so that they cross process borders whole.

Where gdsload stands in for safetensors, its errors are safetensors.SafetensorError as well
(`safetensors_errors`), except for CheckpointUnreadable: there safetensors raises an OSError, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

_SHOWN_CHARACTERS = 160  # a hostile name may be megabytes long; a message must stay a sentence


def shown(text: object) -> str:
    """`text` as it may stand in a message: quoted, control characters escaped, cut to size."""
    if not isinstance(text, str):
        return repr(text)[:_SHOWN_CHARACTERS]
    if len(text) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        return f"{text[:half]!r}...{text[-half:]!r} ({len(text)} characters)"
    return repr(text)


def _one_line(text: str) -> str:
    """Paths may hold line breaks, and bytes that no terminal can print: both are escaped."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def _facts(error: BaseException) -> dict[str, Any]:
    facts = dict(error.__dict__)
    if isinstance(error, OSError):
        facts.update(errno=error.errno, strerror=error.strerror, filename=error.filename)
    return facts


def _revive(kind: type[BaseException], args: tuple[Any, ...], facts: dict[str, Any]) -> Any:
    # Which __new__ is safe depends on the memory layout; __init__ is skipped, its facts are given.
    base: Any = OSError if issubclass(kind, OSError) else Exception
    error = base.__new__(kind)
    error.args = args
    for name, value in facts.items():
        setattr(error, name, value)
    return error


def _revive_also(kind: Any, args: tuple[Any, ...], facts: dict[str, Any]) -> Any:
    return _revive(also_safetensors(kind), args, facts)


class GdsloadError(Exception):
    """The root of every error that gdsload raises on purpose."""

    def __str__(self) -> str:
        # Without this, the OSError half would print "[Errno 5] ..." in place of our sentence.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (type(self), self.args, _facts(self))


class CheckpointError(GdsloadError, ValueError):
    """The checkpoint is not what it says it is. `path` and `tensor` say where, when known."""

    path: str | None
    tensor: str | None

    def __init__(self, message: str, *, path: str | None = None, tensor: str | None = None) -> None:
        super().__init__(_one_line(message))
        self.path = path
        self.tensor = tensor


class FileChanged(CheckpointError):
    """A file of the checkpoint was written to or replaced between its opening and now."""


class CheckpointUnreadable(CheckpointError, OSError):
    """The operating system refused a file or directory of the checkpoint; `errno` is kept."""

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        tensor: str | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, path=path, tensor=tensor)
        self.errno = errno
        self.filename = path


class CheckpointNotFound(CheckpointUnreadable, FileNotFoundError):
    """A file, a directory or a cached model that should be there is not."""


class CheckpointAccessError(CheckpointUnreadable, PermissionError):
    """A file or directory of the checkpoint may not be read by this user."""


class PlacementError(GdsloadError, ValueError):
    """A tensor cannot live where it was asked to. `missing_bytes` says by how much, when known."""

    missing_bytes: int | None

    def __init__(self, message: str, *, missing_bytes: int | None = None) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class BackendUnavailable(GdsloadError, RuntimeError):
    """No backend that was allowed can work. `reasons` maps each backend to why, and the hint."""

    reasons: dict[str, str]

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})


class ReadError(GdsloadError, OSError):
    """A read failed: `wanted` bytes at byte `offset` of `path`, of which `got` came.

    `errno` is the system's answer, or None; `hint` is a hint, or "". The text carries both.
    """

    path: str
    offset: int
    wanted: int
    got: int
    hint: str

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        offset: int = 0,
        wanted: int = 0,
        got: int = 0,
        errno: int | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(_one_line(f"{message} ({hint})" if hint else message))
        self.path = path
        self.offset = offset
        self.wanted = wanted
        self.got = got
        self.errno = errno
        self.hint = hint
        self.filename = path or None


class ShortRead(ReadError):
    """The file ended before the bytes that its header promises."""


class StallError(ReadError):
    """Storage gave no byte for longer than the limit; the text says how long and for what."""


class CuFileError(ReadError):
    """cuFile refused or failed an operation; `code` is its answer: CUfileOpError or CUresult."""

    code: int

    def __init__(self, message: str, *, code: int = 0, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.code = code


@cache
def also_safetensors(kind: Any) -> Any:
    """A subclass of `kind` that is a safetensors.SafetensorError as well, and has the name of
    `kind`. Imports safetensors: for use where an error is raised. `kind` itself if there is no
    safetensors."""
    try:
        from safetensors import SafetensorError
    except ImportError:
        return kind
    if issubclass(kind, SafetensorError):
        return kind

    def reduce(self: BaseException) -> tuple[Any, ...]:
        return _revive_also, (kind, self.args, _facts(self))

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": reduce}
    return type(kind.__name__, (kind, SafetensorError), names)


@contextmanager
def safetensors_errors() -> Iterator[None]:
    """Errors of gdsload that leave this block are caught by `except SafetensorError`, too.

    CheckpointUnreadable stays as it is: code that tells a missing file from a broken one may catch
    SafetensorError first.
    """
    try:
        yield
    except CheckpointUnreadable:
        raise
    except GdsloadError as error:
        kind: Any = type(error)
        error.__class__ = also_safetensors(kind)
        raise
