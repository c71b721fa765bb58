"""Reads into fresh host memory: the same bytes by each way of touching it, and what is reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

import gdsload
from gdsload._native.first_touch import MODES
from gdsload._native.memory import Region
from gdsload._native.pump import Pump
from gdsload._native.request import Request
from gdsload.backends.posix import PosixBackend, engines

UNIT = 2 << 20
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 21 MB with tensors that start and end anywhere."""
    path = tmp_path_factory.mktemp("touch") / "odd.safetensors"
    random = torch.Generator().manual_seed(3)
    tensors = {
        f"t{length}": torch.randint(0, 256, (length,), dtype=torch.uint8, generator=random)
        for length in (0, 1, 4095, 4096, 4097, 123_457, 1_000_003, 7_000_001, 13_000_013)
    }
    safetensors.torch.save_file(tensors, path)
    return path


@pytest.mark.parametrize("pages", MODES)
@pytest.mark.parametrize("request_bytes", [4096, 1 << 20, 4 << 20, 32 << 20])
@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_load_by_each_way_gives_the_same_bytes(
    odd: Path, pages: str, request_bytes: int, cache: str
) -> None:
    options = {"pages": pages, "request_bytes": request_bytes}
    found = gdsload.load_file(odd, cache=cache, options=options)
    expected = safetensors.torch.load_file(odd)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("pages", ["auto", "bounce"])
def test_load_of_sparse_file_gives_zeros(tmp_path: Path, pages: str) -> None:
    path = tmp_path / "zeros.safetensors"
    header = b'{"t":{"dtype":"U8","shape":[134217728],"data_offsets":[0,134217728]}}       '
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 134217728)
    found = gdsload.load_file(path, cache="direct", options={"pages": pages})
    assert not found["t"].any()


@pytest.fixture
def units() -> Region:
    return Region.anonymous(8 * UNIT)


def touched_by(
    pages: str, region: Region, file: Path, *, direct: bool = True, owned: bool = True
) -> tuple[int, int, int]:
    """Reads six units to the second to seventh of a region. `owned`: the pump knows the region."""
    handle = region.handle() if owned else None
    fd = os.open(file, os.O_RDONLY)
    direct_fd = os.open(file, os.O_RDONLY | os.O_DIRECT) if direct else -1
    pump = Pump(engines.engine_capsule("threads", pages), 4)
    size = 2 * UNIT
    reads = [(0, n * size, size, size, 0, UNIT + n * size, "direct") for n in range(3)]
    target = region.address, region.length, handle, -1
    request = Request(pump, [(fd, direct_fd, 4096, 0, 1)], reads, [target])
    request.post()
    assert request.wait(60.0) and not request.failed
    huge, small, bounced, present = request.touched()
    assert present == 0, "nothing is mapped"
    assert pump.close(1.0)
    os.close(fd)
    if direct:
        os.close(direct_fd)
    return huge, small, bounced


@pytest.fixture(scope="module")
def six_units(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("units") / "file"
    path.write_bytes(os.urandom(6 * UNIT))
    return path


@pytest.mark.parametrize("direct", [True, False])
def test_bounce_reads_everything_through_the_buffer(
    units: Region, six_units: Path, direct: bool
) -> None:
    bounced = 6 * UNIT if direct else 0  # a buffered read is copied by the kernel already
    assert touched_by("bounce", units, six_units, direct=direct) == (0, 6, bounced)
    assert units.read(UNIT, 6 * UNIT) == six_units.read_bytes()
    assert units.read(0, UNIT) == bytes(UNIT) == units.read(7 * UNIT, UNIT)


def test_small_touches_nothing_before_the_read(units: Region, six_units: Path) -> None:
    assert touched_by("small", units, six_units) == (0, 0, 0)
    assert units.read(UNIT, 6 * UNIT) == six_units.read_bytes()


@pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="no transparent huge pages here"
)
def test_huge_touches_each_unit_once(units: Region, six_units: Path) -> None:
    huge, small, bounced = touched_by("huge", units, six_units)
    assert (huge + small, bounced) == (6, 0)
    assert touched_by("huge", units, six_units) == (0, 0, 0), "it is ready for the second read"
    assert units.read(UNIT, 6 * UNIT) == six_units.read_bytes()


def test_auto_touches_each_unit_once(units: Region, six_units: Path) -> None:
    huge, small, _ = touched_by("auto", units, six_units)
    assert huge + small == 6
    assert touched_by("auto", units, six_units) == (0, 0, 0)


def test_memory_of_others_is_read_in_place(units: Region, six_units: Path) -> None:
    assert touched_by("bounce", units, six_units, owned=False) == (0, 0, 0)
    assert units.read(UNIT, 6 * UNIT) == six_units.read_bytes()


@pytest.mark.parametrize("pages", MODES)
@pytest.mark.parametrize("direct", [True, False])
def test_file_truncated_inside_a_unit_fails_where_it_ends(
    units: Region, six_units: Path, tmp_path: Path, pages: str, direct: bool
) -> None:
    """The second read of the same memory, when the file is long again, is exact."""
    path, end = tmp_path / "cut", 3 * UNIT + 12_345
    content = six_units.read_bytes()
    path.write_bytes(content[:end])
    fd = os.open(path, os.O_RDONLY)
    direct_fd = os.open(path, os.O_RDONLY | os.O_DIRECT) if direct else -1
    pump = Pump(engines.engine_capsule("threads", pages), 4)
    request = Request(
        pump,
        [(fd, direct_fd, 4096, 0, 1)],
        [(0, 0, 6 * UNIT, 6 * UNIT, 0, 0, "direct")],
        [(units.address, 6 * UNIT, units.handle(), -1)],
    )
    request.post()
    assert request.wait(60.0) and request.failed
    _, got, code = request.result(0)
    assert (got, code) == (end, -1)
    assert units.read(0, end) == content[:end]
    with path.open("ab") as file:
        file.write(content[end:])
    request.post()
    assert request.wait(60.0) and not request.failed
    assert units.read(0, 6 * UNIT) == content
    assert pump.close(1.0)
    os.close(fd)
    if direct:
        os.close(direct_fd)


def test_cancelled_read_stops_at_its_next_unit(tmp_path: Path) -> None:
    """The descriptor may be closed once the call under way has returned."""
    path, size = tmp_path / "zeros", 256 * UNIT
    path.touch()
    os.truncate(path, size)
    fd = os.open(path, os.O_RDONLY)
    direct_fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    region = Region.anonymous(size)
    pump = Pump(engines.engine_capsule("threads", "bounce"), 1)
    request = Request(
        pump,
        [(fd, direct_fd, 4096, 0, 1)],
        [(0, 0, size, size, 0, 0, "direct")],
        [(region.address, size, region.handle(), -1)],
    )
    request.post()
    while request.touched()[2] == 0:
        assert not request.settled
    request.cancel()
    assert request.wait_until_idle(60.0)
    assert UNIT <= request.touched()[2] < size
    assert pump.close(1.0)
    os.close(fd)
    os.close(direct_fd)


def test_report_names_bounced_bytes_and_units(odd: Path) -> None:
    gdsload.load_file(odd, cache="direct", options={"pages": "bounce"})
    report = gdsload.last_report()
    assert report.paths["posix/threads/direct bounced"] > 12 << 20
    assert report.pages["huge"] == 0 and report.pages["small"] >= 6


def test_unknown_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="pages='large' must be one of auto, huge, small, bounce"):
        PosixBackend(pages="large")
