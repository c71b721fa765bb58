"""The settings of cuFile: the file they are in, their values, whether cuFile accepts them, and
where cuFile writes its log. Not responsible for calling cuFile.
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
_SECTIONS = ("logging", "profile", "execution", "properties", "fs", "block", "miscellaneous")
# A string, which may contain the marks of a comment; or a comment, which cuFile allows.
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


class Settings(NamedTuple):
    """The settings.

    Attributes:
        source: The file, "" for cuFile's defaults.
        sections: The values, by section.
        fault: Why cuFile does not open with them, or "".
        note: What else is unusual about them, or "".
        aborts: Whether cuFile ends the process when it opens with them.
    """

    source: str
    sections: Mapping[str, Any]
    fault: str = ""
    note: str = ""
    aborts: bool = False

    def number(self, name: str, default: int) -> int:
        """A number in the section "properties"."""
        found = self._section("properties").get(name)
        return found if type(found) is int else default

    def has(self, section: str, name: str) -> bool:
        return name in self._section(section)

    @property
    def has_slabs(self) -> bool:
        """Whether the buffers of batches are slabs of several sizes (1.17 and newer). Then the
        sizes of one buffer and of its pool do not count."""
        return self.has("properties", "gpu_bounce_buffer_slab_config")

    @property
    def has_log_directory(self) -> bool:
        return bool(self._section("logging").get("dir"))

    def _section(self, name: str) -> Mapping[str, Any]:
        found = self.sections.get(name)
        return found if isinstance(found, dict) else {}


def settings(root: str = "/") -> Settings:
    """The settings that cuFile would use in this process."""
    named = os.environ.get(_PATH, "")
    path = named or os.path.join(root, _SYSTEM[1:])
    source = f"{_PATH}={named}" if named else _SYSTEM
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except FileNotFoundError:
        note = "there is no such file, and cuFile uses its defaults" if named else ""
        return Settings(source if named else "", {}, note=note)
    except OSError as error:
        return Settings(source, {}, fault=f"it cannot be read: {error.strerror}")
    try:
        found = json.loads(_TOKEN.sub(_without_comment, text))
    except (ValueError, RecursionError) as error:
        return Settings(source, {}, fault=f"it is not JSON: {error}")
    if why := _no_objects(found):
        return Settings(source, {}, fault=why, aborts=True)
    return Settings(source, found if isinstance(found, dict) else {})


def _no_objects(found: Any) -> str:
    """What should be an object of JSON, and is none; or ""."""
    if not isinstance(found, dict):
        return "" if found is None or isinstance(found, list) else "it is no object of JSON"
    sections = {name: found[name] for name in _SECTIONS if name in found}
    block = sections.get("block")
    if isinstance(block, dict):
        sections |= {f"block.{name}": value for name, value in block.items()}
    wrong = [n for n, value in sections.items() if value is not None and type(value) is not dict]
    return f"{', '.join(wrong)} should be an object" if wrong else ""


def _without_comment(token: re.Match[str]) -> str:
    text = token[0]
    return text if text.startswith('"') else "\n" * text.count("\n") or " "


def log_file(found: Settings) -> str:
    """The file that cuFile should log to, "" if the user has set one, or no directory for it can be
    written to."""
    if _LOG in os.environ or found.has_log_directory:
        return ""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        return ""
    return os.path.join(folder, f"cufile-{os.getuid()}.log")


@contextmanager
def log_elsewhere(found: Settings) -> Iterator[None]:
    """Sets the log file of cuFile while it is opened. By default it logs to the working directory.

    Releases from 1.14 to 1.20 accept the parameter for it, but ignore it: only the environment
    variable works, and cuFile reads it when its driver is opened. Writing to the environment is a
    race with C code in other threads that reads it. So it is set for that one call only, and only
    if the user has not set a log file.
    """
    path = log_file(found)
    if path:
        os.environ[_LOG] = path
    try:
        yield
    finally:
        if path:
            os.environ.pop(_LOG, None)
