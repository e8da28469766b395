"""The demand of a pod on a node, read from its Pod object.

A demand is the input of the engine of the node (``proxy.engine.pod_dry_run``). It also has a signature: pods
with equal signatures get equal answers from equal nodes, so replicas of a workload are evaluated once. The
namespace is part of it only where the rules of a node distinguish namespaces.

The annotation ``resource-status`` of an unbound pod is ignored: only the scheduler may write it, and an
annotation by the pod's author must not reserve CPUs. The annotation of a bound pod is read: its node follows
it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from proxy.allocation.cpu_request import CPU, MILLI, container_cpus, pod_cpus
from proxy.allocation.memory.request import gets_memory
from proxy.engine.pod_dry_run import ArrivingPod
from proxy.model.errors import InputError
from proxy.model.koordinator import NumaPolicy
from proxy.model.options import TopologyPolicy
from proxy.model.requests import ContainerKind, PodRequests, in_bytes
from proxy.model.workload import KubeQos, Pod, QosClass
from proxy.pools.annotations import ANNOTATION_KEYS, RESOURCE_STATUS
from proxy.pools.claims import STRICT
from proxy.pools.cri_resources import cri_request, pod_of, sandbox_total
from proxy.pools.facts import QOS_LABEL
from proxy.pools.pod_spec import PodSpec, counted_by_scheduler, pod_spec, requested_by, without_named_cpus
from proxy.scheduler.taints import Toleration, tolerations_of

SOURCE = "the Pod object"
ENDED = ("Succeeded", "Failed")
"""Phases in which a pod holds nothing."""


class PodDemand(Struct, frozen=True):
    """The demand of a pod.

    Attributes:
        key: The uid of the pod; if the object has none, ``namespace/name``.
        spec: The part of the Pod object that placement reads, without other labels and annotations.
        pod: The facts that the engine reads.
        signature: Equal for pods that demand the same, in any namespace.
        exclusive_cpus: The most exclusive CPUs that its containers hold at any time.
        lasting_cpus: Exclusive CPUs of the containers that stay, without those of init containers.
        devices: Extended resources and how many of each.
        needs: The amounts that the scheduler subtracts from a node, with the overhead of the runtime class:
            thousandths of CPUs, bytes, pieces.
        priority: ``spec.priority``.
        node: ``spec.nodeName``; empty while the pod is not bound.
        tolerations: Its tolerations; empty once the pod is bound.
    """

    key: str
    spec: PodSpec
    pod: Pod
    signature: Hashable
    exclusive_cpus: int
    lasting_cpus: int
    devices: Mapping[str, int]
    needs: Mapping[str, int]
    priority: int = 0
    node: str = ""
    tolerations: tuple[Toleration, ...] = ()

    @property
    def ref(self) -> str:
        """``namespace/name``."""
        return f"{self.spec.namespace}/{self.spec.name}"

    @property
    def volcano_policy(self) -> TopologyPolicy | None:
        """The policy that Volcano's annotation demands of the node; None if it demands none."""
        policy = self.pod.volcano_policy
        return None if policy is TopologyPolicy.NONE else policy

    @property
    def needs_alignment(self) -> bool:
        """Whether a node may reject the pod because CPUs, memory or devices are not on one NUMA node."""
        pod = self.pod
        return bool(
            self.exclusive_cpus
            or self.devices
            or pod.qos in STRICT
            or pod.kube_qos is KubeQos.GUARANTEED
            or pod.aligned is not NumaPolicy.NONE
            or self.volcano_policy is not None
        )

    @property
    def holds_resources(self) -> bool:
        """Whether the pod holds resources that the object of its node shows: exclusive CPUs, or devices."""
        return bool(self.exclusive_cpus or self.devices)

    def signature_for(self, *, by_namespace: bool) -> Hashable:
        """Return the signature for nodes whose rules do or do not distinguish namespaces."""
        return (self.spec.namespace, self.signature) if by_namespace else self.signature

    def owns_cpus(self, *, static: bool) -> bool:
        """Return whether a node gives the pod the exclusive CPUs that it requests.

        Args:
            static: Whether the CPU manager of the node is static.
        """
        if self.pod.cpuset and self.pod.qos is not QosClass.BE:
            return True
        return static and self.pod.qos in (QosClass.NONE, *STRICT)

    @property
    def holds_memory(self) -> bool:
        """Whether a static memory manager gives the pod memory of NUMA nodes."""
        return gets_memory(self.spec.requests)

    @property
    def largest_container_cpus(self) -> int:
        """The most CPUs that one container owns if the node's policy alone aligns the pod; otherwise 0."""
        if not self.exclusive_cpus or self.pod.qos in STRICT or self.pod.aligned is not NumaPolicy.NONE:
            return 0
        requests = self.spec.requests
        return max(container_cpus(requests, container) for container in requests.containers)

    def arrival(self) -> ArrivingPod:
        """Return the pod as it arrives at a node."""
        spec = self.spec
        requests = tuple(
            (container.name, cri_request(container, spec.requests.pod_level_limits))
            for container in spec.requests.containers
        )
        return ArrivingPod(self.pod, sandbox_total(spec.requests, spec.requests.pod_level_limits), requests)


