"""The first layers are read while transformers still builds the empty model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import transformers

import gdsload
from gdsload.checkpoint import checkpoint as checkpoint_module
from gdsload.integrations.transformers import speculative_prefetch
from gdsload.integrations.transformers.model_reader import Options
from gdsload.loading.settings import ReadSettings
from gdsload.memory import page_cache
from gdsload.readahead.prefetch import prefetches


@pytest.fixture
def cold(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that is not in the page cache, and a head start that takes small ones too."""
    monkeypatch.setattr(speculative_prefetch, "SMALL_BYTES", 0)
    copy = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    for file in copy.glob("*.safetensors"):
        if page_cache.evict(file):
            pytest.skip(f"{file}: its pages cannot be evicted (a file system in memory)")
    return copy


def first_names(source: Path, cache: str = "direct", **kwargs: Any) -> list[str]:
    """Direct, because the headers of so small a file bring half of it into the page cache."""
    checkpoint = speculative_prefetch._open(source, Options(ReadSettings(cache=cache)), kwargs)
    if checkpoint is None:
        return []
    with checkpoint:
        return speculative_prefetch._first_names(checkpoint, kwargs)


def test_prefetch_takes_first_layers_up_to_the_limit(
    cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gdsload.Checkpoint.open(cold) as checkpoint:
        sizes = {name: info.nbytes for name, info in checkpoint.tensors.items()}
    assert set(first_names(cold)) == sizes.keys()
    bound = sum(sizes.values()) // 2
    monkeypatch.setattr(speculative_prefetch, "LIMIT_BYTES", bound)
    names = first_names(cold)
    assert names[0] == "model.embed_tokens.weight"
    assert 0 < sum(sizes[name] for name in names) <= bound


def test_model_claims_the_prefetch_and_parses_each_header_once(
    cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gdsload.Checkpoint.open(cold) as checkpoint:
        total = checkpoint.total_bytes
    monkeypatch.setattr(speculative_prefetch, "LIMIT_BYTES", total // 2)
    started: list[list[str]] = []
    parsed: list[str] = []
    real, parse = speculative_prefetch.prefetch, checkpoint_module.parse_header

    def counted(text: bytes, size: int, *, path: str, shard: int) -> Any:
        parsed.append(path)
        return parse(text, size, path=path, shard=shard)

    monkeypatch.setattr(checkpoint_module, "parse_header", counted)

    def watched(source: Any, **named: Any) -> Any:
        started.append(named["names"])
        return real(source, **named)

    monkeypatch.setattr(speculative_prefetch, "prefetch", watched)
    with gdsload.accelerated(cache="direct"):
        model = gdsload.from_pretrained(cold, dtype="auto")
    report = gdsload.last_report()
    assert len(started) == 1 and started[0]
    assert len(set(parsed)) == len(list(cold.glob("*.safetensors")))
    if transformers.__version__[0] > "4":  # 4.57 opens the files again, one by one
        assert len(parsed) == len(set(parsed))
    assert "prefetched" not in report.paths, "the report has the I/O path of the bytes"
    assert total <= sum(report.paths.values()) <= 2 * total
    assert report.requests >= 2
    assert prefetches() == []
    stock = transformers.AutoModelForCausalLM.from_pretrained(cold, dtype="auto").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stock[name]), name


@pytest.fixture
def larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cold checkpoint of 40 MB: its headers bring little of it into the page cache."""
    monkeypatch.setattr(speculative_prefetch, "SMALL_BYTES", 0)
    monkeypatch.setattr(speculative_prefetch, "LIMIT_BYTES", 8 << 20)
    small = {"num_hidden_layers": 20, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 256}
    config = transformers.LlamaConfig(**small, **sizes, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "larger")
    if page_cache.evict(tmp_path / "larger" / "model.safetensors"):
        pytest.skip(f"{tmp_path}: its pages cannot be evicted (a file system in memory)")
    return tmp_path / "larger"


def io_modes_of_a_start(source: Path, page_cache: str = "auto") -> set[str]:
    """The I/O modes of a load whose weights are right."""
    model = gdsload.from_pretrained(source, dtype="auto", page_cache=page_cache)
    report = gdsload.last_report()
    with safetensors.safe_open(source / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stored[name]), name
    return {path.rpartition("/")[2] for path, nbytes in report.paths.items() if nbytes}


def test_prefetch_and_load_decide_together_whether_the_page_cache_is_filled(larger: Path) -> None:
    assert io_modes_of_a_start(larger) == {"mapped"}
    found = gdsload.last_report().page_cache
    assert found.startswith("filled: ")
    assert "were in it" not in found  # what the prefetch read does not count
    assert not page_cache.evict(larger / "model.safetensors")
    assert io_modes_of_a_start(larger, page_cache="keep") <= {"direct", "direct bounced"}


def test_warm_checkpoint_is_not_prefetched(cold: Path) -> None:
    for file in cold.glob("*.safetensors"):
        file.read_bytes()
    assert first_names(cold, cache="auto") == []
    assert first_names(cold) != []


@pytest.mark.parametrize(
    "kwargs",
    [{"device_map": "auto"}, {"use_safetensors": False}, {"gguf_file": "x"}, {"tp_plan": "auto"}],
    ids=str,
)
def test_unknown_arguments_prevent_the_prefetch(cold: Path, kwargs: dict[str, Any]) -> None:
    assert first_names(cold, **kwargs) == []


def test_small_or_missing_models_are_not_prefetched(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_names(tmp_path / "nothing") == []
    monkeypatch.setattr(speculative_prefetch, "SMALL_BYTES", 1 << 30)
    assert first_names(cold) == []


def test_failed_load_ends_the_prefetch(cold: Path) -> None:
    (cold / "config.json").write_text("{")
    with pytest.raises((OSError, ValueError)):
        gdsload.from_pretrained(cold, cls=transformers.AutoModelForCausalLM)
    assert prefetches() == []
