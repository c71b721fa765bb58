"""Opening checkpoints: one open per file, comparison with the index, no leaked descriptors."""

from __future__ import annotations

import copy
import errno
import fcntl
import gc
import json
import os
import pickle
import resource
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

import descriptors
import gdsload
from gdsload.checkpoint import (
    Checkpoint,
    checkpoint as checkpoint_module,
    file_io,
    shard as shard_module,
)
from gdsload.checkpoint.checkpoint import Lookup, Shard, ShardPath
from gdsload.errors import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    FileChanged,
    ReadError,
    StallError,
)
from gdsload.system import parallel
from storage import pass_a_tick
from threadends import await_most, await_threads


def write(path: Path, *names: str, metadata: dict[str, str] | None = None) -> Path:
    """A file of four-byte tensors, each holding the first four letters of the file's name."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    for number, name in enumerate(names):
        begin = 4 * number
        header[name] = {"dtype": "U8", "shape": [4], "data_offsets": [begin, begin + 4]}
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.name[:4].encode() * len(names)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_index(directory: Path, weight_map: dict[str, str]) -> Path:
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    return path


def open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before, threads = open_files(), threading.active_count()
    yield
    await_threads("gdsload-open")
    assert open_files() == before
    await_most(threads)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A directory of two shards, a and b in the first, c in the second, with an index."""
    write(tmp_path / "1111.safetensors", "a", "b", metadata={"format": "pt", "n": "1"})
    write(tmp_path / "2222.safetensors", "c", metadata={"n": "2", "more": "x"})
    write_index(
        tmp_path, {"c": "2222.safetensors", "a": "1111.safetensors", "b": "1111.safetensors"}
    )
    return tmp_path


def test_open_index_gives_tensors_at_their_offsets(two: Path) -> None:
    with Checkpoint.open(two) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "b", "c"]
        assert [shard.name for shard in checkpoint.shards] == [
            "1111.safetensors",
            "2222.safetensors",
        ]
        assert checkpoint.metadata == {"format": "pt", "n": "1", "more": "x"}
        assert checkpoint.total_bytes == 12
        assert checkpoint.source == str(two)
        for shard, first in zip(checkpoint.shards, "ac", strict=True):
            assert shard.data_start == checkpoint.tensors[first].offset
        for info in checkpoint.tensors.values():
            shard = checkpoint.shards[info.shard]
            assert os.pread(shard.fd, info.nbytes, info.offset) == shard.name[:4].encode()
        checkpoint.verify_unchanged()


def test_header_longer_than_the_first_read_is_read_whole(tmp_path: Path) -> None:
    names = [f"tensor.{'x' * 60}.{number}" for number in range(4000)]
    path = write(tmp_path / "many.safetensors", *names)
    assert path.stat().st_size > 300_000
    with Checkpoint.open(path) as checkpoint:
        assert list(checkpoint.tensors) == names
        last = checkpoint.tensors[names[-1]]
        assert os.pread(checkpoint.shards[0].fd, 8, last.offset) == b"many"


def test_many_shards_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in range(100):
        write(tmp_path / f"{number:04d}.safetensors", f"t{number}")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == [f"t{number}" for number in range(100)]
        assert [info.shard for info in checkpoint.tensors.values()] == list(range(100))


# --- closing -------------------------------------------------------------------------------------


def test_closed_checkpoint_refuses_use(two: Path) -> None:
    checkpoint = Checkpoint.open(two)
    assert not checkpoint.closed
    checkpoint.close()
    checkpoint.close()
    assert checkpoint.closed
    assert len(checkpoint.tensors) == 3
    for use in (
        checkpoint.verify_unchanged,
        checkpoint.__enter__,
        checkpoint.shards[0].reopen_direct,
        lambda: checkpoint.shards[0].fd,
    ):
        with pytest.raises(CheckpointError, match=r"1111\.safetensors: the checkpoint is closed"):
            use()


