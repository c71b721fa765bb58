"""The errors of gdsload.

    GdsloadError
    ├── CheckpointError(ValueError)             what is wrong, in which file, at which tensor
    │   ├── FileChanged                         the file was written or replaced while it was read
    │   └── CheckpointUnreadable(OSError)       a file cannot be opened; has errno
    │       ├── CheckpointNotFound(FileNotFoundError)
    │       └── CheckpointAccessError(PermissionError)
    ├── PlacementError(ValueError, RuntimeError) it does not fit, and by how many bytes
    ├── IntegrityError(ValueError)              bytes differ from a checksum: file, tensor, range
    ├── RankError(RuntimeError)                 .rank: another rank of a shared load failed
    ├── BackendUnavailable(RuntimeError)        .reasons: backend -> why, and a hint
    ├── PartialLoad(RuntimeError)               a load into existing tensors failed in the middle
    └── ReadError(OSError)                      path, offset, wanted, got, errno, hint
        ├── ShortRead
        ├── StallError
        ├── RemoteError                         .final: a remote source, such as an object store
        └── CuFileError                         .code: the error code of cuFile

Each is raised once, near its cause, and its text is one sentence that names the file, if there is
one. All can be pickled and keep their attributes. Errors that say that somebody has ended the load
(LoadCancelled, PrefetchCancelled, QueueClosed) are defined where they are raised.

In `from_pretrained` and in the functions that replace those of safetensors, the errors are
safetensors.SafetensorError as well (`safetensors_errors`). Except CheckpointUnreadable: there
safetensors raises an OSError, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

_SHOWN_CHARACTERS = 160  # a hostile name may be megabytes long


def shown(text: object) -> str:
    """`text` for a message: quoted, control characters escaped, shortened."""
    if not isinstance(text, str):
        return repr(text)[:_SHOWN_CHARACTERS]
    if len(text) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        return f"{text[:half]!r}...{text[-half:]!r} ({len(text)} characters)"
    return repr(text)


def one_line(text: str) -> str:
    """`text` with line breaks and unprintable characters escaped, which names may contain."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def without_traceback(error: BaseException) -> BaseException:
    """A copy of an error, to be kept or raised again. The traceback of the original has the frames
    of every caller, and in them the memory of a load."""
    try:
        return copy(error)
    except Exception:  # that of a function of the caller, with a constructor of its own
        return GdsloadError(f"{type(error).__name__}: {error}")


