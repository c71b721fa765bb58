"""The interface of a backend: what the loader calls, and the small types that both sides exchange.

The loader asks a backend what it can do (`probe`, `options`, `limits`), registers files and memory
(`register`) and runs lists of transfers (`prepare`, `post`, `check`, `release`). A backend never
falls back to another one by itself: it reports each failed transfer, and the loader decides. The
verbs are those of NIXL's South Bound API.
"""

from __future__ import annotations

import numbers
import operator
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, SupportsIndex

from gdsload.errors import BackendUnavailable
from gdsload.memory import DRAM, VRAM
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, Limits, Transfer
from gdsload.remote.file import RemoteFile
from gdsload.system.storage import Storage

# (major, minor). A plugin fits if its major number is the same and its minor number is not newer.
API_VERSION = (1, 0)

_POLL_SECONDS = 0.0005
# By the type of an option's default: the types of its values, and their name.
_ACCEPTED: Mapping[type, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (SupportsIndex, "an integer"),
    float: (numbers.Real, "a number"),
}
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Option(NamedTuple):
    """An option of a backend: a user sets it with ``options={name: value}``."""

    name: str
    default: Any
    meaning: str


class Support(NamedTuple):
    """The answer of a probe.

    Attributes:
        usable: Whether the backend works here.
        reasons: Why it does not, or the limitations that it has here.
        hint: A change that would help, or "".
    """

    usable: bool
    reasons: tuple[str, ...] = ()
    hint: str = ""

    def __str__(self) -> str:
        text = "; ".join(self.reasons) or ("usable" if self.usable else "not usable here")
        return f"{text} ({self.hint})" if self.hint else text


class OpenFile(NamedTuple):
    """A file to register. The caller keeps its descriptors open, and closes them.

    Attributes:
        path: The path, for messages.
        fd: A descriptor for reads through the page cache.
        size: The size in bytes.
        direct_fd: A descriptor opened with O_DIRECT. -1 if there is none: transfers with the I/O
            mode "direct" are then read by `fd`.
        block: Direct reads start and end on multiples of this many bytes.
        storage: The storage that it is on.
        remote: The remote file to read; `fd` and `direct_fd` are then -1.
    """

    path: str
    fd: int
    size: int
    direct_fd: int = -1
    block: int = DEFAULT_BLOCK_BYTES
    storage: Storage = Storage()
    remote: RemoteFile | None = None


class Memory(NamedTuple):
    """Memory to register.

    Attributes:
        kind: `DRAM` or `VRAM`.
        address: Where it starts; 0 if `shares` says where its parts are, as loads to VRAM do.
        length: Its size in bytes.
        region: The object that keeps the memory alive while reads are in flight, or None.
        device: The device of VRAM, such as "cuda:0".
        shares: VRAM may consist of several allocations: (offset in this memory, bytes, address).
            Bytes between them are read and dropped.
    """

    kind: str
    address: int
    length: int
    region: Any = None
    device: str = ""
    shares: Sequence[tuple[int, int, int]] = ()


class Registration(NamedTuple):
    """A backend's handle on a file or on memory. It is given to `deregister` exactly once."""

    what: OpenFile | Memory
    handle: Any = None


# The path of bytes that are used from a mapping of their file, which no backend has read.
MAPPED_PATH = "mapped"
# Handle of a file that the engine reads by its descriptors: it has no file numbers.
NO_NUMBERS = (-1, -1)
# In a request it takes the place of a file that none of the transfers read.
NO_FILE = Registration(OpenFile("", -1, 0), NO_NUMBERS)


class Failure(NamedTuple):
    """Why one transfer failed.

    Attributes:
        transfer: The position of the transfer in the request.
        got: Bytes that were read before the failure.
        errno: The error number; 0 if the file ended early, or if `text` explains the failure.
        text: The reason in words, where the errno does not tell it.
        code: The error code of cuFile, or 0.
        final: True if no other backend could do better.
    """

    transfer: int
    got: int
    errno: int
    text: str = ""
    code: int = 0
    final: bool = False

    @property
    def ended_early(self) -> bool:
        """Whether the file ended before all bytes were read."""
        return self.errno == 0 and not self.text

    @property
    def permanent(self) -> bool:
        """Whether another backend would fail too."""
        return self.final or self.ended_early


