"""The posix backend: reads by io_uring, Linux AIO, threads or POSIX AIO."""

from gdsload.backends.posix.backend import PosixBackend

__all__ = ["PosixBackend"]
