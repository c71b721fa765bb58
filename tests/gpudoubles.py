"""Doubles of the CUDA driver and of libcufile: `doubles/*.c`, compiled once, found instead of them.

`Doubles` scripts their faults and reports calls that broke the contract. Device memory is host
memory, so that a test can look at it.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.dlpack

from compiled import compiled
from gdsload.backends.cufile import library as library_module
from gdsload.memory import late_copies, staging_ring, tensors
from gdsload.system import gpu, shared_libraries

SOURCES = Path(__file__).parent / "doubles"
CODE, HANG, SHORT, ERRNO, NEGATIVE, LOST, TWICE, STRANGE, STATUS, HALF, LATE = range(1, 12)
CLOSES_INPUT, DELAY = 12, 13  # DELAY: a call takes so many nanoseconds
COMPAT, NVFS, P2P = 0, 1, 2
KDL_CPU, KDL_CUDA = 1, 2
_PATIENCE_SECONDS = 120.0  # ends a test that would otherwise hang
# What holds the memory of rings that a late read still wrote to at the end of a test. It stays, as
# in a real process: memory that is unmapped while pinned would be pinned twice by a later test.
_late: list[object] = []
_FAULT_ARGUMENTS = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int]


def built(name: str, *defined: str) -> Path:
    """The double of that name, compiled; it stays as long as the process."""
    flags = ("-O1", "-fvisibility=hidden", *(f"-D{word}" for word in defined))
    return compiled(SOURCES / f"{name}.c", *flags)


@functools.cache
def library(name: str) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(built(name)))
    lib.double_fault.argtypes = _FAULT_ARGUMENTS
    lib.double_said.restype = ctypes.c_char_p
    if name == "cuda_double":
        lib.cuda_double_set.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
        lib.cuda_double_residue.argtypes = [ctypes.c_size_t]
        lib.cuda_double_cached.argtypes = [ctypes.c_size_t]
        lib.cuda_double_work.argtypes = [
            ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
        ]  # fmt: skip
        lib.cuda_double_is_device.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    else:
        lib.cufile_double_set.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        lib.cufile_double_size.argtypes = [ctypes.c_int, ctypes.c_size_t]
        lib.cufile_double_log_path.restype = ctypes.c_char_p
    return lib


class Doubles:
    """What a test does to the two, and what it sees of them."""

    def __init__(self) -> None:
        self.cuda = library("cuda_double")
        self.cufile = library("cufile_double")

    def set(
        self,
        *,
        devices: int = 2,
        nbytes: int = 1 << 36,
        patience: int = 3,
        version: int = 1170,
        native: int = NVFS,
    ) -> None:
        """A fresh machine: what it has, how long its copies take, which way cuFile has."""
        self.cuda.double_clear()
        self.cufile.double_clear()
        self.cuda.cuda_double_set(devices, nbytes, patience)
        reaches = ctypes.cast(self.cuda.cuda_double_reaches, ctypes.c_void_p)
        self.cufile.cufile_double_set(version, native, reaches)

    def size(self, parameter: int, value: int) -> None:
        """Sets one of cuFile's sizes, as a cufile.json would."""
        self.cufile.cufile_double_size(parameter, value)

    def forbid_compat(self) -> None:
        """Forbids cuFile's compatibility mode, as a cufile.json would."""
        self.cufile.cuFileSetParameterBool(1, 0)

    def fault(self, call: str, kind: int, value: int = 0, *, skip: int = 0, times: int = 1) -> None:
        """Strikes `times` calls (-1: all), after letting `skip` pass."""
        lib = self.cufile if call.startswith("cuFile") or call == "event" else self.cuda
        lib.double_fault(call.encode(), kind, value, skip, times)

    def share_memory(self, cached: int) -> None:
        """The memory of the devices is that of the host, which has so many bytes of page cache."""
        self.cuda.cuda_double_cached(cached)

    def hold_copies(self, hold: bool) -> None:
        self.cuda.cuda_double_hold(hold)

    def capture_graphs(self, capture: bool) -> None:
        """Whether another thread captures a graph meanwhile."""
        self.cuda.cuda_double_capture(capture)

    def capture_stream(self, capture: bool) -> None:
        """A graph is captured on the default stream of the first device."""
        self.cuda.cuda_double_capture_stream(0, capture)

    def keep_busy(
        self, does: str = "nothing", address: int = 0, nbytes: int = 0, value: int = 0
    ) -> None:
        """Gives the default stream of the first device work that goes on until `end_work`. At its
        end it "writes" `value` to all bytes of a range, or "reads" it from them: other bytes there
        are a broken promise."""
        kind = ("nothing", "writes", "reads").index(does)
        self.cuda.cuda_double_work(0, kind, address, nbytes, value)

    def end_work(self) -> None:
        """Ends that work, and runs all that waits for it."""
        self.cuda.cuda_double_end_work()

    @property
    def hung(self) -> int:
        """Calls that hang now."""
        return int(self.cuda.double_hung() + self.cufile.double_hung())

    def let_go(self) -> None:
        self.cuda.double_let_go()
        self.cufile.double_let_go()

    @property
    def struck(self) -> int:
        return int(self.cuda.double_struck() + self.cufile.double_struck())

    @property
    def cuda_log(self) -> dict[str, int]:
        values = (ctypes.c_int64 * 11)()
        self.cuda.cuda_double_log(values)
        names = (
            "ranges", "pins", "streams", "events", "retained", "copies", "copied", "used",
            "allocations", "frees", "batches",
        )  # fmt: skip
        return dict(zip(names, values, strict=True))

    @property
    def cufile_log(self) -> dict[str, int]:
        values = (ctypes.c_int64 * 9)()
        self.cufile.cufile_double_log(values)
        names = (
            "open", "opens", "files", "buffers", "batches", "in_flight", "reads", "unaligned",
            "destroyed_together",
        )  # fmt: skip
        return dict(zip(names, values, strict=True))

    @property
    def log_path(self) -> str:
        """The file that cuFile logs to since it was opened."""
        return str(self.cufile.cufile_double_log_path().decode())

    def complaints(self) -> str:
        """How the contract was broken, as the doubles report it."""
        return str((self.cuda.double_said() + self.cufile.double_said()).decode())


