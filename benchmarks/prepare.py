"""Preparations before the first arm runs: the bare reader is compiled, a small checkpoint for the
rehearsal written, and the checkpoint converted for loaders that cannot read safetensors.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from . import places
from .arms import KINDS, Arm
from .judge import Conditions, python_of
from .layout import size
from .loaded import ArmFailed

SPARE_BYTES = 1 << 30  # of the disk, for others


def build_bare() -> None:
    """Compiles the bare reader. Raises ArmFailed with the message of the compiler."""
    source = places.PACKAGE / "bare.c"
    if places.BARE.exists() and places.BARE.stat().st_mtime > source.stat().st_mtime:
        return
    command = shlex.split(os.environ.get("CC") or "cc")
    command += ["-O3", "-Wall", "-shared", "-fPIC", "-pthread"]
    half = places.BARE.with_suffix(f".{os.getpid()}")  # a killed compiler leaves a part
    try:
        places.BARE.parent.mkdir(parents=True, exist_ok=True)
        ran = subprocess.run(
            [*command, "-o", str(half), str(source), "-luring"],
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode == 0:
            half.replace(places.BARE)
            return
    except OSError as error:
        what = error.filename or command[0]
        raise ArmFailed(f"bare.c was not compiled: {what}: {error.strerror}") from error
    finally:
        half.unlink(missing_ok=True)
    said = ran.stderr.strip() or f"the compiler ended with {ran.returncode}"
    raise ArmFailed(f"bare.c was not compiled: {said.splitlines()[0]}")


@contextmanager
def rehearsal(beside: Path, *, model: bool) -> Iterator[Path]:
    """A small checkpoint for the first-use work of a library: on the same filesystem if this
    process may write there, else in the directory for temporary files."""
    try:
        directory = Path(tempfile.mkdtemp(prefix=".bench-", dir=beside))
    except OSError:
        directory = Path(tempfile.mkdtemp(prefix=".bench-"))
    try:
        if model:
            from transformers import AutoConfig, AutoModelForCausalLM

            config = AutoConfig.for_model(
                "qwen3",
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=1,
                head_dim=32,
                num_attention_heads=2,
                num_key_value_heads=1,
                vocab_size=256,
            )
            AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        else:
            sizes = {f"rehearsal.{number}": 1 << 16 for number in range(4)}
            header, end = {}, 0
            for name, size in sizes.items():
                header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
                end += size
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            body = len(text).to_bytes(8, "little") + text + bytes(end)
            (directory / "model.safetensors").write_bytes(body)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def converted(arm: Arm, conditions: Conditions) -> Iterator[Conditions]:
    """The same conditions over copies in the arm's own format, removed afterwards.

    Raises ArmFailed with the message of its library.
    """
    beside = conditions.source.parent
    free = shutil.disk_usage(beside).free
    if free < conditions.file_bytes + SPARE_BYTES:
        raise ArmFailed(
            f"its own copy takes {size(conditions.file_bytes)} of disk, and of the"
            f" {size(free)} that are free {size(SPARE_BYTES)} are left to others"
        )
    try:
        room = Path(tempfile.mkdtemp(prefix=".bench-", dir=beside))
    except OSError as error:
        raise ArmFailed(f"its own copy cannot be written to {beside}: {error.strerror}") from error
    try:
        targets: dict[Path, Path] = {}
        for source in filter(None, (conditions.source, conditions.rehearsal)):
            targets[source] = room / f"{len(targets)}"
            targets[source].mkdir()
            ran = subprocess.run(
                [*places.command(python_of(arm), "convert"), arm.kind, source, targets[source]],
                env=places.environment(),
                cwd="/",
                capture_output=True,
                text=True,
                check=False,
            )
            if ran.returncode:
                words = ran.stderr.strip().splitlines() or ["without a word"]
                raise ArmFailed(f"the checkpoint was not converted: {words[-1]}")
        yield replace(
            conditions,
            source=targets[conditions.source],
            rehearsal=targets.get(conditions.rehearsal) if conditions.rehearsal else None,
        )
    finally:
        shutil.rmtree(room, ignore_errors=True)


def converts(arm: Arm) -> bool:
    return arm.kind in KINDS and KINDS[arm.kind].convert is not None
