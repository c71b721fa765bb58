"""Ranks of torch.distributed read a checkpoint together: each reads a share, then they exchange.

    wants of all ranks ──► layouts ──► windows ──► shares: read ──► messages: exchange ──► tensors

The plan is arithmetic that every rank repeats for itself (`shares`). Not responsible for reading
(`loading`).
"""
