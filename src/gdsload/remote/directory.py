"""Remote directories: the files that a URL names.

    s3://bucket/model ──► RemoteDirectory ──┬─ names, read ──► index, config.json
                                            └─ open ──► RemoteFile, one for each shard

Not responsible for the text of URLs (`urls`), and for which files belong to a checkpoint
(`checkpoint.locate`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection
from importlib import import_module
from typing import TYPE_CHECKING

from gdsload.errors import CheckpointError
from gdsload.remote.urls import may_show_password, sources_of, split_url, without_secrets

if TYPE_CHECKING:
    from gdsload.remote.file import RemoteFile

# Small files of a model: looked for on a web server, which cannot list its files.
USUAL_NAMES = (
    "adapter_config.json", "added_tokens.json", "audio_tokenizer_config.json",
    "chat_template.jinja", "chat_template.json", "config.json", "generation_config.json",
    "merges.txt", "model.safetensors.index.json", "normalizer.json", "preprocessor_config.json",
    "processor_config.json", "sentencepiece.bpe.model", "source.spm", "special_tokens_map.json",
    "spiece.model", "target.spm", "tekken.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "video_preprocessor_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
_OBJECT_STORE = "gdsload.remote.object_store:ObjectDirectory"
# The class that reads URLs of each scheme. It is created from a URL.
_CLASSES = dict.fromkeys(
    ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https"), _OBJECT_STORE
)
_CLASSES["nixl"] = "gdsload.remote.peer:PeerDirectory"
_CLASSES["replicas"] = "gdsload.remote.replica_directory:ReplicaDirectory"


class RemoteDirectory(ABC):
    """The files directly in one remote directory.

    Attributes:
        path: Its URL, without credentials, for messages.
    """

    path: str

    def path_of(self, name: str) -> str:
        """The URL of one of its files, for messages."""
        return f"{self.path}/{name}"

    @abstractmethod
    def names(self) -> Collection[str]:
        """The names of its files.

        Raises CheckpointError if it cannot be listed.
        """

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether it has a file of this name, also if it cannot be listed."""

    @abstractmethod
    def open(self, name: str) -> RemoteFile:
        """Opens the present version of a file.

        Raises:
            CheckpointNotFound: There is no such file.
            CheckpointAccessError: It may not be read.
            CheckpointUnreadable: It could not be read for another reason.
        """

    def read(self, name: str, limit: int) -> bytes:
        """All of a small file.

        Raises CheckpointError, as `open`, and if it is larger than `limit` bytes.
        """
        file = self.open(name)
        try:
            if file.size > limit:
                raise CheckpointError(
                    f"{file.url}: it has {file.size} bytes, more than the limit of {limit}",
                    path=file.url,
                )
            return file.read(0, file.size)
        finally:
            file.close()


def is_file_name(name: str) -> bool:
    """Whether a name that somebody else chose is one of a file: of no other directory."""
    try:
        fits = 0 < len(os.fsencode(name)) < 256
    except UnicodeEncodeError:
        return False
    return fits and name not in (".", "..") and not {"/", "\0"} & set(name)


def open_directory(url: str) -> RemoteDirectory:
    """The directory of a URL. Nothing is read yet.

    Raises:
        CheckpointError: URLs of this scheme are not read, or it is incomplete.
        BackendUnavailable: The client for it is not installed.
    """
    parts = split_url(url)
    scheme = parts.scheme.lower()
    known = _CLASSES.get(scheme)
    if known is None:
        schemes = ", ".join(f"{name}://" for name in _CLASSES)
        raise CheckpointError(f"{without_secrets(url)}: URLs of {schemes} are read, not this one")
    if may_show_password(parts, url):
        raise CheckpointError(
            f'{without_secrets(url)}: write "@" after the host as %40, and "/" before it as %2F'
        )
    if not parts.netloc and not sources_of(url):
        raise CheckpointError(f"{without_secrets(url)}: this URL names no bucket and no host")
    if not scheme.startswith(("http", "nixl", "replicas")):
        if "#" in url:
            raise CheckpointError(
                f'{without_secrets(url)}: a URL of {scheme}:// has no fragment: write "#" as %23'
            )
        if parts.query:
            raise CheckpointError(f"{without_secrets(url)}: a URL of {scheme}:// has no query")
    module, _, name = known.partition(":")
    made: RemoteDirectory = getattr(import_module(module), name)(url)
    return made
