"""Tensors in memory are shown as valid safetensors files."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load

from gdsload.errors import GdsloadError
from gdsload.peers.memory import _staged, locations_of, regions_of
from gdsload.peers.publication import (
    PublishedFile,
    PublishedTensor,
    file_of,
    manifest_bytes,
    published,
)
from gdsload.peers.server import _collected, _tensor


def file_with(tensors: dict[str, torch.Tensor]) -> PublishedFile:
    entries = {name: _tensor(name, tensor) for name, tensor in tensors.items()}
    places = locations_of({name: entry.flat for name, entry in entries.items()})
    return file_of([PublishedTensor(name, *entries[name], places[name]) for name in entries])


def bytes_of(file: PublishedFile) -> bytes:
    return file.header + b"".join(tensor.flat.numpy().tobytes() for tensor in file.tensors)


def test_staged_copies_are_in_host_memory_whatever_the_default_device() -> None:
    with torch.device("meta"):
        (copy,) = _staged({"a": torch.arange(5, dtype=torch.uint8, device="cpu")}).values()
    assert copy.device.type == "cpu" and copy.tolist() == [0, 1, 2, 3, 4]


DTYPES = (torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 9)), max_size=8))
def test_file_of_tensors_is_read_back_by_safetensors(kinds: list[tuple[torch.dtype, int]]) -> None:
    tensors = {
        f"t{number}": torch.arange(rows * 3).reshape(rows, 3).to(dtype)
        for number, (dtype, rows) in enumerate(kinds)
    }
    file = file_with(tensors)
    raw = bytes_of(file)
    assert len(raw) == file.size
    found = load(raw)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert all(found[name].dtype == tensors[name].dtype for name in tensors)


def test_tensors_of_one_buffer_are_one_region_and_one_segment() -> None:
    buffer = torch.arange(96, dtype=torch.uint8)
    tensors = {"a": buffer[16:32], "b": buffer[32:64], "other": torch.ones(8, dtype=torch.uint8)}
    file = file_with(tensors)
    assert [segment.nbytes for segment in file.segments()] == [48, 8]
    regions = regions_of(tensors)
    start = buffer.data_ptr() + 16
    assert sorted(region.end - region.start for region in regions) == [8, 48]
    assert start in {region.start for region in regions}


def test_same_tensors_have_the_same_version() -> None:
    tensors = {"a": torch.arange(9.0), "b": torch.ones(3)}
    small = {"config.json": b"{}"}

    def version(tensors: dict[str, torch.Tensor], small: dict[str, bytes]) -> str:
        files = {"m": file_with(tensors)}
        return published(files, small, manifest_bytes(files)).version

    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    assert version(tensors, small) == version(copies, small)
    assert version(tensors, small) != version(tensors, {"config.json": b"{ }"})
    copies["a"][5] += 1
    assert version(tensors, small) != version(copies, small)


def test_digest_of_a_file_depends_on_its_bytes_only() -> None:
    tensors = {"a": torch.arange(9.0), "b": torch.ones(3), "none": torch.zeros(0)}

    def digests(tensors: dict[str, torch.Tensor], others: dict[str, PublishedFile]) -> Any:
        files = {"m": file_with(tensors)}
        manifest = json.loads(manifest_bytes(files | others))
        checksums = manifest["files"]["m"]["tensors"]
        manifest["files"]["m"]["tensors"] = dict(reversed(checksums.items()))
        return published(files, {}, json.dumps(manifest).encode()).digests

    files = {"m": file_with(tensors)}
    found = published(files, {"config.json": b"{}"}, manifest_bytes(files)).digests
    assert found == digests(tensors, {})
    assert list(found) == ["m"] and found["m"].startswith("xxh3_128/8388608:")
    assert found == digests(tensors, {"n": file_with({"c": torch.ones(1)})})
    assert found != digests(tensors | {"b": torch.zeros(3)}, {})
    assert not published(files, {}, b"").digests


def test_manifest_has_a_checksum_of_each_block() -> None:
    tensor = torch.zeros((8 << 20) + 1, dtype=torch.uint8)
    manifest = json.loads(manifest_bytes({"m": file_with({"big": tensor})}))
    assert len(manifest["files"]["m"]["tensors"]["big"]) == 2 * 32


def test_manifest_without_threads_equals_that_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    tensors = {"a": torch.arange(3 << 20), "none": torch.zeros(0), "b": torch.ones(3)}
    files = {"m": file_with(tensors), "n": file_with({"a": torch.zeros(9 << 20)})}
    expected = manifest_bytes(files)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert manifest_bytes(files) == expected


@pytest.mark.parametrize("tensor", [
    torch.ones(2, device="meta"), torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex128),
    torch.nested.nested_tensor([torch.ones(2)]), 3,
])  # fmt: skip
def test_tensor_without_bytes_of_a_known_type_is_refused(tensor: Any) -> None:
    with pytest.raises(GdsloadError, match="cannot serve tensor 'x'"):
        _tensor("x", tensor)


def test_model_whose_parameters_are_in_other_tensors_is_refused() -> None:
    """Such as DTensor, of which each rank holds a part."""

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, call: Any, *_: Any) -> Any:
            return Wrapper(torch.ones(2))  # detach

        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(Wrapper(torch.ones(2)), requires_grad=False)
    with pytest.raises(GdsloadError, match="cannot serve tensor 'weight': Wrapper"):
        _collected(model)


def test_tensor_with_a_conjugate_or_negative_bit_is_served_as_its_values() -> None:
    tensors = {"c": torch.tensor([1 + 2j, 3 - 4j]).conj(), "n": torch._neg_view(torch.ones(3))}
    found = load(bytes_of(file_with(tensors)))
    assert all(torch.equal(found[name], tensors[name].clone()) for name in tensors)


def test_tensor_that_is_not_contiguous_is_served_in_its_order() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(load(bytes_of(file_with({"t": tensor})))["t"], tensor)
