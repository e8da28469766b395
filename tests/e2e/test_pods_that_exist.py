"""Sandboxes that are replaced and containers that vanish without a call, on a real containerd.

The daemon reconciles once an hour here, so it learns of changes only from calls and from events. The tests
print how long it took (``pytest -s``).
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from cri import CREATED, EXITED, cgroup_of, cpuset_of, online
from daemon import CPUSET_ANNOTATION, KINDS, QOS_LABEL, ModelContainer, ModeledNode
from private_runtime import PrivateRuntime, wait_for
from test_events import init_of, needs_events, phases, wait_for_all_cpus, wait_until_subscribed

from proxy.model.idset import CpuSet

pytestmark = pytest.mark.e2e

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST
LIMIT_S = 30


def ctr(runtime: PrivateRuntime, *args: str) -> list[str]:
    return ["ctr", "-a", str(runtime.socket), "-n", "k8s.io", *args]


COMMANDS = {
    "ctr task kill": lambda runtime, i: ctr(runtime, "tasks", "kill", "-s", "SIGKILL", i),
    "ctr task delete": lambda runtime, i: ctr(runtime, "tasks", "delete", "--force", i),
    "runc kill": lambda runtime, i: ["runc", "--root", f"{runtime.directory}/runc/k8s.io", "kill", i, "KILL"],
    "runc delete": lambda runtime, i: [
        "runc",
        "--root",
        f"{runtime.directory}/runc/k8s.io",
        "delete",
        "--force",
        i,
    ],
}


def run_second_sandbox(node: ModeledNode, name: str) -> str:
    """Run a second sandbox for a pod of class LSE, as kubelet does; returns a container in it."""
    again = node.cri.run_pod(
        name,
        attempt=1,
        labels={QOS_LABEL: "LSE"},
        annotations={CPUSET_ANNOTATION: json.dumps({"cpuset": str(LAST)})},
        cgroup_parent=f"/kubepods/pod-{name}",
    )
    container = node.cri.run(again, "second", **KINDS["lse"].resources)
    node.containers[container] = ModelContainer(KINDS["lse"], LAST, again, running=True)
    return container


@needs_events
@pytest.mark.parametrize("how", COMMANDS)
def test_a_container_that_a_tool_kills_or_deletes_releases_its_cpus(
    calm_node: ModeledNode, runtime: PrivateRuntime, how: str
) -> None:
    node = calm_node
    sharer, owner = node.spawn("ls"), node.spawn("lse", LAST)
    assert cpuset_of(sharer).cpus == REST
    wait_until_subscribed(node)
    began = time.time()
    runtime.run(
        COMMANDS[how](runtime, owner)
    )  # the tool may fail because the runtime has already deleted the ended task
    print(
        f"{how}: CPUs released {(wait_for_all_cpus(sharer) - began) * 1000:.0f} ms after the tool was called"
    )
    del node.containers[owner]
    node.wait_until_settled(limit=LIMIT_S)
    assert node.daemon.status()["violations"] == []
    # The runtime updates its state after its events, even later if a tool bypasses it.
    wait_for("the runtime to report the exit", lambda: node.cri.status(owner).status.state == EXITED, LIMIT_S)
    node.cri.remove(owner)


@needs_events
def test_a_replaced_sandbox_of_the_same_pod_keeps_its_cpus(calm_node: ModeledNode) -> None:
    """The pause process is killed; kubelet stops the container and runs a new sandbox for the same pod."""
    node = calm_node
    sharer, pod = node.spawn("ls"), node.pod("lse", LAST, name="again")
    owner = node.run(pod)
    wait_until_subscribed(node)
    group = cgroup_of(pod)
    assert group is not None
    os.kill(int((group / "cgroup.procs").read_text().split()[0]), signal.SIGKILL)
    wait_for(
        "the sandbox to end", lambda: node.cri.call("PodSandboxStatus", pod_sandbox_id=pod).status.state == 1
    )
    assert cpuset_of(owner).cpus == LAST, "a running container keeps its CPUs"
    assert cpuset_of(sharer).cpus == REST
    node.cri.stop(owner)
    node.cri.stop_pod(pod)
    del node.containers[owner]
    second = run_second_sandbox(node, "again")
    assert cpuset_of(second).cpus == LAST
    assert cpuset_of(sharer).cpus == REST
    node.cri.remove(owner)
    node.cri.remove_pod(pod)
    node.check()
    status = node.daemon.status()
    assert [entry["pod"] for entry in status["exclusive"]] == ["default/again"]
    assert status["violations"] == []
    node.remove(second)
    node.wait_until_settled(limit=LIMIT_S)
    assert cpuset_of(sharer).cpus == ALL


def test_two_sandboxes_of_one_pod_share_its_cpus(calm_node: ModeledNode) -> None:
    """The second sandbox runs before kubelet stops the first one: both have the CPUs of the pod."""
    node = calm_node
    sharer = node.spawn("ls")
    old = node.run(node.pod("lse", LAST, name="twice"))
    new = run_second_sandbox(node, "twice")
    assert cpuset_of(old).cpus == cpuset_of(new).cpus == LAST
    node.remove(old)
    assert cpuset_of(sharer).cpus == REST, "the pod still has a container"
    assert cpuset_of(new).cpus == LAST
    node.remove(new)
    node.wait_until_settled(limit=LIMIT_S)
    assert cpuset_of(sharer).cpus == ALL


@needs_events
def test_the_daemon_reconciles_with_a_restarted_runtime(
    calm_node: ModeledNode, runtime: PrivateRuntime
) -> None:
    """While the runtime is down, an owner ends and another program writes the cpuset of a sharer."""
    node = calm_node
    sharer = node.spawn("ls")
    owner = node.spawn("lse", LAST)
    created = node.create(node.pod("be"))
    wait_until_subscribed(node)
    pid = init_of(owner)
    runtime.kill9()
    group = cgroup_of(sharer)
    assert group is not None
    (group / "cpuset.cpus").write_text(str(ALL))
    os.kill(pid, signal.SIGKILL)
    wait_for("the process to end", lambda: not Path(f"/proc/{pid}/cwd").exists(), LIMIT_S)
    runtime.restart()
    began = time.time()
    wait_for("the exit to be known", lambda: phases(node).get(owner) == "exited", LIMIT_S)
    print(f"the exit is known {(time.time() - began) * 1000:.0f} ms after the runtime answered")
    del node.containers[owner]
    second = node.run(node.pod("lsr", LAST))
    assert cpuset_of(sharer).cpus == REST
    assert node.cri.status(created).status.state == CREATED
    node.start(created)
    node.check()
    node.remove(second)
    node.wait_until_settled(limit=LIMIT_S)
