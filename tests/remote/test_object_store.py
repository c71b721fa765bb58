"""Checkpoints of object stores: finding and opening them, and reading ranges of one version."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import gdsload
from gdsload import Checkpoint
from gdsload.errors import (
    BackendUnavailable,
    CheckpointAccessError,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    FileChanged,
    RemoteError,
)
from gdsload.remote import object_store
from gdsload.remote.directory import is_file_name, open_directory
from gdsload.remote.object_store import ObjectDirectory
from gdsload.remote.urls import (
    joined,
    query_hash,
    replicas,
    shown_source,
    split_file,
    text_without_secrets,
)
from object_server import ObjectServer

pytest.importorskip("obstore")

FIRST = "model-00001-of-00002.safetensors"
SCHEMES = ("s3", "gs", "az", "http")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent and failing servers are given up within a second."""
    monkeypatch.setattr(object_store, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 0.5)


def facts(checkpoint: Checkpoint) -> object:
    return checkpoint.tensors, checkpoint.metadata, [shard.name for shard in checkpoint.shards]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_directory_of_each_scheme_has_the_tensors_of_the_local_one(
    server: ObjectServer, tiny_checkpoint: Path, scheme: str
) -> None:
    with Checkpoint.open(server.url(scheme, "model")) as remote:
        with Checkpoint.open(tiny_checkpoint) as local:
            assert facts(remote) == facts(local)
        assert remote.source == server.url(scheme, "model")
        assert remote.remote
        for shard in remote.shards:
            assert shard.path == server.url(scheme, f"model/{shard.name}")
            assert shard.read(0, 100) == (tiny_checkpoint / shard.name).read_bytes()[:100]
    with pytest.raises(CheckpointError, match="closed"):
        remote.verify_unchanged()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_file_and_index_are_opened_by_their_urls(server: ObjectServer, scheme: str) -> None:
    url = server.url(scheme, "model")
    with Checkpoint.open(f"{url}/model.safetensors.index.json") as whole:
        assert len(whole.shards) == 2
        names = [shard.name for shard in whole.shards]
    with Checkpoint.open(f"{url}/{names[0]}") as one:
        assert set(one.tensors) == {i.name for i in whole.tensors.values() if i.shard == 0}
    with Checkpoint.of([f"{url}/{name}" for name in names]) as listed:
        assert listed.tensors == whole.tensors


def test_each_header_takes_one_request(server: ObjectServer) -> None:
    with Checkpoint.open(server.url("s3", "model")) as opened:
        for shard in opened.shards:
            assert len(server.reads(f"model/{shard.name}")) == 1
    assert len(server.requests) == 4  # the listing and the index


def test_header_beyond_the_first_request_is_read(object_server: ObjectServer) -> None:
    count = 4000
    header = {
        f"layer.{number:05}.weight": {
            "dtype": "U8",
            "shape": [1],
            "data_offsets": [number, number + 1],
        }
        for number in range(count)
    }
    raw = json.dumps(header).encode()
    assert len(raw) > 128 << 10
    data = len(raw).to_bytes(8, "little") + raw + bytes(count)
    (object_server.root / "model.safetensors").write_bytes(data)
    with Checkpoint.open(object_server.url("s3", "model.safetensors")) as opened:
        assert len(opened.tensors) == count
    with pytest.raises(CheckpointError, match="header_limit"):
        Checkpoint.open(object_server.url("s3", "model.safetensors"), header_limit=1000)


