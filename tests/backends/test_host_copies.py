"""Copies from host memory to a device, without a device: the rest is in `readahead`."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from gdsload.backends import host_copies
from gdsload.backends.base import Progress, Registrations
from gdsload.backends.host_copies import HostCopy


class Owner:
    """Memory that is copied from."""


class Request:
    """A request, and its native part, whose last copy into the ring hangs."""

    def __init__(self, memory: Registrations) -> None:
        self.memory, self.native, self.hangs = memory, self, True

    def post(self) -> None:
        pass

    def check(self) -> Progress:
        return Progress([], [], True, 0.0)

    def end(self) -> None:
        pass

    def quiet(self, seconds: float) -> bool:
        return not self.hangs


class Pipeline:
    """Makes requests. It is its ring, and the native part of it, too."""

    slot_bytes = 1 << 20

    def __init__(self) -> None:
        self.ring = self.native = self
        self.requests: list[Request] = []

    def prepare(self, transfers: object, files: object, memory: Registrations) -> Request:
        self.requests.append(Request(memory))
        return self.requests[-1]


def test_memory_of_a_hanging_copy_is_kept_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_copies, "_kept", [])
    pipeline: Any = Pipeline()

    def copy() -> weakref.ref[Owner]:
        owner = Owner()
        host_copies._copy(pipeline, "cuda:0", [HostCopy(4096, 10, 1 << 62)], owner)
        return weakref.ref(owner)

    first, second = copy(), copy()
    pipeline.requests.pop(0).hangs = False
    copy()
    pipeline.requests.clear()
    gc.collect()
    assert first() is None
    assert second() is not None
