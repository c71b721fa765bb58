"""The ranks that read a checkpoint together, and the messages between them.

Bytes in host memory and all messages about errors go through a gloo group of its own, whose
time-out ends every wait; bytes in device memory go through NCCL. `dist.new_group` would name these
groups by a count of all groups of a process, which ranks that are in other groups too do not share.
Not responsible for what is sent (`shares`, `exchange`).
"""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from gdsload.errors import RankError
from gdsload.loading.torch_memory import capture_relaxed, taking
from gdsload.system import cancellation

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

READERS = ("node", "group")
DIFFERENT_READERS = "the ranks of one load were given different readers="
_FIRST_LOOK_SECONDS, _LAST_LOOK_SECONDS = 0.001, 0.1  # intervals of looking into the store


class ReaderGroup:
    """The ranks that share the reads of one load. All of them create it at the same time.

    Attributes:
        size: The number of ranks that share the reads.
        rank: The number of this rank among them.
        numbers: The ranks of the caller's group that share the reads, in order.
        whole_size: The number of ranks of the caller's group.
        of_node: Whether the ranks of each node share the reads, not those of all nodes.
        patience_seconds: A rank that works for longer than this has to answer the others meanwhile.
    """

    def __init__(self, group: ProcessGroup, readers: str, timeout_seconds: float) -> None:
        """Connects the ranks.

        Args:
            group: A group of torch.distributed that this rank belongs to.
            readers: "node": the ranks of each node read the whole checkpoint for their node.
                "group": all ranks of the group read it once.
            timeout_seconds: Every wait for another rank ends after this time.

        Raises:
            ValueError: `readers` is unknown, or that of another rank differs, or this rank does not
                belong to the group.
            RankError: Another rank did not come in time.
        """
        import torch.distributed as dist

        require_readers(readers)
        self._timeout = timedelta(seconds=timeout_seconds)
        self.patience_seconds = timeout_seconds / 4
        self._of = str(getattr(group, "group_name", ""))  # the same on all of its ranks
        self._control: Any = None  # a gloo group
        self._data: Any = None  # for bytes in device memory
        me = dist.get_rank()
        if dist.get_rank(group) < 0:
            raise ValueError(f"rank {me} does not belong to the group")
        everyone = dist.get_process_group_ranks(group)
        with (
            rank_errors("does not join the load"),
            _common_name(f"{self._of} meets", everyone, me, self._timeout) as name,
        ):
            members = _ranks_that_read(name, everyone, me, readers, self._timeout)
        self._members = members
        self.size, self.rank = len(members), members.index(me)
        self.numbers = [everyone.index(member) for member in members]
        self.whole_size = len(everyone)
        self.of_node = readers == "node"
        self._control = self._connected(members, me)
        self._talks = True  # the next thing that all ranks do is to agree

    def _connected(self, members: Sequence[int], me: int) -> Any:
        """A gloo group that is not among those of `torch.distributed`."""
        import torch.distributed as dist

        with (
            rank_errors("does not join the load"),
            _common_name(self._of, members, me, self._timeout) as name,
        ):
            store = _store()
            keys = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
            rank, size = members.index(me), len(members)
            # gloo waits for a rank that is not there for its time-out several times.
            store.set(f"{name}/here/{me}", "")
            here = [f"{name}/here/{member}" for member in members]
            _await(lambda: store.check(here), self._timeout)
            return dist.ProcessGroupGloo(keys, rank, size, self._timeout)

    def agree(self, state: Any = None) -> list[Any]:
        """The states of all ranks, when all of them have come here without an error.

        Raises RankError if one of them has failed, or does not come in time.
        """
        answers = self._gathered(("", state))
        for member, (failure, _) in zip(self._members, answers, strict=True):
            if failure:
                self._talks = False
                raise RankError(f"rank {member} failed: {failure}", rank=member)
        return [answer for _, answer in answers]

    def _gathered(self, state: Any) -> list[Any]:
        """The states of all ranks. Raises RankError.

        No local variable has the group: a traceback that is kept would keep it open after `close`.
        """
        import torch

        data = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
        with rank_errors("does not answer"):
            # The caller may have set another default device.
            lengths = self._all_of(torch.tensor([len(data)], device="cpu"))
            padded = torch.zeros(max(map(int, lengths)), dtype=torch.uint8, device="cpu")
            padded[: len(data)] = data
            states = self._all_of(padded)
        return [
            pickle.loads(ctypes.string_at(state.data_ptr(), int(length)))
            for state, length in zip(states, lengths, strict=True)
        ]

    def _all_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [tensor.clone() for _ in range(self.size)]
        self._control.allgather([found], [tensor]).wait()
        return found

    def connect_devices(self, device: str) -> None:
        """Prepares the exchange of bytes in the memory of `device`. All ranks call it at the same
        time, each with its own device.

        Not over the caller's group: its operations, in another thread, could be ordered differently
        on another rank.

        Raises:
            PlacementError: The device has no memory left.
            RankError: Another rank has failed, or does not answer in time.
        """
        import torch
        import torch.distributed as dist

        # NCCL connects all ranks in their first operation, and in the first exchange a rank may
        # have nothing to send or receive. A rank without memory fails before others wait in it.
        with capture_relaxed(device), taking(4, device, "a message to all ranks"):
            number = torch.ones(1, device=device)
        self.agree()
        with rank_errors("does not join the load"), capture_relaxed(device):
            self._data = device_group("nccl", self._members, self._timeout, self._of)
            dist.all_reduce(number, group=self._data)
            number.item()  # waits

    @contextmanager
    def together(self) -> Iterator[None]:
        """If the block ends early on one rank, it ends on all of them: at their next `agree`, with
        the reason of the first."""
        try:
            yield
        except RankError:
            raise
        except (Exception, GeneratorExit) as error:
            early = isinstance(error, GeneratorExit)
            self.tell("it closed the stream" if early else reason_of(error))
            raise

    def tell(self, failure: str) -> None:
        """Ends the load on the other ranks, at their next `agree`, with this reason. Does nothing
        if they have got one, or do not listen."""
        if self._talks:
            self._talks = False
            with suppress(RankError):
                self._gathered((failure, None))

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around an exchange: a rank that fails in it does not say why, because the others do not
        listen. They notice that it has left."""
        self._talks = False
        yield
        self._talks = True

    def finish(self) -> None:
        """No rank has anything left to say to another: the last exchange has ended."""
        self._talks = False

    def exchange(
        self,
        sent: Sequence[tuple[int, torch.Tensor]],
        received: Sequence[tuple[int, torch.Tensor]],
        device: str,
    ) -> None:
        """Sends and receives tensors of bytes in the memory of `device`. In CPU memory it waits for
        them; on a device the work on the current stream does.

        Args:
            sent: (rank among the readers, contiguous tensor). Between two ranks the order counts.
            received: (rank among the readers, contiguous tensor to fill).
            device: "cpu" or "cuda:N".

        Raises:
            RankError: Another rank has died, or does not answer in time.
        """
        with rank_errors("does not answer"):
            if device == "cpu":
                works = [self._control.send([tensor], peer, 0) for peer, tensor in sent]
                works += [self._control.recv([tensor], peer, 0) for peer, tensor in received]
                for work in works:
                    work.wait()
            elif sent or received:
                self._exchange_on_device(sent, received)

    def _exchange_on_device(
        self,
        sent: Sequence[tuple[int, torch.Tensor]],
        received: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        import torch.distributed as dist

        ops = [
            dist.P2POp(operation, tensor, self._members[peer], self._data)
            for operation, messages in ((dist.isend, sent), (dist.irecv, received))
            for peer, tensor in messages
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def close(self) -> None:
        """Closes the connections. Another rank that still waits gets RankError."""
        import torch.distributed as dist

        data, self._data, self._control = self._data, None, None
        if data is not None:
            # Broken, or the default group has ended.
            with suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(data)

    def __enter__(self) -> ReaderGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def require_readers(readers: str) -> None:
    """Raises ValueError for an unknown value of `readers`."""
    if readers not in READERS:
        raise ValueError(f'readers={readers!r} must be one of "node", "group"')


def _store() -> Any:
    """Where the ranks of the job meet."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _ranks_that_read(
    name: str, everyone: list[int], me: int, readers: str, timeout: timedelta
) -> list[int]:
    """The ranks that read together with this one, in order.

    Every rank tells the store where it is: connections between all ranks of many nodes would take
    long. The node of torchrun counts if all ranks have one: some may have inherited its variables.

    Raises ValueError if the ranks have different `readers`, and RuntimeError if one does not come.
    """
    store, by_torchrun = _store(), f"{name}/by torchrun"
    same, node = f"{name}/of {readers}", f"{name}/on {node_id()}"
    places, started = [same, node], _node_of_torchrun(me)
    if started:
        places += [by_torchrun, f"{by_torchrun} on {started}"]
    for place in places:
        store.set(f"{place}/{store.add(place, 1)}", str(me))
    store.add(f"{name}/here", 1)
    _await(lambda: store.add(f"{name}/here", 0) == len(everyone), timeout)
    if store.add(same, 0) != len(everyone):
        raise ValueError(DIFFERENT_READERS)
    if readers == "group":
        return everyone
    if store.add(by_torchrun, 0) == len(everyone):
        node = places[-1]
    numbers = range(1, store.add(node, 0) + 1)
    return sorted((int(store.get(f"{node}/{n}")) for n in numbers), key=everyone.index)


