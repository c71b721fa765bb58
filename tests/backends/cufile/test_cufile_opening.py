"""Opening cuFile, the obstacles to it, and the facts about devices."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

import pytest

import descriptors
import gdsload
import gpudoubles
from contract import SIZE
from gdsload.backends import OpenFile, registry
from gdsload.backends.cufile import library
from gdsload.backends.cufile.gds import GdsBackend
from gdsload.backends.cufile.gds_mt import GdsMtBackend
from gdsload.backends.posix import PosixBackend
from gdsload.doctor import gpu as doctor_gpu
from gdsload.errors import BackendUnavailable, GdsloadError, PlacementError
from gdsload.memory import staging_ring
from gdsload.system import gpu
from gpudoubles import CLOSES_INPUT, CODE, Doubles
from gpuloads import SMALL, Load


def test_failed_open_is_final(doubles: Doubles) -> None:
    doubles.fault("cuFileDriverOpen", CODE, 5011)
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="5011"):
            library.opened("cuda:0", False)
    assert doubles.cufile_log["opens"] == 0
    assert not library.support("cuda:0", True).usable


def test_driver_without_properties_is_closed(doubles: Doubles) -> None:
    doubles.fault("cuFileDriverGetProperties", CODE, 5030, times=-1)
    doubles.fault("cuFileDriverClose_v2", CODE, 5004, skip=1)
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="5030"):
            library.opened("cuda:0", False)
    assert (doubles.cufile_log["opens"], doubles.cufile_log["open"]) == (1, 0)


def test_driver_that_does_not_close_raises(doubles: Doubles) -> None:
    library.opened("cuda:0", False)
    doubles.fault("cuFileDriverClose_v2", CODE, 5004)
    with pytest.raises(GdsloadError, match="does not close"):
        gdsload.quiesce()
    assert not library.support("cuda:0", False).usable


def test_open_that_closes_standard_input_gives_it_back(doubles: Doubles) -> None:
    """cuFile closes it if nvidia-fs is loaded and its device nodes are missing."""
    before = os.fstat(0), os.get_inheritable(0)
    doubles.fault("cuFileDriverOpen", CLOSES_INPUT)
    with descriptors.none_left():
        library.opened("cuda:0", False)
    assert doubles.struck == 1
    assert os.path.samestat(os.fstat(0), before[0])
    assert os.get_inheritable(0) == before[1]


@pytest.mark.parametrize(
    ("text", "parallel_io", "p2pdma", "direct_io_kb"),
    [
        ("{}", 0, 1, 16384),
        ('{"execution": {"parallel_io": true}}', -1, 1, 16384),
        ('{"properties": {"use_pci_p2pdma": false}}', 0, -1, 16384),
        ('{"properties": {"max_direct_io_size_kb": 1024}}', 0, 1, 512),
    ],
)
def test_switches_without_a_setting_of_the_user_are_set(
    text: str,
    parallel_io: int,
    p2pdma: int,
    direct_io_kb: int,
    doubles: Doubles,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """On a machine for PCI P2PDMA: no second pool of threads, and the mode is asked for."""
    doubles.set(native=gpudoubles.P2P)
    (tmp_path / "root/proc/driver/nvidia-fs/version").unlink()
    (tmp_path / "root/proc/driver/nvidia").mkdir()
    (tmp_path / "root/proc/driver/nvidia/params").write_text("RMForceStaticBar1=1")
    doubles.size(5, 512)  # the double does not read the file
    (tmp_path / "own.json").write_text(text)
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "own.json"))
    monkeypatch.delenv("CUFILE_USE_PCIP2PDMA", raising=False)
    library.opened("cuda:0", False)
    switch = doubles.cufile.cufile_double_switch
    assert (switch(4), switch(7)) == (parallel_io, p2pdma)
    assert library.library().get_size(5) == direct_io_kb


def test_compatibility_mode_is_refused(doubles: Doubles) -> None:
    doubles.set(native=gpudoubles.COMPAT)
    with pytest.raises(BackendUnavailable, match="5001"):
        library.opened("cuda:0", False)


def test_compatibility_mode_of_old_releases_is_refused(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 1.14 only the properties of an open driver show the mode."""
    doubles.set(native=gpudoubles.COMPAT, version=1110)
    doubles.fault("cuFileSetParameterBool", CODE, 5030, times=-1)
    with pytest.raises(BackendUnavailable, match="compatibility mode only"):
        library.opened("cuda:0", False)
    assert doubles.cufile_log["open"] == 0


def set_old_release(doubles: Doubles, *, compat: bool = True) -> None:
    """libcufile 1.11 to 1.13 on a machine with nvidia-fs: no parameters, and no statistics.
    `compat`: whether its cufile.json allows compatibility mode."""
    doubles.set(version=1110)
    if not compat:
        doubles.forbid_compat()
    for call in ("SetParameterBool", "SetParameterSizeT", "GetParameterSizeT", "SetStatsLevel"):
        doubles.fault(f"cuFile{call}", CODE, 5030, times=-1)


