"""Fixtures of the tests with object stores."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from object_server import ObjectServer


@pytest.fixture
def server(object_server: ObjectServer, tiny_checkpoint: Path) -> ObjectServer:
    """A server with the tiny checkpoint, in two shards, as bucket/model."""
    shutil.copytree(tiny_checkpoint, object_server.root / "model")
    return object_server


@pytest.fixture
def url(server: ObjectServer) -> str:
    """The URL of this checkpoint by S3."""
    return server.url("s3", "model")
