"""Weights are read while transformers still imports and builds the empty model."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import transformers
from transformers.integrations import deepspeed

import gdsload
from gdsload import events
from gdsload.checkpoint import checkpoint as checkpoint_module
from gdsload.checkpoint.header import header_bytes
from gdsload.errors import StallError
from gdsload.integrations.transformers import speculative_prefetch
from gdsload.integrations.transformers.model_reader import Options
from gdsload.loading.settings import ReadSettings
from gdsload.memory import page_cache
from gdsload.readahead import prefetch as readahead_prefetch
from gdsload.readahead.prefetch import prefetches
from storage import make_cold


@pytest.fixture
def cold(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that is not in the page cache, and a head start that takes small ones too."""
    monkeypatch.setattr(speculative_prefetch, "LEAST_PREFETCH_BYTES", 0)
    copy = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    for file in copy.glob("*.safetensors"):
        make_cold(file)
    return copy


def is_prefetched(source: Path, cache: str = "direct", cls: Any = None, **kwargs: Any) -> bool:
    """Direct, because the headers of so small a file bring half of it into the page cache."""
    checkpoint = speculative_prefetch._open(source, Options(ReadSettings(cache=cache)), kwargs)
    if checkpoint is None:
        return False
    with checkpoint:
        return not speculative_prefetch._is_unfit(source, cls, checkpoint, kwargs)


def test_weights_that_are_cast_are_not_prefetched(cold: Path) -> None:
    assert is_prefetched(cold, dtype="auto")
    assert is_prefetched(cold, dtype="bfloat16")
    assert not is_prefetched(cold, torch_dtype=torch.float16)


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"dtype": "auto"}, {"dtype": torch.bfloat16}, {"dtype": None, "torch_dtype": "float32"}],
    ids=str,
)
def test_prefetch_foresees_the_dtype_that_transformers_chooses(
    cold: Path, kwargs: dict[str, Any]
) -> None:
    file = cold / "config.json"
    facts = json.loads(file.read_text())
    for named in ("bfloat16", "float32", None):
        facts["dtype"] = facts["torch_dtype"] = named
        file.write_text(json.dumps(facts))
        whole = is_prefetched(cold, **kwargs)
        config = transformers.AutoConfig.from_pretrained(cold)
        assert is_prefetched(cold, config=config, **kwargs) == whole
        model = transformers.AutoModelForCausalLM.from_pretrained(cold, **kwargs)
        assert (model.dtype == torch.bfloat16) == whole


def test_model_claims_the_prefetch_and_parses_each_header_once(
    cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gdsload.Checkpoint.open(cold) as checkpoint:
        total = checkpoint.total_bytes
    started: list[gdsload.Checkpoint] = []
    parsed: list[str] = []
    real, parse = speculative_prefetch.prefetch, checkpoint_module.parse_header

    def counted(text: bytes, size: int, *, path: str, shard: int) -> Any:
        parsed.append(path)
        return parse(text, size, path=path, shard=shard)

    monkeypatch.setattr(checkpoint_module, "parse_header", counted)

    def watched(source: Any, **named: Any) -> Any:
        started.append(source)
        return real(source, **named)

    monkeypatch.setattr(speculative_prefetch, "prefetch", watched)
    with gdsload.accelerated(cache="direct"):
        model = gdsload.from_pretrained(cold, dtype="auto")
    report = gdsload.last_report()
    assert len(started) == 1
    assert len(set(parsed)) == len(list(cold.glob("*.safetensors")))
    if transformers.__version__[0] > "4":  # 4.57 opens the files again, one by one
        assert len(parsed) == len(set(parsed))
    assert "prefetched" not in report.paths, "the report has the I/O path of the bytes"
    assert total <= sum(report.paths.values()) <= 2 * total
    assert report.depth > 0
    assert report.requests > 0
    assert prefetches() == []
    stock = transformers.AutoModelForCausalLM.from_pretrained(cold, dtype="auto").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stock[name]), name


