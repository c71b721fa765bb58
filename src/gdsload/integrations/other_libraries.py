"""Entry points of gdsload in accelerate, diffusers, peft and safetensors.

    safetensors files   read by functions of safetensors: gdsload's are called in their place
    other files         read by the library itself: the report says so

No library is imported here. Not responsible for transformers (`transformers.hooks`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from weakref import WeakSet

from gdsload.integrations.transformers.hooks import (
    STOCK,
    THREAD_POOL,
    Call,
    active,
    chosen,
    note,
    outer_report,
    reported,
    unmapped,
)
from gdsload.integrations.transformers.model_reader import Options
from gdsload.integrations.transformers.monkeypatch import (
    Misfit,
    Patch,
    Replacement,
    function_of,
    held,
)
from gdsload.integrations.transformers.stand_ins import original as original_of

# Readers that replace those of the libraries. A module that is imported meanwhile may keep one.
_readers: WeakSet[Call] = WeakSet()


def _reader(name: str, file: str) -> Patch:
    """Reports the files that another library's function reads by itself.

    `file` is its first parameter. It reads safetensors files by functions that are replaced, too.
    Two arguments would prevent that: with `disable_mmap=True`, diffusers reads by itself; with a
    device_map of cpu and disk, accelerate asks for each tensor alone. They are replaced by others
    with the same result.
    """

    def replacements(module: ModuleType) -> Iterator[Replacement]:
        original = function_of(module, name, file)
        if original in _readers:
            return
        reason = f"it is not a .safetensors file: {module.__name__.partition('.')[0]} reads it"

        @functools.wraps(original)
        def read(*args: Any, **named: Any) -> Any:
            options, path = active(), args[0] if args else named.get(file)
            if options is None or not isinstance(path, (str, os.PathLike)):
                return original(*args, **named)
            if str(path).endswith(".safetensors"):
                if named in ({"disable_mmap": True}, {"disable_mmap": True, "dduf_entries": None}):
                    # diffusers would have the bytes in memory twice.
                    with held(chosen, unmapped(options)):
                        return original(*args, disable_mmap=False)
                if set((named.get("device_map") or {}).values()) == {"cpu", "disk"}:
                    # All goes to the CPU first. accelerate would ask for each tensor alone.
                    with held(chosen, _mapped(options, path)):
                        return original(*args, **{**named, "device_map": {"": "cpu"}})
                return original(*args, **named)
            if (outer := outer_report.get()) is not None:
                outer.refusals[f"gdsload on {path}"] = reason
                return original(*args, **named)
            with reported(str(path)) as report:
                note(report, STOCK, reason)
                return original(*args, **named)

        _readers.add(read)
        yield Replacement(module, name, read)

    return Patch(name, replacements)


def _mapped(options: Options, source: Any) -> Options:
    """The options for tensors that are mostly written to other files and dropped: their files may
    be larger than the memory of the machine."""
    reading = options.reading
    fits = reading.cache == "auto" and reading.verify == "size" and original_of(source) == source
    return options.with_reading(cache="mapped") if fits else options


def _patch_from_pretrained(module: ModuleType) -> Iterator[Replacement]:
    """Maps the files of a model of diffusers that may be offloaded to disk."""
    owner, name = function_of(module, "ModelMixin"), "from_pretrained"
    raw = vars(owner).get(name)
    if not isinstance(raw, classmethod):
        raise Misfit("it is no class method")
    plain = raw.__func__

    @functools.wraps(plain)
    def from_pretrained(cls: Any, *args: Any, **words: Any) -> Any:
        options, devices = active(), words.get("device_map")
        to_disk = words.get("offload_folder") is not None and devices is not None
        if isinstance(devices, dict):
            to_disk = to_disk and "disk" in devices.values()
        if options is None or not to_disk or words.get("disable_mmap"):
            return plain(cls, *args, **words)
        source = args[0] if args else words.get("pretrained_model_name_or_path")
        with held(chosen, _mapped(options, source)):
            return plain(cls, *args, **words)

    yield Replacement(owner, name, classmethod(from_pretrained))


def _drop_in(name: str, drop_in: Callable[[Call], Call]) -> Patch:
    """Replaces a function of safetensors, or one that another package imports from there."""
    return Patch(
        name, lambda module: [Replacement(module, name, drop_in(function_of(module, name)))]
    )


def _drop_in_open(original: Call) -> Call:
    @functools.wraps(original)
    def safe_open(filename: Any, framework: str = "pt", device: Any = "cpu", **rest: Any) -> Any:
        arguments = _arguments(device, **rest)
        if arguments is None or framework != "pt":
            return original(filename, framework=framework, device=device, **rest)
        from gdsload import safe_open as ours

        return ours(original_of(filename), framework, device, **arguments)

    return safe_open


def _drop_in_load(original: Call) -> Call:
    @functools.wraps(original)
    def load_file(filename: Any, device: Any = "cpu", **rest: Any) -> Any:
        arguments = _arguments(device, **rest)
        if arguments is None:
            return original(filename, device=device, **rest)
        from gdsload import load_file as ours

        return ours(original_of(filename), device, progress=False, **arguments)

    return load_file


def _arguments(device: Any, backend: Any = "mmap", **unknown: Any) -> dict[str, Any] | None:
    """Arguments for gdsload's functions, given `backend` of safetensors; None if the call is not
    for gdsload. "mmap" is safetensors' default and means no wish."""
    options = active()
    if options is None or unknown or backend not in ("mmap", "pread"):
        return None
    reading = (unmapped(options) if backend == "pread" else options).reading
    # Libraries open files on the CPU for the names alone, and may load to it what is for a GPU.
    to_host = device is None or str(device).partition(":")[0] == "cpu"
    return (reading.for_host() if to_host else reading).keywords()


PATCHES: dict[str, tuple[Patch, ...]] = {
    "accelerate.utils.modeling": (
        _reader("load_state_dict", "checkpoint_file"),
        _drop_in("safe_open", _drop_in_open),
        _drop_in("safe_load_file", _drop_in_load),
    ),
    "diffusers.models.model_loading_utils": (
        _reader("load_state_dict", "checkpoint_file"),
        THREAD_POOL,
    ),
    "diffusers.models.modeling_utils": (
        _reader("load_state_dict", "checkpoint_file"),
        Patch("ModelMixin.from_pretrained", _patch_from_pretrained),
    ),
    "diffusers.loaders.single_file_utils": (_reader("load_state_dict", "checkpoint_file"),),
    "peft.utils.save_and_load": (
        _drop_in("safe_load_file", _drop_in_load),
        _reader("torch_load", "args"),
    ),
    # diffusers and others call it by this name.
    "safetensors.torch": (_drop_in("load_file", _drop_in_load),),
}
