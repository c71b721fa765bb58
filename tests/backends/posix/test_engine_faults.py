"""What a load makes of storage that misbehaves: right bytes, or one error that says where and why.

Each fault is injected by a scripted engine, once and without end, so that the same things happen on
every machine. Whatever was struck must show, as a retry in the report or as an error.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import faulty
import gdsload
from faulty import ANY, BUFFERED, DIRECT, ERRNO, FOR_EVER, HANG, SHORT, ZERO, Faults, rule
from gdsload._native.request import Request
from gdsload.backends.posix import engines
from gdsload.errors import GdsloadError, ReadError, ShortRead, StallError

REQUEST_BYTES = 8192
TENSORS = 9
OPTIONS: dict[str, object] = {"engine": "threads", "request_bytes": REQUEST_BYTES, "depth": 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine tensors of 10 to 14 KiB: 14 reads of 8 KiB, with a ragged tail."""
    random = torch.Generator().manual_seed(1)
    tensors = {
        f"t{i}": torch.randint(0, 256, (10_001 + 500 * i,), dtype=torch.uint8, generator=random)
        for i in range(TENSORS)
    }
    file = tmp_path_factory.mktemp("faults") / "model.safetensors"
    safetensors.torch.save_file(tensors, file)
    return file


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    with faulty.installed(monkeypatch) as installed:
        yield installed


def load(path: Path, cache: str = "direct", **more: object) -> dict[str, torch.Tensor]:
    return gdsload.load_file(path, cache=cache, options={**OPTIONS, **more})  # type: ignore[arg-type]


def check(path: Path, got: dict[str, torch.Tensor]) -> None:
    want = safetensors.torch.load_file(path)
    assert list(got) == list(gdsload.safe_open(path).offset_keys())
    assert all(torch.equal(got[name], want[name]) for name in want)


READS = 14


@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_nothing_injected(path: Path, faults: Faults, cache: str) -> None:
    check(path, load(path, cache))
    assert faults.log.reads == READS
    assert gdsload.last_report().retries == 0


# A fault that passes is survived, at whichever read it strikes.
PASSING = {
    "EINTR": rule(ERRNO, errno.EINTR),
    "EAGAIN": rule(ERRNO, errno.EAGAIN),
    "EBUSY": rule(ERRNO, errno.EBUSY),
    "EIO": rule(ERRNO, errno.EIO),
    "ECANCELED": rule(ERRNO, errno.ECANCELED),
}


@pytest.mark.parametrize("cache", ["direct", "buffered"])
@pytest.mark.parametrize("name", PASSING)
def test_a_passing_error_is_asked_again(path: Path, faults: Faults, name: str, cache: str) -> None:
    for skip in range(READS):
        once = PASSING[name]
        faults.script(rule(once.kind, once.value, skip=skip))
        check(path, load(path, cache))
        assert faults.log.struck == 1
        assert gdsload.last_report().retries >= 1, "the fault was swallowed"


@pytest.mark.parametrize("cache", ["direct", "buffered"])
@pytest.mark.parametrize("length", [1, 511, 512, 4095, 4096, 4097, 8191])
def test_short_reads_are_continued(path: Path, faults: Faults, length: int, cache: str) -> None:
    for skip in range(READS - 1):  # the last read is short by itself
        faults.script(rule(SHORT, length, skip=skip))
        check(path, load(path, cache))
        assert faults.log.struck == 1
        assert gdsload.last_report().short_reads >= 1


@pytest.mark.parametrize("cache", ["direct", "buffered"])
@pytest.mark.parametrize("length", [511, 512, 4095, 4096])
def test_reads_that_are_always_short(path: Path, faults: Faults, length: int, cache: str) -> None:
    faults.script(rule(SHORT, length, times=FOR_EVER))
    check(path, load(path, cache))


def test_one_byte_at_a_time(path: Path, faults: Faults) -> None:
    faults.script(rule(SHORT, 1, times=FOR_EVER, first=8192, last=16384))
    check(path, load(path))
    assert faults.log.struck > 1000


