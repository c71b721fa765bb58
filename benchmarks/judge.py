"""Checks that a run is what its label says: cold if it is called cold, with equal bytes.

The judge makes the state, starts the worker (worker.py), looks at the page cache itself before the
clock starts, and reads the disk's own counter before and after. A run that does not add up is
discarded with its reason, and repeated.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import select
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gdsload.memory import page_cache

from . import cache, fio, machine, places
from .arms import KINDS, Arm, versions
from .children import PATIENCE_SECONDS
from .loaded import CPU, OURS, PREFETCH, ArmFailed, files_of
from .pages import Memory
from .records import Refused

# What the disk may have read beyond the files: code that was paged in, metadata, neighbours.
SLACK_BYTES = 48 << 20
SLACK_SHARE = 0.03
# A cold run may read less than all files hold only by headers and by tensors nobody asked for.
SHORT_SHARE = 0.002
UNPREPARED = Memory()


class NotWhatItSays(Refused):
    """A run whose page cache or bytes are not what its state promises."""


@dataclass(frozen=True)
class Conditions:
    """The conditions that all arms of a table share. The state of memory is of each run."""

    source: Path
    warm: bool = False
    rehearsal: Path | None = None
    # Whether others may read from the disk meanwhile: the arm's own account then has to add up.
    neighbours: bool = False
    device: str = CPU
    # The kind of a filesystem of mounts.py, "cgroup", or ""; the processes of the cgroup.
    storage: str = ""
    members: Path | None = None

    @property
    def files(self) -> list[Path]:
        return files_of(self.source)

    @property
    def file_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def make_cache(self) -> str:
        """Empties the page cache of the files, or fills it where bytes are missing; says how."""
        if self.warm:
            self.settled_bytes()
            return "files read"
        # The daemon of a FUSE filesystem reads from the page cache: its delays are the script's.
        if self.storage != "fuse" and page_cache.drop_caches():
            return "drop_caches"
        cache.evict(self.files)
        return "evicted"

    def fill(self) -> None:
        """Reads all files through the page cache."""
        buffer = bytearray(1 << 20)
        for file in self.files:
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass

    def settled_bytes(self) -> int:
        """What is resident just before a clock starts. A kernel that reclaims idle pages by itself
        (DAMON) may have taken some of a warm file since it was read: they are read again."""
        for _ in range(3):
            resident = self.resident_bytes()
            if not self.warm or resident == self.file_bytes:
                break
            self.fill()
        return resident

    def resident_bytes(self) -> int:
        return sum(page_cache.resident_bytes(file) for file in self.files)


@dataclass
class Judge:
    """Runs arms under one set of conditions, and compares what they have read."""

    conditions: Conditions
    discarded: list[dict[str, str]] = field(default_factory=list)
    sums: dict[str, tuple[int, str]] = field(default_factory=dict)
    crcs: dict[str, tuple[int, str]] = field(default_factory=dict)
    # The names of the first arm that gave tensors, and of the first that gave a model: models tie
    # and fuse some.
    names: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.disk = machine.diskstats_key(self.conditions.files[0])
        self.identity = cache.identity(self.conditions.files)

    def run(
        self, arm: Arm, memory: Memory = UNPREPARED, *, checked: bool = False, tries: int = 3
    ) -> dict[str, Any]:
        """One run that adds up. Raises ArmFailed, or NotWhatItSays after `tries` runs."""
        for turn in range(1, tries + 1):
            try:
                facts = self._fio(arm) if arm.kind == "fio" else self._run(arm, memory, checked)
            finally:
                self.require_unchanged()
            why = self.objection(facts)
            if why is None:
                return facts
            self.discarded.append({"arm": arm.label, "why": why})
            print(f"    discarded: {arm.label}: {why}", file=sys.stderr)
            if turn == tries:
                raise NotWhatItSays(f"{arm.label}, {tries} times in a row: {why}")
        raise AssertionError("no run was tried")

    def require_unchanged(self) -> None:
        """Raises NotWhatItSays where a file is not what it was when this judge was made."""
        before = dict(zip(self.identity, cache.identity(self.conditions.files), strict=False))
        changed = [was[0] for was, now in before.items() if was != now]
        if changed or len(before) != len(self.conditions.files):
            what = ", ".join(changed) or str(self.conditions.source)
            raise NotWhatItSays(f"{what}: it was changed during the measurement")

    def objection(self, facts: dict[str, Any]) -> str | None:
        """Why a run does not count, or None."""
        total, resident = self.conditions.file_bytes, facts["resident_before_bytes"]
        if self.conditions.warm:
            return None if resident == total else f"{total - resident:,} bytes were not resident"
        if resident:
            return f"{resident:,} bytes were resident before the clock started"
        read, counter = facts["device_read_bytes"], "the disk"
        own = facts.get("own_read_bytes")
        # Not counted, as on overlays, or others read as well: the account of the arm has to add up.
        if read is None or (self.conditions.neighbours and own is not None):
            read, counter = own, "the arm"
        if self.conditions.storage == "fuse":  # the kernel counts no reads of it
            return None
        if read is None:
            return "neither the disk nor the kernel counted the bytes that were read"
        # A tensor that was cast to a larger type has more bytes than were read.
        touched = facts["touched_bytes"] or facts.get("read_bytes", 0)  # fio touches nothing
        least = min(touched, total) * (1 - SHORT_SHARE)
        most = total * (1 + SLACK_SHARE) + SLACK_BYTES
        if read < least:
            why = f"{counter} read {read:,} bytes, but {touched:,} were touched"
            return why + cache.holes(self.conditions.files)
        if read > most:
            beside = f" (the arm: {own:,})" if own is not None and counter != "the arm" else ""
            why = f"{counter} read {read:,} bytes for files of {total:,}{beside}"
            others = own is not None and least <= own <= most
            return why + ("; others use this disk: --neighbours allows it" if others else "")
        return None

    def _fio(self, arm: Arm) -> dict[str, Any]:
        how = self.conditions.make_cache()
        resident = self.conditions.settled_bytes()
        facts = fio.run(self.conditions.files, self.disk, arm.settings)
        return {
            **facts,
            "cache": how,
            "resident_before_bytes": resident,
        }

    def _run(self, arm: Arm, memory: Memory, checked: bool) -> dict[str, Any]:
        conditions = self.conditions
        job = {
            "kind": arm.kind,
            "settings": arm.options,
            "device": conditions.device,
            "source": str(conditions.source),
            "rehearsal": str(conditions.rehearsal or ""),
            "memory": memory,
            "checksums": checked,
        }
        with Worker(python_of(arm), job, arm.environment) as worker:
            if conditions.members is not None:
                conditions.members.write_text(str(worker.pid))
            worker.receive("imported")
            how = conditions.make_cache()
            worker.send("go")
            worker.receive("prepared")
            resident = conditions.settled_bytes()
            reads, busy = machine.disk_reads(), machine.busy_seconds()
            worker.send("go")
            facts = worker.receive("measured")
            busy = machine.busy_seconds() - busy
            read = machine.disk_reads()[self.disk] - reads[self.disk] if self.disk else None
            self._compare(arm, facts.pop("sums"), self.sums, "sum")
            if checked:
                self._compare(arm, worker.receive("checked")["crcs"], self.crcs, "CRC-32")
        facts.pop("step")
        return {
            **facts,
            "cache": how,
            "resident_before_bytes": resident,
            "device_read_bytes": read,
            "machine_cpu_s": busy,
        }

    def _compare(
        self, arm: Arm, found: dict[str, int], known: dict[str, tuple[int, str]], what: str
    ) -> None:
        """Each tensor must be to this arm what it was to the first that had it."""
        for name, value in found.items():
            truth, of = known.setdefault(name, (value, arm.label))
            if truth != value:
                raise NotWhatItSays(
                    f"{name}: its {what} is {value:x} by {arm.label} and {truth:x} by {of}"
                )
        gives = KINDS[arm.kind].gives
        if gives == "limit":  # it has no tensors
            return
        names = self.names.setdefault(gives, set(found))
        if missing := sorted(names - found.keys()):
            raise NotWhatItSays(f"{arm.label} did not load {', '.join(missing[:5])}")
        if more := sorted(found.keys() - names):
            raise NotWhatItSays(f"{arm.label} alone loaded {', '.join(more[:5])}")


def python_of(arm: Arm) -> Path:
    """The interpreter of an arm's environment; ours where that was not made, but has what it needs.
    Raises ArmFailed where there is none."""
    kind = KINDS[arm.kind]
    python = places.python_of(kind.environment)
    if kind.environment != OURS and python.exists():
        return python
    if kind.environment != PREFETCH:  # which wants another safetensors than the peers
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions(kind)
            return Path(sys.executable)
    raise ArmFailed("not installed: make bench-deps, or gdsload bench deps")


class Worker:
    """The other end of the conversation, and its process."""

    def __init__(self, python: Path, job: dict[str, Any], settings: dict[str, str]) -> None:
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            places.command(python, "worker"),
            cwd="/",
            env=places.environment_of(python, **settings, BENCH_BARE=str(places.BARE)),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
        )
        self._received = b""
        self.send(json.dumps(job))

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # receive() reports why it died
            self._process.stdin.write(line.encode() + b"\n")

    def receive(self, step: str) -> dict[str, Any]:
        """Its next message. Raises ArmFailed if that is not `step`."""
        pipe = self._process.stdout
        assert pipe is not None
        while b"\n" not in self._received:
            if not select.select([pipe], [], [], PATIENCE_SECONDS)[0]:
                raise ArmFailed(f"no word in {PATIENCE_SECONDS:.0f} s, where {step!r} was expected")
            chunk = os.read(pipe.fileno(), 1 << 20)
            if not chunk:
                raise ArmFailed(f"died before {step!r}: {self._last_words()}")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        facts: dict[str, Any] = json.loads(line)
        if facts["step"] != step:
            raise ArmFailed(facts.get("why", f"said {facts['step']!r}, not {step!r}"))
        return facts

    def _last_words(self) -> str:
        self._process.wait(60)
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        code = self._process.returncode
        return f"exit {code}, {lines[-1] if lines else 'without a word'}"

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # its answer is no longer needed, for example after Ctrl-C
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            # It ends by itself; its memory must be free before the next worker starts.
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words.close()
