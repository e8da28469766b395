from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.pools.go_json import LARGEST, MOST_ITEMS, Fields, amount, amounts, load, objects

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a": Infinity}', "[" * 100_000, "1 2"])
def test_invalid_json_is_refused_as_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|number|Expecting|nested"):
        load(text)


def test_only_32_levels_are_read() -> None:
    assert load("[" * 32 + "]" * 32)
    with pytest.raises(ValueError, match="nested more than 32 levels deep"):
        load("[" * 33 + "]" * 33)


def test_texts_above_the_kubernetes_size_limit_are_not_read() -> None:
    whole = json.dumps("x" * (LARGEST - 2))
    assert len(whole) == LARGEST
    assert load(whole) == "x" * (LARGEST - 2)
    with pytest.raises(ValueError, match=rf"^it has {LARGEST + 1} characters; at most {LARGEST} are read$"):
        load(whole + " ")
    assert load(whole + " ", largest=None) == "x" * (LARGEST - 2)


def test_numbers_too_long_for_python_are_reported_with_our_message() -> None:
    with pytest.raises(ValueError, match=r"^not JSON: a number in it has thousands of digits$"):
        load('{"cpuset": ' + "9" * 5000 + "}")
    with pytest.raises(ValueError, match=r"^not JSON: NaN is not a number$"):
        load("NaN")


def test_members_in_any_case_the_last_one_counts() -> None:
    fields = Fields({"CPUSet": "1", "node": 3, "Node": 4, "more": []})
    assert fields.text("cpuset") == "1"
    assert (fields.number("node"), fields.number("NODE")) == (4, 4)
    assert fields.names() == ["CPUSet", "node", "Node", "more"]
    assert fields.entries() == {"CPUSet": "1", "node": 3, "Node": 4, "more": []}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"cpuset":"1","CPUSet":"2"}', "2"),
        ('{"CPUSet":"2","cpuset":"1"}', "1"),
        ('{"cpuset":"1","cpuset":"2"}', "2"),
        ('{"cpuset":"1","CPUSET":"2","cpuset":"3"}', "3"),
        ('{"cpuset":"1","CPUSET":"2","cpuset":null}', "2"),
        ('{"cpuset":"1","CPUSET":null}', "1"),
        ('{"CPUSET":"1","cpuset":null}', "1"),
        ('{"cpuset":null,"CPUSET":"3"}', "3"),
        ('{"cpuset":"1","cpuset":null}', "1"),
        ('{"cpuset":null,"CPUSET":null}', ""),
        ('{"cpu\\u017fet":"long s"}', "long s"),
    ],
)
def test_repeated_members_as_go_reads_them(text: str, expected: str) -> None:
    """These results, and those below, are those of a program with Go 1.26's encoding/json."""
    assert Fields.parse(text).text("cpuset") == expected


def test_null_after_a_value_removes_what_is_a_list_a_map_or_a_pointer_in_go() -> None:
    text = '{"flag":true,"FLAG":null,"list":[{}],"LIST":null,"map":{"x":1},"MAP":null}'
    fields = Fields.parse(text)
    assert (fields.flag("flag"), list(fields.objects("list")), fields.amounts("map")) == (None, [], {})
    text = '{"number":1,"NUMBER":null,"object":{"a":"b"},"OBJECT":null}'
    fields = Fields.parse(text)
    assert (fields.number("number"), fields.fields("object").text("a")) == (1, "b")


def test_keys_of_maps_match_exactly() -> None:
    assert Fields.parse('{"map":{"x":1,"X":2,"x":3}}').amounts("map") == {"x": 3, "X": 2}
    assert Fields.parse('{"x":1,"X":2}').entries() == {"x": 1, "X": 2}


def test_null_is_absent() -> None:
    fields = Fields.parse('{"a": null}')
    assert (fields.text("a"), fields.number("a"), fields.flag("a"), list(fields.objects("a"))) == (
        "",
        0,
        None,
        [],
    )
    assert (fields.amounts("a"), Fields(None).get("a")) == ({}, None)


@pytest.mark.parametrize(
    ("call", "raw"),
    [
        ("text", 1),
        ("number", "1"),
        ("number", 1.0),
        ("number", True),
        ("number", 1 << 31),
        ("number", -(1 << 31) - 1),
        ("flag", 0),
        ("fields", []),
        ("objects", {}),
        ("objects", [1]),
        ("amounts", {"cpu": "x"}),
        ("amounts", {"cpu": True}),
        ("amounts", ["cpu"]),
    ],
)
def test_members_of_another_kind_are_named(call: str, raw: object) -> None:
    with pytest.raises(ValueError, match=r"^(an item of )?[abc]"):
        list(getattr(Fields({"a": raw}), call)("a"))


@pytest.mark.parametrize("number", [-(1 << 31), -1, 0, (1 << 31) - 1])
def test_integers_of_32_bits_are_read(number: int) -> None:
    assert Fields({"a": number}).number("a") == number


def test_the_limits_are_those_of_kubernetes_and_linux() -> None:
    assert LARGEST == 262_144, "TotalAnnotationSizeLimitB of the API server"
    assert MOST_ITEMS == 1024, "NUMA nodes of the largest configuration of Linux"


def test_amounts_are_kept_as_written() -> None:
    held = amounts({"cpu": "1500m", "memory": 2, "x": None})
    assert held == {"cpu": "1500m", "memory": 2, "x": "0"}
    assert (amount(held, "cpu", milli=True), amount(held, "cpu"), amount(held, "none")) == (1500, 2, 0)


def test_objects_of_null_are_none() -> None:
    assert list(objects(None, "it")) == []


@given(JSON, st.sampled_from(["text", "number", "flag", "fields", "objects", "amounts"]))
def test_nothing_but_value_errors_for_any_json(raw: object, call: str) -> None:
    with contextlib.suppress(ValueError):
        found = getattr(Fields({"a": raw}), call)("a")
        list(found) if call == "objects" else None
