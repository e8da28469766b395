from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.model.kubelet import NodeMeta
from proxy.pools.node_meta import node_meta

WHOLE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "n1", "uid": "u-1", "labels": {"a": "b"}, "annotations": {"c": "d"}},
    "status": {
        "capacity": {"cpu": "8", "memory": "1Ki"},
        "allocatable": {"cpu": "7500m", "memory": "1000"},
    },
}


def test_a_node_as_kubectl_prints_it() -> None:
    assert node_meta(json.dumps(WHOLE)) == NodeMeta(
        "n1",
        "u-1",
        {"a": "b"},
        {"c": "d"},
        {"cpu": 8000, "memory": 1_024_000},
        {"cpu": 7500, "memory": 1_000_000},
    )


def test_metadata_is_read_alone_and_in_an_object() -> None:
    assert node_meta('{"labels": {"a": "b"}}') == NodeMeta(labels={"a": "b"})
    assert node_meta('{"metadata": {"name": "n1", "labels": null}}') == NodeMeta("n1")


def test_a_node_object_is_nested_as_deep_and_is_as_long_as_it_may() -> None:
    """A Node object comes from the API server or a file of the operator: only annotations have limits."""
    deep = json.loads("[" * 40 + "]" * 40)
    assert node_meta(json.dumps({**WHOLE, "spec": deep})) == node_meta(json.dumps(WHOLE))
    long = {"metadata": {"name": "n1", "annotations": {"c": "d" * 300_000}}}
    assert node_meta(json.dumps(long)).annotations == {"c": "d" * 300_000}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ('{"metadata": {"name"', "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no metadata"),
        ('{"metadata": []}', "no metadata"),
        ('{"metadata": ["name"]}', "no metadata"),
        ('{"metadata": "name"}', "no metadata"),
        ('{"kind": "List", "metadata": {"name": "x"}}', "of kind 'List', not a Node"),
        ('{"kind": "' + "x" * 500 + '"}', "..."),
    ],
)
def test_invalid_node_objects(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        node_meta(text)


def test_members_of_the_wrong_kind_are_reported_and_the_rest_counts() -> None:
    found = node_meta(
        json.dumps(
            {
                "metadata": {"name": 3, "labels": {"a": True, "b": "c", "d": None}, "annotations": "x"},
                "status": {"capacity": {"cpu": "many", "memory": 1}, "allocatable": 7},
            }
        )
    )
    assert (found.name, dict(found.labels), dict(found.annotations)) == ("", {"b": "c"}, {})
    assert dict(found.capacity) == {"memory": 1000}
    assert (
        found.problems
        == (
            "capacity: cpu: 'many' is not an amount",
            "allocatable is not a JSON object",
            "name is 3, not a string",
            "labels: a is True, not a string",
            "annotations is not a JSON object",
        )
        or len(found.problems) == 5
    )


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
PART = st.dictionaries(st.sampled_from(["name", "uid", "labels", "annotations", "capacity"]), JUNK)


@given(JUNK | st.fixed_dictionaries({"metadata": PART, "status": JUNK | PART}))
def test_invalid_node_objects_are_refused_or_read_without_other_errors(raw: object) -> None:
    try:
        found = node_meta(json.dumps(raw))
    except ValueError:
        return
    assert all(isinstance(text, str) for text in (*found.labels.values(), *found.annotations.values()))
    assert all(len(problem) < 400 for problem in found.problems)
