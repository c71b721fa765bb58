"""The load format of vLLM and the plugin of SGLang, against stand-ins of the two engines."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import enginedoubles
import gdsload
from command import answer
from gdsload.integrations import engine_weights
from gdsload.integrations.engine_weights import WeightsReader, with_reader

WEIGHTS = {
    "embed": torch.arange(6, dtype=torch.float32),
    "layers.0.experts.0.weight": torch.full((4,), 0.5),
    "layers.0.experts.1.weight": torch.full((4,), 1.5),
    "norm": torch.ones(3, dtype=torch.bfloat16),
    "layers.0.experts.0.scale": torch.full((2,), 2.5),
}
OF_EXPERT_0 = "layers.0.experts.0.weight"
log = logging.getLogger("test")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for number, names in enumerate((["embed", "layers.0.experts.0.weight"], list(WEIGHTS)[2:])):
        save_file({name: WEIGHTS[name] for name in names}, tmp_path / f"m-{number}.safetensors")
    return tmp_path


@pytest.fixture
def damaged(model: Path) -> Path:
    """The model with a manifest, which was made of another norm."""
    answer("manifest", model, "--algorithm", "sha256")
    others = {name: WEIGHTS[name] for name in list(WEIGHTS)[2:]}
    save_file(others | {"norm": torch.zeros_like(WEIGHTS["norm"])}, model / "m-1.safetensors")
    return model


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    enginedoubles.install(monkeypatch, "vllm")
    name = "gdsload.integrations.vllm"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    enginedoubles.install(monkeypatch, "sglang")
    return importlib.import_module("gdsload.integrations.sglang")


def load_config(**more: Any) -> SimpleNamespace:
    fields = {
        "load_format": "gdsload",
        "model_loader_extra_config": {},
        "safetensors_load_strategy": None,
        "use_tqdm_on_load": False,
        "device": None,
    }
    return SimpleNamespace(**fields | more)


def source(model: Path, prefix: str = "") -> SimpleNamespace:
    return SimpleNamespace(model_or_path=str(model), prefix=prefix)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def files_of(model: Path) -> list[str]:
    return sorted(map(str, model.glob("*.safetensors")))


# vLLM


def test_vllm_loader_reads_all_shards_and_adds_the_prefix(vllm: ModuleType, model: Path) -> None:
    loader = vllm.GdsloadModelLoader(load_config())
    weights = list(loader._get_weights_iterator(source(model, "draft.")))  # a model may collect
    assert_same(dict(weights), {f"draft.{name}": tensor for name, tensor in WEIGHTS.items()})
    assert gdsload.last_report().tensors == len(WEIGHTS)


class Model:
    """A model that collects its weights in a list before it uses them."""

    def __init__(self, *secondary_weights: SimpleNamespace) -> None:
        self.secondary_weights = secondary_weights
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.weights = dict(list(weights))


def model_config(model: Path, experts: set[int] | None = None, **more: Any) -> SimpleNamespace:
    fields = {"model": str(model), "local_expert_ids": experts, "quantization": None}
    return SimpleNamespace(**fields | more)


def reload_weights(*arguments: Any) -> None:
    importlib.import_module("vllm.model_executor.model_loader.reload").reload_weights(*arguments)


def test_vllm_loader_loads_all_sources_of_a_model(vllm: ModuleType, model: Path) -> None:
    built = Model(source(model, "draft."))
    vllm.GdsloadModelLoader(load_config()).load_weights(built, model_config(model))
    assert_same(
        built.weights, WEIGHTS | {f"draft.{name}": tensor for name, tensor in WEIGHTS.items()}
    )


def test_vllm_loader_reads_only_the_experts_of_its_rank(vllm: ModuleType, model: Path) -> None:
    built = Model()
    vllm.GdsloadModelLoader(load_config()).load_weights(built, model_config(model, {1}))
    expected = {name: tensor for name, tensor in WEIGHTS.items() if name != OF_EXPERT_0}
    assert_same(built.weights, expected)  # the scale of the other expert as well, as with vLLM
    assert gdsload.last_report().tensors == len(expected)


def test_vllm_reloads_other_weights_with_a_new_loader(
    vllm: ModuleType, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    vllm.register()
    built, config = Model(), model_config(model)
    vllm.GdsloadModelLoader(load_config()).load_weights(built, config)
    other = tmp_path_factory.mktemp("other")
    save_file({"embed": torch.zeros(6)}, other / "m.safetensors")
    reload_weights(load_config(), built, config, str(other))
    assert_same(built.weights, {"embed": torch.zeros(6)})


def test_vllm_reloads_only_the_experts_of_the_rank(vllm: ModuleType, model: Path) -> None:
    vllm.register()
    built = Model()
    reload_weights(load_config(), built, model_config(model, {1}))
    assert built.weights.keys() == WEIGHTS.keys() - {OF_EXPERT_0}
    assert gdsload.last_report().tensors == len(WEIGHTS) - 1


def test_vllm_reloads_all_weights_outside_of_its_workers(
    vllm: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.register()
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: None)
    built = Model()
    reload_weights(load_config(), built, model_config(model, {1}))
    assert_same(built.weights, WEIGHTS)


def test_vllm_without_a_filter_of_experts_reads_all_weights(vllm: ModuleType, model: Path) -> None:
    loader, built = vllm.GdsloadModelLoader(load_config()), Model()
    del loader.local_expert_ids  # as before vLLM had the filter
    loader._get_weights_iterator = lambda source: iter(WEIGHTS.items())
    assert_same(dict(loader.get_all_weights(model_config(model), built)), WEIGHTS)


def test_vllm_loader_takes_its_options_and_leaves_the_configuration(
    vllm: ModuleType, model: Path
) -> None:
    extra = {"cache": "buffered", "window_bytes": 16, "enable_weights_track": False}
    config = load_config(model_loader_extra_config=extra)
    loader = vllm.GdsloadModelLoader(config)
    assert_same(dict(loader._get_weights_iterator(source(model))), WEIGHTS)
    assert loader.load_config.model_loader_extra_config == {"enable_weights_track": False}
    assert (config.load_format, config.model_loader_extra_config) == ("gdsload", extra)


@pytest.mark.parametrize(
    ("distributed", "ranks", "expected"), [(True, 2, "tp"), (True, 1, None), (False, 2, None)]
)
def test_vllm_ranks_of_tensor_parallelism_share_the_reads_if_asked(
    vllm: ModuleType,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    distributed: bool,
    ranks: int,
    expected: str | None,
) -> None:
    groups = []

    def stream(files: list[str], device: str, group: object, **keywords: Any) -> Iterator[Any]:
        groups.append(group)
        return gdsload.stream(files, device, **keywords)

    monkeypatch.setattr(engine_weights, "stream", stream)
    tensor_parallel = SimpleNamespace(device_group="tp", world_size=ranks)
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: tensor_parallel)
    config = load_config(model_loader_extra_config={"distributed": distributed})
    assert_same(dict(vllm.GdsloadModelLoader(config)._get_weights_iterator(source(model))), WEIGHTS)
    assert groups == [expected]


def test_vllm_loader_refuses_a_wrong_value_of_distributed(vllm: ModuleType) -> None:
    with pytest.raises(ValueError, match="distributed=1: it must be true or false"):
        vllm.GdsloadModelLoader(load_config(model_loader_extra_config={"distributed": 1}))


def test_vllm_loader_compares_with_checksums_if_asked(vllm: ModuleType, damaged: Path) -> None:
    config = load_config(model_loader_extra_config={"verify": "checksum"})
    with pytest.raises(gdsload.IntegrityError, match="norm"):
        list(vllm.GdsloadModelLoader(config)._get_weights_iterator(source(damaged)))


def test_vllm_loader_refuses_checksums_of_reads_that_ranks_share(vllm: ModuleType) -> None:
    config = load_config(model_loader_extra_config={"verify": "checksum", "distributed": True})
    with pytest.raises(ValueError, match=r"distributed=True: verify= .* cannot be combined"):
        vllm.GdsloadModelLoader(config)


def test_vllm_module_keeps_its_own_reader(vllm: ModuleType, model: Path) -> None:
    list(vllm.GdsloadModelLoader(load_config())._get_weights_iterator(source(model)))
    stock = vllm.DefaultModelLoader(load_config(load_format="auto"))
    assert "stock.embed" in dict(stock._get_weights_iterator(source(model)))


def test_vllm_reads_tensors_of_torchao_itself(vllm: ModuleType, model: Path) -> None:
    loader = vllm.GdsloadModelLoader(load_config(safetensors_load_strategy="torchao"))
    assert "stock.embed" in dict(loader._get_weights_iterator(source(model)))


def test_vllm_reads_tensors_of_torchao_itself_when_it_loads_them_again(
    vllm: ModuleType, model: Path
) -> None:
    vllm.register()
    config, built = load_config(), Model()
    of_torchao = model_config(model, quantization="torchao")
    vllm.GdsloadModelLoader(config).load_weights(built, of_torchao)
    assert "stock.embed" in built.weights
    built.weights.clear()
    reload_weights(config, built, of_torchao)
    assert "stock.embed" in built.weights


def test_vllm_loader_says_when_there_are_no_safetensors_files(
    vllm: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = vllm.GdsloadModelLoader(load_config())
    assert list(loader._get_weights_iterator(source(tmp_path))) == []
    assert "has no safetensors files" in caplog.text


@pytest.mark.parametrize("strategy", ["eager", "prefetch"])
def test_vllm_loader_refuses_strategies_of_stock_reading(vllm: ModuleType, strategy: str) -> None:
    with pytest.raises(ValueError, match="safetensors-load-strategy"):
        vllm.GdsloadModelLoader(load_config(safetensors_load_strategy=strategy))


def test_vllm_register_adds_the_format_once(vllm: ModuleType) -> None:
    vllm.register()
    vllm.register()
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    assert loaders.registered == ["gdsload"]
    assert loaders._LOAD_FORMAT_TO_MODEL_LOADER["gdsload"] is vllm.GdsloadModelLoader


# SGLang


def test_sglang_without_the_variable_reads_itself(
    sglang: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GDSLOAD_SGLANG", raising=False)
    sglang.register()
    loader = sglang_loader("auto")
    assert [name for name, _ in loader._get_weights_iterator(source(model))] == ["stock"]


def hook_registry() -> Any:
    return importlib.import_module("sglang.srt.plugins.hook_registry")


def sglang_loader(load_format: str, **extra: Any) -> Any:
    """A loader of SGLang, which applies the hooks after all plugins have registered theirs."""
    hook_registry().HookRegistry.apply_hooks()
    loaders = importlib.import_module("sglang.srt.model_loader.loader")
    config = SimpleNamespace(
        load_format=SimpleNamespace(value=load_format), model_loader_extra_config=extra
    )
    return loaders.DefaultModelLoader(config)


@pytest.mark.parametrize("value", ["1", '{"cache": "direct", "window_bytes": 16}'])
@pytest.mark.parametrize("threads", [True, False])
def test_sglang_reads_by_gdsload_if_asked(
    sglang: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch, value: str, threads: bool
) -> None:
    monkeypatch.setenv("GDSLOAD_SGLANG", value)
    sglang.register()
    loader = sglang_loader("safetensors", enable_multithread_load=threads)
    found = dict(loader._get_weights_iterator(source(model, "draft.")))
    assert_same(found, {f"draft.{name}": tensor for name, tensor in WEIGHTS.items()})


def test_sglang_compares_with_checksums_if_asked(
    sglang: ModuleType, damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDSLOAD_SGLANG", '{"verify": "checksum"}')
    sglang.register()
    with pytest.raises(gdsload.IntegrityError, match="norm"):
        list(sglang_loader("auto")._get_weights_iterator(source(damaged)))


def test_sglang_passes_on_the_files_that_it_has_found(
    sglang: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDSLOAD_SGLANG", "1")
    sglang.register()
    weights = sglang_loader("auto")._get_weights_iterator(
        source(model),
        resolved_source=files_of(model)[:1],
        startup_prefetch_started=True,
        startup_prefetch_active=False,
    )
    assert [name for name, _ in weights] == ["embed", "layers.0.experts.0.weight"]


def test_sglang_keeps_other_load_formats(
    sglang: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDSLOAD_SGLANG", "1")
    sglang.register()
    loader = sglang_loader("fastsafetensors")
    assert [name for name, _ in loader._get_weights_iterator(source(model))] == ["stock"]


def test_sglang_runs_the_hooks_of_other_plugins_around_the_reading(
    sglang: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDSLOAD_SGLANG", "1")
    ran = []

    def around(original: Any, *arguments: Any, **keywords: Any) -> Any:
        ran.append(original)
        return original(*arguments, **keywords)

    hooks = hook_registry()
    target = "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator"
    hooks.HookRegistry.register(target, around, hooks.HookType.AROUND)
    sglang.register()
    hooks.HookRegistry.register(target, around, hooks.HookType.AROUND)
    assert_same(dict(sglang_loader("auto")._get_weights_iterator(source(model))), WEIGHTS)
    assert len(ran) == 2


@pytest.mark.parametrize("value", ["yes", "[1]", '{"windows": 1}'])
def test_sglang_loads_no_weights_with_a_wrong_variable(
    sglang: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("GDSLOAD_SGLANG", value)
    sglang.register()  # SGLang would go on after an error of it
    loader = sglang_loader("auto")
    with pytest.raises(ValueError, match=r"GDSLOAD_SGLANG|unknown options: windows"):
        loader._get_weights_iterator(source(model))


# What both share


def test_names_of_files_may_have_superscript_digits() -> None:
    names = ["x\u00b210.safetensors", "x\u00b22.safetensors"]
    assert sorted(names, key=engine_weights._natural_order) == names[::-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"windows": 1, "cache": "auto"},
            "unknown options: windows; gdsload knows device",
        ),
        ({"window_bytes": 0}, "window_bytes=0: it must be a number of bytes"),
        ({"held_bytes": True}, "held_bytes=True: it must be a number of bytes"),
        ({"stall_seconds": "1"}, "stall_seconds='1': it must be a number of seconds"),
        ({"options": "engine"}, "options='engine': it must be an object"),
        ({"backend": 1}, "backend=1: it must be a string"),
        ({"cache": "cold"}, "cache"),
        ({"verify": "md5"}, "verify='md5'"),
        ({"device": "floppy"}, "floppy"),
    ],
)
def test_reader_refuses_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightsReader(options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "floppy"}, gdsload.BackendUnavailable, "floppy.*unknown"),
        ({"backend": "posix", "options": {"dept": 1}}, TypeError, "no option 'dept'"),
        ({"backend": "posix", "options": {"pages": "big"}}, ValueError, "pages='big'"),
        ({"options": {"dept": 1}}, TypeError, "no option 'dept'"),
        ({"options": {"depth": "1"}}, TypeError, "depth='1'"),
    ],
)
def test_reader_refuses_wrong_backends_and_options_of_them(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        WeightsReader(options)


@pytest.mark.parametrize("backend", ["auto", "posix", "gds", "mmap"])
def test_reader_takes_backends_that_no_device_is_open_for(backend: str) -> None:
    assert WeightsReader({"backend": backend}).device is None


def test_list_of_files_is_streamed_as_one_checkpoint(model: Path) -> None:
    assert_same(dict(gdsload.stream(files_of(model))), WEIGHTS)
    assert gdsload.last_report().source == "2 files"


def test_last_of_two_tensors_of_one_name_counts(model: Path) -> None:
    save_file({"norm": torch.zeros(2)}, model / "m-10.safetensors")  # sorted after m-1
    found = dict(WeightsReader({}).read(files_of(model), "cpu", log))
    assert torch.equal(found["norm"], torch.zeros(2))


def test_options_for_a_device_are_left_out_of_reads_to_host_memory(model: Path) -> None:
    reader = WeightsReader({"options": {"threads": 4}})  # of gds_mt
    assert_same(dict(reader.read(files_of(model), "cpu", log)), WEIGHTS)


def test_reader_ends_the_load_when_it_is_closed(model: Path) -> None:
    before = gdsload.last_report()
    weights = WeightsReader({}).read(files_of(model), "cpu", log)
    next(weights)
    weights.close()  # type: ignore[attr-defined]
    assert gdsload.last_report() is not before
    assert gdsload.last_report().tensors == len(WEIGHTS)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that `stream` is asked for; all of them are the CPU, in place of a GPU with any
    backend."""
    asked: list[str] = []

    def stream(files: list[str], device: str, **keywords: Any) -> Iterator[Any]:
        asked.append(device)
        if device != "cpu":
            keywords["backend"] = "auto"
        return gdsload.stream(files, "cpu", **keywords)

    monkeypatch.setattr(engine_weights, "stream", stream)
    return asked


