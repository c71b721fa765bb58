"""Reads a checkpoint into memory that is served meanwhile.

    source ──► Batch ──► host buffers, registered by `peers.memory`
                 └──► each block, compared with the manifest of the source ──► arrivals

The source may be a directory, an object store, a peer, or several of them. Not responsible for what
readers get (`peers.service`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.checkpoint.manifest import LIMIT_BYTES, MANIFEST_NAME, Manifest, parse_manifest
from gdsload.dtypes import DTYPES
from gdsload.errors import (
    CheckpointError,
    CheckpointNotFound,
    GdsloadError,
    without_traceback,
)
from gdsload.loading.batch import Batch
from gdsload.loading.integrity import ChecksumBlock, Verifier
from gdsload.loading.session import Session
from gdsload.loading.settings import ReadSettings
from gdsload.memory.host_buffers import BufferView
from gdsload.memory.tensors import bytes_at, torch_dtype_of, torch_shape
from gdsload.planning.read_plan import ranges_of
from gdsload.remote.directory import USUAL_NAMES, RemoteDirectory
from gdsload.remote.peer import PeerDirectory
from gdsload.remote.replica_directory import LocalReplicaDirectory
from gdsload.remote.urls import is_url, shown_source, split_file, without_secrets
from gdsload.report import LoadReport
from gdsload.system import quiesce
from gdsload.system.parallel import in_thread, note_progress
from gdsload.system.threads import start_thread
from gdsload.system.torch_thread import copying

if TYPE_CHECKING:
    import torch

# The files of a model beside its weights: configuration and tokenizer.
_SMALL_SUFFIXES = (".json", ".txt", ".model", ".jinja")
SMALL_FILE_BYTES = 64 << 20  # of all of them
_SHARD_SUFFIX = ".safetensors"
_INDEX_PART = ".safetensors.index."

Arrived = Callable[[str, int, int], None]  # file, start, end


class _Stopped(GdsloadError):
    """The server has ended the reads."""


class _Watched(Verifier):
    """Reports each block that is right."""

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        super().__init__(checkpoint, manifest)
        self.arrived: Arrived = lambda *_: None

    def check_block(self, block: ChecksumBlock, data: object) -> None:
        super().check_block(block, data)
        name = self._checkpoint.shards[block.tensor.shard].name
        self.arrived(name, block.offset, block.offset + block.nbytes)


class Receiving:
    """A checkpoint that is being read into host memory.

    Args:
        source: A path, the id of a model, or a URL.
        checksums: Whether the manifest of the source is used.

    Attributes:
        infos: The tensors, in file order.
        files: The header of each file, and the names of its tensors in the order of their bytes.
        small_files: Configuration, tokenizer and index, by name.
        manifest: The manifest of the source, b"" if it has none.
        flats: The bytes of each tensor, as a flat tensor of uint8.

    Raises:
        CheckpointError: The source cannot be opened.
        IntegrityError: A header differs from the manifest.
    """

    def __init__(self, source: str, *, checksums: bool) -> None:
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stack = ExitStack()
        try:
            report = LoadReport(shown_source(source))
            self._stack.enter_context(report.whole())
            self._stack.enter_context(quiesce.loading(report.source))
            with report.phase("open"):
                checkpoint = self._stack.enter_context(Checkpoint.open(source))
            self.infos = checkpoint.infos()
            report.tensors, report.wanted_bytes = len(self.infos), checkpoint.total_bytes
            directory = _directory_of(checkpoint)
            # In threads: a source may not answer.
            collect = partial(_small_files, source, directory, checkpoint)
            self.small_files = {} if _is_file(source) else in_thread(collect, directory.path)
            self.manifest = b""
            self._verifier: _Watched | None = None
            if checksums:
                read = partial(self._read_manifest, directory, checkpoint)
                in_thread(read, directory.path)
            session = Session(
                checkpoint,
                report,
                ReadSettings(cache="buffered", page_cache="drop"),
                claim=False,
                pool=False,  # registered before its bytes arrive, pool memory would not show them
                maps=False,  # what is served must not change with the file
                verifier=self._verifier,
            )
            self._stack.enter_context(session)
            self._batch = Batch(session, *session.arrange(ranges_of(self.infos)))
            self._stack.callback(self._batch.release)
            self._checkpoint = checkpoint
            self.files = _headers(checkpoint, self.infos)
            self.flats = _flats(self.infos, self._batch.views)
        except BaseException as error:
            self._stack.__exit__(type(error), error, error.__traceback__)
            raise

    def _read_manifest(self, directory: RemoteDirectory, checkpoint: Checkpoint) -> None:
        # A store that may not be listed forbids what it does not have.
        if not directory.has(MANIFEST_NAME):
            return
        try:
            self.manifest = directory.read(MANIFEST_NAME, LIMIT_BYTES)
        except CheckpointNotFound:
            return
        path = directory.path_of(MANIFEST_NAME)
        self._verifier = _Watched(checkpoint, parse_manifest(self.manifest, path))

    def finish(self) -> None:
        """Waits for all bytes in this thread. Raises as `wait`."""
        with self._stack:
            self._batch.wait(watch=self._watch, parts=self.infos)
            if self._verifier is None:  # otherwise all bytes are known to be right
                self._checkpoint.verify_unchanged()

    def _watch(self) -> None:
        if self._stopping:
            raise _Stopped("the server stopped serving before all bytes had arrived")

    def start(self, arrived: Arrived, ended: Callable[[str], None]) -> None:
        """Waits in a thread of its own. It needs a manifest.

        Args:
            arrived: Called with each part of a file that has arrived and is right.
            ended: Called at the end, before `wait` returns: with the reason if bytes are missing,
                or "".

        Raises:
            GdsloadError: The system has no thread left.
        """
        if self._verifier is not None:
            self._verifier.arrived = arrived
        for name, (header, _) in self.files.items():
            arrived(name, 0, len(header))

        def run() -> None:
            why = ""
            try:
                self.finish()
            except BaseException as error:
                self._error, why = error, str(error) or type(error).__name__
            ended(why)

        self._thread = start_thread(run, "gdsload-receive")
        if self._thread is None:
            raise GdsloadError("cannot serve: the system has no thread left")

    def wait(self) -> None:
        """Waits until all bytes have arrived.

        Raises:
            GdsloadError: The source failed, or `stop` was called; later calls raise the same error.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise without_traceback(self._error)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, over the memory that is served."""
        return {info.name: _typed(info, self.flats[info.name]) for info in self.infos}

    def stop(self) -> BaseException | None:
        """Ends the reads, finished or not. May be called again.

        Returns:
            Why not all bytes have arrived, as `wait` raises it, or None.
        """
        self._stopping = True
        if self._thread is not None:
            self._thread.join()
        self._stack.__exit__(*sys.exc_info())  # if nothing was read: because of this error
        return self._error


def _is_file(source: str) -> bool:
    """Whether this names one shard: an index stands for its directory."""
    if is_url(source):
        return without_secrets(source).endswith(_SHARD_SUFFIX)
    return os.path.isfile(source) and not source.endswith(".json")


def _directory_of(checkpoint: Checkpoint) -> RemoteDirectory:
    first = checkpoint.shards[0]
    return first.directory or LocalReplicaDirectory(str(Path(first.path).parent))


def _names_of(directory: RemoteDirectory) -> set[str]:
    """The names of its files; of a web server, those of a model's small files."""
    try:
        return set(directory.names())
    except CheckpointNotFound:
        raise
    except CheckpointError:  # it cannot be listed
        found = set()
        for name in USUAL_NAMES:
            if directory.has(name):
                found.add(name)
            note_progress()
        return found


