"""The memory manager rule by rule: tables, sharing of groups, extensions, pods' own requests."""

from __future__ import annotations

import pytest

from proxy.allocation.memory.allocate import allocate
from proxy.allocation.memory.hints import container_memory_hints, pod_memory_hints
from proxy.allocation.memory.request import pod_amounts, split_problem
from proxy.allocation.memory.state import (
    MemoryRejectedError,
    MemoryState,
    NodeMemory,
    NumaMemory,
    ResourceTable,
    initial,
    page_resource,
)
from proxy.model.grants import Block
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from tests.oracles.memory_manager import nodes_of
from tests.oracles.memory_manager_state import difference, validated

KI, GI = 1 << 10, 1 << 30
KEPT = {0: {"memory": GI}}
OPEN = TopologyHint(None, preferred=False)
PAGES = "hugepages-2Mi"


def nodes(*sizes: int) -> tuple[NodeMemory, ...]:
    return tuple(NodeMemory(i, size * GI) for i, size in enumerate(sizes))


def app(name: str, size: int, kind: ContainerKind = ContainerKind.APP) -> ContainerResources:
    return ContainerResources(name, kind, {"memory": size * GI})


def one(size: int, uid: str = "p") -> PodRequests:
    return PodRequests(uid, (app("c", size),))


def at(*ids: int, preferred: bool = False) -> TopologyHint:
    return TopologyHint(Mask(ids), preferred)


def masks(state: MemoryState, pod: PodRequests, name: str = "c") -> list[str]:
    hints = container_memory_hints(state, pod, name) or {}
    return [str(h.affinity) for h in hints.get("memory") or ()]


def test_tables_of_a_node() -> None:
    state = initial(
        (NodeMemory(3, 8 * GI), NodeMemory(1, 8 * GI, {2048: 1024})),
        {1: {"memory": GI, PAGES: GI}, 3: {PAGES: 5}},
    )
    assert list(state.nodes) == [1, 3], "ascending"
    assert state.nodes[1] == NumaMemory(
        {
            PAGES: ResourceTable(2 * GI, GI, GI, 0, GI),
            "memory": ResourceTable(8 * GI, GI, 5 * GI, 0, 5 * GI),
        },
        Mask([1]),
        0,
    )
    assert state.nodes[3].tables == {"memory": ResourceTable(8 * GI, 0, 8 * GI, 0, 8 * GI)}
    assert state.nodes[3].table(PAGES) == ResourceTable(0, 0, 0, 0, 0)


def test_reserves_without_memory() -> None:
    with pytest.raises(MemoryRejectedError, match="you should specify the system reserved memory"):
        initial(nodes(4), {0: {PAGES: 5}})
    assert initial(nodes(4, 4), {0: {PAGES: 5}, 1: {"memory": 1}}).nodes, "one node is enough"


def test_names_of_pages_at_the_ends() -> None:
    assert [page_resource(kib) for kib in (0, 3, KI**4, KI**5, 3 * KI)] == [
        "hugepages-0Ki",
        "hugepages-3Ki",
        "hugepages-1Pi",
        "hugepages-1024Pi",
        "hugepages-3Mi",
    ]


def test_a_group_has_pages_on_one_node_only() -> None:
    state = initial((NodeMemory(0, 4 * GI), NodeMemory(1, 4 * GI, {2048: 512})), KEPT)
    block = Block(Mask([0, 1]), PAGES, GI)
    charged = state.charged(block, GI)
    assert PAGES not in charged.nodes[0].tables
    assert charged.nodes[1].tables[PAGES].free == 0
    assert charged.uncharged(block) == state
    held = Block(Mask([0, 1]), "memory", 2 * GI)
    assert charged.charged(held, 2 * GI).uncharged(held) == charged


def test_removed_nodes_are_skipped() -> None:
    state = initial(nodes(4, 4), KEPT)
    block = Block(Mask([1, 5]), "memory", GI)
    held = state.charged(Block(Mask([1]), "memory", GI), GI)
    assert held.uncharged(block) == state, "node 5 does not exist"
    assert state.uncharged(block) == state, "nothing was charged"


