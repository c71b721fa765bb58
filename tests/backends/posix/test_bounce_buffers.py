"""Direct reads through a few huge pages: the same bytes, when it is chosen, that it is said."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
from gdsload._native.bounce import Bounce
from gdsload._native.memory import Region
from gdsload.backends import tuning_cache
from gdsload.backends.posix import PosixBackend, bounce_buffers, engines
from gdsload.system.mountinfo import mount_of

# What is measured at a time: _native/bounce.pyx.
STRETCH_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of seven stretches, most of it holes: a number at the start of each tensor."""
    path = tmp_path_factory.mktemp("bounce") / "large.safetensors"
    tensors = {f"t{n:02}": torch.zeros(STRETCH_BYTES // 4 - n, dtype=torch.int32) for n in range(7)}
    small = {name: tensor[:4].clone() for name, tensor in tensors.items()}
    header = {
        name: {"dtype": "I32", "shape": [len(tensor)], "data_offsets": []}
        for name, tensor in tensors.items()
    }
    del tensors
    begin = 0
    for entry in header.values():
        end = begin + 4 * entry["shape"][0]  # type: ignore[index,operator]
        entry["data_offsets"] = [begin, end]
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + begin)
        for number, (name, entry) in enumerate(header.items()):
            small[name][0] = number + 1
            file.seek(8 + len(text) + entry["data_offsets"][0])  # type: ignore[index]
            file.write(small[name][:1].numpy().tobytes())
    return path


def load(path: Path, **options: Any) -> dict[str, int]:
    """Loads all of it, and returns what went which way."""
    found = gdsload.load_file(path, cache="direct", options=options)
    assert [int(tensor[0]) for tensor in found.values()] == list(range(1, len(found) + 1))
    assert not any(tensor[1:].any() for tensor in found.values())
    roads = gdsload.last_report().paths
    return {
        way: sum(size for road, size in roads.items() if road.endswith(way))
        for way in ("direct", "bounced")
    }


def verdict(path: Path, road: str) -> tuning_cache.TunedChoice:
    mount = mount_of(path)
    assert mount is not None
    rates = dict.fromkeys(bounce_buffers.WAYS, 1e9)
    return tuning_cache.TunedChoice(
        mount.key, tuning_cache.DRAM_DEVICE, road, rates, tuning_cache.versions("cpu"), time.time()
    )


@pytest.mark.parametrize("engine", engines.ENGINES)
@pytest.mark.parametrize("request_bytes", [4096, 64 << 10, 4 << 20])
def test_the_same_bytes(tmp_path: Path, engine: str, request_bytes: int) -> None:
    if not (support := engines.try_engine(engine)).usable:
        pytest.skip(f"engine {engine}: {support}")
    path = tmp_path / "odd.safetensors"
    random = torch.Generator().manual_seed(3)
    tensors = {
        f"t{length}": torch.randint(0, 256, (length,), dtype=torch.uint8, generator=random)
        for length in (0, 1, 4095, 4096, 4097, 123_457, 1_000_003)
    }
    safetensors.torch.save_file(tensors, path)
    options = {"engine": engine, "request_bytes": request_bytes, "bounce": "always"}
    found = gdsload.load_file(path, cache="direct", options=options)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert gdsload.last_report().paths[f"posix/{engine}/direct bounced"] > 1_000_000


def test_both_ways_are_measured_and_the_faster_is_kept(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever the difference is here.
    monkeypatch.setattr(bounce_buffers, "faster", _if_measured)
    for _ in range(10):  # a machine that stops the process for a while measures nothing
        start = time.monotonic()
        went = load(large)
        seconds = time.monotonic() - start
        assert min(went.values()) >= STRETCH_BYTES // 2
        if tuning_cache.entries():
            break
    (kept,) = tuning_cache.entries()
    assert (kept.device, set(kept.rates)) == (tuning_cache.DRAM_DEVICE, set(bounce_buffers.WAYS))
    assert kept.rates[kept.choice] == max(kept.rates.values()) and min(kept.rates.values()) > 0
    # At least half a stretch of each was measured, one after the other and within the load.
    assert sum(STRETCH_BYTES / 2 / rate for rate in kept.rates.values()) <= seconds


def _if_measured(rates: dict[str, float]) -> str:
    return max(rates, key=lambda way: rates[way]) if all(rates.values()) else ""


@pytest.mark.parametrize(
    ("in_place", "through", "faster"),
    [
        (4.2e9, 1.3e9, "in place"),
        (1.3e9, 4.2e9, "bounced"),
        (2e9, 2e9, "in place"),
        (2e9, 2.1e9, ""),
        (2e9, 0.0, ""),
        (0.0, 2e9, ""),
    ],
)
def test_faster_is_what_the_rates_speak_for(in_place: float, through: float, faster: str) -> None:
    assert (
        bounce_buffers.faster(dict(zip(bounce_buffers.WAYS, (in_place, through), strict=True)))
        == faster
    )


@pytest.mark.parametrize("ended", [True, False])
def test_rates_of_a_pump_that_reads_on_are_not_kept(
    ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = bounce_buffers.BounceBuffers(
        engines.engine_module("threads").engine(), PosixBackend().settings
    )
    monkeypatch.setattr(way, "_mount", "somewhere")
    monkeypatch.setattr(way, "_bounce", Measured())
    way.close(ended)
    assert [(kept.choice, kept.mount) for kept in tuning_cache.entries()] == (
        [("bounced", "somewhere")] if ended else []
    )


class Measured:
    def rates(self) -> tuple[int, int]:
        return 1 << 30, 2 << 30


@pytest.mark.parametrize("road", bounce_buffers.WAYS)
def test_what_was_kept_holds_from_the_first_byte(large: Path, road: str) -> None:
    assert tuning_cache.store(verdict(large, road)) == ""
    went = load(large)
    assert went["direct" if road == "bounced" else "bounced"] == 0


def test_never_too_large_and_too_little(large: Path, tmp_path: Path) -> None:
    assert load(large, bounce="never")["bounced"] == 0
    assert load(large, bounce="always", request_bytes=32 << 20)["bounced"] == 0
    small = tmp_path / "small.safetensors"
    safetensors.torch.save_file({"t": torch.tensor([1])}, small)
    assert load(small)["bounced"] == 0
    assert tuning_cache.entries() == []


def test_a_stream_is_as_large_as_all_its_windows(large: Path) -> None:
    for name, tensor in gdsload.stream(large, cache="direct", window_bytes=STRETCH_BYTES):
        assert int(tensor[0]) == int(name[1:]) + 1
    assert any(road.endswith("bounced") for road in gdsload.last_report().paths)


def test_what_was_kept_holds_for_smaller_loads(large: Path) -> None:
    assert tuning_cache.store(verdict(large, "bounced")) == ""
    gdsload.load_file(large, cache="direct", names=["t02"])
    roads = gdsload.last_report().paths
    assert next(size for road, size in roads.items() if road.endswith("bounced")) > 60 << 20
    gdsload.load_file(large, cache="direct", names=["t02"], options={"bounce": "never"})
    assert not any(road.endswith("bounced") for road in gdsload.last_report().paths)


def test_a_choice_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="bounce='sometimes' is none of auto, always, never"):
        PosixBackend(bounce="sometimes")


def test_slots_that_do_not_fit() -> None:
    bounce = Bounce(engines.engine_module("threads").engine())
    region = Region.anonymous(2 << 20)
    for slot_bytes, slots in ((1 << 20, 3), (1 << 20, 0), (0, 1), (1, 17)):
        with pytest.raises(ValueError, match=r"slots of"):
            bounce.arm(region.handle(), slot_bytes, slots)
    assert not bounce.armed and bounce.rates() == (0, 0)
