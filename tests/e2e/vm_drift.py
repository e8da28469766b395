"""The scenario of drift: another program writes cpusets, and the daemon reconciles once an hour.

The kernel reports writes to a container's cgroup, and on cgroup v2 also those to its parents, which bound its
effective cpuset. A program that keeps writing is reported as a problem.

    python3 vm_drift.py cgroupfs|systemd
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cri import Cri, is_v2
from vm_guest import ALL, RUNTIME, GuestDaemon, place_in, step, wait
from vm_pools import GuestNode

from proxy.model.idset import CpuSet

RUNC = Path("/run/containerd/runc/k8s.io")
OWN = CpuSet.parse("8-11")
REST = ALL - OWN
EXPECTED_CPUS = {"lse": OWN, "ls": REST, "be": REST}


def drift(daemon: GuestDaemon) -> Any:
    return daemon.status()["drift"]


def repaired(daemon: GuestDaemon) -> int:
    return int(daemon.status()["counters"].get("drift_repaired", 0))


def write_cpus(directory: Path, cpus: CpuSet) -> None:
    (directory / "cpuset.cpus").write_text(str(cpus))


def direct_writes(daemon: GuestDaemon, node: GuestNode) -> None:
    for times, (name, cpus) in enumerate(EXPECTED_CPUS.items(), 1):
        directory = node.group(name)
        write_cpus(directory, ALL)
        begun = time.monotonic()
        while place_in(directory).cpus != cpus:
            assert time.monotonic() < begun + 60, f"{name} is not repaired: {place_in(directory)}"
        step(f"{name} is repaired {time.monotonic() - begun:.2f} s after a write")
        wait("the repair to be counted", lambda times=times: repaired(daemon) == times)


def writes_above(daemon: GuestDaemon, node: GuestNode) -> None:
    """The pod's cgroup is narrowed: the container's file is unchanged, but its cpuset is not in effect."""
    directory, before = node.group("ls"), repaired(daemon)
    write_cpus(directory.parent, CpuSet([0]))
    took = wait("the pod's cgroup to be widened", lambda: place_in(directory).effective == REST)
    wait("the repair to be counted", lambda: repaired(daemon) == before + 1)
    step(f"a write to the pod's group is repaired after {took:.1f} s")


def bypass_the_daemon(daemon: GuestDaemon, node: GuestNode) -> None:
    """Updates by runc, and at the runtime's own socket; the runtime saves the update."""
    container, before = node.ids["ls"], repaired(daemon)
    runc = ["runc", "--root", str(RUNC), "update", "--cpuset-cpus", str(ALL), container]
    subprocess.run(runc, check=True)
    begun = time.monotonic()
    wait("the cpuset to be repaired", lambda: node.place("ls").is_at(REST, None))
    step(f"repaired {time.monotonic() - begun:.1f} s after an update by runc")
    wait("the repair to be counted", lambda: repaired(daemon) > before)
    settled = daemon.status()["counters"].get("settled", 0)
    with Cri(RUNTIME, "") as direct:
        direct.update(container, cpuset_cpus=str(ALL))
        begun = time.monotonic()
        wait("the cpuset to be repaired", lambda: node.place("ls").is_at(REST, None))
        step(f"repaired {time.monotonic() - begun:.1f} s after an update at the runtime's socket")
        if node.driver == "cgroupfs":  # under systemd a runc that corrupts cpusets gets none
            wait("the runtime to be updated", lambda: daemon.status()["counters"].get("settled", 0) > settled)
        direct.update(container, cpu_shares=300)  # the runtime applies its saved cpuset, too
    node.check(("ls",), REST, limit=60)
    step(f"the saved spec has the cpuset, too; writers so far: {drift(daemon)['by']}")


def reload(daemon: GuestDaemon, node: GuestNode) -> None:
    """Check that all cpusets are correct after a daemon-reload."""
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    time.sleep(5)
    for name, cpus in EXPECTED_CPUS.items():
        node.check((name,), cpus, limit=60)
    step(f"after a daemon-reload all cpusets are correct; writers so far: {drift(daemon)['by']}")


def write_conflict(daemon: GuestDaemon, node: GuestNode) -> None:
    directory, before = node.group("be"), repaired(daemon)
    loop = f"while sleep 0.1; do echo {ALL} > {directory}/cpuset.cpus; done"

    def write_conflicts() -> list[Any]:
        """Return the write conflicts of this container; earlier writes may have caused others."""
        return [row for row in drift(daemon)["wars"] if row["id"] == node.ids["be"]]

    with subprocess.Popen(["sh", "-c", loop]) as writer:
        try:
            wait("the write conflict", lambda: bool(write_conflicts()))
            time.sleep(10)
            times, (found,) = repaired(daemon) - before, write_conflicts()
        finally:
            writer.kill()
    assert found["cpus"] == str(REST), found
    assert any("keeps writing the cpuset" in p["what"] for p in daemon.status()["problems"])
    node.check(("be",), REST, limit=60)
    step(f"a busy writer is reported as a problem; repaired {times} times in about 10 s")


def main() -> None:
    assert RUNTIME.exists()
    daemon, node = GuestDaemon(reconcilePeriod="1h"), GuestNode(sys.argv[1])
    for name, cpus in EXPECTED_CPUS.items():
        node.run(name, cpus if name == "lse" else None)
    wait("all to be watched", lambda: drift(daemon)["watched"] == len(EXPECTED_CPUS))
    for name, cpus in EXPECTED_CPUS.items():
        node.check((name,), cpus, limit=60)
    time.sleep(5)  # until the runtime is updated
    assert repaired(daemon) == 0, daemon.status()["counters"]
    direct_writes(daemon, node)
    if is_v2():
        writes_above(daemon, node)
    bypass_the_daemon(daemon, node)
    if sys.argv[1] == "systemd":
        reload(daemon, node)
    write_conflict(daemon, node)
    assert daemon.stop() == 0
    step("all is given back")


if __name__ == "__main__":
    main()