def test_a_short_read_that_hides_an_error(path: Path, faults: Faults) -> None:
    faults.script(
        rule(SHORT, 4096, first=16384, last=16385),
        rule(ERRNO, errno.EIO, times=FOR_EVER, first=20480, last=20481),
    )
    with pytest.raises(ReadError) as caught:
        load(path)
    assert (caught.value.offset, caught.value.got, caught.value.errno) == (16384, 4096, errno.EIO)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODATA, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_an_error_that_stays(path: Path, faults: Faults, code: int, cache: str) -> None:
    for first in (0, 40_000, 100_000):
        faults.script(rule(ERRNO, code, times=FOR_EVER, first=first, last=first + 1))
        with pytest.raises(ReadError) as caught:
            load(path, cache)
        error = caught.value
        assert error.errno == code and error.path == str(path)
        assert error.offset <= first < error.offset + error.wanted
        assert os.strerror(code) in str(error) and str(path) in str(error)
        with gdsload.Checkpoint.open(path) as checkpoint:
            touched = [
                info.name
                for info in checkpoint.tensors.values()
                if info.offset < error.offset + error.wanted
                and error.offset < info.offset + info.nbytes
            ]
        assert any(repr(name) in str(error) for name in touched)
        assert faults.log.struck == 2, "tried once more, and not again and again"
        assert gdsload.last_report().failure.startswith("ReadError")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_direct_reads_refused_are_read_through_the_page_cache(
    path: Path, faults: Faults, code: int
) -> None:
    faults.script(rule(ERRNO, code, times=FOR_EVER, io_mode=DIRECT))
    check(path, load(path))
    assert list(gdsload.last_report().paths) == ["posix/threads/buffered"]
    assert faults.log.struck < READS, "the file is not asked again and again"
    refusal = gdsload.last_report().refusals["direct I/O on model.safetensors"]
    assert os.strerror(code) in refusal and "the rest came through the page cache" in refusal


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EFAULT])
def test_one_direct_read_refused_leaves_the_others_direct(
    path: Path, faults: Faults, code: int
) -> None:
    faults.script(rule(ERRNO, code, times=FOR_EVER, io_mode=DIRECT, first=8192, last=8193))
    check(path, load(path))
    report = gdsload.last_report()
    assert faults.log.struck == 1
    assert report.paths["posix/threads/buffered"] == REQUEST_BYTES
    refusal = report.refusals["direct I/O on model.safetensors"]
    assert os.strerror(code) in refusal and "these bytes came through the page cache" in refusal


def test_an_error_on_the_direct_road_only(path: Path, faults: Faults) -> None:
    faults.script(rule(ERRNO, errno.EIO, times=FOR_EVER, io_mode=DIRECT, first=8192, last=8193))
    check(path, load(path))
    assert gdsload.last_report().paths["posix/threads/buffered"] == REQUEST_BYTES


@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_the_end_of_the_file_comes_early(path: Path, faults: Faults, cache: str) -> None:
    for first in (0, 50_000, os.path.getsize(path) - 1):
        faults.script(rule(ZERO, times=FOR_EVER, first=first, last=1 << 62))
        with pytest.raises(ShortRead) as caught:
            load(path, cache)
        assert caught.value.got < caught.value.wanted
        assert "ended at byte" in str(caught.value) and str(path) in str(caught.value)


def test_an_end_of_file_that_only_direct_reads_meet(path: Path, faults: Faults) -> None:
    faults.script(rule(ZERO, times=FOR_EVER, io_mode=DIRECT))
    check(path, load(path))


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN, errno.EBUSY])
@pytest.mark.parametrize("where", ["read", "submit"])
def test_not_now_for_ever_is_a_stall(path: Path, faults: Faults, code: int, where: str) -> None:
    if where == "read":
        faults.script(rule(ERRNO, code, times=FOR_EVER, first=30_000, last=30_001))
    else:
        faults.script(refuse_errno=code, refuse_times=FOR_EVER)
    with pytest.raises(StallError) as caught:
        gdsload.load_file(path, cache="direct", options=OPTIONS, stall_seconds=0.05)
    assert str(path) in str(caught.value) and "tensor" in str(caught.value)
    assert faults.log.struck < 5000, "it is asked in a tight loop"


def test_a_submission_refused_for_a_while(path: Path, faults: Faults) -> None:
    faults.script(refuse_errno=errno.EAGAIN, refuse_times=20)
    check(path, load(path))
    assert gdsload.last_report().retries == 20


