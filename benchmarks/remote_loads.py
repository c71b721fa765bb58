"""Loads from other processes, for `faults`: object store, local cache, several sources, a peer.

    folder/plain, folder/model ──► the stand-in of the tests (S3) ──► loads
    folder/plain               ──► gdsload serve (NIXL)           ──► loads

The client of the object store has threads, which a fork does not copy: a process that has made one
of these loads cannot fork others that make them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from . import places
from .serve_process import serving

TESTS = places.ROOT / "tests"
PEER = "load_file nixl"  # each load starts a process with NIXL, which takes seconds
FILLING, FILLED = "load_file s3 filling the cache", "load_file s3 from the cache"
NAMES = (
    "load_file s3", "stream s3", "from_pretrained s3", FILLING, FILLED, "load_file replicas", PEER,
)  # fmt: skip
PEER_SECONDS = 15.0  # given to a load from a peer until its first byte
RETRY_SECONDS = 3.0  # given to the client, and for bytes that another process fetches
_STAND_IN = """
import sys
from pathlib import Path
from object_server import serving
with serving(Path(sys.argv[1])) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""

Load = Callable[[], Mapping[str, Any]]


def why_not(name: str) -> str:
    """Why a load cannot be made here; "" if it can."""
    if name == PEER:
        return "" if importlib.util.find_spec("nixl_cu13") else "nixl is not installed"
    if not importlib.util.find_spec("obstore"):
        return "obstore is not installed"
    return "" if (TESTS / "object_server.py").exists() else "its server is among the tests"


class RemoteLoads:
    """The servers, and loads from them.

    Attributes:
        loads: By name.
    """

    def __init__(self, folder: Path, names: list[str], words: Mapping[str, Any]) -> None:
        """Starts what these loads need.

        Args:
            folder: Has checkpoints in `plain` and `model`.
            names: Some of `NAMES`.
            words: Arguments of every load.
        """
        from transformers import LlamaConfig

        self._folder, self._words, self._stack = folder, words, ExitStack()
        self._config = LlamaConfig.from_pretrained(folder / "model")
        try:
            self._url = self._peer = ""
            if set(names) - {PEER}:
                self._url = self._stack.enter_context(_object_store(folder))
            if PEER in names:
                self._peer = self._stack.enter_context(serving(folder / "plain"))[1]
        except BaseException:
            self._stack.close()
            raise
        cached = partial(self._load_file, cache=True)
        made: dict[str, Load] = {
            "load_file s3": self._load_file, "stream s3": self._stream,
            "from_pretrained s3": self._from_pretrained, FILLING: cached, FILLED: cached,
            "load_file replicas": self._replicas, PEER: self._from_peer,
        }  # fmt: skip
        self.loads = {name: made[name] for name in names}

    def close(self) -> None:
        self._stack.close()

    def place(self, name: str) -> None:
        """Empties or fills the cache, as the load needs it."""
        if name in (FILLING, FILLED):
            shutil.rmtree(self._cache, ignore_errors=True)
        if name == FILLED:
            self._load_file(cache=True)
            for thread in threading.enumerate():
                if thread.name == "gdsload-cache":  # flushes the files
                    thread.join()

    @property
    def _cache(self) -> Path:
        return self._folder / f"cache-{os.getpid()}"

    def _load_file(self, cache: bool = False) -> Mapping[str, Any]:
        import gdsload

        words = {**self._words, "cache_dir": self._cache} if cache else self._words
        return gdsload.load_file(f"{self._url}/plain", **words)

    def _stream(self) -> Mapping[str, Any]:
        import gdsload

        return dict(gdsload.stream(f"{self._url}/plain", window_bytes=1 << 20, **self._words))

    def _from_pretrained(self) -> Mapping[str, Any]:
        from transformers import LlamaForCausalLM

        import gdsload

        with gdsload.accelerated(stall_seconds=self._words["stall_seconds"]):
            url = f"{self._url}/model"
            # With its config, as in `faults.loads_of`.
            made = gdsload.from_pretrained(url, cls=LlamaForCausalLM, config=deepcopy(self._config))
            return dict(made.state_dict())

    def _replicas(self) -> Mapping[str, Any]:
        import gdsload

        source = gdsload.replicas(f"{self._url}/plain", self._folder / "plain")
        return gdsload.load_file(source, options={"request_bytes": 256 << 10}, **self._words)

    def _from_peer(self) -> Mapping[str, Any]:
        import gdsload

        return gdsload.load_file(self._peer, **{**self._words, "stall_seconds": PEER_SECONDS})


@contextmanager
def _running(command: list[str], **settings: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **settings
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _object_store(folder: Path) -> Iterator[str]:
    """The URL of a bucket with the directories in `folder`, which this process then reaches."""
    from gdsload.remote import cache, object_store

    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    certificates = folder / "certificates"
    certificates.mkdir()
    with ExitStack() as stack:
        command = [sys.executable, "-c", _STAND_IN, str(folder)]
        server = stack.enter_context(_running(command, env=environment))
        assert server.stdout is not None
        variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(server.stdout.readline())}",
            "AWS_SKIP_SIGNATURE": "true",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            # Otherwise each load reads all certificates of the system, some hundred files.
            "SSL_CERT_DIR": str(certificates),
            "GDSLOAD_CACHE_BYTES": "1000000000",  # however full the disk is
        }
        stack.enter_context(mock.patch.dict(os.environ, variables))
        for module, name in (
            (object_store, "SILENCE_SECONDS"),
            (object_store, "RETRY_SECONDS"),
            (cache, "CLAIM_SECONDS"),
        ):
            stack.enter_context(mock.patch.object(module, name, RETRY_SECONDS))
        yield "s3://bucket"
