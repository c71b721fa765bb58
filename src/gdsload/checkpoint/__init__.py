"""Checkpoints: finding their files, opening shards, parsing and validating headers.

Nothing here reads tensor data, and nothing here imports torch or a backend.
"""

from gdsload.checkpoint.checkpoint import Checkpoint
from gdsload.checkpoint.header import TensorInfo
from gdsload.checkpoint.shard import Identity, Shard

__all__ = ["Checkpoint", "Identity", "Shard", "TensorInfo"]
