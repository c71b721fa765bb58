"""Backends, which read files into memory, and the plugin interface that they share."""

from gdsload.backends.base import (
    API_VERSION,
    DRAM,
    VRAM,
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
