"""Checkpoints with real shapes and made-up values, for demos and benchmarks."""
