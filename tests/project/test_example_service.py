"""The example server in a process of its own, over HTTP on the loopback interface."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")
pytest.importorskip("gdsload.integrations.transformers.model")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PATIENCE_SECONDS = 240


@contextmanager
def served(model: Path, log: list[str]) -> Iterator[str]:
    """The address of a server of the example. At its end `log` has its output."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLES), "service:app"]
        words = {"MODEL": str(model), "POOL_BYTES": str(1 << 30), "HF_HUB_OFFLINE": "1"}
        environment = os.environ | words
        with subprocess.Popen(
            [*command, "--fd", str(listener.fileno())],
            env=environment,
            pass_fds=[listener.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        ) as server:
            yield f"http://127.0.0.1:{port}"
            server.terminate()
            log.append(server.communicate(timeout=PATIENCE_SECONDS)[1])


def ask(url: str, body: object = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def ended(address: str) -> dict[str, Any]:
    """The answer of /health when the model is ready or has failed."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:  # the socket listens already: the first request waits
        code, text = ask(f"{address}/health")
        health: dict[str, Any] = json.loads(text)
        assert code == (200 if health["ready"] else 503), text
        if health["ready"] or health["error"]:
            return health
        time.sleep(0.2)  # asking takes as much of a busy machine as importing
    raise AssertionError(text)


@pytest.fixture
def address(tiny_checkpoint: Path) -> Iterator[str]:
    log: list[str] = []
    with served(tiny_checkpoint, log) as found:
        yield found
    assert "ready after" in log[0] and "Traceback" not in log[0], log[0]


def test_service_without_a_model_reports_the_error_of_its_prefetch(tmp_path: Path) -> None:
    log: list[str] = []
    with served(tmp_path / "typo", log) as address:
        error = ended(address)["error"]
    assert error == f"CheckpointNotFound: No such file or directory: {tmp_path}/typo"
    assert error in log[0]


def test_service_becomes_ready_and_answers(address: str) -> None:
    health = ended(address)
    assert health["ready"], health
    assert health["landed_bytes"] == health["wanted_bytes"] > 0
    assert health["modules"] > 10
    code, text = ask(f"{address}/next", {"tokens": [1, 2, 3]})
    assert code == 200 and json.loads(text)["token"] >= 0
    code, text = ask(f"{address}/metrics")
    assert code == 200
    values = {}
    for line in text.splitlines():
        with suppress(ValueError):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    phases = [values[f'model_ready_seconds{{phase="{phase}"}}'] for phase in ("imports", "ready")]
    assert 0 < phases[0] <= phases[1]
    assert values["model_prefetch_bytes"] == health["wanted_bytes"]
    assert values['gdsload_loads_total{kind="load"}'] == 1
