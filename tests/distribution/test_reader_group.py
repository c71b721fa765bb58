"""How the ranks of a group agree on a name, over a store in this process."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest

from gdsload.distribution.reader_group import _common_name

SOON = timedelta(seconds=0.05)


class Store:
    """As much of `torch.distributed.Store` as it takes."""

    def __init__(self) -> None:
        self.counts, self.values = Counter[str](), dict[str, bytes]()

    def add(self, key: str, number: int) -> int:
        self.counts[key] += number
        return self.counts[key]

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return self.values.keys() >= set(keys)


class Interrupted(Store):
    """Ctrl-C arrives when the first rank has counted a name, and not opened it."""

    def add(self, key: str, number: int) -> int:
        super().add(key, number)
        raise KeyboardInterrupt


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr("gdsload.distribution.reader_group._store", lambda: made)
    return made


def test_ranks_meet_after_the_first_one_was_interrupted_before_it_opened_a_name(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = Interrupted()
    interrupted.counts, interrupted.values = store.counts, store.values
    with monkeypatch.context() as patched:
        patched.setattr("gdsload.distribution.reader_group._store", lambda: interrupted)
        with pytest.raises(KeyboardInterrupt), _common_name("", [0, 1], 0, SOON):
            pass
    with pytest.raises(RuntimeError, match="no answer"), _common_name("", [0, 1], 1, SOON):
        pass
    with _common_name("", [0, 1], 0, SOON) as first, _common_name("", [0, 1], 1, SOON) as second:
        assert first == second


def test_ranks_meet_after_the_first_one_came_too_late(store: Store) -> None:
    with pytest.raises(RuntimeError, match="no answer"), _common_name("", [0, 1], 1, SOON):
        pass
    with _common_name("", [0, 1], 0, SOON) as first, _common_name("", [0, 1], 1, SOON) as second:
        assert first == second


def test_closed_names_are_skipped(store: Store) -> None:
    with pytest.raises(ValueError), _common_name("", [0, 1], 0, SOON):
        raise ValueError
    with _common_name("", [0, 1], 0, SOON) as first, _common_name("", [0, 1], 1, SOON) as second:
        assert first == second
