"""Checks of GPUs: whether there is one, each I/O path into its memory, and earlier measurements.

CUDA is asked for its devices; cuFile is not opened.
"""

from __future__ import annotations

import glob
import os
import re
import time

from gdsload.backends import tuning_cache
from gdsload.doctor import cufile
from gdsload.doctor.finding import NO, PARTLY, YES, Finding, read_text
from gdsload.errors import BackendUnavailable
from gdsload.system import gpu


def device(root: str = "/") -> Finding:
    """Whether there is an NVIDIA GPU with a driver."""
    models = [
        re.search(r"^Model:\s*(.+)$", read_text("/", path) or "", re.MULTILINE)
        for path in sorted(glob.glob(os.path.join(root, "proc/driver/nvidia/gpus/*/information")))
    ]
    if models:
        named = ", ".join(model[1].strip() if model else "unnamed" for model in models)
        return Finding("GPU", YES, f"{len(models)}: {named}")
    for path in glob.glob(os.path.join(root, "sys/bus/pci/devices/*")):
        kind, vendor = read_text(path, "class") or "", read_text(path, "vendor")
        if vendor == "0x10de" and kind.startswith("0x03"):
            detail = f"at {os.path.basename(path)}, without a driver"
            return Finding("GPU", PARTLY, detail, "install NVIDIA's driver")
    return Finding("GPU", NO, "no NVIDIA GPU found: loads go to DRAM")


def paths() -> list[Finding]:
    """What each I/O path into the memory of the GPUs needs; for all devices that CUDA has."""
    try:
        count = gpu.cuda().device_count
    except BackendUnavailable:
        count = 0
    found: dict[str, Finding] = {}
    for ordinal in range(max(count, 1)):  # without a device, the finding of cuda:0 has the reason
        for each in cufile.findings(f"cuda:{ordinal}"):
            found.setdefault(each.name, each)
    return list(found.values())


def measured() -> list[Finding]:
    """What earlier loads measured and chose, newest first."""
    found = []
    for each in tuning_cache.entries():
        rates = ", ".join(
            f"{backend} {rate / 1e9:.2f} GB/s" if rate else f"{backend} failed"
            for backend, rate in sorted(each.rates.items(), key=lambda pair: -pair[1])
        )
        day = time.strftime("%Y-%m-%d", time.localtime(each.at))
        stale = each.stale(tuning_cache.versions(each.device), time.time())
        detail = f"{each.choice} is used: {rates}, on {day}{stale and f'; {stale}'}"
        name = f"measured from {each.mount} to {each.device}"
        hint = "the next large load there measures again"
        found.append(Finding(name, PARTLY if stale else YES, detail, hint))
    return found
