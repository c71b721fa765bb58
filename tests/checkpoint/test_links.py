"""Checkpoints whose shards are symbolic links into another directory, through the public names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import gdsload
from gdsload.cli import main


@pytest.fixture
def linked(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A directory of links to the files of a checkpoint with an index in another directory."""
    assert (tiny_checkpoint / "model.safetensors.index.json").exists()
    directory = tmp_path / "linked"
    directory.mkdir()
    for path in tiny_checkpoint.iterdir():
        (directory / path.name).symlink_to(path)
    return directory


def test_linked_shards_are_loaded_by_all_functions(linked: Path, tiny_checkpoint: Path) -> None:
    want = gdsload.load_file(tiny_checkpoint)
    with gdsload.safe_open(linked) as opened:
        by_safe_open = opened.get_tensors()
    for got in (gdsload.load_file(linked), dict(gdsload.stream(linked)), by_safe_open):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert gdsload.plan(linked).transfers


def test_linked_shards_are_inspected(linked: Path) -> None:
    ran = CliRunner().invoke(main, ["inspect", str(linked)])
    assert ran.exit_code == 0, ran.output
