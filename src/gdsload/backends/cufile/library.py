"""cuFile in this process: found, opened once with bounded waiting, and asked which path it uses.

Compatibility mode copies through DRAM, slower and less reliably than the posix backend does: it is
used only if a user allows it. Whether there is a native path is checked up to three times: in the
machine's files before cuFile is opened, in the driver's properties when it is open (not of 1.14 to
1.16), and in cuFile's own counters after reads (from 1.15 on).
"""

from __future__ import annotations

import glob
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from gdsload._native.cuda import Device
from gdsload._native.cufile import CuFile, CuFileFailure
from gdsload.backends.base import Support, require_own_process
from gdsload.backends.cufile import config
from gdsload.errors import BackendUnavailable, GdsloadError
from gdsload.system import gpu, lifecycle, quiesce, shared_libraries
from gdsload.system.kernel_files import read_text

NVFS, P2P, COMPAT = "nvfs", "p2p", "compat"
# Reads by one of them that nobody counts.
UNCOUNTED = "uncounted"
ROOT = "/"  # the directory that stands for the machine's root
# cuFileDriverOpen takes 50 to 180 ms, and longer on machines with many GPUs.
OPEN_SECONDS = 30.0
# Closing takes milliseconds, and seconds on a starved machine. A process that ended meanwhile would
# meet libcufile's own exit handlers.
CLOSE_SECONDS = 10.0
# A call that only sets a number. libcufile's thread looks at it every millisecond, and writes no
# more statistics after the second time.
END_STATISTICS_SECONDS = 1.0
LAST_STATISTICS_SECONDS = 0.02
# Registering a file or a ring takes 1 ms to 0.3 s. With nvidia-fs built for another driver, or with
# storage that does not answer, it hangs.
REGISTER_SECONDS = 10.0

# The largest part of one read, as in NVIDIA's file. cuFile before 1.19 splits a read into parts of
# 1 MiB, one after the other.
DIRECT_IO_KB = 16384

# CUFileSizeTConfigParameter_t and CUFileBoolConfigParameter_t.
_DIRECT_IO_KB, _DEVICE_CACHE_KB, _BUFFER_CACHE_KB, _BATCHSIZE = 5, 6, 7, 9
_ALLOW_COMPAT, _PARALLEL_IO, _USE_P2PDMA = 1, 4, 7
# CUfileDriverStatusFlags_t, CUfileDriverControlFlags_t and CUfileFeatureFlags_t, as bits.
_NVME, _NVME_P2P, _COMPAT_ALLOWED, _P2P_SUPPORTED = 4, 11, 1, 4

_HOW_COMPAT = 'backend="gds_mt", options={"allow_compat": True}'  # for messages

# The code of settings that cuFile does not understand, from 1.19 on; before, it is below zero.
_BAD_SETTINGS = 5002

# The error codes of cuFile that a user is likely to see.
MEANINGS = {
    _BAD_SETTINGS: "cuFile does not take its settings",
    5001: "nvidia-fs is not loaded, and compatibility mode was not allowed",
    5007: "GPUDirect Storage does not work on this platform",
    5008: "GPUDirect Storage does not work on this file",
    5009: "GPUDirect Storage does not work on this GPU",
    5010: "the nvidia-fs driver refused; is the GPU's BAR1 large enough?",
    5011: "the CUDA driver refused",
    5018: "cuFile reads no files of this kind",
    5019: "cuFile does not take a file that was opened like this; does its filesystem do O_DIRECT?",
    5022: "cuFile refused the arguments",
    5025: "permission denied: by the driver or for the file",
    5027: "cuFile does not know the file; in a container it needs the host's /run/udev",
    5029: "cuFile finds no GPU",
    5030: "an internal error; in a container cuFile needs the host's /run/udev",
    5033: "cuFile could not be set up: is libcuda there?",
    5034: "GPUDirect Storage is switched off for this file by cufile.json",
    5036: "no room to pin GPU memory: the BAR1 window is too small or full",
    5037: "cuFile's batch queue is full",
    5040: "cuFile refused the whole batch",
    5044: "a read failed below cuFile",
    5049: "cuFile takes no batches in compatibility mode here",
}


