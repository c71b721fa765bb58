"""The ranks that read a checkpoint together, and what they say to each other.

Bytes in host memory and all messages about errors go through a gloo group of its own, whose
time-out ends every wait; bytes in device memory go through NCCL. Not responsible for what is sent
(`shares`, `exchange`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from gdsload.errors import RankError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

READERS = ("node", "group")
_BACKEND = "gdsload_gloo"
_DIFFERENT_READERS = "the ranks of one load were given different readers="


class ReaderGroup:
    """The ranks that share the reads of one load. All of them create it at the same time.

    Attributes:
        size: The number of ranks that share the reads.
        rank: The number of this rank among them.
        numbers: The ranks of the caller's group that share the reads, in order.
        whole_size: The number of ranks of the caller's group.
    """

    def __init__(self, group: ProcessGroup, readers: str, timeout_seconds: float) -> None:
        """Connects the ranks.

        Args:
            group: A group of torch.distributed that this rank belongs to.
            readers: "node": the ranks of each node read the whole checkpoint for their node.
                "group": all ranks of the group read it once.
            timeout_seconds: Every wait for another rank ends after this time.

        Raises:
            ValueError: `readers` is unknown, or this rank does not belong to the group.
            RankError: Another rank did not come in time.
        """
        import torch.distributed as dist

        require_readers(readers)
        self._timeout = timedelta(seconds=timeout_seconds)
        everyone = dist.get_process_group_ranks(group)
        me = dist.get_rank()
        if me not in everyone:
            raise ValueError(f"rank {me} does not belong to the group of ranks {everyone}")
        members = everyone if readers == "group" else self._on_this_node(everyone, me)
        self._members = members
        self.size, self.rank = len(members), members.index(me)
        self.numbers = [everyone.index(member) for member in members]
        self.whole_size = len(everyone)
        self._control = self._new_group(members, "gloo")
        self._data: Any = None  # for bytes in device memory
        self._talks = True  # the next thing that all ranks do is to agree

    def _new_group(self, members: Sequence[int], backend: str) -> Any:
        import torch.distributed as dist

        if backend == "gloo":
            backend = _gloo()
        with _rank_errors("does not join the load"):
            return dist.new_group(
                members, timeout=self._timeout, backend=backend, use_local_synchronization=True
            )

    def _on_this_node(self, everyone: list[int], me: int) -> list[int]:
        """The ranks on this node, as torchrun says, else by the identity of the running kernel."""
        try:
            rank, local, count = (
                int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            )
        except (KeyError, ValueError):
            pass
        else:
            if rank == me and 0 <= local < count:
                return [each for each in everyone if rank - local <= each < rank - local + count]
        control = self._new_group(everyone, "gloo")
        try:
            nodes = _gathered(control, node_id(), len(everyone))
        finally:
            _destroyed(control)
        if not all(isinstance(node, str) for node in nodes):
            raise ValueError(_DIFFERENT_READERS)
        return [each for each, node in zip(everyone, nodes, strict=True) if node == node_id()]

    def agree(self, state: Any = None) -> list[Any]:
        """The states of all ranks, when all of them have come here without an error.

        Raises RankError if one of them has failed, or does not come in time, and ValueError if they
        were given different `readers`.
        """
        answers = _gathered(self._control, ("", state), self.size)
        if any(isinstance(answer, str) for answer in answers):  # the name of a node
            self._talks = False
            raise ValueError(_DIFFERENT_READERS)
        for member, (failure, _) in zip(self._members, answers, strict=True):
            if failure:
                self._talks = False
                raise RankError(f"rank {member} failed: {failure}", rank=member)
        return [answer for _, answer in answers]

    def connect_devices(self) -> None:
        """Prepares the exchange of bytes in device memory. All ranks call it at the same time.

        Not over the caller's group: its operations, in another thread, could be ordered differently
        on another rank.
        """
        self._data = self._new_group(self._members, "nccl")

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
            self._tell("it closed the stream" if early else f"{type(error).__name__}: {error}")
            raise

    def _tell(self, failure: str) -> None:
        if self._talks:
            self._talks = False
            with suppress(RankError):
                _gathered(self._control, (failure, None), self.size)

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
        """Sends and receives tensors of bytes in the memory of `device`, and waits for them.

        Args:
            sent: (rank among the readers, contiguous tensor). Between two ranks the order counts.
            received: (rank among the readers, contiguous tensor to fill).
            device: "cpu" or "cuda:N".

        Raises:
            RankError: Another rank has died, or does not answer in time.
        """
        import torch.distributed as dist

        group = self._control if device == "cpu" else self._data
        ops = [
            dist.P2POp(operation, tensor, self._members[peer], group)
            for operation, messages in ((dist.isend, sent), (dist.irecv, received))
            for peer, tensor in messages
        ]
        if not ops:
            return
        with _rank_errors("does not answer"):
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            if device != "cpu":
                import torch

                # The bytes may be used on any stream, and what was sent may be freed.
                torch.cuda.current_stream(device).synchronize()

    def close(self) -> None:
        """Closes the connections. Another rank that still waits gets RankError."""
        for group in (self._data, self._control):
            if group is not None:
                _destroyed(group)

    def __enter__(self) -> ReaderGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def require_readers(readers: str) -> None:
    """Raises ValueError for an unknown value of `readers`."""
    if readers not in READERS:
        raise ValueError(f'readers={readers!r} must be one of "node", "group"')


def _gloo() -> str:
    """The name of a backend: gloo with keys of its own in the store where the ranks meet.

    Before torch 2.15, two groups of the same ranks have the same keys if the first is destroyed
    before the second is created: a rank would find the addresses of an earlier load there.
    """
    import torch.distributed as dist

    def created(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        number = (store.add("groups", 1) - 1) // size
        keys = dist.PrefixStore(str(number), store)  # type: ignore[attr-defined]
        return dist.ProcessGroupGloo(keys, rank, size, timeout)

    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, created, devices=["cpu"])
    return _BACKEND


def node_id() -> str:
    """The identity of the running kernel: equal in all containers of a machine."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return socket.gethostname()


def _gathered(group: Any, state: Any, size: int) -> list[Any]:
    import torch.distributed as dist

    states: list[Any] = [None] * size
    with _rank_errors("does not answer"):
        dist.all_gather_object(states, state, group=group)
    return states


@contextmanager
def _rank_errors(what: str) -> Iterator[None]:
    """Turns errors of torch.distributed, which are RuntimeErrors, into RankError."""
    try:
        yield
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise RankError(f"a rank has ended, or {what} in time: {why}") from error


def _destroyed(group: Any) -> None:
    import torch.distributed as dist

    with suppress(RuntimeError, ValueError, AssertionError):  # broken, or the default group ended
        dist.destroy_process_group(group)
