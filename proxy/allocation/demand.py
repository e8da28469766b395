"""Find the fewest NUMA nodes whose amounts meet a demand.

Theory. A demand sums amounts that lie on nodes; an amount on several nodes (a device with two NUMA nodes)
counts once for a mask that contains any of them. More nodes never have less, so "meets the demand" is closed
upwards.

``smallest`` and ``best_mask`` look for the least number of nodes that meets several demands at once, as
``proxy.allocation.set_cover`` does it: exact where it decides in its limits, which is nearly always, and
never wrong about what a mask holds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from proxy.allocation.set_cover import choose
from proxy.model.idset import Mask

LISTED = 12
"""Up to this many nodes the masks are listed (4095 at most)."""


class Demand(Struct, frozen=True):
    """An amount that a mask has to cover.

    Attributes:
        want: The amount (bytes, devices).
        amounts: Pairs of the bits of the nodes on which an amount is available, and the amount.
    """

    want: int
    amounts: tuple[tuple[int, int], ...]

    def had(self, bits: int) -> int:
        """Return the amount that the nodes in ``bits`` have."""
        return sum(amount for nodes, amount in self.amounts if nodes & bits)

    def met(self, bits: int) -> bool:
        """Return whether the nodes in ``bits`` have at least what is wanted."""
        return self.had(bits) >= self.want


def covers(demands: Iterable[Demand], bits: int) -> bool:
    """Return whether the nodes in ``bits`` meet all demands."""
    return all(demand.met(bits) for demand in demands)


def to_bits(nodes: Iterable[int]) -> int:
    """Return the bits of some nodes."""
    return functools.reduce(lambda bits, node: bits | 1 << node, nodes, 0)


@functools.lru_cache(maxsize=64)
def _in_order(nodes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(of_size(nodes, size) for size in range(1, len(nodes) + 1)))


def masks(nodes: Sequence[int]) -> Iterable[int]:
    """Return the bits of all masks over the nodes as kubelet visits them: by size, then by node list."""
    if len(nodes) <= LISTED:
        return _in_order(tuple(nodes))
    return itertools.chain.from_iterable(of_size(nodes, size) for size in range(1, len(nodes) + 1))


def of_size(nodes: Sequence[int], size: int) -> Iterator[int]:
    """Return the bits of all masks of one size, ordered by node list."""
    return (to_bits(taken) for taken in itertools.combinations(nodes, size))


def meeting(nodes: Sequence[int], size: int, demands: Sequence[Demand]) -> Iterator[int]:
    """Return the bits of all masks of one size that meet all demands, ordered by node list.

    Nodes are added one after the other; a branch ends where even the largest remaining nodes would not
    suffice.
    """
    tops = [(d, [_largest_sums(own[i:]) for i in range(len(nodes) + 1)]) for d, own in _alone(nodes, demands)]

    def walk(start: int, bits: int, left: int) -> Iterator[int]:
        if not left:
            yield bits
            return
        for i in range(start, len(nodes) - left + 1):
            more = bits | 1 << nodes[i]
            if all(d.had(more) + top[i + 1][left - 1] >= d.want for d, top in tops):
                yield from walk(i + 1, more, left - 1)

    return walk(0, 0, size)


def lowest(nodes: Sequence[int], size: int, demands: Sequence[Demand], tries: int) -> Iterator[int]:
    """Return the bits of masks of one size that meet all demands, smallest integer first.

    The highest node is chosen first, so integers come ascending; a branch is cut as in ``meeting``.

    Args:
        nodes: Ascending.
        size: At least 1.
        demands: What to meet.
        tries: How many nodes may be tried; then it ends, found or not.
    """
    tops = [(d, [_largest_sums(own[:i]) for i in range(len(nodes))]) for d, own in _alone(nodes, demands)]
    left_over = itertools.count(tries, -1)

    def walk(end: int, bits: int, left: int) -> Iterator[int]:
        if not left:
            yield bits
            return
        for i in range(left - 1, end):
            if next(left_over) <= 0:
                return
            more = bits | 1 << nodes[i]
            if all(d.had(more) + top[i][left - 1] >= d.want for d, top in tops):
                yield from walk(i, more, left - 1)

    return walk(len(nodes), 0, size)


def _alone(nodes: Sequence[int], demands: Iterable[Demand]) -> Iterator[tuple[Demand, list[int]]]:
    """Return the amount that each node has by itself, demand by demand."""
    return ((d, [sum(n for at, n in d.amounts if at >> node & 1) for node in nodes]) for d in demands)


def _largest_sums(amounts: Iterable[int]) -> list[int]:
    """Return the largest sum of 0, 1, 2 and so on of some amounts."""
    return list(itertools.accumulate(sorted(amounts, reverse=True), initial=0))


def smallest(nodes: Sequence[int], demands: Sequence[Demand], base: int = 0) -> int | None:
    """Return the least number of nodes that, with those in ``base``, meet all demands.

    Returns:
        The number of nodes besides ``base``, or None where all of them cannot.
    """
    if not covers(demands, base | to_bits(nodes)):
        return None
    return _Pool(nodes, demands, base).least().bit_count()


def best_mask(nodes: Sequence[int], demands: Sequence[Demand], base: int = 0, floor: int = 1) -> int | None:
    """Return the bits of the best mask that contains ``base`` and meets all demands.

    Best is fewest nodes, at least ``floor``, then the smallest integer. Nodes are left out from the highest
    downwards as long as those that remain can still do it with as few.

    Returns:
        The mask, ``base`` included, or None where there is none.
    """
    rest = sorted(node for node in nodes if not base >> node & 1)
    if not covers(demands, base | to_bits(rest)) or len(rest) + base.bit_count() < floor:
        return None
    pool = _Pool(rest, demands, base)
    chosen = pool.least()  # some mask that does; it is made better node by node
    for node in rest:
        if (chosen | base).bit_count() >= floor:
            break
        chosen |= 1 << node
    room = chosen.bit_count()
    for node in reversed(rest):
        if len(pool.nodes) == room:
            break
        pool.nodes.remove(node)
        if not chosen >> node & 1:
            continue
        other = pool.choice(room)
        if other is None:
            base |= 1 << node
            chosen ^= 1 << node
            room -= 1
            pool = _Pool(pool.nodes, demands, base)
            continue
        for low in pool.nodes:  # there may be room for more, with a floor
            if other.bit_count() == room:
                break
            other |= 1 << low
        chosen = other
    return base | chosen


class _Pool:
    """Nodes to choose from besides those that are chosen already.

    Attributes:
        nodes: Ascending; may be taken out.
    """

    def __init__(self, nodes: Sequence[int], demands: Sequence[Demand], base: int) -> None:
        self.nodes = list(nodes)
        self.demands = demands
        self.base = base
        open_ = [(d.want - d.had(base), d) for d in demands]
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
        """Return the bits of the fewest nodes that do; all of them do."""
        sizes = range(len(self.nodes) + 1)
        return next(bits for size in sizes if (bits := self.choice(size)) is not None)


def sums(nodes: Sequence[int], demand: Demand) -> dict[int, int]:
    """Return what every mask over a few nodes has of a demand, by the bits of the mask."""
    alone = {1 << node: 0 for node in nodes}
    shared, opened = [], to_bits(nodes)
    for at, amount in demand.amounts:
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
