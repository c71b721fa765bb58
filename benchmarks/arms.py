"""The arms of the benchmark, by name: one way each of getting all tensors of a checkpoint
into memory.

How each is called stands in loaders.py and others.py. An arm's settings come from the command line,
`fastsafetensors:max_threads=8`; those in capitals are environment variables of its process.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any, NamedTuple

from . import loaders, others
from .loaded import CPU, CUDA, OURS, PEERS, PREFETCH, Kind

BOTH = (CPU, CUDA)
# Each with its own defaults, and those settings without which it would be slower everywhere.
KINDS: dict[str, Kind] = {
    "gdsload": Kind(OURS, ("torch",), loaders.open_gdsload, {}, devices=BOTH, maps=True),
    "safetensors-mmap": Kind(
        PEERS, ("safetensors", "torch"), loaders.open_safetensors_mmap, {}, devices=BOTH, maps=True
    ),
    "safetensors-pread": Kind(
        PEERS, ("safetensors", "torch"), loaders.open_safetensors_pread, {}, devices=BOTH
    ),
    "safetensors-prefetch": Kind(
        PREFETCH, ("safetensors", "torch"), others.open_prefetch, {}, devices=(CUDA,)
    ),
    "fastsafetensors": Kind(
        PEERS, ("fastsafetensors", "torch"), loaders.open_fastsafetensors, {"max_threads": 16},
        devices=BOTH, cufile=True,
    ),
    "fastsafetensors-parallel": Kind(
        PEERS, ("fastsafetensors", "torch"), loaders.open_fastsafetensors_parallel,
        {"max_threads": 16}, devices=BOTH, copies=2, cufile=True,
    ),
    "runai": Kind(
        PEERS, ("runai-model-streamer", "torch"), loaders.open_runai, {}, devices=BOTH
    ),
    "instanttensor": Kind(
        PEERS, ("instanttensor", "torch"), others.open_instanttensor, {}, devices=(CUDA,)
    ),
    "tensorizer": Kind(
        PEERS, ("tensorizer", "torch"), others.open_tensorizer, {}, devices=BOTH,
        convert=others.convert_tensorizer,
    ),
    "nixl-posix": Kind(
        PEERS, ("nixl", "torch"), others.open_nixl,
        {"plugin": "POSIX", "chunk_kib": 1024, "use_uring": "true"},
    ),
    "nixl-gds-mt": Kind(
        PEERS, ("nixl", "torch"), others.open_nixl, {"plugin": "GDS_MT", "chunk_kib": 16384},
        devices=(CUDA,), cufile=True,
    ),
    "bare": Kind(
        OURS, (), loaders.open_bare,
        {"request_kib": 1024, "depth": 32, "threads": 0, "pages": "small", "memory": "fresh",
         "cache": "direct"},
    ),
    "pinned": Kind(OURS, ("torch",), others.open_pinned, {}, "limit", (CUDA,)),
    "transformers": Kind(
        # In our environment: the versions that gdsload-model has, too.
        OURS, ("transformers", "safetensors", "torch"), loaders.open_transformers, {}, "model",
        BOTH,
    ),
    "gdsload-model": Kind(
        OURS, ("transformers", "torch"), loaders.open_gdsload_model, {}, "model", BOTH, maps=True
    ),
}  # fmt: skip


class Arm(NamedTuple):
    """An arm with its settings, as the user named it."""

    label: str
    kind: str
    settings: dict[str, Any]

    @property
    def environment(self) -> dict[str, str]:
        """The settings that its process finds in its environment."""
        return {name: str(value) for name, value in self.settings.items() if name.isupper()}

    @property
    def options(self) -> dict[str, Any]:
        """The settings that it is called with."""
        return {name: value for name, value in self.settings.items() if not name.isupper()}


def parse(text: str) -> Arm:
    """`kind`, or `kind:key=value,key=value`. Raises ValueError for a kind that there is not."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS and kind != "fio":
        raise ValueError(f"no arm {kind!r}; there are {', '.join([*KINDS, 'fio'])}")
    settings: dict[str, Any] = dict(KINDS[kind].settings) if kind in KINDS else {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        settings[key] = int(value) if value.lstrip("-").isdigit() else value
    if kind == "bare":
        loaders.bare_settings(settings)
    return Arm(text, kind, settings)


def why_not(kind: Kind, device: str, nbytes: int, room: int, *, warm: bool = False) -> str:
    """Why an arm cannot load a checkpoint to a device with this memory; "" if it can."""
    if device.partition(":")[0] not in kind.devices:
        return f"it loads to {' and '.join(kind.devices)} devices only"
    copies = kind.copies + (warm and not kind.maps)
    if nbytes * copies > room:
        beside = ", the page cache's among them" if warm else ""
        return (
            f"it holds {copies} copies{beside}, {nbytes * copies / 1e9:.1f} GB, and there are"
            f" {room / 1e9:.1f}"
        )
    return ""


def versions(kind: Kind) -> dict[str, str]:
    """The versions of an arm's packages. Raises PackageNotFoundError for one that is missing."""
    return {package: importlib.metadata.version(package) for package in kind.packages}
