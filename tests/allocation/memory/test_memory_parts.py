"""Single rules of the memory manager that tables and properties do not reach."""

from __future__ import annotations

import pytest

from proxy.allocation.hint_family import Family
from proxy.allocation.memory.allocate import allocate
from proxy.allocation.memory.hints import container_memory_hints, pod_memory_hints
from proxy.allocation.memory.request import huge_pages, pod_amounts, split_problem
from proxy.allocation.memory.state import (
    Block,
    MemoryRejectedError,
    MemoryState,
    NodeMemory,
    initial,
    node_memory,
    page_resource,
)
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import HugePages, Machine, NumaNode
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from tests.oracles.memory_manager import nodes_of, release, start
from tests.oracles.memory_manager_state import validated

GI = 1 << 30
KEPT = {0: {"memory": GI}}
OPEN = TopologyHint(None, preferred=False)


def nodes(*sizes: int) -> tuple[NodeMemory, ...]:
    return tuple(NodeMemory(i, size * GI) for i, size in enumerate(sizes))


def one(amount: int, uid: str = "p", **more: int) -> PodRequests:
    return PodRequests(uid, (ContainerResources("c", requests={"cpu": 1000, "memory": amount * GI, **more}),))


def test_names_of_huge_pages() -> None:
    sizes = {2048: "2Mi", 1048576: "1Gi", 64: "64Ki", 16 << 20: "16Gi", 524288: "512Mi", 1: "1Ki"}
    assert {kib: page_resource(kib) for kib in sizes} == {k: f"hugepages-{v}" for k, v in sizes.items()}


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ("64KB", "64Ki"),
        ("2MB", "2Mi"),
        ("512MiB", "512Mi"),
        ("1GB", "1Gi"),
        ("16GB", "16Gi"),
        ("1TB", "1Ti"),
        ("1024KB", "1Mi"),
        ("123456789KB", "123456789Ki"),
        ("1234567890KB", ""),
        ("02MB", ""),
        ("0MB", ""),
        ("2mB", ""),
        ("2MB ", ""),
        (" 2MB", ""),
        ("2PB", ""),
        ("", ""),
    ],
)
def test_limits_on_huge_pages_name_resources(size: str, name: str) -> None:
    assert huge_pages([(size, 7)]) == (((f"hugepages-{name}", 7),) if name else ())


def test_limits_on_huge_pages_are_sorted_and_those_of_no_bytes_are_left_out() -> None:
    limits = [("2MB", 4), ("1GB", 8), ("64KB", 0), ("1 GB", 5)]
    assert huge_pages(limits) == (("hugepages-1Gi", 8), ("hugepages-2Mi", 4))
    assert huge_pages([("2MB", 4), ("2MiB", 6)]) == (("hugepages-2Mi", 6),), "the last one counts"
    assert huge_pages([("2MB" + " " * 20, 4)]) == ()


def test_memory_of_a_machine() -> None:
    node = NumaNode(1, CpuSet(), 4 * GI, {2048: HugePages(512)})
    machine = Machine((), (NumaNode(0, CpuSet()), node), CpuSet(), CpuSet())
    assert node_memory(machine) == (NodeMemory(0, 0), NodeMemory(1, 4 * GI, {2048: 512}))
    tables = initial(node_memory(machine), {1: {"memory": GI}}).nodes[1].tables
    assert tables["memory"].free == 2 * GI, "neither the reserve nor the huge pages"
    assert tables["hugepages-2Mi"].free == GI


def test_reserves_that_do_not_fit() -> None:
    with pytest.raises(
        MemoryRejectedError, match=r"^\[memorymanager\] you should specify the system reserved memory$"
    ):
        initial(nodes(4), {0: {"memory": 0, "hugepages-2Mi": 5}})
    assert initial(nodes(1), {0: {"memory": 2 * GI}}).nodes[0].tables["memory"].free == 0


@pytest.mark.parametrize(
    ("pod", "why"),
    [
        (
            PodRequests("p", (ContainerResources("c", requests={"memory": GI}),), guaranteed=False),
            "Guaranteed",
        ),
        (
            PodRequests(
                "p", (ContainerResources("c", requests={"memory": GI}),), pod_level_requests={"memory": GI}
            ),
            "Guaranteed",
        ),
        (PodRequests("p", (ContainerResources("c", requests={"cpu": 1000}),)), "requests no memory"),
    ],
)
def test_a_container_without_memory_of_its_own(pod: PodRequests, why: str) -> None:
    state = initial(nodes(4), KEPT)
    granted = allocate(state, pod, "c", OPEN)
    assert (granted.state, granted.blocks) == (state, ())
    assert why in granted.reasons[0]
    assert not container_memory_hints(state, pod, "c")
    assert not pod_memory_hints(state, pod)