def test_a_mask_counts_only_memory_that_its_nodes_can_provide() -> None:
    """Memory of init containers counts as free, but not beyond the allocatable memory."""
    pod = PodRequests("p", (app("i", 9, ContainerKind.INIT), app("c", 5)))
    empty = initial(nodes(5, 5, 4), KEPT)
    state = MemoryState(empty.nodes, {"p": {"i": (Block(Mask([0]), "memory", 9 * GI),)}})
    assert masks(state, pod)[0] == "1", "node 0 can provide 4 Gi at most"
    group = Mask([0, 2])
    full = empty.charged(Block(group, "memory", 8 * GI), 8 * GI)
    state = MemoryState(full.nodes, {"p": {"i": (Block(group, "memory", 9 * GI),)}})
    big = PodRequests("p", (app("i", 9, ContainerKind.INIT), app("c", 9)))
    assert masks(state, big) == [], "the group cannot provide 9 Gi either"
    assert masks(state, PodRequests("p", (app("i", 9, ContainerKind.INIT), app("c", 8)))) == ["0,2"]


def test_only_init_containers_before_a_container_leave_memory_to_it() -> None:
    pod = PodRequests("p", (app("h", 3, ContainerKind.INIT), app("i", 3, ContainerKind.INIT), app("c", 1)))
    held = allocate(initial(nodes(5, 4), KEPT), pod, "i", at(0)).state
    assert masks(held, pod, "h") == ["1"], "memory of i is not free for containers before it"
    assert masks(held, pod, "c") == ["0", "1"]


def test_a_request_for_all_memory_of_a_node_fits() -> None:
    state = initial(nodes(5, 4, 4), KEPT)
    assert masks(state, one(4)) == ["0", "1", "2", "0-1", "0,2", "1-2", "0-2"]
    assert (
        masks(state, PodRequests("p", (ContainerResources("c", requests={"memory": 4 * GI + 1}),)))[0]
        == "0-1"
    )
    hints = container_memory_hints(state, one(8), "c")
    assert hints == {
        "memory": (at(0, 1, preferred=True), at(0, 2, preferred=True), at(1, 2, preferred=True), at(0, 1, 2))
    }


def test_nodes_of_two_groups_are_not_a_group() -> None:
    """A state in which a node serves a group and also itself; kubelet can store such a state."""
    state = initial(nodes(5, 4, 4), KEPT).charged(Block(Mask([0, 1]), "memory", GI), GI)
    state = state.charged(Block(Mask([0]), "memory", GI), GI)
    assert masks(state, one(1)) == ["0", "2"]


def test_hints_without_requests_and_without_memory() -> None:
    state = initial(nodes(4), KEPT)
    init_only = PodRequests("p", (app("i", 1, ContainerKind.INIT), ContainerResources("c")))
    assert pod_memory_hints(state, init_only) == {}, "app containers request no memory"
    held = allocate(state, init_only, "i", OPEN).state
    assert pod_memory_hints(held, init_only) == {}
    assert container_memory_hints(state, init_only, "c") == {}
    assert container_memory_hints(MemoryState(), one(1), "c") == {}
    assert container_memory_hints(state, one(0), "c") == {"memory": (at(0, preferred=True),)}


def test_a_container_beside_an_empty_one_is_not_a_pod_of_its_own() -> None:
    pod = PodRequests("p", (app("a", 4), ContainerResources("b")))
    assert pod_memory_hints(initial(nodes(5), KEPT), pod) == {"memory": (at(0, preferred=True),)}


def test_blocks_of_one_resource_twice_are_not_a_preference() -> None:
    block = Block(Mask([0]), "memory", GI)
    state = MemoryState(initial(nodes(4), KEPT).nodes, {"p": {"c": (block, block)}})
    assert container_memory_hints(state, one(1), "c") is None


def test_an_open_decision_that_has_to_be_preferred() -> None:
    state = allocate(initial(nodes(5, 4, 4), KEPT), one(3, "q"), "c", at(0)).state
    state = allocate(state, one(3, "r"), "c", at(1)).state
    taken = allocate(state, one(2), "c", TopologyHint(None, preferred=True))
    assert (str(nodes_of(taken)), taken.reasons) == (
        "2",
        ("no nodes were decided on; the best for its memory: NUMA node 2",),
    )
    with pytest.raises(
        MemoryRejectedError, match="failed to get the default NUMA affinity, no NUMA nodes with"
    ):
        allocate(taken.state, one(3, "s"), "c", OPEN)
    four = initial(nodes(5, 4, 4, 4), KEPT)
    four = allocate(four, one(3, "q"), "c", at(0)).state
    four = allocate(four, one(3, "r"), "c", at(1)).state
    for uid in "st":
        four = allocate(four, one(3, uid), "c", at(2, 3)).state
    with pytest.raises(MemoryRejectedError, match="failed to find the default preferred hint"):
        allocate(four, one(2), "c", TopologyHint(None, preferred=True))
    assert str(nodes_of(allocate(four, one(2), "c", OPEN))) == "2-3"


