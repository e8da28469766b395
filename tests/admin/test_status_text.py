"""The page of ``topoproxy status``."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.admin.status_text import render

STATUS = {
    "version": "1.2.3",
    "mode": "enforce",
    "pid": 42,
    "listen": "/run/topoproxy/cri.sock",
    "runtime": {
        "endpoint": "/run/c.sock",
        "connected": True,
        "version": "containerd 1.6.20",
        "events": "off",
    },
    "uptime_s": 93784.2,
    "ready": True,
    "pools": {
        "shared": "4-7",
        "be": "2-7",
        "nodes": [{"node": 0, "shared": "", "be": "2-3"}, {"node": 1, "shared": "4-7", "be": "4-7"}],
    },
    "exclusive": [
        {"owner": "u1", "cpus": "0-1", "pod": "ns/hard", "container": "", "hard": True},
        {"owner": "u2/c", "cpus": "2-3", "pod": "ns/soft", "container": "c", "hard": False},
        {"owner": "u3", "cpus": "9", "pod": "", "container": ""},
    ],
    "containers": [
        {
            "id": "0123456789abcdef",
            "ref": "ns/web/app",
            "qos": "LS",
            "pool": "shared",
            "cpus": "4-7",
            "mems": "",
            "phase": "running",
            "reason": "runs on the shared pool",
        },
        {
            "id": "ff",
            "ref": "ns/a/b",
            "qos": "LSE",
            "pool": "own",
            "cpus": "0-1",
            "mems": "0",
            "phase": "created",
        },
    ],
    "problems": [{"count": 3, "what": "ns/x: the annotation is malformed"}, {"count": 1, "what": "once"}],
    "violations": [],
    "counters": {"creates": 4},
    "cgroups": {"version": 2, "driver": "systemd", "driver_from": "the runtime"},
}

PAGE = """\
topoproxy 1.2.3, mode enforce, pid 42, up 1d 2h, ready
listens on  /run/topoproxy/cri.sock
runtime     containerd 1.6.20 at /run/c.sock, connected
events      the runtime's events are not used: freed CPUs return within reconcilePeriod
cgroups     v2, systemd driver

POOL    CPUS  NODE 0  NODE 1
shared  4-7   -       4-7
BE      2-7   2-3     4-7

Exclusive CPUs
CPUS  OWNER      BE CAN BORROW
0-1   ns/hard    no
2-3   ns/soft/c  yes
9     u3

Containers (2)
CONTAINER   QOS  POOL    CPUS  MEMS  PHASE    ID
ns/a/b      LSE  own     0-1   0     created  ff
ns/web/app  LS   shared  4-7   -     running  0123456789abc
    runs on the shared pool

Problems (2)
  ns/x: the annotation is malformed (3 times)
  once
