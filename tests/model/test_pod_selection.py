"""Which pods are selected: labels as in Kubernetes, and a percentage that only ever adds pods."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.model.admission import Namespaces
from proxy.model.label_selector import LONGEST_VALUE, LabelExpression, LabelOperator, LabelSelector
from proxy.model.pod_selection import ALL_PODS, MOST_LABELS, PodSelection, number_of, selectable_labels

IN, NOT_IN, EXISTS, ABSENT = LabelOperator
KEYS = st.sampled_from(["app", "tier", "zone"])
VALUES = st.sampled_from(["", "a", "b", "c"])
LABELS = st.dictionaries(KEYS, VALUES)
EXPRESSIONS = st.builds(
    LabelExpression, KEYS, st.sampled_from([IN, NOT_IN]), st.lists(VALUES, min_size=1).map(tuple)
)
EXPRESSIONS |= st.builds(LabelExpression, KEYS, st.sampled_from([EXISTS, ABSENT]))
SELECTORS = st.builds(
    LabelSelector, LABELS.map(lambda labels: tuple(sorted(labels.items()))), st.lists(EXPRESSIONS).map(tuple)
)
SELECTIONS = st.builds(
    PodSelection,
    st.lists(st.sampled_from(["*", "a", "b-?", "team-*"]), unique=True).map(
        lambda some: Namespaces(tuple(some))
    ),
    SELECTORS,
    st.integers(0, 100),
)


@pytest.mark.parametrize(
    ("operator", "values", "without", "with_a", "with_b"),
    [
        (IN, ("a",), False, True, False),
        (IN, ("a", "b"), False, True, True),
        (NOT_IN, ("a",), True, False, True),
        (EXISTS, (), False, True, True),
        (ABSENT, (), True, False, False),
    ],
)
def test_expressions_have_the_meaning_of_kubernetes(
    operator: LabelOperator, values: tuple[str, ...], without: bool, with_a: bool, with_b: bool
) -> None:
    expression = LabelExpression("app", operator, values)
    found = [expression.matches(labels) for labels in ({"tier": "a"}, {"app": "a"}, {"app": "b"})]
    assert found == [without, with_a, with_b]


@given(SELECTORS, LABELS)
def test_all_parts_of_a_selector_must_hold(selector: LabelSelector, labels: dict[str, str]) -> None:
    parts = [labels.get(key) == value for key, value in selector.match_labels]
    parts += [each.matches(labels) for each in selector.match_expressions]
    assert selector.matches(labels) is (False not in parts)
    assert not selector.all or selector.matches(labels)


@given(st.text(), st.lists(st.integers(0, 100), min_size=2, max_size=2).map(sorted))
def test_a_larger_percentage_only_adds_pods(uid: str, percents: list[int]) -> None:
    few, many = (PodSelection(percent=percent) for percent in percents)
    assert not few.selects(uid, "a", ()) or many.selects(uid, "a", ())
    assert ALL_PODS.selects(uid, "a", ())
    assert not PodSelection(percent=0).selects(uid, "a", ())


def test_the_number_of_a_pod_never_changes() -> None:
    # A later version that numbers pods in another way would move containers at its start.
    known = {"": 88, "6d3fbd4e-4e0f-4b5a-9f7b-2f5a0a1c9c11": 19, "pod-1": 5, "pod-2": 30}
    assert {uid: number_of(uid) for uid in known} == known


def test_the_share_is_near_the_percentage() -> None:
    numbers = [number_of(f"0f3a-{at}") for at in range(20_000)]
    for percent in (1, 10, 50, 90):
        share = sum(number < percent for number in numbers) / len(numbers) * 100
        assert share == pytest.approx(percent, abs=1.2)
    assert set(numbers) == set(range(100))


def test_namespace_labels_and_percentage_must_all_select() -> None:
    selection = PodSelection(Namespaces(("team-*",)), LabelSelector((("app", "a"),)), 50)
    inside, outside = (
        next(f"u{at}" for at in itertools.count() if (number_of(f"u{at}") < 50) is is_in)
        for is_in in (True, False)
    )
    assert selection.selects(inside, "team-x", (("app", "a"),))
    assert not selection.selects(outside, "team-x", (("app", "a"),))
    assert not selection.selects(inside, "other", (("app", "a"),))
    assert not selection.selects(inside, "team-x", (("app", "b"),))


@given(SELECTIONS)
def test_rules_survive_the_ledger(selection: PodSelection) -> None:
    assert PodSelection.load(selection.dump()) == selection


@pytest.mark.parametrize(
    "change",
    [
        {"percent": True},
        {"percent": None},
        {"namespaces": "a"},
        {"matchLabels": []},
        {"matchExpressions": [1]},
        {"matchExpressions": [{"key": "a", "operator": "Near", "values": []}]},
    ],
)
def test_an_invalid_selection_rule_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"enforce|expression|Near"):
        PodSelection.load({**ALL_PODS.dump(), **change})


def test_only_labels_that_pods_can_have_are_kept() -> None:
    labels = {"b": "2", "a": "1", "io.kubernetes.pod.uid": "u", "long": "x" * (LONGEST_VALUE + 1), "ä": "1"}
    assert selectable_labels(labels) == (("a", "1"), ("b", "2"))
    many = {f"k{at:04}": "" for at in range(MOST_LABELS + 50)}
    assert selectable_labels(many) == tuple(sorted(many.items()))[:MOST_LABELS]
    assert selectable_labels({}) == ()
