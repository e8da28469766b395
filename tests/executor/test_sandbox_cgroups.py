"""Sandboxes and owned CPUs, in directories that follow the kernel's rules."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.backends.runtime.quirks import QUIRKS
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.executor.sandbox_cgroups import SandboxCgroups
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BeCpuset
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, QosClass, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(1, 1, 8, 1)
NODE = Node(MACHINE, CpuTopology.of(MACHINE))


def pod(name: str, qos: QosClass = QosClass.LS, kube: KubeQos = KubeQos.BURSTABLE) -> Pod:
    return Pod(f"s-{name}", name, "ns", name, 0, qos, kube, f"/kubepods/pod{name}")


LS, BE = pod("ls"), pod("be", QosClass.BE, KubeQos.BEST_EFFORT)
LSR = pod("lsr", QosClass.LSR, KubeQos.GUARANTEED)


def owner(cpus: str, *, hard: bool = False) -> Container:
    placement = Placement(Pool.OWN, CpuSet.parse(cpus), Mask((0,)), excludes_be=hard)
    return Container("own", "own", LSR, Request(), placement, Phase.RUNNING, 0, "own")


def state(*containers: Container, node: Node = NODE) -> NodeState:
    return NodeState.of(node, [LS, BE, LSR], containers)


class Tree(FakeCgroups):
    """Counts reads and writes."""

    reads = writes = 0
    refuse = 0
    without = ""

    def read(self, path: str):  # type: ignore[no-untyped-def]
        self.reads += 1
        if path == self.without:
            raise CgroupError(f"cannot read CPUs of {path}", errno.EOPNOTSUPP)
        return super().read(path)

    def write(self, path: str, cpus: CpuSet | None, mems: Mask | None, *, adjust_below: bool = True) -> bool:
        self.writes += 1
        if self.refuse:
            raise CgroupError(f"cannot write {path}", self.refuse)
        return super().write(path, cpus, mems, adjust_below=adjust_below)


@pytest.fixture(params=[1, 2])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    made = Tree(tmp_path, MACHINE.online, Mask((0,)), request.param)
    groups = [f"kubepods/pod{p.uid}" for p in (LS, BE, LSR)]
    for path in ("kubepods", *groups, *(f"{g}/s-{g[12:]}" for g in groups)):
        made.mkdir(path)
        if made.version == 1:
            made.write(path, MACHINE.online, Mask((0,)))
    made.writes = 0
    return made


def on(tree: Tree, of: Pod) -> str:
    return str(FakeCgroups.read(tree, f"kubepods/pod{of.uid}/{of.sandbox_id}").effective_cpus)


def test_sandboxes_leave_owned_cpus_and_return_with_a_reconcile(tree: Tree) -> None:
    ours = SandboxCgroups(tree, QUIRKS)
    assert ours.move_off_owned_cpus(state()) == []
    assert (tree.reads, tree.writes) == (0, 0), "there is no owner"
    assert ours.move_off_owned_cpus(state(owner("0-1"))) == []
    assert [on(tree, p) for p in (LS, BE, LSR)] == ["2-7", "0-7", "2-7"], "an owner's sandbox shares CPUs too"
    assert ours.move_off_owned_cpus(state(owner("0-3", hard=True))) == []
    assert [on(tree, p) for p in (LS, BE, LSR)] == ["4-7", "4-7", "4-7"]
    for look in (ours.move_off_owned_cpus, ours.write_all):
        assert look(state(owner("7"))) == []
        assert [on(tree, p) for p in (LS, BE)] == ["4-6", "4-7"], "no sandbox grows while an owner exists"
    assert ours.move_off_owned_cpus(state(owner("4-7"))) == []
    assert [on(tree, p) for p in (LS, BE)] == ["0-3", "4-7"], (
        "a sandbox without remaining CPUs gets the whole pool"
    )
    assert ours.move_off_owned_cpus(state()) == []
    assert on(tree, LS) == "0-3", "no sandbox grows during a call"
    assert ours.write_all(state()) == []
    assert [on(tree, p) for p in (LS, BE, LSR)] == ["0-7"] * 3
    assert ours.written == 2 + 3 + 2 + 2 + 3


def test_a_sandbox_that_leaves_moves_to_cpus_reserved_from_owners(tree: Tree) -> None:
    node = changed_copy(NODE, reserved=CpuSet.parse("0,4"))
    ours = SandboxCgroups(tree, QUIRKS)
    for owned in ("5", "6-7", "1-3"):
        assert ours.move_off_owned_cpus(state(owner(owned, hard=True), node=node)) == []
        assert [on(tree, p) for p in (LS, BE, LSR)] == ["0,4"] * 3
    assert ours.written == 3, "moved once"
    assert ours.move_off_owned_cpus(state(owner("0"), node=node)) == []
    assert on(tree, LS) == "4"
    assert ours.move_off_owned_cpus(state(owner("0,4"), node=node)) == []
    assert on(tree, LS) == "1-3,5-7"
    assert ours.write_all(state(node=node)) == []
    assert [on(tree, p) for p in (LS, BE, LSR)] == ["0-7"] * 3


def test_a_sandbox_off_the_owned_cpus_causes_no_write(tree: Tree) -> None:
    ours = SandboxCgroups(tree, QUIRKS)
    ours.move_off_owned_cpus(state(owner("0-3", hard=True)))
    tree.reads = tree.writes = 0
    ours.move_off_owned_cpus(state(owner("0-2", hard=True)))
    ours.move_off_owned_cpus(state(owner("3", hard=True)))
    assert (tree.reads, tree.writes) == (0, 0)
    ours.write_all(state())
    tree.reads = tree.writes = 0
    ours.write_all(state())
    assert (tree.reads, tree.writes) == (0, 0), "it has its whole pool, and there is no owner"


def test_a_foreign_set_is_found_by_a_reconcile(tree: Tree) -> None:
    ours = SandboxCgroups(tree, QUIRKS)
    ours.write_all(state(owner("0")))
    FakeCgroups.write(tree, "kubepods/podls/s-ls", CpuSet.parse("0-1"), None)
    assert ours.write_all(state(owner("0"))) == []
    assert on(tree, LS) == "1"


def test_groups_of_other_programs_are_not_widened(tree: Tree) -> None:
    """Another program has narrowed a pod's group."""
    few = CpuSet.parse("0-3")
    FakeCgroups.write(tree, "kubepods/podls/s-ls", few, None)
    FakeCgroups.write(tree, "kubepods/podls", few, None)
    ours = SandboxCgroups(tree, QUIRKS)
    for there, left in (([owner("0")], "1-3"), ([owner("5")], "1-3"), ([], "0-3")):
        assert ours.write_all(state(*there)) == []
        assert on(tree, LS) == left
        assert tree.read("kubepods/podls").cpus == few
    assert ours.write_all(state(owner("0-3"))) == []
    assert on(tree, LS) == "4-7", "an owner's CPUs are left in any case"


