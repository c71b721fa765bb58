"""Where the files of a checkpoint are: a file, a directory, an index, or a model in the hub cache.

What comes out is a list of `Place`s, with the index that named them. Nothing of a shard is read
here, and nothing ever goes to the network.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from typing import NamedTuple

from gdsload.checkpoint.file_io import open_regular, raise_if_forbidden, read_exactly, refused
from gdsload.checkpoint.header import HEADER_LIMIT_BYTES, foreign, read_weight_map
from gdsload.errors import CheckpointError, CheckpointNotFound, shown

PathLike = str | os.PathLike[str]

_STEMS = ("model", "diffusion_pytorch_model")  # the names that transformers and diffusers save
_SUFFIX = ".safetensors"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_COMMIT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*")
_NUMBERED = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})\.safetensors", re.DOTALL)


class Place(NamedTuple):
    """Where one shard is: `path` is for opening and for messages, `name` is what an index says.

    `named_by` is the index that named it, None where the user named the file.
    """

    name: str
    path: str
    named_by: str | None = None


class Source(NamedTuple):
    """A checkpoint that was found: its files, and which of them holds which tensor, if known."""

    title: str
    places: tuple[Place, ...]
    weight_map: dict[str, str] | None = None
    index_path: str | None = None


# --- finding -----------------------------------------------------------------------------------


def locate(
    source: PathLike,
    *,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: PathLike | None = None,
    limit: int = HEADER_LIMIT_BYTES,
) -> Source:
    """The files that `source` stands for; an existing path comes before a hub id.

    `limit` bounds the bytes of an index. Raises CheckpointError and its kinds.
    """
    title = text_of(source)
    subfolder = _inner(subfolder, "subfolder")
    if variant is not None and not re.fullmatch(r"[\w.-]+", variant):
        raise CheckpointError(f"{shown(variant)} is not the name of a variant")
    if os.path.isdir(title):
        directory = os.path.join(title, subfolder) if subfolder else title
        return _in_directory(directory, title, variant, limit)
    if os.path.lexists(title):
        if subfolder or variant:
            raise CheckpointError(
                f"{title}: this is one file, so a subfolder or a variant has no meaning", path=title
            )
        if title.endswith(".json"):
            return _by_index(title, title, limit)
        return Source(title, (Place(os.path.basename(title), title),))
    if not _HUB_ID.fullmatch(title) or title.endswith((_SUFFIX, ".json")):
        raise_if_forbidden(title)
        raise CheckpointNotFound(
            f"No such file or directory: {title}", path=title, errno=errno.ENOENT
        )
    snapshot = _snapshot(title, revision, cache_dir)
    directory = os.path.join(snapshot, subfolder) if subfolder else snapshot
    return _in_directory(directory, title, variant, limit)


def text_of(path: PathLike) -> str:
    """`path` as text that can be handed to the system. Raises CheckpointError, or TypeError."""
    text = os.fsdecode(path)
    if not text:
        raise CheckpointNotFound("the path of a checkpoint is empty", errno=errno.ENOENT)
    if "\0" in text:
        raise CheckpointError(f"the path {shown(text)} holds a NUL character")
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text):
        raise CheckpointError(f"{text}: this is a URL, and only local files are read")
    return text


def _inner(path: str, what: str) -> str:
    """A relative path that stays inside, with its empty and '.' parts left out."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise CheckpointError(f"the {what} {shown(path)} does not stay inside the checkpoint")
    return "/".join(parts)


def _in_directory(directory: str, title: str, variant: str | None, limit: int) -> Source:
    mark = f".{variant}" if variant else ""
    for stem in _STEMS:
        # lexists: a dangling link or a FIFO of this name is an error to report, not to pass over.
        single = os.path.join(directory, f"{stem}{mark}{_SUFFIX}")
        if os.path.lexists(single):
            return Source(title, (Place(os.path.basename(single), single),))
        index = os.path.join(directory, f"{stem}{_SUFFIX}.index{mark}.json")
        if os.path.lexists(index):
            return _by_index(index, title, limit)
    try:
        listing = sorted(os.listdir(directory))
    except OSError as error:
        raise refused(error, directory) from error
    indexes = [name for name in listing if name.endswith(f"{_SUFFIX}.index{mark}.json")]
    if len(indexes) == 1:
        return _by_index(os.path.join(directory, indexes[0]), title, limit)
    if indexes:
        raise CheckpointError(
            f"{directory}: several indexes ({', '.join(map(shown, indexes))}): name the one to"
            " load",
            path=directory,
        )
    ending = re.compile(rf".*{re.escape(mark)}(-\d+-of-\d+)?{re.escape(_SUFFIX)}", re.DOTALL)
    names = [
        name
        for name in listing
        if ending.fullmatch(name)
        and not name.startswith(".")
        and not os.path.isdir(os.path.join(directory, name))
    ]
    if not names:
        wanted = f"{_STEMS[0]}{mark}{_SUFFIX}"
        others = [name for name in listing if name.endswith((_SUFFIX, ".bin", ".gguf", ".pt"))]
        held = f"; it holds {', '.join(map(shown, others[:8]))}" if others else ""
        raise CheckpointNotFound(
            f"{directory}: neither {wanted} nor its index, nor another safetensors file that fits,"
            f" is there{held}",
            path=directory,
            errno=errno.ENOENT,
        )
    _check_numbers(names, directory)
    return Source(title, tuple(Place(name, os.path.join(directory, name)) for name in names))


