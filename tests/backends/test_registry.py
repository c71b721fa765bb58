"""Finding and choosing backends. A plugin that does not fit is reported, and no load fails."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import gdsload
from gdsload.backends import API_VERSION, Backend, Support, registry
from gdsload.backends.posix import PosixBackend
from gdsload.memory import DRAM


class Plain(PosixBackend):
    """A backend that fits."""

    name = "plain"


class NextPlain(Plain):
    """A newer version of it, for a newer gdsload."""

    api_version = (API_VERSION[0] + 1, 0)


class Unusable(PosixBackend):
    name = "unusable"

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        return Support(False, ("no such hardware",), "install it")


class Raises(PosixBackend):
    name = "raises"

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        raise RuntimeError("half installed")


class Mumbles(PosixBackend):
    name = "mumbles"

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        return True  # type: ignore[return-value]


class Newer(PosixBackend):
    name = "newer"
    api_version = (API_VERSION[0], API_VERSION[1] + 1)


class Other(PosixBackend):
    name = "other"
    api_version = (API_VERSION[0] + 1, 0)


class Strings(PosixBackend):
    name = "strings"
    api_version = ("1", "0")  # type: ignore[assignment]


class Versionless(PosixBackend):
    name = "versionless"
    api_version = "1.0"  # type: ignore[assignment]


class Nameless(PosixBackend):
    name = ""


class Automatic(PosixBackend):
    name = "auto"


class Impostor(PosixBackend):
    name = "posix"


class Kindless(PosixBackend):
    name = "kindless"
    memory_kinds = None  # type: ignore[assignment]


class OneKind(PosixBackend):
    name = "onekind"
    memory_kinds = DRAM  # type: ignore[assignment]


class Twin(PosixBackend):
    name = "plain"


class Abstract(Backend):
    name = "abstract"


MISFITS = {
    "newer": (Newer, "plugin API"),
    "other": (Other, "plugin API"),
    "strings": (Strings, "api_version"),
    "versionless": (Versionless, "api_version"),
    "nameless": (Nameless, "no name"),
    "automatic": (Automatic, '"auto" is reserved'),
    "kindless": (Kindless, "memory_kinds None must be a set"),
    "onekind": (OneKind, "memory_kinds 'dram' must be a set"),
    "abstract": (Abstract, "does not define check"),
    "function": (lambda: None, "not a subclass"),
}


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """The plugins of this environment."""
    there: list[EntryPoint] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: list(there))
    monkeypatch.setattr(registry, "_registered", {})
    return there


def entry(name: str) -> EntryPoint:
    return EntryPoint(name.lower(), f"{__name__}:{name}", registry.GROUP)


def test_posix_is_built_in() -> None:
    assert "posix" in registry.names()
    assert registry.find("posix") is PosixBackend
    assert registry.probe_all()["posix"].usable


def test_posix_is_found_without_metadata(entries: list[EntryPoint]) -> None:
    assert registry.find("posix") is PosixBackend


def test_metadata_that_cannot_be_read_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: str) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(importlib.metadata, "entry_points", fail)
    found, refusals = registry.discover()
    assert "posix" in found
    assert "Too many open files" in refusals["plugins"]


def test_backend_that_cannot_be_imported_is_a_refusal(
    entries: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = registry.import_module

    def fail(name: str) -> Any:
        if name.endswith("gds_mt"):
            raise ImportError("failed to map segment from shared object")
        return real(name)

    monkeypatch.setattr(registry, "import_module", fail)
    found, refusals = registry.discover()
    assert "posix" in found and "gds_mt" not in found
    assert "failed to map segment" in refusals["gds_mt"]


@pytest.mark.parametrize("wanted", ["auto", "posix"])
def test_load_without_an_import_of_its_backend_says_why(
    wanted: str, entries: list[EntryPoint], monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    def fail(name: str) -> None:
        raise OSError(24, "Too many open files", f"{name}.py")

    monkeypatch.setattr(registry, "import_module", fail)
    with pytest.raises(gdsload.BackendUnavailable) as caught:
        gdsload.load_file(tiny_checkpoint, backend=wanted, cache="direct")
    assert "cannot be imported: OSError" in caught.value.reasons["posix"]


def test_entry_point_is_found(entries: list[EntryPoint]) -> None:
    entries.append(entry("Plain"))
    assert registry.find("plain") is Plain
    assert registry.names()[-1] == "plain", "after the built-in backends"


@pytest.mark.parametrize("name", ["impostor", "posix"])
def test_plugin_with_the_name_of_a_built_in_backend_is_left_out(
    name: str, entries: list[EntryPoint]
) -> None:
    place = f"{__name__}:Impostor"
    entries.append(EntryPoint(name, place, registry.GROUP))
    found, refusals = registry.discover()
    assert found["posix"] is registry.find("posix") is PosixBackend
    key = name if name == "impostor" else place
    assert refusals == {key: "gdsload has its own backend 'posix'"}
    assert registry.probe_all()["posix"].usable, "the refusal is not that of posix"


@pytest.mark.parametrize("name", MISFITS)
def test_unfit_backend_cannot_be_registered(name: str, entries: list[EntryPoint]) -> None:
    backend, reason = MISFITS[name]
    with pytest.raises(gdsload.BackendUnavailable, match=reason) as caught:
        registry.register_backend(backend)  # type: ignore[arg-type]
    assert reason in next(iter(caught.value.reasons.values()))


@pytest.mark.parametrize(
    "name", ["Newer", "Other", "Strings", "Versionless", "Kindless", "Abstract", "Gone"]
)
def test_unfit_plugin_is_left_out(
    name: str, entries: list[EntryPoint], tiny_checkpoint: Path
) -> None:
    entries += [entry(name), entry("Plain")]
    key = name.lower()
    assert key not in registry.names() and "plain" in registry.names()
    assert not registry.probe_all()[key].usable and registry.probe_all()[key].reasons
    with pytest.raises(gdsload.BackendUnavailable) as caught:
        gdsload.load_file(tiny_checkpoint, backend=key)
    assert caught.value.reasons[key]
    gdsload.load_file(tiny_checkpoint, cache="buffered")
    assert gdsload.last_report().backend == "posix", "and no load fails"


def test_second_plugin_of_a_name_is_left_out(entries: list[EntryPoint]) -> None:
    entries += [entry("Plain"), entry("Plain"), entry("Twin")]
    found, refusals = registry.discover()
    assert found["plain"] is Plain
    assert refusals == {f"{__name__}:Twin": "another plugin has the name 'plain'"}


def test_plugin_that_ends_the_process_when_it_is_imported_is_left_out(
    entries: list[EntryPoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quits.py").write_text("raise SystemExit('needs libfoo')")
    monkeypatch.syspath_prepend(tmp_path)
    entries += [EntryPoint("quits", "quits:Quits", registry.GROUP), entry("Plain")]
    found, refusals = registry.discover()
    assert found["plain"] is Plain
    assert refusals == {"quits": "it cannot be imported: SystemExit: needs libfoo"}


def test_plugin_that_is_left_out_is_found_by_its_own_name(entries: list[EntryPoint]) -> None:
    entries.append(EntryPoint("package", f"{__name__}:Newer", registry.GROUP))
    entries.append(EntryPoint("broken", f"{__name__}:Gone", registry.GROUP))
    with pytest.raises(gdsload.BackendUnavailable, match="made for plugin API"):
        registry.find("newer")
    entries.append(entry("Plain"))
    entries.append(EntryPoint("next", f"{__name__}:NextPlain", registry.GROUP))
    assert registry.find("plain") is Plain and registry.probe_all()["plain"].usable
    with pytest.raises(
        gdsload.BackendUnavailable, match=r"unknown .*; broken is left out: it cannot"
    ):
        registry.find("gone")


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(Unusable, "no such hardware"), (Raises, "half installed"), (Mumbles, "not a Support")],
)
def test_unusable_backend_is_refused(
    backend: type[Backend],
    reason: str,
    entries: list[EntryPoint],
    monkeypatch: pytest.MonkeyPatch,
    tiny_checkpoint: Path,
) -> None:
    registry.register_backend(backend)
    monkeypatch.setattr(registry, "BUILT_IN", {backend.name: "", **registry.BUILT_IN})
    with pytest.raises(gdsload.BackendUnavailable, match=reason):
        gdsload.load_file(tiny_checkpoint, backend=backend.name)
    gdsload.load_file(tiny_checkpoint, cache="buffered")
    report = gdsload.last_report()
    assert report.backend == "posix" and reason in report.refusals[backend.name]


def test_no_usable_backend_raises_all_reasons(
    entries: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "BUILT_IN", {})
    entries += [entry("Newer")]
    registry.register_backend(Unusable)
    registry.register_backend(Raises)
    with pytest.raises(gdsload.BackendUnavailable) as caught:
        registry.choose()
    assert sorted(caught.value.reasons) == ["newer", "raises", "unusable"]


def test_plugin_is_chosen_without_built_in_backends(
    entries: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "BUILT_IN", {})
    entries += [entry("Newer"), entry("Plain")]
    registry.register_backend(Unusable)
    choice = registry.choose()
    assert choice.backend is Plain and "newer" in choice.refusals


def test_unreached_memory_is_refused(entries: list[EntryPoint]) -> None:
    with pytest.raises(gdsload.BackendUnavailable, match="does not load into DRAM"):
        registry.choose("cpu", "gds_mt")


def test_unknown_name_is_refused() -> None:
    with pytest.raises(gdsload.BackendUnavailable, match="posix") as caught:
        registry.choose("cpu", "warp")
    assert "warp" in caught.value.reasons


def test_last_registered_backend_wins(entries: list[EntryPoint]) -> None:
    class Again(Plain):
        pass

    registry.register_backend(Plain)
    registry.register_backend(Again)
    assert registry.find("plain") is Again


def test_support_text_has_reasons_and_hint() -> None:
    assert str(Support(True)) == "usable"
    assert str(Support(False, ("a", "b"), "hint it")) == "a; b (hint it)"
    facts: dict[str, Any] = registry.probe_all()
    assert all(isinstance(answer, Support) for answer in facts.values())
