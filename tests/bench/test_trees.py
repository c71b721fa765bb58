"""The model of trees agrees with a simulation of their requests."""

from __future__ import annotations

import pytest

from gdsload.cli import measuring

trees = measuring.program("trees")


def simulated(pieces: int, replicas: int, fanout: int, rates: trees.Rates) -> float:  # type: ignore[name-defined]
    """Seconds until all replicas have all pieces. Requests of a reader share its rate, and a piece
    can be asked for when the parent has it and the next one."""
    step = trees.PIECE_BYTES / rates.receive / 10
    rate = trees.edge(rates, min(fanout, replicas))
    left = [[float(trees.PIECE_BYTES)] * pieces for _ in range(replicas + 1)]
    left[0] = [0.0] * pieces
    known = [[-1.0] * pieces] + [[float("inf")] * pieces for _ in range(replicas)]
    now = 0.0
    while any(map(any, left)):
        now += step
        for node in range(1, replicas + 1):
            parent = known[(node - 1) // fanout]
            active = [
                piece
                for piece in range(pieces)
                if left[node][piece]
                and max(parent[piece : piece + 2]) + trees.LATENCY * (node > fanout) < now
            ][: trees.IN_FLIGHT]
            for piece in active:
                left[node][piece] = max(left[node][piece] - step * rate / len(active), 0.0)
                if not left[node][piece]:
                    known[node][piece] = now
    return now


@pytest.mark.parametrize(("replicas", "fanout"), [(1, 1), (3, 1), (6, 2), (4, 4)])
def test_model_of_a_tree_is_the_time_of_its_simulation(replicas: int, fanout: int) -> None:
    pieces, rates = 80, trees.Rates(1e9, 3e9)
    found = simulated(pieces, replicas, fanout, rates)
    modelled = trees.tree_seconds(pieces * trees.PIECE_BYTES, replicas, fanout, rates)
    assert modelled == pytest.approx(found, rel=0.08)


def test_levels_hold_all_replicas() -> None:
    assert [trees.levels(count, 2) for count in (1, 2, 3, 6, 7, 14, 15)] == [1, 1, 2, 2, 3, 3, 4]
    assert trees.levels(1_000, 1) == 1_000


def test_tree_equals_the_store_for_one_replica_and_beats_it_for_many() -> None:
    rates = trees.Rates(trees.LINK, trees.LINK)
    shared = [trees.shared_seconds(1e11, count, trees.LINK, trees.STORE) for count in (1, 1_000)]
    tree = [trees.tree_seconds(1e11, count, 2, rates) for count in (1, 1_000)]
    assert shared[0] == pytest.approx(tree[0])
    assert tree[1] < 0.01 * shared[1]
