"""The package of NIXL, which has one name for each version of CUDA."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import Any

from gdsload.errors import BackendUnavailable, extra_hint

PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
HINT = extra_hint("nixl")
# The thread that makes progress waits for events, and looks by itself after this time. Without
# readers it uses 0.4 % of a core.
_PROGRESS_MICROSECONDS = 10_000
SHARED_MEMORY = "/dev/shm"  # where UCX creates its queues


def nixl_api() -> Any:
    """The module with `nixl_agent` and `nixl_agent_config`; importing it takes 0.35 s.

    Raises BackendUnavailable if NIXL is not installed or cannot be imported.
    """
    reason = "the package nixl is not installed"
    for package in PACKAGES:
        try:
            api = import_module(f"{package}._api")
            if "NIXL_LOG_LEVEL" not in os.environ:  # it would write progress to stdout
                logging.getLogger("nixl").setLevel(logging.WARNING)
            return api
        except ModuleNotFoundError as error:
            if error.name != package:
                reason = f"{package} cannot be imported: {error}"
        except ImportError as error:
            reason = f"{package} cannot be imported: {error}"
    raise BackendUnavailable(f"no NIXL: {reason} ({HINT})", {"nixl": f"{reason} ({HINT})"})


def new_agent(name: str, plugin: str, parameters: dict[str, str], *, progress: bool) -> Any:
    """A NIXL agent with one of its backends, "UCX" or "LIBFABRIC".

    Args:
        name: The name of the agent, unique among all that may meet.
        plugin: The backend of NIXL.
        parameters: Its parameters, as NIXL names them.
        progress: Whether a thread of its own makes progress: the target of reads needs it.

    Raises:
        BackendUnavailable: NIXL is not installed, or cannot create the backend.
    """
    api = nixl_api()
    try:
        agent = api.nixl_agent(
            name, api.nixl_agent_config(enable_prog_thread=progress, backends=[])
        )
        if progress and plugin == "UCX":
            # NIXL's Python class has no argument for the delay. Its own is 0: a thread that could
            # wait for events uses a whole core. That of LIBFABRIC can only sleep.
            config = api.nixlBind.nixlAgentConfig()
            config.useProgThread, config.pthrDelay = True, _PROGRESS_MICROSECONDS
            agent.agent = api.nixlBind.nixlAgent(name, config)
        agent.create_backend(plugin, dict(parameters))
    except Exception as error:  # NIXL has classes of its own, which derive from Exception
        reason = f"NIXL cannot create its backend {plugin}: {str(error) or type(error).__name__}"
        if plugin == "UCX" and not os.access(SHARED_MEMORY, os.W_OK):
            reason += f" (UCX needs a writable {SHARED_MEMORY}; in Docker, --shm-size mounts one)"
        raise BackendUnavailable(reason, {"nixl": reason}) from error
    return agent
