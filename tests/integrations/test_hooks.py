"""The way into transformers: taken, refused, undone; in threads, and when reading fails."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import equal
import gdsload
import tinymodels
from equal import FIRST, NEW, names_replaced, open_files
from gdsload.backends.base import Failure, Progress
from gdsload.backends.posix import PosixBackend
from gdsload.backends.registry import register_backend
from gdsload.errors import CheckpointError
from gdsload.events import Event, LoadEnded
from gdsload.integrations.transformers import hooks, load_plan
from gdsload.integrations.transformers.model_reader import ModelReader, Options
from gdsload.report import LoadReport
from gdsload.system.gc_control import IMPORT_THRESHOLD
from windows import small_windows


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.saved("qwen3", tmp_path_factory)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.saved("qwen3_moe", tmp_path_factory)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = names_replaced()
    yield
    assert names_replaced() == before
    assert not hooks.patcher.in_place


def test_skipped_tensors_are_not_read(qwen: Path) -> None:
    """A model without its head: the labels say what is materialised, and no more is read."""
    with gdsload.accelerated(cache="buffered"):
        model = gdsload.from_pretrained(qwen, cls=transformers.Qwen3Model)
    report = gdsload.last_report()
    held = {id(p): p.nbytes for p in model.state_dict().values()}
    assert report.wanted_bytes == sum(held.values())
    classifier = transformers.Qwen3ForSequenceClassification
    stock, stock_info = classifier.from_pretrained(qwen, output_loading_info=True)
    ours, our_info = gdsload.from_pretrained(qwen, cls=classifier, output_loading_info=True)
    assert stock_info == our_info
    stock.score.weight, ours.score.weight = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    assert tinymodels.differences(stock, ours) == []


def test_pipeline_ends_with_the_first_error(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would load the model again in float32, and succeed."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    start, calls = ModelReader.__init__, []

    def broken_once(*args: Any, **named: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise gdsload.errors.ReadError("broken once")
        start(*args, **named)

    monkeypatch.setattr(ModelReader, "__init__", broken_once)
    with gdsload.accelerated():
        with pytest.raises(gdsload.errors.ReadError, match="broken once") as caught:
            transformers.pipeline("text-generation", model=str(qwen), tokenizer=tokenizer)
        assert len(calls) == 1
        # A frame that refers to the error would live as long as the collector does not run.
        frames = [frame.f_locals for frame, _ in traceback.walk_tb(caught.tb)]
        lists = [one for names in frames for one in names.values() if isinstance(one, list)]
        assert not any(each is caught.value for one in lists for each in one)
        made = transformers.pipeline("text-generation", model=str(qwen), tokenizer=tokenizer)
    assert gdsload.last_report().integration == FIRST and made.model.dtype == torch.float32


@pytest.mark.skipif(not NEW, reason="4.57 opens files with safe_open wherever they are")
def test_files_of_hf_mount_are_not_mapped(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(transformers.modeling_utils, "_is_on_hf_mount"):
        pytest.skip("this transformers maps them as well")
    gdsload.from_pretrained(qwen)
    assert set(gdsload.last_report().paths) == {"mapped"}
    monkeypatch.setattr(transformers.modeling_utils, "_is_on_hf_mount", lambda _: True)
    for cache in ("auto", "mapped"):
        with gdsload.accelerated(cache=cache):
            gdsload.from_pretrained(qwen)
        assert not any("mapped" in path for path in gdsload.last_report().paths)


def test_garbage_is_collected_during_a_load(qwen: Path) -> None:
    before, seen = gc.get_threshold(), set()
    gdsload.from_pretrained(
        qwen, on_module_ready=lambda *_: seen.add((gc.isenabled(), gc.get_threshold()[0]))
    )
    assert gc.get_threshold() == before
    assert all(enabled for enabled, _ in seen)
    if NEW:
        assert (True, max(IMPORT_THRESHOLD, before[0])) in seen


@pytest.mark.skipif(not NEW, reason="transformers 4.57 says what it wants shard by shard")
@pytest.mark.parametrize("name", sorted(tinymodels.ARCHITECTURES))
def test_load_plan_equals_the_requests_in_order(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers requests exactly the planned slices, in that order."""
    if not hasattr(transformers, tinymodels.ARCHITECTURES[name][0]):
        pytest.skip(f"this transformers has no {name}")
    from transformers import core_model_loading as loading

    from gdsload.integrations.transformers.readahead_queue import ReadaheadQueue

    # Before 5.4 what a converter merges comes out of a set, in an order of its own each time.
    has_order = "in set(" not in inspect.getsource(loading.WeightTransform.materialize_tensors)

    asked: list[str] = []
    foreseen: list[str] = []
    take, load_plan_of = ReadaheadQueue.take, load_plan.load_plan_of

    def noted_take(self: ReadaheadQueue, cut: Any) -> Any:
        asked.append(cut.key)
        return take(self, cut)

    def noted_plan(*args: Any, **named: Any) -> Any:
        found = load_plan_of(*args, **named)
        foreseen.extend(cut.key for cut in found.slices["cpu"])
        return found

    monkeypatch.setattr(ReadaheadQueue, "take", noted_take)
    monkeypatch.setattr("gdsload.integrations.transformers.model_reader.load_plan_of", noted_plan)
    with equal.by_transformers_alone():
        model = tinymodels.build(name)
        model.save_pretrained(tmp_path)
        type(model).from_pretrained(tmp_path)
    for loaded_as in {type(model), type(model.base_model)}:
        asked.clear()
        foreseen.clear()
        gdsload.from_pretrained(tmp_path, cls=loaded_as)
        assert asked
        if has_order:
            assert asked == foreseen
        else:
            assert sorted(asked) == sorted(foreseen)


