"""load_file, safe_open and stream, compared with safetensors."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import descriptors
import gdsload
from gdsload._native.memory import Region
from gdsload.backends.posix import engines
from gdsload.checkpoint import Shard
from gdsload.checkpoint.header import header_bytes
from gdsload.dtypes import DTYPES
from gdsload.errors import CheckpointError, ReadError
from gdsload.loading import io_mode, page_cache_fill, whole_tensors
from gdsload.loading.batch import Batch
from gdsload.memory import host_buffers, page_cache
from legal import TORCH_DTYPES, files, raw, same, write
from storage import kept_warm, make_cold

CACHES = ("auto", "direct", "buffered", "mapped")
ENGINES = [engine for engine in engines.ENGINES if engines.try_engine(engine).usable]
WAYS = [
    ("auto", "auto"),
    ("mapped", "auto"),
    *((cache, engine) for cache in ("direct", "buffered") for engine in ENGINES),
]
quick = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def scratch() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@quick
@given(data=files(), way=st.sampled_from(WAYS), draw=st.data())
def test_any_legal_file_loads_as_with_safetensors(
    scratch: Path, data: bytes, way: tuple[str, str], draw: Any
) -> None:
    path = scratch / "any.safetensors"
    path.write_bytes(data)
    cache, engine = way
    options = {"engine": engine, "request_bytes": draw.draw(st.sampled_from([4096, 8192, 1 << 22]))}
    want = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as theirs:
        keys, offset_keys, metadata = theirs.keys(), theirs.offset_keys(), theirs.metadata()

    got = gdsload.load_file(path, cache=cache, options=options)
    assert sorted(got) == sorted(want)
    assert all(same(got[name], want[name]) for name in want)
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in got.values() if tensor.nbytes)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans)), "no memory is shared"
    for name, tensor in got.items():
        align = tensor.element_size() if not tensor.is_complex() else 8
        assert not tensor.nbytes or tensor.data_ptr() % min(align, 8) == 0, name
        assert tensor.is_contiguous() and not tensor.requires_grad

    wanted = draw.draw(st.permutations(list(want)))
    wanted = wanted[: draw.draw(st.integers(0, len(wanted)))]
    window_bytes = draw.draw(st.sampled_from([1, 100, 5000, 1 << 28]))
    pairs = list(
        gdsload.stream(path, names=wanted, cache=cache, options=options, window_bytes=window_bytes)
    )
    assert [name for name, _ in pairs] == wanted
    assert all(same(tensor, want[name]) for name, tensor in pairs)
    some = gdsload.load_file(path, names=wanted, cache=cache, options=options)
    assert list(some) == wanted and all(same(some[name], want[name]) for name in wanted)

    with gdsload.safe_open(path, cache=cache, options=options) as opened:
        assert list(opened.keys()) == list(keys)
        # Of tensors without bytes at one place, safetensors itself knows no order.
        full = [name for name in offset_keys if want[name].numel()]
        assert [name for name in opened.offset_keys() if want[name].numel()] == full
        assert sorted(opened.offset_keys()) == sorted(offset_keys)
        assert opened.metadata() == metadata
        for name in wanted:
            assert same(opened.get_tensor(name), want[name])
        together = opened.get_tensors(wanted)
        assert all(same(together[name], want[name]) for name in wanted)


@pytest.mark.parametrize("pad", range(8))
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_at_every_alignment_loads_exactly(tmp_path: Path, dtype: str, pad: int) -> None:
    data = bytes(byte & 1 for byte in os.urandom(3 * 4 * 8)) if dtype == "BOOL" else os.urandom(96)
    path = write(tmp_path / "one.safetensors", dtype, [3, 4], data, pad)
    want = safetensors.torch.load_file(path)["t"]
    for cache in CACHES:
        got = gdsload.load_file(path, cache=cache)["t"]
        assert same(got, want)
        got.view(torch.uint8).zero_()
    assert same(gdsload.load_file(path)["t"], want), "what is done to a tensor stays there"


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - set(TORCH_DTYPES)))
def test_dtype_that_torch_lacks_raises_checkpoint_error(tmp_path: Path, dtype: str) -> None:
    path = write(tmp_path / "six.safetensors", dtype, [4, 4], bytes(100))
    with pytest.raises(gdsload.CheckpointError, match="has no dtype"):
        gdsload.load_file(path)
    with gdsload.safe_open(path) as opened:
        assert opened.get_slice("t").get_dtype() == dtype
        assert opened.get_slice("t").get_shape() == [4, 4]


def test_f4_with_an_odd_row_raises_checkpoint_error(tmp_path: Path) -> None:
    path = write(tmp_path / "f4.safetensors", "F4", [2, 3], bytes(10))
    with pytest.raises(gdsload.CheckpointError, match="even last dimension"):
        gdsload.load_file(path)


# Slices, as safetensors takes them.

INDEXES: list[Any] = [
    ..., slice(None), slice(1, 3), slice(None, 2), slice(2, None), slice(-2, None), slice(1, -1),
    slice(0, 0), slice(3, 1), slice(0, 100), 0, 2, -1,
    (slice(1, 3), slice(0, 2)), (1, slice(None)), (slice(None), 1), (slice(None), -1),
    (0, 1, 2), (slice(1, 2), 1, slice(0, 3)), (..., 0), (..., slice(1, 3)),
    (slice(None), slice(None), slice(2, 4)), (slice(0, 4), ..., 1),
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=str)
@pytest.mark.parametrize("cache", ["direct", "mapped"])
def test_slices_equal_those_of_torch(tmp_path: Path, index: Any, cache: str) -> None:
    path = tmp_path / "s.safetensors"
    whole = torch.arange(4 * 5 * 6, dtype=torch.float32).reshape(4, 5, 6)
    safetensors.torch.save_file({"pad": torch.ones(3, dtype=torch.uint8), "t": whole}, path)
    with safetensors.safe_open(path, "pt") as theirs:
        try:
            want = theirs.get_slice("t")[index]
        except Exception:
            want = whole[index]  # where theirs cannot, torch's own indexing is the measure
    with gdsload.safe_open(path, cache=cache) as opened:
        part = opened.get_slice("t")
        assert part.get_shape() == [4, 5, 6] and part.get_dtype() == "F32"
        got = part[index]
    assert same(got, want) and torch.equal(want, whole[index])


@pytest.mark.parametrize("index", [4, -5, (0, 5), (0, 0, 0, 0), "x", 1.5, (slice(None), 9)])
def test_invalid_slices_raise_index_or_type_error(tmp_path: Path, index: Any) -> None:
    path = tmp_path / "s.safetensors"
    safetensors.torch.save_file({"t": torch.zeros(4, 5, 6)}, path)
    with gdsload.safe_open(path) as opened, pytest.raises((IndexError, TypeError)):
        opened.get_slice("t")[index]


def test_slice_reads_only_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    safetensors.torch.save_file({"t": torch.arange(4_000_000).reshape(1000, 4000)}, path)
    with gdsload.safe_open(path, cache="direct") as opened:
        got = opened.get_slice("t")[10:12]
    assert torch.equal(got, torch.arange(40_000, 48_000).reshape(2, 4000))
    assert gdsload.last_report().read_bytes <= 64_000 + 2 * 4096
    assert got.untyped_storage().nbytes() == 64_000, "a slice does not keep the rest alive"


def test_scalar_and_empty_slice_load(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    safetensors.torch.save_file({"s": torch.tensor(7.0), "e": torch.empty(0, 5)}, path)
    with gdsload.safe_open(path) as opened:
        assert opened.get_slice("s").get_shape() == []
        assert opened.get_slice("s")[...].item() == 7.0
        assert opened.get_slice("e")[:].shape == (0, 5)
        assert opened.get_slice("e")[0:3].shape == (0, 5)


def test_numpy_framework_returns_arrays(tmp_path: Path) -> None:
    path = tmp_path / "n.safetensors"
    want = {"a": torch.arange(10, dtype=torch.int16), "b": torch.rand(3, 4)}
    safetensors.torch.save_file(want, path)
    with gdsload.safe_open(path, framework="np") as opened:
        for name, tensor in want.items():
            assert (opened.get_tensor(name) == tensor.numpy()).all()
        assert opened.get_slice("b")[1:2].shape == (1, 4)
        with safetensors.safe_open(path, "np") as theirs:
            for index in (True, (slice(0, 2), True), (..., False), -1, (0, 2)):
                got, expected = (one.get_slice("b")[index] for one in (opened, theirs))
                assert got.shape == expected.shape and (got == expected).all()


def test_dtype_that_numpy_lacks_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "n.safetensors"
    safetensors.torch.save_file({"a.b": torch.zeros(2, dtype=torch.float8_e4m3fn)}, path)
    with (
        gdsload.safe_open(path, framework="np") as opened,
        pytest.raises(TypeError, match=r"Float8_e4m3fn \(tensor 'a\.b'\)"),
    ):
        opened.get_tensor("a.b")


# Life.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    tensors = {f"t{i}": torch.full((60_000 + i,), i, dtype=torch.int32) for i in range(10)}
    safetensors.torch.save_file(tensors, file)
    return file


@pytest.mark.parametrize("cache", CACHES)
def test_tensors_outlive_their_loader_and_file(path: Path, cache: str) -> None:
    opened = gdsload.safe_open(path, cache=cache)
    tensor = opened.get_tensor("t3")
    opened.close()
    opened.close()
    rest = gdsload.load_file(path, cache=cache)
    path.unlink()
    assert bool((tensor == 3).all())
    assert all(bool((rest[f"t{i}"] == i).all()) for i in range(10))


@pytest.mark.parametrize("cache", CACHES)
def test_writes_to_tensors_do_not_reach_the_file(path: Path, cache: str) -> None:
    before = path.read_bytes()
    for tensor in gdsload.load_file(path, cache=cache).values():
        tensor.fill_(77)
    assert path.read_bytes() == before
    assert bool((gdsload.load_file(path, cache=cache)["t1"] == 1).all())


def test_closed_file_raises_checkpoint_error(path: Path) -> None:
    with gdsload.safe_open(path) as opened:
        part = opened.get_slice("t1")
    for use in (
        opened.keys,
        opened.metadata,
        lambda: opened.get_tensor("t1"),
        lambda: "t1" in opened,
        lambda: opened.get_slice("t1"),
        opened.get_tensors,
    ):
        with pytest.raises(gdsload.CheckpointError, match="closed") as caught:
            use()
        assert caught.value.path == str(path)
    opened.close()
    with pytest.raises(gdsload.CheckpointError, match="closed"):
        _ = part[0:2]


@pytest.mark.parametrize(
    "use",
    [
        lambda path: gdsload.load_file(path, names=["t1", "gone"]),
        lambda path: list(gdsload.stream(path, names=["gone"])),
        lambda path: gdsload.safe_open(path).get_tensor("gone"),
        lambda path: gdsload.safe_open(path).get_slice("gone"),
    ],
)
def test_unknown_name_raises_checkpoint_error(path: Path, use: Any) -> None:
    with pytest.raises(gdsload.CheckpointError, match="'gone'") as caught:
        use(path)
    assert caught.value.tensor == "gone"


@pytest.mark.parametrize("source", [None, 5])
@pytest.mark.parametrize(
    "use",
    [
        gdsload.load_file,
        gdsload.stream,  # when it is called, not with the first tensor
        gdsload.safe_open,
        gdsload.plan,
        lambda source: gdsload.load_into({}, source),
    ],
)
def test_source_of_another_type_raises_type_error(use: Any, source: object) -> None:
    kind = type(source).__name__
    with pytest.raises(TypeError, match=f"source must be a path, a URL or .*, not {kind}"):
        use(source)


def test_invalid_arguments_raise(path: Path) -> None:
    with pytest.raises(ValueError, match="cache='warm'"):
        gdsload.load_file(path, cache="warm")
    with pytest.raises(TypeError, match="no option"):
        gdsload.load_file(path, cache="direct", options={"nonsense": 1})
    with pytest.raises(TypeError, match="functions, not 5"):
        gdsload.load_file(path, names=[5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="framework"):
        gdsload.safe_open(path, framework="tf")
    with pytest.raises(gdsload.BackendUnavailable):
        gdsload.load_file(path, cache="mapped", backend="warp")
    for device in (1.5, True, object()):
        with pytest.raises(gdsload.PlacementError):
            gdsload.load_file(path, device=device)  # type: ignore[arg-type]


def test_invalid_arguments_of_streams_and_prefetches_raise_at_the_call(path: Path) -> None:
    for seconds in (0, -1.0, float("nan"), float("inf"), 1e300):
        for use in (gdsload.load_file, gdsload.stream, gdsload.safe_open, gdsload.prefetch):
            with pytest.raises(ValueError, match=r"stall_seconds=.* must be greater than 0"):
                use(path, stall_seconds=seconds)  # type: ignore[operator]
    with pytest.raises(ValueError, match="order='random' must be"):
        gdsload.stream(path, order="random")
    for size in (0, float("nan")):
        with pytest.raises(ValueError, match=f"window_bytes={size} must be"):
            gdsload.stream(path, window_bytes=size)  # type: ignore[arg-type]
    with pytest.raises(gdsload.BackendUnavailable, match="backend 'warp': unknown"):
        gdsload.stream(path, backend="warp")
    with pytest.raises(TypeError):
        gdsload.stream(path, names=5)  # type: ignore[arg-type]


def test_similar_name_is_suggested(path: Path) -> None:
    with pytest.raises(
        gdsload.CheckpointError, match=r"no tensor 'ft1' in it; did you mean 't1'\?"
    ):
        gdsload.load_file(path, names="ft1")
    with gdsload.safe_open(path) as opened, pytest.raises(gdsload.CheckpointError) as caught:
        opened.get_tensor("lm_head.weight")
    assert str(caught.value).endswith("there is no tensor 'lm_head.weight' in it")


def test_repeated_names_load_once(path: Path) -> None:
    assert list(gdsload.load_file(path, names=["t2", "t1", "t2"])) == ["t2", "t1"]
    assert gdsload.load_file(path, names=[]) == {}


@pytest.mark.parametrize("load", ["load_file", "stream"])
def test_progress_bar_is_made_after_the_first_read_was_posted(
    path: Path, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    events: list[str] = []

    class Bar:
        n = 0

        def __init__(self, *, total: int, **_: object) -> None:
            events.append("bar")
            self.total = total

        def update(self, nbytes: int) -> None:
            self.n += nbytes

        def close(self) -> None:
            events.append(f"closed after {self.n} of {self.total}")

    post = whole_tensors.post

    def noted(*args: Any, **kwargs: Any) -> Any:
        batch = post(*args, **kwargs)
        events.append("posted")
        return batch

    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=Bar))
    monkeypatch.setattr(whole_tensors, "post", noted)
    for _ in getattr(gdsload, load)(path, cache="direct", progress=True):
        pass
    wanted = gdsload.last_report().wanted_bytes
    assert events == ["posted", "bar", f"closed after {wanted} of {wanted}"]


@pytest.mark.parametrize("taken", [0, 1, 5])
@pytest.mark.parametrize("cache", CACHES)
def test_stream_closed_early_closes_its_files(path: Path, taken: int, cache: str) -> None:
    with descriptors.none_left():
        stream = gdsload.stream(path, cache=cache, window_bytes=300_000)
        pairs = list(itertools.islice(stream, taken))
        stream.close()  # type: ignore[attr-defined]
    assert all(bool((tensor == int(name[1:])).all()) for name, tensor in pairs)
    if taken:
        assert gdsload.last_report().failure == ""


def test_stream_follows_the_requested_order(path: Path) -> None:
    names = ["t9", "t0", "t5", "t4"]
    for window_bytes in (1, 300_000, 1 << 30):
        pairs = gdsload.stream(path, names=names, cache="direct", window_bytes=window_bytes)
        assert [(name, int(tensor[0])) for name, tensor in pairs] == [
            ("t9", 9),
            ("t0", 0),
            ("t5", 5),
            ("t4", 4),
        ]


def test_path_of_bytes_is_text_in_the_report(path: Path) -> None:
    source: Any = os.fsencode(path)
    gdsload.load_file(source, names=["t0"])
    assert json.loads(gdsload.last_report().to_json())["source"] == str(path)
    report = gdsload.load_into({"t0": gdsload.load_file(path)["t0"]}, source, names=["t0"])
    assert report.source == str(path)


def test_report_has_only_the_paths_that_brought_bytes(path: Path) -> None:
    gdsload.load_file(path, cache="buffered")
    report = gdsload.last_report()
    assert report.paths == {f"posix/{report.engine}/buffered": report.read_bytes}


def test_warm_file_is_mapped_and_cold_file_is_read(path: Path) -> None:
    with kept_warm(path):
        gdsload.load_file(path)
    report = gdsload.last_report()
    assert report.paths == {"mapped": report.wanted_bytes}
    make_cold(path)
    got = gdsload.load_file(path, page_cache="keep")
    report = gdsload.last_report()
    assert report.paths[f"posix/{report.engine}/direct"] >= report.wanted_bytes
    # What is there came with the header, by the kernel's read-ahead.
    assert page_cache.resident_bytes(path) < report.wanted_bytes // 2, "it went past the page cache"
    assert all(bool((got[f"t{i}"] == i).all()) for i in range(10))


def test_small_cold_checkpoint_is_read_into_the_page_cache_and_mapped(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "tiny")
    files = sorted((tmp_path / "tiny").glob("*.safetensors"))
    make_cold(*files)
    got = gdsload.load_file(tmp_path / "tiny")
    report = gdsload.last_report()
    assert (report.paths, report.backend) == ({"mapped": report.wanted_bytes}, "")
    want = {
        name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()
    }
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    del got, want  # mapped pages stay in the page cache
    for words in ({"cache": "direct"}, {"page_cache": "drop"}):
        for file in files:
            page_cache.evict(file)
        gdsload.load_file(tmp_path / "tiny", **words)
        assert gdsload.last_report().backend == "posix"


def test_small_file_that_does_not_get_into_the_page_cache_is_read_by_a_backend(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping of a page that cannot be read would end in a signal."""

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = Path(shutil.copy(min(tiny_checkpoint.glob("*.safetensors")), tmp_path))
    make_cold(path)
    monkeypatch.setattr(os, "preadv", fail)
    gdsload.load_file(path)
    assert gdsload.last_report().backend == "posix"


