"""The metadata service of a source, and what its readers make of its answers."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from gdsload.peers.publication import Publication
from gdsload.peers.service import Served, Service
from gdsload.peers.tickets import Tickets
from gdsload.remote.messages import receive, send
from gdsload.remote.peer import PeerDirectory

FILES = {"config.json": b"{}", "../outside": b"x", "/absolute": b"x", "a/b": b"x", "..": b"x"}


@pytest.fixture
def service() -> Iterator[Service]:
    """A service of small files as version "v"."""
    service = Service("m", "127.0.0.1", 0, Tickets(1, 1, 1.0))
    service.publish(Served(Publication("v", {}, FILES), "agent", b"", "UCX"))
    yield service
    service.close()


def test_names_that_lead_elsewhere_are_left_out(service: Service) -> None:
    directory = PeerDirectory(f"nixl://127.0.0.1:{service.port}/m")
    assert list(directory.names()) == ["config.json"]
    assert directory.read("config.json", 100) == b"{}"


@pytest.mark.parametrize("name", [[], {}, None, 3])
def test_name_that_is_no_text_is_no_file(
    service: Service, caplog: pytest.LogCaptureFixture, name: Any
) -> None:
    with (
        caplog.at_level(logging.ERROR),
        socket.create_connection(("127.0.0.1", service.port), 60) as to,
    ):
        send(to, {"op": "file", "version": "v", "name": name})
        assert receive(to)[0] == {"error": "name"}
    assert not caplog.records
