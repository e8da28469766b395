"""All intersections of one set from each of several families, without trying all combinations.

Theory. A merge of hints looks for the node sets that are the intersection of one hint from every list. The
number of combinations is the product of the lists' lengths; the number of different intersections is not.
So the lists are added one by one, and only the set of different intersections so far is kept. That loses
nothing: ``(a & b) & c`` depends on ``a & b`` alone, so of combinations with equal intersections one counts
for all. Every step is ``meet(R, A) = {r & a}``, and there are three ways to do it, all giving the same set:

- plain: every pair. For small families.
- counted, up to ``DENSE_NODES`` nodes: let ``f(S)`` be how many members of a family are supersets of S. A
  pair's intersection is a superset of S exactly if both its members are, so ``f_R(S) * f_A(S)`` pairs have an
  intersection that is a superset of S. Undoing the sum over supersets (Moebius inversion on the lattice of
  sets) gives the number of pairs that meet in exactly S; S is wanted if that number is not zero. Both sums
  are taken node by node, ``n * 2**n`` additions for ``4**n`` pairs. They are done on one long integer with 64
  bits for each of the 2**n sets, so that an addition of all is one operation. No sum or product outgrows its
  64 bits: none is larger than the number of pairs, at most ``4**DENSE_NODES``.
- divided, for any number of nodes: the intersections of a narrow set r with the members of A are found by
  dividing A by the nodes of r, one after the other, into members that hold the node and members that do not.
  That gives at most ``2**|r|`` parts, however long A is. Members are bits of an integer, so a division is two
  operations.

Callers that look for intersections of a certain size can give a floor: intersections only shrink, so one that
is below the floor stays there and is dropped.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Collection, Iterable, Sequence
from typing import overload

DENSE_NODES = 16
"""Most nodes for which intersections are counted (2**16 sums of 64 bits are half a megabyte)."""

_LANE = 64
_PLAIN_PAIRS = 1 << 11
"""Up to this many pairs nothing is quicker than trying them."""


def bits_of(mask: int) -> Iterable[int]:
    """Return the single bits of a mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


@overload
def meet_all(families: Sequence[Collection[int]], whole: int, floor: int = ...) -> set[int]: ...
@overload
def meet_all(
    families: Sequence[Collection[int]], whole: int, floor: int = ..., *, most: int
) -> set[int] | None: ...
def meet_all(
    families: Sequence[Collection[int]], whole: int, floor: int = 1, *, most: int | None = None
) -> set[int] | None:
    """Intersect one member of every family, in all ways.

    Args:
        families: Masks; bits outside ``whole`` do not count.
        whole: The mask of all nodes; also the intersection of no families.
        floor: Intersections with fewer nodes are left out (the empty one always is).
        most: Give up once there are more intersections than this; None: never.

    Returns:
        The different intersections; None if the search was given up.
    """
    floor = max(floor, 1)
    reached = {whole} if whole.bit_count() >= floor else set()
    for family in sorted(families, key=len):
        reached = {
            m for m in meet(reached, {a & whole for a in family}, whole, most) if m.bit_count() >= floor
        }
        if most is not None and len(reached) > most:
            return None
    return reached


def meet(left: set[int], right: set[int], whole: int, most: int | None = None) -> set[int]:
    """Intersect every member of one family with every member of another.

    Args:
        left: Masks inside ``whole``.
        right: Likewise.
        whole: The mask of all nodes.
        most: Stop after about this many; a longer result is not complete.
    """
    if len(left) > len(right):
        left, right = right, left
    pairs = len(left) * len(right)
    if pairs <= _PLAIN_PAIRS or len(left) == 1:
        return {a & b for a in left for b in right}
    nodes = whole.bit_count()
    if nodes <= DENSE_NODES and pairs > nodes << nodes >> 2:
        return _counted(left, right, whole)
    return _divided(left, right, most)


def _counted(left: set[int], right: set[int], whole: int) -> set[int]:
    nodes = whole.bit_count()
    lanes = 1 << nodes
    layout = f"<{lanes}Q"
    straight = whole == lanes - 1
    places = None if straight else _places(left | right, whole)
    sums = (
        struct.unpack(layout, _supersets(family if places is None else {places[m] for m in family}, nodes))
        for family in (left, right)
    )
    product = struct.pack(layout, *map(operator.mul, *sums))
    packed = int.from_bytes(product, "little")
    for node, without in enumerate(_without(nodes)):
        packed -= packed >> (_LANE << node) & without
    counts = struct.unpack(layout, packed.to_bytes(lanes * 8, "little"))
    met = {mask for mask, count in enumerate(counts) if count}
    return met if straight else set(_spread(met, whole))


def _supersets(family: Iterable[int], nodes: int) -> bytes:
    """Return, for every mask, the number of members that are supersets of it: 8 bytes each."""
    raw = bytearray(8 << nodes)
    for mask in family:
        raw[mask << 3] = 1
    packed = int.from_bytes(raw, "little")
    for node, without in enumerate(_without(nodes)):
        packed += packed >> (_LANE << node) & without
    return packed.to_bytes(8 << nodes, "little")


@functools.cache
def _without(nodes: int) -> tuple[int, ...]:
    """Return, node by node, the lanes of the masks that do not hold the node."""
    lane = _LANE // 8
    return tuple(
        int.from_bytes((b"\xff" * (lane << node) + bytes(lane << node)) * (1 << nodes - node - 1), "little")
        for node in range(nodes)
    )


def _places(masks: Iterable[int], whole: int) -> dict[int, int]:
    """Number the nodes of ``whole`` from 0: returns each mask with its mask without gaps."""
    place = {low: 1 << i for i, low in enumerate(bits_of(whole))}
    return {mask: sum(place[low] for low in bits_of(mask)) for mask in masks}


def _spread(masks: Iterable[int], whole: int) -> Iterable[int]:
    """Undo ``_places``."""
    nodes = list(bits_of(whole))
    for mask in masks:
        yield sum(nodes[low.bit_length() - 1] for low in bits_of(mask))


def _divided(left: set[int], right: set[int], most: int | None) -> set[int]:
    """Intersect two families, member by member of the one with the narrower masks."""
    if _width(left) > _width(right):
        left, right = right, left
    members = list(right)
    all_members = (1 << len(members)) - 1
    holders = _holders(members)
    met: set[int] = set()
    for mask in left:
        if 1 << min(mask.bit_count(), 62) >= len(members):
            met.update([mask & other for other in members])
        else:
            met.update(_parts(mask, holders, all_members))
        if most is not None and len(met) > most:
            break
    return met


def _width(family: set[int]) -> float:
    return sum(map(int.bit_count, family)) / len(family)


def _parts(mask: int, holders: dict[int, int], all_members: int) -> list[int]:
    """Return the intersections of the mask with the members, each once."""
    parts = [(0, all_members)]
    for low in bits_of(mask):
        with_it = holders.get(low, 0)
        divided = []
        for common, group in parts:
            inside = group & with_it
            if inside:
                divided.append((common | low, inside))
            if inside != group:
                divided.append((common, group ^ inside))
        parts = divided
    return [common for common, _ in parts]


def _holders(members: Sequence[int]) -> dict[int, int]:
    """Return, for every node, the members that hold it, as bits."""
    raw: dict[int, bytearray] = {}
    size = (len(members) + 7) // 8
    for index, mask in enumerate(members):
        for low in bits_of(mask):
            raw.setdefault(low, bytearray(size))[index >> 3] |= 1 << (index & 7)
    return {low: int.from_bytes(data, "little") for low, data in raw.items()}
