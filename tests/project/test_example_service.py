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
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")
pytest.importorskip("gdsload.integrations.transformers.model")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PATIENCE_SECONDS = 240


@pytest.fixture
def address(tiny_checkpoint: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLES), "service:app"]
        words = {"MODEL": str(tiny_checkpoint), "POOL_BYTES": str(1 << 30), "HF_HUB_OFFLINE": "1"}
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
            said = server.communicate(timeout=PATIENCE_SECONDS)[1]
    assert "ready after" in said and "Traceback" not in said, said


def ask(url: str, body: object = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_service_becomes_ready_and_answers(address: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    seen = []
    while time.monotonic() < deadline:  # the socket listens already: the first request waits
        code, text = ask(f"{address}/health")
        seen.append(code)
        if code == 200:
            break
        time.sleep(0.2)  # asking takes as much of a busy machine as importing
    health = json.loads(text)
    assert set(seen) <= {200, 503} and health["ready"], text
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
