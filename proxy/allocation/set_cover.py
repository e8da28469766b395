"""Choose few nodes whose amounts meet several needs at once.

Theory. For one resource, the nodes with the most of it are the answer. For several resources it is a covering
problem with a limited number of nodes. Weigh the resources: a node's *score* is the weighted sum of its
amounts, and if even the best scores together stay below the weighted sum of the needs, there is no choice.
That holds for any weights, so they may be chosen to decide quickly: if the best nodes by score lack a
resource, its weight goes up. Usually a few such rounds end in a choice or in the proof that there is none.

The cases in between are searched, node by node in the order of the last scores. A branch ends when the best
scores of those that remain cannot fill what is still missing; of nodes that are alike only one is tried.
After ``STEPS`` tries the search gives up and reports that there is no choice, so the time is bounded. All
numbers are integers, so no answer depends on rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

STEPS = 2000
"""How many nodes a search tries."""
_ROUNDS = 12
_SCALE = 1 << 80

Amounts = Mapping[int, tuple[int, ...]]
"""Node to its amounts, in the order of the needs."""


def choose(
    nodes: Sequence[int],
    amounts: Amounts,
    needs: Sequence[int],
    size: int,
    meets_all: Callable[[int], bool],
    apart: frozenset[int] = frozenset(),
) -> int | None:
    """Choose at most ``size`` nodes.

    Args:
        nodes: The nodes to choose from.
        amounts: The amounts that they have, at most.
        needs: The amounts that are needed, each more than 0.
        size: The largest number of nodes, at least 0.
        meets_all: Accepts or rejects NUMA nodes whose amounts are enough.
        apart: NUMA nodes that are never interchangeable with others, whatever their amounts.

    Returns:
        The bits of the nodes; None if there is no choice, or if none was found in time.
    """
    if not needs:
        return 0
    search = _CoverSearch(nodes, amounts, needs, meets_all, apart)
    weights = [max(1, _SCALE // need) for need in needs]
    for _ in range(_ROUNDS):
        search.weigh(weights)
        top = search.order[:size]
        totals = [sum(column) for column in zip(*(amounts[node] for node in top), strict=True)]
        if _score(totals or [0] * len(needs), weights) < _score(needs, weights):
            return None
        bits = sum(1 << node for node in top)
        if all(total >= need for total, need in zip(totals, needs, strict=True)) and meets_all(bits):
            return bits
        if len(needs) == 1:
            break
        weights = [
            max(1, int(weight * min(16.0, need / max(total, 1)) ** 2))
            for weight, need, total in zip(weights, needs, totals, strict=True)
        ]
    return search.walk(0, 0, size, needs)


class _CoverSearch:
    """A search in the order of scores."""

    def __init__(
        self,
        nodes: Sequence[int],
        amounts: Amounts,
        needs: Sequence[int],
        meets_all: Callable[[int], bool],
        apart: frozenset[int],
    ) -> None:
        self.order = list(nodes)
        self.amounts = amounts
        self.meets_all = meets_all
        self.apart = apart
        self.weights = [1] * len(needs)
        self.sums: list[int] = []
        self.remaining = STEPS

    def weigh(self, weights: list[int]) -> None:
        """Order the nodes by their scores under some weights."""
        scores = {node: _score(self.amounts[node], weights) for node in self.order}
        self.order.sort(key=scores.__getitem__, reverse=True)
        self.weights = weights
        self.sums = list(itertools.accumulate((scores[node] for node in self.order), initial=0))

    def walk(self, start: int, bits: int, room: int, needs: Sequence[int]) -> int | None:
        """Complete a choice with at most ``room`` of the nodes from ``start`` on."""
        if all(need <= 0 for need in needs) and self.meets_all(bits):
            return bits
        end = len(self.order)
        missing = _score([max(0, need) for need in needs], self.weights)
        at = start
        while room and at < end and self.remaining > 0:
            if self.sums[min(at + room, end)] - self.sums[at] < missing:
                return None
            self.remaining -= 1
            node = self.order[at]
            node_amounts = self.amounts[node]
            still_needed = [need - amount for need, amount in zip(needs, node_amounts, strict=True)]
            choice = self.walk(at + 1, bits | 1 << node, room - 1, still_needed)
            if choice is not None:
                return choice
            at += 1
            while at < end and node not in self.apart and self.amounts[self.order[at]] == node_amounts:
                if self.order[at] in self.apart:
                    break
                at += 1
        return None


def _score(amounts: Sequence[int], weights: Sequence[int]) -> int:
    return sum(amount * weight for amount, weight in zip(amounts, weights, strict=True))
