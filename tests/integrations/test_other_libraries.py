"""accelerate, diffusers and peft inside `accelerated`: equal to stock, and who read which file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file

import gdsload
import tinymodels
from command import run
from gdsload.events import Event, LoadEnded
from gdsload.integrations.transformers import hooks
from gdsload.memory import page_cache
from gdsload.report import LoadReport


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_logged", set())


@contextmanager
def reports(**how: Any) -> Iterator[list[LoadReport]]:
    """The reports of all loads inside `accelerated`, in any thread."""
    found: list[LoadReport] = []

    def on_event(event: Event) -> None:
        if isinstance(event, LoadEnded):
            found.append(event.report)

    with gdsload.accelerated(on_event=on_event, **how):
        yield found


def require_same(stock: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    assert stock.keys() == ours.keys()
    for name, tensor in stock.items():
        assert tinymodels.same_bytes(tensor, ours[name]), name


def require_read(found: list[LoadReport], files: list[Path], tensors: int) -> None:
    """gdsload has read each of these files, once."""
    assert sorted(report.source for report in found) == sorted(map(str, files))
    assert sum(report.tensors for report in found) == tensors
    assert {report.integration for report in found} == {""}


def modes(found: list[LoadReport]) -> set[str]:
    """The I/O modes by which bytes were read."""
    counts = [(path, nbytes) for report in found for path, nbytes in report.paths.items()]
    return {path.rpartition("/")[2] for path, nbytes in counts if nbytes}


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is in the page cache, as far as loads know."""
    monkeypatch.setattr(page_cache, "mostly_resident", lambda *place: False)
    monkeypatch.setattr(page_cache, "wholly_resident", lambda *place: False)


