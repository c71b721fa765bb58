"""The public names and their parameters, pinned, and the cost of importing them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gdsload
from gdsload import backends, events, telemetry, warmup
from gdsload.loading.settings import ReadSettings

NAMES = {
    gdsload: [
        "BackendUnavailable", "Checkpoint", "CheckpointError", "CuFileError", "FileChanged",
        "GdsloadError", "IntegrityError", "LoadReport", "PartialLoad", "PlacementError", "Prefetch",
        "RankError", "ReadError", "ServerStatus", "ShortRead", "StallError", "TensorInfo",
        "WeightServer", "__version__",
        "accelerated", "afrom_pretrained", "astream", "errors", "events", "experts",
        "from_pretrained", "install", "last_report", "layers", "load_file", "load_into", "plan",
        "prefetch", "quiesce", "replicas", "resume", "safe_open", "serve", "stream", "telemetry",
        "uninstall", "warmup",
    ],
    events: [
        "BackendChosen", "Event", "FailedOver", "LoadEnded", "LoadStarted", "PathRefused",
        "PathUsed", "PhaseEnded", "Retried",
    ],
    telemetry: ["observe", "record_metrics", "record_spans"],
    warmup: [
        "Hook", "HostPool", "Status", "from_environment", "hook", "limit_bandwidth", "status",
    ],
    backends: [
        "API_VERSION", "DRAM", "VRAM", "Backend", "BackendStatus", "Failure", "Limits", "Memory",
        "OpenFile", "Option", "Progress", "Registration", "RequestFacts", "Support", "Transfer",
        "choose", "find", "names", "probe_all", "reaches", "register_backend",
    ],
}  # fmt: skip
LOOKUP = ["revision", "subfolder", "variant", "cache_dir", "strict", "header_limit"]
READING = ["backend", "cache", "page_cache", "options", "stall_seconds", "verify", "on_event"]


def run(code: str, *words: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("module", NAMES, ids=lambda module: module.__name__)
def test_public_names_are_exactly_these(module: Any) -> None:
    assert module.__all__ == NAMES[module]
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)


@pytest.mark.parametrize("function", [
    gdsload.load_file, gdsload.load_into, gdsload.stream, gdsload.safe_open, gdsload.plan,
    gdsload.prefetch,
    gdsload.astream, warmup.hook, gdsload.Checkpoint.open,
], ids=lambda function: function.__qualname__)  # fmt: skip
def test_parameters_are_explicit(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    assert set(LOOKUP) <= parameters.keys()
    if function not in (gdsload.plan, gdsload.Checkpoint.open):
        assert set(READING) <= parameters.keys()
    for parameter in parameters.values():
        assert parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def test_read_settings_are_the_keywords_that_loads_share() -> None:
    assert list(inspect.signature(ReadSettings).parameters) == READING


def test_parameters_of_async_loads_and_hook_are_those_they_pass_on() -> None:
    def defaults(function: Any) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters.values()
        return {each.name: (each.default, each.annotation) for each in parameters}

    assert defaults(gdsload.astream) == defaults(gdsload.stream)
    assert defaults(gdsload.afrom_pretrained) == defaults(gdsload.from_pretrained)
    hook = defaults(warmup.hook)
    assert hook.pop("wait") == (False, "bool")
    prefetch = defaults(gdsload.prefetch)  # which takes an open Checkpoint as well
    assert hook.pop("source")[0] is prefetch.pop("source")[0]
    assert hook == prefetch


def test_any_name_can_be_used_first() -> None:
    code = (
        "import sys; import gdsload; assert getattr(gdsload, sys.argv[1]) is not None;"
        " import gdsload.safetensors_file, gdsload.planning.read_plan;"
        " assert callable(gdsload.plan) and isinstance(gdsload.safe_open, type)"
    )
    for name in ("plan", "load_file", "LoadReport", "warmup"):
        run(code, name)


def test_unknown_name_is_an_attribute_error() -> None:
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
def test_import_does_not_bring_heavy_modules(program: str) -> None:
    """torch costs a second; reading starts before it is imported."""
    heavy = "{'torch', 'numpy', 'transformers', 'tqdm', 'click', 'psutil'}"
    assert run(f"{program}\nimport sys\nprint(*sorted({heavy} & set(sys.modules)))") == ""


def test_import_of_gdsload_brings_one_module() -> None:
    code = (
        "import sys; before = set(sys.modules); import gdsload;"
        " print(sum(name.startswith('gdsload') for name in set(sys.modules) - before))"
    )
    assert run(code) == "1"


def test_without_transformers_load_file_works_and_from_pretrained_names_the_extra(
    tiny_checkpoint: Path,
) -> None:
    code = """
import sys

class Blocked:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "accelerate"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked)
import gdsload
assert len(gdsload.load_file(sys.argv[1])) == 47
gdsload.install()
gdsload.uninstall()
try:
    gdsload.from_pretrained(sys.argv[1])
except ImportError as error:
    print(error)
"""
    assert "pip install '.[transformers]'" in run(code, str(tiny_checkpoint))
