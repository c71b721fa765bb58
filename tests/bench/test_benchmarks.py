"""The benchmarks' own honesty: what they keep, and what they refuse. No test looks at a time."""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import gpudoubles
from command import run
from gdsload.cli import measuring
from gdsload.errors import GdsloadError
from gdsload.memory import page_cache

cells, compare, costs, instructions, judge, large, pictures = (
    measuring.program(name)
    for name in ("cells", "compare", "costs", "instructions", "judge", "large", "pictures")
)
first_call, load_into = (measuring.program(name) for name in ("first_call", "load_into"))
parse, pipeline, pool = (measuring.program(name) for name in ("parse", "pipeline", "pool"))
records, render, scale, summary, svg, sweep, tables, truth = (
    measuring.program(name)
    for name in ("records", "render", "scale", "summary", "svg", "sweep", "tables", "truth")
)
KINDS = measuring.program("arms").KINDS


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "model.safetensors"
    path.write_bytes(random.Random(0).randbytes((1 << 20) + 100))
    return path


# --- the command --------------------------------------------------------------------------------


def test_command_help_is_its_own() -> None:
    listed = run("bench").output
    for name in measuring.COMMANDS:
        assert f"  {name} " in listed
        answer = run("bench", name, "--help")
        assert answer.exit_code == 0
        assert name in answer.output


def test_benchmarks_import_under_both_package_names() -> None:
    """In a wheel the package is gdsload.benchmarks, in a peer's environment it has another name."""
    sources = sorted(Path(measuring.program("places").PACKAGE).glob("*.py"))
    pattern = re.compile(r"^\s*(?:from|import) benchmarks\b", re.MULTILINE)
    absolute = [path.name for path in sources if pattern.search(path.read_text())]
    assert absolute == [], "import them relatively: from . import machine"


def test_command_unknown_option_is_usage_error() -> None:
    assert run("bench", "io", "--nonsense").exit_code == 2


