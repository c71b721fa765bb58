"""A program of test_cufile_real.py: loads checkpoints through the real libcufile, in compatibility
mode over a double of CUDA.

    real_cufile.py LIBCUFILE FOLDER SOURCE... BACKEND:REQUEST_BYTES...

Each case runs in a process that is forked after the imports, and writes facts about its loads as
JSON to a file of FOLDER, which is named after the case. Prints the status of each process as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import forked
import gdsload
from devicetensors import device_tensor, raw
from gdsload.backends.cufile import library as library_module
from gdsload.loading import torch_device
from gdsload.memory import staging_ring
from gdsload.system import device_name, shared_libraries


def facts_of(library: str, backend: str, request_bytes: int, sources: list[str]) -> dict[str, Any]:
    patch = pytest.MonkeyPatch()
    patch.setattr(
        shared_libraries,
        "candidates",
        lambda name: [name if name == shared_libraries.CUDA else library],
    )
    patch.setattr(torch_device, "empty", device_tensor)
    patch.setattr(device_name, "require_target", str)
    facts: dict[str, Any] = {"version": library_module.library().version, "paths": [], "equal": 0}
    options = {"allow_compat": True, "request_bytes": request_bytes}
    for source in sources:
        for cache in ("auto", "buffered"):
            got = gdsload.load_file(
                source, "cuda:0", backend=backend, cache=cache, options=options, stall_seconds=20
            )
            for shard in sorted(Path(source).glob("*.safetensors")):
                for name, tensor in safetensors.torch.load_file(shard).items():
                    assert torch.equal(raw(got[name]), raw(tensor)), name
                    facts["equal"] += 1
            report = gdsload.last_report()
            facts["paths"].append(report.paths)
            facts["engine"] = report.engine
            assert sum(report.paths.values()) == report.read_bytes
            del got
    facts["limits"] = library_module._driver[0].limits
    staging_ring.release_rings()
    facts["rings"] = len(staging_ring.rings())
    return facts


def write_facts(folder: str, case: str, library: str, sources: list[str]) -> None:
    backend, _, nbytes = case.partition(":")
    facts = facts_of(library, backend, int(nbytes), sources)
    Path(folder, case).write_text(json.dumps(facts))


def main(library: str, folder: str, *words: str) -> dict[str, int]:
    sources = [word for word in words if ":" not in word]
    ended = {}
    for case in words[len(sources) :]:
        child = forked.fork()
        if child == 0:
            forked.end_with(partial(write_facts, folder, case, library, sources))
        ended[case] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return ended


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
