"""Records of hints and of merges: kept hints, counts and conflicts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.demand import Demand, covers, lowest_masks, to_bits
from proxy.allocation.hint_family import Family, hint
from proxy.allocation.merge_record import record_answer, record_merge
from proxy.allocation.policies import decide
from proxy.model.explanation import SAMPLE, Merge, ProviderAnswer
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask
from proxy.model.options import Scope, TopologyPolicy
from tests.oracles.policy_parts import unpreferred

NOTHING = (ProviderAnswer("cpu", "", "no preference"),)


def of(nodes: list[int] | None, preferred: bool = True) -> TopologyHint:
    return TopologyHint(None if nodes is None else Mask(nodes), preferred)


def every(nodes: int, preferred: int) -> tuple[TopologyHint, ...]:
    """Return all masks in the order of the providers; those of one size are preferred."""
    sizes = range(1, nodes + 1)
    taken = itertools.chain.from_iterable(itertools.combinations(range(nodes), size) for size in sizes)
    return tuple(hint(to_bits(nodes), len(nodes) == preferred) for nodes in taken)


def test_the_three_kinds_of_empty_hints() -> None:
    assert record_answer("cpu", None) == record_answer("cpu", {}) == NOTHING
    assert record_answer("devices", {"gpu": None, "nic": ()}) == (
        ProviderAnswer("devices", "gpu", "no preference"),
        ProviderAnswer("devices", "nic", "impossible"),
    )


def test_the_kept_part_of_a_hint_list() -> None:
    (reported,) = record_answer("cpu", {"cpu": every(4, 2)})
    assert (reported.provider, reported.resource, reported.nothing) == ("cpu", "cpu", "")
    assert (reported.count, reported.preferred) == (15, 6)
    assert [str(h.affinity) for h in reported.hints] == ["0-1", "0,2", "1-2", "0,3", "1,3", "2-3"]
    (few,) = record_answer("cpu", {"cpu": every(3, 3)})
    assert [str(h.affinity) for h in few.hints] == ["0-2", "0", "1", "2", "0-1", "0,2"]
    assert (few.count, few.preferred) == (7, 1)
    (open_,) = record_answer("cpu", {"cpu": (of(None), of([1], False))})
    assert open_.hints == (of(None), of([1], False))


@given(st.sets(st.sampled_from(every(5, 2))), st.integers(0, 5))
def test_the_best_hints_are_kept(picked: set[TopologyHint], size: int) -> None:
    ordered = sorted(picked, key=lambda h: (len(h.affinity or ()), list(h.affinity or ())))
    hints = tuple(TopologyHint(h.affinity, len(h.affinity or ()) == size) for h in ordered)
    (reported,) = record_answer("cpu", {"cpu": hints})
    if not hints:
        assert reported.nothing == "impossible"
        return
    best = sorted(
        hints, key=lambda h: (not h.preferred, len(h.affinity or ()), h.affinity and h.affinity.bits)
    )
    assert list(reported.hints) == best[:SAMPLE]
    assert reported.preferred == sum(h.preferred for h in hints)


def test_a_family_is_sampled_and_not_counted() -> None:
    family = Family((1 << 39,), tuple(range(60)), 2, (Demand(3, tuple((1 << i, 1) for i in range(60))),), 3)
    (reported,) = record_answer("memory", {"memory": family})
    assert (reported.count, reported.preferred) == (None, None)
    assert reported.hints == (hint(1 << 39, preferred=False),), "the only one of the least size"
    wide = Family((), tuple(range(60)), 2, (Demand(30, tuple((1 << i, 1) for i in range(60))),), 30)
    (reported,) = record_answer("memory", {"memory": wide})
    assert len(reported.hints) == SAMPLE
    assert [h.affinity.bits for h in reported.hints if h.affinity][:2] == [
        (1 << 30) - 1,
        (1 << 31) - 1 - (1 << 29),
    ]
    assert all(h.preferred for h in reported.hints)


LOTS = st.lists(
    st.tuples(st.sets(st.integers(0, 5), min_size=1, max_size=2).map(to_bits), st.integers(0, 4)), max_size=6
)


@given(
    st.lists(st.builds(Demand, st.integers(0, 9), LOTS.map(tuple)), min_size=1, max_size=2),
    st.integers(1, 6),
)
def test_the_lowest_masks(demands: list[Demand], size: int) -> None:
    expected = [b for b in range(1, 64) if b.bit_count() == size and covers(demands, b)]
    assert list(lowest_masks(range(6), size, demands, 1000)) == expected
    assert list(lowest_masks(range(6), size, demands, size)) == [b for b in expected if b == (1 << size) - 1]
    assert list(lowest_masks(range(6), size, demands, size - 1)) == []


@pytest.mark.parametrize(
    ("policy", "answers", "conflicts"),
    [
        (TopologyPolicy.RESTRICTED, [{"a": (of([0]),)}, {"b": (of([0]),)}], ()),
        (
            TopologyPolicy.RESTRICTED,
            [{"cpu": (of([0]), of([1]), of([0, 1], False))}, {"gpu": (of([3]),)}, None, {"x": None}],
            ("cpu can only be on one of nodes 0-1 and gpu only on node 3",),
        ),
        (
            TopologyPolicy.BEST_EFFORT,
            [{"cpu": (of([0, 1]), of([2, 3]))}, {"gpu": (of([0]),)}],
            ("cpu can only be on nodes 0-1 together or nodes 2-3 together and gpu only on node 0",),
        ),
        (
            TopologyPolicy.RESTRICTED,
            [{"cpu": tuple(h for h in every(4, 2) if h.preferred)}, {"gpu": (of([0]),)}],
            ("cpu prefers 2 NUMA nodes and gpu 1 NUMA node",),
        ),
        (
            TopologyPolicy.RESTRICTED,
            [
                {"cpu": tuple(h for h in every(4, 2) if h.preferred and 0 in (h.affinity or ()))},
                {"gpu": tuple(h for h in every(5, 2) if h.preferred and 0 not in (h.affinity or ()))},
            ],
            ("no NUMA nodes are preferred by all of cpu, gpu",),
        ),
        (
            TopologyPolicy.RESTRICTED,
            [{"a": (of([0]), of([1]))}, {"b": (of([1]), of([2]))}, {"c": (of([2]), of([0]))}],
            ("no NUMA nodes are preferred by all of a, b, c",),
        ),
        (
            TopologyPolicy.RESTRICTED,
            [{"gpu": (), "nic": ()}, {"cpu": (of([1, 2], False), of([0, 3], False))}, {"m": (of([0]),)}],
            (
                "gpu cannot be given at all",
                "nic cannot be given at all",
                "cpu has no preferred NUMA nodes left; it needs at least nodes 1-2 now",
            ),
        ),
        (
            TopologyPolicy.SINGLE_NUMA_NODE,
            [{"cpu": (of([0], False), of([0, 1]))}, {"m": (of([0]),)}],
            ("cpu prefers no single NUMA node; it fits on node 0 now",),
        ),
        (
            TopologyPolicy.SINGLE_NUMA_NODE,
            [{"cpu": (of([0, 1]), of([0, 1, 2], False))}, {"m": (of([0]),)}],
            ("cpu does not fit on one NUMA node; it needs at least nodes 0-1 now",),
        ),
        (
            TopologyPolicy.SINGLE_NUMA_NODE,
            [{"cpu": (of(None, False),)}],
            ("cpu does not fit on one NUMA node",),
        ),
    ],
)
def test_the_resource_that_conflicts(
    policy: TopologyPolicy, answers: list[Hints], conflicts: tuple[str, ...]
) -> None:
    merge = record_merge(decide(policy, answers, Mask(range(4))), Scope.POD)
    assert merge is not None
    assert merge.conflicts == conflicts


def test_the_record_of_a_merge() -> None:
    decision = decide(TopologyPolicy.RESTRICTED, [{"cpu": every(2, 1)}], Mask(range(2)))
    assert record_merge(decision, Scope.CONTAINER) == Merge(
        "restricted", "container", of([0]), of([1]), "lower node ids"
    )
    assert record_merge(decide(TopologyPolicy.NONE, [], Mask([0])), Scope.POD) is None
    alone = record_merge(decide(TopologyPolicy.SINGLE_NUMA_NODE, [{"cpu": (of([0]),)}], Mask([0])), Scope.POD)
    assert alone is not None
    assert alone.best == of(None), "the allocators follow the best hint"


def test_a_conflict_of_families_names_their_own_preferences() -> None:
    nodes = tuple(range(40))
    one = Family((), nodes, 1, (Demand(1, tuple((1 << i, 1) for i in nodes)),), 1)
    two = Family((), nodes, 1, (Demand(2, tuple((1 << i, 1) for i in nodes)),), 2)
    decision = decide(TopologyPolicy.RESTRICTED, [{"cpu": one}, {"memory": two}], Mask(nodes))
    assert decision.hint == of([0, 1], False)
    assert not unpreferred(decision)
    merge = record_merge(decision, Scope.POD)
    assert merge is not None
    assert merge.conflicts == ("cpu prefers 1 NUMA node and memory 2 NUMA nodes",)
