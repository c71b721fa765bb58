"""Stand-ins for remote models: a local directory from which transformers can load them.

    s3://bucket/model ──► temporary directory ──┬─ config.json and other small files
                                                └─ shards, which have their headers only, or
                                                   are links to the local cache

transformers finds classes and files in the directory. The hooks know which remote file a
stand-in means (`original`), and read that. Code that opens a stand-in itself gets an error about a
truncated file. Not responsible for reading tensors.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gdsload.checkpoint import Checkpoint
from gdsload.checkpoint.locate import CheckpointFiles, ShardPath, locate, relative
from gdsload.errors import (
    CheckpointAccessError,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    shown,
)
from gdsload.integrations.transformers.monkeypatch import held
from gdsload.remote.directory import USUAL_NAMES, RemoteDirectory, open_directory
from gdsload.remote.urls import joined, without_secrets
from gdsload.system.parallel import in_thread, parallel_map

# A tokenizer may have 30 MB. Larger files are not needed to build a model.
MOST_COPIED_BYTES = 64 << 20
_WEIGHTS = (
    ".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".pt", ".pth",
    ".safetensors",
)  # fmt: skip
_ADAPTER = "adapter_model.safetensors"  # the weights of an adapter, as peft names them
_TEMPLATES = "additional_chat_templates"  # a folder beside the files of a tokenizer
_NAMED = "transformers_weights"  # the attribute of a config that names the file of the weights


class _StandIns(NamedTuple):
    """URLs by the path of their stand-in, and open checkpoints by those of all their shards."""

    urls: Mapping[str, str]
    checkpoints: Mapping[tuple[str, ...], Checkpoint]


_in_effect: ContextVar[_StandIns | None] = ContextVar("gdsload.stand_ins", default=None)
# A checkpoint that an enclosing from_pretrained has open: its headers are not parsed again.
open_checkpoint: ContextVar[Checkpoint | None] = ContextVar("gdsload.checkpoint", default=None)


def original(path: Any) -> Any:
    """The URL that a stand-in means; any other argument as it is."""
    current = _in_effect.get()
    return path if current is None else current.urls.get(os.path.normpath(str(path)), path)


def opened_for(path: Any) -> Checkpoint | None:
    """The open checkpoint of the URL whose stand-in a path is; None for any other path."""
    current, known = _in_effect.get(), open_checkpoint.get()
    if current is None or known is None or original(path) == path:
        return None
    return known if any(known is each for each in current.checkpoints.values()) else None


def opened_as(files: Sequence[str]) -> Checkpoint | None:
    """The open checkpoint for whose shards these files stand; None if there is none."""
    current = _in_effect.get()
    if current is None:
        return None
    return current.checkpoints.get(tuple(os.path.normpath(file) for file in files))


def with_extra_files(
    checkpoint: Checkpoint, names: Sequence[str], stall_seconds: float
) -> CheckpointFiles | None:
    """The files of a remote checkpoint and others in its directory; None if it has no others, or is
    that of an adapter.

    Raises CheckpointError and StallError.
    """
    directory = checkpoint.shards[0].directory
    shards = [shard.name for shard in checkpoint.shards]
    asked = [name for name in names if name not in shards]
    if directory is None or not asked or shards == [_ADAPTER]:
        return None
    extra = in_thread(
        lambda: [*filter(directory.has, asked)], directory.path, stall_seconds=stall_seconds
    )
    if not extra:
        return None
    return CheckpointFiles(
        checkpoint.source,
        tuple(ShardPath(name, directory.path_of(name), directory) for name in [*shards, *extra]),
    )


def require_no_extra_files(
    files: Sequence[str], names: Sequence[str], stall_seconds: float
) -> None:
    """Raises CheckpointError if `with_extra_files` finds any for the checkpoint of these files."""
    known = opened_as(files)
    if known is not None and with_extra_files(known, names, stall_seconds):
        raise CheckpointError(
            f"{known.source}: this version of transformers reads no files beside the checkpoint of"
            f" a URL ({', '.join(map(shown, names))}): load a copy in a directory"
        )


@contextmanager
def stand_in(url: str, words: Mapping[str, Any], *, weights: bool = True) -> Iterator[str]:
    """A directory that stands for a remote model, inside the `with`.

    Args:
        url: The URL of the model's directory.
        words: The keywords of from_pretrained: `subfolder`, the folder that is needed, is in the
            directory as well, `variant` chooses the weights, `target_lang` an adapter that the
            model reads by itself, and `cache_dir` is the local cache.
        weights: Whether the weights are wanted, and not only a tokenizer or a config.

    Yields:
        The directory. Its checkpoint is `open_checkpoint`, if it has safetensors files.

    Raises:
        CheckpointError: The files cannot be found or are invalid.
        BackendUnavailable: The client for the URL is not installed.
    """
    if without_secrets(url).endswith(".safetensors"):
        raise CheckpointError(
            f"{without_secrets(url)}: this is a file, and from_pretrained needs the directory with"
            " its config.json (load_file takes one file)"
        )
    subfolder, variant = relative(words.get("subfolder") or "", "subfolder"), words.get("variant")
    directory = joined(url, subfolder)
    source = open_directory(directory)
    find = partial(locate, cache_dir=words.get("cache_dir"))
    with ExitStack() as stack:
        outer = stack.enter_context(tempfile.TemporaryDirectory(prefix="gdsload-"))
        top = os.path.join(outer, _name_of(url))
        folder = Path(top, subfolder)
        folder.mkdir(parents=True, exist_ok=True)
        has_weights = bool(_fetch(source, folder, variant, words.get("target_lang")))
        if not weights:
            _fetch_templates(directory, folder)
        urls = {top: url}
        checkpoints: dict[tuple[str, ...], Checkpoint] = {}

        def add(where: str, inside: str = "", **parts: Any) -> Checkpoint:
            files = in_thread(partial(find, where, **parts), source.path)
            checkpoint = stack.enter_context(Checkpoint.located(files, strict=False))
            paths, remote = _placed(checkpoint, joined(directory, inside), folder / inside)
            checkpoints[paths] = checkpoint
            urls.update(remote)
            return checkpoint

        # If the directory has no files, an attempt to open its weights tells what is missing.
        weights = weights or not any(folder.iterdir())
        has_adapter = (folder / "adapter_config.json").exists()
        # Without a config of its own, an adapter is for a model in another place.
        if weights and ((folder / "config.json").exists() or not has_adapter):
            try:
                if named := _named_weights(folder, words):
                    if named.endswith(".json") and not (folder / named).exists():
                        read = partial(source.read, named, MOST_COPIED_BYTES)
                        (folder / named).write_bytes(in_thread(read, source.path_of(named)))
                    checkpoint = add(joined(directory, named), os.path.dirname(named))
                else:
                    checkpoint = add(url, subfolder=subfolder, variant=variant)
            except CheckpointNotFound:
                # Perhaps only a tokenizer, or weights of another format, which transformers names.
                # A web server lists no weights; one that has their index lacks one of them.
                has_index = any(folder.glob("*.safetensors.index*.json"))
                if has_weights or has_index or not any(folder.iterdir()):
                    raise
            else:
                stack.enter_context(held(open_checkpoint, checkpoint))
        if weights and has_adapter and not (folder / _ADAPTER).exists():
            with suppress(CheckpointNotFound):
                add(joined(directory, _ADAPTER))
        stack.enter_context(held(_in_effect, _StandIns(urls, checkpoints)))
        try:
            yield top
        except Exception as error:
            if sys.version_info >= (3, 11) and top in str(error):
                error.add_note(f"{top} stood for {without_secrets(url)}")
            raise


def _name_of(url: str) -> str:
    """The last part of a URL as the name of a directory: transformers names custom code by it."""
    name = without_secrets(url).rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w-]", "_", name)[-64:] or "model"


def _named_weights(folder: Path, words: Mapping[str, Any]) -> str:
    """The file of weights that a config names, relative to its directory; "" if it names none.

    Raises CheckpointError if it leads outside, or is an index in a subfolder.
    """
    config = words.get("config")
    if config is None or isinstance(config, (str, os.PathLike)):
        try:
            facts = json.loads((folder / "config.json").read_bytes())
        except (OSError, ValueError):
            return ""  # transformers says why
        named = facts.get(_NAMED) if isinstance(facts, dict) else None
        if named is not None:
            named = words.get(_NAMED, named)
    else:
        named = getattr(config, _NAMED, None)
    if not isinstance(named, str) or not named.endswith(
        (".safetensors", ".safetensors.index.json")
    ):
        return ""  # transformers says why
    named = relative(named, _NAMED)
    if named.endswith(".json") and "/" in named:
        raise CheckpointError(
            f"the config names the index {shown(named)}, and from a URL an index lies beside the"
            " config"
        )
    return named


def _placed(
    checkpoint: Checkpoint, directory: str, folder: Path
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Puts stand-ins of its shards into a folder. Returns their paths, and the URLs of those that
    have headers only."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, urls = [], {}
    for shard in checkpoint.shards:
        path = folder / shard.name
        paths.append(str(path))
        if shard.cached:
            path.symlink_to(os.path.abspath(shard.path))
        else:
            path.write_bytes(shard.read(0, shard.data_start))
            urls[str(path)] = joined(directory, shard.name)
    return tuple(paths), urls


def _fetch(
    source: RemoteDirectory, folder: Path, variant: str | None, language: str | None
) -> set[str]:
    """Copies the small files of a directory. Returns the names of its safetensors files, if it can
    be listed."""
    # Weights that models read by themselves: the speakers of Qwen2.5-Omni, and the adapter of
    # speech models for a language.
    own = ["spk_dict.pt"]
    if language is not None:
        own += [f"adapter.{language}.safetensors", f"adapter.{language}.bin"]
    absent: tuple[type[Exception], ...] = (CheckpointNotFound, _TooLarge)
    weights: set[str] = set()
    try:
        listed = in_thread(source.names, source.path)
        names = [name for name in listed if name in own or not name.endswith(_WEIGHTS)]
        weights = {name for name in listed if name.endswith(".safetensors")}
    except CheckpointNotFound:
        raise
    except CheckpointError:
        # It cannot be listed. Then a missing file may look like a forbidden one.
        names = [*USUAL_NAMES, *own]
        names += [f"model.safetensors.index.{variant}.json"] if variant else []
        absent += (CheckpointAccessError,)

    _copy(source, folder, names, *absent)
    return weights


def _fetch_templates(directory: str, folder: Path) -> None:
    """Copies the additional chat templates of a tokenizer, if the source can list its files."""
    source = open_directory(joined(directory, _TEMPLATES))
    try:
        names = [name for name in in_thread(source.names, source.path) if name.endswith(".jinja")]
    except CheckpointError as error:
        if type(error) is CheckpointUnreadable:  # it is down
            raise
        return

    if names:
        (folder / _TEMPLATES).mkdir()
    _copy(source, folder / _TEMPLATES, names, _TooLarge)


def _copy(
    source: RemoteDirectory, folder: Path, names: Sequence[str], *absent: type[Exception]
) -> None:
    """Copies files into a folder, but for those with these errors."""

    def copy(name: str) -> None:
        with suppress(*absent):
            (folder / name).write_bytes(_small(source, name))

    for _ in parallel_map(copy, names, path_of=source.path_of):
        pass


class _TooLarge(Exception):
    pass


def _small(source: RemoteDirectory, name: str) -> bytes:
    file = source.open(name)
    try:
        if file.size > MOST_COPIED_BYTES:
            raise _TooLarge
        return file.read(0, file.size)
    finally:
        file.close()


def rename(loaded: Any, top: str, url: str) -> None:
    """Names a loaded model, config or tokenizer by the URL instead of by the stand-in."""
    first = loaded[0] if isinstance(loaded, tuple) else loaded
    modules = getattr(first, "modules", None)
    inner = [] if modules is None else list(modules())
    for owner in (first, getattr(first, "config", None), *inner):
        if owner is not None and getattr(owner, "name_or_path", None) == top:
            owner.name_or_path = without_secrets(url)
