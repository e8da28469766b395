"""Cpusets that another program writes, on a real containerd and real cgroups.

The daemon compares once an hour here, so nothing but the kernel's word of a write can have it put back. How
long it took is printed (``pytest -s``); ``bench/drift_figures.py`` measures it.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from bed import wait_for
from cri import cgroup_of, cpuset_of, online

from proxy.model.idset import CpuSet

if TYPE_CHECKING:
    from bed import Bed
    from daemon import Node

pytestmark = pytest.mark.e2e

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST
LIMIT_S = 30


def drift(node: Node) -> Any:
    return node.daemon.status()["drift"]


def begin(node: Node) -> tuple[str, str]:
    """A sharer and an owner, both watched; gives their ids."""
    sharer = node.spawn("ls")
    owner = node.spawn("lse", LAST)
    wait_for("the daemon to watch", lambda: drift(node)["watched"] == 2, LIMIT_S)
    wait_for("the sharer to be updated at the runtime", lambda: counter(node, "settled") > 0, LIMIT_S)
    return sharer, owner


def counter(node: Node, name: str) -> int:
    return int(node.daemon.status()["counters"].get(name, 0))


def write(container: str, cpus: CpuSet) -> None:
    """Write as a shell does: opened, cut off, written, closed."""
    directory = cgroup_of(container)
    assert directory is not None
    subprocess.run(["sh", "-c", f"echo {cpus} > {directory}/cpuset.cpus"], check=True)


def back(container: str, cpus: CpuSet, what: str) -> None:
    begun = time.monotonic()
    wait_for("the set to be back", lambda: cpuset_of(container).cpus == cpus, LIMIT_S, pause=0.001)
    print(f"{what}: back {(time.monotonic() - begun) * 1000:.0f} ms after it had returned")


def test_a_direct_write_is_repaired(calm_node: Node) -> None:
    node = calm_node
    sharer, owner = begin(node)
    write(sharer, ALL)
    back(sharer, REST, "a sharer's set")
    write(owner, ALL)
    back(owner, LAST, "an owner's set")
    wait_for("both to be reported", lambda: sum(drift(node)["by"].values()) == 2, LIMIT_S)
    log = node.daemon.log.read_text()
    assert f"cpus={REST} found={ALL}" in log
    assert f"cpus={LAST} found={ALL}" in log
    assert drift(node)["wars"] == []


def test_an_update_behind_our_back_is_repaired_also_at_the_runtime(bed: Bed, calm_node: Node) -> None:
    node = calm_node
    sharer, _ = begin(node)
    settled = counter(node, "settled")
    with bed.client() as behind:
        behind.update(sharer, cpuset_cpus=str(ALL))
    back(sharer, REST, "an update at the runtime's own socket")
    wait_for("it to be reported", lambda: drift(node)["by"].get("runc") == 1, LIMIT_S)
    wait_for("the runtime to be updated", lambda: counter(node, "settled") > settled, LIMIT_S)
    with bed.client() as behind:
        behind.update(sharer, cpu_shares=300)  # brings what the runtime has saved
    assert cpuset_of(sharer).cpus == REST


def test_an_update_by_runc_itself_is_repaired(bed: Bed, calm_node: Node) -> None:
    node = calm_node
    sharer, _ = begin(node)
    if not Path(bed.directory, "runc/k8s.io").is_dir():
        pytest.skip("the runtime does not keep runc's state there")
    runc = ["runc", "--root", f"{bed.directory}/runc/k8s.io", "update", "--cpuset-cpus", str(ALL), sharer]
    done = bed.run(runc)
    assert done.returncode == 0, done.stdout
    back(sharer, REST, "an update by runc")


def test_a_busy_writer_is_reported_and_fought_within_reason(calm_node: Node) -> None:
    node = calm_node
    sharer, _ = begin(node)
    directory = cgroup_of(sharer)
    assert directory is not None
    loop = f"while sleep 0.01; do echo {ALL} > {directory}/cpuset.cpus; done"
    with subprocess.Popen(["sh", "-c", loop]) as writer:
        try:
            wait_for("a war", lambda: drift(node)["wars"], LIMIT_S)
            before = counter(node, "drift_repaired")
            begun = time.monotonic()
            time.sleep(5)
            repaired, seconds = counter(node, "drift_repaired") - before, time.monotonic() - begun
            print(f"a writer with 100 writes a second: put back {repaired} times in {seconds:.1f} s")
            assert 1 <= repaired <= seconds / 0.5, "an owner's CPUs are at stake: each second, and no faster"
            status = node.daemon.status()
            war = status["drift"]["wars"][0]
            assert (war["id"], war["cpus"], war["found"]) == (sharer, str(REST), str(ALL))
            assert any("keeps writing the cpuset" in problem["what"] for problem in status["problems"])
        finally:
            writer.kill()
    wait_for("the set to be right", lambda: cpuset_of(sharer).cpus == REST, LIMIT_S)
    time.sleep(2)
    assert cpuset_of(sharer).cpus == REST
