"""The arms of the benchmark: one way each of getting all tensors of a checkpoint into CPU memory.

Runs inside a worker, in the environment of the library at hand, and imports nothing else. An arm is
opened before the clock starts (imports, dlopen), called inside it, and returns where every tensor
lies. Its settings come from the command line, `fastsafetensors:max_threads=8`; those in capitals
are environment variables.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

OURS, PEERS = "ours", "peers"  # environments: .venv, .cache/bench/peers


class Loaded(NamedTuple):
    """(address, bytes) of each tensor, what keeps them alive, and what the library has to say."""

    places: dict[str, tuple[int, int]]
    keep: object
    notes: dict[str, Any]


Load = Callable[[Path], Loaded]


class Opened(NamedTuple):
    """A library that is imported, dlopened and ready; `prepare` is called just before the clock."""

    load: Load
    prepare: Callable[[], None] = lambda: None


class Kind(NamedTuple):
    """What a worker needs to know of an arm before it runs it."""

    environment: str
    packages: tuple[str, ...]
    open: Callable[[Path, Mapping[str, Any]], Opened]
    settings: Mapping[str, Any]
    gives: str = "tensors"  # or "model": what is compared with what


def files_of(directory: Path) -> list[Path]:
    """The shards of a checkpoint: a directory, or a single file."""
    return [directory] if directory.is_file() else sorted(directory.glob("*.safetensors"))


def tensors(state: Mapping[str, Any], **notes: Any) -> Loaded:
    """Where the tensors of a dict lie. Raises ValueError for one that is not one run of bytes."""
    places = {}
    for name, tensor in state.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
        places[name] = (tensor.data_ptr(), tensor.nbytes)
    return Loaded(places, state, notes)


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


def open_gdsload(source: Path, settings: Mapping[str, Any]) -> Opened:
    import torch  # noqa: F401 - its import is not what is measured

    import gdsload

    options = dict(settings)
    cache = options.pop("cache", "auto")
    backend = options.pop("backend", "posix" if options else "auto")

    def load(source: Path) -> Loaded:
        state = gdsload.load_file(source, backend=backend, cache=cache, options=options or None)
        report = gdsload.last_report().to_dict()
        return tensors(state, report={k: v for k, v in report.items() if k != "source"})

    return Opened(load)


def open_safetensors_mmap(source: Path, settings: Mapping[str, Any]) -> Opened:
    from safetensors.torch import load_file

    def load(source: Path) -> Loaded:
        state: dict[str, Any] = {}
        for file in files_of(source):
            state.update(load_file(file))
        return tensors(state)

    return Opened(load)


def open_safetensors_pread(source: Path, settings: Mapping[str, Any]) -> Opened:
    from safetensors import safe_open

    def load(source: Path) -> Loaded:
        state = {}
        for file in files_of(source):
            with safe_open(file, framework="pt", backend="pread") as opened:
                for name in opened.offset_keys():
                    state[name] = opened.get_tensor(name)
        return tensors(state)

    return Opened(load)


def open_fastsafetensors(source: Path, settings: Mapping[str, Any]) -> Opened:
    import torch
    from fastsafetensors import SafeTensorsFileLoader

    torch.set_grad_enabled(False)

    def load(source: Path) -> Loaded:
        loader = SafeTensorsFileLoader(None, device="cpu", nogds=True, **settings)
        loader.add_filenames({0: [str(file) for file in files_of(source)]})
        buffers = loader.copy_files_to_device()
        state = {name: buffers.get_tensor(name) for name in buffers.key_to_rank_lidx}
        return Loaded(tensors(state).places, (state, buffers, loader), {})

    return Opened(load)


def open_fastsafetensors_parallel(source: Path, settings: Mapping[str, Any]) -> Opened:
    import contextlib

    from fastsafetensors import ParallelLoader

    def load(source: Path) -> Loaded:
        files = [str(file) for file in files_of(source)]
        loader = ParallelLoader(
            None, files, device="cpu", nogds=True, use_tqdm_on_load=False, **settings
        )
        with contextlib.closing(loader.iterate_weights()) as weights:
            state = dict(weights)
        loader.close()
        return tensors(state)

    return Opened(load)


def open_runai(source: Path, settings: Mapping[str, Any]) -> Opened:
    from runai_model_streamer import SafetensorsStreamer

    def load(source: Path) -> Loaded:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(file) for file in files_of(source)], device="cpu")
            return tensors(dict(streamer.get_tensors()))

    return Opened(load)


def open_bare(source: Path, settings: Mapping[str, Any]) -> Opened:
    library = ctypes.CDLL(os.environ["BENCH_BARE"])
    library.bare_memory.restype = ctypes.c_void_p
    library.bare_memory.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    library.bare_read.argtypes = [
        ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_size_t),
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_size_t, ctypes.c_int,
    ]  # fmt: skip
    huge = int(settings["pages"] == "huge")
    # It parses no header: where the tensors lie, to be summed, was looked up before.
    tables = {file: ranges(file) for file in files_of(source)}
    early: dict[Path, int] = {}

    def load(source: Path) -> Loaded:
        files = files_of(source)
        sizes = [file.stat().st_size for file in files]
        bases = [early.get(file) or library.bare_memory(size, huge, 0)
                 for file, size in zip(files, sizes, strict=True)]  # fmt: skip
        error = library.bare_read(
            (ctypes.c_char_p * len(files))(*(os.fsencode(file) for file in files)),
            (ctypes.c_size_t * len(files))(*sizes),
            (ctypes.c_void_p * len(files))(*bases),
            len(files), int(settings["request_kib"]) << 10, int(settings["depth"]),
        )  # fmt: skip
        if error:
            raise OSError(-error, os.strerror(-error))
        return Loaded(
            {
                name: (base + offset, nbytes)
                for file, base in zip(files, bases, strict=True)
                for name, (offset, nbytes) in (tables.get(file) or ranges(file)).items()
            },
            None,
            {},
        )

    def prepare() -> None:
        if settings["memory"] == "backed":
            for file in tables:
                early[file] = library.bare_memory(file.stat().st_size, huge, 1)

    return Opened(load, prepare)


def open_transformers(source: Path, settings: Mapping[str, Any]) -> Opened:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return _model_load(AutoModelForCausalLM.from_pretrained, settings)


def open_gdsload_model(source: Path, settings: Mapping[str, Any]) -> Opened:
    from transformers import AutoModelForCausalLM  # noqa: F401 - imported outside the clock

    import gdsload

    return _model_load(gdsload.from_pretrained, settings)  # type: ignore[attr-defined, unused-ignore]


def _model_load(from_pretrained: Callable[..., Any], settings: Mapping[str, Any]) -> Opened:
    def load(source: Path) -> Loaded:
        model = from_pretrained(str(source), dtype="auto", **settings)
        # A tied weight is one tensor under two names: it is touched once.
        unique = {tensor.data_ptr(): name for name, tensor in model.state_dict().items()}
        state = model.state_dict()
        return Loaded(tensors({n: state[n] for n in unique.values()}).places, model, {})

    return Opened(load)


# What each is at its best here, by benchmarks/tune.py: see docs/benchmarks.md.
KINDS: dict[str, Kind] = {
    "gdsload": Kind(OURS, ("torch",), open_gdsload, {}),
    "safetensors-mmap": Kind(PEERS, ("safetensors", "torch"), open_safetensors_mmap, {}),
    "safetensors-pread": Kind(PEERS, ("safetensors", "torch"), open_safetensors_pread, {}),
    "fastsafetensors": Kind(
        PEERS, ("fastsafetensors", "torch"), open_fastsafetensors, {"max_threads": 16}
    ),
    "fastsafetensors-parallel": Kind(
        PEERS, ("fastsafetensors", "torch"), open_fastsafetensors_parallel, {"max_threads": 16}
    ),
    "runai": Kind(PEERS, ("runai-model-streamer", "torch"), open_runai, {}),
    "bare": Kind(
        OURS, (), open_bare, {"request_kib": 1024, "depth": 32, "pages": "small", "memory": "fresh"}
    ),
    "transformers": Kind(
        PEERS, ("transformers", "safetensors", "torch"), open_transformers, {}, "model"
    ),
    "gdsload-model": Kind(OURS, ("transformers", "torch"), open_gdsload_model, {}, "model"),
}


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
    return Arm(text, kind, settings)


def versions(kind: Kind) -> dict[str, str]:
    """The versions of an arm's packages. Raises PackageNotFoundError for one that is missing."""
    return {package: importlib.metadata.version(package) for package in kind.packages}