class BatchLimits(NamedTuple):
    """The limits of cuFile's batches.

    Attributes:
        buffer_cache: Bytes of the buffer of one entry.
        device_cache: Bytes of the pool of such buffers.
        batch: Entries of one batch.
    """

    buffer_cache: int
    device_cache: int
    batch: int

    def complaint(self) -> str:
        """Why batches would stall with these limits, or ""."""
        if not self.batch or not self.buffer_cache:
            return ""
        if self.device_cache // self.buffer_cache >= self.batch:
            return ""
        return (
            f"max_device_cache_size_kb={self.device_cache >> 10} holds"
            f" {self.device_cache // self.buffer_cache} buffers of per_buffer_cache_size_kb="
            f"{self.buffer_cache >> 10}, fewer than io_batchsize={self.batch}: set"
            f" max_device_cache_size_kb to {self.batch * self.buffer_cache >> 10} in cufile.json"
        )


class Driver(quiesce.Holder):
    """cuFile with its driver open.

    `mode` is the path that it uses: `NVFS`, `P2P` or `COMPAT`. `uncounted_path` is that of reads
    that cuFile has not counted: with a native mode, files may still be read in compatibility mode,
    if that is allowed. `split_kb`: cuFile divides reads into parts of so many KiB, fewer than
    `DIRECT_IO_KB`, and the user has not set that; else 0.
    """

    def __init__(
        self, library: CuFile, owner: Device, compat_refused: bool, own_size: bool
    ) -> None:
        """`owner`: the device that it was opened for. `compat_refused`: whether cuFile was told to
        refuse compatibility mode. `own_size`: whether the user has set the size of reads."""
        self.library, self._owner = library, owner
        self.pid = os.getpid()
        # Asked for its properties, 1.14 to 1.16 forget all parameters that were set.
        forgets = 1140 <= library.version < 1170
        facts = {} if forgets else library.properties()
        self.mode = native_path()[0] or COMPAT if forgets else _mode(library, facts)
        allowed = not compat_refused and (forgets or facts["control"] >> _COMPAT_ALLOWED & 1)
        self.uncounted_path = UNCOUNTED if allowed and self.mode != COMPAT else self.mode
        self.limits = BatchLimits(
            (library.get_size(_BUFFER_CACHE_KB) or facts.get("per_buffer_cache_kb", 0)) << 10,
            (library.get_size(_DEVICE_CACHE_KB) or facts.get("max_device_cache_kb", 0)) << 10,
            library.get_size(_BATCHSIZE) or facts.get("max_batch", 0),
        )
        direct_io_kb = library.get_size(_DIRECT_IO_KB) or facts.get("max_direct_io_kb", 0)
        self.split_kb = direct_io_kb if direct_io_kb < DIRECT_IO_KB and not own_size else 0
        self.counts = library.start_statistics()
        self.stuck = False  # a call hangs: others may hang too
        self._registered = 0  # files and buffers

    def register_file(self, fd: int) -> int:
        """Registers an open file and returns its handle.

        Raises:
            CuFileFailure: cuFile refuses the file.
            TimeoutError: The call hangs. The descriptor must stay open, and cuFile is not used any
                more.
        """
        handle: int = self._register(self.library.register_file, fd)
        return handle

    def deregister_file(self, handle: int) -> None:
        """Deregisters a file. No read of it may be in flight."""
        self.library.deregister_file(handle)
        self._count(-1)

    def register_buffer(self, address: int, nbytes: int, device: Device) -> None:
        """Registers memory of a device.

        Raises:
            CuFileFailure: cuFile refuses the memory.
            TimeoutError: The call hangs. The memory must stay, and cuFile is not used any more.
        """
        self._register(self.library.register_buffer, address, nbytes, device)

    def _register(self, register: Callable[..., Any], *what: object) -> Any:
        # Counted first: a call that takes too long, or that a signal ends, may still succeed. Then
        # cuFile is never closed.
        self._count(1)
        try:
            return register(*what, REGISTER_SECONDS)
        except TimeoutError as error:
            self.stuck = True
            _latch(str(error))
            raise
        except (CuFileFailure, OSError):
            self._count(-1)
            raise

    def _count(self, change: int) -> None:
        with _lock:  # backends are opened and closed in threads
            self._registered += change

    def deregister_buffer(self, address: int, device: Device) -> None:
        """Deregisters memory. Raises TimeoutError if a call hangs: the memory must stay."""
        if self.stuck:
            raise TimeoutError("a call of cuFile hangs")
        self.library.deregister_buffer(address, device)  # it stays registered if this raises
        self._count(-1)

    def quiesce(self) -> None:
        """Closes it until the next load. Raises GdsloadError if something is registered."""
        with _lock:
            if _driver != [self] or self.pid != os.getpid():
                return
            if self._registered:
                raise GdsloadError(
                    f"cuFile's driver cannot be closed: {self._registered} files and buffers are"
                    " registered with it"
                )
            if not self._engines_ended():
                raise GdsloadError("cuFile's driver cannot be closed: reads through it hang")
            self._close()

    def _engines_ended(self) -> bool:
        """Whether no thread uses cuFile any more. Waits for those that end now: to close a pump is
        not to wait for its engine on a busy machine, which cuFile may not be closed under."""
        deadline = time.monotonic() + lifecycle.LOCK_SECONDS
        while self.library.engines and time.monotonic() < deadline:
            time.sleep(0.002)
        return not self.library.engines

    def _close(self) -> None:
        _driver.clear()
        try:
            closed = self.library.close_driver(self._owner, CLOSE_SECONDS)
        except OSError as error:  # no thread for the call, which was not made
            _driver.append(self)
            why = error.strerror
            raise GdsloadError(f"cuFile's driver cannot be closed: {why}") from error
        except CuFileFailure as error:
            raise _latch(f"cuFile does not close: {explain(error.code) or error}") from error
        if not closed:
            raise _latch(f"cuFileDriverClose has not returned in {CLOSE_SECONDS:g} s")

    def end(self) -> None:
        """Closes it at the end of the process. Otherwise libcufile closes it in an exit handler of
        its own, when CUDA may be closed already. If something is registered with it, it stays open,
        and only its statistics end."""
        if self.pid != os.getpid():
            return
        with suppress(GdsloadError):  # nobody is left to handle it
            if self._engines_ended() and not self._registered:
                self._close()
                return
        if self.counts:
            with suppress(CuFileFailure, OSError):  # it hangs, or there is no thread for it
                self.library.end_statistics(END_STATISTICS_SECONDS)
                time.sleep(LAST_STATISTICS_SECONDS)

    def paths(self) -> dict[str, int]:
        """Reads that cuFile has counted so far, by path; empty if it does not count."""
        gpus = self.library.statistics() if self.counts else None
        if gpus is None:
            return {}
        return {path: sum(each[path] for each in gpus) for path in ("p2p", "nvfs", "posix")}


