"""The memory that each container holds as containers start, end, take over memory and are removed."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import RegisteredDevice
from proxy.allocation.memory import accounts
from proxy.allocation.providers.devices import DeviceProvider
from proxy.engine.adoption import adopt
from proxy.engine.container_create import place
from proxy.engine.container_events import ContainerFound
from proxy.engine.held_devices import granted
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.grants import Block
from proxy.model.idset import CpuSet, Mask
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import (
    Container,
    ContainerPart,
    KubeQos,
    Phase,
    Placement,
    Pod,
    Pool,
    Request,
    SetAside,
)
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MIB = 1 << 20
MACHINE = regular_machine(2, 1, 4, 2, mem_bytes_per_node=100 * MIB)
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True, reserved_memory={0: {"memory": 10 * MIB}})
RUNNING, EXITED, CREATING = Phase.RUNNING, Phase.EXITED, Phase.CREATING


def pod_of(uid: str, *containers: tuple[str, ContainerKind, int]) -> Pod:
    containers = [
        ContainerResources(n, kind, {"memory": mib * MIB}, {"memory": mib * MIB})
        for n, kind, mib in containers
    ]
    return Pod(f"s-{uid}", uid, "ns", uid, requests=PodRequests(uid, tuple(containers)))


def holding(
    pod: Pod, name: str, mib: int, nodes: tuple[int, ...] = (0,), phase: Phase = RUNNING, attempt: int = 0
) -> Container:
    blocks = (Block(Mask(nodes), "memory", mib * MIB),)
    placement = Placement(Pool.SHARED, CpuSet(), Mask(nodes), blocks=blocks)
    return Container(f"{pod.uid}-{name}-{attempt}", name, pod, Request(), placement, phase, attempt)


def reserved(state: NodeState) -> tuple[int, ...]:
    """Return what is reserved on each node, in MiB."""
    assert state.memory is not None
    return tuple(node.table("memory").reserved // MIB for node in state.memory.nodes.values())


def held(state: NodeState) -> dict[tuple[str, str], list[tuple[str, int]]]:
    assert state.memory is not None
    return {
        (uid, name): [(str(b.affinity), b.size // MIB) for b in blocks]
        for uid, pod in state.memory.assignments.items()
        for name, blocks in pod.items()
    }


def create(state: NodeState, pod: Pod, name: str, mib: int, attempt: int = 0) -> NodeState:
    plan = place(state, pod, name, attempt, Request(memory_limit=mib * MIB), f"{pod.uid}-{name}-{attempt}")
    assert plan.verdict.admitted, plan.verdict
    return plan.state


def end(state: NodeState, key: str) -> NodeState:
    return state.changed(put=[state.containers[key].in_phase(EXITED)])


def run(state: NodeState, key: str) -> NodeState:
    container = state.containers[key].in_phase(RUNNING)
    return state.changed(put=[container]).started(container)


POD = pod_of("p", ("init", ContainerKind.INIT, 80), ("app", ContainerKind.APP, 60))
INIT, APP = ("p", "init"), ("p", "app")


def test_memory_of_an_init_container_is_taken_over_and_counted_once() -> None:
    state = create(NodeState.empty(NODE).with_pod(POD), POD, "init", 80)
    assert (held(state), reserved(state)) == ({INIT: [("0", 80)]}, (80, 0))
    state = end(run(state, "p-init-0"), "p-init-0")
    assert reserved(state) == (80, 0), "it may start again until a later container has started"
    state = create(state, POD, "app", 60)
    assert (held(state), reserved(state)) == ({INIT: [("0", 20)], APP: [("0", 60)]}, (80, 0))
    failed = state.changed(drop=["p-app-0"])
    assert (held(failed), reserved(failed)) == ({INIT: [("0", 80)]}, (80, 0)), (
        "no container has taken it over"
    )
    state = run(state, "p-app-0")
    assert (held(state), reserved(state)) == ({APP: [("0", 60)]}, (60, 0))
    state = create(end(state, "p-app-0"), POD, "app", 60, attempt=1)
    assert (held(state), reserved(state)) == ({APP: [("0", 60)]}, (60, 0)), "a restart keeps its memory"
    state = state.changed(drop=["p-app-1"]).without_pod("s-p")
    assert (held(state), reserved(state)) == ({}, (0, 0))


def test_memory_is_taken_over_from_one_by_several_and_from_several_by_one() -> None:
    pod = pod_of(
        "p",
        ("i", ContainerKind.INIT, 50),
        ("j", ContainerKind.INIT, 70),
        ("s", ContainerKind.SIDECAR, 10),
        ("a", ContainerKind.APP, 65),
    )
    state = NodeState.empty(NODE).with_pod(pod)
    for name, mib, ends in (("i", 50, True), ("j", 70, True), ("s", 10, False), ("a", 65, False)):
        state = create(state, pod, name, mib)
        state = end(state, f"p-{name}-0") if ends else state
        assert reserved(state) == {"i": (50, 0), "j": (70, 0), "s": (70, 0), "a": (75, 0)}[name]
    assert held(state) == {
        ("p", "i"): [("0", 0)],
        ("p", "j"): [("0", 0)],
        ("p", "s"): [("0", 10)],
        ("p", "a"): [("0", 65)],
    }


def test_what_one_init_container_leaves_is_not_taken_over_again_from_the_next() -> None:
    pod = pod_of(
        "p", ("i", ContainerKind.INIT, 70), ("j", ContainerKind.INIT, 50), ("a", ContainerKind.APP, 60)
    )
    state = NodeState.empty(NODE).with_pod(pod)
    for name, mib, expected in (
        ("i", 70, {"i": 70}),
        ("j", 50, {"i": 20, "j": 50}),
        ("a", 60, {"i": 0, "j": 10, "a": 60}),
    ):
        state = create(state, pod, name, mib)
        assert {n: b for (_, n), [(_, b)] in held(state).items()} == expected
        again = NodeState.of(NODE, state.pods.values(), state.containers.values())
        assert (held(again), reserved(again)) == (held(state), reserved(state))


def test_no_memory_is_taken_over_from_sidecars_or_from_other_nodes() -> None:
    pod = pod_of(
        "p", ("s", ContainerKind.SIDECAR, 10), ("i", ContainerKind.INIT, 20), ("a", ContainerKind.APP, 30)
    )
    containers = [holding(pod, "s", 10), holding(pod, "i", 20, (1,), EXITED), holding(pod, "a", 30)]
    state = NodeState.of(NODE, [pod], containers)
    assert reserved(state) == (40, 20)
    assert held(state)["p", "i"] == [("1", 20)]
    pages = changed_copy(holding(pod, "i", 20, (0,), EXITED))
    blocks = (Block(Mask([0]), "hugepages-2Mi", 20 * MIB),)
    pages = changed_copy(pages, placement=changed_copy(pages.placement, blocks=blocks))
    assert held(state.changed(put=[pages]))["p", "i"] == [("0", 20)]


@pytest.mark.parametrize(
    ("phase", "known", "sandbox", "counts"),
    [
        (CREATING, False, True, True),
        (RUNNING, False, False, True),
        (EXITED, True, True, True),
        (EXITED, True, False, False),
        (EXITED, False, True, False),
    ],
)
def test_ended_containers_keep_their_cpus_while_they_may_return(
    phase: Phase, *, known: bool, sandbox: bool, counts: bool
) -> None:
    pod = POD if known else changed_copy(POD, requests=None)
    state = NodeState.of(NODE, [pod] if sandbox else [], [holding(pod, "app", 60, phase=phase)])
    assert reserved(state) == ((60, 0) if counts else (0, 0))


def test_a_sandbox_that_comes_back_counts_what_its_ended_containers_hold() -> None:
    state = NodeState.of(NODE, [POD], [holding(POD, "app", 60, phase=EXITED)])
    gone = state.without_pod("s-p")
    assert reserved(gone) == (0, 0)
    assert reserved(gone.with_pod(POD)) == (60, 0)


def test_the_newest_of_several_attempts_counts() -> None:
    both = [holding(POD, "app", 60, (1,), RUNNING, 1), holding(POD, "app", 50, (0,), EXITED, 0)]
    for containers in (both, both[::-1]):
        assert reserved(NodeState.of(NODE, [POD], containers)) == (0, 60)


def test_an_overcommitted_node_takes_no_memory_from_containers() -> None:
    state = NodeState.empty(NODE)
    for uid in "ab":
        pod = Pod(f"s-{uid}", uid, "ns", uid)
        request = Request(memory_limit=80 * MIB, cpuset_mems="0")
        state = adopt(state, ContainerFound(uid, pod, "c", 0, request, RUNNING)).state
    assert reserved(state) == (90, 0), "all memory of the node"
    state = state.changed(drop=["a"])
    assert (held(state), reserved(state)) == ({("b", "c"): [("0", 80)]}, (80, 0))
    assert reserved(state.changed(drop=["b"])) == (0, 0)


def test_a_running_container_may_use_a_group_that_overlaps_single_nodes() -> None:
    a, b = (Pod(f"s-{uid}", uid, "ns", uid) for uid in "ab")
    for first, second in ((0, 1), (1, 0)):
        containers = [holding(a, "c", 40, (0,)), holding(b, "c", 100, (0, 1))]
        state = NodeState.empty(NODE).changed(put=[containers[first]]).changed(put=[containers[second]])
        assert reserved(state) == (90, 50)
        alone = state.changed(drop=["b-c-0"])
        assert reserved(alone) == (40, 0)
        assert alone.memory == NodeState.of(NODE, (), [containers[0]]).memory
        alone = state.changed(drop=["a-c-0"])
        assert alone.memory == NodeState.of(NODE, (), [containers[1]]).memory


def test_memory_that_its_nodes_have_is_charged_and_released_alone() -> None:
    """Charging all containers again for every change would cost more than the decision."""
    a, b = (pod_of(uid, ("c", ContainerKind.APP, 40)) for uid in "ab")
    with mock.patch.object(accounts, "_recharged", side_effect=AssertionError):
        state = NodeState.empty(NODE).changed(put=[holding(a, "c", 40)])
        state = state.changed(put=[holding(b, "c", 100, (1,))])
        assert reserved(state) == (40, 100)
        assert reserved(state.changed(put=[holding(a, "c", 90)])) == (90, 100), "all of node 0"
        assert reserved(state.changed(drop=["a-c-0"])) == (0, 100)
    with mock.patch.object(accounts, "_recharged", wraps=accounts._recharged) as again:
        assert reserved(state.changed(put=[holding(a, "c", 91)])) == (90, 100)
    again.assert_called_once()


def test_memory_of_a_lost_node_is_counted_on_its_group() -> None:
    a, b, c = (Pod(f"s-{uid}", uid, "ns", uid) for uid in "abc")
    blocks = [holding(a, "c", 40, (0, 7)), holding(b, "c", 50), holding(c, "c", 30, (7,))]
    state = NodeState.of(NODE, (), blocks)
    assert reserved(state) == (90, 0), "memory that only the lost node had is charged to no container"
    assert reserved(state.changed(drop=["a-c-0"])) == (50, 0)
    assert reserved(state.changed(drop=["c-c-0"])) == (90, 0)


def aside(*parts: tuple[str, int], whole: int = 0) -> SetAside:
    def block(mib: int) -> tuple[Block, ...]:
        return (Block(Mask([0]), "memory", mib * MIB),) if mib else ()

    found = tuple(ContainerPart(name, CpuSet(), block(mib)) for name, mib in parts)
    return SetAside(Mask([0]), True, CpuSet(), block(whole), found)


def test_a_set_aside_counts_until_its_container_exists() -> None:
    pod = changed_copy(POD, reserved_for_pod=aside(("init", 20), ("app", 60)))
    state = NodeState.empty(NODE).with_pod(pod)
    assert (held(state), reserved(state)) == ({INIT: [("0", 20)], APP: [("0", 60)]}, (80, 0))
    state = state.changed(put=[holding(pod, "init", 20)])
    assert reserved(state) == (80, 0)
    state = end(state, "p-init-0").changed(put=[holding(pod, "app", 60)])
    assert reserved(state) == (80, 0), "the parts are reduced already"
    state = run(state, "p-app-0")
    assert (held(state), reserved(state)) == ({APP: [("0", 60)]}, (60, 0))
    assert state.pods["s-p"].reserved_for_pod.part("init").blocks == ()
    assert state.pods["s-p"].reserved_for_pod.part("app").blocks != ()
    whole = NodeState.empty(NODE).with_pod(changed_copy(POD, reserved_for_pod=aside(whole=70)))
    assert held(whole) == {("p", ""): [("0", 70)]}
    assert reserved(whole.without_pod("s-p")) == (0, 0)


def test_only_init_containers_before_a_started_container_release_memory() -> None:
    pod = pod_of(
        "p",
        ("i", ContainerKind.INIT, 10),
        ("s", ContainerKind.SIDECAR, 10),
        ("j", ContainerKind.INIT, 10),
        ("a", ContainerKind.APP, 10),
    )
    inits = [holding(pod, "i", 10, (0,), EXITED), holding(pod, "j", 10, (1,), EXITED)]
    state = NodeState.of(NODE, [pod], [*inits, holding(pod, "s", 10, (1,), EXITED)])
    started = holding(pod, "s", 10, (1,), RUNNING, 1)
    state = state.changed(put=[started]).started(started)
    assert set(held(state)) == {("p", "j"), ("p", "s")}
    started = holding(pod, "a", 10, (1,))
    state = state.changed(put=[started]).started(started)
    assert set(held(state)) == {("p", "a"), ("p", "s")}
    other = holding(pod, "unknown", 10, (1,))
    assert held(state.changed(put=[*inits, other]).started(other)).keys() >= {("p", "i"), ("p", "j")}


def test_devices_are_held_until_the_pod_is_removed() -> None:
    node = changed_copy(NODE, devices={"gpu": {i: RegisteredDevice(i) for i in "abc"}})
    containers = [
        changed_copy(
            holding(POD, name, 1, phase=phase),
            placement=Placement(Pool.SHARED, CpuSet(), Mask(), devices=(("gpu", (device,)),)),
        )
        for name, phase, device in (("init", EXITED, "a"), ("app", RUNNING, "b"))
    ]
    state = NodeState.empty(node).with_pod(POD)
    for container in containers:
        state = granted(state.changed(put=[container]), container)
    assert state.devices.available("gpu") == {"c"}
    assert state.devices.of_container("p", "init", "gpu") == {"a"}
    assert state.without_devices("p").devices == state.devices, "the pod is there"
    assert state.without_pod("s-p").without_devices("p").devices.available("gpu") == set("abc")
    providers = NodeState.of(NODE, (), containers).providers
    assert not any(isinstance(each, DeviceProvider) for each in providers), "a node without devices"


def test_a_part_ends_with_its_container_whatever_its_class() -> None:
    """The class that kubelet reports and the cgroup parent may contradict each other."""
    pod = changed_copy(POD, kube_qos=KubeQos.BEST_EFFORT, reserved_for_pod=aside(("init", 20), ("app", 60)))
    state = NodeState.empty(NODE).with_pod(pod)
    plan = place(state, pod, "app", 0, Request(cpu_shares=2), "t")
    again = NodeState.of(NODE, plan.state.pods.values(), plan.state.containers.values())
    assert held(plan.state) == held(again) == {INIT: [("0", 20)]}
    assert reserved(plan.state) == (20, 0)


def test_a_newer_attempt_without_memory_releases_the_memory_of_an_older_one() -> None:
    state = NodeState.of(NODE, [POD], [holding(POD, "app", 60)])
    bare = changed_copy(holding(POD, "app", 0, attempt=1), placement=Placement(Pool.SHARED, CpuSet(), Mask()))
    assert reserved(state.changed(put=[bare])) == (0, 0)
    assert reserved(state.changed(put=[bare]).changed(drop=[bare.id])) == (60, 0)


def groups(state: NodeState) -> dict[str, tuple[int, int, int]]:
    """Return the reserved and the free memory of each group of nodes, in MiB, and the number of its blocks.

    How much of that each node of a group has depends on the order, as in kubelet.
    """
    assert state.memory is not None
    found: dict[str, tuple[int, int, int]] = {}
    for node in state.memory.nodes.values():
        reserved, free, _ = found.get(str(node.cells), (0, 0, 0))
        table = node.table("memory")
        found[str(node.cells)] = (
            reserved + table.reserved // MIB,
            free + table.free // MIB,
            node.assignments,
        )
    return found


def test_memory_accounts_do_not_depend_on_the_order_of_events() -> None:
    """Running containers may hold more than a node has, or use nodes of another group."""
    for seed in range(60):
        dice, state = random.Random(seed), NodeState.empty(NODE)
        for step in range(25):
            pod = pod_of(f"u{dice.randrange(6)}", ("c", ContainerKind.APP, 10))
            nodes = dice.choice(((0,), (1,), (0, 1)))
            mib = dice.choice((10, 30, 50, 80, 90, 120))
            there = sorted(state.containers)
            if there and dice.random() < 0.4:
                state = state.changed(drop=[dice.choice(there)])
            else:
                state = state.with_pod(pod).changed(put=[holding(pod, "c", mib, nodes)])
            again = NodeState.of(NODE, state.pods.values(), state.containers.values())
            assert groups(state) == groups(again), (seed, step)
