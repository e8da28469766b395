"""Drift on the page of ``topoproxy status``."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.admin.drift import drift
from proxy.admin.page import render

WAR = {
    "container": "ns/ls/c",
    "id": "abcdef",
    "by": "kubelet",
    "cpus": "4-15",
    "found": "0-15",
    "times": 12,
    "seconds": 33.4,
    "next_s": 0.5,
}
DATA = {
    "watched": 3,
    "not_watched": "",
    "by": {"kubelet": 2, "systemd": 0, "runc": 0, "unknown": 5},
    "writeConflicts": [WAR],
}


def lines(data: Any, width: int = 120) -> list[str]:
    return list(drift(data, width))


def test_the_writer_and_repeated_writers() -> None:
    assert lines(DATA) == [
        "",
        "Cpusets written by other programs and restored (by probable writer): unknown 5, kubelet 2",
        "  WRITTEN AGAIN AND AGAIN  BY       FOUND  INSTEAD OF  TIMES  SINCE  PUT BACK IN",
        "  ns/ls/c                  kubelet  0-15   4-15        12     33 s   0.5 s",
    ]
    lack = DATA | {"not_watched": "too many inotify watches", "writeConflicts": []}
    assert lines(lack)[2:] == ["  not all writes are noticed: too many inotify watches"]


def test_an_empty_page() -> None:
    assert lines({}) == []
    assert lines(DATA | {"by": {"kubelet": 0}, "writeConflicts": []}) == []


def test_where_it_stands() -> None:
    page = render({"drift": DATA})
    assert "kubelet 2" in page
    assert page.index("Cpusets written") > page.index("No containers")
    assert page.index("Cpusets written") < page.index("No problems")
    assert all(len(line) <= 40 for line in lines(DATA, 40))


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*WAR, "kubelet"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*DATA]), ANY))
def test_an_answer_of_another_version(data: dict[str, object]) -> None:
    assert all("\n" not in line for line in lines(data))
