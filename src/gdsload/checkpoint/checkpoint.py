"""An open checkpoint: its shards, each opened once, and the tensors that their headers describe.

    source -> shard paths -> descriptors -> headers -> tensors (-> compared with the index)

Header and data are read from the same descriptor, or from the same version of a remote file, so
that a file that is replaced meanwhile cannot combine the names of one version with the bytes of
another. Finding files is the task of `locate`, the format of a header that of `header`. Tensor data
is not read here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from typing import NamedTuple, TypeVar

from gdsload._native import system
from gdsload._native.ranges import bytes_of
from gdsload.checkpoint.file_io import open_regular
from gdsload.checkpoint.header import (
    HEADER_LIMIT_BYTES,
    LENGTH_BYTES,
    TensorInfo,
    header_length,
    parse_header,
)
from gdsload.checkpoint.locate import (
    CheckpointFiles,
    PathLike,
    ShardPath,
    locate,
    path_text,
    shard_paths,
    title_of,
)
from gdsload.checkpoint.selection import Names, chosen, no_such_tensor
from gdsload.checkpoint.shard import (
    Identity,
    RemoteShard,
    Shard,
    close_shards,
    quiesce_shards,
)
from gdsload.errors import CheckpointError, one_line, shown
from gdsload.remote.file import HEAD_BYTES
from gdsload.remote.urls import shown_source
from gdsload.system import quiesce
from gdsload.system.gc_control import collector_eased, collector_paused
from gdsload.system.parallel import in_thread, parallel_map
from gdsload.system.stall import STALL_SECONDS
from gdsload.system.storage import filesystem_without_disk

Answer = TypeVar("Answer")

_FEW_SHARDS = 4  # on a disk, one thread opens them faster than several start


class Checkpoint(quiesce.Holder):
    """An open checkpoint. A context manager; garbage collection closes it, too.

    Attributes:
        source: What the user opened, for messages. A URL is without user, password and query.
        shards: The open files. Closing releases their descriptors; the rest stays readable.
        tensors: The tensors by name, ordered by shard and, within a shard, by offset.
        metadata: The metadata of all shards. For a key in several shards, the first one counts.
        total_bytes: The size of all tensors in bytes.
        stall_seconds: Seconds without an answer of the storage after which an operation fails.
    """

    def __init__(
        self,
        source: str,
        shards: Sequence[Shard],
        tensors: Mapping[str, TensorInfo],
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self.source = source
        self.shards = tuple(shards)
        self.tensors = dict(tensors)
        self.metadata: dict[str, str] = {}
        for shard in reversed(self.shards):
            self.metadata.update(shard.metadata or {})
        _require_addressable(source, self.shards)
        self.total_bytes = bytes_of(list(self.tensors.values()))
        self.stall_seconds = stall_seconds
        quiesce.register(self)

    def header_metadata(self) -> dict[str, str] | None:
        """A copy of `metadata`; None if no header has metadata, as in safetensors."""
        has_none = all(shard.metadata is None for shard in self.shards)
        return None if has_none else dict(self.metadata)

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
        stall_seconds: float = STALL_SECONDS,
    ) -> Checkpoint:
        """Opens a .safetensors file, a directory, an index, a model in the hub cache, or a URL.

        In a directory it takes the first of: model[.variant].safetensors, its index, the same of
        diffusion_pytorch_model, the only index, all .safetensors files that fit the variant.
        Symbolic links are followed; an index may name files in its own directory only. Nothing is
        downloaded from a hub.

        Args:
            source: The path, the hub id, or a URL: s3://bucket/model, gs://, az:// or https://. A
                URL that ends with .safetensors or .json is one of a file, any other one of a
                directory. Needs the extra `remote`.
            revision: For a hub id: a branch, a tag or a commit; "main" if None.
            subfolder: A directory inside `source`.
            variant: For example "fp16", for model.fp16.safetensors.
            cache_dir: For a hub id: the hub cache; None: as HF_HUB_CACHE or HF_HOME say. For a URL:
                a directory in which its files are kept for later loads; None: they are not.
            strict: Whether to raise an error if the index names a tensor that its shard does not
                have, or if two shards have the same tensor. With False such entries of the index
                are ignored, and of two shards the last counts, as for transformers. Tensors that
                are not in the index are loaded in both cases, also as by transformers.
            header_limit: The largest size of a header and of the index in bytes.
            stall_seconds: Seconds without an answer of the storage after which an operation fails.

        Raises:
            CheckpointError: A file is missing, cannot be opened or is invalid.
            ReadError: A header could not be read.
            StallError: The storage did not answer.
            BackendUnavailable: The client for a URL is not installed.

        Example:
            >>> with Checkpoint.open("/models/Qwen3-0.6B") as checkpoint:
            ...     print(checkpoint.total_bytes, checkpoint.tensors["lm_head.weight"].shape)
        """

        find = partial(
            locate,
            revision=revision,
            subfolder=subfolder,
            variant=variant,
            cache_dir=cache_dir,
            limit=header_limit,
        )
        return cls._opened(path_text(source), find, strict, header_limit, stall_seconds)

    @classmethod
    def of(
        cls,
        files: Sequence[PathLike],
        *,
        cache_dir: PathLike | None = None,
        strict: bool = True,
        header_limit: int = HEADER_LIMIT_BYTES,
        stall_seconds: float = STALL_SECONDS,
    ) -> Checkpoint:
        """Opens a list of files, in any directories, as one checkpoint.

        Args:
            files: The shards: all on this machine, or all URLs.
            cache_dir: For URLs: as for `open`.
            strict: As for `open`.
            header_limit: As for `open`.
            stall_seconds: As for `open`.

        Raises:
            CheckpointError: As for `open`.
        """
        if isinstance(files, (str, bytes, os.PathLike)):
            raise TypeError("Checkpoint.of takes a list of files; Checkpoint.open takes one path")
        paths = [path_text(file) for file in files]
        if not paths:
            raise CheckpointError("a checkpoint of no files")
        shards = shard_paths(paths, cache_dir)
        title = shards[0].path if len(paths) == 1 else f"{shards[0].path} and {len(paths) - 1} more"
        if len({shard.directory is None for shard in shards}) > 1:
            raise CheckpointError(f"{title}: some of these files are URLs, and some are not")
        return cls.located(
            CheckpointFiles(title, shards),
            strict=strict,
            header_limit=header_limit,
            stall_seconds=stall_seconds,
        )

    @classmethod
    def located(
        cls,
        files: CheckpointFiles,
        *,
        strict: bool = True,
        header_limit: int = HEADER_LIMIT_BYTES,
        stall_seconds: float = STALL_SECONDS,
    ) -> Checkpoint:
        """Internal: opens files that `locate` has found. The rest is as for `open`."""
        return cls._opened(files.title, lambda _: files, strict, header_limit, stall_seconds)

    @classmethod
    @collector_eased()
    def _opened(
        cls,
        source: str,
        find: Callable[[str], CheckpointFiles],
        strict: bool,
        header_limit: int,
        stall_seconds: float,
    ) -> Checkpoint:
        if not header_limit >= 0:  # also if it is NaN, which nothing is larger than
            raise ValueError(f"header_limit={header_limit!r} must be a number of bytes")
        files, shards, texts = in_thread(
            partial(_find_and_open, source, find, header_limit),
            shown_source(source),
            discard=_Found.close,
            stall_seconds=stall_seconds,
        )
        try:
            if len(shards) < len(files.shards):
                # All shards are opened before the first is read: this leaves a download that
                # replaces them one by one the least time to mix two versions.
                shards += _opened_in_parallel(files, len(shards), stall_seconds)
            shards = _local_copies(shards)
            headers = _headers(shards, texts, header_limit, stall_seconds)
            with collector_paused():
                merged = _merged(files, shards, headers, strict)
            return cls(files.title, shards, merged, stall_seconds)
        except BaseException:
            close_shards(shards)
            raise

    def infos(self, names: Names = None) -> list[TensorInfo]:
        """The tensors that `names` chooses, each once, in that order; all, in file order, if None.

        Args:
            names: As for `gdsload.load_file`.

        Raises:
            CheckpointError: No tensor has a name or a pattern of `names`.

        Example:
            >>> with gdsload.Checkpoint.open("model") as checkpoint:
            ...     nbytes = sum(info.nbytes for info in checkpoint.infos(["*.mlp.*"]))
        """
        return chosen(self.tensors, names, self.source)

    def info(self, name: str) -> TensorInfo:
        """One tensor. Raises CheckpointError for a name that the checkpoint does not have.

        Args:
            name: Its name in the checkpoint.

        Example:
            >>> with gdsload.Checkpoint.open("model") as checkpoint:
            ...     shape = checkpoint.info("lm_head.weight").shape
        """
        info = self.tensors.get(name)
        if info is None:
            raise no_such_tensor(str(name), self.tensors, self.source)
        return info

    @contextmanager
    def locating_errors(self) -> Iterator[None]:
        """Internal: puts the file of its tensor, or the checkpoint, in front of errors that leave
        this block and name no file."""
        try:
            yield
        except CheckpointError as error:
            if error.path is None:
                info = self.tensors.get(error.tensor or "")
                error.path = self.source if info is None else self.shards[info.shard].path
                error.args = (one_line(f"{error.path}: {error}"),)
            raise

    def verify_unchanged(self, shards: Iterable[int] | None = None) -> None:
        """Checks that files are still the versions that were opened.

        Call it after the last byte was read and before a tensor is handed out.

        Args:
            shards: The numbers of the shards to check, in `self.shards`; None means all.

        Raises:
            FileChanged: A file was written or replaced.
            StallError: Distant storage did not answer.
            CheckpointError: The checkpoint is closed.
        """
        asked = self.shards if shards is None else [self.shards[number] for number in shards]
        hanging = [shard for shard in asked if shard.may_hang]
        if hanging:  # in threads
            for _ in parallel_map(
                Shard.verify_unchanged,
                hanging,
                path_of=lambda shard: shard.path,
                stall_seconds=self.stall_seconds,
            ):
                pass
        for shard in asked:
            if not shard.may_hang:
                shard.verify_unchanged()

    def answer_to(self, question: Callable[[], Answer], shards: Iterable[int]) -> Answer:
        """Internal: the answer to a question about shards that the server of distant storage may
        be asked.

        Raises StallError: such storage is asked in a thread.
        """
        asked = (self.shards[number] for number in shards)
        hanging = next((shard for shard in asked if shard.may_hang), None)
        if hanging is None:
            return question()
        return in_thread(question, hanging.path, stall_seconds=self.stall_seconds)

    @property
    def remote(self) -> bool:
        """Whether its files are remote, such as in an object store."""
        return any(shard.remote is not None for shard in self.shards)

    @property
    def closed(self) -> bool:
        """Whether all files are closed."""
        return all(shard.closed for shard in self.shards)

    def quiesce(self) -> None:
        """Closes the descriptors; each file is opened again when it is needed."""
        quiesce_shards(self.shards)

    def resume(self) -> None:
        """Opens the files again after `quiesce`. Raises FileChanged if one is another version."""
        if not self.closed:
            self.verify_unchanged()

    def close(self) -> None:
        """Closes all files. May be called again."""
        quiesce.unregister(self)
        close_shards(self.shards)

    def __enter__(self) -> Checkpoint:
        for shard in self.shards:
            shard.require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<Checkpoint {self.source}: {len(self.tensors)} tensors, {self.total_bytes} bytes,"
            f" {len(self.shards)} files{', closed' if self.closed else ''}>"
        )


class Lookup(NamedTuple):
    """The keyword arguments of `Checkpoint.open`."""

    revision: str | None = None
    subfolder: str = ""
    variant: str | None = None
    cache_dir: PathLike | None = None
    strict: bool = True
    header_limit: int = HEADER_LIMIT_BYTES
    stall_seconds: float = STALL_SECONDS

    def open(self, source: PathLike | Sequence[PathLike]) -> Checkpoint:
        """Opens the checkpoint, or a list of its shards. Raises what `Checkpoint.open` raises."""
        if isinstance(source, (list, tuple)):
            if self.subfolder or self.variant:
                raise CheckpointError("a list of files has no subfolder or variant")
            return Checkpoint.of(
                source,
                cache_dir=self.cache_dir,
                strict=self.strict,
                header_limit=self.header_limit,
                stall_seconds=self.stall_seconds,
            )
        title_of(source)  # or TypeError
        return Checkpoint.open(source, **self._asdict())  # type: ignore[arg-type]


class _Found(NamedTuple):
    """What the first thread finds."""

    files: CheckpointFiles
    shards: list[Shard]  # those that it has opened, in the order of `files`
    texts: list[bytes]  # their headers, if it has opened all

    def close(self) -> None:
        close_shards(self.shards)


def _find_and_open(source: str, find: Callable[[str], CheckpointFiles], limit: int) -> _Found:
    """The files of a checkpoint. If they are few and on a disk, it opens them and reads their
    headers, too; of others, each access may be a round trip, and only one file is opened here."""
    files = find(source)
    shards: list[Shard] = []
    total = len(files.shards)
    filesystems: dict[int, str] = {}
    try:
        for each in files.shards if total <= _FEW_SHARDS else ():
            if total > 1 and each.directory is not None:
                break
            shards.append(_open_shard(each, named_by=files.index_path, filesystems=filesystems))
            if total > 1 and not shards[-1].on_disk:
                break
        has_all = len(shards) == total
        return _Found(files, shards, [_read_header(each, limit) for each in shards if has_all])
    except BaseException:
        close_shards(shards)
        raise


def _require_addressable(source: str, shards: Sequence[Shard]) -> None:
    """Raises CheckpointError for more bytes than native code counts: sparse files, or a server, may
    claim any number."""
    if (size := sum(shard.size for shard in shards)) > sys.maxsize:
        raise CheckpointError(f"{source}: its files claim {size:,} bytes", path=source)


def _opened_in_parallel(files: CheckpointFiles, first: int, stall_seconds: float) -> list[Shard]:
    """Opens the shards from number `first` on, or none."""
    opened: list[Shard] = []
    unused: list[Shard] = []
    failed = False

    def discard(shard: Shard) -> None:
        """Closes a shard that was opened when another one had failed; at once if all have."""
        unused.append(shard)
        if failed:
            close_shards(unused)

    open_shard = partial(_open_shard, named_by=files.index_path, filesystems={})
    try:
        with closing(
            parallel_map(
                open_shard,
                files.shards[first:],
                path_of=_path_of,
                discard=discard,
                stall_seconds=stall_seconds,
            )
        ) as opening:
            opened.extend(opening)
        return opened
    except BaseException:
        failed = True
        close_shards([*opened, *unused])
        raise


def _path_of(shard: ShardPath | Shard) -> str:
    return shard.path


def _open_shard(shard: ShardPath, named_by: str | None, filesystems: dict[int, str]) -> Shard:
    """`filesystems`: those of the other shards by device number, to which this one is added."""
    if shard.directory is not None:
        return RemoteShard(shard.directory, shard.name)
    fd, status = open_regular(shard.path, named_by=named_by)
    return _shard_of(fd, status, shard.path, shard.name, filesystems)


def _shard_of(
    fd: int, status: os.stat_result, path: str, name: str, filesystems: dict[int, str]
) -> Shard:
    if status.st_dev not in filesystems:
        filesystems[status.st_dev] = filesystem_without_disk(fd, path, status)
    return Shard(
        fd,
        Identity.of(status),
        path=path,
        name=name,
        fstype=filesystems[status.st_dev],
        preferred_bytes=status.st_blksize,
    )


def _local_copies(shards: list[Shard]) -> list[Shard]:
    """The local copies of remote files, if the cache has all of them; else `shards`."""
    copies: list[Shard] = []
    filesystems: dict[int, str] = {}
    for shard in shards:
        copy = _local_copy(shard, filesystems)
        if copy is None:
            for each in copies:
                each.close()
            return shards
        copies.append(copy)
    for shard in shards:
        shard.close()
    return copies


def _local_copy(shard: Shard, filesystems: dict[int, str]) -> Shard | None:
    file = shard.remote
    copy = None if file is None else file.local_copy()
    if file is None or copy is None:
        return None
    try:
        status = os.fstat(copy.fd)
    except OSError:  # nothing that fails in the cache ends a load
        os.close(copy.fd)
        return None
    made = _shard_of(copy.fd, status, copy.path, shard.name, filesystems)
    made.directory, made.origin = shard.directory, (file.key, file.version)
    return made


def _read_header(shard: Shard, limit: int) -> bytes:
    """The JSON of a shard's header.

    The kernel's read-ahead is turned off meanwhile: it would fill the page cache with megabytes of
    data, and make the beginning of a cold file look warm.
    """
    with nullcontext() if shard.remote is not None else _no_readahead(shard.fd):
        warm = shard.distant and _has_first_page(shard.fd)
        started = time.monotonic()
        most = HEAD_BYTES if shard.remote is None else shard.remote.head_bytes
        first = shard.read(0, min(shard.size, max(most, LENGTH_BYTES)))
        if not (warm or shard.first_read_seconds):
            shard.first_read_seconds = time.monotonic() - started
        length = header_length(first, shard.size, path=shard.path, limit=limit)
        text = first[LENGTH_BYTES : LENGTH_BYTES + length]
        if length > len(text):
            text += shard.read(len(first), length - len(text))
        return text


def _has_first_page(fd: int) -> bool:
    """Whether the page cache has the first page of a file; False if the kernel does not tell."""
    try:
        return system.cachestat(fd, 0, 1) > 0
    except OSError:
        return False


@contextmanager
def _no_readahead(fd: int) -> Iterator[None]:
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        yield
    finally:
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)


def _headers(
    shards: Sequence[Shard], texts: Iterable[bytes], limit: int, stall_seconds: float
) -> list[dict[str, TensorInfo]]:
    """The tensors of each shard, by the text of its header; without `texts`, they are read."""
    headers: list[dict[str, TensorInfo]] = []
    with ExitStack() as stack:
        if not texts:
            read_header = partial(_read_header, limit=limit)
            texts = parallel_map(read_header, shards, path_of=_path_of, stall_seconds=stall_seconds)
            # This ends the threads before the descriptors that they read are closed.
            stack.callback(texts.close)
        for number, (shard, text) in enumerate(zip(shards, texts, strict=True)):
            with collector_paused():
                header = parse_header(text, shard.size, path=shard.path, shard=number)
            shard.data_start = LENGTH_BYTES + len(text)
            shard.metadata = header.metadata
            headers.append(header.tensors)
    return headers


def _merged(
    files: CheckpointFiles,
    shards: Sequence[Shard],
    headers: Sequence[Mapping[str, TensorInfo]],
    strict: bool,
) -> dict[str, TensorInfo]:
    """All tensors of all shards, compared with the index."""
    tensors: dict[str, TensorInfo] = {}
    for shard, header in zip(shards, headers, strict=True):
        if not tensors.keys().isdisjoint(header):
            for name in [name for name in header if name in tensors]:
                other = shards[tensors[name].shard]
                if strict:
                    raise CheckpointError(
                        f"tensor {shown(name)} is in two shards: {other.path} and {shard.path}",
                        path=shard.path,
                        tensor=name,
                    )
                del tensors[name]  # the new entry is then in the order of the shards
        tensors.update(header)
    if strict:
        for name, wanted in (files.weight_map or {}).items():
            info = tensors.get(name)
            if info is None or shards[info.shard].name != wanted:
                found = f"{shards[info.shard].name} has it" if info else "no shard has it"
                raise CheckpointError(
                    f"{files.index_path}: the index says that tensor {shown(name)} is in {wanted},"
                    f" but {found}",
                    path=files.index_path,
                    tensor=name,
                )
    return tensors
