from __future__ import annotations

import re
from collections.abc import Mapping

from proxy.observe.metrics import metrics
from proxy.telemetry import metrics as declared
from proxy.telemetry.registry import Gauge, Registry

STATUS: Mapping[str, object] = {
    "version": '1"2',
    "mode": "enforce",
    "uptime_s": 12.5,
    "ready": True,
    "clients": 2,
    "runtime": {"connected": False, "events": "waiting"},
    "pools": {"shared": "0-3", "be": "0-5", "nodes": [{"node": 0, "shared": "0-1", "be": "0-1"}]},
    "exclusive": [{"cpus": "6-7", "hard": True}, {"cpus": "4", "hard": False}, {"cpus": "5", "hard": False}],
    "containers": [
        {"pool": "shared", "phase": "running"},
        {"pool": "shared", "phase": "created"},
        {"pool": "own", "phase": "running"},
        {"pool": "be", "phase": "exited"},
    ],
    "problems": [{"what": "x"}],
    "violations": [],
    "reservations": [{}],
    "remembered": 4,
    "nodePolicy": {
        "nodeObject": "/n.json",
        "read": True,
        "problem": "torn",
        "values": [{"problem": "p"}, {"problem": ""}],
    },
    "memory": [{"node": 1, "resources": {"memory": {"allocatable": 9, "given": 4, "free": 5}}}],
    "drift": {"watched": 5, "writeConflicts": [{"times": 3}]},
}
HISTOGRAM = ("bucket", "sum", "count")
LINE = re.compile(r"(topoproxy_[a-z_]+)(\{[^{}]*\})? (-?[0-9.]+)")


def as_maps(value: object) -> list[dict[str, object]]:
    assert isinstance(value, list)
    return value


def counted() -> Registry:
    registry = Registry()
    registry.add(declared.RECONCILES, 3, {})
    for kind, n in (("policy", 0), ("cpu-list", 7)):
        registry.add(declared.BAD_INPUT, n, {"kind": kind})
    for author, n in (("runc", 2), ("systemd", 0)):
        registry.add(declared.DRIFT_REPAIRED, n, {"author": author})
    return registry


def samples(text: str) -> dict[str, str]:
    """Read the format as a scraper does: every sample belongs to the family announced above it."""
    found: dict[str, str] = {}
    family, kinds = "", dict[str, str]()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert len(line.split(" ", 3)[3]) > 5
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == family
            assert name not in kinds
            assert (kind == "counter") == name.endswith("_total")
            kinds[name] = kind
        else:
            match = LINE.fullmatch(line)
            assert match, line
            assert match[1] in (
                family,
                *(f"{family}_{end}" for end in HISTOGRAM if kinds[family] == "histogram"),
            )
            assert match[1] + (match[2] or "") not in found
            found[match[1] + (match[2] or "")] = match[3]
    assert text.endswith("\n")
    return found


def planned(status: Mapping[str, object]) -> dict[str, str]:
    return {name: value for name, value in samples(metrics(status)).items() if "planned" in name}


def test_a_plan_that_is_not_applied_has_separate_gauges() -> None:
    observed = [{**each, "applied": False} for each in as_maps(STATUS["exclusive"])]
    there = [{**each, "applied": False} for each in as_maps(STATUS["containers"])]
    status = {**STATUS, "mode": "observe", "exclusive": observed, "containers": there}
    found = samples(metrics(status))
    assert found["topoproxy_owners"] == "0"
    assert found["topoproxy_planned_owners"] == "3"
    assert found['topoproxy_containers{pool="shared"}'] == "0"
    assert found['topoproxy_planned_containers{pool="shared"}'] == "2"
    assert found['topoproxy_owned_cpus{be_may_use="true"}'] == "0"
    assert found['topoproxy_planned_owned_cpus{be_may_use="true"}'] == "2"
    for name in ("pool_cpus", "pool_node_cpus", "pod_reservations", "memory_bytes"):
        assert any(key.startswith(f"topoproxy_planned_{name}") for key in found), name
        assert not any(key.startswith(f"topoproxy_{name}") for key in found), name


def test_an_applied_plan_has_no_gauges_of_planned_values() -> None:
    assert set(planned(STATUS).values()) == {"0"}
    leaving = {**STATUS, "release": {"stage": "released"}}
    assert "topoproxy_planned_pod_reservations" in planned(leaving)


