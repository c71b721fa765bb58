"""`make gpu-check` over doubles: its sections, verdicts, summary, and exit status."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gdsload
import gpudoubles
from gdsload.backends.cufile import library
from gdsload.errors import CuFileError
from gdsload.synthetic import checkpoints
from gpudoubles import CODE, HANG, NEGATIVE, STRANGE
from storage import ENGINES

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/gpu_check.py"
DOUBLE = ROOT / "tests/gpucheckdouble.py"
LIMIT_SECONDS = 1200  # generous: a machine may be busy
ONLY = ("--budget", str(LIMIT_SECONDS), "--only")  # and the names of sections


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return module("gpu_check")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libraries")
    for name in ("cuda_double", "cufile_double"):
        shutil.copy(gpudoubles.built(name), folder)
    return folder


def run(
    libraries: Path, tmp_path: Path, *words: str, program: Path = DOUBLE, **variables: str
) -> tuple[int, dict[str, Any], str]:
    """Exit status, verdicts by section and name, and the summary. `program`: the script, or the
    double that runs it with children that are forked."""
    out = tmp_path / "out"
    ran = subprocess.run(
        [
            sys.executable,
            program,
            "--small",
            "--gpu",
            DOUBLE,
            "--out",
            out,
            "--data",
            tmp_path,
            *words,
        ],
        env={
            **os.environ,
            "GPU_DOUBLE_LIBRARIES": str(libraries),
            "GPU_DOUBLE_ROOT": str(tmp_path),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS + 60,
    )
    lines = (out / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    found = {f"{row['section']}: {row['name']}": row["verdict"] for row in rows}
    assert "Error" not in ran.stderr, ran.stderr
    return ran.returncode, found, (out / "summary.md").read_text()


@pytest.mark.slow
def test_gpu_check_all_sections_give_good_verdicts(libraries: Path, tmp_path: Path) -> None:
    code, verdicts, summary = run(libraries, tmp_path, "--budget", str(LIMIT_SECONDS))
    bad = {
        name: each
        for name, each in verdicts.items()
        if each.startswith(("WRONG", "FAILED", "LEFT", "skipped"))
    }
    assert bad == {}
    for engine in ENGINES:
        assert verdicts[f"exact: posix/{engine}/direct"] == "exact"
    assert verdicts["exact: gds_mt"] == "exact"
    assert verdicts["cufile: gds_mt, nvfs, ring of 32 MiB"] == "exact"
    assert verdicts["first: load before torch"] == "ok"
    assert verdicts["capture: capture in the loading thread"] == "ok"
    assert verdicts["tables: warm tiny: pinned"].startswith("refused")
    assert "| loads are exact while a forked child lives | met |" in summary
    assert "| cuFile reads by its native path | met |" in summary
    assert "| all loaders of a table give the same bytes | met |" in summary
    assert code in (0, 1)  # a claim about seconds may be missed here


def test_gpu_check_failing_backend_misses_its_claim(libraries: Path, tmp_path: Path) -> None:
    code, verdicts, summary = run(
        libraries,
        tmp_path,
        *ONLY,
        "cufile",
        program=SCRIPT,
        GPU_DOUBLE_FAULT=f"cuFileRead:{NEGATIVE}:5044",
    )
    assert code == 1
    assert "5044" in verdicts["cufile: gds_mt, odd sizes"]
    assert "its process ends cleanly | missed |" in summary


def test_gpu_check_reads_in_compatibility_mode_miss_the_native_path(
    libraries: Path, tmp_path: Path
) -> None:
    """As of a filesystem that has no native path, on a machine that has one."""
    code, verdicts, summary = run(
        libraries, tmp_path, *ONLY, "exact", GPU_DOUBLE_FAULT=f"cuFileRead:{STRANGE}:0"
    )
    assert code == 1
    assert verdicts["exact: gds_mt"].startswith("FAILED: not by the native path: {'gds_mt/posix':")
    assert verdicts["exact: gds"] == "exact"
    assert "| cuFile reads by its native path | missed |" in summary


@pytest.mark.parametrize(
    ("paths", "native", "good"),
    [
        ({"gds_mt/nvfs": 60, "gds_mt/posix": 40}, "nvfs", True),  # the end of a small file
        ({"gds/p2p": 990 << 20, "gds/posix": 10 << 20}, "nvfs", True),
        ({"gds/nvfs": 900 << 20, "gds/posix": 100 << 20}, "nvfs", False),
        ({"gds_mt/compat": 100}, "p2p", False),
        ({"gds_mt/uncounted": 100}, "nvfs", False),
        ({"gds_mt/compat": 100}, "", True),
    ],
)
def test_gpu_check_native_path_reads_all_but_the_ends_of_files(
    paths: dict[str, int],
    native: str,
    good: bool,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "native_path", lambda: (native, ""))
    row = {"verdict": "exact", "first": {"paths": paths}, "left_bytes": 0}
    found = script.by_native_path(row)["verdict"]
    assert found == "exact" if good else found.startswith("FAILED: ")


def test_gpu_check_files_that_cufile_refuses_miss_no_claim(libraries: Path, tmp_path: Path) -> None:
    """As on overlayfs, with libcufile 1.15 and older."""
    _, verdicts, summary = run(
        libraries,
        tmp_path,
        *ONLY,
        "cufile",
        GPU_DOUBLE_FAULT=f"cuFileHandleRegister:{CODE}:5030",
    )
    assert verdicts["cufile: gds_mt, odd sizes"].startswith("refused: ")
    assert "its process ends cleanly | met |" in summary


def test_gpu_check_without_numpy_reads_by_cufile_and_measures_rates(
    libraries: Path, tmp_path: Path
) -> None:
    """The wheels of torch do not need it."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('numpy', name='numpy')")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    _, verdicts, _ = run(
        libraries,
        tmp_path,
        *ONLY,
        "cufile",
        "micro",
        PYTHONPATH=path,
    )
    assert verdicts["cufile: gds, odd sizes"] == "exact"
    assert verdicts["cufile: gds, nvfs, ring of 32 MiB"] == "exact"
    assert set(verdicts.values()) <= {"exact", "ok", "not changed"}


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("gdsload/_native/cuda", "ImportError: version `GLIBC_2.34` not found"),
        ("torch", "ModuleNotFoundError: No module named 'torch'"),
        ("", r"\w+Error: .*(CUDA|NVIDIA).*"),  # by torch's version
    ],
)
def test_gpu_check_without_gdsload_torch_or_gpu_ends_before_the_sections(
    module: str, error: str, tmp_path: Path
) -> None:
    if module:
        broken = tmp_path / f"{module}.py"
        broken.parent.mkdir(parents=True, exist_ok=True)
        for folder in {*broken.parents} - {tmp_path, *tmp_path.parents}:
            (folder / "__init__.py").touch()
        name, _, why = error.partition(": ")
        broken.write_text(f"raise {name}({why!r})")
    earlier = tmp_path / "out/results.jsonl"
    earlier.parent.mkdir()
    earlier.write_text("{}")
    words = ["--budget", "99", "--only", "facts", "--out", earlier.parent, "--data", tmp_path]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    ran = subprocess.run(
        [sys.executable, SCRIPT, *words],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert re.fullmatch(f"gpu-check: {error}\n", ran.stderr)
    assert earlier.read_text() == "{}", "the results of an earlier check are gone"


def test_gpu_check_keeps_devices_open_until_the_end(script: ModuleType, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia12", "nvidiactl"):
        (tmp_path / name).touch()
    (tmp_path / "nvidia1").mkdir()  # cannot be opened

    def held() -> set[str]:
        links = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
        return {name for name in os.listdir(tmp_path) if str(tmp_path / name) in links}

    with script.held_devices(tmp_path):
        assert held() == {"nvidia0", "nvidia12"}
    assert held() == set()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "/nowhere"], "--data /nowhere: there is no such directory"),
        (["--only", "exactly"], "--only exactly: it must be the beginning of one of"),
    ],
)
def test_gpu_check_with_wrong_arguments_keeps_the_results_of_the_last_one(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    (tmp_path / "results.jsonl").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        script.main(["--out", str(tmp_path), *words])
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert (tmp_path / "results.jsonl").read_text() == "{}"


def test_gpu_check_hanging_section_ends_with_the_budget(libraries: Path, tmp_path: Path) -> None:
    """The rest is reported as skipped."""
    code, verdicts, summary = run(
        libraries,
        tmp_path,
        "--budget",
        "9",
        "--only",
        "cufile",
        "micro",
        GPU_DOUBLE_FAULT=f"cuFileRead:{HANG}:0",
    )
    assert code == 1
    assert verdicts["cufile: end"].startswith("FAILED: it did not end")
    assert verdicts["micro: end"].startswith("skipped")
    assert "its process ends cleanly | missed |" in summary


def test_gpu_check_summary_of_cut_results_reports_what_was_measured(
    script: ModuleType, tmp_path: Path
) -> None:
    for name in range(8):
        script.append(tmp_path, "exact", {"name": f"posix/{name}", "verdict": "exact"})
    for arm, seconds in (("gdsload", 1.0), ("pinned", 0.95), ("runai", 2.0)):
        for number in range(4):
            script.append(tmp_path, "tables", {
                "name": arm, "verdict": "ok", "table": "warm m", "arm": arm, "round": number,
                "seconds": seconds, "bytes": 10**9, "notes": {"report": {"phases": {}}},
            })  # fmt: skip
    text, good = script.summary(tmp_path)
    assert good
    assert "| warm: 0.9 of the rate of pinned memory | met | warm m: 0.95 |" in text
    assert "| warm: no other loader is 5 % faster after the first load | met |" in text
    assert "| cold: no other loader is 5 % faster after the first load | not measured |" in text
    script.append(tmp_path, "exact", {"name": "posix/x", "verdict": "WRONG: a: other bytes"})
    with (tmp_path / "results.jsonl").open("a") as out:
        out.write('{"section": "tab')
    text, good = script.summary(tmp_path)
    assert not good and "| missed | posix/x: WRONG: a: other bytes |" in text


@pytest.mark.parametrize(
    ("seconds", "rounds", "verdict"),
    [(0.96, 4, "met"), (0.94, 4, "missed"), (0.94, 3, "not measured")],
)
def test_gpu_check_other_loader_is_faster_by_more_than_noise_in_three_rounds(
    seconds: float, rounds: int, verdict: str, script: ModuleType
) -> None:
    rows = [
        {"verdict": "ok", "table": "cold m", "arm": arm, "round": number, "seconds": took}
        for arm, took in (("gdsload", 1.0), ("runai", seconds))
        for number in range(rounds)
    ]
    assert script.fastest("cold")(rows)[0] == verdict


@pytest.mark.parametrize("verdict", ["WRONG: a: other bytes", "FAILED: m", "LEFT: 8 bytes"])
def test_gpu_check_bad_row_of_each_backend_misses_a_claim(
    verdict: str, script: ModuleType, tmp_path: Path
) -> None:
    names = "auto", "gds_mt", "gds", "stream", "slices", "posix/uring/direct", "odd/direct"
    for name in (*names, "slices after a prefetch"):
        rows = [{"section": "exact", "name": name, "verdict": verdict}]
        missed = [claim for claim in script.CLAIMS if claim.decide(rows)[0] == script.MISSED]
        assert missed, name


@pytest.mark.parametrize("code", [5008, 5027, 5030])
def test_gpu_check_file_that_cufile_refuses_is_no_failure(code: int, script: ModuleType) -> None:
    def register() -> dict[str, Any]:
        raise CuFileError("m: cuFile refused", code=code, path="m")

    assert script.tried("file", register)["verdict"] == "refused: m: cuFile refused"


def test_gpu_check_read_that_cufile_fails_is_a_failure(script: ModuleType) -> None:
    def read() -> dict[str, Any]:
        raise CuFileError("m: cuFile failed", code=5030, path="m", wanted=4096)

    assert script.tried("read", read)["verdict"] == "FAILED: m: cuFile failed"


def test_gpu_check_without_direct_io_refuses_its_checks(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No such file" in script.no_direct_io(tmp_path / "absent")
    monkeypatch.setattr(script, "no_direct_io", lambda file: "EINVAL")
    load = script.loading(SimpleNamespace(device="cpu"), tmp_path / "m", cache="direct")
    assert script.tried("direct", load)["verdict"] == "refused: no direct I/O: EINVAL"


def test_gpu_check_disk_too_slow_for_a_checkpoint_is_no_failure(
    script: ModuleType, tmp_path: Path
) -> None:
    context = script.Context(None, tmp_path, tmp_path, True, False, 0.0, [], [])
    script.run_section("tables", context)
    [row] = script.read_rows(tmp_path)
    assert row["verdict"] == "refused: the disk is too slow to write tiny in time"
    assert not (tmp_path / "tiny").exists()
    later = context._replace(ends=time.monotonic() + 1000)
    with pytest.raises(script.Refused, match="too slow"):
        later.checkpoint("tiny")


@pytest.mark.parametrize(
    ("seconds", "names", "verdict"),
    [
        (9.0, [*map(str, range(10))], "met | 10 checks |"),
        (
            10.0,
            [*map(str, range(9)), "rest"],
            "not measured | 9 checks, and no time for the rest |",
        ),
    ],
)
def test_gpu_check_slow_section_ends_before_its_limit(
    seconds: float,
    names: list[str],
    verdict: str,
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def make_row() -> dict[str, Any]:
        now[0] += seconds
        return {}

    checks = [script.Check(str(number), make_row) for number in range(10)]
    section = script.Section("capture", lambda context: iter(checks), 100.0, {})
    context = script.Context(None, tmp_path, tmp_path, True, False, 100.0, [], [])
    for row in script.rows_of(section, context):
        script.append(tmp_path, "capture", row)
    assert [row["name"] for row in script.read_rows(tmp_path)] == names
    text, _ = script.summary(tmp_path)
    assert f"do not disturb each other | {verdict}" in text


def test_gpu_check_tables_that_did_not_end_decide_nothing(
    script: ModuleType, tmp_path: Path
) -> None:
    for name in ("warm tiny: gdsload", "cold tiny: runai"):
        script.append(tmp_path, "tables", {"name": name, "verdict": "ok"})
    script.append(tmp_path, "tables", {"name": "end", "verdict": "FAILED: it did not end in 9 s"})
    text, _ = script.summary(tmp_path)
    assert "| all loaders of a table give the same bytes | met | 2 checks |" in text


def test_gpu_check_checkpoint_that_was_too_slow_refuses_no_other(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(
        name: str, path: Path, *, layers: int | None, progress: Callable[[int], None]
    ) -> None:
        progress(0)

    monkeypatch.setattr(checkpoints, "write", write)
    context = script.Context(None, tmp_path, tmp_path, True, False, 0.0, [], [])
    with pytest.raises(script.Refused):
        context.checkpoint("qwen3-0.6b", 6)
    later = context._replace(ends=time.monotonic() + 1000)
    assert later.checkpoint("qwen3-0.6b") == tmp_path / "qwen3-0.6b"


@pytest.mark.parametrize(("large", "loaders", "seconds"), [(False, 10, 20.0), (True, 7, 60.0)])
def test_gpu_check_large_checkpoint_has_few_loaders_with_more_time(
    large: bool,
    loaders: int,
    seconds: float,
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    class Arm:
        def __init__(self, *_: object) -> None: ...

        def ask(self, source: Path, seconds: float) -> None:
            asked.append(seconds)
            raise OSError("no GPU")

        def begin(self, source: Path, seconds: float) -> None: ...

        def close(self) -> None: ...

    conditions = script.bench("judge").Conditions
    for name in ("make_cache", "settled_bytes"):
        monkeypatch.setattr(conditions, name, lambda _: 0)
    monkeypatch.setattr(script, "ArmProcess", Arm)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(script.LARGE_BYTES + large)
    ends = time.monotonic() + LIMIT_SECONDS
    gpu = SimpleNamespace(host_device="cpu")
    context = script.Context(gpu, tmp_path, tmp_path, False, False, ends, [], [])
    assert len(list(script.rounds(context, tmp_path, True, ends))) == loaders
    assert asked == [seconds] * loaders


def test_gpu_check_loader_that_keeps_memory_of_the_device_is_started_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    ended: list[str] = []

    class Arm:
        def __init__(self, context: object, label: str) -> None:
            self.label = label
            made.append(label)

        def begin(self, source: Path, seconds: float, loads: int = 0) -> None:
            assert loads == (made.count(self.label) > 1), "its later loads are not the first ones"

        def ask(self, source: Path, seconds: float) -> dict[str, Any]:
            return {"seconds": 1.0, "left_bytes": 4096 if self.label == "pinned" else 1024}

        def close(self) -> None:
            ended.append(self.label)

    conditions = script.bench("judge").Conditions
    for name in ("make_cache", "settled_bytes"):
        monkeypatch.setattr(conditions, name, lambda _: 4096)
    monkeypatch.setattr(script, "ArmProcess", Arm)
    cleared: list[int] = []
    monkeypatch.setattr(script, "wait_until_cleared", cleared.append)
    (tmp_path / "model.safetensors").write_bytes(bytes(4096))
    ends = time.monotonic() + LIMIT_SECONDS
    gpu = SimpleNamespace(host_device="cpu")
    context = script.Context(gpu, tmp_path, tmp_path, True, False, ends, [], [])
    rows = list(script.rounds(context, tmp_path, True, ends))
    assert [row["verdict"] for row in rows] == ["ok"] * 6
    assert sorted(made) == ["gdsload", "pinned", "pinned", "safetensors-mmap"]
    assert cleared == [4096, 4096], "the next loader begins while its memory is cleared"
    assert sorted(ended) == sorted(made)


@pytest.mark.parametrize(
    ("seconds", "why"),
    [
        (2, r"refused: \d s left, 150 s needed"),
        (999, "refused: 1,000 bytes of the device free, 17,179,869,184 needed"),
    ],
)
def test_gpu_check_without_a_large_table_gives_the_reason(
    seconds: float, why: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gdsload.system import gpu

    full = SimpleNamespace(memory=lambda: (1000, 2000))
    monkeypatch.setattr(gpu, "device", lambda ordinal: full)
    ends = time.monotonic() + seconds
    here = SimpleNamespace(device="cuda:0")
    context = script.Context(here, tmp_path, tmp_path, False, False, ends, [], [])
    row = next(script.tables(context))
    assert row["name"] == "qwen2.5-7b" and re.fullmatch(why, row["verdict"])


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_gpu_check_without_packages_for_models_refuses_them(
    missing: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: name != missing or None)
    rows = list(script.model(None))
    assert [row["verdict"] for row in rows] == [f"refused: {missing} is not installed"]


def test_gpu_check_with_old_transformers_refuses_models(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(script.importlib.metadata, "version", lambda name: "4.56.2")
    rows = list(script.model(None))
    assert [row["verdict"] for row in rows] == ["refused: transformers 4.56.2, 4.57 is needed"]


def test_gpu_check_work_that_ended_before_the_load_decides_nothing(script: ModuleType) -> None:
    row = {"section": "streams", "name": "older work", "verdict": "exact"}
    row |= {"reused": 3, "seconds": 0.3}
    assert script.reused_memory([row])[0] == script.NOT_MEASURED
    assert script.reused_memory([row, {**row, "seconds": 0.1}])[0] == script.NOT_MEASURED
    assert script.reused_memory([row, {**row, "reused": 0}])[0] == script.NOT_MEASURED
    assert script.reused_memory([row, row])[0] == script.MET
    wrong = {**row, "seconds": 0.1, "verdict": "WRONG: the load overwrote memory"}
    assert script.reused_memory([row, wrong])[0] == script.MISSED


def test_gpu_check_load_that_was_not_interrupted_decides_nothing(
    script: ModuleType, tmp_path: Path
) -> None:
    refused = "refused: the load ended before it could be interrupted"
    for name, verdict in (("interrupted with copies queued", refused), ("two threads", "exact")):
        script.append(tmp_path, "streams", {"name": name, "verdict": verdict})
    text, _ = script.summary(tmp_path)
    assert (
        f"do not disturb each other | not measured | interrupted with copies queued: {refused}"
        in text
    )


def test_gpu_check_kernel_of_older_work_is_loaded_before_the_device_is_busy(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            done.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    gpu = SimpleNamespace(
        device="cuda:0",
        empty=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
        synchronize=lambda: None,
        keep_busy=lambda seconds: done.append("busy"),
    )
    wanted = {"a": torch.zeros(4)}
    monkeypatch.setattr(script, "poison", lambda gpu, wanted: None)
    monkeypatch.setattr(gdsload, "load_file", lambda *_, **words: wanted)
    with Calls():
        assert script.older_work(gpu, Path("m"), wanted)["verdict"] == "exact"
    kernel = [each for each in done if each in ("mul", "busy")]
    assert kernel == ["mul", "busy", "mul"]


@pytest.mark.parametrize(("rate", "verdict"), [(9.6, "met"), (9.4, "missed")])
def test_gpu_check_copy_rate_is_compared_with_other_sizes_on_one_stream(
    rate: float, verdict: str, script: ModuleType
) -> None:
    row = {"name": "host to device: registered-huge", "slot": "4096 KiB"}
    row |= {"4096 KiB, 1 streams, GB/s": rate}
    row |= {"8192 KiB, 1 streams, GB/s": 10.0, "8192 KiB, 2 streams, GB/s": 12.0}
    assert script.one_copy_thread([row]) == (verdict, f"{rate} of 10.0 GB/s")
    by_one_call = {"together": 4, "4096 KiB, 4 together, 1 streams, GB/s": 9.9}
    assert script.one_copy_thread([row | by_one_call]) == ("met", "9.9 of 10.0 GB/s")


def test_gpu_check_copy_rate_is_the_best_of_three_runs(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waits = [0.0], iter([0.0, 4.0, 0.0, 1.0, 0.0, 2.0])  # before and after each run

    def synchronize() -> None:
        now[0] += next(waits)

    gpu = SimpleNamespace(empty=torch.empty, stream=lambda: None, synchronize=synchronize)
    memory = contextlib.nullcontext(torch.zeros(1 << 20))
    monkeypatch.setattr(script, "pinned", lambda *_: memory)
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: now[0]))
    row = script.copies(gpu, "pageable", 1 << 20, 1 << 20, [1 << 20])
    assert row["1024 KiB, 1 streams, GB/s"] == (1 << 20) / 1e9


def test_gpu_check_decides_about_allocators_only_with_each_mode(script: ModuleType) -> None:
    rows = [
        {"section": f"allocator {mode}", "name": str(number), "verdict": verdict}
        for mode in script.ALLOCATOR_MODES
        for number, verdict in enumerate(["refused: no direct I/O", "exact", "exact"])
    ]
    assert script.every_allocator(rows)[0] == script.MET
    verdict, words = script.every_allocator(rows[:-1])
    assert verdict == script.NOT_MEASURED and words.startswith(script.ALLOCATOR_MODES[-1])
    rows[1]["verdict"] = "WRONG: other bytes"
    assert script.every_allocator(rows[:-1])[0] == script.MISSED


GROWTH = [
    ([0, 0], "{good}"),
    ([2, 0], "{good}"),  # a step of the driver
    ([2, 2, 0], "{good}"),
    ([2, 2, 2], "LEFT: {total} bytes"),
    ([33, 0], "LEFT: {total} bytes"),
]


def growing(script: ModuleType, patch: pytest.MonkeyPatch, *grown: int) -> None:
    """Loads of nothing, after which so many MiB more of the device are in use."""
    used = itertools.accumulate(grown, initial=0)
    patch.setattr(script, "used_bytes", lambda gpu: next(used) << 20)
    patch.setattr(script, "expected", lambda gpu, source: {})
    patch.setattr(script, "poison", lambda gpu, wanted: None)
    patch.setattr(gdsload, "last_report", lambda: SimpleNamespace(to_dict=dict))


@pytest.mark.parametrize(("grown", "verdict"), GROWTH)
def test_gpu_check_only_memory_that_each_load_takes_is_left(
    grown: list[int], verdict: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing(script, monkeypatch, 30, *grown)
    row = script.twice(None, {}, dict)
    assert row["verdict"].startswith(verdict.format(good="exact", total=f"{sum(grown) << 20:,}"))


@pytest.mark.parametrize(("grown", "verdict"), GROWTH)
def test_gpu_check_only_memory_that_each_refusal_takes_is_left(
    grown: list[int], verdict: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing(script, monkeypatch, *grown)
    full: list[bool] = []

    def load(*_: object) -> dict[str, Any]:
        if full and full.pop():
            raise gdsload.PlacementError("full")
        return {}

    gpu = SimpleNamespace(device="cuda:0", fill_memory=lambda leave: full.append(True))
    monkeypatch.setattr(gdsload, "load_file", load)
    context = SimpleNamespace(gpu=gpu, main_checkpoint="m")
    row = script.full_device(context)
    assert row["verdict"].startswith(verdict.format(good="ok", total=f"{sum(grown) << 20:,}"))


@pytest.mark.parametrize("section", ["load before torch", "prefetch before torch"])
def test_gpu_check_loads_before_torch_is_imported(section: str, tmp_path: Path) -> None:
    words = ["--device", "cpu", "--small", "--section", section, "--out", tmp_path]
    ran = subprocess.run(
        [sys.executable, SCRIPT, *words, "--work", tmp_path], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def test_gpu_check_exit_with_daemon_has_started_cuda_before(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def thread(**_: object) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: done.append("thread"))

    monkeypatch.setattr(gdsload, "load_file", lambda *_: done.append("load"))
    monkeypatch.setattr(script, "threading", SimpleNamespace(Thread=thread))
    monkeypatch.setattr(script, "time", SimpleNamespace(sleep=lambda seconds: None))
    script.exit_with_daemon(SimpleNamespace(main_checkpoint="m", device="cuda:0"))
    assert done == ["load", "thread"]


def test_gpu_check_differs_names_the_difference(script: ModuleType) -> None:
    one = {"a": torch.arange(4)}
    assert script.differs(one, {"a": torch.arange(4)}) == ""
    assert script.differs(one, {"a": torch.tensor([0, 1, 2, 4])}) == "a: other bytes"
    assert script.differs(one, {"a": torch.arange(4).int()}) == "a: torch.int64 (4,)"
    assert "other names" in script.differs(one, {})


def test_gpu_check_unpacks_wheels_that_fit_this_python(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = sys.version_info.minor
    names = {
        "ours/gdsload-0-cp310-abi3-linux_x86_64.whl": True,
        "ours/torch-0-py3-none-any.whl": False,  # installed here
        f"peers/fits-0-cp3{number}-cp3{number}-linux_x86_64.whl": True,
        "peers/other-0-cp39-cp39-linux_x86_64.whl": False,
        "peers/newer-0-cp399-abi3-linux_x86_64.whl": False,
        "peers/pure-0-py3-none-any.whl": True,
    }
    for name in names:
        wheel = tmp_path / "bundle/wheels" / name
        wheel.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_LZMA) as opened:
            folder = "" if "pure" not in name else "pure-0.data/purelib/"
            opened.writestr(f"{folder}{wheel.name.split('-')[0]}.py", "")
    monkeypatch.setattr(script, "HERE", tmp_path / "bundle")
    script.unpack_wheels(tmp_path)
    for name, fits in names.items():
        folder, _, wheel = name.partition("/")
        assert (tmp_path / f"site-{folder}/{wheel.split('-')[0]}.py").exists() is fits, name


def test_gpu_bundle_pins_the_versions_of_the_benchmarks() -> None:
    bundle = module("gpu_bundle")
    pins = bundle.requirements("peers")
    assert all(pins[name].startswith("==") for name in bundle.PEERS)
    assert bundle.requirements("prefetch")["safetensors"].startswith("==0.9")


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = module("gpu_bundle")
    for folder in ("scripts", "benchmarks"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.setattr(found, "ROOT", tmp_path)

    def build_wheel(out: Path) -> Path:
        out.mkdir(parents=True)
        with zipfile.ZipFile(out / "gdsload-0-py3-none-any.whl", "w"):
            return out / "gdsload-0-py3-none-any.whl"

    monkeypatch.setattr(found, "build_wheel", build_wheel)
    return found


def test_gpu_bundle_without_the_packages_of_gdsload_fails(
    bundle: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = {"click"}
    monkeypatch.setattr(
        bundle,
        "download",
        lambda out, python, package: "no such wheel" if package in refused else "",
    )
    assert bundle.main() == 1
    assert "gdsload needs click for Python 3.10" in capfd.readouterr().err
    refused.clear()
    assert bundle.main() == 0


def test_gpu_bundle_without_pip_ends_before_it_builds(
    bundle: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pip", "ensurepip"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('no {name} here')")
    uv = tmp_path / "bin/uv"
    uv.parent.mkdir()
    uv.write_text("#!/bin/sh\necho 'uv has no network' >&2\nexit 1\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    with pytest.raises(SystemExit, match=r"no pip.*no ensurepip here; uv has no network"):
        bundle.main()
    assert not (tmp_path / "build").exists()
    uv.write_text(f'#!/bin/sh\n[ "$1 $2" = "pip install" ] && : >"{tmp_path}/pip.py"\n')
    bundle.require_pip()
