"""The arms of a table: all of them, or the named ones; those that cannot run here are left out with
their reasons.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from gdsload.backends import find
from gdsload.backends.cufile import library
from gdsload.backends.posix.engines import ENGINES
from gdsload.errors import GdsloadError

from . import fio
from .arms import KINDS, Arm, parse, why_not
from .judge import python_of
from .loaded import CPU, ArmFailed, files_of
from .prepare import build_bare
from .records import Refused

ARMS = (
    "gdsload", "safetensors-mmap", "safetensors-pread", "safetensors-prefetch", "fastsafetensors",
    "fastsafetensors:FASTSAFETENSORS_ODIRECT=0", "fastsafetensors-parallel", "runai",
    "runai:NUMPY_MADVISE_HUGEPAGE=0", "instanttensor", "tensorizer", "nixl-posix", "nixl-gds-mt",
    "bare", "bare:pages=huge", "bare:memory=backed", "bare:pages=huge,memory=backed", "pinned",
    "fio",
)  # fmt: skip
STATE_ARMS = (  # in several states of memory
    "gdsload", "gdsload:page_cache=keep", "gdsload:page_cache=fill,pages=small",
    "gdsload:page_cache=fill,pages=huge", "bare", "bare:pages=huge", "safetensors-mmap", "runai",
    "runai:NUMPY_MADVISE_HUGEPAGE=0", "fastsafetensors",
)  # fmt: skip
MODEL_ARMS = ("transformers", "gdsload-model")  # where the checkpoint is a model's
POSIX = tuple(f"engine={name}" for name in ENGINES)
PAGES = tuple(f"pages={name}" for name in ("auto", "huge", "small", "bounce"))  # of fresh memory
CUFILE = ("backend=gds", "backend=gds_mt")
# Their fastest settings if cuFile has no native path.
GPU_ARMS = ("fastsafetensors:nogds=1", "fastsafetensors-parallel:nogds=1")


def chosen(
    options: argparse.Namespace, source: Path, room: int
) -> tuple[list[Arm], dict[str, str]]:
    """The arms, and those that cannot run here with `room` bytes of memory, with reasons.

    Raises Refused if none is left.
    """
    nbytes = sum(file.stat().st_size for file in files_of(source))
    several = len(options.state) > 1
    names = list(options.arms or (STATE_ARMS if several else ARMS))
    if not options.arms and not several:
        names += [f"gdsload:{choice}" for choice in (*PAGES, *POSIX, *CUFILE)]
        names += () if options.device == CPU else GPU_ARMS
        names += MODEL_ARMS if (source / "config.json").is_file() else ()
    if options.best:
        best = _best(options.best)
        # In addition to the defaults: the results that users get, and could get.
        names = [label for name in names for label in (name, best.get(name, name))]
    names += options.also
    arms = [parse(name) for name in dict.fromkeys(names)]
    left_out = {
        arm.label: why
        for arm in arms
        if arm.kind in KINDS
        and (
            why := why_not(KINDS[arm.kind], options.device, nbytes, room, warm=options.warm)
            or unreached(arm, options.device)
            or unrehearsed(arm)
            or idle(arm, options)
            or hangs(arm, options)
        )
    }
    if options.arms and several:
        asked = {arm.label for arm in arms}
        left_out |= {label: "not asked for" for label in STATE_ARMS if label not in asked}
    try:
        if any(arm.kind == "bare" for arm in arms):
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


def idle(arm: Arm, options: argparse.Namespace) -> str:
    """Why an engine of ours would read nothing; "" if it reads, or was asked for."""
    if options.arms or not options.warm or options.device != CPU or arm.label in options.also:
        return ""
    named = arm.kind == "gdsload" and not arm.settings.keys().isdisjoint(("engine", "pages"))
    return "files in the page cache are mapped: no engine reads" if named else ""


def unrehearsed(arm: Arm) -> str:
    """Why there is no small model to rehearse an arm with; "" if there is, or needs none."""
    needed = KINDS[arm.kind].gives == "model"
    missing = needed and importlib.util.find_spec("transformers") is None
    return "transformers, which writes a small model, is not installed here" if missing else ""


def unreached(arm: Arm, device: str) -> str:
    """Why a backend of ours cannot read to host memory; "" if it may.

    For GPUs the arm's own process finds out.
    """
    backend = arm.settings.get("backend", "auto")
    if device != CPU or arm.kind != "gdsload" or backend == "auto":
        return ""
    try:
        support = find(backend).probe(CPU)
    except GdsloadError as error:
        return str(error)
    return "" if support.usable else str(support)


def hangs(arm: Arm, options: argparse.Namespace) -> str:
    """Why opening cuFile would hang in this arm; "" if it would not, or does not open it."""
    if options.device == CPU or not KINDS[arm.kind].cufile or arm.settings.get("nogds"):
        return ""
    return library.obstacle()


def _missing(arm: Arm) -> str:
    """Why an arm is not installed; "" if it is."""
    try:
        if arm.kind == "fio":
            fio.version()
        else:
            python_of(arm)
    except ArmFailed as error:
        return str(error)
    return ""


def reasons(left_out: dict[str, str]) -> str:
    """One line for each arm that was left out."""
    return "\n".join(f"  left out: {what}: {why}" for what, why in left_out.items())