def test_dropped_checkpoint_closes_its_files(two: Path) -> None:
    before = open_files()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = Checkpoint.open(two)
        assert len(open_files()) == len(before) + 2
        del checkpoint
        gc.collect()
    assert open_files() == before


def test_shard_is_closed_also_if_its_descriptor_is_zero(two: Path) -> None:
    stdin = os.dup(0)
    os.close(0)
    try:
        with Checkpoint.open(two / "1111.safetensors") as checkpoint:
            assert checkpoint.shards[0].fd == 0
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)


def test_shard_copied_or_pickled_raises(two: Path) -> None:
    with Checkpoint.open(two) as checkpoint:
        for action in (copy.copy, pickle.dumps):
            with pytest.raises(TypeError) as refused:
                action(checkpoint.shards[0])
            assert str(refused.value) == (
                "a Shard owns a file descriptor and cannot be copied or pickled"
            )


# --- failing -------------------------------------------------------------------------------------

WRONG_INDEXES: list[tuple[dict[str, str], str]] = [
    (
        {"a": "1111.safetensors", "z": "2222.safetensors"},
        "'z' is in 2222.safetensors, but no shard",
    ),
    ({"a": "2222.safetensors", "b": "1111.safetensors"}, "but 1111.safetensors has it"),
    (
        {"a": "1111.safetensors", "c": "3333.safetensors"},
        "3333.safetensors: the index .* does not exist",
    ),
]


@pytest.mark.parametrize(
    "weight_map,fragment", WRONG_INDEXES, ids=["no shard", "other shard", "missing shard"]
)
def test_index_that_contradicts_its_shards_raises(
    two: Path, weight_map: dict[str, str], fragment: str
) -> None:
    index = write_index(two, weight_map)
    with pytest.raises(CheckpointError, match=fragment) as caught:
        Checkpoint.open(two)
    if not isinstance(caught.value, CheckpointNotFound):
        assert str(caught.value).startswith(f"{index}: the index says that tensor ")
        assert caught.value.path == str(index)
        assert caught.value.tensor == ("z" if "z" in weight_map else "a")


def test_missing_shard_raises_checkpoint_not_found(two: Path) -> None:
    (two / "2222.safetensors").unlink()
    with pytest.raises(CheckpointNotFound) as caught:
        Checkpoint.open(two)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(two / "2222.safetensors")


@pytest.mark.parametrize("indexed", [True, False])
def test_tensor_in_two_shards_raises_if_strict(two: Path, indexed: bool) -> None:
    write(two / "2222.safetensors", "a", "c")
    if not indexed:
        (two / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(two)
    first, second = two / "1111.safetensors", two / "2222.safetensors"
    assert str(caught.value) == f"tensor 'a' is in two shards: {first} and {second}"
    assert (caught.value.path, caught.value.tensor) == (str(second), "a")
    with Checkpoint.open(two, strict=False) as checkpoint:
        assert checkpoint.tensors["a"].shard == 1, "the last, as in transformers"
        assert [info.shard for info in checkpoint.tensors.values()] == sorted(
            info.shard for info in checkpoint.tensors.values()
        )


def test_wrong_index_is_ignored_if_not_strict(two: Path) -> None:
    write_index(two, {"a": "2222.safetensors", "z": "1111.safetensors"})
    with Checkpoint.open(two, strict=False) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "b", "c"]


def test_tensors_missing_in_the_index_are_loaded(two: Path) -> None:
    write_index(two, {"a": "1111.safetensors", "c": "2222.safetensors"})
    with Checkpoint.open(two) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "b", "c"]


def test_broken_last_shard_is_named(tmp_path: Path) -> None:
    for number in range(40):
        write(tmp_path / f"{number:04d}.safetensors", f"t{number}")
    with open(tmp_path / "0039.safetensors", "ab") as file:
        file.write(b"!")
    with pytest.raises(CheckpointError, match=r"0039\.safetensors: .* 1 trailing bytes"):
        Checkpoint.open(tmp_path)


