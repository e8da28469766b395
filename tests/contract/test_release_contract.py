"""Releasing cpusets, and reading where memory is, on the imitated tree and on the kernel's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.backends.cgroup.memory import open_memory
from proxy.engine.node import Node
from proxy.engine.pod_fence import planned_cpus
from proxy.engine.state import NodeState
from proxy.executor.cpuset_writer import CpusetWriter
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BeCpuset
from proxy.model.kubelet import CpuManager
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, Request
from proxy.release.kernel import SweepResult, target_of, widen_cpusets
from proxy.topology.regular_machine import regular_machine

SYSTEM = Path("/sys/fs/cgroup")
MOUNT = SYSTEM / "cpuset"


class Tree:
    """A pod of class BestEffort with a sandbox and a container that has a group of its own inside."""

    def __init__(self, groups: KernelCgroups, base: str, cpus: CpuSet, mems: Mask) -> None:
        self.groups, self.base, self.cpus, self.mems = groups, base, cpus, mems
        self.few = CpuSet([cpus.first()])
        self.tasks: list[subprocess.Popen[bytes]] = []
        self.pod = f"{base}/besteffort/podx"
        for path in (base, f"{base}/besteffort", self.pod, f"{self.pod}/box", f"{self.pod}/c"):
            self.mkdir(path)
        self.put(f"{self.pod}/c", cpus)

    def mkdir(self, path: str) -> None:
        made = self.groups.root / path
        if isinstance(self.groups, FakeCgroups):
            self.groups.mkdir(path)
        elif not made.is_dir():
            made.mkdir()
        self.put(path, self.cpus)

    def put(self, path: str, cpus: CpuSet) -> None:
        for file, text in (("cpuset.mems", str(self.mems)), ("cpuset.cpus", str(cpus))):
            if isinstance(self.groups, FakeCgroups):
                self.groups.files.write(path, file, text)
            else:
                (self.groups.root / path / file).write_text(text)

    def cpus_of(self, path: str) -> CpuSet:
        return self.groups.read(path).cpus

    def clean(self) -> None:
        for task in self.tasks:
            task.kill()
            task.wait()
        top = self.groups.root / self.base
        for path in sorted((p for p in (top, *top.rglob("*")) if p.is_dir()), reverse=True):
            if not isinstance(self.groups, FakeCgroups):
                path.rmdir()

    def state(self, *, erase: bool, request: Request, were_narrow: bool = False) -> NodeState:
        machine = regular_machine(1, 1, len(self.cpus), 1)
        cpuset = BeCpuset.ERASE if erase else BeCpuset.NARROW
        node = Node(machine, CpuTopology.of(machine), be_cpuset=cpuset)
        pod = Pod("box", "x", "ns", "p", kube_qos=KubeQos.BEST_EFFORT, cgroup_parent=f"/{self.pod}")
        placement = Placement(Pool.BE, CpuSet(), machine.memory_nodes)
        container = Container("c", "main", pod, request, placement, Phase.RUNNING)
        return NodeState.of(node, [pod], [container]).with_facts(be_groups=were_narrow)

    def release(
        self, *, erase: bool = False, request: Request | None = None, were_narrow: bool = False
    ) -> SweepResult:
        state = self.state(erase=erase, request=request or Request(), were_narrow=were_narrow)
        cpuset_writer = CpusetWriter(self.groups, lambda: state)
        there = state.containers.values()
        targets = [(c, target_of(c, state.node.machine, CpuManager())) for c in there]
        pods, planned = list(state.pods.values()), planned_cpus(state)
        return widen_cpusets(cpuset_writer, state, targets, pods, planned)


@pytest.fixture(params=["directory-v1", "directory-v2", "kernel-v1"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tree]:
    if request.param == "kernel-v1":
        if os.geteuid() != 0 or not (MOUNT / "cpuset.cpus").is_file():
            pytest.skip("needs root and a cgroup v1 cpuset mount")
        groups = KernelCgroups(MOUNT, 1)
        have = groups.read("")
        if have.cpus != CpuSet(range(len(have.cpus))) or len(have.cpus) < 2:
            pytest.skip("needs two CPUs, and all of them")
        try:
            made = Tree(groups, f"topoproxy-leave-{os.getpid()}", have.cpus, have.mems)
        except OSError as error:
            pytest.skip(f"cannot make a cpuset group here: {error}")
    else:
        cpus = CpuSet.parse("0-3")
        directory = FakeCgroups(tmp_path / "tree", cpus, Mask((0,)), int(request.param[-1]))
        made = Tree(directory, "own", cpus, Mask((0,)))
    yield made
    made.clean()


@pytest.mark.parametrize("now", [{"erase": True}, {"were_narrow": True}], ids=["erase", "changed to narrow"])
def test_groups_grow_from_the_top(tree: Tree, now: dict[str, bool]) -> None:
    for path in (f"{tree.pod}/c", f"{tree.pod}/box", tree.pod, f"{tree.base}/besteffort"):
        tree.put(path, tree.few)
    given = tree.release(**now)
    assert given.errors == {}
    for path in (f"{tree.base}/besteffort", tree.pod, f"{tree.pod}/box", f"{tree.pod}/c"):
        assert tree.cpus_of(path) == tree.cpus, path
    assert given.due["c"].cpus == tree.cpus
    again = tree.release(**now)
    assert (again.written, again.errors) == ([], {})


def test_a_sandbox_and_groups_inside_a_container_grow_with_it(tree: Tree) -> None:
    tree.mkdir(f"{tree.pod}/c/inner")
    state = tree.state(erase=False, request=Request())
    CpusetWriter(tree.groups, lambda: state).cgroups.write(f"{tree.pod}/c", tree.few, None)
    tree.put(f"{tree.pod}/box", tree.few)
    if tree.groups.version == 1:
        assert tree.cpus_of(f"{tree.pod}/c/inner") == tree.few
    given = tree.release()
    assert given.errors == {}
    for path in (f"{tree.pod}/box", f"{tree.pod}/c", f"{tree.pod}/c/inner"):
        assert tree.groups.read(path).effective_cpus == tree.cpus, path


def test_a_requested_set_is_added_to_the_present_cpus(tree: Tree) -> None:
    last = CpuSet([max(tree.cpus)])
    tree.put(f"{tree.pod}/c", tree.few)
    given = tree.release(request=Request(cpuset_cpus=str(last)))
    assert tree.cpus_of(f"{tree.pod}/c") == tree.few | last
    assert (given.due["c"].cpus, given.due["c"].exact) == (last, False)


def test_a_parent_that_another_program_narrowed_is_followed(tree: Tree) -> None:
    tree.put(f"{tree.pod}/box", tree.few)
    tree.put(f"{tree.pod}/c", tree.few)
    tree.put(tree.pod, tree.few)
    given = tree.release()
    assert given.written == []
    assert given.due["c"].cpus == tree.cpus_of(tree.pod) == tree.few


def test_the_kernel_reports_where_memory_is() -> None:
    memory = open_memory(SYSTEM)
    if memory is None or os.geteuid() != 0:
        pytest.skip("needs root and a memory controller")
    group = memory.root / f"topoproxy-leave-{os.getpid()}"
    inner = group / "podx" / "c"
    try:
        inner.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"cannot make a memory group here: {error}")
    hold = "x = bytearray(32 << 20); print('ready', flush=True); import sys; sys.stdin.read()"
    enter: Callable[[], object] = lambda: (inner / "cgroup.procs").write_text(str(os.getpid()))  # noqa: E731
    task = subprocess.Popen(
        [sys.executable, "-S", "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=enter
    )
    try:
        assert task.stdout is not None
        assert task.stdout.readline() == b"ready\n"
        use = memory.memory_use(f"/{group.name}/podx", "c")
        assert use is not None
        # The kernel counts in batches of some dozens of pages for each CPU.
        assert 24 << 20 < sum(use.anon.values()) < 64 << 20
        nodes = Mask(use.anon)
        assert use.outside(nodes | Mask(use.file) | Mask(use.huge)) == (0, 0)
        assert use.outside(Mask([max(nodes) + 1]))[0] == sum(use.anon.values()) + sum(use.huge.values())
    finally:
        task.kill()
        task.communicate()
        for path in (inner, inner.parent, group):
            path.rmdir()
