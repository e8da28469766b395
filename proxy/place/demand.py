"""Amounts that lie on NUMA nodes, and how few nodes can meet a demand for them.

Theory. A demand sums lots that lie on nodes; a lot on several nodes (a device with two NUMA nodes) counts
once for a mask that touches any of them. More nodes never have less, so "meets the demand" is closed upwards.

``smallest`` looks for the least number of nodes that meets several demands at once. It tries sizes upwards
and chooses how many nodes of each kind to take. Nodes with equal amounts of their own are one kind: which of
them is taken makes no difference. A node that shares a lot with others is a kind of its own. A branch is cut
when even the richest of the remaining nodes, shared lots counted again and again, cannot meet a demand. So
the answer is exact, and quick where nodes are alike, as they are on real machines, however many there are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from proxy.model.idset import Mask

LISTED = 12
"""Up to this many nodes the masks are listed (4095 at most)."""


@dataclass(frozen=True, slots=True)
class Demand:
    """An amount that a mask has to cover.

    Attributes:
        want: The amount (bytes, devices).
        lots: What lies where: the bits of the nodes at which an amount can be had, and the amount.
    """

    want: int
    lots: tuple[tuple[int, int], ...]

    def had(self, bits: int) -> int:
        """Give what the nodes in ``bits`` have."""
        return sum(amount for nodes, amount in self.lots if nodes & bits)

    def met(self, bits: int) -> bool:
        """Tell whether the nodes in ``bits`` have at least what is wanted."""
        return self.had(bits) >= self.want


def covers(demands: Iterable[Demand], bits: int) -> bool:
    """Tell whether the nodes in ``bits`` meet all demands."""
    return all(demand.met(bits) for demand in demands)


def to_bits(nodes: Iterable[int]) -> int:
    """Give the bits of some nodes."""
    return functools.reduce(lambda bits, node: bits | 1 << node, nodes, 0)


@functools.lru_cache(maxsize=64)
def _in_order(nodes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(of_size(nodes, size) for size in range(1, len(nodes) + 1)))


def masks(nodes: Sequence[int]) -> Iterable[int]:
    """Give the bits of all masks over the nodes as kubelet visits them: by size, then by node list."""
    if len(nodes) <= LISTED:
        return _in_order(tuple(nodes))
    return itertools.chain.from_iterable(of_size(nodes, size) for size in range(1, len(nodes) + 1))


def of_size(nodes: Sequence[int], size: int) -> Iterator[int]:
    """Give the bits of all masks of one size, ordered by node list."""
    return (to_bits(taken) for taken in itertools.combinations(nodes, size))


def meeting(nodes: Sequence[int], size: int, demands: Sequence[Demand]) -> Iterator[int]:
    """Give the bits of all masks of one size that meet all demands, ordered by node list.

    Nodes are taken one after the other, and not where even the richest that follow could not do it.
    """
    own = [[sum(n for at, n in d.lots if at >> node & 1) for node in nodes] for d in demands]
    tops = [
        [list(itertools.accumulate(sorted(each[i:], reverse=True), initial=0)) for i in range(len(nodes) + 1)]
        for each in own
    ]

    def walk(start: int, bits: int, left: int) -> Iterator[int]:
        if not left:
            yield bits
            return
        for i in range(start, len(nodes) - left + 1):
            more = bits | 1 << nodes[i]
            if all(
                d.had(more) + top[i + 1][left - 1] >= d.want for d, top in zip(demands, tops, strict=True)
            ):
                yield from walk(i + 1, more, left - 1)

    return walk(0, 0, size)


def lowest(nodes: Sequence[int], size: int, demands: Sequence[Demand], tries: int) -> Iterator[int]:
    """Give the bits of masks of one size that meet all demands, smallest integer first.

    The highest node is chosen first, so integers come ascending; a branch is cut as in ``meeting``.

    Args:
        nodes: Ascending.
        size: At least 1.
        demands: What to meet.
        tries: How many nodes may be tried; then it ends, found or not.
    """
    own = [[sum(n for at, n in d.lots if at >> node & 1) for node in nodes] for d in demands]
    tops = [
        [list(itertools.accumulate(sorted(each[:i], reverse=True), initial=0)) for i in range(len(nodes) + 1)]
        for each in own
    ]
    left_over = itertools.count(tries, -1)

    def walk(end: int, bits: int, left: int) -> Iterator[int]:
        if not left:
            yield bits
            return
        for i in range(left - 1, end):
            if next(left_over) <= 0:
                return
            more = bits | 1 << nodes[i]
            if all(d.had(more) + top[i][left - 1] >= d.want for d, top in zip(demands, tops, strict=True)):
                yield from walk(i, more, left - 1)

    return walk(len(nodes), 0, size)


def smallest(nodes: Sequence[int], demands: Sequence[Demand], base: int = 0) -> int | None:
    """Give the least number of nodes that, with those in ``base``, meet all demands.

    Returns:
        The number of nodes besides ``base``, or None where all of them cannot.
    """
    if not covers(demands, base | to_bits(nodes)):
        return None
    kinds = _kinds(nodes, demands)
    rich = _rich(kinds, demands)
    return next(size for size in range(len(nodes) + 1) if _enough(kinds, rich, demands, 0, base, size))


def fittest(nodes: Sequence[int], demands: Sequence[Demand], base: int = 0, floor: int = 1) -> int | None:
    """Give the bits of the best mask that contains ``base`` and meets all demands.

    Best is fewest nodes, at least ``floor``, then the smallest integer. Nodes are left out from the highest
    downwards as long as those that remain can still do it with as few.

    Returns:
        The mask, ``base`` included, or None where there is none.
    """
    rest = sorted((node for node in nodes if not base >> node & 1), reverse=True)
    least = smallest(rest, demands, base)
    if least is None or len(rest) + base.bit_count() < floor:
        return None
    size = max(least, floor - base.bit_count())
    kinds = _kinds(rest, demands)
    rich = _rich(kinds, demands)
    kind_of = {node: kind for kind in kinds for node in kind}
    for left, node in zip(range(len(rest), 0, -1), rest, strict=True):
        if left == size:  # all that are left are in the mask
            return base | to_bits(node for kind in kinds for node in kind)
        kind_of[node].remove(node)
        if not _enough(kinds, rich, demands, 0, base, size):  # what remains is to be chosen beside it
            base |= 1 << node
            size -= 1
    return base


def _kinds(nodes: Sequence[int], demands: Sequence[Demand]) -> list[list[int]]:
    """Group nodes that can stand for each other; one that shares a lot with others stands for itself."""
    own = [dict.fromkeys(nodes, 0) for _ in demands]
    apart: set[int] = set()
    for table, demand in zip(own, demands, strict=True):
        for at, amount in demand.lots:
            if at & (at - 1):
                apart.update(Mask.from_bits(at))
            elif (node := at.bit_length() - 1) in table:
                table[node] += amount
    kinds: dict[object, list[int]] = {}
    for node in nodes:
        key = node if node in apart else tuple(table[node] for table in own)
        kinds.setdefault(key, []).append(node)
    return list(kinds.values())


def _rich(kinds: Sequence[Sequence[int]], demands: Sequence[Demand]) -> list[list[int]]:
    """Give what one node of each kind can add at most, by demand."""
    return [[sum(amount for at, amount in d.lots if at >> kind[0] & 1) for kind in kinds] for d in demands]


def _enough(
    kinds: list[list[int]], rich: list[list[int]], demands: Sequence[Demand], at: int, bits: int, left: int
) -> bool:
    """Tell whether ``left`` nodes of the kinds from ``at`` on complete ``bits``."""
    if covers(demands, bits):
        return True
    if not left or at == len(kinds):
        return False
    for demand, adds in zip(demands, rich, strict=True):
        best = sorted(((adds[i], len(kinds[i])) for i in range(at, len(kinds))), reverse=True)
        hope, room = demand.had(bits), left
        for amount, count in best:
            hope += amount * min(room, count)
            room -= min(room, count)
        if hope < demand.want:
            return False
    most = min(left, len(kinds[at]))
    return any(
        _enough(kinds, rich, demands, at + 1, bits | to_bits(kinds[at][:count]), left - count)
        for count in range(most, -1, -1)
    )


def sums(nodes: Sequence[int], demand: Demand) -> dict[int, int]:
    """Give what every mask over a few nodes has of a demand, by the bits of the mask."""
    alone = {1 << node: 0 for node in nodes}
    shared, opened = [], to_bits(nodes)
    for at, amount in demand.lots:
        if at in alone:
            alone[at] += amount
        elif at & opened:
            shared.append((at, amount))
    table = {0: 0}
    for bits in masks(nodes):
        rest = bits & (bits - 1)  # one node less: it came earlier
        table[bits] = table[rest] + alone[bits ^ rest]
    if not shared:
        return table
    return {bits: has + sum(n for at, n in shared if at & bits) for bits, has in table.items()}