def test_an_extension_must_not_lose_the_preference() -> None:
    state = allocate(initial(nodes(9, 8, 8), KEPT), one(10, "q"), "c", at(1, 2, preferred=True)).state
    with pytest.raises(MemoryRejectedError, match="failed to find the extended preferred hint"):
        allocate(state, one(3), "c", at(2, preferred=True))


def test_a_mask_that_has_just_enough_is_not_extended() -> None:
    state = allocate(initial(nodes(5, 4, 4), KEPT), one(3, "q"), "c", at(0)).state
    with pytest.raises(MemoryRejectedError, match="preferred hint violates NUMA node allocation"):
        allocate(state, one(5), "c", at(0, 1))
    with pytest.raises(MemoryRejectedError, match="failed to find NUMA nodes to extend"):
        allocate(state, one(6), "c", at(0, 1))


def test_memory_that_is_taken_over_needs_no_extension() -> None:
    containers = (
        ContainerResources("i", ContainerKind.INIT, {"memory": 3 * GI, PAGES: GI}),
        ContainerResources("j", ContainerKind.INIT, {"memory": 4 * GI}),
        ContainerResources("a", ContainerKind.APP, {"memory": 2 * GI, PAGES: GI}),
        ContainerResources("b", ContainerKind.APP, {"memory": 3 * GI}),
    )
    pod = PodRequests("p", containers)
    state = initial((NodeMemory(0, 6 * GI, {2048: 512}), NodeMemory(1, 6 * GI)), {1: {"memory": GI}})

    def give(name: str) -> tuple[str, ...]:
        nonlocal state
        granted = allocate(state, pod, name, at(0, preferred=True))
        state = granted.state
        return granted.reasons[1:]

    def held(name: str) -> list[tuple[str, int]]:
        return [(b.resource, b.size // GI) for b in state.blocks("p", name) or ()]

    assert give("i") == ()
    assert give("j") == ("3Gi of memory taken over from init containers",)
    assert (held("i"), held("j")) == ([("memory", 0), (PAGES, 1)], [("memory", 4)])
    assert give("a") == (
        "2Gi of memory taken over from init containers",
        f"1Gi of {PAGES} taken over from init containers",
    ), "no memory is free, but it needs no additional memory"
    assert (held("i"), held("j")) == ([("memory", 0), (PAGES, 0)], [("memory", 2)])
    assert give("b") == ("2Gi of memory taken over from init containers",)
    assert held("j") == [("memory", 0)]
    assert state.nodes[0].tables["memory"].free == 0


@pytest.mark.parametrize("guaranteed", [True, False])
def test_a_pod_with_pod_level_requests_is_served_if_they_are_enabled(guaranteed: bool) -> None:
    pod = PodRequests(
        "p", (app("c", 1),), guaranteed, {"memory": 2 * GI, PAGES: 0}, are_pod_level_requests_managed=True
    )
    expected = {"memory": (at(0, preferred=True),)} if guaranteed else None
    assert pod_memory_hints(initial(nodes(4), KEPT), pod) == expected
    assert pod_amounts(pod) == {"memory": 2 * GI}, "an amount of zero is not requested"
    byte = PodRequests("p", pod.containers, guaranteed, {"memory": 1}, are_pod_level_requests_managed=True)
    assert pod_amounts(byte) == {"memory": 1}


def test_a_pod_without_pod_level_requests_requests_the_sum_of_its_containers() -> None:
    pod = PodRequests("p", (app("a", 1), app("b", 2)), are_pod_level_requests_managed=True)
    assert pod_amounts(pod) == {"memory": 3 * GI}
    hints = container_memory_hints(initial(nodes(4, 4), KEPT), pod, "b")
    assert hints == {"memory": (at(0, preferred=True), at(1, preferred=True), at(0, 1))}


def split_problem_of(budget: int, *sizes: tuple[ContainerKind, int], pages: int = 0) -> str:
    """Return why a pod cannot be split; a size of 0 makes a container that shares, a size adds pages of 1."""
    containers = [
        ContainerResources(f"c{i}", kind, amounts, amounts)
        for i, (kind, size) in enumerate(sizes)
        for amounts in [{"cpu": 1, "memory": size} if size else {"cpu": 0}]
    ]
    whole = {"memory": budget, **({PAGES: pages} if pages else {})}
    return split_problem(
        PodRequests("p", tuple(containers), pod_level_requests=whole, are_pod_level_requests_managed=True)
    )


INIT, SIDE, APP = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.APP


@pytest.mark.parametrize(
    ("budget", "sizes", "problem"),
    [
        (9, [(INIT, 9)], ""),
        (9, [(INIT, 10)], "requests 10 of memory, but only 9 available"),
        (9, [(SIDE, 4), (INIT, 5)], ""),
        (9, [(SIDE, 4), (INIT, 6)], "requests 6 of memory, but only 5 available"),
        (9, [(SIDE, 4), (SIDE, 3), (INIT, 3)], "requests 3 of memory, but only 2 available"),
        (9, [(INIT, 6), (SIDE, 4)], ""),
        (9, [(SIDE, 8), (INIT, 0)], ""),
        (9, [(SIDE, 9), (INIT, 0)], "shared init containers but no memory available"),
        (9, [(SIDE, 8), (SIDE, 0), (APP, 1)], "leaving no memory for shared containers"),
        (9, [(SIDE, 8), (SIDE, 0)], ""),
        (9, [(APP, 5), (APP, 0), (APP, 4)], "leaving no memory for shared containers"),
        (9, [(APP, 5), (APP, 0), (APP, 3)], ""),
        (9, [(APP, 5), (APP, 5), (APP, 0)], "leaving no memory for shared containers"),
        (9, [(APP, 5), (APP, 4)], ""),
    ],
)
def test_memory_that_containers_leave_to_each_other(
    budget: int, sizes: list[tuple[ContainerKind, int]], problem: str
) -> None:
    found = split_problem_of(budget, *sizes)
    assert problem in found
    assert bool(found) == bool(problem)


def test_a_resource_that_only_the_pod_names_is_left_to_all() -> None:
    assert split_problem_of(9, (APP, 5), (APP, 0), pages=4) == ""
    assert f"no {PAGES}" not in split_problem_of(9, (SIDE, 9), (INIT, 0), pages=4)


def test_an_init_container_with_amounts_of_its_own_needs_nothing_of_the_others() -> None:
    def whole(name: str, kind: ContainerKind, **sizes: int) -> ContainerResources:
        named = {PAGES if resource == "pages" else resource: size for resource, size in sizes.items()}
        return ContainerResources(name, kind, {"cpu": 1, **named}, {"cpu": 1, **named})

    def problem(init: ContainerResources) -> str:
        budget = {"memory": 9, PAGES: 4}
        pod = (whole("s", SIDE, memory=3, pages=4), init)
        return split_problem(
            PodRequests("p", pod, pod_level_requests=budget, are_pod_level_requests_managed=True)
        )

    assert problem(whole("i", INIT, memory=6)) == "", "no huge pages are left, and it has no use for any"
    assert f"requests 1 of {PAGES}, but only 0 available" in problem(whole("i", INIT, memory=6, pages=1))
    shared = ContainerResources("i", INIT, {"cpu": 1, "memory": 1}, {"cpu": 1, "memory": 2})
    assert f"no {PAGES} available" in problem(shared)


def test_differences_between_two_states_are_described() -> None:
    empty = initial(nodes(4, 4), KEPT)
    block = Block(Mask([0, 1]), "memory", 4 * GI)
    charged = empty.charged(block, block.size)
    assert difference(charged, charged) == ""
    other = dict(charged.nodes)
    for i, shift in ((0, GI), (1, -GI)):
        table = other[i].tables["memory"].charge(shift * -1)
        other[i] = NumaMemory({"memory": table}, other[i].cells, other[i].assignments)
    assert difference(MemoryState(other), charged) == "", "only the sum over the group counts"
    less = {
        **charged.nodes,
        1: NumaMemory({"memory": ResourceTable(4 * GI, 0, 4 * GI, 0, 4 * GI)}, Mask([0, 1]), 1),
    }
    assert difference(charged, MemoryState(less)) == "node 0 has other amounts of memory"
    for field in range(3):
        sizes = [5 * GI, 1, 4 * GI, 0, 4 * GI]
        sizes[field] += 1
        changed = {**empty.nodes, 1: NumaMemory({"memory": ResourceTable(*sizes)}, Mask([1]))}
        assert difference(MemoryState(changed), empty) == "node 1 has other amounts of memory"
    alone = {**charged.nodes, 1: NumaMemory(charged.nodes[1].tables, Mask([1]), 1)}
    assert difference(MemoryState(alone), charged) == "node 1 has other assignments or another group"


def test_a_block_over_nodes_of_which_one_lacks_the_resource() -> None:
    machine = (NodeMemory(0, 4 * GI, {2048: 1}), NodeMemory(1, 4 * GI))
    held = {"p": {"c": (Block(Mask([0, 1]), PAGES, 1),)}}
    with pytest.raises(MemoryRejectedError, match="uses memory resource that does not exist"):
        validated(MemoryState(initial(machine, KEPT).nodes, held), machine, KEPT)
