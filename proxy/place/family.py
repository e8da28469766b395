"""Sets of topology hints that are too many to be listed, and lists that stand for them exactly.

Theory. What memory and devices hint at (kubelet 1.36, reference A.3 and A.4) is in both cases made of two
parts:

- some *explicit* masks (for memory: single nodes, and groups that are already in use);
- an *open* part: every mask over some nodes, of at least ``floor`` nodes, that meets all demands.

n open nodes are up to 2^n masks. While there are at most ``LISTED`` nodes they are listed. Beyond that a
``Family`` stands for the same hints in the same order, made one by one as they are read, and ``listable``
puts a short list of real hints in its place, with which a merge comes to the same result:

``through(window)`` is exact for a merge in which some other list has affinities inside the window, and
nothing else. A merge looks at an affinity in three ways: by AND with the others, which lies inside the
window whatever the affinity has outside; by equality with the others, and only an affinity inside the
window can be equal; and by the count of the narrowest of the list. So one hint is enough for each part of
the window that affinities can have in common with it, and one narrowest hint. A part s is possible exactly
if s with *all* open nodes outside meets the demands, because the open part is closed upwards: 2^|window|
sums replace 2^n masks. Where a preferred hint lies inside the window, it is the one to take for its part: a
merge that one of the others brings to a non-preferred mask is brought there by the preferred one too, or
else to a preferred result, which wins anyway.

Where no list opens a window (nobody asked for CPUs), the narrowest hints stand for the family. That is
exact for a preferred result: equal and preferred affinities have that size. It is exact for a single list,
whose narrowest hints win. For several lists without a preferred result it picks among the hints themselves,
where kubelet might pick nodes that two different hints share; kubelet cannot list such hints at all.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask
from proxy.place.demand import LISTED, Demand, covers, fittest, masks, of_size, smallest, sums, to_bits


@functools.lru_cache(maxsize=16384)
def hint(bits: int, preferred: bool) -> TopologyHint:
    """Give a hint by the bits of its mask; equal hints are one object."""
    return TopologyHint(Mask.from_bits(bits), preferred)


@dataclass(frozen=True, slots=True)
class Family(Sequence[TopologyHint]):
    """The hints of one resource: explicit masks and an open part.

    Attributes:
        explicit: Bits of masks, in any order; none of them is in the open part.
        nodes: The open nodes, ascending.
        floor: The least size of an open mask.
        demands: What an open mask has to cover.
        size: The size that makes a hint preferred.
    """

    explicit: tuple[int, ...]
    nodes: tuple[int, ...]
    floor: int
    demands: tuple[Demand, ...]
    size: int

    def listed(self) -> Sequence[TopologyHint]:
        """Give the hints as a tuple where they can be listed, else this object."""
        return tuple(self) if len(self.universe) <= LISTED or not self else self

    @property
    def universe(self) -> Mask:
        """Every node that some hint may name."""
        return Mask.from_bits(functools.reduce(int.__or__, self.explicit, to_bits(self.nodes)))

    @property
    def narrowest(self) -> int | None:
        """Size of the smallest hint; None where there is no hint."""
        sizes = [bits.bit_count() for bits in self.explicit]
        if (least := self._least()) is not None:
            sizes.append(least)
        return min(sizes, default=None)

    def of_size(self, size: int) -> Iterator[TopologyHint]:
        """Give the hints with ``size`` nodes, in kubelet's order."""
        least = self._least()
        return self._of_size(size, least is not None and size >= least)

    def best(self, around: Mask | None = None) -> TopologyHint | None:
        """Give the best hint: preferred, then fewest nodes, then the smallest integer.

        Args:
            around: Only hints that contain these nodes count.
        """
        base = around.bits if around else 0
        found = [bits for bits in self.explicit if not base & ~bits]
        if not base & ~to_bits(self.nodes) and len(self.nodes) >= self.floor:
            found += [bits for bits in (fittest(self.nodes, self.demands, base, self.floor),) if bits]
        bits = min(found, key=lambda bits: (bits.bit_count() != self.size, bits.bit_count(), bits), default=0)
        return hint(bits, bits.bit_count() == self.size) if bits else None

    def narrow(self) -> tuple[TopologyHint, ...]:
        """Give the hints of the least size."""
        return tuple(self.of_size(self.narrowest or 0))

    def through(self, window: Mask) -> tuple[TopologyHint, ...]:
        """Give hints that stand for all as far as a window of nodes shows them (see the theory)."""
        seen: dict[int, int] = {}
        for bits in self.explicit:
            self._show(seen, bits, bits & window.bits)
        outside = to_bits(self.nodes) & ~window.bits
        for part in masks([node for node in self.nodes if node in window]):
            if part.bit_count() >= self.floor and covers(self.demands, part):
                self._show(seen, part, part)
            elif (part | outside).bit_count() >= self.floor and covers(self.demands, part | outside):
                self._show(seen, part | outside, part)
        shown = set(seen.values())
        if (narrowest := next(self.of_size(self.narrowest or 0), None)) and narrowest.affinity:
            shown.add(narrowest.affinity.bits)
        return tuple(hint(bits, bits.bit_count() == self.size) for bits in sorted(shown, key=_by_size))

    def _show(self, seen: dict[int, int], bits: int, part: int) -> None:
        preferred = part == bits and bits.bit_count() == self.size
        if part and (preferred or part not in seen):
            seen[part] = bits

    def __iter__(self) -> Iterator[TopologyHint]:
        nodes = tuple(self.universe)
        return self._few(nodes) if len(nodes) <= LISTED else self._lazily()

    def _few(self, nodes: tuple[int, ...]) -> Iterator[TopologyHint]:
        tables = [(demand.want, sums(self.nodes, demand)) for demand in self.demands]
        fixed, opened = frozenset(self.explicit), to_bits(self.nodes)
        for bits in masks(nodes):
            size = bits.bit_count()
            if bits in fixed or (
                size >= self.floor
                and not bits & ~opened
                and all(table[bits] >= want for want, table in tables)
            ):
                yield hint(bits, size == self.size)

    def _lazily(self) -> Iterator[TopologyHint]:
        least = self._least()
        widest = max((bits.bit_count() for bits in self.explicit), default=0)
        for size in range(1, max(widest, len(self.nodes)) + 1):
            yield from self._of_size(size, least is not None and size >= least)

    def __bool__(self) -> bool:
        return bool(self.explicit) or self._least() is not None

    def __len__(self) -> int:
        """Count the hints.

        Raises:
            OverflowError: They are too many to be counted one by one.
        """
        if len(self.universe) > LISTED:
            raise OverflowError(f"cannot count the hints over {len(self.universe)} nodes: they are too many")
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, index: int) -> TopologyHint: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TopologyHint]: ...
    def __getitem__(self, index: int | slice) -> TopologyHint | Sequence[TopologyHint]:
        """Give a hint, or a slice of them, by reading as far as that; positions count from the front."""
        if isinstance(index, slice):
            return tuple(itertools.islice(self, index.start, index.stop, index.step))
        try:
            return next(itertools.islice(self, index, None))
        except StopIteration:
            raise IndexError(index) from None

    def _least(self) -> int | None:
        """Give the size of the smallest open mask."""
        if len(self.nodes) < self.floor:
            return None
        found = smallest(self.nodes, self.demands)
        return None if found is None else max(found, self.floor)

    def _of_size(self, size: int, opened: bool) -> Iterator[TopologyHint]:
        fixed = sorted((bits for bits in self.explicit if bits.bit_count() == size), key=_by_nodes)
        free: Iterator[int] = iter(())
        if opened:
            free = (bits for bits in of_size(self.nodes, size) if covers(self.demands, bits))
        return (hint(bits, size == self.size) for bits in heapq.merge(fixed, free, key=_by_nodes))


