"""The posix backend: reads by io_uring, Linux AIO or threads."""

from gdsload.backends.posix.backend import PosixBackend

__all__ = ["PosixBackend"]
