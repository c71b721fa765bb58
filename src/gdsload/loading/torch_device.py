"""torch's view of a GPU: memory from its allocator, its current stream, and CUDA graphs that are
being captured. Not responsible for what is read to that memory (`device_batch`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gdsload._native import ranges as native
from gdsload.checkpoint import TensorInfo
from gdsload.dtypes import torch_dtype
from gdsload.errors import PlacementError
from gdsload.loading.session import Session
from gdsload.memory import device_buffers, late_copies
from gdsload.system import gpu

if TYPE_CHECKING:
    import torch

# A load of this many bytes asks torch's allocator for one block first. Otherwise each tensor of
# more than 10 MiB would be a cudaMalloc of its own, of 0.1 to 0.3 ms on an H100 (not kept).
WHOLE_BYTES = 256 << 20
UNKNOWN_BYTES = 1 << 62  # an allocator does not tell what it can reuse
# torch's allocator rounds sizes up to multiples of the first. For sizes up to the second it has
# other blocks.
_ROUND_BYTES, _SMALL_BYTES = 512, 1 << 20


def torch_imported() -> bool:
    """Whether torch's allocator is there without waiting for an import."""
    return "torch" in sys.modules


def require_no_capture(device: str) -> None:
    """Raises PlacementError while torch's current stream captures a CUDA graph: copies would become
    a part of it, and some of torch's would break it."""
    stream = _current_stream(device)
    if stream is None or gpu.why_not(device):  # torch may use a driver that gdsload cannot
        return
    if gpu.device(gpu.ordinal_of(device)).captures(stream.cuda_stream):
        raise PlacementError(
            f"a CUDA graph is being captured on the current stream of {device}: load before the"
            " capture, or in a thread with another current stream"
        )


def follow(session: Session) -> None:
    """Orders copies after all work that torch's current stream has now: memory from torch's
    allocator may still be in use by work of its last owner. The host does not wait, unless the
    backend cannot order its copies."""
    after_torch(session.device, lambda stream: session.open().follow(session.device, stream))


def after_torch(device: str, follow: Callable[[int], bool]) -> None:
    """The same, for copies that `follow` orders after a stream, or returns False."""
    stream = _current_stream(device)
    if stream is not None and not follow(stream.cuda_stream):
        with gpu.capture_relaxed(device):
            stream.synchronize()


def synchronize(device: str) -> None:
    """Waits for the work that torch's current stream of a device has now."""
    after_torch(device, lambda stream: False)


def empty(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory for a tensor from torch's allocator, aligned to 512 bytes."""
    import torch

    return torch.empty(tuple(shape), dtype=dtype, device=device)


def reserve_block(device: str, infos: list[TensorInfo]) -> None:
    """Makes torch's allocator take one block for many tensors, if there is room. It caches the
    block and makes the tensors in it. Without room each tensor is allocated on its own.

    Raises PlacementError if the device is too full for all of them.
    """
    ordinal = gpu.ordinal_of(device)
    late_copies.forget_ended()
    reusable = reusable_bytes(ordinal)
    free_bytes = device_buffers.require_room(ordinal, native.bytes_of(infos), reusable)
    large, total = native.rounded(infos, _SMALL_BYTES + 1, _ROUND_BYTES)
    fits = WHOLE_BYTES <= total <= free_bytes and total > reusable
    if large > 1 and fits and _splits_blocks(os.environ):
        with suppress(RuntimeError), gpu.capture_relaxed(device):
            empty((total,), torch_dtype("U8"), device)


def _splits_blocks(environ: Mapping[str, str]) -> bool:
    """Whether torch's allocator caches memory and splits blocks of any size. Otherwise it would
    keep a large block and make no tensor in it."""
    import torch

    # vLLM, for one, changes the settings while it loads a model. Older torch cannot tell.
    current = getattr(torch._C, "_accelerator_getAllocatorSettings", str)
    settings = environ.get("PYTORCH_ALLOC_CONF", "") + environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    settings += current()
    return "max_split_size" not in settings and "PYTORCH_NO_CUDA_MEMORY_CACHING" not in environ


def reusable_bytes(ordinal: int) -> int:
    """Bytes that torch's allocator holds and does not use."""
    cuda = _torch_cuda()
    if not cuda.is_initialized():
        return 0
    try:
        stats = cuda.memory_stats_as_nested_dict(ordinal)  # in a tenth of memory_reserved()'s time
    except RuntimeError:  # another allocator in place of torch's counts nothing: it will tell
        return UNKNOWN_BYTES
    reserved, allocated = stats["reserved_bytes"], stats["allocated_bytes"]
    return int(reserved["all"]["current"] - allocated["all"]["current"])


def _current_stream(device: str) -> Any:
    """torch's current stream; None if torch has not opened CUDA, and so has no work on it."""
    cuda = _torch_cuda()
    return cuda.current_stream(device) if cuda.is_initialized() else None


def _torch_cuda() -> Any:
    import torch

    return torch.cuda  # partly untyped
