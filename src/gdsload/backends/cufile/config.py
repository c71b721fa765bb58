"""The settings of cuFile that a user or a machine has: which file they are in, what it says, and
whether cuFile will take it. And where cuFile's log goes, if nobody has said it. Nothing of cuFile
is called here.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

_PATH, _LOG = "CUFILE_ENV_PATH_JSON", "CUFILE_LOGFILE_PATH"
_SYSTEM = "/etc/cufile.json"
# A string, which may hold what looks like a comment; or a comment, as cuFile takes them.
_PIECE = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


class Settings(NamedTuple):
    """What is set, by section; `source` says where, and is empty for cuFile's defaults. `fault` is
    why cuFile does not open with it, `note` what else is odd about it."""

    source: str
    sections: Mapping[str, Any]
    fault: str = ""
    note: str = ""

    def number(self, name: str, default: int) -> int:
        """One of the properties."""
        found = self._section("properties").get(name)
        return found if type(found) is int else default

    @property
    def says_where_to_log(self) -> bool:
        return bool(self._section("logging").get("dir"))

    def _section(self, name: str) -> Mapping[str, Any]:
        found = self.sections.get(name)
        return found if isinstance(found, dict) else {}


def settings(root: str = "/") -> Settings:
    """Those that cuFile would open with in this process."""
    named = os.environ.get(_PATH, "")
    path = named or os.path.join(root, _SYSTEM[1:])
    source = f"{_PATH}={named}" if named else _SYSTEM
    if not os.path.exists(path):
        if not named:
            return Settings("", {})
        return Settings(source, {}, note="there is no such file, and cuFile goes on without it")
    if not os.path.isfile(path):
        return Settings(source, {}, fault="it is no file")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError as error:
        return Settings(source, {}, fault=f"it cannot be read: {error.strerror}")
    try:
        found = json.loads(_PIECE.sub(_without_comment, text))
    except (ValueError, RecursionError) as error:
        return Settings(source, {}, fault=f"it is not JSON: {error}")
    return Settings(source, found if isinstance(found, dict) else {})


def _without_comment(piece: re.Match[str]) -> str:
    text = piece[0]
    return text if text.startswith('"') else "\n" * text.count("\n") or " "


def log_file(found: Settings) -> str:
    """Where cuFile is to be told to log; empty where that has been said already."""
    if _LOG in os.environ or found.says_where_to_log:
        return ""
    return os.path.join(tempfile.gettempdir(), f"cufile-{os.getuid()}.log")


@contextmanager
def log_elsewhere(found: Settings) -> Iterator[None]:
    """While cuFile is opened: its log would be dropped into whatever directory the process is in.

    Releases from 1.14 to 1.20 take the parameter for it without complaint, and log there all the
    same. Only the variable is heeded, and it is looked at when the driver opens. To write to the
    environment is a race with C code of other threads that reads it, and there is no other way:
    so it is set for the length of that one call, and only where nobody has said where to log.
    """
    path = log_file(found)
    if path:
        os.environ[_LOG] = path
    try:
        yield
    finally:
        if path:
            os.environ.pop(_LOG, None)
