"""One rank of several that load a checkpoint together. Run by the tests (`ranks.py`).

Prints one line of JSON: for each case what this rank found.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist

import gdsload
from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.distribution import reader_group, shared_load
from gdsload.distribution.reader_group import ReaderGroup, device_group
from gdsload.integrations.engine_weights import WeightsReader
from gdsload.loading import claims
from gdsload.loading.batch import Batch
from gdsload.memory import page_cache
from gdsload.system import available

WINDOW_BYTES = 1_000_000
Tensors = dict[str, torch.Tensor]


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['GROUP']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    found = {"all": every_case, "killed": killed}[case](folder)
    print(json.dumps(found))
    if case == "all":
        dist.destroy_process_group()


def every_case(folder: Path) -> dict[str, Any]:
    # A failing case must not leave the ranks of the next one out of step.
    return {case.__name__: ended(case, folder) for case in CASES}


def ended(case: Callable[[Path], Any], folder: Path) -> Any:
    try:
        return case(folder)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}


def expected(folder: Path) -> Tensors:
    files = sorted(folder.glob("*.safetensors"))
    return {name: t for file in files for name, t in safetensors.torch.load_file(file).items()}


def differing(ours: Tensors, want: Tensors) -> list[str]:
    """Names of tensors that are not the same, bit for bit."""
    return sorted(ours.keys() ^ want.keys()) + [
        name for name, tensor in ours.items() if name in want and raw(tensor) != raw(want[name])
    ]


def raw(tensor: torch.Tensor) -> tuple[Any, ...]:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, flat.numpy().tobytes()


def facts(ours: Tensors, want: Tensors) -> dict[str, Any]:
    report = gdsload.last_report()
    return {
        "differing": differing(ours, want),
        "read_bytes": report.read_bytes,
        "received_bytes": report.received_bytes,
        "wanted_bytes": report.wanted_bytes,
        "held_bytes": sum(tensor.nbytes for tensor in ours.values()),
        "ranks": report.ranks,
    }


def whole(folder: Path) -> Any:
    ours = gdsload.load_file(folder, group=dist.group.WORLD, cache="direct")
    found = facts(ours, expected(folder))
    return {**found, "in_order": list(ours) == list(gdsload.load_file(folder))}


def warm(folder: Path) -> Any:
    """From the page cache: the bytes are mapped."""
    ours = gdsload.load_file(folder, group=dist.group.WORLD)
    return facts(ours, expected(folder))


def cold(folder: Path) -> Any:
    dist.barrier()
    if dist.get_rank() == 0:
        for file in folder.glob("*.safetensors"):
            page_cache.evict(file)
    dist.barrier()
    ours = gdsload.load_file(folder, group=dist.group.WORLD)
    dist.barrier()
    resident = sum(map(page_cache.resident_bytes, folder.glob("*.safetensors")))
    dist.barrier()  # before a rank reads the files again
    decided = gdsload.last_report().page_cache
    return {**facts(ours, expected(folder)), "page_cache": decided, "resident_bytes": resident}


def windows(folder: Path) -> Any:
    order = [name for name, _ in gdsload.stream(folder, order="layers")]
    pairs = gdsload.stream(
        folder,
        order="layers",
        group=dist.group.WORLD,
        window_bytes=WINDOW_BYTES,
        cache="direct",
    )
    ours = dict(pairs)
    return {**facts(ours, expected(folder)), "in_order": list(ours) == order}


def chunk(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    step = -(-tensor.shape[dim] // size)
    start = min(rank * step, tensor.shape[dim])
    return tensor.narrow(dim, start, min(step, tensor.shape[dim] - start))


def dimensions(folder: Path) -> Any:
    want = expected(folder)
    shards = {"rows": 0, "columns": -1, "experts": 1, "odd": 1, "few": 0, "eighths": 1, "none": 0}
    for name, dim in shards.items():
        want[name] = chunk(want[name], dim)
    group = dist.group.WORLD
    pairs = gdsload.stream(
        folder, group=group, shards=shards, window_bytes=WINDOW_BYTES, cache="direct"
    )
    return facts(dict(pairs), want)


class Bar:
    """A progress bar, in place of that of tqdm."""

    ended = 0, 0  # the bytes that the last one showed at its end, and its total

    def __init__(self, *, total: int, **_: Any) -> None:
        self.n, self.total = 0, total

    def update(self, nbytes: int) -> None:
        self.n += nbytes

    def close(self) -> None:
        Bar.ended = self.n, self.total


def progress(folder: Path) -> Any:
    with mock.patch("tqdm.tqdm", Bar):
        ours = gdsload.load_file(folder, group=dist.group.WORLD, shards={"large": 0}, progress=True)
    return [*Bar.ended, sum(tensor.nbytes for tensor in ours.values())]


def slices(folder: Path) -> Any:
    """Every rank wants another column of one tensor and other rows of all others."""
    rank = dist.get_rank()

    def wanted(info: TensorInfo) -> Any:
        if info.name == "columns":
            return slice(None), slice(rank, rank + 1)
        return (slice(rank, rank + 40),) if info.shape else None

    want = expected(folder)
    for name, tensor in want.items():
        if name == "columns":
            want[name] = tensor[:, rank : rank + 1]
        elif tensor.ndim:
            want[name] = tensor[rank : rank + 40]
    return facts(gdsload.load_file(folder, group=dist.group.WORLD, shards=wanted), want)


def byte_columns(folder: Path) -> Any:
    """One byte of each row is alone in its message."""
    part = slice(None), slice(dist.get_rank(), dist.get_rank() + 1)
    ours = gdsload.load_file(
        folder, names=["eighths"], group=dist.group.WORLD, shards={"eighths": part}
    )
    return facts(ours, {"eighths": expected(folder)["eighths"][part]})


def experts(folder: Path) -> Any:
    want = expected(folder)
    names = sorted(want)[dist.get_rank() :: dist.get_world_size()]
    ours = gdsload.load_file(folder, names=names, group=dist.group.WORLD, cache="direct")
    found = facts(ours, {name: want[name] for name in names})
    return {**found, "in_order": list(ours) == names}


def of_engine(folder: Path) -> Any:
    """As a serving engine reads: each rank lacks some tensors, those of other experts."""
    want = expected(folder)
    skipped = sorted(want)[dist.get_rank() :: dist.get_world_size()]
    pairs = WeightsReader({"window_bytes": WINDOW_BYTES, "cache": "direct"}).read(
        sorted(map(str, folder.glob("*.safetensors"))),
        "cpu",
        logging.getLogger("test"),
        wanted=lambda name: name not in skipped,
        group=dist.group.WORLD,
    )
    return facts(dict(pairs), {name: want[name] for name in want if name not in skipped})


def torchrun(**words: int) -> AbstractContextManager[Any]:
    """Variables of `torchrun --virtual-local-rank`."""
    names = {name: str(word) for name, word in words.items()}
    return mock.patch.dict(
        os.environ, names, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="nodes"
    )


def nodes(folder: Path) -> Any:
    """Two ranks on each node."""
    with torchrun(GROUP_RANK=dist.get_rank() // 2):
        ours = gdsload.load_file(folder, group=dist.group.WORLD, cache="direct")
        apart = facts(ours, expected(folder))
        ours = gdsload.load_file(
            folder, group=dist.group.WORLD, cache="direct", readers="group", shards={"rows": 0}
        )
        want = expected(folder)
        want["rows"] = chunk(want["rows"], 0)
        return {"node": apart, "group": facts(ours, want)}


def spawned(folder: Path) -> Any:
    """By workers of torchrun, whose variables they have: those are right for one of them."""
    found = []
    for words in ({"RANK": 0, "WORLD_SIZE": 1, "GROUP_RANK": 0}, {"RANK": 1, "GROUP_RANK": 1}):
        with torchrun(**words):
            ours = gdsload.load_file(folder, group=dist.group.WORLD, stall_seconds=20)
            found.append(facts(ours, expected(folder)))
    return found


def cyclic(folder: Path) -> Any:
    """A launcher that gives ranks to two nodes in turn: their numbers do not tell the node."""
    words = {"LOCAL_RANK": dist.get_rank() // 2, "LOCAL_WORLD_SIZE": 2}
    with mock.patch.dict(os.environ, {name: str(word) for name, word in words.items()}):
        return facts(gdsload.load_file(folder, group=dist.group.WORLD), expected(folder))


def missing_file(folder: Path) -> Any:
    source = folder / "gone" if dist.get_rank() == 1 else folder
    gdsload.load_file(source, group=dist.group.WORLD)


def other_checkpoint(folder: Path) -> Any:
    source = folder / "other" if dist.get_rank() == 1 else folder
    gdsload.load_file(source, group=dist.group.WORLD)


def other_files(folder: Path) -> Any:
    """Rank 1 has one more file, without tensors."""
    source = folder / "more" if dist.get_rank() == 1 else folder
    if dist.get_rank() == 1:
        source.mkdir()
        for file in folder.glob("*.safetensors"):
            os.link(file, source / file.name)
        safetensors.torch.save_file({}, source / "z.safetensors")
    gdsload.load_file(source, group=dist.group.WORLD)


def other_version(folder: Path) -> Any:
    """Headers are equal, bytes are not: the link was set to the next release in between."""
    old, new, link = (folder.parent / name for name in ("old", "new", "current"))
    if dist.get_rank() == 0:
        for version, value in ((old, 1.0), (new, 2.0)):
            version.mkdir()
            safetensors.torch.save_file(
                {"a": torch.full((1000,), value)}, version / "model.safetensors"
            )
        os.utime(old / "model.safetensors", (1, 1))
        link.symlink_to(old)

    def release() -> None:
        link.unlink()
        link.symlink_to(new)

    with opened_last_by_rank_1(release):
        gdsload.load_file(link, group=dist.group.WORLD)


def opened_last_by_rank_1(change: Callable[[], Any]) -> AbstractContextManager[Any]:
    """Rank 1 opens its checkpoint when all others have, after `change`."""
    opened = Checkpoint.open

    def in_turn(*args: Any, **words: Any) -> Checkpoint:
        if dist.get_rank() != 1:
            found = opened(*args, **words)
            dist.barrier()
            return found
        dist.barrier()
        change()
        return opened(*args, **words)

    dist.barrier()
    return mock.patch.object(Checkpoint, "open", in_turn)


def other_source(folder: Path) -> Any:
    """For rank 1 the first of two sources is gone: the version is that of the second one."""
    first, second = (folder.parent / name for name in ("first", "second"))
    if dist.get_rank() == 0:
        for copy in (first, second):
            shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("copy", "mapped", "other"))
    with opened_last_by_rank_1(lambda: shutil.rmtree(first)):
        source = gdsload.replicas(first, second)
        ours = gdsload.load_file(source, group=dist.group.WORLD)
    return facts(ours, expected(folder))


def other_order(folder: Path) -> Any:
    order = "layers" if dist.get_rank() == 1 else "file"
    for _ in gdsload.stream(folder, group=dist.group.WORLD, order=order):
        pass


def other_readers(folder: Path) -> Any:
    how = "node" if dist.get_rank() == 1 else "group"
    gdsload.load_file(folder, group=dist.group.WORLD, readers=how)


def other_readers_of_torchrun(folder: Path) -> Any:
    """It says which ranks are on a node: "node" and "group" are the same ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    words = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    with mock.patch.dict(os.environ, {name: str(word) for name, word in words.items()}):
        other_readers(folder)


