"""One open file: what is said of its changes, and the end of its descriptor."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import descriptors
import gdsload
from forked import end_with, fork, run
from gdsload.checkpoint import (
    Checkpoint,
    Identity,
    Shard,
    checkpoint as checkpoint_module,
    file_io,
    shard as shard_module,
)
from gdsload.checkpoint.file_io import close_files, open_regular
from gdsload.checkpoint.shard import close_shards, quiesce_shards
from gdsload.errors import CheckpointError, FileChanged
from gdsload.system.cancellation import CancelToken, LoadCancelled
from seccomp import REFUSE, skip_if_allowed
from storage import pass_a_tick

PATIENCE_SECONDS = 120.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(100))
    os.utime(path, (1, 1))
    return path


def opened(path: Path | str) -> Shard:
    fd, status = open_regular(str(path))
    return Shard(fd, Identity.of(status), path=str(path), name="model.safetensors")


def replace(path: Path) -> None:
    """By a copy of the same size and time."""
    copy = shutil.copy2(path, path.with_name("copy"))
    os.replace(copy, path)


@pytest.fixture
def slow_close(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Closing a file waits until the first event is set, and then sets the second one."""
    close, answers, closed = os.close, threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        assert answers.wait(PATIENCE_SECONDS)
        close(fd)
        closed.set()

    monkeypatch.setattr(file_io.os, "close", slow)
    return answers, closed


