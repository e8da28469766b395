"""Reading a list item by item gives what reading it at once gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.kubelet.json_stream import read_items

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    items=st.lists(VALUES, max_size=5),
    others=st.dictionaries(
        st.text(max_size=5).filter(lambda k: k not in ("items", "kind")), VALUES, max_size=3
    ),
    first=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_items_of_any_list(items: list[Any], others: dict[str, Any], first: bool, indent: int | None) -> None:
    listed = {"kind": "PodList", "items": items}
    whole = {**listed, **others} if first else {**others, **listed}
    text = f"\n {json.dumps(whole, indent=indent, ensure_ascii=first)} \r\n"
    assert list(read_items(text.encode(), "PodList")) == items


@pytest.mark.parametrize("text", ["{}", '{"items": null}', '{"items":[]}', ' { "kind" : "PodList" } '])
def test_no_items(text: str) -> None:
    assert list(read_items(text.encode(), "PodList")) == []


LIST = b'{"kind": "PodList", "items": [{"a": [1, "x"]}, 2], "end": {}}'


@pytest.mark.parametrize("end", range(len(LIST)))
def test_a_list_that_ends_early_is_refused(end: int) -> None:
    with pytest.raises(ValueError):
        list(read_items(LIST[:end], "PodList"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "'{' is missing at character 0"),
        ("{1: 2}", "a key is missing"),
        ('{"items" []}', "':' is missing at character 9"),
        ('{"items": [1 2]}', "',' is missing at character 13"),
        ('{"items": [1,]}', "Expecting value"),
        ('{"items": [],}', "Expecting value"),
        ('{"items": []} {}', "there is more behind its end at character 14"),
        ('{"items": 0}', "it is not a PodList"),
        ('{"kind": "NodeList"}', "it is not a PodList"),
    ],
)
def test_invalid_lists(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        list(read_items(text.encode(), "PodList"))
    assert words in str(caught.value)
