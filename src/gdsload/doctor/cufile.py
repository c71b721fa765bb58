"""What stands between this machine and each road into VRAM, as facts to show: looked for in files
and asked of libraries, with nothing of cuFile opened.
"""

from __future__ import annotations

from typing import NamedTuple

from gdsload.backends.cufile import config, library
from gdsload.errors import BackendUnavailable
from gdsload.memory.staging_ring import rings
from gdsload.system import gpu

YES, PARTLY, NO = "yes", "partly", "no"


class Fact(NamedTuple):
    """One thing looked at: `verdict` is "yes", "partly" or "no"; `hint` is "" or what helps."""

    name: str
    verdict: str
    detail: str
    hint: str = ""


def facts(device: str = "cuda:0") -> list[Fact]:
    """All of them, in the order in which they matter."""
    return [_cuda(device), _libcufile(), _opening(), native(), _configuration(), *_rings()]


def _cuda(device: str) -> Fact:
    if why := gpu.why_not(device):
        return Fact(device, NO, why, "install NVIDIA's driver, or give the container its devices")
    found = gpu.facts(gpu.ordinal_of(device))
    where = f"NUMA node {found.node}" if found.node >= 0 else "NUMA node unknown"
    return Fact(device, YES, f"{found.name} at {found.bus}, {where}")


def _libcufile() -> Fact:
    try:
        found = library.library()
    except BackendUnavailable as error:
        return Fact("libcufile", NO, str(error), "pip install nvidia-cufile")
    version = found.version
    said = f"{version // 1000}.{version % 1000 // 10}" if version else "of no version"
    if "cuFileBatchIOSubmit" not in found.functions:
        return Fact("libcufile", PARTLY, f"{said} at {found.path}, without batches")
    if "cuFileGetStatsL3" not in found.functions:
        return Fact("libcufile", PARTLY, f"{said} at {found.path}: it does not count its reads",
                    "1.15 and later tell which road the bytes took")  # fmt: skip
    return Fact("libcufile", YES, f"{said} at {found.path}")


def _opening() -> Fact:
    why = library.obstacle()
    if not why:
        return Fact("opening cuFile", YES, "nothing speaks against it")
    hint = "mount the host's /run/udev, read-only" if "udev" in why else "use a readable /proc"
    return Fact("opening cuFile", NO, why, hint)


def native() -> Fact:
    """Whether cuFile has a way of its own from storage to a GPU here."""
    way, why = library.native_path()
    if way == library.NVFS:
        return Fact("native path", YES, "nvidia-fs")
    if way == library.P2P:
        return Fact("native path", PARTLY, "the driver is set up for PCI P2PDMA",
                    "a load's report tells whether it worked")  # fmt: skip
    why = f"only cuFile's compatibility mode, which is never taken unasked: {why}"
    return Fact("native path", NO, why, "scripts/install_gds.sh --check says what is missing")


def _configuration() -> Fact:
    name = "cuFile's configuration"
    found = config.settings(library.ROOT)
    if found.fault:
        return Fact(name, NO, f"cuFile does not open with {found.source}: {found.fault}",
                    "hint the file, or set CUFILE_ENV_PATH_JSON to another")  # fmt: skip
    log = config.log_file(found)
    detail = "; ".join(
        [found.source or "its defaults", *filter(None, [found.note, log and f"its log is {log}"])]
    )
    complaint = library.Limits(
        found.number("per_buffer_cache_size_kb", 1024) << 10,
        found.number("max_device_cache_size_kb", 131072) << 10,
        found.number("max_direct_io_size_kb", 1024) << 10,
        found.number("io_batchsize", 128),
    ).complaint()
    if complaint:
        why, _, hint = complaint.partition(": ")
        return Fact(name, PARTLY, f"{detail}; {why}", hint)
    return Fact(name, PARTLY if found.note else YES, detail)


def _rings() -> list[Fact]:
    found = []
    for ring in rings():
        detail = f"{ring.nbytes >> 20} MiB of {ring.kind.upper()}, {ring.native.count} slots"
        lost = ring.native.lost
        found.append(
            Fact(
                f"ring of cuda:{ring.ordinal}",
                PARTLY if lost or ring.notes else YES,
                "; ".join([detail, *([f"{lost} slots lost"] if lost else []), *ring.notes]),
            )
        )
    return found
