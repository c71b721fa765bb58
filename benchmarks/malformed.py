"""Malformed checkpoints and failing system calls: how gdsload and other loaders end.

    python -m benchmarks.malformed --publish        # minutes; in a checkout, after make bench-deps
    python -m benchmarks.malformed --arms gdsload runai --most 1

Each case is a load in a process of its own, with limits of time and of address space.

- Files that are not valid must end in an error: the headers of tests/checkpoint/test_header.py that
  safetensors refuses too, other formats, shards that were cut, names that are no regular file.
- Valid files of unusual form must load exactly.
- A load whose k-th system call of a kind fails, once, must end in exact bytes or an error, and the
  next load in the same process must be exact.
- A load during which a shard is cut, or replaced by another one of the same size, must end in the
  bytes of one version or an error. It happens at the k-th system call of a kind.

An error is an exception of any type. It counts as clear if it names a cause. For a file that is any
message that is not empty, unless the type is one of MISHAPS; for a failing call the errno by
number, name or text, or that the file ended early.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import re
import runpy
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from . import faults, injector, judge, places, records
from .arms import parse
from .loaded import ArmFailed
from .records import Refused

ARMS = ("gdsload", "gdsload:cache=direct", "safetensors-mmap", "fastsafetensors", "runai")
ROWS = places.ROOT / "tests/checkpoint/test_header.py"
HUGE_BYTES = 1 << 40  # of a sparse file: more than any limit here
VALID = "valid"
# What a loader's own code raises over a value that it did not expect; the message names no cause.
MISHAPS = {"AssertionError", "AttributeError", "IndexError", "KeyError", "NameError", "TypeError"}
ENDS_EARLY = "trunc|end of file|eof|ended|short|incomplete|expected|less than|only"
# How loads end, in the words of the tables.
EXACT, CLEAR, OTHER = {"exact": "exact"}, {"clear": "clear error"}, {"unclear": "other error"}
ENDS = {"crash": "crash", "hang": "hang"}
BAD = {"partial": "partial", "wrong": "wrong bytes", **ENDS}
NEXT = "next load fails"
LISTED = ("accepted", "partial", "wrong", "crash", "hang")
SHARD = "model-2-of-3.safetensors"  # the one that changes
READING = ("read", "pread64", "preadv2", "io_submit", "io_uring_enter")

Tensors = Mapping[str, Sequence[Any]]  # bytes and digest of each tensor


class File(NamedTuple):
    """A checkpoint; `truth` has its tensors, or is None where it must not load."""

    name: str
    kind: str
    source: Path
    truth: Tensors | None = None


class Struck(NamedTuple):
    """A load whose k-th call of a kind failed, or met a change of a file, and the load after it."""

    call: str
    what: str  # name of an errno, or the change
    k: int
    ended: str
    after: str = "exact"
    said: str = ""

    def __str__(self) -> str:
        return f"{self.what} at {self.call} {self.k}"


# --- checkpoints --------------------------------------------------------------------------------


def digest(data: bytes) -> list[Any]:
    return [len(data), hashlib.sha1(data).hexdigest()]


def files(folder: Path) -> Iterator[File]:
    """Writes a directory for each case."""
    import safetensors

    def written(kind: str, name: str, data: bytes) -> File:
        source = folder / f"{kind}-{len(list(folder.iterdir()))}"
        source.mkdir()
        (source / "model.safetensors").write_bytes(data)
        truth = None
        if kind == VALID:
            truth = {each: digest(entry["data"]) for each, entry in safetensors.deserialize(data)}
        return File(name, kind, source, truth)

    def whole(text: str | bytes, data: int) -> bytes:
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return len(raw).to_bytes(8, "little") + raw + bytes(1 + i % 251 for i in range(data))

    rows = runpy.run_path(str(ROWS))
    for name, text, data, _ in rows["INVALID"]:
        if name not in rows["STRICTER"]:  # valid by the only specification: safetensors' parser
            yield written("header", name, whole(text, data))
    for raw, name in rows["FOREIGN"]:
        yield written("format", name, raw)
    for name, text, data in rows["VALID"]:
        yield written(VALID, name, whole(text, data))
    yield from cut(folder)
    yield from no_files(folder)
    text = json.dumps(
        {"w": {"dtype": "U8", "shape": [HUGE_BYTES], "data_offsets": [0, HUGE_BYTES]}}
    )
    large = written("too large", "1 TiB, sparse", whole(text, 0))
    os.truncate(large.source / "model.safetensors", 8 + len(text) + HUGE_BYTES)
    yield large


def cut(folder: Path) -> Iterator[File]:
    """Three shards, of which the second has lost its end, or has another byte after it."""
    for name, at in (
        ("in the length", lambda head, size: 5),
        ("in the header", lambda head, size: head // 2),
        ("after the header", lambda head, size: head),
        ("after a byte of data", lambda head, size: head + 1),
        ("in the middle", lambda head, size: size // 2),
        ("before the last byte", lambda head, size: size - 1),
        ("a byte too many", lambda head, size: size + 1),
    ):
        source = folder / f"cut {name}"
        faults.write_checkpoint(source, faults.SHARDS)
        shard = source / "model-2-of-3.safetensors"
        with shard.open("rb") as opened:
            head = 8 + int.from_bytes(opened.read(8), "little")
        os.truncate(shard, at(head, shard.stat().st_size))
        yield File(name, "cut", source)


def no_files(folder: Path) -> Iterator[File]:
    for name, make in (
        ("a directory", Path.mkdir),
        ("a named pipe", os.mkfifo),
        ("a broken link", lambda path: path.symlink_to("missing")),
        ("a link to itself", lambda path: path.symlink_to(path.name)),
    ):
        source = folder / name
        source.mkdir()
        make(source / "model.safetensors")
        yield File(name, "no file", source)


# --- verdicts -----------------------------------------------------------------------------------


def names_cause(outcome: Mapping[str, Any]) -> bool:
    """Whether an exception says more than that an expression of the loader failed."""
    said = outcome["text"]
    return bool(said) and "values to unpack" not in said and outcome["error"] not in MISHAPS


def names_errno(outcome: Mapping[str, Any], error: str) -> bool:
    """Whether an exception names an errno of `faults.ERRORS`, by its number, name or text."""
    said = f"{outcome['error']}: {outcome['text']}".lower()
    if error == "END":
        return re.search(ENDS_EARLY, said) is not None
    code = getattr(errno, error)
    words = [error.lower(), os.strerror(code).lower()]
    if error == "ENOMEM":  # a thread that gets none cannot start: EAGAIN
        words += ["memory", os.strerror(errno.EAGAIN).lower()]
    return outcome["code"] == code or any(word in said for word in words)


def verdict(outcome: Mapping[str, Any], truth: Tensors | None, clear: bool) -> str:
    """How a load ended; `clear` says whether an exception, if it is one, names the cause."""
    if outcome["how"] == "raised":
        return "clear" if clear else "unclear"
    if outcome["how"] != "loaded":
        return "hang" if outcome["how"] == "hang" else "crash"
    if truth is None:
        return "accepted"
    if outcome["tensors"].keys() != truth.keys():
        return "partial"
    return "exact" if outcome["tensors"] == truth else "wrong"


# --- a loader -----------------------------------------------------------------------------------


class Loader:
    """The process that runs an arm's cases (malformed_worker.py)."""

    def __init__(self, label: str, log: Path) -> None:
        arm = parse(label)
        self.label = label
        python = judge.python_of(arm)
        with log.open("wb") as words:
            self._process = subprocess.Popen(
                [*places.command(python, "malformed_worker"), label],
                cwd="/",
                env=places.environment_of(python, **arm.environment),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
            )
        self._log = log
        self.versions: dict[str, str] = self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            last = self._log.read_text(errors="replace").strip()[-500:]
            raise Refused(f"{self.label}: its process ended: {last}")
        return json.loads(line)

    def run(self, source: Path, calls: Sequence[str] = (), **more: Any) -> Any:
        assert self._process.stdin is not None
        job = {"code": 0, "k": 0, "change": "", "source": str(source), "calls": list(calls), **more}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        found = self._answer()
        fields = ("how", "error", "text", "code", "tensors")
        found["outcomes"] = [dict(zip(fields, each, strict=True)) for each in found["outcomes"]]
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def with_files(loader: Loader, cases: Sequence[File]) -> Iterator[tuple[File, str, str]]:
    """Each file, its verdict, and the words of the loader."""
    for case in cases:
        outcome = loader.run(case.source)["outcomes"][-1]
        said = f"{outcome['how']} {outcome['error']}: {outcome['text']}"
        yield case, verdict(outcome, case.truth, names_cause(outcome)), said


