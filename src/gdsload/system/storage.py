"""The storage behind a file: whether a network or a daemon answers each read, and the reads that
suit it. Not responsible for reading, and nothing is read here.

    local     a disk of this machine     few large reads in flight
    distant   a network or a daemon      many small reads in flight, because each takes a round trip
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from functools import lru_cache
from glob import glob
from mmap import PAGESIZE
from typing import NamedTuple

from gdsload._native import system
from gdsload.system.mountinfo import kind_of_file, mount_of

# Filesystem types in /proc/self/mountinfo. All of FUSE is distant, except fuseblk, which is on a
# disk: its device number is that of the disk.
DISTANT = (
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fakeowner", "fhgfs", "fuse",
    "glusterfs", "gpfs", "lustre", "mmfs", "ncpfs", "nfs", "nfs4", "orangefs", "panfs", "prl_fs",
    "pvfs2", "quobyte", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs", "wekafs",
)  # fmt: skip
# By the number in statfs, for systems without a list of mounts.
_KINDS = {
    0x0BD00BD0: "lustre",
    0x6969: "nfs",
    0x65735546: "fuse",  # virtiofs and fuseblk have it, too
    0x01021997: "9p",
    0x00C36400: "ceph",
    0xFF534D42: "cifs",
    0xFE534D42: "smb3",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x20030528: "orangefs",
    0x5346414F: "afs",
    0x786F4256: "vboxsf",
    0x794C7630: "overlay",
    0x9123683E: "btrfs",
}
OVERLAY = "overlay"
# The kernel splits reads through the page cache into 128 KiB. With a latency of 20 ms, 256 of them
# in flight load 1.5 GB in 1.2 s, and 16 of 4 MiB in 8.1 s; direct reads do not differ
# (benchmarks/results/cold-fuse-20ms.json).
DEPTH = 256
# With more latency more reads are in flight.
DEPTH_SECONDS = 0.02
REQUEST_BYTES = 1 << 20
# A filesystem may prefer larger reads (Lustre: a stripe). Of these fewer are in flight.
MOST_REQUEST_BYTES = 16 << 20
IN_FLIGHT_BYTES = 1 << 30
# A request of an object store takes a round trip and has a price, and one connection has a limited
# rate. Not measured beyond loopback.
REMOTE_REQUEST_BYTES = 8 << 20
REMOTE_DEPTH = 16
REMOTE_DEPTH_SECONDS = 0.02
MOST_REMOTE_DEPTH = 64
# A read into the page cache is of several windows of the read-ahead: its folios are small in the
# first one, and huge after four (`_native.mapped`).
FILL_WINDOWS = 4
FILL_REQUEST_BYTES, MOST_FILL_REQUEST_BYTES = 8 << 20, 64 << 20
FILL_UNIT_BYTES = 2 << 20
_SYSFS = "/sys"


class Storage(NamedTuple):
    """Facts about the storage of a file.

    Attributes:
        kind: The type of a distant filesystem, such as "nfs4" or "fuse.juicefs", or the scheme of
            a URL, such as "s3"; "" if it is local.
        request_bytes: Bytes of one read at most; 0 if it is local.
        depth: Reads in flight; 0 if it is local.
    """

    kind: str = ""
    request_bytes: int = 0
    depth: int = 0

    @property
    def has_round_trips(self) -> bool:
        """Whether a network or a daemon answers each read."""
        return bool(self.kind)


def is_distant(kind: str) -> bool:
    """Whether a filesystem of this type, as in mountinfo, is distant."""
    return kind in DISTANT or kind.startswith("fuse.")


def filesystem_without_disk(fd: int, path: str, status: os.stat_result) -> str:
    """The type of the filesystem of an open file whose device number is that of no disk; otherwise,
    or if it is not known, "".

    Lustre makes up device numbers that look like those of disks. A path may lead to a mount that
    hides another one, so the descriptor is asked first, and the filesystem itself last.
    """
    number = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    if os.major(status.st_dev) and os.path.exists(f"{_SYSFS}/dev/block/{number}"):
        return ""
    if kind := kind_of_file(fd):
        return kind
    mount = mount_of(path)
    return _KINDS.get(system.filesystem_magic(fd), "") if mount is None else mount.kind


def is_overlay(fd: int) -> bool:
    """Whether an open file is in an overlay, as in a container: the files below it have the pages
    in the page cache, and the disk. The filesystem is not asked: it may not answer."""
    device, inode = system.known_identity(fd)
    return not os.major(device) and _kind_of(fd, device, inode) == OVERLAY


@lru_cache(maxsize=1024)  # files, which are asked about for each sample
def _kind_of(fd: int, device: int, inode: int) -> str:
    return kind_of_file(fd)


def read_ahead_bytes(device: int, overlay: bool) -> int | None:
    """The window of the kernel's read-ahead of a device (`st_dev`); None if it is not known.

    An overlay hides the disk of its files: the longest read-ahead of a disk counts.
    """
    disks = f"{_SYSFS}/dev/block"
    if overlay:
        return max(filter(None, map(_read_ahead_in, glob(f"{disks}/*"))), default=None)
    return _read_ahead_in(f"{disks}/{os.major(device)}:{os.minor(device)}")


def _read_ahead_in(directory: str) -> int | None:
    """The read-ahead that a directory of a disk or a partition in sysfs tells; None if none."""
    for queue in ("queue", "../queue"):  # of a disk, or of the disk of a partition
        with suppress(OSError, ValueError), open(f"{directory}/{queue}/read_ahead_kb") as file:
            return int(file.read()) << 10
    return None


def reads_in_flight(device: int) -> bool:
    """Whether the disk with this number (`st_dev`) is being read now; any disk, if it is no disk's
    number, as on btrfs. False if the system does not tell."""
    disks = f"{_SYSFS}/dev/block"
    own = _reads_in(f"{disks}/{os.major(device)}:{os.minor(device)}")
    if own is not None:
        return bool(own)
    return any(map(_reads_in, glob(f"{disks}/*")))


def _reads_in(directory: str) -> int | None:
    """The reads in flight of a disk or a partition in sysfs; None if it is none."""
    with suppress(OSError, ValueError, IndexError), open(f"{directory}/inflight") as file:
        return int(file.read().split()[0])
    return None


def reads_ahead_by_huge_pages() -> bool:
    """Whether the read-ahead of a mapping that asks for huge pages is 2 MiB on every disk: since
    Linux 5.18, with pages of 4 KiB."""
    version = [int(part) for part in re.findall(r"\d+", os.uname().release)[:2]]
    return version >= [5, 18] and PAGESIZE == 4096


def fill_request_bytes(read_ahead: int | None, nbytes: int, depth: int) -> int:
    """Bytes of one read into the page cache.

    Args:
        read_ahead: Of `read_ahead_bytes`.
        nbytes: Bytes to read in all.
        depth: Reads in flight. The bytes are divided among so many reads, but none is shorter than
            a window of the read-ahead, or 8 MiB if that is less.
    """
    window = read_ahead or 0
    least = min(max(window, FILL_UNIT_BYTES), FILL_REQUEST_BYTES)
    most = min(max(FILL_WINDOWS * window, FILL_REQUEST_BYTES), MOST_FILL_REQUEST_BYTES)
    units = -(-nbytes // (depth * FILL_UNIT_BYTES))
    return min(max(units * FILL_UNIT_BYTES, least), most)


def storage_of(filesystem: str, preferred_bytes: int = 0, latency: float = 0.0) -> Storage:
    """The storage of a file of this machine.

    Args:
        filesystem: The type of a distant filesystem, or "" for a local one.
        preferred_bytes: The size of a read that the filesystem prefers (`st_blksize`).
        latency: Seconds of one small read; 0 if this is not known.
    """
    if not filesystem:
        return Storage()
    preferred = preferred_bytes // REQUEST_BYTES * REQUEST_BYTES
    request_bytes = min(max(preferred, REQUEST_BYTES), MOST_REQUEST_BYTES)
    depth = min(
        max(DEPTH, round(DEPTH * latency / DEPTH_SECONDS)), IN_FLIGHT_BYTES // request_bytes
    )
    return Storage(filesystem, request_bytes, depth)


def remote_storage(scheme: str, latency: float = 0.0) -> Storage:
    """The storage of a file in an object store, or in the memory of a peer.

    Args:
        scheme: The kind of source, such as "s3".
        latency: Seconds of the request for the header; 0 if this is not known.
    """
    depth = round(REMOTE_DEPTH * latency / REMOTE_DEPTH_SECONDS)
    return Storage(scheme, REMOTE_REQUEST_BYTES, min(max(depth, REMOTE_DEPTH), MOST_REMOTE_DEPTH))
