"""transformers models from URLs: the same models as from a local directory."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import gdsload
import tinymodels
from gdsload.errors import CheckpointError, CheckpointNotFound, FileChanged
from gdsload.integrations.transformers import speculative_prefetch, stand_ins
from object_server import ObjectServer

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.glob("gdsload-*")) == []


def require_same(model: Any, directory: Path, **words: Any) -> None:
    wanted = transformers.AutoModelForCausalLM.from_pretrained(directory, **words).state_dict()
    got = model.state_dict()
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http"])
def test_model_is_that_of_the_directory(
    server: ObjectServer, tiny_checkpoint: Path, scheme: str
) -> None:
    url = server.url(scheme, "model")
    model = gdsload.from_pretrained(url)
    require_same(model, tiny_checkpoint)
    named = [each for each in model.modules() if hasattr(each, "name_or_path")]
    assert len(named) > 1 and {each.name_or_path for each in named} == {url}
    assert model.config.name_or_path == url
    report = gdsload.last_report()
    assert (report.source, report.integration) == (url, "hook")
    assert set(report.paths) == {f"object_store/{scheme}"}
    # Each header is read once.
    headers = [read for read in server.reads("*.safetensors") if read.first == 0 and read.sent > 1]
    assert len(headers) == 2


def test_loading_info_and_dtype_are_those_of_transformers(
    server: ObjectServer, tiny_checkpoint: Path
) -> None:
    model, info = gdsload.from_pretrained(
        server.url("s3", "model"), dtype=torch.float32, output_loading_info=True
    )
    require_same(model, tiny_checkpoint, dtype=torch.float32)
    assert not info["missing_keys"]
    assert model.name_or_path == server.url("s3", "model")


def test_model_in_a_subfolder_is_found(server: ObjectServer, tiny_checkpoint: Path) -> None:
    (server.root / "all").mkdir()
    (server.root / "model").rename(server.root / "all" / "model")
    model = gdsload.from_pretrained(server.url("s3", "all"), subfolder="model")
    require_same(model, tiny_checkpoint)


@pytest.mark.parametrize("folder", ["../outside", "a/../../outside", "/outside"])
def test_subfolder_outside_of_the_model_is_refused(server: ObjectServer, folder: str) -> None:
    (server.root / "outside").mkdir()
    (server.root / "model" / "config.json").rename(server.root / "outside" / "config.json")
    with pytest.raises(CheckpointError, match="does not stay inside"):
        gdsload.from_pretrained(server.url("s3", "model"), subfolder=folder)
    assert not Path(tempfile.gettempdir(), "outside").exists()


def test_subfolder_may_have_characters_that_urls_escape(
    server: ObjectServer, tiny_checkpoint: Path
) -> None:
    name = "a #?%20"
    (server.root / "model").rename(server.root / name)
    model = gdsload.from_pretrained(server.url("s3"), subfolder=name)
    require_same(model, tiny_checkpoint)


def test_directories_beside_the_files_of_a_source_are_left_out(
    server: ObjectServer, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    shutil.copytree(tiny_checkpoint, local)
    (local / "original").mkdir()
    model = gdsload.from_pretrained(gdsload.replicas(local, server.url("s3", "model")))
    require_same(model, tiny_checkpoint)


@pytest.mark.parametrize("has_base", [True, False])
@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_adapter_is_that_of_the_directory(
    object_server: ObjectServer, tiny_checkpoint: Path, tmp_path: Path, scheme: str, has_base: bool
) -> None:
    peft = pytest.importorskip("peft")
    folder = object_server.root / "adapter"
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    config = peft.LoraConfig(r=256, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    tinymodels.perturbed(peft.get_peft_model(base, config)).save_pretrained(folder)
    if has_base:
        shutil.copytree(tiny_checkpoint, folder, dirs_exist_ok=True)
    cache: dict[str, Any] = {"cache_dir": tmp_path / "cache"}
    for words, reads_data in (({}, True), (cache, True), (cache, False)):
        object_server.forget()
        model = gdsload.from_pretrained(object_server.url(scheme, "adapter"), **words)
        assert any("lora" in name for name in model.state_dict())
        require_same(model, folder)
        reads = object_server.reads("adapter/adapter_model.*")
        assert any(read.first for read in reads) is reads_data


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_error_of_transformers_names_the_url(server: ObjectServer) -> None:
    (server.root / "model" / "config.json").write_text("{")
    with pytest.raises(OSError, match=r"config\.json") as caught:
        gdsload.from_pretrained(server.url("s3", "model"))
    assert caught.value.__notes__[0].endswith(" stood for s3://bucket/model")


@pytest.mark.parametrize("cls", ["AutoModelForCausalLM", "Qwen3ForCausalLM"])
def test_accelerated_calls_take_urls(server: ObjectServer, tiny_checkpoint: Path, cls: str) -> None:
    url = server.url("s3", "model")
    before = vars(transformers.PreTrainedModel)["from_pretrained"]
    # transformers gives each automatic class a copy of the function when it is imported.
    owner = getattr(transformers, cls)
    with gdsload.accelerated() as report:
        load = owner.from_pretrained
        model = load(url)
        assert gdsload.last_report().source == url
        require_same(load(pretrained_model_name_or_path=url), tiny_checkpoint)
        require_same(load(pretrained_model_name_or_path=tiny_checkpoint), tiny_checkpoint)
    require_same(model, tiny_checkpoint)
    assert "object_store/s3" in report.paths
    assert vars(transformers.PreTrainedModel)["from_pretrained"] is before


def test_safe_open_reads_urls(
    server: ObjectServer, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry point of transformers 4.57, and of versions that do not fit."""
    from gdsload.integrations.transformers import hooks

    def misfit(*_: object, **__: object) -> None:
        raise AttributeError("something has another name")

    monkeypatch.setattr("gdsload.integrations.transformers.model_reader.load_plan_of", misfit)
    model = gdsload.from_pretrained(server.url("s3", "model"))
    require_same(model, tiny_checkpoint)
    assert gdsload.last_report().integration == hooks.SAFE_OPEN