class Progress(NamedTuple):
    """The answer of `check`.

    Attributes:
        settled: Positions of the transfers that were completed or failed since the last `check`.
        failures: Those among them that failed.
        finished: Whether all transfers of the request have settled.
        idle_seconds: Time since the last byte was read.
        device_busy: Whether the reads have ended, and copies to the device wait for its other work.
    """

    settled: Sequence[int]
    failures: Sequence[Failure]
    finished: bool
    idle_seconds: float = 0.0
    device_busy: bool = False


class BackendStatus(NamedTuple):
    """The facts about a backend that the report shows.

    Attributes:
        backend: The name of the backend that reads. `auto` reports the name of its choice.
        engine: The engine that it reads with, or "".
        choice: How it was chosen, if that was not the loader's decision, or "".
        refusals: Backends, engines and features that are not used, each with the reason.
        rates: Bytes per second that were measured, by backend.
        failovers: Bytes that were read again after a failure, by "from -> to".
    """

    backend: str
    engine: str = ""
    choice: str = ""
    refusals: Mapping[str, str] = _NOTHING
    rates: Mapping[str, float] = _NOTHING
    failovers: Mapping[str, int] = _NOTHING


class RequestFacts(NamedTuple):
    """The facts about a list of transfers that the report shows, after the request has ended.

    Attributes:
        transfers: The reads that were made.
        direct_bytes: Bytes that were read directly, -1 if unknown.
        short_reads: Reads that returned less than was asked for, and were continued.
        retries: Reads that were repeated after a temporary error.
        direct_refusals: Why direct reads were refused, by the position of the file.
        times: For each transfer when it was posted and when it was completed, in nanoseconds of
            the monotonic clock; the second is 0 if it was not completed. Empty if unknown.
        huge_pages: Units of 2 MiB of host memory that were touched as a huge page.
        small_pages: Units that were touched as small pages.
    """

    transfers: Sequence[Transfer]
    direct_bytes: int = -1
    short_reads: int = 0
    retries: int = 0
    direct_refusals: Mapping[int, str] = MappingProxyType({})
    times: Sequence[tuple[int, int]] = ()
    huge_pages: int = 0
    small_pages: int = 0


Registrations = Sequence[Registration]


def open_for(backend: Backend, device: str) -> None:
    """Opens what reads into a device need, by a request without reads."""
    nothing = Registration(Memory(VRAM, 0, 0, device=device), -1)
    backend.release(backend.prepare([], [], [nothing]))


def require_own_process(pid: int, backend: str) -> None:
    """Raises BackendUnavailable if `pid`, the process that opened the backend, is not this one."""
    if pid != os.getpid():
        raise BackendUnavailable(
            "this backend was opened before a fork: its threads and its device handles stayed in"
            " the parent process",
            {backend: "used after fork; start processes that load with 'spawn'"},
        )


