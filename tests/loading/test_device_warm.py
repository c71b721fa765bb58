"""Several threads copy warm bytes to a device, because one core is slower than the device. Over
doubles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
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
    """A checkpoint in the page cache whose reads are large enough for several threads."""
    source = checkpoints.write("tiny", tmp_path / "tiny")
    with kept_warm(*source.glob("*.safetensors")):
        yield source


def workers() -> int:
    """Kernel threads that io_uring has started for this process."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            names.append(path.read_text())
    return sum(name.startswith("iou-wrk") for name in names)


def same(got: dict[str, torch.Tensor], source: Path) -> bool:
    wanted = gdsload.load_file(source, cache="buffered")
    return got.keys() == wanted.keys() and all(
        torch.equal(raw(got[name]), raw(tensor)) for name, tensor in wanted.items()
    )


def test_io_uring_copies_warm_bytes_in_kernel_threads(doubles: Doubles, warm: Path) -> None:
    answer = engines.try_engine("uring")
    if not answer.usable:
        pytest.skip(str(answer))
    got = gdsload.load_file(warm, "cuda:0", backend="posix", options={"engine": "uring"})
    assert workers() > 0
    paths = gdsload.last_report().paths
    assert paths["posix/uring/buffered"] > 0 and "posix/uring/direct" not in paths
    assert same(got, warm)


def test_warm_bytes_without_io_uring_are_copied_by_threads(
    doubles: Doubles, warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux AIO would copy inside the submission. It is used only if asked for by name."""
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
