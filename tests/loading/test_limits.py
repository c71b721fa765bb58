"""Machines that refuse: descriptors, memory, system calls, filesystems without direct I/O.

Each refusal leads to the next engine or I/O mode, or to one error that says what is missing.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gdsload
from gdsload.backends.posix import engines
from gdsload.errors import PlacementError, ReadError
from gdsload.system import available
from seccomp import REFUSE, skip_if_allowed
from storage import ENGINES, SMALL, is_full_of, python, save


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "model.safetensors", 1)


def test_too_few_descriptors_raise_an_error_and_leak_none(path: Path) -> None:
    """With no spare descriptor the error is clear and nothing leaks; with a few more it works."""
    program = """
        import os, resource, sys, gdsload, torch
        for engine in sys.argv[2:]:
            gdsload.load_file(sys.argv[1], cache="buffered", options={"engine": engine})
            before = len(os.listdir("/proc/self/fd"))
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            lowest = os.open("/dev/null", os.O_RDONLY)
            os.close(lowest)
            outcomes = []
            for spare in range(20):
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, hard))
                try:
                    got = gdsload.load_file(sys.argv[1], cache="direct", options={"engine": engine})
                    assert all(bool((tensor == 1).all()) for tensor in got.values())
                    outcomes.append("right")
                except gdsload.GdsloadError as error:
                    assert "Too many open files" in str(error) or "ulimit -n" in str(error), error
                    outcomes.append("error")
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
            assert len(os.listdir("/proc/self/fd")) == before
            assert outcomes == sorted(outcomes) and len(set(outcomes)) == 2, outcomes
    """
    python(program, path, *ENGINES)


def test_file_larger_than_memory_raises_placement_error(tmp_path: Path) -> None:
    """A sparse file of 1 TiB is refused before a byte is read, with the missing bytes."""
    path = tmp_path / "huge.safetensors"
    size = 1 << 40
    header = b'{"t":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + size)
        except OSError as error:
            pytest.skip(f"{tmp_path}: no file of a TiB: {error.strerror}")
    for use in (
        lambda: gdsload.load_file(path, cache="direct"),
        lambda: list(gdsload.stream(path, cache="buffered")),
        lambda: gdsload.safe_open(path, cache="direct").get_tensor("t"),
    ):
        with pytest.raises(PlacementError, match="bytes are missing") as caught:
            use()
        assert caught.value.missing_bytes is not None
        assert 0 < caught.value.missing_bytes < size + (1 << 30)
    with gdsload.safe_open(path, cache="direct") as opened:
        assert bool((opened.get_slice("t")[size - 10 :] == 0).all())


def test_more_reads_than_memory_can_plan_raise_placement_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream needs the memory of a window only, and that of its plan."""
    path, size = tmp_path / "sparse.safetensors", 8 << 30
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    monkeypatch.setattr(available, "available_bytes", lambda *_: 100 << 20)
    stream = gdsload.stream(path, cache="direct", options={"request_bytes": 4096})
    with pytest.raises(PlacementError, match="to plan the reads"):
        next(stream)


def test_limited_address_space_raises_but_slices_load(tmp_path: Path) -> None:
    """The machine has memory, but this process may not use it."""
    program = """
        import resource, sys, gdsload, torch
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (700 << 20), -1))
        for cache in ("direct", "buffered", "mapped"):
            try:
                gdsload.load_file(sys.argv[1], cache=cache)
            except (gdsload.PlacementError, gdsload.CheckpointError) as error:
                assert str(error).startswith(sys.argv[1] + ": "), error
                print(type(error).__name__, "ulimit -v" in str(error))
        print(int(gdsload.safe_open(sys.argv[1], cache="direct").get_slice("t")[:10].sum()))
    """
    size = 1 << 30
    header = b'{"t":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    path = tmp_path / "sparse.safetensors"
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    buffers, mapping = "PlacementError True", "CheckpointError False"
    assert python(program, path).splitlines() == [buffers, buffers, mapping, "0"]


def test_limited_locked_memory_loads_without_registered_buffers(path: Path) -> None:
    """With 64 KiB and no privilege registered buffers are refused; the reads work."""
    support = engines.try_engine("uring")
    if not support.usable:
        pytest.skip(str(support))
    program = """
        import ctypes, os, resource, struct, sys, gdsload, torch
        from gdsload._native.memory import Region
        from gdsload.backends import DRAM, Memory
        from gdsload.backends.posix import PosixBackend
        libc = ctypes.CDLL(None, use_errno=True)
        # All capabilities go but those to read files; above all CAP_IPC_LOCK.
        keep = 0b110 if os.geteuid() == 0 else 0
        header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
        sets = ctypes.create_string_buffer(struct.pack("IIIIII", keep, keep, 0, 0, 0, 0))
        assert libc.capset(header, sets) == 0, ctypes.get_errno()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        region = Region.anonymous(1 << 21)
        with PosixBackend(engine="uring", fixed_buffers="always") as backend:
            backend.register(Memory(DRAM, region.address, region.length, region))
            assert backend.pump
            paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            (ring,) = [path for path in paths if "io_uring" in os.path.realpath(path)]
            assert "UserBufs:\\t0" in open(ring.replace("/fd/", "/fdinfo/")).read()
        for options in ({"fixed_buffers": "always", "engine": "uring"}, {}):
            got = gdsload.load_file(sys.argv[1], cache="direct", options=options)
            assert all(bool((tensor == 1).all()) for tensor in got.values())
    """
    python(program, path)


