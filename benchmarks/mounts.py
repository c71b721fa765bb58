"""Filesystems to measure and test on: a directory's files, shown by another filesystem.

    fuse      slowfs.c: a daemon that answers with scripted delays and errors
    overlay   the directory as the lower layer
    xfs, btrfs, tmpfs   copies, on a loop device or in memory

All need root. Nothing stays mounted after the `with` block.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from . import places
from .records import Refused

CGROUPS = Path("/sys/fs/cgroup")
KINDS = ("fuse", "xfs", "btrfs", "overlay", "tmpfs")
SPARE_BYTES = 512 << 20  # of a loop device, for metadata and the log; xfs has a minimum
_MKFS = {"xfs": ["mkfs.xfs", "-q", "-f"], "btrfs": ["mkfs.btrfs", "-q", "-f"]}


@contextmanager
def mounted(kind: str, source: Path, **script: int) -> Iterator[Path]:
    """A directory on a filesystem of this kind, with the files of `source`.

    `script` are the options of slowfs.c, such as `latency_us=2000`. Raises Refused, with the
    reason, if this machine cannot mount it.
    """
    if os.geteuid():
        raise Refused(f"{kind}: only root can mount it")
    # Beside the source: copies must not fill another disk.
    with ExitStack() as stack:
        parent = None if kind == "fuse" else source.absolute().parent
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(".mount", dir=parent)))
        point = folder / "point"
        point.mkdir()
        if kind == "fuse":
            stack.enter_context(_slowfs(source, point, script))
        else:
            device, options = _device(kind, source, folder)
            _run("mount", "-t", kind, "-o", options, device, point)
            stack.callback(_run, "umount", "--lazy", point)
            if kind != "overlay":
                for file in filter(Path.is_file, source.iterdir()):
                    shutil.copy(file, point)
        yield point


def _device(kind: str, source: Path, folder: Path) -> tuple[str, str]:
    """The device to mount, and the options."""
    size = sum(file.stat().st_size for file in source.iterdir()) + SPARE_BYTES
    if kind == "tmpfs":
        return "gdsload", f"size={size}"
    if kind == "overlay":
        for name in ("upper", "work"):
            (folder / name).mkdir()
        return "gdsload", f"lowerdir={source},upperdir={folder}/upper,workdir={folder}/work"
    if kind not in _MKFS:
        raise Refused(f"{kind} is none of {', '.join(KINDS)}")
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(size)
    _run(*_MKFS[kind], image)
    return str(image), "loop"


@contextmanager
def _slowfs(source: Path, point: Path, script: dict[str, int]) -> Iterator[None]:
    if not os.path.exists("/dev/fuse"):
        raise Refused("fuse: there is no /dev/fuse")
    words = [f"{name}={value}" for name, value in script.items()]
    with subprocess.Popen(
        [slowfs(), source, point, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stdout is not None and daemon.stderr is not None
        if daemon.stdout.readline() != "ready\n":
            raise Refused(f"fuse: {daemon.stderr.read().strip()}")
        try:
            yield
        finally:
            daemon.terminate()  # it unmounts


def slowfs() -> Path:
    """The compiled daemon. Raises Refused if there is no compiler."""
    built, code = places.CACHE / "slowfs", places.PACKAGE / "slowfs.c"
    if not built.exists() or built.stat().st_mtime < code.stat().st_mtime:
        built.parent.mkdir(parents=True, exist_ok=True)
        fresh = built.with_name(f"slowfs.{os.getpid()}")
        _run("cc", "-O2", "-pthread", code, "-o", fresh)
        fresh.replace(built)
    return built


@contextmanager
def cgroup(parent: Path, **limits: str) -> Iterator[Path]:
    """A cgroup in `parent`, a directory that this user may divide; yields its `cgroup.procs`.

    `limits` are named as in version 2 with _ for the dot, such as `memory_max="100000000"`.
    """
    folder = parent / f"gdsload-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise Refused(f"{parent}: no cgroup can be made: {error.strerror}") from error
    try:
        for name, value in limits.items():
            _limit(folder, name.replace("_", "."), value)
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


@contextmanager
def cgroup_root(controller: str) -> Iterator[Path]:
    """The root of the cgroups of version 2, whose children then have this controller.

    Raises Refused, with the reason, if this machine does not allow it.
    """
    if os.geteuid():
        raise Refused("cgroups: only root can divide them")
    with ExitStack() as stack:
        root = CGROUPS
        if not (root / "cgroup.controllers").exists():
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(".cgroup2")))
            _run("mount", "-t", "cgroup2", "none", root)
            stack.callback(_run, "umount", "--lazy", root)
        if controller not in (root / "cgroup.controllers").read_text().split():
            raise Refused(f"cgroups: version 2 has no controller {controller!r} on this machine")
        enabled = root / "cgroup.subtree_control"
        if controller not in enabled.read_text().split():
            _write(enabled, f"+{controller}")
            stack.callback(_write, enabled, f"-{controller}")
        yield root


def disk_of(path: Path) -> str:
    """The device number of the whole disk below a path, such as "259:0", as limits need it.

    Raises Refused if the path is on none.
    """
    device = os.stat(path).st_dev
    entry = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not entry.exists():
        raise Refused(f"{path} is on no block device")
    disk = entry.resolve().parent if (entry / "partition").exists() else entry
    return (disk / "dev").read_text().strip()


def _limit(folder: Path, name: str, value: str) -> None:
    known = {
        "memory.max": [("memory.max", value), ("memory.limit_in_bytes", value)],
        "io.max": [
            ("io.max", value),
            ("blkio.throttle.read_bps_device", value.replace("rbps=", "")),
        ],
    }
    for file, text in known[name]:
        if (folder / file).exists():
            _write(folder / file, text)
            return
    raise Refused(f"{folder.parent}: its controller for {name} is not enabled")


def _write(file: Path, text: str) -> None:
    """Raises Refused if the kernel refuses the text."""
    try:
        file.write_text(text)
    except OSError as error:
        raise Refused(f"{file}: {text!r} is refused: {error.strerror}") from error


def _run(*command: str | Path) -> None:
    """Raises Refused if it fails."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise Refused(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise Refused(f"{command[0]}: {error.stderr.strip()}") from error
