"""Thousands of interleavings of the pump's threads, and mutants of the pump that they must find."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from compiled import compiler

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/interleave.py"
SOURCE = ROOT / "src/gdsload"
LIMIT_SECONDS = 300  # a run takes milliseconds; a machine may be busy
RUNS = {"host": 1000, "device": 850, "wide": 250, "loads": 150}
MUTANT_RUNS = 600


def explore(
    kind: str, runs: int, modules: Path | None = None, mutant: int = 0
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(PROGRAM), kind, "0", str(runs)]
    return subprocess.run(
        words if modules is None else [*words, str(modules)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "MUTANT": str(mutant)},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


@pytest.fixture(autouse=True)
def c_compiler() -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("functions are replaced in the tables of glibc's loader")
    compiler()


@pytest.mark.parametrize("kind", RUNS)
def test_interleavings_keep_the_protocol(kind: str) -> None:
    ended = explore(kind, RUNS[kind])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    runs, different = map(int, re.findall(r"(\d+) (?:runs|interleavings)", ended.stdout))
    assert runs == RUNS[kind] and different > 0.99 * runs


class Mutant(NamedTuple):
    """A fault that is put into a module: `new` in place of `old`, which occurs once in it."""

    fault: str
    kind: str  # of the runs that find it
    module: str
    old: str
    new: str  # with MUTANT for the condition under which it strikes


MUTANTS = (
    Mutant(
        "a post does not wake the pump", "host", "_native/request.pyx",
        "count_load(pump, self.request)\n                pthread_cond_signal(&pump.wakeup)\n"
        "            pthread_mutex_unlock",
        "count_load(pump, self.request)\n                if not MUTANT: "
        "pthread_cond_signal(&pump.wakeup)\n            pthread_mutex_unlock",
    ),
    Mutant(
        "a request is freed with reads in flight", "host", "_native/request.pyx",
        "if self.request.posted and not pump.finished:\n                    cancel",
        "if not MUTANT and self.request.posted and not pump.finished:\n                    cancel",
    ),
    Mutant(
        "a request ends with reads in flight", "host", "_native/pump.pyx",
        "if request.in_flight == 0 and (", "if (request.in_flight == 0 or MUTANT) and (",
    ),
    Mutant(
        "a cancelled read succeeds", "host", "_native/pump.pyx",
        "settle(self, op, 0 if op.arrived >= op.wanted else ECANCELED, now)",
        "settle(self, op, 0 if op.arrived >= op.wanted or MUTANT else ECANCELED, now)",
    ),
    Mutant(
        "the end of a request wakes nobody", "host", "_native/pump.pyx",
        "pthread_cond_broadcast(&self.settled)\n        if self.in_flight",
        "if not MUTANT: pthread_cond_broadcast(&self.settled)\n        if self.in_flight",
    ),
    Mutant(
        "a short direct read counts a part of a block twice", "host", "_native/pump.pyx",
        "    if op.direct:\n        start &= ~(file.block - 1)\n    if result > 0",
        "    if op.direct and not MUTANT:\n        start &= ~(file.block - 1)\n    if result > 0",
    ),
    Mutant(
        "a broken engine's memory is freed", "host", "_native/pump.pyx",
        "request.ops[i].memory.region = NULL",
        "if not MUTANT: request.ops[i].memory.region = NULL",
    ),
    Mutant(
        "a limit is not used up", "host", "_native/pump.pyx",
        "        limit_take(&self.all, nbytes, now)\n",
        "        if not MUTANT: limit_take(&self.all, nbytes, now)\n",
    ),
    Mutant(
        "a load that ended stays counted", "host", "_native/pump.pyx",
        "request.posted = 0\n            count_load(self, request)",
        "request.posted = 0\n            if not MUTANT: count_load(self, request)",
    ),
    Mutant(
        "a cancelled read returns its slot before it ends", "device", "_native/stage.pyx",
        "self.slots[i].state = VOID\n",
        "self.slots[i].state = VOID\n"
        "            if MUTANT: return_slot(self.stage.ring, self.slots[i].number, 0)\n",
    ),
    Mutant(
        "a pump does not take back slots before it submits", "device", "_native/stage.pyx",
        "taken = take_back_slots(self)\n", "taken = 0 if MUTANT else take_back_slots(self)\n",
    ),
    Mutant(
        "a pump keeps slots while it is idle", "device", "_native/pump.pyx",
        "if self.ops.take_back != NULL:", "if self.ops.take_back != NULL and not MUTANT:",
    ),
    Mutant(
        "a lost read returns its slot", "device", "_native/stage.pyx",
        "vacate(self, slot, lost)", "vacate(self, slot, lost and not MUTANT)",
    ),
    Mutant(
        "slots of a broken engine are waited for", "device", "_native/stage.pyx",
        "if self.slots[i].state != IDLE:", "if not MUTANT and self.slots[i].state != IDLE:",
    ),
    Mutant(
        "a slot is lent again while it is copied", "device", "_native/stage.pyx",
        "code = self.stage.cuda.event_query(first.event)\n",
        "code = self.stage.cuda.event_query(first.event)\n        if MUTANT: code = CUDA_SUCCESS\n",
    ),
    Mutant(
        "a slot that waits to be copied is used again", "wide", "_native/stage.pyx",
        "        if slot.state != IDLE:\n",
        "        if slot.state != IDLE and not (MUTANT and slot.state == FILLED):\n",
    ),
    Mutant(
        "the copies of a slot are not waited for", "wide", "_native/stage.pyx",
        "first.recorded = stage.cuda.event_record(first.event, stage.stream)",
        "first.recorded = CUDA_SUCCESS\n"
        "    if not MUTANT: first.recorded = stage.cuda.event_record(first.event, stage.stream)",
    ),
    Mutant(
        "a slot is copied after its memory was given back", "device", "_native/stage.pyx",
        "slot.counted = not slot.map.ended", "slot.counted = MUTANT or not slot.map.ended",
    ),
    Mutant(
        "a stage is closed with reads in flight", "device", "_native/stage.pyx",
        "while self.reading > 0 and", "while not MUTANT and self.reading > 0 and",
    ),
    Mutant(
        "device memory is freed under a copy", "device", "_native/stage.pyx",
        "copying = self.map.copying\n", "copying = 0 if MUTANT else self.map.copying\n",
    ),
    Mutant(
        "a load takes what a cancelled prefetch has not read", "loads", "loading/batch.py",
        "if state == LOST:", "if state == LOST and not MUTANT:",
    ),
    Mutant(
        "a range that a prefetch lost and nobody could read succeeds later", "loads",
        "loading/batch.py",
        "            if anew:\n",
        "            if anew and MUTANT: del self.claims[name]; return True\n"
        "            if anew:\n",
    ),
    Mutant(
        "a load that failed succeeds when it is asked again", "loads", "loading/batch.py",
        "        request, backend = self._request, self._backend\n        if request is None or",
        "        request, backend = self._request, self._backend\n"
        "        if MUTANT and self._failure: self._failure = None; self._arrived = bytearray()\n"
        "        if request is None or",
    ),
)  # fmt: skip


def build(module: str, folder: Path) -> None:
    """The module with its mutants: each strikes if the environment names its number."""
    text = (SOURCE / module).read_text()
    native = module.endswith(".pyx")
    for number, mutant in enumerate(MUTANTS, start=1):
        if mutant.module == module:
            assert text.count(mutant.old) == 1, f"{mutant.fault}: the code has changed"
            strikes = f"chosen_mutant == {number}"
            text = text.replace(mutant.old, mutant.new.replace("MUTANT", strikes))
    first_import = re.search(r"^(c?import |from (?!__future__))", text, re.MULTILINE)
    assert first_import is not None
    chosen = 'import os as _os\nchosen_mutant = int(_os.environ["MUTANT"])\n'
    if native:
        chosen = chosen.replace("chosen_mutant", "cdef int chosen_mutant", 1)
    source = folder / module
    source.parent.mkdir(exist_ok=True)
    source.write_text(text[: first_import.start()] + chosen + text[first_import.start() :])
    if native:
        compile_native(source)


def compile_native(source: Path) -> None:
    module = f"gdsload._native.{source.stem}"
    built = source.with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))
    include = sysconfig.get_paths()["include"]
    for command in (
        [sys.executable, "-m", "cython", "-3", "-I", str(ROOT / "src"), "--module-name", module,
         str(source)],
        [compiler(), "-O1", "-w", "-shared", "-fPIC", "-pthread", f"-I{include}",
         str(source.with_suffix(".c")), "-o", str(built), "-ldl"],
    ):  # fmt: skip
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_mutants_of_the_pump_are_found(tmp_path: Path) -> None:
    """Each mutant ends in a seed that fails; without one, the same modules keep the protocol."""
    modules = sorted({mutant.module for mutant in MUTANTS})
    with ThreadPoolExecutor(2) as others:
        list(others.map(lambda module: build(module, tmp_path), modules))
        for kind in RUNS:
            ended = explore(kind, 20, tmp_path)
            assert ended.returncode == 0, ended.stdout + ended.stderr
        numbers = range(1, len(MUTANTS) + 1)
        found = others.map(
            lambda n: explore(MUTANTS[n - 1].kind, MUTANT_RUNS, tmp_path, n).returncode, numbers
        )
        missed = [
            MUTANTS[n - 1].fault for n, status in zip(numbers, found, strict=True) if not status
        ]
    assert missed == []
