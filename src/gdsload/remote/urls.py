"""The text of URLs: their parts, the folders and files in them, and how messages show them.

Nothing is opened here: `directory` opens the directory of a URL.
"""

from __future__ import annotations

import os
import re
from hashlib import sha256
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

from gdsload.errors import CheckpointError

# Compiled at their first use: it takes up to 1 ms each, which the first load would pay for.
_URL = r"[a-zA-Z][a-zA-Z0-9+.-]*://"
# An apostrophe may be a part of a URL: what comes after it may be secret.
_IN_TEXT = _URL + r"[^\s\"<>]+"
# A host and a port. Anything else may be a part of a password with a "/" that was not escaped, or
# the scheme of a URL inside the URL.
_HOST = r"(\[[^\]]*\]|[^:\[\]]*)(:\d+)?"
# A host that is no user: the begin of an IPv6 address, an IPv4 address, or this machine.
_ADDRESS = r"\[|\d+(\.\d+){3}$|localhost$"
# Parameters of signed URLs: of S3, Google, CloudFront and Azure.
_SIGNATURE = (
    "(?is)(x-amz-|x-goog-).*|awsaccesskeyid|googleaccessid|signature|expires|policy|key-pair-id|token"
    "|sig|se|st|sp|sv|sr|spr|skoid|sktid|skt|ske|sks|skv"
)
# A URL for several sources of the same files, with "|" between them: see `replicas`.
_REPLICAS = "replicas://"


def is_url(text: object) -> bool:
    """Whether this is a URL, rather than a path or the id of a model."""
    return isinstance(text, str) and "://" in text and re.match(_URL, text) is not None


def without_secrets(url: str) -> str:
    """A URL for messages: without user, password, query and fragment."""
    if sources := sources_of(url):
        return _REPLICAS + "|".join(map(shown_source, sources))
    hidden = f"{url.partition(':')[0]}://..."
    try:
        parts = urlsplit(url)
    except ValueError:  # a bracket that is not closed
        return hidden
    host = parts.netloc
    if not parts.scheme.startswith("abfs"):  # there, the part before "@" is a container
        host = host.rpartition("@")[2]
    if not re.fullmatch(_HOST, host) or may_show_password(parts, url):
        return hidden
    return f"{parts.scheme}://{host}{parts.path}".rstrip("/")


def may_show_password(parts: SplitResult, url: str) -> bool:
    """Whether the host is perhaps a user and a part of a password: an "@" comes after it, and it is
    neither an address nor a name with a dot and without a port."""
    host, colon, _ = parts.netloc.partition(":")
    plain = not re.match(_ADDRESS, host) and ("." not in host or bool(colon))
    if parts.scheme not in ("http", "https", "nixl") or "@" in parts.netloc or not plain:
        return False
    # The query of a signed URL, which is not shown, may have the address of an account.
    return "@" in (parts.path or url)


def split_url(url: str) -> SplitResult:
    """The parts of a URL. Raises CheckpointError if it is none."""
    try:
        return urlsplit(url)
    except ValueError:  # its text may show the password
        raise CheckpointError(f"{without_secrets(url)}: this is no URL: invalid host") from None


def query_hash(url: str) -> str:
    """A hash of the query without signatures, which differ for one file; "" if none is left."""
    left = [
        each
        for each in split_url(url).query.split("&")
        if each and not re.fullmatch(_SIGNATURE, unquote(each.partition("=")[0]))
    ]
    return sha256("&".join(left).encode()).hexdigest() if left else ""


def shown_source(source: Any) -> Any:
    """A source for messages and reports: a URL without secrets, anything else as it is."""
    return without_secrets(source) if is_url(source) else source


def text_without_secrets(text: str) -> str:
    """A message of a client with all URLs in it shown without secrets."""
    return re.sub(_IN_TEXT, lambda found: without_secrets(found[0]), text)


def joined(url: str, folder: str) -> str:
    """The URL of a folder or file inside a directory. A query stays at the end."""
    if sources := sources_of(url):
        return replicas(*(joined(each, folder) for each in sources))
    if not is_url(url):
        return os.path.join(url, folder) if folder else url
    parts = split_url(url)
    path = "/".join(part for part in (parts.path.rstrip("/"), quote(folder)) if part)
    return parts._replace(path=path).geturl()


def split_file(url: str) -> tuple[str, str]:
    """The URL of a file's directory, and the name of the file.

    Raises CheckpointError for several sources of files with different names, and for a name that
    contains an escaped "/".
    """
    if sources := sources_of(url):
        folders, names = zip(*map(split_file, sources), strict=True)
        if len(set(names)) > 1:
            raise CheckpointError(f"{without_secrets(url)}: these files have different names")
        return replicas(*folders), names[0]
    if not is_url(url):
        folder, name = os.path.split(url)
        return folder or os.curdir, name
    parts = split_url(url)
    directory, _, name = parts.path.rpartition("/")
    if "/" in unquote(name):
        raise CheckpointError(f"{without_secrets(url)}: the name of a file has no %2F in it")
    return parts._replace(path=directory).geturl(), unquote(name)


def replicas(*sources: str | os.PathLike[str]) -> str:
    """Names several sources of one checkpoint: peers, object stores, directories of this machine.

    A load reads from all of them at the same time, from each as much as it can send, and each byte
    once. A source that fails, stalls or has other files is abandoned, and another one takes over.
    The report has the bytes of each, and the reasons.

    Args:
        *sources: URLs and paths, each of a directory or each of a file; the preferred one first.
            Their files must be the same: the header and the size of each are compared. Name only
            sources that you trust to hold the same bytes, or set `verify`.

    Returns:
        A URL that every function of gdsload takes as the source of a checkpoint.

    Raises:
        CheckpointError: There is no source, or one contains "|".

    Example:
        >>> source = gdsload.replicas("s3://bucket/model", "/models/model")
        >>> tensors = gdsload.load_file(source)
    """
    texts = [os.fsdecode(source) for source in sources]
    parts = [part for text in texts for part in sources_of(text) or [text]]
    if not parts or any("|" in part or not part for part in parts):
        names = list(map(shown_source, parts))
        raise CheckpointError(f'{names}: sources are not empty, and have no "|" in them')
    return _REPLICAS + "|".join(parts)


def sources_of(url: str) -> list[str]:
    """The sources that a URL of `replicas` names; none for any other text."""
    return url.removeprefix(_REPLICAS).split("|") if url.startswith(_REPLICAS) else []
