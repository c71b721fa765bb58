"""What a loader is to the benchmark: how it is opened, what it loads, where its tensors lie.

Runs inside a worker, in the environment of the library at hand: it imports none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

OURS, PEERS, PREFETCH = "ours", "peers", "prefetch"  # environments; deps.sh makes the last two
CPU, CUDA = "cpu", "cuda"


class ArmFailed(Exception):
    """An arm that cannot run here, with its reason."""


class Loaded(NamedTuple):
    """(address, bytes) of each tensor, what keeps them alive, and what the library has to say.

    On a GPU an address means nothing to the CPU: there `tensors` has the tensors themselves.
    """

    places: dict[str, tuple[int, int]]
    keep: object
    notes: dict[str, Any]
    tensors: Mapping[str, Any] | None = None


Load = Callable[[Path], Loaded]


class Opened(NamedTuple):
    """A library that is imported, dlopened and ready; `prepare` is called just before the clock."""

    load: Load
    prepare: Callable[[], None] = lambda: None


class Wanted(NamedTuple):
    """What an arm is opened with: the checkpoint, its settings, and where the tensors shall be."""

    source: Path
    settings: Mapping[str, Any]
    device: str = CPU


class Kind(NamedTuple):
    """What a worker needs to know of an arm before it runs it."""

    environment: str
    packages: tuple[str, ...]
    open: Callable[[Wanted], Opened]
    settings: Mapping[str, Any]
    gives: str = "tensors"  # or "model": what is compared with what
    devices: tuple[str, ...] = (CPU,)
    # Writes the checkpoint in the arm's own format, where it reads no safetensors.
    convert: Callable[[Path, Path], None] | None = None
    copies: int = 1  # of the checkpoint, that it holds in memory at one time
    cufile: bool = False  # whether it opens cuFile on its way to a device, unless told not to
    maps: bool = False  # tensors in host memory are the page cache's own pages, where it is full


def files_of(directory: Path) -> list[Path]:
    """The shards of a checkpoint: a directory, or a single file."""
    if directory.is_file():
        return [directory]
    found = [*directory.glob("*.safetensors"), *directory.glob("*.tensors")]
    return sorted(found)


def tensors(state: Mapping[str, Any], keep: object = None, **notes: Any) -> Loaded:
    """Where the tensors of a dict lie. Raises ValueError for one that is not one run of bytes."""
    places = {}
    on_gpu = False
    for name, tensor in state.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
        places[name] = (tensor.data_ptr(), tensor.nbytes)
        on_gpu = on_gpu or tensor.device.type != "cpu"
    return Loaded(places, (state, keep), notes, state if on_gpu else None)


def ranges(file: Path) -> dict[str, tuple[int, int]]:
    """(offset in the file, bytes) of each tensor, by the header of a .safetensors file."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {
        name: (8 + length + entry["data_offsets"][0], -int.__sub__(*entry["data_offsets"]))
        for name, entry in header.items()
    }
