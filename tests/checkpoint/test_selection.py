"""Which tensors `names` selects."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gdsload
from gdsload.checkpoint import TensorInfo
from gdsload.checkpoint.selection import Names, chosen, repeatable
from gdsload.errors import CheckpointError

ALL = [
    "model.embed_tokens.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.experts.0.up.weight",
    "model.layers.0.mlp.experts.11.up.weight",
    "model.layers.1.mlp.shared_experts.up.weight",
    "model.layers.1.mlp.experts.gate_up_proj",
    "model.layers.10.norm.weight",
    "lm_head.weight",
    "odd[0]",
]


def names_of(names: Names) -> list[str]:
    tensors = {name: TensorInfo(name, "F32", (1,), 0, 0, 4) for name in ALL}
    return [info.name for info in chosen(tensors, names, "model")]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, ALL),
        ([], []),
        ("lm_head.weight", ALL[7:8]),
        (["lm_head.weight", "model.embed_tokens.weight"], [ALL[7], ALL[0]]),
        ("*.up.weight", ALL[2:5]),
        ("odd[0]", ["odd[0]"]),
        (re.compile(r"experts\.\d"), ALL[2:4]),
        (lambda name: name.endswith("norm.weight"), ALL[6:7]),
        (["lm*", re.compile("^model.embed"), "lm_head.weight"], [ALL[7], ALL[0]]),
        (gdsload.layers(0, 2), ALL[1:6]),
        (gdsload.layers(0, 1), ALL[1:4]),
        (gdsload.layers(1), ALL[4:7]),
        (gdsload.experts(), ALL[2:4]),
        (gdsload.experts(10, 12), ALL[3:4]),
        (gdsload.experts(0, 1) | ~gdsload.experts(), ALL[:3] + ALL[4:]),
        (gdsload.layers(0, 2) & "*.gate.*", ALL[1:2]),
        ("*.gate.*" & gdsload.layers(0, 2), ALL[1:2]),
        ([gdsload.layers(10), "model.embed*"], [ALL[6], ALL[0]]),
    ],
)
def test_names_select_tensors_in_order(names: Names, expected: list[str]) -> None:
    assert names_of(names) == expected


@pytest.mark.parametrize(
    "names", ["gone", "gone*", re.compile("gone"), gdsload.layers(11), ["lm_head.weight", "x[yz]"]]
)
def test_choice_that_nothing_fits_raises_checkpoint_error(names: Names) -> None:
    with pytest.raises(CheckpointError, match=r"gone|x\[yz\]|layers\(11, None\)"):
        names_of(names)


@pytest.mark.parametrize(
    "names,text,tensor",
    [
        ("gone", "there is no tensor 'gone' in it", "gone"),
        ("gone*", "no tensor has the name or matches the pattern 'gone*'", "gone*"),
        (re.compile("gone$"), "no tensor has the name or matches the pattern 'gone$'", None),
        (~gdsload.layers(0), "there is no tensor 'x' in it", "x"),
    ],
)
def test_error_names_the_source_and_what_nothing_fits(
    names: Names, text: str, tensor: str | None
) -> None:
    with pytest.raises(CheckpointError) as caught:
        names_of(["lm_head.weight", names, "x"])  # type: ignore[list-item]
    assert str(caught.value) == f"model: {text}"
    assert caught.value.tensor == tensor


@pytest.mark.parametrize(
    "name,hint",
    [
        ("lm_haed.weight", "; did you mean 'lm_head.weight'?"),
        ("head.weight", "; did you mean 'lm_head.weight'?"),
        ("lm_head.bias", ""),
        ("model.layers.0.mlp.gate.weigth", "; did you mean 'model.layers.0.mlp.gate.weight'?"),
    ],
)
def test_missing_name_is_answered_by_a_similar_one(name: str, hint: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        names_of(name)
    assert str(caught.value) == f"model: there is no tensor '{name}' in it{hint}"


@pytest.mark.parametrize(
    "letters,count,hinted",
    [(199, 1999, True), (200, 1999, False), (199, 2000, False)],
    ids=["within the limits", "a longer name", "more tensors"],
)
def test_similar_names_are_sought_within_limits(letters: int, count: int, hinted: bool) -> None:
    name = "".join(chr(0x4E00 + number) for number in range(letters))
    info = TensorInfo(name, "F32", (1,), 0, 0, 4)
    tensors = {name: info, **{f"{number}": info for number in range(count)}}
    with pytest.raises(CheckpointError) as caught:
        chosen(tensors, f"b{name}", "model")
    assert ("did you mean" in str(caught.value)) == hinted


@pytest.mark.parametrize("names", [[5], [None], [b"lm_head.weight"], [re.compile(b"norm")]])
@pytest.mark.parametrize("ask", [names_of, repeatable])
def test_choice_of_another_type_raises_type_error(ask: Callable[[Any], Any], names: Any) -> None:
    with pytest.raises(TypeError) as caught:
        ask(names)
    assert str(caught.value) == (
        f"names takes names, globs, regular expressions and functions, not {names[0]!r}"
    )


def test_selection_shows_how_it_was_made() -> None:
    wanted = gdsload.layers(0, 4) & "*.weight" | ~gdsload.experts(8)
    assert repr(wanted) == "((layers(0, 4) & '*.weight') | ~experts(8, None))"
    assert wanted("layers.3.experts.9.weight") and wanted("layers.4.bias")
    assert not wanted("layers.4.experts.8.weight") and not wanted("layers.3.experts.8.bias")
    assert gdsload.experts()("experts.0.weight") and not gdsload.experts()("layers.0.weight")


@pytest.mark.parametrize("make", [gdsload.layers, gdsload.experts])
@pytest.mark.parametrize("numbers", [(-1, 2), (3, 3), (4, 2), (-1, None)])
def test_empty_range_raises_value_error(make: Any, numbers: tuple[int, int | None]) -> None:
    with pytest.raises(ValueError) as caught:
        make(*numbers)
    first, end = numbers
    assert str(caught.value) == (
        f"{make.__name__}({first}, {end}): there are none from {first} to {end}"
    )


def test_only_selected_tensors_are_read(tiny_moe_checkpoint: Path) -> None:
    everything = gdsload.load_file(tiny_moe_checkpoint, cache="direct")
    read = gdsload.last_report().read_bytes
    wanted = gdsload.layers(0, 1) & gdsload.experts(0, 1)
    some = gdsload.load_file(tiny_moe_checkpoint, names=wanted, cache="direct")
    assert some and all(".layers.0." in name and ".experts.0." in name for name in some)
    assert all(some[name].equal(everything[name]) for name in some)
    assert gdsload.last_report().read_bytes < read / 4
    assert dict(gdsload.stream(tiny_moe_checkpoint, names=wanted)).keys() == some.keys()
    assert gdsload.plan(tiny_moe_checkpoint, wanted).locations.keys() == some.keys()
    with gdsload.safe_open(tiny_moe_checkpoint) as opened:
        assert opened.get_tensors(wanted).keys() == some.keys()
    with gdsload.prefetch(tiny_moe_checkpoint, names=wanted) as ahead:
        ahead.wait()
        assert ahead.report.tensors == len(some)
