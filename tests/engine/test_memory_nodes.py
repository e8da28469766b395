"""The memory nodes of containers: named by the request, counted, near their CPUs, or all."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.call_events import UpdateAccepted
from proxy.engine.cpuset_mems import MemoryBindings
from proxy.engine.handle import handle
from proxy.engine.hook_narrowing import Narrowing, narrowed
from proxy.engine.memory_resize import with_memory_limit
from proxy.engine.node import Node
from proxy.engine.node_effects import PutRecord
from proxy.engine.placement import (
    counted_nodes,
    memory_nodes_for,
    named_memory_nodes,
    owner_memory_nodes,
    pool_memory_nodes,
)
from proxy.engine.state import NodeState
from proxy.model.grants import Block
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request, SetAside
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

GIB = 1 << 30
WHOLE = regular_machine(2, 1, 4, 1, mem_bytes_per_node=8 * GIB)  # CPUs 0-3 and 4-7
POD = Pod("s", "u", "ns", "p")
ALL = Mask((0, 1))


def state(*containers: Container, follow: bool = True) -> NodeState:
    return NodeState.of(Node(WHOLE, CpuTopology.of(WHOLE), follow_mems=follow), (POD,), containers)


def owner(name: str, limit: int, pool: Pool = Pool.OWN) -> Container:
    placement = Placement(pool, CpuSet((0,)), Mask((0,)))
    request = Request(memory_limit=limit)
    return Container(name, name, POD, request, placement, Phase.RUNNING, owner=f"u/{name}")


NAMED = [
    ("", None),
    ("0", "0"),
    ("1", "1"),
    ("0-1", "0-1"),
    ("2", None),
    ("1-2", None),
    ("x", None),
    ("-", None),
]


@pytest.mark.parametrize(("text", "named"), NAMED)
@pytest.mark.parametrize("follow", [False, True])
def test_memory_nodes_named_by_the_request_take_precedence(
    text: str, named: str | None, *, follow: bool
) -> None:
    there, request = state(follow=follow), Request(cpuset_mems=text)
    assert named_memory_nodes(there, request) == (ALL if named is None else Mask.parse(named))
    mems, why = owner_memory_nodes(there, request, CpuSet((4,)), "u/c c", Mask((0,)))
    assert mems == (Mask((0,)) if named is None else Mask.parse(named))
    assert ("which the request names" in why[0]) is (named is not None)
    pool = pool_memory_nodes(there, request, Mask((1,)))
    assert pool == (Mask((1,)) if follow and not text else named_memory_nodes(there, request))


@pytest.mark.parametrize(
    ("follow", "nodes", "mems"),
    [(False, "1", "0-1"), (True, None, "0-1"), (True, "1", "1"), (True, "0", "0"), (True, "7", "0-1")],
)
def test_a_pool_of_numa_nodes_has_their_memory(follow: bool, nodes: str | None, mems: str) -> None:
    limit = None if nodes is None else Mask.parse(nodes)
    assert pool_memory_nodes(state(follow=follow), Request(), limit) == Mask.parse(mems)


@pytest.mark.parametrize(
    ("follow", "cpus", "limit", "others", "mems", "explained"),
    [
        (False, "0", 0, (), "0-1", False),
        (True, "0", 0, (), "0", False),
        (True, "5", 8 * GIB, (), "1", False),
        (True, "3-4", 0, (), "0-1", False),
        (True, "0", 9 * GIB, (), "0-1", True),
        (True, "0", 6 * GIB, (owner("a", 2 * GIB),), "0", False),
        (True, "0", 6 * GIB, (owner("a", 3 * GIB),), "0-1", True),
        (True, "0", 6 * GIB, (owner("a", 3 * GIB, Pool.SHARED),), "0", False),
        (True, "0", 6 * GIB, (owner("c", 3 * GIB),), "0", False),
    ],
)
def test_an_owner_uses_the_memory_near_its_cpus_unless_it_is_promised(
    follow: bool, cpus: str, limit: int, others: tuple[Container, ...], mems: str, explained: bool
) -> None:
    """An earlier promise to the owner itself, under its name, does not count."""
    there = state(*others, follow=follow)
    found = owner_memory_nodes(there, Request(memory_limit=limit), CpuSet.parse(cpus), "u/c c")
    assert found[0] == Mask.parse(mems)
    reason = (
        "memory of NUMA nodes 0-1: NUMA node 0 cannot hold its limit in addition to what is promised there"
    )
    assert found[1] == ((reason,) if explained else ())


@pytest.mark.parametrize(
    ("follow", "before", "named", "limit", "mems"),
    [
        pytest.param(True, "0", "", 9 * GIB, "0-1", id="raised beyond its node"),
        pytest.param(True, "0", "", 7 * GIB, "0", id="raised within its node"),
        pytest.param(True, "0-1", "", GIB, "0-1", id="lowered: its memory is not moved"),
        pytest.param(True, "1", "", 3 * GIB, "0-1", id="no node is taken away"),
        pytest.param(True, "0", "0", 9 * GIB, "0", id="the request names the nodes"),
        pytest.param(False, "0", "", 9 * GIB, "0-1", id="all nodes"),
        pytest.param(True, "0", "", -1, "0", id="no limit"),
    ],
)
def test_a_resize_in_place_gives_an_owner_more_memory_nodes_and_takes_none(
    follow: bool, before: str, named: str, limit: int, mems: str
) -> None:
    plain = owner("c", 2 * GIB)
    request = changed_copy(plain.request, cpuset_mems=named)
    placement = changed_copy(plain.placement, mems=Mask.parse(before))
    container = changed_copy(plain, request=request, placement=placement)
    there = state(container, follow=follow).with_facts(mems=MemoryBindings(as_planned=frozenset({"c"})))
    resized = with_memory_limit(there, container, limit)
    assert (resized.request.memory_limit, resized.placement.mems) == (max(limit, 0), Mask.parse(mems))
    after, effects = handle(there, UpdateAccepted("c", limit))
    assert effects[0] == PutRecord("c/c", resized)
    assert after.containers["c"] == resized
    assert bool(after.facts.mems.as_planned) is (mems == before), "more nodes are not drift"
    for event in (UpdateAccepted("c", limit), UpdateAccepted("c", 0), UpdateAccepted("gone", limit)):
        assert handle(after, event) == (after, ())


def test_a_container_that_owns_no_cpus_keeps_its_memory_nodes_in_a_resize() -> None:
    container = owner("c", 2 * GIB, Pool.SHARED)
    after = with_memory_limit(state(container), container, 9 * GIB)
    assert (after.request.memory_limit, after.placement) == (9 * GIB, container.placement)


def test_memory_nodes_that_a_hook_named_stay_in_a_resize() -> None:
    container = owner("c", 2 * GIB)
    bound, problem = narrowed(state(container), container, Narrowing(mems=Mask((1,)), by="h"))
    assert not problem
    assert with_memory_limit(state(bound), bound, 9 * GIB).placement.mems == Mask((1,))


def test_counted_memory_is_where_it_was_counted() -> None:
    one, two = Block(Mask((0,)), "memory", GIB), Block(Mask((1,)), "hugepages-2Mi", GIB)
    whole = changed_copy(POD, reserved_for_pod=SetAside(None, True, CpuSet(), (two,)))
    assert counted_nodes(POD, ()) is None
    assert counted_nodes(POD, (one, two)) == ALL
    assert counted_nodes(whole, ()) == Mask((1,))
    assert counted_nodes(whole, (one,)) == Mask((0,)), "the container's own wins"
    assert counted_nodes(changed_copy(POD, reserved_for_pod=SetAside(None, True, CpuSet())), ()) is None
    assert owner_memory_nodes(state(), Request(), CpuSet((4,)), "u/c c", Mask((0,))) == (
        Mask((0,)),
        ("memory of NUMA node 0, where its limit is counted",),
    )


ROWS = ((10, 30, 20, 40), (30, 10, 40, 20), (20, 40, 10, 30), (40, 20, 30, 10))
FOUR = regular_machine(4, 1, 2, 1, mem_bytes_per_node=100)  # CPUs 0-1, 2-3, 4-5 and 6-7
FAR = changed_copy(
    FOUR, nodes=tuple(changed_copy(n, distance=row) for n, row in zip(FOUR.nodes, ROWS, strict=True))
)
BARE = changed_copy(FAR, nodes=(changed_copy(FAR.nodes[0], mem_bytes=0), *FAR.nodes[1:]))


@pytest.mark.parametrize(
    ("cpus", "need", "promised", "nodes"),
    [
        ("0-1", 0, [], "0"),
        ("0-1", 100, [], "0"),
        ("0-1", 101, [], "0,2"),  # the nearest of the other nodes
        ("0-1", 201, [], "0-2"),
        ("0-1", 301, [], "0-3"),
        ("0-1", 999, [], "0-3"),  # all nodes if even these are not enough
        ("2-3", 101, [], "1,3"),
        ("1-2", 201, [], "0-2"),  # nodes 2 and 3 are equally near, each to one of its own
        ("0-1", 50, [("0-1", 100)], "0"),  # half of a promise over two nodes counts on each
        ("0-1", 51, [("0-1", 100)], "0,2"),
        ("0-1", 41, [("0", 60)], "0,2"),
        ("0-1", 1, [("0", 60), ("0", 60)], "0,2"),
        ("0-1", 101, [("0", 500)], "0-2"),  # the free memory of a node is never negative
        ("0-1", 100, [("7", 500)], "0"),
    ],
)
def test_memory_is_as_near_to_the_cpus_as_promises_to_other_containers_permit(
    cpus: str, need: int, promised: list[tuple[str, int]], nodes: str
) -> None:
    others = [(Mask.parse(where), amount) for where, amount in promised]
    assert str(memory_nodes_for(FAR, CpuSet.parse(cpus), need, others)) == nodes


def test_cpus_of_a_node_without_memory_use_the_memory_of_the_nearest_node() -> None:
    assert str(memory_nodes_for(BARE, CpuSet.parse("0-1"))) == "2"
    assert str(memory_nodes_for(BARE, CpuSet.parse("0-1"), 101)) == "1-2"


def test_without_known_distances_all_nodes_are_equally_near() -> None:
    unknown = changed_copy(BARE, nodes=tuple(changed_copy(node, distance=()) for node in BARE.nodes))
    assert str(memory_nodes_for(unknown, CpuSet.parse("0-1"))) == "1-3"
    assert str(memory_nodes_for(unknown, CpuSet.parse("2-3"), 101)) == "1-2"