def test_broken_header_ends_all_threads(tmp_path: Path) -> None:
    count = parallel._AHEAD + 2 * parallel._THREADS
    names = [f"{number:04d}.safetensors" for number in range(count)]
    for name in names:
        write(tmp_path / name, name)
    (tmp_path / names[0]).write_bytes((2).to_bytes(8, "little") + b"{]")
    with pytest.raises(CheckpointError) as caught:  # this keeps the frames of the error alive
        Checkpoint.open(tmp_path)
    for thread in threading.enumerate():
        if thread.name == "gdsload-open":
            thread.join(60)
            assert not thread.is_alive(), "it still waits for its results to be taken"
    assert names[0] in str(caught.value)


@pytest.mark.parametrize("limit", [-1, float("nan")])
def test_header_limit_that_is_no_size_is_refused(two: Path, limit: Any) -> None:
    with pytest.raises(ValueError, match="must be a number of bytes"):
        Checkpoint.open(two, header_limit=limit)


def test_header_limit_exceeded_raises(two: Path) -> None:
    with pytest.raises(CheckpointError, match="more than the limit of 20"):
        Checkpoint.open(two / "1111.safetensors", header_limit=20)
    with pytest.raises(CheckpointError, match=r"it has .* than the limit of 20 \(header_limit"):
        Checkpoint.open(two, header_limit=20)


def test_too_many_open_files_raises_with_hint(tmp_path: Path) -> None:
    for number in range(40):
        write(tmp_path / f"{number:04d}.safetensors", f"t{number}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = set(map(int, open_files()))
    free = list(islice((number for number in count() if number not in used), 21))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[20], hard))  # room for 20 of the 40
    try:
        with pytest.raises(CheckpointUnreadable, match="ulimit -n") as caught:
            Checkpoint.open(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.errno == errno.EMFILE


# --- lists of files ------------------------------------------------------------------------------


def test_list_of_files_is_one_checkpoint(two: Path, tmp_path: Path) -> None:
    elsewhere = write(tmp_path / "deep" / "3333.safetensors", "d")
    with Checkpoint.of([elsewhere, str(two / "1111.safetensors")]) as checkpoint:
        assert list(checkpoint.tensors) == ["d", "a", "b"]


def test_list_of_files_is_named_by_the_first(two: Path) -> None:
    files = [two / "1111.safetensors", two / "2222.safetensors"]
    with Checkpoint.of(files) as checkpoint:
        assert checkpoint.source == f"{files[0]} and 1 more"
        assert [shard.name for shard in checkpoint.shards] == [file.name for file in files]
    with Checkpoint.of(files[:1]) as checkpoint:
        assert checkpoint.source == str(files[0])
    with pytest.raises(CheckpointError, match="more than the limit of 20"):
        Checkpoint.of(files, header_limit=20)
    with Checkpoint.of([files[0], files[0]], strict=False) as checkpoint:
        assert {info.shard for info in checkpoint.tensors.values()} == {1}


def test_lookup_opens_a_path_and_a_list_alike(two: Path) -> None:
    files = [two / "1111.safetensors", two / "2222.safetensors"]
    for source in (two, files, tuple(files)):
        with Lookup().open(source) as checkpoint:
            assert list(checkpoint.tensors) == ["a", "b", "c"]
        with pytest.raises(CheckpointError, match="more than the limit of 20"):
            Lookup(header_limit=20).open(source)
    write_index(two, {"z": "1111.safetensors"})
    with Lookup(strict=False).open(two) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "b"]
    with Lookup(strict=False).open([files[0], files[0]]) as checkpoint:
        assert len(checkpoint.shards) == 2


@pytest.mark.parametrize("lookup", [Lookup(subfolder="vae"), Lookup(variant="fp16")])
def test_list_of_files_has_no_subfolder_and_no_variant(two: Path, lookup: Lookup) -> None:
    with pytest.raises(CheckpointError, match="a list of files has no subfolder or variant"):
        lookup.open([two / "1111.safetensors"])


