"""Cold loads that leave the bytes in the page cache for the next process."""

from __future__ import annotations

import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
from gdsload._native import system
from gdsload._native.first_touch import MODES
from gdsload.backends.posix import PosixBackend
from gdsload.checkpoint import Checkpoint, Shard, checkpoint as checkpoint_module
from gdsload.errors import CheckpointError, PlacementError, ReadError
from gdsload.loading import page_cache_fill, session as session_module
from gdsload.loading.batch import Batch
from gdsload.loading.session import Session
from gdsload.loading.settings import ReadSettings
from gdsload.memory import page_cache
from gdsload.planning.read_plan import Limits, byte_ranges_of
from gdsload.report import LoadReport
from gdsload.system import available
from gdsload.system.storage import FILL_UNIT_BYTES
from storage import kept_warm, make_cold

MADV_POPULATE_READ = 22  # not in Python's mmap


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A cold file of 10 MB."""
    path = tmp_path / "model.safetensors"
    tensors = {f"t{i}": torch.full((500_000,), i, dtype=torch.int16) for i in range(10)}
    safetensors.torch.save_file(tensors, path)
    make_cold(path)
    return path


def io_modes(report: LoadReport) -> set[str]:
    return {path.rpartition("/")[2] for path, nbytes in report.paths.items() if nbytes}


def test_cold_file_is_read_into_the_page_cache_and_mapped(path: Path) -> None:
    got = gdsload.load_file(path)
    assert page_cache.resident_bytes(path) >= path.stat().st_size // 2
    with kept_warm(path):
        report = gdsload.last_report()
        assert report.paths == {"posix/threads/mapped": report.read_bytes}
        assert report.read_bytes >= report.wanted_bytes
        assert report.page_cache.startswith("filled: ")
        assert all(bool((got[f"t{i}"] == i).all()) for i in range(10))
        gdsload.load_file(path)
        assert gdsload.last_report().paths == {"mapped": report.wanted_bytes}
        assert gdsload.last_report().page_cache == ""


@pytest.fixture(scope="module")
def several_streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 300 MB: each of eight threads reads 32 MiB and more, in several streams."""
    path = tmp_path_factory.mktemp("streams") / "model.safetensors"
    random = torch.Generator().manual_seed(7)
    lengths = (1, 4097, 2_097_151, 33_554_433, 67_108_864, 80_000_003, 120_000_001)
    tensors = {
        f"t{length}": torch.randint(0, 256, (length,), dtype=torch.uint8, generator=random)
        for length in lengths
    }
    safetensors.torch.save_file(tensors, path)
    return path


@pytest.mark.parametrize("pages", MODES)
def test_folios_of_each_kind_give_the_same_bytes(several_streams: Path, pages: str) -> None:
    page_cache.evict(several_streams)
    found = gdsload.load_file(several_streams, page_cache="fill", options={"pages": pages})
    assert io_modes(gdsload.last_report()) == {"mapped"}
    expected = safetensors.torch.load_file(several_streams)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_was_read_ahead_while_the_process_was_stopped_counts_as_read(
    several_streams: Path,
) -> None:
    """Reads of more than a second end short, and go on behind what the kernel has read ahead."""
    make_cold(several_streams)
    code = (
        "import sys, gdsload, torch; print(flush=True); gdsload.load_file(sys.argv[1],"
        " page_cache='fill', progress=False); print(*gdsload.last_report().paths)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, several_streams], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.06)
        child.send_signal(signal.SIGSTOP)
        time.sleep(1.3)
        child.send_signal(signal.SIGCONT)
        assert child.stdout.read() == "posix/threads/mapped\n"


@pytest.mark.parametrize("pages", MODES)
def test_file_with_gaps_in_the_page_cache_is_completed(several_streams: Path, pages: str) -> None:
    """Some units are there, some are not, and some are there in part."""
    make_cold(several_streams)
    size, gaps = several_streams.stat().st_size, Random(5)
    with several_streams.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        offset = 0
        while offset < size:
            length = gaps.randrange(1, 12 << 20)
            os.pread(file.fileno(), length, offset)
            offset += length + gaps.randrange(1, 8 << 20)
    with several_streams.open("rb") as file:
        assert page_cache.residency(file.fileno(), size) == "some"
    before = bytes_from_disk()
    found = gdsload.load_file(several_streams, page_cache="fill", options={"pages": pages})
    report = gdsload.last_report()
    assert report.paths.keys() == {"posix/threads/mapped", "mapped"}
    assert sum(report.paths.values()) >= report.wanted_bytes
    assert report.read_bytes == report.paths["posix/threads/mapped"] < size
    assert bytes_from_disk() - before <= size - report.paths["mapped"] + mmap.PAGESIZE
    expected = safetensors.torch.load_file(several_streams)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_option_chooses_the_folios(several_streams: Path) -> None:
    require_huge_folios(several_streams)
    mapped = {}
    for pages in ("huge", "small"):
        make_cold(several_streams)
        held = gdsload.load_file(several_streams, page_cache="fill", options={"pages": pages})
        mapped[pages] = mapped_as_huge(several_streams)
        del held
    assert mapped["small"] < mapped["huge"]


def test_huge_folios_are_not_read_ahead(several_streams: Path) -> None:
    """A hypervisor may have to find memory for each of them."""
    require_huge_folios(several_streams)
    with several_streams.open("rb") as file:
        try:
            system.cachestat(file.fileno(), 0, 1)
        except OSError:
            pytest.skip("this kernel does not tell whether the second of a pair was read")
    make_cold(several_streams)
    got = gdsload.load_file(
        several_streams, names=["t67108864"], page_cache="fill", options={"pages": "huge"}
    )
    beside = page_cache.resident_bytes(several_streams) - got["t67108864"].nbytes
    assert beside <= 3 * FILL_UNIT_BYTES  # the units at both ends, and the second of a pair


def require_huge_folios(path: Path) -> None:
    make_cold(path)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapping,
    ):
        with suppress(OSError):  # an old kernel
            mapping.madvise(mmap.MADV_HUGEPAGE)
            mapping.madvise(MADV_POPULATE_READ)
        if not mapped_as_huge(path):
            pytest.skip("this filesystem or kernel has no huge folios, or memory has none free")


