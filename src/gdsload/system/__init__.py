"""The machine and this process: GPUs, mounts, storage, available memory, shared libraries, threads,
garbage collection, cancellation, and quiescing before a snapshot.
"""
