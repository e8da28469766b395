"""The page of ``topoproxy observe report``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.observe.plan_report_text import render_plan_report

NONE = {
    "containers": 0,
    "applied": 0,
    "unchanged": 0,
    "pins": 0,
    "moves": 0,
    "drift": 0,
    "cfs_quotas": 0,
    "memory_nodes": 0,
    "rejections": 0,
}


def row(name: str, **more: object) -> dict[str, object]:
    plain = {"change": "", "pool": "shared", "cpus": "0-15", "desired_cpus": "0-15", "mems": "0-1"}
    return {"container": name, **plain, "desired_mems": "0-1", "rebinds_memory": False, **more}


def page(mode: str = "observe", pods: Any = (), refused: Any = (), **sums: int) -> dict[str, object]:
    return {"mode": mode, "sums": {**NONE, **sums}, "pods": list(pods), "rejections": list(refused)}


def test_an_observed_node() -> None:
    quota = {"removes_cfs_quota": True, "cfs_quota_us": 200000}
    own = row("main", change="pin", pool="own", desired_cpus="2-3", rebinds_memory=True, desired_mems="0")
    pods = [
        {"pod": "demo/trading", **quota, "containers": [own]},
        {"pod": "demo/web", "containers": [row("nginx", change="move", desired_cpus="0-1,4-15")]},
        {"pod": "demo/scan", "containers": [row("scan", pool="be")]},
    ]
    refused = {
        "pod": "demo/huge",
        "container": "main",
        "exists": True,
        "reason": "R",
        "message": "cannot do it",
    }
    sums = {"containers": 3, "unchanged": 1, "pins": 1, "moves": 1, "cfs_quotas": 1, "memory_nodes": 1}
    answer = page(pods=pods, refused=[refused]) | {"sums": {**sums, "rejections": 1}}
    text = render_plan_report(answer, 120)
    assert (
        text
        == """\
Mode observe: the plan is applied to 0 of 3 running containers.
Enforcing would:
  pin     1 container to exclusive CPUs
  move    1 container to other CPUs
  remove  1 CFS quota
  bind    1 container to other memory nodes, once created again
  refuse  1 create like those below
1 container would stay as it is.

WOULD  CONTAINER          POOL    CPUS NOW  CPUS THEN  QUOTA REMOVED
pin    demo/trading/main  own     0-15      2-3        pod 200000 us
move   demo/web/nginx     shared  0-15      0-1,4-15   -

CONTAINER          MEMORY NODES NOW  ONCE CREATED AGAIN
demo/trading/main  0-1               0

Would be rejected
  demo/huge/main (it runs): cannot do it
"""
    )


def test_all_containers_are_listed_if_requested() -> None:
    answer = page(pods=[{"pod": "demo/scan", "containers": [row("scan")]}], containers=1, unchanged=1)
    assert render_plan_report(answer) == (
        "Mode observe: the plan is applied to 0 of 1 running container.\nEnforcing would change nothing.\n"
    )
    assert "-      demo/scan/scan  shared  0-15      as now     -" in render_plan_report(
        answer, everything=True
    )


@pytest.mark.parametrize(
    ("answer", "reported"),
    [
        (
            page("enforce", containers=2, applied=2),
            "Nothing would change: all containers have the planned CPUs",
        ),
        (page("enforce", containers=2, applied=2, drift=1), "1 container of these without the planned CPUs"),
        (page("enforce", containers=2, applied=1), "Enforcing all pods would change nothing."),
        (page("released", containers=2, moves=2), "topoproxy release --undo would:\n  move    2 containers"),
        (page(containers=2, rejections=2), "  refuse  2 creates like those below"),
        ({**page(), "kernel": {"not_read": 3}}, "The cpusets of 3 containers could not be read."),
    ],
)
def test_the_summary_describes_the_plan(answer: dict[str, object], reported: str) -> None:
    assert reported in render_plan_report(answer)


@pytest.mark.parametrize(
    ("kernel", "reported"),
    [
        ({"age_s": None, "not_read": 2}, "The kernel has not answered: no cpuset was read."),
        (
            {"age_s": 75.2, "not_read": 0},
            "The cpusets are those of 1m 15s ago: the kernel does not answer.",
        ),
        ({"age_s": 0.0, "not_read": 2}, "The cpusets of 2 containers could not be read."),
    ],
)
@pytest.mark.parametrize(
    "answer", [page("enforce", containers=2, applied=2), page(containers=2), page("enforce", containers=2)]
)
def test_nothing_is_reported_of_cpusets_that_are_not_known(
    answer: dict[str, object], kernel: dict[str, object], reported: str
) -> None:
    first, *rest = render_plan_report({**answer, "kernel": kernel}).splitlines()
    assert first.startswith("Mode ")
    assert rest == ["No changes detected so far.", reported]


def test_an_age_that_is_no_number_or_within_the_bound_changes_nothing() -> None:
    for age in (0.0, 5.0, "old"):
        answer = {**page("enforce", containers=2, applied=2), "kernel": {"age_s": age}}
        assert "Nothing would change" in render_plan_report(answer)


def test_control_characters_of_a_pod_cannot_break_the_page() -> None:
    refused = {"pod": "demo/\x1b[2J", "container": "", "exists": False, "message": "no\nline " * 30}
    text = render_plan_report(page(refused=[refused]), 80)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "(gone): no line" in text


ANSWERS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*page(), *NONE, "kernel", "containers", *row("c")]), inner, max_size=4
        )
    ),
)


@given(ANSWERS)
def test_any_answer_of_the_daemon_gives_a_page(answer: object) -> None:
    assert render_plan_report(answer).endswith("\n")


def test_no_change_is_reported_before_the_first_reconcile() -> None:
    assert render_plan_report(page() | {"compared": False}, 120) == (
        "Mode observe: the plan is applied to 0 of 0 running containers.\n"
        "No changes detected so far.\n"
        "The state has not been compared with the runtime yet: containers may be missing.\n"
    )
