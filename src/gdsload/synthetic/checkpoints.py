"""Writes synthetic checkpoints: the names, shapes and shards of real models, random weights.

A benchmark or a test needs the layout and size of a model, not its knowledge. The files are laid
out as the authors published them, and `transformers` builds a model from them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from gdsload.checkpoint.file_io import open_error
from gdsload.checkpoint.header import header_bytes
from gdsload.checkpoint.locate import local_path_text
from gdsload.errors import CheckpointError
from gdsload.synthetic.model_shapes import MODELS, Tensor, configured, shapes, shards, total_bytes

__all__ = ["MODELS", "holds", "shapes", "shards", "total_bytes", "write"]

# Each block of this size carries its address, so that misplaced bytes are found. It is part of the
# format and does not depend on the page size.
STAMP_BYTES = 4096
# The size of a write: large enough to hide the system call, small enough for the L2 cache.
BLOCK_BYTES = 1 << 20
POOL_BYTES = 4 * BLOCK_BYTES
# Left free for other users of the disk, and for the JSON files.
SPARE_BYTES = 64 << 20


def write(
    model: str,
    directory: str | os.PathLike[str],
    *,
    layers: int | None = None,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> Path:
    """Writes a checkpoint with random weights. The directory appears complete or not at all.

    The values are finite, below 0.04 in magnitude, the same for the same ``seed``, and different
    in each 4 KiB of each tensor.

    Args:
        model: A key of MODELS.
        directory: Where to write. It must be empty or absent.
        layers: The number of decoder layers; all if None.
        seed: Selects the values.
        progress: Called with the number of bytes written since the call before.

    Returns:
        The absolute path of ``directory``.

    Raises:
        CheckpointError: The path is empty, the directory exists, the files cannot be written, as on
            a full disk, or as for `shapes`.
    """
    target = Path(local_path_text(directory)).resolve()
    wanted = total_bytes(model, layers)
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        reason = "is not a directory"
        if target.is_dir():
            reason = f"is not empty (it has {next(target.iterdir()).name})"
        raise CheckpointError(f"{target}: it {reason}; nothing was changed", path=str(target))
    # A directory that exists is not replaced: it may be a mount point, or where a shell is.
    exists = target.is_dir()
    parent = target if exists else target.parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < wanted + SPARE_BYTES:
        raise CheckpointError(
            f"{parent}: the checkpoint takes {wanted:,} bytes; {free:,} are free, and"
            f" {SPARE_BYTES:,} are not used",
            path=str(parent),
        )
    partial = parent / f".{target.name}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        _write_files(partial, model, layers, seed, progress or (lambda written: None))
        if exists:
            for file in sorted(partial.iterdir(), key=_is_found_by):
                os.rename(file, target / file.name)
        else:
            os.rename(partial, target)
    except OSError as error:
        raise CheckpointError(f"{target}: {error.strerror}", path=str(target)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _is_found_by(file: Path) -> tuple[bool, bool]:
    """Sorts the files by which a checkpoint is found behind all others."""
    return file.name.endswith(".index.json"), file.suffix == ".safetensors"


def holds(
    directory: str | os.PathLike[str], model: str, *, layers: int | None = None, seed: int = 0
) -> bool:
    """Whether ``directory`` is the result of `write` with the same arguments.

    Compares synth.json and the sizes of the files, not their contents. Raises CheckpointError if
    they cannot be examined.
    """
    label = Path(local_path_text(directory), "synth.json")
    try:
        if json.loads(label.read_bytes()) != _label(model, layers, seed):
            return False
        return all(
            label.with_name(name).stat().st_size == len(_header(tensors)) + _nbytes(tensors)
            for name, tensors in shards(model, layers).items()
        )
    except (FileNotFoundError, NotADirectoryError, ValueError):  # of JSON and of UTF-8
        return False
    except OSError as error:
        raise open_error(error, str(label)) from error


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _label(model: str, layers: int | None, seed: int) -> dict[str, object]:
    count = configured(model, layers)["num_hidden_layers"]
    return {"format": 1, "layers": count, "model": model, "seed": seed}


def _header(tensors: list[Tensor]) -> bytes:
    return header_bytes((each.name, each.dtype, each.shape, each.nbytes) for each in tensors)


def _write_files(
    directory: Path, model: str, layers: int | None, seed: int, progress: Callable[[int], object]
) -> None:
    config, files = configured(model, layers), shards(model, layers)
    weights = RandomWeights(seed, tied=config["tie_word_embeddings"])
    for name, tensors in files.items():
        with open(directory / name, "wb", buffering=BLOCK_BYTES) as file:
            file.write(_header(tensors))
            for tensor in tensors:
                for block in weights.blocks(tensor):
                    progress(file.write(block))
            file.flush()
            # Dirty pages cannot be evicted from the page cache: a cold load would not be cold.
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


class RandomWeights:
    """Weights from a pool of random bfloat16 values; each 4 KiB carries a stamp.

    Drawing every value anew would be slower than the disk. No two blocks of 4 KiB are equal: the
    low bytes of the first eight values are the checksum of the tensor's name and the block number.
    """

    def __init__(self, seed: int, *, tied: bool) -> None:
        draw = random.Random(seed)
        pool = bytearray(draw.randbytes(POOL_BYTES))
        # The high byte of a bfloat16 is its sign and all but one bit of its exponent. These six
        # values give magnitudes between 2**-11 and 2**-5, as in real weights, and no NaN.
        high = bytes((0x80 * (byte & 1)) | (0x3A + byte % 3) for byte in range(256))
        pool[1::2] = pool[1::2].translate(high)
        self._pool = memoryview(pool)
        self._tied = tied
        self._seed = seed

    def blocks(self, tensor: Tensor) -> Iterator[memoryview]:
        """Yields the bytes of ``tensor`` in blocks of BLOCK_BYTES, each valid until the next."""
        name = tensor.name
        if self._tied and name == "lm_head.weight":
            name = "model.embed_tokens.weight"
        sign = zlib.crc32(name.encode(), self._seed & 0xFFFFFFFF)
        block = bytearray(BLOCK_BYTES)
        view = memoryview(block)
        stamps = BLOCK_BYTES // STAMP_BYTES
        for number, begin in enumerate(range(0, tensor.nbytes, BLOCK_BYTES)):
            length = min(BLOCK_BYTES, tensor.nbytes - begin)
            start = 2 * (zlib.crc32(number.to_bytes(8, "little"), sign) % BLOCK_BYTES)
            view[:] = self._pool[start : start + BLOCK_BYTES]
            numbers = range(number * stamps, (number + 1) * stamps)
            for byte in range(4):
                block[2 * byte :: STAMP_BYTES] = bytes([sign >> 8 * byte & 0xFF]) * stamps
                block[8 + 2 * byte :: STAMP_BYTES] = bytes(n >> 8 * byte & 0xFF for n in numbers)
            yield view[:length]
