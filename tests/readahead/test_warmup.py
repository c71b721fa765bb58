"""Prefetches that servers, environments and command lines start."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gdsload
from command import answer, process, run
from gated import Gate
from gdsload import warmup
from gdsload.checkpoint import checkpoint as checkpoint_module
from gdsload.cli.run_script import from_words
from gdsload.errors import CheckpointNotFound, PlacementError
from gdsload.memory import page_cache
from gdsload.readahead import prefetch
from storage import make_cold

PATIENCE_SECONDS = 120.0


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint, tmp_path / "model")


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    for one in prefetch.prefetches():
        one.close()


def test_status_tells_of_what_ended_and_of_what_failed(checkpoint: Path, tmp_path: Path) -> None:
    with gdsload.prefetch(checkpoint, cache="buffered") as ahead:
        assert ahead.wait(PATIENCE_SECONDS)
        landed = warmup.status()[-1]
        assert landed[:4] == (str(checkpoint), "cpu", "memory", "landed")
        assert landed.landed_bytes == landed.wanted_bytes > 0 and landed.error == ""
        gdsload.load_file(checkpoint)
        assert warmup.status()[-1].claimed_bytes == landed.wanted_bytes
    with (
        gdsload.prefetch(tmp_path / "nowhere", 1) as lost,
        pytest.raises(CheckpointNotFound),
    ):
        lost.wait(PATIENCE_SECONDS)
    failed = warmup.status()[-1]
    assert (failed.state, failed.device) == ("failed", "cuda:1") and "nowhere" in failed.error


def test_status_forgets_in_the_end(checkpoint: Path) -> None:
    for _ in range(prefetch.REMEMBERED + 1):
        gdsload.prefetch(checkpoint, names=[]).close()
    assert len(warmup.status()) == prefetch.REMEMBERED


def test_a_hook_is_a_plain_function(checkpoint: Path) -> None:
    hook = warmup.hook(checkpoint, wait=True, cache="buffered")
    ahead = hook()
    assert ahead.progress().state == "landed" and hook() is ahead


def test_a_hook_starts_anew_what_was_closed(checkpoint: Path) -> None:
    start = warmup.hook(checkpoint)
    first = start()
    assert start() is first
    first.close()
    with start() as second:
        assert second is not first and second.wait(PATIENCE_SECONDS)


def test_a_hook_starts_anew_what_failed(checkpoint: Path, tmp_path: Path) -> None:
    hook = warmup.hook(tmp_path / "later", wait=True)
    with pytest.raises(CheckpointNotFound):
        hook()
    shutil.copytree(checkpoint, tmp_path / "later")
    assert hook().progress().state == "landed"


def test_a_hook_is_the_life_of_an_application(checkpoint: Path, gate: Gate) -> None:
    app = object()

    async def live() -> None:
        async with warmup.hook(checkpoint, backend="gated", cache="buffered")(app) as state:
            ahead = state["gdsload"]
            assert ahead.progress().state in ("opening", "reading")
        assert ahead.progress().state == "closed"

    asyncio.run(live())


def test_an_application_that_waits_starts_with_the_bytes(checkpoint: Path) -> None:
    async def live() -> None:
        async with warmup.hook(checkpoint, wait=True, cache="buffered")(object()) as state:
            assert state["gdsload"].progress().state == "landed"

    asyncio.run(live())


def test_start_that_is_cancelled_ends_the_prefetch(checkpoint: Path, gate: Gate) -> None:
    life = warmup.hook(checkpoint, wait=True, backend="gated", cache="buffered")

    async def live() -> None:
        starting = asyncio.ensure_future(life.__aenter__())
        await asyncio.to_thread(gate.request)  # which never ends
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(live())
    assert warmup.status()[-1].state == "closed"


def test_an_application_that_waits_gets_the_error(tmp_path: Path) -> None:
    async def live() -> None:
        async with warmup.hook(tmp_path / "nowhere", wait=True)(object()):
            pytest.fail("it started")

    with pytest.raises(CheckpointNotFound):
        asyncio.run(live())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("model", ("model", "cpu")),
        ("org/model@cuda:0", ("org/model", "cuda:0")),
        ("model@cpu", ("model", "cpu")),
        ("a@b@cuda", ("a@b", "cuda")),
        ("model@2", ("model@2", "cpu")),
    ],
)
def test_the_environment_names_source_and_device(text: str, wanted: tuple[str, str]) -> None:
    assert warmup._source_and_device(text) == wanted


def test_a_directory_may_look_like_a_device(tmp_path: Path) -> None:
    directory = tmp_path / "model@cuda"
    directory.mkdir()
    assert warmup._source_and_device(str(directory)) == (str(directory), "cpu")


def test_the_environment_starts_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(warmup.VARIABLE, raising=False)
    assert warmup.from_environment() is None
    monkeypatch.setenv(warmup.VARIABLE, f"{checkpoint}@cuda:1")
    ahead = warmup.from_environment()
    assert ahead is not None
    assert (ahead.source, ahead.report.device) == (str(checkpoint), "cuda:1")


def test_words_start_one_and_leave_the_rest(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(warmup.VARIABLE, "elsewhere")
    words = ["--model", str(checkpoint), "--tier=pagecache", "script.py", "--model", "x"]
    ahead, rest = from_words(words)
    assert ahead is not None and rest == ["script.py", "--model", "x"]
    assert (ahead.source, ahead.tier) == (str(checkpoint), "pagecache")
    monkeypatch.delenv(warmup.VARIABLE)
    assert from_words(["script.py", "--device", "x"]) == (
        None,
        ["script.py", "--device", "x"],
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--model"],
        ["--device", "cpu", "script.py"],
        ["--model", "x", "--tier", "tape"],
        ["--model", "x", "--device", "cuda0"],
    ],
)
def test_words_that_make_no_sense_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        from_words(words)
    assert capsys.readouterr().err.startswith("gdsload: --")


def test_refused_words_do_not_show_a_password(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        from_words(["--model", "https://user:secret@host/model?sig=x", "--device", "cuda0"])
    text = capsys.readouterr().err
    assert "cuda0" in text and "https://host/model" in text
    assert not {"secret", "sig"} & set(re.findall(r"\w+", text))


def test_an_environment_without_a_device_behind_its_at_sign_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(warmup.VARIABLE, "org/model@main")
    with pytest.raises(PlacementError, match="'main' is neither cpu nor"):
        warmup.from_environment()
    with pytest.raises(SystemExit, match=r"^2$"):
        from_words(["script.py"])
    assert "gdsload: GDSLOAD_PREFETCH: device 'main' is neither" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["words", "environment"])
def test_a_script_starts_with_its_weights_on_their_way(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; assert 'torch' not in sys.modules\n"
        "from gdsload import load_file, last_report\n"
        "from gdsload.readahead import prefetch as early\n"
        "(ahead,) = early.prefetches(); assert ahead.wait(120)\n"
        "assert len(load_file(ahead.source)) and ahead.progress().claimed_bytes\n"
        "print(*sys.argv[1:])\n"
    )
    words = ["--model", str(checkpoint), "--device", "cpu"] if way == "words" else []
    if way == "environment":
        monkeypatch.setenv(warmup.VARIABLE, f"{checkpoint}@cpu")
    ran = process("from gdsload.cli import main; main()", "run", *words, script, "--model", "x")
    assert (ran.returncode, ran.stdout) == (0, "--model x\n"), ran.stderr


@pytest.mark.parametrize("filesystem", ["", "nfs4"])
def test_the_command_fills_the_page_cache(
    checkpoint: Path, filesystem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "filesystem_without_disk", lambda *_: filesystem)
    files = sorted(checkpoint.glob("*.safetensors"))
    make_cold(*files)
    facts = answer("warmup", checkpoint, "--tier", "pagecache", "--wait")
    assert facts["state"] == "landed"
    assert facts["resident_bytes"] == facts["wanted_bytes"] > 0
    assert sum(page_cache.resident_bytes(file) for file in files) >= facts["wanted_bytes"]
    assert "in the page cache" in run("warmup", checkpoint, "--wait").output


def test_the_command_keeps_to_its_limit(checkpoint: Path) -> None:
    facts = answer("warmup", checkpoint, "--limit", "64K", "--wait")
    assert facts["wanted_bytes"] == 64 << 10


def test_the_command_refuses_a_limit_below_one_byte(checkpoint: Path) -> None:
    result = run("warmup", checkpoint, "--limit", "0.0001K", "--wait")
    assert result.exit_code == 2 and "less than one byte" in result.output
    assert run("warmup", checkpoint, "--limit", "0.0K", "--wait").exit_code == 0


def test_the_command_fails_where_there_is_nothing(tmp_path: Path) -> None:
    for words in (["--wait"], []):
        result = run("warmup", tmp_path / "nowhere", *words)
        assert result.exit_code == 1 and "nowhere" in result.output
    assert run("warmup", tmp_path, "--tier", "tape").exit_code == 2


def test_the_command_says_so_where_pages_do_not_stay(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "resident_bytes", lambda *place: 0)
    assert run("warmup", checkpoint, "--wait").exit_code == 3


def test_the_command_goes_on_in_another_process(checkpoint: Path) -> None:
    pid = answer("warmup", checkpoint)["pid"]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    said = run("warmup", checkpoint).output
    pid = int(said.partition("process ")[2].split()[0])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_command_imports_nothing_of_the_current_directory(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("click", "queue", "gdsload"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    pid = answer("warmup", checkpoint)["pid"]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not (tmp_path / "imported").exists()


def test_the_command_needs_no_torch(checkpoint: Path) -> None:
    code = (
        "import sys; from gdsload.cli import main; main(standalone_mode=False);"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    ran = process(code, "warmup", checkpoint, "--wait", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["state"] == "landed"


def test_it_is_reached_as_an_attribute() -> None:
    code = "import gdsload; print(gdsload.warmup.status())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_a_hook_starts_anew_with_names_of_an_iterator(checkpoint: Path) -> None:
    with gdsload.Checkpoint.open(checkpoint) as opened:
        names = [*opened.tensors]
    start = warmup.hook(checkpoint, wait=True, names=(name for name in names), cache="buffered")
    read = []
    for _ in range(2):
        with start() as ahead:
            read.append(ahead.progress().wanted_bytes)
    assert read[0] == read[1] > 0
