"""Arrivals know which ranges are there, and wake those who wait for one."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings, strategies as st

from gdsload.peers.arrivals import Arrivals

LONG = 60.0
SIZE = 24


@settings(deadline=None)
@given(st.permutations(range(SIZE)), st.lists(st.integers(1, 5), min_size=SIZE), st.data())
def test_range_is_there_when_all_its_bytes_have_arrived(
    order: list[int], lengths: list[int], data: st.DataObject
) -> None:
    arrivals, there = Arrivals(), set[int]()
    for start, length in zip(order[: data.draw(st.integers(0, SIZE))], lengths, strict=False):
        arrived = set(range(start, start + length)) - there
        for byte in arrived:
            arrivals.add("f", byte, byte + 1)
        there |= arrived
    assert arrivals.nbytes == len(there)
    offset, nbytes = data.draw(st.integers(0, SIZE)), data.draw(st.integers(1, 6))
    assert arrivals.has("f", offset, nbytes) == (set(range(offset, offset + nbytes)) <= there)
    assert not arrivals.has("other", offset, nbytes)


def test_reader_is_woken_by_the_last_byte_of_its_range() -> None:
    async def run() -> None:
        arrivals = Arrivals()
        waiting = asyncio.create_task(arrivals.wait_for("f", 2, 4, LONG))
        other = asyncio.create_task(arrivals.wait_for("f", 6, 4, 0.01))
        for start in (4, 0):
            await asyncio.sleep(0)
            assert not waiting.done()
            arrivals.add("f", start, start + 3 + (start == 0))
        assert await waiting
        assert not await other

    asyncio.run(run())


def test_failure_ends_the_wait_for_missing_bytes_only() -> None:
    async def run() -> None:
        arrivals = Arrivals()
        arrivals.add("f", 0, 3)
        waiting = asyncio.create_task(arrivals.wait_for("f", 1, 3, LONG))
        await asyncio.sleep(0)
        await arrivals.end("the disk is gone")
        assert waiting.done()
        assert not waiting.result()
        assert await arrivals.wait_for("f", 1, 2, LONG)

    asyncio.run(run())


def test_cancellation_is_not_lost_when_a_range_arrives_at_that_moment() -> None:
    async def main() -> None:
        arrivals = Arrivals()
        waiting = asyncio.create_task(arrivals.wait_for("f", 0, 4, 60))
        while not arrivals._waiting:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # it has begun to wait
        arrivals.add("f", 0, 4)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