def test_directory_of_shards_loads_all(tiny_checkpoint: Path) -> None:
    want: dict[str, torch.Tensor] = {}
    for shard in sorted(tiny_checkpoint.glob("*.safetensors")):
        want.update(safetensors.torch.load_file(shard))
    for cache, engine in WAYS:
        got = gdsload.load_file(tiny_checkpoint, cache=cache, options={"engine": engine})
        assert list(got) and sorted(got) == sorted(want)
        assert all(raw(got[name]) == raw(want[name]) for name in want)


def test_report_counts_bytes_and_requests(path: Path, tmp_path: Path) -> None:
    gdsload.load_file(path, cache="direct", options={"engine": "threads"})
    report = gdsload.last_report()
    facts = json.loads(report.to_json())
    assert facts["tensors"] == 10 and facts["wanted_bytes"] == sum(
        4 * (60_000 + i) for i in range(10)
    )
    assert facts["backend"] == "posix" and facts["engine"] == "threads" and facts["failure"] == ""
    assert facts["read_bytes"] == sum(facts["paths"].values()) == os.path.getsize(path)
    assert {"open", "plan", "read", "hand over"} <= set(facts["phases"])
    assert "10 tensors" in report.summary() and "posix/threads/direct" in report.summary()
    report.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"].startswith("read ") for event in events) == facts["requests"]