def test_tensors_that_a_model_keeps_are_bounded_on_the_device(
    model: Path, devices: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    reader = WeightsReader({"held_bytes": 30})
    weights = list(reader.read(files_of(model), "cuda:0", log))
    assert_same(dict(weights), WEIGHTS)
    assert len(weights) == len(WEIGHTS)  # each of them once
    assert devices == ["cuda:0", "cpu"]
    assert "handed over in host memory" in caplog.text


def test_each_name_of_the_cpu_is_host_memory(
    model: Path, devices: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    reader = WeightsReader({"held_bytes": 30, "device": "cpu:0"})
    assert_same(dict(list(reader.read(files_of(model), "cuda:0", log))), WEIGHTS)
    assert devices == ["cpu"]
    assert "handed over" not in caplog.text


def test_tensors_beyond_the_bound_need_no_backend_that_reads_to_the_host(
    model: Path, devices: list[str]
) -> None:
    reader = WeightsReader({"held_bytes": 30, "backend": "gds_mt"})
    assert_same(dict(list(reader.read(files_of(model), "cuda:0", log))), WEIGHTS)
    assert devices == ["cuda:0", "cpu"]
    with pytest.raises(gdsload.BackendUnavailable, match="gds_mt"):
        next(reader.read(files_of(model), "cpu", log))


def test_tensors_that_a_model_copies_stay_on_the_device(model: Path, devices: list[str]) -> None:
    reader = WeightsReader({"held_bytes": 30, "window_bytes": 16})
    copies = {name: tensor.clone() for name, tensor in reader.read(files_of(model), "cuda:0", log)}
    assert_same(copies, WEIGHTS)
    assert devices == ["cuda:0"]


def test_function_without_the_reader_is_refused() -> None:
    with pytest.raises(RuntimeError, match="does not read weights by safetensors_weights_iterator"):
        with_reader(files_of, ["safetensors_weights_iterator"], None)
