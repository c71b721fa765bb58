"""Loads from other filesystems than that of the test directory, and under limits of a cgroup.

Mounting, and dividing the cgroups of version 2, need root. GDSLOAD_TEST_CGROUP names another cgroup
to divide, which may be of version 1.
"""

from __future__ import annotations

import ast
import errno
import fcntl
import functools
import mmap
import os
import shutil
import struct
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
from descriptors import none_left
from gdsload.checkpoint import Shard, checkpoint as checkpoint_module
from gdsload.cli import measuring
from gdsload.errors import FileChanged, ReadError
from gdsload.memory import page_cache
from gdsload.system.storage import DEPTH
from storage import ENGINES, kept_warm, make_cold, python, save
from waiting import wait_for

mounts, records = measuring.program("mounts"), measuring.program("records")
NAME = "model.safetensors"
Mounted = Callable[..., Path]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory with one file of 12 MB, and its tensors."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    tensors = {f"t{i}": torch.randint(0, 255, (1_500_001,), dtype=torch.uint8) for i in range(8)}
    safetensors.torch.save_file(tensors, folder / NAME)
    return folder, tensors


@pytest.fixture
def mounted(expected: tuple[Path, dict[str, torch.Tensor]]) -> Iterator[Mounted]:
    """Mounts the directory, and returns the path of its file, cold."""
    with ExitStack() as stack:

        def mount(kind: str, **script: int) -> Path:
            try:
                point = stack.enter_context(mounts.mounted(kind, expected[0], **script))
            except records.Refused as refused:
                pytest.skip(str(refused))
            page_cache.evict(expected[0] / NAME)  # an overlay writes nothing back to it
            if page_cache.evict(point / NAME) and kind != "tmpfs":
                pytest.skip(f"{point}: its pages cannot be evicted (a file system in memory)")
            return point / NAME

        yield mount


@pytest.fixture
def checked(expected: tuple[Path, dict[str, torch.Tensor]]) -> Callable[..., gdsload.LoadReport]:
    """Loads a file, compares each byte, and returns the report."""

    def load(path: Path, **words: Any) -> gdsload.LoadReport:
        got = gdsload.load_file(path, **words)
        assert got.keys() == expected[1].keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in expected[1].items())
        return gdsload.last_report()

    return load


def io_modes(report: gdsload.LoadReport) -> set[str]:
    return {path.rpartition("/")[2] for path, nbytes in report.paths.items() if nbytes}


@pytest.mark.parametrize("kind", ["xfs", "btrfs", "overlay"])
@pytest.mark.parametrize(
    ("page_cache", "modes"), [("auto", {"mapped"}), ("keep", {"direct", "direct bounced"})]
)
def test_local_filesystem_is_read_at_the_usual_depth(
    mounted: Mounted, checked: Any, kind: str, page_cache: str, modes: set[str]
) -> None:
    report = checked(mounted(kind), page_cache=page_cache)
    assert io_modes(report) <= modes
    assert (report.filesystem, report.depth) == ("", 16)


def test_overlay_tells_what_the_page_cache_holds(mounted: Mounted, checked: Any) -> None:
    path = mounted("overlay")
    assert page_cache.resident_bytes(path) < path.stat().st_size
    assert io_modes(checked(path)) == {"mapped"}
    assert gdsload.last_report().read_bytes > 0
    with kept_warm(path):
        assert page_cache.resident_bytes(path) == path.stat().st_size
        checked(path)
    assert gdsload.last_report().read_bytes == 0


def run(*words: str | Path) -> None:
    """Runs a program; skips the test if it fails, as without root."""
    ended = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    if ended.returncode:
        pytest.skip(f"{words[0]}: {ended.stderr.strip()}")


def test_overlay_of_two_filesystems_tells_what_the_page_cache_holds(
    expected: tuple[Path, dict[str, torch.Tensor]], checked: Any, tmp_path: Path
) -> None:
    """Its files have device numbers that no mount has."""
    upper, point = tmp_path / "upper", tmp_path / "point"
    upper.mkdir()
    point.mkdir()
    with ExitStack() as stack:
        run("mount", "-t", "tmpfs", "gdsload", upper)
        stack.callback(subprocess.run, ["umount", "--lazy", upper], check=True)
        for name in ("changes", "work"):
            (upper / name).mkdir()
        layers = f"lowerdir={expected[0]},upperdir={upper}/changes,workdir={upper}/work"
        run("mount", "-t", "overlay", "-o", layers, "gdsload", point)
        stack.callback(subprocess.run, ["umount", "--lazy", point], check=True)
        path = point / NAME
        path.read_bytes()
        with kept_warm(expected[0] / NAME):
            assert page_cache.resident_bytes(path) == path.stat().st_size
            assert checked(path, page_cache="drop").read_bytes == 0


