"""A fourth provider, defined here and registered with the node by one entry; no other code refers to it.

It grants ways of the last-level cache: every NUMA node has a few, and a container requests some of them in
its limits. Its hints are merged with those of CPUs, memory and devices, its grants are part of placements and
of set-asides, they are counted as containers start and end, and refusals name the shortfall.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Self

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.providers.provider import Allocation, Provider, ProviderRequest, Serves
from proxy.allocation.rejection import AllocationRejectedError
from proxy.engine.adoption import adopt, with_unrecorded_grants
from proxy.engine.container_create import Plan, place
from proxy.engine.container_events import ContainerFound
from proxy.engine.node import PROVIDERS, Node
from proxy.engine.pod_admission import admit
from proxy.engine.pod_dry_run import ArrivingPod, dry_run
from proxy.engine.state import NodeState
from proxy.executor.ledger_codec import dump, load_container
from proxy.model.explanation import Shortfall
from proxy.model.grants import Grants, Share
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests, peak_request
from proxy.model.workload import Container, KubeQos, Phase, Pod, Pool, QosClass, Request
from proxy.observe.sentences import sections
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

RESOURCE = "example.com/cache-ways"
MACHINE = regular_machine(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15
NODE0, NODE1 = (node.cpus for node in MACHINE.nodes)


class NoCacheWaysError(AllocationRejectedError):
    """Too few cache ways are free."""

    reason = "CacheWaysError"


@dataclass(frozen=True, slots=True)
class CacheWays(Provider):
    """A provider that grants ways of the last-level cache.

    Attributes:
        ways: The number of ways by NUMA node.
        taken: The number of granted ways by NUMA node.
    """

    ways: Mapping[int, int]
    taken: Mapping[int, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "cache"

    @property
    def serves(self) -> Serves:
        return Serves.ALL

    @property
    def accounts(self) -> bool:
        return True

    def account(
        self,
        pods: Mapping[str, Pod],
        containers: Mapping[str, Container],
        changed_pods: Collection[Pod],
        changed: Collection[Container],
    ) -> Self:
        taken: dict[int, int] = {}
        shares = [s for c in containers.values() if c.phase is not Phase.EXITED for s in c.placement.shares]
        here = {(c.pod.key, c.name) for c in containers.values() if c.phase is not Phase.EXITED}
        for pod in pods.values():
            parts = pod.reserved_for_pod.parts if pod.reserved_for_pod else ()
            shares += [s for part in parts if (pod.key, part.name) not in here for s in part.shares]
        for share in shares:
            (node,) = share.nodes or ()
            taken[node] = taken.get(node, 0) + share.amount
        return changed_copy(self, taken=taken)

    def _count(self, request: ProviderRequest) -> int:
        if request.scope is Scope.POD:
            return peak_request(request.requests.containers, lambda container: container.limits).get(
                RESOURCE, 0
            )
        return request.requests.named(request.name).limits.get(RESOURCE, 0)

    def _free(self, node: int) -> int:
        return self.ways[node] - self.taken.get(node, 0)

    def _mine(self, request: ProviderRequest) -> Share | None:
        part = request.pod.reserved_for_pod.part(request.name) if request.pod.reserved_for_pod else None
        return part.shares[0] if part and part.shares else None

    def wants(self, request: ProviderRequest) -> bool:
        return self._count(request) > 0

    def hints(self, request: ProviderRequest) -> Hints:
        count = self._count(request)
        if not count:
            return None
        masks = [Mask(nodes) for size in (1, 2) for nodes in combinations(self.ways, size)]
        fitting = [mask for mask in masks if any(self._free(node) >= count for node in mask)]
        return {RESOURCE: tuple(TopologyHint(mask, len(mask) == 1) for mask in fitting)}

    def allocate(self, request: ProviderRequest, hint: TopologyHint, grants: Grants) -> Allocation:
        count = self._count(request)
        if not count:
            return Allocation(self, grants)
        if (mine := self._mine(request)) is not None:
            return Allocation(self, changed_copy(grants, shares=(*grants.shares, mine)))
        wanted = hint.affinity or MACHINE.nodes_of(grants.cpus) or Mask(self.ways)
        for node in [*wanted, *self.ways]:
            if self._free(node) >= count:
                share = Share(self.name, RESOURCE, count, Mask((node,)))
                after = changed_copy(self, taken={**self.taken, node: self.taken.get(node, 0) + count})
                granted = changed_copy(grants, shares=(*grants.shares, share))
                return Allocation(after, granted, [f"{count} ways on NUMA node {node}"])
        raise NoCacheWaysError(f"no NUMA node has {count} cache ways left")

    def release(self, grants: Grants) -> Grants:
        return changed_copy(grants, shares=tuple(s for s in grants.shares if s.provider != self.name))

    def adopt(self, pod: Pod, request: Request, mems: Mask, grants: Grants, *, running: bool) -> Grants:
        if grants.shares or pod.qos is not QosClass.LSR:
            return grants
        return changed_copy(grants, shares=(Share(self.name, RESOURCE, 1, Mask([0])),))

    def explain_shortfall(self, request: ProviderRequest, node: int) -> tuple[Shortfall, ...] | None:
        count = self._count(request)
        if self.ways[node] < count:
            return None
        free = self._free(node)
        return (Shortfall(RESOURCE, Mask((node,)), count, free),) if free < count else ()


def empty(policy: TopologyPolicy, scope: Scope = Scope.CONTAINER, ways: int = 8) -> NodeState:
    registered = (*PROVIDERS, lambda node: CacheWays({each.id: ways for each in node.machine.nodes}))
    topology = CpuTopology.of(MACHINE)
    return NodeState.empty(Node(MACHINE, topology, True, policy=policy, scope=scope, factories=registered))


def pod_with_ways(uid: str, ways: int, cpus: int = 2, **more: object) -> Pod:
    amounts = {"cpu": cpus * 1000}
    limits = {**amounts, RESOURCE: ways}
    return changed_copy(
        Pod(
            f"s-{uid}",
            uid,
            "ns",
            uid,
            requests=PodRequests(uid, (ContainerResources("c", ContainerKind.APP, amounts, limits),)),
        ),
        **more,
    )


def arrives(state: NodeState, pod: Pod, cpus: int = 2) -> Plan:
    request = Request(cpus * 1024, cpus * 100_000, 100_000)
    result = admit(state, pod, request)
    if not result.verdict.admitted:
        return Plan(result.verdict, state, explanation=result.explanation)
    return place(result.state.with_pod(result.pod), result.pod, "c", 0, request, f"{pod.uid}/c")


def taken(state: NodeState) -> Mapping[int, int]:
    (ways,) = (each for each in state.providers if isinstance(each, CacheWays))
    return ways.taken


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize(
    "policy", [TopologyPolicy.BEST_EFFORT, TopologyPolicy.RESTRICTED, TopologyPolicy.SINGLE_NUMA_NODE]
)
def test_hints_of_the_fourth_provider_determine_the_numa_node_of_the_cpus(
    policy: TopologyPolicy, scope: Scope
) -> None:
    first = arrives(empty(policy, scope), pod_with_ways("a", 6))
    assert first.container is not None
    assert first.container.placement.exclusive <= NODE0
    assert first.container.placement.shares == (Share("cache", RESOURCE, 6, Mask([0])),)
    assert taken(first.state) == {0: 6}
    second = arrives(first.state, pod_with_ways("b", 6))
    assert second.container is not None
    assert second.container.placement.exclusive <= NODE1, "its ways are on NUMA node 1"
    assert taken(second.state) == {0: 6, 1: 6}


@pytest.mark.parametrize("scope", list(Scope))
def test_a_refusal_names_the_missing_cache_ways_and_an_admission_the_granted_ways(scope: Scope) -> None:
    state = arrives(empty(TopologyPolicy.SINGLE_NUMA_NODE, scope), pod_with_ways("a", 6)).state
    state = arrives(state, pod_with_ways("b", 6)).state
    refused = arrives(state, pod_with_ways("c", 4))
    assert (refused.verdict.reason, refused.container) == ("TopologyAffinityError", None)
    assert refused.explanation is not None
    assert refused.explanation.shortfalls == (Shortfall(RESOURCE, Mask([0]), 4, 2),)
    assert f"{RESOURCE} cannot be given at all" in refused.verdict.message
    text = str(sections(refused.explanation))
    assert f"2 more of {RESOURCE}" in text
    never = arrives(state, pod_with_ways("d", 9))
    assert never.explanation is not None
    assert never.explanation.shortfalls == (), "no NUMA node has so many ways"
    fits = arrives(state, pod_with_ways("e", 2))
    assert fits.explanation is not None
    if scope is Scope.CONTAINER:
        assert [s.what for s in fits.explanation.steps if s.provider == "cache"] == ["2 ways on NUMA node 0"]
        assert [s.resource for s in fits.explanation.answers if s.provider == "cache"] == [RESOURCE]


def test_the_provider_is_called_for_sharing_containers_and_without_a_policy() -> None:
    shares = pod_with_ways("a", 3, kube_qos=KubeQos.BURSTABLE, qos=QosClass.LS)
    plan = arrives(empty(TopologyPolicy.NONE), shares)
    assert plan.container is not None
    assert plan.container.placement.pool is Pool.SHARED
    assert plan.container.placement.shares == (Share("cache", RESOURCE, 3, Mask([0])),)
    owns = arrives(empty(TopologyPolicy.NONE), pod_with_ways("a", 3))
    assert owns.container is not None
    (share,) = owns.container.placement.shares
    assert share.nodes == MACHINE.nodes_of(owns.container.placement.exclusive), (
        "it follows the CPUs granted before"
    )
    none_left = arrives(empty(TopologyPolicy.NONE, ways=2), shares)
    assert none_left.verdict.reason == "CacheWaysError"
    assert none_left.verdict.message == "CacheWaysError: no NUMA node has 3 cache ways left (ns/a/c)"


def test_the_provider_serves_a_container_with_cpus_named_by_a_scheduler() -> None:
    named = pod_with_ways("a", 3, qos=QosClass.LSE, cpuset=CpuSet.parse("4-5"))
    plan = arrives(empty(TopologyPolicy.RESTRICTED), named)
    assert plan.container is not None
    assert plan.container.placement.exclusive == CpuSet.parse("4-5")
    assert plan.container.placement.shares == (Share("cache", RESOURCE, 3, Mask([1])),)


def test_containers_get_the_cache_ways_that_were_set_aside_for_their_pod() -> None:
    containers = [
        ContainerResources(name, ContainerKind.APP, {"cpu": 1000}, {"cpu": 1000, RESOURCE: count})
        for name, count in (("x", 2), ("y", 3))
    ]
    pod = Pod("s-p", "p", "ns", "p", requests=PodRequests("p", tuple(containers)))
    result = admit(empty(TopologyPolicy.SINGLE_NUMA_NODE, Scope.POD), pod, Request(2048, 200_000, 100_000))
    assert result.pod.reserved_for_pod is not None
    assert [part.shares[0].amount for part in result.pod.reserved_for_pod.parts] == [2, 3]
    state = result.state.with_pod(result.pod)
    assert taken(state) == {0: 5}
    plan = place(state, result.pod, "y", 0, Request(1024, 100_000, 100_000), "p/y")
    assert plan.container is not None
    assert plan.container.placement.shares == result.pod.reserved_for_pod.parts[1].shares
    assert taken(plan.state) == {0: 5}, "what was set aside is counted once"
    assert taken(plan.state.changed(drop=["p/y"]).without_pod("s-p")) == {}


def test_an_init_container_releases_its_share_at_a_later_start() -> None:
    containers = [
        ContainerResources(name, kind, {"cpu": 1000}, {"cpu": 1000, RESOURCE: 2})
        for name, kind in (("i", ContainerKind.INIT), ("c", ContainerKind.APP))
    ]
    pod = Pod("s-p", "p", "ns", "p", requests=PodRequests("p", tuple(containers)))
    one = Request(1024, 100_000, 100_000)
    result = dry_run(empty(TopologyPolicy.RESTRICTED), ArrivingPod(pod, one, (("i", one), ("c", one))))
    assert result.verdict.admitted
    init, app = (result.state.containers[each.id] for each in result.containers)
    assert (init.phase, init.placement.shares) == (Phase.EXITED, ())
    assert app.placement.shares == (Share("cache", RESOURCE, 2, Mask([0])),)


def test_only_init_containers_that_have_ended_release_their_share() -> None:
    containers = [
        ContainerResources(name, kind, {"cpu": 1000}, {"cpu": 1000, RESOURCE: 1})
        for name, kind in (("i", ContainerKind.INIT), ("c", ContainerKind.APP), ("d", ContainerKind.APP))
    ]
    pod = Pod("s-p", "p", "ns", "p", requests=PodRequests("p", tuple(containers)))
    state = empty(TopologyPolicy.RESTRICTED).with_pod(pod)
    for name in "icd":
        state = place(state, pod, name, 0, Request(1024, 100_000, 100_000), name).state

    def holders_after(**phases: Phase) -> str:
        there = state.changed(put=[state.containers[name].in_phase(now) for name, now in phases.items()])
        after = there.started(there.containers["d"])
        bare = changed_copy(there.containers["d"], pod=changed_copy(pod, requests=None))
        assert there.started(bare) == after, "the sandbox is known with its requests"
        return "".join(sorted(name for name, each in after.containers.items() if each.placement.shares))

    assert holders_after(i=Phase.EXITED, c=Phase.EXITED, d=Phase.RUNNING) == "cd", "c may come back"
    assert holders_after(i=Phase.RUNNING, c=Phase.RUNNING, d=Phase.RUNNING) == "cdi"


def test_cache_ways_of_running_containers_without_a_record_are_counted() -> None:
    pod = Pod("s-p", "p", "ns", "p", qos=QosClass.LSR, kube_qos=KubeQos.BURSTABLE)
    plan = adopt(
        empty(TopologyPolicy.RESTRICTED), ContainerFound("id", pod, "c", 0, Request(512), Phase.RUNNING)
    )
    assert plan.container is not None
    assert taken(plan.state) == {0: 1}
    bare = changed_copy(plan.container.placement, shares=())
    recorded = NodeState.of(plan.state.node, (), [changed_copy(plan.container, placement=bare)])
    assert taken(recorded) == {}
    counted = with_unrecorded_grants(recorded)
    assert taken(counted) == {0: 1}
    assert with_unrecorded_grants(counted) is counted


def test_granted_cache_ways_survive_a_restart_and_a_change_of_the_machine() -> None:
    plan = arrives(empty(TopologyPolicy.RESTRICTED), pod_with_ways("a", 6))
    assert plan.container is not None
    again = load_container(dump(plan.container))
    assert again is not None
    node = plan.state.node.with_machine(
        changed_copy(MACHINE, cpus=tuple(c for c in MACHINE.cpus if c.id < 15))
    )
    assert taken(NodeState.of(node, (), [again])) == {0: 6}
