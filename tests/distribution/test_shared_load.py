"""load_file and stream with `group=`: 2 and 4 processes over gloo."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
from gdsload.system.mountinfo import mount_of
from ranks import HERE, ranks, spawned

PROGRAM = HERE / "shared_ranks.py"


def build(folder: Path) -> int:
    """Writes a checkpoint of two shards with awkward sizes. Returns the bytes of its tensors."""
    generator = torch.Generator().manual_seed(7)

    def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    shards = {
        "a": {
            "rows": values(1000, 333),
            "columns": values(700, 514),
            "experts": values(8, 96, 130),
            "odd": values(37, 1001, dtype=torch.float32),
            "scalar": values(),
            "flags": values(4099) > 0,
        },
        "b": {
            "few": values(3, 100),
            "eighths": values(64, 640).to(torch.float8_e4m3fn),
            "none": values(0, 5),
            "large": values(3_000_001),
            "last": values(17, dtype=torch.float64),
        },
    }
    folder.mkdir()
    for name, tensors in shards.items():
        safetensors.torch.save_file(tensors, folder / f"{name}.safetensors")
    (folder / "other").mkdir()
    safetensors.torch.save_file(shards["b"], folder / "other" / "model.safetensors")
    return sum(t.nbytes for tensors in shards.values() for t in tensors.values())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("shared") / "model"
    return folder, build(folder)


@pytest.fixture(scope="module", params=[4])
def found(
    request: pytest.FixtureRequest,
    checkpoint: tuple[Path, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """What each rank found, by case."""
    folder, _ = checkpoint
    for copy in ("copy", "mapped"):
        shutil.rmtree(folder / copy, ignore_errors=True)
    return ranks(request.param, PROGRAM, "all", folder, meet=tmp_path_factory.mktemp("meet"))


@pytest.mark.parametrize(
    "case",
    [
        *("whole", "warm", "cold", "windows", "dimensions", "slices", "byte_columns", "experts"),
        *("of_engine", "again", "default_device", "later", "subgroup", "other_windows"),
        *("other_source", "own_limit", "slow_rank", "slow_prefetch", "missed", "late_exchange"),
    ],
)
def test_shared_load_gives_the_bytes_of_a_single_process(
    found: list[dict[str, Any]], case: str
) -> None:
    for rank in found:
        assert rank[case]["differing"] == []
        assert rank[case]["wanted_bytes"] == rank[case]["held_bytes"]
        assert rank[case]["ranks"] == len(found)
        assert rank[case].get("in_order", True)


@pytest.mark.parametrize("case", ["whole", "windows", "dimensions", "experts", "of_engine"])
def test_shared_load_reads_each_byte_once(
    found: list[dict[str, Any]], case: str, checkpoint: tuple[Path, int]
) -> None:
    read = [rank[case]["read_bytes"] for rank in found]
    # Blocks of direct I/O at the ends of shares are read by two ranks.
    assert 1.0 <= sum(read) / checkpoint[1] < 1.02
    assert max(read) < 1.2 * checkpoint[1] / len(found)
    for rank in found:
        received = rank[case]["received_bytes"]
        assert received <= rank[case]["wanted_bytes"]
        assert received >= rank[case]["wanted_bytes"] - rank[case]["read_bytes"]


def test_rank_that_waits_for_a_prefetch_is_waited_for(found: list[dict[str, Any]]) -> None:
    waited = [rank["slow_prefetch"]["waited"] for rank in found]
    assert waited == [number == 1 for number in range(len(found))]


def test_ranks_of_one_group_meet_and_not_those_of_another_group(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        assert rank["two_groups"] == [[], []]


def test_shared_load_leaves_no_share_in_the_page_cache(
    found: list[dict[str, Any]], checkpoint: tuple[Path, int]
) -> None:
    """Ranks that load at the same time are not loads of their own, which would fill it together."""
    mount = mount_of(checkpoint[0])
    if mount is not None and mount.kind in ("tmpfs", "ramfs"):
        pytest.skip(f"{checkpoint[0]}: its pages cannot be evicted (a filesystem in memory)")
    decided = [rank["cold"]["page_cache"] for rank in found]
    assert all(each.startswith("not filled: ") for each in decided), decided
    # Headers are read through it, and bring the pages behind them.
    assert max(rank["cold"]["resident_bytes"] for rank in found) < checkpoint[1] // 4


def test_shared_load_per_node_reads_each_byte_once_on_every_node(
    found: list[dict[str, Any]], checkpoint: tuple[Path, int]
) -> None:
    for rank in found:
        assert (rank["nodes"]["node"]["differing"], rank["nodes"]["group"]["differing"]) == ([], [])
        assert rank["nodes"]["node"]["ranks"] == 2
        assert rank["nodes"]["group"]["ranks"] == len(found)
    for how, times in (("node", len(found) // 2), ("group", 1)):
        read = sum(rank["nodes"][how]["read_bytes"] for rank in found)
        assert times <= read / checkpoint[1] < 1.02 * times


def test_ranks_that_are_not_numbered_by_node_find_their_node(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for case in (rank["cyclic"], *rank["spawned"]):
            assert case["differing"] == []
            assert case["ranks"] == len(found)  # all run on this kernel


@pytest.mark.parametrize(
    "case,own,text",
    [
        ("missing_file", "CheckpointNotFound", "rank 1 failed: CheckpointNotFound: "),
        ("unknown_name", "CheckpointError", "rank 1 failed: CheckpointError: "),
        ("unknown_shard", "CheckpointError", "rank 1 failed: CheckpointError: "),
        ("failed_read", "", "rank 1 failed: "),
        ("no_memory", "PlacementError", "rank 1 failed: PlacementError: no "),
        ("no_memory_to_send", "PlacementError", "rank 1 failed: PlacementError: no "),
        ("full_device", "PlacementError", "rank 1 failed: PlacementError: no "),
        ("no_room_of_own", "PlacementError", "rank 1 failed: PlacementError: "),
        ("rewritten", "FileChanged", "rank 1 failed: FileChanged: "),
        ("failed_consumer", "RuntimeError", "rank 1 failed: it closed the stream"),
        ("silent_rank", "", "a rank has ended, or does not join the load in time"),
    ],
)
def test_failure_of_a_rank_ends_all_ranks_with_its_reason(
    found: list[dict[str, Any]], case: str, own: str, text: str
) -> None:
    for number, rank in enumerate(found):
        if number != 1:
            assert rank[case]["error"] == "RankError"
            assert rank[case]["text"].startswith(text)
        elif case == "failed_read":
            assert rank[case]["error"] in ("ShortRead", "FileChanged")
        elif own:
            assert rank[case]["error"] == own


@pytest.mark.parametrize(
    "case,error,text",
    [
        ("other_checkpoint", "CheckpointError", "different checkpoints"),
        ("other_files", "CheckpointError", "different checkpoints"),
        ("other_version", "CheckpointError", "different versions"),
        ("other_order", "ValueError", "different orders"),
        ("other_readers", "ValueError", "different readers="),
        ("other_readers_of_torchrun", "ValueError", "different readers="),
    ],
)
def test_ranks_that_want_different_things_are_refused(
    found: list[dict[str, Any]], case: str, error: str, text: str
) -> None:
    for rank in found:
        assert rank[case]["error"] == error
        assert text in rank[case]["text"]


def test_rank_outside_of_the_group_is_refused(found: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(found):
        text = f"rank {number} does not belong to the group"
        assert rank["outsider"] == {"error": "ValueError", "text": text}


def test_load_that_has_no_room_for_the_tensors_of_all_ranks_is_refused(
    found: list[dict[str, Any]], checkpoint: tuple[Path, int]
) -> None:
    for rank in found:
        for case in ("no_room", "no_room_together"):
            assert rank[case]["error"] == "PlacementError"
            assert rank[case]["text"].startswith(f"{len(found) * checkpoint[1]:,} bytes")


def test_kept_error_of_ctrl_c_leaves_no_connection_open(found: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(found):
        if number == 1:
            assert rank["interrupted_rank"]["error"] == "KeyboardInterrupt"
            continue
        assert rank["interrupted_rank"]["error"] == "RankError"
        assert "Timed out" not in rank["interrupted_rank"]["text"]


def test_progress_bar_ends_at_the_bytes_that_a_rank_wants(found: list[dict[str, Any]]) -> None:
    for rank in found:
        shown, total, wanted = rank["progress"]
        assert shown == total == wanted


def test_all_ranks_connect_their_devices_at_once(found: list[dict[str, Any]]) -> None:
    assert [rank["devices"] for rank in found] == [[len(found)]] * len(found)


def test_stream_that_all_ranks_close_early_is_no_error(found: list[dict[str, Any]]) -> None:
    assert {rank["closed_by_all"] for rank in found} == {found[0]["closed_by_all"]}
    assert "error" not in found[0]["closed_by_all"]


def test_death_of_a_rank_ends_all_others(checkpoint: tuple[Path, int], tmp_path: Path) -> None:
    told = spawned(3, PROGRAM, "killed", checkpoint[0], meet=tmp_path)
    for number, (code, out, errors) in enumerate(told):
        if number == 1:
            assert code < 0
            continue
        assert code == 0, errors[-2000:]
        error = json.loads(out.splitlines()[-1])
        assert error["error"] == "RankError"
        assert error["text"].startswith("a rank has ended, or does not answer in time, or fails: ")


def test_shards_without_a_group_are_refused(checkpoint: tuple[Path, int]) -> None:
    with pytest.raises(ValueError, match="shards= needs group="):
        gdsload.load_file(checkpoint[0], shards={"rows": 0})


@pytest.mark.parametrize("load", [gdsload.load_file, gdsload.stream, gdsload.from_pretrained])
def test_unknown_readers_are_refused_without_a_group(
    checkpoint: tuple[Path, int], load: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match="readers='rack' must be one of"):
        load(checkpoint[0], readers="rack")
