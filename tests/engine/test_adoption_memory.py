"""Memory of containers that were placed while memory was not counted, or while the node had more memory."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.adoption import adopt, overcommitted_memory, with_unrecorded_grants
from proxy.engine.call_events import UpdateAccepted
from proxy.engine.container_events import ContainerFound
from proxy.engine.handle import handle
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.grants import Block
from proxy.model.idset import CpuSet, Mask
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

GIB = 1 << 30
MACHINE = regular_machine(2, 1, 4, 2, mem_bytes_per_node=8 * GIB)
POD = Pod("s", "u", "ns", "p", 0, kube_qos=KubeQos.GUARANTEED)
OWNER = Container(
    "id",
    "c",
    POD,
    Request(2048, 200_000, 100_000, 2 * GIB),
    Placement(Pool.OWN, CpuSet.parse("0,8"), Mask([0]), ("why",)),
    Phase.RUNNING,
    0,
    "u/c",
)


def state(*containers: Container, reserved: Mapping[int, int] | None = None) -> NodeState:
    kept = {1: GIB, **(reserved or {})}
    tables = {node: {"memory": size} for node, size in kept.items()}
    node = Node(MACHINE, CpuTopology.of(MACHINE), True, reserved_memory=tables)
    return NodeState.of(node, [c.pod for c in containers], containers)


def given(now: NodeState) -> list[int]:
    assert now.memory is not None
    return [node.table("memory").reserved // GIB for node in now.memory.nodes.values()]


def test_memory_of_bound_containers_is_counted_later() -> None:
    after = with_unrecorded_grants(state(OWNER))
    assert after.containers["id"].placement.blocks == (Block(Mask([0]), "memory", 2 * GIB),)
    assert given(after) == [2, 0]
    assert with_unrecorded_grants(after) is after


def test_memory_that_is_promised_or_unbound_or_of_ended_containers_is_not_counted() -> None:
    blocks = (Block(Mask([0]), "memory", GIB),)
    part = SetAside(
        Mask([0]),
        True,
        OWNER.placement.exclusive,
        (),
        (ContainerPart("c", OWNER.placement.exclusive, blocks),),
    )
    whole = changed_copy(part, blocks=blocks, parts=())
    free = changed_copy(OWNER.placement, mems=Mask([0, 1]))
    for container in (
        changed_copy(OWNER, placement=changed_copy(OWNER.placement, blocks=blocks)),
        changed_copy(OWNER, pod=changed_copy(POD, reserved_for_pod=part)),
        changed_copy(OWNER, pod=changed_copy(POD, reserved_for_pod=whole)),
        changed_copy(OWNER, placement=free),
        changed_copy(OWNER, phase=Phase.EXITED),
        changed_copy(OWNER, pod=changed_copy(POD, kube_qos=KubeQos.BURSTABLE)),
    ):
        before = state(container)
        assert with_unrecorded_grants(before) is before


def test_memory_is_counted_if_only_cpus_are_set_aside_for_the_pod() -> None:
    cpus = OWNER.placement.exclusive
    aside = SetAside(Mask([0]), True, cpus, (), (ContainerPart("c", cpus),))
    after = with_unrecorded_grants(state(changed_copy(OWNER, pod=changed_copy(POD, reserved_for_pod=aside))))
    assert given(after) == [2, 0]


def test_without_a_memory_manager_nothing_is_counted() -> None:
    node = Node(MACHINE, CpuTopology.of(MACHINE), True)
    before = NodeState.of(node, [POD], [OWNER])
    assert with_unrecorded_grants(before) is before
    assert overcommitted_memory(before) == {}


def test_overcommitment_is_reported() -> None:
    assert overcommitted_memory(with_unrecorded_grants(state(OWNER, reserved={0: 6 * GIB}))) == {}
    tight = with_unrecorded_grants(state(OWNER, reserved={0: 7 * GIB}))
    assert overcommitted_memory(tight) == {"memory": (2 * GIB, 8 * GIB)}
    assert given(tight) == [1, 0]


def test_a_container_created_without_us_counts_whatever_its_pool() -> None:
    """The product wrote NUMA nodes into its request, and a request that names nodes is not decided again."""
    before = state()
    for shares, cpus, pool in ((2, "1-15", Pool.SHARED), (2048, "0,8", Pool.OWN)):
        request = Request(shares, 100_000 * (shares // 1024), 100_000, 2 * GIB, cpus, "1")
        plan = adopt(before, ContainerFound("id", POD, "c", 0, request, Phase.CREATED))
        assert plan.container is not None
        assert (plan.container.placement.pool, plan.container.phase) == (pool, Phase.CREATED)
        assert plan.container.placement.blocks == (Block(Mask([1]), "memory", 2 * GIB),)
        assert given(plan.state) == [0, 2]


def test_memory_after_a_resize_in_place_is_counted_on_the_same_nodes() -> None:
    before = with_unrecorded_grants(state(OWNER))
    after, _ = handle(before, UpdateAccepted("id", 5 * GIB))
    assert after.containers["id"].placement.blocks == (Block(Mask([0]), "memory", 5 * GIB),)
    assert (given(after), overcommitted_memory(after)) == ([5, 0], {})
    assert after.containers["id"].placement.mems == Mask([0])
    more, _ = handle(after, UpdateAccepted("id", 9 * GIB))
    assert given(more) == [8, 0]
    assert overcommitted_memory(more) == {"memory": (9 * GIB, 15 * GIB)}
    less, _ = handle(more, UpdateAccepted("id", GIB))
    assert (given(less), overcommitted_memory(less)) == ([1, 0], {})
    assert less.memory == state(less.containers["id"]).memory
