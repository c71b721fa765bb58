"""fio as an arm: the rate of a well-known tool on the same files.

It reuses a few buffers, so it never pays for fresh memory, and nobody touches what it read: a
limit of the disk, not of loading. Its own clock is used.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

from . import machine
from .loaded import ArmFailed

SETTINGS = {"ioengine": "io_uring", "direct": 1, "bs": "1m", "iodepth": 32}


def version() -> str:
    """fio's version. Raises ArmFailed where it is not installed."""
    if shutil.which("fio") is None:
        raise ArmFailed("not installed")
    return subprocess.run(
        ["fio", "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()


def run(files: list[Path], disk: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Reads all files once; `disk` is what counts for them. Raises ArmFailed."""
    version()
    reads, own = machine.disk_reads(), _children_read_bytes()
    ran = subprocess.run(
        [
            "fio",
            "--name=read",
            "--rw=read",
            "--readonly",
            "--invalidate=0",
            "--output-format=json",
            "--thread",
            "--filename=" + ":".join(str(file).replace(":", r"\:") for file in files),
            "--file_service_type=sequential",
            *(f"--{name}={value}" for name, value in {**SETTINGS, **settings}.items()),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise ArmFailed((ran.stderr or ran.stdout).strip().splitlines()[-1])
    job = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0]
    seconds = job["read"]["runtime"] / 1e3
    share = (job["usr_cpu"] + job["sys_cpu"]) / 100
    return {
        "seconds": seconds,
        "load_s": seconds,
        "cpu_s": share * seconds,
        "touched_bytes": 0,
        "read_bytes": job["read"]["io_bytes"],
        "own_read_bytes": _children_read_bytes() - own,
        "device_read_bytes": machine.disk_reads()[disk] - reads[disk] if disk else None,
        "versions": {"fio": version()},
    }


def _children_read_bytes() -> int:
    """What processes that have ended here made storage read, by the kernel's account of them."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock * machine.SECTOR_BYTES
