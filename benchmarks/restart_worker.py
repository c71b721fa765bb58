"""One process of `restarts`: imports a loader, waits for a line, loads, and reads a byte of each
page. It runs in the environment of its loader, which may be without gdsload."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path

from . import loaders
from .loaded import Wanted

OPENERS = {
    "gdsload": loaders.open_gdsload,
    "safetensors-mmap": loaders.open_safetensors_mmap,
    "runai": loaders.open_runai,
}
STEP_BYTES = 4096


def main() -> None:
    import torch

    arm, source = sys.argv[1:3]
    name, _, setting = arm.partition(":")
    settings = dict([setting.split("=")]) if setting else {}
    opened = OPENERS[name](Wanted(Path(source), settings))
    opened.prepare()
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    loaded = opened.load(Path(source))
    total = 0
    for address, nbytes in loaded.places.values():
        if nbytes:
            data = (ctypes.c_uint8 * nbytes).from_address(address)
            total += int(torch.frombuffer(data, dtype=torch.uint8)[::STEP_BYTES].sum())
    print(json.dumps({"seconds": time.monotonic() - begin, "sum": total}), flush=True)


if __name__ == "__main__":
    main()
