"""The bytes of transfers, and how they are divided between reads. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from gdsload.backends.base import OpenFile, Registrations
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, Transfer


def wanted_bytes_of(transfers: Sequence[Transfer]) -> int:
    return sum(transfer.wanted for transfer in transfers)


def ragged_ends_apart(
    transfers: Sequence[Transfer], files: Registrations
) -> tuple[list[Transfer], list[Transfer]]:
    """The reads of whole blocks, and the buffered reads of the ends of files, which are no whole
    blocks."""
    blocks: list[Transfer] = []
    ends: list[Transfer] = []
    for each in transfers:
        what = files[each.shard].what
        size = what.size if isinstance(what, OpenFile) else 0
        before = size // DEFAULT_BLOCK_BYTES * DEFAULT_BLOCK_BYTES - each.offset
        if each.wanted <= before:
            blocks.append(each)
            continue
        if before > 0:
            blocks.append(each._replace(length=before, wanted=before))
        before, nbytes = max(before, 0), each.wanted - max(before, 0)
        end = each._replace(offset=each.offset + before, length=nbytes, wanted=nbytes)
        ends.append(end._replace(target_offset=each.target_offset + before, io_mode="buffered"))
    return blocks, ends


def split(whole: Transfer, limit: int) -> list[Transfer]:
    """Splits a transfer into reads of at most `limit` bytes that start on blocks like the whole."""
    step = max(limit // DEFAULT_BLOCK_BYTES * DEFAULT_BLOCK_BYTES, DEFAULT_BLOCK_BYTES)
    if whole.length <= step:
        return [whole]
    return [
        whole._replace(
            offset=whole.offset + start,
            length=min(step, whole.length - start),
            wanted=min(step, whole.wanted - start),
            target_offset=whole.target_offset + start,
        )
        for start in range(0, max(whole.wanted, 1), step)
    ]