class _DlpackHead(ctypes.Structure):
    """The first members of a DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    )


def tensor_of(capsule: object) -> torch.Tensor:
    """Instead of `tensors.tensor_of`, as torch does not know the double: a capsule on a device
    of the double becomes a CPU tensor over the same memory, with the capsule's own deleter."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    head = _DlpackHead.from_address(pointer(capsule, b"dltensor"))
    if head.device_type == KDL_CUDA:
        assert library("cuda_double").cuda_double_is_device(head.data, 1)
        assert head.device_id in gpu._devices
        head.device_type, head.device_id = KDL_CPU, 0
    found: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return found


def forget(patch: pytest.MonkeyPatch) -> None:
    """What the process knows of its GPUs, of cuFile and of rings, as if it had just started."""
    for module, names in (
        (gpu, ("_cuda", "_devices")),
        (staging_ring, ("_holders", "_given_up")),
        (library_module, ("_library", "_driver", "_latched")),
    ):
        for name in names:
            patch.setattr(module, name, type(getattr(module, name))())


@contextmanager
def installed(patch: pytest.MonkeyPatch, root: Path, **machine: Any) -> Iterator[Doubles]:
    """Installs the doubles instead of NVIDIA's libraries, on a machine that meets cuFile's needs.

    Fails at the end if the contract was broken, or if something of a backend is left.
    """
    doubles = Doubles()
    doubles.set(**machine)
    before = doubles.cuda_log
    forget(patch)
    found = {shared_libraries.CUDA: "cuda_double", shared_libraries.CUFILE: "cufile_double"}
    patch.setattr(tensors, "tensor_of", tensor_of)
    patch.setattr(shared_libraries, "candidates", lambda soname: [str(built(found[soname]))])
    for name in ("proc/driver/nvidia-fs/version", "dev/nvidia-fs0", "proc/modules"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("2.26\n")
    (root / "run/udev").mkdir(parents=True)
    patch.setattr(library_module, "ROOT", str(root))
    for name in ("CUFILE_ENV_PATH_JSON", "CUFILE_LOGFILE_PATH"):
        patch.delenv(name, raising=False)
    patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    yield doubles
    doubles.let_go()
    doubles.hold_copies(False)
    doubles.end_work()
    staging_ring.release_rings()
    _late.extend(undo for ring in staging_ring.rings() for undo in ring._undo)
    late_copies.forget_ended()  # a busy machine may have been late with them
    said = doubles.complaints()
    assert said == "", said
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:  # threads that were left behind end when what they wait for comes back
        gc.collect()
        after = doubles.cuda_log
        left = {kind: after[kind] - before[kind] for kind in ("streams", "events")}
        if not any(left.values()):
            break
        assert time.monotonic() < deadline, f"{left} are left"
