"""CFS quotas of containers and pods on a real containerd and real cgroups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cri import EXITED, UNTIL_PROCEED, Cri, cgroup_of, online
from daemon import DaemonProcess, ModeledNode
from private_runtime import CGROUPS, PrivateRuntime, wait_for

from proxy.model.idset import CpuSet

pytestmark = pytest.mark.e2e

CPU = next((CGROUPS / name for name in ("cpu", "cpu,cpuacct") if (CGROUPS / name).is_dir()), CGROUPS)
V2 = (CGROUPS / "cgroup.controllers").exists()
FILE = "cpu.max" if V2 else "cpu.cfs_quota_us"
POD_QUOTA = 100_000
LIMITED = {"cpu_period": 100_000, "cpu_quota": 100_000, "cpu_shares": 1024}


def quota(path: Path) -> int:
    """Return the CFS quota of a cgroup in microseconds, -1 for none."""
    value = (path / FILE).read_text().split()[0]
    return -1 if value == "max" else int(value)


def write(path: Path, value: int) -> None:
    """Write a CFS quota as kubelet does."""
    (path / FILE).write_text("max" if V2 and value == -1 else str(value))


def group(container: str) -> Path:
    """Return a container's cgroup."""
    found = cgroup_of(container, CPU)
    assert found is not None
    return found


class QuotaNode:
    """A node whose pod cgroups have the quota that kubelet would set."""

    def __init__(self, node: ModeledNode) -> None:
        self.node = node
        self.made: list[Path] = []

    def pod(self, kind: str, name: str, **options: object) -> tuple[str, Path]:
        pod = self.node.pod(kind, name=name, **options)
        (path,) = CPU.glob(f"{self.node.runtime.cgroup.strip('/')}/**/pod-{name}")
        write(path, POD_QUOTA)
        return pod, path


@pytest.fixture
def start_node(
    runtime: PrivateRuntime, start_daemon: Callable[..., DaemonProcess]
) -> Iterator[Callable[..., QuotaNode]]:
    """Make a daemon with settings, and a client of it."""
    clients: list[Cri] = []

    def pods(**config: object) -> QuotaNode:
        daemon = start_daemon(**config)
        clients.append(daemon.client())
        return QuotaNode(ModeledNode(runtime, daemon, clients[-1]))

    yield pods
    for client in clients:
        client.close()
    runtime.clear()


def lsr(pods: QuotaNode, name: str = "db") -> tuple[str, Path]:
    return pods.pod("lsr", name, cpus=CpuSet([max(online())]))


def test_owners_have_no_quota_and_other_containers_keep_theirs(start_node: Callable[..., QuotaNode]) -> None:
    pods = start_node()
    pod, path = lsr(pods)
    other, other_path = pods.pod("burstable", "web")
    owner = pods.node.create(pod)
    assert quota(path) in (POD_QUOTA, -1)
    pods.node.start(owner)
    sharer = pods.node.run(other, cpu_quota=60_000)
    assert (quota(path), quota(group(owner))) == (-1, -1)
    assert (quota(other_path), quota(group(sharer))) == (POD_QUOTA, 60_000)
    page = {c["ref"]: c for c in pods.node.daemon.status()["containers"]}
    assert page["default/db/main"]["cfs_quota"] == "off"
    assert page["default/web/main"]["cfs_quota"] == ""
    assert "its CFS quota is off" in page["default/db/main"]["reason"]
    quotas = pods.node.daemon.status()["quotas"]
    assert [(q["pod"], q["was"]) for q in quotas if not q["container"]] == [("default/db", POD_QUOTA)]

    pods.node.cri.update(owner, cpu_quota=90_000, cpu_period=100_000)
    pods.node.cri.update(sharer, cpu_quota=70_000, cpu_period=100_000)
    assert quota(group(owner)) == -1
    assert quota(group(sharer)) == 70_000

    write(path, 80_000)
    wait_for("the pod's quota to be removed again", lambda: quota(path) == -1)
    pods.node.remove(owner)
    wait_for("the pod's quota to be restored", lambda: quota(path) == 80_000)
    assert pods.node.daemon.status()["quotas"] == []


def test_the_exit_of_an_owner_restores_the_pods_quota(start_node: Callable[..., QuotaNode]) -> None:
    pods = start_node()
    pod, path = lsr(pods)
    owner = pods.node.run(pod, command=["sh", "-c", UNTIL_PROCEED])
    assert quota(path) == -1
    pods.node.cri.proceed(owner)
    wait_for("the container to exit", lambda: pods.node.cri.status(owner).status.state == EXITED, limit=10)
    wait_for("the pod's quota to be restored", lambda: quota(path) == POD_QUOTA)


def test_a_killed_daemon_restores_the_original_quota(start_node: Callable[..., QuotaNode]) -> None:
    pods = start_node()
    daemon = pods.node.daemon
    pod, path = lsr(pods)
    owner = pods.node.run(pod)
    daemon.kill9()
    assert (quota(path), quota(group(owner))) == (-1, -1)
    write(path, 80_000)
    with pods.node.runtime.client() as direct:
        direct.update(owner, cpu_quota=50_000, cpu_period=100_000)
    assert quota(group(owner)) == 50_000
    daemon.start()
    wait_for("both quotas to be removed again", lambda: (quota(path), quota(group(owner))) == (-1, -1))
    # The runtime's saved spec has no quota either: an update of another field does not restore it.
    wait_for("the runtime to be updated", lambda: daemon.status()["counters"].get("settled", 0) > 0)
    with pods.node.runtime.client() as direct:
        direct.update(owner, cpu_shares=512)
    assert quota(group(owner)) == -1
    daemon.kill9()
    with pods.node.runtime.client() as direct:
        direct.stop(owner)
    daemon.start()
    wait_for("the pod's quota to be restored", lambda: quota(path) == 80_000)