def contents(folder: Path) -> dict[str, bytes]:
    """What accelerate has offloaded, by the names of its files."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def require_stock(found: list[LoadReport], file: Path, library: str) -> None:
    """The library has read this file, and the one report says so."""
    (report,) = found
    assert (report.source, report.integration, report.paths) == (str(file), "stock", {})
    reason = f"it is not a .safetensors file: {library} reads it"
    assert report.integration_reason == reason and reason in report.summary()


# --- diffusers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model of diffusers, saved in three ways."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    model = diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=2, sample_size=8
    )
    place = tmp_path_factory.mktemp("vae")
    model.save_pretrained(place / "file")
    model.save_pretrained(place / "shards", max_shard_size="10KB")
    model.save_pretrained(place / "pickled", safe_serialization=False)
    assert len(list((place / "shards").glob("*.safetensors"))) > 2
    return {way: place / way for way in ("file", "shards", "pickled")}


DIFFUSERS: dict[str, dict[str, Any]] = {
    "default": {},
    "not low_cpu_mem_usage": {"low_cpu_mem_usage": False},
    "disable_mmap": {"disable_mmap": True},
    "disable_mmap, not low_cpu_mem_usage": {"disable_mmap": True, "low_cpu_mem_usage": False},
    "cast": {"torch_dtype": torch.float16},
    "device_map": {"device_map": {"": "cpu"}},
    "parallel": {},
    "parallel, disable_mmap": {"disable_mmap": True},
}


@pytest.mark.parametrize("how", DIFFUSERS)
@pytest.mark.parametrize("way", ["file", "shards"])
def test_diffusers_model_equals_stock_and_is_read_by_gdsload(
    way: str, how: str, vae: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers

    modeling = sys.modules["diffusers.models.modeling_utils"]
    monkeypatch.setattr(modeling, "HF_ENABLE_PARALLEL_LOADING", how.startswith("parallel"))
    words = DIFFUSERS[how]
    stock = diffusers.AutoencoderKL.from_pretrained(vae[way], **words)
    with reports() as found:
        ours = diffusers.AutoencoderKL.from_pretrained(vae[way], **words)
    require_same(stock.state_dict(), ours.state_dict())
    require_read(found, list(vae[way].glob("*.safetensors")), len(stock.state_dict()))
    assert modes(found) == ({"buffered"} if "disable_mmap" in how else {"mapped"})


def test_diffusers_offload_to_disk_equals_stock(vae: dict[str, Path], tmp_path: Path) -> None:
    import diffusers

    words: dict[str, Any] = {
        "device_map": {"encoder": "cpu", "quant_conv": "cpu", "post_quant_conv": "cpu",
                       "decoder": "disk"},
    }  # fmt: skip
    diffusers.AutoencoderKL.from_pretrained(vae["shards"], offload_folder=tmp_path / "a", **words)
    with reports() as found:
        diffusers.AutoencoderKL.from_pretrained(
            vae["shards"], offload_folder=tmp_path / "b", **words
        )
    assert len(found) == len(list(vae["shards"].glob("*.safetensors")))
    files = contents(tmp_path / "a")
    assert files and files == contents(tmp_path / "b")


@pytest.mark.parametrize("how", ["default", "disable_mmap", "in memory"])
@pytest.mark.parametrize("way", ["file", "shards"])
def test_diffusers_offload_to_disk_maps_cold_files(
    way: str, how: str, vae: dict[str, Path], cold: None, tmp_path: Path
) -> None:
    """So it needs no memory for a whole file. A model that stays in memory is read into it."""
    import diffusers

    place = "cpu" if how == "in memory" else "disk"
    device_map = dict.fromkeys(("encoder", "quant_conv", "post_quant_conv"), "cpu")
    with reports(page_cache="keep") as found:
        diffusers.AutoencoderKL.from_pretrained(
            vae[way],
            device_map={**device_map, "decoder": place},
            offload_folder=tmp_path / "off",
            disable_mmap=how == "disable_mmap",
        )
    assert found and (modes(found) == {"mapped"}) == (how == "default")


@pytest.mark.parametrize("disable_mmap", [False, True])
def test_diffusers_single_file_equals_stock(disable_mmap: bool, vae: dict[str, Path]) -> None:
    from diffusers.loaders.single_file_utils import load_single_file_checkpoint

    (file,) = vae["file"].glob("*.safetensors")
    stock = load_single_file_checkpoint(str(file), disable_mmap=disable_mmap)
    with reports() as found:
        ours = load_single_file_checkpoint(str(file), disable_mmap=disable_mmap)
    require_same(stock, ours)
    require_read(found, [file], len(stock))


def test_diffusers_pickled_weights_are_reported_as_stock(vae: dict[str, Path]) -> None:
    import diffusers

    (file,) = vae["pickled"].glob("*.bin")
    stock = diffusers.AutoencoderKL.from_pretrained(vae["pickled"])
    with reports() as found:
        ours = diffusers.AutoencoderKL.from_pretrained(vae["pickled"])
    require_same(stock.state_dict(), ours.state_dict())
    require_stock(found, file, "diffusers")


def test_diffusers_class_in_from_pretrained_equals_stock(vae: dict[str, Path]) -> None:
    """The report of the whole load names a file that the library reads by itself."""
    import diffusers

    stock = diffusers.AutoencoderKL.from_pretrained(vae["file"])
    (file,) = vae["pickled"].glob("*.bin")
    for way in ("file", "pickled"):
        ours = gdsload.from_pretrained(vae[way], cls=diffusers.AutoencoderKL)
        require_same(stock.state_dict(), ours.state_dict())
        report = gdsload.last_report()
        entry = "load_file" if way == "file" else "stock"
        assert report.source == str(vae[way]) and report.integration == entry
        assert (f"gdsload on {file}" in report.refusals) is (way == "pickled")


def test_diffusers_damaged_file_raises_what_stock_raises(
    vae: dict[str, Path], tmp_path: Path
) -> None:
    from diffusers.models.model_loading_utils import load_state_dict

    (file,) = vae["file"].glob("*.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(OSError, match="Unable to load weights"):
            load_state_dict(str(tmp_path / "cut.safetensors"))
        with gdsload.accelerated(), pytest.raises(OSError, match="Unable to load weights"):
            load_state_dict(str(tmp_path / "cut.safetensors"))


def test_library_that_is_imported_inside_is_served_then_and_later(vae: dict[str, Path]) -> None:
    """Its modules keep replacements that they have imported from each other."""
    code = """
import sys
import gdsload

def load(way):
    from diffusers import AutoencoderKL
    AutoencoderKL.from_pretrained(sys.argv[1] + way, disable_mmap=True)

def kinds(way):
    reports = []
    with gdsload.accelerated(on_event=lambda event: reports.append(getattr(event, "report", None))):
        load(way)
    reports = filter(None, reports)
    return [r.integration or list(r.paths) for r in reports]

assert "diffusers" not in sys.modules
for _ in range(2):
    (pickled,), (paths,) = kinds("/pickled"), kinds("/file")
    assert pickled == "stock", pickled
    assert paths and not any("mapped" in path for path in paths), paths
    before = gdsload.last_report()
    load("/file")
    load("/pickled")
    assert gdsload.last_report() is before, "outside, gdsload reads nothing"
