"""The names of devices, such as "cpu" and "cuda:1". Not responsible for opening devices (`gpu`)."""

from __future__ import annotations

import re
import sys
from typing import Any

from gdsload.errors import PlacementError

# A GPU by name. A number is written in one way only.
_GPU = r"(?a)cuda(:(0|[1-9]\d*))?"  # compiled when it is used


def device_name(device: Any) -> str:
    """The name of a device: "cuda:1" for 1, and the current device for "cuda"."""
    name = plain_name(device)
    if name != "cuda":
        return name
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def current_gpu() -> str:
    """The GPU that "cuda" stands for, without opening one: the first until torch has opened one."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return "cuda:0"
    return f"cuda:{cuda.current_device()}"


def require_name(device: object) -> str:
    """The name of the CPU or of a GPU, which need not exist. Raises PlacementError for others."""
    name = plain_name(device)
    if name not in ("cpu", "cpu:0") and not re.fullmatch(_GPU, name):
        raise PlacementError(f"device {name!r} is neither cpu nor a GPU such as cuda:0")
    return "cpu" if name == "cpu:0" else name


def require_device(device: object) -> str:
    """The name of an existing device. Imports torch, except for the CPU.

    Args:
        device: A name, the number of a GPU, a torch.device, or None for the CPU, as in safetensors.

    Returns:
        The name with its number: the current device for "cuda".

    Raises:
        PlacementError: It is not a device, or not one of this machine.
    """
    name = plain_name(device)
    if device is None or name in ("cpu", "cpu:0"):
        return "cpu"
    import torch

    if type(device) is not int and not isinstance(device, (str, torch.device)):
        raise PlacementError(f"{device!r} is not a device")
    try:
        return str(torch.empty(0, device=name).device)
    except Exception as error:  # RuntimeError, AssertionError and others, by torch's version
        why = str(error).partition("\n")[0] or repr(error)
        raise PlacementError(f"device {name!r} cannot be used: {why}") from error


def require_target(device: object) -> str:
    """`require_device`, but a GPU is not checked before torch is imported, which takes seconds:
    that is left to the caller, who posts the first read before."""
    name = plain_name(device)
    if "torch" not in sys.modules and re.fullmatch(_GPU, name):
        return "cuda:0" if name == "cuda" else name  # torch begins with device 0
    return require_device(device)


def plain_name(device: object) -> str:
    """The name of a device as it was given: "cuda:1" for 1, but "cuda" for "cuda"."""
    return f"cuda:{device}" if type(device) is int else str(device)


def device_kind(device: str) -> str:
    """The kind of a device by its name: "cpu", or "cuda" for "cuda:1"."""
    return device.partition(":")[0]
