"""Synthetic checkpoints have the names, shapes, files and sizes of the published ones."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gdsload.errors import CheckpointError
from gdsload.synthetic import checkpoints, model_shapes

# Bytes of each file of the published checkpoint, headers included.
PUBLISHED = {
    "qwen3-0.6b": [1503300328],
    "qwen2.5-7b": [3945441440, 3864726352, 3864726424, 3556377672],
    "llama-3.1-8b": [4976698672, 4999802720, 4915916176, 1168138808],
}
TENSORS = {"qwen3-0.6b": 311, "qwen2.5-7b": 339, "llama-3.1-8b": 291, "qwen3-30b-a3b": 18867}


@pytest.mark.parametrize(("model", "count"), TENSORS.items())
def test_tensor_count_is_that_of_the_published_model(model: str, count: int) -> None:
    assert len({tensor.name for tensor in checkpoints.shapes(model)}) == count


@pytest.mark.parametrize(("model", "sizes"), PUBLISHED.items())
def test_file_sizes_are_those_of_the_published_model(model: str, sizes: list[int]) -> None:
    files = checkpoints.shards(model).values()
    assert [len(checkpoints._header(file)) + checkpoints._nbytes(file) for file in files] == sizes


def test_mixture_of_experts_has_sixteen_files() -> None:
    files = checkpoints.shards("qwen3-30b-a3b")
    sizes = [len(checkpoints._header(file)) + checkpoints._nbytes(file) for file in files.values()]
    assert len(files) == 16
    assert (sizes[0], sizes[-1]) == (3998893112, 1085307128)
    assert checkpoints.total_bytes("qwen3-30b-a3b") == 30_532_122_624 * 2


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen2.5-7b", "llama-3.1-8b", "tiny"])
def test_names_and_shapes_are_those_that_transformers_builds(model: str) -> None:
    settings = model_shapes.configured(model)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**{k: v for k, v in settings.items() if k != "torch_dtype"})
        )
    expected = {name: tuple(value.shape) for name, value in built.state_dict().items()}
    assert {tensor.name: tensor.shape for tensor in checkpoints.shapes(model)} == expected


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_written_checkpoint_is_loaded_by_transformers(model: str, tmp_path: Path) -> None:
    directory = checkpoints.write(model, tmp_path / "model", layers=2)
    built, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert built.config.num_hidden_layers == 2
    with torch.inference_mode():
        assert built(input_ids=torch.tensor([[3, 1, 4, 1, 5]])).logits.isfinite().all()


def test_written_files_are_read_by_safetensors(tiny_checkpoint: Path) -> None:
    index = json.loads((tiny_checkpoint / "model.safetensors.index.json").read_text())
    found = {}
    for path in sorted(tiny_checkpoint.glob("*.safetensors")):
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                assert index["weight_map"][name] == path.name
                found[name] = file.get_tensor(name)
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        tensor.name: tensor.shape for tensor in checkpoints.shapes("tiny")
    }
    values = torch.cat([value.flatten() for value in found.values()]).float()
    assert values.isfinite().all()
    assert values.abs().min() >= 2**-11 and values.abs().max() < 2**-5
    assert index["metadata"]["total_size"] == values.numel() * 2
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_blocks_of_4_kib_are_all_different() -> None:
    weights = checkpoints.RandomWeights(7, tied=False)
    tensors = [checkpoints.Tensor(name, "BF16", (3 << 20,)) for name in ("first", "second")]
    content = b"".join(bytes(block) for tensor in tensors for block in weights.blocks(tensor))
    pages = {content[at : at + 4096] for at in range(0, len(content), 4096)}
    assert len(pages) == len(content) // 4096


@pytest.mark.parametrize("count", [1, 7, 2048, 2049, 524_287, 524_289])
def test_blocks_are_as_long_as_their_tensor(count: int) -> None:
    blocks = checkpoints.RandomWeights(0, tied=False).blocks(
        checkpoints.Tensor("odd", "BF16", (count,))
    )
    assert sum(len(block) for block in blocks) == 2 * count


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_seed_decides_the_bytes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    again = contents(checkpoints.write("tiny", tmp_path / "again"))
    other = contents(checkpoints.write("tiny", tmp_path / "other", seed=1))
    assert again == contents(tiny_checkpoint)
    assert other.keys() == again.keys()
    shard = "model-00001-of-00002.safetensors"
    assert len(other[shard]) == len(again[shard])
    assert other[shard] != again[shard]


def test_holds_is_true_only_for_the_same_arguments(tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert checkpoints.holds(tiny_checkpoint, "tiny")
    assert checkpoints.holds(tiny_checkpoint, "tiny", layers=4)
    assert not checkpoints.holds(tiny_checkpoint, "tiny", layers=3)
    assert not checkpoints.holds(tiny_checkpoint, "tiny", seed=1)
    assert not checkpoints.holds(tiny_checkpoint, "tiny-moe")
    assert not checkpoints.holds(tmp_path, "tiny")
    copy = Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))
    os.truncate(copy / "model-00002-of-00002.safetensors", 1000)
    assert not checkpoints.holds(copy, "tiny")
    (copy / "synth.json").write_bytes(b"\xff\xfe\0")
    assert not checkpoints.holds(copy, "tiny")


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    steps: list[int] = []
    checkpoints.write("tiny", tmp_path / "model", progress=steps.append)
    assert sum(steps) == checkpoints.total_bytes("tiny")


@pytest.mark.parametrize("layers", [0, -1, 5])
def test_impossible_layer_count_raises(layers: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tiny has 4 layers"):
        checkpoints.write("tiny", tmp_path / "model", layers=layers)


def test_unknown_model_raises_with_known_names(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model 'gpt-5'.*qwen3-0\.6b"):
        checkpoints.write("gpt-5", tmp_path / "model")


def test_empty_directory_is_written(tmp_path: Path) -> None:
    assert checkpoints.holds(checkpoints.write("tiny", tmp_path), "tiny")


def test_link_to_an_empty_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "link").symlink_to("volume")
    written = checkpoints.write("tiny", tmp_path / "link")
    assert written == tmp_path / "volume"
    assert checkpoints.holds(tmp_path / "link", "tiny")


def test_working_directory_stays_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mount point, it must not be replaced by another directory."""
    monkeypatch.chdir(tmp_path)
    checkpoints.write("tiny", ".")
    assert checkpoints.holds(os.curdir, "tiny")
    assert not list(tmp_path.glob(".*"))


