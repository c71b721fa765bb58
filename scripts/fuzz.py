"""Fuzzes what reads untrusted or typed input, guided by coverage (atheris).

    make fuzz                                              # each target for a minute
    make fuzz ARGS='--seconds 3600 --targets header index'

    header      the header of a file: never more permissive than safetensors, and the same result
    index       the index of a checkpoint: strict JSON, the same names as json.loads
    manifest    a manifest: a valid one, or CheckpointError
    plan        byte ranges to transfers: each byte once, aligned, within the limits
    slices      the index of a tensor to byte ranges: the same elements as numpy's
    values      the values of command-line options: a value, or a usage error

New inputs are kept in .cache/fuzz/corpus, beside those of tests/corpus, which the tests replay. An
input that fails is written to .cache/fuzz: it belongs in tests/corpus with the fix.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy
import safetensors

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "corpus"
WORK = ROOT / ".cache" / "fuzz"
MOST_BYTES = 4096
RUN = "--run"  # in the process that fuzzes one target


def instrumented() -> Any:
    if __name__ != "__main__" or RUN not in sys.argv:
        return nullcontext()
    import atheris

    return atheris.instrument_imports(include=["gdsload"])


with instrumented():
    from gdsload.checkpoint.header import (
        LENGTH_BYTES,
        TensorInfo,
        header_length,
        parse_header,
        read_weight_map,
    )
    from gdsload.checkpoint.manifest import Manifest, read_manifest, write_manifest
    from gdsload.checkpoint.selection import chosen
    from gdsload.cli.loading import settings_of
    from gdsload.cli.terminal import Bytes, Numbers, Pattern
    from gdsload.errors import CheckpointError
    from gdsload.planning.read_plan import ByteRange, Limits, ReadPlan, plan_reads
    from gdsload.planning.tensor_slices import TensorSlice, slice_of, wanted_tensors


class Failed(Exception):
    """A property does not hold."""


def require(holds: bool, text: str) -> None:
    if not holds:
        raise Failed(text)


class Source:
    """Numbers from bytes, zeros at their end: the same input always gives the same case."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def below(self, limit: int) -> int:
        width = (limit - 1).bit_length() // 8 + 1
        part = self.data[self.at : self.at + width]
        self.at += width
        return int.from_bytes(part, "little") % limit

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]


# --- targets ------------------------------------------------------------------------------------


def header(data: bytes) -> None:
    """A whole file. An even first byte means: the rest is JSON, of the length that it has."""
    if data[:1] and data[0] % 2 == 0:
        end = data.rfind(b"}") + 1
        data = max(end - 1, 0).to_bytes(LENGTH_BYTES, "little") + data[1:]
    try:
        length = header_length(data, len(data), path="f")
        ours = parse_header(data[LENGTH_BYTES : LENGTH_BYTES + length], len(data), path="f")
    except CheckpointError:
        return
    theirs = {name: it for name, it in safetensors.deserialize(data)}
    require(theirs.keys() == ours.tensors.keys(), "other tensors than safetensors")
    for name, info in ours.tensors.items():
        same = (info.dtype, list(info.shape)) == (theirs[name]["dtype"], theirs[name]["shape"])
        there = data[info.offset : info.offset + info.nbytes] == bytes(theirs[name]["data"])
        require(same and there, f"another tensor than safetensors: {info}")


def index(data: bytes) -> None:
    try:
        found = read_weight_map(data, path="f")
    except CheckpointError:
        return
    require(json.loads(data)["weight_map"] == found, "another map than json.loads")
    require(all(type(text) is str for text in found.values()), "something else than a string")


@cache
def _scratch() -> tuple[int, str]:
    """A file in memory, and its path."""
    fd = os.memfd_create("manifest")
    return fd, f"/proc/self/fd/{fd}"


def manifest(data: bytes) -> None:
    fd, path = _scratch()
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)
    try:
        found = read_manifest(path)
    except CheckpointError:
        return
    require(_is_sound(found), f"a manifest that is not sound: {found}")
    copy = WORK / f"manifest-{os.getpid()}.json"
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_manifest(str(copy), found.algorithm, found.files)
        require(read_manifest(str(copy)).files == found.files, "another manifest when written")
    finally:
        copy.unlink(missing_ok=True)


