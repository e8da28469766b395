"""Find the fewest NUMA nodes whose amounts meet a demand.

Theory. A demand sums amounts that lie on nodes; an amount on several nodes (a device with two NUMA nodes)
counts once for a mask that contains any of them. More nodes never have less, so "meets the demand" is closed
upwards.

``least_node_count`` and ``best_mask`` look for the fewest nodes that meet several demands at once. They
search with ``proxy.allocation.set_cover``: the result is exact if the search decides within its limits, which
is nearly always, and a returned mask always meets the demands.

Masks are integers in this module: bit i is node i.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from proxy.allocation.set_cover import choose
from proxy.model.idset import Mask, union

MOST_LISTED_NODES = 12
"""Up to this many nodes, all masks are listed: 4095 at most."""


class Demand(Struct, frozen=True):
    """An amount that the nodes of a mask have to provide.

    Attributes:
        required: The amount (bytes, devices).
        amounts: Pairs of the bits of the nodes on which an amount is available, and the amount.
    """

    required: int
    amounts: tuple[tuple[int, int], ...]

    def amount_on(self, bits: int) -> int:
        """Return the amount that the nodes in ``bits`` provide."""
        return sum(amount for nodes, amount in self.amounts if nodes & bits)

    def is_met_by(self, bits: int) -> bool:
        """Return whether the nodes in ``bits`` provide the required amount."""
        return self.amount_on(bits) >= self.required


def covers(demands: Iterable[Demand], bits: int) -> bool:
    """Return whether the nodes in ``bits`` meet all demands."""
    return all(demand.is_met_by(bits) for demand in demands)


def to_bits(nodes: Iterable[int]) -> int:
    """Return the bits of some nodes."""
    return union(1 << node for node in nodes)


@functools.lru_cache(maxsize=64)
def _in_order(nodes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_of_each_size(nodes))


def _of_each_size(nodes: Sequence[int]) -> Iterator[int]:
    return itertools.chain.from_iterable(masks_of_size(nodes, size) for size in range(1, len(nodes) + 1))


def masks(nodes: Sequence[int]) -> Iterable[int]:
    """Return the bits of all masks over the nodes as kubelet visits them: by size, then by node list."""
    if len(nodes) <= MOST_LISTED_NODES:
        return _in_order(tuple(nodes))
    return _of_each_size(nodes)


def masks_of_size(nodes: Sequence[int], size: int) -> Iterator[int]:
    """Return the bits of all masks of one size, ordered by node list."""
    return (to_bits(subset) for subset in itertools.combinations(nodes, size))


def masks_meeting(nodes: Sequence[int], size: int, demands: Sequence[Demand]) -> Iterator[int]:
    """Return the bits of all masks of one size that meet all demands, ordered by node list.

    Nodes are added one after the other; a branch ends as soon as even the largest remaining nodes would not
    suffice.
    """
    tops = [
        (d, [_largest_sums(own[i:]) for i in range(len(nodes) + 1)])
        for d, own in _amounts_by_node(nodes, demands)
    ]

    def walk(start: int, bits: int, remaining: int) -> Iterator[int]:
        if not remaining:
            yield bits
            return
        for i in range(start, len(nodes) - remaining + 1):
            wider = bits | 1 << nodes[i]
            if all(d.amount_on(wider) + top[i + 1][remaining - 1] >= d.required for d, top in tops):
                yield from walk(i + 1, wider, remaining - 1)

    return walk(0, 0, size)


def lowest_masks(nodes: Sequence[int], size: int, demands: Sequence[Demand], tries: int) -> Iterator[int]:
    """Return the bits of masks of one size that meet all demands, smallest integer first.

    The highest node is chosen first, so integers come ascending; a branch is cut as in ``masks_meeting``.

    Args:
        nodes: Ascending.
        size: At least 1.
        demands: The demands to meet.
        tries: How many nodes are tried at most; then the search ends.
    """
    tops = [
        (d, [_largest_sums(own[:i]) for i in range(len(nodes))])
        for d, own in _amounts_by_node(nodes, demands)
    ]
    budget = itertools.count(tries, -1)

    def walk(end: int, bits: int, remaining: int) -> Iterator[int]:
        if not remaining:
            yield bits
            return
        for i in range(remaining - 1, end):
            if next(budget) <= 0:
                return
            wider = bits | 1 << nodes[i]
            if all(d.amount_on(wider) + top[i][remaining - 1] >= d.required for d, top in tops):
                yield from walk(i, wider, remaining - 1)

    return walk(len(nodes), 0, size)


def _amounts_by_node(nodes: Sequence[int], demands: Iterable[Demand]) -> Iterator[tuple[Demand, list[int]]]:
    """Return the amount that each node has by itself, demand by demand."""
    return ((d, [sum(n for at, n in d.amounts if at >> node & 1) for node in nodes]) for d in demands)


def _largest_sums(amounts: Iterable[int]) -> list[int]:
    """Return the largest sum of 0, 1, 2 and so on of some amounts."""
    return list(itertools.accumulate(sorted(amounts, reverse=True), initial=0))


def least_node_count(nodes: Sequence[int], demands: Sequence[Demand], base: int = 0) -> int | None:
    """Return the least number of nodes that, with those in ``base``, meet all demands.

    Returns:
        The number of nodes in addition to ``base``, or None if even all nodes together do not meet the
        demands.
    """
    if not covers(demands, base | to_bits(nodes)):
        return None
    return _Pool(nodes, demands, base).least().bit_count()


def best_mask(nodes: Sequence[int], demands: Sequence[Demand], base: int = 0, floor: int = 1) -> int | None:
    """Return the bits of the best mask that contains ``base`` and meets all demands.

    The best mask has the fewest nodes, at least ``floor``, then the smallest integer. Nodes are dropped from
    the highest downwards as long as the remaining ones meet the demands with as few nodes.

    Returns:
        The mask, ``base`` included, or None if there is none.
    """
    others = sorted(node for node in nodes if not base >> node & 1)
    if not covers(demands, base | to_bits(others)) or len(others) + base.bit_count() < floor:
        return None
    pool = _Pool(others, demands, base)
    chosen = pool.least()  # some mask that meets the demands; it is improved node by node
    for node in others:
        if (chosen | base).bit_count() >= floor:
            break
        chosen |= 1 << node
    room = chosen.bit_count()
    for node in reversed(others):
        if len(pool.nodes) == room:
            break
        pool.nodes.remove(node)
        if not chosen >> node & 1:
            continue
        replacement = pool.choice(room)
        if replacement is None:
            base |= 1 << node
            chosen ^= 1 << node
            room -= 1
            pool = _Pool(pool.nodes, demands, base)
            continue
        for low in pool.nodes:  # with a floor there may be room for more nodes
            if replacement.bit_count() == room:
                break
            replacement |= 1 << low
        chosen = replacement
    return base | chosen


class _Pool:
    """Nodes to choose from, in addition to those that are already chosen.

    Attributes:
        nodes: The nodes, ascending; the caller may remove some.
    """

    def __init__(self, nodes: Sequence[int], demands: Sequence[Demand], base: int) -> None:
        self.nodes = list(nodes)
        self.demands = demands
        self.base = base
        open_ = [(d.required - d.amount_on(base), d) for d in demands]
        open_ = [(need, d) for need, d in open_ if need > 0]
        self.needs = [need for need, _ in open_]
        columns = [(d, dict.fromkeys(nodes, 0)) for _, d in open_]
        apart: set[int] = set()
        for demand, column in columns:
            for at, amount in demand.amounts:
                if at & base:
                    continue
                if at & (at - 1):  # on several nodes: each may have it, but it counts once
                    apart.update(Mask.from_bits(at))
                for node in Mask.from_bits(at):
                    if node in column:
                        column[node] += amount
        self.amounts = {node: tuple(column[node] for _, column in columns) for node in nodes}
        self.apart = frozenset(apart)

    def choice(self, size: int) -> int | None:
        """Return the bits of at most ``size`` nodes that, with the base, meet all demands."""
        if size >= len(self.nodes):
            bits = to_bits(self.nodes)
            return bits if covers(self.demands, self.base | bits) else None
        return choose(self.nodes, self.amounts, self.needs, size, self.meets_all, self.apart)

    def meets_all(self, bits: int) -> bool:
        return covers(self.demands, self.base | bits)

    def least(self) -> int:
        """Return the bits of the fewest nodes that meet all demands; all nodes together meet them."""
        sizes = range(len(self.nodes) + 1)
        return next(bits for size in sizes if (bits := self.choice(size)) is not None)


def sums(nodes: Sequence[int], demand: Demand) -> dict[int, int]:
    """Return the amount that every mask over a few nodes provides for a demand, by the bits of the mask."""
    alone = {1 << node: 0 for node in nodes}
    shared, opened = [], to_bits(nodes)
    for at, amount in demand.amounts:
        if at in alone:
            alone[at] += amount
        elif at & opened:
            shared.append((at, amount))
    table = {0: 0}
    for bits in masks(nodes):
        smaller = bits & (bits - 1)  # one node less: it came earlier
        table[bits] = table[smaller] + alone[bits ^ smaller]
    if not shared:
        return table
    return {bits: amount_of + sum(n for at, n in shared if at & bits) for bits, amount_of in table.items()}