def mapped_as_huge(path: Path) -> int:
    """Bytes of a file that this process maps by huge pages."""
    mappings = Path("/proc/self/smaps").read_text().partition(str(path))[2]
    return int(re.findall(r"^FilePmdMapped: +(\d+)", mappings, re.M)[0]) << 10


def test_report_tells_how_much_was_in_the_page_cache_before(path: Path) -> None:
    half = path.stat().st_size // 2
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        file.read(half)
    gdsload.load_file(path)
    found = re.search(r"about (\d+)% of the files were in it$", gdsload.last_report().page_cache)
    assert found and 40 <= int(found[1]) <= 70


def test_loads_at_the_same_time_share_what_they_read(path: Path) -> None:
    with closing(gdsload.stream(path, window_bytes=1 << 20)) as first:
        next(first)
        before = bytes_from_disk()
        with closing(gdsload.stream(path, window_bytes=1 << 20)) as second:
            for loaded in (first, second):
                assert all(bool((tensor == int(name[1:])).all()) for name, tensor in loaded)
                assert io_modes(gdsload.last_report()) == {"mapped"}
        assert bytes_from_disk() - before < 1.5 * path.stat().st_size


def bytes_from_disk() -> int:
    """Bytes that this process has made the kernel read from a disk."""
    return int(re.findall(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.M)[0])


@pytest.mark.parametrize("options", [{"request_bytes": 1 << 20}, {"pages": "small"}])
def test_options_of_reads_past_the_page_cache_are_kept(path: Path, options: Any) -> None:
    gdsload.load_file(path, options=options)
    report = gdsload.last_report()
    assert io_modes(report) <= {"direct", "direct bounced"}
    assert (
        report.page_cache
        == f"not filled: options has {next(iter(options))}: only page_cache='fill' fills it then"
    )
    gdsload.load_file(path, options=options, page_cache="fill")
    assert io_modes(gdsload.last_report()) == {"mapped"}


@pytest.mark.parametrize(
    ("nbytes", "huge", "mode"),
    [
        (4096, True, "direct"),
        (128 << 10, True, "mapped"),
        (128 << 10, False, "direct"),
        (1 << 20, False, "mapped"),
        (None, False, "mapped"),
    ],
)
def test_disk_with_a_short_read_ahead_is_read_past_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int | None, huge: bool, mode: str
) -> None:
    monkeypatch.setattr(page_cache_fill, "read_ahead_bytes", lambda *_: nbytes)
    monkeypatch.setattr(page_cache_fill, "reads_ahead_by_huge_pages", lambda: huge)
    gdsload.load_file(path)
    assert mode in io_modes(gdsload.last_report())
    page_cache.evict(path)
    gdsload.load_file(path, page_cache="fill")
    assert io_modes(gdsload.last_report()) == {"mapped"}


