"""The roads into the memory of GPUs: what CUDA says of the devices, whether cuFile has a native way
there or only its compatibility mode, and what earlier loads have measured. cuFile is not opened.
"""

from __future__ import annotations

import time

from gdsload.backends import tuning_cache
from gdsload.doctor import cufile
from gdsload.doctor.finding import PARTLY, YES, Finding
from gdsload.errors import BackendUnavailable
from gdsload.system import gpu


def paths() -> list[Finding]:
    """What stands between this machine and each road into VRAM. Without a device the reason."""
    try:
        count = gpu.cuda().device_count
    except BackendUnavailable as error:
        return [cufile.native(), Finding("CUDA", "no", str(error))]
    found: dict[str, Finding] = {}
    for ordinal in range(count):
        for finding in cufile.findings(f"cuda:{ordinal}"):
            found.setdefault(finding.name, finding)
    found.pop("libcufile", None)  # it is looked for with the other libraries
    return list(found.values())


def measured() -> list[Finding]:
    """What earlier loads measured and chose, the newest first."""
    found = {}
    for each in tuning_cache.entries():
        rates = ", ".join(
            f"{road} {rate / 1e9:.2f} GB/s" if rate else f"{road} failed"
            for road, rate in sorted(each.rates.items(), key=lambda pair: -pair[1])
        )
        day = time.strftime("%Y-%m-%d", time.localtime(each.at))
        name = f"measured from {each.mount} to {each.device}"
        detail = f"{each.choice} is taken: {rates}, on {day}"
        stale = each.stale(tuning_cache.versions(each.device), time.time())
        if stale:
            detail += f"; {stale}"
        hint = "the next large load there measures again"
        found[name] = Finding(name, PARTLY if stale else YES, detail, hint)
    return list(found.values())
