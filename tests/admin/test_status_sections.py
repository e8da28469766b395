"""The sections of the status page."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.admin.status_sections import (
    drift,
    hooks,
    last_error,
    prescribed,
    quotas,
    release,
    release_remaining,
    shortfalls,
    suppression,
)
from proxy.admin.status_text import render
from proxy.hooks.engine.stats import HookReport
from proxy.hooks.loader.directories import HookFileEntry, HookFileState
from proxy.hooks.status_data import hooks_page
from proxy.observe.metrics import metrics

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


def drift_lines(data: Any, width: int = 120) -> list[str]:
    return list(drift(data, width))


def test_writers_and_those_that_write_repeatedly() -> None:
    assert drift_lines(DATA) == [
        "",
        "Cpusets changed by others, repaired (by probable writer): unknown 5, kubelet 2",
        "  CHANGED AGAIN AND AGAIN  BY       FOUND  DESIRED  TIMES  FOR   NEXT REPAIR IN",
        "  ns/ls/c                  kubelet  0-15   4-15     12     33 s  0.5 s",
    ]
    lack = DATA | {"not_watched": "too many inotify watches", "writeConflicts": []}
    assert drift_lines(lack)[2:] == ["  Some writes are detected late: too many inotify watches"]


def test_nothing_is_reported_of_nothing() -> None:
    assert drift_lines({}) == []
    assert drift_lines(DATA | {"by": {"kubelet": 0}, "writeConflicts": []}) == []


def test_the_position_of_the_drift_section() -> None:
    page = render({"drift": DATA})
    assert "kubelet 2" in page
    assert page.index("Cpusets changed") > page.index("No containers")
    assert page.index("Cpusets changed") < page.index("No problems")
    assert all(len(line) <= 40 for line in drift_lines(DATA, 40))


ANY_DRIFT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*WAR, "kubelet"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*DATA]), ANY_DRIFT))
def test_drift_in_an_answer_of_another_version(data: dict[str, object]) -> None:
    assert all("\n" not in line for line in drift_lines(data))


POINTS = ("pre_create_container",)


def used(name: str, state: HookFileState = HookFileState.RUNNING, error: str = "") -> HookFileEntry:
    return HookFileEntry(name, f"/h/{name}.py", state, error, POINTS, "Ignore", 0.5)


def report(name: str, **more: Any) -> HookReport:
    return HookReport(name, f"/h/{name}.py", POINTS, "Ignore", 0.5, **more)


def lines_of(
    entries: list[HookFileEntry], reports: list[HookReport], width: int = 100, **more: object
) -> list[str]:
    return list(hooks({"hooks": hooks_page(entries, reports), **more}, width))


def test_a_node_without_hooks_has_no_hook_lines() -> None:
    assert list(hooks({}, 80)) == []
    assert list(hooks({"hooks": []}, 80)) == []
    assert "Hooks" not in render({"hooks": {}})


def test_healthy_hooks_are_counted_and_other_hooks_are_named() -> None:
    entries = [
        used("10-well"),
        used("20-old", HookFileState.OLD, "cannot load hook /h/20-old.py: SyntaxError"),
        HookFileEntry(
            "30-bad", "/h/30-bad.py", HookFileState.UNTRUSTED, "cannot trust hook /h/30-bad.py: chmod"
        ),
        HookFileEntry("40-off", "/h/40-off.py", HookFileState.DISABLED),
        HookFileEntry("10-well", "/v/10-well.py", HookFileState.MASKED, "/h/10-well.py is used instead"),
        used("50-open"),
        used("60-failing"),
    ]
    at = time.time() - 130
    reports = [
        report("10-well", calls=3, last_error="once", last_error_at=at),
        report("20-old"),
        report("50-open", state="open", last_error="ValueError: x", last_error_at=at),
        report("60-failing", state="failing", last_error="no answer within 500 ms", last_error_at=0.0),
    ]
    served = {"socket": "/run/topoproxy/hooks.sock"}
    lines = lines_of(entries, reports, serving=served)
    assert lines[:6] == [
        "",
        "Hooks (4): 10-well, 20-old, 50-open, 60-failing",
        "  20-old: old version running: cannot load hook /h/20-old.py: SyntaxError",
        "  30-bad: untrusted: cannot trust hook /h/30-bad.py: chmod",
        "  50-open: not called for now: ValueError: x (2 min ago)",
        lines[5],
    ]
    assert lines[5].startswith("  60-failing: fails: no answer within 500 ms (")
    assert lines[6:] == ["  served to Koordinator's runtime proxy at /run/topoproxy/hooks.sock"]
    assert "\nHooks (4): 10-well, " in render({"hooks": {"hooks": hooks_page(entries, reports)}})


def test_long_lines_are_truncated_and_unknown_answers_are_skipped() -> None:
    long = used("10-x", HookFileState.BROKEN, "e" * 300)
    assert max(map(len, lines_of([long], [], width=60))) == 60
    assert list(hooks({"hooks": [{"name": "\x1b", "state": "odd"}, 3]}, 80))[2:] == ["   : odd"]


def test_hooks_that_cannot_be_called_are_reported_too() -> None:
    bad = HookFileEntry("30-bad", "/h/30-bad.py", HookFileState.BROKEN, "why")
    assert lines_of([bad], []) == ["", "Hooks (0)", "  30-bad: broken: why"]


def test_the_age_of_an_error_has_the_largest_unit_that_fits() -> None:
    def ago(seconds: float) -> str:
        return last_error({"last_error": "x", "last_error_at": 1000.0}, 1000.0 + seconds)

    assert [ago(s) for s in (3, 300, 7200, 200_000)] == [
        "x (3 s ago)", "x (5 min ago)", "x (2 h ago)", "x (2 d ago)"
    ]  # fmt: skip
    assert last_error({"last_error": ""}) == ""


def test_the_page_joins_files_and_reports() -> None:
    entries = [
        used("10-a"),
        HookFileEntry("koordlet", "/s/koordlet.json", HookFileState.BROKEN, "why", server=True),
    ]
    first, second, third = hooks_page(
        entries, [report("10-a", state="hangs", calls=2, failures={"timeout": 2}), report("late")]
    )
    assert (first["state"], first["asked"], first["breaker_open"]) == ("running", "hangs", True)
    assert (first["calls"], first["failures"], first["kind"]) == (2, {"timeout": 2}, "file")
    assert (second["broken"], second["kind"], second["error"]) == (True, "server", "why")
    assert "calls" not in second
    assert third["name"] == "late", "a hook in use is never omitted"


def row(name: str, value: object, source: str = "default", problem: str = "") -> dict[str, object]:
    return {"name": name, "value": value, "source": source, "problem": problem}


def test_settings_of_the_node_object_and_what_is_not_followed() -> None:
    page = {
        "nodeObject": "/etc/node.json",
        "problem": "cannot read it",
        "values": [
            row("cpuBindPolicy", "FullPCPUsOnly", "label x"),
            row("numaAllocateStrategy", ""),
            row("systemCPUsExclusive", False, "annotation y"),
            row("reservedCPUs", "", problem="annotation z: bad\x1b[2J"),
        ],
    }
    assert list(prescribed(page)) == [
        "",
        "Settings of the node (Node object: /etc/node.json)",
        "VALUE                IN EFFECT      FROM",
        "cpuBindPolicy        FullPCPUsOnly  label x",
        "systemCPUsExclusive  no             annotation y",
        "reservedCPUs         -              default",
        "  The Node object cannot be used: cannot read it",
        "  Ignored node label or annotation: annotation z: bad [2J",
    ]


def test_nothing_to_say() -> None:
    for page in ({}, {"values": [row("cpuBindPolicy", "")]}, {"values": "x", "problem": None}):
        assert list(prescribed(page)) == []


QUOTAS = [
    {"pod": "ns/db", "container": "main", "was": 200_000, "group": ""},
    {"pod": "ns/db", "container": "", "was": 300_000, "group": "kubepods/poddb"},
    {"pod": "", "container": "", "was": 100_000, "group": "kubepods/podgone"},
]
QUOTAS_PART = """
CFS quota removed (previous value)
kubepods/podgone  100000 us
ns/db             300000 us
ns/db/main        200000 us
"""


def test_containers_without_their_quota() -> None:
    assert "\n".join(quotas(QUOTAS)) + "\n" == QUOTAS_PART
    assert QUOTAS_PART in render({"quotas": QUOTAS})
    assert "CFS" not in render({"quotas": []})


def test_what_is_shown_is_one_line() -> None:
    (*_, line) = quotas([{"pod": "a\x1b[2J\nb", "was": "x"}])
    assert line == "a [2J b  ?"


@given(
    st.lists(st.dictionaries(st.sampled_from(["pod", "container", "was", "group"]), st.none() | st.text()))
)
def test_nothing_breaks_it(entries: list[dict[str, str | None]]) -> None:
    assert len(list(quotas(entries))) in (0, 2 + len(entries))


def test_how_far_it_is() -> None:
    data = {"stage": "releasing", "updated": 3, "containers": 9, "left": ["cannot update: busy"]}
    assert release(data) == "3 of 9 containers updated, calls are only relayed"
    assert list(release_remaining(data)) == ["  still: cannot update: busy"]
    assert list(release_remaining({**data, "left": None})) == []


def test_that_it_is_over() -> None:
    page = render({"mode": "released", "release": {"stage": "released"}})
    assert page.startswith(
        "topoproxy, mode released\nrelease  calls are only relayed, containers are not moved"
    )
    assert release({}) == ""


SHORT: list[dict[str, object]] = [
    {
        "container": "ns/db/main",
        "what": "its CPU 3 is offline: it runs on 2, 1 fewer than promised",
        "missing": 1,
    },
    {"container": "ns/\x1bx", "what": "its memory of NUMA node 2 is gone", "missing": 0},
]
SHORT_PART = """
NOT AS PROMISED (2)
  ns/db/main: its CPU 3 is offline: it runs on 2, 1 fewer than promised
  ns/ x: its memory of NUMA node 2 is gone
