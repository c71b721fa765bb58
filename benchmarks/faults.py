"""Loads under system calls that fail, the k-th call for every k: exact bytes or one error.

    make faults                                        # all cases, all loads
    python -m benchmarks.faults --loads 'load_file *' --calls mmap clone3
    python -m benchmarks.faults --sample               # seconds: one case of each load and call

    server: everything imported, each load done once
      └─ fork per case: clean state ─► load, one call fails ─► the same load, clean ─► compare

Loads from other processes (`remote_loads`) are done once in each child, because their client has
threads. A case ends within a limit in exact bytes or in one GdsloadError; MemoryError is allowed
for ENOMEM. `from_pretrained` may also end in an error of transformers' own, where the call that
failed was transformers' and not gdsload's. The next load in the same process must be exact, and
descriptors, threads and memory must be what they were.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import faulthandler
import fnmatch
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gdsload.backends.posix import engines

from . import injector, places, records, remote_loads

# What each call can fail with. EINTR is asked again by Python and by the pump. END returns 0, as at
# the end of a file that was truncated.
ERRORS = {
    "openat": "EIO EINTR ENOMEM EMFILE EPERM",
    "statx": "EIO ENOMEM EPERM",
    "newfstatat": "EIO ENOMEM EPERM",
    "fstat": "EIO ENOMEM",
    "getdents64": "EIO ENOMEM",
    "read": "EIO EINTR ENOMEM",
    "mmap": "ENOMEM",
    "mprotect": "ENOMEM",
    "madvise": "ENOMEM EAGAIN EIO EINTR",
    "pread64": "EIO EINTR EAGAIN ENOMEM END",
    "preadv2": "EIO EINTR EAGAIN ENOMEM EPERM END",
    "cachestat": "EPERM ENOMEM",
    "io_uring_setup": "ENOMEM EMFILE EPERM EAGAIN",
    "io_uring_enter": "EINTR EAGAIN EBUSY ENOMEM",
    "io_uring_register": "ENOMEM EMFILE EPERM EINTR",
    "io_setup": "EAGAIN ENOMEM",
    "io_submit": "EAGAIN EIO ENOMEM",
    "io_getevents": "EINTR",
    "clone3": "EAGAIN ENOMEM",
    "memfd_create": "EMFILE ENOMEM EPERM",
    "ftruncate": "EIO EINTR ENOMEM ENOSPC EPERM",
    "fallocate": "EIO EINTR ENOSPC",
}
# Of loads from other processes: the network, the local cache, the start of a process. `write` is
# that of files.
REMOTE_ERRORS = {
    "socket": "EMFILE ENOBUFS EPERM",
    "connect": "ECONNREFUSED ENETUNREACH EPERM ETIMEDOUT",
    "setsockopt": "ENOBUFS",
    "sendto": "ECONNRESET EINTR ENOBUFS EPIPE",
    "writev": "ECONNRESET EINTR ENOBUFS EPIPE",
    "recvfrom": "ECONNRESET EINTR END ENOMEM ETIMEDOUT",
    "poll": "EINTR ENOMEM",
    "epoll_ctl": "ENOMEM ENOSPC",
    "epoll_wait": "EINTR",
    "write": "EINTR EIO ENOSPC",
    "pwrite64": "EINTR EIO ENOSPC",
    "fdatasync": "EIO ENOSPC",
    "fcntl": "EAGAIN EMFILE ENOLCK",
    "flock": "EAGAIN EINTR ENOLCK",
    "mkdir": "EACCES ENOSPC",
    "statfs": "EIO",
    "utimensat": "EPERM",
    "pipe2": "EMFILE",
    "socketpair": "EMFILE",
    "vfork": "EAGAIN ENOMEM",
}
_WAITS = {"EINTR"}  # asked again without an end: such a call fails once only
_PASSES = {"EAGAIN", "EBUSY"}  # asked again until the storage counts as silent
STALL_SECONDS = 2.0  # given to every load: one whose storage always says EAGAIN ends after it
LIMIT_SECONDS = 40.0  # of a case; it takes milliseconds, and STALL_SECONDS where storage is silent
SETTLE_SECONDS = 5.0  # until threads have ended, and connections are closed
KEPT_BYTES = 2 << 20  # of memory more than after two clean loads: less than any region of a load
REQUEST_BYTES = 256 << 10
UNIT_BYTES = 2 << 20  # of memory that threads touch at once: a huge page
SOURCES = LOCAL, REMOTE = "local", "remote"  # files of this machine; other processes
GROUP = 24  # cases of one load and call that share a child: a fork takes as long as two loads
DOCUMENT = places.RESULTS.parents[1] / "docs" / "reliability.md"

Load = Callable[[], Mapping[str, Any]]


class Case(NamedTuple):
    """One failure: the calls from the k-th on, or the k-th alone, of one kind, in one load."""

    load: str
    call: str
    error: str
    k: int
    lasting: bool = False

    def __str__(self) -> str:
        return f"{self.load}: {self.call} {self.error} at {self.k}{' and on' * self.lasting}"


class Outcome(NamedTuple):
    """How a case ended: `kind` is exact, error, memory, foreign, unmet or violation."""

    kind: str
    text: str = ""
    calls: Mapping[int, int] = {}
    kept_bytes: int = 0


class Resources(NamedTuple):
    """Descriptors, threads, files that are mapped (how often), and bytes of memory."""

    descriptors: frozenset[str]
    threads: int
    files: Counter[str]
    nbytes: int


# --- checkpoints --------------------------------------------------------------------------------


SHARDS = (
    {"a": ("F32", [512, 1024]), "b": ("BF16", [300, 700])},
    {"odd": ("U8", [100_003]), "off": ("F32", [999, 101]), "none": ("F16", [0, 7]),
     "c": ("F16", [123, 457])},
    {"small": ("I64", [3]), "flag": ("BOOL", [5])},
)  # fmt: skip
# Three whole huge pages, each read by a thread of its own, and a part of one.
LARGE = ({"rest": ("U8", [700_001]), "long": ("F32", [1500, 1024])},)


def is_of_large(load: str) -> bool:
    """Whether a load is of the checkpoint with large tensors."""
    return "pages=" in load or load == "load_file fill"


def write_checkpoint(
    folder: Path, shards: Sequence[Mapping[str, tuple[str, list[int]]]]
) -> dict[str, bytes]:
    """Shards with an index: an odd size, a tensor off its alignment, one of no bytes."""
    widths = {"F32": 4, "BF16": 2, "U8": 1, "F16": 2, "I64": 8, "BOOL": 1}
    wanted: dict[str, bytes] = {}
    index: dict[str, str] = {}
    folder.mkdir(parents=True)
    for number, shard in enumerate(shards, start=1):
        name, header, data = f"model-{number}-of-{len(shards)}.safetensors", {}, b""
        for tensor, (dtype, shape) in shard.items():
            size = widths[dtype]
            for length in shape:
                size *= length
            seed = 37 * (len(wanted) + 1)
            block = bytes((seed + i * i) % (2 if dtype == "BOOL" else 251) for i in range(509))
            wanted[tensor] = (block * (size // 509 + 1))[:size]
            header[tensor] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [len(data), len(data) + size],
            }
            data += wanted[tensor]
            index[tensor] = name
        text = json.dumps(header).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(
            {"metadata": {"total_size": sum(map(len, wanted.values()))}, "weight_map": index}
        )
    )
    return wanted


def write_model(folder: Path) -> dict[str, bytes]:
    """A small Llama in several shards, with transformers' own load of it as the truth."""
    import torch
    import transformers

    # Bars have a lock that all processes share: a child that is killed may hold it.
    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="600KB")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return {name: bytes_of(tensor) for name, tensor in model.state_dict().items()}


