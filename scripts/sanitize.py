"""Runs tests with the native modules, and the C libraries of the tests, built with sanitizers.

    make sanitize                      # both kinds, all tests of native code
    make sanitize ARGS=--quick         # a minute: `address`, the tests of the pump and of threads
    make sanitize ARGS='thread tests/native'

    kind       sanitizers                                   reported
    address    Address-, Leak-, UndefinedBehaviorSanitizer  every error; leaks allocated by our code
    thread     ThreadSanitizer                              races in which both sides are our code

    .cache/sanitize/KIND/   cc: gcc with the flags of the kind; lib/: the package, built by it

The interpreter and torch are not instrumented: their runtime library is preloaded. A mistake of
each kind (sanitize_control.c) must be reported before the tests run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
CACHE = ROOT / ".cache/sanitize"
PACKAGES = ("native", "backends", "memory", "loading", "readahead", "system")
TESTS = [f"tests/{package}" for package in PACKAGES]
QUICK = ["tests/native/test_pump.py", "tests/native/test_thread_start.py"]
UNKNOWN, FAILED = 2, 1  # exit statuses
# The rest of a log are notes and sums.
ERROR = re.compile(
    r"(ERROR|WARNING|FATAL): \w+Sanitizer|CHECK failed|LeakSanitizer has encountered a fatal error"
)
# Tests that no kind can run, by the beginning of their name: the reason.
SKIPPED = {
    "tests/native/test_page_size.py": "it preloads a library of its own, before the sanitizer's",
    "tests/backends/cufile/test_cufile_real.py": "it preloads a library of its own, as above",
    "tests/native/test_interleavings.py::test_mutants": "it runs code with faults on purpose",
}


class Kind(NamedTuple):
    """Sanitizers that fit into one build."""

    runtime: str  # the library that is preloaded
    flags: str
    options: dict[str, str]  # environment variables
    controls: dict[str, str]  # function of sanitize_control.c: what the report calls its mistake
    skipped: Mapping[str, str] = MappingProxyType({})  # more tests that cannot run: the reason


KINDS = {
    "address": Kind(
        "libasan",
        # Two runtime libraries do not share a log: undefined behaviour traps, which is logged.
        "-fsanitize=address,undefined -fsanitize-undefined-trap-on-error",
        {
            # An exit status of leaks would make processes of the interpreter fail.
            "ASAN_OPTIONS": "abort_on_error=1:exitcode=0:detect_leaks=1:allocator_may_return_null=1"
            ":handle_sigill=1:stack_trace_format='    #%n %p %F %S (%m)'",
            # Thread-local memory of ended threads can end the search for leaks (signal 11).
            "LSAN_OPTIONS": "use_tls=0:print_suppressions=0"
            f":suppressions={SCRIPTS}/sanitize_leaks.txt",
        },
        {"overrun": "heap-buffer-overflow", "overflow": "AddressSanitizer: ILL",
         "leak": "Direct leak"},
        {
            "tests/memory/test_page_cache.py::test_residency_asked_by_another_user_is_refused":
            "it changes its user, and the runtime library then ends the process (SIGABRT)",
            "tests/backends/posix/test_engine_faults.py::test_an_engine_that_breaks":
            "memory that a broken engine may still write to is never freed: an intended leak",
        },
    ),
    "thread": Kind(
        "libtsan",
        "-fsanitize=thread",
        {
            # The file system of the tests, slowfs.c, ends with its threads.
            "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:exitcode=0:atexit_sleep_ms=0"
            ":die_after_fork=0:history_size=4:report_thread_leaks=0"
        },
        {"race": "data race"},
        {
            "tests/loading/test_device_sharing.py::test_load_after_a_fork":
            "a thread of a forked child may get the identity of one of its parent, and the runtime"
            " library then ends the process",
        },
    ),
}  # fmt: skip


class Unsupported(Exception):
    """This machine cannot run a kind; the message is the reason."""


class Build:
    """The package, built with the sanitizers of a kind."""

    def __init__(self, name: str) -> None:
        self.name, self.kind = name, KINDS[name]
        self.folder = CACHE / name
        self.reports = self.folder / "reports"
        self.control = self.folder / "control.so"

    def make(self) -> None:
        """Compiles what has changed. Raises Unsupported."""
        gcc = shutil.which(os.environ.get("CC", "gcc"))
        if gcc is None:
            raise Unsupported("no gcc on the path")
        if re.search(r"[\s:]", str(self.folder)):
            raise Unsupported(f"{self.folder}: options of sanitizers take no blanks or colons")
        # Python's own flags make signed overflow wrap: to the sanitizer it would be no error.
        flags = f"-O1 -g -fno-omit-frame-pointer -fno-wrapv {self.kind.flags}"
        wrapper = f'#!/bin/sh\nunset LD_PRELOAD\nexec {gcc} "$@" {flags}\n'
        compiler = self.folder / "cc"
        if not compiler.exists() or compiler.read_text() != wrapper:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            compiler.write_text(wrapper)
            compiler.chmod(0o755)
        source = SCRIPTS / "sanitize_control.c"
        command = [compiler, "-shared", "-fPIC", "-pthread", source, "-o", self.control]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise Unsupported(
                f"{gcc} cannot link {self.kind.flags} (Debian, Ubuntu: libgcc-12-dev or the one of"
                f" your gcc; Fedora: {self.kind.runtime}):\n{made.stderr.strip()[-500:]}"
            )
        print(f"sanitize: building {self.folder.relative_to(ROOT)}/lib", flush=True)
        linker = sysconfig.get_config_var("LDSHARED").partition(" ")[2]
        subprocess.run(
            [sys.executable, "setup.py", "-q", "build", "--build-lib", self.folder / "lib",
             "--build-temp", self.folder / "objects"],
            cwd=ROOT,
            env={**os.environ, "CC": str(compiler), "LDSHARED": f"{compiler} {linker}"},
            check=True,
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Environment of a process that uses this build. Raises Unsupported."""
        needed = subprocess.run(["ldd", self.control], capture_output=True, text=True, check=True)
        runtime = re.search(rf"{self.kind.runtime}\.so\S* => (\S+)", needed.stdout)
        if runtime is None:
            raise Unsupported(f"the compiler does not link {self.kind.runtime} as a shared library")
        # Without this one, a C++ exception of torch ends in a failed check of the runtime library.
        cxx = subprocess.run(
            [self.folder / "cc", "-print-file-name=libstdc++.so.6"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        logged = f":log_path={self.reports}/log"
        return {
            **os.environ,
            **{name: value + logged for name, value in self.kind.options.items()},
            "CC": str(self.folder / "cc"),  # compiles the C libraries of the tests
            "LD_PRELOAD": f"{runtime[1]} {cxx}",
            "PYTHONMALLOC": "malloc",
            "PYTHONPATH": str(self.folder / "lib"),
        }

    def run(
        self, command: Sequence[str | Path], stderr: int | None = None
    ) -> tuple[int, list[str]]:
        """Exit status of a command, and the errors that were reported by it and its children."""
        shutil.rmtree(self.reports, ignore_errors=True)
        self.reports.mkdir(parents=True)
        ended = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=self.environment(),
            stderr=stderr,
            check=False,
        )
        found = [
            error
            for log in sorted(self.reports.iterdir())
            for error in errors_in(log.read_text(errors="replace"), self.folder)
        ]
        return ended.returncode, found

    def check(self) -> None:
        """Raises Unsupported unless each mistake of the control is reported."""
        for function, expected in self.kind.controls.items():
            code = f"import ctypes; ctypes.CDLL({str(self.control)!r}).{function}()"
            _, errors = self.run(["-c", code], subprocess.DEVNULL)
            if not any(expected in error for error in errors):
                raise Unsupported(f"{function}: no report of {expected!r}; got {errors}")
        code = "import gdsload._native.pump as module; print(module.__file__)"
        imported = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT, env=self.environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not imported.stdout.startswith(str(self.folder)):
            raise Unsupported(f"modules of another build: {imported.stdout}{imported.stderr}")


def errors_in(log: str, folder: Path) -> Iterator[str]:
    """The errors of a log: all but leaks that were allocated outside `folder`.

    The interpreter frees little at its end. A leak is ours if our module called the allocator.
    """
    leaks, separator = "ERROR: LeakSanitizer: detected memory leaks", "\n\n"
    for part in re.split(r"^=+\n", log, flags=re.MULTILINE):
        if leaks not in part:
            if ERROR.search(part):
                yield part
            continue
        for leak in part.partition(leaks)[2].split(separator):
            caller = re.search(r"^ *#1 .*\((\S+)\)$", leak, flags=re.MULTILINE)
            if caller is not None and caller[1].startswith(str(folder)):
                yield leak


def sanitized(name: str, tests: Sequence[str]) -> int:
    """Runs tests with a build; returns an exit status. Raises Unsupported."""
    build = Build(name)
    build.make()
    build.check()
    skipped = {**SKIPPED, **build.kind.skipped}
    for test, reason in skipped.items():
        print(f"sanitize: {name}: without {test}: {reason}")
    print(f"sanitize: {name}: {' '.join(tests)}", flush=True)
    # In one process: pytest-xdist loses the tests of a process that a sanitizer has ended.
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [*(f"--deselect={test}" for test in skipped), *tests]
    status, errors = build.run(command)
    for error in errors:
        print(error)
    print(f"sanitize: {name}: {len(errors)} errors reported; pytest ended with {status}")
    return FAILED if errors or status else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="*", metavar="KIND|TEST", help="kinds and tests: all")
    parser.add_argument("--quick", action="store_true", help="a part; skipped if it cannot run")
    options = parser.parse_args()
    kinds = [word for word in options.what if word in KINDS]
    tests = [word for word in options.what if word not in KINDS]
    status = 0
    for name in kinds or (["address"] if options.quick else KINDS):
        try:
            status |= sanitized(name, tests or (QUICK if options.quick else TESTS))
        except Unsupported as reason:
            print(f"sanitize: {name}: skipped: {reason}", file=sys.stderr)
            status |= 0 if options.quick else UNKNOWN
    return status


if __name__ == "__main__":
    sys.exit(main())
