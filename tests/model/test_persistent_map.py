from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.model.persistent_map import PersistentMap

KEYS = st.sampled_from([f"k{i}" for i in range(200)])


@given(
    st.dictionaries(KEYS, st.integers(), max_size=150),
    st.lists(st.tuples(KEYS, st.none() | st.integers()), max_size=100),
)
def test_a_persistent_map_behaves_like_an_immutable_dictionary(
    start: dict[str, int], steps: list[tuple[str, int | None]]
) -> None:
    plain, table = dict(start), PersistentMap(start)
    history = [(dict(plain), table)]
    for key, value in steps:
        if value is None:
            plain.pop(key, None)
            table = table.drop(key)
        else:
            plain[key] = value
            table = table.put(key, value)
        history.append((dict(plain), table))
    for expected, seen in history:
        assert dict(seen) == expected == dict(seen.items())
        assert len(seen) == len(expected)
        assert sorted(seen.values()) == sorted(expected.values())
        for i in range(0, 200, 7):
            key = f"k{i}"
            assert seen.get(key) == expected.get(key)
            assert (key in seen) == (key in expected)


def test_what_is_not_there() -> None:
    table = PersistentMap({"a": 1})
    assert table["a"] == 1
    with pytest.raises(KeyError):
        table["b"]
    assert table.get("b", 5) == 5
    assert table.drop("b") is table
    assert PersistentMap() == {}