"""
    command = [sys.executable, "-c", code, str(vae["file"].parent)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# --- accelerate -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.saved("qwen2", tmp_path_factory)


def empty(source: Path) -> Any:
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(transformers.AutoConfig.from_pretrained(source))


OFFLOADED = {
    "model.embed_tokens": "cpu",
    "model.layers": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}
ACCELERATE: dict[str, dict[str, Any]] = {
    "default": {},
    "one device": {"device_map": {"": "cpu"}},
    "offload_state_dict": {"device_map": {"": "cpu"}, "offload_state_dict": True},
    "cast": {"device_map": {"": "cpu"}, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("how", ACCELERATE)
def test_accelerate_load_equals_stock_and_is_read_by_gdsload(how: str, qwen: Path) -> None:
    import accelerate

    stock, ours = empty(qwen), empty(qwen)
    accelerate.load_checkpoint_in_model(stock, str(qwen), **ACCELERATE[how])
    with reports() as found:
        accelerate.load_checkpoint_in_model(ours, str(qwen), **ACCELERATE[how])
    require_same(stock.state_dict(), ours.state_dict())
    files = list(qwen.glob("*.safetensors"))
    with gdsload.Checkpoint.open(qwen) as checkpoint:
        require_read(found, files, len(checkpoint.tensors))


def test_accelerate_load_to_the_cpu_needs_no_backend_that_reads_there(qwen: Path) -> None:
    """accelerate opens a file on the CPU for its names, and loads to it unless told otherwise."""
    import accelerate

    stock, ours = empty(qwen), empty(qwen)
    accelerate.load_checkpoint_in_model(stock, str(qwen))
    with reports(backend="gds_mt") as found:
        accelerate.load_checkpoint_in_model(ours, str(qwen))
        with pytest.raises(gdsload.BackendUnavailable, match="gds_mt"):
            gdsload.load_file(next(qwen.glob("*.safetensors")), backend="gds_mt")
    require_same(stock.state_dict(), ours.state_dict())
    assert {report.source for report in found} >= set(map(str, qwen.glob("*.safetensors")))


def test_accelerate_offload_to_disk_equals_stock(qwen: Path, tmp_path: Path) -> None:
    import accelerate

    stock, ours = empty(qwen), empty(qwen)
    accelerate.load_checkpoint_in_model(stock, str(qwen), OFFLOADED, tmp_path / "a")
    with reports() as found:
        accelerate.load_checkpoint_in_model(ours, str(qwen), OFFLOADED, tmp_path / "b")
    assert {tensor.device.type for tensor in ours.state_dict().values()} == {"cpu", "meta"}
    for name, tensor in stock.state_dict().items():
        if tensor.device.type == "cpu":
            assert tinymodels.same_bytes(tensor, ours.state_dict()[name]), name
    written, same = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert json.loads(written.pop("index.json")) == json.loads(same.pop("index.json"))
    assert written and written == same
    with gdsload.Checkpoint.open(qwen) as checkpoint:
        require_read(found, list(qwen.glob("*.safetensors")), len(checkpoint.tensors))


@pytest.mark.parametrize("how", ["default", "direct", "checksum"])
def test_accelerate_offload_to_disk_maps_cold_files(
    how: str, qwen: Path, cold: None, tmp_path: Path
) -> None:
    """So it needs no memory for a whole file, unless it is asked to do something else."""
    import accelerate

    for file in qwen.glob("*.safetensors"):
        shutil.copy(file, tmp_path)
    shutil.copy(qwen / "model.safetensors.index.json", tmp_path)
    words: dict[str, str] = {"direct": {"cache": "direct"}, "checksum": {"verify": "checksum"}}.get(
        how, {}
    )
    assert run("manifest", tmp_path, "--algorithm", "sha256").exit_code == 0
    with reports(page_cache="keep", **words) as found:
        accelerate.load_checkpoint_in_model(empty(qwen), str(tmp_path), OFFLOADED, tmp_path / "off")
    assert found and (modes(found) == {"mapped"}) == (how == "default")


def test_accelerate_that_asks_for_each_tensor_gets_what_stock_gets(qwen: Path) -> None:
    """As it does for several GPUs. Each is a load."""
    from accelerate.utils import modeling

    file = next(qwen.glob("*.safetensors"))
    with reports() as found, modeling.safe_open(file, framework="pt", device="cpu") as opened:
        ours = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    require_same(load_file(file), ours)
    assert len(found) == len(ours)


def test_accelerate_dispatch_with_offload_to_disk_answers_as_stock(
    qwen: Path, tmp_path: Path
) -> None:
    import accelerate

    def dispatched(folder: Path) -> Any:
        model = empty(qwen)
        return accelerate.load_checkpoint_and_dispatch(
            model, str(qwen), device_map=OFFLOADED, offload_folder=folder
        ).eval()

    stock = tinymodels.answers(dispatched(tmp_path / "a"))
    with reports() as found:
        ours = dispatched(tmp_path / "b")
        read = len(found)
        answers = tinymodels.answers(ours)
    assert read > 0 and len(found) == read, "a forward pass reads what accelerate has offloaded"
    for one, other in zip(stock, answers, strict=True):
        assert tinymodels.same_bytes(one, other)


def test_accelerate_map_to_disk_alone_fails_as_stock(qwen: Path, tmp_path: Path) -> None:
    from accelerate.utils.modeling import load_state_dict

    file = str(next(qwen.glob("*.safetensors")))
    with pytest.raises(SafetensorError):
        load_state_dict(file, {"": "disk"})
    with gdsload.accelerated(), pytest.raises(SafetensorError):
        load_state_dict(file, {"": "disk"})


def test_accelerate_pickled_weights_are_reported_as_stock(qwen: Path, tmp_path: Path) -> None:
    import accelerate

    stock = transformers.Qwen2ForCausalLM.from_pretrained(qwen)
    file = tmp_path / "pytorch_model.bin"
    torch.save(stock.state_dict(), file)
    ours = empty(qwen)
    with reports() as found:
        accelerate.load_checkpoint_in_model(ours, str(tmp_path))
    require_same(stock.state_dict(), ours.state_dict())
    require_stock(found, file, "accelerate")


# --- peft -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter of the model, saved in two ways."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    wanted = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    base = transformers.AutoModelForCausalLM.from_pretrained(qwen)
    adapted = tinymodels.perturbed(peft.get_peft_model(base, wanted))
    place = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(place / "file")
    adapted.save_pretrained(place / "pickled", safe_serialization=False)
    return {way: place / way for way in ("file", "pickled")}


def by_load_peft_weights(source: Path, base: Path) -> Mapping[str, Any]:
    import peft

    return peft.load_peft_weights(str(source), device="cpu")  # type: ignore[no-any-return]


def by_peft_model(source: Path, base: Path) -> Mapping[str, Any]:
    import peft

    torch.manual_seed(0)
    model = peft.PeftModel.from_pretrained(empty(base), str(source), torch_device="cpu")
    return model.state_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize("load", [by_load_peft_weights, by_peft_model])
def test_peft_adapter_equals_stock_and_is_read_by_gdsload(
    load: Callable[[Path, Path], Mapping[str, Any]], adapter: dict[str, Path], qwen: Path
) -> None:
    source = adapter["file"]
    stock = load(source, qwen)
    with reports() as found:
        ours = load(source, qwen)
    require_same(stock, ours)
    file = source / "adapter_model.safetensors"
    require_read(found, [file], sum("lora" in name for name in stock))


@pytest.mark.parametrize("load", [by_load_peft_weights, by_peft_model])
def test_peft_pickled_adapter_is_reported_as_stock(
    load: Callable[[Path, Path], Mapping[str, Any]], adapter: dict[str, Path], qwen: Path
) -> None:
    stock = load(adapter["pickled"], qwen)
    with reports() as found:
        ours = load(adapter["pickled"], qwen)
    require_same(stock, ours)
    require_stock(found, adapter["pickled"] / "adapter_model.bin", "peft")


def test_function_with_other_parameters_is_left_alone_and_named_once(
    adapter: dict[str, Path],
    vae: dict[str, Path],
    qwen: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import diffusers
    import peft.utils.save_and_load as reader

    name, original = "peft.utils.save_and_load.torch_load", reader.torch_load

    def torch_load(path: Any, map_location: Any) -> Any:
        return original(path, map_location=map_location)

    monkeypatch.setattr(reader, "torch_load", torch_load)
    monkeypatch.setattr(hooks.patcher, "_logged", set())
    for _ in range(2):
        with reports() as found:
            assert reader.torch_load is torch_load
            by_load_peft_weights(adapter["pickled"], qwen)
            assert found == []
            diffusers.AutoencoderKL.from_pretrained(vae["pickled"])
        assert found[0].refusals[name].startswith("left as it is, since it is not as expected")
    assert len([one for one in caplog.records if name in one.message]) == 1
    monkeypatch.undo()
    with gdsload.accelerated():
        pass
    assert hooks.patcher.misfits == {}
