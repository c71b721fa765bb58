"""A checkpoint at the door: its shards, each opened once, and what their headers say, all checked.

    source -> places -> descriptors -> headers -> tensors (-> held against the index)

Where files are is `source`'s business, what a header may say is `header`'s. From here on nobody
opens a file by its name again: header and data come from the same descriptor, so that a file that
is replaced meanwhile cannot give the names of one version over the bytes of another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from types import TracebackType

from gdsload.checkpoint.file_io import each, read_exactly
from gdsload.checkpoint.header import (
    HEADER_LIMIT_BYTES,
    LENGTH_BYTES,
    Header,
    TensorInfo,
    header_length,
    parse_header,
)
from gdsload.checkpoint.locate import PathLike, Place, Source, locate, open_place, text_of
from gdsload.checkpoint.shard import Identity, Shard
from gdsload.errors import CheckpointError, shown
from gdsload.system import quiesce
from gdsload.system.gc_control import collector_paused

__all__ = ["Checkpoint", "Identity", "Shard", "TensorInfo"]

_FIRST_READ_BYTES = 128 << 10  # one request fetches length and header of a usual shard together


class Checkpoint:
    """The shards of a checkpoint, open, and where each tensor lies in them.

    `tensors` is in the order of the shards, and in each in the order of the data. `metadata` joins
    that of the shards; where two disagree, the first one's stands. Closing gives the descriptors
    back and leaves the rest readable; a checkpoint that is dropped closes itself.
    """

    __slots__ = ("__weakref__", "metadata", "shards", "source", "tensors", "total_bytes")

    def __init__(
        self, source: str, shards: Sequence[Shard], tensors: Mapping[str, TensorInfo]
    ) -> None:
        self.source = source
        self.shards = tuple(shards)
        self.tensors = dict(tensors)
        self.metadata: dict[str, str] = {}
        for shard in reversed(self.shards):
            self.metadata.update(shard.metadata)
        self.total_bytes = sum(info.nbytes for info in self.tensors.values())
        quiesce.register(self)

    @classmethod
    def open(
        cls,
        source: PathLike,
        *,
        revision: str | None = None,
        subfolder: str = "",
        variant: str | None = None,
        cache_dir: PathLike | None = None,
        strict: bool = True,
        header_limit: int = HEADER_LIMIT_BYTES,
    ) -> Checkpoint:
        """Opens a .safetensors file, a directory, an index, or a model in the local hub cache.

        A directory gives, in this order: model[.variant].safetensors, its index, the same of
        diffusion_pytorch_model, its only index, or all its .safetensors files that fit the variant,
        if no two hold the same tensor. A hub id is looked up in `cache_dir`, else where
        HF_HUB_CACHE or HF_HOME say, at `revision`: a branch, a tag or a commit, "main" if None.
        Nothing is downloaded. `header_limit` bounds the bytes of one header and of the index.

        An index is held against its shards: an entry that no shard holds (or not the shard that
        it names) and a tensor in two shards are errors. With strict=False such entries are
        dropped, and of two shards the one that the index names (else the last) gives the tensor.
        Tensors that the index leaves out are loaded in both cases, as transformers does. Symbolic
        links are followed; an index may name files in its own directory only.

        Raises CheckpointError and its kinds, ReadError and StallError. Whatever was opened by then
        is closed.
        """

        def find(path: str) -> Source:
            return locate(
                path,
                revision=revision,
                subfolder=subfolder,
                variant=variant,
                cache_dir=cache_dir,
                limit=header_limit,
            )

        # In a thread like the rest, so that a hung mount cannot hold up Ctrl-C.
        (found,) = each(find, [text_of(source)], what=str)
        return cls._of_source(found, strict, header_limit)

    @classmethod
    def of(
        cls,
        files: Sequence[PathLike],
        weight_map: Mapping[str, str] | None = None,
        *,
        strict: bool = True,
        header_limit: int = HEADER_LIMIT_BYTES,
    ) -> Checkpoint:
        """Opens a list of files as one checkpoint; each may lie anywhere.

        `weight_map` maps tensor names to the base names of `files`, as an index does, and is held
        against them in the same way.
        """
        if isinstance(files, (str, bytes, os.PathLike)):
            raise TypeError("Checkpoint.of takes a list of files; Checkpoint.open takes one path")
        paths = [text_of(file) for file in files]
        if not paths:
            raise CheckpointError("a checkpoint of no files")
        places = tuple(Place(os.path.basename(path), path) for path in paths)
        title = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        if weight_map is not None:
            names = [place.name for place in places]
            for name in names:
                if names.count(name) > 1:
                    raise CheckpointError(f"two files are called {shown(name)}: no index fits them")
            for tensor, name in weight_map.items():
                if name not in names:
                    raise CheckpointError(
                        f"the index leads tensor {shown(tensor)} to {shown(name)}, which is not"
                        " among the files",
                        tensor=tensor,
                    )
        index = dict(weight_map) if weight_map is not None else None
        return cls._of_source(Source(title, places, index), strict, header_limit)

    @classmethod
    @collector_paused()
    def _of_source(cls, found: Source, strict: bool, header_limit: int) -> Checkpoint:
        shards: list[Shard] = []
        headers: list[Header] = []

        def open_shard(place: Place) -> Shard:
            fd, status = open_place(place)
            return Shard(fd, Identity.of(status), path=place.path, name=place.name)

        try:
            # All are opened before the first is read: a download that replaces the shards one by
            # one has the least time to give us two versions.
            with closing(
                each(open_shard, found.places, what=lambda p: p.path, discard=Shard.close)
            ) as opened:
                shards.extend(opened)
            # Its threads end before the descriptors that they read from are closed.
            with closing(
                each(lambda shard: _header_text(shard, header_limit), shards, what=lambda s: s.path)
            ) as texts:
                for number, (shard, text) in enumerate(zip(shards, texts, strict=True)):
                    header = parse_header(text, shard.size, path=shard.path, shard=number)
                    shard.data_start = LENGTH_BYTES + len(text)
                    shard.metadata = header.metadata
                    headers.append(header)
            return cls(found.title, shards, _joined(found, shards, headers, strict))
        except BaseException:
            for shard in shards:
                shard.close()
            raise

    def verify_unchanged(self) -> None:
        """Raises FileChanged when a file is no longer what was opened, CheckpointError if closed.

        To be called after the last byte was read and before a tensor is handed out.
        """
        for shard in self.shards:
            shard.verify_unchanged()

    @property
    def closed(self) -> bool:
        return all(shard.closed for shard in self.shards)

    def busy(self) -> str:
        """For `quiesce`: descriptors can be given back at any time."""
        return ""

    def quiesce(self) -> None:
        """Gives the descriptors back; each file is opened again when it is next asked for."""
        for shard in self.shards:
            shard.quiesce()

    def resume(self) -> None:
        """Opens the files again after `rest`. Raises FileChanged where they are others by now."""
        if not self.closed:
            self.verify_unchanged()

    def close(self) -> None:
        """Closes all files. May be called again."""
        quiesce.unregister(self)
        for shard in self.shards:
            shard.close()

    def __enter__(self) -> Checkpoint:
        for shard in self.shards:
            _ = shard.fd  # raises if closed
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<Checkpoint {self.source}: {len(self.tensors)} tensors, {self.total_bytes} bytes,"
            f" {len(self.shards)} files{', closed' if self.closed else ''}>"
        )


def _header_text(shard: Shard, limit: int) -> bytes:
    """The JSON of a shard's header.

    Without the kernel's read-ahead, which would bring megabytes of data into the page cache, and
    make the beginning of a cold file look warm.
    """
    with suppress(OSError):
        os.posix_fadvise(shard.fd, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        return _read_header(shard, limit)
    finally:
        with suppress(OSError):
            os.posix_fadvise(shard.fd, 0, 0, os.POSIX_FADV_NORMAL)


def _read_header(shard: Shard, limit: int) -> bytes:
    first = read_exactly(shard.fd, 0, min(shard.size, _FIRST_READ_BYTES), shard.path)
    length = header_length(first, shard.size, path=shard.path, limit=limit)
    text = first[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(text) < length:
        text += read_exactly(shard.fd, len(first), length - len(text), shard.path)
    return text


def _joined(
    found: Source, shards: Sequence[Shard], headers: Sequence[Header], strict: bool
) -> dict[str, TensorInfo]:
    """All tensors of all shards, held against the index."""
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        tensors.update(header.tensors)
    weight_map = found.weight_map or {}
    if len(tensors) != sum(len(header.tensors) for header in headers):
        tensors = _chosen(shards, headers, weight_map, strict)
    if strict and weight_map:
        names = [shard.name for shard in shards]
        for name, wanted in weight_map.items():
            info = tensors.get(name)
            if info is None or names[info.shard] != wanted:
                holder = "no shard holds it" if info is None else f"{names[info.shard]} holds it"
                raise CheckpointError(
                    f"{found.index_path or found.title}: the index says that tensor {shown(name)}"
                    f" is in {wanted}, but {holder}",
                    path=found.index_path,
                    tensor=name,
                )
    return tensors


def _chosen(
    shards: Sequence[Shard],
    headers: Sequence[Header],
    weight_map: Mapping[str, str],
    strict: bool,
) -> dict[str, TensorInfo]:
    """One of each tensor, where two shards hold the same: refused, or by the index, or the last."""
    tensors: dict[str, TensorInfo] = {}
    for shard, header in zip(shards, headers, strict=True):
        for name, info in header.tensors.items():
            if (other := tensors.get(name)) is not None:
                if strict:
                    raise CheckpointError(
                        f"tensor {shown(name)} is held by two shards: {shards[other.shard].path}"
                        f" and {shard.path}",
                        path=shard.path,
                        tensor=name,
                    )
                if weight_map.get(name) == shards[other.shard].name:
                    continue
                del tensors[name]  # so that the one that stays keeps the order of the files
            tensors[name] = info
    return tensors