def test_lookup_passes_every_option_on(tmp_path: Path) -> None:
    snapshots = tmp_path / "cache/models--org--name/snapshots"
    for commit in ("main", "v2"):
        write(snapshots / commit / "model.safetensors", f"{commit}.root")
        write(snapshots / commit / "vae/model.safetensors", f"{commit}.vae")
        write(snapshots / commit / "vae/model.fp16.safetensors", f"{commit}.half")
    cache = tmp_path / "cache"
    for lookup, name in (
        (Lookup(cache_dir=cache), "main.root"),
        (Lookup(cache_dir=cache, revision="v2"), "v2.root"),
        (Lookup(cache_dir=cache, subfolder="vae"), "main.vae"),
        (Lookup("v2", "vae", "fp16", cache), "v2.half"),
    ):
        with lookup.open("org/name") as checkpoint:
            assert list(checkpoint.tensors) == [name]
            assert checkpoint.source == "org/name"


def test_names_choose_tensors_and_a_missing_one_raises(two: Path) -> None:
    with Checkpoint.open(two) as checkpoint:
        every = list(checkpoint.tensors.values())
        assert checkpoint.infos() == every
        assert checkpoint.infos(["c", "a"]) == [every[2], every[0]]
        assert checkpoint.info("b") == every[1]
        for ask in (checkpoint.info, checkpoint.infos):
            with pytest.raises(CheckpointError) as caught:
                ask("d")
            assert str(caught.value) == f"{two}: there is no tensor 'd' in it"
            assert caught.value.tensor == "d"


def test_repr_has_source_counts_and_state(two: Path) -> None:
    with Checkpoint.open(two) as checkpoint:
        assert repr(checkpoint) == f"<Checkpoint {two}: 3 tensors, 12 bytes, 2 files>"
    assert repr(checkpoint) == f"<Checkpoint {two}: 3 tensors, 12 bytes, 2 files, closed>"


def test_quiesced_checkpoint_has_no_descriptor_until_it_is_used(two: Path) -> None:
    before = open_files()
    with Checkpoint.open(two) as checkpoint:
        assert checkpoint.busy() == ""
        checkpoint.quiesce()
        checkpoint.quiesce()
        assert open_files() == before and not checkpoint.closed
        assert os.pread(checkpoint.shards[1].fd, 8, 0)
        assert len(open_files()) == len(before) + 1
        checkpoint.resume()
        assert len(open_files()) == len(before) + 2
        checkpoint.quiesce()
        pass_a_tick(two / "2222.safetensors")
        grow(two / "2222.safetensors")
        for _ in range(2):
            with pytest.raises(FileChanged, match="its size went"):
                checkpoint.resume()
        assert not checkpoint.closed
    assert checkpoint.closed
    checkpoint.quiesce()
    checkpoint.resume()
    assert open_files() == before


