"""Divide a request for CPUs evenly over NUMA nodes.

Source: kubernetes v1.36, pkg/kubelet/cm/cpumanager/cpu_assignment.go ``takeByTopologyNUMADistributed``. A
request of n CPUs in groups of g is spread evenly over k nodes, with k as small as possible. Each of the k
gives d, the largest multiple of g that is at most n/k; the rest, fewer than k groups, is taken from some of
them in rounds of one group each. There are many choices of the k nodes, and of those among them that give the
rest. The choice wins that leaves the free CPUs of the nodes most alike: the one with the smallest standard
deviation, to 3 decimals (and from a mean to 3 decimals). Of equal choices the first in list order wins.

Two faults of kubelet are avoided. kubelet keeps the best choice by reference and later overwrites it on
machines with more than four nodes, so that it uses other nodes than it scored; here the choice is a value.
And kubelet's rounds never end if the givers have enough CPUs but not enough groups; here only the whole
groups of the givers count.

Cost. The *fullest* nodes are those with the most free CPUs. If nothing is left over, the evenest choices are
those of the fullest nodes (after taking d from each of k nodes the sum of squares has fallen by 2d times
their sum), and the first of them in list order is found node by node. Otherwise the choices are tried one by
one, with two exact shortcuts. Nodes that are next to each other in the list and have the same free count are
interchangeable, so only choices that take the first of each such run are tried. And no choice is more even
than *levelling*: among the k fullest nodes, every left-over group is taken from the node that is fullest at
that moment (replacing a node by a fuller one, or moving a group to a fuller one, never makes the sum of
squares larger). So the search ends when a choice is as even as that.

The remaining search is exponential in nodes that are all different. For up to ``KUBELET_NODES`` nodes it is
completed. For more nodes, for which kubelet would not end in a useful time, ``LIMIT`` choices are tried; then
levelling itself is the answer. It is at least as even as kubelet's choice and takes a few microseconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from msgspec import Struct

KUBELET_NODES = 8
"""Up to this many nodes (kubelet's default limit) the choice is always kubelet's."""
LIMIT = 250
"""Choices that are scored on a machine with more nodes before levelling takes over."""


class Split(Struct, frozen=True):
    """How much each NUMA node gives.

    Attributes:
        per_node: CPUs that every member gives.
        members: Indices of the nodes, ascending.
        extra: Indices of the nodes that give the rest, one entry for each group.
    """

    per_node: int
    members: tuple[int, ...]
    extra: tuple[int, ...] = ()


def split(counts: Sequence[int], n: int, group: int, fewest: int) -> Split | None:
    """Spread a request over nodes.

    Args:
        counts: Free CPUs of every node that has any, in allocation order.
        n: CPUs requested, at least 1 and a multiple of ``group``.
        group: CPUs that must stay together.
        fewest: The number of nodes to begin with.

    Returns:
        The choice, or None when no number of nodes can share the request evenly.
    """
    for k in range(max(fewest, 1), min(n // group, len(counts)) + 1):
        choice = _SplitSearch(counts, n, group, k).best()
        if choice is not None:
            return choice
    return None


class _SplitSearch:
    """The best choice of k nodes."""

    def __init__(self, counts: Sequence[int], n: int, group: int, k: int) -> None:
        self.counts = counts
        self.group = group
        self.need = n
        self.k = k
        self.per_node = n // k // group * group
        self.rest = n - self.per_node * k
        self.mean = math.floor((sum(counts) - n) / len(counts) * 1000 + 0.5) / 1000
        self.total = sum(counts) - n
        self.squares = sum(count * count for count in counts)
        self.score: float | None = None
        self.found: Split | None = None
        self.scored = 0
        self.goal: float  # what levelling reaches

    def best(self) -> Split | None:
        """Return the first of the best choices, or None when no k nodes can do it."""
        usable = [i for i, count in enumerate(self.counts) if count >= self.per_node]
        fullest = sorted(usable, key=lambda i: (-self.counts[i], i))[: self.k]
        if len(fullest) < self.k or self.groups(fullest) * self.group < self.need:
            return None
        if not self.rest:
            return Split(self.per_node, self.first_even(usable, sum(self.counts[i] for i in fullest)))
        levelled, squares = self.level(sorted(fullest))
        self.goal = self.deviation(squares)
        for chosen in first_choices([self.counts[i] for i in usable], self.k):
            self.try_members(tuple(usable[i] for i in chosen))
            if self.done:
                break
            if self.over:
                return levelled
        return self.found

    def groups(self, members: Sequence[int]) -> int:
        """Return how many groups nodes have free."""
        return sum(self.counts[i] // self.group for i in members)

    def first_even(self, usable: Sequence[int], most: int) -> tuple[int, ...]:
        """Return the first k nodes that leave the rest as even as the k fullest, which have ``most`` free."""
        goal, least = self.deviation(self.evenly(most)), most
        while least > 0 and self.deviation(self.evenly(least - 1)) == goal:
            least -= 1
        members: list[int] = []
        total = 0
        for at, i in enumerate(usable):
            next_fullest = sorted((self.counts[j] for j in usable[at + 1 :]), reverse=True)
            next_fullest = next_fullest[: self.k - len(members) - 1]
            if (
                len(next_fullest) == self.k - len(members) - 1
                and total + self.counts[i] + sum(next_fullest) >= least
            ):
                members.append(i)
                total += self.counts[i]
            if len(members) == self.k:
                break
        return tuple(members)

    def level(self, members: Sequence[int]) -> tuple[Split, int]:
        """Return the split that takes every extra group from the fullest node, and its sum of squares."""
        squares = self.evenly(sum(self.counts[i] for i in members))
        heap = [(self.per_node - self.counts[i], i) for i in members]
        heapq.heapify(heap)
        givers = []
        for _ in range(self.rest // self.group):
            negative_free, i = heap[0]
            givers.append(i)
            squares += self.group * (self.group + 2 * negative_free)
            heapq.heapreplace(heap, (negative_free + self.group, i))
        return Split(self.per_node, tuple(members), tuple(givers)), squares

    def evenly(self, total: int) -> int:
        """Return the sum of squares after k nodes, which have ``total`` free, gave the same."""
        return self.squares + self.k * self.per_node * self.per_node - 2 * self.per_node * total

    @property
    def done(self) -> bool:
        """True when no choice can be better than what was found."""
        return self.score is not None and self.score <= self.goal

    @property
    def over(self) -> bool:
        """True when enough choices have been tried."""
        return len(self.counts) > KUBELET_NODES and self.scored > LIMIT

    def try_members(self, members: tuple[int, ...]) -> None:
        self.scored += 1
        counts = self.counts
        givers = [i for i in members if counts[i] - self.per_node >= self.group]
        for size in range(len(givers), 0, -1):
            for chosen in first_choices([counts[i] for i in givers], size):
                self.try_extra(members, tuple(givers[i] for i in chosen))
                if self.done or self.over:
                    return

    def try_extra(self, members: tuple[int, ...], extra: tuple[int, ...]) -> None:
        """Keep a choice if it leaves the nodes more alike than the best so far."""
        remaining = {i: self.counts[i] - self.per_node for i in extra}
        self.scored += 1
        if sum(count // self.group for count in remaining.values()) * self.group < self.rest:
            return
        order = hand_out(remaining, extra, self.rest, self.group)
        squares = self.evenly(sum(self.counts[i] for i in members))
        for i, after in remaining.items():
            squares += after * after - (self.counts[i] - self.per_node) ** 2
        deviation = self.deviation(squares)
        if self.score is None or deviation < self.score:
            self.score = deviation
            self.found = Split(self.per_node, members, tuple(order))

    def deviation(self, squares: int) -> float:
        size, mean = len(self.counts), self.mean
        variance = (squares - 2 * mean * self.total + size * mean * mean) / size
        return math.floor(math.sqrt(max(variance, 0.0)) * 1000 + 0.5) / 1000


def hand_out(remaining: dict[int, int], order: Sequence[int], rest: int, group: int) -> list[int]:
    """Take ``rest`` in rounds of one group from each node that still has one.

    Args:
        remaining: The CPUs that each node has; reduced in place. In whole groups they must be at least
            ``rest``.
        order: The nodes that give, in order.
        rest: CPUs to hand out, a multiple of ``group``.
        group: CPUs that must stay together.

    Returns:
        The nodes that gave, group by group.
    """
    givers = []
    while rest > 0:
        for i in order:
            if rest > 0 and remaining[i] >= group:
                remaining[i] -= group
                rest -= group
                givers.append(i)
    return givers


def first_choices(counts: Sequence[int], k: int) -> Iterator[tuple[int, ...]]:
    """Return the ways to choose k indices in list order, without those that an earlier one represents.

    A run of equal counts is used from its start: of the ways that differ only in which members of the run
    they take, the first is given.
    """
    chosen: list[int] = []

    def extend(start: int) -> Iterator[tuple[int, ...]]:
        if len(chosen) == k:
            yield tuple(chosen)
            return
        for i in range(start, len(counts) - (k - len(chosen)) + 1):
            if i > start and counts[i] == counts[i - 1]:
                continue
            chosen.append(i)
            yield from extend(i + 1)
            chosen.pop()

    return extend(0)
