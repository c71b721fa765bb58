"""`gdsload.serve`: shows the weights in this process's memory to readers on other machines.

    tensors ──► regions ──► registered with NIXL, once ──► read one-sided by other processes
       │                    (what cannot be registered is staged: a copy in host memory)
       └──► publication: virtual files, checksums, a version ──► metadata service

A source that has a manifest is served while it is still read (`peers.receiving`). Not responsible
for what readers do: `remote.peer`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from gdsload.dtypes import DTYPES, known_dtype
from gdsload.errors import GdsloadError, one_line, shown, without_traceback
from gdsload.memory.tensors import flat_bytes
from gdsload.peers.arrivals import Arrivals
from gdsload.peers.memory import RegisteredMemory
from gdsload.peers.publication import (
    SINGLE_FILE,
    Publication,
    PublishedFile,
    PublishedTensor,
    file_of,
    manifest_bytes,
    published,
)
from gdsload.peers.receiving import SMALL_FILE_BYTES, Receiving
from gdsload.peers.service import Served, Service
from gdsload.peers.tickets import Tickets
from gdsload.remote.directory import is_file_name
from gdsload.remote.messages import PAYLOAD_LIMIT_BYTES
from gdsload.system import quiesce
from gdsload.system.torch_thread import copying

if TYPE_CHECKING:
    import torch

MAX_REQUESTS = 32
MAX_REQUESTS_PER_READER = 8
LEASE_SECONDS = 30.0  # longer than a reader waits for one read
_REASON_CHARACTERS = 1000  # of the failure of a source, for its readers


class ServerStatus(NamedTuple):
    """The state of a server.

    Attributes:
        url: What readers open, with the name of the host it listens on.
        version: A digest of the files, random without checksums; "" if nothing is served.
        tensors: The number of tensors.
        nbytes: Their bytes.
        staged_bytes: Those of copies that are served: in host memory of tensors that NIXL cannot
            register, on their device of tensors that are not contiguous.
        staged_reason: Why, or "".
        readers: The number of readers that are connected.
        in_flight: The number of requests that readers have in flight.
        received_bytes: The bytes of the files that have arrived from the source, and are served.
        failure: Why no more will arrive, or "".
    """

    url: str
    version: str
    tensors: int
    nbytes: int
    staged_bytes: int
    staged_reason: str
    readers: int
    in_flight: int
    received_bytes: int
    failure: str


class _Tensor(NamedTuple):
    """A tensor to serve: its entry in a header, and its bytes as a flat tensor of uint8."""

    dtype: str
    shape: tuple[int, ...]
    flat: torch.Tensor


class _Weights(NamedTuple):
    """What is served: the tensors, the files that show them, and other files.

    `files` maps a file's name to its header, and to the names of its tensors in their order; a
    header of b"" is made from the tensors. `copied_bytes` are those of tensors that were copied.
    """

    tensors: dict[str, _Tensor]
    files: dict[str, tuple[bytes, list[str]]]
    small_files: dict[str, bytes]
    copied_bytes: int = 0


class WeightServer(quiesce.Holder):
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
    ) -> None:
        """As for `serve`."""
        like_file = name.endswith((".safetensors", ".json"))  # its URL would be one of a file
        if not is_file_name(name) or not name.isprintable() or like_file:
            raise GdsloadError(f"{shown(name)} is not a name to serve a model by")
        for file in files or ():
            if not is_file_name(file) or file.endswith(".safetensors"):
                raise GdsloadError(f"cannot serve a file of the name {shown(file)}")
        self._model, self._files, self._checksums = model, dict(files or {}), checksums
        self._plugin, self._parameters = plugin, dict(parameters or {})
        self._receiving: Receiving | None = None
        self._missing: BaseException | None = None  # why bytes are missing while nothing is served
        self._memory: RegisteredMemory | None = None
        self._copied_bytes = 0
        self._publication: Publication | None = None
        self._arrivals: Arrivals | None = None  # None: all bytes are there
        tickets = Tickets(MAX_REQUESTS, MAX_REQUESTS_PER_READER, LEASE_SECONDS)
        self._service: Service | None = Service(name, host, port, tickets)
        shown_host = f"[{host}]" if ":" in host else host
        self.url = f"nixl://{shown_host}:{self._service.port}/{quote(name)}"
        quiesce.register(self)
        try:
            self.publish()
        except BaseException:
            self.close()
            raise

    def busy(self) -> str:
        """Internal: a snapshot cannot carry connections and registered memory."""
        return f"{self.url} is being served"

    def publish(self) -> None:
        """Serves the weights as they are now, after `withdraw`.

        Readers get another version if the bytes have changed, or if there are no checksums.

        Raises:
            GdsloadError: The server is closed, or a tensor cannot be served.
            CheckpointError: The source cannot be read.
            BackendUnavailable: NIXL cannot register the memory.
        """
        self.withdraw()
        try:
            self._publish(self._open_service())
        except BaseException as error:
            # Not the error itself: the frames of its traceback keep the weights.
            why = f"{type(error).__name__}: {error}"
            try:
                self.withdraw()
            finally:
                self._missing = GdsloadError(f"{self.url}: publish() has failed: {why}")
            raise

    def _publish(self, service: Service) -> None:
        receiving = None
        if isinstance(self._model, (str, os.PathLike)):
            source = os.fspath(self._model)
            receiving = self._receiving = Receiving(source, checksums=self._checksums)
            weights = _of_source(receiving)
        else:
            weights = _collected(self._model)
        self._missing = None
        flats = {name: tensor.flat for name, tensor in weights.tensors.items()}
        memory = self._memory = RegisteredMemory(flats, self._plugin, self._parameters)
        self._copied_bytes = weights.copied_bytes
        files: dict[str, PublishedFile] = {}
        for file, (header, names) in weights.files.items():
            tensors = [
                PublishedTensor(name, *weights.tensors[name], memory.locations[name])
                for name in names
            ]
            files[file] = PublishedFile(header, tensors) if header else file_of(tensors)
        manifest = b"" if receiving is None else receiving.manifest
        if manifest:
            self._arrivals = Arrivals()
        else:
            if receiving is not None:
                receiving.finish()
            manifest = manifest_bytes(files) if self._checksums else b""
        others = weights.small_files | self._files
        if (nbytes := sum(map(len, others.values()))) > SMALL_FILE_BYTES:
            raise GdsloadError(
                f"{self.url}: files other than the weights have {nbytes:,} bytes, and"
                f" {SMALL_FILE_BYTES:,} is the limit for all of them"
            )
        if len(manifest) > PAYLOAD_LIMIT_BYTES:
            raise GdsloadError(
                f"{self.url}: the checksums have {len(manifest):,} bytes, and a reader takes"
                f" {PAYLOAD_LIMIT_BYTES:,}: serve without them (checksums=False)"
            )
        self._publication = published(files, others, manifest)
        facts = memory.agent_name, memory.metadata(), self._plugin
        service.publish(Served(self._publication, *facts, self._arrivals))
        if receiving is not None and self._arrivals is not None:
            arrivals = self._arrivals
            receiving.start(
                partial(service.tell, arrivals.add),
                lambda why: service.run(arrivals.end(one_line(why)[:_REASON_CHARACTERS])),
            )

    def wait(self) -> None:
        """Waits until all bytes have arrived from a path or a URL that is served meanwhile.

        Raises:
            GdsloadError: The source failed; later calls raise the same error. Readers still get the
                bytes that have arrived, and an error with this reason for others. Or the server was
                closed, or withdrawn, before all bytes had arrived, or `publish` has failed.
        """
        receiving, missing = self._receiving, self._missing
        if receiving is not None:
            receiving.wait()
        elif missing is not None:
            raise without_traceback(missing)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of a path or a URL, for use in this process: no copies, but views of the
        memory that is served. Do not change them while it is.

        Waits as `wait`, and raises the same errors.

        Returns:
            The tensors by name, on the CPU.

        Raises:
            GdsloadError: The server has no source, or nothing is served at present.

        Example:
            >>> with gdsload.serve("nixl://10.0.0.5:7700/qwen", host="0.0.0.0") as server:
            ...     model.load_state_dict(server.tensors(), assign=True)
        """
        receiving = self._receiving
        if receiving is None:
            self.wait()  # raises why bytes are missing
            raise GdsloadError(f"{self.url}: no path and no URL is served at present")
        receiving.wait()
        return receiving.tensors()

    def withdraw(self) -> None:
        """Stops serving. Afterwards no reader accepts bytes: the weights may be changed.

        Readers in the middle of a load get FileChanged. Waits for requests in flight: up to 30
        seconds for a reader that hangs. May be called again.
        """
        service = self._open_service()
        if self._receiving is not None:
            self._missing = self._receiving.stop()
            if self._missing is not None:
                self._missing.__traceback__ = None  # its frames keep the weights
        service.withdraw()
        self._receiving = self._memory = self._publication = self._arrivals = None

    def status(self) -> ServerStatus:
        """The state of this server."""
        service, publication, memory = self._service, self._publication, self._memory
        arrivals, copied_bytes = self._arrivals, self._copied_bytes if memory else 0
        failure = arrivals.failure if arrivals else one_line(str(self._missing or ""))
        reasons = [
            memory.staged_reason if memory else "",
            "some tensors are not contiguous" if copied_bytes else "",
        ]
        files = publication.tensor_files.values() if publication else ()
        tensors = [tensor for file in files for tensor in file.tensors]
        return ServerStatus(
            url=self.url,
            version=publication.version if publication else "",
            tensors=len(tensors),
            nbytes=sum(tensor.location.nbytes for tensor in tensors),
            staged_bytes=memory.staged_bytes + copied_bytes if memory else 0,
            staged_reason="; ".join(filter(None, reasons)),
            readers=service.connected_readers() if service else 0,
            in_flight=service.tickets.in_flight if service else 0,
            received_bytes=arrivals.nbytes if arrivals else sum(file.size for file in files),
            failure=failure,
        )

    def close(self) -> None:
        """Stops serving and releases the memory, also if the wait for a reader is interrupted. May
        be called again."""
        service = self._service
        if service is None:
            return
        quiesce.unregister(self)
        try:
            self.withdraw()
        finally:
            try:
                service.close()
            finally:
                self._service = self._receiving = None
                self._memory = self._publication = self._arrivals = None

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
) -> WeightServer:
    """Serves weights to other processes, which load them by `nixl://host:port/name`.

    The memory of the tensors is registered with NIXL and read by others one-sided: no copy is made,
    and this process does nothing per byte. Do not change the weights while they are served:
    `withdraw` first, `publish` afterwards. Every process that can connect to the port can read the
    weights: listen in trusted networks only.

    Args:
        model: A model, tensors by name, or the path or the URL of a checkpoint, which is loaded
            into host memory. It is served as the same files, so that readers see the same bytes at
            the same places. If there is a manifest beside the files, as peers have one, this
            returns at once: readers get what has arrived, and wait for the rest. Of tied weights of
            a model the first name is served.
        name: The name of the model in the URL.
        host: The address to listen on. Readers on other machines need one that they reach;
            "0.0.0.0" is all addresses of this machine: in `url`, readers put one of them in its
            place.
        port: The port; 0 takes a free one, which `url` tells.
        files: Further small files, by name. Of a model, its configuration is served; of a peer, its
            small files; of a path or another URL, the .json, .txt, .model and .jinja files.
        checksums: Whether to serve checksums: those of the manifest beside the files, with which
            all bytes are compared as they arrive, or else computed first. Readers use them with
            verify="checksum", and sources with the same bytes and checksums get the same version.
            False: the version is random, and a path or a URL is loaded before it is served.
        nixl_backend: The backend of NIXL: "UCX" or "LIBFABRIC".
        nixl_parameters: Its parameters, as NIXL names them. UCX reads its own from UCX_* in the
            environment.

    Returns:
        The server. It serves until it is closed: use it in a `with` statement, or call `close`.

    Raises:
        BackendUnavailable: NIXL is not installed, or cannot use the memory.
        GdsloadError: It cannot listen there, the host is empty, or a tensor cannot be served.
        CheckpointError: The checkpoint cannot be loaded.
        IntegrityError: A header differs from the manifest beside the files.
        ReadError: A read failed before the checkpoint was served.

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
    )


# --- what is served ----------------------------------------------------------------------------


def _collected(model: Any) -> _Weights:
    import torch

    small_files: dict[str, bytes] = {}
    if isinstance(model, torch.nn.Module):
        tensors = model.state_dict()
        for name, tensor in tensors.items():
            _require_elements(name, tensor)
        tensors = _without_aliases(tensors)
        small_files = _configuration(model)
    elif isinstance(model, Mapping):
        tensors = dict(model)
    else:
        raise TypeError(f"model must be a path, a module or tensors, not {type(model).__name__}")
    served = {name: _tensor(name, tensor) for name, tensor in tensors.items()}
    copied_bytes = sum(
        each.flat.numel()
        for name, each in served.items()
        if each.flat.data_ptr() != tensors[name].data_ptr()
    )
    return _Weights(served, {SINGLE_FILE: (b"", list(served))}, small_files, copied_bytes)


def _of_source(source: Receiving) -> _Weights:
    tensors = {
        info.name: _Tensor(info.dtype, info.shape, source.flats[info.name]) for info in source.infos
    }
    return _Weights(tensors, source.files, source.small_files)


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


def _require_elements(name: str, tensor: Any) -> None:
    """Raises GdsloadError if it is no tensor that holds its elements itself, as a DTensor."""
    import torch

    plain = isinstance(tensor, torch.Tensor) and not tensor.is_nested
    if not plain or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise GdsloadError(f"cannot serve tensor {shown(name)}: {type(tensor).__name__}")


def _tensor(name: str, tensor: Any) -> _Tensor:
    import torch

    _require_elements(name, tensor)
    dtype = next((each for each in DTYPES if known_dtype(each) == tensor.dtype), None)
    if dtype is None or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise GdsloadError(f"cannot serve tensor {shown(name)}: {kind}")
    shape = tuple(tensor.shape)
    if DTYPES[dtype].bits < 8:  # torch has two elements in a byte
        shape = (*shape[:-1], shape[-1] * 8 // DTYPES[dtype].bits)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    with copying():
        return _Tensor(dtype, shape, flat_bytes(tensor.contiguous()))
