"""What is installed, and which engines and backends work when they are tried."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys

from gdsload.backends import DRAM, registry
from gdsload.backends.posix.engines import try_engine
from gdsload.doctor.finding import NO, PARTLY, YES, Finding


def python() -> Finding:
    return Finding("python", YES, f"{platform.python_version()}, {sys.executable}")


def package(name: str) -> Finding:
    """Whether a package is installed, and its version; it is not imported."""
    try:
        return Finding(name, YES, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        found = importlib.util.find_spec(name) is not None
        detail = "on the path, but not installed" if found else "not installed"
        return Finding(name, PARTLY if found else NO, detail, f"pip install {name}")


def kernel() -> Finding:
    return Finding("kernel", YES, f"{platform.system()} {platform.release()} {platform.machine()}")


def liburing() -> Finding:
    """Whether this build of gdsload has liburing in it."""
    if importlib.util.find_spec("gdsload._native.uring") is not None:
        return Finding("liburing", YES, "built in")
    return Finding(
        "liburing", NO, "its headers were not there when gdsload was built",
        "install liburing-dev (Fedora: liburing-devel) and build gdsload again",
    )  # fmt: skip


def engine(name: str) -> Finding:
    """Whether an engine of the posix backend works: opened, and a byte read with it."""
    answer = try_engine(name)
    if answer.usable:
        return Finding(f"engine {name}", YES, "opened, and read with")
    hint = answer.hint or "a load takes the next engine that works"
    return Finding(f"engine {name}", NO, "; ".join(answer.reasons), hint)


def backends() -> list[Finding]:
    """The backends that are registered, and the plugins that were left out."""
    found, left_out = registry.discover()
    answers = registry.probe_all("cpu")
    findings = []
    for name in registry.ordered(found):
        answer = answers[name]
        reaches = ", ".join(sorted(kind.upper() for kind in found[name].memory_kinds))
        if DRAM not in found[name].memory_kinds:
            findings.append(Finding(f"backend {name}", PARTLY, f"{reaches} only: not tried here"))
            continue
        why = "; ".join(answer.reasons)
        verdict = (PARTLY if why else YES) if answer.usable else NO
        detail = f"reaches {reaches}{': ' if why else ''}{why}"
        findings.append(Finding(f"backend {name}", verdict, detail, answer.hint))
    findings += [
        Finding(f"plugin {name}", NO, f"left out: {reason}", "upgrade or remove it")
        for name, reason in left_out.items()
    ]
    return findings
