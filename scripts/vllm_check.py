"""Checks the load format "gdsload" against vLLM's default loader; `test-vllm.sh` runs it.

As a test module it compares the weights in each rank and the answers, and counts the bytes that
each rank reads. As a program it measures a checkpoint:

    python scripts/vllm_check.py DIRECTORY [--ranks N ...] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import pytest

from gdsload.memory.page_cache import evict

PATIENCE_SECONDS = 900  # for one engine; it starts in 20 s on an idle machine
PROMPT = list(range(1, 17))
SIZES = {
    "vocab_size": 256, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
TENSOR_PARALLEL = {"tensor_parallel_size": 2}
EXPERT_PARALLEL = {
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_ep_weight_filter": True,
}

# The loaders: a load format and its options. Small windows: a load has several.
Loader = tuple[str, dict[str, Any]]
STOCK = "auto"
ALONE, SHARED = "gdsload", "gdsload, distributed"
LOADERS: dict[str, Loader] = {
    STOCK: ("auto", {}),
    ALONE: ("gdsload", {"window_bytes": 4 << 20, "enable_weights_track": True}),
    SHARED: ("gdsload", {"window_bytes": 4 << 20, "distributed": True}),
}


class Load(NamedTuple):
    """What an engine holds and says after a load, and what the load took in each rank."""

    step: str
    loader: str
    weights: dict[str, str]
    answer: list[tuple[int, float]] | None
    costs: list[dict[str, int]]

    def bytes(self, key: str) -> list[int]:
        """A number of each rank; empty if the loader does not report it."""
        return [rank[key] for rank in self.costs if key in rank]


# Models


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


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return two_models(tmp_path_factory.mktemp("dense"), "dense")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return two_models(tmp_path_factory.mktemp("experts"), "experts")


def sizes(directory: Path) -> dict[str, int]:
    """The bytes of each tensor."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        for name, info in header.items():
            begin, end = info["data_offsets"]
            found[name] = end - begin
    return found


# Engines


