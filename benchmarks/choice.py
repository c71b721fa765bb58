"""Which arms a table has: all that there are or those that were named, without those that cannot
run here, each with its reason.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gdsload.backends import cufile

from . import fio
from .arms import KINDS, Arm, parse, why_not
from .judge import python_of
from .loaded import CPU, ArmFailed, files_of
from .prepare import build_bare
from .records import Refused

ARMS = (
    "gdsload", "safetensors-mmap", "safetensors-pread", "safetensors-prefetch", "fastsafetensors",
    "fastsafetensors-parallel", "runai", "runai:NUMPY_MADVISE_HUGEPAGE=0", "instanttensor",
    "tensorizer", "nixl-posix", "nixl-gds-mt", "bare", "bare:pages=huge", "bare:memory=backed",
    "pinned", "fio",
)  # fmt: skip
MODEL_ARMS = ("transformers", "gdsload-model")  # where the checkpoint is a model's
ENGINES = tuple(f"engine={name}" for name in ("uring", "linuxaio", "threads", "aio"))
GPU_ROADS = ("backend=gds", "backend=gds_mt")
# Where cuFile has no way of its own, this is how it is at its best.
GPU_ARMS = ("fastsafetensors:nogds=1", "fastsafetensors-parallel:nogds=1")


def chosen(
    options: argparse.Namespace, source: Path, room: int
) -> tuple[list[Arm], dict[str, str]]:
    """The arms, and those that cannot run here, in so much memory, with their reasons.

    Raises Refused where none is left.
    """
    nbytes = sum(file.stat().st_size for file in files_of(source))
    names = list(options.arms or ARMS)
    if not options.arms:
        roads, arms_there = ((), ()) if options.device == CPU else (GPU_ROADS, GPU_ARMS)
        names += [f"gdsload:{choice}" for choice in (*ENGINES, *roads)]
        names += arms_there
        names += MODEL_ARMS if (source / "config.json").is_file() else ()
    if options.best:
        best = _best(options.best)
        # Beside the defaults, not instead: what people get, and what they could get.
        names = [label for name in names for label in (name, best.get(name, name))]
    names += options.also
    arms = [parse(name) for name in dict.fromkeys(names)]
    left_out = {
        arm.label: why
        for arm in arms
        if arm.kind in KINDS
        and (
            why := why_not(KINDS[arm.kind], options.device, nbytes, room, warm=options.warm)
            or hangs(arm, options)
        )
    }
    try:
        build_bare()
    except ArmFailed as error:
        left_out |= {arm.label: str(error) for arm in arms if arm.kind == "bare"}
    for arm in arms:
        if arm.label not in left_out and (why := _missing(arm)):
            left_out[arm.label] = why
    arms = [arm for arm in arms if arm.label not in left_out]
    if not arms:
        raise Refused("no arm can run here\n" + reasons(left_out))
    return arms, left_out


def _best(path: Path) -> dict[str, str]:
    try:
        kept = json.loads(path.read_text())
    except OSError as error:
        raise Refused(f"--best {path}: {error.strerror}") from error
    except ValueError as error:
        raise Refused(f"--best {path}: this is no JSON: {error}") from error
    best = kept.get("best") if isinstance(kept, dict) else None
    try:
        return {str(kind): parse(label).label for kind, label in best.items()}
    except (AttributeError, ValueError) as error:
        raise Refused(f"--best {path}: this is no result of gdsload bench tune") from error


def hangs(arm: Arm, options: argparse.Namespace) -> str:
    """Why an arm would not come back from opening cuFile; empty where it may, or does not."""
    if options.device == CPU or not KINDS[arm.kind].cufile or arm.settings.get("nogds"):
        return ""
    return cufile.obstacle()


def _missing(arm: Arm) -> str:
    """Why an arm's programs are not there; empty where they are."""
    try:
        if arm.kind == "fio":
            fio.version()
        else:
            python_of(arm)
    except ArmFailed as error:
        return str(error)
    return ""


def reasons(left_out: dict[str, str]) -> str:
    """What was left out, a line each."""
    return "\n".join(f"  left out: {what}: {why}" for what, why in left_out.items())
