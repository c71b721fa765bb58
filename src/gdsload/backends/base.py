"""The seam between a plan and the road its bytes take: what every backend is, and nothing else.

A backend is asked before it is used (`probe`, `options`, `limits`), then given files and memory
(`register`) and lists of transfers (`prepare`, `post`, `check`, `release`). It never falls back to
another road by itself: it says what failed, operation by operation, and the loader decides. The
verbs are those of NIXL's South Bound API.
"""

from __future__ import annotations

import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, Limits, Transfer

# (major, minor). A plugin fits if its major is the same and its minor not newer.
API_VERSION = (1, 0)

DRAM, VRAM = "dram", "vram"
_POLL_SECONDS = 0.0005


class Option(NamedTuple):
    """Something a user may set on a backend."""

    name: str
    default: Any
    meaning: str


@dataclass(frozen=True, slots=True)
class Support:
    """What a backend said when it was asked whether it can work here.

    `reasons` says why not, or what it will have to do without; `hint` what would help.
    """

    usable: bool
    reasons: tuple[str, ...] = ()
    hint: str = ""

    def __str__(self) -> str:
        text = "; ".join(self.reasons) or ("usable" if self.usable else "not usable here")
        return f"{text} ({self.hint})" if self.hint else text


class OpenFile(NamedTuple):
    """A file to register: its descriptor stays the caller's. `direct_fd` is its O_DIRECT twin, or
    -1; direct reads start and end on multiples of `block` bytes."""

    path: str
    fd: int
    size: int
    direct_fd: int = -1
    block: int = DEFAULT_BLOCK_BYTES


class Memory(NamedTuple):
    """Memory to register. `region` keeps it alive while reads are in flight, where it is the
    library's own; `reused` says that many requests will read into it.

    VRAM is on `device`, and may be in pieces: `shares` are (place, bytes, address), and what lies
    between them is read and dropped; `region` is then whatever keeps all of them alive."""

    kind: str
    address: int
    length: int
    region: Any = None
    reused: bool = False
    device: str = ""
    shares: Sequence[tuple[int, int, int]] = ()


@dataclass(frozen=True, slots=True)
class Registration:
    """A backend's handle on a file or on memory: to be given back to it exactly once."""

    what: OpenFile | Memory
    handle: Any = None


# Stands in a request for a file that none of its transfers read.
NO_FILE = Registration(OpenFile("", -1, 0), (-1, -1))


class Failure(NamedTuple):
    """Why one transfer failed: bytes that came, the errno (0: the file ended early), and more.
    `code` is cuFile's own, where it is one; `final` says that no other road could do better."""

    transfer: int
    got: int
    errno: int
    text: str = ""
    code: int = 0
    final: bool = False

    @property
    def hopeless(self) -> bool:
        """Whether another road would meet the same: the file ended, or the device broke down."""
        return self.final or (self.errno == 0 and not self.text)


class Progress(NamedTuple):
    """What `check` has to tell: positions in the request that settled since it was last asked,
    those among them that failed, whether all have settled, and how long no byte has come."""

    settled: Sequence[int]
    failures: Sequence[Failure]
    finished: bool
    idle_seconds: float = 0.0


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: a whole number is wanted") from None


class Backend(ABC):
    """One road from files to memory."""

    name: ClassVar[str]
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    memory_kinds: ClassVar[frozenset[str]] = frozenset({DRAM})

    def __init__(self, **options: Any) -> None:
        """Raises TypeError for an option that this backend does not have, and for one that is no
        whole number where it counts something."""
        known = {option.name: option.default for option in self.options()}
        for name in options:
            if name not in known:
                raise TypeError(
                    f"backend {self.name!r} has no option {name!r};"
                    f" it has {', '.join(sorted(known)) or 'none'}"
                )
        self.settings: dict[str, Any] = {**known, **options}
        for name, default in known.items():
            if type(default) is int:
                self.settings[name] = _whole(name, self.settings[name])

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """What a user may set."""
        return ()

    @classmethod
    @abstractmethod
    def probe(cls, device: str = "cpu") -> Support:
        """Whether it can bring bytes to this device on this machine: tried, not guessed."""

    @classmethod
    def probe_with(cls, device: str, options: Mapping[str, Any]) -> Support:
        """The same for a backend that was asked for by name with these options."""
        return cls.probe(device)

    @abstractmethod
    def limits(self, device: str = "cpu") -> Limits:
        """What one request may look like."""

    @abstractmethod
    def register(self, what: OpenFile | Memory) -> Registration:
        """Makes a file or memory known, once for many transfers."""

    @abstractmethod
    def deregister(self, registration: Registration) -> None:
        """Gives a registration back. No request that uses it may be in flight."""

    @abstractmethod
    def prepare(
        self,
        transfers: Sequence[Transfer],
        files: Sequence[Registration],
        memory: Sequence[Registration],
    ) -> Any:
        """A request for these transfers; their `shard` and `target` count in the two lists."""

    @abstractmethod
    def post(self, request: Any) -> None:
        """Starts it and returns at once. A request that has finished can be posted again."""

    @abstractmethod
    def check(self, request: Any) -> Progress:
        """What has become of it; returns at once."""

    @abstractmethod
    def release(self, request: Any) -> None:
        """Ends it, also in flight: when this returns nobody writes to memory that can be freed."""

    def wait(self, request: Any, seconds: float, first: int = 0, last: int = -1) -> None:
        """Returns when the transfers `first` to `last` (-1: the last one) have settled, or sooner;
        after `seconds` at the latest."""
        time.sleep(min(seconds, _POLL_SECONDS))

    def yield_to_loads(self, request: Any, ahead: bool) -> None:  # noqa: B027 - it need not
        """Says whether a request is read ahead of its asking, and shall yield to loads that
        somebody waits for; before it is posted or after. What knows no classes may ignore it."""

    def follow(self, device: str, stream: int) -> bool:
        """Has the device copy whatever is prepared from now on only when it has done what it was
        given on `stream` (a CUstream) so far; returns at once. False where a backend cannot tell it
        so, and its caller has to wait for the stream."""
        return False

    def serving(self) -> Backend:
        """The road that bytes take now: itself, unless it stands for several."""
        return self

    def paths(self, request: Any) -> dict[str, int]:
        """Bytes by the road they took, for the report; empty where the backend does not tell."""
        return {}

    def close(self) -> None:  # noqa: B027 - a backend may hold nothing
        """Gives back what the backend itself holds. May be called again."""

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
