"""The recipes in docs/remote.md that need an object store run with the stand-in."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import gdsload

pytest.importorskip("obstore")

PAGE = Path(__file__).parents[2] / "docs" / "remote.md"
BLOCK = re.compile(r"<!-- no-test: [^>]*test_recipes[^>]*-->\n```python\n(.*?)^```", re.M | re.S)


@pytest.mark.usefixtures("server")
def test_recipes_for_object_stores_run(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    recipes = BLOCK.findall(PAGE.read_text())
    assert len(recipes) == 4
    names: dict[str, object] = {"gdsload": gdsload}
    expected = gdsload.load_file(tiny_checkpoint)
    for recipe in recipes:
        exec(compile(recipe, str(PAGE), "exec"), names)
        tensors = names["tensors"]
        assert isinstance(tensors, dict)
        assert tensors.keys() == expected.keys()
        assert all(tensors[name].equal(expected[name]) for name in expected)
