"""Drift: cpusets that another program writes, on a real containerd and real cgroups.

The daemon reconciles once an hour here, so it can repair a cpuset only because the kernel reports the write.
The tests print how long the repair took (``pytest -s``); ``bench/drift_figures.py`` measures it.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cri import cgroup_of, cpuset_of, online
from private_runtime import wait_for

from proxy.model.idset import CpuSet

if TYPE_CHECKING:
    from daemon import ModeledNode
    from private_runtime import PrivateRuntime

pytestmark = pytest.mark.e2e

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST
LIMIT_S = 30


def drift(node: ModeledNode) -> Any:
    return node.daemon.status()["drift"]


def start_sharer_and_owner(node: ModeledNode) -> tuple[str, str]:
    """Run a sharer and an owner, and wait until the daemon watches both; returns their ids."""
    sharer = node.spawn("ls")
    owner = node.spawn("lse", LAST)
    wait_for("the daemon to watch", lambda: drift(node)["watched"] == 2, LIMIT_S)
    wait_for("the sharer to be updated at the runtime", lambda: counter(node, "settled") > 0, LIMIT_S)
    return sharer, owner


def counter(node: ModeledNode, name: str) -> int:
    return int(node.daemon.status()["counters"].get(name, 0))


def write(container: str, cpus: CpuSet) -> None:
    """Write as a shell does: open, truncate, write, close."""
    directory = cgroup_of(container)
    assert directory is not None
    subprocess.run(["sh", "-c", f"echo {cpus} > {directory}/cpuset.cpus"], check=True)


def check_repaired(container: str, cpus: CpuSet, what: str) -> None:
    begun = time.monotonic()
    wait_for("the cpuset to be repaired", lambda: cpuset_of(container).cpus == cpus, LIMIT_S, pause=0.001)
    print(f"{what}: repaired {(time.monotonic() - begun) * 1000:.0f} ms after the write")


def test_a_direct_write_is_repaired(calm_node: ModeledNode) -> None:
    node = calm_node
    sharer, owner = start_sharer_and_owner(node)
    write(sharer, ALL)
    check_repaired(sharer, REST, "a sharer's set")
    write(owner, ALL)
    check_repaired(owner, LAST, "an owner's set")
    wait_for("both to be reported", lambda: sum(drift(node)["by"].values()) == 2, LIMIT_S)
    log = node.daemon.log.read_text()
    assert f"cpus={REST} found={ALL}" in log
    assert f"cpus={LAST} found={ALL}" in log
    assert drift(node)["wars"] == []


def test_an_update_that_bypasses_the_daemon_is_repaired_also_at_the_runtime(
    runtime: PrivateRuntime, calm_node: ModeledNode
) -> None:
    node = calm_node
    sharer, _ = start_sharer_and_owner(node)
    settled = counter(node, "settled")
    with runtime.client() as direct:
        direct.update(sharer, cpuset_cpus=str(ALL))
    check_repaired(sharer, REST, "an update at the runtime's own socket")
    wait_for("the drift to be reported", lambda: drift(node)["by"].get("runc") == 1, LIMIT_S)
    wait_for("the runtime to be updated", lambda: counter(node, "settled") > settled, LIMIT_S)
    with runtime.client() as direct:
        direct.update(sharer, cpu_shares=300)  # the runtime applies its saved cpuset, too
    assert cpuset_of(sharer).cpus == REST


def test_an_update_by_runc_itself_is_repaired(runtime: PrivateRuntime, calm_node: ModeledNode) -> None:
    node = calm_node
    sharer, _ = start_sharer_and_owner(node)
    if not Path(runtime.directory, "runc/k8s.io").is_dir():
        pytest.skip("the runtime does not keep runc's state there")
    runc = ["runc", "--root", f"{runtime.directory}/runc/k8s.io", "update", "--cpuset-cpus", str(ALL), sharer]
    done = runtime.run(runc)
    assert done.returncode == 0, done.stdout
    check_repaired(sharer, REST, "an update by runc")


def test_a_busy_writer_is_reported_and_repaired_at_a_limited_rate(calm_node: ModeledNode) -> None:
    node = calm_node
    sharer, _ = start_sharer_and_owner(node)
    directory = cgroup_of(sharer)
    assert directory is not None
    loop = f"while sleep 0.01; do echo {ALL} > {directory}/cpuset.cpus; done"
    with subprocess.Popen(["sh", "-c", loop]) as writer:
        try:
            wait_for("the write conflict to be reported", lambda: drift(node)["wars"], LIMIT_S)
            before = counter(node, "drift_repaired")
            begun = time.monotonic()
            time.sleep(5)
            repaired, seconds = counter(node, "drift_repaired") - before, time.monotonic() - begun
            print(f"a writer with 100 writes a second: repaired {repaired} times in {seconds:.1f} s")
            assert 1 <= repaired <= seconds / 0.5, "an owner's CPUs are affected: about one repair per second"
            status = node.daemon.status()
            war = status["drift"]["wars"][0]
            assert (war["id"], war["cpus"], war["found"]) == (sharer, str(REST), str(ALL))
            assert any("keeps writing the cpuset" in problem["what"] for problem in status["problems"])
        finally:
            writer.kill()
    wait_for("the cpuset to be repaired", lambda: cpuset_of(sharer).cpus == REST, LIMIT_S)
    time.sleep(2)
    assert cpuset_of(sharer).cpus == REST