def _node_of_torchrun(me: int) -> str:
    """The node on which torchrun started this rank; "" if another launcher did.

    Not by LOCAL_RANK, which may be 0 for all ranks. Other launchers than torchrun set only some of
    these variables, and number ranks otherwise.
    """
    import torch.distributed as dist

    wanted = {"RANK": me, "WORLD_SIZE": dist.get_world_size()}
    if any(os.environ.get(name) != str(number) for name, number in wanted.items()):
        return ""
    run, number = (os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "GROUP_RANK"))
    return f"{run}/{number}" if run and number else ""


def _await(arrived: Callable[[], bool], timeout: timedelta) -> None:
    """Waits for something in the store, in steps that let Ctrl-C in. Raises RuntimeError."""
    end, seconds = time.monotonic() + timeout.total_seconds(), _FIRST_LOOK_SECONDS
    while not arrived():
        cancellation.check()
        if time.monotonic() > end:
            raise RuntimeError(f"no answer for {timeout.total_seconds():g} s")
        time.sleep(seconds)
        seconds = min(2 * seconds, _LAST_LOOK_SECONDS)


@contextmanager
def _common_name(of: str, members: Sequence[int], me: int, timeout: timedelta) -> Iterator[str]:
    """A name for a group, the same on all of these ranks, that no other group of theirs has had.

    The first rank opens a name for the others, which wait for it, and closes it if the block fails.
    Each rank counts a name only when it was opened: so ranks that did not meet, because one of them
    was interrupted or did not come, find each other the next time.
    Threads that load with different groups of the same ranks do so at the same time: `of` is the
    name of the caller's group. Raises RuntimeError if the first rank does not come in time.
    """
    store = _store()
    ranks = sha256("_".join([of, *map(str, members)]).encode()).hexdigest()[:16]
    names, count = f"gdsload/{ranks}/group", f"gdsload/{ranks}/{me}"
    if me != members[0]:
        yield _opened_name(store, names, count, timeout)
        return
    name = f"{names}/{store.add(count, 0) + 1}"
    while store.check([f"{name}/state"]):
        name = f"{names}/{store.add(count, 1) + 1}"
    try:
        store.set(f"{name}/state", "open")
        yield name
    except BaseException:
        store.set(f"{name}/state", "closed")
        raise