def test_dtype_auto_without_dtype_in_the_config_reads_the_header(server: ObjectServer) -> None:
    config = server.root / "model" / "config.json"
    facts = json.loads(config.read_text())
    del facts[next(name for name in ("dtype", "torch_dtype") if name in facts)]
    config.write_text(json.dumps(facts))
    model = gdsload.from_pretrained(server.url("s3", "model"), dtype="auto")
    require_same(model, server.root / "model", dtype="auto")


def test_first_layers_are_prefetched(
    server: ObjectServer, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculative_prefetch, "LEAST_PREFETCH_BYTES", 0)
    require_same(gdsload.from_pretrained(server.url("s3", "model")), tiny_checkpoint)
    assert any(span.track == "head start" for span in gdsload.last_report().spans)


def test_config_of_a_model_is_loaded_without_its_weights(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculative_prefetch, "LEAST_PREFETCH_BYTES", 0)
    config = gdsload.from_pretrained(server.url("s3", "model"), cls=transformers.AutoConfig)
    assert config.architectures
    assert not any(span.track == "head start" for span in gdsload.last_report().spans)
    assert gdsload.last_report().integration == ""
    assert server.reads("model/*.safetensors") == []


def test_modules_of_a_model_are_ready_as_they_come(server: ObjectServer) -> None:
    ready: list[str] = []
    gdsload.from_pretrained(
        server.url("s3", "model"), on_module_ready=lambda name, _: ready.append(name)
    )
    assert ready[-1] == "" and gdsload.last_report().modules_ready == "as they came"


