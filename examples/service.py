"""A server that starts reading its weights before it imports torch.

    pip install '.[examples]'   # in a checkout of gdsload
    MODEL=./model POOL_BYTES=4294967296 uvicorn --app-dir examples service:app

GET /health      503 until the model is ready, then 200, with the progress of weights and modules
POST /next       {"tokens": [1, 2, 3]} -> {"token": 42}
GET /metrics     seconds to the end of each phase, prefetched bytes, and the metrics of the load
"""

# ruff: noqa: E402 - the order of the imports is the point
from __future__ import annotations

import os
import time

START = time.monotonic()

import gdsload

if "MODEL" not in os.environ:
    raise SystemExit("service: set MODEL to the directory of a model")
MODEL = os.environ["MODEL"]
# With POOL_BYTES the weights stay in host memory for the next load of the same files.
POOL_BYTES = int(os.environ.get("POOL_BYTES", "0"))
pool = gdsload.warmup.HostPool(POOL_BYTES) if POOL_BYTES else None
prefetch = gdsload.prefetch(MODEL)  # returns in milliseconds; the imports below take seconds

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Body, FastAPI, HTTPException, Response
from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest

log = logging.getLogger("uvicorn.error")
seconds = Gauge("model_ready_seconds", "Seconds from process start to a phase's end", ["phase"])
prefetched = Gauge("model_prefetch_bytes", "Bytes that were prefetched")
prefetched.set_function(lambda: prefetch.progress().landed_bytes)
gdsload.telemetry.record_metrics()
state: dict[str, Any] = {}
modules: list[str] = []  # names of ready modules


def note(phase: str) -> None:
    took = time.monotonic() - START
    seconds.labels(phase).set(took)
    log.info("%s after %.2f s", phase, took)


def imports() -> None:
    """Runs in a thread, so that /health answers meanwhile."""
    import torch
    import transformers  # noqa: F401

    state["torch"] = torch
    note("imports")


async def load() -> None:
    await asyncio.to_thread(imports)
    state["model"] = await gdsload.afrom_pretrained(
        MODEL, dtype="auto", on_module_ready=lambda name, module: modules.append(name)
    )
    note("ready")
    prefetch.close()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    note("server")
    loading = asyncio.create_task(load())
    loading.add_done_callback(failed)
    yield
    prefetch.close()
    loading.cancel()  # ends a running load and frees its memory
    await asyncio.wait([loading])
    if pool is not None:
        pool.close()


def failed(loading: asyncio.Task[None]) -> None:
    if not loading.cancelled() and (error := loading.exception()) is not None:
        # gdsload's error names the file; that of transformers may be about a hub.
        state["error"] = prefetch.report.failure or str(error)
        log.error("the model cannot be loaded: %s", state["error"])


app = FastAPI(lifespan=lifespan)


@app.get("/health")
def health(response: Response) -> dict[str, Any]:
    progress = prefetch.progress()
    ready = "model" in state
    response.status_code = 200 if ready else 503
    return {
        "ready": ready,
        "error": state.get("error", ""),
        "landed_bytes": progress.landed_bytes,
        "wanted_bytes": progress.wanted_bytes,
        "modules": len(modules),
        "pool_bytes": 0 if pool is None else pool.held_bytes,
    }


@app.post("/next")
def next_token(tokens: list[int] = Body(embed=True)) -> dict[str, int]:  # noqa: B008
    if "model" not in state:
        raise HTTPException(503, "the model is not ready")
    torch = state["torch"]
    with torch.inference_mode():
        logits = state["model"](torch.tensor([tokens])).logits
    return {"token": int(logits[0, -1].argmax())}


@app.get("/metrics")
def metrics() -> Response:
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