def test_a_sandbox_without_a_group_is_searched_periodically(tree: Tree) -> None:
    found: list[str] = []
    find = tree.find
    tree.find = lambda parent, key: found.append(key) or find(parent, key)  # type: ignore[method-assign]
    tree.rmdir("kubepods/podls/s-ls")
    ours = SandboxCgroups(tree, QUIRKS)
    for _ in range(70):
        assert ours.write_all(state(owner("0"))) == []
        ours.move_off_owned_cpus(state(owner("0")))
    # Twice; and in the passes 32 and 64, but never during a create.
    assert found.count("s-ls") == 2 + 2
    assert found.count("s-lsr") == 1
    ours.write_all(NodeState.of(NODE, [], ()))
    assert not ours._missed
    assert not ours._observed


def test_a_failed_write_is_reported_and_a_missing_group_is_not(tree: Tree) -> None:
    ours = SandboxCgroups(tree, QUIRKS)
    tree.refuse = 16
    errors = ours.move_off_owned_cpus(state(owner("0")))
    assert sorted(errors)[0] == "cannot move the sandbox of ns/ls: cannot write kubepods/podls/s-ls"
    assert len(errors) == 2
    tree.refuse = 2
    assert ours.move_off_owned_cpus(state(owner("0"))) == []
    tree.refuse = 0
    assert ours.move_off_owned_cpus(state(owner("0"))) == []
    assert on(tree, LS) == "1-7"


def sharer(name: str, phase: Phase = Phase.RUNNING) -> Container:
    placement = Placement(Pool.SHARED, CpuSet(), Mask())
    return Container(name, name, LS, Request(), placement, phase, 0, name)


