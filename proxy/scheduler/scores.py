"""Scores of nodes, 0 to 100.

Volcano's (Volcano v1.12 pkg/scheduler/plugins/numaaware ``batchNodeOrderFn``): if the pod needs c NUMA nodes
on a node and at most max on any candidate, the score is weight x (100 - 100 x c / max) in whole numbers. Only
the relation
counts: if every candidate needs one NUMA node, every one gets 0; if none needs any, every one gets the full
score.

Least, Most and Balanced allocation, as kube-scheduler, Koordinator and scheduler-plugins have them: if f is
the fraction of each resource that would be requested, the score is the mean of 1 - f, the mean of f, or 1
minus the variance of f. A resource that would be overcommitted counts 0 under Least and 1 under Most.

There are also Least and Most over the NUMA nodes that the pod would use, not over the whole node, as
Koordinator scores nodes with a NUMA policy (Koordinator v1.8
pkg/scheduler/plugins/nodenumaresource/scoring.go): a node's label ``numa-allocate-strategy`` decides between
Least and Most before the setting does.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from proxy.model.koordinator import NumaStrategy

HIGHEST = 100


class Strategy(enum.StrEnum):
    """How nodes that fit are ordered."""

    FEWEST_NUMA_NODES = "fewest-numa-nodes"
    LEAST_ALLOCATED = "least-allocated"
    MOST_ALLOCATED = "most-allocated"
    BALANCED_ALLOCATION = "balanced-allocation"
    NUMA_LEAST_ALLOCATED = "numa-least-allocated"
    NUMA_MOST_ALLOCATED = "numa-most-allocated"


def numa_strategy(strategy: Strategy, label: NumaStrategy) -> Strategy | None:
    """Return Least or Most if a strategy scores NUMA nodes; None if it does not.

    Args:
        strategy: The setting.
        label: ``numa-allocate-strategy`` of the node.
    """
    if strategy not in (Strategy.NUMA_LEAST_ALLOCATED, Strategy.NUMA_MOST_ALLOCATED):
        return None
    most = strategy is Strategy.NUMA_MOST_ALLOCATED
    if label is not NumaStrategy.NONE:
        most = label is NumaStrategy.MOST_ALLOCATED  # any other value: LeastAllocated, as in Koordinator
    return Strategy.MOST_ALLOCATED if most else Strategy.LEAST_ALLOCATED


def volcano_scores(counts: Sequence[int]) -> list[int]:
    """Return Volcano's scores.

    Args:
        counts: NUMA nodes that the pod would use on each candidate.
    """
    most = max(counts, default=0)
    score_of = {count: HIGHEST - (HIGHEST * count // most if most else 0) for count in set(counts)}
    return list(map(score_of.__getitem__, counts))


def allocation_score(fractions: Sequence[float], strategy: Strategy) -> int:
    """Return the score of a node by the fractions of it that would be requested.

    Args:
        fractions: Of each resource that counts, 1 for all of it.
        strategy: Least, Most or Balanced.
    """
    if not fractions:
        return 0
    capped = [min(fraction, 1.0) for fraction in fractions]
    mean = sum(capped) / len(capped)
    if strategy is Strategy.LEAST_ALLOCATED:
        return int(HIGHEST * (1 - mean))
    if strategy is Strategy.MOST_ALLOCATED:
        return int(HIGHEST * mean)
    return int(HIGHEST * (1 - sum((fraction - mean) ** 2 for fraction in capped) / len(capped)))
