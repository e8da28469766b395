"""The memory manager as a whole: hints against the plainly written rules; accounts that always balance."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.allocation.memory.allocate import allocate
from proxy.allocation.memory.hints import container_memory_hints
from proxy.allocation.memory.state import MemoryRejectedError, MemoryState, NodeMemory, initial
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from tests.oracles.memory_manager import nodes_of, release, release_pod, start
from tests.oracles.memory_manager_state import difference, validated

KI = 1024
OPEN = TopologyHint(None, preferred=False)

MACHINES = st.lists(st.tuples(st.integers(4, 20), st.integers(0, 4)), min_size=1, max_size=4).map(
    lambda sizes: tuple(NodeMemory(2 * i, 8 * KI * m, {2: pages}) for i, (m, pages) in enumerate(sizes))
)
AMOUNTS = st.fixed_dictionaries(
    {"memory": st.integers(0, 12).map(lambda n: n * 8 * KI)},
    optional={"hugepages-2Ki": st.integers(0, 6).map(lambda n: n * 2 * KI)},
)
KINDS = st.lists(st.sampled_from([ContainerKind.INIT, ContainerKind.SIDECAR]), max_size=3).map(
    lambda init: [*init, ContainerKind.APP, ContainerKind.APP]
)


@st.composite
def pods(draw: st.DrawFn, uid: str) -> PodRequests:
    kinds = draw(KINDS)
    return PodRequests(
        uid, tuple(ContainerResources(f"c{i}", kind, draw(AMOUNTS)) for i, kind in enumerate(kinds))
    )


def balanced(state: MemoryState) -> None:
    """Check that no amount is negative, and that the reserve of a group is the sum of its blocks."""
    blocks = [b for pod in state.assignments.values() for own in pod.values() for b in own]
    for i, node in state.nodes.items():
        assert node.assignments == sum(i in b.affinity for b in blocks)
        assert node.cells == next((b.affinity for b in blocks if i in b.affinity), Mask([i]))
        for name, table in node.tables.items():
            assert min(table.reserved, table.free) >= 0
            assert table.reserved + table.free == table.allocatable
            reserved = sum(state.nodes[j].tables[name].reserved for j in node.cells)
            assert reserved == sum(b.size for b in blocks if b.resource == name and b.affinity == node.cells)


def plain_hints(
    state: MemoryState, pod: PodRequests, amounts: Mapping[str, int], before: str
) -> list[TopologyHint]:
    """kubernetes v1.36 pkg/kubelet/cm/memorymanager/policy_static.go, step by step."""
    nodes, found, least = state.nodes, [], len(state.nodes)
    names = [a.name for a in pod.containers]
    for size in range(1, len(nodes) + 1):
        for taken in itertools.combinations(nodes, size):
            tables = {r: [nodes[i].table(r) for i in taken] for r in amounts}
            if any(sum(t.allocatable for t in tables[r]) < n for r, n in amounts.items()):
                continue
            least = min(least, size)
            if size == 1 and len(nodes[taken[0]].cells) > 1:
                continue
            used = [nodes[i] for i in taken if nodes[i].assignments]
            if size > 1 and any(len(n.cells) == 1 or n.cells != Mask(taken) for n in used):
                continue
            left = {
                r: sum(
                    b.size
                    for container in pod.containers[: names.index(before)]
                    if container.kind is ContainerKind.INIT
                    for b in state.blocks(pod.uid, container.name) or ()
                    if b.affinity == Mask(taken) and b.resource == r
                )
                for r in amounts
            }
            if all(sum(t.free for t in tables[r]) + left[r] >= n for r, n in amounts.items()):
                found.append(Mask(taken))
    return [TopologyHint(mask, len(mask) == least) for mask in found]


@settings(max_examples=60)
@given(MACHINES, st.tuples(pods("a"), pods("b"), pods("c")), st.data())
def test_memory_accounts_balance_after_any_sequence_of_operations(
    machine: tuple[NodeMemory, ...], given_pods: tuple[PodRequests, ...], data: st.DataObject
) -> None:
    empty = state = initial(machine, {0: {"memory": KI}})
    for _ in range(data.draw(st.integers(1, 14))):
        pod = data.draw(st.sampled_from(given_pods))
        name = data.draw(st.sampled_from([container.name for container in pod.containers]))
        act = data.draw(st.sampled_from(["allocate"] * 4 + ["release", "start", "restart"]))
        if act == "release":
            state = release(state, pod.uid, name)
        elif act == "start":
            state = start(state, pod, name)
        elif act == "restart":
            assert validated(state, machine, {0: {"memory": KI}}) is state, "a restart accepts the state"
        else:
            state = one_allocation(state, pod, name, data)
        balanced(state)
    for pod in given_pods:
        state = release_pod(state, pod.uid)
    assert not state.assignments
    assert difference(state, empty) == "", "all memory is released"


def one_allocation(state: MemoryState, pod: PodRequests, name: str, data: st.DataObject) -> MemoryState:
    amounts = pod.named(name).requests
    if state.blocks(pod.uid, name) is None:
        hints = container_memory_hints(state, pod, name) or {}
        expected = plain_hints(state, pod, amounts, name)
        assert hints == (dict.fromkeys(amounts, tuple(expected)) if expected else {})
        best = min(
            expected,
            key=lambda h: (not h.preferred, h.affinity and (len(h.affinity), h.affinity.bits)),
            default=None,
        )
    else:
        best = None
    nodes = data.draw(st.sets(st.sampled_from(sorted(state.nodes)), min_size=1).map(Mask))
    merged = data.draw(
        st.sampled_from(
            [OPEN, TopologyHint(None, True), TopologyHint(nodes, True), TopologyHint(nodes, False)]
        )
    )
    try:
        granted = allocate(state, pod, name, merged)
    except MemoryRejectedError:
        if merged == OPEN:
            assert best is None
        return state
    if merged.affinity is None and best is not None:
        assert nodes_of(granted) == best.affinity
    if best is not None:
        assert {b.resource: b.size for b in granted.blocks} == dict(amounts)
        assert not merged.affinity or merged.affinity <= nodes_of(granted)
    return granted.state


def test_kubelets_table_of_reusable_memory_matches_the_memory_of_init_containers() -> None:
    """The largest request of an init container can be taken over once."""
    sizes = {"i1": 7, "i2": 4, "i3": 9, "a1": 5, "a2": 6}
    kinds = [ContainerKind.INIT, ContainerKind.INIT, ContainerKind.INIT, ContainerKind.APP, ContainerKind.APP]
    containers = (
        ContainerResources(n, k, {"memory": s * KI}) for (n, s), k in zip(sizes.items(), kinds, strict=True)
    )
    pod = PodRequests("p", tuple(containers))
    state, charged = initial([NodeMemory(0, 64 * KI)], {0: {"memory": KI}}), []
    for container in pod.containers:
        state = allocate(state, pod, container.name, OPEN).state
        charged.append(state.nodes[0].tables["memory"].reserved // KI)
    assert charged == [7, 7, 9, 9, 11]
    with pytest.raises(KeyError):
        allocate(state, pod, "missing", OPEN)
