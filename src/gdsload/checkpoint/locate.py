"""Finds the files of a checkpoint: a file, a directory, an index, a cached hub model, or a URL.

    source ──► Directory ──► index, if there is one ──► shards

The rules are the same for directories of this machine and those that a URL names. Shards are not
opened here, and only URLs use the network.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from gdsload.checkpoint.file_io import is_directory, is_file, open_error, read_small
from gdsload.checkpoint.header import HEADER_LIMIT_BYTES, foreign, read_weight_map
from gdsload.errors import CheckpointError, CheckpointNotFound, shown
from gdsload.remote.directory import RemoteDirectory, open_directory
from gdsload.remote.urls import is_url, joined, shown_source, split_file

PathLike = str | os.PathLike[str]

_STEMS = ("model", "diffusion_pytorch_model")  # the names that transformers and diffusers save
_SUFFIX = ".safetensors"
# Compiled at their first use: it takes up to 1 ms each, which the first load would pay for.
_HUB_ID = r"(?a)\w[\w.-]*(/\w[\w.-]*)?"
_COMMIT = r"[0-9A-Za-z][0-9A-Za-z._-]*"
# With a variant after the numbers in older checkpoints of diffusers.
_NUMBERED = r"(?s)(.*)-(\d+)-of-(\d+)((?:\.[\w.-]+)?)\.safetensors"


class ShardPath(NamedTuple):
    """One shard that was found: its name in an index, its path, and its directory if that is
    remote."""

    name: str
    path: str
    directory: RemoteDirectory | None = None


class CheckpointFiles(NamedTuple):
    """The files of a checkpoint. `weight_map` maps tensor names to shard names."""

    title: str
    shards: tuple[ShardPath, ...]
    weight_map: dict[str, str] | None = None
    index_path: str | None = None


# --- directories ----------------------------------------------------------------------------------


class LocalDirectory:
    """A directory of this machine, with the methods of `RemoteDirectory` that find files."""

    def __init__(self, path: str) -> None:
        self.path = path

    def path_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def has(self, name: str) -> bool:
        # A dangling link or a FIFO of this name is an error to report, not to skip. So is a failure
        # of the storage, which `os.path.lexists` hides: other files would be loaded instead.
        path = self.path_of(name)
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise open_error(error, path) from error
        return True

    def names(self) -> Collection[str]:
        try:
            return [
                name
                for name in os.listdir(self.path)
                if not (name.endswith(_SUFFIX) and os.path.isdir(self.path_of(name)))
            ]
        except OSError as error:
            raise open_error(error, self.path) from error

    def read(self, name: str, limit: int) -> bytes:
        return read_small(self.path_of(name), limit, " (header_limit raises it)")


Directory = LocalDirectory | RemoteDirectory


# --- finding -----------------------------------------------------------------------------------


def locate(
    source: PathLike,
    *,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: PathLike | None = None,
    limit: int = HEADER_LIMIT_BYTES,
) -> CheckpointFiles:
    """Finds the files of `source`. An existing path takes precedence over a hub id.

    Args:
        source: A file, a directory, an index, a hub id or a URL. A URL that ends with .safetensors
            or .json is one of a file, any other one of a directory.
        revision: For a hub id: a branch, a tag or a commit; "main" if None.
        subfolder: A directory inside `source`.
        variant: For example "fp16", for model.fp16.safetensors.
        cache_dir: For a hub id: the hub cache; None: as the environment says. For a URL: the local
            cache of its files; None: they are not kept.
        limit: The largest size of an index in bytes.

    Raises:
        CheckpointError: The files cannot be found or the index is invalid.
    """
    title = path_text(source)
    subfolder = relative(os.fspath(subfolder or ""), "subfolder")
    if variant is not None and not re.fullmatch(r"[\w.-]+", variant):
        raise CheckpointError(f"{shown(shown_source(variant))} is not the name of a variant")
    if is_url(title):
        return _from_url(title, subfolder, variant, cache_dir, limit)
    directory = title
    if not is_directory(title):
        if os.path.lexists(title):
            _refuse_parts(title, subfolder, variant)
            if title.endswith(".json"):
                folder, name = os.path.split(title)
                return _from_index(LocalDirectory(folder), name, title, limit)
            return CheckpointFiles(title, (ShardPath(os.path.basename(title), title),))
        if not re.fullmatch(_HUB_ID, title) or title.endswith((_SUFFIX, ".json")):
            hint = " (~ is not expanded here)" if title.startswith("~") else ""
            raise _not_found(f"No such file or directory: {title}{hint}", title)
        directory = _snapshot(title, revision, cache_dir)
    if subfolder:
        directory = os.path.join(directory, subfolder)
    return _from_directory(LocalDirectory(directory), title, variant, limit)


def _refuse_parts(title: str, subfolder: str, variant: str | None) -> None:
    if subfolder or variant:
        raise CheckpointError(
            f"{title}: this is one file and has no subfolder or variant", path=title
        )


def _from_url(
    url: str, subfolder: str, variant: str | None, cache_dir: PathLike | None, limit: int
) -> CheckpointFiles:
    title = shown_source(url)
    if title.endswith((_SUFFIX, ".json")):
        _refuse_parts(title, subfolder, variant)
        folder, name = split_file(url)
        directory = _open_directory(folder, cache_dir)
        if name.endswith(".json"):
            return _from_index(directory, name, title, limit)
        return CheckpointFiles(title, (_shard_path(directory, name),))
    return _from_directory(
        _open_directory(joined(url, subfolder), cache_dir), title, variant, limit
    )


def _open_directory(url: str, cache_dir: PathLike | None) -> RemoteDirectory:
    directory = open_directory(url)
    if cache_dir is None:
        return directory
    from gdsload.remote.cache import CachedDirectory, LocalCache

    try:
        path = local_path_text(cache_dir)
    except CheckpointError as error:
        why = error if os.fsdecode(cache_dir) else "it is empty"
        raise CheckpointError(f"cache_dir: {why}") from None  # the checkpoint may be there
    return CachedDirectory(directory, LocalCache(path))


def shard_paths(files: Sequence[str], cache_dir: PathLike | None) -> tuple[ShardPath, ...]:
    """The shards at these paths and URLs. `cache_dir`: the local cache of URLs."""
    directories: dict[str, RemoteDirectory] = {}
    found = []
    for file in files:
        if is_url(file):
            folder, name = split_file(file)
            if folder not in directories:
                directories[folder] = _open_directory(folder, cache_dir)
            found.append(_shard_path(directories[folder], name))
        else:
            found.append(ShardPath(os.path.basename(file), file))
    return tuple(found)


def _shard_path(directory: Directory, name: str) -> ShardPath:
    remote = directory if isinstance(directory, RemoteDirectory) else None
    return ShardPath(name, directory.path_of(name), remote)


def title_of(source: PathLike | Sequence[PathLike]) -> str:
    """The name of a source, or the number of its files, for reports. Raises TypeError."""
    if isinstance(source, (list, tuple)):
        return f"{len(source)} files"
    if not isinstance(source, (str, bytes, os.PathLike)):
        kind = type(source).__name__
        raise TypeError(f"source must be a path, a URL or a list of them, not {kind}")
    title: str = shown_source(os.fsdecode(source))
    return title


def path_text(path: PathLike) -> str:
    """`path` as a string that system calls accept. Raises CheckpointError or TypeError."""
    text = os.fsdecode(path)
    if not text:
        raise CheckpointNotFound("the path of a checkpoint is empty", errno=errno.ENOENT)
    if "\0" in text:
        raise CheckpointError(f"the path {shown(shown_source(text))} contains a NUL character")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise CheckpointError(f"the path {shown(shown_source(text))} cannot be encoded") from None
    return text


def local_path_text(path: PathLike) -> str:
    """`path_text` of a path on this machine. Raises CheckpointError for a URL."""
    text = path_text(path)
    if is_url(text):
        raise CheckpointError(f"{shown_source(text)}: this is a URL, and must be a local path")
    return text


def relative(path: str, what: str) -> str:
    """A relative path without empty and "." parts. Raises CheckpointError if it leads outside, and
    TypeError."""
    if not isinstance(path, str):
        raise TypeError(f"{what}={path!r} must be a str")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise CheckpointError(f"the {what} {shown(path)} does not stay inside the checkpoint")
    if parts:
        path_text(path)  # that can be encoded
    return "/".join(parts)


def _not_found(text: str, path: str) -> CheckpointNotFound:
    return CheckpointNotFound(text, path=path, errno=errno.ENOENT)


def _from_directory(
    directory: Directory, title: str, variant: str | None, limit: int
) -> CheckpointFiles:
    mark = f".{variant}" if variant else ""
    for stem in _STEMS:
        single = f"{stem}{mark}{_SUFFIX}"
        if directory.has(single):
            return CheckpointFiles(title, (_shard_path(directory, single),))
        index = f"{stem}{_SUFFIX}.index{mark}.json"
        if directory.has(index):
            return _from_index(directory, index, title, limit)
    path = directory.path
    listing = sorted(name for name in directory.names() if not name.startswith("."))
    indexes = [name for name in listing if name.endswith(f"{_SUFFIX}.index{mark}.json")]
    if len(indexes) == 1:
        return _from_index(directory, indexes[0], title, limit)
    if indexes:
        raise CheckpointError(
            f"{path}: several indexes ({', '.join(map(shown, indexes))}): give the path of"
            " one of them",
            path=path,
        )
    ending = re.compile(rf".*{re.escape(mark)}(-\d+-of-\d+)?{re.escape(_SUFFIX)}", re.DOTALL)
    shards = tuple(_shard_path(directory, name) for name in listing if ending.fullmatch(name))
    if not shards:
        others = [name for name in listing if name.endswith((_SUFFIX, ".bin", ".gguf", ".pt"))]
        found = f"; it holds {', '.join(map(shown, others[:8]))}" if others else ""
        raise _not_found(
            f"{path}: there is no {_STEMS[0]}{mark}{_SUFFIX}, no index of it and no other"
            f" safetensors file that fits{found}",
            path,
        )
    _require_all_numbers(shards, path)
    return CheckpointFiles(title, shards)


def _require_all_numbers(shards: tuple[ShardPath, ...], directory: str) -> None:
    """Without an index, only the numbers in the file names can show that a shard is missing."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for shard in shards:
        if match := re.fullmatch(_NUMBERED, shard.name):
            sets.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    for (stem, total, _), present in sets.items():
        count = int(total)
        if len(present) != count or max(present) - min(present) != count - 1:
            raise CheckpointError(
                f"{directory}: there are {len(present)} of the {count} shards of {shown(stem)},"
                " and no index",
                path=directory,
            )