def test_old_release_with_compatibility_mode_allowed_is_refused(doubles: Doubles) -> None:
    set_old_release(doubles)
    with pytest.raises(BackendUnavailable, match="set allow_compat_mode to false"):
        library.opened("cuda:0", False)
    assert (doubles.cufile_log["opens"], doubles.cufile_log["open"]) == (1, 0)


@pytest.mark.parametrize(("allow", "path"), [(False, "nvfs"), (True, "uncounted")])
def test_old_release_reports_its_mode_only_if_compatibility_mode_is_refused(
    allow: bool, path: str, doubles: Doubles, file: OpenFile
) -> None:
    set_old_release(doubles, compat=allow)
    with GdsMtBackend(**SMALL, allow_compat=allow) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert backend.paths(load.request) == {f"gds_mt/{path}": SIZE}
        backend.release(load.request)


@pytest.mark.parametrize("own", [False, True])
def test_small_reads_of_old_release_are_explained_unless_the_user_set_them(
    own: bool, doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = json.dumps({"properties": {"max_direct_io_size_kb": 1024} if own else {}})
    (tmp_path / "own.json").write_text(text)
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "own.json"))
    set_old_release(doubles, compat=False)
    doubles.size(5, 1024)
    with GdsMtBackend(**SMALL) as backend:
        backend.register(file)
        assert ("max_direct_io_size_kb to 16384" in str(backend.refusals)) != own


@pytest.mark.parametrize(
    ("machine", "mode"),
    [({"native": 1}, "nvfs"), ({"native": 2}, "p2p"), ({"native": 0}, "compat")],
)
def test_mode_is_reported(
    machine: dict[str, int], mode: str, doubles: Doubles, file: OpenFile
) -> None:
    doubles.set(**machine)
    with GdsMtBackend(**SMALL, allow_compat=True) as backend:
        load = Load(backend, file)
        assert load.finish() == {}
        assert backend.engine == mode
        path = "posix" if mode == "compat" else mode
        paths = backend.paths(load.request)
        assert paths.pop(f"gds_mt/{path}") + sum(paths.values()) == SIZE
        assert paths.keys() <= {"gds_mt/posix"}, "cuFile counts a POSIX read at the end of the file"
        assert ("gds_mt/native" in backend.refusals) == (mode == "compat")
        backend.release(load.request)


