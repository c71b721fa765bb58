"""The asyncio face: reads go on in native threads anyway, and waiting for them in a thread pool."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from gdsload.tensors import stream

if TYPE_CHECKING:
    import torch

_END = ("", None)


async def astream(
    source: str | os.PathLike[str], device: str | int | torch.device = "cpu", **words: Any
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """`gdsload.stream` for ``async for``: the event loop goes on while it waits for bytes.

    Arguments and errors are those of `stream`. Breaking out of the loop ends the reads when the
    iterator is closed: ``contextlib.aclosing`` closes it at once.
    """
    tensors = stream(source, device, **words)
    step: asyncio.Future[Any] | None = None
    try:
        while True:
            step = asyncio.ensure_future(asyncio.to_thread(next, tensors, _END))
            name, tensor = await asyncio.shield(step)
            if tensor is None:
                return
            yield name, tensor
    finally:
        # A generator cannot be closed while a thread is in it: a cancelled step is waited for.
        if step is not None and not step.done():
            await asyncio.wait([step])
        await asyncio.to_thread(tensors.close)  # type: ignore[attr-defined]
