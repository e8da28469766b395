"""The scenario of drift: another program writes cpusets, and there is no comparison for an hour.

The kernel reports of a write to a container's group, and on cgroup v2 of one to the groups above it, which
bound what takes effect. A writer that continues is reported as a problem.

    python3 vm_drift.py cgroupfs|systemd
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cri import Cri, is_v2
from vm_guest import ALL, RUNTIME, Daemon, place_in, step, wait
from vm_pools import Node

from proxy.model.idset import CpuSet

RUNC = Path("/run/containerd/runc/k8s.io")
OWN = CpuSet.parse("8-11")
REST = ALL - OWN
PARTS = {"lse": OWN, "ls": REST, "be": REST}


def drift(daemon: Daemon) -> Any:
    return daemon.status()["drift"]


def repaired(daemon: Daemon) -> int:
    return int(daemon.status()["counters"].get("drift_repaired", 0))


def scribble(directory: Path, cpus: CpuSet) -> None:
    (directory / "cpuset.cpus").write_text(str(cpus))


def direct_writes(daemon: Daemon, node: Node) -> None:
    for times, (name, cpus) in enumerate(PARTS.items(), 1):
        directory = node.group(name)
        scribble(directory, ALL)
        begun = time.monotonic()
        while place_in(directory).cpus != cpus:
            assert time.monotonic() < begun + 60, f"{name} is not put back: {place_in(directory)}"
        step(f"{name} is put back {time.monotonic() - begun:.2f} s after a write")
        wait("it to be counted", lambda times=times: repaired(daemon) == times)


def writes_above(daemon: Daemon, node: Node) -> None:
    """The pod's group is narrowed: what its container has is in its file still, and not in force."""
    directory, before = node.group("ls"), repaired(daemon)
    scribble(directory.parent, CpuSet([0]))
    took = wait("the group above to be widened", lambda: place_in(directory).effective == REST)
    wait("it to be counted", lambda: repaired(daemon) == before + 1)
    step(f"a write to the pod's group is made good after {took:.1f} s")


def behind_our_back(daemon: Daemon, node: Node) -> None:
    """Updates by runc itself, and at the runtime's own socket, which saves what it was reported."""
    container, before = node.ids["ls"], repaired(daemon)
    runc = ["runc", "--root", str(RUNC), "update", "--cpuset-cpus", str(ALL), container]
    subprocess.run(runc, check=True)
    begun = time.monotonic()
    wait("the set to be back", lambda: node.place("ls").is_at(REST, None))
    step(f"right {time.monotonic() - begun:.1f} s after an update by runc itself")
    wait("it to be counted", lambda: repaired(daemon) > before)
    settled = daemon.status()["counters"].get("settled", 0)
    with Cri(RUNTIME, "") as behind:
        behind.update(container, cpuset_cpus=str(ALL))
        begun = time.monotonic()
        wait("the set to be back", lambda: node.place("ls").is_at(REST, None))
        step(f"right {time.monotonic() - begun:.1f} s after an update at the runtime's socket")
        if node.driver == "cgroupfs":  # under systemd a runc that sends wrong sets is sent none
            wait("the runtime to be updated", lambda: daemon.status()["counters"].get("settled", 0) > settled)
        behind.update(container, cpu_shares=300)  # brings what the runtime has saved
    node.check(("ls",), REST, limit=60)
    step(f"right after what the runtime has saved, too; so far written by {drift(daemon)['by']}")


def reload(daemon: Daemon, node: Node) -> None:
    """Whatever a reload writes, all is as it should be then."""
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    time.sleep(5)
    for name, cpus in PARTS.items():
        node.check((name,), cpus, limit=60)
    step(f"after a daemon-reload all are right; so far written by {drift(daemon)['by']}")


def war(daemon: Daemon, node: Node) -> None:
    directory, before = node.group("be"), repaired(daemon)
    loop = f"while sleep 0.1; do echo {ALL} > {directory}/cpuset.cpus; done"

    def wars() -> list[Any]:
        """Those about this container: what was written of another before may be a war where all is quick."""
        return [row for row in drift(daemon)["wars"] if row["id"] == node.ids["be"]]

    with subprocess.Popen(["sh", "-c", loop]) as writer:
        try:
            wait("a war", lambda: bool(wars()))
            time.sleep(10)
            times, (found,) = repaired(daemon) - before, wars()
        finally:
            writer.kill()
    assert found["cpus"] == str(REST), found
    assert any("keeps writing the cpuset" in p["what"] for p in daemon.status()["problems"])
    node.check(("be",), REST, limit=60)
    step(f"a busy writer is reported as a problem; put back {times} times in some 10 s")


def main() -> None:
    assert RUNTIME.exists()
    daemon, node = Daemon(reconcilePeriod="1h"), Node(sys.argv[1])
    for name, cpus in PARTS.items():
        node.run(name, cpus if name == "lse" else None)
    wait("all to be watched", lambda: drift(daemon)["watched"] == len(PARTS))
    for name, cpus in PARTS.items():
        node.check((name,), cpus, limit=60)
    time.sleep(5)  # what was moved is sent to the runtime
    assert repaired(daemon) == 0, daemon.status()["counters"]
    direct_writes(daemon, node)
    if is_v2():
        writes_above(daemon, node)
    behind_our_back(daemon, node)
    if sys.argv[1] == "systemd":
        reload(daemon, node)
    war(daemon, node)
    assert daemon.stop() == 0
    step("all is given back")


if __name__ == "__main__":
    main()