# --- indexes -----------------------------------------------------------------------------------


def _from_index(directory: Directory, name: str, title: str, limit: int) -> CheckpointFiles:
    index = directory.path_of(name)
    raw = directory.read(name, limit)
    if not raw.lstrip().startswith(b"{") and (format_error := foreign(raw[:512], index)):
        raise CheckpointError(format_error, path=index)
    weight_map = read_weight_map(raw, path=index)
    names = sorted(set(weight_map.values()))
    for name in names:  # few, however many tensors the index has
        if fault := shard_name_fault(name):
            tensor = next(tensor for tensor, shard in weight_map.items() if shard == name)
            raise CheckpointError(
                f"{index}: its weight_map maps tensor {shown(tensor)} to {shown(name)}, which"
                f" {fault}",
                path=index,
                tensor=tensor,
            )
    shards = tuple(_shard_path(directory, name) for name in names)
    return CheckpointFiles(title, shards, weight_map, index)


def shard_name_fault(name: str) -> str:
    """Why an index may not name a shard like this; "" if it may. Shards are in its directory."""
    if any(character in name for character in "/\\\0"):
        return "is not the plain name of a file next to the index"
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        return f"cannot be the name of a file here: {error}"
    return "" if name.endswith(_SUFFIX) else f"does not end with {_SUFFIX}"


