"""`gdsload.serve`: shows the weights in this process's memory to readers elsewhere.

    tensors ──► regions ──► registered with NIXL, once ──► read one-sided by other processes
       │                    (what cannot be registered is staged: a copy in host memory)
       └──► publication: virtual files, checksums, a version ──► metadata service

Not responsible for reading: `remote.peer`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from gdsload.checkpoint import Checkpoint
from gdsload.checkpoint.manifest import MANIFEST_NAME
from gdsload.dtypes import DTYPES, known_dtype
from gdsload.errors import GdsloadError, shown
from gdsload.peers.memory import RegisteredMemory
from gdsload.peers.publication import (
    SINGLE_FILE,
    Publication,
    PublishedFile,
    PublishedTensor,
    file_of,
    published,
)
from gdsload.peers.service import Served, Service
from gdsload.peers.tickets import Tickets
from gdsload.remote.directory import is_file_name, is_url, without_secrets

if TYPE_CHECKING:
    import torch

MAX_REQUESTS = 32
MAX_REQUESTS_PER_READER = 8
LEASE_SECONDS = 30.0  # longer than a reader waits for one read
# The files of a model beside its weights: configuration and tokenizer.
_SMALL_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_SMALL_FILE_BYTES = 64 << 20


class ServerStatus(NamedTuple):
    """The state of a server.

    Attributes:
        url: What readers open, with the name of the host it listens on.
        version: A digest of the files, or "" if nothing is served.
        tensors: The number of tensors.
        nbytes: Their bytes.
        staged_bytes: Those of tensors of which a copy in host memory is served.
        staged_reason: Why, or "".
        readers: The number of readers that are connected.
        in_flight: The number of requests that readers have in flight.
    """

    url: str
    version: str
    tensors: int
    nbytes: int
    staged_bytes: int
    staged_reason: str
    readers: int
    in_flight: int


class _Tensor(NamedTuple):
    """A tensor to serve: its entry in a header, and its bytes as a flat tensor of uint8."""

    dtype: str
    shape: tuple[int, ...]
    flat: torch.Tensor


class _Weights(NamedTuple):
    """What is served: the tensors, the files that show them, and other files.

    `files` maps a file's name to its header, and to the names of its tensors in their order; a
    header of None is made from the tensors.
    """

    tensors: dict[str, _Tensor]
    files: dict[str, tuple[bytes | None, list[str]]]
    small_files: dict[str, bytes]


class WeightServer:
    """Serves weights until it is closed; `serve` makes one. A context manager.

    Attributes:
        url: What readers open, such as "nixl://127.0.0.1:7700/model".
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        host: str,
        port: int,
        files: Mapping[str, bytes] | None,
        checksums: bool,
        plugin: str,
        parameters: Mapping[str, str] | None,
        max_requests: int,
        max_requests_per_reader: int,
    ) -> None:
        """As for `serve`."""
        like_file = name.endswith((".safetensors", ".json"))  # its URL would be one of a file
        if not is_file_name(name) or not name.isprintable() or like_file:
            raise GdsloadError(f"{shown(name)} is not a name to serve a model by")
        for file in files or ():
            if not is_file_name(file) or file.endswith(".safetensors"):
                raise GdsloadError(f"cannot serve a file of the name {shown(file)}")
        if max_requests < 1 or max_requests_per_reader < 1:
            raise ValueError("the numbers of requests must be positive")
        self._model, self._files, self._checksums = model, dict(files or {}), checksums
        self._plugin, self._parameters = plugin, dict(parameters or {})
        self._memory: RegisteredMemory | None = None
        self._publication: Publication | None = None
        tickets = Tickets(max_requests, max_requests_per_reader, LEASE_SECONDS)
        self._service: Service | None = Service(name, host, port, tickets)
        shown_host = f"[{host}]" if ":" in host else host
        self.url = f"nixl://{shown_host}:{self._service.port}/{quote(name)}"
        try:
            self.publish()
        except BaseException:
            self.close()
            raise

    def publish(self) -> None:
        """Serves the weights as they are now, after `withdraw`. Readers get a new version.

        Raises:
            GdsloadError: The server is closed, or a tensor cannot be served.
            BackendUnavailable: NIXL cannot register the memory.
        """
        service = self._open_service()
        self.withdraw()
        weights = _collected(self._model)
        flats = {name: tensor.flat for name, tensor in weights.tensors.items()}
        memory = RegisteredMemory(flats, self._plugin, self._parameters)
        shown_files: dict[str, PublishedFile] = {}
        for file, (header, names) in weights.files.items():
            tensors = [
                PublishedTensor(name, *weights.tensors[name], memory.locations[name])
                for name in names
            ]
            shown_files[file] = PublishedFile(header, tensors) if header else file_of(tensors)
        publication = published(
            shown_files, weights.small_files | self._files, checksums=self._checksums
        )
        self._memory, self._publication = memory, publication
        service.publish(Served(publication, memory.agent_name, memory.metadata(), self._plugin))

    def withdraw(self) -> None:
        """Stops serving. Afterwards no reader accepts bytes: the weights may be changed.

        Readers in the middle of a load get FileChanged. Waits for requests in flight: up to 30
        seconds for a reader that hangs. May be called again.
        """
        self._open_service().withdraw()
        self._memory = self._publication = None

    def status(self) -> ServerStatus:
        """The state of this server."""
        service, publication, memory = self._service, self._publication, self._memory
        tensors = [
            tensor
            for file in (publication.tensor_files.values() if publication else ())
            for tensor in file.tensors
        ]
        return ServerStatus(
            url=self.url,
            version=publication.version if publication else "",
            tensors=len(tensors),
            nbytes=sum(tensor.location.nbytes for tensor in tensors),
            staged_bytes=memory.staged_bytes if memory else 0,
            staged_reason=memory.staged_reason if memory else "",
            readers=len({each for each in service.readers.values() if each}) if service else 0,
            in_flight=service.tickets.in_flight if service else 0,
        )

    def close(self) -> None:
        """Stops serving and releases the memory. May be called again."""
        if self._service is not None:
            self.withdraw()
            self._service.close()
            self._service = None

    def _open_service(self) -> Service:
        if self._service is None:
            raise GdsloadError(f"{self.url}: the server is closed")
        return self._service

    def __enter__(self) -> WeightServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    model: str | os.PathLike[str] | torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    name: str = "model",
    host: str = "127.0.0.1",
    port: int = 0,
    files: Mapping[str, bytes] | None = None,
    checksums: bool = True,
    nixl_backend: str = "UCX",
    nixl_parameters: Mapping[str, str] | None = None,
    max_requests: int = MAX_REQUESTS,
    max_requests_per_reader: int = MAX_REQUESTS_PER_READER,
) -> WeightServer:
    """Serves weights to other processes, which load them by `nixl://host:port/name`.

    The memory of the tensors is registered with NIXL and read by others one-sided: no copy is made,
    and this process does nothing per byte. Do not change the weights while they are served:
    `withdraw` first, `publish` afterwards. Every process that can connect to the port can read the
    weights: listen in trusted networks only.

    Args:
        model: A model, tensors by name, or the path of a checkpoint, which is loaded into host
            memory. A path is served as the same files, so that its readers see the same bytes at
            the same places. Of tied weights of a model the first name is served.
        name: The name of the model in the URL.
        host: The address to listen on. Readers elsewhere need one that they reach.
        port: The port; 0 takes a free one, which `url` tells.
        files: Further small files, by name. Of a model, its configuration is served; of a path, its
            .json, .txt, .model and .jinja files.
        checksums: Whether to compute checksums first. Readers use them with verify="checksum", and
            sources with the same bytes get the same version. False: the version is random.
        nixl_backend: The backend of NIXL: "UCX" or "LIBFABRIC".
        nixl_parameters: Its parameters, as NIXL names them. UCX reads its own from UCX_* in the
            environment.
        max_requests: The reads in flight of all readers; further ones wait for their turn.
        max_requests_per_reader: Those of one reader.

    Returns:
        The server. It serves until it is closed: use it in a `with` statement, or call `close`.

    Raises:
        BackendUnavailable: NIXL is not installed, or cannot use the memory.
        GdsloadError: It cannot listen there, or a tensor cannot be served.
        CheckpointError: The checkpoint cannot be loaded.

    Example:
        >>> with gdsload.serve(model, name="qwen", host="0.0.0.0", port=7700) as server:
        ...     print(server.url, server.status().version)
    """
    return WeightServer(
        model,
        name=name,
        host=host,
        port=port,
        files=files,
        checksums=checksums,
        plugin=nixl_backend,
        parameters=nixl_parameters,
        max_requests=max_requests,
        max_requests_per_reader=max_requests_per_reader,
    )


