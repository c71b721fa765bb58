"""The types of a loader in the benchmark: how it is opened, its tensors and their addresses.

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
    """An arm cannot run here; the message is the reason."""


class Loaded(NamedTuple):
    """(address, bytes) of each tensor, their owner, and notes of the library.

    On a GPU, whose addresses the CPU cannot use, `tensors` has the tensors themselves.
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
    """The arguments of an arm: the checkpoint, its settings, and the device of the tensors."""

    source: Path
    settings: Mapping[str, Any]
    device: str = CPU


class Kind(NamedTuple):
    """The facts that a worker needs before it runs an arm."""

    environment: str
    packages: tuple[str, ...]
    open: Callable[[Wanted], Opened]
    settings: Mapping[str, Any]
    gives: str = "tensors"  # or "model": what is compared with what
    devices: tuple[str, ...] = (CPU,)
    # Writes the checkpoint in the arm's own format, where it reads no safetensors.
    convert: Callable[[Path, Path], None] | None = None
    copies: int = 1  # of the checkpoint, that it holds in memory at one time
    cufile: bool = False  # whether it opens cuFile to load to a device, unless a setting forbids it
    maps: bool = False  # tensors in host memory are the page cache's own pages, where it is full


def files_of(directory: Path) -> list[Path]:
    """The shards of a checkpoint: a directory, or a single file."""
    if directory.is_file():
        return [directory]
    found = [*directory.glob("*.safetensors"), *directory.glob("*.tensors")]
    return sorted(found)


def tensors(state: Mapping[str, Any], keep: object = None, **notes: Any) -> Loaded:
    """The addresses of the tensors of a dict. Raises ValueError for a non-contiguous one."""
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