def _opened_name(store: Any, names: str, count: str, timeout: timedelta) -> str:
    """The next name that the first rank has opened, and not closed."""
    while True:
        name = f"{names}/{store.add(count, 0) + 1}"
        _await(partial(store.check, [f"{name}/state"]), timeout)
        store.add(count, 1)
        if store.get(f"{name}/state") == b"open":
            return name


def device_group(backend: str, members: Sequence[int], timeout: timedelta, of: str = "") -> Any:
    """A group among those of `torch.distributed`, without a part in its count of groups. `of`: the
    name of the caller's group.

    With a torch that creates groups by other functions, it has the name of `dist.new_group`.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    try:
        create: Any = distributed_c10d._new_process_group_helper
        ranks_of: Any = distributed_c10d._world.pg_group_ranks
    except AttributeError:
        return dist.new_group(
            members, timeout=timeout, backend=backend, use_local_synchronization=True
        )
    me = dist.get_rank()
    where = len(members), members.index(me), list(members), dist.Backend(backend), _store()
    with _common_name(of, members, me, timeout) as name:
        group, _ = create(*where, name, timeout=timeout)
    ranks_of[group] = {member: number for number, member in enumerate(members)}
    return group


def node_id() -> str:
    """The identity of the running kernel: equal in all containers of a machine."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return socket.gethostname()


def reason_of(error: BaseException) -> str:
    """An error as the other ranks show it."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


@contextmanager
def rank_errors(what: str) -> Iterator[None]:
    """Turns errors of torch.distributed, which are RuntimeErrors, into RankError."""
    try:
        yield
    except RuntimeError as error:
        # NCCL's reason is in later lines, before the traceback of torch's C++.
        why = " ".join(str(error).partition("\nException raised from")[0].split())
        raise RankError(f"a rank has ended, or {what} in time, or fails: {why}") from error
