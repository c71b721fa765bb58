"""An import goes down, never up, and never round in a circle."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "gdsload"

# From the ground up. A package stands for all that is in it.
FLOORS = (
    "_native collector errors dtypes lifecycle quiet threads underway version",
    "libraries checkpoint shard source header files strictjson layouts synth mounts",
    "plan",
    "arena progress gpu device ring residency report claims order cuts verdicts",
    "segments hostpool backends outcome roads blocks shared",
    "load doctor vram tensors early ahead opening",
    "model headstart warmup run seam loading weights labels slices feed devicefeed swaps"
    " destinations filling readiness stopping asynchronous ties",
    "cli integrations bench __main__",
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
# What a process that only wants to read may not wait for.
HEAVY = {"torch", "numpy", "transformers", "accelerate"}
LIGHT = ("early", "checkpoint", "plan", "residency", "warmup", "synth", "errors", "dtypes")


def sources() -> Iterator[Path]:
    yield from sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or any(path.parent.glob(f"{path.name}.py*"))


def imported(path: Path) -> set[str]:
    """The modules of gdsload that ``path`` imports anywhere in it, by their full names."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            names = {f"{base}.{alias.name}" for alias in node.names}
            inner = {name for name in names if is_module(name)}
            found |= inner | ({base} if len(inner) < len(names) else set())
    return {name for name in found if name.split(".")[0] == "gdsload"} - {module_of(path)}


def room(module: str) -> str:
    """The name under which a module stands in FLOORS; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


GRAPH = {module_of(path): imported(path) for path in sources()}


def test_every_module_has_a_floor() -> None:
    homeless = {room(module) for module in GRAPH} - {""} - FLOOR_OF.keys()
    assert homeless == set(), f"give {homeless} a floor in {Path(__file__).name}"


@pytest.mark.parametrize("module", [module for module in GRAPH if room(module)])
def test_imports_go_down(module: str) -> None:
    here = FLOOR_OF.get(room(module), -1)
    upward = {other for other in GRAPH[module] if FLOOR_OF.get(room(other), 99) > here}
    assert upward == set()


def test_imports_never_go_in_a_circle() -> None:
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " → ".join([*above[above.index(module) :], module])
        if module not in done:
            for other in GRAPH.get(module, ()):
                visit(other, (*above, module))
            done.add(module)

    for module in GRAPH:
        visit(module, ())


def test_native_modules_know_only_each_other() -> None:
    pattern = re.compile(r"^\s*(?:from|c?import)\s+(gdsload[\w.]*|\.{2,}[\w.]*)", re.MULTILINE)
    for path in sorted(PACKAGE.glob("_native/*.p[yx][xd]")):
        upward = {
            name
            for name in pattern.findall(path.read_text())
            if not name.startswith("gdsload._native")
        }
        assert upward == set(), path.name


def loaded_by(module: str) -> set[str]:
    """The top-level modules outside the standard library that importing ``module`` brings in."""
    code = (
        "import sys; before = set(sys.modules); import importlib; "
        f"importlib.import_module({module!r}); "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


def test_importing_gdsload_takes_the_standard_library_alone() -> None:
    assert loaded_by("gdsload") == {"gdsload"}


@pytest.mark.parametrize("name", [n for n in LIGHT if (PACKAGE / f"{n}.py").exists()])
def test_reading_does_not_wait_for_torch(name: str) -> None:
    loaded = loaded_by(f"gdsload.{name}")
    assert "gdsload" in loaded
    assert loaded & HEAVY == set()


def test_torch_is_noticed_when_it_is_imported() -> None:
    """The two tests above can fail: what they look at does see a heavy import."""
    assert "safetensors" in loaded_by("safetensors")