def _mode(library: CuFile, facts: dict[str, int]) -> str:
    if facts["nvfs_major"] > 0:
        return NVFS
    version = library.version
    # The feature bit came with 1.16; before, it was a kind of filesystem. Asked for the flags, 1.16
    # to 1.19 forget the parameters that were set.
    if version >= 1160:
        flags = library.p2p_flags(_NVME) if version >= 1200 else None
        p2p = facts["features"] >> _P2P_SUPPORTED & 1 and (flags is None or flags & 1)
    else:
        p2p = facts["filesystems"] >> _NVME_P2P & 1
    return P2P if p2p else COMPAT


_lock = lifecycle.fork_safe_lock(sys.modules[__name__])
_library: list[CuFile] = []
_driver: list[Driver] = []
# Why cuFile could not be opened. A second try would open it without the parameters that were set.
_latched: list[str] = []


def _end() -> None:
    if _lock.acquire(timeout=lifecycle.LOCK_SECONDS):
        try:
            for driver in [*_driver]:
                driver.end()
        finally:
            _lock.release()


lifecycle.at_exit(lifecycle.CUFILE, _end)


def library() -> CuFile:
    """libcufile; its driver may be closed. Raises BackendUnavailable if there is none."""
    with _lock:
        reasons = []
        for path in () if _library else shared_libraries.candidates(shared_libraries.CUFILE):
            try:
                _library.append(CuFile(path))
                break
            except OSError as error:
                reasons.append(str(error))
        if not _library:
            why = "; ".join(reasons)
            raise BackendUnavailable(
                f"there is no libcufile: {why}", {"cufile": f"{why} (pip install nvidia-cufile)"}
            )
        require_own_process(_library[0].pid, "cufile")
        return _library[0]


