"""The scenario of CFS quotas, in a virtual machine with cgroup v2 and either driver.

python3 vm_quota.py cgroupfs|systemd
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cri import Cri, is_v2
from vm_guest import ALL, LONG_S, SOCKET, GuestDaemon, step, wait
from vm_pools import KINDS, GuestNode

from proxy.model.idset import CpuSet

QUOTA_US, MORE_US = 300_000, 400_000
CPU = Path("/sys/fs/cgroup") if is_v2() else Path("/sys/fs/cgroup/cpu")
FILE = "cpu.max" if is_v2() else "cpu.cfs_quota_us"


def quota(directory: Path) -> int:
    """Microseconds, -1 for none."""
    value = (directory / FILE).read_text().split()[0]
    return -1 if value == "max" else int(value)


def limit(directory: Path, microseconds: int) -> None:
    """Limit a pod as kubelet does: through systemd if that is the driver."""
    if directory.suffix == ".slice":
        value = f"CPUQuota={microseconds // 1000}%"
        subprocess.run(["systemctl", "set-property", "--runtime", directory.name, value], check=True)
    else:
        (directory / FILE).write_text(str(microseconds))
    assert quota(directory) == microseconds


def group(name: str) -> Path:
    """Find a group by the end of its name."""
    ends = (name, f"-{name}.scope", f"-{name}.slice")
    return next(path for path in CPU.rglob("kubepods*/**/*") if path.is_dir() and path.name.endswith(ends))


def main() -> None:
    daemon, node = GuestDaemon(), GuestNode(sys.argv[1])
    pod = node.pod("lsr", CpuSet([max(ALL)]), "db")
    top = group("poddb")
    limit(top, QUOTA_US)
    owner = node.cri.create(pod, timeout=LONG_S, **KINDS["lsr"].resources)
    node.cri.start(owner)
    found = quota(top), quota(group(owner))
    step(f"after the start the pod's quota is {found[0]}, the container's {found[1]}")
    assert found[1] == -1
    wait("the pod's quota to be off", lambda: quota(top) == -1, 20)
    node.run("ls")
    assert quota(group(node.ids["ls"])) == KINDS["ls"].limit * 100

    node.cri.update(owner, cpu_quota=150_000, cpu_period=100_000)
    assert quota(group(owner)) == -1
    step("an update did not restore the quota")
    limit(top, MORE_US)
    took = wait("the pod's quota to be removed again", lambda: quota(top) == -1)
    step(f"the quota of a resized pod was removed after {took:.1f} s")
    if node.driver == "systemd":
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        found = quota(top), quota(group(owner))
        took = wait("systemd's values to be repaired", lambda: quota(top) == quota(group(owner)) == -1)
        step(f"daemon-reload set the quotas to {found[0]} and {found[1]}; off again after {took:.1f} s")
    daemon.kill9()
    assert quota(top) == quota(group(owner)) == -1
    daemon.start()
    with Cri(SOCKET, "") as client:
        wait("the daemon to be ready", lambda: daemon.status()["ready"])
        assert quota(top) == quota(group(owner)) == -1
        (record,) = [row for row in daemon.status()["quotas"] if not row["container"]]
        assert record["was"] == MORE_US, record
        client.stop(owner)
    took = wait("the pod's quota to be restored", lambda: quota(top) == MORE_US)
    step(f"the owner has ended; the pod's quota is restored after {took:.1f} s")
    assert daemon.status()["problems"] == []
    assert daemon.stop() == 0
    step("all is given back")


if __name__ == "__main__":
    main()
