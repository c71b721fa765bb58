"""fio beside the arms: what a tool that everybody knows reads from the same files.

It reuses a few buffers, so it never pays for fresh memory, and nobody touches what it read: a
limit of the disk, not of loading. Its own clock is used.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

from . import machine
from .judge import SHORT_SHARE, ArmFailed, Conditions, NotWhatItSays

SETTINGS = {"ioengine": "io_uring", "direct": 1, "bs": "1m", "iodepth": 32}


def version() -> str:
    """fio's version. Raises ArmFailed where it is not installed."""
    if shutil.which("fio") is None:
        raise ArmFailed("not installed")
    return subprocess.run(
        ["fio", "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()


def run(conditions: Conditions, settings: dict[str, Any]) -> dict[str, Any]:
    """Reads all files once, in the state of the page cache that is wanted."""
    version()
    conditions.make_cache()
    resident = conditions.resident_bytes()
    if not conditions.warm and resident:
        raise NotWhatItSays(f"fio: {resident:,} bytes were resident before it started")
    disk = machine.diskstats_key(conditions.files[0])
    reads = machine.disk_reads()
    ran = subprocess.run(
        [
            "fio", "--name=read", "--rw=read", "--readonly", "--invalidate=0",
            "--output-format=json", "--thread",
            "--filename=" + ":".join(str(file).replace(":", r"\:") for file in conditions.files),
            "--file_service_type=sequential",
            *(f"--{name}={value}" for name, value in {**SETTINGS, **settings}.items()),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ran.returncode:
        raise ArmFailed((ran.stderr or ran.stdout).strip().splitlines()[-1])
    job = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0]
    read = machine.disk_reads()[disk] - reads[disk] if disk else None
    claimed = job["read"]["io_bytes"]
    if not conditions.warm and read is not None and read < claimed * (1 - SHORT_SHARE):
        raise NotWhatItSays(f"fio says that it read {claimed:,} bytes, the disk says {read:,}")
    seconds = job["read"]["runtime"] / 1e3
    share = (job["usr_cpu"] + job["sys_cpu"]) / 100
    return {
        "seconds": seconds,
        "load_s": seconds,
        "touch_s": None,
        "cpu_s": share * seconds,
        "load_cpu_s": share * seconds,
        "touched_bytes": 0,
        "tensors": 0,
        "read_bytes": claimed,
        "device_read_bytes": read,
        "resident_before_bytes": resident,
        "resident_after_bytes": conditions.resident_bytes(),
        "versions": {"fio": version()},
    }
