"""BE containers whose requests are erased: on a real containerd the groups above them hold the BE pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from bed import Bed, wait_for
from cri import cgroup_of, cpuset_of, online
from daemon import Daemon, Node

from proxy.model.idset import CpuSet

pytestmark = pytest.mark.e2e

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST


def cpus(directory: Path) -> CpuSet:
    return CpuSet.parse((directory / "cpuset.cpus").read_text())


def held(container: str) -> list[CpuSet]:
    """What a BE container has, all groups of its pod, and the group of its class."""
    own = cgroup_of(container)
    assert own is not None
    pod = own.parent
    assert pod.parent.name == "besteffort"
    return [cpus(path) for path in (own, pod, pod.parent, *(p for p in pod.iterdir() if p.is_dir()))]


def test_groups_hold_the_be_pool_and_requests_name_nothing(bed: Bed, proxies: Callable[..., Daemon]) -> None:
    daemon = proxies(koordinator={"beCpuset": "erase"})
    client = daemon.client()
    try:
        node = Node(bed, daemon, client)
        pod = node.pod("be")
        first = node.run(pod, "first")
        assert set(held(first)) == {ALL}
        waiting = node.create(pod, "waiting")
        lse = node.run(node.pod("lse", LAST))
        assert set(held(first)) == {REST}, "the sandbox and the groups above have left the CPU too"
        node.start(waiting)
        assert cpuset_of(waiting).cpus == REST, "created before, started after"
        client.update(first, cpuset_cpus=str(ALL))
        assert set(held(first)) == {REST}, "kubelet's own list is erased as well"
        node.remove(lse)
        wait_for("the CPU to come back", lambda: set(held(first)) == {ALL})
        assert cpuset_of(waiting).cpus == ALL
        assert daemon.status()["problems"] == []
    finally:
        client.close()
        bed.clear()


def test_the_first_pod_starts_beside_an_owner(bed: Bed, proxies: Callable[..., Daemon]) -> None:
    daemon = proxies(koordinator={"beCpuset": "erase"})
    client = daemon.client()
    try:
        node = Node(bed, daemon, client)
        lse = node.run(node.pod("lse", LAST))
        first = node.run(node.pod("be"))
        assert set(held(first)) == {REST}, "its groups were made with all CPUs"
        node.remove(lse)
        wait_for("the groups to be wide again, for those that come next", lambda: set(held(first)) == {ALL})
        assert daemon.status()["problems"] == []
    finally:
        client.close()
        bed.clear()
