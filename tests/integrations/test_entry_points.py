"""What from_pretrained is asked for besides a model: devices, files, quantizers, ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

import gdsload
import tinymodels
from command import run
from equal import FIRST, IS_SURE, NEW, VERSION, both, require_same
from gdsload.integrations.transformers.model import architecture
from ranks import HERE, ranks

WRITES_DCP = VERSION >= (5, 20)
needs_new = pytest.mark.skipif(not NEW, reason="transformers 4.57 does not do this on the CPU")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.saved("qwen2", tmp_path_factory)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.saved("mixtral", tmp_path_factory)


MAPS: dict[str, Any] = {
    "none": None,
    "cpu": "cpu",
    "device": torch.device("cpu"),
    "auto": "auto",
    "balanced": "balanced",
    "balanced_low_0": "balanced_low_0",
    "sequential": "sequential",
    "whole": {"": "cpu"},
    "parts": {
        "model.embed_tokens": "cpu",
        "model.layers": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
    "disk": {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("which", ["qwen", "mixture"])
def test_device_map_gives_the_model_of_transformers(
    name: str, which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source = request.getfixturevalue(which)
    words = {"offload_folder": str(tmp_path)} if name == "disk" else {}
    stock, ours = both(source, device_map=MAPS[name], **words)
    require_same(stock, ours)


def test_offloaded_tensors_are_not_read(qwen: Path, tmp_path: Path) -> None:
    both(qwen, device_map=MAPS["disk"], offload_folder=str(tmp_path))
    report = gdsload.last_report()
    assert report.fates["skip"] > 0
    with gdsload.Checkpoint.open(qwen) as checkpoint:
        infos = checkpoint.tensors.values()
        assert report.wanted_bytes == sum(i.nbytes for i in infos if "layers.1." not in i.name)


def test_tensors_of_a_url_cannot_be_left_on_disk(qwen: Path, tmp_path: Path) -> None:
    words = {"device_map": MAPS["disk"], "offload_folder": str(tmp_path)}
    with pytest.raises(gdsload.CheckpointError, match="device_map leaves tensors on disk"):
        gdsload.from_pretrained(gdsload.replicas(qwen), **words)


@needs_new
def test_buffer_of_an_offloaded_module_is_verified(tmp_path: Path) -> None:
    """The model keeps it, unless `offload_buffers` leaves it on disk as well."""
    tinymodels.build("resnet").save_pretrained(tmp_path)
    assert run("manifest", tmp_path, "--algorithm", "sha256").exit_code == 0
    parts = {"resnet.embedder": "cpu", "resnet.pooler": "cpu", "classifier": "cpu"}
    words = {"device_map": {**parts, "resnet.encoder": "disk"}, "offload_folder": tmp_path / "off"}
    stock, ours = both(tmp_path, auto=transformers.ResNetForImageClassification, **words)
    require_same(stock, ours)
    path = tmp_path / "model.safetensors"
    with gdsload.Checkpoint.open(path) as checkpoint:
        name = next(n for n in checkpoint.tensors if "encoder" in n and "running_mean" in n)
        offset = checkpoint.info(name).offset
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)
    with pytest.raises(gdsload.IntegrityError, match=name):
        gdsload.from_pretrained(tmp_path, verify="checksum", **words)
    gdsload.from_pretrained(tmp_path, verify="checksum", offload_buffers=True, **words)
    report = gdsload.last_report()
    assert report.verified_bytes == report.wanted_bytes > 0


@needs_new
def test_max_memory_offloads_to_disk(qwen: Path, tmp_path: Path) -> None:
    words = {"device_map": "auto", "max_memory": {"cpu": 40_000}, "offload_folder": str(tmp_path)}
    stock, ours = both(qwen, **words)
    assert any(p.device.type == "meta" for p in ours.parameters())
    require_same(stock, ours)


@needs_new
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("which", ["qwen", "mixture"])
def test_part_on_the_meta_device_is_not_read(
    which: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(which)
    parts = {name: "meta" if place == "disk" else place for name, place in MAPS["disk"].items()}
    stock, ours = both(source, device_map=parts, dtype=dtype)
    assert tinymodels.differences(stock, ours) == []
    report = gdsload.last_report()
    with gdsload.Checkpoint.open(source) as checkpoint:
        infos = checkpoint.tensors.values()
        assert report.wanted_bytes == sum(i.nbytes for i in infos if "layers.1." not in i.name)
        assert report.fates["skip"] == sum("layers.1." in i.name for i in infos)


@needs_new
@pytest.mark.parametrize("which", ["qwen", "mixture"])
def test_meta_device_reads_nothing(which: str, request: pytest.FixtureRequest) -> None:
    qwen = request.getfixturevalue(which)
    stock, ours = both(qwen, device_map={"": "meta"})
    assert ours.device.type == "meta"
    assert tinymodels.differences(stock, ours) == []
    assert gdsload.last_report().wanted_bytes == 0
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta device"):
        gdsload.from_pretrained(qwen)


@pytest.mark.gpu
@pytest.mark.parametrize("device_map", [0, "cuda", "cuda:0", torch.device("cuda"), "auto"])
@pytest.mark.parametrize("which", ["qwen", "mixture"])
def test_device_map_of_a_gpu_gives_the_model_of_transformers(
    device_map: Any, which: str, request: pytest.FixtureRequest
) -> None:
    stock, ours = both(request.getfixturevalue(which), device_map=device_map)
    assert tinymodels.differences(stock, ours) == []


def test_keyword_of_accelerated_is_refused_with_the_way_to_use_it(qwen: Path) -> None:
    with pytest.raises(TypeError, match=r"no keyword 'cache': with gdsload\.accelerated"):
        gdsload.from_pretrained(qwen, cache="direct")
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        gdsload.from_pretrained(qwen, nonsense=1)


def test_keywords_are_passed_to_transformers(qwen: Path) -> None:
    stock, ours = both(qwen, attn_implementation="eager", dtype="bfloat16")
    assert ours.config._attn_implementation == "eager"
    require_same(stock, ours)
    stock, ours = both(qwen, torch_dtype=torch.float16)
    require_same(stock, ours)
    for wanted in (None, "auto"):
        stock, ours = both(qwen, dtype=wanted)
        require_same(stock, ours)


def test_keyword_of_auto_classes_finds_the_config_and_goes_no_further(qwen: Path) -> None:
    """A class of transformers refuses it."""
    assert type(gdsload.from_pretrained(qwen, code_revision="main")).__name__ in (
        gdsload.from_pretrained(qwen).config.architectures
    )


def test_renamed_keys_and_mismatched_shapes_equal_transformers(qwen: Path, tmp_path: Path) -> None:
    shutil.copytree(qwen, tmp_path / "m")
    for path in (tmp_path / "m").glob("*.safetensors"):
        tensors = load_file(path)
        save_file({f"old_{n}": t for n, t in tensors.items()}, path, {"format": "pt"})
    index = tmp_path / "m" / "model.safetensors.index.json"
    facts = json.loads(index.read_text())
    facts["weight_map"] = {f"old_{n}": f for n, f in facts["weight_map"].items()}
    index.write_text(json.dumps(facts))
    stock, ours = both(tmp_path / "m", key_mapping={"^old_": ""})
    require_same(stock, ours)
    config = transformers.AutoConfig.from_pretrained(qwen)
    config.vocab_size = 50
    found = []
    for load in (transformers.Qwen2ForCausalLM.from_pretrained, gdsload.from_pretrained):
        torch.manual_seed(0)
        found.append(
            load(qwen, config=config, ignore_mismatched_sizes=True, output_loading_info=True)
        )
    (stock, stock_info), (ours, our_info) = found
    assert tinymodels.differences(stock, ours) == []
    assert stock_info == our_info
    assert stock_info["mismatched_keys"]


def test_variant_and_subfolder_are_found(tmp_path: Path) -> None:
    model = tinymodels.build("llama")
    model.save_pretrained(tmp_path / "sub", variant="fp16", max_shard_size="30KB")
    words = {"variant": "fp16", "subfolder": "sub"}
    stock, ours = both(tmp_path, **words)
    require_same(stock, ours)
    assert type(gdsload.from_pretrained(tmp_path, **words)) is type(model)


def test_model_in_the_hub_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots of links into blobs, found by name and revision, with the network refused."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "models--some--model"
    snapshot, blobs = home / "snapshots" / commit, home / "blobs"
    for directory in (snapshot, blobs, home / "refs"):
        directory.mkdir(parents=True)
    (home / "refs" / "v1").write_text(commit)
    tinymodels.build("qwen3").save_pretrained(tmp_path / "plain", max_shard_size="30KB")
    for number, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = {"revision": "v1", "cache_dir": tmp_path, "local_files_only": True}
    stock, ours = both("some/model", **words)
    require_same(stock, ours)
    assert ours.name_or_path == "some/model"
    by_config = gdsload.from_pretrained("some/model", **words)
    assert type(by_config) is transformers.Qwen3ForCausalLM


def test_architecture_is_that_of_the_config(tmp_path: Path, qwen: Path) -> None:
    assert type(gdsload.from_pretrained(qwen)) is transformers.Qwen2ForCausalLM
    assert type(gdsload.from_pretrained(str(qwen))) is transformers.Qwen2ForCausalLM
    config = transformers.AutoConfig.from_pretrained(qwen)
    config.architectures = None
    config.save_pretrained(tmp_path)
    with pytest.raises(gdsload.CheckpointError, match="pass cls="):
        gdsload.from_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"config|Repo id"):
        gdsload.from_pretrained(tmp_path / "nothing")


REMOTE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "own"
    def __init__(self, size=8, **words):
        self.size = size
        super().__init__(**words)

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    main_input_name = "values"
    def __init__(self, config):
        super().__init__(config)
        self.inner = torch.nn.Linear(config.size, config.size)
        self.register_buffer("steps", torch.arange(3))
        self.post_init()
    def forward(self, values=None, **words):
        return {"values": self.inner(values)}
"""


