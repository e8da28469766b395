"""What one decision of the topology manager reads: the request, and the providers prepared for it."""

from __future__ import annotations

from typing import TypeVar

import pytest

from proxy.allocation.cpu_policy import CpuState
from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.providers.cpu import CpuProvider
from proxy.allocation.providers.memory import MemoryProvider
from proxy.allocation.providers.provider import Provider, ProviderRequest
from proxy.engine.admission_context import build_context, pod_requests
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.engine.topology_manager import AdmissionContext
from proxy.model.grants import Block
from proxy.model.idset import CpuSet, Mask
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import KubeQos, LocatedDevice, Pod, Request, SetAside
from proxy.topology.build import described
from tests.testkit.changed_copy import changed_copy

MACHINE = described(2, 1, 4, 2)  # CPUs 0-15
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
COUNTING = changed_copy(NODE, reserved_memory={0: {"memory": 1}})
P = TypeVar("P", bound=Provider)


def ask(name: str, cpus: int, kind: ContainerKind = ContainerKind.APP) -> ContainerResources:
    return ContainerResources(name, kind, {"cpu": cpus * 1000}, {"cpu": cpus * 1000})


ASKS = PodRequests(
    "p", (ask("i", 4, ContainerKind.INIT), ask("s", 1, ContainerKind.SIDECAR), ask("a", 2), ask("b", 2))
)
POD = Pod("s-p", "p", "ns", "p", asks=ASKS)
BARE = changed_copy(POD, asks=None)


def provider(context: AdmissionContext, kind: type[P]) -> P:
    (found,) = (each for each in context.providers if isinstance(each, kind))
    return found


def test_requests_come_from_kubelet_or_from_the_cri() -> None:
    request = Request(memory_limit=7, huge_pages=(("hugepages-2Mi", 2), ("hugepages-1Gi", 0)))
    assert pod_requests(POD, "a", request, 3) is ASKS
    assert pod_requests(POD, "", request, 3) is ASKS
    assert pod_requests(changed_copy(POD, uid="q"), "a", request, 3) == changed_copy(ASKS, uid="q")
    amounts = {"cpu": 3000, "memory": 7, "hugepages-2Mi": 2}
    made = PodRequests("p", (ContainerResources("x", ContainerKind.APP, amounts, amounts),), guaranteed=True)
    assert pod_requests(POD, "x", request, 3) == made, "kubelet does not know that container"
    assert pod_requests(BARE, "x", request, 3) == made
    burstable = changed_copy(BARE, kube_qos=KubeQos.BURSTABLE)
    assert pod_requests(burstable, "", Request(), 0) == PodRequests(
        "p", (ContainerResources(""),), guaranteed=False
    )


@pytest.mark.parametrize(
    ("bound", "whole", "binds"),
    [("", False, True), ("0", False, False), ("", True, False), ("0-1", True, False)],
)
def test_memory_bound_by_another_container_is_not_given(bound: str, *, whole: bool, binds: bool) -> None:
    blocks = (Block(Mask([0]), "memory", 5),) if whole else ()
    pod = changed_copy(POD, reserved_for_pod=SetAside(None, True, CpuSet(), blocks))
    request = Request(cpuset_mems=bound, devices=(LocatedDevice("x"),))
    asked = ProviderRequest(pod, ASKS, "a", request, exclusive=False)
    context = build_context(NodeState.empty(COUNTING), asked)
    assert provider(context, MemoryProvider).bound is not binds
    assert provider(context, CpuProvider).state == CpuState(), "no CPUs are offered where none may be owned"
    assert context.request.near == (LocatedDevice("x"),)
