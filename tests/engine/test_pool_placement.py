"""The part of a pool that a container may use: by its pod's limit, by CPUs or NUMA nodes, and by hooks."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.node import Node
from proxy.engine.placement import moves, unmet_limit, with_burst_limit
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, NumaStrategy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.pools.claims import Claim
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 1)  # CPUs 0-3 and 4-7
NODE = Node(MACHINE, CpuTopology.of(MACHINE))
BURST = BindPolicy.CONSTRAINED_BURST
POD = Pod("s", "u", "ns", "p", bind_required=BURST)
SHARED = Claim(Pool.SHARED, "it shares")


def owner(cpus: str) -> Container:
    other = Pod("s-o", "o", "ns", "o")
    placement = Placement(Pool.OWN, CpuSet.parse(cpus), Mask((0,)))
    return Container("o", "c", other, Request(), placement, Phase.RUNNING, owner="o/c")


def state(*containers: Container, node: Node = NODE) -> NodeState:
    return NodeState.of(node, (POD,), containers)


def limit(milli: int, period: int = 100_000) -> Request:
    return Request(0, milli * (period or 100_000) // 1000, period)


@pytest.mark.parametrize(
    ("request_", "owned", "nodes"),
    [
        (limit(4000), "", "0"),
        (limit(4000, 50_000), "", "0"),
        (limit(4000, 0), "", "0"),
        (limit(4001), "", None),
        (limit(4001, 0), "", None),
        (limit(3000), "0", "0"),  # the smallest pool that is large enough
        (limit(4000), "0", "1"),
        (limit(1), "4-6", "1"),
        (limit(9000), "", None),  # more CPUs than the pool has
        (limit(1000), "4-7", None),  # one node has shared CPUs: all of the pool
        (Request(), "", None),
        (Request(cpu_quota=-1, cpu_period=100_000), "", None),
    ],
)
@pytest.mark.parametrize("requested", ["bind_required", "bind_preferred"])
def test_a_constrained_burst_stays_on_as_few_numa_nodes_as_have_its_limit(
    request_: Request, owned: str, nodes: str | None, requested: str
) -> None:
    there = state(*([owner(owned)] if owned else []))
    pod = changed_copy(changed_copy(POD, bind_required=BindPolicy.NONE), **{requested: BURST})
    found = with_burst_limit(there, pod, request_, SHARED)
    if nodes is None:
        assert found == SHARED
    else:
        reason = f"it shares, of NUMA node {nodes} (ConstrainedBurst)"
        assert found == changed_copy(SHARED, nodes=Mask.parse(nodes), reason=reason)


def test_the_strategy_of_the_node_decides_among_nodes() -> None:
    least = changed_copy(NODE, strategy=NumaStrategy.LEAST_ALLOCATED)
    assert with_burst_limit(state(owner("0"), node=least), POD, limit(3000), SHARED).nodes == Mask((1,))


@pytest.mark.parametrize(
    ("limits", "nodes"), [((2000, 2000), "0"), ((2000, 2001), None), ((2000, 0), None), ((), None)]
)
def test_the_limit_is_that_of_the_pod_if_kubelet_reports_it(
    limits: tuple[int, ...], nodes: str | None
) -> None:
    containers = tuple(ContainerResources(str(i), limits={"cpu": milli}) for i, milli in enumerate(limits))
    pod = changed_copy(POD, requests=PodRequests("u", containers))
    found = with_burst_limit(state(), pod, limit(1000), SHARED)
    assert found.nodes == (None if nodes is None else Mask.parse(nodes))


def test_a_pod_with_a_container_without_a_cpu_limit_is_not_limited() -> None:
    containers = ContainerResources("a", limits={"cpu": 2000}), ContainerResources("b")
    pod = changed_copy(POD, requests=PodRequests("u", containers))
    assert with_burst_limit(state(), pod, limit(1000), SHARED) == SHARED


INIT, SIDECAR, APP = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.APP


@pytest.mark.parametrize(
    ("limits", "nodes"),
    [
        ([(INIT, 3000), (APP, 2000)], "0"),  # one after the other
        ([(INIT, 5000), (APP, 2000)], None),  # the init container alone needs both nodes
        ([(INIT, 0), (APP, 2000)], "0"),
        ([(INIT, 2000), (APP, 0)], None),
        ([(SIDECAR, 3000), (APP, 2000)], None),  # at the same time
        ([(SIDECAR, 0), (APP, 2000)], None),
        ([(SIDECAR, 3000), (INIT, 2000), (APP, 1000)], None),
        ([(INIT, 2000), (SIDECAR, 3000), (APP, 1000)], "0"),
        ([(INIT, 2000)], None),
    ],
)
def test_the_limit_of_a_pod_counts_what_its_containers_use_at_the_same_time(
    limits: list[tuple[ContainerKind, int]], nodes: str | None
) -> None:
    containers = tuple(
        ContainerResources(str(i), kind, limits={"cpu": milli} if milli else {})
        for i, (kind, milli) in enumerate(limits)
    )
    pod = changed_copy(POD, requests=PodRequests("u", containers))
    found = with_burst_limit(state(), pod, limit(1000), SHARED)
    assert found.nodes == (None if nodes is None else Mask.parse(nodes))


@pytest.mark.parametrize(
    ("pod", "claimed"),
    [
        (changed_copy(POD, bind_required=BindPolicy.NONE), SHARED),
        (changed_copy(POD, bind_required=BindPolicy.FULL_PCPUS), SHARED),
        (POD, Claim(Pool.BE, "BE")),
        (POD, Claim(Pool.BE, "BE", within=CpuSet((1,)))),
        (POD, Claim(Pool.SYSTEM, "SYSTEM")),
        (POD, Claim(Pool.OWN, "own", count=1)),
        (POD, changed_copy(SHARED, nodes=Mask((1,)))),
    ],
)
def test_other_pods_and_pools_are_not_limited(pod: Pod, claimed: Claim) -> None:
    assert with_burst_limit(state(), pod, limit(1000), claimed) == claimed


@pytest.mark.parametrize(
    ("phase", "bound", "nodes"),
    [
        (Phase.RUNNING, True, "1"),
        (Phase.CREATED, True, "1"),
        (Phase.EXITED, True, "0"),
        (Phase.RUNNING, False, "0"),
    ],
)
def test_containers_of_a_pod_are_limited_alike(phase: Phase, bound: bool, nodes: str) -> None:
    numa = Mask((1,)) if bound else None
    placement = Placement(Pool.SHARED, CpuSet(), Mask((0, 1)), pool_numa_limit=numa)
    sibling = Container("a", "a", POD, Request(), placement, phase)
    found = with_burst_limit(state(sibling), POD, limit(1000), SHARED)
    assert found.nodes == Mask.parse(nodes)
    assert found.reason.endswith("as its pod is bound") is (nodes == "1")


@pytest.mark.parametrize(
    ("claimed", "lost_limit"),
    [
        (SHARED, ""),
        (changed_copy(SHARED, nodes=Mask((0,))), "shared pool on NUMA node 0: "),
        (changed_copy(SHARED, nodes=Mask((0, 1))), ""),
        (Claim(Pool.BE, "BE", within=CpuSet.parse("1-2")), "BE pool on CPUs 1-2: "),
        (Claim(Pool.BE, "BE", within=CpuSet.parse("1-4")), ""),
        (Claim(Pool.OWN, "own", cpus=CpuSet((1,)), nodes=Mask((0,))), ""),
    ],
)
def test_a_limit_that_leaves_no_cpus_is_reported(claimed: Claim, lost_limit: str) -> None:
    there = state(
        changed_copy(owner("0-3"), placement=changed_copy(owner("0-3").placement, excludes_be=True))
    )
    found = unmet_limit(there, claimed)
    assert found == (f"nothing is left of the {lost_limit}it runs on the whole pool" if lost_limit else "")


def pooled(phase: Phase = Phase.RUNNING, **limits: object) -> Container:
    placement = changed_copy(Placement(Pool.SHARED, CpuSet(), Mask((0, 1))), **limits)
    return Container("a", "a", POD, Request(), placement, phase)


OTHER = changed_copy(owner("4"), id="x", owner="x/c")
ON_NODE_1 = pooled(pool_numa_limit=Mask((1,)))


@pytest.mark.parametrize(
    ("before", "after", "shrink", "grow"),
    [
        pytest.param((pooled(),), (pooled(),), (), (), id="nothing changes"),
        pytest.param((pooled(),), (pooled(), owner("0-1")), ("a",), (), id="the pool loses CPUs"),
        pytest.param((pooled(), owner("0-1")), (pooled(),), (), ("a",), id="the pool gains CPUs"),
        pytest.param((pooled(),), (pooled(Phase.EXITED), owner("0-1")), (), (), id="it has exited"),
        pytest.param((owner("0"),), (pooled(), owner("0-1")), (), ("o",), id="it is new"),
        pytest.param((owner("0-1"),), (owner("0"),), ("o",), (), id="the owner loses a CPU"),
        pytest.param((owner("0-1"),), (owner("0-1"), OTHER), (), (), id="the owner keeps its CPUs"),
        pytest.param((owner("8-9"),), (owner("8-9"), OTHER), ("o",), (), id="the owner shares, offline"),
        pytest.param((ON_NODE_1,), (ON_NODE_1, OTHER), ("a",), (), id="its part of the pool loses a CPU"),
        pytest.param((ON_NODE_1, OTHER), (ON_NODE_1,), (), ("a",), id="its part of the pool gains a CPU"),
        pytest.param((ON_NODE_1,), (ON_NODE_1, owner("0")), (), (), id="the rest of the pool loses a CPU"),
        pytest.param(
            (pooled(), owner("0")),
            (pooled(pool_cpus_limit=CpuSet.parse("4-5")), owner("0-1")),
            ("a",),
            ("o",),
            id="it is limited to a part of the pool",
        ),
        pytest.param(
            (pooled(pool_numa_limit=Mask((1,))), owner("0-1")),
            (pooled(), owner("0")),
            ("o",),
            ("a",),
            id="it is no longer limited",
        ),
    ],
)
def test_containers_move_if_their_cpus_change(
    before: tuple[Container, ...],
    after: tuple[Container, ...],
    shrink: tuple[str, ...],
    grow: tuple[str, ...],
) -> None:
    assert moves(state(*before), state(*after)) == (shrink, grow)


def test_an_owner_moves_when_one_of_its_cpus_goes_offline_although_the_pools_do_not_change() -> None:
    rest = tuple(cpu for cpu in MACHINE.cpus if cpu.id != 1)
    nodes = tuple(changed_copy(node, cpus=node.cpus - CpuSet((1,))) for node in MACHINE.nodes)
    placement = changed_copy(owner("0-1").placement, excludes_be=True)
    whole = state(pooled(), changed_copy(owner("0-1"), placement=placement))
    smaller = whole.with_machine(changed_copy(MACHINE, cpus=rest, nodes=nodes))
    assert whole.pools == smaller.pools
    assert moves(whole, smaller) == (("o",), ())
    assert moves(smaller, whole) == ((), ("o",))