def read_demand(raw: Mapping[str, Any]) -> PodDemand:
    """Read a Pod object.

    Raises:
        InputError: It is not a Pod, or a field has a wrong value.
    """
    spec = _placement_part(pod_spec(raw, listed=True))
    inner = raw.get("spec") or {}
    node = str(inner.get("nodeName") or "")
    if not node:
        spec = without_named_cpus(spec)
    priority = inner.get("priority")
    demand = demand_of(spec, node, priority if isinstance(priority, int) else 0)
    try:
        return demand if node else replace(demand, tolerations=tolerations_of(raw))
    except ValueError as error:
        raise InputError(f"cannot read the tolerations of {demand.ref}: {error}") from error


def demand_of(spec: PodSpec, node: str = "", priority: int = 0) -> PodDemand:
    """Return the demand of a pod.

    Args:
        spec: The pod.
        node: The node that it is bound to; empty while the pod is not bound.
        priority: ``spec.priority``.
    """
    key = spec.uid or f"{spec.namespace}/{spec.name}"
    pod = pod_of(replace(spec, uid=key, requests=replace(spec.requests, uid=key)), f"sandbox {key}", SOURCE)
    requested = requested_by(spec).items()
    devices = {name: amount for name, amount in requested if amount and _is_device(name)}
    strict = _strict_cpus(spec.requests) if pod.qos in STRICT else 0
    return PodDemand(
        key,
        spec,
        pod,
        _signature(spec),
        max(strict, pod_cpus(spec.requests)),
        max(strict, _lasting(spec.requests)),
        devices,
        {name: amount for name, amount in counted_by_scheduler(spec).items() if amount},
        priority,
        node,
    )


def has_ended(raw: Mapping[str, Any]) -> bool:
    """Return whether a Pod object shows that the pod has ended and holds nothing any more."""
    return (raw.get("status") or {}).get("phase") in ENDED


def with_cpus(demand: PodDemand, text: str) -> PodDemand:
    """Return the demand of a pod whose annotation ``resource-status`` names its CPUs."""
    spec = replace(demand.spec, annotations={**demand.spec.annotations, RESOURCE_STATUS: text})
    pod = pod_of(replace(spec, uid=demand.key), demand.pod.sandbox_id, SOURCE)
    return replace(
        demand, spec=spec, pod=replace(pod, requests=demand.pod.requests), signature=_signature(spec)
    )


def _placement_part(spec: PodSpec) -> PodSpec:
    """Return a pod with only those labels and annotations that are read: the demands of all pods are kept."""
    labels = {QOS_LABEL: spec.labels[QOS_LABEL]} if QOS_LABEL in spec.labels else {}
    annotations = {key: text for key, text in spec.annotations.items() if key in ANNOTATION_KEYS}
    return replace(spec, labels=labels, annotations=annotations)


def _is_device(name: str) -> bool:
    return name != CPU and not in_bytes(name) and "/" in name and "kubernetes.io/" not in name


def _lasting(requests: PodRequests) -> int:
    staying = requests.of_kinds(ContainerKind.APP, ContainerKind.SIDECAR)
    return sum(container_cpus(requests, container) for container in staying)


def _strict_cpus(requests: PodRequests) -> int:
    staying = requests.of_kinds(ContainerKind.APP, ContainerKind.SIDECAR)
    return sum(container.requests.get(CPU, 0) for container in staying) // MILLI


def _signature(spec: PodSpec) -> Hashable:
    requests = spec.requests
    containers = tuple(
        (
            container.name,
            container.kind,
            tuple(sorted(container.requests.items())),
            tuple(sorted(container.limits.items())),
        )
        for container in requests.containers
    )
    pod_requests = (
        None if requests.pod_level_requests is None else tuple(sorted(requests.pod_level_requests.items()))
    )
    wishes = tuple((key, spec.annotations[key]) for key in ANNOTATION_KEYS if key in spec.annotations)
    limits = tuple(sorted(spec.requests.pod_level_limits.items()))
    return containers, pod_requests, limits, spec.qos, spec.labels.get(QOS_LABEL, ""), wishes
