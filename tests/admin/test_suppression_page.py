"""BE suppression on the page of ``topoproxy status``."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.admin.page import render
from proxy.admin.suppression import suppression

WHY = "the budget is 4.4 CPUs: 65 % of 16 are 10.4, other pods use 6.0, the system uses 0.0"
CPUSET = {
    "mode": "cpuset",
    "threshold": 65,
    "min_percent": 0,
    "cpus": "0-1,4-5,8",
    "pool": "0-15",
    "quota_us": None,
    "group": "kubepods/besteffort",
    "why": WHY,
    "budget_milli": 4400,
    "capacity_milli": 16000,
    "usage": {"node": 10.0, "be": 4.0, "others": 6.0, "system": 0.0},
}


def lines(data: Any, width: int = 100) -> list[str]:
    return list(suppression(data, width))


def test_fewer_cpus() -> None:
    change = {"when": time.time() - 3, "before": "CPUs 0-10", "after": "CPUs 0-1,4-5,8", "why": WHY}
    assert lines(CPUSET | {"last_change": change}) == [
        "",
        "BE suppression (cpuset, up to 65 % of the node)",
        "  CPUs in use: other pods 6.0, BE pods 4.0, system 0.0; for BE pods: 4.4",
        "  BE pods run on 0-1,4-5,8 of 0-15",
        "  changed 3 s ago to CPUs 0-1,4-5,8 from CPUs 0-10",
        f"    {WHY}",
    ]


def test_nothing_taken_away() -> None:
    assert lines(CPUSET | {"cpus": "0-15"})[-1] == "  BE pods run on 0-15"


def test_a_quota() -> None:
    data = CPUSET | {"mode": "cfs-quota", "quota_us": 440_000}
    assert lines(data)[-1] == "  quota: 4.40 CPUs for /kubepods/besteffort"
    assert not [line for line in lines(data | {"quota_us": -1}) if "quota:" in line]


def test_usage_that_is_not_known() -> None:
    data = {key: value for key, value in CPUSET.items() if key not in ("usage", "budget_milli")}
    assert lines(data)[2] == "  usage is not known"
    off = data | {"mode": "off"}
    assert lines(off) == ["", "BE suppression (off, up to 65 % of the node)"]


def test_where_it_stands() -> None:
    page = render({"pools": {"shared": "0-15", "be": "0-15"}, "beSuppress": CPUSET})
    assert page.index("POOL") < page.index("BE suppression") < page.index("No containers")
    assert "BE suppression" not in render({"beSuppress": {}})
    assert all(len(line) <= 50 for line in lines(CPUSET, 50)[2:])


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*CPUSET, "when"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*CPUSET, "last_change"]), ANY))
def test_an_answer_of_another_version(data: dict[str, object]) -> None:
    assert all("\n" not in line for line in lines({"mode": "cpuset"} | data))
