"""``topoproxy enforce``: the text page."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.cli.enforce import _lines

SELECTION = {"namespaces": ["*"], "matchLabels": {}, "matchExpressions": [], "percent": 50}


def page(**changes: Any) -> dict[str, Any]:
    return {
        "mode": "enforce",
        "paused": False,
        "selection": SELECTION,
        "pods": {"enforced": 2, "observed": 1, "toEnforce": 0, "toGiveBack": 0, "inStep": 0},
        "observedContainers": 4,
        "problems": [],
    } | changes


def test_counts_agree_with_their_nouns() -> None:
    assert list(_lines(page())) == [
        "mode enforce",
        "selected: all namespaces, 50 %",
        "enforced: 2 pods",
        "observed: 1 pod with 4 containers, which may use the CPUs of owners",
    ]


def test_containers_are_named_only_if_there_are_any() -> None:
    pods = {"enforced": 1, "observed": 0, "toEnforce": 0, "toGiveBack": 1, "inStep": 1}
    assert list(_lines(page(pods=pods, observedContainers=0, paused=True)))[2:] == [
        "enforced: 1 pod",
        "observed: 0 pods",
        "still to be given back: 1 pod",
        "being changed now: 1 pod",
    ]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ({"namespaces": []}, "namespaces none"),
        (
            {"namespaces": ["a", "b-*"], "matchLabels": {"tier": "test"}},
            "namespaces a, b-*, labels tier=test",
        ),
        (
            {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["db", "web"]}]},
            "all namespaces, labels app NotIn db, web",
        ),
        (
            {"matchExpressions": [{"key": "app", "operator": "Exists", "values": []}]},
            "all namespaces, labels app Exists",
        ),
    ],
)
def test_the_selection_is_described(selection: dict[str, Any], expected: str) -> None:
    assert list(_lines(page(selection=SELECTION | selection)))[1] == f"selected: {expected}, 50 %"


def test_a_pod_that_cannot_be_changed_is_named() -> None:
    problem = {"pod": "ns/p", "reason": "a call in flight does not end"}
    assert list(_lines(page(problems=[problem])))[-1] == "problem: ns/p: a call in flight does not end"