def test_marks_of_transforms_equal_those_of_transformers(mixture: Path) -> None:
    stock = transformers.AutoModelForCausalLM.from_pretrained(mixture)
    ours = gdsload.from_pretrained(mixture)
    assert tinymodels.differences(stock, ours) == []


def test_entry_point_is_reported_and_logged_once(
    qwen: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_logged", set())
    with caplog.at_level(logging.WARNING, "gdsload"):
        for _ in range(2):
            gdsload.from_pretrained(qwen)
    assert gdsload.last_report().integration == FIRST
    assert len(caplog.records) == (0 if NEW else 1)
    assert sum(gdsload.last_report().fates.values()) > 0
    assert f"entry point: {FIRST}" in gdsload.last_report().summary()


@pytest.mark.skipif(not NEW, reason="4.57 has no first way")
def test_unknown_internals_fall_back_to_safe_open(
    mixture: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise AttributeError("'LoadStateDictConfig' object has no attribute 'weight_mapping'")

    monkeypatch.setattr(hooks, "_logged", set())
    monkeypatch.setattr("gdsload.integrations.transformers.model_reader.load_plan_of", broken)
    stock = transformers.AutoModelForCausalLM.from_pretrained(mixture)
    with caplog.at_level(logging.WARNING, "gdsload"):
        for _ in range(2):
            ours = gdsload.from_pretrained(mixture)
    report = gdsload.last_report()
    assert report.integration == "safe_open"
    assert "weight_mapping" in report.integration_reason
    assert report.tensors > 0
    assert len([r for r in caplog.records if "safe_open" in r.getMessage()]) == 1
    assert tinymodels.differences(stock, ours) == []
    assert open_files(mixture) == []


@pytest.mark.skipif(not NEW, reason="4.57 has no first way")
def test_missing_hook_falls_back_to_safe_open(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = transformers.PreTrainedModel
    original = base._load_pretrained_model

    def another(model: Any, weights: Any, files: Any, config: Any) -> Any:
        return original(model, weights, files, config)

    monkeypatch.setattr(base, "_load_pretrained_model", staticmethod(another))
    stock = transformers.AutoModelForCausalLM.from_pretrained(mixture)
    ours = gdsload.from_pretrained(mixture)
    assert gdsload.last_report().integration == "safe_open"
    assert "model, weights, files, config" in gdsload.last_report().integration_reason
    assert tinymodels.differences(stock, ours) == []
    ended: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, LoadEnded):
            ended.append(event.report.tensors)

    with gdsload.accelerated(on_event=note) as report:
        transformers.AutoModelForCausalLM.from_pretrained(mixture)
    assert report.tensors == sum(ended)
    assert min(ended) > 0
    monkeypatch.undo()
    assert open_files(mixture) == []


@pytest.mark.skipif(NEW, reason="no version since 5.0 reads shards in threads")
def test_shards_that_threads_of_transformers_read_are_read_by_gdsload(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a URL, whose local files have no data."""
    monkeypatch.setenv("HF_ENABLE_PARALLEL_LOADING", "1")
    stock = transformers.AutoModelForCausalLM.from_pretrained(qwen).state_dict()
    with gdsload.Checkpoint.open(qwen) as checkpoint:
        number = len(checkpoint.tensors)
    for source in (qwen, gdsload.replicas(qwen)):
        ours = gdsload.from_pretrained(source).state_dict()
        assert all(tinymodels.same_bytes(stock[name], ours[name]) for name in stock | ours)
        report = gdsload.last_report()
        assert (report.integration, report.tensors) == ("safe_open", number)


def test_other_weights_are_left_to_transformers(tmp_path: Path) -> None:
    model = tinymodels.build("gpt2")
    model.save_pretrained(tmp_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    stock = type(model).from_pretrained(tmp_path)
    ours = gdsload.from_pretrained(tmp_path)
    report = gdsload.last_report()
    assert report.integration == "stock"
    assert "pytorch_model.bin is not a .safetensors file" in report.integration_reason
    assert tinymodels.differences(stock, ours) == []
    with pytest.raises(OSError, match=r"model\.safetensors"):
        gdsload.from_pretrained(tmp_path, use_safetensors=True)
    ours = gdsload.from_pretrained(None, cls=type(model), config=model.config, state_dict=state)
    assert "transformers had the weights already" in gdsload.last_report().integration_reason


def test_zero3_is_left_to_transformers(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ZeRO-3" in hooks.refusal(None, ["a.safetensors"], True)
    assert hooks.refusal(None, ["a.safetensors"], False) == ""
    assert "no checkpoint files" in hooks.refusal(None, [], False)


def test_unavailable_backend_is_an_error_only_by_name(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `auto` transformers reads by itself; asked for by name it is an error."""
    if NEW:

        def none(*_: Any) -> Any:
            raise gdsload.BackendUnavailable("no backend can load to cpu")

        steps: list[str] = []
        close, opened = ModelReader.close, transformers.modeling_utils.safe_open
        monkeypatch.setattr(ModelReader, "close", lambda self: steps.append("close") or close(self))
        monkeypatch.setattr(
            transformers.modeling_utils,
            "safe_open",
            lambda *names, **words: steps.append("open") or opened(*names, **words),
        )
        monkeypatch.setattr("gdsload.loading.session.choose", none)
        with gdsload.accelerated(cache="buffered"):
            gdsload.from_pretrained(qwen)
        assert gdsload.last_report().integration == "stock"
        assert "no backend can load" in gdsload.last_report().integration_reason
        # transformers reads when our files and buffers are closed
        assert steps[0] == "close" and set(steps[1:]) == {"open"}
        monkeypatch.undo()
    with pytest.raises(gdsload.BackendUnavailable, match="nonsense"):
        gdsload.from_pretrained(qwen, backend="nonsense")
    assert open_files(qwen) == []


class _Breaking(PosixBackend):
    """Reads like its parent, and reports that the last transfer of a request failed."""

    name = "breaking"

    def check(self, request: Any) -> Progress:
        progress = super().check(request)
        failures = [Failure(place, 0, 5) for place in progress.settled]
        return progress._replace(failures=failures)


@pytest.fixture
def breaking() -> Iterator[None]:
    from gdsload.backends import registry

    register_backend(_Breaking)
    yield
    del registry._registered["breaking"]


@pytest.mark.usefixtures("breaking")
@pytest.mark.parametrize("which", ["qwen", "mixture"])
def test_read_error_in_a_load_releases_everything(
    which: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(which)
    threads = threading.active_count()
    with (
        small_windows(4096),
        gdsload.accelerated(backend="breaking", cache="buffered"),
        pytest.raises(gdsload.ReadError, match=r"safetensors.*Input/output error"),
    ):
        transformers.AutoModelForCausalLM.from_pretrained(path)
    assert "ReadError" in gdsload.last_report().failure
    assert open_files(path) == []
    gc.collect()
    assert threading.active_count() <= threads + 4
    ours = gdsload.from_pretrained(path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert tinymodels.differences(stock, ours) == []


def test_ctrl_c_in_a_load_closes_the_files(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gdsload.integrations.transformers.readahead_queue import ReadWindow

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ReadWindow, "poll", lambda *_: None)
    monkeypatch.setattr(ReadWindow, "await_slice", interrupted)
    with pytest.raises(KeyboardInterrupt), gdsload.accelerated(cache="buffered"):
        transformers.AutoModelForCausalLM.from_pretrained(qwen)
    assert open_files(qwen) == []


def test_file_changed_during_the_load_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tinymodels.build("qwen3").save_pretrained(tmp_path)
    from gdsload.integrations.transformers.readahead_queue import ReadaheadQueue

    take = ReadaheadQueue.take

    def touching(self: ReadaheadQueue, cut: Any) -> Any:
        os.utime(tmp_path / "model.safetensors", ns=(1, 1))
        return take(self, cut)

    monkeypatch.setattr(ReadaheadQueue, "take", touching)
    with pytest.raises(gdsload.CheckpointError, match="changed while it was read"):
        gdsload.from_pretrained(tmp_path)


def test_truncated_file_raises_and_is_closed(tmp_path: Path) -> None:
    tinymodels.build("qwen3").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"model\.safetensors|not fully covered"):
        gdsload.from_pretrained(tmp_path)
    assert open_files(tmp_path) == []


@pytest.mark.skipif(not NEW, reason="transformers 4.57 cannot load in two threads, stock either")
def test_loads_in_threads_do_not_affect_each_other(
    qwen: Path, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building a model changes what is global in transformers, so that two threads may not do it
    at once, with or without gdsload; loading the weights is where all four meet."""
    wanted = {
        path: transformers.AutoModelForCausalLM.from_pretrained(path) for path in (qwen, mixture)
    }
    wrong: list[str] = []
    building, meeting = threading.Lock(), threading.Barrier(4)
    base = transformers.PreTrainedModel
    raw: Any = base.__dict__["_load_pretrained_model"]

    @functools.wraps(raw.__func__)
    def met(*args: Any, **named: Any) -> Any:
        building.release()
        try:
            meeting.wait()
            return raw.__func__(*args, **named)
        finally:
            building.acquire()

    monkeypatch.setattr(base, "_load_pretrained_model", type(raw)(met))

    def load(path: Path, accelerated: bool) -> None:
        try:
            for _ in range(3):
                with ExitStack() as stack:
                    if accelerated:
                        stack.enter_context(gdsload.accelerated(cache="buffered"))
                    elif hooks.active() is not None:
                        wrong.append("a stock load was taken over")
                    with building:
                        model = transformers.AutoModelForCausalLM.from_pretrained(path)
                wrong.extend(tinymodels.differences(wanted[path], model))
        except BaseException as error:
            wrong.append(repr(error))
            meeting.abort()

    threads = [
        threading.Thread(target=load, args=args)
        for args in ((qwen, True), (mixture, True), (mixture, False), (qwen, False))
    ]
    with small_windows():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_tensor_that_there_is_none_of_is_named(tiny_checkpoint: Path) -> None:
    """As with a key_mapping of transformers 4.57 that leads to no tensor."""
    file = str(next(tiny_checkpoint.glob("*.safetensors")))
    error = pytest.raises(CheckpointError, match=f"^{file}: there is no tensor 'nope'")
    with ModelReader([file], Options(), LoadReport(file)) as reader, error:
        reader.start_in_order(["nope"], set())