def listed(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first names or problems, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def _restored(kind: Any, safetensors: bool, args: tuple[Any, ...]) -> Any:
    return (also_safetensors(kind) if safetensors else kind)(*args)


def _reduced(error: BaseException) -> tuple[Any, ...]:
    """For pickle: the attributes are set again after the error was created from its text."""
    facts = dict(error.__dict__)
    if isinstance(error, OSError):
        facts.update(errno=error.errno, strerror=error.strerror, filename=error.filename)
    plain = getattr(error, "_without_safetensors", None)  # set by also_safetensors
    return _restored, (plain or type(error), plain is not None, error.args), facts


class GdsloadError(Exception):
    """The base class of all errors of gdsload."""

    def __str__(self) -> str:
        # OSError would print "[Errno 5] ..." instead of the message.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self)


class CheckpointError(GdsloadError, ValueError):
    """The checkpoint is invalid.

    Attributes:
        path: The file or directory, or None if unknown.
        tensor: The name of the tensor, or None.
    """

    def __init__(self, message: str, *, path: str | None = None, tensor: str | None = None) -> None:
        super().__init__(one_line(message))
        self.path = path
        self.tensor = tensor


class FileChanged(CheckpointError):
    """A file of the checkpoint was written or replaced after it was opened."""


class CheckpointUnreadable(CheckpointError, OSError):
    """A file or directory of the checkpoint cannot be opened.

    Attributes:
        errno: The error code of the system, or None.
        filename: The same as `path`.
    """

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
    """A file, a directory or a cached model does not exist."""


class CheckpointAccessError(CheckpointUnreadable, PermissionError):
    """This user may not read a file or directory of the checkpoint."""


class PlacementError(GdsloadError, ValueError, RuntimeError):
    """The tensors do not fit on the device, or the device cannot be used.

    Attributes:
        missing_bytes: The number of missing bytes, or None if unknown.
    """

    def __init__(self, message: str, *, missing_bytes: int | None = None) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class IntegrityError(GdsloadError, ValueError):
    """Bytes of a file differ from their checksum. They are not handed out.

    Attributes:
        path: The file.
        tensor: The name of the tensor, or None for a header or a whole file.
        offset: The first byte of the range that differs.
        nbytes: The length of this range, in bytes.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        tensor: str | None = None,
        offset: int = 0,
        nbytes: int = 0,
    ) -> None:
        super().__init__(one_line(message))
        self.path = path
        self.tensor = tensor
        self.offset = offset
        self.nbytes = nbytes


class BackendUnavailable(GdsloadError, RuntimeError):
    """No allowed backend works here.

    Attributes:
        reasons: For each backend why it does not work, and a hint.

    Example:
        >>> try:
        ...     gdsload.load_file("model", device="cuda:0", backend="gds")
        ... except gdsload.BackendUnavailable as error:
        ...     print(error.reasons)
    """

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})


class PartialLoad(GdsloadError, RuntimeError):
    """A load into existing tensors failed after it had begun to write. `__cause__` is the reason.

    Attributes:
        complete: The names of the targets that have all their bytes from the checkpoint.
        undefined: Those that may hold any bytes, and must be loaded again; also those of which only
            a part was to be loaded, and was.
        unchanged: Those that nothing was written to.

    Example:
        >>> try:
        ...     gdsload.load_into(model, "model")
        ... except gdsload.PartialLoad as error:
        ...     print(error.undefined)
    """

    def __init__(
        self,
        message: str,
        *,
        complete: tuple[str, ...] = (),
        undefined: tuple[str, ...] = (),
        unchanged: tuple[str, ...] = (),
    ) -> None:
        super().__init__(one_line(message))
        self.complete = complete
        self.undefined = undefined
        self.unchanged = unchanged


class ReadError(GdsloadError, OSError):
    """A read failed.

    Attributes:
        path: The file, or "" if unknown.
        offset: Where the read starts in the file, in bytes.
        wanted: The length of the read, in bytes.
        got: The bytes that were read before the failure.
        errno: The error code of the system, or None.
        hint: What would help, or "". It is part of the text.
        filename: The same as `path`, or None if unknown.
    """

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
        super().__init__(one_line(f"{message} ({hint})" if hint else message))
        self.path = path
        self.offset = offset
        self.wanted = wanted
        self.got = got
        self.errno = errno
        self.hint = hint
        self.filename = path or None


class ShortRead(ReadError):
    """The file is shorter than its header says."""


class StallError(ReadError):
    """The storage has not answered for longer than the limit."""


class RemoteError(ReadError):
    """A remote source, such as an object store, did not send the bytes.

    Attributes:
        final: Whether no retry can help: the file does not exist, may not be read, or was replaced
            after it was opened.
    """

    def __init__(self, message: str, *, final: bool = False, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.final = final


class RankError(GdsloadError, RuntimeError):
    """Another rank of a shared load has failed, has ended, or does not answer.

    Attributes:
        rank: The number of that rank in torch.distributed, or None if unknown.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(one_line(message))
        self.rank = rank


class CuFileError(ReadError):
    """An operation of cuFile failed.

    Attributes:
        code: The CUfileOpError or CUresult.
    """

    def __init__(self, message: str, *, code: int = 0, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.code = code


def also_safetensors(kind: Any) -> Any:
    """A subclass of `kind` and of safetensors.SafetensorError, with the name of `kind`.

    Returns `kind` itself if safetensors is not installed. Imports safetensors: call it only to
    raise an error.
    """
    try:
        from safetensors import SafetensorError
    except ImportError:  # not remembered: memory for it may have been short
        return kind
    return kind if issubclass(kind, SafetensorError) else _both(kind, SafetensorError)


@cache
def _both(kind: Any, safetensor_error: Any) -> Any:
    names = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__reduce__": _reduced,
        "_without_safetensors": kind,
    }
    return type(kind.__name__, (kind, safetensor_error), names)


def extra_hint(extra: str) -> str:
    """How to install the libraries of an extra. gdsload is on no package index yet, and its name
    there may become somebody else's."""
    return f"pip install '.[{extra}]' in a checkout of gdsload"


@contextmanager
def prefixed_with(source: str) -> Iterator[None]:
    """Puts the checkpoint in front of the text of errors that leave this block."""
    try:
        yield
    except GdsloadError as error:
        error.args = (one_line(f"{source}: {error}"),)
        if isinstance(error, CheckpointError) and error.path is None:
            error.path = source
        raise


@contextmanager
def safetensors_errors() -> Iterator[None]:
    """Makes errors of gdsload that leave this block instances of SafetensorError as well.

    CheckpointUnreadable is left as it is: code that distinguishes a missing file from a broken one
    may catch SafetensorError first.
    """
    try:
        yield
    except CheckpointUnreadable:
        raise
    except GdsloadError as error:
        kind: Any = type(error)
        error.__class__ = also_safetensors(kind)
        raise
