"""Whole processes and scripts that cannot be changed; names that are replaced and put back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import transformers

import gdsload
import tinymodels
from gdsload.integrations.transformers import hooks
from gdsload.integrations.transformers.model_reader import ModelReader

FIRST = "hook" if transformers.__version__[0] > "4" else "safe_open"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.saved("qwen3", tmp_path_factory)


def test_install_applies_to_all_threads(qwen: Path) -> None:
    gdsload.install(cache="buffered")
    try:
        gdsload.install(cache="buffered")
        found: list[str] = []

        def load() -> None:
            transformers.AutoModelForCausalLM.from_pretrained(qwen)
            found.append(gdsload.last_report().integration)

        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        assert found == [FIRST]
        assert gdsload.last_report().paths.get("mapped", 0) == 0
    finally:
        gdsload.uninstall()
    gdsload.uninstall()


def test_load_that_has_begun_ends_with_gdsload_if_it_is_uninstalled_meanwhile(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[bool] = []
    start, finish = ModelReader.__enter__, ModelReader.finish

    def entered(reader: ModelReader) -> ModelReader:
        gdsload.uninstall()
        return start(reader)

    def finished(reader: ModelReader) -> None:
        places.append(hooks.patcher.in_place)
        finish(reader)

    monkeypatch.setattr(ModelReader, "__enter__", entered)
    monkeypatch.setattr(ModelReader, "finish", finished)
    gdsload.install()
    try:
        transformers.AutoModelForCausalLM.from_pretrained(qwen)
    finally:
        gdsload.uninstall()
    assert places and all(places)
    assert gdsload.last_report().integration == FIRST
    assert not hooks.patcher.in_place


def test_install_invalid_options_raise() -> None:
    with pytest.raises(ValueError, match="cache='never'"):
        gdsload.install(cache="never")


SCRIPT = """
import sys
from transformers import AutoModelForCausalLM
import gdsload
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(gdsload.last_report().integration, sys.argv[1:], __name__)
"""


def ran(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore", **env},
    )


def test_run_and_sitecustomize_accelerate_a_script(qwen: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = ran("-m", "gdsload", "run", str(script), str(qwen), "--flag")
    assert done.stdout.split()[0] == FIRST, done.stderr
    assert f"['{qwen}', '--flag'] __main__" in done.stdout
    site = tmp_path / "site"
    site.mkdir()
    page = (Path(__file__).parents[2] / "docs/from-pretrained.md").read_text()
    recipe = next(block for block in page.split("```python\n") if "install(backend" in block)
    (site / "sitecustomize.py").write_text(recipe.partition("```")[0])
    paths = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    done = ran(str(script), str(qwen), GDSLOAD="1", PYTHONPATH=paths)
    assert done.stdout.split()[0] == FIRST, done.stderr
    done = ran("-c", "import sys; print('gdsload' in sys.modules)", PYTHONPATH=paths)
    assert done.stdout.split() == ["False"], "processes without the variable pay nothing"


# What a script finds of itself, also when its own thread has ended.
ITSELF = """
import atexit, os, pickle, sys, threading

class Own: pass

def tell():
    main = sys.modules["__main__"]
    own = pickle.loads(pickle.dumps(Own())).__class__ is Own
    print(__name__, sys.argv, vars(main) is globals(), own)
    print(type(__builtins__), "__annotations__" in globals())

def later():
    threading.main_thread().join()
    tell()

print(__file__, __package__, __spec__ and __spec__.name, sys.path[0])
threading.Thread(target=later).start()
atexit.register(tell)
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["own.py"], 0),
        (["own.py", "7"], 7),
        (["-m", "own", "3"], 3),
        (["-m", "pack"], 0),
        (["pack"], 0),
        (["link.py"], 0),
        (["nowhere.py"], 2),
        (["-m", "nowhere"], 1),
    ],
)
def test_run_equals_python_itself(
    words: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    for name in ("own.py", "pack/__main__.py"):
        (tmp_path / name).write_text(ITSELF)
    (tmp_path / "link.py").symlink_to(tmp_path / "pack" / "__main__.py")
    monkeypatch.chdir(tmp_path)
    plain, run = ran(*words), ran("-m", "gdsload", "run", *words)
    assert (run.stdout, run.returncode) == (plain.stdout, plain.returncode), run.stderr
    assert plain.returncode == code
    assert ("Traceback" in run.stderr) == ("Traceback" in plain.stderr), run.stderr


@pytest.mark.parametrize("words", [["raises.py"], ["-m", "raises"], ["syntax.py"]])
def test_run_shows_the_traceback_that_python_itself_shows(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises.py").write_text("def f():\n    raise ValueError('mine')\n\nf()\n")
    (tmp_path / "syntax.py").write_text("x =\n")
    monkeypatch.chdir(tmp_path)
    plain, run = ran(*words), ran("-m", "gdsload", "run", *words)
    assert plain.returncode == run.returncode == 1
    assert run.stderr.replace(f"{tmp_path}{os.sep}", "") == plain.stderr.replace(
        f"{tmp_path}{os.sep}", ""
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 has PYTHONSAFEPATH")
@pytest.mark.parametrize("words", [["own.py"], ["pack"]])
def test_run_with_a_safe_path_equals_python_itself(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "pack").mkdir()
    (tmp_path / "library" / "found.py").touch()
    for name in ("own.py", "pack/__main__.py"):
        (tmp_path / name).write_text("import found, sys; print(sys.path[:2])")
    script = str(tmp_path / words[0])
    found = [str(tmp_path / "library"), os.environ.get("PYTHONPATH", "")]  # gdsload may be there
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, found)), "PYTHONSAFEPATH": "1"}
    plain, run = ran(script, **paths), ran("-m", "gdsload", "run", script, **paths)
    assert (run.stdout, run.returncode) == (plain.stdout, 0), run.stderr


