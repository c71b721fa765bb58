"""Opening and reading small files: the error of each failing call, and its words."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

import descriptors
import gdsload
from forked import fork
from gdsload.checkpoint import checkpoint, file_io
from gdsload.checkpoint.file_io import is_directory, open_error, open_regular, read_exactly
from gdsload.errors import (
    CheckpointAccessError,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    ReadError,
    StallError,
)

PATIENCE_SECONDS = 240.0
SOFT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    with descriptors.none_left():
        yield


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A file of the bytes 0 to 9."""
    path = tmp_path / "ten"
    path.write_bytes(bytes(range(10)))
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_bytes_are_read_from_their_offset(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_exactly(file, 3, 4, "f") == bytes([3, 4, 5, 6])
    assert read_exactly(file, 0, 10, "f") == bytes(range(10))
    assert read_exactly(file, 10, 0, "f") == b""
    asked: list[tuple[int, int]] = []
    real = os.pread

    def short(fd: int, nbytes: int, offset: int) -> bytes:
        asked.append((nbytes, offset))
        return real(fd, min(nbytes, 2), offset)

    monkeypatch.setattr(os, "pread", short)
    monkeypatch.setattr(file_io, "_READ_BYTES", 4)
    assert read_exactly(file, 1, 7, "f") == bytes(range(1, 8))
    assert asked == [(4, 1), (4, 3), (3, 5), (1, 7)]


def test_bytes_that_come_slowly_are_progress(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large header or index on a slow link takes longer than a stall."""
    noted: list[int] = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, offset: real(fd, min(nbytes, 2), offset))
    monkeypatch.setattr(file_io, "note_progress", lambda: noted.append(1))
    assert read_exactly(file, 0, 10, "f") == bytes(range(10))
    assert len(noted) == 5
    assert file_io._READ_BYTES <= 4 << 20, "progress is noted when a call returns"


def test_early_end_names_both_ends(file: int) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_exactly(file, 4, 7, "f")
    assert str(caught.value) == (
        "f: the file ended at byte 10 and was read up to byte 11: it was truncated"
    )
    assert caught.value.path == "f"


def test_failed_read_has_its_place(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pread

    def fail(fd: int, nbytes: int, offset: int) -> bytes:
        if offset > 4:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, 2, offset)

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(ReadError) as caught:
        read_exactly(file, 3, 6, "f")
    error = caught.value
    assert str(error) == "f: reading 6 bytes at 3 failed after 2: Input/output error"
    assert (error.path, error.offset, error.wanted, error.got) == ("f", 3, 6, 2)
    assert error.errno == errno.EIO
    assert isinstance(error.__cause__, OSError)


@pytest.mark.parametrize(
    ("code", "kind", "fault"),
    [
        (errno.ENOENT, CheckpointNotFound, "No such file or directory: f"),
        (errno.ENOTDIR, CheckpointNotFound, "No such file or directory: f"),
        (
            errno.ELOOP,
            CheckpointUnreadable,
            "f: it cannot be opened: its symbolic links form a loop, or are too many",
        ),
        (
            errno.EACCES,
            CheckpointAccessError,
            "f: permission denied (this user may not enter a directory above it)",
        ),
        (
            errno.EPERM,
            CheckpointAccessError,
            "f: permission denied (this user may not enter a directory above it)",
        ),
        (
            errno.EMFILE,
            CheckpointUnreadable,
            f"f: this process may open no more than {SOFT} files (`ulimit -n` raises it)",
        ),
        (errno.ENFILE, CheckpointUnreadable, "f: this system may open no more files"),
        (errno.EIO, CheckpointUnreadable, "f: it cannot be opened: Input/output error"),
    ],
)
def test_error_of_open_has_kind_and_words(
    code: int,
    kind: type[CheckpointUnreadable],
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    error = open_error(OSError(code, os.strerror(code)), "f")
    assert type(error) is kind
    assert str(error) == fault
    assert (error.path, error.errno, error.filename) == ("f", code, "f")


def test_missing_shard_and_dangling_link_are_told_apart(tmp_path: Path) -> None:
    path, missing = str(tmp_path / "f"), FileNotFoundError(errno.ENOENT, "")
    assert str(open_error(missing, path, "i.json")) == (
        f"{path}: the index i.json names this shard, but it does not exist (an unfinished"
        " download?)"
    )
    os.symlink("gone", path)
    assert str(open_error(missing, path, "i.json")) == (
        f"{path}: this is a link to {tmp_path / 'gone'}, which does not exist"
    )


@pytest.mark.parametrize(
    ("mode", "other", "hinted"),
    [(0o600, 1, True), (0o640, 1, False), (0o604, 1, False), (0o600, 0, False), (0o020, 1, True)],
)
def test_file_that_only_its_owner_can_read_gets_a_hint(
    mode: int, other: int, hinted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.touch()
    path.chmod(mode)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + other)
    hint = ""
    if hinted:
        hint = ": safetensors writes files that only their owner can read; `chmod a+r` opens it"
    assert str(open_error(PermissionError(errno.EACCES, ""), str(path))) == (
        f"{path}: permission denied (mode {mode:04o}, owned by user {owner}{hint})"
    )
    tmp_path.chmod(0o700)
    text = str(open_error(PermissionError(errno.EACCES, ""), str(tmp_path)))
    assert text.endswith(f"(mode 0700, owned by user {tmp_path.stat().st_uid})")


@pytest.mark.parametrize("shown_as", [None, "shown"])
def test_file_replaced_by_a_fifo_after_the_check_is_refused(
    shown_as: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "f")
    path, real = str(tmp_path / "f"), os.stat
    monkeypatch.setattr(os, "stat", lambda _: real(__file__))
    with pytest.raises(CheckpointError) as caught:
        open_regular(path, shown_as=shown_as)
    shown = shown_as or path
    assert str(caught.value) == f"{shown}: this is a FIFO, not a regular file"
    assert caught.value.path == shown


def test_failure_after_opening_closes_the_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").touch()

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as failing, pytest.raises(CheckpointUnreadable) as caught:
        failing.setattr(os, "fstat", fail)
        open_regular(str(tmp_path / "f"), shown_as="shown", named_by="i.json")
    assert str(caught.value) == "shown: it cannot be opened: Input/output error"
    with pytest.raises(CheckpointNotFound, match=r"^shown: the index i\.json names this shard"):
        open_regular(str(tmp_path / "gone"), shown_as="shown", named_by="i.json")


def test_link_to_a_directory_is_shown_with_its_end(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(CheckpointUnreadable) as caught:  # an OSError, as of safetensors
        open_regular(str(tmp_path / "link"))
    assert caught.value.errno == errno.EISDIR
    assert str(caught.value) == (
        f"{tmp_path / 'link'}: this is a link to {tmp_path}, a directory, not a regular file"
    )


def test_directory_is_told_from_file_and_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").touch()
    assert is_directory(str(tmp_path))
    for name in ("f", "gone", "f/below"):
        assert not is_directory(str(tmp_path / name))

    def fail(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(CheckpointAccessError) as caught:
        is_directory("f")
    assert caught.value.path == "f"


def test_opened_file_has_the_status_of_its_descriptor(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    fd, status = open_regular(str(tmp_path / "f"))
    try:
        assert (status.st_size, stat.S_ISREG(status.st_mode)) == (5, True)
        assert status == os.fstat(fd)
        assert os.get_blocking(fd) and not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_file_with_a_lease_is_opened_when_it_is_given_back(tmp_path: Path) -> None:
    """A file server has one on a file that a client writes to, and gives it back when asked."""
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    read, write = os.pipe()
    pid = fork()
    if not pid:  # the server: the kernel asks it by a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
        try:
            fcntl.fcntl(os.open(path, os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)
            os.write(write, b"lent")
            signal.sigwait({signal.SIGIO})
        finally:
            os._exit(0)
    os.close(write)
    lent = os.read(read, 4)
    os.close(read)
    try:
        if not lent:
            pytest.skip("no leases here")
        fd, status = open_regular(str(path))
        os.close(fd)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert status.st_size == 3


@pytest.mark.parametrize(
    "use",
    [
        gdsload.load_file,
        lambda path, **words: gdsload.load_into({}, path, **words),
        lambda path, **words: list(gdsload.stream(path, **words)),
        gdsload.safe_open,
        lambda path, **words: gdsload.prefetch(path, **words).wait(),
    ],
)
def test_opening_ends_at_the_limit_of_the_load(
    use: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, end = tmp_path / "model.safetensors", threading.Event()
    safetensors.numpy.save_file({}, path)
    monkeypatch.setattr(checkpoint, "open_regular", lambda *_, **__: end.wait(PATIENCE_SECONDS))
    try:
        with pytest.raises(StallError, match=r"has not answered for 0\.2 s"):
            use(path, stall_seconds=0.2)
    finally:
        end.set()
