from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.admit import PodAdmission, admit, decides_pod
from proxy.engine.create import place
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.defects import InputDefect
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy
from proxy.model.options import TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import KubeQos, LocatedDevice, Phase, Pod, Pool, QosClass, Request
from proxy.topology.build import described
from tests.testkit.changed_copy import changed_copy

MACHINE = described(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15; cores 0,8 1,9 ...
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
GI = 1 << 30


def total(milli: int, limit: int | None = None, **more: object) -> Request:
    may = milli if limit is None else limit
    return Request(milli * 1024 // 1000, may * 100, 100_000, **more)  # type: ignore[arg-type]


def pod(qos: QosClass = QosClass.LSE, **more: object) -> Pod:
    return Pod("t-1", "u1", "ns", "p", qos=qos, **more)  # type: ignore[arg-type]


def admitted(state: NodeState, claiming: Pod, asked: Request) -> PodAdmission:
    got = admit(state, claiming, asked)
    assert got.verdict.admitted, got.verdict
    return got


@pytest.mark.parametrize("qos", [QosClass.LSE, QosClass.LSR])
def test_the_containers_of_a_pod_own_its_cpus_together(qos: QosClass) -> None:
    got = admitted(NodeState.empty(NODE), pod(qos), total(4000))
    assert got.pod.cpuset == CpuSet.parse("0-1,8-9")
    assert got.pod.cpuset_chosen_locally
    assert got.pod.reserved_for_pod is not None
    assert got.pod.reserved_for_pod.cpus == got.pod.cpuset
    state = got.state
    for name, milli in (("main", 3500), ("side", 500)):
        plan = place(state, got.pod, name, 0, total(milli), name)
        assert plan.container is not None
        placement = plan.container.placement
        assert (placement.pool, placement.exclusive, placement.mems) == (Pool.OWN, got.pod.cpuset, Mask((0,)))
        assert "were chosen for it when its sandbox was made" in placement.reasons[0]
        state = plan.state
    assert list(state.owners) == ["u1"]
    assert state.pools.shared == CpuSet.parse("2-7,10-15")
    assert state.pools.be == (state.pools.shared if qos is QosClass.LSE else MACHINE.online)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (total(1500), "request about 1500m CPU together and are limited to 1500m"),
        (total(2000, 4000), "request about 2000m CPU together and are limited to 4000m"),
        (Request(2048, 0, 100_000), "limited to nothing"),
        (Request(2048, -1, 100_000), "limited to nothing"),
    ],
)
def test_a_fraction_of_cpus_is_refused(asked: Request, words: str) -> None:
    state = NodeState.empty(NODE)
    got = admit(state, pod(kube_qos=KubeQos.BURSTABLE), asked)
    assert (got.verdict.code, got.verdict.reason, got.state) == (3, "InvalidCPURequest", state)
    assert words in got.verdict.message
    assert got.verdict.message.startswith("cannot place ns/p: LSE pod: ")
    assert got.explanation is not None
    assert got.explanation.verdict == got.verdict


def known(*asks: ContainerResources) -> PodRequests:
    return PodRequests("u1", asks)


def even(name: str, milli: int, kind: ContainerKind = ContainerKind.APP) -> ContainerResources:
    return ContainerResources(name, kind, {"cpu": milli}, {"cpu": milli})


def test_kubelets_facts_count_what_runs_together() -> None:
    asks = known(even("i", 8000, ContainerKind.INIT), even("s", 500, ContainerKind.SIDECAR), even("a", 1500))
    got = admitted(NodeState.empty(NODE), pod(asks=asks), total(8000))
    assert len(got.pod.cpuset or ()) == 2
    uneven = known(ContainerResources("a", ContainerKind.APP, {"cpu": 2000}, {"cpu": 3000}))
    said = admit(NodeState.empty(NODE), pod(asks=uneven), total(2000)).verdict.message
    assert "container a requests 2000m CPU and is limited to 3000m" in said


def test_the_topology_policy_and_the_bind_policy_hold_for_it() -> None:
    node = changed_copy(NODE, policy=TopologyPolicy.RESTRICTED)
    gpu = (LocatedDevice("g", "gpu", Mask((1,))),)
    spread = pod(bind_required=BindPolicy.SPREAD_BY_PCPUS)
    assert admitted(NodeState.empty(node), spread, total(4000, devices=gpu)).pod.cpuset == CpuSet.parse("4-7")
    wide = admit(NodeState.empty(node), pod(), total(10_000, devices=gpu))
    assert wide.verdict.reason == "TopologyAffinityError"
    full = pod(bind_required=BindPolicy.FULL_PCPUS)
    assert admit(NodeState.empty(NODE), full, total(3000)).verdict.reason == "CPUBindPolicyError"


def test_counted_memory_is_the_pods_as_a_whole() -> None:
    node = changed_copy(NODE, reserved_memory={0: {"memory": GI}})
    got = admitted(NodeState.empty(node), pod(), total(2000, memory_limit=3 * GI))
    assert got.pod.reserved_for_pod is not None
    assert [(str(b.affinity), b.size) for b in got.pod.reserved_for_pod.blocks] == [("0", 3 * GI)]
    assert got.state.memory is not None
    assert got.state.memory.nodes[0].table("memory").reserved == 3 * GI
    plan = place(got.state, got.pod, "main", 0, total(2000, memory_limit=3 * GI), "x")
    assert plan.container is not None
    assert (plan.container.placement.mems, plan.container.placement.blocks) == (Mask((0,)), ())
    assert plan.state.memory is not None
    assert plan.state.memory.nodes[0].table("memory").reserved == 3 * GI


def test_a_container_that_is_not_affected() -> None:
    assert not decides_pod(changed_copy(NODE, static=False), pod())
    for claiming in (
        pod(cpuset=CpuSet((1,))),
        pod(nodes=Mask((0,))),
        pod(defects=(InputDefect("x", decisive=True),)),
        pod(QosClass.LS),
        pod(QosClass.NONE),
    ):
        assert not decides_pod(NODE, claiming)
        assert admit(NodeState.empty(NODE), claiming, total(2000)).pod == claiming
    silent = admitted(NodeState.empty(NODE), pod(), Request(cpu_shares=2))
    assert (silent.pod.cpuset, silent.pod.reserved_for_pod) == (None, None), "an old kubelet tells no sums"


def test_a_node_that_is_full_refuses_and_changes_nothing() -> None:
    state = admitted(NodeState.empty(NODE), pod(), total(12_000)).state
    other = changed_copy(pod(), uid="u2", name="q", sandbox_id="t-2")
    got = admit(state, other, total(6000))
    assert (got.verdict.code, got.verdict.reason, got.state) == (9, "UnexpectedAdmissionError", state)
    last = admit(state, other, total(4000))
    assert (last.verdict.reason, last.state) == ("SharedPoolExhausted", state)


def test_a_sandbox_created_again_keeps_the_cpus() -> None:
    first = admitted(NodeState.empty(NODE), pod(), total(4000))
    plan = place(first.state, first.pod, "main", 0, total(4000), "x")
    assert plan.container is not None
    state = plan.state.changed(put=[plan.container.in_phase(Phase.EXITED)])
    again = changed_copy(pod(), sandbox_id="t-9", attempt=1)
    got = admitted(state, again, total(4000))
    assert (got.pod.cpuset, got.pod.cpuset_chosen_locally, got.pod.reserved_for_pod) == (
        first.pod.cpuset,
        True,
        first.pod.reserved_for_pod,
    )
