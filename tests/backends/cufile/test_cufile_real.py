"""Checkpoints through the real libcufile, in its compatibility mode, over the double of CUDA.

This tests our use of the interface with the real codes and limits. It tests no native mode and no
speed.
"""

from __future__ import annotations

import glob
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compiled import compiler
from gdsload.backends.cufile import library as library_module
from gdsload.synthetic import checkpoints
from gpudoubles import SOURCES

HERE = Path(__file__).parents[2]
RUN_SECONDS = 360  # ends a library that spins; a busy machine needs more than a minute


def libraries_here() -> list[Path]:
    """The library that torch installed, and those below GDSLOAD_CUFILE_HEADERS."""
    folders = [*sys.path, *os.environ.get("GDSLOAD_CUFILE_HEADERS", "").split(":")]
    found = [
        Path(path).resolve()
        for folder in filter(None, folders)
        for pattern in ("nvidia/*/lib/libcufile.so.0", "*/nvidia/*/lib/libcufile.so.0")
        for path in glob.glob(os.path.join(folder, pattern))
    ]
    return sorted(set(found))


LIBRARIES = libraries_here()
if not LIBRARIES:
    pytest.skip("no libcufile: the nvidia-cufile package is not here", allow_module_level=True)


def build(source: Path, out: Path, *arguments: str) -> None:
    command = [
        compiler(),
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-pthread",
        *arguments,
        str(source),
        "-o",
        str(out),
        "-ldl",
    ]
    subprocess.run(command, check=True)


def stand_in(library: Path, folder: Path) -> None:
    """A libcuda.so.1: the double, and stubs for the other functions that this libcufile needs."""
    names = {
        name.decode()
        for name in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", library.read_bytes())
        if not name.startswith(b"cuFile")
    }
    text = (SOURCES / "cuda_double.c").read_text()
    names -= set(re.findall(r"^EXPORT \w+[ *]+(cu\w+)\(", text, re.MULTILINE))
    stubs = folder / "stubs.inc"
    stubs.write_text("".join(f"STUB({name})\n" for name in sorted(names)))
    build(
        SOURCES / "cuda_double.c",
        folder / "libcuda.so.1",
        "-fvisibility=hidden",
        f'-DSTUBS="{stubs}"',
        "-Wl,-soname,libcuda.so.1",
    )


# A private /run with the one entry of the udev database that libcufile asks for.
SANDBOX = r"""
mount --make-rprivate / && mount -t tmpfs none /run && mkdir -p /run/udev/data || exit 97
dev=$(stat -c %d "$0")
printf 'E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n' > /run/udev/data/b$((dev>>8)):$((dev&255))
exec "$@"
"""


def command(folder: Path, environment: dict[str, str]) -> list[str]:
    """The prefix of a command in which libcufile finds what it needs; skips if there is none."""
    if not os.access("/proc/modules", os.R_OK):
        build(SOURCES / "modules_shim.c", folder / "shim.so")
        (folder / "modules").write_text("ext4 1 0 - Live 0x0\n")
        environment["LD_PRELOAD"] = str(folder / "shim.so")
        environment["STANDIN_MODULES"] = str(folder / "modules")
    if os.path.isdir("/run/udev/data"):
        return []
    sandbox = ["unshare", "-m", "sh", "-c", SANDBOX, str(folder)]
    try:
        tried = subprocess.run([*sandbox, "true"], capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"{library_module.obstacle()}; and no sandbox can be made: {error}")
    if tried.returncode:
        pytest.skip(
            f"{library_module.obstacle()}; and no sandbox can be made: {tried.stderr.strip()}"
        )
    return sandbox


def label(path: Path) -> str:
    found = re.search(r"cufile[\w-]*?-(\d[\d.]+\d)", str(path))
    return found[1] if found else "installed"


@pytest.fixture(scope="module", params=LIBRARIES, ids=label)
def library(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("real")
    return [checkpoints.write(name, folder / name) for name in ("tiny", "tiny-moe")]


CASES = ["gds_mt:65536", "gds_mt:4194304", "gds:0", "gds:65536"]  # the backend, bytes of a request


@pytest.fixture(scope="module")
def facts(
    library: Path, sources: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the processes of the cases found."""
    folder = tmp_path_factory.mktemp("loads")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "TMPDIR": str(folder / "log"),
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]),
    }
    environment.pop("CUFILE_LOGFILE_PATH", None)
    for name in ("here", "log", "facts"):
        (folder / name).mkdir()
    stand_in(library, folder)
    before = command(folder, environment)
    program = [sys.executable, HERE / "real_cufile.py", library, folder / "facts"]
    ran = subprocess.run(
        [*before, *program, *sources, *CASES],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder / "here",
        timeout=RUN_SECONDS,
        check=False,
    )
    assert ran.stdout.endswith(json.dumps(dict.fromkeys(CASES, 0)) + "\n"), ran.stdout + ran.stderr
    if not os.path.exists("/etc/cufile.json"):
        assert list((folder / "log").glob("cufile-*.log"))
        assert not list((folder / "here").iterdir()), "cuFile's log is in the working directory"
    return {case: json.loads((folder / "facts" / case).read_text()) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_load_through_real_cufile(case: str, facts: dict[str, Any]) -> None:
    found = facts[case]
    backend = case.partition(":")[0]
    assert found["engine"] == "compat"
    assert found["equal"] > 100
    assert found["rings"] == 0
    # libcufile counts single reads from 1.15 on, and batches of compatibility mode never.
    counted = found["version"] >= 1150 and backend == "gds_mt"
    paths = {path for each in found["paths"] for path in each}
    assert paths == {f"{backend}/{'posix' if counted else 'compat'}"}
