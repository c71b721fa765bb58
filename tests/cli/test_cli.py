"""The command line: output, exit codes, logging."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import shutil
import struct
import termios
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import save_file

from command import EMBEDDING, answer, process, run
from gdsload import api
from gdsload.checkpoint import Checkpoint
from gdsload.cli.terminal import Bytes
from gdsload.errors import FileChanged
from gdsload.report import size

NORMS = "model.layers.*.input_layernorm.weight"

COMMAND = "from gdsload.cli import main; main()"
# Runs the command line, then prints on stderr the heavy modules that it imported.
LIGHT = """
import sys
from gdsload.cli import main
try:
    main()
finally:
    print(*sorted({"torch", "numpy", "transformers"} & sys.modules.keys()), file=sys.stderr)
"""
INTERRUPTED = """
import os, signal
from gdsload import api as tensors
tensors.load_file = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
from gdsload.cli import main
main()
"""
# The command `serve` with another body for what makes the server.
SERVE = """
import atexit, os, resource, signal, time
atexit.register(print, "exit handlers ran")
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
from gdsload.cli import main
from gdsload.errors import ReadError
from gdsload.peers import server

def serve(*_, **__):
    {}

server.serve = serve
main()
"""

# A script that ends when everything about its prefetch has been printed.
AFTER_THE_PREFETCH = """
import threading
for thread in threading.enumerate():
    if thread.name == "gdsload-run":
        thread.join()
