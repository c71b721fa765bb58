"""What the page cache holds goes to a device by several threads: one core copies a fraction of what
a device takes. Over doubles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gdsload
from devicetensors import raw
from gdsload.backends.base import Support
from gdsload.backends.posix import engines
from gdsload.synthetic import checkpoints
from gpudoubles import Doubles
from storage import kept_warm


@pytest.fixture
def doubles(loading: Doubles) -> Doubles:
    return loading


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint in the page cache whose reads are large enough to be shared out."""
    source = checkpoints.write("tiny", tmp_path / "tiny")
    with kept_warm(*source.glob("*.safetensors")):
        yield source


def workers() -> int:
    """Kernel threads that io_uring has started for this process."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("iou-wrk") for name in names)


def same(got: dict[str, torch.Tensor], source: Path) -> bool:
    wanted = gdsload.load_file(source, cache="buffered")
    return got.keys() == wanted.keys() and all(
        torch.equal(raw(got[name]), raw(tensor)) for name, tensor in wanted.items()
    )


def test_io_uring_hands_copies_to_its_workers(doubles: Doubles, warm: Path) -> None:
    answer = engines.try_engine("uring")
    if not answer.usable:
        pytest.skip(str(answer))
    got = gdsload.load_file(warm, "cuda:0", backend="posix", options={"engine": "uring"})
    assert workers() > 0
    roads = gdsload.last_report().paths
    assert roads["posix/uring/buffered"] > 0 and not roads["posix/uring/direct"]
    assert same(got, warm)


def test_without_io_uring_threads_copy(
    doubles: Doubles, warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux AIO would copy inside the submission. Asked for by name, it is taken all the same."""
    tried = engines.try_engine

    def without(engine: str) -> Support:
        return Support(False, ("not here",)) if engine == "uring" else tried(engine)

    monkeypatch.setattr("gdsload.backends.posix.engines.try_engine", without)
    got = gdsload.load_file(warm, "cuda:0", backend="posix")
    assert gdsload.last_report().paths["posix/threads/buffered"] > 0
    assert same(got, warm)
    if not (answer := tried("linuxaio")).usable:
        pytest.skip(str(answer))
    gdsload.load_file(warm, "cuda:0", backend="posix", options={"engine": "linuxaio"})
    assert gdsload.last_report().paths["posix/linuxaio/buffered"] > 0
