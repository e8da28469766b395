"""Sets of topology hints that are too many to be listed.

Theory. The hints of CPUs, memory and devices are always made of two parts:

- some *explicit* masks (for memory: single nodes, and groups that are already in use);
- an *open* part: every mask over some nodes, of at least ``floor`` nodes, that meets all demands.

n open nodes have up to 2^n masks. For at most ``MOST_LISTED_NODES`` nodes the masks are listed. For more
nodes a ``Family`` represents the same hints in the same order. It makes them one by one as they are read, and
it computes in closed form what would take too long to find by reading. ``proxy.allocation.hint_sampling``
makes lists for a merge from families.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from proxy.allocation.demand import (
    MOST_LISTED_NODES,
    Demand,
    best_mask,
    covers,
    least_node_count,
    lowest_masks,
    masks,
    masks_meeting,
    sums,
    to_bits,
)
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask, union

_TRIES = 256
"""How many nodes are tried to find a few hints in addition to the best."""


@functools.lru_cache(maxsize=16384)
def hint(bits: int, preferred: bool) -> TopologyHint:
    """Return a hint by the bits of its mask; equal hints are one object."""
    return TopologyHint(Mask.from_bits(bits), preferred)


@dataclass(frozen=True, slots=True)
class Family(Sequence[TopologyHint]):
    """The hints of one resource: explicit masks and an open part.

    Attributes:
        explicit: Bits of masks, in any order; none of them is in the open part.
        nodes: The open nodes, ascending.
        floor: The least size of an open mask.
        demands: The demands that an open mask has to meet.
        size: The size that makes a hint preferred.
    """

    explicit: tuple[int, ...]
    nodes: tuple[int, ...]
    floor: int
    demands: tuple[Demand, ...]
    size: int

    def listed(self) -> Sequence[TopologyHint]:
        """Return the hints as a tuple if they can be listed, otherwise this object."""
        if not self:
            return ()
        return tuple(iter(self)) if len(self.possible_nodes) <= MOST_LISTED_NODES else self

    @property
    def possible_nodes(self) -> Mask:
        """Every node that some hint may name."""
        return Mask.from_bits(to_bits(self.nodes) | union(self.explicit))

    def best(self, around: Mask | None = None) -> TopologyHint | None:
        """Return the best hint: a preferred one if possible, then fewest nodes, then the smallest integer.

        Args:
            around: Only hints that contain these nodes count.
        """
        bits = self.best_bits(around.bits if around else 0)
        return hint(bits, self.prefers(bits)) if bits else None

    def preferred_masks(
        self, nodes: Sequence[int], demands: Sequence[Demand], floor: int, base: int = 0
    ) -> Sequence[int]:
        """Return the best masks that are preferred for another reason than their size; here there are none.

        Args:
            nodes: The nodes that a mask may name.
            demands: The demands that it has to meet.
            floor: Its least size.
            base: The nodes that it has to name.
        """
        del nodes, demands, floor, base
        return ()

    def best_bits(self, base: int = 0) -> int:
        """Return the bits of the best hint that contains the nodes in ``base``; 0 if there is none."""
        fewest = self._fewest(base)
        if self.prefers(fewest):
            return fewest
        others = self.preferred_masks(self.nodes, self.demands, 1, base)
        return min((fewest, *others) if fewest else others, key=self._rank, default=0)

    def _fewest(self, base: int = 0) -> int:
        """Return the mask with the fewest nodes, then the smallest integer; 0 if there is none."""
        candidates = [bits for bits in self.explicit if not base & ~bits]
        if not base & ~to_bits(self.nodes):
            candidates += [bits for bits in (best_mask(self.nodes, self.demands, base, self.floor),) if bits]
        return min(candidates, key=lambda bits: (bits.bit_count(), bits), default=0)

    def _rank(self, bits: int) -> tuple[bool, int, int]:
        return not self.prefers(bits), bits.bit_count(), bits

    def best_few(self, most: int) -> tuple[TopologyHint, ...]:
        """Return ``best`` and a few more of its size, preferred ones first, then by integer.

        The search after the best is bounded, so some may be missing.
        """
        best = self.best_bits()
        if not best:
            return ()
        size = best.bit_count()
        candidates = {bits for bits in self.explicit if bits.bit_count() == size} | {best}
        if size >= self.floor:
            candidates.update(itertools.islice(lowest_masks(self.nodes, size, self.demands, _TRIES), most))
        return tuple(hint(bits, self.prefers(bits)) for bits in sorted(candidates, key=self._rank)[:most])

    def prefers(self, bits: int) -> bool:
        """Return whether a hint with this mask is preferred."""
        return bits.bit_count() == self.size

    def holds(self, bits: int) -> bool:
        """Return whether there is a hint with this mask."""
        if bits in self.explicit:
            return True
        inside = bits.bit_count() >= self.floor and not bits & ~to_bits(self.nodes)
        return inside and covers(self.demands, bits)

    def for_window(self, window: Mask) -> tuple[TopologyHint, ...]:
        """Return hints that represent all hints in a merge whose result lies inside a window of nodes.

        The result has one hint for each possible *part*, the intersection of an affinity with the window; it
        is a hint inside the window if there is such a hint. In addition the result has a narrowest hint. A
        part is possible if it meets the demands together with *all* open nodes outside the window, because
        the open part of the hints is closed upwards.
        """
        mask_of_part: dict[int, int] = {}
        for bits in self.explicit:
            self._record_part(mask_of_part, bits, bits & window.bits)
        inside = [node for node in self.nodes if node in window]
        outside = to_bits(self.nodes) & ~window.bits
        tables = [self._surplus(demand, inside, outside) for demand in self.demands]
        for part in masks(inside):
            if part.bit_count() >= self.floor and all(alone[part] >= 0 for alone, _ in tables):
                self._record_part(mask_of_part, part, part)
            elif (part | outside).bit_count() >= self.floor and all(more[part] >= 0 for _, more in tables):
                self._record_part(mask_of_part, part | outside, part)
        shown = set(mask_of_part.values())
        if narrowest := self._fewest():
            shown.add(narrowest)
        return tuple(
            hint(bits, self.prefers(bits))
            for bits in sorted(shown, key=lambda bits: (bits.bit_count(), bits))
        )

    @staticmethod
    def _surplus(demand: Demand, inside: list[int], outside: int) -> tuple[dict[int, int], dict[int, int]]:
        """Return the surplus over a demand of every mask over ``inside``: alone, and with ``outside``."""
        inside_only = tuple((at, amount) for at, amount in demand.amounts if not at & outside)
        more = sums(inside, Demand(demand.required, inside_only))
        alone = sums(inside, demand)
        missing = demand.amount_on(outside) - demand.required
        return (
            {bits: total - demand.required for bits, total in alone.items()},
            {bits: total + missing for bits, total in more.items()},
        )

    @staticmethod
    def _record_part(mask_of_part: dict[int, int], bits: int, part: int) -> None:
        if part and (part == bits or part not in mask_of_part):
            mask_of_part[part] = bits

    def __iter__(self) -> Iterator[TopologyHint]:
        nodes = tuple(self.possible_nodes)
        return iter(self._few(nodes)) if len(nodes) <= MOST_LISTED_NODES else self._lazily()

    def _few(self, nodes: tuple[int, ...]) -> list[TopologyHint]:
        floor, prefers = self.floor, self.prefers
        listed = [bits for bits in masks(self.nodes) if bits.bit_count() >= floor]
        for demand in self.demands:
            required, table = demand.required, sums(self.nodes, demand)
            listed = [bits for bits in listed if table[bits] >= required]
        if self.explicit:
            all_masks = {*listed, *self.explicit}
            listed = [bits for bits in masks(nodes) if bits in all_masks]
        return [hint(bits, prefers(bits)) for bits in listed]

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
        if len(self.possible_nodes) > MOST_LISTED_NODES:
            raise OverflowError(
                f"cannot count the hints over {len(self.possible_nodes)} nodes: they are too many"
            )
        return sum(1 for _ in iter(self))

    @overload
    def __getitem__(self, index: int) -> TopologyHint: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TopologyHint]: ...
    def __getitem__(self, index: int | slice) -> TopologyHint | Sequence[TopologyHint]:
        """Return a hint or a slice, reading hints only up to there; positions count from the front."""
        if isinstance(index, slice):
            return tuple(itertools.islice(self, index.start, index.stop, index.step))
        try:
            return next(itertools.islice(self, index, None))
        except StopIteration:
            raise IndexError(index) from None

    def _least(self) -> int | None:
        """Return the size of the smallest open mask."""
        if len(self.nodes) < self.floor:
            return None
        fewest = least_node_count(self.nodes, self.demands)
        return None if fewest is None else max(fewest, self.floor)

    def _of_size(self, size: int, opened: bool) -> Iterator[TopologyHint]:
        """Return the hints with ``size`` nodes, in kubelet's order."""
        fixed = sorted((bits for bits in self.explicit if bits.bit_count() == size), key=_by_nodes)
        free: Iterator[int] = iter(())
        if opened:
            free = masks_meeting(self.nodes, size, self.demands)
        return (hint(bits, self.prefers(bits)) for bits in heapq.merge(fixed, free, key=_by_nodes))


def _by_nodes(bits: int) -> tuple[int, ...]:
    return tuple(Mask.from_bits(bits))
