"""Functions of transformers that are not as expected: each is left alone, reported and logged, and
the model is exact all the same."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
import re
import threading
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import gdsload
import tinymodels
from equal import NEW, names_replaced
from gdsload.integrations.transformers import hooks
from gdsload.integrations.transformers.monkeypatch import (
    Misfit,
    Patch,
    Patcher,
    Replacement,
    function_of,
)

pytestmark = pytest.mark.skipif(not NEW, reason="4.57 has other inner parts")

FUNCTIONS = [
    f"{module}.{patch.function}"
    for module in ("transformers.core_model_loading", "transformers.modeling_utils")
    for patch in hooks.patcher._patches[module]
    # Of `from_pretrained` only URLs need the replacement; no version can rename it.
    if NEW and not patch.optional and not patch.function.endswith(".from_pretrained")
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.saved("qwen3_moe", tmp_path_factory)


@pytest.fixture(scope="module")
def stock(mixture: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def told_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hooks.patcher, "_logged", set())
    before = names_replaced()
    yield
    assert not hooks.patcher.in_place
    monkeypatch.undo()
    assert names_replaced() == before
    with gdsload.accelerated():
        pass
    assert hooks.patcher.misfits == {}


def home_of(name: str) -> tuple[Any, str]:
    """The module or class that holds a function, and the function's name in it."""
    from transformers import core_model_loading, modeling_utils

    path, _, function = name.rpartition(".")
    module = {one.__name__: one for one in (core_model_loading, modeling_utils)}[path]
    if function == "_load_pretrained_model":
        return module.PreTrainedModel, function  # type: ignore[attr-defined]
    return module, function


def codes_in(owner: Any) -> Iterator[Any]:
    """The functions of a module or class of transformers, and those of its classes."""
    for value in list(vars(owner).values()):
        plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        plain = getattr(plain, "__wrapped__", plain)
        if isinstance(plain, types.FunctionType):
            yield plain
        elif isinstance(value, type) and value.__module__ == getattr(owner, "__name__", None):
            yield from codes_in(value)


def rename(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Gives the function another name, there and in all code of its module that uses it."""
    from transformers import modeling_utils

    owner, function = home_of(name)

    def with_names(code: types.CodeType) -> types.CodeType:
        names = tuple(f"{n}_of_tomorrow" if n == function else n for n in code.co_names)
        inner = tuple(
            with_names(one) if isinstance(one, types.CodeType) else one for one in code.co_consts
        )
        return code.replace(co_names=names, co_consts=inner)

    module = modeling_utils if isinstance(owner, type) else owner
    locations = {owner, *(one for one in vars(module).values() if isinstance(one, type))}
    for location in locations:  # methods may have the name, too
        if function in vars(location):
            monkeypatch.setattr(
                location, f"{function}_of_tomorrow", vars(location)[function], raising=False
            )
    for used in codes_in(module):
        changed = with_names(used.__code__)
        if changed != used.__code__:
            monkeypatch.setattr(used, "__code__", changed)
    monkeypatch.delattr(owner, function)


def change_parameters(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Gives the function, or the methods of the class, other parameters of the same meaning."""
    owner, function = home_of(name)
    raw = vars(owner)[function]
    if isinstance(raw, type):
        convert: Any = raw.convert  # type: ignore[attr-defined]
        monkeypatch.setattr(raw, "convert", lambda *a, **named: convert(*a, **named))
        return
    is_method = isinstance(raw, (classmethod, staticmethod))
    plain = raw.__func__ if is_method else raw

    def another(*arguments: Any, **named: Any) -> Any:
        return plain(*arguments, **named)

    monkeypatch.setattr(owner, function, type(raw)(another) if is_method else another)


BREAKS: dict[str, Callable[[pytest.MonkeyPatch, str], None]] = {
    "renamed": rename,
    "other parameters": change_parameters,
}
FORETELLING = {"rename_source_key"}
# What is called whatever its parameters are.
ANY_PARAMETERS = {"deepcopy", "re", "safe_open", "torch"}


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_that_does_not_fit_is_reported_and_the_model_is_exact(
    name: str,
    how: str,
    mixture: Path,
    stock: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    function = name.rpartition(".")[2]
    if how == "other parameters" and function in ANY_PARAMETERS:
        pytest.skip("it is called with what it is given")
    BREAKS[how](monkeypatch, name)
    with caplog.at_level(logging.WARNING, "gdsload"):
        for _ in range(2):
            ours = gdsload.from_pretrained(mixture, dtype=torch.bfloat16)
    report = gdsload.last_report()
    assert report.refusals[name].startswith("left as it is, since it is not as expected: ")
    assert name in report.summary()
    logged = [record.getMessage() for record in caplog.records]
    assert len([line for line in logged if line.startswith(f"{name} is left as it is")]) == 1
    assert tinymodels.differences(stock, ours) == []
    assert report.wanted_bytes > 0
    # Without these functions nothing can be said of the load before it begins.
    is_foretold = function not in FORETELLING or how == "other parameters"
    expected = (
        hooks.HOOK if is_foretold and function != "_load_pretrained_model" else hooks.SAFE_OPEN
    )
    assert report.integration == expected


@pytest.mark.parametrize(
    "name", ["core_model_loading.is_env_variable_true", "modeling_utils._tied_params_are_equal"]
)
def test_function_with_a_further_parameter_is_left_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"transformers.{name}"
    owner, function = home_of(name)
    if not hasattr(owner, function):
        pytest.skip("this transformers has no such function")
    parameters = [*inspect.signature(vars(owner)[function]).parameters, "further"]

    def another(*arguments: Any, **named: Any) -> Any: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    another.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(each, kind) for each in parameters]
    )
    monkeypatch.setattr(owner, function, another)
    with gdsload.accelerated():
        assert vars(owner)[function] is another
        assert "further" in hooks.patcher.misfits[name]


