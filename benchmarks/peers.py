"""Loads from the memory of another process beside loads from the disk, and the rate of bare NIXL.

    python -m benchmarks.peers DIRECTORY

One process serves the checkpoint (`gdsload serve`); each load is one of a new process, into host
memory, timed around `load_file`. The disk is cold: the files are evicted from the page cache first.
Bare NIXL reads the same memory in requests of 8 MiB, 8 in flight, into one registered buffer, over
and over: no copy, no tickets, no tensors. CPU seconds are those of the process that loads, of the
child process that it starts for NIXL, and of the source while the first of them lives.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from . import cache, records, values
from .loaded import files_of
from .serve_process import serving

DEPTH, REQUEST_BYTES = 8, 8 << 20
PATIENCE_SECONDS = 300
WAYS = ("bare NIXL", "peer", "disk, cold")


def bare(url: str) -> dict[str, Any]:
    """Reads all segments of a peer's files through NIXL in this process."""
    import ctypes

    from gdsload.remote.nixl_library import new_agent
    from gdsload.remote.peer import PeerDirectory

    directory = PeerDirectory(url)
    files = [directory.open(name) for name in directory.names() if name.endswith(".safetensors")]
    directory.quiesce()  # ends the process that has started for the reads of these files
    peer = directory.source
    agent = new_agent("gdsload-bench", peer.plugin, {}, progress=False)
    buffer = ctypes.create_string_buffer(DEPTH * REQUEST_BYTES)
    address = ctypes.addressof(buffer)
    agent.register_memory([(address, len(buffer), 0, "")], "DRAM")
    agent.add_remote_agent(peer.metadata)
    wanted = [
        (segment.address + start, min(REQUEST_BYTES, segment.nbytes - start), segment.device)
        for contents in directory._contents.values()
        for segment in contents.segments
        for start in range(0, segment.nbytes, REQUEST_BYTES)
    ]
    nbytes = sum(each[1] for each in wanted)
    started, before = time.monotonic(), os.times()
    free, active = list(range(DEPTH)), []
    while wanted or active:
        while wanted and free:
            slot, remote = free.pop(), wanted.pop()
            local = [(address + slot * REQUEST_BYTES, remote[1], 0)]
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(local, "DRAM"),
                agent.get_xfer_descs([remote], "DRAM"),
                peer.agent,
            )
            agent.transfer(handle)
            active.append((slot, handle))
        for slot, handle in list(active):
            if agent.check_xfer_state(handle) == "DONE":
                handle.release()
                active.remove((slot, handle))
                free.append(slot)
    seconds = time.monotonic() - started
    cpu_seconds = used(before)
    for file in files:
        file.close()
    return {"bytes": nbytes, "seconds": seconds, "cpu_seconds": cpu_seconds}


def used(before: os.times_result) -> dict[str, float]:
    """The CPU seconds of this process since then, and of its children that have ended."""
    now = os.times()
    return {
        "reader": now.user + now.system - before.user - before.system,
        "child": (
            now.children_user + now.children_system - before.children_user - before.children_system
        ),
    }


def load(source: str) -> dict[str, Any]:
    """One load into host memory."""
    import torch  # noqa: F401 - not part of the time

    import gdsload

    started, before = time.monotonic(), os.times()
    tensors = gdsload.load_file(source)
    seconds = time.monotonic() - started
    cpu_seconds = used(before)
    report = gdsload.last_report()
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    paths = dict(report.paths) if report else {}
    return {"bytes": nbytes, "seconds": seconds, "cpu_seconds": cpu_seconds, "paths": paths}


def worker(way: str, source: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.peers", "--worker", way, source]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise records.Refused(f"{way}: no end after {PATIENCE_SECONDS} s") from error
    if ran.returncode:
        raise records.Refused(f"{way}: {ran.stderr[-500:]}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def measured(directory: Path, repeats: int) -> list[dict[str, Any]]:
    """Each way `repeats` times, in turns."""
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with serving(directory) as (process, url):
        server = psutil.Process(process.pid)
        for turn in range(repeats):
            for way in records.in_turn(WAYS, turn):
                if way == "disk, cold" and (left := cache.evict(files_of(directory))):
                    raise records.Refused(f"{directory}: {left:,} bytes stay in the page cache")
                before = server.cpu_times()
                one = worker(way, str(directory) if way == "disk, cold" else url)
                now = server.cpu_times()
                one["cpu_seconds"]["source"] = now.user + now.system - before.user - before.system
                rounds[way].append(one)
    return [
        {
            "way": way,
            "bytes": found[0]["bytes"],
            "seconds": [each["seconds"] for each in found],
            "cpu_seconds": [each["cpu_seconds"] for each in found],
            "paths": sorted(found[0].get("paths", ())),
        }
        for way, found in rounds.items()
    ]


def main(words: list[str] | None = None) -> int:
    parser = records.parser_of("python -m benchmarks.peers", __doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--repeats", type=values.whole, default=3)
    records.add_output(parser)
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["--worker"]:
        sys.stdout.write(
            "\n" + json.dumps((bare if words[1] == WAYS[0] else load)(words[2])) + "\n"
        )
        sys.stdout.flush()
        os._exit(0)  # NIXL's own end may crash
    options = parser.parse_args(words)
    try:
        records.require_room(options)
        ways = measured(options.directory, options.repeats)
    except records.Refused as error:
        print(f"benchmarks.peers: no result: {error}", file=sys.stderr)
        return 1
    result = records.record("peers", options.directory, ways=ways)
    for entry in result["ways"]:
        seconds = statistics.median(entry["seconds"])
        cpu_seconds = {
            process: round(statistics.median(each[process] for each in entry["cpu_seconds"]), 2)
            for process in entry["cpu_seconds"][0]
        }
        print(
            f"{entry['way']:12} {seconds:6.2f} s  {entry['bytes'] / seconds / 1e9:5.2f} GB/s ",
            f"CPU seconds: {cpu_seconds}",
            entry["paths"],
        )
    print(records.keep(result, options, "peers"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