def test_quotas_are_kept_if_configured(start_node: Callable[..., QuotaNode]) -> None:
    pods = start_node(koordinator={"keepCFSQuota": "always"})
    pod, path = lsr(pods)
    owner = pods.node.run(pod)
    assert (quota(path), quota(group(owner))) == (POD_QUOTA, 100_000)


def test_a_second_container_restores_quotas_if_configured(start_node: Callable[..., QuotaNode]) -> None:
    pods = start_node(koordinator={"keepCFSQuota": "several-containers"})
    pod, path = lsr(pods)
    first = pods.node.run(pod, cpu_quota=60_000)
    assert (quota(path), quota(group(first))) == (-1, -1)
    second = pods.node.run(pod, "second", cpu_quota=40_000)
    assert quota(group(second)) == 40_000
    wait_for("quotas to be restored", lambda: (quota(path), quota(group(first))) == (POD_QUOTA, 60_000))
    wait_for("the runtime to be updated", lambda: pods.node.daemon.status()["quotas"] == [])
    pods.node.cri.update(first, cpu_shares=512)
    assert quota(group(first)) == 60_000
    pods.node.remove(second)
    wait_for("quotas to be removed again", lambda: (quota(path), quota(group(first))) == (-1, -1))


def test_a_daemon_configured_to_keep_quotas_restores_them(start_node: Callable[..., QuotaNode]) -> None:
    pods = start_node()
    daemon = pods.node.daemon
    pod, path = lsr(pods)
    owner = pods.node.run(pod)
    assert (quota(path), quota(group(owner))) == (-1, -1)
    daemon.stop()
    config = daemon.directory / "config.yaml"
    config.write_text(config.read_text()[:-1] + ', "koordinator": {"keepCFSQuota": "always"}}')
    daemon.start()
    wait_for("quotas to be restored", lambda: (quota(path), quota(group(owner))) == (POD_QUOTA, 100_000))


def test_observe_mode_changes_no_quota(start_node: Callable[..., QuotaNode]) -> None:
    pods = start_node(mode="observe")
    pod, path = lsr(pods)
    owner = pods.node.run(pod)
    pods.node.cri.update(owner, cpu_quota=90_000, cpu_period=100_000)
    pods.node.daemon.wait_for_reconciles()
    assert (quota(path), quota(group(owner))) == (POD_QUOTA, 90_000)


def test_the_runtime_removes_the_quota_for_minus_one_and_keeps_it_for_zero(
    runtime: PrivateRuntime, cri: Cri
) -> None:
    """In a create and in an update, -1 means no quota, and 0 keeps the present one."""
    pod = cri.run_pod("plain", cgroup_parent="/kubepods/pod-plain")
    one = cri.run(pod, "one", cpu_period=100_000, cpu_quota=-1)
    two = cri.run(pod, "two", cpu_period=100_000, cpu_quota=50_000)
    three = cri.run(pod, "three", cpu_period=100_000)
    assert [quota(group(c)) for c in (one, two, three)] == [-1, 50_000, -1]
    for container in (one, two, three):
        cri.update(container, cpu_shares=512)
    assert [quota(group(c)) for c in (one, two, three)] == [-1, 50_000, -1]
    cri.update(two, cpu_quota=-1)
    assert quota(group(two)) == -1
    cri.update(two, cpu_quota=60_000)
    assert quota(group(two)) == 60_000


BUSY = ["sh", "-c", "while :; do :; done & while :; do :; done"]


def throttled(path: Path) -> int:
    """Return the number of periods in which a cgroup was throttled."""
    return int(dict(line.split() for line in (path / "cpu.stat").read_text().splitlines())["nr_throttled"])


def used_s(container: str) -> float:
    """Return the CPU time of a container in seconds."""
    if V2:
        stat = dict(line.split() for line in (group(container) / "cpu.stat").read_text().splitlines())
        return int(stat["usage_usec"]) / 1e6
    path = cgroup_of(container, CGROUPS / "cpuacct")
    assert path is not None
    return int((path / "cpuacct.usage").read_text()) / 1e9


@pytest.mark.parametrize("keep", ["always", "never"])
def test_a_busy_owner_is_throttled_only_if_it_has_a_quota(
    start_node: Callable[..., QuotaNode], keep: str
) -> None:
    """A quota far below its CPUs throttles the owner, even on a busy machine."""
    pods = start_node(koordinator={"keepCFSQuota": keep})
    pod, path = lsr(pods)
    owner = pods.node.run(pod, command=BUSY, cpu_quota=2_000)
    if keep == "always":
        wait_for("the owner to be throttled", lambda: throttled(group(owner)) > 0)
    else:
        # With the quota this would take a minute.
        wait_for("the owner to use CPU time", lambda: used_s(owner) > 1.2, limit=60)
        assert throttled(group(owner)) == throttled(path) == 0