def _is_sound(found: Manifest) -> bool:
    return all(
        entry.size >= 0 and all(type(text) is str for text in (name, *entry.tensors.values()))
        for name, entry in found.files.items()
    )


def plan(data: bytes) -> None:
    source = Source(data)
    block = source.one_of((512, 4096, 65536))
    limits = Limits(max_request=block * (1 + source.below(20)), block=block)
    window_bytes = source.one_of((0, 0, 1, 4096, 50_000, 1 << 20))
    gap_bytes = source.one_of((0, 1, 4096, 1 << 16, 1 << 20))
    sizes, ranges = [], []
    for shard in range(1 + source.below(3)):
        at = 8 + source.below(5000)
        for number in range(source.below(12)):
            at += source.one_of((0, 0, 1, 4095, 4096, 70_000, 300_000, source.below(1 << 17)))
            nbytes = source.one_of((0, 1, 4096, source.below(1 << 17)))
            ranges.append(ByteRange(f"{shard}.{number}", shard, at, nbytes))
            at += nbytes
        sizes.append(at + source.below(4))
    for last in range(len(ranges) - 1, 0, -1):
        other = source.below(last + 1)
        ranges[last], ranges[other] = ranges[other], ranges[last]
    blocks = [source.one_of((1, 512, 4096, 65536)) for _ in sizes] if source.below(2) else None
    made = plan_reads(
        ranges, sizes, limits, blocks=blocks, window_bytes=window_bytes, gap_bytes=gap_bytes
    )
    _check_transfers(made, sizes, limits, blocks)
    for each in ranges:
        _check_location(made, each)


def _check_transfers(
    made: ReadPlan, sizes: list[int], limits: Limits, blocks: list[int] | None
) -> None:
    ends: dict[int, int] = {}
    for each in made.transfers:
        align = max(blocks[each.shard] if blocks else 0, limits.block, 4096)
        require(each.offset % align == 0 and each.length % align == 0, f"not aligned: {each}")
        require(each.length <= max(limits.max_request, align), f"too large: {each}")
        require(0 < each.wanted <= sizes[each.shard] - each.offset, f"beyond its file: {each}")
        require(each.wanted <= each.length, f"more wanted than read: {each}")
        target = made.targets[each.target]
        require(each.target_offset + each.length <= target.length, f"beyond its target: {each}")
        require(target.offset + each.target_offset == each.offset, f"not congruent: {each}")
        require(each.target_offset >= ends.get(each.target, 0), f"twice to one place: {each}")
        ends[each.target] = each.target_offset + each.length


def _check_location(made: ReadPlan, wanted: ByteRange) -> None:
    location = made.locations[wanted.name]
    at, end = wanted.offset, wanted.offset + wanted.nbytes
    for each in made.transfers[location.first : location.last + 1] if wanted.nbytes else ():
        require(each.shard == wanted.shard and each.target == location.target, f"{wanted} {each}")
        require(each.offset <= at < each.offset + each.wanted, f"{wanted} is not read by {each}")
        place = each.target_offset + at - each.offset
        require(place == location.offset + at - wanted.offset, f"{wanted} is elsewhere: {each}")
        at = min(end, each.offset + each.wanted)
    require(at == end, f"{wanted} is read to {at}")


