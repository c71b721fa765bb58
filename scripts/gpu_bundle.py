"""Writes build/gpu-bundle/, which checks gdsload on a machine with a GPU and without a network.

    build/gpu-bundle/
      gpu_check.py       the check
      wheels/ours/       gdsload, with io_uring and the stable ABI; small packages that it imports
      wheels/peers/      the other loaders, for Python 3.10 to 3.13
      wheels/prefetch/   the release of safetensors that one loader needs

torch is taken from that machine: 2.6 or newer, for CUDA 12 or 13. Prints the command to run there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
OWN_NEEDS = ("click", "psutil", "tqdm", "safetensors")
PEERS = ("fastsafetensors", "runai-model-streamer", "instanttensor")
PEER_NEEDS = ("humanize",)
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (12, 17, 24, 27, 28, 30, 34, 35))
MOST_BYTES = 30_000_000


def requirements(name: str) -> dict[str, str]:
    """The pinned versions of a requirements file of the benchmarks, by package."""
    lines = (ROOT / f"benchmarks/requirements-{name}.txt").read_text().splitlines()
    return dict(re.findall(r"^([\w-]+)(?:\[\w+\])?(==\S+)", "\n".join(lines), re.MULTILINE))


def build_wheel(out: Path) -> Path:
    """Builds gdsload. Raises SystemExit for a wheel without io_uring or the stable ABI."""
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*command, str(ROOT)], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = out.glob("gdsload-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    if not any("/_native/uring." in name for name in names):
        sys.exit("gpu-bundle: the wheel has no io_uring engine: install liburing-dev")
    if "-abi3-" not in wheel.name:
        sys.exit(f"gpu-bundle: {wheel.name} is for this Python only")
    return wheel


def require_pip() -> None:
    """Gets pip if the environment has none, as those of uv. Raises SystemExit if it cannot."""
    with_uv = '. scripts/uv.sh && exec uv pip install --quiet --python "$1" pip'
    has_pip = [sys.executable, "-m", "pip", "--version"]
    errors = []
    for command in (
        [sys.executable, "-m", "ensurepip"],
        ["sh", "-c", with_uv, "sh", sys.executable],
    ):
        if subprocess.run(has_pip, capture_output=True).returncode == 0:
            return
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        errors += ran.stderr.strip().splitlines()[-1:]
    if subprocess.run(has_pip, capture_output=True).returncode:
        sys.exit("gpu-bundle: no pip, which downloads the wheels: " + "; ".join(errors))


def download(out: Path, python: str, *packages: str) -> str:
    """Downloads wheels for a version of Python; returns the error, or ""."""
    digits = python.replace(".", "")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--pre"]
    command += ["--only-binary", ":all:", "-d", str(out), "--python-version", python]
    command += ["--implementation", "cp", "--disable-pip-version-check"]
    for abi in (f"cp{digits}", "abi3", "none"):
        command += ["--abi", abi]
    for platform in (*PLATFORMS, "manylinux2014_x86_64", "manylinux1_x86_64"):
        command += ["--platform", platform]
    ran = subprocess.run([*command, *packages], capture_output=True, text=True)
    lines = ran.stderr.strip().splitlines()
    return lines[-1] if ran.returncode and lines else ""


def repack(wheel: Path) -> None:
    """Makes a wheel smaller: without debug symbols, which are nine tenths of some, and by LZMA."""
    smaller = wheel.with_suffix(".lzma")
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(wheel) as old:
            old.extractall(scratch)
        files = [path for path in sorted(Path(scratch).rglob("*")) if path.is_file()]
        for library in (path for path in files if ".so" in path.suffixes and shutil.which("strip")):
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=False)
        with zipfile.ZipFile(smaller, "w", zipfile.ZIP_LZMA) as new:
            for path in files:
                new.write(path, str(path.relative_to(scratch)))
    smaller.replace(wheel)


def newest_glibc(wheel: Path) -> str:
    """The newest version of glibc that the native modules of a wheel ask for."""
    found = {(2, 17)}
    with zipfile.ZipFile(wheel) as opened:
        for name in opened.namelist():
            if name.endswith(".so"):
                versions = re.findall(rb"GLIBC_2\.(\d+)", opened.read(name))
                found.update((2, int(minor)) for minor in versions)
    return "{}.{}".format(*max(found))


def main() -> int:
    require_pip()
    bundle = ROOT / "build/gpu-bundle"
    shutil.rmtree(bundle, ignore_errors=True)
    wheel = build_wheel(bundle / "wheels/ours")
    shutil.copy(ROOT / "scripts/gpu_check.py", bundle)
    pins, prefetch = requirements("peers"), requirements("prefetch")
    plans = [
        ("ours", [f"{name}{pins.get(name, '')}" for name in OWN_NEEDS]),
        ("peers", [f"{name}{pins[name]}" for name in PEERS] + list(PEER_NEEDS)),
        ("prefetch", [f"safetensors{prefetch['safetensors']}"]),
    ]
    missing = []
    for folder, packages in plans:
        for package in packages:
            for python in PYTHONS:
                if why := download(bundle / "wheels" / folder, python, package):
                    print(f"gpu-bundle: left out: {package} for Python {python}: {why}")
                    missing += [f"{package} for Python {python}"] if folder == "ours" else []
                module = re.split("=", package)[0].replace("-", "_")
                if any((bundle / "wheels" / folder).glob(f"{module}-*-none-any.whl")):
                    break  # of the oldest Python, for all
    if missing:
        print(f"gpu-bundle: gdsload needs {', '.join(missing)}", file=sys.stderr)
        return 1
    for each in sorted((bundle / "wheels/peers").glob("*.whl")):
        repack(each)
    size = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())
    print(f"{bundle.relative_to(ROOT)}: {size / 1e6:.1f} MB, glibc {newest_glibc(wheel)} or newer")
    if size > MOST_BYTES:
        print(f"gpu-bundle: that is more than {MOST_BYTES / 1e6:.0f} MB", file=sys.stderr)
        return 1
    print("Copy it to the machine with the GPU, and run there, with the Python that has torch:\n")
    print("    python3 gpu-bundle/gpu_check.py --budget 560 --out gpu-check --bare\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