"""


def test_containers_that_have_less() -> None:
    assert "\n".join(shortfalls(SHORT)) + "\n" == SHORT_PART
    assert SHORT_PART in render({"shortfalls": SHORT})
    assert "PROMISED" not in render({"shortfalls": []})


def test_containers_that_have_less_are_counted_in_metrics() -> None:
    reported = metrics({"shortfalls": SHORT})
    assert "topoproxy_containers_below_promise 2\n" in reported
    assert "topoproxy_containers_short 2\n" in reported
    assert "topoproxy_cpus_short 1\n" in reported
    assert "topoproxy_containers_short" not in metrics({})


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


def suppression_lines(data: Any, width: int = 100) -> list[str]:
    return list(suppression(data, width))


def test_a_narrowed_be_pool_is_shown_with_its_last_change() -> None:
    change = {"when": time.time() - 3, "before": "CPUs 0-10", "after": "CPUs 0-1,4-5,8", "why": WHY}
    assert suppression_lines(CPUSET | {"last_change": change}) == [
        "",
        "BE suppression (cpuset, up to 65 % of the node)",
        "  CPUs in use: other pods 6.0, BE pods 4.0, system 0.0; for BE pods: 4.4",
        "  BE pods run on 0-1,4-5,8 of 0-15",
        "  changed 3 s ago to CPUs 0-1,4-5,8 from CPUs 0-10",
        f"    {WHY}",
    ]


def test_nothing_taken_away() -> None:
    assert suppression_lines(CPUSET | {"cpus": "0-15"})[-1] == "  BE pods run on 0-15"


def test_a_quota_of_be_pods_is_shown_in_cpus() -> None:
    data = CPUSET | {"mode": "cfs-quota", "quota_us": 440_000}
    assert suppression_lines(data)[-1] == "  quota: 4.40 CPUs for /kubepods/besteffort"
    assert not [line for line in suppression_lines(data | {"quota_us": -1}) if "quota:" in line]


def test_unknown_usage_is_reported() -> None:
    data = {key: value for key, value in CPUSET.items() if key not in ("usage", "budget_milli")}
    assert suppression_lines(data)[2] == "  usage is not known"
    off = data | {"mode": "off"}
    assert suppression_lines(off) == ["", "BE suppression (off, up to 65 % of the node)"]


def test_the_position_of_the_suppression_section() -> None:
    page = render({"pools": {"shared": "0-15", "be": "0-15"}, "beSuppress": CPUSET})
    assert page.index("POOL") < page.index("BE suppression") < page.index("No containers")
    assert "BE suppression" not in render({"beSuppress": {}})
    assert all(len(line) <= 50 for line in suppression_lines(CPUSET, 50)[2:])


ANY_SUPPRESSION = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*CPUSET, "when"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*CPUSET, "last_change"]), ANY_SUPPRESSION))
def test_suppression_in_an_answer_of_another_version(data: dict[str, object]) -> None:
    assert all("\n" not in line for line in suppression_lines({"mode": "cpuset"} | data))
