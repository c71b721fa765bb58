"""Which pages of this process are resident."""

from __future__ import annotations

PAGE = 4096


def resident_pages(address: int, length: int) -> int:
    """The number of resident pages in a range of this process: bit 63 of its pagemap entries."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = pagemap.read(length // PAGE * 8)
    return sum(entries[i + 7] >> 7 for i in range(0, len(entries), 8))