def bytes_of(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


# --- loads --------------------------------------------------------------------------------------


def loads_of(plain: Path, large: Path, model: Path) -> dict[str, Load]:
    """Every kind of load, by its name; those whose name ends in `warm` find their files cached."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import gdsload
    from gdsload._native.first_touch import MODES
    from gdsload.backends.posix.engines import ENGINES
    from gdsload.warmup import HostPool

    config = LlamaConfig.from_pretrained(model)
    words: dict[str, Any] = {"stall_seconds": STALL_SECONDS, "progress": False}

    def load(cache: str = "auto", page_cache: str = "keep", **options: Any) -> Mapping[str, Any]:
        options.setdefault("request_bytes", REQUEST_BYTES)
        return gdsload.load_file(
            plain, cache=cache, page_cache=page_cache, options=options, **words
        )

    def touched(pages: str, cache: str) -> Mapping[str, Any]:
        options = {"pages": pages, "request_bytes": UNIT_BYTES}
        return gdsload.load_file(large, cache=cache, options=options, **words)

    def filled() -> Mapping[str, Any]:
        return gdsload.load_file(large, page_cache="fill", **words)

    def one() -> Mapping[str, Any]:
        return gdsload.load_file(plain / "model-2-of-3.safetensors", cache="direct", **words)

    def streamed(cache: str, page_cache: str = "keep") -> Mapping[str, Any]:
        settings = {"cache": cache, "page_cache": page_cache, "window_bytes": 1 << 20}
        return dict(gdsload.stream(plain, **settings, **words))

    def opened(cache: str) -> Mapping[str, Any]:
        with gdsload.safe_open(plain, cache=cache, stall_seconds=STALL_SECONDS) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def prefetched(tier: str) -> Mapping[str, Any]:
        with gdsload.prefetch(plain, tier=tier, stall_seconds=STALL_SECONDS) as ahead:
            with suppress(gdsload.GdsloadError):
                ahead.wait(LIMIT_SECONDS / 2)
            return load()

    def pooled() -> Mapping[str, Any]:
        with HostPool(64 << 20, pinned=False):
            load()
            return load()

    def pool_filled() -> Mapping[str, Any]:
        with HostPool(64 << 20, pinned=False):
            return prefetched("pool")

    def whole(**how: Any) -> Mapping[str, Any]:
        with gdsload.accelerated(stall_seconds=STALL_SECONDS):
            # With its config: where transformers may not look at one it makes up a model of 7B.
            made = gdsload.from_pretrained(
                model, cls=LlamaForCausalLM, config=deepcopy(config), **how
            )
            return dict(made.state_dict())

    def cast() -> Mapping[str, Any]:
        """To double precision, which holds the same values."""
        import torch

        return {name: tensor.float() for name, tensor in whole(dtype=torch.float64).items()}

    found: dict[str, Load] = {}
    for engine in ENGINES:
        for cache in ("direct", "buffered", "auto"):
            found[f"load_file {engine} {cache}"] = partial(load, cache, engine=engine)
    for pages in MODES:
        found[f"load_file pages={pages} direct"] = partial(touched, pages, "direct")
    found["load_file pages=bounce buffered"] = partial(touched, "bounce", "buffered")
    found["load_file mapped"] = partial(load, "mapped")
    found["load_file fill"] = filled
    found["load_file buffered drop"] = partial(load, "buffered", "drop")
    found["load_file auto"] = load
    found["load_file auto warm"] = load
    found["load_file one file"] = one
    found["stream"] = partial(streamed, "auto")
    found["stream direct"] = partial(streamed, "direct")
    found["stream buffered drop"] = partial(streamed, "buffered", "drop")
    found["stream warm"] = partial(streamed, "auto")
    found["safe_open"] = partial(opened, "auto")
    found["safe_open warm"] = partial(opened, "auto")
    found["prefetch memory"] = partial(prefetched, "memory")
    found["prefetch pagecache"] = partial(prefetched, "pagecache")
    found["prefetch pool"] = pool_filled
    found["HostPool"] = pooled
    found["from_pretrained"] = whole
    found["from_pretrained warm"] = whole
    found["from_pretrained cast"] = cast
    return found


# --- one case, in a child -----------------------------------------------------------------------


class Server:
    """A process that has imported everything and done each load once. It forks a child per case."""

    def __init__(
        self, folder: Path, patterns: Sequence[str], sources: Sequence[str], sample: bool
    ) -> None:
        """Imports, writes and loads. `close` ends the processes that it has started.

        Args:
            folder: An empty directory.
            patterns: The loads that are wanted, by name.
            sources: Where they may load from: some of SOURCES.
            sample: Whether to leave out loads that take seconds.
        """
        plain, large, model = folder / "plain", folder / "large", folder / "model"
        self.truth = {
            "plain": write_checkpoint(plain, SHARDS),
            "large": write_checkpoint(large, LARGE),
            "model": write_model(model),
        }
        self.loads = {
            name: load
            for name, load in loads_of(plain, large, model).items()
            if LOCAL in sources and is_wanted(name, patterns)
        }
        self.files = [*plain.glob("*"), *large.glob("*"), *model.glob("*.safetensors")]
        for file in self.files:  # dirty pages cannot be evicted
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        for name in self.loads:
            self._place(name)
            ended, text = self._attempt(name, "")
            if ended != "exact":
                raise records.Refused(f"{name} without a fault: {text}")
        names = [
            name for name in remote_loads.NAMES if REMOTE in sources and is_wanted(name, patterns)
        ]
        self.left_out = {name: why for name in names if (why := remote_loads.why_not(name))}
        if sample and remote_loads.PEER in names:
            self.left_out[remote_loads.PEER] = "not in a sample"
        names = [name for name in names if name not in self.left_out]
        words = {"stall_seconds": STALL_SECONDS, "progress": False}
        self.remote = remote_loads.RemoteLoads(folder, names, words)
        self.loads |= self.remote.loads
        gc.collect()
        gc.freeze()  # collections in children leave the pages of the parent's objects shared
        self._clean: dict[str, int] = {}  # memory more after two clean loads, by load

    def close(self) -> None:
        self.remote.close()

    def counted(self, load: str) -> dict[str, int]:
        """How often each call happens in a load, without a fault. Raises Refused."""
        (outcome,) = self.run([Case(load, "", "", 0)])
        if outcome.kind != "exact":
            raise records.Refused(f"{load}, twice without a fault: {outcome.text}")
        self._clean[load] = max(outcome.kept_bytes, 0)
        names = {number: name for name, number in injector.NUMBERS.items()}
        return {names[number]: count for number, count in outcome.calls.items()}

    def run(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        """Runs cases of one load and call, one after the other in a child, and in another one after
        a violation. A case without a call only counts."""
        left = list(cases)
        while left:
            mine, its = socket.socketpair()
            with tempfile.TemporaryFile() as log, mine, its:
                pid = os.fork()
                if pid == 0:
                    mine.close()
                    os.dup2(log.fileno(), 2)
                    try:
                        self._child(left, its)
                    except BaseException:
                        traceback.print_exc()
                    os._exit(1)
                control = its.fileno()  # in the child
                its.close()
                for outcome in self._supervise(left, pid, mine, control):
                    left.pop(0)
                    yield outcome
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if status != 0:
                    log.seek(0)
                    said = log.read().decode(errors="replace")[-3000:]
                    how = "it hangs" if status == -signal.SIGKILL else f"it ended with {status}"
                    left.pop(0)
                    yield Outcome("violation", f"{how}: {said}")

    def _supervise(
        self, cases: Sequence[Case], pid: int, control: socket.socket, its: int
    ) -> Iterator[Outcome]:
        """Answers the child's calls, and yields what it reports, until it ends or hangs."""
        _, received, _, _ = socket.recv_fds(control, 1, 1)
        if not received:
            return
        calls = injector.Calls(received[0], pid, its)
        poll = select.poll()
        poll.register(calls.listener, select.POLLIN)
        poll.register(control, select.POLLIN)
        waiting = iter(list(cases))
        case = next(waiting)
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            while (left := deadline - time.monotonic()) > 0:
                for fd, _ in poll.poll(left * 1000):
                    if fd == calls.listener:
                        calls.answer()
                        continue
                    said = control.recv(1 << 16)
                    if said == b"begin":
                        code = getattr(errno, case.error, 0)
                        calls.arm(code, case.k, 1 << 30 if case.lasting else case.k)
                    elif said == b"end":
                        calls.armed = False
                    elif not said:
                        return
                    else:
                        outcome = Outcome(*json.loads(said))._replace(calls=dict(calls.seen))
                        unmet = case.call and not calls.failed and outcome.kind != "violation"
                        yield outcome._replace(kind="unmet") if unmet else outcome
                        deadline = time.monotonic() + LIMIT_SECONDS
                        case = next(waiting, case)
                    control.send(b"!")
            os.kill(pid, signal.SIGKILL)
        finally:
            os.close(calls.listener)

    def _child(self, cases: Sequence[Case], control: socket.socket) -> None:
        """Runs cases and reports each, until one ends in a violation."""

        def tell(word: bytes) -> None:
            control.send(word)
            control.recv(1)

        call, load = cases[0].call, cases[0].load
        if load in remote_loads.NAMES:
            self._warm_up(load)
        found = resources()
        listener = injector.confine([call] if call else sorted(injector.NUMBERS))
        socket.send_fds(control, [b"."], [listener])
        os.close(listener)
        for case in cases:
            faulthandler.dump_traceback_later(LIMIT_SECONDS * 0.8, file=2)
            outcome, found = self._judge(case, tell, found)
            tell(json.dumps(outcome).encode())
            if outcome.kind == "violation":
                break
        os._exit(0)

    def _judge(
        self, case: Case, tell: Callable[[bytes], None], before: Resources
    ) -> tuple[Outcome, Resources]:
        """One case: the load under injection, the same without, and what is left of both."""
        self._place(case.load)
        engines._tried.clear()  # each case tries its engine anew
        began = time.monotonic()
        tell(b"begin")
        kind, text = self._attempt(case.load, case.error)
        tell(b"end")
        took = time.monotonic() - began
        gc.collect()
        again, why = self._attempt(case.load, "")
        gc.collect()
        # Where mmap fails, malloc takes the heap for the bytes that are compared, and keeps it.
        ctypes.CDLL(None).malloc_trim(0)
        faulthandler.cancel_dump_traceback_later()
        wrong = [text] if kind == "violation" else []
        if took > LIMIT_SECONDS / 2:
            wrong.append(f"it took {took:.0f} s")
        # An engine that is forbidden, or whose trial read never ends, is not tried again.
        refused = why.startswith("BackendUnavailable: engine")
        forbidden = case.error == "EPERM" and case.call.startswith("io_uring")
        remembered = refused and (forbidden or (case.lasting and "does not complete" in why))
        if again != "exact" and not remembered:
            wrong.append(f"the next load: {why}")
        # A thread that has been joined may still be seen for a moment.
        deadline = time.monotonic() + SETTLE_SECONDS
        while (now := resources())[:2] != before[:2] and time.monotonic() < deadline:
            time.sleep(0.01)
        if now.descriptors != before.descriptors:
            more, less = now.descriptors - before.descriptors, before.descriptors - now.descriptors
            wrong.append(f"descriptors: {sorted(more)} more, {sorted(less)} less")
        if now.threads != before.threads:
            wrong.append(f"threads: {now.threads}, and {before.threads} before")
        if now.files != before.files:
            more_files, less_files = now.files - before.files, before.files - now.files
            wrong.append(f"mapped files: {more_files} more, {less_files} less")
        kept, clean = now.nbytes - before.nbytes, self._clean.get(case.load, 0)
        if case.call and kept > clean + KEPT_BYTES:
            wrong.append(f"{kept:,} bytes of memory more; {clean:,} when clean")
        if wrong:
            kind, text = "violation", "; ".join(wrong)
        return Outcome(kind, text[-6000:], {}, kept), now

    def _warm_up(self, load: str) -> None:
        """Makes a load from another process twice: its client starts threads that stay."""
        for _ in range(2):
            self._place(load)
            self._attempt(load, "")
        gc.collect()
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(SETTLE_SECONDS)
        gc.collect()
        before = None
        while before != (before := resources()[:2]):  # it closes its connections in these threads
            time.sleep(0.2)

    def _place(self, load: str) -> None:
        """Brings the files into the page cache, or out of it, and the local cache into a state."""
        if load in remote_loads.NAMES:
            self.remote.place(load)
        for file in self.files:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if load.endswith("warm"):
                    while os.read(fd, 1 << 20):
                        pass
                else:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def _attempt(self, load: str, error: str) -> tuple[str, str]:
        """One load: exact, error, memory, foreign or violation, and what it said."""
        from gdsload.errors import GdsloadError

        kind = "large" if is_of_large(load) else "plain"
        truth = self.truth["model" if load.startswith("from_pretrained") else kind]
        try:
            got = self.loads[load]()
            parts = {"model-2-of-3": {"odd", "off", "none", "c"}}
            wanted = parts["model-2-of-3"] if load.endswith("one file") else truth.keys()
            if set(got) != set(wanted):
                return "violation", f"tensors {sorted(set(got) ^ set(wanted))} too few or too many"
            wrong = [name for name, tensor in got.items() if bytes_of(tensor) != truth[name]]
            return ("violation", f"wrong bytes in {wrong}") if wrong else ("exact", "")
        except GdsloadError as raised:
            return "error", f"{type(raised).__name__}: {raised}"
        except BaseException as raised:
            if isinstance(raised, MemoryError) and error == "ENOMEM":
                return "memory", ""
            if load.startswith("from_pretrained") and is_foreign(raised):
                return "foreign", f"{type(raised).__name__}: {raised}"
            return "violation", "".join(traceback.format_exception(raised))


def is_wanted(load: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(load, pattern) for pattern in patterns)


def is_foreign(error: BaseException) -> bool:
    """Whether an exception was raised outside gdsload."""
    import gdsload

    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    file = last.f_code.co_filename
    # Native modules name their files from the root of the package, not of the filesystem.
    return not file.startswith(str(Path(gdsload.__file__).parent)) and "gdsload/_native" not in file


def resources() -> Resources:
    """What this process has now."""
    held: set[str] = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the directory itself
            held.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    with open("/proc/self/maps") as lines:
        names = [line.split(maxsplit=5)[5].strip() for line in lines if line.count("/")]
    with open("/proc/self/status") as lines:
        sizes = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))]
    files = Counter(name for name in names if "safetensors" in name or "memfd" in name)
    threads = len(os.listdir("/proc/self/task"))
    return Resources(frozenset(held), threads, files, sum(sizes) << 10)


