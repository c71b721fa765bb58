"""What GPUDirect Storage needs on this machine, as findings: from files, CUDA and the library's own
state. cuFile is not opened.
"""

from __future__ import annotations

from gdsload.backends.cufile import config, library
from gdsload.doctor.finding import NO, PARTLY, YES, Finding
from gdsload.errors import BackendUnavailable
from gdsload.memory.staging_ring import rings
from gdsload.system import gpu


def findings(device: str = "cuda:0") -> list[Finding]:
    """All findings about a device, the most important first."""
    return [_cuda(device), _libcufile(), _opening(), native(), _configuration(), *_rings()]


def _cuda(device: str) -> Finding:
    if why := gpu.why_not(device):
        return Finding(
            device, NO, why, "install NVIDIA's driver, or give the container its devices"
        )
    found = gpu.facts(gpu.ordinal_of(device))
    where = f"NUMA node {found.node}" if found.node >= 0 else "NUMA node unknown"
    return Finding(device, YES, f"{found.name} at {found.bus}, {where}")


def _libcufile() -> Finding:
    try:
        found = library.library()
    except BackendUnavailable as error:
        return Finding("libcufile", NO, str(error), "pip install nvidia-cufile")
    version = found.version
    release = f"{version // 1000}.{version % 1000 // 10}" if version else "of no version"
    if "cuFileBatchIOSubmit" not in found.functions:
        return Finding("libcufile", PARTLY, f"{release} at {found.path}, without batches")
    if "cuFileGetStatsL3" not in found.functions:
        detail = f"{release} at {found.path}: it does not count its reads"
        return Finding("libcufile", PARTLY, detail, "1.15 and later report the path of the bytes")
    return Finding("libcufile", YES, f"{release} at {found.path}")


def _opening() -> Finding:
    why = library.obstacle()
    if not why:
        return Finding("opening cuFile", YES, "no obstacle is known")
    hint = "mount the host's /run/udev, read-only" if "udev" in why else "use a readable /proc"
    return Finding("opening cuFile", NO, why, hint)


def native() -> Finding:
    """Whether cuFile has a native path from storage to a GPU here."""
    mode, why = library.native_path()
    if mode == library.NVFS:
        return Finding("native path", YES, "nvidia-fs")
    if mode == library.P2P:
        return Finding("native path", PARTLY, "the driver is set up for PCI P2PDMA",
                    "the report of a load says whether it worked")  # fmt: skip
    why = f"only cuFile's compatibility mode, which is used only if a user allows it: {why}"
    return Finding("native path", NO, why, "scripts/install_gds.sh --check says what is missing")


def _configuration() -> Finding:
    name = "cuFile's configuration"
    found = config.settings(library.ROOT)
    if found.fault:
        return Finding(name, NO, f"cuFile does not open with {found.source}: {found.fault}",
                    "correct the file, or set CUFILE_ENV_PATH_JSON to another")  # fmt: skip
    log = config.log_file(found)
    detail = "; ".join(
        [found.source or "its defaults", *filter(None, [found.note, log and f"its log is {log}"])]
    )
    complaint = library.BatchLimits(
        found.number("per_buffer_cache_size_kb", 1024) << 10,
        found.number("max_device_cache_size_kb", 131072) << 10,
        found.number("io_batchsize", 128),
    ).complaint()
    if complaint:
        why, _, hint = complaint.partition(": ")
        return Finding(name, PARTLY, f"{detail}; {why}", hint)
    return Finding(name, PARTLY if found.note else YES, detail)


def _rings() -> list[Finding]:
    found = []
    for ring in rings():
        detail = f"{ring.nbytes >> 20} MiB of {ring.kind.upper()}, {ring.native.count} slots"
        lost = ring.native.lost
        found.append(
            Finding(
                f"ring of cuda:{ring.ordinal}",
                PARTLY if lost or ring.notes else YES,
                "; ".join([detail, *([f"{lost} slots lost"] if lost else []), *ring.notes]),
            )
        )
    return found