class Backend(ABC):
    """A way to read files into memory.

    Attributes:
        name: The name that users select it by.
        api_version: The version of this interface that it was written for.
        memory_kinds: The kinds of memory that it can read into: `DRAM`, `VRAM` or both.
        settings: The options, with the defaults filled in.
    """

    name: ClassVar[str]
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    memory_kinds: ClassVar[frozenset[str]] = frozenset({DRAM})

    def __init__(self, **options: Any) -> None:
        """Checks the options.

        Raises:
            TypeError: The backend has no such option, or an option whose default is an int, a
                float or a bool was given something else than an integer, a real number or a bool.
        """
        known = {option.name: option.default for option in self.options()}
        for name in options:
            if name not in known:
                raise TypeError(
                    f"backend {self.name!r} has no option {name!r};"
                    f" it has {', '.join(sorted(known)) or 'none'}"
                )
        self.settings: dict[str, Any] = {**known, **options}
        for name, default in known.items():
            value, kind = self.settings[name], type(default)
            accepted, words = _ACCEPTED.get(kind, (object, ""))
            if not isinstance(value, accepted) or (
                words and (type(value) is bool) != (kind is bool)
            ):
                raise TypeError(f"{name}={value!r} must be {words}")
            if kind is int:
                self.settings[name] = operator.index(value)

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """The options that a user may set with ``options={name: value}``."""
        return ()

    @classmethod
    @abstractmethod
    def probe(cls, device: str = "cpu") -> Support:
        """Tries whether it can read into the memory of a device on this machine.

        Args:
            device: The device, such as "cpu" or "cuda:0".
        """

    @classmethod
    def probe_with(cls, device: str, options: Mapping[str, Any]) -> Support:
        """Like `probe`, for a backend that was selected by name and will get these options.

        Args:
            device: The device.
            options: The options of the user, by name.
        """
        return cls.probe(device)

    @abstractmethod
    def limits(self, device: str = "cpu") -> Limits:
        """The largest read in bytes, and the number of reads in flight, into a device."""

    @abstractmethod
    def register(self, what: OpenFile | Memory) -> Registration:
        """Registers a file or memory, once for many transfers.

        Raises:
            BackendUnavailable: It does not reach this kind of memory, or does not open.
            ReadError: It refuses the file.
        """

    @abstractmethod
    def deregister(self, registration: Registration) -> None:
        """Ends a registration. No request that uses it may be in flight.

        Args:
            registration: A result of `register`.
        """

    @abstractmethod
    def prepare(
        self, transfers: Sequence[Transfer], files: Registrations, memory: Registrations
    ) -> Any:
        """Makes a request; nothing is read yet.

        Args:
            transfers: The reads. Their `shard` and `target` are positions in the next two lists.
            files: Registered files. Where no transfer reads a file, the entry may be none of
                `register`.
            memory: Registered memory.

        Returns:
            A request: an object of the backend's own type.
        """

    @abstractmethod
    def post(self, request: Any) -> None:
        """Starts the reads and returns at once. A finished request can be posted again.

        Raises:
            BackendUnavailable: The backend can read no more, or was opened before a fork.
        """

    @abstractmethod
    def check(self, request: Any) -> Progress:
        """Returns the progress since the last `check`, at once."""

    @abstractmethod
    def release(self, request: Any) -> None:
        """Ends a request, also one in flight. After it, nothing is written to memory that can be
        freed: reads are cancelled, awaited, or the memory is kept alive. `is_idle`, `paths` and
        `facts` are called with the request afterwards."""

    def is_idle(self, request: Any) -> bool:
        """Whether nothing writes to the memory of a released request any more.

        False while reads or copies may, in memory that is kept alive: another backend then waits
        before it reads to the same place.

        Args:
            request: A released request.
        """
        return True

    def wait(self, request: Any, seconds: float, first: int = 0, last: int = -1) -> None:
        """Waits for transfers; may return earlier.

        Several threads may wait at once, also while another one calls `check` or `release`; after
        `release` it returns at once. Of one request, `check` and `release` are called by one thread
        at a time, but not always by the same one.

        Args:
            request: A posted request.
            seconds: The longest time to wait, in seconds.
            first: The position of the first transfer to wait for.
            last: The position of the last one; -1 is the last of the request.
        """
        time.sleep(min(seconds, _POLL_SECONDS))

    def yield_to_loads(self, request: Any, ahead: bool) -> None:  # noqa: B027 - optional
        """Sets whether a request gives way to loads. A backend without priorities ignores it.

        Args:
            request: A request, before or after `post`.
            ahead: Whether it is a prefetch that no caller waits for.
        """

    def follow(self, device: str, stream: int) -> bool:
        """Orders copies after other work on a device; returns at once.

        Args:
            device: The device, such as "cuda:0".
            stream: A CUstream. Copies of requests that are prepared from now on start after the
                work that is on this stream now.

        Returns:
            False if the backend cannot do so. The caller then waits for the stream itself.
        """
        return False

    def status(self) -> BackendStatus:
        """The engine, refusals, choice, rates and failovers so far, for the report."""
        return BackendStatus(self.name)

    def paths(self, request: Any) -> dict[str, int]:
        """Bytes of a released request by I/O path, such as "posix/uring/direct". Empty if the
        backend does not know."""
        return {}

    def facts(self, request: Any) -> Sequence[RequestFacts]:
        """Counts and times of a released request, for the report.

        A backend that stands for several returns one entry for each list of transfers that it gave
        to one of them. Empty if the backend does not know: then the report counts the transfers.
        """
        return ()

    def close(self) -> None:  # noqa: B027 - a backend may hold nothing
        """Releases everything that the backend holds. May be called again."""

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
