"""The machine that a result belongs to, and the counters of its disks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import places

HUGE_PAGE_BYTES = 2 << 20
SECTOR_BYTES = 512  # of /proc/diskstats, whatever the disk's own sectors are


def first_line(path: str | Path) -> str:
    """The first line of a file of /proc or /sys, or "" if there is none."""
    with contextlib.suppress(OSError):
        lines = Path(path).read_text(errors="replace").splitlines()
        return lines[0].strip() if lines else ""
    return ""


def fields(path: str) -> dict[str, str]:
    """`name: value` lines of a file of /proc; of names that repeat, the first."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path(path).read_text(errors="replace").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                found.setdefault(name.strip(), value.strip())
    return found


def mount_of(path: Path) -> dict[str, str]:
    """Filesystem, source and options of the mount that holds a path."""
    number = os.stat(path).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    best: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        words, (kind, source, *rest) = before.split(), after.split()
        if words[2] == wanted:
            # Without paths, such as those of the layers of an overlay.
            flags = dict.fromkeys(
                flag for flag in f"{words[5]},{rest[-1]}".split(",") if "/" not in flag
            )
            best = {"filesystem": kind, "source": source, "options": ",".join(flags)}
    return best


def diskstats_key(path: Path) -> str | None:
    """The block device below a path as major:minor, None if it has none of its own."""
    number = os.stat(path).st_dev
    keys = [f"{os.major(number)}:{os.minor(number)}"]
    with contextlib.suppress(OSError):  # btrfs and others number their mounts themselves
        device = os.stat(mount_of(path).get("source", "")).st_rdev
        keys.append(f"{os.major(device)}:{os.minor(device)}")
    known = disk_reads()
    return next((key for key in keys if key in known), None)


def disk_reads() -> dict[str, int]:
    """Bytes read from each block device since the machine started; none in a sandbox whose kernel
    does not show disks."""
    return {disk: int(words[5]) * SECTOR_BYTES for disk, words in _disks()}


def _disks() -> list[tuple[str, list[str]]]:
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path("/proc/diskstats").read_text().splitlines()]
        return [(f"{words[0]}:{words[1]}", words) for words in rows]
    return []


def own_read_bytes() -> int | None:
    """Bytes that this process made storage read, counted by the kernel; None if it does not."""
    text = fields("/proc/self/io").get("read_bytes", "")
    return int(text) if text else None


def disk_busy_seconds() -> dict[str, float]:
    """Busy seconds of each block device (io_ticks)."""
    return {disk: int(words[12]) / 1e3 for disk, words in _disks()}


def busy_seconds() -> float:
    """Busy CPU seconds of the whole machine, kernel threads included."""
    words = [int(word) for word in first_line("/proc/stat").split()[1:8]]
    if len(words) < 7:
        return 0.0
    user, nice, system, _idle, _wait, irq, soft = words
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def free_memory() -> dict[str, int]:
    """Free bytes of memory, and those of them in blocks of 2 MiB or more, by /proc/buddyinfo."""
    page = os.sysconf("SC_PAGE_SIZE")
    found = {"bytes": 0, "huge_bytes": 0}
    with contextlib.suppress(OSError):
        for line in Path("/proc/buddyinfo").read_text().splitlines():
            for order, number in enumerate(line.split()[4:]):
                nbytes = int(number) * page << order
                found["bytes"] += nbytes
                found["huge_bytes"] += nbytes if page << order >= HUGE_PAGE_BYTES else 0
    return found


def choice(text: str) -> str:
    """The chosen word of a setting that lists them all: "always [madvise] never"."""
    found = re.search(r"\[(.*?)\]", text)
    return found[1] if found else text


def backing_file(path: Path) -> Path | None:
    """The backing file of a loop device below a path; None if there is none."""
    key = diskstats_key(path)
    device = Path(f"/sys/dev/block/{key}").resolve()
    disk = device.parent if (device / "partition").exists() else device
    name = first_line(disk / "loop/backing_file") if key else ""
    return Path(name) if name and Path(name).is_file() else None


