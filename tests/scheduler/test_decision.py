"""Whether a node would admit a pod, and where the pod would be."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from proxy.engine.owners import ReservationCpus
from proxy.engine.pod_dry_run import dry_run
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.pools.topology_keys import CPU_OPTIONS, FIGURES
from proxy.scheduler.decision import NodeVerdict, _possibly_rejected, evaluate, expected_node
from proxy.scheduler.node_facts import SchedulableNode, join_facts, verdict_counts
from proxy.scheduler.node_table import ENOUGH_FITTING_NODES, NOT_EVALUATED, NodeTable
from proxy.scheduler.pod_demand import PodDemand, with_cpus
from proxy.scheduler.resource_topology import read_resource_topology
from tests.scheduler.objects import cpus, demand, node, resource_topology


def decide(found: SchedulableNode, pod: PodDemand, pending: Sequence[PodDemand] = ()) -> NodeVerdict:
    return evaluate(pod, expected_node(found, pending))


GPU, NIC = "example.com/gpu", "example.com/nic"


def two_numa_nodes(
    gpus: tuple[int, int] = (1, 1), nics: tuple[int, int] = (1, 1), reserve: int = 0
) -> SchedulableNode:
    zones = {
        numa: {
            "cpu": (4 + reserve, 4),
            "memory": (1 << 30, 1 << 30),
            GPU: (1, gpus[numa]),
            NIC: (1, nics[numa]),
        }
        for numa in (0, 1)
    }
    raw = resource_topology("n1", zones, "single-numa-node", "container")
    return join_facts("n1", None, None, read_resource_topology(raw))


def whole_cores_node(policy: str, reserved: CpuSet, owned: CpuSet) -> SchedulableNode:
    """Return a node with ``full-pcpus-only``: two NUMA nodes of the cores 0-1, 2-3, 4-5 and so on."""
    free = CpuSet(range(16)) - reserved - owned
    zones = resource_topology("n1", {numa: {"cpu": (8, 8)} for numa in (0, 1)}, policy, "container")
    zones["attributes"].append({"name": CPU_OPTIONS, "value": "full-pcpus-only=true"})
    return node("n1", zones, policy=policy, free=str(free), pods={"owner": str(owned)})


GPU_AND_NIC = {"devices": {GPU: "1", NIC: "1"}}


class TestFourCPUsAGPUAndANIC:
    """A pod of 4 CPUs, 200 MB, one GPU and one NIC on NUMA nodes of 4 CPUs, a GPU and a NIC each."""

    def test_combination_1_cpus_gpu_and_nic_of_numa_node_0(self) -> None:
        verdict = decide(two_numa_nodes(gpus=(1, 1)), demand("p", 4, **GPU_AND_NIC))
        assert verdict.fits
        assert (verdict.cpus, verdict.numa_nodes) == (cpus("0-3"), Mask([0]))

    def test_combination_2_cpus_gpu_and_nic_of_numa_node_1(self) -> None:
        verdict = decide(two_numa_nodes(gpus=(0, 1)), demand("p", 4, **GPU_AND_NIC))
        assert verdict.fits
        assert (verdict.cpus, verdict.numa_nodes) == (cpus("4-7"), Mask([1]))

    @pytest.mark.parametrize(("gpus", "nics"), [((0, 1), (1, 0)), ((1, 0), (0, 1))])
    def test_combination_3_across_numa_nodes_never(
        self, gpus: tuple[int, int], nics: tuple[int, int]
    ) -> None:
        verdict = decide(two_numa_nodes(gpus, nics), demand("p", 4, **GPU_AND_NIC))
        assert (verdict.fits, verdict.reason) == (False, "TopologyAffinityError")

    def test_a_second_pod_gets_the_other_combination(self) -> None:
        first = demand("first", 4, **GPU_AND_NIC)
        reserving = two_numa_nodes(reserve=1)
        verdict = decide(reserving, demand("second", 4, **GPU_AND_NIC), [first])
        assert (verdict.fits, verdict.numa_nodes) == (True, Mask([1]))
        third = decide(
            reserving, demand("third", 4, **GPU_AND_NIC), [first, demand("second", 4, **GPU_AND_NIC)]
        )
        assert not third.fits


def test_two_free_cpus_on_each_numa_node_do_not_fit_three() -> None:
    """The sum over the NUMA nodes suffices; kube-scheduler sees only the sum (kubernetes#84869)."""
    table = node(free="0-1,8-9")
    assert decide(table, demand("p", 2)).fits
    assert decide(table, demand("p", 3)).reason == "TopologyAffinityError"


@pytest.mark.parametrize(
    ("policy", "admitted"),
    [("none", True), ("best-effort", True), ("restricted", False), ("single-numa-node", False)],
)
def test_policies_decide_as_kubelet_does(policy: str, admitted: bool) -> None:
    assert decide(node(policy=policy, free="0-1,8-9"), demand("p", 3)).fits is admitted


def test_restricted_admits_what_no_numa_node_could_hold() -> None:
    assert decide(node(policy="restricted"), demand("p", 10)).fits
    assert not decide(node(policy="single-numa-node"), demand("p", 10)).fits


def test_containers_are_decided_one_by_one_or_as_a_pod() -> None:
    zones = {0: {"cpu": (8, 8)}, 1: {"cpu": (8, 8)}}
    by_container = node(zones=resource_topology("n1", zones, scope="container"))
    as_a_pod = node(zones=resource_topology("n1", zones, scope="pod"))
    pod = demand("p", 6, 6)
    assert decide(by_container, pod).numa_nodes == Mask([0, 1])
    assert decide(as_a_pod, pod).reason == "TopologyAffinityError"


def test_cpus_of_init_containers_are_reused() -> None:
    amounts = {"cpu": "8", "memory": "1Gi"}
    first = {"name": "first", "image": "x", "resources": {"requests": amounts, "limits": amounts}}
    pod = demand("p", 6, initContainers=[first])
    assert (pod.exclusive_cpus, pod.lasting_cpus) == (8, 6)
    verdict = decide(node(free="0-7"), pod)
    assert (verdict.fits, len(verdict.cpus)) == (True, 6)


def test_reserved_cpus_of_an_amount_are_not_assigned() -> None:
    assert node(reserved=2).free == cpus("2-15")
    assert decide(node(reserved=2), demand("p", 7)).numa_nodes == Mask([1])


@pytest.mark.parametrize("cpus_of", [(15,), (7, 8), (15, "100m")])
def test_a_strict_reserve_leaves_the_shared_pool_to_the_node(cpus_of: tuple[object, ...]) -> None:
    """kubelet admits the last pod, and in the objects of topoproxy the floor looks like a reserve."""
    zones = resource_topology("n1", {0: {}, 1: {}}, "none", "container")
    zones["attributes"].append({"name": CPU_OPTIONS, "value": "strict-cpu-reservation=true"})
    assert decide(node("n1", zones, reserved=1), demand("p", *cpus_of)).fits


def test_cpus_neither_free_nor_held_are_reserved() -> None:
    found = node(free="4-15", pods={"a": "2-3"})
    assert (found.reserved, found.free) == (cpus("0-1"), cpus("4-15"))


@pytest.mark.parametrize(
    ("node_policy", "static", "reason"),
    [
        ("single-numa-node", True, ""),
        ("restricted", True, "TopologyPolicyDiffers"),
        ("single-numa-node", False, "CPUManagerNotStatic"),
    ],
)
def test_volcanos_predicate_needs_a_static_cpu_manager_and_the_same_policy(
    node_policy: str, static: bool, reason: str
) -> None:
    requested = demand("p", 2, annotations={"volcano.sh/numa-topology-policy": "single-numa-node"})
    assert decide(node(policy=node_policy, static=static), requested).reason == reason


def test_lsr_pods_get_cpus_as_a_whole() -> None:
    pod = demand("p", 4, labels={"koordinator.sh/qosClass": "LSR"})
    verdict = decide(node(policy="none"), pod)
    assert (verdict.fits, len(verdict.cpus), len(verdict.numa_nodes)) == (True, 4, 1)


@pytest.mark.parametrize(
    ("wide", "fits"),
    [("0-1,8-9", False), ("0-3", True)],
)
def test_a_pod_that_keeps_apart_avoids_numa_nodes_of_pods_that_span_several(wide: str, fits: bool) -> None:
    """With a policy of its own, a pod keeps apart unless it says otherwise."""
    spec = {"scheduling.koordinator.sh/numa-topology-spec": '{"numaTopologyPolicy":"SingleNUMANode"}'}
    found = node(policy="none", pods={"wide": wide, "u": "12"}, free=str(cpus("0-11,13-15") - cpus(wide)))
    assert decide(found, demand("p", 2, annotations=spec)).fits is fits
    assert decide(found, demand("p", 2)).fits
    apart = node(policy="none", pods={"a": "0-1", "b": "8-9"}, free="2-7,10-15")
    spans = node(policy="none", pods={"a": "0,8", "b": "1,9"}, free="2-7,10-15")
    assert verdict_counts(apart) != verdict_counts(spans)


def test_a_node_that_names_no_pods_keeps_no_pod_apart() -> None:
    spec = {"scheduling.koordinator.sh/numa-topology-spec": '{"numaTopologyPolicy":"SingleNUMANode"}'}
    assert decide(node(policy="none", free="2-7,10-15"), demand("p", 2, annotations=spec)).fits


@pytest.mark.parametrize(("count", "fits"), [(6, True), (7, False)])
def test_lsr_pods_own_cpus_under_koordlet_though_kubelets_policy_is_none(count: int, fits: bool) -> None:
    detail = [{"id": c, "core": c // 2, "socket": c // 4, "node": c // 4} for c in range(8)]
    raw = resource_topology("n1", {0: {"cpu": (4, 4)}, 1: {"cpu": (4, 4)}}, "none")
    raw["metadata"]["annotations"] = {
        "node.koordinator.sh/cpu-topology": json.dumps({"detail": detail}),
        "node.koordinator.sh/pod-cpu-allocs": "[]",
        "kubelet.koordinator.sh/cpu-manager-policy": json.dumps({"policy": "none"}),
    }
    foreign = join_facts("n1", None, None, read_resource_topology(raw))
    lsr = demand("p", count, labels={"koordinator.sh/qosClass": "LSR"})
    other = demand("o", 1, labels={"koordinator.sh/qosClass": "LSR"})
    verdict = decide(foreign, lsr, [with_cpus(other, '{"cpuset":"0"}')])
    assert (verdict.fits, len(verdict.cpus)) == (fits, count * fits)
    assert not decide(foreign, demand("p", 4)).cpus
    table = NodeTable()
    table.put(foreign)
    assert bool(table.filter(demand("p", 9, labels={"koordinator.sh/qosClass": "LSR"})).failed)
    raw["metadata"]["annotations"][FIGURES] = "mode=enforce"
    own = join_facts("n1", None, None, read_resource_topology(raw))
    assert decide(own, lsr).fits, "an earlier agent of topoproxy, which does not say its own policy"
    assert not decide(own, lsr).cpus


def test_a_pod_does_not_fit_if_any_order_rejects_a_pending_pod() -> None:
    """If the large pod is bound first, it gets the large NUMA node; otherwise the small pod takes it."""
    half = node(free="0-5,8-9")
    large, small = demand("large", 6), demand("small", 2)
    assert decide(half, small).fits
    verdict = decide(half, small, [large])
    assert (verdict.fits, verdict.reason) == (False, "PendingPodsConflict")
    assert "default/large would be rejected" in verdict.message


def test_pods_that_demand_the_same_need_no_other_order() -> None:
    pending = [demand(f"p{number}", 4) for number in range(2)]
    assert decide(node(free="1-15"), demand("p2", 4), pending).fits
    assert not decide(node(free="1-15"), demand("p3", 4), [*pending, demand("p2", 4)]).fits


def test_nodes_of_one_class_get_the_verdict_of_their_own_cpus() -> None:
    """Nodes of one class in the table get the same verdict from their CPUs."""
    chance = random.Random(17)
    table = NodeTable()
    for number in range(60):
        taken = set(chance.sample(range(16), chance.choice((3, 6, 9, 12))))
        free = ",".join(str(cpu) for cpu in range(16) if cpu not in taken)
        policy = chance.choice(("single-numa-node", "restricted", "best-effort"))
        table.put(node(f"n{number}", free=free, policy=policy))
    names = [f"n{number}" for number in range(60)]
    for pod in (demand("a", 2), demand("b", 5), demand("c", 3, 2), demand("d", 8)):
        result = table.filter(pod, names)
        judged = [name for name in names if not result.failed.get(name, "").startswith(NOT_EVALUATED)]
        assert len(judged) > ENOUGH_FITTING_NODES
        assert result.fits
        assert set(result.fits) == {name for name in judged if table.place(name, pod).fits}


@pytest.mark.parametrize("policy", ["none", "best-effort", "restricted", "single-numa-node"])
@pytest.mark.parametrize("reserved", ["0-1", "0", ""])
def test_half_cores_are_decided_as_on_the_node(policy: str, reserved: str) -> None:
    """Owners have single threads there, and whole cores are required."""
    chance = random.Random(29)
    fits = Counter[bool]()
    for _ in range(60):
        rest = sorted(CpuSet(range(16)) - cpus(reserved))
        taken = CpuSet(chance.sample(rest, chance.choice((3, 6, 9))))
        taken |= CpuSet() if reserved else cpus("0-1")
        half = whole_cores_node(policy, cpus(reserved), taken)
        pod = demand("p", chance.choice((2, 4, 6)))
        owner = demand("owner", len(taken), labels={"koordinator.sh/qosClass": "LSR"})
        rules = half.rules.with_reserved_cpus(cpus(reserved)) if reserved else half.rules
        arrived = dry_run(NodeState.empty(rules), with_cpus(owner, f'{{"cpuset": "{taken}"}}').arrival())
        assert [each.placement.exclusive for each in arrived.containers] == [taken]
        outcome = dry_run(arrived.state, pod.arrival())
        verdict = decide(half, pod)
        assert verdict.fits is outcome.verdict.admitted, (taken, pod.exclusive_cpus)
        if verdict.fits:
            assert verdict.cpus == outcome.containers[0].placement.exclusive, (taken, pod.exclusive_cpus)
        fits[verdict.fits] += 1
    assert min(fits.values()) > 5


def test_half_cores_beside_owned_and_beside_reserved_cpus_are_counted_apart() -> None:
    """kubelet offers the sibling of a reserved CPU; that of an owned one is not offered."""
    reserved, owned = (
        whole_cores_node("single-numa-node", cpus(reserve), cpus(taken))
        for reserve, taken in (("0", "2-3"), ("2", "0,3"))
    )
    assert reserved.free == owned.free
    assert verdict_counts(reserved) != verdict_counts(owned)


def test_a_required_bind_policy_needs_a_trial_in_every_order() -> None:
    """There are enough free CPUs on each NUMA node, and too few whole cores."""
    found = node(free="1-15", pods={})
    plain = [demand("a", 2), demand("b", 2)]
    required = {"scheduling.koordinator.sh/resource-spec": '{"requiredCPUBindPolicy": "FullPCPUs"}'}
    bound = [demand("a", 2, annotations=required), demand("b", 2)]
    assert (_possibly_rejected(found, plain), _possibly_rejected(found, bound)) == (0, 1)


def test_where_each_pod_finds_room_after_all_others_the_order_does_not_matter() -> None:
    """The skipped trials would give the same result."""
    chance = random.Random(23)
    spacious = 0
    for _ in range(150):
        free = ",".join(str(cpu) for cpu in range(1, 16) if chance.random() < 0.85)
        found = node(free=free, pods={})
        pods = [demand(f"p{number}", chance.randint(1, 3)) for number in range(chance.randint(2, 4))]
        if _possibly_rejected(found, pods):
            continue
        spacious += 1
        for order in itertools.permutations(pods):
            assert not expected_node(found, order).rejected
    assert spacious > 20


def any_order_refuses(initial: NodeState, pods: list[PodDemand], ended: CpuSet) -> bool:
    """Try all orders of the pods, with the end of a pod that the object still shows in each place."""
    for order in itertools.permutations([*pods, None] if ended else pods):
        state = initial
        for each in order:
            if each is None:
                for key, reserved in state.reservation_cpus.items():
                    left = ReservationCpus(reserved.owner, reserved.cpus - ended)
                    state = state.with_reservation(key, left)
                continue
            outcome = dry_run(state, each.arrival())
            if not outcome.verdict.admitted:
                return True
            state = outcome.state
    return False


def test_a_pod_fits_beside_pending_ones_if_and_only_if_all_are_admitted_in_every_order() -> None:
    chance = random.Random(31)
    judged = Counter[tuple[bool, str]]()
    for number in range(70):
        free = CpuSet(cpu for cpu in range(1, 16) if chance.random() < 0.9)
        gone = CpuSet(chance.sample(range(1, 8), 2)) if number % 2 else CpuSet()
        kept = CpuSet(range(1, 16)) - free - gone
        found = node(free=str(free - gone), pods={"gone": str(gone), "kept": str(kept)})
        initial, pending = expected_node(found).state, list[PodDemand]()
        for count in range(4):
            labels = {"koordinator.sh/qosClass": "LSR"} if chance.random() < 0.4 else {}
            candidate = demand(f"p{count}", chance.randint(1, 5), labels=labels)
            verdict = evaluate(candidate, expected_node(found, pending, (gone,) if gone else ()))
            judged[verdict.fits, verdict.reason] += 1
            if not verdict.cpus and verdict.reason != "PendingPodsConflict":
                continue
            if labels:
                placed = dry_run(expected_node(found, pending).state, candidate.arrival()).containers[0]
                candidate = with_cpus(candidate, f'{{"cpuset":"{placed.placement.exclusive}"}}')
            if pending:
                assert verdict.fits is not any_order_refuses(initial, [*pending, candidate], gone)
            if verdict.fits:
                pending.append(candidate)
    assert judged[True, ""] > 100
    assert judged[False, "PendingPodsConflict"] > 20