def test_subfolder_and_variant_are_found(object_server: ObjectServer, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    folder = object_server.root / "pipeline" / "unet a+b"
    folder.mkdir(parents=True)
    save_file({"x": torch.ones(2)}, folder / "diffusion_pytorch_model.fp16.safetensors")
    with Checkpoint.open(
        object_server.url("s3", "pipeline"), subfolder="unet a+b", variant="fp16"
    ) as opened:
        assert list(opened.tensors) == ["x"]


def test_directory_that_may_not_be_listed_is_opened(server: ObjectServer) -> None:
    server.script("403", path="", count=None)
    with Checkpoint.open(server.url("s3", "model")) as opened:
        assert len(opened.shards) == 2


def test_refused_listing_leaves_no_cycle(server: ObjectServer) -> None:
    """The connections of a directory that nobody uses any more are closed at once."""
    server.script("403", path="", count=None)
    directory = ObjectDirectory(server.url("s3", "model"))
    gone = weakref.ref(directory)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(CheckpointUnreadable, match="403"):
                directory.names()
        assert directory.has("model-00001-of-00002.safetensors")
        del directory
        assert gone() is None
    finally:
        gc.enable()


def test_empty_file_of_a_web_server_is_there(server: ObjectServer) -> None:
    """A range of it is refused."""
    (server.root / "model" / "merges.txt").touch()
    directory = ObjectDirectory(server.url("http", "model"))
    assert directory.has("merges.txt")
    assert not directory.has("missing.txt")


def test_web_server_that_refuses_head_is_read(server: ObjectServer, tiny_checkpoint: Path) -> None:
    server.heads = False
    with (
        Checkpoint.open(server.url("http", "model")) as found,
        Checkpoint.open(tiny_checkpoint) as local,
    ):
        assert facts(found) == facts(local)


def test_user_and_password_are_sent(server: ObjectServer) -> None:
    server.login = "Basic dXMvZXI6d29yZDp4"
    url = server.url("http", "model")
    with pytest.raises(CheckpointAccessError):
        Checkpoint.open(url)
    with Checkpoint.open(url.replace("//", "//us%2Fer:word:x@")) as checkpoint:
        assert "word" not in checkpoint.source


def test_missing_model_is_not_found(server: ObjectServer) -> None:
    for url in (server.url("s3", "nothing"), server.url("s3", "nothing.safetensors")):
        with pytest.raises(CheckpointNotFound) as caught:
            Checkpoint.open(url)
        assert url in str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_bucket_that_is_not_there_is_not_found(server: ObjectServer, scheme: str) -> None:
    server.script("404", count=None)
    with pytest.raises(CheckpointNotFound) as caught:
        Checkpoint.open(server.url(scheme, "model"))
    assert caught.value.path == server.url(scheme, "model")


def test_missing_file_of_a_directory_that_may_not_be_listed_is_forbidden(
    server: ObjectServer,
) -> None:
    server.script("403", path="", count=None)
    with pytest.raises(CheckpointAccessError, match="AWS_ACCESS_KEY_ID"):
        Checkpoint.open(server.url("s3", "nothing"))


def test_limit_of_the_index_holds(server: ObjectServer) -> None:
    with pytest.raises(CheckpointError, match=r"index\.json: .* limit of 100"):
        Checkpoint.open(server.url("s3", "model"), header_limit=100)


def test_unreachable_store_without_variables_names_them(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ObjectDirectory(server.url("s3", "model"))
    failure = RuntimeError("the machine has no role")
    assert "AWS_ACCESS_KEY_ID" not in str(directory.open_error("s3://bucket", failure))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")  # says nothing about the user
    assert "AWS_ACCESS_KEY_ID" in str(directory.open_error("s3://bucket", failure))


def test_web_server_without_usual_names_asks_for_the_file(object_server: ObjectServer) -> None:
    with pytest.raises(CheckpointError, match="give the URL of a file"):
        Checkpoint.open(object_server.url("http", "model"))


def test_forbidden_file_names_the_variables_of_credentials(server: ObjectServer) -> None:
    server.script("403", count=None)
    with pytest.raises(CheckpointAccessError, match="AWS_ACCESS_KEY_ID"):
        Checkpoint.open(server.url("s3", "model"))
    assert len(server.requests) < 8  # nothing is repeated


@pytest.mark.parametrize(
    "fault", ["429", "500", "503", "reset", "truncated", "reset_in_body", "short", "long"]
)
def test_failure_of_one_request_is_repeated(server: ObjectServer, fault: str) -> None:
    with Checkpoint.open(server.url("s3", "model")) as wanted:
        server.script(fault, path="model/*.safetensors", first=1, count=1)
        with Checkpoint.open(server.url("s3", "model")) as opened:
            assert opened.tensors == wanted.tensors


def test_requests_are_repeated_until_the_time_is_over(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_PAUSE_SECONDS", 0.06)
    server.script("503", count=11)  # the client has ten retries by default
    Checkpoint.open(server.url("s3", f"model/{FIRST}")).close()


@pytest.mark.parametrize("path", ["", "model/*.safetensors"])
@pytest.mark.usefixtures("impatient")
def test_outage_is_waited_for_once(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(object_store, "SILENCE_SECONDS", 60.0)  # a busy server is no silent one
    server.script("503", path=path, count=None)
    with pytest.raises(CheckpointUnreadable, match="503"):
        Checkpoint.open(server.url("s3", f"model/{FIRST}" if path else "model"))
    assert {(request.method, request.key) for request in server.requests} == {
        ("GET", f"model/{FIRST}" if path else "")
    }


@pytest.mark.parametrize("fault", ["503", "silent", "silent_in_body", "reset"])
@pytest.mark.usefixtures("impatient")
def test_server_that_fails_for_good_is_an_error(server: ObjectServer, fault: str) -> None:
    server.script(fault, path="model/*.safetensors", count=None)
    with pytest.raises(CheckpointError, match=r"s3://bucket/model/model-00001-of-00002"):
        Checkpoint.open(server.url("s3", "model"))


@pytest.mark.parametrize("fault", ["wrong_range", "range_ignored"])
def test_wrong_range_is_an_error(server: ObjectServer, fault: str) -> None:
    server.script(fault, path="model/*.safetensors", count=None)
    with pytest.raises(CheckpointError, match=r"model-0000[12]-of-00002\.safetensors"):
        Checkpoint.open(server.url("s3", "model"))


def test_compressed_file_is_an_error(server: ObjectServer) -> None:
    server.script("compressed", path="model/*.safetensors", count=None)
    with pytest.raises(CheckpointError, match=r"-of-00002\.safetensors: .*Content-Encoding.*gzip"):
        Checkpoint.open(server.url("s3", "model"))


def test_empty_file_is_reported_as_empty(object_server: ObjectServer) -> None:
    (object_server.root / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="the file is empty"):
        Checkpoint.open(object_server.url("s3", "model.safetensors"))


@pytest.fixture
def large(object_server: ObjectServer) -> Path:
    """A file that is larger than what opening it reads."""
    path = object_server.root / "large.bin"
    path.write_bytes(os.urandom(3 << 20))
    return path


def test_ranges_are_exact(object_server: ObjectServer, large: Path) -> None:
    data = large.read_bytes()
    with_head = open_directory(object_server.url("s3")).open("large.bin")
    for offset, length in ((0, 10), (100_000, 200_000), (1 << 20, 2 << 20), (len(data) - 1, 1)):
        chunks = [bytes(chunk) for chunk in with_head.chunks(offset, length)]
        assert b"".join(chunks) == data[offset : offset + length]


@pytest.mark.parametrize("fault", ["truncated", "reset_in_body", "503"])
def test_body_that_ends_early_is_continued(
    object_server: ObjectServer, large: Path, fault: str
) -> None:
    file = open_directory(object_server.url("s3")).open("large.bin")
    object_server.script(fault, count=2)
    assert file.read(1 << 20, 2 << 20) == large.read_bytes()[1 << 20 :]


def test_range_that_is_compressed_gives_no_bytes(object_server: ObjectServer, large: Path) -> None:
    file = open_directory(object_server.url("s3")).open(large.name)
    object_server.script("compressed", count=None)
    with pytest.raises(RemoteError, match=r"Content-Encoding.*gzip") as caught:
        file.read(1 << 20, 1000)
    assert caught.value.final


@pytest.mark.parametrize("version_id", ["", "null"])  # "null": versioning is suspended
def test_replaced_object_is_a_changed_file(
    object_server: ObjectServer, large: Path, version_id: str
) -> None:
    object_server.version_id = version_id
    file = open_directory(object_server.url("s3")).open("large.bin")
    file.verify_unchanged()
    large.write_bytes(os.urandom(3 << 20))
    with pytest.raises(RemoteError) as caught:
        file.read(1 << 20, 100)
    assert caught.value.final
    with pytest.raises(FileChanged, match="another version"):
        file.verify_unchanged()


@pytest.mark.parametrize("size", [0, 100])
def test_object_that_ends_before_the_range_is_a_changed_file(
    object_server: ObjectServer, large: Path, size: int
) -> None:
    """The server refuses the range, and sends no version."""
    file = open_directory(object_server.url("s3")).open("large.bin")
    before = file.size
    large.write_bytes(os.urandom(size))
    for _ in range(2):
        with pytest.raises(
            RemoteError, match=f"its size went from {before} to {size} bytes"
        ) as raised:
            file.read(1 << 20, 100)
        assert raised.value.final
    with pytest.raises(FileChanged):
        file.verify_unchanged()


@pytest.mark.parametrize("pins", [True, False])
def test_rest_of_a_body_is_of_the_same_version(
    object_server: ObjectServer, large: Path, pins: bool
) -> None:
    object_server.pins = pins
    data = large.read_bytes()
    file = open_directory(object_server.url("s3")).open("large.bin")
    object_server.script("truncated")
    object_server.script("replaced", first=2)
    got = bytearray()
    with suppress(RemoteError):
        for chunk in file.chunks(1 << 20, 2 << 20):
            got += chunk
    assert got == data[1 << 20 : (1 << 20) + len(got)]
    with pytest.raises(RemoteError):
        file.read(1 << 20, 2 << 20)
    with pytest.raises(FileChanged):
        file.verify_unchanged()


@pytest.mark.parametrize("fault", ["short", "long"])
def test_body_of_another_length_gives_no_other_bytes(
    object_server: ObjectServer, large: Path, fault: str
) -> None:
    data = large.read_bytes()
    file = open_directory(object_server.url("s3")).open("large.bin")
    object_server.script(fault, count=None)
    got = bytearray()
    with suppress(RemoteError):
        for chunk in file.chunks(1 << 20, 1 << 20):
            got += chunk
    assert got == data[1 << 20 : (1 << 20) + len(got)]
    assert len(got) <= 1 << 20


def test_body_without_end_is_not_collected(object_server: ObjectServer, large: Path) -> None:
    object_server.script("endless", count=None)
    file = open_directory(object_server.url("s3")).open("large.bin")
    assert file.read(0, 1000) == large.read_bytes()[:1000]
    assert max(request.sent for request in object_server.requests) < 128 << 20


def test_removed_object_is_final(object_server: ObjectServer, large: Path) -> None:
    file = open_directory(object_server.url("s3")).open("large.bin")
    large.unlink()
    with pytest.raises(RemoteError) as caught:
        file.read(1 << 20, 100)
    assert caught.value.final


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/model/", "s3://bucket/model"),
        ("https://user:word@host/a?X-Amz-Signature=abc#f", "https://host/a"),
        ("abfss://container@account.dfs.core.windows.net/a", None),
        ("nixl://[::1]:7700/m", None),
        ("http://host:80/m", None),
        ("https://user:wo/rd@host/a", "https://..."),
        ("https://user:12/word@host/a", "https://..."),
        ("nixl://user:77/word@host/m", "nixl://..."),
        ("https://to/ken@host/a", "https://..."),
        ("https://user:12?word@host/a", "https://..."),
        ("https://host.org/a@b", None),
        ("http://127.0.0.1:80/a@b", None),
        ("http://[::1]:80/a@b", None),
        ("https://[fd00::5]/a@b", None),
        ("https://[fd00::5]:80/a@b", None),
        ("http://localhost:80/a@b", None),
        ("https://first.last:12/word@host/a", "https://..."),
        ("https://host/a?GoogleAccessId=a@b", "https://host/a"),
        ("replica://https://user:word@host/a|./a", "replica://..."),
        ("s3://http://user:word@host:9000/a", "s3://..."),
        ("s3://bucket/a@b", None),
        ("org/model", None),
    ],
)
def test_shown_source_has_no_secrets(url: str, shown: str | None) -> None:
    assert shown_source(url) == (shown or url)


def test_errors_have_no_secrets(object_server: ObjectServer) -> None:
    url = object_server.url("http", "m.safetensors").replace("127", "user:word@127", 1)
    object_server.script("416", count=None)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(f"{url}?sig=hidden")
    text = str(caught.value)
    assert "m.safetensors" in text
    assert "hidden" not in text
    assert "word" not in text
    assert text_without_secrets("GET http://a:b@c/d?sig=e failed") == "GET http://c/d failed"
    assert text_without_secrets("GET http://a:it's@c/d's?sig=e failed") == "GET http://c/d's failed"


@pytest.mark.parametrize(
    "open_source",
    [
        lambda: replicas("https://user:word@host/m?sig=hidden", ""),
        lambda: replicas("https://user:word@host/m?sig=hid|hidden"),
        lambda: Checkpoint.open("https://user:word@ho\u2100st/m"),
        lambda: Checkpoint.open("https://user:wo/word@host/m"),
        lambda: Checkpoint.open("https://user:12/word@host/m"),
        lambda: Checkpoint.open("https://first.last:12/word@host/m"),
        lambda: Checkpoint.open("nixl://user:wo/word@host/m"),
        lambda: Checkpoint.open("nixl://user:77/word@host/m"),
        lambda: Checkpoint.open("nixl://user:word"),
        lambda: Checkpoint.open("https://user:word@host/m\0"),
        lambda: Checkpoint.open("https://user:word@host/m\ud800"),
        # A URL in the place of another argument.
        lambda: gdsload.load_file("model", variant="https://user:word@host/m?sig=hidden"),
        lambda: gdsload.load_file("model", cache="https://user:word@host/m?sig=hidden"),
        lambda: gdsload.prefetch("model", tier="https://user:word@host/m?sig=hidden"),
    ],
)
def test_errors_about_sources_that_are_none_have_no_secrets(
    open_source: Callable[[], object],
) -> None:
    with pytest.raises(ValueError) as caught:
        open_source()
    assert "word" not in str(caught.value)
    assert "hid" not in str(caught.value)


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "/a", "a\0", "é" * 128, "\ud800"])
def test_name_of_something_else_is_no_file_name(name: str) -> None:
    assert not is_file_name(name)
    assert is_file_name("..a") and is_file_name("é" * 127)


