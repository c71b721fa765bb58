"""Loads by `auto` over the doubles, for the tests of its choice and of failover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import gdsload
from devicetensors import raw
from gdsload.backends import tuning_cache
from gdsload.backends.auto.benchmark import cheapest
from gdsload.backends.auto.request import Part
from gdsload.report import LoadReport
from gdsload.system.mountinfo import mount_of

MIB = 1 << 20
SMALL: dict[str, Any] = {"ring_bytes": MIB, "request_bytes": 64 << 10}


def load(checkpoint: Path, cache: str = "direct", **changed: Any) -> LoadReport:
    """Loads by `auto` and compares all bytes."""
    got = gdsload.load_file(checkpoint, "cuda:0", cache=cache, options={**SMALL, **changed})
    for shard in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in safetensors.torch.load_file(shard).items():
            assert torch.equal(raw(got[name]), raw(tensor)), name
    report = gdsload.last_report()
    assert sum(report.paths.values()) >= report.read_bytes
    return report


def rates_are(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Sets the seconds that a sample takes with each backend."""
    monkeypatch.setattr(Part, "seconds", lambda part: seconds[part.candidate.name])


def keep(
    path: Path, rates: dict[str, float], fixed: dict[str, float], options: dict[str, Any] = SMALL
) -> None:
    """Caches these rates, as if they had been measured with `options`, and the seconds to open
    backends."""
    mount = mount_of(path)
    assert mount is not None
    device = "Double 0 0000:01:00.0"
    text = ", ".join(f"{name}={value}" for name, value in sorted(options.items()))
    result = tuning_cache.TunedChoice(
        mount.key,
        device,
        cheapest(rates),
        rates,
        {**tuning_cache.versions(), "options": text},
        fixed_seconds=fixed,
    )
    assert tuning_cache.store(result) == ""