def _small_files(
    source: str, directory: RemoteDirectory, checkpoint: Checkpoint
) -> dict[str, bytes]:
    """The other files of a model: those of a peer all, else those with the usual endings."""
    names = _names_of(directory) - {MANIFEST_NAME, *(shard.name for shard in checkpoint.shards)}
    if isinstance(directory, LocalReplicaDirectory):
        names = {name for name in names if os.path.isfile(directory.path_of(name))}
    if not isinstance(directory, PeerDirectory):
        names = {name for name in names if name.endswith(_SMALL_SUFFIXES)}
    if shown_source(source).endswith(".json"):  # other indexes name shards that are not served
        index = split_file(source)[1]
        names = {name for name in names if name == index or _INDEX_PART not in name}
    found: dict[str, bytes] = {}
    for name in sorted(names):
        found[name] = directory.read(name, SMALL_FILE_BYTES)
        note_progress()
        if sum(map(len, found.values())) > SMALL_FILE_BYTES:
            path = directory.path_of(name)
            raise CheckpointError(
                f"{path}: with it, the files beside the weights have more bytes than the limit of"
                f" {SMALL_FILE_BYTES} for all of them",
                path=path,
            )
    return found


def _headers(
    checkpoint: Checkpoint, infos: Sequence[TensorInfo]
) -> dict[str, tuple[bytes, list[str]]]:
    """The header of each file, and the names of its tensors in the order of their bytes."""
    names: list[list[str]] = [[] for _ in checkpoint.shards]
    for info in sorted(infos, key=lambda info: (info.shard, info.offset, info.nbytes)):
        names[info.shard].append(info.name)
    return {
        shard.name: (shard.read(0, shard.data_start), names[number])
        for number, shard in enumerate(checkpoint.shards)
    }


def _flats(infos: Sequence[TensorInfo], views: dict[str, BufferView]) -> dict[str, torch.Tensor]:
    """The bytes of tensors. Those in one buffer share a storage: it is registered as a whole, and
    there must not be two views of a buffer."""
    import torch

    ends: dict[Any, tuple[int, int]] = {}  # the used part of each buffer
    for info in infos:
        if info.nbytes:
            region, offset = views[info.name]
            low, high = ends.get(region, (offset, 0))
            ends[region] = min(low, offset), max(high, offset + info.nbytes)
    buffers = {
        region: (low, bytes_at(BufferView(region, low), high - low))
        for region, (low, high) in ends.items()
    }
    found = {}
    for info in infos:
        if info.nbytes:
            region, offset = views[info.name]
            low, buffer = buffers[region]
            found[info.name] = buffer[offset - low : offset - low + info.nbytes]
        else:
            found[info.name] = torch.empty(0, dtype=torch.uint8, device="cpu")
    return found


def _typed(info: TensorInfo, flat: torch.Tensor) -> torch.Tensor:
    """The tensor with these bytes: a view, or a copy if they are not aligned."""
    align = DTYPES[info.dtype].align
    if flat.data_ptr() % align or flat.storage_offset() % align:
        with copying():
            flat = flat.clone()
    return flat.view(torch_dtype_of(info)).reshape(torch_shape(info))