def counts_of(loader: Loader, source: Path, truth: Tensors) -> dict[str, int]:
    """How often a load makes each call. Raises Refused if it is not exact."""
    found = loader.run(source, sorted(injector.NUMBERS.keys() & faults.ERRORS))
    for outcome in found["outcomes"]:
        if verdict(outcome, truth, False) != "exact":
            raise Refused(f"{loader.label}, without a fault: {outcome}")
    names = {str(number): name for name, number in injector.NUMBERS.items()}
    return {names[number]: count for number, count in found["seen"].items()}


def positions(count: int, most: int) -> list[int]:
    """At most `most` of 1 to `count`, evenly spread."""
    return sorted({1 + (count - 1) * i // max(most - 1, 1) for i in range(most)}) if count else []


def words_of(outcomes: Sequence[Mapping[str, Any]]) -> str:
    return "; then ".join(f"{one['how']} {one['error']}: {one['text']}" for one in outcomes)


def with_faults(
    loader: Loader, source: Path, truth: Tensors, counts: Mapping[str, int], most: int
) -> Iterator[Struck]:
    for call, errors in faults.ERRORS.items():
        for error in errors.split():
            for k in positions(counts.get(call, 0), most):
                code = getattr(errno, error, 0)
                found = loader.run(source, [call], code=code, k=k)
                before, *rest = found["outcomes"]
                if verdict(before, truth, False) != "exact":
                    raise Refused(f"{loader.label}, before a fault: {before}")
                if found["struck"]:
                    ended, *after = [verdict(one, truth, names_errno(one, error)) for one in rest]
                    # After the next load the process may still crash or hang: the last one counts.
                    yield Struck(call, error, k, ended, *after[-1:], said=words_of(rest))


def with_changes(
    loader: Loader, folder: Path, truth: Tensors, counts: Mapping[str, int], most: int
) -> Iterator[Struck]:
    """Each load gets files of its own: they change."""
    source = folder / f"{loader.label}-changed"
    for change in ("truncated", "replaced"):
        for call in (*READING, "openat", "newfstatat", "statx", "mmap"):
            for k in positions(counts.get(call, 0), most):
                faults.write_checkpoint(source, faults.SHARDS)
                new = turned(source / SHARD)
                found = loader.run(source, [call], k=k, change=change, shard=SHARD)
                shutil.rmtree(source)
                if not found["struck"]:
                    continue
                outcome = found["outcomes"][1]
                ended = verdict(outcome, truth, names_cause(outcome))
                if change == "replaced" and ended in ("wrong", "partial"):
                    ended = verdict(outcome, {**truth, **new}, True)
                yield Struck(call, change, k, ended, said=words_of([outcome]))


def turned(shard: Path) -> dict[str, list[Any]]:
    """Writes another version of a shard beside it, of the same size: other bytes, and the tensors
    in another order. Returns its tensors."""
    found, data, header = {}, b"", {}
    with shard.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        entries = json.loads(opened.read(length))
    for name, entry in reversed(entries.items()):
        first, end = entry["data_offsets"]
        block = bytes(255 - i % 253 for i in range(min(end - first, 253)))
        part = (block * ((end - first) // 253 + 1))[: end - first]
        header[name] = {**entry, "data_offsets": [len(data), len(data) + len(part)]}
        found[name] = digest(part)
        data += part
    text = json.dumps(header).encode().ljust(length)
    new = struct.pack("<Q", len(text)) + text + data
    if len(new) != shard.stat().st_size:
        raise Refused(f"{shard}: {len(new)} bytes do not replace {shard.stat().st_size}")
    shard.with_suffix(".new").write_bytes(new)
    return found


# --- the result ---------------------------------------------------------------------------------


def tallied(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """ "clear 3 hang 1" by row."""
    rows: dict[str, Counter[str]] = {}
    for row, ended in pairs:
        rows.setdefault(row, Counter())[ended] += 1
    return {
        row: " ".join(f"{ended} {number}" for ended, number in sorted(counts.items()))
        for row, counts in rows.items()
    }


def totals(rows: Mapping[str, str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for counts in rows.values():
        words = counts.split()
        found.update({ended: int(n) for ended, n in zip(words[::2], words[1::2], strict=True)})
    return found


def measure(
    label: str, folder: Path, cases: Sequence[File], truth: Tensors, most: int, log: TextIO
) -> dict[str, Any]:
    """The rows of an arm."""
    loader = Loader(label, folder / f"{label}.log")
    struck: list[Struck] = []
    changed: list[Struck] = []
    try:
        ended = list(with_files(loader, cases))
        if most:
            good = folder / "good"
            counts = counts_of(loader, good, truth)
            struck += with_faults(loader, good, truth, counts, most)
            changed += with_changes(loader, folder, truth, counts, most)
    finally:
        loader.close()
    bad: dict[str, list[str]] = {}
    for case, found, said in ended:
        print(f"{label}\t{case.kind}: {case.name}\t{found}\t{said}", file=log)
        if found in LISTED:
            bad.setdefault(found, []).append(f"{case.kind}: {case.name}")
    for each in [*struck, *changed]:
        print(f"{label}\t{each}\t{each.ended}, then {each.after}\t{each.said}", file=log)
        if each.ended in LISTED:
            bad.setdefault(each.ended, []).append(str(each))
        if each.after != "exact":
            bad.setdefault(NEXT, []).append(str(each))
    log.flush()
    return {
        "arm": label,
        "versions": loader.versions,
        "files": tallied((case.kind, found) for case, found, _ in ended),
        "faults": tallied((each.call, each.ended) for each in struck),
        "changes": tallied((each.what, each.ended) for each in changed),
        "next": sum(each.after != "exact" for each in struck),
        "listed": bad,
    }


def table(heads: Mapping[str, str], rows: Mapping[str, Mapping[str, int]]) -> str:
    """Loaders down, verdicts across; `heads` has the words for the verdicts."""
    lines = [
        f"| loader | loads | {' | '.join(heads.values())} |",
        f"|---|---:{'|---:' * len(heads)}|",
    ]
    for name, counts in rows.items():
        loads = sum(number for ended, number in counts.items() if ended != NEXT)
        cells = " | ".join(f"{counts.get(one, 0):,}" for one in heads)
        lines.append(f"| `{name}` | {loads:,} | {cells} |")
    return "\n".join(lines)


def text_of(result: Mapping[str, Any]) -> str:
    """A table for each kind of case, and the names of the worst."""
    files_of_arms = {row["arm"]: dict(row["files"]) for row in result["arms"]}
    valid = {arm: totals({VALID: rows.pop(VALID)}) for arm, rows in files_of_arms.items()}
    invalid = {arm: totals(rows) for arm, rows in files_of_arms.items()}
    parts = [
        "Files that are not valid:",
        table({**CLEAR, **OTHER, "accepted": "loaded", **ENDS}, invalid),
        "Valid files of unusual form:",
        table({**EXACT, **CLEAR, **OTHER, **BAD}, valid),
    ]
    faulty = {
        row["arm"]: totals(row["faults"]) + Counter({NEXT: row["next"]}) for row in result["arms"]
    }
    changed = {row["arm"]: totals(row["changes"]) for row in result["arms"]}
    if any(changed.values()):
        parts += [
            "A system call fails once:",
            table({**EXACT, "clear": "names the errno", **OTHER, **BAD, NEXT: NEXT}, faulty),
            "A shard is cut or replaced during the load:",
            table({"exact": "one version", **CLEAR, **OTHER, **BAD}, changed),
        ]
    lines = [
        f"- `{row['arm']}`, {ended}: {', '.join(named)}"
        for row in result["arms"]
        for ended, named in row["listed"].items()
        if ended != "accepted"
    ]
    return "\n\n".join([*parts, "\n".join(lines)]) + "\n"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = records.parser_of("benchmarks.malformed", __doc__)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), metavar="ARM", help="loaders")
    parser.add_argument(
        "--most",
        type=int,
        default=4,
        metavar="N",
        help="positions of each call and error: 4; 0 for files only",
    )
    parser.add_argument("--jobs", type=int, default=2, help="loaders at one time: 2")
    parser.add_argument("--dir", type=Path, help="where files are written: a temporary directory")
    parser.add_argument("--log", type=Path, help="gets a line for each case, with its message")
    parser.add_argument("--publish", action="store_true", help="write the tables into docs/")
    records.add_output(parser)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    try:
        if not ROWS.is_file():
            raise Refused(f"only in a checkout: there is no {ROWS}")
        if options.most and (why := injector.why_not()):
            raise Refused(why)
        with (
            tempfile.TemporaryDirectory(dir=options.dir, prefix="gdsload-malformed-") as name,
            open(options.log or os.devnull, "w") as log,
        ):
            folder = Path(name)
            (folder / "files").mkdir()
            cases = list(files(folder / "files"))
            wanted = faults.write_checkpoint(folder / "good", faults.SHARDS)
            truth = {each: digest(data) for each, data in wanted.items()}
            with ThreadPoolExecutor(options.jobs) as pool:
                waiting = [
                    pool.submit(measure, label, folder, cases, truth, options.most, log)
                    for label in options.arms
                ]
                arms = [each.result() for each in waiting]
            result = records.record("malformed", folder, most=options.most, arms=arms)
    except (Refused, ArmFailed) as error:
        print(f"malformed: no result: {error}", file=sys.stderr)
        return 2
    print(text_of(result))
    if options.publish:
        versions = {name: of for row in arms for name, of in row["versions"].items()}
        named = ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
        shown = f"{named}; {records.described(result)}.\n\n{text_of(result)}"
        records.fill(faults.DOCUMENT, "malformed", shown)
    print(f"result: {records.keep(result, options, 'malformed')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
