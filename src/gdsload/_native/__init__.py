"""What needs no interpreter."""

# Each module here begins by importing this (Cython does), and takes the process down where Ctrl-C
# comes meanwhile. Once it is there, nothing can come in between.
import inspect  # noqa: F401
