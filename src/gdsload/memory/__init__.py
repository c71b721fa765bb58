"""Memory that tensors live in or pass through, and what the page cache holds of files."""

DRAM, VRAM = "dram", "vram"  # the kinds of memory