# --- the hub cache -----------------------------------------------------------------------------


def hub_cache() -> str:
    """The directory of huggingface_hub's cache, from the same environment variables.

    huggingface_hub itself is not imported: that would take longer than reading the headers.
    """
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(variable):
            return _expanded(value)
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    return os.path.join(_expanded(home), "hub")


def _expanded(path: str) -> str:
    return os.path.expandvars(os.path.expanduser(path))


def hub_folder(source: str) -> str:
    """The directory of a model in the hub cache, such as "models--org--name"; "" if `source` is
    not the id of a model."""
    return "models--" + source.replace("/", "--") if re.fullmatch(_HUB_ID, source) else ""


def _snapshot(repo_id: str, revision: str | None, cache_dir: PathLike | None) -> str:
    """The snapshot directory of a cached model. `revision` is a branch, a tag or a full commit."""
    cache = _expanded(local_path_text(cache_dir)) if cache_dir is not None else hub_cache()
    repo = os.path.join(cache, hub_folder(repo_id))
    wanted = relative(revision or "main", "revision")
    if not is_directory(repo):
        hint = (
            f"the hub cache {cache} has no model of this name (gdsload does not download:"
            f" `hf download {repo_id}` does)"
        )
        if "/" in repo_id:
            raise _not_found(f"No such file or directory: {repo_id}, and {hint}", repo)
        error = _not_found(f"No such file or directory: {repo_id}", repo)  # as safetensors says
        if sys.version_info >= (3, 11):
            error.add_note(hint)
        raise error
    commit = wanted
    reference = os.path.join(repo, "refs", wanted)
    if is_file(reference):
        commit = read_small(reference, 4096).decode("utf-8", "replace").strip()
        if not re.fullmatch(_COMMIT, commit):
            raise CheckpointError(f"{reference}: this does not contain a commit", path=reference)
    snapshot = os.path.join(repo, "snapshots", commit)
    if not re.fullmatch(_COMMIT, commit) or not is_directory(snapshot):
        raise _not_found(
            f"{repo_id}: revision {shown(wanted)} is not in the hub cache {cache}; it has"
            f" {_revisions(repo)}",
            snapshot,
        )
    return snapshot


def _revisions(repo: str) -> str:
    refs = os.path.join(repo, "refs")
    names = [
        os.path.relpath(os.path.join(directory, file), refs)
        for directory, _, files in os.walk(refs)
        for file in files
    ]
    commits: list[str] = []
    with suppress(OSError):  # a directory that may be entered, but not listed
        commits = os.listdir(os.path.join(repo, "snapshots"))
    return ", ".join(sorted(names)[:8] + sorted(commits)[:8]) or "none"