def test_a_submission_refused_for_good(path: Path, faults: Faults) -> None:
    faults.script(refuse_errno=errno.EBADF, refuse_times=FOR_EVER)
    with pytest.raises(ReadError) as caught:
        load(path)
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("accept", [1, 2, 3])
def test_submissions_taken_in_part(path: Path, faults: Faults, accept: int) -> None:
    faults.script(accept=accept)
    check(path, load(path))
    assert faults.log.reads == READS, "nothing lost, nothing sent twice"


@pytest.mark.parametrize("depth", [1, 2, 64, 200])
def test_completions_out_of_order(path: Path, faults: Faults, depth: int) -> None:
    for one_by_one in (0, 1):
        faults.script(reversed=1, one_by_one=one_by_one)
        check(path, load(path, depth=depth))
        assert faults.log.reads == READS


def test_an_engine_that_breaks(path: Path, faults: Faults) -> None:
    for after in (0, 1, 5, READS - 1):
        faults.script(reap_errno=errno.ENXIO, reap_after=after, one_by_one=1)
        with pytest.raises(ReadError) as caught:
            load(path)
        assert caught.value.errno == errno.ENXIO
    faults.script()
    check(path, load(path))


def test_an_engine_that_cannot_be_opened(path: Path, faults: Faults) -> None:
    faults.script(open_errno=errno.EMFILE)
    with pytest.raises(gdsload.BackendUnavailable) as caught:
        load(path)
    assert os.strerror(errno.EMFILE) in str(caught.value) and caught.value.reasons


def test_two_faults_at_once(path: Path, faults: Faults) -> None:
    """Every pair of passing faults, on neighbouring reads."""
    for (_, one), (_, two) in itertools.product(PASSING.items(), repeat=2):
        faults.script(
            rule(one.kind, one.value, skip=3),
            rule(SHORT, 700, skip=2),
            rule(two.kind, two.value, skip=1),
        )
        check(path, load(path))
        assert faults.log.struck == 3


# Storage that does not answer at all.


@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_a_hang_is_a_stall_and_memory_stays(path: Path, faults: Faults, cache: str) -> None:
    faults.script(rule(HANG, times=FOR_EVER, first=60_000, last=60_001))
    with pytest.raises(StallError) as caught:
        gdsload.load_file(path, cache=cache, options=OPTIONS, stall_seconds=0.05)
    assert caught.value.offset <= 60_000 < caught.value.offset + caught.value.wanted
    assert faults.log.closes == 0, "the engine is left to the read that hangs"
    gc.collect()
    faults.let_go()  # it writes now: into memory that must still be there
    faults.wait_closed()


def test_the_next_load_works_beside_one_that_hangs(path: Path, faults: Faults) -> None:
    faults.script(rule(HANG, first=60_000, last=60_001))
    with pytest.raises(StallError):
        gdsload.load_file(path, cache="direct", options=OPTIONS, stall_seconds=1.0)
    check(path, load(path))


def test_an_early_close_of_a_stream_that_hangs(path: Path, faults: Faults) -> None:
    faults.script(rule(HANG, times=FOR_EVER, first=60_000, last=60_001))
    tensors = gdsload.stream(path, cache="direct", options=OPTIONS, window_bytes=20_000)
    next(tensors)
    tensors.close()  # type: ignore[attr-defined]
    assert gdsload.last_report().failure == ""


def test_every_error_is_ours(path: Path, faults: Faults) -> None:
    """Each errno at each read, once and more, in each I/O mode: exact bytes, or our error."""
    outcomes = set()
    for code, skip, times, io_mode in itertools.product(
        (errno.EIO, errno.EINVAL, errno.EINTR, errno.ENOMEM),
        range(0, READS, 3),
        (1, 3),
        (ANY, DIRECT, BUFFERED),
    ):
        faults.script(rule(ERRNO, code, times=times, io_mode=io_mode, skip=skip))
        try:
            check(path, load(path))
            outcomes.add("right")
        except GdsloadError as error:
            assert str(path) in str(error)
            outcomes.add(type(error).__name__)
    assert outcomes == {"right", "ReadError"}


def test_engine_that_was_tried_by_a_stopped_process_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the process continues, the time for the read is over."""
    waits: list[float] = []

    class Late:
        def __init__(self, *words: Any) -> None:
            self._request = Request(*words)

        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return len(waits) > 1 and self._request.wait(60.0)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._request, name)

    monkeypatch.setattr(engines, "Request", Late)
    monkeypatch.setattr(engines, "_tried", {})
    assert engines.try_engine("threads").usable
    assert len(waits) == 2
