"""The command `load`: loads, measures, and holds the result against the safetensors library.

torch is imported here, before the clock of the first load starts, and by no other command.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from gdsload.cli.terminal import (
    DEBUG,
    chosen,
    common,
    count,
    given,
    json_of,
    names_of,
    opened,
    plain,
    show_json,
    size,
    source_of,
)
from gdsload.errors import GdsloadError, PlacementError, shown

if TYPE_CHECKING:
    import torch


@click.command(short_help="Load a checkpoint, and measure it.")
@source_of
@names_of
@click.option("--device", default="cpu", show_default=True, help="Where the tensors shall live.")
@click.option("--backend", default="auto", show_default=True, help="The road; see `doctor`.")
@click.option("--engine", help="The engine of that backend: short for --option engine=ENGINE.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of the backend; may be repeated.",
)
@click.option(
    "--cache",
    type=click.Choice(["auto", "direct", "buffered", "mapped"]),
    default="auto",
    show_default=True,
    help="What to make of the page cache.",
)
@click.option("--cold", is_flag=True, help="Empty the page cache first; an error if it will not.")
@click.option("--repeat", type=click.IntRange(1), default=1, help="Load so many times.")
@click.option("--touch", is_flag=True, help="Add up every byte, as 64-bit words, after the load.")
@click.option("--verify", is_flag=True, help="Hold every bit against the safetensors library.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Write a Chrome trace to this file.")
@json_of
@common
def load(
    source: str, patterns: Sequence[str], device: str, backend: str, engine: str | None,
    options: Sequence[str], cache: str, cold: bool, repeat: int, touch: bool, verify: bool,
    trace: str | None, as_json: bool, **where: Any,
) -> None:  # fmt: skip
    """Loads a checkpoint and reports what it cost, and which road the bytes took."""
    settings = settings_of(options) | ({"engine": engine} if engine else {})
    with opened(source, where) as checkpoint:
        names = chosen(checkpoint, patterns)
        paths = [shard.path for shard in checkpoint.shards]
    from gdsload.api import load_file
    from gdsload.report import last_report

    require_device(device)
    runs: list[dict[str, Any]] = []
    tensors: dict[str, torch.Tensor] = {}
    for number in range(repeat):
        tensors.clear()
        if cold:
            make_cold(paths)
        with blamed_on(settings):
            tensors = load_file(source, device, backend=backend, names=names, cache=cache,
                                options=settings, **given(where))  # fmt: skip
        report = last_report()
        runs.append(report.to_dict())
        if touch:
            start = time.monotonic()
            runs[-1]["checksum"] = checksum(tensors.values())
            runs[-1]["touch_seconds"] = time.monotonic() - start
        if not as_json:
            show_run(report.summary(), runs[-1], f"{number + 1} of {repeat}: " * (repeat > 1))
    if trace:
        report.save_trace(trace)
    if verify:
        require_equal(source, tensors, where)
    if as_json:
        show_json({"source": source, "runs": runs, "verified": verify})
        return
    if repeat > 1:
        middle = statistics.median(run["seconds"] for run in runs)
        click.echo(f"median of {repeat}: {middle:.3f} s")
    if verify:
        click.echo(f"verified: {count(len(tensors), 'tensor')} as safetensors reads them, bit for"
                   " bit")  # fmt: skip


def settings_of(options: Iterable[str]) -> dict[str, Any]:
    """KEY=VALUE pairs as a backend takes them: whole numbers are numbers, the rest is text."""
    settings: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise click.UsageError(f"--option takes KEY=VALUE, not {option!r}")
        settings[key] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return settings


@contextmanager
def blamed_on(settings: dict[str, Any]) -> Iterator[None]:
    """A backend answers a bad option with TypeError or ValueError: here that is bad usage."""
    try:
        yield
    except GdsloadError:
        raise
    except (TypeError, ValueError) as error:
        context = click.get_current_context()
        if not settings or context.meta.get(DEBUG):
            raise
        raise click.UsageError(str(error), context) from error


def require_device(device: str) -> None:
    """Raises PlacementError where torch cannot use a device, before anything is read for it.

    torch is imported by it before the first clock starts, so that all loads measure the same.
    """
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).strip().splitlines()[0]
        raise PlacementError(f"torch cannot use device {device!r}: {why}") from error


def make_cold(paths: Sequence[str]) -> None:
    """Leaves nothing of the files in the page cache, or raises GdsloadError naming the first."""
    from gdsload.memory import page_cache

    page_cache.drop_caches()  # where it may not, the files are evicted one by one
    for path in paths:
        try:
            left = page_cache.evict(path)
        except OSError as error:
            raise GdsloadError(f"{plain(path)}: {error.strerror}") from error
        if left:
            raise GdsloadError(
                f"{plain(path)}: {size(left)} stay in the page cache (on tmpfs they live there;"
                " elsewhere another process has them mapped, or they are being written)"
            )


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """The sum of all bytes, each tensor's taken as 64-bit words, modulo 2**64."""
    import torch

    total = 0
    for tensor in tensors:
        raw = raw_bytes(tensor)
        words = raw.numel() // 8 * 8
        total += int(raw[:words].view(torch.int64).sum()) + int(raw[words:].sum())
    return total % 2**64


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)


def require_equal(source: str, tensors: dict[str, torch.Tensor], where: dict[str, Any]) -> None:
    """Raises GdsloadError, naming the first tensor that is not what safetensors reads."""
    import torch
    from safetensors import safe_open

    with opened(source, where) as checkpoint:
        for number, shard in enumerate(checkpoint.shards):
            with safe_open(shard.path, framework="pt") as reference:
                for name, tensor in tensors.items():
                    if checkpoint.tensors[name].shard != number:
                        continue
                    wanted, got = reference.get_tensor(name), tensor.cpu()
                    alike = (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
                    if not alike or not torch.equal(raw_bytes(got), raw_bytes(wanted)):
                        raise GdsloadError(
                            f"{plain(shard.path)}: tensor {shown(name)} is not what safetensors"
                            f" reads: {'other bytes' if alike else 'another dtype or shape'}"
                        )


def show_run(summary: str, run: dict[str, Any], title: str) -> None:
    click.echo(title + summary)
    if "checksum" in run:
        click.echo(f"touched: every byte in {run['touch_seconds']:.3f} s, sum {run['checksum']:x}")
