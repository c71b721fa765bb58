"""Temporary replacement of names in other packages' modules.

The first user that enters a `Patcher` puts all replacements in place; the last one that leaves
restores the originals. A module that is not imported yet is patched as soon as it is imported; the
patcher never imports it. Not responsible for the content of the replacements (`patches`, `hooks`,
`other_libraries`).

A function that is not as expected is left alone: `Patcher.misfits` gives the reason, and the log
shows it once. The other functions are replaced all the same.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from gdsload.system.lifecycle import fork_safe_lock

T = TypeVar("T")
log = logging.getLogger("gdsload")


class Misfit(Exception):
    """Internals of another package are not as expected; the message says which."""


class _Absent(Misfit):
    """There is no function of that name."""


class Replacement(NamedTuple):
    """`owner.name` is to become `value`."""

    owner: Any
    name: str
    value: Any


class Patch(NamedTuple):
    """A function of another package, and how to replace it.

    `replacements(module)` raises Misfit (or any other exception) if the function is not as
    expected. An `optional` function exists only in some versions of the package: its absence is
    not a misfit.
    """

    function: str
    replacements: Callable[[ModuleType], Iterable[Replacement]]
    optional: bool = False


def function_of(owner: Any, name: str, *parameters: str, exact: bool = False) -> Any:
    """The function `name` of a module or class, if its parameters begin with `parameters`.

    With `exact` they are all of its parameters. Raises Misfit otherwise.
    """
    if (function := getattr(owner, name, None)) is None:
        raise _Absent("there is no such function")
    if parameters:
        found = tuple(inspect.signature(function).parameters)
        if (found if exact else found[: len(parameters)]) != parameters:
            expected = ", ".join(parameters) + ("" if exact else ", ...")
            raise Misfit(f"it takes ({', '.join(found)}), not ({expected})")
    return function


class Patcher:
    """Replacements by module name."""

    def __init__(self, patches: Mapping[str, Sequence[Patch]]) -> None:
        self._patches: dict[str, Sequence[Patch]] = dict(patches)
        self._lock = fork_safe_lock(self)
        self._users: set[Hashable] = set()
        self._originals: list[tuple[Replacement, Any]] = []
        self._import_hook: _ImportHook | None = None
        self._absent: set[str] = set()  # modules that are not patched yet
        self.misfits: dict[str, str] = {}  # "module.function" -> why it is not replaced
        self._logged: set[tuple[str, str]] = set()

    def add(self, patches: Mapping[str, Sequence[Patch]]) -> None:
        """Adds patches of other modules. Nobody may have entered yet."""
        self._patches.update(patches)

    @property
    def in_place(self) -> bool:
        """Whether somebody uses the replacements, or one of them is still in place."""
        return bool(self._users or self._originals)

    def enter(self, user: Hashable) -> None:
        """Puts the replacements in place, now or when their modules are imported."""
        with self._lock:
            is_first = not self._users
            self._users.add(user)
            if not is_first:
                return
            self._restore()  # what a Ctrl-C may have left
            self._absent = set(self._patches)
            self._import_hook = _ImportHook(set(self._patches), self._imported)
            sys.meta_path.insert(0, self._import_hook)
            imported = [sys.modules[name] for name in self._patches if name in sys.modules]
            for module in imported:
                if not _is_being_imported(module):
                    self._imported(module)
        # Imports that another thread has begun do not meet the hook. Without the lock: they may
        # import what does.
        for module in imported:
            if _is_being_imported(module):
                with suppress(Exception):  # of the import: the other thread reports it
                    module = importlib.import_module(module.__name__)
                if not _is_being_imported(module):  # by this thread
                    self._imported(module)

    def leave(self, user: Hashable) -> None:
        """Restores the originals when the last user leaves. Leaving without entering is allowed."""
        with self._lock:
            self._users.discard(user)
            if self._users:
                return
            try:
                self._restore()
            except BaseException:  # Ctrl-C: restore the rest
                self._restore()
                raise

    @contextmanager
    def used(self) -> Iterator[None]:
        """The replacements are in place inside the `with`. Nothing stays replaced if Ctrl-C arrives
        between two steps."""
        user = object()
        try:
            self.enter(user)
            yield
        finally:
            try:
                self.leave(user)
            except BaseException:  # Ctrl-C, perhaps before its first step
                self.leave(user)
                raise

    def _restore(self) -> None:
        if self._import_hook in sys.meta_path:
            sys.meta_path.remove(self._import_hook)
        self._import_hook = None
        while self._originals:
            (owner, name, value), original = self._originals[-1]
            # If somebody else has replaced it since, ours stays below theirs, where it has no
            # effect: removing theirs would be worse.
            if vars(owner).get(name) is value:
                setattr(owner, name, original)
            self._originals.pop()

    def _imported(self, module: ModuleType) -> None:
        with self._lock:
            if self._users and module.__name__ in self._absent:
                self._absent.remove(module.__name__)
                self._patch(module)

    def _patch(self, module: ModuleType) -> None:
        for patch in self._patches[module.__name__]:
            name = f"{module.__name__}.{patch.function}"
            self.misfits.pop(name, None)
            try:
                replacements = list(patch.replacements(module))
                if any(one.name not in vars(one.owner) for one in replacements):
                    raise _Absent("there is no such function")
            except Exception as error:
                if not (patch.optional and isinstance(error, _Absent)):
                    self._note_misfit(name, error)
                continue
            for replacement in replacements:
                owner, attribute, value = replacement
                self._originals.append((replacement, vars(owner)[attribute]))
                setattr(owner, attribute, value)

    def _note_misfit(self, name: str, error: Exception) -> None:
        why = str(error) if isinstance(error, Misfit) else f"{type(error).__name__}: {error}"
        self.misfits[name] = f"left as it is, since it is not as expected: {why}"
        if (name, why) not in self._logged:
            self._logged.add((name, why))
            log.warning("%s is %s", name, self.misfits[name])


@contextmanager
def held(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Sets a context variable inside the `with`, and restores its previous value afterwards."""
    before = variable.get()
    try:
        variable.set(value)
        yield
    finally:
        variable.set(before)


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


class _ImportHook(MetaPathFinder):
    """Calls `imported` after one of the named modules was imported."""

    def __init__(self, names: set[str], imported: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._imported = imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        loader: Any = None if spec is None else spec.loader
        if hasattr(loader, "exec_module"):
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if module.__name__ == fullname:  # a loader may serve several modules
                    self._imported(module)

            loader.exec_module = exec_module
        return spec