"""


# --- inspect ------------------------------------------------------------------------------------


def test_inspect_prints_files_dtypes_and_metadata(tiny_checkpoint: Path) -> None:
    result = run("inspect", tiny_checkpoint)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{tiny_checkpoint}: 2 files, 47 tensors, 656.77 kB"
    assert lines[1].split() == ["model-00001-of-00002.safetensors", "380.68", "kB", "30", "tensors"]
    assert lines[3].split() == ["BF16", "656.77", "kB", "47", "tensors"]
    assert lines[4:] == ["metadata format: pt"]


def test_inspect_lists_every_tensor(tiny_checkpoint: Path) -> None:
    rows = run("inspect", tiny_checkpoint, "--tensors").stdout.split("\n\n")[1].splitlines()
    with Checkpoint.open(tiny_checkpoint) as checkpoint:
        assert [row.split()[0] for row in rows] == list(checkpoint.tensors)
    assert rows[0].split() == [
        EMBEDDING,
        "BF16",
        "[1024,",
        "64]",
        "131.07",
        "kB",
        "model-00001-of-00002.safetensors",
    ]


def test_inspect_as_json_counts_bytes(tiny_checkpoint: Path) -> None:
    facts = answer("inspect", tiny_checkpoint, "--tensors")
    sizes = {path.name: path.stat().st_size for path in tiny_checkpoint.glob("*.safetensors")}
    assert {file["name"]: file["bytes"] for file in facts["files"]} == sizes
    assert facts["total_bytes"] == sum(info["bytes"] for info in facts["tensors"].values())
    assert facts["tensor_count"] == len(facts["tensors"]) == 47
    assert facts["tensors"][EMBEDDING]["shape"] == [1024, 64]
    assert "tensors" not in answer("inspect", tiny_checkpoint)


def test_inspect_escapes_control_characters_of_names(tmp_path: Path) -> None:
    save_file({"a\x1b[2Jb": torch.zeros(2)}, tmp_path / "evil.safetensors")
    result = run("inspect", tmp_path, "--tensors")
    assert "\x1b" not in result.stdout
    assert "a\\x1b[2Jb" in result.stdout


def test_inspect_reads_a_model_in_the_hubs_cache(tmp_path: Path, tiny_checkpoint: Path) -> None:
    model = tmp_path / "models--some--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "v2").write_text("0123456789abcdef")
    (model / "snapshots").mkdir()
    (model / "snapshots" / "0123456789abcdef").symlink_to(tiny_checkpoint)
    facts = answer("inspect", "some/model", "--revision", "v2", "--cache-dir", tmp_path)
    assert facts["tensor_count"] == 47
    assert run("inspect", "some/model", "--cache-dir", tmp_path).exit_code == 1


# --- plan ---------------------------------------------------------------------------------------


def test_plan_prints_its_summary_and_every_transfer(tiny_checkpoint: Path) -> None:
    summary, listing = run("plan", tiny_checkpoint, "--transfers").stdout.split("\n\n")
    assert summary.splitlines()[0] == "47 tensors, 656.77 kB wanted"
    header, *rows = [line.split() for line in listing.splitlines()]
    assert header == ["tag", "file", "offset", "length", "wanted", "target", "target_offset"]
    assert [row[0] for row in rows] == [str(tag) for tag in range(len(rows))]
    assert {row[1] for row in rows} == {p.name for p in tiny_checkpoint.glob("*.safetensors")}


def test_plan_as_json_agrees_with_itself(tiny_checkpoint: Path) -> None:
    facts = answer("plan", tiny_checkpoint, "--transfers", "--window", "128K")
    assert len(facts["windows"]) > 2
    assert facts["requests"] == len(facts["transfers"]) == facts["windows"][-1][1]
    assert facts["read_bytes"] == sum(read["wanted"] for read in facts["transfers"])
    assert "transfers" not in answer("plan", tiny_checkpoint)


def test_plan_of_names_has_only_their_tensors(tiny_checkpoint: Path) -> None:
    assert answer("plan", tiny_checkpoint, "--names", NORMS)["tensors"] == 4
    both = answer("plan", tiny_checkpoint, "--names", NORMS, "--names", EMBEDDING)
    assert both["tensors"] == 5
    assert both["wanted_bytes"] == 4 * 128 + 131072


@pytest.mark.parametrize("command", ["plan", "load"])
def test_name_without_a_match_is_an_error(command: str, tiny_checkpoint: Path) -> None:
    result = run(command, tiny_checkpoint, "--names", "no.such.*")
    assert result.exit_code == 1
    assert "'no.such.*'" in result.stderr


def test_exact_name_wins_over_glob(tmp_path: Path) -> None:
    save_file({"a[0]": torch.zeros(2), "a0": torch.zeros(2)}, tmp_path / "x.safetensors")
    (read,) = answer("plan", tmp_path, "--names", "a[0]", "--transfers")["transfers"]
    assert answer("plan", tmp_path, "--names", "a[0]")["tensors"] == 1
    assert read["wanted"] >= 8


# --- make-checkpoint ----------------------------------------------------------------------------


def test_make_checkpoint_writes_once(tmp_path: Path) -> None:
    words = ["make-checkpoint", "tiny", tmp_path / "model", "--layers", "1", "--seed", "3"]
    assert run(*words).exit_code == 0
    weights = next((tmp_path / "model").glob("*.safetensors"))
    before = weights.stat()
    again = run(*words)
    assert again.exit_code == 0
    assert "is there already" in again.stdout
    facts = answer(*words)
    assert facts["bytes"] > 0 and facts["written"] is False
    assert weights.stat() == before
    other = run("make-checkpoint", "tiny", tmp_path / "model", "--layers", "2")
    assert other.exit_code == 1
    assert "not empty" in other.stderr


def test_make_checkpoint_accepts_that_of_a_faster_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        shutil.copytree(source, target)
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    result = run("make-checkpoint", "tiny", tmp_path / "model")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "is there already" in result.stdout
    assert os.listdir(tmp_path) == ["model"]


def test_make_checkpoint_without_a_path_is_an_error(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in (tmp_path, tiny_checkpoint):
        monkeypatch.chdir(directory)
        result = run("make-checkpoint", "tiny", "")
        assert result.exit_code == 1 and "is empty" in result.stderr
    assert os.listdir(tmp_path) == []


def test_progress_bar_is_shown_on_terminals_only(tmp_path: Path) -> None:
    silent = process(COMMAND, "make-checkpoint", "tiny", tmp_path / "silent")
    assert (silent.returncode, silent.stderr) == (0, "")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    shown = process(COMMAND, "make-checkpoint", "tiny", tmp_path / "shown", stderr=theirs)
    os.close(theirs)
    assert shown.returncode == 0
    assert b"tiny: 100%" in os.read(ours, 65536)
    os.close(ours)


# --- run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_of_run_is_printed(option: str) -> None:
    ended = process(COMMAND, "run", option)
    assert ended.returncode == 0
    assert ended.stdout.startswith("Usage: gdsload run")
    assert max(map(len, ended.stdout.splitlines())) <= 80
    for name in ("--model", "--device", "--tier", "-m MODULE"):
        assert f"  {name}" in ended.stdout


@pytest.mark.parametrize("words", [["--modle"], ["--model", "x", "--modle"], ["-v"]])
def test_run_refuses_an_unknown_option_in_front_of_the_script(words: list[str]) -> None:
    result = run("run", *words, "serve.py")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"run has no option {words[-1]};" in result.stderr
    assert all(name in result.stderr for name in ("--model", "--device", "--tier", "-m", "-v"))


@pytest.mark.parametrize(("option", "lines"), [("-v", 1), ("-vv", 2)])
def test_run_logs_if_verbose_was_given(option: str, lines: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import logging\n"
        "log = logging.getLogger('gdsload.x')\n"
        "log.info('reading'), log.debug('detail')\n"
    )
    logged = process(COMMAND, option, "run", script).stderr.splitlines()
    ours = [line for line in logged if " gdsload.x: " in line]
    assert ours == ["INFO gdsload.x: reading", "DEBUG gdsload.x: detail"][:lines]


def test_run_passes_arguments_and_errors_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import logging, sys\n"
        "log = logging.getLogger('gdsload')\n"
        "print(sys.argv[1:], __name__, log.handlers, log.level)\n"
        "raise OSError('mine') if sys.argv[1:] == ['boom'] else SystemExit(7)\n"
    )
    ended = process(COMMAND, "run", script, "-v", "--help")
    assert ended.returncode == 7
    assert ended.stdout == "['-v', '--help'] __main__ [] 0\n"
    failed = process(COMMAND, "run", script, "boom")
    assert failed.returncode == 1
    assert failed.stderr.startswith("Traceback")
    assert failed.stderr.endswith("OSError: mine\n")
    assert run("run").exit_code == 2


def test_run_ends_as_a_script_that_closes_its_output(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('done')\nsys.stdout.close()\n")
    ended = process(COMMAND, "run", script)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_run_ends_as_a_script_whose_output_only_writes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "class Tee:\n"
        "    def __init__(self): self.out = sys.stdout\n"
        "    def write(self, text): self.out.write(text)\n"
        "    def flush(self): self.out.flush()\n"
        "sys.stdout = Tee()\n"
        "print('done')\n"
    )
    ended = process(COMMAND, "run", script)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


@pytest.mark.parametrize(
    ("error", "code"), [("BrokenPipeError", 1), ("EOFError", 1), ("KeyboardInterrupt", 130)]
)
def test_run_shows_errors_of_the_script_that_end_a_command_silently(
    error: str, code: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"raise {error}\n")
    ended = process(COMMAND, "run", script)
    assert ended.returncode == code
    assert ended.stderr.startswith("Traceback") and ended.stderr.endswith(f"\n{error}\n")


def test_run_prints_its_help_and_the_failure_of_its_prefetch(tmp_path: Path) -> None:
    assert "Runs a Python script" in run("run", "--help").stdout
    script = tmp_path / "script.py"
    script.write_text(AFTER_THE_PREFETCH)
    ended = process(COMMAND, "run", "--model", tmp_path / "typo", script)
    assert ended.returncode == 0
    assert ended.stderr.startswith("gdsload: the prefetch failed: No such file or directory: ")


@pytest.mark.parametrize("way", ["words", "environment"])
def test_run_says_that_its_prefetch_cannot_use_the_gpu(
    way: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(AFTER_THE_PREFETCH)
    device = "cuda:99"  # no machine has it
    words, environment = ["--model", str(tiny_checkpoint), "--device", device], {}
    if way == "environment":
        words, environment = [], {"GDSLOAD_PREFETCH": f"{tiny_checkpoint}@{device}"}
    ended = process(COMMAND, "run", *words, script, env=os.environ | environment)
    assert ended.returncode == 0
    assert ended.stderr.startswith(f"gdsload: the prefetch cannot use {device}: ")
    assert ended.stderr.count("\n") == 1


# --- exit codes --------------------------------------------------------------------------------


def test_help_of_80_columns_has_whole_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ([], ["cache"], ["bench"]):
        assert "..." not in run(*words, "--help").stdout.partition("Commands:")[2]
    text = " ".join(run("load", "--help").stdout.split())
    assert "Number of loads. [default: 1;" in text
    assert text.count("0:16, 5, or 2: for all from 2") == 2


def test_version_and_help_are_printed() -> None:
    assert run("--version").stdout.startswith("gdsload, version 0.")
    result = run("--help")
    assert result.exit_code == 0
    for command in ("inspect", "plan", "load", "doctor", "make-checkpoint", "run"):
        assert command in result.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["bake"],
        ["inspect"],
        ["load", "x", "--repeat", "0"],
        ["plan", "x", "--window", "lots"],
        ["make-checkpoint", "gpt-9", "x"],
        ["make-checkpoint", "tiny", "x", "--layers", "99"],
    ],
)
def test_wrong_arguments_exit_with_2(words: Sequence[str]) -> None:
    assert run(*words).exit_code == 2


@pytest.mark.parametrize(
    "words", [["doctor"], ["inspect"], ["cache", "list"], ["make-checkpoint", "tiny"]]
)
def test_path_that_cannot_be_reached_exits_with_1(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    result = run(*words, tmp_path / "loop")
    assert result.exit_code == 1
    assert "its symbolic links form a loop" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("doctor",),
        ("cache", "list"),
        ("cache", "clear"),
        ("make-checkpoint", "tiny"),
        ("manifest", "model", "--output"),
        ("verify", "model", "--manifest"),
        ("load", "model", "--trace"),
    ],
)
def test_command_for_a_local_path_refuses_a_url_and_does_not_show_its_secrets(
    command: Sequence[str],
) -> None:
    result = run(*command, "https://user:secret@host.example/model?signature=secret")
    assert result.exit_code == 2
    assert "https://host.example/model is a URL, and must be a local path" in result.output
    assert "secret" not in result.output


def test_doctor_of_a_path_that_is_not_there_exits_with_1(tmp_path: Path) -> None:
    result = run("doctor", tmp_path / "typo")
    assert result.exit_code == 1
    assert result.stderr == f"gdsload: No such file or directory: {tmp_path}/typo\n"


@pytest.mark.parametrize("command", ["inspect", "load", "doctor"])
def test_access_to_a_path_is_decided_by_opening_it(
    command: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by click before, whose message has no reason and no hint."""
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert run(command, tiny_checkpoint).exit_code != 2