def two_groups(folder: Path) -> Any:
    """Of the same ranks, by two threads: those of one group meet, whichever thread comes first."""
    groups = [dist.new_group() for _ in range(2)]
    folders = [folder, folder / "other"]
    first = dist.get_rank() % 2
    found: dict[int, Tensors] = {}

    def load(number: int) -> None:
        found[number] = gdsload.load_file(folders[number], group=groups[number], cache="direct")

    threads = [threading.Thread(target=load, args=(number,)) for number in (first, 1 - first)]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    return [differing(found[number], expected(folders[number])) for number in range(2)]


def other_windows(folder: Path) -> Any:
    """The smallest one counts, and is one of many tensors all the same."""
    window_bytes = 1 if dist.get_rank() == 3 else WINDOW_BYTES
    pairs = gdsload.stream(folder, group=dist.group.WORLD, window_bytes=window_bytes)
    return facts(dict(pairs), expected(folder))


def unknown_name(folder: Path) -> Any:
    names = ["gone"] if dist.get_rank() == 1 else None
    gdsload.load_file(folder, names=names, group=dist.group.WORLD)


def unknown_shard(folder: Path) -> Any:
    shards = {"gone": 0} if dist.get_rank() == 1 else None
    gdsload.load_file(folder, shards=shards, group=dist.group.WORLD)


