"""Backends, which read files into memory, and the plugin interface that they share.

A plugin is a subclass of `Backend`. It is found by the entry point group ``gdsload.backends``, or
registered by `register_backend`.

Example:
    >>> from gdsload import backends
    >>> backends.names()
    ['gds_mt', 'posix', 'gds']
    >>> backends.choose("cpu").backend.name
    'posix'
"""

from gdsload.backends.base import (
    API_VERSION,
    Backend,
    BackendStatus,
    Failure,
    Memory,
    OpenFile,
    Option,
    Progress,
    Registration,
    RequestFacts,
    Support,
)
from gdsload.backends.registry import choose, find, names, probe_all, reaches, register_backend
from gdsload.memory import DRAM, VRAM
from gdsload.planning.read_plan import Limits, Transfer

__all__ = [
    "API_VERSION",
    "DRAM",
    "VRAM",
    "Backend",
    "BackendStatus",
    "Failure",
    "Limits",
    "Memory",
    "OpenFile",
    "Option",
    "Progress",
    "Registration",
    "RequestFacts",
    "Support",
    "Transfer",
    "choose",
    "find",
    "names",
    "probe_all",
    "reaches",
    "register_backend",
]
