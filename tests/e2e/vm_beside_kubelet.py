"""The scenario of a real kubelet with a static CPU manager, in a machine of 4 NUMA nodes.

kubelet pins pods and reconciles every few seconds; the daemon does not assign CPUs that kubelet assigned.
Pinned containers stay on their CPUs, other containers leave them, an LSE pod has CPUs that kubelet considers
free, and after each step the counters show that kubelet and the daemon do not overwrite each other's cpusets.

    python3 vm_beside_kubelet.py cgroupfs|systemd

Needs /in/kubelet (1.34 or later).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from vm_guest import ALL, LONG_S, GuestDaemon, step, wait
from vm_kubelet import MANIFESTS, ROOT, container
from vm_takeover import LOG, RECONCILE_S, TakeoverNode, held_by, state

SETTINGS: dict[str, object] = {
    "cpuManagerPolicy": "none",
    "kubelet": {
        "stateDir": str(ROOT),
        "configz": "https://127.0.0.1:10250",
        "insecureSkipVerify": True,
        "timeout": "5s",
    },
}
DAEMON_LOG = Path("/out/proxy.log")
WRITES = ("cpusets_written", "drift_repaired", "settled")


def add_lse(node: TakeoverNode, name: str, cpus: str) -> None:
    """Add a pod whose annotation names CPUs; it is Burstable, so kubelet does not pin it."""
    limits = {"cpu": "2", "memory": "64Mi"}
    main = container("main", "2") | {
        "resources": {"requests": {"cpu": "2", "memory": "32Mi"}, "limits": limits}
    }
    metadata = {
        "name": name,
        "namespace": "default",
        "labels": {"koordinator.sh/qosClass": "LSE"},
        "annotations": {"scheduling.koordinator.sh/resource-status": json.dumps({"cpuset": cpus})},
    }
    spec = {"hostNetwork": True, "terminationGracePeriodSeconds": 1, "containers": [main]}
    hidden = MANIFESTS / f".{name}"
    hidden.write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}))
    hidden.rename(MANIFESTS / f"{name}.yaml")


def check_no_writes(node: TakeoverNode, why: str) -> None:
    """Check that several rounds of reconcile traffic change no cpuset and cause no write."""
    before, counted = node.snapshot(), node.daemon.status()["counters"]
    time.sleep(4 * RECONCILE_S)
    after, now = node.snapshot(), node.daemon.status()["counters"]
    assert after == before, (before, after)
    for name in WRITES:
        assert now.get(name, 0) == counted.get(name, 0), (name, counted, now)
    step(f"{why}: {4 * RECONCILE_S} s of reconciling changed nothing ({len(after)} containers)")


def main() -> None:
    version = subprocess.check_output(["/in/kubelet", "--version"], text=True).strip()
    step(f"{version}, CPUs {ALL}")
    node = TakeoverNode(sys.argv[1], GuestDaemon(**SETTINGS))
    node.start_with_policy("static")
    node.add("one", container("main", "4"))
    node.add("part", container("main", "250m"))
    one = node.place("one/main")
    assert (len(one.cpus), held_by(node, "one")) == (4, one.cpus), one
    wait("other containers to leave", lambda: node.place("part/main").cpus == ALL - one.cpus)
    wait(
        "kubelet's configz to be read",
        lambda: node.daemon.status()["kubelet"]["cpuManagerPolicy"] == "static",
    )
    print(node.daemon.cli("status").stdout, flush=True)
    found = node.daemon.status()["kubelet"]
    assert found["sources"]["policy"] == "kubelet's configz", found
    assert (found["reservedSystemCPUs"], found["default"]) == ("0-1", str(ALL - one.cpus)), found
    wait("the sharer to be stable", lambda: node.place("part/main").cpus == ALL - one.cpus)
    time.sleep(2 * RECONCILE_S)
    check_no_writes(node, "pinned and shared")

    add_lse(node, "lse", "20-21")
    lse = node.place("lse/main")
    assert str(lse.cpus) == "20-21", lse
    assert node.place("part/main").cpus == ALL - one.cpus - lse.cpus
    assert not state()[1].default.isdisjoint(lse.cpus), "kubelet considers the CPUs free"
    time.sleep(2 * RECONCILE_S)
    check_no_writes(node, "beside an LSE pod")

    add_lse(node, "clash", str(one.cpus)[:1])
    # A message that a pod's user can read does not name other pods; the daemon's log does.
    wait("the rejection", lambda: "is owned by another pod already" in LOG.read_text(), LONG_S)
    assert "is owned by default/one-bed/main already" in DAEMON_LOG.read_text()
    (MANIFESTS / "clash.yaml").unlink()
    step(f"an LSE pod that names CPU {str(one.cpus)[:1]} of the pod one is rejected")

    node.stop_kubelet()
    node.start_with_policy("static")
    time.sleep(2 * RECONCILE_S)
    check_no_writes(node, "kubelet was started again")
    everyone = node.snapshot()
    node.daemon.kill9()
    node.daemon.start()
    wait("the daemon to be ready", lambda: bool(node.daemon.status()["ready"]))
    assert node.snapshot() == everyone
    check_no_writes(node, "the daemon was killed")

    (MANIFESTS / "one.yaml").unlink()
    wait("kubelet to take the CPUs back", lambda: not state()[1].held, 2 * LONG_S)
    wait("the pool to have the CPUs", lambda: node.place("part/main").cpus == ALL - lse.cpus, 2 * LONG_S)
    # kubelet assigns the lowest CPUs first; 22 CPUs include those of the LSE pod.
    node.add("many", container("main", "22"))
    many = node.place("many/main", 2 * LONG_S)
    named = held_by(node, "many")
    assert len(named) == 22
    assert many.cpus.isdisjoint(lse.cpus), many
    assert str(node.place("lse/main").cpus) == "20-21"
    assert node.place("part/main").cpus.isdisjoint(lse.cpus)
    problems = [p["what"] for p in node.daemon.status()["problems"]]
    step(f"kubelet named {named}; the container has {many.cpus}; problems: {'; '.join(problems)}")
    if not named.isdisjoint(lse.cpus):
        assert any("belong to default/lse-bed/main" in problem for problem in problems), problems
    assert node.daemon.status()["violations"] == []
    print(node.daemon.cli("status").stdout, flush=True)
    node.stop_kubelet()
    assert node.daemon.stop() == 0
    step("the scenario ends well")


if __name__ == "__main__":
    main()