def block_device(path: Path) -> dict[str, Any]:
    """The disk below a path: name, queue and read-ahead, from the kernel."""
    key = diskstats_key(path)
    if key is None:
        return {}
    device = Path(f"/sys/dev/block/{key}").resolve()
    disk = device.parent if (device / "partition").exists() else device
    queue = disk / "queue"
    return {
        "name": device.name,
        "model": first_line(disk / "device/model"),
        "virtual": disk.name.startswith("vd"),
        "scheduler": choice(first_line(queue / "scheduler")),
        "read_ahead_kib": first_line(queue / "read_ahead_kb"),
        "requests": first_line(queue / "nr_requests"),
        "largest_request_kib": first_line(queue / "max_sectors_kb"),
        **({"file": True} if (disk / "loop").exists() else {}),
    }


_at_start: list[str] = []


def note_start() -> None:
    """Remembers the commit with which a measurement begins."""
    _at_start[:] = [commit()]


def commits() -> str:
    """The commit of gdsload, or that of the start of the measurement and that of its end."""
    return " to ".join(dict.fromkeys([*_at_start, commit()]))


def commit(root: Path = places.ROOT) -> str:
    """The commit of gdsload, with a + if files differ from it; its version outside a checkout."""
    import gdsload

    if not places.CHECKOUT:
        return gdsload.__version__
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [
                *git,
                "status",
                "--porcelain",
                "src",
                "benchmarks",
                "setup.py",
                "pyproject.toml",
                ":!benchmarks/results",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):  # no git, or a checkout of another user
        return gdsload.__version__
    return head.stdout.strip() + ("+" if changed.stdout else "")


def gpus() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU, by nvidia-smi; none without it."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [line.strip() for line in ran.stdout.splitlines() if line.strip()]


def versions() -> dict[str, str]:
    """Versions of gdsload, related packages, and the nvidia-fs module."""
    import gdsload

    found = {"gdsload": gdsload.__version__}
    for package in ("torch", "transformers", "safetensors", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    module = first_line("/sys/module/nvidia_fs/version")
    return {**found, **({"nvidia-fs": module} if module else {})}


def describe(path: Path) -> dict[str, Any]:
    """The facts that a reader needs to judge a figure, without names of hosts or people."""
    cpu, memory = fields("/proc/cpuinfo"), fields("/proc/meminfo")
    thp = Path("/sys/kernel/mm/transparent_hugepage")
    reporting = Path("/sys/module/page_reporting/parameters/page_reporting_order")
    release = {}
    with contextlib.suppress(OSError):
        release = platform.freedesktop_os_release()
    mount: Mapping[str, str] = mount_of(path)
    return {
        "kernel": platform.release(),
        "system": release.get("PRETTY_NAME", platform.system()),
        "cpu": cpu.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "hypervisor": "hypervisor" in cpu.get("flags", ""),
        "memory_bytes": int(memory.get("MemTotal", "0 kB").split()[0]) << 10,
        "swap_bytes": int(memory.get("SwapTotal", "0 kB").split()[0]) << 10,
        "huge_pages": choice(first_line(thp / "enabled")),
        "huge_pages_defrag": choice(first_line(thp / "defrag")),
        # Negative where it is off.
        "free_page_reporting_order": order if (order := first_line(reporting)).isdigit() else None,
        # A kernel that reclaims idle pages by itself can cool a warm cache.
        "damon": any(
            first_line(comm).startswith("kdamond") for comm in Path("/proc").glob("[0-9]*/comm")
        ),
        "filesystem": mount.get("filesystem", ""),
        "mount_options": mount.get("options", ""),
        "disk": block_device(path),
        "gpus": gpus(),
        "python": platform.python_version(),
        "versions": versions(),
    }
