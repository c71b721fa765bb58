"""Native modules: threads and memory that work without the GIL."""

# Cython imports this at the start of each native module, and a Ctrl-C during that import crashes
# the process. Importing it here first leaves no gap.
import inspect  # noqa: F401
