"""What the page cache holds, by both of the kernel's answers."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdsload._native import system
from gdsload.memory import page_cache
from gdsload.system.capabilities import CAP_FOWNER, has_capability
from gpudoubles import built
from storage import kept_warm, make_cold

PAGE = mmap.PAGESIZE
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
    make_cold(path)
    yield opened
    os.close(opened)


def test_cold_warm_and_between(fd: int) -> None:
    assert page_cache.resident_bytes(fd) == 0
    os.pread(fd, 1, 10 * PAGE)
    assert page_cache.wholly_resident(fd, 10 * PAGE, PAGE)
    assert page_cache.wholly_resident(fd, 10 * PAGE + 17, 1)
    assert not page_cache.wholly_resident(fd, 10 * PAGE + 17, 40 * PAGE)
    assert 0 < page_cache.resident_bytes(fd) < PAGES * PAGE
    os.pread(fd, 1 << 20, 0)
    assert page_cache.resident_bytes(fd) == PAGES * PAGE + 100, "the last page counts as its bytes"
    assert page_cache.wholly_resident(fd, 0, PAGES * PAGE)
    assert page_cache.wholly_resident(fd, PAGES * PAGE + 99, 1)


def test_page_that_is_being_read_has_not_arrived(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.pread(fd, PAGES * PAGE, 0)
    assert page_cache.has_arrived(fd, 0, PAGES * PAGE)
    pages = system.mincore_pages(fd, 0, PAGES * PAGE)
    monkeypatch.setattr(system, "mincore_pages", lambda *_: pages - 1)
    try:
        system.cachestat(fd, 0, 1)
    except OSError:  # then only mincore has counted
        assert page_cache.has_arrived(fd, 0, PAGES * PAGE)
    else:
        assert not page_cache.has_arrived(fd, 0, PAGES * PAGE)


def test_pages_of_a_foreign_file_may_not_have_arrived_where_only_cachestat_tells_the_truth(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 6.14, `cachestat` answers to everybody."""
    belongs_to_another(fd, monkeypatch)
    for call in ("cachestat", "mincore_pages"):
        monkeypatch.setattr(system, call, lambda *_: PAGES)
    assert not page_cache.has_arrived(fd, 0, PAGES * PAGE)
    monkeypatch.setattr(os, "access", lambda *args, **kwargs: True)
    assert page_cache.has_arrived(fd, 0, PAGES * PAGE)


def test_absent_ranges_have_present_bytes_between_them(fd: int) -> None:
    assert page_cache.absent_ranges(fd, PAGES * PAGE) == [(0, PAGES * PAGE)]
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 1, 10 * PAGE)
    os.pread(fd, 1, 31 * PAGE)
    ranges = page_cache.absent_ranges(fd, PAGES * PAGE)
    assert ranges == [(0, 10 * PAGE), (11 * PAGE, 20 * PAGE), (32 * PAGE, (PAGES - 32) * PAGE)]


def test_ranges(fd: int) -> None:
    os.pread(fd, 1 << 20, 0)
    assert page_cache.resident_bytes(fd, 5 * PAGE, 3 * PAGE) == 3 * PAGE
    assert page_cache.resident_bytes(fd, PAGES * PAGE + 100) == 0, "nothing behind the end"


def test_evicting(fd: int, tmp_path: Path) -> None:
    os.pread(fd, 1 << 20, 0)
    assert page_cache.evict(tmp_path / "file") == 0
    assert page_cache.resident_bytes(tmp_path / "file") == 0


