"""BE suppression by a CFS quota, with a real load in real cgroups.

The test cannot control the CPU time that the host uses outside of pods, so the daemon gets a constant
``/proc/stat``; it reads the CPU time of pods from the kernel.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon import DaemonProcess, ModeledNode
from private_runtime import CGROUPS, PrivateRuntime, wait_for

pytestmark = pytest.mark.e2e

CPUS = os.cpu_count() or 1
THRESHOLD = 60
IDLE = CPUS * THRESHOLD * 1000
"""The quota of BE pods on an idle node, in microseconds."""
BUSY = ("sh", "-c", "while :; do :; done & while :; do :; done")
LIMIT_S = 60


class BestEffortGroup:
    """The parent cgroup of all BE pods."""

    def __init__(self, runtime: PrivateRuntime) -> None:
        self.path = f"{runtime.cgroup.lstrip('/')}/kubepods/besteffort"
        mounts = [CGROUPS / name for name in ("cpu", "cpu,cpuacct") if (CGROUPS / name).is_dir()]
        self.directory = (mounts or [CGROUPS])[0] / self.path

    @property
    def is_idle(self) -> bool:
        """Whether BE pods have the quota of an idle node, give or take 1 % of the machine."""
        return IDLE - CPUS * 1000 < self.quota <= IDLE

    @property
    def quota(self) -> int:
        """Microseconds in 100 ms; -1 for none."""
        if (self.directory / "cpu.max").exists():
            value = (self.directory / "cpu.max").read_text().split()[0]
            return -1 if value == "max" else int(value)
        return int((self.directory / "cpu.cfs_quota_us").read_text())


@pytest.fixture
def constant_proc(tmp_path: Path) -> Path:
    """A /proc directory in which the node's CPU counters are constant."""
    directory = tmp_path / "proc"
    directory.mkdir()
    for name in ("meminfo", "cmdline", "cpuinfo", "self", "sys"):
        (directory / name).symlink_to(f"/proc/{name}")
    (directory / "stat").write_text("cpu  1 1 1 1 1 1 1 1 0 0\n")
    return directory


def steps_up(log: Path) -> list[float]:
    """Return by how many CPUs the quota was raised, for each increase in the log."""
    changes = re.findall(
        r'now="a CFS quota of ([\d.]+) CPUs" before="a CFS quota of ([\d.]+) CPUs"', log.read_text()
    )
    return [float(now) - float(was) for now, was in changes if float(now) > float(was)]


def test_the_quota_of_be_pods_follows_the_load_of_other_pods(
    runtime: PrivateRuntime, start_daemon: Callable[..., DaemonProcess], constant_proc: Path
) -> None:
    mode = {"mode": "cfs-quota", "threshold": THRESHOLD, "period": "0.5s"}
    daemon = start_daemon(beSuppress=mode, procfsRoot=str(constant_proc), log={"level": "debug"})
    group = BestEffortGroup(runtime)
    try:
        with daemon.client() as client:
            node = ModeledNode(runtime, daemon, client)
            batch = node.run(node.pod("besteffort"), command=BUSY)
            wait_for("the quota of an idle node", lambda: group.is_idle, LIMIT_S)
            web = node.pod("burstable")
            load = node.run(web, command=BUSY)
            wait_for("the quota to fall", lambda: group.quota < IDLE * 9 // 10, LIMIT_S)
            wait_for(
                "explain", lambda: "BE is suppressed: all BE pods" in daemon.explain(batch).stdout, LIMIT_S
            )
            page = daemon.status()["beSuppress"]
            assert page["group"] == group.path
            assert page["usage"]["others"] > 0
            assert 0 < page["quota_us"] < IDLE
            assert "Now:" not in daemon.explain(load).stdout

            node.remove(load)
            wait_for("the quota to rise again", lambda: group.is_idle, LIMIT_S)
            assert steps_up(daemon.log), daemon.log.read_text()[-2000:]
            assert max(steps_up(daemon.log)) <= 0.1 * CPUS + 0.02, "at most a tenth of the machine per step"

            daemon.kill9()
            assert group.is_idle, "the quota remains after a kill of the daemon"
            config = json.loads((daemon.directory / "config.yaml").read_text())
            (daemon.directory / "config.yaml").write_text(
                json.dumps(config | {"beSuppress": {"mode": "off"}})
            )
            daemon.start()
            wait_for("the quota to be removed", lambda: group.quota == -1, LIMIT_S)
            daemon.stop()
            (daemon.directory / "config.yaml").write_text(json.dumps(config))
            daemon.start()
            wait_for("the quota to be set again", lambda: group.is_idle, LIMIT_S)
            assert daemon.stop() == 0
            assert group.quota == -1
    finally:
        runtime.clear()
