"""Tickets bound the reads of one source, and readers take turns."""

from __future__ import annotations

import asyncio

from gdsload.peers.tickets import Ticket, Tickets

LONG = 60.0


async def taken(tickets: Tickets, reader: str) -> Ticket:
    ticket = await tickets.take(reader, LONG)
    assert ticket is not None
    return ticket


def test_reader_takes_no_more_than_its_share() -> None:
    async def run() -> None:
        tickets = Tickets(total=8, per_reader=2, lease_seconds=LONG)
        await taken(tickets, "a")
        await taken(tickets, "a")
        assert await tickets.take("a", 0.01) is None
        assert tickets.in_flight == 2
        await taken(tickets, "b")

    asyncio.run(run())


def test_waiting_readers_take_turns() -> None:
    async def run() -> None:
        tickets = Tickets(total=1, per_reader=1, lease_seconds=LONG)
        held = await taken(tickets, "first")
        waiting = [asyncio.create_task(taken(tickets, reader)) for reader in "aaabbc"]
        order = []
        for _ in range(len(waiting)):
            await asyncio.sleep(0)
            tickets.give_back(held)
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            (ended,) = done
            waiting.remove(ended)
            held = ended.result()
            order.append(held.reader)
        assert order == ["a", "b", "c", "a", "b", "a"]

    asyncio.run(run())


def test_ticket_that_is_not_renewed_expires() -> None:
    async def run() -> None:
        tickets = Tickets(total=1, per_reader=1, lease_seconds=0.02)
        hung = await taken(tickets, "hung")
        await taken(tickets, "waiting")
        assert not tickets.renew(hung)
        assert not tickets.give_back(hung)
        await tickets.drained()
        assert tickets.in_flight == 0

    asyncio.run(run())


def test_renewed_ticket_stays_valid() -> None:
    async def run() -> None:
        tickets = Tickets(total=1, per_reader=1, lease_seconds=5.0)
        ticket = await taken(tickets, "a")
        before = ticket.expiry
        assert tickets.renew(ticket)
        assert before is not None and before.cancelled()
        assert tickets.give_back(ticket)

    asyncio.run(run())


def test_cancelled_wait_keeps_no_ticket() -> None:
    async def run() -> None:
        tickets = Tickets(total=1, per_reader=1, lease_seconds=LONG)
        held = await taken(tickets, "a")
        gone = asyncio.create_task(taken(tickets, "gone"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        tickets.give_back(held)
        assert tickets.in_flight == 0
        await taken(tickets, "b")

    asyncio.run(run())
