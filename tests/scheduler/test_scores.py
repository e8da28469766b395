"""Scores, with the vectors of Volcano's plugin."""

from __future__ import annotations

import pytest

from proxy.scheduler.scores import Strategy, allocation_score, volcano_scores


@pytest.mark.parametrize(
    ("counts", "scores"),
    [
        ((1, 2), [50, 0]),
        ((1, 3), [67, 0]),
        ((2, 2), [0, 0]),
        ((1, 2, 4), [75, 50, 0]),
        ((0, 0), [100, 100]),
        ((), []),
    ],
)
def test_fewer_numa_nodes_score_higher_under_volcano(counts: tuple[int, ...], scores: list[int]) -> None:
    assert volcano_scores(counts) == scores


@pytest.mark.parametrize(
    ("strategy", "fractions", "score"),
    [
        (Strategy.LEAST_ALLOCATED, (0.25, 0.75), 50),
        (Strategy.LEAST_ALLOCATED, (1.5, 0.0), 50),
        (Strategy.MOST_ALLOCATED, (0.25, 0.75), 50),
        (Strategy.MOST_ALLOCATED, (1.5,), 100),
        (Strategy.BALANCED_ALLOCATION, (0.5, 0.5), 100),
        (Strategy.BALANCED_ALLOCATION, (0.0, 1.0), 75),
        (Strategy.LEAST_ALLOCATED, (), 0),
    ],
)
def test_scores_of_allocation_follow_the_strategy(
    strategy: Strategy, fractions: tuple[float, ...], score: int
) -> None:
    assert allocation_score(fractions, strategy) == score