def listable(answers: Sequence[Hints]) -> list[Hints]:
    """Put lists in the place of all families in providers' answers, so that a merge can read them."""
    lists = [hints for answer in answers for hints in (answer or {}).values() if hints]
    windows = [w for hints in lists if not isinstance(hints, Family) and (w := _window(hints))]
    window = min(windows, key=len, default=None)
    return [
        answer and {name: _short(hints, window) if hints else hints for name, hints in answer.items()}
        for answer in answers
    ]


def _window(hints: Sequence[TopologyHint]) -> Mask | None:
    """Give the nodes inside which all affinities of a list lie, or None where they are many or unbound."""
    bits = 0
    for each in hints:
        if each.affinity is None:
            return None
        bits |= each.affinity.bits
    return Mask.from_bits(bits) if bits.bit_count() <= LISTED else None


def _short(hints: Sequence[TopologyHint], window: Mask | None) -> Sequence[TopologyHint]:
    if not isinstance(hints, Family):
        return hints
    return hints.narrow() if window is None else hints.through(window)


def _by_size(bits: int) -> tuple[int, tuple[int, ...]]:
    return bits.bit_count(), _by_nodes(bits)


def _by_nodes(bits: int) -> tuple[int, ...]:
    return tuple(Mask.from_bits(bits))