def test_hints_cover_held_resources() -> None:
    pod = one(2)
    granted = allocate(initial(nodes(4, 4), KEPT), pod, "c", TopologyHint(Mask([1]), preferred=True))
    held = (TopologyHint(Mask([1]), preferred=True),)
    assert container_memory_hints(granted.state, pod, "c") == {"memory": held}
    assert pod_memory_hints(granted.state, pod) == {"memory": held}
    assert container_memory_hints(granted.state, one(3), "c") is None, "another amount: no preference"
    assert allocate(granted.state, pod, "c", OPEN).state is granted.state
    assert nodes_of(granted) == Mask([1])


def test_a_decision_without_free_memory_is_extended() -> None:
    state = allocate(initial(nodes(9, 8, 8), KEPT), one(10, "q"), "c", TopologyHint(Mask([1, 2]), True)).state
    granted = allocate(state, one(3), "c", TopologyHint(Mask([1, 2]), preferred=False))
    assert nodes_of(granted) == Mask([1, 2]), "the group still has 6 Gi"
    with pytest.raises(
        MemoryRejectedError, match="failed to find NUMA nodes to extend the current topology hint"
    ):
        allocate(state, one(30), "c", TopologyHint(Mask([0, 1]), preferred=False))
    alone = allocate(state, one(3), "c", TopologyHint(Mask([2]), preferred=False))
    assert nodes_of(alone) == Mask([1, 2]), "a single node of a group is not granted"
    assert "serves a group" in alone.reasons[1]
    with pytest.raises(MemoryRejectedError, match="preferred hint violates NUMA node allocation"):
        allocate(state, one(1), "c", TopologyHint(Mask([0, 1]), preferred=False))


def test_an_extension_is_reported() -> None:
    granted = allocate(initial(nodes(4, 4), KEPT), one(5), "c", TopologyHint(Mask([1]), preferred=True))
    assert nodes_of(granted) == Mask([0, 1])
    assert granted.reasons == (
        "decided on: NUMA node 1",
        "too little free memory there; enough on NUMA nodes 0-1",
    )


def test_the_start_of_a_container_releases_memory_of_init_containers() -> None:
    containers = (
        ContainerResources("i1", ContainerKind.INIT, {"memory": 3 * GI}),
        ContainerResources("s", ContainerKind.SIDECAR, {"memory": GI}),
        ContainerResources("i2", ContainerKind.INIT, {"memory": GI}),
        ContainerResources("a", ContainerKind.APP, {"memory": GI}),
    )
    pod, state = PodRequests("p", containers), initial(nodes(9), KEPT)
    for container in containers:
        state = allocate(state, pod, container.name, OPEN).state
    assert state.nodes[0].tables["memory"].reserved == 3 * GI
    assert set(start(state, pod, "i2").assignments["p"]) == {"s", "i2", "a"}
    after = start(state, pod, "a")
    assert set(after.assignments["p"]) == {"s", "a"}
    assert after.nodes[0].tables["memory"].reserved == 2 * GI
    assert release(after, "p", "i1") is after


