"""Checks the load format "gdsload" against vLLM's default loader; `test-vllm.sh` runs it.

As a test module it compares what tiny models answer. As a program it measures a checkpoint:

    python scripts/vllm_check.py DIRECTORY [ROUNDS]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
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
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, directory, load_format, other, more))
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join()


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("shards", [1, 2])
def test_engine_answers_as_with_the_default_loader(kind: str, shards: int, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", kind, shards)
    assert len(list(model.glob("*.safetensors"))) >= shards
    other = make_model(tmp_path / "other", kind, shards, seed=1)
    extra = {"window_bytes": 1 << 20, "cache": "direct", "enable_weights_track": True}
    stock = served(model, "auto", other)
    assert stock[0] != stock[1]
    assert served(model, "gdsload", other, model_loader_extra_config=extra) == stock


def test_engine_of_two_ranks_answers_as_with_the_default_loader(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "dense", 2)
    stock = served(model, "auto", tensor_parallel_size=2)
    assert stock == served(model, "gdsload", tensor_parallel_size=2)


def test_unknown_option_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "dense", 1)
    error = served(model, "gdsload", model_loader_extra_config={"windows": 1})
    assert isinstance(error, str)


FORMATS = ("auto", "gdsload", "runai_streamer", "fastsafetensors")


def load_timed(directory: str, load_format: str) -> None:
    """Prints the seconds of building and loading the model, and the largest memory of the process,
    in which the engine runs."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load, seconds = BaseModelLoader.load_model, []

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        try:
            return load(*args, **kwargs)
        finally:
            seconds.append(time.monotonic() - start)

    BaseModelLoader.load_model = timed
    engine(Path(directory), load_format, distributed_executor_backend="uni")
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print("\n" + json.dumps({"seconds": round(seconds[0], 2), "peak_rss_bytes": peak_bytes}))


def measure(directory: Path, load_format: str) -> dict[str, Any]:
    """What `load_timed` prints in a process of its own, after the files left the page cache."""
    for path in directory.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    code = "import sys, vllm_check; vllm_check.load_timed(*sys.argv[1:])"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(directory), load_format],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=Path(__file__).parent,
        check=False,
    )
    for line in ran.stdout.splitlines():
        if line.startswith('{"seconds"'):
            return {"load_format": load_format, **json.loads(line)}
    errors = [line for line in ran.stderr.splitlines() if "Error" in line] or ["no output"]
    return {"load_format": load_format, "failed": errors[-1][-300:]}


if __name__ == "__main__":
    for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 1):
        for name in FORMATS:
            print(json.dumps(measure(Path(sys.argv[1]).resolve(), name)), flush=True)
