"""Whether there is a GPU, and what GPUDirect Storage needs: looked for, never opened."""

from __future__ import annotations

import glob
import os
import re
import sys

from gdsload.doctor.finding import NO, PARTLY, YES, Finding, read_text

# Where CUDA's libraries are, besides what the linker knows.
_LIBRARY_DIRS = ("usr/local/cuda/lib64", "usr/local/cuda/targets/*/lib", "opt/cuda/lib64")


def gpu(root: str = "/") -> Finding:
    """Whether there is an NVIDIA GPU, and its driver."""
    models = [
        re.search(r"^Model:\s*(.+)$", read_text("/", path) or "", re.MULTILINE)
        for path in sorted(glob.glob(os.path.join(root, "proc/driver/nvidia/gpus/*/information")))
    ]
    if models:
        named = ", ".join(model[1].strip() if model else "unnamed" for model in models)
        return Finding("GPU", YES, f"{len(models)}: {named}")
    for device in glob.glob(os.path.join(root, "sys/bus/pci/devices/*")):
        kind, vendor = read_text(device, "class") or "", read_text(device, "vendor")
        if vendor == "0x10de" and kind.startswith("0x03"):
            where = os.path.basename(device)
            return Finding(
                "GPU", PARTLY, f"at {where}, without a driver", "install NVIDIA's driver"
            )
    return Finding("GPU", NO, "no NVIDIA GPU is to be seen: loads go to DRAM")


def nvidia_fs(root: str = "/") -> Finding:
    """Whether the kernel module behind GPUDirect Storage is loaded and can be reached."""
    version = read_text(root, "proc/driver/nvidia-fs/version")
    modules = read_text(root, "proc/modules")
    loaded = version is not None or re.search(r"^nvidia_fs ", modules or "", re.MULTILINE)
    if not loaded:
        unsure = "" if modules is not None else " (/proc/modules cannot be read)"
        hint = "modprobe nvidia-fs; without it cuFile copies through DRAM"
        return Finding("nvidia-fs", NO, f"not loaded{unsure}", hint)
    if not glob.glob(os.path.join(root, "dev/nvidia-fs*")):
        hint = "give the container --device=/dev/nvidia-fs0 and its siblings"
        return Finding("nvidia-fs", PARTLY, "loaded, but there is no /dev/nvidia-fs*", hint)
    return Finding("nvidia-fs", YES, f"loaded {version or ''}".rstrip())


def udev(root: str = "/") -> Finding:
    """Whether cuFile can ask udev which device a file is on."""
    if os.path.isdir(os.path.join(root, "run/udev")):
        return Finding("udev", YES, "/run/udev is there")
    hint = "mount the host's /run/udev into the container, read-only"
    return Finding("udev", NO, "no /run/udev: cuFile will not go past DRAM", hint)


def library(name: str, root: str = "/") -> Finding:
    """Whether a shared library is installed, by its files; it is not opened."""
    dirs = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    for entry in sys.path:
        dirs += [os.path.join(entry, "nvidia", "*", "lib"), os.path.join(entry, "nvidia", "lib")]
    dirs += [os.path.join(root, part) for part in _LIBRARY_DIRS]
    for directory in dirs:
        found = sorted(glob.glob(os.path.join(directory, f"{name}.so*")))
        if found:
            return Finding(name, YES, found[0])
    known = os.path.join(root, "etc/ld.so.cache")
    try:
        with open(known, "rb") as cache:
            # Its table of strings holds the path of each library, between zero bytes.
            paths = re.findall(rb"\0(/[^\0]*/%b\.so[.\d]*)\0" % name.encode(), cache.read())
    except OSError:
        paths = []
    if paths:
        return Finding(name, YES, os.fsdecode(paths[0]))
    hints = {
        "libcuda": "install NVIDIA's driver",
        "libcudart": "pip install nvidia-cuda-runtime",
        "libcufile": "pip install nvidia-cufile",
    }
    return Finding(name, NO, "not found", hints.get(name, ""))
