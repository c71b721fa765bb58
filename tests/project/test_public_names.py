"""The public names, pinned; and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gdsload

NAMES = [
    "BackendUnavailable", "Checkpoint", "CheckpointError", "CuFileError", "FileChanged",
    "GdsloadError", "LoadReport", "PlacementError", "ReadError", "ShortRead", "StallError",
    "TensorInfo", "__version__", "last_report", "load_file", "plan", "safe_open", "stream",
]  # fmt: skip


def test_the_public_names() -> None:
    assert set(NAMES) <= set(gdsload.__all__), "a public name is a promise"
    assert sorted(gdsload.__all__) == list(gdsload.__all__)
    for name in gdsload.__all__:
        assert getattr(gdsload, name) is not None
        assert name in dir(gdsload)


def test_each_name_comes_first() -> None:
    """Whichever name is used first, and `plan` is the function however it was imported."""
    program = (
        "import importlib, sys; import gdsload; name = sys.argv[1];"
        " value = getattr(gdsload, name); assert value is not None;"
        " from gdsload import plan; assert callable(plan); assert callable(gdsload.plan)"
    )
    for name in ("plan", "load_file", "LoadReport"):
        subprocess.run([sys.executable, "-c", program, name], check=True)


def test_no_such_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = gdsload.nonsense


@pytest.mark.parametrize(
    "program",
    [
        "import gdsload",
        "import gdsload; gdsload.Checkpoint, gdsload.plan, gdsload.LoadReport, gdsload.ReadError",
        "import gdsload; gdsload.load_file, gdsload.stream, gdsload.safe_open",
        "import gdsload.planning.read_plan, gdsload.memory.page_cache, gdsload.loading.session",
        "import gdsload.backends; gdsload.backends.names()",
    ],
)
def test_no_torch(program: str) -> None:
    """torch costs a second; reading starts before it is imported."""
    heavy = "{'torch', 'numpy', 'transformers', 'tqdm', 'click', 'psutil'}"
    code = f"{program}\nimport sys\nprint(*sorted({heavy} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


def test_importing_loads_one_module() -> None:
    code = (
        "import sys; before = set(sys.modules); import gdsload;"
        " print(sum(name.startswith('gdsload') for name in set(sys.modules) - before))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "1"
