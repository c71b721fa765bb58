"""Synthetic checkpoints: the names, shapes and shards of real models, filled with made-up weights.

A benchmark or a test needs a model's layout and size, not its knowledge. What is written here is
laid out as the original's authors published it, and `transformers` builds a model from it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from gdsload.errors import CheckpointError
from gdsload.synthetic.model_shapes import (
    BF16_BYTES,
    MODELS,
    Tensor,
    configured,
    shapes,
    shards,
    total_bytes,
)

__all__ = ["MODELS", "holds", "shapes", "shards", "total_bytes", "write"]

# Each stretch of this length carries its address, so that one that went astray is found. It is part
# of the format, whatever the page size of the machine is.
STAMP_BYTES = 4096
# Written at once: large enough that a system call costs nothing, small enough for the L2 cache.
BLOCK_BYTES = 1 << 20
POOL_BYTES = 4 * BLOCK_BYTES
# Room left for whoever shares the disk, and for the JSON beside the weights.
SPARE_BYTES = 64 << 20


def write(
    model: str,
    directory: str | os.PathLike[str],
    *,
    layers: int | None = None,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> Path:
    """Writes a checkpoint of ``model`` to ``directory`` and returns it, an absolute path.

    The values are finite, below 0.04 in magnitude, the same for the same ``seed``, and different
    in each 4 KiB of each tensor. ``progress`` is called with the bytes written since the call
    before. The directory appears whole or not at all. Raises CheckpointError where there is
    something in the way, where the disk is or becomes full, and as `shapes` does.
    """
    target = Path(directory).absolute()
    files = shards(model, layers)
    _require_vacant(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    _require_room(target.parent, total_bytes(model, layers))
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write_files(partial, model, layers, files, seed, progress or (lambda written: None))
        os.rename(partial, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CheckpointError(
                f"{target}: the disk became full: {error.strerror}", path=str(target)
            ) from error
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise CheckpointError(
                f"{target}: somebody else wrote it meanwhile", path=str(target)
            ) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def holds(
    directory: str | os.PathLike[str], model: str, *, layers: int | None = None, seed: int = 0
) -> bool:
    """Whether ``directory`` is what `write` makes of the same arguments, going by its label and
    the files' sizes, not by their bytes."""
    label = Path(directory, "synth.json")
    try:
        if json.loads(label.read_bytes()) != _label(model, layers, seed):
            return False
        return all(
            label.with_name(name).stat().st_size == len(_header(tensors)) + _nbytes(tensors)
            for name, tensors in shards(model, layers).items()
        )
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _label(model: str, layers: int | None, seed: int) -> dict[str, object]:
    kept = configured(model, layers)["num_hidden_layers"]
    return {"format": 1, "layers": kept, "model": model, "seed": seed}


def _header(tensors: list[Tensor]) -> bytes:
    """The header of a safetensors file, with its eight bytes of length, padded to eight bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * BF16_BYTES
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _require_vacant(target: Path) -> None:
    if target.is_dir():
        if any(target.iterdir()):
            raise CheckpointError(
                f"{target}: is not empty; nothing in it was touched", path=str(target)
            )
    elif os.path.lexists(target):
        raise CheckpointError(f"{target}: is in the way and not a directory", path=str(target))


def _require_room(parent: Path, wanted: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < wanted + SPARE_BYTES:
        raise CheckpointError(
            f"{parent}: the checkpoint takes {wanted:,} bytes, and of the disk {free:,} are free"
            f", of which {SPARE_BYTES:,} are left alone",
            path=str(parent),
        )


def _write_files(
    directory: Path,
    model: str,
    layers: int | None,
    files: dict[str, list[Tensor]],
    seed: int,
    progress: Callable[[int], object],
) -> None:
    config = configured(model, layers)
    filling = Filling(seed, tied=config["tie_word_embeddings"])
    for name, tensors in files.items():
        with open(directory / name, "wb", buffering=0) as file:
            _write_all(file, _header(tensors))
            for tensor in tensors:
                for block in filling.blocks(tensor):
                    _write_all(file, block)
                    progress(len(block))
            # Pages that are not on the disk cannot be evicted: a cold load would not be cold.
            os.fsync(file.fileno())
    documents: dict[str, object] = {
        "config.json": config,
        "generation_config.json": dict(MODELS[model].generation),
        "synth.json": _label(model, layers, seed),
    }
    if len(files) > 1:
        where = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
        documents["model.safetensors.index.json"] = {
            "metadata": {"total_size": total_bytes(model, layers)},
            "weight_map": dict(sorted(where.items())),
        }
    for name, document in documents.items():
        directory.joinpath(name).write_text(json.dumps(document, indent=2) + "\n")


def _write_all(file: IO[bytes], block: bytes | memoryview) -> None:
    rest = memoryview(block)
    while rest:
        rest = rest[file.write(rest) :]


class Filling:
    """The made-up weights: slices of one pool of random bfloat16, each 4 KiB of it signed.

    Drawing every byte afresh would be slower than the disk. Two of these never agree all the same:
    the low bytes of their first eight values spell its tensor's checksum and its number.
    """

    def __init__(self, seed: int, *, tied: bool) -> None:
        draw = random.Random(seed)
        pool = bytearray(draw.randbytes(POOL_BYTES))
        # The high byte of a bfloat16 is its sign and all but one bit of its exponent: six values
        # of it keep magnitudes between 2**-11 and 2**-5, as in weights, and never make a NaN.
        high = bytes((0x80 * (byte & 1)) | (0x3A + byte % 3) for byte in range(256))
        pool[1::2] = pool[1::2].translate(high)
        self._pool = memoryview(pool)
        self._tied = tied
        self._seed = seed

    def blocks(self, tensor: Tensor) -> Iterator[memoryview]:
        """The bytes of ``tensor``, in pieces of at most BLOCK_BYTES; each lives until the next."""
        name = tensor.name
        if self._tied and name == "lm_head.weight":
            name = "model.embed_tokens.weight"
        sign = zlib.crc32(name.encode(), self._seed & 0xFFFFFFFF)
        block = bytearray(BLOCK_BYTES)
        view = memoryview(block)
        stamps = BLOCK_BYTES // STAMP_BYTES
        for number, begin in enumerate(range(0, tensor.nbytes, BLOCK_BYTES)):
            length = min(BLOCK_BYTES, tensor.nbytes - begin)
            start = BF16_BYTES * (zlib.crc32(number.to_bytes(8, "little"), sign) % BLOCK_BYTES)
            view[:] = self._pool[start : start + BLOCK_BYTES]
            numbers = range(number * stamps, (number + 1) * stamps)
            for lane in range(4):
                block[2 * lane :: STAMP_BYTES] = bytes([sign >> 8 * lane & 0xFF]) * stamps
                block[8 + 2 * lane :: STAMP_BYTES] = bytes(n >> 8 * lane & 0xFF for n in numbers)
            yield view[:length]