def is_open() -> bool:
    """Whether its driver is open in this process, so that using it costs little."""
    return bool(_driver)


def versions() -> dict[str, str]:
    """The versions that the speed of cuFile and of the GPU's driver depends on."""
    version = ""
    with suppress(BackendUnavailable):
        version = str(library().version)
    return {
        "cuFile": version,
        "nvidia-fs": _text("proc/driver/nvidia-fs/version"),
        "driver": _text("sys/module/nvidia/version"),
        "CUDA": str(gpu.cuda().version),
    }


def native_path() -> tuple[str, str]:
    """The native path that the machine's files promise, without opening cuFile.

    Returns:
        (`NVFS` or `P2P`, ""), or ("", the reason why there is none).
    """
    version = _text("proc/driver/nvidia-fs/version")
    nodes = glob.glob(os.path.join(ROOT, "dev/nvidia-fs*"))
    if version and nodes:
        return NVFS, ""
    if version:
        return "", "nvidia-fs is loaded, but /dev/nvidia-fs* is not in this container"
    if "RMForceStaticBar1=1" in _text("proc/driver/nvidia/params"):
        return P2P, ""
    return "", "nvidia-fs is not loaded, and the driver is not set up for PCI P2PDMA"


def obstacle() -> str:
    """Why opening cuFile here would hang or fail, or ""."""
    try:
        with open(os.path.join(ROOT, "proc/modules")):
            pass
    except OSError as error:
        # cuFileDriverOpen would never stop looking for it, at full processor load.
        return (
            f"/proc/modules cannot be read ({error.strerror}), and cuFile does not open without it"
        )
    if not os.path.isdir(os.path.join(ROOT, "run/udev")):
        return "there is no /run/udev, where cuFile looks up which device a file is on"
    return ""


def support(device: str, allow_compat: bool, counted: bool = True) -> Support:
    """Whether cuFile can read into a device here, without opening it. `counted`: whether it counts
    these reads, if it counts any."""
    try:
        found = library()
    except BackendUnavailable as error:
        # Or it is there, but was opened by the parent.
        return Support(False, (str(error),), "" if _library else "pip install nvidia-cufile")
    if why := gpu.why_not(device):
        return Support(False, (why,))
    if _latched:
        return Support(False, (_latched[0],))
    if _driver and _driver[0].mode == COMPAT:
        why = "cuFile is open in compatibility mode in this process"
        hint = "" if allow_compat else f"{_HOW_COMPAT} uses it, slower than the posix backend"
        return Support(allow_compat, (why,), hint)
    known = not _driver or (counted and _driver[0].counts)
    if not (allow_compat or known) and _driver[0].uncounted_path == UNCOUNTED:
        why = "cuFile is open with compatibility mode allowed, and would not count it"
        return Support(False, (why,))
    if _driver:
        return Support(True)
    if why := obstacle():
        hint = "mount the host's /run/udev" if "udev" in why else "give the process a /proc"
        return Support(False, (why,), hint)
    mode, why = native_path()
    if mode or allow_compat:
        return Support(True, (why,) if why else ())
    return Support(
        False,
        (f"cuFile ({found.version or 'of no version'}) has no native path: {why}",),
        f"{_HOW_COMPAT} uses its compatibility mode, which is slower than the posix backend",
    )


def opened(device: str, allow_compat: bool, counted: bool = True) -> Driver:
    """cuFile's driver, opened by the first call. A failure is final in this process. `counted` is
    as for `support`.

    Raises:
        BackendUnavailable: cuFile cannot be used.
    """
    with _lock:
        answer = support(device, allow_compat, counted)
        if not answer.usable:
            raise BackendUnavailable(f"cuFile cannot be used: {answer}", {"cufile": str(answer)})
        if not _driver:
            _driver.append(_open(library(), device, allow_compat))
            quiesce.register(_driver[0], quiesce.DRIVER)
        return _driver[0]


