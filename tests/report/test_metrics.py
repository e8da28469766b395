from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import proxy
from proxy.report.metrics import _COUNTERS, metrics

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
    "aside": [{}],
    "remembered": 4,
    "prescribed": {
        "nodeObject": "/n.json",
        "read": True,
        "problem": "torn",
        "values": [{"problem": "p"}, {"problem": ""}],
    },
    "memory": [{"node": 1, "resources": {"memory": {"allocatable": 9, "given": 4, "free": 5}}}],
    "counters": {
        "passes": 3,
        "new_thing": 2,
        "bad_input_policy": 0,
        "bad_input_cpu-list": 7,
        "drift_by_runc": 2,
    },
    "drift": {"watched": 5, "wars": [{"times": 3}]},
}
LINE = re.compile(r"(topoproxy_[a-z_]+)(\{[^{}]*\})? (-?[0-9.]+)")


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
            assert match[1] == family
            assert match[1] + (match[2] or "") not in found
            found[match[1] + (match[2] or "")] = match[3]
    assert text.endswith("\n")
    return found


def test_everything_that_status_knows_in_numbers() -> None:
    found = samples(metrics(STATUS))
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
        "topoproxy_pods_set_aside": "1",
        "topoproxy_prescribed_problems": "1",
        "topoproxy_node_object_readable": "0",
        "topoproxy_decisions_remembered": "4",
        'topoproxy_memory_bytes{node="1",resource="memory",state="given"}': "4",
        "topoproxy_passes_total": "3",
        "topoproxy_new_thing_total": "2",
        'topoproxy_drift_repaired_total{author="runc"}': "2",
        'topoproxy_drift_repaired_total{author="systemd"}': "0",
        "topoproxy_drift_wars_now": "1",
        "topoproxy_drift_watched": "5",
        'topoproxy_bad_input_total{kind="cpu-list"}': "7",
        'topoproxy_bad_input_total{kind="policy"}': "0",
    }
    assert {name: found.get(name) for name in expected} == expected


def test_a_daemon_that_only_relays() -> None:
    found = samples(metrics({"version": "1", "mode": "passthrough", "uptime_s": 1, "clients": 0}))
    assert set(found) == {
        'topoproxy_info{version="1",mode="passthrough"}',
        "topoproxy_uptime_seconds",
        "topoproxy_clients",
    }


def test_be_suppression() -> None:
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


def test_every_counter_has_words_of_its_own() -> None:
    package = Path(proxy.__file__).parent
    texts = [file.read_text() for file in package.rglob("*.py")]
    counted = {name for text in texts for name in re.findall(r'counters\["([a-z_]+)"\]', text)}
    assert len(counted) > 20
    assert counted <= _COUNTERS.keys()


def test_the_page_names_every_gauge() -> None:
    page = (Path(__file__).parents[2] / "docs/koordinator.md").read_text()
    usage = {"node": 9.0, "be": 1.5, "others": 6.0, "system": 1.5}
    suppressed = {"mode": "cpuset", "budget_milli": 500, "quota_us": 250_000, "cpus": "0-1", "usage": usage}
    groups = {"systemd": {"connected": True}}
    full = {**STATUS, "beSuppress": suppressed, "cgroups": groups, "short": [{"missing": 1}]}
    gauges = re.findall(r"^# TYPE topoproxy_(\w+) gauge$", metrics(full), re.MULTILINE)
    assert {"pool_cpus", "cpus_short", "drift_wars_now", "be_budget_cpus"} <= set(gauges)
    missing = [name for name in gauges if not re.search(rf"`(topoproxy_)?{name}[`{{]", page)]
    assert missing == []


def test_each_worker_has_its_own_sample() -> None:
    workers = {"kernel": {"stuck_s": 12.5, "waiting": 4}, "ledger": {"stuck_s": 0.0, "waiting": 0}}
    text = metrics({**STATUS, "workers": workers})
    assert 'topoproxy_worker_stuck_seconds{worker="kernel"} 12.5' in text
    assert 'topoproxy_worker_stuck_seconds{worker="ledger"} 0' in text
    assert 'topoproxy_worker_jobs_waiting{worker="kernel"} 4' in text
    assert "worker_stuck" not in metrics(STATUS)
