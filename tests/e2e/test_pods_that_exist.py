"""Which pods exist, on a real containerd, without a call: sandboxes that are replaced, those that vanish.

The daemon compares once an hour here: what it learns it learns from calls and from events. How long that took
is printed (``pytest -s``).
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from bed import Bed, wait_for
from cri import CREATED, EXITED, cgroup_of, cpuset_of, online
from daemon import CPUSET_ANNOTATION, KINDS, QOS_LABEL, Member, Node
from test_events import back, hears, init_of, known, needs_events

from proxy.model.idset import CpuSet

pytestmark = pytest.mark.e2e

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST
LIMIT_S = 30


def ctr(bed: Bed, *words: str) -> list[str]:
    return ["ctr", "-a", str(bed.socket), "-n", "k8s.io", *words]


WAYS = {
    "ctr task kill": lambda bed, i: ctr(bed, "tasks", "kill", "-s", "SIGKILL", i),
    "ctr task delete": lambda bed, i: ctr(bed, "tasks", "delete", "--force", i),
    "runc kill": lambda bed, i: ["runc", "--root", f"{bed.directory}/runc/k8s.io", "kill", i, "KILL"],
    "runc delete": lambda bed, i: ["runc", "--root", f"{bed.directory}/runc/k8s.io", "delete", "--force", i],
}


def replaced(node: Node, name: str) -> str:
    """Run another sandbox for a pod of class LSE that has one, as kubelet does; starts a container in it."""
    again = node.cri.run_pod(
        name,
        attempt=1,
        labels={QOS_LABEL: "LSE"},
        annotations={CPUSET_ANNOTATION: json.dumps({"cpuset": str(LAST)})},
        cgroup_parent=f"/kubepods/pod-{name}",
    )
    container = node.cri.run(again, "second", **KINDS["lse"].resources)
    node.members[container] = Member(KINDS["lse"], LAST, again, running=True)
    return container


@needs_events
@pytest.mark.parametrize("how", WAYS)
def test_a_container_that_vanishes_behind_our_back(calm_node: Node, bed: Bed, how: str) -> None:
    node = calm_node
    sharer, owner = node.spawn("ls"), node.spawn("lse", LAST)
    assert cpuset_of(sharer).cpus == REST
    hears(node)
    began = time.time()
    bed.run(WAYS[how](bed, owner))  # the runtime deletes a task that has ended, and a tool may come second
    print(f"{how}: back {(back(sharer) - began) * 1000:.0f} ms after the tool was called")
    del node.members[owner]
    node.settle(limit=LIMIT_S)
    assert node.daemon.status()["violations"] == []
    # A runtime is behind its own events, more so when its tools go past it.
    wait_for("the runtime to see it", lambda: node.cri.status(owner).status.state == EXITED, LIMIT_S)
    node.cri.remove(owner)


@needs_events
def test_a_sandbox_replaced_under_the_same_uid(calm_node: Node) -> None:
    """Its pause process dies; kubelet stops what is left and makes a new sandbox for the same pod."""
    node = calm_node
    sharer, pod = node.spawn("ls"), node.pod("lse", LAST, name="again")
    owner = node.run(pod)
    hears(node)
    group = cgroup_of(pod)
    assert group is not None
    os.kill(int((group / "cgroup.procs").read_text().split()[0]), signal.SIGKILL)
    wait_for(
        "the sandbox to end", lambda: node.cri.call("PodSandboxStatus", pod_sandbox_id=pod).status.state == 1
    )
    assert cpuset_of(owner).cpus == LAST, "what runs keeps its CPUs"
    assert cpuset_of(sharer).cpus == REST
    node.cri.stop(owner)
    node.cri.stop_pod(pod)
    del node.members[owner]
    second = replaced(node, "again")
    assert cpuset_of(second).cpus == LAST
    assert cpuset_of(sharer).cpus == REST
    node.cri.remove(owner)
    node.cri.remove_pod(pod)
    node.check()
    status = node.daemon.status()
    assert [entry["pod"] for entry in status["exclusive"]] == ["default/again"]
    assert status["violations"] == []
    node.remove(second)
    node.settle(limit=LIMIT_S)
    assert cpuset_of(sharer).cpus == ALL


def test_two_sandboxes_of_one_uid_at_once(calm_node: Node) -> None:
    """The new one comes before anybody has stopped the old: the pod's CPUs are the pod's."""
    node = calm_node
    sharer = node.spawn("ls")
    old = node.run(node.pod("lse", LAST, name="twice"))
    new = replaced(node, "twice")
    assert cpuset_of(old).cpus == cpuset_of(new).cpus == LAST
    node.remove(old)
    assert cpuset_of(sharer).cpus == REST, "the pod is still there"
    assert cpuset_of(new).cpus == LAST
    node.remove(new)
    node.settle(limit=LIMIT_S)
    assert cpuset_of(sharer).cpus == ALL


@needs_events
def test_a_runtime_that_comes_back_is_asked_again(calm_node: Node, bed: Bed) -> None:
    """While it was away: one owner ended, one is left, and another program wrote a sharer's cpuset."""
    node = calm_node
    sharer = node.spawn("ls")
    owner = node.spawn("lse", LAST)
    created = node.create(node.pod("be"))
    hears(node)
    pid = init_of(owner)
    bed.kill9()
    group = cgroup_of(sharer)
    assert group is not None
    (group / "cpuset.cpus").write_text(str(ALL))
    os.kill(pid, signal.SIGKILL)
    wait_for("its end", lambda: not Path(f"/proc/{pid}/cwd").exists(), LIMIT_S)
    bed.restart()
    began = time.time()
    wait_for("the end to be known", lambda: known(node).get(owner) == "exited", LIMIT_S)
    print(f"the end is known {(time.time() - began) * 1000:.0f} ms after the runtime answered")
    del node.members[owner]
    second = node.run(node.pod("lsr", LAST))
    assert cpuset_of(sharer).cpus == REST
    assert node.cri.status(created).status.state == CREATED
    node.start(created)
    node.check()
    node.remove(second)
    node.settle(limit=LIMIT_S)