def interrupted(tensors: Iterable[tuple[str, torch.Tensor]], act: Callable[[], None]) -> Iterator:
    for number, pair in enumerate(tensors):
        if number == 0 and dist.get_rank() == 1:
            act()
        yield pair


def failed_read(folder: Path) -> Any:
    """Rank 1 has a copy of its own, which ends early after the first window."""
    source = folder
    if dist.get_rank() == 1:
        source = folder / "copy"
        shutil.copytree(folder, source, ignore=shutil.ignore_patterns("copy", "mapped", "other"))

    def cut() -> None:
        for file in source.glob("*.safetensors"):
            os.truncate(file, 5000)

    group = dist.group.WORLD
    pairs = gdsload.stream(source, group=group, window_bytes=WINDOW_BYTES, cache="direct")
    dict(interrupted(pairs, cut))


def rewritten(folder: Path) -> Any:
    """Rank 1 has a copy of its own, which changes when its bytes were mapped and not yet sent."""
    source = folder
    if dist.get_rank() == 1:
        source = folder / "mapped"
        shutil.copytree(folder, source, ignore=shutil.ignore_patterns("copy", "mapped", "other"))
    exchanging = ReaderGroup.exchanging

    def late(readers: ReaderGroup) -> AbstractContextManager[None]:
        for file in source.glob("*.safetensors") if dist.get_rank() == 1 else ():
            with open(file, "r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                opened.write(b"x")
        dist.barrier()
        return exchanging(readers)

    with mock.patch.object(ReaderGroup, "exchanging", late):
        gdsload.load_file(source, group=dist.group.WORLD)


def cgroup_each() -> Any:
    """Each rank is in a container of its own."""
    return mock.patch.object(shared_load, "memory_cgroups", lambda: ((0, dist.get_rank()),))


def no_room(folder: Path) -> Any:
    """For the tensors of three ranks, not for those of all four."""
    nbytes = sum(tensor.nbytes for tensor in expected(folder).values())
    room = dist.get_world_size() * nbytes + available.SPARE_BYTES - 1
    with cgroup_each(), mock.patch.object(available, "machine_bytes", lambda: room):
        gdsload.load_file(folder, group=dist.group.WORLD, cache="direct")


def no_room_together(folder: Path) -> Any:
    """The limit of the cgroup of all ranks is enough for one of them."""
    room = sum(tensor.nbytes for tensor in expected(folder).values()) + available.SPARE_BYTES
    with mock.patch.object(available, "available_bytes", lambda *_: room):
        gdsload.load_file(folder, group=dist.group.WORLD, cache="direct")


def own_limit(folder: Path) -> Any:
    """Each rank may have the memory of its own tensors."""
    want = expected(folder)
    room = sum(tensor.nbytes for tensor in want.values()) + available.SPARE_BYTES
    with cgroup_each(), mock.patch.object(available, "available_bytes", lambda *_: room):
        return facts(gdsload.load_file(folder, group=dist.group.WORLD, cache="direct"), want)


def no_room_of_own(folder: Path) -> Any:
    """The limit of rank 1 is too low."""
    room = sum(tensor.nbytes for tensor in expected(folder).values()) + available.SPARE_BYTES
    room -= dist.get_rank() == 1
    with cgroup_each(), mock.patch.object(available, "available_bytes", lambda *_: room):
        gdsload.load_file(folder, group=dist.group.WORLD, cache="direct")


def no_memory(folder: Path) -> Any:
    """The system refuses memory that it had available."""
    refusal = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate ...")
    refused = mock.patch("torch.empty", side_effect=refusal)
    with refused if dist.get_rank() == 1 else nullcontext():
        gdsload.load_file(folder, group=dist.group.WORLD)


def no_memory_to_send(folder: Path) -> Any:
    """Rank 1 reads parts of two tensors, which it packs into one message for each other rank."""
    refusal = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate ...")
    refused = mock.patch("torch.cat", side_effect=refusal)
    with refused if dist.get_rank() == 1 else nullcontext():
        names = ["odd", "experts", "flags", "scalar", "few", "eighths", "last"]
        gdsload.load_file(folder, names=names, group=dist.group.WORLD, cache="direct")


def failed_consumer(folder: Path) -> Any:
    def fail() -> None:
        raise RuntimeError("the consumer is out of paper")

    pairs = gdsload.stream(folder, group=dist.group.WORLD, window_bytes=WINDOW_BYTES)
    try:
        dict(interrupted(pairs, fail))
    finally:
        pairs.close()  # type: ignore[attr-defined]


def silent_rank(folder: Path) -> Any:
    """Rank 1 does not take part."""
    if dist.get_rank() != 1:
        gdsload.load_file(folder, group=dist.group.WORLD, stall_seconds=3)


def late_exchange(folder: Path) -> Any:
    """A rank comes late to an exchange, but within `stall_seconds`."""
    real, late = ReaderGroup.exchange, [dist.get_rank() == 1]

    def exchange(self: ReaderGroup, *how: Any) -> None:
        if late.pop():
            time.sleep(2.0)
        late.append(False)
        real(self, *how)

    dist.barrier()
    with mock.patch.object(ReaderGroup, "exchange", exchange):
        ours = gdsload.load_file(folder, group=dist.group.WORLD, cache="direct", stall_seconds=6.0)
    return facts(ours, expected(folder))


def slow_rank(folder: Path) -> Any:
    """The reads of rank 1 go on for longer than the others wait for an answer."""
    wait = Batch.wait

    def slow(batch: Batch, *args: Any, watch: Callable[[], None], **words: Any) -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end and dist.get_rank() == 1:
            watch()
            time.sleep(0.1)
        wait(batch, *args, watch=watch, **words)

    dist.barrier()
    with mock.patch.object(Batch, "wait", slow):
        ours = gdsload.load_file(folder, group=dist.group.WORLD, stall_seconds=4)
    return facts(ours, expected(folder))


def slow_prefetch(folder: Path) -> Any:
    """Rank 1 waits for a prefetch that compares checksums for longer than the others wait."""
    offer = claims.Offer(str(folder), verify="checksum")

    def compare() -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            offer.note_progress()
            time.sleep(0.1)
        claims.withdraw(offer)

    dist.barrier()
    if dist.get_rank() == 1:
        claims.offer(offer)
        threading.Thread(target=compare).start()
    ours = gdsload.load_file(folder, group=dist.group.WORLD, stall_seconds=4)
    waited = "wait for the prefetch" in gdsload.last_report().phases
    return {**facts(ours, expected(folder)), "waited": waited}


def missed(folder: Path) -> Any:
    """The ranks meet again when one of them, the first or another one, has missed a load."""
    for absent in (0, 1):
        dist.barrier()
        if dist.get_rank() != absent:
            with suppress(gdsload.RankError):
                gdsload.load_file(folder, group=dist.group.WORLD, stall_seconds=2)
    return again(folder)


def interrupted_rank(folder: Path) -> Any:
    """Rank 1 keeps the error of Ctrl-C, as an interactive session does."""
    kept: BaseException | None = None
    ctrl_c = mock.patch("pickle.dumps", side_effect=KeyboardInterrupt)
    dist.barrier()
    try:
        with (
            ReaderGroup(dist.group.WORLD, "group", 5.0) as readers,
            ctrl_c if dist.get_rank() == 1 else nullcontext(),
        ):
            readers.agree()
    except KeyboardInterrupt as error:
        kept = error
    finally:
        dist.barrier()
    return {"error": type(kept).__name__}


def over_gloo(_: str, *how: Any) -> Any:
    return device_group("gloo", *how)


def devices(folder: Path) -> Any:
    """What all ranks together add up when they connect their devices."""
    with (
        mock.patch.object(reader_group, "device_group", over_gloo),
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as added,
        ReaderGroup(dist.group.WORLD, "group", 20.0) as readers,
    ):
        readers.connect_devices("cpu")
    return [int(call.args[0]) for call in added.call_args_list]


def full_device(folder: Path) -> Any:
    """The device of rank 1 has no memory left when the ranks connect theirs."""
    refused = mock.patch("torch.ones", side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    with (
        mock.patch.object(reader_group, "device_group", over_gloo),
        refused if dist.get_rank() == 1 else nullcontext(),
        ReaderGroup(dist.group.WORLD, "group", 20.0) as readers,
        readers.together(),
    ):
        readers.connect_devices("cpu")


def closed_by_all(folder: Path) -> Any:
    pairs = gdsload.stream(folder, group=dist.group.WORLD, window_bytes=WINDOW_BYTES)
    name, _ = next(pairs)
    pairs.close()  # type: ignore[attr-defined]
    return name


def again(folder: Path) -> Any:
    dist.barrier()
    return whole(folder)


def default_device(folder: Path) -> Any:
    want = expected(folder)
    with torch.device("meta"):
        ours = gdsload.load_file(folder, group=dist.group.WORLD, cache="direct")
    return facts(ours, want)


def later(folder: Path) -> Any:
    """One rank begins later: it finds no addresses of an earlier load."""
    for _ in range(3):
        if dist.get_rank() == 0:
            time.sleep(0.3)
        found = whole(folder)
    return found


def subgroup(folder: Path) -> Any:
    """Rank 0 has loaded another checkpoint by a group of its own. Torch counts groups as before."""
    patience = timedelta(seconds=60)
    everyone = list(range(dist.get_world_size()))
    alone = [dist.new_group([rank]) for rank in everyone][dist.get_rank()]
    if dist.get_rank() == 0:
        gdsload.load_file(folder / "other", group=alone)
        dist.destroy_process_group(device_group("gloo", [0], patience))
    for group in (device_group("gloo", everyone, patience), dist.new_group(timeout=patience)):
        dist.barrier(group)
        dist.destroy_process_group(group)
    return whole(folder)


def outsider(folder: Path) -> Any:
    """`new_group` returns this to the ranks that it does not name."""
    group: Any = dist.GroupMember.NON_GROUP_MEMBER
    gdsload.load_file(folder, group=group)


def killed(folder: Path) -> Any:
    """Rank 1 dies after the first window."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    pairs = gdsload.stream(folder, group=dist.group.WORLD, window_bytes=WINDOW_BYTES)
    try:
        dict(interrupted(pairs, die))
    except gdsload.RankError as error:
        return {"error": type(error).__name__, "text": str(error)}


CASES = (
    outsider, whole, warm, cold, windows, dimensions, progress, slices, byte_columns, experts,
    of_engine, nodes, spawned, missing_file, other_checkpoint, other_files, other_version,
    other_source, cyclic, other_order, other_readers, other_readers_of_torchrun, two_groups,
    other_windows, unknown_name, unknown_shard, failed_read, rewritten, no_room,
    no_room_together, own_limit, no_room_of_own, no_memory, no_memory_to_send, full_device,
    failed_consumer, interrupted_rank, closed_by_all, again, default_device, later, subgroup,
    devices, silent_rank, late_exchange, slow_rank, slow_prefetch, missed,
)  # fmt: skip
