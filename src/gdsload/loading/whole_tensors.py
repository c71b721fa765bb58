"""Loads whole tensors by a session: all at once (`load`), or window by window (`load_in_windows`).

    infos ──► post: one `Batch` for each group ──► wait ──► tensors by name

Torch is imported while the first reads are in flight. Not responsible for opening checkpoints or
for parts of tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from gdsload.checkpoint import TensorInfo
from gdsload.dtypes import DTYPES
from gdsload.loading.batch import Batch, release_all
from gdsload.loading.session import Session
from gdsload.loading.torch_memory import moved
from gdsload.memory.tensors import require_possible
from gdsload.planning.read_plan import grouped, ranges_of
from gdsload.system.device_name import require_device

if TYPE_CHECKING:
    import torch


def post(session: Session, infos: Sequence[TensorInfo], *, past_cache: str = "") -> Batch:
    """Posts the reads of whole tensors to the session's device and returns without waiting.
    `past_cache` is as for `Session.arrange`."""
    if session.device == "cpu":
        return Batch(session, *session.arrange(ranges_of(infos), past_cache=past_cache))
    from gdsload.loading.device_batch import start

    return start(session, infos)


def load(
    session: Session,
    infos: list[TensorInfo],
    nbytes: int,
    device: str,
    advance: Callable[[int], None] | None = None,
    *,
    past_cache: str = "",
) -> dict[str, torch.Tensor]:
    """Tensors of `nbytes` bytes in all, by name, on the session's device, which is `device` or the
    CPU on the way to it. `past_cache` is as for `Session.arrange`."""
    groups: Iterable[list[TensorInfo]] = (infos,)
    if session.device != "cpu":
        from gdsload.loading.device_batch import starting_windows

        groups = starting_windows(session, infos, nbytes)
    posted: list[tuple[list[TensorInfo], Batch]] = []
    try:
        for group in groups:
            posted.append((group, post(session, group, past_cache=past_cache)))
        _import_torch(session, device)
        require_possible(infos)
        found: dict[str, torch.Tensor] = {}
        for group, batch in posted:
            last = batch is posted[-1][1]
            shards = {info.shard for info in (infos if last else group)}
            tensors = _handed_over(session, group, batch, advance, shards)
            if group is infos:  # the only one
                return tensors
            found |= tensors
        return {info.name: found[info.name] for info in infos}
    finally:
        release_all(batch for _, batch in posted)


def load_in_windows(
    session: Session,
    infos: list[TensorInfo],
    window_bytes: int,
    device: str,
    advance: Callable[[int], None],
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Reads window by window, one ahead of the window that is handed out."""
    windows = ((group, post(session, group)) for group in grouped(infos, window_bytes))
    posted = deque(islice(windows, 1))
    try:
        _import_torch(session, device)
        require_possible(infos)
        handed = False
        while posted:
            posted.extend(islice(windows, 1))
            group, batch = posted[0]
            if handed:  # some time ago: a mapping may be longer than its file now
                copied = {info.shard for info in group if _copies_mapped(session, info, batch)}
                session.checkpoint.verify_unchanged(copied)
            handed = True
            shards = {info.shard for info in group} if len(posted) > 1 else None
            tensors = _handed_over(session, group, batch, advance, shards)
            del posted[0], batch
            for info in group:
                tensor = tensors.pop(info.name)
                if device != session.device:
                    copied = {info.shard} if session.maps(tensor, info.shard) else set()
                    session.checkpoint.verify_unchanged(copied)
                    tensor = moved(tensor, device)
                    session.checkpoint.verify_unchanged(copied)
                yield info.name, tensor
                del tensor
    finally:
        release_all(batch for _, batch in posted)


def _copies_mapped(session: Session, info: TensorInfo, batch: Batch) -> bool:
    """Whether a tensor will be a copy of bytes in a mapping of its file: it is misaligned there."""
    view = batch.views.get(info.name)
    if view is None or not session.is_mapping(view, info.shard):
        return False
    return (view.region.address + view.offset) % DTYPES[info.dtype].align != 0


def _handed_over(
    session: Session,
    group: Sequence[TensorInfo],
    batch: Batch,
    advance: Callable[[int], None] | None,
    shards: Collection[int] | None,
) -> dict[str, torch.Tensor]:
    """The tensors of a batch, when their bytes are there; those of later batches are read
    meanwhile. None of these shards may have changed (None: of all): at the end those of the whole
    load, as a file may change after its own batch."""
    batch.wait(advance, parts=group)
    with session.report.phase("hand over"):
        # It may copy from a mapping: tensors at odd addresses, prefetched bytes to a device.
        tensors = batch.tensors_of(group)
        session.checkpoint.verify_unchanged(shards)
        batch.release()
    return tensors


def _import_torch(session: Session, device: str) -> None:
    """Imports torch while native threads read. Raises PlacementError if it cannot use `device`."""
    with session.report.phase("import torch"):
        import torch  # noqa: F401
    if session.device != device:
        require_device(device)
