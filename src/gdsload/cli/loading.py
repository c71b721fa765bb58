"""The command `load`: loads, measures, and compares the result with the safetensors library.

torch is imported here, before the first measured load.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from gdsload import api
from gdsload.backends import registry
from gdsload.backends.posix.engines import ENGINES
from gdsload.checkpoint import Checkpoint, Shard
from gdsload.checkpoint.locate import locate
from gdsload.cli import terminal
from gdsload.errors import BackendUnavailable, GdsloadError, one_line, shown
from gdsload.loading.settings import CACHES, ReadSettings
from gdsload.memory import page_cache
from gdsload.memory.tensors import flat_bytes
from gdsload.remote.urls import is_url, shown_source
from gdsload.report import count, last_report, size

if TYPE_CHECKING:
    import torch

_OPTION = "An option of the backend; may be repeated."


@click.command(short_help="Load a checkpoint, and measure it.")
@terminal.source_of
@terminal.names_of
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--backend", default="auto", show_default=True, help="The backend; see `doctor`.")
@click.option("--engine", help="The engine of that backend: short for --option engine=ENGINE.")
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help=_OPTION)
@click.option(
    "--cache",
    type=click.Choice(CACHES),
    default="auto",
    show_default=True,
    help="How the page cache is used.",
)
@click.option("--cold", is_flag=True, help="Empty the page cache first; fail if pages remain.")
@click.option(
    "--repeat", type=click.IntRange(1), default=1, show_default=True, help="Number of loads."
)
@click.option("--touch", is_flag=True, help="Add up every byte, as 64-bit words, after the load.")
@click.option("--verify", is_flag=True, help="Compare every bit with the safetensors library.")
@click.option("--trace", type=terminal.FILE, help="Write a Chrome trace to this file.")
@terminal.json_of
@terminal.common
def load(
    source: str,
    patterns: Sequence[str],
    layers: tuple[int, int | None] | None,
    experts: tuple[int, int | None] | None,
    device: str,
    backend: str,
    engine: str | None,
    options: Sequence[str],
    cache: str,
    cold: bool,
    repeat: int,
    touch: bool,
    verify: bool,
    trace: str | None,
    as_json: bool,
    **where: Any,
) -> None:
    """Loads a checkpoint and reports the time and the I/O path of the bytes."""
    if engine:
        options = [*options, f"engine={engine}"]
    settings = settings_of(options)
    if trace:
        _require_writable(trace)
    names = terminal.chosen(patterns, layers, experts)
    paths: list[str] = []
    if cold:  # not for other loads: headers in the page cache would hide the latency of the storage
        with Checkpoint.open(source, **where) as checkpoint:
            paths = [shard.path for shard in checkpoint.shards]
            if checkpoint.remote:
                raise click.UsageError("--cold is for local files")
    elif not (os.path.lexists(source) or is_url(source)):
        locate(source, **where)  # its errors need no torch, whose import takes seconds
    try:
        chosen = ReadSettings(backend, cache)
    except ValueError as error:  # they contradict each other
        raise click.UsageError(str(error)) from error
    # It imports torch, which is not part of the measured time of the first load.
    require_known(chosen.backend, settings.get("engine", "auto"), device)
    runs: list[dict[str, Any]] = []
    tensors: dict[str, torch.Tensor] = {}
    for number in range(repeat):
        tensors.clear()
        if cold:
            make_cold(paths)
        with _usage_errors_of(settings):
            tensors = api.load_file(
                source, device, backend=backend, names=names, cache=cache, options=settings, **where
            )
        report = last_report()
        runs.append(report.to_dict())
        text = f"{number + 1} of {repeat}: " * (repeat > 1) + report.summary()
        if touch:
            start = time.monotonic()
            runs[-1]["checksum"] = total = checksum(tensors.values())
            runs[-1]["touch_seconds"] = seconds = time.monotonic() - start
            text += f"\ntouched: every byte in {seconds:.3f} s, sum {total:x}"
        if not as_json:
            click.echo(text)
    if verify:
        require_equal(source, tensors, where)
    if as_json:
        terminal.show_json({"source": shown_source(source), "runs": runs, "verified": verify})
    else:
        if repeat > 1:
            middle = statistics.median(run["seconds"] for run in runs)
            click.echo(f"median of {repeat}: {middle:.3f} s")
        if verify:
            number_of = count(len(tensors), "tensor")
            click.echo(f"verified: {number_of} as safetensors reads them, bit for bit")
    if trace:  # last: the disk may be full
        report.save_trace(trace)


def _require_writable(trace: str) -> None:
    """Before the load, which may take minutes. Raises UsageError and GdsloadError."""
    directory = os.path.dirname(trace) or "."
    if not os.path.isdir(directory):
        raise click.UsageError(f"--trace {one_line(trace)}: no such directory")
    if not os.access(trace if os.path.exists(trace) else directory, os.W_OK):
        raise GdsloadError(f"--trace {one_line(trace)}: it cannot be written")


@contextmanager
def _usage_errors_of(settings: Mapping[str, Any]) -> Iterator[None]:
    """Makes errors of a backend about its options, if any were given, errors of the usage."""
    try:
        yield
    except (TypeError, ValueError) as error:
        context = click.get_current_context()
        if isinstance(error, GdsloadError) or not settings or context.meta.get(terminal.DEBUG):
            raise
        raise click.UsageError(str(error), context) from error


def require_known(backend: str, engine: object, device: str) -> None:
    """Raises UsageError for a name that no machine has. One that cannot work here fails later."""
    import torch

    try:
        if backend != "auto":
            registry.find(backend)
    except BackendUnavailable as error:
        raise click.UsageError(str(error).partition("\n")[0]) from error
    try:
        torch.device(device)
    except RuntimeError as error:
        why = f"--device {device!r} is neither cpu nor a GPU such as cuda:0"
        raise click.UsageError(why) from error
    if backend in ("auto", "posix") and engine not in ("auto", *ENGINES):
        raise click.UsageError(f"unknown engine {engine!r} (available: {', '.join(ENGINES)})")


def settings_of(options: Iterable[str]) -> dict[str, Any]:
    """The options of the backend from KEY=VALUE pairs; integers, decimals, true and false are
    converted."""
    settings: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise click.UsageError(f"--option takes KEY=VALUE, not {option!r}")
        if key in settings:
            raise click.UsageError(f"option {key!r} is given twice")
        settings[key] = _value_of(value)
    return settings


def _value_of(text: str) -> int | float | bool | str:
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"-?\d{0,18}\.\d{1,18}", text):
        return float(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def make_cold(paths: Sequence[str]) -> None:
    """Removes the files from the page cache. Raises GdsloadError if pages of a file remain."""
    page_cache.drop_caches()  # needs root; without it, only the eviction below works
    for path in paths:
        try:
            left = page_cache.evict(path)
        except OSError as error:
            raise GdsloadError(f"{one_line(path)}: {error.strerror}") from error
        if left:
            raise GdsloadError(
                f"{one_line(path)}: {size(left)} stay in the page cache (the file is on tmpfs, or"
                " another process maps or writes it)"
            )


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """The sum of all tensors as 64-bit words, and of the remaining bytes, modulo 2**64."""
    import torch

    total = 0
    for tensor in tensors:
        raw = flat_bytes(tensor)
        words = raw.numel() // 8 * 8
        total += int(raw[:words].view(torch.int64).sum()) + int(raw[words:].sum())
    return total % 2**64


@contextmanager
def _reference(shard: Shard) -> Iterator[Callable[[str], torch.Tensor]]:
    """Reads tensors of a shard by safetensors; for a remote file, from a copy in memory."""
    if shard.remote is not None:
        from safetensors.torch import load

        yield load(shard.read(0, shard.size)).__getitem__
        return
    from safetensors import safe_open

    # By its descriptor: safetensors opens no path that is not UTF-8.
    with safe_open(f"/proc/self/fd/{shard.fd}", framework="pt") as reference:
        yield reference.get_tensor


def require_equal(source: str, tensors: dict[str, torch.Tensor], where: dict[str, Any]) -> None:
    """Raises GdsloadError for the first tensor that differs from the one of safetensors."""
    import torch

    with Checkpoint.open(source, **where) as checkpoint:
        for number, shard in enumerate(checkpoint.shards):
            with _reference(shard) as read:
                for name, tensor in tensors.items():
                    if checkpoint.tensors[name].shard != number:
                        continue
                    wanted, got = read(name), tensor.cpu()
                    alike = (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
                    if not alike or not torch.equal(flat_bytes(got), flat_bytes(wanted)):
                        raise GdsloadError(
                            f"{one_line(shard.path)}: tensor {shown(name)} is not what safetensors"
                            f" reads: {'other bytes' if alike else 'another dtype or shape'}"
                        )
