"""The scenario of partitions, in a virtual machine with cgroup v2 and either driver.

If the kernel has ``cpuset.cpus.exclusive`` (Linux 6.7), an owner's CPUs must be a partition, and no
other process may use them. On an older kernel the reason must be reported, and nothing else may differ.

python3 vm_partitions.py cgroupfs|systemd
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cri import Cri
from vm_guest import ALL, DIRECTORY, SOCKET, GuestDaemon, place_in, step, wait
from vm_pools import GuestNode

from proxy.model.idset import CpuSet

ROOT = Path("/sys/fs/cgroup")
LAST = sorted(ALL)[-2:]
OWN = CpuSet(LAST)


def partition_row(daemon: GuestDaemon, ref: str) -> Any:
    """Return the status of an owner's partition from ``status --json``."""
    return next(r for r in daemon.status()["partitions"]["containers"] if r["ref"].endswith(ref))


def read_file(directory: Path, name: str) -> str:
    return (directory / name).read_text().strip()


def partition_type(directory: Path) -> str:
    return read_file(directory, "cpuset.cpus.partition")


def on_older_kernel(daemon: GuestDaemon, node: GuestNode) -> None:
    """An older kernel: the reason is reported, and the daemon continues without a partition."""
    wait("the kernel's reason", lambda: bool(partition_row(daemon, "lse/main")["reason"]))
    found = partition_row(daemon, "lse/main")
    step(f"the kernel reports: {found['reason']}")
    assert "partition root" in found["reason"], found
    assert "6.7" in found["reason"], found
    assert found["state"] == "member", found
    assert partition_type(node.group("lse")) == "member"
    reported = [p for p in daemon.status()["problems"] if "cannot make a partition" in p["what"]]
    assert len(reported) == 1, reported
    assert found["reason"] in daemon.cli("status").stdout
    assert node.place("lse").is_at(OWN, None)
    assert node.place("ls").effective == ALL - OWN
    step("the reason is reported once, and every container has its CPUs")


def on_newer_kernel(daemon: GuestDaemon, node: GuestNode) -> None:
    """A newer kernel: the partition is in effect, and persists over calls, reloads and kills."""
    group, pod = node.group("lse"), node.group("lse").parent
    took = wait("the partition", lambda: partition_type(group) == "isolated")
    step(f"CPUs {OWN} are isolated {took:.1f} s after the start")
    wait("the state to be reported", lambda: partition_row(daemon, "lse/main")["state"] == "isolated")
    assert CpuSet.parse(read_file(ROOT, "cpuset.cpus.isolated")) == OWN
    rest = ALL - OWN
    assert CpuSet.parse(read_file(ROOT, "cpuset.cpus.effective")) == rest
    assert CpuSet(os.sched_getaffinity(1)) <= rest
    assert CpuSet.parse(read_file(pod, "cpuset.cpus.effective")) == rest
    step("no other process of the node may run there")

    node.run("be")
    node.cri.update(node.ids["lse"], cpu_shares=512)
    if node.driver == "systemd":
        subprocess.run(["systemctl", "daemon-reload"], check=True)
    assert partition_type(group) == "isolated"
    assert node.place("lse").effective == OWN
    step("the partition persists over another container, an update and a daemon-reload")

    sandbox = next(path for path in pod.iterdir() if path.is_dir() and path != group)
    (sandbox / "cpuset.cpus").write_text(str(ALL))
    took = wait("the loss to be detected", lambda: daemon.status()["counters"].get("partitions_lost", 0) > 0)
    step(f"another program gave the sandbox all CPUs; detected after {took:.1f} s")
    wait("the partition to be restored", lambda: partition_type(group) == "isolated")
    assert node.place("lse").effective == OWN
    step("the partition is restored")

    daemon.kill9()
    assert partition_type(group) == "isolated"
    daemon.configure()
    daemon.start()
    took = wait("the partition to be removed", lambda: partition_type(group) == "member")
    wait("the parent to have no exclusive CPUs", lambda: not read_file(pod.parent, "cpuset.cpus.exclusive"))
    assert CpuSet.parse(read_file(ROOT, "cpuset.cpus.effective")) == ALL
    assert not read_file(pod, "cpuset.cpus.exclusive")
    assert node.place("lse").is_at(OWN, None)
    step(f"killed, and started without partitions: the partition is removed after {took:.1f} s")
    daemon.stop()
    daemon.configure(apply={"partitions": "root"})
    daemon.start()
    wait("a partition of the other kind", lambda: partition_type(group) == "root")
    with Cri(SOCKET, "") as client:
        client.stop(node.ids["lse"])
    took = wait("the CPUs to be released", lambda: place_in(node.group("ls")).effective == ALL)
    assert CpuSet.parse(read_file(ROOT, "cpuset.cpus.effective")) == ALL
    step(f"the owner has ended: all containers have its CPUs after {took:.1f} s")
    node.run("lse", OWN, "again")
    wait("a partition for the next owner", lambda: partition_type(node.group("again")) == "root")
    done = daemon.cli("release", "--config", str(DIRECTORY / "config.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert partition_type(node.group("again")) == "member"
    wait("all containers to have all CPUs", lambda: node.place("ls").effective == ALL)
    step("released: the partition is removed")


def main() -> None:
    daemon, node = GuestDaemon(apply={"partitions": "isolated"}), GuestNode(sys.argv[1])
    node.run("lse", OWN)
    node.run("ls")
    newer = (node.group("lse") / "cpuset.cpus.exclusive").exists()
    step(f"Linux {os.uname().release}: cpuset.cpus.exclusive is {'there' if newer else 'not there'}")
    (on_newer_kernel if newer else on_older_kernel)(daemon, node)
    print("all is given back", flush=True)


if __name__ == "__main__":
    main()