def test_reads_whose_counts_another_request_got_have_the_paths_of_all(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuFile counts the reads of a driver, and not those of a request."""
    doubles.set(native=gpudoubles.P2P)
    counts = {"p2p": 100, "nvfs": 0, "posix": 50}
    monkeypatch.setattr(library.Driver, "paths", lambda _: dict(counts))
    with GdsMtBackend(**SMALL) as backend:
        loads = [Load(backend, file) for _ in range(2)]
        assert [load.finish() for load in loads] == [{}, {}]
        counts["posix"] += 12
        found = [backend.paths(load.request) for load in loads]
        assert found == [{"gds_mt/posix": SIZE}] * 2
        for load in loads:
            backend.release(load.request)


@pytest.mark.parametrize(
    ("gone", "why"),
    [
        ("proc/modules", "/proc/modules cannot be read"),
        ("run/udev", "no /run/udev"),
        ("dev/nvidia-fs0", "not in this container"),
        ("proc/driver/nvidia-fs/version", "nvidia-fs is not loaded"),
    ],
)
def test_missing_machine_file_is_refused(
    gone: str, why: str, doubles: Doubles, tmp_path: Path
) -> None:
    path = tmp_path / "root" / gone
    path.rmdir() if path.is_dir() else path.unlink()
    before = doubles.cufile.double_calls()
    support = GdsMtBackend.probe("cuda:0")
    assert not support.usable
    assert why in str(support)
    assert doubles.cufile.double_calls() - before <= 1  # its version at most: nothing was opened
    with pytest.raises(BackendUnavailable, match="cannot load"):
        registry.choose("cuda:0", "gds_mt")
    allowed = registry.choose("cuda:0", "gds_mt", {"allow_compat": True}) if "nvidia" in gone else 0
    assert allowed == 0 or allowed.backend is GdsMtBackend


def test_choose_prefers_native_gds_to_posix(doubles: Doubles, tmp_path: Path) -> None:
    assert registry.choose("cuda:0").backend is GdsMtBackend
    (tmp_path / "root/dev/nvidia-fs0").unlink()
    choice = registry.choose("cuda:0")
    assert choice.backend is PosixBackend
    assert "gds_mt" in choice.refusals


def test_log_is_not_written_to_the_working_directory(doubles: Doubles) -> None:
    library.opened("cuda:0", False)
    assert os.path.isabs(doubles.log_path)
    assert "CUFILE_LOGFILE_PATH" not in os.environ


def test_cufile_opens_where_no_directory_is_writable(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unusable() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", unusable)
    library.opened("cuda:0", False)
    assert doubles.log_path == "cufile.log"


@pytest.mark.parametrize(
    ("text", "its_own"),
    [
        ('{"logging": {"dir": "/var/log"}}', True),
        # As in NVIDIA's packages.
        ('{"logging": {\n // "dir": "/home/<xxxx>",\n "level": "ERROR" /* "dir": "/x" */}}', False),
        ("[]", False),
    ],
)
def test_log_setting_of_the_user_is_respected(
    text: str, its_own: bool, doubles: Doubles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own.json").write_text(text)
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "own.json"))
    library.opened("cuda:0", False)
    assert (doubles.log_path == "cufile.log") == its_own


def test_log_variable_of_the_user_is_respected(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFILE_LOGFILE_PATH", "/somewhere/x.log")
    library.opened("cuda:0", False)
    assert doubles.log_path == os.environ["CUFILE_LOGFILE_PATH"] == "/somewhere/x.log"


@pytest.mark.parametrize(("version", "asked"), [(1150, 0), (1160, 0), (1190, 0), (1200, 1)])
def test_flags_of_p2p_are_asked_only_of_releases_that_keep_parameters(
    version: int, asked: int, doubles: Doubles
) -> None:
    doubles.set(native=gpudoubles.P2P, version=version)
    doubles.fault("cuFileDriverGetP2PFlags", CODE, 5030, times=-1)
    library.opened("cuda:0", True)
    assert doubles.struck == asked


@pytest.mark.parametrize("old", [False, True])
def test_reads_that_nobody_counts_are_refused_if_compatibility_mode_was_allowed_before(
    old: bool, doubles: Doubles
) -> None:
    if old:
        set_old_release(doubles)
    library.opened("cuda:0", True)
    for kind, counted in ((GdsMtBackend, not old), (GdsBackend, False)):
        found = kind.probe("cuda:0")
        assert found.usable == counted
        assert ("would not count it" in str(found)) != counted
        assert kind.probe_with("cuda:0", {"allow_compat": True}).usable


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("version", [1140, 1150, 1160, 1170])
def test_parameters_are_kept_by_releases_that_forget_them(
    version: int, allow: bool, doubles: Doubles
) -> None:
    """1.14 to 1.16 forget all of them if they are asked for their properties."""
    doubles.set(version=version)
    driver = library.opened("cuda:0", allow)
    assert library.library().get_size(5) == 16384
    assert driver.mode == "nvfs"
    assert driver.uncounted_path == ("uncounted" if allow else "nvfs")
    assert driver.limits == (1 << 20, 128 << 20, 128)


@pytest.mark.parametrize(
    "text", ["5", '"x"', '{"properties": 5}', '{"execution": []}', '{"block": {"nvme": 5}}']
)
def test_settings_that_end_the_process_are_refused(
    text: str, doubles: Doubles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """libcufile calls terminate() for a section that is no object."""
    (tmp_path / "own.json").write_text(text)
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "own.json"))
    with pytest.raises(BackendUnavailable, match=r"would end this process: .*own.json: .* object"):
        library.opened("cuda:0", True)
    assert doubles.cufile_log["opens"] == 0
    found = doctor_gpu.configuration()
    assert found.verdict == "no" and "object" in found.detail


def test_sizes_of_slabs_are_left_to_cufile(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slabs = {"slab_size_kb": [1024], "slab_count": [32]}
    own = {"per_buffer_cache_size_kb": 16384, "gpu_bounce_buffer_slab_config": slabs}
    text = json.dumps({"properties": own})
    (tmp_path / "own.json").write_text(text)
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "own.json"))
    doubles.size(5, 512)
    library.opened("cuda:0", True)
    assert library.library().get_size(5) == 512
    assert doctor_gpu.configuration().verdict == "yes"


@pytest.mark.parametrize("code", [-22, 5002])
def test_invalid_settings_are_named(
    code: int, doubles: Doubles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own.json").write_text('{"properties": {')
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "own.json"))
    doubles.fault("cuFileDriverOpen", CODE, code)
    with pytest.raises(BackendUnavailable, match=r"own.json\): it is not JSON"):
        library.opened("cuda:0", False)


@pytest.mark.parametrize(
    ("text", "verdict", "words"),
    [
        (None, "partly", "there is no such file"),
        ("# {}", "no", "not JSON"),
        ('{"properties": {"io_batchsize": 8 /* few */}} // yes', "yes", "own.json"),
        ('{"properties": {"per_buffer_cache_size_kb": 16384}}', "partly", "holds 8 buffers"),
    ],
)
def test_doctor_shows_the_settings(
    text: str | None,
    verdict: str,
    words: str,
    doubles: Doubles,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    own = tmp_path / "own.json"
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(own))
    if text is not None:
        own.write_text(text)
    facts = {each.name: each for each in doctor_gpu.findings(str(tmp_path))}
    found = facts["cuFile's configuration"]
    assert (found.verdict, words in found.detail) == (verdict, True), found


def test_stalling_batch_limits_are_explained(doubles: Doubles, file: OpenFile) -> None:
    doubles.size(7, 16384)  # per_buffer_cache_size_kb, with max_device_cache_size_kb at 131072
    with GdsBackend(ring_bytes=64 << 20) as backend:
        load = Load(backend, file)
        assert "max_device_cache_size_kb to 2097152" in backend.refusals["gds/limits"]
        assert backend.limits("cuda:0").depth == 8
        assert load.finish() == {}
        backend.release(load.request)


def test_ring_of_large_buffers_is_bounded(doubles: Doubles, file: OpenFile) -> None:
    doubles.size(6, 2 << 20)  # max_device_cache_size_kb
    doubles.size(7, 16384)  # per_buffer_cache_size_kb
    with GdsBackend() as backend:
        load = Load(backend, file)
        (ring,) = staging_ring.rings()
        assert (ring.nbytes, ring.native.count) == (512 << 20, 32)
        assert load.finish() == {}
        backend.release(load.request)


def test_missing_device_raises(doubles: Doubles) -> None:
    with pytest.raises(PlacementError, match="CUDA sees 2"):
        gpu.device(7)
    assert not PosixBackend.probe("cuda:7").usable
    assert not PosixBackend.probe("mps").usable


def test_device_has_name_bus_and_numa_node(doubles: Doubles, tmp_path: Path) -> None:
    found = gpu.device(1)
    assert (found.name, found.bus) == ("Double 1", "0000:02:00.0")
    folder = tmp_path / "root/sys/bus/pci/devices/0000:02:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    assert gpu.numa_node("00000000:02:00.0", str(tmp_path / "root")) == 1
    assert gpu.numa_node("0000:99:00.0", str(tmp_path / "root")) == -1


def test_missing_room_raises_with_its_bytes(doubles: Doubles) -> None:
    doubles.set(nbytes=(1 << 30) + doubles.cuda_log["used"])
    gpu.require_room(0, 1 << 29)
    with pytest.raises(PlacementError) as caught:
        gpu.require_room(0, 1 << 30)
    assert caught.value.missing_bytes == gpu.SPARE_BYTES


def test_page_cache_in_memory_that_a_device_shares_has_room(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubles.set(nbytes=1 << 34)
    doubles.share_memory(cached=(1 << 34) - (1 << 30))
    monkeypatch.setattr(gpu, "available_bytes", lambda: 1 << 33)
    assert gpu.require_room(0, 1 << 32) == (1 << 33) - gpu.SPARE_BYTES
    with pytest.raises(PlacementError, match="only 8,589,934,592 of 17,179,869,184 are free"):
        gpu.require_room(0, 1 << 33)
    monkeypatch.setattr(gpu, "available_bytes", lambda: None)
    with pytest.raises(PlacementError):
        gpu.require_room(0, 1 << 32)
    assert doctor_gpu.cuda("cuda:0").detail.endswith("memory shared with the host")


def test_doctor_reports_devices_cufile_and_rings(
    doubles: Doubles, file: OpenFile, tmp_path: Path
) -> None:
    opens = doubles.cufile_log["opens"]
    facts = {each.name: each for each in doctor_gpu.findings(str(tmp_path))}
    assert {each.verdict for each in facts.values() if each.name != "GPU"} == {"yes"}
    assert facts["libcufile"].detail.startswith("1.17 at ")
    assert "Double 0 at 0000:01:00.0" in facts["cuda:0"].detail
    assert doubles.cufile_log["opens"] == opens
    (tmp_path / "root/dev/nvidia-fs0").unlink()
    (tmp_path / "root/run/udev").rmdir()
    facts = {each.name: each for each in (*doctor_gpu.findings(), doctor_gpu.cuda("cuda:9"))}
    assert "not in this container" in facts["native path"].detail
    assert "/run/udev" in facts["opening cuFile"].hint
    assert "CUDA sees 2" in facts["cuda:9"].detail
    assert {facts[name].verdict for name in ("native path", "opening cuFile", "cuda:9")} == {"no"}
    with PosixBackend(**SMALL) as backend:
        load = Load(backend, file)
        load.finish()
        backend.release(load.request)
        (ringed,) = doctor_gpu.staging_rings()
    assert (ringed.name, ringed.detail[:13]) == ("ring of cuda:0", "1 MiB of DRAM")
