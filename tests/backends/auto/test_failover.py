"""Failover inside `auto`, and the errors that no other backend would avoid."""

from __future__ import annotations

import errno
import os
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import gdsload
from contract import BLOCK, SIZE, bytes_of
from devicetensors import TorchCuda, device_tensor
from gdsload.backends import (
    VRAM,
    Backend,
    Limits,
    Memory,
    OpenFile,
    Option,
    Progress,
    Registration,
    Support,
    registry,
    tuning_cache,
)
from gdsload.backends.auto import backend as backend_module
from gdsload.backends.auto.backend import MOST_FAILURES, AutoBackend
from gdsload.backends.auto.candidate import Candidate
from gdsload.backends.auto.request import AutoRequest, Part
from gdsload.backends.base import Failure, Registrations
from gdsload.backends.cufile.gds_mt import GdsMtBackend
from gdsload.backends.posix import PosixBackend
from gdsload.backends.staging import StagingPipeline
from gdsload.errors import PlacementError, ReadError, ShortRead
from gdsload.loading import torch_device
from gdsload.loading.session import Session
from gdsload.memory import DRAM, late_copies, staging_ring
from gdsload.planning.read_plan import Transfer
from gdsload.system import gpu
from gpuauto import MIB, SMALL, keep, load, rates_are
from gpucontract import DeviceMemory
from gpudoubles import CODE, DELAY, ERRNO, HANG, NEGATIVE, SHORT, STATUS, Doubles
from gpuloads import PATIENCE_SECONDS, Load, direct