class Regions:
    """Replaces `Region`, and remembers the regions that it made."""

    file = Region.file

    def __init__(self) -> None:
        self.made: list[Region] = []

    def anonymous(self, length: int) -> Region:
        self.made.append(Region.anonymous(length))
        return self.made[-1]

    def held_bytes(self) -> int:
        """Bytes of those that anybody else holds: as an object, by a tensor or for a read."""
        ours = sys.getrefcount(Region.anonymous(1)) + 1  # the list
        for place in reversed(range(len(self.made))):
            if sys.getrefcount(self.made[place]) <= ours and self.made[place].references == 1:
                del self.made[place]
        return sum(region.length for region in self.made)


@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_stream_holds_two_windows_and_the_last_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    window, number = 4 << 20, 32
    path = tmp_path / "m.safetensors"
    tensors = {f"t{i}": torch.full((1 << 20,), i, dtype=torch.int8) for i in range(number)}
    safetensors.torch.save_file(tensors, path)
    regions = Regions()
    monkeypatch.setattr(host_buffers, "Region", regions)
    most = total = 0
    for _, tensor in gdsload.stream(path, cache=cache, window_bytes=window):
        total += tensor.nbytes
        most = max(most, regions.held_bytes())
    assert total == number << 20
    # The bytes of a window are not aligned to 2 MiB: each region may be larger by that.
    assert 2 * window <= most <= 3 * (window + (2 << 20))
    del tensor
    assert regions.held_bytes() == 0