@pytest.fixture
def larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cold checkpoint of 40 MB: its headers bring little of it into the page cache."""
    monkeypatch.setattr(speculative_prefetch, "LEAST_PREFETCH_BYTES", 0)
    small = {"num_hidden_layers": 20, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 256}
    config = transformers.LlamaConfig(**small, **sizes, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "larger")
    make_cold(tmp_path / "larger" / "model.safetensors")
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


def test_only_models_that_want_all_weights_have_a_head_start(cold: Path) -> None:
    class Wrapper(transformers.Qwen3ForCausalLM):
        pass

    words = {"dtype": "auto"}
    for cls in (transformers.AutoModelForCausalLM, transformers.Qwen3ForCausalLM, Wrapper):
        assert is_prefetched(cold, cls=cls, **words)
    assert is_prefetched(cold, cls=transformers.AutoModel, **words)
    for cls in (transformers.T5EncoderModel, transformers.AutoModelForTextEncoding):
        assert not is_prefetched(cold, cls=cls, **words)
    assert not is_prefetched(cold, num_hidden_layers=1, **words)
    config = transformers.AutoConfig.from_pretrained(cold)
    assert is_prefetched(cold, config=config, **words)
    config.num_hidden_layers = 1
    assert not is_prefetched(cold, config=config, **words)


def test_model_inside_another_load_is_read_itself(
    cold: Path, larger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrapper(transformers.Qwen3ForCausalLM):
        @classmethod
        def from_pretrained(cls, path: Any, **words: Any) -> Any:
            gdsload.from_pretrained(larger, dtype="auto")
            return super().from_pretrained(path, **words)

    started: list[str] = []
    real = speculative_prefetch.prefetch

    def watched(source: Any, **named: Any) -> Any:
        started.append(Path(source.source).parent.name)
        return real(source, **named)

    monkeypatch.setattr(speculative_prefetch, "prefetch", watched)
    # The outer one has no head start: it casts.
    gdsload.from_pretrained(cold, cls=Wrapper, dtype="float16")
    assert started == ["larger"]


def test_quantized_checkpoint_is_not_prefetched(cold: Path) -> None:
    """It may be for a GPU that nobody named."""
    file = cold / "config.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "quantization_config": {"quant_method": "bitsandbytes"}}))
    assert not is_prefetched(cold, dtype="auto")


def test_warm_checkpoint_is_not_prefetched(cold: Path) -> None:
    for file in cold.glob("*.safetensors"):
        file.read_bytes()
    assert not is_prefetched(cold, cache="auto")
    assert is_prefetched(cold, dtype="auto")


@pytest.mark.parametrize(
    "kwargs",
    [{"device_map": "auto"}, {"use_safetensors": False}, {"gguf_file": "x"}, {"tp_plan": "auto"}],
    ids=str,
)
def test_unknown_arguments_prevent_the_prefetch(cold: Path, kwargs: dict[str, Any]) -> None:
    assert not is_prefetched(cold, dtype="auto", **kwargs)


def test_nothing_is_prefetched_to_the_host_that_is_wanted_elsewhere_or_read_already(
    cold: Path,
) -> None:
    with torch.device("meta"):
        assert not is_prefetched(cold, dtype="auto")
    with gdsload.prefetch(cold, cache="direct"):
        assert not is_prefetched(cold, dtype="auto")
    assert is_prefetched(cold, dtype="auto")


def test_failure_of_the_prefetch_is_in_the_report(
    cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise gdsload.PlacementError("no room")

    monkeypatch.setattr(readahead_prefetch, "byte_ranges_of", refuse)
    gdsload.from_pretrained(cold, dtype="auto")
    assert "no room" in gdsload.last_report().refusals["prefetch"]


def test_small_or_missing_models_are_not_prefetched(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_prefetched(tmp_path / "nothing", dtype="auto")
    monkeypatch.setattr(speculative_prefetch, "LEAST_PREFETCH_BYTES", 1 << 30)
    assert not is_prefetched(cold, dtype="auto")


@pytest.mark.parametrize(("nbytes", "expected"), [(256 << 20, True), (255 << 20, False)])
def test_head_start_is_for_at_least_256_mib(tmp_path: Path, nbytes: int, expected: bool) -> None:
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(header_bytes([("a", "U8", [nbytes], nbytes)]))
        file.truncate(file.tell() + nbytes)
    assert is_prefetched(tmp_path, dtype="auto") is expected


@pytest.mark.parametrize("name", ["locate", "_is_warm"])
def test_storage_that_hangs_before_the_prefetch_is_a_stall_error(
    cold: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    answered = threading.Event()
    real = getattr(speculative_prefetch, name)

    def hang(*args: Any, **words: Any) -> Any:
        answered.wait(10)
        return real(*args, **words)

    monkeypatch.setattr(speculative_prefetch, name, hang)
    try:
        with pytest.raises(StallError, match=r"the storage has not answered for 0\.2 s") as raised:
            gdsload.from_pretrained(cold, dtype="auto", stall_seconds=0.2)
        assert not answered.is_set()
    finally:
        answered.set()
    assert raised.value.path == str(cold)


@pytest.mark.parametrize(
    "options",
    [
        Options(ReadSettings(cache="direct", verify="checksum")),
        Options(ReadSettings(cache="direct"), group=object()),
    ],
    ids=["verify", "group"],
)
def test_weights_that_are_compared_or_read_by_several_ranks_are_not_prefetched(
    cold: Path, options: Options
) -> None:
    assert is_prefetched(cold, dtype="auto")
    assert speculative_prefetch._open(cold, options, {"dtype": "auto"}) is None


def test_weights_that_fsdp_or_zero_3_distribute_are_not_prefetched(
    cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        assert is_prefetched(cold, dtype="auto"), "each rank loads"
        patch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "1")
        assert not is_prefetched(cold, dtype="auto")
    assert is_prefetched(cold, dtype="auto")
    monkeypatch.setattr(deepspeed, "is_deepspeed_zero3_enabled", lambda: True)
    assert not is_prefetched(cold, dtype="auto")


def test_failed_load_ends_the_prefetch(cold: Path) -> None:
    started: list[Any] = []

    class Broken(transformers.Qwen3ForCausalLM):
        def __init__(self, config: Any) -> None:
            started.extend(prefetches())
            raise RuntimeError("no model")

    with gdsload.accelerated(cache="direct"), pytest.raises(RuntimeError, match="no model"):
        gdsload.from_pretrained(cold, cls=Broken, dtype="auto")
    assert len(started) == 1
    assert prefetches() == []


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter_model.safetensors"])
def test_files_that_transformers_does_not_load_are_not_prefetched(cold: Path, name: str) -> None:
    (cold / "model.safetensors.index.json").unlink()
    for file in cold.glob("*.safetensors"):
        file.rename(cold / name)  # the last one
    assert not is_prefetched(cold, dtype="auto")


def test_model_beside_an_adapter_is_not_prefetched(cold: Path) -> None:
    (cold / "adapter_config.json").write_text("{}")
    assert not is_prefetched(cold, dtype="auto")


def test_weights_that_the_config_names_are_not_prefetched(cold: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(cold)
    assert is_prefetched(cold, dtype="auto", config=config)
    config.transformers_weights = "a"
    assert not is_prefetched(cold, dtype="auto", config=config)


def test_files_that_may_not_be_mapped_are_not_prefetched(cold: Path) -> None:
    assert not is_prefetched(cold, dtype="auto", disable_mmap=True)
    assert is_prefetched(cold, dtype="auto", disable_mmap=False)


def test_events_name_the_paths_of_the_report(cold: Path) -> None:
    seen: list[events.Event] = []
    gdsload.from_pretrained(cold, dtype="auto", on_event=seen.append)
    used = [event.path for event in seen if isinstance(event, events.PathUsed)]
    report = gdsload.last_report()
    assert any(span.track == "head start" for span in report.spans)
    assert sorted(used) == sorted(report.paths) != []


def test_reads_of_a_load_that_fails_are_in_its_report(cold: Path) -> None:
    class Broken(transformers.Qwen3ForCausalLM):
        @classmethod
        def from_pretrained(cls, path: Any, **_: Any) -> Any:
            (ahead,) = prefetches()
            assert ahead.wait(60.0)
            raise ValueError("no model")

    with gdsload.Checkpoint.open(cold) as checkpoint:
        total = checkpoint.total_bytes
    with gdsload.accelerated(cache="direct"), pytest.raises(ValueError, match="no model"):
        gdsload.from_pretrained(cold, cls=Broken, dtype="auto")
    report = gdsload.last_report()
    assert report.failure == "ValueError: no model"
    assert report.backend == "posix"
    assert report.read_bytes == sum(report.paths.values()) >= total
    assert any(span.track == "head start" for span in report.spans)