def test_config_and_tokenizer_files_are_fetched_and_large_ones_are_not(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gdsload.integrations.transformers import stand_ins

    monkeypatch.setattr(stand_ins, "MOST_COPIED_BYTES", 1 << 20)
    (server.root / "model" / "notes.txt").write_bytes(bytes(2 << 20))
    (server.root / "model" / "pytorch_model.bin").write_bytes(bytes(100))
    with stand_ins.stand_in(server.url("s3", "model"), {}) as top:
        names = {path.name for path in Path(top).iterdir()}
        assert "config.json" in names
        assert not names & {"notes.txt", "pytorch_model.bin"}
        shard = Path(top, "model-00001-of-00002.safetensors")
        with pytest.raises(Exception, match=r"MetadataIncompleteBuffer|incomplete"):
            transformers.modeling_utils.load_state_dict(str(shard))
    assert server.reads("model/pytorch_model.bin") == []


def test_small_files_are_found_on_a_web_server_which_cannot_list_them(server: ObjectServer) -> None:
    names = {
        "audio_tokenizer_config.json",
        "chat_template.jinja",
        "chat_template.json",
        "normalizer.json",
        "preprocessor_config.json",
        "processor_config.json",
        "source.spm",
        "target.spm",
        "tekken.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
    }
    for name in names:
        (server.root / "model" / name).write_text("{}")
    with stand_ins.stand_in(server.url("http", "model"), {}) as top:
        assert names - {path.name for path in Path(top).iterdir()} == set()


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_adapter_of_a_language_is_that_of_the_directory(
    object_server: ObjectServer, scheme: str, suffix: str
) -> None:
    folder = tinymodels.saved_speech(object_server.root / "speech")
    if suffix == "bin":
        for path in folder.glob("adapter.*"):
            torch.save(load_file(path), path.with_suffix(".bin"))
            path.unlink()
    url = object_server.url(scheme, "speech")
    model = gdsload.from_pretrained(url, target_lang="eng")
    stock = transformers.Wav2Vec2ForCTC.from_pretrained(folder, target_lang="eng")
    wanted, got = stock.state_dict(), model.state_dict()
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
    assert object_server.reads("speech/adapter.deu.*") == []


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_file_of_speakers_is_found_by_the_class_that_reads_it(
    server: ObjectServer, scheme: str
) -> None:
    class Speaking(transformers.Qwen3ForCausalLM):  # as Qwen2.5-Omni does it
        @classmethod
        def from_pretrained(cls, source: Any, *args: Any, **words: Any) -> Any:
            model = super().from_pretrained(source, *args, **words)
            model.speakers = torch.load(transformers.utils.cached_file(source, "spk_dict.pt"))
            return model

    torch.save({"a": torch.ones(3)}, server.root / "model" / "spk_dict.pt")
    model = gdsload.from_pretrained(server.url(scheme, "model"), cls=Speaking)
    assert torch.equal(model.speakers["a"], torch.ones(3))


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_shard_that_is_not_there_is_named(server: ObjectServer, scheme: str) -> None:
    """A web server cannot list what it has."""
    name = "model-00002-of-00002.safetensors"
    (server.root / "model" / name).unlink()
    with pytest.raises(CheckpointNotFound, match=name):
        gdsload.from_pretrained(server.url(scheme, "model"))


def test_tokenizer_is_loaded_by_its_class(object_server: ObjectServer) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
    saved.save_pretrained(object_server.root / "tokenizer")
    url = object_server.url("s3", "tokenizer")
    tokenizer = gdsload.from_pretrained(url, cls=transformers.AutoTokenizer)
    assert tokenizer("b")["input_ids"] == [1]
    assert gdsload.last_report().integration == ""
    assert tokenizer.name_or_path == url


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_tokenizer_has_the_chat_templates_of_the_directory(
    object_server: ObjectServer, scheme: str
) -> None:
    """A web server cannot list those beside the usual one."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?")
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
    saved.chat_template = {"default": "plain", "tool_use": "with tools"}
    folder = object_server.root / "tokenizer"
    saved.save_pretrained(folder)
    if not (folder / "additional_chat_templates").is_dir():
        pytest.skip("this version of transformers writes all templates into one file")
    stock = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = gdsload.from_pretrained(
        object_server.url(scheme, "tokenizer"), cls=transformers.AutoTokenizer
    )
    assert stock.chat_template == {"default": "plain", "tool_use": "with tools"}
    assert tokenizer.chat_template == (stock.chat_template if scheme == "s3" else "plain")


def test_tokenizer_of_nothing_is_an_error(server: ObjectServer) -> None:
    with pytest.raises(CheckpointNotFound, match="s3://bucket/nothing"):
        gdsload.from_pretrained(server.url("s3", "nothing"), cls=transformers.AutoTokenizer)


@pytest.mark.parametrize("cached", [False, True])
def test_tensors_of_a_url_cannot_be_left_on_disk(
    server: ObjectServer, tmp_path: Path, cached: bool
) -> None:
    url, words = server.url("s3", "model"), {}
    if cached:
        words = {"cache_dir": tmp_path / "cache"}
        gdsload.from_pretrained(url, **words)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    with pytest.raises(CheckpointError, match="device_map leaves tensors on disk"):
        gdsload.from_pretrained(
            url,
            device_map={**places, "model.rotary_emb": "cpu", "model.layers": "disk"},
            offload_folder=str(tmp_path / "off"),
            **words,
        )


def test_tensors_of_a_url_on_the_meta_device_are_not_read(server: ObjectServer) -> None:
    model = gdsload.from_pretrained(server.url("s3", "model"), device_map={"": "meta"})
    assert model.device.type == "meta"
    report = gdsload.last_report()
    assert (report.integration, report.wanted_bytes) == ("hook", 0)


def test_replaced_weights_give_no_model(server: ObjectServer) -> None:
    for path in (server.root / "model").glob("*.safetensors"):
        assert path.stat().st_size > 128 << 10
    server.script("replaced", path="model/*.safetensors", first=3, count=None)
    with pytest.raises(FileChanged):
        gdsload.from_pretrained(server.url("s3", "model"))


def test_missing_model_and_single_file_are_errors(server: ObjectServer) -> None:
    with pytest.raises(CheckpointNotFound, match="s3://bucket/nothing"):
        gdsload.from_pretrained(server.url("s3", "nothing"))
    file = server.url("http", "model/model-00001-of-00002.safetensors") + "?a"
    owner: Any
    for owner in (gdsload, transformers.AutoModelForCausalLM):
        with (
            gdsload.accelerated(),
            pytest.raises(CheckpointError, match="needs the directory") as caught,
        ):
            owner.from_pretrained(file)
        assert isinstance(caught.value, SafetensorError)


@pytest.mark.parametrize("folder", ["./a", "a//b", "a/./b/"])
def test_subfolder_may_be_written_in_any_way(
    server: ObjectServer, tiny_checkpoint: Path, folder: str
) -> None:
    place = server.root / "all" / folder
    place.parent.mkdir(parents=True)
    (server.root / "model").rename(place)
    require_same(
        gdsload.from_pretrained(server.url("s3", "all"), subfolder=folder), tiny_checkpoint
    )


def test_variant_in_shards_is_found_on_a_web_server(
    object_server: ObjectServer, tiny_checkpoint: Path
) -> None:
    folder = object_server.root / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    model.save_pretrained(folder, variant="fp16", max_shard_size="300KB")
    assert len([*folder.glob("*.safetensors")]) > 1
    loaded = gdsload.from_pretrained(object_server.url("http", "model"), variant="fp16")
    require_same(loaded, tiny_checkpoint)


def test_custom_code_of_a_url_is_imported_once(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    folder = server.root / "model"
    facts = json.loads((folder / "config.json").read_text())
    (name,) = facts["architectures"]
    (folder / "own.py").write_text(
        f"from transformers import {name} as Base\nclass {name}(Base):\n    own = True\n"
    )
    facts["auto_map"] = {"AutoModelForCausalLM": f"own.{name}"}
    (folder / "config.json").write_text(json.dumps(facts))
    url = server.url("s3", "model")
    first, second = (gdsload.from_pretrained(url, trust_remote_code=True) for _ in range(2))
    assert first.own
    assert type(first) is type(second)


@pytest.mark.skipif(
    not hasattr(transformers.PretrainedConfig, "extra_files"), reason="classes name no files"
)
@pytest.mark.parametrize("cached", ["nothing", "shards", "all"])
@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_extra_files_of_the_class_that_is_loaded_are_found(
    server: ObjectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    cached: str,
) -> None:
    """A class may load checkpoints of other model types, and have files that these do not name."""
    monkeypatch.setattr(speculative_prefetch, "LEAST_PREFETCH_BYTES", 0)
    folder, extra = server.root / "model", "extra.safetensors"
    shard = next(file for file in folder.glob("*.safetensors") if "2-of" in file.name)
    index = folder / "model.safetensors.index.json"
    facts = json.loads(index.read_text())
    facts["weight_map"] = {n: f for n, f in facts["weight_map"].items() if f != shard.name}
    index.write_text(json.dumps(facts))
    shard.rename(folder / extra)
    config = transformers.AutoConfig.from_pretrained(folder)
    base: Any = transformers.AutoModelForCausalLM.from_config(config).__class__
    own_config = type("Config", (type(config),), {"extra_files": (extra, "absent.safetensors")})
    own = type("Own", (base,), {"config_class": own_config})
    url, words = server.url(scheme, "model"), {"output_loading_info": True}
    if cached != "nothing":
        words["cache_dir"] = tmp_path / "cache"
        gdsload.from_pretrained(url, cls=own if cached == "all" else base, **words)
    before = len(server.reads("model/*.safetensors"))
    model, info = gdsload.from_pretrained(url, cls=own, **words)
    assert not info["missing_keys"]
    wanted = own.from_pretrained(folder).state_dict()
    assert model.state_dict().keys() == wanted.keys()
    assert all(torch.equal(model.state_dict()[name], wanted[name]) for name in wanted)
    if cached == "all":  # but for their heads, which tell the versions
        assert all(read.first == 0 for read in server.reads("model/*.safetensors")[before:])


@pytest.mark.parametrize("inside", ["", "weights"])
@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_weights_have_the_name_that_the_config_gives_them(
    server: ObjectServer, tiny_checkpoint: Path, scheme: str, inside: str
) -> None:
    folder = server.root / "model"
    named = f"{inside}/other.safetensors" if inside else "other.safetensors.index.json"
    if inside:
        (folder / inside).mkdir()
        tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        save_file(tensors, folder / named, metadata={"format": "pt"})
    else:
        shutil.copyfile(folder / "model.safetensors.index.json", folder / named)
        for file in [*folder.glob("*.safetensors")]:
            shutil.copyfile(file, folder / file.name.replace("model", "other"))
        text = (folder / named).read_text().replace("model-0", "other-0")
        (folder / named).write_text(text)
    zeros = {"model.norm.weight": torch.zeros(64)}
    save_file(zeros, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": named}))
    model, info = gdsload.from_pretrained(server.url(scheme, "model"), output_loading_info=True)
    assert not info["missing_keys"]
    require_same(model, tiny_checkpoint)
    assert server.reads("model/model*.safetensors") == []


def test_weights_that_a_config_names_are_in_its_directory(server: ObjectServer) -> None:
    folder = server.root / "model"
    config = json.loads((folder / "config.json").read_text())
    outside = {"transformers_weights": "../other/model.safetensors"}
    (folder / "config.json").write_text(json.dumps(config | outside))
    with pytest.raises(CheckpointError, match=r"transformers_weights .* stay inside"):
        gdsload.from_pretrained(server.url("s3", "model"))


def test_index_that_a_config_names_is_beside_it(server: ObjectServer) -> None:
    folder = server.root / "model"
    config = json.loads((folder / "config.json").read_text())
    inside = {"transformers_weights": "weights/model.safetensors.index.json"}
    (folder / "config.json").write_text(json.dumps(config | inside))
    with pytest.raises(CheckpointError, match="an index lies beside the config"):
        gdsload.from_pretrained(server.url("s3", "model"))


def test_extra_files_that_transformers_would_not_find_are_an_error(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misfit(*_: object, **__: object) -> None:
        raise AttributeError("something has another name")

    folder = server.root / "model"
    shutil.copyfile(next(folder.glob("*.safetensors")), folder / "extra.safetensors")
    config = transformers.AutoConfig.from_pretrained(folder)
    monkeypatch.setattr(type(config), "extra_files", ("extra.safetensors",), raising=False)
    monkeypatch.setattr("gdsload.integrations.transformers.model_reader.load_plan_of", misfit)
    with pytest.raises(CheckpointError, match=r"'extra\.safetensors'.*load a copy"):
        gdsload.from_pretrained(server.url("s3", "model"))


def test_of_two_shards_with_a_tensor_the_one_that_transformers_takes_counts(
    server: ObjectServer,
) -> None:
    folder = server.root / "model"
    first, last = sorted(folder.glob("*.safetensors"))
    tensors = load_file(first)
    name = next(name for name in tensors if name.endswith("layernorm.weight"))
    save_file(load_file(last) | {name: tensors[name] + 1}, last, metadata={"format": "pt"})
    require_same(gdsload.from_pretrained(server.url("s3", "model")), folder)


def test_torchao_reads_the_metadata_of_remote_files(server: ObjectServer) -> None:
    module = pytest.importorskip("transformers.quantizers.quantizer_torchao")
    if not hasattr(module.TorchAoHfQuantizer, "set_metadata"):
        pytest.skip("it does not read it itself")
    quantizer = object.__new__(module.TorchAoHfQuantizer)
    with gdsload.accelerated(), stand_ins.stand_in(server.url("s3", "model"), {}) as top:
        quantizer.set_metadata([str(file) for file in sorted(Path(top).glob("*.safetensors"))])
    assert quantizer.metadata == {"format": "pt"}