# --- the sweep ----------------------------------------------------------------------------------


def cases_of(load: str, counts: Mapping[str, int], options: argparse.Namespace) -> Iterator[Case]:
    """Every call of a load, with every error, at every k; for good from a few of them on."""
    known = {**ERRORS, **REMOTE_ERRORS} if load in remote_loads.NAMES else ERRORS
    for call, errors in known.items():
        if call not in options.calls:
            continue
        for error in errors.split():
            if error not in options.errors:
                continue
            for k in range(1, counts.get(call, 0) + 1):
                yield Case(load, call, error, k)
                lasts = error not in _WAITS and k & (k - 1) == 0
                if lasts and (error not in _PASSES or k == 1):
                    yield Case(load, call, error, k, True)


def sampled(cases: Sequence[Case]) -> list[Case]:
    """The middle one of each load and call, with another error each time."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.load, case.call), []).append(case)
    found = []
    for number, group in enumerate(groups.values()):
        errors = sorted({case.error for case in group} - {"EAGAIN"} or {"EAGAIN"})
        chosen = [case for case in group if case.error == errors[number % len(errors)]]
        found.append(chosen[len(chosen) // 2])
    return found


def swept(
    server: Server, cases: Sequence[Case], jobs: int, say: Callable[[str], None]
) -> list[tuple[Case, Outcome]]:
    """Runs the cases in `jobs` processes. Raises Refused if one of them ends before its cases."""
    together: dict[tuple[str, str], list[int]] = {}
    for number, case in enumerate(cases):
        together.setdefault((case.load, case.call), []).append(number)
    groups = [
        group[first : first + GROUP]
        for group in together.values()
        for first in range(0, len(group), GROUP)
    ]
    pipes, pids = [], []
    for job in range(jobs):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            # An exception must not get to the parent's contexts: they remove its files.
            try:
                os.close(reader)
                with os.fdopen(writer, "w") as out:
                    for group in groups[job::jobs]:
                        outcomes = server.run([cases[number] for number in group])
                        for number, outcome in zip(group, outcomes, strict=True):
                            print(json.dumps([number, outcome]), file=out, flush=True)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(writer)
        pipes.append(os.fdopen(reader))
        pids.append(pid)
    found: list[tuple[Case, Outcome]] = []
    poll = select.poll()
    by_fd = {pipe.fileno(): pipe for pipe in pipes}
    for fd in by_fd:
        poll.register(fd, select.POLLIN | select.POLLHUP)
    while by_fd:
        for fd, _ in poll.poll():
            line = by_fd[fd].readline()
            if not line:
                poll.unregister(fd)
                by_fd.pop(fd).close()
                continue
            number, fields = json.loads(line)
            case, outcome = cases[number], Outcome(*fields)
            found.append((case, outcome))
            if outcome.kind == "violation":
                say(f"{case}: {outcome.text}")
            if len(found) % 500 == 0:
                say(f"{len(found)} of {len(cases)} cases")
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(ends) or len(found) != len(cases):
        raise records.Refused(
            f"{len(found)} of {len(cases)} cases ended; their processes ended with"
            f" {', '.join(map(str, ends))}"
        )
    return found


def summed(found: Sequence[tuple[Case, Outcome]]) -> dict[str, dict[str, str]]:
    """How the cases ended, by load, and by call with its errors: one line each."""
    errors: dict[tuple[str, str], set[str]] = {}
    for case, _ in found:
        errors.setdefault((case.load, case.call), set()).add(case.error)
    rows: dict[str, dict[str, Counter[str]]] = {}
    for case, outcome in found:
        names = ",".join(sorted(errors[case.load, case.call]))
        row = rows.setdefault(case.load, {}).setdefault(f"{case.call} {names}", Counter())
        row[outcome.kind] += 1
    return {
        load: {
            row: " ".join(f"{kind} {number}" for kind, number in sorted(counts.items()))
            for row, counts in sorted(some.items())
        }
        for load, some in sorted(rows.items())
    }


KINDS = ("exact", "error", "memory", "foreign", "violation")


def table(result: Mapping[str, Any]) -> str:
    """Calls down, how loads ended across."""
    rows: dict[str, Counter[str]] = {}
    errors: dict[str, set[str]] = {}
    for some in result["rows"].values():
        for one, counts in some.items():
            call, names = one.split()
            words = counts.split()
            row = rows.setdefault(call, Counter())
            row.update({kind: int(n) for kind, n in zip(words[::2], words[1::2], strict=True)})
            row.pop("unmet", None)
            errors.setdefault(call, set()).update(names.split(","))
    rows = {call: row for call, row in rows.items() if row.total()}
    rows["all"] = sum(rows.values(), Counter())
    lines = [
        "| call | errors | cases | exact | GdsloadError | MemoryError | transformers' | wrong |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for call, row in rows.items():
        shown = ", ".join(sorted(errors.get(call, ())))
        counts = " | ".join(f"{row[kind]:,}" for kind in KINDS)
        name = f"`{call}`" if shown else call
        lines.append(f"| {name} | {shown} | {row.total():,} | {counts} |")
    return "\n".join(lines) + "\n"


def publish(result: Mapping[str, Any]) -> None:
    """Writes the table into its page."""
    part = "" if result["every"] == 1 else f", one case in {result['every']}"
    machine = records.described(dict(result))
    shown = f"All k of {result['loads']} kinds of loads{part}; {machine}.\n\n"
    records.fill(DOCUMENT, result["kind"], shown + table(result))


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = records.parser_of("benchmarks.faults", __doc__)
    parser.add_argument("--loads", nargs="+", default=["*"], metavar="PATTERN", help="kinds: all")
    parser.add_argument(
        "--sources", nargs="+", default=[*SOURCES], choices=SOURCES, help="of the loads: both"
    )
    parser.add_argument(
        "--calls",
        nargs="+",
        default=[*ERRORS, *REMOTE_ERRORS],
        choices=[*ERRORS, *REMOTE_ERRORS],
        metavar="CALL",
        help="system calls: all",
    )
    rows = [*ERRORS.values(), *REMOTE_ERRORS.values()]
    names = sorted({error for row in rows for error in row.split()})
    parser.add_argument(
        "--errors",
        nargs="+",
        default=names,
        choices=names,
        metavar="ERROR",
        help="errno names: all",
    )
    parser.add_argument("--sample", action="store_true", help="one case of each load and call")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th case only")
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="cases at one time: one for each CPU",
    )
    parser.add_argument(
        "--dir", type=Path, help="where the checkpoints are written: a temporary directory"
    )
    parser.add_argument("--publish", action="store_true", help="write the table into docs/")
    records.add_output(parser)
    return parser.parse_args(words)


def measured(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """The result of the sweep. Raises Refused if not all of its cases ran."""
    began = time.monotonic()
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(dir=options.dir, prefix="gdsload-faults-")
        )
        wanted = Path(folder), options.loads, options.sources, options.sample
        server = stack.enter_context(closing(Server(*wanted)))
        for name, why in server.left_out.items():
            say(f"{name}: left out: {why}")
        chosen = list(server.loads)
        cases = [case for load in chosen for case in cases_of(load, server.counted(load), options)]
        if options.sample:
            cases = sampled(cases)
        cases = cases[:: options.every]
        say(f"{len(cases)} cases of {len(chosen)} loads, after {time.monotonic() - began:.0f} s")
        found = swept(server, cases, options.jobs, say)
        gc.unfreeze()
        return records.record(
            "faults" if LOCAL in options.sources else "faults-remote",
            Path(folder),
            loads=len(chosen),
            cases=len(found),
            seconds=round(time.monotonic() - began),
            sample=options.sample,
            every=options.every,
            rows=summed(found),
            violations=[f"{case}: {end.text}" for case, end in found if end.kind == "violation"],
        )


def main(words: Sequence[str] | None = None) -> int:
    """Runs the sweep; 1 where a case ended in a violation, 2 where there is no result."""
    options = arguments(words)
    if why := injector.why_not():
        print(f"faults: skipped: {why}", file=sys.stderr)
        return 2

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    # What malloc keeps looks like a leak: M_ARENA_MAX for threads, M_MMAP_THRESHOLD for the bytes
    # that are compared, which is not raised by itself any more once it is set.
    for name, value in ((-8, 1), (-3, 128 << 10)):
        ctypes.CDLL(None).mallopt(name, value)
    import torch

    torch.set_num_threads(1)  # OpenMP does not survive a fork
    try:
        result = measured(options, say)
    except records.Refused as error:
        say(f"faults: no result: {error}")
        return 2
    bad = result["violations"]
    say("\n" + table(result))
    say(f"{result['cases']} cases in {result['seconds']} s, {len(bad)} violations")
    if options.publish:
        publish(result)
    if not options.sample or options.output:
        say(f"result: {records.keep(result, options, result['kind'])}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
