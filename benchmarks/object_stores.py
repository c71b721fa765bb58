"""Real servers of object stores on loopback; `scripts/test-remote.sh` builds them:

    s3   versitygw          gs   fake-gcs-server          az   Azurite

Each serves a copy of one directory as the bucket `BUCKET`. `slowed` puts a proxy before a server:
every request waits for its answer, as it does in a network.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest import mock

from . import places

TOOLS = places.ROOT / ".cache/remote"
BUCKET = "bucket"
START_SECONDS = 60.0
ACCOUNT = "devstoreaccount1"  # and its key: constants of the Azure emulator
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@dataclass(frozen=True)
class ObjectStore:
    """A running server.

    Attributes:
        scheme: "s3", "gs" or "az".
        port: Of 127.0.0.1.
    """

    scheme: str
    port: int

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that lead clients to the server."""
        origin = f"http://127.0.0.1:{self.port}"
        if self.scheme == "s3":
            return {
                "AWS_ENDPOINT_URL": origin,
                "AWS_ALLOW_HTTP": "true",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "access",
                "AWS_SECRET_ACCESS_KEY": "secret-of-tests",
            }
        if self.scheme == "gs":
            return {
                "GOOGLE_BASE_URL": origin,
                "GOOGLE_ALLOW_HTTP": "true",
                "GOOGLE_SKIP_SIGNATURE": "true",
            }
        return {
            "AZURITE_BLOB_STORAGE_URL": origin,
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        }

    def url(self, path: str = "") -> str:
        return f"{self.scheme}://{BUCKET}/{path}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running(command: list[str], port: int, environment: dict[str, str]) -> Iterator[None]:
    """A server process, from its first open port to the end of the block."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            limit = time.monotonic() + START_SECONDS
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1.0).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > limit:
                        log.seek(0)
                        said = log.read().decode(errors="replace").strip()[-500:]
                        raise RuntimeError(f"{command[0]} does not serve: {said}") from None
                    time.sleep(0.05)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _upload(store: Any, directory: Path) -> None:
    import obstore

    for path in sorted(directory.rglob("*")):
        if path.is_file():
            obstore.put(store, path.relative_to(directory).as_posix(), path)


def _client(server: ObjectStore) -> Any:
    """A client of obstore, which reads its settings from the environment variables."""
    from obstore.store import AzureStore, GCSStore, S3Store

    kind: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[server.scheme]
    with mock.patch.dict(os.environ, server.environment):
        return kind(BUCKET)


@contextmanager
def s3(directory: Path, work: Path) -> Iterator[ObjectStore]:
    """versitygw with a copy of `directory`; `work` is an empty directory for it."""
    server = ObjectStore("s3", free_port())
    (work / BUCKET).mkdir()
    command = [
        str(TOOLS / "bin/versitygw"), "--port", f"127.0.0.1:{server.port}", "--keep-alive",
        "--quiet", "posix", str(work),
    ]  # fmt: skip
    keys = {"ROOT_ACCESS_KEY": "access", "ROOT_SECRET_KEY": "secret-of-tests"}
    with _running(command, server.port, keys):
        _upload(_client(server), directory)
        yield server


@contextmanager
def gs(directory: Path, work: Path) -> Iterator[ObjectStore]:
    """fake-gcs-server with a copy of `directory`; `work` is an empty directory for it."""
    server = ObjectStore("gs", free_port())
    host = f"127.0.0.1:{server.port}"
    command = [
        str(TOOLS / "bin/fake-gcs-server"), "-backend", "memory", "-data", str(work),
        "-scheme", "http", "-host", "127.0.0.1", "-port", str(server.port),
        "-public-host", host, "-external-url", f"http://{host}", "-log-level", "error",
    ]  # fmt: skip
    shutil.copytree(directory, work / BUCKET)  # obstore uploads with credentials only
    with _running(command, server.port, {}):
        yield server


@contextmanager
def az(directory: Path, work: Path) -> Iterator[ObjectStore]:
    """Azurite with a copy of `directory`; `work` is an empty directory for it."""
    server = ObjectStore("az", free_port())
    command = [
        "node", str(TOOLS / "node_modules/azurite/dist/src/blob/main.js"), "--silent",
        "--blobHost", "127.0.0.1", "--blobPort", str(server.port), "--location", str(work),
        "--skipApiVersionCheck", "--disableTelemetry",
    ]  # fmt: skip
    with _running(command, server.port, {}):
        _make_container(server)
        _upload(_client(server), directory)
        yield server


def _make_container(server: ObjectStore) -> None:
    """Creates `BUCKET`, which obstore cannot: a request signed with the emulator's key."""
    stated = f"x-ms-date:{formatdate(usegmt=True)}\nx-ms-version:2023-11-03"
    resource = f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    text = "PUT" + "\n" * 12 + f"{stated}\n{resource}"
    signature = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    connection = HTTPConnection("127.0.0.1", server.port, timeout=START_SECONDS)
    connection.request(
        "PUT",
        f"/{ACCOUNT}/{BUCKET}?restype=container",
        headers={
            **dict(line.split(":", 1) for line in stated.splitlines()),
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}",
        },
    )
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    if answer.status != 201:
        raise RuntimeError(f"Azurite made no container: {answer.status} {said[:300]!r}")


SERVERS = {"s3": s3, "gs": gs, "az": az}


@contextmanager
def serving(scheme: str, directory: Path, beside: Path | None = None) -> Iterator[ObjectStore]:
    """A server of a scheme with a copy of a directory.

    Args:
        scheme: "s3", "gs" or "az".
        directory: Its files become the objects.
        beside: Where the copy is made; None for the directory of temporary files.
    """
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=beside) as work, ExitStack() as stack:
        yield stack.enter_context(SERVERS[scheme](directory, Path(work)))


@contextmanager
def slowed(server: ObjectStore, seconds: float) -> Iterator[ObjectStore]:
    """The same store where each request takes `seconds` more; a process of its own does that."""
    port = free_port()
    command = places.command(sys.executable, "latency_proxy")
    arguments = [str(port), str(server.port), str(seconds)]
    with _running([*command, *arguments], port, {}):
        yield replace(server, port=port)
