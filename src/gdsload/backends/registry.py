"""The backends that this process knows, and the choice of one for a load.

Backends come from the entry point group ``gdsload.backends`` or from `register_backend`. A plugin
that does not fit or raises is reported by name and left out; it never makes a load fail.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload.backends.base import API_VERSION, Backend, Support
from gdsload.errors import BackendUnavailable
from gdsload.memory import DRAM, VRAM
from gdsload.system.device_name import device_kind

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

log = logging.getLogger("gdsload")

GROUP = "gdsload.backends"
# The library's own backends, in the order in which `auto` prefers them. A plugin is used only if it
# is selected by name, or if none of these works.
BUILT_IN = {
    "gds_mt": "gdsload.backends.cufile.gds_mt:GdsMtBackend",
    "posix": "gdsload.backends.posix:PosixBackend",
    "gds": "gdsload.backends.cufile.gds:GdsBackend",
}
# Backends for remote files. Each file names its backend; `auto` never chooses between them.
REMOTE = {
    "object_store": "gdsload.backends.remote:RemoteBackend",
    "nixl": "gdsload.backends.remote:PeerBackend",
    "replicas": "gdsload.backends.remote:ReplicaBackend",
}
_VRAM_ONLY = frozenset({"gds_mt", "gds"})
_registered: dict[str, type[Backend]] = {}


class Choice(NamedTuple):
    """The backend of a load, and why others were not taken."""

    backend: type[Backend]
    refusals: dict[str, str]


def register_backend(backend: type[Backend]) -> None:
    """Registers a backend in this process. It replaces one of the same name.

    Args:
        backend: A subclass of `Backend`.

    Raises:
        BackendUnavailable: It does not fit this library; it has the reason.

    Example:
        >>> register_backend(MyBackend)
        >>> gdsload.load_file("model", backend="my_backend")
    """
    complaint = misfit(backend)
    if complaint:
        name = getattr(backend, "name", repr(backend))
        raise BackendUnavailable(f"backend {name!r}: {complaint}", {str(name): complaint})
    _registered[backend.name] = backend


def misfit(backend: Any) -> str:
    """Why this is no backend for this library, or ""."""
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        return "it is not a subclass of gdsload.backends.Backend"
    if not _is_named(backend):
        return "it has no name"
    if backend.name == "auto":
        return 'the name "auto" is reserved'
    try:
        major, minor = (operator.index(number) for number in backend.api_version)
    except (TypeError, ValueError):
        return f"its api_version {backend.api_version!r} is not (major, minor)"
    if major != API_VERSION[0] or minor > API_VERSION[1]:
        return (
            f"it was made for plugin API {major}.{minor}, this gdsload has"
            f" {API_VERSION[0]}.{API_VERSION[1]}"
        )
    kinds: Any = backend.memory_kinds
    if not isinstance(kinds, (set, frozenset)) or not kinds <= {DRAM, VRAM}:
        return f"its memory_kinds {kinds!r} must be a set of DRAM and VRAM"
    missing: frozenset[str] = getattr(backend, "__abstractmethods__", frozenset())
    return f"it does not define {', '.join(sorted(missing))}" if missing else ""


def _is_named(backend: Any) -> bool:
    return isinstance(getattr(backend, "name", None), str) and bool(backend.name)


def _taken(name: str) -> str:
    """Why a plugin cannot have this name, or "": only `register_backend` replaces a backend."""
    return f"gdsload has its own backend {name!r}" if name in {**BUILT_IN, **REMOTE} else ""


def built_in(name: str) -> type[Backend]:
    """A built-in backend, or its replacement if one was registered under the same name.

    Raises:
        BackendUnavailable: It cannot be imported.
    """
    if name in _registered:
        return _registered[name]
    module, _, attribute = {**BUILT_IN, **REMOTE}[name].partition(":")
    try:
        backend: type[Backend] = getattr(import_module(module), attribute)
    except Exception as error:  # no memory, or no descriptor, to import it with
        reason = f"it cannot be imported: {type(error).__name__}: {error}"
        raise BackendUnavailable(f"backend {name!r}: {reason}", {name: reason}) from error
    return backend


def names_of_options(kind: type[Backend]) -> set[str]:
    return {option.name for option in kind.options()}


def options_for_vram_alone() -> set[str]:
    """The options of built-in backends for VRAM alone that no other has. Raises
    BackendUnavailable."""
    of_vram, others = set[str](), set[str]()
    for name in BUILT_IN:
        (of_vram if name in _VRAM_ONLY else others).update(names_of_options(built_in(name)))
    return of_vram - others


def discover() -> tuple[dict[str, type[Backend]], dict[str, str]]:
    """All backends by name, and the reasons for those that were left out."""
    # Imported here: it takes 20 ms, which a load by a built-in backend does not need.
    from importlib.metadata import entry_points

    found: dict[str, type[Backend]] = {}
    plugins: dict[str, type[Backend]] = {}
    refusals: dict[str, str] = {}
    for name in BUILT_IN:
        try:
            found[name] = built_in(name)
        except BackendUnavailable as error:
            refusals.update(error.reasons)
    entries: list[EntryPoint] = []
    try:
        entries = list(entry_points(group=GROUP))
    except Exception as error:  # no descriptor left, or broken metadata of some distribution
        refusals["plugins"] = f"they cannot be listed: {type(error).__name__}: {error}"
    for entry in entries:
        name = entry.name
        try:
            backend = entry.load()
            complaint = misfit(backend) or _taken(backend.name)
            if _is_named(backend) and not _taken(backend.name):
                name = backend.name
            if not complaint and plugins.get(name, backend) is not backend:
                complaint, name = f"another plugin has the name {name!r}", entry.value
        except (Exception, SystemExit) as error:
            complaint = f"it cannot be imported: {type(error).__name__}: {error}"
        if complaint:
            refusals[entry.value if _taken(name) else name] = complaint
            log.warning("backend %r (%s) is left out: %s", entry.name, entry.value, complaint)
        else:
            plugins[backend.name] = backend
    plugins.update(_registered)
    return {**found, **dict(sorted(plugins.items()))}, refusals


def names() -> list[str]:
    """The names of all backends: the library's own, in the order in which `auto` prefers them, and
    then the plugins."""
    return list(discover()[0])


def find(name: str) -> type[Backend]:
    """The backend of that name.

    Raises:
        BackendUnavailable: It is unknown (the others are named), unfit, or cannot be imported.
    """
    if name in BUILT_IN or name in REMOTE:
        return built_in(name)
    found, refusals = discover()
    if name in found:
        return found[name]
    left_out = "".join(f"; {other} is left out: {why}" for other, why in refusals.items())
    unknown = f"unknown (available: {', '.join(sorted(found))}{left_out})"
    reason = refusals.get(name, unknown)
    raise BackendUnavailable(f"backend {name!r}: {reason}", {name: reason})


def reaches(name: str, kind: str) -> bool:
    """Whether a backend reads into a kind of memory; ``auto`` reads into all.

    Args:
        name: The name of a backend.
        kind: `DRAM` or `VRAM`.

    Raises:
        BackendUnavailable: There is no backend of that name.
    """
    return name == "auto" or kind in find(name).memory_kinds


def probe_all(device: str = "cpu") -> dict[str, Support]:
    """The answer of every backend's probe, with the plugins that were left out.

    Args:
        device: The device to load into, such as "cpu" or "cuda:0".

    Returns:
        The answers, by name of the backend or of the entry point.
    """
    found, refusals = discover()
    answers = {name: _probe(backend, device) for name, backend in found.items()}
    return {name: Support(False, (reason,)) for name, reason in refusals.items()} | answers


def choose(
    device: str = "cpu", wanted: str = "auto", options: Mapping[str, Any] | None = None
) -> Choice:
    """Chooses the backend for a load.

    Args:
        device: The device to load into, such as "cpu" or "cuda:0".
        wanted: The name of a backend, or "auto" for the first that works.
        options: The options for the wanted backend: some decide whether it works.

    Returns:
        The class of the backend, and why others were not taken.

    Raises:
        BackendUnavailable: No backend works; it has all the reasons.

    Example:
        >>> choice = choose("cpu")
        >>> with choice.backend() as backend:
        ...     backend.limits()
    """
    if wanted != "auto":
        backend = find(wanted)
        support = _probe(backend, device, options)
        if not support.usable:
            raise BackendUnavailable(
                f"backend {wanted!r} cannot load to {device}: {support}", {wanted: str(support)}
            )
        return Choice(backend, {})
    refusals: dict[str, str] = {}
    dram = device_kind(device) == "cpu"
    for name in BUILT_IN:
        if dram and name in _VRAM_ONLY:
            continue
        try:
            backend = built_in(name)
        except BackendUnavailable as error:
            refusals.update(error.reasons)
            continue
        if is_usable(backend, device, refusals):
            return Choice(backend, refusals)
    found, left_out = discover()
    refusals.update(left_out)
    for name, backend in found.items():
        if name not in BUILT_IN and is_usable(backend, device, refusals):
            return Choice(backend, refusals)
    raise BackendUnavailable(f"no backend can load to {device}: {refusals}", refusals)


def is_usable(backend: type[Backend], device: str, refusals: dict[str, str]) -> bool:
    """Whether a backend works here; if not, `refusals` gets the reason."""
    support = _probe(backend, device)
    if not support.usable:
        refusals[backend.name] = str(support)
    return support.usable


def _probe(
    backend: type[Backend], device: str, options: Mapping[str, Any] | None = None
) -> Support:
    kind = DRAM if device_kind(device) == "cpu" else VRAM
    if kind not in backend.memory_kinds:
        return Support(False, (f"it does not load into {kind.upper()}",))
    try:
        support = backend.probe_with(device, options) if options else backend.probe(device)
    except (Exception, SystemExit) as error:
        log.warning("backend %r failed while it was probed", backend.name, exc_info=True)
        return Support(False, (f"its probe raised {type(error).__name__}: {error}",))
    if not isinstance(support, Support):
        return Support(False, (f"its probe answered {support!r}, not a Support",))
    return support