def test_file_that_the_caller_maps_is_not_read_before_it_is_used(path: Path) -> None:
    got = gdsload.load_file(path, cache="mapped")
    assert page_cache.resident_bytes(path) < path.stat().st_size // 2
    assert all(bool((got[f"t{i}"] == i).all()) for i in range(10))


def test_tensors_with_memory_of_their_own_are_read_past_the_page_cache(path: Path) -> None:
    tensors = {f"t{i}": torch.zeros(500_000, dtype=torch.int16) for i in range(10)}
    report = gdsload.load_into(tensors, path)
    assert io_modes(report) <= {"direct", "direct bounced"}
    assert all(bool((tensors[f"t{i}"] == i).all()) for i in range(10))


def test_slices_of_an_open_file_are_read_past_the_page_cache(path: Path) -> None:
    with gdsload.safe_open(path) as opened:
        assert bool((opened.get_slice("t3")[1000:5000] == 3).all())
        assert "mapped" not in io_modes(gdsload.last_report())
        opened.get_tensor("t3")
        assert io_modes(gdsload.last_report()) == {"mapped"}
        assert bool((opened.get_slice("t7")[1000:5000] == 7).all())
    page_cache.evict(path)
    with gdsload.safe_open(path, page_cache="fill") as opened:
        assert bool((opened.get_slice("t3")[1000:5000] == 3).all())
        assert io_modes(gdsload.last_report()) == {"mapped"}


def test_file_that_cannot_be_opened_again_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(
        Batch, "_before_reads", lambda _: resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    )
    try:
        got = gdsload.load_file(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert io_modes(gdsload.last_report()) == {"mapped"}
    assert page_cache.resident_bytes(path) >= path.stat().st_size // 2
    assert all(bool((got[f"t{i}"] == i).all()) for i in range(10))


def test_tensors_of_a_mapping_can_be_written_and_the_file_stays(path: Path) -> None:
    before = path.read_bytes()
    page_cache.evict(path)
    got = gdsload.load_file(path, page_cache="fill")
    got["t3"].fill_(77)
    assert path.read_bytes() == before


def test_file_that_leaves_too_little_memory_is_read_past_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache_fill, "available_bytes", lambda: 12_000_000)
    got = gdsload.load_file(path, page_cache="fill")
    report = gdsload.last_report()
    assert io_modes(report) <= {"direct", "direct bounced"}
    assert report.page_cache.startswith("not filled: 10,000,000 bytes leave too little of the 12,")
    assert page_cache.resident_bytes(path) < report.wanted_bytes // 2
    assert all(bool((got[f"t{i}"] == i).all()) for i in range(10))


def test_file_that_has_no_room_in_memory_is_mapped(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (page_cache_fill, available):
        monkeypatch.setattr(module, "available_bytes", lambda *_: 12_000_000)
    monkeypatch.setattr(available, "SPARE_BYTES", 4_000_000)
    for asked in ({"cache": "direct"}, {"page_cache": "keep"}):
        with pytest.raises(PlacementError, match="are missing"):
            gdsload.load_file(path, **asked)
    got = gdsload.load_file(path)
    report = gdsload.last_report()
    assert report.paths == {"mapped": report.wanted_bytes}
    assert report.page_cache.startswith("not filled: 10,000,000 bytes leave too little of the 12,")
    assert report.refusals["memory"].endswith("are missing; the files are mapped instead")
    assert all(bool((got[f"t{i}"] == i).all()) for i in range(10))


def test_prefetch_that_has_no_room_in_memory_is_refused_and_its_load_maps(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (page_cache_fill, available):
        monkeypatch.setattr(module, "available_bytes", lambda *_: 4_000_000)
    with gdsload.prefetch(path) as ahead:
        with pytest.raises(PlacementError, match="are missing"):
            ahead.wait(60)
        got = gdsload.load_file(path)
    assert gdsload.last_report().paths == {"mapped": 10_000_000}
    assert all(bool((got[f"t{i}"] == i).all()) for i in range(10))


@pytest.mark.parametrize("words", [{}, {"page_cache": "fill"}], ids=str)
def test_network_storage_is_read_past_the_page_cache(
    path: Path, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = path.with_name("small.safetensors")
    safetensors.torch.save_file({"w": torch.ones(1 << 18)}, small)
    page_cache.evict(small)
    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "nfs4")
    for file in (path, small):
        gdsload.load_file(file, **words)
        assert io_modes(gdsload.last_report()) <= {"direct", "direct bounced"}
        assert page_cache.resident_bytes(file) < file.stat().st_size // 2
    assert gdsload.last_report().page_cache == "not filled: the files are on nfs4"


def test_network_storage_without_direct_reads_fills_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "nfs4")
    monkeypatch.setattr(Shard, "reopen_direct", lambda shard: None)
    gdsload.load_file(path)
    report = gdsload.last_report()
    assert io_modes(report) == {"buffered"}
    assert report.page_cache == "filled: direct reads are refused"
    assert page_cache.resident_bytes(path) == path.stat().st_size
    page_cache.evict(path)
    gdsload.load_file(path, page_cache="drop")
    assert page_cache.resident_bytes(path) < path.stat().st_size // 2


def test_network_storage_with_a_few_direct_reads_fills_the_page_cache_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        file = tmp_path / f"{name}.safetensors"
        safetensors.torch.save_file({name: torch.ones(3 << 20)}, file)
        page_cache.evict(file)
    real = Shard.reopen_direct
    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "nfs4")
    monkeypatch.setattr(
        Shard, "reopen_direct", lambda shard: None if "b" in shard.name else real(shard)
    )
    gdsload.load_file(tmp_path)
    assert io_modes(gdsload.last_report()) >= {"buffered"}
    assert gdsload.last_report().page_cache == "filled by some reads only"