def test_run_stays_installed_for_threads_that_outlive_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import threading\nfrom gdsload.integrations.transformers import hooks as seam\n"
        "def later():\n    threading.main_thread().join()\n"
        "    print(seam.active().reading.backend)\n"
        "threading.Thread(target=later).start()\n"
    )
    done = ran("-m", "gdsload", "run", str(tmp_path / "script.py"), GDSLOAD_BACKEND="posix")
    assert done.stdout == "posix\n", done.stderr


def test_run_with_an_empty_backend_uses_the_default(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "from gdsload.integrations.transformers import hooks\n"
        "print(hooks.active().reading.backend)\n"
    )
    done = ran("-m", "gdsload", "run", str(tmp_path / "script.py"), GDSLOAD_BACKEND="")
    assert done.stdout == "auto\n", done.stderr


def test_run_with_an_unknown_backend_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('started')")
    done = ran("-m", "gdsload", "run", str(tmp_path / "script.py"), GDSLOAD_BACKEND="steam")
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr.startswith("gdsload: GDSLOAD_BACKEND: backend 'steam': unknown")
    assert done.stderr.count("\n") == 1


def test_run_without_a_script_shows_the_usage() -> None:
    assert ran("-m", "gdsload", "run").stderr.startswith("Usage: gdsload run")


def test_install_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import gdsload, sys; gdsload.install();"
        " print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert ran("-c", program).stdout.strip() == "set()"


def test_patcher_patches_a_module_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gdsload.integrations.transformers.monkeypatch import Patch, Patcher, Replacement

    (tmp_path / "latecomer.py").write_text("value = 1\nother = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    patches = [
        Patch("value", lambda module: [Replacement(module, "value", 7)]),
        Patch("none", lambda module: [Replacement(module, "none", 0)]),
    ]
    swaps = Patcher({"latecomer": patches})
    before = list(sys.meta_path)
    swaps.enter("one")
    swaps.enter("other")
    import latecomer

    assert latecomer.value == 7
    assert list(swaps.misfits) == ["latecomer.none"]
    swaps.leave("one")
    assert latecomer.value == 7
    swaps.leave("other")
    assert latecomer.value == 1
    assert not hasattr(latecomer, "none")
    assert sys.meta_path == before
    swaps.enter("one")
    latecomer.value = 9
    swaps.leave("one")
    assert latecomer.value == 9
    del sys.modules["latecomer"]


class _Interrupted:
    """A module's place, whose names cannot be set the n-th time."""

    first, second = 1, 2
    left = 0

    def __setattr__(self, name: str, value: object) -> None:
        _Interrupted.left -= 1
        if _Interrupted.left == 0:
            raise KeyboardInterrupt
        object.__setattr__(self, name, value)


@pytest.mark.parametrize("after", range(1, 6))
def test_patcher_interrupted_restores_the_originals(after: int) -> None:
    from gdsload.integrations.transformers.monkeypatch import Patch, Patcher, Replacement

    owner = _Interrupted()
    for name, value in (("first", 1), ("second", 2)):
        object.__setattr__(owner, name, value)
    swaps = Patcher(
        {
            "sys": [Patch("first", lambda _: [Replacement(owner, "first", 7)])],
            "os": [Patch("second", lambda _: [Replacement(owner, "second", 8)])],
            "not.there": [],
        }
    )
    before = list(sys.meta_path)
    _Interrupted.left = after
    user = object()
    seen = []
    try:
        try:
            swaps.enter(user)
            seen = [owner.first, owner.second]
        finally:
            swaps.leave(user)
    except KeyboardInterrupt:
        seen.append(-1)
    _Interrupted.left = 0
    assert seen == ([-1] if after <= 2 else [7, 8, -1] if after <= 4 else [7, 8])
    assert (owner.first, owner.second) == (1, 2)
    assert sys.meta_path == before
    assert not swaps.in_place


AUTO_CLASSES = """
import gdsload
with gdsload.accelerated():
    from transformers import AutoModel, AutoModelForCausalLM
for cls in (AutoModel, AutoModelForCausalLM, AutoModel.__mro__[1]):
    print(cls.from_pretrained.__func__.__globals__["__name__"])
"""


def test_classes_that_are_imported_under_the_patches_do_not_keep_them() -> None:
    """The Auto classes copy the functions of their base when they are defined."""
    command = [sys.executable, "-c", AUTO_CLASSES]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.split() and "gdsload" not in ran.stdout
