"""Quantized checkpoints, and quantizing while loading: the same through gdsload as without it.

Each quantizer that its package lets run on a CPU. `sh scripts/test-quantizers.sh` makes an
environment with those packages that `make setup` leaves out.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import gdsload
import tinymodels
from equal import NEW, both, require_same

needs_new = pytest.mark.skipif(not NEW, reason="transformers 4.57 does not do this on the CPU")
# Large enough for groups of 32 and for kernels that pack eight numbers into one.
SIZES = {
    **tinymodels.TEXT,
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_key_value_heads": 4,
}
Change = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is not quantized."""
    path = tmp_path_factory.mktemp("plain")
    llama().to(torch.bfloat16).save_pretrained(path, max_shard_size="200KB")
    return path


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts that is not quantized."""
    path = tmp_path_factory.mktemp("experts")
    sizes = {**tinymodels.MOE, **SIZES, "moe_intermediate_size": 64}
    config = transformers.AutoConfig.for_model("qwen3_moe", **sizes)
    torch.manual_seed(0)
    model = tinymodels.perturbed(transformers.AutoModelForCausalLM.from_config(config))
    model.save_pretrained(path, max_shard_size="200KB")
    return path


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    return tinymodels.perturbed(transformers.LlamaForCausalLM(config)).eval()


def needs(package: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(package, reason=f"{package} is not installed")


def quantized(path: Path, model: Any, config: dict[str, Any], change: Change) -> None:
    """Saves a model whose tensors `change` has made into those of a quantized checkpoint."""
    model.save_pretrained(path)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        tensors.update(change(name, tensor))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    facts = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**facts, "quantization_config": config}))


@needs_new
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_fp8_in_blocks_equals_transformers(name: str, tmp_path: Path) -> None:
    def change(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if tensor.ndim != 2 or not key.endswith("_proj.weight"):
            return {key: tensor}
        scales = torch.rand(-(-tensor.shape[0] // 16), -(-tensor.shape[1] // 16)) + 0.5
        return {key: tensor.to(torch.float8_e4m3fn), f"{key}_scale_inv": scales}

    config = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    quantized(tmp_path, tinymodels.build(name), config, change)
    stock, ours = both(tmp_path)
    require_same(stock, ours)
    assert gdsload.last_report().fates["convert"] > 0


@needs_new
def test_mxfp4_equals_transformers(tmp_path: Path) -> None:
    def change(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {key: tensor.to(torch.bfloat16)}
        experts, rows, columns = tensor.shape[0], tensor.shape[2], tensor.shape[1]
        shape = (experts, rows, columns // 32)
        return {
            f"{key}_blocks": torch.randint(0, 255, (*shape, 16), dtype=torch.uint8),
            f"{key}_scales": torch.randint(120, 130, shape, dtype=torch.uint8),
        }

    torch.manual_seed(0)
    sizes = {**tinymodels.MOE, "intermediate_size": 64, "sliding_window": 16}
    config = transformers.AutoConfig.for_model("gpt_oss", **sizes)
    model = tinymodels.perturbed(transformers.GptOssForCausalLM(config))
    quantized(tmp_path, model, {"quant_method": "mxfp4"}, change)
    stock, ours = both(tmp_path)
    require_same(stock, ours)


def test_quantizer_that_refuses_raises(plain: Path) -> None:
    """The same error as without gdsload, and the next load is as if it had not been."""
    found = []
    for load in (transformers.AutoModelForCausalLM.from_pretrained, gdsload.from_pretrained):
        wanted = transformers.FineGrainedFP8Config(weight_block_size=(32, 32))
        with pytest.raises((RuntimeError, ValueError)) as error:
            load(plain, quantization_config=wanted, device_map="disk")
        found.append((type(error.value), str(error.value)))
    assert found[0] == found[1]
    require_same(*both(plain))


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
BY_TOKEN = {"symmetric": True, "dynamic": True, "strategy": "token", "num_bits": 8}
COMPRESSED: dict[str, dict[str, Any]] = {
    "pack-quantized": {"weights": INT4},
    "int-quantized": {"weights": INT8, "input_activations": {**BY_TOKEN, "type": "int"}},
    "float-quantized": {"weights": FP8, "input_activations": {**BY_TOKEN, "type": "float"}},
}


@needs_new
@pytest.mark.parametrize("is_kept", [True, False], ids=["compressed", "decompressed"])
@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_equal_transformers(name: str, is_kept: bool, tmp_path: Path) -> None:
    needs("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = llama()
    group = {"targets": ["Linear"], **COMPRESSED[name]}
    wanted = QuantizationConfig(
        config_groups={"group_0": group},
        format=name,
        quantization_status="compressed",
        quant_method="compressed-tensors",
        ignore=["lm_head"],
    )
    apply_quantization_config(model, wanted)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data.copy_(torch.rand_like(module.weight_scale) * 0.01 + 0.01)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=name)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    words: dict[str, Any] = {}
    if not is_kept:
        words["quantization_config"] = transformers.CompressedTensorsConfig(run_compressed=False)
    stock, ours = both(tmp_path, **words)
    require_same(stock, ours)
    kept = gdsload.last_report().fates["keep"]
    assert kept > 0 if is_kept else kept == 0


@needs_new
@pytest.mark.parametrize("which", ["plain", "experts"])
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_equals_transformers(
    bits: int, which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    needs("bitsandbytes")
    if bits == 4:
        wanted = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
    else:
        wanted = transformers.BitsAndBytesConfig(load_in_8bit=True)
    source = request.getfixturevalue(which)
    stock, ours = both(source, quantization_config=copy.deepcopy(wanted), device_map="cpu")
    require_same(stock, ours)
    if which == "plain":
        ours.save_pretrained(tmp_path)
        require_same(*both(tmp_path))
        assert {torch.uint8, torch.int8} & {t.dtype for t in ours.state_dict().values()}


@needs_new
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao_equals_transformers(kind: str, plain: Path, tmp_path: Path) -> None:
    torchao = needs("torchao")
    wanted = transformers.TorchAoConfig(getattr(torchao.quantization, kind)())
    stock, ours = both(plain, quantization_config=wanted)
    require_same(stock, ours)
    ours.save_pretrained(tmp_path)
    require_same(*both(tmp_path))


def packed(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


@needs_new
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_gptq_and_awq_equal_transformers(method: str, tmp_path: Path) -> None:
    """Eight numbers of four bits in one, along the rows or along the columns."""
    needs("gptqmodel")
    needs("optimum")

    def change(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if not key.endswith("_proj.weight"):
            return {key: tensor.half()}
        (outputs, inputs), name = tensor.shape, key.removesuffix(".weight")
        groups = inputs // 32
        scales = {f"{name}.scales": (torch.rand(groups, outputs) * 0.01 + 0.001).half()}
        if method == "awq":
            return {
                f"{name}.qweight": packed((inputs, outputs // 8)),
                f"{name}.qzeros": packed((groups, outputs // 8)),
                **scales,
            }
        order = torch.arange(inputs, dtype=torch.int32) // 32
        return {
            f"{name}.qweight": packed((inputs // 8, outputs)),
            f"{name}.g_idx": order,
            f"{name}.qzeros": torch.full((groups, outputs // 8), 0x77777777).int(),
            **scales,
        }

    config = {"quant_method": method, "bits": 4, "group_size": 32}
    config |= (
        {"zero_point": True, "version": "gemm"}
        if method == "awq"
        else {"desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    )
    torch.manual_seed(0)
    quantized(tmp_path, llama(), config, change)
    stock, ours = both(tmp_path)
    require_same(stock, ours)
    assert gdsload.last_report().fates["keep"] > 14