def test_files_whose_storage_does_not_answer_are_closed_later(
    path: Path,
    slow_close: tuple[threading.Event, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, closed = slow_close
    fd, _ = open_regular(str(path))
    monkeypatch.setattr(file_io, "_CLOSE_SECONDS", 0.01)
    close_files([fd], may_hang=True)
    assert not closed.is_set()
    answers.set()
    assert closed.wait(PATIENCE_SECONDS)


def test_file_on_network_storage_that_nobody_closes_is_not_waited_for(
    path: Path, slow_close: tuple[threading.Event, threading.Event]
) -> None:
    answers, closed = slow_close
    shard = opened(path)
    shard.fstype, fd = "fuse.test", shard.fd
    del shard
    gc.collect()
    assert os.fstat(fd)  # still open
    answers.set()
    assert closed.wait(PATIENCE_SECONDS)


def test_file_of_an_overlay_may_hang_and_is_not_distant(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: "overlay")
    with Checkpoint.open(tiny_checkpoint) as checkpoint:
        assert all(shard.may_hang and not shard.distant for shard in checkpoint.shards)
    monkeypatch.undo()
    with Checkpoint.open(tiny_checkpoint) as checkpoint:
        assert all(shard.may_hang == shard.distant for shard in checkpoint.shards)


@pytest.mark.parametrize("distant", [True, False])
def test_error_of_closing_one_file_leaves_none_open(
    path: Path, monkeypatch: pytest.MonkeyPatch, distant: bool
) -> None:
    close = os.close

    def broken(fd: int) -> None:
        close(fd)  # as the kernel does
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    with descriptors.none_left():
        fds = [open_regular(str(path))[0] for _ in range(3)]
        monkeypatch.setattr(file_io.os, "close", broken)
        close_files(fds, may_hang=distant)


@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_load_is_complete_if_closing_its_files_fails(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    close = os.close

    def broken(fd: int) -> None:
        close(fd)
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    expected = gdsload.load_file(tiny_checkpoint, cache=cache)  # the engines are probed, once
    with descriptors.none_left():
        monkeypatch.setattr(file_io.os, "close", broken)
        got = gdsload.load_file(tiny_checkpoint, cache=cache)
        monkeypatch.undo()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "change,text",
    [
        (lambda path: os.truncate(path, 7), "its size went from 100 to 7 bytes"),
        (
            lambda path: os.utime(path, (2, 2)),
            "it was written to (its modification time moved)",
        ),
        (os.unlink, "it was deleted or replaced"),
        (replace, "it was deleted or replaced"),
        (
            lambda path: os.chmod(path, 0o400),
            "its status changed (ctime moved: mode, owner, links or times)",
        ),
    ],
)
def test_change_of_an_open_file_is_named(
    change: Callable[[Path], object], text: str, path: Path
) -> None:
    shard = opened(path)
    shard.verify_unchanged()
    pass_a_tick(path)
    change(path)
    with pytest.raises(FileChanged) as caught:
        shard.verify_unchanged()
    assert str(caught.value) == f"{path}: the file changed while it was read: {text}"
    assert caught.value.path == str(path)
    shard.close()


def test_status_that_cannot_be_read_is_a_change(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = opened(path)

    def fstat(_: int) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as failing, pytest.raises(FileChanged) as caught:
        failing.setattr(os, "fstat", fstat)
        shard.verify_unchanged()
    assert str(caught.value) == f"{path}: fstat failed: Stale file handle"
    assert caught.value.path == str(path) and isinstance(caught.value.__cause__, OSError)
    shard.close()


UNASKED = """
import platform
from gdsload.checkpoint import Identity, Shard
from gdsload.checkpoint.file_io import open_regular
from gdsload.errors import FileChanged
fd, status = open_regular(sys.argv[1])
shard = Shard(fd, Identity.of(status), path="shard", name="shard", fstype=sys.argv[2])
refuse([{"x86_64": 332}.get(platform.machine(), 291)], int(sys.argv[3]))
try:
    print(shard.verify_unchanged())
except FileChanged as changed:
    print(changed)
"""


@pytest.mark.parametrize(
    ("filesystem", "code", "said"),
    [
        ("nfs4", errno.ENOSYS, "None"),
        ("nfs4", errno.EPERM, "None"),
        ("nfs4", errno.ESTALE, "shard: fstat failed: Stale file handle"),
        ("", errno.ESTALE, "None"),
    ],
)
def test_server_that_cannot_be_asked_is_a_change_unless_the_sandbox_forbids_it(
    path: Path, filesystem: str, code: int, said: str
) -> None:
    printed = run(REFUSE + UNASKED, path, filesystem, code).stdout.strip()
    skip_if_allowed(printed)
    assert printed == said


def test_file_that_another_one_took_the_place_of_is_not_opened_again(path: Path) -> None:
    shard = opened(path)
    quiesce_shards([shard])
    assert not shard.closed
    replace(path)
    for _ in range(2):
        with pytest.raises(FileChanged, match=r"it became another file$") as caught:
            shard.read(0, 1)
        assert caught.value.path == str(path)
    assert not shard.closed
    shard.close()
    with pytest.raises(CheckpointError, match="the checkpoint is closed"):
        shard.read(0, 1)


def test_quiesced_file_is_opened_again_after_ctrl_c_while_it_was_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = opened(path)
    seen: list[bool] = []

    def interrupted(fds: list[int], **_: object) -> None:
        seen.append(shard.closed)
        for fd in fds:
            os.close(fd)
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupting, pytest.raises(KeyboardInterrupt):
        interrupting.setattr(shard_module, "close_files", interrupted)
        quiesce_shards([shard])
    assert seen == [False]
    assert shard.read(0, 3) == bytes(3)
    shard.close()


def test_file_is_opened_again_from_another_directory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    shard = opened(path.name)
    assert shard.path == path.name
    quiesce_shards([shard])
    monkeypatch.chdir("/")
    assert shard.read(0, 3) == bytes(3)
    shard.close()


def test_load_that_opens_a_file_again_ends_though_the_storage_does_not_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, answers, token = threading.Event(), threading.Event(), CancelToken()

    def slow(*args: Any, **named: Any) -> tuple[int, os.stat_result]:
        opens.set()
        assert answers.wait(PATIENCE_SECONDS), "the caller waits for the storage"
        return open_regular(*args, **named)

    shard = opened(path)
    shard.fstype = "nfs4"
    quiesce_shards([shard])
    with descriptors.none_left(), monkeypatch.context() as patch:
        patch.setattr(shard_module, "open_regular", slow)
        cancelling = threading.Thread(target=lambda: (opens.wait(), token.ask()))
        cancelling.start()
        with pytest.raises(LoadCancelled):
            token.run(getattr, shard, "fd")
        answers.set()
        cancelling.join()
    assert shard.read(0, 3) == bytes(3)
    shard.close()


def test_file_is_opened_in_a_directory_that_is_gone(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    shard = opened(path)
    quiesce_shards([shard])
    assert shard.read(0, 3) == bytes(3)
    shard.close()


def test_descriptor_0_is_closed_like_any_other(path: Path) -> None:
    """A daemon has closed its standard input: a shard gets its number."""

    def child() -> None:
        os.close(0)
        for end in (Shard.close, lambda _: None):
            shard = opened(path)
            assert shard.fd == 0
            quiesce_shards([shard])
            assert shard.read(0, 1) == b"\0" and shard.fd == 0
            end(shard)
            del shard
            gc.collect()
            assert not os.path.exists("/proc/self/fd/0")

    pid = fork()
    if not pid:
        end_with(child)
    assert os.waitpid(pid, 0)[1] == 0


def test_file_opened_again_by_two_threads_has_one_descriptor(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = opened(path)
    quiesce_shards([shard])
    before = len(os.listdir("/proc/self/fd"))
    real = Shard._require_same

    def another_is_faster(self: Shard, status: os.stat_result) -> None:
        monkeypatch.setattr(Shard, "_require_same", real)
        assert self.read(0, 1) == b"\0"
        real(self, status)

    monkeypatch.setattr(Shard, "_require_same", another_is_faster)
    assert shard.read(0, 1) == b"\0"
    assert len(os.listdir("/proc/self/fd")) == before + 1
    shard.close()
    shard.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_of_one_checkpoint_are_waited_for_together(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(
        shard_module, "close_files", lambda fds, **_: waits.append(len(list(map(os.close, fds))))
    )
    shards = [opened(path) for _ in range(3)]
    for shard in shards:
        shard.fstype = "fuse.test"
    quiesce_shards(shards)
    assert waits == [3]
    assert all(shard.read(0, 1) == b"\0" for shard in shards)  # opened again
    close_shards(shards)
    assert waits == [3, 3]
