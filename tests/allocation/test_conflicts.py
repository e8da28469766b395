"""The conflict of a merge without a preferred hint: few masks are named, many are described by size."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from proxy.allocation.merge_record import record_answer, record_merge
from proxy.allocation.policies import decide
from proxy.model.explanation import SAMPLE
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask
from proxy.model.options import Scope, TopologyPolicy

NODES = Mask(range(8))
ALL_OF = "no NUMA nodes are preferred by all of a, b"


def preference(*masks: Iterable[int]) -> tuple[TopologyHint, ...]:
    return tuple(TopologyHint(Mask(mask), preferred=True) for mask in masks)


FREE = TopologyHint(None, preferred=True)
PAIRS = preference([0, 1], [0, 2], [0, 3], [1, 2], [1, 3])


@pytest.mark.parametrize(
    ("one", "other", "conflict"),
    [
        (
            PAIRS[:4],
            preference([4]),
            (
                "a can only be on nodes 0-1 together or nodes 0,2 together or nodes 1-2 together "
                "or nodes 0,3 together and b only on node 4"
            ),
        ),
        (PAIRS, preference([4]), "a prefers 2 NUMA nodes and b 1 NUMA node"),
        (preference([4]), PAIRS, "a prefers 1 NUMA node and b 2 NUMA nodes"),
        (PAIRS, preference([4, 5]), ALL_OF),
        (preference([4, 5]), PAIRS, ALL_OF),
        (
            preference(*[[n] for n in range(6)]),
            preference([6], [7]),
            "a can only be on one of nodes 0-5 and b only on one of nodes 6-7",
        ),
        (
            preference([0], [1, 2]),
            preference([3]),
            "a can only be on nodes 0 together or nodes 1-2 together and b only on node 3",
        ),
        ((*PAIRS, *preference([0, 1, 2])), preference([4, 5]), ALL_OF),
        (preference([4, 5]), (*PAIRS, *preference([0, 1, 2])), ALL_OF),
    ],
)
def test_two_incompatible_providers_are_named(
    one: tuple[TopologyHint, ...], other: tuple[TopologyHint, ...], conflict: str
) -> None:
    merge = record_merge(decide(TopologyPolicy.RESTRICTED, [{"a": one}, {"b": other}], NODES), Scope.POD)
    assert merge is not None
    assert merge.conflicts == (conflict,)


def test_the_first_two_incompatible_providers_are_named() -> None:
    answers = [
        {
            "a": preference([0], [0, 1]),
            "free": (FREE, *preference([7])),
            "b": preference([0, 1], [2]),
            "c": preference([2]),
        }
    ]
    merge = record_merge(decide(TopologyPolicy.RESTRICTED, answers, NODES), Scope.POD)
    assert merge is not None
    assert merge.conflicts == (
        "a can only be on nodes 0 together or nodes 0-1 together and c only on node 2",
    )


def test_the_fewest_remaining_nodes_determine_the_conflict() -> None:
    hints = tuple(
        TopologyHint(mask, preferred=False) for mask in (None, Mask([2, 3]), Mask([1, 4]), Mask([0, 5, 6]))
    )
    merge = record_merge(decide(TopologyPolicy.RESTRICTED, [{"a": hints}], NODES), Scope.POD)
    assert merge is not None
    assert merge.conflicts == ("a has no preferred NUMA nodes left; it needs at least nodes 2-3 now",)


def test_a_full_sample_has_preferred_hints_only() -> None:
    others = tuple(TopologyHint(Mask([n]), preferred=False) for n in range(8))
    (reported,) = record_answer("cpu", {"cpu": (*others, *PAIRS, *preference([2, 3]))})
    assert len(reported.hints) == SAMPLE == 6
    assert all(hint.preferred for hint in reported.hints)
    (reported,) = record_answer("cpu", {"cpu": (*others, *PAIRS)})
    assert [hint.preferred for hint in reported.hints] == [True] * 5 + [False]
