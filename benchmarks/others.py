"""Loaders that need a GPU, a format of their own, or NIXL; and the highest rate of a GPU's bus.

What was only ever run where there is a GPU says so in README.md: on a machine without one these
arms are left out with the library's own reason.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from .loaded import CPU, Loaded, Opened, Wanted, files_of, ranges, tensors

BLOCK_BYTES = 4096
PINNED_BYTES = 256 << 20


def convert_tensorizer(source: Path, target: Path) -> None:
    """Writes a checkpoint in tensorizer's own format, and sees to it that it is on the disk."""
    from safetensors.torch import load_file
    from tensorizer import TensorSerializer

    state: dict[str, Any] = {}
    for file in files_of(source):
        state.update(load_file(file))
    path = target / "model.tensors"
    serializer = TensorSerializer(str(path))
    serializer.write_state_dict(state)
    serializer.close()
    with path.open("rb") as written:
        os.fsync(written.fileno())


def open_tensorizer(wanted: Wanted) -> Opened:
    from tensorizer import TensorDeserializer

    def load(source: Path) -> Loaded:
        (file,) = files_of(source)
        # Its mapping frees a tensor that is not asked for, and hands each out as it is read.
        opened = TensorDeserializer(str(file), device=wanted.device, **wanted.settings)
        return tensors({name: opened[name] for name in opened.keys()}, opened)  # noqa: SIM118

    return Opened(load)


def open_nixl(wanted: Wanted) -> Opened:
    """NIXL as its storage examples use it: whole files as one request of many descriptors."""
    import torch
    from nixl import nixl_agent, nixl_agent_config

    settings = dict(wanted.settings)
    plugin, step = settings.pop("plugin"), settings.pop("chunk_kib") << 10
    agent = nixl_agent("bench", nixl_agent_config(backends=[]))
    if plugin not in agent.get_plugin_list() or not agent.get_plugin_mem_types(plugin):
        raise RuntimeError(f"NIXL does not load its plugin {plugin} here")
    agent.create_backend(plugin, {name: str(value) for name, value in settings.items()})
    kind, ordinal = ("DRAM", 0) if wanted.device == CPU else ("VRAM", _ordinal(wanted.device))

    def read(file: Path) -> Any:
        size = file.stat().st_size
        room = torch.empty(size + 2 * BLOCK_BYTES, dtype=torch.uint8, device=wanted.device)
        skip = -room.data_ptr() % BLOCK_BYTES
        whole = room[skip : skip + size]
        base = whole.data_ptr()
        # Its POSIX backend takes a short read for a failure: the end is read the ordinary way.
        direct = size // BLOCK_BYTES * BLOCK_BYTES
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        known = []
        try:
            known = [
                agent.register_memory([(base, direct, ordinal, "")], kind, backends=[plugin]),
                agent.register_memory([(0, direct, fd, "")], "FILE", backends=[plugin]),
            ]
            steps = [(at, min(step, direct - at)) for at in range(0, direct, step)]
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs([(base + at, length, ordinal) for at, length in steps], kind),
                agent.get_xfer_descs([(at, length, fd) for at, length in steps], "FILE"),
                "bench",
                backends=[plugin],
            )
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            if state != "DONE":
                raise OSError(f"NIXL ended its request with {state}")
        finally:
            for registered in known:
                agent.deregister_memory(registered, backends=[plugin])
            os.close(fd)
        with file.open("rb") as rest:
            rest.seek(direct)
            tail = rest.read()
        if tail:
            whole[direct:] = torch.frombuffer(bytearray(tail), dtype=torch.uint8).to(wanted.device)
        return whole

    def load(source: Path) -> Loaded:
        state = {}
        for file in files_of(source):
            whole = read(file)
            for name, (offset, nbytes) in ranges(file).items():
                state[name] = whole[offset : offset + nbytes]
        return tensors(state)

    return Opened(load)


def open_instanttensor(wanted: Wanted) -> Opened:
    import instanttensor

    def load(source: Path) -> Loaded:
        files = [str(file) for file in files_of(source)]
        with instanttensor.safe_open(
            files, framework="pt", device=_ordinal(wanted.device), **wanted.settings
        ) as opened:
            return tensors(dict(opened.tensors()))

    return Opened(load)


def open_prefetch(wanted: Wanted) -> Opened:
    from safetensors import safe_open

    def load(source: Path) -> Loaded:
        state: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            files = [
                stack.enter_context(safe_open(file, framework="pt", device=wanted.device))
                for file in files_of(source)
            ]
            # All files at once, and each tensor when it is there.
            for loader in [file.prefetch(**wanted.settings) for file in files]:
                with loader:
                    state.update(loader)
        return tensors(state)

    return Opened(load)


def open_pinned(wanted: Wanted) -> Opened:
    """As many bytes as the files hold, from pinned memory to the GPU: the bus, and no disk."""
    import torch

    source = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(PINNED_BYTES, dtype=torch.uint8, device=wanted.device)

    def load(path: Path) -> Loaded:
        left = sum(file.stat().st_size for file in files_of(path))
        while left > 0:
            part = min(left, PINNED_BYTES)
            target[:part].copy_(source[:part], non_blocking=True)
            left -= part
        torch.cuda.synchronize(wanted.device)
        return Loaded({}, (source, target), {})

    return Opened(load)


def _ordinal(device: str) -> int:
    return int(device.partition(":")[2] or 0)
