"""What people call a device, and what we call it: "cpu", "cuda:1"."""

from __future__ import annotations

from typing import Any

from gdsload.errors import PlacementError


def device_name(device: Any) -> str:
    """A device as we write it: "cuda:1" for 1, and the current one for "cuda"."""
    if isinstance(device, int) and not isinstance(device, bool):
        return f"cuda:{device}"
    text = str(device)
    if text != "cuda":
        return text
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def require_device(device: object) -> str:
    """The name of a device that is there, "cuda:0" for 0 and "cpu" for None, as in safetensors;
    torch is asked for all but the CPU.

    Raises PlacementError, before a byte is read, for what is no device or not on this machine.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"
    text = str(device)
    if device is None or text in ("cpu", "cpu:0"):
        return "cpu"
    import torch

    if not isinstance(device, (str, torch.device)):
        raise PlacementError(f"{device!r} is not a device")
    try:
        found = torch.empty(0, device=text).device
    except Exception as error:  # RuntimeError, AssertionError and others, by torch's version
        why = str(error).partition("\n")[0] or repr(error)
        raise PlacementError(f"device {text!r} cannot be used: {why}") from error
    return str(found)  # with its number: "cuda" is the current one
