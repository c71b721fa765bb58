"""Imports go from a layer to those below it, never up and never in a circle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "gdsload"

# From the bottom to the top. A package stands for all modules in it.
LAYERS = (
    "_native errors dtypes version",
    "system report events telemetry",
    "remote",
    "checkpoint",
    "planning",
    "synthetic",
    "memory",
    "backends",
    "loading",
    "readahead distribution",
    "api safetensors_file",
    "peers",
    "integrations",
    "warmup aio",
    "doctor cli __main__",
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names.split()}
# What a process that only reads bytes must not wait for.
HEAVY = {"torch", "numpy", "transformers", "accelerate"}
LIGHT = ("checkpoint", "planning.read_plan", "memory.page_cache", "readahead.prefetch", "warmup")


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or any(path.parent.glob(f"{path.name}.py*"))


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from at_run_time(node)


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules of gdsload that a file imports when it runs, by their full names."""
    for node in at_run_time(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("gdsload."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gdsload"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if is_module(inner) else str(node.module)


MODULES = {
    module_of(path): set(imports(ast.parse(path.read_text())))
    for path in sorted(PACKAGE.rglob("*.py"))
}


def package_of(module: str) -> str:
    """The name under which a module stands in LAYERS; "" for gdsload itself."""
    return module.split(".")[1] if "." in module else ""


def depth_of(graph: dict[str, set[str]]) -> int:
    """How many nodes the longest path of imports visits. Fails where there is a circle."""
    depths: dict[str, int] = {}

    def depth(node: str, above: tuple[str, ...]) -> int:
        assert node not in above, " -> ".join([*above[above.index(node) :], node])
        if node not in depths:
            below = [depth(other, (*above, node)) for other in graph.get(node, ())]
            depths[node] = 1 + max(below, default=0)
        return depths[node]

    return max(depth(node, ()) for node in graph)


def test_every_module_has_a_layer() -> None:
    assert {package_of(module) for module in MODULES} - {""} - LAYER_OF.keys() == set()


@pytest.mark.parametrize("module", [module for module in MODULES if package_of(module)])
def test_imports_go_down(module: str) -> None:
    layer, package = LAYER_OF[package_of(module)], package_of(module)
    others = {other for other in MODULES[module] if package_of(other) not in ("", package)}
    assert {other for other in others if LAYER_OF[package_of(other)] > layer} == set()


def test_modules_import_each_other_in_no_circle() -> None:
    # The packages' own __init__ files only hand on names.
    depth_of({module: used - {module} for module, used in MODULES.items()})


def test_packages_are_at_most_ten_levels_deep() -> None:
    graph: dict[str, set[str]] = {}
    for module, used in MODULES.items():
        package = package_of(module)
        if (PACKAGE / package).is_dir() and package:
            below = {package_of(other) for other in used} - {"", package}
            graph.setdefault(package, set()).update(below)
    assert depth_of(graph) <= 10


def test_no_two_classes_have_one_name() -> None:
    files = (path for path in PACKAGE.rglob("*.py*") if path.suffix in (".py", ".pyx"))
    names = re.compile(r"^(?:cdef )?class (\w+)", re.MULTILINE)
    found = Counter(name for path in files for name in names.findall(path.read_text()))
    assert found["Pump"] == 1
    assert [name for name, number in found.items() if number > 1] == []


def test_native_modules_import_only_each_other() -> None:
    pattern = re.compile(r"^\s*(?:from|c?import)\s+(gdsload[\w.]*|\.{2,}[\w.]*)", re.MULTILINE)
    for path in sorted(PACKAGE.glob("_native/*.p[yx][xd]")):
        upward = {
            name
            for name in pattern.findall(path.read_text())
            if not name.startswith("gdsload._native")
        }
        assert upward == set(), path.name


def loaded_by(module: str) -> set[str]:
    """The top-level modules outside the standard library that importing `module` brings in."""
    code = (
        "import sys; before = set(sys.modules); import importlib; "
        f"importlib.import_module({module!r}); "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


def test_importing_gdsload_loads_the_standard_library_alone() -> None:
    assert loaded_by("gdsload") == {"gdsload"}


@pytest.mark.parametrize("name", LIGHT)
def test_reading_does_not_wait_for_torch(name: str) -> None:
    loaded = loaded_by(f"gdsload.{name}")
    assert "gdsload" in loaded
    assert loaded & HEAVY == set()


def test_heavy_import_is_noticed() -> None:
    """The two tests above can fail."""
    assert "safetensors" in loaded_by("safetensors")
