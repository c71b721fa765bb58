"""Host memory kept between models: found again, bounded, pinned, and given back."""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
import socket
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as reference_load_file, save_file

import descriptors
import gdsload
from forked import end_with, fork
from gdsload import warmup
from gdsload._native.cuda import CudaFailure
from gdsload._native.memory import Lease
from gdsload.checkpoint import Checkpoint
from gdsload.errors import BackendUnavailable, PlacementError
from gdsload.memory import host_pool, page_cache
from gdsload.memory.host_buffers import current_pool
from gdsload.planning.read_plan import Limits, byte_ranges_of, plan_reads
from gdsload.synthetic import checkpoints
from gdsload.system import available

UNIT = 2 << 20
READ: dict[str, Any] = {"cache": "buffered"}  # also where the page cache holds the files


@pytest.fixture(autouse=True)
def no_pool_stays() -> Iterator[None]:
    yield
    assert current_pool() is None


def reference(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors.update(reference_load_file(file))
    return tensors


def require_same(got: dict[str, torch.Tensor], directory: Path) -> None:
    expected = reference(directory)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def from_pool() -> int:
    return gdsload.last_report().paths.get("pool", 0)


def by_load_file(source: Path) -> dict[str, torch.Tensor]:
    return gdsload.load_file(source, **READ)


def by_stream(source: Path) -> dict[str, torch.Tensor]:
    return dict(gdsload.stream(source, window_bytes=100_000, **READ))


def by_safe_open(source: Path) -> dict[str, torch.Tensor]:
    with gdsload.safe_open(source, **READ) as opened:
        return dict(opened.get_tensors())


def by_prefetch(source: Path) -> dict[str, torch.Tensor]:
    with gdsload.prefetch(source, **READ):
        return gdsload.load_file(source, **READ)


def by_model(source: Path) -> dict[str, torch.Tensor]:
    with gdsload.accelerated(**READ):
        model = gdsload.from_pretrained(source, dtype="auto")
    names = reference(source)
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


LOADS = [by_load_file, by_stream, by_safe_open, by_prefetch, by_model]


@pytest.mark.parametrize("first", LOADS)
@pytest.mark.parametrize("second", [by_load_file, by_stream, by_safe_open, by_model])
def test_a_second_load_reads_nothing(first: Any, second: Any, tiny_checkpoint: Path) -> None:
    with warmup.HostPool(64 * UNIT) as pool:
        first(tiny_checkpoint)
        gc.collect()
        assert pool.idle_bytes == pool.held_bytes > 0
        require_same(second(tiny_checkpoint), tiny_checkpoint)
        report = gdsload.last_report()
        assert report.read_bytes == 0
        assert from_pool() == sum(t.nbytes for t in reference(tiny_checkpoint).values())


class Unmapped:
    """The lease of a segment that the system does not map."""

    lent = 0

    def lend(self, fd: int, offset: int, length: int, shared: bool) -> None:
        raise OSError(12, "Cannot allocate memory")


def test_small_files_share_a_unit_of_memory(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((1000,), i, dtype=torch.int8) for i in range(8)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    with warmup.HostPool(2 * UNIT) as pool:
        with gdsload.prefetch(tmp_path, tier="pool", cache="direct") as ahead:
            assert ahead.wait()
        assert pool.held_bytes == UNIT
        got = gdsload.load_file(tmp_path)
        assert list(gdsload.last_report().paths) == ["pool"]
        assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())


def test_tensors_that_lie_apart_do_not_fit_with_their_distance(tmp_path: Path) -> None:
    """The address space of a file is kept, also between its tensors."""
    large = {f"l{i}.w": torch.zeros(UNIT, dtype=torch.int8) for i in range(8)}
    small = {f"l{i}.norm": torch.zeros(1000, dtype=torch.int8) for i in range(8)}
    save_file(large | small, tmp_path / "model.safetensors")
    with warmup.HostPool(2 * UNIT):
        ahead = gdsload.prefetch(tmp_path, tier="pool", names="*norm", cache="direct")
        with ahead, pytest.raises(PlacementError, match=r"bytes, which are spread over 14,"):
            ahead.wait()


def test_pool_that_cannot_be_mapped_leaves_the_load_without_it(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warmup.HostPool(64 << 20, pinned=False) as pool:
        with monkeypatch.context() as short:
            short.setattr("gdsload.memory.host_pool.Lease", Unmapped)
            for _ in range(2):
                require_same(by_load_file(tiny_checkpoint), tiny_checkpoint)
        assert from_pool() == 0 and pool.held_bytes == 0
        assert sum("no memory for a load" in note for note in pool.notes) == 1
        by_load_file(tiny_checkpoint)
        for segment in pool._segments:
            monkeypatch.setattr(segment, "lease", Unmapped())
        require_same(by_load_file(tiny_checkpoint), tiny_checkpoint)


def test_parts_of_what_it_holds_are_found(tiny_checkpoint: Path) -> None:
    with warmup.HostPool(64 * UNIT):
        by_load_file(tiny_checkpoint)
        with gdsload.safe_open(tiny_checkpoint, **READ) as opened:
            name = opened.keys()[0]
            whole = opened.get_tensor(name)
            rows = opened.get_slice(name)[1:3]
            assert gdsload.last_report().read_bytes == 0 and from_pool() == rows.nbytes
        assert torch.equal(rows, whole[1:3])


def test_parts_that_were_read_first_do_not_hide_the_rest(tiny_checkpoint: Path) -> None:
    with warmup.HostPool(64 * UNIT) as pool:
        gdsload.load_file(tiny_checkpoint, names="*norm.weight", **READ)
        require_same(by_load_file(tiny_checkpoint), tiny_checkpoint)
        held = pool.held_bytes
        for _ in range(3):
            require_same(by_load_file(tiny_checkpoint), tiny_checkpoint)
            assert gdsload.last_report().read_bytes == 0
        assert pool.held_bytes == held


def test_stored_rows_are_sorted_and_none_is_inside_another() -> None:
    def row(start: int, end: int) -> Any:
        return host_pool._StoredRange(start, end - start, None, 0)  # type: ignore[arg-type]

    rows: list[Any] = []
    for start, end in [(10, 20), (30, 40), (12, 15), (10, 20), (5, 12), (0, 25), (24, 31), (0, 26)]:
        host_pool._store(rows, row(start, end))
    assert [(each.start, each.start + each.nbytes) for each in rows] == [
        (0, 26),
        (24, 31),
        (30, 40),
    ]
    host_pool._store(rows, row(0, 99))
    assert len(rows) == 1


def test_who_writes_to_a_tensor_changes_nobody_elses(tiny_checkpoint: Path) -> None:
    with warmup.HostPool(64 * UNIT):
        first, second = by_load_file(tiny_checkpoint), by_load_file(tiny_checkpoint)
        for tensor in first.values():
            tensor.zero_()
        require_same(second, tiny_checkpoint)
        require_same(by_load_file(tiny_checkpoint), tiny_checkpoint)


def test_a_tensor_outlives_its_pool(tiny_checkpoint: Path) -> None:
    with warmup.HostPool(64 * UNIT) as pool:
        got = by_load_file(tiny_checkpoint)
        again = by_load_file(tiny_checkpoint)
    assert pool.held_bytes == 0
    gc.collect()
    require_same(got, tiny_checkpoint)
    require_same(again, tiny_checkpoint)


def test_a_changed_checkpoint_is_read_anew(tmp_path: Path) -> None:
    directory = checkpoints.write("tiny", tmp_path / "model")
    other = checkpoints.write("tiny", tmp_path / "other", seed=7)
    with warmup.HostPool(64 * UNIT):
        by_load_file(directory)
        for file in other.glob("*.safetensors"):  # the same size, in place: the times tell
            with open(directory / file.name, "r+b") as out:
                out.write(file.read_bytes())
        require_same(by_load_file(directory), other)
        assert from_pool() == 0
        by_load_file(directory)
        assert from_pool() > 0


def test_what_did_not_all_come_is_not_kept(tmp_path: Path) -> None:
    directory = checkpoints.write("tiny", tmp_path / "model")
    file = next(directory.glob("*.safetensors"))
    with warmup.HostPool(64 * UNIT) as pool:
        with gdsload.safe_open(file, **READ) as opened:
            size = file.stat().st_size
            os.truncate(file, size // 2)
            with pytest.raises(gdsload.GdsloadError):
                opened.get_tensors()
        gc.collect()
        assert pool.held_bytes == 0


def copies(checkpoint: Path, tmp_path: Path, count: int) -> list[Path]:
    return [Path(shutil.copytree(checkpoint, tmp_path / f"m{n}")) for n in range(count)]


def sources(pool: warmup.HostPool) -> list[str]:
    return [os.path.basename(one.source) for one in pool.held()]


def test_pool_is_shown_where_residency_is_not_available(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with warmup.HostPool(64 * UNIT) as pool:
        by_load_file(tiny_checkpoint)
        monkeypatch.setattr(page_cache, "resident_bytes", refused)
        assert sources(pool) == [tiny_checkpoint.name]


def test_the_least_recently_used_makes_room(tiny_checkpoint: Path, tmp_path: Path) -> None:
    a, b, c = copies(tiny_checkpoint, tmp_path, 3)
    with warmup.HostPool(1 << 40) as pool:
        by_load_file(a)
        each = pool.held_bytes
    with warmup.HostPool(2 * each) as pool:
        by_load_file(a)
        by_load_file(b)
        by_load_file(a)
        assert sources(pool) == ["m1", "m0"]
        by_load_file(c)
        assert sources(pool) == ["m0", "m2"] and pool.held_bytes == 2 * each
        by_load_file(a)
        assert from_pool() > 0


def test_what_tensors_live_in_is_never_taken(tiny_checkpoint: Path, tmp_path: Path) -> None:
    a, b, c = copies(tiny_checkpoint, tmp_path, 3)
    with warmup.HostPool(1 << 40) as pool:
        by_load_file(a)
        each = pool.held_bytes
    with warmup.HostPool(each) as pool:
        kept = by_load_file(a)
        beyond = by_load_file(b)
        assert sources(pool) == ["m0"] and pool.held_bytes == each and pool.idle_bytes == 0
        one = kept.popitem()
        kept.clear()
        gc.collect()
        by_load_file(c)
        assert sources(pool) == ["m0"], "one tensor is enough"
        assert torch.equal(one[1], reference(a)[one[0]])
        require_same(beyond, b)
        del one
        gc.collect()
        by_load_file(c)
        assert sources(pool) == ["m2"]


def test_a_pool_that_is_too_small_is_passed_by(tiny_checkpoint: Path) -> None:
    with warmup.HostPool(1) as pool:
        require_same(by_load_file(tiny_checkpoint), tiny_checkpoint)
        assert pool.held_bytes == 0
        with pytest.raises(PlacementError, match="into a pool of 1 bytes"):
            gdsload.prefetch(tiny_checkpoint, tier="pool").wait()


def test_a_prefetch_that_does_not_fit_is_an_error(tiny_checkpoint: Path) -> None:
    """Its bytes would be read, and dropped: no load takes them."""
    with gdsload.Checkpoint.open(tiny_checkpoint) as checkpoint:
        exactly = checkpoint.total_bytes
    with warmup.HostPool(exactly) as pool:  # but it has units of 2 MiB
        with pytest.raises(PlacementError, match="do not fit into the host pool"):
            gdsload.prefetch(tiny_checkpoint, tier="pool").wait()
        assert pool.held_bytes == 0


def test_pool_that_closes_while_a_load_begins_takes_nothing(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, real = warmup.HostPool(64 * UNIT), warmup.HostPool.allocate

    def closed_before(self: warmup.HostPool, plan: Any) -> Any:
        self.close()
        return real(self, plan)

    monkeypatch.setattr(warmup.HostPool, "allocate", closed_before)
    require_same(by_load_file(tiny_checkpoint), tiny_checkpoint)
    assert pool.held_bytes == 0


def test_a_prefetch_fills_it_and_status_tells(tiny_checkpoint: Path) -> None:
    with warmup.HostPool(64 * UNIT) as pool:
        with gdsload.prefetch(tiny_checkpoint, tier="pool") as ahead:
            ahead.wait()
        assert pool.idle_bytes == pool.held_bytes > 0
        got = gdsload.load_file(tiny_checkpoint)  # warm files too: what is asked for is held
        assert from_pool() > 0
        row = warmup.status()[-1]
        assert (row.source, row.tier, row.state) == (str(tiny_checkpoint), "pool", "kept")
        assert row.landed_bytes == row.claimed_bytes == pool.held_bytes
        total = sum(tensor.nbytes for tensor in got.values())
        assert total <= row.resident_bytes <= row.landed_bytes
    assert [row.tier for row in warmup.status() if row.state == "kept"] == []
    with pytest.raises(ValueError, match="HostPool"):
        gdsload.prefetch(tiny_checkpoint, tier="pool")


def test_quiesce_empties_it(tiny_checkpoint: Path) -> None:
    with warmup.HostPool(64 * UNIT) as pool:
        got = by_load_file(tiny_checkpoint)
        before = open_memory_files()
        assert before
        gdsload.quiesce()
        assert open_memory_files() == [] and pool.held_bytes == 0
        require_same(got, tiny_checkpoint)
        by_load_file(tiny_checkpoint)
        assert pool.held_bytes > 0


def open_memory_files() -> list[str]:
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(fd) for fd in fds if os.path.lexists(fd)]
    return [name for name in names if "gdsload-pool" in name]


def mapped_bytes() -> int:
    """Bytes of this process's mappings of memory files of a pool."""
    total = 0
    with open("/proc/self/maps") as lines:
        for line in lines:
            if "gdsload-pool" in line:
                start, end = (int(place, 16) for place in line.split()[0].split("-"))
                total += end - start
    return total


class Pins:
    """A device that keeps count of what is pinned, as CUDA's driver does."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def pin(self, address: int, nbytes: int) -> None:
        assert address not in self.registered
        self.registered[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> Pins:
    found = Pins()
    monkeypatch.setattr("gdsload.memory.host_pool.gpu.any_open", lambda: found)
    return found


def test_its_memory_is_pinned_once_it_is_filled(tiny_checkpoint: Path, pins: Pins) -> None:
    with warmup.HostPool(64 * UNIT) as pool:
        by_load_file(tiny_checkpoint)
        gc.collect()
        assert sum(pins.registered.values()) == pool.pinned_bytes == pool.held_bytes > 0
        assert pool.idle_bytes == pool.held_bytes
        gdsload.load_file(tiny_checkpoint, "meta", **READ)  # a device that is no CPU
        assert from_pool() == sum(t.nbytes for t in reference(tiny_checkpoint).values())
        pool.trim()
        assert pins.registered == {} and pool.held_bytes == 0


def test_pinned_memory_must_be_had_where_it_was_asked_for(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(ordinal: int) -> Any:
        raise BackendUnavailable("there is no CUDA here", {})

    monkeypatch.setattr("gdsload.memory.host_pool.gpu.device", none)
    with pytest.raises(BackendUnavailable):
        warmup.HostPool(UNIT, pinned=True)


def test_pool_without_an_open_device_opens_none(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context takes memory of a device, and the process could not fork any more."""
    opened: list[int] = []
    monkeypatch.setattr("gdsload.memory.host_pool.gpu.device", opened.append)
    monkeypatch.setattr("gdsload.memory.host_pool.gpu._devices", {})
    with warmup.HostPool(64 * UNIT) as pool:
        by_load_file(tiny_checkpoint)
        assert pool.held_bytes > 0 and pool.pinned_bytes == 0
    assert opened == []


def test_pool_does_not_hold_its_lock_while_it_pins(tiny_checkpoint: Path, pins: Pins) -> None:
    """Another load may use the pool meanwhile, and even close it."""
    pool = warmup.HostPool(64 * UNIT)
    seen: list[int] = []
    pin = pins.pin

    def closing(address: int, nbytes: int) -> None:
        pin(address, nbytes)
        with ThreadPoolExecutor(1) as other:
            seen.append(other.submit(lambda: pool.held_bytes).result(30))
            other.submit(pool.close).result(30)

    pins.pin = closing  # type: ignore[method-assign]
    with pool:
        require_same(by_load_file(tiny_checkpoint), tiny_checkpoint)
    gc.collect()
    assert seen[0] > 0
    assert pins.registered == {} and pool.held_bytes == 0 and mapped_bytes() == 0


def test_pinned_memory_that_a_load_copies_from_is_not_reused(tmp_path: Path, pins: Pins) -> None:
    paths = [checkpoints.write("tiny", tmp_path / str(seed), seed=seed) for seed in range(2)]
    with warmup.HostPool(2 * UNIT) as pool:
        by_load_file(paths[0])
        gc.collect()
        assert pool.pinned_bytes == pool.idle_bytes == pool.held_bytes > 0
        with Checkpoint.open(paths[0]) as checkpoint:
            ranges, mappings = byte_ranges_of(checkpoint), {}
            views = pool.find(checkpoint, ranges, mappings, pinned=True)
            first = views[ranges[0].name]
            before = first.region.read(first.offset, ranges[0].nbytes)
            assert first.region.address in pins.registered and pool.idle_bytes == 0
            require_same(by_load_file(paths[1]), paths[1])
            assert first.region.read(first.offset, ranges[0].nbytes) == before
            mappings.clear()
            assert pool.idle_bytes == pool.held_bytes


def test_failing_unpin_leaks_nothing(tiny_checkpoint: Path, pins: Pins) -> None:
    def fail(address: int) -> None:
        raise CudaFailure("cuMemHostUnregister", 700, "an illegal memory access")

    pool = warmup.HostPool(64 * UNIT)
    with descriptors.none_left(), pool:
        by_load_file(tiny_checkpoint)
        assert pool.pinned_bytes > 0
        pins.unpin = fail  # type: ignore[method-assign]
    assert pool.held_bytes == 0 and "illegal memory access" in pool.notes[0]


def test_ctrl_c_while_memory_is_pinned_keeps_it_until_it_is_unpinned(
    tiny_checkpoint: Path, pins: Pins
) -> None:
    pin = pins.pin

    def interrupted(address: int, nbytes: int) -> None:
        pin(address, nbytes)
        raise KeyboardInterrupt

    pins.pin = interrupted  # type: ignore[method-assign]
    with warmup.HostPool(64 * UNIT) as pool:
        with pytest.raises(KeyboardInterrupt):
            by_load_file(tiny_checkpoint)
        assert sum(pins.registered.values()) == pool.pinned_bytes > 0
    assert pins.registered == {}


def test_pool_leaves_descriptors_to_the_process(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with warmup.HostPool(4096 * UNIT) as pool:
        before = len(os.listdir("/proc/self/fd"))
        few = -(-before // 16) * 16 + 48  # without what earlier tests have left open
        monkeypatch.setattr(host_pool, "_DESCRIPTOR_SHARE", few // 16)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
        try:
            for _ in gdsload.stream(tiny_checkpoint, window_bytes=1, **READ):
                resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert 0 < pool.held_bytes < 32 * UNIT
        assert any("ulimit -n" in note for note in pool.notes)
        assert len(os.listdir("/proc/self/fd")) - before <= 16


def test_close_frees_the_other_segments_if_ctrl_c_ends_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = warmup.HostPool(64 * UNIT)
    for number in range(3):
        checkpoints.write("tiny", tmp_path / str(number), seed=number)
        by_load_file(tmp_path / str(number))
    assert len(pool._segments) == 3
    real, calls = pool._forget, []

    def forget(segment: Any) -> None:
        calls.append(segment)
        real(segment)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(pool, "_forget", forget)
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    assert len(calls) == 3 and pool._segments == calls[:1]
    pool.close()
    assert not pool._segments and not pool.held_bytes


def test_mappings_of_a_closed_pool_stand_for_no_later_segment(tiny_checkpoint: Path) -> None:
    """A segment may be freed, and the next one be where it was in Python's memory."""
    mappings: dict[Any, Any] = {}
    with Checkpoint.open(tiny_checkpoint) as checkpoint:
        with warmup.HostPool(64 * UNIT) as pool:
            by_load_file(tiny_checkpoint)
            assert pool.find(checkpoint, byte_ranges_of(checkpoint, None), mappings)
        first = [weakref.ref(segment) for segment in mappings]
        gc.collect()
        assert all(found() in mappings for found in first)
        with warmup.HostPool(64 * UNIT) as pool:
            by_load_file(tiny_checkpoint)
            assert pool.find(checkpoint, byte_ranges_of(checkpoint, None), mappings)
    assert len(mappings) == 2 * len(first)


def test_more_models_in_turn_than_fit_grow_nothing(
    tiny_checkpoint: Path, tmp_path: Path, pins: Pins
) -> None:
    """Three of seven fit."""
    models = copies(tiny_checkpoint, tmp_path, 7)
    with warmup.HostPool(1 << 40) as pool:
        by_load_file(models[0])
        each = pool.held_bytes
    limit = 3 * each
    seen: list[tuple[int, ...]] = []
    with warmup.HostPool(limit) as pool:
        for _turn in range(3):
            for model in models:
                with gdsload.prefetch(model, **READ):
                    got = by_load_file(model)
                assert pool.held_bytes <= limit
                require_same(got, model)
                del got
                gc.collect()
                assert sum(pins.registered.values()) == pool.pinned_bytes <= limit
                assert mapped_bytes() == pool.pinned_bytes, "no mapping but those that are pinned"
                assert len(open_memory_files()) == len(pins.registered)
            descriptors = len(os.listdir("/proc/self/fd"))
            seen.append((pool.held_bytes, len(pins.registered), descriptors))
        assert sources(pool) == [f"m{n}" for n in range(4, 7)]
    assert len(set(seen)) == 1, seen
    assert pins.registered == {} and mapped_bytes() == 0 and open_memory_files() == []


def test_idle_memory_goes_when_the_machine_runs_short(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(tiny_checkpoint, tmp_path / "other"))
    with warmup.HostPool(64 * UNIT) as pool:
        by_load_file(tiny_checkpoint)
        gc.collect()
        assert pool.idle_bytes > 0
        monkeypatch.setattr(available, "available_bytes", lambda *_: 0)
        with pytest.raises(PlacementError):
            by_load_file(other)
        assert pool.held_bytes == 0


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError):
        warmup.HostPool(0)


def test_a_child_takes_nothing_from_its_parents_pool(tiny_checkpoint: Path) -> None:
    with warmup.HostPool(64 * UNIT) as pool:
        by_load_file(tiny_checkpoint)
        held = pool.held_bytes
        child = os.fork()
        if child == 0:
            pool.close()
            os._exit(0 if current_pool() is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.held_bytes == held
        by_load_file(tiny_checkpoint)
        assert from_pool() > 0


def test_tensors_of_a_child_keep_their_bytes_when_the_parent_loads_others(tmp_path: Path) -> None:
    for value in (1, 2):
        tensors = {"w": torch.full((4 << 20,), value, dtype=torch.uint8)}
        save_file(tensors, tmp_path / f"{value}.safetensors")
    with warmup.HostPool(8 << 20) as pool:
        mine = gdsload.load_file(tmp_path / "1.safetensors", **READ)
        ours, theirs = socket.socketpair()
        pid = fork()
        if not pid:

            def child() -> None:
                theirs.recv(1)
                raw = mine["w"].numpy()  # threads of torch did not come with the fork
                assert raw.min() == raw.max() == 1

            end_with(child)
        mine.clear()
        gc.collect()
        other = gdsload.load_file(tmp_path / "2.safetensors", **READ)
        assert bool((other["w"] == 2).all())
        ours.send(b"x")
        assert os.waitpid(pid, 0)[1] == 0
        other.clear()
        again = gdsload.load_file(tmp_path / "2.safetensors", **READ)
        assert from_pool() == 4 << 20 and bool((again["w"] == 2).all())
        assert pool.held_bytes <= 8 << 20
    ours.close()
    theirs.close()


def test_a_child_keeps_no_memory_that_the_parent_frees(tiny_checkpoint: Path) -> None:
    with warmup.HostPool(64 * UNIT) as pool:
        by_load_file(tiny_checkpoint)
        assert pool.held_bytes > 0
        pid = fork()
        if not pid:

            def child() -> None:
                for number in os.listdir("/proc/self/fd"):
                    with suppress(FileNotFoundError):  # that of the directory itself
                        assert "gdsload-pool" not in os.readlink(f"/proc/self/fd/{number}")
                assert pool.held_bytes == 0 and pool.held() == []
                pool.trim()

            end_with(child)
        assert os.waitpid(pid, 0)[1] == 0
        pool.trim()
        assert pool.held_bytes == 0


def test_two_batches_do_not_find_the_same_room(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warmup.HostPool(64 * UNIT) as pool, Checkpoint.open(tiny_checkpoint) as checkpoint:
        plan = plan_reads(
            byte_ranges_of(checkpoint),
            [shard.size for shard in checkpoint.shards],
            Limits(1 << 20, 4096, 4),
            io_mode_of=lambda *_: "buffered",
        )
        room = available.SPARE_BYTES + plan.read_bytes * 3 // 2
        monkeypatch.setattr(available, "_limits", lambda: iter([(room, "")]))
        first = pool.allocate(plan)
        with pytest.raises(PlacementError):
            pool.allocate(plan)
        assert first is not None
        first.end(None)
        assert pool.allocate(plan) is not None


def test_a_lease_counts_what_lives(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a" * 8192)
    lease = Lease()
    with open(file, "r+b") as opened:
        shared = lease.lend(opened.fileno(), 0, 8192, True)
        private = lease.lend(opened.fileno(), 4096, 4096, False)
    assert lease.lent == 2
    tensor = torch.utils.dlpack.from_dlpack(private.view(0, 4096, (4096,), 1, 8))
    del private
    assert lease.lent == 2
    tensor.zero_()
    assert shared.read(4096, 4) == b"aaaa"
    del tensor, shared
    assert lease.lent == 0
    with pytest.raises(OSError):
        lease.lend(-1, 0, 4096, True)


def test_memory_files_do_not_count_as_cache_that_a_cgroup_can_drop(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\nfile 800000\nshmem 300000\n")
    words = ("memory.max", "memory.current", "file", "shmem")
    assert available._group_bytes(str(tmp_path), *words) == 1_000_000 - 900_000 + 500_000


@pytest.mark.parametrize(
    ("most", "high", "expected"),
    [
        ("max", "1000", [(900, "memory.high")]),
        ("5000", "1000", [(4900, "memory.max"), (900, "memory.high")]),
    ],
)
def test_memory_that_a_cgroup_throttles_is_not_available(
    tmp_path: Path, most: str, high: str, expected: list[tuple[int, str]]
) -> None:
    for name, text in (("max", most), ("high", high), ("current", "100"), ("stat", "file 0")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    found = list(available._cgroup_bytes("", str(tmp_path), *available._V2[1:]))
    assert found == [(nbytes, str(tmp_path / name)) for nbytes, name in expected]


def test_load_above_the_limit_of_a_cgroup_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [(9 << 30, ""), (2 << 30, "/cgroup/memory.max"), (1 << 30, "/cgroup/memory.high")]
    monkeypatch.setattr(available, "_limits", lambda: iter(left))
    assert available.available_bytes() == 1 << 30
    with pytest.raises(PlacementError, match=r"available \(by the limit /cgroup/memory\.high\): "):
        available.require_room(1 << 30)


def test_processes_are_in_one_cgroup_if_the_same_limits_count_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cgroups_of(path: str) -> object:
        monkeypatch.setattr(available, "_cgroups", lambda: iter([(path, (str(tmp_path),))]))
        return available.memory_cgroups()

    for name in "ab":
        (tmp_path / name).mkdir()
    assert cgroups_of("/a") == cgroups_of("/a") != cgroups_of("/b")
    assert cgroups_of("/of/the/host") == cgroups_of("/")  # in a container
