"""Which NUMA nodes share a request, and how much each gives.

Theory (kubelet 1.36, reference C.5). A request of n CPUs in groups of g is spread evenly over k nodes, with k
as small as can be. Each of the k gives d, the largest multiple of g that is at most n/k; what is left over,
fewer than k groups, comes in rounds of one group each from some of them. Of all choices of k nodes and of who
gives the rest, the one wins after which the free CPUs of the nodes are most alike: the standard deviation,
to 3 decimals (and of a mean to 3 decimals), is smallest; of equals the first in list order.

Two faults of kubelet are absent. There the best choice is kept by reference and later overwritten on machines
with more than four nodes, so that other nodes are used than were scored; here it is a value. And there the
rounds never end when the givers have enough CPUs but not enough groups; here a set of givers counts only what
they have in whole groups.

Cost. Nodes that stand next to each other with the same free count are interchangeable: exchanging them
changes neither the deviation nor the rounds, and the first choice in list order takes the first of them. So
only choices that take the first of each such run are looked at. That is still exponential for nodes
that are all different, hence ``LIMIT``. It cannot be reached with up to eight nodes (k of them and some of
those: 3^8 = 6561 choices in all), so the result is exact wherever kubelet gives one. Beyond it the k
fullest nodes give, and the rest comes from the fullest few of them. When nothing is left over this, too, is
the most even choice: the sum of squares after taking d from each of k nodes falls by 2d times their sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LIMIT = 10_000
"""Choices that are scored for one k before the search turns to the fullest nodes only."""


@dataclass(frozen=True, slots=True)
class Split:
    """Who gives how much.

    Attributes:
        each: CPUs that every member gives.
        members: Positions of the nodes, ascending.
        extra: Positions of those that give the rest, in rounds of one group.
    """

    each: int
    members: tuple[int, ...]
    extra: tuple[int, ...] = ()


def split(counts: Sequence[int], n: int, group: int, fewest: int) -> Split | None:
    """Spread a request over nodes.

    Args:
        counts: Free CPUs of every node that has any, in allocation order.
        n: CPUs wanted, at least 1 and a multiple of ``group``.
        group: CPUs that must stay together.
        fewest: The number of nodes to begin with.

    Returns:
        The choice, or None when no number of nodes can share the request evenly.
    """
    for k in range(max(fewest, 1), min(n // group, len(counts)) + 1):
        found = _Search(counts, n, group, k).best()
        if found is not None:
            return found
    return None


class _Search:
    """The best choice of k nodes."""

    def __init__(self, counts: Sequence[int], n: int, group: int, k: int) -> None:
        self.counts = counts
        self.group = group
        self.need = n
        self.k = k
        self.each = n // k // group * group
        self.rest = n - self.each * k
        self.mean = math.floor((sum(counts) - n) / len(counts) * 1000 + 0.5) / 1000
        self.total = sum(counts) - n
        self.score: tuple[float, int] | None = None
        self.found: Split | None = None
        self.scored = 0

    def best(self) -> Split | None:
        """Give the first of the best choices, or None when no k nodes can do it."""
        usable = [i for i, count in enumerate(self.counts) if count >= self.each]
        for chosen in first_choices([self.counts[i] for i in usable], self.k):
            self.try_members(tuple(usable[i] for i in chosen))
            if self.scored > LIMIT:
                return self.fullest(usable)
            if self.score is not None and self.score[0] == 0:
                break
        return self.found

    def try_members(self, members: tuple[int, ...]) -> None:
        counts, group = self.counts, self.group
        if sum(counts[i] // group for i in members) * group < self.need:
            self.scored += 1
            return
        if not self.rest:
            self.consider(members, (), {})
            return
        givers = [i for i in members if counts[i] - self.each >= group]
        for size in range(len(givers), 0, -1):
            for chosen in first_choices([counts[i] for i in givers], size):
                self.try_extra(members, tuple(givers[i] for i in chosen))
                if self.scored > LIMIT:
                    return

    def try_extra(self, members: tuple[int, ...], extra: tuple[int, ...]) -> None:
        left = {i: self.counts[i] - self.each for i in extra}
        self.scored += 1
        if sum(count // self.group for count in left.values()) * self.group >= self.rest:
            hand_out(left, extra, self.rest, self.group)
            self.consider(members, extra, left)

    def consider(self, members: tuple[int, ...], extra: tuple[int, ...], left: dict[int, int]) -> None:
        """Keep a choice if it leaves the nodes more alike than the best so far."""
        self.scored += not extra
        squares = sum(count * count for count in self.counts)
        for i in members:
            after = left.get(i, self.counts[i] - self.each)
            squares += after * after - self.counts[i] * self.counts[i]
        if self.score is not None and squares >= self.score[1]:
            return  # the deviation grows with the squares, for the mean is the same for all choices
        deviation = self.deviation(squares)
        if self.score is None or deviation < self.score[0]:
            self.score = deviation, squares
            self.found = Split(self.each, members, extra)

    def deviation(self, squares: int) -> float:
        size, mean = len(self.counts), self.mean
        variance = (squares - 2 * mean * self.total + size * mean * mean) / size
        return math.floor(math.sqrt(max(variance, 0.0)) * 1000 + 0.5) / 1000

    def fullest(self, usable: list[int]) -> Split | None:
        """Give the choice of the fullest nodes; for when there are too many to look at."""
        by_count = sorted(usable, key=lambda i: (-self.counts[i], i))
        members = tuple(sorted(by_count[: self.k]))
        self.score, self.found = None, None
        if sum(self.counts[i] // self.group for i in members) * self.group < self.need:
            return None
        if not self.rest:
            return Split(self.each, members)
        for size in range(self.k, 0, -1):
            self.try_extra(members, tuple(sorted(by_count[:size])))
        return self.found


def hand_out(left: dict[int, int], order: Sequence[int], rest: int, group: int) -> list[int]:
    """Take ``rest`` in rounds of one group, from each that still has one.

    Args:
        left: What each has; reduced in place. In whole groups it must be at least ``rest`` altogether.
        order: Who gives, in order.
        rest: CPUs to hand out, a multiple of ``group``.
        group: CPUs that must stay together.

    Returns:
        Who gave, group by group.
    """
    gave = []
    while rest > 0:
        for i in order:
            if rest > 0 and left[i] >= group:
                left[i] -= group
                rest -= group
                gave.append(i)
    return gave


def first_choices(counts: Sequence[int], k: int) -> Iterator[tuple[int, ...]]:
    """Give the ways to choose k positions in list order, without those that an earlier one stands for.

    A run of equal counts is used from its start: of the ways that differ only in which of the run they take,
    the first is given.
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
