"""The names by which ranks meet, over a store in this process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch.distributed as dist

from gdsload.distribution import reader_group

MEMBERS = [0, 1]


class Store:
    """Carries out its calls, and then raises KeyboardInterrupt in one of them."""

    def __init__(self) -> None:
        self._real = dist.HashStore()
        self._left = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)

        def call(*args: Any) -> Any:
            answer = method(*args)
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
            return answer

        return call

    def interrupt(self, call: int) -> None:
        """Raises in this one of the next calls, counted from 1."""
        self._left = call

    def interrupted(self) -> bool:
        """Whether that call was reached. Later calls do not raise."""
        left, self._left = self._left, 0
        return left <= 0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    found = Store()
    monkeypatch.setattr(reader_group, "_store", lambda: found)
    return found


def name_of(rank: int) -> AbstractContextManager[str]:
    return reader_group._common_name("", MEMBERS, rank, timedelta(0))


def assert_ranks_meet() -> None:
    with name_of(0) as first, name_of(1) as second:
        assert first == second


def test_ranks_meet_again_after_ctrl_c_in_any_call_of_the_first_rank(store: Store) -> None:
    interrupted = True
    for call in count(1):
        if not interrupted:
            break
        store.interrupt(call)
        with suppress(KeyboardInterrupt, RuntimeError), name_of(0):
            raise RuntimeError("the other rank does not come")
        interrupted = store.interrupted()
        with pytest.raises(RuntimeError, match="no answer"), name_of(1):
            pass
        assert_ranks_meet()


@pytest.mark.parametrize("opened", [True, False])
def test_ranks_meet_again_after_ctrl_c_in_any_call_of_another_rank(
    store: Store, opened: bool
) -> None:
    interrupted = True
    for call in count(1):
        if not interrupted:
            break
        with suppress(RuntimeError), name_of(0) if opened else nullcontext():
            store.interrupt(call)
            with suppress(KeyboardInterrupt, RuntimeError), name_of(1):
                pass
            interrupted = store.interrupted()
            raise RuntimeError("the other rank does not come")
        assert_ranks_meet()