"""


def test_the_whole_page() -> None:
    assert render(STATUS) == PAGE


def test_an_idle_node() -> None:
    page = render(
        {
            "version": "1",
            "ready": False,
            "runtime": {"connected": False},
            "pools": {"shared": "0", "nodes": []},
        }
    )
    assert page == (
        "topoproxy 1, NOT READY\nruntime  NOT CONNECTED\n\n"
        "POOL    CPUS\nshared  0\n\nNo containers.\n\n"
        "Problems (2)\n  NOT READY (the daemon gives no reason)\n"
        "  NOT CONNECTED with the runtime (the daemon gives no reason)\n"
    )


def test_violations_are_highlighted() -> None:
    assert "Problems (1)\n  RULE BROKEN: 0 is owned twice\n" in render({"violations": ["0 is owned twice"]})


def test_when_a_problem_was_last_seen() -> None:
    page = render(
        {"problems": [{"what": "w", "count": 2, "last": time.time() - 125}, {"what": "v", "last": "noon"}]}
    )
    assert "w (2 times, last 2m 5s ago)" in page
    assert "v (last noon)" in page


def test_no_control_character_gets_to_the_terminal() -> None:
    page = render({"containers": [{"ref": "a\x1b[2Jb\nc", "reason": "x\x9b"}], "problems": [{"what": "p\r"}]})
    assert all(c.isprintable() or c == "\n" for c in page)
    assert "a [2Jb c" in page


def test_long_reasons_are_truncated_at_the_terminal() -> None:
    page = render({"containers": [{"ref": "a", "reason": "r" * 200}]}, width=40)
    assert "    " + "r" * 33 + "...\n" in page


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-1, 1e9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*STATUS, "what", "nodes"]), inner)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(list(STATUS)), JSON) | JSON)
def test_any_answer_of_the_daemon_gives_a_page(status: object) -> None:
    assert render(status).startswith("topoproxy")


def test_rules_memory_and_reserved_cpus() -> None:
    settings = {
        "cpuManagerPolicy": "static",
        "cpuManagerPolicyOptions": ["full-pcpus-only"],
        "topologyManagerPolicy": "restricted",
        "topologyManagerScope": "pod",
        "memoryManagerPolicy": "Static",
        "reservedSystemCPUs": "0",
    }
    amounts = {"allocatable": 3 << 30, "given": 1 << 29, "free": 512}
    page = render(
        {
            "settings": settings,
            "memory": [{"node": 0, "group": "0-1", "resources": {"memory": amounts}}],
            "reservations": [
                {"pod": "ns/p", "cpus": "2-3", "nodes": "1"},
                {"pod": "ns/q", "cpus": "", "nodes": ""},
            ],
        }
    )
    assert (
        "CPUs static (full-pcpus-only); topology restricted, scope pod; memory Static; reserved CPUs 0"
        in page
    )
    assert "0     memory    3.0Gi        512.0Mi  512   0-1" in page
    assert "Reserved for pods\nCPUS  POD   NUMA NODES\n2-3   ns/p  1\n-     ns/q  any\n" in page


def test_rules_without_effect_are_not_reported() -> None:
    assert "rules" not in render({"settings": {"cpuManagerPolicy": "none", "topologyManagerPolicy": "none"}})


def test_a_takeover_is_one_of_the_rules() -> None:
    page = render({"settings": {"cpuManagerPolicy": "static"}, "takeover": "started"})
    assert "rules  CPUs static; takeover from kubelet started\n" in page


def test_a_missing_systemd_is_reported() -> None:
    groups = {"version": 2, "driver": "systemd", "systemd": {"connected": False}}
    assert "\nsystemd     NOT CONNECTED\n" in render({**STATUS, "cgroups": groups})
    there = {**groups, "systemd": {"connected": True}}
    assert "NOT CONNECTED" not in render({**STATUS, "cgroups": there})


def test_a_stuck_worker_is_visible() -> None:
    workers = {"kernel": {"stuck_s": 12.5, "waiting": 4}, "ledger": {"stuck_s": 0.0, "waiting": 0}}
    page = render({**STATUS, "workers": workers}, 100)
    assert "STUCK: the kernel worker, at one job for 12 s (4 jobs wait)" in page
    assert "ledger worker" not in page


@pytest.mark.parametrize(
    ("floor", "nodes", "message"),
    [
        (4, {"0": 2, "1": 2}, "shared pool keeps 4 CPUs (2 of each NUMA node)\n"),
        (4, {"0": 1, "1": 3}, "shared pool keeps 4 CPUs (1 to 3 of each NUMA node)\n"),
        (4, {}, "shared pool keeps 4 CPUs\n"),
        (0, {"0": 2}, "shared pool keeps 2 CPUs of each NUMA node\n"),
        (1, {"0": 1}, "shared pool keeps 1 CPU (1 of each NUMA node)\n"),
        (0, {"0": 1}, "shared pool keeps 1 CPU of each NUMA node\n"),
        (0, {}, ""),
        ("x", [3], ""),
    ],
)
def test_the_floor_of_the_shared_pool_is_one_of_the_rules(floor: object, nodes: object, message: str) -> None:
    rules = {"sharedFloor": floor, "sharedFloorPerNUMANode": nodes}
    page = render({"settings": {"admission": rules}})
    assert ("rules  " in page) is bool(message)
    assert message in page


def test_limits_of_owners_are_among_the_rules() -> None:
    rules = {"maxCPUsPerPod": 4, "maxCPUsPerNamespace": "y", "maxCPUsPerNode": 9}
    page = render({"settings": {"admission": rules}})
    assert "rules  at most 4 CPUs owned by a pod; at most 9 CPUs owned\n" in page


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"checks": [{"name": "a", "ok": False, "reason": "r", "required": True}]}, "NOT READY: r"),
        ({"checks": [{"name": "a", "ok": False, "reason": "r", "required": False}]}, "r"),
        ({"checks": [{"name": "a", "ok": False}]}, "a"),
        ({"ready": False}, "NOT READY (the daemon gives no reason)"),
        (
            {"runtime": {"connected": False}},
            "NOT CONNECTED with the runtime (the daemon gives no reason)",
        ),
        ({"violations": ["v"]}, "RULE BROKEN: v"),
        ({"hooks": {"hooks": [{"name": "h", "state": "broken", "error": "e"}]}}, "hook h: broken: e"),
        ({"enforcement": {"problems": [{"pod": "ns/p", "reason": "r"}]}}, "cannot change pod ns/p: r"),
        ({"problems": [{"what": "w"}]}, "w"),
    ],
)
def test_no_problems_is_not_reported_while_anything_is_wrong(more: dict[str, object], line: str) -> None:
    page = render(more)
    assert page.endswith(f"Problems (1)\n  {line}\n")
    assert "No problems." not in page


@pytest.mark.parametrize(
    ("mode", "pods", "more", "message"),
    [
        ("observe", {"enforced": 0, "observed": 3}, {}, "no pod: mode observe"),
        ("observe", {"enforced": 2, "toGiveBack": 2}, {}, "2 pods, 0 observed; 2 to be given back"),
        (
            "enforce",
            {"enforced": 1, "observed": 3, "toEnforce": 2},
            {},
            "1 pod, 3 observed; 2 to be enforced",
        ),
        ("enforce", {"enforced": 1}, {"paused": True}, "1 pod, 0 observed; paused"),
        ("enforce", {"enforced": 5, "observed": 0}, {}, ""),
        ("released", {"observed": 5}, {}, ""),
    ],
)
def test_the_number_of_pods_to_which_the_plan_is_applied(
    mode: str, pods: dict[str, int], more: dict[str, object], message: str
) -> None:
    page = render({"mode": mode, "enforcement": {"pods": pods, **more}})
    assert ("applied to" in page) is bool(message)
    assert message in page


def test_settings_that_are_not_in_effect_are_listed() -> None:
    config = {"source": "/c.yaml", "restart": [{"key": "listen"}, {"key": "hooks.enabled"}], "reload": {}}
    assert "config  /c.yaml; takes effect at the next restart: listen, hooks.enabled\n" in render(
        {"config": config}
    )


def test_old_or_missing_kernel_values_are_reported() -> None:
    assert "cpusets  as they were 1m 5s ago: the kernel does not answer\n" in render(
        {"kernel": {"age_s": 65.0}}
    )
    assert "cpusets  those of 1 container are not shown" in render({"kernel": {"age_s": 0.1, "not_read": 1}})
    assert "cpusets" not in render({"kernel": {"age_s": 0.1, "not_read": 0}})


def test_many_users_of_exclusive_cpus_are_counted() -> None:
    owner = {"cpus": "2", "pod": "ns/p", "also_used_by": ["a", "b", "c"], "also_used": 40}
    assert "a, b and 38 more" in render({"exclusive": [owner]})
