"""scripts/install_gds.sh on fabricated machines: directories for /proc, /sys, /etc and /dev, and a
PATH with fakes of nvidia-smi, apt-get, modprobe and others, which record their calls.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install_gds.sh"
KERNEL = "6.8.0-45-generic"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\n"
STATIC_BAR1 = 'RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"\n'
P2PDMA_SYMBOL = "0000000000000000 d p2pdma_pgmap_ops\n"
NVFS_SYMBOL = "0000000000000000 T nvme_v1_register_nvfs_dma_ops\t[nvme]\n"
ROOT_MOUNT = "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n"
CHANGERS = ("apt-get", "dpkg", "modprobe")

# Each records its call. apt-get "builds" the module, modprobe "loads" a built one.
FAKES = {
    "uname": f'case $1 in -r) echo {KERNEL} ;; -m) echo "${{FAKE_ARCH:-x86_64}}" ;; esac',
    "id": 'echo "${FAKE_UID:-0}"',
    "nvidia-smi": (
        '[ -f "$STATE/gpus" ] || exit 9\n'
        'case "$*" in *--query-gpu*) cat "$STATE/gpus" ;;\n'
        '*) echo "| NVIDIA-SMI 570   ${FAKE_CUDA_NAME:-CUDA} Version: ${FAKE_CUDA:-12.8} |" ;; esac'
    ),
    "modinfo": '[ "$1" = nvidia_fs ] && [ -f "$STATE/built" ]',
    "ofed_info": "exit 1",
    "apt-cache": (
        'if grep -qx "$2" "$STATE/offered" 2>/dev/null; then found=2.0; else found="(none)"; fi\n'
        'printf "%s:\\n  Installed: (none)\\n  Candidate: %s\\n" "$2" "$found"'
    ),
    "apt-get": '[ ! -f "$STATE/broken" ] || exit 100\n[ "$1" != install ] || : >"$STATE/built"',
    "dpkg": "exit 0",
    "dpkg-deb": 'sed -n "s/^Package: //p" "$2"',
    "modprobe": (
        '[ -f "$STATE/built" ] || exit 1\n'
        'mkdir -p "$GDSLOAD_SYSROOT/proc/driver/nvidia-fs"\n'
        'echo "version: 2.25.7" >"$GDSLOAD_SYSROOT/proc/driver/nvidia-fs/version"\n'
        ': >"$GDSLOAD_SYSROOT/dev/nvidia-fs0"'
    ),
}


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Machine:
    """A machine made of files: put() adds files, run() runs the script on it."""

    def __init__(self, directory: Path) -> None:
        self.root, self.state, self.bin = (directory / part for part in ("root", "state", "bin"))
        for made in (self.root, self.state, self.bin):
            made.mkdir()
        for name, body in FAKES.items():
            fake = self.bin / name
            fake.write_text(f'#!/bin/sh\necho "{name} $*" >>"$STATE/calls"\n{body}\n')
            fake.chmod(0o755)
        self.put("etc/os-release", 'ID=ubuntu\nID_LIKE=debian\nPRETTY_NAME="Ubuntu 24.04 LTS"\n')
        self.put("proc/modules", "nvme 65536 3 - Live 0x0\n")
        self.put("proc/kallsyms", "0000000000000000 T _text\n")
        self.put("proc/self/mountinfo", ROOT_MOUNT)
        self.put("run/udev/data/b259:2", "")
        self.put("dev/null", "")
        self.put("models/a.safetensors", "")
        number = self.root / "sys/dev/block/259:2"
        number.parent.mkdir(parents=True)
        number.symlink_to("../../devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1/nvme0n1p2")

    def put(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def with_gpu(self, gpus: str = "NVIDIA H100 80GB HBM3, 9.0\n", driver: str = OPEN) -> None:
        (self.state / "gpus").write_text(gpus)
        self.put("proc/driver/nvidia/version", driver)
        self.put("proc/driver/nvidia/params", 'RegistryDwords: ""\n')

    def with_nvidia_fs(self) -> None:
        self.put("proc/modules", "nvidia_fs 262144 0 - Live 0x0\n")
        self.put("proc/driver/nvidia-fs/version", "version: 2.25.7\n")
        self.put("dev/nvidia-fs0", "")

    def with_p2pdma(self) -> None:
        self.put("proc/kallsyms", P2PDMA_SYMBOL)
        self.put("proc/driver/nvidia/params", STATIC_BAR1)
        self.put("sys/module/nvme_core/parameters/multipath", "N\n")
        self.put("etc/cufile.json", '{\n  // ours\n  "properties": {"use_pci_p2pdma": true}\n}\n')

    def with_repository(self, *offered: str) -> None:
        self.put("etc/apt/sources.list.d/cuda.list", "deb file:/compute/cuda/repos/x /\n")
        (self.state / "offered").write_text("\n".join(offered or ("nvidia-gds",)) + "\n")

    def run(self, *words: str, **more: str) -> Ran:
        env = {"PATH": f"{self.bin}:/usr/bin:/bin", "STATE": str(self.state)}
        env |= {"GDSLOAD_SYSROOT": str(self.root), **more}
        command = ["sh", str(SCRIPT), *words]
        ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    def check(self, *words: str, **more: str) -> dict[str, Any]:
        ran = self.run("--check", "--json", *words, **more)
        answer: dict[str, Any] = json.loads(ran.out)
        assert (ran.code, ran.err) == (answer["exit_code"], "")
        return answer

    def changes(self) -> list[str]:
        """The calls that would change a machine, in order."""
        calls = (self.state / "calls").read_text().splitlines()
        return [call for call in calls if call.split()[0] in CHANGERS]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def finding(answer: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [each for each in answer["findings"] if each["name"] == name]
    return dict(found)


def rules_out(answer: dict[str, Any], mode: str) -> set[str]:
    return {each["name"] for each in answer["findings"] if mode in each["rules_out"]}


def test_check_without_gpu_rules_out_both_modes(machine: Machine) -> None:
    answer = machine.check()
    assert answer["exit_code"] == 2
    assert answer["modes"] == {"nvidia-fs": False, "p2pdma": False}
    assert finding(answer, "GPU")["verdict"] == "no"
    assert {"GPU", "driver"} <= rules_out(answer, "nvidia-fs") & rules_out(answer, "p2pdma")


def test_check_gpu_without_driver_cannot_be_installed(machine: Machine) -> None:
    machine.put("sys/bus/pci/devices/0000:41:00.0/vendor", "0x10de\n")
    machine.put("sys/bus/pci/devices/0000:41:00.0/class", "0x030200\n")
    answer = machine.check()
    assert "0000:41:00.0" in finding(answer, "GPU")["detail"]
    assert "open kernel modules" in finding(answer, "driver")["hint"]
    assert answer["exit_code"] == 2


def test_check_without_nvidia_fs_is_installable(machine: Machine) -> None:
    machine.with_gpu()
    answer = machine.check()
    assert answer["exit_code"] == 1
    assert finding(answer, "GPU")["detail"] == "1: NVIDIA H100 80GB HBM3, Hopper"
    assert finding(answer, "driver")["detail"] == "570.86.15, open"
    assert rules_out(answer, "nvidia-fs") == {"nvidia-fs"}
    assert finding(answer, "nvidia-fs")["installable"]
    assert "--add-repo" in finding(answer, "apt repository")["hint"]


def test_check_proprietary_driver_rules_out_nvidia_fs(machine: Machine) -> None:
    machine.with_gpu("Tesla V100-SXM2-16GB, 7.0\n", PROPRIETARY)
    machine.with_repository()
    answer = machine.check()
    assert answer["exit_code"] == 2
    assert not finding(answer, "nvidia-fs")["installable"]
    assert "550.54.15, proprietary" in finding(answer, "driver")["detail"]
    assert "Volta" in finding(answer, "GPU")["detail"]
    assert {"GPU", "driver"} <= rules_out(answer, "p2pdma")


def test_check_loaded_nvidia_fs_is_ready(machine: Machine) -> None:
    machine.with_gpu()
    machine.with_nvidia_fs()
    machine.put("proc/kallsyms", NVFS_SYMBOL)
    answer = machine.check("/models")
    assert answer["exit_code"] == 0
    assert answer["modes"] == {"nvidia-fs": True, "p2pdma": False}
    assert "2.25.7" in finding(answer, "nvidia-fs")["detail"]


def test_check_stock_nvme_driver_rules_out_nvidia_fs(machine: Machine) -> None:
    machine.with_gpu()
    machine.with_nvidia_fs()
    answer = machine.check("/models")
    assert answer["exit_code"] == 2
    assert rules_out(answer, "nvidia-fs") == {"NVMe patch"}


def test_check_p2pdma_is_ready(machine: Machine) -> None:
    machine.with_gpu()
    machine.with_p2pdma()
    answer = machine.check("/models/a.safetensors")
    assert answer["exit_code"] == 0
    assert answer["modes"] == {"nvidia-fs": False, "p2pdma": True}
    assert finding(answer, "/models/a.safetensors")["detail"] == "ext4 from /dev/nvme0n1p2"


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ("proc/kallsyms", "0000000000000000 T _text\n", "kernel"),
        ("proc/driver/nvidia/version", OPEN.replace("570.86.15", "560.35.03"), "driver"),
        ("proc/driver/nvidia/params", 'RegistryDwords: ""\n', "static BAR1"),
        ("proc/driver/nvidia/params", STATIC_BAR1.replace("WC=1", "WC=0"), "static BAR1"),
        ("sys/module/nvme_core/parameters/multipath", "Y\n", "NVMe multipath"),
        ("etc/cufile.json", '{"properties": {"use_pci_p2pdma": false}}', "use_pci_p2pdma"),
    ],
)
def test_check_missing_requirement_rules_out_p2pdma(
    machine: Machine, path: str, text: str, name: str
) -> None:
    machine.with_gpu()
    machine.with_p2pdma()
    machine.put(path, text)
    answer = machine.check()
    assert rules_out(answer, "p2pdma") == {name}
    assert finding(answer, name)["hint"]


def test_check_p2pdma_that_gdsload_asks_for_is_ready(machine: Machine) -> None:
    """As `backends/cufile/library.py` does, unless the file or the environment decides it."""
    machine.with_gpu()
    machine.with_p2pdma()
    machine.put("etc/cufile.json", "{}\n")
    assert machine.check()["modes"]["p2pdma"]
    assert rules_out(machine.check(CUFILE_USE_PCIP2PDMA="0"), "p2pdma") == {"use_pci_p2pdma"}
    machine.put("usr/local/cuda/version.json", '{"cuda": {"version": "12.8.1"}}')
    assert rules_out(machine.check(), "p2pdma") == {"use_pci_p2pdma"}


def test_check_hint_is_complete_and_part_of_its_finding(machine: Machine) -> None:
    answer = machine.check()
    assert finding(answer, "use_pci_p2pdma")["hint"] == (
        'for other programs, in /etc/cufile.json: {"properties": {"use_pci_p2pdma": true},'
        ' "block": {"nvme": {"use_pci_p2pdma": true}}}'
    )
    assert "" not in {each["name"] for each in answer["findings"]}


def test_check_old_cuda_or_gpu_rules_out_p2pdma(machine: Machine) -> None:
    machine.with_gpu("Tesla T4, 7.5\n")
    machine.with_p2pdma()
    assert rules_out(machine.check(FAKE_CUDA="12.7"), "p2pdma") == {"GPU", "CUDA"}


def test_check_cuda_of_new_driver_is_found(machine: Machine) -> None:
    """Drivers from 610 on have another name for it."""
    machine.with_gpu()
    found = finding(machine.check(FAKE_CUDA="13.3", FAKE_CUDA_NAME="CUDA UMD"), "CUDA")
    assert (found["verdict"], found["detail"]) == ("yes", "of the driver 13.3, of the toolkit none")


def test_check_kernel_configuration_shows_p2pdma(machine: Machine) -> None:
    machine.put(f"boot/config-{KERNEL}", "CONFIG_PCI_P2PDMA=y\n")
    assert finding(machine.check(), "kernel")["verdict"] == "yes"
    machine.put(f"boot/config-{KERNEL}", "# CONFIG_PCI_P2PDMA is not set\n")
    assert finding(machine.check(), "kernel")["verdict"] == "no"


def test_check_settings_before_reboot_are_named(machine: Machine) -> None:
    machine.with_gpu()
    machine.put("etc/modprobe.d/p2p.conf", f"options nvidia NVreg_{STATIC_BAR1}")
    assert "reboot" in finding(machine.check(), "static BAR1")["hint"]


def test_check_iommu_is_reported(machine: Machine) -> None:
    assert finding(machine.check(), "IOMMU")["verdict"] == "yes"
    machine.put("sys/class/iommu/dmar0/name", "")
    assert "iommu=off" in finding(machine.check(), "IOMMU")["hint"]
    machine.put("proc/cmdline", "quiet iommu=pt\n")
    assert "passing through" in finding(machine.check(), "IOMMU")["detail"]


def test_check_container_without_udev_is_reported(machine: Machine) -> None:
    machine.with_gpu()
    machine.with_nvidia_fs()
    machine.put(".dockerenv", "")
    assert machine.check()["exit_code"] == 0
    shutil.rmtree(machine.root / "run/udev")
    answer = machine.check()
    assert answer["exit_code"] == 2
    assert rules_out(answer, "nvidia-fs") == {"udev"}
    assert "-v /run/udev:/run/udev:ro" in finding(answer, "udev")["hint"]


def test_check_container_without_devices_is_reported(machine: Machine) -> None:
    machine.put("proc/1/cgroup", "0::/docker/0123\n")
    machine.put("proc/driver/nvidia-fs/version", "version: 2.25.7\n")
    answer = machine.check()
    assert "container" in finding(answer, "host")["detail"]
    assert "--device=/dev/nvidia-fs0" in finding(answer, "nvidia-fs")["hint"]


def test_check_unreadable_modules_are_reported(machine: Machine) -> None:
    machine.with_gpu()
    machine.with_p2pdma()
    (machine.root / "proc/modules").unlink()
    answer = machine.check()
    assert answer["exit_code"] == 2
    assert rules_out(answer, "p2pdma") == {"/proc/modules"}


@pytest.mark.parametrize(
    ("line", "ruled_out"),
    [
        ("overlay overlay rw,lowerdir=/a", ["nvidia-fs", "p2pdma"]),
        ("tmpfs tmpfs rw", ["nvidia-fs", "p2pdma"]),
        ("ext4 /dev/vda1 rw", ["nvidia-fs", "p2pdma"]),
        ("ext4 /dev/nvme1n1 rw,data=writeback", ["nvidia-fs", "p2pdma"]),
        ("nfs4 server:/models rw,proto=tcp", ["nvidia-fs", "p2pdma"]),
        ("nfs4 server:/models rw,proto=rdma", ["p2pdma"]),
        ("lustre 10.0.0.1@o2ib:/models rw", ["p2pdma"]),
        ("xfs /dev/md0 rw", ["p2pdma"]),
        ("xfs /dev/nvme1n1 rw", []),
        ("ext4 /dev/nvme1n1 rw,data=ordered", []),
    ],
)
def test_check_filesystem_rules_out_modes(
    machine: Machine, line: str, ruled_out: list[str]
) -> None:
    mounted = "/my models"
    mount = f"99 22 8:1 / /my\\040models rw,relatime - {line}\n"
    machine.put("proc/self/mountinfo", ROOT_MOUNT + mount + "100 22 0:5 / /my rw - tmpfs t rw\n")
    machine.put("my models/a", "")
    found = finding(machine.check(mounted), mounted)
    assert found["rules_out"] == ruled_out
    assert found["detail"].startswith(" from ".join(line.split()[:2]))


def test_check_batch_larger_than_cache_is_reported(machine: Machine) -> None:
    machine.put("own.json", '{"properties": {"per_buffer_cache_size_kb": 4096}}\n')
    found = finding(machine.check(CUFILE_ENV_PATH_JSON="/own.json"), "cufile.json")
    assert found["verdict"] == "partly"
    assert str(4096 * 128) in found["hint"]


def test_check_prints_findings_and_changes_nothing(machine: Machine) -> None:
    machine.with_gpu()
    before = sorted(machine.root.rglob("*"))
    ran = machine.run("--check", FAKE_UID="1000")
    assert ran.code == 1
    assert (machine.changes(), sorted(machine.root.rglob("*"))) == ([], before)
    assert "no      nvidia-fs       not installed\n" in ran.out
    assert "hint: sh scripts/install_gds.sh\n" in ran.out
    assert "\nnvidia-fs:  no: nvidia-fs\n" in ran.out


@pytest.mark.parametrize("system", ["ID=ubuntu\nID_LIKE=debian\n", "ID=debian\n"])
def test_dry_run_prints_commands_and_changes_nothing(machine: Machine, system: str) -> None:
    machine.with_gpu()
    machine.with_repository("nvidia-gds", f"linux-headers-{KERNEL}")
    machine.put("etc/os-release", system)
    ran = machine.run("--dry-run", FAKE_UID="1000")
    install = f"apt-get install -y --no-remove linux-headers-{KERNEL} nvidia-gds"
    assert ran == Ran(0, f"+ apt-get update\n+ {install}\n+ modprobe nvidia-fs\n", "")
    assert machine.changes() == []


def test_install_twice_installs_once(machine: Machine) -> None:
    machine.with_gpu()
    machine.with_repository("nvidia-fs-dkms")
    first = machine.run()
    assert (first.code, first.err) == (0, "")
    calls = machine.changes()
    install = "apt-get install -y --no-remove nvidia-fs-dkms"
    assert calls == ["apt-get update", install, "modprobe nvidia-fs"]
    assert "nothing to do" in machine.run().out
    assert machine.changes() == calls


def test_install_built_module_is_only_loaded(machine: Machine) -> None:
    machine.with_gpu()
    (machine.state / "built").touch()
    assert machine.run().code == 0
    assert machine.changes() == ["modprobe nvidia-fs"]


def test_install_without_root_fails(machine: Machine) -> None:
    machine.with_gpu()
    machine.with_repository()
    ran = machine.run(FAKE_UID="1000")
    assert ran.code == 3
    assert "needs root" in ran.err
    assert machine.changes() == []


def test_install_adds_repository_only_on_request(machine: Machine, tmp_path: Path) -> None:
    machine.with_gpu()
    ran = machine.run()
    assert ran.code == 3
    assert "--add-repo" in ran.err
    keyring, other = tmp_path / "keyring.deb", tmp_path / "other.deb"
    keyring.write_text("Package: cuda-keyring\n")
    other.write_text("Package: other\n")
    assert machine.run(f"--add-repo={other}").code == 3
    assert machine.changes() == []
    assert machine.run(f"--add-repo={keyring}").code == 0
    assert machine.changes()[0] == f"dpkg -i {keyring}"


def test_repository_that_an_upgrade_has_disabled_is_none(machine: Machine) -> None:
    machine.with_gpu()
    line = "deb file:/compute/cuda/repos/x /"
    folder = "etc/apt/sources.list.d"
    machine.put(f"{folder}/cuda.list", f"# {line} # disabled on upgrade to noble\n")
    machine.put(f"{folder}/cuda.list.distUpgrade", f"{line}\n")
    ran = machine.run()
    assert ran.code == 3 and "--add-repo" in ran.err
    machine.put(f"{folder}/cuda.sources", "Types: deb\nURIs: file:/compute/cuda/repos/x\n")
    assert machine.run().code == 0


def test_install_failing_command_ends_the_script(machine: Machine) -> None:
    machine.with_gpu()
    machine.with_repository()
    (machine.state / "broken").touch()
    ran = machine.run()
    assert ran.code == 3
    assert "apt-get update" in ran.err
    assert machine.changes() == ["apt-get update"]


def test_install_on_other_distribution_fails(machine: Machine) -> None:
    machine.with_gpu()
    machine.put("etc/os-release", 'ID="rocky"\nID_LIKE="rhel fedora"\nPRETTY_NAME="Rocky 9"\n')
    ran = machine.run()
    assert ran.code == 2
    assert "Rocky 9: this script installs on Debian and Ubuntu" in ran.out
    assert machine.changes() == []


def test_arguments_wrong_exit_with_usage(machine: Machine) -> None:
    assert machine.run("--force").code == 3
    assert machine.run("--json").code == 3
    assert "no such path" in machine.run("--check", "/nowhere").err
    assert "Exit codes:" in machine.run("--help").out


# Odd machines: comments in settings, no headers, pods, odd names.
@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ('{"properties": {"io_batchsize": 8, // "use_pci_p2pdma": true\n "x": 1}}', "partly"),
        ('{"properties": {/* "use_pci_p2pdma": true, */ "io_batchsize": 8}}', "partly"),
        ('{"logging": {"dir": "//nas"}, "properties": {"use_pci_p2pdma": true}} // x // y', "yes"),
        ('{"properties": {"use_pci_p2pdma":\n true,\r\n "io_batchsize": 8}}', "yes"),
        ('{"properties": {"use_pci_p2pdma": true, "io_batchsize": 99999999999999999999}}', "yes"),
    ],
)
def test_cufile_json_comments_are_ignored(text: str, asked: str, machine: Machine) -> None:
    machine.with_gpu()
    machine.with_p2pdma()
    machine.put("etc/cufile.json", text)
    found = {each["name"]: each for each in machine.check()["findings"]}
    assert found["use_pci_p2pdma"]["verdict"] == asked


def test_check_missing_kernel_headers_are_reported(machine: Machine) -> None:
    machine.with_gpu()
    machine.with_repository()
    assert "kernel headers" in {each["name"] for each in machine.check()["findings"]}
    machine.put(f"lib/modules/{KERNEL}/build/Makefile", "")
    assert "kernel headers" not in {each["name"] for each in machine.check()["findings"]}


def test_check_pod_is_a_container(machine: Machine) -> None:
    machine.with_gpu()
    found = machine.check(KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert (found["exit_code"], "host" in {each["name"] for each in found["findings"]}) == (2, True)


def test_check_path_with_special_characters_works(machine: Machine) -> None:
    for name in ("a b", 'a"b', "a\\b\\t", "a$b"):
        machine.put(f"models/{name}/x", "")
        assert f"/models/{name}" in {
            each["name"] for each in machine.check(f"/models/{name}")["findings"]
        }
