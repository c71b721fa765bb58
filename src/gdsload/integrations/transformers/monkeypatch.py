"""Names in other packages' modules that are replaced for a while, and put back.

A module that is not imported yet is not imported for this: its names are replaced when it is.
Whoever needs the replacements enters; the first one puts them in place, and when the last one
leaves, everything is as it was. Ctrl-C may come between any two steps: whoever enters inside a
`try` and leaves in its `finally` leaves nothing behind.

A function that is not as expected is left alone; `Patcher.misfits` says which and why, and the log
hears of it once. The others are replaced all the same.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from gdsload.system.lifecycle import fork_safe_lock

T = TypeVar("T")
log = logging.getLogger("gdsload")


class Misfit(Exception):
    """Inner parts of another package are not what was expected; the text says which."""


class Replacement(NamedTuple):
    """`owner.name` shall be `value`."""

    owner: Any
    name: str
    value: Any


class Patch(NamedTuple):
    """A function of another package, and what it is replaced by.

    `swaps(module)` raises Misfit (or anything else) where the function is not as expected. That it
    is absent says nothing in versions of the package before `since` or from `until` on.
    """

    function: str
    swaps: Callable[[ModuleType], Iterable[Replacement]]
    since: tuple[int, ...] = ()
    until: tuple[int, ...] = (sys.maxsize,)

    def is_expected(self, module: ModuleType) -> bool:
        """Whether this version of the package should have it."""
        package = sys.modules.get(module.__name__.partition(".")[0])
        version = re.match(r"\d+(\.\d+)*", getattr(package, "__version__", ""))
        if version is None:
            return True
        return self.since <= tuple(map(int, version[0].split("."))) < self.until


class _Absent(Misfit):
    """There is no function of that name."""


def function_of(owner: Any, name: str, *front: str) -> Any:
    """The function `name` of a module or class, if its parameters begin with `front`. Raises
    Misfit."""
    if (function := getattr(owner, name, None)) is None:
        raise _Absent("there is no such function")
    if front:
        names = tuple(inspect.signature(function).parameters)
        if names[: len(front)] != front:
            raise Misfit(f"it takes ({', '.join(names)}), not ({', '.join(front)}, ...)")
    return function


def takes(function: Any, *names: str) -> bool:
    """Whether these are a function's parameters: it may be replaced by what was written for it."""
    return tuple(inspect.signature(function).parameters) == names


class _Done(NamedTuple):
    swap: Replacement
    before: Any


class Patcher:
    """What is to be replaced in which module: `wanted` maps module names to patches."""

    def __init__(self, wanted: Mapping[str, Sequence[Patch]]) -> None:
        self._wanted = dict(wanted)
        self._lock = fork_safe_lock(self)
        self._users: set[Hashable] = set()
        self._done: list[_Done] = []
        self._watch: _Watch | None = None
        self.misfits: dict[str, str] = {}  # "module.function" -> why it is not replaced
        self._told: set[tuple[str, str]] = set()

    @property
    def in_place(self) -> bool:
        return bool(self._users or self._done)

    def enter(self, user: Hashable) -> None:
        """Puts the replacements in place, now or when their modules are imported."""
        with self._lock:
            is_first = not self._users
            self._users.add(user)
            if not is_first:
                return
            absent = []
            for name in self._wanted:
                module = sys.modules.get(name)
                if module is None or getattr(module.__spec__, "_initializing", False):
                    absent.append(name)
                else:
                    self._replace_in(module)
            if absent:
                self._watch = _Watch(absent, self._arrived)
                sys.meta_path.insert(0, self._watch)

    def leave(self, user: Hashable) -> None:
        """Puts everything back once all who entered have left. Who did not enter may leave."""
        with self._lock:
            self._users.discard(user)
            if self._users:
                return
            try:
                self._put_back()
            except BaseException:  # Ctrl-C: what is left of it
                self._put_back()
                raise

    def _put_back(self) -> None:
        if self._watch is not None:
            if self._watch in sys.meta_path:
                sys.meta_path.remove(self._watch)
            self._watch = None
        while self._done:
            swap, before = self._done[-1]
            # Where somebody else has replaced it again, ours stays below theirs and does
            # nothing: taking theirs away would be worse.
            if vars(swap.owner).get(swap.name) is swap.value:
                setattr(swap.owner, swap.name, before)
            self._done.pop()

    def _arrived(self, module: ModuleType) -> None:
        with self._lock:
            if self._users:
                self._replace_in(module)

    def _replace_in(self, module: ModuleType) -> None:
        for patch in self._wanted[module.__name__]:
            name = f"{module.__name__}.{patch.function}"
            self.misfits.pop(name, None)
            try:
                swaps = list(patch.swaps(module))
                for swap in swaps:
                    if swap.name not in vars(swap.owner):
                        raise _Absent("there is no such function")
            except Exception as error:
                if not isinstance(error, _Absent) or patch.is_expected(module):
                    self._note(name, error)
                continue
            for swap in swaps:
                self._done.append(_Done(swap, vars(swap.owner)[swap.name]))
                setattr(swap.owner, swap.name, swap.value)

    def _note(self, name: str, error: Exception) -> None:
        why = str(error) if isinstance(error, Misfit) else f"{type(error).__name__}: {error}"
        self.misfits[name] = f"left as it is, since it is not as expected: {why}"
        if (name, why) not in self._told:
            self._told.add((name, why))
            log.warning("%s is %s", name, self.misfits[name])


@contextmanager
def held(variable: ContextVar[T], value: T) -> Iterator[None]:
    """The variable has this value inside, and the one it had before afterwards."""
    before = variable.get()
    try:
        variable.set(value)
        yield
    finally:
        variable.set(before)


class _Watch(MetaPathFinder):
    """Calls back when one of some modules has been imported."""

    def __init__(self, names: Sequence[str], arrived: Callable[[ModuleType], None]) -> None:
        self._names = set(names)
        self._arrived = arrived

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is None:
                continue
            if hasattr(spec.loader, "exec_module"):
                self._hook(spec.loader)
            return spec
        return None

    def _hook(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._arrived(module)

        loader.exec_module = exec_module
