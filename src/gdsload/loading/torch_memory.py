"""Memory that torch takes for a load: its refusals become errors of gdsload, and it breaks no CUDA
graph that another thread captures. Not responsible for where tensors are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from gdsload.errors import PlacementError
from gdsload.system.device_name import plain_name
from gdsload.system.torch_thread import copying

if TYPE_CHECKING:
    import torch

# In the messages of torch's allocators for devices and for the CPU. Other RuntimeErrors, such as
# "an illegal memory access", are not about room.
_REFUSALS = "out of memory", "allocate memory"


def raise_if_refused(error: RuntimeError, nbytes: int, device: str, what: str) -> None:
    """Raises PlacementError if `error` says that torch has no `nbytes` for `what`: by its text, as
    the class of such errors has had several names."""
    why = str(error).partition("\n")[0]
    if any(sign in why for sign in _REFUSALS):
        raise PlacementError(
            f"no {nbytes:,} bytes on {device} for {what}: {why}", missing_bytes=nbytes
        ) from error


@contextmanager
def taking(nbytes: int, device: str, what: str) -> Iterator[None]:
    """Raises PlacementError instead of torch's errors about memory, which are RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        raise_if_refused(error, nbytes, device, what)
        raise


def capture_relaxed(device: str) -> AbstractContextManager[None]:
    """As `gpu.capture_relaxed`, without an import of CUDA for the CPU."""
    if device == "cpu":
        return nullcontext()
    from gdsload.system import gpu

    return gpu.capture_relaxed(device)


@contextmanager
def making(nbytes: int, like: torch.Tensor, what: str) -> Iterator[None]:
    """For a call of torch that makes a tensor of `nbytes` on the device of `like`. Raises
    PlacementError if it has no room."""
    device = "cpu" if like.is_cpu else str(like.device)
    with taking(nbytes, device, what), copying() if like.is_cpu else capture_relaxed(device):
        yield


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the same device. Raises PlacementError if it has no room."""
    with making(tensor.nbytes, tensor, "a copy of a part of a tensor"):
        return tensor.clone()


def moved(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """The tensor on another device: a name, the number of a GPU, or a torch.device. Raises
    PlacementError if that has no room."""
    name = plain_name(device)
    with taking(tensor.nbytes, name, "a tensor"), capture_relaxed(name):
        return tensor.to(device)
