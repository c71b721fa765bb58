"""Explores interleavings of the pump's threads: programs of a seed, under the scheduler of
`interleave.c`, whose engine fails, delays and loses reads as the seed decides.

    python tests/interleave.py host 0 1000    # seeds 0 to 999; exit status 1 if one fails
    python tests/interleave.py device 17 18
    python tests/interleave.py host 0 1000 build/mutants    # with other modules, by their packages

    seed ─► program: requests, posts, waits, cancels, closes ─► scheduler ─► checks after each run

`host` reads into DRAM by several pumps; `device` through one ring of slots that several pumps
share, to a double of CUDA; `wide` is the same with so many slots that some wait to be copied
together; and `loads` are batches of the posix backend that claim from a prefetch.
Checked: each read that succeeded has its bytes and each that failed an error of the engine, and
both stay as they are; nothing writes to memory whose request has ended; no slot is lent twice;
every wait ends in a short (virtual) time; threads, engines and slots come back.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import importlib
import json
import os
import random
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from compiled import compiled

if __name__ == "__main__":
    for folder in sys.argv[4:]:
        for package in os.listdir(folder):
            path = importlib.import_module(f"gdsload.{package}").__path__
            path.insert(0, os.path.join(folder, package))

from gdsload._native import pump as pump_module, request as request_module, stage as stage_module
from gdsload._native.cuda import Block, Cuda, Device
from gdsload._native.memory import Region
from gdsload._native.pump import Pump, loads_under_way, set_throttle
from gdsload._native.request import Request
from gdsload._native.stage import AddressMap, Ring, Stage

HERE = Path(__file__).parent
BLOCK = 4096
DATA = random.Random(0).randbytes(64 * BLOCK)
SHORT_DATA = DATA[: 20 * BLOCK + 100]  # a file that ends before its last reads do
FILES = (DATA, SHORT_DATA)
# A wait that is not part of the program, and the longest run: what waits for storage takes less
# than a second. The pump's longest sleep is ten, so that a lost wake-up shows.
LONG_SECONDS = 1000.0
MOST_VIRTUAL_NS = 8_000_000_000
MOST_RATE = 1 << 30  # bytes per second; the lowest rate makes one read take 4 ms
# What the engine may answer, EIO of an engine that breaks, and the pump's own.
ERRORS = {errno.EIO, errno.ENODATA, errno.ECANCELED, errno.ENOBUFS, errno.EFAULT, -1}


class Failed(Exception):
    """An invariant does not hold."""


def _fields(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


class Script(ctypes.Structure):
    _fields_ = _fields("faults", "fault_every", "loses", "breaks", "guarded", "real")


class Log(ctypes.Structure):
    _fields_ = _fields("opens", "closes", "reads", "nbytes", "struck", "lost", "broken", "cancels")


class Outcome(ctypes.Structure):
    _fields_ = [*_fields("steps", "virtual_ns", "threads"), ("hash", ctypes.c_uint64)]


@functools.cache
def library() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """The functions that let other threads run, and those that keep the GIL. The thread functions
    of the native modules are replaced from now on."""
    built = str(compiled(HERE / "interleave.c", "-O2"))
    switching, plain = ctypes.CDLL(built), ctypes.PyDLL(built)
    switching.il_pause.argtypes = [ctypes.c_int64]
    plain.il_begin.argtypes = [ctypes.c_uint64, ctypes.c_int]
    plain.il_end.argtypes, plain.il_end.restype = [ctypes.POINTER(Outcome)], ctypes.c_char_p
    plain.il_file.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64]
    plain.il_script.argtypes = [ctypes.POINTER(Script)]
    plain.il_log.argtypes = [ctypes.POINTER(Log)]
    plain.il_permit.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
    plain.il_patch.argtypes = [ctypes.c_void_p]
    for number, data in enumerate(FILES):
        plain.il_file(number, data, len(data))
    for module in (pump_module, request_module, stage_module):
        handle = ctypes.CDLL(module.__file__)._handle
        if (replaced := plain.il_patch(handle)) < 4:
            raise Failed(f"{module.__name__}: {replaced} thread functions replaced")
    return switching, plain


def engine() -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    address = ctypes.addressof(ctypes.c_char.in_dll(library()[1], "explore_ops"))
    return make(address, b"gdsload.engine", None)


def require(holds: bool, text: str) -> None:
    if not holds:
        raise Failed(text)


class Target:
    """Memory that a request reads to, its native reads, and a look at what arrived."""

    def __init__(self, random: random.Random, most_reads: int) -> None:
        self.file = random.randrange(len(FILES))
        blocks = len(DATA) // BLOCK
        self.first = [random.randrange(blocks) for _ in range(random.randint(1, most_reads))]
        # Reads of whole blocks, and some that end in the middle of one.
        self.wanted = [BLOCK - random.choice((0, 0, 0, 1, 1000)) for _ in self.first]
        self.direct = random.random() < 0.6
        self.nbytes = BLOCK * (2 * len(self.first) + 1)  # a gap between two reads

    def files(self) -> list[tuple[int, int, int, int, int]]:
        direct = 2 * self.file + 1 if self.direct else -1
        return [(2 * self.file, direct, BLOCK, -1, -1)]

    def request(self, pump: Pump, address: int, region: object | None) -> Request:
        transfers = [
            (0, first * BLOCK, BLOCK, wanted, 0, (2 * i + 1) * BLOCK, "direct")
            for i, (first, wanted) in enumerate(zip(self.first, self.wanted, strict=True))
        ]
        return Request(pump, self.files(), transfers, [(address, self.nbytes, region, -1)])

    def is_exact(self, op: int, memory: bytes) -> bool:
        offset = self.first[op] * BLOCK
        start = (2 * op + 1) * BLOCK
        data = FILES[self.file][offset : offset + self.wanted[op]]
        return len(data) == self.wanted[op] and memory[start : start + len(data)] == data

    def gaps_are_empty(self, memory: bytes) -> bool:
        return all(not any(memory[i : i + BLOCK]) for i in range(0, len(memory), 2 * BLOCK))


class Job:
    """A request, the target it reads to, and what was done to it."""

    def __init__(self, run: Run, pump: int, random: random.Random) -> None:
        self.run, self.pump, self.target = run, pump, Target(random, run.most_reads)
        self.cancelled = False  # since it was posted
        self.cancelling = 0  # threads that are about to cancel it
        self.request: Request | None = None
        self.open(run.pumps[pump])

    def open(self, pump: Pump) -> None:
        self.region = Region.anonymous(self.target.nbytes)
        self.request = self.target.request(pump, self.region.address, self.region.handle())

    def before_post(self) -> None:
        ctypes.memset(self.region.address, 0, self.target.nbytes)
        self.run.permit(self.region.address, self.target.nbytes, True)

    def after_end(self) -> None:
        self.run.permit(self.region.address, self.target.nbytes, False)

    def memory(self) -> bytes:
        return self.region.read(0, self.target.nbytes)

    def drop(self) -> None:
        """Forgets the request and its memory, whatever they do."""
        self.request = None
        del self.region


class DeviceJob(Job):
    """The same through a stage, to memory of a device."""

    def open(self, pump: Pump) -> None:
        self.block = Block(self.run.device, self.target.nbytes)
        stage = self.run.stages[self.pump]
        shares = [(0, self.target.nbytes, self.block.address)]
        self.map = AddressMap(stage, [(0, self.target.nbytes, shares)])
        self.request = self.target.request(pump, self.map.base, None)

    def before_post(self) -> None:
        ctypes.memset(self.block.address, 0, self.target.nbytes)

    def after_end(self) -> None:
        pass

    def memory(self) -> bytes:
        return ctypes.string_at(self.block.address, self.target.nbytes)

    def drop(self) -> None:
        # As a batch releases it: no copy may run into memory that others may use from now on.
        require(self.map.end(LONG_SECONDS), "copies to a device did not end")
        before = self.memory()
        self.request = None
        self.run.switching.il_pause(5_000_000)
        require(self.memory() == before, "a copy to memory that was given back")
        del self.map, self.block


class Run:
    """One run: pumps, jobs, and the clients that use them."""

    job_of: type[Job] = Job
    memory_is_guarded = True
    slots_may_be_lost = False
    files_are_real = False
    most_reads = 12

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed, self.errors = seed, list[BaseException]()
        self.switching, self.plain = library()

    def permit(self, address: int, nbytes: int, permitted: bool) -> None:
        self.plain.il_permit(address, nbytes, permitted)

    @property
    def log(self) -> Log:
        log = Log()
        self.plain.il_log(log)
        return log

    def open_pumps(self) -> list[Pump]:
        return [Pump(engine(), self.random.randint(1, 6)) for _ in range(self.random.randint(1, 2))]

    def prepare(self, programs: list[random.Random]) -> None:
        for program in programs:
            self.jobs.append(self.job_of(self, program.randrange(len(self.pumps)), program))

    def close(self) -> None:
        """Gives back what the pumps used. All their threads have ended."""

    def execute(self) -> Outcome:
        """Raises Failed if something is wrong."""
        chosen = self.random
        breaks = chosen.randint(0, 20) if chosen.random() < 0.1 else -1
        faults = chosen.choice((0, 0, 3, 10, 30))
        script = Script(
            faults,
            chosen.randint(2, 8),
            self.slots_may_be_lost,
            breaks,
            self.memory_is_guarded,
            self.files_are_real,
        )
        limits = [
            int(MOST_RATE / 2 ** (10 * chosen.random())) if chosen.random() < 0.2 else 0
            for _ in range(2)
        ]
        programs = [random.Random(chosen.random()) for _ in range(chosen.randint(1, 3))]
        self.closes = chosen.random() < 0.3
        self.plain.il_script(script)
        self.plain.il_begin(self.seed, len(programs))
        set_throttle(*limits)
        self.pumps = self.open_pumps()
        self.closed: set[int] = set()
        self.jobs: list[Job] = []
        self.prepare(programs)
        clients = [
            threading.Thread(target=self.client, args=(number, program), daemon=True)
            for number, program in enumerate(programs, start=1)
        ]
        for client in clients:
            client.start()
        self.switching.il_await_clients()
        self.switching.il_gather(0)
        for client in clients:
            client.join()
        ends_early = self.files_are_real or any(job.target.file for job in self.jobs)
        try:
            self.after_clients()
        finally:
            self.jobs.clear()
            for pump in self.pumps:
                pump.close(LONG_SECONDS)
            self.switching.il_gather(1)
            self.pumps.clear()
            loads, log = loads_under_way(), self.log
            self.close()
            set_throttle(0, 0)
            outcome = Outcome()
            said = self.plain.il_end(outcome).decode()
        require(not said, said)
        # A limit that was not used is saved for a millisecond. Retries do not count, as after an
        # early end of a file.
        most = limits[0] * (outcome.virtual_ns / 1e9 + 0.002) + BLOCK
        limited = limits[0] and not log.struck and not ends_early
        require(not limited or log.nbytes <= most, f"{log.nbytes} bytes, {most:.0f} by the limit")
        require(loads == 0, f"{loads} loads are still counted as under way")
        require(outcome.virtual_ns < MOST_VIRTUAL_NS, f"it took {outcome.virtual_ns / 1e9:.1f} s")
        return outcome

    def after_clients(self) -> None:
        if self.errors:
            raise self.errors[0]

    # Programs of the clients.

    def client(self, number: int, program: random.Random) -> None:
        self.switching.il_enter(number)
        try:
            self.follow(number, program)
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.switching.il_leave()

    def follow(self, number: int, program: random.Random) -> None:
        job = self.jobs[number - 1]
        for _ in range(program.randint(1, 3)):
            if not self.load(job, program):
                break
        if self.closes and number == 1:
            self.close_pump(job.pump, program)
        if job.request is not None and program.random() < 0.3:
            job.drop()

    def load(self, job: Job, program: random.Random) -> bool:
        """Posts the request, does something to it, ends it, and looks at it. False at the end of
        its life."""
        request = job.request
        assert request is not None
        job.cancelled = False
        request.ahead = program.random() < 0.3
        job.before_post()
        try:
            request.post()
        except OSError:
            require(job.pump in self.closed or self.log.broken > 0, "a post was refused")
            return False
        news: list[int] = []
        for _ in range(program.randint(0, 4)):
            self.act(job, request, program, news)
        del request
        if program.random() < 0.1:
            job.drop()
            return False
        if program.random() < 0.3:
            self.cancel(job)
        request = job.request
        assert request is not None
        self.finish(job, request, news)
        return True

    def act(self, job: Job, request: Request, program: random.Random, news: list[int]) -> None:
        other = program.choice(self.jobs)
        count = request.count
        match program.randrange(7):
            case 0 | 1:
                first = program.randrange(count)
                last = program.randrange(first, count)
                seconds = program.choice((0.0, 0.001, 0.02))
                if request.wait(seconds, first, last):
                    for op in range(first, last + 1):
                        self.look(job, request, op)
            case 2:
                news += request.take_settled()
            case 3 if other.request is not None:
                self.cancel(other)
            case 4:
                request.ahead = program.random() < 0.5
            case 5 if other.request is not None:
                other.request.wait(program.choice((0.0, 0.01)))
            case _:
                self.switching.il_pause(program.choice((1_000, 1_000_000, 30_000_000)))

    def cancel(self, job: Job) -> None:
        job.cancelling += 1
        if job.request is not None:
            job.request.cancel()
        job.cancelled = True
        job.cancelling -= 1

    def is_cancelled(self, job: Job) -> bool:
        return job.cancelled or job.cancelling > 0 or job.pump in self.closed

    def close_pump(self, number: int, program: random.Random) -> None:
        self.closed.add(number)
        self.pumps[number].close(program.choice((0.0, 0.01, LONG_SECONDS)))

    def finish(self, job: Job, request: Request, news: list[int]) -> None:
        """Waits for the end of a request, and checks what is there."""
        if not self.is_cancelled(job):
            whole = request.wait(LONG_SECONDS) or self.is_cancelled(job)
            require(whole or self.log.broken > 0, "a wait ended without its reads")
        require(request.wait_until_idle(LONG_SECONDS), "a request did not end")
        require(not request.posted, "a request that ended is still under way")
        broken = self.log.broken > 0
        if not broken:
            job.after_end()
        news += request.take_settled()
        require(
            len(news) == len(set(news)) == request.settled, "a read was reported twice or never"
        )
        require(request.settled == request.count or self.is_cancelled(job), "a read never settled")
        failed = [op for op in news if self.look(job, request, op)]
        require(len(failed) == request.failed, "a failure was not counted")
        self.switching.il_pause(1_000)
        for op in news:
            require(bool(self.look(job, request, op)) == (op in failed), "a result changed")
        require(broken or job.target.gaps_are_empty(job.memory()), "bytes beside a read")

    def look(self, job: Job, request: Request, op: int) -> int:
        """The error of a read that has settled, or 0 if its bytes are there."""
        settled, arrived, error = request.result(op)
        require(settled, "a read that was reported has not settled")
        if not error:
            require(arrived >= job.target.wanted[op], "a read succeeded without its bytes")
            require(job.target.is_exact(op, job.memory()), "a read succeeded with other bytes")
            return 0
        require(error in ERRORS or error > 1 << 20, f"error {error} is not the engine's")
        if error == errno.ECANCELED:
            require(self.is_cancelled(job) or self.log.broken > 0, "cancelled by nobody")
        return error


class DeviceRun(Run):
    """Several pumps, each with a stage, over one ring with fewer slots than their reads."""

    job_of = DeviceJob
    memory_is_guarded = False
    slots_may_be_lost = True
    patience = (0, 1, 3, 10)
    most_slots, most_pumps, most_depth = 5, 3, 5

    def open_pumps(self) -> list[Pump]:
        self.device, self.cuda = device()
        self.cuda.cuda_double_set(1, 1 << 36, self.random.choice(self.patience))
        slots = self.random.randint(2, self.most_slots)
        self.memory = Region.anonymous(slots * BLOCK)
        self.device.pin(self.memory.address, slots * BLOCK)
        self.ring = Ring(self.memory.address, BLOCK, slots)
        count = self.random.randint(1, self.most_pumps)
        self.stages = [
            Stage(self.ring, self.device, engine(), self.random.randrange(2)) for _ in range(count)
        ]
        return [
            Pump(stage.capsule(), self.random.randint(1, self.most_depth)) for stage in self.stages
        ]

    def after_clients(self) -> None:
        super().after_clients()
        self.switching.il_pause(1_000_000_000)
        require(self.ring.lent == self.ring.lost, "idle pumps keep slots")

    def close(self) -> None:
        ring, log = self.ring, self.log
        require(log.broken or ring.lost == log.lost, f"{ring.lost} slots of {log.lost} are lost")
        require(ring.lent == ring.lost, f"{ring.lent} slots are lent at the end")
        del ring
        self.stages.clear()
        self.device.unpin(self.memory.address)
        said = self.cuda.double_said().decode()
        require(not said, said)


class WideRun(DeviceRun):
    """One with so many slots, and a device so slow, that slots wait to be copied together."""

    patience = (3, 10, 40)
    most_slots, most_pumps, most_depth, most_reads = 14, 2, 12, 30


@functools.cache
def device() -> tuple[Device, ctypes.CDLL]:
    """A device of the double of CUDA. Kept: so is its primary context."""
    built = str(compiled(HERE / "doubles/cuda_double.c", "-O1", "-fvisibility=hidden"))
    double = ctypes.CDLL(built)
    double.double_said.restype = ctypes.c_char_p
    double.cuda_double_set.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
    return Device(Cuda(built), 0), double


class TurnLock:
    """A reentrant lock for threads that run in turns: who waits for it lets others run."""

    def __init__(self) -> None:
        self.owner, self.count = 0, 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        mine = threading.get_ident()
        while self.owner not in (0, mine):
            if not blocking or timeout == 0:
                return False
            library()[0].il_pause(1_000)
        self.owner = mine
        self.count += 1
        return True

    def release(self) -> None:
        require(self.owner == threading.get_ident(), "a lock was released that was not held")
        self.count -= 1
        self.owner = self.owner if self.count else 0

    def _is_owned(self) -> bool:
        return self.owner == threading.get_ident()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@functools.cache
def modules() -> SimpleNamespace:
    """The modules of loads, with locks and engines for threads that run in turns."""
    from gdsload.system import lifecycle

    lifecycle.fork_safe_lock = lambda *_: TurnLock()  # type: ignore[assignment]
    from gdsload.backends.posix import engines
    from gdsload.checkpoint import Checkpoint
    from gdsload.errors import BackendUnavailable, ReadError
    from gdsload.loading import claims
    from gdsload.loading.batch import Batch
    from gdsload.loading.session import Session
    from gdsload.loading.settings import ReadSettings
    from gdsload.planning.read_plan import byte_ranges_of
    from gdsload.readahead.prefetch_batch import PrefetchBatch
    from gdsload.report import LoadReport

    for name in engines.ENGINES:
        engines.try_engine(name)  # remembered
    engines.engine_module = lambda _: SimpleNamespace(engine=lambda *_: engine())
    return SimpleNamespace(
        Checkpoint=Checkpoint, BackendUnavailable=BackendUnavailable, ReadError=ReadError,
        claims=claims, Batch=Batch, Session=Session, byte_ranges_of=byte_ranges_of,
        PrefetchBatch=PrefetchBatch, LoadReport=LoadReport, ReadSettings=ReadSettings,
    )  # fmt: skip


@functools.cache
def checkpoint() -> tuple[Any, dict[str, bytes], tempfile.TemporaryDirectory[str]]:
    """An open checkpoint of two shards, the bytes of its tensors, and its folder."""
    folder = tempfile.TemporaryDirectory(prefix="gdsload-interleave-")
    wanted: dict[str, bytes] = {}
    for number in range(2):
        header, data = {}, b""
        for tensor, nbytes in enumerate((100, 30_000, 4096, 1, 9_000)):
            name = f"{number}.{tensor}"
            wanted[name] = random.Random(name).randbytes(nbytes)
            offsets = [len(data), len(data) + nbytes]
            header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": offsets}
            data += wanted[name]
        text = json.dumps(header).encode()
        path = Path(folder.name, f"model-{number}.safetensors")
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return modules().Checkpoint.open(folder.name), wanted, folder


class Interrupted(Exception):
    """As Ctrl-C, or the cancellation of a load."""


class LoadsRun(Run):
    """Loads, and prefetches that they claim from."""

    memory_is_guarded = False
    files_are_real = True

    def open_pumps(self) -> list[Pump]:
        return []

    def prepare(self, programs: list[random.Random]) -> None:
        self.prefetches = self.random.randint(0, 2)

    def execute(self) -> Outcome:
        checkpoint()
        return super().execute()

    def session(self, program: random.Random, claim: bool) -> Any:
        report = modules().LoadReport("explored")
        return modules().Session(
            checkpoint()[0],
            report,
            modules().ReadSettings(
                "posix",
                program.choice(("buffered", "direct", "auto")),
                "keep",
                {"request_bytes": 4096 * program.randint(1, 4), "depth": program.randint(1, 6)},
            ),
            claim=claim,
            maps=False,
        )

    def ranges(self, program: random.Random) -> list[Any]:
        found = modules().byte_ranges_of(checkpoint()[0])
        return program.sample(found, program.randint(1, len(found)))

    def follow(self, number: int, program: random.Random) -> None:
        for _ in range(program.randint(1, 2)):
            try:
                if number <= self.prefetches:
                    self.prefetch(program)
                else:
                    self.load_batch(program)
            except modules().BackendUnavailable:
                require(self.log.broken > 0, "a backend is not available")

    def prefetch(self, program: random.Random) -> None:
        claims = modules().claims
        with self.session(program, claim=False) as session:
            ranges = self.ranges(program)
            batch = modules().PrefetchBatch.of(session, ranges)
            offer = claims.Offer("explored")
            offer.fill(batch, batch.offered_ranges(ranges))
            batch.views.clear()
            claims.offer(offer)
            try:
                looks = program.choice((0, 2, 5, 1000))  # then it is cancelled
                while looks and not batch.look():
                    self.switching.il_pause(3_000_000)
                    looks -= 1
            finally:
                batch.release()
                claims.withdraw(offer)

    def load_batch(self, program: random.Random) -> None:
        watches = program.choice((-1, -1, 0, 1, 5))  # of the interruption; -1: none

        def watch() -> None:
            nonlocal watches
            watches -= 1
            if watches == -1:
                raise Interrupted

        truth = checkpoint()[1]
        with self.session(program, claim=True) as session:
            ranges = self.ranges(program)
            batch = modules().Batch(session, *session.arrange(ranges))
            try:
                batch.wait(watch=watch)
            except Interrupted:
                pass
            except modules().ReadError as error:
                self.require_error_again(batch, error)
            else:
                for name, _, _, nbytes in ranges:
                    region, offset = batch.views[name]
                    require(region.read(offset, nbytes) == truth[name], f"wrong bytes in {name}")
            finally:
                batch.release()
                batch.release()

    def require_error_again(self, batch: Any, error: BaseException) -> None:
        """A load that has failed fails again, with the same error."""
        faults = self.log.struck + self.log.broken
        require(faults > 0, f"a load failed without a fault: {error}")
        for _ in range(2):
            with suppress(modules().ReadError):
                batch.wait()
                raise Failed("a load that had failed succeeded")

    def after_clients(self) -> None:
        super().after_clients()
        left = modules().claims.offered()
        require(not left, f"{len(left)} offers are left")


RUNS: dict[str, type[Run]] = {
    "host": Run,
    "device": DeviceRun,
    "wide": WideRun,
    "loads": LoadsRun,
}


def main(words: list[str]) -> int:
    kind, first, last = RUNS[words[0]], int(words[1]), int(words[2])
    gc.disable()  # a collection at another moment would be another interleaving
    steps, traces = 0, set()
    for seed in range(first, last):
        try:
            outcome = kind(seed).execute()
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            if not isinstance(error, Failed):
                raise
            return 1
        steps += outcome.steps
        traces.add(outcome.hash)
    print(f"{last - first} runs, {len(traces)} interleavings, {steps} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
