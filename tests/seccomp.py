"""Programs in which system calls are refused, as a sandbox or an old kernel does."""

from __future__ import annotations

import os

import pytest

# The beginning of such a program. Where the kernel has no filters it prints "skip" and ends.
REFUSE = """
import ctypes, os, struct, sys
def refuse(numbers, code):
    # BPF: load the number; for each of them answer with the errno; else allow.
    program = [struct.pack("HBBI", 0x20, 0, 0, 0)]
    for left, number in zip(range(len(numbers), 0, -1), numbers):
        program.append(struct.pack("HBBI", 0x15, left, 0, number))
    program.append(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
    program.append(struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | code))
    text = ctypes.create_string_buffer(b"".join(program))
    filter = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(text)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filter, 0, 0):
        print("skip", ctypes.get_errno(), flush=True); os._exit(0)
"""


def skip_if_allowed(printed: str) -> None:
    """Skips the test if the program could refuse nothing."""
    if printed.startswith("skip "):
        pytest.skip(f"seccomp: {os.strerror(int(printed.split()[1]))}")