def test_threads_that_reopen_a_quiesced_file_share_a_descriptor(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    def open_regular(*names: str, **words: Any) -> Any:
        both.wait(60)
        return file_io.open_regular(*names, **words)

    monkeypatch.setattr(shard_module, "open_regular", open_regular)
    before = open_files()
    with Checkpoint.open(two) as checkpoint:
        checkpoint.quiesce()
        shard = checkpoint.shards[0]
        with ThreadPoolExecutor(2) as pool:
            fds = list(pool.map(lambda _: shard.fd, range(2)))
        assert fds == [shard.fd] * 2
        assert len(open_files()) == len(before) + 1
    assert open_files() == before


def test_quiesced_checkpoint_finds_its_files_from_another_directory(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(two)
    with Checkpoint.open("1111.safetensors") as checkpoint:
        monkeypatch.chdir("/")
        for _ in range(2):
            checkpoint.quiesce()
            checkpoint.resume()
        (two / "1111.safetensors").unlink()
        checkpoint.quiesce()
        with pytest.raises(CheckpointNotFound, match=r"^No such file or directory: 1111\.saf"):
            checkpoint.resume()


def test_file_is_opened_from_a_deleted_directory(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (two / "gone").mkdir()
    monkeypatch.chdir(two / "gone")
    (two / "gone").rmdir()
    with Checkpoint.open("../1111.safetensors") as checkpoint:
        assert len(checkpoint.tensors) == 2


def test_list_of_files_that_do_not_fit_raises(two: Path) -> None:
    first = two / "1111.safetensors"
    with pytest.raises(CheckpointError, match=r"^a checkpoint of no files$"):
        Checkpoint.of([])
    for one in (str(first), os.fsencode(first), first):
        with pytest.raises(TypeError) as refused:
            Checkpoint.of(one)  # type: ignore[arg-type]
        assert str(refused.value) == (
            "Checkpoint.of takes a list of files; Checkpoint.open takes one path"
        )
    with pytest.raises(CheckpointError, match="is in two shards"):
        Checkpoint.of([first, first])


# --- files that change ---------------------------------------------------------------------------


def test_open_opens_each_file_once(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real_open = os.open

    def count(path: str, *args: Any, **options: Any) -> int:
        opened.append(os.path.basename(path))
        return real_open(path, *args, **options)

    monkeypatch.setattr(os, "open", count)
    Checkpoint.open(two).close()
    assert opened[0] == "model.safetensors.index.json"
    assert sorted(opened[1:]) == ["1111.safetensors", "2222.safetensors"]


def test_shards_replaced_during_open_give_one_version(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (two / "model.safetensors.index.json").unlink()
    real_read = file_io.os.pread

    lock, left = threading.Lock(), ["1111", "2222"]

    def replace_then_read(fd: int, *args: int) -> bytes:
        with lock:
            while left:
                path = two / f"{left.pop()}.safetensors"
                pass_a_tick(path)
                write(two / "new", "other")
                os.replace(two / "new", path)
        return real_read(fd, *args)

    monkeypatch.setattr(file_io.os, "pread", replace_then_read)
    with Checkpoint.open(two) as checkpoint:
        monkeypatch.undo()
        assert list(checkpoint.tensors) == ["a", "b", "c"]
        data = {
            name: os.pread(checkpoint.shards[info.shard].fd, 4, info.offset)
            for name, info in checkpoint.tensors.items()
        }
        assert data == {"a": b"1111", "b": b"1111", "c": b"2222"}
        with pytest.raises(FileChanged, match="it was deleted or replaced"):
            checkpoint.verify_unchanged()


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"!")


def truncate(path: Path) -> None:
    os.truncate(path, 9)


def rewrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(file.read(1))
    os.utime(path, ns=(1, 1))  # a different time at any clock resolution


def old_time(path: Path) -> None:
    status = path.stat()
    grow(path)
    os.truncate(path, status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    "change,fragment",
    [
        (grow, r"its size went from \d+ to \d+ bytes"),
        (truncate, r"its size went from \d+ to 9 bytes"),
        (rewrite, "its modification time moved"),
        (old_time, "ctime moved"),
        (Path.unlink, "it was deleted or replaced"),
    ],
    ids=["grown", "truncated", "rewritten", "rewritten, time set back", "deleted"],
)
def test_changed_file_raises_file_changed(
    two: Path, change: Callable[[Path], None], fragment: str
) -> None:
    with Checkpoint.open(two) as checkpoint:
        pass_a_tick(two / "2222.safetensors")
        change(two / "2222.safetensors")
        fault = rf"2222\.safetensors: the file changed .*{fragment}"
        with pytest.raises(FileChanged, match=fault) as caught:
            checkpoint.verify_unchanged()
        assert caught.value.path == str(two / "2222.safetensors")


def test_file_that_ends_early_raises(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_io.os, "pread", lambda *_: b"")
    with pytest.raises(CheckpointError, match="the file ended at byte 0"):
        Checkpoint.open(two / "1111.safetensors")


def test_short_header_reads_are_continued(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read = os.pread
    monkeypatch.setattr(file_io.os, "pread", lambda fd, size, at: real_read(fd, min(size, 7), at))
    with Checkpoint.open(two) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "b", "c"]


def test_failed_header_read_raises_read_error(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(file_io.os, "pread", fail)
    with pytest.raises(ReadError, match=r"1111\.safetensors: .*Input/output error") as caught:
        Checkpoint.open(two / "1111.safetensors")
    assert (caught.value.errno, caught.value.offset, caught.value.got) == (errno.EIO, 0, 0)


# --- direct reads --------------------------------------------------------------------------------


def test_reopen_direct_of_replaced_file_opens_the_same_inode(two: Path) -> None:
    with Checkpoint.open(two) as checkpoint:
        shard = checkpoint.shards[0]
        write(two / "new", "other")
        os.replace(two / "new", shard.path)  # by name it would be another file now
        twin = shard.reopen_direct()
        if twin is None:
            pytest.skip(f"the file system of {shard.path} has no direct I/O")
        try:
            assert os.fstat(twin).st_ino == shard.identity.ino
            assert fcntl.fcntl(twin, fcntl.F_GETFL) & os.O_DIRECT
            assert not os.get_inheritable(twin)
        finally:
            os.close(twin)


def test_reopen_direct_after_failed_fstat_closes_its_descriptor(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "no status")

    with (
        Checkpoint.open(two) as checkpoint,
        descriptors.none_left(),
        monkeypatch.context() as failing,
    ):
        failing.setattr(os, "fstat", refuse)
        with pytest.raises(OSError, match="no status"):
            checkpoint.shards[0].reopen_direct()


def test_reopen_direct_without_support_returns_none(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpoint.open(two) as checkpoint:

        def refuse(*_: object) -> int:
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(os, "open", refuse)
        assert checkpoint.shards[0].reopen_direct() is None
        monkeypatch.setattr(os, "open", lambda *_: os.dup(checkpoint.shards[1].fd))
        with pytest.raises(OSError, match="another file") as caught:
            checkpoint.shards[0].reopen_direct()
        assert caught.value.errno == errno.ESTALE
        assert caught.value.filename == str(two / "1111.safetensors")


# --- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2 * checkpoint_module._FEW_SHARDS])
def test_shard_that_opens_after_the_load_gave_up_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    names = [f"{number:04}.safetensors" for number in range(count)]
    for name in names:
        write(tmp_path / name, name[:4])
    write_index(tmp_path, {name[:4]: name for name in names})
    answers = threading.Event()
    hung: list[threading.Thread] = []
    opened: list[Shard] = []
    really = checkpoint_module._open_shard

    def open_shard(shard: ShardPath, **words: Any) -> Shard:
        if shard.name == names[-1]:
            hung.append(threading.current_thread())
            answers.wait()
        opened.append(really(shard, **words))
        return opened[-1]

    monkeypatch.setattr(checkpoint_module, "_open_shard", open_shard)
    with pytest.raises(StallError, match="has not answered"):
        Checkpoint.open(tmp_path, stall_seconds=3.0)
    answers.set()
    await_threads("gdsload-open")
    assert len(hung) == 1
    assert len(opened) == count
    assert all(shard.closed for shard in opened)


def test_files_that_claim_more_bytes_than_can_be_counted_are_refused() -> None:
    """Sparse files, of a filesystem without a smaller limit."""
    nbytes = (1 << 61) - 1  # as many bits as can be counted
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for name in "abcde":
            entry = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
            header = json.dumps({name: entry}).encode()
            file = Path(folder, f"{name}.safetensors")
            file.write_bytes(len(header).to_bytes(8, "little") + header)
            try:
                os.truncate(file, 8 + len(header) + nbytes)
            except OSError as error:
                pytest.skip(f"/dev/shm has no file of this size: {error.strerror}")
        for use in (gdsload.load_file, gdsload.plan):
            with (
                descriptors.none_left(),
                pytest.raises(CheckpointError, match=r"its files claim 11,\d{3},.* bytes$"),
            ):
                use(folder)
