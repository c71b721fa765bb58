"""Names in other packages' modules that are replaced for a while, and put back.

A module that is not imported yet is not imported for this: its names are replaced when it is.
Whoever needs the replacements enters; the first one puts them in place, and when the last one
leaves, everything is as it was. Ctrl-C may come between any two steps: whoever enters inside a
`try` and leaves in its `finally` leaves nothing behind.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from gdsload.lifecycle import fork_safe_lock

T = TypeVar("T")


class Swap(NamedTuple):
    """`owner.name` shall be `value`. A name that the owner does not have is left alone."""

    owner: Any
    name: str
    value: Any


def takes(function: Any, *names: str) -> bool:
    """Whether these are a function's parameters: it may be replaced by what was written for it."""
    return tuple(inspect.signature(function).parameters) == names


class _Done(NamedTuple):
    swap: Swap
    before: Any


class Swaps:
    """What is to be replaced in which module: `wanted` maps module names to what says so."""

    def __init__(self, wanted: Mapping[str, Callable[[ModuleType], Iterable[Swap]]]) -> None:
        self._wanted = dict(wanted)
        self._lock = fork_safe_lock(self)
        self._users: set[Hashable] = set()
        self._done: list[_Done] = []
        self._watch: _Watch | None = None
        self.misfits: dict[str, str] = {}  # module -> why nothing was replaced in it

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
        try:
            swaps = list(self._wanted[module.__name__](module))
        except Exception as error:
            self.misfits[module.__name__] = f"{type(error).__name__}: {error}"
            return
        for swap in swaps:
            if swap.name in vars(swap.owner):
                self._done.append(_Done(swap, vars(swap.owner)[swap.name]))
                setattr(swap.owner, swap.name, swap.value)


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