def test_remote_code_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    source = tmp_path / "own"
    source.mkdir()
    (source / "own.py").write_text(REMOTE)
    (source / "config.json").write_text(
        json.dumps(
            {
                "model_type": "own",
                "architectures": ["OwnModel"],
                "size": 8,
                "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"},
            }
        )
    )
    tensors = {
        "inner.weight": torch.randn(8, 8),
        "inner.bias": torch.randn(8),
        "steps": torch.arange(3),
    }
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    stock = transformers.AutoModel.from_pretrained(source, trust_remote_code=True)
    ours = gdsload.from_pretrained(source, trust_remote_code=True)
    assert type(ours).__name__ == "OwnModel"
    assert tinymodels.differences(stock, ours) == []
    assert torch.equal(ours.inner.weight, tensors["inner.weight"])
    assert gdsload.last_report().integration == FIRST


def test_code_of_a_checkpoint_comes_before_a_class_of_the_same_name(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    source = Path(shutil.copytree(qwen, tmp_path / "changed"))
    (source / "changed.py").write_text(
        "from transformers import Qwen2ForCausalLM as Base\n"
        "class Qwen2ForCausalLM(Base):\n    changed = True\n"
    )
    facts = json.loads((source / "config.json").read_text())
    assert facts["architectures"] == ["Qwen2ForCausalLM"]
    facts["auto_map"] = {"AutoModelForCausalLM": "changed.Qwen2ForCausalLM"}
    (source / "config.json").write_text(json.dumps(facts))
    assert gdsload.from_pretrained(source, trust_remote_code=True).changed
    assert not hasattr(gdsload.from_pretrained(source), "changed")


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_model_loaded_in_inference_mode_is_that_of_transformers(qwen: Path, dtype: str) -> None:
    """Threads of transformers are not in the mode of the caller: its parameters can be trained."""
    with torch.inference_mode():
        stock, ours = both(qwen, dtype=dtype)
    require_same(stock, ours)
    inference = {name: tensor.is_inference() for name, tensor in stock.state_dict().items()}
    for name, tensor in ours.state_dict().items():
        assert tensor.is_inference() <= inference[name], name


@pytest.mark.skipif(not NEW, reason="transformers makes tensors in threads since 5.0")
@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_model_loaded_in_fake_tensor_mode_is_that_of_transformers(
    kind: str, dtype: torch.dtype, allowed: bool, tmp_path: Path
) -> None:
    """Parameters that transformers makes in threads are real, and those that it merges are not."""
    tinymodels.build(kind).to(torch.bfloat16).save_pretrained(tmp_path)

    def kinds() -> Any:
        with FakeTensorMode(allow_non_fake_inputs=allowed):
            try:
                model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
            except RuntimeError as error:
                return type(error)
        return {name: (type(each.data), each.dtype) for name, each in model.named_parameters()}

    stock = kinds()
    with gdsload.accelerated():
        assert kinds() == stock


def test_adapter_in_the_hub_cache_is_one_for_an_auto_class(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--lora" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "adapter_config.json").write_text("{}")
    (tmp_path / "models--org--lora" / "refs").mkdir()
    (tmp_path / "models--org--lora" / "refs" / "main").write_text("abc")
    words: dict[str, Any] = {"cache_dir": tmp_path, "local_files_only": True}
    assert architecture("org/lora", **words) is transformers.AutoModelForCausalLM
    with pytest.raises(OSError, match="find"):
        architecture("org/none", **words)


@pytest.mark.skipif(not NEW, reason="transformers 4.57 looks in the directory itself only")
def test_adapter_in_a_folder_of_its_own_is_found_by_its_keywords(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")  # who looks for adapters
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    with pytest.raises((OSError, ValueError), match="config"):
        architecture(tmp_path)
    found = architecture(tmp_path, adapter_kwargs={"subfolder": "lora"})
    assert found is transformers.AutoModelForCausalLM


def test_class_without_weights_gets_its_own_backend(tmp_path: Path) -> None:
    class Processor(transformers.FeatureExtractionMixin):
        @classmethod
        def from_pretrained(cls, source: Any, **words: Any) -> Any:
            return words

    assert gdsload.from_pretrained(tmp_path, cls=Processor, backend="pil") == {"backend": "pil"}
    assert gdsload.from_pretrained(tmp_path, cls=Processor, backend="object_store") == {}
    assert gdsload.from_pretrained(tmp_path, cls=Processor) == {}


def test_class_of_another_library_gets_no_backend_of_gdsload(checkpoint: Path) -> None:
    class Pipeline:
        @classmethod
        def from_pretrained(cls, source: Any, **words: Any) -> Any:
            gdsload.load_file(source)
            return words

    assert gdsload.from_pretrained(checkpoint, cls=Pipeline, backend="posix") == {}
    with pytest.raises(gdsload.BackendUnavailable, match="posx"):
        gdsload.from_pretrained(checkpoint, cls=Pipeline, backend="posx")


def test_adapter_equals_transformers(qwen: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = transformers.AutoModelForCausalLM.from_pretrained(qwen)
    wanted = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = tinymodels.perturbed(peft.get_peft_model(base, wanted))
    adapted.save_pretrained(tmp_path)
    facts = json.loads((tmp_path / "adapter_config.json").read_text())
    assert facts["base_model_name_or_path"] == str(qwen)
    stock, ours = both(tmp_path)
    assert any("lora" in name for name in ours.state_dict())
    require_same(stock, ours)
    by_config = gdsload.from_pretrained(tmp_path)
    assert tinymodels.differences(stock, by_config) == []
    report = gdsload.last_report()
    assert sum(report.fates.values()) == report.tensors or not NEW, "the model and its adapter"
    stock = transformers.AutoModelForCausalLM.from_pretrained(qwen)
    ours = gdsload.from_pretrained(qwen)
    stock.load_adapter(str(tmp_path))
    with gdsload.accelerated():
        ours.load_adapter(str(tmp_path))
    assert tinymodels.differences(stock, ours) == []


@pytest.mark.parametrize("where", ["", "lora"])
def test_adapter_is_loaded_as_the_class_of_its_base(where: str, tmp_path: Path) -> None:
    """Also if transformers has no causal language model of that kind, and if both are in folders of
    the same name."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    if where and not NEW:
        pytest.skip("transformers 4.57 looks in the directory itself only")
    base = tinymodels.build("t5")
    base.save_pretrained(tmp_path / "base" / where)
    base.name_or_path = str(tmp_path / "base")
    wanted = peft.LoraConfig(r=2, target_modules=["q", "v"])
    adapted = tinymodels.perturbed(peft.get_peft_model(base, wanted))
    adapted.save_pretrained(tmp_path / "adapter" / where)
    folder = {"subfolder": where}
    words: dict[str, Any] = {**folder, "adapter_kwargs": folder} if where else {}
    cls = transformers.T5ForConditionalGeneration
    stock = cls.from_pretrained(tmp_path / "adapter", **words)
    ours = gdsload.from_pretrained(tmp_path / "adapter", **words)
    assert any("lora" in name for name in ours.state_dict())
    assert tinymodels.differences(stock, ours) == []


@pytest.mark.parametrize("text", ["[]", "{", "3"])
def test_adapter_whose_config_is_no_object_is_an_error(text: str, tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    config.write_text(text)
    with pytest.raises(gdsload.CheckpointError, match="this is no JSON object") as caught:
        gdsload.from_pretrained(tmp_path)
    assert caught.value.path == str(config)


@needs_new
def test_adapter_of_pickled_weights_is_reported_with_the_reason(qwen: Path, tmp_path: Path) -> None:
    """The base model's: its own weights are read by gdsload."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = transformers.AutoModelForCausalLM.from_pretrained(qwen)
    base.config.save_pretrained(tmp_path / "base")
    torch.save(base.state_dict(), tmp_path / "base" / "pytorch_model.bin")
    wanted = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    base.name_or_path = str(tmp_path / "base")
    peft.get_peft_model(base, wanted).save_pretrained(tmp_path / "adapter")
    gdsload.from_pretrained(tmp_path / "adapter")
    report = gdsload.last_report()
    assert report.integration == "stock"
    assert "pytorch_model.bin is not a .safetensors file" in report.integration_reason
    assert report.tensors == sum(report.fates.values()) == 4


def test_single_file_without_a_config_is_a_checkpoint_error(qwen: Path) -> None:
    with pytest.raises(gdsload.CheckpointError, match=r"this is a file.*one file") as caught:
        gdsload.from_pretrained(min(qwen.glob("*.safetensors")))
    assert isinstance(caught.value, SafetensorError)


def test_accelerate_loads_through_gdsload(qwen: Path) -> None:
    import accelerate

    config = transformers.AutoConfig.from_pretrained(qwen)
    wanted = transformers.Qwen2Model.from_pretrained(qwen)
    full = transformers.Qwen2ForCausalLM(config)
    with gdsload.accelerated(cache="buffered"):
        accelerate.load_checkpoint_in_model(full, str(qwen))
    assert gdsload.last_report().source.startswith(str(qwen))
    for name, tensor in wanted.state_dict().items():
        assert tinymodels.same_bytes(tensor, full.state_dict()[f"model.{name}"])
    head = transformers.Qwen2ForCausalLM(config)
    before = gdsload.last_report()
    with gdsload.accelerated(cache="buffered") as report:
        head = accelerate.load_checkpoint_and_dispatch(head, str(qwen), device_map={"": "cpu"})
    assert gdsload.last_report() is not before
    assert report.tensors == len(wanted.state_dict()) > gdsload.last_report().tensors
    assert sum(report.paths.values()) >= report.wanted_bytes
    assert tinymodels.same_bytes(head.model.norm.weight, wanted.norm.weight)


def test_diffusers_loads_through_gdsload(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    model = diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=2, sample_size=8
    )
    model.save_pretrained(tmp_path)
    stock = diffusers.AutoencoderKL.from_pretrained(tmp_path)
    with gdsload.accelerated(cache="buffered"):
        ours = diffusers.AutoencoderKL.from_pretrained(tmp_path)
    report = gdsload.last_report()
    assert report.source.startswith(str(tmp_path))
    assert report.tensors == len(stock.state_dict())
    again = gdsload.from_pretrained(tmp_path, cls=diffusers.AutoencoderKL)
    whole = gdsload.last_report()
    assert (whole.integration, whole.tensors) == ("load_file", report.tensors)
    assert sum(whole.paths.values()) >= whole.wanted_bytes == report.wanted_bytes > 0
    for name, tensor in stock.state_dict().items():
        assert tinymodels.same_bytes(tensor, ours.state_dict()[name])
        assert tinymodels.same_bytes(tensor, again.state_dict()[name])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Any]]:
    """Models that two ranks have loaded, and what each found: of a dense model, of a mixture, which
    5.0 sends to a GPU wherever it is, of one of whose rows a rank wants two parts, and of the first
    as a distributed checkpoint."""
    place = tmp_path_factory.mktemp("ranks")
    names = ["qwen3", "mixtral"] + ["llama4_text"] * IS_SURE
    models = [place / name for name in names]
    for model in models:
        tinymodels.build(model.name).save_pretrained(model)
    words: list[str | Path] = [*models]
    if WRITES_DCP:
        words += ["--distributed", place / "dcp"]
    return models, ranks(2, HERE / "tensor_parallel.py", *words, meet=place)


@needs_new
def test_rank_reads_only_its_part(two_ranks: tuple[list[Path], list[Any]]) -> None:
    alone = ""
    models, found_by = two_ranks
    for rank in found_by:
        for model, found in zip(models, rank[: len(models)], strict=True):
            if not IS_SURE and "alone" in found:
                alone = f"transformers {transformers.__version__} alone: {found['alone']}"
                continue
            whole = sum(p.stat().st_size for p in model.glob("*.safetensors"))
            assert found["wrong"] == [], model.name
            assert found["same_keys"]
            assert found["same_logits"]
            assert found["path"] == "hook"
            assert found["held_bytes"] < 0.9 * whole
            # Rows are read for this rank alone; of columns in rows this short, the whole row, once.
            assert found["wanted_bytes"] < 0.9 * whole
    if alone:
        pytest.skip(alone)


@needs_new
@pytest.mark.parametrize("how", ["parts", "whole"])
def test_ranks_read_each_byte_once_together(
    two_ranks: tuple[list[Path], list[Any]], how: str
) -> None:
    """With tensor parallelism and without."""
    from transformers import core_model_loading

    if how == "parts" and not hasattr(core_model_loading, "DtensorShardOperation"):
        pytest.skip(f"transformers {transformers.__version__} divides a tensor when it is read")
    models, found_by = two_ranks
    for number, model in enumerate(models):
        found = [told[number].get("shared", {}).get(how) for told in found_by]
        if not IS_SURE and None in found:
            pytest.skip(f"transformers {transformers.__version__} cannot load it alone")
        whole = sum(p.stat().st_size for p in model.glob("*.safetensors"))
        for rank in found:
            assert rank["wrong"] == [], model.name
            assert rank["same_keys"]
            assert (rank["path"], rank["ranks"]) == ("hook", 2)
            assert rank["received_bytes"] > 0.2 * whole
        assert 0.9 < sum(rank["read_bytes"] for rank in found) / whole < 1.1


@pytest.mark.skipif(
    not WRITES_DCP, reason="transformers before 5.20 writes distributed checkpoints of FSDP alone"
)
def test_distributed_checkpoint_is_left_to_torch(two_ranks: tuple[list[Path], list[Any]]) -> None:
    """Two ranks wrote it, each its part; then both loaded it."""
    (model, *_), found_by = two_ranks
    for *_, rank in found_by:
        assert rank["wrong"] == []
        assert rank["same_keys"]
        assert rank["same_logits"]
        assert rank["path"] == "stock"
        assert "torch.distributed.checkpoint" in rank["reason"]
    assert not (model.parent / "dcp" / "model.safetensors").exists()
