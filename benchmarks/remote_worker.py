"""One process of `remote`: imports a loader, waits for a line, loads a checkpoint of an object
store, and reads every byte. It runs in the environment of its loader, which may be without gdsload.

    remote_worker ARM URL...      the URL of the directory, or those of the shards

An arm of gdsload may have options of the backend: `gdsload:depth=64,request_bytes=4194304`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import worker
from .loaded import CPU, Loaded, tensors

RANGE_BYTES = 16 << 20
RANGE_THREADS = 16


def _timed(pairs: Iterator[tuple[str, Any]], began: float) -> Loaded:
    """All tensors, and the seconds to the first one."""
    state = dict([next(pairs)])
    first = time.monotonic() - began
    state.update(pairs)
    return tensors(state, first_s=first)


def open_gdsload(**options: int) -> Callable[[list[str]], Loaded]:
    import torch  # noqa: F401 - its import is not what is measured

    import gdsload

    return lambda urls: tensors(gdsload.load_file(urls[0], options=options, progress=False))


def open_gdsload_stream(**options: int) -> Callable[[list[str]], Loaded]:
    import torch  # noqa: F401

    import gdsload

    def load(urls: list[str]) -> Loaded:
        began = time.monotonic()
        return _timed(iter(gdsload.stream(urls[0], options=options, progress=False)), began)

    return load


def open_runai() -> Callable[[list[str]], Loaded]:
    from runai_model_streamer import SafetensorsStreamer

    def load(urls: list[str]) -> Loaded:
        began = time.monotonic()
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(urls, device=CPU)
            return _timed(iter(streamer.get_tensors()), began)

    return load


def _places(bodies: Mapping[str, Any]) -> Loaded:
    """The tensors of whole files in memory."""
    import ctypes

    import numpy

    places = {}
    for body in bodies.values():
        array = numpy.frombuffer(body, numpy.uint8)
        length = int.from_bytes(array[:8].tobytes(), "little")
        header = json.loads(array[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        address = array.ctypes.data_as(ctypes.c_void_p).value or 0
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            places[name] = address + 8 + length + begin, end - begin
    return Loaded(places, bodies, {})


def _store(url: str) -> tuple[Any, str]:
    from obstore.store import S3Store

    bucket, _, key = url.removeprefix("s3://").partition("/")
    return S3Store(bucket), key


def open_obstore() -> Callable[[list[str]], Loaded]:
    """One request for each shard, one after the other."""
    import obstore

    def load(urls: list[str]) -> Loaded:
        bodies = {}
        for url in urls:
            store, key = _store(url)
            bodies[url] = obstore.get(store, key).bytes()
        return _places(bodies)

    return load


def open_obstore_ranges() -> Callable[[list[str]], Loaded]:
    """Ranges of 16 MiB by sixteen threads, copied into one buffer for each shard."""
    from concurrent.futures import ThreadPoolExecutor

    import obstore

    def load(urls: list[str]) -> Loaded:
        bodies: dict[str, bytearray] = {}
        with ThreadPoolExecutor(RANGE_THREADS) as pool:

            def read(store: Any, key: str, into: memoryview, begin: int) -> None:
                end = min(begin + RANGE_BYTES, len(into))
                into[begin:end] = memoryview(obstore.get_range(store, key, start=begin, end=end))

            jobs = []
            for url in urls:
                store, key = _store(url)
                bodies[url] = bytearray(obstore.head(store, key)["size"])
                into = memoryview(bodies[url])
                for begin in range(0, len(into), RANGE_BYTES):
                    jobs.append(pool.submit(read, store, key, into, begin))
            for job in jobs:
                job.result()
        return _places(bodies)

    return load


OPENERS: dict[str, Callable[..., Callable[[list[str]], Loaded]]] = {
    "gdsload": open_gdsload,
    "gdsload.stream": open_gdsload_stream,
    "runai": open_runai,
    "obstore.get": open_obstore,
    "obstore.get_range, 16 threads": open_obstore_ranges,
}


def main() -> None:
    arm, *urls = sys.argv[1:]
    kind, _, settings = arm.partition(":")
    pairs = (pair.partition("=") for pair in settings.split(",") if pair)
    load = OPENERS[kind](**{name: int(value) for name, _, value in pairs})
    print("ready", flush=True)
    sys.stdin.readline()
    source: Any = urls
    facts, _ = worker.measured(load, source, CPU)
    total = sum(facts["sums"].values()) & 0xFFFFFFFFFFFFFFFF
    kept = ("seconds", "load_s", "cpu_s", "peak_rss_bytes")
    print(
        json.dumps(
            {
                **{name: facts[name] for name in kept},
                "first_s": facts["notes"].get("first_s"),
                "sum": total,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
