"""Files that change while they are read: the bytes of one version, or an error."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import gdsload
from gdsload.errors import FileChanged, GdsloadError, ShortRead
from gdsload.events import Event
from gdsload.loading import session, whole_tensors
from gdsload.loading.batch import Batch
from storage import ENGINES, SMALL, is_full_of, pass_a_tick, save


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = save(tmp_path / "model.safetensors", 1)
    os.utime(path, (1, 1))  # any change moves it
    return path


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Calls a function after the file was opened and before its first read."""

    def arrange(act: Callable[[], Any]) -> None:
        real = session.Session.arrange

        def act_first(self: session.Session, ranges: Any, **more: Any) -> Any:
            act()
            return real(self, ranges, **more)

        monkeypatch.setattr(session.Session, "arrange", act_first)

    return arrange


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_file_truncated_after_open_raises_short_read(
    path: Path, meanwhile: Any, engine: str, cache: str
) -> None:
    meanwhile(lambda: os.truncate(path, 1_000_001))
    with pytest.raises((ShortRead, FileChanged)) as caught:
        gdsload.load_file(path, cache=cache, options={"engine": engine, **SMALL})
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ShortRead)
    assert caught.value.offset + caught.value.got >= 1_000_001


def test_file_that_changes_while_tensors_are_handed_over_raises(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then bytes may be copied from a mapping of it."""
    real = Batch.tensors_of

    def change_first(self: Batch, *args: Any) -> Any:
        os.utime(path)
        return real(self, *args)

    monkeypatch.setattr(Batch, "tensors_of", change_first)
    with pytest.raises(FileChanged):
        gdsload.load_file(path)


def test_stream_of_a_truncated_file_raises_its_error_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    post, batches = whole_tensors.post, []

    def noted(*args: Any, **more: Any) -> Batch:
        batch = post(*args, **more)
        batches.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(whole_tensors, "post", noted)
    tensors = gdsload.stream(path, cache="direct", window_bytes=1)
    next(tensors)
    os.truncate(path, 1_000_001)
    with pytest.raises((ShortRead, FileChanged)) as first:
        list(tensors)
    for _ in range(2):
        with pytest.raises(type(first.value)) as again:
            next(tensors)
        assert str(again.value) == str(first.value)
    del first, again
    gc.collect()
    assert batches and all(batch() is None for batch in batches), "an error keeps their memory"


def test_stream_after_a_failure_of_the_caller_raises_an_error_again(path: Path) -> None:
    class Odd(Exception):
        def __init__(self, code: int, text: str) -> None:
            super().__init__(text)

    def wanted(name: str) -> bool:
        raise Odd(5, "no such layer")

    tensors = gdsload.stream(path, names=wanted)
    with pytest.raises(Odd, match="no such layer"):
        next(tensors)
    with pytest.raises(GdsloadError, match="Odd: no such layer"):
        next(tensors)


def test_stream_that_its_own_observer_asks_for_a_tensor_goes_on(path: Path) -> None:
    refused: list[str] = []

    def ask(event: Event) -> None:
        try:
            next(tensors)
        except ValueError as error:
            refused.append(str(error))

    tensors = gdsload.stream(path, window_bytes=1, on_event=ask)
    assert len(list(tensors)) == 8
    assert set(refused) == {"generator already executing"}


def test_stream_that_ctrl_c_ended_is_not_complete(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    tensors = gdsload.stream(path, window_bytes=1)
    next(tensors)
    with monkeypatch.context() as pressed:
        pressed.setattr(Batch, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(tensors)
    for _ in range(2):
        with pytest.raises(GdsloadError, match="this stream was ended by KeyboardInterrupt"):
            next(tensors)


@pytest.mark.parametrize("taken", [1, None])
def test_stream_that_was_closed_or_is_complete_has_ended(path: Path, taken: int | None) -> None:
    tensors: Any = gdsload.stream(path, cache="direct", window_bytes=1)
    assert len(list(islice(tensors, taken))) == (taken or 8)
    if taken:
        tensors.close()
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(tensors)


@pytest.mark.parametrize("cache", ["auto", "direct", "buffered", "mapped"])
@pytest.mark.parametrize("change", ["written", "grown", "touched"])
@pytest.mark.parametrize(
    "use",
    [
        lambda path, cache: gdsload.load_file(path, cache=cache),
        lambda path, cache: list(gdsload.stream(path, cache=cache)),
        lambda path, cache: gdsload.safe_open(path, cache=cache).get_tensor("t5"),
    ],
)
def test_file_changed_after_open_raises_file_changed(
    path: Path, meanwhile: Any, cache: str, change: str, use: Callable[[Path, str], Any]
) -> None:
    def act() -> None:
        if change == "touched":
            os.utime(path)
            return
        with open(path, "ab" if change == "grown" else "r+b") as file:
            file.seek(500_000)
            file.write(b"\7" * 100_000)

    meanwhile(act)
    with pytest.raises(FileChanged, match="changed while it was read"):
        use(path, cache)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cache", ["auto", "direct", "buffered", "mapped"])
def test_file_replaced_after_open_gives_one_version_or_an_error(
    path: Path, meanwhile: Any, cache: str, engine: str
) -> None:
    """The new file is valid and has the same size and names; versions are never mixed."""
    other = save(path.with_suffix(".new"), 2)
    meanwhile(lambda: os.replace(other, path) if other.exists() else None)
    try:
        got = gdsload.load_file(path, cache=cache, options={"engine": engine})
    except FileChanged:
        return
    assert is_full_of(got, 1)


def test_concurrent_writer_gives_one_version_or_an_error(path: Path) -> None:
    """A thread rewrites, replaces and truncates the file all the time."""
    versions = [path.read_bytes(), save(path.with_suffix(".2"), 2).read_bytes()]
    stop = threading.Event()

    def write() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            pass_a_tick(path)
            if turn % 3 == 0:
                os.truncate(path, 1_500_000)
            if turn % 2:
                path.with_suffix(".tmp").write_bytes(versions[turn % 2])
                os.replace(path.with_suffix(".tmp"), path)
            else:
                path.write_bytes(versions[turn // 2 % 2])

    def load(cache: str) -> None:
        got = gdsload.load_file(path, cache=cache, options=SMALL)
        assert is_full_of(got, 1) or is_full_of(got, 2), "two versions were mixed"

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(120):
            with suppress(GdsloadError):
                load(("direct", "buffered")[number % 2])
    finally:
        stop.set()
        writer.join()
    load("auto")