def test_command_without_benchmarks_gives_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measuring, "PACKAGE", "gdsload.benchmarks_of_nobody")
    monkeypatch.setattr(measuring, "__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    with pytest.raises(GdsloadError, match=r"install gdsload with its extra 'bench'"):
        measuring.program("cold")


def test_model_option_writes_and_removes_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    options = argparse.Namespace(source=None, model="tiny", dir=folder, keep=False)
    with records.source_of(options) as source:
        assert (source / "config.json").is_file()
    assert list(tmp_path.iterdir()) == []
    options.keep = True
    with records.source_of(options) as source:
        pass
    options.keep = False
    with records.source_of(options) as source:  # it was there before: it stays
        pass
    assert source.exists()


def test_checkpoint_name_is_directory_name(tmp_path: Path) -> None:
    (tmp_path / "qwen3-0.6b").mkdir()
    (file := tmp_path / "one.safetensors").touch()
    for name, source, called in (
        (None, tmp_path / "qwen3-0.6b", "qwen3-0.6b"),
        (None, file, "one"),
        ("x", file, "x"),
    ):
        assert records.name_of(argparse.Namespace(name=name), source) == called


@pytest.mark.parametrize(
    ("words", "code"), [([], 2), (["--model", "tiny", "somewhere"], 2), (["nowhere"], 1)]
)
def test_source_missing_or_ambiguous_is_refused(
    words: list[str], code: int, tmp_path: Path
) -> None:
    result = run("bench", "cold", *words, "--output", tmp_path / "x.json")
    assert result.exit_code == code
    assert result.output.startswith("bench cold: ")
    assert not (tmp_path / "x.json").exists()


# --- loads --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("disk")
def test_cold_two_arms_make_a_table(tiny_checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "cold.json"
    result = run(
        "bench", "cold", tiny_checkpoint, "--repeats", "1", "--state", "none", "--neighbours",
        "--arms", "gdsload", "gdsload:engine=threads", "instanttensor", "--output", output,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    kept = json.loads(output.read_text())
    assert kept["left_out"] == {"instanttensor": "it loads to cuda devices only"}
    assert {kept["kind"], kept["checkpoint"]["tensors"]} == {"loads", 47}
    assert [arm["label"] for arm in kept["arms"]] == ["gdsload", "gdsload:engine=threads"]
    for arm in kept["arms"]:
        (seconds,), medians = arm["seconds"], arm["medians"]
        assert medians["touched_bytes"] == 656768
        assert medians["load_s"] + medians["touch_s"] <= seconds * 1.001
        assert arm["report"]["paths"]
        assert sum(arm["tensor_ms"].values()) * 47 <= seconds * 1000
    facts = "kernel cpu disk filesystem mount_options gpus python versions"
    assert set(facts.split()) <= kept["machine"].keys()
    assert "gdsload:engine=threads" in result.stdout
    assert "the sums of each tensor equal in all arms, CRC-32" in result.stdout
    assert "no memory touched before" in result.stdout


@pytest.mark.usefixtures("disk")
def test_cold_several_states_make_one_table(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring.program("pages"), "UNITS", 2)
    output = tmp_path / "states.json"
    answer = run(
        "bench", "cold", tiny_checkpoint, "--repeats", "2", "--state", "huge", "idle",
        "--idle-seconds", "0.01", "--neighbours", "--arms", "gdsload", "--output", output,
    )  # fmt: skip
    assert answer.exit_code == 0, answer.output
    kept = json.loads(output.read_text())
    assert kept["kind"] == "states"
    assert kept["left_out"]["fastsafetensors"] == "not asked for"
    assert "gdsload" not in kept["left_out"]
    assert list(kept["page_costs"]) == ["huge", "idle"]
    assert all(len(found["huge"]) == 2 for found in kept["page_costs"].values())
    for arm in kept["arms"]:
        assert [len(found["seconds"]) for found in arm["states"].values()] == [2, 2]
    assert "huge: s (min to max)" in answer.stdout
    assert "first touch of 2 MiB" in answer.stdout


@pytest.mark.usefixtures("disk")
def test_cold_interrupt_keeps_complete_rounds(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring.program("pages"), "UNITS", 2)
    judged, real = [], judge.Judge.run

    def run_until_ctrl_c(*args: Any, **kwargs: Any) -> dict[str, Any]:
        if len(judged) == 3:  # the second state of the second round
            raise KeyboardInterrupt
        judged.append(real(*args, **kwargs))
        return judged[-1]

    monkeypatch.setattr(judge.Judge, "run", run_until_ctrl_c)
    output = tmp_path / "states.json"
    output.write_text("of a long run")
    answer = run(
        "bench", "cold", tiny_checkpoint, "--repeats", "5", "--state", "huge", "none",
        "--neighbours", "--arms", "gdsload", "--output", output,
    )  # fmt: skip
    assert answer.exit_code == 130, answer.output
    assert output.read_text() == "of a long run"
    kept = json.loads(output.with_name("states-2.json").read_text())
    assert kept["conditions"]["repeats"] == 1
    assert [len(found["seconds"]) for found in kept["arms"][0]["states"].values()] == [1, 1]
    assert all(len(found["small"]) == 1 for found in kept["page_costs"].values())
    judged.clear()
    judged += [{}] * 3  # now in the first round
    output.unlink()
    words = "--neighbours", "--arms", "gdsload", "--output", output
    assert run("bench", "cold", tiny_checkpoint, *words).exit_code == 130
    assert not output.exists()
    assert pictures.drawing(kept) is not None


def test_state_of_several_is_a_result_of_its_own() -> None:
    states = {"small": {"seconds": [1.0]}, "idle": {"seconds": [2.0]}}
    result = {
        "kind": "states",
        "conditions": {"state": "states"},
        "arms": [{"label": "gdsload", "states": states}],
    }
    idle = measuring.program("states").of_state(result, "idle")
    assert (idle["kind"], idle["conditions"]["state"]) == ("loads", "idle")
    assert idle["arms"][0]["seconds"] == [2.0]


def test_ratio_of_arms_is_by_medians_and_by_rounds() -> None:
    ours, other = {"seconds": [1.0, 2.0, 4.0]}, {"seconds": [3.0, 2.0, 8.0]}
    assert measuring.program("states").ratios(other, ours) == "1.50, 2.00"


def ran(*arms: str, repeats: int = 1) -> dict[str, Any]:
    parse = measuring.program("arms").parse
    return {
        "arms": [parse(arm)._asdict() for arm in arms],
        "conditions": {"repeats": repeats, "checked": False},
    }


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (ran("gdsload", "bare", "fio"), "the sums of each tensor equal in all arms"),
        (ran("gdsload", "fio"), "the sums of gdsload compared with nothing: it ran once"),
        (ran("gdsload", repeats=2), "the sums of gdsload compared with its own runs only"),
        (
            ran("transformers", "gdsload-model", "transformers:dtype=float32"),
            "the sums of each tensor of the others equal in all arms; the sums of"
            " transformers:dtype=float32 compared with nothing: it ran once",
        ),
        (ran("fio"), "nothing to compare: no arm hands tensors out"),
    ],
)
def test_notes_claim_equality_only_for_compared_arms(result: dict[str, Any], said: str) -> None:
    assert tables.agreed(result) == said


def facts(**changed: Any) -> dict[str, Any]:
    return {
        "resident_before_bytes": 0,
        "device_read_bytes": 10 << 20,
        "touched_bytes": 10 << 20,
        "own_read_bytes": 10 << 20,
        **changed,
    }


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"resident_before_bytes": 4096}, "4,096 bytes were resident before the clock"),
        ({"device_read_bytes": 5 << 20}, "the disk read 5,242,880 bytes, but 10,485,760"),
        ({"device_read_bytes": 900 << 20}, "the disk read 943,718,400 bytes for files of"),
    ],
)
def test_judge_inconsistent_run_is_discarded(
    changed: dict[str, int], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(10 << 20))
    one = judge.Judge(judge.Conditions(tmp_path))
    assert one.objection(facts()) is None
    monkeypatch.setattr(one, "_run", lambda arm, memory, checked: facts(**changed))
    with pytest.raises(judge.NotWhatItSays, match=f"3 times in a row: {why}"):
        one.run(measuring.program("arms").parse("gdsload"))
    assert len(one.discarded) == 3


def test_judge_uncounted_cold_run_is_discarded(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(10 << 20))
    uncounted = facts(device_read_bytes=None, own_read_bytes=None)
    why = judge.Judge(judge.Conditions(tmp_path)).objection(uncounted)
    assert why == "neither the disk nor the kernel counted the bytes that were read"
    for conditions in (
        judge.Conditions(tmp_path, storage="fuse"),  # of which the kernel counts no reads
        judge.Conditions(tmp_path, warm=True),
    ):
        known = uncounted | {"resident_before_bytes": conditions.warm * (10 << 20)}
        assert judge.Judge(conditions).objection(known) is None


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (10 << 20, None),  # whatever others read
        (0, "the arm read 0 bytes, but 10,485,760 were touched"),
        (900 << 20, "the arm read 943,718,400 bytes"),
    ],
)
def test_judge_counts_the_bytes_of_the_arm_alone_beside_neighbours(
    own: int, why: str | None, tmp_path: Path
) -> None:
    """A neighbour that reads the same file fills the page cache while the clock runs."""
    (tmp_path / "model.safetensors").write_bytes(bytes(10 << 20))
    one = judge.Judge(judge.Conditions(tmp_path, neighbours=True))
    for device in (0, 10 << 20, 900 << 20):
        said = one.objection(facts(own_read_bytes=own, device_read_bytes=device))
        assert said is None if why is None else str(said).startswith(why)