def test_all_numbers_of_the_status_are_exported() -> None:
    found = samples(metrics(STATUS, counted()))
    assert found['topoproxy_info{version="1\\"2",mode="enforce"}'] == "1"
    expected = {
        "topoproxy_uptime_seconds": "12.5",
        "topoproxy_ready": "1",
        "topoproxy_runtime_connected": "0",
        "topoproxy_runtime_events": "0",
        "topoproxy_clients": "2",
        'topoproxy_pool_cpus{pool="shared"}': "4",
        'topoproxy_pool_cpus{pool="be"}': "6",
        'topoproxy_pool_node_cpus{pool="be",node="0"}': "2",
        "topoproxy_owners": "3",
        'topoproxy_owned_cpus{be_may_use="false"}': "2",
        'topoproxy_owned_cpus{be_may_use="true"}': "2",
        'topoproxy_containers{pool="shared"}': "2",
        'topoproxy_containers{pool="own"}': "1",
        'topoproxy_containers{pool="be"}': "0",
        "topoproxy_problems": "1",
        "topoproxy_violations": "0",
        "topoproxy_pod_reservations": "1",
        "topoproxy_pods_set_aside": "1",
        "topoproxy_node_policy_problems": "1",
        "topoproxy_prescribed_problems": "1",
        "topoproxy_node_object_readable": "0",
        "topoproxy_decisions_remembered": "4",
        'topoproxy_memory_bytes{node="1",resource="memory",state="given"}': "4",
        "topoproxy_reconciles_total": "3",
        "topoproxy_passes_total": "3",
        'topoproxy_create_decision_seconds_bucket{le="+Inf"}': "0",
        'topoproxy_drift_repaired_total{author="runc"}': "2",
        'topoproxy_drift_repaired_total{author="systemd"}': "0",
        "topoproxy_write_conflicts_active": "1",
        "topoproxy_drift_wars_now": "1",
        "topoproxy_cpusets_watched": "5",
        "topoproxy_drift_watched": "5",
        'topoproxy_bad_input_total{kind="cpu-list"}': "7",
        'topoproxy_bad_input_total{kind="policy"}': "0",
    }
    assert {name: found.get(name) for name in expected} == expected


def test_a_daemon_that_only_relays_has_metrics() -> None:
    found = samples(metrics({"version": "1", "mode": "passthrough", "uptime_s": 1, "clients": 0}))
    assert set(found) == {
        'topoproxy_info{version="1",mode="passthrough"}',
        "topoproxy_uptime_seconds",
        "topoproxy_clients",
    }


def test_be_suppression_is_exported() -> None:
    usage = {"node": 9.0, "be": 1.5, "others": 6.0, "system": 1.5}
    page = {"mode": "cpuset", "budget_milli": -500, "quota_us": None, "cpus": "0-1,4", "usage": usage}
    found = samples(metrics({"beSuppress": page}))
    assert found["topoproxy_be_budget_cpus"] == "-0.5"
    assert found["topoproxy_be_cpus"] == "3"
    assert found['topoproxy_be_suppress_used_cpus{by="others"}'] == "6"
    assert "topoproxy_be_quota_cpus" not in found
    found = samples(metrics({"beSuppress": {"mode": "cfs-quota", "quota_us": 250_000, "cpus": "0-7"}}))
    assert found["topoproxy_be_quota_cpus"] == "2.5"
    assert "topoproxy_be_budget_cpus" not in found


def test_every_declared_gauge_of_the_node_is_exported() -> None:
    usage = {"node": 9.0, "be": 1.5, "others": 6.0, "system": 1.5}
    hook = {
        "name": "10-a",
        "state": "running",
        "broken": False,
        "breaker_open": False,
        "calls": 0,
        "hung": 0,
        "p50_s": 1,
    }
    full = {
        **STATUS,
        "beSuppress": {"mode": "cpuset", "budget_milli": 5, "quota_us": 9, "cpus": "0-1", "usage": usage},
        "cgroups": {"systemd": {"connected": True}},
        "attach": {"endpoint": "unix:///run/topoproxy/cri.sock", "reset": ""},
        "shortfalls": [{"missing": 1}],
        "workers": {"kernel": {"stuck_s": 0, "waiting": 0}},
        "config": {"since": 1.5, "restart": [], "reload": {}},
        "enforcement": {"paused": True, "pods": {"enforced": 3, "observed": 1}},
        "hooks": {"hooks": [hook]},
    }
    pages = metrics(full, Registry()) + metrics({**full, "mode": "observe"})
    exported = set(re.findall(r"^# TYPE (\w+) ", pages, re.MULTILINE))
    names = {
        m.full_name(n)
        for m in declared.DAEMON_METRICS
        if isinstance(m, Gauge)
        for n in (m.name, m.former)
        if n
    }
    assert names - exported == set()


def test_each_worker_has_its_own_sample() -> None:
    workers = {"kernel": {"stuck_s": 12.5, "waiting": 4}, "ledger": {"stuck_s": 0.0, "waiting": 0}}
    text = metrics({**STATUS, "workers": workers})
    assert 'topoproxy_worker_stuck_seconds{worker="kernel"} 12.5' in text
    assert 'topoproxy_worker_stuck_seconds{worker="ledger"} 0' in text
    assert 'topoproxy_worker_jobs_waiting{worker="kernel"} 4' in text
    assert "worker_stuck" not in metrics(STATUS)