def test_fuse_on_a_disk_is_read_past_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache_fill, "kind_of_device", lambda _: "fuseblk")
    gdsload.load_file(path, page_cache="fill")
    report = gdsload.last_report()
    assert io_modes(report) <= {"direct", "direct bounced"}
    assert report.page_cache.startswith("not filled: fuseblk may drop the pages")


def test_loads_of_a_part_read_their_share_past_the_page_cache(path: Path) -> None:
    gdsload.load_file(path, names=["t1", "t7"], page_cache="fill")
    assert io_modes(gdsload.last_report()) == {"mapped"}
    page_cache.evict(path)
    for _ in range(2):
        gdsload.load_file(path, names=["t1", "t7"])
        report = gdsload.last_report()
        assert io_modes(report) <= {"direct", "direct bounced"}
        assert report.page_cache.startswith("not filled: 2,000,000 of 10,")


@pytest.mark.parametrize(
    "words",
    [{"cache": "direct", "page_cache": "fill"}, {"page_cache": "drop"}, {"page_cache": "keep"}],
)
def test_page_cache_is_not_filled_if_the_caller_asks_for_other_reads(
    path: Path, words: dict[str, Any]
) -> None:
    for _ in range(2):
        gdsload.load_file(path, **words)
        assert io_modes(gdsload.last_report()) <= {"direct", "direct bounced"}


def test_stream_fills_the_page_cache_window_by_window(path: Path) -> None:
    for name, tensor in gdsload.stream(path, window_bytes=1 << 20):
        assert bool((tensor == int(name[1:])).all())
    report = gdsload.last_report()
    assert io_modes(report) == {"mapped"}


def test_pool_that_is_opened_during_a_stream_takes_no_mapped_bytes(path: Path) -> None:
    loaded = gdsload.stream(path, page_cache="fill", window_bytes=1 << 20)
    got = dict([next(loaded)])
    with gdsload.warmup.HostPool(64 << 20) as pool:
        got.update(loaded)
        assert pool.held_bytes == 0
        again = gdsload.load_file(path)
    for tensors in (got, again):
        assert all(bool((tensors[f"t{i}"] == i).all()) for i in range(10))


def test_backend_that_cannot_fill_reads_past_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an open file the first backend filled it, and after `quiesce` there is another one."""
    with gdsload.safe_open(path) as opened:
        del opened.get_tensors()["t0"]
        gdsload.quiesce(10)
        page_cache.evict(path)
        monkeypatch.setattr(PosixBackend, "limits", lambda *_: Limits())
        assert bool((opened.get_tensor("t7") == 7).all())
        assert not gdsload.last_report().paths.get("posix/threads/mapped")


def test_prefetch_fills_the_page_cache_and_a_load_takes_it(path: Path) -> None:
    with gdsload.prefetch(path) as ahead:
        ahead.wait()
        assert ahead.report.page_cache.startswith("filled: ")
        got = gdsload.load_file(path)
    assert gdsload.last_report().read_bytes == 0
    assert all(bool((got[f"t{i}"] == i).all()) for i in range(10))


def test_file_that_was_truncated_is_an_error_and_not_a_signal(path: Path) -> None:
    report = LoadReport(str(path))
    with (
        Checkpoint.open(path) as checkpoint,
        Session(checkpoint, report, ReadSettings(page_cache="fill")) as session,
    ):
        ranges = byte_ranges_of(checkpoint)
        os.truncate(path, path.stat().st_size // 2)
        batch = Batch(session, *session.arrange(ranges))
        try:
            assert session.report.page_cache.startswith("filled: ")
            with pytest.raises(ReadError, match="the file ended at byte"):
                batch.wait()
        finally:
            batch.release()


TRUNCATED_AT_ANY_TIME = """
import os, sys, threading, torch, gdsload, safetensors.torch
from gdsload.memory import page_cache
path = sys.argv[1]
tensors = {f"t{i}": torch.full((4 << 20,), i, dtype=torch.int16) for i in range(16)}
for run in range(10):
    safetensors.torch.save_file(tensors, path)
    page_cache.evict(path)
    cut = threading.Timer(run * 0.01, os.truncate, (path, 16 << 20))
    cut.start()
    try:
        gdsload.load_file(path, page_cache="fill")
    except gdsload.GdsloadError as error:
        print(type(error).__name__)
    cut.join()