def test_error_is_one_line_or_with_debug_a_traceback(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*_: object, **__: object) -> None:
        raise FileChanged("a.safetensors: it changed")

    monkeypatch.setattr(api, "load_file", changed)
    result = run("load", tiny_checkpoint)
    assert (result.exit_code, result.stderr) == (1, "gdsload: a.safetensors: it changed\n")
    for words in (["--debug", "load", tiny_checkpoint], ["load", "--debug", tiny_checkpoint]):
        with pytest.raises(FileChanged):
            run(*words)


def test_ctrl_c_exits_with_130(tiny_checkpoint: Path) -> None:
    ended = process(INTERRUPTED, "load", tiny_checkpoint)
    assert (ended.returncode, ended.stderr.strip()) == (130, "gdsload: interrupted")


@pytest.mark.parametrize("words", [["inspect", "--tensors"], ["load", "--json"]])
def test_closed_pipe_exits_with_141_in_silence(words: Sequence[str], tiny_checkpoint: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    ended = process(COMMAND, *words, tiny_checkpoint, stdout=theirs)
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("words", [["inspect", "SOURCE"], ["--help"], ["load", "--help"]])
def test_full_disk_behind_stdout_is_an_error(words: list[str], tiny_checkpoint: Path) -> None:
    words = [str(tiny_checkpoint) if word == "SOURCE" else word for word in words]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        ended = process(COMMAND, *words, stdout=full, env=buffered)
    assert ended.returncode == 1
    assert ended.stderr == "gdsload: standard output: No space left on device\n"


@pytest.mark.parametrize("words", [["doctor", "."], ["make-checkpoint", "tiny", "x"]])
def test_working_directory_that_was_removed_is_named(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = run(*words)
    assert result.exit_code == 1
    assert result.stderr == "gdsload: the current directory does not exist any more\n"


@pytest.mark.parametrize("words", [["--version"], ["inspect"], ["plan"], ["doctor"]])
def test_commands_other_than_load_do_not_import_torch(
    words: Sequence[str], tiny_checkpoint: Path
) -> None:
    ended = process(LIGHT, *words, *([] if words[0].startswith("-") else [tiny_checkpoint]))
    assert ended.returncode in (0, 1, 2), ended.stderr
    assert ended.stdout != ""
    assert ended.stderr == "\n"


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (["load"], "torch"),
        (["serve"], "torch"),
        (["bench", "cold"], "torch"),
        (["bench", "cold"], "numpy"),
        (["bench", "io"], "numpy"),
    ],
)
def test_command_without_a_package_names_what_to_install(
    words: list[str], package: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    # torch warns if numpy is missing.
    without = "import sys, warnings; warnings.simplefilter('ignore')\n"
    without += f"sys.modules[{package!r}] = None\n{COMMAND}"
    ended = process(without, *words, tiny_checkpoint, cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr == f"gdsload: {package} is not installed: pip install {package}\n"


def test_load_imports_torch(tiny_checkpoint: Path) -> None:
    assert "torch" in process(LIGHT, "load", tiny_checkpoint).stderr.split()


def test_load_of_a_path_that_is_not_there_does_not_import_torch(tmp_path: Path) -> None:
    ended = process(LIGHT, "load", tmp_path / "typo")
    assert ended.returncode == 1
    assert ended.stderr == f"gdsload: No such file or directory: {tmp_path}/typo\n\n"


@pytest.mark.parametrize(
    ("words", "logged"),
    [
        ([], {"broken"}),
        (["-v"], {"broken", "reading"}),
        (["-vv"], {"broken", "reading", "detail"}),
    ],
)
def test_verbose_sets_the_level_of_logging(
    words: Sequence[str], logged: set[str], tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("gdsload")
    original = api.load_file

    def talking(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        log.error("broken")
        log.info("reading")
        log.debug("detail")
        return original(*args, **kwargs)

    monkeypatch.setattr(api, "load_file", talking)
    before = log.level, list(log.handlers)
    for order in ([*words, "load"], ["load", *words]):
        lines = run(*order, tiny_checkpoint).stderr.splitlines()
        ours = {"broken", "reading", "detail"}
        assert ours & {line.split()[-1] for line in lines if line} == logged
    assert (log.level, list(log.handlers)) == before


# --- serve --------------------------------------------------------------------------------------


def test_serve_allows_as_many_descriptors_as_the_process_may_have() -> None:
    words = "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard); raise KeyboardInterrupt"
    assert process(SERVE.format(words), "serve", "model").stdout.startswith("True\n")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", 0, ""),
        ('raise ReadError("the disk is gone")', 1, "gdsload: the disk is gone\n"),
    ],
)
def test_serve_that_ends_before_it_serves_runs_no_exit_handlers(
    words: str, code: int, said: str
) -> None:
    ended = process(SERVE.format(words), "serve", "model")
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", said)


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64K", 65536),
        ("64KiB", 65536),
        ("64KB", 64000),
        ("1.5g", 3 << 29),
        ("2 MB", 2_000_000),
        ("7B", 7),
    ],
)
def test_bytes_with_units_are_parsed(text: str, nbytes: int) -> None:
    assert Bytes().convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "1X", "K", "1KK", "1e3"])
def test_bytes_without_a_number_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Bytes().convert(text, None, None)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_999, "1.00 MB"),
        (1_503_300_328, "1.50 GB"),
        (2 * 10**15, "2000.00 TB"),
    ],
)
def test_size_is_rounded_with_a_unit(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize("command", ["doctor", "inspect", "plan", "load"])
def test_storage_that_may_hang_is_not_asked_while_arguments_are_parsed(
    command: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    stat = os.stat

    def noted(path: Any, *args: Any, **words: Any) -> os.stat_result:
        if path == str(tiny_checkpoint) and threading.current_thread() is threading.main_thread():
            asked.append(path)
        return stat(path, *args, **words)

    monkeypatch.setattr(os, "stat", noted)
    assert run(command, tiny_checkpoint).exit_code == 0
    assert asked == []