CODES = (errno.EPERM, errno.ENOSYS, errno.EACCES)
BLOCKED = (("uring",), ("uring", "linuxaio"))
# A filter stays until its process ends: each is put on a child, which need not import torch again.
EACH = """
import json, torch, gdsload
from gdsload.backends.posix.engines import first_working
for numbers, code in json.loads(sys.argv[2]):
    child = os.fork()
    if child == 0:
        refuse(numbers, code)
        for _ in range(2):
            got = gdsload.load_file(sys.argv[1], cache="direct")
        assert all(bool((tensor == 1).all()) for tensor in got.values())
        assert not gdsload.last_report().refusals
        refusals = {}
        for name in ("uring", "linuxaio"):
            first_working((name,), refusals)
        print(gdsload.last_report().engine, *sorted(refusals), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def sandboxed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[tuple[str, ...], int], str]:
    """The engine of a load and the refused engines, by blocked engines and errno.

    io_uring_setup is 425 everywhere; io_setup is 206 on x86-64, 0 on arm64."""
    path = save(tmp_path_factory.mktemp("sandboxed") / "model.safetensors", 1)
    numbers = {"uring": 425, "linuxaio": 0 if os.uname().machine == "aarch64" else 206}
    cases = list(itertools.product(BLOCKED, CODES))
    words = json.dumps([([numbers[name] for name in blocked], code) for blocked, code in cases])
    lines = python(REFUSE + EACH, path, words).splitlines()
    return dict(zip(cases, lines, strict=True))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("blocked", BLOCKED, ids="+".join)
def test_sandbox_that_blocks_engines_falls_back_to_the_next(
    sandboxed: dict[tuple[tuple[str, ...], int], str], code: int, blocked: tuple[str, ...]
) -> None:
    skip_if_allowed(sandboxed[blocked, code])
    answer = sandboxed[blocked, code].split()
    assert answer[0] == "threads"
    assert {f"posix/{name}" for name in blocked} == set(answer[1:])


# Filesystems.


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a filesystem for one test, if this process may."""
    libc = ctypes.CDLL(None, use_errno=True)
    places: list[Path] = []

    def mount(kind: str, source: str = "none") -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        if libc.mount(source.encode(), str(place).encode(), kind.encode(), 0, None):
            pytest.skip(f"{kind} cannot be mounted: {os.strerror(ctypes.get_errno())}")
        places.append(place)
        return place

    yield mount
    for place in places:
        libc.umount2(str(place).encode(), 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_filesystem_without_direct_io_is_read_buffered(
    mounted: Callable[..., Path], engine: str
) -> None:
    path = save(mounted("ramfs") / "m.safetensors", 3)
    options = {"engine": engine}
    assert is_full_of(gdsload.load_file(path, cache="buffered", options=options), 3)
    assert is_full_of(gdsload.load_file(path, cache="auto", options=options), 3)
    with pytest.raises(ReadError, match="cache='direct', but its filesystem does no direct I/O"):
        gdsload.load_file(path, cache="direct", options=options)


@pytest.mark.parametrize("engine", ENGINES)
def test_filesystem_in_memory_loads_with_every_cache_mode(
    mounted: Callable[..., Path], engine: str
) -> None:
    path = save(mounted("tmpfs") / "m.safetensors", 3)
    for cache in ("auto", "direct", "buffered", "mapped"):
        try:
            got = gdsload.load_file(path, cache=cache, options={"engine": engine})
        except ReadError as error:  # before Linux 6.6
            assert cache == "direct" and "does no direct I/O" in str(error)
        else:
            assert is_full_of(got, 3)


def test_disk_with_blocks_of_4096_is_read_directly(
    mounted: Callable[..., Path], tmp_path: Path
) -> None:
    """Half a block is refused: offsets and lengths have to be multiples of a block."""
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(32 << 20)
    for tool in ("losetup", "mkfs.ext4"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if os.geteuid() != 0:
        pytest.skip("needs root for a loop device")
    made = subprocess.run(
        ["losetup", "-f", "--show", "-b", "4096", str(image)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"losetup: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        subprocess.run(["mkfs.ext4", "-q", "-b", "4096", device], check=True)
        path = save(mounted("ext4", device) / "m.safetensors", 3)
        for engine in ENGINES:
            got = gdsload.load_file(path, cache="direct", options={"engine": engine, **SMALL})
            assert is_full_of(got, 3)
            paths = gdsload.last_report().paths
            assert paths[f"posix/{engine}/direct"] >= 2_400_000
            assert f"posix/{engine}/buffered" not in paths
    finally:
        gc.collect()
        subprocess.run(["umount", "-l", device], check=False, capture_output=True)
        subprocess.run(["losetup", "-d", device], check=True)