@pytest.fixture
def doubles(measuring: Doubles) -> Doubles:
    return measuring


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [(NEGATIVE, 5008, "cuFile error 5008"), (ERRNO, 5011, "5011"), (ERRNO, 5, "Input/output")],
)
def test_failed_range_is_read_by_the_next_backend(
    kind: int,
    value: int,
    why: str,
    doubles: Doubles,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    doubles.fault(f"cuFileRead at {MIB}", kind, value, times=-1)
    report = load(checkpoint)
    assert report.backend == "gds_mt"
    assert report.failovers == {"gds_mt -> posix": 2 * (64 << 10)}  # one of each file
    assert report.refusals["gds_mt/ranges"].startswith("2 ranges failed, first ")
    assert f".safetensors at {MIB}: " in report.refusals["gds_mt/ranges"]
    assert why in report.refusals["gds_mt/ranges"]
    assert "failover: gds_mt -> posix, 131.07 kB" in report.summary()
    assert sum(report.paths.values()) == report.read_bytes


def test_false_end_of_file_is_read_by_the_next_backend(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    doubles.fault(f"cuFileRead at {MIB}", SHORT, 0, times=-1)
    report = load(checkpoint)
    assert report.failovers == {"gds_mt -> posix": 2 * (64 << 10)}
    assert "though the file goes on" in report.refusals["gds_mt/ranges"]


@pytest.mark.parametrize(("backend", "call"), [("gds", "event"), ("gds_mt", "cuFileRead")])
def test_false_end_of_file_is_no_short_read(
    backend: str, call: str, doubles: Doubles, checkpoint: Path
) -> None:
    doubles.fault(call, SHORT, 0, skip=3, times=-1)
    with pytest.raises(ReadError, match="though the file goes on") as caught:
        gdsload.load_file(checkpoint, "cuda:0", backend=backend, options=SMALL)
    assert not isinstance(caught.value, ShortRead)


class Unlucky(Backend):
    """A backend of a user: all of its reads fail."""

    name = "gds_mt"
    memory_kinds = frozenset({VRAM})

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        return tuple(Option(name, 0, "") for name in SMALL)

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        return Support(True)

    def limits(self, device: str = "cpu") -> Limits:
        return Limits(MIB, 4)

    def register(self, what: OpenFile | Memory) -> Registration:
        return Registration(what)

    def deregister(self, registration: Registration) -> None:
        pass

    def prepare(
        self, transfers: Sequence[Transfer], files: Registrations, memory: Registrations
    ) -> list[int]:
        return list(range(len(transfers)))

    def post(self, request: list[int]) -> None:
        pass

    def check(self, request: list[int]) -> Progress:
        settled = request.copy()
        request.clear()
        return Progress(settled, [Failure(number, 0, errno.EIO) for number in settled], True)

    def release(self, request: list[int]) -> None:
        pass


def test_backend_of_a_user_that_fails_is_left(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.3)
    monkeypatch.setattr(registry, "_registered", {})
    registry.register_backend(Unlucky)
    report = load(checkpoint)
    assert report.backend == "posix"
    assert report.failovers.keys() == {"gds_mt -> posix"}
    assert "Input/output error" in report.refusals["gds_mt"]


def test_lost_reads_of_the_last_backend_are_failures(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when Ctrl-C arrives between the backend's news and their note."""
    monkeypatch.setattr(
        Part, "check", lambda part: Progress([], [], part.candidate.backend.check(part.request)[2])
    )
    with pytest.raises(ReadError, match="Operation canceled"):
        load(checkpoint, engine="threads")


def test_backend_that_keeps_failing_is_left(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.1, posix=0.15, gds=0.2)
    doubles.fault("cuFileRead", NEGATIVE, 5008, skip=12, times=-1)
    report = load(checkpoint)
    assert report.backend == "posix"
    assert "ranges failed, first" in report.refusals["gds_mt"]
    assert "cuFile error 5008" in report.refusals["gds_mt"]
    assert report.failovers["gds_mt -> posix"] >= 3 * (64 << 10)
    assert "gds_mt" not in report.rates


def test_cached_choice_that_fails_is_deleted(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    load(checkpoint)
    doubles.fault("cuFileRead", NEGATIVE, 5008, times=-1)
    report = load(checkpoint)
    assert report.backend == "posix"
    assert tuning_cache.entries() == []


def test_backend_whose_ring_lost_all_slots_is_left(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four slots, each lost with an entry that timed out, before three ranges have failed."""
    rates_are(monkeypatch, gds_mt=0.2, posix=0.2, gds=0.1)
    monkeypatch.setattr(backend_module, "SILENT_SECONDS", 1e9)
    doubles.fault("event", STATUS, 0x20, skip=3, times=-1)
    report = load(checkpoint, request_bytes=256 << 10)
    assert report.backend != "gds" and "ranges failed" in report.refusals["gds"]
    # Pipelines parked at that ring were closed with it: the fixture counts what is left.
    assert [each.native.lost for each in staging_ring._given_up] == [4]


def test_failing_batches_fail_over_to_single_reads(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.2, posix=0.2, gds=0.1)
    load(checkpoint)
    doubles.fault("event", CODE, 5044, skip=10, times=-1)
    report = load(checkpoint)
    assert report.failovers["gds -> gds_mt"] >= 3 * (64 << 10)
    assert report.backend == "gds_mt"


def test_failover_names_the_backend_that_reads(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_are(monkeypatch, gds_mt=0.2, posix=0.3, gds=0.1)
    load(checkpoint)

    def refuse(backend: GdsMtBackend, what: object) -> NoReturn:
        raise PlacementError("no room for a ring")

    monkeypatch.setattr(GdsMtBackend, "register", refuse)
    doubles.fault("event", CODE, 5044, skip=10, times=-1)
    report = load(checkpoint)
    assert report.failovers.keys() == {"gds -> posix"}
    assert report.refusals["gds_mt"] == "no room for a ring"


def test_hanging_read_is_read_by_the_next_backend(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its late write goes to a slot that is not used again."""
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    monkeypatch.setattr(backend_module, "SILENT_SECONDS", 0.2)
    doubles.fault("cuFileRead", HANG, skip=9)
    report = load(checkpoint)
    assert "no byte has arrived for" in report.refusals["gds_mt"]
    assert report.failovers["gds_mt -> posix"] > 0


def test_backend_is_not_left_while_the_device_is_busy(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other one would copy sooner."""
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    load(checkpoint)
    monkeypatch.setattr(backend_module, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(torch_device, "_torch_cuda", TorchCuda)
    doubles.keep_busy()
    threading.Timer(1.0, doubles.end_work).start()
    report = load(checkpoint)
    assert report.backend == "gds_mt" and not report.failovers


def test_backend_of_a_stopped_process_is_not_left(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes may be about to be counted."""
    rates_are(monkeypatch, gds_mt=0.1, posix=0.2, gds=0.2)
    silent: list[str] = []
    real = Part.check

    def check(self: Part) -> Progress:
        if self.candidate.name != "gds_mt" or silent:
            return real(self)
        silent.append(self.candidate.name)
        self.idle_seconds = 1e6
        return Progress([], [], False, self.idle_seconds)

    monkeypatch.setattr(Part, "check", check)
    report = load(checkpoint)
    assert silent and report.backend == "gds_mt" and not report.failovers


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("cuFileDriverOpen", "5011"),
        ("cuFileHandleRegister", "does not take it"),
        ("cuFileBatchIOSetUp", ""),
    ],
)
def test_backend_that_does_not_open_is_refused(
    call: str, why: str, doubles: Doubles, checkpoint: Path
) -> None:
    doubles.fault(call, CODE, 5011, times=-1)
    report = load(checkpoint)
    if why:
        assert report.backend == "posix"
        assert why in report.refusals["gds_mt"]
        assert tuning_cache.entries() == []
    else:
        assert "gds" not in report.rates and "gds_mt" in report.rates


def test_missing_vram_for_the_ring_chooses_posix(doubles: Doubles, checkpoint: Path) -> None:
    taken = doubles.cuda_log["used"]
    doubles.set(nbytes=taken + 4_000_000 + gpu.SPARE_BYTES)
    report = load(checkpoint, ring_bytes=128 * MIB, request_bytes=4 * MIB)
    assert report.backend == "posix"
    assert "no staging ring" in report.refusals["gds_mt"]


# Errors that no other backend would avoid.


def test_truncated_file_raises_without_failover(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch_device.follow

    def cut(session: Session) -> None:
        os.truncate(checkpoint / "model-1.safetensors", 1_000_000)
        real(session)

    monkeypatch.setattr(torch_device, "follow", cut)
    with pytest.raises(ShortRead, match="the file ended at byte 1") as caught:
        gdsload.load_file(checkpoint, "cuda:0", cache="direct", options=SMALL)
    assert caught.value.path.endswith("model-1.safetensors")
    assert gdsload.last_report().failovers == {}


def test_device_error_raises_without_failover(doubles: Doubles, checkpoint: Path) -> None:
    before = doubles.cuda_log
    doubles.fault("cuMemcpyAsync", CODE, 719, skip=8, times=-1)
    with pytest.raises(ReadError, match="CUDA error 719"):
        gdsload.load_file(checkpoint, "cuda:0", cache="direct", options=SMALL)
    assert gdsload.last_report().failovers == {}
    assert late_copies.owners() == []
    gdsload.quiesce(5.0)
    after = doubles.cuda_log
    assert {name: after[name] for name in ("ranges", "pins", "used", "streams", "events")} == {
        name: before[name] for name in ("ranges", "pins", "used", "streams", "events")
    }


def test_failure_of_last_backend_raises_read_error(
    doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the usual one: file, tensor and reason."""
    from gdsload.backends.posix import PosixBackend

    real = PosixBackend.check

    def check(self: PosixBackend, request: Any) -> Any:
        progress = real(self, request)
        bad = [Failure(place, 0, 5) for place in progress.settled]
        return progress._replace(failures=bad)

    monkeypatch.setattr(PosixBackend, "check", check)
    doubles.fault("cuFileRead", NEGATIVE, 5008, skip=6, times=-1)
    with pytest.raises(ReadError, match=r"model-\d.*Input/output error \(tensor '\d.a'\)"):
        gdsload.load_file(checkpoint, "cuda:0", cache="direct", options=SMALL)


@pytest.fixture
def cufile_chosen(doubles: Doubles, tmp_path: Path) -> None:
    """An earlier load found gds_mt to be the fastest."""
    keep(tmp_path, {"gds_mt": 3e9, "posix": 1e9, "gds": 1e9}, {})


@pytest.mark.usefixtures("cufile_chosen")
def test_last_backend_that_cannot_be_opened_fails_the_request_for_good(
    doubles: Doubles, file: OpenFile
) -> None:
    """Each check raises the same error; wait and release return, and other requests can be made."""
    doubles.fault("cuFileRead", NEGATIVE, 5008, times=-1)
    doubles.fault("cuMemHostRegister_v2", CODE, 801, times=2)  # for the end of the file, too
    doubles.fault("cuMemHostAlloc", CODE, 2, times=2)
    with direct(file) as opened, AutoBackend("cuda:0", 1 << 30, **SMALL) as backend:
        request = Load(backend, opened, io_mode="direct").request
        errors, depths = [], []
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(errors) < 2:
            assert time.monotonic() < deadline
            try:
                backend.check(request)
                backend.wait(request, 0.05)
            except PlacementError as error:
                errors.append(str(error))
                depths.append(len(traceback.extract_tb(error.__traceback__)))
        assert errors[0] == errors[1] and "no staging ring" in errors[0]
        assert depths[0] == depths[1], "an error that is raised again keeps frames"
        backend.wait(request, 0.05)
        backend.release(request)
        with pytest.raises(PlacementError):
            backend.check(request)
        backend.release(request)
        again = Load(backend, opened, io_mode="direct")
        assert again.finish() == {} and again.bytes() == bytes_of(0)
        backend.release(again.request)


@pytest.mark.usefixtures("cufile_chosen", "no_collector")
@pytest.mark.parametrize("opened", ["at the first read", "for failed reads"])
def test_load_without_a_backend_that_opens_frees_its_tensors(
    opened: str, doubles: Doubles, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is needed by a load that the caller tries next."""
    tensors: list[weakref.ref[torch.Tensor]] = []

    def empty(*words: Any) -> torch.Tensor:
        made = device_tensor(*words)
        tensors.append(weakref.ref(made))
        return made

    monkeypatch.setattr(torch_device, "empty", empty)
    doubles.fault("cuMemHostRegister_v2", CODE, 801, times=-1)
    doubles.fault("cuMemHostAlloc", CODE, 2, times=-1)
    doubles.fault("cuFileRead", NEGATIVE, 5008, times=-1)
    cache = "buffered" if opened == "at the first read" else "direct"
    with pytest.raises(PlacementError, match="no staging ring"):
        gdsload.load_file(checkpoint, "cuda:0", cache=cache, options=SMALL)
    assert [tensor() for tensor in tensors] == [None, None]


@pytest.mark.usefixtures("cufile_chosen")
def test_ends_of_files_are_read_by_cufile_if_nothing_can_be_pinned(
    doubles: Doubles, file: OpenFile
) -> None:
    doubles.fault("cuMemHostRegister_v2", CODE, 801, times=-1)
    doubles.fault("cuMemHostAlloc", CODE, 2, times=-1)
    with direct(file) as opened, AutoBackend("cuda:0", 1 << 30, **SMALL) as backend:
        load = Load(backend, opened, io_mode="direct")
        assert load.finish() == {} and load.bytes() == bytes_of(0)
        assert "no staging ring" in backend.status().refusals["posix/ends of files"]
        backend.release(load.request)


@pytest.mark.usefixtures("cufile_chosen")
def test_parts_follow_the_stream_of_their_own_request(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams that were followed since then do not count; parts read again keep the stream too."""
    followed: dict[str, int] = {}
    prepared: list[tuple[str, int, int]] = []  # backend, stream, address
    real_follow, real_prepare = StagingPipeline.follow, StagingPipeline.prepare

    def follow(self: StagingPipeline, stream: int) -> bool:
        followed[self.name] = stream
        return real_follow(self, 0)

    def prepare(self: StagingPipeline, transfers: Any, files: Any, memory: Any) -> Any:
        prepared.append((self.name, followed[self.name], memory[0].what.address))
        return real_prepare(self, transfers, files, memory)

    monkeypatch.setattr(StagingPipeline, "follow", follow)
    monkeypatch.setattr(StagingPipeline, "prepare", prepare)
    doubles.fault("cuFileRead", NEGATIVE, 5008, times=-1)
    with direct(file) as opened, AutoBackend("cuda:0", 1 << 30, **SMALL) as backend:
        loads = []
        for stream in (11, 12):
            backend.follow("cuda:0", stream)
            other = threading.Thread(target=backend.follow, args=("cuda:0", 99))
            other.start()
            other.join()
            loads.append(Load(backend, opened, io_mode="direct"))
        for load in loads:
            assert load.finish() == {} and load.bytes() == bytes_of(0)
            backend.release(load.request)
    stream_of = {load.memory.address: 11 + number for number, load in enumerate(loads)}
    assert {name for name, _, _ in prepared} >= {"gds_mt", "posix"}
    assert [stream for _, stream, _ in prepared] == [stream_of[where] for *_, where in prepared]


class Refusing(PosixBackend):
    """Fails in one step, and counts its registrations and requests."""

    step = ""
    registered = prepared = 0

    def register(self, what: Any) -> Registration:
        if self.step == "register" and isinstance(what, Memory):
            raise KeyboardInterrupt
        self.registered += 1
        return Registration(what, (0, 1))

    def deregister(self, registration: Registration) -> None:
        self.registered -= 1

    def prepare(self, *_: Any) -> Any:
        if self.step == "prepare":
            raise KeyboardInterrupt
        self.prepared += 1
        return object()

    def release(self, request: Any) -> None:
        self.prepared -= 1

    def post(self, request: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["register", "prepare", "post"])
def test_candidate_that_cannot_post_gives_back_what_it_took(step: str, file: OpenFile) -> None:
    backend = Refusing()
    backend.step = step
    candidate = Candidate(backend)
    transfer = Transfer(0, 0, 4096, 4096, 0, 0, "buffered", 0)
    memory = [Registration(Memory("vram", 0, 4096), 1)] * 2
    with pytest.raises(KeyboardInterrupt):
        request = AutoRequest([transfer], [Registration(file, 0)], memory)
        candidate.post(request, [transfer], "cuda:0")
    assert (backend.registered, backend.prepared) == (1, 0)  # the file stays registered
    candidate.close()
    assert backend.registered == 0


def test_next_candidate_waits_for_the_copies_of_the_last_one(
    doubles: Doubles, file: OpenFile, tmp_path: Path
) -> None:
    """They wait for work of a stream that the next candidate does not follow."""
    keep(tmp_path, {"gds_mt": 3e9, "posix": 1e9, "gds": 1e9}, {})
    for number in range(MOST_FAILURES):
        doubles.fault(f"cuFileRead at {number * (16 << 10)}", NEGATIVE, 5008, times=-1)
    doubles.fault("cuFileRead", DELAY, 20_000_000, times=-1)
    with direct(file) as opened, AutoBackend("cuda:0", 1 << 30, **SMALL) as backend:
        first = Load(backend, opened, io_mode="direct")
        doubles.keep_busy()
        backend.follow("cuda:0", 0)  # all that gds_mt copies from now on comes after that work
        second = Load(backend, opened, io_mode="direct")
        end = time.monotonic() + PATIENCE_SECONDS
        while not first.request.held:
            assert not backend.check(first.request).finished
            assert time.monotonic() < end, "gds_mt was not abandoned"
            backend.wait(first.request, 0.01)
        time.sleep(0.2)
        progress = backend.check(first.request)
        assert progress.device_busy and not progress.finished
        assert progress.idle_seconds >= 0.1  # a device that stays busy ends the load
        assert first.request.held
        doubles.end_work()
        for each in (first, second):
            assert each.finish() == {}
            assert each.bytes() == bytes_of(0)
            backend.release(each.request)
        late_copies.forget_ended()
        assert late_copies.owners() == []
        report = backend.status()
        assert "ranges failed" in report.refusals["gds_mt"]
        assert report.failovers.keys() == {"gds_mt -> posix"}


def test_named_backend_does_not_fail_over(doubles: Doubles, checkpoint: Path) -> None:
    doubles.fault("cuFileRead", NEGATIVE, 5008, skip=6, times=-1)
    with pytest.raises(ReadError, match="cuFile error 5008"):
        gdsload.load_file(checkpoint, "cuda:0", backend="gds_mt", cache="direct", options=SMALL)
    report = gdsload.last_report()
    assert report.choice == "gds_mt: asked for by name"
    assert report.failovers == {}


def test_full_device_raises_before_reading(doubles: Doubles, checkpoint: Path) -> None:
    doubles.set(nbytes=gpu.SPARE_BYTES + 4096)
    reads = doubles.cufile_log["reads"]
    with pytest.raises(PlacementError) as caught:
        gdsload.load_file(checkpoint, "cuda:0", cache="direct", options=SMALL)
    assert caught.value.missing_bytes
    assert doubles.cufile_log["reads"] == reads
    assert [ring.kind for ring in staging_ring.rings()] == [DRAM]


def test_request_keeps_the_stream_it_was_prepared_under(
    doubles: Doubles, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another load may follow another stream before its reads are posted, or tried again."""
    followed: list[int] = []

    def follow(self: PosixBackend, device: str, stream: int) -> bool:
        followed.append(stream)
        return True

    monkeypatch.setattr(PosixBackend, "follow", follow)
    with AutoBackend("cuda:0", **SMALL) as backend:
        memory = DeviceMemory(SIZE)
        known = backend.register(file)
        space = backend.register(Memory(VRAM, memory.address, SIZE, memory, device="cuda:0"))
        read = Transfer(0, 0, BLOCK, BLOCK, 0, 0, "buffered", 0)
        requests = []
        for stream in (7, 9):
            assert backend.follow("cuda:0", stream)
            requests.append(backend.prepare([read], [known], [space]))
        for request in requests:
            backend.post(request)
        for request in requests:
            backend.release(request)
    assert followed == [7, 9]