"""


def test_truncation_at_any_time_of_a_load_is_no_signal(tmp_path: Path) -> None:
    # The threads that read also touch the pages, which may be gone.
    command = [sys.executable, "-c", TRUNCATED_AT_ANY_TIME, str(tmp_path / "model.safetensors")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout  # at least one load was hit


def test_order_of_use_does_not_cut_reads_into_the_page_cache(path: Path) -> None:
    with (
        Checkpoint.open(path) as checkpoint,
        Session(checkpoint, LoadReport(str(path)), ReadSettings(page_cache="fill")) as session,
    ):
        ranges = byte_ranges_of(checkpoint)
        whole = session.plan(ranges).transfers
        in_other_order = session.plan([*ranges[1::2], *ranges[::2]], window_bytes=1 << 20)
        assert in_other_order.transfers == whole
        assert session.report.page_cache.startswith("filled: ")


def test_report_of_an_open_file_says_what_its_reads_leave(path: Path) -> None:
    with gdsload.safe_open(path) as opened:
        for name in ("t0", "t1"):
            page_cache.evict(path)
            opened.get_tensor(name)
            assert gdsload.last_report().page_cache.startswith("filled: ")
    page_cache.evict(path)
    with gdsload.safe_open(path) as opened:
        _ = opened.get_slice("t2")[:1]
        assert gdsload.last_report().page_cache.startswith("not filled: read-ahead")


def test_small_file_is_left_out_of_the_page_cache_if_the_caller_asks_for_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.ones(1 << 18)}, path)
    make_cold(path)
    gdsload.load_file(path, page_cache="keep")
    # The header is read through it.
    assert page_cache.resident_bytes(path) < path.stat().st_size // 2
    assert gdsload.last_report().page_cache == ""
    page_cache.evict(path)
    gdsload.load_file(path)
    assert page_cache.resident_bytes(path) >= path.stat().st_size // 2
    assert gdsload.last_report().page_cache.startswith("filled: ")


@pytest.fixture
def unmappable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files cannot be mapped, as with a limit on the address space."""

    def refused(checkpoint: Checkpoint, shard: int) -> Any:
        raise CheckpointError(f"{checkpoint.shards[shard].path}: cannot be mapped")

    monkeypatch.setattr(session_module, "map_shard", refused)


@pytest.mark.parametrize("page_cache", ["keep", "fill"])
@pytest.mark.parametrize("warm", [True, False])
def test_file_that_cannot_be_mapped_is_read(
    path: Path, unmappable: None, page_cache: str, warm: bool
) -> None:
    with kept_warm(path) if warm else nullcontext():
        got = gdsload.load_file(path, page_cache=page_cache)
    assert all(bool((got[f"t{i}"] == i).all()) for i in range(10))
    report = gdsload.last_report()
    assert "mapped" not in io_modes(report)
    refused = warm or page_cache == "fill"
    assert report.refusals.keys() & {"mapping on model.safetensors"} == (
        {"mapping on model.safetensors"} if refused else set()
    )
    if page_cache == "fill":
        assert report.page_cache == "not filled: a file cannot be mapped"


def test_file_that_cannot_be_mapped_is_read_from_the_page_cache(
    path: Path, unmappable: None
) -> None:
    with gdsload.prefetch(path, tier="pagecache") as ahead:
        ahead.wait()
        got = gdsload.load_file(path)
    assert all(bool((got[f"t{i}"] == i).all()) for i in range(10))
    assert "mapped" not in io_modes(gdsload.last_report())


def test_file_that_cannot_be_mapped_is_an_error_if_the_caller_asks_for_it(
    path: Path, unmappable: None
) -> None:
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        gdsload.load_file(path, cache="mapped")