# --- what is served ----------------------------------------------------------------------------


def _collected(model: Any) -> _Weights:
    if isinstance(model, (str, os.PathLike)):
        return _of_source(os.fspath(model))
    import torch

    small_files: dict[str, bytes] = {}
    if isinstance(model, torch.nn.Module):
        tensors = _without_aliases(model.state_dict())
        small_files = _configuration(model)
    elif isinstance(model, Mapping):
        tensors = dict(model)
    else:
        raise TypeError(f"cannot serve a {type(model).__name__}: a path, a model or tensors")
    served = {name: _tensor(name, tensor) for name, tensor in tensors.items()}
    return _Weights(served, {SINGLE_FILE: (None, list(served))}, small_files)


def _of_source(source: str) -> _Weights:
    from gdsload.api import load_file

    if is_url(source):
        raise GdsloadError(
            f"{without_secrets(source)}: only checkpoints of this machine are served by their path:"
            " load it, and serve the model or its tensors"
        )
    with Checkpoint.open(source) as checkpoint:
        # Not mapped: what is served must not change with the file.
        tensors = load_file(source, cache="buffered", page_cache="drop", progress=False)
        files: dict[str, tuple[bytes | None, list[str]]] = {}
        for number, shard in enumerate(checkpoint.shards):
            infos = [info for info in checkpoint.tensors.values() if info.shard == number]
            infos.sort(key=lambda info: (info.offset, info.nbytes))
            header = shard.read(0, shard.data_start)
            files[shard.name] = header, [info.name for info in infos]
        checkpoint.verify_unchanged()
        directory = Path(checkpoint.shards[0].path).parent
    served = {name: _tensor(name, tensor) for name, tensor in tensors.items()}
    return _Weights(served, files, {} if os.path.isfile(source) else _small_files(directory))


