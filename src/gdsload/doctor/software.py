"""Checks of installed packages, engines and backends. Engines are tried with a real read."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from dataclasses import replace

from gdsload.backends import DRAM, registry
from gdsload.backends.posix.engines import ENGINES, try_engine
from gdsload.doctor.finding import NO, PARTLY, YES, Finding
from gdsload.remote.object_store import INSTALL_HINT


def python() -> Finding:
    return Finding("python", YES, f"{platform.python_version()}, {sys.executable}")


def package(name: str) -> Finding:
    """Whether a package is installed, and its version. The package is not imported."""
    try:
        return Finding(name, YES, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        found = importlib.util.find_spec(name) is not None
        detail = "importable, but not installed" if found else "not installed"
        return Finding(name, PARTLY if found else NO, detail, f"pip install {name}")


def remote_client() -> Finding:
    """Whether the client of object stores is installed."""
    found = package("obstore")
    if found.verdict == YES:
        return replace(found, detail=f"{found.detail}: reads s3://, gs://, az:// and https://")
    return replace(found, hint=INSTALL_HINT)


def kernel() -> Finding:
    return Finding("kernel", YES, f"{platform.system()} {platform.release()} {platform.machine()}")


def engine(name: str) -> Finding:
    """Whether an engine of the posix backend opens and reads a byte."""
    answer = try_engine(name)
    if answer.usable:
        choice = "; first choice" if name == ENGINES[0] else ""
        return Finding(f"engine {name}", YES, f"opens and reads{choice}")
    hint = answer.hint or "a load uses the next engine that works"
    return Finding(f"engine {name}", NO, "; ".join(answer.reasons), hint)


def backends() -> list[Finding]:
    """The registered backends, and the plugins that were left out."""
    found, left_out = registry.discover()
    support = registry.probe_all("cpu")
    findings = []
    for name in sorted(found):
        reaches = ", ".join(sorted(kind.upper() for kind in found[name].memory_kinds))
        if DRAM not in found[name].memory_kinds:
            findings.append(Finding(f"backend {name}", PARTLY, f"{reaches} only: not tried here"))
            continue
        why = "; ".join(support[name].reasons)
        verdict = (PARTLY if why else YES) if support[name].usable else NO
        detail = f"reaches {reaches}{': ' if why else ''}{why}"
        findings.append(Finding(f"backend {name}", verdict, detail, support[name].hint))
    for name, reason in left_out.items():
        detail = f"left out: {reason}"
        findings.append(Finding(f"plugin {name}", NO, detail, "upgrade or remove it"))
    return findings
