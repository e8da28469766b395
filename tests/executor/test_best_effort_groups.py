"""The groups above BE containers, in directories that follow the kernel's rules."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import CpuTopology
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.executor.best_effort.groups import BeGroups
from proxy.executor.cpuset_writer import CpusetWriter, WriteResult
from proxy.executor.kernel_ports import CpusetValue
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BeCpuset
from proxy.model.mode import NodeMode
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, QosClass, Request
from proxy.release.kernel import widen_cpusets
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(1, 1, 8, 1)
ROOT = "kubepods/besteffort"
NODE = Node(MACHINE, CpuTopology.of(MACHINE), be_cpuset=BeCpuset.ERASE)


def pod(uid: str, qos: QosClass = QosClass.NONE) -> Pod:
    return Pod(f"s-{uid}", uid, "ns", uid, 0, qos, KubeQos.BEST_EFFORT, f"/{ROOT}/pod{uid}")


def one(key: str, of: Pod, pool: Pool = Pool.BE, **more: object) -> Container:
    placement = Placement(pool, CpuSet(), Mask((0,)), **more)
    return Container(key, key, of, Request(), placement, Phase.RUNNING)


def owner(cpus: str) -> Container:
    placement = Placement(Pool.OWN, CpuSet.parse(cpus), Mask((0,)), excludes_be=True)
    return Container(
        "own", "own", Pod("s", "own", "ns", "own"), Request(), placement, Phase.RUNNING, 0, "own"
    )


def tree(tmp_path: Path, version: int, *paths: str) -> FakeCgroups:
    made = FakeCgroups(tmp_path, MACHINE.online, Mask((0,)), version)
    for path in ("kubepods", ROOT, *paths):
        made.mkdir(path)
        if version == 1:
            made.write(path, MACHINE.online, Mask((0,)))
    return made


def on(cgroups: FakeCgroups, path: str) -> str:
    value = cgroups.read(path)
    return str(value.cpus if cgroups.version == 1 else value.effective_cpus)


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_a_container_in_the_groups_follows_the_pool(tmp_path: Path, version: int) -> None:
    pause, main = f"{ROOT}/poda/pause", f"{ROOT}/poda/c"
    cgroups = tree(tmp_path, version, f"{ROOT}/poda", pause, main)
    states = [
        NodeState.of(NODE, [pod("a")], [one("c", pod("a")), *more])
        for more in ([], [owner("0-1")], [owner("0-5")], [owner("7")])
    ]
    now = [states[0]]
    ours = CpusetWriter(cgroups, lambda: now[0])
    for state in (*states, states[0]):
        now[0] = state
        assert ours.write_all().errors == []
        for path in (ROOT, f"{ROOT}/poda", pause, main):
            assert on(cgroups, path) == str(state.pools.be), path
        assert ours.write_pools().written == [], "a repetition changes nothing"


def test_a_container_that_shares_widens_the_groups_above_it(tmp_path: Path, version: int) -> None:
    cgroups = tree(tmp_path, version, f"{ROOT}/poda", f"{ROOT}/podb", f"{ROOT}/podb/ls", f"{ROOT}/poda/c")
    ls = pod("b", QosClass.LS)
    state = NodeState.of(NODE, [pod("a"), ls], [one("c", pod("a")), one("ls", ls, Pool.SHARED)])
    state = state.with_be_limit(CpuSet.parse("0-1"))
    assert CpusetWriter(cgroups, lambda: state).write_all().errors == []
    assert on(cgroups, f"{ROOT}/podb/ls") == "0-7"
    assert on(cgroups, f"{ROOT}/podb") == on(cgroups, ROOT) == "0-7"
    assert on(cgroups, f"{ROOT}/poda") == on(cgroups, f"{ROOT}/poda/c") == "0-1"


def test_a_container_that_is_bound_elsewhere_keeps_its_set(tmp_path: Path, version: int) -> None:
    cgroups = tree(tmp_path, version, f"{ROOT}/poda", f"{ROOT}/poda/c")
    state = NodeState.of(NODE, [pod("a")], [one("c", pod("a"), pool_cpus_limit=CpuSet.parse("3"))])
    CpusetWriter(cgroups, lambda: state).write_all()
    assert (on(cgroups, f"{ROOT}/poda/c"), on(cgroups, f"{ROOT}/poda")) == ("3", "0-7")


def test_ancestors_are_widened_before_a_container_starts(tmp_path: Path, version: int) -> None:
    cgroups = tree(tmp_path, version, f"{ROOT}/poda", f"{ROOT}/podb")
    given = one("c", pod("a"), hook_cpus=CpuSet((1,)), hook_extra_cpus=CpuSet((1,))).in_phase(Phase.CREATED)
    state = NodeState.of(NODE, [pod("a"), pod("b")], [given, owner("0-1")])
    states = [changed_copy(state, mode=NodeMode.RELEASED)]
    ours = CpusetWriter(cgroups, lambda: states[-1])
    assert ours.write_groups().notes == []
    assert on(cgroups, ROOT) == "0-7"
    states.append(state)
    assert ours.write_groups().notes == []
    assert [on(cgroups, path) for path in (ROOT, f"{ROOT}/poda", f"{ROOT}/podb")] == ["1-7", "1-7", "2-7"]


def test_a_group_made_with_the_create_keeps_the_cpus_named_by_hooks(tmp_path: Path, version: int) -> None:
    """CRI-O creates the group, under a name with a prefix."""
    path = f"{ROOT}/poda/crio-{'c' * 64}"
    cgroups = tree(tmp_path, version, f"{ROOT}/poda", path)
    given = one("c" * 64, pod("a"), hook_cpus=CpuSet((1,)), hook_extra_cpus=CpuSet((1,)))
    state = NodeState.of(NODE, [pod("a")], [given.in_phase(Phase.CREATED), owner("0-1")])
    cgroups.write(path, CpuSet((1,)), None)
    assert CpusetWriter(cgroups, lambda: state).write_groups().notes == []
    assert on(cgroups, path) == "1"


def test_a_group_that_ends_while_groups_are_read_does_not_keep_others_wide(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause, ends = f"{ROOT}/poda/pause", f"{ROOT}/poda/ends"
    cgroups = tree(tmp_path, version, f"{ROOT}/poda", pause, ends)
    read = cgroups.read

    def vanishing(path: str) -> CpusetValue:
        if path == ends:
            cgroups.rmdir(ends)
            raise CgroupError("the group is gone", errno.ENOENT)
        return read(path)

    monkeypatch.setattr(cgroups, "read", vanishing)
    state = NodeState.of(NODE, [pod("a")], [owner("0-1")])
    assert CpusetWriter(cgroups, lambda: state).write_groups().notes == []
    assert [on(cgroups, path) for path in (ROOT, f"{ROOT}/poda", pause)] == ["2-7"] * 3


def test_a_class_without_pods_is_widened_by_a_release(tmp_path: Path, version: int) -> None:
    """The last pod of the class ended while it was narrow."""
    cgroups = tree(tmp_path, version)
    cgroups.write(ROOT, CpuSet.parse("2-7"), None)
    state = NodeState.of(NODE, [], [])
    done = widen_cpusets(CpusetWriter(cgroups, lambda: state), state, (), (), {})
    assert (done.errors, on(cgroups, ROOT)) == ({}, "0-7")


def test_groups_are_written_before_each_start_below_them(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ours = world.executor.cpuset_writer
        ours.write_groups = lambda: world.log.append("groups") or WriteResult(notes=["cannot write poda"])
        for kube, times in (("besteffort", 1), ("burstable", 0)):
            await world.clear_log()
            container = await world.create(await world.pod(kube, "", kube))
            assert "groups" not in world.log
            assert (await world.start(container)).refused is None
            assert world.log.count("groups") == times, kube
            assert not times or world.log.index("groups") < world.log.index("forward StartContainer")
        assert "cannot write poda" in " ".join(world.logged)

    run_scenario(scenario, rules={"be_cpuset": BeCpuset.ERASE})


def test_a_start_waits_for_groups_for_a_limited_time(run_scenario) -> None:
    over = threading.Event()

    async def scenario(world: Any) -> None:
        container = await world.create(await world.pod("a", "", "besteffort"))
        world.executor.cpuset_writer.write_groups = lambda: (over.wait(60), WriteResult())[1]
        begun = asyncio.ensure_future(world.start(container))
        await world.until(lambda: "above a container in time pod=ns/a" in " ".join(world.logged))
        over.set()
        assert (await begun).refused is None

    run_scenario(scenario, rules={"be_cpuset": BeCpuset.ERASE}, call_timeout=0.2)


def test_groups_are_not_changed_unless_erasing_and_of_a_class(tmp_path: Path) -> None:
    cgroups = tree(tmp_path, 1, f"{ROOT}/poda", f"{ROOT}/poda/c")
    state = NodeState.of(
        changed_copy(NODE, be_cpuset=BeCpuset.NARROW), [pod("a")], [one("c", pod("a")), owner("0")]
    )
    CpusetWriter(cgroups, lambda: state).write_all()
    assert (on(cgroups, ROOT), on(cgroups, f"{ROOT}/poda/c")) == ("0-7", "1-7")
    cgroups.mkdir("other")
    cgroups.write("other", MACHINE.online, Mask((0,)))
    odd = changed_copy(pod("o"), cgroup_parent="/other")
    assert BeGroups(cgroups).write(NodeState.of(NODE, [odd], [owner("0")]), {}) == []
    assert on(cgroups, "other") == "0-7"


def test_a_failed_write_is_reported_and_a_missing_group_is_not(tmp_path: Path) -> None:
    cgroups = tree(tmp_path, 1, f"{ROOT}/poda", f"{ROOT}/poda/deep", f"{ROOT}/poda/deep/er")
    state = NodeState.of(NODE, [pod("a"), pod("gone")], [owner("0")])
    (error,) = BeGroups(cgroups).write(state, {})
    assert "poda/deep" in error, "groups inside containers are not ours"

    class Going(FakeCgroups):
        def read(self, path: str) -> object:
            raise CgroupError("cannot read: gone", 2)

    assert BeGroups(Going.open(tmp_path)).write(state, {}) == []


OWNED = st.sampled_from(["", "0", "0-3", "2-6", "7"])
LIMITS = st.sampled_from(["", "1-2", "4", "0-7"])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(OWNED, LIMITS), min_size=1, max_size=5), version=st.sampled_from([1, 2]))
def test_groups_follow_pools_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, str]], version: int
) -> None:
    paths = [f"{ROOT}/{name}" for name in ("poda", "poda/c", "podb", "podb/p")]
    cgroups = tree(tmp_path_factory.mktemp("t"), version, *paths)
    now: list[NodeState] = []
    ours = CpusetWriter(cgroups, lambda: now[0])
    for owned, limit in changes:
        there = [one("c", pod("a")), *([owner(owned)] if owned else [])]
        state = NodeState.of(NODE, [pod("a"), pod("b")], there)
        now[:] = [state.with_be_limit(CpuSet.parse(limit) if limit else None)]
        assert ours.write_all().errors == []
        for path in (ROOT, *paths):
            assert on(cgroups, path) == str(now[0].pools.cpus_of(Pool.BE))


def test_narrowed_groups_are_widened_for_a_start(tmp_path: Path, version: int) -> None:
    cgroups = tree(tmp_path, version, f"{ROOT}/poda")
    node = changed_copy(NODE, be_cpuset=BeCpuset.NARROW)
    state = NodeState.of(node, [pod("a")], [one("c", pod("a")).in_phase(Phase.CREATED), owner("0-1")])
    for path in (f"{ROOT}/poda", ROOT):
        cgroups.write(path, CpuSet((0, 2)), Mask((0,)))
    states, waiting = [changed_copy(state, mode=NodeMode.RELEASED)], state.containers["c"]
    ours = CpusetWriter(cgroups, lambda: states[-1])
    ours.make_room(waiting)
    assert on(cgroups, f"{ROOT}/poda") == "0,2"
    states.append(state)
    assert ours.make_room(waiting).notes == []
    assert on(cgroups, f"{ROOT}/poda") == on(cgroups, ROOT) == "0,2-7"
    elsewhere = changed_copy(pod("b"), cgroup_parent="/no/such")
    assert ours.make_room(one("d", elsewhere)).notes == []