def _small_files(directory: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in sorted(directory.iterdir()):
        if path.suffix in _SMALL_SUFFIXES and path.name != MANIFEST_NAME and path.is_file():
            found[path.name] = path.read_bytes()
    nbytes = sum(map(len, found.values()))
    if nbytes > _SMALL_FILE_BYTES:
        raise GdsloadError(f"{directory}: its small files have {nbytes} bytes, too many to serve")
    return found


def _without_aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a model; of tied weights the first."""
    seen: set[tuple[Any, ...]] = set()
    found = {}
    for name, tensor in tensors.items():
        key = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if not tensor.numel() or key not in seen:
            found[name] = tensor
        seen.add(key)
    return found


def _configuration(model: torch.nn.Module) -> dict[str, bytes]:
    """The configuration files of a model of transformers, as `save_pretrained` writes them."""
    found: dict[str, bytes] = {}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        facts = json.loads(config.to_json_string(use_diff=True))
        facts["architectures"] = [type(model).__name__]
        dtype = getattr(model, "dtype", None)
        if dtype is not None:
            key = "dtype" if "dtype" in facts else "torch_dtype"  # as the version names it
            facts[key] = str(dtype).removeprefix("torch.")
        found["config.json"] = json.dumps(facts, indent=2, sort_keys=True).encode()
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        found["generation_config.json"] = generation.to_json_string(use_diff=True).encode()
    return found


def _tensor(name: str, tensor: Any) -> _Tensor:
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.is_nested:
        raise GdsloadError(f"cannot serve tensor {shown(name)}: {type(tensor).__name__}")
    dtype = next((each for each in DTYPES if known_dtype(each) == tensor.dtype), None)
    if dtype is None or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise GdsloadError(f"cannot serve tensor {shown(name)}: {kind}")
    shape = tuple(tensor.shape)
    if DTYPES[dtype].bits < 8:  # torch has two elements in a byte
        shape = (*shape[:-1], shape[-1] * 8 // DTYPES[dtype].bits)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return _Tensor(dtype, shape, tensor.contiguous().reshape(-1).view(torch.uint8))