def test_full_directory_raises_and_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="not empty"):
        checkpoints.write("tiny", tmp_path)
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


def test_file_at_the_path_raises(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("a file")
    with pytest.raises(CheckpointError, match="is not a directory"):
        checkpoints.write("tiny", tmp_path / "model")


def test_directory_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", ".x.1.partial")

    monkeypatch.setattr(checkpoints.os, "mkdir", refuse)  # root would be allowed
    with pytest.raises(CheckpointError, match=r"x: Permission denied$") as caught:
        checkpoints.write("tiny", tmp_path / "x")
    assert "partial" not in str(caught.value)


def test_full_disk_raises_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(CheckpointError, match=r"takes 1,503,\d+,\d+ bytes; 1,000,000,000 are free"):
        checkpoints.write("qwen3-0.6b", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("trouble", "raised", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError, "model: No space"),
        (OSError(errno.EIO, "Input/output error"), CheckpointError, "model: Input/output error"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
    ],
    ids=["disk full", "disk broken", "interrupted"],
)
def test_failed_write_leaves_no_files(
    trouble: BaseException, raised: type[BaseException], text: str, tmp_path: Path
) -> None:
    steps = itertools.count()

    def progress(written: int) -> Any:
        if next(steps) == 20:
            raise trouble

    with pytest.raises(raised, match=text):
        checkpoints.write("tiny", tmp_path / "model", progress=progress)
    assert list(tmp_path.iterdir()) == []


def test_import_needs_neither_torch_nor_numpy() -> None:
    import subprocess

    code = "import sys, gdsload.synthetic.checkpoints; print({'torch', 'numpy'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