def _check_numbers(names: list[str], directory: str) -> None:
    """Without an index, the numbers in the names are all that tells of a missing shard."""
    sets: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            sets.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, total), present in sets.items():
        count = int(total)
        if len(present) != count or max(present) - min(present) != count - 1:
            raise CheckpointError(
                f"{directory}: {len(present)} of the {count} shards of {shown(stem)} are there, and"
                " there is no index",
                path=directory,
            )


# --- indexes -----------------------------------------------------------------------------------


def _by_index(index: str, title: str, limit: int) -> Source:
    weight_map = read_weight_map(_read_small(index, limit), path=index)
    directory = os.path.dirname(index)
    places = []
    for name in sorted(set(weight_map.values())):
        if (fault := name_fault(name)) is not None:
            tensor = next(key for key, shard in weight_map.items() if shard == name)
            raise CheckpointError(
                f"{index}: its weight_map leads tensor {shown(tensor)} to {shown(name)}, which"
                f" {fault}",
                path=index,
                tensor=tensor,
            )
        places.append(Place(name, os.path.join(directory, name), index))
    return Source(title, tuple(places), weight_map, index)


def name_fault(name: str) -> str | None:
    """Why an index may not name a shard so, or None. A shard is one component of a path."""
    if "/" in name or "\\" in name:
        return "is not the plain name of a file beside the index"
    if "\0" in name:
        return "holds a NUL character"
    if not name.endswith(_SUFFIX):
        return f"does not end with {_SUFFIX}"
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return "cannot be the name of a file here"
    return None


def _read_small(path: str, limit: int) -> bytes:
    """All of a small file. Raises CheckpointError when it is larger than `limit` bytes."""
    fd, status = open_regular(path)
    try:
        if status.st_size > limit:
            raise CheckpointError(
                f"{path}: this index has {status.st_size} bytes, more than the limit of {limit}"
                " (header_limit raises it)",
                path=path,
            )
        raw = read_exactly(fd, 0, status.st_size, path)
    finally:
        os.close(fd)
    if not raw.lstrip().startswith(b"{") and (what := foreign(raw[:512], path)) is not None:
        raise CheckpointError(what, path=path)
    return raw


# --- the hub cache -----------------------------------------------------------------------------


def hub_cache() -> str:
    """The directory in which huggingface_hub keeps models, by the variables that it reads."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(variable):
            return _expanded(value)
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    return os.path.join(_expanded(home), "hub")


def _expanded(path: str) -> str:
    return os.path.expandvars(os.path.expanduser(path))


def _snapshot(repo_id: str, revision: str | None, cache_dir: PathLike | None) -> str:
    """The snapshot directory of a cached model. `revision` is a branch, a tag or a full commit."""
    cache = _expanded(text_of(cache_dir)) if cache_dir is not None else hub_cache()
    repo = os.path.join(cache, "models--" + repo_id.replace("/", "--"))
    wanted = _inner(revision or "main", "revision")
    if not os.path.isdir(repo):
        raise_if_forbidden(repo)
        raise _not_cached(repo_id, repo, cache)
    commit = wanted
    reference = os.path.join(repo, "refs", wanted)
    if os.path.isfile(reference):
        commit = _read_small(reference, 4096).decode("utf-8", "replace").strip()
        if not _COMMIT.fullmatch(commit):
            raise CheckpointError(f"{reference}: this does not hold a commit", path=reference)
    snapshot = os.path.join(repo, "snapshots", commit)
    if not _COMMIT.fullmatch(commit) or not os.path.isdir(snapshot):
        raise CheckpointNotFound(
            f"{repo_id}: revision {shown(wanted)} is not in the hub cache {cache}; it has"
            f" {_revisions(repo)}",
            path=snapshot,
            errno=errno.ENOENT,
        )
    return snapshot


def _not_cached(repo_id: str, repo: str, cache: str) -> CheckpointNotFound:
    hint = (
        f"no model of this name is in the hub cache {cache} (gdsload does not download:"
        f" `hf download {repo_id}` does)"
    )
    if "/" in repo_id:
        text = f"{repo_id}: this is no file or directory here, and {hint}"
        return CheckpointNotFound(text, path=repo, errno=errno.ENOENT)
    # A name alone is rather a file than a model: the text is that of safetensors.
    error = CheckpointNotFound(
        f"No such file or directory: {repo_id}", path=repo, errno=errno.ENOENT
    )
    if sys.version_info >= (3, 11):
        error.add_note(hint)
    return error


def _revisions(repo: str) -> str:
    found = []
    refs = os.path.join(repo, "refs")
    for directory, _, files in os.walk(refs):
        found += [os.path.relpath(os.path.join(directory, file), refs) for file in files]
    snapshots = os.path.join(repo, "snapshots")
    commits = os.listdir(snapshots) if os.path.isdir(snapshots) else []
    return ", ".join(sorted(found)[:8] + sorted(commits)[:8]) or "none"


# --- opening -----------------------------------------------------------------------------------


def open_place(place: Place) -> tuple[int, os.stat_result]:
    """Opens a shard: its descriptor, which the caller closes, and its status. Links are followed,
    wherever they lead: a shard may lie in a model store or on a shared volume."""
    return open_regular(place.path, named_by=place.named_by)
