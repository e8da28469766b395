from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.admin.page import render
from proxy.admin.quotas import quotas

ENTRIES = [
    {"pod": "ns/db", "container": "main", "was": 200_000, "group": ""},
    {"pod": "ns/db", "container": "", "was": 300_000, "group": "kubepods/poddb"},
    {"pod": "", "container": "", "was": 100_000, "group": "kubepods/podgone"},
]
PART = """
CFS quotas that are off, and what they were
kubepods/podgone  100000 us
ns/db             300000 us
ns/db/main        200000 us
"""


def test_containers_whose_quota_is_off() -> None:
    assert "\n".join(quotas(ENTRIES)) + "\n" == PART
    assert PART in render({"quotas": ENTRIES})
    assert "CFS" not in render({"quotas": []})


def test_what_is_shown_is_one_line() -> None:
    (*_, line) = quotas([{"pod": "a\x1b[2J\nb", "was": "x"}])
    assert line == "a [2J b  ?"


@given(
    st.lists(st.dictionaries(st.sampled_from(["pod", "container", "was", "group"]), st.none() | st.text()))
)
def test_nothing_breaks_it(entries: list[dict[str, str | None]]) -> None:
    assert len(list(quotas(entries))) in (0, 2 + len(entries))
