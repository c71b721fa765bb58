"""The roads from storage to memory, behind one plugin interface."""

from gdsload.backends.base import (
    API_VERSION,
    DRAM,
    VRAM,
    Backend,
    Failure,
    Memory,
    OpenFile,
    Option,
    Progress,
    Registration,
    Support,
)
from gdsload.backends.registry import choose, find, names, probe_all, reaches, register_backend
from gdsload.planning.read_plan import Limits, Transfer

__all__ = [
    "API_VERSION",
    "DRAM",
    "VRAM",
    "Backend",
    "Failure",
    "Limits",
    "Memory",
    "OpenFile",
    "Option",
    "Progress",
    "Registration",
    "Support",
    "Transfer",
    "choose",
    "find",
    "names",
    "probe_all",
    "reaches",
    "register_backend",
]
