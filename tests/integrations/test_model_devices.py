"""from_pretrained to the GPUs of the CUDA double: exact bytes with each backend.

torch has no CUDA here, and transformers sees no device. Replaced are the device that a parameter
reports and the source of its memory: a tensor of "cuda:1" is a CPU tensor over the double's memory
of that device. The code between the two is the code that runs on a machine with GPUs.
"""

from __future__ import annotations

import gc
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import equal
import gdsload
import gpudoubles
import tinymodels
from command import run
from devicetensors import device_tensor
from gdsload.backends import staging
from gdsload.checkpoint import Checkpoint
from gdsload.errors import (
    BackendUnavailable,
    IntegrityError,
    PlacementError,
    ReadError,
)
from gdsload.integrations.transformers import lazy_slices, load_plan, patches
from gdsload.integrations.transformers.model_reader import ModelReader
from gdsload.integrations.transformers.readahead_queue import ReadaheadQueue
from gdsload.loading import session, torch_device
from gdsload.memory import host_buffers, late_copies, staging_ring
from gdsload.system import gpu, shared_libraries
from gdsload.system.cancellation import CancelToken, LoadCancelled
from gpudoubles import ERRNO, Doubles
from windows import small_windows

if transformers.__version__[0] < "5":
    pytest.skip("transformers 4.57 has no seam that knows devices", allow_module_level=True)

OPTIONS: dict[str, dict[str, Any]] = {
    "posix": {"ring_bytes": 1 << 20, "request_bytes": 16 << 10},
    "gds": {"ring_bytes": 1 << 20, "request_bytes": 16 << 10},
    "gds_mt": {"ring_bytes": 1 << 20, "request_bytes": 16 << 10},
}
NAMES = [
    name
    for name, (class_name, _) in tinymodels.ARCHITECTURES.items()
    if hasattr(transformers, class_name)
]
Places = Callable[[str], str]


@pytest.fixture
def doubles(loading: Doubles) -> Doubles:
    return loading


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Callable[[Places], None]:
    """Says where parameters live, by their names."""

    def say(places: Places) -> None:
        monkeypatch.setattr(load_plan, "_places", lambda _: places)

    return say


