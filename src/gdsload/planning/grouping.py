"""Groups items by size, in their order. The sizes may be of tensors, slices or byte ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

Item = TypeVar("Item")


def grouped(
    items: Iterable[Item], most_bytes: int, size: Callable[[Any], int] = attrgetter("nbytes")
) -> Iterator[list[Item]]:
    """Yields lists of consecutive items, each of at most `most_bytes`, or of one larger item.

    Args:
        items: The items to group.
        most_bytes: The largest size of a group.
        size: Returns the size of an item in bytes; by default its `nbytes`.

    Example:
        >>> list(grouped([3, 4, 9, 1], 8, size=int))
        [[3, 4], [9], [1]]
    """
    group: list[Item] = []
    total = 0
    for item in items:
        nbytes = size(item)
        if group and total + nbytes > most_bytes:
            yield group
            group, total = [], 0
        group.append(item)
        total += nbytes
    if group:
        yield group
