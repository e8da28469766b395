"""All policies held against the plain product of all hints, compared pair by pair as kubelet does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.distance import Distances
from proxy.allocation.policies import decide
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask
from proxy.model.options import TopologyPolicy

NODES = 4
WHOLE = (1 << NODES) - 1


class Plain(NamedTuple):
    """A hint as bits; None for no affinity."""

    bits: int | None
    preferred: bool


def product(
    policy: TopologyPolicy, answers: Sequence[Hints], table: Sequence[Sequence[int]] | None
) -> tuple[Plain, bool]:
    """kubernetes v1.36 pkg/kubelet/cm/topologymanager/policy.go and the policies, rule by rule."""
    lists: list[list[Plain]] = []
    for answer in answers:
        if not answer:
            lists.append([Plain(None, True)])
        for hints in (answer or {}).values():
            if hints is None:
                lists.append([Plain(None, True)])
            else:
                read = [
                    Plain(h.affinity.bits if h.affinity is not None else None, h.preferred) for h in hints
                ]
                lists.append(read or [Plain(None, False)])
    single = policy is TopologyPolicy.SINGLE_NUMA_NODE
    if single:
        lists = [
            [h for h in hs if h.preferred and (h.bits is None or h.bits.bit_count() == 1)] for hs in lists
        ]
        table = None
    narrowest = [[h.bits.bit_count() for h in hints if h.bits is not None] for hints in lists]
    target = max((min(counts) for counts in narrowest if counts), default=0)
    best: Plain | None = None
    for chosen in itertools.product(*lists):
        reported = [h.bits for h in chosen if h.bits is not None]
        bits = WHOLE
        for other in reported:
            bits &= other
        preferred = all(h.preferred for h in chosen) and all(other == reported[0] for other in reported)
        if bits and (best is None or better(best, Plain(bits, preferred), target, table)):
            best = Plain(bits, preferred)
    result = best or Plain(WHOLE, False)
    if single and result.bits == WHOLE:
        result = Plain(None, result.preferred)
    return result, result.preferred or policy is TopologyPolicy.BEST_EFFORT


def better(best: Plain, new: Plain, target: int, table: Sequence[Sequence[int]] | None) -> bool:
    """Return whether the candidate takes the place of the best so far."""
    if best.preferred != new.preferred:
        return new.preferred
    assert best.bits is not None
    assert new.bits is not None
    c, d = best.bits.bit_count(), new.bits.bit_count()
    if new.preferred or c > target:
        return fitter(best.bits, new.bits, table)
    if c == target:
        return d == target and fitter(best.bits, new.bits, table)
    if d > target:
        return False
    if d == target or d > c:
        return True
    return d == c and fitter(best.bits, new.bits, table)


def fitter(old: int, new: int, table: Sequence[Sequence[int]] | None) -> bool:
    if old == new:
        return False
    if old.bit_count() != new.bit_count() or table is None or mean(old, table) == mean(new, table):
        return (new.bit_count(), new) < (old.bit_count(), old)
    return mean(new, table) < mean(old, table)


def mean(bits: int, table: Sequence[Sequence[int]]) -> float:
    nodes = [i for i in range(NODES) if bits >> i & 1]
    return sum(table[a][b] for a in nodes for b in nodes) / len(nodes) ** 2


MASKS = st.none() | st.integers(0, WHOLE).map(Mask.from_bits)
HINTS = st.lists(st.builds(TopologyHint, MASKS, st.booleans()), max_size=4).map(tuple)
ANSWERS: st.SearchStrategy[Hints] = st.none() | st.dictionaries(
    st.sampled_from("abc"), st.none() | HINTS, max_size=2
)
TABLES = st.none() | st.lists(
    st.lists(st.sampled_from([10, 11, 12, 21]), min_size=NODES, max_size=NODES),
    min_size=NODES,
    max_size=NODES,
)
MERGING = st.sampled_from(
    [TopologyPolicy.BEST_EFFORT, TopologyPolicy.RESTRICTED, TopologyPolicy.SINGLE_NUMA_NODE]
)


@given(MERGING, st.lists(ANSWERS, max_size=3), TABLES)
def test_a_decision_is_that_of_the_product(
    policy: TopologyPolicy, answers: list[Hints], table: list[list[int]] | None
) -> None:
    distances = table and Distances({i: dict(enumerate(row)) for i, row in enumerate(table)})
    result = decide(policy, answers, Mask.from_bits(WHOLE), distances or None)
    bits = None if result.hint.affinity is None else result.hint.affinity.bits
    assert (Plain(bits, result.hint.preferred), result.verdict.admitted) == product(policy, answers, table)


@given(st.lists(ANSWERS, max_size=3))
def test_without_a_policy_nothing_is_decided(answers: list[Hints]) -> None:
    result = decide(TopologyPolicy.NONE, answers, Mask.from_bits(WHOLE))
    assert (result.hint, result.verdict.admitted) == (TopologyHint(None, preferred=False), True)
