"""The scenario of living beside a real kubelet whose CPU manager is static, in a machine of 4 NUMA nodes.

kubelet gives CPUs to pods and reconciles every few seconds; ours owns nothing that kubelet gave. What kubelet
pinned stays where it is, the others are off these CPUs, an LSE pod has CPUs of which kubelet knows nothing,
and after each step the counters say that nothing writes a cpuset to and fro.

    python3 vm_beside.py cgroupfs|systemd

Needs /in/kubelet (1.34 or later).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from vm_guest import ALL, LONG_S, Daemon, step, wait
from vm_kubelet import MANIFESTS, ROOT, container
from vm_takeover import LOG, RECONCILE_S, TakenBed, held_by, state

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


def add_lse(bed: TakenBed, name: str, cpus: str) -> None:
    """Give kubelet a pod to which a scheduler has given CPUs; it is Burstable, so kubelet gives it none."""
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


def nothing_moves(bed: TakenBed, why: str) -> None:
    """See that reconcile traffic of several rounds changes no set and causes no write."""
    before, counted = bed.snapshot(), bed.daemon.status()["counters"]
    time.sleep(4 * RECONCILE_S)
    after, now = bed.snapshot(), bed.daemon.status()["counters"]
    assert after == before, (before, after)
    for name in WRITES:
        assert now.get(name, 0) == counted.get(name, 0), (name, counted, now)
    step(f"{why}: {4 * RECONCILE_S} s of reconciling changed nothing ({len(after)} containers)")


def main() -> None:
    version = subprocess.check_output(["/in/kubelet", "--version"], text=True).strip()
    step(f"{version}, CPUs {ALL}")
    bed = TakenBed(sys.argv[1], Daemon(**SETTINGS))
    bed.start_under("static")
    bed.add("one", container("main", "4"))
    bed.add("part", container("main", "250m"))
    one = bed.place("one/main")
    assert (len(one.cpus), held_by(bed, "one")) == (4, one.cpus), one
    wait("the others to leave", lambda: bed.place("part/main").cpus == ALL - one.cpus)
    wait(
        "kubelet's configz to be read", lambda: bed.daemon.status()["kubelet"]["cpuManagerPolicy"] == "static"
    )
    print(bed.daemon.ask("status").stdout, flush=True)
    found = bed.daemon.status()["kubelet"]
    assert found["sources"]["policy"] == "kubelet's configz", found
    assert (found["reservedSystemCPUs"], found["default"]) == ("0-1", str(ALL - one.cpus)), found
    wait("all containers to be at rest", lambda: bed.place("part/main").cpus == ALL - one.cpus)
    time.sleep(2 * RECONCILE_S)
    nothing_moves(bed, "pinned and shared")

    add_lse(bed, "lse", "20-21")
    lse = bed.place("lse/main")
    assert str(lse.cpus) == "20-21", lse
    assert bed.place("part/main").cpus == ALL - one.cpus - lse.cpus
    assert not state()[1].default.isdisjoint(lse.cpus), "kubelet knows nothing of it"
    time.sleep(2 * RECONCILE_S)
    nothing_moves(bed, "beside an LSE pod")

    add_lse(bed, "clash", str(one.cpus)[:1])
    # What a pod's user can read does not name the pods of others; the daemon's log does.
    wait("a refusal", lambda: "is owned by another pod already" in LOG.read_text(), LONG_S)
    assert "is owned by default/one-bed/main already" in DAEMON_LOG.read_text()
    (MANIFESTS / "clash.yaml").unlink()
    step(f"an LSE pod that names CPU {str(one.cpus)[:1]} of one is refused")

    bed.stop_kubelet()
    bed.start_under("static")
    time.sleep(2 * RECONCILE_S)
    nothing_moves(bed, "kubelet was started again")
    everyone = bed.snapshot()
    bed.daemon.kill9()
    bed.daemon.start()
    wait("the comparison", lambda: bool(bed.daemon.status()["ready"]))
    assert bed.snapshot() == everyone
    nothing_moves(bed, "the daemon was killed")

    (MANIFESTS / "one.yaml").unlink()
    wait("kubelet to take the CPUs back", lambda: not state()[1].held, 2 * LONG_S)
    wait("the pool to have them", lambda: bed.place("part/main").cpus == ALL - lse.cpus, 2 * LONG_S)
    # kubelet gives the lowest CPUs first, so with this many it comes to those of the LSE pod.
    bed.add("many", container("main", "22"))
    many = bed.place("many/main", 2 * LONG_S)
    named = held_by(bed, "many")
    assert len(named) == 22
    assert many.cpus.isdisjoint(lse.cpus), many
    assert str(bed.place("lse/main").cpus) == "20-21"
    assert bed.place("part/main").cpus.isdisjoint(lse.cpus)
    reported = [p["what"] for p in bed.daemon.status()["problems"]]
    step(f"kubelet named {named}; it has {many.cpus}; reported: {'; '.join(reported)}")
    if not named.isdisjoint(lse.cpus):
        assert any("belong to default/lse-bed/main" in words for words in reported), reported
    assert bed.daemon.status()["violations"] == []
    print(bed.daemon.ask("status").stdout, flush=True)
    bed.stop_kubelet()
    assert bed.daemon.stop() == 0
    step("the scenario ends well")


if __name__ == "__main__":
    main()
