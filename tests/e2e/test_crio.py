"""Differences of CRI-O: a create makes cgroups, containers have monitors, and lists are incomplete."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import grpc
import pytest
from cri import cgroup_of, code, cpuset_of, cpuset_root, is_v2, online
from crio import DIRECTORY
from daemon import KINDS, ModeledNode
from private_runtime import PrivateRuntime, wait_for

from proxy.model.idset import CpuSet

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not DIRECTORY, reason="on CRI-O only: make test-crio")]

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST
LIMIT_S = 60


def effective(group: Path) -> CpuSet:
    name = "cpuset.cpus.effective" if is_v2() else "cpuset.effective_cpus"
    return CpuSet.parse((group / name).read_text())


def monitor_of(container: str) -> Path:
    own = cgroup_of(container)
    assert own is not None
    return own.with_name(f"crio-conmon-{container}")


def waiting(runtime: PrivateRuntime) -> set[str]:
    """Return the ids of the runtime's containers that wait for their start, even if they are not listed."""
    found = set()
    for group in (cpuset_root() / runtime.cgroup.lstrip("/")).glob("**/crio-*"):
        for pid in (group / "cgroup.procs").read_text().split():
            if b"runc" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(group.name.removeprefix("crio-"))
    return found


def test_a_created_container_leaves_the_cpus_of_an_owner_before_its_start(calm_node: ModeledNode) -> None:
    """The container's cgroup exists, with a waiting runc process; it starts with the current shared CPUs."""
    node = calm_node
    early = node.create(node.pod("ls"))
    assert cpuset_of(early).cpus == ALL
    lse = node.spawn("lse", LAST)
    node.start(early)
    assert cpuset_of(early).cpus == REST
    node.remove(lse)
    node.wait_until_settled(LIMIT_S)


def test_monitors_leave_owned_cpus(calm_node: ModeledNode) -> None:
    node = calm_node
    shared = node.spawn("ls")
    lse = node.spawn("lse", LAST)
    assert effective(monitor_of(shared)) == REST
    wait_for("the owner's monitor to leave", lambda: effective(monitor_of(lse)) == REST, LIMIT_S)
    late = node.spawn("be")
    wait_for(
        "the monitor of the new container to leave", lambda: effective(monitor_of(late)) == REST, LIMIT_S
    )
    pids = (monitor_of(late) / "cgroup.procs").read_text().split()
    assert pids, "the monitor's cgroup has no process"
    assert node.daemon.status()["problems"] == []


def test_a_sandbox_with_a_process_leaves_owned_cpus_too(calm_node: ModeledNode) -> None:
    """A sandbox has a process if the pod shares its pid namespace."""
    node = calm_node
    config = node.cri.pod_config("sharing", cgroup_parent="/kubepods/burstable/pod-sharing")
    config.linux.MergeFromString(b"\x12\x04\x0a\x02\x10\x00")  # NamespaceOption.pid = POD
    pod = node.cri.call("RunPodSandbox", config=config).pod_sandbox_id
    group = cgroup_of(pod)
    assert group is not None
    assert (group / "cgroup.procs").read_text().split(), "the sandbox's cgroup has no process"
    node.spawn("lse", LAST)
    assert effective(group) == REST
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)  # otherwise CRI-O waits for it


def test_a_container_of_a_timed_out_create_starts_with_the_current_cpus(
    runtime: PrivateRuntime, calm_node: ModeledNode, tmp_path: Path
) -> None:
    """A create times out at the client, another pod gets CPUs, and the client retries the create."""
    node = calm_node
    pod = node.pod("ls")
    script = "grep Cpus_allowed_list /proc/self/status >/seen/first; exec sleep 3600"
    request = node.cri.create_request(
        pod, command=["sh", "-c", script], mounts={"/seen": str(tmp_path)}, **KINDS["ls"].resources
    )
    call = node.cri.method("CreateContainer")
    with runtime.frozen():
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=0.5)
        assert code(caught.value) is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for("CRI-O to create the container", lambda: waiting(runtime), LIMIT_S)
    time.sleep(1)
    hidden = waiting(runtime)
    assert node.cri.list() == [], "CRI-O does not list the container"
    node.spawn("lse", LAST)
    made = call(request, timeout=LIMIT_S).container_id
    assert made in hidden, "CRI-O has created another container"
    assert cpuset_of(made).cpus == ALL
    node.cri.start(made)
    first = tmp_path / "first"
    wait_for("the output of the program", lambda: first.is_file() and first.read_text(), LIMIT_S)
    assert CpuSet.parse(first.read_text().split(":")[1]) == REST


def test_an_exit_is_found_by_a_reconcile(node: ModeledNode) -> None:
    sharer, owner = node.spawn("ls"), node.spawn("lse", LAST)
    assert node.daemon.status()["runtime"]["events"] == "not offered"
    group = cgroup_of(owner)
    assert group is not None
    os.kill(int((group / "cgroup.procs").read_text().split()[0]), signal.SIGKILL)
    wait_for("the CPUs to be back", lambda: cpuset_of(sharer).cpus == ALL, LIMIT_S)
    del node.containers[owner]
    node.wait_until_settled(LIMIT_S)
