"""Checks of GPUs and of GPUDirect Storage, and what earlier loads measured.

CUDA is asked for its devices; cuFile is not opened.
"""

from __future__ import annotations

import glob
import os
import time
from contextlib import suppress
from dataclasses import replace

from gdsload.backends import tuning_cache
from gdsload.backends.cufile import config, library
from gdsload.doctor.finding import NO, PARTLY, YES, Finding
from gdsload.errors import BackendUnavailable
from gdsload.memory.staging_ring import rings
from gdsload.system import gpu
from gdsload.system.kernel_files import read_text


def findings(root: str = "/") -> list[Finding]:
    """All findings about GPUs and the I/O paths into their memory."""
    try:
        count = gpu.cuda().device_count
    except BackendUnavailable:
        count = 0
    devices = [cuda(f"cuda:{ordinal}") for ordinal in range(max(count, 1))]  # one has the reason
    paths = [libcufile(), opening(), native_path(), configuration()]
    found = driver(root, count)
    checks = [replace(each, needs=found.name) for each in (*devices, *paths)]
    return [found, *checks, *staging_rings(), *measured()]


def driver(root: str = "/", count: int = 0) -> Finding:
    """Whether there is an NVIDIA GPU with a driver. `count`: GPUs that CUDA has found."""
    if driven := glob.glob(os.path.join(root, "proc/driver/nvidia/gpus/*")):
        return Finding("GPU", YES, f"{len(driven)} with NVIDIA's driver")
    for path in glob.glob(os.path.join(root, "sys/bus/pci/devices/*")):
        kind, vendor = read_text(path, "class"), read_text(path, "vendor")
        if vendor == "0x10de" and kind.startswith("0x03"):
            detail = f"at {os.path.basename(path)}, without a driver"
            return Finding("GPU", PARTLY, detail, "install NVIDIA's driver")
    if count:  # in WSL there are neither of these files
        return Finding("GPU", YES, f"{count} found by CUDA")
    return Finding("GPU", NO, "no NVIDIA GPU found: loads go to DRAM")


def cuda(device: str) -> Finding:
    """Whether CUDA can use a device, such as "cuda:0"."""
    if why := gpu.why_not(device):
        hint = "install NVIDIA's driver, or give the container its devices"
        with suppress(BackendUnavailable):
            if gpu.cuda().device_count > gpu.ordinal_of(device):
                hint = "another process may use all of it, or have it alone: see nvidia-smi"
        return Finding(device, NO, why, hint)
    found = gpu.device(gpu.ordinal_of(device))
    node = gpu.numa_node(found.bus)
    detail = f"{found.name} at {found.bus}, NUMA node {node if node >= 0 else 'unknown'}"
    if found.integrated:
        detail += ", memory shared with the host"
    return Finding(device, YES, detail)


def libcufile() -> Finding:
    """Whether libcufile is found, and functions that only some releases have."""
    try:
        found = library.library()
    except BackendUnavailable as error:
        return Finding("libcufile", NO, str(error), "pip install nvidia-cufile")
    version = found.version
    release = f"{version // 1000}.{version % 1000 // 10}" if version else "of unknown version"
    detail = f"{release} at {found.path}"
    if "cuFileBatchIOSubmit" not in found.functions:
        return Finding("libcufile", PARTLY, f"{detail}, without batches")
    if "cuFileGetStatsL3" not in found.functions:
        detail += ": it does not count its reads"
        return Finding("libcufile", PARTLY, detail, "1.15 and later report the path of the bytes")
    return Finding("libcufile", YES, detail)


def opening() -> Finding:
    """Whether anything is known that would keep cuFile from opening."""
    why = library.obstacle()
    if not why:
        return Finding("opening cuFile", YES, "no obstacle is known")
    hint = "mount the host's /run/udev, read-only" if "udev" in why else "use a readable /proc"
    return Finding("opening cuFile", NO, why, hint)


def native_path() -> Finding:
    """Whether cuFile has a native path from storage to a GPU here."""
    mode, why = library.native_path()
    if mode == library.NVFS:
        return Finding("native path", YES, "nvidia-fs")
    if mode == library.P2P:
        hint = "the report of a load says whether it worked"
        return Finding("native path", PARTLY, "the driver is set up for PCI P2PDMA", hint)
    why = f"only cuFile's compatibility mode, which is used only if a user allows it: {why}"
    return Finding("native path", NO, why, "scripts/install_gds.sh --check (in a checkout)")


def configuration() -> Finding:
    """Whether cuFile accepts its configuration, and whether batches would stall with it."""
    name = "cuFile's configuration"
    found = config.settings(library.ROOT)
    if found.fault:
        why = f"cuFile does not open with {found.source}: {found.fault}"
        return Finding(name, NO, why, "correct the file, or set CUFILE_ENV_PATH_JSON to another")
    log = config.log_file(found)
    notes = [found.source or "its defaults", found.note, log and f"its log is {log}"]
    detail = "; ".join(filter(None, notes))
    limits = library.BatchLimits(
        found.number("per_buffer_cache_size_kb", 1024) << 10,
        found.number("max_device_cache_size_kb", 131072) << 10,
        found.number("io_batchsize", 128),
    )
    complaint = limits.complaint()
    if complaint and not found.has_slabs:
        why, _, hint = complaint.partition(": ")
        return Finding(name, PARTLY, f"{detail}; {why}", hint)
    return Finding(name, PARTLY if found.note else YES, detail)


def staging_rings() -> list[Finding]:
    """The staging rings of this process."""
    found = []
    for ring in rings():
        size = f"{ring.nbytes >> 20} MiB of {ring.kind.upper()}, {ring.native.count} slots"
        lost = [f"{ring.native.lost} slots lost"] if ring.native.lost else []
        verdict = PARTLY if lost or ring.notes else YES
        name = f"ring of cuda:{ring.ordinal}"
        found.append(Finding(name, verdict, "; ".join([size, *lost, *ring.notes])))
    return found


def measured() -> list[Finding]:
    """What earlier loads measured and chose, newest first."""
    found = []
    for each in tuning_cache.entries():
        rates = ", ".join(
            f"{backend} {rate / 1e9:.2f} GB/s" if rate else f"{backend} failed"
            for backend, rate in sorted(each.rates.items(), key=lambda pair: -pair[1])
        )
        day = time.strftime("%Y-%m-%d", time.localtime(each.at))
        stale = each.stale(tuning_cache.versions(), time.time())
        detail = f"{each.choice} was chosen: {rates}, on {day}{stale and f'; {stale}'}"
        name = f"measured from {each.mount} to {each.device}"
        hint = "the next large load there measures again"
        found.append(Finding(name, PARTLY if stale else YES, detail, hint))
    return found
