"""The stand-in for object stores does what the tests that use it rely on, with a real client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from object_server import BUCKET, FAULTS, MOST_CONNECTIONS, Fault, ObjectServer, serving
from threadends import await_most

obstore = pytest.importorskip("obstore")
store_module = pytest.importorskip("obstore.store")

SCHEMES = ("s3", "gs", "az", "http")
DATA = bytes(range(256)) * 400


def once(silence: str = "30s") -> dict[str, Any]:
    """Settings of a client that tries once, and waits `silence` for the next byte."""
    return {
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=60)},
        "client_options": {"timeout": "60s", "read_timeout": silence, "allow_http": True},
    }


@pytest.fixture
def server(object_server: ObjectServer) -> Iterator[ObjectServer]:
    for key in ("model/a.bin", "model/b c.json", "model/deep/c.bin", "other.bin"):
        path = object_server.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(DATA)
    yield object_server


def client(server: ObjectServer, scheme: str, silence: str = "30s") -> Any:
    if scheme == "http":
        return store_module.HTTPStore.from_url(server.url("http"), **once(silence))
    kind = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}[scheme]
    return getattr(store_module, kind)(BUCKET, **once(silence))


def read(store: Any, first: int = 100, end: int = 90_000, **options: Any) -> bytes:
    got = obstore.get(store, "model/a.bin", options={"range": (first, end), **options})
    return b"".join(bytes(chunk) for chunk in got.stream(min_chunk_size=1))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_range_of_every_client_is_exact(server: ObjectServer, scheme: str) -> None:
    assert read(client(server, scheme)) == DATA[100:90_000]
    (request,) = server.requests
    assert (request.first, request.end, request.status, request.sent) == (100, 90_000, 206, 89_900)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_head_and_whole_object(server: ObjectServer, scheme: str) -> None:
    store = client(server, scheme)
    assert obstore.head(store, "model/b c.json")["size"] == len(DATA)
    assert bytes(obstore.get(store, "model/b c.json").bytes()) == DATA
    assert [request.method for request in server.requests] == ["HEAD", "GET"]
    assert server.sent_bytes == len(DATA)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("page", [1, 1000])
def test_listing_has_files_and_directories(server: ObjectServer, scheme: str, page: int) -> None:
    server.page = page
    found = obstore.list_with_delimiter(client(server, scheme), "model")
    assert [entry["path"] for entry in found["objects"]] == ["model/a.bin", "model/b c.json"]
    assert found["common_prefixes"] == ["model/deep"]
    head = obstore.head(client(server, scheme), "model/a.bin")
    assert found["objects"][0]["e_tag"] == head["e_tag"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_object_that_does_not_exist_is_404(server: ObjectServer, scheme: str) -> None:
    with pytest.raises(FileNotFoundError):
        obstore.get(client(server, scheme), "model/missing")


@pytest.mark.parametrize("key", ["model/../../secret", "model", ""])
def test_only_files_below_the_directory_are_served(server: ObjectServer, key: str) -> None:
    (server.root.parent / "secret").write_bytes(b"secret")
    assert server.file_of(key) is None


def test_if_match_pins_the_version(server: ObjectServer) -> None:
    store = client(server, "s3")
    etag = obstore.head(store, "model/a.bin")["e_tag"]
    assert read(store, if_match=etag) == DATA[100:90_000]
    server.script("replaced")
    with pytest.raises(obstore.exceptions.PreconditionError):
        read(store, if_match=etag)
    assert read(store) == bytes(byte ^ 0xFF for byte in DATA[100:90_000])
    server.pins = False
    assert len(read(store, if_match=etag)) == 89_900
    server.restore()
    assert obstore.head(store, "model/a.bin")["e_tag"] == etag


def test_written_file_is_another_version(server: ObjectServer) -> None:
    store = client(server, "s3")
    etag = obstore.head(store, "model/a.bin")["e_tag"]
    (server.root / "model/a.bin").write_bytes(b"other")
    assert obstore.head(store, "model/a.bin")["e_tag"] != etag


@pytest.mark.parametrize(
    "name", [name for name in FAULTS if name not in ("slow", "replaced", "endless")]
)
def test_fault_is_no_exact_answer_and_the_next_one_is(server: ObjectServer, name: str) -> None:
    silence = "500ms" if "silent" in name else "30s"
    server.script(name, path="*.bin")
    try:
        found = read(client(server, "s3", silence))
        assert found != DATA[100:90_000]  # what nobody noticed
        assert name in ("short", "long", "compressed")
    except (obstore.exceptions.BaseError, FileNotFoundError):
        assert name not in ("short", "long", "compressed")
    assert [request.fault for request in server.requests] == [FAULTS[name].kind]
    assert read(client(server, "s3")) == DATA[100:90_000]


def test_faults_strike_the_chosen_requests(server: ObjectServer) -> None:
    store = client(server, "s3")
    server.script("503", path="model/*", first=2, count=2)
    server.script("404", path="other*", count=None)
    outcomes = []
    for key in ["model/a.bin"] * 4 + ["other.bin"] * 2:
        try:
            obstore.get_range(store, key, start=0, end=10)
            outcomes.append(0)
        except FileNotFoundError:
            outcomes.append(404)
        except obstore.exceptions.BaseError:
            outcomes.append(503)
    assert outcomes == [0, 503, 503, 0, 404, 404]


def test_header_of_a_status_reaches_the_client(server: ObjectServer) -> None:
    import http.client

    server.script(Fault("status", 429, headers=(("Retry-After", "7"),)))
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", f"/{BUCKET}/other.bin")
    answer = connection.getresponse()
    connection.close()
    assert (answer.status, answer.getheader("Retry-After")) == (429, "7")


def test_bandwidth_is_limited(server: ObjectServer) -> None:
    server.bytes_per_second = 400_000
    begin = time.monotonic()
    assert read(client(server, "s3"), 0, 100_000) == DATA[:100_000]
    assert time.monotonic() - begin >= 0.2


def test_requests_at_once_are_counted(server: ObjectServer) -> None:
    server.latency_seconds = 1.0
    store = client(server, "s3")
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: read(store, 0, 10), range(8)))
    assert server.most_at_once > 1
    limit = time.monotonic() + 60
    while server.most_at_once:  # a client has its answer before the server is done with it
        assert time.monotonic() < limit
        server.forget()
    assert server.requests == []


def test_silent_connections_end_with_the_server(server: ObjectServer) -> None:
    before = threading.active_count()
    with serving(server.root) as other:
        other.script("silent", count=None)
        store = client(other, "http", "500ms")
        with ThreadPoolExecutor(8) as pool:
            for answer in [pool.submit(read, store, 0, 10) for _ in range(8)]:
                with pytest.raises(obstore.exceptions.BaseError):
                    answer.result()
        assert threading.active_count() - before <= MOST_CONNECTIONS + 1
    await_most(before)