def crio(tree: Tree, of: Pod, *containers: str) -> None:
    """Make the groups that CRI-O makes for a pod."""
    home = f"kubepods/pod{of.uid}"
    tree.rmdir(f"{home}/{of.sandbox_id}")
    for name in (of.sandbox_id, *containers, *(f"conmon-{c}" for c in containers)):
        tree.mkdir(f"{home}/crio-{name}")
        if tree.version == 1:
            tree.write(f"{home}/crio-{name}", MACHINE.online, Mask((0,)))


def cpus(tree: Tree, path: str) -> str:
    return str(FakeCgroups.read(tree, path).effective_cpus)


def test_monitors_of_crio_move_with_the_sandbox(tree: Tree) -> None:
    crio(tree, LS, "a", "b")
    crio(tree, LSR, "own")
    ours = SandboxCgroups(tree, QUIRKS)
    a, b = sharer("a"), sharer("b", Phase.CREATING)
    assert ours.move_off_owned_cpus(state(owner("0-1"), a, b)) == []
    assert LS.sandbox_id in ours.monitored
    assert BE.sandbox_id not in ours.monitored, "its sandbox has the layout of containerd"
    monitor = "kubepods/podls/crio-conmon-{}".format
    assert [cpus(tree, monitor(c)) for c in "ab"] == ["2-7", "0-7"]
    assert cpus(tree, "kubepods/podlsr/crio-conmon-own") == "2-7", "an owner's monitor shares CPUs too"
    assert cpus(tree, "kubepods/podls/crio-a") == "0-7", "containers are written by another part"
    assert ours.move_off_owned_cpus(state(owner("0-1"), a, sharer("b", Phase.CREATED))) == []
    assert cpus(tree, monitor("b")) == "2-7"
    assert ours.write_all(state(a)) == []
    assert cpus(tree, monitor("a")) == "0-7"
    assert set(ours._observed) == {"s-ls", "s-be", "s-lsr", "conmon-a"}


@pytest.mark.parametrize(("name", "reported"), [("crio-s-ls", 0), ("crio-s-ls.scope", 1), ("s-ls", 1)])
def test_a_crio_sandbox_without_controllers_is_not_reported(tree: Tree, name: str, reported: int) -> None:
    tree.rmdir("kubepods/podls/s-ls")
    tree.mkdir(f"kubepods/podls/{name}")
    if tree.version == 1:
        tree.write(f"kubepods/podls/{name}", MACHINE.online, Mask((0,)))
    ours = SandboxCgroups(tree, QUIRKS)
    tree.without = f"kubepods/podls/{name}"
    assert len(ours.move_off_owned_cpus(state(owner("0")))) == reported
    tree.without = ""
    assert ours.move_off_owned_cpus(state(owner("0"))) == []
    assert cpus(tree, f"kubepods/podls/{name}") == "1-7", "a container of the pod restores them"


def test_all_groups_of_sandboxes_and_monitors_are_found(tree: Tree) -> None:
    crio(tree, LS, "a")
    found = set(SandboxCgroups(tree, QUIRKS).groups(state(owner("0"), sharer("a"), sharer("gone"))))
    groups = {"podls/crio-s-ls", "podls/crio-conmon-a", "podbe/s-be", "podlsr/s-lsr"}
    assert found == {f"kubepods/{group}" for group in groups}


def test_monitors_are_not_searched_if_there_are_none(tree: Tree) -> None:
    found: list[str] = []
    find = tree.find
    tree.find = lambda parent, key: found.append(key) or find(parent, key)  # type: ignore[method-assign]
    ours = SandboxCgroups(tree, QUIRKS)
    for look in (ours.move_off_owned_cpus, ours.write_all):
        look(state(owner("0"), sharer("a")))
    assert not [key for key in found if key.startswith("conmon")]


def test_erased_be_sets_are_left_to_their_groups(tree: Tree) -> None:
    node = changed_copy(NODE, be_cpuset=BeCpuset.ERASE)
    SandboxCgroups(tree, QUIRKS).write_all(state(owner("0", hard=True), node=node))
    assert (on(tree, BE), on(tree, LS)) == ("0-7", "1-7")


def test_sandboxes_do_not_follow_suppression(tree: Tree) -> None:
    ours = SandboxCgroups(tree, QUIRKS)
    there = state(owner("0", hard=True)).with_be_limit(CpuSet.parse("6-7"))
    ours.write_all(there)
    ours.move_off_owned_cpus(there)
    assert on(tree, BE) == "1-7"