def test_query_stays_at_the_end_of_urls() -> None:
    assert joined("https://host/a/?q=1", "b/c") == "https://host/a/b/c?q=1"
    assert joined("s3://bucket", "b") == "s3://bucket/b"
    assert joined("s3://bucket/a%23", "b#/c%20") == "s3://bucket/a%23/b%23/c%2520"
    assert split_file("https://host/a/x%20y.safetensors?q=1") == (
        "https://host/a?q=1",
        "x y.safetensors",
    )


def test_slash_in_the_name_of_a_file_is_refused() -> None:
    """Another file would be asked for."""
    with pytest.raises(CheckpointError, match="has no %2F in it"):
        Checkpoint.open("https://host/o/m%2Fa.safetensors")


def test_signatures_do_not_count_for_the_hash_of_a_query() -> None:
    url = "https://host/a"
    signed = "X-Amz-Date=1&x-goog-Expires=2&Signature=3&sig=4&se=5&Key-Pair-Id=6&token=7"
    assert query_hash(url) == query_hash(f"{url}?") == query_hash(f"{url}?{signed}") == ""
    first, second = query_hash(f"{url}?rev=1"), query_hash(f"{url}?rev=2")
    assert first and first != second
    assert query_hash(f"{url}?{signed}&rev=1") == first


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/a",
        "s3:///model",
        "s3://bucket/model?a=b",
        "gs://bucket/model#2",
        "az://bucket/model#2/model.safetensors",
        "s3://bucket/#/model.safetensors#",
        "https://[::1/model",
        "nixl://[::1/model",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(CheckpointError, match="URL"):
        Checkpoint.open(url)


def test_number_sign_is_written_as_its_code(server: ObjectServer) -> None:
    (server.root / "model").rename(server.root / "model#2")
    with pytest.raises(CheckpointError, match="%23"):
        Checkpoint.open(server.url("s3", "model#2"))
    Checkpoint.open(server.url("s3", "model%232")).close()


def test_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(BackendUnavailable, match=r"pip install '\.\[remote\]'"):
        Checkpoint.open("s3://bucket/model")


def test_mixed_list_of_files_is_refused(server: ObjectServer, tiny_checkpoint: Path) -> None:
    name = "model-00001-of-00002.safetensors"
    with pytest.raises(CheckpointError, match="some of these files are URLs"):
        Checkpoint.of([server.url("s3", f"model/{name}"), str(tiny_checkpoint / name)])


def test_forked_child_gets_an_error(server: ObjectServer) -> None:
    code = f"""
import os
from gdsload import Checkpoint
url = {server.url("s3", "model")!r}
Checkpoint.open(url).close()
child = os.fork()
if not child:
    try:
        Checkpoint.open(url)
    except OSError as error:
        os._exit(7 if "forked" in str(error) else 8)
    os._exit(9)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert ran.stdout.strip() == "7", ran.stderr