def test_name_of_one_tensor_is_no_pattern(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(
        {"a.0": torch.ones(2), "a.1": torch.ones(2), "a.*": torch.zeros(3)}, path
    )
    with gdsload.safe_open(path) as opened:
        assert opened.get_tensor("a.*").shape == (3,)
        with pytest.raises(CheckpointError, match=r"a\.\[01\]"):
            opened.get_tensor("a.[01]")


class Redirected:
    """In place of stderr: a log takes what is written to it."""

    def write(self, text: str) -> None:
        """Takes text."""


@pytest.mark.parametrize("stderr", [Redirected(), None, "closed"])
@pytest.mark.parametrize("progress", [None, False])
def test_load_needs_no_stderr(
    stderr: Any, progress: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2)}, path)
    if stderr == "closed":
        stderr = (tmp_path / "log").open("w")
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    assert gdsload.load_file(path, progress=progress)["w"].sum() == 2


def test_direct_reads_that_fail_tell_the_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.ones(1 << 20)}, path)

    def reopen(self: Shard) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Shard, "reopen_direct", reopen)
    with pytest.raises(ReadError, match="Too many open files") as caught:
        gdsload.load_file(path, cache="direct")
    assert caught.value.errno == errno.EMFILE


def test_direct_reads_without_proc_do_not_call_the_file_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.ones(1 << 20)}, path)
    real = os.open

    def without_proc(name: Any, *words: Any, **named: Any) -> int:
        if str(name).startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return real(name, *words, **named)

    monkeypatch.setattr(os, "open", without_proc)
    with pytest.raises(ReadError, match="/proc is not mounted") as caught:
        gdsload.load_file(path, cache="direct")
    assert "No such file" not in str(caught.value)
    assert gdsload.load_file(path, page_cache="keep")["w"].sum() == 1 << 20