def test_callbacks_without_set_param_run_at_the_end(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename(monkeypatch, "transformers.core_model_loading.set_param_for_module")
    called: list[str] = []
    model = gdsload.from_pretrained(mixture, on_module_ready=lambda name, _: called.append(name))
    assert sorted(called) == sorted(name for name, _ in model.named_modules())
    assert "at the end" in gdsload.last_report().modules_ready


def test_current_transformers_has_no_misfits(mixture: Path) -> None:
    gdsload.from_pretrained(mixture)
    report = gdsload.last_report()
    assert not [name for name in report.refusals if name.startswith("transformers.")]
    assert report.integration == hooks.HOOK


def test_slices_begin_reads_to_devices_once_when_first_looked_at() -> None:
    from gdsload.integrations.transformers.lazy_slices import StateDict

    for look in (lambda d: d.items(), lambda d: d["a"], lambda d: sorted(d.items())):
        begun: list[int] = []
        slices = StateDict({"a": None}, functools.partial(begun.append, 1))  # type: ignore[dict-item]
        assert list(slices) == ["a"] and not begun
        look(slices)
        look(slices)
        assert begun == [1]


# --- the mechanism -------------------------------------------------------------------------------


def patched(module: types.ModuleType, *patches: Patch) -> Patcher:
    swaps = Patcher({module.__name__: patches})
    swaps.enter("test")
    swaps.leave("test")
    return swaps


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("package_of_a_test")
    module.__version__ = "5.4.0.dev0"  # type: ignore[attr-defined]
    module.known = lambda one, two: one  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    return module


def refuse(*_: Any) -> Any:
    raise KeyError("weights")


def test_misfit_of_one_patch_does_not_affect_others(package: types.ModuleType) -> None:
    def swap(module: types.ModuleType, name: str, *front: str) -> list[Replacement]:
        function_of(module, name, *front)
        return [Replacement(module, name, None)]

    swaps = Patcher(
        {
            package.__name__: (
                Patch("a", lambda m: swap(m, "a")),
                Patch("b", refuse),
                Patch("c", lambda m: swap(m, "known", "two")),
                Patch("known", lambda m: swap(m, "known", "one")),
            )
        }
    )
    known = package.known
    swaps.enter("test")
    assert package.known is None
    swaps.leave("test")
    assert package.known is known
    why = "left as it is, since it is not as expected"
    assert swaps.misfits == {
        "package_of_a_test.a": f"{why}: there is no such function",
        "package_of_a_test.b": f"{why}: KeyError: 'weights'",
        "package_of_a_test.c": f"{why}: it takes (one, two), not (two, ...)",
    }


@pytest.mark.parametrize("optional", [False, True])
def test_absent_function_is_a_misfit_unless_optional(
    package: types.ModuleType, optional: bool
) -> None:
    patcher = patched(
        package, Patch("gone", lambda module: [function_of(module, "gone")], optional)
    )
    assert bool(patcher.misfits) is not optional
    patcher = patched(package, Patch("known", refuse, optional))
    assert patcher.misfits, "a function that exists and does not fit is always reported"
    with pytest.raises(Misfit, match="no such function"):
        function_of(package, "gone")


def swapped(name: str) -> Patcher:
    """Replaces the function `f` of a module that is not imported yet."""

    def swap(module: types.ModuleType) -> list[Replacement]:
        return [Replacement(module, "f", lambda: "replaced")]

    return Patcher({name: (Patch("f", swap),)})


def test_other_modules_of_a_loader_are_imported_as_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of a zip file, which serves all of a package."""
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        for name, text in {"__init__": "", "target": "def f(): pass", "other": ""}.items():
            archive.writestr(f"zipped_of_a_test/{name}.py", text)
    monkeypatch.syspath_prepend(tmp_path / "lib.zip")
    patcher = swapped("zipped_of_a_test.target")
    patcher.enter("test")
    try:
        assert importlib.import_module("zipped_of_a_test.target").f() == "replaced"
        importlib.import_module("zipped_of_a_test.other")
    finally:
        patcher.leave("test")


def test_module_that_another_thread_is_importing_is_patched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "of_a_test", (begun, go_on), raising=False)
    (tmp_path / "slow_of_a_test.py").write_text(
        "import threading\nbegun, go_on = threading.of_a_test\nbegun.set()\ngo_on.wait()\n"
        "def f(): return 'original'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    patcher = swapped("slow_of_a_test")
    importing = threading.Thread(target=importlib.import_module, args=("slow_of_a_test",))
    importing.start()
    begun.wait()
    entering = threading.Thread(target=patcher.enter, args=("test",))
    entering.start()
    go_on.set()
    for thread in (importing, entering):
        thread.join()
    try:
        assert importlib.import_module("slow_of_a_test").f() == "replaced"
    finally:
        patcher.leave("test")
    assert importlib.import_module("slow_of_a_test").f() == "original"


def test_patterns_of_parameters_are_not_compiled(
    mixture: Path, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_pattern = re.compile

    def noted(pattern: Any, flags: Any = 0) -> Any:
        compiled.append(str(pattern))
        return compile_pattern(pattern, flags)

    monkeypatch.setattr(re, "compile", noted)
    model = gdsload.from_pretrained(mixture, dtype=torch.bfloat16)
    assert tinymodels.differences(stock, model) == []
    assert not [pattern for pattern in compiled if "layers.0" in pattern]


def test_model_keeps_plain_patterns(mixture: Path) -> None:
    model = gdsload.from_pretrained(mixture, key_mapping={"^elsewhere": "model"})
    conversions = getattr(model, "_weight_conversions", [])
    if not conversions:
        pytest.skip("this transformers keeps no conversions in its models")
    assert all(isinstance(each.compiled_sources, re.Pattern) for each in conversions)
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        mixture, key_mapping={"^elsewhere": "model"}
    )
    assert len(conversions) == len(getattr(stock, "_weight_conversions", []))


@pytest.mark.parametrize("copied", [lambda pattern: pattern, copy.deepcopy])
def test_pattern_that_is_used_is_compiled(copied: Callable[[Any], Any]) -> None:
    from transformers import core_model_loading

    with gdsload.accelerated():
        pattern = core_model_loading.re.compile("(?P<g0>a.)|b")
        assert not isinstance(pattern, re.Pattern)
        assert isinstance(core_model_loading.re.compile("a", re.IGNORECASE), re.Pattern)
    assert isinstance(core_model_loading.re.compile("(?P<g0>a.)|b"), re.Pattern)
    pattern = copied(pattern)
    assert pattern.search("xab").group("g0") == "ab"
    assert pattern.groupindex == {"g0": 1}
    assert pattern.pattern == "(?P<g0>a.)|b"


def test_pattern_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of re has 512 patterns, and a `key_mapping` may have more."""
    from transformers import core_model_loading

    with gdsload.accelerated():
        pattern = core_model_loading.re.compile("a+")
    compile_pattern, compiled = re.compile, []

    def noted(pattern: Any, flags: Any = 0) -> Any:
        compiled.append(pattern)
        return compile_pattern(pattern, flags)

    monkeypatch.setattr(re, "compile", noted)
    assert [bool(pattern.search(text)) for text in ("xa", "x", "a")] == [True, False, True]
    assert compiled == ["a+"]
