"""Tickets: the bound on reads in flight at one source, shared fairly among its readers.

A reader takes a ticket before it reads and gives it back afterwards. Readers that wait take turns,
each within its own limit. A ticket that is not renewed expires, so that a reader that hangs cannot
keep others waiting. Everything here runs in one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class Ticket:
    """The right to one read at a time, until it expires."""

    def __init__(self, reader: str) -> None:
        self.reader = reader
        self.valid = True
        self.expiry: asyncio.TimerHandle | None = None


class Tickets:
    """The tickets of one source.

    Args:
        total: The largest number of valid tickets.
        per_reader: The largest number of one reader.
        lease_seconds: How long a ticket is valid after it was taken or renewed.
    """

    def __init__(self, total: int, per_reader: int, lease_seconds: float) -> None:
        self.total, self.per_reader, self.lease_seconds = total, per_reader, lease_seconds
        self.held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[Ticket]]] = {}  # in the order of turns

    @property
    def in_flight(self) -> int:
        """The number of valid tickets."""
        return self.held.total()

    async def take(self, reader: str, seconds: float) -> Ticket | None:
        """A ticket; None if no turn came within `seconds`."""
        turn: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(reader, deque()).append(turn)
        self._grant()
        try:
            await asyncio.wait([turn], timeout=seconds)
        except asyncio.CancelledError:
            if turn.done():
                self.give_back(turn.result())
            self._forget(reader, turn)
            raise
        if turn.done():
            return turn.result()
        self._forget(reader, turn)
        return None

    def _forget(self, reader: str, turn: asyncio.Future[Ticket]) -> None:
        turns = self._waiting.get(reader)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[reader]

    def renew(self, ticket: Ticket) -> bool:
        """Starts the lease again. False if the ticket is not valid any more."""
        if ticket.valid:
            self._start_lease(ticket)
        return ticket.valid

    def give_back(self, ticket: Ticket) -> bool:
        """Ends a ticket. False if it was not valid any more."""
        if not ticket.valid:
            return False
        ticket.valid = False
        if ticket.expiry is not None:
            ticket.expiry.cancel()
        self.held[ticket.reader] -= 1
        if not self.held[ticket.reader]:
            del self.held[ticket.reader]
        self._grant()
        return True

    async def drained(self) -> None:
        """Waits until no ticket is valid: for the length of a lease at most."""
        while self.in_flight:
            await asyncio.sleep(0.005)

    def _grant(self) -> None:
        while self.in_flight < self.total:
            reader = next(
                (each for each in self._waiting if self.held[each] < self.per_reader), None
            )
            if reader is None:
                return
            turns = self._waiting.pop(reader)
            turn = turns.popleft()
            if turns:
                self._waiting[reader] = turns  # at the end: the others come first
            ticket = Ticket(reader)
            self.held[reader] += 1
            self._start_lease(ticket)
            turn.set_result(ticket)

    def _start_lease(self, ticket: Ticket) -> None:
        if ticket.expiry is not None:
            ticket.expiry.cancel()
        loop = asyncio.get_running_loop()
        ticket.expiry = loop.call_later(self.lease_seconds, self.give_back, ticket)
