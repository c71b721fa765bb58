"""What the benchmarks make of odd arguments and odd machines: one line that says why, and no result
that is half there. No test looks at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command import run
from gdsload.cli import measuring

cache, choice, judge, layout, machine, records, tables, truth, worker = (
    measuring.program(name)
    for name in ("cache", "choice", "judge", "layout", "machine", "records", "tables", "truth",
                 "worker")
)  # fmt: skip


def cold(source: Path, *words: object) -> Any:
    return run("bench", "cold", source, "--repeats", "1", "--state", "none", "--neighbours", *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cold", "x", "--arms", "nonsense"], "no arm 'nonsense'; there are gdsload,"),
        (["cold", "x", "--also", "nonsense"], "no arm 'nonsense'"),
        (["cold", "x", "--repeats", "0"], "'0' is not a whole number of 1 or more"),
        (["cold", "x", "--idle-seconds", "-3"], "'-3' is no number of seconds, 0 or more"),
        (["cold", "x", "--prepare-factor", "nan"], "'nan' is no number of multiples"),
        (["cold", "x", "--device", "gpu"], "'gpu' is no device; there are cpu, cuda,"),
        (["cold", "x", "--device", "cuda:x"], "'cuda:x' is no device"),
        (["compare", "x", "--repeats", "-1"], "'-1' is not a whole number"),
        (["start", "x", "--rounds", "0"], "'0' is not a whole number"),
        (["scale", "--repeats", "0"], "'0' is not a whole number"),
        (["scale", "--most-bytes", "1000"], "200,000 are the least"),
        (["io", "x", "--block", "0"], "'0' is not a number of bytes"),
        (["io", "x", "--block", "1000"], "direct reads are of whole 4096 bytes"),
        (["io", "x", "--batch", "0"], "'0' is not a whole number"),
        (["io", "x", "--threads", "two"], "'two' is not a whole number"),
        (["io", "x", "--backend", "nonsense"], "--backend nonsense: unknown (available: gds"),
        (["io", "x", "--engine", "nonsense"], "invalid choice: 'nonsense' (choose from"),
        (["io", "x", "--seconds", "-1"], "'-1' is no number of seconds"),
    ],
)
def test_arguments_invalid_number_is_usage_error(words: list[str], said: str) -> None:
    # A negative number after an option is taken for an option by argparse, unless joined to it.
    joined = [*words[:-2], f"{words[-2]}={words[-1]}"]
    result = run("bench", *joined)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    "words",
    [["cold", "--repeats", "1"], ["io"], ["compare"], ["start"]],
    ids=lambda words: words[0],
)
def test_arguments_unknown_model_lists_known_ones(words: list[str], tmp_path: Path) -> None:
    result = run("bench", *words, "--model", "nonsense", "--dir", tmp_path)
    assert result.exit_code == 2
    assert "no model 'nonsense': there are qwen3-0.6b," in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["cold", "io", "compare", "start", "engines", "tune"])
def test_arguments_without_a_checkpoint_are_a_usage_error(command: str) -> None:
    result = run("bench", command)
    assert result.exit_code == 2
    assert result.output.splitlines()[-1].startswith(f"bench {command}: name a checkpoint: ")


def test_arguments_of_a_missing_file_name_it(tmp_path: Path) -> None:
    result = run("bench", "io", tmp_path / "nope")
    assert result.exit_code == 1
    assert result.stderr == f"bench io: no result: {tmp_path}/nope: no such file or directory\n"


@pytest.mark.parametrize("command", ["cold", "io", "compare", "start", "scale", "engines", "tune"])
def test_help_says_the_default_of_its_directory(command: str) -> None:
    text = " ".join(run("bench", command, "--help").output.split())
    assert re.search(r"--dir DIR .{,60}\(default: the (current|temporary) directory\)", text), text


@pytest.mark.usefixtures("disk")
def test_cold_without_any_arm_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.json"
    result = cold(tiny_checkpoint, "--arms", "instanttensor", "--output", output)
    assert result.exit_code == 1
    assert "left out: instanttensor: it loads to cuda devices only" in result.output
    result = cold(tiny_checkpoint, "--arms", "gdsload:engine=nonsense", "--output", output)
    assert result.exit_code == 1
    assert "no arm ran" in result.output
    assert "unknown engine" in result.output
    assert not output.exists()


def test_cold_missing_loader_is_left_out_at_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(judge.places, "CACHE", tmp_path)
    arms = {label: judge.Arm(label, label, {}) for label in ("runai", "safetensors-mmap")}
    with pytest.raises(judge.ArmFailed, match="not installed: make bench-deps"):
        judge.python_of(arms["runai"])
    # What gdsload itself stands on is there without the others.
    assert judge.python_of(arms["safetensors-mmap"]) == Path(sys.executable)


def test_json_option_prints_only_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "x.json"
    parser = records.argparse.ArgumentParser()
    records.add_output(parser)
    options = parser.parse_args(["--json", "--output", str(output)])
    records.finish({"kind": "loads", "arms": [{"seconds": [1.0]}]}, options, "x", "a table")
    assert capsys.readouterr().out == output.read_text()
    assert json.loads(output.read_text()) == {"kind": "loads", "arms": [{"seconds": [1.0]}]}


def test_output_not_writable_is_refused_at_start(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for output in (tmp_path, Path("/proc/nowhere/x.json")):
        result = cold(tiny_checkpoint, "--arms", "gdsload", "--output", output)
        assert result.exit_code == 1
        assert "--output" in result.output
        assert "1/1" not in result.output


def kept(options: Any, name: str = "cold-x") -> Path:
    return Path(records.keep({"kind": "loads"}, options, name))


def test_result_without_replace_is_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records.places, "RESULTS", tmp_path)
    parser = records.argparse.ArgumentParser()
    records.add_output(parser)
    plain, replace = parser.parse_args([]), parser.parse_args(["--replace"])
    assert [kept(plain).name for _ in range(3)] == ["cold-x.json", "cold-x-2.json", "cold-x-3.json"]
    assert kept(replace).name == "cold-x.json"
    named = parser.parse_args(["--output", str(tmp_path / "cold-x.json")])
    assert kept(named).name == "cold-x.json"
    assert len(list(tmp_path.iterdir())) == 3


def test_result_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = records.argparse.ArgumentParser()
    records.add_output(parser)
    options = parser.parse_args(["--output", str(tmp_path / "x.json")])
    kept(options)
    before = (tmp_path / "x.json").read_text()

    def full(path: Path, text: str) -> None:
        with path.open("w") as opened:
            opened.write(text[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        kept(options)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert (tmp_path / "x.json").read_text() == before


def test_wide_table_is_split() -> None:
    head, rows = ["arm", "seconds", "bytes"], [["gdsload", "1.5", "12"], ["bare", "2.5", "13"]]
    text = f"title\n\n{tables.markdown(head, rows)}\n\n- note"
    assert layout.fitted(text, 80) == text
    narrow = layout.fitted(text, 24)
    assert max(map(len, narrow.splitlines())) <= 24
    assert narrow.count("gdsload") == 2
    assert narrow.endswith("- note")
    assert layout.fitted(text, 1).count("gdsload") == 2, "a column at least, however narrow"
    assert layout.fitted("- one two three\n\nfour", 10) == "- one two\n  three\n\nfour"


# --- odd storage --------------------------------------------------------------------------------


def mounted_as(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "mount_of", lambda path: {"filesystem": kind, "source": "none"})


@pytest.mark.parametrize("command", ["cold", "io", "start", "compare"])
def test_cold_on_tmpfs_is_refused(
    command: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted_as("tmpfs", monkeypatch)
    result = run("bench", command, tiny_checkpoint, "--output", tmp_path / "x.json")
    assert result.exit_code == 1
    assert "it is on tmpfs, which is memory: nothing there is ever cold" in result.output


def facts(**changed: Any) -> dict[str, Any]:
    return {
        "resident_before_bytes": 0,
        "device_read_bytes": None,
        "own_read_bytes": 656768,
        "touched_bytes": 656768,
        **changed,
    }


def test_judge_without_disk_counter_uses_process_counter(tiny_checkpoint: Path) -> None:
    judged = judge.Judge(judge.Conditions(tiny_checkpoint))
    assert judged.objection(facts()) is None
    assert "nor the kernel counted" in str(judged.objection(facts(own_read_bytes=None)))
    assert "the arm read 4,096 bytes, but 656,768 were touched" in judged.objection(
        facts(own_read_bytes=4096)
    )


def test_sweep_without_disk_counter_uses_process_counter(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "diskstats_key", lambda path: None)
    device = truth.Device(tiny_checkpoint)
    before = device.counted()
    if before is None:
        pytest.skip("/proc/self/io has no read_bytes")
    with pytest.raises(records.Refused, match="but the kernel counted"):
        device.require_read(before, 1 << 50, "a sweep")


def test_judge_changed_checkpoint_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "changing"
    shutil.copytree(tiny_checkpoint, source)
    judged = judge.Judge(judge.Conditions(source))
    judged.require_unchanged()
    (first, *_) = sorted(source.glob("*.safetensors"))
    with first.open("ab") as opened:
        opened.write(b"more")
    with pytest.raises(records.Refused, match="it was changed during the measurement"):
        judged.require_unchanged()
    first.unlink()
    with pytest.raises(records.Refused, match="it was changed during the measurement"):
        judged.require_unchanged()


# --- ends ---------------------------------------------------------------------------------------


def test_worker_abandoned_is_killed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    code = "import signal; signal.pause()"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}"\n')
    python.chmod(0o755)
    with pytest.raises(KeyboardInterrupt), judge.Worker(python, {}, {}) as started:
        raise KeyboardInterrupt
    assert started._process.returncode == -signal.SIGKILL


def test_worker_ends_with_its_judge() -> None:
    """The judge is killed while its worker, which has asked for it, still waits."""
    judge_of_it = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from gdsload.cli import measuring
worker = measuring.program("worker")
read, write = os.pipe()
child = os.fork()
if child == 0:
    worker.die_with_the_judge()
    os.write(write, b"x")
    signal.pause()
os.read(read, 1)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ran = subprocess.run(
        [sys.executable, "-c", judge_of_it], capture_output=True, text=True, check=False
    )
    # The pipe of stdout has ended, which the worker held as well.
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert int(ran.stdout) > 0


def test_sigterm_runs_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def main() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.monotonic()  # Python runs signal handlers between two bytecodes
        finally:
            ended.append("in order")

    monkeypatch.setattr(measuring, "program", lambda _: SimpleNamespace(main=main))
    before = signal.getsignal(signal.SIGTERM)
    assert run("bench", "io").exit_code == 143
    assert ended == ["in order"]
    assert signal.getsignal(signal.SIGTERM) is before
