"""BE containers whose cpuset requests are erased: their parent cgroups have the CPUs of the BE pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cri import cgroup_of, cpuset_of, online
from daemon import DaemonProcess, ModeledNode
from private_runtime import PrivateRuntime, wait_for

from proxy.model.idset import CpuSet

pytestmark = pytest.mark.e2e

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST


def cpus(directory: Path) -> CpuSet:
    return CpuSet.parse((directory / "cpuset.cpus").read_text())


def group_cpus(container: str) -> list[CpuSet]:
    """Return the CPUs of the cgroups of a BE container, of its pod and sandbox, and of its class."""
    own = cgroup_of(container)
    assert own is not None
    pod = own.parent
    assert pod.parent.name == "besteffort"
    return [cpus(path) for path in (own, pod, pod.parent, *(p for p in pod.iterdir() if p.is_dir()))]


def test_cgroups_have_the_be_pool_and_requests_have_no_cpuset(
    runtime: PrivateRuntime, start_daemon: Callable[..., DaemonProcess]
) -> None:
    daemon = start_daemon(koordinator={"beCpuset": "erase"})
    client = daemon.client()
    try:
        node = ModeledNode(runtime, daemon, client)
        pod = node.pod("be")
        first = node.run(pod, "first")
        assert set(group_cpus(first)) == {ALL}
        waiting = node.create(pod, "waiting")
        lse = node.run(node.pod("lse", LAST))
        assert set(group_cpus(first)) == {REST}, "the sandbox and the parent cgroups have left the CPU too"
        node.start(waiting)
        assert cpuset_of(waiting).cpus == REST, (
            "the container was created before the owner and started after it"
        )
        client.update(first, cpuset_cpus=str(ALL))
        assert set(group_cpus(first)) == {REST}, "the cpuset in kubelet's update is erased as well"
        node.remove(lse)
        wait_for("the CPU to come back", lambda: set(group_cpus(first)) == {ALL})
        assert cpuset_of(waiting).cpus == ALL
        assert daemon.status()["problems"] == []
    finally:
        client.close()
        runtime.clear()


def test_the_first_be_pod_beside_an_owner_has_the_be_pool(
    runtime: PrivateRuntime, start_daemon: Callable[..., DaemonProcess]
) -> None:
    daemon = start_daemon(koordinator={"beCpuset": "erase"})
    client = daemon.client()
    try:
        node = ModeledNode(runtime, daemon, client)
        lse = node.run(node.pod("lse", LAST))
        first = node.run(node.pod("be"))
        assert set(group_cpus(first)) == {REST}, "its cgroups were created with all CPUs and then narrowed"
        node.remove(lse)
        wait_for("the cgroups to have all CPUs again", lambda: set(group_cpus(first)) == {ALL})
        assert daemon.status()["problems"] == []
    finally:
        client.close()
        runtime.clear()
