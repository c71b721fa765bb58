"""Types of the benchmarks' arguments: an invalid number is a usage error, reported at once,
and nothing that hours later has no runs to show.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable

UNITS = {"K": 10, "M": 20, "G": 30}


def whole(text: str) -> int:
    """A number of things, one at least. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def count(text: str) -> int:
    """A number of things, none among them. Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def amount(least: float, what: str) -> Callable[[str], float]:
    """A number of `what`, `least` or more: the type of an argument."""

    def parsed(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise ArgumentTypeError(f"{text!r} is no number of {what}, {least:g} or more")
        return value

    return parsed


def size(text: str) -> int:
    """4096, 4K, 1M or 1G: bytes, in powers of 1024, one at least. Raises ArgumentTypeError."""
    factor = UNITS.get(text[-1:].upper(), 0)
    number = text[:-1] if factor else text
    if not number.isdecimal() or int(number) < 1:
        raise ArgumentTypeError(f"{text!r} is not a number of bytes, such as 4096, 64K or 1M")
    return int(number) << factor


def name(text: str) -> str:
    """A part of a file's name. Raises ArgumentTypeError for a path."""
    if not text or "/" in text or "\0" in text:
        raise ArgumentTypeError(f"{text!r} is no name: a result is called by it, in one directory")
    return text


def device(text: str) -> str:
    """cpu, cuda or cuda:N. Raises ArgumentTypeError."""
    kind, colon, number = text.partition(":")
    if text != "cpu" and (kind != "cuda" or (colon and not number.isdecimal())):
        raise ArgumentTypeError(f"{text!r} is no device; there are cpu, cuda, cuda:0, cuda:1 ...")
    return text