def test_disk_that_cannot_be_read_fails_each_load(
    expected: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """The kernel keeps pages that it could not read, and calls them resident."""
    point, (source, image) = tmp_path / "point", (tmp_path / "source", tmp_path / "disk" / "image")
    for folder in (point, source, image.parent):
        folder.mkdir()
    for number in range(4):  # whatever the order on the disk, some of it cannot be read
        shutil.copy(expected[0] / NAME, source / f"{number}.safetensors")
    with image.open("wb") as file:
        file.truncate(64 << 20)
    run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-d", source, image)
    with ExitStack() as stack:
        try:
            fault = {"error": errno.EIO, "error_from": 24 << 20}
            disk = stack.enter_context(mounts.mounted("fuse", image.parent, **fault))
        except records.Refused as refused:
            pytest.skip(str(refused))
        run("mount", "-t", "ext4", "-o", "loop,ro", disk / image.name, point)
        stack.callback(subprocess.run, ["umount", "--lazy", point], check=True)
        failed = [path for path in sorted(point.glob("*.safetensors")) if fails(path)]
        assert failed
        for path in 2 * failed:
            with pytest.raises(ReadError, match="Input/output error"):
                gdsload.load_file(path)


INTO = """
import sys
import gdsload, torch
torch.set_num_threads(1)
targets = {f"t{i}": torch.empty(1_500_001, dtype=torch.uint8) for i in range(8)}
try:
    gdsload.load_into(targets, sys.argv[1])
except gdsload.ReadError as error:
    print(error)
"""


@contextmanager
def bad_disk(source: Path, tmp_path: Path, page: int) -> Iterator[Path]:
    """The path of a file on a disk that cannot be read from the block of a page of it on, -1: its
    last one."""
    point, image = tmp_path / "point", tmp_path / "disk" / "image"
    for folder in (point, image.parent):
        folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    run("mkfs.ext4", "-q", "-F", "-b", "4096", "-d", source, image)
    path = point / NAME
    with ExitStack() as stack:
        run("mount", "-t", "ext4", "-o", "loop,ro", image, point)
        stack.callback(subprocess.run, ["umount", point], check=True)
        with path.open("rb") as file:
            pages = -(-os.fstat(file.fileno()).st_size // 4096)
            fibmap = 1
            asked = struct.pack("i", page % pages)
            (block,) = struct.unpack("i", fcntl.ioctl(file, fibmap, asked))
    with ExitStack() as stack:
        try:
            fault = {"error": errno.EIO, "error_from": block * 4096}
            disk = stack.enter_context(mounts.mounted("fuse", image.parent, **fault))
        except records.Refused as refused:
            pytest.skip(str(refused))
        run("mount", "-t", "ext4", "-o", "loop,ro", disk / image.name, point)
        stack.callback(subprocess.run, ["umount", "--lazy", point], check=True)
        yield path


def test_page_that_is_not_there_and_cannot_be_read_is_an_error(
    expected: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """The load copies from a mapping of a file that is in the page cache but for its last page."""
    with bad_disk(expected[0], tmp_path, -1) as path:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for offset in range(0, (size - 1) // 4096 * 4096, 4096):
                os.pread(file.fileno(), 4096, offset)
            assert page_cache.mostly_resident(file.fileno(), 0, size)
            assert not page_cache.wholly_resident(file.fileno(), 0, size)
        error = python(INTO, path)
        assert "(tensor 't" in error and "Input/output error" in error


ONE_BY_ONE = """
import sys
import gdsload
try:
    with gdsload.safe_open(sys.argv[1]) as opened:
        for name in opened.keys():
            opened.get_tensor(name).sum()
except gdsload.ReadError as error:
    print(error)
"""


@pytest.mark.parametrize("page", [800, 1500, 2200])
def test_page_that_could_not_be_read_ahead_is_an_error(
    expected: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, page: int
) -> None:
    """The kernel calls it resident, and tells nobody. A process that maps it ends by SIGBUS."""
    with bad_disk(expected[0], tmp_path, page) as path:
        error = python(ONE_BY_ONE, path)
    assert "(tensor 't" in error and "Input/output error" in error


def fails(path: Path) -> bool:
    try:
        gdsload.load_file(path)
    except ReadError:
        return True
    return False


def test_direct_reads_on_btrfs_leave_nothing_in_the_page_cache(
    expected: tuple[Path, dict[str, torch.Tensor]], checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may read by the page cache all the same, as if the reads were buffered."""
    path = expected[0] / NAME
    make_cold(path)
    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "btrfs")
    monkeypatch.setattr(Shard, "reopen_direct", lambda *_: None)
    report = checked(path, page_cache="keep")
    assert io_modes(report) == {"buffered"}
    assert page_cache.resident_bytes(path) < 1 << 20  # the header was there


def test_tmpfs_is_mapped(mounted: Mounted, checked: Any) -> None:
    report = checked(mounted("tmpfs"))
    assert io_modes(report) == {"mapped"}
    assert (report.filesystem, report.depth) == ("", 0)


def test_fuse_is_read_directly_with_many_reads_in_flight(mounted: Mounted, checked: Any) -> None:
    report = checked(mounted("fuse", latency_us=2000))
    assert io_modes(report) == {"direct"}
    assert (report.filesystem, report.depth >= 256) == ("fuse.slowfs", True)
    assert report.requests >= 12, "requests of 1 MiB"
    assert f"fuse.slowfs, {report.depth} reads in flight" in report.summary()


def test_fuse_without_direct_io_is_read_through_the_page_cache(
    mounted: Mounted, checked: Any
) -> None:
    report = checked(mounted("fuse", no_direct=1))
    assert io_modes(report) == {"buffered"}
    assert report.refusals[f"direct I/O on {NAME}"] == "its filesystem does no direct I/O"
    assert report.depth >= 256


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_each_engine_reads_fuse(mounted: Mounted, checked: Any, engine: str, cache: str) -> None:
    path = mounted("fuse", latency_us=500, max_read=128 << 10)
    assert io_modes(checked(path, cache=cache, options={"engine": engine})) == {cache}


def test_options_of_the_user_win_over_those_of_the_storage(mounted: Mounted, checked: Any) -> None:
    report = checked(mounted("fuse"), options={"depth": 8, "request_bytes": 4 << 20})
    assert (report.depth, report.requests) == (8, 3)


def test_file_on_fuse_with_one_cold_page_is_not_mapped(mounted: Mounted, checked: Any) -> None:
    path = mounted("fuse")
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for _ in range(20):  # the kernel may take pages back at once
            file.seek(0)
            file.read()
            if io_modes(checked(path)) == {"mapped"}:
                break
        else:
            pytest.fail("all of it is in the page cache, and it is not mapped")
        middle = 1000 * mmap.PAGESIZE
        # Whole folios leave the page cache: perhaps more than one page.
        for nbytes in (mmap.PAGESIZE, 1 << 20, 4 << 20):
            os.posix_fadvise(file.fileno(), middle, nbytes, os.POSIX_FADV_DONTNEED)
            if not page_cache.wholly_resident(file.fileno(), middle, mmap.PAGESIZE):
                break
    assert "mapped" not in io_modes(checked(path))


def test_file_on_fuse_whose_pages_are_still_being_read_is_not_mapped(
    mounted: Mounted, checked: Any
) -> None:
    """`cachestat` counts them. Who maps the file and uses them waits as long as the daemon does."""
    path = mounted("fuse", no_direct=1, latency_us=1_000_000)
    size = 4 << 20  # of the file: it takes a second for each MiB
    with open(path, "rb") as file:
        fd = file.fileno()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(fd, 1, 0)  # the header
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
        reader = threading.Thread(target=os.pread, args=(fd, size, 0))
        reader.start()
        wait_for(lambda: page_cache.resident_bytes(fd) > 1 << 20)
        counted = page_cache.resident_bytes(fd) // mmap.PAGESIZE * mmap.PAGESIZE
        assert not page_cache.has_arrived(fd, 0, counted)
        assert page_cache.mostly_resident(fd, 0, counted)
        reader.join()
        assert page_cache.has_arrived(fd, 0, size)


@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_error_of_the_filesystem_names_file_offset_and_reason(mounted: Mounted, cache: str) -> None:
    path = mounted("fuse", error=errno.EREMOTEIO, error_from=8 << 20)
    with pytest.raises(ReadError, match=r"Remote I/O error|Input/output error") as raised:
        gdsload.load_file(path, cache=cache)
    assert raised.value.path == str(path)
    assert raised.value.offset is not None and raised.value.offset + (1 << 20) >= 8 << 20
    assert "tensor 't" in str(raised.value)


def test_single_error_of_the_filesystem_is_retried(mounted: Mounted, checked: Any) -> None:
    path = mounted("fuse", error=errno.EIO, error_from=8 << 20, error_times=1)
    report = checked(path, cache="direct")
    assert report.retries == 1
    assert any("direct I/O" in name for name in report.refusals)


def test_change_that_the_kernel_has_not_heard_of_raises_file_changed(tmp_path: Path) -> None:
    """On a read-only mount it keeps the attributes for as long as the daemon allows."""
    path = save(tmp_path / NAME, 1)
    os.utime(path, (1, 1))
    with ExitStack() as stack:
        try:
            point = stack.enter_context(mounts.mounted("fuse", tmp_path))
        except records.Refused as refused:
            pytest.skip(str(refused))
        checkpoint = stack.enter_context(gdsload.Checkpoint.open(point / NAME))
        checkpoint.verify_unchanged()
        with open(path, "r+b") as file:
            file.seek(500_000)
            file.write(b"\7")
        with pytest.raises(FileChanged, match="it was written to"):
            checkpoint.verify_unchanged()


def loaded(path: Path, cache: str) -> None:
    gdsload.load_file(path, cache=cache, page_cache="drop")


def streamed(path: Path, cache: str) -> None:
    for _ in gdsload.stream(path, cache=cache, page_cache="drop", window_bytes=2 << 20):
        pass


def opened(path: Path, cache: str) -> None:
    with gdsload.safe_open(path, cache=cache, page_cache="drop") as file:
        file.get_tensors()


@pytest.mark.parametrize("kind", ["fuse", "disk"])
@pytest.mark.parametrize("load", [loaded, streamed, opened])
def test_dropping_load_leaves_what_was_resident_before(
    mounted: Mounted,
    expected: tuple[Path, dict[str, torch.Tensor]],
    load: Callable[[Path, str], None],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while the machine is short of memory: the range is locked, and what is dropped is noted,
    because nobody could drop locked pages."""
    is_fuse = kind == "fuse"
    path = mounted(kind, no_direct=1) if is_fuse else expected[0] / NAME
    cache = "auto" if is_fuse else "buffered"
    make_cold(path)
    advise, dropped = os.posix_fadvise, []
    kept = range(4 << 20, 5 << 20)

    def noted(fd: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append((offset, offset + length))
        advise(fd, offset, length, advice)

    with open(path, "rb") as file:
        advise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), len(kept), kept.start)
        with kept_warm(path, offset=kept.start, length=len(kept)):
            monkeypatch.setattr(os, "posix_fadvise", noted)
            load(path, cache)
    assert dropped and all(end <= kept.start or kept.stop <= first for first, end in dropped)
    # The header was read before the load noted what is resident, with the kernel's read-ahead.
    assert page_cache.resident_bytes(path) < 2 << 20
    dropped.clear()
    gdsload.load_file(path, cache=cache)
    assert dropped == [], "it is kept by default"


def test_dropping_load_of_a_file_of_another_user_reports_that_it_drops_nothing(
    expected: tuple[Path, dict[str, torch.Tensor]], checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(errno.EPERM, "only its owner is told")

    monkeypatch.setattr(page_cache, "resident_bytes", refused)
    report = checked(expected[0] / NAME, cache="buffered", page_cache="drop")
    assert report.refusals == {f"page_cache='drop' on {NAME}": "only its owner is told"}


@pytest.mark.parametrize(
    ("first", "second", "depth"),
    [(0.06, 0.04, 2 * DEPTH), (0.0, 0.04, 2 * DEPTH), (0.0, 0.0, DEPTH)],
)
def test_depth_of_distant_storage_follows_its_fastest_first_read(
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: float,
    second: float,
    depth: int,
) -> None:
    """0.0: the header was in the page cache, and its read says nothing about the storage."""
    seconds = property(lambda shard: first if "00001" in shard.name else second, lambda *_: None)
    monkeypatch.setattr(Shard, "first_read_seconds", seconds, raising=False)
    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "nfs4")
    gdsload.load_file(tiny_checkpoint, cache="buffered")
    assert gdsload.last_report().depth == depth


@pytest.mark.parametrize("filesystem", ["nfs4", ""])
@pytest.mark.parametrize("pages", [0, 1])
def test_first_read_of_distant_storage_is_timed_if_the_page_cache_does_not_have_it(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, pages: int, filesystem: str
) -> None:
    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: filesystem)
    monkeypatch.setattr(checkpoint_module.system, "cachestat", lambda *_: pages)
    with gdsload.Checkpoint.open(tiny_checkpoint) as checkpoint:
        known = [shard.first_read_seconds > 0 for shard in checkpoint.shards]
    assert known == [not (pages and filesystem)] * 2


CGROUP_LOAD = """
import sys, gdsload, zlib
from pathlib import Path
Path(sys.argv[3]).write_text("0")  # this process
import torch
got = gdsload.load_file(sys.argv[1], cache=sys.argv[2], progress=False)
print(sorted((name, zlib.crc32(tensor.numpy())) for name, tensor in got.items()))
"""


@contextmanager
def limited(path: Path, limit: str) -> Iterator[Path]:
    """The members of a cgroup that reads `path` slowly, or whose page cache is smaller than it."""
    with ExitStack() as stack:
        try:
            parent = os.environ.get("GDSLOAD_TEST_CGROUP") or stack.enter_context(
                mounts.cgroup_root(limit.partition("_")[0])
            )
            value = {
                "memory_max": str(400 << 20),
                "io_max": f"{mounts.disk_of(path)} rbps={20 << 20}",
            }[limit]
            members = stack.enter_context(mounts.cgroup(Path(parent), **{limit: value}))
        except records.Refused as refused:
            pytest.skip(str(refused))
        yield members


@pytest.mark.parametrize("cache", ["direct", "buffered"])
@pytest.mark.parametrize("limit", ["memory_max", "io_max"])
def test_load_under_a_limit_of_a_cgroup_is_complete(
    expected: tuple[Path, dict[str, torch.Tensor]], cache: str, limit: str
) -> None:
    folder, tensors = expected
    path = folder / NAME
    page_cache.evict(path)
    with limited(path, limit) as members:
        printed = python(CGROUP_LOAD, path, cache, members)
    sums = sorted((name, zlib.crc32(tensor.numpy())) for name, tensor in tensors.items())
    assert printed == str(sums)


SLOW_FILL = """
import sys, gdsload
from pathlib import Path
Path(sys.argv[2]).write_text("0")  # this process
import torch
gdsload.load_file(sys.argv[1], page_cache="fill", progress=False)
print(gdsload.last_report().paths)
"""


def test_what_a_slow_disk_has_read_ahead_was_not_in_the_page_cache_before(
    expected: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path = expected[0] / NAME
    make_cold(path)
    with limited(path, "io_max") as members:
        paths = ast.literal_eval(python(SLOW_FILL, path, members))
    if "posix/threads/mapped" not in paths:
        pytest.skip("the page cache was not filled")
    assert paths["posix/threads/mapped"] >= sum(t.nbytes for t in expected[1].values())
    assert "mapped" not in paths


LOADS = [
    gdsload.load_file,
    gdsload.stream,
    gdsload.safe_open,
    gdsload.prefetch,
    gdsload.from_pretrained,
    functools.partial(gdsload.load_into, {}),
]


@pytest.mark.parametrize("load", LOADS)
def test_unknown_page_cache_is_a_value_error(
    expected: tuple[Path, dict[str, torch.Tensor]], load: Callable[..., Any]
) -> None:
    with pytest.raises(
        ValueError, match="page_cache='empty' must be one of auto, keep, drop, fill"
    ):
        load(expected[0] / NAME, page_cache="empty")


@pytest.mark.parametrize(
    ("load", "words", "message"),
    [
        *((load, {"on_event": "print"}, "on_event='print' must be a function") for load in LOADS),
        *(
            (load, {"options": "depth=4"}, "options='depth=4' must be a mapping")
            for load in LOADS
            if load is not gdsload.from_pretrained  # it has no such keyword
        ),
    ],
)
def test_keyword_of_another_type_is_a_type_error_at_the_call(
    expected: tuple[Path, dict[str, torch.Tensor]],
    load: Callable[..., Any],
    words: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(TypeError, match=message):
        load(expected[0] / NAME, **words)


def test_load_that_is_interrupted_while_it_drops_closes_its_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        safetensors.torch.save_file(
            {f"t{number}": torch.ones(1 << 18)}, tmp_path / f"{number}.safetensors"
        )
        make_cold(tmp_path / f"{number}.safetensors")

    def advise(fd: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            raise KeyboardInterrupt

    with none_left():
        opened = gdsload.safe_open(tmp_path, page_cache="drop")
        dict(opened.get_tensors())
        monkeypatch.setattr(os, "posix_fadvise", advise)
        with pytest.raises(KeyboardInterrupt):
            opened.close()
        others = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
        opened.close()
        for fd in others:
            os.close(fd)  # EBADF: it was closed as one of the load's


def test_prefetch_to_the_page_cache_does_not_drop_it(
    expected: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    with pytest.raises(ValueError, match="cannot be combined with page_cache='drop'"):
        gdsload.prefetch(expected[0], tier="pagecache", page_cache="drop")
