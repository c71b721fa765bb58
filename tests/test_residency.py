"""What the page cache holds, by both of the kernel's answers."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdsload import residency
from gdsload._native import system

PAGE = residency.PAGE_BYTES
PAGES = 64


@pytest.fixture(params=["cachestat", "mincore"])
def fd(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[int]:
    """A file of 64 pages and 100 bytes, all of it cold, asked about in one of the two ways."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(PAGES * PAGE + 100))
    opened = os.open(path, os.O_RDONLY)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)
    if request.param == "mincore":

        def refused(*_: object) -> int:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        monkeypatch.setattr(system, "cachestat", refused)
    else:
        try:
            system.cachestat(opened, 0, PAGE)
        except OSError as error:
            os.close(opened)
            pytest.skip(f"cachestat: {error.strerror}")
    if residency.evict(path):
        os.close(opened)
        pytest.skip(f"{tmp_path}: its pages cannot be evicted (a file system in memory)")
    yield opened
    os.close(opened)


def test_cold_warm_and_between(fd: int) -> None:
    assert residency.resident_bytes(fd) == 0
    os.pread(fd, 1, 10 * PAGE)
    assert residency.wholly_resident(fd, 10 * PAGE, PAGE)
    assert residency.wholly_resident(fd, 10 * PAGE + 17, 1)
    assert not residency.wholly_resident(fd, 10 * PAGE + 17, 40 * PAGE)
    assert 0 < residency.resident_bytes(fd) < PAGES * PAGE
    os.pread(fd, 1 << 20, 0)
    assert residency.resident_bytes(fd) == PAGES * PAGE + 100, "the last page counts as its bytes"
    assert residency.wholly_resident(fd, 0, PAGES * PAGE)
    assert residency.wholly_resident(fd, PAGES * PAGE + 99, 1)


def test_ranges(fd: int) -> None:
    os.pread(fd, 1 << 20, 0)
    assert residency.resident_bytes(fd, 5 * PAGE, 3 * PAGE) == 3 * PAGE
    assert residency.resident_bytes(fd, PAGES * PAGE + 100) == 0, "nothing behind the end"


def test_evicting(fd: int, tmp_path: Path) -> None:
    os.pread(fd, 1 << 20, 0)
    assert residency.evict(tmp_path / "file") == 0
    assert residency.resident_bytes(tmp_path / "file") == 0


def test_a_filesystem_that_cannot_be_asked(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    os.pread(fd, 1 << 20, 0)
    monkeypatch.setattr(system, "cachestat", refused)
    assert not residency.wholly_resident(fd, 0, PAGE), "not known to be warm"
    with pytest.raises(OSError, match="error"):
        residency.resident_bytes(fd)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        residency.resident_bytes(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        residency.evict(tmp_path / "none")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert residency.resident_bytes(tmp_path / "empty") == 0
    assert residency.evict(tmp_path / "empty") == 0


def test_nearly_warm_is_warm(fd: int) -> None:
    whole = PAGES * PAGE
    assert not residency.mostly_resident(fd, 0, whole)
    os.pread(fd, whole - PAGE, 0)
    assert residency.mostly_resident(fd, 0, whole), "63 of 64 pages"
    os.posix_fadvise(fd, 0, 32 * PAGE, os.POSIX_FADV_DONTNEED)
    assert not residency.mostly_resident(fd, 0, whole)


def test_a_large_range_is_sampled(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "SAMPLES", 4)
    monkeypatch.setattr(residency, "SAMPLE_BYTES", PAGE)
    samples = [int((PAGES - 1) * PAGE / 3 * number) for number in range(4)]
    for offset in samples:
        assert not residency.mostly_resident(fd, 0, PAGES * PAGE)
        os.pread(fd, PAGE, offset)
    assert residency.mostly_resident(fd, 0, PAGES * PAGE)
