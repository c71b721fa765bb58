"""`gdsload load`: reports, verification, wrong arguments, cold loads."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import save_file

from command import EMBEDDING, answer, run
from gdsload import api
from gdsload.checkpoint import Checkpoint
from gdsload.cli import warming
from gdsload.cli.loading import checksum, load, settings_of
from gdsload.doctor.storage import filesystem
from gdsload.loading.settings import CACHES
from gdsload.memory import page_cache
from storage import kept_warm


@pytest.fixture
def no_dropping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes use the page cache, too: tests never drop it."""
    monkeypatch.setattr(page_cache, "drop_caches", lambda: False)


# --- load ---------------------------------------------------------------------------------------


def test_load_reports_its_io_path(tiny_checkpoint: Path) -> None:
    result = run("load", tiny_checkpoint, "--cache", "buffered", "--engine", "threads")
    assert result.exit_code == 0
    assert "47 tensors" in result.stdout
    assert "posix/threads/buffered" in result.stdout


def test_load_opens_the_checkpoint_once(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers that are in the page cache would hide the latency of the storage."""
    opened: list[Any] = []
    original = Checkpoint.open

    def noted(source: Any, **more: Any) -> Checkpoint:
        opened.append(source)
        return original(source, **more)

    monkeypatch.setattr(Checkpoint, "open", noted)
    assert run("load", tiny_checkpoint).exit_code == 0
    assert len(opened) == 1


def test_load_with_touch_and_verify_reports_both(tiny_checkpoint: Path) -> None:
    facts = answer("load", tiny_checkpoint, "--touch", "--verify", "--repeat", "2")
    assert facts["verified"] is True
    first, second = facts["runs"]
    assert first["checksum"] == second["checksum"] != 0
    assert first["wanted_bytes"] == 656768
    text = run("load", tiny_checkpoint, "--touch", "--verify", "--repeat", "2").stdout
    assert f"sum {first['checksum']:x}" in text
    assert "median of 2: " in text
    assert text.endswith("verified: 47 tensors as safetensors reads them, bit for bit\n")


def test_verify_accepts_every_dtype_and_shape(tmp_path: Path) -> None:
    names = [
        "bool",
        "uint8",
        "int8",
        "float8_e5m2",
        "float8_e4m3fn",
        "int16",
        "float16",
        "bfloat16",
        "int32",
        "float32",
        "complex64",
        "float64",
        "int64",
    ]
    made = {name: torch.randint(0, 2, (3, 5)).to(getattr(torch, name)) for name in names}
    made |= {"scalar": torch.tensor(1.5), "nothing": torch.empty(0, 4)}
    save_file(made, tmp_path / "all.safetensors")
    assert answer("load", tmp_path, "--verify", "--touch")["runs"][0]["tensors"] == len(made)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensor: tensor.view(torch.uint8).flatten()[-1:].bitwise_xor_(1),
        lambda tensor: tensor.resize_(64, 1024),
    ],
    ids=["one bit", "the shape"],
)
def test_verify_detects_a_difference(
    spoil: Callable[[torch.Tensor], object],
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = api.load_file

    def spoiled(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        loaded = {name: tensor.clone() for name, tensor in original(*args, **kwargs).items()}
        spoil(loaded[EMBEDDING])
        return loaded

    monkeypatch.setattr(api, "load_file", spoiled)
    result = run("load", tiny_checkpoint, "--verify")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert f"tensor '{EMBEDDING}' is not what safetensors reads" in result.stderr


def test_verify_accepts_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    save_file({"w": torch.arange(9)}, tmp_path / "new")
    path = tmp_path / os.fsdecode(b"\xff.safetensors")
    (tmp_path / "new").rename(path)
    result = run("load", path, "--verify")
    assert result.exit_code == 0 and "bit for bit" in result.stdout


def test_checksum_counts_every_byte() -> None:
    base = torch.arange(21, dtype=torch.uint8)
    sums = set()
    for place in range(21):
        other = base.clone()
        other[place] += 1
        sums.add(checksum([other]))
    assert checksum([base]) not in sums
    assert checksum([base]) == sum(
        int.from_bytes(bytes(base[at : at + 8].tolist()), sys.byteorder) for at in (0, 8)
    ) + sum(range(16, 21))


def test_load_writes_a_trace(tiny_checkpoint: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = run("load", tiny_checkpoint, "--cache", "direct", "--trace", trace)
    assert result.exit_code == 0
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == {"M", "X"}


def test_load_with_a_trace_in_a_missing_directory_reads_nothing(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    result = run("load", tiny_checkpoint, "--trace", tmp_path / "nowhere" / "trace.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nowhere/trace.json: no such directory" in result.stderr


def test_load_with_a_trace_on_a_full_disk_has_its_result(tiny_checkpoint: Path) -> None:
    result = run("load", tiny_checkpoint, "--json", "--trace", "/dev/full")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["runs"][0]["tensors"] == 47
    assert "No space left on device: '/dev/full'" in result.stderr


@pytest.mark.parametrize("name", ["trace.json", "new.json"])
def test_load_with_a_trace_that_cannot_be_written_reads_nothing(
    name: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace.json").touch()
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write everywhere
    result = run("load", tiny_checkpoint, "--trace", tmp_path / name)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{name}: it cannot be written" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "toaster"], "toaster"),
        (["--backend", "steam"], "backend 'steam': unknown (available: gds"),
        (["--engine", "steam"], "unknown engine 'steam' (available: threads, uring"),
        (["--option", "engine=steam"], "unknown engine 'steam'"),
    ],
)
def test_load_by_an_unknown_name_is_a_usage_error(
    words: list[str], said: str, tiny_checkpoint: Path
) -> None:
    result = run("load", tiny_checkpoint, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--option", "depth=8", "--option", "depth=64"], "depth"),
        (["--engine", "threads", "--option", "engine=uring"], "engine"),
    ],
)
def test_load_with_an_option_that_is_given_twice_is_a_usage_error(
    words: list[str], name: str, tiny_checkpoint: Path
) -> None:
    result = run("load", tiny_checkpoint, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"option '{name}' is given twice" in result.stderr


def test_load_to_a_device_that_is_not_here_is_an_error(tiny_checkpoint: Path) -> None:
    result = run("load", tiny_checkpoint, "--device", "cuda:99")
    assert result.exit_code == 1
    assert result.stderr.startswith("gdsload: device 'cuda:99' cannot be used: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("depth", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("depht=3", "no option 'depht'"),
        ("depth=0", "depth"),
        ("depth=true", "must be an integer"),
        ("depth=2.5", "must be an integer"),
    ],
)
def test_wrong_option_exits_with_2(option: str, complaint: str, tiny_checkpoint: Path) -> None:
    result = run("load", tiny_checkpoint, "--cache", "direct", "--option", option)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_options_become_numbers_and_booleans() -> None:
    words = ["a=false", "b=True", "c=2.5", "d=-3", "e=1.x", "f="]
    expected = {"a": False, "b": True, "c": 2.5, "d": -3, "e": "1.x", "f": ""}
    assert settings_of(words) == expected


def test_options_reach_the_backend(tiny_checkpoint: Path) -> None:
    words = ["--cache", "direct", "--backend", "posix", "--option", "request_bytes=65536"]
    assert answer("load", tiny_checkpoint, *words)["runs"][0]["requests"] >= 656768 // 65536


def test_choices_of_cache_are_those_of_the_library() -> None:
    (kind,) = [option.type for option in load.params if option.name == "cache"]
    assert isinstance(kind, click.Choice)
    assert tuple(kind.choices) == CACHES


# --- load --cold --------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_dropping")
def test_cold_reads_from_the_disk(tmp_path: Path) -> None:
    where = filesystem(tmp_path)
    if "lives in memory" in where.detail:
        pytest.skip(where.detail)
    # Larger than what the kernel reads ahead of the header.
    save_file({"a": torch.ones(8 << 20)}, tmp_path / "model.safetensors")
    with kept_warm(tmp_path / "model.safetensors"):
        assert list(answer("load", tmp_path)["runs"][0]["paths"]) == ["mapped"]
    for cold in answer("load", tmp_path, "--cold", "--repeat", "2")["runs"]:
        assert "mapped" not in cold["paths"]


@pytest.mark.usefixtures("no_dropping")
def test_cold_with_remaining_pages_is_an_error(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "evict", lambda path: 8192)
    monkeypatch.setattr(api, "load_file", lambda *_, **__: pytest.fail("it loaded"))
    result = run("load", tiny_checkpoint, "--cold")
    assert result.exit_code == 1
    assert "model-00001-of-00002.safetensors: 8.19 kB stay in the page cache" in result.stderr


def test_cold_drops_the_page_cache_first(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    monkeypatch.setattr(page_cache, "drop_caches", lambda: steps.append("drop"))
    monkeypatch.setattr(page_cache, "evict", lambda path: steps.append(Path(path).name) or 0)
    assert run("load", tiny_checkpoint, "--cold").exit_code == 0
    assert steps == ["drop", *sorted(p.name for p in tiny_checkpoint.glob("*.safetensors"))]


# --- filters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        (["--layers", "0"], lambda name: ".layers.0." in name),
        (["--layers", "3:"], lambda name: ".layers.3." in name),
        (["--names", r"re:\.experts\.[01]\."], lambda name: re.search(r"\.experts\.[01]\.", name)),
        (
            ["--layers", "0:1", "--experts", "1:3", "--names", "*.weight"],
            lambda name: re.search(r"layers\.0\..*experts\.[12]\.", name),
        ),
    ],
)
def test_filters_select_tensors(
    tiny_moe_checkpoint: Path, options: list[str], fits: Callable[[str], Any]
) -> None:
    with Checkpoint.open(tiny_moe_checkpoint) as checkpoint:
        expected = [name for name in checkpoint.tensors if fits(name)]
    assert 0 < len(expected) < len(checkpoint.tensors)
    facts = answer("load", tiny_moe_checkpoint, "--verify", *options)
    assert facts["runs"][0]["tensors"] == len(expected)
    assert answer("plan", tiny_moe_checkpoint, *options)["tensors"] == len(expected)


@pytest.mark.parametrize(("backend", "cache"), [("mmap", "mapped"), ("pread", "buffered")])
def test_backend_of_safetensors_is_its_way_to_read(
    tiny_checkpoint: Path, backend: str, cache: str
) -> None:
    facts = answer("load", tiny_checkpoint, "--backend", backend)["runs"][0]
    assert (
        facts["paths"].keys()
        == answer("load", tiny_checkpoint, "--cache", cache)["runs"][0]["paths"].keys()
    )


@pytest.mark.parametrize("option", ["--layers=3:2", "--layers=a", "--experts=-1", "--names=re:("])
def test_wrong_filter_is_a_usage_error(tiny_checkpoint: Path, option: str) -> None:
    assert run("plan", tiny_checkpoint, option).exit_code == 2


@pytest.mark.parametrize(
    "words", [("load", "--backend=mmap", "--cache=direct"), ("warmup", "--limit=1000000T")]
)
def test_contradiction_or_absurd_size_is_a_usage_error(
    tiny_checkpoint: Path, words: tuple[str, ...]
) -> None:
    assert run(*words, tiny_checkpoint).exit_code == 2


def test_warmup_in_the_background_takes_a_name_that_looks_like_an_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[list[str]] = []

    class Process:
        pid = 1

        def __init__(self, words: list[str], **_: Any) -> None:
            started.append(words)

    monkeypatch.setattr(warming.subprocess, "Popen", Process)
    warming.in_background("-model", "pagecache", 0, {"variant": "-v"})
    assert started[0][-3:] == ["--variant=-v", "--", "-model"]


@pytest.mark.parametrize("wait", [["--wait"], []])
def test_warmup_of_a_tensor_in_two_shards_reads_both(
    wait: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers loads such a checkpoint."""
    for shard in ("a", "b"):
        save_file({"w": torch.ones(5)}, tmp_path / f"{shard}.safetensors")
    monkeypatch.setattr(warming, "in_background", lambda *_: 1)
    assert run("warmup", tmp_path, *wait).exit_code == 0