def slices(data: bytes) -> None:
    source = Source(data)
    shape = tuple(source.one_of((1, 2, 3, 5, 0, 300)) for _ in range(source.below(4)))
    dtype, width = source.one_of((("U8", 1), ("I32", 4), ("I64", 8)))
    if source.below(4) == 0:  # gaps that are worth skipping
        shape = (*shape, source.one_of((70_000, 140_000)))
    count = 1
    for extent in shape:
        count *= extent
    if count > 1 << 20:
        return
    file = numpy.arange(count, dtype=f"{'u' if width == 1 else 'i'}{width}")
    info = TensorInfo("w", dtype, shape, 0, 64, count * width)
    number: Callable[[], Any] = lambda: source.one_of((None, 0, 1, 2, -1, 4, -3, 299, 66_000))  # noqa: E731
    items: list[Any] = []
    for _ in range(source.below(len(shape) + 2)):
        kind = source.below(8)
        if kind == 0:
            items.append(...)
        elif kind < 3:
            items.append(source.one_of((0, 1, -1, 4, -7, 250)))
        else:
            items.append(slice(number(), number(), source.one_of((None, None, 1, 2))))
    chosen_items: Any = items[0] if len(items) == 1 else tuple(items)
    try:
        wanted = file.reshape(shape)[chosen_items]
    except IndexError:
        wanted = None
    for made in (_sliced(info, chosen_items), _wanted(info, chosen_items)):
        if isinstance(made, Exception):
            require(wanted is None, f"{shape}{chosen_items}: {made}")
        elif wanted is None:
            pass  # found in memory, by torch
        else:
            got = _assembled(made[0], file, made[1])
            equal = got.shape == wanted.shape and bool((got == wanted).all())
            require(equal, f"{shape}{chosen_items}: {got.shape}, and {wanted.shape} is right")


def _sliced(info: TensorInfo, item: Any) -> Any:
    return slice_of(info, item), None


def _wanted(info: TensorInfo, item: Any) -> Any:
    if isinstance(item, tuple) and item.count(...) > 1:
        item = (...,)
    try:
        (found,) = wanted_tensors([info], {"w": item})
    except (IndexError, TypeError) as error:
        return error
    return found.slice, found.shape


def _assembled(made: TensorSlice, file: Any, shape: tuple[int, ...] | None) -> Any:
    parts = []
    for part in made.parts:
        require(part.offset >= 64 and part.nbytes >= 0, f"outside the tensor: {part}")
        start = (part.offset - 64) // file.itemsize
        end = start + part.nbytes // file.itemsize
        require(end <= file.size, f"outside the tensor: {part}")
        parts.append(file[start:end].reshape(part.shape))
    found = parts[0] if len(parts) == 1 else numpy.stack(parts)
    if made.shape is not None:
        found = found.reshape(made.shape)
    if made.index is not None:
        found = found[made.index]
    return found if shape is None else found.reshape(shape)


def values(data: bytes) -> None:
    kind, text = data[0] % 4 if data else 0, data[1:].decode("utf-8", "surrogateescape")
    try:
        if kind == 0:
            number = Bytes().convert(text, None, None)
            require(type(number) is int and number >= 0, f"{text!r} is {number} bytes")
            if text.isascii() and text.replace(".", "", 1).isdigit():
                require(number == int(Fraction(text)), f"{text!r} is {number} bytes")
        elif kind == 1:
            first, end = Numbers().convert(text, None, None)
            require(first >= 0 and (end is None or first < end), f"{text!r} is {first}:{end}")
        elif kind == 2:
            for value in settings_of([text]).values():
                require(type(value) in (int, float, bool, str), f"{text!r} is {value!r}")
        elif not text.startswith("re:"):
            chosen({"a.0": None, "b": None}, [Pattern().convert(text, None, None)], "f")  # type: ignore[dict-item]
        else:
            Pattern().convert(text, None, None)
    except (click.UsageError, CheckpointError):
        pass


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each for each in (header, index, manifest, plan, slices, values)
}


# --- running ------------------------------------------------------------------------------------


def run(target: str, words: list[str]) -> None:
    """Fuzzes one target in this process, which ends with it."""
    import atheris

    atheris.Setup([sys.argv[0], *words], TARGETS[target])
    atheris.Fuzz()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=60, help="of each target: 60")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument(RUN, choices=TARGETS, help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(words)
    if options.run:
        run(options.run, rest)
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    failed = []
    for target in options.targets:
        corpus = WORK / "corpus" / target
        corpus.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, __file__, RUN, target, str(corpus), str(CORPUS / target),
            f"-max_total_time={options.seconds}", f"-max_len={MOST_BYTES}", "-timeout=20",
            "-print_final_stats=1", f"-artifact_prefix={WORK}/{target}-",
        ]  # fmt: skip
        print(f"{target}: {options.seconds} s", flush=True)
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(target)
    print(f"failed: {', '.join(failed)}" if failed else "no input failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
