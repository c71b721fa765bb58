"""Which filesystems are distant, and the reads that suit them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from gdsload._native import system
from gdsload.system import storage
from gdsload.system.mountinfo import Mount


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories of two disks, and a partition of the second one."""
    for disk in ("disk", "other"):
        (tmp_path / "devices" / disk / "queue").mkdir(parents=True)
        (tmp_path / "devices" / disk / "queue" / "read_ahead_kb").write_text("4096\n")
    (tmp_path / "devices" / "other" / "part").mkdir()
    (tmp_path / "dev" / "block").mkdir(parents=True)
    (tmp_path / "dev" / "block" / "8:0").symlink_to("../../devices/disk")
    (tmp_path / "dev" / "block" / "8:17").symlink_to("../../devices/other/part")
    monkeypatch.setattr(storage, "_SYSFS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "kind", ["nfs4", "lustre", "ceph", "virtiofs", "9p", "fuse", "fuse.juicefs"]
)
def test_network_and_fuse_filesystems_are_distant(kind: str) -> None:
    assert storage.is_distant(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs", "fuseblk"])
def test_filesystems_of_this_machine_are_not_distant(kind: str) -> None:
    assert not storage.is_distant(kind)


@pytest.mark.parametrize(
    ("preferred_bytes", "latency", "request_bytes", "depth"),
    [
        (4096, 0.0, 1 << 20, 256),
        (1 << 20, 0.001, 1 << 20, 256),
        (4 << 20, 0.02, 4 << 20, 256),
        (5 << 19, 0.03, 2 << 20, 384),
        (1 << 20, 0.05, 1 << 20, 640),
        (1 << 20, 5.0, 1 << 20, 1024),
        (64 << 20, 0.05, 16 << 20, 64),
    ],
)
def test_reads_follow_the_block_size_and_the_latency_of_the_filesystem(
    monkeypatch: pytest.MonkeyPatch,
    preferred_bytes: int,
    latency: float,
    request_bytes: int,
    depth: int,
) -> None:
    found = storage.storage_of("nfs4", preferred_bytes, latency)
    assert found == ("nfs4", request_bytes, depth)


@pytest.mark.parametrize(
    ("numbers", "kind", "found"),
    [
        ((0, 50), "nfs4", "nfs4"),
        ((0, 50), "btrfs", "btrfs"),
        ((8, 0), "ext4", ""),
        ((2989, 77), "lustre", "lustre"),  # it makes up its device number
    ],
)
def test_filesystem_has_a_type_unless_it_is_on_a_disk(
    monkeypatch: pytest.MonkeyPatch, sysfs: Path, numbers: tuple[int, int], kind: str, found: str
) -> None:
    monkeypatch.setattr(storage, "kind_of_file", lambda fd: kind)
    monkeypatch.setattr(storage, "mount_of", lambda path: Mount("/mnt", "ext4", "/dev/a", "8:0"))
    status = SimpleNamespace(st_dev=os.makedev(*numbers))
    assert storage.filesystem_without_disk(3, "/mnt/file", status) == found


def test_filesystem_without_a_list_of_mounts_tells_its_type(
    monkeypatch: pytest.MonkeyPatch, sysfs: Path
) -> None:
    monkeypatch.setattr(storage, "kind_of_file", lambda fd: "")
    monkeypatch.setattr(storage, "mount_of", lambda path: None)
    status = SimpleNamespace(st_dev=os.makedev(0, 50))
    kinds = []
    for number in (0xEF53, 0x6969, 0x0BD00BD0, 0):
        monkeypatch.setattr(storage.system, "filesystem_magic", lambda fd, number=number: number)
        kinds.append(storage.filesystem_without_disk(3, "/mnt/file", status))
    assert kinds == ["", "nfs", "lustre", ""]
    assert storage.storage_of("") == storage.Storage()


def test_known_identity_is_that_of_fstat(tmp_path: Path) -> None:
    tmp_path.joinpath("a").write_bytes(b"a")
    for name in (tmp_path / "a", "/proc/self/status", "/dev/null"):
        with open(name, "rb") as file:
            status = os.fstat(file.fileno())
            assert system.known_identity(file.fileno()) == (status.st_dev, status.st_ino)
    with pytest.raises(OSError, match="Bad file descriptor"):
        system.known_identity(-1)


def test_number_of_a_filesystem_is_that_of_statfs(tmp_path: Path) -> None:
    tmp_path.joinpath("a").write_bytes(b"a")
    with open(tmp_path / "a", "rb") as file:
        found = system.filesystem_magic(file.fileno())
    said = subprocess.run(
        ["stat", "--file-system", "--format=%t", tmp_path], capture_output=True, check=True
    )
    assert found == int(said.stdout, 16)
    assert system.filesystem_magic(-1) == 0


def test_reads_in_flight_are_of_the_disk_or_of_any(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number, reads in (("8:0", 0), ("8:16", 3)):
        folder = tmp_path / "dev/block" / number
        folder.mkdir(parents=True)
        (folder / "inflight").write_text(f"       {reads}        5\n")
    monkeypatch.setattr(storage, "_SYSFS", str(tmp_path))
    assert not storage.reads_in_flight(os.makedev(8, 0))
    assert storage.reads_in_flight(os.makedev(8, 16))
    assert storage.reads_in_flight(os.makedev(0, 50)), "btrfs: on some disk"
    monkeypatch.setattr(storage, "_SYSFS", str(tmp_path / "nothing"))
    assert not storage.reads_in_flight(os.makedev(8, 16))


@pytest.mark.parametrize(
    ("numbers", "text", "nbytes"),
    [
        ((8, 0), "128\n", 128 << 10),
        ((8, 17), "128\n", 4 << 20),
        ((8, 0), "0\n", 0),
        ((8, 0), "", None),
        ((0, 45), "128\n", None),
    ],
)
def test_read_ahead_is_that_of_the_disk(
    sysfs: Path, numbers: tuple[int, int], text: str, nbytes: int | None
) -> None:
    (sysfs / "devices" / "disk" / "queue" / "read_ahead_kb").write_text(text)
    assert storage.read_ahead_bytes(os.makedev(*numbers), overlay=False) == nbytes


def test_read_ahead_of_an_overlay_is_the_longest_of_a_disk(sysfs: Path) -> None:
    (sysfs / "devices" / "disk" / "queue" / "read_ahead_kb").write_text("128\n")
    (sysfs / "dev" / "block" / "7:0").symlink_to("../../devices/gone")
    device = os.makedev(0, 45)
    assert storage.read_ahead_bytes(device, overlay=True) == 4 << 20
    assert storage.read_ahead_bytes(device, overlay=False) is None
    for disk in ("disk", "other"):
        (sysfs / "devices" / disk / "queue" / "read_ahead_kb").unlink()
    assert storage.read_ahead_bytes(device, overlay=True) is None


@pytest.mark.parametrize(
    ("release", "page_bytes", "huge"),
    [
        ("5.14.0-503.el9.x86_64", 4096, False),
        ("5.18.0-rc1+", 4096, True),
        ("6.1.0-13-arm64", 4096, True),
        ("6.1.0-13-arm64", 65536, False),
        ("sandbox", 4096, False),
    ],
)
def test_read_ahead_by_huge_pages_is_of_new_kernels_with_small_pages(
    monkeypatch: pytest.MonkeyPatch, release: str, page_bytes: int, huge: bool
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    monkeypatch.setattr(storage, "PAGESIZE", page_bytes)
    assert storage.reads_ahead_by_huge_pages() == huge


@pytest.mark.parametrize(
    ("device", "nbytes", "request_mib"),
    [
        ((8, 0), 1 << 40, 16),  # four windows
        ((0, 45), 1 << 40, 8),  # not known
        ((8, 0), 100 << 20, 8),  # one for each of 16 reads, in whole units
        ((8, 0), 1, 4),  # one window
        ((0, 45), 1, 2),
    ],
)
def test_reads_into_the_page_cache_are_of_several_windows(
    sysfs: Path, device: tuple[int, int], nbytes: int, request_mib: int
) -> None:
    read_ahead = storage.read_ahead_bytes(os.makedev(*device), overlay=False)
    found = storage.fill_request_bytes(read_ahead, nbytes, 16)
    assert found == request_mib << 20