def _open(found: CuFile, device: str, allow_compat: bool) -> Driver:
    settings = config.settings(ROOT)
    if settings.aborts:
        raise _latch(f"cuFile would end this process: {settings.source}: {settings.fault}")
    switches = {_ALLOW_COMPAT: allow_compat}
    # What the user has not set: reads are parallel already, and need no pool of cuFile's threads;
    # PCI P2PDMA is off by default.
    if not settings.has("execution", "parallel_io"):
        switches[_PARALLEL_IO] = False
    chosen = settings.has("properties", "use_pci_p2pdma") or "CUFILE_USE_PCIP2PDMA" in os.environ
    if native_path()[0] == P2P and not chosen:
        switches[_USE_P2PDMA] = True
    taken = {name: found.set_bool(name, value) for name, value in switches.items()}  # from 1.14 on
    compat_refused = taken[_ALLOW_COMPAT] and not allow_compat
    # Not before 1.14: cuFileDriverSetMaxDirectIOSize has no effect there, and 1.11 would open its
    # driver in that call. With slabs of several sizes, 1.17 to 1.19 forget these if a size is set.
    own_size = settings.has("properties", "max_direct_io_size_kb")
    if not own_size and not settings.has_slabs:
        found.set_size(_DIRECT_IO_KB, DIRECT_IO_KB)
    owner = gpu.device(gpu.ordinal_of(device))
    try:
        with config.log_elsewhere(settings), _protected_stdin():
            found.open_driver(owner, OPEN_SECONDS)
    except TimeoutError as error:
        raise _latch(f"{error}: the call is abandoned") from error
    except (KeyboardInterrupt, SystemExit):  # of a signal: it may be open, or open later
        _latch("cuFileDriverOpen was interrupted")
        raise
    except OSError as error:  # no thread for the call, which was not made: it may work later
        why = str(error.strerror)
        raise BackendUnavailable(f"cuFile cannot be opened: {why}", {"cufile": why}) from error
    except CuFileFailure as error:
        why = explain(error.code) or str(error)
        if settings.source and (error.code < 0 or error.code == _BAD_SETTINGS):
            which = settings.fault or "its messages on stderr say which of them is wrong"
            why = f"it does not take its settings ({settings.source}): {which}"
        raise _latch(f"cuFile does not open: {why}") from error
    try:
        driver = Driver(found, owner, compat_refused, own_size)
        if allow_compat or driver.uncounted_path in (NVFS, P2P):
            return driver
        why = "cuFile opened in compatibility mode only: it has no native path here"
        if driver.mode != COMPAT:
            why = (
                "this libcufile cannot be told to refuse compatibility mode: set allow_compat_mode"
                " to false in cufile.json"
            )
    except CuFileFailure as error:
        why = f"cuFile opens, but does not say which path it has: {explain(error.code) or error}"
    with suppress(CuFileFailure, OSError):  # the failure is final anyway
        found.close_driver(owner, CLOSE_SECONDS)
    raise _latch(why)


@contextmanager
def _protected_stdin() -> Iterator[None]:
    """Restores descriptor 0, which cuFileDriverOpen closes if nvidia-fs is loaded but
    /dev/nvidia-fs* is missing. The next file to be opened would become the standard input."""
    try:
        spare = os.dup(0)
    except OSError:  # it is closed already
        yield
        return
    inherited = os.get_inheritable(0)
    try:
        yield
    finally:
        os.dup2(spare, 0, inheritable=inherited)
        os.close(spare)


def _latch(why: str) -> BackendUnavailable:
    _latched.append(why)
    return BackendUnavailable(why, {"cufile": why})


def explain(code: int) -> str:
    """The meaning of an error code of cuFile, "" for an errno."""
    if code < 5000:
        return ""
    return f"cuFile error {code}: {MEANINGS.get(code, 'see cufile.h')}"


def _text(path: str) -> str:
    return re.sub(r"\s+", " ", read_text(ROOT, path))