def device_of(doubles: Doubles, tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is a device's."""
    return bool(doubles.cuda.cuda_double_is_device(tensor.data_ptr(), tensor.nbytes))


def loaded(source: Path, backend: str, **words: Any) -> Any:
    with (
        small_windows(1 << 14, 1 << 15),
        gdsload.accelerated(options=OPTIONS[backend], backend=backend),
    ):
        return gdsload.from_pretrained(source, **words)


@pytest.mark.parametrize("name", NAMES)
def test_model_on_a_device_equals_transformers(
    name: str, doubles: Doubles, live: Callable[[Places], None], tmp_path: Path
) -> None:
    """With all three backends: the same model; kept tensors are on the device that was chosen."""
    live(lambda _: "cuda:0")
    with equal.nothing_uninitialised(), equal.by_transformers_alone():
        model = tinymodels.build(name)
        model.save_pretrained(tmp_path / "a", max_shard_size="60KB")
        stock, stock_info = type(model).from_pretrained(tmp_path / "a", output_loading_info=True)
    for backend in OPTIONS:
        before = doubles.cuda_log["copied"]
        with equal.nothing_uninitialised():
            ours, our_info = loaded(tmp_path / "a", backend, output_loading_info=True)
        report = gdsload.last_report()
        assert (report.integration, report.backend, report.device) == ("hook", backend, "cuda:0")
        used = {path.partition("/")[0] for path, size in report.paths.items() if size}
        assert used == {backend}
        assert doubles.cuda_log["copied"] - before == report.wanted_bytes
        assert tinymodels.differences(stock, ours) == []
        assert stock_info == our_info
        there = [t for t in ours.state_dict().values() if device_of(doubles, t)]
        assert all(t.untyped_storage().data_ptr() % 256 == 0 for t in there)
        assert len(there) >= report.fates["keep"] > 0


def test_cancelled_load_to_a_device_does_not_wait_for_its_reads(
    doubles: Doubles,
    live: Callable[[Places], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tinymodels.build("llama").save_pretrained(tmp_path)
    live(lambda _: "cuda:0")
    before = doubles.cuda_log["streams"]
    waits, token = threading.Event(), CancelToken()
    ended: list[BaseException] = []
    take = ReadaheadQueue.take

    def noted(queue: ReadaheadQueue, one: Any) -> torch.Tensor:
        waits.set()
        return take(queue, one)

    def load() -> None:
        try:
            token.run(loaded, tmp_path, "posix")
        except BaseException as error:
            ended.append(error)

    monkeypatch.setattr(ReadaheadQueue, "take", noted)
    doubles.hold_copies(True)
    loader = threading.Thread(target=load)
    try:
        loader.start()
        assert waits.wait(60.0)
        token.ask()
        loader.join(60.0)
        assert len(ended) == 1 and isinstance(ended[0], LoadCancelled)
    finally:
        doubles.hold_copies(False)
        loader.join()
    ended.clear()  # its frames refer to the pipeline
    end = time.monotonic() + 60.0
    while doubles.cuda_log["streams"] != before:  # it is closed when the copies have ended
        late_copies.forget_ended()
        staging_ring.release_rings()
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("backend", OPTIONS)
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
def test_model_cast_on_a_device_equals_transformers(
    name: str,
    backend: str,
    doubles: Doubles,
    live: Callable[[Places], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is cast is read to the device in windows, and cast there by torch."""
    model = tinymodels.build(name)
    model.save_pretrained(tmp_path)
    stock = type(model).from_pretrained(tmp_path, dtype="bfloat16")
    live(lambda _: "cuda:0")
    idle = doubles.cuda_log["used"]
    seen: list[int] = []

    def noted(shape: Any, dtype: Any, device: str) -> torch.Tensor:
        made = device_tensor(shape, dtype, device)
        seen.append(doubles.cuda_log["used"] - idle)
        return made

    monkeypatch.setattr(torch_device, "empty", noted)
    ours = loaded(tmp_path, backend, dtype="bfloat16")
    report = gdsload.last_report()
    assert tinymodels.differences(stock, ours) == []
    assert report.fates["convert"] > 0
    assert report.paths and doubles.cuda_log["copied"] >= report.wanted_bytes
    # The ring with what aligns it, what is kept, two windows of 16 KiB, and the largest tensor.
    kept = sum(p.nbytes for p in ours.parameters() if device_of(doubles, p))
    largest = max(2 * p.nbytes for p in ours.parameters())
    assert max(seen) < kept + (1 << 15) + 2 * largest + (2 << 20)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.saved("qwen3", tmp_path_factory)


PARTS = {"layers.0.": "cuda:0", "layers.1.": "cuda:1"}


def spread(name: str) -> str:
    """Two layers on a device each, the rest on the CPU."""
    return next((device for part, device in PARTS.items() if part in name), "cpu")


@pytest.mark.parametrize("backend", OPTIONS)
def test_several_devices_are_filled_concurrently(
    backend: str,
    qwen: Path,
    doubles: Doubles,
    live: Callable[[Places], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ring each, the CPU besides: all of them are filled before transformers asks for anything.
    What is for the CPU does not go by a backend that reaches devices alone."""
    stock = transformers.AutoModelForCausalLM.from_pretrained(qwen)
    live(spread)
    begin = ModelReader.begin_device_reads
    filled: list[str] = []

    def noted(self: ModelReader) -> None:
        begin(self)
        deadline = time.monotonic() + 60
        for device, feed in self._device_queues.items():
            (window,) = feed._posted
            while not window.reads.arrived:
                assert time.monotonic() < deadline
                window.reads.poll(window.slices[0])
            assert feed.taken_tensors == 0
            filled.append(device)

    monkeypatch.setattr(ModelReader, "begin_device_reads", noted)
    ours = loaded(qwen, backend)
    assert filled == ["cuda:0", "cuda:1"]
    report = gdsload.last_report()
    assert report.device == "cpu,cuda:0,cuda:1"
    assert tinymodels.differences(stock, ours) == []
    for name, parameter in ours.named_parameters():
        assert device_of(doubles, parameter) == (spread(name) != "cpu"), name
    assert sorted(made.ordinal for made in staging_ring.rings()) == [0, 1]
    assert sum(report.paths.values()) > 0


@pytest.mark.parametrize("backend", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verified_model_compares_bytes_on_devices(
    backend: str, dtype: str, doubles: Doubles, live: Callable[[Places], None], tmp_path: Path
) -> None:
    tinymodels.build("qwen3").save_pretrained(tmp_path)
    assert run("manifest", tmp_path, "--algorithm", "sha256").exit_code == 0
    live(spread)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    how: dict[str, Any] = {"backend": backend, "options": OPTIONS[backend], "verify": "checksum"}
    with small_windows(1 << 14, 1 << 15), gdsload.accelerated(**how):
        ours = gdsload.from_pretrained(tmp_path, dtype=dtype)
    assert tinymodels.differences(stock, ours) == []
    report = gdsload.last_report()
    assert report.verified_bytes == report.wanted_bytes > 0
    path = tmp_path / "model.safetensors"
    with Checkpoint.open(path) as checkpoint:
        info = checkpoint.info("model.layers.1.mlp.up_proj.weight")
    raw = bytearray(path.read_bytes())
    raw[info.offset + 5] ^= 8
    path.write_bytes(raw)
    with gdsload.accelerated(**how), pytest.raises(IntegrityError, match=info.name):
        gdsload.from_pretrained(tmp_path, dtype=dtype)


def test_backend_for_devices_alone_needs_a_device(qwen: Path, doubles: Doubles) -> None:
    with pytest.raises(BackendUnavailable, match="does not load into DRAM"):
        loaded(qwen, "gds_mt")


def test_second_load_registers_nothing(
    qwen: Path, doubles: Doubles, live: Callable[[Places], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pinned ring and its pipelines are there, for a load of any kind."""
    backend = "posix"
    live(spread)
    opened: list[str] = []
    for kind in (staging_ring.StagingRing, staging.StagingPipeline):
        make = kind.__init__

        def noted(self: Any, *args: Any, make: Any = make, **named: Any) -> None:
            opened.append(type(self).__name__)
            make(self, *args, **named)

        monkeypatch.setattr(kind, "__init__", noted)
    loaded(qwen, backend)
    assert sorted(opened) == ["StagingPipeline", "StagingPipeline", "StagingRing", "StagingRing"]
    pins = doubles.cuda_log["pins"]
    loaded(qwen, backend)
    how: dict[str, Any] = {"backend": backend, "options": OPTIONS[backend]}
    gdsload.load_file(qwen, "cuda:1", **how)
    assert len(list(gdsload.stream(qwen, "cuda:0", **how))) > 0
    with gdsload.safe_open(qwen, device="cuda:0", **how) as opened_file:
        opened_file.get_tensor("model.norm.weight")
    assert len(opened) == 4
    assert pins == doubles.cuda_log["pins"]


@pytest.mark.parametrize("backend", OPTIONS)
def test_load_to_a_device_takes_only_the_ring_of_host_memory(
    backend: str,
    qwen: Path,
    doubles: Doubles,
    live: Callable[[Places], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No load to a device takes memory of the host for what it reads."""

    def never(*_: Any) -> None:
        raise AssertionError("host memory was taken")

    live(lambda _: "cuda:0")
    monkeypatch.setattr(host_buffers.HostBuffers, "__init__", never)
    for module in (session, lazy_slices):
        monkeypatch.setattr(module, "map_shard", never)
    how: dict[str, Any] = {"backend": backend, "options": OPTIONS[backend]}
    loaded(qwen, backend)
    loaded(qwen, backend, dtype="float16")
    gdsload.load_file(qwen, "cuda:0", **how)
    for _ in gdsload.stream(qwen, "cuda:0", **how):
        pass
    with gdsload.safe_open(qwen, device="cuda:0", **how) as opened:
        opened.get_tensors()
        _ = opened.get_slice("model.embed_tokens.weight")[3:5]
    assert [made.nbytes for made in staging_ring.rings()] == [1 << 20]


def test_full_device_raises(qwen: Path, doubles: Doubles, live: Callable[[Places], None]) -> None:
    live(lambda _: "cuda:0")
    doubles.set(nbytes=gpu.SPARE_BYTES + 4096)
    with pytest.raises(PlacementError, match="cuda:0") as caught:
        loaded(qwen, "posix")
    assert caught.value.missing_bytes


def test_failed_read_to_a_device_raises(
    qwen: Path, doubles: Doubles, live: Callable[[Places], None]
) -> None:
    """No model escapes, and a backend that failed is not kept for the next load."""
    live(lambda _: "cuda:0")
    before = doubles.cuda_log["used"]
    doubles.fault("cuFileRead", ERRNO, 5, skip=2, times=-1)
    with pytest.raises(ReadError, match=r"model-0000\d"):
        loaded(qwen, "gds_mt")
    (ring,) = staging_ring.rings()
    assert not ring.users
    assert loaded(qwen, "posix") is not None
    assert [each.kind for each in staging_ring.rings()] == [staging_ring.VRAM, staging_ring.DRAM]
    gc.collect()
    staging_ring.release_rings()
    assert doubles.cuda_log["used"] == before


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("lands", ["before", "meanwhile"])
def test_prefetched_tensors_are_not_read_again(
    lands: str,
    dtype: str,
    qwen: Path,
    doubles: Doubles,
    live: Callable[[Places], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is in the device's memory, and stays there or is cast from there; for what is kept no
    second memory is taken, neither by torch's allocator nor ahead of it."""
    live(lambda _: "cuda:0")
    stock = transformers.AutoModelForCausalLM.from_pretrained(qwen, dtype=dtype)
    begin = ModelReader.begin_device_reads
    gc.collect()
    before = doubles.cuda_log
    doubles.hold_copies(lands == "meanwhile")
    with gdsload.prefetch(qwen, "cuda:0", cache="direct", options=OPTIONS["posix"]) as ahead:
        assert ahead.wait() if lands == "before" else ahead._posted.wait(60)
        landed = doubles.cuda_log

        def claimed(self: ModelReader) -> None:
            begin(self)
            assert ahead.progress().claimed_bytes > 0
            doubles.hold_copies(False)

        monkeypatch.setattr(ModelReader, "begin_device_reads", claimed)
        ours = loaded(qwen, "posix", dtype=dtype)
        monkeypatch.setattr(ModelReader, "begin_device_reads", begin)
    report = gdsload.last_report()
    assert report.paths == {"prefetched": report.wanted_bytes}
    assert report.read_bytes == 0 and report.device == "cuda:0"
    assert tinymodels.differences(stock, ours) == []
    assert doubles.cuda_log["allocations"] == landed["allocations"]
    assert (report.fates["keep"] > 0) == (dtype == "float32")
    there = [t for t in ours.state_dict().values() if device_of(doubles, t)]
    assert len(there) >= report.fates["keep"]
    del ours, there
    gc.collect()
    staging_ring.release_rings()
    assert doubles.cuda_log["used"] == before["used"]
    loaded(qwen, "posix")
    assert gdsload.last_report().read_bytes > 0


def test_partly_prefetched_model_reads_only_the_rest(
    qwen: Path, doubles: Doubles, live: Callable[[Places], None]
) -> None:
    """To one of two devices, or to the host: the rest is read to where it belongs."""
    live(spread)
    stock = transformers.AutoModelForCausalLM.from_pretrained(qwen)
    with gdsload.Checkpoint.open(qwen) as checkpoint:
        names = [name for name in checkpoint.tensors if "layers.0." in name]
    for device in ("cuda:0", "cuda:1", "cpu"):
        with gdsload.prefetch(qwen, device, names=names, cache="direct") as ahead:
            assert ahead.wait()
            ours = loaded(qwen, "posix")
        report = gdsload.last_report()
        claimed = report.paths.pop("prefetched", 0)
        assert claimed == (0 if device == "cuda:1" else ahead.progress().wanted_bytes)
        assert report.paths and report.read_bytes > 0
        assert tinymodels.differences(stock, ours) == []
        for name, parameter in ours.named_parameters():
            assert device_of(doubles, parameter) == (spread(name) != "cpu"), name


def test_warmup_leaves_out_prefetched_parameters(
    qwen: Path, doubles: Doubles, live: Callable[[Places], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers has torch's allocator take a model's memory at once: what was prefetched to its
    device, to stay, has some."""
    live(spread)
    asked: list[dict[str, str]] = []
    inner = types.ModuleType("modeling_utils")

    def warm_up(model: Any, expanded_device_map: Any, hf_quantizer: Any) -> None:
        asked.append(expanded_device_map)

    inner.caching_allocator_warmup = warm_up  # type: ignore[attr-defined]
    (swap,) = patches._patch_warmup(inner)
    begin = ModelReader.begin_device_reads

    def noted(self: ModelReader) -> None:
        wanted = {name: spread(name) for name in self.plan.parameters.values()}
        swap.value(None, wanted, None)
        begin(self)

    monkeypatch.setattr(ModelReader, "begin_device_reads", noted)
    loaded(qwen, "posix")
    with gdsload.prefetch(qwen, "cuda:1", cache="direct") as ahead:
        assert ahead.wait()
        loaded(qwen, "posix")
        swap.value(None, {"a": "cuda:1"}, None)
    first, second, outside = asked
    assert {"cuda:0", "cuda:1", "cpu"} == set(first.values())
    assert second == {name: device for name, device in first.items() if device != "cuda:1"}
    assert outside == {"a": "cuda:1"}


def test_device_reads_begin_without_the_patch_for_threads(
    qwen: Path, doubles: Doubles, live: Callable[[Places], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin with the first look at the slices."""
    from transformers import core_model_loading

    live(spread)
    begun: list[ModelReader] = []
    begin, is_true = ModelReader.begin_device_reads, core_model_loading.is_env_variable_true

    def noted(self: ModelReader) -> None:
        begun.append(self)
        begin(self)

    monkeypatch.setattr(ModelReader, "begin_device_reads", noted)
    monkeypatch.setattr(core_model_loading, "is_env_variable_true", lambda *names: is_true(*names))
    stock = transformers.AutoModelForCausalLM.from_pretrained(qwen)
    ours = loaded(qwen, "posix")
    report = gdsload.last_report()
    assert "transformers.core_model_loading.is_env_variable_true" in report.refusals
    assert len(begun) == 1
    assert tinymodels.differences(stock, ours) == []


def test_pooled_bytes_are_not_read_again(
    qwen: Path, doubles: Doubles, live: Callable[[Places], None]
) -> None:
    live(lambda _: "cuda:0")
    stock = transformers.AutoModelForCausalLM.from_pretrained(qwen)
    with gdsload.warmup.HostPool(1 << 30):
        assert gdsload.prefetch(qwen, tier="pool", cache="direct").wait()
        for _ in range(2):
            with gdsload.accelerated(cache="direct"):
                ours = gdsload.from_pretrained(qwen)
            report = gdsload.last_report()
            assert report.paths["pool"] == report.wanted_bytes
            assert report.read_bytes == 0
            assert tinymodels.differences(stock, ours) == []


def test_without_cuda_torch_moves_the_tensors(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, live: Callable[[Places], None]
) -> None:
    """No driver: read to the host as before, and labelled as what is to be moved."""
    gpudoubles.forget(monkeypatch)
    monkeypatch.setattr(shared_libraries, "candidates", lambda soname: [])
    live(lambda _: "cuda:0")
    stock = transformers.AutoModelForCausalLM.from_pretrained(qwen)
    ours = gdsload.from_pretrained(qwen)
    report = gdsload.last_report()
    assert report.fates["keep"] == 0 and report.fates["convert"] > 0
    assert tinymodels.differences(stock, ours) == []
