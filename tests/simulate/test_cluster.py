from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.config import parse
from proxy.engine.invariants import violations
from proxy.model.workload import Pool
from proxy.pools.pod_spec import pod_spec
from proxy.simulate.cluster import NO_SUCH_MACHINE, Cluster, PodOutcome, Result
from proxy.simulate.machines import NamedMachine
from proxy.simulate.nodes import PODS
from proxy.simulate.pods import SimulatedPod, pod_template_of
from proxy.simulate.simulation import SimulationRules, simulated_nodes_of
from proxy.topology.regular_machine import regular_machine

MakePod = Callable[..., SimulatedPod]
MakeCluster = Callable[..., Cluster]
SINGLE = "cpuManagerPolicy: static\ntopologyManagerPolicy: single-numa-node"


def test_most_free_cpu_first_and_equal_ones_in_order(cluster: MakeCluster, pod: MakePod) -> None:
    three = cluster(3)
    results = three.run([pod(cpu=2, memory="1Gi"), pod(cpu=4, memory="1Gi")])
    assert [r.node_name for r in results] == ["m1", "m2"]
    more = three.run([pod(cpu=1, memory="1Gi") for _ in range(4)])
    # Free now: 14, 12, 16; then 14, 12, 15; then 14, 12, 14 and so on.
    assert [r.node_name for r in more] == ["m3", "m3", "m1", "m3"]


def test_fill_takes_the_fullest_that_fits(cluster: MakeCluster, pod: MakePod) -> None:
    three = cluster(3, fill=True)
    sizes = (10, 8, 6, 8, 9)
    results = three.run([pod(cpu=size, memory="1Gi") for size in sizes])
    assert [r.node_name for r in results] == ["m1", "m2", "m1", "m2", "m3"]


def test_shortages_of_a_machine_are_reported(cluster: MakeCluster, pod: MakePod) -> None:
    results = cluster(2).run(
        [
            pod(cpu=17, memory="1Gi"),
            pod(requests={"memory": "1Ti"}),
            pod(cpu=1, memory="1Gi", **{"example.com_gpu": 1}),
            pod("far", node_name="nowhere"),
            pod("bound", node_name="m2", cpu=17, memory="1Ti"),
        ]
    )
    assert {r.outcome for r in results} == {PodOutcome.UNSCHEDULABLE}
    assert [r.lacking for r in results] == [
        ("cpu",),
        ("memory",),
        ("example.com/gpu",),
        (),
        ("cpu", "memory"),
    ]
    assert results[0].message == "none of 2 machines fits: 2 have too little cpu"
    assert [r.reason for r in results] == ["Unschedulable"] * 3 + [NO_SUCH_MACHINE, "Unschedulable"]
    assert results[3].message == "it requires the machine nowhere, which is not among the machines"
    assert results[4].message == "m2 has too little cpu, memory"


def test_only_the_requested_machine_is_used(cluster: MakeCluster, pod: MakePod) -> None:
    results = cluster(3).run([pod(node_name="m3", requests={"cpu": 4}) for _ in range(5)])
    assert [r.node_name for r in results] == ["m3"] * 4 + [""]


def test_there_is_room_for_so_many_pods(cluster: MakeCluster, pod: MakePod) -> None:
    results = cluster(2, pods=2).run([pod() for _ in range(5)])
    assert [r.outcome for r in results] == [PodOutcome.PLACED] * 4 + [PodOutcome.UNSCHEDULABLE]
    assert results[-1].lacking == (PODS,)
    assert all(r.outcome is PodOutcome.PLACED for r in cluster(1, pods=0).run([pod() for _ in range(150)]))


def test_the_engine_rejects_and_nothing_is_kept(cluster: MakeCluster, pod: MakePod) -> None:
    one = cluster(config=SINGLE)
    before = dict(one.simulated_nodes[0].free)
    result = one.run([pod(cpu=10, memory="1Gi")])[0]
    assert (result.outcome, result.reason, result.node_name) == (
        PodOutcome.REJECTED,
        "TopologyAffinityError",
        "m1",
    )
    assert result.container == "c"
    assert "Resources cannot be allocated with Topology locality" in result.message
    assert one.simulated_nodes[0].free == before
    assert not one.simulated_nodes[0].owned
    assert one.simulated_nodes[0].pod_count == 0


