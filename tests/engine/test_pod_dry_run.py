"""Dry runs of the whole life of a pod."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.pod_dry_run import ArrivingPod, dry_run, without_pod
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests, peak_request
from proxy.model.workload import KubeQos, Phase, Pod, Pool, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MIB = 1 << 20
MACHINE = regular_machine(2, 1, 4, 2, mem_bytes_per_node=100 * MIB)
GPUS = {"gpu": {i: RegisteredDevice(i, Mask([n])) for n, i in enumerate("ab")}}


def node(policy: TopologyPolicy = TopologyPolicy.RESTRICTED, scope: Scope = Scope.CONTAINER) -> NodeState:
    return NodeState.empty(
        Node(
            MACHINE,
            CpuTopology.of(MACHINE),
            static=True,
            policy=policy,
            scope=scope,
            reserved_memory={0: {"memory": 10 * MIB}},
            devices=GPUS,
        )
    )


def resources(
    name: str, cpus: int, mib: int, kind: ContainerKind = ContainerKind.APP, gpus: int = 0
) -> ContainerResources:
    amounts = {"cpu": cpus * 1000, "memory": mib * MIB, **({"gpu": gpus} if gpus else {})}
    return ContainerResources(name, kind, amounts, amounts)


def arrival(uid: str, *containers: ContainerResources) -> ArrivingPod:
    def request(amounts: dict[str, int]) -> Request:
        return Request(amounts["cpu"] * 1024 // 1000, amounts["cpu"] * 100, 100_000, amounts["memory"])

    pod = Pod(f"s-{uid}", uid, "ns", uid, requests=PodRequests(uid, containers), source="its manifest")
    total = request(peak_request(containers, lambda one: one.requests))
    return ArrivingPod(pod, total, tuple((one.name, request(dict(one.requests))) for one in containers))


def devices(state: NodeState) -> DeviceState:
    return state.devices


LONG = arrival(
    "p",
    resources("i", 6, 80, ContainerKind.INIT, gpus=1),
    resources("s", 2, 10, ContainerKind.SIDECAR),
    resources("c", 4, 70, gpus=1),
)


def without_pods(state: NodeState, sandbox_ids: Iterable[str]) -> NodeState:
    """Remove pods, with all resources that were granted to them."""
    for sandbox_id in sandbox_ids:
        held = [container.id for container in state.in_sandbox(sandbox_id)]
        key = state.pods[sandbox_id].key
        state = state.changed(drop=held).without_pod(sandbox_id).without_devices(key)
    return state


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("policy", list(TopologyPolicy))
def test_a_pod_reuses_resources_of_its_init_containers(policy: TopologyPolicy, scope: Scope) -> None:
    result = dry_run(node(policy, scope), LONG)
    assert result.verdict.admitted
    assert [(c.name, c.phase, len(c.placement.exclusive)) for c in result.containers] == [
        ("i", Phase.EXITED, 6),
        ("s", Phase.RUNNING, 2),
        ("c", Phase.RUNNING, 4),
    ]
    first, side, app = (c.placement for c in result.containers)
    assert side.exclusive | app.exclusive == first.exclusive
    assert (first.devices, app.devices) == ((("gpu", ("a",)),), (("gpu", ("a",)),))
    assert result.state.memory is not None
    assert [n.table("memory").reserved // MIB for n in result.state.memory.nodes.values()] == [80, 0]
    assert len(result.state.pools.shared) == 10
    assert result.refused == ""
    decided = policy is not TopologyPolicy.NONE and scope is Scope.POD
    assert [why.ref for why in result.explanations] == ["ns/p"] * decided + ["ns/p/i", "ns/p/s", "ns/p/c"]
    assert violations(result.state) == []
    over = without_pods(result.state, ["s-p"])
    fresh = node(policy, scope)
    assert (over.pools, over.memory, devices(over)) == (fresh.pools, fresh.memory, devices(fresh))
    assert not over.pods
    assert not over.containers


@pytest.mark.parametrize("scope", list(Scope))
def test_the_state_after_a_dry_run_uses_ids_of_the_runtime(scope: Scope) -> None:
    state = dry_run(node(scope=scope), LONG).state
    assert list(state.pods) == ["s-p"]
    assert set(state.containers) == {"s-p/i", "s-p/s", "s-p/c"}
    assert not state.runtime.arriving_sandboxes
    assert not violations(state)


@pytest.mark.parametrize(
    ("scope", "refused", "placed", "explained"),
    [(Scope.CONTAINER, "c", ["i"], ["ns/p/i", "ns/p/c"]), (Scope.POD, "", [], ["ns/p"])],
)
def test_a_pod_with_a_refused_container_leaves_the_state_unchanged(
    scope: Scope, refused: str, placed: list[str], explained: list[str]
) -> None:
    state = dry_run(node(scope=scope), arrival("x", resources("c", 2, 30))).state
    result = dry_run(
        state,
        arrival(
            "p",
            resources("i", 2, 10, ContainerKind.INIT),
            resources("c", 2, 10, gpus=3),
            resources("d", 1, 1),
        ),
    )
    assert result.state is state
    assert not result.verdict.admitted
    assert (result.refused, [c.name for c in result.containers]) == (refused, placed)
    assert [why.ref for why in result.explanations] == explained
    assert result.explanations[-1].verdict == result.verdict


def test_sharing_pods_are_reported_too() -> None:
    pod = Pod("s", "u", "ns", "p", kube_qos=KubeQos.BEST_EFFORT)
    state = structs.replace(node(), node=changed_copy(node().node, devices={}))
    result = dry_run(state, ArrivingPod(pod, Request(), (("c", Request()),)))
    assert [(why.ref, why.pool) for why in result.explanations] == [("ns/p/c", "be")]
    assert result.containers[0].placement.pool is Pool.BE
    assert result.state.pods["s"] == pod


def test_machines_fill_up_and_empty_again() -> None:
    state, there = node(scope=Scope.POD), []
    for number in range(9):
        result = dry_run(state, arrival(f"p{number}", resources("c", 2, 20)))
        if result.verdict.admitted:
            there.append(f"s-p{number}")
        state = result.state
    assert len(there) == 7, "at least one CPU remains shared"
    assert state.cpus_set_aside() == MACHINE.online - state.pools.shared
    assert without_pods(state, there).pools.shared == CpuSet.parse("0-15")


def test_a_removed_pod_releases_its_cpus_and_memory() -> None:
    before = node()
    first = arrival("a", resources("main", 4, 20, gpus=1))
    placed = dry_run(before, first)
    assert placed.state.pools.shared != before.pools.shared
    after = without_pod(placed.state, first.pod.sandbox_id)
    assert violations(after) == []
    assert after.pools == before.pools
    assert dry_run(after, arrival("b", resources("main", 4, 20, gpus=1))).containers[
        0
    ].placement.exclusive == (placed.containers[0].placement.exclusive)