def test_a_filesystem_that_cannot_be_asked(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    os.pread(fd, 1 << 20, 0)
    monkeypatch.setattr(system, "cachestat", refused)
    assert not page_cache.wholly_resident(fd, 0, PAGE), "not known to be warm"
    with pytest.raises(OSError, match="error"):
        page_cache.resident_bytes(fd)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        page_cache.resident_bytes(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        page_cache.evict(tmp_path / "none")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert page_cache.resident_bytes(tmp_path / "empty") == 0
    assert page_cache.evict(tmp_path / "empty") == 0


def test_nearly_warm_is_warm(fd: int) -> None:
    whole = PAGES * PAGE
    assert not page_cache.mostly_resident(fd, 0, whole)
    os.pread(fd, whole - PAGE, 0)
    assert page_cache.mostly_resident(fd, 0, whole), "63 of 64 pages"
    os.posix_fadvise(fd, 0, 32 * PAGE, os.POSIX_FADV_DONTNEED)
    assert not page_cache.mostly_resident(fd, 0, whole)


def test_a_large_range_is_sampled(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "SAMPLES", 4)
    monkeypatch.setattr(page_cache, "SAMPLE_BYTES", PAGE)
    samples = [int((PAGES - 1) * PAGE / 3 * number) for number in range(4)]
    for offset in samples:
        assert not page_cache.mostly_resident(fd, 0, PAGES * PAGE)
        os.pread(fd, PAGE, offset)
    assert page_cache.mostly_resident(fd, 0, PAGES * PAGE)


def test_cold_samples_at_the_start_of_a_warm_file_do_not_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """98.2 % of it is warm."""
    cold = iter([page_cache.SAMPLE_BYTES, page_cache.SAMPLE_BYTES * 15 // 100])
    monkeypatch.setattr(page_cache, "resident_bytes", lambda fd, at, size: size - next(cold, 0))
    assert page_cache.mostly_resident(-1, 0, page_cache.SAMPLES * page_cache.SAMPLE_BYTES + 1)


def belongs_to_another(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file seems to be of another user, who lets nobody write to it."""
    owner = os.fstat(fd).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(os, "access", lambda *args, **kwargs: False)
    monkeypatch.setattr(page_cache, "_owns_all_files", lambda _: False, raising=False)


@pytest.fixture(params=[errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
def foreign(
    request: pytest.FixtureRequest, fd: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[int]:
    """A cold file of another user, which mincore reports as resident."""

    def refused(*_: object) -> int:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(system, "cachestat", refused)
    monkeypatch.setattr(system, "mincore_pages", lambda fd, offset, length: -(-length // PAGE))
    belongs_to_another(fd, monkeypatch)
    yield fd


def test_residency_of_a_foreign_file_is_not_made_up(foreign: int) -> None:
    with pytest.raises(
        PermissionError, match=r"only to its owner .*: try as one of them, or as root"
    ):
        page_cache.resident_bytes(foreign)
    assert not page_cache.wholly_resident(foreign, 0, PAGE)
    assert page_cache.residency(foreign, PAGES * PAGE) == "none"
    assert not page_cache.mostly_resident(foreign, 0, PAGES * PAGE)
    assert page_cache.estimated_bytes(foreign, 0, PAGES * PAGE) < PAGES * PAGE // 2


def test_foreign_file_on_a_disk_that_answers_at_once_is_cold(
    foreign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
    os.pread(foreign, 1, 63 * PAGE)
    if resource.getrusage(resource.RUSAGE_THREAD).ru_inblock == before:
        pytest.skip("this kernel or filesystem does not count what a thread reads")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset, flags: preadv(fd, views, offset))
    assert not page_cache.mostly_resident(foreign, 0, PAGES * PAGE)
    assert page_cache.estimated_bytes(foreign, 0, PAGES * PAGE) < PAGES * PAGE // 2


def test_foreign_file_with_pages_that_can_be_read_at_once_is_warm(
    foreign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.pread(foreign, 1 << 20, 0)
    try:
        os.preadv(foreign, [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError as error:
        pytest.skip(f"this filesystem does not read without waiting: {error.strerror}")
    with kept_warm(Path(f"/proc/self/fd/{foreign}")):
        assert page_cache.mostly_resident(foreign, 0, PAGES * PAGE)
        assert page_cache.mostly_resident(foreign, 10 * PAGE + 17, 1)
        assert page_cache.estimated_bytes(foreign, 0, PAGES * PAGE) == PAGES * PAGE
        assert page_cache.residency(foreign, PAGES * PAGE) == "all"
        monkeypatch.setattr(page_cache, "SAMPLE_BYTES", PAGE // 2)
        assert page_cache.residency(foreign, PAGES * PAGE) == "all", "of a large file"


AS_ANOTHER = """
import os, sys
from gdsload.memory import page_cache
fd = os.open(sys.argv[1], os.O_RDONLY)
os.setresuid(65534, 65534, 65534)
try:
    print(page_cache.resident_bytes(fd))
except PermissionError:
    print("refused")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_residency_asked_by_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(PAGES * PAGE))
    ran = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER, path], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "refused"


WITHOUT_CACHESTAT = """
import ctypes, errno, os, struct, sys
from gdsload._native import system
from gdsload.memory import page_cache

def refused(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

system.cachestat = refused
path, rights = sys.argv[1:]
libc = ctypes.CDLL(None)
if rights == "no capability":
    assert libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0
if rights == "user namespace":
    if libc.unshare(0x10000000):  # CLONE_NEWUSER
        print("skip")
        sys.exit()
    with open("/proc/self/uid_map", "w") as users:
        users.write("0 0 1")
fd = os.open(path, os.O_RDONLY)
size = os.fstat(fd).st_size
try:
    print(page_cache.resident_bytes(fd))
except PermissionError:
    print("refused")
print(page_cache.mostly_resident(fd, 0, size), page_cache.residency(fd, size))
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not has_capability(CAP_FOWNER),
    reason="only root outside of user namespaces has rights to give up",
)
@pytest.mark.parametrize(
    ("rights", "told"), [("all", "0"), ("no capability", "refused"), ("user namespace", "refused")]
)
def test_user_zero_is_told_by_mincore_if_it_owns_all_files(
    tmp_path: Path, rights: str, told: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(PAGES * PAGE))
    path.chmod(0o644)
    os.chown(path, 65534, 65534)
    make_cold(path)
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_CACHESTAT, path, rights],
        capture_output=True,
        text=True,
        check=True,
    )
    if ran.stdout == "skip\n":
        pytest.skip("this process may not make a user namespace")
    assert ran.stdout.split() == [told, "False", "none"]


IN_GVISOR = """
import errno, os, sys
from gdsload._native import system
from gdsload.doctor import limits
from gdsload.memory import page_cache

def refused(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

system.cachestat = refused
fd = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(fd).st_size
try:
    print(page_cache.resident_bytes(fd))
except OSError as error:
    print(error.errno == errno.EOPNOTSUPP)
print(page_cache.wholly_resident(fd, 0, size), page_cache.mostly_resident(fd, 0, size))
print(page_cache.residency(fd, size), page_cache.resident_share([(fd, size)]))
found = limits.page_cache()
print(found.verdict, "every file is treated as cold" in found.detail)
"""


def test_file_counts_as_cold_where_mincore_counts_every_page(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(PAGES * PAGE))
    ran = subprocess.run(
        [sys.executable, "-c", IN_GVISOR, path],
        env={**os.environ, "LD_PRELOAD": str(built("mincore_shim"))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == ["True", "False", "False", "none", "0.0", "no", "True"]


def test_resident_share_is_of_the_bytes_of_all_files(fd: int, tmp_path: Path) -> None:
    size = PAGES * PAGE
    assert page_cache.resident_share([]) == page_cache.resident_share([(fd, size)]) == 0
    warm = tmp_path / "warm"
    warm.write_bytes(bytes(3 * size))
    with open(warm, "rb") as file:
        assert page_cache.resident_share([(file.fileno(), 3 * size)]) == 1
        assert page_cache.resident_share([(file.fileno(), 3 * size), (fd, size), (fd, 0)]) == 0.75


def test_residency_of_a_large_file_asks_about_samples_only(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "SAMPLES", 4)
    monkeypatch.setattr(page_cache, "SAMPLE_BYTES", PAGE)
    asked: list[int] = []
    real = page_cache.resident_bytes

    def counted(file: int, offset: int = 0, length: int = 0) -> int:
        asked.append(length)
        return real(file, offset, length)

    monkeypatch.setattr(page_cache, "resident_bytes", counted)
    assert page_cache.residency(fd, PAGES * PAGE) == "none"
    os.pread(fd, PAGE, 0)
    assert page_cache.residency(fd, PAGES * PAGE) == "some"
    os.pread(fd, PAGES * PAGE, 0)
    assert page_cache.residency(fd, PAGES * PAGE) == "all"
    assert asked == [1] * 12
