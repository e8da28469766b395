"""Sibling, parent and child cgroups of a container's cgroup, on a real runtime with real cgroups."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cri import cgroup_of, cpuset_of, cpuset_root, is_v2, online
from daemon import DaemonProcess, ModeledNode
from private_runtime import PrivateRuntime, wait_for

from proxy.model.idset import CpuSet

pytestmark = pytest.mark.e2e

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST


def effective(group: Path) -> CpuSet:
    name = "cpuset.cpus.effective" if is_v2() else "cpuset.effective_cpus"
    return CpuSet.parse((group / name).read_text())


def runs_on(pid: int) -> CpuSet:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return CpuSet.parse(line.partition(":")[2])
    raise AssertionError("no such line")


def pids(group: Path) -> list[int]:
    return [int(word) for word in (group / "cgroup.procs").read_text().split()]


def make_cgroup(group: Path) -> Path:
    """Create a cgroup as a nested runtime does: with the cpuset of its parent."""
    group.mkdir()
    if not is_v2():
        for file in ("cpuset.cpus", "cpuset.mems"):
            (group / file).write_text((group.parent / file).read_text())
    return group


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    """The cgroups that a test has created; they are removed after it."""
    made: list[Path] = []
    yield made
    for group in reversed(made):
        if group.is_dir():
            group.rmdir()


def sandbox_of(node: ModeledNode, pod: str) -> Path:
    found = cgroup_of(pod)
    assert found is not None
    return found


def test_sandboxes_leave_cpus_before_their_owner_starts(calm_node: ModeledNode) -> None:
    """There are no periodic reconciles here: only the owner's create can move the sandboxes."""
    node = calm_node
    shared = node.pod("ls")
    node.run(shared)
    idle = node.pod("be")  # a sandbox without a container
    lse = node.pod("lse", LAST)
    main = node.create(lse)
    for pod in (shared, idle, lse):
        group = sandbox_of(node, pod)
        assert effective(group) == REST, "an owner's sandbox has the shared CPUs, too"
        has_process = node.runtime.name != "crio"  # CRI-O keeps the cgroup without a process
        assert {str(runs_on(pid)) for pid in pids(group)} == ({str(REST)} if has_process else set())
    node.start(main)
    late = node.pod("ls", name="late")
    wait_for("the new sandbox to leave", lambda: effective(sandbox_of(node, late)) == REST)
    node.check()
    assert node.daemon.status()["problems"] == []


def test_sandboxes_get_released_cpus_back(node: ModeledNode) -> None:
    pod = node.pod("ls")
    node.run(pod)
    lse = node.spawn("lse", LAST)
    assert effective(sandbox_of(node, pod)) == REST
    node.remove(lse)
    wait_for("the CPU to be released", lambda: effective(sandbox_of(node, pod)) == ALL)
    assert node.daemon.status()["counters"]["sandboxes_written"] >= 2


def test_child_cgroups_of_a_container_have_its_cpus(node: ModeledNode, groups: list[Path]) -> None:
    """A runtime in the container has created cgroups at two levels, and its process runs there."""
    container = node.spawn("ls")
    own = cgroup_of(container)
    assert own is not None
    if is_v2():
        pytest.skip("on v2 only leaf cgroups have processes, and child cgroups inherit")
    inner = make_cgroup(own / "inner")
    deep = make_cgroup(inner / "deep")
    groups += [inner, deep]
    (pid,) = pids(own)
    (deep / "cgroup.procs").write_text(str(pid))
    lse = node.spawn("lse", LAST)
    assert [effective(g) for g in (own, inner, deep)] == [REST] * 3
    assert runs_on(pid) == REST
    node.remove(lse)
    wait_for("the CPU to be released", lambda: runs_on(pid) == ALL)
    assert [effective(g) for g in (own, inner, deep)] == [ALL] * 3
    (own / "cgroup.procs").write_text(str(pid))
    assert node.daemon.status()["problems"] == []


def narrow(pod_group: Path) -> bool:
    """Narrow a pod's cgroup, as another program would; False if the daemon widened a child meanwhile."""
    try:
        for group in (*filter(Path.is_dir, pod_group.iterdir()), pod_group):
            (group / "cpuset.cpus").write_text(str(REST))
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def test_a_pods_group_that_another_program_narrowed_is_widened(node: ModeledNode) -> None:
    pod = node.pod("ls")
    container = node.run(pod)
    own = cgroup_of(container)
    assert own is not None
    wait_for("the pod's group to be narrowed", lambda: narrow(own.parent))
    wait_for("the container to have its pool", lambda: cpuset_of(container).effective == ALL)
    assert effective(own.parent) == ALL


def test_a_container_in_an_unusual_group_is_found_by_its_process(
    runtime: PrivateRuntime, start_daemon: Callable[..., DaemonProcess], groups: list[Path]
) -> None:
    if is_v2():
        pytest.skip("the test moves a process out of its cgroup, on v1 only")
    daemon = start_daemon()
    with daemon.client() as client:
        node = ModeledNode(runtime, daemon, client)
        container = node.spawn("ls")
        own = cgroup_of(container)
        assert own is not None
        odd = make_cgroup(cpuset_root() / runtime.cgroup.lstrip("/") / "odd")
        moved = make_cgroup(odd / container)
        groups += [odd, moved]
        (pid,) = pids(own)
        (moved / "cgroup.procs").write_text(str(pid))
        os.rmdir(own)
        wait_for("the cgroup to be found", lambda: daemon.status()["counters"].get("cgroups_located") == 1)
        node.spawn("lse", LAST)
        assert effective(moved) == REST
        assert runs_on(pid) == REST
        daemon.restart()
        assert daemon.status()["problems"] == []
        assert "cgroups_located" not in daemon.status()["counters"], "the ledger has the cgroup"
        assert runs_on(pid) == REST
        make_cgroup(own)  # the runtime expects this cgroup
        (own / "cgroup.procs").write_text(str(pid))
    runtime.clear()


def test_the_status_shows_version_and_driver(node: ModeledNode) -> None:
    node.pod("ls")
    reported = node.daemon.status()["cgroups"]
    assert (reported["version"], reported["driver"]) == (2 if is_v2() else 1, "cgroupfs")
    name, version = node.daemon.status()["runtime"]["version"].split()
    reports_driver = name != "containerd" or version.lstrip("v").split(".")[0] >= "2"
    assert reported["driver_from"] == ("the runtime" if reports_driver else "the pods' cgroup parents")