@pytest.mark.parametrize(("resident", "fills"), [([1], 0), ([0, 1], 1)])
def test_warm_files_are_read_only_if_bytes_are_missing(
    resident: list[int], fills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    filled: list[object] = []
    monkeypatch.setattr(judge.Conditions, "fill", lambda conditions: filled.append(conditions))
    monkeypatch.setattr(judge.Conditions, "resident_bytes", lambda _: resident.pop(0))
    judge.Conditions(tmp_path, warm=True).make_cache()
    assert len(filled) == fills


def judged(folder: Path, *names: str) -> tuple[Any, ...]:
    """A judge of loads of this folder, and arms of these names."""
    (folder / "model.safetensors").write_bytes(b"x")
    arms = measuring.program("arms")
    return judge.Judge(judge.Conditions(folder)), *map(arms.parse, names)


def test_judge_different_tensors_are_refused(tmp_path: Path) -> None:
    one, first, second = judged(tmp_path, "gdsload", "bare")
    one._compare(first, {"a": 1, "b": 2}, one.sums, "sum")
    with pytest.raises(judge.NotWhatItSays, match="b: its sum is 3 by bare and 2 by gdsload"):
        one._compare(second, {"a": 1, "b": 3}, one.sums, "sum")
    with pytest.raises(judge.NotWhatItSays, match="bare did not load b"):
        one._compare(second, {"a": 1}, one.sums, "sum")
    with pytest.raises(judge.NotWhatItSays, match="bare alone loaded c"):
        one._compare(second, {"a": 1, "b": 2, "c": 3}, one.sums, "sum")


def test_model_may_have_other_tensors_than_the_files(tmp_path: Path) -> None:
    """Tied ones have another name in it, and transformers fuses some."""
    one, model, tensors = judged(tmp_path, "gdsload-model", "gdsload")
    one._compare(model, {"a": 1, "fused": 5}, one.sums, "sum")
    one._compare(tensors, {"a": 1, "b": 2}, one.sums, "sum")
    one._compare(tensors, {"a": 1, "b": 2}, one.sums, "sum")
    with pytest.raises(judge.NotWhatItSays, match="a: its sum is 9"):
        one._compare(model, {"a": 9, "fused": 5}, one.sums, "sum")


def test_model_without_tensors_of_another_model_is_refused(tmp_path: Path) -> None:
    one, stock, model = judged(tmp_path, "transformers", "gdsload-model")
    one._compare(stock, {"a": 1, "fused": 5}, one.sums, "sum")
    with pytest.raises(judge.NotWhatItSays, match="gdsload-model did not load fused"):
        one._compare(model, {"a": 1}, one.sums, "sum")
    with pytest.raises(judge.NotWhatItSays, match="gdsload-model alone loaded b"):
        one._compare(model, {"a": 1, "b": 2, "fused": 5}, one.sums, "sum")


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_no_arm_is_first_more_often_than_others(count: int) -> None:
    rounds = [records.in_turn(range(count), turn) for turn in range(2 * count)]
    assert all(sorted(each) == [*range(count)] for each in rounds)
    assert Counter(each[0] for each in rounds) == dict.fromkeys(range(count), 2)
    assert rounds[0] == rounds[1][::-1] != rounds[1]


def test_arm_unreachable_device_has_reason() -> None:
    why_not = measuring.program("arms").why_not
    assert why_not(KINDS["instanttensor"], "cpu", 1, 2) == "it loads to cuda devices only"
    assert why_not(KINDS["instanttensor"], "cuda:1", 1, 2) == ""
    assert why_not(KINDS["bare"], "cuda:0", 1, 2) == "it loads to cpu devices only"
    twice = why_not(KINDS["fastsafetensors-parallel"], "cpu", 15 * 10**9, 22 * 10**9)
    assert twice == "it holds 2 copies, 30.0 GB, and there are 22.0"
    for maps in ("gdsload", "safetensors-mmap"):
        assert why_not(KINDS[maps], "cpu", 15 * 10**9, 22 * 10**9, warm=True) == ""
    cached = why_not(KINDS["bare"], "cpu", 15 * 10**9, 22 * 10**9, warm=True)
    assert cached == "it holds 2 copies, the page cache's among them, 30.0 GB, and there are 22.0"


def test_module_of_a_model_is_imported_before_the_clock(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    program = (
        "import sys; from pathlib import Path; from benchmarks import loaded, loaders\n"
        "loaders.open_transformers(loaded.Wanted(Path(sys.argv[1]), {}))\n"
        "print('transformers.models.qwen3_moe.modeling_qwen3_moe' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    root = measuring.program("places").ROOT
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ran.stdout == "True\n", ran.stderr


def test_device_sums_equal_cpu_sums() -> None:
    import torch

    device, worker = measuring.program("device"), measuring.program("worker")
    made = {
        "even": torch.arange(32, dtype=torch.int16),
        "odd": torch.arange(37, dtype=torch.uint8),
        "short": torch.tensor([3], dtype=torch.int16),
        "nothing": torch.empty(0),
    }
    where = {name: (one.data_ptr(), one.nbytes) for name, one in made.items()}
    assert device.touch(made) == worker.touch(where)
    assert device.checksums(made) == worker.checksums(where)


def test_total_of_a_load_has_all_bytes() -> None:
    """The first byte of each page of float32 ones is zero."""
    import torch

    worker = measuring.program("worker")
    ones, zeros = torch.ones(5000), torch.zeros(5000)
    totals = [worker.total({"w": (each.data_ptr(), each.nbytes)}) for each in (ones, zeros)]
    assert totals == [sum(ones.view(torch.int64).tolist()) % (1 << 64), 0]


def test_gpu_clock_stops_before_sums(tmp_path: Path) -> None:
    """They are reductions that nobody asked for; what the CPU maps, it has not read before."""
    import torch

    loaded, worker = measuring.program("loaded"), measuring.program("worker")
    state = {"weight": torch.arange(1 << 12)}
    on_cpu = loaded.tensors(state)
    on_gpu = on_cpu._replace(tensors=state)
    for made in (on_cpu, on_gpu):
        facts, _ = worker.measured(lambda _, made=made: made, tmp_path, "cpu")
        parts = (facts["load_s"], facts["load_s"] + facts["touch_s"])
        assert facts["seconds"] == pytest.approx(parts[made is on_cpu])
        assert (facts["cpu_s"] == facts["load_cpu_s"]) or made is on_cpu
        assert facts["touch_s"] > 0


def test_load_to_gpu_is_measured_without_numpy() -> None:
    """The wheels of torch do not need it."""
    program = """
import sys
sys.modules["numpy"] = None
import torch
from gdsload.cli.measuring import program
program("judge")
loaded, tensor = program("loaded"), torch.arange(3)
found = loaded.tensors({"a": tensor})._replace(tensors={"a": tensor})
print(program("worker").measured(lambda _: found, None, "cpu")[0]["sums"])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "{'a': 3}\n", ran.stderr


# --- the storage sweep --------------------------------------------------------------------------


@pytest.mark.usefixtures("disk")
def test_sweep_table_has_nixl_columns(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A megabyte, once, says nothing of a rate; those have tests of their own.
    monkeypatch.setattr(truth, "LEAST_BYTES", 1)
    monkeypatch.setattr(truth, "TOLERANCE", 1e6)
    output = tmp_path / "io.json"
    result = run(
        "bench", "io", file, "--block", "4K", "64K", "4M", "--batch", "1", "4", "--threads", "1",
        "2", "--engine", "threads", "--seconds", "0.001", "--output", output,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    kept = json.loads(output.read_text())
    shapes = {(line["block"], line["batch"], line["threads"]) for line in kept["lines"]}
    assert shapes == {
        (block, batch, threads) for block in (4096, 65536) for batch in (1, 4) for threads in (1, 2)
    }
    for line in kept["lines"]:
        assert line["requests"] >= line["threads"]
        assert line["bytes_per_second"] > 0
        for step in ("prepare", "post", "transfer"):
            assert line[step]["mean"] > 0
            assert line[step]["p99"] > 0
    assert kept["left_out"]["blocks of 4,194,304, 1 at once, 1 thread"] == "the file is too small"
    for column in sweep.HEAD:
        assert column in result.stdout


def one_cell(file: Path, **changed: Any) -> Any:
    shape = {
        "backend": "posix",
        "settings": {"engine": "threads"},
        "device": "cpu",
        "block": 4096,
        "batch": 2,
        "threads": 1,
        "seconds": 0.0,
    }
    return cells.Cell(**{**shape, **changed})


class Trusting:
    """A device with given counters."""

    counter, path = "the device", Path(__file__)

    def __init__(self, nbytes: int, busy_seconds: float = 0.0, limit: float = 1e12) -> None:
        self.after = truth.Counted(nbytes, busy_seconds)
        self.limit = limit
        self.asked = False

    def counted(self) -> Any:
        first, self.asked = not self.asked, True
        return truth.Counted(0, 0.0) if first else self.after

    require_read = truth.Device.require_read
    require_possible = truth.Device.require_possible


def test_truth_missing_page_is_refused(file: Path) -> None:
    known = truth.Truth(file)
    known.sums[3] += 1
    with pytest.raises(records.Refused, match="did not arrive as they are in the file"):
        cells.run_cell(one_cell(file, block=16384), known, Trusting(1 << 40))


def test_truth_unread_bytes_are_refused(file: Path) -> None:
    with pytest.raises(records.Refused, match="but the device counted 4,096"):
        cells.run_cell(one_cell(file), truth.Truth(file), Trusting(4096))


def test_truth_impossible_rate_is_refused(file: Path) -> None:
    # 84 GB/s from a disk that was busy for a second with each 2.6 GB, as NIXL's table has it.
    device = Trusting(26 << 30, 10.0, limit=2.6e9)
    device.require_possible(2.7e9, device.after, "linuxaio")
    with pytest.raises(records.Refused, match=r"84\.70 GB/s, where the device itself gave 2\.79"):
        device.require_possible(84.7e9, device.after, "linuxaio")
    with pytest.raises(records.Refused, match="no rate of this device"):
        cells.run_cell(one_cell(file), truth.Truth(file), Trusting(1 << 40, 1e12, limit=1.0))


def test_sweep_of_threads_counts_their_slowest(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread has the device to itself while another compares its bytes: they begin together."""
    took = {0: cells.Steps(0.0, 0.0, 1.0), 1: cells.Steps(0.0, 0.0, 3.0)}
    running, most = 0, 0
    both = threading.Barrier(2, timeout=240)

    def one(cell: Any, backend: Any, offset: int, files: Any, memory: Any) -> Any:
        nonlocal running, most
        running += 1
        both.wait()
        most = max(most, running)
        both.wait()
        running -= 1
        return took[int(offset >= file.stat().st_size // 2)]

    monkeypatch.setattr(cells, "one", one)
    monkeypatch.setattr(truth.Truth, "check", lambda *_: None)
    line = cells.run_cell(one_cell(file, threads=2), truth.Truth(file), Trusting(1 << 40))
    assert most == 2
    assert line["bytes_per_second"] == pytest.approx(2 * 8192 / 3.0)


def test_sweep_thread_that_fails_ends_the_others(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(cell: Any, backend: Any, offset: int, *_: Any) -> Any:
        if offset:
            raise records.Refused("no byte came")
        return cells.Steps(0.0, 0.0, 1.0)

    monkeypatch.setattr(cells, "one", one)
    monkeypatch.setattr(truth.Truth, "check", lambda *_: None)
    with pytest.raises(records.Refused, match="no byte came"):
        cells.run_cell(one_cell(file, threads=2, seconds=1e9), truth.Truth(file), Trusting(1))


def test_sweep_requests_stay_in_their_share(file: Path) -> None:
    for shape in ({}, {"random": True}, {"batch": 5}):
        cell = one_cell(file, **shape)
        where = cells.places(cell, 8192, 81920)
        for _ in range(50):
            offset = next(where)
            assert offset % cell.block == 0
            assert 8192 <= offset <= 8192 + 81920 - cell.request_bytes


def test_sweep_small_or_missing_file_is_refused(tmp_path: Path) -> None:
    small = tmp_path / "small.safetensors"
    small.write_bytes(b"x")
    result = run("bench", "io", small)
    assert result.exit_code == 1
    assert "no result: " in result.output


# --- compare ------------------------------------------------------------------------------------


def one_run(seconds: float, **facts: Any) -> dict[str, Any]:
    return {"seconds": seconds, "touched_bytes": 100, "peak_rss_bytes": 150, "notes": {}, **facts}


def test_first_call_and_load_into_run(tiny_checkpoint: Path) -> None:
    file = next(tiny_checkpoint.glob("*.safetensors"))
    found = {arm: first_call.child(arm, file) for arm in first_call.ARMS}
    assert {len(child["seconds"]) for child in found.values()} == {first_call.LOADS}
    assert found["gdsload"]["modules"] == 0 < found[first_call.BEFORE_TORCH]["modules"]
    assert all(child["import"] > 0 for child in found.values())
    assert load_into.child("gdsload.load_into", file, "warm")["seconds"] > 0


def test_compare_tensor_cost_is_split() -> None:
    phases = {"open": 0.1, "plan": 0.1, "prepare": 0.1, "read": 0.5, "hand over": 0.1}
    report = {"tensors": 10, "seconds": 1.0, "phases": phases}
    ran = {
        compare.STOCK: one_run(4.0),
        compare.OURS: one_run(2.0),
        compare.TENSORS: one_run(2.0, notes={"report": report}),
    }
    result = {
        "checkpoint": {"name": "qwen3-0.6b"},
        "arms": [{"label": label, **summary.summary([run])} for label, run in ran.items()],
    }
    parts = result["arms"][-1]["tensor_ms"]
    assert parts == pytest.approx({"registration": 30.0, "waiting": 50.0, "clean-up": 20.0})
    assert sum(parts.values()) == pytest.approx(100.0)  # a second over ten tensors
    text = compare.table(result)
    assert re.search(rf"{compare.OURS}, here +\|.*\| +2\.00 \|", text)
    for published in ("NIXL GDS loader, as published", "1.23", "3.03", "1287", "1.8000"):
        assert published in text


def test_compare_without_model_is_refused(file: Path) -> None:
    with pytest.raises(records.Refused, match=r"without a config\.json"):
        compare.compare(file.parent, compare.arguments([str(file.parent)]))


# --- scale --------------------------------------------------------------------------------------


def test_scale_result_has_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {
        "tensors": ((10, 8000, 1), (40, 8000, 1)),
        "bytes": ((10, 8000, 1),),
        "shards": ((10, 8000, 1), (10, 8000, 5)),
    }
    monkeypatch.setattr(scale, "SECTIONS", steps)
    monkeypatch.setattr(scale, "LOADS", (1, 2))
    monkeypatch.setattr(
        large,
        "MODELS",
        {"small": lambda: large.llama(layers=2, hidden=64, inner=128, keys=16, vocabulary=100)},
    )
    output = tmp_path / "scale.json"
    result = run("bench", "scale", "--repeats", "1", "--dir", tmp_path, "--output", output,
                 "--most-bytes", "100000")  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(output.read_text())["sections"]
    assert [step["tensors"] for step in found["tensors"]] == [10, 40]
    assert [step["shards"] for step in found["shards"]] == [1, 5]
    assert [step["loads"] for step in found["loads"]] == [1, 2]
    (plan,) = found["plans"]
    assert plan["tensors"] == 2 * 9 + 3
    assert "MODEL, not measured" in result.stdout
    assert list(tmp_path.iterdir()) == [output]


def test_scale_incomplete_load_is_refused(tmp_path: Path) -> None:
    with scale.sparse(tmp_path, 4, 800, 1) as source:
        scale.loaded(source, 4, 800)
        for tensors, total in ((5, 800), (4, 802)):
            with pytest.raises(records.Refused, match="4 tensors of 800 bytes came"):
                scale.loaded(source, tensors, total)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-70b", 70.6), ("llama-3.1-405b", 405.9), ("deepseek-v3-671b", 671.0)],
)
def test_large_model_has_published_size(name: str, billions: float) -> None:
    shapes = list(large.MODELS[name]())
    assert round(sum(shape.parameters for shape in shapes) / 1e9, 1) == billions
    groups = large.sharded(shapes)
    assert [shape for group in groups for shape in group] == shapes
    assert max(sum(shape.nbytes for shape in group) for group in groups) <= large.SHARD_BYTES


# --- instructions -------------------------------------------------------------------------------


def test_instructions_increase_fails() -> None:
    known = {"open": 1000, "plan": 1000}
    assert instructions.verdict({"open": 1049, "plan": 900, "new": 5}, known) == []
    (worse,) = instructions.verdict({"open": 1100, "plan": 1000}, known)
    assert worse == "open: 1,100 instructions, +10.0% against the baseline"


def test_instructions_counts_set_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"open": 1000}
    monkeypatch.setattr(instructions, "valgrind", lambda: "valgrind-0")
    monkeypatch.setattr(instructions, "measure", lambda steps: dict(counts))
    words = ["--baseline", str(tmp_path / "baseline.json")]
    assert instructions.main(words) == 2
    assert instructions.main([*words, "--keep"]) == 0
    assert instructions.main(words) == 0
    counts["open"] = 1200
    assert instructions.main(words) == 1
    said = capsys.readouterr().err
    assert "worse: open: 1,200 instructions, +20.0% against the baseline" in said
    assert "make bench-baseline" in said
    monkeypatch.setattr(instructions, "valgrind", lambda: "valgrind-1")
    assert instructions.main(words) == 2
    assert "baseline is of valgrind valgrind-0" in capsys.readouterr().err


def test_instructions_without_valgrind_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(instructions.shutil, "which", lambda name: None)
    assert instructions.main([]) == 2
    assert "valgrind is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("step", list(instructions.STEPS))
def test_instructions_step_runs(step: str, tmp_path: Path) -> None:
    source = instructions.checkpoint(tmp_path / "many")
    assert instructions.main(["--take", step, "2", str(source)]) == 0


# --- pages and pictures -------------------------------------------------------------------------


def test_page_matches_results() -> None:
    page = render.PAGE.read_text()
    assert render.behind(page) == [], "run: gdsload bench report"
    assert "CPU s/GB" in page


def test_shown_loads_have_the_names_that_bench_cold_gives() -> None:
    """Otherwise a new run would be stored beside the one that the page shows."""
    cold, shown = measuring.program("cold"), 0
    for block in render.BLOCK.finditer(render.PAGE.read_text()):
        stem, path = Path(block["file"]).stem, render.RESULTS / block["file"]
        if stem.startswith(("cold-", "warm-")) and path.exists():
            kept = json.loads(path.read_text())
            kept["conditions"].setdefault("storage", "")  # older results have none
            expected = f"{stem[:5]}{cold.name_of(kept)}"
            # Of another processor, of other states than those of the first table, of fixed pages.
            assert stem in (expected, *(f"{expected}-{of}" for of in ("intel", "idle", "choice")))
            shown += 1
    assert shown > 3


def test_results_and_pictures_are_small() -> None:
    kept = [*render.RESULTS.iterdir(), *render.PICTURES.iterdir()]
    assert sum(path.stat().st_size for path in kept) < 250_000


def test_pictures_are_valid_svg_with_whole_pixels() -> None:
    drawn = render.drawn(render.PAGE.read_text())
    assert len(drawn) > 10
    for picture in drawn.values():
        for part in ElementTree.fromstring(picture).iter():
            numbers = [part.get(name, "") for name in ("d", "x", "y", "width", "height")]
            assert re.fullmatch(r"[ML\d ]*", " ".join(numbers)), part.attrib


def test_picture_shows_median_and_extremes() -> None:
    result = {
        "kind": "loads",
        "checkpoint": {"name": "x", "bytes": 1000, "tensors": 2, "files": 1},
        "conditions": {"warm": True, "state": "none", "repeats": 3, "device": "cpu",
                       "idle_seconds": 0.0},
        "arms": [{"label": "a & b", "seconds": [2.0, 4.0, 3.0]},
                 {"label": "gdsload", "seconds": [1.0, 1.0, 1.0]},
                 {"label": "last", "seconds": [6.0, 6.0, 6.0]}],
    }  # fmt: skip
    text = pictures.drawing(result).text()
    assert text.index(">gdsload<") < text.index(">a &amp; b<")
    assert ">1.00 s<" in text
    assert ">3.00 s<" in text
    widths = [int(width) for width in re.findall(r'width="(\d+)" height="14"', text)]
    assert widths == pytest.approx([widths[0], 3 * widths[0], 6 * widths[0]], abs=6)
    assert pictures.drawing({**result, "arms": result["arms"][:2]}) is None


def test_picture_of_plans_alone_is_absent() -> None:
    assert pictures.drawing({"kind": "scale", "sections": {scale.PLANS: [{}]}}) is None


@pytest.mark.parametrize(
    ("low", "high", "log", "ticks"),
    [
        (0, 4.4, False, [0, 1, 2, 3, 4]),
        (0, 0.11, False, [0, 0.02, 0.04, 0.06, 0.08, 0.1]),
        (0.4, 5, True, [0.5, 1, 2, 5]),
        (0.05, 900, True, [0.1, 1, 10, 100]),
    ],
)
def test_axis_ticks_are_round(low: float, high: float, log: bool, ticks: list[float]) -> None:
    axis = svg.Scale(low, high, 100, 300, log=log)
    assert axis.ticks() == pytest.approx(ticks)
    assert (axis(low), axis(high)) == pytest.approx((100, 300))


def test_report_invalid_file_fails(tmp_path: Path) -> None:
    for name, text in (("gap.json", '{"gaps": []}'), ("broken.json", "{")):
        path = tmp_path / name
        path.write_text(text)
        assert run("bench", "report", path).exit_code == 1
    assert run("bench", "report", tmp_path / "gone.json").exit_code == 1


def test_report_of_files_draws_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    path.write_text((render.RESULTS / "warm-qwen3-0.6b-small.json").read_text())
    answer = run("bench", "report", path)
    assert answer.exit_code == 0, answer.output
    assert "median s" in answer.stdout
    kept = render.PICTURES / "warm-qwen3-0.6b-small.svg"
    assert path.with_suffix(".svg").read_text() == kept.read_text()


def test_report_check_finds_stale_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "PICTURES", tmp_path)
    page = render.PAGE.read_text()
    for name, picture in render.drawn(page).items():
        (tmp_path / name).write_text(picture)
    assert render.behind(page) == []
    (tmp_path / "old.svg").touch()
    (tmp_path / "scale.svg").unlink()
    assert render.behind(page) == [tmp_path / "old.svg", tmp_path / "scale.svg"]
    assert render.behind(page.replace("CPU s/GB", "CPU s/TB"))[0] == render.PAGE


def test_summary_has_rounds_and_medians() -> None:
    runs = [
        one_run(3.0, cpu_s=0.5, machine_cpu_s=None),
        one_run(1.0, cpu_s=0.1, machine_cpu_s=0.7),
        one_run(2.0, cpu_s=0.2, machine_cpu_s=0.9),
    ]
    kept = summary.summary(runs)
    assert kept["seconds"] == [3.0, 1.0, 2.0]
    assert kept["medians"]["cpu_s"] == 0.2
    assert kept["medians"]["machine_cpu_s"] == pytest.approx(0.8)
    assert "peak_vram_bytes" not in kept["medians"]
    assert "report" not in kept
    assert summary.median_run(runs) is runs[2]


def test_parse_result_has_seconds_of_each_repeat() -> None:
    def one(clock: float) -> dict[str, tuple[float, float]]:
        return {step: (clock, 2 * clock) for step in ("open", *parse.TARGET)}

    kept = {"tensors": 1000, "shards": 2, **parse.summary([one(1.0), one(3.0), one(2.0)])}
    assert kept["steps"]["open"] == {"seconds": [1.0, 3.0, 2.0], "cpu_s": 4.0}
    assert parse.opening(kept) == 2.0
    assert parse.together(kept) == pytest.approx(6000)
    assert re.search(r"\| open +\| +2\.000 \| +1\.000 to 3\.000 \|", parse.table(kept))


def test_pool_result_has_states_after_turns() -> None:
    loads = [
        {
            **dict.fromkeys(pool.GROWN, number),
            "seconds": 1.0 + number % 2,
            "read_bytes": 1 - number % 2,
        }
        for number in range(12)
    ]
    kept = pool.summary(loads, models=3)
    assert (kept["turns"], kept["from_storage_s"], kept["from_pool_s"]) == (2, 1.0, 2.0)
    assert pool.growth(kept) == dict.fromkeys(pool.GROWN, 6)


def test_pipeline_counts_the_copies_of_each_kind_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpudoubles.forget(monkeypatch)
    monkeypatch.setattr(pipeline, "LOAD_BYTES", 64 << 20)
    monkeypatch.setattr(pipeline, "TENSORS", (10, 1000))
    monkeypatch.setattr(pipeline, "PACED", (10, 1000))
    found, loop = pipeline.measured(1)
    requests = {entry["tensors"]: entry["requests"] for entry in found}
    assert requests == {10: 16, 1000: 16} and loop["requests"] == 16
    made = {(entry["memory"], entry["tensors"], entry["copies"]) for entry in found}
    assert {each for each in made if each[0] != "in pieces"} == {
        (kind, tensors, copies)
        for kind, copies in (("pump alone", 0), ("side by side", 16))
        for tensors in (10, 1000)
    }
    assert all(copies >= tensors for kind, tensors, copies in made if kind == "in pieces")


def test_pipeline_result_has_medians() -> None:
    runs = [{"wakes": wakes, "cpu_seconds": 1.0} for wakes in (3, 1, 2)]
    kept = pipeline.summary({"memory": "in pieces", "runs": runs})
    assert kept == {"memory": "in pieces", "loads": 3, "wakes": 2, "cpu_seconds": 1.0}


def test_arms_are_compared_by_round() -> None:
    arms = [
        {"label": "a", "seconds": [1.0, 2.0, 30.0]},
        {"label": "b", "seconds": [2.0, 1.0, 10.0]},
    ]
    assert measuring.program("targets").by_rounds({"arms": arms}, "a", "b") == 2.0


def test_targets_name_the_limit_and_the_number_of_loaders() -> None:
    targets = measuring.program("targets")
    parse = measuring.program("arms").parse
    labels = ("gdsload", "bare:pages=huge", "runai", "runai:NUMPY_MADVISE_HUGEPAGE=0")
    arms = [
        {**parse(label)._asdict(), "seconds": [2.0], "medians": {"cpu_s": 2.0}}
        for label in (*labels, "transformers")
    ]
    result = {"arms": arms, "conditions": {"warm": False}}
    assert targets.bare_rate(result).measured == "1.00 of bare:pages=huge (1.00 by rounds)"
    fastest = targets.fastest(result).measured
    assert fastest == "1.00 of runai's time (1.00 by rounds); 1 other loader"
    cpu = targets.least("cpu_s", "{:.0f} s".format)(result).measured
    assert cpu == "2 s, runai 2 s; 1 other loader"


def test_few_rounds_meet_no_target(tmp_path: Path) -> None:
    targets = measuring.program("targets")
    arms = [{"label": arm, "seconds": [1.0] * 3} for arm in ("imports", "read", "prefetch")]
    with pytest.raises(ValueError, match="3 repeats cannot tell"):
        targets.process_start({"arms": arms})
    kept = {"kind": "loads", "conditions": {"repeats": 2}, "arms": []}
    (tmp_path / "models-qwen3-0.6b-cold.json").write_text(json.dumps(kept))
    (said,) = {
        line[3]
        for line in targets.lines(tmp_path)
        if line[1] == "models-qwen3-0.6b-cold" and line[3] != targets.NOT_THERE
    }
    assert said == "not measured: the result is a trial of few rounds"


@pytest.mark.parametrize(
    ("name", "changed", "why"),
    [
        ("parse", {"tensors": 500}, "tensors 500 instead of 100,000"),
        ("parse", {"shards": 3}, "shards 3 instead of 200"),
        ("parse", {"together": {"seconds": [0.1], "cpu_s": 0.1}}, "of few rounds"),
        ("pool", {"models": 2}, "models 2 instead of 20"),
        ("pool", {"turns": 1}, "of few rounds"),
        ("scale", {"repeats": 1}, "of few rounds"),
        ("pipeline", {"loads": 2}, "of few rounds"),
        ("first-read", {"loads": 2}, "of few rounds"),
    ],
)
def test_trial_meets_no_target(
    name: str, changed: dict[str, Any], why: str, tmp_path: Path
) -> None:
    targets = measuring.program("targets")
    kept = json.loads((render.RESULTS / f"{name}.json").read_text())
    if name in ("pipeline", "first-read"):
        for entry in kept["pipeline" if name == "pipeline" else "loads"]:
            entry.update(changed)
    elif name == "scale":
        for entry in kept["sections"]["bytes"]:
            del entry["seconds"][changed["repeats"] :]
    else:
        kept.update(changed)
    (tmp_path / f"{name}.json").write_text(json.dumps(kept))
    found = [line for line in targets.lines(tmp_path) if line[1] == name]
    assert found
    for line in found:
        assert line[3].startswith("not measured: the result is a trial") and line[3].endswith(why)
        assert line[4] == ""


def test_memory_that_shrinks_is_no_growth() -> None:
    targets = measuring.program("targets")

    def result(**last: int) -> dict[str, Any]:
        first = dict.fromkeys(pool.GROWN, 5)
        shape = {"models": 20, "limit_bytes": 4 << 30, "turns": 2}
        return {**shape, "first": first, "last": first | last}

    assert targets.grown(result(mappings=4, threads=3)).met
    assert not targets.grown(result(shared_bytes=5 << 20)).met
    assert not targets.grown(result(threads=6)).met


def test_rounds_without_the_environment_of_an_arm_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    """Before the first round, not after hours of other arms."""
    monkeypatch.setattr(measuring.program("places"), "CACHE", tmp_path)
    restarts = measuring.program("restarts")
    words = [str(file), "--output", str(tmp_path / "result.json")]
    assert restarts.main([*words, "--arms", "gdsload", "runai"]) == 1
    assert "runai: not installed: make bench-deps" in capsys.readouterr().err


@pytest.mark.usefixtures("disk")
def test_restarts_of_one_file_are_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    restarts = measuring.program("restarts")
    resident = []

    def started(
        arm: str, source: Path, count: int, prepare: Callable[[], None] = lambda: None
    ) -> list[dict[str, Any]]:
        prepare()
        resident.append(page_cache.resident_bytes(file))
        source.read_bytes()
        return [{"seconds": 1.0, "sum": 1}] * count

    monkeypatch.setattr(restarts, "started", started)
    monkeypatch.setattr(restarts.time, "sleep", lambda _: None)
    words = [str(file), "--repeats", "1", "--at-once", "2", "--arms", "gdsload"]
    assert restarts.main([*words, "--output", str(tmp_path / "result.json")]) == 0
    size = file.stat().st_size
    pages = -(-size // 4096) * 4096
    assert [each in (size, pages) for each in resident] == [False, True, True, False]
    assert resident[0] == resident[3] == 0
    assert json.loads((tmp_path / "result.json").read_text())["bytes"] == size


def test_restarts_that_do_not_fit_into_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    restarts = measuring.program("restarts")
    monkeypatch.setattr(restarts, "available_bytes", lambda: 4 << 20)
    restarts.require_room(file, 3)
    with pytest.raises(records.Refused, match="8 at once need"):
        restarts.require_room(file, 8)


def test_restarts_of_arms_that_differ_are_refused(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    restarts = measuring.program("restarts")
    monkeypatch.setattr(restarts.time, "sleep", lambda _: None)
    sums: set[int] = set()
    for arm, total in (("gdsload", 1), ("runai", 2)):
        run = {"seconds": 1.0, "sum": total}
        monkeypatch.setattr(restarts, "started", lambda *_, run=run: [run])
        if arm == "gdsload":
            restarts.measured(arm, file, [2], {}, sums)
            continue
        with pytest.raises(records.Refused, match="runai: the processes do not agree"):
            restarts.measured(arm, file, [2], {}, sums)


def test_error_of_a_library_is_foreign_in_any_checkout() -> None:
    """Its files may lie below a directory that is called gdsload."""
    faults = measuring.program("faults")

    def raised(file: str) -> BaseException:
        try:
            exec(compile("raise OSError", file, "exec"), {})
        except OSError as error:
            return error
        raise AssertionError

    import gdsload

    assert faults.is_foreign(raised("/src/gdsload/.venv/lib/transformers/modeling_utils.py"))
    assert not faults.is_foreign(raised(str(Path(gdsload.__file__).with_name("api.py"))))
    assert not faults.is_foreign(raised("src/gdsload/_native/pump.pyx"))


def test_result_json_has_one_line_per_arm() -> None:
    result = {"kind": "loads", "arms": [{"seconds": [1 / 3]}, {"seconds": []}], "files": (1, 2)}
    text = records.written(result)
    assert json.loads(text) == {
        "kind": "loads",
        "arms": [{"seconds": [0.333333]}, {"seconds": []}],
        "files": [1, 2],
    }
    assert len(text.splitlines()) == 8


def test_costs_are_split() -> None:
    few, many = (
        {"tensors": tensors, **scale.summary([{"seconds": seconds, "beside_s": seconds - 0.5}])}
        for tensors, seconds in ((10, 1.0), (110, 2.0))
    )
    assert costs.per_tensor({"tensors": [few, many]}) == pytest.approx(0.01)
    assert costs.per_tensor({"tensors": [few]}) is None
