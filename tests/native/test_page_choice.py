"""Which pages threads choose, by what they cost: the cheaper, and the other one now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compiled import cython_module

STREAM = 16  # units of a stream of growing folios
CHEAP, DEAR = 300, 4000  # microseconds of a unit as a huge page
SMALL = 900


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cython_module(Path(__file__).with_name("choices.pyx"), tmp_path_factory.mktemp("choice"))


@pytest.fixture
def choice(choices: Any) -> Any:
    return choices.Choice()


def units_by_kind(choice: Any, units: int, huge_us: int, stream: int) -> tuple[int, int]:
    """Makes so many units ready, and returns how many of them as huge and as small pages."""
    huge = small = 0
    while huge + small < units:
        if choice.choose(stream):
            choice.took(True, huge_us)
            huge += 1
        else:
            choice.took(False, SMALL)
            small += stream
    return huge, small


def test_huge_pages_that_cost_next_to_nothing_are_never_compared(choice: Any) -> None:
    assert units_by_kind(choice, 10_000, 200, STREAM) == (10_000, 0)


def test_few_threads_try_huge_pages_of_unknown_cost(choice: Any) -> None:
    assert choice.choose(STREAM)
    assert sum(choice.choose(STREAM) for _ in range(7)) <= 1
    choice.took(True, 200)
    assert all(choice.choose(STREAM) for _ in range(8))


def test_all_threads_leave_huge_pages_that_are_dear(choice: Any) -> None:
    choice.took(True, DEAR)
    assert not any(choice.choose(STREAM) for _ in range(8))


@pytest.mark.parametrize(("stream", "share"), [(1, 0.06), (STREAM, 0.15)])
def test_dearer_pages_are_a_small_part_of_a_load(choice: Any, stream: int, share: float) -> None:
    units = 750  # 1.5 GB
    _, small = units_by_kind(choice, units, CHEAP, stream)
    assert 0 < small <= share * units


@pytest.mark.parametrize("stream", [1, STREAM])
def test_dear_huge_pages_are_tried_again_and_used_when_they_are_cheap(
    choice: Any, stream: int
) -> None:
    huge, _ = units_by_kind(choice, 750, DEAR, stream)
    assert 1 < huge <= 10
    huge, small = units_by_kind(choice, 7500, CHEAP // 2, stream)
    assert huge > 0.5 * 7500
    huge, small = units_by_kind(choice, 750, DEAR, stream)
    assert small > huge


@pytest.mark.parametrize(("before", "units"), [(0, 256), (200, 64)])
def test_single_unit_that_took_long_is_soon_forgotten(choice: Any, before: int, units: int) -> None:
    """Also if it is the first one."""
    units_by_kind(choice, before, CHEAP, 1)
    choice.took(True, 20_000)
    units_by_kind(choice, units, CHEAP, 1)
    huge, small = units_by_kind(choice, units, CHEAP, 1)
    assert huge > small


def test_huge_pages_that_become_dear_are_left_within_a_few_units(choice: Any) -> None:
    units_by_kind(choice, 200, CHEAP, 1)
    huge, _ = units_by_kind(choice, 16, DEAR, 1)
    assert huge <= 4


def test_dear_huge_pages_that_become_cheap_are_used_after_a_few_tries(choice: Any) -> None:
    """The tries follow each other at once."""
    units_by_kind(choice, 2000, DEAR, 1)
    units_by_kind(choice, 512 + 7, CHEAP, 1)
    huge, small = units_by_kind(choice, 64, CHEAP, 1)
    assert huge > small


def test_single_dear_unit_in_a_run_of_cheap_ones_does_not_change_the_choice(choice: Any) -> None:
    choice.took(False, 450)
    for _ in range(20):
        for _ in range(8):
            choice.took(True, 150)
        choice.took(True, DEAR)
        assert sum(choice.choose(STREAM) for _ in range(8)) >= 7  # small ones are tried, too


def test_single_cheap_unit_in_a_run_of_dear_ones_does_not_change_the_choice(choice: Any) -> None:
    units_by_kind(choice, 200, DEAR, 1)
    for _ in range(20):
        choice.took(True, CHEAP // 2)
        huge, _ = units_by_kind(choice, 64, DEAR, 1)
        assert huge <= 2


def test_kind_that_was_asked_for_is_not_compared(choices: Any) -> None:
    choice = choices.Choice(mode="huge")
    assert units_by_kind(choice, 100, DEAR, STREAM) == (100, 0)
    assert not choices.Choice(mode="bounce").choose(STREAM)
