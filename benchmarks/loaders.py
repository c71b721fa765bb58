"""How each loader is called: safetensors, fastsafetensors, runai-model-streamer, transformers, the
bare reader and gdsload. others.py has those that need a GPU or a format of their own.

An arm is opened before the clock starts (imports, dlopen), called inside it, and returns where
every tensor lies. Its settings come from the command line, `fastsafetensors:max_threads=8`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .loaded import CPU, Loaded, Opened, Wanted, files_of, ranges, tensors


def open_gdsload(wanted: Wanted) -> Opened:
    import torch  # noqa: F401 - its import is not what is measured

    import gdsload

    options = dict(wanted.settings)
    cache, page_cache = options.pop("cache", "auto"), options.pop("page_cache", "auto")
    backend = options.pop("backend", "posix" if options else "auto")

    def load(source: Path) -> Loaded:
        state = gdsload.load_file(
            source,
            wanted.device,
            backend=backend,
            cache=cache,
            page_cache=page_cache,
            options=options or None,
        )
        report = gdsload.last_report().to_dict()
        return tensors(state, report={k: v for k, v in report.items() if k != "source"})

    return Opened(load)


def open_safetensors_mmap(wanted: Wanted) -> Opened:
    from safetensors.torch import load_file

    def load(source: Path) -> Loaded:
        state: dict[str, Any] = {}
        for file in files_of(source):
            state.update(load_file(file, device=wanted.device))
        return tensors(state)

    return Opened(load)


def open_safetensors_pread(wanted: Wanted) -> Opened:
    from safetensors import safe_open

    def load(source: Path) -> Loaded:
        state = {}
        for file in files_of(source):
            with safe_open(file, framework="pt", device=wanted.device, backend="pread") as opened:
                for name in opened.offset_keys():
                    state[name] = opened.get_tensor(name)
        return tensors(state)

    return Opened(load)


def open_fastsafetensors(wanted: Wanted) -> Opened:
    import torch
    from fastsafetensors import SafeTensorsFileLoader

    torch.set_grad_enabled(False)

    def load(source: Path) -> Loaded:
        settings = {"nogds": wanted.device == CPU, **wanted.settings}
        loader = SafeTensorsFileLoader(None, device=wanted.device, **settings)
        loader.add_filenames({0: [str(file) for file in files_of(source)]})
        buffers = loader.copy_files_to_device()
        state = {name: buffers.get_tensor(name) for name in buffers.key_to_rank_lidx}
        buffers.close()  # what is not closed stays in memory; each tensor has its own reference
        loader.close()
        return tensors(state)

    return Opened(load)


def open_fastsafetensors_parallel(wanted: Wanted) -> Opened:
    import contextlib

    from fastsafetensors import ParallelLoader

    def load(source: Path) -> Loaded:
        files = [str(file) for file in files_of(source)]
        settings = {"nogds": wanted.device == CPU, **wanted.settings}
        loader = ParallelLoader(
            None, files, device=wanted.device, use_tqdm_on_load=False, **settings
        )
        with contextlib.closing(loader.iterate_weights()) as weights:
            state = dict(weights)
        loader.close()
        return tensors(state)

    return Opened(load)


def open_runai(wanted: Wanted) -> Opened:
    from runai_model_streamer import SafetensorsStreamer

    def load(source: Path) -> Loaded:
        with SafetensorsStreamer() as streamer:
            files = [str(file) for file in files_of(source)]
            streamer.stream_files(files, device=wanted.device)
            return tensors(dict(streamer.get_tensors()))

    return Opened(load)


BARE = {
    "pages": ("small", "huge"),
    "memory": ("fresh", "backed"),
    "dtype": ("float32",),
    "cache": ("direct", "mapped"),
}
MOST_BARE_THREADS = 64
MOST_BARE_KIB, MOST_BARE_DEPTH = 1 << 20, 4096


def bare_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises ValueError for what bare.c would take for something else, or wait for without end."""
    for name, value in settings.items():
        if name in BARE and value in BARE[name]:
            continue
        if name == "request_kib" and value in range(4, MOST_BARE_KIB + 1, 4):
            continue
        if name == "depth" and value in range(1, MOST_BARE_DEPTH + 1):
            continue
        if name == "threads" and value in range(MOST_BARE_THREADS + 1):
            continue
        raise ValueError(
            f"bare: {name}={value}; it has request_kib=4, 8 ... {MOST_BARE_KIB}, depth=1 ..."
            f" {MOST_BARE_DEPTH}, threads=0 ... {MOST_BARE_THREADS}, pages=small or huge,"
            " memory=fresh or backed, dtype=float32, cache=direct or mapped"
        )
    if "dtype" in settings and not settings.get("threads"):
        raise ValueError("bare: dtype=float32 needs threads=")
    if "dtype" not in settings and settings.get("cache") == "mapped":
        raise ValueError("bare: cache=mapped needs dtype=float32")
    return settings