def test_one_of_two_blocks_on_a_group_is_released() -> None:
    group = Mask([0, 1])
    first, second = Block(group, "memory", 6 * GI), Block(group, "memory", GI)
    both = initial(nodes(4, 4, 4), KEPT).charged(first, first.size).charged(second, second.size)
    assert [both.nodes[i].tables["memory"].reserved // GI for i in range(3)] == [3, 4, 0]
    left = both.uncharged(first)
    assert [left.nodes[i].tables["memory"].reserved // GI for i in range(3)] == [0, 1, 0]
    assert (left.nodes[0].cells, left.nodes[0].assignments) == (group, 1)


def test_memory_that_the_requests_of_a_pod_leave_to_its_containers() -> None:
    def pod(own: int, *containers: ContainerResources) -> PodRequests:
        return PodRequests(
            "p", containers, pod_level_requests={"memory": own, "cpu": 1}, are_pod_level_requests_managed=True
        )

    def exact(name: str, kind: ContainerKind, size: int) -> ContainerResources:
        return ContainerResources(name, kind, {"cpu": 1, "memory": size}, {"cpu": 1, "memory": size})

    def shared(kind: ContainerKind) -> ContainerResources:
        return ContainerResources("s", kind, {"memory": 1}, {"memory": 2})

    assert pod_amounts(pod(4, shared(ContainerKind.APP))) == {"memory": 4}
    assert split_problem(pod(4, exact("a", ContainerKind.APP, 4))) == ""
    assert split_problem(pod(4, exact("a", ContainerKind.APP, 3), shared(ContainerKind.APP))) == ""
    assert "leaving no memory for shared containers" in split_problem(
        pod(4, exact("a", ContainerKind.APP, 4), shared(ContainerKind.APP))
    )
    assert "requests 5 of memory, but only 4" in split_problem(pod(4, exact("i", ContainerKind.INIT, 5)))
    sidecar = exact("x", ContainerKind.SIDECAR, 4)
    assert "shared init containers but no memory" in split_problem(
        pod(4, sidecar, shared(ContainerKind.INIT))
    )
    full = pod(4, exact("a", ContainerKind.APP, 4), shared(ContainerKind.APP))
    assert pod_memory_hints(initial(nodes(4), KEPT), full) == {"memory": ()}, "impossible"
    some = pod(4, exact("a", ContainerKind.APP, 3), shared(ContainerKind.APP))
    assert pod_memory_hints(initial(nodes(4), KEPT), some) == {
        "memory": (TopologyHint(Mask([0]), preferred=True),)
    }


def test_an_inconsistent_stored_state_is_refused() -> None:
    ghost = {"p": {"c": (Block(Mask([0]), "hugepages-1Gi", 1),)}}
    read = MemoryState(initial(nodes(4), KEPT).nodes, ghost)
    with pytest.raises(MemoryRejectedError, match="uses memory resource that does not exist"):
        validated(read, nodes(4), KEPT)
    with pytest.raises(MemoryRejectedError) as refused:
        validated(initial(nodes(4, 4), KEPT), nodes(4), KEPT)
    assert refused.value.__notes__ == ["nodes [0, 1] are not [0]"]
    with pytest.raises(MemoryRejectedError) as refused:
        validated(initial(nodes(4), KEPT), nodes(5), KEPT)
    assert refused.value.__notes__ == ["node 0 has other amounts of memory"]


def test_memory_on_64_nodes_is_granted_on_the_fewest_that_suffice() -> None:
    state = initial(nodes(*[4] * 64), KEPT)
    hints = container_memory_hints(state, one(100), "c") or {}
    family = hints["memory"]
    assert isinstance(family, Family)
    assert len(family[0].affinity or ()) == family.size == 25
    granted = allocate(state, one(100), "c", OPEN)
    assert str(nodes_of(granted)) == "1-25", "the reserve makes node 0 poorer"
    again = container_memory_hints(granted.state, one(100, "q"), "c") or {}
    assert str(nodes_of(allocate(granted.state, one(100, "q"), "c", OPEN))) == "26-50"
    assert (again["memory"] or [])[0].affinity == Mask(range(26, 51))


def test_a_stored_state_is_initialized_or_refused() -> None:
    fresh, block = initial(nodes(4, 4), KEPT), Block(Mask([0]), "memory", GI)
    assert validated(MemoryState(), nodes(4, 4), KEPT) == fresh
    with pytest.raises(
        MemoryRejectedError, match="machine state can not be empty when it has memory assignments"
    ):
        validated(MemoryState({}, {"p": {"c": (block,)}}), nodes(4, 4), KEPT)
    far = {"p": {"c": (Block(Mask([0, 5]), "memory", GI),)}}
    with pytest.raises(
        MemoryRejectedError, match=r"\(pod: p, container: c\) .* uses the NUMA that does not exist"
    ):
        validated(MemoryState(fresh.nodes, far), nodes(4, 4), KEPT)
    with pytest.raises(MemoryRejectedError) as refused:
        validated(MemoryState(fresh.nodes, {"p": {"c": (block,)}}), nodes(4, 4), KEPT)
    assert refused.value.__notes__ == ["node 0 has other assignments or another group"]
    paged = (NodeMemory(0, 4 * GI, {2048: 1}), *nodes(4, 4)[1:])
    with pytest.raises(MemoryRejectedError) as refused:
        validated(fresh, paged, KEPT)
    assert refused.value.__notes__ == ["node 0 has other resources"]