@pytest.mark.parametrize("busy", [False, True])
def test_warm_file_is_mapped_unless_its_pages_may_still_be_read(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    expected = gdsload.load_file(tiny_checkpoint, cache="buffered")
    monkeypatch.setattr(io_mode, "reads_in_flight", lambda device: busy)
    monkeypatch.setattr(page_cache, "mostly_resident", lambda *_: True)
    monkeypatch.setattr(page_cache, "has_arrived", lambda *_: False)
    monkeypatch.setattr(page_cache_fill, "WITHOUT_BACKEND_BYTES", 0)
    got = gdsload.load_file(tiny_checkpoint, page_cache="keep")
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert ("mapped" in gdsload.last_report().paths) != busy


def slice_of(path: Path) -> object:
    with gdsload.safe_open(path) as opened:
        return opened.get_slice("w")[:1]


@pytest.mark.parametrize(
    "load",
    [
        gdsload.load_file,
        lambda path: gdsload.load_file(path, cache="direct"),
        lambda path: list(gdsload.stream(path)),
        slice_of,
    ],
)
@pytest.mark.parametrize(
    ("dtype", "shape", "why"),
    [("F6_E2M3", [4], "torch has no dtype"), ("F4", [2, 3], "needs an even last dimension")],
)
def test_tensor_that_torch_cannot_have_is_named_with_its_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load: Callable[[Path], object],
    dtype: str,
    shape: list[int],
    why: str,
) -> None:
    """Before the load waits for anything."""
    monkeypatch.setattr(Batch, "wait", None)
    safetensors.torch.save_file(
        {"v": torch.zeros(4)}, tmp_path / "model-00001-of-00002.safetensors"
    )
    (path := tmp_path / "model-00002-of-00002.safetensors").write_bytes(
        header_bytes([("w", dtype, shape, 3)]) + bytes(3)
    )
    with pytest.raises(
        CheckpointError, match=f"^{re.escape(str(path))}: tensor 'w'.* {why}"
    ) as caught:
        load(tmp_path)
    assert (caught.value.path, caught.value.tensor) == (str(path), "w")


@pytest.mark.parametrize("names", ["nope", "no*"])
def test_name_that_the_checkpoint_lacks_is_an_error_that_names_it_once(
    tiny_checkpoint: Path, names: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        gdsload.load_file(tiny_checkpoint, names=names)
    assert str(caught.value).count(str(tiny_checkpoint)) == 1
    assert caught.value.path == str(tiny_checkpoint)
