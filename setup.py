"""Builds the native modules: each ``src/gdsload/_native/*.pyx`` becomes one extension.

Static metadata is in pyproject.toml. This file contains what depends on the machine: whether
liburing can be linked, and whether this Python has a stable ABI to build against.

GDSLOAD_REPOSITORY is the address of the repository. The package index shows it, and links and
pictures of README.md become absolute. The release workflow sets it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

if sys.platform != "linux":
    sys.exit(f"gdsload runs on Linux only, and this is {sys.platform}")
if sys.byteorder != "little":
    sys.exit("gdsload runs on little-endian processors only: tensors are the bytes of files")

# The compiler that made this Python may not be here, as that of a relocatable Python.
if "CC" not in os.environ:
    maker = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if not shutil.which(maker) and shutil.which("cc"):
        os.environ["CC"] = "cc"

NATIVE = Path("src/gdsload/_native")
REPOSITORY = os.environ.get("GDSLOAD_REPOSITORY", "").rstrip("/")
# A free-threaded Python has no stable ABI (before 3.15): it gets modules of its own.
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")
# An -O in CFLAGS is the caller's choice; a later -O would override it.
OPTIMIZE = [] if "-O" in os.environ.get("CFLAGS", "") else ["-O3"]
# Debug information names the directory: two of them would give different wheels.
PORTABLE = f"-ffile-prefix-map={os.getcwd()}=."
COMPILE = [*OPTIMIZE, "-fvisibility=hidden", "-Wall", "-pthread", PORTABLE]
# -ldl is empty since glibc 2.34 and needed before it.
LINK = ["-pthread", "-ldl"]

# Functions and flags that uring.pyx needs. An older liburing counts as missing.
LIBURING_PROBE = """
#include <liburing.h>
int probe(int fd, void *memory) {
    struct io_uring ring;
    struct io_uring_params params = {0};
    params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    if (io_uring_queue_init_params(8, &ring, &params)) return 1;
    if (io_uring_register_buffers_sparse(&ring, 1)) return 2;
    io_uring_prep_read_fixed(io_uring_get_sqe(&ring), fd, memory, 4096, 0, 0);
    io_uring_submit(&ring);
    io_uring_queue_exit(&ring);
    return 0;
}
"""


class Linking(NamedTuple):
    """Compiler and linker arguments for an archive."""

    include_dirs: list[str]
    link_args: list[str]


def pkg_config(*args: str) -> str:
    """Output of pkg-config for liburing; empty if either is missing."""
    tool = shutil.which(os.environ.get("PKG_CONFIG", "pkg-config"))
    if tool is None:
        return ""
    ran = subprocess.run([tool, *args, "liburing"], capture_output=True, text=True, check=False)
    return ran.stdout.strip() if ran.returncode == 0 else ""


def liburing_candidates() -> list[Linking]:
    found = []
    libdir, includedir = pkg_config("--variable=libdir"), pkg_config("--variable=includedir")
    if libdir and (archive := Path(libdir, "liburing.a")).is_file():
        includes = [includedir] if includedir not in ("", "/usr/include") else []
        found.append(Linking(includes, [str(archive)]))
    # The compiler's default paths, with those of CFLAGS, CPATH, LDFLAGS and LIBRARY_PATH.
    found.append(Linking([], ["-l:liburing.a"]))
    return found


def builds(command: build_ext, text: str, linking: Linking) -> bool:
    """Whether a C source compiles and links into a shared object."""
    from setuptools._distutils.ccompiler import new_compiler
    from setuptools._distutils.sysconfig import customize_compiler

    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "probe.c")
        source.write_text(text)
        compiler = new_compiler(compiler=command.compiler)
        customize_compiler(compiler)
        with Path(scratch, "complaints").open("w") as sink, quiet(sink.fileno()):
            try:
                objects = compiler.compile(
                    [str(source)],
                    output_dir=scratch,
                    include_dirs=linking.include_dirs,
                    extra_preargs=["-Werror=implicit-function-declaration", "-fPIC"],
                )
                compiler.link_shared_object(
                    objects, str(Path(scratch, "probe.so")), extra_postargs=linking.link_args
                )
            except Exception:  # each compiler class raises its own error type
                return False
    return True


def require_toolchain(command: build_ext) -> None:
    """Ends the build, with the names of packages, if it would fail after many lines of output."""
    if not builds(command, "int probe;\n", Linking([], [])):
        sys.exit(
            "gdsload: no C compiler works here (Debian, Ubuntu: gcc libc6-dev; or name one in CC)"
        )
    headers = [sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
    if not builds(command, "#include <Python.h>\n", Linking(headers, [])):
        version = ".".join(map(str, sys.version_info[:2]))
        sys.exit(
            f"gdsload: the headers of Python {version} are missing (Debian, Ubuntu:"
            f" libpython{version}-dev; Fedora: python3-devel)"
        )


def find_liburing(command: build_ext) -> Linking | None:
    """The first liburing that compiles and links into a shared object, or None."""
    if os.environ.get("GDSLOAD_LIBURING") == "0":
        print("gdsload: GDSLOAD_LIBURING=0: the io_uring engine is left out")
        return None
    for candidate in liburing_candidates():
        if builds(command, LIBURING_PROBE, candidate):
            print(f"gdsload: io_uring engine, with {' '.join(candidate.link_args)}")
            return candidate
    print(
        "gdsload: no liburing >= 2.3 with a static archive: the io_uring engine is left out "
        "(Debian, Ubuntu: liburing-dev)"
    )
    return None


@contextlib.contextmanager
def quiet(sink: int):
    """Redirects file descriptor 2, to which the compiler writes, to ``sink``."""
    saved = os.dup(2)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def extension(pyx: Path, liburing: Linking | None) -> Extension:
    include_dirs, link_args = [str(NATIVE)], list(LINK)
    if pyx.stem == "uring" and liburing is not None:
        include_dirs += liburing.include_dirs
        # Hides the symbols: another liburing in the process must not be mixed with this one.
        link_args = [*liburing.link_args, "-Wl,--exclude-libs,ALL", *link_args]
    return Extension(
        f"gdsload._native.{pyx.stem}",
        sources=[str(pyx)],
        include_dirs=include_dirs,
        define_macros=[("Py_LIMITED_API", "0x030A0000")] if STABLE_ABI else [],
        py_limited_api=STABLE_ABI,
        extra_compile_args=COMPILE,
        extra_link_args=link_args,
        depends=[str(path) for kind in ("*.h", "*.pxd") for path in sorted(NATIVE.glob(kind))],
        language="c",
    )


class BuildPackage(build_py):
    """Packages the top-level benchmarks as ``gdsload.benchmarks``.

    In a checkout, the command line finds them in place.
    """

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        # A source left by an earlier build, but not part of this one, would be packaged.
        for built in Path(self.build_lib, "gdsload").rglob("*"):
            if built.is_file() and built.suffix != ".so":
                built.unlink()
        super().run()
        for source in packed_benchmarks():
            target = Path(self.build_lib, "gdsload", source)
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))


def packed_benchmarks() -> list[Path]:
    here = Path("benchmarks")
    kinds = ("*.py", "*.c", "*.sh", "*.txt", "*.json")
    found = [path for kind in kinds for path in sorted(here.glob(kind))]
    return [path for path in found if not path.name.startswith("test_")]


# They finalize build_ext for its file names, and compile nothing.
_METADATA_COMMANDS = frozenset({"sdist", "egg_info", "dist_info"})


class BuildNative(build_ext):
    """Looks for liburing and runs Cython, but only if something is built."""

    def finalize_options(self) -> None:
        waiting = self.distribution.ext_modules
        if not _METADATA_COMMANDS.issuperset(self.distribution.commands) and any(
            source.endswith(".pyx") for module in waiting for source in module.sources
        ):
            self.distribution.ext_modules = self.translate()
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self) -> None:
        # A module left by an earlier build, but not part of this one, would be packaged.
        wanted = {module.name.rpartition(".")[2] for module in self.extensions}
        for built in Path(self.build_lib, "gdsload", "_native").glob("*.so"):
            if built.name.partition(".")[0] not in wanted:
                built.unlink()
        super().run()

    def translate(self) -> list[Extension]:
        from Cython.Build import cythonize

        require_toolchain(self)
        sources = sorted(NATIVE.glob("*.pyx"))
        liburing = None
        if NATIVE / "uring.pyx" in sources:
            liburing = find_liburing(self)
            if liburing is None:
                sources.remove(NATIVE / "uring.pyx")
        return cythonize(
            [extension(pyx, liburing) for pyx in sources],
            build_dir="build/cython",
            include_path=["src"],
            # Python code around the modules, and a few lines in them, rely on the GIL: a
            # free-threaded Python enables it, with a warning, when it imports them.
            compiler_directives={"language_level": 3, "freethreading_compatible": False},
        )


def long_description() -> str:
    """README.md. On the package index, links work only if they are absolute."""
    text = Path("README.md").read_text(encoding="utf-8")
    if not REPOSITORY:
        return text
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{REPOSITORY}/raw/HEAD/", text)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)", rf"\1{REPOSITORY}/blob/HEAD/", text)


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    project_urls={"Repository": REPOSITORY} if REPOSITORY else {},
    ext_modules=[extension(pyx, None) for pyx in sorted(NATIVE.glob("*.pyx"))],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPackage},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE_ABI else {},
)