def test_retry_continues_to_the_next_machine(pod: MakePod) -> None:
    machines = [
        NamedMachine("split", regular_machine(2, 1, 8)),
        NamedMachine("whole", regular_machine(1, 1, 8)),
    ]
    simulated_pods = [pod(node_name="split", cpu=9, memory="1Gi") for _ in range(2)]
    wide = pod(cpu=10, memory="1Gi")

    def last(*, retry: bool) -> Result:
        made = simulated_nodes_of(parse(SINGLE, "test"), machines, SimulationRules({}))
        return Cluster(made, fill=True, retry=retry).run([*simulated_pods, wide])[-1]

    # 14 CPUs are free in two pieces of 7, and 16 in one piece.
    refused, placed = last(retry=False), last(retry=True)
    assert (refused.outcome, refused.node_name, refused.tried) == (PodOutcome.REJECTED, "split", ("split",))
    assert (placed.outcome, placed.node_name, placed.tried) == (PodOutcome.PLACED, "whole", ("split",))


def test_explanations_are_kept_for_the_named_pods(cluster: MakeCluster, pod: MakePod) -> None:
    results = cluster().run(
        [pod("a", cpu=1, memory="1Gi"), pod("b", cpu=1, memory="1Gi")], explain=frozenset({"default/b"})
    )
    assert results[0].explanations == ()
    assert [reported.ref for reported in results[1].explanations] == ["default/b/c"]


def test_every_pod_is_counted(cluster: MakeCluster, pod: MakePod) -> None:
    steps: list[None] = []
    cluster().run([pod(), pod(cpu=99, memory=1), pod()], lambda: steps.append(None))
    assert len(steps) == 3


def test_allocatable_is_what_kubelet_would_report(simulated_nodes: Callable[..., list], pod: MakePod) -> None:
    gib = 1 << 30
    plain = simulated_nodes(config="cpuManagerPolicy: static")[0].offers
    assert (plain["cpu"], plain["memory"], plain[PODS]) == (16_000, 128 * gib - (100 << 20), 110)
    named = simulated_nodes(config="reservedSystemCPUs: 0-1\nkubeReserved: {cpu: 500m, memory: 1Gi}")[
        0
    ].offers
    assert (named["cpu"], named["memory"]) == (14_000, 127 * gib - (100 << 20))
    amounts = simulated_nodes(
        config="kubeReserved: {cpu: 500m}\nsystemReserved: {cpu: 250m}\nevictionHard: {memory.available: 1Gi}"
    )
    assert (amounts[0].offers["cpu"], amounts[0].offers["memory"]) == (15_250, 127 * gib)
    counted = simulated_nodes(
        config="memoryManagerPolicy: Static\nreservedMemory: [{numaNode: 0, limits: {memory: 2Gi}}]"
    )
    assert counted[0].offers["memory"] == 126 * gib


POD = st.tuples(
    st.sampled_from(["cpu", "half", "none"]), st.integers(1, 12), st.sampled_from(["", "m1", "m2"])
)


def _simulated_pod(number: int, kind: str, size: int, node_name: str) -> SimulatedPod:
    amounts = {"cpu": size if kind == "cpu" else f"{size * 500}m", "memory": f"{size}Gi"}
    resources = {} if kind == "none" else {"limits": amounts}
    raw = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"p{number}"},
        "spec": {"containers": [{"name": "c", "resources": resources}]},
    }
    return pod_template_of(pod_spec(raw), node_name).copy(f"p{number}", number)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(POD, max_size=25),
    st.sampled_from(["none", "best-effort", "restricted", "single-numa-node"]),
    st.booleans(),
    st.booleans(),
)
def test_sums_hold_for_any_pods(
    demands: list[tuple[str, int, str]], policy: str, fill: bool, retry: bool
) -> None:
    config = parse(f"cpuManagerPolicy: static\ntopologyManagerPolicy: {policy}", "test")
    machine = regular_machine(2, 1, 4)
    made = simulated_nodes_of(
        config, [NamedMachine("m1", machine), NamedMachine("m2", machine)], SimulationRules({})
    )
    cluster = Cluster(made, fill=fill, retry=retry)
    results = cluster.run([_simulated_pod(i, *demand) for i, demand in enumerate(demands)])
    for simulated_node in cluster.simulated_nodes:
        here = [r for r in results if r.outcome is PodOutcome.PLACED and r.node_name == simulated_node.name]
        assert not violations(simulated_node.state)
        assert simulated_node.pod_count == len(here)
        assert simulated_node.offers["cpu"] - simulated_node.free["cpu"] == sum(
            r.simulated_pod.needs.get("cpu", 0) for r in here
        )
        assert simulated_node.free["cpu"] >= 0
        own = [c for r in here for c in r.containers if c.placement.pool is Pool.OWN]
        assert len(simulated_node.owned) == sum(len(c.placement.exclusive) for c in own)
        assert not simulated_node.owned & simulated_node.ownable
    for result in results:
        fits = [h for h in cluster.simulated_nodes if not h.lacks(result.simulated_pod.needs)]
        if result.outcome is PodOutcome.UNSCHEDULABLE and not result.simulated_pod.node_name:
            assert not fits, "machines only fill up, so what fits now fitted then"
