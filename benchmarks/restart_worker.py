"""One process of `restarts`: imports a loader, waits for a line, loads, and reads a byte of each
page. It runs in the environment of its loader, which may be without gdsload."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from . import loaders, worker
from .loaded import Wanted

OPENERS = {
    "gdsload": loaders.open_gdsload,
    "safetensors-mmap": loaders.open_safetensors_mmap,
    "runai": loaders.open_runai,
}


def main() -> None:
    arm, source = sys.argv[1:3]
    name, _, setting = arm.partition(":")
    key, _, value = setting.partition("=")
    settings = {} if key.isupper() or not key else {key: value}  # those in capitals are in place
    opened = OPENERS[name](Wanted(Path(source), settings))
    opened.prepare()
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    loaded = opened.load(Path(source))
    worker.touch_pages(loaded.places)
    seconds = time.monotonic() - begin
    print(json.dumps({"seconds": seconds, "sum": worker.total(loaded.places)}), flush=True)


if __name__ == "__main__":
    main()
