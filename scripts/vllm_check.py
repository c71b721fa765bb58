"""Checks the load format "gdsload" against vLLM's default loader; `test-vllm.sh` runs it.

As a test module it compares what tiny models answer. As a program it measures a checkpoint:

    python scripts/vllm_check.py DIRECTORY [--ranks N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

PROMPT = list(range(1, 17))
SIZES = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def make_model(directory: Path, kind: str, shards: int, seed: int = 0) -> Path:
    """A checkpoint with random weights."""
    import torch
    import transformers

    torch.manual_seed(seed)
    if kind == "dense":
        config: Any = transformers.Qwen3Config(**SIZES, dtype="float32")
        model: Any = transformers.Qwen3ForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, dtype="float32")
        model = transformers.Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(directory, max_shard_size=nbytes // shards + (1 << 20))
    return directory


def two_models(directory: Path, kind: str) -> tuple[Path, Path]:
    """One of two shards, and one of one shard with other weights."""
    model = make_model(directory / "model", kind, shards=2)
    assert len(list(model.glob("*.safetensors"))) >= 2
    return model, make_model(directory / "other", kind, shards=1, seed=1)


def engine(directory: Path, load_format: str, **more: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(directory),
        load_format=load_format,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=2,
        disable_log_stats=True,
        **more,
    )


def answer(llm: Any) -> list[tuple[int, float]]:
    """The tokens that the engine says, with their log-probabilities."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, asked, use_tqdm=False)
    (said,) = output.outputs
    return [
        (token, probs[token].logprob)
        for token, probs in zip(said.token_ids, said.logprobs, strict=True)
    ]


def _serve(
    connection: Any, directory: Path, load_format: str, other: Path | None, more: Any
) -> None:
    """In a process of its own: what the engine answers, and what after loading `other` again."""
    try:
        llm = engine(directory, load_format, **more)
        result = [answer(llm)]
        if other is not None:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
            llm.reset_prefix_cache()
            result.append(answer(llm))
        connection.send(result)
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")
        raise


def served(directory: Path, load_format: str, other: Path | None = None, **more: Any) -> Any:
    return in_process(_serve, directory, load_format, other, more)


def in_process(function: Any, *arguments: Any) -> Any:
    """What `function` sends by the connection that is its first argument."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, *arguments))
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join(timeout=30)
        process.kill()  # an engine that has failed to start may never end


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_engine_answers_as_with_the_default_loader(kind: str, tmp_path: Path) -> None:
    model, other = two_models(tmp_path, kind)
    extra = {"window_bytes": 1 << 20, "cache": "direct", "enable_weights_track": True}
    stock = served(model, "auto", other)
    assert stock[0] != stock[1]
    assert served(model, "gdsload", other, model_loader_extra_config=extra) == stock


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_engine_of_two_ranks_answers_as_with_the_default_loader(kind: str, tmp_path: Path) -> None:
    model, other = two_models(tmp_path, kind)
    stock = served(model, "auto", other, tensor_parallel_size=2)
    for extra in ({}, {"distributed": True, "window_bytes": 1 << 20}):
        assert stock == served(
            *(model, "gdsload", other), tensor_parallel_size=2, model_loader_extra_config=extra
        )


def test_unknown_option_is_refused_with_the_known_ones() -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = LoadConfig(load_format="gdsload", model_loader_extra_config={"windows": 1})
    with pytest.raises(ValueError, match="unknown options: windows; gdsload knows device"):
        get_model_loader(config)


# What is measured: load formats, and options of gdsload.
FORMATS: dict[str, dict[str, Any]] = {
    "auto": {},
    "gdsload": {},
    "runai_streamer": {},
    "fastsafetensors": {},
}


def _load(connection: Any, directory: str, load_format: str, options: Any, ranks: int) -> None:
    """In a process of its own: what `MeasuredWorker` notes in each rank."""
    try:
        if ranks == 1:  # an engine in one process starts sooner
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        llm = engine(
            Path(directory),
            load_format,
            worker_cls="vllm_worker.MeasuredWorker",
            distributed_executor_backend="uni" if ranks == 1 else "mp",
            model_loader_extra_config=options,
            tensor_parallel_size=ranks,
        )
        connection.send(llm.collective_rpc("load_cost"))
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")
        raise


def measure(directory: Path, load_format: str, options: Any, ranks: int) -> dict[str, Any]:
    """The slowest and the largest rank, and what all ranks read from the storage, cold."""
    for path in directory.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found = in_process(_load, str(directory), load_format, options, ranks)
    case = {"load_format": load_format, "options": options, "ranks": ranks}
    if isinstance(found, str):
        return {**case, "failed": found}
    return {
        **case,
        "seconds": round(max(rank["seconds"] for rank in found), 2),
        "peak_rss_bytes": max(rank["peak_rss_bytes"] for rank in found),
        "read_bytes": sum(rank["read_bytes"] for rank in found),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measures the load formats, cold.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    for _ in range(asked.rounds):
        for load_format, options in FORMATS.items():
            case = measure(asked.directory.resolve(), load_format, options, asked.ranks)
            print(json.dumps(case), flush=True)
