"""docs/api.md is what scripts/api_reference.py writes, and has all public names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gdsload
from gdsload import backends, events, telemetry, warmup
from gdsload.report import LoadReport

ROOT = Path(__file__).resolve().parents[2]


def test_page_is_up_to_date() -> None:
    command = [sys.executable, ROOT / "scripts" / "api_reference.py", "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "module", [gdsload, warmup, events, telemetry, backends], ids=lambda each: each.__name__
)
def test_page_has_every_public_name(module: object) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    names = [name for name in vars(module)["__all__"] if not name.startswith("__")]
    assert [name for name in names if f".{name}`" not in page] == []


def test_page_lacks_internal_methods_and_constructors_of_classes_made_by_a_function() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert (LoadReport.begin.__doc__ or "").startswith("Internal:")
    assert "Internal:" not in page and "- `begin()`" not in page
    assert "; made by `prefetch`" in page and "\nPrefetch(\n" not in page


def test_page_has_every_field_of_the_report_and_every_option() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    fields = [name for name in vars(LoadReport("")) if name[0] != "_"]
    assert [name for name in fields if f"- `{name}`: " not in page] == []
    options = [each.name for name in backends.names() for each in backends.find(name).options()]
    assert [name for name in options if f"| `{name}` |" not in page] == []
