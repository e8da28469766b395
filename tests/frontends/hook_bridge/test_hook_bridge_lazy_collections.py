from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Mapping, Sequence

import pytest

from proxy.frontends.hook_bridge.lazy_collections import LazyList, LazyMap


class Origin:
    """A source of data that counts its reads."""

    def __init__(self) -> None:
        self.reads = 0

    def map(self) -> dict[str, str]:
        self.reads += 1
        return {"a": "1", "b": "2"}

    def list(self) -> tuple[str, ...]:
        self.reads += 1
        return ("x", "y", "z")


def a_map() -> tuple[LazyMap[str], Origin]:
    origin = Origin()
    return LazyMap(Origin.map, origin), origin


def a_list() -> tuple[LazyList[str], Origin]:
    origin = Origin()
    return LazyList(Origin.list, origin), origin


def test_a_map_is_read_once_on_first_use() -> None:
    lazy, origin = a_map()
    assert isinstance(lazy, Mapping)
    assert origin.reads == 0
    assert lazy["a"] == "1"
    assert lazy.get("c") is None
    assert "b" in lazy
    assert "c" not in lazy
    assert [*lazy.items()] == [("a", "1"), ("b", "2")]
    assert len(lazy) == 2
    assert {**lazy, "b": "3"} == {"a": "1", "b": "3"}
    assert origin.reads == 1


def test_a_map_compares_and_prints_as_a_dict() -> None:
    lazy, _ = a_map()
    assert lazy == {"a": "1", "b": "2"} == lazy
    assert lazy == a_map()[0]
    assert lazy != {"a": "1"}
    assert repr(lazy) == "{'a': '1', 'b': '2'}"
    with pytest.raises(KeyError, match="c"):
        lazy["c"]
    with pytest.raises(TypeError, match="unhashable"):
        hash(lazy)


def test_the_error_of_changing_a_map_names_the_alternative() -> None:
    lazy = LazyMap(lambda _: {"a": "1"}, None)
    with pytest.raises(TypeError, match="an event cannot be changed: answer with an Adjustment"):
        lazy["a"] = "2"
    with pytest.raises(TypeError, match="cannot be changed"):
        del lazy["a"]
    assert lazy == {"a": "1"}


def test_a_list_is_read_once_and_is_like_a_tuple() -> None:
    lazy, origin = a_list()
    assert isinstance(lazy, Sequence)
    assert origin.reads == 0
    assert (lazy[0], lazy[-1], lazy[1:], len(lazy)) == ("x", "z", ("y", "z"), 3)
    assert [*lazy] == ["x", "y", "z"]
    assert [*reversed(lazy)] == ["z", "y", "x"]
    assert "y" in lazy
    assert "q" not in lazy
    assert lazy == ("x", "y", "z") == lazy
    assert lazy == a_list()[0]
    assert lazy != ("x",)
    assert repr(lazy) == "('x', 'y', 'z')"
    assert hash(lazy) == hash(("x", "y", "z"))
    assert origin.reads == 1


def test_copies_are_plain_values() -> None:
    assert type(copy.deepcopy(a_map()[0])) is dict
    assert pickle.loads(pickle.dumps(a_list()[0])) == ("x", "y", "z")


def test_the_source_is_released_after_reading() -> None:
    lazy, origin = a_map()
    before = sys.getrefcount(origin)
    len(lazy)
    assert sys.getrefcount(origin) == before - 1


def test_a_failed_read_is_repeated_later() -> None:
    """A thread of a hook may be ended in the middle of a read."""
    tries = []

    def load(origin: object) -> dict[str, str]:
        tries.append(origin)
        if len(tries) == 1:
            raise KeyboardInterrupt
        return {"a": "1"}

    lazy = LazyMap(load, "origin")
    with pytest.raises(KeyboardInterrupt):
        len(lazy)
    assert lazy == {"a": "1"}
    assert tries == ["origin", "origin"]


def test_threads_that_read_at_the_same_time_get_the_same_content() -> None:
    gate = threading.Barrier(4)
    results: list[object] = []

    def load(_: object) -> dict[str, str]:
        gate.wait(30)
        return {"a": "1"}

    lazy = LazyMap(load, "origin")
    threads = [threading.Thread(target=lambda: results.append(dict(lazy))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [{"a": "1"}] * 4