def open_bare(wanted: Wanted) -> Opened:
    library = ctypes.CDLL(os.environ["BENCH_BARE"])
    library.bare_memory.restype = ctypes.c_void_p
    library.bare_memory.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    library.bare_read.argtypes = [
        ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_size_t),
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_size_t, *4 * [ctypes.c_int],
    ]  # fmt: skip
    settings = wanted.settings
    huge = int(settings["pages"] == "huge")
    times = 1 + ("dtype" in settings)  # every tensor is taken for bfloat16
    # It parses no header: where the tensors lie, to be summed, was looked up before.
    tables = {file: ranges(file) for file in files_of(wanted.source)}
    early: dict[Path, int] = {}

    def load(source: Path) -> Loaded:
        files = files_of(source)
        sizes = [file.stat().st_size for file in files]
        bases = [
            early.get(file) or library.bare_memory(times * size, huge, 0)
            for file, size in zip(files, sizes, strict=True)
        ]
        error = library.bare_read(
            (ctypes.c_char_p * len(files))(*(os.fsencode(file) for file in files)),
            (ctypes.c_size_t * len(files))(*sizes),
            (ctypes.c_void_p * len(files))(*bases),
            len(files),
            int(settings["request_kib"]) << 10,
            int(settings["depth"]),
            int(settings["threads"]),
            times - 1,
            int(settings["cache"] == "mapped"),
        )
        if error:
            raise OSError(-error, os.strerror(-error))
        return Loaded(
            {
                name: (base + times * offset, times * nbytes)
                for file, base in zip(files, bases, strict=True)
                for name, (offset, nbytes) in (tables.get(file) or ranges(file)).items()
            },
            None,
            {},
        )

    def prepare() -> None:
        if settings["memory"] == "backed":
            for file in tables:
                early[file] = library.bare_memory(times * file.stat().st_size, huge, 1)

    return Opened(load, prepare)


def open_transformers(wanted: Wanted) -> Opened:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return _model_load(AutoModelForCausalLM.from_pretrained, wanted)


def open_gdsload_model(wanted: Wanted) -> Opened:
    from transformers import AutoModelForCausalLM  # noqa: F401 - imported outside the clock

    import gdsload

    return _model_load(gdsload.from_pretrained, wanted)


def _model_load(from_pretrained: Callable[..., Any], wanted: Wanted) -> Opened:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    # Imports the module of the model, which the rehearsal does not: its model is another one.
    MODEL_FOR_CAUSAL_LM_MAPPING.get(type(AutoConfig.from_pretrained(str(wanted.source))), None)
    settings = {"dtype": "auto", **wanted.settings}
    if wanted.device != CPU:
        settings["device_map"] = {"": wanted.device}

    def load(source: Path) -> Loaded:
        model = from_pretrained(str(source), **settings)
        state = model.state_dict()
        # A tied weight is one tensor under two names. It is touched once, by the first, which is
        # usually that of the file.
        unique: dict[int, str] = {}
        for name, tensor in state.items():
            unique.setdefault(tensor.data_ptr(), name)
        return tensors({name: state[name] for name in unique.values()}, model)

    return Opened(load)
