"""Finding files: directories, variants, indexes, links and the hub cache, without network."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from gdsload.checkpoint.file_io import open_regular
from gdsload.checkpoint.locate import (
    CheckpointFiles,
    ShardPath,
    hub_cache,
    locate,
    shard_name_fault,
)
from gdsload.errors import (
    CheckpointAccessError,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def touch(directory: Path, *names: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).write_bytes(b"")
    return directory


def write_index(path: Path, weight_map: dict[str, str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def names(*args: object, **options: object) -> list[str]:
    found = locate(*args, **options)  # type: ignore[arg-type]
    return [shard.name for shard in found.shards]


@pytest.mark.parametrize(
    "files,options,expected",
    [
        (["model.safetensors", "other.safetensors"], {}, ["model.safetensors"]),
        (["model.safetensors", "model.fp16.safetensors"], {}, ["model.safetensors"]),
        (
            ["model.safetensors", "model.fp16.safetensors"],
            {"variant": "fp16"},
            ["model.fp16.safetensors"],
        ),
        (["diffusion_pytorch_model.safetensors"], {}, ["diffusion_pytorch_model.safetensors"]),
        (["adapter.safetensors", "config.json", "x.bin"], {}, ["adapter.safetensors"]),
        (["b.safetensors", "a.safetensors"], {}, ["a.safetensors", "b.safetensors"]),
        (["a.safetensors", "._a.safetensors"], {}, ["a.safetensors"]),
        (["a\nb.safetensors"], {}, ["a\nb.safetensors"]),
        (["a.fp16.safetensors", "a.safetensors"], {"variant": "fp16"}, ["a.fp16.safetensors"]),
        (
            ["m-00002-of-00002.safetensors", "m-00001-of-00002.safetensors"],
            {},
            ["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"],
        ),
        (
            ["m-00000-of-00001.safetensors"],
            {},
            ["m-00000-of-00001.safetensors"],
        ),
    ],
)
def test_directory_gives_its_shards(
    tmp_path: Path, files: list[str], options: dict[str, str], expected: list[str]
) -> None:
    touch(tmp_path, *files)
    assert names(tmp_path, **options) == expected
    assert names(str(tmp_path) + "/", **options) == expected


def test_subfolder_and_variant_find_an_index(tmp_path: Path) -> None:
    shard = "model.fp16-00001-of-00001.safetensors"
    write_index(tmp_path / "u" / "model.safetensors.index.fp16.json", {"w": shard})
    touch(tmp_path / "u", shard)
    found = locate(tmp_path, subfolder="./u/", variant="fp16")
    assert [shard.path for shard in found.shards] == [str(tmp_path / "u" / shard)]
    assert found.weight_map == {"w": shard}


def test_found_files_have_title_names_paths_and_index(tmp_path: Path) -> None:
    single = str(touch(tmp_path / "one", "model.safetensors") / "model.safetensors")
    shards = (ShardPath("model.safetensors", single),)
    assert locate(single) == CheckpointFiles(single, shards)
    assert locate(tmp_path / "one") == CheckpointFiles(str(tmp_path / "one"), shards)
    touch(tmp_path / "any", "x.safetensors")
    shards = (ShardPath("x.safetensors", str(tmp_path / "any" / "x.safetensors")),)
    assert locate(tmp_path / "any") == CheckpointFiles(str(tmp_path / "any"), shards)
    weight_map = {"w": "a.safetensors"}
    index = str(write_index(tmp_path / "two" / "model.safetensors.index.json", weight_map))
    shards = (ShardPath("a.safetensors", str(tmp_path / "two" / "a.safetensors")),)
    for source in (tmp_path / "two", index):
        assert locate(source) == CheckpointFiles(str(source), shards, weight_map, index)
    only = str(write_index(tmp_path / "three" / "unet.safetensors.index.json", weight_map))
    shards = (ShardPath("a.safetensors", str(tmp_path / "three" / "a.safetensors")),)
    assert locate(tmp_path / "three") == CheckpointFiles(
        str(tmp_path / "three"), shards, weight_map, only
    )


def test_model_precedes_diffusion_model_and_file_precedes_index(tmp_path: Path) -> None:
    write_index(tmp_path / "diffusion_pytorch_model.safetensors.index.json", {"w": "4.safetensors"})
    assert names(tmp_path) == ["4.safetensors"]
    touch(tmp_path, "diffusion_pytorch_model.safetensors")
    assert names(tmp_path) == ["diffusion_pytorch_model.safetensors"]
    write_index(tmp_path / "model.safetensors.index.json", {"w": "2.safetensors"})
    assert names(tmp_path) == ["2.safetensors"]
    touch(tmp_path, "model.safetensors")
    assert names(tmp_path) == ["model.safetensors"]


def test_index_path_gives_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = write_index(tmp_path / "any.index.json", {"b": "2.safetensors", "a": "1.safetensors"})
    assert names(index) == ["1.safetensors", "2.safetensors"]
    monkeypatch.chdir(tmp_path)
    assert names("any.index.json") == ["1.safetensors", "2.safetensors"]


def test_single_index_of_any_name_is_used(tmp_path: Path) -> None:
    write_index(tmp_path / "unet.safetensors.index.json", {"a": "1.safetensors"})
    touch(tmp_path, "1.safetensors", "2.safetensors", "._unet.safetensors.index.json")
    assert names(tmp_path) == ["1.safetensors"]
    write_index(tmp_path / "vae.safetensors.index.json", {"a": "1.safetensors"})
    with pytest.raises(CheckpointError, match="several indexes"):
        locate(tmp_path)


@pytest.mark.parametrize(
    "numbers,present", [("13", 2), ("124", 3), ("01", 2)], ids=["gap", "beyond the end", "end"]
)
def test_missing_numbered_shard_raises(tmp_path: Path, numbers: str, present: int) -> None:
    touch(tmp_path, "a-00001-of-00001.safetensors", "other.safetensors")
    touch(tmp_path, *(f"m-0000{number}-of-00003.safetensors" for number in numbers))
    with pytest.raises(CheckpointError) as caught:
        locate(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: there are {present} of the 3 shards of 'm', and no index"
    )
    assert caught.value.path == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "variant"),
    [("m-1-of-2.safetensors", None), ("m-00001-of-00002.fp16.safetensors", "fp16")],
)
def test_missing_shard_is_found_by_other_forms_of_the_numbers(
    tmp_path: Path, name: str, variant: str | None
) -> None:
    touch(tmp_path, name)
    with pytest.raises(CheckpointError, match="there are 1 of the 2 shards of 'm', and no index"):
        locate(tmp_path, variant=variant)


def test_several_indexes_are_named(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_index(tmp_path / f"{name}.safetensors.index.json", {"w": "a.safetensors"})
    with pytest.raises(CheckpointError) as caught:
        locate(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: several indexes ('a.safetensors.index.json', 'b.safetensors.index.json'):"
        " give the path of one of them"
    )
    assert caught.value.path == str(tmp_path)


def test_files_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    others = ["a.bin", "b.gguf", "c.pt", *(f"d{n}.safetensors" for n in range(6))]
    touch(tmp_path, *others, "e.txt")
    with pytest.raises(CheckpointNotFound) as caught:
        locate(tmp_path, variant="fp8")
    assert str(caught.value) == (
        f"{tmp_path}: there is no model.fp8.safetensors, no index of it and no other safetensors"
        f" file that fits; it holds {', '.join(map(repr, others[:8]))}"
    )
    assert (caught.value.path, caught.value.errno) == (str(tmp_path), errno.ENOENT)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFound, match=r"file that fits$"):
        locate(tmp_path / "empty")


def test_directory_of_shards_skips_directories_of_their_names(tmp_path: Path) -> None:
    touch(tmp_path, "a.safetensors")
    (tmp_path / "b.safetensors").mkdir()
    assert names(tmp_path) == ["a.safetensors"]


def test_index_is_bounded_and_its_format_named(tmp_path: Path) -> None:
    index = write_index(tmp_path / "i.json", {"w": "a.safetensors"})
    size = index.stat().st_size
    assert names(index, limit=size) == ["a.safetensors"]
    with pytest.raises(CheckpointError) as caught:
        locate(index, limit=size - 1)
    assert str(caught.value) == (
        f"{index}: it has {size} bytes, more than the limit of {size - 1} (header_limit raises it)"
    )
    assert caught.value.path == str(index)
    index.write_text(" \n" + index.read_text())
    assert names(index) == ["a.safetensors"]
    index.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="a git-lfs pointer") as caught:
        locate(index)
    assert caught.value.path == str(index)
    index.write_text('{"weight_map": 1}')
    with pytest.raises(CheckpointError, match="weight_map") as caught:
        locate(index)
    assert caught.value.path == str(index)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "the path of a checkpoint is empty"),
        ("a\0b", r"the path 'a\x00b' contains a NUL character"),
        ("a\ud800b", r"the path 'a\ud800b' cannot be encoded"),
    ],
)
def test_path_that_is_none_is_named(name: str, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        locate(name)
    assert str(caught.value) == message


def test_variant_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        locate(tmp_path, variant="../x")
    assert str(caught.value) == "'../x' is not the name of a variant"


def test_missing_model_without_organisation_has_the_path_of_its_folder(cache: Path) -> None:
    with pytest.raises(CheckpointNotFound) as caught:
        locate("other", cache_dir=cache)
    assert caught.value.path == str(cache / "models--other")


def test_directory_that_cannot_be_listed_raises_the_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(CheckpointUnreadable) as caught:
        locate(tmp_path)
    assert str(caught.value) == f"{tmp_path}: it cannot be opened: Input/output error"
    assert (caught.value.path, caught.value.errno) == (str(tmp_path), errno.EIO)


def test_directory_without_safetensors_raises(tmp_path: Path) -> None:
    touch(tmp_path, "pytorch_model.bin", "config.json")
    with pytest.raises(CheckpointNotFound, match=r"it holds 'pytorch_model\.bin'"):
        locate(tmp_path)
    with pytest.raises(CheckpointNotFound, match=r"model\.fp8\.safetensors"):
        locate(tmp_path, variant="fp8")
    with pytest.raises(CheckpointNotFound, match="No such file or directory"):
        locate(tmp_path, subfolder="nowhere")


@pytest.mark.parametrize(
    "source,options,fragment",
    [
        ("", {}, "empty"),
        ("a\0b", {}, "NUL"),
        ("hf://org/model", {}, "URLs of s3://, .*http://, https://, nixl://, replicas:// are read"),
        ("~/model", {}, r"No such file or directory: ~/model \(~ is not expanded here\)"),
        ("/no/such/directory", {}, "No such file or directory"),
        ("./org/name", {}, "No such file or directory"),
        ("missing.safetensors", {}, "No such file or directory"),
        ("../name", {}, "No such file or directory"),
        (".", {"subfolder": "../x"}, "the subfolder '../x' does not stay inside the checkpoint"),
        (".", {"subfolder": "/etc"}, "stay inside"),
        (".", {"subfolder": "\ud800"}, "cannot be encoded"),
        ("org/name", {"revision": "\ud800"}, "cannot be encoded"),
        (".", {"variant": "../x"}, "not the name of a variant"),
        ("org/name", {"revision": "../x"}, "the revision '../x' does not stay inside"),
        ("x" * 5000, {}, "x"),
    ],
)
def test_invalid_source_raises(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    options: dict[str, str],
    fragment: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=fragment):
        locate(source, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"subfolder": b"x"}, {"revision": 5}])
def test_word_of_another_type_raises_type_error(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(options))}=.* must be a str"):
        locate("org/name", **options)


@pytest.mark.parametrize(
    "source", ["", "/no/such/directory", "missing.safetensors", "missing.json"]
)
def test_source_that_does_not_exist_has_the_error_code(source: str) -> None:
    with pytest.raises(CheckpointNotFound) as caught:
        locate(source)
    assert caught.value.errno == errno.ENOENT
    assert (caught.value.path or "") == source


@pytest.mark.parametrize("options", [{"subfolder": "x"}, {"variant": "fp16"}])
def test_file_with_subfolder_or_variant_raises(tmp_path: Path, options: dict[str, str]) -> None:
    file = str(touch(tmp_path, "a.safetensors") / "a.safetensors")
    with pytest.raises(CheckpointError) as caught:
        locate(file, **options)  # type: ignore[arg-type]
    assert str(caught.value) == f"{file}: this is one file and has no subfolder or variant"
    assert caught.value.path == file


# --- what an index may name ----------------------------------------------------------------------

BAD_NAMES = [
    "../x.safetensors",
    "sub/x.safetensors",
    "./x.safetensors",
    "/etc/x.safetensors",
    "..\\x.safetensors",
    "C:\\x.safetensors",
    "x\0.safetensors",
    "..",
    ".",
    "",
    "/etc/passwd",
    "model.bin",
    "x.safetensors/",
    "x.safetensors ",
    "x.SAFETENSORS",
    "file:///x.safetensors",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_index_with_unsafe_shard_name_raises(tmp_path: Path, name: str) -> None:
    index = write_index(
        tmp_path / "m" / "model.safetensors.index.json", {"ok": "a.safetensors", "w": name}
    )
    touch(tmp_path, "x.safetensors")
    with pytest.raises(CheckpointError) as caught:
        locate(tmp_path / "m")
    fault = "is not the plain name of a file next to the index"
    if not set(name) & set("/\\\0"):
        fault = "does not end with .safetensors"
    assert str(caught.value) == (
        f"{index}: its weight_map maps tensor 'w' to {name!r}, which {fault}"
    )
    assert (caught.value.tensor, caught.value.path) == ("w", str(index))


@pytest.mark.parametrize(
    "name", ["X.safetensors", "..a.safetensors", "é ü.safetensors", "-.safetensors"]
)
def test_unusual_safe_shard_name_is_accepted(name: str) -> None:
    assert shard_name_fault(name) == ""


def open_all(source: Path | str, **options: str) -> None:
    found = locate(source, **options)  # type: ignore[arg-type]
    for shard in found.shards:
        os.close(open_regular(shard.path, named_by=found.index_path)[0])


def test_link_to_another_directory_is_followed(tmp_path: Path) -> None:
    touch(tmp_path / "store", "one", "two")
    write_index(tmp_path / "m" / "model.safetensors.index.json", {"w": "a.safetensors"})
    (tmp_path / "m" / "a.safetensors").symlink_to("../store/one")
    open_all(tmp_path / "m")
    (tmp_path / "m" / "a.safetensors").unlink()
    (tmp_path / "m" / "a.safetensors").symlink_to(tmp_path / "store" / "two")
    open_all(tmp_path / "m")
    (tmp_path / "way").symlink_to("m")
    open_all(tmp_path / "way")


def test_shard_name_that_the_system_cannot_write_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "fsencode", lambda name: name.encode("latin-1"))
    assert "cannot be the name of a file here" in shard_name_fault("\u043c.safetensors")
    assert shard_name_fault("\xe4.safetensors") == ""


def test_shard_name_outside_the_directory_raises_even_if_it_exists(
    tmp_path: Path,
) -> None:
    touch(tmp_path, "x.safetensors")
    touch(tmp_path / "m" / "sub", "y.safetensors")
    for name in ("../x.safetensors", str(tmp_path / "x.safetensors"), "sub/../../x.safetensors"):
        write_index(tmp_path / "m" / "model.safetensors.index.json", {"w": name})
        with pytest.raises(CheckpointError, match="not the plain name of a file next to the index"):
            locate(tmp_path / "m")


def test_links_inside_or_named_by_the_user_are_followed(tmp_path: Path) -> None:
    real = tmp_path / "real"
    write_index(real / "model.safetensors.index.json", {"w": "a.safetensors"})
    touch(real / "store", "b")
    (real / "a.safetensors").symlink_to("store/b")
    (tmp_path / "way").symlink_to("real")
    open_all(tmp_path / "way")
    (tmp_path / "file.safetensors").symlink_to("real/store/b")
    open_all(tmp_path / "file.safetensors")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "model.safetensors").symlink_to(real / "store" / "b")
    open_all(tmp_path / "plain")


def test_dangling_links_raise(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("gone")
    with pytest.raises(CheckpointNotFound, match=r"a link to .*gone, which does not exist"):
        open_all(tmp_path)
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    with pytest.raises(CheckpointUnreadable, match="form a loop"):
        open_all(tmp_path / "loop.safetensors")
    write_index(tmp_path / "i.json", {"w": "gone.safetensors"})
    with pytest.raises(CheckpointNotFound, match=r"the index .*i\.json names this shard"):
        open_all(tmp_path / "i.json")


# --- special files ---------------------------------------------------------------------


def test_special_files_raise_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.safetensors")
    os.mknod(tmp_path / "socket.safetensors", stat.S_IFSOCK | 0o600)
    for name, kind in (("fifo", "a FIFO"), ("socket", "a socket")):
        with pytest.raises(CheckpointError, match=f"this is {kind}, not a regular file"):
            open_all(tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="a character device"):
        open_all("/dev/null")
    (tmp_path / "d" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="a directory, not a regular file"):
        open_all(tmp_path / "d")
    os.mkfifo(tmp_path / "fifo.json")
    with pytest.raises(CheckpointError, match="a FIFO"):
        locate(tmp_path / "fifo.json")


def test_source_that_cannot_be_examined_raises_the_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "model.safetensors")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(os, "stat", fail)
        with pytest.raises(CheckpointUnreadable, match="Input/output error"):
            locate(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_failing_storage_does_not_choose_other_files_of_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    touch(tmp_path, "a.safetensors", "consolidated.safetensors", "model.safetensors")
    if name.endswith(".json"):
        (tmp_path / "model.safetensors").unlink()
        write_index(tmp_path / name, {"w": "a.safetensors"})
    before, real = names(tmp_path), os.lstat

    def fail(path: str, **words: object) -> os.stat_result:
        if os.fspath(path) == str(tmp_path / name):
            raise OSError(errno.EIO, "Input/output error")
        return real(path, **words)  # type: ignore[arg-type]

    with monkeypatch.context() as failing:
        failing.setattr(os, "lstat", fail)
        with pytest.raises(CheckpointUnreadable, match="Input/output error") as raised:
            locate(tmp_path)
        assert raised.value.path == str(tmp_path / name)
    assert names(tmp_path) == before


def test_opened_descriptor_blocks_and_is_not_inherited(tmp_path: Path) -> None:
    touch(tmp_path, "a.safetensors")
    (shard,) = locate(tmp_path / "a.safetensors").shards
    fd, status = open_regular(shard.path)
    try:
        assert os.get_blocking(fd)
        assert not os.get_inheritable(fd)
        assert status.st_ino == (tmp_path / "a.safetensors").stat().st_ino
    finally:
        os.close(fd)


def test_permission_denied_names_path_and_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = touch(tmp_path, "a.safetensors") / "a.safetensors"
    path.chmod(0o600)

    def forbid(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbid)  # root may read everything: the refusal is simulated
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(CheckpointAccessError) as caught:
        open_all(path)
    assert str(path) in str(caught.value)
    assert "mode 0600" in str(caught.value)
    assert "chmod a+r" in str(caught.value)


# --- the hub cache -------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """models--org--name with two shards, an index and a subfolder, on main, v1 and refs/pr/1."""
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    touch(repo / "blobs", "aa", "bb", "cc")
    index = write_index(
        repo / "blobs" / "dd", {"x": "m-1.safetensors", "y": "m-2.safetensors"}
    ).name
    (snapshot / "sub").mkdir(parents=True)
    (snapshot / "m-1.safetensors").symlink_to("../../blobs/aa")
    (snapshot / "m-2.safetensors").symlink_to("../../blobs/bb")
    (snapshot / "model.safetensors.index.json").symlink_to(f"../../blobs/{index}")
    (snapshot / "sub" / "model.safetensors").symlink_to("../../../blobs/cc")
    for reference in ("main", "v1", "refs/pr/1"):
        (repo / "refs" / reference).parent.mkdir(parents=True, exist_ok=True)
        (repo / "refs" / reference).write_text(COMMIT)
    return tmp_path / "hub"


@pytest.mark.parametrize("revision", [None, "main", "v1", "refs/pr/1", COMMIT])
def test_hub_id_with_revision_is_found(cache: Path, revision: str | None) -> None:
    found = locate("org/name", cache_dir=cache, revision=revision)
    assert [shard.name for shard in found.shards] == ["m-1.safetensors", "m-2.safetensors"]
    assert found.title == "org/name"
    for shard in found.shards:
        os.close(open_regular(shard.path)[0])


def test_hub_subfolder_and_snapshot_path_are_found(cache: Path) -> None:
    assert names("org/name", cache_dir=cache, subfolder="sub") == ["model.safetensors"]
    snapshot = cache / "models--org--name" / "snapshots" / COMMIT
    open_all(snapshot)
    open_all(snapshot / "model.safetensors.index.json")


@pytest.mark.parametrize(
    "variables,expected",
    [
        ({"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HF_HOME": "/c", "XDG_CACHE_HOME": "/d"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({}, "/home/me/.cache/huggingface/hub"),
        ({"HF_HOME": "~/x/$WHERE", "WHERE": "y"}, "/home/me/x/y/hub"),
    ],
)
def test_hub_cache_follows_environment_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache() == expected


def test_hub_id_is_found_in_hf_hub_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    assert len(names("org/name")) == 2


def test_model_missing_in_the_cache_raises(cache: Path) -> None:
    with pytest.raises(CheckpointNotFound) as caught:
        locate("org/other", cache_dir=cache)
    assert str(caught.value) == (
        f"No such file or directory: org/other, and the hub cache {cache} has no model of this name"
        " (gdsload does not download: `hf download org/other` does)"
    )
    assert caught.value.path == str(cache / "models--org--other")
    with pytest.raises(CheckpointNotFound) as caught:
        locate("org/name", cache_dir=cache, revision="v2")
    assert str(caught.value) == (
        f"org/name: revision 'v2' is not in the hub cache {cache}; it has main, refs/pr/1, v1,"
        f" {COMMIT}"
    )
    assert caught.value.path == str(cache / "models--org--name" / "snapshots" / "v2")


def test_revisions_in_the_cache_are_listed_up_to_a_limit(cache: Path) -> None:
    repo = cache / "models--org--many"
    touch(repo / "refs", *(f"r{n}" for n in range(9)))
    (repo / "snapshots").mkdir()
    for number in range(9):
        (repo / "snapshots" / f"c{number}").mkdir()
    with pytest.raises(CheckpointNotFound) as caught:
        locate("org/many", cache_dir=cache)
    listed = [f"r{n}" for n in range(8)] + [f"c{n}" for n in range(8)]
    assert str(caught.value).endswith(f"; it has {', '.join(listed)}")
    (cache / "models--org--none").mkdir()
    with pytest.raises(CheckpointNotFound, match=r"it has none$"):
        locate("org/none", cache_dir=cache)


@pytest.mark.parametrize("commit", [f" {COMMIT}\n", "v"])
def test_reference_names_its_snapshot(cache: Path, commit: str) -> None:
    repo = cache / "models--org--name"
    if not (repo / "snapshots" / commit.strip()).exists():
        touch(repo / "snapshots" / commit, "model.safetensors")
    (repo / "refs" / "v1").write_text(commit)
    assert names("org/name", cache_dir=cache, revision="v1")


@pytest.mark.parametrize("place", ["refs/main", f"snapshots/{COMMIT}"])
def test_failing_storage_of_a_cache_is_no_missing_revision(
    cache: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    failing, real = str(cache / "models--org--name" / place), os.stat

    def fail(path: str, **words: object) -> os.stat_result:
        if os.fspath(path) == failing:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(CheckpointUnreadable, match="Input/output error") as raised:
        locate("org/name", cache_dir=cache)
    assert raised.value.path == failing
    assert not isinstance(raised.value, CheckpointNotFound)


@pytest.mark.parametrize("text", ["", ".", "..", "a/b", "-x", "a b", "x" * 4097, "\xff"])
def test_reference_to_anything_but_a_commit_raises(cache: Path, text: str) -> None:
    reference = cache / "models--org--name" / "refs" / "v1"
    reference.write_text(text, "latin-1")
    with pytest.raises(CheckpointError) as caught:
        locate("org/name", cache_dir=cache, revision="v1")
    assert caught.value.path == str(reference)
    assert not isinstance(caught.value, CheckpointNotFound)


def test_reference_without_commit_raises(cache: Path) -> None:
    (cache / "models--org--name" / "refs" / "v1").write_text("../../../etc")
    with pytest.raises(CheckpointError, match="does not contain a commit"):
        locate("org/name", cache_dir=cache, revision="v1")


def test_blobs_linked_to_a_shared_store_are_opened(cache: Path) -> None:
    digest = "ab" * 32
    touch(cache / "blobs" / "ab", digest)
    blob = cache / "models--org--name" / "blobs" / "bb"
    blob.unlink()
    blob.symlink_to(f"../../blobs/ab/{digest}")
    open_all("org/name", cache_dir=str(cache))


@pytest.mark.parametrize("kind", ["directory", "FIFO", "character device"])
def test_link_to_special_file_raises(tmp_path: Path, kind: str) -> None:
    targets = {"directory": tmp_path, "FIFO": tmp_path / "fifo", "character device": "/dev/null"}
    os.mkfifo(tmp_path / "fifo")
    write_index(tmp_path / "m" / "model.safetensors.index.json", {"w": "a.safetensors"})
    (tmp_path / "m" / "a.safetensors").symlink_to(targets[kind])
    with pytest.raises(CheckpointError, match=f"a link to .*, a {kind}, not a regular file"):
        open_all(tmp_path / "m")


def test_missing_plain_name_raises_the_text_of_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointNotFound) as caught:
        locate("notafile", cache_dir=tmp_path)
    assert str(caught.value) == "No such file or directory: notafile"
    if sys.version_info >= (3, 11):
        assert str(tmp_path) in caught.value.__notes__[0]
