"""The packages are complete: tree → sdist → wheel → import, with and without liburing."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "src" / "gdsload" / "_native"
NOT_SOURCE = shutil.ignore_patterns(
    ".*_cache",
    ".cache",
    ".git",
    ".hypothesis",
    ".venv*",
    "*.egg-info",
    "*.safetensors",
    "*.so",
    "__pycache__",
    "build",
    "dist",
)
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


class Wheel(NamedTuple):
    path: Path
    names: set[str]
    log: str

    @property
    def compiled(self) -> set[str]:
        return {Path(name).name.split(".")[0] for name in self.names if name.endswith(".so")}


def build(kind: str, tree: Path, out: Path, **variables: str) -> str:
    # -O0 compiles in a third of the time; the tests look at the content of the wheel only.
    ran = subprocess.run(
        [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, tree],
        env={**os.environ, "CFLAGS": f"{os.environ.get('CFLAGS', '')} -O0", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def wheel_of(tree: Path, out: Path, **variables: str) -> Wheel:
    log = build("wheel", tree, out, **variables)
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return Wheel(path, set(archive.namelist()), log)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree") / "gdsload"
    shutil.copytree(ROOT, tree, ignore=NOT_SOURCE)
    out = tmp_path_factory.mktemp("sdist")
    build("sdist", tree, out)
    (path,) = out.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (tree,) = out.iterdir()
    return tree


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    left = f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/gdsload/left.py"
    (unpacked / left).parent.mkdir(parents=True)
    (unpacked / left).touch()  # of a version that had this module
    return wheel_of(unpacked, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Wheel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel.path) as archive:
        archive.extractall(target)
    return target


def modules(wheel: Wheel) -> set[str]:
    """The native modules that this machine can build; the log of setup.py names the others."""
    sources = {path.stem for path in NATIVE.glob("*.pyx")}
    return sources - {"uring"} if "io_uring engine is left out" in wheel.log else sources


def test_sdist_contains_every_source(unpacked: Path) -> None:
    kinds = {".h", ".md", ".pxd", ".py", ".pyi", ".pyx", ".sh", ".toml", ".typed"}
    folders = ("src", "tests", "scripts", "docs", "benchmarks", "examples")
    wanted = {
        path.relative_to(ROOT)
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in kinds and "__pycache__" not in path.parts
    }
    wanted |= {path.relative_to(ROOT) for path in ROOT.iterdir() if path.suffix in kinds}
    wanted |= {Path("LICENSE"), Path("Makefile"), Path(".ci/run")}
    wanted = {path for path in wanted if not any(p.endswith(".egg-info") for p in path.parts)}
    assert {str(path) for path in wanted if not (unpacked / path).is_file()} == set()


def test_sdist_contains_no_build_output(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert [n for n in names if n.endswith((".so", ".o", ".c")) and "/src/" in n] == []
    assert [n for n in names if "/build/" in n or "__pycache__" in n] == []


def setup_py(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *words],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_description_has_absolute_links_if_the_repository_is_known() -> None:
    text = setup_py("--long-description", GDSLOAD_REPOSITORY="https://host/us/gdsload").stdout
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10 and all(link.startswith(("https://", "#")) for link in links)
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert pictures and all("/gdsload/raw/HEAD/docs/pictures/" in link for link in pictures)
    assert "](docs/" in setup_py("--long-description").stdout


def test_build_without_a_compiler_says_which_packages_are_missing(tmp_path: Path) -> None:
    ran = setup_py("build_ext", "--build-lib", str(tmp_path), CC=str(tmp_path / "no-such-cc"))
    assert ran.returncode != 0
    assert ran.stderr.splitlines()[-1].startswith("gdsload: no C compiler works here (Debian")


@pytest.mark.skipif(FREE_THREADED, reason="a free-threaded Python has no stable ABI")
def test_wheel_tag_is_stable_abi(wheel: Wheel) -> None:
    assert "-cp310-abi3-" in wheel.path.name
    native = [name for name in wheel.names if name.endswith(".so")]
    assert native
    assert all(name.endswith(".abi3.so") for name in native)


def test_wheel_contains_every_module_and_its_types(wheel: Wheel) -> None:
    assert wheel.compiled == modules(wheel)
    source = ROOT / "src"
    wanted = {
        str(path.relative_to(source))
        for kind in ("*.py", "*.pyi", "*.pxd", "py.typed")
        for path in (source / "gdsload").rglob(kind)
    }
    assert wanted <= wheel.names
    # The benchmarks are included, as gdsload.benchmarks.
    tree = {path.name for path in (ROOT / "benchmarks").glob("*.*")} - {"README.md"}
    packed = {name.rpartition("/")[2] for name in wheel.names if "gdsload/benchmarks/" in name}
    assert packed == {name for name in tree if not name.startswith("test_")}
    assert "gdsload/left.py" not in wheel.names
    compiled = [name for name in sorted(wheel.names) if name.endswith((".pyx", ".c"))]
    assert compiled == [  # compiled by the benchmarks that use them
        "gdsload/benchmarks/bare.c",
        "gdsload/benchmarks/instant.c",
        "gdsload/benchmarks/slowfs.c",
    ]


def test_wheel_runs_benchmarks(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from gdsload.cli import main;"
        " import gdsload.benchmarks as found; print(found.__file__); main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, installed, "bench", "io", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(installed / "gdsload" / "benchmarks"))
    assert "usage: gdsload bench io" in ran.stdout


def test_wheel_has_command_and_plugin_entry_points(installed: Path) -> None:
    (entry_points,) = installed.glob("*.dist-info/entry_points.txt")
    text = entry_points.read_text()
    assert "gdsload = gdsload.cli:main" in text
    assert "[vllm.general_plugins]\ngdsload = gdsload.integrations.vllm:register" in text
    assert "[sglang.srt.plugins]\ngdsload = gdsload.integrations.sglang:register" in text


def test_wheel_unpacked_can_be_imported(wheel: Wheel, installed: Path) -> None:
    code = (
        "import importlib, sys; sys.path.insert(0, sys.argv[1]); import gdsload; "
        "found = [gdsload] + [importlib.import_module(f'gdsload._native.{n}') "
        "for n in sys.argv[2:]]; print(*(module.__file__ for module in found), sep='\\n')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, installed, *sorted(modules(wheel))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    files = ran.stdout.split()
    assert len(files) == 1 + len(modules(wheel))
    assert [file for file in files if not file.startswith(str(installed))] == []


def test_modules_do_not_depend_on_the_directory_of_the_build(
    unpacked: Path, installed: Path
) -> None:
    paths = list((installed / "gdsload" / "_native").glob("*.so"))
    assert paths
    assert [path.name for path in paths if os.fsencode(unpacked) in path.read_bytes()] == []


def test_wheel_hides_liburing_symbols(wheel: Wheel, installed: Path) -> None:
    if "uring" not in wheel.compiled:
        pytest.skip(next(line for line in wheel.log.splitlines() if "is left out" in line))
    (path,) = (installed / "gdsload" / "_native").glob("uring.*.so")
    library = ctypes.CDLL(str(path))
    assert hasattr(library, "PyInit_uring")
    calls = set(re.findall(r"\bio_uring_\w+", (NATIVE / "uring.pyx").read_text()))
    assert calls
    assert {call for call in calls if hasattr(library, call)} == set()
    assert b"liburing.so" not in path.read_bytes()


def test_modules_on_free_threaded_python_require_the_gil(wheel: Wheel, unpacked: Path) -> None:
    translated = {path.stem: path.read_text() for path in unpacked.glob("build/cython/**/*.c")}
    assert translated.keys() == wheel.compiled
    asked = re.compile(r"#define __Pyx_FREETHREADING_COMPATIBLE (\w+)")
    # The last definition applies unless the compiler's command line sets another.
    found = {name: asked.findall(text)[-1] for name, text in translated.items()}
    assert set(found.values()) == {"Py_MOD_GIL_USED"}, found


def test_liburing_without_a_flag_that_the_engine_needs_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import runpy, sys; sys.argv = ['setup.py', '--name'];"
        " from setuptools import Distribution; from setuptools.command.build_ext import build_ext;"
        " names = runpy.run_path('setup.py');"
        " print(names['find_liburing'](build_ext(Distribution())))"
    )

    def found() -> str:
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()[-1]

    if found() == "None":
        pytest.skip("liburing is missing")
    # As in liburing 2.2.
    (tmp_path / "liburing.h").write_text(
        "#include_next <liburing.h>\n#undef IORING_SETUP_DEFER_TASKRUN\n"
    )
    monkeypatch.setenv("CFLAGS", f"-I{tmp_path}")
    assert found() == "None"


def test_build_without_liburing_succeeds(
    wheel: Wheel, unpacked: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # In a tree that was built with liburing: old build output must not be packed.
    without = wheel_of(unpacked, tmp_path_factory.mktemp("without"), GDSLOAD_LIBURING="0")
    assert "GDSLOAD_LIBURING=0: the io_uring engine is left out" in without.log
    assert without.compiled == {path.stem for path in NATIVE.glob("*.pyx")} - {"uring"}
