"""The machine and this process: GPUs, mounts, shared libraries, garbage collection,
cancellation, and quiescing before a snapshot.
"""
