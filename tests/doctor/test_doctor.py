"""The doctor: each check sees other machines by `root` or by doubles."""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command import PATIENCE_SECONDS, run
from gdsload import backends, doctor
from gdsload.backends import Support, register_backend, registry
from gdsload.backends.posix.engines import ENGINES
from gdsload.doctor import gpu, limits, software, storage
from gdsload.doctor.finding import Diagnosis, Finding, Verdict
from gdsload.remote.object_store import INSTALL_HINT


def machine(root: Path, files: dict[str, str]) -> str:
    """Creates a root directory with these files; returns its path."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def verdicts(*engines: str, direct: Verdict = "yes") -> Diagnosis:
    findings = [Finding(f"engine {name}", "yes" if name in engines else "no") for name in ENGINES]
    return Diagnosis((*findings, Finding("direct I/O on /data", direct)))


# --- verdict, exit code, summary ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("diagnosis", "code"),
    [
        (verdicts(*ENGINES), 0),
        (verdicts(ENGINES[0]), 0),
        (verdicts(*ENGINES[1:]), 1),
        (verdicts(*ENGINES, direct="no"), 1),
        (verdicts(ENGINES[-1]), 1),
        (verdicts(), 2),
        (Diagnosis((Finding(f"engine {ENGINES[0]}", "yes"),)), 0),
    ],
)
def test_exit_code_follows_engines_and_direct_io(diagnosis: Diagnosis, code: int) -> None:
    assert diagnosis.exit_code == code


def test_summary_has_a_line_per_finding_and_hints_of_failures() -> None:
    shown = Diagnosis(
        (
            Finding("engine uring", "no", "blocked", "allow it"),
            Finding("kernel", "yes", "Linux 7", "not shown"),
        )
    ).summary()
    assert shown.splitlines() == [
        "no      engine uring  blocked",
        "                      hint: allow it",
        "yes     kernel        Linux 7",
        "",
        "No path to DRAM works: no engine can read here.",
    ]


@pytest.mark.parametrize(
    ("direct", "conclusion"),
    [
        ((Finding("direct I/O on m", "yes"),), "The default path to DRAM works"),
        ((Finding("direct I/O on m", "partly"),), "direct I/O was not tried"),
        ((Finding("direct I/O on m", "no"),), "Only slower paths"),
        ((), "direct I/O was not tried"),
    ],
)
def test_conclusion_says_whether_direct_io_was_tried(
    direct: tuple[Finding, ...], conclusion: str
) -> None:
    shown = Diagnosis((Finding(f"engine {ENGINES[0]}", "yes"), *direct)).summary()
    assert conclusion in shown.splitlines()[-1]


def test_summary_of_a_machine_without_a_gpu_leaves_out_checks_of_gpus() -> None:
    checks = (
        Finding("cuda:0", "no", "no driver", "install it", needs="GPU"),
        Finding("libcufile", "yes", "1.14", needs="GPU"),
    )
    shown = Diagnosis((Finding("GPU", "no", "none found"), *checks)).summary().splitlines()
    assert shown[:3] == [
        "no      GPU        none found",
        "yes     libcufile  1.14",
        "        1 more about GPUs: gdsload doctor --json",
    ]
    shown = Diagnosis((Finding("GPU", "partly", "without a driver"), *checks)).summary()
    assert "cuda:0" in shown


def test_long_names_do_not_widen_the_column_of_names() -> None:
    shown = Diagnosis(
        (Finding("memory", "yes", "1 GB"), Finding("x" * 41, "yes", "seen"))
    ).summary()
    assert shown.splitlines()[:2] == ["yes     memory  1 GB", f"yes     {'x' * 41}  seen"]


# --- the kernel ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("soft", "capabilities", "verdict"),
    [
        (8 << 20, "0000000000000000", "partly"),
        (8 << 20, "0000000000004000", "yes"),
        (32 << 20, "0000000000000000", "partly"),  # smaller than a staging ring
        (1 << 30, "0000000000000000", "yes"),
        (resource.RLIM_INFINITY, "0000000000000000", "yes"),
    ],
)
def test_locked_memory_depends_on_limit_and_capability(
    soft: int, capabilities: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    root = machine(tmp_path, {"proc/self/status": f"Name:\tx\nCapEff:\t{capabilities}\n"})
    assert limits.locked_memory(root).verdict == verdict


@pytest.mark.parametrize(
    ("users", "verdict"), [("0 0 4294967295", "yes"), ("0 100000 65536", "partly")]
)
def test_locked_memory_of_a_user_namespace_is_limited_in_spite_of_the_capability(
    users: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    status = {"proc/self/status": "CapEff:\t0000000000004000\n", "proc/self/uid_map": users}
    assert limits.locked_memory(machine(tmp_path, status)).verdict == verdict


@pytest.mark.parametrize(
    ("state", "verdict", "detail"),
    [
        ("always [madvise] never\n", "yes", "madvise"),
        ("always madvise [never]\n", "no", "never"),
        (None, "no", "this kernel has no transparent huge pages"),
    ],
)
def test_huge_pages_reports_the_state_of_the_kernel(
    state: str | None, verdict: str, detail: str, tmp_path: Path
) -> None:
    where = "sys/kernel/mm/transparent_hugepage/enabled"
    found = limits.huge_pages(machine(tmp_path, {} if state is None else {where: state}))
    assert (found.verdict, found.detail) == (verdict, detail)


def test_idle_page_cache_is_kept_or_returned_by_damon(tmp_path: Path) -> None:
    assert limits.idle_page_cache(str(tmp_path)).verdict == "yes"
    kdamond = "sys/kernel/mm/damon/admin/kdamonds/0"
    context, scheme = f"{kdamond}/contexts/0", f"{kdamond}/contexts/0/schemes/0"
    files = {
        f"{kdamond}/state": "off\n",
        f"{context}/operations": "paddr\n",
        f"{context}/monitoring_attrs/intervals/aggr_us": "5000000\n",
        f"{scheme}/action": "pageout\n",
        f"{scheme}/access_pattern/age/min": "12\n",
    }
    assert limits.idle_page_cache(machine(tmp_path, files)).verdict == "yes"
    files[f"{kdamond}/state"] = "on\n"
    found = limits.idle_page_cache(machine(tmp_path, files))
    assert (found.verdict, found.detail[:18]) == ("partly", "is freed 60 s afte")
    module = "sys/module/damon_reclaim/parameters"
    reclaims = {f"{module}/enabled": "Y\n", f"{module}/min_age": "30000000\n"}
    assert "is freed 30 s" in limits.idle_page_cache(machine(tmp_path, reclaims)).detail
    others = {f"{module}/enabled": "N\n", f"{scheme}/action": "stat\n"}
    assert limits.idle_page_cache(machine(tmp_path, others)).verdict == "yes"


def test_idle_page_cache_is_uncertain_to_users_who_cannot_read_the_settings_of_damon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    root = machine(tmp_path, {"proc/7/comm": "bash\n"})
    assert limits.idle_page_cache(root).verdict == "yes"
    machine(tmp_path, {"proc/78/comm": "kdamond.0\n"})
    found = limits.idle_page_cache(root)
    assert (found.verdict, found.detail[:12]) == ("partly", "may be freed")


def refuse(code: int) -> Callable[..., int]:
    def refused(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return refused


def test_page_cache_is_asked_about_a_file_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def owners_only(fd: int, *_: int) -> int:
        if os.fstat(fd).st_nlink:  # a file of others, such as the interpreter
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return 0

    monkeypatch.setattr(limits.system, "cachestat", owners_only)
    assert limits.page_cache().verdict == "yes"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_page_cache_without_cachestat_uses_mincore(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits.system, "cachestat", refuse(code))
    found = limits.page_cache()
    assert found.verdict == "partly"
    assert "mincore" in found.detail
    monkeypatch.setattr(limits.system, "mincore_pages", refuse(errno.EPERM))
    assert limits.page_cache().verdict == "no"


def test_page_cache_without_a_memory_file_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse(errno.EPERM))
    found = limits.page_cache()
    assert (found.verdict, found.detail[:15]) == ("partly", "cannot be asked")


def test_memory_of_unknown_size_is_partly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_bytes", lambda: 23_530_000_000)
    assert limits.memory().detail.startswith("23.53 GB available")
    monkeypatch.setattr(limits, "available_bytes", lambda: None)
    assert limits.memory().verdict == "partly"


# --- software -----------------------------------------------------------------------------------


def test_package_version_is_reported_without_import() -> None:
    assert software.package("pytest").detail == pytest.__version__
    absent = software.package("no-such-package-here")
    assert (absent.verdict, absent.hint) == ("no", "pip install no-such-package-here")


def test_client_of_object_stores_is_reported_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(software, "package", lambda name: Finding(name, "yes", "1.2"))
    assert "1.2: reads s3://" in software.remote_client().detail
    monkeypatch.setattr(software, "package", lambda name: Finding(name, "no", "not installed"))
    assert software.remote_client().hint == INSTALL_HINT


def test_engine_failure_has_reasons_and_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "try_engine", lambda name: Support(False, ("a", "b"), "hint it"))
    assert software.engine("uring") == Finding("engine uring", "no", "a; b", "hint it")
    monkeypatch.setattr(software, "try_engine", lambda name: Support(True))
    assert software.engine("uring").verdict == "yes"


class Wagon(backends.Backend):
    """A plugin for DRAM that has nothing but a probe."""

    name = "wagon"
    support = Support(True)

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        if cls.support.reasons == ("raise",):
            raise RuntimeError("a wheel came off")
        return cls.support

    def _never(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the doctor only asks")

    limits = register = deregister = prepare = post = check = release = _never


class Rocket(Wagon):
    """A plugin for VRAM, which must not be probed."""

    name = "rocket"
    memory_kinds = frozenset({backends.VRAM})
    support = Support(True, ("raise",))


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    register_backend(Wagon)
    register_backend(Rocket)
    found, _ = registry.discover()
    monkeypatch.setattr(registry, "discover", lambda: (found, {"stale": "made for API 9.0"}))


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("support", "verdict", "detail"),
    [
        (Support(True), "yes", "reaches DRAM"),
        (Support(True, ("slow",), "oil"), "partly", "reaches DRAM: slow"),
        (Support(False, ("no horse",), "buy one"), "no", "reaches DRAM: no horse"),
        (Support(True, ("raise",)), "no", "its probe raised RuntimeError: a wheel came off"),
    ],
)
def test_backends_report_their_probe_and_left_out_plugins(
    support: Support, verdict: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wagon, "support", support)
    found = {each.name: each for each in software.backends()}
    assert found["backend wagon"].verdict == verdict
    assert detail in found["backend wagon"].detail
    assert found["backend rocket"].detail == "VRAM only: not tried here"
    assert found["plugin stale"].verdict == "no"
    assert "made for API 9.0" in found["plugin stale"].detail
    assert found["backend posix"].verdict in ("yes", "partly")
    listed = [name for name in found if name.startswith("backend ")]
    assert listed == sorted(listed)


# --- storage ------------------------------------------------------------------------------------

MOUNTS = """\
1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 0:5 / {path} rw shared:7 - ext4 /dev/hidden rw
3 1 0:6 / {path} rw shared:7 master:1 - {kind} {device} rw
4 1 0:7 / {path}er rw - xfs /dev/sdz rw
"""


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [("xfs", "yes"), ("tmpfs", "partly"), ("nfs4", "partly"), ("fuse.sshfs", "partly")],
)
def test_filesystem_of_a_path_is_found_in_mountinfo(
    kind: str, verdict: str, tmp_path: Path
) -> None:
    disk = tmp_path / "my disk"
    disk.mkdir()
    (disk / "file").touch()
    shown = str(disk.resolve()).replace(" ", "\\040")
    mounts = MOUNTS.format(path=shown, kind=kind, device="here:/it")
    root = machine(tmp_path / "root", {"proc/self/mountinfo": mounts})
    found = storage.filesystem(disk / "file", root)
    assert found.verdict == verdict
    assert found.detail.startswith(f"{kind} on here:/it, mounted at {disk.resolve()}")
    assert storage.filesystem(disk.parent, root).detail == "ext4 on /dev/sda1, mounted at /"
    assert storage.filesystem(disk / "nothing", root).verdict == "no"
    assert storage.filesystem(disk, str(tmp_path)).verdict == "partly"


def test_direct_io_is_tried_on_a_file_a_directory_and_an_empty_directory(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    for path in (tiny_checkpoint, next(tiny_checkpoint.glob("*.safetensors"))):
        found = storage.direct_io(path)
        assert found.name == f"direct I/O on {path}"
        assert found.verdict == "yes" or "refused" in found.detail or "none" in found.detail
    assert storage.direct_io(tmp_path).verdict == storage.direct_io(tiny_checkpoint).verdict
    assert list(tmp_path.iterdir()) == []


def test_each_finding_is_one_line() -> None:
    finding = Finding("plugin a", "no", "first\nsecond \x1b[31m", hint="do\nthis")
    lines = Diagnosis((finding,)).summary().splitlines()
    assert lines[0] == "no      plugin a  first\\nsecond \\x1b[31m"
    assert lines[1].endswith("hint: do\\nthis")


def test_path_that_does_not_answer_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(storage, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(storage, "filesystem", lambda *_: answers.wait(PATIENCE_SECONDS))
    try:
        hanging, untried = storage.findings(tmp_path)
    finally:
        answers.set()
    assert (hanging.name, hanging.verdict) == (f"filesystem of {tmp_path}", "no")
    assert "has not answered" in hanging.detail
    assert (untried.name, untried.verdict) == (f"direct I/O on {tmp_path}", "no")
    with pytest.raises(FileNotFoundError):
        storage.findings(tmp_path / "nothing")


def test_direct_io_is_tried_beside_a_loop_of_links(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert storage.direct_io(tmp_path).verdict == storage.direct_io(tiny_checkpoint).verdict


def test_direct_io_refused_by_the_filesystem_is_no(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.system, "direct_alignment", lambda fd: (0, 0))
    assert storage.direct_io(tiny_checkpoint).verdict == "no"
    monkeypatch.setattr(storage.system, "direct_alignment", lambda fd: None)
    monkeypatch.setattr(storage.os, "preadv", refuse(errno.EINVAL))
    found = storage.direct_io(tiny_checkpoint)
    assert (found.verdict, found.detail) == ("no", "refused: Invalid argument")
    assert found.hint != ""


def test_file_that_cannot_be_read_is_no_refusal_of_direct_io(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.os, "preadv", refuse(errno.EIO))
    found = storage.direct_io(tiny_checkpoint)
    assert (found.verdict, found.detail) == ("no", "it cannot be read: Input/output error")
    assert "a load would end with an error" in found.hint


def test_directory_whose_daemon_has_ended_is_not_one_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.os, "scandir", refuse(errno.ENOTCONN))
    monkeypatch.setattr(storage.os, "access", lambda *_: False)
    found = storage.direct_io(tmp_path)
    assert (found.verdict, found.hint) == ("no", "")
    assert "Transport endpoint is not connected" in found.detail


def test_direct_io_on_a_fifo_returns_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    found = storage.direct_io(tmp_path / "fifo")
    assert found.verdict == "no"
    assert "FIFO" in found.detail
    assert storage.direct_io(tmp_path / "nothing").verdict == "no"


# --- GPU ----------------------------------------------------------------------------------------

CARD = {
    "sys/bus/pci/devices/0000:17:00.0/class": "0x030200\n",
    "sys/bus/pci/devices/0000:17:00.0/vendor": "0x10de\n",
}
DRIVEN = {"proc/driver/nvidia/gpus/0000:17:00.0/information": "Model: \t NVIDIA H200\nIRQ: 1\n"}


@pytest.mark.parametrize(
    ("files", "verdict", "detail"),
    [
        ({}, "no", "no NVIDIA GPU"),
        (CARD, "partly", "0000:17:00.0, without a driver"),
        (CARD | DRIVEN, "yes", "1 with NVIDIA's driver"),
        ({name: text.replace("0x10de", "0x8086") for name, text in CARD.items()}, "no", "no NVID"),
    ],
)
def test_gpu_is_found_by_driver_or_pci(
    files: dict[str, str], verdict: str, detail: str, tmp_path: Path
) -> None:
    found = gpu.driver(machine(tmp_path, files))
    assert found.verdict == verdict
    assert detail in found.detail


def test_gpu_without_files_of_its_driver_is_found_by_cuda(tmp_path: Path) -> None:
    assert gpu.driver(machine(tmp_path, {}), 2) == Finding("GPU", "yes", "2 found by CUDA")


# --- the command --------------------------------------------------------------------------------


def test_examine_has_each_finding_once(tiny_checkpoint: Path) -> None:
    names = [each.name for each in doctor.examine(tiny_checkpoint).findings]
    assert len(set(names)) == len(names)
    assert {f"engine {name}" for name in ENGINES} <= set(names)
    expected = {"torch", "memlock", "memory", "backend posix", "GPU", "native path", "libcufile"}
    assert expected | {f"direct I/O on {tiny_checkpoint}"} <= set(names)


def test_doctor_command_prints_and_exits_by_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    for engines in (ENGINES, ENGINES[1:], ()):
        diagnosis = verdicts(*engines)
        monkeypatch.setattr(doctor, "examine", lambda path, given=diagnosis: given)
        text, facts = run("doctor"), run("doctor", "--json")
        assert text.exit_code == facts.exit_code == diagnosis.exit_code
        assert text.stdout.rstrip("\n") == diagnosis.summary()
        assert json.loads(facts.stdout) == diagnosis.to_dict()


def test_direct_io_of_a_directory_is_tried_on_a_file_two_levels_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "models" / "team"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(bytes(8192))
    expected = storage.direct_io(model).verdict
    monkeypatch.delattr(storage.os, "O_TMPFILE")  # nothing is created
    assert storage.direct_io(tmp_path).verdict == expected


def test_directory_that_this_user_may_not_read_is_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.os, "access", lambda *_: False)
    assert storage.direct_io(tmp_path).verdict == "no"


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EOPNOTSUPP])
def test_direct_io_that_cannot_be_tried_is_partly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(storage.os, "open", refuse(code))
    found = storage.direct_io(tmp_path)
    assert (found.verdict, found.hint) == ("partly", "name a directory or a file of a checkpoint")
    assert Diagnosis((Finding("engine threads", "yes"), found)).exit_code == 0
