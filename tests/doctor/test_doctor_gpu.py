"""The doctor's findings for I/O paths into VRAM, with doubles of CUDA and cuFile."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import gpudoubles
from command import run
from gdsload import doctor
from gdsload.backends import tuning_cache
from gdsload.backends.tuning_cache import TunedChoice
from gdsload.doctor import gpu
from gdsload.doctor.finding import Finding
from gdsload.errors import BackendUnavailable
from gdsload.system import shared_libraries
from gpudoubles import Doubles


def found() -> dict[str, Finding]:
    findings = doctor.examine().findings
    assert len({each.name for each in findings}) == len(findings)
    return {each.name: each for each in findings}


def test_devices_and_native_path_are_found(doubles: Doubles) -> None:
    findings = found()
    assert findings["cuda:0"].detail.startswith("Double 0 at 0000:01:00.0")
    assert findings["cuda:1"].verdict == "yes"
    assert (findings["native path"].verdict, findings["native path"].detail) == ("yes", "nvidia-fs")
    assert doubles.cufile_log["opens"] == 0


def test_device_that_is_in_use_is_no_matter_of_the_driver(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.gpu, "why_not", lambda _: "cuDevicePrimaryCtxRetain: out of memory")
    assert "nvidia-smi" in gpu.cuda("cuda:0").hint
    assert "driver" in gpu.cuda("cuda:9").hint
    monkeypatch.setattr(gpu.gpu, "cuda", refuse)
    assert "driver" in gpu.cuda("cuda:0").hint


def refuse() -> None:
    raise BackendUnavailable("no CUDA")


def test_native_path_without_nvidia_fs_has_the_reason(doubles: Doubles, tmp_path: Path) -> None:
    (tmp_path / "root/proc/driver/nvidia-fs/version").unlink()
    native = found()["native path"]
    assert native.verdict == "no" and native.hint
    assert "only cuFile's compatibility mode" in native.detail
    assert "nvidia-fs is not loaded" in native.detail


def test_paths_without_a_device_have_reasons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpudoubles.forget(monkeypatch)
    monkeypatch.setattr(shared_libraries, "candidates", lambda soname: [f"{tmp_path}/{soname}"])
    names = {each.name: each for each in gpu.findings()}
    assert {"native path", "opening cuFile", "libcufile"} <= set(names)
    assert (names["cuda:0"].verdict, bool(names["cuda:0"].hint)) == ("no", True)
    assert gpu.measured() == []


def test_measurement_is_shown_and_stale_one_is_partly(doubles: Doubles) -> None:
    versions = tuning_cache.versions()
    rates = {"posix": 8e9, "gds_mt": 12.1e9}
    for mount, at in (("xfs /dev/md0 9:0", time.time()), ("ext4 /dev/sda 8:0", 1.0)):
        tuning_cache.store(
            TunedChoice(mount, "Double 0 0000:01:00.0", "gds_mt", rates, versions, at)
        )
    findings = found()
    good = findings["measured from xfs /dev/md0 9:0 to Double 0 0000:01:00.0"]
    assert good.verdict == "yes"
    assert good.detail.startswith("gds_mt was chosen: gds_mt 12.10 GB/s, posix 8.00 GB/s, on ")
    old = findings["measured from ext4 /dev/sda 8:0 to Double 0 0000:01:00.0"]
    assert old.verdict == "partly" and "30 days ago" in old.detail and old.hint
    shown = json.loads(run("doctor", "--json").stdout)
    assert [each["detail"] for each in shown["findings"] if each["name"] == good.name] == [
        good.detail
    ]
