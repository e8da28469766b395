"""Answers of the pod-resources API for a state: kubelet's rules, and only applied placements."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.api.kubelet import podresources_pb2 as pb
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.frontends.podresources.server import allocatable_answer, pods_answer
from proxy.model.grants import Block
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.mode import NodeMode
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, Request
from proxy.topology.regular_machine import regular_machine

GIB = 1 << 30
MACHINE = regular_machine(2, 1, 4, 2, mem_bytes_per_node=8 * GIB)
WEB = Pod("s1", "u1", "shop", "web", kube_qos=KubeQos.GUARANTEED)
BATCH = Pod("s2", "u2", "shop", "batch", kube_qos=KubeQos.BURSTABLE)
BLOCKS = (Block(Mask([0, 1]), "memory", 2 * GIB), Block(Mask([0]), "hugepages-2Mi", 4 << 20))
OTHER_MODES = [mode for mode in NodeMode if mode is not NodeMode.ENFORCE]
UNKNOWN = b"\xfa\x3f\x03abc"
"""Field 1023, which no message declares."""


def owner(cpus: str = "2,10", pod: Pod = WEB, name: str = "main", **more: Any) -> Container:
    placement = Placement(Pool.OWN, CpuSet.parse(cpus), Mask([0, 1]), blocks=BLOCKS)
    placement = structs.replace(placement, **more.pop("placement", {}))
    phase = more.pop("phase", Phase.RUNNING)
    return Container(
        f"id-{pod.name}-{name}", name, pod, Request(), placement, phase, owner=f"{pod.uid}/{name}"
    )


def sharer(name: str = "main", pod: Pod = BATCH) -> Container:
    placement = Placement(Pool.SHARED, CpuSet(), Mask([0, 1]))
    return Container(f"id-{pod.name}-{name}", name, pod, Request(), placement, Phase.RUNNING)


def state(*containers: Container, pods: tuple[Pod, ...] = (WEB, BATCH), **more: Any) -> NodeState:
    machine: Machine = more.pop("machine", MACHINE)
    mode = more.pop("mode", NodeMode.ENFORCE)
    node = Node(machine, CpuTopology.of(machine), True, **more)
    return structs.replace(NodeState.of(node, pods, containers), mode=mode)


COUNTED = {0: {"memory": GIB}}


def devices(resource: str, *ids: str, nodes: tuple[int, ...] | None = None) -> pb.ContainerDevices:
    group = pb.ContainerDevices(resource_name=resource, device_ids=ids)
    if nodes is not None:
        group.topology.nodes.extend(pb.NUMANode(ID=node) for node in nodes)
    return group


def kubelet_pod(name: str, *containers: pb.ContainerResources, namespace: str = "shop") -> pb.PodResources:
    return pb.PodResources(name=name, namespace=namespace, containers=containers)


def kubelet(*pods: pb.PodResources) -> pb.ListPodResourcesResponse:
    return pb.ListPodResourcesResponse(pod_resources=pods)


def cpus(answer: pb.ListPodResourcesResponse) -> dict[str, dict[str, list[int]]]:
    return {p.name: {c.name: list(c.cpu_ids) for c in p.containers} for p in answer.pod_resources}


def memory(found: Any) -> list[tuple[str, int, list[int]]]:
    return [(m.memory_type, m.size, [node.ID for node in m.topology.nodes]) for m in found]


def test_owners_have_their_cpus_and_other_containers_none() -> None:
    answer = pods_answer(state(owner(), sharer(), sharer("side", WEB)), None)
    assert cpus(answer) == {"web": {"main": [2, 10], "side": []}, "batch": {"main": []}}
    assert [pod.name for pod in answer.pod_resources] == ["batch", "web"]
    assert {pod.namespace for pod in answer.pod_resources} == {"shop"}


def test_memory_is_reported_as_by_the_static_memory_manager() -> None:
    counted = pods_answer(state(owner(), sharer(), reserved_memory=COUNTED), None)
    batch, web = (pod.containers[0] for pod in counted.pod_resources)
    assert memory(web.memory) == [("memory", 2 * GIB, [0, 1]), ("hugepages-2Mi", 4 << 20, [0])]
    assert not batch.memory
    assert not pods_answer(state(owner()), None).pod_resources[-1].containers[0].memory


@pytest.mark.parametrize("mode", OTHER_MODES)
def test_a_plan_that_is_not_applied_is_not_reported(mode: NodeMode) -> None:
    planned = state(owner(), mode=mode, reserved_memory=COUNTED)
    answer = pods_answer(planned, None)
    assert cpus(answer) == {"web": {"main": []}, "batch": {}}
    assert not answer.pod_resources[-1].containers[0].memory
    assert allocatable_answer(planned, None) == pb.AllocatableResourcesResponse()
    mine = pb.ContainerResources(name="main", cpu_ids=[7], memory=[pb.ContainerMemory(memory_type="memory")])
    assert pods_answer(planned, kubelet(kubelet_pod("web", mine))).pod_resources[0].containers[0] == mine
    all_of_it = pb.AllocatableResourcesResponse(cpu_ids=[1, 2], memory=mine.memory)
    assert allocatable_answer(planned, all_of_it) == all_of_it


def test_only_pods_to_which_the_plan_is_applied_have_planned_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "proxy.frontends.podresources.server.applies_to", lambda _, pod: pod is None or pod.name == "web"
    )
    both = state(owner(), owner("3,11", BATCH))
    assert cpus(pods_answer(both, None)) == {"web": {"main": [2, 10]}, "batch": {"main": []}}
    listed = kubelet(kubelet_pod("batch", pb.ContainerResources(name="main", cpu_ids=[5])))
    assert cpus(pods_answer(both, listed)) == {"batch": {"main": [5]}, "web": {"main": [2, 10]}}


def test_of_two_attempts_the_newer_is_reported() -> None:
    older, newer = owner("3"), structs.replace(owner("2,10"), id="0", attempt=1)
    assert cpus(pods_answer(state(older, newer, pods=(WEB,)), None)) == {"web": {"main": [2, 10]}}


def recreated(*containers: Container, **more: Any) -> NodeState:
    """Return a node on which the pod ``RECREATED`` has come while ``WEB`` still ends."""
    node_state = state(*containers, pods=(WEB,), **more).with_pod(RECREATED)
    assert node_state.runtime.superseded == {WEB.key}
    return node_state


RECREATED = structs.replace(WEB, sandbox_id="s0", uid="u0")


@pytest.mark.parametrize("listed", [None, kubelet(kubelet_pod("web", pb.ContainerResources(name="main")))])
def test_a_pod_that_was_created_again_is_listed_in_place_of_the_old_one(
    listed: pb.ListPodResourcesResponse | None,
) -> None:
    old, old_side = structs.replace(owner("2,10"), attempt=3), owner("4,12", name="side")
    new = structs.replace(owner("3,11", RECREATED), id="new")
    assert cpus(pods_answer(recreated(old, old_side, new), listed)) == {"web": {"main": [3, 11]}}
    assert cpus(pods_answer(recreated(old), listed)) == {"web": {"main": []} if listed else {}}


def test_a_container_that_has_ended_owns_nothing() -> None:
    ended = owner(phase=Phase.EXITED)
    assert cpus(pods_answer(state(ended, pods=(WEB,)), None)) == {"web": {}}
    listed = kubelet(kubelet_pod("web", pb.ContainerResources(name="main")))
    assert cpus(pods_answer(state(ended), listed))["web"] == {"main": []}


def test_a_container_that_is_being_created_has_its_cpus_as_with_kubelet_from_admission_on() -> None:
    assert cpus(pods_answer(state(owner(phase=Phase.CREATING), pods=(WEB,)), None)) == {
        "web": {"main": [2, 10]}
    }


def test_offline_cpus_are_omitted_and_their_replacements_are_listed() -> None:
    whole = regular_machine(1, 1, 4, 1, mem_bytes_per_node=GIB)
    cpus_there = tuple(cpu for cpu in whole.cpus if cpu.id != 2)
    numa = structs.replace(whole.nodes[0], cpus=CpuSet.parse("0-1,3"))
    machine = dataclasses.replace(whole, cpus=cpus_there, nodes=(numa,))
    lacking = owner("1-2", placement={"replacement": CpuSet.parse("3"), "mems": Mask([0]), "blocks": ()})
    assert cpus(pods_answer(state(lacking, pods=(WEB,), machine=machine), None)) == {"web": {"main": [1, 3]}}


def test_only_app_containers_and_sidecars_are_listed_if_the_spec_is_known() -> None:
    kinds = {"setup": ContainerKind.INIT, "proxy": ContainerKind.SIDECAR, "main": ContainerKind.APP}
    pod_requests = PodRequests("u1", tuple(ContainerResources(name, kind) for name, kind in kinds.items()))
    pod = structs.replace(WEB, requests=pod_requests)
    answer = pods_answer(state(owner(name="setup", pod=pod), pods=(pod,)), None)
    assert cpus(answer) == {"web": {"proxy": [], "main": []}}


def test_kubelets_answer_is_completed_and_keeps_all_its_fields() -> None:
    gpu, claim = devices("nvidia.com/gpu", "GPU-0", nodes=(0,)), pb.DynamicResource(claim_name="c")
    main = pb.ContainerResources(name="main", devices=[gpu], dynamic_resources=[claim], cpu_ids=[9])
    main.MergeFromString(UNKNOWN)
    listed = kubelet(kubelet_pod("web", main), kubelet_pod("web", main, namespace="else"), kubelet_pod("new"))
    before = listed.SerializeToString()
    answer = pods_answer(state(owner(), owner("3", name="setup"), sharer()), listed)
    assert [(p.namespace, p.name) for p in answer.pod_resources] == [
        ("shop", "web"),
        ("else", "web"),
        ("shop", "new"),
        ("shop", "batch"),
    ]
    (container,) = answer.pod_resources[0].containers  # kubelet lists no init containers
    assert list(container.cpu_ids) == [2, 10]
    del container.cpu_ids[:], main.cpu_ids[:]
    assert container.SerializeToString() == main.SerializeToString()
    assert list(answer.pod_resources[1].containers[0].cpu_ids) == [9], "a pod that we do not know"
    assert listed.SerializeToString() == before, "the answer is shared with other requests"


def test_allocatable_cpus_are_all_but_the_reserved_ones() -> None:
    now = state(owner(), reserved=CpuSet.parse("0,8"), node_reservation=CpuSet.parse("1,9"))
    kubelet_answer = pb.AllocatableResourcesResponse(devices=[devices("x/nic", "a", nodes=(1,))], cpu_ids=[0])
    answer = allocatable_answer(now, kubelet_answer)
    assert list(answer.cpu_ids) == [2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15]
    assert answer.devices == kubelet_answer.devices
    assert not answer.memory
    assert list(kubelet_answer.cpu_ids) == [0]


def test_allocatable_memory_is_that_of_each_node_without_the_reserve() -> None:
    counted = state(owner(), reserved_memory={0: {"memory": GIB}, 1: {"memory": 8 * GIB}})
    assert counted.memory is not None
    assert counted.memory.nodes[0].table("memory").free < 7 * GIB
    answer = allocatable_answer(counted, pb.AllocatableResourcesResponse(memory=[pb.ContainerMemory(size=1)]))
    assert memory(answer.memory) == [("memory", 7 * GIB, [0])]


VF = "example.com/vf"
OUR_DEVICES = (
    DeviceState()
    .register(
        VF,
        [
            RegisteredDevice("a", Mask([0, 1])),
            RegisteredDevice("b"),
            RegisteredDevice("c", Mask([1]), healthy=False),
        ],
    )
    .give("u1", "main", VF, frozenset("ab"))
    .give("u1", "main", "example.com/gone", frozenset("z"))
)


def test_devices_assigned_by_topoproxy_are_listed_with_those_of_kubelet() -> None:
    kubelet_group = devices("nvidia.com/gpu", "GPU-0", nodes=(1,))
    kubelet_list = kubelet(kubelet_pod("web", pb.ContainerResources(name="main", devices=[kubelet_group])))
    for mode in (NodeMode.ENFORCE, NodeMode.OBSERVE):
        node_state = structs.replace(state(owner(), sharer(), mode=mode), devices=OUR_DEVICES)
        found = {
            p.name: list(p.containers[0].devices) for p in pods_answer(node_state, kubelet_list).pod_resources
        }
        assert found["batch"] == []
        assert found["web"] == [
            kubelet_group,
            devices("example.com/gone", "z"),
            devices(VF, "a", nodes=(0,)),
            devices(VF, "a", nodes=(1,)),
            devices(VF, "b"),
        ]
    assert len(kubelet_list.pod_resources[0].containers[0].devices) == 1, (
        "kubelet's cached answer is not changed"
    )


@pytest.mark.parametrize("containers", [(), (owner(phase=Phase.EXITED),)], ids=["not created", "ended"])
@pytest.mark.parametrize("is_specified", [False, True])
@pytest.mark.parametrize("is_listed", [False, True])
def test_devices_are_listed_from_admission_until_the_pod_is_gone(
    containers: tuple[Container, ...], is_specified: bool, is_listed: bool
) -> None:
    requests = PodRequests("u1", (ContainerResources("main", ContainerKind.APP),))
    pod = structs.replace(WEB, requests=requests if is_specified else None)
    held = DeviceState().give("u1", "main", VF, frozenset("a")).give("u1", "nothing", VF, frozenset())
    node_state = structs.replace(state(*containers, pods=(pod,)), devices=held)
    listed = kubelet(kubelet_pod("web", pb.ContainerResources(name="main"))) if is_listed else None
    answer = pods_answer(node_state, listed)
    assert cpus(answer) == {"web": {"main": []}}
    assert list(answer.pod_resources[0].containers[0].devices) == [devices(VF, "a")]


def test_devices_that_were_imported_from_kubelets_checkpoint_are_listed_once() -> None:
    other, imported = devices("nvidia.com/gpu", "GPU-0", nodes=(1,)), devices(VF, "a", "b", nodes=(0,))
    emptied = devices("example.com/empty", "e")
    main = pb.ContainerResources(name="main", devices=[imported, other, emptied])
    listed = kubelet(kubelet_pod("web", main))
    held = (
        DeviceState()
        .give("u1", "main", VF, frozenset("ab"))
        .give("u1", "main", "example.com/empty", frozenset())
    )
    for containers in ((owner(),), ()):
        node_state = structs.replace(state(*containers, pods=(WEB,)), devices=held)
        answer = pods_answer(node_state, listed)
        assert list(answer.pod_resources[0].containers[0].devices) == [
            other,
            emptied,
            devices(VF, "a"),
            devices(VF, "b"),
        ]
    assert list(main.devices) == [imported, other, emptied]


def test_devices_are_those_of_the_pod_that_is_listed() -> None:
    held = (
        DeviceState()
        .give(WEB.key, "main", VF, frozenset("a"))
        .give(RECREATED.key, "main", VF, frozenset("b"))
    )
    answer = pods_answer(structs.replace(recreated(owner()), devices=held), None)
    assert list(answer.pod_resources[0].containers[0].devices) == [devices(VF, "b")]


def test_healthy_devices_of_topoproxy_can_be_allocated_if_the_plan_is_applied() -> None:
    node_state = structs.replace(state(), devices=OUR_DEVICES)
    listed = pb.AllocatableResourcesResponse(devices=[devices("nvidia.com/gpu", "GPU-0")])
    found = [(d.resource_name, list(d.device_ids)) for d in allocatable_answer(node_state, listed).devices]
    assert found == [("nvidia.com/gpu", ["GPU-0"]), (VF, ["a"]), (VF, ["a"]), (VF, ["b"])]
    observed = structs.replace(node_state, mode=NodeMode.OBSERVE)
    assert list(allocatable_answer(observed, listed).devices) == list(listed.devices)