def engine(directory: Path, loader: Loader, **more: Any) -> Any:
    if more.get("tensor_parallel_size", 1) > 1:
        # Else vLLM refuses two ranks on the processors of one NUMA node.
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
    from vllm import LLM

    load_format, options = loader
    return LLM(
        str(directory),
        load_format=load_format,
        model_loader_extra_config=options,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=2,
        disable_log_stats=True,
        worker_cls="vllm_worker.MeasuredWorker",
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


def weights(llm: Any) -> dict[str, str]:
    """The checksum of each parameter in each rank."""
    checksums = llm.collective_rpc("compute_weight_checksums")
    return {name: checksum for rank in checksums for name, checksum in rank.items()}


def cold(directory: Path) -> None:
    """Drops the checkpoint from the page cache. Pages that were just read may stay for a moment."""
    for path in directory.glob("*.safetensors"):
        tries = 20
        while left := evict(path):
            tries -= 1
            if not tries:
                raise RuntimeError(f"{path}: {left:,} bytes stay in the page cache")
            time.sleep(0.1)


def _served(models: tuple[Path, Path], loaders: list[str], answers: bool, more: Any) -> list[Load]:
    """Starts an engine with the first loader; then each loads the same weights after a sleep, and
    those of the other model.

    vLLM for the CPU does not free memory in sleep: the weights are overwritten instead.
    """
    directory, other = models
    loads = []

    def loaded(step: str, loader: str) -> None:
        llm.reset_prefix_cache()
        said = answer(llm) if answers else None
        loads.append(Load(step, loader, weights(llm), said, llm.collective_rpc("load_cost")))

    cold(directory)
    llm = engine(directory, LOADERS[loaders[0]], **more)
    loaded("start", loaders[0])
    for step, path, given in (
        ("wake-up", directory, {}),
        ("new weights", other, {"weights_path": str(other)}),
    ):
        for loader in loaders:
            load_format, options = LOADERS[loader]
            config = {"load_format": load_format, "model_loader_extra_config": options}
            llm.collective_rpc("update_config", args=({"load_config": config},))
            llm.sleep(level=2)
            llm.collective_rpc("reset_weights")
            assert weights(llm) != loads[-1].weights
            llm.wake_up(tags=["weights"])
            cold(path)
            llm.collective_rpc("reload_weights", kwargs=given)
            llm.wake_up(tags=["kv_cache"])
            llm.wake_up(tags=["scheduling"])
            loaded(step, loader)
    return loads


def served(
    models: tuple[Path, Path], *loaders: str, answers: bool = True, **more: Any
) -> list[Load]:
    """The loads of one engine. Fails if two loaders do not give the same weights and answers."""
    loads = in_process(_served, models, list(loaders), answers, more)
    if isinstance(loads, str):
        pytest.fail(f"{loaders} {more}: {loads}")
    note(models, more, loads)
    by_step = {load.step: load for load in loads}
    assert by_step["wake-up"].weights != by_step["new weights"].weights
    for load in loads:
        assert_same(load, by_step[load.step])
    return loads  # type: ignore[no-any-return]


def assert_same(load: Load, other: Load) -> None:
    """Two loads of the same weights, of one engine or of two."""
    which = (load.step, load.loader, other.loader)
    assert load.weights == other.weights, which
    assert load.answer == other.answer, which


def _in_process(connection: Any, function: Any, arguments: Any) -> None:
    try:
        connection.send(function(*arguments))
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")
        raise


def in_process(function: Any, *arguments: Any) -> Any:
    """What `function` returns in a process of its own, as a text if it fails or does not end."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_in_process, args=(there, function, arguments))
    process.start()
    there.close()
    try:
        if not here.poll(PATIENCE_SECONDS):
            return f"no end after {PATIENCE_SECONDS} s"
        return here.recv()
    except EOFError:
        return "its process died"
    finally:
        engine_processes = psutil.Process(process.pid).children(recursive=True)
        process.join(timeout=30)
        for each in (process, *engine_processes):  # one that has failed to start may never end
            with suppress(psutil.NoSuchProcess):
                each.kill()


# What was read


def note(models: tuple[Path, Path], more: Any, loads: list[Load]) -> None:
    """Appends the bytes that each rank read, over those of the checkpoint, to the table in the file
    that VLLM_CHECK_TABLE names."""
    model = models[0].parent.name.rstrip("0123456789")
    if len(loads[0].costs) > 1:
        model += ", expert parallel" if "enable_expert_parallel" in more else ", tensor parallel"
    whole = sum(sizes(models[0]).values())
    with open(os.environ.get("VLLM_CHECK_TABLE", os.devnull), "a") as file:
        for load in loads:
            cells = [model, load.loader, load.step]
            for key in ("disk_bytes", "read_bytes", "received_bytes"):
                cells.append(", ".join(f"{n / whole:.3f}" for n in load.bytes(key)))
            cells.append(f"{sum(load.bytes('disk_bytes')) / whole:.3f}")
            print("| " + " | ".join(cells) + " |", file=file)


def assert_read(loads: list[Load], wanted: list[int], whole: int) -> None:
    """`wanted`: of each rank. Ranks that share the reads read each byte once. At the ends of shares
    two of them read a block of direct I/O."""
    for load in loads:
        if load.loader != STOCK:
            assert load.bytes("wanted_bytes") == wanted, (load.step, load.loader)
        if load.loader == SHARED:
            assert 1.0 <= sum(load.bytes("read_bytes")) / whole < 1.02, load.step


# Tests


def test_unknown_option_is_refused_with_the_known_ones() -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = LoadConfig(load_format="gdsload", model_loader_extra_config={"windows": 1})
    with pytest.raises(ValueError, match="unknown options: windows; gdsload knows device"):
        get_model_loader(config)


def test_expert_parallel_engine_reads_the_experts_of_each_rank(experts: tuple[Path, Path]) -> None:
    """Without answers: the kernels of the CPU compute no expert parallelism."""
    tensors = sizes(experts[0])
    whole = sum(tensors.values())
    of_experts = sum(size for name, size in tensors.items() if ".experts." in name)
    assert of_experts > whole / 2
    stock = served(experts, STOCK, answers=False, **EXPERT_PARALLEL)
    loads = served(experts, SHARED, ALONE, STOCK, answers=False, **EXPERT_PARALLEL)
    assert_same(loads[0], stock[0])
    assert_read(loads, [whole - of_experts // 2] * 2, whole)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_tensor_parallel_engine_is_as_with_the_default_loader(
    kind: str, request: pytest.FixtureRequest
) -> None:
    models = request.getfixturevalue(kind)
    whole = sum(sizes(models[0]).values())
    stock = served(models, STOCK, **TENSOR_PARALLEL)
    loads = served(models, SHARED, ALONE, STOCK, **TENSOR_PARALLEL)
    assert_same(loads[0], stock[0])
    assert_read(loads, [whole, whole], whole)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_engine_is_as_with_the_default_loader(kind: str, request: pytest.FixtureRequest) -> None:
    models = request.getfixturevalue(kind)
    whole = sum(sizes(models[0]).values())
    stock = served(models, STOCK)
    assert stock[0].answer != stock[-1].answer
    loads = served(models, ALONE, STOCK)
    assert_same(loads[0], stock[0])
    assert_read(loads, [whole], whole)


# The program

# What is measured: with the sizes that gdsload chooses.
MEASURED: dict[str, Loader] = {
    STOCK: ("auto", {}),
    ALONE: ("gdsload", {}),
    SHARED: ("gdsload", {"distributed": True}),
    "runai_streamer": ("runai_streamer", {}),
    "fastsafetensors": ("fastsafetensors", {}),
}


def _load(directory: Path, loader: Loader, ranks: int) -> Any:
    return engine(directory, loader, tensor_parallel_size=ranks).collective_rpc("load_cost")


def measure(directory: Path, loader: str, ranks: int) -> dict[str, Any]:
    """The slowest and the largest rank, and what all ranks read from the disk, cold."""
    cold(directory)
    found = in_process(_load, directory, MEASURED[loader], ranks)
    case = {"loader": loader, "ranks": ranks}
    if isinstance(found, str):
        return {**case, "failed": found}
    return {
        **case,
        "seconds": round(max(rank["seconds"] for rank in found), 2),
        "peak_rss_bytes": max(rank["peak_rss_bytes"] for rank in found),
        "disk_bytes": sum(rank["disk_bytes"] for rank in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the load formats, cold.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    directory = asked.directory.resolve()
    whole = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    cases: dict[tuple[int, str], list[dict[str, Any]]] = {
        (ranks, loader): []
        for ranks in asked.ranks
        for loader in MEASURED
        if ranks > 1 or loader != SHARED
    }
    for _ in range(asked.rounds):
        for (ranks, loader), found in cases.items():
            if found and "failed" in found[-1]:
                continue
            found.append(measure(directory, loader, ranks))
            print(json.dumps(found[-1]), flush=True)
    print("\n| ranks | loader | s, median (least-most) | peak memory of a rank, GB | bytes read |")
    print("|---|---|---|---|---|")
    for (ranks, loader), found in cases.items():
        done = [case for case in found if "failed" not in case]
        if not done:
            print(f"| {ranks} | {loader} | failed: {found[-1]['failed'][:80]} | | |")
            continue
        seconds = [case["seconds"] for case in done]
        peak = max(case["peak_rss_bytes"] for case in done) / 1e9
        read = median(case["disk_bytes"] for case in done) / whole
        spread = f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
        print(f"| {ranks} | {loader} | {spread} | {peak:.1f} | {read:.2f} |")


if __name__ == "__main__":
    main()
